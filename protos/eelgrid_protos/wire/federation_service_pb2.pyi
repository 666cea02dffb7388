from eelgrid_protos.wire import operator_service_pb2 as _operator_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClusterStatus(_message.Message):
    __slots__ = ("name", "addresses", "problem", "summary", "currency", "price_per_kwh", "carbon_kg_per_kwh", "workloads", "left_out", "power_budget_w", "page_url")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    CARBON_KG_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    POWER_BUDGET_W_FIELD_NUMBER: _ClassVar[int]
    PAGE_URL_FIELD_NUMBER: _ClassVar[int]
    name: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    summary: _operator_service_pb2.Summary
    currency: str
    price_per_kwh: float
    carbon_kg_per_kwh: float
    workloads: int
    left_out: int
    power_budget_w: float
    page_url: str
    def __init__(self, name: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ..., summary: _Optional[_Union[_operator_service_pb2.Summary, _Mapping]] = ..., currency: _Optional[str] = ..., price_per_kwh: _Optional[float] = ..., carbon_kg_per_kwh: _Optional[float] = ..., workloads: _Optional[int] = ..., left_out: _Optional[int] = ..., power_budget_w: _Optional[float] = ..., page_url: _Optional[str] = ...) -> None: ...

class ListClustersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClustersResponse(_message.Message):
    __slots__ = ("clusters", "omitted")
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    clusters: _containers.RepeatedCompositeFieldContainer[ClusterStatus]
    omitted: int
    def __init__(self, clusters: _Optional[_Iterable[_Union[ClusterStatus, _Mapping]]] = ..., omitted: _Optional[int] = ...) -> None: ...

class DispatchedCopy(_message.Message):
    __slots__ = ("cluster", "phase", "started", "problem")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    phase: str
    started: bool
    problem: str
    def __init__(self, cluster: _Optional[str] = ..., phase: _Optional[str] = ..., started: bool = ..., problem: _Optional[str] = ...) -> None: ...

class GetDispatchRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class GetDispatchResponse(_message.Message):
    __slots__ = ("workload_id", "chosen", "copies", "decision", "moving_to", "cancelled", "failed")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    chosen: str
    copies: _containers.RepeatedCompositeFieldContainer[DispatchedCopy]
    decision: _containers.RepeatedScalarFieldContainer[str]
    moving_to: str
    cancelled: bool
    failed: bool
    def __init__(self, workload_id: _Optional[str] = ..., chosen: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[DispatchedCopy, _Mapping]]] = ..., decision: _Optional[_Iterable[str]] = ..., moving_to: _Optional[str] = ..., cancelled: bool = ..., failed: bool = ...) -> None: ...
