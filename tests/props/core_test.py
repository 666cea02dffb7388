"""The core under any sequence of calls: nothing is held twice, and the events alone give the state back."""

import contextlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.builders.cluster import build_node, build_request, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core import retry_rounds
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.drains import list_drain_units
from eelgrid_controller.core.nodes import CorrectionRefused
from eelgrid_controller.core.workloads import list_healthy_replicas
from eelgrid_controller.placement.planner import Planner
from eelgrid_controller.runtime.journal_rows import CheckpointEncoder, decode_checkpoint
from eelgrid_controller.server.grpc.resource_views import ClusterTotals
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_controller.state.journal import digest_of
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Mobility,
    NodeState,
    ProcessSpec,
    WorkloadKind,
    WorkloadPhase,
)

NAMES = st.sampled_from(["a", "b", "c", "d"])
SHAPES = st.sampled_from(
    [
        {"gpus": 2, "model": "G2"},
        {"gpus": 4, "model": "T4", "cpu": 16},
        {"gpus": 8, "model": "G3", "cpu": 128, "pool": "x"},
        {"gpus": 0, "cpu": 8},
        {"gpus": 2, "model": "G2", "runs_processes": True},
        {"gpus": 1, "model": "G2", "cpu": 4, "memory_gib": 8},
    ]
)
PROCESS = ProcessSpec(argv=("true",), working_directory="/")
WANTED = st.one_of(
    st.fixed_dictionaries(
        {
            "gpus": st.integers(0, 2),
            "replicas": st.integers(1, 3),
            "mobility": st.just(Mobility.FIXED),
            "process": st.just(PROCESS),
        }
    ),
    st.fixed_dictionaries(
        {"gpus": st.just(0), "cpu": st.integers(1, 40), "memory_gib": st.integers(0, 64), "replicas": st.integers(1, 3)}
    ),
    st.fixed_dictionaries(
        {
            "gpus": st.just(1),
            "milli": st.sampled_from([100, 300, 500, 700, 1000]),
            "cpu": st.integers(0, 12),
            "replicas": st.integers(1, 4),
            "priority": st.integers(-1, 1),
        }
    ),
    st.fixed_dictionaries({"gpus": st.integers(2, 8), "cpu": st.integers(0, 40)}),
    st.fixed_dictionaries({"gpus": st.just(1), "models": st.sampled_from([("G2",), ("T4", "G3")])}),
    st.fixed_dictionaries(
        {
            "gpus": st.integers(0, 1),
            "cpu": st.integers(1, 8),
            "replicas": st.integers(1, 3),
            "mobility": st.sampled_from(Mobility),
            "kind": st.sampled_from([WorkloadKind.TRAINING_JOB, WorkloadKind.INFERENCE_SERVICE]),
        }
    ),
    st.fixed_dictionaries({"gpus": st.integers(1, 2), "required_traits": st.sampled_from([("t",), ("t", "u")])}),
)
OTHERS = st.builds(
    ExternalUsage,
    cpu_milli=st.sampled_from([0, 4000, 90_000]),
    gpu_count=st.integers(0, 3),
    traits=st.sampled_from([(), ("t",), ("t", "u")]),
    closed=st.sampled_from(["", "", "", "cordoned"]),
)


class Cluster(RuleBasedStateMachine):
    """Calls in any order, a journal of their events, and a second core that is fed the same calls."""

    def __init__(self):
        super().__init__()
        self.core = Core(ClusterState(ended_most=5), catalogue.load_catalogue())
        self.twin = Core(ClusterState(ended_most=5), catalogue.load_catalogue())
        self.journal = []
        self.now_ns = 0
        self.tally = None
        self.dumps = []

    def both(self, call):
        self.now_ns += 1
        step = call(self.core)
        with pytest.MonkeyPatch.context() as slow:
            # The twin looks at each pending workload anew.
            slow.setattr(retry_rounds._RetryStep, "_skip_waiting", lambda _, tickets: iter(tickets))
            again = call(self.twin)
        assert step == again
        self.journal.extend(step.events)
        for name in step.nodes:
            assert self.core.node_plan(name).node_name == name
        for event in step.events:
            for place in getattr(event, "placements", ()):
                record = self.core.state.nodes[place.node_name]
                assert not any(map(record.cordon_reason, [None, *map(record.gpu, place.gpu_uuids)]))
        return step

    @rule(wanted=WANTED)
    def submit(self, wanted):
        before = self.core.state.revision
        with contextlib.suppress(InvalidArgument):  # This cluster, even empty, could not hold it.
            assert (
                len(
                    drop_quotes(self.both(lambda core: core.submit(build_request(**wanted), now_ns=self.now_ns)).events)
                )
                == 2
            )
            return
        assert self.core.state.revision == before

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.core.state.workloads)))
        self.both(lambda core: core.cancel(key, now_ns=self.now_ns))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), replicas=st.integers(1, 6))
    def scale(self, data, replicas):
        key = data.draw(st.sampled_from(self.running()))
        placed = self.core.workload(key).placements
        if key in self.processes():
            with pytest.raises(FailedPrecondition):
                self.core.scale(key, replicas, now_ns=self.now_ns)
            return
        step = self.both(lambda core: core.scale(key, replicas, now_ns=self.now_ns))
        after = self.core.workload(key)
        alive = len(list_healthy_replicas(self.core.state, after))
        assert alive <= replicas
        assert after.spec.replicas == len(after.placements) >= 1
        if alive < replicas:
            assert not self.fits(replace(after.spec, replicas=1))
            assert {item.replica for item in after.placements} >= {item.replica for item in placed}
        assert drop_quotes(step.events) or alive == replicas or after.placements == placed

    @precondition(lambda self: self.running())
    @rule(data=st.data(), limit_w=st.sampled_from([None, 100.0, 150.0]))
    def limit(self, data, limit_w):
        key = data.draw(st.sampled_from(self.running()))
        if self.core.workload(key).spec.request.gpu_milli != 1000:
            return
        self.both(lambda core: core.set_limit(key, limit_w, now_ns=self.now_ns))
        for item in self.core.workload(key).placements:
            settings_w = {one.gpu_uuid: one.power_limit_w for one in self.core.node_plan(item.node_name).gpu_settings}
            assert {settings_w.get(uuid) for uuid in item.gpu_uuids} == {limit_w}

    @precondition(lambda self: self.processes())
    @rule(
        data=st.data(),
        attempt=st.integers(1, 2),
        state=st.sampled_from([AttemptState.RUNNING, AttemptState.ENDED, AttemptState.ENDED, AttemptState.LOST]),
        code=st.sampled_from([0, 0, 3]),
    )
    def report(self, data, attempt, state, code):
        """An agent reports a process: a stale report changes nothing; the last end frees everything."""
        key = data.draw(st.sampled_from(self.processes()))
        before = self.core.workload(key)
        place = data.draw(st.sampled_from(before.placements))
        status = AttemptStatus(workload_id=key, replica=place.replica, attempt=attempt, state=state, exit_code=code)
        step = self.both(lambda core: core.record_attempts(place.node_name, (status,), now_ns=self.now_ns))
        assert step.result == (attempt != before.attempt)
        after = self.core.state.workloads.get(key)
        if step.result:
            assert after == before
        elif after is not None:
            is_over = len(after.attempts) == len(after.placements) and all(one.is_over for one in after.attempts)
            assert after.phase.is_ended == is_over

    @rule(bouts=st.integers(1, 50))
    def idle(self, bouts):
        """One of the two works ahead of its next decisions, which stay those of the other."""
        for _ in range(bouts):
            if not self.core.work_ahead():
                break

    def processes(self):
        return [key for key in self.running() if self.core.workload(key).spec.process is not None]

    def fits(self, wanted):
        """Whether a fresh planner finds room on the nodes with the traits."""
        snapshot, required = self.core.snapshot(), set(wanted.required_traits)
        for row, name in enumerate(snapshot.names):
            record = self.core.state.nodes[name]
            runs = wanted.process is None or record.inventory.runs_processes
            if not (runs and required <= set(record.others.traits)):
                snapshot = snapshot.with_open(np.arange(len(snapshot.names)) != row)
        return bool(Planner().decide_placement(snapshot, wanted, self.core.state.policy.weights).placements)

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data(), others=OTHERS)
    def occupied(self, data, others):
        name = data.draw(st.sampled_from(sorted(self.core.state.nodes)))
        self.both(lambda core: core.update_external_usage(name, others, now_ns=self.now_ns))

    @precondition(lambda self: any(record.assignments for record in self.core.state.nodes.values()))
    @rule(data=st.data())
    def correct(self, data):
        """An engine says that replicas hold any other GPUs of their node: it is so, or nothing has changed."""
        state = self.core.state
        name = data.draw(st.sampled_from(sorted(key for key, record in state.nodes.items() if record.assignments)))
        record, before = state.nodes[name], state.digest()
        keys = data.draw(st.lists(st.sampled_from(sorted(record.assignments)), unique=True, min_size=1, max_size=4))
        there = [gpu.uuid for gpu in record.inventory.gpus]
        held = {}
        for key in keys:
            count = len(record.assignments[key].gpu_uuids)
            held[key] = tuple(data.draw(st.permutations(there))[:count])
        sums = (record.allocated_gpu_milli, record.allocated_cpu_milli)
        try:
            self.both(lambda core: core.correct_devices(name, held, now_ns=self.now_ns))
        except CorrectionRefused:
            with pytest.raises(CorrectionRefused):
                self.twin.correct_devices(name, held, now_ns=self.now_ns)
            assert state.digest() == before
            return
        assert sums == (record.allocated_gpu_milli, record.allocated_cpu_milli)
        for (workload_id, replica), uuids in held.items():
            places = {one.replica: one for one in self.core.workload(workload_id).placements}
            assert (
                set(places[replica].gpu_uuids) == set(uuids) == set(record.assignments[workload_id, replica].gpu_uuids)
            )

    def running(self):
        workloads = self.core.state.workloads
        return sorted(key for key, one in workloads.items() if one.phase is WorkloadPhase.PLACED)

    @rule(name=NAMES, shape=SHAPES)
    def join(self, name, shape):
        self.both(lambda core: core.register_node(build_node(name, **shape), now_ns=self.now_ns))

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data())
    def lose_node(self, data):
        name = data.draw(st.sampled_from(sorted(self.core.state.nodes)))
        self.both(lambda core: core.mark_node_lost(name, now_ns=self.now_ns))

    @precondition(lambda self: any(record.inventory.gpus for record in self.core.state.nodes.values()))
    @rule(data=st.data(), back=st.booleans())
    def turn_gpu(self, data, back):
        gpus = [(name, gpu.uuid) for name, record in self.core.state.nodes.items() for gpu in record.inventory.gpus]
        name, uuid = data.draw(st.sampled_from(gpus))
        self.both(lambda core: (core.mark_gpu_returned if back else core.mark_gpu_lost)(name, uuid, now_ns=self.now_ns))

    def draw_cordon(self, data):
        """A node, and GPUs of it or none."""
        name = data.draw(st.sampled_from(sorted(self.core.state.nodes)))
        indexes = [str(gpu.index) for gpu in self.core.state.nodes[name].inventory.gpus]
        return name, tuple(data.draw(st.lists(st.sampled_from(indexes), unique=True, max_size=2))) if indexes else ()

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data(), drain=st.none() | st.builds(DrainTerms, deadline_ns=st.integers(0, 40), force=st.booleans()))
    def cordon(self, data, drain):
        name, gpus = self.draw_cordon(data)
        before = self.core.state.digest()
        if drain is not None:
            self.core.preview_drain(name, gpus, drain, now_ns=self.now_ns)
        assert self.core.state.digest() == before
        self.both(lambda core: core.cordon_node(name, gpus, reason="fan", user="ann", drain=drain, now_ns=self.now_ns))

    @precondition(lambda self: self.core.state.nodes)
    @rule(data=st.data())
    def uncordon(self, data):
        name, gpus = self.draw_cordon(data)
        self.both(lambda core: core.uncordon_node(name, gpus, now_ns=self.now_ns))
        record = self.core.state.nodes[name]
        assert (
            record.cordon is None if not gpus else not {f"GPU-{name}-{gpu}" for gpu in gpus} & set(record.gpu_cordons)
        )

    @precondition(lambda self: self.core.state.draining)
    @rule()
    def drain(self):
        """Drains go on until nothing is due: then only work that may not leave, or finds no room, is left."""
        self.now_ns += 1
        taken = []
        for core in (self.core, self.twin):
            events = []
            while core.is_drain_due(self.now_ns):
                events.extend(core.continue_drains(now_ns=self.now_ns).events)
            taken.append(events)
        assert taken[0] == taken[1]
        self.journal.extend(taken[0])
        state = self.core.state
        for unit in list_drain_units(state, {name: state.nodes[name] for name in state.draining}, {}):
            nodes = [state.nodes[place.node_name] for place in unit.placements]
            is_bound = unit.workload.spec.mobility is Mobility.FIXED or unit.workload.spec.required_traits
            is_stuck = not all(record.is_ready for record in nodes) or is_bound
            if not is_stuck:
                assert not unit.terms.is_over(self.now_ns)
                assert unit.workload.spec.mobility is Mobility.RESTARTABLE or not self.fits(
                    replace(unit.workload.spec, replicas=len(unit.placements))
                )

    @rule()
    def reload(self):
        """A restart in the middle: the twin goes on from its dump."""
        self.twin = Core(ClusterState.load(json.loads(json.dumps(self.twin.state.dump()))), catalogue.load_catalogue())

    @rule()
    def begin_checkpoint(self):
        """What is taken over now is encoded only in the end, after all that follows."""
        self.dumps.append(self.core.state.begin_dump())

    @invariant()
    def nothing_is_held_twice(self):
        check_invariants(self.core.state)
        for record in self.core.state.nodes.values():
            held = [uuid for item in record.assignments.values() for uuid in item.gpu_uuids if item.gpu_milli == 1000]
            assert len(set(held)) == len(held)

    @invariant()
    def whoever_waits_has_no_room(self):
        """No capacity lies idle that the work waiting longest and highest could use."""
        assert not self.core.has_backlog
        for key in self.core.state.pending:
            wanted = self.core.state.workloads[key].spec
            assert not self.fits(wanted)
            assert self.core.state.workloads[key].reason

    @invariant()
    def sums_that_follow_are_those_of_all_records(self):
        if self.tally is None or not self.tally.update(self.core):
            self.tally = ClusterTotals(self.core)
        records, gpus, held_milli = self.core.state.nodes.values(), Counter(), Counter()
        for record in records:
            for gpu in record.inventory.gpus:
                gpus[gpu.model] += 1
                held_milli[gpu.model] += record.gpu_milli.get(gpu.uuid, 0)
        assert (self.tally.gpus, self.tally.held_milli) == (gpus, held_milli)
        assert self.tally.lost == sum(record.state is NodeState.LOST for record in records)
        assert self.tally.cpu_milli == sum(record.inventory.cpu_milli for record in records)
        assert self.tally.allocated_cpu_milli == sum(record.allocated_cpu_milli for record in records)

    @invariant()
    def rows_agree_with_the_records(self):
        snapshot = self.core.snapshot()
        for row, name in enumerate(snapshot.names):
            record = self.core.state.nodes[name]
            is_open = record.state is NodeState.READY and not record.others.closed and record.cordon is None
            assert bool(snapshot.nodes.available[row]) == is_open
            taken = min(record.others.gpu_count, sum(gpu.uuid not in record.gpu_milli for gpu in record.inventory.gpus))
            assert int(snapshot.nodes.gpu_free[row].sum()) == -1000 * taken + sum(
                1000 - record.gpu_milli.get(gpu.uuid, 0) for gpu in record.inventory.gpus
            )
            left = record.inventory.cpu_milli - record.allocated_cpu_milli - record.others.cpu_milli
            assert int(snapshot.nodes.cpu_free[row]) == max(0, left)

    def check_checkpoints(self, state):
        """Those begun at this revision are of this state."""
        while self.dumps and self.dumps[0].revision == state.revision:
            dump, encoder = self.dumps.pop(0), CheckpointEncoder(state.revision)
            for part in dump.parts():
                encoder.add_part(part)
            row = encoder.finish()
            plain = state.dump()
            assert row.digest == digest_of(plain)
            found = decode_checkpoint(row.seq, row.body, row.digest.encode(), row.crc32)
            assert (found.seq, found.state) == (state.revision, json.loads(json.dumps(plain)))

    def teardown(self):
        """The journal, through its text, gives the same state; so does the dump."""
        replayed = ClusterState(ended_most=5)
        self.check_checkpoints(replayed)
        for event in self.journal:
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
            self.check_checkpoints(replayed)
        check_invariants(replayed)
        digest = self.core.state.digest()
        assert replayed.digest() == digest == self.twin.state.digest()
        assert replayed.revision == len(self.journal)
        loaded = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        check_invariants(loaded)
        assert loaded.digest() == digest
        assert not self.dumps


Cluster.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestCluster = Cluster.TestCase
