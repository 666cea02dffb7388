"""Panels and dashboards: what each of ours has in common, on top of Grafana's foundation SDK.

Owns the look (legends, stacking, colours), the grid and the variables. Must not know a metric
but those that variables list. A dashboard is rows of panels; widths are in 24ths, and a row
is as high as it says. Nothing names a data source but by the variable `datasource`.
"""

from collections.abc import Callable, Sequence
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
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["Page", "Panel", "Query", "Row", "bars", "built", "figure", "lines", "listing", "states"]

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 24
_LINE_WIDTH = 1
_FILL, _FILL_STACKED = 8, 40


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


@dataclass(frozen=True)
class Page:
    """One dashboard. Variables are (name, label, query), each a choice of several and all."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str, str], ...] = ()
    # Name, label, value that is there before anybody writes another.
    texts: tuple[tuple[str, str, str], ...] = ()
    # Name, label, values of which one is chosen.
    choices: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


def lines(title: str, description: str, unit: str, *queries: Query, width: int = 12, stacked: bool = False) -> Panel:
    """Values over time."""

    def make() -> Any:
        legend = common.VizLegendOptions().show_legend(True).display_mode(shapes.LegendDisplayMode.LIST)
        panel = (
            timeseries.Panel()
            .line_width(_LINE_WIDTH)
            .fill_opacity(_FILL_STACKED if stacked else _FILL)
            .show_points(shapes.VisibilityMode.NEVER)
            .span_nulls(False)
            .legend(legend.placement(shapes.LegendPlacement.BOTTOM).calcs([]))
            .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
        )
        if stacked:
            panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
        return panel

    return Panel(title, description, unit, queries, make, width)


def _last() -> Any:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def figure(
    title: str, description: str, unit: str, query: Query, *, width: int = 4, bad_above: float | None = None, bad_below: float | None = None
) -> Panel:  # fmt: skip
    """One number now; red on the bad side of a bound, where there is one."""

    def make() -> Any:
        panel = stat.Panel().reduce_options(_last()).graph_mode(shapes.BigValueGraphMode.AREA)
        steps = [Threshold(value=None, color="text")]
        if bad_above is not None:
            steps = [Threshold(value=None, color="green"), Threshold(value=bad_above, color="red")]
        if bad_below is not None:
            steps = [Threshold(value=None, color="red"), Threshold(value=bad_below, color="green")]
        return panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))

    return Panel(title, description, unit, (query,), make, width)


def bars(title: str, description: str, unit: str, *queries: Query, width: int = 8) -> Panel:
    """One bar for each series, as it is now."""

    def make() -> Any:
        panel = bargauge.Panel().reduce_options(_last()).orientation(shapes.VizOrientation.HORIZONTAL)
        steps = [Threshold(value=None, color="blue")]
        panel = panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        return panel.display_mode(shapes.BarGaugeDisplayMode.BASIC)

    return Panel(title, description, unit, queries, make, width, instant=True)


def states(title: str, description: str, unit: str, query: Query, *, width: int = 12) -> Panel:
    """When something was so: a line for each series, coloured while its value is not zero."""

    def make() -> Any:
        steps = [Threshold(value=None, color="transparent"), Threshold(value=0.5, color="orange")]
        return (
            statetimeline.Panel()
            .show_value(shapes.VisibilityMode.NEVER)
            .row_height(0.8)
            .merge_values(True)
            .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        )

    return Panel(title, description, unit, (query,), make, width)


def listing(
    title: str, description: str, unit: str, *queries: Query, width: int = 12, hidden: Sequence[str] = ()
) -> Panel:
    """A table of what is now, a row for each series; scrape labels are hidden, and each query is a column."""
    dropped = dict.fromkeys(("Time", "job", "instance", "__name__", *hidden), True)
    if len(queries) == 1:
        names = {"Value": queries[0].legend}
    else:
        names = {f"Value #{chr(ord('A') + at)}": query.legend for at, query in enumerate(queries)}

    def make() -> Any:
        return (
            table.Panel()
            .with_transformation(DataTransformerConfig(id_val="merge", options={}))
            .with_transformation(
                DataTransformerConfig(id_val="organize", options={"excludeByName": dropped, "renameByName": names})
            )
        )

    return Panel(title, description, unit, queries, make, width, instant=True, as_table=True)


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
        ("job", "Job", f"label_values({daemons}}}, job)"),
        ("instance", "Instance", f'label_values({daemons}, job=~"$job"}}, instance)'),
        *page.variables,
    )
    for name, label, query in several:
        made = made.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
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
