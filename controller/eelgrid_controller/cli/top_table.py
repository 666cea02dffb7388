"""The table of eelctl top: rows of any number of which only the visible ones are formatted.

A Textual widget. Knows columns and rows, not where they come from. The first column stays when the others are scrolled
sideways, by whole columns.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from eelgrid_controller.cli.output import TableColumn, display_width, shorten_text
from eelgrid_controller.cli.top_rendering import draw_bar
from eelgrid_controller.cli.top_views import RowOrder, TopTab
from eelgrid_protos.safe_text import escape_text

_GAP = 2
_BAR_WIDE = 8
# Bars are left out below this width of the table.
_BARS_FROM = 60
_TEXT_LEAST = 16
_DOUBLE_CLICK = 2


class TopTable(ScrollView, can_focus=True):
    """Shows rows with a cursor; the cursor stays on its row when rows come, go or are sorted anew."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"top-table--header", "top-table--cursor"}
    DEFAULT_CSS = """
    TopTable {
        overflow-x: hidden;
        overflow-y: auto;
        scrollbar-size-vertical: 1;
    }
    TopTable > .top-table--header { text-style: bold; color: $text-muted; }
    TopTable > .top-table--cursor { background: $primary 40%; text-style: bold; }
    TopTable:ansi > .top-table--header { text-style: bold underline; color: ansi_default; }
    TopTable:ansi > .top-table--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,ctrl+f", "page(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("home,g", "edge(False)", show=False),
        Binding("end,G", "edge(True)", show=False),
        Binding("right,l", "shift(1)", show=False),
        Binding("left,h", "shift(-1)", show=False),
        Binding("enter,d", "open", show=False),
    ]

    class RowOpened(Message):
        """The row under the cursor is to be described."""

    class TitleClicked(Message):
        """The title of a column was clicked."""

        def __init__(self, title: str) -> None:
            super().__init__()
            self.title = title

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._tab: TopTab[Any] | None = None
        self._rows: Sequence[Any] = ()
        self._order = RowOrder()
        self._cursor = 0
        # How many columns after the first are scrolled out at the left.
        self._hidden = 0
        # The widest text seen of each column, so that columns do not jump while one scrolls.
        self._widths: dict[str, int] = {}

    @property
    def row(self) -> Any | None:
        """The row under the cursor, None in an empty table."""
        return self._rows[self._cursor] if self._cursor < len(self._rows) else None

    def show_rows(self, tab: TopTab[Any], rows: Sequence[Any], order: RowOrder, cursor_key: str = "") -> None:
        """Shows rows of a tab; the cursor goes to the row of `cursor_key`, or stays on its row."""
        is_same = self._tab is not None and self._tab.key == tab.key
        key = cursor_key or (tab.identify(self.row) if is_same and self.row is not None else "")
        place = self._cursor if is_same else 0
        if not is_same:
            self._widths, self._hidden = {}, 0
        self._tab, self._rows, self._order = tab, rows, order
        if key:
            place = next((at for at, row in enumerate(rows) if tab.identify(row) == key), place)
        self._cursor = max(0, min(place, len(rows) - 1))
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        self._show_cursor()
        self.refresh()

    def cursor_key(self) -> str:
        """Returns the name of the row under the cursor; empty without one."""
        return "" if self._tab is None or self.row is None else self._tab.identify(self.row)

    def _show_cursor(self) -> None:
        shown = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False, force=True)
        elif self._cursor >= top + shown:
            self.scroll_to(y=self._cursor - shown + 1, animate=False, force=True)

    def _set_cursor(self, place: int) -> None:
        self._cursor = max(0, min(place, len(self._rows) - 1))
        self._show_cursor()
        self.refresh()

    def action_move(self, steps: int) -> None:
        """Moves the cursor by rows."""
        self._set_cursor(self._cursor + steps)

    def action_page(self, pages: int) -> None:
        """Moves the cursor by screens."""
        self._set_cursor(self._cursor + pages * max(1, self.size.height - 2))

    def action_edge(self, is_last: bool) -> None:
        """Moves the cursor to the first or the last row."""
        self._set_cursor(len(self._rows) - 1 if is_last else 0)

    def action_shift(self, columns: int) -> None:
        """Scrolls by columns to the right, or to the left."""
        if self._tab is not None:
            self._hidden = max(0, min(self._hidden + columns, len(self._tab.columns) - 2))
            self.refresh()

    def action_open(self) -> None:
        """Posts RowOpened."""
        if self.row is not None:
            self.post_message(self.RowOpened())

    def on_resize(self) -> None:
        """Keeps the cursor visible."""
        self._widths = {}
        self.virtual_size = Size(self.size.width, len(self._rows) + 1)
        self._show_cursor()

    def on_click(self, event: events.Click) -> None:
        """Moves the cursor, opens a row by a double click, or posts which title was clicked."""
        if event.y == 0:
            for column, start, width in self._layout():
                if start <= event.x < start + width:
                    self.post_message(self.TitleClicked(column.title))
            return
        place = self.scroll_offset.y + event.y - 1
        if place < len(self._rows):
            self._set_cursor(place)
            if event.chain == _DOUBLE_CLICK:
                self.action_open()

    def _visible_rows(self) -> Sequence[Any]:
        top = self.scroll_offset.y
        return self._rows[top : top + self.size.height]

    def _title(self, column: TableColumn[Any]) -> str:
        if column.title != self._order.column:
            return column.title
        return f"{column.title}{'▾' if self._order.is_descending else '▴'}"

    def _has_bar(self, column: TableColumn[Any]) -> bool:
        return column.share is not None and self.size.width >= _BARS_FROM

    def _layout(self) -> list[tuple[TableColumn[Any], int, int]]:
        """Returns the columns that fit, with where each begins and how wide it is."""
        if self._tab is None:
            return []
        first, *others = self._tab.columns
        whole = self.scrollable_content_region.width
        text_most = max(_TEXT_LEAST, whole * 2 // 5)
        found: list[tuple[TableColumn[Any], int, int]] = []
        at = 0
        for column in [first, *others[self._hidden :]]:
            room = whole - at
            if room < len(column.title) // 2 + 1:
                break
            wide = max([self._widths.get(column.title, 0), len(column.title) + 1, *self._measure(column)])
            self._widths[column.title] = wide
            bar = _BAR_WIDE + 1 if self._has_bar(column) else 0
            if column.right and found and room < bar + wide:
                # Half a number is another number.
                break
            width = min(room, bar + (wide if column.right else min(wide, text_most)))
            found.append((column, at, width))
            at += width + _GAP
        if found and not found[-1][0].right:
            column, start, _ = found[-1]
            found[-1] = (column, start, whole - start)
        return found

    def _measure(self, column: TableColumn[Any]) -> list[int]:
        return [display_width(escape_text(column.cell(row))) for row in self._visible_rows()]

    def render_lines(self, crop: Any) -> list[Strip]:
        """Renders the visible lines, by one layout for all of them."""
        self._columns = self._layout()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Renders the titles, or one row."""
        whole = self.size.width
        if y == 0:
            return self._render_titles(whole)
        place = self.scroll_offset.y + y - 1
        if place < len(self._rows):
            return self._render_row(self._rows[place], whole, is_cursor=place == self._cursor)
        if y == 1 and self._tab is not None:
            empty = Segment(shorten_text(self._tab.empty, whole), self.rich_style + Style(dim=True))
            return Strip([empty]).extend_cell_length(whole, self.rich_style)
        return Strip.blank(whole, self.rich_style)

    def _render_titles(self, whole: int) -> Strip:
        style = self.get_component_rich_style("top-table--header")
        line = Text()
        for column, start, width in self._columns:
            line.append(" " * (start - len(line)))
            title = shorten_text(self._title(column), width)
            line.append(title.rjust(width) if column.right else title.ljust(width))
        return Strip([Segment(line.plain, style)]).extend_cell_length(whole, style).crop(0, whole)

    def _render_row(self, row: Any, whole: int, *, is_cursor: bool) -> Strip:
        style = self.get_component_rich_style("top-table--cursor") if is_cursor else self.rich_style
        segments: list[Segment] = []
        used = 0
        for column, start, width in self._columns:
            segments.append(Segment(" " * (start - used), style))
            segments += self._render_cell(column, row, width, style, is_cursor=is_cursor)
            used = start + width
        return Strip(segments).extend_cell_length(whole, style).crop(0, whole)

    def _render_cell(
        self, column: TableColumn[Any], row: Any, width: int, style: Style, *, is_cursor: bool
    ) -> list[Segment]:
        """Renders the bar and the text of a cell; the row of the cursor has one colour, so that it stays readable."""
        segments: list[Segment] = []
        if self._has_bar(column) and width > _BAR_WIDE:
            assert column.share is not None
            bar = draw_bar(column.share(row), _BAR_WIDE, style="" if column.colour else "cyan")
            for part in bar.render(self.app.console):
                tint = part.style if isinstance(part.style, Style) and not is_cursor else None
                segments.append(Segment(part.text, style + tint if tint else style))
            segments = [part for part in segments if part.text.strip("\n")] + [Segment(" ", style)]
            width -= _BAR_WIDE + 1
        text = shorten_text(escape_text(column.cell(row)) or "-", width)
        blanks = " " * (width - display_width(text))
        colour = column.colour(row) if column.colour and not is_cursor else None
        shown = Segment(text, style + Style(color=colour) if colour else style)
        pair = [Segment(blanks, style), shown] if column.right else [shown, Segment(blanks, style)]
        return [*segments, *pair]
