"""A state machine over one core: what may happen to jobs of any kind, for properties of their conditions and arrays."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import WorkloadPhase
from tests.unit.attempts_test import ended, report

SECOND = 10**9


class JobMachine(RuleBasedStateMachine):
    """Jobs that are cancelled, requeued, end, fail, are evicted, and outlive restarts; who inherits makes `core` and `do`."""

    def jobs(self, *phases):
        return [key for key, one in self.core.state.workloads.items() if one.phase in phases]

    @precondition(lambda self: self.jobs(WorkloadPhase.PENDING))
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PENDING)))
        self.do(lambda core, now_ns: core.cancel(key, now_ns=now_ns))

    @precondition(lambda self: self.jobs(WorkloadPhase.PLACED))
    @rule(data=st.data(), code=st.sampled_from((0, 0, 3)), node_fault=st.sampled_from(("", "", "GPU 0: XID 79")))
    def finish(self, data, code, node_fault):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PLACED)))
        status = ended(key, code, attempt=self.core.state.workloads[key].attempt, node_fault=node_fault if code else "")
        self.do(lambda core, now_ns: report(core, status, now_ns=now_ns))

    @precondition(lambda self: self.jobs(WorkloadPhase.PLACED))
    @rule(data=st.data())
    def requeue(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PENDING, WorkloadPhase.PLACED)))
        one = self.core.state.workloads[key]
        is_cancelled = one.stopping_ns and not (one.requeuing or one.preempted_for)
        with pytest.raises(FailedPrecondition) if is_cancelled else contextlib.nullcontext():
            self.do(lambda core, now_ns: core.requeue(key, now_ns=now_ns))

    @precondition(lambda self: self.jobs(WorkloadPhase.PLACED))
    @rule(data=st.data())
    def evict(self, data):
        key = data.draw(st.sampled_from(self.jobs(WorkloadPhase.PLACED)))

        def call(core, now_ns):
            event = WorkloadEvicted(time_ns=now_ns, workload_id=key, reason="evicted: preempted")
            core._apply(event)
            step = core.retry_waiting(now_ns=now_ns)
            return replace(step, events=(event, *step.events))

        self.do(call)

    @rule()
    def restart(self):
        state = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        assert state.digest() == self.core.state.digest()
        self.core = Core(state, catalogue.load_catalogue())
        self.do(lambda core, now_ns: core.retry_waiting(now_ns=now_ns))
