"""Node plans: the whole desired state, under an epoch that rises with each change."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.messages import BudgetScope, EnforcementMode, NodePlan, Policy, PoolMode, PowerBudget


def test_a_plan_holds_every_assignment_and_survives_the_wire():
    core = build_core(build_node("a", gpus=4, pool="x"))
    core.submit(build_request(gpus=2, cpu=3, memory_gib=5, replicas=2), now_ns=1)
    core.submit(build_request(gpus=1, milli=250, key="zz"), now_ns=2)
    core.submit(build_request(gpus=0, cpu=2, key="cpu"), now_ns=3)
    plan = core.node_plan("a")
    assert [(item.workload_id, item.replica, item.gpu_milli) for item in plan.assignments] == [
        ("cpu", 0, 0),
        ("w-1", 0, 1000),
        ("w-1", 1, 1000),
    ]
    assert plan.assignments[1].gpu_uuids == ("GPU-a-0", "GPU-a-1")
    assert (plan.epoch, plan.enforce, plan.lease_s) == (2, False, 60.0)
    assert decode_message(NodePlan, encode_message(plan)) == plan


def test_the_epoch_rises_with_each_change_and_the_pool_decides_enforcement():
    core = build_core(build_node("a", pool="x"), build_node("b", pool="y"))
    first = core.submit(build_request(gpus=1), now_ns=1)
    assert first.nodes == {"a"}
    assert (core.node_plan("a").epoch, core.node_plan("b").epoch) == (1, 0)
    step = core.update_policy(Policy(pools=(PoolMode(pool="x", mode=EnforcementMode.ENFORCE),)), now_ns=2)
    assert step.nodes == {"a"}
    assert (core.node_plan("a").epoch, core.node_plan("a").enforce) == (2, True)
    assert (core.node_plan("b").epoch, core.node_plan("b").enforce) == (0, False)
    assert core.cancel("w-1", now_ns=3).nodes == {"a"}
    assert core.node_plan("a").assignments == ()
    assert core.node_plan("a").epoch == 3


def test_an_unknown_node_has_no_plan():
    with pytest.raises(NotFound, match="nobody"):
        build_core().node_plan("nobody")


def test_a_node_keeps_its_budget_itself():
    core = build_core(build_node("a"), build_node("b"))
    budgets = (
        PowerBudget(scope=BudgetScope.NODE, name="a", limit_w=900.0),
        PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=5000.0),
    )
    step = core.update_policy(Policy(budgets=budgets), now_ns=2)
    assert step.nodes == {"a"}
    assert [core.node_plan(name).power_budget_w for name in "ab"] == [900.0, None]
    assert [core.node_plan(name).epoch for name in "ab"] == [1, 0]
    core.update_policy(replace(core.state.policy, budgets=budgets[1:]), now_ns=3)
    assert (core.node_plan("a").power_budget_w, core.node_plan("a").epoch) == (None, 2)
    with pytest.raises(InvalidArgument, match="contradicts itself"):
        core.update_policy(replace(core.state.policy, budgets=(budgets[0], budgets[0])), now_ns=4)
