"""eelctl queue show, apply and move: the tree of queues with its usage, its declaration, and pending work between queues.

Queues are part of the policy, so that a change carries the revision that it is based on, as `eelctl policy set` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_queues, complete_workloads
from eelgrid_controller.cli.confirmation import confirm_change, yes_option
from eelgrid_controller.cli.connection import (
    CliSettings,
    connect_operators,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.output import TableColumn, echo, print_document, print_plain, text_table, use_colour
from eelgrid_controller.cli.queue_file import apply_queue_file, format_amount_of, queue_changes, read_queue_file
from eelgrid_controller.cli.workload_names import call_with_workload
from eelgrid_controller.formatting import count_noun
from eelgrid_controller.state.spending import describe_unit, format_amount
from eelgrid_protos.messages import (
    GetPolicyRequest,
    ListQueuesRequest,
    ListSpendingRequest,
    MoveToQueueRequest,
    Policy,
    QueueStatus,
    QueueUsage,
    SpendingScope,
    SpendingStatus,
    UpdatePolicyRequest,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import to_plain


@dataclass(frozen=True, slots=True)
class _Row:
    """One resource of one queue."""

    status: QueueStatus
    usage: QueueUsage | None
    depth: int

    def amount(self, amount: int | None) -> str:
        """Formats an amount of the resource; empty for none."""
        return "" if self.usage is None or amount is None else format_amount_of(self.usage.resource, amount)


_COLUMNS: tuple[TableColumn[_Row], ...] = (
    TableColumn("QUEUE", lambda r: "  " * r.depth + r.status.queue.name),
    TableColumn("RESOURCE", lambda r: "" if r.usage is None else r.usage.resource),
    TableColumn("NOMINAL", lambda r: "" if r.usage is None else r.amount(r.usage.quota), right=True),
    TableColumn("USED", lambda r: "" if r.usage is None else r.amount(r.usage.used), right=True),
    TableColumn("BORROWED", lambda r: "" if r.usage is None else r.amount(r.usage.borrowed), right=True),
    TableColumn("LENT", lambda r: "" if r.usage is None else r.amount(r.usage.lent), right=True),
    TableColumn("MOST", lambda r: "" if r.usage is None else r.amount(r.usage.usage_most), right=True),
    TableColumn("WEIGHT", lambda r: f"{r.status.queue.weight:g}", right=True),
    TableColumn("SHARE", lambda r: f"{r.status.weighted_share:.3f}", right=True),
    TableColumn("RUNNING", lambda r: str(r.status.running), right=True),
    TableColumn("WAITING", lambda r: str(r.status.waiting), right=True),
)


def _rows(statuses: Sequence[QueueStatus]) -> Iterator[_Row]:
    depths: dict[str, int] = {}
    for status in statuses:
        depth = depths[status.queue.name] = depths.get(status.queue.parent, -1) + 1
        shown: list[QueueUsage | None] = [usage for usage in status.usage if usage.used or usage.usage_most is not None]
        for usage in shown or [None]:
            yield _Row(status, usage, depth)


def _read_statuses(client: Any, settings: CliSettings) -> list[QueueStatus]:
    return list(iterate_pages(client.list_queues, ListQueuesRequest(), "queues", timeout_s=settings.timeout_s))


@click.command()
@output_option
@click.pass_obj
def show(settings: CliSettings) -> None:
    """Show the tree of queues: quotas, what is used, borrowed and lent, shares, and how much waits.

    NOMINAL and USED include the queues below. MOST is what could be used if nothing else ran; empty where nothing bounds
    it. SHARE is the largest part that is borrowed, over the weight: the smallest goes first. Spending limits of queues
    are below the table.
    """
    with connect_operators(settings) as client:
        statuses = _read_statuses(client, settings)
        spending = client.list_spending(ListSpendingRequest(), timeout=settings.timeout_s) if statuses else None
    lines = ["no queues are declared; declare them with eelctl queue apply -f FILE"]
    names = {status.queue.name for status in statuses}
    limits = [
        one
        for one in (() if spending is None else spending.limits)
        if one.limit.scope is SpendingScope.QUEUE and one.limit.name in names
    ]
    if spending is not None:
        lines = text_table(_COLUMNS, list(_rows(statuses)), headers=settings.headers, colour=use_colour())
        lines += [""] * bool(limits) + [_describe_spending(one, spending.currency) for one in limits]
    plain = {"queues": [to_plain(status) for status in statuses], "spending": [to_plain(one) for one in limits]}
    print_plain(settings, plain, lines)


def _describe_spending(one: SpendingStatus, currency: str) -> str:
    """Formats what a queue has spent of a limit."""
    limit = one.limit
    spent = "an unknown part" if one.spent is None else format_amount(limit.quantity, one.spent)
    amounts = f"{spent} of {format_amount(limit.quantity, limit.most)} {describe_unit(limit.quantity, currency)}"
    waits = f"; {count_noun(one.waiting, 'workload waits', 'workloads wait')} for it" if one.waiting else ""
    return f"queue {limit.name} has spent {amounts} of the {limit.period.name.lower()}{waits}"


@click.command()
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="YAML file that declares all queues; `queues: []` removes them.",
)
@click.option("--dry-run", is_flag=True, help="Print what would differ from the queues in force, and change nothing.")
@yes_option
@output_option
@click.pass_obj
def apply(settings: CliSettings, path: Path, dry_run: bool, yes: bool) -> None:
    """Declare queues from a file; those that it leaves out are removed. Requires the role admin.

    Work that runs stays. Where a quota falls below it, nothing new starts there until it is below again: that asks
    first, and needs --yes without a terminal.

    \b
    eelctl queue apply -f queues.yaml --dry-run
    """  # noqa: D301
    declared = read_queue_file(path)
    with connect_operators(settings) as client:
        found = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
        wanted = apply_queue_file(found, declared)
        changes = list(queue_changes(found, wanted)) or ["no queue changes"]
        low = list(_low_quotas(_read_statuses(client, settings), wanted))
        for line in low:
            echo(f"warning: {line}", err=True)
        if dry_run:
            print_document(settings, wanted, ("dry run: nothing was changed", *changes))
            return
        if low:
            confirm_change(
                f"Setting {count_noun(len(low), 'quota')} below what runs there",
                yes=yes,
                effects=("what runs stays, and nothing new starts there until enough of it has ended",),
                remedy="give it more, or answer y",
            )
        answer = client.update_policy(UpdatePolicyRequest(policy=wanted), timeout=settings.timeout_s).policy
        print_document(settings, answer, changes)


def _low_quotas(statuses: Sequence[QueueStatus], wanted: Policy) -> Iterator[str]:
    """Yields the queues of which the nominal quota, with that of the queues below, would be below what runs."""
    below: dict[str, list[str]] = {}
    for queue in wanted.queues:
        below.setdefault(queue.parent, []).append(queue.name)
    nominal = {(queue.name, quota.resource): quota.nominal for queue in wanted.queues for quota in queue.quotas}

    def total(name: str, resource: str) -> int:
        stack, found = [name], 0
        while stack:
            one = stack.pop()
            found += nominal.get((one, resource), 0)
            stack.extend(below.get(one, ()))
        return found

    declared = {queue.name for queue in wanted.queues}
    for status in statuses:
        for usage in status.usage if status.queue.name in declared else ():
            name, most = status.queue.name, total(status.queue.name, usage.resource)
            is_lower = most < usage.quota or usage.usage_most is None
            is_counted = any(resource == usage.resource for _, resource in nominal)
            if is_counted and is_lower and usage.used > most:
                amounts = [format_amount_of(usage.resource, amount) for amount in (most, usage.used)]
                yield f"queue {name}: a quota of {amounts[0]} {usage.resource} is below the {amounts[1]} that run there"


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.argument("queue", shell_complete=complete_queues)
@output_option
@click.pass_obj
def move(settings: CliSettings, workload: str, queue: str) -> None:
    """Move a pending workload to another queue; it keeps its time of submission."""
    with connect_operators(settings) as client:

        def call(workload_id: str) -> Workload:
            request = MoveToQueueRequest(workload_id=workload_id, queue=queue)
            found: Workload = client.move_to_queue(request, timeout=settings.timeout_s).workload
            return found

        moved = call_with_workload(client, settings, workload, call)
    state = "placed there" if moved.phase is WorkloadPhase.PLACED else f"waits there: {moved.reason}"
    print_document(settings, moved, [f"{moved.workload_id}: moved to queue {moved.spec.queue}; {state}"])
