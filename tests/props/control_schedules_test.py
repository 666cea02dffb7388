"""Any schedule of events: no budget is passed, gangs end even, nothing is taken away for want of news."""

from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.builders.objectives import build_metrics_window
from tests.power_fleet_rig import LIMITS_W, Fleet, tree

from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import solve_allocation
from eelgrid_controller.objectives.power.control_events import (
    AllocationSolved,
    ControlSettings,
    ControlTick,
    JobMissed,
    LimitConfirmed,
    LimitFailed,
    LimitPhase,
    NodeLeaseExpired,
    NodeReachable,
    PricesSet,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
)
from eelgrid_controller.objectives.power.power_model import BestEffort, Deadline, MaxSlowdown
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, StepFunction
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget, ScalingLimits
from eelgrid_controller.objectives.services.service_model import RequestService
from eelgrid_controller.profiles.queueing_model import QuantileObjective, ServiceStation

NODES = ("n1", "n2", "n3")
PROMISES = (MaxSlowdown(0.05), MaxSlowdown(0.2), BestEffort(0.5), Deadline(3000.0, 400.0))
TARIFFS = (None, EnergyTariff(StepFunction((0.0, 120.0), (1.0, 5.0), 240.0)))
OPS = (
    "begin",
    "begin",
    "end",
    "run",
    "run",
    "run",
    "answer",
    "answer",
    "answer",
    "twice",
    "fail",
    "unread",
    "miss",
    "divide",
    "lose",
    "lease",
    "back",
    "budget",
    "prices",
    "time",
    "noise",
)
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def begin(fleet, rng):
    name = f"j{rng.integers(5)}"
    if name in fleet.jobs:
        return
    nodes = [node for node in rng.permutation(NODES)[: rng.integers(1, 4)].tolist() if node not in fleet.lost]
    if nodes:
        fleet.begin(
            name,
            nodes,
            gpus=int(rng.integers(1, 4)),
            promise=PROMISES[rng.integers(len(PROMISES))],
            draw_w=float(rng.choice([120.0, 280.0])),
            restored_w=float(rng.choice([0.0, 900.0])) or None,
            held_w=tuple(rng.choice(LIMITS_W, len(nodes)).tolist()) if rng.random() < 0.7 else (),
        )


def answered(fleet, rng, op):
    """A command ends well, badly, unread, or well and is told of twice."""
    if not fleet.asked:
        return
    place = int(rng.integers(len(fleet.asked)))
    one = fleet.asked[place]
    if op in {"answer", "twice"}:
        fleet.answer(place)
        if op == "twice":
            fleet.tell(LimitConfirmed(fleet.now_s, one.number, LIMITS_W[0]))
        return
    fleet.asked.pop(place)
    limits, maybe = fleet.jobs[one.job].limits, fleet.jobs[one.job].maybe
    if op == "unread":
        maybe.setdefault(one.holding, []).append(one.limit_w)
        limits[one.holding] = one.limit_w if rng.random() < 0.5 else limits[one.holding]
    else:
        # Its plan still says what it refused, and it may try that again by itself.
        maybe[one.holding] = [one.limit_w]
    fleet.tell(LimitFailed(fleet.now_s, one.number, None if op == "unread" else limits[one.holding]))


def divided(fleet, rng):
    """A division is answered, in any order, perhaps twice, or cannot be."""
    place = int(rng.integers(len(fleet.divisions)))
    one = fleet.divisions[place]
    if rng.random() < 0.2:
        fleet.divisions.pop(place)
        fleet.tell(AllocationSolved(fleet.now_s, one.number, None))
        return
    fleet.divide(place)
    if rng.random() < 0.3:
        fleet.tell(AllocationSolved(fleet.now_s, one.number, solve_allocation(one.problem)))


def nodes_change(fleet, rng, op):
    node = str(rng.choice(NODES))
    if op == "lose":
        fleet.lose(node, heard=bool(rng.random() < 0.5))
    elif node in fleet.lost:
        fleet.lease_ends(node) if op == "lease" else fleet.back(node)
    else:  # news of a node that was never lost
        fleet.tell(
            NodeLeaseExpired(fleet.now_s, node) if op == "lease" else NodeReachable(fleet.now_s, node, {"j0/n1": 100.0})
        )


def happened(fleet, rng, op):
    """One thing happens to the fleet."""
    if op == "begin":
        begin(fleet, rng)
    elif op == "end" and fleet.jobs:
        fleet.end(sorted(fleet.jobs)[rng.integers(len(fleet.jobs))])
    elif op == "run":
        fleet.run(int(rng.integers(1, 8)), answered=bool(rng.random() < 0.5))
    elif op in {"answer", "twice", "fail", "unread"}:
        answered(fleet, rng, op)
    elif op == "miss":
        fleet.tell(JobMissed(fleet.now_s + 1.0, f"j{rng.integers(5)}", MissedWindowReason.NO_POWER))
    elif op == "divide" and fleet.divisions:
        divided(fleet, rng)
    elif op in {"lose", "lease", "back"}:
        nodes_change(fleet, rng, op)
    elif op == "budget":
        fleet.budget(tree(NODES, float(rng.uniform(300.0, 1500.0)), float(rng.uniform(500.0, 3000.0))))
    elif op == "prices":
        fleet.tell(PricesSet(fleet.now_s, TARIFFS[rng.integers(2)]))
    elif op == "time":
        fleet.now_s += 250.0
        fleet.tell(ControlTick(fleet.now_s))
    elif op == "noise":
        fleet.tell(LimitConfirmed(fleet.now_s, 10**6, 300.0))
        fleet.tell(ControlTick(fleet.now_s - 1000.0))


@SLOW
@given(st.lists(st.sampled_from(OPS), min_size=5, max_size=60), st.integers(0, 2**32 - 1), st.sampled_from([0, 100]))
# A node came back below what its gang had just been told, and the watts of that counted as free.
@example(["budget", "begin", "begin", "lose", "back"], 41, 0)
def test_no_answer_passes_a_budget_and_claims_cover_what_may_be_drawn(ops, seed, inside):
    rng = np.random.default_rng(seed)
    fleet = Fleet(ObjectiveController(ControlSettings(divided_inside=inside)), seed=seed, scatter=0.01)
    fleet.budget(tree(NODES, 1200.0, 2400.0))
    for op in ops:
        happened(fleet, rng, op)
        assert fleet.worst_w <= 1e-6, op
        claims = {one.name: one.claim_w for one in fleet.steering.controller_status().budgets}
        assert all(watts <= claims[name] + 1e-6 for name, watts in fleet.drawn_most().items()), op


@SLOW
@given(st.lists(st.sampled_from(OPS), min_size=5, max_size=60), st.integers(0, 2**32 - 1), st.sampled_from([0, 100]))
def test_once_it_is_quiet_gangs_are_even_budgets_kept_or_said_and_commands_end(ops, seed, inside):
    rng = np.random.default_rng(seed)
    fleet = Fleet(ObjectiveController(ControlSettings(divided_inside=inside)), seed=seed, scatter=0.005)
    fleet.budget(tree(NODES, 1200.0, 2400.0))
    for op in ops:
        happened(fleet, rng, op)
    for node in NODES:
        if node in fleet.lost:
            fleet.back(node)
    for _ in range(4):  # what was refused is tried again after 300 s
        fleet.now_s += 160.0
        fleet.tell(ControlTick(fleet.now_s))
        fleet.run(4)
    standing = fleet.steering.controller_status()
    for one in standing.jobs:
        assert len(set(fleet.jobs[one.name].limits.values())) == 1
        assert one.limit_w == next(iter(fleet.jobs[one.name].limits.values()))
        assert one.phase not in {LimitPhase.LOST, LimitPhase.STUCK}
        assert abs(one.limit_w - one.target_w) <= 0.5
    for one in standing.budgets:
        assert fleet.drawn_most()[one.name] <= one.room_w + 1e-6 or one.shortfall_w > 0.0


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(OPS), min_size=5, max_size=40), st.integers(0, 2**32 - 1))
def test_the_same_events_give_the_same_instructions_and_the_same_standing(ops, seed):
    rng = np.random.default_rng(seed)
    fleet = Fleet(seed=seed, scatter=0.01)
    fleet.budget(tree(NODES, 1200.0, 2400.0))
    for op in ops:
        happened(fleet, rng, op)
    again = ObjectiveController()
    assert [one for event in fleet.told for one in again.handle_event(event)] == fleet.said
    assert again.controller_status() == fleet.steering.controller_status()


REPLICA = ServiceStation(servers=2, service_s=0.1, service_cv2=0.25)
LIMITS = ScalingLimits(start_s=30.0, hold_s=120.0, cool_s=30.0, least=2, most=30)
PROMISED = AutoscalerTarget(RequestService(REPLICA, QuantileObjective(0.95, 0.6)), LIMITS)


def seen(rate_hz, waiting, growth):
    return build_metrics_window(rate_hz, waiting=waiting, growth=growth)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 3.0, 20.0, 40.0, 300.0]),
            st.floats(0.0, 500.0),
            st.sampled_from([30.0, 30.0, 300.0, -30.0]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 40),
)
def test_scaling_is_bounded_and_time_alone_takes_nothing_away(windows, replicas):
    steering, at_s, last_s = ObjectiveController(), 0.0, -np.inf
    steering.handle_event(ServiceStarted(0.0, "s", PROMISED, replicas))
    targets = [steering.controller_status().services[0].target]
    for rate_hz, waiting, step_s in windows:
        at_s = max(0.0, at_s + step_s)
        steering.handle_event(ControlTick(at_s))
        assert steering.controller_status().services[0].target == targets[-1]
        made = steering.handle_event(ServiceWindow(at_s, "s", seen(rate_hz, waiting, 0.0)))
        target = steering.controller_status().services[0].target
        if at_s <= last_s:
            assert made == []
        last_s = max(last_s, at_s)
        assert all(one.replicas == target for one in made)
        targets.append(target)
        steering.handle_event(ServiceReady(at_s, "s", target))
    for before, after in pairwise(targets):
        assert LIMITS.least <= after <= LIMITS.most
        assert after <= 2 * before + 2
        assert after >= before - max(1, before // 4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(LIMITS_W), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_a_job_that_is_taken_up_is_never_lowered_unmeasured(held_w, seed):
    rng = np.random.default_rng(seed)
    fleet = Fleet(seed=seed)
    fleet.budget(tree(NODES, 600.0, 1800.0))
    fleet.begin("a", list(NODES[: len(held_w)]), held_w=tuple(held_w), promise=PROMISES[rng.integers(len(PROMISES))])
    for _ in range(50):
        fleet.now_s += 61.0
        fleet.tell(ControlTick(fleet.now_s))
        fleet.answer_all()
        assert min(fleet.jobs["a"].limits.values()) >= min(held_w)
    assert fleet.job("a").limit_w == LIMITS_W[-1]
