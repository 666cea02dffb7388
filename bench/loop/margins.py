"""The autoscaler's margins on whole days: python -m bench.loop.margins --data DIR --out DIR.

Owns which margins are tried: each alone, the others as they are, services without training, on seeds of their own.
Writes margins.csv, a line for each day. A margin is worth changing where fewer windows are broken and no more energy is
drawn, by more than days scatter. Must not know how a day is played.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
from joblib import Parallel, delayed

from bench.llm.data import Missing
from bench.loop.accounts import JOULES_PER_KWH, Outcome
from bench.loop.ours import Ours
from bench.loop.runs import mean_interval
from bench.loop.scene import Size, make
from bench.loop.world import World
from bench.powercap.zeus import NotThere
from bench.runner import Options, Progress, Unusable, benchmark, data_option, processes_option, seeds_option
from bench.tables import write_csv
from eelgrid_controller.objectives.services import autoscaler, service_model
from eelgrid_controller.objectives.services.autoscaler import ScalingLimits

BAND = "band"
AS_IT_IS = "as it is"
# By name: the module and the constant; the band is a service's own.
_CONSTANTS: Mapping[str, tuple[ModuleType, str]] = {
    "forecast": (autoscaler, "FORECAST_SIGMAS"),
    "curve": (service_model, "CURVE_SDS"),
    "reserve": (autoscaler, "RESERVE_STEP"),
}
TRIED: Mapping[str, tuple[float, ...]] = {
    BAND: (0.04, 0.08, 0.12),
    "forecast": (1.0, 1.5, 2.0),
    "curve": (1.0, 1.5, 2.0),
    "reserve": (0.02, 0.03, 0.05, 0.08),
}


class Margin(NamedTuple):
    """One margin at another value; none of them where `name` is AS_IT_IS."""

    name: str
    value: float


class Day(NamedTuple):
    """What one day came to."""

    margin: Margin
    seed: int
    services_j: float
    windows: int
    violated: int
    shadowed: int  # of the violated, those after a failure


def present_value(name: str) -> float:
    """What a margin is without this benchmark."""
    if name == BAND:
        return ScalingLimits().band
    module, constant = _CONSTANTS[name]
    return float(getattr(module, constant))


def list_margins() -> list[Margin]:
    """The present, then each margin at each of its other values."""
    other = (Margin(name, value) for name, values in TRIED.items() for value in values if value != present_value(name))
    return [Margin(AS_IT_IS, 0.0), *other]


@contextmanager
def set_margin(margin: Margin) -> Iterator[float | None]:
    """Has a margin's constant at its value meanwhile; yields the band, None where it is each service's own."""
    if margin.name not in _CONSTANTS:
        yield margin.value if margin.name == BAND else None
        return
    module, constant = _CONSTANTS[margin.name]
    before = getattr(module, constant)
    setattr(module, constant, margin.value)
    try:
        yield None
    finally:
        setattr(module, constant, before)


def play_day(data: Path, margin: Margin, seed: int, size: Size) -> Day:
    """One day with services alone."""
    with set_margin(margin) as band:
        found: Outcome = World(make(data, seed, size), Ours(band=band)).run()
    return Day(margin, seed, found.services_j, found.windows, found.violated, found.shadowed)


def compare_margins(days: Sequence[Day]) -> Iterator[tuple[Margin, int, int, float, float]]:
    """Each margin's broken windows, those after a failure, and energy above the present in per cent, and half its interval."""
    present = {day.seed: day for day in days if day.margin.name == AS_IT_IS}
    for margin in dict.fromkeys(day.margin for day in days):
        mine = [day for day in days if day.margin == margin and day.seed in present]
        above = [100.0 * (day.services_j / present[day.seed].services_j - 1.0) for day in mine]
        yield (
            margin,
            sum(day.violated for day in mine),
            sum(day.shadowed for day in mine),
            *mean_interval(above),
        )


@benchmark(out="bench-out/loop-margins", refused=(Missing, NotThere, OSError))
@data_option()
@seeds_option(5)
@click.option("--first-seed", type=int, default=100, help="The least seed.")
@click.option("--hours", type=float, default=24.0, help="Of each day.")
@click.option("--services", type=int, default=Size().services, help="Services of the cluster.")
@click.option("--profile-error", type=float, default=0.05, help="Of each point of a profile, tokens and latency apart.")
@processes_option
def main(options: Options) -> int:
    """Plays the days; 2 if the data is not there."""
    if options.seeds < 1 or options.first_seed < 0 or options.hours < 1.0 or options.services < 1:
        raise Unusable("take a seed and a service or more, an hour or more, and a first seed of 0 or more")
    size = Size()._replace(hours=options.hours, services=options.services, jobs=0, profile_error=options.profile_error)
    margins = list_margins()
    work = [(margin, options.first_seed + seed) for seed in range(options.seeds) for margin in margins]
    progress, days = Progress("days"), list[Day]()
    for day in Parallel(options.processes, return_as="generator")(
        delayed(play_day)(options.data, margin, seed, size) for margin, seed in work
    ):
        days.append(day)
        write_csv(
            options.out / "margins.csv",
            ("margin", "value", *Day._fields[1:]),
            [(*one.margin, *one[1:]) for one in days],
        )
        progress.show(len(days), len(work))
    total = sum(day.windows for day in days if day.margin.name == AS_IT_IS)
    kwh = statistics.fmean(day.services_j for day in days if day.margin.name == AS_IT_IS) / JOULES_PER_KWH
    print(f"{'margin':20} windows broken of {total:,} (after a failure)   energy of the GPUs for services")
    for margin, violated, shadowed, above, half in compare_margins(days):
        name = (
            margin.name
            if margin.name == AS_IT_IS
            else f"{margin.name} {present_value(margin.name):g} -> {margin.value:g}"
        )
        energy = f"{kwh:,.0f} kWh a day" if margin.name == AS_IT_IS else f"{above:+.2f} +- {half:.2f} %"
        print(f"{name:20} {violated:6} ({shadowed}) {energy:>40}")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
