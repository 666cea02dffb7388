from eelgrid_protos.wire import workload_pb2 as _workload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveGoal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_GOAL_UNSPECIFIED: _ClassVar[MoveGoal]
    MOVE_GOAL_POWER: _ClassVar[MoveGoal]
    MOVE_GOAL_ROOM: _ClassVar[MoveGoal]
    MOVE_GOAL_BALANCED: _ClassVar[MoveGoal]
MOVE_GOAL_UNSPECIFIED: MoveGoal
MOVE_GOAL_POWER: MoveGoal
MOVE_GOAL_ROOM: MoveGoal
MOVE_GOAL_BALANCED: MoveGoal

class GoalWeights(_message.Message):
    __slots__ = ("power", "fragmentation_w", "stranding_w", "block_w")
    POWER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_W_FIELD_NUMBER: _ClassVar[int]
    STRANDING_W_FIELD_NUMBER: _ClassVar[int]
    BLOCK_W_FIELD_NUMBER: _ClassVar[int]
    power: float
    fragmentation_w: float
    stranding_w: float
    block_w: float
    def __init__(self, power: _Optional[float] = ..., fragmentation_w: _Optional[float] = ..., stranding_w: _Optional[float] = ..., block_w: _Optional[float] = ...) -> None: ...

class ReplicaMove(_message.Message):
    __slots__ = ("source", "target", "candidates")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    source: _workload_pb2.Placement
    target: _workload_pb2.Placement
    candidates: _containers.RepeatedCompositeFieldContainer[_workload_pb2.Candidate]
    def __init__(self, source: _Optional[_Union[_workload_pb2.Placement, _Mapping]] = ..., target: _Optional[_Union[_workload_pb2.Placement, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[_workload_pb2.Candidate, _Mapping]]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("workload_id", "name", "replicas", "release_first", "power_w", "restart_w", "gain_w")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIRST_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    RESTART_W_FIELD_NUMBER: _ClassVar[int]
    GAIN_W_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaMove]
    release_first: bool
    power_w: float
    restart_w: float
    gain_w: float
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaMove, _Mapping]]] = ..., release_first: bool = ..., power_w: _Optional[float] = ..., restart_w: _Optional[float] = ..., gain_w: _Optional[float] = ...) -> None: ...

class ClassFit(_message.Message):
    __slots__ = ("cpu_milli", "gpu_count", "gpu_milli", "gpu_models", "tasks")
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPU_MODELS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    cpu_milli: int
    gpu_count: int
    gpu_milli: int
    gpu_models: _containers.RepeatedScalarFieldContainer[str]
    tasks: int
    def __init__(self, cpu_milli: _Optional[int] = ..., gpu_count: _Optional[int] = ..., gpu_milli: _Optional[int] = ..., gpu_models: _Optional[_Iterable[str]] = ..., tasks: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("power_w", "fragmented_gpus", "stranded_gpus", "cost_w", "typical_tasks", "typical_gpu_milli", "largest", "block_gpus")
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTED_GPUS_FIELD_NUMBER: _ClassVar[int]
    STRANDED_GPUS_FIELD_NUMBER: _ClassVar[int]
    COST_W_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_TASKS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GPUS_FIELD_NUMBER: _ClassVar[int]
    power_w: float
    fragmented_gpus: float
    stranded_gpus: float
    cost_w: float
    typical_tasks: int
    typical_gpu_milli: int
    largest: _containers.RepeatedCompositeFieldContainer[ClassFit]
    block_gpus: float
    def __init__(self, power_w: _Optional[float] = ..., fragmented_gpus: _Optional[float] = ..., stranded_gpus: _Optional[float] = ..., cost_w: _Optional[float] = ..., typical_tasks: _Optional[int] = ..., typical_gpu_milli: _Optional[int] = ..., largest: _Optional[_Iterable[_Union[ClassFit, _Mapping]]] = ..., block_gpus: _Optional[float] = ...) -> None: ...

class Recommendation(_message.Message):
    __slots__ = ("recommendation_id", "revision", "goal", "weights", "moves", "before", "after", "gain_w", "restart_w", "running", "movable", "moving", "moving_gpu_milli", "moves_most", "gpu_milli_most", "restart_s", "horizon_s", "typical_asked_tasks", "typical_asked_gpu_milli", "nodes_considered", "gain_most_w", "saved_most_w")
    RECOMMENDATION_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    GAIN_W_FIELD_NUMBER: _ClassVar[int]
    RESTART_W_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MOVABLE_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    MOVING_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MOVES_MOST_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_MOST_FIELD_NUMBER: _ClassVar[int]
    RESTART_S_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_ASKED_TASKS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_ASKED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    NODES_CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    GAIN_MOST_W_FIELD_NUMBER: _ClassVar[int]
    SAVED_MOST_W_FIELD_NUMBER: _ClassVar[int]
    recommendation_id: str
    revision: int
    goal: MoveGoal
    weights: GoalWeights
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    before: Standing
    after: Standing
    gain_w: float
    restart_w: float
    running: int
    movable: int
    moving: int
    moving_gpu_milli: int
    moves_most: int
    gpu_milli_most: int
    restart_s: float
    horizon_s: float
    typical_asked_tasks: int
    typical_asked_gpu_milli: int
    nodes_considered: int
    gain_most_w: float
    saved_most_w: float
    def __init__(self, recommendation_id: _Optional[str] = ..., revision: _Optional[int] = ..., goal: _Optional[_Union[MoveGoal, str]] = ..., weights: _Optional[_Union[GoalWeights, _Mapping]] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., before: _Optional[_Union[Standing, _Mapping]] = ..., after: _Optional[_Union[Standing, _Mapping]] = ..., gain_w: _Optional[float] = ..., restart_w: _Optional[float] = ..., running: _Optional[int] = ..., movable: _Optional[int] = ..., moving: _Optional[int] = ..., moving_gpu_milli: _Optional[int] = ..., moves_most: _Optional[int] = ..., gpu_milli_most: _Optional[int] = ..., restart_s: _Optional[float] = ..., horizon_s: _Optional[float] = ..., typical_asked_tasks: _Optional[int] = ..., typical_asked_gpu_milli: _Optional[int] = ..., nodes_considered: _Optional[int] = ..., gain_most_w: _Optional[float] = ..., saved_most_w: _Optional[float] = ...) -> None: ...

class RecommendMovesRequest(_message.Message):
    __slots__ = ("goal", "moves_most", "moves_ratio", "gpu_ratio", "restart_s", "horizon_s")
    GOAL_FIELD_NUMBER: _ClassVar[int]
    MOVES_MOST_FIELD_NUMBER: _ClassVar[int]
    MOVES_RATIO_FIELD_NUMBER: _ClassVar[int]
    GPU_RATIO_FIELD_NUMBER: _ClassVar[int]
    RESTART_S_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    goal: MoveGoal
    moves_most: int
    moves_ratio: float
    gpu_ratio: float
    restart_s: float
    horizon_s: float
    def __init__(self, goal: _Optional[_Union[MoveGoal, str]] = ..., moves_most: _Optional[int] = ..., moves_ratio: _Optional[float] = ..., gpu_ratio: _Optional[float] = ..., restart_s: _Optional[float] = ..., horizon_s: _Optional[float] = ...) -> None: ...

class RecommendMovesResponse(_message.Message):
    __slots__ = ("recommendation",)
    RECOMMENDATION_FIELD_NUMBER: _ClassVar[int]
    recommendation: Recommendation
    def __init__(self, recommendation: _Optional[_Union[Recommendation, _Mapping]] = ...) -> None: ...

class ApplyMovesRequest(_message.Message):
    __slots__ = ("recommendation_id",)
    RECOMMENDATION_ID_FIELD_NUMBER: _ClassVar[int]
    recommendation_id: str
    def __init__(self, recommendation_id: _Optional[str] = ...) -> None: ...

class ApplyMovesResponse(_message.Message):
    __slots__ = ("moved", "revision", "modelled_power_w")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODELLED_POWER_W_FIELD_NUMBER: _ClassVar[int]
    moved: int
    revision: int
    modelled_power_w: float
    def __init__(self, moved: _Optional[int] = ..., revision: _Optional[int] = ..., modelled_power_w: _Optional[float] = ...) -> None: ...
