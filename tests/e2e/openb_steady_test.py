"""`python -m bench.openb.steady` on a small trace: its file, its refusals, and averages that can be checked by hand."""

import csv

import numpy as np
import pytest
from bench.openb.alike import build_alike_traces
from bench.openb.policies import OURS
from bench.openb.steady import (
    DAY,
    MEASURED,
    POLICIES,
    TUNED,
    WARM,
    Arrivals,
    Row,
    Steady,
    Traffic,
    compare_policies,
    draw_arrivals,
    main,
    play,
    play_waiting,
    summarize,
)
from bench.openb.switching import list_orders
from bench.openb.traces import load_trace
from bench.runner import Options
from tests.builders.replay import build_trace_node, write_small_openb

from eelgrid_controller.replay.openb import NODE_LIST, TraceTask, read_nodes, task_list_name
from eelgrid_controller.replay.openb_protocol import build_trace
from eelgrid_protos.quantities import MIB

SEED = 42


@pytest.fixture
def data(tmp_path):
    write_small_openb(tmp_path)
    return tmp_path


def test_each_list_has_a_row_for_each_load(data, capsys):
    asked = ["--data", str(data), "--traces", "small", "--loads", "0.5,1.2", "--processes", "1", "--seeds", "2"]
    assert main([*asked, "--out", str(data / "out")]) == 0
    rows = list(csv.DictReader((data / "out" / "steady.csv").read_text().splitlines()))
    asked_for = [(row["trace"], row["seed"], row["load"]) for row in rows]
    assert asked_for == [("small", "42", "0.5"), ("small", "42", "1.2"), ("small", "43", "0.5"), ("small", "43", "1.2")]
    assert {row["pwr"][:3] for row in rows} == {"pwr"}
    assert all(float(row["refused"]) > 0 for row in rows if row["load"] == "1.2")
    assert "lists" in capsys.readouterr().out


def test_fleets_of_equal_nodes_stand_alone(data, capsys):
    """Their nodes are those of the list; what none of them holds is left out."""
    traces = list(build_alike_traces(read_nodes(data / NODE_LIST)))
    assert traces
    assert all(trace.fleet.gpu_count.min() == trace.fleet.gpu_count.max() > 0 for trace in traces)
    assert all(trace.specs.gpu_count.max() <= trace.fleet.gpu_count[0] for trace in traces)
    asked = ["--data", str(data), "--alike", "--loads", "0.6", "--processes", "1"]
    assert main([*asked, "--out", str(data / "out")]) == 0
    rows = list(csv.DictReader((data / "out" / "steady.csv").read_text().splitlines()))
    assert [row["trace"] for row in rows] == [trace.name for trace in traces]
    assert "nan" not in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("mix", ["half", "third", "one", "half-one", "cpu-one", "all"])
def test_where_tasks_are_alike_ours_draws_no_more_than_fgd(mix):
    """Where offers leave out what a woken GPU leaves for others, `half` draws 4 % more: each GPU that wakes seems paid back."""
    machines = [build_trace_node(f"n{i}", gpus=8, model="G2", vcpu=96, memory_mib=1 << 19) for i in range(8)]
    (trace,) = (trace for trace in build_alike_traces(machines) if trace.name == f"G2-8x8-{mix}")
    arrivals = [draw_arrivals(trace, seed, 0.6, Traffic()) for seed in range(12)]
    watts = {
        policy: sum(play(trace, seed, policy, each).power_kw for seed, each in enumerate(arrivals))
        for policy in ("fgd", "eelgrid")
    }
    assert watts["eelgrid"] <= 1.002 * watts["fgd"]


@pytest.mark.parametrize("load", [0.85, 1.1])
def test_where_places_for_eight_gpus_run_out_ours_allocates_no_less_than_fgd(load):
    """Where the price of such places follows the load alone and not what is left of them, ours has .6 points less at both."""
    machines = [build_trace_node(f"n{i}", gpus=8, model="G2", vcpu=96, memory_mib=1 << 19) for i in range(16)]
    sorts = ((50, 4_000, 1, 500), (20, 8_000, 1, 1000), (20, 12_000, 2, 1000), (10, 90_000, 8, 1000))
    tasks = tuple(
        TraceTask(name=f"task-{place}-{i}", cpu_milli=cpu, memory_bytes=MIB, gpu_count=count, gpu_milli=milli)
        for place, (share, cpu, count, milli) in enumerate(sorts)
        for i in range(share)
    )
    trace = build_trace("eights", tuple(machines), tasks)
    arrivals = [draw_arrivals(trace, seed, load, Traffic()) for seed in range(20)]
    allocated = {
        policy: np.mean([play(trace, seed, policy, each).alloc_pct for seed, each in enumerate(arrivals)])
        for policy in ("fgd", "eelgrid")
    }
    assert allocated["eelgrid"] > allocated["fgd"] - 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--loads", "0"],
        ["--loads", "0.5,-1"],
        ["--sigma", "-1"],
        ["--swing", "1.1"],
        ["--swing", "-.1"],
        ["--alike", "--mixes", "2"],
        ["--alike", "--part", "2"],
        ["--mixes", "2"],
        ["--seeds", "0"],
        ["--part", "0"],
    ],
)
def test_what_cannot_be_played_is_refused(data, wrong, capsys):
    assert main(["--data", str(data), "--traces", "small", *wrong, "--out", str(data / "out")]) == 2
    assert "take" in capsys.readouterr().err


@pytest.mark.parametrize("sigma", [0.0, 1.5])
def test_what_arrives_asks_for_the_load_and_lasts_for_one_in_the_mean(data, sigma):
    trace = load_trace(data, "small")
    arrivals = draw_arrivals(trace, SEED, 200.0, Traffic(sigma))
    asked = trace.task_milli[arrivals.kind].sum() / trace.fleet.gpu_milli
    assert asked == pytest.approx(200.0 * (WARM + MEASURED), rel=0.1)
    assert arrivals.lasts.mean() == pytest.approx(1.0, rel=0.2)
    assert arrivals.at[-1] == pytest.approx(WARM + MEASURED, rel=0.1)
    again = draw_arrivals(trace, SEED, 200.0, Traffic(sigma))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(arrivals, again, strict=True))


def test_a_load_that_swings_has_its_mean_and_its_peak_a_quarter_of_a_day_in(data):
    trace = load_trace(data, "small")
    arrivals = draw_arrivals(trace, SEED, 400.0, Traffic(swing=0.5))
    assert arrivals.at[-1] == pytest.approx(WARM + DAY, rel=0.1)
    in_day = arrivals.at < DAY
    asked = trace.task_milli[arrivals.kind[in_day]].sum() / trace.fleet.gpu_milli
    assert asked == pytest.approx(400.0 * DAY, rel=0.1)
    by_quarter, _ = np.histogram(arrivals.at[in_day] + DAY / 8, bins=4, range=(DAY / 4, DAY / 4 + DAY))
    assert by_quarter[0] > 1.3 * by_quarter[1] > 1.3 * by_quarter[2]


@pytest.mark.parametrize("policy", ["fgd", "eelgrid"])
def test_averages_are_over_time_and_begin_when_the_fleet_is_warm(data, policy):
    """One task that is there all the time, and one that comes at the middle of what is measured and stays to the end."""
    trace = load_trace(data, "small")
    kind = int(np.flatnonzero(trace.task_milli == 990)[0])
    light = int(np.flatnonzero(trace.task_milli == 330)[0])
    moments = [0.5, WARM + MEASURED / 2, WARM + MEASURED]
    arrivals = Arrivals(np.array([kind, light, light]), np.array(moments), np.array([100.0, 100.0, 1.0]))
    found = play(trace, SEED, policy, arrivals)
    assert found.alloc_pct == pytest.approx(100.0 * (990 + 330 / 2) / trace.fleet.gpu_milli)
    assert found.refused_pct == 0.0
    ended = Arrivals(arrivals.kind, arrivals.at, np.array([WARM + MEASURED / 4 - 0.5, 100.0, 1.0]))
    assert play(trace, SEED, policy, ended).alloc_pct == pytest.approx(
        100.0 * (990 / 4 + 330 / 2) / trace.fleet.gpu_milli
    )


@pytest.mark.parametrize("policy", ["fgd", "eelgrid"])
def test_what_waits_starts_when_a_task_ends_and_is_refused_otherwise(data, policy):
    """As many tasks come at once as the fleet holds, and one more, which has its place when the first of them ends."""
    trace = load_trace(data, "small")
    kind = int(np.flatnonzero(trace.task_milli == 990)[0])
    room = next(n for n in range(1, 100) if play(trace, SEED, policy, at_once(kind, n)).refused_pct > 0) - 1
    refused, waiting = (played(trace, SEED, policy, at_once(kind, room + 1)) for played in (play, play_waiting))
    assert (refused.refused_pct, refused.wait) == (pytest.approx(100.0 / (room + 2)), 0.0)
    assert (waiting.refused_pct, waiting.wait) == (0.0, pytest.approx(0.25 / (room + 2)))
    assert waiting.alloc_pct > refused.alloc_pct


def at_once(kind, count):
    """Tasks that come just when measuring begins, of which the first ends a quarter later, and one more after half of one."""
    moments, lasts = [WARM + 1e-9] * count, [0.25] + [5.0] * (count - 1)
    ended = ([*moments, WARM + 0.5], [*lasts, 1.0])
    return Arrivals(np.full(count + 1, kind), *(np.array(each) for each in ended))


def test_the_summary_counts_the_lists_that_fall_short():
    good, bad = Steady(80.0, 88.0, 0.0), Steady(79.0, 95.0, 1.0)
    rows = [build_row(f"mix{i}", i, OURS, ours, pwr=90.0) for i, ours in enumerate((good, bad))]
    (line,) = summarize(rows)
    assert (line["lists"], line["below"], line["below_pwr"]) == (2, 1, 1)
    assert (line["over_fgd"], line["worst"]) == ("-0.50", "-1.00")
    assert line["pwr_per_gpu"] == "10.00"


def build_row(trace, seed, policy, found, **power_kw):
    """One run in which every policy allocates 80 %, FGD for 100 kW as all others that are not named."""
    every = {name: Steady(80.0, power_kw.get(name, 100.0), 0.0) for name in POLICIES}
    return Row(trace, seed, 0.85, every | {policy: found})


def test_each_policy_is_averaged_over_lists_and_pwr_is_tuned_on_other_orders():
    """PWR saves 10 % in one order and pwr500 20 % in the other: chosen on the other order, neither saves anything."""
    none, good = Steady(80.0, 100.0, 0.0), Steady(82.0, 82.0, 0.0)
    rows = [build_row("a", 1, OURS, none, pwr=90.0), build_row("a", 2, OURS, good, pwr500=80.0)]
    rows.append(build_row("b", 3, OURS, Steady(79.0, 79.0, 0.0), pwr=90.0))
    lines = {line["policy"]: line for line in compare_policies(rows)}
    assert [*lines] == [*POLICIES[1:], TUNED]
    assert (lines[OURS]["over_fgd"], lines[OURS]["below"], lines[OURS]["per_gpu"]) == ("+0.00", 1, "15.00")
    assert lines[OURS]["error"] == "1.00"
    assert (lines["pwr"]["per_gpu"], lines["pwr500"]["per_gpu"]) == ("7.50", "5.00")
    assert lines[TUNED]["per_gpu"] == "5.00"


def test_the_orders_of_a_mix_are_of_the_same_nodes_and_no_other_mix_has_them(data):
    several = "q0,8000,1024,2,1000,,LS,Running,48\nq1,8000,1024,1,1000,T4,LS,Running,49\n"
    small = (data / task_list_name("small")).read_text() + several
    for name in ("default", "gpuspec33"):
        (data / task_list_name(name)).write_text(small)
    orders = list_orders(Options(data=data, mixes=2, seed=3, seeds=2, part=2))
    assert [seed for _, seed in orders] == [3000, 3002, 3001, 3003]
    (first, _), (again, _), (other, _), _ = orders
    assert first is again
    assert first.name != other.name
