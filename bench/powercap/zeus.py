"""Zeus's measurements as curves: seconds and watts of an epoch by power limit, epochs to a target.

Owns the files' columns and which job of each workload is the baseline. Must not
know policies.

Source: You, Chung, Chowdhury, "Zeus", NSDI 2023; repository ml-energy/zeus,
folder of the trace (Apache-2.0). summary_power_*.csv: mean seconds and watts of an
epoch for each (workload, batch, optimizer, limit); summary_train.csv: epochs to a
target for several seeds; <GPU>+<network>+gpu*.csv: single sweeps over the limits
with a window at each. Targets are those of the paper's table 1.
"""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.objectives.power.power_model import PowerCurve, fit_power_curve
from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["BASELINES", "MODELS", "Baseline", "Data", "Key", "NotThere", "Run", "Sweep", "baseline_runs", "load"]

MODELS = ("v100", "a40", "p100", "rtx6000")
SOURCE = "Zeus (NSDI'23) summary_power_{}.csv"


class Baseline(NamedTuple):
    """The batch size that a workload's authors take, and the target of the paper."""

    workload: str
    batch: int
    target: str


BASELINES = (
    Baseline("cifar100", 1024, "0.6"),
    Baseline("imagenet", 256, "0.65"),
    Baseline("librispeech", 192, "40"),
    Baseline("movielens-1m", 1024, "0.41"),
    Baseline("squad", 32, "84.0"),
    Baseline("sentiment140", 128, "0.84"),
)
_FEW_LIMITS = 3  # a table of fewer is no curve


class NotThere(ValueError):
    """The files are not where they should be; the message says where they should."""


class Key(NamedTuple):
    """One job: what it trains and with which batch size."""

    workload: str
    network: str
    batch: int
    optimizer: str


class Run(NamedTuple):
    """A training run of a job on a GPU model."""

    model: str
    key: Key
    curve: PowerCurve  # one GPU; the unit of work is an epoch
    epochs: float  # to the target, median over the seeds that reach it


class Sweep(NamedTuple):
    """One measured sweep over the limits: a window at each, limits falling."""

    name: str
    limits_w: tuple[float, ...]
    time_s: tuple[float, ...]
    energy_j: tuple[float, ...]  # of all GPUs


class Data(NamedTuple):
    """All that the folder holds."""

    curves: Mapping[str, Mapping[Key, PowerCurve]]  # by GPU model
    epochs: Mapping[tuple[str, int, str], tuple[float, ...]]  # by workload, batch and target; seeds that reach it
    sweeps: tuple[Sweep, ...]


def _folder(data: Path) -> Path:
    for folder in (data, data / "zeus_nsdi23"):
        if (folder / "summary_train.csv").is_file():
            return folder
    raise NotThere(f"no summary_train.csv in {data} or {data / 'zeus_nsdi23'}; name the folder with --data")


def _lines(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise NotThere(f"{path.name} cannot be read: {error}") from None


def _curves(path: Path, model: str) -> dict[Key, PowerCurve]:
    points: dict[Key, list[Point]] = {}
    for line in _lines(path):
        key = Key(line["dataset"], line["network"], int(line["batch_size"]), line["optimizer"])
        at = Configuration(model, batch=key.batch, power_limit_w=float(line["power_limit"]), label=key.optimizer)
        points.setdefault(key, []).append(
            Point(
                key.workload,
                at,
                1.0 / float(line["time_per_epoch"]),
                power_w=float(line["average_power"]),
                source=SOURCE.format(model),
            )
        )
    return {key: fit_power_curve(found) for key, found in points.items() if len(found) >= _FEW_LIMITS}


def _epochs(path: Path) -> dict[tuple[str, int, str], tuple[float, ...]]:
    found: dict[tuple[str, int, str], list[float]] = {}
    for line in _lines(path):
        epochs = float(line["target_epoch"])
        reached = found.setdefault((line["dataset"], int(line["batch_size"]), line["target_metric"]), [])
        if not math.isnan(epochs):
            reached.append(epochs)
    return {key: tuple(reached) for key, reached in found.items() if reached}


def _sweep(path: Path) -> Sweep:
    lines = _lines(path)
    energies = [name for name in lines[0] if name.endswith("_energy")]
    rows = sorted(
        (
            (
                float(line["window_name"].rsplit("_", 1)[1]),
                float(line["elapsed_time"]),
                math.fsum(float(line[name]) for name in energies),
            )
            for line in lines
        ),
        reverse=True,
    )
    limits, times, joules = zip(*rows, strict=True)
    return Sweep(path.stem, limits, times, joules)


def load(data: Path) -> Data:
    """Everything in the folder, or in its folder zeus_nsdi23. Raises NotThere."""
    folder = _folder(data)
    curves = {
        model: _curves(folder / f"summary_power_{model}.csv", model)
        for model in MODELS
        if (folder / f"summary_power_{model}.csv").is_file()
    }
    if not curves:
        raise NotThere(f"no summary_power_<model>.csv for any of {', '.join(MODELS)} in {folder}")
    sweeps = tuple(_sweep(path) for path in sorted(folder.glob("*+gpu*.csv")))
    return Data(curves, _epochs(folder / "summary_train.csv"), sweeps)


def baseline_runs(data: Data) -> list[Run]:
    """The baseline of every workload on every GPU model, at the largest batch that was measured up to it.

    Where a batch was trained with several optimizers, the one of the first line counts: it is the one that
    summary_train.csv has epochs of.
    """
    runs = []
    for model, curves in data.curves.items():
        for baseline in BASELINES:
            batches = [key for key in curves if key.workload == baseline.workload and key.batch <= baseline.batch]
            if not batches:
                continue
            key = max(batches, key=lambda one: one.batch)
            epochs = data.epochs.get((baseline.workload, key.batch, baseline.target))
            if epochs:
                runs.append(Run(model, key, curves[key], statistics.median(epochs)))
    return runs


def relatives(runs: Iterable[Run], run: Run) -> tuple[PowerCurve, ...]:
    """Curves of the other workloads on the same GPU model: what a fleet would know of a new job."""
    return tuple(one.curve for one in runs if one.model == run.model and one.key.workload != run.key.workload)
