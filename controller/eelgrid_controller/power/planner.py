"""Power limits for many jobs under many budgets.

Owns the question in the words of operators and the answer with its bound. Must
not know agents, or how a limit gets to a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.power.curves import Curve
from eelgrid_controller.power.division import Knapsack, Option, ascending, climb, repaired, used_w, value_of, within
from eelgrid_controller.power.promise import BestEffort, Promise, choose
from eelgrid_controller.power.refusals import BudgetRefused
from eelgrid_controller.power.relaxation import exact, relax

__all__ = ["Division", "Given", "Job", "Share", "Want", "divide", "knapsack"]

_NEAR = 2e-3  # of the bound: near enough not to search on
_SMALL = 400  # options of all jobs up to which the exact program is tried
_NONE = BestEffort(0.0)


class Want(Enum):
    """What a division is to be good at."""

    THROUGHPUT = "the least weighted throughput lost"
    ENERGY = "the least weighted energy for the same work"


@dataclass(frozen=True, slots=True)
class Share:
    """GPUs of a job that draw from the same lowest budgets, e.g. a node and a feed."""

    budgets: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its curve, where it runs, and what it was promised."""

    name: str
    curve: Curve  # measured limits are its options
    shares: tuple[Share, ...]
    weight: float = 1.0
    promise: Promise = _NONE


@dataclass(frozen=True, slots=True)
class Given:
    """One job's limit and what it keeps."""

    job: str
    limit_w: float  # of each of its GPUs
    charge_w: float  # of each of its GPUs
    throughput: float  # as a share of the largest limit's
    energy: float  # of the same work, as a share of the largest limit's


@dataclass(frozen=True, slots=True)
class Division:
    """A limit for every job, and how good that can be at most."""

    given: tuple[Given, ...]  # in the order of the jobs
    value: float
    bound: float | None  # no division is worth more; None where the relaxation gave no answer
    used_w: tuple[float, ...]  # by budget

    @property
    def gap(self) -> float | None:
        """How far the value may be from the best, as a share of the bound."""
        if self.bound is None:
            return None
        return max(0.0, self.bound - self.value) / max(abs(self.bound), 1e-12)


def _options(job: Job, want: Want) -> tuple[Option, ...]:
    """The limits that the job's promise allows, as the knapsack sees them."""
    choice = choose(job.curve, job.promise)
    largest = job.curve.largest
    return ascending(
        [
            Option(
                job.curve.charge_w(at.limit_w) / job.curve.gpus,
                job.weight * (
                    largest.time_s / at.time_s if want is Want.THROUGHPUT else -at.energy_j / largest.energy_j
                ),
                at.limit_w,
            )
            for at in (choice.at, *choice.beaten)
        ]
    )  # fmt: skip


def _draws(job: Job, budgets: Budgets) -> tuple[tuple[int, int], ...]:
    """GPUs of a job in each budget. Raises BudgetRefused where shares and curve disagree."""
    if any(share.gpus < 1 for share in job.shares) or sum(share.gpus for share in job.shares) != job.curve.gpus:
        raise BudgetRefused(
            "shares",
            f"{job.name!r} has {job.curve.gpus} GPUs and shares of {[share.gpus for share in job.shares]}",
            "name the budgets of every GPU of the job once",
        )
    gpus: dict[int, int] = {}
    for share in job.shares:
        for budget in budgets.above(share.budgets):
            gpus[budget] = gpus.get(budget, 0) + share.gpus
    return tuple(sorted(gpus.items()))


def knapsack(jobs: Sequence[Job], budgets: Budgets, want: Want) -> Knapsack:
    """The question as numbers. Raises PromiseRefused and BudgetRefused for what cannot be asked."""
    for job in jobs:
        if not (0.0 < job.weight < math.inf):
            raise BudgetRefused("weight", f"{job.weight} of {job.name!r}", "weights are positive and finite")
    return Knapsack(
        tuple(_options(job, want) for job in jobs),
        tuple(_draws(job, budgets) for job in jobs),
        tuple(budgets.room_w()),
        tuple(budget.name for budget in budgets.all),
    )


def _best(sack: Knapsack, *, certify: bool) -> tuple[list[int], float | None]:
    """The better of the climb and the rounded relaxation; small cases exactly."""
    chosen = repaired(sack, climb(sack))
    relaxed = relax(sack) if certify else None
    if relaxed is None:
        return chosen, None
    enough = relaxed.bound - _NEAR * abs(relaxed.bound)
    for prices in (None, relaxed.prices):
        if value_of(sack, chosen) < enough:
            start = list(relaxed.chosen) if prices is None else climb(sack, prices)
            chosen = max(chosen, repaired(sack, start), key=lambda one: value_of(sack, one))
    if value_of(sack, chosen) < enough and sum(map(len, sack.options)) <= _SMALL:
        solved = exact(sack)
        if solved is not None and within(sack, solved):
            chosen = max(chosen, list(solved), key=lambda one: value_of(sack, one))
    return chosen, relaxed.bound


def divide(jobs: Sequence[Job], budgets: Budgets, want: Want, *, certify: bool = True) -> Division:
    """One limit for each job within every budget and promise, and the bound on any such division.

    Without `certify` the bound is left out and only the climb is made, which is faster.
    Raises BudgetTooSmall where even the least limits exceed a budget, PromiseRefused where no limit keeps a
    promise, BudgetRefused where jobs and budgets do not fit together.
    """
    sack = knapsack(jobs, budgets, want)
    chosen, bound = _best(sack, certify=certify)
    given = []
    for job, options, place in zip(jobs, sack.options, chosen, strict=True):
        option, largest = options[place], job.curve.largest
        at = job.curve.at(option.limit_w)
        given.append(
            Given(
                job.name, option.limit_w, option.watts, largest.time_s / at.time_s, at.energy_j / largest.energy_j
            )
        )  # fmt: skip
    return Division(tuple(given), value_of(sack, chosen), bound, tuple(used_w(sack, chosen)))
