"""--sort and --filter of lists by the texts of their columns, and tables that fit the terminal."""

import json

import pytest
from tests.fakes.operators import a_node

from eelgrid_controller.cli import output
from eelgrid_controller.cli.output import TableColumn, display_width, shorten_text, text_table


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


def test_every_list_takes_both(eelctl):
    for command in (("nodes",), ("gpus",), ("plan",), ("workloads",), ("queue",), ("audit",), ("profile", "list")):
        text = eelctl(*command, "--help").stdout
        assert "--sort COLUMN" in text
        assert "--filter COLUMN=TEXT" in text


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
