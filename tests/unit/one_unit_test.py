"""One unit in a column, and no cost where no price is known: tables of eelctl as people read them."""

import json
import re
from dataclasses import replace

import pytest
from tests.fakes.spent import NOTHING_SPENT

from eelgrid_controller.cli.connection import CliSettings
from eelgrid_controller.cli.energy import _energy_columns, _lines, energy_document, period_ns
from eelgrid_controller.cli.energy_exports import flatten_rows
from eelgrid_controller.cli.nodes import GPU_COLUMNS, NODE_COLUMNS
from eelgrid_controller.cli.output import text_table, visible_columns
from eelgrid_controller.cli.report import ReportSection, render_report
from eelgrid_controller.formatting import format_energies, format_energy, format_power, format_powers
from eelgrid_protos.messages import (
    EnergyGroup,
    EnergySpent,
    EnergyWork,
    Gpu,
    GpuStatus,
    Inventory,
    Node,
    NodeState,
)

KWH_MJ = 3_600_000_000
SETTINGS = CliSettings(controller="x")


def spent(kwh, *, cost=0.0, carbon_g=0.0):
    return EnergySpent(
        bare_idle_mj=round(0.25 * kwh * KWH_MJ), active_mj=round(0.75 * kwh * KWH_MJ), cost=cost, carbon_g=carbon_g
    )


def work(energy_per_unit_j):
    return (EnergyWork(unit="request", amount=1000.0, energy_per_unit_j=energy_per_unit_j),)


def answer(currency="", cost=0.0, carbon_g=0.0):
    groups = (
        EnergyGroup(values=("train",), spent=spent(4.0, cost=cost, carbon_g=carbon_g), work=work(1500.0)),
        EnergyGroup(values=("chat",), spent=spent(0.02), work=work(2.0)),
        EnergyGroup(values=("probe",), spent=spent(1e-6)),
    )
    return replace(NOTHING_SPENT, currency=currency, groups=groups)


def table(found):
    document = energy_document(found, ("title",))
    lines = list(_lines(SETTINGS, document, _energy_columns(document, ("title",)), "title"))
    return lines[: lines.index("")]


def test_energy_has_one_unit_in_a_column_and_no_cost_without_a_price():
    assert table(answer()) == [
        "TITLE     ENERGY    SHARE       IDLE  COST            WORK          FOR EACH  CO2",
        "train   4.00 kWh   99.5 %   1.00 kWh     -  1,000 requests    1.5 kJ/request    -",
        "chat    0.02 kWh    0.5 %   0.01 kWh     -  1,000 requests  0.002 kJ/request    -",
        "probe  <0.01 kWh    0.0 %  <0.01 kWh     -               -                 -    -",
        "TOTAL   4.02 kWh  100.0 %   1.01 kWh     -               -                 -    -",
    ]


def test_a_price_without_a_carbon_intensity_has_a_cost_alone():
    document = energy_document(answer("EUR", cost=1.2), ("title",))
    assert [row["cost"] for row in document["groups"]] == [1.2, None, None]
    assert [row["carbon_g"] for row in document["groups"]] == [None, None, None]
    assert (document["total"]["cost"], document["total"]["carbon_g"]) == (1.2, None)
    # What nothing was spent on costs nothing.
    assert document["unallocated"]["cost"] == 0.0
    assert json.loads(json.dumps(flatten_rows(document["groups"])))[1]["cost"] is None
    assert "1.20 EUR" in table(answer("EUR", cost=1.2))[1]


def test_the_report_has_a_dash_where_no_price_is_known():
    document = energy_document(answer(), ("title",))
    days = energy_document(NOTHING_SPENT, ("day",))
    page = render_report("t", "2026-11-24 00:00 UTC", [ReportSection("Workloads", ("title",), document)], days)
    assert "<b>-</b>cost" in page
    assert "<b>-</b>carbon dioxide" in page
    assert '<th class="n" scope="col">cost</th><th class="n" scope="col">kg CO₂</th>' in page
    assert page.count('<td class="n">-</td><td class="n">-</td></tr>') == 4


@pytest.mark.parametrize(
    ("powers_w", "texts"),
    [
        ([250.04, None, 30.0], ["250.0 W", "-", "30.0 W"]),
        ([2026.0, 99.96, 0.0], ["2,026 W", "100 W", "0 W"]),
        ([967_800.0, 12_340.0], ["967.8 kW", "12.3 kW"]),
        ([12_340.0, 250.0, 2.0], ["12.34 kW", "0.25 kW", "<0.01 kW"]),
        ([5e7, 1e6], ["50.0 MW", "1.0 MW"]),
        ([-20_000.0, -4.0], ["-20.00 kW", "-<0.01 kW"]),
        ([], []),
    ],
)
def test_powers_of_a_column_have_the_unit_of_the_largest(powers_w, texts):
    assert format_powers(powers_w) == texts
    assert all(format_power(power_w) == format_powers([power_w])[0] for power_w in powers_w)


def test_energies_of_a_column_have_the_unit_of_the_largest():
    assert format_energies([3.6e11, 3.6e8, 36.0]) == ["100.00 MWh", "0.10 MWh", "<0.01 MWh"]
    assert format_energies([5e3, 400.0]) == ["5.00 kJ", "0.40 kJ"]
    assert format_energies([400.0], largest_j=3.6e6) == ["<0.01 kWh"]
    assert [format_energy(one) for one in (3.6e6, 3.6e9, 3.6e11, 900.0)] == [
        "1.00 kWh",
        "1,000.0 kWh",
        "100.0 MWh",
        "900 J",
    ]


def node(name, power_w):
    inventory = Inventory(node_name=name, cpu_milli=1000, memory_bytes=2**30)
    return Node(inventory=inventory, state=NodeState.READY, power_w=power_w)


def test_nodes_and_gpus_have_one_unit_of_power():
    rows = text_table(visible_columns(SETTINGS, NODE_COLUMNS), [node("a", 10_400.0), node("b", 620.0), node("c", None)])
    at = rows[0].index("POWER") + len("POWER")
    assert [row[:at].split("  ")[-1].strip() for row in rows[1:]] == ["10.40 kW", "0.62 kW", "-"]
    gpus = [
        GpuStatus(
            node_name="a",
            node_state=NodeState.READY,
            gpu=Gpu(uuid=f"GPU-{at}", index=at, product="p", model="m"),
            power_w=power_w,
        )
        for at, power_w in enumerate((1_200.0, 88.4))
    ]
    rows = text_table(visible_columns(SETTINGS, GPU_COLUMNS), gpus)
    assert [re.search(r"\S+ W", row)[0] for row in rows[1:]] == ["1,200 W", "88 W"]
    # A watch prints a row before it knows the largest: watts.
    rows = text_table(visible_columns(SETTINGS, NODE_COLUMNS), [node("a", 10_400.0)], steady=True)
    assert "10,400.0 W" in rows[1]


def test_today_begins_at_midnight_by_the_offset_of_the_prices():
    day_s = 20_000 * 86_400
    now_ns = (day_s + 3_601) * 10**9
    assert period_ns(0, None, now_ns=now_ns) == (day_s * 10**9, now_ns)
    assert period_ns(0, None, now_ns=now_ns, utc_offset_minutes=60) == ((day_s - 3_600) * 10**9, now_ns)
    # It is still yesterday there.
    assert period_ns(0, None, now_ns=now_ns, utc_offset_minutes=-300) == ((day_s - 86_400 + 5 * 3_600) * 10**9, now_ns)
