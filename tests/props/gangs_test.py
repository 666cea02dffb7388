"""Gangs against a slow twin: never a part of what must start together, nothing kept for what waits, and no deadlock."""

import json
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    WorkloadCancelled,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import GangPart, PreemptionWithin, Queue, QueuePreemption, QueueQuota, WorkloadPhase

SECOND = 10**9
NAMES = ("x", "y")


class TwinGang:
    """What a reader of the events knows of one gang: its parts in order, which run, and whether it has to start whole."""

    def __init__(self, part):
        self.part, self.live, self.running, self.has_ended = part, [], set(), False

    @property
    def must_start_whole(self):
        return not self.running and not self.has_ended

    @property
    def required(self):
        return self.live[: self.part.parts_least or self.part.parts]

    @property
    def is_complete(self):
        return len(self.live) >= self.part.parts


def always_fits(free, sizes):
    """Returns whether parts of these sizes fit in this order on nodes with so many free GPUs, wherever each one goes."""
    if not sizes:
        return True
    places = [number for number, count in enumerate(free) if count >= sizes[0]]
    return bool(places) and all(
        always_fits([count - sizes[0] * (number == place) for number, count in enumerate(free)], sizes[1:])
        for place in places
    )


class Gangs(RuleBasedStateMachine):
    """Two gangs and single work on a few nodes, held, cancelled, ended, evicted, and restarted at random."""

    @initialize(gpus=st.lists(st.integers(2, 4), min_size=1, max_size=2), has_queues=st.booleans())
    def begin(self, gpus, has_queues):
        self.now_ns, self.has_queues = SECOND, has_queues
        self.core = Core(ClusterState(ended_most=1), catalogue.load_catalogue())
        self.replayed = ClusterState(ended_most=1)
        self.gangs, self.gang_of, self.held = {}, {}, set()
        for number, count in enumerate(gpus):
            self.do(
                lambda core, now_ns, n=number, c=count: core.register_node(build_node(f"n{n}", gpus=c), now_ns=now_ns)
            )
        if has_queues:
            quota = QueueQuota(resource="gpu", nominal=4000)
            rules = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
            queues = (Queue(name="a", quotas=(quota,)), Queue(name="b", quotas=(quota,), preemption=rules))
            policy = replace(self.core.state.policy, queues=queues)
            self.do(lambda core, now_ns: core.update_policy(policy, now_ns=now_ns))

    def do(self, call):
        """Makes a call and then what the loop does; follows its events."""
        self.now_ns += SECOND
        self.follow(call(self.core, self.now_ns))
        while self.core.has_backlog:
            self.follow(self.core.retry(now_ns=self.now_ns))

    def follow(self, step):
        whole = {name for name, gang in self.gangs.items() if gang.must_start_whole}
        started, gone = {}, {}
        for event in step.events:
            again = event_from_plain(*event_to_plain(event))
            assert again == event
            self.replayed.apply(again)
            match event:
                case WorkloadSubmitted() if event.spec.gang is not None:
                    name = event.spec.gang.name
                    if name not in self.gangs:
                        self.gangs[name] = TwinGang(event.spec.gang)
                        whole.add(name)
                    self.gangs[name].live.append(event.workload_id)
                    self.gang_of[event.workload_id] = name
                case WorkloadPlaced() if event.workload_id in self.gang_of:
                    name = self.gang_of[event.workload_id]
                    assert event.workload_id not in self.held
                    assert self.gangs[name].is_complete or name not in whole
                    self.gangs[name].running.add(event.workload_id)
                    if name in whole:
                        started.setdefault(name, set()).add(event.workload_id)
                case WorkloadEvicted() if event.workload_id in self.gang_of:
                    name = self.gang_of[event.workload_id]
                    gang = self.gangs[name]
                    if event.preempted_for:
                        victims, ran = gone.setdefault(name, (set(), gang.running.copy()))
                        victims.add(event.workload_id)
                        if not gang.has_ended and victims & set(gang.required):
                            assert ran <= self.list_preempted(step, event.preempted_for)
                    gang.running.discard(event.workload_id)
                    if gang.must_start_whole:
                        whole.add(name)
                        started.pop(name, None)
                case WorkloadCancelled() if event.workload_id in self.gang_of:
                    self.forget(event.workload_id)
                case _:
                    pass
        for name, parts in started.items():
            gang = self.gangs[name]
            assert parts >= set(gang.required), f"{parts} of {gang.required} started"

    def list_preempted(self, step, gainer):
        return {
            event.workload_id
            for event in step.events
            if isinstance(event, WorkloadEvicted) and event.preempted_for == gainer
        }

    def forget(self, key):
        gang = self.gangs[self.gang_of.pop(key)]
        gang.has_ended |= not gang.must_start_whole
        gang.live.remove(key)
        gang.running.discard(key)
        if not gang.live:
            self.gangs = {name: one for name, one in self.gangs.items() if one is not gang}

    def jobs(self, *phases):
        return [key for key, one in self.core.state.workloads.items() if one.phase in phases]

    def submit(self, gpus, replicas, priority, queue, gang=None):
        key = f"w-{self.core.state.next_number}"
        queue = queue if self.has_queues else ""
        request = build_request(key, gpus=gpus, replicas=replicas, priority=priority, queue=queue, gang=gang)
        try:
            self.do(lambda core, now_ns: core.submit(request, now_ns=now_ns))
        except InvalidArgument as error:
            return error
        return None

    @rule(gpus=st.integers(1, 3), replicas=st.integers(1, 2), priority=st.integers(0, 1), queue=st.sampled_from("ab"))
    def submit_single(self, gpus, replicas, priority, queue):
        self.submit(gpus, replicas, priority, queue)

    @rule(
        name=st.sampled_from(NAMES),
        parts=st.integers(2, 4),
        least=st.integers(0, 3),
        gpus=st.integers(1, 3),
        replicas=st.integers(1, 2),
        priority=st.integers(0, 1),
        queue=st.sampled_from("ab"),
    )
    def submit_part(self, name, parts, least, gpus, replicas, priority, queue):
        known = self.gangs.get(name)
        part = GangPart(name=name, parts=parts, parts_least=min(least, parts)) if known is None else known.part
        is_full = known is not None and (known.is_complete or not known.must_start_whole)
        error = self.submit(gpus, replicas, priority, queue, part)
        assert not is_full or error is not None

    @precondition(lambda self: len(self.gangs) < len(NAMES))
    @rule(
        sizes=st.lists(st.integers(1, 2), min_size=2, max_size=3), least=st.integers(0, 2), queue=st.sampled_from("ab")
    )
    def submit_a_whole_gang(self, sizes, least, queue):
        name = next(one for one in NAMES if one not in self.gangs)
        for gpus in sizes:
            self.submit(gpus, 1, 0, queue, GangPart(name=name, parts=len(sizes), parts_least=least))

    @precondition(lambda self: self.jobs(WorkloadPhase.PENDING, WorkloadPhase.PLACED))
    @rule(data=st.data())
    def end(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PENDING, WorkloadPhase.PLACED)))
        self.held.discard(key)
        self.do(lambda core, now_ns: core.cancel(key, now_ns=now_ns))

    @precondition(lambda self: any(gang.running for gang in self.gangs.values()))
    @rule(data=st.data())
    def end_all_that_runs_of_a_gang(self, data):
        gang = self.gangs[data.draw(st.sampled_from([name for name, one in self.gangs.items() if one.running]))]
        for key in sorted(gang.running):
            self.do(lambda core, now_ns, key=key: core.cancel(key, now_ns=now_ns))

    @precondition(lambda self: self.jobs(WorkloadPhase.PENDING))
    @rule(data=st.data())
    def hold(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PENDING)))
        self.held.add(key)
        self.do(lambda core, now_ns: core.hold(key, user="ana", now_ns=now_ns))

    @precondition(lambda self: self.held & self.core.state.workloads.keys())
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.held & self.core.state.workloads.keys())))
        self.held.discard(key)
        self.do(lambda core, now_ns: core.release(key, now_ns=now_ns))

    @precondition(lambda self: self.jobs(WorkloadPhase.PLACED))
    @rule(data=st.data(), all_parts=st.booleans())
    def evict(self, data, all_parts):
        first = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PLACED)))
        gang = self.gangs.get(self.gang_of.get(first, ""))
        keys = sorted(gang.running) if all_parts and gang is not None else [first]

        def call(core, now_ns):
            events = [WorkloadEvicted(time_ns=now_ns, workload_id=key, reason="evicted: drained") for key in keys]
            for event in events:
                core._apply(event)
            step = core.retry_waiting(now_ns=now_ns)
            return replace(step, events=(*events, *step.events))

        self.do(call)

    @rule()
    def restart(self):
        state = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        assert state.digest() == self.core.state.digest()
        self.core = Core(state, catalogue.load_catalogue())
        self.do(lambda core, now_ns: core.retry_waiting(now_ns=now_ns))

    def free(self):
        return [sum(gpu.uuid not in one.gpu_milli or not one.gpu_milli[gpu.uuid] for gpu in one.inventory.gpus)
                for one in self.core.state.nodes.values()]  # fmt: skip

    @invariant()
    def a_gang_that_fits_wherever_its_parts_go_does_not_wait_for_capacity(self):
        if not hasattr(self, "core"):
            return
        state = self.core.state
        check_invariants(state)
        for name, gang in self.gangs.items():
            if not gang.must_start_whole:
                continue
            if not gang.is_complete or set(gang.required) & self.held:
                waiting = [key for key in gang.live if key not in self.held]
                assert all(state.pending.is_parked(key) for key in gang.live)
                assert {state.workloads[key].reason.partition(":")[0] for key in waiting} <= {"gang"}, name
                continue
            assert not any(state.pending.is_parked(key) for key in gang.required)
            specs = [state.workloads[key].spec for key in gang.required]
            order = sorted(specs, key=lambda spec: (-spec.request.gpu_count, -spec.replicas))
            sizes = [spec.request.gpu_count for spec in order for _ in range(spec.replicas)]
            if not self.has_queues:
                assert not always_fits(self.free(), sizes), f"gang {name} waits though it fits"

    @invariant()
    def single_work_and_parts_of_a_started_gang_wait_only_where_they_do_not_fit(self):
        if not hasattr(self, "core") or self.has_queues:
            return
        for key in self.jobs(WorkloadPhase.PENDING):
            gang = self.gangs.get(self.gang_of.get(key, ""))
            if key not in self.held and (gang is None or not gang.must_start_whole):
                spec = self.core.state.workloads[key].spec
                assert not self.core._chooser.decide_placement(spec, workload_id=key).placements

    @invariant()
    def replaying_the_events_gives_the_same_state(self):
        if hasattr(self, "core"):
            assert self.replayed.digest() == self.core.state.digest()

    def teardown(self):
        if hasattr(self, "core"):
            for key in self.jobs(WorkloadPhase.PENDING, WorkloadPhase.PLACED):
                self.do(lambda core, now_ns, key=key: core.cancel(key, now_ns=now_ns))
            assert self.free() == [len(one.inventory.gpus) for one in self.core.state.nodes.values()]
            assert not self.core.state.gangs.dump()


TestGangs = Gangs.TestCase
TestGangs.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_a_part_that_its_gang_started_without_makes_no_part_of_it_end():
    """The second part has the higher priority and room nowhere else; what it could take is what the gang needs."""
    state = Gangs()
    state.begin(gpus=[2, 2], has_queues=True)
    state.submit_part(gpus=2, least=1, name="y", parts=2, priority=0, queue="b", replicas=2)
    state.submit_part(gpus=1, least=0, name="y", parts=2, priority=1, queue="b", replicas=1)
    state.restart()
    assert state.core.workload("w-1").phase is WorkloadPhase.PLACED
    assert state.core.workload("w-2").phase is WorkloadPhase.PENDING
    state.teardown()
