"""Limits on interference: who may share a GPU with whom, in starts, growth, moves and what waits."""

from dataclasses import replace

import pytest
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_core, build_node, build_request
from tests.unit import preemption_test as preemption

from eelgrid_controller.cli.connection import RequestRefused
from eelgrid_controller.cli.interference import format_slowdown, parse_slowdown, read_pairs
from eelgrid_controller.core.workloads import MoveRefused
from eelgrid_controller.placement.interference import MixTable
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.interference import InterferenceRules, make_mix
from eelgrid_controller.state.policy import policy_to_plain
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    BackfillMode,
    BudgetScope,
    GpuSharing,
    Interference,
    JobArrayRequest,
    JobDeadline,
    JobSchedule,
    LatencyMetric,
    LatencyObjective,
    Mobility,
    Move,
    MoveGoal,
    Policy,
    PowerBudget,
    Queue,
    RecommendMovesRequest,
    ReplicaMove,
    ServicePromise,
    WorkloadKind,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.schema import InvalidMessage, check_message

PAIRS = (("a", "b", 0.1), ("b", "a", 0.3), ("a", "a", 0.25), ("b", "b", 0.0), ("c", "*", 0.05), ("*", "c", 0.5))
HOUR = 3600
OBJECTIVE = (LatencyObjective(metric=LatencyMetric.RESPONSE, quantile=0.9, latency_s=1.0),)
INTERFERENCE = tuple(Interference(load=load, beside=beside, slowdown=slowdown) for load, beside, slowdown in PAIRS)


def start(*nodes, most=None, pairs=INTERFERENCE, state=None):
    core = build_core(*(nodes or (build_node("n", gpus=1),)), state=state)
    core.update_policy(replace(core.state.policy, interference=pairs, shared_slowdown_most=most), now_ns=1)
    return core


def submit(core, key, load="", most=None, milli=200, replicas=1, **spec):
    sharing = GpuSharing(load=load, slowdown_most=most) if load or most is not None else None
    core.submit(build_request(key, milli=milli, replicas=replicas, gpu_sharing=sharing, **spec), now_ns=2)
    return core.state.workloads[key]


def is_placed(workload):
    return workload.phase is WorkloadPhase.PLACED


def gpus_of(workload):
    return [place.gpu_uuids[0] for place in workload.placements]


@pytest.mark.parametrize(
    ("loads", "limits", "is_within"),
    [
        (("a", "b"), (None, None), True),
        (("a", "b"), (0.1, 0.3), True),
        (("a", "b"), (0.09, None), False),
        (("a", "b"), (None, 0.29), False),
        # Slowdowns beside several are added.
        (("a", "b", "b"), (0.2, None, None), True),
        (("a", "b", "b"), (0.19, None, None), False),
        # Of a pair that is not named, the first half counts before the second.
        (("c", "x"), (0.05, None), True),
        (("c", "c"), (0.05, 0.05), True),
        (("x", "c"), (0.49, None), False),
        (("x", "c"), (0.5, None), True),
        # Nobody measured it.
        (("x", "y"), (100.0, None), False),
        (("x", "y"), (None, None), True),
        (("", ""), (0.5, None), False),
        (("x",), (0.0,), True),
    ],
)
def test_loads_bear_each_other_within_their_limits(loads, limits, is_within):
    rules = InterferenceRules(Policy(interference=INTERFERENCE))
    mix = make_mix(GpuSharing(load=load, slowdown_most=most) for load, most in zip(loads, limits, strict=True))
    assert rules.are_within_limits(mix) is is_within


def test_the_policy_has_the_limit_of_work_that_states_none():
    rules = InterferenceRules(Policy(interference=INTERFERENCE, shared_slowdown_most=0.1))
    assert rules.are_within_limits(make_mix([GpuSharing(load="a"), GpuSharing(load="b", slowdown_most=0.3)]))
    assert not rules.are_within_limits(make_mix([GpuSharing(load="a"), GpuSharing(load="b")]))


def test_work_that_would_slow_others_down_waits_for_a_gpu_of_its_own():
    core = start()
    assert is_placed(submit(core, "first", "a", 0.1))
    assert is_placed(submit(core, "second", "b"))
    # A third would be the second beside `a`.
    third = submit(core, "third", "b")
    assert third.reason == (
        "interference: GPUs have room, but beside loads that slow it down beyond a limit, or it them"
    )
    assert core.explain_workload("third").constraint == "interference"
    core.cancel("first", now_ns=3)
    core.retry(now_ns=3)
    assert is_placed(core.state.workloads["third"])


def test_work_goes_to_the_gpu_whose_loads_it_bears():
    for beside in ("b", "y"):
        core = start(build_node("n", gpus=2))
        for load in ("y", "b") if beside == "b" else ("b", "y"):
            submit(core, load, load, milli=600)
        # What was measured is borne, what was not is not, wherever it stands.
        assert gpus_of(submit(core, "a", "a", 0.1, milli=300)) == gpus_of(core.state.workloads["b"])
        assert submit(core, "more", "a", 0.1, milli=300).reason.startswith("interference: ")


def test_work_without_limits_is_placed_as_before():
    core, twin = start(), start(pairs=())
    for one in (core, twin):
        for number in range(5):
            submit(one, f"w{number}", "b")
    assert [gpus_of(one) for one in core.state.workloads.values()] == [
        gpus_of(one) for one in twin.state.workloads.values()
    ]


@pytest.mark.parametrize(
    ("load", "limit", "each"), [("a", 0.2, 1), ("a", 0.25, 2), ("a", 0.5, 3), ("b", 0.0, 4), ("x", 1.0, 1)]
)
def test_replicas_of_one_service_are_so_many_on_each_gpu_as_bear_each_other(load, limit, each):
    core = start(build_node("n", gpus=4))
    workload = submit(core, "many", load, limit, milli=250, replicas=4)
    counts = [gpus_of(workload).count(uuid) for uuid in set(gpus_of(workload))]
    assert sum(counts) == 4
    assert max(counts) <= each
    assert [place.replica for place in workload.placements] == [0, 1, 2, 3]
    # A gang of more than that waits as a whole.
    core = start(build_node("n", gpus=1))
    workload = submit(core, "many", load, limit, milli=250, replicas=4)
    assert is_placed(workload) is (each == 4)


def test_replicas_that_are_added_bear_those_that_run():
    core = start(build_node("n", gpus=2))
    submit(core, "many", "a", 0.2, milli=250)
    core.scale("many", 2, now_ns=3)
    assert len(set(gpus_of(core.state.workloads["many"]))) == 2
    core.scale("many", 3, now_ns=4)
    assert len(core.state.workloads["many"].placements) == 2


def move_of(core, key, node, uuid):
    (source,) = core.state.workloads[key].placements
    target = replace(source, node_name=node, gpu_uuids=(uuid,), gpu_indexes=(0,))
    return Move(workload_id=key, replicas=(ReplicaMove(source=source, target=target),))


def test_moves_join_nobody_who_does_not_bear_it():
    core = start(build_node("m", gpus=1), build_node("n", gpus=1))
    submit(core, "a", "a", 0.1, milli=600)
    submit(core, "x", "x", milli=500)
    assert len({place.node_name for one in core.state.workloads.values() for place in one.placements}) == 2
    (target,) = core.state.workloads["a"].placements
    submit(core, "b", "b", milli=500)
    core.cancel("b", now_ns=3)
    core.cancel("x", now_ns=3)
    submit(core, "y", "x", milli=300)
    with pytest.raises(MoveRefused, match="limit on interference"):
        core.apply_moves([move_of(core, "y", target.node_name, target.gpu_uuids[0])], now_ns=7)


def test_the_search_for_moves_leaves_gpus_alone_that_work_with_limits_shares():
    def recommend(most):
        core = start(*(build_node(f"n{number}", gpus=1) for number in range(4)))
        for number in range(4):
            submit(core, f"big{number}", "b", milli=700)
            submit(core, f"small{number}", "a", most, milli=200)
        for number in range(4):
            core.cancel(f"big{number}", now_ns=3)
        survey = core.survey_moves(RecommendMovesRequest(goal=MoveGoal.POWER, moves_most=8))
        return recommend_moves(build_migration_problem(survey)).moves

    assert recommend(None)
    assert not recommend(0.25)


def test_a_pair_is_named_once_and_sharing_needs_a_share():
    core = start()
    with pytest.raises(InvalidArgument, match="policy"):
        core.update_policy(replace(core.state.policy, interference=INTERFERENCE[:1] * 2), now_ns=5)
    with pytest.raises(InvalidMessage, match="no share of a GPU"):
        check_message(build_request("w", gpus=1, gpu_sharing=GpuSharing(slowdown_most=0.1)).spec)
    with pytest.raises(InvalidMessage, match="slowdown"):
        check_message(Interference(load="a", beside="b", slowdown=-0.1))


def wait(core, key):
    found = core.explain_workload(key)
    assert found.constraint == "interference"
    return found.remedy


def settle(core, now_ns):
    while core.has_backlog:
        core.retry(now_ns=now_ns)


def test_the_remedies_cure():
    def begin():
        core = start()
        submit(core, "first", "c", 0.05)
        submit(core, "second", "a", 0.1)
        return core

    core = begin()
    assert wait(core, "second") == (
        "The only node is ruled out by interference. To help: wait for or cancel first. Or bear more with "
        "--gpu-slowdown 50%."
    )
    core.cancel("first", now_ns=3)
    settle(core, 3)
    assert is_placed(core.state.workloads["second"])
    core = begin()
    core.cancel("second", now_ns=3)
    assert is_placed(submit(core, "third", "a", 0.5))


@pytest.mark.parametrize(
    ("load", "limit", "remedy", "cure"),
    [
        ("a", 0.1, "bear more with --gpu-slowdown 25%", 0.25),
        ("x", 0.1, "measure x beside x, and tell how much that slows down: eelctl interference set x x SLOWDOWN", None),
    ],
)
def test_replicas_that_do_not_bear_each_other_are_told_so(load, limit, remedy, cure):
    core = start(build_node("n", gpus=2))
    submit(core, "many", load, limit, milli=250, replicas=4)
    assert wait(core, "many") == f"There is room for 2 of 4 replicas. To help: {remedy}."
    core.cancel("many", now_ns=3)
    if cure is not None:
        assert is_placed(submit(core, "again", load, cure, milli=250, replicas=4))


def test_where_capacity_is_what_lacks_its_remedies_are_told():
    """A node that limits close as well, but that would not do anyway, says nothing of limits."""
    core = start(build_node("m", gpus=1), build_node("n", gpus=1, model="T4"))
    core.submit(build_request("full", milli=900, models=("G2",)), now_ns=2)
    core.submit(build_request("closed", milli=300, models=("T4",), gpu_sharing=GpuSharing(load="x")), now_ns=2)
    core.submit(
        build_request("w", milli=300, models=("G2",), gpu_sharing=GpuSharing(load="a", slowdown_most=0.1)), now_ns=2
    )
    found = core.explain_workload("w")
    assert found.constraint == "gpu_share"
    assert "wait for or cancel full" in found.remedy


def test_replicas_apart_within_a_budget_are_placed_once_there_is_room():
    """Such a search broke the core: it put work that does not run yet among what draws power."""
    core = start(build_node("n", gpus=2))
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=100_000.0)
    core.update_policy(replace(core.state.policy, budgets=(budget,)), now_ns=2)
    for key in ("v", "w"):
        core.submit(build_request(key, milli=1000), now_ns=2)
    assert not is_placed(submit(core, "z", "a", 0.0, milli=250, replicas=2))
    for number, key in enumerate(("v", "w"), start=3):
        core.cancel(key, now_ns=number)
        settle(core, number)
    assert len(set(gpus_of(core.state.workloads["z"]))) == 2


def test_an_id_that_is_used_again_is_another_load():
    core = start(pairs=(), state=ClusterState(ended_most=2))
    submit(core, "nightly")
    core.cancel("nightly", now_ns=3)
    for number in range(3):
        submit(core, f"e{number}", milli=900)
        core.cancel(f"e{number}", now_ns=3)
    assert "nightly" not in core.state.workloads
    assert is_placed(submit(core, "nightly", "whisper", 0.0))
    assert not is_placed(submit(core, "other", "x"))
    core.cancel("nightly", now_ns=4)
    settle(core, 4)
    assert is_placed(core.state.workloads["other"])
    assert not core._chooser.is_limited_by_interference(core.state.workloads["other"].spec)


def promise(sim, key, load, most, *, end_h, milli=500, run_h=1.0, **spec):
    deadline = JobDeadline(end_ns=int(end_h * HOUR) * S)
    sharing = GpuSharing(load=load, slowdown_most=most)
    return sim.submit(key, 1, int(run_h * HOUR), milli=milli, gpu_sharing=sharing, deadline=deadline, **spec)


def test_promised_places_are_of_who_bears_each_other():
    sim = Simulation(build_node("a", gpus=1))
    sim.submit("whole", 1, HOUR)
    assert promise(sim, "A", "a", 0.0, end_h=2.2).promise is not None
    with pytest.raises(InvalidArgument, match="the deadline cannot be promised"):
        promise(sim, "B", "b", 0.0, end_h=2.2)
    # One after the other.
    assert promise(sim, "C", "b", 0.0, end_h=3.2).promise is not None
    sim.advance(4 * HOUR)
    assert sim.starts["C"] >= sim.starts["A"] + HOUR


@pytest.mark.parametrize("mode", [BackfillMode.EASY, BackfillMode.CONSERVATIVE])
def test_nobody_moves_in_beside_a_promised_place_that_does_not_bear_it(mode):
    sim = Simulation(build_node("a", gpus=1), backfill=mode)
    sim.submit("X", 1, HOUR, milli=500, gpu_sharing=GpuSharing(load="x"))
    assert promise(sim, "A", "a", 0.0, end_h=2.2, priority=5).promise is not None
    late = sim.submit("C", 1, 10 * HOUR, milli=500, gpu_sharing=GpuSharing(load="c"))
    assert late.reason.startswith("backfill: ")
    sim.advance(HOUR + 360)
    assert is_placed(sim.core.state.workloads["A"])
    assert sim.core.state.workloads["A"].deadline_breach is None


def test_a_kept_place_is_not_taken_while_somebody_is_there_who_is_not_borne():
    sim = Simulation(build_node("n0", gpus=1), build_node("n1", gpus=1))
    sim.submit("Y", 1, HOUR // 2)
    sim.submit("X", 1, HOUR, milli=500, gpu_sharing=GpuSharing(load="x"))
    begins = JobSchedule(begin_ns=int(1.5 * HOUR) * S)
    sim.submit("B", 1, HOUR, schedule=begins, deadline=JobDeadline(end_ns=int(2.7 * HOUR) * S))
    promise(sim, "A", "a", 0.0, end_h=3.2, run_h=2.0)
    for _ in range(6):
        sim.advance(HOUR // 6)
        running = {key for key, one in sim.core.state.workloads.items() if is_placed(one)}
        places = {key: gpus_of(sim.core.state.workloads[key]) for key in ("A", "X") if key in running}
        assert len(places) < 2 or places["A"] != places["X"]


def test_a_service_of_many_replicas_apart_is_placed_at_once():
    """One search, whatever share they ask for and however few bear each other."""
    core = start(*(build_node(f"n{number}", gpus=8) for number in range(20)))
    before = core._chooser.searches
    workload = submit(core, "many", "a", 0.0, milli=10, replicas=160)
    assert len(set(gpus_of(workload))) == 160
    assert core._chooser.searches - before <= 2


@pytest.mark.parametrize("queues", [(), (Queue(name="root"), Queue(name="q", parent="root"))])
@pytest.mark.parametrize("order", ["ax", "xa"])
def test_work_that_waits_is_told_apart_by_its_load(queues, order):
    """In a round neither the refusal nor the place of one request is that of another with another load."""
    core, queue = start(), "q" if queues else ""
    if queues:
        core.update_policy(replace(core.state.policy, queues=queues), now_ns=1)
    submit(core, "there", "b", milli=100, queue=queue)
    core.submit(build_request("whole", milli=900, queue=queue), now_ns=2)
    for key in order:
        submit(core, key, key, 0.1, milli=300, queue=queue)
    core.cancel("whole", now_ns=3)
    settle(core, 3)
    assert is_placed(core.state.workloads["a"])
    assert core.state.workloads["x"].reason.startswith("interference: ")


def test_a_raised_limit_lets_waiting_work_start():
    core = start(most=0.0)
    submit(core, "a", "a")
    assert not is_placed(submit(core, "b", "b"))
    core.update_policy(replace(core.state.policy, shared_slowdown_most=0.3), now_ns=3)
    settle(core, 3)
    assert is_placed(core.state.workloads["b"])


def test_what_is_measured_later_lets_waiting_work_start():
    core = start()
    submit(core, "first", "x", 0.1)
    submit(core, "second", "y", 0.1)
    assert "eelctl interference set x y SLOWDOWN" in wait(core, "second")
    told = (("x", "y", 0.1), ("y", "x", 0.02))
    more = tuple(Interference(load=load, beside=beside, slowdown=slowdown) for load, beside, slowdown in told)
    for number, known in enumerate((more[:1], more), start=3):
        core.update_policy(replace(core.state.policy, interference=(*INTERFERENCE, *known)), now_ns=number)
        settle(core, number)
        assert is_placed(core.state.workloads["second"]) is (known == more)


def test_a_service_is_known_by_its_profile():
    service = ServicePromise(profile="a", rate_hz=1.0, replicas_most=4, objectives=OBJECTIVE)
    core = start()
    kind = WorkloadKind.INFERENCE_SERVICE
    submit(core, "b", "b", 0.3)
    core.submit(build_request("s", milli=200, service=service, kind=kind), now_ns=2)
    assert is_placed(core.state.workloads["s"])
    core = start()
    submit(core, "b", "b", 0.29)
    core.submit(build_request("s", milli=200, service=service, kind=kind), now_ns=2)
    assert not is_placed(core.state.workloads["s"])


def test_the_policy_in_the_journal_has_pairs_only_where_there_are_some():
    assert "interference" not in policy_to_plain(Policy())
    policy = Policy(interference=INTERFERENCE, shared_slowdown_most=0.2)
    assert from_plain(Policy, policy_to_plain(policy)) == policy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20%", 0.2),
        ("0.2", 0.2),
        ("0", 0.0),
        ("150 %", 1.5),
        ("1", 1.0),
        ("2", None),
        ("-1%", None),
        ("", None),
        ("a", None),
    ],
)
def test_slowdowns_are_written_in_per_cent_or_parts(text, value):
    if value is None:
        with pytest.raises(ValueError, match="%"):
            parse_slowdown(text)
    else:
        assert parse_slowdown(text) == pytest.approx(value)
        assert parse_slowdown(format_slowdown(value)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("load,slowdown\na,3%\n", "does not name load, beside, slowdown"),
        ("load,beside,slowdown\na,b,3%\na,b,4%\n", "line 3: a beside b is there twice"),
        ("load,beside,slowdown\na,b,many\n", "line 2: 'many' is no slowdown"),
        ("load,beside,slowdown\na,,3%\n", "line 2"),
        ("load,beside,slowdown\na,b\n", "line 2"),
    ],
)
def test_a_file_of_pairs_is_refused_with_the_line(text, problem):
    with pytest.raises(RequestRefused) as refused:
        read_pairs(text, "pairs.csv")
    assert problem in str(refused.value)


def test_a_file_of_pairs_is_read():
    text = "load,beside,slowdown,n\nwhisper,resnet-50,20%,8\nwhisper,*,1\n*,*,0.3\n"
    assert [(one.load, one.beside, one.slowdown) for one in read_pairs(text, "pairs.csv")] == [
        ("whisper", "resnet-50", 0.2),
        ("whisper", "*", 1.0),
        ("*", "*", 0.3),
    ]


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize(("slowdown", "beside"), [(0.4, "y"), (0.01, "x")])
def test_of_gpus_within_limits_the_one_is_taken_where_loads_slow_each_other_down_least(order, slowdown, beside):
    known = [("n", "x", slowdown), ("x", "n", 0.0), ("n", "y", 0.1), ("y", "n", 0.05)]
    pairs = tuple(Interference(load=one, beside=other, slowdown=value) for one, other, value in known)
    core = start(build_node("n", gpus=2), pairs=pairs)
    for load in order:
        submit(core, load, load, milli=600)
    placed = submit(core, "n", "n", milli=300)
    assert gpus_of(placed) == gpus_of(core.state.workloads[beside])


def test_an_idle_gpu_is_woken_only_where_that_costs_less_than_the_slowdown():
    for slowdown, wakes in ((0.02, False), (1.0, True)):
        pairs = tuple(Interference(load=one, beside=other, slowdown=slowdown) for one, other in ("ab", "ba"))
        core = start(build_node("n", gpus=2), pairs=pairs)
        submit(core, "first", "a", milli=500)
        second = submit(core, "second", "b", milli=500)
        assert (gpus_of(second) != gpus_of(core.state.workloads["first"])) is wakes


def begin_nominated(*nodes, pairs=(), x_gpus=1):
    """A core in which work of `x` may reclaim its quota from processes of `y`."""
    known = tuple(Interference(load=one, beside=other, slowdown=value) for one, other, value in pairs)
    nodes = tuple(build_node(name, gpus=1, runs_processes=True, agent_version="1") for name in nodes)
    core = preemption.begin(preemption.queue("x", x_gpus, preemption.RECLAIM), preemption.queue("y", 0), nodes=nodes)
    core.update_policy(replace(core.state.policy, interference=known), now_ns=2)
    return core


def run(core, key, queue, most=None, milli=500, *, is_process=False):
    process, mobility = (preemption.PROCESS, Mobility.FIXED) if is_process else (None, Mobility.MOVABLE)
    submit(core, key, key, most, milli=milli, queue=queue, process=process, mobility=mobility)
    preemption.settle(core)
    if is_process:
        core.record_attempts(
            core.state.workloads[key].placements[0].node_name, (preemption.status(core, key),), now_ns=4
        )


def stop(core, key):
    preemption.report_stopped(core, key, node_name=core.state.workloads[key].placements[0].node_name)
    preemption.settle(core, 51)


def find_shared(core):
    """The loads on each GPU."""
    found = {}
    for key, one in core.state.workloads.items():
        for uuid in gpus_of(one) if is_placed(one) else ():
            found.setdefault(uuid, set()).add(key)
    return found


def test_nobody_moves_to_a_gpu_that_is_nominated_for_work_that_does_not_bear_it():
    core = begin_nominated("a", "b", x_gpus=3)
    run(core, "v", "y", milli=900, is_process=True)
    run(core, "f", "y", milli=900, is_process=True)
    run(core, "m", "y", milli=100)
    run(core, "a", "x", 0.0)
    (nomination,) = core.state.nominations
    (target,) = nomination.placements
    (source,) = core.state.workloads["m"].placements
    assert source.gpu_uuids != target.gpu_uuids
    with pytest.raises(MoveRefused, match="limit on interference"):
        core.apply_moves([move_of(core, "m", target.node_name, target.gpu_uuids[0])], now_ns=6)
    # Neither does it start there.
    run(core, "n", "y", milli=100)
    for victim in nomination.victims:
        stop(core, victim)
    assert is_placed(core.state.workloads["a"])
    assert find_shared(core)[target.gpu_uuids[0]] == {"a"}


def test_a_nominated_place_is_not_taken_beside_what_is_not_borne_any_more():
    pairs = (("a", "b", 0.1), ("b", "a", 0.1), ("a", "v", 0.5))
    core = begin_nominated("a", pairs=pairs)
    run(core, "b", "y", milli=300)
    run(core, "v", "y", milli=700, is_process=True)
    run(core, "a", "x", 0.2)
    assert len(core.state.nominations) == 1
    worse = (Interference(load="a", beside="b", slowdown=9.0), Interference(load="b", beside="a", slowdown=0.1))
    core.update_policy(replace(core.state.policy, interference=worse), now_ns=5)
    preemption.settle(core)
    stop(core, "v")
    assert not any({"a", "b"} <= keys for keys in find_shared(core).values())


def test_moves_do_not_fill_the_gpu_of_work_with_a_limit():
    """What would empty nodes goes elsewhere if there is room beside work that states how much it bears."""

    def list_targets(most):
        core = start(*(build_node(f"n{number}", gpus=1) for number in range(3)), pairs=())
        for number in range(3):
            submit(core, f"big{number}", "b", milli=700)
            key = "limited" if number == 0 else f"small{number}"
            submit(core, key, "a", most if number == 0 else None, milli=200)
        for number in range(3):
            core.cancel(f"big{number}", now_ns=3)
        (held,) = core.state.workloads["limited"].placements
        survey = core.survey_moves(RecommendMovesRequest(goal=MoveGoal.POWER, moves_most=8))
        moves = recommend_moves(build_migration_problem(survey)).moves
        moved = {move.workload_id for move in moves}
        return held.node_name, moved, {one.target.node_name for move in moves for one in move.replicas}

    node_name, moved, targets = list_targets(None)
    assert "limited" in moved or node_name in targets
    node_name, moved, targets = list_targets(5.0)
    assert moved
    assert "limited" not in moved
    assert node_name not in targets


def test_work_without_a_limit_is_not_promised_a_place_beside_a_promise_that_has_one():
    sim = Simulation(build_node("a", gpus=1))
    sim.submit("whole", 1, HOUR)
    assert promise(sim, "A", "a", 0.0, end_h=2.2).promise is not None
    with pytest.raises(InvalidArgument, match="the deadline cannot be promised"):
        promise(sim, "B", "b", None, end_h=2.2)


@pytest.mark.parametrize("milli", [400, 900])
def test_a_promise_is_planned_anew_beside_work_that_is_being_submitted(milli):
    """With a budget that summed the watts of work that the state did not know yet, which broke the core."""
    core = start(pairs=())
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1e5)
    core.update_policy(replace(core.state.policy, backfill=BackfillMode.EASY, budgets=(budget,)), now_ns=S)
    for key, share, most, run_s in (("x", 500, None, HOUR), ("a", milli, 0.0, HOUR), ("c", 300, None, 10 * HOUR)):
        submit(core, key, key, most, milli=share, expected_runtime_s=float(run_s))
        settle(core, 2)
    assert [is_placed(one) for one in core.state.workloads.values()] == [True, False, False]


def test_a_promise_is_not_planned_beside_work_being_submitted_that_it_does_not_bear():
    pairs = (("*", "*", 0.0), ("a", "c", 9.0))
    known = tuple(Interference(load=one, beside=other, slowdown=value) for one, other, value in pairs)
    core = start(build_node("n0", gpus=1), build_node("n1", gpus=1), pairs=known)
    core.update_policy(replace(core.state.policy, backfill=BackfillMode.EASY), now_ns=S)
    wanted = (("x", 500, None, 1), ("y", 900, None, 10), ("a", 600, 0.5, 1), ("c", 300, None, 10))
    for key, milli, most, hours in wanted:
        submit(core, key, key, most, milli=milli, expected_runtime_s=float(hours * HOUR))
        settle(core, 2)
    assert core.state.workloads["c"].reason.startswith("backfill: ")


@pytest.mark.parametrize("limits", ["queue", "budget"])
def test_an_array_with_a_deadline_is_promised_beside_busy_gpus(limits):
    """Its elements are not known yet when their quota and watts are summed."""
    core, queue = start(build_node("n", gpus=2), pairs=()), ""
    policy = core.state.policy
    if limits == "queue":
        queue = "x"
        policy = replace(policy, queues=(preemption.queue("x", 2, parent=""),))
    else:
        policy = replace(policy, budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1e5),))
    core.update_policy(policy, now_ns=S)
    core.submit(build_request("busy", replicas=2, expected_runtime_s=3600.0, queue=queue), now_ns=S)
    deadline = JobDeadline(end_ns=20_000 * S)
    request = build_request("w", expected_runtime_s=600.0, deadline=deadline, queue=queue)
    core.submit(replace(request, array=JobArrayRequest(indexes="0-1")), now_ns=2 * S)
    assert core.state.workloads["w_0"].promise is not None


def test_loads_that_no_pair_names_are_one_to_the_search():
    """Users choose the names of loads and their limits, and a search costs what the policy's names do."""
    rules = InterferenceRules(Policy(interference=INTERFERENCE))
    table = MixTable(rules)
    numbers = {table.number(make_mix([GpuSharing(load=f"mine-{number}")])) for number in range(500)}
    assert len(numbers) == 1
    for number in range(500):
        table.number(make_mix([GpuSharing(load=f"mine-{number}", slowdown_most=number / 500), GpuSharing(load="a")]))
    assert table._counts.shape[1] == 8
    assert table.count_joining(GpuSharing(load="a"), 3).shape == (table.size,)


@pytest.mark.parametrize("count", [1, 8, 9, 17, 40])
def test_one_gpu_may_hold_loads_of_many_names(count):
    """More new names at once than the table of mixes has columns left."""
    names = [f"load-{number}" for number in range(count)]
    pairs = tuple(Interference(load=name, beside="*", slowdown=0.0) for name in names)
    core = start(pairs=())
    for name in names:
        submit(core, name, name, milli=10)
    core.update_policy(replace(core.state.policy, interference=pairs), now_ns=3)
    assert is_placed(submit(core, "last", names[0], 0.0, milli=10))
    assert not is_placed(submit(core, "unknown", "x", 0.0, milli=10))
