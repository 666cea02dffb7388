"""Work that belongs with other work: which one cluster it may go to, and until when it waits at the front.

Theory. A cluster's controller starts the parts of a gang together and knows when a dependency is met, but only of work that it has
itself. So

- a workload with dependencies stays at the front, in no cluster, until each of them has ended or has a cluster that it never leaves
  (`Dispatch.is_decided`). Those that have ended are judged here, as a controller judges them, and are not sent on; the others,
  which must be in one cluster, are left to that cluster, and the workload goes there and nowhere else. If they are in two clusters, it
  waits until those of one have ended. A dependency of element on element (`each`), and an array that repeats another one, always
  need that one's cluster.
- the parts of a gang stay at the front until all are there. Then all are pinned to one cluster and reserved there, and only once each of
  them is held there the first is chosen, which settles it for the gang. If the cluster refuses a part before, the gang is
  pinned to another one, and what is held in the first is cancelled. A part that is cancelled leaves the gang; one that takes its place
  goes to the cluster that the gang has.

What is pinned is never moved to another cluster, nor is an array: of its elements some might have started.

Pure: no I/O, no clock. Must not know how clusters are ranked nor called.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.federation.dispatch import CopyPhase, Dispatch, StoredRecord
from eelgrid_controller.queueing.job_conditions import describe_failed_dependency
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import JobDependency, SubmitWorkloadRequest, WorkloadPhase, WorkloadSpec
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST

_REPLICAS_MOST = 10_000
# Namespace, owner and name.
GangKey = tuple[str, str, str]
FindRecord = Callable[[str], StoredRecord | None]


def list_dependencies(request: SubmitWorkloadRequest) -> tuple[JobDependency, ...]:
    """Lists what a workload starts after."""
    return () if request.spec.schedule is None else request.spec.schedule.after


def list_anchors(request: SubmitWorkloadRequest) -> tuple[tuple[str, str], ...]:
    """Lists the workloads that a submission names, each with the field that does."""
    found = [
        (f"spec.schedule.after[{number}].workload_id", one.workload_id)
        for number, one in enumerate(list_dependencies(request))
    ]
    if request.array is not None and request.array.rerun_of:
        found.append(("array.rerun_of", request.array.rerun_of))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyPlan:
    """What the work that a workload names lets the front do with it; at most one of `waits_for` and `failure` is set."""

    # Dependencies that have ended as they must.
    met: tuple[str, ...] = ()
    # The cluster that the others are in; empty if none is left.
    cluster: str = ""
    # Why it waits at the front, and why it can never start.
    waits_for: str = ""
    failure: str = ""


def find_outcome(record: StoredRecord) -> WorkloadPhase | None:
    """Returns how a workload has ended, as far as the front knows; None if it has not. What nobody knows counts as cancelled."""
    dispatch, latest = record.dispatch, record.latest
    copy = dispatch.find_copy(dispatch.chosen)
    if not dispatch.is_settled and (copy is None or copy.phase is not CopyPhase.ENDED):
        return None
    return latest.phase if latest is not None and latest.phase.is_ended else WorkloadPhase.CANCELLED


def resolve_dependencies(dispatch: Dispatch, find: FindRecord) -> DependencyPlan:
    """Returns where a workload may go by the work that it names, or why it waits or never starts."""
    request = dispatch.request
    met: list[str] = []
    needed: dict[str, str] = {}
    awaited: dict[str, str] = {}
    undecided = ""
    for one in list_dependencies(request):
        key, record = one.workload_id, find(one.workload_id)
        if key in dispatch.met:
            met.append(key)
            continue
        if record is None:
            return DependencyPlan(failure=f"dependency_failed: the front keeps no record of {key} any more")
        outcome = find_outcome(record)
        cluster = record.dispatch.chosen if record.dispatch.is_decided else ""
        if one.each and cluster:
            needed.setdefault(cluster, key)
        elif outcome is not None:
            if (failure := describe_failed_dependency(one, outcome)) is not None:
                return DependencyPlan(failure=failure)
            met.append(key)
        elif cluster:
            awaited.setdefault(cluster, key)
        else:
            undecided = undecided or f"dependency: starts after {key}, which has not started yet in any cluster"
    if request.array is not None and (key := request.array.rerun_of):
        record = find(key)
        if record is None or not record.dispatch.chosen:
            return DependencyPlan(failure=f"dependency_failed: the front does not know where {key} ran")
        needed.setdefault(record.dispatch.chosen, key)
    if len(needed) > 1:
        places = " and ".join(f"{key} in {cluster}" for cluster, key in sorted(needed.items()))
        return DependencyPlan(failure=f"dependency_failed: it needs {places}, and runs in one cluster")
    clusters = sorted({*needed, *awaited})
    if undecided or len(clusters) > 1:
        places = " and ".join(f"{(needed | awaited)[cluster]} in {cluster}" for cluster in clusters)
        waits_for = undecided or f"dependency: starts after {places}, and runs in one cluster"
        return DependencyPlan(met=tuple(met), waits_for=waits_for)
    return DependencyPlan(met=tuple(met), cluster=clusters[0] if clusters else "")


def apply_dependencies(dispatch: Dispatch, state: DependencyPlan) -> Dispatch:
    """Returns the dispatch as one that may be sent, or that waits, or that has failed; once it was sent, it stays as it is."""
    if dispatch.copies or dispatch.is_cancelled:
        return dispatch
    if state.failure:
        return replace(dispatch, has_failed=True, decision=(state.failure,))
    if state.waits_for:
        return replace(dispatch, met=state.met, decision=(state.waits_for,))
    decision = (f"{state.cluster} has what it starts after",) if state.cluster else ()
    return replace(dispatch, met=state.met, pinned_to=state.cluster, decision=decision)


# Gangs


def get_gang_key(dispatch: Dispatch) -> GangKey | None:
    """Returns the gang of a workload; None if it is no part of one."""
    spec = dispatch.request.spec
    return None if spec.gang is None else (spec.namespace, dispatch.owner or spec.user, spec.gang.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlan:
    """What the parts of a gang, as they are recorded, let the front do."""

    # How many parts were not submitted yet, or are held at the front.
    missing: int = 0
    # The cluster that all parts are pinned to; empty if one is to be found among those that are not `refused`.
    cluster: str = ""
    refused: frozenset[str] = frozenset()
    # Each part is held in that cluster, or one was chosen there: parts may be chosen.
    may_start: bool = False


def plan_gang(parts: Iterable[Dispatch]) -> GangPlan:
    """Plans for the parts of one gang that are not settled, in the order of their submission."""
    live = [one for one in parts if not one.is_cancelled]
    bound = next((one.chosen for one in live if one.chosen), "")
    gone = {CopyPhase.REFUSED, CopyPhase.ENDED}
    refused = frozenset(copy.cluster for one in live for copy in one.copies if copy.phase in gone)
    if bound:
        return GangPlan(cluster=bound, refused=refused, may_start=True)
    size = max((one.request.spec.gang.parts for one in live if one.request.spec.gang is not None), default=0)
    missing = max(0, size - len(live)) + sum(bool(one.held_by) for one in live)
    target = next((one.pinned_to for one in live if one.pinned_to and one.pinned_to not in refused), "")
    held = [copy for one in live if (copy := one.find_copy(target)) is not None and copy.phase is CopyPhase.HELD]
    return GangPlan(
        missing=missing,
        cluster=target,
        refused=refused,
        may_start=not missing and bool(target) and len(held) == len(live),
    )


def check_part(part: Dispatch, parts: Sequence[Dispatch]) -> None:
    """Checks that a new workload fits the parts of its gang that are known; raises InvalidArgument."""
    gang = part.request.spec.gang
    live = [one for one in parts if not one.is_cancelled]
    if gang is None or not live:
        return
    first, violation = live[0].request.spec.gang, None
    assert first is not None
    if (gang.parts, gang.required_parts) != (first.parts, first.required_parts):
        problem = (
            f"has {gang.parts} parts, and gang {gang.name} has {first.parts} by its other parts, or another parts_least"
        )
        violation = Violation("spec.gang.parts", problem, "give what its other parts do, or another name")
    elif len(live) >= gang.parts:
        ids = ", ".join(one.workload_id for one in live)
        problem = f"is {gang.name}, which has its {gang.parts} parts: {ids}"[:SENTENCE_LETTERS_MOST]
        violation = Violation("spec.gang", problem, "choose another name, or wait until all of them have ended")
    if violation is not None:
        raise InvalidArgument("the workload is no part of that gang", (violation,))


def merge_parts(parts: Iterable[Dispatch]) -> tuple[SubmitWorkloadRequest, ...]:
    """Returns what to ask clusters for a gang: parts that ask for the same as one workload with the replicas of all, the largest first."""
    merged: list[SubmitWorkloadRequest] = []
    plain: list[WorkloadSpec] = []
    for part in parts:
        spec = replace(part.request.spec, gang=None)
        shape = replace(spec, name="gang", labels={}, process=None, replicas=1)
        if shape not in plain:
            plain.append(shape)
            merged.append(replace(part.submission, spec=spec))
            continue
        at = plain.index(shape)
        before = merged[at].spec
        replicas = min(_REPLICAS_MOST, before.replicas + spec.replicas)
        merged[at] = replace(merged[at], spec=replace(before, replicas=replicas))
    return tuple(sorted(merged, key=lambda one: -_count_gpu_milli(one.spec)))


def _count_gpu_milli(spec: WorkloadSpec) -> int:
    return spec.replicas * spec.request.gpu_count * spec.request.gpu_milli


def pin_part(dispatch: Dispatch, cluster: str, decision: Sequence[str]) -> Dispatch:
    """Returns a part as pinned to the cluster of its gang; one that was chosen, or may go nowhere any more, as it is."""
    if dispatch.chosen or dispatch.is_cancelled or dispatch.pinned_to == cluster:
        return dispatch
    return replace(dispatch, pinned_to=cluster, decision=tuple(decision) or dispatch.decision)
