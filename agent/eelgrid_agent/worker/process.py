"""The agent's end of one child: starts it, asks it one request at a time, sees when it is late, ends it.

Owns the process, its socket and its board. Must not know which device is to
blame or whether another child may start. One request is under way at most; a
call that waits no longer leaves it there, and a later call collects it.

Late is measured by operation, from the moment that the board says it began, so
that eight slow devices are not one hung one.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eelgrid_agent.worker.board import Board, Progress
from eelgrid_agent.worker.calls import CALLS, Pace
from eelgrid_agent.worker.frames import FrameError, Reader, pack

__all__ = ["Child", "Deadlines", "Kill", "Outcome", "Reply"]

_CHUNK = 262_144
_REAP_S = 0.3
_POLL_S = 0.002
_NOTHING = Progress(0, -1, -1, 0.0)

Kill = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds after which a call counts as hung, by its pace.

    A quick call takes milliseconds and a first contact with a device without
    persistence mode seconds, so these are far above and end only what is stuck. A
    setting takes milliseconds, an instance a second, and a change of MIG mode may
    reset the device. `taken_up_s` and `started_s` are for the child itself.
    """

    quick_s: float = 1.0
    slow_s: float = 5.0
    listing_s: float = 10.0
    setting_s: float = 10.0
    instance_s: float = 30.0
    mode_s: float = 60.0
    # A child that stands takes a request up at once, unless the machine is starved; one that starts reads files first.
    taken_up_s: float = 3.0
    started_s: float = 20.0

    def of(self, pace: Pace) -> float:
        """The seconds of a pace."""
        return {
            Pace.QUICK: self.quick_s, Pace.SLOW: self.slow_s, Pace.LISTING: self.listing_s,
            Pace.SETTING: self.setting_s, Pace.INSTANCE: self.instance_s, Pace.MODE: self.mode_s,
        }[pace]  # fmt: skip


class Outcome(Enum):
    """What became of a request."""

    DONE = "done"
    # Not yet: the child goes on.
    PENDING = "pending"
    # An operation is over its time.
    LATE = "late"
    # The child is gone or talks nonsense.
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An outcome, the answers that are there, and where the child was when it stopped."""

    outcome: Outcome
    answers: Sequence[Any] = ()
    progress: Progress = _NOTHING
    detail: str = ""

    @property
    def began(self) -> bool:
        """Whether the child took the request up, so that its operation may have done something."""
        return self.progress.operation >= 0


class Child:
    """One child process."""

    def __init__(
        self, factory: str, argument: str, passed_over: Iterable[int], deadlines: Deadlines, *, kill: Kill = os.kill
    ) -> None:
        """Starts it; raises OSError where the system starts no process."""
        self._deadlines = deadlines
        self._kill = kill
        self._reader = Reader()
        self._request = 0
        self._paces: tuple[Pace, ...] = ()
        self._begun_s = self._check_s = 0.0
        self.under_way = False
        # What the board said last, once nothing is written to it any more.
        self.last = Reply(outcome=Outcome.DIED)
        self._socket, theirs = socket.socketpair()
        self._board = Board.create()
        places = ",".join(str(place) for place in sorted(passed_over))
        command = (sys.executable, "-P", "-m", "eelgrid_agent.worker.child", factory, argument)
        with theirs:
            fds = (theirs.fileno(), self._board.fd)
            try:
                self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                    (*command, *map(str, fds), str(os.getpid()), places), pass_fds=fds, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError:
                self._socket.close()
                self._board.close()
                raise
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def begin(self, operations: Sequence[Sequence[Any]]) -> None:
        """Sends a request; the answer is `wait`'s. No request may be under way."""
        assert not self.under_way
        self._request += 1
        self._paces = tuple(CALLS[operation[0]].pace for operation in operations)
        self._begun_s = now_s = time.monotonic()
        self._check_s = now_s + self._deadlines.of(self._paces[0])
        self.under_way = True
        frame = pack([self._request, operations])
        try:
            if self._socket.send(frame) == len(frame):
                return
        except OSError:
            # A dead or stopped child: `wait` finds out which.
            return
        # Half a frame is none: a socket that takes no more belongs to a child that reads no more.
        self._begun_s = self._check_s = 0.0

    def wait(self, until_s: float) -> Reply:
        """The outcome of the request, waiting until then at most."""
        while True:
            now_s = time.monotonic()
            remaining_s = max(0.0, min(until_s, self._check_s) - now_s)
            try:
                answers = self._receive(remaining_s)
            except (OSError, EOFError, FrameError) as error:
                self.under_way = False
                return self._stopped(Outcome.DIED, str(error) or "its connection is closed")
            if answers is not None:
                self.under_way = False
                return Reply(outcome=Outcome.DONE, answers=answers)
            now_s = time.monotonic()
            if now_s >= self._check_s and self._is_late(now_s):
                self.under_way = False
                return self._stopped(Outcome.LATE, "an operation is over its time")
            if now_s >= until_s:
                return self._stopped(Outcome.PENDING, "it did not answer in time")

    def close(self, grace_s: float = 0.5) -> bool:
        """Lets it close the driver and end; ends it when it does not. False where the kernel cannot."""
        self._socket.close()
        if self._ended_within(grace_s):
            self._board.close()
            return True
        return self.end()

    def end(self) -> bool:
        """Kills it; False where the kernel cannot end it, so that it is left behind."""
        self._socket.close()
        if self._process.poll() is None:
            self._kill(self._process.pid, signal.SIGKILL)
        ended = self._ended_within(_REAP_S)
        self.last = self._stopped(Outcome.DIED, "it was ended")
        self._board.close()
        return ended

    def ended(self) -> bool:
        """Whether a child that was left behind is gone after all."""
        return self._process.poll() is not None

    def _receive(self, timeout_s: float) -> Sequence[Any] | None:
        """The answers of the request, or None within the time; raises EOFError at the end of the connection."""
        if not self._poll.poll(timeout_s * 1000.0):
            return None
        data = self._socket.recv(_CHUNK)
        if not data:
            raise EOFError
        self._reader.feed(data)
        try:
            response = self._reader.take()
        except EOFError:
            return None
        match response:
            case [int(identity), list(answers)] if identity == self._request and len(answers) == len(self._paces):
                return answers
        raise FrameError("an answer to no request of ours")

    def _is_late(self, now_s: float) -> bool:
        """Whether the operation that runs is over its time; if not, when to look again."""
        progress = self._board.progress()
        if progress.request != self._request or progress.operation < 0:
            first = self._request == 1
            due_s = self._begun_s + (self._deadlines.started_s if first else self._deadlines.taken_up_s)
            # Once it is taken up, its operation is due sooner.
            self._check_s = min(due_s, now_s + self._deadlines.of(self._paces[0]))
        else:
            pace = self._paces[min(progress.operation, len(self._paces) - 1)]
            self._check_s = due_s = progress.since_s + self._deadlines.of(pace)
        return now_s >= due_s

    def _stopped(self, outcome: Outcome, detail: str) -> Reply:
        """What the board says of a request that was not answered."""
        progress = self._board.progress()
        if progress.request != self._request:
            return Reply(outcome=outcome, detail=detail)
        return Reply(outcome=outcome, answers=self._board.answers(), progress=progress, detail=detail)

    def _ended_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True
