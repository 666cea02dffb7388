"""The bound on watts that moves may save, against every place of every task: no set of moves saves more."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.placement.migration_planner import bound_saved_w, build_migration_problem, recommend_moves
from eelgrid_protos.messages import RecommendMovesRequest, WorkloadPhase

MODELS = ("G2", "T4")


def draw_core(seed):
    """Three nodes with some tasks left of those that came: whole GPUs, pairs, shares and CPU alone."""
    draw = random.Random(seed)
    core = build_core(
        *(build_node(f"n{at}", gpus=2, model=draw.choice(MODELS), cpu=draw.choice((64, 96))) for at in range(3))
    )
    for key in map(str, range(12)):
        gpus = draw.choice((0, 1, 1, 1, 2))
        milli = 1000 if gpus == 2 else draw.choice((300, 500, 1000))
        wanted = build_request(key, cpu=draw.choice((1, 8, 20, 34)), gpus=gpus, milli=milli if gpus else None)
        core.submit(wanted, now_ns=1)
    there = [key for key, found in core.state.workloads.items() if found.phase is WorkloadPhase.PLACED]
    for key in core.state.workloads.keys() - set(draw.sample(there, min(4, len(there)))):
        core.cancel(key, now_ns=2)
    return core


def power_w(nodes, held):
    """Watts of the nodes with these tasks (row, slots, request) on them, or None where they do not fit."""
    cpu = nodes.cpu_capacity.copy()
    free = np.full(nodes.gpu_free.shape, 1000)
    for row, slots, request in held:
        cpu[row] -= request.cpu_milli
        for slot in slots:
            free[row, slot] -= request.gpu_milli
    if cpu.min() < 0 or free.min() < 0:
        return None
    total = np.where(free < 1000, nodes.gpu_busy_w, nodes.gpu_idle_w).sum()
    for row, capacity in enumerate(nodes.cpu_capacity.tolist()):
        cores = -(-capacity // 2000)
        working = -(-(cores - int(cpu[row]) // 2000) // 16)
        total += 120.0 * working + 15.0 * (-(-cores // 16) - working)
    return float(total)


def best_saving_w(problem, most):
    """Over every place of every task, with at most so many elsewhere than now."""
    now = [(unit.row, unit.slots[0], unit.workload.spec.request) for unit in problem.units]
    rows, width = range(len(problem.nodes.cpu_free)), problem.nodes.gpu_free.shape[1]
    choices = [
        [(row, slots, request) for row in rows for slots in itertools.combinations(range(width), request.gpu_count)]
        for _, _, request in now
    ]
    before, best = power_w(problem.nodes, now), 0.0
    for places in itertools.product(*choices):
        if sum(place != old for place, old in zip(places, now, strict=True)) <= most:
            after = power_w(problem.nodes, places)
            best = max(best, 0.0 if after is None else before - after)
    return best


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), most=st.integers(1, 4))
def test_no_places_of_the_tasks_save_more_than_the_bound(seed, most):
    problem = build_migration_problem(draw_core(seed).survey_moves(RecommendMovesRequest(moves_most=most)))
    assert bound_saved_w(problem) >= best_saving_w(problem, most) - 1e-6
    found = recommend_moves(problem)
    assert found.before.power_w - found.after.power_w <= found.saved_most_w + 1e-6


def test_the_bound_of_two_halves_is_what_joining_them_saves():
    core = build_core(build_node("a", gpus=1))
    core.submit(build_request("one", milli=500), now_ns=1)
    core.submit(build_request("gap", milli=500), now_ns=1)
    core.register_node(build_node("b", gpus=1), now_ns=1)
    core.submit(build_request("two", milli=500), now_ns=1)
    core.cancel("gap", now_ns=2)
    problem = build_migration_problem(core.survey_moves(RecommendMovesRequest(moves_most=1)))
    assert best_saving_w(problem, 1) > 0.0
    assert bound_saved_w(problem) == pytest.approx(best_saving_w(problem, 1))
