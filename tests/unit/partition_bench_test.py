"""The MIG comparison: its files read and written, its judge apart from the planner, a bounded run of the command."""

import itertools
import os
from pathlib import Path

import pytest
from bench.mig import fleet, scenes, tables
from bench.mig.__main__ import main
from bench.mig.judge import Placed, violations
from bench.mig.peers import PEERS, Choice, Demand, planned
from bench.mig.report import SUMMARY_COLUMNS, digest, published
from bench.mig.runs import run
from bench.mig.tables import Asked, Scenario, TableError
from tests.tables import read_csv

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "parvagpu"
SIZES = (1, 2, 3, 4, 7)
published_data = pytest.mark.skipif(not DATA.is_dir(), reason="the published tables are not here")


def _tables(folder, *models):
    """Throughput a little above the slices' share, latency by batch; five processes of batch 4 never run."""
    folder.mkdir(parents=True)
    for number, model in enumerate(models):
        lines = ["Mig instance,Batch size,Workload Number,Throughput,Latency"]
        for slices in SIZES:
            for batch in (1, 2, 4):
                for processes in (1, 5):
                    if (batch, processes) == (4, 5):
                        lines.append(f"{slices},{batch},{processes},0,0")
                        continue
                    each_hz = (10 + number) * slices**1.1 * batch**0.5 / processes**0.9
                    lines.append(f"{slices},{batch},{processes},{each_hz:.3f},{0.01 * batch * processes / slices:.4f}")
        (folder / f"{model}.csv").write_text("\n".join(lines) + "\n")


def _scenarios(folder, latency, rate):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SLO_latency.csv").write_text(latency)
    (folder / "SLO_req_rate.csv").write_text(rate)


@pytest.fixture
def data(tmp_path):
    _tables(tmp_path / "data" / "prof_data", "alpha", "beta", "gamma")
    _scenarios(tmp_path / "data" / "SLO", "100,200,N/A\n60,90,1000\n", "50,300,N/A\n7,1000,40\n")
    return tmp_path / "data"


def test_a_bounded_run(data, tmp_path, capsys):
    assert main(["--data", str(data), "--out", str(tmp_path / "out"), "--random", "3", "--seed", "5"]) == 0
    rows = read_csv(tmp_path / "out" / "summary.csv")
    assert (
        tuple(rows[0])
        == SUMMARY_COLUMNS
        == ("scenario", "gpus", "slices", "violations", "seconds", "cpu_seconds", "bound_gpus")
    )
    assert [row["scenario"] for row in rows] == ["S1", "S2"]
    assert all(row["violations"] == "0" and row["gpus"] == row["bound_gpus"] for row in rows)
    plans = read_csv(tmp_path / "out" / "plans.csv")
    assert {row["model"] for row in plans if row["scenario"] == "S1"} == {"alpha", "beta"}
    for row in rows:
        mine = [one for one in plans if one["scenario"] == row["scenario"]]
        assert len({one["gpu"] for one in mine}) == int(row["gpus"])
        assert sum(int(one["slices"]) for one in mine) == int(row["slices"])
    peers = read_csv(tmp_path / "out" / "peers.csv")
    assert {row["planner"] for row in peers} == {"ours", *PEERS}
    assert {row["violations"] for row in peers} == {"0"}
    assert len(read_csv(tmp_path / "out" / "random.csv")) == 3
    assert (tmp_path / "out" / "mig.png").stat().st_size > 0
    assert (tmp_path / "out" / "random.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "S2" in printed
    assert "3 scenarios drawn with seed 5" in printed


def test_a_service_that_nothing_serves_is_reported_and_counted(data, tmp_path, capsys):
    _scenarios(data / "SLO", "1,200,N/A\n", "50,300,N/A\n")
    assert main(["--data", str(data), "--out", str(tmp_path / "out"), "--no-plots"]) == 0
    (row,) = read_csv(tmp_path / "out" / "summary.csv")
    assert row["violations"] == "1"
    assert "service alpha: needs a latency below" in capsys.readouterr().out


def test_what_is_missing_is_named(data, tmp_path, capsys):
    assert main(["--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "no SLO_latency.csv in" in capsys.readouterr().err
    _scenarios(data / "SLO", "100,200\n", "50,300\n")
    assert main(["--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "2 objectives and 2 rates for 3 models; write N/A for none" in capsys.readouterr().err


def test_tables_may_lie_elsewhere(data, tmp_path, monkeypatch):
    apart = tmp_path / "apart"
    _scenarios(apart, "100,200,N/A\n", "50,300,N/A\n")
    assert tables.folders(apart, data / "prof_data") == (apart, data / "prof_data")
    monkeypatch.setenv("EELGRID_DATA", str(tmp_path / "shared"))
    with pytest.raises(TableError, match="no prof_data in"):
        tables.folders(apart)
    _tables(tmp_path / "shared" / "parvagpu" / "prof_data", "alpha")
    assert tables.folders(apart) == (apart, tmp_path / "shared" / "parvagpu" / "prof_data")
    assert tables.folders(data)[1] == data / "prof_data"


def test_a_table_is_read_as_points(data):
    found = [one for one in tables.points(data / "prof_data") if one.workload == "beta"]
    assert len(found) == 5 * 5  # what did not run is no point
    one = next(one for one in found if (one.configuration.mig_profile, one.configuration.processes) == ("3g", 5))
    assert one.configuration.gpu_model == "A100-SXM4-80GB"
    assert one.throughput_hz == pytest.approx(5 * round(11 * 3**1.1 / 5**0.9, 3))
    assert one.latency_s == {0.5: 0.0167}
    assert one.source == "ParvaGPU beta.csv:15"


def test_scenarios_by_columns(data):
    first, second = tables.scenarios(data / "SLO", ["gamma", "alpha", "beta"])
    assert first == Scenario("S1", (Asked("alpha", "100", "50"), Asked("beta", "200", "300")))
    assert (second.services[2].latency_s, second.services[2].rate_hz) == (1.0, 40.0)
    # A first row of names says which columns there are; a rate of 0 asks for nothing.
    _scenarios(data / "SLO", "gamma,alpha\n100,200\n\n50, 60\n", "gamma,alpha\n5,0\n\n6,7\n")
    assert tables.scenarios(data / "SLO", ["alpha", "beta", "gamma"]) == (
        Scenario("S1", (Asked("gamma", "100", "5"),)),
        Scenario("S2", (Asked("gamma", "50", "6"), Asked("alpha", "60", "7"))),
    )
    _scenarios(data / "SLO", "1,2,3\n1,2,3\n", "1,2,3\n")
    with pytest.raises(TableError, match="2 rows of objectives and 1 of rates"):
        tables.scenarios(data / "SLO", ["alpha", "beta", "gamma"])
    (data / "SLO" / "SLO_req_rate.csv").unlink()
    with pytest.raises(TableError, match=r"SLO_req_rate\.csv is missing"):
        tables.scenarios(data / "SLO", ["alpha", "beta", "gamma"])


def test_a_broken_table_is_named_by_its_line(data):
    path = data / "prof_data" / "alpha.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "1,2,x,4,5"]))
    with pytest.raises(TableError, match=r"alpha\.csv, line 4: a cell is no number"):
        tables.points(data / "prof_data")
    path.write_text("Mig instance,Latency\n")
    with pytest.raises(TableError, match="lacks the columns Batch size, Workload Number, Throughput"):
        tables.points(data / "prof_data")


def test_the_judge_finds_what_is_wrong(data):
    profiles = data / "prof_data"
    asked = [Asked("alpha", "100", "30")]
    good = Placed(0, 4, 3, "alpha", 1, 1)  # 33.484 Hz, 3.3 ms
    assert violations(asked, [good], profiles) == ()

    def told(*placed, asked=asked):
        return " | ".join(violations(asked, placed, profiles))

    assert "33.484 Hz serve 34 Hz" in told(good, asked=[Asked("alpha", "100", "34")])
    assert "0.0033 s is not below 0.45 of 7.3 ms" in told(good, asked=[Asked("alpha", "7.3", "30")])
    # Equal is not below: 0.45 x 20 ms is 9 ms to the last digit.
    with (profiles / "alpha.csv").open("a") as table:
        table.write("1,8,1,40,0.009\n")
    exact = Placed(0, 0, 1, "alpha", 8, 1)
    assert "0.009 s is not below 0.45 of 20 ms" in told(exact, asked=[Asked("alpha", "20", "30")])
    assert told(exact, asked=[Asked("alpha", "20.01", "40")]) == ""
    assert "begins where none of its size may" in told(good._replace(start=2))
    assert "slices overlap" in told(good, good._replace(slices=1, start=5))
    assert "did not run" in told(good, good._replace(gpu=1, batch=4, processes=5))
    assert "did not run" in told(good, good._replace(gpu=1, batch=3))
    assert "0 Hz serve 30 Hz" in told()


def test_peers_choose_and_place_as_they_say():
    choices = {1: Choice(1, 10.0, 1, 1), 2: Choice(2, 25.0, 1, 1), 3: Choice(3, 30.0, 1, 1), 7: Choice(7, 70.0, 1, 1)}
    demand = Demand("alpha", 58.0, choices)
    assert [one.slices for one in PEERS["whole"](demand)] == [7]
    assert [one.slices for one in PEERS["density"](demand)] == [2, 2, 2]
    assert [one.slices for one in PEERS["triplets"](demand)] == [2, 2, 1]
    full = Demand("beta", 50.0, choices)
    assert [one.slices for one in PEERS["triplets"](full)] == [2, 2]
    placed = planned(PEERS["triplets"], [demand, full, Demand("gamma", 30.0, {3: choices[3]})])
    # Largest first: 3 at 4, then twos at 0 and 2, the others on a second GPU, the one where it leaves most.
    assert [(one.gpu, one.start, one.slices) for one in placed] == [
        (0, 4, 3), (0, 0, 2), (0, 2, 2), (1, 0, 2), (1, 2, 2), (1, 6, 1),
    ]  # fmt: skip


def test_drawn_scenarios_depend_on_seed_and_number_alone(data):
    found = tables.points(data / "prof_data")
    five, two = list(scenes.drawn(found, 5, 3)), list(scenes.drawn(found, 2, 3))
    assert five[:2] == two
    assert len({digest(one) for one in five}) == 5
    for one in five:
        result = run(one, found, data / "prof_data")
        assert (result.ours.violations, result.told) == (0, ())
        assert result.bound_gpus <= result.ours.gpus <= result.bound_gpus + 1
        assert all(peer.violations == 0 for peer in result.peers.values())


@pytest.mark.parametrize(("services", "gpus", "kinds"), [(45, 45, 3), (13, 60, 4)])
def test_a_small_fleet_is_measured(data, services, gpus, kinds):
    """Forty-five services are planned as a fleet is; thirteen on one model are not, on five models they are."""
    measured = fleet.measured(tables.points(data / "prof_data"), services=services, gpus=gpus, seed=2)
    rows = list(itertools.islice(measured, kinds))
    every = [(name, what) for name in ("a100", "mixed") for what in ("cold", "warm", "change")]
    assert [(row.fleet, row.what) for row in rows] == every[:kinds]
    assert all(row.faults == 0 and row.bound <= row.value * (1.0 + 1e-9) for row in rows)


@published_data
def test_the_published_scenarios():
    """Proven least GPUs and compute slices: 2 / 10, 3 / 20, 5 / 30, 7 / 44, 12 / 82."""
    slo, profiles = tables.folders(DATA)
    found = tables.points(profiles)
    rows = tables.scenarios(slo, sorted({point.workload for point in found}))[:5]
    results = [run(row, found, profiles) for row in rows]
    assert [one.ours for one in results] == [(2, 10, 0), (3, 20, 0), (5, 30, 0), (7, 44, 0), (12, 82, 0)]
    assert all(proof.gap == 0.0 for one in results for proof in one.proofs)
    for row, one in zip(rows, results, strict=True):
        known = published(row)
        assert (known.least_gpus, known.least_slices) == one.ours[:2]
        assert known.gpus >= one.ours.gpus
