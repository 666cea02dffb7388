"""Running jobs that return to the queue: asked for, drained, on a GPU that was lost, or ended by a fault of their node."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.job_control import NODE_FAULTS_MOST
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.server.metric_collectors import FleetMetrics
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import WorkloadEvicted, WorkloadStopping, event_from_plain, event_to_plain
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    DrainOutcome,
    GangPart,
    JobSchedule,
    Mobility,
    ProcessSpec,
    Summary,
    WorkloadKind,
    WorkloadPhase,
)

S = 10**9
PROCESS = ProcessSpec(argv=("python", "train.py"), working_directory="/home/ann")


def node(name="a", **known):
    return build_node(name, **({"gpus": 2, "runs_processes": True, "agent_version": "1"} | known))


def job(key, *, gpus=1, **spec):
    return build_request(key, gpus=gpus, process=PROCESS, mobility=Mobility.FIXED, **spec)


def begin(core, *requests, now_ns=2):
    """Submits jobs, and has their agents report that they run."""
    for request in requests:
        core.submit(request, now_ns=now_ns)
        for place in core.workload(request.workload_id).placements:
            report(core, request.workload_id, place, now_ns=now_ns)


def report(core, key, place=None, *, state=AttemptState.RUNNING, now_ns=50, **known):
    place = place or core.workload(key).placements[0]
    status = AttemptStatus(
        workload_id=key, replica=place.replica, attempt=core.workload(key).attempt, state=state, started_ns=1, **known
    )
    return core.record_attempts(place.node_name, (status,), now_ns=now_ns).events


def end(core, key, place=None, *, code=None, signal=0, now_ns=50, **known):
    if code is None and not signal:
        signal = 15
    return report(
        core,
        key,
        place,
        state=AttemptState.ENDED,
        exit_code=code,
        signal=signal,
        ended_ns=now_ns,
        now_ns=now_ns,
        **known,
    )


def drain(core, now_ns):
    events = []
    while core.is_drain_due(now_ns):
        events.extend(core.continue_drains(now_ns=now_ns).events)
    return events


def stops(core, key):
    return {item.workload_id: item.stop for item in core.node_plan("a").assignments}[key]


def reload(core):
    """A core that goes on after a restart."""
    loaded = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert loaded.digest() == core.state.digest()
    return build_core(state=loaded)


def test_a_requeued_job_stops_waits_and_runs_again_and_is_not_counted_as_failed():
    core = build_core(node())
    begin(core, job("j", gpus=2), job("next", gpus=2))
    (event,) = core.requeue("j", " by ann: new data", now_ns=9).events
    assert event_from_plain(*event_to_plain(event)) == event
    stopping = core.workload("j")
    assert (stopping.phase, stopping.requeuing, stopping.stopping_ns) == (WorkloadPhase.PLACED, True, 9)
    assert stops(core, "j") is True
    assert core.requeue("j", now_ns=10).events == ()
    core = reload(core)
    end(core, "j", reason="stopped", now_ns=20)
    # In the order of submission it is before the other.
    again = core.workload("j")
    assert (again.phase, again.attempt, again.requeuing, again.stopping_ns) == (WorkloadPhase.PLACED, 2, False, 0)
    assert (again.failures, again.preemptions, again.node_faults) == (0, 0, 0)
    assert core.workload("next").phase is WorkloadPhase.PENDING
    check_invariants(core.state)


def test_a_requeued_job_says_why_it_waits():
    core = build_core(node())
    begin(core, job("first", gpus=2), job("second"))
    core.hold("second", user="bo", now_ns=3)
    core.requeue("first", " by ann: new data", now_ns=9)
    core.cordon_node("a", now_ns=10)
    events = end(core, "first", now_ns=20)
    (evicted,) = (event for event in events if isinstance(event, WorkloadEvicted))
    assert evicted.reason == "evicted: it was requeued by ann: new data"
    assert core.workload("first").phase is WorkloadPhase.PENDING


def test_a_job_that_is_requeued_and_held_waits_until_it_is_released():
    core = build_core(node())
    begin(core, job("j"))
    (event,) = core.requeue("j", held_by="ann", now_ns=9).events
    assert event_from_plain(*event_to_plain(event)) == event
    with pytest.raises(FailedPrecondition, match="is being stopped; release it when it waits"):
        core.release("j", now_ns=10)
    core = reload(core)
    end(core, "j", now_ns=20)
    waits = core.workload("j")
    assert (waits.phase, waits.held_by, waits.reason) == (WorkloadPhase.PENDING, "ann", "held: by ann")
    check_invariants(core.state)
    core.release("j", now_ns=30)
    assert core.workload("j").attempt == 2


def test_a_gang_whose_parts_are_requeued_and_held_starts_together_again():
    core = build_core(node("a", gpus=4))
    part = GangPart(name="llama", parts=2)
    for key in ("driver", "workers"):
        core.submit(job(key, gpus=2, gang=part), now_ns=2)
    for key in ("driver", "workers"):
        report(core, key, now_ns=3)
        core.requeue(key, held_by="ann", now_ns=4)
    for key in ("driver", "workers"):
        end(core, key, now_ns=20)
        assert core.workload(key).phase is WorkloadPhase.PENDING
    core.release("driver", now_ns=30)
    assert core.workload("driver").phase is WorkloadPhase.PENDING
    core.release("workers", now_ns=31)
    assert [core.workload(key).attempt for key in ("driver", "workers")] == [2, 2]


def test_a_job_that_waits_or_stops_already_is_held_all_the_same():
    core = build_core(node())
    begin(core, job("runs", gpus=2), job("waits"))
    core.requeue("waits", held_by="ann", now_ns=8)
    assert core.workload("waits").held_by == "ann"
    core.requeue("runs", now_ns=9)
    core.requeue("runs", held_by="ann", now_ns=10)
    assert core.requeue("runs", held_by="ann", now_ns=11).events == ()
    end(core, "runs", now_ns=20)
    assert core.workload("runs").reason == "held: by ann"


def test_a_held_job_that_is_cancelled_while_it_stops_ends():
    core = build_core(node())
    begin(core, job("j"))
    core.requeue("j", held_by="ann", now_ns=9)
    core.cancel("j", now_ns=10)
    end(core, "j", now_ns=20)
    assert (core.workload("j").phase, core.workload("j").held_by) == (WorkloadPhase.CANCELLED, "")


def test_what_does_not_run_processes_or_does_not_run_is_not_requeued():
    core = build_core(node())
    begin(core, job("done"), job("runs"), job("waits", gpus=2))
    core.submit(build_request("placed", gpus=0), now_ns=4)
    end(core, "done", code=0)
    with pytest.raises(FailedPrecondition, match="has ended, and is not requeued: run it again with eelctl rerun done"):
        core.requeue("done", now_ns=60)
    with pytest.raises(FailedPrecondition, match="runs no process that an agent could stop"):
        core.requeue("placed", now_ns=60)
    assert core.requeue("waits", now_ns=60).events == ()
    core.cancel("runs", now_ns=61)
    with pytest.raises(FailedPrecondition, match="is being cancelled"):
        core.requeue("runs", now_ns=62)


def test_a_job_that_is_cancelled_while_it_is_requeued_ends():
    core = build_core(node())
    begin(core, job("j"))
    core.requeue("j", now_ns=9)
    core.cancel("j", now_ns=10)
    assert not core.workload("j").requeuing
    end(core, "j", now_ns=20)
    assert core.workload("j").phase is WorkloadPhase.CANCELLED


def test_a_job_that_succeeds_while_it_is_requeued_has_succeeded():
    core = build_core(node())
    begin(core, job("j"))
    core.requeue("j", now_ns=9)
    end(core, "j", code=0, now_ns=20)
    assert core.workload("j").phase is WorkloadPhase.SUCCEEDED


def test_a_gang_returns_once_all_of_its_processes_have_ended():
    core = build_core(node("a"), node("b"))
    begin(core, job("g", gpus=2, replicas=2, kind=WorkloadKind.TRAINING_JOB))
    core.requeue("g", now_ns=9)
    first, second = core.workload("g").placements
    end(core, "g", first, now_ns=20)
    assert core.workload("g").phase is WorkloadPhase.PLACED
    assert core.workload("g").attempt == 1
    end(core, "g", second, now_ns=21)
    assert core.workload("g").attempt == 2


# Drains


def test_a_drain_with_a_grace_requeues_processes_when_it_is_over():
    core = build_core(node("a"))
    begin(core, job("j"))
    core.register_node(node("b"), now_ns=3)
    terms = DrainTerms(deadline_ns=50)
    (found,) = core.preview_drain("a", (), terms, now_ns=9)
    assert (found.outcome, found.reason) == (DrainOutcome.REQUEUED, "it runs a process, which cannot move")
    core.cordon_node("a", reason="kernel", user="ann", drain=terms, now_ns=10)
    assert drain(core, 49) == []
    (event,) = drain(core, 50)
    assert event == WorkloadStopping(
        time_ns=50, workload_id="j", reason="evicted: node a was drained by ann: kernel", requeues=True
    )
    assert drain(core, 60) == [], "it is told once"
    end(core, "j", now_ns=70)
    assert core.workload("j").placements[0].node_name == "b"


def test_a_drain_without_a_grace_lets_processes_finish():
    core = build_core(node("a"), node("b"))
    begin(core, job("j"))
    name = core.workload("j").placements[0].node_name
    (found,) = core.preview_drain(name, (), DrainTerms(force=True), now_ns=9)
    assert found.outcome is DrainOutcome.FINISHES
    assert found.reason == "it runs a process, which cannot move: eelctl requeue stops it"
    core.cordon_node(name, drain=DrainTerms(force=True), now_ns=10)
    assert drain(core, 10**12) == []


# Lost GPUs


def lose(core, key, now_ns):
    place = core.workload(key).placements[0]
    core.mark_gpu_lost(place.node_name, place.gpu_uuids[0], now_ns=now_ns)
    return place


def test_processes_on_a_lost_gpu_are_stopped_after_the_grace_and_run_elsewhere():
    core = build_core(node("a"))
    begin(core, job("j"), job("beside"))
    core.register_node(node("b"), now_ns=3)
    lose(core, "j", now_ns=1 * S)
    assert drain(core, 1 * S) == []
    assert drain(core, 60 * S) == []
    (event,) = drain(core, 61 * S)
    assert (event.workload_id, event.requeues, event.reason) == ("j", True, "evicted: its GPU on node a was lost")
    assert drain(core, 62 * S) == []
    end(core, "j", signal=9, now_ns=63 * S)
    assert core.workload("j").placements[0].node_name == "b"
    assert core.workload("beside").placements[0].node_name == "a"
    assert drain(core, 999 * S) == []


def test_a_gpu_that_returns_within_the_grace_keeps_its_work():
    core = build_core(node("a"))
    begin(core, job("j"))
    place = lose(core, "j", now_ns=1 * S)
    drain(core, 1 * S)
    core.mark_gpu_returned("a", place.gpu_uuids[0], now_ns=40 * S)
    assert drain(core, 100 * S) == []
    lose(core, "j", now_ns=200 * S)
    assert drain(core, 200 * S) == []
    assert drain(core, 259 * S) == []
    assert len(drain(core, 260 * S)) == 1


def test_a_loss_that_the_inventory_tells_of_counts_also_after_a_restart():
    core = build_core(node("a"))
    begin(core, job("j"))
    place = core.workload("j").placements[0]
    inventory = core.state.nodes["a"].inventory
    gpus = tuple(replace(gpu, lost=gpu.uuid in place.gpu_uuids) for gpu in inventory.gpus)
    core.register_node(replace(inventory, gpus=gpus, generation=2), now_ns=1 * S)
    assert drain(core, 1 * S) == []
    core = reload(core)
    core.register_node(replace(inventory, gpus=gpus, generation=3), now_ns=30 * S)
    assert drain(core, 60 * S) == [], "it goes on from when the GPU was lost"
    assert [type(event) for event in drain(core, 61 * S)] == [WorkloadStopping]


def test_work_without_processes_leaves_a_lost_gpu_for_where_it_fits_or_the_queue():
    core = build_core(node("a", gpus=3))
    core.submit(build_request("moves", gpus=1), now_ns=2)
    core.submit(build_request("fixed", gpus=1, mobility=Mobility.FIXED), now_ns=3)
    core.submit(build_request("beside", gpus=1), now_ns=4)
    core.register_node(node("b", gpus=1), now_ns=5)
    lose(core, "moves", now_ns=1 * S)
    lose(core, "fixed", now_ns=1 * S)
    assert drain(core, 1 * S) == []
    drain(core, 61 * S)
    assert core.workload("moves").placements[0].node_name == "b"
    assert core.workload("fixed").placements[0].node_name == "a"
    lose(core, "moves", now_ns=70 * S)
    drain(core, 70 * S)
    drain(core, 130 * S)
    assert core.workload("moves").phase is WorkloadPhase.PENDING
    check_invariants(core.state)


def test_nothing_leaves_a_lost_gpu_of_a_lost_node_or_without_a_grace():
    core = build_core(node("a"))
    begin(core, job("j"))
    lose(core, "j", now_ns=1 * S)
    drain(core, 1 * S)
    core.mark_node_lost("a", now_ns=2 * S)
    assert drain(core, 99 * S) == []
    never = build_core(node("a"), lost_gpu_grace_s=None)
    begin(never, job("j"))
    lose(never, "j", now_ns=1 * S)
    assert drain(never, 10**6 * S) == []


# Faults of nodes


def test_an_attempt_that_its_node_ended_is_followed_by_another_and_not_counted_as_failed():
    core = build_core(node("a"))
    begin(core, job("j"))
    events = end(core, "j", code=1, node_fault="GPU 1: it was lost")
    (evicted,) = (event for event in events if isinstance(event, WorkloadEvicted))
    assert evicted.reason == "evicted: attempt 1 ended with its node: GPU 1: it was lost"
    assert event_from_plain(*event_to_plain(evicted)) == evicted
    assert evicted.is_node_fault
    again = core.workload("j")
    assert (again.attempt, again.failures, again.node_faults) == (2, 0, 1)


def test_a_job_that_its_nodes_end_again_and_again_fails_in_the_end():
    core = build_core(node("a"))
    begin(core, job("j"))
    for number in range(NODE_FAULTS_MOST):
        assert core.workload("j").attempt == number + 1
        end(core, "j", code=1, node_fault="the machine restarted")
    end(core, "j", code=1, node_fault="the machine restarted")
    assert core.workload("j").phase is WorkloadPhase.FAILED


def test_of_a_gang_one_process_whose_node_failed_is_enough():
    """Those on other nodes may have ended before it."""
    core = build_core(node("a"), node("b"))
    begin(core, job("g", gpus=2, replicas=2, kind=WorkloadKind.TRAINING_JOB))
    first, second = core.workload("g").placements
    end(core, "g", first, code=1, now_ns=20)
    end(core, "g", second, code=1, now_ns=21, node_fault="GPU 0: XID 79")
    again = core.workload("g")
    assert (again.phase, again.attempt, again.node_faults) == (WorkloadPhase.PLACED, 2, 1)


def test_a_cancelled_job_whose_node_fails_ends():
    core = build_core(node("a"))
    begin(core, job("j"))
    core.cancel("j", now_ns=9)
    end(core, "j", code=1, node_fault="the machine restarted")
    assert core.workload("j").phase is WorkloadPhase.CANCELLED


# Work that must not run again

ONCE = {"schedule": JobSchedule(no_requeue=True)}


def test_work_that_must_not_run_again_fails_with_its_node():
    core = build_core(node("a"))
    begin(core, job("j", **ONCE))
    end(core, "j", code=1, node_fault="GPU 0: it was lost")
    assert core.workload("j").phase is WorkloadPhase.FAILED


def test_work_that_must_not_run_again_is_not_requeued_and_stays_under_a_drain_that_is_not_forced():
    core = build_core(node("a"))
    begin(core, job("j", **ONCE))
    with pytest.raises(FailedPrecondition, match="was submitted with --no-requeue: cancel it to stop it"):
        core.requeue("j", now_ns=9)
    (found,) = core.preview_drain("a", (), DrainTerms(deadline_ns=50), now_ns=10)
    assert (found.outcome, found.reason) == (DrainOutcome.STAYS, "it was submitted with --no-requeue")
    core.cordon_node("a", drain=DrainTerms(deadline_ns=50), now_ns=10)
    assert drain(core, 60) == []
    core.cordon_node("a", drain=DrainTerms(deadline_ns=70, force=True), now_ns=61)
    (event,) = drain(core, 70)
    assert not event.requeues
    end(core, "j", now_ns=80)
    assert core.workload("j").phase is WorkloadPhase.CANCELLED


def test_work_that_must_not_run_again_ends_on_a_lost_gpu():
    core = build_core(node("a"))
    begin(core, job("j", **ONCE))
    lose(core, "j", now_ns=1 * S)
    drain(core, 61 * S)
    end(core, "j", now_ns=62 * S)
    found = core.workload("j")
    assert (found.phase, found.reason) == (WorkloadPhase.CANCELLED, "evicted: its GPU on node a was lost")


# Fenced nodes


def fenced(name="a", **known):
    return replace(node(name, **known), fence_after_s=100.0)


# 100 s, a tenth more, the grace of the process and 10 s.
ENDS_S = 100.0 * 1.1 + PROCESS.grace_s + 10.0


def wait(core, begin_s, end_s):
    """What happens while time passes second by second."""
    return [event for at_s in range(int(begin_s), int(end_s) + 1) for event in drain(core, at_s * S)]


def test_processes_of_a_lost_node_that_fences_them_run_elsewhere_once_they_must_have_ended():
    core = build_core(fenced("a"))
    begin(core, job("j"))
    core.submit(build_request("placed", gpus=1), now_ns=4)
    core.register_node(node("b"), now_ns=5)
    core.mark_node_lost("a", now_ns=1 * S)
    assert wait(core, 1, ENDS_S) == []
    assert wait(core, ENDS_S, ENDS_S + 1)
    again = core.workload("j")
    assert (again.attempt, again.node_faults, again.placements[0].node_name) == (2, 1, "b")
    assert core.workload("placed").placements[0].node_name == "a", "of it nobody knows whether it runs"
    # The node is back, with what it had ended.
    core.register_node(fenced("a"), now_ns=999 * S)
    place = again.placements[0]
    status = AttemptStatus(workload_id="j", replica=place.replica, attempt=1, state=AttemptState.ENDED, signal=15)
    assert core.record_attempts("a", (status,), now_ns=1000 * S).result == 1
    assert core.workload("j").attempt == 2
    check_invariants(core.state)


def test_a_node_that_comes_back_in_time_keeps_its_processes():
    core = build_core(fenced("a"), node("b"))
    core.cordon_node("b", now_ns=1)
    begin(core, job("j"))
    core.mark_node_lost("a", now_ns=1 * S)
    wait(core, 1, 99)
    core.register_node(fenced("a"), now_ns=100 * S)
    assert wait(core, 100, 999) == []
    core.mark_node_lost("a", now_ns=1000 * S)
    assert wait(core, 1000, 1100) == []
    assert core.workload("j").attempt == 1


def test_a_second_loss_counts_from_its_own_begin_also_where_a_clock_jumps():
    core = build_core(fenced("a"), node("b"))
    core.cordon_node("b", now_ns=1)
    begin(core, job("j"))
    core.mark_node_lost("a", now_ns=1 * S)
    wait(core, 1, 100)
    core.register_node(fenced("a"), now_ns=101 * S)
    core.mark_node_lost("a", now_ns=102 * S)
    assert wait(core, 10_000, 10_100) == []
    assert wait(core, 10_101, 10_000 + ENDS_S)


def test_a_lost_node_that_fences_nothing_keeps_its_processes():
    core = build_core(node("a"), node("b"))
    begin(core, job("j"))
    core.mark_node_lost(core.workload("j").placements[0].node_name, now_ns=1 * S)
    assert wait(core, 1, 999) == []
    assert core.workload("j").attempt == 1


def test_a_clock_that_jumps_ahead_and_a_restart_end_nothing_too_soon():
    core = build_core(fenced("a"), node("b"))
    core.cordon_node("b", now_ns=1)
    begin(core, job("j"))
    core.mark_node_lost("a", now_ns=1 * S)
    assert wait(core, 1, 20) == []
    assert wait(core, 100_000, 100_080) == []
    core = reload(core)
    assert wait(core, 100_081, 100_080 + ENDS_S) == []
    assert wait(core, 100_081 + ENDS_S, 100_082 + ENDS_S)


def test_a_gang_on_a_fenced_node_stops_elsewhere_before_it_begins_again():
    core = build_core(fenced("a"), fenced("b"))
    begin(core, job("g", gpus=2, replicas=2, kind=WorkloadKind.TRAINING_JOB))
    first, second = core.workload("g").placements
    core.mark_node_lost(first.node_name, now_ns=1 * S)
    wait(core, 1, 500)
    found = core.workload("g")
    assert (found.attempt, found.phase) == (1, WorkloadPhase.PLACED)
    (item,) = core.node_plan(second.node_name).assignments
    assert item.stop
    core.register_node(node("c"), now_ns=501 * S)
    end(core, "g", second, now_ns=502 * S)
    again = core.workload("g")
    assert (again.attempt, again.node_faults) == (2, 1)
    assert {place.node_name for place in again.placements} == {second.node_name, "c"}


def test_many_processes_of_a_fenced_node_end_a_bounded_number_at_a_time():
    core = build_core(fenced("a", gpus=8), fenced("b", gpus=8))
    core.cordon_node("b", now_ns=1)
    begin(core, *(job(f"j-{number}", gpus=0, cpu=0.01) for number in range(40)))
    core.mark_node_lost("a", now_ns=1 * S)
    wait(core, 1, ENDS_S)
    steps = []
    while core.is_drain_due((int(ENDS_S) + 1) * S):
        events = core.continue_drains(now_ns=(int(ENDS_S) + 1) * S).events
        steps.append(sum(isinstance(event, WorkloadEvicted) for event in events))
    assert [count for count in steps if count] == [32, 8]


def test_work_that_must_not_run_again_fails_with_a_fenced_node():
    core = build_core(fenced("a"))
    begin(core, job("j", **ONCE))
    core.mark_node_lost("a", now_ns=1 * S)
    wait(core, 1, 500)
    assert core.workload("j").phase is WorkloadPhase.FAILED


def test_a_cancelled_job_ends_with_its_fenced_node():
    core = build_core(fenced("a"))
    begin(core, job("j"))
    core.mark_node_lost("a", now_ns=1 * S)
    core.cancel("j", now_ns=2 * S)
    wait(core, 1, 500)
    assert core.workload("j").phase is WorkloadPhase.CANCELLED


def test_attempts_that_nodes_ended_are_counted_apart():
    core = build_core(node("a"))
    metrics = FleetMetrics(
        core=lambda: core,
        summary=Summary,
        telemetry=Telemetry(send_interval_s=5.0),
        monotonic_s=lambda: 0.0,
        now_ns=lambda: 0,
    )
    begin(core, job("j"), job("k"))
    events = end(core, "j", code=1, node_fault="GPU 0: it was lost")
    core.requeue("k", now_ns=60)
    events = (*events, *end(core, "k", now_ns=61))
    metrics.on_commit(CommitResult(events, frozenset(), core.state.revision))
    assert (metrics._changes["node_fault"], metrics._changes["evicted"]) == (1, 1)
