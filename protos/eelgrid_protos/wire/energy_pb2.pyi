from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OwnerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_KIND_UNSPECIFIED: _ClassVar[OwnerKind]
    OWNER_KIND_POD: _ClassVar[OwnerKind]
    OWNER_KIND_SLURM: _ClassVar[OwnerKind]
    OWNER_KIND_WORKLOAD: _ClassVar[OwnerKind]
    OWNER_KIND_CONTAINER: _ClassVar[OwnerKind]
    OWNER_KIND_RAY: _ClassVar[OwnerKind]
    OWNER_KIND_UNIT: _ClassVar[OwnerKind]
    OWNER_KIND_USER: _ClassVar[OwnerKind]
    OWNER_KIND_PROCESS: _ClassVar[OwnerKind]
    OWNER_KIND_UNALLOCATED: _ClassVar[OwnerKind]
    OWNER_KIND_UNATTRIBUTED: _ClassVar[OwnerKind]

class EnergyPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENERGY_PART_UNSPECIFIED: _ClassVar[EnergyPart]
    ENERGY_PART_BARE_IDLE: _ClassVar[EnergyPart]
    ENERGY_PART_CONTEXT_IDLE: _ClassVar[EnergyPart]
    ENERGY_PART_ACTIVE: _ClassVar[EnergyPart]

class AttributionMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTRIBUTION_METHOD_UNSPECIFIED: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_EXCLUSIVE: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_MIG_ACTIVITY: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_MIG_SLICE: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_PROCESS_SM: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_EQUAL_SHARE: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_UNATTRIBUTED: _ClassVar[AttributionMethod]

class AttributionConfidence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTRIBUTION_CONFIDENCE_UNSPECIFIED: _ClassVar[AttributionConfidence]
    ATTRIBUTION_CONFIDENCE_LOW: _ClassVar[AttributionConfidence]
    ATTRIBUTION_CONFIDENCE_MEDIUM: _ClassVar[AttributionConfidence]
    ATTRIBUTION_CONFIDENCE_HIGH: _ClassVar[AttributionConfidence]

class UnownedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNOWNED_REASON_UNSPECIFIED: _ClassVar[UnownedReason]
    UNOWNED_REASON_UNALLOCATED: _ClassVar[UnownedReason]
    UNOWNED_REASON_UNATTRIBUTED: _ClassVar[UnownedReason]
    UNOWNED_REASON_ENDED: _ClassVar[UnownedReason]
    UNOWNED_REASON_OTHER: _ClassVar[UnownedReason]

class EnergyMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENERGY_METHOD_UNSPECIFIED: _ClassVar[EnergyMethod]
    ENERGY_METHOD_COUNTER: _ClassVar[EnergyMethod]
    ENERGY_METHOD_INTEGRATED: _ClassVar[EnergyMethod]
    ENERGY_METHOD_MIXED: _ClassVar[EnergyMethod]

class AnomalyKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANOMALY_KIND_UNSPECIFIED: _ClassVar[AnomalyKind]
    ANOMALY_KIND_HELD_IDLE: _ClassVar[AnomalyKind]
    ANOMALY_KIND_IDLE_CONTEXT: _ClassVar[AnomalyKind]
    ANOMALY_KIND_PROCESS_WITHOUT_ALLOCATION: _ClassVar[AnomalyKind]
    ANOMALY_KIND_ALLOCATION_WITHOUT_PROCESS: _ClassVar[AnomalyKind]
    ANOMALY_KIND_STALLED: _ClassVar[AnomalyKind]

class EnergyStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENERGY_STATUS_UNSPECIFIED: _ClassVar[EnergyStatus]
    ENERGY_STATUS_KNOWN: _ClassVar[EnergyStatus]
    ENERGY_STATUS_NOT_YET: _ClassVar[EnergyStatus]
    ENERGY_STATUS_NOT_KEPT: _ClassVar[EnergyStatus]
OWNER_KIND_UNSPECIFIED: OwnerKind
OWNER_KIND_POD: OwnerKind
OWNER_KIND_SLURM: OwnerKind
OWNER_KIND_WORKLOAD: OwnerKind
OWNER_KIND_CONTAINER: OwnerKind
OWNER_KIND_RAY: OwnerKind
OWNER_KIND_UNIT: OwnerKind
OWNER_KIND_USER: OwnerKind
OWNER_KIND_PROCESS: OwnerKind
OWNER_KIND_UNALLOCATED: OwnerKind
OWNER_KIND_UNATTRIBUTED: OwnerKind
ENERGY_PART_UNSPECIFIED: EnergyPart
ENERGY_PART_BARE_IDLE: EnergyPart
ENERGY_PART_CONTEXT_IDLE: EnergyPart
ENERGY_PART_ACTIVE: EnergyPart
ATTRIBUTION_METHOD_UNSPECIFIED: AttributionMethod
ATTRIBUTION_METHOD_EXCLUSIVE: AttributionMethod
ATTRIBUTION_METHOD_MIG_ACTIVITY: AttributionMethod
ATTRIBUTION_METHOD_MIG_SLICE: AttributionMethod
ATTRIBUTION_METHOD_PROCESS_SM: AttributionMethod
ATTRIBUTION_METHOD_EQUAL_SHARE: AttributionMethod
ATTRIBUTION_METHOD_UNATTRIBUTED: AttributionMethod
ATTRIBUTION_CONFIDENCE_UNSPECIFIED: AttributionConfidence
ATTRIBUTION_CONFIDENCE_LOW: AttributionConfidence
ATTRIBUTION_CONFIDENCE_MEDIUM: AttributionConfidence
ATTRIBUTION_CONFIDENCE_HIGH: AttributionConfidence
UNOWNED_REASON_UNSPECIFIED: UnownedReason
UNOWNED_REASON_UNALLOCATED: UnownedReason
UNOWNED_REASON_UNATTRIBUTED: UnownedReason
UNOWNED_REASON_ENDED: UnownedReason
UNOWNED_REASON_OTHER: UnownedReason
ENERGY_METHOD_UNSPECIFIED: EnergyMethod
ENERGY_METHOD_COUNTER: EnergyMethod
ENERGY_METHOD_INTEGRATED: EnergyMethod
ENERGY_METHOD_MIXED: EnergyMethod
ANOMALY_KIND_UNSPECIFIED: AnomalyKind
ANOMALY_KIND_HELD_IDLE: AnomalyKind
ANOMALY_KIND_IDLE_CONTEXT: AnomalyKind
ANOMALY_KIND_PROCESS_WITHOUT_ALLOCATION: AnomalyKind
ANOMALY_KIND_ALLOCATION_WITHOUT_PROCESS: AnomalyKind
ANOMALY_KIND_STALLED: AnomalyKind
ENERGY_STATUS_UNSPECIFIED: EnergyStatus
ENERGY_STATUS_KNOWN: EnergyStatus
ENERGY_STATUS_NOT_YET: EnergyStatus
ENERGY_STATUS_NOT_KEPT: EnergyStatus

class EnergyOwner(_message.Message):
    __slots__ = ("kind", "namespace", "pod", "container", "pod_uid", "container_id", "job", "step", "workload", "user", "unit", "ray_job", "pid")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    RAY_JOB_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    kind: OwnerKind
    namespace: str
    pod: str
    container: str
    pod_uid: str
    container_id: str
    job: str
    step: str
    workload: str
    user: str
    unit: str
    ray_job: str
    pid: int
    def __init__(self, kind: _Optional[_Union[OwnerKind, str]] = ..., namespace: _Optional[str] = ..., pod: _Optional[str] = ..., container: _Optional[str] = ..., pod_uid: _Optional[str] = ..., container_id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[str] = ..., workload: _Optional[str] = ..., user: _Optional[str] = ..., unit: _Optional[str] = ..., ray_job: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class OwnedEnergy(_message.Message):
    __slots__ = ("gpu_uuid", "gpu_instance_id", "owner", "part", "method", "confidence", "energy_mj")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    gpu_instance_id: int
    owner: EnergyOwner
    part: EnergyPart
    method: AttributionMethod
    confidence: AttributionConfidence
    energy_mj: int
    def __init__(self, gpu_uuid: _Optional[str] = ..., gpu_instance_id: _Optional[int] = ..., owner: _Optional[_Union[EnergyOwner, _Mapping]] = ..., part: _Optional[_Union[EnergyPart, str]] = ..., method: _Optional[_Union[AttributionMethod, str]] = ..., confidence: _Optional[_Union[AttributionConfidence, str]] = ..., energy_mj: _Optional[int] = ...) -> None: ...

class UnownedEnergy(_message.Message):
    __slots__ = ("reason", "energy_mj")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    reason: UnownedReason
    energy_mj: int
    def __init__(self, reason: _Optional[_Union[UnownedReason, str]] = ..., energy_mj: _Optional[int] = ...) -> None: ...

class EnergyEstimate(_message.Message):
    __slots__ = ("energy_j", "uncertainty_j", "method", "seconds", "uncounted_s")
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_J_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_S_FIELD_NUMBER: _ClassVar[int]
    energy_j: float
    uncertainty_j: float
    method: EnergyMethod
    seconds: float
    uncounted_s: float
    def __init__(self, energy_j: _Optional[float] = ..., uncertainty_j: _Optional[float] = ..., method: _Optional[_Union[EnergyMethod, str]] = ..., seconds: _Optional[float] = ..., uncounted_s: _Optional[float] = ...) -> None: ...

class DeviceEnergy(_message.Message):
    __slots__ = ("gpu_uuid", "total_mj", "unowned", "recent_s", "estimate")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MJ_FIELD_NUMBER: _ClassVar[int]
    UNOWNED_FIELD_NUMBER: _ClassVar[int]
    RECENT_S_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    total_mj: int
    unowned: _containers.RepeatedCompositeFieldContainer[UnownedEnergy]
    recent_s: float
    estimate: EnergyEstimate
    def __init__(self, gpu_uuid: _Optional[str] = ..., total_mj: _Optional[int] = ..., unowned: _Optional[_Iterable[_Union[UnownedEnergy, _Mapping]]] = ..., recent_s: _Optional[float] = ..., estimate: _Optional[_Union[EnergyEstimate, _Mapping]] = ...) -> None: ...

class EnergyAnomaly(_message.Message):
    __slots__ = ("kind", "gpu_uuid", "gpu_instance_id", "owner", "since_ns", "lasted_s", "wasted_mj")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    LASTED_S_FIELD_NUMBER: _ClassVar[int]
    WASTED_MJ_FIELD_NUMBER: _ClassVar[int]
    kind: AnomalyKind
    gpu_uuid: str
    gpu_instance_id: int
    owner: EnergyOwner
    since_ns: int
    lasted_s: float
    wasted_mj: int
    def __init__(self, kind: _Optional[_Union[AnomalyKind, str]] = ..., gpu_uuid: _Optional[str] = ..., gpu_instance_id: _Optional[int] = ..., owner: _Optional[_Union[EnergyOwner, _Mapping]] = ..., since_ns: _Optional[int] = ..., lasted_s: _Optional[float] = ..., wasted_mj: _Optional[int] = ...) -> None: ...

class WindowDevice(_message.Message):
    __slots__ = ("gpu_uuid", "total_mj", "uncertainty_mj", "uncounted_s")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MJ_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_MJ_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_S_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    total_mj: int
    uncertainty_mj: int
    uncounted_s: float
    def __init__(self, gpu_uuid: _Optional[str] = ..., total_mj: _Optional[int] = ..., uncertainty_mj: _Optional[int] = ..., uncounted_s: _Optional[float] = ...) -> None: ...

class WindowShare(_message.Message):
    __slots__ = ("device", "owner", "gpu_instance_id", "part", "method", "confidence", "energy_mj")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    device: int
    owner: int
    gpu_instance_id: int
    part: EnergyPart
    method: AttributionMethod
    confidence: AttributionConfidence
    energy_mj: int
    def __init__(self, device: _Optional[int] = ..., owner: _Optional[int] = ..., gpu_instance_id: _Optional[int] = ..., part: _Optional[_Union[EnergyPart, str]] = ..., method: _Optional[_Union[AttributionMethod, str]] = ..., confidence: _Optional[_Union[AttributionConfidence, str]] = ..., energy_mj: _Optional[int] = ...) -> None: ...

class EnergyWindow(_message.Message):
    __slots__ = ("incarnation", "number", "begin_ns", "end_ns", "devices", "owners", "shares")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    number: int
    begin_ns: int
    end_ns: int
    devices: _containers.RepeatedCompositeFieldContainer[WindowDevice]
    owners: _containers.RepeatedCompositeFieldContainer[EnergyOwner]
    shares: _containers.RepeatedCompositeFieldContainer[WindowShare]
    def __init__(self, incarnation: _Optional[int] = ..., number: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[WindowDevice, _Mapping]]] = ..., owners: _Optional[_Iterable[_Union[EnergyOwner, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[WindowShare, _Mapping]]] = ...) -> None: ...

class EnergyAcknowledgement(_message.Message):
    __slots__ = ("incarnation", "number", "refused", "refused_reason")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REASON_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    number: int
    refused: int
    refused_reason: str
    def __init__(self, incarnation: _Optional[int] = ..., number: _Optional[int] = ..., refused: _Optional[int] = ..., refused_reason: _Optional[str] = ...) -> None: ...
