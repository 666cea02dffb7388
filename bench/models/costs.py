"""Cost of profiles: importing, recording a reading, a prediction, learning a family.

Owns the measuring. Must not know how the numbers are laid out.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.models.runs import store
from bench.models.tables import DataSet
from eelgrid_controller.profiles.learning import learn_family
from eelgrid_controller.profiles.prediction import ProfilePredictor
from eelgrid_controller.profiles.store import ProfileReading
from eelgrid_protos.catalogue.loader import load_catalogue

COLUMNS = ("what", "data_set", "count", "p50_ms", "p99_ms")
_READINGS = 400
_STARTS = 5


class Row(NamedTuple):
    """Milliseconds of wall time."""

    what: str
    data_set: str
    count: int
    p50_ms: float
    p99_ms: float


def _timed(what: str, name: str, calls: list[Callable[[], object]]) -> Row:
    times = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return Row(what, name, len(times), float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99)))


def _importing(statement: str) -> Row:
    """A fresh interpreter that runs the statement, less one that runs nothing."""

    def run(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return 1e3 * (time.perf_counter() - begin)

    nothing = min(run("pass") for _ in range(_STARTS))
    times = sorted(run(statement) - nothing for _ in range(_STARTS))
    return Row(statement, "", _STARTS, times[_STARTS // 2], times[-1])


def measured(data_set: DataSet) -> Iterator[Row]:
    """All costs, on one data set."""
    for statement in (
        "import numpy",
        "import eelgrid_controller.profiles.prediction",
        "import scipy.optimize",
        "import joblib",
        "import sklearn.ensemble",
        "import sklearn.gaussian_process",
    ):
        yield _importing(statement)
    catalogue = load_catalogue()
    profiles = store(data_set, data_set.cells)
    readings = [ProfileReading(cell.point, 1e6) for cell in data_set.cells[:_READINGS]]
    yield _timed("a reading told", data_set.name, [lambda one=one: profiles.with_reading(one) for one in readings])
    begin = time.perf_counter()
    learned = learn_family(profiles, data_set.name, catalogue)
    took_ms = 1e3 * (time.perf_counter() - begin)
    yield Row(f"learning {len(learned.surfaces)} quantities", data_set.name, 1, took_ms, took_ms)
    by_name = {data_set.name: learned}
    first = [
        lambda one=one: ProfilePredictor(profiles, by_name, catalogue).predict(
            one.point.workload, [one.point.configuration]
        )
        for one in data_set.cells[:: max(1, len(data_set.cells) // 40)]
    ]
    yield _timed("a first answer after a change of the workload", data_set.name, first)
    warm = ProfilePredictor(profiles, by_name, catalogue)
    asked = data_set.cells[:_READINGS]
    for one in asked:
        warm.predict(one.point.workload, [one.point.configuration])
    again = [lambda one=one: warm.predict(one.point.workload, [one.point.configuration]) for one in asked]
    yield _timed("an answer to one configuration", data_set.name, again)
    name = data_set.cells[0].point.workload
    mine = [cell.point.configuration for cell in data_set.cells if cell.point.workload == name]
    yield _timed(f"an answer to {len(mine)} configurations", data_set.name, [lambda: warm.predict(name, mine)] * 20)
