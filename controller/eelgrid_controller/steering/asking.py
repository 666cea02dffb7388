"""From jobs as they are steered to the question how they share watts.

Owns what of a job matters to a division. Must not know when one is made or how.

GPUs of a lost node, and of a holding that refuses limits, cannot be changed: what they
claim, or what their lease will put back where that is more, is taken from the budgets
before the others share.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.power.changes import Holding, Known
from eelgrid_controller.power.planner import Want
from eelgrid_controller.steering.dividing import Problem
from eelgrid_controller.steering.jobs import Job
from eelgrid_controller.steering.pricing import Prices
from eelgrid_controller.steering.sharing import Asking

__all__ = ["problem_of"]


def problem_of(
    jobs: Iterable[tuple[Job, Mapping[Holding, Known]]],
    budgets: Budgets,
    lowest: Callable[[Holding], tuple[str, ...]],
    *,
    prices: Prices,
    at_s: float,
    want: Want,
) -> Problem:
    """The question of now, for jobs with how each of their holdings stands; `lowest` are the budgets of a holding."""
    asking, wishes, fixed_w = [], [], [0.0] * len(budgets)
    for job, known in jobs:
        asking.append(_asking(job, known, lowest))
        wishes.append(job.wish(prices, at_s))
        for holding, how in known.items():
            if how.lost or how.given_up:
                claim_w = max(how.claim_w, (holding.restored_w or 0.0) if how.lost else 0.0)
                for place in budgets.above(lowest(holding)):
                    fixed_w[place] += claim_w
    return Problem(tuple(asking), tuple(wishes), budgets, tuple(fixed_w), want)


def _asking(job: Job, known: Mapping[Holding, Known], lowest: Callable[[Holding], tuple[str, ...]]) -> Asking:
    limits_w = job.search.limits_w
    return Asking(
        name=job.began.name,
        wish_w=math.nan,  # worked out with the division
        held_w=max(one.limit_w for one in known.values()),
        limits_w=limits_w,
        charges_w=tuple(job.charge_w(limit_w) for limit_w in limits_w),
        gpus=tuple((lowest(one), one.gpus) for one, how in known.items() if not (how.lost or how.given_up)),
        curve=job.curve,
        promise=job.rest(),
        weight=job.began.weight,
        owes=(job.earned_s() or 0.0) < 0.0,
    )
