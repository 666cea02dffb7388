"""Preemption: who makes room for whom, at once or after processes have stopped, and what ends it."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, build_spending_limit, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.preemption import (
    PreemptionCandidate,
    order_candidates,
    resolve_preemption,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    PreemptionStarted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    JobSchedule,
    LatencyMetric,
    LatencyObjective,
    Mobility,
    PreemptionReclaim,
    PreemptionVictims,
    PreemptionWithin,
    PriorityClass,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    Reservation,
    ServicePromise,
    WorkloadKind,
    WorkloadPhase,
)

S = 10**9
RECLAIM = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)
FAIR = QueuePreemption(reclaim=PreemptionReclaim.FAIR_SHARE)
WITHIN = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
PROCESS = ProcessSpec(argv=("python", "train.py"), working_directory="/home/ann")


def queue(name, gpus=0, preemption=None, parent="root", weight=1.0, **limits):
    quotas = (QueueQuota(resource="gpu", nominal=1000 * gpus, **limits),)
    return Queue(name=name, parent=parent, weight=weight, quotas=quotas, preemption=preemption)


ROOT = Queue(name="root")


def begin(*queues, nodes=None):
    core = build_core(*(nodes or (build_node("a", gpus=4, runs_processes=True, agent_version="1"),)))
    core.update_policy(replace(core.state.policy, queues=(ROOT, *queues)), now_ns=2)
    return core


def submit(core, key, queue_name, *, gpus=1, now_ns=3, process=None, **spec):
    if process is not None:
        spec["mobility"] = Mobility.FIXED
    return core.submit(build_request(key, queue=queue_name, gpus=gpus, process=process, **spec), now_ns=now_ns)


def phase(core, key):
    return core.workload(key).phase


def running(core):
    return sorted(key for key, one in core.state.workloads.items() if one.phase is WorkloadPhase.PLACED)


def settle(core, now_ns=4):
    events = []
    while core.has_backlog:
        events += core.retry(now_ns=now_ns).events
    check_invariants(core.state)
    return events


def status(core, key, state=AttemptState.RUNNING, replica=0, **known):
    return AttemptStatus(
        workload_id=key, replica=replica, attempt=core.workload(key).attempt, state=state, started_ns=5, **known
    )


def report_stopped(core, key, now_ns=50, code=0, reason="stopped", node_name="a"):
    ended = status(core, key, AttemptState.ENDED, exit_code=code, reason=reason, ended_ns=20)
    return core.record_attempts(node_name, (ended,), now_ns=now_ns)


def evicted(events):
    return [event.workload_id for event in events if isinstance(event, WorkloadEvicted)]


def restart(core):
    return Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())


# Reclaim


def test_a_queue_gets_its_quota_back_in_the_step_of_the_submission():
    core = begin(queue("x", 2, RECLAIM), queue("y", 2))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    step = submit(core, "x1", "x", gpus=2)
    assert phase(core, "x1") is WorkloadPhase.PLACED
    assert len(evicted(step.events)) == 2
    (placed,) = (event for event in step.events if isinstance(event, WorkloadPlaced))
    assert len(set(placed.placements[0].gpu_uuids)) == 2
    victim = core.workload(evicted(step.events)[0])
    assert (victim.phase, victim.preemptions) == (WorkloadPhase.PENDING, 1)
    assert victim.reason == "preempted: for x1 of queue x"
    settle(core)
    assert core.workload(victim.workload_id).reason.startswith("quota: ")


def test_without_a_rule_nothing_is_preempted():
    core = begin(queue("x", 2), queue("y", 2))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    submit(core, "x1", "x", gpus=2)
    assert phase(core, "x1") is WorkloadPhase.PENDING
    assert settle(core) == []


def test_work_within_its_quota_is_no_victim_of_a_borrower_or_of_a_reclaim():
    core = begin(queue("x", 1, RECLAIM), queue("y", 3))
    for key in ("y1", "y2", "y3"):
        submit(core, key, "y")
    submit(core, "x1", "x")
    submit(core, "x2", "x", priority=9)
    settle(core)
    assert running(core) == ["x1", "y1", "y2", "y3"]
    # Only the quota of x itself lets it preempt: a larger one would borrow.
    other = begin(queue("x", 1, RECLAIM), queue("y", 1), queue("z", 2))
    for key in ("y1", "y2", "y3", "y4"):
        submit(other, key, "y")
    submit(other, "x1", "x", gpus=2)
    assert phase(other, "x1") is WorkloadPhase.PENDING


def test_a_queue_under_a_parent_reclaims_the_quota_of_the_parent():
    core = begin(queue("team", 2, RECLAIM), queue("leaf", 0, parent="team"), queue("y", 2))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    submit(core, "x1", "leaf", gpus=2)
    assert phase(core, "x1") is WorkloadPhase.PLACED


def test_what_no_eviction_cures_preempts_nobody():
    core = begin(queue("x", 4, RECLAIM), queue("y", 0), nodes=(build_node("a", gpus=2), build_node("b", gpus=2)))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    core.mark_gpu_lost("a", "GPU-a-0", now_ns=4)
    core.mark_gpu_lost("b", "GPU-b-0", now_ns=4)
    submit(core, "x1", "x", gpus=2, now_ns=5)
    assert phase(core, "x1") is WorkloadPhase.PENDING
    assert len(running(core)) == 4
    assert (
        core._preemptions.find_plan(core.workload("x1"), 9).problem
        == "it would not fit if all that it may preempt were gone"
    )
    assert core.explain_workload("x1").remedy.endswith(
        "Preemption does not help: it would not fit if all that it may preempt were gone."
    )


def test_victims_are_those_that_make_room_at_one_node_and_no_others():
    nodes = (build_node("a", gpus=2), build_node("b", gpus=2), build_node("c", gpus=2))
    core = begin(queue("x", 6, RECLAIM), queue("y", 0), nodes=nodes)
    for n in range(6):
        submit(core, f"y{n}", "y")
    step = submit(core, "x1", "x", gpus=2)
    assert phase(core, "x1") is WorkloadPhase.PLACED
    assert len(evicted(step.events)) == 2
    settle(core)


def test_a_gang_is_a_victim_as_a_whole_and_what_it_leaves_is_used_again():
    core = begin(queue("x", 1, RECLAIM), queue("y", 3), nodes=(build_node("a", gpus=2), build_node("b", gpus=2)))
    submit(core, "gang", "y", replicas=4, kind=WorkloadKind.TRAINING_JOB)
    submit(core, "small", "y", now_ns=4)
    step = submit(core, "x1", "x", now_ns=5)
    assert evicted(step.events) == ["gang"]
    settle(core)
    assert running(core) == ["small", "x1"]


def test_by_fair_share_a_queue_takes_from_one_that_borrows_more_and_not_back():
    core = begin(queue("x", 0, FAIR), queue("y", 0, FAIR), queue("z", 4))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    for key in ("x1", "x2", "x3"):
        submit(core, key, "x")
    settle(core)
    assert len([key for key in running(core) if key.startswith("x")]) == 2
    before = running(core)
    # More work of y changes nothing any more.
    submit(core, "y5", "y", now_ns=6)
    settle(core)
    assert running(core) == before


def test_a_weight_divides_the_share():
    core = begin(queue("x", 0, FAIR, weight=3.0), queue("y", 0, FAIR), queue("z", 4))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    for key in ("x1", "x2", "x3", "x4"):
        submit(core, key, "x")
    settle(core)
    assert len([key for key in running(core) if key.startswith("x")]) == 3


# Within a queue


def test_higher_priority_preempts_lower_in_its_queue_and_never_back():
    core = begin(queue("x", 4, WITHIN))
    for n, priority in enumerate((0, 1, 0, 1)):
        submit(core, f"w{n}", "x", priority=priority)
    step = submit(core, "urgent", "x", priority=5, gpus=2)
    assert sorted(evicted(step.events)) == ["w0", "w2"]
    settle(core)
    assert running(core) == ["urgent", "w1", "w3"]
    submit(core, "equal", "x", priority=1)
    settle(core)
    assert running(core) == ["urgent", "w1", "w3"]


def test_work_may_promise_to_preempt_nobody():
    core = begin(queue("x", 4, WITHIN))
    submit(core, "w", "x", gpus=4)
    submit(core, "urgent", "x", priority=5, never_preempts=True)
    settle(core)
    assert running(core) == ["w"]


def test_a_class_gives_its_priority_and_its_promise_at_submission():
    core = begin(queue("x", 4, WITHIN))
    classes = (PriorityClass(name="urgent", priority=5), PriorityClass(name="patient", priority=9, never_preempts=True))
    core.update_policy(replace(core.state.policy, priority_classes=classes), now_ns=2)
    submit(core, "w", "x", gpus=4)
    submit(core, "p", "x", priority_class="patient")
    assert (core.workload("p").spec.priority, running(core)) == (9, ["w"])
    submit(core, "u", "x", priority_class="urgent")
    assert phase(core, "w") is WorkloadPhase.PENDING
    core.update_policy(replace(core.state.policy, priority_classes=()), now_ns=4)
    assert submit(core, "u", "x", priority_class="urgent").result.spec.priority == 5
    with pytest.raises(InvalidArgument, match="not known"):
        submit(core, "v", "x", priority_class="urgent")
    core.update_policy(replace(core.state.policy, priority_classes=classes), now_ns=5)
    with pytest.raises(InvalidArgument, match="given twice"):
        submit(core, "v", "x", priority_class="urgent", priority=1)
    with pytest.raises(InvalidArgument, match="contradicts"):
        core.update_policy(replace(core.state.policy, priority_classes=classes[:1] * 2), now_ns=6)


# Who is no victim


def test_services_and_fixed_work_are_victims_only_if_their_queue_says_so():
    promise = ServicePromise(
        profile="p", objectives=(LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0),), rate_hz=1.0
    )
    for victims, count in ((PreemptionVictims.UNSPECIFIED, 0), (PreemptionVictims.ALL, 4), (PreemptionVictims.NONE, 0)):
        core = begin(queue("x", 4, RECLAIM), queue("y", 0, QueuePreemption(victims=victims)))
        submit(core, "s", "y", gpus=1, kind=WorkloadKind.INFERENCE_SERVICE, service=promise)
        submit(core, "f", "y", gpus=1, mobility=Mobility.FIXED)
        submit(core, "f2", "y", gpus=2, mobility=Mobility.FIXED)
        submit(core, "x1", "x", gpus=4)
        assert (phase(core, "x1") is WorkloadPhase.PLACED) == bool(count)


def test_no_work_is_preempted_before_its_minimum_run_time_and_then_it_is():
    rules = QueuePreemption(min_runtime_s=60.0)
    core = begin(queue("x", 4, RECLAIM), queue("y", 0, rules))
    submit(core, "y1", "y", gpus=4, now_ns=10 * S)
    submit(core, "x1", "x", gpus=2, now_ns=20 * S)
    assert running(core) == ["y1"]
    assert not core.is_drain_due(69 * S)
    assert core.is_drain_due(70 * S)
    step = core.continue_drains(now_ns=70 * S)
    assert evicted(step.events) == ["y1"]
    assert phase(core, "x1") is WorkloadPhase.PLACED
    assert not core.is_drain_due(71 * S)


def test_work_waits_for_the_delay_of_its_queue_before_others_make_room_and_takes_what_is_free_at_once():
    core = begin(queue("x", 4, replace(RECLAIM, delay_s=60.0)), queue("y", 0))
    submit(core, "y1", "y", gpus=3, now_ns=10 * S)
    submit(core, "free", "x", gpus=1, now_ns=20 * S)
    submit(core, "x1", "x", gpus=2, now_ns=20 * S)
    submit(core, "x2", "x", gpus=1, now_ns=50 * S)
    assert running(core) == ["free", "y1"]
    assert not core.is_drain_due(79 * S)
    assert core.is_drain_due(80 * S)
    step = core.continue_drains(now_ns=80 * S)
    assert evicted(step.events) == ["y1"]
    assert phase(core, "x1") is WorkloadPhase.PLACED
    settle(core, 80 * S)
    assert phase(core, "x2") is WorkloadPhase.PLACED


def test_what_a_round_has_just_placed_is_not_preempted_by_the_same_round_but_soon_after():
    keep = QueuePreemption(victims=PreemptionVictims.NONE)
    core = begin(queue("x", 1, RECLAIM), queue("y", 0), queue("z", 3), queue("kept", 0, keep))
    submit(core, "kept1", "kept", gpus=4, now_ns=S)
    submit(core, "filler", "y", gpus=4, priority=9, now_ns=2 * S)
    submit(core, "x1", "x", now_ns=3 * S)
    core.cancel("kept1", now_ns=4 * S)
    settle(core, now_ns=4 * S)
    assert running(core) == ["filler"]
    assert core.is_drain_due(5 * S)
    step = core.continue_drains(now_ns=5 * S)
    assert evicted(step.events) == ["filler"]
    assert phase(core, "x1") is WorkloadPhase.PLACED


def test_work_that_must_come_back_soon_is_waited_for_instead():
    core = begin(queue("x", 4, RECLAIM), queue("y", 0))
    submit(core, "y1", "y", gpus=2, process=PROCESS)
    submit(core, "y2", "y", gpus=2, process=PROCESS)
    core.cancel("y1", now_ns=5)
    submit(core, "x1", "x", gpus=2, now_ns=6)
    assert not core.workload("y2").stopping_ns
    report_stopped(core, "y1")
    assert phase(core, "x1") is WorkloadPhase.PLACED


# Processes


def begin_processes():
    core = begin(queue("x", 4, RECLAIM), queue("y", 0))
    for key in ("y1", "y2", "y3"):
        submit(core, key, "y", process=PROCESS)
        core.record_attempts("a", (status(core, key),), now_ns=6)
    return core


def test_processes_are_stopped_first_and_nobody_gets_their_devices_meanwhile():
    core = begin_processes()
    step = submit(core, "x1", "x", gpus=3, now_ns=7)
    (started,) = (event for event in step.events if isinstance(event, PreemptionStarted))
    assert len(started.victims) == 2
    one, two = started.victims
    assert core.workload("x1").reason == f"preempting: waits for {one}, {two} to stop"
    assert core.workload(one).reason == "preempted: for x1 of queue x"
    stops = {item.workload_id: item.stop for item in core.node_plan("a").assignments}
    assert sorted(key for key, stop in stops.items() if stop) == sorted(started.victims)
    # One GPU is free, and x1 is nominated for it; neither a small one, nor the victim that has stopped, gets it.
    submit(core, "small", "x", priority=9, now_ns=8, never_preempts=True)
    assert report_stopped(core, one).result == 0
    settle(core)
    assert phase(core, "small") is WorkloadPhase.PENDING
    assert phase(core, one) is WorkloadPhase.PLACED
    step = report_stopped(core, two)
    settle(core)
    assert set(evicted(step.events)) == {one, two}
    assert core.workload("x1").placements == started.placements
    assert core.workload(one).phase is WorkloadPhase.PENDING
    assert core.workload(one).submitted_ns == 3
    assert not len(core.state.nominations)


def test_work_that_must_not_run_again_is_no_victim_whatever_its_queue_says():
    for victims in (PreemptionVictims.UNSPECIFIED, PreemptionVictims.ALL):
        core = begin(queue("x", 4, RECLAIM), queue("y", 0, QueuePreemption(victims=victims)))
        submit(core, "once", "y", gpus=4, process=PROCESS, schedule=JobSchedule(no_requeue=True))
        submit(core, "x1", "x", gpus=1)
        assert phase(core, "x1") is WorkloadPhase.PENDING
        assert not core.workload("once").stopping_ns


def test_a_preempted_process_begins_its_next_attempt_and_old_reports_change_nothing():
    core = begin_processes()
    submit(core, "x1", "x", gpus=4, now_ns=7)
    late = status(core, "y1", AttemptState.ENDED, exit_code=1, reason="stopped", ended_ns=20)
    for key in ("y1", "y2", "y3"):
        report_stopped(core, key)
    settle(core)
    assert running(core) == ["x1"]
    core.cancel("x1", now_ns=60)
    settle(core)
    assert core.workload("y1").attempt == 2
    assert core.workload("y1").attempts == ()
    assert core.record_attempts("a", (late,), now_ns=61).result == 1
    assert phase(core, "y1") is WorkloadPhase.PLACED


def test_the_process_that_has_just_made_a_checkpoint_is_stopped_first():
    core = begin_processes()
    core.record_attempts("a", (status(core, "y2", checkpointed_ns=90 * S),), now_ns=91 * S)
    core.record_attempts("a", (status(core, "y3", checkpointed_ns=10 * S),), now_ns=91 * S)
    step = submit(core, "x1", "x", gpus=2, now_ns=100 * S)
    (started,) = (event for event in step.events if isinstance(event, PreemptionStarted))
    # y1 never reported, and counts as if it had at 50 s.
    assert started.victims == ("y2",)
    report_stopped(core, "y2")
    submit(core, "x2", "x", now_ns=100 * S)
    assert core.workload("y1").stopping_ns
    assert not core.workload("y3").stopping_ns


def test_a_process_that_had_ended_by_itself_is_not_run_again():
    core = begin_processes()
    submit(core, "x1", "x", gpus=4, now_ns=7)
    report_stopped(core, "y1", reason="", code=0)
    assert phase(core, "y1") is WorkloadPhase.SUCCEEDED
    report_stopped(core, "y2")
    report_stopped(core, "y3")
    settle(core)
    assert phase(core, "x1") is WorkloadPhase.PLACED


@pytest.mark.parametrize("way", ["cancelled", "lost", "gpu"])
def test_a_nomination_ends_with_its_workload_or_a_node_and_the_victims_return(way):
    core = begin_processes()
    submit(core, "x1", "x", gpus=4, now_ns=7)
    assert len(core.state.nominations) == 1
    report_stopped(core, "y1")
    if way == "cancelled":
        core.cancel("x1", now_ns=60)
    elif way == "lost":
        core.mark_node_lost("a", now_ns=60)
    else:
        core.mark_gpu_lost("a", "GPU-a-0", now_ns=60)
    settle(core)
    assert not len(core.state.nominations)
    report_stopped(core, "y2")
    report_stopped(core, "y3")
    settle(core)
    for key in ("y1", "y2", "y3"):
        assert core.workload(key).preemptions == 1
    if way == "cancelled":
        assert running(core) == ["y1", "y2", "y3"]


def test_a_victim_may_be_cancelled_while_it_stops_and_after():
    core = begin_processes()
    submit(core, "x1", "x", gpus=4, now_ns=7)
    core.cancel("y1", now_ns=8)
    report_stopped(core, "y2")
    core.cancel("y2", now_ns=9)
    assert phase(core, "y2") is WorkloadPhase.CANCELLED
    report_stopped(core, "y1")
    assert phase(core, "y1") is WorkloadPhase.CANCELLED
    report_stopped(core, "y3")
    settle(core)
    assert (phase(core, "x1"), phase(core, "y3")) == (WorkloadPhase.PLACED, WorkloadPhase.PENDING)


def test_a_restart_in_between_changes_nothing():
    core = begin_processes()
    submit(core, "x1", "x", gpus=4, now_ns=7)
    report_stopped(core, "y1")
    again = restart(core)
    assert again.state.digest() == core.state.digest()
    settle(again)
    for key in ("y2", "y3"):
        report_stopped(again, key)
    settle(again)
    assert running(again) == ["x1"]


def test_work_without_processes_runs_on_until_the_processes_have_stopped():
    core = begin(queue("x", 4, RECLAIM), queue("y", 0))
    submit(core, "plain", "y", gpus=2)
    submit(core, "job", "y", gpus=2, process=PROCESS)
    submit(core, "x1", "x", gpus=4, now_ns=7)
    settle(core)
    assert running(core) == ["job", "plain"]
    report_stopped(core, "job")
    settle(core)
    assert running(core) == ["x1"]


# Events and pure parts


def test_events_are_read_back_and_without_preemption_are_as_before():
    core = begin_processes()
    step = submit(core, "x1", "x", gpus=4, now_ns=7)
    events = [*step.events, *report_stopped(core, "y1").events, *settle(core)]
    for event in drop_quotes(events):
        kind, body = event_to_plain(event)
        assert event_from_plain(kind, json.loads(json.dumps(body))) == event
    (submitted,) = (event for event in step.events if isinstance(event, WorkloadSubmitted))
    assert "never_preempts" not in event_to_plain(submitted)[1]["spec"]
    plain = event_to_plain(WorkloadEvicted(time_ns=1, workload_id="w", reason="evicted: a"))[1]
    assert set(plain) == {"time_ns", "workload_id", "reason"}


def candidate(key, *, priority=0, gpus=1, started_s=0, checkpointed_s=0):
    return PreemptionCandidate(
        workload_id=key,
        queue="q",
        priority=priority,
        amounts={"gpu": 1000 * gpus},
        node_names=frozenset(),
        started_ns=started_s * S,
        checkpointed_ns=checkpointed_s * S,
    )


def test_victims_are_ordered_by_priority_then_lost_gpu_time_then_age():
    found = order_candidates(
        [
            candidate("urgent", priority=1, started_s=99),
            candidate("wide", gpus=8, checkpointed_s=90),
            candidate("fresh", checkpointed_s=99),
            candidate("silent", started_s=10),
            candidate("silent-late", started_s=95),
        ],
        100 * S,
    )
    # The silent one counts as if it had reported at the median, 94.5 s, and so is not safer.
    assert [one.workload_id for one in found] == ["fresh", "silent-late", "silent", "wide", "urgent"]


def test_rules_are_those_of_the_nearest_queue_above_that_has_some():
    queues = (
        Queue(name="a", preemption=WITHIN),
        Queue(name="b", parent="a"),
        Queue(name="c", parent="b", preemption=RECLAIM),
        Queue(name="d"),
    )
    assert resolve_preemption(queues) == {"a": WITHIN, "b": WITHIN, "c": RECLAIM, "d": QueuePreemption()}


# Searches in steps


def begin_large(work_most, *, replicas=6):
    """Ten nodes of 4 GPUs full of single jobs of a borrower; a gang of whole nodes reclaims its quota."""
    nodes = [build_node(f"n{n}", gpus=4, runs_processes=True, agent_version="1") for n in range(10)]
    core = begin(queue("x", 40, RECLAIM), queue("y", 0), nodes=nodes)
    core._preemptions.work_most = work_most
    for n in range(40):
        submit(core, f"y{n}", "y", now_ns=3 + n % 7)
    step = submit(core, "gang", "x", gpus=4, replicas=replicas, now_ns=50 * S)
    return core, list(step.events)


def test_a_search_in_steps_finds_the_victims_that_a_search_in_one_step_finds():
    whole, events = begin_large(10**9)
    paused, first = begin_large(1)
    assert phase(whole, "gang") is WorkloadPhase.PLACED
    assert phase(paused, "gang") is WorkloadPhase.PENDING
    assert not evicted(first)
    steps = 0
    while phase(paused, "gang") is WorkloadPhase.PENDING and steps < 1000:
        first += paused.retry(now_ns=50 * S).events
        steps += 1
    assert steps > 5
    assert evicted(first) == evicted(events)
    assert paused.workload("gang").placements == whole.workload("gang").placements
    assert [core.state.nominations.dump() for core in (whole, paused)] == [[], []]


def test_a_search_begins_anew_after_a_change_and_ends_though_changes_go_on():
    core, _ = begin_large(1)
    searching = 0
    for n in range(20):
        core.submit(build_request(f"late{n}", queue="y", gpus=1), now_ns=50 * S)
        core.retry(now_ns=50 * S)
        searching += core._preemptions.is_searching("gang")
        if phase(core, "gang") is WorkloadPhase.PLACED:
            break
    assert searching
    assert phase(core, "gang") is WorkloadPhase.PLACED
    settle(core, 50 * S)


def test_the_search_of_work_that_is_cancelled_ends():
    core, _ = begin_large(1)
    core.cancel("gang", now_ns=51 * S)
    assert not core._preemptions.is_searching("gang")
    assert settle(core, 51 * S) == []
    assert len(running(core)) == 40


def test_hundreds_of_victims_make_room_in_several_steps_and_start_no_sooner_than_their_gainer():
    nodes = [build_node(f"n{n}", gpus=8, cpu=200) for n in range(75)]
    core = begin(queue("x", 592, RECLAIM), queue("y", 8), queue("z", 8), nodes=nodes)
    for n in range(600):
        submit(core, f"y{n}", "y", now_ns=3 + n)
    events = list(submit(core, "gang", "x", gpus=1, replicas=592, now_ns=50 * S).events)
    most = 0
    for _ in range(100):
        if phase(core, "gang") is not WorkloadPhase.PENDING:
            break
        # A node that joins has room for victims, which wait until the gang has started.
        if len(core.state.nodes) == 75 and evicted(events):
            events += core.register_node(build_node("more", gpus=8), now_ns=50 * S).events
        step = core.retry(now_ns=50 * S)
        most = max(most, len(evicted(step.events)))
        assert not [one for one in step.events if isinstance(one, WorkloadPlaced) and one.workload_id != "gang"] or (
            phase(core, "gang") is WorkloadPhase.PLACED
        )
        check_invariants(core.state)
        events += step.events
    assert len(evicted(events)) == len(set(evicted(events))) == 592
    assert most == 256
    settle(core, 50 * S)
    assert len(running(core)) == 1 + 8 + 8


def test_a_lost_node_in_the_middle_of_many_evictions_leaves_nothing_behind():
    nodes = [build_node(f"n{n}", gpus=8, cpu=200) for n in range(75)]
    core = begin(queue("x", 600, RECLAIM), queue("y", 0), nodes=nodes)
    for n in range(600):
        submit(core, f"y{n}", "y", now_ns=3)
    events = list(submit(core, "gang", "x", gpus=8, replicas=75, now_ns=50 * S).events)
    for _ in range(100):
        events += [] if evicted(events) else core.retry(now_ns=50 * S).events
    core.mark_node_lost("n7", now_ns=51 * S)
    settle(restart(core), 51 * S)
    settle(core, 51 * S)
    assert phase(core, "gang") is WorkloadPhase.PENDING
    assert len(core.state.nominations) == 0
    # Who lost its place has one again, but for those on the lost node.
    assert len(running(core)) >= 74 * 8


def test_explain_says_whom_a_preemption_stops_and_what_that_loses():
    hour_ns = 3600 * S
    core = begin(queue("x", 2, RECLAIM), queue("y", 2))
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y", process=PROCESS)
        core.record_attempts("a", (status(core, key),), now_ns=3)
    submit(core, "patient", "x", gpus=2, now_ns=2 * hour_ns, never_preempts=True)
    remedy = core.explain_workload("patient").remedy
    assert "If it were allowed to preempt, it would start now, and stop 2 workloads (y1, y2)" in remedy
    assert "at the loss of 4.0 GPU hours" in remedy
    submit(core, "urgent", "x", now_ns=2 * hour_ns, process=PROCESS)
    remedy = core.explain_workload("urgent").remedy
    assert "It preempts 1 workload (y1), at the loss of 2.0 GPU hours since their last checkpoints or starts." in remedy
    # What runs, and what preempts nothing, has no such sentence.
    submit(core, "z1", "y", gpus=2, now_ns=2 * hour_ns)
    assert not any("preempt" in core.explain_workload(key).remedy for key in ("z1", "y1"))


def test_nobody_makes_room_on_nodes_that_a_reservation_closes():
    core = begin(queue("q", 8, WITHIN))
    submit(core, "low", "q", gpus=4)
    repair = Reservation(name="repair", node_names=("a",), start_ns=10 * S, end_ns=100 * S, maintenance=True)
    core.update_policy(replace(core.state.policy, reservations=(repair,)), now_ns=5 * S)
    submit(core, "high", "q", priority=5, now_ns=20 * S)
    settle(core, 20 * S)
    assert running(core) == ["low"]
    # Its end is no event.
    core.retry_waiting(now_ns=100 * S)
    settle(core, 100 * S)
    assert running(core) == ["high"]


def close_gpu(core):
    (nomination,) = core.state.nominations
    core.cordon_node("a", nomination.placements[0].gpu_uuids, reason="fan", user="ann", now_ns=6 * S)


def reserve(core):
    repair = Reservation(name="repair", node_names=("a",), start_ns=5 * S, end_ns=100 * S, maintenance=True)
    core.update_policy(replace(core.state.policy, reservations=(repair,)), now_ns=6 * S)


def lower_quota(core):
    quotas = tuple(QueueQuota(resource=f"gpu/{model}", nominal=most) for model, most in (("G2", 1000), ("T4", 4000)))
    core.update_policy(
        replace(core.state.policy, queues=(Queue(name="q", quotas=quotas, preemption=WITHIN),)), now_ns=6 * S
    )


def spend(core):
    limit = build_spending_limit(name="default")
    over = (OverspentLimit(limit=limit, spent=limit.most, begin_s=0, end_s=86_400, since_ns=6 * S),)
    core.update_policy(replace(core.state.policy, spending=(limit,)), now_ns=6 * S)
    core.set_exhausted_spending(over, now_ns=6 * S)


@pytest.mark.parametrize("change", [close_gpu, reserve, lower_quota, spend])
def test_what_others_have_made_room_for_starts_only_where_it_may_start_by_then(change):
    nodes = build_node("a", gpus=2, runs_processes=True), build_node("b", gpus=1, model="T4", runs_processes=True)
    core = begin(queue("q", 8, WITHIN), nodes=nodes)
    submit(core, "on-b", "q", models=("T4",), priority=9)
    submit(core, "stays", "q", priority=9)
    submit(core, "low", "q", process=PROCESS)
    submit(core, "high", "q", priority=5, process=PROCESS, now_ns=4 * S)
    assert [one.workload_id for one in core.state.nominations] == ["high"]
    change(core)
    report_stopped(core, "low", now_ns=7 * S)
    settle(core, 7 * S)
    assert phase(core, "high") is WorkloadPhase.PENDING


@pytest.mark.parametrize(("priority", "delays"), [(9, False), (5, True)])
def test_nobody_makes_room_for_work_that_would_delay_a_promised_start_which_goes_before_it(priority, delays):
    """It was promised to work that preempts nothing itself, and waits for the very work that would be stopped."""
    core = build_core(build_node("a", gpus=2))
    within = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
    queue = Queue(name="default", quotas=(QueueQuota(resource="gpu", nominal=6000),), preemption=within)
    core.update_policy(replace(core.state.policy, queues=(queue,)), now_ns=1)
    core.submit(build_request("running", expected_runtime_s=3600.0), now_ns=2)
    first = {"priority": priority, "never_preempts": True, "expected_runtime_s": 600.0}
    core.submit(build_request("first", gpus=2, **first), now_ns=3)
    promised = core.workload("first").promise
    core.submit(build_request("later", gpus=2, priority=7, expected_runtime_s=36_000.0), now_ns=4)
    core.retry(now_ns=5)
    placed = {key for key in ("running", "later") if core.workload(key).phase is WorkloadPhase.PLACED}
    assert placed == ({"later"} if delays else {"running"})
    if not delays:
        assert core.workload("first").promise == promised
        # What ends before the promised start may take the place.
        core.submit(build_request("short", gpus=1, priority=7, expected_runtime_s=60.0), now_ns=6)
        assert core.workload("short").phase is WorkloadPhase.PLACED
