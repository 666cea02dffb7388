"""Rules of what needs attention: the thresholds and tests that the overview and `eelctl doctor` share.

Each rule takes one message and says whether it shows a problem, so that the list of one and the checks of the other
cannot disagree. Must not know how a problem is reported.
"""

from enum import Enum
from typing import NamedTuple

from eelgrid_protos.messages import (
    ApplyStatus,
    BudgetStatus,
    Gpu,
    JobStatus,
    NodePlan,
    NodeState,
    PlanApplied,
    ServiceStatus,
)

# A batch may be late by a turn of both sides; three are a pattern.
_STALE_BATCHES, _STALE_LEAST_S = 3.0, 30.0
# Share of a budget from which it counts as nearly full.
NEAR_RATIO = 0.95
_UNCONTROLLED = "unsteered"


def stale_after_s(send_interval_s: float) -> float:
    """Returns the age from which the newest sample of a connected node is stale."""
    return max(_STALE_LEAST_S, _STALE_BATCHES * send_interval_s)


class BudgetProblem(Enum):
    """The worst problem of a power budget, the worst first."""

    OVER = "over"
    SHORT = "short"
    NEARLY_CLAIMED = "nearly claimed"
    NEARLY_DRAWN = "nearly drawn"


def find_budget_problem(status: BudgetStatus) -> BudgetProblem | None:
    """Returns the worst problem of a budget; None if it has none."""
    near_w = NEAR_RATIO * status.budget.limit_w
    if status.over_w > 0:
        return BudgetProblem.OVER
    if status.shortfall_w > 0:
        return BudgetProblem.SHORT
    if status.claimed_w > near_w:
        return BudgetProblem.NEARLY_CLAIMED
    return BudgetProblem.NEARLY_DRAWN if (status.measured_w or 0.0) > near_w else None


class GpuProblem(Enum):
    """What keeps a GPU from new work until somebody sees to it."""

    LOST = "lost"
    CORDONED = "cordoned"
    MIG_PENDING = "MIG pending"


def find_gpu_problems(gpu: Gpu, node_state: NodeState, *, is_lost: bool) -> tuple[GpuProblem, ...]:
    """Returns the problems of a GPU: of a lost one nothing else is known, of a lost node's nothing at all."""
    if node_state is NodeState.LOST:
        return ()
    if is_lost:
        return (GpuProblem.LOST,)
    found = ((GpuProblem.CORDONED, bool(gpu.cordon)), (GpuProblem.MIG_PENDING, gpu.mig_pending))
    return tuple(problem for problem, is_found in found if is_found)


def is_uncontrolled(status: ServiceStatus | JobStatus) -> bool:
    """Returns whether nothing can be done for an objective, for the reason that it states."""
    return status.phase == _UNCONTROLLED


def is_late(status: ServiceStatus) -> bool:
    """Returns whether a service is slower than its objective by its own metrics."""
    return status.live_s is not None and status.objective_s > 0.0 and status.live_s > status.objective_s


class PlanProblems(NamedTuple):
    """What a node did not do of its plan."""

    has_failed: bool = False
    has_refused: bool = False
    # Rules by which parts were refused.
    rules: tuple[str, ...] = ()


def find_plan_problems(applied: PlanApplied | None) -> PlanProblems:
    """Returns what a node reported of its plan: one with a failure counts as failed, not also as refused."""
    if applied is None:
        return PlanProblems()
    kinds = {result.status for result in applied.results} | {applied.status}
    failed = ApplyStatus.FAILED in kinds
    rules = {result.rule for result in applied.results if result.status is ApplyStatus.REFUSED and result.rule}
    return PlanProblems(failed, not failed and ApplyStatus.REFUSED in kinds, tuple(sorted(rules)))


def is_unanswered(plan: NodePlan, applied: PlanApplied | None) -> bool:
    """Returns whether the node has not answered the newest plan."""
    return bool(plan.epoch) and (applied is None or applied.epoch < plan.epoch)
