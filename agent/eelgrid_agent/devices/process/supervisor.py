"""Supervision of driver processes: start, requests with deadlines per operation, probes of hung devices.

One request is in progress per process. Lateness is measured by operation, from the moment that the shared progress
says it began. The watchdog decides which device is isolated and what may start; this module acts on it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from eelgrid_agent.devices.port import CallLatencies, DeviceError, DeviceTimeout, Missing, OutcomeUnknown
from eelgrid_agent.devices.process.protocol import (
    PORT_CALLS,
    CallClass,
    CallProgress,
    FrameError,
    FrameReader,
    ProgressBoard,
    decode_error,
    pack_frame,
)
from eelgrid_agent.devices.process.watchdog import DriverWatchdog, WatchdogLimits
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, Gpu
from eelgrid_protos.values import dataclass

_CHUNK = 262_144
_REAP_S = 0.3
_POLL_S = 0.002
_NOTHING = CallProgress(0, -1, -1, 0.0)

KillProcess = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadlines:
    """Seconds after which a call counts as hung, by its pace.

    A quick call takes milliseconds and a first contact with a device without persistence mode seconds, so these are far
    above and end only what is stuck. A setting takes milliseconds, an instance a second, and a change of MIG mode may
    reset the device. `taken_up_s` and `started_s` bound the start of a request and of the child itself.
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

    def get_deadline_s(self, pace: CallClass) -> float:
        """The seconds of a pace."""
        return {
            CallClass.QUICK: self.quick_s,
            CallClass.SLOW: self.slow_s,
            CallClass.LISTING: self.listing_s,
            CallClass.SETTING: self.setting_s,
            CallClass.INSTANCE: self.instance_s,
            CallClass.MODE: self.mode_s,
        }[pace]


class RequestOutcome(Enum):
    """What became of a request."""

    DONE = "done"
    # Not yet: the child goes on.
    PENDING = "pending"
    # An operation is over its time.
    LATE = "late"
    # The child is gone or talks nonsense.
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReply:
    """An outcome, the answers that are there, and where the child was when it stopped."""

    outcome: RequestOutcome
    answers: Sequence[Any] = ()
    progress: CallProgress = _NOTHING
    detail: str = ""

    @property
    def began(self) -> bool:
        """Whether the child took the request up, so that its operation may have done something."""
        return self.progress.operation >= 0


class DriverProcess:
    """One child process."""

    def __init__(
        self,
        factory: str,
        argument: str,
        passed_over: Iterable[int],
        deadlines: CallDeadlines,
        *,
        kill: KillProcess = os.kill,
    ) -> None:
        """Starts it; raises OSError where the system starts no process."""
        self._deadlines = deadlines
        self._kill = kill
        self._reader = FrameReader()
        self._request = 0
        self._paces: tuple[CallClass, ...] = ()
        self._begun_s = self._check_s = 0.0
        self.under_way = False
        # What the board said last, once nothing is written to it any more.
        self.last = RequestReply(outcome=RequestOutcome.DIED)
        self._socket, theirs = socket.socketpair()
        self._board = ProgressBoard.create()
        places = ",".join(str(place) for place in sorted(passed_over))
        command = (sys.executable, "-P", "-m", "eelgrid_agent.devices.process.child", factory, argument)
        with theirs:
            fds = (theirs.fileno(), self._board.fd)
            try:
                self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                    (*command, *map(str, fds), str(os.getpid()), places),
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
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

    def send_request(self, operations: Sequence[Sequence[Any]]) -> None:
        """Sends a request; the answer is `wait`'s. No request may be under way."""
        assert not self.under_way
        self._request += 1
        self._paces = tuple(PORT_CALLS[operation[0]].pace for operation in operations)
        self._begun_s = now_s = time.monotonic()
        self._check_s = now_s + self._deadlines.get_deadline_s(self._paces[0])
        self.under_way = True
        frame = pack_frame([self._request, operations])
        try:
            if self._socket.send(frame) == len(frame):
                return
        except OSError:
            # A dead or stopped child: `wait` finds out which.
            return
        # Half a frame is none: a socket that takes no more belongs to a child that reads no more.
        self._begun_s = self._check_s = 0.0

    def wait_reply(self, until_s: float) -> RequestReply:
        """The outcome of the request, waiting until then at most."""
        while True:
            now_s = time.monotonic()
            remaining_s = max(0.0, min(until_s, self._check_s) - now_s)
            try:
                answers = self._receive(remaining_s)
            except (OSError, EOFError, FrameError) as error:
                self.under_way = False
                return self._stopped_reply(RequestOutcome.DIED, str(error) or "its connection is closed")
            if answers is not None:
                self.under_way = False
                return RequestReply(outcome=RequestOutcome.DONE, answers=answers)
            now_s = time.monotonic()
            if now_s >= self._check_s and self._is_late(now_s):
                self.under_way = False
                return self._stopped_reply(RequestOutcome.LATE, "an operation is over its time")
            if now_s >= until_s:
                return self._stopped_reply(RequestOutcome.PENDING, "it did not answer in time")

    def close(self, grace_s: float = 0.5) -> bool:
        """Asks the child to close the driver and end, and kills it if it does not.

        False where the kernel cannot end it.
        """
        self._socket.close()
        if self._ended_within(grace_s):
            self._board.close()
            return True
        return self.kill()

    def kill(self) -> bool:
        """Kills it; False where the kernel cannot end it, so that it is left behind."""
        self._socket.close()
        if self._process.poll() is None:
            self._kill(self._process.pid, signal.SIGKILL)
        ended = self._ended_within(_REAP_S)
        self.last = self._stopped_reply(RequestOutcome.DIED, "it was ended")
        self._board.close()
        return ended

    def has_ended(self) -> bool:
        """Whether a child that was left behind is gone after all."""
        return self._process.poll() is not None

    def _receive(self, timeout_s: float) -> Sequence[Any] | None:
        """The answers of the request, or None within the time; raises EOFError at the end of the connection."""
        if not self._poll.poll(timeout_s * 1000.0):
            return None
        data = self._socket.recv(_CHUNK)
        if not data:
            raise EOFError
        self._reader.feed_data(data)
        try:
            response = self._reader.read_frame()
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
            self._check_s = min(due_s, now_s + self._deadlines.get_deadline_s(self._paces[0]))
        else:
            pace = self._paces[min(progress.operation, len(self._paces) - 1)]
            self._check_s = due_s = progress.since_s + self._deadlines.get_deadline_s(pace)
        return now_s >= due_s

    def _stopped_reply(self, outcome: RequestOutcome, detail: str) -> RequestReply:
        """What the board says of a request that was not answered."""
        progress = self._board.progress()
        if progress.request != self._request:
            return RequestReply(outcome=outcome, detail=detail)
        return RequestReply(outcome=outcome, answers=self._board.answers(), progress=progress, detail=detail)

    def _ended_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True


PortOperation = tuple[Any, ...]
PortResult = Any
_PLACES = frozenset(range(GPUS_PER_NODE_MOST))
_OPENING: tuple[PortOperation, ...] = (("gpus",),)
_ATTEMPTS_MOST = 3
_STRUCK_MOST = 256


class DriverSupervisor:
    """See the module."""

    def __init__(
        self,
        factory: str,
        argument: str,
        *,
        deadlines: CallDeadlines,
        limits: WatchdogLimits,
        kill: KillProcess = os.kill,
    ) -> None:
        self._factory = factory
        self._argument = argument
        self._deadlines = deadlines
        self._kill = kill
        self._main: DriverProcess | None = None
        self._opening = self._nonsense = False
        self._passed_over: frozenset[int] = frozenset()
        # The request under way, or the one before; and how many operations of ours came before it.
        self._sent: Sequence[PortOperation] = ()
        self._extra = 0
        self._probe: tuple[DriverProcess, int] | None = None
        self._left_behind: dict[int, DriverProcess] = {}
        self.watchdog = DriverWatchdog(limits)
        self.latencies = CallLatencies()
        self.known: Mapping[str, Gpu] = {}
        self.starts_total = 0
        # Places that were found to hang, for whoever tells of it.
        self.struck: deque[int] = deque(maxlen=_STRUCK_MOST)

    @property
    def children(self) -> tuple[int, ...]:
        """Process ids of the running children."""
        probe = () if self._probe is None else (self._probe[0].pid,)
        return (() if self._main is None else (self._main.pid,)) + probe

    def call_batch(self, operations: Sequence[PortOperation], budget_s: float) -> list[PortResult]:
        """What each call answered: its value, or the DeviceError that it raised; within the budget."""
        until_s = time.monotonic() + budget_s
        self.tend_children(alone=any(PORT_CALLS[operation[0]].alone for operation in operations))
        results: list[PortResult] = [None] * len(operations)
        todo = self._answer_apart(operations, range(len(operations)), results)
        problem: DeviceError | None = None
        for _ in range(_ATTEMPTS_MOST):
            if not todo:
                break
            problem = self._ready(until_s)
            if problem is not None:
                break
            reply = self._exchange([operations[index] for index in todo], until_s)
            outcome = reply.outcome
            problem = DeviceTimeout(f"the driver's worker stopped ({reply.detail}); retry")
            if outcome in (RequestOutcome.LATE, RequestOutcome.DIED):
                reply = self._condemn(reply)
            for index, answer in zip(todo, reply.answers, strict=False):
                results[index] = self._decode(operations[index], answer)
            # While the child goes on, all that it was asked may be done yet.
            done = len(reply.answers)
            begun = len(todo) if outcome is RequestOutcome.PENDING else max(done, reply.progress.operation + 1)
            for index in todo[done:begun]:
                results[index] = _unheard(operations[index], outcome)
            todo = self._answer_apart(operations, todo[begun:], results)
        for index in todo:
            results[index] = problem
        if self._nonsense and self._main is not None:
            self._condemn(RequestReply(outcome=RequestOutcome.DIED))
        self._nonsense = False
        self._note_answers(operations, results)
        return results

    def tend_children(self, *, alone: bool = False) -> None:
        """Tends the children without a request: collects those that ended, reads the probe, starts one.

        A probe holds a session of its own, so it is cancelled before a call that must be alone with the driver.
        """
        now_s = time.monotonic()
        for pid, child in list(self._left_behind.items()):
            if child.has_ended():
                del self._left_behind[pid]
                self.watchdog.on_process_exit(pid, now_s)
        if alone:
            self._call_off_probe(now_s)
        elif self._probe is not None:
            self._poll_probe(now_s)
        elif (place := self.watchdog.probe_due(now_s)) is not None:
            probe = self._start(_PLACES - {place})
            if probe is None:
                self.watchdog.on_probe_failure(place, now_s)
                return
            uuid = self._uuid_at(place)
            probe.send_request(_OPENING if uuid is None else (*_OPENING, ("read", uuid)))
            self._probe = probe, place

    def merge_listing(self, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Takes a listing; devices that were passed over stay as they were last seen. Returns all, by index."""
        found = {gpu.uuid: gpu for gpu in gpus}
        places = {gpu.index for gpu in found.values()}
        kept = {
            uuid: gpu
            for uuid, gpu in self.known.items()
            if gpu.index in self.watchdog.isolated_devices and gpu.index not in places and uuid not in found
        }
        moved = any(uuid in self.known and self.known[uuid].index != gpu.index for uuid, gpu in found.items())
        self.known = found | kept
        if moved:
            self.watchdog.forget_devices()
        return tuple(sorted(self.known.values(), key=lambda gpu: gpu.index))

    def close(self) -> None:
        """Ends every child; those that cannot be ended stay known."""
        self._call_off_probe(time.monotonic())
        child, self._main = self._main, None
        if child is not None and not child.close():
            self._left_behind[child.pid] = child

    def _ready(self, until_s: float) -> DeviceError | None:
        """A child that stands, has opened the driver and is idle; or why there is none by then."""
        while True:
            if self._main is None:
                problem = self._start_main(until_s)
                if problem is not None:
                    return problem
            assert self._main is not None
            if not self._main.under_way:
                return None
            reply = self._main.wait_reply(until_s)
            if reply.outcome is RequestOutcome.PENDING:
                return DeviceTimeout("the driver's worker is busy with an earlier call; retry")
            if reply.outcome is RequestOutcome.DONE:
                self._on_opened(reply)
                continue
            self._condemn(reply)
            if time.monotonic() >= until_s:
                return DeviceTimeout(f"the driver's worker stopped ({reply.detail}); retry")

    def _start_main(self, until_s: float) -> DeviceError | None:
        now_s = time.monotonic()
        wait_s = self.watchdog.start_in_s(now_s)
        if wait_s is None:
            stuck = ", ".join(map(str, sorted(self.watchdog.unkillable_processes)))
            return DeviceTimeout(f"processes {stuck} hang in the driver and cannot be ended; reboot the node")
        if now_s + wait_s >= until_s:
            return DeviceTimeout(
                f"the driver's worker failed and is started again in {wait_s:.1f} s; see the agent's and the kernel's log"
            )
        time.sleep(wait_s)
        self._passed_over = self.watchdog.isolated_devices
        self._main = self._start(self._passed_over)
        if self._main is None:
            self.watchdog.on_failure(None, time.monotonic())
            return DeviceTimeout("the system starts no process for the driver; see its limits")
        self._main.send_request(_OPENING)
        self._sent, self._extra = _OPENING, 0
        self._opening = True
        return None

    def _start(self, passed_over: frozenset[int]) -> DriverProcess | None:
        try:
            child = DriverProcess(self._factory, self._argument, passed_over, self._deadlines, kill=self._kill)
        except OSError:
            return None
        self.starts_total += 1
        return child

    def _on_opened(self, reply: RequestReply) -> None:
        """The first listing of a new child, or the end of a call that nobody waits for any more."""
        if self._opening and reply.answers:
            listing = self._decode(_OPENING[0], reply.answers[0])
            if not isinstance(listing, DeviceError):
                self.merge_listing(listing)
        self._opening = False

    def _exchange(self, operations: list[PortOperation], until_s: float) -> RequestReply:
        """One request to the child that stands; which devices it passes over goes with it when it changed."""
        assert self._main is not None
        apart = self.watchdog.isolated_devices
        self._sent, self._extra = operations, int(apart != self._passed_over)
        self._main.send_request([("pass_over", *sorted(apart)), *operations] if self._extra else operations)
        self._passed_over = apart
        return self._without_extra(self._main.wait_reply(until_s))

    def _without_extra(self, reply: RequestReply) -> RequestReply:
        """A reply in terms of what was asked for."""
        if not self._extra:
            return reply
        operation = max(reply.progress.operation - self._extra, -1)
        progress = replace(reply.progress, operation=operation)
        return replace(reply, answers=reply.answers[self._extra :], progress=progress)

    def _condemn(self, reply: RequestReply) -> RequestReply:
        """Ends the child that stopped and finds who is to blame; returns what it had done by then."""
        child, self._main = self._main, None
        assert child is not None
        self._opening = False
        blamed = None
        if reply.began:
            stopped_in = self._sent[min(reply.progress.operation, len(self._sent) - 1)]
            blamed = self._find_culprit(reply, stopped_in)
            self.latencies.add_call(stopped_in[0], self._deadlines.get_deadline_s(PORT_CALLS[stopped_in[0]].pace))
        unending = self._end(child)
        self.watchdog.on_failure(blamed, time.monotonic(), unending=unending)
        if blamed is not None:
            self.struck.append(blamed)
        # A late call may have come back at the last moment, and the one after it begun.
        return self._without_extra(child.last)

    def _find_culprit(self, reply: RequestReply, operation: PortOperation) -> int | None:
        """The place of the device that was being asked.

        A listing inside a call leaves the place that it asked last on the board,
        so the last place of all tells nothing against the device of the call.
        """
        own = self.known.get(operation[1]) if PORT_CALLS[operation[0]].of_device else None
        place = reply.progress.device
        last = max((gpu.index for gpu in self.known.values()), default=-1)
        if own is not None and place in (-1, last):
            return own.index
        return place if place >= 0 else None

    def _end(self, child: DriverProcess) -> int | None:
        """Ends a child; its process id where the kernel cannot."""
        if child.kill():
            return None
        self._left_behind[child.pid] = child
        return child.pid

    def _answer_apart(
        self, operations: Sequence[PortOperation], todo: Iterable[int], results: list[PortResult]
    ) -> list[int]:
        """Answers for the devices that hang; returns what is left to ask."""
        apart = self.watchdog.isolated_devices
        if not apart:
            return list(todo)
        left = []
        for index in todo:
            name, *arguments = operations[index]
            gpu = self.known.get(arguments[0]) if PORT_CALLS[name].of_device else None
            if gpu is not None and gpu.index in apart:
                results[index] = DeviceTimeout(
                    f"GPU {gpu.index} hangs and is probed at intervals; see the kernel's log"
                )
            else:
                left.append(index)
        return left

    def _decode(self, operation: PortOperation, answer: Any) -> PortResult:
        """The value or the DeviceError in an answer; an answer that is neither condemns the child that gave it."""
        name = operation[0]
        try:
            decoded, elapsed_s = _decode_answer(name, answer)
        except (FrameError, InvalidMessage, ValueError, TypeError, LookupError) as error:
            self._nonsense = True
            if PORT_CALLS[name].changes:
                return OutcomeUnknown(f"the driver's worker gave no answer to {name} ({error}); read back what it did")
            return DeviceError(f"the driver's worker gave no answer to {name} ({error}); retry")
        self.latencies.add_call(name, elapsed_s)
        return decoded

    def _note_answers(self, operations: Sequence[PortOperation], results: Sequence[PortResult]) -> None:
        """Devices that answered may be forgiven."""
        answered = [
            self.known[operation[1]].index
            for operation, result in zip(operations, results, strict=True)
            if not isinstance(result, DeviceError) and PORT_CALLS[operation[0]].of_device and operation[1] in self.known
        ]
        self.watchdog.on_answers(answered, time.monotonic())

    def _poll_probe(self, now_s: float) -> None:
        assert self._probe is not None
        child, place = self._probe
        reply = child.wait_reply(now_s)
        if reply.outcome is RequestOutcome.PENDING:
            return
        self._probe = None
        unending = self._end(child)
        if reply.outcome is RequestOutcome.DONE and self._is_well(reply, place):
            self.watchdog.on_probe_answer(place)
        else:
            self.watchdog.on_probe_failure(place, now_s, unending=unending)

    def _call_off_probe(self, now_s: float) -> None:
        if self._probe is not None:
            child, place = self._probe
            self._probe = None
            self.watchdog.on_probe_cancelled(place, now_s, unending=self._end(child))

    def _is_well(self, reply: RequestReply, place: int) -> bool:
        """Whether the probe's device answered: what is lost answers too, what times out does not."""
        listing = self._decode(_OPENING[0], reply.answers[0])
        if isinstance(listing, DeviceError) or place not in {gpu.index for gpu in listing}:
            return False
        if len(reply.answers) == 1:
            return True
        look = self._decode(("read",), reply.answers[1])
        timed_out = Missing(AbsenceReason.TIMED_OUT)
        return not isinstance(look, DeviceError) and timed_out not in (look.energy_counter_j, *look.values.values())

    def _uuid_at(self, place: int) -> str | None:
        return next((uuid for uuid, gpu in self.known.items() if gpu.index == place), None)


def _unheard(operation: PortOperation, outcome: RequestOutcome) -> DeviceTimeout:
    """What is said of a call that began, or may begin yet, and was not answered."""
    name, *arguments = operation
    call = PORT_CALLS[name]
    where = f" on {arguments[0]}" if call.of_device and arguments else ""
    what = {RequestOutcome.LATE: "did not come back in time", RequestOutcome.PENDING: "is under way still"}.get(
        outcome, "ended the driver's worker"
    )
    if call.changes:
        return OutcomeUnknown(f"{name}{where} {what}: whether it took effect is unknown, so read it back")
    return DeviceTimeout(f"{name}{where} {what}; retry")


def _decode_answer(name: str, answer: Any) -> tuple[PortResult, float]:
    """The value or the DeviceError in an answer, and the seconds that it took."""
    match answer:
        case [0, value, float(elapsed_s)]:
            return PORT_CALLS[name].decode(value), elapsed_s
        case [1, str(kind), str(message), float(elapsed_s)]:
            return decode_error(kind, message), elapsed_s
    raise FrameError("neither a value nor an error")
