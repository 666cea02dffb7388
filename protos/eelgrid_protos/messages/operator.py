"""Requests and responses of the operators' API (operator_service.proto), the caller's identity and audit entries."""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.explanation import Explanation
from eelgrid_protos.messages.gpu import Gpu
from eelgrid_protos.messages.job_array import JobArrayRequest
from eelgrid_protos.messages.node import InputBytes, Inventory, LogText, OutputBytes
from eelgrid_protos.messages.plan import NodePlan, PlanApplied, TerminalSize
from eelgrid_protos.messages.policy import MeasuredInterference, Policy
from eelgrid_protos.messages.queue import QueueStatus
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.messages.workload import Workload, WorkloadPhase, WorkloadSpec
from eelgrid_protos.messages.workload_summary import WorkloadSummary, WorkloadView, summarize_workload
from eelgrid_protos.quantities import (
    Bytes,
    Celsius,
    ClusterWatts,
    Count,
    GpuMilli,
    Identifier,
    Joules,
    Label,
    Many,
    Milli,
    Name,
    Nanoseconds,
    OpenEnum,
    OptionalIdentifier,
    PageToken,
    Range,
    Ratio,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
    Watts,
)
from eelgrid_protos.values import dataclass

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MOST = 1000
# A summary of a workload takes some 150 bytes, and each page of a listing costs the controller a walk over all of it.
SUMMARY_PAGE_SIZE_MOST = 10_000
# Of a node that holds more than the journal knows: enough to see whose work it is, within a page of a thousand nodes.
UNKNOWN_WORKLOADS_MOST = 16
# Of one node: its own, and those of its GPUs.
CORDONS_MOST = 1 + GPUS_PER_NODE_MOST
# What takes longer than a month to end is not waited for.
DRAIN_GRACE_S_MOST = 2_678_400.0


class NodeState(OpenEnum):
    """The controller's view of a node."""

    UNSPECIFIED = 0
    READY = 1
    LOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonStatus:
    """An operator's cordon of a node, or of one GPU of it, and how far its drain is."""

    gpu_uuid: OptionalIdentifier = ""
    reason: Label = ""
    user: Label = ""
    since_ns: Nanoseconds = 0
    workloads: Count = 0
    draining: bool = False
    # When what is still there returns to the queue; 0 if the drain waits for it to end.
    deadline_ns: Nanoseconds = 0
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An inventory with its allocations."""

    inventory: Inventory
    state: NodeState
    allocated_cpu_milli: Uint32 = 0
    allocated_memory_bytes: Bytes = 0
    allocated_gpu_milli: Uint32 = 0
    workloads: Count = 0
    power_w: Watts | None = None
    sample_age_s: Seconds | None = None
    plan_epoch: Uint64 = 0
    applied_epoch: Uint64 = 0
    samples_received: Uint64 = 0
    samples_lost: Uint64 = 0
    ahead_epoch: Uint64 | None = None
    unknown_workload_ids: Annotated[tuple[Identifier, ...], Many(UNKNOWN_WORKLOADS_MOST)] = ()
    # That of the node, then those of its GPUs.
    cordons: Annotated[tuple[CordonStatus, ...], Many(CORDONS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """A workload that holds a device or a part of it."""

    workload_id: Identifier
    name: Label = ""
    user: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """One device with its allocations and newest readings."""

    node_name: Name
    gpu: Gpu
    node_state: NodeState
    allocated_milli: GpuMilli = 0
    workload_ids: Annotated[tuple[Identifier, ...], Many(4096)] = ()
    power_w: Watts | None = None
    energy_j: Joules | None = None
    utilization_ratio: Ratio | None = None
    memory_used_bytes: Bytes | None = None
    temperature_c: Celsius | None = None
    sample_age_s: Seconds | None = None
    # What holds it, in the order of workload_ids.
    holders: Annotated[tuple[GpuHolder, ...], Many(4096)] = ()
    # Those that apply to it: of its node, and its own.
    cordons: Annotated[tuple[CordonStatus, ...], Many(2)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonCount:
    """How many workloads are pending for one reason."""

    reason: Sentence
    workloads: Uint32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The GPUs of one model."""

    model: Name
    gpus: Uint32
    allocated_gpu_milli: Milli
    measured_power_w: ClusterWatts


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals of the cluster."""

    time_ns: Nanoseconds
    nodes_ready: Uint32 = 0
    nodes_lost: Uint32 = 0
    gpus: Uint32 = 0
    allocated_gpu_milli: Milli = 0
    cpu_milli: Milli = 0
    allocated_cpu_milli: Milli = 0
    pending: Uint32 = 0
    placed: Uint32 = 0
    cancelled: Uint32 = 0
    refused: Uint64 = 0
    pending_reasons: Annotated[tuple[ReasonCount, ...], Many(64)] = ()
    modelled_power_w: ClusterWatts = 0.0
    measured_power_w: ClusterWatts = 0.0
    measured_gpus: Uint32 = 0
    samples_received: Uint64 = 0
    samples_lost: Uint64 = 0
    decision_p50_s: Seconds = 0.0
    decision_p99_s: Seconds = 0.0
    decisions: Uint64 = 0
    models: Annotated[tuple[ModelSummary, ...], Many(1000)] = ()
    revision: Uint64 = 0
    # GPUs of nodes that are ready which respond no more.
    gpus_lost: Uint32 = 0
    # When the workload was submitted that has waited longest; 0 if none waits.
    oldest_pending_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """A plan and how far its node has applied it."""

    plan: NodePlan
    applied: PlanApplied | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSummaryRequest:
    """Asks for the totals of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSummaryResponse:
    """The totals of the cluster."""

    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSummaryRequest:
    """Asks for a summary now and after each interval; 0 means one second."""

    interval_s: Annotated[float, Range(0.0, 3600.0, "s")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSummaryResponse:
    """One summary of a watch."""

    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNodesRequest:
    """Asks for a page of nodes by name; a page size of 0 means 100, more than 1000 means 1000."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    states: Annotated[tuple[NodeState, ...], Many(8)] = ()
    pool: Label = ""
    gpu_model: Label = ""
    name_contains: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNodesResponse:
    """A page of nodes."""

    nodes: Annotated[tuple[Node, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileNodeRequest:
    """Releases the assignments that a node holds beyond the journal."""

    node_name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileNodeResponse:
    """The node after the change."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class ListGpusRequest:
    """Asks for a page of devices by node and index."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    node_name: Label = ""
    gpu_model: Label = ""
    min_free_milli: GpuMilli = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListGpusResponse:
    """A page of devices."""

    gpus: Annotated[tuple[GpuStatus, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitWorkloadRequest:
    """A workload to place; repeating the call with the same id has no effect."""

    spec: WorkloadSpec
    workload_id: OptionalIdentifier = ""
    dry_run: bool = False
    # Accept it held: it starts no earlier than it is released.
    hold: bool = False
    # An array of such workloads, all or none; the id is then the array's.
    array: JobArrayRequest | None = None
    # Record it as cancelled: it never starts, nor does a submission with its id that comes later. Work that has its id stays as it is.
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitWorkloadResponse:
    """The accepted workload."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class GetWorkloadRequest:
    """Names a workload."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class GetWorkloadResponse:
    """The current workload."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ListWorkloadsRequest:
    """Asks for a page of workloads in the order of submission."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    phases: Annotated[tuple[WorkloadPhase, ...], Many(8)] = ()
    namespace: Label = ""
    user: Label = ""
    queue: Label = ""
    node_name: Label = ""
    name_contains: Label = ""
    queue_positions: bool = False
    # Only elements of this array; or arrays as a whole in place of their elements.
    array_id: OptionalIdentifier = ""
    whole_arrays: bool = False
    # With SUMMARY the page has summaries in place of workloads.
    view: WorkloadView = WorkloadView.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class ListWorkloadsResponse:
    """A page of workloads, or of their summaries."""

    workloads: Annotated[tuple[Workload, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0
    summaries: Annotated[tuple[WorkloadSummary, ...], Many(SUMMARY_PAGE_SIZE_MOST)] = ()

    @property
    def rows(self) -> tuple[WorkloadSummary, ...]:
        """The summaries that were asked for; a controller that does not know the view sends whole workloads instead."""
        return self.summaries or tuple(
            summarize_workload(one, progress=one.progress, queue_position=one.queue_position) for one in self.workloads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchWorkloadsRequest:
    """Asks for changes after a revision; 0 begins with every workload."""

    after_revision: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchWorkloadsResponse:
    """One change."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWorkloadRequest:
    """Names a workload to end."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWorkloadResponse:
    """The workload after it ended."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogsRequest:
    """Asks for the output of one replica's process; with `follow` until the process ends."""

    workload_id: Identifier
    replica: Count = 0
    tail_lines: Count | None = None
    offset: Uint64 = 0
    follow: bool = False
    # Counted from 1; 0 for the newest.
    attempt: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogsResponse:
    """A part of the output, and where a later call continues."""

    text: LogText
    next_offset: Uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOpening:
    """The first message of a client that attaches to one replica's process; `attempt` 0 is the newest."""

    workload_id: Identifier
    replica: Count = 0
    tail_lines: Count | None = None
    offset: Uint64 = 0
    attempt: Uint32 = 0
    sends_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachInput:
    """Standard input for the process, its end, or the new size of its terminal."""

    data: InputBytes = b""
    is_end: bool = False
    size: TerminalSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """One message of an attached client: the opening, and then input."""

    message: AttachOpening | AttachInput | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachResponse:
    """Output of an attempt, and how many messages of input were taken since the opening."""

    data: OutputBytes = b""
    next_offset: Uint64 = 0
    attempt: Uint32 = 0
    inputs_taken: Uint64 = 0
    input_problem: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainWorkloadRequest:
    """Names a workload to explain."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainWorkloadResponse:
    """Why a workload is placed where it is, or pending."""

    explanation: Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPlansRequest:
    """Asks for a page of plans by node name."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPlansResponse:
    """A page of plans."""

    plans: Annotated[tuple[PlanStatus, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetPolicyRequest:
    """Asks for the policy in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetPolicyResponse:
    """The policy in force."""

    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePolicyRequest:
    """A new policy; its revision must be the current one."""

    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePolicyResponse:
    """The accepted policy."""

    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ListInterferenceRequest:
    """Asks for a page of measured pairs of loads."""

    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListInterferenceResponse:
    """A page of measured pairs, by their loads."""

    pairs: Annotated[tuple[MeasuredInterference, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQueuesRequest:
    """Asks for a page of queues, each after its parent."""

    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQueuesResponse:
    """A page of queues; none if the policy declares none."""

    queues: Annotated[tuple[QueueStatus, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveToQueueRequest:
    """Names a pending workload and the queue that it moves to."""

    workload_id: Identifier
    queue: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveToQueueResponse:
    """The workload in its new queue, placed if it fits there."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWorkloadRequest:
    """Names a pending workload that must not start until it is released."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWorkloadResponse:
    """The held workload."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorkloadRequest:
    """Names a held workload that may start again."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorkloadResponse:
    """The released workload, placed if it fits."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueWorkloadRequest:
    """Names a running job that is to stop and to wait in the queue again, held or not, and says why."""

    workload_id: Identifier
    reason: Label = ""
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueWorkloadResponse:
    """The workload, which is being stopped, or waits."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNodeRequest:
    """Names a node to remove permanently."""

    node_name: Name
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNodeResponse:
    """The effect on the node's work; of a dry run, the predicted one."""

    ended: Annotated[tuple[Identifier, ...], Many(4096)] = ()
    shrunk: Annotated[tuple[Identifier, ...], Many(4096)] = ()
    connected: bool = False


# Replicas of services, and gangs; more are not predicted.
DRAINED_WORKLOADS_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonNodeRequest:
    """Closes a node, or GPUs of it by index or UUID, to new work."""

    node_name: Name
    gpus: Annotated[tuple[Identifier, ...], Many(GPUS_PER_NODE_MOST)] = ()
    reason: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonNodeResponse:
    """The node, and whether an operator had cordoned it before."""

    node: Node
    was_cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonNodeRequest:
    """Opens a node, or GPUs of it by index or UUID, to new work."""

    node_name: Name
    gpus: Annotated[tuple[Identifier, ...], Many(GPUS_PER_NODE_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonNodeResponse:
    """The node, and whether an operator had cordoned it; if none had, nothing changed."""

    node: Node
    was_cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNodeRequest:
    """Closes a node, or GPUs of it by index or UUID, to new work and empties it."""

    node_name: Name
    gpus: Annotated[tuple[Identifier, ...], Many(GPUS_PER_NODE_MOST)] = ()
    reason: Label = ""
    grace_s: Annotated[float, Range(0.0, DRAIN_GRACE_S_MOST, "s")] | None = None
    force: bool = False
    dry_run: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that there is a grace after which work may be forced."""
        if self.force and self.grace_s is None:
            yield Violation("force", "has no effect without a grace", "give grace_s, after which work is evicted")


class DrainOutcome(OpenEnum):
    """What a drain does with work."""

    UNSPECIFIED = 0
    MOVES = 1
    FINISHES = 2
    REQUEUED = 3
    STAYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedWorkload:
    """What becomes of one workload, or of some of its replicas."""

    workload_id: Identifier
    name: Label = ""
    user: Label = ""
    replicas: Annotated[tuple[Count, ...], Many(10_000)] = ()
    outcome: DrainOutcome = DrainOutcome.UNSPECIFIED
    node_names: Annotated[tuple[Name, ...], Many(10_000)] = ()
    reason: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNodeResponse:
    """The node, and what becomes of the work there; of a dry run, the predicted one."""

    node: Node
    workloads: Annotated[tuple[DrainedWorkload, ...], Many(DRAINED_WORKLOADS_MOST)] = ()


# Characters of the stored arguments of one call: a page of a thousand entries stays under 4 MB.
AUDIT_ARGUMENTS_MOST = 1000
AUDIT_REASON_MOST = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One call that changed something, or several similar ones that changed nothing."""

    number: Uint64 = 0
    time_ns: Nanoseconds = 0
    subject: Annotated[str, Text(512)] = ""
    user: Label = ""
    role: Label = ""
    peer: Label = ""
    call: Label = ""
    arguments: Annotated[str, Text(AUDIT_ARGUMENTS_MOST)] = ""
    code: Label = ""
    reason: Annotated[str, Text(AUDIT_REASON_MOST)] = ""
    calls: Uint32 = 1
    revision: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAuditEntriesRequest:
    """Asks for a page of entries, the newest first; a page size of 0 means 100, more than 1000 means 1000."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    since_ns: Nanoseconds = 0
    user: Label = ""
    call: Label = ""
    denied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAuditEntriesResponse:
    """A page of entries; `damaged` is the number of stored entries that could not be read."""

    entries: Annotated[tuple[AuditEntry, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    damaged: Uint32 = 0
    omitted: Uint32 = 0


CALLER_NODES_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIRequest:
    """Asks for the caller's identity; needs no role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIResponse:
    """Identity and permissions of the caller's certificate; without TLS there is none, and every call is allowed."""

    subject: Annotated[str, Text(512)] = ""
    # agent, ingest, viewer, submitter, admin.
    roles: Annotated[tuple[Label, ...], Many(16)] = ()
    # Nodes for which it may report; empty for any, if it has the role agent.
    node_names: Annotated[tuple[Label, ...], Many(CALLER_NODES_MOST)] = ()
    # Whether certificates without a role are refused; otherwise every call is allowed to them.
    roles_demanded: bool = False
    # When the certificate expires, in nanoseconds since 1970; 0 without TLS.
    not_after_ns: Nanoseconds = 0
    # Owner of the work that it submits; empty if the certificate names no user.
    user: Label = ""
    # Where it may submit to, as in namespace:research.
    rights: Annotated[tuple[Annotated[str, Text(270)], ...], Many(CALLER_NODES_MOST)] = ()
    # The version of the controller.
    controller_version: Label = ""
