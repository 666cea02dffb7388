"""eelctl queue: pending workloads in scheduling order, since when and for what they wait, and what would help.

Owns the command's options, its rows and its sums. The controller decides the reasons and the order, which is
priority, then submission, and with queues fair share. The command reads the whole queue, whatever it shows of it, so that places and sums are
those of the whole queue.

What would help costs the controller a decision, so it is asked once per constraint, for the first workload that
waits for it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click

from eelgrid_controller.cli import queue_tree
from eelgrid_controller.cli.completion import complete_namespaces, complete_queues, complete_users
from eelgrid_controller.cli.connection import CliSettings, connect_operators, output_option
from eelgrid_controller.cli.deadline import format_deadline
from eelgrid_controller.cli.nodes import limit_option
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_rows,
    list_options,
    print_plain,
    terminal_width,
    text_table,
    use_colour,
    visible_columns,
)
from eelgrid_controller.cli.workload_listing import WorkloadListing
from eelgrid_controller.cli.workloads import request_text
from eelgrid_controller.formatting import count_noun, format_age, format_cpu, format_gpu, format_memory
from eelgrid_protos.messages import (
    ExplainWorkloadRequest,
    GetSummaryRequest,
    ListWorkloadsRequest,
    WorkloadPhase,
    WorkloadSummary,
)

# More constraints than there are.
_EXPLAINED_MOST = 32


@dataclass(frozen=True, slots=True)
class QueuedWorkload:
    """A pending workload with its place in the whole queue, from 1, and its wait in seconds."""

    place: int
    summary: WorkloadSummary
    waits_s: float

    @property
    def constraint(self) -> str:
        """The constraint that it waits for, in one word."""
        return self.summary.reason.partition(":")[0]

    @property
    def gpu_milli(self) -> int:
        """The GPU request of all its replicas, in thousandths of a GPU."""
        return self.summary.gpu_milli


@dataclass(frozen=True, slots=True)
class _Sum:
    """The pending workloads under one name."""

    name: str
    rows: tuple[QueuedWorkload, ...]

    def total(self, amount: Callable[[QueuedWorkload], int]) -> int:
        """Sums an amount over the rows."""
        return sum(map(amount, self.rows))

    @property
    def longest_s(self) -> float:
        """The longest wait, in seconds."""
        return max(row.waits_s for row in self.rows)

    @property
    def constraints(self) -> Counter[str]:
        """Number of workloads by constraint."""
        return Counter(row.constraint for row in self.rows)


def _each(amount: Callable[[Any], int]) -> Callable[[QueuedWorkload], int]:
    """An amount of all replicas."""
    return lambda row: row.summary.replicas * amount(row.summary.request)


def _format_start(row: QueuedWorkload) -> str:
    """Formats by when a workload is promised to start, by the controller's clock; empty without a promise."""
    start_ns = row.summary.promised_start_ns
    if not start_ns:
        return ""
    left_s = (start_ns - row.summary.submitted_ns) / 1e9 - row.waits_s
    return f"in {format_age(left_s)}" if left_s > 0.0 else "due"


def _format_deadline(row: QueuedWorkload) -> str:
    """Formats how long it is to a workload's deadline, by the controller's clock."""
    one = row.summary
    return format_deadline(one.deadline, one.submitted_ns + int(row.waits_s * 1e9), is_broken=one.deadline_broken)


_DEADLINE = "DEADLINE"

QUEUE_COLUMNS: tuple[TableColumn[QueuedWorkload], ...] = (
    TableColumn("PLACE", lambda r: str(r.place), right=True),
    TableColumn("ID", lambda r: r.summary.workload_id),
    TableColumn("NAME", lambda r: r.summary.name, wide=True),
    TableColumn("PRIORITY", lambda r: str(r.summary.priority), right=True),
    TableColumn("NAMESPACE", lambda r: r.summary.namespace),
    TableColumn("QUEUE", lambda r: r.summary.queue),
    TableColumn("USER", lambda r: r.summary.user, wide=True),
    TableColumn("KIND", lambda r: r.summary.kind.name.lower(), wide=True),
    TableColumn("REPLICAS", lambda r: str(r.summary.replicas), right=True),
    TableColumn("EACH", lambda r: request_text(r.summary.request)),
    TableColumn("SINCE", lambda r: f"{datetime.fromtimestamp(r.summary.submitted_ns / 1e9, UTC):%FT%TZ}", wide=True),
    TableColumn("WAITS", lambda r: format_age(r.waits_s), right=True),
    TableColumn("STARTS", _format_start),
    TableColumn(_DEADLINE, _format_deadline),
    TableColumn("REASON", lambda r: r.summary.reason),
)

# By what can be summed: the title of its column, and the name under which a workload counts.
_BY: Mapping[str, tuple[str, Callable[[QueuedWorkload], str]]] = {
    "namespace": ("NAMESPACE", lambda r: r.summary.namespace),
    "queue": ("QUEUE", lambda r: r.summary.queue),
    "user": ("USER", lambda r: r.summary.user),
    "reason": ("REASON", lambda r: r.constraint),
}


def _matches(row: QueuedWorkload, key: str, name: str) -> bool:
    """Returns whether a workload counts under a name; one that waits for CPU and memory waits for each of them."""
    found = _BY[key][1](row)
    return found == name or (key == "reason" and name in found.split("+"))


def _describe_no_match(rows: Sequence[QueuedWorkload], wanted: Mapping[str, str]) -> str:
    """Says that nothing matches; names what there is instead of a constraint for which nothing waits."""
    if not rows:
        return "nothing waits"
    reason = wanted["reason"]
    if reason and not any(_matches(row, "reason", reason) for row in rows):
        known = sorted({name for row in rows for name in _BY["reason"][1](row).split("+")})
        return f"nothing waits for {reason!r}; workloads wait for {', '.join(known)}"
    return f"no pending workload matches; without filters there are {len(rows):,}"


def _sum_columns(title: str) -> tuple[TableColumn[_Sum], ...]:
    return (
        TableColumn(title, lambda s: s.name),
        TableColumn("WORKLOADS", lambda s: str(len(s.rows)), right=True),
        TableColumn("REPLICAS", lambda s: str(s.total(lambda r: r.summary.replicas)), right=True),
        TableColumn("GPUS", lambda s: format_gpu(s.total(lambda r: r.gpu_milli)), right=True),
        TableColumn("CPU", lambda s: format_cpu(s.total(_each(lambda q: q.cpu_milli))), right=True, wide=True),
        TableColumn("MEMORY", lambda s: format_memory(s.total(_each(lambda q: q.memory_bytes))), right=True, wide=True),
        TableColumn("LONGEST", lambda s: format_age(s.longest_s), right=True),
        TableColumn("FIRST", lambda s: s.rows[0].summary.workload_id, wide=True),
        TableColumn("WAIT FOR", lambda s: ", ".join(f"{name} {count}" for name, count in s.constraints.most_common())),
    )


def _sum_by_name(rows: Sequence[QueuedWorkload], name: Callable[[QueuedWorkload], str]) -> list[_Sum]:
    """Sums by name; the one whose first workload is tried first comes first."""
    found: dict[str, list[QueuedWorkload]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return [_Sum(key, tuple(members)) for key, members in found.items()]


def _plain_sum(by: str, one: _Sum) -> dict[str, Any]:
    return {
        by: one.name,
        "workloads": len(one.rows),
        "replicas": one.total(lambda row: row.summary.replicas),
        "gpu_milli": one.total(lambda row: row.gpu_milli),
        "cpu_milli": one.total(_each(lambda request: request.cpu_milli)),
        "memory_bytes": one.total(_each(lambda request: request.memory_bytes)),
        "longest_s": one.longest_s,
        "first": one.rows[0].summary.workload_id,
        "reasons": dict(one.constraints.most_common()),
    }


def _plain_row(listing: WorkloadListing, row: QueuedWorkload) -> dict[str, Any]:
    return {
        "place": row.place,
        "waits_s": row.waits_s,
        "constraint": row.constraint,
        "workload": listing.to_plain(row.summary),
    }


def rank_queue(pending: Iterable[WorkloadSummary], now_ns: int) -> list[QueuedWorkload]:
    """Returns pending workloads in scheduling order, given in the order of submission; waits are up to `now_ns`.

    Those whose places the controller has told come first, by these, then the others by priority and submission.
    """
    # Sorting keeps the order of submission among equals.
    ranked = sorted(pending, key=lambda row: (row.queue_position or math.inf, -row.priority))
    return [
        QueuedWorkload(place, row, max(0.0, (now_ns - row.submitted_ns) / 1e9)) for place, row in enumerate(ranked, 1)
    ]


def _read(client: Any, listing: WorkloadListing, timeout_s: float) -> list[QueuedWorkload]:
    """Returns all pending workloads in scheduling order, with waits by the controller's clock."""
    request = ListWorkloadsRequest(phases=(WorkloadPhase.PENDING,), queue_positions=True)
    found = list(listing.iterate_rows(request))
    return rank_queue(found, client.get_summary(GetSummaryRequest(), timeout=timeout_s).summary.time_ns)


def _remedies(client: Any, sums: Sequence[_Sum], timeout_s: float) -> dict[str, str]:
    """Returns, by constraint, what would help the first workload that waits for it; omits one that waits no more."""
    from eelgrid_protos.faults import NotFound

    found: dict[str, str] = {}
    for one in sums[:_EXPLAINED_MOST]:
        request = ExplainWorkloadRequest(workload_id=one.rows[0].summary.workload_id)
        try:
            found[one.name] = client.explain_workload(request, timeout=timeout_s).explanation.remedy
        except NotFound:
            continue
    return {name: remedy for name, remedy in found.items() if remedy}


def _describe_sums(sums: Sequence[_Sum], remedies: Mapping[str, str]) -> Iterator[str]:
    """Formats how much waits for each constraint, and what would help the first workload."""
    for one in sums:
        first, count = one.rows[0], len(one.rows)
        words = first.summary.reason.partition(": ")[2]
        yield ""
        yield (
            f"{one.name}: {count_noun(count, 'waits', 'wait')}, with {format_gpu(one.total(lambda row: row.gpu_milli))} "
            f"GPUs and {format_cpu(one.total(_each(lambda request: request.cpu_milli)))} CPUs, the longest for "
            f"{format_age(one.longest_s)}" + (f"; {words}." if words else ".")
        )
        if one.name in remedies:
            yield f"  {first.summary.workload_id}, the first of them: {remedies[one.name]}"


@click.group(invoke_without_command=True)
@click.option("--namespace", default="", help="Only workloads in this namespace.", shell_complete=complete_namespaces)
@click.option("--user", default="", help="Only workloads of this user.", shell_complete=complete_users)
@click.option("--queue", default="", help="Only workloads in this queue.", shell_complete=complete_queues)
@click.option(
    "--reason",
    default="",
    metavar="CONSTRAINT",
    help="Only workloads that wait for this constraint, alone or among others: gpu_count, cpu, budget, ...",
)
@click.option("--by", type=click.Choice(list(_BY)), help="Show sums instead of workloads.")
@limit_option
@list_options(*QUEUE_COLUMNS, *_sum_columns(""))
@output_option
@click.pass_context
def queue(context: click.Context, /, by: str | None, limit: int | None, **wanted: str) -> None:
    """Show pending workloads in scheduling order, and what would help them.

    STARTS is by when a workload starts at the latest, if run times are as expected; only what waits for capacity first
    and what has a DEADLINE is promised that, unless the policy says otherwise (`eelctl policy set --backfill`).
    PLACE is the position in the whole queue: by priority and submission, or where queues are declared (`show`) as fair
    share has it now, for the first 1024. The lines below the table sum up what waits for each constraint;
    --no-headers omits them.

    \b
    eelctl queue --reason gpu_count --namespace research
    eelctl queue --by user
    """  # noqa: D301
    if context.invoked_subcommand:
        return
    settings: CliSettings = context.obj
    with connect_operators(settings) as client:
        listing = WorkloadListing(client, settings)
        every = _read(client, listing, settings.timeout_s)
        empty = _describe_no_match(every, wanted)
        rows = [row for row in every if all(not name or _matches(row, key, name) for key, name in wanted.items())]
        if by is not None:
            title, name = _BY[by]
            sums = arrange_rows(settings, _sum_columns(title), _sum_by_name(rows, name), limit=limit)
            _print_queue(settings, [_plain_sum(by, one) for one in sums], _sum_columns(title), sums, empty=empty)
            return
        sums = _sum_by_name(rows, _BY["reason"][1])
        as_document = settings.output in {"json", "yaml"}
        remedies = _remedies(client, sums, settings.timeout_s) if settings.headers or as_document else {}
    reasons = [_plain_sum("reason", one) | {"remedy": remedies.get(one.name, "")} for one in sums]
    shown = arrange_rows(settings, QUEUE_COLUMNS, rows, limit=limit)
    plain = {"waiting": [_plain_row(listing, row) for row in shown], "reasons": reasons} if as_document else None
    _print_queue(
        settings,
        plain,
        _select_columns(rows),
        shown,
        _describe_sums(sums, remedies) if settings.headers else (),
        empty=empty,
    )


queue.add_command(queue_tree.show)
queue.add_command(queue_tree.apply)
queue.add_command(queue_tree.move)


def _select_columns(rows: Iterable[QueuedWorkload]) -> tuple[TableColumn[QueuedWorkload], ...]:
    """Returns the columns, with that of deadlines only where any row has one."""
    has_deadlines = any(row.summary.deadline is not None for row in rows)
    return tuple(one for one in QUEUE_COLUMNS if has_deadlines or one.title != _DEADLINE)


def _print_queue(
    settings: CliSettings,
    plain: Any,
    columns: Sequence[TableColumn[Any]],
    rows: Sequence[Any],
    more: Any = (),
    *,
    empty: str,
) -> None:
    """Prints a table and the lines below it, or their plain form."""
    if not rows and settings.output not in {"json", "yaml"}:
        click.echo(empty, err=True)
        return
    columns = visible_columns(settings, columns)
    lines = text_table(columns, rows, headers=settings.headers, colour=use_colour(), width=terminal_width())
    print_plain(settings, plain, [*lines, *more])
