"""Savings against best fit: what is compared and what is not, lost nodes, limits, slices, a restart; and the monitor."""

from dataclasses import replace
from itertools import islice

import pytest
from tests.builders import partition
from tests.builders.cluster import build_core, build_node, build_request
from tests.builders.server import run_controller
from tests.props.trace_test import CSV, nodes, tasks
from tests.unit import slices_event_test
from tests.waiting import wait_until

from eelgrid_controller.energy.savings import BEST_FIT, BOTH, EELGRID, InitialCluster, PlacementSavings
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.server import energy_monitors
from eelgrid_controller.server.energy_monitors import SavingsMonitor
from eelgrid_protos import catalogue
from eelgrid_protos.messages import Weights

WATTS = PriorPowerModel(catalogue.load_catalogue()).gpu
# The cheapest watts now and nothing else.
GREEDY = Weights(power=1.0, fragmentation_w=0.0, stranding_w=0.0, lookahead=0.0, scarcity_w=0.0)
T4_W, PACKAGE_W = 60.0, 105.0


def followed(core):
    """A comparison from now on, and how to play a step to it."""
    core.update_policy(replace(core.state.policy, objective="custom", weights=GREEDY), now_ns=1)
    savings = PlacementSavings(InitialCluster.from_state(core.state, 1), WATTS)

    def play(step, now_ns):
        for event in step.events:
            savings.follow_event(event)
        savings.advance_to(now_ns)
        return savings.figures()

    return savings, play


def test_watts_are_saved_where_best_fit_takes_a_dearer_gpu_and_joules_follow():
    # Best fit takes the node with the least left, whose GPU draws more.
    core = build_core(build_node("a", gpus=1, model="G3", cpu=32), build_node("b", gpus=2, model="T4", cpu=96))
    _, play = followed(core)
    before = play(core.submit(build_request(gpus=1, key="w"), now_ns=2), 2)
    assert core.workload("w").placements[0].node_name == "b"
    g3_w = 350.0
    assert before.saved_w == g3_w - T4_W
    assert before.power_w[EELGRID] == core.modelled_power_w()
    assert (before.replicas[BOTH], before.gpu_milli[BOTH], before.limits_w) == (1, 1000, 0.0)
    after = play(core.cancel("w", now_ns=2 + 10**10), 2 + 10**10)
    assert after.saved_w == 0.0
    assert after.energy_j[BEST_FIT] - after.energy_j[EELGRID] == pytest.approx(10.0 * (g3_w - T4_W))


def test_work_without_room_in_one_plan_saves_nothing_and_is_counted_apart():
    # Ours leaves the G3 free; best fit has put the first task there, so that the third finds no G3.
    core = build_core(build_node("a", gpus=1, model="G3", cpu=32), build_node("b", gpus=2, model="T4", cpu=96))
    savings, play = followed(core)
    play(core.submit(build_request(gpus=1, key="any"), now_ns=2), 2)
    figures = play(core.submit(build_request(gpus=1, key="g3", models=("G3",)), now_ns=3), 3)
    assert core.workload("g3").placements
    assert figures.replicas == {BOTH: 1, EELGRID: 1, BEST_FIT: 0}
    assert figures.gpu_milli == {BOTH: 1000, EELGRID: 1000, BEST_FIT: 0}
    assert figures.saved_w == 350.0 - T4_W, "as if the one that stands in one plan alone were not there"
    # When the first leaves, the one that waited under best fit stands where ours stands.
    figures = play(core.cancel("any", now_ns=4), 4)
    assert (figures.replicas[BOTH], figures.replicas[EELGRID], figures.saved_w) == (1, 0, 0.0)
    assert not len(savings._best_fit.waiting)


def test_a_lost_node_keeps_what_it_holds_and_takes_nothing_new_in_both():
    core = build_core(build_node("a", gpus=1, model="T4"), build_node("b", gpus=1, model="T4"))
    savings, play = followed(core)
    play(core.submit(build_request(gpus=1, key="w"), now_ns=2), 2)
    play(core.mark_node_lost("b", now_ns=3), 3)
    figures = play(core.submit(build_request(gpus=1, key="v"), now_ns=4), 4)
    assert (figures.replicas[BOTH], figures.saved_w) == (1, 0.0)
    play(core.register_node(build_node("b", gpus=1, model="T4"), now_ns=5), 5)
    figures = savings.figures()
    assert (figures.replicas[BOTH], figures.power_w[EELGRID]) == (2, core.modelled_power_w())


def test_limits_are_told_apart():
    core = build_core(build_node("a", gpus=2, model="T4"))
    _, play = followed(core)
    play(core.submit(build_request(gpus=2, key="w"), now_ns=2), 2)
    figures = play(core.set_limit("w", 50.0, now_ns=3), 3)
    assert (figures.saved_w, figures.limits_w) == (0.0, 2 * (70.0 - 50.0))
    assert play(core.set_limit("w", 5.0, now_ns=4), 4).limits_w == 2 * (70.0 - 10.0), "no GPU draws less than idle"
    assert play(core.set_limit("w", None, now_ns=5), 5).limits_w == 0.0


def test_slices_stand_where_they_stand_in_both():
    core = partition.build_partitioned_core(partition.build_mig_node("a", gpus=1))
    savings, play = followed(core)
    idle_w = play(core.submit(partition.build_sliced_service("s", 10.0), now_ns=4), 4).power_w
    event = slices_event_test.event()
    core.state.apply(event)
    savings.follow_event(event)
    savings.advance_to(9)
    figures = savings.figures()
    assert (figures.replicas[BOTH], figures.gpu_milli[BOTH]) == (1, 428)
    assert figures.power_w[BEST_FIT] == figures.power_w[EELGRID] > idle_w[BEST_FIT]
    gone = play(core.cancel("s", now_ns=10), 10)
    assert (gone.replicas[BOTH], gone.power_w) == (0, idle_w)


def test_begun_again_it_goes_on_with_what_lives():
    core = build_core(build_node("a", gpus=1, model="G3", cpu=32), build_node("b", gpus=2, model="T4", cpu=96))
    _, play = followed(core)
    for number, key in enumerate(("u", "v", "w")):
        figures = play(core.submit(build_request(gpus=1, key=key), now_ns=2 + number), 2 + number)
    anew = PlacementSavings(InitialCluster.from_state(core.state, 9), WATTS).figures()
    assert (anew.power_w, anew.replicas, anew.began_ns) == (figures.power_w, figures.replicas, 9)
    assert set(anew.energy_j.values()) == {0.0}


@pytest.mark.skipif(not CSV.is_dir(), reason=f"no openb trace in {CSV}; set EELGRID_DATA")
def test_on_the_openb_trace_ours_saves():
    core = build_core(*nodes())
    savings = PlacementSavings(InitialCluster.from_state(core.state, 1), WATTS)
    for number, task in enumerate(islice(tasks(), 150)):
        for event in core.submit(task, now_ns=number).events:
            savings.follow_event(event)
    savings.advance_to(150)
    figures = savings.figures()
    assert figures.replicas == {BOTH: 150, EELGRID: 0, BEST_FIT: 0}
    assert figures.power_w[EELGRID] == core.modelled_power_w()
    assert figures.saved_w > 0.05 * figures.power_w[BEST_FIT]


async def test_the_monitor_follows_a_running_controller_and_reports(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        monitor = rig.controller.savings
        await rig.operators.submit_workload(build_request("w"))
        await wait_until(lambda: monitor.figures is not None and monitor.figures.replicas[BOTH] == 1, within_s=60.0)
        page = (await rig.controller.metrics.render_page()).decode()
        assert 'eelgrid_saved_power_watts{part="placement"} 0.0' in page
        assert 'eelgrid_compared_gpus{plan="both"} 1.0' in page
        # What is wrong with it ends it alone; the joules of before stay.
        energy_j = monitor.figures.energy_j[BEST_FIT]
        monitor._end("behind")
        await wait_until(lambda: monitor.figures is not None, within_s=60.0)
        assert monitor.failures == {"behind": 1, "fault": 0}
        told = {
            sample.labels["plan"]: sample.value
            for one in monitor.families()
            for sample in one.samples
            if "compared_energy" in sample.name
        }
        assert told[BEST_FIT] >= energy_j


async def test_one_that_cannot_keep_up_begins_again(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_monitors, "_BEHIND_MOST", 1)
    async with run_controller(tmp_path) as rig:
        monitor: SavingsMonitor = rig.controller.savings
        await wait_until(lambda: monitor._is_following, within_s=60.0)
        await rig.join(build_node("n1"))
        await rig.operators.submit_workload(build_request("w"))
        await wait_until(lambda: monitor.failures["behind"] > 0, within_s=60.0)
        await wait_until(lambda: monitor.figures is not None and monitor.figures.replicas[BOTH] == 1, within_s=60.0)


async def test_it_can_be_switched_off(tmp_path):
    async with run_controller(tmp_path, savings=False) as rig:
        page = (await rig.controller.metrics.render_page()).decode()
        assert "eelgrid_workloads" in page
        assert "eelgrid_compared" not in page
        assert "eelgrid_sav" not in page
