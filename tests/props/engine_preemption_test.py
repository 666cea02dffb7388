"""Preemption with victims that an engine evicts: what holds of preemption in general holds with them, and they end or run on."""

import contextlib
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.builders.cluster import build_node, build_request
from tests.props.preemption_test import NODES, WANTED, PreemptingCluster

from eelgrid_controller.state.attempts import holds_until_stopped
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import EnforcementMode, PoolMode, WorkloadKind


class EvictingCluster(PreemptingCluster):
    """That cluster, with an engine that runs some of the work in an enforced pool."""

    def submit_of_engine(self, data, wanted):
        queue = data.draw(st.sampled_from(self.leaves))
        kind = WorkloadKind.BATCH_JOB
        self.count += 1
        known = {**wanted, "process": None, "kind": kind, "evicted_by_engine": True}
        request = build_request(f"w{self.count}", queue=queue, cpu=1, **known)
        with contextlib.suppress(InvalidArgument):
            self.both(lambda core: core.submit(request, now_ns=self.now_ns))

    @rule(data=st.data(), wanted=WANTED)
    def submit_what_an_engine_runs(self, data, wanted):
        self.enforce()
        self.submit_of_engine(data, wanted)

    def enforce(self):
        if not self.core.state.policy.pools:
            for name, gpus in NODES.items():
                if name not in self.lost:
                    node = build_node(name, gpus=gpus, pool="p", runs_processes=True, agent_version="1")
                    self.both(lambda core, node=node: core.register_node(node, now_ns=self.now_ns))
            pools = (PoolMode(pool="p", mode=EnforcementMode.ENFORCE),)
            self.both(lambda core: core.update_policy(replace(core.state.policy, pools=pools), now_ns=self.now_ns))

    @precondition(lambda self: self.core.list_evictions())
    @rule(data=st.data(), goes=st.booleans(), again_s=st.sampled_from([0.0, 3.0]))
    def a_victim_goes_or_runs_on(self, data, goes, again_s):
        key = data.draw(st.sampled_from([one.workload_id for one in self.core.list_evictions()]))
        held = self.core.workload(key).placements
        if goes:
            self.both(lambda core: core.cancel(key, now_ns=self.now_ns))
            assert not self.core.workload(key).preempted_for
        else:
            self.both(lambda core: core.refuse_preemption(key, "why", again_s=again_s, now_ns=self.now_ns))
            assert self.core.workload(key).placements == held

    def teardown(self):
        if hasattr(self, "journal"):
            # Once every victim has ended, nobody makes room or waits for that any more.
            for _ in range(200):
                victims = [one for one in self.core.state.workloads.values() if one.preempted_for]
                engine = [one for one in victims if one.spec.evicted_by_engine]
                if not engine:
                    break
                self.both(lambda core, key=engine[0].workload_id: core.cancel(key, now_ns=self.now_ns))
            assert not self.core.list_evictions()
            for nomination in self.core.state.nominations:
                left = [self.core.state.workloads.get(key) for key in nomination.victims]
                assert any(one is not None and holds_until_stopped(one.spec) and one.preempted_for for one in left)
        super().teardown()


EvictingCluster.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestEvictingCluster = EvictingCluster.TestCase
# Not collected a second time.
del PreemptingCluster
