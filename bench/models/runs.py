"""One method on one split: fitted, told, asked, timed.

Owns the way from a split to predictions, the same for every method. Must not know files or reports.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.models.measure import Predicted
from bench.models.peers import PEERS, table
from bench.models.splits import Split
from bench.models.tables import Cell, DataSet, Told
from eelgrid_controller.profiles.learning import learn_family
from eelgrid_controller.profiles.points import (
    POWER,
    THROUGHPUT,
    ProfileEstimate,
    ProfilePrediction,
    latency_quantile_of,
)
from eelgrid_controller.profiles.prediction import ProfilePredictor
from eelgrid_controller.profiles.store import ProfiledWorkload, ProfileReading, ProfileStore
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import load_catalogue

__all__ = ["OURS", "Job", "Result", "run", "store"]

OURS = "eelgrid"


class Job(NamedTuple):
    """What to run."""

    data_set: DataSet
    splits: tuple[Split, ...]  # that share what is learned
    method: str
    seed: int


class Result(NamedTuple):
    """Of one split."""

    data_set: str
    split: str
    method: str
    seed: int
    predicted: Mapping[str, Predicted]  # by the quantity's name in the report
    fit_s: float
    answer_s: float  # for each configuration and quantity
    unanswered: Mapping[str, int]  # by the quantity's name: asked, and refused with a reason


def store(data_set: DataSet, cells: Sequence[Cell]) -> ProfileStore:
    """The store that was told these cells."""
    found = ProfileStore()
    for workload in sorted({cell.point.workload for cell in data_set.cells}):
        found = found.with_workload(ProfiledWorkload(workload, data_set.name, data_set.traits.get(workload, {})))
    return told(found, cells)


def told(profiles: ProfileStore, cells: Sequence[Cell]) -> ProfileStore:
    """The store that was told more; a second each."""
    for second, cell in enumerate(cells):
        profiles = profiles.with_reading(ProfileReading(cell.point, float(second), noise=cell.noise))
    return profiles


def _truth(cell: Cell, what: Told) -> float:
    """In the unit of profiles."""
    quantile = latency_quantile_of(what.quantity)
    value = cell.point.power_w if what.quantity == POWER else cell.point.throughput_hz
    value = value if quantile is None else cell.point.latency_s[quantile]
    assert value is not None
    return value


def _answer(prediction: ProfilePrediction, what: Told) -> ProfileEstimate | None:
    quantile = latency_quantile_of(what.quantity)
    if quantile is not None:
        return prediction.latency_s.get(quantile)
    return {POWER: prediction.power_w, THROUGHPUT: prediction.throughput_hz}[what.quantity]


def _predicted(what: Told, truth: Floats, median: Floats, lower: Floats, upper: Floats) -> Predicted:
    """In the unit of the report."""
    if what.inverse:
        return Predicted(1.0 / truth, 1.0 / median, 1.0 / upper, 1.0 / lower)
    return Predicted(truth, median, lower, upper)


def run(job: Job) -> list[Result]:
    """All splits of a job."""
    return list(_ours(job) if job.method == OURS else _peer(job))


def _ours(job: Job) -> Iterator[Result]:
    data_set, catalogue = job.data_set, load_catalogue()
    begin = time.perf_counter()
    profiles = store(data_set, job.splits[0].learned)
    learned = {data_set.name: learn_family(profiles, data_set.name, catalogue, job.seed)}
    fit_s = time.perf_counter() - begin
    for split in job.splits:
        predictor = ProfilePredictor(told(profiles, split.told), learned, catalogue)
        begin = time.perf_counter()
        answers: list[tuple[Cell, ProfilePrediction]] = []
        for workload in sorted({cell.point.workload for cell in split.asked}):
            mine = [cell for cell in split.asked if cell.point.workload == workload]
            answers += zip(mine, predictor.predict(workload, [one.point.configuration for one in mine]), strict=True)
        answer_s = (time.perf_counter() - begin) / (len(answers) * len(data_set.told))
        found, unanswered = {}, {}
        for what in data_set.told:
            given = [(_truth(cell, what), one) for cell, told_of in answers if (one := _answer(told_of, what))]
            columns = (
                np.array([truth for truth, _ in given]),
                *(np.array([one[at] for _, one in given]) for at in range(3)),
            )
            found[what.name] = _predicted(what, *columns)
            unanswered[what.name] = len(answers) - len(given)
        yield Result(data_set.name, split.name, job.method, job.seed, found, fit_s, answer_s, unanswered)


def _peer(job: Job) -> Iterator[Result]:
    method = PEERS[job.method]
    for split in job.splits:
        known = (*split.learned, *split.told)
        whole = table(job.data_set, (*known, *split.asked))
        at = np.arange(whole.width)
        seen, asked = whole.take(at[: len(known)]), whole.take(at[len(known) :])
        begin = time.perf_counter()
        found = {}
        for what in job.data_set.told:
            values = np.log([_truth(cell, what) for cell in known])
            truth = np.array([_truth(cell, what) for cell in split.asked])
            answers = method(seen, values, asked, what.quantity)
            found[what.name] = _predicted(what, truth, *(np.exp(part) for part in answers))
        yield Result(job.data_set.name, split.name, job.method, job.seed, found, time.perf_counter() - begin, 0.0, {})
