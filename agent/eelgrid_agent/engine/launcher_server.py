"""The fork server: one small process without threads that forks the launchers of attempts for the agent.

`fork_server` is the agent's side of its socket. It runs without site-packages and imports the standard library only, so
that a fork copies little. Launchers are forked ahead: what a fork costs, and the pages that a launcher touches first,
3 ms of processor time, is paid while jobs run and not when eight of them end together.

If the server ends, launchers that wait for an attempt end with it, and those that have one go on: what was sent to them
stays in their socket.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections import deque

from eelgrid_agent.engine.launcher import IGNORED_BY_PYTHON, REQUEST_BYTES_MOST, run_launcher, wake_poll

# Launchers that wait: at the most, how long one that was taken is expected to be followed by another, and how long
# after the last request they are forked.
_SPARES_MOST = 8
_SPARE_S = 60
_QUIET_MS = 10


class SpareLaunchers:
    """Launchers that wait for an attempt, forked when nothing is to be started, so that a start waits for no fork.

    There is one, and as many more as were taken within a minute, up to a bound: eight jobs that end together are
    followed by eight others. Each leaves when the server's end of its socket closes.
    """

    def __init__(self, own: tuple[int, ...]) -> None:
        """Takes the descriptors of the server, which no launcher may keep."""
        self._own = own
        self._waiting: list[tuple[int, socket.socket]] = []
        self._taken_s: deque[float] = deque(maxlen=_SPARES_MOST)
        self._is_refused = False

    def timeout_ms(self) -> int:
        """Returns how long to wait for a request before `adjust`."""
        if len(self._waiting) < self._count_wanted() and not self._is_refused:
            return _QUIET_MS
        return _SPARE_S * 1000 if len(self._waiting) > 1 else -1

    def adjust(self) -> None:
        """Forks one that is missing, or lets go of those that are too many."""
        wanted = self._count_wanted()
        if len(self._waiting) < wanted:
            try:
                self._fork(())
            except OSError:
                # It is tried again after the next start.
                self._is_refused = True
        for _, requests in self._waiting[wanted:]:
            requests.close()
        del self._waiting[wanted:]

    def hand_over(self, folder: bytes, records: int) -> int:
        """Gives an attempt to a launcher, and returns its pidfd; raises OSError if none can be forked."""
        self._taken_s.append(time.monotonic())
        self._is_refused = False
        while True:
            if not self._waiting:
                self._fork((records,))
            pid, requests = self._waiting.pop()
            # One that was killed is not reaped yet, so the number is its own.
            with requests, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(requests, [folder], [records])
                return os.pidfd_open(pid)

    def forget(self, pid: int) -> None:
        """Forgets one that has ended."""
        for spare in [spare for spare in self._waiting if spare[0] == pid]:
            spare[1].close()
            self._waiting.remove(spare)

    def _count_wanted(self) -> int:
        since_s = time.monotonic() - _SPARE_S
        return max(1, sum(at_s > since_s for at_s in self._taken_s))

    def _fork(self, unused: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                kept = (requests.fileno() for _, requests in self._waiting)
                run_launcher(theirs, (*self._own, *unused, *kept, ours.fileno()))
        self._waiting.append((pid, ours))


def serve(control: socket.socket) -> None:
    """Gives each folder that is named on the socket to a launcher, until the agent closes its end.

    A request carries the folder's records, which are locked. The answers come in the order of the requests; each
    carries a pidfd, which is opened before the launcher can be reaped, so that it names no other process; or the number
    of an error.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, wake_poll)
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        # A daemon started in the background passes ignored signals on.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What is here already is not looked at again, so that its pages stay shared with every launcher.
    gc.freeze()
    spares = SpareLaunchers((control.fileno(), wake_read, wake_write))
    poll = select.poll()
    for descriptor in (control.fileno(), wake_read):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(spares.timeout_ms())]
        if control.fileno() in ready:
            request, passed, _, _ = socket.recv_fds(control, REQUEST_BYTES_MOST, 1)
            if not request:
                return
            _answer(control, request, passed, spares)
        elif not ready:
            spares.adjust()
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                spares.forget(pid)


def _answer(control: socket.socket, folder: bytes, passed: list[int], spares: SpareLaunchers) -> None:
    try:
        pidfd = spares.hand_over(folder, passed[0])
    except OSError as error:
        control.send(str(error.errno).encode())
    else:
        socket.send_fds(control, [b"0"], [pidfd])
        os.close(pidfd)
    for descriptor in passed:
        os.close(descriptor)


def main() -> None:
    """Serves the socket whose descriptor is named last."""
    with socket.socket(fileno=int(sys.argv[2])) as control:
        control.set_inheritable(False)
        serve(control)
