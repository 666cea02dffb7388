"""`eelctl energy --confirm-export` and `eelctl exporters`: what is asked, written, confirmed and refused."""

import json
import time
from dataclasses import replace

import pytest
from tests.fakes.spent import NOTHING_SPENT
from tests.tables import read_csv

from eelgrid_protos.messages import EnergyExporter, EnergyGroup, EnergySpent

HOUR_NS = 3600 * 10**9
SETTLED_NS = time.time_ns() // HOUR_NS * HOUR_NS - HOUR_NS
GROUP = EnergyGroup(values=("bert", "ml"), spent=EnergySpent(active_mj=1_500_000))


@pytest.fixture
def spent(fake):
    fake.spent.answer = replace(NOTHING_SPENT, groups=(GROUP,), revision=7)
    fake.spent.settled_ns = SETTLED_NS
    return fake.spent


def test_what_is_on_the_disk_is_confirmed_as_it_was_read(eelctl, spent, tmp_path):
    path = tmp_path / "week.csv"
    path.write_text("of the week before")
    done = eelctl("energy", "--since", "7d", "--csv", str(path), "--confirm-export", "archive")
    assert [row["title"] for row in read_csv(path)] == ["bert"]
    assert list(tmp_path.iterdir()) == [path]
    (asked,), (confirmed,) = spent.asked, spent.confirmed
    assert asked.with_nobody
    # What is not settled is left for the next time.
    assert (asked.begin_ns, asked.end_ns) == (confirmed.begin_ns, confirmed.end_ns)
    assert confirmed.end_ns == SETTLED_NS
    assert (confirmed.name, confirmed.revision) == ("archive", 7)
    assert "confirmed: archive has everything from" in done.stderr


def test_without_a_stretch_it_is_what_the_exporter_does_not_have(eelctl, spent, tmp_path):
    begin_ns = SETTLED_NS - 40 * HOUR_NS
    spent.exporters["archive"] = EnergyExporter(name="archive", since_ns=0, until_ns=begin_ns)
    command = ("energy", "--csv", str(tmp_path / "new.csv"), "--confirm-export", "archive")
    eelctl(*command)
    assert (spent.asked[0].begin_ns, spent.asked[0].end_ns) == (begin_ns, SETTLED_NS)
    (tmp_path / "new.csv").unlink()
    again = eelctl(*command)
    assert "is settled that" in again.stderr
    assert not list(tmp_path.iterdir())
    assert len(spent.confirmed) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--since", "7d"), 2, "add --csv FILE or --parquet FILE"),
        (("--csv", "x.csv"), 2, "archive has confirmed nothing yet; give the start"),
        (("--csv", "x.csv", "--since", "7d", "--where", "namespace=ml"), 2, "leave one of them out"),
        (("--csv", "/dev/null", "--since", "7d"), 2, "/dev/null is not a regular file"),
        (("--csv", "x.csv", "--month", "2099-01"), 5, "hours are settled until"),
        (("--csv", "nowhere/x.csv", "--since", "7d"), 2, "name a writable file"),
    ],
)
def test_what_would_not_be_all_is_neither_written_nor_confirmed(
    eelctl, spent, tmp_path, monkeypatch, words, code, said
):
    monkeypatch.chdir(tmp_path)
    refused = eelctl("energy", "--confirm-export", "archive", *words, code=code)
    assert said in refused.stderr
    assert not list(tmp_path.iterdir())
    assert not spent.confirmed


def test_a_gap_is_refused_before_anything_is_written(eelctl, spent, tmp_path):
    spent.exporters["archive"] = EnergyExporter(name="archive", since_ns=0, until_ns=SETTLED_NS - 40 * HOUR_NS)
    command = ("energy", "--csv", str(tmp_path / "x.csv"), "--confirm-export", "archive", "--since")
    assert "archive has rows up to" in eelctl(*command, "24h", code=5).stderr
    assert not list(tmp_path.iterdir())
    eelctl(*command, "2d")
    assert len(spent.confirmed) == 1


def test_rows_that_found_no_room_are_not_confirmed(eelctl, spent, tmp_path):
    spent.answer = replace(spent.answer, left_out_groups=3)
    path = tmp_path / "x.csv"
    refused = eelctl("energy", "--since", "7d", "--csv", str(path), "--confirm-export", "archive", code=5)
    assert "3 rows exceed the limit" in refused.stderr
    assert "--rows 10000" in refused.stderr
    assert not path.exists()
    assert not spent.confirmed


def test_exporters_are_listed_and_removed(eelctl, spent):
    assert "no exporter" in eelctl("exporters").stderr
    spent.exporters["archive"] = EnergyExporter(
        name="archive",
        since_ns=0,
        until_ns=48 * HOUR_NS,
        changed_hours=2,
        changed_first_ns=HOUR_NS,
        changed_last_ns=5 * HOUR_NS,
        lag_s=7200.0,
    )
    line = eelctl("exporters").stdout.splitlines()[1]
    assert [cell.strip() for cell in line.split("  ") if cell] == [
        "archive",
        "1970-01-01 00:00",
        "1970-01-03 00:00",
        "2 h",
        "2, 1970-01-01 01:00 to 1970-01-01 05:00",
    ]
    (told,) = json.loads(eelctl("exporters", "-o", "json").stdout)
    assert (told["name"], told["changed_hours"]) == ("archive", 2)
    assert "may then be deleted" in eelctl("exporters", "remove", "archive", code=5).stderr
    assert eelctl("exporters", "remove", "archive", "--yes").stdout == "archive is removed from the exporters\n"
    assert "there is no exporter 'archive'" in eelctl("exporters", "remove", "archive", "--yes", code=4).stderr
