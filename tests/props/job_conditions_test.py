"""Job conditions against a naive twin: nothing starts before its turn, and everything is tried in the step of its turn."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.job_machine import SECOND, JobMachine
from tests.state_invariants import check_invariants
from tests.unit.attempts_test import job, node

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadPlaced,
    WorkloadRetried,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import DependencyCondition, JobDependency, JobSchedule, Queue, WorkloadPhase

CONDITIONS = (DependencyCondition.SUCCEEDED, DependencyCondition.ENDED, DependencyCondition.NOT_SUCCEEDED)


class Chains(JobMachine):
    """A few jobs on few GPUs, held, timed, chained and failing at random; few ended ones are kept."""

    @initialize(kept=st.integers(0, 3), has_queues=st.booleans())
    def begin(self, kept, has_queues):
        self.now_ns = SECOND
        self.kept = kept
        self.core = Core(ClusterState(ended_most=kept), catalogue.load_catalogue())
        self.replayed = ClusterState(ended_most=kept)
        # What a reader of the events alone knows: conditions by job, and how each job ended.
        self.schedules, self.held, self.failures, self.paused, self.ends = {}, set(), {}, {}, {}
        self.do(lambda core, now_ns: core.register_node(node(gpus=2), now_ns=now_ns))
        if has_queues:
            policy = replace(self.core.state.policy, queues=(Queue(name="default"),))
            self.do(lambda core, now_ns: core.update_policy(policy, now_ns=now_ns))

    def do(self, call):
        """Makes a call and then what the loop does; follows its events."""
        self.now_ns += SECOND
        self.follow(call(self.core, self.now_ns))
        if self.core.is_round_due(self.now_ns):
            self.follow(self.core.retry_waiting(now_ns=self.now_ns))

    def follow(self, step):
        for event in step.events:
            again = event_from_plain(*event_to_plain(event))
            assert again == event
            self.replayed.apply(again)
            match event:
                case WorkloadPlaced():
                    assert self.find_unmet(event.workload_id) == "", f"{event.workload_id} started before its turn"
                    self.paused.pop(event.workload_id, None)
                case WorkloadRetried():
                    count = self.failures[event.workload_id] = self.failures.get(event.workload_id, 0) + 1
                    self.paused[event.workload_id] = self.now_ns + min(360, 10 * 2 ** (count - 1)) * SECOND
                case WorkloadCompleted():
                    self.ends[event.workload_id] = event.phase
                case WorkloadCancelled():
                    self.ends[event.workload_id] = WorkloadPhase.CANCELLED
                case _:
                    pass

    def is_met(self, one):
        phase = self.ends.get(one.workload_id)
        if phase is None:
            return False
        is_good = phase is WorkloadPhase.SUCCEEDED
        return {1: is_good, 2: True, 3: not is_good}[one.condition]

    def find_unmet(self, key):
        schedule = self.schedules[key]
        if key in self.held:
            return "held"
        if not all(map(self.is_met, schedule.after)):
            return "dependency"
        if schedule.begin_ns > self.now_ns:
            return "begin_time"
        return "retry" if self.paused.get(key, 0) > self.now_ns else ""

    def live(self):
        return self.jobs(WorkloadPhase.PENDING, WorkloadPhase.PLACED)

    @rule(data=st.data(), hold=st.booleans(), wait_s=st.sampled_from((0, 0, 2, 30)), retries=st.integers(0, 3))
    def submit(self, data, hold, wait_s, retries):
        known = list(self.core.state.workloads)
        parents = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
        after = tuple(
            JobDependency(workload_id=key, condition=data.draw(st.sampled_from(CONDITIONS))) for key in parents
        )
        begin_ns = self.now_ns + wait_s * SECOND if wait_s else 0
        schedule = JobSchedule(begin_ns=begin_ns, after=after, retries_most=retries)
        key, priority = f"w-{self.core.state.next_number}", data.draw(st.integers(0, 1))
        self.schedules[key] = schedule
        if hold:
            self.held.add(key)
        request = replace(job(key, schedule=schedule, priority=priority), hold=hold)
        self.do(lambda core, now_ns: core.submit(request, now_ns=now_ns))

    @precondition(lambda self: self.core.state.workloads)
    @rule()
    def submit_behind_what_is_not_there(self):
        before = self.core.state.revision
        request = job("ghost", schedule=JobSchedule(after=(JobDependency(workload_id="nobody"),)))
        try:
            self.core.submit(request, now_ns=self.now_ns)
        except InvalidArgument:
            assert self.core.state.revision == before
        else:
            raise AssertionError("an unknown workload was accepted")

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data())
    def hold(self, data):
        key = data.draw(st.sampled_from(list(self.core.state.workloads)))
        waits = self.core.state.workloads[key].phase is WorkloadPhase.PENDING
        if waits:
            self.held.add(key)
        try:
            self.do(lambda core, now_ns: core.hold(key, user="ana", now_ns=now_ns))
        except FailedPrecondition:
            assert not waits
            # Nothing was done, and time went by all the same.
            self.let_time_pass(0)

    @precondition(lambda self: self.held & self.core.state.workloads.keys())
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.held & self.core.state.workloads.keys())))
        self.held.discard(key)
        try:
            self.do(lambda core, now_ns: core.release(key, now_ns=now_ns))
        except FailedPrecondition:
            # It is requeued, and stops.
            assert self.core.state.workloads[key].phase is WorkloadPhase.PLACED
            self.held.add(key)
            self.let_time_pass(0)

    @precondition(lambda self: self.jobs(WorkloadPhase.PLACED))
    @rule(data=st.data())
    def requeue_and_hold(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PLACED)))
        self.held.add(key)
        self.do(lambda core, now_ns: core.requeue(key, held_by="ana", now_ns=now_ns))

    @rule(wait_s=st.sampled_from((1, 10, 40, 400)))
    def let_time_pass(self, wait_s):
        self.now_ns += wait_s * SECOND
        if self.core.is_round_due(self.now_ns):
            self.follow(self.core.retry_waiting(now_ns=self.now_ns))

    @invariant()
    def what_waits_waits_for_its_condition_or_for_room_and_for_nothing_else(self):
        if not hasattr(self, "core"):
            return
        state = self.core.state
        assert not self.core.has_backlog
        check_invariants(state)
        for key in self.jobs(WorkloadPhase.PENDING):
            unmet, workload = self.find_unmet(key), state.workloads[key]
            assert state.pending.is_parked(key) == bool(unmet)
            assert unmet in ("", workload.reason.partition(":")[0])
            assert workload.failures == self.failures.get(key, 0)
            if not unmet:
                assert not self.core._chooser.decide_placement(workload.spec, workload_id=key).placements

    @invariant()
    def no_child_waits_for_what_can_never_be(self):
        if not hasattr(self, "core"):
            return
        for key in self.live():
            for one in self.schedules[key].after:
                assert one.workload_id not in self.ends or self.is_met(one)
                assert one.workload_id in self.core.state.workloads

    @invariant()
    def ended_work_is_forgotten_once_nothing_live_depends_on_it(self):
        if not hasattr(self, "core"):
            return
        needed = {one.workload_id for key in self.live() for one in self.schedules[key].after}
        kept = [key for key in self.core.state.workloads if key in self.ends]
        assert len([key for key in kept if key not in needed]) <= self.kept
        assert self.core.state.live_workloads == len(self.live())

    @invariant()
    def replaying_the_events_gives_the_same_state(self):
        if hasattr(self, "core"):
            assert self.replayed.digest() == self.core.state.digest()


TestChains = Chains.TestCase
TestChains.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
