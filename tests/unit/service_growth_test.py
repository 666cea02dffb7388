"""Growth of services by preemption: what a queue of services has lent to jobs returns when a service needs it."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node
from tests.unit.preemption_test import (
    PROCESS,
    RECLAIM,
    WITHIN,
    S,
    begin,
    evicted,
    phase,
    queue,
    report_stopped,
    restart,
    running,
    settle,
    status,
    submit,
)

from eelgrid_controller.state.events import PreemptionStarted, WorkloadScaled, event_from_plain, event_to_plain
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    Queue,
    QueueQuota,
    ServicePromise,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)

PROMISE = ServicePromise(
    profile="p",
    objectives=(LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0),),
    rate_hz=1.0,
    replicas_most=6,
)


def begin_lending(*, gpus=4, rules=RECLAIM, process=None, jobs=3, job_gpus=1, nodes=None):
    """A service of one replica in a queue that has everything, and jobs of a queue that borrows."""
    core = begin(queue("serve", gpus, rules), queue("train", 0), nodes=nodes)
    submit(core, "svc", "serve", kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE)
    for n in range(jobs):
        submit(core, f"job{n}", "train", gpus=job_gpus, now_ns=4 + n, process=process)
        if process is not None:
            core.record_attempts("a", (status(core, f"job{n}"),), now_ns=8)
    return core


def count_replicas(core):
    return len(core.workload("svc").placements)


def test_a_service_gets_back_what_its_queue_has_lent_in_the_step_that_scales_it():
    core = begin_lending()
    step = core.scale("svc", 3, now_ns=20 * S)
    assert len(evicted(step.events)) == 2
    assert count_replicas(core) == 3
    assert step.result.spec.replicas == 3
    assert len({place.replica for place in core.workload("svc").placements}) == 3
    settle(core)
    # What was preempted waits, and runs again once the service has shrunk.
    core.scale("svc", 1, now_ns=30 * S)
    settle(core, now_ns=31 * S)
    assert running(core) == ["job0", "job1", "job2", "svc"]


def test_free_capacity_is_used_before_anybody_makes_room():
    core = begin_lending(jobs=2)
    step = core.scale("svc", 3, now_ns=20 * S)
    assert len(evicted(step.events)) == 1
    assert count_replicas(core) == 3


def test_without_a_rule_or_beyond_its_quota_a_service_takes_what_is_free():
    core = begin_lending(rules=None)
    assert not core.scale("svc", 3, now_ns=20 * S).events
    assert count_replicas(core) == 1
    core = begin_lending(gpus=2)
    # Its queue has two GPUs: of three replicas more, one is within the quota.
    step = core.scale("svc", 4, now_ns=20 * S)
    assert len(evicted(step.events)) == 1
    assert count_replicas(core) == 2


def test_jobs_never_grow_at_the_expense_of_others():
    core = begin(queue("x", 4, RECLAIM), queue("y", 0))
    elastic = TrainingPromise(profile="p", slowdown_most=0.1, replicas_least=1, replicas_most=4)
    submit(core, "x1", "x", kind=WorkloadKind.TRAINING_JOB, training=elastic)
    for n in range(2):
        submit(core, f"y{n}", "y")
    step = core.scale("x1", 4, now_ns=20 * S)
    assert len(step.result.placements) == 2
    assert running(core) == ["x1", "y0", "y1"]


def test_a_service_preempts_lower_priority_in_its_own_queue_if_that_is_allowed():
    core = begin(queue("serve", 4, WITHIN))
    submit(core, "svc", "serve", kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE, priority=5)
    submit(core, "batch", "serve", gpus=2, priority=1)
    submit(core, "other", "serve", gpus=1, priority=5)
    core.scale("svc", 4, now_ns=20 * S)
    assert running(core) == ["other", "svc"]
    assert count_replicas(core) == 3


def test_processes_stop_first_and_the_service_goes_on_meanwhile():
    core = begin_lending(process=PROCESS)
    step = core.scale("svc", 3, now_ns=20 * S)
    (started,) = (event for event in step.events if isinstance(event, PreemptionStarted))
    assert event_from_plain(*event_to_plain(started)) == started
    assert len(started.victims) == 2
    assert count_replicas(core) == 1
    assert core.workload("svc").phase is WorkloadPhase.PLACED
    assert "It preempts 2 workloads" in core.explain_workload("svc").remedy
    # Asked again, nobody else has to make room, and nobody gets what is free meanwhile.
    assert not core.scale("svc", 3, now_ns=21 * S).events
    one, two = started.victims
    report_stopped(core, one, now_ns=30 * S)
    submit(core, "late", "train", now_ns=31 * S)
    settle(core, now_ns=32 * S)
    assert phase(core, "late") is WorkloadPhase.PENDING
    step = report_stopped(core, two, now_ns=40 * S)
    settle(core, now_ns=41 * S)
    assert count_replicas(core) == 3
    assert {core.workload(key).phase for key in started.victims} == {WorkloadPhase.PENDING}
    assert core.workload("svc").placements[1:] == started.placements
    assert not len(core.state.nominations)


def test_a_restart_in_between_changes_nothing():
    core = begin_lending(process=PROCESS)
    core.scale("svc", 4, now_ns=20 * S)
    core = restart(core)
    assert not core.scale("svc", 4, now_ns=21 * S).events
    for n in range(3):
        report_stopped(core, f"job{n}", now_ns=30 * S)
    settle(core, now_ns=31 * S)
    assert count_replicas(core) == 4


def test_more_replicas_may_be_wanted_while_others_make_room():
    core = begin_lending(process=PROCESS, gpus=6)
    core.scale("svc", 2, now_ns=20 * S)
    (first,) = core.state.nominations
    core.register_node(build_node("b", gpus=1), now_ns=21 * S)
    settle(core, now_ns=21 * S)
    # One of the two that lack is free on a new node, and the nomination goes on beside it.
    core.scale("svc", 3, now_ns=22 * S)
    assert count_replicas(core) == 2
    assert list(core.state.nominations) == [first]
    report_stopped(core, first.victims[0], now_ns=30 * S)
    settle(core, now_ns=31 * S)
    assert count_replicas(core) == 3
    assert len({place.replica for place in core.workload("svc").placements}) == 3


@pytest.mark.parametrize("way", ["scaled", "smaller", "cancelled", "lost"])
def test_nobody_makes_room_any_more_once_fewer_replicas_are_wanted(way):
    core = begin_lending(process=PROCESS)
    core.scale("svc", 3, now_ns=20 * S)
    (started,) = core.state.nominations
    if way == "scaled":
        (event,) = core.scale("svc", 1, now_ns=21 * S).events
        assert event == WorkloadScaled(time_ns=21 * S, workload_id="svc")
    elif way == "smaller":
        # Between the two, what comes is not called off.
        assert not core.scale("svc", 2, now_ns=21 * S).events
        assert len(core.state.nominations) == 1
        core.scale("svc", 1, now_ns=22 * S)
    elif way == "cancelled":
        core.cancel("svc", now_ns=21 * S)
    else:
        core.mark_node_lost("a", now_ns=21 * S)
    assert not len(core.state.nominations)
    for key in started.victims:
        report_stopped(core, key, now_ns=30 * S)
    settle(core, now_ns=31 * S)
    assert [core.workload(key).preemptions for key in started.victims] == [1, 1]
    if way != "lost":
        assert running(core) == ["job0", "job1", "job2"] + ["svc"] * (way != "cancelled")


def test_as_many_replicas_as_can_have_room_get_it():
    """Jobs within their own quota are no victims; half of what is missing is tried, then half of that."""
    core = begin(queue("serve", 2, RECLAIM), queue("train", 2))
    submit(core, "svc", "serve", kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE)
    for n in range(3):
        submit(core, f"job{n}", "train", now_ns=4 + n)
    core.scale("svc", 6, now_ns=20 * S)
    assert count_replicas(core) == 2
    assert len(running(core)) == 3


def test_room_is_made_only_after_the_delay_of_the_queue():
    core = begin_lending(rules=replace(RECLAIM, delay_s=60.0))
    assert not core.scale("svc", 2, now_ns=20 * S).events
    assert not core.scale("svc", 2, now_ns=79 * S).events
    core.scale("svc", 2, now_ns=80 * S)
    assert count_replicas(core) == 2
    # Of the next lack, anew.
    assert not core.scale("svc", 3, now_ns=90 * S).events


def test_a_search_goes_on_in_later_steps():
    nodes = [build_node(f"n{n}", gpus=4) for n in range(10)]
    core = begin_lending(gpus=40, jobs=39, nodes=nodes)
    core._preemptions.work_most = 1
    core.scale("svc", 6, now_ns=50 * S)
    assert count_replicas(core) == 1
    steps = 0
    while core.has_backlog and steps < 1000:
        core.retry(now_ns=50 * S)
        steps += 1
    assert steps > 1
    assert count_replicas(core) == 6
    settle(core, now_ns=51 * S)
    assert len(running(core)) == 35


def test_an_event_that_the_state_cannot_follow_is_refused():
    core = begin_lending(process=PROCESS)
    core.scale("svc", 2, now_ns=20 * S)
    (started,) = core.state.nominations
    taken = replace(core.workload("svc").placements[0], replica=0)
    for event in (
        started,
        replace(started, workload_id="nobody"),
        replace(started, workload_id="svc", placements=(taken,), victims=("job0",)),
    ):
        with pytest.raises(ContradictoryEvent):
            core.state.apply(event)


def test_bounds_of_the_promise_hold():
    core = begin_lending()
    with pytest.raises(InvalidArgument):
        core.scale("svc", 7, now_ns=20 * S)


# GPUs of which a queue has a quota go before those that it would borrow


def begin_models(*, own_gpus=2):
    nodes = [build_node("a", gpus=4, model="G2"), build_node("b", gpus=own_gpus, model="G3")]
    lends = QueueQuota(resource="gpu/G2", nominal=4000)
    keeps = QueueQuota(resource="gpu/G3", nominal=1000 * own_gpus)
    core = build_core(*nodes)
    queues = (
        Queue(name="root"),
        Queue(name="serve", parent="root", quotas=(lends,), preemption=RECLAIM),
        Queue(name="train", parent="root", quotas=(keeps,)),
    )
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    return core


def models_of(core, key):
    workload = core.workload(key)
    return {
        core.state.nodes[place.node_name].gpu(uuid).model for place in workload.placements for uuid in place.gpu_uuids
    }


@pytest.mark.parametrize("models", [("G2", "G3"), ("G3", "G2"), ()])
def test_a_job_borrows_only_once_its_own_quota_is_used(models):
    core = begin_models()
    for n in range(4):
        submit(core, f"job{n}", "train", models=models, now_ns=3 + n)
    assert [models_of(core, f"job{n}") for n in range(4)] == [{"G3"}, {"G3"}, {"G2"}, {"G2"}]


def test_a_job_for_which_its_own_gpus_have_no_room_borrows():
    core = begin_models(own_gpus=3)
    submit(core, "job0", "train", gpus=1, models=("G2", "G3"))
    # It has quota for two more GPUs of its own, and the next needs three of one node.
    submit(core, "job1", "train", gpus=2, models=("G2", "G3"), now_ns=4)
    submit(core, "svc", "serve", models=("G2",), kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE, now_ns=5)
    submit(core, "job2", "train", gpus=2, models=("G2", "G3"), now_ns=6)
    assert [models_of(core, key) for key in ("job0", "job1", "job2")] == [{"G3"}, {"G3"}, {"G2"}]
    core.scale("svc", 4, now_ns=20 * S)
    assert phase(core, "job2") is WorkloadPhase.PENDING
    assert models_of(core, "svc") == {"G2"}
    assert count_replicas(core) == 4


def test_a_waiting_job_gets_its_own_gpus_first_in_a_round():
    core = begin_models()
    submit(core, "job0", "train", gpus=2, models=("G3",))
    submit(core, "big", "train", gpus=4, models=("G2",), now_ns=4)
    submit(core, "next", "train", gpus=2, models=("G2", "G3"), now_ns=5)
    assert phase(core, "next") is WorkloadPhase.PENDING
    core.cancel("job0", now_ns=6)
    core.cancel("big", now_ns=6)
    settle(core, now_ns=7)
    assert models_of(core, "next") == {"G3"}
