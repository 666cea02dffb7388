"""Work that stands already: taken over at its place or refused whole, never beside what others hold."""

import pytest
from tests.controller_rig import inventory, wanted

from eelgrid_controller.adoption import AdoptionRefused, Standing
from eelgrid_controller.core import Core
from eelgrid_controller.events import event_from_plain, event_to_plain
from eelgrid_controller.occupancy import Others
from eelgrid_controller.state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.faults import AlreadyExists, ResourceExhausted
from eelgrid_protos.messages import WorkloadPhase

ONE = Others(cpu_milli=1000, memory_bytes=2**30, gpu_count=1)


class World:
    """A core with nodes, and all its events."""

    def __init__(self, *nodes, **options):
        self.core = Core(ClusterState(), catalogue.load(), **options)
        self.events = []
        self.now_ns = 0
        for node in nodes:
            self.do("node_joined", node)

    def do(self, what, *args):
        self.now_ns += 1
        step = getattr(self.core, what)(*args, now_ns=self.now_ns)
        self.events += step.events
        return step

    def adopt(self, key, *standing, gpus=1, **changes):
        return self.do("adopt", wanted(key, gpus=gpus, replicas=len(standing), **changes), standing).result

    def others(self, name="n1"):
        return self.core.state.nodes[name].others

    def is_replayed(self):
        other = ClusterState()
        for event in self.events:
            other.apply(event_from_plain(*event_to_plain(event)))
        self.core.state.validate()
        return other.digest() == self.core.state.digest()


def devices(workload):
    return [(place.node_name, place.gpu_indexes) for place in workload.placements]


def test_what_stands_is_held_and_no_longer_counts_as_others():
    world = World(inventory(gpus=4))
    world.do("occupied", "n1", Others(cpu_milli=5000, memory_bytes=2**31, gpu_count=3, traits=("t",)))
    found = world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(2,), is_exact=True, counted=ONE))
    assert (found.phase, devices(found)) == (WorkloadPhase.PLACED, [("n1", (2,))])
    assert world.others() == Others(cpu_milli=4000, memory_bytes=2**30, gpu_count=2, traits=("t",))
    assert [type(event).__name__ for event in world.events[-4:]] == [
        "NodeOccupied", "WorkloadSubmitted", "WorkloadPlaced", "NodeOccupied",
    ]  # fmt: skip
    assert world.is_replayed()


def test_a_closed_node_keeps_what_stands_on_it():
    world = World(inventory(gpus=1))
    world.do("occupied", "n1", Others(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, closed="the node is cordoned"))
    found = world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(0,), counted=ONE))
    assert devices(found) == [("n1", (0,))]
    assert world.others() == Others(closed="the node is cordoned")
    assert world.is_replayed()


def test_devices_that_are_counts_give_way_and_others_do_not():
    world = World(inventory(gpus=3))
    world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(1,)))
    assert devices(world.adopt("pod-b", Standing(node_name="n1", gpu_indexes=(1,)))) == [("n1", (0,))]
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match="devices 1 of node n1 are not free"):
        world.adopt("pod-c", Standing(node_name="n1", gpu_indexes=(1,), is_exact=True))
    assert world.core.state.digest() == before
    assert devices(world.adopt("pod-c", Standing(node_name="n1", gpu_indexes=(9,)))) == [("n1", (2,))]
    assert world.is_replayed()


def test_a_gang_is_taken_over_whole_or_not_at_all():
    world = World(inventory("n1"), inventory("n2", gpus=1))
    before = world.core.state.digest()
    places = [Standing(node_name=name) for name in ("n1", "n2", "n2")]
    with pytest.raises(AdoptionRefused, match="1 devices of node n2 are not free") as caught:
        world.adopt("gang-a", *places)
    assert (caught.value.replica, world.core.state.digest()) == (2, before)
    found = world.adopt("gang-a", *places[:2], Standing(node_name="n1"))
    assert devices(found) == [("n1", (0,)), ("n2", (0,)), ("n1", (1,))]
    assert world.is_replayed()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (Others(gpu_count=2), "has 1 GPUs left, and others hold 2"),
        (Others(cpu_milli=95_500), "too little CPU"),
        (Others(memory_bytes=400 * 2**30), "too little memory"),
    ],
)
def test_room_that_others_hold_is_not_taken(others, words):
    world = World(inventory(gpus=2))
    world.do("occupied", "n1", others)
    before = world.core.state.digest()
    with pytest.raises(AdoptionRefused, match=words):
        world.adopt("pod-a", Standing(node_name="n1"))
    assert world.core.state.digest() == before


def test_a_node_that_is_not_there_and_work_that_is_too_large():
    world = World(inventory(gpus=2), live_most=1)
    with pytest.raises(AdoptionRefused, match="node n9 is not there"):
        world.adopt("pod-a", Standing(node_name="n9"))
    with pytest.raises(AdoptionRefused, match="exceeds the CPU"):
        world.adopt("pod-a", Standing(node_name="n1"), cpu_milli=97_000)
    with pytest.raises(AdoptionRefused, match="2 replicas have 1 places"):
        world.do("adopt", wanted("pod-a", replicas=2), [Standing(node_name="n1")])
    world.do("node_lost", "n1")
    with pytest.raises(AdoptionRefused, match="node n1 is not there"):
        world.adopt("pod-a", Standing(node_name="n1"))
    world.do("node_joined", inventory(gpus=2, generation=2))
    world.adopt("pod-a", Standing(node_name="n1"))
    with pytest.raises(ResourceExhausted):
        world.adopt("pod-b", Standing(node_name="n1"))


def test_repeating_it_is_harmless_and_another_spec_is_refused():
    world = World(inventory())
    first = world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(0,), counted=ONE))
    count = len(world.events)
    assert world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(0,), counted=ONE)) == first
    assert len(world.events) == count
    with pytest.raises(AlreadyExists):
        world.adopt("pod-a", Standing(node_name="n1"), gpus=2)


def test_no_waiting_work_slips_into_the_room():
    world = World(inventory(gpus=1))
    world.do("occupied", "n1", ONE)
    world.do("submit", wanted("w"))
    world.adopt("pod-a", Standing(node_name="n1", gpu_indexes=(0,), counted=ONE))
    assert world.core.workload("w").phase is WorkloadPhase.PENDING
    world.do("cancel", "pod-a")
    assert world.core.workload("w").phase is WorkloadPhase.PLACED
    assert world.is_replayed()
