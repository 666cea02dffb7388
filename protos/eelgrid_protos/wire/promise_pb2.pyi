from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LatencyMetric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LATENCY_METRIC_UNSPECIFIED: _ClassVar[LatencyMetric]
    LATENCY_METRIC_RESPONSE: _ClassVar[LatencyMetric]
    LATENCY_METRIC_FIRST_TOKEN: _ClassVar[LatencyMetric]
    LATENCY_METRIC_INTER_TOKEN: _ClassVar[LatencyMetric]

class LoadMetric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_METRIC_UNSPECIFIED: _ClassVar[LoadMetric]
    LOAD_METRIC_REQUESTS: _ClassVar[LoadMetric]
    LOAD_METRIC_TOKENS: _ClassVar[LoadMetric]
    LOAD_METRIC_IN_FLIGHT: _ClassVar[LoadMetric]

class MetricsServer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METRICS_SERVER_UNSPECIFIED: _ClassVar[MetricsServer]
    METRICS_SERVER_VLLM: _ClassVar[MetricsServer]
    METRICS_SERVER_SGLANG: _ClassVar[MetricsServer]
    METRICS_SERVER_TGI: _ClassVar[MetricsServer]
    METRICS_SERVER_TRITON: _ClassVar[MetricsServer]
    METRICS_SERVER_RAY_SERVE: _ClassVar[MetricsServer]
    METRICS_SERVER_GENERIC: _ClassVar[MetricsServer]
LATENCY_METRIC_UNSPECIFIED: LatencyMetric
LATENCY_METRIC_RESPONSE: LatencyMetric
LATENCY_METRIC_FIRST_TOKEN: LatencyMetric
LATENCY_METRIC_INTER_TOKEN: LatencyMetric
LOAD_METRIC_UNSPECIFIED: LoadMetric
LOAD_METRIC_REQUESTS: LoadMetric
LOAD_METRIC_TOKENS: LoadMetric
LOAD_METRIC_IN_FLIGHT: LoadMetric
METRICS_SERVER_UNSPECIFIED: MetricsServer
METRICS_SERVER_VLLM: MetricsServer
METRICS_SERVER_SGLANG: MetricsServer
METRICS_SERVER_TGI: MetricsServer
METRICS_SERVER_TRITON: MetricsServer
METRICS_SERVER_RAY_SERVE: MetricsServer
METRICS_SERVER_GENERIC: MetricsServer

class LatencyObjective(_message.Message):
    __slots__ = ("metric", "quantile", "latency_s")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    metric: LatencyMetric
    quantile: float
    latency_s: float
    def __init__(self, metric: _Optional[_Union[LatencyMetric, str]] = ..., quantile: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class LoadTarget(_message.Message):
    __slots__ = ("metric", "per_replica")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    metric: LoadMetric
    per_replica: float
    def __init__(self, metric: _Optional[_Union[LoadMetric, str]] = ..., per_replica: _Optional[float] = ...) -> None: ...

class MetricsSource(_message.Message):
    __slots__ = ("server", "url", "model", "latency_histogram", "waiting_gauge", "work_counter")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LATENCY_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    WAITING_GAUGE_FIELD_NUMBER: _ClassVar[int]
    WORK_COUNTER_FIELD_NUMBER: _ClassVar[int]
    server: MetricsServer
    url: str
    model: str
    latency_histogram: str
    waiting_gauge: str
    work_counter: str
    def __init__(self, server: _Optional[_Union[MetricsServer, str]] = ..., url: _Optional[str] = ..., model: _Optional[str] = ..., latency_histogram: _Optional[str] = ..., waiting_gauge: _Optional[str] = ..., work_counter: _Optional[str] = ...) -> None: ...

class ServicePromise(_message.Message):
    __slots__ = ("profile", "rate_hz", "objectives", "replicas_least", "replicas_most", "start_s", "metrics", "output_tokens", "arrival_cv2", "slices", "load_target")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_LEAST_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MOST_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_CV2_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TARGET_FIELD_NUMBER: _ClassVar[int]
    profile: str
    rate_hz: float
    objectives: _containers.RepeatedCompositeFieldContainer[LatencyObjective]
    replicas_least: int
    replicas_most: int
    start_s: float
    metrics: MetricsSource
    output_tokens: float
    arrival_cv2: float
    slices: bool
    load_target: LoadTarget
    def __init__(self, profile: _Optional[str] = ..., rate_hz: _Optional[float] = ..., objectives: _Optional[_Iterable[_Union[LatencyObjective, _Mapping]]] = ..., replicas_least: _Optional[int] = ..., replicas_most: _Optional[int] = ..., start_s: _Optional[float] = ..., metrics: _Optional[_Union[MetricsSource, _Mapping]] = ..., output_tokens: _Optional[float] = ..., arrival_cv2: _Optional[float] = ..., slices: bool = ..., load_target: _Optional[_Union[LoadTarget, _Mapping]] = ...) -> None: ...

class TrainingPromise(_message.Message):
    __slots__ = ("profile", "slowdown_most", "work", "deadline_ns", "energy_weight", "metrics", "replicas_least", "replicas_most", "restart_s", "work_unit")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_MOST_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_LEAST_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MOST_FIELD_NUMBER: _ClassVar[int]
    RESTART_S_FIELD_NUMBER: _ClassVar[int]
    WORK_UNIT_FIELD_NUMBER: _ClassVar[int]
    profile: str
    slowdown_most: float
    work: float
    deadline_ns: int
    energy_weight: float
    metrics: MetricsSource
    replicas_least: int
    replicas_most: int
    restart_s: float
    work_unit: str
    def __init__(self, profile: _Optional[str] = ..., slowdown_most: _Optional[float] = ..., work: _Optional[float] = ..., deadline_ns: _Optional[int] = ..., energy_weight: _Optional[float] = ..., metrics: _Optional[_Union[MetricsSource, _Mapping]] = ..., replicas_least: _Optional[int] = ..., replicas_most: _Optional[int] = ..., restart_s: _Optional[float] = ..., work_unit: _Optional[str] = ...) -> None: ...
