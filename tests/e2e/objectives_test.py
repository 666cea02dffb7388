"""The loop closed by real processes: a service grows under load and shrinks after it, a job's GPUs get a limit.

The test plays the servers: it counts up what a vLLM server and a training job tell on
their pages. Everything else is real: the controller scrapes, decides, journals and sends
plans; an agent process with simulated nodes carries them out and tells what it read back.
"""

import contextlib
import threading
import time
from dataclasses import replace

from tests.agent_process import agent_process
from tests.builders.cluster import build_request
from tests.builders.profiles import build_engine_points
from tests.builders.server import run_controller
from tests.e2e.processes import fleet_of
from tests.fakes.metrics_servers import Listener, Replica, answer
from tests.waiting import wait_for, wait_until

from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import (
    EnforcementMode,
    GetInventoryRequest,
    GetPolicyRequest,
    GetSamplesRequest,
    GetWorkloadRequest,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    PoolMode,
    Reading,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    UpdatePolicyRequest,
    WorkloadKind,
)

NODE = {
    "name": "n-{index}",
    "count": 2,
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "g",
    "gpus": [{"product": "h100-sxm5-80gb", "model": "G2", "count": 4}],
}
WHOLE = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000)
QUICK = {"steer_s": 0.5, "scrape_s": 1.0, "scale_hold_s": 3.0, "job_window_s": 2.0}
STEP_S = 0.1


class Fleet:
    """What the servers of the test do, in a thread: one service at a rate, one job."""

    def __init__(self):
        self.rate_hz = 2.0
        self.replicas = {}
        self.work = 0.0
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live)

    def reply(self, path):
        """The page of one replica, which begins to be there when it is first asked; or of the job."""
        with self._lock:
            if path.startswith("/job"):
                return (answer(f"steps_total {self.work}\n".encode()),)
            number = int(path.split("/")[1])
            return self.replicas.setdefault(number, Replica()).reply()

    def _live(self):
        before = time.monotonic()
        while not self.done.wait(STEP_S):
            now = time.monotonic()
            with self._lock:
                self.work += 1000.0 * (now - before)
                self._serve(now - before)
            before = now

    def _serve(self, seconds):
        """Each replica does its share of the rate, at the speed of the profile; what is too much waits."""
        for replica in self.replicas.values():
            replica.arrived = getattr(replica, "arrived", 0.0) + self.rate_hz * seconds / len(self.replicas)
            came = replica.waiting + int(replica.arrived)
            replica.arrived -= int(replica.arrived)
            replica.room = min(40.0, getattr(replica, "room", 0.0) + 40.0 * seconds)
            served = min(came, int(replica.room))
            replica.room -= served
            replica.waiting = came - served
            held = min(4.0, self.rate_hz / len(self.replicas) / 10.0)
            replica.served(served, inter_s=0.01 * max(1.0, min(4.0, held + held**0.5)))

    def keep(self, numbers):
        """Replicas that are gone serve no more."""
        with self._lock:
            self.replicas = {number: one for number, one in self.replicas.items() if number in numbers}

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *reason):
        self.done.set()
        self._thread.join()


@contextlib.asynccontextmanager
async def agent(folder, address):
    """A process with simulated nodes; the address of its own API."""
    fleet = fleet_of(folder / "fleet.json", (NODE,))
    async with agent_process(address, fleet, folder / "agent.log") as told:
        yield told["listen"]


async def limit_w(listen, place):
    """What the sensors of the node itself say that the GPU is limited to."""
    async with transport.open_channel(listen, tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        inventory = (await node.get_inventory(GetInventoryRequest(node_name=place.node_name))).inventory
        samples = (await node.get_samples(GetSamplesRequest(node_name=place.node_name))).samples
    (column,) = [one for one in samples.gpu_columns if one.reading is Reading.POWER_LIMIT_W]
    limits = column.values[-len(inventory.gpus) :]
    (held,) = [limit for gpu, limit in zip(inventory.gpus, limits, strict=True) if gpu.uuid in place.gpu_uuids]
    return held


async def workload(rig, key):
    return (await rig.operators.get_workload(GetWorkloadRequest(workload_id=key))).workload


async def submit(rig, key, **spec):
    await rig.operators.submit_workload(build_request(key, name=key, **spec))


async def test_a_service_follows_its_load_and_a_job_finds_its_limit(tmp_path):
    with Fleet() as fleet, Listener(fleet.reply) as listener:
        async with run_controller(tmp_path / "data", **QUICK) as rig, agent(tmp_path, rig.address) as listen:
            await wait_until(lambda: rig.controller.agents.connected == 2, within_s=30.0)
            policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
            pools = (PoolMode(pool="g", mode=EnforcementMode.ENFORCE),)
            quick = replace(policy, pools=pools, send_interval_s=0.5, sample_interval_s=0.5)
            await rig.operators.update_policy(UpdatePolicyRequest(policy=quick))
            await _play(rig, fleet, listener.url.removesuffix("/metrics"), listen)


async def _play(rig, fleet, url, listen):
    await rig.controller.loop.record_measurements(build_engine_points())
    inter = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05)
    pages = MetricsSource(server=MetricsServer.VLLM, url=url + "/{replica}/metrics", model="m")
    promise = ServicePromise(
        profile="llm", objectives=(inter,), output_tokens=100.0, replicas_most=3, start_s=1.0, metrics=pages
    )
    await submit(rig, "chat", kind=WorkloadKind.INFERENCE_SERVICE, service=promise)
    counter = MetricsSource(server=MetricsServer.GENERIC, url=url + "/job/metrics", work_counter="steps_total")
    training = TrainingPromise(slowdown_most=0.2, metrics=counter)
    await submit(rig, "train", kind=WorkloadKind.TRAINING_JOB, training=training)

    async def replicas():
        placements = (await workload(rig, "chat")).placements
        fleet.keep({one.replica for one in placements})
        return placements

    async def grown():
        return len(await replicas()) >= 3

    async def shrunk():
        return len(await replicas()) <= 2

    async def limited():
        job = await workload(rig, "train")
        wanted_w = job.power_limit_w or 700.0
        return wanted_w < 700.0 and abs(await limit_w(listen, job.placements[0]) - wanted_w) <= 1.0

    fleet.rate_hz = 80.0
    await wait_for(grown, within_s=60.0)
    held = [uuid for one in await replicas() for uuid in one.gpu_uuids]
    assert len(set(held)) == len(held)
    await wait_for(limited, within_s=60.0)
    fleet.rate_hz = 2.0
    await wait_for(shrunk, within_s=90.0)
    found = rig.controller.objectives.promises()
    assert found.services[0].replicas_wanted <= 2
    assert rig.controller.objectives.failures == 0
