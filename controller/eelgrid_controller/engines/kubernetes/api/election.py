"""Leader election over a Lease: its terms, the pure state machine (events in, actions out), and the elector that runs it."""

import asyncio
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, Conflict, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import LEASES, ClusterClient, version_of
from eelgrid_controller.engines.kubernetes.model.quantities import format_micro_time
from eelgrid_controller.errors import ControllerConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of an election; the defaults are those of Kubernetes' own components."""

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > 2.0 * self.retry_s > 0.0:
            raise ControllerConfigError(
                f"lease {self.lease_s:g} s, renew {self.renew_s:g} s, retry {self.retry_s:g} s",
                "choose lease > renew > 2 x retry > 0",
            )

    @property
    def request_s(self) -> float:
        """How long one request may take: two of them, and the wait between, are over before a term is."""
        return (self.renew_s - self.retry_s) / 2.0


class LeadershipTerm(NamedTuple):
    """A time for which this controller leads; its epoch is larger than those of all terms before."""

    epoch: int
    until_s: float  # monotonic; later with each renewal
    is_continued: bool = False  # nobody else has led since our last term


def is_of(term: LeadershipTerm | None, epoch: int) -> bool:
    """Whether the term that runs, if one does, is that of an epoch: what was decided in another is not carried out."""
    return term is not None and term.epoch == epoch


class LeaseRecord(NamedTuple):
    """A Lease, parsed."""

    holder: str  # empty: free
    epoch: int
    version: str  # its resource version; empty for one that is to be written


class ElectionTick(NamedTuple):
    """Time has passed; waits may be over."""


class LeaseAnswered(NamedTuple):
    """The Lease as it was read or written; None where there is none."""

    sent_s: float
    record: LeaseRecord | None
    is_written: bool


class LeaseConflict(NamedTuple):
    """A write met another version: nothing was written."""


class LeaseRequestFailed(NamedTuple):
    """No answer, or an error; a write may have been carried out."""


class StopElection(NamedTuple):
    """Stop leading, and release the Lease."""


ElectionEvent = ElectionTick | LeaseAnswered | LeaseConflict | LeaseRequestFailed | StopElection


class ReadLease(NamedTuple):
    """Read the Lease."""


class WriteLease(NamedTuple):
    """Write the Lease against the version that was read; `against` is empty to create it."""

    record: LeaseRecord
    against: str
    is_new_term: bool  # for people: acquireTime is written with it
    is_continued: bool = False  # nobody else has led since our last term


class StartLeading(NamedTuple):
    """From now on lead, in this epoch, until then; told again with each renewal."""

    epoch: int
    until_s: float
    is_continued: bool = False  # nobody else has led since our last term


class StopLeading(NamedTuple):
    """Stop leading from now on."""

    why: str


ElectionAction = ReadLease | WriteLease | StartLeading | StopLeading


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """State of one candidate; a request is pending until it is answered."""

    identity: str  # of this process and no other, before or after
    timing: Timing
    floor: int = 0  # the largest epoch that is known
    seen: LeaseRecord | None = None  # with an empty version: it was there, and is gone
    since_s: float = 0.0  # when what is seen was first seen
    next_s: float = 0.0  # when to act next
    asked: ReadLease | WriteLease | None = None
    epoch: int = 0  # of our term, while it runs
    until_s: float = 0.0
    is_leading: bool = False
    is_unbroken: bool = False  # we led, and the Lease has been nobody else's since
    is_continued: bool = False  # so it was when our term, while it runs, began
    is_stopping: bool = False
    is_over: bool = False

    @property
    def wake_s(self) -> float:
        """When a tick is due."""
        due_s = [self.until_s] if self.is_leading else []
        if self.asked is None and not self.is_over:
            due_s.append(self.next_s)
        return min(due_s, default=float("inf"))

    @property
    def pause_s(self) -> float:
        """The wait between attempts, a little different for each candidate."""
        return self.timing.retry_s * (1.0 + 0.2 * zlib.crc32(self.identity.encode()) / 2**32)


def step_election(state: Election, event: ElectionEvent, now_s: float) -> tuple[Election, tuple[ElectionAction, ...]]:
    """The next state, and what to do; `now_s` is monotonic."""
    told: tuple[ElectionAction, ...] = ()
    if state.is_over:
        return state, told
    if state.is_leading and now_s >= state.until_s:
        state, told = _down(state, "the lease could not be renewed in time")
    asked = state.asked
    match event:
        case ElectionTick():
            pass
        case StopElection():
            state = replace(state, is_stopping=True)
            if state.is_leading:
                state, more = _down(state, "the controller stops")
                told += more
        case LeaseConflict():
            # Whoever wrote it, we do not know what it says: read before the next write.
            state = replace(state, asked=None, next_s=now_s, is_over=state.is_stopping)
            state = replace(state, seen=None if state.is_leading else state.seen)
        case LeaseRequestFailed():
            pause_s = state.pause_s * (0.25 if state.is_leading else 1.0)
            state = replace(state, asked=None, next_s=now_s + pause_s, is_over=state.is_stopping)
            state = replace(state, seen=None if state.is_leading else state.seen)
        case LeaseAnswered():
            state, more = _on_lease_answered(replace(state, asked=None), event, asked, now_s)
            told += more
    if state.asked is not None or state.is_over or (now_s < state.next_s and not state.is_stopping):
        return state, told
    state, more = _next_request(state)
    return state, told + more


def _down(state: Election, why: str) -> tuple[Election, tuple[ElectionAction, ...]]:
    return replace(state, is_leading=False, epoch=0, until_s=0.0), (StopLeading(why),)


def _on_lease_answered(
    state: Election, answer: LeaseAnswered, asked: ReadLease | WriteLease | None, now_s: float
) -> tuple[Election, tuple[ElectionAction, ...]]:
    """What a Lease that was read or written means."""
    record = answer.record
    if record is None or record.holder != state.identity:
        state = replace(state, is_unbroken=False)
    if record is None:
        if state.seen is not None and state.seen.version:
            # Somebody deleted it, and its holder may lead for a while yet.
            state = replace(state, seen=state.seen._replace(version=""), since_s=now_s)
    else:
        if state.seen is None or state.seen.version != record.version:
            state = replace(state, seen=record, since_s=now_s)
        state = replace(state, floor=max(state.floor, record.epoch))
    if isinstance(asked, WriteLease) and answer.is_written:
        return _written(state, asked, answer.sent_s, now_s)
    if state.is_leading:
        is_ours = record is not None and record.holder == state.identity and record.epoch == state.epoch
        if is_ours:
            return replace(state, next_s=now_s), ()  # a write of ours that arrived, without an answer: renew now
        holder = record.holder if record is not None else ""
        return _down(replace(state, next_s=now_s + state.pause_s), f"the lease is held by {holder or 'nobody'}")
    free_s = _free_at_s(state)
    if now_s < free_s or state.is_stopping:
        return replace(state, next_s=min(now_s + state.pause_s, free_s)), ()
    write = WriteLease(
        LeaseRecord(state.identity, state.floor + 1, ""),
        state.seen.version if state.seen else "",
        is_new_term=True,
        is_continued=state.is_unbroken,
    )
    return replace(state, asked=write), (write,)


def _free_at_s(state: Election) -> float:
    """When what is seen may be taken: at once where it is free, ours or never was, else a lease after it changed."""
    if state.seen is None or state.seen.holder in {"", state.identity}:
        return float("-inf")
    return state.since_s + state.timing.lease_s


def _written(
    state: Election, write: WriteLease, sent_s: float, now_s: float
) -> tuple[Election, tuple[ElectionAction, ...]]:
    """A write succeeded; the lease is counted from when it was sent."""
    if not write.record.holder:
        return replace(state, is_over=True), ()
    until_s = sent_s + state.timing.renew_s
    if state.is_stopping or now_s >= until_s or not (state.is_leading or write.is_new_term):
        # Too late to lead by it: the Lease is ours, and the next write begins a term of its own.
        return replace(state, next_s=now_s), ()
    epoch = write.record.epoch
    is_continued = write.is_continued if write.is_new_term else state.is_continued
    state = replace(
        state,
        is_leading=True,
        epoch=epoch,
        until_s=until_s,
        next_s=max(now_s, sent_s + state.pause_s),
        is_unbroken=True,
        is_continued=is_continued,
    )
    return state, (StartLeading(epoch, until_s, is_continued),)


def _next_request(state: Election) -> tuple[Election, tuple[ElectionAction, ...]]:
    """What to ask now, with nothing asked."""
    seen = state.seen
    asked: ReadLease | WriteLease = ReadLease()
    if state.is_stopping:
        if seen is None or not seen.version or seen.holder != state.identity:
            return replace(state, is_over=True), ()
        asked = WriteLease(LeaseRecord("", seen.epoch, ""), seen.version, is_new_term=False)
    elif state.is_leading and seen is not None and seen.version:
        asked = WriteLease(LeaseRecord(state.identity, state.epoch, ""), seen.version, is_new_term=False)
    return replace(state, asked=asked), (asked,)


_TIMING = Timing()


class Elector:
    """A candidate for one Lease; `run` until `stop`."""

    def __init__(
        self,
        cluster: ClusterClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        log: logging.Logger,
        timing: Timing = _TIMING,
        floor: int = 0,
    ) -> None:
        """`identity` must be of this process alone (pod name and a random word); `floor` is the last known epoch."""
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._log = log
        self._state = Election(identity=identity, timing=timing, floor=floor, next_s=clock.monotonic_s())
        self._heard: list[Callable[[LeadershipTerm | None], None]] = []
        self._request: asyncio.Task[ElectionEvent] | None = None
        self._stopping = asyncio.Event()

    @property
    def holder(self) -> str:
        """The last known holder of the Lease; empty without one."""
        return self._state.seen.holder if self._state.seen is not None else ""

    def term(self) -> LeadershipTerm | None:
        """The term that runs at this moment, None where this controller does not lead."""
        state = self._state
        if not state.is_leading or self._clock.monotonic_s() >= state.until_s:
            return None
        return LeadershipTerm(state.epoch, state.until_s, state.is_continued)

    def add_listener(self, callback: Callable[[LeadershipTerm | None], None]) -> None:
        """Tell the beginning and the end of terms to a callback, which must neither raise nor wait."""
        self._heard.append(callback)

    def stop(self) -> None:
        """Lead no more; `run` ends when the Lease is free, or cannot be set free."""
        self._stopping.set()

    async def run(self) -> None:
        """Take part until stopped. Cancelled, it leaves the Lease to run out."""
        stopping: asyncio.Task[Any] | None = asyncio.create_task(self._stopping.wait())
        try:
            self._apply_action(ElectionTick())
            while not self._state.is_over:
                waiting = {task for task in (self._request, stopping) if task is not None}
                wait_s = max(0.0, self._state.wake_s - self._clock.monotonic_s())
                done, _ = await asyncio.wait(waiting, timeout=min(wait_s, 3600.0), return_when=asyncio.FIRST_COMPLETED)
                if self._request is not None and self._request in done:
                    request, self._request = self._request, None
                    self._apply_action(request.result())
                elif stopping is not None and stopping in done:
                    stopping = None
                    self._apply_action(StopElection())
                else:
                    self._apply_action(ElectionTick())
        finally:
            if stopping is not None:
                stopping.cancel()
            if self._request is not None:
                self._request.cancel()
            if self._state.is_leading:
                self._state = replace(self._state, is_leading=False)
                self._notify_listeners(None)

    def _apply_action(self, event: ElectionEvent) -> None:
        """Apply an event to the election, and carry out its actions."""
        self._state, told = step_election(self._state, event, self._clock.monotonic_s())
        for one in told:
            match one:
                case StartLeading(epoch, until_s, is_continued):
                    self._notify_listeners(LeadershipTerm(epoch, until_s, is_continued))
                case StopLeading(why):
                    self._log.warning("lease=%s/%s leading=no reason=%s", self._namespace, self._name, why)
                    self._notify_listeners(None)
                case ReadLease() | WriteLease():
                    self._request = asyncio.create_task(self._execute_request(one))

    def _notify_listeners(self, term: LeadershipTerm | None) -> None:
        for callback in self._heard:
            callback(term)

    async def _execute_request(self, asked: ReadLease | WriteLease) -> ElectionEvent:
        """Carry out a request; whatever comes of it is an event."""
        sent_s = self._clock.monotonic_s()
        is_write = isinstance(asked, WriteLease)
        try:
            async with asyncio.timeout(self._state.timing.request_s):
                if isinstance(asked, WriteLease):
                    found = await self._write(asked)
                else:
                    found = await self._cluster.get(LEASES, self._name, namespace=self._namespace)
        except ObjectNotFound:
            return LeaseAnswered(sent_s, None, is_written=False)
        except Conflict:
            return LeaseConflict()
        except (ClusterError, ControllerConfigError, TimeoutError) as error:
            self._log.warning("lease=%s/%s written=%s error=%s", self._namespace, self._name, is_write, error)
            return LeaseRequestFailed()
        return LeaseAnswered(sent_s, record_of(found), is_written=is_write)

    async def _write(self, write: WriteLease) -> dict[str, Any]:
        record, now = write.record, format_micro_time(self._clock.now_ns())
        spec: dict[str, Any] = {
            "holderIdentity": record.holder or None,
            "leaseDurationSeconds": max(1, round(self._state.timing.lease_s)) if record.holder else 1,
            "leaseTransitions": record.epoch,
            "renewTime": now,
        }
        if write.is_new_term:
            spec["acquireTime"] = now
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if not write.against:
            return await self._cluster.create(LEASES, {"metadata": metadata, "spec": spec})
        body = {"metadata": {"resourceVersion": write.against}, "spec": spec}
        return await self._cluster.patch(LEASES, self._name, body, namespace=self._namespace)


def record_of(lease: Mapping[str, Any]) -> LeaseRecord:
    """Parse a Lease object."""
    spec = lease.get("spec") or {}
    return LeaseRecord(str(spec.get("holderIdentity") or ""), int(spec.get("leaseTransitions") or 0), version_of(lease))
