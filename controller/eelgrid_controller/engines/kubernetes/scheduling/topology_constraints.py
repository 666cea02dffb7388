"""Topology spread, pod (anti-)affinity and volume topology, evaluated as kube-scheduler does, over a pod index.

Planned and pinned pods count as bound. Skew is evaluated before the pin, over all domains; a node where the pin
itself would fail (minDomains above 1) is refused with PIN_REFUSED. Pods are counted by node per query and updated
incrementally, so that an evaluation costs a pass over nodes, not over pods.

Sources: kubernetes v1.36 podtopologyspread, interpodaffinity, volumebinding, volumezone; KEP-3022, KEP-3094,
KEP-3243, KEP-3633.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.selectors import (
    AffinityTerm,
    LabelSelector,
    NodeConstraint,
    NodeSelectorTerm,
    SelectorRequirement,
    SpreadConstraint,
    Toleration,
    parse_node_terms,
)
from eelgrid_controller.engines.kubernetes.scheduling.node_affinity import (
    matches_labels,
    matches_node_affinity,
    matches_terms,
    satisfies_constraint,
    tolerates_taints,
)

# Why a node is refused; short, and the same for like cases, so that nodes can be counted by it.
SPREAD_REFUSED = "topology spread constraints"
SPREAD_UNLABELLED = "topology spread constraints (missing label)"
PIN_REFUSED = "minDomains of topology spread constraints, which a pin to one node cannot meet"
AFFINITY_REFUSED = "pod affinity"
ANTI_AFFINITY_REFUSED = "pod anti-affinity"
REPELLED = "anti-affinity of other pods"
VOLUME_REFUSED = "volume node affinity"
ZONE_REFUSED = "the zone of a volume"
PROVISIONING_REFUSED = "allowedTopologies of a storage class"

CLAIM_ANNOTATIONS = ("volume.beta.kubernetes.io/storage-class", "pv.kubernetes.io/bind-completed")
_CLASS_BEFORE, _BIND_COMPLETED = CLAIM_ANNOTATIONS
ZONE_LABELS = (
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
)
_ZONE_NOW = dict(zip(ZONE_LABELS[:2], ZONE_LABELS[2:], strict=True))
_NO_PROVISIONER = ("", "kubernetes.io/no-provisioner")

# Each holds counts of a fleet's nodes, or names of them: some megabytes in all with 10,000 nodes.
MAX_QUERIES = 256
_NODE_SETS_MOST = 256

Refusals = dict[str, str]  # node -> why


class PlacedPod(NamedTuple):
    """A pod where it is, or where it was planned."""

    uid: str
    namespace: str
    labels: Mapping[str, str]
    node_name: str
    is_going: bool = False
    anti_affinity: tuple[AffinityTerm, ...] = ()


def placed_pod(pod: Pod, node_name: str) -> PlacedPod:
    """A pod as others' rules see it on a node."""
    return PlacedPod(pod.uid, pod.namespace, pod.labels, node_name, pod.is_deleting, pod.relations.anti_affinity)


class _Match(NamedTuple):
    """Pods of some namespaces with some labels."""

    namespaces: tuple[str, ...]
    namespace_selector: LabelSelector | None
    selector: LabelSelector | None


class _Query(NamedTuple):
    """Pods that every one of these matches, those that are being deleted included or not."""

    matches: tuple[_Match, ...]
    with_going: bool = True


class _Repelling(NamedTuple):
    """A term of anti-affinity of pods that are placed."""

    topology_key: str
    match: _Match


class PodsView(Protocol):
    """Pods by the rules that look at them."""

    def count_pods(self, query: _Query) -> Mapping[str, int]:
        """How many pods of a query are on each node; nodes without any may be left out."""

    def repelling_terms(self) -> Mapping[_Repelling, Mapping[str, int]]:
        """Anti-affinity terms of placed pods, and how many pods on each node have them."""

    def selects_pod(self, match: _Match, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether a pod of this namespace with these labels is matched."""


class PodIndex:
    """All pods that are bound, pinned or planned, and the labels of namespaces."""

    def __init__(self) -> None:
        self._pods: dict[str, PlacedPod] = {}
        self._namespaces: dict[str, Mapping[str, str]] = {}
        self._counts: dict[_Query, dict[str, int]] = {}
        self._repelling: dict[_Repelling, dict[str, int]] = {}

    def __len__(self) -> int:
        """How many pods are placed."""
        return len(self._pods)

    def put_pod(self, pod: PlacedPod) -> bool:
        """A pod as it is now; whether anything changed that a rule could look at."""
        if self._pods.get(pod.uid) == pod:
            return False
        self.remove_pod(pod.uid)
        self._pods[pod.uid] = pod
        self._add(pod, 1)
        return True

    def remove_pod(self, uid: str) -> bool:
        """A pod that is nowhere; whether it was somewhere."""
        before = self._pods.pop(uid, None)
        if before is not None:
            self._add(before, -1)
        return before is not None

    def set_namespace(self, name: str, labels: Mapping[str, str] | None) -> None:
        """A namespace as it is now; None for one that is no more."""
        if labels is None:
            self._namespaces.pop(name, None)
        else:
            self._namespaces[name] = labels
        self._counts.clear()

    def with_overlay(self, without: Collection[str], plus: Sequence[PlacedPod]) -> PodsView:
        """The same without some pods, by uid, and with others."""
        gone = [self._pods[uid] for uid in without if uid in self._pods]
        return _Overlay(self, [*((pod, -1) for pod in gone), *((pod, 1) for pod in plus)]) if gone or plus else self

    def count_pods(self, query: _Query) -> Mapping[str, int]:
        """As `PodsView`; kept from then on."""
        found = self._counts.get(query)
        if found is None:
            if len(self._counts) >= MAX_QUERIES:
                del self._counts[next(iter(self._counts))]
            found = self._counts[query] = {}
            for pod in self._pods.values():
                if _is_counted(self, query, pod):
                    found[pod.node_name] = found.get(pod.node_name, 0) + 1
        return found

    def repelling_terms(self) -> Mapping[_Repelling, Mapping[str, int]]:
        """As `PodsView`."""
        return self._repelling

    def selects_pod(self, match: _Match, namespace: str, labels: Mapping[str, str]) -> bool:
        """As `PodsView`."""
        is_there = namespace in match.namespaces or matches_labels(
            match.namespace_selector, self._namespaces.get(namespace, {})
        )
        return is_there and matches_labels(match.selector, labels)

    def _add(self, pod: PlacedPod, sign: int) -> None:
        for query, counts in self._counts.items():
            if _is_counted(self, query, pod):
                counts[pod.node_name] = counts.get(pod.node_name, 0) + sign
        for one in _repelling_of(pod):
            held = self._repelling.setdefault(one, {})
            held[pod.node_name] = held.get(pod.node_name, 0) + sign
            if not held[pod.node_name]:
                del held[pod.node_name]
            if not held:
                del self._repelling[one]


class _Overlay:
    """An index with a few differences."""

    def __init__(self, base: PodIndex, changes: Sequence[tuple[PlacedPod, int]]) -> None:
        self._base = base
        self._changes = changes

    def count_pods(self, query: _Query) -> Mapping[str, int]:
        found = self._base.count_pods(query)
        changes = [(pod.node_name, sign) for pod, sign in self._changes if _is_counted(self, query, pod)]
        return _adjust_counts(found, changes) if changes else found

    def repelling_terms(self) -> Mapping[_Repelling, Mapping[str, int]]:
        changes: dict[_Repelling, list[tuple[str, int]]] = {}
        for pod, sign in self._changes:
            for one in _repelling_of(pod):
                changes.setdefault(one, []).append((pod.node_name, sign))
        base = self._base.repelling_terms()
        return {**base, **{one: _adjust_counts(base.get(one, {}), made) for one, made in changes.items()}}

    def selects_pod(self, match: _Match, namespace: str, labels: Mapping[str, str]) -> bool:
        return self._base.selects_pod(match, namespace, labels)


def _adjust_counts(counts: Mapping[str, int], changes: Iterable[tuple[str, int]]) -> dict[str, int]:
    found = dict(counts)
    for name, sign in changes:
        found[name] = found.get(name, 0) + sign
    return found


def _is_counted(pods: PodsView, query: _Query, pod: PlacedPod) -> bool:
    if pod.is_going and not query.with_going:
        return False
    return all(pods.selects_pod(match, pod.namespace, pod.labels) for match in query.matches)


def _repelling_of(pod: PlacedPod) -> Iterator[_Repelling]:
    for term in pod.anti_affinity:
        yield _Repelling(term.topology_key, _match_of(term, pod.namespace, pod.labels))


def _match_of(term: AffinityTerm, namespace: str, labels: Mapping[str, str]) -> _Match:
    """Whom a term means, said by a pod of this namespace with these labels."""
    own = () if term.namespaces or term.namespace_selector is not None else (namespace,)
    selector = term.selector
    if selector is not None:
        # The API server merges these when a pod is created; to merge them twice changes nothing.
        keys = [SelectorRequirement(key, "In", (labels[key],)) for key in term.match_label_keys if key in labels]
        keys += [SelectorRequirement(key, "NotIn", (labels[key],)) for key in term.mismatch_label_keys if key in labels]
        selector = LabelSelector((*selector.requirements, *keys))
    return _Match(term.namespaces or own, term.namespace_selector, selector)


class ClusterNodes:
    """All nodes, and which of them meet what many pods ask for alike."""

    def __init__(self) -> None:
        self._nodes: dict[str, KubeNode] = {}
        self._sets: dict[tuple[str, Any], frozenset[str]] = {}
        self._domains: dict[str, dict[str, str]] = {}

    def put_node(self, node: KubeNode) -> bool:
        """A node as it is now; whether anything changed that a rule could look at."""
        before = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if before is not None and node.is_equivalent(before):
            return False
        self._clear_caches()
        return True

    def remove_node(self, name: str) -> bool:
        """A node that is no more; whether it was there."""
        if self._nodes.pop(name, None) is None:
            return False
        self._clear_caches()
        return True

    def __getitem__(self, name: str) -> KubeNode:
        """One node."""
        return self._nodes[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is such a node."""
        return name in self._nodes

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._nodes)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._nodes)

    def nodes_satisfying(self, constraint: NodeConstraint) -> frozenset[str]:
        """Nodes that are right for a constraint."""
        return self._set("satisfying", constraint, lambda node: satisfies_constraint(constraint, node))

    def nodes_in_affinity(self, constraint: NodeConstraint) -> frozenset[str]:
        """Nodes that its selector and required node affinity mean."""
        wanted = constraint.selector, constraint.terms
        return self._set("affinity", wanted, lambda node: matches_node_affinity(constraint, node))

    def nodes_tolerated(self, tolerations: tuple[Toleration, ...]) -> frozenset[str]:
        """Nodes without a taint that these tolerations do not meet."""
        return self._set("tolerated", tolerations, lambda node: tolerates_taints(tolerations, node))

    def domains_of(self, topology_key: str) -> Mapping[str, str]:
        """The domain of each node that has the label."""
        found = self._domains.get(topology_key)
        if found is None:
            if len(self._domains) >= _NODE_SETS_MOST:
                self._domains.clear()
            found = self._domains[topology_key] = {
                name: node.labels[topology_key] for name, node in self._nodes.items() if topology_key in node.labels
            }
        return found

    def _set(self, what: str, asked: Any, holds: Callable[[KubeNode], bool]) -> frozenset[str]:
        found = self._sets.get((what, asked))
        if found is None:
            if len(self._sets) >= _NODE_SETS_MOST:
                del self._sets[next(iter(self._sets))]
            found = self._sets[what, asked] = frozenset(name for name, node in self._nodes.items() if holds(node))
        return found

    def _clear_caches(self) -> None:
        self._sets.clear()
        self._domains.clear()


# Topology spread


def evaluate_topology_spread(pod: Pod, nodes: ClusterNodes, pods: PodsView) -> Refusals:
    """Nodes that its topology spread constraints refuse, before the pin or with it."""
    refused: Refusals = {}
    spread = pod.relations.spread
    if not spread:
        return refused
    labelled = frozenset(nodes.domains_of(spread[0].topology_key)).intersection(
        *(nodes.domains_of(one.topology_key) for one in spread[1:])
    )
    for one in spread:
        refused = _evaluate_spread(one, pod, labelled, nodes, pods) | refused
    return refused


def _evaluate_spread(
    one: SpreadConstraint, pod: Pod, labelled: frozenset[str], nodes: ClusterNodes, pods: PodsView
) -> Refusals:
    refused: Refusals = {}
    counted = labelled
    if one.honors_affinity:
        counted &= nodes.nodes_in_affinity(pod.constraint)
    if one.honors_taints:
        counted &= nodes.nodes_tolerated(pod.constraint.tolerations)
    selector = _spread_selector(one, pod.labels)
    # An empty selector selects all pods and counts none: so it is in the scheduler.
    is_empty = selector is None or not selector.requirements
    query = _Query((_Match((pod.namespace,), None, selector),), with_going=False)
    counts = {} if is_empty else pods.count_pods(query)
    domains = nodes.domains_of(one.topology_key)
    totals: dict[str, int] = {}
    for name in counted:
        totals[domains[name]] = totals.get(domains[name], 0) + counts.get(name, 0)
    least = min(totals.values(), default=0) if len(totals) >= one.min_domains else 0
    own = int(matches_labels(selector, pod.labels))
    is_pin_counted = one.honors_affinity and one.min_domains > 1
    for name in nodes:
        if name not in domains:
            refused[name] = SPREAD_UNLABELLED
        elif totals.get(domains[name], 0) + own - least > one.max_skew:
            refused[name] = SPREAD_REFUSED
        elif is_pin_counted and (counts.get(name, 0) if name in counted else 0) + own > one.max_skew:
            refused[name] = PIN_REFUSED
    return refused


def _spread_selector(one: SpreadConstraint, labels: Mapping[str, str]) -> LabelSelector | None:
    if one.selector is None:
        return None
    keys = [SelectorRequirement(key, "In", (labels[key],)) for key in one.match_label_keys if key in labels]
    return LabelSelector((*one.selector.requirements, *keys))


# Pod affinity


def evaluate_pod_affinity(pod: Pod, nodes: ClusterNodes, pods: PodsView) -> Refusals:
    """Nodes that required pod affinity and anti-affinity refuse, the pod's own and that of pods which are placed."""
    refused: Refusals = {}
    _evaluate_affinity(pod, nodes, pods, refused)
    for term in pod.relations.anti_affinity:
        match = _match_of(term, pod.namespace, pod.labels)
        held = _occupied_domains(nodes.domains_of(term.topology_key), pods.count_pods(_Query((match,))))
        _refuse(refused, nodes.domains_of(term.topology_key), held, ANTI_AFFINITY_REFUSED)
    for one, counts in pods.repelling_terms().items():
        if pods.selects_pod(one.match, pod.namespace, pod.labels):
            domains = nodes.domains_of(one.topology_key)
            _refuse(refused, domains, _occupied_domains(domains, counts), REPELLED)
    return refused


def is_repelled(pod: Pod, pods: PodsView) -> bool:
    """Whether anti-affinity of a pod that is placed means this pod."""
    return any(pods.selects_pod(one.match, pod.namespace, pod.labels) for one in pods.repelling_terms())


def needs_namespaces(pod: Pod) -> bool:
    """Whether the labels of namespaces decide whom its terms mean."""
    terms = (*pod.relations.affinity, *pod.relations.anti_affinity)
    return any(term.namespace_selector is not None and term.namespace_selector.requirements for term in terms)


def _evaluate_affinity(pod: Pod, nodes: ClusterNodes, pods: PodsView, refused: Refusals) -> None:
    terms = pod.relations.affinity
    if not terms:
        return
    matches = tuple(_match_of(term, pod.namespace, pod.labels) for term in terms)
    counts = pods.count_pods(_Query(matches))
    domains = [nodes.domains_of(term.topology_key) for term in terms]
    occupied = [_occupied_domains(one, counts) for one in domains]
    # The first of a group that has affinity to itself may go anywhere that has the labels.
    is_first = not any(occupied) and all(pods.selects_pod(match, pod.namespace, pod.labels) for match in matches)
    for name in nodes:
        is_labelled = all(name in one for one in domains)
        if not is_labelled or not (
            is_first or all(one[name] in held for one, held in zip(domains, occupied, strict=True))
        ):
            refused.setdefault(name, AFFINITY_REFUSED)


def _occupied_domains(domains: Mapping[str, str], counts: Mapping[str, int]) -> frozenset[str]:
    """Domains in which pods are."""
    return frozenset(domains[name] for name, count in counts.items() if count > 0 and name in domains)


def _refuse(refused: Refusals, domains: Mapping[str, str], held: frozenset[str], why: str) -> None:
    for name, domain in domains.items() if held else ():
        if domain in held:
            refused.setdefault(name, why)


# Volumes


class BoundClaim(NamedTuple):
    """A PersistentVolumeClaim; without a volume's name it is not bound."""

    volume_name: str = ""
    class_name: str = ""
    is_bound: bool = False
    is_going: bool = False
    owner_uid: str = ""


class PersistentVolume(NamedTuple):
    """Where a volume is: the terms of its required node affinity, and its zone labels by key."""

    terms: tuple[NodeSelectorTerm, ...] | None = None
    zones: tuple[tuple[str, frozenset[str]], ...] = ()


class StorageClass(NamedTuple):
    """How claims of a class are bound; `topologies` are alternatives of (key, values) that hold all together."""

    provisioner: str = ""
    waits_for_consumer: bool = False
    topologies: tuple[tuple[tuple[str, frozenset[str]], ...], ...] = ()


class Volumes:
    """What is known of claims, volumes and storage classes."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], BoundClaim] = {}  # by namespace and name
        self.volumes: dict[str, PersistentVolume] = {}
        self.classes: dict[str, StorageClass] = {}


class VolumeVerdict(NamedTuple):
    """Refused nodes; or why no node will do yet (`waits`), or why only kube-scheduler can say (`left`)."""

    refused: Refusals
    waits: str = ""
    left: str = ""


def evaluate_volume_topology(pod: Pod, nodes: ClusterNodes, volumes: Volumes) -> VolumeVerdict:
    """Nodes from which a volume of the pod cannot be reached."""
    refused: Refusals = {}
    for volume in pod.relations.claims:
        name = volume.claim_name(pod.name)
        claim = volumes.claims.get((pod.namespace, name))
        if claim is None:
            return VolumeVerdict({}, waits=f"persistentvolumeclaim {name} is not there")
        if claim.is_going:
            return VolumeVerdict({}, waits=f"persistentvolumeclaim {name} is being deleted")
        if volume.is_ephemeral and claim.owner_uid != pod.uid:
            return VolumeVerdict({}, waits=f"persistentvolumeclaim {name} is not of this pod")
        if claim.is_bound:
            found = volumes.volumes.get(claim.volume_name)
            if found is None:
                return VolumeVerdict({}, waits=f"persistentvolume {claim.volume_name} of {name} is not there")
            _evaluate_volume(found, nodes, refused, with_zones=not volume.is_ephemeral)
            continue
        kind = volumes.classes.get(claim.class_name)
        if claim.volume_name or kind is None or not kind.waits_for_consumer:
            # The volume controller binds it without us, and the pod is looked at again.
            return VolumeVerdict({}, waits=f"persistentvolumeclaim {name} is not bound")
        if kind.provisioner in _NO_PROVISIONER:
            return VolumeVerdict(
                {}, left=f"persistentvolumeclaim {name} is to be bound to one of the volumes there are"
            )
        _evaluate_provisioning(kind, nodes, refused)
    return VolumeVerdict(refused)


def _evaluate_volume(volume: PersistentVolume, nodes: ClusterNodes, refused: Refusals, *, with_zones: bool) -> None:
    for name in nodes:
        labels = nodes[name].labels
        # The scheduler looks at labels alone here: a field such as metadata.name reads as empty.
        if volume.terms is not None and not matches_terms(volume.terms, labels, ""):
            refused.setdefault(name, VOLUME_REFUSED)
        elif with_zones and volume.zones and any(key in labels for key in ZONE_LABELS):
            for key, values in volume.zones:
                if labels.get(key, labels.get(_ZONE_NOW.get(key, key))) not in values:
                    refused.setdefault(name, ZONE_REFUSED)


def _evaluate_provisioning(kind: StorageClass, nodes: ClusterNodes, refused: Refusals) -> None:
    for name in nodes if kind.topologies else ():
        labels = nodes[name].labels
        if not any(one and all(labels.get(key) in values for key, values in one) for one in kind.topologies):
            refused.setdefault(name, PROVISIONING_REFUSED)


def parse_volume_claim(found: Mapping[str, Any]) -> BoundClaim:
    """The claim in an object of the API."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    owners = metadata.get("ownerReferences") or ()
    return BoundClaim(
        str(spec.get("volumeName") or ""),
        str(annotations.get(_CLASS_BEFORE) or spec.get("storageClassName") or ""),
        bool(spec.get("volumeName")) and _BIND_COMPLETED in annotations,
        metadata.get("deletionTimestamp") is not None,
        next((str(one.get("uid")) for one in owners if one.get("controller")), ""),
    )


def parse_volume(found: Mapping[str, Any]) -> PersistentVolume:
    """The volume in an object of the API."""
    labels = found["metadata"].get("labels") or {}
    required = ((found.get("spec") or {}).get("nodeAffinity") or {}).get("required")
    # Several zones stand in one label, divided by two underscores.
    zones = tuple((key, frozenset(str(labels[key]).split("__"))) for key in ZONE_LABELS if key in labels)
    return PersistentVolume(parse_node_terms(required), zones)


def parse_storage_class(found: Mapping[str, Any]) -> StorageClass:
    """The storage class in an object of the API."""
    topologies = [
        tuple(
            (str(line.get("key")), frozenset(map(str, line.get("values") or ())))
            for line in one.get("matchLabelExpressions") or ()
        )
        for one in found.get("allowedTopologies") or ()
    ]
    is_waiting = found.get("volumeBindingMode") == "WaitForFirstConsumer"
    return StorageClass(str(found.get("provisioner") or ""), is_waiting, tuple(topologies))
