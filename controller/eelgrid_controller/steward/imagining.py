"""What jobs would have under power budgets that are only imagined.

Owns the question's way to the steering and the answer's words. Must not know how watts
are shared.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from eelgrid_controller.budget_places import budget_name
from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.steering.standing import Imagined, ImaginedJob
from eelgrid_controller.steward.prices import NodeDraw, budgets_of, lowest_budgets
from eelgrid_protos.messages import BudgetStatus, ImagineBudgetsResponse, JobStatus, Policy, Workload

__all__ = ["Imagines", "imagined"]

_UNKNOWN = "its curve is not known yet: what it would lose is not either"


class Imagines(Protocol):
    """What is needed of the steering."""

    def imagined(self, budgets: Budgets, lowest: Mapping[str, tuple[str, ...]]) -> Imagined:
        """The limits that jobs would have under other budgets."""


def imagined(
    steering: Imagines,
    policy: Policy,
    draws: Sequence[NodeDraw],
    gpus: Mapping[str, Mapping[str, int]],
    workloads: Mapping[str, Workload],
) -> ImagineBudgetsResponse:
    """The answer for a policy's budgets; `gpus` are those of each job by node. Raises BudgetRefused."""
    budgets = budgets_of(policy, draws)
    lowest = {one.inventory.node_name: lowest_budgets(policy, one.inventory) for one in draws}
    found: Imagined = steering.imagined(budgets, lowest)
    claimed = {one.name: one.other_w for one in budgets.all}
    for job in found.jobs:
        for node, count in gpus.get(job.name, {}).items():
            for place in budgets.above(lowest.get(node, ())):
                claimed[budgets.all[place].name] += count * job.limit_w
    return ImagineBudgetsResponse(
        jobs=tuple(_status(job, workloads[job.name]) for job in found.jobs if job.name in workloads),
        budgets=tuple(
            BudgetStatus(
                budget=budget,
                claimed_w=claimed[budget_name(budget.scope, budget.name)],
                shortfall_w=found.shortfalls.get(budget_name(budget.scope, budget.name), (0.0, ""))[0],
            )
            for budget in policy.budgets
        ),
    )


def _status(job: ImaginedJob, workload: Workload) -> JobStatus:
    return JobStatus(
        workload_id=job.name,
        name=workload.spec.name,
        phase="imagined",
        power_limit_w=job.limit_w,
        slowdown=job.slowdown,
        saving=job.saving,
        reason=_UNKNOWN if job.slowdown is None else "",
        is_advice=True,
    )
