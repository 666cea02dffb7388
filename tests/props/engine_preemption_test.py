"""Preemption with victims that an engine evicts: what holds of preemption holds with them, and each goes or runs on."""

import contextlib
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_node, build_request
from tests.props import preemption_test as preemption

from eelgrid_controller.state.attempts import holds_until_stopped
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    EnforcementMode,
    Mobility,
    PoolMode,
    PreemptionReclaim,
    PreemptionWithin,
    QueuePreemption,
)

RULES = st.builds(
    QueuePreemption,
    within=st.sampled_from([PreemptionWithin.LOWER_PRIORITY, PreemptionWithin.LOWER_PRIORITY, PreemptionWithin(0)]),
    reclaim=st.sampled_from([PreemptionReclaim.NOMINAL, PreemptionReclaim.FAIR_SHARE]),
    min_runtime_s=st.sampled_from([0.0, 0.0, 3.0]),
)
SUBMISSIONS = st.fixed_dictionaries(
    {
        "queue": st.sampled_from(["q0", "q1"]),
        "gpus": st.integers(1, 2),
        "replicas": st.sampled_from([1, 1, 2]),
        "priority": st.integers(0, 2),
        "process": st.sampled_from([None, None, None, preemption.PROCESS]),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), SUBMISSIONS),
        st.tuples(st.just("victim goes"), st.integers(0, 5)),
        st.tuples(st.just("victim runs on"), st.integers(0, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("time"), st.integers(1, 5)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("node"), st.sampled_from(sorted(preemption.NODES))),
    ),
    min_size=4,
    max_size=25,
)


class EvictingCluster(preemption.PreemptingCluster):
    """That cluster in an enforced pool, full of what an engine runs for one queue."""

    def fill(self, rules):
        self.begin([(4, one, 1.0) for one in rules], work_most=10**9)
        for name in preemption.NODES:
            self.join(name)
        pools = (PoolMode(pool="p", mode=EnforcementMode.ENFORCE),)
        self.both(lambda core: core.update_policy(replace(core.state.policy, pools=pools), now_ns=self.now_ns))
        for _ in range(4):
            self.submit_work({"queue": "q0", "gpus": 2, "process": None})

    def join(self, name):
        node = build_node(name, gpus=preemption.NODES[name], pool="p", runs_processes=True, agent_version="1")
        self.both(lambda core: core.register_node(node, now_ns=self.now_ns))

    def submit_work(self, wanted):
        self.count += 1
        wanted = {**wanted, "mobility": Mobility.FIXED, "evicted_by_engine": wanted["process"] is None}
        request = build_request(f"w{self.count}", cpu=1, **wanted)
        with contextlib.suppress(InvalidArgument):
            self.both(lambda core: core.submit(request, now_ns=self.now_ns))

    def take_step(self, what, of):
        now = self.core
        victims, known = [one.workload_id for one in now.list_evictions()], sorted(now.state.workloads)
        if what == "submit":
            self.submit_work(of)
        elif what == "victim goes" and victims:
            key = victims[of % len(victims)]
            self.both(lambda core: core.cancel(key, now_ns=self.now_ns))
            assert not self.core.workload(key).preempted_for
        elif what == "victim runs on" and victims:
            key = victims[of % len(victims)]
            held = now.workload(key).placements
            self.both(lambda core: core.refuse_preemption(key, "why", again_s=float(of), now_ns=self.now_ns))
            assert self.core.workload(key).placements == held
        elif what == "cancel":
            self.both(lambda core: core.cancel(known[of % len(known)], now_ns=self.now_ns))
        elif what == "time":
            self.pass_time_by(of)
        elif what == "restart":
            self.restart()
        elif what == "node" and of in self.lost:
            self.lost.discard(of)
            self.join(of)
        elif what == "node":
            self.lost.add(of)
            self.both(lambda core: core.mark_node_lost(of, now_ns=self.now_ns))

    def pass_time_by(self, seconds):
        self.both(lambda core: core.continue_drains(now_ns=self.now_ns), seconds)

    def restart(self):
        # Who could not be evicted is not kept: both forget it.
        preemption.PreemptingCluster.restart_the_twin(self)

    def check(self):
        self.the_state_is_sound()
        self.quotas_are_kept()
        for nomination in self.core.state.nominations:
            left = [self.core.state.workloads.get(key) for key in nomination.victims]
            assert any(one is not None and holds_until_stopped(one.spec) and one.preempted_for for one in left)


@given(rules=st.tuples(RULES, RULES), steps=STEPS)
@settings(deadline=None, max_examples=120)
def test_victims_of_an_engine_go_or_run_on_and_nobody_gets_what_they_hold_before(rules, steps):
    cluster = EvictingCluster()
    cluster.fill(rules)
    for what, of in steps:
        cluster.take_step(what, of)
        cluster.check()
    # Once each victim has ended, nobody waits for one.
    while victims := cluster.core.list_evictions():
        cluster.take_step("victim goes", 0)
        assert len(cluster.core.list_evictions()) <= len(victims) + 8
        cluster.check()
    cluster.teardown()
