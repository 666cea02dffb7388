"""Every published policy in the daemon: the engine of the bench decides the same on the same nodes and tasks."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.builders.cluster import GIB, build_core, build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.planner import Planner, derive_random_seed, make_prices
from eelgrid_controller.replay.policy_comparison import find_replayed_policy
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import SimulatedFleet
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import OBJECTIVES, Policy

NAMES = ("random", "dotprod", "gpupacking", "gpuclustering", "bestfit", "fgd", "pwr", "pwr200", "pwr137", "eelgrid")
MODELS = ("T4", "G2", "G3")
WATTS = ((10.0, 70.0), (30.0, 150.0), (50.0, 400.0))


def word(seed=1):
    """A generator written out, so that it stays what it is."""
    value = seed
    while True:
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
        yield value >> 33


def trace():
    """24 nodes and 300 arrivals and departures of 14 kinds."""
    draw = word()
    shapes = [(4, 0, 96), (2, 1, 64), (8, 2, 128), (1, 2, 31), (0, 0, 64)]
    nodes = [shapes[next(draw) % 5] for _ in range(24)]
    kinds = []
    for _ in range(14):
        count = (0, 1, 1, 1, 1, 2, 4)[next(draw) % 7]
        milli = 0 if count == 0 else 1000 if count > 1 else (100, 250, 460, 500, 810, 1000)[next(draw) % 6]
        models = (
            tuple(sorted({MODELS[next(draw) % 3], MODELS[next(draw) % 3]})) if count and next(draw) % 3 == 0 else ()
        )
        kinds.append(
            build_request(cpu=next(draw) % 17, memory_gib=4 * (next(draw) % 9), gpus=count, milli=milli, models=models)
        )
    return nodes, kinds, [(next(draw) % 14, next(draw) % 4 == 0, next(draw)) for _ in range(300)]


def fleet_of(nodes, kinds, mix, name):
    asked = [kind.spec.request for kind in kinds]
    columns = SimpleNamespace(
        cpu_milli=np.array([cpu * 1000 for _, _, cpu in nodes]),
        memory_mib=np.array([384 * GIB for _ in nodes]),
        gpu_count=np.array([count for count, _, _ in nodes]),
        model=np.array([model if count else -1 for count, model, _ in nodes]),
        idle_w=np.array([WATTS[model][0] if count else 0.0 for count, model, _ in nodes]),
        busy_w=np.array([WATTS[model][1] if count else 0.0 for count, model, _ in nodes]),
    )
    specs = SimpleNamespace(
        cpu_milli=np.array([item.cpu_milli for item in asked]),
        memory_mib=np.array([item.memory_bytes for item in asked]),
        gpu_count=np.array([item.gpu_count for item in asked]),
        gpu_milli=np.array([item.gpu_milli for item in asked]),
        allows=np.array([[not item.gpu_models or model in item.gpu_models for model in MODELS] for item in asked]),
    )
    classes = [(item.cpu_milli, item.gpu_count, item.gpu_milli, item.gpu_models) for item in asked]
    typical = (
        np.array([classes.index(tuple(entry)) for entry, _ in mix], np.int64),
        np.array([weight for _, weight in mix], np.int64),
    )
    chosen = find_policy(name)
    return SimulatedFleet(columns, specs, typical, np.arange(len(nodes)), chosen)


@pytest.mark.parametrize("name", NAMES)
def test_the_daemon_decides_what_the_bench_decides(name):
    nodes, kinds, arrivals = trace()
    state = ClusterState(policy=Policy(placement=name))
    # The mix is learned from what is submitted; here it is learned beforehand and then stays.
    for kind in kinds:
        state.demand.observe(kind.spec.request, 1)
    state.demand.refresh_at = 10**9
    core = build_core(
        *(
            build_node(f"n{number:02}", gpus=count, model=MODELS[model], cpu=cpu)
            for number, (count, model, cpu) in enumerate(nodes)
        ),
        state=state,
    )
    fleet = fleet_of(nodes, kinds, state.demand.mix, name)
    running, refused = [], 0
    for number, (kind, leaves, which) in enumerate(arrivals):
        if leaves and running:
            workload, *place = running.pop(which % len(running))
            core.cancel(workload, now_ns=number)
            fleet.release_task(*place)
            continue
        moment = derive_random_seed(core.snapshot())
        step = core.submit(kinds[kind], now_ns=number)
        found, slots = fleet.place_task(kind, moment)
        if found < 0:
            assert not step.result.placements
            core.cancel(step.result.workload_id, now_ns=number)
            refused += 1
            continue
        (spot,) = step.result.placements
        assert (spot.node_name, spot.gpu_indexes) == (f"n{found:02}", slots)
        running.append((step.result.workload_id, found, kind, slots))
    assert refused
    assert len(running) > 60
    if name == "eelgrid":
        scalars, market = fleet.engine.scalars[0], core.state.market
        assert (market.came_milli, market.left_milli) == (scalars.came_milli, scalars.left_milli)
        assert 0 < market.left_milli < market.came_milli


def test_policies_differ_and_a_replay_knows_which_was_in_force():
    nodes, kinds, arrivals = trace()

    def run(name):
        core = build_core(
            *(build_node(f"n{n:02}", gpus=g, model=MODELS[m], cpu=c) for n, (g, m, c) in enumerate(nodes))
        )
        events = [*core.update_policy(Policy(placement=name), now_ns=1).events]
        for number, (kind, _, _) in enumerate(arrivals[:60]):
            events += core.submit(kinds[kind], now_ns=number).events
        return core, events

    (ours, _), (fgd, events) = run("eelgrid"), run("fgd")
    assert ours.state.digest() != fgd.state.digest()
    again = build_core(*(build_node(f"n{n:02}", gpus=g, model=MODELS[m], cpu=c) for n, (g, m, c) in enumerate(nodes)))
    for event in events:
        again.state.apply(event)
    assert again.state.digest() == fgd.state.digest()
    wanted = kinds[3]
    fresh = Core(again.state, catalogue.load_catalogue())
    assert fresh.submit(wanted, now_ns=99).result.placements == fgd.submit(wanted, now_ns=99).result.placements


def test_an_unknown_policy_is_refused_by_field():
    core = build_core(build_node("a"))
    with pytest.raises(InvalidArgument) as error:
        core.update_policy(Policy(placement="greedy"), now_ns=1)
    (found,) = error.value.violations
    assert found.field == "policy.placement"
    assert "fgd" in found.remedy


def test_a_change_of_policy_is_felt_at_once():
    core = build_core(build_node("a", gpus=8), build_node("b", gpus=1))
    planner, wanted = Planner(), build_request(gpus=1).spec
    # Both add as many watts, so that the name decides for PWR; best fit goes where least is free.
    for name, expected in (("pwr", "a"), ("bestfit", "b"), ("pwr", "a")):
        decision = planner.decide_placement(core.snapshot(), wanted, OBJECTIVES["balanced"], name)
        assert decision.placements[0].node_name == expected


@pytest.mark.parametrize(
    ("name", "objective"),
    [("eelgrid", "balanced"), ("eelgrid-energy", "energy"), ("eelgrid-performance", "performance")],
)
def test_a_replay_takes_an_objective_for_its_weights(name, objective):
    found = find_replayed_policy(name)
    assert (found.name, found.weights.tolist()) == (name, list(make_prices(OBJECTIVES[objective])))
    assert found.code == find_policy("eelgrid").code


@pytest.mark.parametrize("name", ["eelgrid-balanced", "eelgrid-", "fgd-energy"])
def test_a_replay_knows_no_other_objective(name):
    with pytest.raises(ValueError, match=r"there is no policy .* eelgrid-energy, eelgrid-performance"):
        find_replayed_policy(name)
