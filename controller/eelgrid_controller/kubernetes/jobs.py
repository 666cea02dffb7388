"""Suspended jobs, right-sized before they start: a machine without clock and sockets.

Owns who is dealt with, when, and what is said of it. Must not know how sizes compare
(`right_sizing.py`), which fields say what (`jobs_asked.py`), nor how anything is written.

Theory. Each job that asks for it gets one patch in its life, whatever comes of it: the record in it is what
keeps it from a second. What can be chosen is written; where nothing is known the request stays
as it is, and the record says why. Either way the job is set free: our entry leaves Kueue's gate, and a
job whose people ask for that is started. So nobody waits for us longer than `patience_s` beyond the write
itself, and that long only while a number that its people allow is being predicted; a profile whose
prediction did not come in that time is not waited for by the next job. A server that refuses the
new request (before 1.36 resources of a suspended Job are fixed) is given the record alone, as a
recommendation. Kueue may start a job that waits in its queue at any moment, so without our gate
nothing of such a job is changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.kubernetes import names
from eelgrid_controller.kubernetes.constraints import satisfies
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.gate_events import Failure
from eelgrid_controller.kubernetes.jobs_asked import CHANGING, Asked, Wish, asked_of, wish_of
from eelgrid_controller.kubernetes.jobs_patches import (
    Operations,
    is_recorded,
    outcome_of,
    record_of,
    releasing,
    resource_of,
    right_sizing,
)
from eelgrid_controller.kubernetes.right_sizing import Choice, Known, Question, Size, Unknown, right_size
from eelgrid_controller.kubernetes.views import KubeNode

__all__ = [
    "Event", "Ground", "Instruction", "JobGone", "JobSeen", "JobSettings", "Jobs", "NotWritten", "Site", "Tell", "Write",
    "Written",
]  # fmt: skip

_SIZES_MOST = 4096
_AGAIN_S = {Failure.CONFLICT: 1.0, Failure.STALE: 1.0, Failure.BUSY: 5.0, Failure.FORBIDDEN: 30.0}
_AGAIN_MOST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """How long and how many."""

    patience_s: float = 60.0  # that a prediction is waited for
    writes_most: int = 64  # in one round


class Site(NamedTuple):
    """A node that a job may come to."""

    node: KubeNode
    gpu_model: str  # empty where it is not known
    gpus: int  # whole ones


class Ground(NamedTuple):
    """What is known besides the jobs."""

    now_s: float  # since 1970
    sites: tuple[Site, ...] = ()
    known: Mapping[str, tuple[Known, ...]] = {}  # by profile
    coming: frozenset[str] = frozenset()  # profiles of which a prediction is on its way


class JobSeen(NamedTuple):
    """A job as it is now."""

    kind: str
    found: Mapping[str, Any]


class JobGone(NamedTuple):
    """A job that is no more."""

    uid: str


class Written(NamedTuple):
    """A patch was made."""

    uid: str


class NotWritten(NamedTuple):
    """A patch was not made."""

    uid: str
    failure: Failure
    text: str = ""


class Write(NamedTuple):
    """Patch a job."""

    job: Asked
    operations: Operations
    outcome: str  # changed, kept, recommended, released
    why: str


class Tell(NamedTuple):
    """Say something to its people."""

    job: Asked
    outcome: str
    text: str
    is_warning: bool = False


Event: TypeAlias = JobSeen | JobGone | Written | NotWritten
Instruction: TypeAlias = Write | Tell


@dataclass(slots=True)
class _Job:
    """One job that asks."""

    asked: Asked
    found: Mapping[str, Any]
    again_s: float = 0.0
    failures: int = 0
    refused: str = ""  # why the server did not take another request
    under_way: Write | None = None
    is_settled: bool = False
    is_told: bool = field(default=False)  # of a failure


class Jobs:
    """All jobs that ask to be right-sized."""

    def __init__(self, settings: JobSettings | None = None) -> None:
        self.outcomes: dict[str, int] = {}
        self._settings = settings or JobSettings()
        self._jobs: dict[str, _Job] = {}
        self._coming: dict[str, float] = {}  # since when a profile's prediction is waited for

    def __len__(self) -> int:
        return len(self._jobs)

    def is_waiting(self, at_s: float) -> bool:
        """Whether anybody waits for a round now."""
        return any(_is_due(job, at_s) for job in self._jobs.values())

    def is_wasteful(self, uid: str) -> bool:
        """Whether a job runs although fewer joules were recommended."""
        job = self._jobs.get(uid)
        return job is not None and outcome_of(job.asked) == "recommended"

    def profiles(self) -> frozenset[str]:
        """Profiles of jobs that wait, of which something should be known."""
        found = set()
        for job in self._jobs.values():
            if not job.is_settled and job.asked.is_suspended:
                found |= _profiles(job.found)
        return frozenset(found)

    def take(self, events: Iterable[Event], ground: Ground, at_s: float, *, leads: bool) -> list[Instruction]:
        """What follows from what happened; writes only from who `leads`."""
        told: list[Instruction] = []
        for event in events:
            match event:
                case JobSeen():
                    self._seen(event)
                case JobGone(uid):
                    self._jobs.pop(uid, None)
                case Written(uid):
                    told += self._written(uid)
                case NotWritten():
                    told += self._not_written(event, at_s)
        if leads:
            self._coming = {profile: self._coming.get(profile, at_s) for profile in ground.coming}
            writes = 0
            for job in self._jobs.values():
                if writes >= self._settings.writes_most:
                    break
                made = self._look(job, ground, at_s)
                if made is not None:
                    job.under_way = made
                    told.append(made)
                    writes += 1
        return told

    def _seen(self, event: JobSeen) -> None:
        asked = asked_of(event.kind, event.found)
        if asked is None:
            self._jobs.pop(event.found["metadata"]["uid"], None)
            return
        job = self._jobs.get(asked.uid)
        if job is None:
            self._jobs[asked.uid] = _Job(asked, event.found)
            return
        job.asked, job.found = asked, event.found
        job.is_settled = False

    def _written(self, uid: str) -> list[Instruction]:
        job = self._jobs.get(uid)
        if job is None or job.under_way is None:
            return []
        made, job.under_way = job.under_way, None
        job.is_settled = True  # until it is seen again, without the record
        job.failures = 0
        self.outcomes[made.outcome] = self.outcomes.get(made.outcome, 0) + 1
        return [Tell(made.job, made.outcome, made.why)] if made.outcome != "released" else []

    def _not_written(self, event: NotWritten, at_s: float) -> list[Instruction]:
        job = self._jobs.get(event.uid)
        if job is None or job.under_way is None:
            return []
        made, job.under_way = job.under_way, None
        if event.failure is Failure.GONE:
            del self._jobs[event.uid]
            return []
        if event.failure is Failure.INVALID and made.outcome == "changed" and not job.refused:
            job.refused = event.text or "the API server refused it"
            return []
        wait_s = _AGAIN_S.get(event.failure, 60.0)
        if event.failure not in (Failure.CONFLICT, Failure.STALE):
            wait_s = min(_AGAIN_MOST_S, wait_s * 2.0 ** min(job.failures, 10))
            job.failures += 1
        job.again_s = at_s + wait_s
        if event.failure in (Failure.INVALID, Failure.FORBIDDEN) and not job.is_told:
            job.is_told = True
            return [Tell(made.job, "failed", f"cannot be patched: {event.text}", is_warning=True)]
        return []

    def _look(self, job: _Job, ground: Ground, at_s: float) -> Write | None:
        """The write that a job needs now."""
        asked = job.asked
        if not _is_due(job, at_s):
            return None
        if not asked.mode or not asked.is_suspended or asked.ran or is_recorded(asked):
            if asked.is_suspended and asked.is_gated:
                return Write(asked, releasing(asked), "released", asked.ran or "it was dealt with")
            job.is_settled = True
            return None
        wish: Wish | None = None
        answer: Choice | Unknown
        try:
            wish = wish_of(asked.kind, job.found, now_s=ground.now_s)
        except KubernetesUnreadable as error:
            answer = Unknown(str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # One object that no API server should give must not keep all others from their turn.
            answer = Unknown(f"cannot be read: {error!r}"[:300], "compare it with the API's reference")
        else:
            if self._is_to_come(wish, ground, at_s):
                return None
            answer = right_size(_question(wish, ground))
        return _write(job, wish, answer)

    def _is_to_come(self, wish: Wish, ground: Ground, at_s: float) -> bool:
        """Whether a number that its people allow is being predicted, and that for not too long."""
        since_s = self._coming.get(wish.profile)
        if since_s is None or at_s - since_s >= self._settings.patience_s:
            return False
        known = {one.gpus for one in ground.known.get(wish.profile, ()) if not one.mig_profile}
        pods = wish.pods if wish.is_together else (1,)
        return any(count * gpus not in known for count in pods for gpus in wish.gpus)


def _is_due(job: _Job, at_s: float) -> bool:
    return not job.is_settled and job.under_way is None and at_s >= job.again_s


def _write(job: _Job, wish: Wish | None, answer: Choice | Unknown) -> Write:
    asked = job.asked
    starts = asked.starts and not asked.queue
    if isinstance(answer, Unknown):
        why = f"{answer.why}; {answer.remedy}" if answer.remedy else answer.why
        before = wish.asked if wish is not None else None
        record = record_of(asked.uid, "kept", why, asked=before)
        return Write(
            asked, right_sizing(asked, record, wish=None, size=None, starts=starts), "kept", f"kept as it is: {why}"
        )
    assert wish is not None, "a choice comes of a wish"
    if answer.size == wish.asked:
        record = record_of(asked.uid, "kept", answer.why, asked=wish.asked, choice=answer)
        operations = right_sizing(asked, record, wish=None, size=None, starts=starts)
        return Write(asked, operations, "kept", f"kept as it is: {answer.why}")
    words = f"{_words(wish.asked)} to {_words(answer.size)}: {answer.why}"
    hindrance = _hindrance(job)
    if hindrance:
        record = record_of(asked.uid, "recommended", f"{answer.why}; {hindrance}", asked=wish.asked, choice=answer)
        operations = right_sizing(asked, record, wish=None, size=None, starts=starts)
        return Write(asked, operations, "recommended", f"recommended, and not changed since {hindrance}: {words}")
    record = record_of(asked.uid, "changed", answer.why, asked=wish.asked, choice=answer)
    operations = right_sizing(asked, record, wish=wish, size=answer.size, starts=starts)
    return Write(asked, operations, "changed", f"changed from {words}")


def _hindrance(job: _Job) -> str:
    """Why a size is recommended only."""
    asked = job.asked
    if asked.mode == "recommend":
        return "it asks for no more"
    if asked.kind not in CHANGING:
        return f"the requests of a {asked.kind} are fixed"
    if asked.queue and not asked.is_gated:
        return f"Kueue may start it at any moment; make it with {names.KUEUE_GATED_BY}: {names.KUEUE_OUR_GATE}"
    if job.refused:
        return f"the API server refused it (before 1.36 requests are fixed): {job.refused[:300]}"
    return ""


def _question(wish: Wish, ground: Ground) -> Question:
    """The sizes that its people allow and some node holds."""
    constraint = wish.constraint
    sites = [
        site
        for site in ground.sites
        # A cordon goes; the job may start after that.
        if satisfies(
            constraint, replace(site.node, is_unschedulable=False) if site.node.is_unschedulable else site.node
        )
        and (not wish.models or site.gpu_model in wish.models)
    ]
    wanted = [Size(pods, gpus) for pods in wish.pods for gpus in wish.gpus]
    wanted += [Size(pods, 1, profile) for pods in wish.pods for profile in wish.slices]
    sizes: dict[Size, tuple[str, ...]] = {}
    for size in dict.fromkeys([wish.asked, *wanted[:_SIZES_MOST]]):
        models = {site.gpu_model for site in sites if _holds(site, size)}
        if models or size == wish.asked:
            sizes[size] = tuple(sorted(models))
    return Question(
        asked=wish.asked,
        sizes=sizes,
        is_together=wish.is_together,
        slowdown_most=wish.slowdown_most,
        need_hz=wish.need_hz,
        known=ground.known.get(wish.profile, ()),
    )


def _holds(site: Site, size: Size) -> bool:
    """Whether an empty node would hold one of its pods."""
    if size.mig_profile:
        return site.node.allocatable.count(resource_of(size)) >= size.gpus
    return site.gpus >= size.gpus


def _words(size: Size) -> str:
    each = f"{resource_of(size)}: {size.gpus}"
    return each if size.pods == 1 else f"{size.pods} pods of {each}"


def _profiles(found: Mapping[str, Any]) -> set[str]:
    """What a job, or a template in it, names as its profile."""
    spec = found.get("spec") or {}
    parts: list[Any] = [spec.get("template"), *(spec.get("pytorchReplicaSpecs") or {}).values()]
    templates = [found, *(part.get("template", part) if part else {} for part in parts)]
    templates += [
        ((one.get("template") or {}).get("spec") or {}).get("template") or {}
        for one in spec.get("replicatedJobs") or ()
    ]
    notes = [(one.get("metadata") or {}).get("annotations") or {} for one in templates]
    return {note[names.ANNOTATION_PROFILE] for note in notes if names.ANNOTATION_PROFILE in note}
