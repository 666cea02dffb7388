"""The screen of eelctl top, as a Textual application: tabs, the table, the pane, and the keys.

Owns what is on the screen and what a key does. What is read comes from TopFeed as messages, what it means from top_views,
how it looks from top_rendering and TopTable. It changes nothing in the cluster.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rich.console import Console
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Input, Static

from eelgrid_controller.cli.top_feed import (
    DescriptionRead,
    FeedBroken,
    FeedReport,
    ReadFailed,
    RoleRead,
    SummaryRead,
    TabRead,
)
from eelgrid_controller.cli.top_rendering import (
    LABEL,
    OverviewSnapshot,
    count_below_lines,
    render_below,
    render_description,
    render_head,
    render_tabs,
)
from eelgrid_controller.cli.top_table import TopTable
from eelgrid_controller.cli.top_views import (
    KEYS,
    ConnectionStatus,
    DescribedObject,
    PowerHistory,
    RowOrder,
    TopTab,
    build_tabs,
    format_status,
    list_facts,
    select_rows,
)
from eelgrid_protos.messages import Overview, Summary
from eelgrid_protos.safe_text import escape_text_line

_WIDGETS = ("tabs", "middle", "head", "caption", "rows", "below", "pane", "description", "filter", "status", "keys")
_HINTS = ("q quit", "? help", "Enter describe", "/ filter", "s < > sort", "c copy", "Space pause")
# The pane is beside the table from this width on, below it otherwise.
_PANE_BESIDE = 140
# What waits and who consumes is left out on a screen lower than this.
_BELOW_FROM = 20


class Feed(Protocol):
    """What the screen needs of TopFeed."""

    def start(self, tab: str) -> None:
        """Begins to read."""

    def close(self) -> None:
        """Reads nothing more."""

    def join(self) -> None:
        """Waits until nothing is being read."""

    def show_tab(self, tab: str, name: str = "") -> None:
        """Reads this tab from now on."""

    def pause(self, is_paused: bool) -> None:
        """Stops reading, or goes on."""

    def describe(self, number: int, described: DescribedObject, before: tuple[str, ...]) -> None:
        """Reads a description."""


@dataclass(slots=True)
class _TabState:
    """What a tab shows, kept while another one is visible."""

    rows: tuple[Any, ...] = ()
    order: RowOrder = field(default_factory=RowOrder)
    cursor_key: str = ""
    read_s: float | None = None
    note: str = ""


class TabBar(Static):
    """The line of tabs; a click chooses one."""

    class Chosen(Message):
        """A tab was clicked."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, tabs: tuple[TopTab[Any], ...], **settings: Any) -> None:
        super().__init__(**settings)
        self._tabs = tabs
        self._spans: list[tuple[int, int, str]] = []

    def show_tab(self, key: str, width: int) -> None:
        """Draws the tabs with this one chosen."""
        line, self._spans = render_tabs(self._tabs, key, width)
        self.update(line)

    def on_click(self, event: events.Click) -> None:
        """Posts which tab was clicked."""
        for start, end, key in self._spans:
            if start <= event.x < end:
                self.post_message(self.Chosen(key))


class TopApp(App[None]):
    """The interactive screen; `make_feed` builds what reads, given the function that gets its reports."""

    CSS = """
    Screen { layout: vertical; background: $background; }
    Screen:ansi { background: ansi_default; color: ansi_default; }
    #tabs { height: 1; background: $panel; }
    #middle { height: 1fr; layout: vertical; }
    #middle.beside { layout: horizontal; }
    #main { height: 1fr; width: 1fr; }
    #head { height: auto; }
    #caption { height: 1; margin-top: 0; }
    #rows { height: 1fr; min-height: 3; }
    #pane { display: none; height: 1fr; border-top: solid $primary; }
    #middle.beside > #pane { height: 1fr; width: 1fr; border-top: none; border-left: solid $primary; }
    #pane.open { display: block; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.open { display: block; }
    #status { height: 1; background: $panel; }
    #keys { height: 1; }
    TopApp:ansi #tabs, TopApp:ansi #status { background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show_number({number})", show=False) for number in range(1, 8)),
        Binding("tab", "cycle(1)", show=False, priority=True),
        Binding("shift+tab", "cycle(-1)", show=False, priority=True),
        Binding("slash", "filter", show=False),
        Binding("s", "reverse", show=False),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("greater_than_sign", "sort(1)", show=False),
        Binding("c,y", "copy_command", show=False),
        Binding("space", "pause", show=False),
        Binding("r", "refresh_rows", show=False),
        Binding("question_mark", "help", show=False),
        Binding("J", "scroll_pane(1)", show=False),
        Binding("K", "scroll_pane(-1)", show=False),
        Binding("escape", "close_pane", show=False, priority=True),
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "eelctl top"

    class Reported(Message):
        """Something was read."""

        def __init__(self, report: FeedReport) -> None:
            super().__init__()
            self.report = report

    def __init__(self, controller: str, make_feed: Callable[[Callable[[FeedReport], Any]], Feed]) -> None:
        super().__init__()
        self._controller = controller
        self.feed = make_feed(lambda report: self.post_message(self.Reported(report)))
        self._tabs = build_tabs(self._now_ns)
        self._states = {tab.key: _TabState() for tab in self._tabs}
        self._tab = self._tabs[0]
        self._summary: Summary | None = None
        self._overview: Overview | None = None
        self._history = PowerHistory()
        # When the last summary came, by the clock of this machine.
        self._summary_s: float | None = None
        self._role, self._problem = "", ""
        self._is_paused = False
        self._described = 0

    def _now_ns(self) -> int:
        """Returns the controller's time: that of the last summary, and what has passed since."""
        if self._summary is None or self._summary_s is None:
            return time.time_ns()
        return self._summary.time_ns + int((time.monotonic() - self._summary_s) * 1e9)

    def compose(self) -> ComposeResult:
        """Builds the widgets, from the top of the screen down."""
        yield TabBar(self._tabs, id="tabs")
        with Container(id="middle"):
            with Vertical(id="main"):
                yield Static(id="head")
                yield Static(id="caption")
                yield TopTable(id="rows")
                yield Static(id="below")
            with VerticalScroll(id="pane"):
                yield Static(id="description")
        yield Input(id="filter", placeholder="filter: text, or COLUMN=TEXT", compact=True)
        yield Static(id="status")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Begins to read; a terminal of sixteen colours keeps its own."""
        if Console().color_system in {"standard", None}:
            self.theme = "ansi-dark"
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Only the main thread of a process gets signals.
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self.exit)
        self.table.focus()
        self.set_interval(1.0, self._on_second)
        self.feed.start(self._tab.key)
        self._show_frame()

    def on_unmount(self) -> None:
        """Stops reading."""
        self.feed.close()

    @property
    def table(self) -> TopTable:
        """The table of the visible tab."""
        return self.query_one("#rows", TopTable)

    @property
    def _state(self) -> _TabState:
        return self._states[self._tab.key]

    def on_resize(self, event: events.Resize) -> None:
        """Draws everything for the new size."""
        self.query("#middle").set_class(event.size.width >= _PANE_BESIDE, "beside")
        self._show_frame(event.size.width, event.size.height)

    @property
    def _is_composed(self) -> bool:
        """Whether the widgets are there: messages still come while the screen is taken down."""
        return all(self.query(f"#{name}") for name in _WIDGETS)

    def _on_second(self) -> None:
        if not self._is_composed:
            return
        if not self._is_paused:
            self._show_overview()
        self._show_status()

    def _show_frame(self, width: int = 0, height: int = 0) -> None:
        if not self._is_composed:
            return
        width = width or self.size.width
        self.query_one("#tabs", TabBar).show_tab(self._tab.key, width)
        hints = ""
        for hint in _HINTS:
            longer = f"{hints}  {hint}" if hints else hint
            hints = longer if len(longer) <= width else hints
        self.query_one("#keys", Static).update(Text(hints, style=LABEL, no_wrap=True))
        self._show_overview(width, height)
        self._show_status(width)

    def _show_overview(self, width: int = 0, height: int = 0) -> None:
        """Draws what stands above and below the table of the overview; other tabs have neither."""
        width, height = width or self.size.width, height or self.size.height
        is_overview = self._tab.key == "overview"
        is_pane_below = self.query_one("#pane").has_class("open") and width < _PANE_BESIDE
        head, below = self.query_one("#head", Static), self.query_one("#below", Static)
        head.display = is_overview and not is_pane_below
        below.display = is_overview and not is_pane_below and height >= _BELOW_FROM
        self._show_caption()
        if not is_overview:
            return
        if self.query_one("#pane").has_class("open") and width >= _PANE_BESIDE:
            width //= 2
        seen = OverviewSnapshot(
            summary=self._summary, overview=self._overview, history=self._history, now_s=time.monotonic()
        )
        head.update(render_head(seen, width, height))
        lines = count_below_lines(height)
        below.styles.height = lines
        below.update(render_below(seen, width, lines))

    def _show_caption(self) -> None:
        state, order = self._state, self._state.order
        name = "needs attention" if self._tab.key == "overview" else self._tab.title.lower()
        line = Text(f"{name}: {len(state.rows):,}", style="bold", no_wrap=True)
        if order.pattern:
            line.append(f"  filter {order.pattern!r}", style="yellow")
        if order.column:
            line.append(f"  by {order.column}{'▾' if order.is_descending else '▴'}", style=LABEL)
        if state.note:
            line.append(f"  {state.note}", style="yellow")
        self.query_one("#caption", Static).update(line)

    def _show_status(self, width: int = 0) -> None:
        read_s = self._summary_s if self._tab.key == "overview" else self._state.read_s
        status = ConnectionStatus(
            controller=self._controller,
            role=self._role,
            problem=self._problem,
            age_s=None if read_s is None else time.monotonic() - read_s,
            is_paused=self._is_paused,
        )
        style = "bold red" if self._problem else "yellow" if self._is_paused else ""
        text = escape_text_line(format_status(status, width or self.size.width))
        self.query_one("#status", Static).update(Text(text, style=style, no_wrap=True))

    @on(Reported)
    async def take_report(self, message: Reported) -> None:
        """Shows what was read; while the screen is paused only the connection and the power are followed."""
        if not self._is_composed:
            return
        match message.report:
            case SummaryRead(summary=summary):
                self._problem = ""
                self._history.add(time.monotonic(), summary.measured_power_w)
                if not self._is_paused:
                    self._summary, self._summary_s = summary, time.monotonic()
                    self._show_overview()
            case TabRead() as read:
                self._problem = ""
                await self._take_rows(read)
            case ReadFailed(problem=problem, key=""):
                self._problem = problem
            case ReadFailed(problem=problem, key=key):
                self._states[key].note = problem
                self._show_caption()
            case RoleRead(role=role):
                self._role = role
            case DescriptionRead(number=number, lines=lines):
                if number == self._described:
                    self._show_description(lines)
            case FeedBroken(error=error):
                raise error
        if self._is_composed:
            self._show_status()

    async def _take_rows(self, read: TabRead) -> None:
        state = self._states[read.key]
        if self._is_paused and state.read_s is not None:
            return
        state.rows, state.note, state.read_s = read.rows, read.note, time.monotonic()
        if read.overview is not None:
            self._overview = read.overview
        if read.key == self._tab.key:
            await self._show_rows()
            if self._is_composed:
                self._show_overview()

    async def _show_rows(self, cursor_key: str = "") -> None:
        """Sorts and filters the rows beside the event loop, and shows them if the tab is still the same."""
        tab, state = self._tab, self._state
        order = state.order
        rows = await asyncio.to_thread(select_rows, tab, state.rows, order)
        if self._is_composed and tab is self._tab and order is self._state.order:
            self.table.show_rows(tab, rows, order, cursor_key)
            self._show_caption()

    async def _change_order(self, order: RowOrder) -> None:
        self._state.order = order
        await self._show_rows()

    async def _show_tab(self, tab: TopTab[Any]) -> None:
        if tab is self._tab:
            return
        self._state.cursor_key = self.table.cursor_key()
        self._close_filter()
        self._hide_pane()
        self._tab = tab
        self.feed.show_tab(tab.key, self._server_name())
        self._show_frame()
        await self._show_rows(self._state.cursor_key)

    def _server_name(self) -> str:
        """Returns the text of a filter by name, by which the controller can filter as well."""
        column, equals, text = self._state.order.pattern.partition("=")
        wanted = {"nodes": "node", "workloads": "name", "queue": "name"}.get(self._tab.key)
        return text.strip() if equals and column.strip().casefold() == wanted else ""

    async def action_show_number(self, number: int) -> None:
        """Shows a tab by its number, from 1."""
        await self._show_tab(self._tabs[number - 1])

    async def action_cycle(self, steps: int) -> None:
        """Shows the next tab, or the one before."""
        await self._show_tab(self._tabs[(self._tabs.index(self._tab) + steps) % len(self._tabs)])

    async def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """Shows the tab that was clicked."""
        await self._show_tab(next(tab for tab in self._tabs if tab.key == message.key))

    async def on_top_table_title_clicked(self, message: TopTable.TitleClicked) -> None:
        """Sorts by the column that was clicked."""
        await self._change_order(self._state.order.choose(message.title))

    async def action_reverse(self) -> None:
        """Sorts in the other direction."""
        await self._change_order(self._state.order.reverse(self._tab))

    async def action_sort(self, steps: int) -> None:
        """Sorts by the next column, or by the one before."""
        await self._change_order(self._state.order.shift(self._tab, steps))

    def action_filter(self) -> None:
        """Opens the line of the filter."""
        box = self.query_one("#filter", Input)
        box.value = self._state.order.pattern
        box.add_class("open")
        box.focus()

    async def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while one types."""
        if event.input.has_class("open"):
            await self._change_order(_with_pattern(self._state.order, event.value))

    def on_input_submitted(self) -> None:
        """Keeps the filter and goes back to the table."""
        self._close_filter()
        self.feed.show_tab(self._tab.key, self._server_name())

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.table.focus()

    async def action_close_pane(self) -> None:
        """Closes the filter, or the pane, or clears the filter, whichever is there first."""
        box, pane = self.query_one("#filter", Input), self.query_one("#pane")
        if box.has_class("open"):
            self._close_filter()
            await self._change_order(_with_pattern(self._state.order, ""))
            return
        if pane.has_class("open"):
            self._hide_pane()
        elif self._state.order.pattern:
            await self._change_order(_with_pattern(self._state.order, ""))
            self.feed.show_tab(self._tab.key)

    def _hide_pane(self) -> None:
        self._described += 1
        self.query_one("#pane").remove_class("open")
        self._show_overview()
        self.table.focus()

    def on_top_table_row_opened(self) -> None:
        """Describes the row in the pane."""
        row = self.table.row
        if row is None:
            return
        before = tuple(list_facts(self._tab, row))
        described = self._tab.describe(row)
        self._described += 1
        if described is None:
            self._show_description(before)
            return
        is_item = self._tab.key == "overview"
        self._show_description(
            (*before, "", "reading …") if is_item else (f"reading {described.kind} {described.name} …",)
        )
        self.feed.describe(self._described, described, (*before, "") if is_item else ())

    def _show_description(self, lines: tuple[str, ...]) -> None:
        self.query_one("#description", Static).update(render_description(lines))
        pane = self.query_one("#pane", VerticalScroll)
        pane.add_class("open")
        pane.scroll_home(animate=False)
        self._show_overview()

    def action_scroll_pane(self, halves: int) -> None:
        """Scrolls the pane by half of its height."""
        pane = self.query_one("#pane", VerticalScroll)
        pane.scroll_relative(y=halves * max(1, pane.size.height // 2), animate=False)

    def action_help(self) -> None:
        """Shows all keys in the pane."""
        self._described += 1
        width = max(len(keys) for keys, _ in KEYS)
        self._show_description(tuple(f"{keys:<{width}}  {text}" for keys, text in KEYS))

    def action_copy_command(self) -> None:
        """Copies the command of the row to the clipboard of the terminal."""
        row = self.table.row
        command = "" if row is None else self._tab.command(row)
        if command:
            self.copy_to_clipboard(command)
            self.notify(command, title="copied", timeout=3.0, markup=False)

    def action_pause(self) -> None:
        """Pauses, or goes on."""
        self._is_paused = not self._is_paused
        self.feed.pause(self._is_paused)
        self._show_status()

    def action_refresh_rows(self) -> None:
        """Reads the tab now."""
        self.feed.show_tab(self._tab.key, self._server_name())


def _with_pattern(order: RowOrder, pattern: str) -> RowOrder:
    return RowOrder(column=order.column, is_descending=order.is_descending, pattern=pattern)
