"""What a controller's core costs by the number of nodes: `python -m bench.fleet --nodes 1000 --nodes 10000 --out DIR`.

Each size is measured in a process of its own, so that memory is that size's: nodes with 8 GPUs join, jobs of one GPU are
placed, a checkpoint is made and read back. Owns the fleet and the clock; streams of agents are `bench.streams`, decisions
of the engine alone `bench.scale`, and reconnects `bench.reconnects`. Figures without a target: they are the slopes of
docs/explanation/scale.md.
"""

import json
import statistics
import subprocess
import sys
import time
import zlib
from itertools import pairwise

import click

from bench.processes import resident_mib
from bench.runner import Options, Progress, benchmark
from bench.tables import write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.runtime.journal_rows import CheckpointEncoder
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.messages import Gpu, Inventory, ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

_GPUS = 8
_MODEL, _KEY = "H100-SXM5-80GB", "h100-sxm5-80gb"
_JOBS, _TIMED = 1_000, 300
_COLUMNS = (
    "nodes",
    "resident_mib",
    "join_us",
    "submit_ms",
    "submit_p99_ms",
    "end_ms",
    "checkpoint_mib",
    "stop_ms",  # the longest that a checkpoint keeps the core from a command, but for what is written at its end
    "dump_s",
    "load_s",
)


def _inventory(number: int) -> Inventory:
    name = f"node-{number:06}"
    gpus = tuple(
        Gpu(uuid=f"GPU-{name}-{index}", index=index, product=_MODEL, model=_MODEL, catalogue_key=_KEY)
        for index in range(_GPUS)
    )
    return Inventory(node_name=name, cpu_milli=128_000, memory_bytes=2**40, gpus=gpus)


def _job(number: int) -> SubmitWorkloadRequest:
    request = ResourceRequest(cpu_milli=8_000, memory_bytes=2**34, gpu_count=1, gpu_milli=1000)
    return SubmitWorkloadRequest(spec=WorkloadSpec(name="job", request=request), workload_id=f"j-{number}")


def measure(nodes: int) -> dict[str, float]:
    """Returns the figures of one size, by column; seconds are of processor time."""
    core, now_ns, before_mib = Core(ClusterState(), catalogue.load_catalogue(), nodes_most=nodes), 1, resident_mib()
    began_s = time.thread_time()
    for number in range(nodes):
        core.register_node(_inventory(number), now_ns=now_ns)
    joined_s = time.thread_time() - began_s
    grown_mib = resident_mib() - before_mib
    submitted, ended = list[float](), list[float]()
    for number in range(_JOBS):
        now_ns += 1_000_000
        began_s = time.thread_time()
        core.submit(_job(number), now_ns=now_ns)
        submitted.append(time.thread_time() - began_s)
        if number >= _JOBS - _TIMED:
            began_s = time.thread_time()
            core.cancel(f"j-{number - _JOBS // 2}", now_ns=now_ns)
            ended.append(time.thread_time() - began_s)
    timed = sorted(submitted[-_TIMED:])
    began_s = time.thread_time()
    dump, encoder = core.state.begin_dump(), CheckpointEncoder(core.state.revision)
    taken = [began_s, time.thread_time()]
    for part in dump.parts():
        encoder.add_part(part)
        taken.append(time.thread_time())
    row = encoder.finish()
    dump_s = time.thread_time() - began_s
    text = zlib.decompress(row.body)
    began_s = time.thread_time()
    again = ClusterState.load(json.loads(text))
    load_s = time.thread_time() - began_s
    assert len(again.nodes) == nodes
    return {
        "nodes": nodes,
        "resident_mib": grown_mib,
        "join_us": joined_s / nodes * 1e6,
        "submit_ms": statistics.median(timed) * 1e3,
        "submit_p99_ms": timed[int(0.99 * len(timed))] * 1e3,
        "end_ms": statistics.median(ended) * 1e3,
        "checkpoint_mib": len(text) / 2**20,
        "stop_ms": max(after_s - before_s for before_s, after_s in pairwise(taken)) * 1e3,
        "dump_s": dump_s,
        "load_s": load_s,
    }


@benchmark()
@click.option(
    "--nodes", multiple=True, type=click.IntRange(1, 200_000), default=(1_000, 3_000, 10_000, 30_000, 100_000)
)
@click.option("--child", is_flag=True, hidden=True)
def main(options: Options) -> int:
    """Measures each size in a process of its own."""
    if options.child:
        print(json.dumps(measure(options.nodes[0])))
        return 0
    progress, rows = Progress("sizes"), list[list[float]]()
    print("".join(f"{name:>16}" for name in _COLUMNS))
    for done, nodes in enumerate(options.nodes):
        progress.show(done, len(options.nodes), f"{nodes:,} nodes")
        command = (sys.executable, "-m", "bench.fleet", "--child", "--nodes", str(nodes), "--out", str(options.out))
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(said.splitlines()[-1])
        rows.append([found[name] for name in _COLUMNS])
        print("".join(f"{found[name]:>16,.6g}" for name in _COLUMNS), flush=True)
    write_csv(options.out / "fleet.csv", _COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
