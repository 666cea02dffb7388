"""A handful of tasks, every number worked out by hand."""

import math

import numpy as np
import pytest
from tests.builders.replay import build_scene, build_trace_node, build_trace_task

from eelgrid_controller.replay.run_statistics import TariffSteps, compute_series, expand_tariff, summarize_run
from eelgrid_controller.replay.simulation import FINISHED, REFUSED, RUNNING, TO_COME, WAITING, Outage, empty_node_w
from eelgrid_controller.replay.site_csv import TariffRow

# One node, 2 T4, one package: 35 W empty. a holds a GPU from 0 to 100, c half of the other from 20 to 50, and b wants
# both from 10 on: it waits for 90 s and runs from 100 to 150.
#   0 to 20: 120 + 70 + 10 = 200 W; to 50: 260 W; to 100: 200 W; to 150: 120 + 140 = 260 W; to 200: 35 W
TASKS = [
    build_trace_task("a", 0.0, 100.0),
    build_trace_task("b", 10.0, 50.0, gpus=2),
    build_trace_task("c", 20.0, 30.0, milli=500),
]
ENERGY_J = 200 * 20 + 260 * 30 + 200 * 50 + 260 * 50 + 35 * 50


def three(**changes):
    return build_scene([build_trace_node()], TASKS).run(**({"end_s": 200.0} | changes))


@pytest.mark.parametrize("policy", ["fgd", "pwr", "pwr200", "bestfit", "eelgrid", "random"])
def test_energy_waiting_and_use_of_three_tasks(policy):
    sums = summarize_run(three(name=policy), None, 1.0)
    assert sums.energy_j == ENERGY_J == 36_550
    assert sums.energy_over_idle_j == ENERGY_J - 35 * 200
    assert (sums.wait_mean_s, sums.wait_p95_s) == (30.0, 90.0)
    assert sums.gpu_s == 100 + 0.5 * 30 + 2 * 50
    assert (sums.gpus_mean, sums.gpus_peak) == (215 / 200, 2.0)
    assert (sums.tasks, sums.finished, sums.running, sums.waiting, sums.refused) == (3, 3, 0, 0, 0)
    assert (sums.span_s, sums.cost, sums.carbon_kg, sums.restarts, sums.lost_gpu_s) == (200.0, 0.0, 0.0, 0, 0.0)


def test_prices_change_in_the_middle_and_pue_multiplies():
    # Joules before and after the step at 30 s: 200 * 20 + 260 * 10 = 6,600 and the rest.
    prices = TariffSteps(np.array([-5.0, 30.0]), np.array([1.0, 2.0]), np.array([0.25, 0.0]))
    sums = summarize_run(three(), prices, 1.5)
    assert sums.energy_j == 1.5 * ENERGY_J
    assert sums.cost == pytest.approx(1.5 * (6_600 + 2 * (ENERGY_J - 6_600)), rel=1e-12)
    assert sums.carbon_kg == pytest.approx(1.5 * 0.25 * 6_600, rel=1e-12)


def test_a_tariff_repeats_from_where_the_run_begins():
    rows = [TariffRow(10.0, 3.6, 0.0), TariffRow(40.0, 7.2, 3600.0)]  # per kWh: 1e-6 and 2e-6 per joule
    steps = expand_tariff(rows, repeat_s=100.0, begin_s=0.0, end_s=200.0)
    assert steps.from_s.tolist() == [-90.0, -60.0, 10.0, 40.0, 110.0, 140.0]
    assert steps.price_per_j == pytest.approx(np.tile([1e-6, 2e-6], 3))
    assert steps.carbon_kg_per_j == pytest.approx(np.tile([0.0, 1e-6], 3))
    with pytest.raises(ValueError, match="30 s long and cannot repeat every 30 s"):
        expand_tariff(rows, repeat_s=30.0, begin_s=0.0, end_s=200.0)
    with pytest.raises(ValueError, match="over 2000000 steps"):
        expand_tariff(rows, repeat_s=31.0, begin_s=0.0, end_s=1e9)


def test_the_end_cuts_what_runs_waits_and_is_to_come():
    outcome = three(end_s=15.0)
    assert outcome.fate.tolist() == [RUNNING, WAITING, TO_COME]
    assert outcome.waited_s.tolist() == [0.0, 5.0, 0.0]
    assert summarize_run(outcome, None, 1.0).energy_j == 200 * 15


def test_what_ends_at_the_end_has_ended():
    outcome = build_scene([build_trace_node()], TASKS[:1]).run()
    assert outcome.end_s == 100.0
    assert outcome.fate.tolist() == [FINISHED]


def test_a_failure_costs_what_was_done_and_the_machine_draws_nothing():
    # Down from 60 to 80: a (60 GPU s) is lost and begins anew at 80, before b, which came later; b runs from 180.
    outcome = three(outages=(Outage(0, 60.0, 80.0),), end_s=300.0)
    sums = summarize_run(outcome, None, 1.0)
    assert outcome.restarts.tolist() == [1, 0, 0]
    assert outcome.waited_s.tolist() == [20.0, 170.0, 0.0]
    assert sums.lost_gpu_s == 60.0
    assert sums.energy_j == 200 * 20 + 260 * 30 + 200 * 10 + 0 + 200 * 100 + 260 * 50 + 35 * 70
    assert sums.energy_over_idle_j == sums.energy_j - 35 * 280
    assert [node for _, _, node in zip(*outcome[4:7], strict=True)] == [0, 0, 0, 0]
    assert outcome.decided_task.tolist() == [0, 2, 0, 1]


def test_waits_add_up():
    # b waits from 10 to 100, and from its failure at 110 to the return at 130.
    outcome = three(outages=(Outage(0, 110.0, 130.0),), end_s=300.0)
    assert outcome.waited_s.tolist() == [0.0, 110.0, 0.0]
    assert outcome.decided_s.tolist() == [0.0, 20.0, 100.0, 130.0]


def test_a_failed_node_takes_nothing_until_it_returns_and_another_does():
    both = build_scene([build_trace_node(), build_trace_node("n1")], TASKS[:1])
    (first,) = both.run().decided_node.tolist()
    outcome = both.run(outages=(Outage(first, 60.0, math.inf),))
    assert outcome.decided_node.tolist() == [first, 1 - first]
    assert outcome.decided_s.tolist() == [0.0, 60.0]
    assert summarize_run(outcome, None, 1.0).waiting == 0
    alone = build_scene([build_trace_node()], TASKS[:1]).run(outages=(Outage(0, -9.0, 7.0),))
    assert alone.decided_s.tolist() == [7.0]
    over = build_scene([build_trace_node()], TASKS[:1]).run(outages=(Outage(0, -9.0, -1.0),))
    assert over.decided_s.tolist() == [0.0]


def test_what_two_nodes_release_in_one_moment_is_all_seen():
    nodes = [build_trace_node("n0", gpus=1), build_trace_node("n1", gpus=1, model="A100")]
    tasks = [
        build_trace_task(f"{begin}{model}", begin, 10.0, models=(model,))
        for begin in (0.0, 1.0)
        for model in ("T4", "A100")
    ]
    outcome = build_scene(nodes, tasks).run(end_s=100.0)
    assert outcome.decided_s.tolist() == [0.0, 0.0, 10.0, 10.0]
    assert outcome.fate.tolist() == [FINISHED] * 4


def test_priority_goes_before_arrival_and_what_fits_does_not_wait_behind_what_does_not():
    tasks = [
        build_trace_task("holds", 0.0, 10.0, gpus=2),
        build_trace_task("early", 1.0, 10.0, gpus=2),
        build_trace_task("urgent", 2.0, 10.0, gpus=2, priority=5),
        build_trace_task("small", 3.0, 10.0, gpus=0),
    ]
    outcome = build_scene([build_trace_node()], tasks).run(end_s=100.0)
    assert list(zip(outcome.decided_s.tolist(), outcome.decided_task.tolist(), strict=True)) == [
        (0.0, 0),
        (3.0, 3),
        (10.0, 2),
        (20.0, 1),
    ]


def test_what_no_empty_node_could_hold_is_refused():
    tasks = [
        build_trace_task("a", 0.0, 1.0),
        build_trace_task("big", 0.0, 1.0, gpus=3),
        build_trace_task("cpu", 0.0, 1.0, vcpu=33),
    ]
    tasks += [
        build_trace_task("other", 0.0, 1.0, models=("A100",)),
        build_trace_task("memory", 0.0, 1.0, memory_mib=1001),
    ]
    outcome = build_scene([build_trace_node()], tasks).run()
    assert outcome.fate.tolist() == [FINISHED, REFUSED, REFUSED, REFUSED, REFUSED]
    assert summarize_run(outcome, None, 1.0).wait_mean_s == 0.0


def test_a_task_of_no_length_is_placed_and_gone_at_once():
    outcome = build_scene(
        [build_trace_node()], [build_trace_task("a", 5.0, 0.0), build_trace_task("b", 5.0, 0.0, gpus=2)]
    ).run(end_s=6.0)
    assert outcome.fate.tolist() == [FINISHED, FINISHED]
    assert summarize_run(outcome, None, 1.0).energy_j == 35.0


def test_stretches_keep_the_energy():
    outcome = three()
    means = compute_series(outcome, 7)
    assert means.power_w.sum() * (200 / 7) == pytest.approx(ENERGY_J)
    assert means.gpus_allocated.sum() * (200 / 7) == pytest.approx(215)
    assert compute_series(outcome, 10).power_w.tolist() == pytest.approx(
        [200, 260, 230, 200, 200, 260, 260, 147.5, 35, 35]
    )
    still = build_scene([build_trace_node()], [build_trace_task("a", 0.0, None)]).run()
    assert len(compute_series(still, 10).from_s) == 0
    assert summarize_run(still, None, 1.0).energy_j == 0.0


def test_an_empty_fleet_draws_what_the_engine_says():
    nodes = [
        build_trace_node(vcpu=32),
        build_trace_node("n1", vcpu=33),
        build_trace_node("n2", vcpu=96, gpus=0),
        build_trace_node("n3", gpus=8, model="A100"),
    ]
    small = build_scene(nodes, TASKS)
    assert small.fleet().power_w == pytest.approx(empty_node_w(small.trace.fleet).sum())
    assert empty_node_w(small.trace.fleet).tolist() == [35.0, 155.0, 45.0, 415.0]
