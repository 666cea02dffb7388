"""What eelctl top reads from the controller: a summary that is always watched, and the rows of the visible tab.

Owns the threads that call and how often they do. Two daemon threads: one follows WatchSummary and connects again when it
ends; the other reads the tab, at most a bounded number of pages, and rests ten times as long as the reading took, so
that a large fleet costs its controller a tenth of a core at most. A description is read in a thread of its own. What was
read is reported to a function, which must be safe to call from any thread. Nothing here changes anything.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from eelgrid_controller.cli.connection import CliError, CliSettings, ControllerUnreachable, cli_error_for
from eelgrid_controller.cli.describe import build_description
from eelgrid_controller.cli.queue import rank_queue
from eelgrid_controller.cli.top_views import DescribedObject, format_role, list_promise_rows
from eelgrid_controller.cli.workload_names import LIVE_PHASES
from eelgrid_protos.messages import (
    GetOverviewRequest,
    GetSummaryRequest,
    ListAuditEntriesRequest,
    ListGpusRequest,
    ListNodesRequest,
    ListPromisesRequest,
    ListPromisesResponse,
    ListWorkloadsRequest,
    Overview,
    Summary,
    WatchSummaryRequest,
    WhoAmIRequest,
    WorkloadPhase,
    WorkloadView,
)
from eelgrid_protos.operator_calls import PageCursor, join_pages
from eelgrid_protos.safe_text import escape_text_line

# Five pages: enough for the nodes of a large fleet; of its GPUs the first ones.
ROWS_MOST = 5000
_PAGES_MOST = 5
_RECONNECT_S = 1.0
_REST_FACTOR = 10.0
_DAY_NS = 86_400 * 10**9
_CHANGES_MOST = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRead:
    """A summary of the watch."""

    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class TabRead:
    """The rows of a tab; `note` says what is missing of them."""

    key: str
    rows: tuple[Any, ...]
    note: str = ""
    overview: Overview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailed:
    """A call failed: of the whole connection if `key` is empty, else of one tab."""

    problem: str
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRead:
    """Who the caller is for this controller."""

    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptionRead:
    """The lines of a description, with the number of its request."""

    number: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedBroken:
    """A thread ended by an error that is a bug."""

    error: Exception


FeedReport = SummaryRead | TabRead | ReadFailed | RoleRead | DescriptionRead | FeedBroken


class TopFeed:
    """Reads for the screen from `start` to `close`; `report` gets what was read, in the feed's threads."""

    def __init__(
        self, client: Any, settings: CliSettings, interval_s: float, report: Callable[[FeedReport], Any]
    ) -> None:
        self._client, self._settings, self._interval_s = client, settings, interval_s
        self._report = report
        self._is_closed = threading.Event()
        self._changed = threading.Condition()
        # Under the condition: what to read, and whether to read it at once.
        self._tab, self._name, self._is_due, self._is_paused = "", "", False, False
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"top-{work.__name__}", daemon=True)
            for work in (self._follow_summary, self._follow_tab)
        ]

    def start(self, tab: str) -> None:
        """Begins to read."""
        self.show_tab(tab)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Reads nothing more; calls under way end when their channel is closed."""
        self._is_closed.set()
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float = 2.0) -> None:
        """Waits for the threads; call it when the channel is closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def show_tab(self, tab: str, name: str = "") -> None:
        """Reads this tab from now on, at once; `name` restricts nodes and workloads to those whose name contains it."""
        with self._changed:
            self._tab, self._name, self._is_due = tab, name, True
            self._changed.notify_all()

    def pause(self, is_paused: bool) -> None:
        """Stops reading the tab, or goes on at once."""
        with self._changed:
            self._is_paused, self._is_due = is_paused, not is_paused
            self._changed.notify_all()

    def describe(self, number: int, described: DescribedObject, before: tuple[str, ...]) -> None:
        """Reads a description in a thread of its own and reports it, after the lines `before`."""

        def work() -> None:
            try:
                _, lines = build_description(self._client, self._settings, described.kind, described.name)
                text = tuple(escape_text_line(line) for line in lines)
            except Exception as error:
                found = self._problem_of(error)
                if found is None:
                    raise
                text = (found.message, found.remedy)
            self._report(DescriptionRead(number=number, lines=(*before, *text)))

        threading.Thread(target=self._guard, args=(work,), name="top-describe", daemon=True).start()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001
            if not self._is_closed.is_set():
                self._report(FeedBroken(error=error))

    def _problem_of(self, error: Exception) -> CliError | None:
        return error if isinstance(error, CliError) else cli_error_for(error, self._settings)

    def _follow_summary(self) -> None:
        request = WatchSummaryRequest(interval_s=self._interval_s)
        while not self._is_closed.is_set():
            try:
                self._read_role()
                for answer in self._client.watch_summary(request):
                    if self._is_closed.is_set():
                        return
                    self._report(SummaryRead(summary=answer.summary))
                problem = "the controller ended the watch"
            except Exception as error:
                found = self._problem_of(error)
                if found is None:
                    raise
                problem = found.message
            if self._is_closed.is_set():
                return
            self._report(ReadFailed(problem=problem))
            self._is_closed.wait(_RECONNECT_S)

    def _read_role(self) -> None:
        found = self._client.who_am_i(WhoAmIRequest(), timeout=self._settings.timeout_s)
        self._report(RoleRead(role=format_role(found.roles, is_authenticated=bool(found.not_after_ns))))

    def _follow_tab(self) -> None:
        rest_s = 0.0
        while True:
            with self._changed:
                if not self._is_due:
                    self._changed.wait_for(lambda: self._is_due or self._is_closed.is_set(), rest_s or None)
                if self._is_closed.is_set():
                    return
                tab, name, is_paused = self._tab, self._name, self._is_paused and not self._is_due
                self._is_due = False
            rest_s = self._interval_s
            if is_paused:
                continue
            begin_s = time.monotonic()
            try:
                self._report(self._read_tab(tab, name))
            except Exception as error:
                found = self._problem_of(error)
                if found is None:
                    raise
                is_lost = isinstance(found, ControllerUnreachable)
                self._report(ReadFailed(problem=found.message, key="" if is_lost else tab))
            rest_s = max(rest_s, _REST_FACTOR * (time.monotonic() - begin_s))

    def _read_tab(self, tab: str, name: str) -> TabRead:
        client, timeout_s = self._client, self._settings.timeout_s
        match tab:
            case "overview":
                found = client.get_overview(GetOverviewRequest(), timeout=timeout_s).overview
                more = found.attention_total - len(found.attention)
                note = f"{more:,} more need attention" if more > 0 else ""
                return TabRead(key=tab, rows=found.attention, overview=found, note=note)
            case "nodes":
                return self._read_pages(tab, client.list_nodes, ListNodesRequest(name_contains=name), "nodes")
            case "gpus":
                return self._read_pages(tab, client.list_gpus, ListGpusRequest(), "gpus")
            case "workloads":
                request = ListWorkloadsRequest(phases=LIVE_PHASES, name_contains=name)
                return self._read_pages(tab, client.list_workloads, request, "workloads")
            case "queue":
                waiting = ListWorkloadsRequest(
                    phases=(WorkloadPhase.PENDING,), name_contains=name, queue_positions=True, view=WorkloadView.SUMMARY
                )
                read = self._read_pages(tab, client.list_workloads, waiting, "rows")
                now_ns = client.get_summary(GetSummaryRequest(), timeout=timeout_s).summary.time_ns
                return replace(read, rows=tuple(rank_queue(read.rows, now_ns)))
            case "promises":
                return self._read_promises()
            case _:
                since = ListAuditEntriesRequest(since_ns=max(0, time.time_ns() - _DAY_NS))
                return self._read_pages(tab, client.list_audit_entries, since, "entries", most=_CHANGES_MOST)

    def _read_pages(
        self, key: str, call: Callable[..., Any], request: Any, items: str, most: int = ROWS_MOST
    ) -> TabRead:
        """Reads the first pages of a listing; the note counts the rows that are not read."""
        rows: list[Any] = []
        cursor, omitted, total = PageCursor(request, limit=most), 0, 0
        while not cursor.is_done and not self._is_closed.is_set():
            answer = call(cursor.next_request(), timeout=self._settings.timeout_s)
            omitted += answer.omitted
            total = answer.total
            rows += cursor.take_items(answer, getattr(answer, items))
        notes = [f"the first {len(rows):,} of {total:,}"] if len(rows) < total - omitted else []
        notes += [f"{omitted:,} cannot be shown; see the controller's log"] if omitted else []
        return TabRead(key=key, rows=tuple(rows), note="; ".join(notes))

    def _read_promises(self) -> TabRead:
        pages: list[ListPromisesResponse] = []
        cursor = PageCursor(ListPromisesRequest(), is_sized=False)
        while not cursor.is_done and len(pages) < _PAGES_MOST:
            pages.append(self._client.list_promises(cursor.next_request(), timeout=self._settings.timeout_s))
            cursor.take_items(pages[-1], ())
        note = "" if cursor.is_done else "only the first; eelctl promises shows all"
        return TabRead(key="promises", rows=tuple(list_promise_rows(join_pages(pages))), note=note)
