from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reading(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READING_UNSPECIFIED: _ClassVar[Reading]
    READING_POWER_W: _ClassVar[Reading]
    READING_ENERGY_J: _ClassVar[Reading]
    READING_UTILIZATION_RATIO: _ClassVar[Reading]
    READING_MEMORY_USED_BYTES: _ClassVar[Reading]
    READING_SM_CLOCK_MHZ: _ClassVar[Reading]
    READING_MEMORY_CLOCK_MHZ: _ClassVar[Reading]
    READING_TEMPERATURE_C: _ClassVar[Reading]
    READING_POWER_LIMIT_W: _ClassVar[Reading]
    READING_EVENT_REASONS_MASK: _ClassVar[Reading]
    READING_POWER_AVERAGE_W: _ClassVar[Reading]
    READING_MEMORY_UTILIZATION_RATIO: _ClassVar[Reading]
    READING_POWER_LIMIT_REQUESTED_W: _ClassVar[Reading]
    READING_MEMORY_TEMPERATURE_C: _ClassVar[Reading]
    READING_MEMORY_RESERVED_BYTES: _ClassVar[Reading]
    READING_MEMORY_POWER_W: _ClassVar[Reading]
    READING_MODULE_POWER_W: _ClassVar[Reading]
    READING_ECC_CORRECTED_VOLATILE: _ClassVar[Reading]
    READING_ECC_UNCORRECTED_VOLATILE: _ClassVar[Reading]
    READING_ECC_CORRECTED_AGGREGATE: _ClassVar[Reading]
    READING_ECC_UNCORRECTED_AGGREGATE: _ClassVar[Reading]
    READING_REMAPPED_ROWS_CORRECTABLE: _ClassVar[Reading]
    READING_REMAPPED_ROWS_UNCORRECTABLE: _ClassVar[Reading]
    READING_ROW_REMAP_PENDING: _ClassVar[Reading]
    READING_ROW_REMAP_FAILED: _ClassVar[Reading]
    READING_RECOVERY_ACTION: _ClassVar[Reading]
    READING_PCIE_LINK_GENERATION: _ClassVar[Reading]
    READING_PCIE_LINK_WIDTH: _ClassVar[Reading]
    READING_PCIE_REPLAYS: _ClassVar[Reading]
    READING_PCIE_SENT_BYTES_PER_S: _ClassVar[Reading]
    READING_PCIE_RECEIVED_BYTES_PER_S: _ClassVar[Reading]
    READING_NVLINK_SENT_BYTES: _ClassVar[Reading]
    READING_NVLINK_RECEIVED_BYTES: _ClassVar[Reading]
    READING_NVLINK_ACTIVE_LINKS: _ClassVar[Reading]
    READING_NVLINK_ERRORS: _ClassVar[Reading]
    READING_FABRIC_STATE: _ClassVar[Reading]
    READING_GRAPHICS_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_SM_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_SM_OCCUPANCY_RATIO: _ClassVar[Reading]
    READING_TENSOR_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_MEMORY_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_FP16_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_FP32_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_FP64_ACTIVITY_RATIO: _ClassVar[Reading]
    READING_PERFORMANCE_STATE: _ClassVar[Reading]
    READING_PROCESSES: _ClassVar[Reading]
    READING_HOST_CPU_UTILIZATION_RATIO: _ClassVar[Reading]
    READING_HOST_MEMORY_USED_BYTES: _ClassVar[Reading]
    READING_HOST_CPU_ENERGY_J: _ClassVar[Reading]
    READING_HOST_MEMORY_ENERGY_J: _ClassVar[Reading]
    READING_HOST_DISK_READ_BYTES: _ClassVar[Reading]
    READING_HOST_DISK_WRITTEN_BYTES: _ClassVar[Reading]
    READING_HOST_NETWORK_RECEIVED_BYTES: _ClassVar[Reading]
    READING_HOST_NETWORK_SENT_BYTES: _ClassVar[Reading]

class AbsenceReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABSENCE_REASON_UNSPECIFIED: _ClassVar[AbsenceReason]
    ABSENCE_REASON_NOT_SUPPORTED: _ClassVar[AbsenceReason]
    ABSENCE_REASON_NO_PERMISSION: _ClassVar[AbsenceReason]
    ABSENCE_REASON_GPU_LOST: _ClassVar[AbsenceReason]
    ABSENCE_REASON_TIMED_OUT: _ClassVar[AbsenceReason]
    ABSENCE_REASON_IMPLAUSIBLE: _ClassVar[AbsenceReason]
    ABSENCE_REASON_NOT_SAMPLED: _ClassVar[AbsenceReason]

class AccessLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_LEVEL_UNSPECIFIED: _ClassVar[AccessLevel]
    ACCESS_LEVEL_READ_ONLY: _ClassVar[AccessLevel]
    ACCESS_LEVEL_MIG_MONITOR: _ClassVar[AccessLevel]
    ACCESS_LEVEL_MIG_CONFIG: _ClassVar[AccessLevel]
    ACCESS_LEVEL_ROOT: _ClassVar[AccessLevel]

class NodeEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_EVENT_KIND_UNSPECIFIED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_GPU_LOST: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_GPU_RETURNED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_COUNTER_RESET: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_CLOCK_STEP: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_SAMPLES_DROPPED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_LEASE_EXPIRED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_XID: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_HEALTH: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_SETTING_DRIFT: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_ENFORCEMENT_SUSPENDED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_SETTING_RESTORED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_LAYOUT_CHANGED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_GPU_HUNG: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_GPU_QUARANTINED: _ClassVar[NodeEventKind]
    NODE_EVENT_KIND_GPU_IDLE_HELD: _ClassVar[NodeEventKind]
READING_UNSPECIFIED: Reading
READING_POWER_W: Reading
READING_ENERGY_J: Reading
READING_UTILIZATION_RATIO: Reading
READING_MEMORY_USED_BYTES: Reading
READING_SM_CLOCK_MHZ: Reading
READING_MEMORY_CLOCK_MHZ: Reading
READING_TEMPERATURE_C: Reading
READING_POWER_LIMIT_W: Reading
READING_EVENT_REASONS_MASK: Reading
READING_POWER_AVERAGE_W: Reading
READING_MEMORY_UTILIZATION_RATIO: Reading
READING_POWER_LIMIT_REQUESTED_W: Reading
READING_MEMORY_TEMPERATURE_C: Reading
READING_MEMORY_RESERVED_BYTES: Reading
READING_MEMORY_POWER_W: Reading
READING_MODULE_POWER_W: Reading
READING_ECC_CORRECTED_VOLATILE: Reading
READING_ECC_UNCORRECTED_VOLATILE: Reading
READING_ECC_CORRECTED_AGGREGATE: Reading
READING_ECC_UNCORRECTED_AGGREGATE: Reading
READING_REMAPPED_ROWS_CORRECTABLE: Reading
READING_REMAPPED_ROWS_UNCORRECTABLE: Reading
READING_ROW_REMAP_PENDING: Reading
READING_ROW_REMAP_FAILED: Reading
READING_RECOVERY_ACTION: Reading
READING_PCIE_LINK_GENERATION: Reading
READING_PCIE_LINK_WIDTH: Reading
READING_PCIE_REPLAYS: Reading
READING_PCIE_SENT_BYTES_PER_S: Reading
READING_PCIE_RECEIVED_BYTES_PER_S: Reading
READING_NVLINK_SENT_BYTES: Reading
READING_NVLINK_RECEIVED_BYTES: Reading
READING_NVLINK_ACTIVE_LINKS: Reading
READING_NVLINK_ERRORS: Reading
READING_FABRIC_STATE: Reading
READING_GRAPHICS_ACTIVITY_RATIO: Reading
READING_SM_ACTIVITY_RATIO: Reading
READING_SM_OCCUPANCY_RATIO: Reading
READING_TENSOR_ACTIVITY_RATIO: Reading
READING_MEMORY_ACTIVITY_RATIO: Reading
READING_FP16_ACTIVITY_RATIO: Reading
READING_FP32_ACTIVITY_RATIO: Reading
READING_FP64_ACTIVITY_RATIO: Reading
READING_PERFORMANCE_STATE: Reading
READING_PROCESSES: Reading
READING_HOST_CPU_UTILIZATION_RATIO: Reading
READING_HOST_MEMORY_USED_BYTES: Reading
READING_HOST_CPU_ENERGY_J: Reading
READING_HOST_MEMORY_ENERGY_J: Reading
READING_HOST_DISK_READ_BYTES: Reading
READING_HOST_DISK_WRITTEN_BYTES: Reading
READING_HOST_NETWORK_RECEIVED_BYTES: Reading
READING_HOST_NETWORK_SENT_BYTES: Reading
ABSENCE_REASON_UNSPECIFIED: AbsenceReason
ABSENCE_REASON_NOT_SUPPORTED: AbsenceReason
ABSENCE_REASON_NO_PERMISSION: AbsenceReason
ABSENCE_REASON_GPU_LOST: AbsenceReason
ABSENCE_REASON_TIMED_OUT: AbsenceReason
ABSENCE_REASON_IMPLAUSIBLE: AbsenceReason
ABSENCE_REASON_NOT_SAMPLED: AbsenceReason
ACCESS_LEVEL_UNSPECIFIED: AccessLevel
ACCESS_LEVEL_READ_ONLY: AccessLevel
ACCESS_LEVEL_MIG_MONITOR: AccessLevel
ACCESS_LEVEL_MIG_CONFIG: AccessLevel
ACCESS_LEVEL_ROOT: AccessLevel
NODE_EVENT_KIND_UNSPECIFIED: NodeEventKind
NODE_EVENT_KIND_GPU_LOST: NodeEventKind
NODE_EVENT_KIND_GPU_RETURNED: NodeEventKind
NODE_EVENT_KIND_COUNTER_RESET: NodeEventKind
NODE_EVENT_KIND_CLOCK_STEP: NodeEventKind
NODE_EVENT_KIND_SAMPLES_DROPPED: NodeEventKind
NODE_EVENT_KIND_LEASE_EXPIRED: NodeEventKind
NODE_EVENT_KIND_XID: NodeEventKind
NODE_EVENT_KIND_HEALTH: NodeEventKind
NODE_EVENT_KIND_SETTING_DRIFT: NodeEventKind
NODE_EVENT_KIND_ENFORCEMENT_SUSPENDED: NodeEventKind
NODE_EVENT_KIND_SETTING_RESTORED: NodeEventKind
NODE_EVENT_KIND_LAYOUT_CHANGED: NodeEventKind
NODE_EVENT_KIND_GPU_HUNG: NodeEventKind
NODE_EVENT_KIND_GPU_QUARANTINED: NodeEventKind
NODE_EVENT_KIND_GPU_IDLE_HELD: NodeEventKind

class Absence(_message.Message):
    __slots__ = ("reason", "cells")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    reason: AbsenceReason
    cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reason: _Optional[_Union[AbsenceReason, str]] = ..., cells: _Optional[_Iterable[int]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("reading", "values", "absences")
    READING_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_FIELD_NUMBER: _ClassVar[int]
    reading: Reading
    values: _containers.RepeatedScalarFieldContainer[float]
    absences: _containers.RepeatedCompositeFieldContainer[Absence]
    def __init__(self, reading: _Optional[_Union[Reading, str]] = ..., values: _Optional[_Iterable[float]] = ..., absences: _Optional[_Iterable[_Union[Absence, _Mapping]]] = ...) -> None: ...

class SampleBatch(_message.Message):
    __slots__ = ("sequence", "inventory_generation", "time_ns", "gpu_columns", "host_columns", "dropped_ticks", "instance_columns")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    GPU_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HOST_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TICKS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    inventory_generation: int
    time_ns: _containers.RepeatedScalarFieldContainer[int]
    gpu_columns: _containers.RepeatedCompositeFieldContainer[Column]
    host_columns: _containers.RepeatedCompositeFieldContainer[Column]
    dropped_ticks: int
    instance_columns: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, sequence: _Optional[int] = ..., inventory_generation: _Optional[int] = ..., time_ns: _Optional[_Iterable[int]] = ..., gpu_columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., host_columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., dropped_ticks: _Optional[int] = ..., instance_columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...

class GpuInstance(_message.Message):
    __slots__ = ("id", "profile_id", "profile", "start", "size", "compute_instances")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    id: int
    profile_id: int
    profile: str
    start: int
    size: int
    compute_instances: _containers.RepeatedCompositeFieldContainer[ComputeInstance]
    def __init__(self, id: _Optional[int] = ..., profile_id: _Optional[int] = ..., profile: _Optional[str] = ..., start: _Optional[int] = ..., size: _Optional[int] = ..., compute_instances: _Optional[_Iterable[_Union[ComputeInstance, _Mapping]]] = ...) -> None: ...

class ComputeInstance(_message.Message):
    __slots__ = ("id", "profile_id", "uuid", "generation", "start", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    profile_id: int
    uuid: str
    generation: int
    start: int
    size: int
    def __init__(self, id: _Optional[int] = ..., profile_id: _Optional[int] = ..., uuid: _Optional[str] = ..., generation: _Optional[int] = ..., start: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("uuid", "index", "pci_bus_id", "product", "model", "catalogue_key", "memory_bytes", "power_limit_default_w", "power_limit_min_w", "power_limit_max_w", "mig_capable", "mig_enabled", "mig_pending", "gpu_instances", "lost", "cordon", "numa_node", "leases")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_KEY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_DEFAULT_W_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_MIN_W_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_MAX_W_FIELD_NUMBER: _ClassVar[int]
    MIG_CAPABLE_FIELD_NUMBER: _ClassVar[int]
    MIG_ENABLED_FIELD_NUMBER: _ClassVar[int]
    MIG_PENDING_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CORDON_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    index: int
    pci_bus_id: str
    product: str
    model: str
    catalogue_key: str
    memory_bytes: int
    power_limit_default_w: float
    power_limit_min_w: float
    power_limit_max_w: float
    mig_capable: bool
    mig_enabled: bool
    mig_pending: bool
    gpu_instances: _containers.RepeatedCompositeFieldContainer[GpuInstance]
    lost: bool
    cordon: str
    numa_node: int
    leases: _containers.RepeatedCompositeFieldContainer[DeviceLease]
    def __init__(self, uuid: _Optional[str] = ..., index: _Optional[int] = ..., pci_bus_id: _Optional[str] = ..., product: _Optional[str] = ..., model: _Optional[str] = ..., catalogue_key: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., power_limit_default_w: _Optional[float] = ..., power_limit_min_w: _Optional[float] = ..., power_limit_max_w: _Optional[float] = ..., mig_capable: bool = ..., mig_enabled: bool = ..., mig_pending: bool = ..., gpu_instances: _Optional[_Iterable[_Union[GpuInstance, _Mapping]]] = ..., lost: bool = ..., cordon: _Optional[str] = ..., numa_node: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[DeviceLease, _Mapping]]] = ...) -> None: ...

class DeviceLease(_message.Message):
    __slots__ = ("device_uuid", "engine", "owner", "since_ns", "unknown")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    engine: str
    owner: str
    since_ns: int
    unknown: str
    def __init__(self, device_uuid: _Optional[str] = ..., engine: _Optional[str] = ..., owner: _Optional[str] = ..., since_ns: _Optional[int] = ..., unknown: _Optional[str] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("node_name", "generation", "agent_version", "boot_id", "driver_version", "cpu_milli", "memory_bytes", "pool", "labels", "gpus", "simulated", "access", "links", "topology", "runs_processes", "model_data", "fence_after_s", "sets_limits", "limits_before_starts")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    RUNS_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_DATA_FIELD_NUMBER: _ClassVar[int]
    FENCE_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SETS_LIMITS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_BEFORE_STARTS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    generation: int
    agent_version: str
    boot_id: str
    driver_version: str
    cpu_milli: int
    memory_bytes: int
    pool: str
    labels: _containers.ScalarMap[str, str]
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    simulated: bool
    access: AccessLevel
    links: _containers.RepeatedCompositeFieldContainer[GpuLink]
    topology: _containers.RepeatedScalarFieldContainer[str]
    runs_processes: bool
    model_data: _containers.RepeatedScalarFieldContainer[str]
    fence_after_s: float
    sets_limits: bool
    limits_before_starts: bool
    def __init__(self, node_name: _Optional[str] = ..., generation: _Optional[int] = ..., agent_version: _Optional[str] = ..., boot_id: _Optional[str] = ..., driver_version: _Optional[str] = ..., cpu_milli: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., pool: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., simulated: bool = ..., access: _Optional[_Union[AccessLevel, str]] = ..., links: _Optional[_Iterable[_Union[GpuLink, _Mapping]]] = ..., topology: _Optional[_Iterable[str]] = ..., runs_processes: bool = ..., model_data: _Optional[_Iterable[str]] = ..., fence_after_s: _Optional[float] = ..., sets_limits: bool = ..., limits_before_starts: bool = ...) -> None: ...

class GpuLink(_message.Message):
    __slots__ = ("one", "other", "ancestor", "nvlinks")
    ONE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    ANCESTOR_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    one: int
    other: int
    ancestor: int
    nvlinks: int
    def __init__(self, one: _Optional[int] = ..., other: _Optional[int] = ..., ancestor: _Optional[int] = ..., nvlinks: _Optional[int] = ...) -> None: ...

class NodeEvent(_message.Message):
    __slots__ = ("kind", "time_ns", "gpu_uuid", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: NodeEventKind
    time_ns: int
    gpu_uuid: str
    detail: str
    def __init__(self, kind: _Optional[_Union[NodeEventKind, str]] = ..., time_ns: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
