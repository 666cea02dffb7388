"""Start times: `eelctl --help` and `--version` as whole processes, and a controller's first start and the one after it.

Targets: eelctl under 0.3 s; a controller with an empty kernel cache has placed a submission within 5 s, spends at most 20 s of
processor until all kernels are compiled, and has 300 MB resident afterwards. An agent with a simulated node starts beside
it, and the submission waits until the node is there. `--before DIR` names a checkout of another version,
whose controller is started in turn with ours; seconds of processor, of the whole tree, compare on a loaded machine.
`--image` starts it in turn with the kernels that an image brings along: compiled once for all processors of a kind.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
import psutil

from bench.processes import fleet_file, free_port, running, spread
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid import Client, ResourceRequest, WorkloadPhase, WorkloadSpec

SECONDS_MOST = 0.3
_PACKAGES = ("agent", "client", "controller", "kernels", "protos")
_PLACED_S, _CPU_S, _RESIDENT_MB = 5.0, 20.0, 300.0
_PLACED_S_MOST, _COMPILED_S_MOST = 60.0, 300.0


class ControllerStart(NamedTuple):
    """One start of a controller, until nothing is left to compile."""

    ready_s: float  # when it says where it serves
    placed_s: float  # when the first submission is seen to be placed
    compiled_s: float
    cpu_s: float  # of it and its children
    resident_mb: float


class StartedVersion(NamedTuple):
    """Sources of a controller, and what is set in its environment."""

    sources: Path
    kernels: Path
    environment: dict[str, str]


def _describe_environment(version: StartedVersion) -> dict[str, str]:
    folders = [version.kernels if name == "kernels" else version.sources / name for name in _PACKAGES]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))} | version.environment


def _copy_kernels(sources: Path, folder: Path) -> StartedVersion:
    """Returns a version whose kernels were never compiled: what stands compiled beside their sources is taken, too."""
    shutil.copytree(sources / "kernels", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return StartedVersion(sources, folder, {})


def _prepare_image(sources: Path, folder: Path) -> StartedVersion:
    """Returns a version whose kernels are compiled beside their sources, as the build of an image leaves them."""
    version = _copy_kernels(sources, folder)._replace(environment={"EELGRID_PORTABLE_KERNELS": "1"})
    environment = {k: v for k, v in _describe_environment(version).items() if k != "NUMBA_CACHE_DIR"}
    subprocess.run([sys.executable, "-m", "eelgrid_kernels"], env=environment, stdout=subprocess.DEVNULL, check=True)
    return version


def _await_placement(port: int, folder: Path) -> None:
    """Submits work, and waits until there is a node that takes it."""
    spec = WorkloadSpec(name="first", request=ResourceRequest(cpu_milli=1, gpu_count=1, gpu_milli=100))
    deadline_s = time.monotonic() + _PLACED_S_MOST
    with Client(f"127.0.0.1:{port}") as client:
        submitted = client.submit_workload(spec)
        while client.get_workload(submitted.id).phase is not WorkloadPhase.PLACED:
            if time.monotonic() > deadline_s:
                raise click.ClickException(
                    f"nothing was placed within {_PLACED_S_MOST:g} s; the controller said:\n{(folder / 'log').read_text()}"
                    f"the agent said:\n{(folder / 'agent.log').read_text()}"
                )
            time.sleep(0.02)


def _await_compilation(process: psutil.Process, folder: Path) -> None:
    """Waits until all kernels are in the cache, the compiler has ended, and machine code decides."""
    deadline_s = time.monotonic() + _COMPILED_S_MOST
    while (
        not any((folder / "kernels").rglob("complete-*"))
        or process.children()
        or "kernels=warm" not in (folder / "log").read_text()
    ):
        if time.monotonic() > deadline_s:
            raise click.ClickException(
                f"the kernels were not compiled within {_COMPILED_S_MOST:g} s; the controller said:\n"
                f"{(folder / 'log').read_text()}"
            )
        time.sleep(0.05)


def _start_controller(version: StartedVersion, folder: Path) -> ControllerStart:
    environment = _describe_environment(version) | {"NUMBA_CACHE_DIR": str(folder / "kernels")}
    port = free_port()
    command = (sys.executable, "-m", "eelgrid_controller", "--listen", f"127.0.0.1:{port}", "--metrics", "127.0.0.1:0")
    joins = ("--controller", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--simulate")
    agent = running("eelgrid_agent", [*joins, str(fleet_file(folder / "fleet.json", 1, 8))], folder / "agent.log")
    with (folder / "log").open("wb") as log, tempfile.TemporaryDirectory(dir=folder) as data, agent:
        begun_s = time.perf_counter()
        child = subprocess.Popen([*command, "--data", data], stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            ready_s = time.perf_counter() - begun_s
            if not line.startswith(b"serving"):
                raise click.ClickException(
                    f"the controller of {version.sources} did not start: {(folder / 'log').read_text()}"
                )
            _await_placement(port, folder)
            placed_s = time.perf_counter() - begun_s
            process = psutil.Process(child.pid)
            _await_compilation(process, folder)
            compiled_s = time.perf_counter() - begun_s
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
            return ControllerStart(ready_s, placed_s, compiled_s, sum(times[:4]), memory.rss / 1e6)
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10.0)
            child.kill()
            child.wait()


def _measure_controllers(versions: dict[str, StartedVersion], runs: int) -> list[tuple[str, str, *tuple[float, ...]]]:
    """Starts each version with an empty cache and once more with what that start has compiled, in turn."""
    rows: list[tuple[str, str, *tuple[float, ...]]] = []
    progress = Progress("starts")
    for _ in range(runs):
        for name, version in versions.items():
            with tempfile.TemporaryDirectory() as folder:
                for which in ("first", "second"):
                    rows.append((name, which, *_start_controller(version, Path(folder))))
                    progress.show(len(rows), 2 * runs * len(versions))
    return rows


@benchmark()
@click.option("--image", is_flag=True, help="Also with the kernels that an image brings along.")
@click.option("--runs", default=15, help="Starts of eelctl.")
@click.option("--first-starts", default=1, help="Starts of a controller with an empty kernel cache.")
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Checkout of a version to compare with.")
def main(options: Options) -> int:
    """Times whole processes after one warm-up."""
    program = Path(sys.executable).parent / "eelctl"
    kept = True
    rows = []
    for flag in ("--help", "--version"):
        taken = []
        for _ in range(options.runs + 1):
            begun = time.perf_counter()
            subprocess.run([program, flag], stdout=subprocess.DEVNULL, check=True)
            taken.append(time.perf_counter() - begun)
        rows += [(f"eelctl {flag}", seconds) for seconds in taken]
        print(f"eelctl {flag:10} {spread(taken[1:])} s")
        kept &= sorted(taken[1:])[options.runs // 2] < SECONDS_MOST
    write_csv(options.out / "start.csv", ("command", "seconds"), rows)
    exits = report_promise("eelctl: 0.3 s", kept=kept)
    versions = {"this": Path(__file__).parents[1]} | ({} if options.before is None else {"before": options.before})
    with tempfile.TemporaryDirectory() as folder:
        started = {name: _copy_kernels(sources, Path(folder) / name) for name, sources in versions.items()}
        if options.image:
            started["image"] = _prepare_image(versions["this"], Path(folder) / "image")
        starts = _measure_controllers(started, options.first_starts)
    write_csv(options.out / "controller.csv", ("version", "start", *ControllerStart._fields), starts)
    for version in started:
        for which in ("first", "second"):
            found = [ControllerStart(*row[2:]) for row in starts if row[:2] == (version, which)]
            ready_s, placed_s, compiled_s, cpu_s, resident_mb = map(spread, zip(*found, strict=True))
            print(
                f"{version:6} {which:6} start: ready after {ready_s} s, first placement after {placed_s} s, all compiled after "
                f"{compiled_s} s, {cpu_s} s of processor, {resident_mb} MB resident"
            )
    for version in ("this", "image") if options.image else ("this",):
        first = [ControllerStart(*row[2:]) for row in starts if row[:2] == (version, "first")]
        targets = f"first start, {version}: {_PLACED_S:g} s, {_CPU_S:g} s of processor, {_RESIDENT_MB:g} MB"
        kept = all(
            one.placed_s <= _PLACED_S and one.cpu_s <= _CPU_S and one.resident_mb <= _RESIDENT_MB for one in first
        )
        exits |= report_promise(targets, kept=kept)
    return exits


if __name__ == "__main__":
    sys.exit(main())
