"""`python -m bench.openb.rollouts` on a small trace: its file, its refusals, and that trying changes nothing."""

import csv

import numpy as np
import pytest
from bench.openb.rollouts import Plan, Rollouts, main, play_rollouts, take_part
from bench.openb.traces import load_trace
from tests.builders.replay import write_small_openb

from eelgrid_controller.replay.openb_protocol import arrival_order, node_order
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import build_empty_engine, simulate_arrivals


@pytest.fixture
def data(tmp_path):
    write_small_openb(tmp_path)
    return tmp_path


def test_gains_are_told_for_each_order_of_arrivals(data, capsys):
    asked = ["--data", str(data), "--traces", "small", "--part", "2", "--futures", "3", "--ahead", "6"]
    assert main([*asked, "--seeds", "2", "--out", str(data / "out")]) == 0
    rows = list(csv.DictReader((data / "out" / "rollouts.csv").read_text().splitlines()))
    assert [(row["trace"], row["seed"], row["gpus"]) for row in rows] == [("small", "42", "16"), ("small", "43", "16")]
    for row in rows:
        changed, decisions = map(int, row["changed"].split("/"))
        assert 0 <= changed <= decisions
        assert decisions > 0
    assert "small: allocation" in capsys.readouterr().out


def test_a_single_candidate_is_the_node_of_the_cost(data):
    trace = load_trace(data, "small")
    order = arrival_order(trace, 42)
    mine, changed, decisions = play_rollouts(trace, 42, Plan(1, 2, 3), order)
    run = build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, 42), find_policy("eelgrid"))
    theirs = simulate_arrivals(run, order)
    assert (changed, decisions) == (0, 0)
    for field in ("placed", "power_w", "arrived_milli", "allocated_milli"):
        assert np.array_equal(getattr(mine, field), getattr(theirs, field)), field


def test_trying_leaves_the_fleet_as_it_is(data):
    trace = load_trace(data, "small")
    rollouts = Rollouts(trace, 42, Plan(3, 4, 5))
    kind = int(arrival_order(trace, 42)[0])
    candidates = rollouts.list_candidates(kind)
    states = [int(rollouts.run.nodes[node]["state"]) for node in candidates]
    assert len(set(states)) == len(candidates) > 1
    before, watts = rollouts.run.gpu_free.copy(), rollouts.run.scalars[0]["power_w"]
    assert 0 <= rollouts.choose(kind, candidates) < len(candidates)
    assert np.array_equal(rollouts.run.gpu_free, before)
    assert rollouts.run.scalars[0]["power_w"] == watts


def test_every_kind_of_node_keeps_its_part(data):
    trace = load_trace(data, "small")
    halves = [take_part(trace, 2, first).fleet for first in (0, 1)]
    assert sorted([*halves[0].model, *halves[1].model]) == sorted(trace.fleet.model)
    assert [len(half.model) for half in halves] == [4, 4]


@pytest.mark.parametrize(
    "asked", [["--candidates", "1"], ["--futures", "1"], ["--part", "0"], ["--traces", "small,nothing"]]
)
def test_what_cannot_be_done_is_refused(data, asked, capsys):
    given = ["--data", str(data), "--traces", "small", "--seeds", "1", "--out", str(data / "out"), *asked]
    assert main(given) == 2
    assert capsys.readouterr().err
