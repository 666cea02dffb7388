"""Queues: shares and past use against brute force, the order of waiting work, and admission in the core."""

import json
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import GIB, build_catalogue_gpu, build_core, build_node, build_request, build_spending_limit

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.server.metrics.catalogue import PENDING_REASONS
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import WorkloadPlaced, WorkloadQueueChanged
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.queue_usage import ADMISSION_CHARGE_S, DecayedUsage, count_placed
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_protos import catalogue
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument, PermissionDenied
from eelgrid_protos.messages import (
    Placement,
    Policy,
    Queue,
    QueueQuota,
    ResourceRequest,
    Slice,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

S = 10**9
DAY_NS = 86_400 * S


def quota(resource="gpu", nominal=0, borrow=None, lend=None, most=None):
    return QueueQuota(resource=resource, nominal=nominal, borrowing_limit=borrow, lending_limit=lend, usage_limit=most)


def build_queued_core(*queues, nodes=(), **policy):
    core = build_core(*(nodes or (build_node("a", gpus=8), build_node("b", gpus=8, model="T4"))))
    core.update_policy(replace(core.state.policy, queues=queues, **policy), now_ns=2)
    return core


def submit(core, key, queue="", now_ns=3, **request):
    return core.submit(build_request(key, queue=queue, **request), now_ns=now_ns).result


def reason(core, key):
    return core.workload(key).reason


def placed(step):
    return [event.workload_id for event in step.events if isinstance(event, WorkloadPlaced)]


def gpu_usage(core, queue):
    return next(one for one in core.queues.tree.usage(queue) if one.resource == "gpu")


# Past use


@given(
    runs=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(1, 8)), max_size=6),
    reads=st.lists(st.integers(0, 1000), max_size=8),
    half_life_s=st.sampled_from([10.0, 100.0, 1000.0]),
)
@settings(deadline=None, max_examples=60)
def test_past_use_is_the_decayed_integral_however_often_it_is_read(runs, reads, half_life_s):
    changes = sorted([(a, rate) for a, _, rate in runs] + [(a + length, -rate) for a, length, rate in runs])
    events = sorted([*changes, *((at, 0) for at in reads)], key=lambda one: one[0])
    end_s = 1000

    def total(events):
        use = DecayedUsage(0)
        for at_s, rise in events:
            use = use.change(at_s * S, half_life_s, (rise, 0, 0), charges=True)
        return use.at(end_s * S, half_life_s)[0]

    closed = total(events)
    assert closed == pytest.approx(total(changes), rel=1e-9, abs=1e-6)
    # Simpson's rule over each run, and over the minute before it that the admission is charged with.
    summed = 0.0
    for start, length, rate in runs:
        for a, b in ((start - ADMISSION_CHARGE_S, start), (start, start + length)):
            steps = 200
            width = (b - a) / steps
            weights = [1, *(4 if one % 2 else 2 for one in range(1, steps)), 1]
            summed += sum(
                rate * weight * 2 ** (-(end_s - (a + place * width)) / half_life_s) * width / 3
                for place, weight in enumerate(weights)
            )
    merged = len({a for a, _, _ in runs} | {a + length for a, length, _ in runs}) == 2 * len(runs)
    if merged:
        assert closed == pytest.approx(summed, rel=1e-6, abs=1e-6)


def test_use_of_one_gpu_for_ever_tends_to_the_half_life_over_ln_2():
    use = DecayedUsage(0).change(0, 100.0, (1000, 0, 0), charges=False)
    assert use.at(100 * S, 100.0)[0] == pytest.approx(1000 * 100 / log(2) / 2)
    assert use.at(10**5 * S, 100.0)[0] == pytest.approx(1000 * 100 / log(2))


def test_an_admission_is_charged_once_and_a_restart_charges_nothing():
    core = build_queued_core(Queue(name="a"), queue_half_life_s=100.0)
    submit(core, "w", "a", user="ann", now_ns=10 * S)
    history = core.state.queue_usage.history["a", "ann"]
    charge = 1000 * 100 / log(2) * (1 - 2 ** (-0.6))
    assert history.total[0] == pytest.approx(charge)
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    assert again.state.queue_usage.history == core.state.queue_usage.history
    core.update_policy(replace(core.state.policy, queue_half_life_s=50.0), now_ns=10 * S)
    assert core.state.queue_usage.history["a", "ann"].total[0] == pytest.approx(charge)
    core.cancel("w", now_ns=60 * S)
    assert core.state.queue_usage.history["a", "ann"].rate == (0, 0, 0)
    assert core.state.queue_usage.charges == {}


# Shares


def test_the_dominant_share_is_that_of_the_resource_of_which_most_is_borrowed():
    """Ghodsi et al.: 9 CPUs and 18 GB; two CPUs and four GB more than the quota of the one."""
    tree = QuotaTree(
        [
            Queue(name="all", quotas=(quota("cpu", 9000), quota("memory", 18 * GIB))),
            Queue(name="ann", parent="all"),
            Queue(name="bob", parent="all"),
        ]
    )
    tree.add("ann", {"cpu": 3000, "memory": 12 * GIB})
    tree.add("bob", {"cpu": 6000, "memory": 2 * GIB})
    assert tree.borrowed_ratio(tree.numbers["ann"]) == pytest.approx(2 / 3)
    assert tree.borrowed_ratio(tree.numbers["bob"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_two_backlogged_queues_share_the_cluster_by_their_weights(weights):
    queues = [Queue(name="all", quotas=(quota(nominal=16_000),))]
    queues += [Queue(name=name, parent="all", weight=weight) for name, weight in zip("xy", weights, strict=True)]
    core = build_queued_core(*queues)
    submit(core, "first", "x", gpus=8, replicas=2, kind=WorkloadKind.BATCH_JOB)
    for number in range(40):
        submit(core, f"w{number}", "xy"[number % 2])
    core.cancel("first", now_ns=9)
    running = [one.spec.queue for one in core.state.workloads.values() if one.phase is WorkloadPhase.PLACED]
    assert len(running) == 16
    assert running.count("y") / 16 == pytest.approx(weights[1] / sum(weights), abs=1 / 16)


def test_without_quotas_two_queues_take_turns_on_the_whole_cluster():
    """KAI's two-queue oscillation: jobs of the whole cluster, halves of the time."""
    core = build_queued_core(
        Queue(name="x"), Queue(name="y"), nodes=(build_node("a", gpus=8),), queue_half_life_s=128.0
    )
    for number in range(60):
        submit(core, f"w{number:02}", "x" if number < 30 else "y", gpus=8)
    spent = {"x": 0, "y": 0}
    for cycle in range(40):
        running = [one for one in core.state.workloads.values() if one.phase is WorkloadPhase.PLACED]
        assert len(running) == 1
        spent[running[0].spec.queue] += 1
        core.cancel(running[0].workload_id, now_ns=(cycle + 1) * 60 * S)
    assert abs(spent["x"] - spent["y"]) <= 2


def test_a_user_who_used_less_goes_first_within_a_queue():
    core = build_queued_core(Queue(name="q"), nodes=(build_node("a", gpus=1),))
    submit(core, "a1", "q", user="ann", now_ns=S)
    submit(core, "a2", "q", user="ann", now_ns=S)
    submit(core, "b1", "q", user="bob", now_ns=2 * S)
    assert placed(core.cancel("a1", now_ns=100 * S)) == ["b1"]


def test_within_a_queue_equal_work_starts_by_priority_then_first_submission():
    core = build_queued_core(Queue(name="q"), nodes=(build_node("a", gpus=1),))
    for key, priority in (("run", 0), ("low", 0), ("low2", 0), ("high", 5)):
        submit(core, key, "q", priority=priority)
    order = []
    for key in ("run", "high", "low"):
        order += placed(core.cancel(key, now_ns=50))
    assert order == ["high", "low", "low2"]


def test_work_that_waited_for_the_age_limit_goes_before_fair_share():
    """A stream of a queue with a smaller share does not starve the other for longer than that."""
    queues = (
        Queue(name="all", quotas=(quota(nominal=1000),)),
        Queue(name="busy", parent="all"),
        Queue(name="idle", parent="all", weight=1000.0),
    )
    core = build_queued_core(*queues, nodes=(build_node("a", gpus=1),), queue_age_limit_s=3600.0)
    submit(core, "run", "busy", now_ns=S)
    submit(core, "old", "busy", now_ns=2 * S)
    submit(core, "new", "idle", now_ns=3 * S)
    submit(core, "newer", "idle", now_ns=3 * S)
    assert placed(core.cancel("run", now_ns=60 * S)) == ["new"]
    assert placed(core.cancel("new", now_ns=3700 * S)) == ["old"]


def test_every_waiting_workload_is_examined_though_a_step_is_bounded():
    core = build_queued_core(Queue(name="x"), Queue(name="y"), nodes=(build_node("a", gpus=1, cpu=400),))
    submit(core, "run", "x")
    # Each has a shape of its own, so that none is skipped as equal to one that failed.
    for number in range(600):
        submit(core, f"big{number}", "xy"[number % 2], gpus=1, cpu=1 + number / 10, priority=1)
    submit(core, "small", "y", gpus=0)
    core.cancel("run", now_ns=99)
    steps = 0
    while core.has_backlog:
        core.retry(now_ns=100)
        steps += 1
    assert 1 <= steps <= 4
    assert sum(one.phase is WorkloadPhase.PLACED for one in core.state.workloads.values()) == 2


def test_equal_work_that_is_skipped_has_the_true_reason_too():
    core = build_queued_core(Queue(name="q", quotas=(quota(nominal=1000),)), nodes=(build_node("a", gpus=1),))
    keys = [f"w{number}" for number in range(20)]
    for key in keys:
        submit(core, key, "q")
    assert {reason(core, key) for key in keys[1:]} == {"quota: queue q has too little gpu quota left"}
    assert placed(core.cancel("w0", now_ns=9)) == ["w1"]
    more = (Queue(name="q", quotas=(quota(nominal=9000),)),)
    core.update_policy(replace(core.state.policy, queues=more), now_ns=10)
    assert {reason(core, key) for key in keys[2:]} == {"gpu_count: no node has enough whole GPUs free"}
    # One that arrives later has the reason of its own decision, and the next round is right for all.
    submit(core, "late", "q")
    core.cordon_node("a", now_ns=11)
    core.retry_waiting(now_ns=12)
    assert len({reason(core, key) for key in (*keys[2:], "late")}) == 1
    assert reason(core, "late").startswith("unavailable: ")


def test_a_tree_whose_quota_refused_all_its_work_is_left_out_of_rounds_until_its_use_changes():
    one = (quota(nominal=1000),)
    core = build_queued_core(Queue(name="x", quotas=one), Queue(name="y", quotas=one))
    for key in ("x0", "y0", "x1", "y1", "y2"):
        submit(core, key, key[0])
    core.retry_waiting(now_ns=4)

    def list_tried():
        return [key for _, _, key in core.queues.begin_round(5, skips_refused=True)]

    assert list_tried() == []
    assert core.queues.list_order(5, 9) == ["x1", "y1", "y2"]
    # What ends in one tree is tried again there, and nothing of the other.
    assert placed(core.cancel("x0", now_ns=6)) == ["x1"]
    submit(core, "x2", "x", now_ns=7)
    assert list_tried() == ["x2"]
    core.retry_waiting(now_ns=8)
    assert list_tried() == []
    core.update_policy(replace(core.state.policy, queues=(Queue(name="x", quotas=one), Queue(name="y"))), now_ns=9)
    assert {reason(core, key) for key in ("y1", "y2")} == {""}
    assert reason(core, "x2").startswith("quota: ")


def test_work_that_the_quota_of_a_model_refuses_is_tried_again_when_a_node_of_another_model_joins():
    core = build_queued_core(Queue(name="q", quotas=(quota("gpu/G2", nominal=1000),)), nodes=(build_node("a", gpus=2),))
    for key in ("first", "second"):
        submit(core, key, "q")
    core.retry_waiting(now_ns=4)
    assert reason(core, "second").startswith("quota: ")
    assert placed(core.register_node(build_node("b", gpus=1, model="T4"), now_ns=5)) == ["second"]


def test_quotas_judge_equal_work_once_a_round_also_while_starts_may_be_reserved(monkeypatch):
    core = build_queued_core(Queue(name="q", quotas=(quota(nominal=1000),)))
    for number in range(50):
        submit(core, f"w{number:02}", "q")
    judged = []
    admit = core.queues.admit
    monkeypatch.setattr(core.queues, "admit", lambda spec, models: judged.append(spec.name) or admit(spec, models))
    assert placed(core.cancel("w00", now_ns=9)) == ["w01"]
    assert len(judged) <= 3


def test_equal_work_under_a_spending_limit_of_a_namespace_is_judged_for_itself():
    core = build_queued_core(Queue(name="q"), nodes=(build_node("a", gpus=1),))
    core.update_policy(replace(core.state.policy, spending=(build_spending_limit(1.0),)), now_ns=3)
    submit(core, "run", "q")
    for key, namespace in (("x", "research"), ("y", "other"), ("z", "research")):
        submit(core, key, "q", namespace=namespace)
    spent = OverspentLimit(limit=core.state.policy.spending[0], spent=9e9, begin_s=0, end_s=86_400, since_ns=5)
    core.set_exhausted_spending((spent,), now_ns=5)
    assert [reason(core, key).partition(":")[0] for key in "xyz"] == ["spending", "gpu_count", "spending"]
    assert placed(core.cancel("run", now_ns=6)) == ["y"]


# Admission in the core


TEAMS = (
    Queue(name="research", quotas=(quota(nominal=8000),)),
    Queue(name="vision", parent="research", quotas=(quota(nominal=4000, borrow=2000),)),
    Queue(name="speech", parent="research", quotas=(quota(nominal=0, lend=1000, most=3000),)),
)


def test_work_beyond_its_quota_waits_though_gpus_are_free_and_says_what_would_help():
    core = build_queued_core(*TEAMS)
    submit(core, "v1", "vision", gpus=5)
    waiting = submit(core, "v2", "vision", gpus=2)
    assert waiting.phase is WorkloadPhase.PENDING
    assert waiting.reason == "quota: queue vision may not borrow so much gpu"
    explained = core.explain_workload("v2")
    assert explained.constraint == "quota"
    assert explained.remedy == (
        "Queue vision uses 5 GPUs of 6 GPUs of its quota and what it may borrow, and this needs 2 GPUs more. To help: wait "
        "for or cancel work in it that holds 1 GPU, or raise borrow of gpu in queue vision to 3 GPUs (eelctl queue apply)."
    )
    assert placed(core.cancel("v1", now_ns=9)) == ["v2"]


def test_the_three_bounds_have_a_reason_each():
    core = build_queued_core(*TEAMS)
    submit(core, "v", "vision", gpus=6)
    submit(core, "s", "speech", gpus=3)
    assert core.workload("s").phase is WorkloadPhase.PLACED
    assert submit(core, "s2", "speech", gpus=1).reason == "quota: queue speech may not use so much more gpu"
    less = (replace(TEAMS[0], quotas=(quota(nominal=3000),)), *TEAMS[1:])
    core = build_queued_core(*less)
    submit(core, "v", "vision", gpus=6)
    submit(core, "s", "speech", gpus=1)
    assert submit(core, "s2", "speech", gpus=1).reason == "quota: queue research has too little gpu quota left"


def test_what_a_queue_can_never_hold_is_refused_at_submission():
    core = build_queued_core(*TEAMS)
    with pytest.raises(InvalidArgument) as caught:
        submit(core, "v", "vision", gpus=7)
    (violation,) = caught.value.violations
    assert str(violation) == (
        "spec.request.gpu_count: needs 7 GPUs; queue vision can have 6 GPUs of its quota and what it may borrow at the most; "
        "ask for less, choose another queue, or have borrow of gpu raised there"
    )


def test_waiting_work_that_a_lower_quota_can_never_hold_says_so():
    core = build_queued_core(*TEAMS)
    submit(core, "v", "vision", gpus=5)
    submit(core, "w", "vision", gpus=4)
    lower = (TEAMS[0], replace(TEAMS[1], quotas=(quota(nominal=1000, borrow=2000),)), TEAMS[2])
    core.update_policy(replace(core.state.policy, queues=lower), now_ns=7)
    assert core.workload("v").phase is WorkloadPhase.PLACED  # what runs stays
    assert reason(core, "w") == "max_quota: queue vision can never have so much gpu"
    assert core.explain_workload("w").remedy == (
        "Queue vision can have 3 GPUs of its quota and what it may borrow at the most, and this needs 4 GPUs. To help: ask for "
        "1 GPU less, or raise borrow of gpu in queue vision to 3 GPUs (eelctl queue apply)."
    )
    core.cancel("v", now_ns=8)
    assert core.workload("w").phase is WorkloadPhase.PENDING


@pytest.mark.parametrize(
    ("queue", "problem"),
    [
        ("vison", "spec.queue: is 'vison', and there is no such queue; did you mean vision?"),
        ("", "spec.queue: is empty, and there is no queue default; name one of vision, speech"),
        (
            "research",
            "spec.queue: is research, which has queues below it and holds no work itself; name one below it: vision, speech",
        ),
    ],
)
def test_an_unknown_queue_is_refused_with_near_names(queue, problem):
    core = build_queued_core(*TEAMS)
    with pytest.raises(InvalidArgument) as caught:
        submit(core, "w", queue)
    assert [str(one) for one in caught.value.violations] == [problem]


def test_work_without_a_queue_goes_to_the_queue_default():
    core = build_queued_core(*TEAMS, Queue(name="default"))
    assert submit(core, "w").spec.queue == "default"
    # The same call again is the same workload, though its queue was filled in.
    assert submit(core, "w").workload_id == "w"
    with pytest.raises(AlreadyExists):
        submit(core, "w", gpus=2)


def test_the_order_that_is_shown_is_that_in_which_work_starts():
    core = build_queued_core(Queue(name="a"), Queue(name="b"), nodes=(build_node("n", gpus=4),))
    for number in range(4):
        submit(core, f"run-{number}", "a", now_ns=3 * S)
    for number, (queue, priority) in enumerate([("a", 0), ("a", 0), ("b", 0), ("a", 5), ("b", 0)]):
        submit(core, f"w-{number}", queue, now_ns=(4 + number) * S, priority=priority)
    before = core.state.digest()
    # The urgent one, then the queue that has used nothing, then by submission.
    assert core.queues.list_order(100 * S, 10) == ["w-3", "w-2", "w-4", "w-0", "w-1"]
    assert core.queues.list_order(100 * S, 2) == ["w-3", "w-2"]
    assert core.state.digest() == before
    started = []
    for number in range(2):
        started += placed(core.cancel(f"run-{number}", now_ns=100 * S))
    assert started == ["w-3", "w-2"]


def test_a_queue_of_a_namespace_goes_before_one_of_the_same_name():
    core = build_queued_core(
        Queue(name="team"), Queue(name="ml/team"), Queue(name="all"), Queue(name="x", parent="all")
    )
    assert submit(core, "a", "team", namespace="ml").spec.queue == "ml/team"
    assert submit(core, "b", "team", namespace="web").spec.queue == "team"
    assert submit(core, "c", "ml/team", namespace="web").spec.queue == "ml/team"
    # The same submission again is the same workload.
    assert submit(core, "a", "team", namespace="ml").spec.queue == "ml/team"


def test_users_and_namespaces_of_a_queue_and_those_above_it_bound_who_submits():
    core = build_queued_core(
        Queue(name="top", namespaces=("lab",)), Queue(name="q", parent="top", users=("ann",)), Queue(name="open")
    )
    submit(core, "w", "q", user="ann", namespace="lab")
    with pytest.raises(PermissionDenied, match="user bob may not submit to queue q"):
        submit(core, "x", "q", user="bob", namespace="lab")
    with pytest.raises(PermissionDenied, match="namespace default may not submit to queue top"):
        submit(core, "x", "q", user="ann")
    with pytest.raises(PermissionDenied):
        core.submit(build_request("x", queue="q", user="ann", namespace="lab"), owner="bob", now_ns=9)
    submit(core, "x", "open", user="bob")


def test_a_model_without_quota_left_is_not_chosen_and_another_is():
    core = build_queued_core(Queue(name="q", quotas=(quota("gpu/G2", 2000),)))
    for key in ("a", "b"):
        assert (
            submit(core, key, "q", models=("T4", "G2") if key == "b" else ("G2",), gpus=2).phase is WorkloadPhase.PLACED
        )
    names = {place.node_name for key in ("a", "b") for place in core.workload(key).placements}
    assert names == {"a", "b"}
    assert submit(core, "c", "q", models=("G2",)).reason == "quota: queue q has too little gpu/G2 quota left"
    assert submit(core, "d", "q", gpus=8).reason.startswith("gpu_")


def test_two_workloads_of_one_pass_never_pass_a_limit_together():
    core = build_queued_core(*TEAMS)
    core.cordon_node("a", now_ns=3)
    core.cordon_node("b", now_ns=3)
    for number in range(6):
        submit(core, f"w{number}", "vision", gpus=2)
    core.uncordon_node("a", now_ns=4)
    core.uncordon_node("b", now_ns=4)
    assert gpu_usage(core, "vision").used == 6000


def test_scaling_stops_at_the_quota():
    core = build_queued_core(*TEAMS)
    submit(core, "s", "vision", gpus=1, kind=WorkloadKind.INFERENCE_SERVICE)
    assert core.scale("s", 10, now_ns=5).result.spec.replicas == 6
    assert gpu_usage(core, "vision").used == 6000
    core.scale("s", 2, now_ns=6)
    assert gpu_usage(core, "vision").used == 2000


def test_what_is_requeued_on_a_copy_holds_no_quota_there():
    """What-ifs drain nodes of a copy: the work that leaves must not stand in its own way."""
    core = build_queued_core(Queue(name="q", quotas=(quota(nominal=2000),)))
    submit(core, "w", "q", gpus=2)
    copied = core.state.copy()
    copied.requeue_workload("w", number=-1)
    other = Core(copied, catalogue.load_catalogue())
    assert gpu_usage(other, "q").used == 0
    other.retry(now_ns=9)
    assert other.workload("w").phase is WorkloadPhase.PLACED
    assert (gpu_usage(other, "q").used, gpu_usage(core, "q").used) == (2000, 2000)


def test_adopted_work_counts_even_above_the_quota_and_nothing_starts_until_below():
    core = build_queued_core(*TEAMS)
    core.update_external_usage("a", ExternalUsage(gpu_count=7), now_ns=3)
    adoption = Adoption(
        first=0, standing=(RunningReplica(node_name="a", counted=ExternalUsage(gpu_count=7)),), released=()
    )
    core.adopt(build_request("run", queue="vision", gpus=7), adoption, now_ns=4)
    assert (gpu_usage(core, "vision").used, gpu_usage(core, "vision").borrowed) == (7000, 3000)
    assert submit(core, "w", "vision").reason == "quota: queue vision may not borrow so much gpu"
    core.cancel("run", now_ns=5)
    assert core.workload("w").phase is WorkloadPhase.PLACED


def test_a_slice_is_charged_with_the_larger_of_its_compute_and_memory_shares():
    gpu = build_catalogue_gpu("h100-sxm5-80gb", uuid="G")
    workload = Workload(
        workload_id="w",
        spec=WorkloadSpec(name="w", request=ResourceRequest(cpu_milli=1000, gpu_count=1, gpu_milli=1000), replicas=2),
        phase=WorkloadPhase.PLACED,
        submitted_ns=1,
        placements=tuple(
            Placement(
                replica=number,
                node_name="n",
                gpu_uuids=("G",),
                gpu_indexes=(0,),
                gpu_instance=Slice(profile=profile, start=4 * number, gpu_milli=milli),
            )
            for number, (profile, milli) in enumerate((("3g.40gb", 428), ("1g.20gb", 142)))
        ),
    )
    nodes = {"n": NodeRecord(inventory=replace(build_node("n"), gpus=(gpu,)))}
    # 3g.40gb has half of the memory, 1g.20gb a quarter.
    watts = gpu.power_limit_default_w or gpu.power_limit_max_w or 300.0
    assert count_placed(Policy(), workload, nodes) == {
        "cpu": 2000,
        "gpu": 750,
        f"gpu/{gpu.model}": 750,
        "power": 750 * watts,
    }


def _build_powered_node(name, **watts):
    """Two GPUs of each model, with these default limits."""
    gpus = tuple(
        replace(
            gpu, uuid=f"{gpu.uuid}-{model}", index=2 * place + gpu.index, model=model, power_limit_default_w=limit_w
        )
        for place, (model, limit_w) in enumerate(watts.items())
        for gpu in build_node(name, gpus=2).gpus
    )
    return replace(build_node(name), gpus=gpus)


def test_a_quota_of_power_holds_back_what_would_exceed_it_and_leaves_a_model_that_fits():
    nodes = (_build_powered_node("a", A100=400.0, T4=70.0),)
    core = build_queued_core(Queue(name="q", quotas=(quota("power", 500_000),)), nodes=nodes)
    assert submit(core, "one", "q", models=("A100",)).phase is WorkloadPhase.PLACED
    waits = submit(core, "two", "q", models=("A100",))
    assert waits.reason == "quota: queue q has too little power quota left"
    remedy = core.explain_workload("two").remedy
    assert "uses 400 W of power of 500 W of power" in remedy
    assert "raise nominal of power in queue q to 800 W of power" in remedy
    # Any model: there is quota left for a T4 alone.
    third = submit(core, "three", "q")
    (place,) = third.placements
    assert core.state.nodes["a"].gpu(place.gpu_uuids[0]).model == "T4"
    (power,) = (one for one in core.queues.tree.usage("q") if one.resource == "power")
    assert (power.used, power.quota, power.usage_most) == (470_000, 500_000, 500_000)
    with pytest.raises(InvalidArgument) as refused:
        submit(core, "four", "q", gpus=2, models=("A100",))
    assert refused.value.violations[0].field == "spec.request.gpu_count"
    assert "needs 800 W of power; queue q can have 500 W of power" in refused.value.violations[0].problem
    for key in ("one", "two", "three"):
        core.cancel(key, now_ns=9)
    (power,) = (one for one in core.queues.tree.usage("q") if one.resource == "power")
    assert power.used == 0


def test_a_power_limit_changes_no_charge_and_a_share_is_charged_its_part_rounded_up():
    nodes = (_build_powered_node("a", A100=333.333),)
    core = build_queued_core(Queue(name="q", quotas=(quota("power", 10**9),)), nodes=nodes)
    submit(core, "whole", "q")
    core.set_limit("whole", 200.0, now_ns=5)
    submit(core, "part", "q", milli=500)
    assert core.state.queue_usage.charges["whole"].amounts["power"] == 333_333
    assert core.state.queue_usage.charges["part"].amounts["power"] == 166_667


def test_models_without_room_for_all_replicas_in_the_power_quota_are_left_out_even_by_a_milliwatt():
    nodes = (_build_powered_node("a", A100=333.333),)
    for most, phase in ((333_333, WorkloadPhase.PENDING), (333_334, WorkloadPhase.PLACED)):
        core = build_queued_core(Queue(name="q", quotas=(quota("power", 10**9, most=most),)), nodes=nodes)
        if phase is WorkloadPhase.PENDING:
            with pytest.raises(InvalidArgument):
                submit(core, "w", "q", milli=500, replicas=2)
        else:
            assert submit(core, "w", "q", milli=500, replicas=2).phase is phase


def test_pending_work_moves_between_queues_and_keeps_its_time():
    core = build_queued_core(*TEAMS, Queue(name="other"))
    submit(core, "v", "vision", gpus=6)
    submit(core, "w", "vision", gpus=1, now_ns=7)
    step = core.move_to_queue("w", "other", now_ns=9)
    assert step.events[0] == WorkloadQueueChanged(time_ns=9, workload_id="w", queue="other")
    assert (step.result.phase, step.result.submitted_ns, step.result.spec.queue) == (WorkloadPhase.PLACED, 7, "other")
    with pytest.raises(FailedPrecondition, match="does not wait"):
        core.move_to_queue("v", "other", now_ns=9)
    with pytest.raises(InvalidArgument):
        core.move_to_queue(submit(core, "x", "vision", gpus=2).workload_id, "none", now_ns=9)
    with pytest.raises(FailedPrecondition, match="no queues"):
        _move_without_queues()


def test_moved_work_is_not_said_to_wait_for_the_queue_before_while_nodes_have_not_reported():
    nodes = [replace(build_node(name, gpus=8), agent_version="1") for name in ("a", "b")]
    core = build_queued_core(*TEAMS, Queue(name="other"), nodes=nodes)
    submit(core, "v", "vision", gpus=6)
    assert submit(core, "w", "vision", gpus=1).reason.startswith("quota: queue vision")
    core.record_controller_start(now_ns=8)
    moved = core.move_to_queue("w", "other", now_ns=9).result
    assert moved.phase is WorkloadPhase.PENDING
    assert moved.reason.startswith("unavailable:")


def _move_without_queues():
    core = build_core(build_node("a"))
    submit(core, "w")
    core.move_to_queue("w", "x", now_ns=4)


def test_work_of_a_queue_that_is_no_longer_declared_waits_and_says_so():
    core = build_queued_core(*TEAMS)
    submit(core, "v", "vision", gpus=6)
    submit(core, "w", "vision", gpus=2)
    core.update_policy(replace(core.state.policy, queues=(Queue(name="new"),)), now_ns=6)
    assert reason(core, "w") == "queue: no queue vision holds work"
    assert core.explain_workload("w").remedy == (
        "The queue that it names holds no work. To help: eelctl queue move it to one of new."
    )
    core.update_policy(replace(core.state.policy, queues=()), now_ns=7)
    assert core.workload("w").phase is WorkloadPhase.PLACED


def test_a_spending_limit_is_named_before_the_quota():
    core = build_queued_core(*TEAMS)
    policy = core.state.policy
    core.update_policy(replace(policy, spending=(build_spending_limit(0.001),)), now_ns=3)
    submit(core, "v", "vision", gpus=6, namespace="research")
    assert submit(core, "w", "vision", gpus=1, namespace="research").reason.startswith("quota:")


def test_without_queues_the_order_is_priority_then_submission_whatever_the_queue_says():
    core = build_core(build_node("a", gpus=1))
    for key, queue, priority in (("run", "x", 0), ("one", "x", 0), ("two", "y", 1), ("three", "z", 0)):
        submit(core, key, queue, priority=priority)
    order = []
    for key in ("run", "two", "one"):
        order += placed(core.cancel(key, now_ns=9))
    assert order == ["two", "one", "three"]
    assert "queue_usage" not in core.state.dump()
    assert core.state.policy == Policy()


def test_metrics_count_pending_work_by_every_constraint_that_it_may_name():
    assert set(PENDING_REASONS) - set(PendingConstraint) == {"other"}
    assert set(PendingConstraint) < set(PENDING_REASONS)
