"""Correcting devices: what the engine says is held is what is held; two that were crossed swap; the impossible is refused."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.nodes import CorrectionRefused
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.faults import NotFound


def placed(*sizes, gpus=4):
    core = build_core(build_node("a", gpus=gpus, model="G2"))
    for number, size in enumerate(sizes):
        core.submit(build_request(gpus=size, key=f"w{number}"), now_ns=1)
    return core


def held(core, key):
    return set(core.workload(key).placements[0].gpu_uuids)


def test_a_replica_that_holds_a_free_gpu_is_pointed_at_it_and_its_limit_follows():
    core = placed(1)
    core.set_limit("w0", 100.0, now_ns=1)
    (before,) = held(core, "w0")
    free = next(gpu.uuid for gpu in core.state.nodes["a"].inventory.gpus if gpu.uuid != before)
    epoch = core.node_plan("a").epoch
    step = core.correct_devices("a", {("w0", 0): (free,)}, now_ns=2)
    assert held(core, "w0") == {free}
    assert core.workload("w0").placements[0].gpu_indexes == (core.state.nodes["a"].gpu(free).index,)
    plan = core.node_plan("a")
    assert [one.gpu_uuid for one in plan.gpu_settings if one.power_limit_w == 100.0] == [free]
    assert plan.epoch == epoch + 1
    assert step.nodes == {"a"}
    assert core.correct_devices("a", {("w0", 0): (free,)}, now_ns=3).events == ()


def test_two_that_got_each_others_devices_swap_in_one_event_that_the_journal_carries():
    core = placed(1, 2)
    one, two = held(core, "w0"), held(core, "w1")
    third = next(gpu.uuid for gpu in core.state.nodes["a"].inventory.gpus if gpu.uuid not in one | two)
    actual = {("w0", 0): (min(two),), ("w1", 0): (*one, third)}
    twin = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
    (event,) = core.correct_devices("a", actual, now_ns=2).events
    assert event.workload_ids == ("w0", "w1")
    twin.state.apply(event_from_plain(*event_to_plain(event)))
    assert twin.state.digest() == core.state.digest()
    assert (held(core, "w0"), held(core, "w1")) == ({min(two)}, {*one, third})
    check_invariants(core.state)


def test_what_others_are_taken_to_hold_and_a_closed_node_are_no_objection():
    core = placed(1)
    core.update_external_usage("a", ExternalUsage(gpu_count=3, closed="cordoned"), now_ns=1)
    other = next(gpu.uuid for gpu in core.state.nodes["a"].inventory.gpus if gpu.uuid not in held(core, "w0"))
    core.correct_devices("a", {("w0", 0): (other,)}, now_ns=2)
    assert held(core, "w0") == {other}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda core: {("w0", 0): tuple(held(core, "w1"))}, "is held by w1"),
        (lambda core: {("w0", 0): ("GPU-nowhere",)}, "has no GPU GPU-nowhere"),
        (lambda core: {("w9", 0): ("GPU-nowhere",)}, "is not on a"),
        (lambda core: {("w0", 0): tuple(sorted(held(core, "w0") | held(core, "w1")))}, "another size"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(said, words):
    core = placed(1, 1)
    before = core.state.digest()
    with pytest.raises(CorrectionRefused, match=words):
        core.correct_devices("a", said(core), now_ns=2)
    assert core.state.digest() == before


def test_a_node_that_is_not_there_is_named():
    with pytest.raises(NotFound, match="no node is called 'b'"):
        placed(1).correct_devices("b", {}, now_ns=2)


def test_an_agent_that_comes_to_a_node_takes_over_what_was_planned_there_by_index():
    core = build_core()
    made_up = build_node("a", gpus=4, model="G2")
    made_up = replace(made_up, gpus=tuple(replace(gpu, uuid=f"a/gpu-{gpu.index}") for gpu in made_up.gpus))
    core.register_node(made_up, now_ns=1)
    for key in ("w0", "w1", "w2"):
        core.submit(build_request(gpus=1, key=key), now_ns=2)
    core.submit(build_request(gpus=3, key="waits"), now_ns=2)
    before = {key: core.workload(key).placements[0].gpu_indexes for key in ("w0", "w1", "w2")}
    step = core.register_node(build_node("a", gpus=4, model="G2", agent_version="1"), now_ns=3)
    assert [type(event).__name__ for event in step.events[:2]] == ["NodeJoined", "DevicesCorrected"]
    assert {key: core.workload(key).placements[0].gpu_indexes for key in before} == before
    assert {gpu for key in before for gpu in held(core, key)} == {f"GPU-a-{one}" for (one,) in before.values()}
    assert not core.workload("waits").placements, "three of four are held still"
    check_invariants(core.state)


def test_a_board_that_an_agent_replaced_is_no_renaming():
    core = build_core(build_node("a", gpus=2, agent_version="1"))
    core.submit(build_request(gpus=1, key="w"), now_ns=1)
    before = held(core, "w")
    other = build_node("a", gpus=2, agent_version="1")
    other = replace(other, gpus=tuple(replace(gpu, uuid=f"{gpu.uuid}-new") for gpu in other.gpus))
    core.register_node(other, now_ns=2)
    assert held(core, "w") == before
