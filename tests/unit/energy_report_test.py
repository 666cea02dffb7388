"""From a ledger to what people read: the page of a month, its CSV, and Parquet where pyarrow is at hand."""

import csv
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import click
import pytest

from eelgrid_controller.cli.energy import (
    energy_document,
    format_per_unit,
    format_work,
    largest_per_unit,
    period_ns,
)
from eelgrid_controller.cli.energy_exports import (
    flatten_rows,
    parquet_library,
    write_csv,
    write_groups,
    write_parquet,
)
from eelgrid_controller.cli.report import SECTIONS, ReportSection, _chromium, _last_month, _print, render_report
from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import EnergyHolder, LedgerAmount, LedgerEntry, LedgerPlace, MeasuredEnergy
from eelgrid_controller.energy.store.ledger_store import LastWindow, open_ledger
from eelgrid_controller.server.grpc.planner_services import EnergyService
from eelgrid_controller.state.measurements import WorkInterval, spread_work
from eelgrid_protos import codec
from eelgrid_protos.messages import QueryEnergyRequest, QueryEnergyResponse

BEGIN_NS, END_NS = period_ns(0, "2026-10", now_ns=0)
BEGIN_S = BEGIN_NS // 10**9
DAY_S = 86_400
PLACE = LedgerPlace("n1", "train", "H100")
TEAMS = {"ml": 3, "<script>alert(1)</script>": 2, "vision": 1}


def holders():
    for team, many in TEAMS.items():
        for number in range(many):
            yield EnergyHolder("pod", team, f"{team}-{number}-0", f"{team}-{number}", f"{team}-{number}", "", "q")
    yield EnergyHolder("unallocated")
    yield EnergyHolder("unattributed")


class Desk:
    def __init__(self, store):
        self.store = store

    async def query(self, asked):
        return self.store.query_all(asked)


@pytest.fixture
def store(tmp_path):
    store = open_ledger(tmp_path)
    for day in range(31):
        entries, total_mj = [], 0
        for place, holder in enumerate(holders()):
            spent = LedgerAmount(10**8 * (place + 1), 10**6, 10**9 + day * 10**8, 0.25, 900.0)
            total_mj += spent.energy_mj
            entries.append(LedgerEntry(BEGIN_S + day * DAY_S, PLACE, holder, spent))
        at_s = BEGIN_S + day * DAY_S
        worked = [
            *spread_work(WorkInterval("ml-0", "request", 1000.0, at_s, at_s + 900.0), None),
            *spread_work(WorkInterval("ml-0", "token", 64_000.0, at_s, at_s + 900.0), None),
            *spread_work(WorkInterval("vision-0", "image", 10.0, at_s, at_s + 900.0, is_whole=day != 3), None),
        ]
        measured = [MeasuredEnergy(at_s, PLACE, total_mj, total_mj // 20, 60.0)]
        store.add(entries, measured, [LastWindow("n1", 1, day + 1, at_s)], worked, now_s=at_s)
    yield store
    store.close()


@pytest.fixture
def document(store):
    """As eelctl has it, over the wire."""
    prices = SimpleNamespace(currency="EUR")
    loop = SimpleNamespace(core=SimpleNamespace(state=SimpleNamespace(policy=SimpleNamespace(prices=prices))))
    calls = EnergyService(loop=loop, desk=Desk(store), spending=None, clock=Clock())

    async def of(*by, rows=50, with_nobody=False):
        request = QueryEnergyRequest(
            begin_ns=BEGIN_NS, end_ns=END_NS, group_by=by, rows_most=rows, with_nobody=with_nobody
        )
        answer = await calls.query_energy(request, None)
        return energy_document(codec.decode_message(QueryEnergyResponse, codec.encode_message(answer)), by)

    return of


async def page(document, made="2026-11-01 06:00 UTC"):
    sections = [ReportSection(heading, by, await document(*by, rows=rows)) for heading, by, rows in SECTIONS]
    return render_report("GPU energy of 2026-10", made, sections, await document("day"))


class Cells(HTMLParser):
    """Rows of all tables."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self._cell = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self._cell = [] if tag in ("td", "th") else self._cell

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append("".join(self._cell))
            self._cell = None


async def test_the_page_has_every_number_and_nothing_of_others_runs_in_it(document):
    text = await page(document)
    found = Cells(text)
    assert "script" not in found.tags
    assert not re.search(r"(src|href)=|url\(|@import|http", text), "the page needs nothing else"
    whole = await document("namespace")
    total_kwh = next(float(row[1].replace(",", "")) for row in found.rows if row[0] == "Total")
    assert total_kwh == pytest.approx(whole["measured_j"] / 3.6e6, rel=0.01)
    by_namespace = {row[0]: row for row in found.rows[: 2 + len(TEAMS) + 2]}
    assert set(TEAMS) < set(by_namespace)
    assert {"unallocated", "unattributed", "Total"} < set(by_namespace)
    (chat,) = [row for row in found.rows if row[:2] == ["ml-0", "ml"]]
    assert chat[5] == "31,000 requests1.98 M tokens"  # in two lines
    (job,) = [row for row in found.rows if row[:2] == ["vision-0", "vision"]]
    assert job[5].startswith("≥ 310 images")
    assert job[6].startswith("≤ ")
    assert text.count("<rect") == 2 * 31


async def test_the_page_says_where_energy_went_before_its_tables(document):
    text = await page(document)
    assert "which is what the GPUs measured" in text
    assert re.search(
        r"The largest namespaces: ml \d+\.\d %, &lt;script&gt;alert\(1\)&lt;/script&gt; \d+\.\d %, vision", text
    )
    assert re.search(
        r"A day took [\d.]+ kWh on average, at most [\d.]+ kWh on 2026-10-31, at least [\d.]+ on 2026-10-01\.</p>",
        text,
    )
    money = float(re.search(r"<b>([\d,.]+) EUR</b>cost", text)[1].replace(",", ""))
    assert money == pytest.approx((await document("namespace"))["total"]["cost"], abs=0.01)
    assert "is not over" not in text


async def test_a_month_that_is_not_over_says_so_and_ends_where_it_is(document):
    text = await page(document, made="2026-10-20 12:00 UTC")
    assert "This month is not over: the figures are up to 2026-10-20 12:00 UTC." in text


async def test_a_day_without_a_row_keeps_its_place_in_the_chart(document):
    whole, days = await document("namespace"), await document("day")
    del days["groups"][3:6]
    text = render_report("t", "2026-11-01 06:00 UTC", [ReportSection("Namespaces", ("namespace",), whole)], days)
    assert text.count("<rect") == 2 * 31
    assert "On 3 days no energy was attributed." in text
    assert re.search(r"<title>2026-10-04: 0\.0 kWh", text)


async def test_a_page_without_prices_or_energy_says_what_is_missing(document):
    whole, days = await document("namespace"), await document("day")
    nothing = dict.fromkeys(whole["total"], 0.0)
    whole |= {"currency": "", "groups": [], "measured_j": 0.0} | dict.fromkeys(
        ("total", "unallocated", "unattributed", "left_out"), nothing
    )
    text = render_report(
        "t", "2026-11-01 06:00 UTC", [ReportSection("Namespaces", ("namespace",), whole)], days | {"groups": []}
    )
    assert "No prices are set" in text
    assert "No energy was attributed to an owner." in text


async def test_joules_for_each_unit_are_of_those_who_tell_it(document):
    (row,) = [row for row in (await document("namespace"))["groups"] if row["namespace"] == "ml"]
    (own,) = [row for row in (await document("workload"))["groups"] if row["workload"] == "ml-0"]
    told = {one["unit"]: one for one in row["work"]}
    # Two others of the namespace tell nothing; their joules are not of its requests.
    assert told["request"]["energy_per_unit_j"] == pytest.approx(own["energy_j"] / 31_000.0)
    assert told["token"]["energy_per_unit_j"] == pytest.approx(own["energy_j"] / (31 * 64_000.0))
    assert own["energy_j"] < row["energy_j"]
    assert (told["request"]["counted_s"], told["request"]["missed_s"]) == (31 * 900.0, 0.0)
    days = (await document("workload", "day", rows=1000))["groups"]
    assert [one["amount"] for row in days if row["workload"] == "ml-0" for one in row["work"]] == [
        1000.0,
        64_000.0,
    ] * 31
    for by in (("node",), ("name",), ("user",), ("kind",)):
        assert not any(row["work"] for row in (await document(*by))["groups"])


async def test_a_table_for_other_programs_has_a_column_for_each_unit(document, tmp_path):
    found = await document("title", "namespace")
    write_csv(tmp_path / "x.csv", found["groups"], ("title", "namespace"))
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = {row["title"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {row["title"] for row in found["groups"]}
    assert float(rows["ml-0"]["request_amount"]) == 31_000.0
    assert rows["ml-1"]["request_amount"] == ""
    assert sum(float(row["energy_j"]) for row in rows.values()) == pytest.approx(
        sum(row["energy_j"] for row in found["groups"])
    )
    write_csv(tmp_path / "none.csv", [], ("title",))
    assert (tmp_path / "none.csv").read_text().startswith("title,energy_j")


async def test_parquet_has_the_same_rows(document, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = (await document("title"))["groups"]
    write_parquet(tmp_path / "x.parquet", rows, ("title",))
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == flatten_rows(rows)
    write_parquet(tmp_path / "none.parquet", [], ("title",))
    none = parquet.read_table(tmp_path / "none.parquet")
    assert (none.num_rows, none.column_names[:2]) == (0, ["title", "energy_j"])


@pytest.mark.parametrize(("option", "write"), [("--csv", write_csv), ("--parquet", write_parquet)])
def test_a_file_that_cannot_be_written_is_named(option, write, tmp_path):
    path = tmp_path / "nowhere" / "x"
    with pytest.raises(click.UsageError, match=f"{option}: {path}: .*name a writable file"):
        write_groups(option, path, write, {"groups": []}, ("title",))


def test_parquet_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(click.UsageError, match=r"pip install 'eelgrid\[parquet\]'"):
        parquet_library()


def test_what_was_done_is_reported_in_words():
    one = {"unit": "request", "amount": 1234.0, "missed_s": 0.0, "energy_per_unit_j": 0.5}
    part = {"unit": "work", "amount": 0.0, "missed_s": 60.0, "energy_per_unit_j": None}
    largest_j = largest_per_unit([[one, part]])
    assert format_work([one, part]) == "1,234 requests, >= 0 units"
    assert format_per_unit([one, part], largest_j) == "500 mJ/request"


@pytest.mark.parametrize(("now_s", "month"), [(1_798_761_600 + 99, "2026-12"), (1_792_800_000, "2026-09")])
def test_the_month_that_ended_last(now_s, month):
    assert _last_month(now_s) == month


async def test_chromium_prints_the_page(document, tmp_path):
    try:
        browser = _chromium()
    except click.UsageError:
        pytest.skip("no Chromium here; install chromium")
    path = tmp_path / "page.html"
    path.write_text(await page(document), encoding="utf-8")
    _print(browser, path, tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
