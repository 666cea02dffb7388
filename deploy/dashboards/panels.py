"""Panels and dashboards: what each of ours has in common, on top of Grafana's foundation SDK.

Owns the look (legends, stacking, colours), the grid and the variables. Must not know a metric
but those that variables list. A dashboard is rows of panels; widths are in 24ths, and a row
is as high as it says. Nothing names a data source but by the variable `datasource`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    GridPos,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = [
    "PHASES",
    "STATES",
    "VERDICTS",
    "Page",
    "Panel",
    "Query",
    "Row",
    "Variable",
    "bars",
    "built",
    "figure",
    "lines",
    "listing",
    "states",
]

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 24
_LINE_WIDTH = 1
_FILL, _FILL_STACKED = 8, 40
# Bars are as high as a line of text, however few there are; pixels.
_BAR_HIGH, _BAR_TITLE, _BAR_VALUE = 34.0, 13.0, 15.0
# What may be, beside what is: dashed and without a filling.
_BOUND = re.compile(r"\b(limit|objective|promised|wanted)$")
_DASHES = (8, 6)
# Columns begin where people look for the machine.
_COLUMNS_FIRST = ("node", "index")
_COLUMN_LEAST = 60.0
# Good and bad have their colours on every panel that names them.
VERDICTS = {"kept": "green", "missed": "red", "unjudged": "gray"}
STATES = {"ready": "green", "lost": "red"}
PHASES = {"placed": "green", "pending": "orange", "cancelled": "gray"}


class Query(NamedTuple):
    """A PromQL expression and how its series are named."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel before it has a place: what to show, and how wide."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    make: Callable[[], Any]
    width: int
    instant: bool = False
    as_table: bool = False


class Row(NamedTuple):
    """A titled row; panels wrap at 24 columns."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8


class Variable(NamedTuple):
    """A choice of several and all; a regex with the groups `text` and `value` says what people read for a value."""

    name: str
    label: str
    query: str
    regex: str = ""


@dataclass(frozen=True)
class Page:
    """One dashboard."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    # Name, label, value that is there before anybody writes another.
    texts: tuple[tuple[str, str, str], ...] = ()
    # Name, label, values of which one is chosen.
    choices: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


def _coloured(panel: Any, colours: Mapping[str, str]) -> Any:
    for name, colour in colours.items():
        fixed = {"mode": FieldColorModeId.FIXED, "fixedColor": colour}
        panel = panel.override_by_name(name, [DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def _dashed(panel: Any) -> Any:
    style = DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": list(_DASHES)})
    return panel.override_by_regexp(
        f"/{_BOUND.pattern}/", [style, DynamicConfigValue(id_val="custom.fillOpacity", value=0)]
    )


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    stacked: bool = False,
    top: float | None = None,
    colours: Mapping[str, str] | None = None,
) -> Panel:
    """Values over time; the axis holds zero, and reaches `top` at least."""

    def make() -> Any:
        legend = common.VizLegendOptions().show_legend(True).display_mode(shapes.LegendDisplayMode.LIST)
        panel = (
            timeseries.Panel()
            .line_width(_LINE_WIDTH)
            .fill_opacity(_FILL_STACKED if stacked else _FILL)
            .show_points(shapes.VisibilityMode.AUTO)
            .span_nulls(False)
            .axis_soft_min(0.0)
            .legend(legend.placement(shapes.LegendPlacement.BOTTOM).calcs([]))
            .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
        )
        if top is not None:
            panel = panel.axis_soft_max(top)
        if stacked:
            panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
        if any(_BOUND.search(query.legend) for query in queries):
            panel = _dashed(panel)
        return _coloured(panel, colours or {})

    return Panel(title, description, unit, queries, make, width)


def _last() -> Any:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _thresholds(panel: Any, *steps: tuple[float | None, str]) -> Any:
    """Colours by value: without the mode some kinds of panel take a gradient instead."""
    made = [Threshold(value=value, color=colour) for value, colour in steps]
    return panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(made)).color_scheme(
        dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)
    )


def figure(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    width: int = 4,
    instant: bool = False,
    bad_above: float | None = None,
    bad_below: float | None = None,
    bad: str = "red",
) -> Panel:
    """One number now, coloured on the bad side of a bound, where there is one; its name stands beside it where it has one.

    Instant: no line of its past behind it, for what looks far back at every point of such a line.
    """

    def make() -> Any:
        panel = stat.Panel().reduce_options(_last())
        panel = panel.graph_mode(shapes.BigValueGraphMode.NONE if instant else shapes.BigValueGraphMode.AREA)
        if query.legend:
            panel = panel.text_mode(shapes.BigValueTextMode.VALUE_AND_NAME)
        if bad_above is not None:
            return _thresholds(panel, (None, "green"), (bad_above, bad))
        if bad_below is not None:
            return _thresholds(panel, (None, bad), (bad_below, "green"))
        return _thresholds(panel, (None, "text"))

    return Panel(title, description, unit, (query,), make, width, instant=instant)


def bars(title: str, description: str, unit: str, query: Query, *, width: int = 8) -> Panel:
    """One bar for each series, as it is now."""
    # Said again, since a lone bar shows no legend.
    name = re.sub(r"\{\{(\w+)\}\}", r"${__field.labels.\1}", query.legend)

    def make() -> Any:
        panel = (
            bargauge.Panel()
            .reduce_options(_last())
            .orientation(shapes.VizOrientation.HORIZONTAL)
            .display_mode(shapes.BarGaugeDisplayMode.BASIC)
            .display_name(name)
            .text(common.VizTextDisplayOptions().title_size(_BAR_TITLE).value_size(_BAR_VALUE))
            .sizing(shapes.BarGaugeSizing.MANUAL)
            .max_viz_height(int(_BAR_HIGH))
        )
        return _thresholds(panel, (None, "blue"))

    return Panel(title, description, unit, (query,), make, width, instant=True)


def states(
    title: str, description: str, unit: str, query: Query, *, width: int = 12, on: str = "orange", off: str = "green"
) -> Panel:
    """When something was so: a line for each series, in another colour while its value is not zero."""

    def make() -> Any:
        panel = statetimeline.Panel().show_value(shapes.VisibilityMode.NEVER).row_height(0.8).merge_values(True)
        return _thresholds(panel, (None, off), (0.5, on))

    return Panel(title, description, unit, (query,), make, width)


def listing(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    hidden: Sequence[str] = (),
    words: Mapping[str, tuple[str, str]] | None = None,
) -> Panel:
    """A table of what is now, a row for each series; scrape labels are hidden, and each query is a column.

    A query without a legend only lists its labels. `words` are for numbers: word and colour.
    """
    columns = ["Value"] if len(queries) == 1 else [f"Value #{chr(ord('A') + at)}" for at in range(len(queries))]
    names = {column: query.legend for column, query in zip(columns, queries, strict=True)}
    unnamed = [column for column, name in names.items() if not name]
    dropped = dict.fromkeys(("Time", "job", "instance", "__name__", *hidden, *unnamed), True)
    places = {name: at for at, name in enumerate(_COLUMNS_FIRST)}
    arranged = {"excludeByName": dropped, "renameByName": names, "indexByName": places}

    def make() -> Any:
        panel = (
            table.Panel()
            .min_width(_COLUMN_LEAST)
            .with_transformation(DataTransformerConfig(id_val="merge", options={}))
            .with_transformation(DataTransformerConfig(id_val="organize", options=arranged))
        )
        # Of these columns alone: a unit for times makes a date of a node's name, and an index is a 0 or a 1 as well.
        rules = [DynamicConfigValue(id_val="unit", value=unit)]
        if words:
            said = {value: ValueMappingResult(text=word, color=colour) for value, (word, colour) in words.items()}
            rules.append(DynamicConfigValue(id_val="mappings", value=[ValueMap(options=said)]))
            rules.append(DynamicConfigValue(id_val="custom.cellOptions", value=shapes.TableColorTextCellOptions()))
        for name in filter(None, names.values()):
            panel = panel.override_by_name(name, rules)
        return panel

    return Panel(title, description, "short", queries, make, width, instant=True, as_table=True)


def _target(panel: Panel, at: int, query: Query) -> Any:
    made = prometheus.Dataquery().datasource(_SOURCE).expr(query.expression).ref_id(chr(ord("A") + at))
    made = made.legend_format(query.legend or "__auto")
    made = made.instant() if panel.instant else made.range()
    return made.format(PromQueryFormat.TABLE) if panel.as_table else made


def _placed(panel: Panel, number: int, place: GridPos) -> Any:
    made = panel.make().id(number).title(panel.title).description(panel.description).unit(panel.unit)
    made = made.datasource(_SOURCE).grid_pos(place)
    for at, query in enumerate(panel.queries):
        made = made.with_target(_target(panel, at, query))
    return made


def _with_variables(made: Any, page: Page) -> Any:
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    daemons = '{__name__=~"eelgrid_controller_info|eelgrid_agent_info"'
    several = (
        Variable("job", "Job", f"label_values({daemons}}}, job)"),
        Variable("instance", "Instance", f'label_values({daemons}, job=~"$job"}}, instance)'),
        *page.variables,
    )
    for name, label, query, regex in several:
        made = made.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
            .regex(regex)
            .datasource(_SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.NATURAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*" if name not in {"job", "instance"} else ".+")
            .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
        )
    for name, label, values in page.choices:
        chosen = VariableOption(selected=True, text=values[0], value=values[0])
        options = [VariableOption(selected=one == values[0], text=one, value=one) for one in values]
        escaped = ",".join(one.replace(",", "\\,") for one in values)
        made = made.with_variable(
            dashboard.CustomVariable(name).label(label).values(escaped).options(options).current(chosen)
        )
    for name, label, value in page.texts:
        chosen = VariableOption(selected=True, text=value, value=value)
        made = made.with_variable(
            dashboard.TextBoxVariable(name).label(label).default_value(value).options([chosen]).current(chosen)
        )
    return made


def built(page: Page) -> Any:
    """The dashboard in Grafana's classic model; ids count up and nothing overlaps."""
    made = (
        dashboard.Dashboard(page.title)
        .uid(f"eelgrid-{page.name}")
        .description(page.description)
        .tags(["eelgrid"])
        .readonly()
        .timezone("browser")
        .refresh("30s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("Eelgrid").type("dashboards").tags(["eelgrid"]).as_dropdown(True).keep_time(True))
    )
    made = _with_variables(made, page)
    number, top = 1, 0
    for row in page.rows:
        made = made.with_row(dashboard.Row(row.title).id(number).grid_pos(GridPos(h=1, w=_COLUMNS, x=0, y=top)))
        number, top, left = number + 1, top + 1, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + row.height
            made = made.with_panel(_placed(panel, number, GridPos(h=row.height, w=panel.width, x=left, y=top)))
            number, left = number + 1, left + panel.width
        top += row.height
    return made.build()
