"""--sort and --filter of lists by the texts of their columns, and tables that fit the terminal."""

import json
import sys
from dataclasses import replace

import pytest
from tests.fakes.operators import a_node
from tests.fakes.spent import NOTHING_SPENT

from eelgrid_controller.cli import output
from eelgrid_controller.cli.output import TableColumn, display_width, format_bar, shorten_text, text_table
from eelgrid_protos.messages import (
    BudgetScope,
    BudgetStatus,
    EnergyGroup,
    EnergySpent,
    ListPromisesResponse,
    PowerBudget,
    ServiceStatus,
)


@pytest.fixture
def some_nodes(fake):
    powers = {"n-10": 900.0, "n-2": 12_000.0, "n-1": None, "m-3": 40.0}
    fake.nodes = [a_node(name, power_w=power_w) for name, power_w in powers.items()]


def names(eelctl, *arguments):
    listed = json.loads(eelctl("nodes", *arguments, "-o", "json").stdout)
    return [one["inventory"]["node_name"] for one in listed]


def test_amounts_are_sorted_by_value_whatever_their_unit_and_what_is_absent_comes_last(eelctl, some_nodes):
    assert names(eelctl, "--sort", "power") == ["m-3", "n-10", "n-2", "n-1"]
    assert names(eelctl, "--sort", "-POWER") == ["n-2", "n-10", "m-3", "n-1"]
    assert names(eelctl, "--sort", "node") == ["m-3", "n-1", "n-2", "n-10"], "numbers in names count as numbers"


def test_filters_hold_together_and_before_the_limit(eelctl, some_nodes):
    assert names(eelctl, "--filter", "node=N-") == ["n-10", "n-2", "n-1"]
    assert names(eelctl, "--filter", "node=n-", "--filter", "power=W", "--sort", "node", "--limit", "1") == ["n-2"]
    nothing = eelctl("nodes", "--filter", "node=x")
    assert (nothing.stdout, "no node matches" in nothing.stderr) == ("", True)


LISTS = (
    ("nodes",), ("gpus",), ("plan",), ("workloads",), ("queue",), ("audit",), ("profile", "list"), ("promises",),
    ("spending",), ("exporters",), ("energy",), ("partition", "show"), ("partition", "plan"),
)  # fmt: skip


def test_every_list_takes_both(eelctl):
    for command in LISTS:
        text = eelctl(*command, "--help").stdout
        assert "--sort COLUMN" in text, command
        assert "--filter COLUMN=TEXT" in text, command


def some_budgets():
    """A cluster's budget that is exceeded, and that of a rack."""
    cluster = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1000.0)
    rack = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=2000.0)
    return (
        BudgetStatus(budget=cluster, claimed_w=900.0, measured_w=1100.0, gpus=2, measured_gpus=2),
        BudgetStatus(budget=rack, claimed_w=50.0, measured_w=500.0, gpus=2, measured_gpus=2),
    )


def test_several_tables_of_one_answer_are_arranged_together(eelctl, fake):
    services = tuple(
        ServiceStatus(workload_id=key, name=key, phase=phase) for key, phase in (("b", "steady"), ("a", "late"))
    )
    fake.promised.answer = ListPromisesResponse(services=services, budgets=some_budgets())
    listed = json.loads(eelctl("promises", "--sort", "service", "-o", "json").stdout)
    assert [one["workload_id"] for one in listed["services"]] == ["a", "b"]
    assert len(listed["budgets"]) == 2, "a table without the column stays"
    only = eelctl("promises", "--filter", "phase=late").stdout.splitlines()
    assert [line.split()[0] for line in only] == ["SERVICE", "a"]
    assert "nothing with an objective matches" in eelctl("promises", "--filter", "phase=x").stdout
    assert "SERVICE, PHASE" in eelctl("promises", "--sort", "speed", code=2).stderr


def test_energy_is_arranged_without_what_belongs_to_nobody(eelctl, fake):
    groups = tuple(
        EnergyGroup(values=(name, "ml"), spent=EnergySpent(active_mj=mj))
        for name, mj in (("a", 1000), ("b", 9_000_000))
    )
    fake.spent.answer = replace(NOTHING_SPENT, groups=groups, unallocated=EnergySpent(bare_idle_mj=500_000))
    names = [line.split()[0] for line in eelctl("energy", "--sort", "energy").stdout.splitlines()[1:3]]
    assert names == ["a", "b"]
    rows = eelctl("energy", "--filter", "title=b").stdout.splitlines()
    assert [line.split()[0] for line in rows[:2]] == ["TITLE", "b"]
    assert "TOTAL" not in "".join(rows)


def test_the_queue_and_its_sums_are_arranged(eelctl, fake):
    fake.fits = lambda request: False
    for key, user, gpus in (("a", "ada", 1), ("b", "bob", 4), ("c", "ada", 2)):
        eelctl("submit", "--id", key, "--name", key, "--user", user, "--gpus", gpus)
    rows = eelctl("queue", "--sort", "-id", "--filter", "user=ada", "--no-headers").stdout.splitlines()
    assert [row.split()[1] for row in rows] == ["c", "a"]
    assert eelctl("queue", "--by", "user", "--sort", "-gpus", "--no-headers").stdout.split()[0] == "bob"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nodes", "--sort", "speed"), "there is no column 'speed'"),
        (("nodes", "--filter", "speed=1"), "NODE, STATE, POOL"),
        (("nodes", "--filter", "node"), "write COLUMN=TEXT"),
        (("workloads", "-w", "--sort", "age"), "exclude each other"),
    ],
)
def test_mistakes_are_wrong_use(eelctl, arguments, complaint):
    assert complaint in eelctl(*arguments, code=2).stderr


COLUMNS = (
    TableColumn("ID", lambda row: row[0]),
    TableColumn("POWER", lambda row: row[1], right=True, colour=lambda row: "red"),
    TableColumn("REASON", lambda row: row[2]),
)
ROWS = [("w-1", "12.0 W", "gpu_count: no node has enough whole GPUs free"), ("機械学習の仕事", "1,000 W", "-")]


def test_a_terminal_shortens_texts_and_no_row_wraps():
    assert text_table(COLUMNS, ROWS, width=40) == [
        "ID                POWER  REASON",
        "w-1              12.0 W  gpu_count: no …",
        "機械学習の仕事  1,000 W  -",
    ]
    for width in range(1, 80):
        assert all(display_width(line) <= width for line in text_table(COLUMNS, ROWS, width=width)), width
    assert text_table(COLUMNS, ROWS, width=200) == text_table(COLUMNS, ROWS)


def test_a_text_is_cut_at_a_whole_letter():
    cut = [shorten_text("機械学習", width) for width in (8, 7, 6, 2, 1, 0)]
    assert cut == ["機械学習", "機械学…", "機械…", "…", "…", ""]


def test_lists_fit_the_terminal_and_a_pipe_takes_all(eelctl, monkeypatch):
    whole = eelctl("gpus", "-o", "wide").stdout.splitlines()
    assert max(map(len, whole)) > 80
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    assert max(map(len, eelctl("gpus", "-o", "wide").stdout.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("command", [("nodes",), ("gpus",), ("workloads",), ("promises",), ("plan",)])
def test_rows_fit_terminals_of_any_width(eelctl, fake, monkeypatch, width, command):
    fake.promised.answer = ListPromisesResponse(budgets=some_budgets())
    fake.nodes = [a_node("a-node-with-a-long-name-in-some-datacentre", power_w=120.0, allocated_gpu_milli=1500)]
    eelctl("submit", "--id", "a-workload-with-a-long-id", "--name", "long-" * 8 + "name", "--gpus", "1")
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    monkeypatch.setattr(output, "use_bars", lambda: True)
    for form in ("table", "wide"):
        lines = eelctl(*command, "-o", form).stdout.splitlines()
        assert all(display_width(line) <= width for line in lines), form


def test_a_bar_stands_beside_a_share_where_it_fits(eelctl, fake, monkeypatch):
    fake.promised.answer = ListPromisesResponse(budgets=some_budgets())
    plain = eelctl("promises").stdout
    assert "█" not in plain
    monkeypatch.setattr(output, "use_bars", lambda: True)
    first, second = eelctl("promises").stdout.splitlines()[1:]
    assert "1,100 W ██████" in first
    assert "500 W █▌····" in second
    assert "25.0 % █▌····" in eelctl("gpus").stdout
    assert eelctl("gpus", "--filter", "busy=25", "--no-headers").stdout.count("\n") == 1
    monkeypatch.setattr(output, "terminal_width", lambda: 30)
    assert "█" not in eelctl("promises").stdout


@pytest.mark.parametrize(
    ("share", "bar"), [(0.0, "····"), (0.03, "▏···"), (0.5, "██··"), (1.0, "████"), (1.7, "████"), (-1.0, "····")]
)
def test_a_bar_has_eighths_of_a_cell(share, bar):
    assert format_bar(share, 4) == bar


class _Stdout:
    """A terminal in some encoding."""

    def __init__(self, encoding, *, is_terminal=True):
        self.encoding = encoding
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("stdout", "environment", "shows"),
    [
        (_Stdout("utf-8"), {}, True),
        (_Stdout("UTF8"), {}, True),
        (_Stdout("utf-8"), {"NO_COLOR": "1"}, False),
        (_Stdout("utf-8"), {"TERM": "dumb"}, False),
        (_Stdout("latin-1"), {}, False),
        (_Stdout("utf-8", is_terminal=False), {}, False),
    ],
)
def test_bars_are_for_terminals_that_show_them(monkeypatch, stdout, environment, shows):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert output.use_bars() is shows
