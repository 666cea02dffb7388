"""Eligible nodes of a pod by every kube-scheduler rule but capacity.

Implements the core's eligibility rules for workloads that traits cannot describe: the core asks at the moment of its
decision, with what it has decided since. A node whose pin kube-scheduler refused twice is closed for pods of that
owner and template. What cannot be evaluated here is left to kube-scheduler.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.selectors import NO_RELATIONS
from eelgrid_controller.engines.kubernetes.pods.topology_constraints import (
    PIN_REFUSED,
    BoundClaim,
    ClusterNodes,
    PersistentVolume,
    PlacedPod,
    PodIndex,
    PodsView,
    StorageClass,
    Volumes,
    evaluate_pod_affinity,
    evaluate_topology_spread,
    evaluate_volume_topology,
    is_repelled,
    needs_namespaces,
    placed_pod,
)
from eelgrid_protos.messages import Workload

# What may have to be read beside pods and nodes.
NAMESPACES, VOLUMES = "namespaces", "volumes"
PIN_REFUSED_TWICE = "kube-scheduler refused pins to them twice"
# Refusals of one node after which it is never tried again for an owner's pods: the first may be a race.
MAX_PIN_REFUSALS = 2
# Owners and nodes whose refusals are remembered; the oldest are forgotten first.
_REMEMBERED_MOST = 10_000
# What kube-scheduler says of what comes and goes and is known here, too: room that the core counts, cordons, taints.
_ROOM = re.compile(
    r"\d+ (Insufficient (cpu|memory|nvidia\.com/gpu|amd\.com/gpu)|Too many pods"
    r"|node\(s\) (were unschedulable|had untolerated taint.*))"
)
# And of nodes that the pin excludes.
_PINNED_AWAY = re.compile(
    r"\d+ node\(s\) didn't match Pod's node affinity(/selector)?|.*NodeAffinity.*|\d+ node\(s\) didn't satisfy plugin.*"
)


class EligibilityVerdict(NamedTuple):
    """Nodes that will do, room apart. `waits` says what has to happen first, `left` that kube-scheduler is to decide."""

    eligible: frozenset[str]
    refused: Mapping[str, int]  # nodes by the rule that refuses them
    waits: str = ""
    left: str = ""

    @property
    def text(self) -> str:
        """Why no node is eligible, in words; empty where one is."""
        if self.left or self.waits:
            return self.left or self.waits
        if self.eligible:
            return ""
        counted = ", ".join(f"{count} {why}" for why, count in sorted(self.refused.items(), key=lambda one: -one[1]))
        return f"no node is eligible: {counted}" if counted else "no node is eligible"


class PinRefusals:
    """How often kube-scheduler refused a node for the pods of an owner and template."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._closed: dict[str, set[str]] = {}

    def record_refusal(self, pod: Pod, node_name: str) -> None:
        """A pin was refused; not for what comes and goes, such as room, and is counted elsewhere."""
        owner = _owner_key(pod)
        if not owner or not node_name or _is_room_only(pod.unscheduled_message):
            return
        if len(self._counts) >= _REMEMBERED_MOST:
            self._forget_refusal(next(iter(self._counts)))
        count = self._counts.pop((owner, node_name), 0) + 1
        self._counts[owner, node_name] = count
        if count >= MAX_PIN_REFUSALS:
            self._closed.setdefault(owner, set()).add(node_name)

    def closed_nodes(self, pod: Pod) -> frozenset[str]:
        """Nodes that are never tried again for a pod."""
        return frozenset(self._closed.get(_owner_key(pod), ())) if self._closed else frozenset()

    def _forget_refusal(self, key: tuple[str, str]) -> None:
        del self._counts[key]
        owner, node_name = key
        closed = self._closed.get(owner, set())
        closed.discard(node_name)
        if not closed:
            self._closed.pop(owner, None)


class EligibleNodes:
    """What is known of nodes, pods and volumes, and the verdicts that follow; the core's `EligibilityRules`."""

    # Affinities and volumes are no part of a spec.
    follows_specs = False

    def __init__(self) -> None:
        self.nodes = ClusterNodes()
        self.pods = PodIndex()
        self.volumes = Volumes()
        self.refusals = PinRefusals()
        self.readable: dict[str, bool] = {}  # by kind; without an entry it is still being read
        self.revision = 0  # counts changes after which an answer may be another
        self._judged: dict[str, tuple[Pod, ...]] = {}  # by workload: the pod of each replica, the last for all beyond
        self._deciding: dict[str, tuple[Pod, ...]] = {}  # workloads that the core was asked for and has not answered

    # What is told

    def set_node(self, node: KubeNode) -> None:
        """A node was added or changed."""
        self.revision += self.nodes.put_node(node)

    def remove_node(self, name: str) -> None:
        """A node was deleted."""
        self.revision += self.nodes.remove_node(name)

    def put_pod(self, pod: Pod, node_name: str) -> None:
        """A pod is on a node, or was planned or pinned there; nowhere, where that is empty."""
        is_there = bool(node_name) and not pod.is_terminal
        self.revision += self.pods.put_pod(placed_pod(pod, node_name)) if is_there else self.pods.remove_pod(pod.uid)

    def remove_pod(self, uid: str) -> None:
        """A pod was deleted."""
        self.revision += self.pods.remove_pod(uid)

    def set_readable(self, kind: str, *, is_readable: bool) -> None:
        """Whether the objects of a kind are known as a whole, or cannot be."""
        self.revision += self.readable.get(kind) is not is_readable
        self.readable[kind] = is_readable

    def set_related(
        self,
        kind: str,
        namespace: str,
        name: str,
        value: Mapping[str, str] | BoundClaim | PersistentVolume | StorageClass | None,
    ) -> None:
        """A namespace, given by its labels, a claim, a volume or a storage class; None for one that is no more."""
        self.revision += 1
        match value:
            case BoundClaim():
                self.volumes.claims[namespace, name] = value
            case PersistentVolume():
                self.volumes.volumes[name] = value
            case StorageClass():
                self.volumes.classes[name] = value
            case None if kind == "persistentvolumeclaims":
                self.volumes.claims.pop((namespace, name), None)
            case None if kind == "persistentvolumes":
                self.volumes.volumes.pop(name, None)
            case None if kind == "storageclasses":
                self.volumes.classes.pop(name, None)
            case _:
                self.pods.set_namespace(name, value)

    # Who is judged

    def needs_evaluation(self, pod: Pod) -> bool:
        """Whether more decides about the pod than its own demands of nodes."""
        return pod.relations != NO_RELATIONS or bool(self.refusals.closed_nodes(pod)) or is_repelled(pod, self.pods)

    def register_workload(self, workload_id: str, pods: Sequence[Pod], *, is_judged: bool) -> None:
        """The core is asked for a workload of these pods, by replica."""
        found = tuple(pods)
        self._deciding[workload_id] = found
        self._judged.pop(workload_id, None)
        if is_judged:
            self._judged[workload_id] = found

    def on_answer(self, workload_id: str) -> None:
        """The core has answered: from now on its places are told by `place`."""
        self._deciding.pop(workload_id, None)

    def forget_workload(self, workload_id: str) -> None:
        """A workload ended, or does not wait any longer."""
        self._deciding.pop(workload_id, None)
        self._judged.pop(workload_id, None)

    # Verdicts

    def evaluate_pod(self, pod: Pod, pods: PodsView | None = None) -> EligibilityVerdict:
        """Which nodes will do for a pod, beside the pods of this view or else beside all others."""
        view = self.pods.with_overlay((pod.uid,), ()) if pods is None else pods
        waits, left = self._unread(pod)
        if waits or left:
            return EligibilityVerdict(frozenset(), {}, waits, left)
        volumes = evaluate_volume_topology(pod, self.nodes, self.volumes)
        if volumes.waits or volumes.left:
            return EligibilityVerdict(frozenset(), {}, volumes.waits, volumes.left)
        refused = dict(volumes.refused)
        for found in (evaluate_pod_affinity(pod, self.nodes, view), evaluate_topology_spread(pod, self.nodes, view)):
            for name, why in found.items():
                refused.setdefault(name, why)
        for name in self.refusals.closed_nodes(pod):
            refused.setdefault(name, PIN_REFUSED_TWICE)
        right = self.nodes.nodes_satisfying(pod.constraint)
        eligible = right - refused.keys()
        counts = Counter(refused[name] for name in right & refused.keys())
        if len(self.nodes) > len(right):
            counts["node selector, affinity or taints"] = len(self.nodes) - len(right)
        by_pin = [why for why in (PIN_REFUSED, PIN_REFUSED_TWICE) if counts[why]]
        if by_pin and not eligible:
            return EligibilityVerdict(
                frozenset(), counts, left=f"no node is eligible but those refused for {by_pin[0]}"
            )
        return EligibilityVerdict(eligible, counts)

    def permits_node(self, pod: Pod, node_name: str) -> bool:
        """Whether a pod may go to a node now, room apart."""
        if node_name not in self.nodes:
            return False
        if not self.needs_evaluation(pod):
            return node_name in self.nodes.nodes_satisfying(pod.constraint)
        return node_name in self.evaluate_pod(pod).eligible

    def is_reading(self, pods: Sequence[Pod]) -> bool:
        """Whether something that decides about these pods is still being read."""
        return any(kind not in self.readable for pod in pods for kind in _wanted(pod))

    def unsupported_reason(self, pods: Sequence[Pod]) -> str:
        """Why pods have to be left to kube-scheduler; empty where they need not."""
        return next(
            (found.left for pod in pods if self.needs_evaluation(pod) and (found := self.evaluate_pod(pod)).left), ""
        )

    def _unread(self, pod: Pod) -> tuple[str, str]:
        """What has to be read first, or what cannot be."""
        for kind in _wanted(pod):
            readable = self.readable.get(kind)
            if readable is None:
                return f"{kind} are being read", ""
            if not readable:
                return "", f"{kind} cannot be read; grant get, list and watch on them"
        return "", ""

    # As the core's EligibilityRules

    def has_rules_for(self, workload_id: str) -> bool:
        """Whether a workload is judged by asking."""
        return workload_id in self._judged

    def list_eligible_nodes(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Nodes for the next replica, once those before it are placed; with all that was decided a moment ago."""
        pods = self._judged[workload_id]
        planned = [placed_pod(_of_replica(pods, replica), name) for replica, name in placed.items()]
        view = self.pods.with_overlay(
            {pod.uid for pod in pods}, [*planned, *self._decided_pods(workload_id, workloads)]
        )
        return self.evaluate_pod(_of_replica(pods, len(placed)), view).eligible

    def list_equivalent_nodes(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Nodes in every domain that the terms of affinity among its pods bind the others to, too."""
        keys = {term.topology_key for pod in self._judged[workload_id] for term in pod.relations.affinity}
        if not keys:
            return frozenset((node_name,))
        domains = [self.nodes.domains_of(key) for key in keys]
        same = [{name for name, found in one.items() if found == one.get(node_name)} for one in domains]
        return frozenset(same[0].intersection(*same[1:]))

    def _decided_pods(self, but: str, workloads: Mapping[str, Workload]) -> list[PlacedPod]:
        """Pods whose places the core has decided and not committed yet."""
        found: list[PlacedPod] = []
        for workload_id, pods in self._deciding.items():
            workload = workloads.get(workload_id) if workload_id != but else None
            if workload is not None:
                places = (place for place in workload.placements if place.replica < len(pods))
                found += (placed_pod(pods[place.replica], place.node_name) for place in places)
        return found


def _wanted(pod: Pod) -> list[str]:
    """What a pod is judged by beside pods and nodes."""
    return [VOLUMES] * bool(pod.relations.claims) + [NAMESPACES] * needs_namespaces(pod)


def _of_replica(pods: Sequence[Pod], replica: int) -> Pod:
    return pods[min(replica, len(pods) - 1)]


def _owner_key(pod: Pod) -> str:
    """Pods of one controller and template."""
    if pod.owner is None:
        return ""
    template = pod.labels.get("pod-template-hash") or pod.labels.get("controller-revision-hash", "")
    return f"{pod.owner.uid}/{template}"


def _is_room_only(message: str) -> bool:
    """Whether kube-scheduler names nothing but room, beside the nodes that the pin excludes."""
    told = message.partition("available:")[2].partition(". ")[0].rstrip(".")
    clauses = [clause.strip() for clause in told.split(",") if clause.strip()]
    rest = [clause for clause in clauses if not _PINNED_AWAY.fullmatch(clause)]
    return bool(rest) and all(_ROOM.fullmatch(clause) for clause in rest)
