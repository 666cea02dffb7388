"""Errors: why a call of the client failed, one class for each reason that a program may act on.

Each has the problem (`message`), what to do about it (`remedy`) and, if a request was invalid, its `violations` by
field. The controller's text is kept: `str(error)` is what eelctl would print.

EelgridError
├── InvalidSettingsError     the client was created with settings that cannot work
├── InvalidArgumentError     the request breaks a rule; `violations` names the fields
├── NotFoundError            no object has this name
├── AlreadyExistsError       another object has this name
├── FailedPreconditionError  the state must change first
├── AbortedError             somebody else changed the object first
├── ResourceExhaustedError   a limit is reached
├── PermissionDeniedError    the certificate does not allow the call
├── UnavailableError         no controller answers
├── DeadlineExceededError    no answer in time
│   └── WaitTimeoutError     the workload did not reach the state in time
├── WorkloadEndedError       the workload ended before it reached the state
└── InternalError            a fault of the controller
"""

from eelgrid_protos import faults, transport
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.messages import Workload

_NOT_CONNECTED = "failed to connect to all addresses"


class EelgridError(Exception):
    """A call failed; also the base of all other errors of this package."""

    default_remedy = "check the controller's log"

    def __init__(self, message: str, remedy: str = "", violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(message, remedy, violations)
        self.message = message
        self.remedy = remedy or self.default_remedy
        self.violations = violations

    def __str__(self) -> str:
        """Returns the problem, the invalid fields and the remedy."""
        return "; ".join([self.message, *map(str, self.violations), self.remedy])


class InvalidSettingsError(EelgridError):
    """The client was created with settings that cannot work."""

    default_remedy = "check address, tls and insecure"


class InvalidArgumentError(EelgridError):
    """The request breaks a rule; `violations` has the fields."""

    default_remedy = "correct the request and repeat the call"


class NotFoundError(EelgridError):
    """No object has this name."""

    default_remedy = "list the names that exist"


class AlreadyExistsError(EelgridError):
    """Another object has this name."""

    default_remedy = "choose another name"


class FailedPreconditionError(EelgridError):
    """The state must change before the call can succeed."""

    default_remedy = "resolve the condition, then repeat the call"


class AbortedError(EelgridError):
    """Somebody else changed the object first."""

    default_remedy = "read the current state, then repeat the change"


class ResourceExhaustedError(EelgridError):
    """A limit is reached."""

    default_remedy = "wait, or cancel work that is not needed, then repeat the call"


class PermissionDeniedError(EelgridError):
    """The certificate does not allow the call."""

    default_remedy = "use a certificate with the right to do this; who_am_i() returns the rights of yours"


class UnavailableError(EelgridError):
    """No controller answers; reads were repeated before this was raised."""

    default_remedy = "start eelgrid-controller, or give its address as Client(address) or in EELGRID_CONTROLLER"


class DeadlineExceededError(EelgridError):
    """No answer in time; a call that changes something may have been carried out."""

    default_remedy = "raise timeout_s, or check the controller's log"


class WaitTimeoutError(DeadlineExceededError):
    """The workload did not reach the state in time; `workload` is its last known state."""

    def __init__(self, message: str, remedy: str = "", workload: Workload | None = None) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, workload)
        self.workload = workload


class WorkloadEndedError(EelgridError):
    """The workload ended before it reached the state; `workload` is its last state."""

    default_remedy = "submit it again if it is still wanted"

    def __init__(self, message: str, remedy: str = "", workload: Workload | None = None) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, workload)
        self.workload = workload


class InternalError(EelgridError):
    """A fault of the controller."""


_BY_FAULT: dict[type[faults.Fault], type[EelgridError]] = {
    faults.InvalidArgument: InvalidArgumentError,
    faults.NotFound: NotFoundError,
    faults.AlreadyExists: AlreadyExistsError,
    faults.FailedPrecondition: FailedPreconditionError,
    faults.Aborted: AbortedError,
    faults.ResourceExhausted: ResourceExhaustedError,
    faults.PermissionDenied: PermissionDeniedError,
    faults.Unavailable: UnavailableError,
    faults.NotLeader: UnavailableError,
    faults.DeadlineExceeded: DeadlineExceededError,
    faults.Internal: InternalError,
}


def error_from_fault(fault: faults.Fault, *, address: str, timeout_s: float) -> EelgridError:
    """Returns the error for a failed call; the controller writes a remedy after the first semicolon."""
    if isinstance(fault, faults.Unavailable) and fault.message.startswith(_NOT_CONNECTED):
        return UnavailableError(f"no controller answers at {address} ({fault.message.rpartition(': ')[2]})")
    if isinstance(fault, faults.DeadlineExceeded):
        return DeadlineExceededError(f"no answer from {address} in {timeout_s:g} s")
    if isinstance(fault, faults.NoLeader):
        return UnavailableError(fault.message, "wait until one leads, or name all controllers")
    message, _, remedy = fault.message.partition("; ")
    return _BY_FAULT.get(type(fault), InternalError)(message, remedy, fault.violations)


def error_from_contract(error: ContractError) -> InvalidArgumentError:
    """Returns the error for a request that the client itself refuses."""
    return InvalidArgumentError(error.message, "correct the fields; nothing was sent", error.violations)


def error_from_settings(error: transport.ListenError, address: str) -> InvalidSettingsError:
    """Returns the error for settings with which no connection is opened."""
    if isinstance(error, transport.BindRefused) and "is another machine" in str(error):
        remedy = "pass tls=TlsFiles(certificate, key, authority), or insecure=True to do without"
        return InvalidSettingsError(f"{address} is another machine and no TLS files are given", remedy)
    message, _, remedy = str(error).partition("; ")
    return InvalidSettingsError(message, remedy)
