"""Attempts: the processes of a placed workload, from their start to their end, and its return to the queue.

A workload counts how often it was placed; each of its replicas runs one process in each attempt. A report names its
attempt, so that one about an earlier attempt changes nothing. The workload holds its devices until the end of every
process was reported, and the first that fails stops the others. Of work that another engine runs, such as a job of Slurm,
the engine may report one attempt, which is that of the whole job.

    (not reported) --AttemptStarted--> RUNNING --AttemptEnded--> ENDED, LOST
    (not reported) --AttemptEnded--> ENDED, LOST
    all of them ENDED, LOST --WorkloadCompleted, or WorkloadEvicted if it is preempted or requeued
    (start lost, ENDED, LOST) --WorkloadCompleted, with what was recovered
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.formatting import describe_attempt
from eelgrid_controller.state.events import (
    AttemptEnded,
    AttemptStarted,
    RecoveredAttempt,
    WorkloadEvicted,
    WorkloadRetried,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import AttemptState, AttemptStatus, Placement, Workload, WorkloadPhase, WorkloadSpec

_EVICTED = PendingConstraint.EVICTED.value


def has_started(workload: Workload) -> bool:
    """Whether it was placed once, as far as it tells: one that returned to the queue has no time of placement."""
    array = workload.array
    if array is not None and (array.started or array.succeeded or array.failed):
        return True
    returned = workload.attempt or workload.preemptions or workload.failures or workload.reason.startswith(_EVICTED)
    return workload.phase is WorkloadPhase.PLACED or workload.placed_ns > 0 or bool(returned)


def find_attempt(workload: Workload, replica: int) -> AttemptStatus | None:
    """Returns what was reported of a replica's process in the current attempt; None before its start."""
    return next((one for one in workload.attempts if one.replica == replica), None)


def is_stale(workload: Workload | None, node_name: str | None, status: AttemptStatus) -> bool:
    """Returns whether a report of a node, or with None of an engine, is not about what it runs of the workload now."""
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        return True
    if (workload.spec.process is None) != (node_name is None):
        return True
    places = {placement.replica: placement.node_name for placement in workload.placements}
    where = places.get(status.replica)
    return status.attempt != workload.attempt or where is None or node_name not in (None, where)


def drop_undurable(status: AttemptStatus) -> AttemptStatus:
    """Returns a status as events have it: what it says of itself changes all the time, and a digest is only compared."""
    return replace(status, progress=None, process_digest="")


def make_attempt_event(workload: Workload, status: AttemptStatus, now_ns: int) -> AttemptStarted | AttemptEnded | None:
    """Returns the event that a report, which is not stale, makes; None if it says nothing new."""
    before = find_attempt(workload, status.replica)
    status = drop_undurable(status)
    if status.is_over and (before is None or not before.is_over):
        return AttemptEnded(time_ns=now_ns, workload_id=workload.workload_id, status=status)
    if status.state is AttemptState.RUNNING and before is None:
        return AttemptStarted(time_ns=now_ns, workload_id=workload.workload_id, status=status)
    return None


def apply_attempt(workload: Workload, event: AttemptStarted | AttemptEnded) -> Workload:
    """Returns the workload after a report; raises ContradictoryEvent."""
    status, before = event.status, find_attempt(workload, event.status.replica)
    is_known = before is not None and (before.is_over or isinstance(event, AttemptStarted))
    is_placed = any(placement.replica == status.replica for placement in workload.placements)
    if status.attempt != workload.attempt or not is_placed or is_known:
        raise ContradictoryEvent(
            f"attempt {status.attempt} of replica {status.replica} of {workload.workload_id} is another, or is over"
        )
    others = (one for one in workload.attempts if one.replica != status.replica)
    return replace(workload, attempts=tuple(sorted((*others, status), key=lambda one: one.replica)))


def recover_attempts(workload: Workload, recovered: Sequence[RecoveredAttempt]) -> Workload:
    """Returns a workload that waits as it was in the attempt whose start was lost; on which GPUs it ran is not known."""
    return replace(
        workload,
        attempt=workload.attempt + 1,
        attempts=tuple(one.status for one in recovered),
        placements=tuple(
            Placement(replica=one.status.replica, node_name=one.node_name, gpu_uuids=(), gpu_indexes=())
            for one in recovered
        ),
    )


def return_to_queue(workload: Workload, event: WorkloadEvicted | WorkloadRetried) -> Workload:
    """Returns a placed workload as it waits again, with the number of replicas with which it was submitted."""
    failures, not_before_ns, is_preempted, is_fault = workload.failures, 0, False, False
    if isinstance(event, WorkloadEvicted):
        is_preempted, is_fault = bool(event.preempted_for), event.is_node_fault
    else:
        failures, not_before_ns = failures + 1, event.not_before_ns
    return replace(
        workload,
        spec=replace(workload.spec, replicas=workload.replicas_begun or workload.spec.replicas),
        phase=WorkloadPhase.PENDING,
        reason=event.reason,
        placements=(),
        placed_ns=0,
        power_limit_w=None,
        limit_before_start=False,
        progress_runtime_s=None,
        replicas_begun=0,
        attempts=(),
        stopping_ns=0,
        preempted_for="",
        requeuing=False,
        preemptions=workload.preemptions + is_preempted,
        failures=failures,
        node_faults=workload.node_faults + is_fault,
        not_before_ns=not_before_ns,
    )


def must_stop(workload: Workload) -> bool:
    """Returns whether the processes that still run must end: the workload was cancelled, or one of them failed."""
    return bool(workload.stopping_ns) or any(one.is_over and not one.is_success for one in workload.attempts)


def holds_until_stopped(spec: WorkloadSpec) -> bool:
    """Returns whether work has to be told to end, and holds its devices until it has: processes, or what an engine evicts."""
    return spec.process is not None or spec.evicted_by_engine


def has_stopped(workload: Workload) -> bool:
    """Returns whether no process of a workload runs any more in its current attempt."""
    reported_least = 1 if workload.spec.process is None else len(workload.placements)
    return len(workload.attempts) >= reported_least and all(one.is_over for one in workload.attempts)


def find_outcome(workload: Workload) -> tuple[WorkloadPhase, str] | None:
    """Returns how a workload has ended, and why; None while a process of it may run, or if it returns to the queue."""
    if not has_stopped(workload):
        return None
    if all(one.is_success for one in workload.attempts):
        return WorkloadPhase.SUCCEEDED, ""
    if workload.returns_to_queue:
        return None
    if workload.stopping_ns:
        return WorkloadPhase.CANCELLED, workload.reason
    failed = [one for one in workload.attempts if not one.is_success]
    first = min(failed, key=lambda one: one.ended_ns)
    is_of_one = workload.spec.process is not None and len(workload.placements) > 1
    whose = f"replica {first.replica}: " if is_of_one else ""
    return WorkloadPhase.FAILED, whose + describe_attempt(first)


def find_held_attempt(workload: Workload) -> AttemptStatus | None:
    """Returns the attempt that ended first without success if another's process on its GPU kept it from its start."""
    failed = [one for one in workload.attempts if not one.is_success]
    first = min(failed, key=lambda one: one.ended_ns, default=None)
    return first if first is not None and first.gpu_held else None


def find_node_fault(workload: Workload) -> str:
    """Returns why the node of an attempt that failed is to blame; empty if none is.

    Of a gang the processes on other nodes may have ended before the one whose node failed.
    """
    return next((one.node_fault for one in workload.attempts if not one.is_success and one.node_fault), "")


def awaits_limit(workload: Workload) -> bool:
    """Returns whether none of a workload's processes has started, which they do only at its power limit."""
    return workload.limit_before_start and workload.power_limit_w is not None and not workload.attempts


def describe_start_hold(workload: Workload, nodes: Mapping[str, NodeRecord]) -> str:
    """Says what keeps a process of a placed workload from its start: a GPU in use, or a power limit; else empty."""
    if workload.spec.process is None or workload.phase is not WorkloadPhase.PLACED:
        return ""
    begun = {one.replica for one in workload.attempts}
    for place in workload.placements:
        record = nodes.get(place.node_name)
        for gpu in record.inventory.gpus if record is not None and place.replica not in begun else ():
            if gpu.uuid in place.gpu_uuids and gpu.cordon:
                return f"replica {place.replica} has not started: GPU {gpu.index} of {place.node_name} is {gpu.cordon}"
    if awaits_limit(workload):
        return f"it has not started: its agents set {workload.power_limit_w:g} W on its GPUs before, for a power budget"
    return ""
