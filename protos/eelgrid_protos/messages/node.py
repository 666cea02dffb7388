"""Messages of nodes: inventory and events (node.proto), the agent's stream to the controller, queries of NodeService.

The agent opens with Hello; the controller answers Welcome. Batches are acknowledged by sequence, cumulatively; at
most `window` are in flight. Either side may receive a message of a newer minor version: its `message` is None, and it
is ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.energy import (
    DeviceEnergy,
    EnergyAcknowledgement,
    EnergyAnomaly,
    EnergyStatus,
    EnergyWindow,
    OwnedEnergy,
)
from eelgrid_protos.messages.gpu import GPU_LINKS_MOST, AccessLevel, Gpu, GpuLink
from eelgrid_protos.messages.plan import Assignment, AttemptStatus, NodePlan, PlanApplied, TerminalSize
from eelgrid_protos.messages.policy import IntervalSeconds
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, SampleBatch
from eelgrid_protos.quantities import (
    Bytes,
    Count,
    CpuMilli,
    Identifier,
    Label,
    Many,
    Name,
    Nanoseconds,
    OpenEnum,
    PlanEpoch,
    Range,
    RequiredLabel,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
)
from eelgrid_protos.values import dataclass

# Region, zone, hall, spine, leaf, rack, and two more.
TOPOLOGY_PARTS_MOST = 8
# Model data that a node tells of.
MODEL_DATA_MOST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The hardware and software of one node."""

    node_name: Name
    cpu_milli: CpuMilli
    memory_bytes: Bytes
    generation: Uint32 = 1
    agent_version: Label = ""
    boot_id: Label = ""
    driver_version: Label = ""
    pool: Label = ""
    labels: Annotated[Mapping[Label, Label], Many(64)] = field(default_factory=dict)
    gpus: Annotated[tuple[Gpu, ...], Many(GPUS_PER_NODE_MOST)] = ()
    simulated: bool = False
    access: AccessLevel = AccessLevel.UNSPECIFIED
    links: Annotated[tuple[GpuLink, ...], Many(GPU_LINKS_MOST)] = ()
    # Outermost first, such as zone, spine, rack.
    topology: Annotated[tuple[Name, ...], Many(TOPOLOGY_PARTS_MOST)] = ()
    # The agent starts the processes of workloads.
    runs_processes: bool = False
    # What lies whole on the node's disks.
    model_data: Annotated[tuple[RequiredLabel, ...], Many(MODEL_DATA_MOST)] = ()
    # After so long without contact to a controller processes end here; 0 for never.
    fence_after_s: Seconds = 0.0
    # The agent sets power limits where its pool is enforced, and so keeps the power budget of its node.
    sets_limits: bool = False
    # The agent starts a process whose assignment says so only once the power limits of its GPUs are in force.
    limits_before_starts: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that UUIDs and indexes of devices are distinct."""
        for attribute in ("uuid", "index"):
            if len({getattr(gpu, attribute) for gpu in self.gpus}) < len(self.gpus):
                yield Violation("gpus", f"two devices share one {attribute}", "list each device once")


class NodeEventKind(OpenEnum):
    """What happened to a node or a device."""

    UNSPECIFIED = 0
    GPU_LOST = 1
    GPU_RETURNED = 2
    COUNTER_RESET = 3
    CLOCK_STEP = 4
    SAMPLES_DROPPED = 5
    LEASE_EXPIRED = 6
    XID = 7
    HEALTH = 8
    SETTING_DRIFT = 9
    ENFORCEMENT_SUSPENDED = 10
    SETTING_RESTORED = 11
    LAYOUT_CHANGED = 12
    GPU_HUNG = 13
    GPU_QUARANTINED = 14
    GPU_IDLE_HELD = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """An event that the agent reports to the controller at once."""

    kind: NodeEventKind
    time_ns: Nanoseconds
    gpu_uuid: Label = ""
    detail: Sentence = ""


# Eight GPUs in seven slices are 56; a kubelet runs some hundreds of pods.
PODS_WITH_DEVICES_MOST = 1024
# A node whose agent is away for a minute is lost anyway.
RECONNECT_SPREAD_S_MOST = 60.0
LEADER_WITHIN_S_MOST = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAssignments:
    """What an agent holds under the plan in force."""

    assignments: Annotated[tuple[Assignment, ...], Many(4096)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderTerm:
    """Orders the leaders of a cluster by timeline, then epoch; two of one token are told apart by `holder`."""

    timeline: Annotated[int, Range(0, 2**31 - 1)] = 0
    epoch: PlanEpoch = 0
    holder: Label = ""
    cluster: Label = ""

    @property
    def token(self) -> tuple[int, int]:
        """What orders terms."""
        return self.timeline, self.epoch

    def yields_to(self, other: "LeaderTerm") -> bool:
        """Whether a leader of this term may not be obeyed by who has seen the other, which is higher or somebody else's.

        Another cluster's leader is, since somebody made the agent call that one.
        """
        is_later = self.token < other.token or (self.token == other.token and self.holder != other.holder)
        return is_later and self.cluster == other.cluster

    def __str__(self) -> str:
        return f"{self.timeline}.{self.epoch} of {self.holder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRefused:
    """The agent obeys a later leader than this controller; `plan_epoch` is that of a plan refused with it."""

    refused: LeaderTerm
    known: LeaderTerm
    plan_epoch: PlanEpoch = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a stream; sequences count within the incarnation. `term` is the highest that the agent has seen."""

    incarnation: Uint64
    inventory: Inventory
    plan_epoch: PlanEpoch = 0
    held: HeldAssignments | None = None
    term: LeaderTerm | None = None
    accepts_resume_request: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Opens a stream without an inventory, if the controller has the one with this digest."""

    incarnation: Uint64
    node_name: Identifier
    plan_epoch: PlanEpoch = 0
    inventory_digest: Identifier
    term: LeaderTerm | None = None
    accepts_resume_request: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How the agent samples and sends."""

    sample_interval_s: IntervalSeconds = 1.0
    send_interval_s: IntervalSeconds = 5.0
    window: Annotated[int, Range(1, 1024)] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers Hello or Resume with the last batch of this incarnation that the controller holds."""

    acknowledged_sequence: Uint64
    cadence: Cadence
    # The next stream may be opened by Resume.
    resumes: bool = False
    # After this stream ends, agents spread their reconnects over this interval.
    reconnect_spread_s: Annotated[float, Range(0.0, RECONNECT_SPREAD_S_MOST, "s")] = 0.0
    # The controller's own; None from a version that has none.
    term: LeaderTerm | None = None
    # Its journal may lack its last entries: attempts are listed that have ended and that no plan names any more.
    wants_ended_attempts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReceived:
    """Confirms Hello or Resume; Welcome follows, after another Hello if `inventory_wanted`."""

    inventory_wanted: bool = False
    ahead: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """Asks for another Hello or Resume on the stream, whose controller is lost; it ends if none leads in that time."""

    leader_within_s: Annotated[float, Range(0.0, LEADER_WITHIN_S_MOST, "s")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Covers every batch up to and including the sequence, and renews the plan's lease."""

    sequence: Uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    """Devices of all containers of one pod: UUIDs of whole GPUs, and of the compute instances of MIG slices."""

    namespace: Label
    pod: Label
    device_uuids: Annotated[tuple[Identifier, ...], Many(512)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevices:
    """Devices held by the pods of a node, as its kubelet reports; replaces the previous report.

    Sent again after each allocation. If the agent `steers`, it is the device plugin, and devices follow the plan.
    """

    steers: bool = False
    pods: Annotated[tuple[PodDevices, ...], Many(PODS_WITH_DEVICES_MOST)] = ()


# A node holds no more assignments.
ATTEMPTS_MOST = 4096
LOG_CHUNK_CHARACTERS_MOST = 65_536
LOG_WAIT_S_MOST = 30.0
INPUT_BYTES_MOST = 16_384
OutputBytes = Annotated[bytes, Many(LOG_CHUNK_CHARACTERS_MOST)]
InputBytes = Annotated[bytes, Many(INPUT_BYTES_MOST)]
LogText = Annotated[str, Text(LOG_CHUNK_CHARACTERS_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """Processes that the agent started or found ended; an ended one is listed until a plan no longer names it."""

    attempts: Annotated[tuple[AttemptStatus, ...], Many(ATTEMPTS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Asks for output of a process from a byte on, or from some lines before the end; waits if there is none."""

    request_id: Uint64
    workload_id: Identifier
    replica: Count = 0
    attempt: Uint32 = 0
    offset: Uint64 = 0
    tail_lines: Count | None = None
    wait_s: Annotated[float, Range(0.0, LOG_WAIT_S_MOST, "s")] = 0.0
    # Answer with data instead of text.
    raw: bool = False
    # Of the workload, if the owner proved who it is: its id may have been another's, of whose job output is kept.
    owner: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """Answers one LogRequest; `is_end` once the process has ended and all was read, `problem` if nothing can be read."""

    request_id: Uint64
    text: LogText = ""
    next_offset: Uint64 = 0
    is_end: bool = False
    problem: Sentence = ""
    # Instead of text, if that was asked for.
    data: OutputBytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChunk:
    """Standard input for a process, its end, or the new size of its terminal."""

    request_id: Uint64
    workload_id: Identifier
    replica: Count = 0
    attempt: Uint32 = 0
    data: InputBytes = b""
    is_end: bool = False
    size: TerminalSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputResult:
    """Answers one InputChunk once it is taken; `is_early` if the process has not started."""

    request_id: Uint64
    problem: Sentence = ""
    is_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequest:
    """One message from the agent."""

    message: (
        Hello
        | Inventory
        | SampleBatch
        | NodeEvent
        | PlanApplied
        | EnergyWindow
        | HeldDevices
        | Resume
        | AttemptReport
        | LogChunk
        | InputResult
        | TermRefused
        | None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectResponse:
    """One message to the agent."""

    message: (
        Welcome
        | Acknowledgement
        | NodePlan
        | Cadence
        | EnergyAcknowledgement
        | HelloReceived
        | LogRequest
        | InputChunk
        | ResumeRequest
        | None
    )


# Present and removed devices; the other bounds are those of the agent. All rows at their longest fit into a message.
ENERGY_DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
ENERGY_OWNERS_MOST = 2000
ENERGY_RECENT_MOST = 2048
ENERGY_ANOMALIES_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryResponse:
    """The inventory of the node."""

    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesResponse:
    """The newest tick and its age; no batch before the first tick."""

    samples: SampleBatch | None = None
    age_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanResponse:
    """The plan in force, the result of applying it, and how long its lease still runs."""

    plan: NodePlan | None = None
    applied: PlanApplied | None = None
    lease_left_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyResponse:
    """Energy of a node by owner: totals since the agent started, and the last interval by process.

    Unless the status is KNOWN there are no rows; `rows_left_out` is the number of rows that did not fit.
    """

    devices: Annotated[tuple[DeviceEnergy, ...], Many(ENERGY_DEVICES_MOST)] = ()
    owners: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_OWNERS_MOST)] = ()
    recent: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_RECENT_MOST)] = ()
    anomalies: Annotated[tuple[EnergyAnomaly, ...], Many(ENERGY_ANOMALIES_MOST)] = ()
    status: EnergyStatus = EnergyStatus.UNSPECIFIED
    rows_left_out: Uint32 = 0
