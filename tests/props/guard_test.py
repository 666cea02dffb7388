"""The guard as a state machine: epochs never fall, and no recommendation outlives its lease."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import ApplyStatus, Assignment, GpuSetting, NodePlan, PlanApplied

SECOND = 1_000_000_000
UUIDS = ("GPU-0", "GPU-1", "GPU-2")
HERE = frozenset(UUIDS[:2])

assignments = st.builds(
    Assignment,
    workload_id=st.sampled_from(["a", "b", "c"]),
    replica=st.integers(0, 1),
    gpu_uuids=st.lists(st.sampled_from(UUIDS), max_size=3).map(tuple),
    gpu_milli=st.integers(0, 1000),
)
plans = st.builds(
    NodePlan,
    node_name=st.sampled_from(["n", "n", "n", "other"]),
    epoch=st.integers(0, 6),
    lease_s=st.floats(1.0, 30.0),
    enforce=st.booleans(),
    assignments=st.lists(assignments, max_size=4).map(tuple),
    gpu_settings=st.lists(
        st.builds(GpuSetting, gpu_uuid=st.sampled_from(UUIDS), power_limit_w=st.floats(1.0, 500.0)), max_size=3
    ).map(tuple),
)


class GuardMachine(RuleBasedStateMachine):
    """Plans, words and silence in any order."""

    @initialize()
    def begin(self):
        self.guard = Guard("n")
        self.now_ns = 0
        self.heard_ns = None
        self.epoch = 0

    @rule(plan=plans)
    def offer(self, plan):
        before = self.guard.plan
        verdict = self.guard.offer_plan(plan, gpu_uuids=HERE, now_ns=self.now_ns)
        applied = verdict.answer or self.guard.complete_plan(verdict, ())
        assert decode_message(PlanApplied, encode_message(applied)) == applied
        assert applied.epoch == plan.epoch
        taken = plan.node_name == "n" and plan.epoch > self.epoch
        assert (self.guard.plan is plan) == taken or before == plan
        if taken or (before == plan and plan.node_name == "n"):
            self.heard_ns = self.now_ns
        self._check_items(plan, applied, taken=taken)
        assert not taken or {uuid for a in verdict.assignments for uuid in a.gpu_uuids} <= HERE
        self.epoch = max(self.epoch, self.guard.epoch)

    def _check_items(self, plan, applied, *, taken):
        if not taken:
            return
        outcomes = {(result.subject, result.status) for result in applied.results}
        for setting in plan.gpu_settings:
            if plan.enforce or setting.gpu_uuid not in HERE:
                assert (setting.gpu_uuid, ApplyStatus.OBSERVED) not in outcomes
                assert (setting.gpu_uuid, ApplyStatus.REFUSED) in outcomes
        assert not any(status is ApplyStatus.APPLIED for _, status in outcomes), "nothing was written to a device"

    @rule()
    def word(self):
        self.guard.renew_lease(self.now_ns)
        if self.guard.plan is not None and not self.guard.expired:
            self.heard_ns = self.now_ns

    @rule(seconds=st.floats(0.1, 40.0))
    def silence(self, seconds):
        self.now_ns += int(seconds * SECOND)
        was = self.guard.expired or self.guard.plan is None
        event = self.guard.check_lease(now_ns=self.now_ns, wall_ns=self.now_ns)
        over = not was and self.now_ns - self.heard_ns >= int(self.guard.plan.lease_s * SECOND)
        assert (event is not None) == over

    @invariant()
    def epochs_never_fall(self):
        if hasattr(self, "guard"):
            assert self.guard.epoch >= self.epoch

    @invariant()
    def nothing_outlives_the_lease(self):
        if hasattr(self, "guard") and self.guard.expired:
            assert self.guard.settings == ()
            assert self.guard.plan is not None
            assert self.guard.lease_left_s(self.now_ns) == 0.0


GuardTest = GuardMachine.TestCase
GuardTest.settings = settings(max_examples=80, stateful_step_count=30)
