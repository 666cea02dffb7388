"""Errors of eelctl: what a person is told when a command fails, and the exit code.

Maps errors to two lines on stderr (what happened; what to do next) and an exit code for scripts: 0 success, 1 the call
failed, 2 usage, 3 unreachable, 4 not found, 5 refused or invalid.

CliError                   1  the call failed
├── UsageMismatch          2  the options contradict each other (and click's own usage errors)
├── ControllerUnreachable  3  the controller does not answer
├── NameNotFound           4  no such object
└── RequestRefused         5  the request is invalid or refused

An error without a case here is a bug and keeps its traceback.
"""

import sys
from typing import IO, Any

import click

from eelgrid_controller.cli.connection import CliSettings
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.safe_text import escape_text


class CliError(click.ClickException):
    """Ends a command that failed, with what happened and what to do next."""

    exit_code = 1

    def __init__(self, what: str, remedy: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.violations = violations

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the error to stderr, with a line for each violation."""
        out = file or sys.stderr
        click.echo(f"eelctl: {escape_text(_line(self.message))}", file=out)
        for violation in self.violations:
            click.echo(f"  {escape_text(str(violation))}", file=out)
        click.echo(f"  next: {escape_text(self.remedy)}", file=out)


class UsageMismatch(CliError):
    """The options contradict each other."""

    exit_code = 2


class ControllerUnreachable(CliError):
    """The controller does not answer."""

    exit_code = 3


class NameNotFound(CliError):
    """There is no object with this name."""

    exit_code = 4


class RequestRefused(CliError):
    """The request is invalid or refused."""

    exit_code = 5


def _line(text: str) -> str:
    """One line, since gRPC's own messages may hold several."""
    return " ".join(text.split())


def cli_error_for(error: Exception, settings: CliSettings) -> CliError | None:
    """Returns the CliError for an error that is expected, None for a bug."""
    if isinstance(error, ContractError):
        return RequestRefused(error.message, "correct the fields named above; nothing was sent", error.violations)
    # Only modules that are loaded: a module that was not imported cannot have raised anything.
    modules = sys.modules
    if (submit := modules.get("eelgrid_controller.replay.submitter")) and isinstance(error, submit.SubmitError):
        what, _, remedy = str(error).partition("; ")
        return ControllerUnreachable(what, remedy)
    if (lines := modules.get("eelgrid_controller.replay.csv_reader")) and isinstance(error, lines.TraceError):
        kind = NameNotFound if isinstance(error, lines.TraceMissing) else RequestRefused
        return kind(f"{error.place}: {error.problem}", error.remedy)
    if (libraries := modules.get("eelgrid_controller.errors")) and isinstance(error, libraries.LibraryMissing):
        return CliError(error.problem, error.remedy)
    if (transport := modules.get("eelgrid_protos.transport")) and isinstance(error, transport.ListenError):
        what, _, remedy = str(error).partition("; ")
        return UsageMismatch(what, remedy or "check --controller and the --tls options")
    if (faults := modules.get("eelgrid_protos.faults")) and isinstance(error, faults.Fault):
        return _of_fault(error, settings)
    return None


def _of_fault(fault: Any, settings: CliSettings) -> CliError:
    from eelgrid_protos import faults

    message, violations = fault.message, fault.violations
    match fault:
        case faults.Unavailable():
            return ControllerUnreachable(
                f"no controller answers at {settings.controller} ({message.rpartition(': ')[2]})",
                "start eelgrid-controller, or name its address with --controller or EELGRID_CONTROLLER",
            )
        case faults.DeadlineExceeded():
            what = f"no answer from {settings.controller} in {settings.timeout_s:g} s"
            return ControllerUnreachable(what, "raise --timeout, or check the controller's log")
        case faults.NotFound():
            # The controller names the calls of its API; an operator needs the command.
            return NameNotFound(message.partition("; list ")[0], "list names with `eelctl workloads` or `eelctl nodes`")
        case faults.InvalidArgument():
            return RequestRefused(message, "correct it and run the command again", violations)
        case faults.AlreadyExists():
            return RequestRefused(
                message, "choose another --id, or see the existing workload with `eelctl get`", violations
            )
        case faults.Aborted():
            return RequestRefused(
                message, "somebody else changed it first: read the current state, then repeat", violations
            )
        case faults.PermissionDenied():
            return RequestRefused(
                message,
                "use a certificate with the right to do this; `eelctl whoami` shows the rights of yours",
                violations,
            )
        case faults.ResourceExhausted():
            return RequestRefused(message, "wait, or cancel work that is not needed, then repeat", violations)
        case faults.FailedPrecondition():
            return RequestRefused(message, "resolve the condition named above, then repeat", violations)
        case _:
            return CliError(message, "check the controller's log", violations)
