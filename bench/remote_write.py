"""Cost of remote write: the event loop's part, the thread's, and bytes, at 1,213 nodes that write to a real Prometheus.

Each round is one interval of a cluster: every node hands over the three batches of five ticks that it sends meanwhile,
of which one tick is written, and the thread encodes and sends them. Times are CPU of this process, so they hold on a
busy machine; Prometheus (Debian's package) runs beside it, and its own cost is not counted.
"""

import logging
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import psutil

from bench.processes import free_port
from bench.runner import Options, Unusable, benchmark
from bench.tables import format_table, write_csv
from eelgrid_agent.devices.port import FAST_READINGS
from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime.config import RemoteWriteConfig
from eelgrid_controller.server.remote_write.writer import RemoteWriter
from eelgrid_protos.messages import Column, Gpu, Inventory, Reading, SampleBatch

_TICKS, _BATCHES, _INTERVAL_S, _WITHIN_S = 5, 3, 15, 60.0


@contextmanager
def _receiver() -> Iterator[str]:
    if shutil.which("prometheus") is None:
        raise Unusable("prometheus is not here; Debian has a package of this name")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "empty.yml").write_text("{}")
        address = f"127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/empty.yml", f"--storage.tsdb.path={folder}/tsdb",
             f"--web.listen-address={address}", "--web.enable-remote-write-receiver"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            end_s = time.monotonic() + _WITHIN_S
            while True:
                try:
                    urllib.request.urlopen(f"http://{address}/-/ready", timeout=1.0).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.1)
            yield f"http://{address}/api/v1/write"
        finally:
            process.kill()
            process.wait()


def _inventory(node: int, gpus: int) -> Inventory:
    devices = tuple(
        Gpu(uuid=f"GPU-{node:08x}-0000-0000-0000-{gpu:012x}", index=gpu, product="NVIDIA H100", model="H100")
        for gpu in range(gpus)
    )
    return Inventory(node_name=f"gpu-node-{node}", cpu_milli=96_000, memory_bytes=2**39, gpus=devices)


def _batch(number: int, begin_ns: int, gpus: int) -> SampleBatch:
    values = tuple(100.0 + number + cell for cell in range(gpus * _TICKS))
    hosts = (Reading.HOST_CPU_UTILIZATION_RATIO, Reading.HOST_MEMORY_USED_BYTES)
    return SampleBatch(
        sequence=number,
        inventory_generation=1,
        time_ns=tuple(begin_ns + tick * 10**9 for tick in range(_TICKS)),
        gpu_columns=tuple(Column(reading=one, values=values) for one in FAST_READINGS),
        host_columns=tuple(Column(reading=one, values=values[:_TICKS]) for one in hosts),
    )


@benchmark()
@click.option("--nodes", default=1213)
@click.option("--gpus", default=8)
@click.option("--rounds", default=6)
def main(options: Options) -> None:
    """Writes DIR/summary.csv (measure, median, least, most); the first round, which makes layouts, stands apart."""
    nodes = [_inventory(node, options.gpus) for node in range(options.nodes)]
    process, rows = psutil.Process(), []
    with _receiver() as url:
        writer = RemoteWriter(
            RemoteWriteConfig(url=url), instance="bench:9464", is_leading=lambda: True, clock=Clock(),
            log=logging.getLogger("bench"), starts=False,
        )  # fmt: skip
        begin_ns = time.time_ns() - options.rounds * _INTERVAL_S * 10**9
        before_bytes = process.memory_info().rss
        for number in range(options.rounds):
            at_ns = begin_ns + number * _INTERVAL_S * 10**9
            batches = [_batch(1 + number, at_ns + n * _TICKS * 10**9, options.gpus) for n in range(_BATCHES)]
            given = [(node, batch) for batch in batches for node in nodes]
            written = _count(writer)
            start_s = time.thread_time()
            for node, batch in given:
                writer.on_batch(node, batch)
            handed_s, start_s = time.thread_time() - start_s, time.thread_time()
            writer.look()
            spent_s, samples = time.thread_time() - start_s, _count(writer) - written
            rows.append((1e6 * handed_s / len(given), 1e6 * spent_s / samples, 100.0 * spent_s / _INTERVAL_S, samples))
        held_bytes = process.memory_info().rss - before_bytes
        writer.stop()
    names = ("loop_us_per_batch", "thread_us_per_sample", "thread_percent_of_a_core", "samples_per_interval")
    found = [(f"first_{name}", round(value, 2), "-", "-") for name, value in zip(names, rows[0], strict=True)]
    for name, values in zip(names, zip(*rows[1:], strict=True), strict=True):
        ordered = sorted(values)
        found.append((name, *(round(one, 2) for one in (ordered[len(ordered) // 2], ordered[0], ordered[-1]))))
    found.append(("memory_megabytes", round(held_bytes / 1e6), "-", "-"))
    write_csv(options.out / "summary.csv", ("measure", "median", "least", "most"), found)
    print(format_table(("measure", "median", "least", "most"), found, 1))


def _count(writer: RemoteWriter) -> float:
    (family,) = (one for one in writer.families() if one.about.name == "eelgrid_remote_write_samples_total")
    return family.values[("written",)]


if __name__ == "__main__":
    sys.exit(main())
