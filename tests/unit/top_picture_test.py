"""The cluster at a glance: what is said, what is left out on a small screen, and what is not known."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.builders.objectives import build_service_status
from tests.fakes.operators import a_node
from tests.fakes.spent import NOTHING_SPENT

from eelgrid_controller.cli.terminal_rendering import TopSnapshot, render_top
from eelgrid_protos.messages import (
    BudgetScope,
    BudgetStatus,
    EnergyGroup,
    EnergySpent,
    JobStatus,
    ListPromisesResponse,
    ModelSummary,
    PowerBudget,
    ReasonCount,
    Summary,
)

SUMMARY = Summary(
    time_ns=1,
    nodes_ready=1213,
    nodes_lost=2,
    gpus=6212,
    allocated_gpu_milli=3_106_000,
    placed=4000,
    pending=9,
    pending_reasons=tuple(ReasonCount(reason=f"reason {i} " + "x" * 120, workloads=9 - i) for i in range(7)),
    modelled_power_w=700_000.0,
    measured_power_w=500_000.0,
    measured_gpus=6200,
    samples_received=123_456_789,
    models=tuple(
        ModelSummary(model=f"M{i}", gpus=1000 - i, allocated_gpu_milli=500_000, measured_power_w=1e5) for i in range(7)
    ),
)
NODES = [a_node(f"openb-node-{i:04d}", gpus=8, power_w=2000.0 + i, sample_age_s=i / 2) for i in range(30)]


def service(name, live_s, **changes):
    return build_service_status(name, live_s=live_s, **changes)


PROMISES = ListPromisesResponse(
    services=(service("a", 0.4), service("b", 0.6), service("c", None, phase="unsteered")),
    jobs=(JobStatus(workload_id="j", name="j", phase="steady"),),
    budgets=(
        BudgetStatus(budget=PowerBudget(scope=BudgetScope.RACK, name="r", limit_w=10.0), claimed_w=9.0),
        BudgetStatus(
            budget=PowerBudget(scope=BudgetScope.CLUSTER, limit_w=800_000.0),
            claimed_w=1.0,
            measured_w=SUMMARY.measured_power_w,
            measured_gpus=SUMMARY.measured_gpus,
        ),
    ),
)
ENERGY = replace(
    NOTHING_SPENT,
    currency="EUR",
    groups=tuple(
        EnergyGroup(values=("ml", f"job-{i}"), spent=EnergySpent(active_mj=(30 - i) * 10**9, cost=1.0))
        for i in range(30)
    ),
    unallocated=EnergySpent(bare_idle_mj=465 * 10**9),
)


def drawn(seen, *, width=80, height=24, nodes=10):
    console = Console(width=width, file=io.StringIO(), record=True, no_color=True)
    console.print(render_top(seen, "Eelgrid", nodes_most=nodes, width=width, height=height))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("height", [24, 30, 50])
def test_it_fits_the_screen(width, height):
    lines = drawn(
        TopSnapshot(summary=SUMMARY, nodes=NODES, promises=PROMISES, energy=ENERGY), width=width, height=height
    )
    assert len(lines.splitlines()) <= height
    assert max(map(len, lines.splitlines())) <= width
    for piece in ("busiest nodes", "openb-node-0029", "ml/job-0", "waiting for", "for other reasons"):
        assert piece in lines


def test_everything_is_reported_in_80_columns():
    said = drawn(TopSnapshot(summary=SUMMARY, nodes=NODES, promises=PROMISES, energy=ENERGY))
    for piece in (
        "1,213 ready, 2 lost, 6,212 GPUs; oldest sample 14 s",
        "50.0 % (3,106.0)",
        "500.0 kW measured (6,200 of 6,212 GPUs), 700.0 kW modelled",
        "62 % of 800.0 kW, and 1 more",
        "258.3 kWh, 30.00 EUR, 50.0 % of it idle",
        "1 of 3 services kept, 1 late, 1 job, 1 unsteered",
        "123,456,789, 0 lost",
        "9  reason 0",
        "25  for other reasons",
        "and 4 models more with 3,982 GPUs",
    ):
        assert piece in said


@pytest.mark.parametrize("width", [80, 110, 129, 130, 160])
def test_figures_are_whole_beside_long_names_of_models(width):
    models = tuple(replace(model, model=f"A100-SXM4-80GB-{at}") for at, model in enumerate(SUMMARY.models))
    said = drawn(TopSnapshot(summary=replace(SUMMARY, models=models), nodes=[]), width=width, height=40)
    for piece in ("GPUs allocated", "700.0 kW modelled", "123,456,789, 0 lost", "0 refused", "A100-SXM4-80GB-0"):
        assert piece in said


def test_a_rack_over_its_claim_is_the_budget_where_the_cluster_has_none():
    racks = replace(PROMISES, budgets=PROMISES.budgets[:1])
    assert "90 % of 10.0 W claimed, rack r" in drawn(TopSnapshot(summary=SUMMARY, nodes=NODES, promises=racks))


def test_what_is_not_known_is_reported_and_no_number():
    said = drawn(TopSnapshot(summary=SUMMARY, nodes=[], missing="the ledger is closed"))
    assert said.count("not known (the ledger is closed)") == 2
    assert "oldest sample -" in said
    assert "225.4 W modelled per GPU in use" in said


def test_an_empty_cluster_is_drawn_too():
    said = drawn(
        TopSnapshot(summary=Summary(time_ns=0), nodes=[], promises=ListPromisesResponse(), energy=NOTHING_SPENT)
    )
    for piece in ("nothing waits", "nothing has an objective", "0 J, - of it idle"):
        assert piece in said
