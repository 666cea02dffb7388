from eelgrid_protos.wire import policy_pb2 as _policy_pb2
from eelgrid_protos.wire import workload_pb2 as _workload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImaginedOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGINED_OUTCOME_UNSPECIFIED: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_PLACED: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_MOVED: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_DISPLACED: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_WAITS: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_REFUSED: _ClassVar[ImaginedOutcome]
    IMAGINED_OUTCOME_CANCELLED: _ClassVar[ImaginedOutcome]
IMAGINED_OUTCOME_UNSPECIFIED: ImaginedOutcome
IMAGINED_OUTCOME_PLACED: ImaginedOutcome
IMAGINED_OUTCOME_MOVED: ImaginedOutcome
IMAGINED_OUTCOME_DISPLACED: ImaginedOutcome
IMAGINED_OUTCOME_WAITS: ImaginedOutcome
IMAGINED_OUTCOME_REFUSED: ImaginedOutcome
IMAGINED_OUTCOME_CANCELLED: ImaginedOutcome

class NodeShape(_message.Message):
    __slots__ = ("like_node", "gpu", "gpu_count", "cpu_milli", "memory_bytes")
    LIKE_NODE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    like_node: str
    gpu: str
    gpu_count: int
    cpu_milli: int
    memory_bytes: int
    def __init__(self, like_node: _Optional[str] = ..., gpu: _Optional[str] = ..., gpu_count: _Optional[int] = ..., cpu_milli: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class DrainNodes(_message.Message):
    __slots__ = ("node_names", "remove")
    NODE_NAMES_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    node_names: _containers.RepeatedScalarFieldContainer[str]
    remove: bool
    def __init__(self, node_names: _Optional[_Iterable[str]] = ..., remove: bool = ...) -> None: ...

class AddNodes(_message.Message):
    __slots__ = ("shape", "count")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    shape: NodeShape
    count: int
    def __init__(self, shape: _Optional[_Union[NodeShape, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class SetWeights(_message.Message):
    __slots__ = ("objective", "weights")
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    objective: str
    weights: _policy_pb2.Weights
    def __init__(self, objective: _Optional[str] = ..., weights: _Optional[_Union[_policy_pb2.Weights, _Mapping]] = ...) -> None: ...

class PlaceAnew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitCopies(_message.Message):
    __slots__ = ("spec", "copies")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    spec: _workload_pb2.WorkloadSpec
    copies: int
    def __init__(self, spec: _Optional[_Union[_workload_pb2.WorkloadSpec, _Mapping]] = ..., copies: _Optional[int] = ...) -> None: ...

class CancelWorkloads(_message.Message):
    __slots__ = ("workload_ids",)
    WORKLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    workload_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workload_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPowerBudgets(_message.Message):
    __slots__ = ("budgets",)
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    budgets: _containers.RepeatedCompositeFieldContainer[_policy_pb2.PowerBudget]
    def __init__(self, budgets: _Optional[_Iterable[_Union[_policy_pb2.PowerBudget, _Mapping]]] = ...) -> None: ...

class WhatIfChange(_message.Message):
    __slots__ = ("drain", "add", "set_weights", "place_anew", "submit", "cancel", "set_budgets")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    SET_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PLACE_ANEW_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SET_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    drain: DrainNodes
    add: AddNodes
    set_weights: SetWeights
    place_anew: PlaceAnew
    submit: SubmitCopies
    cancel: CancelWorkloads
    set_budgets: SetPowerBudgets
    def __init__(self, drain: _Optional[_Union[DrainNodes, _Mapping]] = ..., add: _Optional[_Union[AddNodes, _Mapping]] = ..., set_weights: _Optional[_Union[SetWeights, _Mapping]] = ..., place_anew: _Optional[_Union[PlaceAnew, _Mapping]] = ..., submit: _Optional[_Union[SubmitCopies, _Mapping]] = ..., cancel: _Optional[_Union[CancelWorkloads, _Mapping]] = ..., set_budgets: _Optional[_Union[SetPowerBudgets, _Mapping]] = ...) -> None: ...

class ClusterFigures(_message.Message):
    __slots__ = ("nodes_ready", "gpus", "allocated_gpu_milli", "cpu_milli", "allocated_cpu_milli", "placed", "pending", "modelled_power_w", "fragmented_gpu_milli")
    NODES_READY_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    MODELLED_POWER_W_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    nodes_ready: int
    gpus: int
    allocated_gpu_milli: int
    cpu_milli: int
    allocated_cpu_milli: int
    placed: int
    pending: int
    modelled_power_w: float
    fragmented_gpu_milli: int
    def __init__(self, nodes_ready: _Optional[int] = ..., gpus: _Optional[int] = ..., allocated_gpu_milli: _Optional[int] = ..., cpu_milli: _Optional[int] = ..., allocated_cpu_milli: _Optional[int] = ..., placed: _Optional[int] = ..., pending: _Optional[int] = ..., modelled_power_w: _Optional[float] = ..., fragmented_gpu_milli: _Optional[int] = ...) -> None: ...

class ClassRoom(_message.Message):
    __slots__ = ("cpu_milli", "gpu_count", "gpu_milli", "gpu_models", "share", "before", "after")
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPU_MODELS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    cpu_milli: int
    gpu_count: int
    gpu_milli: int
    gpu_models: _containers.RepeatedScalarFieldContainer[str]
    share: float
    before: int
    after: int
    def __init__(self, cpu_milli: _Optional[int] = ..., gpu_count: _Optional[int] = ..., gpu_milli: _Optional[int] = ..., gpu_models: _Optional[_Iterable[str]] = ..., share: _Optional[float] = ..., before: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class OutcomeCount(_message.Message):
    __slots__ = ("outcome", "workloads")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    outcome: ImaginedOutcome
    workloads: int
    def __init__(self, outcome: _Optional[_Union[ImaginedOutcome, str]] = ..., workloads: _Optional[int] = ...) -> None: ...

class WorkloadDifference(_message.Message):
    __slots__ = ("workload_id", "name", "outcome", "nodes_before", "nodes_after", "reason", "candidate")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NODES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NODES_AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    outcome: ImaginedOutcome
    nodes_before: _containers.RepeatedScalarFieldContainer[str]
    nodes_after: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    candidate: _workload_pb2.Candidate
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., outcome: _Optional[_Union[ImaginedOutcome, str]] = ..., nodes_before: _Optional[_Iterable[str]] = ..., nodes_after: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., candidate: _Optional[_Union[_workload_pb2.Candidate, _Mapping]] = ...) -> None: ...

class WhatIfRequest(_message.Message):
    __slots__ = ("changes", "differences_most")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_MOST_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[WhatIfChange]
    differences_most: int
    def __init__(self, changes: _Optional[_Iterable[_Union[WhatIfChange, _Mapping]]] = ..., differences_most: _Optional[int] = ...) -> None: ...

class WhatIfResponse(_message.Message):
    __slots__ = ("before", "after", "rooms", "counts", "differences", "revision", "complete", "copy_s", "total_s")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    before: ClusterFigures
    after: ClusterFigures
    rooms: _containers.RepeatedCompositeFieldContainer[ClassRoom]
    counts: _containers.RepeatedCompositeFieldContainer[OutcomeCount]
    differences: _containers.RepeatedCompositeFieldContainer[WorkloadDifference]
    revision: int
    complete: bool
    copy_s: float
    total_s: float
    def __init__(self, before: _Optional[_Union[ClusterFigures, _Mapping]] = ..., after: _Optional[_Union[ClusterFigures, _Mapping]] = ..., rooms: _Optional[_Iterable[_Union[ClassRoom, _Mapping]]] = ..., counts: _Optional[_Iterable[_Union[OutcomeCount, _Mapping]]] = ..., differences: _Optional[_Iterable[_Union[WorkloadDifference, _Mapping]]] = ..., revision: _Optional[int] = ..., complete: bool = ..., copy_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class PlanCapacityRequest(_message.Message):
    __slots__ = ("changes", "shape", "nodes_most")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NODES_MOST_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[WhatIfChange]
    shape: NodeShape
    nodes_most: int
    def __init__(self, changes: _Optional[_Iterable[_Union[WhatIfChange, _Mapping]]] = ..., shape: _Optional[_Union[NodeShape, _Mapping]] = ..., nodes_most: _Optional[int] = ...) -> None: ...

class PlanCapacityResponse(_message.Message):
    __slots__ = ("nodes", "outcome", "wanted", "waiting_with_one_less", "trials")
    NODES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_WITH_ONE_LESS_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    outcome: WhatIfResponse
    wanted: int
    waiting_with_one_less: int
    trials: int
    def __init__(self, nodes: _Optional[int] = ..., outcome: _Optional[_Union[WhatIfResponse, _Mapping]] = ..., wanted: _Optional[int] = ..., waiting_with_one_less: _Optional[int] = ..., trials: _Optional[int] = ...) -> None: ...

class ExportDecisionRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class ExportDecisionResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class StartShadowRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: SetWeights
    def __init__(self, weights: _Optional[_Union[SetWeights, _Mapping]] = ...) -> None: ...

class StartShadowResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: ShadowReport
    def __init__(self, report: _Optional[_Union[ShadowReport, _Mapping]] = ...) -> None: ...

class GetShadowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShadowResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: ShadowReport
    def __init__(self, report: _Optional[_Union[ShadowReport, _Mapping]] = ...) -> None: ...

class StopShadowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopShadowResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: ShadowReport
    def __init__(self, report: _Optional[_Union[ShadowReport, _Mapping]] = ...) -> None: ...

class ShadowReport(_message.Message):
    __slots__ = ("objective", "weights", "started_ns", "started_revision", "revision", "events", "live", "shadow", "alike", "elsewhere", "live_alone", "shadow_alone", "neither", "differences")
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    LIVE_ALONE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_ALONE_FIELD_NUMBER: _ClassVar[int]
    NEITHER_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    objective: str
    weights: _policy_pb2.Weights
    started_ns: int
    started_revision: int
    revision: int
    events: int
    live: ClusterFigures
    shadow: ClusterFigures
    alike: int
    elsewhere: int
    live_alone: int
    shadow_alone: int
    neither: int
    differences: _containers.RepeatedCompositeFieldContainer[WorkloadDifference]
    def __init__(self, objective: _Optional[str] = ..., weights: _Optional[_Union[_policy_pb2.Weights, _Mapping]] = ..., started_ns: _Optional[int] = ..., started_revision: _Optional[int] = ..., revision: _Optional[int] = ..., events: _Optional[int] = ..., live: _Optional[_Union[ClusterFigures, _Mapping]] = ..., shadow: _Optional[_Union[ClusterFigures, _Mapping]] = ..., alike: _Optional[int] = ..., elsewhere: _Optional[int] = ..., live_alone: _Optional[int] = ..., shadow_alone: _Optional[int] = ..., neither: _Optional[int] = ..., differences: _Optional[_Iterable[_Union[WorkloadDifference, _Mapping]]] = ...) -> None: ...
