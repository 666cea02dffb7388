"""eelctl reservation: nodes that are held for some users, a queue or maintenance in a span of time.

Reservations are part of the policy, so that a change carries the revision that it is based on, as `eelctl policy set` does.
Times are by the controller's clock. A reservation that has ended stays in the list until another one is made.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import click

from eelgrid_controller.cli.completion import (
    complete_model_lists,
    complete_nodes,
    complete_pools,
    complete_queues,
    complete_users,
)
from eelgrid_controller.cli.connection import (
    DURATION,
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    fetch_policy,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.output import TableColumn, print_document, print_plain, text_table, use_colour
from eelgrid_controller.formatting import count_noun, format_age, parse_duration_s
from eelgrid_protos.messages import (
    GetSummaryRequest,
    ListNodesRequest,
    Reservation,
    UpdatePolicyRequest,
    resolve_pool,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.schema import check_message

_NS = 10**9
_NAMED = 4


def parse_start_ns(text: str, now_ns: int, option: str = "--start") -> int:
    """Parses `now`, `+2h` from now, or a time in UTC; raises BadParameter, which names the option."""
    if text == "now":
        return now_ns
    try:
        if text.startswith("+"):
            return now_ns + parse_duration_s(text[1:]) * _NS
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r}; write now, +2h, or a time in UTC such as 2027-01-31T08:00", param_hint=option
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0, int(moment.timestamp())) * _NS


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _format_time(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%FT%TZ}"


def _describe_gpus(one: Reservation) -> str:
    """Describes how many GPUs it holds where it was made for a number of them; empty where nodes or a pool are named."""
    models = f" {' or '.join(one.gpu_models[:_NAMED])}" if one.gpu_models else ""
    lacking = f", {one.lacking_gpus} lacking" if one.lacking_gpus else ""
    return f"{one.gpus}{models}{lacking}" if one.gpus else ""


def _describe_nodes(one: Reservation) -> str:
    if one.pool:
        return f"pool {one.pool}"
    more = f" +{len(one.node_names) - _NAMED}" if len(one.node_names) > _NAMED else ""
    return ",".join(one.node_names[:_NAMED]) + more


def _describe_holder(one: Reservation) -> str:
    if one.maintenance:
        return "maintenance"
    parts = [*one.users[:_NAMED], *([f"queue {one.queue}"] if one.queue else [])]
    return ", ".join(parts) or "everybody"


def _describe_state(one: Reservation, now_ns: int) -> str:
    if now_ns >= one.end_ns:
        return "ended"
    changed = f"; changed, {one.change_cause.partition(': ')[2]}" if one.change_cause else ""
    return (f"in {format_age((one.start_ns - now_ns) / 1e9)}" if now_ns < one.start_ns else "in force") + changed


def _columns(now_ns: Callable[[], int]) -> tuple[TableColumn[Reservation], ...]:
    return (
        TableColumn("RESERVATION", lambda r: r.name),
        TableColumn("NODES", _describe_nodes),
        TableColumn("GPUS", _describe_gpus),
        TableColumn("FOR", _describe_holder),
        TableColumn("START", lambda r: _format_time(r.start_ns)),
        TableColumn("END", lambda r: _format_time(r.end_ns)),
        TableColumn("STATE", lambda r: _describe_state(r, now_ns())),
    )


def read_now_ns(client: Any, settings: CliSettings) -> int:
    """Reads the controller's clock."""
    now_ns: int = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary.time_ns
    return now_ns


def _refuse_unknown(client: Any, settings: CliSettings, wanted: Reservation) -> None:
    """Refuses nodes and pools that no node has; raises NameNotFound."""
    nodes = [
        one.inventory
        for one in iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=settings.timeout_s)
    ]
    known = {one.node_name for one in nodes}
    unknown = [name for name in wanted.node_names if name not in known]
    if wanted.pool and resolve_pool(wanted.pool) not in {resolve_pool(one.pool) for one in nodes}:
        unknown = [wanted.pool]
    if unknown:
        raise NameNotFound(f"no node has {unknown[0]!r}; nothing was reserved", "see the names with eelctl nodes")


@click.group()
def reservation() -> None:
    """Hold nodes for users, a queue or maintenance in a span of time."""


@reservation.command("create")
@click.argument("name")
@click.option("--nodes", default="", metavar="N1,N2", help="The nodes that it holds.", shell_complete=complete_nodes)
@click.option("--pool", default="", help="All nodes of a pool instead.", shell_complete=complete_pools)
@click.option("--gpus", type=click.IntRange(1, 1_000_000), help="So many GPUs instead, on whole nodes that are chosen.")
@click.option(
    "--model", default="", help="Their models, by any of their names: A,B.", shell_complete=complete_model_lists
)
@click.option("--start", default="now", show_default=True, help="now, +2h, or a time in UTC: 2027-01-31T08:00.")
@click.option("--duration", type=DURATION, required=True, help="For how long: 90m, 4h, 2d.")
@click.option("--users", default="", metavar="A,B", help="Whose work may start there.", shell_complete=complete_users)
@click.option("--queue", default="", help="The queue that work must be in.", shell_complete=complete_queues)
@click.option("--maintenance", is_flag=True, help="Nothing starts there.")
@output_option
@click.pass_obj
def create(settings: CliSettings, /, name: str, start: str, duration: int, maintenance: bool, **flags: Any) -> None:
    """Reserve nodes from a time on, for a span. Requires the role admin.

    What would not have ended by the start is not placed there any more; work of which no run time is known is not from a
    day before on. What runs there stays. With --gpus the nodes are chosen now, those that close the fewest GPUs beyond the
    number, and are told; it is refused if not so many are free by the start. They are chosen again when one is lost or cordoned. Without --users, --queue and --maintenance everybody's work may start within the span.

    \b
    eelctl reservation create demo --nodes n1,n2 --start +2h --duration 4h --users ada
    eelctl reservation create eval --gpus 8 --model h100 --start +1d --duration 4h --queue eval
    """  # noqa: D301
    nodes = _split(flags["nodes"])
    if sum(map(bool, (nodes, flags["pool"], flags["gpus"]))) != 1:
        raise click.UsageError("give --nodes, --pool or --gpus, one of them")
    if flags["model"] and not flags["gpus"]:
        raise click.UsageError("--model needs --gpus")
    with connect_operators(settings) as client:
        now_ns, found = read_now_ns(client, settings), fetch_policy(client, settings)
        start_ns = parse_start_ns(start, now_ns)
        wanted = Reservation(
            name=name,
            node_names=nodes,
            pool=flags["pool"],
            start_ns=start_ns,
            end_ns=start_ns + duration * _NS,
            users=_split(flags["users"]),
            queue=flags["queue"],
            maintenance=maintenance,
            gpus=flags["gpus"] or 0,
            gpu_models=_split(flags["model"]),
        )
        check_message(wanted)
        if wanted.end_ns <= now_ns:
            raise RequestRefused("the reservation would have ended already", "give a later --start")
        current = tuple(one for one in found.reservations if one.end_ns > now_ns)
        if any(one.name == name for one in current):
            raise RequestRefused(f"there is a reservation {name!r} already", "choose another name, or delete it first")
        _refuse_unknown(client, settings, wanted)
        changed = replace(found, reservations=(*current, wanted))
        made = client.update_policy(UpdatePolicyRequest(policy=changed), timeout=settings.timeout_s).policy
        wanted = next((one for one in made.reservations if one.name == name), wanted)
    state = f"{_describe_nodes(wanted)} from {_format_time(wanted.start_ns)} to {_format_time(wanted.end_ns)}"
    print_document(settings, wanted, [f"{name}: reserved for {_describe_holder(wanted)}: {state}"])


@reservation.command("list")
@output_option
@click.pass_obj
def list_reservations(settings: CliSettings) -> None:
    """List reservations, those too that have ended and were not replaced."""
    with connect_operators(settings) as client:
        found, now_ns = fetch_policy(client, settings), read_now_ns(client, settings)
    rows = sorted(found.reservations, key=lambda one: (one.start_ns, one.name))
    lines = ["no node is reserved; reserve some with eelctl reservation create"]
    if rows:
        lines = text_table(_columns(lambda: now_ns), rows, headers=settings.headers, colour=use_colour())
    print_plain(settings, {"reservations": [to_plain(one) for one in rows]}, lines)


@reservation.command("delete")
@click.argument("name", nargs=-1, required=True)
@output_option
@click.pass_obj
def delete(settings: CliSettings, name: tuple[str, ...]) -> None:
    """Delete reservations; pending work is tried on their nodes at once. Requires the role admin."""
    with connect_operators(settings) as client:
        found = fetch_policy(client, settings)
        known = [one.name for one in found.reservations]
        unknown = [one for one in name if one not in known]
        if unknown:
            raise NameNotFound(f"no reservation is called {unknown[0]!r}", "see them with eelctl reservation list")
        left = tuple(one for one in found.reservations if one.name not in name)
        answer = client.update_policy(
            UpdatePolicyRequest(policy=replace(found, reservations=left)), timeout=settings.timeout_s
        ).policy
    print_document(settings, answer, [f"{count_noun(len(set(name)), 'reservation')} deleted"])
