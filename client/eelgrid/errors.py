"""Errors: why a call of the client failed, one class for each reason that a program may act on.

Each has the problem (`message`), what to do about it (`remedy`) and, if a request was invalid, its `violations` by
field. The controller's text is kept: `str(error)` is what eelctl would print.

EelgridError
├── InvalidSettings       the client was created with settings that cannot work
├── InvalidArgument       the request breaks a rule; `violations` names the fields
├── NotFound              no object has this name
├── AlreadyExists         another object has this name
├── FailedPrecondition    the state must change first
├── Aborted               somebody else changed the object first
├── ResourceExhausted     a limit is reached
├── PermissionDenied      the certificate does not allow the call
├── Unavailable           no controller answers
├── DeadlineExceeded      no answer in time
│   └── WaitTimeout       the workload did not reach the state in time
├── WorkloadEnded         the workload ended before it reached the state
└── Internal              a fault of the controller
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


class InvalidSettings(EelgridError):
    """The client was created with settings that cannot work."""

    default_remedy = "check address, tls and insecure"


class InvalidArgument(EelgridError):
    """The request breaks a rule; `violations` has the fields."""

    default_remedy = "correct the request and repeat the call"


class NotFound(EelgridError):
    """No object has this name."""

    default_remedy = "list the names that exist"


class AlreadyExists(EelgridError):
    """Another object has this name."""

    default_remedy = "choose another name"


class FailedPrecondition(EelgridError):
    """The state must change before the call can succeed."""

    default_remedy = "resolve the condition, then repeat the call"


class Aborted(EelgridError):
    """Somebody else changed the object first."""

    default_remedy = "read the current state, then repeat the change"


class ResourceExhausted(EelgridError):
    """A limit is reached."""

    default_remedy = "wait, or cancel work that is not needed, then repeat the call"


class PermissionDenied(EelgridError):
    """The certificate does not allow the call."""

    default_remedy = "use a certificate with the right to do this; who_am_i() returns the rights of yours"


class Unavailable(EelgridError):
    """No controller answers; reads were repeated before this was raised."""

    default_remedy = "start eelgrid-controller, or give its address as Client(address) or in EELGRID_CONTROLLER"


class DeadlineExceeded(EelgridError):
    """No answer in time; a call that changes something may have been carried out."""

    default_remedy = "raise timeout_s, or check the controller's log"


class WaitTimeout(DeadlineExceeded):
    """The workload did not reach the state in time; `workload` is its last known state."""

    def __init__(self, message: str, remedy: str = "", workload: Workload | None = None) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, workload)
        self.workload = workload


class WorkloadEnded(EelgridError):
    """The workload ended before it reached the state; `workload` is its last state."""

    default_remedy = "submit it again if it is still wanted"

    def __init__(self, message: str, remedy: str = "", workload: Workload | None = None) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, workload)
        self.workload = workload


class Internal(EelgridError):
    """A fault of the controller."""


_BY_FAULT: dict[type[faults.Fault], type[EelgridError]] = {
    faults.InvalidArgument: InvalidArgument,
    faults.NotFound: NotFound,
    faults.AlreadyExists: AlreadyExists,
    faults.FailedPrecondition: FailedPrecondition,
    faults.Aborted: Aborted,
    faults.ResourceExhausted: ResourceExhausted,
    faults.PermissionDenied: PermissionDenied,
    faults.Unavailable: Unavailable,
    faults.DeadlineExceeded: DeadlineExceeded,
    faults.Internal: Internal,
}


def error_from_fault(fault: faults.Fault, *, address: str, timeout_s: float) -> EelgridError:
    """Returns the error for a failed call; the controller writes a remedy after the first semicolon."""
    if isinstance(fault, faults.Unavailable) and fault.message.startswith(_NOT_CONNECTED):
        return Unavailable(f"no controller answers at {address} ({fault.message.rpartition(': ')[2]})")
    if isinstance(fault, faults.DeadlineExceeded):
        return DeadlineExceeded(f"no answer from {address} in {timeout_s:g} s")
    message, _, remedy = fault.message.partition("; ")
    return _BY_FAULT.get(type(fault), Internal)(message, remedy, fault.violations)


def error_from_contract(error: ContractError) -> InvalidArgument:
    """Returns the error for a request that the client itself refuses."""
    return InvalidArgument(error.message, "correct the fields; nothing was sent", error.violations)


def error_from_settings(error: transport.ListenError, address: str) -> InvalidSettings:
    """Returns the error for settings with which no connection is opened."""
    if isinstance(error, transport.BindRefused) and "is another machine" in str(error):
        remedy = "pass tls=TlsFiles(certificate, key, authority), or insecure=True to do without"
        return InvalidSettings(f"{address} is another machine and no TLS files are given", remedy)
    message, _, remedy = str(error).partition("; ")
    return InvalidSettings(message, remedy)
