"""Node selectors, required node affinity, taints and cordons as kube-scheduler evaluates them; trait names.

A trait is a short stable name of a constraint: a node has the trait if it satisfies the constraint.

Sources: k8s.io/component-helpers/scheduling/corev1; labels.NewRequirement; the plugins NodeAffinity, TaintToleration
and NodeUnschedulable, v1.36.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256

from eelgrid_controller.engines.kubernetes.model.objects import KubeNode
from eelgrid_controller.engines.kubernetes.model.selectors import (
    LabelSelector,
    NodeConstraint,
    NodeSelectorTerm,
    SelectorRequirement,
    Taint,
    Toleration,
)

_REPELLING = frozenset({"NoSchedule", "NoExecute"})
_CORDON = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
_KEY_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_PREFIX_LONGEST, _NAME_LONGEST = 253, 63


def satisfies_constraint(constraint: NodeConstraint, node: KubeNode) -> bool:
    """Whether kube-scheduler would take the node for right, room apart."""
    return not find_unmet_rule(constraint, node)


def find_unmet_rule(constraint: NodeConstraint, node: KubeNode) -> str:
    """The first rule that the node breaks, for people; nothing if it breaks none."""
    if node.is_unschedulable and not is_tolerated(constraint.tolerations, _CORDON):
        return "the node is cordoned"
    for taint in node.taints:
        if taint.effect in _REPELLING and not is_tolerated(constraint.tolerations, taint):
            value = f"={taint.value}" if taint.value else ""
            return f"taint {taint.key}{value}:{taint.effect} is not tolerated"
    for key, value in constraint.selector:
        if node.labels.get(key) != value:
            return f"nodeSelector {key}={value} does not hold"
    if constraint.terms is not None and not matches_terms(constraint.terms, node.labels, node.name):
        return "no term of the required node affinity holds"
    for resource, count in constraint.devices:
        if node.allocatable.count(resource) < count:
            return f"{resource} is there {node.allocatable.count(resource)} times and {count} are asked for"
    return ""


def matches_node_affinity(constraint: NodeConstraint, node: KubeNode) -> bool:
    """Whether the node has what the selector and the required node affinity ask for, taints apart."""
    return all(node.labels.get(key) == value for key, value in constraint.selector) and (
        constraint.terms is None or matches_terms(constraint.terms, node.labels, node.name)
    )


def tolerates_taints(tolerations: Iterable[Toleration], node: KubeNode) -> bool:
    """Whether every taint of the node that repels new pods is tolerated."""
    known = tuple(tolerations)
    return all(taint.effect not in _REPELLING or is_tolerated(known, taint) for taint in node.taints)


def matches_terms(terms: Iterable[NodeSelectorTerm], labels: Mapping[str, str], node_name: str) -> bool:
    """Whether one of the terms of a NodeSelector holds of a node with these labels and this name."""
    return any(_holds(term, labels, node_name) for term in terms)


def matches_labels(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects an object with these labels; None selects nothing."""
    return selector is not None and all(_LABEL_RULES[one.operator](one, labels) for one in selector.requirements)


def is_tolerated(tolerations: Iterable[Toleration], taint: Taint) -> bool:
    """Whether one of these tolerations meets the taint."""
    return any(_meets(toleration, taint) for toleration in tolerations)


def trait_name(constraint: NodeConstraint, taints: Iterable[Taint] | None = None) -> str:
    """A short stable name for what a constraint asks for; nothing if any node that is not cordoned will do.

    `taints` are those of the whole fleet: only against them can be said that a pod without a selector may go anywhere.
    Without them (None) every constraint has a name.
    """
    if taints is not None and not constraint.has_selector:
        repelling = (taint for taint in taints if taint.effect in _REPELLING)
        if all(is_tolerated(constraint.tolerations, taint) for taint in repelling):
            return ""
    return _name(constraint)


def traits_of(node: KubeNode, constraints: Iterable[NodeConstraint]) -> frozenset[str]:
    """The traits of a node: the names of those constraints that it satisfies."""
    return frozenset(_name(one) for one in constraints if satisfies_constraint(one, node))


@lru_cache(maxsize=4096)
def _name(constraint: NodeConstraint) -> str:
    # 64 bits: among a thousand constraints two share a name once in 3e13 fleets.
    return "k8s:" + sha256(json.dumps(constraint).encode()).hexdigest()[:16]


def _meets(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    if toleration.operator == "Exists":
        return True
    # Gt and Lt need the feature gate TaintTolerationComparisonOperators, alpha and off in 1.36.
    return toleration.operator in ("", "Equal") and toleration.value == taint.value


def _holds(term: NodeSelectorTerm, labels: Mapping[str, str], node_name: str) -> bool:
    if not (term.labels or term.fields) or not _is_legal(term):
        return False
    return all(_LABEL_RULES[one.operator](one, labels) for one in term.labels) and all(
        # The name is the only field that is served; any other reads as empty.
        ((node_name if one.key == "metadata.name" else "") == one.values[0]) == (one.operator == "In")
        for one in term.fields
    )


_LABEL_RULES: Mapping[str, Callable[[SelectorRequirement, Mapping[str, str]], bool]] = {
    "In": lambda one, labels: one.key in labels and labels[one.key] in one.values,
    "NotIn": lambda one, labels: one.key not in labels or labels[one.key] not in one.values,
    "Exists": lambda one, labels: one.key in labels,
    "DoesNotExist": lambda one, labels: one.key not in labels,
    "Gt": lambda one, labels: one.key in labels and _below(one.values[0], labels[one.key]),
    "Lt": lambda one, labels: one.key in labels and _below(labels[one.key], one.values[0]),
}


@lru_cache(maxsize=4096)
def _is_legal(term: NodeSelectorTerm) -> bool:
    return all(map(_is_legal_label, term.labels)) and all(
        one.operator in ("In", "NotIn") and len(one.values) == 1 for one in term.fields
    )


def _is_legal_label(one: SelectorRequirement) -> bool:
    counts = {
        "In": len(one.values) > 0,
        "NotIn": len(one.values) > 0,
        "Exists": not one.values,
        "DoesNotExist": not one.values,
        "Gt": len(one.values) == 1 and _integer(one.values[0]) is not None,
        "Lt": len(one.values) == 1 and _integer(one.values[0]) is not None,
    }
    values = all(len(value) <= _NAME_LONGEST and _VALUE.fullmatch(value) for value in one.values)
    return counts.get(one.operator, False) and _is_legal_key(one.key) and values


def _is_legal_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _PREFIX_LONGEST or not _KEY_PREFIX.fullmatch(prefix)):
        return False
    return len(name) <= _NAME_LONGEST and bool(_KEY_NAME.fullmatch(name))


def _below(low: str, high: str) -> bool:
    """Whether one text is a number below another; texts that are none are not."""
    a, b = _integer(low), _integer(high)
    return a is not None and b is not None and a < b


def _integer(text: str) -> int | None:
    # A label's value has 63 characters at most, so this is bounded.
    if not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if -(2**63) <= value < 2**63 else None
