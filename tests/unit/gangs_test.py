"""Gangs of several parts: what waits for what, what starts together, and what is refused."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted, WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    DependencyCondition,
    GangPart,
    JobArrayRequest,
    JobDeadline,
    JobDependency,
    JobSchedule,
    PreemptionWithin,
    Queue,
    QueuePreemption,
    QueueQuota,
    WorkloadPhase,
)
from eelgrid_protos.schema import list_violations

S = 10**9
TRAIN = GangPart(name="train", parts=2)


def submit(core, key, gpus=1, *, gang=TRAIN, hold=False, now_s=1, owner="", **spec):
    request = replace(build_request(key, gpus=gpus, gang=gang, **spec), hold=hold)
    return core.submit(request, now_ns=now_s * S, owner=owner)


def running(core):
    return sorted(key for key, one in core.state.workloads.items() if one.phase is WorkloadPhase.PLACED)


def reason(core, key):
    return core.state.workloads[key].reason


def restart(core):
    state = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert state.digest() == core.state.digest()
    return Core(state, catalogue.load_catalogue())


# Completeness


def test_a_part_waits_until_all_parts_of_its_gang_are_submitted_and_then_all_start_in_one_step():
    core = build_core(build_node("a", gpus=4))
    assert submit(core, "driver").result.reason == "gang: waits for 1 more part of gang train"
    assert core.state.pending.is_parked("driver")
    assert running(core) == []
    step = submit(core, "workers", replicas=3)
    placed = [event.workload_id for event in step.events if isinstance(event, WorkloadPlaced)]
    assert sorted(placed) == ["driver", "workers"]
    assert step.result.phase is WorkloadPhase.PLACED
    check_invariants(core.state)


def test_a_gang_is_of_one_namespace_and_owner():
    core = build_core(build_node("a", gpus=4))
    submit(core, "of-ann", owner="ann")
    submit(core, "of-bob", owner="bob")
    submit(core, "elsewhere", owner="ann", namespace="other")
    assert running(core) == []
    submit(core, "second", owner="ann")
    assert running(core) == ["of-ann", "second"]


@pytest.mark.parametrize(
    ("gang", "field", "problem"),
    [
        (GangPart(name="train", parts=4), "spec.gang.parts", "is 4, and gang train has 3"),
        (GangPart(name="train", parts=3, parts_least=2), "spec.gang.parts_least", "is 2, and gang train has 3"),
    ],
)
def test_a_part_that_contradicts_its_gang_is_refused_with_the_field_and_the_remedy(gang, field, problem):
    core = build_core(build_node("a", gpus=4))
    submit(core, "first", gang=GangPart(name="train", parts=3))
    before = core.state.digest()
    with pytest.raises(InvalidArgument) as refused:
        submit(core, "second", gang=gang)
    (violation,) = refused.value.violations
    assert (violation.field, violation.problem) == (field, problem)
    assert "or another name" in violation.remedy
    assert core.state.digest() == before


def test_a_part_of_a_complete_gang_is_refused_and_repeating_a_submission_is_not():
    core = build_core(build_node("a", gpus=2))
    submit(core, "other", gang=None)
    first = submit(core, "first").result
    submit(core, "second")
    assert submit(core, "first").result.workload_id == first.workload_id
    with pytest.raises(InvalidArgument) as refused:
        submit(core, "third")
    (violation,) = refused.value.violations
    assert violation.field == "spec.gang"
    assert violation.problem == "is train, which has its 2 parts: first, second"


def test_a_part_that_comes_after_the_gang_has_started_is_refused_until_all_have_ended():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first")
    submit(core, "second")
    core.cancel("first", now_ns=2 * S)
    with pytest.raises(InvalidArgument, match="no part of that gang"):
        submit(core, "third")
    core.cancel("second", now_ns=3 * S)
    assert submit(core, "third").result.reason == "gang: waits for 1 more part of gang train"


def test_a_part_that_is_cancelled_before_the_start_makes_room_for_another_in_the_gang():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first", gang=GangPart(name="train", parts=3))
    submit(core, "second", gang=GangPart(name="train", parts=3))
    core.cancel("first", now_ns=2 * S)
    assert reason(core, "second") == "gang: waits for 2 more parts of gang train"
    submit(core, "third", gang=GangPart(name="train", parts=3))
    submit(core, "fourth", gang=GangPart(name="train", parts=3))
    assert running(core) == ["fourth", "second", "third"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"gang": GangPart(name="g", parts=1)}, "spec.gang.parts"),
        ({"gang": GangPart(name="g", parts=2, parts_least=3)}, "spec.gang.parts_least"),
        ({"gang": GangPart(name="", parts=2)}, "spec.gang.name"),
        ({"gang": TRAIN, "deadline": JobDeadline(end_ns=10**18)}, "spec.deadline"),
    ],
)
def test_a_gang_without_sense_is_refused_by_its_field(spec, field):
    assert [one.field for one in list_violations(build_request("w", gpus=1, **spec))] == [field]


def test_a_gang_that_asks_for_more_than_all_nodes_have_is_refused_with_its_last_part():
    core = build_core(build_node("a", gpus=2), build_node("b", gpus=2))
    submit(core, "driver", 2)
    with pytest.raises(InvalidArgument) as refused:
        submit(core, "workers", 1, replicas=3)
    (violation,) = refused.value.violations
    assert violation.field == "spec.gang"
    assert violation.problem == (
        "needs 5 GPUs for the parts of gang train that start together, and all nodes together have 4 GPUs"
    )
    assert submit(core, "workers", 1, replicas=2).result.phase is WorkloadPhase.PLACED


def test_an_array_is_no_part_of_a_gang():
    core = build_core(build_node("a", gpus=4))
    request = replace(build_request("w", gpus=1, gang=TRAIN), array=JobArrayRequest(indexes="0-1"))
    with pytest.raises(InvalidArgument) as refused:
        core.submit(request, now_ns=S)
    assert [one.field for one in refused.value.violations] == ["spec.gang"]


# All or nothing


def test_a_gang_that_does_not_fit_holds_nothing_and_every_part_waits_for_what_the_nearest_part_lacks():
    core = build_core(build_node("a", gpus=4))
    submit(core, "other", 2, gang=None)
    submit(core, "driver", 1)
    submit(core, "workers", 2)
    assert running(core) == ["other"]
    assert {reason(core, key) for key in ("driver", "workers")} == {"gpu_count: no node has enough whole GPUs free"}
    # What is free is free for others.
    assert submit(core, "single", 2, gang=None).result.phase is WorkloadPhase.PLACED
    core.cancel("single", now_ns=2 * S)
    core.cancel("other", now_ns=3 * S)
    assert running(core) == ["driver", "workers"]


def test_of_two_gangs_that_each_fit_alone_one_starts_and_then_the_other():
    core = build_core(build_node("a", gpus=4))
    submit(core, "filler", 4, gang=None)
    for part in ("1", "2"):
        for gang in ("x", "y"):
            submit(core, gang + part, 2, gang=GangPart(name=gang, parts=2))
    core.cancel("filler", now_ns=2 * S)
    assert running(core) == ["x1", "x2"]
    core.cancel("x1", now_ns=3 * S)
    assert running(core) == ["x2"]
    core.cancel("x2", now_ns=4 * S)
    assert running(core) == ["y1", "y2"]


def test_the_hardest_part_is_placed_first_so_that_small_ones_do_not_take_its_node():
    core = build_core(build_node("a", gpus=2), build_node("b", gpus=4))
    gang = GangPart(name="train", parts=3)
    submit(core, "small", 1, gang=gang)
    submit(core, "smaller", 1, gang=gang)
    submit(core, "large", 4, gang=gang)
    assert running(core) == ["large", "small", "smaller"]


def test_a_part_that_lacks_room_is_decided_first_in_another_order():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=5))
    gang = GangPart(name="train", parts=4)
    for key, gpus in (("three", 3), ("x", 2), ("y", 2), ("z", 2)):
        submit(core, key, gpus, gang=gang)
    assert running(core) == ["three", "x", "y", "z"]


def test_parts_share_nodes_without_taking_the_same_gpus():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first", 2)
    submit(core, "second", 2)
    places = [one.placements[0].gpu_uuids for one in core.state.workloads.values()]
    assert len(set(places[0]) | set(places[1])) == 4


# Minimum sets


def test_the_first_parts_must_start_together_and_the_others_start_later():
    core = build_core(build_node("a", gpus=4))
    gang = GangPart(name="serve", parts=3, parts_least=2)
    submit(core, "other", 2, gang=None)
    for key in ("prefill", "decode", "more"):
        submit(core, key, 1, gang=gang)
    assert running(core) == ["decode", "other", "prefill"]
    assert reason(core, "more") == "gpu_count: no node has enough whole GPUs free"
    core.cancel("other", now_ns=2 * S)
    assert running(core) == ["decode", "more", "prefill"]


def test_parts_beyond_the_least_that_fit_start_in_the_same_step():
    core = build_core(build_node("a", gpus=4))
    gang = GangPart(name="serve", parts=4, parts_least=2)
    for key, gpus in (("a", 1), ("b", 1), ("huge", 3), ("small", 1)):
        submit(core, key, gpus, gang=gang)
    assert running(core) == ["a", "b", "small"]


def test_a_part_beyond_the_least_starts_also_after_the_others_have_ended():
    core = build_core(build_node("a", gpus=4))
    gang = GangPart(name="serve", parts=3, parts_least=2)
    submit(core, "other", 2, gang=None)
    for key in ("prefill", "decode", "more"):
        submit(core, key, 2 if key == "more" else 1, gang=gang)
    core.hold("more", now_ns=2 * S)
    for key in ("prefill", "decode", "other"):
        core.cancel(key, now_ns=3 * S)
    core = restart(core)
    core.release("more", now_ns=4 * S)
    assert running(core) == ["more"]


# Conditions


def test_a_hold_of_one_part_holds_the_gang_until_it_is_released():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first", hold=True)
    submit(core, "second")
    assert reason(core, "first") == "held: by an operator"
    assert reason(core, "second") == "gang: waits for part first of gang train, which may not start yet"
    assert core.state.pending.is_parked("second")
    assert "eelctl explain" in core.explain_workload("second").remedy
    core.release("first", now_ns=2 * S)
    assert running(core) == ["first", "second"]


def test_a_gang_that_waits_for_room_is_held_by_one_part():
    core = build_core(build_node("a", gpus=2))
    submit(core, "other", 2, gang=None)
    submit(core, "first")
    submit(core, "second")
    core.hold("second", now_ns=2 * S)
    core.cancel("other", now_ns=3 * S)
    assert running(core) == []
    assert reason(core, "first") == "gang: waits for part second of gang train, which may not start yet"
    core.release("second", now_ns=4 * S)
    assert running(core) == ["first", "second"]


def test_a_begin_time_and_a_dependency_of_a_required_part_are_those_of_its_gang():
    core = build_core(build_node("a", gpus=4))
    submit(core, "before", gang=None)
    after = JobSchedule(after=(JobDependency(workload_id="before", condition=DependencyCondition.ENDED),))
    submit(core, "first", schedule=after)
    submit(core, "second", schedule=JobSchedule(begin_ns=100 * S))
    core.cancel("before", now_ns=2 * S)
    assert running(core) == []
    assert core.is_round_due(100 * S)
    core.retry_waiting(now_ns=100 * S)
    assert running(core) == ["first", "second"]


def test_a_part_beyond_the_least_holds_only_itself():
    core = build_core(build_node("a", gpus=4))
    gang = GangPart(name="serve", parts=3, parts_least=2)
    for key in ("prefill", "decode", "more"):
        submit(core, key, gang=gang, hold=key == "more")
    assert running(core) == ["decode", "prefill"]
    core.release("more", now_ns=2 * S)
    assert running(core) == ["decode", "more", "prefill"]


def test_a_missing_part_is_named_with_its_remedy():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first")
    found = core.explain_workload("first")
    assert found.constraint == "gang"
    assert found.remedy.startswith("It waits for 1 more part of gang train. To help: submit the missing parts")


def test_the_explanation_of_a_part_names_the_part_that_lacks_room():
    core = build_core(build_node("a", gpus=3))
    submit(core, "other", gang=None)
    submit(core, "driver")
    submit(core, "workers", 2)
    found = core.explain_workload("workers")
    assert found.constraint == "gpu_count"
    assert "of which 2 must start together, and driver waits: no node" in found.remedy
    assert "and this waits: no node" in core.explain_workload("driver").remedy


# Reserved starts


def test_a_gang_that_waits_is_promised_a_start_with_all_its_places_and_small_work_does_not_starve_it():
    core = build_core(build_node("a", gpus=4))
    submit(core, "long", 2, gang=None, expected_runtime_s=100.0)
    submit(core, "short", 1, gang=None, expected_runtime_s=50.0)
    submit(core, "driver", 1, expected_runtime_s=100.0)
    submit(core, "workers", 3, expected_runtime_s=100.0)
    assert core.state.workloads["driver"].promise.start_ns == 101 * S
    assert core.state.workloads["driver"].promise.waits_for == ("long", "short")
    assert "The gang is promised to start by" in core.explain_workload("workers").remedy
    # The one GPU that is free until then is for what ends before.
    assert submit(core, "late", 1, gang=None, expected_runtime_s=200.0, now_s=2).result.reason.startswith("backfill:")
    assert submit(core, "early", 1, gang=None, expected_runtime_s=90.0, now_s=3).result.phase is WorkloadPhase.PLACED
    for key, at_s in (("short", 51), ("early", 93), ("long", 101)):
        core.cancel(key, now_ns=at_s * S)
    assert running(core) == ["driver", "workers"]


def test_a_gang_does_not_delay_the_reserved_start_of_other_work():
    core = build_core(build_node("a", gpus=4))
    submit(core, "first", 2, gang=None, expected_runtime_s=100.0)
    submit(core, "large", 4, gang=None, expected_runtime_s=100.0)
    submit(core, "driver", 1, expected_runtime_s=200.0)
    submit(core, "workers", 1, expected_runtime_s=50.0)
    assert running(core) == ["first"]
    assert reason(core, "workers").startswith("backfill:")
    brief = GangPart(name="brief", parts=2)
    for key in ("one", "other"):
        submit(core, key, 1, gang=brief, expected_runtime_s=90.0, now_s=3)
    assert running(core) == ["first", "one", "other"]


# Queues


def two_queues(core, *, quota=2):
    queues = tuple(Queue(name=name, quotas=(QueueQuota(resource="gpu", nominal=quota * 1000),)) for name in "xy")
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=S)


def test_parts_in_different_queues_are_charged_to_their_own_and_wait_for_the_quota_of_each():
    core = build_core(build_node("a", gpus=8))
    two_queues(core)
    submit(core, "other", 2, gang=None, queue="y")
    submit(core, "driver", 1, queue="x")
    submit(core, "workers", 1, queue="y")
    assert running(core) == ["other"]
    assert reason(core, "driver") == "quota: queue y has too little gpu quota left"
    core.cancel("other", now_ns=2 * S)
    assert running(core) == ["driver", "workers"]


def test_parts_of_one_queue_do_not_exceed_its_quota_together():
    core = build_core(build_node("a", gpus=8))
    two_queues(core)
    submit(core, "driver", 1, queue="x")
    submit(core, "workers", 2, queue="x")
    assert running(core) == []
    assert reason(core, "driver").startswith("quota: queue x")


# Preemption


def preempting(core):
    rules = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
    core.update_policy(replace(core.state.policy, queues=(Queue(name="q", preemption=rules),)), now_ns=S)
    return core


def test_a_gang_makes_room_as_a_whole_and_starts_again_as_a_whole():
    core = preempting(build_core(build_node("a", gpus=5)))
    submit(core, "driver", 2, queue="q")
    submit(core, "workers", 2, queue="q")
    submit(core, "single", 1, gang=None, queue="q", priority=5)
    submit(core, "urgent", 2, gang=None, queue="q", priority=10, now_s=5)
    assert running(core) == ["single", "urgent"]
    submit(core, "more", 2, gang=None, queue="q", priority=-1, now_s=6)
    assert running(core) == ["more", "single", "urgent"]
    core.cancel("urgent", now_ns=7 * S)
    assert running(core) == ["more", "single"]
    core.cancel("more", now_ns=8 * S)
    assert running(core) == ["driver", "single", "workers"]


def test_a_part_beyond_the_least_makes_room_alone():
    core = preempting(build_core(build_node("a", gpus=6)))
    gang = GangPart(name="serve", parts=3, parts_least=2)
    for key in ("decode", "prefill", "z"):
        submit(core, key, 2, gang=gang, queue="q")
    submit(core, "urgent", 2, gang=None, queue="q", priority=10, now_s=5)
    assert running(core) == ["decode", "prefill", "urgent"]


def test_a_gang_of_which_one_part_is_protected_is_no_victim():
    core = preempting(build_core(build_node("a", gpus=4)))
    submit(core, "driver", 2, queue="q", priority=20)
    submit(core, "workers", 2, queue="q")
    submit(core, "urgent", 2, gang=None, queue="q", priority=10, now_s=5)
    assert running(core) == ["driver", "workers"]


def test_parts_of_a_gang_of_which_one_has_ended_make_room_alone():
    core = preempting(build_core(build_node("a", gpus=6)))
    for key in ("driver", "x", "y"):
        submit(core, key, 2, queue="q", gang=GangPart(name="g", parts=3))
    core.cancel("driver", now_ns=2 * S)
    submit(core, "filler", 2, gang=None, queue="q", priority=20, now_s=3)
    submit(core, "urgent", 2, gang=None, queue="q", priority=10, now_s=5)
    assert len(running(core)) == 3


# Afterwards


def test_a_part_that_is_evicted_alone_starts_alone_and_a_gang_that_waits_as_a_whole_starts_as_a_whole():
    core = build_core(build_node("a", gpus=2))
    submit(core, "first")
    submit(core, "second")
    core._apply(WorkloadEvicted(time_ns=2 * S, workload_id="first", reason="evicted: x"))
    core.retry_waiting(now_ns=2 * S)
    assert running(core) == ["first", "second"]
    for key in ("first", "second"):
        core._apply(WorkloadEvicted(time_ns=3 * S, workload_id=key, reason="evicted: x"))
    core.hold("first", now_ns=3 * S)
    core.retry_waiting(now_ns=3 * S)
    assert running(core) == []
    core = restart(core)
    core.release("first", now_ns=4 * S)
    assert running(core) == ["first", "second"]


def test_parts_of_a_gang_of_which_one_has_ended_start_on_their_own():
    core = build_core(build_node("a", gpus=3))
    for key in ("first", "second", "third"):
        submit(core, key, gang=GangPart(name="train", parts=3))
    core.cancel("first", now_ns=2 * S)
    submit(core, "other", gang=None)
    for key in ("second", "third"):
        core._apply(WorkloadEvicted(time_ns=3 * S, workload_id=key, reason="evicted: x"))
    submit(core, "more", gang=None, priority=9, now_s=4)
    core = restart(core)
    core.retry_waiting(now_ns=5 * S)
    assert running(core) == ["more", "other", "second"]


def test_without_gangs_the_journal_has_nothing_of_them():
    core = build_core(build_node("a", gpus=2))
    step = submit(core, "single", gang=None)
    assert "gang" not in json.dumps([event_to_plain(event) for event in step.events])
    assert "gang" not in json.dumps(core.state.dump())
    step = submit(core, "part")
    assert [event_from_plain(*event_to_plain(event)) for event in step.events] == list(step.events)
