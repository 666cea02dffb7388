"""Faults: how a call fails, the same value on both sides of the wire.

Fault                     a call failed; `code` is the gRPC status
├── InvalidArgument       the caller's message breaks a rule; each field is named
├── NotFound              nothing has this name
├── AlreadyExists         the name is taken by something else
├── FailedPrecondition    the state must change first
├── Aborted               somebody else changed it in between
├── ResourceExhausted     a limit is reached; try later or raise it
├── PermissionDenied      the caller may not
├── Unavailable           nobody answers now; the call can be repeated
├── DeadlineExceeded      no answer in time
└── Internal              a fault of ours

The first seven and the message are the caller's business; Internal is ours.
"""

from typing import Any, ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from eelgrid_protos.errors import ContractError, Violation

DETAILS_KEY = "grpc-status-details-bin"


class Fault(Exception):
    """A call failed."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()) -> None:
        self.message = message
        self.violations = violations
        super().__init__("; ".join([message, *map(str, violations)]))


class InvalidArgument(Fault):
    """The caller's message breaks a rule."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(Fault):
    """Nothing has this name."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(Fault):
    """The name is taken by something else."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(Fault):
    """The state must change first."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(Fault):
    """Somebody else changed it in between."""

    code = grpc.StatusCode.ABORTED


class ResourceExhausted(Fault):
    """A limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PermissionDenied(Fault):
    """The caller may not."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unavailable(Fault):
    """Nobody answers now."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(Fault):
    """No answer in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(Fault):
    """A fault of ours."""

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
    """A broken contract, as the caller should hear of it."""
    return InvalidArgument(error.message, error.violations)


def status_details(fault: Fault) -> bytes:
    """google.rpc.Status with a BadRequest detail, as gRPC carries it in trailing metadata."""
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
    data: bytes = status.SerializeToString()
    return data


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


def fault_from(error: grpc.RpcError) -> Fault:
    """The fault behind a failed call, with its field violations where the server sent them."""
    code: grpc.StatusCode = error.code()
    trailing: Any = error.trailing_metadata() or ()
    details = next((value for key, value in trailing if key == DETAILS_KEY), b"")
    # A server that stops cancels what is open; who cancels on this side never gets here.
    cls = Unavailable if code is grpc.StatusCode.CANCELLED else _BY_CODE.get(code)
    message = error.details() or code.name
    if cls is None:
        return Internal(f"{code.name}: {message}")
    return cls(message, _violations(details))
