"""Release ahead: which waiting jobs Slurm may start by itself before the next look, and on which nodes.

Owns how many jobs are expected to end until then, and the question to a copy of the core. Must not know how jobs are
released, nor clocks; times are arguments.

Theory. A GPU that becomes free between two looks would be empty until the next one, which short jobs pay at each start. So
the jobs that would start there next are released before there is room: they wait in Slurm, on the node where another job is
expected to end, and Slurm starts each as soon as that one has. Slurm never starts more than fits, so a wrong
expectation costs no more than a job that waits on another node than the first that becomes free, until the next look. Ends are
expected by node and kind of job, as many a second as in the busiest three of the last 30 seconds: what came on average would be
less where GPUs were empty for want of jobs, and would stay so. Only jobs of up to
a minute count, and where none came none is expected, so long jobs are not released ahead. Who starts next is for the core to
say, with its order, quotas and budgets: on a copy of it the oldest jobs of those kinds end, and what it places is released.
In the core itself a job that was released ahead waits until it has begun. While any job is to make room for another,
nothing is released ahead, since what becomes free then is meant for that one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, TypeAlias

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.slurm.answers import SlurmJob
from eelgrid_controller.engines.slurm.marks import has_run, is_released, is_steered, name_workload
from eelgrid_controller.engines.slurm.steering import PlaceJob
from eelgrid_controller.state.events import WorkloadPlaced
from eelgrid_protos.messages import AttemptState, AttemptStatus, Workload, WorkloadPhase

# For how long an end is remembered, and the span of that time which is taken for what a node can do.
ENDS_REMEMBERED_S, _SPAN_S = 30, 3
# What ran longer loses little by a look, and its end says nothing about the next seconds.
_SHORT_S = 60
# Jobs that are released ahead at once, and rounds over a copy of the core, each on what the one before has placed.
_AHEAD_MOST = 500
_GENERATIONS_MOST = 20
_RETRIES_MOST = 20


class EndingKind(NamedTuple):
    """Jobs of one user and shape on one node: as these ended, more of them will."""

    node_name: str
    shape: tuple[object, ...]


Ends: TypeAlias = Mapping[EndingKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadJobs:
    """How the jobs stand that were released ahead, beside the ends that are expected."""

    # Those that wait in Slurm, by workload.
    waiting: Mapping[str, SlurmJob]
    # Those of them for which too few ends are expected on their nodes: they are held again.
    surplus: tuple[SlurmJob, ...] = ()
    # Ends for which no job waits yet.
    ends: Ends


def _find_kind(workload: Workload, node_name: str) -> EndingKind:
    # As the core has it: Slurm's own record of a job changes when it starts.
    spec = workload.spec
    return EndingKind(node_name, (spec.user, spec.queue, spec.priority_class, spec.request, spec.required_traits))


def expect_ends(jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload], *, now_s: float, horizon_s: float) -> Ends:
    """Returns how many steered jobs of each kind are expected to end within a horizon, of those with one node."""
    ended_s: dict[EndingKind, list[int]] = {}
    for job in jobs:
        # Slurm's times are whole seconds.
        is_recent = (
            job.has_ended and 0 <= int(now_s) - job.end_s <= ENDS_REMEMBERED_S and job.end_s - job.start_s <= _SHORT_S
        )
        workload = workloads.get(name_workload(job)) if is_recent and has_run(job) and is_steered(job) else None
        if workload is not None and len(job.nodes) == 1:
            ended_s.setdefault(_find_kind(workload, job.nodes[0]), []).append(job.end_s)
    return {kind: ceil(horizon_s * _count_busiest(times) / _SPAN_S) for kind, times in ended_s.items()}


def _count_busiest(times_s: list[int]) -> int:
    """Returns how many times there are in that span which has most of them."""
    times_s.sort()
    return max(bisect_left(times_s, first + _SPAN_S) - place for place, first in enumerate(times_s))


def judge_ahead(jobs: Iterable[SlurmJob], workloads: Mapping[str, Workload], ends: Ends) -> AheadJobs:
    """Compares the jobs that were released ahead with the ends that are expected; twice as many may stay."""
    expected = Counter[str]()
    for kind, count in ends.items():
        expected[kind.node_name] += count
    waiting, surplus, at_node = dict[str, SlurmJob](), list[SlurmJob](), Counter[str]()
    if any(one.preempted_for for one in workloads.values()):
        expected.clear()
    for job in jobs:
        key = name_workload(job)
        workload = workloads.get(key)
        is_ahead = job.is_pending and not job.is_held and is_released(job)
        if not is_ahead or workload is None or workload.phase is not WorkloadPhase.PENDING:
            continue
        waiting[key] = job
        (node_name, *_) = job.required_nodes or ("",)
        at_node[node_name] += 1
        if at_node[node_name] > 2 * expected[node_name]:
            surplus.append(job)
    left = {}
    for kind, count in ends.items() if expected else ():
        taken = min(count, at_node[kind.node_name])
        at_node[kind.node_name] -= taken
        if count > taken:
            left[kind] = count - taken
    return AheadJobs(waiting=waiting, surplus=tuple(surplus), ends=left)


def plan_releases(core: Core, jobs: Sequence[SlurmJob], ahead: AheadJobs, *, now_ns: int) -> list[PlaceJob]:
    """Returns the held jobs that would start next if jobs end as expected, with their nodes; uses up the core, a copy."""
    by_key = {name_workload(job): job for job in jobs if is_steered(job)}
    for key in ahead.waiting.keys() & core.state.workloads.keys():
        core.cancel(key, now_ns=now_ns, is_immediate=True)
    planned, left = dict[str, str](), Counter(ahead.ends)
    for _ in range(_GENERATIONS_MOST):
        ending = _select_ending(core, by_key, left)
        if not ending or len(planned) >= _AHEAD_MOST:
            break
        # All at once, since each time the whole queue is looked through.
        events = list(core.record_attempts(None, [_end(one, now_ns) for one in ending], now_ns=now_ns).events)
        for _ in range(_RETRIES_MOST):
            if not core.has_backlog:
                break
            events += core.retry(now_ns=now_ns).events
        started = {one.workload_id: one.placements for one in events if isinstance(one, WorkloadPlaced)}
        planned |= {key: places[0].node_name for key, places in started.items() if len(places) == 1}
        if not started:
            break
    held = ((by_key.get(key), node_name) for key, node_name in planned.items())
    return [PlaceJob(job, (name,)) for job, name in held if job is not None and job.is_pending and job.is_held]


def _end(workload: Workload, now_ns: int) -> AttemptStatus:
    (place,) = workload.placements
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=place.replica,
        attempt=workload.attempt,
        state=AttemptState.ENDED,
        exit_code=0,
        started_ns=now_ns,
        ended_ns=now_ns,
    )


def _select_ending(core: Core, by_key: Mapping[str, SlurmJob], left: Counter[EndingKind]) -> list[Workload]:
    """Takes from `left` the placed jobs that end next, the oldest first; several jobs of one kind may take turns."""
    found = (core.state.workloads.get(key) for key in by_key)
    placed = [
        one for one in found if one is not None and one.phase is WorkloadPhase.PLACED and len(one.placements) == 1
    ]
    ending = list[Workload]()
    for one in sorted(placed, key=lambda one: (one.placed_ns, one.workload_id)):
        kind = _find_kind(one, one.placements[0].node_name)
        if left[kind] > 0:
            left[kind] -= 1
            ending.append(one)
    return ending
