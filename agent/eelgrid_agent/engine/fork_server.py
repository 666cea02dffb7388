"""The agent's side of the fork server: one small process that forks every launcher.

Theory. Starting Python for each attempt costs 20 ms of CPU; a fork of a process that has it already, 1 ms. The agent
itself has threads, so it must not fork and go on. The server (`launcher.serve`) has one thread and no state: it ends
with the agent, whose end of the socket closes then, and the next start makes another. Launchers do not notice.

If the server is killed, or hangs, while a start is under way, whether it forked is not known here. It is killed and
waited for, so that nothing of it can fork later, and `ForkServerEnded` is raised: the caller looks at the folder's lock
and records, as after a restart of the agent.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from eelgrid_agent.engine import launcher

_LAUNCHER = str(Path(launcher.__file__).resolve())
# A fork takes milliseconds; a machine that swaps gets much more.
_ANSWER_S = 10.0


class ForkServerEnded(Exception):
    """The server ended during a start; the launcher may have been forked, or not."""


class ForkServer:
    """Starts launchers of attempts; used from one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., ForkServer] | None = None

    @property
    def pid(self) -> int:
        """The server's process id; 0 if none was started."""
        return 0 if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Starts the server unless one was started; raises OSError."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", _LAUNCHER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_ANSWER_S)
        self._control, self._process = ours, process
        self._finalizer = weakref.finalize(self, _end_server, ours, process)

    def close(self) -> None:
        """Ends the server; launchers go on."""
        if self._finalizer is not None:
            self._finalizer()
        self._control = self._process = None

    def start_launcher(self, folder: Path) -> int:
        """Starts the launcher of a folder with its lock, and returns a pidfd.

        Raises ForkServerEnded, and OSError if it was not started: BlockingIOError where the lock is held.
        """
        self.prepare()
        assert self._control is not None
        with contextlib.ExitStack() as stack:
            lock = open_lock(folder)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log = stack.enter_context((folder / "launcher.log").open("ab"))
            try:
                socket.send_fds(self._control, [os.fsencode(folder)], [lock, log.fileno()])
                answer, passed, _, _ = socket.recv_fds(self._control, 64, 1)
            except OSError as error:
                self._discard()
                raise ForkServerEnded(str(error)) from error
        if not answer:
            self._discard()
            raise ForkServerEnded("it closed its end")
        if not passed:
            raise OSError(int(answer), os.strerror(int(answer)))
        os.set_inheritable(passed[0], False)
        return passed[0]

    def _discard(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()


def open_lock(folder: Path) -> int:
    """Opens the lock of an attempt's folder, which its launcher holds while it lives; raises OSError."""
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _end_server(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Closes our end, at which the server leaves, and reaps it."""
    control.close()
    try:
        process.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
