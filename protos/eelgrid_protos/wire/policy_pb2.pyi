from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnforcementMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENFORCEMENT_MODE_UNSPECIFIED: _ClassVar[EnforcementMode]
    ENFORCEMENT_MODE_OBSERVE: _ClassVar[EnforcementMode]
    ENFORCEMENT_MODE_ENFORCE: _ClassVar[EnforcementMode]
ENFORCEMENT_MODE_UNSPECIFIED: EnforcementMode
ENFORCEMENT_MODE_OBSERVE: EnforcementMode
ENFORCEMENT_MODE_ENFORCE: EnforcementMode

class Weights(_message.Message):
    __slots__ = ("power", "fragmentation_w", "stranding_w")
    POWER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_W_FIELD_NUMBER: _ClassVar[int]
    STRANDING_W_FIELD_NUMBER: _ClassVar[int]
    power: float
    fragmentation_w: float
    stranding_w: float
    def __init__(self, power: _Optional[float] = ..., fragmentation_w: _Optional[float] = ..., stranding_w: _Optional[float] = ...) -> None: ...

class PoolMode(_message.Message):
    __slots__ = ("pool", "mode")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    mode: EnforcementMode
    def __init__(self, pool: _Optional[str] = ..., mode: _Optional[_Union[EnforcementMode, str]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("revision", "objective", "weights", "pools", "lease_s", "send_interval_s", "sample_interval_s", "placement")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SEND_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    objective: str
    weights: Weights
    pools: _containers.RepeatedCompositeFieldContainer[PoolMode]
    lease_s: float
    send_interval_s: float
    sample_interval_s: float
    placement: str
    def __init__(self, revision: _Optional[int] = ..., objective: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolMode, _Mapping]]] = ..., lease_s: _Optional[float] = ..., send_interval_s: _Optional[float] = ..., sample_interval_s: _Optional[float] = ..., placement: _Optional[str] = ...) -> None: ...
