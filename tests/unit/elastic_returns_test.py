"""Returns of elastic jobs: what a job has grown by is free for whoever waits, and no more than that."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.unit.preemption_test import (
    PROCESS,
    RECLAIM,
    S,
    begin,
    evicted,
    phase,
    queue,
    restart,
    running,
    settle,
    submit,
)
from tests.unit.service_growth_test import PROMISE

from eelgrid_controller.state.events import WorkloadPlaced, WorkloadScaled
from eelgrid_protos.messages import (
    BudgetScope,
    EnforcementMode,
    MeasuredPoint,
    Mobility,
    PoolMode,
    PowerBudget,
    Queue,
    QueueQuota,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)

ELASTIC = TrainingPromise(profile="p", slowdown_most=0.1, replicas_least=1, replicas_most=8)


def measure(core, *sizes):
    points = tuple(MeasuredPoint(profile="p", gpu_model="G2", gpus=size, throughput_hz=10.0 * size) for size in sizes)
    core.record_measurements(points, now_ns=1)


def begin_grown(core, *, replicas=1, grown=4, name="elastic", **spec):
    """An elastic job of one GPU a replica that has grown."""
    request = build_request(name, gpus=1, replicas=replicas, kind=WorkloadKind.TRAINING_JOB, training=ELASTIC, **spec)
    core.submit(request, now_ns=3)
    core.scale(name, grown, now_ns=4)
    assert count(core, name) == grown
    return core


def count(core, name="elastic"):
    return len(core.workload(name).placements)


def shrinks(events):
    return {one.workload_id: one.released for one in events if isinstance(one, WorkloadScaled) and one.released}


def test_a_job_that_has_grown_shrinks_by_what_waiting_work_needs():
    core = build_core(build_node("a", gpus=4))
    measure(core, 1, 2, 3, 4)
    begin_grown(core)
    step = core.submit(build_request("job", gpus=1), now_ns=5)
    assert step.result.phase is WorkloadPhase.PLACED
    assert [len(gone) for gone in shrinks(step.events).values()] == [1]
    assert count(core) == 3
    # No queue is declared, and nobody is preempted.
    assert not evicted(step.events)
    core.submit(build_request("two", gpus=2), now_ns=6)
    assert running(core) == ["elastic", "job", "two"]
    assert count(core) == 1


def test_it_keeps_a_size_that_was_measured():
    core = build_core(build_node("a", gpus=4))
    measure(core, 1, 2, 4)
    begin_grown(core)
    core.submit(build_request("job", gpus=1), now_ns=5)
    assert count(core) == 2


@pytest.mark.parametrize(("replicas", "gpus", "is_placed"), [(2, 2, True), (2, 3, False), (4, 1, False)])
def test_it_keeps_what_it_was_submitted_with(replicas, gpus, is_placed):
    core = begin_grown(build_core(build_node("a", gpus=4)), replicas=replicas)
    core.submit(build_request("job", gpus=gpus), now_ns=5)
    assert (phase(core, "job") is WorkloadPhase.PLACED) == is_placed
    assert count(core) == (replicas if is_placed else 4)


def test_nothing_shrinks_where_that_does_not_help():
    core = build_core(build_node("a", gpus=8))
    core.submit(build_request("fixed", gpus=4), now_ns=2)
    begin_grown(core, grown=4)
    step = core.submit(build_request("job", gpus=5), now_ns=5)
    assert not shrinks(step.events)
    assert count(core) == 4


def test_only_jobs_on_the_nodes_of_the_place_shrink():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=4))
    measure(core, *range(1, 9))
    begin_grown(core, grown=4, name="one")
    begin_grown(core, grown=4, name="two")
    step = core.submit(build_request("job", gpus=2), now_ns=5)
    assert len(shrinks(step.events)) == 1
    (event,) = (one for one in step.events if isinstance(one, WorkloadPlaced))
    (place,) = event.placements
    (key,) = shrinks(step.events)
    assert {item.node_name for item in core.workload(key).placements} <= {place.node_name, "a", "b"}
    assert len(core.workload(key).placements) == 2


def test_a_service_that_lacks_replicas_takes_them_without_any_queue():
    core = build_core(build_node("a", gpus=4))
    measure(core, 1, 2, 3)
    core.submit(build_request("svc", kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE), now_ns=2)
    begin_grown(core, grown=3)
    step = core.scale("svc", 3, now_ns=10)
    assert count(core, "svc") == 3
    assert count(core) == 1
    assert step.result.spec.replicas == 3
    # What is missing beyond that is not there.
    core.scale("svc", 6, now_ns=11)
    assert (count(core, "svc"), count(core)) == (3, 1)


def test_jobs_shrink_before_anybody_is_preempted_and_the_rest_is_reclaimed():
    core = begin(queue("serve", 4, RECLAIM), queue("train", 0))
    measure(core, 1, 2)
    submit(core, "svc", "serve", kind=WorkloadKind.INFERENCE_SERVICE, service=PROMISE)
    submit(core, "job", "train")
    begin_grown(core, grown=2, queue="train")
    step = core.scale("svc", 2, now_ns=20 * S)
    assert not evicted(step.events)
    assert (count(core, "svc"), count(core)) == (2, 1)
    core.scale("svc", 4, now_ns=30 * S)
    settle(core, now_ns=30 * S)
    assert running(core) == ["svc"]
    assert count(core, "svc") == 4


def test_quota_that_a_job_borrowed_to_grow_returns_with_its_replicas():
    nodes = [build_node("a", gpus=4), build_node("b", gpus=4)]
    core = begin(queue("x", 2), queue("y", 2), nodes=nodes)
    begin_grown(core, grown=4, queue="x")
    # There are free GPUs, but no quota: it is borrowed.
    step = submit(core, "job", "y", gpus=1, now_ns=5)
    assert phase(core, "job") is WorkloadPhase.PLACED
    assert shrinks(step.events)
    # What is still borrowed is not returned for those that would borrow it in turn.
    assert count(core) == 1


def test_work_that_waits_gets_it_in_a_later_round():
    core = begin_grown(build_core(build_node("a", gpus=4)), grown=3)
    core.submit(build_request("big", gpus=4), now_ns=5)
    core.submit(build_request("job", gpus=2, priority=-1), now_ns=6)
    assert phase(core, "job") is WorkloadPhase.PLACED
    assert count(core) == 1
    assert phase(core, "big") is WorkloadPhase.PENDING


def test_a_restart_knows_what_has_grown():
    core = restart(begin_grown(build_core(build_node("a", gpus=4))))
    core.submit(build_request("job", gpus=3), now_ns=5)
    assert running(core) == ["elastic", "job"]


def test_a_job_with_replicas_on_a_lost_node_returns_nothing():
    core = begin_grown(build_core(build_node("a", gpus=4), build_node("b", gpus=4)), grown=8)
    core.mark_node_lost("b", now_ns=5)
    core.submit(build_request("job", gpus=1), now_ns=6)
    assert phase(core, "job") is WorkloadPhase.PENDING
    assert count(core) == 8


def test_a_cordoned_node_is_no_place_whatever_is_returned():
    core = begin_grown(build_core(build_node("a", gpus=4)))
    core.cordon_node("a", (), reason="", user="", drain=None, now_ns=5)
    core.submit(build_request("job", gpus=1), now_ns=6)
    assert phase(core, "job") is WorkloadPhase.PENDING
    assert count(core) == 4


def test_a_job_that_shrank_for_others_has_its_work_counted_to_then():
    core = begin_grown(build_core(build_node("a", gpus=4)))
    before = core.workload("elastic")
    core.submit(build_request("job", gpus=1), now_ns=5)
    after = core.workload("elastic")
    assert after.replicas_begun == before.replicas_begun == 1
    assert replace(after, placements=(), revision=0, spec=before.spec) == replace(before, placements=(), revision=0)


def test_a_job_gives_back_the_quota_of_a_model_that_work_elsewhere_takes():
    core = build_core(build_node("a", gpus=4, cpu=4), build_node("b", gpus=1), build_node("c", gpus=1, model="T4"))
    measure(core, 1, 2, 3, 4)
    of_models = QueueQuota(resource="gpu/G2", nominal=4000), QueueQuota(resource="gpu/T4", nominal=8000)
    core.update_policy(replace(core.state.policy, queues=(Queue(name="default", quotas=of_models),)), now_ns=2)
    begin_grown(core, models=("G2",), cpu=1)
    core.submit(build_request("on-c", models=("T4",)), now_ns=5)
    assert core.submit(build_request("job", cpu=8), now_ns=5).result.placements[0].node_name == "b"
    assert count(core) == 3
    assert {one.resource: one.used for one in core.queues.tree.usage("default")}["gpu/G2"] == 4000


def build_limitable(name, gpus, **changes):
    node = build_node(name, gpus=gpus, model="V100M16", runs_processes=True, **changes)
    board = {"power_limit_min_w": 150.0, "power_limit_default_w": 300.0, "power_limit_max_w": 300.0}
    gpus = tuple(replace(gpu, **board) for gpu in node.gpus)
    return replace(node, gpus=gpus, sets_limits=True, limits_before_starts=True)


def test_a_job_gives_back_the_watts_that_work_elsewhere_takes():
    core = build_core(build_limitable("a", 4, cpu=4), build_limitable("b", 1))
    measure(core, 1, 2, 3, 4)
    begin_grown(core, cpu=1)
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1300.0)
    core.update_policy(replace(core.state.policy, budgets=(budget,)), now_ns=5)
    assert core.submit(build_request("job", cpu=8), now_ns=6).result.placements[0].node_name == "b"
    assert count(core) < 4
    assert core._chooser.allowance.left_w("cluster") >= 0.0


def test_work_starts_at_its_power_limit_where_a_job_gives_back_its_gpu():
    core = build_core(build_node("a", gpus=1), build_limitable("b", 2, topology=("r1",)))
    measure(core, 1, 2)
    begin_grown(core, grown=2)
    assert {place.node_name for place in core.workload("elastic").placements} == {"a", "b"}
    budget = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=580.0)
    modes = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),)
    core.update_policy(replace(core.state.policy, budgets=(budget,), pools=modes), now_ns=5)
    request = build_request("job", gpus=2, process=PROCESS, mobility=Mobility.FIXED, models=("V100M16",))
    job = core.submit(request, now_ns=6).result
    assert job.placements[0].node_name == "b"
    assert job.limit_before_start
    assert job.power_limit_w < 300.0
