from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QuantileLatency(_message.Message):
    __slots__ = ("quantile", "latency_s")
    QUANTILE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    quantile: float
    latency_s: float
    def __init__(self, quantile: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class MeasuredPoint(_message.Message):
    __slots__ = ("profile", "gpu_model", "mig_profile", "gpus", "batch", "processes", "power_limit_w", "clock_mhz", "label", "throughput_hz", "latencies", "power_w", "memory_bytes", "source")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    GPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    MIG_PROFILE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_HZ_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    profile: str
    gpu_model: str
    mig_profile: str
    gpus: int
    batch: int
    processes: int
    power_limit_w: float
    clock_mhz: int
    label: str
    throughput_hz: float
    latencies: _containers.RepeatedCompositeFieldContainer[QuantileLatency]
    power_w: float
    memory_bytes: int
    source: str
    def __init__(self, profile: _Optional[str] = ..., gpu_model: _Optional[str] = ..., mig_profile: _Optional[str] = ..., gpus: _Optional[int] = ..., batch: _Optional[int] = ..., processes: _Optional[int] = ..., power_limit_w: _Optional[float] = ..., clock_mhz: _Optional[int] = ..., label: _Optional[str] = ..., throughput_hz: _Optional[float] = ..., latencies: _Optional[_Iterable[_Union[QuantileLatency, _Mapping]]] = ..., power_w: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...
