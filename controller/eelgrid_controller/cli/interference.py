"""eelctl interference: by how much loads that share a GPU slow each other down, and how much work has to bear.

Both are part of the policy, so that a change carries the revision that it is based on, as `eelctl policy set` does. What the
controller has measured of running jobs is shown beside it, and adopted into it. The options of commands that submit work are
here, too.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import click

from eelgrid_controller.cli.connection import (
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    fetch_policy,
    iterate_pages,
    output_option,
    read_input,
)
from eelgrid_controller.cli.output import TableColumn, print_plain, text_table, use_colour
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.messages import (
    ANY_LOAD,
    INTERFERENCE_MOST,
    GpuSharing,
    Interference,
    ListInterferenceRequest,
    MeasuredInterference,
    Policy,
    UpdatePolicyRequest,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.schema import check_message

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PERCENT = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,20})?(?:e-[0-9]{1,3})?)\s*(%?)")
_FIELDS = ("load", "beside", "slowdown")
_LETTERS_MOST = 8 << 20
_NO_LIMIT = "none"
# Of what was measured: a thousandth, since paces are known to a twentieth.
_DECIMALS = 3
_MEASURED_HOW = "jobs tell their pace with eelgrid.progress, and need a minute alone and a minute beside another load"


def parse_slowdown(text: str) -> float:
    """Parses `20%` or `0.2` as a part of the time that something takes alone; raises ValueError."""
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no slowdown; write 20% or 0.2")
    value = float(found[1])
    if not found[2] and value > 1.0:
        raise ValueError(f"{text!r} may be either; write {text}% if per cent are meant, or {100 * value:g}%")
    return value / 100.0 if found[2] else value


def format_slowdown(slowdown: float) -> str:
    """Formats a slowdown in per cent."""
    return f"{100 * slowdown:.4g} %"


class SlowdownType(click.ParamType):  # type: ignore[type-arg]  # generic in its stubs alone
    """A click parameter type for a slowdown."""

    name = "SLOWDOWN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the slowdown as a part of the time; fails with a usage error that shows how to write one."""
        if isinstance(value, float):
            return value
        try:
            return parse_slowdown(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def sharing_options(command: _Command) -> _Command:
    """Adds --gpu-load and --gpu-slowdown."""
    command = click.option(
        "--gpu-slowdown",
        type=SlowdownType(),
        help="On a share of a GPU, how much longer it may take beside others than alone: 20%. Default: the policy's limit.",
    )(command)
    return click.option(
        "--gpu-load",
        default="",
        metavar="NAME",
        help="On a share of a GPU, the name of its load in `eelctl interference list`. Default: a service's profile.",
    )(command)


def build_sharing(flags: dict[str, Any]) -> GpuSharing | None:
    """Builds what the flags say of work that shares a GPU; None if they say nothing."""
    load, most = flags["gpu_load"], flags["gpu_slowdown"]
    return GpuSharing(load=load, slowdown_most=most) if load or most is not None else None


def _update(client: Any, settings: CliSettings, policy: Policy) -> None:
    client.update_policy(UpdatePolicyRequest(policy=policy), timeout=settings.timeout_s)


def _describe_default(policy: Policy) -> str:
    most = policy.shared_slowdown_most
    if most is None:
        return "work that states no limit bears everything"
    return f"work that states no limit is slowed down by {format_slowdown(most)} at the most"


def _list_measured(client: Any, settings: CliSettings) -> list[MeasuredInterference]:
    request = ListInterferenceRequest()
    return list(iterate_pages(client.list_interference, request, "pairs", timeout_s=settings.timeout_s))


def _sort_key(pair: tuple[str, str]) -> tuple[bool, str, bool, str]:
    load, beside = pair
    return load == ANY_LOAD, load, beside == ANY_LOAD, beside


def _in_order(pairs: Sequence[Interference]) -> tuple[Interference, ...]:
    return tuple(sorted(pairs, key=lambda one: _sort_key((one.load, one.beside))))


class _Pair(NamedTuple):
    """One row: what the policy says of a pair, and what running jobs have measured of it."""

    load: str
    beside: str
    known: Interference | None
    measured: MeasuredInterference | None


def _join_measured(known: Sequence[Interference], measured: Sequence[MeasuredInterference]) -> list[_Pair]:
    by_known = {(one.load, one.beside): one for one in known}
    by_measured = {(one.load, one.beside): one for one in measured}
    keys = sorted(by_known.keys() | by_measured.keys(), key=_sort_key)
    return [_Pair(*key, by_known.get(key), by_measured.get(key)) for key in keys]


def _format_measured(one: MeasuredInterference | None) -> str:
    if one is None:
        return ""
    middle, least, largest = (
        format_slowdown(round(value, _DECIMALS)) for value in (one.slowdown, one.slowdown_least, one.slowdown_largest)
    )
    return middle if one.jobs == 1 else f"{middle} ({least} to {largest})"


_COLUMNS = (
    TableColumn[_Pair]("LOAD", lambda one: one.load),
    TableColumn[_Pair]("BESIDE", lambda one: one.beside),
    TableColumn[_Pair]("SLOWDOWN", lambda one: format_slowdown(one.known.slowdown) if one.known else "", right=True),
)
_MEASURED_COLUMNS = (
    TableColumn[_Pair]("MEASURED", lambda one: _format_measured(one.measured), right=True),
    TableColumn[_Pair]("JOBS", lambda one: f"{one.measured.jobs}" if one.measured else "", right=True),
)


@click.group()
def interference() -> None:
    """Say by how much loads that share a GPU slow each other down, and how much work bears."""


@interference.command("list")
@output_option
@click.pass_obj
def list_interference(settings: CliSettings) -> None:
    """List pairs of loads, and the limit of work that states none.

    SLOWDOWN is what the policy says, by which work is placed. MEASURED is the median of what running jobs have measured
    since the controller started, with the range of several jobs; eelctl interference adopt puts it into the policy.
    """
    with connect_operators(settings) as client:
        policy, measured = fetch_policy(client, settings), _list_measured(client, settings)
    rows = _join_measured(policy.interference, measured)
    lines = ["no pair of loads was measured; tell one with eelctl interference set"]
    if rows:
        columns = (*_COLUMNS, *_MEASURED_COLUMNS) if measured else _COLUMNS
        lines = text_table(columns, rows, headers=settings.headers, colour=use_colour())
    plain = {
        "interference": [to_plain(one.known) for one in rows if one.known is not None],
        "measured": [to_plain(one.measured) for one in rows if one.measured is not None],
        "shared_slowdown_most": policy.shared_slowdown_most,
    }
    print_plain(settings, plain, [*lines, _describe_default(policy)])


@interference.command("set")
@click.argument("load")
@click.argument("beside")
@click.argument("slowdown", type=SlowdownType())
@output_option
@click.pass_obj
def set_interference(settings: CliSettings, load: str, beside: str, slowdown: float) -> None:
    """Say that LOAD takes longer by SLOWDOWN beside BESIDE on a GPU than alone on its share. Requires the role admin.

    `*` is any load that no other pair names.

    \b
    eelctl interference set resnet-50 whisper 18%
    eelctl interference set whisper resnet-50 0.05
    """  # noqa: D301
    wanted = Interference(load=load, beside=beside, slowdown=slowdown)
    check_message(wanted)
    with connect_operators(settings) as client:
        policy = fetch_policy(client, settings)
        others = tuple(one for one in policy.interference if (one.load, one.beside) != (load, beside))
        _update(client, settings, replace(policy, interference=_in_order((*others, wanted))))
    print_plain(settings, to_plain(wanted), [f"{load} is slowed down by {format_slowdown(slowdown)} beside {beside}"])


@interference.command()
@click.argument("load", required=False)
@click.argument("beside", required=False)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@output_option
@click.pass_obj
def adopt(settings: CliSettings, load: str | None, beside: str | None, dry_run: bool) -> None:
    """Put what running jobs have measured into the policy: of LOAD beside BESIDE, or of all pairs. Requires the role admin.

    Pairs that nobody measured stay as they are. What was measured is in eelctl interference list.
    """
    if load is not None and beside is None:
        raise click.UsageError("name both loads, or none for all pairs that were measured")
    with connect_operators(settings) as client:
        policy, measured = fetch_policy(client, settings), _list_measured(client, settings)
        if load is not None:
            measured = [one for one in measured if (one.load, one.beside) == (load, beside)]
            if not measured:
                raise NameNotFound(f"nothing was measured of {load!r} beside {beside!r}", _MEASURED_HOW)
        if not measured:
            raise RequestRefused("no pair of loads was measured by running jobs", _MEASURED_HOW)
        pairs = {(one.load, one.beside): one for one in policy.interference}
        adopted, lines = [], []
        for one in measured:
            before = pairs.get((one.load, one.beside))
            wanted = Interference(load=one.load, beside=one.beside, slowdown=round(one.slowdown, _DECIMALS))
            if wanted != before:
                pairs[one.load, one.beside] = wanted
                adopted.append({**to_plain(wanted), "before": before and before.slowdown, "jobs": one.jobs})
                lines.append(_describe_change(before, wanted, one.jobs))
        if adopted and not dry_run:
            _update(client, settings, replace(policy, interference=_in_order(tuple(pairs.values()))))
    lines = lines or ["no pair changes: the policy has what was measured"]
    print_plain(settings, {"adopted": adopted}, ["dry run: nothing was changed", *lines] if dry_run else lines)


def _describe_change(before: Interference | None, wanted: Interference, jobs: int) -> str:
    known = "not set" if before is None else format_slowdown(before.slowdown)
    return f"{wanted.load} beside {wanted.beside}: {known} -> {format_slowdown(wanted.slowdown)} ({count_noun(jobs, 'job')})"


def read_pairs(text: str, name: str) -> tuple[Interference, ...]:
    """Reads pairs from CSV with the columns load, beside and slowdown; raises RequestRefused with the line."""
    rows = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        pairs = _read_rows(rows, name)
    except csv.Error as error:
        raise RequestRefused(f"{name}: line {rows.line_num}: {error}", "correct the line") from None
    if not pairs:
        raise RequestRefused(f"{name}: has no pair", "remove pairs one by one with eelctl interference remove")
    return pairs


def _read_rows(rows: "csv.DictReader[str]", name: str) -> tuple[Interference, ...]:
    if not set(_FIELDS) <= set(rows.fieldnames or ()):
        raise RequestRefused(f"{name}: its first line does not name {', '.join(_FIELDS)}", "add that line")
    found: dict[tuple[str, str], Interference] = {}
    for row in rows:
        load, beside, slowdown = ((row[field] or "").strip() for field in _FIELDS)
        if (load, beside) in found:
            raise RequestRefused(
                f"{name}: line {rows.line_num}: {load} beside {beside} is there twice", "leave one of them out"
            )
        try:
            found[load, beside] = Interference(load=load, beside=beside, slowdown=parse_slowdown(slowdown))
            check_message(found[load, beside])
        except ValueError as error:
            raise RequestRefused(f"{name}: line {rows.line_num}: {error}", "correct the line") from None
        if len(found) > INTERFERENCE_MOST:
            raise RequestRefused(f"{name}: has more than {INTERFERENCE_MOST:,} pairs", "leave the rarest out")
    return _in_order(tuple(found.values()))


@interference.command()
@click.option(
    "-f",
    "--file",
    type=click.File("r", encoding="utf-8"),
    required=True,
    help="CSV: load, beside, slowdown; - is stdin.",
)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@output_option
@click.pass_obj
def apply(settings: CliSettings, /, file: Any, dry_run: bool) -> None:
    """Replace all pairs by those of a file. Requires the role admin."""
    pairs = read_pairs(read_input(file, _LETTERS_MOST), file.name)
    with connect_operators(settings) as client:
        policy = fetch_policy(client, settings)
        before, after = ({(one.load, one.beside): one for one in some} for some in (policy.interference, pairs))
        counts = {
            "new": len(after.keys() - before.keys()),
            "changed": sum(after[key] != before[key] for key in after.keys() & before.keys()),
            "removed": len(before.keys() - after.keys()),
        }
        if not dry_run:
            _update(client, settings, replace(policy, interference=pairs))
    done = "would be" if dry_run else "are"
    told = ", ".join(f"{number:,} {what}" for what, number in counts.items())
    print_plain(settings, counts, [f"{count_noun(len(pairs), 'pair')} {done} in the policy: {told}"])


@interference.command()
@click.argument("load")
@click.argument("beside")
@output_option
@click.pass_obj
def remove(settings: CliSettings, load: str, beside: str) -> None:
    """Forget what was measured of LOAD beside BESIDE. Requires the role admin."""
    with connect_operators(settings) as client:
        policy = fetch_policy(client, settings)
        left = tuple(one for one in policy.interference if (one.load, one.beside) != (load, beside))
        if len(left) == len(policy.interference):
            raise NameNotFound(
                f"nothing is known of {load!r} beside {beside!r}", "see the pairs with eelctl interference list"
            )
        _update(client, settings, replace(policy, interference=left))
    print_plain(settings, {"load": load, "beside": beside}, [f"{load} beside {beside}: removed"])


@interference.command()
@click.argument("slowdown")
@output_option
@click.pass_obj
def limit(settings: CliSettings, slowdown: str) -> None:
    """Limit how much work on a share of a GPU is slowed down if it states no limit: 20%, or none. Requires the role admin."""
    try:
        most = None if slowdown == _NO_LIMIT else parse_slowdown(slowdown)
    except ValueError as error:
        raise click.BadParameter(f"{error}, or {_NO_LIMIT}", param_hint="SLOWDOWN") from None
    with connect_operators(settings) as client:
        policy = replace(fetch_policy(client, settings), shared_slowdown_most=most)
        _update(client, settings, policy)
    lines = [_describe_default(policy)]
    if most is not None and not any(one.load == one.beside == ANY_LOAD for one in policy.interference):
        lines.append(
            "nobody has measured loads without a name: such work gets GPUs of its own, unless eelctl interference set "
            "'*' '*' SLOWDOWN says what unknown loads do to each other"
        )
    print_plain(settings, {"shared_slowdown_most": most}, lines)
