"""`python -m bench.openb.switching` on a small trace: its file, its refusals, and that a change of setting is whole."""

import csv

import numpy as np
import pytest
from bench.openb.switching import (
    SETTINGS,
    Effort,
    Fleet,
    Played,
    Row,
    Switcher,
    Worth,
    judge,
    main,
    set_policy,
    summarize,
)
from bench.openb.traces import load_trace
from tests.builders.replay import write_small_openb

from eelgrid_controller.replay.openb_protocol import arrival_order, node_order
from eelgrid_kernels.argmin_index import place_arrivals
from eelgrid_kernels.arrays import NEVER
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import build_empty_engine, build_empty_outcomes, simulate_arrivals

SEED = 42


@pytest.fixture
def data(tmp_path):
    write_small_openb(tmp_path)
    return tmp_path


def test_each_order_of_arrivals_has_a_row(data, capsys):
    asked = ["--data", str(data), "--traces", "small", "--futures", "3", "--step", "20", "--processes", "1"]
    assert main([*asked, "--seeds", "2", "--out", str(data / "out")]) == 0
    rows = list(csv.DictReader((data / "out" / "switching.csv").read_text().splitlines()))
    assert [(row["trace"], row["seed"]) for row in rows] == [("small", "42"), ("small", "43")]
    names = {choice.split(":")[1] for row in rows for choice in row["choices"].split()}
    assert names <= set(SETTINGS)
    assert "of 2\nwritten to" in capsys.readouterr().out


@pytest.mark.parametrize("setting", SETTINGS)
def test_fleet_under_a_changed_policy_decides_as_one_built_with_it(data, setting):
    trace = load_trace(data, "small")
    order, half = arrival_order(trace, SEED), 24
    changed = Fleet(trace, SEED, find_policy("gpupacking"), len(order))
    set_policy(changed.run, SETTINGS[setting])
    changed.place(order, half)
    set_policy(changed.run, SETTINGS["fgd"])
    set_policy(changed.run, SETTINGS[setting])
    changed.place(order, len(order))
    rank = node_order(trace, SEED)
    built = build_empty_engine(trace.fleet, trace.specs, trace.typical, rank, SETTINGS[setting])
    outcomes = build_empty_outcomes(len(order))
    place_arrivals(built, order, outcomes, 0, half)
    built.scalars["shifts"] = NEVER  # prices are due after a change
    place_arrivals(built, order, outcomes, half, len(order))
    assert np.array_equal(changed.outcomes.node, outcomes.node)


def test_comparison_leaves_the_fleet_as_it_is_but_for_its_setting(data):
    trace = load_trace(data, "small")
    order = arrival_order(trace, SEED)
    switcher = Switcher(trace, SEED, Effort(3, 10.0), order)
    switcher.live.place(order, 16)
    for shadow in switcher.shadows.values():
        shadow.place(order, 16)
    run = switcher.live.run
    states, nodes, watts = run.states.copy(), run.nodes.copy(), run.scalars[0]["power_w"]
    switcher.compare()
    assert np.array_equal(run.states, states)
    assert np.array_equal(run.nodes, nodes)
    assert run.scalars[0]["power_w"] == watts
    assert run.scalars[0]["policy"] == SETTINGS[switcher.setting].code


def test_without_futures_the_fleet_keeps_ours(data):
    trace = load_trace(data, "small")
    order = arrival_order(trace, SEED)
    switcher = Switcher(trace, SEED, Effort(0, 5.0), order)
    played = switcher.play()
    built = build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, SEED), find_policy("eelgrid"))
    assert (played.choices, played.comparisons) == ((), 0)
    assert np.array_equal(switcher.live.outcomes.node, simulate_arrivals(built, order).node)


def test_learned_futures_hold_only_what_has_arrived(data):
    trace = load_trace(data, "small")
    order = arrival_order(trace, SEED)
    switcher = Switcher(trace, SEED, Effort(3, 10.0, learned=True), order)
    switcher.live.place(order, 6)
    future = switcher.draw_future()
    assert set(future.tolist()) <= set(order[:6].tolist())
    assert trace.task_milli[np.concatenate((order[:6], future))].sum() >= trace.fleet.gpu_milli


def test_load_is_the_larger_share_of_what_is_allocated(data):
    trace = load_trace(data, "small")
    order = arrival_order(trace, SEED)
    fleet = Fleet(trace, SEED, find_policy("eelgrid"), len(order))
    assert fleet.load == 0.0
    fleet.place(order, 20)
    held = order[:20][fleet.outcomes.placed[:20]]
    gpu = trace.task_milli[held].sum() / trace.fleet.gpu_milli
    cpu = trace.specs.cpu_milli[held].sum() / trace.fleet.cpu_milli.sum()
    assert fleet.load == pytest.approx(max(gpu, cpu))


def test_summary_counts_what_falls_short_of_either():
    played = Played(None, (), 0, 0.0)
    figures = [((-0.5, 0.2), (-0.1, 0.0)), ((1.0, -0.1), (-0.11, 0.3)), ((1.0, 0.1), (1.5, 0.1))]
    told = summarize([Row("small", SEED, 90.0, 12.0, plain, switched, played) for plain, switched in figures])
    assert "ours +0.50 (worst -0.50, below -0.1 on 1), with switching +0.43 (worst -0.11, below -0.1 on 1) of 3" in told
    assert "below 0 on 1), with switching +0.13 (worst +0.00, below 0 on 0) of 3" in told
    assert "neither below: ours 1, with switching 2 of 3" in told


def test_shortfalls_outweigh_what_is_gained_elsewhere():
    reference, pwr = Worth(np.array([90.0]), np.array([0.0])), np.array([12.0])
    keeps, trades = Worth(np.array([89.95]), np.array([12.0])), Worth(np.array([95.0]), np.array([11.0]))
    assert judge(keeps, reference, pwr)[0] > judge(trades, reference, pwr)[0]
    nearer = Worth(np.array([89.5]), np.array([11.9]))  # a shortfall is not made smaller by a second one
    assert judge(Worth(np.array([89.2]), np.array([12.0])), reference, pwr)[0] > judge(nearer, reference, pwr)[0]
    better = Worth(np.array([91.0]), np.array([12.0]))
    assert judge(better, reference, pwr)[0] > judge(keeps, reference, pwr)[0]


@pytest.mark.parametrize(
    "asked", [["--futures", "2"], ["--step", "0"], ["--part", "0"], ["--mixes", "-1"], ["--traces", "small,nothing"]]
)
def test_what_cannot_be_done_is_refused(data, asked, capsys):
    given = ["--data", str(data), "--traces", "small", "--seeds", "1", "--out", str(data / "out"), *asked]
    assert main(given) == 2
    assert capsys.readouterr().err
