"""Steering: what is to be done about Slurm's jobs and nodes, given how they are and what the core holds of them.

`Steering.decide` compares one look at Slurm with the core's workloads and returns instructions, level-triggered: whatever
was missed is decided anew at the next look. Owns which jobs are steered, what is said of them in Slurm, and when one is
let go. Must not know how commands run, nor clocks; times are arguments.

Theory. A job that opted in is held by our job_submit plugin, which marks it in its administrator's comment. The mark is the
only memory beside the core's, and it is Slurm's: a controller that begins anew, with or without its journal, finds who was
held, who was placed and who was let go. A held job is submitted to the core under its own id; where the core places it, it
is checked, its nodes are required of Slurm, and it is released. Slurm stays the only truth: a job that runs elsewhere than
planned is adopted where it runs, one that ended is ended here as it ended there, and what others run is external usage. A job that Slurm
refuses to start where it was placed, or that cannot be steered at all, is let go: released without nodes and with the
reason, and counted as external from then on. A job that has to make room for other work of the core is requeued by Slurm, which tells it
to end, and held; in the core it waits again where it was in the queue, under its id, which its mark keeps. So no job waits for anything that Slurm alone would not make it wait for.
A job may be released ahead of its placement (release_ahead.py): in the core it waits until it has begun, and is adopted then.

Sources: slurm.schedmd.com/job_reason_codes.html.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGTERM
from typing import NamedTuple, TypeAlias

from eelgrid_controller.engines.node_reports import (
    CorrectDevices,
    NodeReporter,
    RegisterNode,
    RemoveNode,
    ReportUsage,
)
from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.dependencies import Dependencies, DependencyState
from eelgrid_controller.engines.slurm.marks import (
    CANCELLED_STATES,
    MARK_HELD,
    MARK_LEFT,
    MARK_REQUEUED,
    WORKLOAD_PREFIX,
    find_run_suffix,
    has_run,
    is_released,
    is_steered,
    list_job_ids,
    name_workload,
)
from eelgrid_controller.engines.slurm.shrinking import KeepNodes, Shrinking, ShrinkJob, find_least_nodes, find_profile
from eelgrid_controller.engines.slurm.slice_demand import is_slice
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Gpu,
    Inventory,
    Mobility,
    ResourceRequest,
    SubmitWorkloadRequest,
    TrainingPromise,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Jobs that are in the core and wait; those behind them come as these start.
WAITING_MOST = 10_000
_TRAITS_MOST = 16
_NODE_TRAITS_MOST = 256
_WAITS_TIMES = 10.0
_NS = 10**9
_SIGNALS_MOST, _RUNTIME_MOST_S = 64, 3e8
FORGOTTEN = "Slurm has forgotten the job, so nobody knows how it ended"
_RESTARTED = "Slurm has restarted the job"
# Ends of which no exit code tells, in words.
_LOST = ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED")
_ENDS = {
    "TIMEOUT": "its time limit was over",
    "DEADLINE": "its deadline in Slurm was over",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "LAUNCH_FAILED": "its node could not start it",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted by Slurm",
}
# Why Slurm does not start a job that only another placement, or nobody, could help; of some, versions have other names.
_REFUSED = frozenset(
    [
        "BadConstraints",
        "ReqNodeNotAvail",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "PartitionDown",
        "PartitionInactive",
        "InvalidAccount",
        "InvalidQOS",
        "AccountNotAllowed",
        "QOSNotAllowed",
        "DependencyNeverSatisfied",
    ]
)
# These wait for others of their account; a hold of ours would only make them wait twice.
_REFUSED_PREFIXES = (
    "Assoc",
    "QOS",
    "MaxNodes",
    "MaxCpu",
    "MaxGRES",
    "MaxMem",
    "MaxTRES",
    "MaxJobs",
    "MaxSubmit",
    "Required",
)


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Have the core place a held job."""

    request: SubmitWorkloadRequest


@dataclass(frozen=True, slots=True)
class AdoptJob:
    """A job runs where it runs."""

    request: SubmitWorkloadRequest
    adoption: Adoption


@dataclass(frozen=True, slots=True)
class EndJob:
    """A job of the core was cancelled in Slurm, has not begun, or is no more ours."""

    workload_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportAttempt:
    """A placed job has begun in Slurm, or has ended there, and how."""

    status: AttemptStatus


@dataclass(frozen=True, slots=True)
class PlaceJob:
    """Check a placement, require its nodes of Slurm, and release the job."""

    job: SlurmJob
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HoldJob:
    """A job that was released ahead and has not begun is to wait for the core again; its mark and its nodes stay."""

    job: SlurmJob


@dataclass(frozen=True, slots=True)
class RequeueJob:
    """A placed job has to make room: have Slurm end it and queue it again, held; one that waits there is held only."""

    job: SlurmJob
    workload_id: str


@dataclass(frozen=True, slots=True)
class CancelJob:
    """An operator has cancelled a job here: cancel it in Slurm."""

    job_id: str


@dataclass(frozen=True, slots=True)
class LetJobGo:
    """Release a job without any nodes, and say why; `run` is the end of its mark."""

    job_id: str
    reason: str
    run: str = ""


SlurmInstruction: TypeAlias = (
    RegisterNode
    | RemoveNode
    | ReportUsage
    | SubmitJob
    | AdoptJob
    | CorrectDevices
    | EndJob
    | ReportAttempt
    | PlaceJob
    | HoldJob
    | RequeueJob
    | CancelJob
    | LetJobGo
    | ShrinkJob
    | KeepNodes
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringSettings:
    """Settings of one cluster; `patience_s` is how long a placed job may be refused before it is let go.

    One that merely waits where it was placed is let go after ten times as long.
    """

    patience_s: float = 30.0
    namespace: str = "default"


@dataclass(slots=True)
class Steering:
    """What is remembered between looks: since when placed jobs wait, and what was said of nodes."""

    settings: SteeringSettings = field(default_factory=SteeringSettings)
    # By workload: since when it waits where it was placed, and since when Slurm refuses it there.
    _waits_since_s: dict[str, float] = field(default_factory=dict)
    _refused_since_s: dict[str, float] = field(default_factory=dict)
    # By workload the job and the workload as they were when nothing was to be done about them, and nothing but a change of one of
    # them could make it so: held jobs that wait in the core.
    _settled: dict[str, tuple[SlurmJob, Workload]] = field(default_factory=dict)
    _agent_slices: frozenset[str] = frozenset()
    # Those that wait here and were reported as external usage, since they run and could not be adopted.
    _external: set[str] = field(default_factory=set)
    reports: NodeReporter = field(default_factory=NodeReporter)
    shrinking: Shrinking = field(init=False)
    _priority_classes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """A job that is to give nodes back has as long for it as Slurm has to start one."""
        self.shrinking = Shrinking(self.settings.patience_s)

    def decide(
        self,
        jobs: Sequence[SlurmJob],
        nodes: Sequence[SlurmNode],
        workloads: Mapping[str, Workload],
        *,
        has_agent: frozenset[str],
        gpus: Mapping[str, Mapping[int, str]],
        now_s: float,
        dependencies: Dependencies,
        priority_classes: frozenset[str] = frozenset(),
    ) -> list[SlurmInstruction]:
        """Returns what is to be done.

        `jobs` are those that have not ended, and those whose end the core does not know yet; `workloads` are the core's live ones
        and those of these jobs, of which those with our prefix are jobs; `gpus` are by node the ids of the core's GPUs by
        their index; `priority_classes` are those of the policy, of which a job has the one with the name of its QOS.
        """
        self._priority_classes = priority_classes
        by_id = {name_workload(job): job for job in jobs}
        self._forget_changed(by_id, workloads)
        found: list[SlurmInstruction] = []
        found += self._end_jobs(by_id, workloads, now_s)
        found += self._follow_nodes(jobs, nodes, workloads, has_agent)
        slices = _list_agent_slices(nodes, has_agent)
        if slices != self._agent_slices:
            # Who waited for them may go now.
            self._agent_slices = slices
            self._settled.clear()
        around = _Surroundings({node.name for node in nodes}, slices, dependencies, now_s)
        found += self._steer_jobs(by_id, workloads, around)
        found += _list_corrections(by_id, workloads, gpus)
        self.shrinking.forget_missing(by_id, now_s)
        for since_s in (self._waits_since_s, self._refused_since_s):
            for key in since_s.keys() - by_id.keys():
                del since_s[key]
        return found

    def _forget_changed(self, by_id: Mapping[str, SlurmJob], workloads: Mapping[str, Workload]) -> None:
        """Forgets that nothing was to be done about jobs of which something has changed."""
        for key, (job, workload) in list(self._settled.items()):
            if by_id.get(key) is not job or workloads.get(key) is not workload:
                del self._settled[key]

    def _steer_jobs(
        self, by_id: Mapping[str, SlurmJob], workloads: Mapping[str, Workload], around: "_Surroundings"
    ) -> Iterable[SlurmInstruction]:
        """Yields what is to be done about all jobs that opted in, in the order of their submission."""
        waiting = len(self._settled)
        changed = [(key, job) for key, job in by_id.items() if key not in self._settled]
        waiting += sum(key in workloads and workloads[key].phase is WorkloadPhase.PENDING for key, _ in changed)
        for key, job in sorted(changed, key=lambda item: (item[1].submit_s, parse_job_id(item[1].job_id))):
            workload = workloads.get(key)
            found = list(self._steer(key, job, workload, around))
            for one in found:
                if isinstance(one, SubmitJob):
                    waiting += 1
                    if waiting > WAITING_MOST:
                        continue
                yield one
            if workload is not None and not found and self._is_settled(job, workload, around.now_s):
                self._settled[key] = job, workload

    def _is_settled(self, job: SlurmJob, workload: Workload, now_s: float) -> bool:
        """Returns whether a job about which nothing is to be done stays so until it or its workload changes."""
        is_waiting = (
            is_steered(job) and job.is_pending and job.is_held and not job.dependency and job.eligible_s <= now_s
        )
        return is_waiting and workload.phase is WorkloadPhase.PENDING and not workload.preempted_for

    def list_ends(self, jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload]) -> list[AttemptStatus]:
        """Returns how placed jobs have ended, of those that did; `decide` reports the same among all else."""
        by_id = {name_workload(job): job for job in jobs if job.has_ended and has_run(job) and is_released(job)}
        placed = (workload for key in by_id if (workload := workloads.get(key)) is not None)
        return [
            describe_end(by_id[one.workload_id], one)
            for one in placed
            if one.phase is WorkloadPhase.PLACED and not one.preempted_for
        ]

    def _may_follow(self, key: str, now_s: float) -> bool:
        """Returns whether a job that ran unseen and could not be adopted where it ran may be at the next look, for so long."""
        since_s = self._waits_since_s.setdefault(key, now_s)
        return now_s - since_s < _WAITS_TIMES * self.settings.patience_s

    def list_begun(self, jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload]) -> list[AdoptJob]:
        """Returns the adoptions of jobs that were released ahead and have begun, or ended unseen, in the order of their starts."""
        found = list[tuple[int, int, AdoptJob]]()
        for job in jobs:
            if not is_released(job) or not (job.holds_resources or (job.has_ended and has_run(job))):
                continue
            workload = workloads.get(name_workload(job))
            if workload is not None and workload.phase is WorkloadPhase.PENDING and not workload.preempted_for:
                ended_s = job.end_s if job.has_ended else 2**62
                found.append((ended_s, job.start_s, self.adopt_job(job, workload)))
        return [one for _, _, one in sorted(found, key=lambda one: one[:2])]

    def list_next(self, jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload]) -> list[list[AdoptJob]]:
        """Returns by node the adoptions of jobs that were released ahead and wait there, in the order of their submission."""
        found: dict[tuple[str, ...], list[tuple[int, tuple[int, int], AdoptJob]]] = {}
        for job in jobs:
            workload = workloads.get(name_workload(job)) if job.is_pending and not job.is_held else None
            if workload is None or not is_released(job) or workload.phase is not WorkloadPhase.PENDING:
                continue
            one = (job.submit_s, parse_job_id(job.job_id), self.adopt_job(job, workload))
            found.setdefault(job.required_nodes, []).append(one)
        return [[one for _, _, one in sorted(waiting, key=lambda one: one[:2])] for waiting in found.values()]

    def _end_jobs(
        self, by_id: Mapping[str, SlurmJob], workloads: Mapping[str, Workload], now_s: float
    ) -> Iterable[SlurmInstruction]:
        known = {job.job_id for job in by_id.values()}
        for key, workload in workloads.items():
            if (
                key in self._settled
                or not key.startswith(WORKLOAD_PREFIX)
                or workload.phase
                not in (
                    WorkloadPhase.PENDING,
                    WorkloadPhase.PLACED,
                )
            ):
                continue
            job = by_id.get(key)
            is_placed = workload.phase is WorkloadPhase.PLACED
            if job is None:
                (job_id,) = list_job_ids((key,))
                is_restarted = job_id in known
                reason = _RESTARTED if is_restarted else FORGOTTEN
                if is_placed:
                    yield ReportAttempt(_describe_unseen_end(workload, AttemptState.LOST, reason))
                else:
                    yield EndJob(key, reason)
            elif job.admin_comment.startswith(MARK_LEFT) and not job.holds_resources:
                yield EndJob(key, "left to Slurm")
            elif job.is_pending and job.is_held and workload.preempted_for and is_steered(job):
                # It has made room: in the core it waits again in its place, under its id.
                reason = f"requeued in Slurm, restart {job.restarts}"
                yield ReportAttempt(_describe_unseen_end(workload, AttemptState.ENDED, reason, SIGTERM))
            elif job.has_ended:
                if has_run(job) and is_placed:
                    yield ReportAttempt(describe_end(job, workload))
                elif not (has_run(job) and is_released(job) and self._may_follow(key, now_s)):
                    yield EndJob(key, f"{job.state.lower()} in Slurm")

    def _steer(
        self,
        key: str,
        job: SlurmJob,
        workload: Workload | None,
        around: "_Surroundings",
    ) -> Iterable[SlurmInstruction]:
        """Yields what is to be done about one job that opted in."""
        if not is_steered(job):
            return
        phase = None if workload is None else workload.phase
        has_to_go = workload is not None and workload.preempted_for != ""
        if job.holds_resources or job.is_held:
            self._waits_since_s.pop(key, None)
        # An engine's own ends have a reason: a job that somebody else released runs on.
        is_unwanted = phase is WorkloadPhase.CANCELLED and workload is not None and not workload.reason
        if is_unwanted and (job.holds_resources or job.is_pending):
            if job.state not in CANCELLED_STATES and "COMPLETING" not in job.flags:
                yield CancelJob(job.job_id)
            return
        if job.holds_resources:
            if has_to_go and job.state == "RUNNING" and "COMPLETING" not in job.flags:
                yield RequeueJob(job, key)
            else:
                yield from self._follow_run(key, job, workload, around.now_s)
            return
        if not job.is_pending:
            return
        if not job.is_held:
            if has_to_go:
                yield RequeueJob(job, key)
            else:
                yield from self._watch_released(key, job, workload, around)
            return
        standing = around.dependencies.judge(job.dependency)
        # After a requeue Slurm waits until credentials of the last run are void, which we end when it is placed.
        is_early = job.eligible_s > around.now_s and not job.admin_comment.startswith(MARK_REQUEUED)
        if standing is DependencyState.WAITS or is_early or has_to_go:
            return
        reason = job.peculiar or _find_obstacle(job)
        if standing is DependencyState.UNKNOWN:
            reason = f"its dependency {job.dependency} is for Slurm to judge"
        elif not reason and any(one.type in around.agent_slices for one in job.gpus):
            reason = "slices of a node with an agent are given by Slurm itself"
        if reason:
            yield LetJobGo(job.job_id, reason, find_run_suffix(job))
        elif phase is None:
            yield SubmitJob(self._build_request(job))
        elif phase is WorkloadPhase.CANCELLED:
            yield CancelJob(job.job_id)
        elif phase is WorkloadPhase.PLACED and workload is not None:
            places = _list_places(workload)
            if around.names.issuperset(places):
                yield PlaceJob(job, places)

    def _build_request(self, job: SlurmJob) -> SubmitWorkloadRequest:
        request = build_request(job, self.settings)
        if job.qos not in self._priority_classes:
            return request
        return replace(request, spec=replace(request.spec, priority_class=job.qos))

    def _follow_run(
        self, key: str, job: SlurmJob, workload: Workload | None, now_s: float
    ) -> Iterable[SlurmInstruction]:
        """Has the core hold a running job where it runs, and the job give back what the core wants no more of it."""
        phase = None if workload is None else workload.phase
        if workload is not None and phase is WorkloadPhase.PENDING:
            # One that we have released ahead is adopted before all else, or at the next look.
            if not is_released(job):
                # Somebody else has released it: from now on it is external.
                yield EndJob(key, "runs in Slurm without having been placed")
            return
        places = () if workload is None else workload.placements
        if phase not in (None, WorkloadPhase.PLACED):
            return
        if workload is not None and sorted(one.node_name for one in places) == sorted(job.nodes):
            if not workload.attempts and job.start_s:
                yield ReportAttempt(_describe_start(job, workload))
            return
        if workload is not None and is_released(job):
            shrinks = self.shrinking.decide(key, job, _list_places(workload), now_s)
            if shrinks is not None:
                yield shrinks
            if isinstance(shrinks, ShrinkJob):
                return
        yield self.adopt_job(job, workload)

    def adopt_job(self, job: SlurmJob, workload: Workload | None) -> AdoptJob:
        """Returns the adoption of a job where it runs, or where it ran unseen: there it holds devices until its end is reported.

        One that waits here has not been reported as external usage, unless it could not be adopted at an earlier look.
        """
        is_pending = workload is not None and workload.phase is WorkloadPhase.PENDING
        places = () if workload is None else workload.placements
        # What has ended holds none, and what a pending one holds may be promised to another for a moment: corrected later.
        indexes = {} if job.has_ended else job.gpu_indexes or {}
        is_external = name_workload(job) in self._external if is_pending else not job.has_ended
        standing = tuple(
            RunningReplica(
                node_name=name,
                gpu_indexes=indexes.get(name, ()),
                is_exact=bool(indexes.get(name)) and not is_pending,
                counted=_amounts_on_node(job, name) if is_external else ExternalUsage(),
            )
            for name in job.nodes or job.required_nodes
        )
        adoption = Adoption(
            standing=standing,
            first=1 + max((one.replica for one in places), default=-1),
            released=tuple(one.replica for one in places),
            begins_pending=is_pending,
        )
        return AdoptJob(self._build_request(job), adoption)

    def _watch_released(
        self, key: str, job: SlurmJob, workload: Workload | None, around: "_Surroundings"
    ) -> Iterable[SlurmInstruction]:
        """Lets a job go that Slurm refuses to start where it was placed, or does not start there for long."""
        if not is_released(job):
            return
        if workload is not None and workload.phase is WorkloadPhase.PLACED:
            places = _list_places(workload)
            if set(places) != set(job.required_nodes) and around.names.issuperset(places):
                # It was released ahead, and there is room elsewhere first.
                yield PlaceJob(job, places)
                return
        now_s = around.now_s
        if workload is not None and workload.phase is WorkloadPhase.PENDING:
            self._waits_since_s[key] = now_s
        waits_s = now_s - self._waits_since_s.setdefault(key, now_s)
        is_over = self.note_answer(job, is_refused=is_refusal(job.reason), now_s=now_s)
        if is_over or waits_s >= _WAITS_TIMES * self.settings.patience_s:
            yield LetJobGo(job.job_id, f"Slurm says {job.reason}", find_run_suffix(job))

    def note_answer(self, job: SlurmJob, *, is_refused: bool, now_s: float) -> bool:
        """Notes whether Slurm refuses a job where it was placed; returns whether it has for as long as it may.

        A node that does not answer for a moment is refused, too.
        """
        key = name_workload(job)
        if not is_refused:
            self._refused_since_s.pop(key, None)
            return False
        return now_s - self._refused_since_s.setdefault(key, now_s) >= self.settings.patience_s

    def _follow_nodes(
        self,
        jobs: Sequence[SlurmJob],
        nodes: Sequence[SlurmNode],
        workloads: Mapping[str, Workload],
        has_agent: frozenset[str],
    ) -> Iterable[SlurmInstruction]:
        usage = sum_external_usage(jobs, workloads)
        self._external = {
            key
            for job in jobs
            if job.holds_resources
            and (one := workloads.get(key := name_workload(job))) is not None
            and one.phase is WorkloadPhase.PENDING
        }
        yield from self.reports.remove_missing({node.name for node in nodes})
        for node in nodes:
            others = replace(usage.get(node.name, ExternalUsage()), traits=list_traits(node), closed=node.closed)
            inventory = None if node.name in has_agent else build_inventory(node)
            yield from self.reports.report(node.name, others, inventory)


def is_refusal(reason: str) -> bool:
    """Whether Slurm's reason to wait is one that waiting for capacity does not end."""
    word = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    return word in _REFUSED or word.startswith(_REFUSED_PREFIXES)


def _list_places(workload: Workload) -> tuple[str, ...]:
    """Returns the names of the nodes of a placed job, each once."""
    return tuple(dict.fromkeys(place.node_name for place in workload.placements))


def parse_job_id(job_id: str) -> tuple[int, int]:
    """Returns the numbers of a job and of its task (0 without one), by which ids are in the order of their submission."""
    job, _, task = job_id.partition("_")
    return int(job), int(task or 0)


def describe_end(job: SlurmJob, workload: Workload) -> AttemptStatus:
    """Returns how a placed job has ended, by Slurm's word, as the attempt of all its replicas."""
    code, signal = job.exit_code, job.exit_signal
    reason = _ENDS.get(job.state, "")
    is_lost = job.state in _LOST
    if not (code or signal or is_lost) and job.state != "COMPLETED":
        # Slurm has ended it, and says no more than why: it sends TERM first.
        signal = SIGTERM
    # Slurm's own numbers, such as 125 for a lack of memory, are no signals: then it was killed.
    signal = signal if signal <= _SIGNALS_MOST else SIGKILL
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=_find_first_replica(workload),
        attempt=workload.attempt,
        state=AttemptState.LOST if is_lost else AttemptState.ENDED,
        exit_code=None if is_lost or signal else code,
        signal=0 if is_lost else signal,
        reason=reason,
        started_ns=job.start_s * _NS,
        ended_ns=max(job.start_s, job.end_s) * _NS,
    )


def _describe_start(job: SlurmJob, workload: Workload) -> AttemptStatus:
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=_find_first_replica(workload),
        attempt=workload.attempt,
        state=AttemptState.RUNNING,
        started_ns=job.start_s * _NS,
    )


def _describe_unseen_end(workload: Workload, state: AttemptState, reason: str, signal: int = 0) -> AttemptStatus:
    """Returns the end of a run of which Slurm tells no time: it is that of its start."""
    started_ns = next((one.started_ns for one in workload.attempts), 0)
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=_find_first_replica(workload),
        attempt=workload.attempt,
        state=state,
        signal=signal,
        reason=reason,
        started_ns=started_ns,
        ended_ns=started_ns,
    )


def _find_first_replica(workload: Workload) -> int:
    return min(place.replica for place in workload.placements)


def _list_corrections(
    by_id: Mapping[str, SlurmJob], workloads: Mapping[str, Workload], gpus: Mapping[str, Mapping[int, str]]
) -> Iterable[CorrectDevices]:
    """Yields by node the GPUs that placed jobs hold there by what Slurm says, where these are others than planned."""
    by_node: dict[str, dict[tuple[str, int], tuple[str, ...]]] = {}
    for key, job in by_id.items():
        workload = workloads.get(key)
        if workload is None or workload.phase is not WorkloadPhase.PLACED or not job.holds_resources:
            continue
        for place in workload.placements:
            known, indexes = gpus.get(place.node_name, {}), (job.gpu_indexes or {}).get(place.node_name, ())
            held = tuple(known[index] for index in indexes if index in known)
            if held and len(held) == len(place.gpu_uuids) and set(held) != set(place.gpu_uuids):
                by_node.setdefault(place.node_name, {})[key, place.replica] = held
    for name, corrected in by_node.items():
        yield CorrectDevices(name, corrected)


def _find_obstacle(job: SlurmJob) -> str:
    """Returns why the core cannot hold a job, in words; empty if it can."""
    if job.required_nodes and job.admin_comment.startswith(MARK_HELD):
        return "its user has named its nodes"
    if len(list_required_traits(job)) > _TRAITS_MOST:
        return f"it names more than {_TRAITS_MOST} features"
    if sum(one.count for one in job.gpus) > GPUS_PER_NODE_MOST:
        return f"it asks for more than {GPUS_PER_NODE_MOST} GPUs of a node"
    return ""


def list_required_traits(job: SlurmJob) -> tuple[str, ...]:
    """Returns what nodes must have for a job besides amounts: its partition, features and GRES type."""
    found = [f"slurm/partition/{job.partition}"] if job.partition else []
    found += [f"slurm/feature/{name}" for name in re.split(r"[&,]", job.features) if name]
    found += [f"slurm/gres/{one.type}" for one in job.gpus if one.type]
    return tuple(dict.fromkeys(found))


def list_traits(node: SlurmNode) -> tuple[str, ...]:
    """Returns the traits of a node, bounded: partitions first, which every job names."""
    found = [f"slurm/partition/{name}" for name in sorted(node.partitions)]
    found += [f"slurm/gres/{one.type}" for one in node.gpus if one.type]
    found += [f"slurm/feature/{name}" for name in sorted(node.features)]
    return tuple(found[:_NODE_TRAITS_MOST])


def build_request(job: SlurmJob, settings: SteeringSettings) -> SubmitWorkloadRequest:
    """Returns the submission of a job: a replica for each node that it wants."""
    training = _find_training(job)
    spec = WorkloadSpec(
        name=_clean_name(job.name) or f"job-{job.job_id}",
        kind=WorkloadKind.BATCH_JOB if training is None else WorkloadKind.TRAINING_JOB,
        training=training,
        replicas=job.node_count,
        namespace=settings.namespace,
        user=job.user,
        queue=job.account,
        # A running job of Slurm stays on its nodes; who has to make room is ended and waits again.
        mobility=Mobility.FIXED,
        evicted_by_engine=job.can_requeue,
        request=ResourceRequest(
            cpu_milli=1000 * -(-job.cpus // job.node_count),
            memory_bytes=job.memory_bytes,
            gpu_count=sum(one.count for one in job.gpus),
            gpu_milli=GPU_MILLI_WHOLE if job.gpus else 0,
        ),
        required_traits=list_required_traits(job),
        expected_runtime_s=min(job.time_limit_s, _RUNTIME_MOST_S) or None,
        labels={"slurm/job": job.job_id},
    )
    return SubmitWorkloadRequest(spec=spec, workload_id=name_workload(job))


def _find_training(job: SlurmJob) -> TrainingPromise | None:
    """Returns what the core may decide by itself of a job's size: between its user's least and what it was submitted with."""
    least, profile = find_least_nodes(job), find_profile(job)
    if least is None or not profile or not least <= job.node_count or not job.gpus:
        return None
    # Of a slowdown its user has said nothing: no limit is set for it.
    return TrainingPromise(profile=profile, slowdown_most=0.0, replicas_least=least, replicas_most=job.node_count)


def _clean_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip("-._")


def _amounts_on_node(job: SlurmJob, name: str) -> ExternalUsage:
    nodes, indexes = max(1, len(job.nodes)), (job.gpu_indexes or {}).get(name, ())
    return ExternalUsage(
        cpu_milli=1000 * -(-job.cpus // nodes),
        memory_bytes=job.memory_bytes,
        gpu_count=max(sum(one.count for one in job.gpus), len(indexes)),
        gpu_indexes=tuple(sorted(indexes)),
    )


def sum_external_usage(jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload]) -> dict[str, ExternalUsage]:
    """Sums by node what jobs hold that the core does not hold as placed there."""
    found: dict[str, ExternalUsage] = {}
    for job in jobs:
        if not job.holds_resources:
            continue
        workload = workloads.get(name_workload(job))
        is_placed = workload is not None and workload.phase is WorkloadPhase.PLACED
        places = {place.node_name for place in workload.placements} if is_placed and workload is not None else set()
        for name in job.nodes:
            if name in places:
                continue
            found[name] = found.get(name, ExternalUsage()).add(_amounts_on_node(job, name))
    return found


def build_inventory(node: SlurmNode) -> Inventory:
    """Returns the inventory of a node for which no agent speaks: what Slurm's configuration says of it."""
    gpus: list[Gpu] = []
    for one in node.gpus:
        for _ in range(one.count):
            if len(gpus) < GPUS_PER_NODE_MOST:
                index = len(gpus)
                model = one.type or "GPU"
                gpus.append(Gpu(uuid=f"{node.name}/gpu-{index}", index=index, product=model, model=model))
    return Inventory(node_name=node.name, cpu_milli=1000 * node.cpus, memory_bytes=node.memory_bytes, gpus=tuple(gpus))


def _list_agent_slices(nodes: Iterable[SlurmNode], has_agent: frozenset[str]) -> frozenset[str]:
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for node in nodes:
        found[node.name in has_agent].update(one.type for one in node.gpus if is_slice(one.type))
    return frozenset(found[True] - found[False])


class _Surroundings(NamedTuple):
    """What one look has found beside a job: all nodes' names, dependencies, and the time."""

    names: set[str]
    # MIG slices that only nodes with an agent have, whose GPUs the core does not give to Slurm's jobs by the slice.
    agent_slices: frozenset[str]
    dependencies: Dependencies
    now_s: float


class DistinctNodes:
    """Eligibility rules of jobs of several nodes: each of them is another one, with what the job asks for besides amounts."""

    # All that they know of a job is in its spec: how many nodes, and which traits.
    follows_specs = True

    def __init__(self) -> None:
        self._traits: dict[str, frozenset[str]] = {}
        self._required: dict[str, frozenset[str]] = {}

    def update(self, jobs: Iterable[SlurmJob], nodes: Iterable[SlurmNode]) -> None:
        """Follows what a look has found."""
        self._traits = {node.name: frozenset(list_traits(node)) for node in nodes}
        self._required = {
            name_workload(job): frozenset(list_required_traits(job))
            for job in jobs
            if job.node_count > 1 and is_steered(job)
        }

    def has_rules_for(self, workload_id: str) -> bool:
        """Returns whether a workload is a job of several nodes."""
        return workload_id in self._required

    def list_eligible_nodes(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Returns the nodes that the next replica may use: those with the job's traits that none has yet."""
        del workloads  # Slurm's own rules do not depend on what else is placed
        required, taken = self._required.get(workload_id, frozenset()), frozenset(placed.values())
        return frozenset(name for name, traits in self._traits.items() if required <= traits) - taken

    def list_equivalent_nodes(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Returns the nodes that restrict the following replicas in the same way: only itself."""
        del workload_id
        return frozenset((node_name,))
