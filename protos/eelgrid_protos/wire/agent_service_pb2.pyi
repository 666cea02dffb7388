from eelgrid_protos.wire import energy_pb2 as _energy_pb2
from eelgrid_protos.wire import node_pb2 as _node_pb2
from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaderTerm(_message.Message):
    __slots__ = ("timeline", "epoch", "holder", "cluster")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    epoch: int
    holder: str
    cluster: str
    def __init__(self, timeline: _Optional[int] = ..., epoch: _Optional[int] = ..., holder: _Optional[str] = ..., cluster: _Optional[str] = ...) -> None: ...

class TermRefused(_message.Message):
    __slots__ = ("refused", "known", "plan_epoch")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PLAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    refused: LeaderTerm
    known: LeaderTerm
    plan_epoch: int
    def __init__(self, refused: _Optional[_Union[LeaderTerm, _Mapping]] = ..., known: _Optional[_Union[LeaderTerm, _Mapping]] = ..., plan_epoch: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "inventory", "plan_epoch", "held", "term", "accepts_resume_request")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    PLAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_RESUME_REQUEST_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    inventory: _node_pb2.Inventory
    plan_epoch: int
    held: HeldAssignments
    term: LeaderTerm
    accepts_resume_request: bool
    def __init__(self, incarnation: _Optional[int] = ..., inventory: _Optional[_Union[_node_pb2.Inventory, _Mapping]] = ..., plan_epoch: _Optional[int] = ..., held: _Optional[_Union[HeldAssignments, _Mapping]] = ..., term: _Optional[_Union[LeaderTerm, _Mapping]] = ..., accepts_resume_request: bool = ...) -> None: ...

class HeldAssignments(_message.Message):
    __slots__ = ("assignments",)
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Assignment]
    def __init__(self, assignments: _Optional[_Iterable[_Union[_plan_pb2.Assignment, _Mapping]]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("incarnation", "node_name", "plan_epoch", "inventory_digest", "term", "accepts_resume_request")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    PLAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_RESUME_REQUEST_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    node_name: str
    plan_epoch: int
    inventory_digest: str
    term: LeaderTerm
    accepts_resume_request: bool
    def __init__(self, incarnation: _Optional[int] = ..., node_name: _Optional[str] = ..., plan_epoch: _Optional[int] = ..., inventory_digest: _Optional[str] = ..., term: _Optional[_Union[LeaderTerm, _Mapping]] = ..., accepts_resume_request: bool = ...) -> None: ...

class PodDevices(_message.Message):
    __slots__ = ("namespace", "pod", "device_uuids")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pod: str
    device_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., pod: _Optional[str] = ..., device_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldDevices(_message.Message):
    __slots__ = ("steers", "pods")
    STEERS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    steers: bool
    pods: _containers.RepeatedCompositeFieldContainer[PodDevices]
    def __init__(self, steers: bool = ..., pods: _Optional[_Iterable[_Union[PodDevices, _Mapping]]] = ...) -> None: ...

class AttemptReport(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[_plan_pb2.AttemptStatus]
    def __init__(self, attempts: _Optional[_Iterable[_Union[_plan_pb2.AttemptStatus, _Mapping]]] = ...) -> None: ...

class LogRequest(_message.Message):
    __slots__ = ("request_id", "workload_id", "replica", "attempt", "offset", "tail_lines", "wait_s", "raw", "owner")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    workload_id: str
    replica: int
    attempt: int
    offset: int
    tail_lines: int
    wait_s: float
    raw: bool
    owner: str
    def __init__(self, request_id: _Optional[int] = ..., workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ..., tail_lines: _Optional[int] = ..., wait_s: _Optional[float] = ..., raw: bool = ..., owner: _Optional[str] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("request_id", "text", "next_offset", "is_end", "problem", "data")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    text: str
    next_offset: int
    is_end: bool
    problem: str
    data: bytes
    def __init__(self, request_id: _Optional[int] = ..., text: _Optional[str] = ..., next_offset: _Optional[int] = ..., is_end: bool = ..., problem: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class InputChunk(_message.Message):
    __slots__ = ("request_id", "workload_id", "replica", "attempt", "data", "is_end", "size")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    workload_id: str
    replica: int
    attempt: int
    data: bytes
    is_end: bool
    size: _plan_pb2.TerminalSize
    def __init__(self, request_id: _Optional[int] = ..., workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., attempt: _Optional[int] = ..., data: _Optional[bytes] = ..., is_end: bool = ..., size: _Optional[_Union[_plan_pb2.TerminalSize, _Mapping]] = ...) -> None: ...

class InputResult(_message.Message):
    __slots__ = ("request_id", "problem", "is_early")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    problem: str
    is_early: bool
    def __init__(self, request_id: _Optional[int] = ..., problem: _Optional[str] = ..., is_early: bool = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "inventory", "samples", "event", "applied", "energy", "held", "resume", "attempts", "log", "input", "term_refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    TERM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    inventory: _node_pb2.Inventory
    samples: _node_pb2.SampleBatch
    event: _node_pb2.NodeEvent
    applied: _plan_pb2.PlanApplied
    energy: _energy_pb2.EnergyWindow
    held: HeldDevices
    resume: Resume
    attempts: AttemptReport
    log: LogChunk
    input: InputResult
    term_refused: TermRefused
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., inventory: _Optional[_Union[_node_pb2.Inventory, _Mapping]] = ..., samples: _Optional[_Union[_node_pb2.SampleBatch, _Mapping]] = ..., event: _Optional[_Union[_node_pb2.NodeEvent, _Mapping]] = ..., applied: _Optional[_Union[_plan_pb2.PlanApplied, _Mapping]] = ..., energy: _Optional[_Union[_energy_pb2.EnergyWindow, _Mapping]] = ..., held: _Optional[_Union[HeldDevices, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., attempts: _Optional[_Union[AttemptReport, _Mapping]] = ..., log: _Optional[_Union[LogChunk, _Mapping]] = ..., input: _Optional[_Union[InputResult, _Mapping]] = ..., term_refused: _Optional[_Union[TermRefused, _Mapping]] = ...) -> None: ...

class Cadence(_message.Message):
    __slots__ = ("sample_interval_s", "send_interval_s", "window")
    SAMPLE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SEND_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    sample_interval_s: float
    send_interval_s: float
    window: int
    def __init__(self, sample_interval_s: _Optional[float] = ..., send_interval_s: _Optional[float] = ..., window: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("acknowledged_sequence", "cadence", "resumes", "reconnect_spread_s", "term", "wants_ended_attempts")
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CADENCE_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_SPREAD_S_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WANTS_ENDED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    acknowledged_sequence: int
    cadence: Cadence
    resumes: bool
    reconnect_spread_s: float
    term: LeaderTerm
    wants_ended_attempts: bool
    def __init__(self, acknowledged_sequence: _Optional[int] = ..., cadence: _Optional[_Union[Cadence, _Mapping]] = ..., resumes: bool = ..., reconnect_spread_s: _Optional[float] = ..., term: _Optional[_Union[LeaderTerm, _Mapping]] = ..., wants_ended_attempts: bool = ...) -> None: ...

class HelloReceived(_message.Message):
    __slots__ = ("inventory_wanted", "ahead")
    INVENTORY_WANTED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    inventory_wanted: bool
    ahead: int
    def __init__(self, inventory_wanted: bool = ..., ahead: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("leader_within_s",)
    LEADER_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    leader_within_s: float
    def __init__(self, leader_within_s: _Optional[float] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "acknowledgement", "plan", "cadence", "energy", "hello_received", "log", "input", "resume_request")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CADENCE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    HELLO_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    RESUME_REQUEST_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    acknowledgement: Acknowledgement
    plan: _plan_pb2.NodePlan
    cadence: Cadence
    energy: _energy_pb2.EnergyAcknowledgement
    hello_received: HelloReceived
    log: LogRequest
    input: InputChunk
    resume_request: ResumeRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., plan: _Optional[_Union[_plan_pb2.NodePlan, _Mapping]] = ..., cadence: _Optional[_Union[Cadence, _Mapping]] = ..., energy: _Optional[_Union[_energy_pb2.EnergyAcknowledgement, _Mapping]] = ..., hello_received: _Optional[_Union[HelloReceived, _Mapping]] = ..., log: _Optional[_Union[LogRequest, _Mapping]] = ..., input: _Optional[_Union[InputChunk, _Mapping]] = ..., resume_request: _Optional[_Union[ResumeRequest, _Mapping]] = ...) -> None: ...
