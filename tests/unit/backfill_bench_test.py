"""The benchmark of backfill on a trace: jobs as nodes can run them, and what it says of waits and promises."""

import random

import pytest
from bench.backfill_trace import (
    MODES,
    TraceJob,
    TraceSimulation,
    build_request,
    choose_nodes_count,
    overstate_jobs,
    read_jobs,
    summarize_run,
)
from bench.runner import Unusable, default_data

from eelgrid_protos.messages import BackfillMode


@pytest.mark.parametrize(
    ("gpus", "replicas", "each"), [(1, 1, 1), (8, 1, 8), (12, 2, 6), (16, 2, 8), (24, 3, 8), (128, 16, 8)]
)
def test_a_job_of_more_gpus_than_a_node_has_is_a_gang(gpus, replicas, each):
    spec = build_request(0, TraceJob(0, 60, gpus)).spec
    assert (spec.replicas, spec.request.gpu_count) == (replicas, each)


def play(jobs, nodes):
    runs = {mode: TraceSimulation(jobs, nodes, mode).play() for mode in MODES}
    for mode, run in runs.items():
        assert set(run.starts_s) == set(range(len(jobs)))
        assert (run.later, run.late) == (0, 0), mode
        assert (run.promised > 0) == (mode is not BackfillMode.NONE)
    return {mode: summarize_run(jobs, nodes, run) for mode, run in runs.items()}


def test_with_backfill_large_jobs_wait_for_less_and_no_promise_moves():
    chance = random.Random(3)
    jobs = [
        TraceJob(20 * number, chance.randrange(100, 2000), chance.choice((1, 1, 1, 2, 4, 8, 16)))
        for number in range(120)
    ]
    found = play(jobs, choose_nodes_count(jobs))
    assert found[BackfillMode.NONE]["wait_most_s"] > found[BackfillMode.EASY]["wait_most_s"]
    assert 0.5 < found[BackfillMode.EASY]["utilisation"] <= 1.0


def test_what_jobs_report_of_their_progress_mends_what_their_users_overstate():
    chance = random.Random(4)
    jobs = [
        TraceJob(20 * number, chance.randrange(100, 2000), chance.choice((1, 1, 1, 2, 4, 8, 16)))
        for number in range(80)
    ]
    nodes, stated = choose_nodes_count(jobs), overstate_jobs(jobs, 5.0)
    assert 3.0 < sum(job.stated_s for job in stated) / sum(job.run_s for job in jobs) < 7.0
    figures = []
    for reports in (False, True):
        run = TraceSimulation(stated, nodes, BackfillMode.EASY, reports=reports).play()
        assert set(run.starts_s) == set(range(len(jobs)))
        figures.append(summarize_run(stated, nodes, run)["first_promise_off_s"])
    before_s, after_s = figures
    assert after_s < 0.5 * before_s


def test_a_part_of_philly():
    if not (default_data() / "philly" / "philly.csv").is_file():
        pytest.skip("EELGRID_DATA has no philly")
    jobs = read_jobs(default_data() / "philly", 80)
    play(jobs, choose_nodes_count(jobs))


def test_without_the_data_the_benchmark_says_what_is_missing(tmp_path):
    with pytest.raises(Unusable, match="--data"):
        read_jobs(tmp_path, 10)
