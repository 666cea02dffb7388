"""Claims that work stands somewhere, among plans, corrections and releases in any order, against a slow obvious twin."""

import contextlib
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.builders.cluster import GIB, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.nodes import CorrectionRefused
from eelgrid_controller.core.workloads import AdoptionRefused
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import NodeState, WorkloadPhase

GPUS = {"a": 2, "b": 4, "c": 4}
CPU_MILLI = 32_000
NAMES = st.sampled_from(sorted(GPUS))
IDS = st.sampled_from(["one", "two", "three", "four"])
NAMED = st.lists(st.integers(0, 4), max_size=2, unique=True).map(lambda found: tuple(sorted(found)))
AMOUNTS = st.builds(
    ExternalUsage,
    cpu_milli=st.sampled_from([0, 1000, 9000]),
    gpu_count=st.integers(0, 2),
    gpu_indexes=NAMED,
    closed=st.sampled_from(["", "x"]),
)
COUNTED = st.builds(ExternalUsage, cpu_milli=st.sampled_from([0, 1000]), gpu_count=st.integers(0, 2), gpu_indexes=NAMED)
STANDING = st.builds(
    RunningReplica,
    node_name=st.sampled_from([*GPUS, "nowhere"]),
    gpu_indexes=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    is_exact=st.booleans(),
    counted=COUNTED,
)
CLAIMS = st.builds(
    Adoption,
    standing=st.lists(STANDING, max_size=4).map(tuple),
    first=st.integers(0, 4),
    released=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    in_parts=st.booleans(),
)
SHAPES = st.fixed_dictionaries({"gpus": st.integers(0, 2), "cpu": st.sampled_from([1, 9])})


class Untenable(Exception):
    """The twin refuses."""


class Twin:
    """Who holds which devices and how much CPU of which node, in lists that are searched."""

    def __init__(self):
        self.others = {}  # by node
        self.lost = set()  # nodes, and (node, index)
        self.held = {}  # (workload, replica) -> (node, devices, CPU)

    def seats(self, key):
        return {replica: found for (name, replica), found in self.held.items() if name == key}

    def claimed(self, key, shape, claim, *, is_known):
        """What is held by the workload afterwards, and what others hold; raises Untenable."""
        before = self.seats(key)
        if claim.first == 0:
            if is_known:
                return before, self.others
        elif not before:
            raise Untenable
        elif claim.first != max(before) + 1:
            return before, self.others
        after = {replica: found for replica, found in before.items() if replica not in claim.released}
        is_less, others, refused = len(after) < len(before), dict(self.others), False
        rest = [found for (name, _), found in self.held.items() if name != key]
        number = claim.first
        for one in claim.standing:
            name = one.node_name
            if name not in others or name in self.lost:
                refused = True
                continue
            there = [*rest, *after.values()]
            used = {index for where, devices, _ in there if where == name for index in devices}
            named = set(others[name].gpu_indexes) - set(one.counted.gpu_indexes)
            free = [
                index for index in range(GPUS[name]) if index not in used | named and (name, index) not in self.lost
            ]
            chosen = [index for index in dict.fromkeys(one.gpu_indexes) if index in free][: shape["gpus"]]
            if not one.is_exact:
                chosen += [index for index in free if index not in chosen][: shape["gpus"] - len(chosen)]
            left_gpus = max(0, others[name].gpu_count - one.counted.gpu_count)
            left_cpu = max(0, others[name].cpu_milli - one.counted.cpu_milli)
            cpu = shape["cpu"] * 1000
            if (
                len(chosen) < shape["gpus"]
                or (not one.is_exact and GPUS[name] - len(used) - len(chosen) < left_gpus)
                or CPU_MILLI - sum(amount for where, _, amount in there if where == name) - left_cpu < cpu
            ):
                refused = True
                continue
            after[number] = (name, tuple(sorted(chosen)), cpu)
            number += 1
            others[name] = ExternalUsage(
                cpu_milli=left_cpu, gpu_count=left_gpus, gpu_indexes=tuple(sorted(named)), closed=others[name].closed
            )
        if refused and not (claim.in_parts and (number > claim.first or is_less)):
            raise Untenable
        if not after:
            raise Untenable
        return after, others


class Claims(RuleBasedStateMachine):
    """A core, its twin, and a journal."""

    def __init__(self):
        super().__init__()
        self.core = Core(ClusterState(ended_most=3), catalogue.load_catalogue())
        self.twin = Twin()
        self.journal = []
        self.now_ns = 0

    def do(self, what, *args):
        self.now_ns += 1
        step = getattr(self.core, what)(*args, now_ns=self.now_ns)
        self.journal.extend(step.events)
        return step

    def hear(self):
        """The twin takes what the core decided on its own, if it can be."""
        held = {}
        for key, workload in self.core.state.workloads.items():
            for one in workload.placements if workload.phase is WorkloadPhase.PLACED else ():
                amount = workload.spec.request.cpu_milli
                held[key, one.replica] = (one.node_name, tuple(sorted(one.gpu_indexes)), amount)
        for name in GPUS:
            used = [index for where, devices, _ in held.values() if where == name for index in devices]
            assert len(used) == len(set(used)), "a device is held twice"
        self.twin.held = held
        self.twin.others = {name: record.others for name, record in self.core.state.nodes.items()}

    @rule(key=IDS, shape=SHAPES, claim=CLAIMS, is_next=st.booleans())
    def claim(self, key, shape, claim, is_next):
        found, before = self.core.state.workloads.get(key), self.core.state.digest()
        if found is not None:  # another shape has another name
            asked = found.spec.request
            shape = {"gpus": asked.gpu_count, "cpu": asked.cpu_milli // 1000}
            if is_next and found.placements:
                first = 1 + max(one.replica for one in found.placements)
                claim = Adoption(standing=claim.standing, first=first, released=claim.released, in_parts=claim.in_parts)
        wanted = build_request(key=key, replicas=max(1, len(claim.standing)), **shape)
        try:
            seats, others = self.twin.claimed(key, shape, claim, is_known=found is not None)
        except Untenable:
            with pytest.raises(AdoptionRefused):
                self.do("adopt", wanted, claim)
            assert self.core.state.digest() == before
            return
        step = self.do("adopt", wanted, claim)
        placed = {one.replica: (one.node_name, one.gpu_indexes) for one in step.result.placements}
        if step.result.phase is WorkloadPhase.PLACED:
            assert placed == {replica: (name, devices) for replica, (name, devices, _) in seats.items()}
            assert step.result.spec.replicas == len(placed)
        assert {name: record.others for name, record in self.core.state.nodes.items()} == others
        with contextlib.suppress(AdoptionRefused):  # of what was left out, where nothing else is left to do
            assert not self.do("adopt", wanted, claim).events, "said again, it changes nothing"
        self.hear()

    @rule(key=st.sampled_from(["five", "six"]), shape=SHAPES, replicas=st.integers(1, 2))
    def submit(self, key, shape, replicas):
        if key not in self.core.state.workloads:
            with contextlib.suppress(InvalidArgument):
                self.do("submit", build_request(key=key, replicas=replicas, **shape))
        self.hear()

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data(), replicas=st.integers(1, 4))
    def scale(self, data, replicas):
        self.do("scale", data.draw(st.sampled_from(sorted({key for key, _ in self.twin.held}))), replicas)
        self.hear()

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data())
    def cancel(self, data):
        self.do("cancel", data.draw(st.sampled_from(sorted({key for key, _ in self.twin.held}))))
        self.hear()

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data())
    def correct(self, data):
        """A kubelet gave a replica any devices of its node."""
        key = data.draw(st.sampled_from(sorted(self.twin.held)))
        name, devices, _ = self.twin.held[key]
        order = data.draw(st.permutations(range(GPUS[name])))[: len(devices)]
        with contextlib.suppress(CorrectionRefused):
            self.do("correct_devices", name, {key: tuple(f"GPU-{name}-{index}" for index in order)})
        self.hear()

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data(), others=AMOUNTS)
    def occupy(self, data, others):
        self.do("update_external_usage", data.draw(st.sampled_from(sorted(self.core.state.nodes))), others)
        self.hear()

    @rule(name=NAMES)
    def join(self, name):
        self.do("register_node", build_node(name, gpus=GPUS[name], cpu=CPU_MILLI // 1000, memory_gib=1000))
        self.twin.lost = {one for one in self.twin.lost if one != name and one[0] != name}
        self.hear()

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def lose(self, data, index):
        name = data.draw(st.sampled_from(sorted(self.core.state.nodes)))
        if index is None:
            self.do("mark_node_lost", name)
        else:
            self.do("mark_gpu_lost", name, f"GPU-{name}-{index}")
        self.twin.lost.add(name if index is None else (name, index))
        self.hear()

    @invariant()
    def it_is_as_the_twin_has_it(self):
        check_invariants(self.core.state)
        for name, record in self.core.state.nodes.items():
            assert (record.state is NodeState.LOST) == (name in self.twin.lost)
            assert record.allocated_memory_bytes == GIB * sum(where == name for where, _, _ in self.twin.held.values())

    def teardown(self):
        replayed = ClusterState(ended_most=3)
        for event in self.journal:
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        assert replayed.digest() == self.core.state.digest()


Claims.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
TestClaims = Claims.TestCase
