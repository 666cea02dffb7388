"""A journal that may lack its last entries: nothing starts until agents were heard, and what they tell is believed."""

import json
import logging
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.builders.server import AgentStream, MemoryJournal, run_controller
from tests.state_invariants import check_invariants
from tests.unit.loop_test import looping
from tests.unit.shadow_test import shadow_of
from tests.waiting import wait_until

from eelgrid_controller.core.nodes import PlanClaim
from eelgrid_controller.errors import LostEntries
from eelgrid_controller.queueing.job_conditions import describe_condition_remedy, find_unmet_condition
from eelgrid_controller.runtime.withheld_starts import WithheldStarts
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    AttemptEnded,
    RecoveredAttempt,
    WorkloadCompleted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.takeover_events import ControllerStarted, NodeAhead, StartsResumed
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    Assignment,
    AttemptReport,
    AttemptState,
    AttemptStatus,
    CordonNodeRequest,
    DependencyCondition,
    HeldAssignments,
    Hello,
    JobDependency,
    JobProgress,
    JobSchedule,
    LeaderTerm,
    Mobility,
    ProcessSpec,
    Welcome,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import digest_plain, to_plain

PROCESS = ProcessSpec(argv=("train",), working_directory="/")
JOB = {"process": PROCESS, "mobility": Mobility.FIXED}


def told(name, **changes):
    """A node that an agent describes."""
    return build_node(name, agent_version="1.0", runs_processes=True, **changes)


def reload(core, **options):
    """The core of a controller that recovers the same state."""
    return build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))), **options)


def promote(core, *, timeline=2, now_ns=90):
    """The core of a controller on a promoted standby that has the state of `core`."""
    again = reload(core, joins_doubted=True)
    again.record_controller_start(now_ns=now_ns, timeline=timeline)
    return again


def come_back(core, inventory, *assignments, epoch=0, now_ns=92):
    """An agent opens its stream, and answers Welcome."""
    claim = PlanClaim(epoch=epoch, held=assignments)
    core.register_node(inventory, now_ns=now_ns, plan_epoch=epoch, claim=claim)
    return core.confirm_claim(inventory.node_name, claim, now_ns=now_ns).events


def phase(core, key):
    return core.state.workloads[key].phase


def led(*nodes, **options):
    """A core on the first timeline whose nodes are cordoned, so that all work waits."""
    core = build_core(*nodes, **options)
    core.record_controller_start(now_ns=1, timeline=1)
    for node in nodes:
        come_back(core, node, now_ns=2)
        core.cordon_node(node.node_name, now_ns=2)
    return core


def start_lost(core, *names):
    """What a later state has, of which a standby was cut off before: the nodes are open, and work has started."""
    lost = reload(core)
    for name in names or tuple(lost.state.nodes):
        lost.uncordon_node(name, now_ns=50)
    return lost


# Withholding


def test_on_a_promoted_standby_nothing_starts_until_agents_were_heard_and_had_their_time():
    core = promote(led(told("n"), told("m")))
    for name in ("n", "m"):
        core.uncordon_node(name, now_ns=91)
    come_back(core, told("n"))
    come_back(core, told("new"))
    assert core.submit(build_request("j"), now_ns=93).result.phase is WorkloadPhase.PENDING
    assert "the journal may lack its last entries: work starts then" in core.explain_workload("j").remedy
    assert core.resume_starts(now_ns=94).events == (), "the agent of m was not heard"
    come_back(core, told("m"))
    assert phase(core, "j") is WorkloadPhase.PENDING
    events = core.resume_starts(now_ns=95).events
    assert events[0] == StartsResumed(time_ns=95)
    assert phase(core, "j") is WorkloadPhase.PLACED
    assert core.resume_starts(now_ns=96).events == ()


def test_a_node_that_is_lost_by_then_is_not_waited_for():
    core = promote(led(told("n"), told("m")))
    come_back(core, told("n"))
    core.mark_node_lost("m", now_ns=93)
    assert core.resume_starts(now_ns=94).events[0] == StartsResumed(time_ns=94)


def test_starts_stay_withheld_over_restarts_and_checkpoints():
    core = promote(led(told("n")))
    again = reload(core)
    again.record_controller_start(now_ns=100, timeline=2)
    again.uncordon_node("n", now_ns=101)
    come_back(again, told("n"), now_ns=101)
    assert again.submit(build_request("j"), now_ns=102).result.phase is WorkloadPhase.PENDING
    again.resume_starts(now_ns=103)
    assert phase(again, "j") is WorkloadPhase.PLACED
    assert reload(again).state.losses.dump() == {"timeline": 2}


@pytest.mark.parametrize(
    ("before", "after", "withholds"),
    [(1, 1, False), (1, 2, True), (2, 2, False), (3, 2, False), (0, 1, False), (0, 4, True)],
)
def test_a_later_timeline_withholds_starts(before, after, withholds):
    """Without a known one, as after an upgrade, the first cannot be a standby's."""
    core = build_core(told("n"))
    core.record_controller_start(now_ns=1, timeline=before)
    come_back(core, told("n"))
    if core.state.losses.withholds_starts:
        core.resume_starts(now_ns=3)
    again = promote(core, timeline=after)
    assert again.state.losses.withholds_starts is withholds
    assert all(record.withheld is withholds for record in again.state.nodes.values())


def test_an_empty_journal_on_a_server_that_was_promoted_before_withholds_nothing():
    core = build_core()
    (event,) = core.record_controller_start(now_ns=1, timeline=7).events
    assert event == ControllerStarted(time_ns=1, timeline=7)
    core.register_node(told("n"), now_ns=2)
    core.submit(build_request("j"), now_ns=3)
    assert phase(core, "j") is WorkloadPhase.PLACED
    assert core.record_controller_start(now_ns=4, timeline=7).events == (ControllerStarted(time_ns=4, timeline=7),)
    assert not core.state.losses.withholds_starts


def test_an_accepted_loss_withholds_starts_but_not_under_an_engine_that_lists_what_runs():
    core = reload(led(told("n")))
    core.record_controller_start(now_ns=90, lost=LostEntries(9, 12))
    assert core.state.losses.withholds_starts
    core = reload(led(told("n")))
    core.record_controller_start(now_ns=90, lost=LostEntries(9, 12), timeline=2, asks_agents=False)
    assert not core.state.losses.withholds_starts


def test_a_shadow_that_began_meanwhile_starts_with_the_cluster_though_a_node_is_ahead():
    core = promote(led(told("n"), told("m")))
    core.uncordon_node("n", now_ns=91)
    core.submit(build_request("j"), now_ns=91)
    shadow = shadow_of(core, core.state.policy.weights)
    unknown = Assignment(workload_id="lost", replica=0, gpu_uuids=("GPU-m-0",), gpu_milli=1000)
    come_back(core, told("m"), unknown, epoch=9)
    steps = [come_back(core, told("n")), core.resume_starts(now_ns=95).events]
    for event in (event for events in steps for event in events):
        shadow.follow_event(event)
    assert phase(core, "j") is WorkloadPhase.PLACED
    assert shadow.core.state.workloads["j"].placements == core.state.workloads["j"].placements


def test_ids_that_lost_submissions_were_given_are_not_given_again():
    core = led(told("n"))
    before = core.submit(build_request(), now_ns=3).result.workload_id
    after = promote(core).submit(build_request(), now_ns=93).result.workload_id
    assert int(after.removeprefix("w-")) > int(before.removeprefix("w-")) + 100_000


def test_the_wait_takes_its_time_is_logged_and_is_tried_again(caplog):
    core, waits = promote(led(told("n"))), WithheldStarts(logging.getLogger("test"))
    waits.begin(60.0)
    with caplog.at_level(logging.INFO):
        assert not waits.is_resumption_due(core.state, 59.0)
        assert not waits.is_resumption_due(core.state, 61.0), "the agent of n was not heard"
        come_back(core, told("n"))
        assert waits.is_resumption_due(core.state, 62.0)
        assert not waits.is_resumption_due(core.state, 62.5), "it is under way"
        assert waits.is_resumption_due(core.state, 64.5)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["starts=withheld"]
    core.resume_starts(now_ns=99)
    assert not waits.is_resumption_due(core.state, 70.0)


# What agents hold


def test_work_that_runs_and_waits_in_the_journal_is_taken_over_where_it_runs():
    core = led(told("n", gpus=2))
    core.submit(build_request("j", **JOB), now_ns=3)
    core.submit(build_request("both", replicas=2, gpus=0), now_ns=4)
    lost = start_lost(core)
    plan = lost.plan_to_send("n")
    promoted = promote(core)
    held = tuple(replace(item, process=None) for item in reversed(plan.assignments))
    come_back(promoted, told("n", gpus=2), *held, epoch=plan.epoch)
    record = promoted.state.nodes["n"]
    assert record.ahead is None
    for key in ("j", "both"):
        assert promoted.state.workloads[key].placements == lost.state.workloads[key].placements
    assert promoted.state.workloads["j"].attempt == 1
    after = promoted.plan_to_send("n")
    assert after.epoch > plan.epoch
    assert after.assignments == plan.assignments
    promoted.record_attempts("n", [ended("j", 0)], now_ns=95)
    assert phase(promoted, "j") is WorkloadPhase.SUCCEEDED


def test_work_of_which_a_node_runs_a_part_stays_there_and_starts_nowhere_else_until_the_node_is_reconciled():
    core = led(told("n", gpus=1), told("m", gpus=1))
    core.submit(build_request("gang", replicas=2, **JOB), now_ns=3)
    lost = start_lost(core)
    plan = lost.plan_to_send("n")
    promoted = promote(core)
    events = come_back(promoted, told("n", gpus=1), *plan.assignments, epoch=plan.epoch)
    assert isinstance(events[0], NodeAhead)
    come_back(promoted, told("m", gpus=1))
    come_back(promoted, told("big", gpus=8))
    promoted.resume_starts(now_ns=95)
    reload(promoted).retry_waiting(now_ns=96)
    for one in (promoted, reload(promoted)):
        one.retry_waiting(now_ns=96)
        workload = one.state.workloads["gang"]
        unmet = find_unmet_condition(workload, one.state, 96)
        assert (workload.phase, unmet.constraint) == (WorkloadPhase.PENDING, "unknown_run")
        assert "eelctl reconcile" in describe_condition_remedy(workload, unmet)
        assert one.state.pending.is_parked("gang")
    assert (
        promoted.state.workloads["gang"].reason
        == "unknown_run: runs on node n, of which the journal has lost the start"
    )
    assert promoted.submit(build_request("other"), now_ns=97).result.phase is WorkloadPhase.PLACED
    promoted.reconcile_node("n", now_ns=98)
    promoted.retry_waiting(now_ns=99)
    assert phase(promoted, "gang") is WorkloadPhase.PLACED


def test_work_that_two_nodes_run_starts_nowhere_while_one_of_them_is_ahead():
    core = led(told("n", gpus=1), told("m", gpus=1))
    core.submit(build_request("gang", replicas=2, **JOB), now_ns=3)
    lost = start_lost(core)
    promoted = promote(core)
    for name in ("n", "m"):
        come_back(promoted, told(name, gpus=1), *lost.node_plan(name).assignments, epoch=9)
    come_back(promoted, told("big", gpus=8))
    promoted.resume_starts(now_ns=95)
    for name in ("m", "n"):
        promoted.retry_waiting(now_ns=96)
        assert phase(promoted, "gang") is WorkloadPhase.PENDING
        assert promoted.state.workloads["gang"].reason.startswith("unknown_run: runs on node n")
        assert reload(promoted).state.losses.nodes_ahead == promoted.state.losses.nodes_ahead
        promoted.reconcile_node(name, now_ns=97)
    promoted.retry_waiting(now_ns=98)
    assert phase(promoted, "gang") is WorkloadPhase.PLACED


def test_a_node_that_was_ahead_already_keeps_running_what_it_holds_as_a_whole():
    """The next controller hears of more, while starts are withheld."""
    core = led(told("n"), told("m"))
    core.submit(build_request("gang", replicas=3, gpus=1, **JOB), now_ns=3)
    core.submit(build_request("j", **JOB), now_ns=4)
    lost = start_lost(core)
    (other,) = {place.node_name for place in lost.state.workloads["j"].placements}
    plan = lost.node_plan(other)
    part = tuple(item for item in plan.assignments if item.workload_id == "gang")
    assert len(plan.assignments) > len(part) >= 1
    promoted = promote(core)
    come_back(promoted, told(other), *part, epoch=plan.epoch)
    assert promoted.state.nodes[other].ahead.workload_ids == ("gang",)
    again = reload(promoted, joins_doubted=True)
    again.record_controller_start(now_ns=100, timeline=2)
    come_back(again, told(other), *plan.assignments, epoch=plan.epoch, now_ns=101)
    assert phase(again, "j") is WorkloadPhase.PLACED
    assert again.state.nodes[other].ahead.workload_ids == ("gang",)
    assert reload(again).state.losses.nodes_ahead == {"gang": (other,)}


def test_a_removed_node_keeps_nothing_from_starting():
    core = led(told("n", gpus=1), told("m", gpus=1))
    core.submit(build_request("gang", replicas=2), now_ns=3)
    lost = start_lost(core)
    promoted = promote(core)
    come_back(promoted, told("n", gpus=1), *lost.node_plan("n").assignments[:1], epoch=9)
    for node in (told("m", gpus=1), told("big", gpus=8)):
        come_back(promoted, node)
    assert promoted.state.losses.nodes_ahead == {"gang": ("n",)}
    promoted.resume_starts(now_ns=95)
    promoted.remove_node("n", force=True, is_connected=False, now_ns=96)
    promoted.retry_waiting(now_ns=97)
    assert promoted.state.losses.nodes_ahead == {}
    assert phase(promoted, "gang") is WorkloadPhase.PLACED


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_milli": 5},
        {"attempt": 2},
        {"stop": True},
        {"run_as": "other"},
        {"replicas": 3},
        {"gpu_uuids": ("GPU-strange",)},
        {"gpu_uuids": ("GPU-n-0", "GPU-n-1")},
    ],
)
def test_what_is_not_the_next_start_of_the_work_is_not_taken_over(change):
    core = led(told("n"))
    core.submit(build_request("j", **JOB), now_ns=3)
    (item,) = start_lost(core).plan_to_send("n").assignments
    promoted = promote(core)
    come_back(promoted, told("n"), replace(item, **change), epoch=9)
    assert promoted.state.nodes["n"].ahead.workload_ids == ("j",)
    assert phase(promoted, "j") is WorkloadPhase.PENDING


def test_two_that_hold_one_gpu_are_not_both_taken_over():
    core = led(told("n"))
    for key in ("a", "b"):
        core.submit(build_request(key, **JOB), now_ns=3)
    one, other = start_lost(core).plan_to_send("n").assignments
    promoted = promote(core)
    come_back(promoted, told("n"), one, replace(other, gpu_uuids=one.gpu_uuids), epoch=9)
    assert (phase(promoted, one.workload_id), phase(promoted, other.workload_id)) == (
        WorkloadPhase.PLACED,
        WorkloadPhase.PENDING,
    )
    assert promoted.state.nodes["n"].ahead.workload_ids == (other.workload_id,)


def test_without_a_loss_an_agent_cannot_take_waiting_work():
    core = led(told("n"))
    core.submit(build_request("j", **JOB), now_ns=3)
    (item,) = start_lost(core).plan_to_send("n").assignments
    again = reload(core, joins_doubted=True)
    again.record_controller_start(now_ns=90, timeline=1)
    come_back(again, told("n"), item, epoch=9)
    assert phase(again, "j") is WorkloadPhase.PENDING
    assert again.state.nodes["n"].ahead is not None


# What was placed, and is held no more


def placed(*, replicas=1):
    """The core of a promoted standby in which `j` is placed on n, where nothing of it is held any more."""
    core = led(told("n"), told("m"))
    core.uncordon_node("n", now_ns=3)
    core.submit(build_request("j", replicas=replicas, **JOB), now_ns=3)
    assert {place.node_name for place in core.state.workloads["j"].placements} == {"n"}
    return promote(core)


def held_later(core, name, attempt=2):
    """The assignment of `j` that a node holds by a later attempt."""
    (item, *_) = core.node_plan("n").assignments
    return replace(item, gpu_uuids=(f"GPU-{name}-0",), attempt=attempt, process=None)


def test_a_node_that_does_not_hold_what_was_placed_there_gets_no_plan_until_starts_are_resumed():
    core = placed()
    come_back(core, told("n"), epoch=9)
    come_back(core, told("m"))
    assert core.plan_to_send("n") is None
    assert core.plan_to_send("m") is not None
    step = core.resume_starts(now_ns=95)
    assert "n" in step.nodes
    (item,) = core.plan_to_send("n").assignments
    assert (item.workload_id, item.attempt) == ("j", 1)


def test_a_node_that_holds_what_was_placed_there_gets_its_plan_at_once():
    core = placed()
    (item,) = core.node_plan("n").assignments
    come_back(core, told("n"), item, epoch=1)
    assert core.plan_to_send("n").assignments == (item,)


def test_an_end_that_is_told_again_ends_what_is_not_held_and_the_node_gets_its_plan():
    core = placed()
    come_back(core, told("n"), epoch=9)
    core.record_attempts("n", [ended("j", 0)], now_ns=93)
    assert phase(core, "j") is WorkloadPhase.SUCCEEDED
    assert core.plan_to_send("n").assignments == ()


def test_work_that_another_node_runs_by_a_later_attempt_is_not_started_where_it_was():
    core = placed()
    come_back(core, told("m"), held_later(core, "m"), epoch=9)
    come_back(core, told("n"), epoch=9)
    assert core.state.nodes["m"].ahead.workload_ids == ("j",)
    core.resume_starts(now_ns=95)
    workload = core.state.workloads["j"]
    assert (workload.phase, workload.attempt, workload.placements[0].node_name) == (WorkloadPhase.PLACED, 2, "m")
    assert core.state.nodes["m"].ahead is None
    assert core.plan_to_send("n").assignments == ()


def test_work_that_another_node_runs_in_another_way_returns_to_the_queue_and_waits_for_an_operator():
    core = placed()
    come_back(core, told("m"), replace(held_later(core, "m"), cpu_milli=7), epoch=9)
    come_back(core, told("n"), epoch=9)
    core.resume_starts(now_ns=95)
    core.retry_waiting(now_ns=96)
    assert phase(core, "j") is WorkloadPhase.PENDING
    assert core.state.workloads["j"].reason.startswith("unknown_run: runs on node m")
    assert core.plan_to_send("n").assignments == ()
    core.reconcile_node("m", now_ns=97)
    core.retry_waiting(now_ns=98)
    assert (phase(core, "j"), core.state.workloads["j"].attempt) == (WorkloadPhase.PLACED, 2)


@pytest.mark.parametrize("name", ["n", "m"])
def test_work_that_runs_by_the_next_attempt_is_taken_over_once_its_node_holds_it_no_more(name):
    core = placed()
    if name == "m":
        come_back(core, told("n"), epoch=9)
    come_back(core, told(name), held_later(core, name), epoch=9)
    assert all(record.ahead is None for record in core.state.nodes.values())
    workload = core.state.workloads["j"]
    assert (workload.phase, workload.attempt, workload.placements[0].node_name) == (WorkloadPhase.PLACED, 2, name)
    (item,) = core.plan_to_send(name).assignments
    assert (item.attempt, item.gpu_uuids) == (2, (f"GPU-{name}-0",))
    check_invariants(core.state)


def test_a_node_cannot_take_work_that_another_holds():
    core = placed()
    (item,) = core.node_plan("n").assignments
    later = held_later(core, "m")
    come_back(core, told("n"), item, epoch=1)
    come_back(core, told("m"), later, epoch=9)
    core.resume_starts(now_ns=95)
    assert core.state.workloads["j"].placements[0].node_name == "n"
    assert core.plan_to_send("n").assignments == (item,)
    assert core.state.nodes["m"].ahead.workload_ids == ("j",)


def place_of(item):
    return item.workload_id, item.attempt, item.gpu_uuids


def crowded():
    """The core of a promoted standby that has both GPUs of n held by work that has ended, and two that wait; n runs these."""
    core = led(told("n"))
    core.uncordon_node("n", now_ns=3)
    for key in ("old-0", "old-1", "j", "k"):
        core.submit(build_request(key, **JOB), now_ns=3)
    lost = reload(core)
    lost.record_attempts("n", [ended("old-0", 0), ended("old-1", 0)], now_ns=60)
    lost.retry_waiting(now_ns=61)
    held = lost.node_plan("n").assignments
    assert [item.workload_id for item in held] == ["j", "k"]
    core = promote(core)
    come_back(core, told("n"), *held, epoch=9)
    assert core.state.nodes["n"].ahead.workload_ids == ("j", "k")
    return core, held


def test_work_is_taken_over_once_what_stood_there_in_the_journal_has_ended():
    core, held = crowded()
    with pytest.raises(FailedPrecondition, match="agents still tell what has ended"):
        core.reconcile_node("n", now_ns=93)
    first = next(
        key for key in ("old-0", "old-1") if core.state.workloads[key].placements[0].gpu_uuids == held[0].gpu_uuids
    )
    core.record_attempts("n", [ended(first, 0)], now_ns=94)
    assert [phase(core, key) for key in ("j", "k")] == [WorkloadPhase.PLACED, WorkloadPhase.PENDING]
    assert core.state.nodes["n"].ahead.workload_ids == ("k",)
    core.record_attempts("n", [ended("old-0", 0), ended("old-1", 0)], now_ns=95)
    assert core.state.nodes["n"].ahead is None
    assert [place_of(item) for item in core.plan_to_send("n").assignments] == [place_of(item) for item in held]
    check_invariants(core.state)


def test_the_end_of_work_that_was_told_before_it_could_be_taken_over_is_not_forgotten():
    core, _ = crowded()
    early = ended("j", 0, process_digest="")
    assert core.record_attempts("n", [early], now_ns=94).result == 1
    core.record_attempts("n", [ended("old-0", 0), ended("old-1", 0)], now_ns=95)
    assert (phase(core, "j"), phase(core, "k")) == (WorkloadPhase.SUCCEEDED, WorkloadPhase.PLACED)
    assert reload(core).state.nodes["n"].assignments.keys() == {("k", 0)}


def test_what_became_possible_without_a_report_is_taken_over_when_starts_are_resumed():
    core, held = crowded()
    core.cancel("old-0", now_ns=94, is_immediate=True)
    core.cancel("old-1", now_ns=94, is_immediate=True)
    assert core.state.nodes["n"].ahead is not None
    core.resume_starts(now_ns=95)
    assert core.state.nodes["n"].ahead is None
    assert [place_of(item) for item in core.plan_to_send("n").assignments] == [place_of(item) for item in held]


def test_work_that_waits_for_its_next_attempt_is_taken_over_where_that_runs():
    core = placed()
    later = held_later(core, "m")
    come_back(core, told("n"), epoch=9)
    retried = replace(core.state.workloads["j"].spec, schedule=JobSchedule(retries_most=3))
    core.state.workloads["j"] = replace(core.state.workloads["j"], spec=retried)
    core.record_attempts("n", [ended("j", 0, exit_code=1)], now_ns=93)
    assert (phase(core, "j"), core.state.pending.is_parked("j")) == (WorkloadPhase.PENDING, True)
    come_back(core, told("m"), later, epoch=9)
    workload = core.state.workloads["j"]
    assert (workload.phase, workload.attempt, workload.failures) == (WorkloadPhase.PLACED, 2, 1)
    assert core.state.nodes["m"].ahead is None


def test_work_that_has_ended_by_a_later_attempt_ends_when_starts_are_resumed():
    core = placed()
    come_back(core, told("m"), epoch=9)
    assert core.record_attempts("m", [ended("j", 0, attempt=2)], now_ns=93).events == ()
    come_back(core, told("n"), epoch=9)
    core.resume_starts(now_ns=95)
    workload = core.state.workloads["j"]
    assert (workload.phase, workload.attempt, workload.placements[0].node_name) == (WorkloadPhase.SUCCEEDED, 2, "m")


def test_work_of_which_a_process_is_held_stays():
    core = placed(replicas=2)
    first, second = core.node_plan("n").assignments
    come_back(core, told("m"), held_later(core, "m"), epoch=9)
    come_back(core, told("n"), first, epoch=1)
    core.resume_starts(now_ns=95)
    assert phase(core, "j") is WorkloadPhase.PLACED
    assert core.plan_to_send("n").assignments == (first, second)


# What has ended


def ended(key, replica, *, process=PROCESS, exit_code=0, started_ns=50, attempt=1, **changes):
    status = AttemptStatus(
        workload_id=key,
        replica=replica,
        attempt=attempt,
        state=AttemptState.ENDED,
        exit_code=exit_code,
        started_ns=started_ns,
        ended_ns=60,
        progress=JobProgress(step=1),
        process_digest=digest_plain(to_plain(process, brief=True)),
    )
    return replace(status, **changes)


def waiting(**spec):
    """The core of a promoted standby in which `j` waits."""
    core = led(told("n"))
    core.submit(build_request("j", **JOB | spec), now_ns=3)
    core.submit(build_request("child", **JOB), now_ns=4)
    promoted = promote(core)
    come_back(promoted, told("n"), epoch=9)
    return promoted


def test_work_that_has_ended_and_waits_in_the_journal_does_not_run_again():
    core = waiting()
    (event,) = core.record_attempts("n", [ended("j", 0)], now_ns=93).events
    (one,) = event.recovered
    assert (event.phase, one.node_name, one.status.progress) == (WorkloadPhase.SUCCEEDED, "n", None)
    workload = core.state.workloads["j"]
    assert (workload.attempt, workload.attempts, workload.placements[0].node_name) == (1, (one.status,), "n")
    again = reload(core)
    assert again.state.workloads["j"] == workload
    assert again.state.nodes["n"].assignments == {}
    assert core.record_attempts("n", [ended("j", 0)], now_ns=94).result == 1, "told twice"


def test_each_process_counts_and_the_first_failure_decides():
    core = waiting(replicas=2)
    assert core.record_attempts("n", [ended("j", 1)], now_ns=93).events == ()
    (event,) = core.record_attempts("m", [ended("j", 0)], now_ns=94).events
    assert [(one.node_name, one.status.replica) for one in event.recovered] == [("m", 0), ("n", 1)]
    assert phase(core, "j") is WorkloadPhase.SUCCEEDED
    core = waiting(replicas=2)
    (event,) = core.record_attempts("n", [ended("j", 1, exit_code=7)], now_ns=93).events
    assert (event.phase, "exited with 7" in event.reason) == (WorkloadPhase.FAILED, True)


def test_a_failure_after_which_it_may_be_tried_again_changes_nothing():
    core = waiting(schedule=JobSchedule(retries_most=1))
    assert core.record_attempts("n", [ended("j", 0, exit_code=7)], now_ns=93).events == ()
    assert phase(core, "j") is WorkloadPhase.PENDING


@pytest.mark.parametrize(
    "change",
    [
        {"process": ProcessSpec(argv=("other",), working_directory="/")},
        {"process_digest": ""},
        {"attempt": 2},
        {"replica": 1},
        {"started_ns": 0},
        {"state": AttemptState.RUNNING, "exit_code": None, "ended_ns": 0},
        {"workload_id": "nobody"},
    ],
)
def test_other_runs_end_nothing(change):
    core = waiting()
    process = change.pop("process", PROCESS)
    assert core.record_attempts("n", [replace(ended("j", 0, process=process), **change)], now_ns=93).events == ()


def test_what_a_node_tells_of_attempts_to_come_is_bounded():
    core = waiting(schedule=JobSchedule(retries_most=3))
    for changes in ({}, {"process_digest": ""}):
        for attempt in range(1, 400):
            told = [ended("j", replica, attempt=attempt, exit_code=1, **changes) for replica in (0, 5)]
            core.record_attempts("n", told, now_ns=93)
    assert phase(core, "j") is WorkloadPhase.PENDING
    assert len(core._reports.recovered._told["j"]) == 8
    assert len(core._reports.pop_early("n")) == 1


def test_a_run_from_before_the_submission_is_of_earlier_work_with_that_id():
    core = led(told("n"))
    submitted_ns = 10**12
    core.submit(build_request("j", **JOB), now_ns=submitted_ns)
    core = promote(core, now_ns=2 * submitted_ns)
    early, late = submitted_ns - 61 * 10**9, submitted_ns - 59 * 10**9
    for started_ns, expected in ((early, WorkloadPhase.PENDING), (late, WorkloadPhase.SUCCEEDED)):
        core.record_attempts("n", [ended("j", 0, started_ns=started_ns)], now_ns=2 * submitted_ns)
        assert phase(core, "j") is expected


def test_once_starts_are_resumed_nobody_ends_waiting_work():
    core = waiting(replicas=2)
    core.record_attempts("n", [ended("j", 0)], now_ns=93)
    core.resume_starts(now_ns=94)
    step = core.record_attempts("n", [ended("j", 1)], now_ns=95)
    assert (step.events, step.result) == ((), 1)


def test_what_depends_on_recovered_work_goes_on():
    core = led(told("n"))
    core.submit(build_request("j", **JOB), now_ns=3)
    core.submit(build_request("child", **JOB, schedule=build_after("j")), now_ns=4)
    core = promote(core)
    core.uncordon_node("n", now_ns=91)
    come_back(core, told("n"), epoch=9)
    core.record_attempts("n", [ended("j", 0)], now_ns=93)
    core.resume_starts(now_ns=94)
    core.retry_waiting(now_ns=95)
    assert phase(core, "child") is WorkloadPhase.PLACED


def build_after(key):
    return JobSchedule(after=(JobDependency(workload_id=key, condition=DependencyCondition.SUCCEEDED),))


# The journal


STATUS = replace(ended("j", 0), progress=None, process_digest="")


@pytest.mark.parametrize(
    "event",
    [
        ControllerStarted(time_ns=1, timeline=2, withholds_starts=True),
        StartsResumed(time_ns=1),
        WorkloadCompleted(
            time_ns=1,
            workload_id="j",
            phase=WorkloadPhase.SUCCEEDED,
            recovered=(RecoveredAttempt(node_name="n", status=STATUS),),
        ),
    ],
)
def test_the_events_come_back_as_they_were(event):
    assert event_from_plain(*event_to_plain(event)) == event


def test_events_without_a_loss_are_written_as_older_versions_read_them():
    assert event_to_plain(ControllerStarted(time_ns=1)) == ("controller_started", {"time_ns": 1})
    _, body = event_to_plain(WorkloadCompleted(time_ns=1, workload_id="j", phase=WorkloadPhase.SUCCEEDED))
    assert body.keys() == {"time_ns", "workload_id", "phase", "reason"}
    _, body = event_to_plain(AttemptEnded(time_ns=1, workload_id="j", status=ended("j", 0)))
    assert not {"progress", "process_digest"} & body["status"].keys()


# The controller


async def test_a_controller_on_a_later_timeline_asks_for_ended_attempts_and_then_starts_what_waits(tmp_path) -> None:
    node = told("n1")
    async with run_controller(tmp_path) as rig:
        await rig.join(node)
        await rig.operators.cordon_node(CordonNodeRequest(node_name="n1"))
        for key in ("ran", "waits"):
            await rig.operators.submit_workload(build_request(key, **JOB))
    async with run_controller(tmp_path, restart_grace_s=1.0) as rig:
        state = rig.controller.loop.core.state
        await rig.controller.loop.command(lambda core, now_ns: core.record_controller_start(now_ns=now_ns, timeline=2))
        agent = AgentStream(rig.address)
        rig.agents.append(agent)
        await agent.say(Hello(incarnation=1, inventory=node, held=HeldAssignments()))
        welcome = await agent.hear(Welcome)
        assert welcome.wants_ended_attempts
        status = replace(
            ended("ran", 0), started_ns=state.workloads["ran"].submitted_ns, ended_ns=2 * 10**18, progress=None
        )
        await agent.say(AttemptReport(attempts=(status,)))
        await wait_until(lambda: state.workloads["ran"].phase is WorkloadPhase.SUCCEEDED)
        await wait_until(lambda: not rig.controller.loop.core.state.losses.withholds_starts)


async def test_a_journal_knows_the_timeline_of_its_last_start_also_without_nodes() -> None:
    journal = MemoryJournal()
    for timeline, withholds in ((3, False), (3, False), (4, True)):
        journal.term = LeaderTerm(timeline=timeline, epoch=1, holder="memory")
        async with looping(journal) as loop:
            await wait_until(lambda state=loop.core.state, timeline=timeline: state.losses.timeline == timeline)
            assert loop.core.state.losses.withholds_starts is withholds
    found = [entry.body for entry in journal.entries if entry.kind == "controller_started"]
    assert [(body["timeline"], body.get("withholds_starts")) for body in found] == [(3, None), (4, True)]
