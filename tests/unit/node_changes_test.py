"""Changes of nodes in people's terms: each once, by whichever event the news comes."""

from dataclasses import replace

from tests.builders.cluster import build_core, build_node

from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import (
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodesRemoved,
    NodeUncordoned,
)
from eelgrid_controller.state.node_changes import NodeChanges, count_lost_gpus, mark_lost_gpus

NODE = build_node("a", gpus=2)
FIRST, SECOND = (gpu.uuid for gpu in NODE.gpus)


def inventory(*lost, **changes):
    return replace(NODE, gpus=tuple(replace(gpu, lost=gpu.uuid in lost) for gpu in NODE.gpus), **changes)


def joined(found):
    return NodeJoined(time_ns=1, inventory=found)


def lost(uuid):
    return GpuLost(time_ns=1, node_name="a", gpu_uuid=uuid)


def returned(uuid):
    return GpuReturned(time_ns=1, node_name="a", gpu_uuid=uuid)


def told(*events, changes=None):
    changes = changes or NodeChanges()
    return [(str(one.kind), one.subject) for event in events for one in changes.observe(event)]


def test_a_loss_that_comes_as_an_event_and_with_the_inventory_is_one_change():
    begin = ("node joined", "a")
    once = [begin, ("GPU lost", "GPU 1 of a"), ("GPU returned", "GPU 1 of a")]
    gone, back = joined(inventory(SECOND, generation=2)), joined(inventory(generation=3))
    assert told(joined(NODE), lost(SECOND), gone, returned(SECOND), back) == once
    assert told(joined(NODE), gone, lost(SECOND), back, returned(SECOND)) == once
    assert told(joined(NODE), gone, gone, back, back) == once


def test_nodes_join_change_and_return():
    gone = NodeLost(time_ns=1, node_name="a")
    more = inventory(memory_bytes=NODE.memory_bytes * 2)
    assert told(joined(NODE), joined(NODE), joined(more), gone, joined(more)) == [
        ("node joined", "a"),
        ("node changed", "a"),
        ("node lost", "a"),
        ("node returned", "a"),
    ]
    removed = NodesRemoved(time_ns=1, node_names=("a",), reason="")
    assert told(joined(NODE), removed, joined(NODE)) == [
        ("node joined", "a"),
        ("node removed", "a"),
        ("node joined", "a"),
    ]
    assert told(joined(inventory(FIRST))) == [("node joined", "a"), ("GPU lost", "GPU 0 of a")]


def test_what_is_known_at_the_start_is_no_change():
    core = build_core(NODE)
    core.mark_gpu_lost("a", FIRST, now_ns=2)
    changes = NodeChanges()
    changes.reset(core.state.nodes)
    assert told(joined(inventory(FIRST)), changes=changes) == []
    assert told(returned(FIRST), changes=changes) == [("GPU returned", "GPU 0 of a")]
    record = core.state.nodes["a"]
    assert [gpu.lost for gpu in mark_lost_gpus(record).gpus] == [True, False]
    assert count_lost_gpus(record) == 1
    core.mark_node_lost("a", now_ns=3)
    assert count_lost_gpus(core.state.nodes["a"]) == 0


def test_a_cordon_says_who_did_it_and_why():
    by_ann = {"time_ns": 1, "node_name": "a", "user": "ann"}
    events = (
        joined(NODE),
        NodeCordoned(**by_ann, reason="fan broken"),
        NodeCordoned(time_ns=1, node_name="a", gpu_uuids=(SECOND, FIRST), reason="ecc", drain=DrainTerms()),
        NodeUncordoned(**by_ann),
    )
    assert told(*events)[1:] == [
        ("node cordoned", "a by ann: fan broken"),
        ("GPU draining", "GPU 0 of a: ecc"),
        ("GPU draining", "GPU 1 of a: ecc"),
        ("node uncordoned", "a by ann"),
    ]
