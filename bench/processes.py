"""Real processes under measurement: start, wait until they serve, read CPU and memory, end by id."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Usage", "fleet_file", "free_port", "measure", "metric", "running", "spread"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used over a window."""

    cpu_ratio: float
    rss_bytes: int
    seconds: float


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(module: str, arguments: Sequence[str], log: Path) -> Iterator[psutil.Process]:
    """`python -m module` with its output in `log`; ended by SIGTERM, then SIGKILL."""
    with log.open("wb") as output:
        child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=output, stderr=output)
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
    """CPU as a share of one core, and resident bytes at the end of the window."""
    before, begun = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, passed = process.cpu_times(), time.monotonic() - begun
    used = (after.user + after.system) - (before.user + before.system)
    return Usage(used / passed, process.memory_info().rss, passed)


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
