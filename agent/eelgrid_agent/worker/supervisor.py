"""Keeps one child that asks all devices, and probes for those that hang: what was asked is answered in time, always.

Owns the children and the last listing, and carries out what the watchdog
decides. Must not know what a reading means. One thread calls it at a time.

A batch of calls is one request. When the child stops in the middle, the call
that it was in is answered with DeviceTimeout, and with OutcomeUnknown if it
changes a device; the calls before it are answered from the board, and those
after it are asked of the next child if there is time left. A call that began,
or may begin yet, is never repeated.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eelgrid_agent.device import DeviceError, DeviceTimeout, Missing, OutcomeUnknown
from eelgrid_agent.worker.calls import CALLS, decode_error
from eelgrid_agent.worker.frames import FrameError
from eelgrid_agent.worker.latency import Latencies
from eelgrid_agent.worker.process import Child, Deadlines, Kill, Outcome, Reply
from eelgrid_agent.worker.watchdog import Limits, Watchdog
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, Gpu

__all__ = ["Operation", "Result", "Supervisor"]

Operation = tuple[Any, ...]
Result = Any
_PLACES = frozenset(range(GPUS_PER_NODE_MOST))
_OPENING: tuple[Operation, ...] = (("gpus",),)
_ATTEMPTS_MOST = 3
_STRUCK_MOST = 256


class Supervisor:
    """See the module."""

    def __init__(
        self, factory: str, argument: str, *, deadlines: Deadlines, limits: Limits, kill: Kill = os.kill
    ) -> None:
        self._factory = factory
        self._argument = argument
        self._deadlines = deadlines
        self._kill = kill
        self._main: Child | None = None
        self._opening = self._nonsense = False
        self._passed_over: frozenset[int] = frozenset()
        # The request under way, or the one before; and how many operations of ours came before it.
        self._sent: Sequence[Operation] = ()
        self._extra = 0
        self._probe: tuple[Child, int] | None = None
        self._left_behind: dict[int, Child] = {}
        self.watchdog = Watchdog(limits)
        self.latencies = Latencies()
        self.known: Mapping[str, Gpu] = {}
        self.starts_total = 0
        # Places that were found to hang, for whoever tells of it.
        self.struck: deque[int] = deque(maxlen=_STRUCK_MOST)

    @property
    def children(self) -> tuple[int, ...]:
        """Process ids of the children that stand."""
        probe = () if self._probe is None else (self._probe[0].pid,)
        return (() if self._main is None else (self._main.pid,)) + probe

    def ask(self, operations: Sequence[Operation], budget_s: float) -> list[Result]:
        """What each call answered: its value, or the DeviceError that it raised; within the budget."""
        until_s = time.monotonic() + budget_s
        self.tend(alone=any(CALLS[operation[0]].alone for operation in operations))
        results: list[Result] = [None] * len(operations)
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
            problem = DeviceTimeout(f"the driver's worker stopped ({reply.detail}); ask again")
            if outcome in (Outcome.LATE, Outcome.DIED):
                reply = self._condemn(reply)
            for index, answer in zip(todo, reply.answers, strict=False):
                results[index] = self._decode(operations[index], answer)
            # While the child goes on, all that it was asked may be done yet.
            done = len(reply.answers)
            begun = len(todo) if outcome is Outcome.PENDING else max(done, reply.progress.operation + 1)
            for index in todo[done:begun]:
                results[index] = _unheard(operations[index], outcome)
            todo = self._answer_apart(operations, todo[begun:], results)
        for index in todo:
            results[index] = problem
        if self._nonsense and self._main is not None:
            self._condemn(Reply(outcome=Outcome.DIED))
        self._nonsense = False
        self._note_answers(operations, results)
        return results

    def tend(self, *, alone: bool = False) -> None:
        """Looks after the children that are not asked: collects those that ended, hears the probe, starts one.

        A call that must be alone with the driver has the probe, which holds a session of its own, called off.
        """
        now_s = time.monotonic()
        for pid, child in list(self._left_behind.items()):
            if child.ended():
                del self._left_behind[pid]
                self.watchdog.ended(pid, now_s)
        if alone:
            self._call_off_probe(now_s)
        elif self._probe is not None:
            self._hear_probe(now_s)
        elif (place := self.watchdog.probe_due(now_s)) is not None:
            probe = self._start(_PLACES - {place})
            if probe is None:
                self.watchdog.probe_failed(place, now_s)
                return
            uuid = self._uuid_at(place)
            probe.begin(_OPENING if uuid is None else (*_OPENING, ("read", uuid)))
            self._probe = probe, place

    def learn(self, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Takes a listing; devices that were passed over stay as they were last seen. Returns all, by index."""
        found = {gpu.uuid: gpu for gpu in gpus}
        places = {gpu.index for gpu in found.values()}
        kept = {
            uuid: gpu
            for uuid, gpu in self.known.items()
            if gpu.index in self.watchdog.apart and gpu.index not in places and uuid not in found
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
            reply = self._main.wait(until_s)
            if reply.outcome is Outcome.PENDING:
                return DeviceTimeout("the driver's worker is busy with an earlier call; ask again")
            if reply.outcome is Outcome.DONE:
                self._opened(reply)
                continue
            self._condemn(reply)
            if time.monotonic() >= until_s:
                return DeviceTimeout(f"the driver's worker stopped ({reply.detail}); ask again")

    def _start_main(self, until_s: float) -> DeviceError | None:
        now_s = time.monotonic()
        wait_s = self.watchdog.start_in_s(now_s)
        if wait_s is None:
            stuck = ", ".join(map(str, sorted(self.watchdog.left_behind)))
            return DeviceTimeout(f"processes {stuck} hang in the driver and cannot be ended; reboot the node")
        if now_s + wait_s >= until_s:
            return DeviceTimeout(
                f"the driver's worker failed and is started again in {wait_s:.1f} s; see the agent's and the kernel's log"
            )
        time.sleep(wait_s)
        self._passed_over = self.watchdog.apart
        self._main = self._start(self._passed_over)
        if self._main is None:
            self.watchdog.failed(None, time.monotonic())
            return DeviceTimeout("the system starts no process for the driver; see its limits")
        self._main.begin(_OPENING)
        self._sent, self._extra = _OPENING, 0
        self._opening = True
        return None

    def _start(self, passed_over: frozenset[int]) -> Child | None:
        try:
            child = Child(self._factory, self._argument, passed_over, self._deadlines, kill=self._kill)
        except OSError:
            return None
        self.starts_total += 1
        return child

    def _opened(self, reply: Reply) -> None:
        """The first listing of a new child, or the end of a call that nobody waits for any more."""
        if self._opening and reply.answers:
            listing = self._decode(_OPENING[0], reply.answers[0])
            if not isinstance(listing, DeviceError):
                self.learn(listing)
        self._opening = False

    def _exchange(self, operations: list[Operation], until_s: float) -> Reply:
        """One request to the child that stands; which devices it passes over goes with it when it changed."""
        assert self._main is not None
        apart = self.watchdog.apart
        self._sent, self._extra = operations, int(apart != self._passed_over)
        self._main.begin([("pass_over", *sorted(apart)), *operations] if self._extra else operations)
        self._passed_over = apart
        return self._without_extra(self._main.wait(until_s))

    def _without_extra(self, reply: Reply) -> Reply:
        """A reply in terms of what was asked for."""
        if not self._extra:
            return reply
        operation = max(reply.progress.operation - self._extra, -1)
        progress = replace(reply.progress, operation=operation)
        return replace(reply, answers=reply.answers[self._extra :], progress=progress)

    def _condemn(self, reply: Reply) -> Reply:
        """Ends the child that stopped and finds who is to blame; returns what it had done by then."""
        child, self._main = self._main, None
        assert child is not None
        self._opening = False
        blamed = None
        if reply.began:
            stopped_in = self._sent[min(reply.progress.operation, len(self._sent) - 1)]
            blamed = self._blamed(reply, stopped_in)
            self.latencies.add(stopped_in[0], self._deadlines.of(CALLS[stopped_in[0]].pace))
        unending = self._end(child)
        self.watchdog.failed(blamed, time.monotonic(), unending=unending)
        if blamed is not None:
            self.struck.append(blamed)
        # A late call may have come back at the last moment, and the one after it begun.
        return self._without_extra(child.last)

    def _blamed(self, reply: Reply, operation: Operation) -> int | None:
        """The place of the device that was being asked.

        A listing inside a call leaves the place that it asked last on the board,
        so the last place of all tells nothing against the device of the call.
        """
        own = self.known.get(operation[1]) if CALLS[operation[0]].of_device else None
        place = reply.progress.device
        last = max((gpu.index for gpu in self.known.values()), default=-1)
        if own is not None and place in (-1, last):
            return own.index
        return place if place >= 0 else None

    def _end(self, child: Child) -> int | None:
        """Ends a child; its process id where the kernel cannot."""
        if child.end():
            return None
        self._left_behind[child.pid] = child
        return child.pid

    def _answer_apart(self, operations: Sequence[Operation], todo: Iterable[int], results: list[Result]) -> list[int]:
        """Answers for the devices that hang; returns what is left to ask."""
        apart = self.watchdog.apart
        if not apart:
            return list(todo)
        left = []
        for index in todo:
            name, *arguments = operations[index]
            gpu = self.known.get(arguments[0]) if CALLS[name].of_device else None
            if gpu is not None and gpu.index in apart:
                results[index] = DeviceTimeout(
                    f"GPU {gpu.index} hangs and is asked by a probe now and then; see the kernel's log"
                )
            else:
                left.append(index)
        return left

    def _decode(self, operation: Operation, answer: Any) -> Result:
        """The value or the DeviceError in an answer; an answer that is neither condemns the child that gave it."""
        name = operation[0]
        try:
            decoded, elapsed_s = _decoded(name, answer)
        except (FrameError, InvalidMessage, ValueError, TypeError, LookupError) as error:
            self._nonsense = True
            if CALLS[name].changes:
                return OutcomeUnknown(f"the driver's worker gave no answer to {name} ({error}); read back what it did")
            return DeviceError(f"the driver's worker gave no answer to {name} ({error}); ask again")
        self.latencies.add(name, elapsed_s)
        return decoded

    def _note_answers(self, operations: Sequence[Operation], results: Sequence[Result]) -> None:
        """Devices that answered may be forgiven."""
        answered = [
            self.known[operation[1]].index
            for operation, result in zip(operations, results, strict=True)
            if not isinstance(result, DeviceError) and CALLS[operation[0]].of_device and operation[1] in self.known
        ]
        self.watchdog.answered(answered, time.monotonic())

    def _hear_probe(self, now_s: float) -> None:
        assert self._probe is not None
        child, place = self._probe
        reply = child.wait(now_s)
        if reply.outcome is Outcome.PENDING:
            return
        self._probe = None
        unending = self._end(child)
        if reply.outcome is Outcome.DONE and self._is_well(reply, place):
            self.watchdog.probe_answered(place)
        else:
            self.watchdog.probe_failed(place, now_s, unending=unending)

    def _call_off_probe(self, now_s: float) -> None:
        if self._probe is not None:
            child, place = self._probe
            self._probe = None
            self.watchdog.probe_called_off(place, now_s, unending=self._end(child))

    def _is_well(self, reply: Reply, place: int) -> bool:
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


def _unheard(operation: Operation, outcome: Outcome) -> DeviceTimeout:
    """What is said of a call that began, or may begin yet, and was not answered."""
    name, *arguments = operation
    call = CALLS[name]
    where = f" on {arguments[0]}" if call.of_device and arguments else ""
    what = {Outcome.LATE: "did not come back in time", Outcome.PENDING: "is under way still"}.get(
        outcome, "ended the driver's worker"
    )
    if call.changes:
        return OutcomeUnknown(f"{name}{where} {what}: whether it took hold is not known, so read it back")
    return DeviceTimeout(f"{name}{where} {what}; ask again")


def _decoded(name: str, answer: Any) -> tuple[Result, float]:
    """The value or the DeviceError in an answer, and the seconds that it took."""
    match answer:
        case [0, value, float(elapsed_s)]:
            return CALLS[name].decode(value), elapsed_s
        case [1, str(kind), str(message), float(elapsed_s)]:
            return decode_error(kind, message), elapsed_s
    raise FrameError("neither a value nor an error")
