"""`python -m bench.openb.repacking`: what could be taken if all were moved, beside policies that move nothing."""

import csv

import numpy as np
import pytest
from bench.openb.bounds import Relaxation, shapes_of
from bench.openb.repacking import asks_no_less, main, sum_taken, take_arrivals
from bench.openb.traces import load_trace

from eelgrid_controller.replay.openb import NODE_LIST, task_list_name
from eelgrid_controller.replay.openb_protocol import arrival_order, node_order
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import build_empty_engine, simulate_arrivals

TITLES = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time"


def write_lists(folder, nodes, tasks):
    """Nodes by CPU, GPUs and model; tasks by CPU, GPUs, share and models, in order of their arrival."""
    lines = [f"n{i},{cpu}000,262144,{gpus},{model}" for i, (cpu, gpus, model) in enumerate(nodes)]
    (folder / NODE_LIST).write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *lines]) + "\n")
    lines = [
        f"p{i:03d},{cpu}000,1024,{gpus},{milli},{models},LS,Running,{i}"
        for i, (cpu, gpus, milli, models) in enumerate(tasks)
    ]
    (folder / task_list_name("small")).write_text("\n".join([TITLES, *lines]) + "\n")
    return load_trace(folder, "small")


MIXED_NODES = [(64 - 32 * (i % 2), 4, "T4" if i % 3 else "V100M32") for i in range(8)]
MIXED_TASKS = [
    (4 + i % 5 * 3, int(i % 4 > 0) + (i % 11 == 5), 1000 if i % 11 == 5 or i % 4 == 3 else i % 4 * 330, "")
    for i in range(90)
]


@pytest.fixture
def trace(tmp_path):
    return write_lists(tmp_path, MIXED_NODES, MIXED_TASKS)


@pytest.mark.parametrize("policy", ["eelgrid", "fgd", "pwr", "bestfit", "gpupacking", "random"])
def test_no_policy_takes_everything_for_longer(trace, policy):
    for seed in range(42, 46):
        order = arrival_order(trace, seed)
        run = build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, seed), find_policy(policy))
        placed = simulate_arrivals(run, order).placed
        ideal = take_arrivals(trace, order)
        assert not placed.all()  # else nothing is compared
        assert np.argmin(placed) <= (len(ideal) if ideal.all() else np.argmin(ideal))


def test_arrivals_are_taken_as_one_by_one(trace):
    order = arrival_order(trace, 42)
    taken = take_arrivals(trace, order)
    relaxation, more = Relaxation(shapes_of(trace.fleet), trace.specs), asks_no_less(trace.specs)
    held, closed = np.zeros(len(trace.task_milli), np.int64), np.zeros(len(trace.task_milli), bool)
    for kind, has_taken in zip(order.tolist(), taken.tolist(), strict=True):
        held[kind] += 1
        fits = not closed[kind] and relaxation.can_hold(held)
        assert fits == has_taken
        if not fits:
            held[kind] -= 1
            closed |= more[:, kind]


def test_shares_that_no_gpu_holds_together_are_refused(tmp_path):
    trace = write_lists(tmp_path, [(64, 2, "T4")], [(1, 1, 600, "")] * 3)
    assert take_arrivals(trace, np.zeros(3, np.int64)).tolist() == [True, True, False]


def test_what_is_held_is_moved_to_make_room(tmp_path):
    """Any one policy would have to know that the T4 is what the second task alone may use."""
    trace = write_lists(tmp_path, [(8, 1, "T4"), (8, 1, "P100")], [(1, 1, 1000, ""), (1, 1, 1000, "T4")])
    free, tied = (int(np.flatnonzero(trace.specs.allows.sum(axis=1) == models)[0]) for models in (2, 1))
    assert take_arrivals(trace, np.array([free, tied, free])).tolist() == [True, True, False]


def test_class_that_was_refused_closes_those_that_ask_for_more(tmp_path):
    trace = write_lists(tmp_path, [(8, 1, "T4")], [(1, 1, 500, ""), (2, 1, 500, "T4"), (1, 0, 0, ""), (0, 1, 400, "")])
    more = asks_no_less(trace.specs)
    kinds = {
        tuple(row): i
        for i, row in enumerate(zip(trace.specs.cpu_milli.tolist(), trace.specs.gpu_milli.tolist(), strict=True))
    }
    small, large, cpu, least = (kinds[key] for key in ((1000, 500), (2000, 500), (1000, 0), (0, 400)))
    assert more[large].tolist() == [True] * 4
    assert more[small, cpu]
    assert more[small, least]
    assert more[cpu].tolist() != [True] * 4
    assert not more[small, large]
    assert not more[least, cpu]


def test_figures_are_shares_of_what_was_asked_for(tmp_path):
    trace = write_lists(tmp_path, [(8, 2, "T4")], [(2, 0, 0, ""), (1, 1, 500, "")])
    cpu, gpu = (int(np.flatnonzero(trace.specs.gpu_count == count)[0]) for count in (0, 1))
    taken = sum_taken(trace, np.array([gpu, cpu, cpu, gpu]), np.array([True, True, False, False]))
    assert taken == (0.25, 25.0, 50.0)
    assert sum_taken(trace, np.array([gpu]), np.array([True])) == (1.0, 25.0, 100.0)


def test_each_order_of_arrivals_is_told(tmp_path, trace, capsys):
    asked = ["--data", str(tmp_path), "--traces", "small", "--seeds", "2", "--processes", "1"]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "repacking.csv").read_text().splitlines()))
    assert [(row["trace"], row["seed"]) for row in rows] == [("small", "42"), ("small", "43")]
    for row in rows:
        assert float(row["first_ideal"]) >= max(float(row["first_fgd"]), float(row["first_ours"]))
    assert "small: " in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--seeds", "0"], ["--traces", "nothing"], ["--mixes", "one"], ["--mixes", "-1"]])
def test_what_cannot_be_done_is_refused(tmp_path, trace, asked, capsys):
    given = ["--data", str(tmp_path), "--traces", "small", "--out", str(tmp_path / "out"), *asked]
    assert main(given) == 2
    assert capsys.readouterr().err
