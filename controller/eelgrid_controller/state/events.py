"""Events: what happened, as the journal keeps it; the only way in which the state changes.

Owns the closed union of events and their plain form (kind and body). An event holds an outcome, never a
question: `WorkloadPlaced` says where a workload went, so that replay plans nothing again and a newer planner
moves nothing. Must not know who reacts to an event.

    WorkloadSubmitted -> WorkloadPlaced | WorkloadDeferred -> WorkloadPlaced
        -> (WorkloadMoved | WorkloadScaled | WorkloadLimited | DevicesCorrected)* -> WorkloadCancelled
    WorkloadSubmitted -> WorkloadDeferred -> PartitionsPlanned* -> WorkloadCancelled, of services in MIG slices
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.journal import JournalSanitizer, decode_explanation, encode_explanation
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    POINTS_A_CALL_MOST,
    SPENDING_LIMITS_MOST,
    UNKNOWN_WORKLOADS_MOST,
    GpuLayout,
    Inventory,
    MeasuredPoint,
    Placement,
    Policy,
    ReplicaExplanation,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import Count, Identifier, Label, Many, Name, Nanoseconds, Sentence, Uint64, Watts
from eelgrid_protos.schema import is_valid_message, list_violations

# Replicas of one workload ask for the same, so the first few tell the story; ten thousand would fill the journal.
EXPLAINED_REPLICAS_MOST = 16

# Nodes that are removed in one step: the planner's arrays are made anew once for all of them.
REMOVED_MOST = 1000


class UnreadableEvent(Exception):
    """An event that could not be read back from the journal, or shown: it must not happen."""


class UnknownKind(Exception):
    """A newer version wrote an event that this one does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node appeared, came back or changed; the inventory is what it has now, and says which GPUs are lost.

    `plan_epoch` is the epoch that its agent holds: plans go on above it, also
    when this journal began after the agent's last plan.
    """

    time_ns: Nanoseconds
    inventory: Inventory
    plan_epoch: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAhead:
    """A node's agent holds a plan that was never in this journal: entries that came after it are lost.

    `assignments` counts what it holds by that plan and the journal does not know, None where the agent cannot say.
    """

    time_ns: Nanoseconds
    node_name: Name
    plan_epoch: Uint64
    assignments: Count | None = None
    workload_ids: Annotated[tuple[Identifier, ...], Many(UNKNOWN_WORKLOADS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReconciled:
    """What a node held beyond the journal is known by now, or given up; plans go on above the epoch that it showed."""

    time_ns: Nanoseconds
    node_name: Name
    plan_epoch: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeard:
    """The agent of a node spoke for the first time since the controller began, and holds nothing that is not known."""

    time_ns: Nanoseconds
    node_name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller began over this journal: until agents speak nobody knows what their nodes hold."""

    time_ns: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRolledBack:
    """An operator accepted that acknowledged entries are gone; `last` is None where nobody could tell how many."""

    time_ns: Nanoseconds
    first: Uint64
    last: Uint64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node fell silent; its work may well run on."""

    time_ns: Nanoseconds
    node_name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRemoved:
    """Nodes that hold nothing are forgotten; several at once, since what is derived of all nodes is made anew."""

    time_ns: Nanoseconds
    node_names: Annotated[tuple[Name, ...], Many(REMOVED_MOST)]
    reason: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOccupied:
    """What others hold on a node, in the stead of what was told before."""

    time_ns: Nanoseconds
    node_name: Name
    others: ExternalUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A device answers nothing any more."""

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuid: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReturned:
    """A lost device answers again."""

    time_ns: Nanoseconds
    node_name: Name
    gpu_uuid: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSubmitted:
    """A workload was accepted; `owner` is the user of the certificate that submitted it, where there was one."""

    time_ns: Nanoseconds
    workload_id: Identifier
    spec: WorkloadSpec
    owner: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDeferred:
    """No room now; the reason begins with the constraint that stands in the way."""

    time_ns: Nanoseconds
    workload_id: Identifier
    reason: Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPlaced:
    """Every replica has its place; the explanation is of the first replicas."""

    time_ns: Nanoseconds
    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMoved:
    """Replicas of placed work have new places, all at once; the others stand where they stood.

    One event from the old places to the new: there is no moment between in which
    a replica has none or two, wherever the journal ends.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadScaled:
    """A placed workload has other replicas than before: some are gone, some are new, all at once."""

    time_ns: Nanoseconds
    workload_id: Identifier
    released: Annotated[tuple[Count, ...], Many(10_000)] = ()
    placements: Annotated[tuple[Placement, ...], Many(10_000)] = ()
    explanation: Annotated[tuple[ReplicaExplanation, ...], Many(EXPLAINED_REPLICAS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadLimited:
    """Each GPU of a workload is asked to keep this limit; None for its default."""

    time_ns: Nanoseconds
    workload_id: Identifier
    power_limit_w: Watts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsMeasured:
    """Points of workloads in configurations; each replaces what was known of its configuration."""

    time_ns: Nanoseconds
    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """The whole layout that is wanted of one GPU."""

    node_name: Name
    layout: GpuLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedService:
    """Every place of a service, in the stead of those before."""

    workload_id: Identifier
    placements: Annotated[tuple[Placement, ...], Many(10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsPlanned:
    """GPUs are wanted in other layouts, and services sit in other slices, all at once.

    A layout that is wanted already may stand here again: its agent is then asked anew.
    """

    time_ns: Nanoseconds
    layouts: Annotated[tuple[PlannedLayout, ...], Many(1_000_000)] = ()
    services: Annotated[tuple[SlicedService, ...], Many(100_000)] = ()

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """The services that it is about."""
        return tuple(service.workload_id for service in self.services)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedReplica:
    """Where a replica is, in the stead of what was planned."""

    workload_id: Identifier
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesCorrected:
    """Replicas hold other GPUs of their node than was planned, as the engine there says; all at once, so that two may swap."""

    time_ns: Nanoseconds
    node_name: Name
    replicas: Annotated[tuple[CorrectedReplica, ...], Many(4096)]

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """The workloads that it is about, each once."""
        return tuple(dict.fromkeys(one.workload_id for one in self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCancelled:
    """A workload ended at its owner's wish and holds nothing any more."""

    time_ns: Nanoseconds
    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """The policy as it was accepted, with its new revision."""

    time_ns: Nanoseconds
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesQuoted:
    """What the classes of the mix cost elsewhere, from now on until the next quotes."""

    time_ns: Nanoseconds
    offers_w: Annotated[tuple[Uint64, ...], Many(64)]
    scarce_models: Annotated[tuple[Label, ...], Many(64)]
    load_permille: Uint64

    @property
    def quotes(self) -> OpportunityPrices:
        """The quotes themselves."""
        return OpportunityPrices(
            offers_w=self.offers_w, scarce_models=self.scarce_models, load_permille=self.load_permille
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingJudged:
    """These spending limits are spent, and no others, until the next judgement or another policy."""

    time_ns: Nanoseconds
    over: Annotated[tuple[OverspentLimit, ...], Many(SPENDING_LIMITS_MOST)] = ()


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
)

# The journal's names; a name is never given another meaning.
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
}
_WITH_PLACES = (WorkloadPlaced, WorkloadMoved, WorkloadScaled)
_WITH_WORDS = (WorkloadSubmitted, PolicyChanged, PointsMeasured)
_NAMES: Mapping[type[Event], str] = {cls: name for name, cls in _KINDS.items()}


def event_to_plain(event: Event) -> tuple[str, dict[str, Any]]:
    """The kind and the body, whole: a default left out would change its meaning with the default."""
    body = _placed_to_plain(event) if isinstance(event, _WITH_PLACES) else to_plain(event)
    if isinstance(event, WorkloadSubmitted) and not event.owner:
        # As before there were owners, so that versions of then read it; no owner will always mean none.
        del body["owner"]
    return _NAMES[type(event)], body


def _placed_to_plain(event: WorkloadPlaced | WorkloadMoved | WorkloadScaled) -> dict[str, Any]:
    released = {"released": list(event.released)} if isinstance(event, WorkloadScaled) else {}
    return {
        "time_ns": event.time_ns,
        "workload_id": event.workload_id,
        "placements": [to_plain(placement) for placement in event.placements],
        "explanation": encode_explanation(event.explanation),
        **released,
    }


def check_readable(event: Event) -> None:
    """Raises UnreadableEvent for one that breaks the rules that entries and answers are read by.

    What obeys the rules comes back from the journal as it was (a property of the tests). Events with words of people
    are written and read besides: 0.1 ms, where all kinds would be a third of a decision's time.
    """
    if not is_valid_message(event):
        found = "; ".join(map(str, itertools.islice(list_violations(event), 3)))
        raise UnreadableEvent(f"{_NAMES[type(event)]}: {found}")
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
    """The event; raises UnknownKind, or InvalidMessage or ValueError for a body that is none.

    The journal wrote the body itself and guards it by a checksum, so that what lies outside of
    today's rules was let in by an older version: it is healed. Contradictions are `ClusterState.apply`'s.
    """
    cls = _KINDS.get(kind)
    if cls is None:
        raise UnknownKind(kind)
    healer = healer or JournalSanitizer()
    event = _event(cls, body)
    if isinstance(event, NodeJoined):
        epoch = healer.epoch(event.inventory.node_name, event.plan_epoch)
        event = event if epoch == event.plan_epoch else replace(event, plan_epoch=epoch)
    return healer.message(event)


def _event(cls: type[Event], body: Mapping[str, Any]) -> Event:
    if cls in _WITH_PLACES:
        rows = body.get("explanation", [])
        placed = from_plain(cls, {**body, "explanation": []}, trusted=True)
        return replace(placed, explanation=decode_explanation(rows))
    event: Event = from_plain(cls, body, trusted=True)
    return event
