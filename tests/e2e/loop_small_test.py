"""The closed loop in small: promises kept, less energy than static replicas and than the autoscaler as strict."""

import csv
import math
import os
import statistics
from pathlib import Path

import pytest
from bench.loop.__main__ import SMALL, main
from bench.loop.runs import carried_out
from bench.loop.scene import make

DATA = Path(os.environ.get("EELGRID_DATA", "../shared/data"))
needs_data = pytest.mark.skipif(
    not ((DATA / "mlenergy").is_dir() and (DATA / "azure_llm_2023").is_dir() and (DATA / "zeus_nsdi23").is_dir()),
    reason="the published data is not there",
)


@needs_data
def test_the_small_world_keeps_its_promises_for_less():
    ours, static, strict = (carried_out(DATA, policy, 0, SMALL).outcome for policy in ("ours", "static", "hpa-strict"))
    assert ours.jobs == SMALL.jobs
    assert (ours.slowed, ours.late, ours.unfinished) == (0, 0, 0)
    assert ours.slowed_of + ours.late_of > 10
    assert ours.budget_s == 0.0
    assert ours.violated - ours.shadowed <= 1
    assert ours.tokens == pytest.approx(static.tokens, rel=1e-3)
    assert (static.unfinished, strict.unfinished) == (0, 0)
    assert ours.energy_j < static.energy_j
    assert ours.energy_j < strict.energy_j
    assert ours.training_j < 0.95 * strict.training_j


@needs_data
def test_budgets_that_bind_are_kept_and_cost_no_promise():
    size = SMALL._replace(hours=3.0, services=1, rack_share=0.6, cluster_share=0.6)
    ours, hpa = (carried_out(DATA, policy, 0, size).outcome for policy in ("ours", "hpa"))
    assert hpa.budget_s > 0.0
    assert ours.budget_s == 0.0
    assert (ours.slowed, ours.late) == (0, 0)
    assert ours.wait_hours > hpa.wait_hours


@needs_data
def test_wrong_profiles_are_wrong_for_the_planner_alone():
    size = SMALL._replace(hours=1.0, jobs=0)
    true, off = (make(DATA, 3, size._replace(profile_error=error)).services for error in (0.0, 0.05))
    for known, misread in zip(true, off, strict=True):
        assert known.points == known.engine.points == misread.engine.points
        assert (known.asked_hz == misread.asked_hz).all()
    pairs = [pair for one, other in zip(true, off, strict=True) for pair in zip(one.points, other.points, strict=True)]
    rates = [math.log(other.throughput_hz / one.throughput_hz) for one, other in pairs]
    latencies = [math.log(other.latency_s[0.95] / one.latency_s[0.95]) for one, other in pairs]
    assert 0.03 < statistics.stdev(rates) < 0.08
    assert 0.03 < statistics.stdev(latencies) < 0.08
    assert abs(statistics.correlation(rates, latencies)) < 0.6


@needs_data
def test_the_command_writes_its_table(tmp_path, capsys):
    assert (
        main(
            [
                "--data",
                str(DATA),
                "--out",
                str(tmp_path),
                "--small",
                "--hours",
                "1",
                "--seeds",
                "1",
                "--policies",
                "hpa",
                "--processes",
                "1",
                "--no-plots",
            ]
        )
        == 0
    )
    with (tmp_path / "summary.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert list(row)[:7] == ["policy", "seed", "energy_j", "money", "windows_violated", "jobs_late", "budget_s"]
    assert float(row["energy_j"]) > 0.0
    assert "hpa" in capsys.readouterr().out
    with (tmp_path / "services.csv").open(encoding="utf-8") as file:
        services = list(csv.DictReader(file))
    assert len(services) == SMALL.services
    assert sum(int(one["violated"]) for one in services) == int(row["windows_violated"])
    assert 0.0 < sum(float(one["drawn_j"]) for one in services) < float(row["services_j"])


def test_what_cannot_be_run_is_reported(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--policies", "magic"]) == 2
    assert "unknown: magic; choose from ours" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--data", str(tmp_path), "--small", "--processes", "1"]) == 2
