"""Job arrays as decisions and events: the submission of all elements or none, and changes of all elements of an array.

`ArrayPlanner` turns a submission into one event; everything that could refuse an element is checked before. Its `plan_change`
gives the events by which an element follows what was asked of its array. Must not know how elements are placed, nor when the
events become durable.

Theory. Elements differ in index, command and variables alone, so that what holds for one holds for all: feasibility, queue,
models and limits are checked once, the commands one by one. Bounds are checked on counts, before anything is made of them. A
repeated submission is recognized by its id if it would make the elements that are known again.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from eelgrid_controller.core.array_deadlines import admit_array
from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.expected_starts import StartEstimator
from eelgrid_controller.core.job_control import (
    JobControl,
    check_dependencies,
    make_waiting,
    plan_cancel,
    plan_hold,
    plan_release,
    plan_requeue,
)
from eelgrid_controller.core.preemptions import resolve_priority_class
from eelgrid_controller.core.start_decision import StartDecider
from eelgrid_controller.core.workloads import (
    check_chosen_id,
    check_feasibility,
    check_live_room,
    get_workload_or_array,
    resolve_models,
    validate_spec,
)
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.queueing.admission import QueueIndex
from eelgrid_controller.queueing.job_arrays import ElementParameters, JobArray, parse_job_array
from eelgrid_controller.state.array_elements import list_submitted, pair_dependencies, preview_array
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    ArraySubmitted,
    Event,
    SubmittedElement,
    WorkloadPromised,
    make_element_id,
)
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    ARRAY_VARIABLE_PREFIX,
    JobArrayRequest,
    ProcessSpec,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.messages.plan import ARGUMENT_CHARACTERS_MOST, COMMAND_CHARACTERS_MOST
from eelgrid_protos.schema import list_violations

# Of the commands and parameters of all elements: they are one entry of the journal.
_CHARACTERS_MOST = 8 * 1024 * 1024
# Of the variables that name an element.
_OWN_CHARACTERS = 256
_REFUSED = "the array cannot be submitted"


class ElementChange(Enum):
    """What is asked of all elements of an array at once."""

    CANCEL = "cancel"
    HOLD = "hold"
    REQUEUE = "requeue"
    RELEASE = "release"
    MOVE = "move"


class ArrayPlanner:
    """Plans the submission of arrays to one state, and changes of their elements."""

    def __init__(
        self,
        state: ClusterState,
        chooser: WorkloadPlacer,
        queues: QueueIndex,
        jobs: JobControl,
        starts: StartDecider,
        *,
        backfill: BackfillPlanner,
        estimator: StartEstimator,
    ) -> None:
        self._state, self._chooser, self._queues, self._jobs = state, chooser, queues, jobs
        self._starts, self._backfill, self._estimator = starts, backfill, estimator

    def plan_submission(
        self, request: SubmitWorkloadRequest, *, owner: str, live_most: int, now_ns: int
    ) -> ArraySubmitted | None:
        """Returns the event that submits an array; None if it was submitted before.

        Raises InvalidArgument, AlreadyExists, ResourceExhausted, FailedPrecondition and what a queue refuses with.
        """
        assert request.array is not None
        _check_kind(request.spec)
        elements, limit = self._list_elements(request.spec, request.array)
        request = self._resolve(request)
        array_id = request.workload_id or f"w-{self._state.next_number}"
        event = ArraySubmitted(
            time_ns=now_ns,
            array_id=array_id,
            spec=request.spec,
            elements=elements,
            reason="",
            running_most=limit or 0,
            owner=owner,
        )
        if self._is_repeated(event):
            return None
        check_chosen_id(request.workload_id)
        validate_spec(event.spec)
        _check_commands(event)
        if self._queues.is_active:
            event = replace(event, spec=self._queues.check_submission(event.spec, owner, self._starts.list_models))
        check_dependencies(self._state, event.spec, tuple(element.index for element in elements))
        check_live_room(self._state, len(elements), live_most)
        check_feasibility(self._state, self._chooser, event.spec)
        return self._give_reason(event, is_held=request.hold)

    def admit_deadline(self, event: ArraySubmitted, now_ns: int) -> tuple[WorkloadPromised, ...]:
        """Returns the promised starts of all elements that an event submits, none without a promised deadline.

        Raises InvalidArgument, which names the earliest possible end, and ResourceExhausted.
        """
        first = next(list_submitted(event))
        may_start = event.spec.has_promised_deadline and not self._jobs.find_reason(first, now_ns)
        may_start = may_start and bool(self._starts.decide_start(first, (), now_ns).placements)
        return admit_array(self._state, self._backfill, event, may_start=may_start, now_ns=now_ns)

    def preview(self, request: SubmitWorkloadRequest, event: ArraySubmitted | None, now_ns: int) -> Workload:
        """Returns the array that an event would submit, with the expected start of its first element, or that is known."""
        if event is None:
            return get_workload_or_array(self._state, request.workload_id)
        first, preview = next(list_submitted(event)), preview_array(event)
        if self._jobs.find_reason(replace(first, held_by=event.held_by), now_ns):
            return preview
        decision = self._starts.decide_start(first, (), now_ns)
        return replace(preview, expected_start_ns=self._estimator.estimate_ns(first, decision, now_ns))

    def _resolve(self, request: SubmitWorkloadRequest) -> SubmitWorkloadRequest:
        """Returns the request with its priority class and models resolved; a repeated one as at first."""
        known = self._state.arrays.list_elements(request.workload_id)
        named = replace(request, workload_id=known[0]) if known else request
        named = resolve_priority_class(self._state, resolve_models(self._state, self._chooser.snapshot, named))
        return replace(named, workload_id=request.workload_id)

    def _list_elements(
        self, spec: WorkloadSpec, request: JobArrayRequest
    ) -> tuple[tuple[SubmittedElement, ...], int | None]:
        array = parse_job_array(request)
        if request.rerun_of:
            return self._repeat_elements(request.rerun_of, array), array.running_most
        if request.parameters:
            _check_characters(spec.process, array)
        return tuple(_make_element(spec.process, element) for element in array.elements), array.running_most

    def _repeat_elements(self, array_id: str, array: JobArray) -> tuple[SubmittedElement, ...]:
        """Returns the elements of an array that run again, with the commands and variables that they had."""
        known = {
            one.spec.array.index: one
            for key in self._state.arrays.list_elements(array_id)
            if (one := self._state.workloads[key]).spec.array is not None
        }
        if not known:
            remedy = "name one that eelctl jobs --all lists"
            raise _refuse("array.rerun_of", f"is {array_id}, and there is no such array", remedy)
        wanted = [element.index for element in array.elements] or list(known)
        missing = next((index for index in wanted if index not in known), None)
        if missing is not None:
            raise _refuse("array.indexes", f"name {missing}, which {array_id} has not", "name elements that it has")
        live = next((known[index] for index in wanted if not known[index].phase.is_ended), None)
        if live is not None:
            raise FailedPrecondition(
                f"element {live.workload_id} has not ended; wait for it, cancel it, or name those that have ended"
            )
        return tuple(_repeat_element(index, known[index].spec.process) for index in wanted)

    def _is_repeated(self, event: ArraySubmitted) -> bool:
        """Returns whether an equal request submitted the array before; raises AlreadyExists if an id of it is taken."""
        state, array_id = self._state, event.array_id
        if array_id in state.workloads:
            raise AlreadyExists(f"a workload has the id {array_id}; choose another id, or leave it empty")
        known = state.arrays.list_elements(array_id)
        if not known:
            taken = next((key for key in event.workload_ids if key in state.workloads), None)
            if taken is not None:
                raise AlreadyExists(f"a workload has the id {taken} of an element; choose another id for the array")
            return False
        wanted = {one.workload_id: one.spec for one in list_submitted(event)}
        for key in known:
            found = state.workloads[key]
            spec = replace(found.spec, queue=event.spec.queue, replicas=found.replicas_begun or found.spec.replicas)
            if wanted.get(key) != spec:
                raise AlreadyExists(
                    f"array {array_id} exists with other elements; choose another id, leave the id empty to have one "
                    "drawn, or cancel it first"
                )
        return True

    def _give_reason(self, event: ArraySubmitted, *, is_held: bool) -> ArraySubmitted:
        """Returns the event with the reason for which its elements wait until each is tried."""
        first = event.elements[0].index
        spec = replace(event.spec, schedule=pair_dependencies(event.spec.schedule, first))
        waiting = make_waiting(
            make_element_id(event.array_id, first), spec, event.owner, is_held=is_held, now_ns=event.time_ns
        )
        reason = self._jobs.find_reason(waiting, event.time_ns)
        if not reason:
            reason = PendingConstraint.ARRAY.describe("" if event.running_most else "turn")
        return replace(event, reason=reason, held_by=waiting.held_by)

    def plan_change(
        self, change: ElementChange, workload_id: str, word: str, now_ns: int, held_by: str = ""
    ) -> Sequence[Event]:
        """Returns the events by which an element follows what was asked of its array; none if that is no change, or it is gone.

        `word` is the user who holds it, who requeues it and why, or the queue that it moves to; `held_by` holds what is
        requeued, and what waits beside it. Raises what `StartDecider.plan_queue_change` raises.
        """
        workload = self._state.workloads.get(workload_id)
        if workload is None:
            return ()
        match change:
            case ElementChange.CANCEL:
                event = plan_cancel(workload, "cancelled", now_ns=now_ns)
                return () if event is None else (event,)
            case ElementChange.RELEASE:
                return plan_release(workload, now_ns=now_ns)
            case ElementChange.REQUEUE:
                if workload.phase is WorkloadPhase.PENDING:
                    return plan_hold(workload, held_by, now_ns=now_ns) if held_by else ()
                is_stopping = workload.stopping_ns and not (held_by and workload.requeuing)
                is_running = workload.phase is WorkloadPhase.PLACED and not is_stopping
                return plan_requeue(workload, word, now_ns, held_by) if is_running else ()
            case _ if workload.phase is not WorkloadPhase.PENDING:
                return ()
            case ElementChange.HOLD:
                return plan_hold(workload, word, now_ns=now_ns)
            case _:
                return self._starts.plan_queue_change(workload, word, now_ns)


def _check_kind(spec: WorkloadSpec) -> None:
    """Checks that an array can be of such workloads; raises InvalidArgument."""
    if spec.service is not None:
        raise _refuse("spec.service", "is set, and an array is of jobs", "submit the service alone, with replicas")
    if spec.gang is not None:
        raise _refuse("spec.gang", "is set, and the elements of an array start one by one", "leave it out")
    if spec.array is not None:
        raise _refuse("spec.array", "is set, which the controller does", "leave it out")


def _make_element(process: ProcessSpec | None, element: ElementParameters) -> SubmittedElement:
    if process is None or not element.parameters:
        return SubmittedElement(index=element.index)
    argv = element.substitute_arguments(process.argv)
    return SubmittedElement(index=element.index, argv=() if argv == process.argv else argv, variables=element.variables)


def _repeat_element(index: int, process: ProcessSpec | None) -> SubmittedElement:
    if process is None:
        return SubmittedElement(index=index)
    own = f"{ARRAY_VARIABLE_PREFIX}ID"
    variables = {name: value for name, value in process.element_variables.items() if name != own}
    return SubmittedElement(index=index, argv=process.argv, variables=variables)


def _check_characters(process: ProcessSpec | None, array: JobArray) -> None:
    """Checks that the commands of a sweep are not too long together, before they are made; raises InvalidArgument."""
    if process is None:
        raise _refuse("array.parameters", "are given without a command", "give spec.process a command that takes them")
    longest = {
        name: max(len(element.parameters[name]) for element in array.elements) for name in array.elements[0].parameters
    }
    uses = sum(
        size * (1 + sum(argument.count(f"{{{name}}}") for argument in process.argv)) for name, size in longest.items()
    )
    characters = len(array.elements) * (sum(map(len, process.argv)) + uses)
    if characters > _CHARACTERS_MOST:
        problem = f"make commands of {characters} characters together, {_CHARACTERS_MOST} at the most"
        raise _refuse("array.parameters", problem, "split it into several sweeps, or pass long values by a file")


def _check_commands(event: ArraySubmitted) -> None:
    """Checks the command and the variables of each element that has its own; raises InvalidArgument, which names them."""
    if event.spec.process is None:
        return
    others = sum(len(name) + len(text) for name, text in event.spec.process.environment.items()) + _OWN_CHARACTERS
    for position, element in enumerate(event.elements):
        texts = (*element.argv, *element.variables.values())
        if not texts:
            continue
        # Names and letters are those of valid texts: only sizes, and that there is a program, are left to check.
        lengths = [len(text) for text in texts]
        is_right = (not element.argv or lengths[0]) and max(lengths) <= ARGUMENT_CHARACTERS_MOST
        if is_right and others + sum(lengths) + sum(map(len, element.variables)) <= COMMAND_CHARACTERS_MOST:
            continue
        (workload,) = list_submitted(replace(event, elements=event.elements[position : position + 1]))
        broken = tuple(found.under("spec.process") for found in list_violations(workload.spec.process))
        if broken:
            raise InvalidArgument(f"the command of element {element.index} is refused, and so is the array", broken)


def _refuse(field: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(_REFUSED, (Violation(field, problem, remedy),))
