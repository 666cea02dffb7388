"""Shares of GPUs by CUDA's Multi-Process Service (MPS): a control daemon for each GPU, and each user who shares it.

Owns the daemons, and who of the attempts uses which. Must not start attempts: those that wait for a daemon are handed back
when it runs, or with the reason why it does not.

Theory. Without MPS, processes that share a GPU take turns, and nothing limits any of them. With it they run side by side,
each with the multiprocessors and the memory of its share. An MPS server serves one user at a time and lets others wait
until all of its clients have ended, so each user has a daemon of its own; the GPU divides its time between their servers.
A daemon starts its server with the first client. It is told to quit with the last, since a server holds memory, which
the next job of the whole GPU would miss.

Daemons outlive the agent, as attempts do. One is found again by its pipe directory; those that no attempt uses quit.

The limits are the client's environment, so a process that removes them escapes them, as NVIDIA's own plugin has it.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eelgrid_agent.engine.mps_control import PROGRAM, find_daemon, send_commands
from eelgrid_agent.engine.port import AttemptKey, attempt_key, is_gpu_shared
from eelgrid_agent.engine.users import JobUser
from eelgrid_protos.messages import Assignment, Gpu
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

_LOG = logging.getLogger("eelgrid.agent")
# In the state directory of the agent.
MPS = "mps"
_LOG_SUFFIX = ".log"
_START_S = 10.0
_QUIT_S = 10.0
# One that does not start is tried again for so long: work that returned to the queue at once would come back at once.
_TRY_AGAIN_S = 5.0
_GIVE_UP_S = 60.0
_LOOK_AGAIN_S = 0.02
# Linux takes 107 bytes for a socket's path, of which the daemon's own names have some.
PATH_BYTES_MOST = 80
# "GPU-" and the first group of a UUID, which tells the GPUs of one node apart.
_UUID_PREFIX = slice(4, 12)
_PERCENT_MILLI = GPU_MILLI_WHOLE // 100


class MpsDaemonFailed(Exception):
    """A control daemon does not run."""


@dataclass(slots=True)
class _Daemon:
    """A daemon by its pipe directory: who uses it, who waits for it, and the task that starts or stops it."""

    pipes: str
    gpu_uuid: str = ""
    # None is the agent's own.
    user: JobUser | None = None
    is_up: bool = False
    users: set[AttemptKey] = field(default_factory=set)
    waiting: dict[AttemptKey, Assignment] = field(default_factory=dict)
    settling: asyncio.Task[None] | None = None


def _ignore_settled(_assignments: Sequence[Assignment], _problem: str) -> None:
    """Nobody listens yet."""


class MpsDaemons:
    """The control daemons of this node. `on_settled` gets those who waited, and why theirs does not run, or nothing."""

    def __init__(self, folder: Path, *, list_gpus: Callable[[], Iterable[Gpu]], is_offered: bool = True) -> None:
        """Limits memory where the GPU is listed; without an offer only looks after those of a previous run.

        Raises OSError for a folder that cannot be used, and MpsDaemonFailed where there is no MPS.
        """
        # The launcher, which tells a daemon of clients that it kills, has no PATH.
        self.program = shutil.which(PROGRAM) or ""
        if is_offered and not self.program:
            raise MpsDaemonFailed(f"{PROGRAM} is not on PATH; install it with the driver, or give time-slicing")
        if is_offered and len(os.fsencode(folder)) > PATH_BYTES_MOST:
            raise MpsDaemonFailed(f"{folder} is too long for its sockets; give a --state of fewer letters")
        self.on_settled: Callable[[Sequence[Assignment], str], None] = _ignore_settled
        self._folder, self._list_gpus, self._is_offered = folder, list_gpus, is_offered
        self._daemons: dict[str, _Daemon] = {}
        # Who is a client, and of which.
        self._clients: dict[AttemptKey, _Daemon] = {}
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)

    def admit(self, assignment: Assignment, user: JobUser | None) -> Mapping[str, str] | None:
        """Returns the variables of an attempt, without any for one that has no share; None if it waits for its daemon."""
        if not (self._is_offered and is_gpu_shared(assignment)):
            return {}
        key, uuid = attempt_key(assignment), assignment.gpu_uuids[0]
        daemon = self._find_daemon(self._pipes(uuid, os.geteuid() if user is None else user.uid))
        daemon.gpu_uuid, daemon.user = uuid, user
        if not daemon.is_up or not find_daemon(daemon.pipes):
            daemon.waiting[key] = assignment
            self._settle_soon(daemon)
            return None
        daemon.users.add(key)
        self._clients[key] = daemon
        return self._describe_share(daemon.pipes, assignment)

    def adopt(self, clients: Mapping[AttemptKey, str]) -> None:
        """Takes the attempts of the agent's previous run with their pipe directories; daemons without any quit."""
        for key, pipes in clients.items():
            self._clients[key] = self._find_daemon(pipes)
            self._clients[key].users.add(key)
        for found in sorted(self._folder.iterdir()):
            if found.suffix != _LOG_SUFFIX:
                self._settle_soon(self._find_daemon(str(found)))

    def is_waiting(self, key: AttemptKey) -> bool:
        """Returns whether an attempt waits for its daemon."""
        return any(key in daemon.waiting for daemon in self._daemons.values())

    def list_waiting(self) -> tuple[Assignment, ...]:
        """Returns what waits for a daemon."""
        return tuple(item for daemon in self._daemons.values() for item in daemon.waiting.values())

    def leave(self, key: AttemptKey) -> None:
        """Ends the use, or the wait, of an attempt; a daemon without any quits."""
        for waited in self._daemons.values():
            waited.waiting.pop(key, None)
        daemon = self._clients.pop(key, None)
        if daemon is not None:
            daemon.users.discard(key)
            self._settle_soon(daemon)

    def _pipes(self, gpu_uuid: str, uid: int) -> str:
        return str(self._folder / f"{gpu_uuid[_UUID_PREFIX]}-{uid}")

    def _find_daemon(self, pipes: str) -> _Daemon:
        daemon = self._daemons.get(pipes)
        if daemon is None:
            daemon = self._daemons[pipes] = _Daemon(pipes, is_up=find_daemon(pipes) > 0)
        return daemon

    def _settle_soon(self, daemon: _Daemon) -> None:
        if daemon.settling is None and (daemon.waiting or not daemon.users):
            daemon.settling = asyncio.get_running_loop().create_task(self._settle(daemon))

    async def _settle(self, daemon: _Daemon) -> None:
        """Starts or stops a daemon, until nobody waits and one without users has quit."""
        give_up_s = time.monotonic() + _GIVE_UP_S
        try:
            while daemon.waiting or not daemon.users:
                if daemon.waiting:
                    problem = await self._find_start_problem(daemon)
                    if problem and time.monotonic() < give_up_s:
                        await asyncio.sleep(_TRY_AGAIN_S)
                        continue
                    ready, daemon.waiting = tuple(daemon.waiting.values()), {}
                    daemon.is_up = not problem
                    self.on_settled(ready, problem)
                    continue
                daemon.is_up = False
                await self._quit(daemon.pipes)
                if not daemon.waiting:
                    del self._daemons[daemon.pipes]
                    return
        finally:
            daemon.settling = None

    async def _find_start_problem(self, daemon: _Daemon) -> str:
        """Starts a daemon unless it runs; returns why it does not."""
        try:
            await self._start(daemon)
        except (MpsDaemonFailed, OSError) as error:
            _LOG.warning("event=mps_failed gpu=%s reason=%r", daemon.gpu_uuid, str(error))
            return f"its MPS daemon does not start: {error}"
        return ""

    async def _start(self, daemon: _Daemon) -> None:
        """Starts a daemon unless it runs; raises MpsDaemonFailed and OSError."""
        if find_daemon(daemon.pipes):
            return
        pipes, user = Path(daemon.pipes), daemon.user
        log = await asyncio.to_thread(_make_directory, pipes, user)
        try:
            process = await asyncio.create_subprocess_exec(
                self.program,
                "-d",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "CUDA_MPS_PIPE_DIRECTORY": daemon.pipes,
                    "CUDA_MPS_LOG_DIRECTORY": daemon.pipes,
                    # By UUID here and in the client: an index of the client's would count these alone.
                    "CUDA_VISIBLE_DEVICES": daemon.gpu_uuid,
                },
                start_new_session=True,
                user=None if user is None else user.uid,
                group=None if user is None else user.gid,
                extra_groups=None if user is None else user.groups,
            )
        finally:
            os.close(log)
        await _wait_at_most(process, _START_S)
        if process.returncode != 0:
            raise MpsDaemonFailed(f"{PROGRAM} -d ended with {process.returncode}{_read_log(pipes)}")
        if not await _becomes_true(lambda: find_daemon(daemon.pipes) > 0, _START_S):
            raise MpsDaemonFailed(f"{PROGRAM} -d wrote no {PROGRAM}.pid within {_START_S:g} s{_read_log(pipes)}")
        _LOG.info("event=mps_started gpu=%s pipes=%s", daemon.gpu_uuid, daemon.pipes)

    async def _quit(self, pipes: str) -> None:
        """Ends a daemon with its server, and removes its directory."""
        pid = find_daemon(pipes)
        if pid:
            await asyncio.to_thread(send_commands, self.program, pipes, "quit\n", _QUIT_S)
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                if await _becomes_true(lambda: find_daemon(pipes) != pid, _QUIT_S):
                    break
            _LOG.info("event=mps_stopped pipes=%s", pipes)
        # A user may have put as much there as the disk holds.
        await asyncio.to_thread(shutil.rmtree, pipes, ignore_errors=True)
        _log_file(Path(pipes)).unlink(missing_ok=True)

    def _describe_share(self, pipes: str, assignment: Assignment) -> dict[str, str]:
        """The variables of a client: its share of the multiprocessors, and of the memory where that is known."""
        memory = next((gpu.memory_bytes for gpu in self._list_gpus() if gpu.uuid == assignment.gpu_uuids[0]), 0)
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": pipes,
            "CUDA_MPS_LOG_DIRECTORY": pipes,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, assignment.gpu_milli // _PERCENT_MILLI)),
        }
        if memory:
            # Of its only device; one that is named by its UUID is not limited.
            share = memory * assignment.gpu_milli // GPU_MILLI_WHOLE // MIB
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, share)}M"
        return variables


async def _wait_at_most(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Waits for a process; kills one that takes too long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _becomes_true(condition: Callable[[], bool], within_s: float) -> bool:
    """Waits for what others do; returns whether it came in time."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= until_s:
            return False
        await asyncio.sleep(_LOOK_AGAIN_S)
    return True


def _make_directory(pipes: Path, user: JobUser | None) -> int:
    """Makes the pipe directory of a daemon and opens its log; raises OSError."""
    # What a daemon that was killed has left.
    shutil.rmtree(pipes, ignore_errors=True)
    pipes.mkdir(mode=0o700)
    if user is not None:
        os.chown(pipes, user.uid, user.gid)
    # Not in the user's directory, where its name could lead to any file of root's.
    return os.open(_log_file(pipes), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _log_file(pipes: Path) -> Path:
    return pipes.with_name(pipes.name + _LOG_SUFFIX)


def _read_log(pipes: Path) -> str:
    """Returns the last line that a daemon has written, as the end of a sentence."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _log_file(pipes).read_text("utf-8", "replace")[-4096:].split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:120]}" if last else ""
