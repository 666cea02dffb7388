"""What is drawn below each budget, as its GPUs were read just now.

Owns the sums. Must not know what budgets allow or claim.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from eelgrid_controller.steward.prices import NodeDraw, budgets_of, lowest_budgets
from eelgrid_protos.messages import Policy

__all__ = ["Drawn", "drawn_of"]


class Drawn(NamedTuple):
    """Watts of the GPUs that were read, and how many were not."""

    power_w: float = 0.0
    unread: int = 0


def drawn_of(policy: Policy, nodes: Iterable[NodeDraw]) -> Mapping[str, Drawn]:
    """By budget, on every level; raises BudgetRefused where the policy's budgets make no tree."""
    known = list(nodes)
    budgets = budgets_of(policy, known)
    found = dict.fromkeys((one.name for one in budgets.all), Drawn())
    for node in known:
        for place in budgets.above(lowest_budgets(policy, node.inventory)):
            name = budgets.all[place].name
            before = found[name]
            found[name] = Drawn(before.power_w + node.power_w, before.unread + node.unread)
    return found
