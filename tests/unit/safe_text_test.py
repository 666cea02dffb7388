"""Names from elsewhere can do nothing to a terminal, a spreadsheet or a reader of the report."""

import csv
import io
import json
import re

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from eelgrid_controller.cli import output, terminal_rendering
from eelgrid_controller.cli.connection import CliError, CliSettings
from eelgrid_controller.cli.energy_exports import write_csv
from eelgrid_controller.cli.frontier import _write as write_frontier
from eelgrid_controller.cli.output import TableColumn, print_plain, text_table
from eelgrid_controller.cli.report import ReportSection, render_report
from eelgrid_controller.replay.policy_comparison import ResultTable, TableFormat, table_writer
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import EnergyGroup, EnergySpent, QueryEnergyResponse, ReasonCount, Summary
from eelgrid_protos.safe_text import escape_csv_cell, escape_json, escape_text, escape_text_line

EVIL = "a\u202eb\x1b[2Jc\x9bd\ne\u2066f\u2028g\u200fh"
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0001]")
SPENT = EnergySpent(active_mj=5_000)


@given(st.text())
def test_what_is_printed_moves_no_cursor_and_no_letter(text):
    shown = escape_text(text)
    assert not UNSAFE.search(shown)
    assert "\n" not in shown
    assert not UNSAFE.search(escape_text_line(text).replace("\x1b[31m", ""))


@example("\x7f")
@given(
    st.recursive(
        st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    )
)
def test_json_is_the_same_document(plain):
    shown = escape_json(json.dumps(plain, indent=2, ensure_ascii=False))
    assert json.loads(shown) == plain
    assert not UNSAFE.search(shown)


@pytest.mark.parametrize("text", ["train/llm-7b", "Zürich", "数据", "नमस्ते", "می\u200cخواهم", "👩\u200d💻"])
def test_names_that_people_write_stay_as_they_are(text):
    assert escape_text(text) == escape_text_line(text) == text


@pytest.mark.parametrize("first", ["=", "@", "+", "-", "\t", "\r"])
def test_a_cell_that_would_be_a_formula_is_text_in_every_export(tmp_path, first):
    evil = f"{first}cmd|' /C calc'!A0"
    row = {"title": evil, "energy_j": -1.5, "work": []}
    write_csv(tmp_path / "energy.csv", [row], ("title",))
    write_frontier(tmp_path / "frontier.csv", [row | {"work": 1}])
    path = table_writer(TableFormat.CSV)(tmp_path, ResultTable("table", ("title", "energy_j"), ((evil, -1.5),)))
    for name in ("energy.csv", "frontier.csv", path.name):
        with (tmp_path / name).open(newline="") as file:
            (found,) = list(csv.DictReader(file))
        assert found["title"] == "'" + evil.replace("\r", "\\r"), name
        assert found["energy_j"] == "-1.5", name


def test_numbers_and_plain_text_are_cells_as_they_are():
    assert escape_csv_cell("a\r=1+1") == "a\\r=1+1"
    for value in (-1.5, 3, None, True, "-1.5", "+3e-7", "a=b", "", "job-1"):
        assert escape_csv_cell(value) is value


def test_a_table_shows_names_escaped_and_keeps_its_columns(monkeypatch):
    columns = [TableColumn[str]("NAME", str), TableColumn[str]("N", lambda _: "1", right=True, colour=lambda _: "red")]
    lines = text_table(columns, [EVIL, "plain"], colour=True)
    assert not UNSAFE.search("".join(lines).replace("\x1b[31m", "").replace("\x1b[0m", ""))
    assert "a\\u202eb\\x1b[2Jc\\x9bd\\x0ae\\u2066f" in lines[1]


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_whatever_is_printed_is_escaped(output, capsys):
    print_plain(CliSettings(output=output), {"name": EVIL, "list": [EVIL]}, [f"about {EVIL}"])
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown)
    if output == "json":
        assert json.loads(shown)["name"] == EVIL
    if output == "yaml":
        assert yaml.safe_load(shown)["list"] == [EVIL]


def test_an_error_shows_names_escaped(capsys):
    CliError(f"no {EVIL}", f"try {EVIL}", (Violation(EVIL, EVIL, EVIL),)).show()
    assert not UNSAFE.search(capsys.readouterr().err)


def test_top_shows_names_escaped():
    seen = terminal_rendering.TopSnapshot(
        summary=Summary(time_ns=0, pending_reasons=(ReasonCount(reason=EVIL, workloads=3),)),
        nodes=(),
        energy=QueryEnergyResponse(
            begin_ns=0,
            end_ns=1,
            groups=(EnergyGroup(values=("ns", EVIL), spent=SPENT),),
            left_out=EnergySpent(),
            unallocated=EnergySpent(),
            unattributed=EnergySpent(),
            currency="\u202e",
        ),
    )
    console = Console(width=200, height=60, record=True, file=io.StringIO(), color_system=None)
    console.print(terminal_rendering.render_top(seen, "t", nodes_most=5, width=200, height=0))
    shown = console.export_text()
    assert "a\\u202eb" in shown
    assert not UNSAFE.search(shown)


def test_the_report_shows_names_escaped_and_says_what_is_damaged():
    part = {"energy_j": 1.0, "idle_j": 0.0, "active_j": 1.0, "cost": 0.0, "carbon_g": 0.0}
    document = {
        "begin": "2026-10-01T00:00:00",
        "end": "2026-11-01T00:00:00",
        "currency": "",
        "groups": [{"title": EVIL, "work": []} | part],
        "left_out": {"groups": 0} | part,
        "unallocated": part,
        "unattributed": part,
        "total": part,
        "measured_j": 1.0,
        "uncertainty_j": 0.1,
        "uncounted_s": 0.0,
        "damaged": ["the hour 2026-10-02 03:00 UTC of node <n>"],
    }
    days = document | {"groups": [], "damaged": []}
    page = render_report("t", "2026-11-02 00:00 UTC", [ReportSection("Workloads", ("title",), document)], days)
    assert not UNSAFE.search(page)
    assert "a\\u202eb" in page
    assert "the hour 2026-10-02 03:00 UTC of node &lt;n&gt;" in page
    assert "damaged" not in render_report(
        "t", "2026-11-02", [ReportSection("W", ("title",), document | {"damaged": []})], days
    )


def test_echo_escapes_on_both_outputs():
    import click

    @click.command()
    def command():
        output.echo(EVIL)
        output.echo(EVIL, err=True)

    assert not UNSAFE.search(CliRunner().invoke(command).output)
