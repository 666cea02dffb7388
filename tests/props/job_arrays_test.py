"""Limits of arrays against a naive reader of the events: never more than N at once, and no slot unused while one waits."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.job_machine import SECOND, JobMachine
from tests.state_invariants import check_invariants
from tests.unit.attempts_test import job, node

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.job_arrays import ElementChange
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    ArraySubmitted,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadRetried,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    DependencyCondition,
    JobArrayRequest,
    JobDependency,
    JobSchedule,
    Queue,
    WorkloadPhase,
)

CONDITIONS = (DependencyCondition.SUCCEEDED, DependencyCondition.ENDED, DependencyCondition.NOT_SUCCEEDED)
ENDED = (WorkloadPhase.SUCCEEDED, WorkloadPhase.FAILED, WorkloadPhase.CANCELLED)


class Arrays(JobMachine):
    """A few arrays and jobs on few GPUs, whose elements end, fail, are held, cancelled and evicted at random."""

    @initialize(kept=st.integers(0, 3), gpus=st.integers(1, 4), has_queues=st.booleans())
    def begin(self, kept, gpus, has_queues):
        self.now_ns, self.kept = SECOND, kept
        self.core = Core(ClusterState(ended_most=kept), catalogue.load_catalogue())
        self.replayed = ClusterState(ended_most=kept)
        # What the events say: the limit and the elements of each array, which of them run, and how each ended.
        self.limits, self.elements, self.running, self.ends = {}, {}, set(), {}
        self.do(lambda core, now_ns: core.register_node(node(gpus=gpus), now_ns=now_ns))
        if has_queues:
            policy = replace(self.core.state.policy, queues=(Queue(name="default"),))
            self.do(lambda core, now_ns: core.update_policy(policy, now_ns=now_ns))

    def do(self, call):
        """Makes a call and then what the loop does; follows its events."""
        self.now_ns += SECOND
        self.follow(call(self.core, self.now_ns))
        while self.core.has_backlog:
            self.follow(self.core.retry(now_ns=self.now_ns))
        if self.core.is_round_due(self.now_ns):
            self.follow(self.core.retry_waiting(now_ns=self.now_ns))

    def follow(self, step):
        for event in step.events:
            again = event_from_plain(*event_to_plain(event))
            assert again == event
            self.replayed.apply(again)
            match event:
                case ArraySubmitted():
                    self.limits[event.array_id] = event.running_most
                    self.elements[event.array_id] = event.workload_ids
                case WorkloadPlaced(workload_id=key):
                    self.running.add(key)
                    array = self.array_of(key)
                    count = sum(one in self.running for one in self.elements.get(array, ()))
                    assert not self.limits.get(array) or count <= self.limits[array], f"{count} of {array} run"
                case WorkloadEvicted(workload_id=key) | WorkloadRetried(workload_id=key):
                    self.running.discard(key)
                case WorkloadCancelled(workload_id=key):
                    self.running.discard(key)
                    self.ends[key] = WorkloadPhase.CANCELLED
                case WorkloadCompleted(workload_id=key, phase=phase):
                    self.running.discard(key)
                    self.ends[key] = phase
                case _:
                    pass

    def array_of(self, key):
        return next((name for name, keys in self.elements.items() if key in keys), None)

    def find_end(self, name):
        """How a job, or an array as a whole, has ended; None while it has not."""
        ends = [self.ends.get(key) for key in self.elements.get(name, (name,))]
        if None in ends:
            return None
        order = (WorkloadPhase.FAILED, WorkloadPhase.CANCELLED, WorkloadPhase.SUCCEEDED)
        return next(phase for phase in order if phase in ends)

    @rule(
        data=st.data(),
        count=st.integers(1, 7),
        limit=st.integers(0, 3),
        hold=st.booleans(),
        retries=st.integers(0, 1),
        priority=st.integers(0, 1),
    )
    def submit_array(self, data, count, limit, hold, retries, priority):
        known = [name for name in self.elements if name in self.core.state.arrays]
        whole = [key for key in known if len(self.core.state.arrays.list_elements(key)) == len(self.elements[key])]
        parents = data.draw(st.lists(st.sampled_from(whole), unique=True, max_size=1)) if whole else []
        after = tuple(
            JobDependency(
                workload_id=key,
                condition=data.draw(st.sampled_from(CONDITIONS)),
                each=len(self.elements[key]) == count and data.draw(st.booleans()),
            )
            for key in parents
        )
        key = f"w-{self.core.state.next_number}"
        schedule = JobSchedule(after=after, retries_most=retries)
        array = JobArrayRequest(indexes=f"0-{count - 1}" + (f"%{limit}" if limit else ""))
        request = replace(job(key, schedule=schedule, priority=priority), hold=hold, array=array)
        self.do(lambda core, now_ns: core.submit(request, now_ns=now_ns))
        # Asked again, as by a caller who got no answer.
        if key in self.core.state.arrays and len(self.core.state.arrays.list_elements(key)) == count:
            assert self.core.submit(request, now_ns=self.now_ns).events == ()

    @rule(priority=st.integers(0, 2))
    def submit_job(self, priority):
        key = f"w-{self.core.state.next_number}"
        self.do(lambda core, now_ns: core.submit(job(key, priority=priority), now_ns=now_ns))

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data(), holds=st.booleans())
    def hold_or_release(self, data, holds):
        key = data.draw(st.sampled_from(list(self.core.state.workloads)))
        try:
            if holds:
                self.do(lambda core, now_ns: core.hold(key, user="ana", now_ns=now_ns))
            else:
                self.do(lambda core, now_ns: core.release(key, now_ns=now_ns))
        except FailedPrecondition:
            self.let_time_pass(0)

    @precondition(lambda self: any(name in self.core.state.arrays for name in self.elements))
    @rule(data=st.data(), change=st.sampled_from((ElementChange.CANCEL, ElementChange.HOLD, ElementChange.RELEASE)))
    def change_array(self, data, change):
        arrays = self.core.state.arrays
        name = data.draw(st.sampled_from([name for name in self.elements if name in arrays]))
        ids = arrays.list_elements(name)[::-1]
        self.do(lambda core, now_ns: core.change_elements(change, ids, "bo", now_ns=now_ns))

    @rule(wait_s=st.sampled_from((1, 10, 40)))
    def let_time_pass(self, wait_s):
        self.now_ns += wait_s * SECOND
        self.do(lambda core, now_ns: core.retry_waiting(now_ns=now_ns))

    def may_start(self, workload):
        """Whether nothing but its array or the room keeps a workload from starting, as the events say."""
        schedule = workload.spec.schedule
        for one in () if schedule is None else schedule.after:
            end = self.find_end(one.workload_id)
            is_good = end is WorkloadPhase.SUCCEEDED
            if end is None or not {1: is_good, 2: True, 3: not is_good}[one.condition]:
                return False
        return not workload.held_by and workload.not_before_ns <= self.now_ns

    @invariant()
    def a_slot_is_free_only_if_nothing_waits_for_one(self):
        if not hasattr(self, "core"):
            return
        state = self.core.state
        check_invariants(state)
        for name, keys in self.elements.items():
            known = [state.workloads[key] for key in keys if key in state.workloads]
            pending = [one for one in known if one.phase is WorkloadPhase.PENDING and self.may_start(one)]
            parked = [one for one in pending if state.pending.is_parked(one.workload_id)]
            tried = len(pending) - len(parked) + sum(one.phase is WorkloadPhase.PLACED for one in known)
            limit = self.limits[name]
            assert not parked or tried == limit
            assert not limit or tried <= limit
            assert {one.reason.partition(":")[0] for one in parked} <= {"array"}
            for one in pending:
                if one not in parked:
                    assert not self.core._chooser.decide_placement(one.spec, workload_id=one.workload_id).placements
                    assert not one.reason.startswith("array: its array runs")

    @invariant()
    def an_array_ends_as_its_elements_did_and_a_replay_is_the_same(self):
        if not hasattr(self, "core"):
            return
        for name, keys in self.elements.items():
            if len(self.core.state.arrays.list_elements(name)) == len(keys):
                whole = self.core.workload_or_array(name)
                assert (whole.phase if whole.phase in ENDED else None) == self.find_end(name)
        assert self.replayed.digest() == self.core.state.digest()


TestArrays = Arrays.TestCase
TestArrays.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
