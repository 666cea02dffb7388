"""Limits on interference: who may share a GPU with whom, in starts, growth, moves and what waits."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.unit.decision_test import Recorder

from eelgrid_controller.cli.connection import RequestRefused
from eelgrid_controller.cli.interference import format_slowdown, parse_slowdown, read_pairs
from eelgrid_controller.core.workloads import MoveRefused
from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.placement.interference import InterferenceRules
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.policy import policy_to_plain
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    GpuSharing,
    Interference,
    LatencyMetric,
    LatencyObjective,
    Move,
    MoveGoal,
    Policy,
    RecommendMovesRequest,
    ReplicaMove,
    ServicePromise,
    WorkloadKind,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.schema import InvalidMessage, check_message

PAIRS = (("a", "b", 0.1), ("b", "a", 0.3), ("a", "a", 0.25), ("b", "b", 0.0), ("c", "*", 0.05), ("*", "c", 0.5))
OBJECTIVE = (LatencyObjective(metric=LatencyMetric.RESPONSE, quantile=0.9, latency_s=1.0),)
INTERFERENCE = tuple(Interference(load=load, beside=beside, slowdown=slowdown) for load, beside, slowdown in PAIRS)


def start(*nodes, most=None, pairs=INTERFERENCE):
    core = build_core(*(nodes or (build_node("n", gpus=1),)))
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
    assert (
        rules.are_within_limits(
            [GpuSharing(load=load, slowdown_most=most) for load, most in zip(loads, limits, strict=True)]
        )
        is is_within
    )


def test_the_policy_has_the_limit_of_work_that_states_none():
    rules = InterferenceRules(Policy(interference=INTERFERENCE, shared_slowdown_most=0.1))
    assert rules.are_within_limits([GpuSharing(load="a"), GpuSharing(load="b", slowdown_most=0.3)])
    assert not rules.are_within_limits([GpuSharing(load="a"), GpuSharing(load="b")])


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
    core = start(build_node("m", gpus=1), build_node("n", gpus=1))
    submit(core, "x", "x", milli=900)
    submit(core, "b", "b", milli=300)
    assert gpus_of(core.state.workloads["x"]) != gpus_of(core.state.workloads["b"])
    core.cancel("x", now_ns=3)
    submit(core, "y", "y", milli=300, most=None)
    tolerant = submit(core, "a", "a", 0.1, milli=300)
    assert is_placed(tolerant)
    assert gpus_of(tolerant) == gpus_of(core.state.workloads["b"]) or gpus_of(tolerant) != gpus_of(
        core.state.workloads["y"]
    )


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
    submit(core, "b", "b", milli=600)
    submit(core, "c", "b", milli=300)
    places = {key: (one.placements[0].node_name, *gpus_of(one)) for key, one in core.state.workloads.items()}
    assert places["a"] != places["b"]
    key = "c"
    beside_a = places["c"] == places["a"]
    target = places["b"] if beside_a else places["a"]
    if beside_a:
        core.apply_moves([move_of(core, key, *target)], now_ns=5)
        target = places["a"]
    core.cancel("b", now_ns=6)
    submit(core, "d", "x", milli=300)
    with pytest.raises(MoveRefused, match="limit on interference"):
        core.apply_moves([move_of(core, "d", *target)], now_ns=7)


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
        submit(core, "first", "b", 0.0)
        submit(core, "second", "c", 0.05)
        submit(core, "third", "a", 0.1)
        return core

    remedy = wait(begin(), "third")
    assert remedy.startswith("The only node is ruled out by interference. To help: wait for or cancel ")
    # `b` bears no load beside it but its own kind.
    core = start()
    submit(core, "first", "c", 0.05)
    submit(core, "second", "a", 0.1)
    assert "wait for or cancel first" in wait(core, "second")
    assert "bear more with --gpu-slowdown 50%" in wait(core, "second")
    core.cancel("first", now_ns=3)
    settle(core, 3)
    assert is_placed(core.state.workloads["second"])
    assert is_placed(submit(start(), "alone", "a", 0.5))
    core = start()
    submit(core, "first", "c", 0.05)
    assert is_placed(submit(core, "second", "a", 0.5))


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


def test_equal_requests_with_other_loads_are_tried_each():
    """Neither does a refusal of one hold the other back, nor is one placed by what the other may."""
    core = start()
    submit(core, "first", "a", 0.1)
    for number in range(3):
        submit(core, f"c{number}", "c", 0.0, milli=200)
    # Whose load bears `a`, and is borne.
    submit(core, "x", "x", milli=900)
    submit(core, "b", "b")
    assert is_placed(core.state.workloads["b"])
    core.cancel("b", now_ns=3)
    submit(core, "again", "b", priority=-1)
    settle(core, 3)
    assert is_placed(core.state.workloads["again"])


def test_a_decision_within_limits_is_no_decision_file():
    recorder = Recorder(build_node("n", gpus=1))
    request = build_request("w", milli=200, gpu_sharing=GpuSharing(load="a", slowdown_most=0.1))
    recorder.do(recorder.core.submit, request)
    with pytest.raises(FailedPrecondition, match="eelctl explain"):
        recorder.exported("w")


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


def test_pods_say_it_in_annotations():
    notes = {well_known.ANNOTATION_GPU_LOAD: "whisper", well_known.ANNOTATION_GPU_SLOWDOWN: "20%"}
    assert annotations.parse_gpu_sharing(notes) == GpuSharing(load="whisper", slowdown_most=0.2)
    assert annotations.parse_gpu_sharing({}) is None


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
