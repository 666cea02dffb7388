"""Node selectors, affinity, tolerations and taints as hashable values that are equal where they mean the same.

Also what a pod requires of other pods and of volumes (`PodRelations`). Evaluation is in `scheduling`.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple, TypeVar

_Value = TypeVar("_Value", bound=tuple[Any, ...])


class Taint(NamedTuple):
    """What a node turns pods away by; effects are NoSchedule, PreferNoSchedule and NoExecute."""

    key: str
    value: str
    effect: str


class Toleration(NamedTuple):
    """Which taints a pod puts up with; an empty key or effect is any, an empty operator is Equal."""

    key: str
    operator: str
    value: str
    effect: str


class SelectorRequirement(NamedTuple):
    """One line of a term: a key, an operator (In, NotIn, Exists, DoesNotExist, Gt, Lt) and its values."""

    key: str
    operator: str
    values: tuple[str, ...]


class NodeSelectorTerm(NamedTuple):
    """Requirements that hold all together: on labels, and on fields (metadata.name alone is served)."""

    labels: tuple[SelectorRequirement, ...]
    fields: tuple[SelectorRequirement, ...]


class NodeConstraint(NamedTuple):
    """All that decides whether a node is right for a pod besides room; equal for pods that mean the same.

    `terms` is None without a required node affinity; one of them has to hold. An empty tuple is held by no node.
    """

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeSelectorTerm, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()
    # Devices that Eelgrid does not count, such as network cards: the node has to have as many.
    devices: tuple[tuple[str, int], ...] = ()

    @property
    def has_selector(self) -> bool:
        """Whether it asks for anything of a node, taints apart."""
        return bool(self.selector or self.devices) or self.terms is not None


class LabelSelector(NamedTuple):
    """Requirements on labels that hold all together; without any it selects everything. None selects nothing."""

    requirements: tuple[SelectorRequirement, ...] = ()


class AffinityTerm(NamedTuple):
    """One required term of pod affinity or anti-affinity; without namespaces and selector it means the pod's own."""

    topology_key: str
    selector: LabelSelector | None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class SpreadConstraint(NamedTuple):
    """One topologySpreadConstraint with whenUnsatisfiable DoNotSchedule; `honors_` are the node inclusion policies."""

    topology_key: str
    max_skew: int
    selector: LabelSelector | None
    min_domains: int = 1
    honors_affinity: bool = True
    honors_taints: bool = False
    match_label_keys: tuple[str, ...] = ()


class VolumeClaim(NamedTuple):
    """A volume that is claimed; the claim of an ephemeral volume is named after pod and volume."""

    name: str
    is_ephemeral: bool = False

    def claim_name(self, pod_name: str) -> str:
        """The name of the PersistentVolumeClaim, in the pod's namespace."""
        return f"{pod_name}-{self.name}" if self.is_ephemeral else self.name


class PodRelations(NamedTuple):
    """What a pod demands of other pods and of volumes."""

    spread: tuple[SpreadConstraint, ...] = ()
    affinity: tuple[AffinityTerm, ...] = ()
    anti_affinity: tuple[AffinityTerm, ...] = ()
    claims: tuple[VolumeClaim, ...] = ()


NO_CONSTRAINT = NodeConstraint()
NO_RELATIONS = PodRelations()
_EMPTY = NodeSelectorTerm((), ())


def parse_constraint(spec: Mapping[str, Any], devices: tuple[tuple[str, int], ...] = ()) -> NodeConstraint:
    """The constraint in a pod's spec, or in the spec of a pod template, with the devices that it asks for."""
    selector = spec.get("nodeSelector") or {}
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = None if required is None else _sorted_values(map(_term, required.get("nodeSelectorTerms") or ()))
    tolerations = spec.get("tolerations") or ()
    if not selector and terms is None and not tolerations and not devices:
        return NO_CONSTRAINT
    found = NodeConstraint(
        tuple(sorted((intern(str(key)), intern(str(value))) for key, value in selector.items())),
        terms,
        _sorted_values(map(_toleration, tolerations)),
        devices,
    )
    return _intern_constraint(found)


def parse_relations(spec: Mapping[str, Any]) -> PodRelations:
    """What a pod's spec demands of other pods and of volumes; preferences are left out."""
    affinity = spec.get("affinity") or {}
    found = PodRelations(
        tuple(_spreads(spec)),
        tuple(_affinity_terms(affinity.get("podAffinity"))),
        tuple(_affinity_terms(affinity.get("podAntiAffinity"))),
        tuple(_volume_claims(spec)),
    )
    return NO_RELATIONS if found == NO_RELATIONS else found


def parse_label_selector(found: Mapping[str, Any] | None) -> LabelSelector | None:
    """A LabelSelector of the API; None where there is none."""
    if found is None:
        return None
    equal = [
        SelectorRequirement(str(key), "In", (str(value),)) for key, value in (found.get("matchLabels") or {}).items()
    ]
    return LabelSelector(_sorted_values([*equal, *map(_requirement, found.get("matchExpressions") or ())]))


def parse_node_terms(selector: Mapping[str, Any] | None) -> tuple[NodeSelectorTerm, ...] | None:
    """The terms of a NodeSelector of the API; None where there is none."""
    return None if selector is None else _sorted_values(map(_term, selector.get("nodeSelectorTerms") or ()))


def _spreads(spec: Mapping[str, Any]) -> Iterable[SpreadConstraint]:
    for one in spec.get("topologySpreadConstraints") or ():
        if one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            yield SpreadConstraint(
                _text(one, "topologyKey"),
                int(one.get("maxSkew") or 1),
                parse_label_selector(one.get("labelSelector")),
                int(one.get("minDomains") or 1),
                one.get("nodeAffinityPolicy") != "Ignore",
                one.get("nodeTaintsPolicy") == "Honor",
                tuple(sorted(map(str, one.get("matchLabelKeys") or ()))),
            )


def _affinity_terms(found: Mapping[str, Any] | None) -> Iterable[AffinityTerm]:
    for one in (found or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or ():
        yield AffinityTerm(
            _text(one, "topologyKey"),
            parse_label_selector(one.get("labelSelector")),
            tuple(sorted(map(str, one.get("namespaces") or ()))),
            parse_label_selector(one.get("namespaceSelector")),
            tuple(sorted(map(str, one.get("matchLabelKeys") or ()))),
            tuple(sorted(map(str, one.get("mismatchLabelKeys") or ()))),
        )


def _volume_claims(spec: Mapping[str, Any]) -> Iterable[VolumeClaim]:
    for one in spec.get("volumes") or ():
        if one.get("persistentVolumeClaim") is not None:
            yield VolumeClaim(_text(one["persistentVolumeClaim"], "claimName"))
        elif one.get("ephemeral") is not None:
            yield VolumeClaim(_text(one, "name"), is_ephemeral=True)


def remove_pin_terms(constraint: NodeConstraint) -> NodeConstraint:
    """What a pod asked for before a pin to one node went into each of its terms (patches.py)."""
    if constraint.terms is None:
        return constraint
    terms = [
        NodeSelectorTerm(term.labels, tuple(one for one in term.fields if not _is_pin(one)))
        for term in constraint.terms
    ]
    kept = _sorted_values(
        term for term, was in zip(terms, constraint.terms, strict=True) if term != _EMPTY or was == _EMPTY
    )
    found = constraint._replace(terms=kept or None)
    return NO_CONSTRAINT if found == NO_CONSTRAINT else _intern_constraint(found)


def _is_pin(one: SelectorRequirement) -> bool:
    return one.key == "metadata.name" and one.operator == "In" and len(one.values) == 1


@lru_cache(maxsize=4096)
def _intern_constraint(constraint: NodeConstraint) -> NodeConstraint:
    """One value for all that are equal: most pods of a fleet want the same."""
    return constraint


def parse_taints(spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """The taints in a node's spec."""
    return _sorted_values(
        Taint(_text(taint, "key"), _text(taint, "value"), _text(taint, "effect")) for taint in spec.get("taints") or ()
    )


def _term(term: Mapping[str, Any]) -> NodeSelectorTerm:
    return NodeSelectorTerm(
        _sorted_values(map(_requirement, term.get("matchExpressions") or ())),
        _sorted_values(map(_requirement, term.get("matchFields") or ())),
    )


def _requirement(found: Mapping[str, Any]) -> SelectorRequirement:
    # Not a set: how many values there are decides whether Gt and matchFields are legal.
    values = tuple(sorted(intern(str(value)) for value in found.get("values") or ()))
    return SelectorRequirement(_text(found, "key"), _text(found, "operator"), values)


def _toleration(found: Mapping[str, Any]) -> Toleration:
    # How long it lasts (tolerationSeconds) is for eviction, not for scheduling.
    return Toleration(
        _text(found, "key"), _text(found, "operator") or "Equal", _text(found, "value"), _text(found, "effect")
    )


def _text(found: Mapping[str, Any], key: str) -> str:
    return intern(str(found.get(key) or ""))


def _sorted_values(values: Iterable[_Value]) -> tuple[_Value, ...]:
    return tuple(sorted(set(values)))
