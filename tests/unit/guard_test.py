"""The guard: which plan is in force, and the verdict on every item."""

from dataclasses import replace

import pytest

from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Assignment, GpuSetting, NodeEventKind, NodePlan

SECOND = 1_000_000_000
GPUS = frozenset({"GPU-0", "GPU-1"})


def plan(epoch=1, **changes):
    return replace(
        NodePlan(
            node_name="n",
            epoch=epoch,
            lease_s=60.0,
            assignments=(Assignment(workload_id="w", replica=0, gpu_uuids=("GPU-0",), gpu_milli=500),),
            gpu_settings=(GpuSetting(gpu_uuid="GPU-0", power_limit_w=200.0),),
        ),
        **changes,
    )


def take(guard, offered, now_ns=0):
    verdict = guard.offer(offered, gpu_uuids=GPUS, now_ns=now_ns)
    return verdict.answer or guard.settle(verdict, ())


def statuses(applied):
    return {result.subject: result.status for result in applied.results}


def test_a_plan_is_taken_and_its_settings_are_observed():
    guard = Guard("n")
    verdict = guard.offer_plan(plan(), gpu_uuids=GPUS, now_ns=0)
    assert verdict.assignments == plan().assignments
    applied = guard.complete_plan(verdict, ())
    assert (applied.status, statuses(applied)) == (ApplyStatus.OBSERVED, {"GPU-0": ApplyStatus.OBSERVED})
    assert guard.settings == plan().gpu_settings
    assert guard.epoch == 1


def test_a_plan_without_settings_is_plainly_applied():
    applied = take(Guard("n"), plan(gpu_settings=()))
    assert (applied.status, applied.results) == (ApplyStatus.APPLIED, ())


def test_a_lower_epoch_is_refused_and_an_equal_one_is_answered_as_before():
    guard = Guard("n")
    first = take(guard, plan(5))
    refused = take(guard, plan(4))
    assert refused.status is ApplyStatus.REFUSED
    assert "epoch 5 is in force" in refused.results[0].detail
    assert take(guard, plan(5)) is first
    assert guard.epoch == 5


def test_an_equal_epoch_with_other_content_is_refused():
    guard = Guard("n")
    take(guard, plan(5))
    refused = take(guard, plan(5, assignments=()))
    assert refused.status is ApplyStatus.REFUSED
    assert "other content" in refused.results[0].detail
    assert guard.plan == plan(5)


@pytest.mark.parametrize(("offered", "field"), [(plan(node_name="other"), "node_name"), (plan(0), "epoch")])
def test_a_plan_that_is_not_ours_changes_nothing(offered, field):
    guard = Guard("n")
    refused = take(guard, offered)
    assert (refused.status, refused.results[0].subject) == (ApplyStatus.REFUSED, field)
    assert guard.plan is None


def test_items_are_refused_one_by_one():
    good = Assignment(workload_id="good", replica=0, gpu_uuids=("GPU-1",), gpu_milli=600)
    offered = plan(
        assignments=(
            good,
            Assignment(workload_id="unknown", replica=0, gpu_uuids=("GPU-9",), gpu_milli=1000),
            Assignment(workload_id="good", replica=0, gpu_uuids=("GPU-0",), gpu_milli=100),
            Assignment(workload_id="toomuch", replica=0, gpu_uuids=("GPU-1",), gpu_milli=600),
            Assignment(workload_id="double", replica=0, gpu_uuids=("GPU-0", "GPU-0"), gpu_milli=100),
        ),
        gpu_settings=(
            GpuSetting(gpu_uuid="GPU-9", power_limit_w=1.0),
            GpuSetting(gpu_uuid="GPU-1", power_limit_w=2.0),
            GpuSetting(gpu_uuid="GPU-1", power_limit_w=3.0),
        ),
    )
    guard = Guard("n")
    verdict = guard.offer_plan(offered, gpu_uuids=GPUS, now_ns=0)
    assert verdict.assignments == (good,)
    applied = guard.complete_plan(verdict, ())
    assert [(r.subject, r.status) for r in applied.results] == [
        ("unknown", ApplyStatus.REFUSED),
        ("good", ApplyStatus.REFUSED),
        ("toomuch", ApplyStatus.REFUSED),
        ("double", ApplyStatus.REFUSED),
        ("GPU-9", ApplyStatus.REFUSED),
        ("GPU-1", ApplyStatus.OBSERVED),
        ("GPU-1", ApplyStatus.REFUSED),
    ]
    assert guard.settings == (GpuSetting(gpu_uuid="GPU-1", power_limit_w=2.0),)


def test_enforcement_is_refused_by_name():
    guard = Guard("n")
    applied = take(guard, plan(enforce=True))
    assert statuses(applied) == {"GPU-0": ApplyStatus.REFUSED}
    assert applied.results[0].rule == RefusalRule.NO_PERMISSION
    assert "given no control of devices" in applied.results[0].detail
    assert guard.settings == ()


def test_the_gravest_outcome_is_the_plan_s():
    guard = Guard("n")
    verdict = guard.offer_plan(plan(), gpu_uuids=GPUS, now_ns=0)
    failed = ApplyResult(subject="w", status=ApplyStatus.FAILED)
    assert guard.complete_plan(verdict, (failed,)).status is ApplyStatus.FAILED


def test_the_lease_runs_out_once_and_only_the_recommendations_go():
    guard = Guard("n")
    take(guard, plan())
    assert guard.check_lease(now_ns=59 * SECOND, wall_ns=0) is None
    event = guard.check_lease(now_ns=60 * SECOND, wall_ns=7)
    assert (event.kind, event.time_ns) == (NodeEventKind.LEASE_EXPIRED, 7)
    assert guard.check_lease(now_ns=61 * SECOND, wall_ns=0) is None
    assert (guard.settings, guard.plan, guard.lease_left_s(61 * SECOND)) == ((), plan(), 0.0)


def test_any_word_renews_the_lease():
    guard = Guard("n")
    take(guard, plan())
    guard.renew_lease(50 * SECOND)
    assert guard.check_lease(now_ns=100 * SECOND, wall_ns=0) is None
    assert guard.lease_left_s(100 * SECOND) == 10.0


def test_after_the_lease_the_same_plan_takes_force_again():
    guard = Guard("n")
    take(guard, plan())
    guard.check_lease(now_ns=60 * SECOND, wall_ns=0)
    guard.renew_lease(61 * SECOND)
    assert guard.settings == ()
    assert take(guard, plan(), 62 * SECOND).status is ApplyStatus.OBSERVED
    assert guard.settings == plan().gpu_settings
    assert guard.lease_left_s(62 * SECOND) == 60.0
