"""Overhead of an agent on its node: 8 simulated GPUs at 1 Hz and 10 Hz, compared with nvitop's exporter.

    python -m venv PEER && PEER/bin/pip install nvitop-exporter
    python -m bench.agent_overhead --peer PEER/bin/python

`--before DIR` names a checkout of another version, whose agent with its child takes its turns too.
Without --peer it measures the agent alone, in both of its forms: with its
devices in its own process, like the peer, and as on a real machine, with
the driver in a child process, whose cost is included. Each run is a new
process; the runs alternate and change their order; all are scraped equally
while they are measured, and the agent streams to a controller that only
acknowledges. All read the same simulated library, which is Python in the
program's own process and more expensive than the driver. One more run of each
therefore counts its calls and the cost of the library itself; the rest is the
program's own cost. (A library in a child process is not counted.)

Targets at 1 Hz and scraped every 15 s: with its devices in its own process under
1 % of a core and under 60 MB resident; with a child, both processes together under
1 % and 60 MB of proportional set size (PSS: a page that n processes map counts as
1/n of it). PSS depends on what else runs: here the controller's stand-in maps
the same libraries. `alone` is what the processes would have if nothing else
mapped them. The peer has no target: it reads less of each device and has no
stream, and serves as a comparison.
"""

import http.client
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from bench.processes import cores, fleet_file, free_port, measure, running, spread, started
from bench.runner import Options, benchmark, report_promise
from bench.tables import write_csv

CPU_RATIO_MOST, BYTES_MOST = 0.01, 60_000_000
AGENT, CHILD, BEFORE, PEER = "eelgrid-agent", "with a child", "child, before", "nvitop-exporter"
_PEER_SCRIPT = Path(__file__).with_name("peer_exporter.py")
_START_S_MOST = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process over one window."""

    rate_hz: float
    subject: str
    cpu_ratio: float
    rss_bytes: int
    pss_bytes: int
    alone_bytes: int
    page_bytes: int
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a subject asked of the library in a second; `cycles` are looks at every device."""

    calls: float
    functions: int
    cycles: float
    cpu_ratio: float


# (rate, where to count calls or None) starts the subject on a port.
Start = Callable[[float, Path | None, int], AbstractContextManager[psutil.Process]]


def _agent(folder: Path, module: str, first: list[str], more: list[str], checkout: Path | None = None) -> Start:
    """`module` becomes the agent: it takes `first`, then the agent's flags."""

    @contextmanager
    def start(rate_hz: float, count: Path | None, port: int) -> Iterator[psutil.Process]:
        address = f"127.0.0.1:{free_port()}"
        flags = ["--controller", address, "--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{port}"]
        flags = [*first, *flags, *more] if count is None else [str(count), *flags, *more]
        sink = ["--listen", address, "--sample", str(1.0 / rate_hz)]
        with (
            running("bench.fleet_sink", sink, folder / "sink.log"),
            running(
                module if count is None else "bench.library_meter", flags, folder / "agent.log", checkout
            ) as process,
        ):
            yield process

    return start


def _peer(folder: Path, fleet: Path, python: str) -> Start:
    def start(rate_hz: float, count: Path | None, port: int) -> AbstractContextManager[psutil.Process]:
        given = [str(fleet), str(1.0 / rate_hz), "-" if count is None else str(count)]
        return started([python, str(_PEER_SCRIPT), *given, "--port", str(port)], folder / "peer.log")

    return start


def _page(port: int, encoding: str = "gzip") -> bytes:
    """The page as it is sent; compressed, for both can."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
        return connection.getresponse().read()
    finally:
        connection.close()


@contextmanager
def _scraped(port: int, interval_s: float) -> Iterator[None]:
    """Scrapes for as long as the block runs."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(interval_s):
            _page(port)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ready(process: psutil.Process, port: int, log: Path) -> None:
    until_s = time.monotonic() + _START_S_MOST
    while time.monotonic() < until_s and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            _page(port)
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"no page on port {port}; see {log}")


def _measured(options: Options, name: str, start: Start, rate_hz: float) -> Run:
    port = free_port()
    with start(rate_hz, None, port) as process:
        _ready(process, port, options.out)
        with _scraped(port, options.scrape):
            # Imports, the first connection and the first slow looks are not the steady state.
            time.sleep(options.settle)
            usage = measure(process, options.seconds)
        page = _page(port)
        series = sum(not line.startswith(b"#") for line in _page(port, "identity").splitlines())
    return Run(
        rate_hz=rate_hz,
        subject=name,
        cpu_ratio=usage.cpu_ratio,
        rss_bytes=usage.rss_bytes,
        pss_bytes=usage.pss_bytes,
        alone_bytes=usage.alone_bytes,
        page_bytes=len(page),
        series=series,
    )


def _asked(options: Options, name: str, start: Start, rate_hz: float) -> Asked:
    port, found = free_port(), options.out / f"library_{name}_{rate_hz:g}hz.json"
    found.unlink(missing_ok=True)
    with start(rate_hz, found, port) as process:
        _ready(process, port, options.out)
        with _scraped(port, options.scrape):
            time.sleep(options.settle)
            process.send_signal(signal.SIGUSR1)
            time.sleep(options.seconds)
            process.send_signal(signal.SIGUSR2)
            until_s = time.monotonic() + 5.0
            while not found.exists() and time.monotonic() < until_s:
                time.sleep(0.05)
    counts = json.loads(found.read_text())
    calls, seconds = counts["calls"], counts["seconds"]
    return Asked(
        calls=sum(calls.values()) / seconds,
        functions=len(calls),
        cycles=calls.get("nvmlDeviceGetUtilizationRates", 0) / seconds / options.gpus,
        cpu_ratio=sum(counts["cpu_ns"].values()) / 1e9 / seconds,
    )


def _told(runs: list[Run], asked: Asked | None) -> str:
    cpu = [100 * run.cpu_ratio for run in runs]
    lines = f"  {runs[0].subject:16} {spread(cpu)} % of a core, {spread([run.rss_bytes / 1e6 for run in runs])} MB "
    lines += f"resident, PSS {spread([run.pss_bytes / 1e6 for run in runs])}, "
    lines += f"alone {spread([run.alone_bytes / 1e6 for run in runs])}; "
    lines += f"page: {runs[-1].series} series, {runs[-1].page_bytes / 1e3:.3g} kB sent\n"
    if asked is None:
        return lines + "    the driver is in a child process, which is counted in"
    own = statistics.median(cpu) - 100 * asked.cpu_ratio
    lines += f"    asks {asked.calls:.4g} calls a second of {asked.functions} functions, {asked.cycles:.3g} cycles a "
    return lines + f"second; {100 * asked.cpu_ratio:.3g} % of a core is the simulated library's, {own:.3g} % its own"


def _write(out: Path, runs: list[Run]) -> None:
    fields = ("rate_hz", "subject", "cpu_ratio", "rss_bytes", "pss_bytes", "alone_bytes", "page_bytes", "series")
    write_csv(out / "agent_overhead.csv", fields, ([getattr(run, field) for field in fields] for run in runs))


def _kept(runs: list[Run]) -> bool | None:
    """Whether the promise is kept; None where nothing was measured that it is about."""
    bytes_of: dict[str, Callable[[Run], int]] = {AGENT: lambda run: run.rss_bytes, CHILD: lambda run: run.pss_bytes}
    kept = []
    for subject, size in bytes_of.items():
        ours = [run for run in runs if (run.rate_hz, run.subject) == (1.0, subject)]
        if ours:
            cpu = statistics.median(run.cpu_ratio for run in ours)
            kept.append(cpu <= CPU_RATIO_MOST and statistics.median(map(size, ours)) <= BYTES_MOST)
    return all(kept) if kept else None


@benchmark()
@click.option("--peer", metavar="PYTHON", help="an interpreter with nvitop-exporter installed")
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="checkout of a version to compare with")
@click.option("--rates", default="1,10", help="samples per second, with commas")
@click.option("--gpus", default=8)
@click.option("--product", default="h100-sxm5-80gb", help="GPU model to simulate")
@click.option("--rounds", default=5)
@click.option("--seconds", default=15.0, help="length of a window")
@click.option("--settle", default=4.0, help="seconds before the window")
@click.option("--scrape", default=15.0, help="seconds between scrapes")
def main(options: Options) -> int:
    """Measures, writes a CSV and says what came out."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as scratch:
        fleet = fleet_file(
            Path(scratch) / "fleet.json", nodes=1, gpus=options.gpus, product=options.product, model=options.product
        )
        scene = Path(scratch) / "scene.json"
        scene.write_text(json.dumps({"products": [options.product] * options.gpus}))
        machine = ["--node-name", "node-0", "--state", str(Path(scratch) / "state")]
        subjects = [
            (AGENT, _agent(options.out, "eelgrid_agent", [], ["--simulate", str(fleet)])),
            (CHILD, _agent(options.out, "bench.worker_agent", [str(scene)], machine)),
        ]
        if options.before is not None:
            before = options.before.absolute()
            subjects.append((BEFORE, _agent(options.out, "bench.worker_agent", [str(scene)], machine, before)))
        if options.peer is not None:
            subjects.append((PEER, _peer(options.out, fleet, options.peer)))
        else:
            sys.stdout.write("no peer: install nvitop-exporter somewhere and name its interpreter with --peer\n")
        for rate_hz in map(float, options.rates.split(",")):
            print(
                f"{options.gpus} x {options.product} at {rate_hz:g} Hz, scraped every {options.scrape:g} s, "
                f"{options.rounds} runs of {options.seconds:g} s each, {cores()} cores",
                flush=True,
            )
            for number in range(options.rounds):
                for name, start in subjects if number % 2 == 0 else reversed(subjects):
                    runs.append(_measured(options, name, start, rate_hz))
            for name, start in subjects:
                mine = [run for run in runs if (run.rate_hz, run.subject) == (rate_hz, name)]
                asked = None if name in (CHILD, BEFORE) else _asked(options, name, start, rate_hz)
                print(_told(mine, asked), flush=True)
    _write(options.out, runs)
    kept = _kept(runs)
    return 0 if kept is None else report_promise("at 1 Hz 1 % of a core and 60 MB", kept=kept)


if __name__ == "__main__":
    sys.exit(main())
