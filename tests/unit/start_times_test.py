"""How long replicas take to serve is measured, apart for nodes with their model data, and services are planned with it."""

import contextlib
import json
from dataclasses import replace

import pytest
from tests.builders.objectives import build_powered_node, build_service, run_objectives
from tests.unit.objectives_services_test import ready, rounds, standing

from eelgrid_controller.objectives.observation import ClusterObservation, ObservedNode
from eelgrid_controller.objectives.start_times import StartTime, StartTimes, find_start_time, is_divided
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.measurements import MeasuredStart, ReplicaStarts
from eelgrid_protos.faults import ResourceExhausted
from eelgrid_protos.messages import ModelData, Placement, Workload, WorkloadPhase

BEGIN_S = 1_700_000_000.0
DATA = ModelData(data_names=("llama",))


class Starts:
    """A service whose replicas come and serve as a test says; a cycle every 5 s, each with a round of pages."""

    def __init__(self, *, stated_s=60.0, placed_s=0.0, model_data=DATA):
        spec = replace(build_service("s").spec, model_data=model_data)
        self.times, self.now_s, self.stated_s = StartTimes(), BEGIN_S, stated_s
        self.workload = Workload(
            workload_id="s", spec=spec, phase=WorkloadPhase.PLACED, placed_ns=int((BEGIN_S + placed_s) * 1e9)
        )
        self.policy = ClusterState().policy
        near = replace(build_powered_node("near"), model_data=("llama", "other"))
        self.nodes = {
            "near": ObservedNode(near, is_ready=True),
            "far": ObservedNode(build_powered_node("far"), is_ready=True),
        }
        self.serving = set()
        self.kept = ReplicaStarts()

    def cycle(self, count=1, *, grown=frozenset()):
        for _ in range(count):
            self.now_s += 5.0
            world = ClusterObservation(at_s=self.now_s, policy=self.policy, nodes=self.nodes)
            self.times.observe_places("s", self.workload, world)
            self.times.observe_pages("s", self.serving, grown, world)
            self.kept.add_starts(self.times.collect_measured())

    def place(self, replica, node="far"):
        places = {one.replica: one for one in self.workload.placements} | {
            replica: Placement(replica=replica, node_name=node)
        }
        self.workload = replace(self.workload, placements=tuple(places.values()))

    def start(self, replica, cycles, node="far", **known):
        """A replica that serves so many cycles after its place was first seen."""
        self.place(replica, node)
        self.cycle(cycles)
        self.serving.add(replica)
        self.cycle(**known)

    def find(self, **near):
        return find_start_time(self.kept.get("s"), self.stated_s, near.get("s"))

    @property
    def is_divided(self):
        return is_divided(self.kept.get("s"))


def test_until_a_start_was_seen_what_is_stated_holds():
    starts = Starts()
    starts.cycle()
    starts.place(0)
    starts.cycle(3)
    assert starts.find() == StartTime(60.0, is_measured=False)


@pytest.mark.parametrize(
    ("stated_s", "cycles", "found_s"),
    [
        # Seen 55 to 65 s after it began.
        (60.0, 12, 60.0),
        (55.0, 12, 55.0),
        (50.0, 12, 90.0),
        (70.0, 12, 90.0),
        (300.0, 12, 90.0),
        (60.0, 1, 10.0),
        (60.0, 60, 360.0),
        (60.0, 400, 2005.0),
    ],
)
def test_what_is_stated_holds_as_long_as_the_start_may_have_taken_so_long(stated_s, cycles, found_s):
    starts = Starts(stated_s=stated_s)
    starts.cycle()
    starts.start(0, cycles)
    assert starts.find() == StartTime(found_s, is_measured=True)


def test_the_longest_of_the_last_four_counts():
    starts = Starts(stated_s=1000.0)
    starts.cycle()
    starts.start(0, 30)
    assert starts.find().seconds == 180.0
    for replica in (1, 2, 3):
        starts.start(replica, 3)
        assert starts.find().seconds == 180.0
    starts.start(4, 3)
    assert starts.find().seconds == 20.0


def test_a_service_that_ran_before_this_process_says_nothing():
    starts = Starts(placed_s=-3600.0)
    starts.start(0, 3)
    assert not starts.find().is_measured
    starts.start(1, 3)
    assert starts.find().is_measured


def test_the_first_replica_of_a_new_service_counts_from_its_placement():
    starts = Starts(placed_s=-2.0, stated_s=5.0)
    starts.start(0, 3)
    # First seen 7 s after its placement.
    assert starts.find() == StartTime(30.0, is_measured=True)


def test_a_replica_that_moves_starts_again_and_one_that_goes_or_has_grown_is_no_start():
    starts = Starts(stated_s=1000.0)
    starts.cycle()
    starts.start(0, 3)
    starts.serving.clear()
    starts.start(0, 30, "near")
    assert starts.is_divided
    gone = Starts(stated_s=1000.0)
    gone.cycle()
    gone.place(0)
    gone.cycle(5)
    gone.workload = replace(gone.workload, placements=())
    gone.cycle()
    assert not gone.find().is_measured
    gone.start(1, 3, grown=frozenset((1,)))
    assert not gone.find().is_measured


def test_starts_with_the_model_data_are_apart_from_those_without():
    starts = Starts(stated_s=1000.0)
    starts.cycle()
    starts.start(0, 60, "far")
    assert not starts.is_divided
    # Whoever has the data takes no longer than whoever fetches them.
    assert starts.find(s=True).seconds == starts.find(s=False).seconds == starts.find().seconds == 360.0
    starts.start(1, 3, "near")
    assert starts.is_divided
    assert (starts.find(s=True).seconds, starts.find(s=False).seconds) == (20.0, 360.0)
    starts.kept.forget("s")
    assert not starts.is_divided
    assert not starts.find().is_measured


def test_a_short_start_with_the_data_says_nothing_of_one_without():
    starts = Starts(stated_s=1000.0)
    starts.cycle()
    starts.start(0, 3, "near")
    assert starts.find(s=False) == StartTime(1000.0, is_measured=False)
    assert starts.find() == StartTime(20.0, is_measured=True)


def test_work_that_names_no_model_data_has_one_kind_of_start():
    starts = Starts(stated_s=1000.0, model_data=None)
    starts.cycle()
    starts.start(0, 60, "far")
    starts.start(1, 3, "near")
    assert not starts.is_divided
    assert starts.find().seconds == 360.0


async def test_a_service_that_starts_slowly_is_planned_further_ahead_and_not_taken_for_serving():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        await rounds(world, 2, 5.0)
        assert "in 10 s need" in standing(world).reason
        # More replicas come, and none of them answers for two minutes.
        await rounds(world, 8, 90.0, missing=range(1, 8))
        assert world.replicas("s") > 1
        await rounds(world, 4, 90.0)
        start = world.control_loop.objectives_status.services["s"].start
        assert start.is_measured
        assert start.seconds >= 120.0
        assert f"in {start.seconds:g} s need" in standing(world).reason
        # The next that come are waited for as long, and count as serving no sooner.
        serving = standing(world).serving
        await rounds(world, 4, 200.0, missing=range(serving, 8))
        assert standing(world).serving == serving


async def test_the_next_start_is_planned_by_whether_its_node_has_the_model_data():
    async with run_objectives() as world:
        near = replace(build_powered_node("n1", gpus=2), model_data=("llama",))
        service = build_service("s", replicas_most=8)
        service = replace(service, spec=replace(service.spec, model_data=DATA))
        await ready(world)
        for name in ("n1", "n2"):
            await world.loop.cordon_node(name)
        await world.join(replace(near, node_name="near"), build_powered_node("far", gpus=8))
        await world.loop.submit(service)
        await rounds_of(world, 3, 5.0)
        assert [one.node_name for one in world.workload("s").placements] == ["near"]
        await rounds_of(world, 3, 60.0)
        await rounds_of(world, 6, 150.0, missing=range(2, 8))
        await rounds_of(world, 3, 150.0)
        assert {one.node_name for one in world.workload("s").placements} == {"near", "far"}
        assert is_divided(world.loop.core.state.starts.get("s"))
        assert (await world.control_loop._find_near({"s": world.workload("s")}, ["s"])) == {"s": False}
        await world.join(replace(near, node_name="near2"))
        assert (await world.control_loop._find_near({"s": world.workload("s")}, ["s"])) == {"s": True}


async def test_what_was_measured_is_kept_over_a_restart_as_long_as_the_service_lives(tmp_path):
    with contextlib.closing(open_journal(tmp_path, new_cluster_id="c")) as journal:
        async with run_objectives(journal) as world:
            await ready(world, build_service("s", replicas_most=8))
            await rounds(world, 2, 5.0)
            await rounds(world, 8, 90.0, missing=range(1, 8))
            await rounds(world, 4, 90.0)
            known, now_s = world.control_loop.objectives_status.services["s"].start, world.now_s
            assert known.is_measured
    with contextlib.closing(open_journal(tmp_path, new_cluster_id="c")) as journal:
        async with run_objectives(journal, start_s=now_s + 100.0) as world:
            await rounds_of(world, 2, 90.0)
            assert world.control_loop.objectives_status.services["s"].start == known
            starts = world.loop.core.state.starts
            assert starts.get("s")
            assert ReplicaStarts.load(json.loads(json.dumps(starts.dump()))).dump() == starts.dump()
            await world.loop.cancel("s")
            assert starts.select({"s"}) == {}
            # A start that was measured while its service ended is no event.
            late = MeasuredStart(workload_id="s", had_model_data=False, least_s=1.0, most_s=2.0)
            assert await world.loop.record_measurements((), (late,)) == 0


async def test_a_start_that_the_core_refuses_is_told_again(monkeypatch):
    async with run_objectives() as world:
        refused, record = [], world.loop.record_measurements

        async def refuse(points, starts=()):
            if starts and len(refused) < 3:
                refused.append(starts)
                raise ResourceExhausted("full")
            return await record(points, starts)

        monkeypatch.setattr(world.loop, "record_measurements", refuse)
        await ready(world, build_service("s", replicas_most=8))
        await rounds(world, 2, 5.0)
        await rounds(world, 8, 90.0, missing=range(1, 8))
        await rounds(world, 8, 90.0)
        assert len(refused) == 3
        assert world.loop.core.state.starts.get("s")


async def rounds_of(world, count, rate_hz, **changes):
    await world.cycle()
    await rounds(world, count, rate_hz, **changes)
