"""Ray with a controller: submission to start, how long replicas of Serve take and whose time it is, joules by job.

A real Ray of two raylets with fake GPUs on loopback (tests/ray_rig.py), followed by a controller, with an agent of simulated GPUs
for both nodes. First one program reserves a GPU and starts an actor there, by Ray's placement groups alone and by
`eelgrid.ray.place`, in turn. Then a deployment of Serve is scaled from 1 to 3 replicas by its workload, and another one by
Serve's own endpoint, in turn: until Serve aims at three is ours; from then on Ray launches two workers, which import Ray and
become ready, and Serve makes replicas of them. The moments of workers are those that the raylets note. Last, jobs of the Jobs
API hold GPUs, and their energy is read by job.

Targets: three replicas run at most 2 s after the workload has three places.
"""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import click
from tests.ray_rig import GPUS, MISSING, RayCluster
from tests.waiting import poll_until

from bench.processes import free_port, running, spread
from bench.runner import Options, Progress, Unusable, benchmark, report_promise
from bench.tables import write_csv
from eelgrid import Client
from eelgrid.ray import build_serve_spec
from eelgrid_protos.messages import NodeState, WorkloadPhase

_TARGET_S = 2.0
_START_S, _ROUND_S = 120.0, 180.0
_REPLICAS = 3
_SCALERS = ("workload", "serve")
_PROGRAM = """
import json, eelgrid, eelgrid.ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
@ray.remote
class Worker:
    def answer(self):
        return True
def run(placed):
    begun_s = time.monotonic()
    if placed:
        with eelgrid.ray.place(client, gpus=1, cpus=1) as found:
            reserved_s = time.monotonic()
            ray.get(Worker.options(**found.options(0)).remote().answer.remote())
            started_s = time.monotonic()
    else:
        group = placement_group([{"GPU": 1, "CPU": 1}])
        group.wait(60)
        reserved_s = time.monotonic()
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        ray.get(Worker.options(num_gpus=1, num_cpus=1, scheduling_strategy=strategy).remote().answer.remote())
        started_s = time.monotonic()
        remove_placement_group(group)
    print(json.dumps([reserved_s - begun_s, started_s - begun_s]), flush=True)
with eelgrid.Client() as client:
    for line in sys.stdin:
        run(line.strip() == "placed")
"""
_APPLICATION = """
from ray import serve
@serve.deployment(name="Echo", ray_actor_options={"num_cpus": 0.5, "num_gpus": 1})
class Echo:
    def __call__(self, request):
        return "ok"
app = Echo.bind()
"""
_JOB = """
import sys, time, ray
ray.init()
@ray.remote(num_gpus=1, num_cpus=1)
class Holder:
    def ready(self):
        return True
held = [Holder.remote() for _ in range(int(sys.argv[1]))]
ray.get([one.ready.remote() for one in held])
time.sleep(3600)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Seconds from the call until a GPU is reserved, and until an actor has answered from there."""

    mode: str
    reserved_s: float
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """Seconds from the call that scales until Serve aims at all replicas, workers are launched, ready, and all replicas run.

    The mode is what was told: the workload, or Serve's own endpoint. The moments of workers are of the last new one; one that
    was there before counts from the beginning.
    """

    mode: str
    target_s: float
    launched_s: float
    ready_s: float
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnergy:
    """A job of the Jobs API: after how many seconds it was a workload, and joules by then."""

    job: str
    gpus: int
    known_s: float
    held_s: float
    energy_j: float


def split_replica_times(
    mode: str,
    new: Iterable[int],
    *,
    begun_s: float,
    target_s: float,
    running_s: float,
    workers: Iterable[Mapping[str, Any]],
) -> ReplicaTimes:
    """Splits the time of a scaling by the workers whose processes are the new replicas; moments are seconds since 1970."""
    pids = set(new)
    mine = [one for one in workers if one.get("pid") in pids and one.get("worker_type") == "WORKER"]
    moments = {
        name: max([begun_s, *(float(one.get(name) or 0) / 1000.0 for one in mine)]) - begun_s
        for name in ("worker_launched_time_ms", "start_time_ms")
    }
    return ReplicaTimes(
        mode=mode,
        target_s=target_s - begun_s,
        launched_s=moments["worker_launched_time_ms"],
        ready_s=moments["start_time_ms"],
        running_s=running_s - begun_s,
    )


class _Rig:
    """A cluster, a controller that follows it, and an agent for its nodes."""

    def __init__(self, ray: RayCluster, client: Client, address: str) -> None:
        self.ray, self.client, self.address = ray, client, address

    def placed(self) -> dict[str, Any]:
        return {one.workload_id: one for one in self.client.list_workloads(phases=(WorkloadPhase.PLACED,))}

    def echo(self, application: str) -> dict[str, Any]:
        """The deployment of an application as Serve has it."""
        found: dict[str, Any] = self.ray.request("/api/serve/applications/")[1]["applications"][application]
        deployment: dict[str, Any] = found.get("deployments", {}).get("Echo", {})
        return {**deployment, "is_healthy": found.get("status") == "RUNNING"}


@contextmanager
def _start(folder: Path) -> Iterator[_Rig]:
    """Everything that a round needs; the rig shows its logs in the end, for tests."""
    with redirect_stdout(io.StringIO()), RayCluster() as ray:
        address = f"127.0.0.1:{free_port()}"
        arguments = [
            "--listen", address, "--metrics", "127.0.0.1:0", "--data", str(folder / "data"),
            "--ray", ray.url, "--ray-poll", "0.2",
        ]  # fmt: skip
        nodes = [
            {"name": name, "cpu_milli": 64_000, "memory_bytes": 2**37, "gpus": [{"product": "a100-sxm4-80gb"}] * GPUS}
            for name in ray.names
        ]
        (folder / "fleet.json").write_text(json.dumps({"nodes": nodes}))
        agent = [
            "--controller", address, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
            "--simulate", str(folder / "fleet.json"), "--energy-window", "1",
        ]  # fmt: skip
        with (
            running("eelgrid_controller", arguments, folder / "controller.log"),
            running("eelgrid_agent", agent, folder / "agent.log"),
            Client(address) as client,
        ):
            rig = _Rig(ray, client, address)
            poll_until(lambda: _is_ready(rig), "all nodes are there", within_s=_START_S)
            yield rig


def _is_ready(rig: _Rig) -> bool:
    try:
        nodes = list(rig.client.list_nodes())
    except Exception:  # noqa: BLE001  # the controller does not answer yet
        return False
    ready = {one.inventory.node_name for one in nodes if one.state is NodeState.READY and one.inventory.gpus}
    return ready >= set(rig.ray.names)


def _measure_starts(rig: _Rig, rounds: int, progress: Progress) -> list[StartTimes]:
    program = rig.ray.program(_PROGRAM, EELGRID_CONTROLLER=rig.address)
    found = []
    for number in range(2 * rounds + 2):
        # Each goes first in every second pair; the first pair warms up and is left out.
        mode = ("alone", "placed")[number % 4 in (1, 2)]
        program.tell(mode)
        reserved_s, started_s = program.read()
        if number > 1:
            found.append(StartTimes(mode=mode, reserved_s=reserved_s, started_s=started_s))
        progress.show(number + 1, 2 * rounds + 2, f"{mode} {started_s:.2f} s")
    program.end()
    return found


def _measure_replicas(rig: _Rig, rounds: int, progress: Progress) -> list[ReplicaTimes]:
    rig.ray.write("bench_echo.py", _APPLICATION)
    applications = [
        {
            "name": mode, "route_prefix": f"/{mode}", "import_path": "bench_echo:app", "external_scaler_enabled": True,
            "deployments": [{"name": "Echo", "num_replicas": 1}],
        }
        for mode in _SCALERS
    ]  # fmt: skip
    body = {"http_options": {"port": free_port(), "location": "HeadOnly"}, "applications": applications}
    status, answer = rig.ray.request("/api/serve/applications/", method="PUT", body=body)
    if status != 200:
        raise Unusable(f"Serve does not take the applications: {answer}")
    for mode in _SCALERS:
        poll_until(lambda name=mode: rig.echo(name)["is_healthy"], f"{mode} runs", within_s=_START_S)
    key = rig.client.submit_workload(build_serve_spec("workload", "Echo", gpus=1, cpus=0.5, replicas=1)).workload_id
    scalers: dict[str, Callable[[int], object]] = {
        "workload": lambda replicas: rig.client.scale_workload(key, replicas),
        "serve": lambda replicas: _scale_alone(rig, replicas),
    }
    found = []
    for number in range(2 * rounds + 2):
        # Each goes first in every second pair; the first pair warms up and is left out.
        mode = _SCALERS[number % 4 in (1, 2)]
        for each in _SCALERS:
            poll_until(
                lambda name=each: len(_list_running(rig, name)) == 1, f"one replica of {each} runs", within_s=_ROUND_S
            )
        times = _scale(rig, mode, scalers[mode])
        found += [times] if number > 1 else []
        progress.show(number + 1, 2 * rounds + 2, f"{mode} {times.running_s:.1f} s")
        scalers[mode](1)
    rig.client.cancel_workload(key)
    rig.ray.request("/api/serve/applications/", method="DELETE")
    return found


def _scale_alone(rig: _Rig, replicas: int) -> None:
    """Tells Serve itself."""
    path = "/api/v1/applications/serve/deployments/Echo/scale"
    status, answer = rig.ray.request(path, method="POST", body={"target_num_replicas": replicas})
    if status != 200:
        raise Unusable(f"Serve does not scale: {answer}")


def _scale(rig: _Rig, mode: str, scale: Callable[[int], object]) -> ReplicaTimes:
    """Scales to three and waits until they run."""
    before, begun_s = _list_running(rig, mode), time.time()
    scale(_REPLICAS)
    poll_until(lambda: rig.echo(mode)["target_num_replicas"] == _REPLICAS, "Serve aims at three", within_s=_ROUND_S)
    target_s = time.time()
    running = poll_until(
        lambda: pids if len(pids := _list_running(rig, mode)) == _REPLICAS else None, "three run", within_s=_ROUND_S
    )
    return split_replica_times(
        mode,
        running - before,
        begun_s=begun_s,
        target_s=target_s,
        running_s=time.time(),
        workers=rig.ray.list("workers"),
    )


def _list_running(rig: _Rig, application: str) -> set[int]:
    return {one["pid"] for one in rig.echo(application).get("replicas", ()) if one["state"] == "RUNNING"}


def _measure_energy(rig: _Rig, jobs: int, seconds: float) -> list[JobEnergy]:
    path = rig.ray.write("bench_job.py", _JOB)
    known, counts = {}, {}
    for number in range(jobs):
        gpus, begun_s = 1 + number % 2, time.monotonic()
        job = rig.ray.submit(f"python {path} {gpus}")
        poll_until(
            lambda job=job, gpus=gpus: len(_list_places(rig, job)) == gpus, "its GPUs are known", within_s=_ROUND_S
        )
        known[job], counts[job] = time.monotonic() - begun_s, gpus
    begun_s, before = time.monotonic(), _read_energy(rig)
    time.sleep(seconds)
    held_s, after = time.monotonic() - begun_s, _read_energy(rig)
    for job in known:
        rig.ray.stop(job)
    return [
        JobEnergy(
            job=job, gpus=counts[job], known_s=known[job], held_s=held_s,
            energy_j=after.get(job, 0.0) - before.get(job, 0.0),
        )
        for job in known
    ]  # fmt: skip


def _list_places(rig: _Rig, job: str) -> tuple[Any, ...]:
    workload = rig.placed().get(f"ray-{job}")
    return () if workload is None else workload.placements


def _read_energy(rig: _Rig) -> dict[str, float]:
    now_ns, label = time.time_ns(), "label:ray/submission"
    answer = rig.client.query_energy(begin_ns=now_ns - 3_600 * 10**9, end_ns=now_ns, group_by=(label,))
    spent = {one.values[0]: one.spent for one in answer.groups}
    return {job: (one.bare_idle_mj + one.context_idle_mj + one.active_mj) / 1000.0 for job, one in spent.items()}


def _report(starts: list[StartTimes], replicas: list[ReplicaTimes], jobs: list[JobEnergy]) -> None:
    for mode, name in (("alone", "Ray by itself"), ("placed", "eelgrid.ray.place")):
        mine = [one for one in starts if one.mode == mode]
        reserved, started = spread([one.reserved_s for one in mine]), spread([one.started_s for one in mine])
        print(f"{name}: a GPU is reserved after {reserved} s, an actor answers after {started} s")
    for mode, name in zip(_SCALERS, ("by its workload", "by Serve's own endpoint"), strict=True):
        those = [one for one in replicas if one.mode == mode]
        for field, words in (
            ("target_s", "Serve aims at three replicas"), ("launched_s", "Ray has launched their workers"),
            ("ready_s", "their workers are ready"), ("running_s", "all replicas run"),
        ):  # fmt: skip
            print(f"{name}: {words} after {spread([getattr(one, field) for one in those])} s")
    print(f"a job of the Jobs API is a workload on its GPUs after {spread([one.known_s for one in jobs])} s")
    for gpus in sorted({one.gpus for one in jobs}):
        watts = [one.energy_j / one.held_s for one in jobs if one.gpus == gpus]
        print(f"jobs with {gpus} GPU draw {spread(watts)} W by their energy rows")


@benchmark()
@click.option("--starts", type=click.IntRange(1, 1000), default=10, help="Starts of each way, in turn.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, help="How often Serve is scaled from 1 to 3.")
@click.option("--jobs", type=click.IntRange(1, 5), default=3, help="Jobs that hold GPUs at once.")
@click.option("--seconds", type=click.FloatRange(1.0, 3600.0), default=20.0, help="For how long they are measured.")
def main(options: Options) -> int:
    """Measures all three on one cluster and writes them."""
    if MISSING:
        raise Unusable(MISSING)
    with tempfile.TemporaryDirectory() as folder, _start(Path(folder)) as rig:
        starts = _measure_starts(rig, options.starts, Progress("starts"))
        replicas = _measure_replicas(rig, options.rounds, Progress("scalings"))
        jobs = _measure_energy(rig, options.jobs, options.seconds)
    _report(starts, replicas, jobs)
    for name, rows, kind in (
        ("starts", starts, StartTimes),
        ("replicas", replicas, ReplicaTimes),
        ("energy", jobs, JobEnergy),
    ):
        write_csv(options.out / f"{name}.csv", [one.name for one in fields(kind)], [astuple(one) for one in rows])
    ours_s, alone_s = (statistics.median(one.running_s for one in replicas if one.mode == mode) for mode in _SCALERS)
    print(f"from 1 to 3 replicas: {ours_s / alone_s:.2f} times as long as by Serve's own endpoint")
    kept = ours_s <= _TARGET_S
    return report_promise(f"from 1 to 3 replicas within {_TARGET_S:g} s", kept=kept)


if __name__ == "__main__":
    raise SystemExit(main())
