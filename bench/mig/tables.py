"""ParvaGPU's files: profile tables, and scenarios of objectives and rates.

Owns the two formats and where the files lie. Must not know plans.

A profile table is PROFILES/<model>.csv with the columns Mig instance, Batch size,
Workload Number, Throughput (of one process, requests a second) and Latency
(seconds); a throughput of 0 says that it did not run. A scenario is a row of
SLO_latency.csv (milliseconds) and the same row of SLO_req_rate.csv (requests a
second), a column a model in alphabetical order, or as a first row of names says;
a cell that is no number (N/A) says that the model is not served.

Source: repository MunQ-Lee/ParvaGPU_SC24 (MIT), of Lee et al., SC'24.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.runner import default_data
from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["MODEL", "QUANTILE", "SAFETY", "Asked", "Scenario", "TableError", "folders", "points", "scenarios"]

MODEL = "A100-SXM4-80GB"  # what the tables were measured on, as the catalogue spells it
QUANTILE = 0.5  # the tables tell one latency a configuration; it is taken for the median
SAFETY = 0.45  # of the objective that a latency must stay below: the protocol's
_TABLE = ("Mig instance", "Batch size", "Workload Number", "Throughput", "Latency")
_LATENCY, _RATE, _PROFILES = "SLO_latency.csv", "SLO_req_rate.csv", "prof_data"
_ROWS_MOST = 100_000


class TableError(ValueError):
    """A file that is not what it should be; the message says where and what to do."""


class Asked(NamedTuple):
    """What a scenario asks of one model."""

    model: str
    objective_ms: str  # as its cell spells it
    rate: str  # requests a second, likewise

    @property
    def latency_s(self) -> float:
        """The objective."""
        return float(self.objective_ms) / 1e3

    @property
    def rate_hz(self) -> float:
        """The rate."""
        return float(self.rate)


class Scenario(NamedTuple):
    """One row."""

    name: str
    services: tuple[Asked, ...]


def folders(data: Path, profiles: Path | None = None) -> tuple[Path, Path]:
    """The folder of the scenarios and that of the profile tables: in data, below it, or (tables) in EELGRID_DATA."""
    slo = _below(data, _LATENCY)
    if slo is None:
        raise TableError(f"no {_LATENCY} in {data} or below; name the folder that has it with --data")
    if profiles is not None:
        return slo.parent, profiles
    shared = default_data() / "parvagpu"
    for place in (data, data.parent, shared):
        found = _below(place, _PROFILES) if place == data else place / _PROFILES
        if found is not None and found.is_dir():
            return slo.parent, found
    raise TableError(f"no {_PROFILES} in {data}, beside it or in {shared}; name it with --prof")


def points(profiles: Path) -> tuple[Point, ...]:
    """Every configuration that ran; throughput is that of all processes of a slice together."""
    files = sorted(profiles.glob("*.csv"))
    if not files:
        raise TableError(f"no profile tables (*.csv) in {profiles}")
    return tuple(point for path in files for point in _table(path))


def scenarios(folder: Path, models: Sequence[str]) -> tuple[Scenario, ...]:
    """The rows as S1, S2 ...; models in alphabetical order name the columns unless a first row does."""
    latency, rate = (_rows(folder / name) for name in (_LATENCY, _RATE))
    names: Sequence[str] = sorted(models)
    if latency and all(_number(cell) is None and cell in names for cell in latency[0]):
        names = latency[0]
        latency, rate = latency[1:], rate[1:] if rate and rate[0] == names else rate
    if len(latency) != len(rate):
        raise TableError(f"{folder}: {len(latency)} rows of objectives and {len(rate)} of rates; they go in pairs")
    found = []
    for number, (objectives, rates) in enumerate(zip(latency, rate, strict=True), 1):
        if not len(objectives) == len(rates) == len(names):
            widths = f"{len(objectives)} objectives and {len(rates)} rates"
            raise TableError(f"{folder}, row {number}: {widths} for {len(names)} models; write N/A for none")
        cells = zip(names, objectives, rates, strict=True)
        asked = tuple(Asked(*cell) for cell in cells if _asks(cell[1]) and _asks(cell[2]))
        found.append(Scenario(f"S{number}", asked))
    return tuple(found)


def _below(folder: Path, name: str) -> Path | None:
    """The file or folder of that name in a folder, or the first below it."""
    direct = folder / name
    return direct if direct.exists() else next(iter(sorted(folder.rglob(name))), None)


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except FileNotFoundError:
        raise TableError(f"{path} is missing; objectives and rates go in pairs") from None
    if len(rows) > _ROWS_MOST:
        raise TableError(f"{path} has over {_ROWS_MOST} rows; split it")
    return [row for row in rows if any(row)]


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _asks(cell: str) -> bool:
    value = _number(cell)
    return value is not None and value > 0.0


def _table(path: Path) -> Iterator[Point]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        lacking = [name for name in _TABLE if name not in (reader.fieldnames or ())]
        if lacking:
            raise TableError(f"{path}: lacks the columns {', '.join(lacking)}")
        for line, row in enumerate(reader, 2):
            values = [_number(row[name] or "") for name in _TABLE]
            if any(value is None for value in values):
                raise TableError(f"{path}, line {line}: a cell is no number")
            slices, batch, processes, each_hz, latency_s = (value or 0.0 for value in values)
            if each_hz <= 0.0 or latency_s <= 0.0:
                continue  # it did not run
            how = Configuration(MODEL, f"{int(slices)}g", batch=int(batch), processes=int(processes))
            yield Point(
                path.stem, how, processes * each_hz, {QUANTILE: latency_s}, source=f"ParvaGPU {path.name}:{line}"
            )
