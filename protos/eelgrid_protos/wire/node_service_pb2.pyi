from eelgrid_protos.wire import energy_pb2 as _energy_pb2
from eelgrid_protos.wire import node_pb2 as _node_pb2
from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInventoryRequest(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...

class GetInventoryResponse(_message.Message):
    __slots__ = ("inventory",)
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    inventory: _node_pb2.Inventory
    def __init__(self, inventory: _Optional[_Union[_node_pb2.Inventory, _Mapping]] = ...) -> None: ...

class GetSamplesRequest(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...

class GetSamplesResponse(_message.Message):
    __slots__ = ("samples", "age_s")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    samples: _node_pb2.SampleBatch
    age_s: float
    def __init__(self, samples: _Optional[_Union[_node_pb2.SampleBatch, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class GetNodePlanRequest(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...

class GetNodePlanResponse(_message.Message):
    __slots__ = ("plan", "applied", "lease_left_s")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.NodePlan
    applied: _plan_pb2.PlanApplied
    lease_left_s: float
    def __init__(self, plan: _Optional[_Union[_plan_pb2.NodePlan, _Mapping]] = ..., applied: _Optional[_Union[_plan_pb2.PlanApplied, _Mapping]] = ..., lease_left_s: _Optional[float] = ...) -> None: ...

class GetNodeEnergyRequest(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...

class GetNodeEnergyResponse(_message.Message):
    __slots__ = ("devices", "owners", "recent", "anomalies", "status", "rows_left_out")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    ANOMALIES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROWS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[_energy_pb2.DeviceEnergy]
    owners: _containers.RepeatedCompositeFieldContainer[_energy_pb2.OwnedEnergy]
    recent: _containers.RepeatedCompositeFieldContainer[_energy_pb2.OwnedEnergy]
    anomalies: _containers.RepeatedCompositeFieldContainer[_energy_pb2.EnergyAnomaly]
    status: _energy_pb2.EnergyStatus
    rows_left_out: int
    def __init__(self, devices: _Optional[_Iterable[_Union[_energy_pb2.DeviceEnergy, _Mapping]]] = ..., owners: _Optional[_Iterable[_Union[_energy_pb2.OwnedEnergy, _Mapping]]] = ..., recent: _Optional[_Iterable[_Union[_energy_pb2.OwnedEnergy, _Mapping]]] = ..., anomalies: _Optional[_Iterable[_Union[_energy_pb2.EnergyAnomaly, _Mapping]]] = ..., status: _Optional[_Union[_energy_pb2.EnergyStatus, str]] = ..., rows_left_out: _Optional[int] = ...) -> None: ...
