"""What the tabs of eelctl top show: their columns, the order and filter of their rows, and the history of power.

Pure: from messages of the contract to rows and texts. Calls nobody, draws nothing and reads no clock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from eelgrid_controller.cli.access import AUDIT_COLUMNS
from eelgrid_controller.cli.connection import CliSettings
from eelgrid_controller.cli.nodes import GPU_COLUMNS, NODE_COLUMNS
from eelgrid_controller.cli.output import TableColumn, arrange_rows, share_colour, share_of, shorten_text
from eelgrid_controller.cli.queue import QUEUE_COLUMNS
from eelgrid_controller.cli.workloads import build_workload_columns
from eelgrid_controller.formatting import format_age, format_milliseconds, format_power
from eelgrid_protos.messages import (
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    BudgetStatus,
    JobStatus,
    ListPromisesResponse,
    ServiceStatus,
)

_Row = TypeVar("_Row")
# What a subject of an attention item is the name of; a kind that is not here has no object to describe.
_SUBJECTS: Mapping[AttentionKind, str] = {
    AttentionKind.LOST_NODE: "node",
    AttentionKind.AHEAD_OF_JOURNAL: "node",
    AttentionKind.STALE_READINGS: "node",
    AttentionKind.PLAN_NOT_APPLIED: "node",
    AttentionKind.CORDONED_NODE: "node",
    AttentionKind.LOST_GPU: "gpu",
    AttentionKind.CORDONED_GPU: "gpu",
    AttentionKind.FAILING_GPU: "gpu",
    AttentionKind.STUCK_LAYOUT: "gpu",
    AttentionKind.BROKEN_PROMISE: "workload",
    AttentionKind.UNCONTROLLED_PROMISE: "workload",
    AttentionKind.LONG_WAIT: "workload",
    AttentionKind.HELD_BUT_IDLE: "workload",
}
_STATUS_WIDE = 50
# Less of a reason says nothing.
_REASON_LEAST = 12
_SEVERITY_COLOURS = {"critical": "red", "warning": "yellow"}
_BAD_PHASES = frozenset({"unsteered", "late"})


@dataclass(frozen=True, slots=True)
class DescribedObject:
    """What the pane describes: a kind and a name, as `eelctl describe` takes them."""

    kind: str
    name: str

    @property
    def command(self) -> str:
        """The command that shows the same."""
        return f"eelctl describe {self.kind} {self.name}"


# Without slots: see TableColumn.
@dataclass(frozen=True, kw_only=True)
class TopTab(Generic[_Row]):
    """One tab: what its table shows, and what its rows are the names of."""

    key: str
    title: str
    # For a terminal of 80 columns.
    short: str
    columns: Sequence[TableColumn[_Row]]
    identify: Callable[[_Row], str]
    describe: Callable[[_Row], DescribedObject | None]
    command: Callable[[_Row], str]
    # The column by which `s` begins to sort, the largest first.
    sort: str
    empty: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """How the rows of a tab are sorted and filtered; without a column they stay as the controller orders them."""

    column: str = ""
    is_descending: bool = True
    pattern: str = ""

    def reverse(self, tab: TopTab[Any]) -> "RowOrder":
        """Returns the other direction, or the tab's own column where none is chosen yet."""
        if not self.column:
            return replace(self, column=tab.sort, is_descending=True)
        return replace(self, is_descending=not self.is_descending)

    def shift(self, tab: TopTab[Any], steps: int) -> "RowOrder":
        """Returns the order by the next column, or by the one before; past either end it is the controller's order."""
        titles = ["", *(column.title for column in tab.columns)]
        at = titles.index(self.column) if self.column in titles else 0
        return replace(self, column=titles[(at + steps) % len(titles)])

    def choose(self, title: str) -> "RowOrder":
        """Returns the order by a column that was clicked; a second click reverses it."""
        if title == self.column:
            return replace(self, is_descending=not self.is_descending)
        return replace(self, column=title, is_descending=True)


def select_rows(tab: TopTab[_Row], rows: Iterable[_Row], order: RowOrder) -> list[_Row]:
    """Filters rows by text, in any column or by COLUMN=TEXT, and sorts them; rows without a value come last."""
    found = list(rows)
    titles = {column.title.casefold(): column for column in tab.columns}
    name, equals, part = order.pattern.casefold().partition("=")
    if equals and name.strip() in titles:
        cell = titles[name.strip()].cell
        found = [row for row in found if part.strip() in cell(row).casefold()]
    elif order.pattern:
        wanted = order.pattern.casefold()
        found = [row for row in found if any(wanted in column.cell(row).casefold() for column in tab.columns)]
    if order.column.casefold() not in titles:
        return found
    sort = ("-" if order.is_descending else "") + order.column
    return arrange_rows(replace(CliSettings(), sort=sort), tab.columns, found)


# What a narrow screen shows without scrolling sideways.
_NODES_FIRST = ("NODE", "STATE", "GPUS", "POWER", "MODEL", "WORKLOADS")
_GPUS_FIRST = ("NODE", "GPU", "STATE", "BUSY", "POWER", "MODEL", "TEMP", "MEMORY")
_WORKLOADS_FIRST = ("NAME", "USER", "PHASE", "GPUS", "POWER", "AGE", "NODE", "REASON")
_QUEUE_FIRST = ("PLACE", "NAME", "USER", "WAITS", "EACH", "REASON")
_AUDIT_FIRST = ("TIME", "WHO", "CALL", "ANSWER", "WHAT")


def _arrange_columns(columns: Sequence[TableColumn[_Row]], first: Sequence[str]) -> tuple[TableColumn[_Row], ...]:
    """Returns the columns, some titles first and those of `-o wide` last."""
    ranks = {title: rank for rank, title in enumerate(first)}
    return tuple(sorted(columns, key=lambda column: (ranks.get(column.title, len(first)), column.wide)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseRow:
    """A budget, or a service or job with an objective, as one row."""

    kind: str
    name: str
    phase: str = ""
    is_bad: bool = False
    target: str = ""
    actual: str = ""
    # What is used of a budget, or of a latency objective.
    share: float | None = None
    note: str = ""
    workload_id: str = ""


def _budget_row(one: BudgetStatus) -> PromiseRow:
    used_w = one.claimed_w if one.measured_w is None else one.measured_w
    phase = "over" if one.over_w else "short" if one.shortfall_w else "ok"
    notes = [f"{format_power(one.claimed_w)} claimed"] if one.claimed_w else []
    notes += [f"{format_power(one.over_w)} over"] if one.over_w else []
    notes += [f"{format_power(one.shortfall_w)} short"] if one.shortfall_w else []
    return PromiseRow(
        kind="budget",
        name=f"{one.budget.scope.name.lower()} {one.budget.name}".strip(),
        phase=phase,
        is_bad=phase != "ok",
        target=format_power(one.budget.limit_w),
        actual=format_power(one.measured_w),
        share=share_of(used_w, one.budget.limit_w),
        note=", ".join(notes),
    )


def _service_row(one: ServiceStatus) -> PromiseRow:
    is_late = one.live_s is not None and bool(one.objective_s) and one.live_s > one.objective_s
    return PromiseRow(
        kind="service",
        name=one.name or one.workload_id,
        phase="late" if is_late else one.phase,
        is_bad=is_late or one.phase in _BAD_PHASES,
        target=format_milliseconds(one.objective_s) if one.objective_s else "",
        actual=format_milliseconds(one.live_s),
        share=share_of(one.live_s, one.objective_s),
        note=f"{one.replicas_serving}/{one.replicas_wanted} replicas" + (f"; {one.reason}" if one.reason else ""),
        workload_id=one.workload_id,
    )


def _job_row(one: JobStatus) -> PromiseRow:
    return PromiseRow(
        kind="job",
        name=one.name or one.workload_id,
        phase=one.phase,
        is_bad=one.phase in _BAD_PHASES,
        target="" if one.power_limit_w is None else f"{one.power_limit_w:g} W per GPU",
        actual="" if one.slowdown is None else f"{100 * one.slowdown:+.1f} % time",
        note=one.reason,
        workload_id=one.workload_id,
    )


def list_promise_rows(found: ListPromisesResponse) -> list[PromiseRow]:
    """Returns budgets, then services, then jobs, each as one row."""
    return [
        *map(_budget_row, found.budgets),
        *map(_service_row, found.services),
        *map(_job_row, found.jobs),
    ]


PROMISE_COLUMNS: tuple[TableColumn[PromiseRow], ...] = (
    TableColumn("KIND", lambda one: one.kind),
    TableColumn("NAME", lambda one: one.name),
    TableColumn("STATE", lambda one: one.phase, colour=lambda one: "red" if one.is_bad else "green"),
    TableColumn("TARGET", lambda one: one.target, right=True),
    TableColumn(
        "NOW",
        lambda one: one.actual,
        right=True,
        colour=lambda one: share_colour(one.share),
        share=lambda one: one.share,
    ),
    TableColumn("NOTE", lambda one: one.note),
)


def _severity(item: AttentionItem) -> str:
    return "" if item.severity is AttentionSeverity.UNSPECIFIED else item.severity.name.lower()


def _attention_columns(now_ns: Callable[[], int]) -> tuple[TableColumn[AttentionItem], ...]:
    return (
        TableColumn("SEVERITY", _severity, colour=lambda item: _SEVERITY_COLOURS.get(_severity(item))),
        TableColumn("SUBJECT", lambda item: item.subject),
        TableColumn("MESSAGE", lambda item: item.message),
        TableColumn(
            "SINCE",
            lambda item: format_age((now_ns() - item.since_ns) / 1e9) if item.since_ns else "",
            right=True,
        ),
        TableColumn("COMMAND", lambda item: item.command),
    )


def _describe_attention(item: AttentionItem) -> DescribedObject | None:
    kind = _SUBJECTS.get(item.kind)
    return None if kind is None or not item.subject else DescribedObject(kind, item.subject)


def _describe_promise(row: PromiseRow) -> DescribedObject | None:
    return DescribedObject("workload", row.workload_id) if row.workload_id else None


def _format_command(describe: Callable[[_Row], DescribedObject | None]) -> Callable[[_Row], str]:
    def command(row: _Row) -> str:
        found = describe(row)
        return "" if found is None else found.command

    return command


def _make_tab(
    key: str,
    titles: tuple[str, str],
    columns: Sequence[TableColumn[_Row]],
    describe: Callable[[_Row], DescribedObject | None],
    *,
    sort: str,
    empty: str,
    identify: Callable[[_Row], str] | None = None,
    command: Callable[[_Row], str] | None = None,
) -> TopTab[_Row]:
    """Builds a tab whose rows are known by the name of what they describe, unless `identify` says otherwise."""

    def name(row: _Row) -> str:
        found = describe(row)
        return "" if found is None else found.name

    return TopTab(
        key=key,
        title=titles[0],
        short=titles[1],
        columns=columns,
        describe=describe,
        identify=identify or name,
        command=command or _format_command(describe),
        sort=sort,
        empty=empty,
    )


def build_tabs(now_ns: Callable[[], int]) -> tuple[TopTab[Any], ...]:
    """Builds the tabs in their order; `now_ns` is the controller's time, for ages."""
    return (
        _make_tab(
            "overview",
            ("Overview", "Overview"),
            _attention_columns(now_ns),
            _describe_attention,
            identify=lambda item: f"{item.kind.name} {item.subject}",
            command=lambda item: item.command,
            sort="SEVERITY",
            empty="nothing needs attention",
        ),
        _make_tab(
            "nodes",
            ("Nodes", "Nodes"),
            _arrange_columns(NODE_COLUMNS, _NODES_FIRST),
            lambda node: DescribedObject("node", node.inventory.node_name),
            sort="POWER",
            empty="no node; nodes join when eelgrid-agent runs on them",
        ),
        _make_tab(
            "gpus",
            ("GPUs", "GPUs"),
            _arrange_columns(GPU_COLUMNS, _GPUS_FIRST),
            lambda one: DescribedObject("gpu", f"{one.node_name}/{one.gpu.index}"),
            sort="POWER",
            empty="no GPU",
        ),
        _make_tab(
            "workloads",
            ("Workloads", "Work"),
            _arrange_columns(build_workload_columns(now_ns), _WORKLOADS_FIRST),
            lambda one: DescribedObject("workload", one.workload_id),
            sort="POWER",
            empty="no workload; submit one with `eelctl submit`",
        ),
        _make_tab(
            "queue",
            ("Queue", "Queue"),
            _arrange_columns(QUEUE_COLUMNS, _QUEUE_FIRST),
            lambda one: DescribedObject("workload", one.summary.workload_id),
            command=lambda one: f"eelctl explain {one.summary.workload_id}",
            sort="WAITS",
            empty="nothing waits",
        ),
        _make_tab(
            "promises",
            ("Budgets & promises", "Budgets"),
            PROMISE_COLUMNS,
            _describe_promise,
            identify=lambda one: f"{one.kind} {one.workload_id or one.name}",
            command=lambda one: f"eelctl describe workload {one.workload_id}" if one.workload_id else "eelctl promises",
            sort="NOW",
            empty="no budget and no objective; docs/how-to/promises.md says how to set them",
        ),
        _make_tab(
            "changes",
            ("Changes", "Changes"),
            _arrange_columns(AUDIT_COLUMNS, _AUDIT_FIRST),
            lambda _: None,
            identify=lambda one: str(one.number),
            command=lambda one: f"eelctl audit --call {one.call}",
            sort="TIME",
            empty="nobody requested a change in the last 24 hours",
        ),
    )


def list_facts(tab: TopTab[_Row], row: _Row) -> list[str]:
    """Formats one row as a line for each column that has something to say."""
    cells = [(column.title.lower(), column.cell(row)) for column in tab.columns]
    shown = [(title, text) for title, text in cells if text and text != "-"]
    width = max((len(title) for title, _ in shown), default=0)
    return [f"{title:<{width}}  {text}" for title, text in shown]


class PowerHistory:
    """The measured power of the cluster over the last minutes, by the seconds of a clock that only goes forward."""

    def __init__(self, span_s: float = 600.0) -> None:
        self._span_s = span_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, power_w: float) -> None:
        """Adds a reading and forgets those that are older than the span."""
        self._points.append((now_s, power_w))
        while now_s - self._points[0][0] > self._span_s:
            self._points.popleft()

    def sample(self, now_s: float, columns: int, column_s: float) -> list[float | None]:
        """Returns the mean of each column of `column_s` seconds up to now, the newest last; None without a reading.

        Columns begin at multiples of their length, so that a reading stays in its column as time goes on.
        """
        sums, counts = [0.0] * columns, [0] * columns
        for at_s, power_w in self._points:
            age = int(now_s // column_s) - int(at_s // column_s)
            if 0 <= age < columns:
                sums[columns - 1 - age] += power_w
                counts[columns - 1 - age] += 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatus:
    """What the status line says of the connection."""

    controller: str
    role: str = ""
    # Why there is no connection; empty while there is one.
    problem: str = ""
    # Of the rows of the tab, or of the summary in the overview; None before the first.
    age_s: float | None = None
    is_paused: bool = False


def format_status(status: ConnectionStatus, width: int) -> str:
    """Formats the status line, the most important first, as far as the columns go."""
    age = "no data yet" if status.age_s is None else f"data {status.age_s:.0f} s old"
    if status.problem:
        head = "○ connection lost, reconnecting" if width >= _STATUS_WIDE else "○ reconnecting"
        parts = [head, age, status.controller, status.problem]
    else:
        parts = ["● PAUSED" if status.is_paused else "● live", age, status.controller, status.role]
    line = ""
    for part in filter(None, parts):
        room = width - len(line) - 2 if line else width
        if part == status.problem and room >= _REASON_LEAST:
            part = shorten_text(part, room)  # noqa: PLW2901
        if len(part) > room:
            break
        line = f"{line}  {part}" if line else part
    return line


def format_role(roles: Sequence[str], *, is_authenticated: bool) -> str:
    """Formats the caller's role for the status line."""
    if not is_authenticated:
        return "no TLS: every right"
    return f"role {'+'.join(roles)}" if roles else "no role"


KEYS: tuple[tuple[str, str], ...] = (
    ("1 … 7", "show a tab"),
    ("Tab, Shift-Tab", "next tab, previous tab"),
    ("↑ ↓, j k", "move the cursor"),
    ("PgUp PgDn, g G", "page; first row, last row"),
    ("← →, h l", "show columns further left or right"),
    ("Enter, d", "describe the row in a pane; a workload is explained"),
    ("J K", "scroll the pane"),
    ("Esc", "close the pane or the filter"),
    ("/", "filter rows: text in any column, or COLUMN=TEXT"),
    ("s", "sort: largest first, smallest first"),
    ("< >", "sort by the column further left or right"),
    ("c, y", "copy the command of the row to the clipboard (OSC 52)"),
    ("Space", "pause and go on"),
    ("r", "refresh now"),
    ("?", "this list"),
    ("q, Ctrl-C", "quit"),
    ("Ctrl-Z", "suspend; `fg` comes back"),
    ("Mouse", "click a tab, a row or a column's title; the wheel scrolls"),
)
