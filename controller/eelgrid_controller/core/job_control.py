"""Job control as decisions and events: hold and release, dependencies at submission, retries, and what becomes ready.

`JobControl` settles, in each step, what the conditions of pending work have become (queueing.job_conditions): it cancels work
whose dependency failed, gives work its new reason, and says whether work became ready, which the core then tries. Bounded for
each step; what is left is settled in the next. Must not know how work is placed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from eelgrid_controller.core.workloads import check_chosen_id
from eelgrid_controller.formatting import count_noun
from eelgrid_controller.queueing.admission import QueueIndex
from eelgrid_controller.queueing.job_conditions import (
    JobConditionIndex,
    compute_backoff_ns,
    find_failed_dependency,
)
from eelgrid_controller.state.attempts import find_held_attempt, find_node_fault, has_stopped
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    Event,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadHeld,
    WorkloadReleased,
    WorkloadRetried,
    WorkloadStopping,
    WorkloadSubmitted,
)
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    DependencyCondition,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST

# Looked at in one step; each costs some tens of microseconds.
_SETTLED_MOST = 512
# Why work that was submitted as cancelled has ended.
ON_SUBMISSION = "submitted as cancelled"
# Attempts of one workload that its nodes may end without being counted as failed: more may be its own doing.
NODE_FAULTS_MOST = 3
# Who holds work, where the caller has no certificate.
UNNAMED_USER = "an operator"


def check_dependencies(state: ClusterState, spec: WorkloadSpec, indexes: Sequence[int] = ()) -> None:
    """Checks that what a workload, or an array of these indexes, depends on is there and can end as it must.

    Raises InvalidArgument.
    """
    for number, one in enumerate(spec.schedule.after if spec.schedule is not None else ()):
        field = f"spec.schedule.after[{number}]"
        elements = state.arrays.list_elements(one.workload_id)
        parent = state.workloads.get(elements[0] if elements else one.workload_id)
        violation = None
        if elements and parent is not None and parent.spec.array is not None and len(elements) < parent.spec.array.size:
            violation = Violation(
                f"{field}.workload_id",
                f"is {one.workload_id}, and not all of its elements are kept any more",
                "name one that has not ended, or leave it out",
            )
        elif one.each:
            violation = _check_pairs(state, one.workload_id, elements, indexes, f"{field}.each")
        elif parent is None:
            violation = Violation(
                f"{field}.workload_id",
                f"is {one.workload_id!r}, and there is no such workload",
                "name one that eelctl workloads --all lists, or leave it out",
            )
        elif parent.spec.process is None and one.condition is not DependencyCondition.ENDED:
            violation = Violation(
                f"{field}.condition",
                f"is {one.condition.name.lower()}, and {one.workload_id} runs no process of which that would be known",
                "set it to ended (--after-any)",
            )
        if violation is not None:
            raise InvalidArgument("a dependency cannot be met", (violation,))


def _check_pairs(
    state: ClusterState, parent_id: str, elements: Sequence[str], indexes: Sequence[int], field: str
) -> Violation | None:
    """Returns why the elements of an array cannot wait for one of another array each."""
    if not indexes:
        return Violation(field, "is set, and this is no array", "submit an array, or wait for all elements")
    if not elements:
        return Violation(field, f"is set, and {parent_id!r} is no array", "name an array, or leave it out")
    parents = [element.index for key in elements if (element := state.workloads[key].spec.array) is not None]
    if parents == list(indexes):
        return None
    return Violation(
        field,
        f"pairs {count_noun(len(indexes), 'element')} with the {len(parents)} of {parent_id}, whose indexes are others",
        "give both the same indexes, or wait for all elements",
    )


def make_waiting(workload_id: str, spec: WorkloadSpec, owner: str, *, is_held: bool, now_ns: int) -> Workload:
    """Makes a workload as it begins to wait, held by its user or not."""
    return Workload(
        workload_id=workload_id,
        spec=spec,
        phase=WorkloadPhase.PENDING,
        submitted_ns=now_ns,
        owner=owner,
        held_by=(owner or spec.user or UNNAMED_USER) if is_held else "",
    )


def plan_hold(workload: Workload, user: str, *, now_ns: int) -> tuple[Event, ...]:
    """Returns the event that holds a pending workload; none if it is held. Raises FailedPrecondition."""
    if workload.phase is not WorkloadPhase.PENDING:
        state = "has ended" if workload.phase.is_ended else "does not wait any more"
        raise FailedPrecondition(
            f"workload {workload.workload_id} {state}; only pending work is held: cancel it to stop it"
        )
    if workload.held_by:
        return ()
    return (WorkloadHeld(time_ns=now_ns, workload_id=workload.workload_id, user=user or UNNAMED_USER),)


def begin_workload(workload: Workload) -> tuple[Event, ...]:
    """Returns the events by which a workload begins to wait, as it is to be: submitted, and held if it is."""
    key, now_ns = workload.workload_id, workload.submitted_ns
    submitted = WorkloadSubmitted(
        time_ns=now_ns, workload_id=key, spec=workload.spec, owner=workload.owner, share=workload.share
    )
    held = WorkloadHeld(time_ns=now_ns, workload_id=key, user=workload.held_by) if workload.held_by else None
    return (submitted,) if held is None else (submitted, held)


def plan_cancel(
    workload: Workload, reason: str, *, now_ns: int, is_immediate: bool = False
) -> WorkloadStopping | WorkloadCancelled | None:
    """Returns the event that ends a workload, or tells its processes to end; None if it has ended or is being stopped."""
    is_running = workload.spec.process is not None and workload.phase is WorkloadPhase.PLACED
    if is_running and not has_stopped(workload) and not is_immediate:
        if workload.stopping_ns and not workload.returns_to_queue:
            return None
        return WorkloadStopping(time_ns=now_ns, workload_id=workload.workload_id, reason=reason or "cancelled")
    if workload.phase.is_ended:
        return None
    return WorkloadCancelled(time_ns=now_ns, workload_id=workload.workload_id, reason=reason)


def plan_requeue(workload: Workload, cause: str, now_ns: int, held_by: str = "") -> tuple[Event, ...]:
    """Returns the event that stops a running job, which then waits again; none if it waits, or is being stopped for that.

    `cause` is who asked for it and why, as the end of a sentence; `held_by` holds it there. Raises FailedPrecondition.
    """
    key = workload.workload_id
    if workload.phase.is_ended:
        raise FailedPrecondition(f"workload {key} has ended, and is not requeued: run it again with eelctl rerun {key}")
    if workload.phase is WorkloadPhase.PENDING:
        return plan_hold(workload, held_by, now_ns=now_ns) if held_by else ()
    if workload.preempted_for and held_by:
        raise FailedPrecondition(
            f"workload {key} makes room for {workload.preempted_for} already; hold it when it waits"
        )
    if workload.preempted_for or (workload.requeuing and held_by in ("", workload.held_by)):
        return ()
    if workload.stopping_ns and not workload.requeuing:
        raise FailedPrecondition(
            f"workload {key} is being cancelled: run it again with eelctl rerun {key} when it has ended"
        )
    if workload.spec.process is None:
        raise FailedPrecondition(
            f"workload {key} runs no process that an agent could stop: requeue it where it was started "
            "(scontrol requeue, kubectl delete pod), or cancel it and submit it again"
        )
    if not workload.spec.may_run_again:
        raise FailedPrecondition(f"workload {key} was submitted with --no-requeue: cancel it to stop it")
    stopping = stop_for_requeue(workload, PendingConstraint.EVICTED.describe("requeued", cause=cause), now_ns)
    return (replace(stopping, held_by=held_by),)


def stop_for_requeue(workload: Workload, reason: str, now_ns: int) -> WorkloadStopping:
    """Returns the event that stops the processes of a job, which then waits in the queue again for a reason if it may."""
    return WorkloadStopping(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        reason=reason[:SENTENCE_LETTERS_MOST],
        requeues=workload.spec.may_run_again,
    )


def plan_cancelled_submission(
    state: ClusterState, request: SubmitWorkloadRequest, owner: str, *, now_ns: int
) -> tuple[Event, ...] | None:
    """Returns the events that record a submission which is cancelled at once; None if its id is that of other work.

    Raises InvalidArgument. Only what marks the id is kept, so that a later submission with it is refused as one with another spec.
    """
    key = request.workload_id
    if not key or request.dry_run:
        field, remedy = ("workload_id", "name the submission") if not key else ("dry_run", "leave one of them out")
        violation = Violation(field, "does not go with cancelled, which marks an id as used", remedy)
        raise InvalidArgument("nothing can be recorded as cancelled", (violation,))
    spec = request.spec
    bare = WorkloadSpec(name=spec.name, request=spec.request, namespace=spec.namespace, user=spec.user)
    if key in state.arrays or key in state.workloads:
        known = state.workloads.get(key)
        return () if known is not None and known.phase is WorkloadPhase.CANCELLED and known.spec == bare else None
    check_chosen_id(key)
    return begin_workload(make_waiting(key, bare, owner, is_held=False, now_ns=now_ns))


def plan_release(workload: Workload, *, now_ns: int) -> tuple[Event, ...]:
    """Returns the event that releases a held workload; none if nobody holds it. Raises FailedPrecondition."""
    if workload.held_by and workload.phase is WorkloadPhase.PLACED:
        raise FailedPrecondition(f"workload {workload.workload_id} is being stopped; release it when it waits")
    return (WorkloadReleased(time_ns=now_ns, workload_id=workload.workload_id),) if workload.held_by else ()


def plan_end(workload: Workload, phase: WorkloadPhase, reason: str, *, now_ns: int) -> Event:
    """Returns the event that follows the end of a workload's last process: it ends, or waits for its next attempt.

    One that never began, since another process held its GPU, returns to the queue as it was; so does one whose node
    failed, unless that happened to it too often or it must not run again.
    """
    held = find_held_attempt(workload) if phase is WorkloadPhase.FAILED else None
    if held is not None:
        evicted = PendingConstraint.EVICTED.describe("held", why=held.reason)[:SENTENCE_LETTERS_MOST]
        return WorkloadEvicted(time_ns=now_ns, workload_id=workload.workload_id, reason=evicted)
    fault = find_node_fault(workload) if phase is WorkloadPhase.FAILED else ""
    if fault and workload.spec.may_run_again and workload.node_faults < NODE_FAULTS_MOST:
        evicted = PendingConstraint.EVICTED.describe("node_fault", attempt=str(workload.attempt), why=fault)
        evicted = evicted[:SENTENCE_LETTERS_MOST]
        return WorkloadEvicted(time_ns=now_ns, workload_id=workload.workload_id, reason=evicted, is_node_fault=True)
    schedule, failures = workload.spec.schedule, workload.failures + 1
    if phase is not WorkloadPhase.FAILED or schedule is None or failures > schedule.retries_most:
        return WorkloadCompleted(time_ns=now_ns, workload_id=workload.workload_id, phase=phase, reason=reason)
    return WorkloadRetried(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        reason=PendingConstraint.RETRY.describe("failed", attempt=str(workload.attempt), why=reason)[
            :SENTENCE_LETTERS_MOST
        ],
        not_before_ns=now_ns + compute_backoff_ns(failures),
    )


class JobControl:
    """The conditions of one state's pending work, step by step."""

    def __init__(self, state: ClusterState, queues: QueueIndex, conditions: JobConditionIndex) -> None:
        self._state, self._queues, self._conditions = state, queues, conditions

    def find_reason(self, workload: Workload, now_ns: int) -> str:
        """Returns why a workload may not start now, if it is submitted or waits; empty if it may."""
        unmet = self._conditions.find_unmet(workload, now_ns)
        return find_failed_dependency(workload, self._state) or ("" if unmet is None else unmet.reason)

    def settle(self, apply: Callable[[Event], object], now_ns: int) -> tuple[list[Event], bool]:
        """Settles what has changed, up to the bound; returns the events, already applied, and whether work became ready."""
        events: list[Event] = []
        is_ready = False

        def do(event: Event) -> None:
            apply(event)
            events.append(event)

        for key in self._conditions.iterate_due(now_ns, _SETTLED_MOST):
            workload = self._state.workloads[key]
            failed = find_failed_dependency(workload, self._state)
            if failed is not None:
                do(WorkloadCancelled(time_ns=now_ns, workload_id=key, reason=failed))
                continue
            was_parked = self._state.pending.is_parked(key)
            unmet = self._conditions.classify(key)
            if unmet is not None:
                constraint = workload.reason.partition(":")[0]
                # How its attempt failed says more than that it did.
                if workload.reason != unmet.reason and not constraint == unmet.constraint == "retry":
                    do(WorkloadDeferred(time_ns=now_ns, workload_id=key, reason=unmet.reason))
            elif was_parked:
                self._queues.sync_pending(key)
                is_ready = True
                if is_sliced(workload):
                    do(
                        WorkloadDeferred(
                            time_ns=now_ns, workload_id=key, reason=PendingConstraint.PARTITIONS.describe()
                        )
                    )
        return events, is_ready
