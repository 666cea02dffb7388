"""What a person is told when something fails, and the exit code.

Owns the mapping from errors to two lines on stderr (what happened; what to do
next) and a code that scripts can tell apart: 0 ok, 1 the call failed, 2 usage,
3 nobody answers, 4 not found, 5 refused or invalid. Must not know any command.

Stop            1  the call failed
├── Misused     2  the options do not fit together (click's own usage errors too)
├── Unreachable 3  nobody answers
├── Unknown     4  nothing has this name
└── Refused     5  the request is invalid or refused

An error that is in no branch here is a fault of ours and keeps its traceback.
"""

import sys
from typing import IO, Any

import click

from eelgrid_controller.cli.settings import Settings
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.safe_text import printable

__all__ = ["Misused", "Refused", "Stop", "Unknown", "Unreachable", "stop_for"]


class Stop(click.ClickException):
    """The end of a command that failed: what happened, and what to do next."""

    exit_code = 1

    def __init__(self, what: str, remedy: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.violations = violations

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints to stderr, a line for each broken rule."""
        out = file or sys.stderr
        click.echo(f"eelctl: {printable(_line(self.message))}", file=out)
        for violation in self.violations:
            click.echo(f"  {printable(str(violation))}", file=out)
        click.echo(f"  next: {printable(self.remedy)}", file=out)


class Misused(Stop):
    """The options do not fit together."""

    exit_code = 2


class Unreachable(Stop):
    """Nobody answers."""

    exit_code = 3


class Unknown(Stop):
    """Nothing has this name."""

    exit_code = 4


class Refused(Stop):
    """The request is invalid or refused."""

    exit_code = 5


def _line(text: str) -> str:
    """One line, since gRPC's own messages may hold several."""
    return " ".join(text.split())


def stop_for(error: Exception, settings: Settings) -> Stop | None:
    """The stop behind an error, or None for a fault of ours."""
    if isinstance(error, ContractError):
        return Refused(error.message, "correct what is named above; nothing was sent", error.violations)
    # Looked up only where they are loaded: an error of a module that nobody imported cannot have been raised.
    modules = sys.modules
    if (submit := modules.get("eelgrid_controller.replay.submit")) and isinstance(error, submit.SubmitError):
        what, _, remedy = str(error).partition("; ")
        return Unreachable(what, remedy)
    if (lines := modules.get("eelgrid_controller.replay.csv_lines")) and isinstance(error, lines.TraceError):
        kind = Unknown if isinstance(error, lines.TraceMissing) else Refused
        return kind(f"{error.place}: {error.problem}", error.remedy)
    if (libraries := modules.get("eelgrid_controller.replay.libraries")) and isinstance(
        error, libraries.LibraryMissing
    ):
        return Stop(error.problem, error.remedy)
    if (transport := modules.get("eelgrid_protos.transport")) and isinstance(error, transport.ListenError):
        what, _, remedy = str(error).partition("; ")
        return Misused(what, remedy or "check --controller and the --tls options")
    if (faults := modules.get("eelgrid_protos.faults")) and isinstance(error, faults.Fault):
        return _of_fault(error, settings)
    return None


def _of_fault(fault: Any, settings: Settings) -> Stop:
    from eelgrid_protos import faults

    message, violations = fault.message, fault.violations
    match fault:
        case faults.Unavailable():
            return Unreachable(
                f"no controller answers at {settings.controller} ({message.rpartition(': ')[2]})",
                "start eelgrid-controller, or name another with --controller or EELGRID_CONTROLLER",
            )
        case faults.DeadlineExceeded():
            what = f"no answer from {settings.controller} in {settings.timeout_s:g} s"
            return Unreachable(what, "raise --timeout, or look into the controller's log")
        case faults.NotFound():
            # The controller names the calls of its API; here it is commands that help.
            return Unknown(
                message.partition("; list ")[0], "list what there is with `eelctl workloads` or `eelctl nodes`"
            )
        case faults.InvalidArgument():
            return Refused(message, "correct it and run the command again", violations)
        case faults.AlreadyExists():
            return Refused(message, "choose another --id, or look at the present one with `eelctl get`", violations)
        case faults.Aborted():
            return Refused(message, "somebody else was faster: look at what is in force and repeat", violations)
        case faults.PermissionDenied():
            return Refused(
                message, "use a certificate that may do this; `eelctl whoami` says what yours may", violations
            )
        case faults.ResourceExhausted():
            return Refused(message, "wait or cancel what is not needed, then repeat", violations)
        case faults.FailedPrecondition():
            return Refused(message, "change the state that it names, then repeat", violations)
        case _:
            return Stop(message, "look into the controller's log", violations)
