"""Preemption on one box: training programs are stopped a hundred times by urgent jobs, and must lose no step.

A controller and an agent with simulated GPUs run real processes. Each GPU has a training program in a queue without quota,
which writes every step down when it has done it, and saves a checkpoint when it is asked to stop. Urgent jobs of one or more
GPUs come one after another in a queue that reclaims its quota. A step that is done twice was lost, one that is missing was
skipped; both count. The wait is from the submission of an urgent job to the start of its process, by the agent's clock; it
has the steps that were under way, the checkpoints and the stops in it.

Targets: a hundred preemptions, no step lost or skipped, every urgent job and every program ends with success.

With `--scale` it times decisions on 500 nodes instead, without processes (bench.preemption_scale).
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from bench.preemption_scale import run_scale
from bench.processes import fleet_file, free_port, running, spread
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid import (
    Client,
    Mobility,
    PreemptionReclaim,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    ResourceRequest,
    WorkloadPhase,
    WorkloadSpec,
    checkpoint,
    errors,
)

_START_S, _END_S = 120.0, 300.0
_TRAINING = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location('checkpoint', sys.argv[1])
checkpoint = importlib.util.module_from_spec(spec); spec.loader.exec_module(checkpoint)
path = checkpoint.latest(); step = int(path.read_text()) if path else 0
with checkpoint.on_preempt() as stop, open(sys.argv[2], 'a') as trace:
    while not stop and not os.path.exists(sys.argv[3]):
        time.sleep(0.02)
        step += 1
        print(step, file=trace, flush=True)
    checkpoint.save(lambda path: path.write_text(str(step)))
"""


@contextmanager
def _begin_box(folder: Path, gpus: int) -> Iterator[Client]:
    port = free_port()
    controller = ["--listen", f"127.0.0.1:{port}", "--metrics", "127.0.0.1:0", "--data", str(folder / "data")]
    agent = [
        "--controller", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
        "--simulate", str(fleet_file(folder / "fleet.json", 1, gpus)), "--run-processes", "--state", str(folder / "agent"),
    ]  # fmt: skip
    if Path("/proc/self").stat().st_uid == 0:
        agent.append("--allow-root")
    with (
        running("eelgrid_controller", controller, folder / "controller.log"),
        running("eelgrid_agent", agent, folder / "agent.log"),
        Client(f"127.0.0.1:{port}", timeout_s=30.0) as client,
    ):
        _wait_until(lambda: _count_nodes(client) > 0, _START_S, "a node is ready")
        policy = client.get_policy()
        client.update_policy(replace(policy, queues=_build_queues(gpus)))
        yield client


def _count_nodes(client: Client) -> int:
    try:
        return client.get_summary().nodes_ready
    except errors.EelgridError:
        return 0


def _build_queues(gpus: int) -> tuple[Queue, ...]:
    quota = (QueueQuota(resource="gpu", nominal=1000 * gpus),)
    reclaim = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)
    return (
        Queue(name="box"),
        Queue(name="urgent", parent="box", quotas=quota, preemption=reclaim),
        Queue(name="training", parent="box"),
    )


def _wait_until(is_true: Callable[[], bool], within_s: float, what: str) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"in {within_s:g} s it did not happen that {what}")
        time.sleep(0.02)


def _spec(folder: Path, name: str, queue: str, gpus: int, *argv: str) -> WorkloadSpec:
    return WorkloadSpec(
        name=name,
        request=ResourceRequest(cpu_milli=10, gpu_count=gpus, gpu_milli=1000),
        mobility=Mobility.FIXED,
        queue=queue,
        process=ProcessSpec(
            argv=argv, working_directory=str(folder), environment={"PATH": "/usr/bin:/bin"}, grace_s=60.0
        ),
    )


def _is_training(client: Client, key: str) -> bool:
    """Whether a program runs and has had the time to make steps since it was started."""
    found = client.get_workload(key)
    begun = max((one.started_ns for one in found.attempts), default=0)
    return found.phase is WorkloadPhase.PLACED and 0 < begun < time.time_ns() - 500_000_000


def _preempt(client: Client, folder: Path, keys: list[str], wanted: int) -> tuple[list[float], int]:
    """Submits urgent jobs until there were so many preemptions; returns their waits and how many of them failed."""
    progress, waits, failed, count = Progress("preemptions"), list[float](), 0, 0
    while count < wanted:
        _wait_until(lambda: all(_is_training(client, key) for key in keys), _END_S, "all programs run again")
        gpus = 1 + len(waits) % len(keys)
        submitted_ns = time.time_ns()
        key = f"urgent-{len(waits)}"
        client.submit_workload(_spec(folder, key, "urgent", gpus, "/bin/sleep", "0.05"), workload_id=key)
        job = client.wait(key, until=lambda found: found.phase.is_ended)
        failed += job.phase is not WorkloadPhase.SUCCEEDED
        waits.append((job.attempts[0].started_ns - submitted_ns) / 1e9)
        count = sum(client.get_workload(one).preemptions for one in keys)
        progress.show(min(count, wanted), wanted)
    return waits, failed


def _count_lost(trace: Path) -> tuple[int, int]:
    """Returns how many steps a program has made, and how many of them were lost or skipped."""
    steps = [int(line) for line in trace.read_text().splitlines()]
    return len(set(steps)), len(steps) - len(set(steps)) + max(steps) - len(set(steps))


@benchmark()
@click.option("--preemptions", default=100, help="So many, at least.")
@click.option("--gpus", default=4, help="GPUs of the box, each with a training program.")
@click.option("--scale", is_flag=True, help="Times decisions on many nodes instead.")
@click.option("--nodes", type=click.IntRange(20), default=500, help="Nodes of 8 GPUs, with --scale.")
def main(options: Options) -> int:
    """Preempts training programs by urgent jobs, and counts the steps that were lost."""
    if options.scale:
        kept = run_scale(options.nodes, options.out)
        return report_promise("one GPU in 0.2 s, all in 5 s, a verdict in 1 s", kept=kept)
    with tempfile.TemporaryDirectory(prefix="preemption") as name:
        folder = Path(name)
        keys, finish = [f"t-{n}" for n in range(options.gpus)], folder / "finish"
        with _begin_box(folder, options.gpus) as client:
            for key in keys:
                argv = (sys.executable, "-I", "-S", "-c", _TRAINING, str(checkpoint.__file__))
                spec = _spec(folder, key, "training", 1, *argv, str(folder / f"{key}.trace"), str(finish))
                client.submit_workload(spec, workload_id=key)
            waits, failed = _preempt(client, folder, keys, options.preemptions)
            _wait_until(lambda: all(_is_training(client, key) for key in keys), _END_S, "all programs run again")
            finish.touch()
            ended = [client.wait(key, until=lambda found: found.phase.is_ended) for key in keys]
        counted = [_count_lost(folder / f"{key}.trace") for key in keys]
    preemptions = sum(one.preemptions for one in ended)
    steps, lost = (sum(column) for column in zip(*counted, strict=True))
    failed += sum(one.phase is not WorkloadPhase.SUCCEEDED for one in ended)
    print(
        f"{preemptions} preemptions by {len(waits)} urgent jobs; {steps} steps, {lost} lost or skipped; {failed} failed"
    )
    print(f"wait of an urgent job  {spread(waits)} s")
    rows = [
        ("preemptions", preemptions, options.preemptions), ("steps", steps, 0), ("lost_steps", lost, 0), ("failed", failed, 0),
        ("wait_p50_s", statistics.median(waits), 0), ("wait_max_s", max(waits), 0),
    ]  # fmt: skip
    write_csv(options.out / "preemption.csv", ("metric", "value", "target"), rows)
    kept = preemptions >= options.preemptions and not lost and not failed
    return report_promise(f"{options.preemptions} preemptions, no step lost, all jobs succeed", kept=kept)


if __name__ == "__main__":
    sys.exit(main())
