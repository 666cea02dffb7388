"""How everything that is steered stands, for operators.

Owns the view. Must not know how it came to be. What is not known is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.serving.scaler import Phase

__all__ = ["BudgetStanding", "Imagined", "ImaginedJob", "JobPhase", "JobStanding", "ServiceStanding", "Standing"]


class JobPhase(Enum):
    """What a job's limit is at."""

    SEARCHING = "searching"
    SETTLED = "settled"
    BLIND = "blind"  # measurements stay away: nothing is held back
    STUCK = "stuck"  # a node refuses the limit that is wanted
    LOST = "lost"  # a node of it is away


@dataclass(frozen=True, slots=True)
class ServiceStanding:
    """A service: what it did last, what the model says, and what should be."""

    name: str
    at_s: float | None  # end of the last window
    live_s: float | None  # the promised quantile as served
    model_s: float | None  # by the profile alone
    factor: float  # how much slower than its profile it is taken to be
    factor_error: float
    is_profile_wrong: bool  # the factor is at its bound: measure the service anew
    phase: Phase
    serving: int
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobStanding:
    """A job: its limit, where the search is, and what that costs and saves."""

    name: str
    phase: JobPhase
    limit_w: float | None  # of each GPU, as read back; None while they differ
    target_w: float  # what is wanted of each GPU
    ceiling_w: float | None  # what budgets allow each GPU; None for no bound
    slowdown: float | None  # so far: time over that at the largest limit measured, less one
    earned_s: float | None  # of the promise, negative if owed; None where no slowdown was promised or nothing is known
    saving: float | None  # energy of the same work at this limit, as a share of the largest measured one's
    reason: str
    back_w: float = 0.0  # of each GPU beyond its target, that the promise may yet ask back


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """A budget: watts that may be drawn, that are claimed, and that are missing."""

    name: str
    room_w: float
    claim_w: float
    shortfall_w: float  # of what promises and lost nodes need; 0 if all fits
    reason: str  # of the shortfall; empty without one
    other_w: float = 0.0  # of the budget, for what is not steered: not in the room


@dataclass(frozen=True, slots=True)
class Standing:
    """All of it at one moment; in order of names."""

    at_s: float
    services: tuple[ServiceStanding, ...]
    jobs: tuple[JobStanding, ...]
    budgets: tuple[BudgetStanding, ...]
    price_per_j: float | None  # with carbon and PUE; None without prices
    price_weight: float  # relative to the mean of the horizon
    ignored: Mapping[str, int]  # events that changed nothing, by reason


class ImaginedJob(NamedTuple):
    """A job under budgets that are only imagined."""

    name: str
    limit_w: float  # of each GPU
    slowdown: float | None  # at that limit, against the largest measured one; None while its curve is unknown
    saving: float | None  # energy of the same work


class Imagined(NamedTuple):
    """All jobs under other budgets; shortfalls in watts with their reasons, by budget."""

    jobs: tuple[ImaginedJob, ...]
    shortfalls: Mapping[str, tuple[float, str]]
