"""`python -m bench.tracing --out DIR`: CPU time and latency of a submission, with and without its trace.

Two controllers run at the same time, each with an agent of 20 simulated nodes, one with `--traces`,
whose spans a collector in this process receives over real gRPC. They are called alternately, in
blocks of consecutive submissions, so that other load on the machine affects both. A block's time ends
when its plans are applied and its spans sent; the idle CPU time of the process is subtracted. One
round uses a fresh pair of controllers; its figure is the ratio of the medians of its blocks.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from bench.processes import cores, cpu_s, fleet_file, free_port, metric, running, spread
from bench.runner import Options, benchmark
from bench.tables import write_csv
from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

_NODES = 20
_SETTLE_S = 1.5
_IDLE_S = 1.0
_SPEC = WorkloadSpec(name="w", request=ResourceRequest(cpu_milli=10, memory_bytes=2**20, gpu_count=1, gpu_milli=100))


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts spans."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802  # the service's name for it
        """Take a batch."""
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(slots=True)
class _Measured:
    """One controller, and what its blocks took."""

    process: psutil.Process
    operators: Any
    cpu_us: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)

    def block(self, submissions: int) -> None:
        """So many submissions, one after the other."""
        begun_s, before_s = time.monotonic(), cpu_s(self.process)
        for _ in range(submissions):
            asked_s = time.perf_counter()
            self.operators.submit_workload(SubmitWorkloadRequest(spec=_SPEC), timeout=60.0)
            self.latency_ms.append(1e3 * (time.perf_counter() - asked_s))
        time.sleep(_SETTLE_S)
        passed_s, used_s = time.monotonic() - begun_s, cpu_s(self.process) - before_s
        idle_s, before_s = time.monotonic(), cpu_s(self.process)
        time.sleep(_IDLE_S)
        idle = (cpu_s(self.process) - before_s) / (time.monotonic() - idle_s)
        self.cpu_us.append(1e6 * (used_s - idle * passed_s) / submissions)


@contextlib.contextmanager
def _collector() -> Iterator[tuple[_Collector, str]]:
    collector = _Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def _cluster(name: str, out: Path, *flags: str) -> Iterator[_Measured]:
    with tempfile.TemporaryDirectory() as scratch:
        fleet = fleet_file(Path(scratch) / "fleet.json", _NODES, 8)
        address, metrics = f"127.0.0.1:{free_port()}", free_port()
        controller = ["--listen", address, "--metrics", f"127.0.0.1:{metrics}", "--data", f"{scratch}/journal", *flags]
        agents = ["--controller", address, "--simulate", str(fleet), "--listen", "127.0.0.1:0"]
        agents += ["--metrics", "127.0.0.1:0"]
        with (
            running("eelgrid_controller", controller, out / f"tracing-{name}.log") as process,
            running("eelgrid_agent", agents, out / f"tracing-{name}-agents.log"),
        ):
            deadline_s = time.monotonic() + 120.0
            while (metric(metrics, "eelgrid_agents_connected") or 0) < _NODES:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"the agents did not come; see {out}")
                time.sleep(0.5)
            with transport.open_blocking_channel(address, tls=None) as channel:
                yield _Measured(process, rpc.build_client(rpc.OPERATOR_SERVICE, channel))


def _round(blocks: int, submissions: int, out: Path) -> tuple[float, float, float, float, float]:
    with (
        _collector() as (collector, address),
        _cluster("off", out) as off,
        _cluster("on", out, "--traces", address) as on,
    ):
        for one in (off, on):
            one.block(submissions)
            one.cpu_us.clear()
            one.latency_ms.clear()
        for number in range(blocks):
            for one in (off, on) if number % 2 else (on, off):
                one.block(submissions)
        sent = 6 * submissions * (blocks + 1)
        if collector.spans < sent:
            raise SystemExit(f"{collector.spans} of {sent} spans came; see {out}")
        used = [statistics.median(one.cpu_us) for one in (off, on)]
        return used[0], used[1], used[1] / used[0], *(statistics.median(one.latency_ms) for one in (off, on))


@benchmark()
@click.option("--rounds", default=5)
@click.option("--blocks", default=8)
@click.option("--submissions", default=60)
def main(options: Options) -> int:
    """Measures several rounds and writes a CSV."""
    names = ("off_cpu_us", "on_cpu_us", "cpu_ratio", "off_p50_ms", "on_p50_ms")
    rows = []
    for _ in range(options.rounds):
        rows.append(_round(options.blocks, options.submissions, options.out))
        print("  ".join(f"{name} {value:.4g}" for name, value in zip(names, rows[-1], strict=True)), flush=True)
    write_csv(options.out / "tracing.csv", names, rows)
    print(f"a submission, {options.blocks} blocks of {options.submissions} a round, {cores()} cores for everything")
    for index, name in enumerate(names):
        print(f"  {name:12} {spread([row[index] for row in rows])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
