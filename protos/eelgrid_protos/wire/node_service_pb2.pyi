from eelgrid_protos.wire import node_pb2 as _node_pb2
from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
