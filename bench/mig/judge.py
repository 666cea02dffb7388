"""Checks whether a plan meets the objectives, from the raw files only.

Owns an independent set of rules: it must not import the planner's options, catalogue
or sums. Numbers are read as decimals, so that nothing is rounded.

Source of the geometry: NVIDIA's MIG user guide, A100 profiles and placements.
"""

import csv
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["Placed", "Wish", "violations"]

# Compute slices of a profile: where it may begin, how many of eight memory slices it takes.
_STARTS = {1: (0, 1, 2, 3, 4, 5, 6), 2: (0, 2, 4), 3: (0, 4), 4: (0,), 7: (0,)}
_SIZE = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
_COMPUTE = 7
_SHARE = Decimal("0.45")


class Placed(NamedTuple):
    """One replica: a GPU, its slice and place, what runs in it."""

    gpu: int
    start: int
    slices: int
    model: str
    batch: int
    processes: int


class Wish(Protocol):
    """What a scenario asks of a model, as its file spells it: milliseconds and requests a second."""

    @property
    def model(self) -> str:
        """The name of its table."""

    @property
    def objective_ms(self) -> str:
        """The cell of SLO_latency.csv."""

    @property
    def rate(self) -> str:
        """The cell of SLO_req_rate.csv."""


def violations(asked: Iterable[Wish], plan: Iterable[Placed], profiles: Path) -> tuple[str, ...]:
    """A line for each rate that is missed, latency that is too long, slice that was not measured or cannot stand."""
    placed = tuple(plan)
    return (*_geometry(placed), *_service(tuple(asked), placed, profiles))


def _geometry(placed: tuple[Placed, ...]) -> Iterator[str]:
    by_gpu: dict[int, list[Placed]] = {}
    for one in placed:
        by_gpu.setdefault(one.gpu, []).append(one)
    for gpu, here in sorted(by_gpu.items()):
        taken = [slice_ for one in here for slice_ in range(one.start, one.start + _SIZE[one.slices])]
        if any(one.start not in _STARTS[one.slices] for one in here):
            yield f"GPU {gpu}: a slice begins where none of its size may"
        if len(set(taken)) < len(taken) or sum(one.slices for one in here) > _COMPUTE:
            yield f"GPU {gpu}: slices overlap, or are more than seven"


def _service(asked: tuple[Wish, ...], placed: tuple[Placed, ...], profiles: Path) -> Iterator[str]:
    for wish in asked:
        mine = [one for one in placed if one.model == wish.model]
        table = _table(profiles / f"{wish.model}.csv")
        objective_ms, rate_hz = Decimal(wish.objective_ms), Decimal(wish.rate)
        total_hz = Decimal(0)
        for one in mine:
            cells = table.get((one.slices, one.batch, one.processes))
            if cells is None or not cells[0]:
                yield f"{wish.model}: {one.slices} slices, batch {one.batch}, {one.processes} processes did not run"
                continue
            throughput_hz, latency_s = cells
            total_hz += throughput_hz * one.processes
            if not latency_s * 1000 < _SHARE * objective_ms:
                yield f"{wish.model}: {latency_s} s is not below 0.45 of {objective_ms} ms"
        if total_hz < rate_hz:
            yield f"{wish.model}: {total_hz} Hz serve {rate_hz} Hz"


def _table(path: Path) -> dict[tuple[int, int, int], tuple[Decimal, Decimal]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return {
            (int(row["Mig instance"]), int(row["Batch size"]), int(row["Workload Number"])): (
                Decimal(row["Throughput"]),
                Decimal(row["Latency"]),
            )
            for row in csv.DictReader(file)
        }
