"""eelctl box: a controller and an agent on this machine, without root and without configuration.

Both run in the background in sessions of their own, with their state, sockets and logs in one folder. Jobs belong to
their launchers, not to the agent: they go on while the box is stopped, and the next start finds them again.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.box_state import (
    BoxProcesses,
    find_box_folder,
    find_shared_folder,
    is_process_alive,
    load_box,
    read_start_ticks,
    store_box,
)
from eelgrid_controller.cli.connection import CliError, CliSettings, UsageMismatch, connect_operators, iterate_pages
from eelgrid_controller.cli.output import echo
from eelgrid_controller.formatting import describe_start
from eelgrid_protos.messages import CancelWorkloadRequest, GetSummaryRequest, ListWorkloadsRequest, WorkloadPhase

# The first start compiles the planner's kernels.
_START_S = 180.0
_STOP_S = 30.0
_POLL_S = 0.05
_LOG_LINES = 5
# Linux takes 107 bytes for the path of a socket.
_SOCKET_PATH_MOST = 107
_NOT_RUNNING = 3


class BoxFailed(CliError):
    """A process of the box did not start or did not stop."""


@click.group()
def box() -> None:
    """Start, show or stop a controller and an agent on this machine."""


@box.command()
@click.option("--foreground", is_flag=True, help="Stay, and stop the box on Ctrl-C.")
@click.option(
    "--allow-root",
    is_flag=True,
    envvar="EELGRID_ALLOW_ROOT",
    help="Run jobs as root, on a machine that only root uses. [env EELGRID_ALLOW_ROOT]",
)
@click.option(
    "--shared",
    is_flag=True,
    help="As root: let every user of this machine submit, and run each job as the user who submitted it.",
)
@click.option(
    "--gpu-sharing",
    type=click.Choice(("time-slicing", "mps")),
    help="How jobs on shares of a GPU share it: in turns (the default), or by CUDA's Multi-Process Service, side by side "
    "and each held to its share.",
)
@click.option(
    "--simulate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Simulate the GPUs of this fleet file.",
)
@click.pass_obj
def start(
    settings: CliSettings,
    *,
    foreground: bool,
    allow_root: bool,
    shared: bool,
    gpu_sharing: str | None,
    simulate: Path | None,
) -> None:
    """Start the box, unless it runs; jobs of before are found again.

    It runs jobs as you, on this machine's GPUs or, without any, on its CPUs; nobody else can reach it. Started by root
    with --shared, every user of the machine finds it, and runs jobs as itself.
    """
    if shared and os.geteuid() != 0:
        raise UsageMismatch("--shared needs root, to run jobs as other users", "leave it out, or start it with sudo")
    if os.geteuid() == 0 and not (allow_root or shared):
        remedy = "start the box as a user, or with --shared or --allow-root"
        raise UsageMismatch("root would run every job as root", remedy)
    folder = find_box_folder()
    with _locked(folder):
        known = load_box(folder)
        if known is not None and known.is_complete:
            echo(f"the box runs already\n  at {known.address}")
        else:
            if known is not None:
                _end(known)
            flags = (
                *(("--allow-root",) if allow_root else ()),
                *(("--run-as", "owner") if shared else ()),
                *(() if gpu_sharing is None else ("--gpu-sharing", gpu_sharing)),
                *(() if simulate is None else ("--simulate", str(simulate.absolute()))),
            )
            known = _begin(settings, folder, is_shared=shared, agent_flags=flags)
            echo(f"the box runs\n  at {known.address}")
            echo("next: eelctl run -- COMMAND", err=True)
    if foreground:
        _stay(known)


@box.command()
@click.pass_obj
def status(settings: CliSettings) -> None:
    """Show whether the box runs, and what it does; exit with 3 if it does not."""
    known = load_box(find_box_folder())
    if known is None or not known.is_complete:
        echo("the box does not run; eelctl box start")
        sys.exit(_NOT_RUNNING)
    with connect_operators(replace(settings, controller=known.address)) as client:
        found = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
        echo(f"the box runs\n  at {known.address}")
        echo(f"  controller {known.controller[0]}, agent {known.agent[0]}; logs in {find_box_folder()}")
        echo(f"  {found.gpus} GPUs, {found.cpu_milli // 1000} CPUs; {found.placed} jobs run, {found.pending} wait")


@box.command()
@click.option("--cancel", "cancels", is_flag=True, help="Cancel the jobs that run, and wait for their end.")
@click.pass_obj
def stop(settings: CliSettings, *, cancels: bool) -> None:
    """Stop the box; jobs that run go on, and the next start finds them again."""
    folder = find_box_folder()
    with _locked(folder):
        known = load_box(folder)
        if known is None or not (is_process_alive(known.controller) or is_process_alive(known.agent)):
            echo("the box does not run")
            return
        left = 0
        if known.is_complete:
            with connect_operators(replace(settings, controller=known.address)) as client:
                left = _cancel_jobs(client, settings) if cancels else _count_jobs(client, settings)
        _end(known)
    echo("the box is stopped")
    if left:
        echo(f"{left} job{' goes' if left == 1 else 's go'} on; the next `eelctl box start` finds them again", err=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder against another start or stop; creates it for this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BoxFailed(f"{folder}: {error.strerror}", "set XDG_STATE_HOME to a folder of your own") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _begin(settings: CliSettings, folder: Path, *, is_shared: bool, agent_flags: Sequence[str]) -> BoxProcesses:
    """Starts both and waits until the node is ready."""
    public = _open_shared_folder() if is_shared else folder
    address = f"unix:{public / 'controller.sock'}"
    if len(os.fsencode(public / "controller.sock")) > _SOCKET_PATH_MOST:
        raise BoxFailed(f"{public}: is too long for a socket", "set XDG_STATE_HOME to a shorter path")
    controller = _spawn(
        folder, "controller", "-m", "eelgrid_controller", "--listen", address, "--metrics", "127.0.0.1:0",
        "--data", str(folder / "controller"), *(("--local-users",) if is_shared else ()),
    )  # fmt: skip
    here = replace(settings, controller=address)
    with _ending_on_failure(controller):
        _wait_ready(here, folder, "controller", controller, nodes=0)
        agent = _spawn(
            folder, "agent", "-m", "eelgrid_agent", "--controller", address, "--listen",
            f"unix:{folder / 'agent.sock'}", "--metrics", "127.0.0.1:0", "--state", str(public / "agent"),
            "--run-processes", *agent_flags,
        )  # fmt: skip
        with _ending_on_failure(agent):
            _wait_ready(here, folder, "agent", agent, nodes=1)
            known = BoxProcesses(address=address, controller=_identify(controller), agent=_identify(agent))
            store_box(folder, known)
    return known


def _open_shared_folder() -> Path:
    """Creates the folder of a shared box, which everybody may enter and only root may change."""
    from eelgrid_protos.local_users import create_proofs_folder

    folder = find_shared_folder()
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.chmod(0o755)
        if folder.stat().st_uid != 0:
            raise BoxFailed(f"{folder}: does not belong to root", "remove it, or have root own it")
        # Before anybody connects, who would not prove anything otherwise.
        create_proofs_folder(f"unix:{folder / 'controller.sock'}")
    except OSError as error:
        raise BoxFailed(f"{folder}: {error.strerror}", "free its place") from None
    return folder


def _spawn(folder: Path, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = {key: text for key, text in os.environ.items() if not key.startswith("EELGRID_")}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own programs
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


@contextmanager
def _ending_on_failure(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        raise


def _identify(process: "subprocess.Popen[bytes]") -> tuple[int, int]:
    return process.pid, read_start_ticks(process.pid)


def _wait_ready(
    settings: CliSettings, folder: Path, name: str, process: "subprocess.Popen[bytes]", *, nodes: int
) -> None:
    """Waits until the controller answers and knows so many nodes; raises BoxFailed."""
    from eelgrid_protos import faults

    deadline_s, said = time.monotonic() + _START_S, ""
    log = folder / f"{name}.log"
    with connect_operators(settings) as client:
        while True:
            with contextlib.suppress(faults.Unavailable, faults.DeadlineExceeded):
                if client.get_summary(GetSummaryRequest(), timeout=1.0).summary.nodes_ready >= nodes:
                    return
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                raise BoxFailed(f"the {name} did not start: {' | '.join(lines)}", f"see {log}")
            phase = describe_start(log.read_text(errors="replace"))
            if phase.startswith("compiling") and phase != said:
                echo(said := phase, err=True)
            time.sleep(_POLL_S)


def _end(known: BoxProcesses) -> None:
    """Stops what lives of a box, the agent first; raises BoxFailed if one does not end."""
    for name, process in (("agent", known.agent), ("controller", known.controller)):
        if is_process_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_S
        while is_process_alive(process):
            if time.monotonic() > deadline_s:
                raise BoxFailed(f"the {name}, process {process[0]}, does not stop", f"kill -9 {process[0]}")
            with contextlib.suppress(ChildProcessError):
                # Ours in the foreground.
                os.waitpid(process[0], os.WNOHANG)
            time.sleep(_POLL_S)


def _stay(known: BoxProcesses) -> None:
    """Waits until Ctrl-C, SIGTERM, or the end of one of both, and stops the box."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while known.is_complete:
            time.sleep(0.5)
        raise BoxFailed("a process of the box has ended", f"see the logs in {find_box_folder()}")
    except KeyboardInterrupt:
        pass
    finally:
        _end(known)
    echo("the box is stopped", err=True)


def _running(client: Any, settings: CliSettings) -> list[str]:
    request = ListWorkloadsRequest(phases=(WorkloadPhase.PLACED,))
    found = iterate_pages(client.list_workloads, request, "workloads", timeout_s=settings.timeout_s)
    return [one.workload_id for one in found if one.spec.process is not None]


def _count_jobs(client: Any, settings: CliSettings) -> int:
    return len(_running(client, settings))


def _cancel_jobs(client: Any, settings: CliSettings) -> int:
    """Cancels the jobs that run and waits for their end; returns how many are left."""
    cancelled = set(_running(client, settings))
    for workload_id in cancelled:
        client.cancel_workload(CancelWorkloadRequest(workload_id=workload_id), timeout=settings.timeout_s)
    while left := cancelled.intersection(_running(client, settings)):
        time.sleep(_POLL_S)
    return len(left)
