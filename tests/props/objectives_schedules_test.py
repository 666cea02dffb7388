"""Whatever happens in whatever order, the control loop keeps its bounds: random lives of a small fleet.

Services whose pages come, lack or hang, jobs that tell progress or do not, nodes that go and
come back, pools that are enforced or not, work that comes and ends, a restart in between.
"""

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.objectives import build_powered_node, build_service, build_training_job, run_objectives
from tests.builders.profiles import build_engine_points
from tests.builders.server import MemoryJournal

from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import BudgetScope, NodeState, PowerBudget, WorkloadPhase

NODES = ("n1", "n2", "n3")
BUDGET = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=3600.0)
RUN = st.tuples(st.integers(1, 15), st.sampled_from((0.0, 30.0, 120.0)), st.sampled_from(((), (), (0,), range(50))))
ACTION = st.one_of(
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
    st.tuples(st.just("join"), st.sampled_from(NODES)),
    st.tuples(st.just("enforce"), st.booleans()),
    st.tuples(st.just("budget"), st.booleans()),
    st.tuples(st.just("submit"), st.sampled_from("st"), st.integers(1, 3)),
    st.tuples(st.just("train"), st.sampled_from("jk"), st.integers(1, 2), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.sampled_from("stjk")),
    st.tuples(st.just("restart")),
)
STEPS = st.lists(st.tuples(ACTION, RUN), min_size=4, max_size=10)


class Life:
    """One world and the work that jobs have done."""

    def __init__(self, journal):
        self.journal = journal
        self.work = {}
        self.taken = {}  # ids by letter: a cancelled one is never used again

    def key(self, letter):
        return f"{letter}{self.taken.get(letter, 0)}"

    async def step(self, world, step):
        match step:
            case ("lose", name):
                if name in world.loop.core.state.nodes:
                    await world.loop.command(lambda core, now_ns: core.mark_node_lost(name, now_ns=now_ns))
            case ("join", name):
                await world.join(build_powered_node(name))
            case ("enforce", wanted):
                await world.enforce(*(("p",) if wanted else ()))
            case ("budget", wanted):
                await world.enforce("p", budgets=(BUDGET,) if wanted else ())
            case ("submit", letter, replicas):
                await world.loop.submit(build_service(self.key(letter), replicas=replicas, replicas_most=6))
            case ("train", letter, replicas, gpus):
                await world.loop.submit(build_training_job(self.key(letter), replicas=replicas, gpus=gpus))
            case ("cancel", letter):
                await world.loop.cancel(self.key(letter))
                self.taken[letter] = self.taken.get(letter, 0) + 1

    async def cycle(self, world, rate_hz, missing):
        state = world.loop.core.state
        world.now_s += 5.0
        world.samples(*(name for name, one in state.nodes.items() if one.state is NodeState.READY), power_w=1000.0)
        for key, workload in state.workloads.items():
            if workload.phase is WorkloadPhase.PLACED and workload.spec.training is not None and rate_hz > 20.0:
                self.work[key] = self.work.get(key, 0.0) + rate_hz
                world.control_loop.progress(key, self.work[key])
            elif key in world.pages.asked and workload.spec.service is not None:
                world.serve(key, rate_hz, 5.0, missing=missing)
        before = {key: one.power_limit_w for key, one in state.workloads.items()}
        replicas = {key: one.placements for key, one in state.workloads.items()}
        await world.cycle(0.0)
        self.check(world, before, replicas)

    @staticmethod
    def check(world, limits_w, replicas):
        state, control_loop = world.loop.core.state, world.control_loop
        for key, workload in state.workloads.items():
            limit_w = workload.power_limit_w
            assert limit_w is None or 100.0 <= limit_w <= 400.0
            if key in control_loop.objectives_status.advice:
                # What is only observed is never changed.
                assert limit_w == limits_w[key]
                assert workload.placements == replicas[key]
        live = {key for key, one in state.workloads.items() if one.phase is WorkloadPhase.PLACED}
        told = control_loop.objectives_status.steering
        assert all(1 <= one.target <= 6 for one in told.services)
        assert {one.name for one in (*told.services, *told.jobs)} <= live
        # Watts beyond a budget are never claimed in silence.
        assert all(one.claim_w <= one.room_w + 1e-6 or one.shortfall_w > 0.0 for one in told.budgets)
        assert len(control_loop._desk._limits) <= 8
        assert set(control_loop._promised) >= live
        assert control_loop.promises().price_ratio == 1.0


async def live(steps):
    journal = MemoryJournal()
    lived = Life(journal)
    begin = ("submit", "s", 1), ("train", "j", 2, 2)
    now_s, rest = 1_700_000_000.0, [*((action, (20, 120.0, ())) for action in begin), *steps]
    while rest:
        async with run_objectives(journal, start_s=now_s, window_s=8.0) as world:
            if not world.loop.core.state.nodes:
                await world.join(build_powered_node("n1"), build_powered_node("n2"))
                await world.enforce("p")
                await world.loop.record_measurements(build_engine_points())
            while rest:
                action, (cycles, rate_hz, missing) = rest.pop(0)
                if action == ("restart",):
                    break
                with contextlib.suppress(Fault):  # an operator's call that cannot be done now
                    await lived.step(world, action)
                for _ in range(cycles):
                    await lived.cycle(world, rate_hz, missing)
            now_s = world.now_s + 20.0


@settings(max_examples=20, deadline=None)
@given(STEPS)
def test_bounds_hold_whatever_happens(steps):
    asyncio.run(live(steps))
