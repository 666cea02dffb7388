"""The measures of the openb comparison on curves worked out by hand, and the distance to what was published."""

import csv
import math
from typing import NamedTuple

import numpy as np
import pytest
from bench.openb import lines, measure, published, report
from bench.openb.measure import Bounds

from eelgrid_controller.replay.csv_reader import TraceMalformed
from eelgrid_controller.replay.openb import NODE_LIST
from eelgrid_controller.replay.openb_protocol import TraceFleet
from eelgrid_controller.replay.run_statistics import GRID, ArrivalCurves


class _Steps(NamedTuple):
    power_w: np.ndarray
    arrived_milli: np.ndarray
    allocated_milli: np.ndarray


def _course(arrived, allocated, power_w):
    return _Steps(np.array(power_w, np.float64), np.array(arrived, np.int64), np.array(allocated, np.int64))


def _flat(power_w, allocated=None):
    allocated = np.minimum(GRID, 1.0) if allocated is None else allocated
    return ArrivalCurves(np.broadcast_to(np.asarray(power_w, np.float64), GRID.shape).copy(), allocated, GRID)


def test_the_grid_has_every_half_per_cent_to_130():
    assert (GRID[0], GRID[20], GRID[160], GRID[200], GRID[-1]) == (0.0, 0.1, 0.8, 1.0, 1.3)
    assert len(GRID) == 261


def test_a_run_on_the_grid():
    """A fleet of 10 GPUs. Between two tasks the curve is straight; at one x the last task counts."""
    course = _course(
        arrived=[2000, 2000, 6000, 10_000],  # the second asks for no GPU
        allocated=[2000, 2000, 6000, 8000],
        power_w=[300.0, 400.0, 800.0, 900.0],
    )
    curves = measure.compute_curves(course, 10_000, empty_w=100.0)
    for x, power_w, allocated in (
        (0.0, 100.0, 0.0),
        (0.1, 250.0, 0.1),  # half way from 100 to 400, not to 300
        (0.2, 400.0, 0.2),
        (0.4, 600.0, 0.4),
        (0.6, 800.0, 0.6),
        (0.9, 875.0, 0.75),
        (1.0, 900.0, 0.8),
        (1.3, 900.0, 0.8),  # nothing more arrives
    ):
        assert measure.value_at(curves.power_w, x) == pytest.approx(power_w), x
        assert measure.value_at(curves.allocated, x) == pytest.approx(allocated), x


def test_grar_is_of_what_came_where_tasks_end_before_the_fleet_is_full():
    """A fleet of one GPU, and no task of 0.6 fits after the first: 0.6 came and was placed."""
    curves = measure.compute_curves(_course([600], [600], [200.0]), 1000, empty_w=100.0)
    figures = measure.figures(curves, _flat(1000.0), gpus=1)
    assert (figures.grar_1, figures.alloc_100_pct) == pytest.approx((1.0, 60.0))
    assert figures.gpu_w == pytest.approx((200 / 0.6,) * 3)


def test_tasks_without_gpu_before_all_others_count_at_zero():
    curves = measure.compute_curves(_course([0, 1000], [0, 1000], [150.0, 250.0]), 1000, empty_w=100.0)
    assert measure.value_at(curves.power_w, 0.0) == 150.0
    assert measure.value_at(curves.power_w, 0.5) == pytest.approx(200.0)


def test_watts_of_an_empty_fleet():
    """65 vCPU are 33 cores, so three packages; 64 are 32, so two."""
    fleet = TraceFleet(
        cpu_milli=np.array([64_000, 65_000]),
        memory_mib=np.array([1, 1]),
        gpu_count=np.array([2, 0]),
        model=np.array([0, -1]),
        idle_w=np.array([10.0, 0.0]),
        busy_w=np.array([70.0, 0.0]),
    )
    assert measure.empty_power_w(fleet) == 2 * 10 + 5 * 15


def test_saving_is_of_means_and_averaged_from_a_tenth_to_eight_tenths():
    reference = _flat(1000.0)
    inside = (GRID > 0.0975) & (GRID < 0.8025)
    runs = [_flat(np.where(inside, 800.0, 5000.0)), _flat(np.where(inside, 900.0, 7000.0))]
    mean = measure.mean_curves(runs)
    figures = measure.figures(mean, reference, gpus=10)
    assert figures.saving_mean_pct == pytest.approx(15.0)  # what lies outside would show
    assert figures.saving_pct[:8] == pytest.approx((15.0,) * 8)
    assert figures.saving_pct[8] == pytest.approx(-500.0)
    ramp = measure.figures(_flat(1000.0 * (1.0 - GRID / 2)), reference, gpus=10)
    assert ramp.saving_mean_pct == pytest.approx(22.5)  # half of the middle, 0.45
    assert ramp.saving_pct == pytest.approx(tuple(5.0 * tenth for tenth in range(1, 10)))


def test_allocation_grar_watts_a_gpu_and_gaps():
    allocated = np.minimum(GRID, 0.9) + np.maximum(0.0, GRID - 0.9) / 10  # .9 at .9, .91 at 1, .94 at 1.3
    mine = _flat(910.0, allocated)
    x = np.array([0.05, 0.1, 0.7, 0.8, 0.9])
    bounds = [
        Bounds(x, np.array([1.0, 690.0, 600.0, 650.0, 1.0]), allocated_1=0.94),
        Bounds(x, np.array([1.0, 710.0, np.inf, 650.0, 1.0]), allocated_1=0.96),
    ]
    figures = measure.figures(mine, _flat(1000.0), 10, (mine, measure.mean_bounds(bounds)))
    assert (figures.grar_1, figures.alloc_100_pct, figures.alloc_130_pct) == pytest.approx((0.91, 91.0, 94.0))
    assert figures.gpu_w == pytest.approx((910 / 9, 910 / 9.05, 100.0))
    assert figures.gap_power_pct == pytest.approx((30.0 + 40.0) / 2)  # .05 and .9 are outside, .7 has none
    assert figures.gap_alloc_pp == pytest.approx(4.0)
    refusing = ArrivalCurves(
        mine.power_w, np.minimum(GRID, 0.6), GRID
    )  # of .8, a quarter: the bound is not of its work
    assert measure.figures(refusing, _flat(1000.0), 10, (refusing, bounds[0])).gap_power_pct == pytest.approx(
        100 * (910 / 690 - 1)
    )
    bare = measure.figures(mine, _flat(1000.0), gpus=10)
    assert (bare.gap_power_pct, bare.gap_alloc_pp) == (None, None)
    nothing = measure.figures(_flat(1.0, 0.0 * GRID), _flat(1.0), gpus=10)
    assert nothing.gpu_w == (math.inf,) * 3


def test_a_saving_per_allocated_gpu_counts_no_work_that_was_refused():
    """Half of the watts for half of the work saves nothing; the same watts for all of it neither."""
    reference = _flat(1000.0, GRID)
    assert measure.saving_per_gpu_pct(_flat(500.0, GRID / 2), reference) == pytest.approx(0.0)
    assert measure.saving_per_gpu_pct(_flat(900.0, GRID), reference) == pytest.approx(10.0)
    assert measure.saving_per_gpu_pct(_flat(900.0, GRID / 2), reference) == pytest.approx(-80.0)
    assert math.isnan(measure.saving_per_gpu_pct(_flat(900.0, 0.0 * GRID), reference))


def test_the_summary_has_the_columns_that_were_promised(tmp_path):
    figures = measure.figures(_flat(900.0), _flat(1000.0), gpus=10)
    rows = [report.Row("default", "pwr200", 10, figures, 12.345, 98.7)]
    report.write_summary(tmp_path / "summary.csv", rows)
    (line,) = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())
    assert ",".join(line) == (
        "trace,policy,seeds,saving_mean_pct,saving_per_gpu_pct,grar_1,alloc_100_pct,alloc_130_pct,"
        "gap_power_pct,gap_alloc_pp,gap_joint_pct,moves,saving_moved_pct,over_idle_kwh,saving_kwh_pct,"
        "decision_p50_us,decision_p99_us"
    )
    assert ",".join(line.values()) == "default,pwr200,10,10.000,10.000,1.00000,100.000,100.000,,,,,,,,12.35,98.70"
    told = rows[0]._replace(gap_joint_pct=1.7, moved=lines.Moved(1, 300.0, 0.5), timed=lines.Timed(1, 80.0, 20.0))
    report.write_summary(tmp_path / "summary.csv", [told])
    (line,) = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())
    assert ",".join(line.values()).endswith(",,,1.700,300.0,10.500,80.000,20.000,12.35,98.70")
    report.write_savings(tmp_path / "savings.csv", rows)
    (line,) = csv.DictReader((tmp_path / "savings.csv").read_text().splitlines())
    assert (line["saving_pct_at_0.9"], line["w_per_allocated_gpu_at_0.90"]) == ("10.000", "100.000")
    assert "pwr200" in report.table(rows)


def test_the_spelling_of_policies():
    for name, plain in (
        ("01-Random", "random"),
        ("06-FGD", "fgd"),
        ("PWR_200_FGD_800", "pwr200"),
        ("GpuPacking", "gpupacking"),
        ("gpu-packing", "gpupacking"),
        ("pwr200", "pwr200"),
    ):
        assert published.plain_policy(name) == plain


ALLOCATION = """workload,sc_policy,tune,seed,total_gpus,0,100,130
openb_pod_list_mine,06-FGD,1.3,42,10,0,95.0,95.4
openb_pod_list_mine,06-FGD,1.3,43,10,0,95.2,95.6
openb_pod_list_mine,01-Random,1.3,42,10,0,86,87
openb_pod_list_other,06-FGD,1.3,42,10,0,1,2
"""
READINGS = "# read off a figure\ntrace,policy,metric,x,value\nmine,PWR,saving_pct,0.40,14.0\nmine,FGD,grar,1.0,0.95\n"


@pytest.fixture
def results(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / NODE_LIST).touch()
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "fgd_allocation.csv").write_text(ALLOCATION)
    (tmp_path / "published" / "pwr_published_readings.csv").write_text(READINGS)
    return published.results_folder(tmp_path)


def test_the_distance_to_what_was_published(results):
    """FGD may be 0.2 pp off the result files and 0.7 off a figure, a saving 1 pp; what we did not run is left out."""
    ours = {
        ("mine", "fgd"): _flat(1000.0, np.interp(GRID, [0.0, 1.0, 1.3], [0.0, 0.9525, 0.958])),
        ("mine", "pwr"): _flat(870.5),
    }
    found = published.distances(results, lambda trace, policy: ours.get((trace, policy)))
    told = [(one.published.policy, one.published.metric, round(one.pp, 3), one.allowed_pp, one.near) for one in found]
    assert told == [
        ("fgd", "allocation_pct", 0.15, 0.2, True),
        ("fgd", "allocation_pct", 0.3, 0.2, False),
        ("pwr", "saving_pct", -1.05, 1.0, False),
        ("fgd", "allocation_pct", 0.25, 0.7, True),
    ]
    assert report.published_table(found).endswith("2 of 4 published numbers are near enough")
    report.write_published(results / "out.csv", found)
    assert [line["near"] for line in csv.DictReader((results / "out.csv").read_text().splitlines())] == [
        "yes",
        "no",
        "no",
        "yes",
    ]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("fgd_allocation.csv", ALLOCATION.replace("95.6", "n/a"), r"fgd_allocation\.csv, line 3, column 130"),
        ("fgd_allocation.csv", "workload\n", r"line 1, column sc_policy"),
        ("pwr_published_readings.csv", READINGS.replace("saving_pct", "hope"), r"line 3, column metric"),
        ("pwr_published_readings.csv", READINGS.replace(",0.40,14.0", ",0.40"), r"line 3, column value"),
        ("pwr_published_readings.csv", READINGS.replace("14.0", "inf"), r"line 3, column value"),
        ("pwr_published_readings.csv", "", r"line 1, column trace"),
    ],
)
def test_a_bad_result_file_is_refused_with_its_place(results, name, text, place):
    (results / name).write_text(text)
    with pytest.raises(TraceMalformed, match=place):
        published.distances(results, lambda trace, policy: _flat(1.0))
