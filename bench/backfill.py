"""What backfill costs: one round over 4,000 waiting workloads on a full cluster, by mode.

Fills 500 nodes of 8 GPUs with jobs that state a run time, lets 4,000 workloads of many shapes wait, ends one job and times the
round that follows, over all its steps, in CPU time of the process. Modes alternate; the median counts.
"""

import gc
import random
import statistics
import sys
import time
from dataclasses import replace

import click

from bench.runner import Options, benchmark, report_promise
from bench.tables import write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    BackfillMode,
    Gpu,
    Inventory,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadSpec,
)

_NS = 10**9
NODE_GPUS = 8
_RATIO_MOST = 1.3


def build_empty_cluster(
    nodes: int,
    mode: BackfillMode,
    *,
    model: str,
    cpu_milli: int,
    memory_bytes: int,
    node_gpus: int = NODE_GPUS,
    runs_processes: bool = False,
    quarantines: bool = True,
) -> Core:
    """A cluster of equal nodes, with nothing on them."""
    core = Core(ClusterState(), catalogue.load_catalogue(), quarantines=quarantines)
    for number in range(nodes):
        gpus = tuple(
            Gpu(uuid=f"GPU-{number}-{index}", index=index, product=model, model=model) for index in range(node_gpus)
        )
        name = f"n{number:04}"
        core.register_node(
            Inventory(
                node_name=name, cpu_milli=cpu_milli, memory_bytes=memory_bytes, gpus=gpus, runs_processes=runs_processes
            ),
            now_ns=1,
        )
    core.update_policy(replace(core.state.policy, backfill=mode), now_ns=1)
    return core


def build_full_cluster(nodes: int, waiting: int, mode: BackfillMode, seed: int) -> Core:
    """A cluster without a free GPU, in front of which work waits."""
    chance = random.Random(seed)
    core = build_empty_cluster(nodes, mode, model="A10", cpu_milli=128_000, memory_bytes=2**40)

    def submit(key: str, gpus: int, cpu_milli: int) -> None:
        spec = WorkloadSpec(
            name=key,
            user=f"u{chance.randrange(50)}",
            request=ResourceRequest(cpu_milli=cpu_milli, memory_bytes=2**30, gpu_count=gpus, gpu_milli=1000),
            expected_runtime_s=float(chance.randrange(600, 86_400)),
        )
        core.submit(SubmitWorkloadRequest(spec=spec, workload_id=key), now_ns=_NS)

    for number in range(4 * nodes):
        submit(f"r{number}", 2, 2000)
    for number in range(waiting):
        submit(f"w{number}", chance.choice((1, 1, 2, 4, 8)), 1000 * chance.randrange(1, 64))
    while core.has_backlog:
        core.retry(now_ns=_NS)
    return core


def time_round(core: Core, number: int) -> tuple[float, float]:
    """Ends one job; returns the CPU seconds of the round that follows, and of its longest step."""
    now_ns = (2 + number) * 60 * _NS
    steps_s = []
    begin_s = time.process_time()
    core.cancel(f"r{number}", now_ns=now_ns)
    steps_s.append(time.process_time() - begin_s)
    while core.has_backlog:
        begin_s = time.process_time()
        core.retry(now_ns=now_ns)
        steps_s.append(time.process_time() - begin_s)
    return sum(steps_s), max(steps_s)


@benchmark()
@click.option("--nodes", type=click.IntRange(1), default=500, show_default=True, help="Nodes of 8 GPUs.")
@click.option("--waiting", type=click.IntRange(1), default=4000, show_default=True, help="Waiting workloads.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds by mode.")
def main(options: Options) -> int:
    """Times rounds by mode and writes backfill.csv."""
    nodes, waiting, rounds = options.nodes, options.waiting, options.rounds
    modes = (BackfillMode.NONE, BackfillMode.EASY, BackfillMode.CONSERVATIVE)
    cores = {mode: build_full_cluster(nodes, waiting, mode, 1) for mode in modes}
    found: dict[BackfillMode, list[tuple[float, float]]] = {mode: [] for mode in modes}
    gc.disable()
    for number in range(rounds):
        for mode, core in cores.items():
            found[mode].append(time_round(core, number))
            gc.collect()
    rows = []
    median = {mode: statistics.median(whole_s for whole_s, _ in times) for mode, times in found.items()}
    for mode, times in found.items():
        ratio = median[mode] / median[BackfillMode.NONE]
        longest_s = max(step_s for _, step_s in times)
        rows.append([mode.name.lower(), median[mode], ratio, longest_s])
        print(
            f"{mode.name.lower():<14}{1e3 * median[mode]:8.1f} ms a round, x{ratio:.2f}, longest step {1e3 * longest_s:.1f} ms"
        )
    write_csv(options.out / "backfill.csv", ("mode", "round_s", "ratio", "longest_step_s"), rows)
    return report_promise(
        f"easy backfill makes a round at most {_RATIO_MOST} times longer",
        kept=median[BackfillMode.EASY] <= _RATIO_MOST * median[BackfillMode.NONE],
    )


if __name__ == "__main__":
    sys.exit(main())
