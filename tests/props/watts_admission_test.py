"""Admission under budgets against a naive sum of watts: work that begins or moves passes no budget, nothing waits idly."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import MoveRefused
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadMoved, WorkloadPlaced, WorkloadScaled
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BudgetScope,
    EnforcementMode,
    Mobility,
    Move,
    PoolMode,
    PowerBudget,
    ProcessSpec,
    RecommendMovesRequest,
    ReplicaMove,
    Workload,
    WorkloadKind,
    WorkloadPhase,
)

CATALOGUE = catalogue.load_catalogue()
IDLE_W, LOWEST_W, DEFAULT_W = 30.0, 150.0, 300.0
PROCESS = ProcessSpec(argv=("true",), working_directory="/")
RACKS = {"a": "r1", "b": "r1", "c": "r2", "d": ""}
TOLD = {"power_limit_min_w": LOWEST_W, "power_limit_default_w": DEFAULT_W, "power_limit_max_w": DEFAULT_W}


def v100s(name: str, gpus: int):
    plain = build_node(name, gpus=gpus, model="V100M16", topology=(RACKS[name],) if RACKS[name] else ())
    # The agents of c and d set limits, before they start processes, too.
    sets_limits = name in "cd"
    told = tuple(replace(gpu, **TOLD) for gpu in plain.gpus)
    return replace(plain, gpus=told, sets_limits=sets_limits, limits_before_starts=sets_limits, runs_processes=True)


def below(key: PowerBudget, name: str) -> bool:
    return key.scope is BudgetScope.CLUSTER or key.name in (name, RACKS[name])


def kept_w(state: ClusterState, name: str) -> float | None:
    """The budget of a node that its agent keeps."""
    own = [one.limit_w for one in state.policy.budgets if one.scope is BudgetScope.NODE and one.name == name]
    return min(own) if own and state.policy.pools and name in "cd" else None


def can_be_kept(state: ClusterState, name: str) -> bool:
    """Whether the agent of a node can keep its budget, however much its GPUs draw at their limits."""
    record, limit_w = state.nodes[name], kept_w(state, name)
    there = [gpu for gpu in record.inventory.gpus if gpu.uuid not in record.lost_gpus]
    return limit_w is not None and limit_w >= sum(
        LOWEST_W if record.gpu_milli.get(gpu.uuid) else IDLE_W for gpu in there
    )


def naive_w(state: ClusterState, read_w: dict[str, float], budget: PowerBudget) -> float:
    """What all GPUs below a budget may draw, one after another; of a node whose agent keeps its budget no more than that."""
    total_w = 0.0
    for name in state.nodes:
        if below(budget, name):
            node_w, limit_w = naive_node_w(state, read_w, name), kept_w(state, name)
            total_w += node_w if budget.scope is BudgetScope.NODE or limit_w is None else min(node_w, limit_w)
    return total_w


def naive_node_w(state: ClusterState, read_w: dict[str, float], name: str) -> float:
    record, total_w = state.nodes[name], 0.0
    for gpu in record.inventory.gpus:
        if gpu.uuid in record.lost_gpus:
            continue
        holders = [state.workloads[key] for key in record.holders(gpu.uuid)]
        limits = [
            DEFAULT_W
            if one.power_limit_w is None
            else max(one.power_limit_w, read_w.get(one.workload_id, 0.0), read_w.get(gpu.uuid, 0.0))
            for one in holders
        ]
        total_w += min(DEFAULT_W, max(limits)) if limits else IDLE_W
    return total_w


budget_lists = st.lists(
    st.one_of(
        st.builds(PowerBudget, scope=st.just(BudgetScope.CLUSTER), limit_w=st.integers(0, 3000).map(float)),
        st.builds(
            PowerBudget,
            scope=st.just(BudgetScope.RACK),
            name=st.sampled_from(["r1", "r2"]),
            limit_w=st.integers(0, 2000).map(float),
        ),
        st.builds(
            PowerBudget,
            scope=st.just(BudgetScope.NODE),
            name=st.sampled_from("abcd"),
            limit_w=st.integers(0, 1200).map(float),
        ),
    ),
    max_size=4,
    unique_by=lambda one: (one.scope, one.name),
)
submissions = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1000, 1000, 400])),
    st.tuples(st.just("job"), st.integers(1, 3), st.integers(1, 3)),
)
shifts = st.tuples(st.just("shift"), st.integers(0, 30), st.integers(0, 2), st.sampled_from("abcd"))
steps = st.lists(
    st.one_of(
        submissions,
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("limit"), st.integers(0, 30), st.sampled_from([150.0, 200.0, 300.0])),
        st.tuples(st.just("told"), st.booleans()),
        st.tuples(st.just("moves")),
        shifts,
        shifts,
        st.tuples(st.just("lost"), st.sampled_from("abcd")),
        st.tuples(st.just("budgets"), budget_lists),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(budget_lists, st.booleans(), st.lists(submissions, min_size=2, max_size=5), steps)
def test_what_begins_or_moves_passes_no_budget_and_what_could_begin_does(budgets, is_enforced, begun, script):
    _play(budgets, begun + script, is_enforced=is_enforced)


# What jobs of two and three GPUs draw at their default limits is above many of these, at their lowest below most.
tight_budgets = st.lists(
    st.one_of(
        st.builds(PowerBudget, scope=st.just(BudgetScope.CLUSTER), limit_w=st.integers(500, 1300).map(float)),
        st.builds(
            PowerBudget, scope=st.just(BudgetScope.RACK), name=st.just("r2"), limit_w=st.integers(200, 600).map(float)
        ),
        st.builds(
            PowerBudget, scope=st.just(BudgetScope.NODE), name=st.just("d"), limit_w=st.integers(300, 900).map(float)
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda one: one.scope,
)
jobs = st.one_of(
    st.tuples(st.just("job"), st.integers(2, 3), st.just(1)), st.tuples(st.just("job"), st.just(1), st.integers(2, 5))
)


@settings(max_examples=100, deadline=None)
@given(tight_budgets, st.lists(jobs, min_size=1, max_size=3), steps)
def test_jobs_start_at_the_highest_limit_where_no_budget_ever_holds_their_default(budgets, begun, script):
    _play(budgets, begun + script, is_enforced=True)


def _play(budgets, script, *, is_enforced: bool) -> None:
    core = Core(ClusterState(), CATALOGUE)
    for name, gpus in (("a", 2), ("b", 1), ("c", 2), ("d", 3)):
        core.register_node(v100s(name, gpus), now_ns=1)
    pools = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),) if is_enforced else ()
    core.update_policy(replace(core.state.policy, budgets=tuple(budgets), pools=pools), now_ns=2)
    # By workload, and by GPU for work that moved there with a limit.
    read_w: dict[str, float] = {}
    for now_ns, step in enumerate(script, start=3):
        before = {one: naive_w(core.state, read_w, one) for one in core.state.policy.budgets}
        made = _done(core, step, read_w, now_ns)
        began = any(isinstance(event, WorkloadPlaced | WorkloadScaled | WorkloadMoved) for event in made)
        for event in made:
            if isinstance(event, WorkloadPlaced) and event.power_limit_w is not None:
                _starts_at_the_highest_limit(core.state, event, read_w)
        for budget in core.state.policy.budgets:
            now_w = naive_w(core.state, read_w, budget)
            is_raised = now_w > before.get(budget, now_w) + 1e-6
            is_kept = budget.scope is BudgetScope.NODE and budget.name in core.state.nodes
            is_kept = is_kept and can_be_kept(core.state, budget.name)
            assert not (began and is_raised) or is_kept or now_w <= budget.limit_w + 1e-6
        while core.has_backlog:
            core.retry(now_ns=now_ns)
        _nothing_waits_idly(core, read_w)
    check_invariants(core.state)


def _starts_at_the_highest_limit(state: ClusterState, event: WorkloadPlaced, read_w: dict[str, float]) -> None:
    """A budget above it never holds its default limits, and none of 25 W more now, as far as nothing came after it."""
    if (found := state.workloads.get(event.workload_id)) is None or found.power_limit_w != event.power_limit_w:
        return
    names = {place.node_name for place in event.placements}
    assert state.policy.pools
    assert names <= set("cd")
    taken = {uuid for place in event.placements for uuid in place.gpu_uuids}
    above = [one for one in state.policy.budgets if any(below(one, name) for name in names)]

    def alone_w(budget: PowerBudget) -> float:
        total_w = 0.0
        for name, record in state.nodes.items():
            there = [gpu.uuid for gpu in record.inventory.gpus if gpu.uuid not in record.lost_gpus]
            node_w = sum(DEFAULT_W if uuid in taken else IDLE_W for uuid in there)
            limit_w = None if budget.scope is BudgetScope.NODE else kept_w(state, name)
            total_w += (node_w if limit_w is None else min(node_w, limit_w)) if below(budget, name) else 0.0
        return total_w

    assert any(alone_w(one) > one.limit_w for one in above)
    if event.power_limit_w + 25.0 < DEFAULT_W:
        more = replace(found, power_limit_w=event.power_limit_w + 25.0)
        try:
            state.workloads[event.workload_id] = more
            assert any(alone_w(one) > one.limit_w and naive_w(state, read_w, one) > one.limit_w + 1e-6 for one in above)
        finally:
            state.workloads[event.workload_id] = found


def _moved(core: Core, moves: Sequence[Move], read_w: dict[str, float], now_ns: int):
    """Applies moves that may be refused; work has its default limit where it comes to."""
    made = core.apply_moves(moves, now_ns=now_ns).events
    for event in made:
        if isinstance(event, WorkloadMoved):
            read_w |= {uuid: DEFAULT_W for place in event.placements for uuid in place.gpu_uuids}
    return made


def _shift(core: Core, workload: Workload, replica: int, target: str) -> Move:
    """One replica to the first GPUs of a node that have room, whether they are enough or not."""
    source, record = workload.placements[replica % len(workload.placements)], core.state.nodes[target]
    most_milli = 1000 - workload.spec.request.gpu_milli
    usable = [gpu for gpu in record.inventory.gpus if gpu.uuid not in record.lost_gpus]
    gpus = [gpu for gpu in usable if record.gpu_milli.get(gpu.uuid, 0) <= most_milli][: len(source.gpu_uuids)]
    uuids, indexes = tuple(gpu.uuid for gpu in gpus), tuple(gpu.index for gpu in gpus)
    there = replace(source, node_name=target, gpu_uuids=uuids, gpu_indexes=indexes)
    return Move(workload_id=workload.workload_id, replicas=(ReplicaMove(source=source, target=there, candidates=()),))


def _done(core: Core, step, read_w: dict[str, float], now_ns: int):
    """One step of a script; `read_w` is kept as an agent that answers late would."""
    live = [key for key, one in core.state.workloads.items() if one.phase is not WorkloadPhase.CANCELLED]
    match step:
        case ("submit", gpus, replicas, milli):
            share, replicas = (1000, 1) if gpus > 1 else (milli, replicas)
            mobility = Mobility.RESTARTABLE if now_ns % 2 else Mobility.MOVABLE
            asked = build_request(gpus=gpus, milli=share, replicas=replicas, mobility=mobility)
            return core.submit(asked, now_ns=now_ns).events
        case ("job", gpus, replicas):
            fixed = {"process": PROCESS, "kind": WorkloadKind.BATCH_JOB, "mobility": Mobility.FIXED}
            count = 1 if gpus > 1 else replicas
            return core.submit(build_request(gpus=gpus, replicas=count, **fixed), now_ns=now_ns).events
        case ("cancel", number) if live:
            return core.cancel(live[number % len(live)], now_ns=now_ns).events
        case ("end", number, is_requeued) if live:
            return _end_attempt(core, live[number % len(live)], read_w, now_ns, is_requeued=is_requeued)
        case ("limit", number, limit_w) if live:
            found = core.workload(live[number % len(live)])
            if found.phase is WorkloadPhase.PLACED and found.spec.request.gpu_milli == 1000:
                if found.power_limit_w != limit_w:
                    old_w = DEFAULT_W if found.power_limit_w is None else found.power_limit_w
                    read_w[found.workload_id] = max(old_w, read_w.get(found.workload_id, 0.0))
                return core.set_limit(found.workload_id, limit_w, now_ns=now_ns).events
        case ("moves",):
            asked = RecommendMovesRequest(moves_ratio=1.0, restart_s=0.0)
            # What is recommended holds at its moment.
            return _moved(
                core, recommend_moves(build_migration_problem(core.survey_moves(asked))).moves, read_w, now_ns
            )
        case ("shift", number, replica, target) if live:
            found = core.workload(live[number % len(live)])
            with contextlib.suppress(MoveRefused):
                if found.phase is WorkloadPhase.PLACED:
                    return _moved(core, [_shift(core, found, replica, target)], read_w, now_ns)
        case ("told", is_set):
            if is_set:
                read_w.clear()
            return core.report_limits(dict(read_w), now_ns=now_ns).events
        case ("lost", name):
            return core.mark_gpu_lost(name, f"GPU-{name}-0", now_ns=now_ns).events
        case ("budgets", budgets):
            return core.update_policy(replace(core.state.policy, budgets=tuple(budgets)), now_ns=now_ns).events
    return ()


def _end_attempt(core: Core, key: str, read_w: dict[str, float], now_ns: int, *, is_requeued: bool):
    """All processes of a job end, on request so that it waits again; whatever its limit was counts no longer."""
    found = core.workload(key)
    if found.phase is not WorkloadPhase.PLACED or found.spec.process is None:
        return ()
    made = core.requeue(key, now_ns=now_ns).events if is_requeued and not found.stopping_ns else ()
    read_w.pop(key, None)
    for name in dict.fromkeys(place.node_name for place in found.placements):
        ended = [
            AttemptStatus(
                workload_id=key,
                attempt=found.attempt,
                replica=place.replica,
                state=AttemptState.ENDED,
                started_ns=1,
                ended_ns=now_ns,
                exit_code=0,
            )
            for place in found.placements
            if place.node_name == name
        ]
        made = (*made, *core.record_attempts(name, ended, now_ns=now_ns).events)
    return made


def _nothing_waits_idly(core: Core, read_w: dict[str, float]) -> None:
    """No single replica on one whole GPU waits for watts while a free GPU has them in every budget above it."""
    for workload in core.state.workloads.values():
        request_ = workload.spec.request
        if workload.phase is not WorkloadPhase.PENDING or not workload.reason.startswith("budget:"):
            continue
        if (request_.gpu_count, request_.gpu_milli, workload.spec.replicas) != (1, 1000, 1):
            continue
        for name, record in core.state.nodes.items():
            free = [
                gpu
                for gpu in record.inventory.gpus
                if gpu.uuid not in record.gpu_milli and gpu.uuid not in record.lost_gpus
            ]
            above = [one for one in core.state.policy.budgets if below(one, name)]
            fits = all(naive_w(core.state, read_w, one) + DEFAULT_W - IDLE_W <= one.limit_w + 1e-6 for one in above)
            assert not (free and fits), (workload, name)
