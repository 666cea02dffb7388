"""Rows, order, history and lines of eelctl top, without a screen."""

from dataclasses import replace

import pytest
from tests.fakes.operators import a_node

from eelgrid_controller.cli.top_rendering import draw_bar, draw_graph, render_tabs
from eelgrid_controller.cli.top_views import (
    ConnectionStatus,
    PowerHistory,
    RowOrder,
    build_tabs,
    format_status,
    list_promise_rows,
    select_rows,
)
from eelgrid_protos.messages import (
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    BudgetScope,
    BudgetStatus,
    JobStatus,
    ListPromisesResponse,
    PowerBudget,
    ServiceStatus,
)

TABS = {tab.key: tab for tab in build_tabs(lambda: 100 * 10**9)}
NODES = [
    a_node("n-1", power_w=20.0),
    a_node("n-2", power_w=1500.0, model="A10"),
    a_node("n-10", power_w=None),
    a_node("n-3", power_w=300.0),
]


def names(order, rows=NODES):
    return [row.inventory.node_name for row in select_rows(TABS["nodes"], rows, order)]


def test_rows_stay_in_the_order_of_the_controller_until_they_are_sorted():
    assert names(RowOrder()) == ["n-1", "n-2", "n-10", "n-3"]


def test_sorting_orders_amounts_by_value_and_puts_missing_readings_last_in_both_directions():
    order = RowOrder().reverse(TABS["nodes"])
    assert order.column == "POWER"
    assert names(order) == ["n-2", "n-3", "n-1", "n-10"]
    assert names(order.reverse(TABS["nodes"])) == ["n-1", "n-3", "n-2", "n-10"]


def test_the_next_column_after_the_last_is_the_order_of_the_controller():
    tab = TABS["nodes"]
    order = RowOrder()
    seen = []
    for _ in range(len(tab.columns) + 1):
        order = order.shift(tab, 1)
        seen.append(order.column)
    assert seen == [*(column.title for column in tab.columns), ""]
    assert RowOrder().shift(tab, -1).column == tab.columns[-1].title


def test_a_click_on_a_title_sorts_and_a_second_one_reverses():
    once = RowOrder().choose("NODE")
    assert (once.column, once.is_descending) == ("NODE", True)
    assert once.choose("NODE").is_descending is False
    assert once.choose("POWER") == RowOrder(column="POWER", is_descending=True)


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("a10", ["n-2"]),
        ("N-1", ["n-1", "n-10"]),
        ("model=t4", ["n-1", "n-10", "n-3"]),
        ("node = n-3", ["n-3"]),
        ("no=such", []),
    ],
)
def test_a_filter_is_text_in_any_column_or_in_one(pattern, left):
    assert names(RowOrder(pattern=pattern)) == left


def test_bars_of_nodes_are_shares_of_gpus_and_of_their_limit():
    node = a_node("n", allocated_gpu_milli=500, power_w=150.0)
    gpus = tuple(replace(gpu, power_limit_default_w=100.0) for gpu in node.inventory.gpus)
    node = replace(node, inventory=replace(node.inventory, gpus=gpus))
    shares = {c.title: c.share(node) for c in TABS["nodes"].columns if c.share}
    assert shares == {"GPUS": 0.25, "POWER": 0.75}
    assert {c.title: c.colour(node) for c in TABS["nodes"].columns if c.share and c.colour} == {"POWER": "green"}


def test_an_attention_item_of_a_lost_gpu_is_described_as_a_gpu_and_has_its_command():
    tab = TABS["overview"]
    item = AttentionItem(
        severity=AttentionSeverity.CRITICAL,
        kind=AttentionKind.LOST_GPU,
        subject="n-1/3",
        message="GPU 3 does not respond",
        since_ns=10 * 10**9,
        command="eelctl describe gpu n-1/3",
    )
    assert tab.describe(item).command == tab.command(item) == "eelctl describe gpu n-1/3"
    assert [column.cell(item) for column in tab.columns][:4] == [
        "critical",
        "n-1/3",
        "GPU 3 does not respond",
        "90 s",
    ]
    assert tab.describe(replace(item, kind=AttentionKind.JOURNAL)) is None


def test_every_kind_of_attention_has_a_row():
    for kind in AttentionKind:
        item = AttentionItem(severity=AttentionSeverity.INFO, kind=kind, subject="s", message="m")
        assert TABS["overview"].identify(item)


def test_budgets_services_and_jobs_are_one_list_with_what_is_wrong_in_red():
    found = ListPromisesResponse(
        budgets=(
            BudgetStatus(budget=PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1000.0), measured_w=1100.0),
            BudgetStatus(budget=PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=1000.0), claimed_w=500.0),
        ),
        services=(ServiceStatus(workload_id="s", name="svc", objective_s=0.2, live_s=0.3, phase="steady"),),
        jobs=(JobStatus(workload_id="j", name="job", phase="steady", power_limit_w=250.0, slowdown=0.02),),
    )
    rows = list_promise_rows(found)
    assert [(row.kind, row.name, row.phase, row.is_bad) for row in rows] == [
        ("budget", "cluster", "over", True),
        ("budget", "rack r1", "ok", False),
        ("service", "svc", "late", True),
        ("job", "job", "steady", False),
    ]
    assert [row.share for row in rows[:2]] == [1.1, 0.5]


def test_the_history_averages_each_column_and_forgets_what_is_old():
    history = PowerHistory(span_s=60.0)
    for at_s, power_w in ((0.0, 1.0), (100.0, 10.0), (104.0, 30.0), (118.0, 50.0)):
        history.add(at_s, power_w)
    assert history.sample(119.0, 3, 10.0) == [None, 20.0, 50.0]
    assert history.sample(119.0, 12, 10.0)[0] is None


def test_the_graph_has_a_line_at_the_budget_and_red_columns_above_it():
    lines = draw_graph([None, 50.0, 120.0], 100.0, 4)
    assert len(lines) == 4
    top = lines[0]
    assert top.plain[:2] == "╌╌"
    assert top.plain[2] != "╌"
    styles = {top.plain[span.start]: str(span.style) for span in top.spans}
    assert styles[top.plain[2]] == "red"
    assert lines[-1].plain[0] == " "
    assert lines[-1].plain[1:] == "██"


def test_a_graph_without_readings_or_budget_is_blank():
    assert {line.plain for line in draw_graph([None] * 5, None, 3)} == {" " * 5}


@pytest.mark.parametrize(("share", "style"), [(0.5, "green"), (0.95, "yellow"), (1.0, "yellow"), (1.2, "red")])
def test_a_bar_has_its_colour_even_when_it_is_full(share, style):
    bar = draw_bar(share, 8)
    assert len(bar) == 8
    assert str(bar.spans[0].style) == style


def test_the_status_line_fits_and_says_the_most_important_first():
    live = ConnectionStatus(controller="host:7443", role="role admin", age_s=1.2)
    assert format_status(live, 80) == "● live  data 1 s old  host:7443  role admin"
    assert format_status(live, 24) == "● live  data 1 s old"
    lost = replace(live, problem="no controller answers", age_s=12.0)
    assert format_status(lost, 30) == "○ reconnecting  data 12 s old"
    assert format_status(lost, 90).endswith("host:7443  no controller answers")
    assert format_status(lost, 76).endswith("host:7443  no controller an…")
    assert "PAUSED" in format_status(replace(live, is_paused=True), 40)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_tabs_fit_and_each_can_be_clicked(width):
    line, spans = render_tabs(list(TABS.values()), "gpus", width)
    assert len(line) <= width
    assert [key for *_, key in spans] == list(TABS)
    start, end, _ = spans[2]
    assert "GPUs" in line.plain[start:end]
