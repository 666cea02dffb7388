"""A fleet on which tasks come and go and nodes fail equals the naive twin, decision by decision.

Run with NUMBA_DISABLE_JIT=1 as well: the same code, interpreted.
"""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import naive, naive_openb
from tests.props.peers_test import ALL, POLICIES, columns, generated, policy_of, scenes

from eelgrid_kernels.argmin_index import apply_log, compute_all_costs
from eelgrid_kernels.arrays import BOUNDED, EXACT, LOOSE
from eelgrid_kernels.baselines import compute_task_cost
from eelgrid_kernels.simulation import SimulatedFleet

quiet = settings(deadline=None, max_examples=60)
# Interpreted kernels take a hundred times as long: they are run for indices out of bounds and the like, which the first
# part of a long scene has as well. What the whole decides is asked of the compiled ones.
PART = 4 if numba.config.DISABLE_JIT else 1
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["place", "place", "place", "release", "fail", "return", "tend"]), st.integers(0, 1000)),
    max_size=40,
)


def fleet_of(scene, name):
    ranks = np.array([entry.rank for entry in scene.machines])
    return SimulatedFleet(*columns(scene), ranks, policy_of(name))


def mix_of(scene):
    return [naive.Class(scene.tasks[number], weight) for number, weight in scene.mix]


def heeds_quotes(scene, name):
    if name not in POLICIES:
        return False
    twin, _, weights = POLICIES[name]
    market = naive_openb.market_of(twin, weights, scene.machines, mix_of(scene))
    return market is not None and market.is_heeded


def naive_choice(scene, machines, name, task, market):
    """The machine's number and its GPUs, or -1."""
    twin, _, weights = POLICIES[name]
    fitting = [machine for machine in machines if naive.verdict(machine.node, task) is None]
    if market:
        market.requote([machine.node for machine in machines])
    if not fitting:
        return -1, ()
    scores = naive_openb.scored(twin, weights, fitting, task, mix_of(scene), market)
    best = max(range(len(fitting)), key=lambda i: (scores[i][0], -fitting[i].rank))
    return machines.index(fitting[best]), tuple(scores[best][1])


def given_back(node, slots, task):
    """The node without the task."""
    back = replace(task, cpu_milli=-task.cpu_milli, memory_bytes=-task.memory_bytes, gpu_milli=-task.gpu_milli)
    return naive.placed(node, slots, back)


def same(fleet, machines):
    for number, machine in enumerate(machines):
        node = machine.node
        assert fleet.free_resources(number) == (node.cpu_free, node.memory_free, tuple(gpu.free for gpu in node.gpus))
    assert fleet.power_w == sum(naive.node_power(machine.node) for machine in machines)


@pytest.mark.parametrize("name", POLICIES)
@quiet
@given(scene=scenes(), actions=ACTIONS)
def test_a_fleet_equals_its_naive_twin_while_tasks_leave_and_nodes_fail(name, scene, actions):
    fleet, machines, running = fleet_of(scene, name), deepcopy(scene.machines), []
    twin, _, weights = POLICIES[name]
    market = naive_openb.market_of(twin, weights, machines, mix_of(scene))
    for verb, number in actions:
        if verb == "place":
            spec = number % len(scene.tasks)
            task = scene.tasks[spec]
            found = fleet.place_task(spec)
            assert found == naive_choice(scene, machines, name, task, market)
            if found[0] >= 0:
                running.append((found[0], spec, found[1]))
                machines[found[0]].node = naive.placed(machines[found[0]].node, list(found[1]), task)
                if market:
                    market.moved(task)
        elif verb == "release" and running:
            node, spec, slots = running.pop(number % len(running))
            fleet.release_task(node, spec, slots)
            machines[node].node = given_back(machines[node].node, slots, scene.tasks[spec])
            if market:
                market.moved(scene.tasks[spec], left=True)
        elif verb == "tend":
            fleet.work_ahead(number % 5)
        elif verb in {"fail", "return"}:
            node = number % len(machines)
            fleet.set_available(node, verb == "return")
            machines[node].node.available = verb == "return"
        for at, machine in enumerate(machines):
            there = [scene.tasks[spec] for node, spec, _ in running if node == at]
            machine.held = {naive_openb.kind_of(task) for task in there if task.gpu_count}
        same(fleet, machines)


@pytest.mark.parametrize("name", ALL)
@quiet
@given(scene=scenes(), extra=st.lists(st.integers(0, 5), max_size=10))
def test_what_has_come_and_gone_leaves_no_trace(name, scene, extra):
    fleet = fleet_of(scene, name)
    for moment, number in enumerate(scene.order):
        fleet.place_task(number, moment)
    other = fleet.copy()
    came = [(spec % len(scene.tasks), other.place_task(spec % len(scene.tasks), 7)) for spec in extra]
    for spec, (node, slots) in came:
        if node >= 0:
            other.release_task(node, spec, slots)
    nodes = range(len(scene.machines))
    assert [fleet.free_resources(node) for node in nodes] == [other.free_resources(node) for node in nodes]
    assert fleet.power_w == other.power_w
    if heeds_quotes(scene, name):
        return  # they are made each so many arrivals and departures, and kept where they would hardly move
    for moment, number in enumerate(scene.order):
        assert fleet.place_task(number, moment) == other.place_task(number, moment)


def test_a_failed_node_gets_nothing_and_keeps_what_it_has():
    node = naive.Node(96_000, 96_000, 10, [naive.Gpu(0, 1000, 10.0, 70.0)])
    scene = SimpleNamespace(
        machines=[naive_openb.Machine(node, 0)], tasks=[naive.Task(1000, 1, 1, 300)], mix=[(0, 1)], order=[]
    )
    fleet = fleet_of(scene, "fgd")
    assert fleet.place_task(0) == (0, (0,))
    fleet.set_available(0, False)
    assert fleet.place_task(0) == (-1, ())
    assert fleet.free_resources(0) == (95_000, 9, (700,))
    fleet.release_task(0, 0, (0,))
    fleet.set_available(0, True)
    fleet.book_task(0, 0, (0,))
    assert fleet.free_resources(0) == (95_000, 9, (700,))


@pytest.mark.parametrize("name", ["eelgrid", "lookahead", "fgd", "pwr200"])
def test_idle_work_in_small_bouts_changes_no_decision(name):
    """160 nodes in several blocks of states; tasks leave again, so that a state is new, touched and gone between bouts."""
    scene = generated()
    scene.machines = [replace(machine, rank=rank) for rank, machine in enumerate(scene.machines * 4)]
    # By the most that a bout does; what decides without idle work is one for all, since it is slow where interpreted.
    quiet_one, busy_ones, running = fleet_of(scene, name), {most: fleet_of(scene, name) for most in (1, 3, 10)}, []
    arrivals = scene.order * 2
    for step, spec in enumerate(arrivals[: len(arrivals) // PART]):
        found = quiet_one.place_task(spec)
        for most, busy_one in busy_ones.items():
            for _ in range(4):
                busy_one.work_ahead(most)
            assert busy_one.place_task(spec) == found, f"bouts of {most}"
        if found[0] >= 0:
            running.append((found[0], spec, found[1]))
        if len(running) > 60:
            place = running.pop(step * 31 % len(running))
            for fleet in (quiet_one, *busy_ones.values()):
                fleet.release_task(*place)


def weighed(run, kind, row):
    """The cost of a kind in a row, weighed now."""
    return compute_task_cost(run, kind, row, True)[0]


def known_of(fleet, seen):
    """Every cost that is kept is the cost or a bound from below; how they are known is added to what was seen."""
    run = fleet.engine
    for kind in range(len(run.kinds)):
        apply_log(run, kind)
        for row in range(run.scalars[0].rows):
            kept, known = run.cost_index.cost[kind, row], run.cost_index.known[kind, row]
            if np.isfinite(kept):
                seen.add(int(known))
                exact = weighed(run, kind, row)
                assert kept == exact if known == EXACT else kept <= exact


@pytest.mark.parametrize("name", ["lookahead", "eelgrid"])
@quiet
@given(scene=scenes(), picks=st.lists(st.integers(0, 1000), max_size=30))
def test_what_is_not_weighed_exactly_is_bounded_from_below(name, scene, picks):
    fleet, running = fleet_of(scene, name), []
    for number in picks:
        if number % 3 or not running:
            spec = number % len(scene.tasks)
            node, slots = fleet.place_task(spec)
            running.extend([(node, spec, slots)] if node >= 0 else [])
        else:
            fleet.release_task(*running.pop(number % len(running)))
        known_of(fleet, set())


def test_bounds_of_every_sort_occur_and_hold():
    scene, seen, running = generated(), set(), []
    fleet = fleet_of(scene, "lookahead")
    for step, spec in enumerate(scene.order):
        found = fleet.place_task(spec)
        running.extend([(found[0], spec, found[1])] if found[0] >= 0 else [])
        if len(running) > 25:
            fleet.release_task(*running.pop(step * 31 % len(running)))
        if step % (10 * PART) == 0:
            known_of(fleet, seen)
    assert seen == {LOOSE, BOUNDED, EXACT}
    for kind in range(len(scene.tasks)):
        compute_all_costs(fleet.engine, kind)
        rows = fleet.engine.scalars[0].rows
        finite = np.isfinite(fleet.engine.cost_index.cost[kind, :rows])
        assert (fleet.engine.cost_index.known[kind, :rows][finite] == EXACT).all()
