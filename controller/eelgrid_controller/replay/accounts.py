"""What a simulated run came to: energy, money, carbon, waiting and use, in all and over time.

Owns these sums as functions of arrays. Must not know policies, files or how a
run was made. SI inside: joules, seconds, watts; prices are per joule.

Theory: power is constant between two moments, so that energy is piecewise linear
in time and exact at every moment. A tariff is a step function; the cost is the
sum over its steps of price times the energy in the step. PUE (power usage
effectiveness, ISO/IEC 30134-2: what the facility draws over what its machines
draw) multiplies energy, and with it cost and carbon. Waiting counts what a task
waited in all, restarts and the wait that goes on at the end among it, over every
task that came and was not refused.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.simulation import FINISHED, REFUSED, RUNNING, TO_COME, WAITING, Outcome
from eelgrid_controller.replay.site_csv import TariffRow
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["JOULES_PER_KWH", "STEPS_MOST", "Series", "Summary", "Tariff", "account", "series", "tariff"]

JOULES_PER_KWH = 3.6e6
STEPS_MOST = 2_000_000
_GRAMS_PER_KG = 1000.0


class Tariff(NamedTuple):
    """Prices step by step; each holds to the next, the last to the end."""

    from_s: Floats  # (P,) rises; the first is not after the beginning of a run
    price_per_j: Floats  # (P,)
    carbon_kg_per_j: Floats  # (P,)


class Summary(NamedTuple):
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


class Series(NamedTuple):
    """Means over equal stretches of a run."""

    from_s: Floats  # (B,)
    power_w: Floats  # (B,) of the machines, without PUE
    gpus_allocated: Floats  # (B,)
    waiting: Floats  # (B,)
    running: Floats  # (B,)
    nodes_away: Floats  # (B,)


def tariff(rows: Sequence[TariffRow], *, repeat_s: float | None, begin_s: float, end_s: float) -> Tariff:
    """The rows as steps; with repeat_s their pattern begins anew after so long, all over the run.

    Raises ValueError where the pattern is longer than the time after which it repeats, or there are too many steps.
    """
    from_s = np.array([row.from_s for row in rows])
    price = np.array([row.price_per_kwh for row in rows]) / JOULES_PER_KWH
    carbon = np.array([row.carbon_g_per_kwh for row in rows]) / _GRAMS_PER_KG / JOULES_PER_KWH
    if repeat_s is None:
        return Tariff(from_s, price, carbon)
    if from_s[-1] - from_s[0] >= repeat_s:
        raise ValueError(f"the tariff is {from_s[-1] - from_s[0]:g} s long and cannot repeat every {repeat_s:g} s")
    first = math.floor((begin_s - from_s[0]) / repeat_s)
    rounds = max(1, math.ceil((end_s - from_s[0]) / repeat_s) - first)
    if rounds * len(rows) > STEPS_MOST:
        raise ValueError(f"the tariff would have over {STEPS_MOST} steps; let it repeat less often")
    shifts = (first + np.arange(rounds)) * repeat_s
    return Tariff((shifts[:, None] + from_s).reshape(-1), np.tile(price, rounds), np.tile(carbon, rounds))


def _total(outcome: Outcome, level: Floats | Ints, at_s: Floats) -> Floats:
    """The integral of a level from the beginning to each of some moments."""
    edges = np.append(outcome.time_s, outcome.end_s)
    sums = np.concatenate(([0.0], np.cumsum(level * np.diff(edges))))
    return np.interp(at_s, edges, sums)


def account(outcome: Outcome, prices: Tariff | None, pue: float) -> Summary:
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
    return Summary(
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


def series(outcome: Outcome, stretches: int) -> Series:
    """Means over so many equal stretches; none for a run of no length."""
    edges = np.linspace(outcome.time_s[0], outcome.end_s, stretches + 1)
    width_s = np.diff(edges)
    if not (width_s > 0.0).all():
        empty = np.zeros(0)
        return Series(empty, empty, empty, empty, empty, empty)
    levels = (outcome.power_w, outcome.allocated_milli / 1000.0, outcome.waiting, outcome.running, outcome.away)
    power_w, gpus, waiting, running, away = (np.diff(_total(outcome, level, edges)) / width_s for level in levels)
    return Series(edges[:-1], power_w, gpus, waiting, running, away)
