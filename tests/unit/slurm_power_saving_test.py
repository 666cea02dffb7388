"""Which of Slurm's nodes sleep: pools, states and orders; and the engine's command."""

import pytest

from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.power_saving import (
    PowerSavingSettings,
    SetNodesPower,
    SlurmPowerSaving,
    read_node_power,
)
from eelgrid_controller.objectives.power.power_save import NodePower, SleepCosts

# A break-even of 60 s.
COSTS = SleepCosts(idle_w=120.0, sleep_w=20.0, transition_j=6000.0, wake_s=30.0)


def node(name, *states, gpus="a100", **more):
    return SlurmNode(name=name, states=frozenset(states or ("IDLE",)), gpus=(GresCount(gpus, 4),), **more)


def saving(**more):
    return SlurmPowerSaving(PowerSavingSettings(costs=COSTS, **more))


def after(made, nodes, *, jobs=(), now_s=61.0):
    """What is ordered after nodes were like this for a while."""
    assert made.decide(jobs, nodes, now_s=0.0) == []
    return made.decide(jobs, nodes, now_s=now_s)


def test_idle_nodes_sleep_after_the_break_even_and_nodes_in_use_never():
    nodes = [node("n0"), node("n1", "MIXED"), node("n2"), node("n3", "IDLE", "PLANNED")]
    running = SlurmJob(job_id="1", state="RUNNING", nodes=("n2",))
    assert after(saving(), nodes, jobs=[running], now_s=59.0) == []
    assert after(saving(), nodes, jobs=[running]) == [SetNodesPower(("n0",), on=False)]


def test_nodes_of_one_kind_stand_in_for_one_another_and_for_no_others():
    nodes = [node("n0"), node("n1"), node("m0", gpus="h100"), node("m1", gpus="h100"), node("k0", cpus=8)]
    assert after(saving(warm_nodes=1), nodes) == [SetNodesPower(("m0",), on=False), SetNodesPower(("n0",), on=False)]


def test_closed_nodes_and_those_that_are_always_on_are_left_alone():
    nodes = [node("n0", "IDLE", "DRAIN"), node("n1"), node("n2", "DOWN"), node("n3")]
    assert after(saving(always_on=frozenset({"n1"})), nodes) == [SetNodesPower(("n3",), on=False)]


def test_an_order_is_not_repeated_before_it_could_show_and_then_it_is():
    made, nodes = saving(), [node("n0")]
    assert after(made, nodes) == [SetNodesPower(("n0",), on=False)]
    assert made.decide((), nodes, now_s=62.0) == []
    assert made.decide((), nodes, now_s=122.0) == [SetNodesPower(("n0",), on=False)]
    assert made.decide((), [node("n0", "IDLE", "POWERING_DOWN")], now_s=200.0) == []


def test_the_warm_node_that_work_takes_is_replaced():
    made = saving(warm_nodes=1)
    nodes = [node("n0"), node("n1", "IDLE", "POWERED_DOWN"), node("n2", "IDLE", "POWERED_DOWN")]
    assert after(made, nodes) == []
    nodes[0] = node("n0", "ALLOCATED")
    assert made.decide((), nodes, now_s=100.0) == [SetNodesPower(("n1",), on=True)]
    nodes[1] = node("n1", "IDLE", "NOT_RESPONDING", "POWERING_UP")
    assert made.decide((), nodes, now_s=200.0) == []


def test_a_controller_that_begins_anew_finds_nodes_asleep_and_leaves_them_so():
    nodes = [node("n0"), node("n1", "IDLE", "POWERED_DOWN"), node("n2", "IDLE", "POWERING_DOWN")]
    assert after(saving(), nodes, now_s=59.0) == []
    assert after(saving(), nodes, now_s=600.0) == [SetNodesPower(("n0",), on=False)]


@pytest.mark.parametrize(
    ("states", "power"),
    [
        (("IDLE",), NodePower.AWAKE),
        (("IDLE", "POWER_DOWN"), NodePower.FALLING_ASLEEP),
        (("IDLE", "POWERING_DOWN"), NodePower.FALLING_ASLEEP),
        (("IDLE", "POWERED_DOWN"), NodePower.ASLEEP),
        (("IDLE", "POWERED_DOWN", "POWER_UP"), NodePower.WAKING),
        (("MIXED", "NOT_RESPONDING", "POWERING_UP"), NodePower.WAKING),
    ],
)
def test_states_are_read_as_slurm_means_them(states, power):
    assert read_node_power(node("n", *states)) is power


def test_a_node_that_sleeps_or_wakes_is_open_though_it_does_not_respond():
    assert node("n", "IDLE", "POWERED_DOWN", "NOT_RESPONDING").closed == ""
    assert node("n", "IDLE", "POWERING_UP", "NOT_RESPONDING").closed == ""
    assert "does not respond" in node("n", "IDLE", "NOT_RESPONDING").closed
    assert "drained" in node("n", "IDLE", "POWERED_DOWN", "DRAIN").closed
