"""The agent's side of the fork server: one small process that forks every launcher.

Theory. Starting Python for each attempt costs 20 ms of CPU; a fork of a process that has it already, 1 ms. The agent
itself has threads, so it must not fork and go on. The server (`launcher_server`) has one thread and no state: it ends
with the agent, whose end of the socket closes then, and the next start makes another. Launchers do not notice.

Requests are answered in their order, so the next folder is made while the server forks for the one before.

If the server is killed, or hangs, while starts are under way, whether it forked is not known here. It is killed and
waited for, so that nothing of it can fork later, and `ForkServerEnded` is raised: the caller looks at the locks and
records of all folders that are not answered, as after a restart of the agent.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from pathlib import Path

# The server finds its own modules here, and nothing else beside the standard library.
_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from eelgrid_agent.engine.launcher_server import main; main()"
# A fork takes milliseconds; a machine that swaps gets much more.
_ANSWER_S = 10.0
# So many are not answered at the most: neither side's socket is full then, so neither waits for the other.
REQUESTS_MOST = 16
_LOG_BYTES_MOST = 1024 * 1024


class ForkServerEnded(Exception):
    """The server ended during a start; the launcher may have been forked, or not."""


class ForkServer:
    """Starts launchers of attempts; used from one thread. What they cannot say elsewhere is added to `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Of launchers that were asked for: each stays open until then, so that there is room for the descriptor in the answer.
        self._records = deque[int]()
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
        log = None
        try:
            log = _open_log(self._log)
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
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
            if log is not None:
                os.close(log)
        ours.settimeout(_ANSWER_S)
        self._control, self._process = ours, process
        self._finalizer = weakref.finalize(self, _end_server, ours, process)

    def close(self) -> None:
        """Ends the server; launchers go on."""
        if self._finalizer is not None:
            self._finalizer()
        self._control = self._process = None
        while self._records:
            os.close(self._records.popleft())

    def request(self, folder: Path, records: int) -> None:
        """Asks for the launcher of a folder, which holds a copy of its locked descriptor while it lives; takes that over.

        Raises ForkServerEnded, and OSError if no server can be started.
        """
        self._records.append(records)
        try:
            self.prepare()
        except OSError:
            self.close()
            raise
        assert self._control is not None
        try:
            socket.send_fds(self._control, [os.fsencode(folder)], [records])
        except OSError as error:
            self._discard()
            raise ForkServerEnded(str(error)) from error

    def receive(self) -> int:
        """Returns the pidfd of the launcher that was asked for first; raises ForkServerEnded, or OSError if it was not forked."""
        if self._control is None:
            raise ForkServerEnded("it was killed")
        os.close(self._records.popleft())
        try:
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


def _open_log(path: Path) -> int:
    """Opens the log of all launchers, which begins anew when it is large; raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_size > _LOG_BYTES_MOST:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    return descriptor


def _end_server(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Closes our end, at which the server leaves, and reaps it."""
    control.close()
    try:
        process.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
