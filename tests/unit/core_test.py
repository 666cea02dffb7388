"""The core: calls become events at once; refusals name the field; waiting work is tried when capacity appears."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes

from eelgrid_controller.core import retry_rounds
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    PricesQuoted,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadPlaced,
    WorkloadSubmitted,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import Aborted, AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import OBJECTIVES, JobArrayRequest, Policy, PoolMode, Queue, WorkloadPhase


def test_a_submission_becomes_events_and_changes_one_plan():
    core = build_core(build_node("a"))
    step = core.submit(build_request(gpus=1), now_ns=7)
    assert [type(event) for event in step.events] == [PricesQuoted, WorkloadSubmitted, WorkloadPlaced]
    assert (step.result.workload_id, step.result.phase, step.nodes) == ("w-1", WorkloadPhase.PLACED, {"a"})
    assert (step.result.submitted_ns, step.result.placed_ns) == (7, 7)
    assert core.workload("w-1") == step.result


def test_repeating_a_submission_is_harmless_and_another_spec_under_its_id_is_refused():
    core = build_core(build_node("a"))
    first = core.submit(build_request(gpus=1, key="job"), now_ns=1)
    again = core.submit(build_request(gpus=1, key="job"), now_ns=2)
    assert (again.events, again.result, again.nodes) == ((), first.result, frozenset())
    with pytest.raises(AlreadyExists, match="choose another id"):
        core.submit(build_request(gpus=2, key="job"), now_ns=3)


@pytest.mark.parametrize("ended_most", [0, 10])
def test_a_submission_that_is_cancelled_at_once_marks_its_id(ended_most):
    core = build_core(build_node("a"), state=ClusterState(ended_most=ended_most))
    request = build_request(gpus=1, key="job")
    step = core.submit(replace(request, cancelled=True), now_ns=1)
    assert [type(event) for event in step.events] == [WorkloadSubmitted, WorkloadCancelled]
    assert (step.result.phase, step.nodes) == (WorkloadPhase.CANCELLED, frozenset())
    assert core.state.live_workloads == 0
    if ended_most:
        # Repeated it changes nothing, and what comes late is refused, an array too.
        assert core.submit(replace(request, cancelled=True), now_ns=2).events == ()
        for array in (None, JobArrayRequest(indexes="0-1")):
            with pytest.raises(AlreadyExists):
                core.submit(replace(request, spec=replace(request.spec, priority=5), array=array), now_ns=3)
        # One that asks for what the mark says is a repetition of it.
        assert core.submit(request, now_ns=4).result.phase is WorkloadPhase.CANCELLED


def test_work_that_has_the_id_of_a_submission_as_cancelled_stays_as_it_is():
    core = build_core(build_node("a"))
    request = build_request(gpus=1, key="job")
    first = core.submit(request, now_ns=1)
    assert core.submit(replace(request, cancelled=True), now_ns=2) == CoreStep((), first.result, frozenset())
    with pytest.raises(AlreadyExists):
        core.submit(replace(build_request(gpus=2, key="job"), cancelled=True), now_ns=3)
    array = replace(build_request(key="many"), array=JobArrayRequest(indexes="0-1"))
    core.submit(array, now_ns=4)
    assert core.submit(replace(array, cancelled=True), now_ns=5).events == ()
    with pytest.raises(InvalidArgument, match="nothing can be recorded"):
        core.submit(replace(build_request(), cancelled=True), now_ns=6)


def test_no_queue_refuses_a_submission_that_is_cancelled_at_once():
    core = build_core(build_node("a"))
    core.update_policy(Policy(queues=(Queue(name="research"),)), now_ns=1)
    request = build_request(gpus=1, key="job")
    request = replace(request, spec=replace(request.spec, queue="none"))
    with pytest.raises(InvalidArgument):
        core.submit(request, now_ns=2)
    assert core.submit(replace(request, cancelled=True), now_ns=3).result.phase is WorkloadPhase.CANCELLED
    following = build_request(gpus=1, key="next")
    following = replace(following, spec=replace(following.spec, queue="research"))
    assert core.submit(following, now_ns=4).result.phase is WorkloadPhase.PLACED


def test_drawn_ids_pass_over_ids_that_users_chose():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=0, key="w-1"), now_ns=1)
    core.submit(build_request(gpus=0, key="w-41"), now_ns=1)
    core.submit(build_request(gpus=0, key="w-" + "9" * 100), now_ns=1)
    assert core.submit(build_request(gpus=0), now_ns=1).result.workload_id == "w-42"
    core.submit(build_request(gpus=0, key="w-43_1"), now_ns=1)
    array = replace(build_request(gpus=0), array=JobArrayRequest(indexes="0-2"))
    assert core.submit(array, now_ns=1).result.workload_id == "w-44"


def test_no_chosen_id_keeps_others_from_having_ids_drawn():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=0, key="w-" + "9" * 18), now_ns=1)
    for changes in ({}, {"array": JobArrayRequest(indexes="0-2")}, {"cancelled": True}):
        for taken in (f"w-{10**18 + 1}", f"w-{10**18 + 1}_1"):
            with pytest.raises(InvalidArgument, match="left to be drawn"):
                core.submit(replace(build_request(gpus=0, key=taken), **changes), now_ns=1)
    core = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
    drawn = [core.submit(build_request(gpus=0), now_ns=1).result.workload_id for _ in range(3)]
    assert drawn == [f"w-{10**18 + number}" for number in range(3)]
    assert core.submit(build_request(gpus=0, key=drawn[0]), now_ns=1).events == ()


def test_a_dry_run_tells_the_outcome_and_changes_nothing():
    core = build_core(build_node("a"))
    before = core.state.digest()
    dry = core.submit(build_request(gpus=2, dry_run=True), now_ns=1)
    assert (dry.events, dry.nodes, core.state.digest()) == ((), frozenset(), before)
    real = core.submit(build_request(gpus=2), now_ns=1)
    assert dry.result.placements == real.result.placements
    assert dry.result.workload_id == real.result.workload_id
    waiting = core.submit(build_request(gpus=2, dry_run=True), now_ns=1)
    assert (waiting.result.phase, waiting.result.reason[:9]) == (WorkloadPhase.PENDING, "gpu_count")


@pytest.mark.parametrize(
    ("wanted", "field", "words"),
    [
        (build_request(gpus=1, models=("H100",)), "spec.request.gpu_models", "the cluster has G2 (2), T4 (4)"),
        (build_request(gpus=5), "spec.request.gpu_count", "no registered node has more than 4"),
        (build_request(gpus=3, models=("G2",)), "spec.request.gpu_count", "more than 2"),
        (build_request(gpus=0, cpu=97), "spec.request.cpu_milli", "has 96000"),
        (build_request(cpu=50, gpus=4), "spec.request.cpu_milli", "with 4 such GPUs has 16000"),
        (build_request(gpus=0, memory_gib=385), "spec.request.memory_bytes", "ask for at most"),
        (build_request(gpus=2, replicas=4), "spec.replicas", "holds 3"),
    ],
)
def test_what_no_node_could_ever_hold_is_refused_by_field(wanted, field, words):
    core = build_core(build_node("a"), build_node("b", gpus=4, model="T4", cpu=16, memory_gib=64))
    core.mark_node_lost("b", now_ns=1)  # A lost node may come back: it counts.
    with pytest.raises(InvalidArgument) as refused:
        core.submit(wanted, now_ns=1)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert words in str(violation)
    assert violation.remedy
    assert core.state.workloads == {}


def test_a_request_for_gpus_where_no_node_has_one_is_told_to_ask_for_none():
    with pytest.raises(InvalidArgument) as refused:
        build_core(build_node("a", gpus=0)).submit(build_request(gpus=1), now_ns=1)
    assert "no registered node has a GPU; ask for 0" in str(refused.value.violations[0])


def test_a_cluster_without_nodes_refuses_nothing():
    step = build_core().submit(build_request(gpus=64, models=("B300",)), now_ns=1)
    assert [type(event) for event in step.events] == [WorkloadSubmitted, WorkloadDeferred]


def test_a_request_that_contradicts_itself_never_reaches_the_arithmetic():
    with pytest.raises(InvalidArgument, match=r"spec\.request\.gpu_milli"):
        build_core(build_node("a")).submit(build_request(gpus=1, milli=0), now_ns=1)


def test_live_workloads_are_bounded():
    core = build_core(build_node("a"), live_most=2)
    core.submit(build_request(gpus=0), now_ns=1)
    core.submit(build_request(gpus=0), now_ns=1)
    with pytest.raises(ResourceExhausted, match="cancel some"):
        core.submit(build_request(gpus=0), now_ns=1)
    core.cancel("w-1", now_ns=2)
    core.submit(build_request(gpus=0), now_ns=3)


def test_cancelling_gives_capacity_to_the_work_that_waits_highest_priority_first():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=2), now_ns=1)
    for priority in (0, 5, 5, 9):
        core.submit(build_request(gpus=1, priority=priority), now_ns=2)
    step = core.cancel("w-1", now_ns=3)
    assert [getattr(event, "workload_id", "") for event in drop_quotes(step.events)] == ["w-1", "w-5", "w-3"]
    assert step.nodes == {"a"}
    assert step.result.phase is WorkloadPhase.CANCELLED
    assert core.workload("w-5").placed_ns == 3
    assert [core.workload(f"w-{number}").phase.name for number in (2, 4)] == ["PENDING", "PENDING"]
    assert core.cancel("w-1", now_ns=4).events == ()


def test_smaller_work_may_overtake_larger_work_that_waits():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1), now_ns=1)
    core.submit(build_request(gpus=2), now_ns=2)
    assert core.submit(build_request(gpus=1), now_ns=3).result.phase is WorkloadPhase.PLACED


def test_a_node_that_joins_takes_the_work_that_waits():
    core = build_core()
    core.submit(build_request(gpus=1), now_ns=1)
    step = core.register_node(build_node("a"), now_ns=2)
    assert [type(event).__name__ for event in drop_quotes(step.events)] == ["NodeJoined", "WorkloadPlaced"]
    assert step.nodes == {"a"}
    assert core.register_node(build_node("a"), now_ns=3).events == ()


def test_the_reason_follows_what_stands_in_the_way():
    core = build_core()
    for _ in range(3):
        assert core.submit(build_request(gpus=2), now_ns=1).result.reason.startswith("no_nodes")
    core.register_node(build_node("a"), now_ns=2)
    assert [core.workload(f"w-{n}").reason.partition(":")[0] for n in (1, 2, 3)] == ["", "gpu_count", "gpu_count"]


def test_a_lost_node_takes_nothing_until_it_is_back():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1), now_ns=1)
    assert core.mark_node_lost("a", now_ns=2).nodes == frozenset()
    assert core.mark_node_lost("a", now_ns=2).events == ()
    assert core.submit(build_request(gpus=1), now_ns=3).result.phase is WorkloadPhase.PENDING
    assert core.workload("w-1").phase is WorkloadPhase.PLACED
    core.register_node(build_node("a"), now_ns=4)
    assert core.workload("w-2").placements[0].gpu_uuids == ("GPU-a-1",)


def test_a_lost_gpu_takes_nothing_until_it_is_back():
    core = build_core(build_node("a"))
    core.mark_gpu_lost("a", "GPU-a-0", now_ns=1)
    assert core.mark_gpu_lost("a", "GPU-a-0", now_ns=1).events == ()
    assert core.submit(build_request(gpus=1), now_ns=2).result.placements[0].gpu_indexes == (1,)
    assert core.submit(build_request(gpus=1), now_ns=2).result.phase is WorkloadPhase.PENDING
    step = core.mark_gpu_returned("a", "GPU-a-0", now_ns=3)
    assert core.workload("w-2").placements[0].gpu_indexes == (0,)
    assert step.nodes == {"a"}
    assert core.mark_gpu_returned("a", "GPU-a-0", now_ns=3).events == ()


def test_a_cordoned_gpu_takes_nothing_until_the_node_says_that_it_is_mended():
    plain = build_node("a")
    sick = replace(plain.gpus[0], cordon="the driver requests: reset the GPU")
    core = build_core(replace(plain, gpus=(sick, plain.gpus[1])))
    assert core.submit(build_request(gpus=1), now_ns=1).result.placements[0].gpu_indexes == (1,)
    assert core.submit(build_request(gpus=1), now_ns=1).result.phase is WorkloadPhase.PENDING
    core.register_node(plain, now_ns=2)
    assert core.workload("w-2").placements[0].gpu_indexes == (0,)


def test_a_gpu_of_a_partition_takes_no_whole_work():
    plain = build_node("a")
    core = build_core(replace(plain, gpus=(replace(plain.gpus[0], mig_enabled=True), plain.gpus[1])))
    assert core.submit(build_request(gpus=1, milli=100), now_ns=1).result.placements[0].gpu_indexes == (1,)
    assert core.submit(build_request(gpus=2), now_ns=1).result.reason.startswith("gpu_mig")


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.cancel("nobody", now_ns=1),
        lambda core: core.workload("nobody"),
        lambda core: core.explain_workload("nobody"),
        lambda core: core.node_plan("nobody"),
        lambda core: core.mark_node_lost("nobody", now_ns=1),
        lambda core: core.mark_gpu_lost("nobody", "GPU-1", now_ns=1),
        lambda core: core.mark_gpu_lost("a", "nobody", now_ns=1),
        lambda core: core.mark_gpu_returned("a", "nobody", now_ns=1),
    ],
)
def test_what_is_not_there_is_named(call):
    with pytest.raises(NotFound, match="nobody"):
        call(build_core(build_node("a")))


def test_a_policy_is_changed_by_who_knows_the_one_in_force():
    core = build_core(build_node("a"))
    step = core.update_policy(Policy(objective="energy", weights=OBJECTIVES["energy"]), now_ns=1)
    assert (step.result.revision, core.state.policy.objective) == (1, "energy")
    with pytest.raises(Aborted, match="revision 1, not 0"):
        core.update_policy(Policy(), now_ns=2)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(objective="greed"), "policy.objective"),
        (Policy(objective="energy"), "policy.weights"),
        (Policy(pools=(PoolMode(pool="x", mode=1), PoolMode(pool="x", mode=2))), "policy.pools"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused_by_field(policy, field):
    core = build_core()
    with pytest.raises(InvalidArgument) as refused:
        core.update_policy(policy, now_ns=1)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("objective", "stranding", "lookahead", "full"),
    [
        ("energy", 50.0, 0.7, 0.0),
        ("energy", 50.0, 0.8, 0.0),
        ("energy", 50.0, 0.8, 500.0),
        ("balanced", 50.0, 0.7, 1000.0),
        ("balanced", 100.0, 0.8, 2000.0),
    ],
)
def test_a_policy_with_the_weights_of_an_earlier_version_can_be_changed_elsewhere(
    objective, stranding, lookahead, full
):
    """A journal has the weights that the objective had; they stay until it is set again."""
    former = replace(OBJECTIVES[objective], stranding_w=stranding, lookahead=lookahead, stranding_full_w=full)
    assert former != OBJECTIVES[objective]
    core = build_core()
    core.state.policy = Policy(objective=objective, weights=former)
    core.update_policy(Policy(objective=objective, weights=former, lease_s=40.0), now_ns=1)
    assert (core.state.policy.lease_s, core.state.policy.weights) == (40.0, former)
    core.update_policy(Policy(objective=objective, weights=OBJECTIVES[objective], revision=1), now_ns=2)
    assert core.state.policy.weights == OBJECTIVES[objective]


def test_weights_of_ones_own_change_the_choice():
    core = build_core(build_node("a-dear", model="G3"), build_node("b-cheap", model="T4"))
    free = replace(OBJECTIVES["balanced"], power=0.0, fragmentation_w=0.0, stranding_w=0.0)
    core.update_policy(Policy(objective="custom", weights=free), now_ns=1)
    assert core.submit(build_request(gpus=1), now_ns=2).result.placements[0].node_name == "a-dear"
    core.update_policy(Policy(revision=1), now_ns=3)
    assert core.submit(build_request(gpus=1), now_ns=4).result.placements[0].node_name == "b-cheap"


def test_a_round_of_tries_is_bounded_and_goes_on_where_it_stopped(monkeypatch):
    monkeypatch.setattr(retry_rounds, "_TRIES_MOST", 3)
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=2, cpu=96), now_ns=1)
    for number in range(8):
        # Seven kinds that fit beside nothing, and one at the end that does.
        core.submit(build_request(gpus=2, cpu=90 - number) if number < 7 else build_request(gpus=0, cpu=2), now_ns=2)
    core.submit(build_request(gpus=1, milli=600), now_ns=3)
    core.submit(build_request(gpus=1, milli=600), now_ns=3)
    step = core.cancel("w-1", now_ns=4)
    assert len(drop_quotes(step.events)) == 2
    assert core.has_backlog
    calls = 0
    while core.has_backlog:
        calls += 1
        assert calls < 10
        core.retry(now_ns=5)
    # w-2 took both GPUs and 90 CPUs; w-9 was far down the list and fits beside it.
    assert [core.workload(key).phase.name for key in ("w-2", "w-3", "w-9", "w-10")] == [
        "PLACED",
        "PENDING",
        "PLACED",
        "PENDING",
    ]
    assert core.retry(now_ns=6).events == ()


def test_like_work_is_tried_once_in_a_step(monkeypatch):
    monkeypatch.setattr(retry_rounds, "_TRIES_MOST", 3)
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=2), now_ns=1)
    for _ in range(50):
        core.submit(build_request(gpus=2), now_ns=2)
    core.submit(build_request(gpus=1), now_ns=3)
    core.mark_gpu_lost("a", "GPU-a-0", now_ns=4)
    step = core.cancel("w-1", now_ns=5)
    assert [getattr(event, "workload_id", "") for event in drop_quotes(step.events)] == ["w-1", "w-52"]
    assert not core.has_backlog


def test_a_new_core_on_a_loaded_state_decides_the_same():
    core = build_core(build_node("a", gpus=8), build_node("b", gpus=4, model="T4"))
    for number in range(6):
        core.submit(build_request(gpus=1, milli=150 * number + 100, cpu=number), now_ns=number)
    core.cancel("w-2", now_ns=9)
    other = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
    for number in range(8):
        wanted = build_request(gpus=number % 3, cpu=3)
        assert core.submit(wanted, now_ns=10).events == other.submit(wanted, now_ns=10).events
    assert core.state.digest() == other.state.digest()


def test_plans_go_on_above_the_epoch_that_an_agent_holds():
    """The journal began anew, or its disk was lost: agents must not take new plans for old ones."""
    core = build_core()
    core.register_node(build_node("n"), now_ns=1, plan_epoch=41)
    assert core.node_plan("n").epoch == 42
    assert core.register_node(build_node("n"), now_ns=2, plan_epoch=42).events == ()
    core.submit(build_request(gpus=1), now_ns=3)
    assert core.node_plan("n").epoch == 43


def test_equal_nodes_are_chosen_by_name_in_whatever_order_they_joined():
    for names in (("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")):
        core = build_core(*(build_node(name) for name in names))
        chosen = [
            core.submit(build_request(gpus=2), now_ns=number).result.placements[0].node_name for number in (1, 2, 3)
        ]
        assert chosen == ["a", "b", "c"]


def test_work_behind_an_equal_one_that_waits_is_decided_once_until_something_happens(monkeypatch):
    core = build_core(build_node("a"))
    decided, decide = [], core._starts.decide_start
    monkeypatch.setattr(core._starts, "decide_start", lambda one, *rest: decided.append(one) or decide(one, *rest))
    core.submit(build_request(gpus=2, key="first"), now_ns=1)
    waiting = [core.submit(build_request(gpus=1, key=f"j{number}"), now_ns=2).result for number in range(3)]
    assert {one.reason for one in waiting} == {waiting[0].reason}
    assert [one.workload_id for one in decided] == ["first", "j0"]
    # Another request, and the same one after something has ended, are decided.
    assert core.submit(build_request(gpus=1, cpu=2, key="other"), now_ns=3).result.phase is WorkloadPhase.PENDING
    assert core.submit(build_request(gpus=1, key="j3"), now_ns=3).result.phase is WorkloadPhase.PENDING
    assert [one.workload_id for one in decided] == ["first", "j0", "other", "j3"]
    core.cancel("first", now_ns=4)
    assert [core.workload(f"j{number}").phase for number in range(2)] == [WorkloadPhase.PLACED] * 2
    for key in ("j2", "j3", "other", "j1"):
        core.cancel(key, now_ns=5)
    assert core.submit(build_request(gpus=1, key="j4"), now_ns=6).result.phase is WorkloadPhase.PLACED
