"""The planner: joint cost, gangs, and a memory that changes no decision."""

from dataclasses import replace

import numpy as np
import pytest
from tests import naive
from tests.builders.cluster import build_core, build_naive_cluster, build_naive_task, build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.planner import Planner
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.placement.snapshot import SnapshotMirror
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos import catalogue
from eelgrid_protos.messages import OBJECTIVES, Policy, Weights

BALANCED = OBJECTIVES["balanced"]


def where(core, wanted):
    decision = Planner().decide_placement(core.snapshot(), wanted.spec, BALANCED)
    return [(spot.node_name, spot.gpu_indexes) for spot in decision.placements]


def test_a_share_goes_to_the_gpu_that_is_busy_already():
    core = build_core(build_node("a"), build_node("b"))
    core.submit(build_request(gpus=1, milli=400), now_ns=1)
    assert where(core, build_request(gpus=1, milli=400)) == [("a", (0,))]
    # No more room for 700 on it: of the others, one on a node whose CPU package is awake costs less.
    assert where(core, build_request(gpus=1, milli=700)) == [("a", (1,))]


def test_of_two_models_the_one_that_adds_fewer_watts_wins():
    core = build_core(build_node("big", model="G3"), build_node("small", model="T4"))
    assert where(core, build_request(gpus=1, milli=500)) == [("small", (0,))]
    assert where(core, build_request(gpus=1, milli=500, models=("G3",))) == [("big", (0,))]


def test_slots_follow_the_index_of_the_device_not_the_order_of_the_inventory():
    turned = replace(build_node("a", gpus=4), gpus=tuple(reversed(build_node("a", gpus=4).gpus)))
    core = build_core(turned)
    decision = Planner().decide_placement(core.snapshot(), build_request(gpus=2).spec, BALANCED)
    (spot,) = decision.placements
    assert (spot.gpu_indexes, spot.gpu_uuids) == ((0, 1), ("GPU-a-0", "GPU-a-1"))


@pytest.mark.parametrize(
    ("gpus", "milli", "replicas", "fits"), [(1, 300, 6, True), (1, 300, 13, False), (2, 1000, 2, True)]
)
def test_replicas_are_placed_all_or_none(gpus, milli, replicas, fits):
    core = build_core(build_node("a"), build_node("b"))
    before = [array.copy() for array in core.snapshot().nodes]
    decision = Planner().decide_placement(
        core.snapshot(), build_request(gpus=gpus, milli=milli, replicas=replicas).spec, BALANCED
    )
    assert len(decision.placements) == (replicas if fits else 0)
    assert decision.room == (replicas if fits else 12)
    for was, now in zip(before, core.snapshot().nodes, strict=True):
        assert np.array_equal(was, now)


def test_replicas_go_where_they_would_go_one_by_one():
    inventories = [build_node("a", gpus=4), build_node("b", gpus=2, model="T4"), build_node("c", gpus=8, model="G3")]
    together = build_core(*inventories)
    step = together.submit(build_request(gpus=1, milli=600, replicas=7), now_ns=1)
    apart = build_core(*inventories)
    # The mix is learned from submissions, so one by one it must be learned beforehand to be the same.
    spots = []
    planner = Planner()
    trial = apart.snapshot().copy()
    for _ in range(7):
        decision = planner.decide_placement(trial.snapshot, build_request(gpus=1, milli=600).spec, BALANCED)
        spots.append((decision.placements[0].node_name, decision.placements[0].gpu_indexes))
        row = list(trial.snapshot.names).index(spots[-1][0])
        trial.place_task(row, spots[-1][1], build_naive_task(build_request(gpus=1, milli=600).spec.request, {}))
        planner = Planner()
    assert [(spot.node_name, spot.gpu_indexes) for spot in step.result.placements] == spots


def test_memory_of_boards_changes_no_decision():
    core = build_core(*(build_node(f"n{number}", gpus=4, model="G2" if number % 2 else "T4") for number in range(12)))
    kinds = [
        build_request(gpus=1, milli=300),
        build_request(gpus=2),
        build_request(gpus=0, cpu=7),
        build_request(gpus=1, models=("T4",)),
    ]
    for number in range(60):
        wanted = kinds[number * 7 // 3 % 4]
        fresh = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
        step = core.submit(wanted, now_ns=number)
        assert step.events == fresh.submit(wanted, now_ns=number).events
        assert core.explain_workload(step.result.workload_id) == fresh.explain_workload(step.result.workload_id)
        if number % 5 == 4:
            core.cancel(f"w-{number // 5 + 1}", now_ns=number)


def test_rows_kept_up_to_date_equal_arrays_built_again():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=1))
    for number in range(9):
        core.submit(build_request(gpus=1, milli=100 * number + 100), now_ns=1)
    core.mark_gpu_lost("a", "GPU-a-3", now_ns=2)
    core.register_node(build_node("wide", gpus=9, model="G3"), now_ns=2)
    core.register_node(build_node("a", gpus=3, cpu=64), now_ns=3)
    core.mark_node_lost("b", now_ns=3)
    for number in range(80):
        core.register_node(build_node(f"late{number}", gpus=2, model="T4"), now_ns=4)
    core.update_external_usage("late0", ExternalUsage(traits=("x",)), now_ns=5)
    core.cordon_node("late1", reason="a fan", now_ns=5)
    core.update_external_usage("late1", ExternalUsage(traits=("y",)), now_ns=6)
    kept, anew = core.snapshot(), SnapshotMirror(core.state, PriorPowerModel(catalogue.load_catalogue()).gpu).snapshot()
    assert list(kept.names) == list(anew.names)
    assert kept.devices == anew.devices
    # Models are coded in the order in which they were met, which a removed model may shift.
    assert kept.models == anew.models
    assert (kept.is_ready, kept.traits) == (anew.is_ready, anew.traits)
    row = {name: at for at, name in enumerate(kept.names)}
    assert [kept.is_ready[row[name]] for name in ("b", "late0", "late1")] == [False, True, True]
    assert [kept.traits[row[name]] for name in ("b", "late0", "late1", "late2")] == [None, ("x",), None, ()]
    for left, right in zip((*kept.nodes, *kept.mix[:5]), (*anew.nodes, *anew.mix[:5]), strict=True):
        assert np.array_equal(left, right)
    assert np.array_equal(kept.measure_fragments(), anew.measure_fragments())
    with pytest.raises(ValueError, match="read-only"):
        kept.nodes.cpu_free[0] = 1


def test_the_choice_is_the_naive_twins():
    weights = Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0)
    state = ClusterState(policy=Policy(objective="custom", weights=weights))
    core = build_core(
        build_node("a", gpus=4),
        build_node("b", gpus=8, model="G3", cpu=128),
        build_node("c", gpus=2, model="T4", cpu=104),
        state=state,
    )
    kinds = [
        build_request(gpus=1, milli=450, cpu=6),
        build_request(gpus=2, cpu=16),
        build_request(gpus=0, cpu=5),
        build_request(gpus=1, cpu=12),
    ]
    for number in range(20):
        wanted = kinds[number % 4]
        nodes, mix, models = build_naive_cluster(core)
        task = build_naive_task(wanted.spec.request, models)
        theirs = naive.best_candidates(nodes, task, mix, (weights.power, weights.fragmentation_w, weights.stranding_w))
        step = core.submit(wanted, now_ns=number)
        if not step.result.placements:
            assert not theirs.candidates
            continue
        (explained,) = core.state.explanations.get(step.result.workload_id)
        assert [found.cost_w for found in explained.candidates] == pytest.approx(
            [found.cost_w for found in theirs.candidates]
        )
