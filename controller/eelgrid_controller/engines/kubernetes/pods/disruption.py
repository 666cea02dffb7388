"""Node drains, the repartition taint, and PodDisruptionBudgets.

A node is drained where its administrators cordoned and annotated it. The taint is changed by a JSON patch that tests
the list it was read from. The eviction API checks budgets pod by pod; whether a whole gang may go is checked here.

Sources: policy/v1 PodDisruptionBudget; labels.Selector of apimachinery.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_DRAIN, TAINT_REPARTITION


def find_blocking_budget(budgets: Sequence[Mapping[str, Any]], labels: Sequence[Mapping[str, str]]) -> str:
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


_PATH = "/spec/taints"


class DrainProgress(NamedTuple):
    """What is on a node that is to be emptied."""

    leaving: int = 0
    staying: tuple[str, ...] = ()  # pods that nothing here may move, with the reason
    foreign_gpus: int = 0


class TaintTimers:
    """Since when each node is kept from new pods, and when that is too long."""

    def __init__(self, most_s: float = 1800.0) -> None:
        """A layout that does not come to stand within `most_s` keeps its node no longer."""
        self.most_s = most_s
        self._since_s: dict[str, float] = {}

    def taint_changes(self, wanted: Collection[str], tainted: Collection[str], now_s: float) -> dict[str, bool]:
        """Which nodes have to get the taint (True) or lose it, whoever put it there."""
        for name in [name for name in self._since_s if name not in wanted]:
            del self._since_s[name]
        for name in wanted:
            self._since_s.setdefault(name, now_s)
        kept = {name for name in wanted if now_s - self._since_s[name] <= self.most_s}
        return dict.fromkeys(sorted(kept - set(tainted)), True) | dict.fromkeys(sorted(set(tainted) - kept), False)

    def is_timed_out(self, name: str, now_s: float) -> bool:
        """Whether a node's layout has not come to stand in time."""
        return now_s - self._since_s.get(name, now_s) > self.most_s


def is_drain_requested(node: Mapping[str, Any]) -> bool:
    """Whether a node's people want it empty: it is cordoned and annotated."""
    annotations = node["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_DRAIN) == "true" and bool((node.get("spec") or {}).get("unschedulable"))


def drain_status(found: DrainProgress) -> str:
    """How far it is, in a sentence."""
    if not found.leaving and not found.staying:
        rest = f"; pods of others hold {found.foreign_gpus} GPUs" if found.foreign_gpus else ""
        return f"empty of managed pods{rest}"
    parts = [f"{found.leaving} to move"] if found.leaving else []
    if found.staying:
        more = f" and {len(found.staying) - 3} more" if len(found.staying) > 3 else ""
        parts.append(f"{len(found.staying)} stay: {', '.join(found.staying[:3])}{more}")
    return "; ".join(parts)


def is_tainted(node: Mapping[str, Any]) -> bool:
    """Whether our taint is on a node."""
    return any(one.get("key") == TAINT_REPARTITION for one in _taints(node))


def taint_patch(node: Mapping[str, Any], *, wanted: bool) -> list[dict[str, Any]]:
    """A JSON patch that puts our taint on, or takes it off; empty where that is so already."""
    had = _taints(node)
    kept = [one for one in had if one.get("key") != TAINT_REPARTITION]
    if wanted == is_tainted(node):
        return []
    new = [*kept, {"key": TAINT_REPARTITION, "effect": "NoSchedule"}] if wanted else kept
    # An absent list tests as null on no server alike: there the object's version is what is tested.
    version = node["metadata"]["resourceVersion"]
    test = {"op": "test", "path": _PATH, "value": had} if had else _same(version)
    if not new:
        return [test, {"op": "remove", "path": _PATH}]
    return [test, {"op": "replace" if had else "add", "path": _PATH, "value": new}]


def _same(version: str) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": version}


def _taints(node: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return list((node.get("spec") or {}).get("taints") or ())
