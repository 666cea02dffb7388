"""Statistics of a run: energy, cost, carbon, waiting and use, or power over arrived demand.

Runs with times. Power is constant between two events, so energy is piecewise linear and exact. A tariff is a step
function; the cost is the sum over its steps of price times energy. PUE (ISO/IEC 30134-2) multiplies energy, and with it
cost and carbon. Waiting counts a task's total wait, with restarts and the wait that continues at the end, over every
task that arrived and was not refused.

Runs of arrivals. x is the GPU share that all tasks so far requested, over the capacity of the fleet. A curve is
linear between steps; at equal x the last step counts, and past the last task nothing changes. Curves are averaged over
seeds first; then
    saving(x) = (P_reference(x) - P(x)) / P_reference(x)

Source: Lettich et al., CCGrid 2025 (arXiv 2412.17484), for EOPC.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.openb_protocol import INFLATION_PERCENT, TraceFleet
from eelgrid_controller.replay.simulation import FINISHED, REFUSED, RUNNING, TO_COME, WAITING, SimulationOutcome
from eelgrid_controller.replay.site_csv import TariffRow
from eelgrid_kernels.arrays import ArrivalOutcomes, Floats, Ints
from eelgrid_kernels.cost_terms import CORES_PER_PACKAGE, CPU_PACKAGE_IDLE_W, MILLI_PER_CORE

JOULES_PER_KWH = 3.6e6
STEPS_MOST = 2_000_000
_GRAMS_PER_KG = 1000.0


class TariffSteps(NamedTuple):
    """Prices step by step; each holds to the next, the last to the end."""

    from_s: Floats  # (P,) rises; the first is not after the beginning of a run
    price_per_j: Floats  # (P,)
    carbon_kg_per_j: Floats  # (P,)


class RunSummary(NamedTuple):
    """The sums of one run."""

    tasks: int  # that came
    finished: int
    running: int  # at the end
    waiting: int
    refused: int
    restarts: int
    span_s: float
    energy_j: float  # of the facility: with PUE
    energy_over_idle_j: float  # of it what the same nodes with nothing on them would not have drawn
    cost: float
    carbon_kg: float
    wait_mean_s: float
    wait_p95_s: float
    gpus_mean: float  # allocated
    gpus_peak: float
    gpu_s: float
    lost_gpu_s: float


class RunSeries(NamedTuple):
    """Means over equal stretches of a run."""

    from_s: Floats  # (B,)
    power_w: Floats  # (B,) of the machines, without PUE
    gpus_allocated: Floats  # (B,)
    waiting: Floats  # (B,)
    running: Floats  # (B,)
    nodes_away: Floats  # (B,)


def expand_tariff(rows: Sequence[TariffRow], *, repeat_s: float | None, begin_s: float, end_s: float) -> TariffSteps:
    """The rows as steps; with repeat_s their pattern begins anew after so long, all over the run.

    Raises ValueError where the pattern is longer than the time after which it repeats, or there are too many steps.
    """
    from_s = np.array([row.from_s for row in rows])
    price = np.array([row.price_per_kwh for row in rows]) / JOULES_PER_KWH
    carbon = np.array([row.carbon_g_per_kwh for row in rows]) / _GRAMS_PER_KG / JOULES_PER_KWH
    if repeat_s is None:
        return TariffSteps(from_s, price, carbon)
    if from_s[-1] - from_s[0] >= repeat_s:
        raise ValueError(f"the tariff is {from_s[-1] - from_s[0]:g} s long and cannot repeat every {repeat_s:g} s")
    first = math.floor((begin_s - from_s[0]) / repeat_s)
    rounds = max(1, math.ceil((end_s - from_s[0]) / repeat_s) - first)
    if rounds * len(rows) > STEPS_MOST:
        raise ValueError(f"the tariff would have over {STEPS_MOST} steps; let it repeat less often")
    shifts = (first + np.arange(rounds)) * repeat_s
    return TariffSteps((shifts[:, None] + from_s).reshape(-1), np.tile(price, rounds), np.tile(carbon, rounds))


def _total(outcome: SimulationOutcome, level: Floats | Ints, at_s: Floats) -> Floats:
    """The integral of a level from the beginning to each of some moments."""
    edges = np.append(outcome.time_s, outcome.end_s)
    sums = np.concatenate(([0.0], np.cumsum(level * np.diff(edges))))
    return np.interp(at_s, edges, sums)


def summarize_run(outcome: SimulationOutcome, prices: TariffSteps | None, pue: float) -> RunSummary:
    """The sums of a run."""
    fate, end = outcome.fate, np.array([outcome.end_s])
    begin_s = float(outcome.time_s[0])
    held = (fate != TO_COME) & (fate != REFUSED)
    waited_s = np.sort(outcome.waited_s[held])
    span_s = outcome.end_s - begin_s
    energy_j, idle_j = (pue * float(_total(outcome, w, end)[0]) for w in (outcome.power_w, outcome.idle_w))
    gpu_s = float(_total(outcome, outcome.allocated_milli, end)[0]) / 1000.0
    cost = carbon_kg = 0.0
    if prices is not None:
        edges = np.clip(np.append(prices.from_s, math.inf), begin_s, outcome.end_s)
        in_step_j = pue * np.diff(_total(outcome, outcome.power_w, edges))
        cost, carbon_kg = (float(in_step_j @ each) for each in (prices.price_per_j, prices.carbon_kg_per_j))
    return RunSummary(
        tasks=int((fate != TO_COME).sum()),
        finished=int((fate == FINISHED).sum()),
        running=int((fate == RUNNING).sum()),
        waiting=int((fate == WAITING).sum()),
        refused=int((fate == REFUSED).sum()),
        restarts=int(outcome.restarts.sum()),
        span_s=span_s,
        energy_j=energy_j,
        energy_over_idle_j=energy_j - idle_j,
        cost=cost,
        carbon_kg=carbon_kg,
        wait_mean_s=float(waited_s.mean()) if len(waited_s) else 0.0,
        wait_p95_s=float(waited_s[math.ceil(0.95 * len(waited_s)) - 1]) if len(waited_s) else 0.0,
        gpus_mean=gpu_s / span_s if span_s > 0.0 else 0.0,
        gpus_peak=float(outcome.allocated_milli.max()) / 1000.0,
        gpu_s=gpu_s,
        lost_gpu_s=outcome.lost_gpu_s,
    )


def compute_series(outcome: SimulationOutcome, stretches: int) -> RunSeries:
    """Means over so many equal stretches; none for a run of no length."""
    edges = np.linspace(outcome.time_s[0], outcome.end_s, stretches + 1)
    width_s = np.diff(edges)
    if not (width_s > 0.0).all():
        empty = np.zeros(0)
        return RunSeries(empty, empty, empty, empty, empty, empty)
    levels = (outcome.power_w, outcome.allocated_milli / 1000.0, outcome.waiting, outcome.running, outcome.away)
    power_w, gpus, waiting, running, away = (np.diff(_total(outcome, level, edges)) / width_s for level in levels)
    return RunSeries(edges[:-1], power_w, gpus, waiting, running, away)


STEPS_PER_UNIT = 200
GRID: Floats = np.arange(STEPS_PER_UNIT * INFLATION_PERCENT // 100 + 1) / STEPS_PER_UNIT  # 0:0.005:1.3


MEAN_FIRST, MEAN_LAST = 0.1, 0.8  # the saving is averaged where nobody refuses much


class ArrivalCurves(NamedTuple):
    """One run, or the mean of several, on GRID."""

    power_w: Floats  # (X,)
    allocated: Floats  # (X,) share of the fleet's GPU capacity
    arrived: Floats  # (X,) GRID, as far as tasks came


def empty_power_w(fleet: TraceFleet) -> float:
    """Watts of the fleet with nothing on it."""
    cores = -(-fleet.cpu_milli // MILLI_PER_CORE)
    packages = -(-cores // CORES_PER_PACKAGE)
    return float(CPU_PACKAGE_IDLE_W * packages.sum() + (fleet.gpu_count * fleet.idle_w).sum())


def compute_curves(steps: ArrivalOutcomes, capacity_milli: int, empty_w: float) -> ArrivalCurves:
    """One run on GRID."""
    arrived = np.concatenate(([0], steps.arrived_milli))
    last = np.concatenate((arrived[1:] != arrived[:-1], [True]))  # of those at the same x
    x = arrived[last] / capacity_milli
    power_w = np.concatenate(([empty_w], steps.power_w))[last]
    allocated = np.concatenate(([0], steps.allocated_milli))[last] / capacity_milli
    return ArrivalCurves(np.interp(GRID, x, power_w), np.interp(GRID, x, allocated), np.interp(GRID, x, x))


def mean_curves(runs: Sequence[ArrivalCurves]) -> ArrivalCurves:
    """The mean over seeds."""
    return ArrivalCurves(
        np.mean([run.power_w for run in runs], axis=0),
        np.mean([run.allocated for run in runs], axis=0),
        np.mean([run.arrived for run in runs], axis=0),
    )


def value_at(values: Floats, x: float) -> float:
    """A curve's value at one of the points of GRID."""
    return float(values[round(x * STEPS_PER_UNIT)])


def saving_share(mine: ArrivalCurves, reference: ArrivalCurves) -> Floats:
    """(X,) watts saved as a share of the reference's."""
    return (reference.power_w - mine.power_w) / reference.power_w


def saving_mean_pct(mine: ArrivalCurves, reference: ArrivalCurves) -> float:
    """The saving in per cent, over the loads at which nobody refuses much."""
    half = 0.5 / STEPS_PER_UNIT  # both ends count, whatever their rounding
    between = (MEAN_FIRST - half < GRID) & (MEAN_LAST + half > GRID)
    return float((100.0 * saving_share(mine, reference))[between].mean())
