"""Elastic jobs against every choice there is, and what growing must never do."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.objectives.elastic import GrowableJob, InvalidElasticJob, WorkerAllocation, allocate_workers

RATES = st.dictionaries(st.integers(1, 6), st.floats(0.1, 50.0), min_size=1, max_size=4)
JOB = st.builds(
    GrowableJob,
    name=st.just("job"),
    throughput_hz=RATES,
    gpus=st.integers(1, 3),
    now=st.integers(0, 6),
    weight=st.floats(0.1, 5.0),
    power_w=st.dictionaries(st.integers(1, 6), st.floats(0.0, 900.0), max_size=6),
    restart_s=st.floats(0.0, 600.0),
)
JOBS = st.lists(JOB, min_size=1, max_size=4).map(
    lambda jobs: [replace(job, name=f"job-{at}") for at, job in enumerate(jobs)]
)


def worth(job: GrowableJob, workers: int, price_per_w: float, horizon_s: float) -> float:
    """The docstring's formula, once more and by itself."""
    if workers == 0:
        return -1e6 * job.weight if job.now else 0.0
    most_hz = max(job.throughput_hz.values())
    lost = 0.0
    if job.now and workers != job.now and job.now in job.throughput_hz:
        lost = job.throughput_hz[job.now] * job.restart_s / horizon_s
    kept = job.weight * (job.throughput_hz[workers] - lost) / most_hz
    return kept - price_per_w * job.power_w.get(workers, 0.0)


def of_every_choice(jobs: list[GrowableJob], gpus: int, price_per_w: float, horizon_s: float) -> float:
    return max(
        sum(worth(job, workers, price_per_w, horizon_s) for job, workers in zip(jobs, choice, strict=True))
        for choice in product(*([0, *job.throughput_hz] for job in jobs))
        if sum(job.gpus * workers for job, workers in zip(jobs, choice, strict=True)) <= gpus
    )


@settings(max_examples=300)
@given(JOBS, st.integers(0, 40), st.floats(0.0, 0.01), st.floats(60.0, 7200.0))
def test_no_choice_is_worth_more(jobs, gpus, price_per_w, horizon_s):
    found = allocate_workers(jobs, gpus, price_per_w=price_per_w, horizon_s=horizon_s)
    assert [one.name for one in found] == [job.name for job in jobs]
    assert sum(job.gpus * one.workers for job, one in zip(jobs, found, strict=True)) <= gpus
    for job, one in zip(jobs, found, strict=True):
        assert one.workers == 0 or one.workers in job.throughput_hz
        assert one.value == pytest.approx(worth(job, one.workers, price_per_w, horizon_s))
    best = of_every_choice(jobs, gpus, price_per_w, horizon_s)
    assert sum(one.value for one in found) == pytest.approx(best, abs=1e-6)


@given(JOBS, st.integers(0, 30))
def test_more_gpus_are_never_worth_less(jobs, gpus):
    fewer, more = (sum(one.value for one in allocate_workers(jobs, count)) for count in (gpus, gpus + 1))
    assert more >= fewer - 1e-6


@given(JOBS)
def test_with_room_for_all_nothing_that_runs_is_stopped_and_nothing_waits(jobs):
    gpus = sum(job.gpus * max(job.throughput_hz) for job in jobs)
    assert all(one.workers > 0 for one in allocate_workers(jobs, gpus))


def linear(name: str, most: int, **changes) -> GrowableJob:
    return GrowableJob(name=name, throughput_hz={workers: float(workers) for workers in range(1, most + 1)}, **changes)


def test_a_gain_that_does_not_pay_for_the_restart_moves_nothing():
    job = GrowableJob(name="a", throughput_hz={4: 10.0, 5: 10.4}, now=4, restart_s=300.0)
    # 4 % more for an hour is 144 s of work; a restart costs 300.
    assert allocate_workers([job], 8)[0].workers == 4
    assert allocate_workers([replace(job, restart_s=60.0)], 8)[0] == WorkerAllocation(
        "a", 5, pytest.approx(1.0 - 10.0 / 10.4 / 60), 10.4 - 10.0
    )


def test_the_ninth_gpu_goes_where_it_adds_most():
    steep, flat = linear("steep", 8), GrowableJob(name="flat", throughput_hz={1: 1.0, 2: 1.05, 4: 1.1})
    assert [one.workers for one in allocate_workers([steep, flat], 9)] == [8, 1]
    assert [one.workers for one in allocate_workers([steep, flat], 12)] == [8, 4]


def test_watts_have_a_price():
    job = linear("a", 4, power_w={1: 300.0, 2: 600.0, 3: 900.0, 4: 1200.0})
    assert allocate_workers([job], 4, price_per_w=1e-4)[0].workers == 4
    # A quarter of the throughput costs 0.3 at this price.
    assert allocate_workers([job], 4, price_per_w=1e-3)[0].workers == 0
    assert allocate_workers([replace(job, now=4)], 4, price_per_w=1e-3)[0].workers == 1


def test_what_runs_is_stopped_only_where_not_even_the_least_fit():
    jobs = [linear("a", 2, gpus=4, now=1), linear("b", 2, gpus=4, now=2, weight=2.0), linear("c", 1, gpus=4)]
    assert [one.workers for one in allocate_workers(jobs, 8)] == [1, 1, 0]
    assert [one.workers for one in allocate_workers(jobs, 4)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"throughput_hz": {}}, "throughput_hz"),
        ({"throughput_hz": {0: 1.0}}, "throughput_hz"),
        ({"throughput_hz": {1: float("nan")}}, "throughput_hz"),
        ({"gpus": 0}, "gpus"),
        ({"weight": 0.0}, "gpus"),
        ({"power_w": {1: -1.0}}, "power_w"),
        ({"restart_s": float("inf")}, "power_w"),
    ],
)
def test_numbers_that_say_nothing(change, field):
    with pytest.raises(InvalidElasticJob) as caught:
        linear("a", 2, **change) if "throughput_hz" not in change else GrowableJob(name="a", **change)
    assert caught.value.field == field


def test_more_than_can_be_searched():
    with pytest.raises(InvalidElasticJob, match="at most"):
        allocate_workers([linear("a", 2)], 1_000_000)
    with pytest.raises(InvalidElasticJob, match="horizon_s"):
        allocate_workers([linear("a", 2)], 4, horizon_s=0.0)
