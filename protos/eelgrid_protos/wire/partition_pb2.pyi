from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Resident(_message.Message):
    __slots__ = ("workload_id", "name", "replica", "slice")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    replica: int
    slice: _plan_pb2.Slice
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., replica: _Optional[int] = ..., slice: _Optional[_Union[_plan_pb2.Slice, _Mapping]] = ...) -> None: ...

class PartitionedGpu(_message.Message):
    __slots__ = ("node_name", "gpu_index", "model", "before", "after", "residents_before", "residents", "held")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpu_index: int
    model: str
    before: _plan_pb2.GpuLayout
    after: _plan_pb2.GpuLayout
    residents_before: _containers.RepeatedCompositeFieldContainer[Resident]
    residents: _containers.RepeatedCompositeFieldContainer[Resident]
    held: str
    def __init__(self, node_name: _Optional[str] = ..., gpu_index: _Optional[int] = ..., model: _Optional[str] = ..., before: _Optional[_Union[_plan_pb2.GpuLayout, _Mapping]] = ..., after: _Optional[_Union[_plan_pb2.GpuLayout, _Mapping]] = ..., residents_before: _Optional[_Iterable[_Union[Resident, _Mapping]]] = ..., residents: _Optional[_Iterable[_Union[Resident, _Mapping]]] = ..., held: _Optional[str] = ...) -> None: ...

class PartitionedService(_message.Message):
    __slots__ = ("workload_id", "name", "rate_hz", "before_hz", "after_hz", "replicas_before", "replicas", "lowest_share", "problem")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    BEFORE_HZ_FIELD_NUMBER: _ClassVar[int]
    AFTER_HZ_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LOWEST_SHARE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    rate_hz: float
    before_hz: float
    after_hz: float
    replicas_before: int
    replicas: int
    lowest_share: float
    problem: str
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., rate_hz: _Optional[float] = ..., before_hz: _Optional[float] = ..., after_hz: _Optional[float] = ..., replicas_before: _Optional[int] = ..., replicas: _Optional[int] = ..., lowest_share: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class PartitionRecommendation(_message.Message):
    __slots__ = ("recommendation_id", "revision", "gpus", "services", "gpus_before", "gpus_after", "gain", "cost", "horizon_s", "stages", "gpus_ready")
    RECOMMENDATION_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    GPUS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    GPUS_AFTER_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    GPUS_READY_FIELD_NUMBER: _ClassVar[int]
    recommendation_id: str
    revision: int
    gpus: _containers.RepeatedCompositeFieldContainer[PartitionedGpu]
    services: _containers.RepeatedCompositeFieldContainer[PartitionedService]
    gpus_before: float
    gpus_after: float
    gain: float
    cost: float
    horizon_s: float
    stages: int
    gpus_ready: int
    def __init__(self, recommendation_id: _Optional[str] = ..., revision: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[PartitionedGpu, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[PartitionedService, _Mapping]]] = ..., gpus_before: _Optional[float] = ..., gpus_after: _Optional[float] = ..., gain: _Optional[float] = ..., cost: _Optional[float] = ..., horizon_s: _Optional[float] = ..., stages: _Optional[int] = ..., gpus_ready: _Optional[int] = ...) -> None: ...

class RecommendPartitionsRequest(_message.Message):
    __slots__ = ("horizon_s",)
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    horizon_s: float
    def __init__(self, horizon_s: _Optional[float] = ...) -> None: ...

class RecommendPartitionsResponse(_message.Message):
    __slots__ = ("recommendation",)
    RECOMMENDATION_FIELD_NUMBER: _ClassVar[int]
    recommendation: PartitionRecommendation
    def __init__(self, recommendation: _Optional[_Union[PartitionRecommendation, _Mapping]] = ...) -> None: ...

class ApplyPartitionsRequest(_message.Message):
    __slots__ = ("recommendation_id",)
    RECOMMENDATION_ID_FIELD_NUMBER: _ClassVar[int]
    recommendation_id: str
    def __init__(self, recommendation_id: _Optional[str] = ...) -> None: ...

class ApplyPartitionsResponse(_message.Message):
    __slots__ = ("revision", "stages_left")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STAGES_LEFT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    stages_left: int
    def __init__(self, revision: _Optional[int] = ..., stages_left: _Optional[int] = ...) -> None: ...

class ListPartitionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class PartitionStatus(_message.Message):
    __slots__ = ("node_name", "gpu_index", "model", "wanted", "stands", "residents", "problem")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpu_index: int
    model: str
    wanted: _plan_pb2.GpuLayout
    stands: bool
    residents: _containers.RepeatedCompositeFieldContainer[Resident]
    problem: str
    def __init__(self, node_name: _Optional[str] = ..., gpu_index: _Optional[int] = ..., model: _Optional[str] = ..., wanted: _Optional[_Union[_plan_pb2.GpuLayout, _Mapping]] = ..., stands: bool = ..., residents: _Optional[_Iterable[_Union[Resident, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class ListPartitionsResponse(_message.Message):
    __slots__ = ("gpus", "stages_left", "waits_for", "next_page_token", "total", "omitted")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    STAGES_LEFT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[PartitionStatus]
    stages_left: int
    waits_for: str
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, gpus: _Optional[_Iterable[_Union[PartitionStatus, _Mapping]]] = ..., stages_left: _Optional[int] = ..., waits_for: _Optional[str] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...
