"""What belongs with other work, behind a front: dependencies, repeated arrays and gangs, and the one cluster that they may go to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_request

from eelgrid_controller.federation.affinity import (
    apply_dependencies,
    check_part,
    list_anchors,
    merge_parts,
    pin_part,
    plan_gang,
    resolve_dependencies,
)
from eelgrid_controller.federation.dispatch import (
    Copy,
    CopyPhase,
    Dispatch,
    StoredRecord,
    Verb,
    add_clusters,
    choose_cluster,
    plan_calls,
    record_answer,
    record_failure,
    request_move,
)
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    ArrayStatus,
    DependencyCondition,
    GangPart,
    JobArrayRequest,
    JobDependency,
    JobSchedule,
    Workload,
    WorkloadPhase,
)

ENDED, SUCCEEDED = DependencyCondition.ENDED, DependencyCondition.SUCCEEDED
SPEC = build_request().spec


def record(key, cluster="", *, phase=CopyPhase.RELEASED, started=True, latest=WorkloadPhase.PLACED):
    """What the front keeps of a workload that a cluster has."""
    copies = (Copy(cluster=cluster, phase=phase, started=started),) if cluster else ()
    dispatch = Dispatch(workload_id=key, request=build_request(), copies=copies, chosen=cluster)
    return StoredRecord(dispatch, Workload(workload_id=key, spec=SPEC, phase=latest, submitted_ns=1))


def ended(key, cluster, latest=WorkloadPhase.SUCCEEDED):
    return record(key, cluster, phase=CopyPhase.ENDED, latest=latest)


def dependent(*after, array=None, **known):
    schedule = JobSchedule(after=after)
    request = replace(build_request(schedule=schedule), array=array)
    return resolve_dependencies(Dispatch(workload_id="w-child", request=request), known.get), request


def after(key, condition=SUCCEEDED, *, each=False):
    return JobDependency(workload_id=key, condition=condition, each=each)


def test_what_starts_after_running_work_goes_to_its_cluster_and_is_told_only_of_what_runs():
    state, request = dependent(after("a"), after("b"), a=record("a", "north"), b=ended("b", "south"))
    assert (state.cluster, state.met, state.waits_for, state.failure) == ("north", ("b",), "", "")
    sent = apply_dependencies(Dispatch(workload_id="w-child", request=request), state)
    assert [one.workload_id for one in sent.submission.spec.schedule.after] == ["a"]
    assert add_clusters(sent, ("south", "north"), ()).find_copy("south") is None
    assert not sent.may_move


def test_what_starts_after_work_that_may_still_move_waits_at_the_front():
    state, _ = dependent(after("a"), a=record("a", "north", started=False, latest=WorkloadPhase.PENDING))
    assert "a, which has not started" in state.waits_for


def test_what_starts_after_work_in_two_clusters_waits_until_one_of_them_has_ended():
    both = {"a": record("a", "north"), "b": record("b", "south")}
    state, _ = dependent(after("a"), after("b"), **both)
    assert "a in north and b in south" in state.waits_for
    state, _ = dependent(after("a"), after("b"), **(both | {"a": ended("a", "north")}))
    assert (state.cluster, state.met) == ("south", ("a",))


def test_a_dependency_that_ended_otherwise_fails_what_starts_after_it():
    state, request = dependent(after("a"), a=ended("a", "north", WorkloadPhase.FAILED))
    assert "a failed, and this starts only if it succeeds" in state.failure
    failed = apply_dependencies(Dispatch(workload_id="w-child", request=request), state)
    assert failed.has_failed
    assert failed.is_settled
    assert dependent(after("a", ENDED), a=ended("a", "north", WorkloadPhase.FAILED))[0].failure == ""
    assert "keeps no record" in dependent(after("a"))[0].failure


def test_what_was_seen_to_end_stays_met_when_its_record_is_gone():
    request = build_request(schedule=JobSchedule(after=(after("a"), after("b"))))
    now = Dispatch(workload_id="w-child", request=request, met=("a",))
    state = resolve_dependencies(now, {"b": ended("b", "south")}.get)
    assert (set(state.met), state.failure) == ({"a", "b"}, "")


def test_elements_that_pair_with_those_of_an_array_need_its_cluster_though_it_has_ended():
    array = JobArrayRequest(indexes="0-3")
    state, _ = dependent(after("a", each=True), array=array, a=ended("a", "north"))
    assert (state.cluster, state.met) == ("north", ())
    two = {"a": ended("a", "north"), "b": ended("b", "south")}
    assert (
        "runs in one cluster" in dependent(after("a", each=True), after("b", each=True), array=array, **two)[0].failure
    )
    again = JobArrayRequest(rerun_of="a")
    assert dependent(array=again, a=ended("a", "north"))[0].cluster == "north"
    assert list_anchors(replace(build_request(), array=again)) == (("array.rerun_of", "a"),)


# Gangs

CLUSTERS = ("north", "south", "west")


def part(number, parts=2, **spec):
    gang = GangPart(name="pair", parts=parts)
    return Dispatch(workload_id=f"w-{number}", request=build_request(gang=gang, **spec))


def hold(dispatch, cluster):
    now = add_clusters(pin_part(dispatch, cluster, ("why",)), (cluster,), ("why",))
    held = Workload(workload_id=now.workload_id, spec=SPEC, phase=WorkloadPhase.PENDING, submitted_ns=1, held_by="x")
    return record_answer(now, cluster, Verb.SUBMIT, held)


def test_a_gang_is_chosen_a_cluster_once_each_part_is_held_there():
    first, second = hold(part(0), "north"), part(1)
    assert plan_gang([first]).missing == 1
    assert not plan_gang([first, second]).may_start
    assert plan_gang([first, second]).cluster == "north"
    second = hold(second, "north")
    assert plan_gang([first, second]).may_start
    first = choose_cluster(first)
    assert plan_gang([first, second]).may_start
    # One that takes the place of a part goes where the gang is.
    assert plan_gang([first, replace(second, is_cancelled=True), part(2)]).cluster == "north"


def test_a_gang_of_which_a_cluster_refuses_a_part_leaves_it_as_a_whole():
    first = hold(part(0), "north")
    second = add_clusters(pin_part(part(1), "north", ()), ("north",), ())
    second = record_failure(second, "north", Verb.SUBMIT, FailedPrecondition("no"))
    plan = plan_gang([first, second])
    assert (plan.cluster, plan.refused) == ("", frozenset({"north"}))
    first = hold(pin_part(first, "south", ("again",)), "south")
    assert {(call.cluster, call.verb) for call in plan_calls(first)} == {("north", Verb.CANCEL)}
    # What the front did not write before it ended is found from the parts that it wrote.
    assert plan_gang([first, second]).cluster == "south"
    second = record_failure(second, "north", Verb.CANCEL, NotFound("no such workload"))
    second = hold(second, "south")
    assert plan_gang([first, second]).may_start
    assert choose_cluster(first).chosen == "south"


@given(
    st.lists(st.sampled_from(["hold", "refuse", "choose", "cancel"]), max_size=12), st.randoms(use_true_random=False)
)
def test_parts_of_a_gang_are_chosen_one_cluster(steps, chance):
    parts = [part(number, parts=3) for number in range(3)]
    for step in steps:
        plan, at = plan_gang(parts), chance.randrange(3)
        target = plan.cluster or next((name for name in CLUSTERS if name not in plan.refused), "")
        if step == "hold" and target:
            parts[at] = hold(parts[at], target)
        elif step == "refuse" and target:
            now = add_clusters(pin_part(parts[at], target, ()), (target,), ())
            parts[at] = record_failure(now, target, Verb.SUBMIT, FailedPrecondition("no"))
        elif step == "choose" and plan.may_start:
            parts = [choose_cluster(one) for one in parts]
        elif step == "cancel":
            parts[at] = replace(parts[at], is_cancelled=True)
        chosen = {one.chosen for one in parts} - {""}
        assert len(chosen) <= 1


def test_a_part_that_does_not_fit_its_gang_is_refused():
    with pytest.raises(InvalidArgument, match="no part of that gang"):
        check_part(part(2), [part(0), part(1)])
    with pytest.raises(InvalidArgument, match="no part of that gang"):
        check_part(part(1, parts=3), [part(0)])
    check_part(part(2), [part(0), replace(part(1), is_cancelled=True)])


def test_equal_parts_are_asked_for_as_one_workload_the_largest_first():
    asked = merge_parts([part(0, parts=3, gpus=1), part(1, parts=3, gpus=1), part(2, parts=3, gpus=8)])
    assert [(one.spec.request.gpu_count, one.spec.replicas) for one in asked] == [(8, 1), (1, 2)]
    assert all(one.spec.gang is None for one in asked)


# Arrays


def whole(*, held="", started=0, pending=2, **counts):
    status = ArrayStatus(size=2, pending=pending, started=started, **counts)
    phase = WorkloadPhase.PLACED if counts.get("placed") else WorkloadPhase.PENDING
    return Workload(workload_id="w-x", spec=SPEC, phase=phase, submitted_ns=1, held_by=held, array=status)


def array():
    request = replace(build_request(), array=JobArrayRequest(indexes="0-1"))
    now = add_clusters(Dispatch(workload_id="w-x", request=request), CLUSTERS, ("why",))
    return choose_cluster(record_answer(now, "north", Verb.SUBMIT, whole(held="x")))


def test_an_array_of_which_one_element_was_released_is_released_as_a_whole():
    now = record_answer(array(), "north", Verb.LOOK, whole())
    assert (now.find_copy("north").phase, plan_calls(now)[0].verb) == (CopyPhase.HELD, Verb.RELEASE)
    now = record_answer(now, "north", Verb.RELEASE, whole())
    assert now.find_copy("north").phase is CopyPhase.RELEASED


def test_an_array_has_started_once_an_element_has_and_never_moves():
    now = record_answer(array(), "north", Verb.RELEASE, whole())
    assert not now.is_decided
    assert request_move(now, "south") == now
    now = record_answer(now, "north", Verb.LOOK, whole(started=1, pending=1, cancelled=1))
    assert now.is_decided
