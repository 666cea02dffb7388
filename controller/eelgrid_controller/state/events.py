"""Events: the outcomes that the journal stores, and the only way to change the cluster state.

Owns the closed union of events and their plain form (kind and body). An event holds an outcome, never a request:
`WorkloadPlaced` says where a workload went, so that a replay repeats no planning and a newer planner moves nothing.
Must not know who reacts to an event.

    WorkloadSubmitted -> WorkloadPlaced | WorkloadDeferred -> WorkloadPlaced
    -> (WorkloadMoved | WorkloadScaled | WorkloadLimited | DevicesCorrected)* -> WorkloadCancelled
    WorkloadPlaced -> WorkloadEvicted -> WorkloadDeferred | WorkloadPlaced
    WorkloadDeferred -> WorkloadHeld -> WorkloadReleased -> WorkloadPlaced
    AttemptEnded -> WorkloadRetried -> WorkloadDeferred | WorkloadPlaced
    WorkloadDeferred -> (WorkloadPromised | DeadlineBroken)* -> WorkloadPlaced -> DeadlineBroken
    WorkloadSubmitted -> WorkloadShareChanged* -> WorkloadPlaced -> (WorkloadShareChanged | WorkloadScaled)*, of elastic jobs
    WorkloadDeferred -> PreemptionStarted -> WorkloadPlaced | WorkloadDeferred | WorkloadCancelled
    ArraySubmitted -> WorkloadPlaced | WorkloadDeferred -> WorkloadPlaced, of each element
    WorkloadSubmitted -> WorkloadDeferred -> PartitionsPlanned* -> WorkloadCancelled, of services in MIG slices
    WorkloadPlaced -> (AttemptStarted | WorkloadStopping | AttemptEnded)* -> WorkloadCompleted, of processes and of jobs of engines
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.journal import (
    JournalSanitizer,
    decode_explanation,
    encode_explanation,
    omit_defaults,
)
from eelgrid_controller.state.measurement_events import (
    PointsMeasured,
    RuntimeExpected,
    StartsMeasured,
    WorkloadShareChanged,
)
from eelgrid_controller.state.pending_queue import BarredQueue, HeldQueue
from eelgrid_controller.state.policy import policy_to_plain
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_controller.state.takeover_events import (
    ControllerStarted,
    JournalRolledBack,
    NodeAhead,
    NodeHeard,
    NodeReconciled,
    PlansWithdrawn,
    StartsResumed,
)
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    ARRAY_ELEMENTS_MOST,
    GPUS_PER_NODE_MOST,
    PARAMETERS_MOST,
    QUEUES_MOST,
    SPENDING_LIMITS_MOST,
    AttemptStatus,
    ElasticShare,
    GpuLayout,
    Inventory,
    Placement,
    Policy,
    ReplicaExplanation,
    StartPromise,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.messages.job_array import ArrayIndex
from eelgrid_protos.messages.plan import ARGUMENTS_MOST, Argument, VariableName
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import (
    Count,
    Identifier,
    Label,
    Many,
    Name,
    Nanoseconds,
    RequiredLabel,
    Sentence,
    Uint64,
    Watts,
)
from eelgrid_protos.schema import is_valid_message, list_violations

# Replicas of one workload have equal requests, so the first few explain all; ten thousand would fill the journal.
EXPLAINED_REPLICAS_MOST = 16

# Victims of one preemption.
PREEMPTED_MOST = 4096

# Promised starts that move in one step.
MOVED_STARTS_MOST = 128

# Nodes removed in one step: the planner's arrays are rebuilt once for all of them.
REMOVED_MOST = 1000


class UnreadableEvent(Exception):
    """An event cannot be read back from the journal or shown; the core refuses to create one."""


class UnknownKind(Exception):
    """The event's kind is unknown: a newer version wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node joined, returned or changed; the inventory is its current one and says which GPUs are lost.

    `plan_epoch` is the epoch of the plan that its agent holds: later plans have higher epochs, even if this journal
    began after the agent's last plan. A new one `is_doubted` until its agent has answered Welcome.
    """

    time_ns: Nanoseconds
    inventory: Inventory
    plan_epoch: Uint64 = 0
    is_doubted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node was lost: its agent is silent, but its work may still run."""

    time_ns: Nanoseconds
    node_name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRemoved:
    """Nodes that hold nothing were removed; several at once, since each removal rebuilds the planner's arrays."""

    time_ns: Nanoseconds
    node_names: Annotated[tuple[Name, ...], Many(REMOVED_MOST)]
    reason: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOccupied:
    """A node's external usage; it replaces the previous report."""

    time_ns: Nanoseconds
    node_name: Name
    others: ExternalUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A device stopped responding."""

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuid: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReturned:
    """A lost device responds again."""

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuid: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCordoned:
    """A node, or some of its GPUs, was closed to new work by an operator or in quarantine; replaces what was said of them.

    With `drain`, the controller empties them; without, a drain that was under way ends.
    """

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(GPUS_PER_NODE_MOST)] = ()
    reason: Label = ""
    user: Label = ""
    drain: DrainTerms | None = None
    is_quarantine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUncordoned:
    """An operator opened a node, or some of its GPUs, to new work again; the other cordons of the node stay."""

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(GPUS_PER_NODE_MOST)] = ()
    user: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSubmitted:
    """A workload was accepted; `owner` is the user of the submitter's certificate, empty without one."""

    time_ns: Nanoseconds
    workload_id: Identifier
    spec: WorkloadSpec
    owner: Label = ""
    # Of an elastic job with a promised deadline; the spec has the replicas and the model of its admission.
    share: ElasticShare | None = None


def make_element_id(array_id: str, index: int) -> str:
    """Returns the workload id of an element of an array: w-7_0."""
    return f"{array_id}_{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedElement:
    """What an element of an array has of its own; without a command, that of the array, and its variables beside the index."""

    index: ArrayIndex
    argv: Annotated[tuple[Argument, ...], Many(ARGUMENTS_MOST)] = ()
    variables: Annotated[Mapping[VariableName, Argument], Many(PARAMETERS_MOST + 3)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySubmitted:
    """An array of workloads was accepted; all begin to wait with this reason, held by this user if any.

    `spec` is what they have in common. At most `running_most` of them hold resources at once, 0 for any number.
    """

    time_ns: Nanoseconds
    array_id: Identifier
    spec: WorkloadSpec
    elements: Annotated[tuple[SubmittedElement, ...], Many(ARRAY_ELEMENTS_MOST)]
    reason: Sentence
    running_most: ArrayIndex = 0
    owner: Label = ""
    held_by: Label = ""

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """Ids of the elements."""
        return tuple(make_element_id(self.array_id, element.index) for element in self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDeferred:
    """A workload cannot be placed yet; the reason begins with the name of the failing constraint."""

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPlaced:
    """Every replica was placed; the explanation covers the first replicas."""

    time_ns: Nanoseconds
    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()
    # Of each of its GPUs, in force before its processes start; None where budgets hold their default limits.
    power_limit_w: Watts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMoved:
    """Replicas of placed work moved to new places, all at once; the other replicas stay.

    A single event covers old and new places, so that every replica has exactly one place wherever the journal ends.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadScaled:
    """The replicas of a placed workload changed: some were removed, some added, all at once."""

    time_ns: Nanoseconds
    workload_id: Identifier
    released: Annotated[tuple[Count, ...], Many(10_000)] = ()
    placements: Annotated[tuple[Placement, ...], Many(10_000)] = ()
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()
    # Of an elastic job with a promised deadline: as of this time, before it goes on with the new replicas.
    share: ElasticShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadLimited:
    """Sets the power limit of each GPU of a workload; None for the default."""

    time_ns: Nanoseconds
    workload_id: Identifier
    power_limit_w: Watts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """The complete desired layout of one GPU."""

    node_name: Name
    layout: GpuLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedService:
    """All places of a service; they replace the previous ones."""

    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsPlanned:
    """GPUs get other desired layouts, and services move to other slices, all at once.

    A layout that is desired already may be repeated: its agent then tries it again.
    """

    time_ns: Nanoseconds
    layouts: Annotated[tuple[PlannedLayout, ...], Many(1_000_000)] = ()
    services: Annotated[tuple[SlicedService, ...], Many(100_000)] = ()

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """Ids of the services that the event changes."""
        return tuple(service.workload_id for service in self.services)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedReplica:
    """The actual place of a replica; it replaces the planned one."""

    workload_id: Identifier
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesCorrected:
    """Replicas hold other GPUs of their node than planned, as the engine reports; all at once, so that two may swap."""

    time_ns: Nanoseconds
    node_name: Name
    replicas: Annotated[tuple[CorrectedReplica, ...], Many(4096)]

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """Ids of the workloads that the event changes, each once."""
        return tuple(dict.fromkeys(one.workload_id for one in self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCancelled:
    """A workload was cancelled and holds nothing any more; by its owner, or else for this reason."""

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadEvicted:
    """A placed workload gave up all its places and waits in the queue again, in the order of its submission.

    It waits with the number of replicas and the power limit with which it was submitted.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence
    # The workload that it made room for; empty if it was not preempted.
    preempted_for: Label = ""
    # Its processes ended since their node failed.
    is_node_fault: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionStarted:
    """A workload is to go to these places once its victims hold nothing; processes of them must end.

    Of a running service they are those of more replicas. It ends when the workload is placed, deferred, scaled or cancelled,
    or a node or GPU of it is lost.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]
    victims: Annotated[tuple[Identifier, ...], Many(PREEMPTED_MOST)]
    # Of the victims, and of the workload that waits for them.
    reason: Sentence
    waits: Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRefused:
    """A victim runs on: its engine could not stop it, or nobody waits for its place any more."""

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadQueueChanged:
    """A pending workload was moved to another queue; it keeps its place in the order of submissions."""

    time_ns: Nanoseconds
    workload_id: Identifier
    queue: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadHeld:
    """A pending workload must not start until it is released; it keeps its place in the order of submissions."""

    time_ns: Nanoseconds
    workload_id: Identifier
    user: RequiredLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReleased:
    """A held workload may start again."""

    time_ns: Nanoseconds
    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRetried:
    """An attempt of a placed workload failed; it gave up all its places and waits for the next attempt.

    It does not start before `not_before_ns`, and keeps its place in the order of submissions.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence
    not_before_ns: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPromised:
    """A pending workload was promised a start, or, with `promise` None, is promised none any more."""

    time_ns: Nanoseconds
    workload_id: Identifier
    promise: StartPromise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedStart:
    """What a pending workload is promised instead of what it was promised before."""

    workload_id: Identifier
    promise: StartPromise


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisesMoved:
    """Promised starts moved all at once to make room for another deadline; each still ends by its own."""

    time_ns: Nanoseconds
    starts: Annotated[tuple[MovedStart, ...], Many(MOVED_STARTS_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineBroken:
    """A live workload will not have ended by its promised deadline, or has not; told once, with the cause."""

    time_ns: Nanoseconds
    workload_id: Identifier
    cause: Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStopping:
    """The processes of a placed workload must end; it holds its devices until the end of each was reported."""

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence
    # It returns to the queue then, instead of ending; and who holds it there, if anybody does.
    requeues: bool = False
    held_by: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """An agent started the process of a replica, or an engine a job."""

    time_ns: Nanoseconds
    workload_id: Identifier
    status: AttemptStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """The process of a replica and everything that it started is gone."""

    time_ns: Nanoseconds
    workload_id: Identifier
    status: AttemptStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredAttempt:
    """One process of an attempt whose start the journal has lost: where it ran, and how it ended."""

    node_name: Name
    status: AttemptStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCompleted:
    """All processes of a workload have ended, and it holds nothing any more; `phase` says with what result.

    One that waits, since the journal has lost its start, has ended by the attempts that are `recovered`.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    phase: WorkloadPhase
    reason: Sentence = ""
    recovered: Annotated[tuple[RecoveredAttempt, ...], Many(10_000)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """A policy was accepted; it has its new revision."""

    time_ns: Nanoseconds
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesQuoted:
    """New opportunity prices of the classes of the mix, valid until the next quotes."""

    time_ns: Nanoseconds
    offers_w: Annotated[tuple[Uint64, ...], Many(64)]
    scarce_models: Annotated[tuple[Label, ...], Many(64)]
    load_permille: Uint64
    turnover_permille: Uint64 = 0
    stockout_permille: Annotated[tuple[Uint64, ...], Many(64)] = ()

    @property
    def quotes(self) -> OpportunityPrices:
        """The quotes as the planners' value."""
        return OpportunityPrices(
            offers_w=self.offers_w,
            scarce_models=self.scarce_models,
            load_permille=self.load_permille,
            turnover_permille=self.turnover_permille,
            stockout_permille=self.stockout_permille,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingJudged:
    """These spending limits are overspent, and no others, until the next judgement or policy change."""

    time_ns: Nanoseconds
    over: Annotated[tuple[OverspentLimit, ...], Many(SPENDING_LIMITS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityHoldsChanged:
    """Capacity is held for these queues, and may not be for those, as of the end of a round."""

    time_ns: Nanoseconds
    held: Annotated[tuple[HeldQueue, ...], Many(QUEUES_MOST)] = ()
    barred: Annotated[tuple[BarredQueue, ...], Many(QUEUES_MOST)] = ()


Event = (
    NodeJoined
    | NodeLost
    | NodesRemoved
    | NodeOccupied
    | GpuLost
    | GpuReturned
    | WorkloadSubmitted
    | WorkloadDeferred
    | WorkloadPlaced
    | WorkloadCancelled
    | PolicyChanged
    | PricesQuoted
    | WorkloadMoved
    | WorkloadScaled
    | WorkloadLimited
    | PointsMeasured
    | PartitionsPlanned
    | DevicesCorrected
    | SpendingJudged
    | NodeAhead
    | NodeReconciled
    | NodeHeard
    | ControllerStarted
    | JournalRolledBack
    | PlansWithdrawn
    | StartsResumed
    | NodeCordoned
    | NodeUncordoned
    | WorkloadEvicted
    | WorkloadQueueChanged
    | WorkloadStopping
    | AttemptStarted
    | AttemptEnded
    | WorkloadCompleted
    | WorkloadPromised
    | PreemptionStarted
    | PreemptionRefused
    | WorkloadHeld
    | WorkloadReleased
    | WorkloadRetried
    | ArraySubmitted
    | DeadlineBroken
    | WorkloadShareChanged
    | PromisesMoved
    | RuntimeExpected
    | StartsMeasured
    | CapacityHoldsChanged
)

# Kinds in the journal; a kind is never reused with another meaning.
_KINDS: Mapping[str, type[Event]] = {
    "node_joined": NodeJoined,
    "node_lost": NodeLost,
    "nodes_removed": NodesRemoved,
    "node_occupied": NodeOccupied,
    "gpu_lost": GpuLost,
    "gpu_returned": GpuReturned,
    "workload_submitted": WorkloadSubmitted,
    "workload_deferred": WorkloadDeferred,
    "workload_placed": WorkloadPlaced,
    "workload_cancelled": WorkloadCancelled,
    "policy_changed": PolicyChanged,
    "prices_quoted": PricesQuoted,
    "workload_moved": WorkloadMoved,
    "workload_scaled": WorkloadScaled,
    "workload_limited": WorkloadLimited,
    "points_measured": PointsMeasured,
    "partitions_planned": PartitionsPlanned,
    "devices_corrected": DevicesCorrected,
    "spending_judged": SpendingJudged,
    "node_ahead": NodeAhead,
    "node_reconciled": NodeReconciled,
    "node_heard": NodeHeard,
    "controller_started": ControllerStarted,
    "journal_rolled_back": JournalRolledBack,
    "plans_withdrawn": PlansWithdrawn,
    "starts_resumed": StartsResumed,
    "node_cordoned": NodeCordoned,
    "node_uncordoned": NodeUncordoned,
    "workload_evicted": WorkloadEvicted,
    "workload_queue_changed": WorkloadQueueChanged,
    "workload_stopping": WorkloadStopping,
    "attempt_started": AttemptStarted,
    "attempt_ended": AttemptEnded,
    "workload_completed": WorkloadCompleted,
    "workload_promised": WorkloadPromised,
    "workload_preemption_started": PreemptionStarted,
    "workload_preemption_refused": PreemptionRefused,
    "workload_held": WorkloadHeld,
    "workload_released": WorkloadReleased,
    "workload_retried": WorkloadRetried,
    "workload_array_submitted": ArraySubmitted,
    "deadline_broken": DeadlineBroken,
    "workload_share_changed": WorkloadShareChanged,
    "promises_moved": PromisesMoved,
    "runtime_expected": RuntimeExpected,
    "starts_measured": StartsMeasured,
    "capacity_holds_changed": CapacityHoldsChanged,
}
_WITH_PLACES = (WorkloadPlaced, WorkloadMoved, WorkloadScaled)
_WITH_WORDS = (
    *(WorkloadSubmitted, ArraySubmitted, PolicyChanged, PointsMeasured),
    *(NodeCordoned, AttemptEnded, WorkloadCompleted, WorkloadRetried),
)
_NAMES: Mapping[type[Event], str] = {cls: name for name, cls in _KINDS.items()}


def event_to_plain(event: Event) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the complete body, defaults included: a later version may have others."""
    body = _placed_to_plain(event) if isinstance(event, _WITH_PLACES) else to_plain(event)
    # What is absent is left out, as in the formats without it, which older versions read.
    match event:
        case NodeJoined():
            omit_defaults(body, event, ("is_doubted",))
        case PricesQuoted():
            omit_defaults(body, event, ("turnover_permille", "stockout_permille"))
        case NodeCordoned():
            omit_defaults(body, event, ("is_quarantine",))
        case ControllerStarted():
            omit_defaults(body, event, ("timeline", "withholds_starts"))
        case WorkloadSubmitted():
            omit_defaults(body, event, ("owner", "share"))
            omit_defaults(body["spec"], event.spec, ("never_preempts", "priority_class", "evicted_by_engine"))
            if event.spec.process is not None:
                omit_defaults(body["spec"]["process"], event.spec.process, _NEWER_OF_PROCESSES)
            if event.spec.service is not None:
                omit_defaults(body["spec"]["service"], event.spec.service, ("load_target",))
            if event.spec.schedule is not None:
                omit_defaults(body["spec"]["schedule"], event.spec.schedule, ("no_requeue",))
            for one in body["spec"].get("schedule", {}).get("after", ()):
                if not one["each"]:
                    del one["each"]
        case WorkloadEvicted():
            omit_defaults(body, event, ("preempted_for", "is_node_fault"))
        case WorkloadStopping():
            omit_defaults(body, event, ("requeues", "held_by"))
        case AttemptStarted() | AttemptEnded():
            _omit_of_status(body["status"], event.status)
        case WorkloadCompleted():
            omit_defaults(body, event, ("recovered",))
            for row, one in zip(body.get("recovered", ()), event.recovered, strict=False):
                _omit_of_status(row["status"], one.status)
        case WorkloadCancelled() if not event.reason:
            del body["reason"]
        case WorkloadPromised() if event.promise is not None:
            omit_defaults(body["promise"], event.promise, ("placements", "assumes"))
        case SpendingJudged():
            for row, over in zip(body["over"], event.over, strict=True):
                omit_defaults(row["limit"], over.limit, ("stops",))
        case PolicyChanged():
            body["policy"] = policy_to_plain(event.policy)
    return _NAMES[type(event)], body


def _omit_of_status(body: dict[str, Any], status: AttemptStatus) -> None:
    for name in ("progress", "process_digest"):
        body.pop(name, None)
    omit_defaults(body, status, ("checkpointed_ns", "checkpoint_s", "gpu_held", "node_fault"))


_NEWER_OF_PROCESSES = ("standard_input", "warn_signal", "warn_before_s", "element_variables")  # written where used


def _placed_to_plain(event: WorkloadPlaced | WorkloadMoved | WorkloadScaled) -> dict[str, Any]:
    more: dict[str, Any] = {"released": list(event.released)} if isinstance(event, WorkloadScaled) else {}
    if isinstance(event, WorkloadScaled) and event.share is not None:
        more["share"] = to_plain(event.share)
    if isinstance(event, WorkloadPlaced) and event.power_limit_w is not None:
        more["power_limit_w"] = event.power_limit_w
    return {
        "time_ns": event.time_ns,
        "workload_id": event.workload_id,
        "placements": [to_plain(placement) for placement in event.placements],
        "explanation": encode_explanation(event.explanation),
        **more,
    }


def check_readable(event: Event) -> None:
    """Raises UnreadableEvent for an event that breaks the rules by which entries and answers are read.

    An event that obeys them is read back unchanged (a property of the tests). Only events with user-supplied text are
    written and read here for the check: 0.1 ms each; checking all kinds would take a third of a decision's time.
    """
    if not is_valid_message(event):
        found = "; ".join(map(str, itertools.islice(list_violations(event), 3)))
        raise UnreadableEvent(f"{_NAMES[type(event)]}: {found}")
    if isinstance(event, ArraySubmitted):
        # All elements are texts, which the check above knows.
        event = replace(event, elements=event.elements[:1])
    if isinstance(event, _WITH_WORDS):
        kind, body = event_to_plain(event)
        try:
            text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
            again = event_from_plain(kind, json.loads(text))
        except (ContractError, ValueError) as error:
            raise UnreadableEvent(f"{kind}: {error}") from error
        if again != event:
            raise UnreadableEvent(f"{kind}: comes back as another")


def event_from_plain(kind: str, body: Mapping[str, Any], healer: JournalSanitizer | None = None) -> Event:
    """Reads an event; raises UnknownKind, and InvalidMessage or ValueError for an invalid body.

    The journal wrote the body itself and protects it by a checksum, so a value outside of today's rules was accepted
    by an older version: `healer` brings it inside the rules. Contradictions with the state are checked by
    `ClusterState.apply`.
    """
    cls = _KINDS.get(kind)
    if cls is None:
        raise UnknownKind(kind)
    healer = healer or JournalSanitizer()
    event: Event
    if cls in _WITH_PLACES:
        event = from_plain(cls, {**body, "explanation": []}, trusted=True)
        event = replace(event, explanation=decode_explanation(body.get("explanation", [])))
    else:
        event = from_plain(cls, body, trusted=True)
    if isinstance(event, NodeJoined):
        epoch = healer.epoch(event.inventory.node_name, event.plan_epoch)
        event = event if epoch == event.plan_epoch else replace(event, plan_epoch=epoch)
    return healer.message(event)
