"""bench.queueing: peers come out at their stored figures, the simulations keep their rules, ours keeps its targets."""

import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from bench.queueing import elasticflow, hierarchy, loans, muri, oscillation, shockwave
from bench.queueing.__main__ import main
from bench.queueing.dynamic_jobs import BatchRule, DynamicJob, JobProgress
from bench.queueing.elastic_jobs import (
    DecisionCosts,
    ElasticJob,
    ElasticSimulation,
    FreeProfile,
    PlanOrder,
    plan_jobs,
)
from bench.queueing.elasticflow_plans import GpuPlan, PlannedWork, Steps, plan_work, shift_profile
from bench.queueing.gang_estimates import FastestEnds, LearnedIndex, choose_set, expected_rest_s, gittins_indices
from bench.queueing.gang_policies import LeastAttained, ShortestRemaining, minimise_ratio
from bench.queueing.gangs import GangSimulation, GangTrace, NodePacking, RestartCost
from bench.queueing.round_policies import (
    AssignToQueues,
    LeastLaxity,
    ShareFinishTimes,
    SharesInRounds,
    centre_shares,
    share_equally,
    share_max_min,
)
from bench.queueing.rounds import RoundSimulation, replay_schedule
from bench.queueing.virtual_clusters import QueueOrder, TenantJob, TenantRules, TenantSimulation
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import read_csv

from eelgrid_protos.messages import PreemptionReclaim, QueuePreemption

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def needs_data(name):
    """Skips a test without a public data set, and says which."""
    return pytest.mark.skipif(not (DATA / name).is_dir(), reason=f"needs {name} in EELGRID_DATA")


def build_trace(*jobs, restart_s=0.0):
    """A trace of (GPUs, submission, run time)."""
    gpus, submit_s, run_s = (np.array(column) for column in zip(*jobs, strict=True))
    ones, count = np.ones(len(jobs)), len(jobs)
    restarts = np.full(count, restart_s)
    return GangTrace(
        "t", np.arange(count), gpus, submit_s.astype(float), ones, run_s.astype(float), restarts, ("m",) * count
    )


def test_a_shorter_job_preempts_and_the_longer_one_resumes_where_it_was():
    run = GangSimulation(build_trace((8, 0, 100), (8, 10, 20)), ShortestRemaining(by_gpus=False), nodes=1).run()
    assert run.end_s.tolist() == [120.0, 30.0]
    assert run.starts == 3


def test_a_restart_costs_its_overhead_when_a_job_starts_or_resumes():
    trace = build_trace((8, 0, 100), (8, 10, 20), restart_s=5.0)
    simulation = GangSimulation(trace, ShortestRemaining(by_gpus=False), nodes=1, restart=RestartCost.ON_START)
    # 5 s are lost at 0, at 10 and at 35; the first job has 95 s left when it resumes.
    assert simulation.run().end_s.tolist() == [135.0, 35.0]


def test_with_rounds_what_arrives_and_ends_within_one_is_decided_at_its_end():
    trace = build_trace((8, 0, 100), (8, 10, 20))
    run = GangSimulation(trace, ShortestRemaining(by_gpus=False), nodes=1, round_s=60.0).run()
    assert run.start_s.tolist() == [0.0, 60.0]
    # The first job ran 60 s; the GPUs idle from 80 to 120.
    assert run.end_s.tolist() == [160.0, 80.0]


def test_a_large_gang_takes_idle_nodes_and_the_rest_on_one():
    packing = NodePacking(3, 8, counts_only=False)
    assert packing.place(1)
    assert packing.place(12)
    assert packing.free == [3, 0, 8]
    assert not packing.place(16)
    assert packing.free == [3, 0, 8]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_the_chosen_set_is_the_best_that_fits(jobs, total):
    gpus, values = [one[0] for one in jobs], np.array([float(one[1]) for one in jobs])
    best = max(
        (
            values[list(places)].sum()
            for size in range(1, len(jobs) + 1)
            for places in combinations(range(len(jobs)), size)
            if sum(gpus[place] for place in places) <= total
        ),
        default=0.0,
    )
    chosen = choose_set(gpus, values, total)
    assert sum(gpus[place] for place in chosen) <= total
    assert values[chosen].sum() == best


def test_a_falling_hazard_prefers_young_jobs_and_a_rising_one_old_ones():
    falling, rising = gittins_indices(0.001 * 0.5 ** np.arange(12)), gittins_indices(1e-7 * 2.0 ** np.arange(12))
    assert (np.diff(falling) < 0.0).all()
    assert (np.diff(rising) > 0.0).all()


def test_the_expected_rest_is_the_estimate_at_first_and_grows_for_overdue_jobs():
    estimates = np.full(3, 100.0)
    assert expected_rest_s(estimates, np.array([0.0, 40.0, 99.0]), 0.0).tolist() == [100.0, 60.0, 1.0]
    rest = expected_rest_s(estimates, np.array([1e-6, 100.0, 10_000.0]), 0.5)
    assert rest[0] == pytest.approx(100.0 * np.exp(0.125), rel=1e-3)
    assert 0.0 < rest[1] < rest[0]
    assert rest[2] > rest[0]


def test_least_attained_service_moves_a_job_down_and_lets_a_new_one_pass():
    trace = build_trace((8, 0, 2000), (8, 500, 100))
    run = GangSimulation(trace, LeastAttained((800.0,), counts_only=False), nodes=1).run()
    assert run.end_s.tolist() == [2100.0, 600.0]


def test_shares_that_minimise_the_largest_ratio_use_all_gpus():
    shares = minimise_ratio(
        np.zeros(3), np.array([10.0, 10.0, 40.0]), np.array([10.0, 10.0, 10.0]), np.array([4, 4, 4]), 6
    )
    assert (4 * shares).sum() == pytest.approx(6.0, rel=1e-6)
    assert shares[2] == pytest.approx(4.0 * shares[0])


@pytest.mark.parametrize("policy", [FastestEnds, LearnedIndex, lambda: ShortestRemaining(by_gpus=True)])
def test_no_policy_undercuts_the_bound_of_the_average(policy):
    draws = np.random.default_rng(7)
    jobs = [
        (int(draws.choice([1, 4, 8, 16])), 50 * number, float(draws.exponential(900.0)) + 1.0) for number in range(60)
    ]
    trace = build_trace(*jobs)
    run = GangSimulation(trace, policy(), nodes=2).run()
    assert run.average_jct_s >= muri.bound_average_jct_s(trace, 16)


@needs_data("muri")
@pytest.mark.parametrize(
    ("policy", "make"),
    [
        ("srtf", lambda: ShortestRemaining(by_gpus=False)),
        ("srsf", lambda: ShortestRemaining(by_gpus=True)),
        ("tiresias", lambda: LeastAttained(counts_only=True)),
    ],
)
def test_muris_simulated_averages_come_out_digit_by_digit(policy, make):
    stored = next(
        row
        for row in read_csv(DATA / "muri" / "published_sim.csv")
        if (row["trace"], row["policy"]) == ("trace1", policy)
    )
    trace = muri.read_trace(DATA / "muri", "trace1", slowdown=1.015)
    run = GangSimulation(trace, make(), restart=RestartCost.EVERY_EVENT).run()
    assert run.average_jct_s == pytest.approx(float(stored["avg_jct_s"]), rel=1e-9)
    assert run.makespan_s == pytest.approx(float(stored["makespan_s"]), rel=1e-9)
    assert run.p99_jct_s == pytest.approx(float(stored["p99_jct_s"]), rel=1e-9)


@needs_data("muri")
def test_muris_testbed_comes_out_with_rounds_and_the_measured_service():
    rows = [row for row in muri.run_testbed(DATA / "muri") if row.metric == "avg_jct_s"]
    errors = {row.policy: row.ours / row.published - 1.0 for row in rows}
    assert abs(errors["srtf"]) < 1e-3
    assert abs(errors["srsf"]) < 1e-3
    assert abs(errors["tiresias"]) < 1e-5
    assert abs(errors["themis"]) < 0.01


def build_dynamic(index, epochs=3, *, arrival_s=0.0, gpus=1, rule=BatchRule.STATIC, planned=(), samples=100, model=""):
    """A job with a step a second at a batch size of 1 and at 2, so that an epoch takes half the time at 2."""
    return DynamicJob(
        index=index,
        arrival_s=arrival_s,
        gpus=gpus,
        model=model,
        rule=rule,
        batch_size=1,
        steps=epochs * samples,
        samples=samples,
        epochs_s=np.full(epochs, float(samples)),
        planned=planned or (1,) * epochs,
        rates={1: 1.0, 2: 1.0},
    )


def test_a_round_after_a_pause_loses_its_first_20_seconds():
    jobs = [build_dynamic(0), build_dynamic(1, 9)]
    other = range(9)
    assert replay_schedule(jobs, [[0, 1, 2], other]).end_s.tolist() == [300.0, 900.0]
    # 120 + 100 steps, then the rest; the pause costs nothing where less than a round is left.
    assert replay_schedule(jobs, [[0, 2, 3], other]).end_s.tolist() == [3 * 120.0 + 80.0, 900.0]
    # A first start counts as a pause, but not in the very first round.
    assert replay_schedule(jobs, [[1, 2, 3], other]).end_s.tolist() == [3 * 120.0 + 80.0, 900.0]


def test_a_round_ends_when_the_last_of_its_jobs_is_through():
    jobs = [build_dynamic(0, 1, samples=70), build_dynamic(1, 1, samples=50, arrival_s=10.0)]
    assert replay_schedule(jobs, [[0], [1]]).end_s.tolist() == [70.0, 120.0]


def test_a_batch_size_changes_a_round_after_it_was_requested_and_an_epoch_begun_counts_as_done():
    job = build_dynamic(0, 10, rule=BatchRule.GNS, planned=(1, 1, *[2] * 8), model="Recommendation")
    progress = JobProgress(job)
    assert not progress.end_round(120, 120.0)
    progress.request_batch_size()
    assert (progress.requested, progress.batch_size) == (2, 1)
    assert not progress.end_round(120, 120.0)
    # 240 steps of 100 an epoch are three epochs begun, of 50 steps each from now on.
    assert (progress.batch_size, progress.steps, progress.steps_run) == (2, 500, 150)


def test_jobs_that_do_not_fit_together_and_a_round_without_one_are_refused():
    jobs = [build_dynamic(number, gpus=20) for number in range(2)]
    with pytest.raises(ValueError, match="more than 32 GPUs"):
        RoundSimulation(jobs, lambda state: state.active).run()
    with pytest.raises(ValueError, match="no job runs in round 0"):
        RoundSimulation(jobs, lambda state: []).run()


def test_the_centre_of_shares_keeps_to_the_gpus_and_to_what_each_job_needs_at_least():
    least, gpus = np.array([0.5, 0.25, 1.0, 0.1]), np.array([1.0, 2.0, 4.0, 32.0])
    shares = centre_shares(least, gpus)
    assert (shares >= least).all()
    assert (shares <= 1.0).all()
    assert shares[2] == 1.0
    assert (gpus * shares).sum() <= 32.0
    left = 32.0 - (gpus * shares).sum()
    least, gpus, shares = least[[0, 1, 3]], gpus[[0, 1, 3]], shares[[0, 1, 3]]
    assert 1 / (shares - least) - 1 / (1 - shares) == pytest.approx(gpus / left, rel=1e-6)


@needs_data("shockwave")
def test_shockwaves_seven_schedules_played_again_come_out_job_by_job():
    jobs = shockwave.read_jobs(DATA / "shockwave")
    table = [row for row in read_csv(DATA / "shockwave" / "results_jobs.csv") if row["source"] == "canonical"]
    for policy in shockwave.PLAYED:
        stored = [float(row["jct_s"]) for row in table if row["policy"] == policy]
        run = replay_schedule(jobs, shockwave.read_schedule(DATA / "shockwave", policy, len(jobs)))
        assert run.jct_s.tolist() == pytest.approx(stored, abs=0.01)


@needs_data("shockwave")
@pytest.mark.parametrize(
    ("policy", "shares", "within"),
    [
        ("gandiva_fair", share_equally, 1e-6),
        ("gavel_max_min", share_max_min, 0.0002),
        ("themis_ftf", ShareFinishTimes(), 0.005),
        ("allox", AssignToQueues(), 0.005),
    ],
)
def test_decisions_of_peers_taken_again_come_out_at_their_figures(policy, shares, within):
    stored = next(
        row
        for row in read_csv(DATA / "shockwave" / "summary.csv")
        if (row["source"], row["policy"]) == ("canonical", policy)
    )
    jobs = shockwave.read_jobs(DATA / "shockwave")
    found = RoundSimulation(jobs, SharesInRounds(shares)).run().figures()
    assert found["avg_jct_s"] == pytest.approx(float(stored["avg_jct_s"]), rel=within)
    assert found["makespan_s"] == pytest.approx(float(stored["makespan_s"]), rel=within)


@needs_data("shockwave")
def test_least_laxity_is_fair_and_short_without_knowing_the_epochs_to_come():
    jobs = shockwave.read_jobs(DATA / "shockwave")
    found = RoundSimulation(jobs, LeastLaxity(knows=False)).run().figures()
    assert found["worst_ftf"] <= shockwave.WORST_FTF_MOST
    assert found["unfair_pct"] <= shockwave.UNFAIR_PCT_MOST
    assert found["makespan_s"] <= shockwave.MAKESPAN_S_MOST


def build_elastic(index, submit_s, deadline_s, iterations, rates=(1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0)):
    return ElasticJob(index, submit_s, deadline_s, iterations, rates)


def test_a_plan_reserves_the_least_gpus_that_meet_the_deadline():
    profile = FreeProfile(0.0, 4)
    assert profile.reserve(build_elastic(0, 0.0, 600.0, 1000.0)) == 2
    assert profile.times_s == [0.0, 540.0]
    assert profile.free == [2, 4]
    assert profile.reserve(build_elastic(1, 0.0, 600.0, 2000.0)) is None
    assert profile.free == [2, 4]


def test_a_job_that_no_order_can_plan_is_declined_and_the_others_meet_their_deadlines():
    jobs = [build_elastic(number, 0.0, 600.0, 1000.0) for number in range(3)]
    assert len(plan_jobs(jobs, 0.0, 4).failed) == 1
    simulation = ElasticSimulation(jobs, 4, (PlanOrder.DEADLINE,))
    assert simulation.run() == pytest.approx(2 / 3)
    assert simulation.admitted == 2


def test_elasticflow_plans_from_the_deadline_backwards_with_the_next_smaller_number_before():
    work = PlannedWork(900.0, 600.0, (1.0, 2.0, 3.0), 4)
    plan = plan_work(Steps((0.0, 100.0), (8, 4)), work, 60.0)
    # One GPU makes 600; two from 100 s on make 1,000.
    assert plan == GpuPlan(Steps((0.0, 100.0), (1, 2)), 520.0, 500.0)
    assert plan_work(Steps((0.0, 100.0), (8, 1)), work, 60.0).done_s > work.deadline_s
    # With 4 GPUs until the profile changes, one is enough for the rest.
    assert plan_work(Steps((0.0, 100.0), (8, 4)), work._replace(left=700.0), 60.0, 4).steps == Steps(
        (0.0, 100.0), (4, 1)
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8), st.integers(0, 64)), max_size=5),
    st.floats(1.0, 5000.0),
    st.integers(0, 900),
)
def test_a_plan_never_takes_more_than_is_free_and_leaves_the_profile_when_given_back(held, left, deadline_s):
    profile = Steps((0.0,), (64,))
    for begin, slots, gpus in held:
        steps = Steps((0.0, 60.0 * begin), (0, gpus)) if begin else Steps((0.0,), (gpus,))
        taken = shift_profile(profile, GpuPlan(steps, 60.0 * (begin + slots), 0.0), -1)
        profile = taken if min(taken.gpus) >= 0 else profile
    plan = plan_work(profile, PlannedWork(left, float(deadline_s), (1.0, 1.9, 3.5, 6.0), 8), 60.0)
    rest = shift_profile(profile, plan, -1)
    assert min(rest.gpus) >= 0
    assert shift_profile(rest, plan, 1) == profile
    assert plan.end_s >= plan.done_s


def test_a_decision_costs_more_on_gpus_that_no_job_of_that_size_held_until_groups_are_forgotten():
    costs = DecisionCosts(64, 2.0)
    assert costs.charge([2, 1, 0]) == [6.0, 4.0, 0.0]
    assert costs.charge([2, 1]) == [2.0, 2.0]
    assert costs.charge([2, 2]) == [2.0, 2.0 + 27.0 + 4.0]
    assert costs.charge([2]) == [6.0]


@needs_data("elasticflow")
@pytest.mark.parametrize(
    ("trace", "policy", "published", "simulated"),
    [
        ("testbed195", "EDF", 0.0872, 17 / 195),
        ("fig8a_t4", "EDF", 0.118, elasticflow.SIMULATED["fig8a_t4", "EDF"]),
        ("fig8a_t4", "ElasticFlow", 0.728, elasticflow.SIMULATED["fig8a_t4", "ElasticFlow"]),
    ],
)
def test_edf_and_elasticflow_come_out_at_their_published_shares(trace, policy, published, simulated):
    share = elasticflow.build_simulation(DATA / "elasticflow", trace, policy).run()
    assert share == pytest.approx(published, abs=5e-4)
    assert share == simulated


@needs_data("elasticflow")
def test_ours_meets_more_deadlines_than_elasticflow():
    assert elasticflow.build_simulation(DATA / "elasticflow", "fig8a_t4", "eelgrid").run() >= 0.83


def play_tenants(rules, *jobs, gpus=8, nominal=None):
    listed = [TenantJob(*job) for job in jobs]
    return TenantSimulation(listed, gpus, nominal or {"a": gpus // 2, "b": gpus // 2}, rules).run()


def test_backfill_passes_the_head_only_with_what_does_not_delay_it():
    jobs = [(0.0, 100.0, 6, "a"), (1.0, 50.0, 8, "a"), (2.0, 90.0, 2, "b"), (3.0, 200.0, 2, "b")]
    rules = TenantRules(QueueOrder.SUBMISSION, quotas=False, blocks=True)
    assert play_tenants(rules, *jobs).ends_s == [100.0, 150.0, 240.0, 350.0]
    easy = TenantRules(QueueOrder.SUBMISSION, quotas=False, backfill=True, knows_run_times=True)
    assert play_tenants(easy, *jobs).ends_s == [100.0, 150.0, 92.0, 350.0]


def test_a_queue_within_its_quota_takes_back_what_another_borrowed():
    jobs = [(0.0, 100.0, 2, "a"), (0.0, 100.0, 2, "a"), (10.0, 100.0, 4, "a"), (50.0, 100.0, 4, "b")]
    run = play_tenants(TenantRules(QueueOrder.SHARE, reclaim_after_s=0.0), *jobs)
    # The job of 4 GPUs started last, ran 40 s for nothing, and starts again when the first two end.
    assert run.ends_s == [100.0, 100.0, 200.0, 150.0]
    assert (run.preemptions, run.lost_gpu_s) == (1, 160.0)
    assert play_tenants(TenantRules(QueueOrder.SHARE, reclaim_after_s=20.0), *jobs).lost_gpu_s == 4 * 60.0
    assert play_tenants(TenantRules(QueueOrder.SHARE), *jobs).ends_s == [100.0, 100.0, 110.0, 200.0]


def test_reclaim_by_past_use_gives_each_queue_one_half_and_by_present_share_one_has_all():
    past = QueuePreemption(reclaim=PreemptionReclaim.PAST_USE, horizon_s=480.0)
    run = oscillation.play(oscillation.build_core(16, 128.0, past, 16), 640)
    assert run.shares[-1] == pytest.approx(0.5, abs=0.01)
    assert len(run.changes) == run.preemptions
    turns = [after - before for before, after in zip(run.changes, run.changes[1:], strict=False)]
    assert sum(turns) / len(turns) == pytest.approx(oscillation.compute_turn(128.0, 8.0), abs=1.0)
    present = QueuePreemption(reclaim=PreemptionReclaim.FAIR_SHARE)
    assert oscillation.play(oscillation.build_core(16, 128.0, present, 16), 64).shares[-1] == 1.0


def test_the_shares_of_a_tree_are_those_that_gavel_prints():
    shares = hierarchy.fill_tree(9.0, (1.0, 2.0, 3.0), [(1.0, 2.0) * 3] * 3)
    assert [[round(share, 3) for share in entity] for entity in shares] == [list(one) for one in hierarchy.PUBLISHED]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)), min_size=1, max_size=6),
    st.floats(0.1, 40.0),
)
def test_what_is_below_its_limit_has_the_level_of_all_others(entries, amount):
    weights, limits = [one[0] for one in entries], [one[1] for one in entries]
    shares = hierarchy.fill_level(amount, weights, limits)
    assert sum(shares) == pytest.approx(min(amount, sum(limits)))
    level = max((share / weight for share, weight in zip(shares, weights, strict=True)), default=0.0)
    for share, weight, limit in zip(shares, weights, limits, strict=True):
        assert share == pytest.approx(min(limit, level * weight))


@needs_data("pai")
@needs_data("kai_kueue")
def test_the_command_writes_the_summary_and_a_picture_of_each_set(tmp_path, capsys):
    assert main(["pai", "oscillation", "--quick", "--data", str(DATA), "--out", str(tmp_path)]) == 0
    assert "MISSED" not in capsys.readouterr().out
    rows = read_csv(tmp_path / "summary.csv")
    assert [*rows[0]] == ["set", "policy", "metric", "ours", "published", "bound", "seeds"]
    assert {row["set"] for row in rows} == {"pai", "kai oscillation"}
    assert {path.name for path in tmp_path.glob("*.png")} == {"pai.png", "oscillation.png"}


def test_a_missing_data_set_is_refused_before_anything_runs(tmp_path, capsys):
    assert main(["muri", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "EELGRID_DATA" in capsys.readouterr().err


@needs_data("philly")
@needs_data("azure_llm_2023")
def test_what_services_lend_to_jobs_returns_when_they_need_it():
    result = loans.run_set(DATA / "philly", quick=True)
    assert all(is_met for _, is_met in result.targets)
    by = {(row.policy, row.metric): row for row in result.rows}
    alone, lent, reclaimed = loans.POLICIES
    # Without reclaim services lack what jobs hold; with it, jobs lose a little work and wait far less than without loans.
    assert by[lent, "services_short"].ours > 0.0
    assert by[alone, "services_short"].ours == by[alone, "preemptions"].ours == 0.0
    assert by[reclaimed, "wait_mean_s"].ours < by[alone, "wait_mean_s"].ours
    assert by[reclaimed, "preemptions"].ours > 0.0
    for row in result.rows:
        if row.bound is not None:
            is_least = row.metric in {
                "wait_mean_s",
                "completion_mean_s",
                "services_short",
                "longest_lack_s",
                "loss_over_least",
            }
            assert row.ours >= row.bound if is_least else row.ours <= row.bound
    # Work that would keep four GPUs busy for the second of two looks is at most that of the fleet.
    needs = np.ones((len(loans.SERVICES), 2), np.int64)
    held = sum(loans.SERVICES)
    jobs = [loans.LentJob(loans.LOOK_S, 2.0 * loans.LOOK_S, 4)]
    assert loans.bound_use(jobs, needs, nodes=2) == pytest.approx((2 * held + 8) / 64)
