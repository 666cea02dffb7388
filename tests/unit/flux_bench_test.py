"""The benchmark of Flux makes spans and a rate of the events of jobs, and takes no job for run that has not."""

import pytest
from bench.flux import FluxRound


def job(submit_s, alloc_s, clean_s):
    return {"submit": submit_s, "alloc": alloc_s, "start": alloc_s, "finish": clean_s, "clean": clean_s}


def test_events_of_jobs_become_spans_and_a_rate():
    many = (job(10.0, 10.5, 11.0), job(10.25, 11.0, 14.0))
    found = FluxRound(is_ours=True, singles=(job(1.0, 1.5, 2.0), job(3.0, 3.25, 4.0)), many=many)
    assert found.list_starts() == [0.5, 0.25]
    assert found.rate_hz == 0.5


def test_a_job_that_has_not_run_ends_the_benchmark():
    denied = {"submit": 1.0, "exception": 1.5, "clean": 2.0}
    with pytest.raises(AssertionError, match="a job has not run"):
        FluxRound(is_ours=False, singles=(), many=(job(1.0, 1.5, 2.0), denied))
