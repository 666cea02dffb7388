"""Limits on interference hold on every GPU whatever starts, grows, ends and moves, and nothing waits that could start."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.placement.interference import MixTable
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.interference import InterferenceRules, make_mix
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    BudgetScope,
    GpuSharing,
    Interference,
    MoveGoal,
    Policy,
    PowerBudget,
    RecommendMovesRequest,
    WorkloadPhase,
)

LOADS = ("a", "b", "c", "")
SLOWDOWNS = st.sampled_from([0.0, 0.1, 0.2, 0.5])
LIMITS = st.sampled_from([None, None, 0.0, 0.1, 0.3, 1.0])
PAIRS = tuple((one, other) for one in ("a", "b", "*") for other in ("a", "b", "*"))


def find_slowdown(pairs, one, other):
    for key in ((one, other), (one, "*"), ("*", other), ("*", "*")):
        if pairs.get(key) is not None:
            return pairs[key]
    return float("inf")


def bear_each_other(pairs, default, tenants):
    """Whether the loads on one GPU, with their limits, stay within them: by each of all that are there."""
    for number, (load, most) in enumerate(tenants):
        limit = default if most is None else most
        beside = [other for place, (other, _) in enumerate(tenants) if place != number]
        if limit is not None and sum(find_slowdown(pairs, load, other) for other in beside) > limit + 1e-9:
            return False
    return True


def tenant_of(workload):
    sharing = workload.spec.gpu_sharing
    return ("", None) if sharing is None else (sharing.load, sharing.slowdown_most)


def tenants_by_gpu(state):
    """Of each GPU, what has a share of it."""
    found = {gpu.uuid: [] for record in state.nodes.values() for gpu in record.inventory.gpus}
    for workload in state.workloads.values():
        for place in workload.placements if workload.phase is WorkloadPhase.PLACED else ():
            if workload.spec.request.is_share:
                found[place.gpu_uuids[0]].append((tenant_of(workload), workload.spec.request.gpu_milli))
    return found


def check_limits(core, pairs, default):
    for tenants in tenants_by_gpu(core.state).values():
        assert bear_each_other(pairs, default, [one for one, _ in tenants]), tenants


def could_start(core, pairs, default, workload):
    """Whether one replica fits on some GPU, beside what is there."""
    request, mine = workload.spec.request, tenant_of(workload)
    for record in core.state.nodes.values():
        if record.cpu_left_milli < request.cpu_milli or record.memory_left_bytes < request.memory_bytes:
            continue
        for gpu in record.inventory.gpus:
            there = tenants_by_gpu(core.state)[gpu.uuid]
            fits = record.gpu_milli.get(gpu.uuid, 0) + request.gpu_milli <= 1000
            if fits and bear_each_other(pairs, default, [*(one for one, _ in there), mine]):
                return True
    return False


@given(
    slowdowns=st.lists(st.none() | SLOWDOWNS, min_size=len(PAIRS), max_size=len(PAIRS)),
    default=LIMITS,
    budgets=st.sampled_from([(), (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1e6),)]),
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "submit", "end", "scale", "moves"]),
            st.integers(0, 30),
            st.sampled_from(LOADS),
            LIMITS,
            st.sampled_from([100, 250, 300, 500, 900, 1000]),
            st.integers(1, 4),
        ),
        max_size=14,
    ),
)
@settings(deadline=None, max_examples=150)
def test_limits_hold_on_every_gpu_and_nothing_waits_that_could_start(slowdowns, default, budgets, nodes, steps):
    pairs = dict(zip(PAIRS, slowdowns, strict=True))
    core = build_core(*(build_node(f"n{number}", gpus=gpus) for number, gpus in enumerate(nodes)))
    known = tuple(
        Interference(load=load, beside=beside, slowdown=slowdown)
        for (load, beside), slowdown in pairs.items()
        if slowdown is not None
    )
    policy = replace(core.state.policy, interference=known, shared_slowdown_most=default, budgets=budgets)
    core.update_policy(policy, now_ns=1)
    for now_ns, (verb, which, load, most, milli, replicas) in enumerate(steps, start=2):
        live = [one for one in core.state.workloads.values() if not one.phase.is_ended]
        chosen = live[which % len(live)] if live else None
        if verb == "submit":
            sharing = GpuSharing(load=load, slowdown_most=most) if milli < 1000 else None
            request = build_request(f"w{now_ns}", milli=milli, replicas=replicas, gpu_sharing=sharing)
            # More replicas than the whole cluster holds are refused.
            with suppress(InvalidArgument):
                core.submit(request, now_ns=now_ns)
        elif verb == "end" and chosen is not None:
            core.cancel(chosen.workload_id, now_ns=now_ns)
        elif verb == "scale" and chosen is not None and chosen.phase is WorkloadPhase.PLACED:
            core.scale(chosen.workload_id, replicas, now_ns=now_ns)
        elif verb == "moves":
            goal = (MoveGoal.POWER, MoveGoal.ROOM)[which % 2]
            survey = core.survey_moves(RecommendMovesRequest(goal=goal, moves_most=8))
            moves = recommend_moves(build_migration_problem(survey)).moves
            # What is recommended is possible.
            if moves:
                core.apply_moves(moves, now_ns=now_ns)
        while core.has_backlog:
            core.retry(now_ns=now_ns)
        check_limits(core, pairs, default)
        check_invariants(core.state)
        for workload in core.state.workloads.values():
            if (
                workload.phase is WorkloadPhase.PENDING
                and workload.spec.request.is_share
                and workload.spec.replicas == 1
            ):
                assert not could_start(core, pairs, default, workload), workload.reason
    check_limits(core, pairs, default)


LOAD = st.builds(
    lambda load, most: GpuSharing(load=load, slowdown_most=most), st.sampled_from(LOADS), LIMITS | st.just(0.7)
)


@given(
    slowdowns=st.lists(st.none() | SLOWDOWNS, min_size=len(PAIRS), max_size=len(PAIRS)),
    default=LIMITS,
    mixes=st.lists(st.lists(LOAD, max_size=6), max_size=6),
    newcomers=st.lists(LOAD, min_size=1, max_size=4),
    most=st.integers(1, 8),
)
@settings(deadline=None, max_examples=200)
def test_the_table_of_mixes_answers_as_the_rule_and_the_rule_as_counting_does(
    slowdowns, default, mixes, newcomers, most
):
    pairs = dict(zip(PAIRS, slowdowns, strict=True))
    known = tuple(
        Interference(load=load, beside=beside, slowdown=slowdown)
        for (load, beside), slowdown in pairs.items()
        if slowdown is not None
    )
    rules = InterferenceRules(Policy(interference=known, shared_slowdown_most=default))
    table, numbers = MixTable(rules), {}
    # Mixes and loads are numbered between questions, too.
    for place, newcomer in enumerate(newcomers):
        for loads in mixes[: 2 * place + 2]:
            numbers[make_mix(loads)] = table.number(make_mix(loads))
        joining, added = table.count_joining(newcomer, most).tolist(), table.sum_added(newcomer).tolist()
        for mix, number in numbers.items():
            count, one = joining[number], added[number]
            assert table.has_limit[number] == any(rules.find_limit(load) is not None for load, _ in mix)
            assert count == rules.count_joining(mix, newcomer, most)
            assert one == pytest.approx(rules.sum_added(mix, newcomer))
            there = [(load.load, load.slowdown_most) for load, times in mix for _ in range(times)]
            mine = (newcomer.load, newcomer.slowdown_most)
            tried = [bear_each_other(pairs, default, [*there, *[mine] * more]) for more in range(1, most + 1)]
            assert count == (tried.index(False) if False in tried else most)
