"""Work that stands already: taken over at its places or refused, whole or replica by replica, never beside what others hold."""

import pytest
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import AdoptionRefused
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.faults import AlreadyExists, ResourceExhausted
from eelgrid_protos.messages import WorkloadPhase

ONE = ExternalUsage(cpu_milli=1000, memory_bytes=2**30, gpu_count=1)


class World:
    """A core with nodes, and all its events."""

    def __init__(self, *nodes, **options):
        self.core = Core(ClusterState(), catalogue.load_catalogue(), **options)
        self.events = []
        self.now_ns = 0
        for node in nodes:
            self.do("register_node", node)

    def do(self, what, *args):
        self.now_ns += 1
        step = getattr(self.core, what)(*args, now_ns=self.now_ns)
        self.events += step.events
        return step

    def adopt(self, key, *standing, gpus=1, **changes):
        return self.claim(key, Adoption(standing=standing), gpus=gpus, replicas=len(standing), **changes).result

    def claim(self, key, adoption, **changes):
        return self.do("adopt", build_request(key, **changes), adoption)

    def others(self, name="n1"):
        return self.core.state.nodes[name].others

    def is_replayed(self):
        other = ClusterState()
        for event in self.events:
            other.apply(event_from_plain(*event_to_plain(event)))
        check_invariants(self.core.state)
        return other.digest() == self.core.state.digest()


def devices(workload):
    return [(place.node_name, place.gpu_indexes) for place in workload.placements]


def test_what_stands_is_held_and_no_longer_counts_as_others():
    world = World(build_node(gpus=4))
    world.do(
        "update_external_usage", "n1", ExternalUsage(cpu_milli=5000, memory_bytes=2**31, gpu_count=3, traits=("t",))
    )
    found = world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(2,), is_exact=True, counted=ONE))
    assert (found.phase, devices(found)) == (WorkloadPhase.PLACED, [("n1", (2,))])
    assert world.others() == ExternalUsage(cpu_milli=4000, memory_bytes=2**30, gpu_count=2, traits=("t",))
    assert [type(event).__name__ for event in world.events[-4:]] == [
        "NodeOccupied",
        "WorkloadSubmitted",
        "WorkloadPlaced",
        "NodeOccupied",
    ]
    assert world.is_replayed()


def test_a_closed_node_keeps_what_stands_on_it():
    world = World(build_node(gpus=1))
    world.do(
        "update_external_usage",
        "n1",
        ExternalUsage(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, closed="the node is cordoned"),
    )
    found = world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(0,), counted=ONE))
    assert devices(found) == [("n1", (0,))]
    assert world.others() == ExternalUsage(closed="the node is cordoned")
    assert world.is_replayed()


def test_devices_that_are_counts_give_way_and_others_do_not():
    world = World(build_node(gpus=3))
    world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(1,)))
    assert devices(world.adopt("pod-b", RunningReplica(node_name="n1", gpu_indexes=(1,)))) == [("n1", (0,))]
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match="devices 1 of node n1 are not free"):
        world.adopt("pod-c", RunningReplica(node_name="n1", gpu_indexes=(1,), is_exact=True))
    assert world.core.state.digest() == before
    assert devices(world.adopt("pod-c", RunningReplica(node_name="n1", gpu_indexes=(9,)))) == [("n1", (2,))]
    assert world.is_replayed()


def test_a_gang_is_taken_over_whole_or_not_at_all():
    world = World(build_node("n1"), build_node("n2", gpus=1))
    before = world.core.state.digest()
    places = [RunningReplica(node_name=name) for name in ("n1", "n2", "n2")]
    with pytest.raises(AdoptionRefused, match="1 devices of node n2 are not free") as caught:
        world.adopt("gang-a", *places)
    assert (caught.value.replica, world.core.state.digest()) == (2, before)
    found = world.adopt("gang-a", *places[:2], RunningReplica(node_name="n1"))
    assert devices(found) == [("n1", (0,)), ("n2", (0,)), ("n1", (1,))]
    assert world.is_replayed()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (ExternalUsage(gpu_count=2), "would have 1 GPUs left, and others hold 2"),
        (ExternalUsage(cpu_milli=95_500), "exceeds the CPU"),
        (ExternalUsage(memory_bytes=400 * 2**30), "exceeds the memory"),
    ],
)
def test_room_that_others_hold_is_not_taken(others, words):
    world = World(build_node(gpus=2))
    world.do("update_external_usage", "n1", others)
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match=words):
        world.adopt("pod-a", RunningReplica(node_name="n1"))
    assert world.core.state.digest() == before


def test_a_node_that_is_not_there_and_work_that_is_too_large():
    world = World(build_node(gpus=2), live_most=1)
    with pytest.raises(AdoptionRefused, match="node n9 is not there"):
        world.adopt("pod-a", RunningReplica(node_name="n9"))
    with pytest.raises(AdoptionRefused, match="exceeds the CPU"):
        world.adopt("pod-a", RunningReplica(node_name="n1"), cpu=97)
    with pytest.raises(AdoptionRefused, match="would stand nowhere"):
        world.adopt("pod-a")
    world.do("mark_node_lost", "n1")
    with pytest.raises(AdoptionRefused, match="node n1 is not there"):
        world.adopt("pod-a", RunningReplica(node_name="n1"))
    world.do("register_node", build_node(gpus=2, generation=2))
    world.adopt("pod-a", RunningReplica(node_name="n1"))
    with pytest.raises(ResourceExhausted):
        world.adopt("pod-b", RunningReplica(node_name="n1"))


def test_repeating_it_is_harmless_and_another_spec_is_refused():
    world = World(build_node())
    first = world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(0,), counted=ONE))
    count = len(world.events)
    assert world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(0,), counted=ONE)) == first
    assert len(world.events) == count
    with pytest.raises(AlreadyExists):
        world.adopt("pod-a", RunningReplica(node_name="n1"), gpus=2)


def test_no_waiting_work_slips_into_the_room():
    world = World(build_node(gpus=1))
    world.do("update_external_usage", "n1", ONE)
    world.do("submit", build_request("w"))
    world.adopt("pod-a", RunningReplica(node_name="n1", gpu_indexes=(0,), counted=ONE))
    assert world.core.workload("w").phase is WorkloadPhase.PENDING
    world.do("cancel", "pod-a")
    assert world.core.workload("w").phase is WorkloadPhase.PLACED
    assert world.is_replayed()


def test_what_becomes_free_beyond_what_is_held_is_tried_at_once():
    world = World(build_node(gpus=2))
    world.do("update_external_usage", "n1", ExternalUsage(gpu_count=2))
    world.do("submit", build_request("w"))
    world.adopt("pod-a", RunningReplica(node_name="n1", counted=ExternalUsage(gpu_count=2)))
    assert world.core.workload("w").phase is WorkloadPhase.PLACED
    assert world.is_replayed()


def test_in_parts_what_cannot_be_held_stays_what_others_hold():
    world = World(build_node(gpus=2), build_node("n2"))
    world.do(
        "update_external_usage",
        "n1",
        ExternalUsage(cpu_milli=3000, memory_bytes=3 * 2**30, gpu_count=2, closed="cordoned"),
    )
    places = [
        RunningReplica(node_name="n1", gpu_indexes=(1,), counted=ONE),
        RunningReplica(node_name="nowhere", counted=ONE),
        RunningReplica(node_name="n1", counted=ONE),
        RunningReplica(node_name="n1", counted=ONE),  # the node has two
    ]
    with pytest.raises(AdoptionRefused, match="replica 1 of service-s"):
        world.claim("service-s", Adoption(standing=tuple(places)))
    found = world.claim("service-s", Adoption(standing=tuple(places), in_parts=True)).result
    assert (devices(found), found.spec.replicas) == ([("n1", (1,)), ("n1", (0,))], 2)
    assert world.others() == ExternalUsage(cpu_milli=1000, memory_bytes=2**30, closed="cordoned")
    with pytest.raises(AdoptionRefused, match="node nowhere is not there"):
        world.claim("service-t", Adoption(standing=(places[1],), in_parts=True))
    assert world.is_replayed()


def test_a_device_that_was_named_is_held_whichever_others_are_guessed_to_hold():
    world = World(build_node(gpus=2))
    world.do("update_external_usage", "n1", ExternalUsage(gpu_count=2))
    claim = Adoption(
        standing=(RunningReplica(node_name="n1", gpu_indexes=(1,), is_exact=True, counted=ONE),), in_parts=True
    )
    assert devices(world.claim("service-s", claim).result) == [("n1", (1,))]
    assert world.others() == ExternalUsage(gpu_count=1)
    assert world.is_replayed()


def test_running_work_gains_places_and_lets_others_go_in_one_step():
    world = World(build_node(), build_node("n2"))
    world.adopt("service-s", RunningReplica(node_name="n1"), RunningReplica(node_name="n1"))
    world.do("update_external_usage", "n2", ONE)
    world.do("submit", build_request("w", gpus=2))
    claim = Adoption(
        standing=(RunningReplica(node_name="n2", gpu_indexes=(1,), counted=ONE),), first=2, released=(0, 0, 7)
    )
    step = world.claim("service-s", claim)
    assert [(one.replica, one.node_name, one.gpu_indexes) for one in step.result.placements] == [
        (1, "n1", (1,)),
        (2, "n2", (1,)),
    ]
    assert [type(event).__name__ for event in step.events[:3]] == ["NodeOccupied", "WorkloadScaled", "NodeOccupied"]
    assert world.others("n2") == ExternalUsage()
    # Said again it changes nothing; nor does a claim that was made before another one was heard of.
    assert not world.claim("service-s", claim).events
    assert not world.claim("service-s", Adoption(standing=claim.standing, first=1)).events
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match="would stand nowhere; cancel it instead"):
        world.claim("service-s", Adoption(first=3, released=(1, 2)))
    with pytest.raises(AdoptionRefused, match="does not run"):
        world.claim("w", Adoption(standing=claim.standing, first=1))
    assert world.core.state.digest() == before
    assert world.is_replayed()


def test_waiting_work_that_its_engine_has_begun_is_placed_where_it_runs():
    world = World(build_node(gpus=1), build_node("n2", gpus=1))
    for key in ("a", "b", "c"):
        world.do("submit", build_request(key))
    assert world.core.workload("c").phase is WorkloadPhase.PENDING
    claim = Adoption(standing=(RunningReplica(node_name="n2"),), begins_pending=True)
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match="replica 0 of c cannot be taken over"):
        world.claim("c", claim)
    with pytest.raises(AdoptionRefused, match="would stand nowhere"):
        world.claim("c", Adoption(begins_pending=True))
    # Another report of one that was placed in between, or is not known, changes nothing.
    assert not world.claim("a", claim).events
    assert world.core.state.digest() == before
    world.do("hold", "c")
    world.do("cancel", "b")
    world.do("cancel", "a")
    found = world.claim("c", claim).result
    assert (found.phase, devices(found)) == (WorkloadPhase.PLACED, [("n2", (0,))])
    assert "c" not in world.core.state.pending
    assert world.is_replayed()


def test_who_was_left_out_comes_later_and_makes_room_for_what_waits():
    world = World(build_node(gpus=1), build_node("n2", gpus=1))
    world.adopt("service-s", RunningReplica(node_name="n1"))
    world.do("submit", build_request("w"))
    assert world.core.workload("w").placements[0].node_name == "n2"
    claim = Adoption(standing=(RunningReplica(node_name="n2"),), first=1, in_parts=True)
    with pytest.raises(AdoptionRefused, match="replica 1 of service-s"):
        world.claim("service-s", claim)
    world.do("cancel", "w")
    world.do("submit", build_request("v", gpus=1, replicas=1))
    world.do("cancel", "v")
    assert devices(world.claim("service-s", claim).result) == [("n1", (0,)), ("n2", (0,))]
    world.do("submit", build_request("u"))
    world.claim("service-s", Adoption(first=2, released=(0,)))
    assert devices(world.core.workload("u")) == [("n1", (0,))]
    assert world.is_replayed()


def test_a_journal_of_earlier_versions_is_read():
    """They told what others hold afterwards, without why the node is closed, before the places and not only after them."""
    world = World(build_node(gpus=2))
    place = {"node_name": "n1", "gpu_uuids": ["GPU-n1-0"], "gpu_indexes": [0]}
    spec = {"name": "s", "request": {"cpu_milli": 1000, "memory_bytes": 2**30, "gpu_count": 1, "gpu_milli": 1000}}
    for kind, body in [
        ("node_occupied", {"time_ns": 1, "node_name": "n1", "others": {"gpu_count": 1}}),
        ("workload_submitted", {"time_ns": 1, "workload_id": "service-s", "spec": {**spec, "replicas": 1}}),
        ("workload_placed", {"time_ns": 1, "workload_id": "service-s", "placements": [{"replica": 0, **place}]}),
        ("node_occupied", {"time_ns": 1, "node_name": "n1", "others": {"gpu_count": 1, "closed": "cordoned"}}),
        (
            "workload_scaled",
            {"time_ns": 2, "workload_id": "service-s", "released": [0], "placements": [{"replica": 1, **place}]},
        ),
    ]:
        if kind == "workload_scaled":
            world.do("update_external_usage", "n1", ExternalUsage())
        event = event_from_plain(kind, body)
        world.core.state.apply(event)
        world.events.append(event)
    assert devices(world.core.workload("service-s")) == [("n1", (0,))]
    assert world.is_replayed()
