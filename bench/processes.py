"""Real processes under measurement: start, wait until they serve, read CPU and memory, end by id."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "Usage",
    "cpu_s",
    "fleet_file",
    "free_port",
    "measure",
    "metric",
    "resident_mib",
    "running",
    "spread",
    "started",
]


_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used over a window."""

    cpu_ratio: float
    rss_bytes: int
    seconds: float
    # Of each page that several processes of the machine map, the part that falls to these.
    pss_bytes: int = 0
    # As if no other process mapped the same files: of each file what one of these holds of it at the most.
    alone_bytes: int = 0


def resident_mib() -> float:
    """Memory of this process that is in use now, in MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(module: str, arguments: Sequence[str], log: Path, checkout: Path | None = None) -> Iterator[psutil.Process]:
    """`python -m module` with its output in `log`, of another checkout if one is named; ended by SIGTERM, then SIGKILL."""
    with started([sys.executable, "-m", module, *arguments], log, checkout) as process:
        yield process


def product_path(checkout: Path) -> str:
    """PYTHONPATH for the product and the benchmarks of a checkout."""
    return os.pathsep.join(str(checkout / part) for part in ("", "kernels", "agent", "client", "controller", "protos"))


@contextmanager
def started(command: Sequence[str], log: Path, checkout: Path | None = None) -> Iterator[psutil.Process]:
    """Any command, in the same way."""
    environment = None if checkout is None else os.environ | {"PYTHONPATH": product_path(checkout)}
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, cwd=checkout, env=environment)
    try:
        yield psutil.Process(child.pid)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def measure(process: psutil.Process, seconds: float) -> Usage:
    """CPU as a share of one core, and bytes at the end of the window; processes that it started are part of it."""
    before, begun = cpu_s(process), time.monotonic()
    time.sleep(seconds)
    used, passed = cpu_s(process) - before, time.monotonic() - begun
    memory = [one.memory_full_info() for one in _family(process)]
    rss_bytes, pss_bytes = sum(one.rss for one in memory), sum(one.pss for one in memory)
    return Usage(used / passed, rss_bytes, passed, pss_bytes, _count_alone(_family(process)))


def _count_alone(family: Sequence[psutil.Process]) -> int:
    """Bytes of processes that no fork connects, if nothing else on the machine mapped their files."""
    own, of_files = 0, dict[str, int]()
    for one in family:
        for mapped in one.memory_maps(grouped=True):
            own += mapped.anonymous
            of_files[mapped.path] = max(of_files.get(mapped.path, 0), mapped.rss - mapped.anonymous)
    return own + sum(of_files.values())


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and those that it started, so far."""
    return sum(own_cpu_s(one) for one in _family(process))


def sum_cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of several processes and those that they started, so far."""
    return sum(map(cpu_s, processes))


def own_cpu_s(process: psutil.Process) -> float:
    """Processor time of a process alone, to the nanosecond.

    /proc counts hundredths: a window of seconds at 1 % of a core is a few of those.
    """
    try:
        # The clock of another process: what clock_getcpuclockid(3) makes of its id.
        return time.clock_gettime(~process.pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        times = process.cpu_times()
        return float(times.user + times.system)


def metric(port: int, name: str) -> float | None:
    """The sum of a metric's samples on a Prometheus endpoint; None while it is not there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
    return sum(values) if values else None


def fleet_file(path: Path, nodes: int, gpus: int, product: str = "openb-g2", model: str = "G2") -> Path:
    """A fleet of equal nodes in the agent's format."""
    node = {
        "name": "node-{index}",
        "count": nodes,
        "cpu_milli": 96_000,
        "memory_bytes": 384 << 30,
        "gpus": [{"product": product, "model": model, "count": gpus}],
    }
    path.write_text(json.dumps({"nodes": [node]}))
    return path


def spread(values: Sequence[float]) -> str:
    """Median and range, as every figure is quoted."""
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.3g} ({ordered[0]:.3g} to {ordered[-1]:.3g}, n={len(ordered)})"


def cores() -> int:
    """Cores of this machine, for the record."""
    return os.cpu_count() or 1
