"""Faults: how a call fails, the same value on both sides of the wire.

All up to PermissionDenied, and the message, are for the caller to act on; Internal is for us. Must not know what a
call means.
"""

from typing import Any, ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from eelgrid_protos.errors import ContractError, Violation

DETAILS_KEY = "grpc-status-details-bin"
# Of google.rpc.ErrorInfo, by which other languages know a NotLeader.
_DOMAIN, _NOT_LEADER, _LEADER = "eelgrid.io", "NOT_LEADER", "leader"


class Fault(Exception):
    """A call failed; `code` is the gRPC status."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()) -> None:
        self.message = message
        self.violations = violations
        super().__init__("; ".join([message, *map(str, violations)]))


class InvalidArgument(Fault):
    """The caller's message breaks a rule."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(Fault):
    """No object has this name."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(Fault):
    """Another object has this name."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(Fault):
    """The state must change first."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(Fault):
    """The object was changed concurrently."""

    code = grpc.StatusCode.ABORTED


class ResourceExhausted(Fault):
    """A limit is reached; try later or raise it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PermissionDenied(Fault):
    """The caller lacks permission."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unavailable(Fault):
    """The server cannot be reached now; the call can be repeated."""

    code = grpc.StatusCode.UNAVAILABLE


class NotLeader(Unavailable):
    """The controller does not lead, so nothing was done; `leader` is the address of who does, empty if unknown."""

    def __init__(self, message: str, violations: tuple[Violation, ...] = (), *, leader: str = "") -> None:
        super().__init__(message, violations)
        self.leader = leader


class NoLeader(Unavailable):
    """None of several controllers leads; made by the caller, from what each of them answered."""


class DeadlineExceeded(Fault):
    """No answer in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(Fault):
    """A bug of the server."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[grpc.StatusCode, type[Fault]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        Aborted,
        ResourceExhausted,
        PermissionDenied,
        Unavailable,
        DeadlineExceeded,
        Internal,
    )
}


def fault_of_contract(error: ContractError) -> InvalidArgument:
    """Converts a broken contract into the fault that the caller gets."""
    return InvalidArgument(error.message, error.violations)


def status_details(fault: Fault) -> bytes:
    """Encodes google.rpc.Status with a BadRequest detail, as gRPC carries it in trailing metadata."""
    status = status_pb2.Status(code=code_pb2.Code.Value(fault.code.name), message=fault.message)
    if fault.violations:
        bad_request = error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field=violation.field, description=f"{violation.problem}; {violation.remedy}"
                )
                for violation in fault.violations[:64]
            ]
        )
        packed = AnyMessage()
        packed.Pack(bad_request)
        status.details.append(packed)
    if isinstance(fault, NotLeader):
        info = error_details_pb2.ErrorInfo(reason=_NOT_LEADER, domain=_DOMAIN, metadata={_LEADER: fault.leader[:300]})
        packed = AnyMessage()
        packed.Pack(info)
        status.details.append(packed)
    data: bytes = status.SerializeToString()
    return data


def _leader_of(details: bytes) -> str | None:
    """Returns whom a controller named that does not lead; None if it did not say that."""
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and (info.domain, info.reason) == (_DOMAIN, _NOT_LEADER):
            return str(info.metadata.get(_LEADER, ""))
    return None


def _violations(details: bytes) -> tuple[Violation, ...]:
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return ()
    found = []
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
            for entry in bad_request.field_violations:
                problem, _, remedy = entry.description.partition("; ")
                found.append(Violation(entry.field, problem, remedy))
    return tuple(found)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def build_fault(number: int, message: str, details: bytes) -> Fault | None:
    """Returns the fault of a status by its number, None for OK."""
    code = _CODES.get(number, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else _build_fault(code, message or code.name, details)


def fault_from(error: grpc.RpcError) -> Fault:
    """Returns the fault behind a failed call, with its field violations if the server sent them."""
    code: grpc.StatusCode = error.code()
    trailing: Any = error.trailing_metadata() or ()
    details = next((value for key, value in trailing if key == DETAILS_KEY), b"")
    return _build_fault(code, error.details() or code.name, details)


def _build_fault(code: grpc.StatusCode, message: str, details: bytes) -> Fault:
    # A stopping server cancels open calls; cancellation on this side never gets here.
    cls = Unavailable if code is grpc.StatusCode.CANCELLED else _BY_CODE.get(code)
    if cls is Unavailable and (leader := _leader_of(details)) is not None:
        return NotLeader(message, _violations(details), leader=leader)
    if cls is None:
        return Internal(f"{code.name}: {message}")
    return cls(message, _violations(details))
