"""Journal: events of Flux's job manager, as who held what from when to when, and who waited how long.

Owns the order of a job's events, the spans that follow from them, and how it ended. Must not know who schedules, nor the core.

Theory. A job holds its R from `alloc` to `free`; `release` gives ranks back before, one after another while housekeeping
runs. So a rank is held from `alloc` to the first of the two that names it. Times are those of the events, by one clock, the
broker's. The journal begins with the past of all jobs that the job manager knows; a repeated event changes nothing, and an
event that cannot be read is left out and counted. Spans that have ended are kept up to a number, the oldest go first.

Sources: flux-framework/rfc 18 (events), 21 (events of jobs).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    ResourceSet,
    parse_idset,
    parse_json,
    parse_resource_set,
    read_number,
)

_SPANS_MOST = 50_000
_JOBS_MOST = 100_000


class HeldSpan(NamedTuple):
    """What a job held of one host; seconds since 1970, `end_s` 0 while it holds it."""

    job: int
    user: str
    hostname: str
    cores: frozenset[int]
    gpus: frozenset[int]
    begin_s: float
    end_s: float = 0.0


class FluxChange(NamedTuple):
    """What a job holds from now on; None if nothing."""

    job: int
    resources: ResourceSet | None


@dataclass(slots=True)
class JournalJob:
    """What its events have said of a job; times are 0 before they are known."""

    user: str = ""
    submit_s: float = 0.0
    alloc_s: float = 0.0
    resources: ResourceSet | None = None
    # What of it is held still.
    held: ResourceSet | None = None
    newest_s: float = 0.0
    start_s: float = 0.0
    finish_s: float = 0.0
    # How its processes ended, the highest of all ranks, as wait(2) has it; None before.
    wait_status: int | None = None
    # The type of the exception that has ended it, such as cancel or timeout.
    exception: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it is known how it ended."""
        return self.wait_status is not None or bool(self.exception)

    @property
    def wait_s(self) -> float:
        """How long it waited for its resources, as far as that is over."""
        return max(0.0, self.alloc_s - self.submit_s) if self.alloc_s and self.submit_s else 0.0


@dataclass(slots=True)
class FluxJournal:
    """Spans and jobs by the events so far."""

    jobs: dict[int, JournalJob] = field(default_factory=dict)
    unreadable: int = 0
    _ended: deque[HeldSpan] = field(default_factory=lambda: deque(maxlen=_SPANS_MOST))

    def apply(self, value: Any, known: ResourceSet | None = None) -> list[FluxChange]:
        """Follows one message of the journal: events of one job, with the R of an `alloc`; returns what changed of what it holds.

        `known` is what the job holds, if that is known: its R is not read again.
        """
        found = value if isinstance(value, Mapping) else {}
        number, events = found.get("id"), found.get("events")
        if not isinstance(number, int) or not isinstance(events, list):
            self.unreadable += 1
            return []
        changes: list[FluxChange] = []
        for event in events:
            try:
                changes += self._apply_event(number, parse_json(event, "event"), found, known)
            except FluxUnreadable:
                self.unreadable += 1
        return changes

    def _apply_event(
        self, number: int, event: Mapping[str, Any], message: Mapping[str, Any], known: ResourceSet | None
    ) -> Iterator[FluxChange]:
        time_s, name = float(read_number(event, "timestamp")), event.get("name")
        context = parse_json(event.get("context") or {}, "event.context")
        job = self.jobs.get(number)
        if job is None:
            self._forget_old()
            job = self.jobs[number] = JournalJob()
        if time_s < job.newest_s:
            # Repeated after a new beginning.
            return
        job.newest_s = time_s
        match name:
            case "submit":
                job.submit_s, job.user = time_s, str(message.get("user") or context.get("userid", ""))[:64]
            case "alloc" if job.resources is None:
                job.alloc_s, job.resources = time_s, known or parse_resource_set(message.get("R"))
                job.held = job.resources
                yield FluxChange(number, job.held)
            case "release" if job.held is not None:
                yield from self._release(number, job, context.get("ranks"), time_s)
            case "free" if job.held is not None:
                yield from self._release(number, job, "all", time_s)
            case "start":
                job.start_s = time_s
            case "finish":
                job.finish_s, job.wait_status = time_s, int(read_number(context, "status"))
            case "exception" if context.get("severity") == 0 and not job.exception:
                job.exception = str(context.get("type", ""))[:64] or "exception"
            case _:
                return

    def _release(self, number: int, job: JournalJob, ranks: Any, time_s: float) -> Iterator[FluxChange]:
        assert job.held is not None
        gone = (
            frozenset(job.held.ranks) if ranks == "all" else parse_idset(ranks, "release.ranks") & job.held.ranks.keys()
        )
        for rank in sorted(gone):
            one = job.held.ranks[rank]
            self._ended.append(HeldSpan(number, job.user, one.hostname, one.cores, one.gpus, job.alloc_s, time_s))
        left = job.held.select_ranks(frozenset(job.held.ranks) - gone)
        job.held = left if left.ranks else None
        if gone:
            yield FluxChange(number, job.held)

    def _forget_old(self) -> None:
        if len(self.jobs) < _JOBS_MOST:
            return
        for number in [key for key, one in self.jobs.items() if one.held is None][: _JOBS_MOST // 10]:
            del self.jobs[number]

    def list_spans(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[HeldSpan]:
        """Lists what was held at any time between two, by beginning; spans that go on have no end."""
        running = (
            HeldSpan(number, job.user, one.hostname, one.cores, one.gpus, job.alloc_s)
            for number, job in self.jobs.items()
            if job.held is not None
            for one in job.held.ranks.values()
        )
        found = [
            one for one in (*self._ended, *running) if one.begin_s < end_s and (not one.end_s or one.end_s > begin_s)
        ]
        return sorted(found, key=lambda one: (one.begin_s, one.job, one.hostname))
