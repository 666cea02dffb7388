"""The bench of profiles: splits that leak nothing, figures by hand, peers on a straight line, and a bounded run."""

import csv
from collections import Counter

import numpy as np
import pytest
from bench.models.__main__ import _turn, main
from bench.models.drifts import CHANGE, measured
from bench.models.peers import PEERS, table
from bench.models.report import COLUMNS, figures
from bench.models.runs import OURS, Job, Predicted
from bench.models.splits import by_configuration, by_gpu, by_workload
from bench.models.tables import Cell, DataSet, Told, Unreadable, load

from eelgrid_controller.profiles.points import THROUGHPUT, Configuration, Point

MODELS = ("a100-sxm4-40gb", "a100-sxm4-80gb")


def _cells(workloads=("a", "b", "c", "d"), batches=(1, 2, 4, 8, 16, 32)):
    return tuple(
        Cell(Point(name, Configuration(model, batch=batch), 10.0 * batch**0.5), name, {})
        for name in workloads
        for model in MODELS
        for batch in batches
    )


def _set(cells):
    return DataSet("made up", (Told(THROUGHPUT, "iteration_time", inverse=True),), cells, {}, 0)


def _keys(cells):
    return {(cell.point.workload, cell.point.configuration) for cell in cells}


def test_held_out_configurations_were_not_seen_even_if_read_twice():
    cells = (*_cells(), *_cells())
    for seed in range(5):
        split = by_configuration(cells, 0.3, seed)
        assert not _keys(split.learned) & _keys(split.asked)
        assert len(split.learned) + len(split.asked) == len(cells)


@pytest.mark.parametrize(("share", "folds"), [(0.2, 5), (0.8, 5), (0.5, 2), (0.3, 3)])
def test_folds_hold_every_configuration_out_equally_often(share, folds):
    cells = (*_cells(), *_cells())
    splits = [by_configuration(cells, share, seed) for seed in range(2 * folds)]
    counts = Counter(key for split in splits for key in _keys(split.asked))
    assert counts.keys() == _keys(cells)
    assert set(counts.values()) == {2 * (1 if share <= 0.5 else folds - 1)}
    assert _keys(splits[0].asked) != _keys(splits[folds].asked)  # another shuffle


def test_every_workload_is_left_out_once_and_few_of_it_are_given_back():
    splits = by_workload(_set(_cells()), 0)
    assert {split.name for split in splits} == {"workload 0", "workload 1", "workload 3"}
    asked = [cell.point.workload for split in splits if split.name == "workload 3" for cell in split.asked]
    assert sorted(set(asked)) == ["a", "b", "c", "d"]
    assert len(asked) == 4 * (12 - 3)
    for split in splits:
        out = {cell.group for cell in split.asked}
        assert not out & {cell.group for cell in split.learned}
        assert not _keys(split.told) & _keys(split.asked)
        assert len(split.told) == int(split.name.split()[1]) * len(out)


def test_a_gpu_model_is_left_out_where_the_workload_was_measured_on_another():
    for split in by_gpu(_set(_cells()), 0):
        [model] = {cell.point.configuration.gpu_model for cell in split.asked}
        out = {cell.point.workload for cell in split.asked}
        mine = [cell for cell in split.learned if cell.point.workload in out]
        assert mine
        assert model not in {cell.point.configuration.gpu_model for cell in mine}


def test_figures_by_hand():
    ones = np.ones(4)
    found = figures([Predicted(ones, np.array([1.0, 1.1, 1.2, 1.4]), 0.9 * ones, np.array([1.0, 2.0, 0.95, 2.0]))])
    assert found.points == 4
    assert found.median_error_pct == pytest.approx(15.0)
    assert found.coverage_pct == 75.0


@pytest.mark.parametrize("name", ["gp", "linear", "nearest"])  # boosted trees take half a minute
def test_a_peer_learns_a_power_law_and_its_ends_are_around_it(name):
    cells = _cells(batches=tuple(range(1, 33)))
    split = by_configuration(cells, 0.1, 0)
    whole = table(_set(cells), (*split.learned, *split.asked))
    at = np.arange(whole.width)
    seen, asked = whole.take(at[: len(split.learned)]), whole.take(at[len(split.learned) :])
    values = np.log([cell.point.throughput_hz for cell in split.learned])
    truth = np.log([cell.point.throughput_hz for cell in split.asked])
    found = PEERS[name](seen, values, asked, THROUGHPUT)
    assert np.median(np.abs(found.median - truth)) < 0.1
    assert (found.lower <= found.upper).all()


def test_a_large_shift_is_seen_and_nothing_is_rarely_one():
    rows = list(measured(1))
    quiet = [row for row in rows if row.shift_pct == 0.0 and row.errors == "normal"]
    assert all(row.false_alarms_per_1000 < 2.0 for row in quiet)
    assert all(row.delay_median is None for row in quiet)
    clear = [row for row in rows if row.shift_pct >= 10.0]
    assert clear
    assert all(row.missed == 0 and row.delay_median <= 12.0 for row in clear)
    assert CHANGE > 100


def _miso(folder):
    (folder / "miso").mkdir()
    with (folder / "miso" / "a100_mig_iteration_time_s.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "mig_profile", "median_s"])
        for size, name in ((1, "small"), (3, "large")):
            for batch in (8, 16, 32, 64):
                for mig_profile, share in (("1g.5gb", 1 / 7), ("2g.10gb", 2 / 7), ("7g.40gb", 1.0)):
                    writer.writerow([f"{name}_train{batch}", mig_profile, 0.01 * size * (4 + batch) / share**0.8])


def test_a_bounded_run_writes_its_summary(tmp_path, capsys):
    _miso(tmp_path)
    options = ["--data", str(tmp_path), "--sets", "miso", "--peers", "nearest", "--seeds", "1", "--held-out", "0.2"]
    options += ["--only-configurations", "--no-costs", "--no-plots", "--processes", "1", "--out", str(tmp_path / "out")]
    assert main(options) == 0
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    errors = {row["method"]: float(row["median_error_pct"]) for row in rows}
    assert errors["eelgrid"] < errors["nearest"]
    assert errors["eelgrid"] < 5.0
    assert "iteration_time" in capsys.readouterr().out


def test_time_is_bounded_and_what_has_a_target_runs_first(tmp_path, capsys):
    _miso(tmp_path)
    options = ["--data", str(tmp_path), "--sets", "miso", "--no-costs", "--no-plots", "--processes", "1"]
    assert main([*options, "--minutes", "0", "--out", str(tmp_path / "out")]) == 2
    assert "nothing ran in so little time" in capsys.readouterr().err
    jobs = [
        Job(_set(_cells()), (split,), method, 0)
        for split in (
            *by_workload(_set(_cells()), 0)[:1],
            by_configuration(_cells(), 0.8, 0),
            by_configuration(_cells(), 0.2, 0),
        )
        for method in ("nearest", OURS)
    ]
    turns = [(job.splits[0].name, job.method) for job in sorted(jobs, key=_turn)]
    assert turns == [
        (name, method)
        for name in ("configuration 0.2", "configuration 0.8", "workload 0")
        for method in (OURS, "nearest")
    ]


def test_what_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(Unreadable, match="--data"):
        load(tmp_path, "miso")
    assert main(["--data", str(tmp_path), "--sets", "miso"]) == 2
    assert main(["--data", str(tmp_path), "--sets", "spoons"]) == 2
    assert main(["--data", str(tmp_path), "--held-out", "2"]) == 2
    assert "write 0.2,0.8" in capsys.readouterr().err
