"""A small living fleet under a real Prometheus: what dashboards are tried on and drawn from.

Owns the scene: a controller, two agents with one simulated node each, a service under a
changing load, two training jobs, work that has to wait, a budget and a tariff. Must not know
panels. `python -m tests.dashboards_rig --seconds 240` draws the pictures of docs/dashboards.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from eelgrid_protos.messages import (
    BudgetScope,
    CancelWorkloadRequest,
    EnergyPrices,
    EnforcementMode,
    GetPolicyRequest,
    GetWorkloadRequest,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    PoolMode,
    PowerBudget,
    PricePeriod,
    ServicePromise,
    SpendingPeriod,
    SpendingQuantity,
    TrainingPromise,
    UpdatePolicyRequest,
    WorkloadKind,
)
from tests.agent_process import agent_process
from tests.builders.cluster import build_request, build_spending_limit
from tests.builders.profiles import build_engine_points
from tests.builders.server import run_controller
from tests.e2e.objectives_test import Fleet
from tests.e2e.processes import free_address
from tests.fakes.metrics_servers import Listener, answer
from tests.waiting import wait_until

# Each node is an agent of its own: one that simulates several tells nothing of their devices.
MODEL = "H100-80GB-HBM3"
NODES = (
    {"name": "gpu-1", "pool": "serving", "gpus": [{"product": "h100-sxm5-80gb", "count": 4}]},
    {
        "name": "gpu-2",
        "pool": "research",
        "gpus": [{"product": "a100-sxm4-80gb", "count": 3}, {"product": "h100-sxm5-80gb", "mig": ["3g@4", "1g@0"]}],
    },
)
QUICK = {"steer_s": 0.5, "scrape_s": 1.0, "scale_hold_s": 3.0, "job_window_s": 2.0}
SCRAPE_S = 1.0
# The ledger hears of joules once their window is over: seconds, not the minute of a real node.
WINDOW_S = 5.0
# Requests per second, one after the other while the scene lasts.
LOADS_HZ = (40.0, 80.0, 10.0)
# How long somebody tries something on a quarter of a GPU.
TRIAL_S = 8.0


class Served(Fleet):
    """The servers of the scene, with one page more: what Prometheus would read from all of them."""

    def reply(self, path):
        if not path.startswith("/prometheus"):
            return super().reply(path)
        with self._lock:
            tokens = sum(one.output for one in self.replicas.values())
            requests = sum(one.finished for one in self.replicas.values())
            rows = (
                ("vllm:generation_tokens_total", "chat", tokens),
                ("vllm:request_success_total", "chat", requests),
                ("steps_total", "train", self.work),
            )
        text = "".join(f'{name}{{workload="{workload}"}} {value}\n' for name, workload, value in rows)
        return (answer(text.encode(), fields=(b"Content-Type: text/plain",)),)


@contextlib.asynccontextmanager
async def agent(folder, address, node):
    """An agent of one node; the address of its metrics."""
    name = node["name"]
    fleet, log = folder / f"{name}.json", folder / f"{name}.log"
    fleet.write_text(json.dumps({"nodes": [{"cpu_milli": 64_000, "memory_bytes": 2**38, **node}]}))
    async with agent_process(address, fleet, log, "--energy-window", str(WINDOW_S)) as told:
        yield told["metrics"]


@contextlib.contextmanager
def prometheus(folder, controller, agents, pages):
    """A Prometheus that scrapes them each second; its address."""
    address = free_address()
    jobs = (("controller", [controller]), ("agent", agents), ("workloads", [pages]))
    scraped = [
        {
            "job_name": name,
            "honor_labels": True,
            "metrics_path": "/prometheus" if name == "workloads" else "/metrics",
            "static_configs": [{"targets": targets}],
        }
        for name, targets in jobs
    ]
    timing = {"scrape_interval": f"{SCRAPE_S:g}s", "scrape_timeout": f"{SCRAPE_S:g}s"}
    (folder / "prometheus.yml").write_text(json.dumps({"global": timing, "scrape_configs": scraped}))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _policy(before):
    price = (
        PricePeriod(begins_minute=0, price_per_kwh=0.24, carbon_kg_per_kwh=0.2),
        PricePeriod(begins_minute=480, price_per_kwh=0.36, carbon_kg_per_kwh=0.3),
    )
    return replace(
        before,
        pools=tuple(PoolMode(pool=node["pool"], mode=EnforcementMode.ENFORCE) for node in NODES),
        send_interval_s=0.5,
        sample_interval_s=0.5,
        budgets=(
            PowerBudget(scope=BudgetScope.CLUSTER, limit_w=4200.0),
            PowerBudget(scope=BudgetScope.NODE, name="gpu-1", limit_w=2600.0),
        ),
        prices=EnergyPrices(currency="EUR", periods=price, pue=1.2, carbon_price_per_kg=0.1),
        spending=(
            build_spending_limit(name="default", mode=EnforcementMode.OBSERVE),
            build_spending_limit(
                name="default",
                quantity=SpendingQuantity.MONEY,
                most=5.0,
                period=SpendingPeriod.MONTH,
                mode=EnforcementMode.OBSERVE,
            ),
        ),
    )


async def _submit(rig, key, *, gpus=1, milli=1000, models=(), **spec):
    await rig.operators.submit_workload(build_request(key, name=key, gpus=gpus, milli=milli, models=models, **spec))


async def _submit_all(rig, url):
    """A service, two jobs, some that have a place and one that waits."""
    await rig.controller.loop.record_measurements(build_engine_points(model=MODEL))
    inter = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05)
    pages = MetricsSource(server=MetricsServer.VLLM, url=url + "/{replica}/metrics", model="m")
    promise = ServicePromise(
        profile="llm", objectives=(inter,), output_tokens=100.0, replicas_most=3, start_s=1.0, metrics=pages
    )
    await _submit(rig, "chat", models=(MODEL,), kind=WorkloadKind.INFERENCE_SERVICE, service=promise)
    counter = MetricsSource(server=MetricsServer.GENERIC, url=url + "/job/metrics", work_counter="steps_total")
    training = TrainingPromise(slowdown_most=0.2, metrics=counter)
    await _submit(rig, "train", models=(MODEL,), kind=WorkloadKind.TRAINING_JOB, training=training)
    await _submit(rig, "notebook", milli=500)
    await _submit(rig, "wide", gpus=4, models=(MODEL,))


async def _steer(rig, fleet, seconds):
    """The load changes by thirds, and people try things; replicas that are gone serve no more."""
    began_s, trial = time.monotonic(), 0
    while (passed := time.monotonic() - began_s) < seconds:
        fleet.rate_hz = LOADS_HZ[min(int(passed / seconds * len(LOADS_HZ)), len(LOADS_HZ) - 1)]
        chat = (await rig.operators.get_workload(GetWorkloadRequest(workload_id="chat"))).workload
        fleet.keep({one.replica for one in chat.placements})
        if passed > trial * TRIAL_S:
            if trial:
                await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id=f"trial-{trial}"))
            trial += 1
            await _submit(rig, f"trial-{trial}", milli=250)
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def scene(folder, *, seconds):
    """The fleet after it has lived so long, still living: Prometheus' address, and when it began."""
    with Served() as fleet, Listener(fleet.reply) as listener:
        async with contextlib.AsyncExitStack() as held:
            rig = await held.enter_async_context(run_controller(folder / "data", **QUICK))
            agents = [await held.enter_async_context(agent(folder, rig.address, node)) for node in NODES]
            url = listener.url.removesuffix("/metrics")
            with prometheus(folder, rig.metrics, agents, url.removeprefix("http://")) as address:
                await wait_until(lambda: rig.controller.agents.connected == len(NODES), within_s=30.0)
                policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
                await rig.operators.update_policy(UpdatePolicyRequest(policy=_policy(policy)))
                began_s = time.time()
                await _submit_all(rig, url)
                await _steer(rig, fleet, seconds)
                yield address, began_s


async def _draw(seconds, out):
    from deploy.dashboards.draw import draw_all

    with tempfile.TemporaryDirectory() as folder:
        async with scene(Path(folder), seconds=seconds) as (address, began_s):
            now_s = time.time()
            await asyncio.to_thread(draw_all, address, out, begin_s=began_s, end_s=now_s, rate_interval="30s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("docs/images/dashboards"))
    given = parser.parse_args()
    asyncio.run(_draw(given.seconds, given.out))
