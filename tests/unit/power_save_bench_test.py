"""The benchmark of sleeping nodes: jobs find the nodes that they would, wait for those that sleep, and the bill adds up."""

from bench.power_save import POLICIES, PoolReplay, TraceJob, count_nodes, play_trace

from eelgrid_controller.objectives.power.power_save import SleepCosts

COSTS = SleepCosts(idle_w=1000.0, sleep_w=0.0, transition_j=360_000.0, wake_s=300.0)
EVEN = next(policy for policy in POLICIES if policy.name == "break-even")


def test_a_job_waits_for_the_node_that_it_wakes_and_others_share_that_wait():
    jobs = [TraceJob(0.0, 100.0, 8.0), TraceJob(2000.0, 100.0, 4.0), TraceJob(2100.0, 100.0, 4.0)]
    replay = PoolReplay(jobs, COSTS, EVEN, 1, 60.0)
    replay.run()
    assert replay.waits_s == [0.0, 300.0, 200.0]


def test_a_node_that_is_falling_asleep_must_be_asleep_before_it_wakes():
    jobs = [TraceJob(0.0, 100.0, 8.0), TraceJob(100.0 + 360.0 + 20.0, 100.0, 8.0)]
    replay = PoolReplay(jobs, COSTS, EVEN, 1, 60.0)
    replay.run()
    assert replay.waits_s == [0.0, 340.0]


def test_small_jobs_share_nodes_and_the_peak_says_how_many_there_are():
    jobs = [TraceJob(float(number), 1000.0, 2.0) for number in range(9)] + [TraceJob(20.0, 10.0, 16.0)]
    assert count_nodes(jobs, COSTS) == 5


def test_every_policy_has_the_same_optimum_and_none_spends_less():
    jobs = [TraceJob(500.0 * number, 300.0 + 400.0 * (number % 3), 3.0 + 5.0 * (number % 2)) for number in range(60)]
    rows = play_trace("made", jobs, COSTS, 60.0)
    assert len({round(row["optimum_kwh"], 6) for row in rows}) == 1
    assert all(row["spent_kwh"] + row["warm_kwh"] >= row["optimum_kwh"] - 1e-9 for row in rows)
    by = {row["policy"]: row for row in rows}
    assert by["break-even"]["ratio"] <= 2.0
    assert by["always on"]["waited"] == 0.0
