"""How every command reaches the controller: shared settings and options, the channel, paged listings, and errors.

`-o` and `--no-headers` are accepted before and after the command's name, since people type both. grpc and the messages
are imported inside the functions that need them, because they take longer to load than everything else that
`eelctl --help` does. Knows nothing of what is asked.

An error becomes two lines on stderr (what happened; what to do next) and an exit code for scripts; under `-o json` it is
one JSON object on stderr with reason, message, remedy and violations. One without a case in `cli_error_for` is a bug and
keeps its traceback.

CliError                   1  the call failed
├── UsageMismatch          2  the options contradict each other (and click's own usage errors)
├── ControllerUnreachable  3  the controller does not answer
├── NameNotFound           4  no such object
├── RequestRefused         5  the request is invalid or refused
└── CommandInterrupted   130  somebody pressed Ctrl-C
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from eelgrid_controller.cli.standard_streams import INTERRUPTED_CODE
from eelgrid_controller.formatting import parse_cpu_milli, parse_duration_s, parse_gpu_milli, parse_memory_bytes
from eelgrid_protos.errors import CONTRACT_BROKEN, ContractError, Violation
from eelgrid_protos.operator_calls import DEFAULT_CONTROLLER, PageCursor, join_pages, parse_addresses
from eelgrid_protos.safe_text import escape_text
from eelgrid_protos.stale_reads import Staleness
from eelgrid_protos.values import dataclass

# In click's own notes of a run: the context of the command that called the controller.
_COMMAND_KEY = "eelgrid_controller.command"
OUTPUTS = ("table", "wide", "json", "yaml")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """How to reach the controller and how to print."""

    controller: str = DEFAULT_CONTROLLER
    # Of those behind a front, the one to ask; empty for whoever answers at `controller`.
    cluster: str = ""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    insecure: bool = False
    # Whether a controller that follows may answer reads.
    stale: bool = False
    timeout_s: float = 10.0
    output: str = "table"
    headers: bool = True
    # URL of the live page; empty if not given.
    page: str = ""
    # Of a list: the column to sort by, with a minus for the largest first, and what columns contain, as COLUMN=TEXT.
    sort: str = ""
    filters: tuple[str, ...] = ()

    @property
    def controllers(self) -> tuple[str, ...]:
        """The addresses of all controllers; raises UsageError."""
        try:
            return parse_addresses(self.controller)
        except ValueError as error:
            raise click.UsageError(f"--controller {error}") from None

    def fetch_limit(self, limit: int | None) -> int | None:
        """Returns how many rows to fetch of a list: all, if it is sorted or filtered here before it is cut."""
        return None if self.sort or self.filters else limit


def change_setting(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keeps the value of an option in the settings, as a callback of the option."""
    if value is not None and parameter.name is not None:
        context.obj = replace(context.obj, **{parameter.name: value})


def add_options(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Returns a decorator that adds options to a command, in the order in which help lists them."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# Of a command that submits work.
preemption_options = add_options(
    click.option("--priority-class", default="", help="Priority class, instead of a priority."),
    click.option("--no-preempt", "never_preempts", is_flag=True, help="Wait rather than preempt other work."),
)


# Of a command that prints an answer.
output_option = add_options(
    click.option(
        "-o",
        "--output",
        type=click.Choice(OUTPUTS),
        default=None,
        expose_value=False,
        callback=change_setting,
        help="Output format.",
    ),
    click.option(
        "--no-headers",
        "headers",
        flag_value=False,
        default=None,
        type=bool,
        expose_value=False,
        callback=change_setting,
        help="Omit the header line.",
    ),
)


# click's ParamType takes a type argument for the checker alone; older releases refuse one when run.
if TYPE_CHECKING:
    from eelgrid_protos.messages import Policy

    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType


class AmountType(_IntType):
    """A click parameter type for an amount."""

    def __init__(self, name: str, read: Callable[[str], int]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the amount; fails with a usage error that shows how to write one."""
        if isinstance(value, int):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A click parameter type for a finite number in a range; every comparison of click's own with NaN passes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number; fails with a usage error if it is outside the range, infinite or not a number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


CPU = AmountType("CPUs", parse_cpu_milli)
MEMORY = AmountType("SIZE", parse_memory_bytes)
SHARE = AmountType("SHARE", parse_gpu_milli)
DURATION = AmountType("DURATION", parse_duration_s)


def tls_files(settings: CliSettings) -> Any:
    """Returns the transport's TlsFiles, None without TLS; raises UsageError unless all three files are given or none."""
    from eelgrid_protos.transport import TlsFilesIncomplete, collect_tls_files

    try:
        return collect_tls_files(settings.tls_certificate, settings.tls_key, settings.tls_authority)
    except TlsFilesIncomplete:
        raise click.UsageError(
            "--tls-certificate, --tls-key and --tls-authority belong together: give all three"
        ) from None


@contextmanager
def connect_operators(settings: CliSettings) -> Iterator[Any]:
    """Connects to the operators' API of who leads and yields a client of blocking calls; closes the channels on exit."""
    from eelgrid_protos.leader_calls import connect_leader

    files = tls_files(settings)
    # Read and checked here: gRPC takes any bytes, and each call would fail as if nobody answered.
    contents = None if files is None else files.load_contents(lambda _path: None)
    # For an error: the command whose parameters its request was made of.
    if context := click.get_current_context(silent=True):
        context.meta[_COMMAND_KEY] = context
    # With the caller's own certificate: the front gives nobody rights in a cluster.
    addresses = _find_cluster(settings, contents) if settings.cluster else settings.controllers
    oldest: Staleness | None = None

    def note(found: Staleness | None) -> None:
        nonlocal oldest
        oldest = max((one for one in (found, oldest) if one is not None), key=lambda one: one.age_s, default=None)

    client = connect_leader(
        addresses, tls=contents, insecure=settings.insecure, on_staleness=note if settings.stale else None
    )
    try:
        yield client
    finally:
        client.close()
        if oldest is not None:
            # On standard error, so that a table or a document on standard output stays intact.
            click.echo(
                f"stale answer: at most {oldest.age_s:.1f} s old, as of entry {oldest.revision} of the journal, "
                f"epoch {oldest.epoch}",
                err=True,
            )


@contextmanager
def explain_lone_controller(settings: CliSettings) -> Iterator[None]:
    """Says so where a call of a front was made to a controller."""
    from eelgrid_protos import faults

    try:
        yield
    except faults.Internal as fault:
        if not fault.message.startswith("UNIMPLEMENTED"):
            raise
        raise CliError(
            f"the controller at {settings.controller} is no front of several clusters",
            "name the address of an eelgrid-front with --controller, or leave --cluster out",
        ) from None


def _find_cluster(settings: CliSettings, tls: Any) -> tuple[str, ...]:
    """Returns the addresses of a cluster's controllers, by a front's word; raises NameNotFound."""
    from eelgrid_protos.leader_calls import connect_leader
    from eelgrid_protos.messages import ListClustersRequest
    from eelgrid_protos.rpc import FEDERATION_SERVICE

    front = connect_leader(settings.controllers, tls=tls, insecure=settings.insecure)
    try:
        calls = front.build_client(FEDERATION_SERVICE)
        with explain_lone_controller(settings):
            found = calls.list_clusters(ListClustersRequest(), timeout=settings.timeout_s).clusters
    finally:
        front.close()
    names = {one.name: tuple(one.addresses) for one in found}
    if settings.cluster not in names:
        raise NameNotFound(
            f"no cluster is called {settings.cluster}",
            f"name one of {', '.join(names)}, as `eelctl clusters` lists them",
        )
    return names[settings.cluster]


def _print_omitted(answer: Any) -> None:
    """Warns on standard error, so that a table or a document on standard output stays intact."""
    if answer.omitted:
        count = f"{answer.omitted} element{'' if answer.omitted == 1 else 's'}"
        click.echo(f"warning: {count} omitted that cannot be shown; see the controller's log for the reason", err=True)


def fetch_policy(client: Any, settings: CliSettings) -> "Policy":
    """Fetches the policy in force."""
    from eelgrid_protos.messages import GetPolicyRequest

    found: Policy = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
    return found


def iterate_pages(
    call: Callable[..., Any],
    request: Any,
    items: str,
    *,
    timeout_s: float,
    limit: int | None = None,
    page_size_most: int | None = None,
) -> Iterator[Any]:
    """Yields all items of a paged listing; stops early at `limit`, or at a page that repeats its token."""
    cursor = PageCursor(request, limit=limit, page_size_most=page_size_most)
    while not cursor.is_done:
        answer = call(cursor.next_request(), timeout=timeout_s)
        _print_omitted(answer)
        yield from cursor.take_items(answer, getattr(answer, items))


def fetch_whole(call: Callable[..., Any], request: Any, *, timeout_s: float) -> Any:
    """Fetches all pages and joins their lists into one answer; fields that are not lists are the last page's."""
    cursor, pages = PageCursor(request, is_sized=False), []
    while not cursor.is_done:
        pages.append(call(cursor.next_request(), timeout=timeout_s))
        _print_omitted(pages[-1])
        cursor.take_items(pages[-1], ())
    return join_pages(pages)


@contextmanager
def remedy_if_not_found(remedy: str) -> Iterator[None]:
    """Gives this remedy with the controller's message where the object is neither a workload nor a node."""
    from eelgrid_protos import faults

    try:
        yield
    except faults.NotFound as fault:
        raise NameNotFound(fault.message, remedy) from None


def read_input(file: IO[str], size: int) -> str:
    """Reads at most so many characters of a text file that was named in the arguments; raises RequestRefused."""
    try:
        return file.read(size)
    except UnicodeDecodeError as error:
        raise RequestRefused(
            f"{file.name}: is not UTF-8 text ({error.reason})", "name a text file, or save it as UTF-8"
        ) from None


def read_yaml_file(path: Path, bytes_most: int) -> Any:
    """Reads one YAML document from a file of at most so many bytes; raises RequestRefused with the line."""
    import yaml

    try:
        if path.stat().st_size > bytes_most:
            raise RequestRefused(f"{path}: is larger than {bytes_most >> 20} MiB", "name a smaller file")
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # a safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "is not YAML"
        raise RequestRefused(f"{path}{place}: {problem}", "correct the YAML there") from None
    except OSError as error:
        raise RequestRefused(
            f"{path}: {error.strerror or 'cannot be read'}", "check the path and its permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestRefused(f"{path}, byte {error.start}: is not UTF-8", "save the file as UTF-8") from None


class CliError(click.ClickException):
    """Ends a command that failed, with what happened and what to do next."""

    exit_code = 1
    # One word for scripts, in the JSON object of an error.
    reason = "failed"

    def __init__(self, what: str, remedy: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.violations = violations

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the error to stderr, with a line for each violation."""
        out = file or sys.stderr
        click.echo(f"eelctl: {escape_text(shorten_words(join_lines(self.message)))}", file=out)
        for violation in self.violations:
            click.echo(f"  {escape_text(shorten_words(str(violation)))}", file=out)
        click.echo(f"  next: {escape_text(shorten_words(self.remedy))}", file=out)


class UsageMismatch(CliError):
    """The options contradict each other."""

    exit_code, reason = 2, "usage"


class ControllerUnreachable(CliError):
    """The controller does not answer."""

    exit_code, reason = 3, "unreachable"


class NameNotFound(CliError):
    """There is no object with this name."""

    exit_code, reason = 4, "not_found"


class RequestRefused(CliError):
    """The request is invalid or refused."""

    exit_code, reason = 5, "refused"


class CommandInterrupted(CliError):
    """Somebody pressed Ctrl-C."""

    exit_code, reason = INTERRUPTED_CODE, "interrupted"


def output_error(error: OSError) -> CliError:
    """Returns the error of a standard output that cannot be written."""
    return CliError(
        f"cannot write to standard output: {error.strerror or error}",
        "free space where it goes, or redirect it to a file that can be written; a change may have been made already",
    )


def describe_error(error: click.ClickException) -> dict[str, Any]:
    """Returns an error as the JSON object that `-o json` prints: reason, message, remedy and violations."""
    if isinstance(error, CliError):
        violations = [
            {"field": v.field, "problem": shorten_words(v.problem), "remedy": v.remedy} for v in error.violations
        ]
        return {
            "reason": error.reason,
            "message": shorten_words(join_lines(error.message)),
            "remedy": error.remedy,
            "violations": violations,
        }
    context = error.ctx if isinstance(error, click.UsageError) else None
    reason = "usage" if isinstance(error, click.UsageError) else "failed"
    remedy = f"see {context.command_path if context else 'eelctl'} --help"
    message = shorten_words(join_lines(error.format_message()))
    return {"reason": reason, "message": message, "remedy": remedy, "violations": []}


def join_lines(text: str) -> str:
    """Makes one line of a text, since messages of gRPC and others may hold several."""
    return " ".join(text.split())


_WORD_MOST, _WORD_SHOWN = 300, 60
_LONG_WORD = re.compile(rf"[^\s'\",;]{{{_WORD_MOST + 1},}}")


def shorten_words(text: str) -> str:
    """Cuts words that are too long to read, such as a value of 5,000 characters that somebody pasted."""
    return _LONG_WORD.sub(lambda match: f"{match[0][:_WORD_SHOWN]}... ({len(match[0]):,} characters)", text)


def _invalid_request(message: str, violations: tuple[Violation, ...], remedy: str) -> RequestRefused:
    """Names the command's parameters, where the contract's message and its fields are named."""
    from eelgrid_controller.cli.request_fields import name_parameters

    context = click.get_current_context(silent=True)
    named = name_parameters(violations, context.meta.get(_COMMAND_KEY) if context else None)
    if message.endswith(CONTRACT_BROKEN):
        fields = dict.fromkeys(one.field for one in named if one.field)
        message = f"{', '.join(fields) or 'the request'} {'are' if len(fields) > 1 else 'is'} not valid"
    return RequestRefused(message, remedy, named)


def cli_error_for(error: Exception, settings: CliSettings) -> CliError | None:
    """Returns the CliError for an error that is expected, None for a bug."""
    if isinstance(error, ContractError):
        return _invalid_request(
            error.message, error.violations, "correct it and run the command again; nothing was sent"
        )
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
    if isinstance(error, OSError) and error.filename:
        return CliError(f"{error.filename}: {error.strerror}", "check the path, its permissions and the free space")
    return None


# What gRPC writes of a handshake that failed.
_TLS_MARKS = ("handshake", "CERTIFICATE", "SSL", "certificate")


def _of_fault(fault: Any, settings: CliSettings) -> CliError:
    from eelgrid_protos import faults

    message, violations = fault.message, fault.violations
    match fault:
        case faults.Unavailable() if any(mark in message for mark in _TLS_MARKS):
            detail = message.rpartition(": ")[2]
            return ControllerUnreachable(
                f"TLS with {settings.controller} failed" + (f" ({detail})" if detail not in {"", "OK"} else ""),
                "check --tls-authority and the certificates of both sides with `eelctl doctor`",
            )
        case faults.NoLeader() | faults.NotLeader():
            return ControllerUnreachable(
                message, "wait until one leads, or name all controllers with --controller A:PORT,B:PORT"
            )
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
            return _invalid_request(message, violations, "correct it and run the command again")
        case faults.AlreadyExists():
            return RequestRefused(
                message, "choose another --id, or see the existing workload with `eelctl get`", violations
            )
        case faults.Aborted():
            return RequestRefused(
                message, "somebody else changed it first: read the current state, then repeat", violations
            )
        case faults.PermissionDenied():
            is_local = any(one.field == "user" for one in violations)
            remedy = "ask who may do this" if is_local else "use a certificate with the right to do this"
            return RequestRefused(message, f"{remedy}; `eelctl whoami` shows your rights", violations)
        case faults.ResourceExhausted():
            return RequestRefused(message, "wait, or cancel work that is not needed, then repeat", violations)
        case faults.FailedPrecondition():
            return RequestRefused(message, "resolve the condition named above, then repeat", violations)
        case _:
            return CliError(message, "check the controller's log", violations)
