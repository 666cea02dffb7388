"""PodDisruptionBudgets: whether so many pods may go at once.

Owns the count. Must not know evictions: the eviction API asks the budgets itself, one pod at
a time; whether it would let all of a gang go, it does not say.

Sources: policy/v1 PodDisruptionBudget; labels.Selector of apimachinery.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["forbids"]


def forbids(budgets: Sequence[Mapping[str, Any]], labels: Sequence[Mapping[str, str]]) -> str:
    """The budget that does not allow all ready pods with these labels to go, and why; empty where all allow it."""
    for budget in budgets:
        selector = (budget.get("spec") or {}).get("selector")
        count = sum(_selects(selector, one) for one in labels)
        allowed = int((budget.get("status") or {}).get("disruptionsAllowed") or 0)
        if count > allowed:
            return f"the budget {budget['metadata']['name']} lets {allowed} go now, and {count} would"
    return ""


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions") or ())


def _meets(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = str(one.get("key")), one.get("values") or ()
    match one.get("operator"):
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return True  # what cannot be read counts as meant: rather one pod too many under a budget
