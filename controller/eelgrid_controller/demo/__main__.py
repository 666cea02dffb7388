"""`python -m eelgrid_controller.demo`: the options, the ending and the exit code.

Finds the trace, creates the directories and the view, runs the demo, and turns
every expected failure into what happened and what to do next. Exit codes:
0 success, 1 failure, 2 usage, 130 interrupted.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

# In a process of its own: a driver that hangs must not take the demo with it.
_GPU_PROBE = "import pynvml; pynvml.nvmlInit(); raise SystemExit(pynvml.nvmlDeviceGetCount() == 0)"
_GPU_PROBE_S = 10.0
_MODULES = {"psutil": "agent", "pynvml": "agent", "prometheus_client": "agent", "numba": "controller"}
_INTERRUPTED = 130
_LOOK_S = 1.0


def _fail(what: str, remedy: str, log: str = "") -> int:
    if log:
        click.echo(f"\n--- last lines of its log\n{log}\n---", err=True)
    click.echo(f"demo: {what}\n  next: {remedy}", err=True)
    return 1


def _has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU whose driver answers."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        probe = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", _GPU_PROBE], capture_output=True, timeout=_GPU_PROBE_S, check=False
        )
        return probe.returncode == 0
    return False


def _addresses(play: Any) -> list[tuple[str, str]]:
    """Lists the addresses of everything that the demo started."""
    found = [
        ("controller, gRPC", play.address),
        ("controller, metrics", f"http://{play.metrics['controller']}/metrics"),
    ]
    found += [(f"{name}, metrics", f"http://{at}/metrics") for name, at in play.metrics.items() if name != "controller"]
    found += [("live page", f"http://{play.page}/")] if play.page else []
    return found + ([("Prometheus", f"http://{play.prometheus}/")] if play.prometheus else [])


def _commands(play: Any, address: str) -> list[str]:
    """Lists commands to try first."""
    words = (
        "top",
        "energy --since 1h",
        f"doctor --metrics {play.metrics['controller']}",
        "nodes --limit 5",
        "workloads --phase pending",
        "explain openb-pod-0001",
        "policy get",
    )
    return [f"export EELGRID_CONTROLLER={address}", *(f"eelctl {one}" for one in words)]


async def _play(play: Any, scene: Any, *, keep: bool) -> None:
    from eelgrid_controller.demo.display import DemoReport, export_picture, print_addresses

    stopped, task, told = asyncio.Event(), asyncio.current_task(), len(play.notes)
    loop = asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)

    async def afterwards(report: DemoReport, address: str) -> None:
        console = scene.console
        export_picture(play.out / "demo.svg", scene, report)
        scene.console = console
        console.print(f"\nsummary and picture: {play.out / 'summary.json'}, {play.out / 'demo.svg'}", soft_wrap=True)
        if not keep:
            return
        for note in play.notes[told:]:
            console.print(f"note: {note}", soft_wrap=True, highlight=False)
        print_addresses(console, _addresses(play), _commands(play, address))
        loop.add_signal_handler(signal.SIGINT, stopped.set)
        while not stopped.is_set():
            for child in play.children:
                child.check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _LOOK_S)

    await play.run(afterwards)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--trace",
    default="auto",
    show_default=True,
    help="Trace to replay: auto, generated, or the folder of the openb trace.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 100_000),
    help="Use fewer nodes, evenly spaced; the number of tasks shrinks in proportion.",
)
@click.option("--tasks", type=click.IntRange(1, 1_000_000), help="Use only the first tasks.")
@click.option(
    "--in-flight", type=click.IntRange(1, 1024), default=8, show_default=True, help="Number of concurrent submissions."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder for the report, the plot and the logs.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep everything running until Ctrl-C, with the live page and, if installed, Prometheus; print the addresses.",
)
@click.option("--no-gpu", is_flag=True, help="Do not observe this machine's own GPUs.")
@click.pass_context
def demo(context: click.Context, /, trace: str, out: Path, keep: bool, **options: Any) -> None:
    """Start a controller and a fleet of simulated nodes, and replay a public production trace.

    Everything runs on this machine over loopback gRPC, in separate processes that end with the demo.

    \b
    eelctl demo --nodes 200 --keep
    """  # noqa: D301
    missing = {extra for module, extra in _MODULES.items() if importlib.util.find_spec(module) is None}
    if missing:
        extras = ",".join(sorted(missing))
        context.exit(_fail(f"the extras {extras} are not installed", 'pip install "eelgrid[agent,controller]"'))
    context.exit(_run(trace, out, options, keep=keep, gpu=not options.pop("no_gpu") and _has_gpu()))


def _run(choice: str, out: Path, options: dict[str, Any], *, keep: bool, gpu: bool) -> int:
    # Fail early, before gRPC is imported, whose threads would have to be ended again.
    from eelgrid_controller.replay.csv_reader import TraceError
    from eelgrid_controller.replay.trace_loading import TraceSearch, locate_openb

    try:
        trace = locate_openb(choice, TraceSearch.from_environment(os.environ)).truncated(
            nodes=options["nodes"], tasks=options["tasks"]
        )
        out.mkdir(parents=True, exist_ok=True)
    except TraceError as error:
        return _fail(f"{error.place}: {error.problem}", error.remedy)
    except OSError as error:
        return _fail_to_write(error, out)
    return _play_demo(trace, out, options, keep=keep, gpu=gpu)


def _fail_to_write(error: OSError, out: Path) -> int:
    return _fail(f"{error.filename or out}: {error.strerror or error}", "choose another folder with --out")


def _play_demo(trace: Any, out: Path, options: dict[str, Any], *, keep: bool, gpu: bool) -> int:
    from eelgrid_controller.demo.display import DemoView, NodeMap, make_console
    from eelgrid_controller.demo.run import DemoError, DemoRun
    from eelgrid_controller.replay.submitter import SubmitError
    from eelgrid_protos.faults import Fault
    from eelgrid_protos.sockets import raise_descriptor_limit

    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    console, play = make_console(live=live), None
    # Inherited by the children: each agent stream may need a file.
    raise_descriptor_limit()
    try:
        for note in trace.notes:
            console.print(f"note: {note}", soft_wrap=True, highlight=False)
        console.print(f"openb trace: {trace.source.value} ({trace.where})", soft_wrap=True, highlight=False)
        scene = DemoView(console, NodeMap.of(trace.nodes), trace.source.value, live=live)
        with tempfile.TemporaryDirectory(prefix="eelgrid-demo-", ignore_cleanup_errors=True) as work:
            play = DemoRun(
                trace=trace,
                scene=scene,
                out=out,
                work=Path(work),
                in_flight=options["in_flight"],
                has_gpu=gpu,
                notes=list(trace.notes),
                keep=keep,
            )
            scene.start()
            try:
                asyncio.run(_play(play, scene, keep=keep))
            finally:
                scene.stop()
                for child in play.children:
                    child.kill()
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("interrupted; the controller and the fleet have been stopped", err=True)
        return _INTERRUPTED
    except DemoError as error:
        return _fail(error.what, error.remedy, error.log)
    except SubmitError as error:
        return _fail(str(error), f"check {out / 'controller.log'}")
    except Fault as fault:
        return _fail(f"a call failed: {fault}", f"check {out / 'controller.log'}")
    except OSError as error:
        return _fail_to_write(error, out)
    return 0


def main() -> None:
    """Runs the demo and exits."""
    demo(prog_name="eelgrid-demo")


if __name__ == "__main__":
    main()
