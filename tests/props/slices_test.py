"""Slices under any sequence of calls: no slice is held twice, and the events alone give the state back."""

import contextlib
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.builders.cluster import build_request
from tests.builders.partition import (
    build_mig_node,
    build_planned_node,
    build_slice_points,
    build_sliced_service,
    set_partition_policy,
)
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.partition.problem import PartitionError
from eelgrid_controller.partition.recommendation import PartitionsRefused, recommend_partitions, unfinished_gpus
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import PolicyChanged, event_from_plain, event_to_plain
from eelgrid_controller.state.mig_layouts import find_mig_geometry
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import WorkloadPhase

NAMES = st.sampled_from(["a", "b", "c"])


class Cluster(RuleBasedStateMachine):
    """Plans, and everything that may happen between the plan and its stages."""

    def __init__(self):
        super().__init__()
        self.core = Core(ClusterState(ended_most=3), catalogue.load_catalogue())
        self.journal = []
        self.stages = []
        self.now_ns = 0
        for name in "ab":
            self.take(self.core.register_node(build_mig_node(name), now_ns=0))
        self.take(self.core.record_measurements(build_slice_points(), now_ns=0))
        self.shift(partitioned=True)
        self.take(self.core.submit(build_sliced_service("s", 15.0), now_ns=0))

    def take(self, step):
        self.now_ns += 1
        self.journal.extend(step.events)
        for name in step.nodes:
            assert self.core.node_plan(name).node_name == name
        return step

    def shift(self, *, partitioned):
        policy_before = self.core.state.policy
        set_partition_policy(self.core, partitioned=partitioned, now_ns=self.now_ns)
        if self.core.state.policy != policy_before:
            self.journal.append(PolicyChanged(time_ns=self.now_ns, policy=self.core.state.policy))

    @rule(key=st.sampled_from("stu"), rate_hz=st.sampled_from([2.0, 15.0, 40.0]))
    def submit(self, key, rate_hz):
        if key not in self.core.state.workloads:
            self.take(self.core.submit(build_sliced_service(key, rate_hz), now_ns=self.now_ns))

    @rule(milli=st.sampled_from([500, 1000]))
    def submit_other(self, milli):
        with contextlib.suppress(InvalidArgument):
            self.take(self.core.submit(build_request(gpus=1, milli=milli), now_ns=self.now_ns))

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.core.state.workloads)))
        self.take(self.core.cancel(key, now_ns=self.now_ns))

    @rule(name=NAMES, gpus=st.sampled_from([1, 2, 2, 2]), pool=st.sampled_from(["mig"] * 5 + ["x"]))
    def join(self, name, gpus, pool):
        self.take(self.core.register_node(build_mig_node(name, gpus=gpus, pool=pool), now_ns=self.now_ns))

    @rule(name=NAMES, really=st.integers(0, 2))
    def lose(self, name, really):
        if name in self.core.state.nodes and not really:
            self.take(self.core.mark_node_lost(name, now_ns=self.now_ns))

    @rule(scale=st.sampled_from([1.0, 0.5]))
    def measure(self, scale):
        self.take(self.core.record_measurements(build_slice_points(scale=scale), now_ns=self.now_ns))

    @rule(taken=st.integers(0, 5))
    def hand_over(self, taken):
        self.shift(partitioned=bool(taken))

    @rule(halfway=st.booleans())
    def agents_act(self, halfway):
        for name, record in list(self.core.state.nodes.items()):
            if record.is_ready:
                done = build_planned_node(self.core, record, lambda uuid: not halfway or uuid.endswith("0"))
                self.take(self.core.register_node(done, now_ns=self.now_ns))
                assert self.core.state.nodes[name].is_ready

    @rule(
        keys=st.sets(st.sampled_from("stuv")),
        rate_hz=st.sampled_from([2.0, 15.0, 40.0]),
        scale=st.sampled_from([1.0, 0.5, 2.0]),
    )
    def change(self, keys, rate_hz, scale):
        """Other services, other points, and a plan for them that is carried out."""
        for key in keys:
            if key in self.core.state.workloads:
                self.take(self.core.cancel(key, now_ns=self.now_ns))
            else:
                self.submit(key, rate_hz)
        self.measure(scale)
        self.plan(stages=4, acting=True)

    @rule(stages=st.integers(0, 3), acting=st.booleans())
    def plan(self, stages, acting):
        with contextlib.suppress(PartitionError):
            self.stages = list(recommend_partitions(self.core.survey_partitions()).stages)
        for _ in range(stages):
            self.apply()
            if acting:
                self.agents_act(halfway=False)

    @rule()
    def apply(self):
        """The next stage of the newest plan, however much changed since."""
        if not self.stages:
            return
        stage = self.stages.pop(0)
        before = self.core.state.digest()
        try:
            self.take(self.core.apply_partitions(stage, now_ns=self.now_ns))
        except PartitionsRefused:
            assert self.core.state.digest() == before
            self.stages = []
            return
        seats = tuple(turn.seat for turn in stage.turns)
        if unfinished_gpus(self.core.state, seats):
            self.take(self.core.apply_partitions(seats, now_ns=self.now_ns))

    @rule()
    def reload(self):
        self.core = Core(ClusterState.load(json.loads(json.dumps(self.core.state.dump()))), catalogue.load_catalogue())

    @invariant()
    def nothing_is_held_twice(self):
        """By the catalogue and the placements alone: spans of slices, and whole GPUs beside them."""
        check_invariants(self.core.state)
        taken = {}
        for workload in self.core.state.workloads.values():
            if workload.phase is not WorkloadPhase.PLACED:
                continue
            assert workload.placements
            for place in workload.placements:
                for uuid in place.gpu_uuids:
                    taken.setdefault(uuid, []).append((place, workload))
        gpus = {gpu.uuid: gpu for record in self.core.state.nodes.values() for gpu in record.inventory.gpus}
        for uuid, held in taken.items():
            slices = [place.gpu_instance for place, _ in held if place.gpu_instance]
            if slices:
                assert len(slices) == len(held), "a cut GPU is nobody else's"
            if uuid in gpus and all(one.profile for one in slices):
                geometry = find_mig_geometry(gpus[uuid])
                assert geometry.conflict([(geometry.profile(one.profile), one.start) for one in slices]) is None
            elif slices and not all(one.profile for one in slices):
                assert len(slices) == 1

    @invariant()
    def plans_name_what_stands(self):
        for name, record in self.core.state.nodes.items():
            devices = {
                child.uuid
                for gpu in record.inventory.gpus
                for one in gpu.gpu_instances
                for child in one.compute_instances
            }
            named = [item for item in self.core.node_plan(name).assignments if item.gpu_instance is not None]
            whole = {gpu.uuid for gpu in record.inventory.gpus if not gpu.mig_enabled}
            uuids = [uuid for item in named for uuid in item.gpu_uuids]
            assert len(set(uuids)) == len(uuids)
            assert set(uuids) <= devices | whole

    def teardown(self):
        replayed = ClusterState(ended_most=3)
        for event in self.journal:
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        check_invariants(replayed)
        assert replayed.digest() == self.core.state.digest()
        loaded = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        check_invariants(loaded)
        assert loaded.digest() == self.core.state.digest()


Cluster.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
TestSlices = Cluster.TestCase
