"""eelctl interference: by how much loads that share a GPU slow each other down, and how much work has to bear.

Both are part of the policy, so that a change carries the revision that it is based on, as `eelctl policy set` does. The
options of commands that submit work are here, too.
"""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from eelgrid_controller.cli.connection import (
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    output_option,
    read_input,
)
from eelgrid_controller.cli.output import TableColumn, print_plain, text_table, use_colour
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.messages import (
    ANY_LOAD,
    INTERFERENCE_MOST,
    GetPolicyRequest,
    GpuSharing,
    Interference,
    Policy,
    UpdatePolicyRequest,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.schema import check_message

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PERCENT = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,6})?)\s*(%?)")
_FIELDS = ("load", "beside", "slowdown")
_LETTERS_MOST = 8 << 20
_NO_LIMIT = "none"


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


def _read_policy(client: Any, settings: CliSettings) -> Policy:
    found: Policy = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
    return found


def _update(client: Any, settings: CliSettings, policy: Policy) -> None:
    client.update_policy(UpdatePolicyRequest(policy=policy), timeout=settings.timeout_s)


def _describe_default(policy: Policy) -> str:
    most = policy.shared_slowdown_most
    if most is None:
        return "work that states no limit bears everything"
    return f"work that states no limit is slowed down by {format_slowdown(most)} at the most"


def _in_order(pairs: Sequence[Interference]) -> tuple[Interference, ...]:
    return tuple(sorted(pairs, key=lambda one: (one.load == ANY_LOAD, one.load, one.beside == ANY_LOAD, one.beside)))


_COLUMNS = (
    TableColumn[Interference]("LOAD", lambda one: one.load),
    TableColumn[Interference]("BESIDE", lambda one: one.beside),
    TableColumn[Interference]("SLOWDOWN", lambda one: format_slowdown(one.slowdown), right=True),
)


@click.group()
def interference() -> None:
    """Say by how much loads that share a GPU slow each other down, and how much work bears."""


@interference.command("list")
@output_option
@click.pass_obj
def list_interference(settings: CliSettings) -> None:
    """List measured pairs of loads, and the limit of work that states none."""
    with connect_operators(settings) as client:
        policy = _read_policy(client, settings)
    rows = _in_order(policy.interference)
    lines = ["no pair of loads was measured; tell one with eelctl interference set"]
    if rows:
        lines = text_table(_COLUMNS, rows, headers=settings.headers, colour=use_colour())
    plain = {"interference": [to_plain(one) for one in rows], "shared_slowdown_most": policy.shared_slowdown_most}
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
        policy = _read_policy(client, settings)
        others = tuple(one for one in policy.interference if (one.load, one.beside) != (load, beside))
        _update(client, settings, replace(policy, interference=_in_order((*others, wanted))))
    print_plain(settings, to_plain(wanted), [f"{load} is slowed down by {format_slowdown(slowdown)} beside {beside}"])


def read_pairs(text: str, name: str) -> tuple[Interference, ...]:
    """Reads pairs from CSV with the columns load, beside and slowdown; raises RequestRefused with the line."""
    rows = csv.DictReader(text.splitlines())
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
        policy = _read_policy(client, settings)
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
        policy = _read_policy(client, settings)
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
        policy = replace(_read_policy(client, settings), shared_slowdown_most=most)
        _update(client, settings, policy)
    print_plain(settings, {"shared_slowdown_most": most}, [_describe_default(policy)])
