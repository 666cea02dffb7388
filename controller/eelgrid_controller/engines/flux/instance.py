"""Instance: what the scheduler module has said of one Flux instance: its resources, its jobs, and what they hold.

Owns the messages of the module, which are those of RFC 27 and of the journal, and the answers that need no placement. Must
not know the core, sockets, or clocks.

Theory. After each connection the module says all that stands, from `hello` to `ready`; only then is that picture in force,
and what was known before of jobs that are still there stays known. A message that cannot be read is left out and counted:
the module gives no job an R that overlaps another's, whatever is thought here. Several messages may come as one, in their
order (batches.py).

Which jobs the messages have changed is noted (`ChangedJobs`), so that nobody has to go over all of them. Whoever does not
know which, or has lost count, notes all.

Sources: flux-framework/rfc 20, 21, 25, 27.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_controller.engines.flux.allocations import AllocationConflict, FluxAllocations
from eelgrid_controller.engines.flux.batches import BATCH, READS_BATCHES, unpack_messages
from eelgrid_controller.engines.flux.jobspecs import JobRequest, find_infeasibility, parse_jobspec
from eelgrid_controller.engines.flux.journal import FluxJournal
from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    ResourceSet,
    format_job_id,
    parse_idset,
    parse_json,
    parse_resource_set,
    read_number,
)

WORKLOAD_PREFIX = "flux-"
# Parts of one job, as the core's contract has it.
PARTS_MOST = 10_000
# Until a job that was not adopted, or found no free place, is tried again, at the most.
RETRY_MOST_S = 30.0
# Changed jobs that are noted one by one; a look at all of them costs no more than one at more than these.
_CHANGED_MOST = 10_000
# errno of the answer to an infeasible request, as Flux's own schedulers give it, and to one that cannot be read.
_EOVERFLOW, _EINVAL = 75, 22


@dataclass(frozen=True, slots=True)
class FluxReply:
    """What the module is to be told: an answer to alloc or feasibility, or a job to cancel."""

    topic: str
    payload: Mapping[str, Any]


@dataclass(slots=True)
class FluxJob:
    """A job that waits, or holds resources; `request` is None where its jobspec was never said."""

    number: int
    user: str
    priority: int
    submit_s: float
    request: JobRequest | None = None
    # Not tried before, since a placement was not free; how often in a row.
    not_before_s: float = 0.0
    conflicts: int = 0
    # What Flux was told last while it waits, and from when on it may be told something else; 0 before the first look.
    annotated: Mapping[str, Any] = field(default_factory=dict)
    tell_from_s: float = 0.0
    # Its workload was live: if it is no more, and not by us, somebody has ended it here.
    was_live: bool = False
    is_left: bool = False
    # Its R was answered since the module has said all.
    is_answered: bool = False

    @property
    def base_id(self) -> str:
        """The id of its first workload."""
        return WORKLOAD_PREFIX + format_job_id(self.number)


@dataclass(slots=True)
class FluxView:
    """All that the module has said since its last hello."""

    allocations: FluxAllocations
    down: frozenset[int] = frozenset()
    waiting: dict[int, FluxJob] = field(default_factory=dict)
    running: dict[int, FluxJob] = field(default_factory=dict)
    observes: bool = False


@dataclass(slots=True)
class FluxCounts:
    """What was done since the start."""

    placed: int = 0
    denied: int = 0
    conflicts: int = 0
    unreadable: int = 0


class ChangedJobs:
    """Jobs of which something has changed since they were last looked at, by number; at the beginning all."""

    def __init__(self) -> None:
        # None: all.
        self._numbers: set[int] | None = None
        # By job, when it is to be looked at though nothing happens.
        self._later_s: dict[int, float] = {}

    def add(self, number: int) -> None:
        """Notes a job."""
        if self._numbers is not None:
            self._numbers.add(number)
            if len(self._numbers) > _CHANGED_MOST:
                self._numbers = None

    def add_all(self) -> None:
        """Notes all jobs, since it is not known which have changed."""
        self._numbers = None

    def add_later(self, number: int, at_s: float) -> None:
        """Notes a job from a time on; the earliest counts."""
        self._later_s[number] = min(at_s, self._later_s.get(number, at_s))

    def take(self, now_s: float) -> frozenset[int] | None:
        """Returns the jobs that are due, and forgets them; None for all, who then say anew what is to come later."""
        numbers, self._numbers = self._numbers, set()
        if numbers is None:
            self._later_s.clear()
            return None
        due = [number for number, at_s in self._later_s.items() if at_s <= now_s]
        for number in due:
            del self._later_s[number]
        return frozenset(numbers).union(due)


class FluxInstance:
    """Follows the messages of one instance's module."""

    def __init__(self) -> None:
        self.counts = FluxCounts()
        self.changed = ChangedJobs()
        # Whether the module reads several answers in one message.
        self.reads_batches = False
        self.journal = FluxJournal()
        self.view: FluxView | None = None
        # Properties of ranks that the core knows: racks, pools, models and their power.
        self.known: dict[str, frozenset[int]] = {}
        self.is_away = True
        self._coming: FluxView | None = None
        # The last pool that was extended, by which properties, and what came of it.
        self._extended: tuple[ResourceSet, Mapping[str, frozenset[int]], ResourceSet] | None = None

    def receive(self, topic: str, text: str) -> list[FluxReply]:
        """Follows a message of the module; returns what is to be answered at once. What cannot be read is counted."""
        if topic != BATCH:
            return self._receive_one(topic, text)
        try:
            several = unpack_messages(text)
        except FluxUnreadable:
            self.counts.unreadable += 1
            return []
        return [reply for one in several for reply in self._receive_one(*one)]

    def _receive_one(self, topic: str, value: Any) -> list[FluxReply]:
        try:
            found = parse_json(value, topic)
            match topic:
                case "hello":
                    self._begin(found)
                case "ready":
                    self._take_over()
                case "event":
                    self._follow_event(found)
                case "feasibility":
                    return [self._check_feasibility(found)]
                case _:
                    view = self._coming or self.view
                    return [] if view is None else self._follow(topic, found, view)
        except FluxUnreadable:
            self.counts.unreadable += 1
        return []

    def _begin(self, found: Mapping[str, Any]) -> None:
        pool = parse_resource_set(found.get("resources"))
        down = parse_idset(found.get("down", ""), "down")
        self.reads_batches = found.items() >= READS_BATCHES.items()
        self._coming = FluxView(FluxAllocations(pool), down, observes=found.get("mode") == "observe")
        if self._coming.observes:
            self.journal = FluxJournal()

    def _take_over(self) -> None:
        """Puts what stands in force. Of jobs that were known before, it stays known that they were live."""
        if self._coming is None:
            return
        if self.view is not None:
            before = self.view.waiting | self.view.running
            for number, job in (self._coming.waiting | self._coming.running).items():
                if (old := before.get(number)) is not None:
                    job.was_live, job.request = old.was_live, job.request or old.request
        self.view, self._coming, self.is_away = self._coming, None, False
        self.changed.add_all()

    def end_session(self) -> None:
        """The module is away: nothing is decided before it has said all anew."""
        self._coming, self.is_away = None, True

    def _follow(self, topic: str, found: Mapping[str, Any], view: FluxView) -> list[FluxReply]:
        match topic:
            case "resources":
                view.down = parse_idset(found.get("down", ""), "down")
                self._replace_pool(view, parse_resource_set(found.get("resources")))
                self.changed.add_all()
            case "running":
                job = _read_job(found)
                self._hold(view, job, parse_resource_set(found.get("R")))
            case "alloc":
                return self._follow_alloc(found, view)
            case "free":
                self._free(found, view)
            case "cancel":
                number = _read_id(found)
                self.changed.add(number)
                view.waiting.pop(number, None)
                # Its answer was on its way, and the module has not given it.
                if view.running.pop(number, None) is not None and (held := view.allocations.get(number)) is not None:
                    view.allocations.free(number, held, is_final=True)
            case "prioritize":
                for pair in found.get("jobs") or []:
                    if isinstance(pair, list) and len(pair) == 2 and pair[0] in view.waiting:
                        view.waiting[pair[0]].priority = int(read_number({"priority": pair[1]}, "priority"))
                        self.changed.add(pair[0])
            case _:
                raise FluxUnreadable(f"{topic[:40]!r} is no message of the module")
        return []

    def _free(self, found: Mapping[str, Any], view: FluxView) -> None:
        number, is_final = _read_id(found), found.get("final") is True
        # The last part frees all, whatever it names.
        resources = parse_resource_set(found.get("R")) if not is_final else ResourceSet(ranks={})
        self.changed.add(number)
        if view.allocations.free(number, resources, is_final=is_final) is None:
            view.running.pop(number, None)

    def _follow_alloc(self, found: Mapping[str, Any], view: FluxView) -> list[FluxReply]:
        job = _read_job(found)
        self.changed.add(job.number)
        try:
            job.request = parse_jobspec(found.get("jobspec"))
            problem = find_infeasibility(job.request, self.extend_pool(view.allocations.pool))
            if not problem and job.request.replicas > PARTS_MOST:
                problem = f"it has {job.request.replicas} parts; Eelgrid places {PARTS_MOST}, so ask for nodes"
        except FluxUnreadable as error:
            problem = str(error)
        if problem:
            return [self.deny(job.number, problem)]
        view.waiting[job.number] = job
        return []

    def _replace_pool(self, view: FluxView, pool: ResourceSet) -> None:
        """Follows a change of what there is: ranks may go while jobs hold them."""
        before, view.allocations = view.allocations, FluxAllocations(pool)
        for number in before:
            held = before.get(number)
            assert held is not None
            left = held.select_ranks(pool.ranks)
            if not left.ranks:
                view.running.pop(number, None)
                continue
            try:
                view.allocations.hold(number, left)
            except AllocationConflict:
                view.running.pop(number, None)

    def _hold(self, view: FluxView, job: FluxJob, resources: ResourceSet) -> None:
        try:
            view.allocations.hold(job.number, resources)
        except AllocationConflict as error:
            raise FluxUnreadable(str(error)) from None
        view.waiting.pop(job.number, None)
        view.running[job.number] = job
        self.changed.add(job.number)

    def _follow_event(self, found: Mapping[str, Any]) -> None:
        view = self._coming or self.view
        number = found.get("id")
        changes = self.journal.apply(found, _find_answer(view, number))
        if isinstance(number, int) and number in self.journal.jobs and self.journal.jobs[number].is_over:
            # How it ended may have been waited for.
            self.changed.add(number)
        for change in changes:
            if view is None or not view.observes:
                continue
            held = view.allocations.get(change.job)
            if held is not None:
                view.allocations.free(change.job, held, is_final=True)
                view.running.pop(change.job, None)
                self.changed.add(change.job)
            if change.resources is not None:
                known = self.journal.jobs[change.job]
                self._hold(view, FluxJob(change.job, known.user, 0, known.submit_s), change.resources)

    def _check_feasibility(self, found: Mapping[str, Any]) -> FluxReply:
        view, answer = self.view, {"call": found.get("call")}
        try:
            request = parse_jobspec(found.get("jobspec"))
            problem = "" if view is None else find_infeasibility(request, self.extend_pool(view.allocations.pool))
        except FluxUnreadable as error:
            return FluxReply("feasibility", answer | {"errnum": _EINVAL, "errstr": str(error)})
        return FluxReply("feasibility", answer | {"errnum": _EOVERFLOW if problem else 0, "errstr": problem})

    def deny(self, number: int, reason: str) -> FluxReply:
        """Returns the denial of a job."""
        self.counts.denied += 1
        return FluxReply("alloc", {"id": number, "type": 2, "note": f"Eelgrid: {reason}"})

    def deny_job(self, number: int, reason: str) -> FluxReply | None:
        """Denies a job that the core refuses for good; None if it waits no more."""
        if self.view is None or self.view.waiting.pop(number, None) is None:
            return None
        return self.deny(number, reason)

    def leave_job(self, number: int, *, now_s: float) -> None:
        """Leaves a running job that the core does not adopt as external usage for a while."""
        if self.view is not None and (job := self.view.running.get(number)) is not None:
            job.not_before_s = now_s + RETRY_MOST_S
            self.changed.add_later(number, job.not_before_s)

    def extend_pool(self, pool: ResourceSet) -> ResourceSet:
        """Returns a pool with the properties that the core knows of its ranks."""
        if self._extended is None or self._extended[0] is not pool or self._extended[1] is not self.known:
            self._extended = pool, self.known, replace(pool, properties={**self.known, **pool.properties})
        return self._extended[2]


def _find_answer(view: FluxView | None, number: Any) -> ResourceSet | None:
    """Returns the R of a job that was answered here; in the past of a journal a job may have held more than it does."""
    if view is None or not isinstance(number, int):
        return None
    job = view.running.get(number)
    return view.allocations.get(number) if job is not None and job.is_answered else None


def _read_id(found: Mapping[str, Any]) -> int:
    number = found.get("id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**64:
        raise FluxUnreadable(f"id has {str(number)[:40]!r} where a job id is expected")
    return number


def _read_job(found: Mapping[str, Any]) -> FluxJob:
    user = found.get("user") or found.get("userid")
    return FluxJob(
        number=_read_id(found),
        user="" if user is None else re.sub(r"[^\x20-\x7e]", "?", str(user))[:64],
        priority=int(read_number(found, "priority")),
        submit_s=float(read_number(found, "t_submit")),
    )
