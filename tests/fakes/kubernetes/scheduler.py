"""A small kube-scheduler: binds pods without gates to nodes that fit, as the real one decides it.

Knows node affinity with fields and expressions, node selectors, taints, cordons, amounts of
any resource, allocated ResourceClaims (with the trap of the missing timestamp), gangs of a
PodGroup, and what `relations.py` has: topology spread, pod affinity, volumes. Does not know
preemption, nor how to allocate a claim or provision a volume.
"""

from eelgrid_controller.engines.kubernetes.api.port import (
    NAMESPACES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_GROUPS,
    PODS,
    RESOURCE_CLAIMS,
    STORAGE_CLASSES,
)
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.parts import Part
from tests.fakes.kubernetes.pods import condition
from tests.fakes.kubernetes.relations import Relations
from tests.fakes.kubernetes.store import copied

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(text):
    """A quantity as a number."""
    text = str(text)
    for unit in ("Ki", "Mi", "Gi", "Ti", "m", "k", "M", "G", "T"):
        if text.endswith(unit):
            return float(text[: -len(unit)]) * _UNITS[unit]
    return float(text)


def asked(pod):
    """The amounts that a pod asks for."""
    total = {"pods": 1.0}
    for container in pod["spec"]["containers"]:
        for name, text in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = total.get(name, 0.0) + amount(text)
    return total


def _holds(one, value, has):
    values = one.get("values") or ()
    match one["operator"]:
        case "In":
            return has and value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return has
        case "DoesNotExist":
            return not has
        case "Gt":
            return has and int(value) > int(values[0])
        case _:
            return has and int(value) < int(values[0])


def in_terms(terms, node):
    """Whether a node is meant by any of these terms."""
    labels, name = node["metadata"].get("labels") or {}, node["metadata"]["name"]
    return any(
        all(_holds(one, labels.get(one["key"]), one["key"] in labels) for one in term.get("matchExpressions") or ())
        and all(_holds(one, name, has=True) for one in term.get("matchFields") or ())
        and (term.get("matchExpressions") or term.get("matchFields"))
        for term in terms
    )


def tolerates(pod, taint):
    return any(
        one.get("effect") in {None, "", taint["effect"]}
        and (
            (one.get("operator") == "Exists" and one.get("key") in {None, "", taint["key"]})
            or (one.get("key") == taint["key"] and one.get("value", "") == taint.get("value", ""))
        )
        for one in pod["spec"].get("tolerations") or ()
    )


def _is_related(pod):
    affinity, volumes = pod["spec"].get("affinity") or {}, pod["spec"].get("volumes") or ()
    return bool(
        pod["spec"].get("topologySpreadConstraints")
        or affinity.get("podAffinity")
        or affinity.get("podAntiAffinity")
        or any("persistentVolumeClaim" in one or "ephemeral" in one for one in volumes)
    )


def _repels(pod):
    return bool((pod["spec"].get("affinity") or {}).get("podAntiAffinity"))


class Scheduler(Part):
    """Binds; a part."""

    def begin(self):
        self.pending = {}  # by key: the pod
        self.nodes = {}  # by name: the node
        self.used = {}  # by node: amounts
        self.placed = {}  # by uid: pods that are bound and have not ended
        self.why = {}  # by uid: what the last try found in the way
        self.bound = 0
        for kind in (NODES, PODS):
            for record in self.store.of(self.kind(kind)).values():
                self._note(kind.plural, None, record)

    def heard(self, kind, event):
        self._note(kind.plural, event.before, event.after)
        return kind.plural in {"pods", "nodes", "resourceclaims", "podgroups", "persistentvolumeclaims", "namespaces"}

    def _note(self, plural, before, after):
        some = (after or before).object
        name = some["metadata"]["name"]
        if plural == "nodes":
            if after is None:
                self.nodes.pop(name, None)
            else:
                self.nodes[name] = some
        elif plural == "pods":
            self._count(before, -1.0)
            self._count(after, 1.0)
            key = (some["metadata"]["namespace"], name)
            spec = some["spec"]
            waits = after is not None and not spec.get("nodeName") and not spec.get("schedulingGates")
            if waits and spec["schedulerName"] == "default-scheduler" and not some["metadata"].get("deletionTimestamp"):
                self.pending[key] = some
            else:
                self.pending.pop(key, None)

    def _count(self, record, sign):
        if record is None or not (node := record.object["spec"].get("nodeName")):
            return
        if record.object["status"].get("phase") in {"Succeeded", "Failed"}:
            return
        if sign > 0:
            self.placed[record.object["metadata"]["uid"]] = record.object
        else:
            self.placed.pop(record.object["metadata"]["uid"], None)
        used = self.used.setdefault(node, {})
        for name, value in asked(record.object).items():
            used[name] = used.get(name, 0.0) + sign * value

    def work(self):
        gangs = {}
        for key, pod in list(self.pending.items()):
            group = (pod["spec"].get("schedulingGroup") or {}).get("podGroupName")
            if group:
                gangs.setdefault((key[0], group), []).append(pod)
            elif (node := self._place(pod, self.used)) is None:
                self._unschedulable(pod)
            else:
                self._bind(pod, node)
        for (namespace, name), members in gangs.items():
            self._gang(namespace, name, members)

    def _gang(self, namespace, name, members):
        """All of a gang, or none; those that are bound already count."""
        record = self.store.find(self.kind(POD_GROUPS), namespace, name) if self.kind(POD_GROUPS) else None
        if record is None:
            return
        policy = record.object["spec"].get("schedulingPolicy") or {}
        least = (policy.get("gang") or {}).get("minCount", 1)
        bound = sum(
            1
            for (at, _), one in self.store.of(self.kind(PODS)).items()
            if at == namespace
            and (one.object["spec"].get("schedulingGroup") or {}).get("podGroupName") == name
            and one.object["spec"].get("nodeName")
        )
        used = {node: dict(amounts) for node, amounts in self.used.items()}
        places = []
        for pod in members:
            node = self._place(pod, used)
            if node is not None:
                places.append((pod, node))
                taken = used.setdefault(node, {})
                for what, value in asked(pod).items():
                    taken[what] = taken.get(what, 0.0) + value
        if len(places) + bound < least:
            return
        for pod, node in places:
            self._bind(pod, node)

    def _place(self, pod, used):
        """The node for a pod, None where none fits."""
        claims = self._claims(pod)
        if claims is None:
            return None
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        terms = required["nodeSelectorTerms"] if required else None
        names = self.nodes
        if terms and len(terms) == 1 and (fields := terms[0].get("matchFields")) and fields[0]["operator"] == "In":
            names = [name for name in fields[0]["values"] if name in self.nodes]
        fitting = [name for name in names if self._fits(pod, self.nodes[name], terms, claims, used.get(name, {}))]
        refused = self._related(pod, fitting, terms)
        fitting = [name for name in fitting if name not in refused]
        self.why[pod["metadata"]["uid"]] = next(iter(refused.values()), "Insufficient nvidia.com/gpu")
        return min(fitting, key=lambda name: (used.get(name, {}).get("pods", 0.0), name), default=None)

    def _related(self, pod, names, terms):
        """Why rules between pods, or volumes, refuse nodes."""
        if not _is_related(pod) and not any(map(_repels, self.placed.values())):
            return {}
        selector = (pod["spec"].get("nodeSelector") or {}).items()

        def in_affinity(node):
            labels = node["metadata"].get("labels") or {}
            return all(labels.get(key) == value for key, value in selector) and (terms is None or in_terms(terms, node))

        def tolerated(node):
            taints = (node.get("spec") or {}).get("taints") or ()
            return all(taint["effect"] == "PreferNoSchedule" or tolerates(pod, taint) for taint in taints)

        def known(resource):
            return {name: record.object for (_, name), record in self.store.of(self.kind(resource)).items()}

        claims = {key: record.object for key, record in self.store.of(self.kind(PERSISTENT_VOLUME_CLAIMS)).items()}
        relations = Relations(
            self.nodes,
            self.placed.values(),
            known(NAMESPACES),
            claims,
            known(PERSISTENT_VOLUMES),
            known(STORAGE_CLASSES),
        )
        found = {name: relations.why_not(pod, self.nodes[name], in_affinity, tolerated) for name in names}
        return {name: f"node(s) {why}" for name, why in found.items() if why}

    def _fits(self, pod, node, terms, claims, used):
        spec = node.get("spec") or {}
        if spec.get("unschedulable"):
            return False
        for taint in spec.get("taints") or ():
            if taint["effect"] in {"NoSchedule", "NoExecute"} and not tolerates(pod, taint):
                return False
        labels = node["metadata"].get("labels") or {}
        if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
            return False
        if terms is not None and not in_terms(terms, node):
            return False
        for claim in claims:
            selector = claim["status"]["allocation"].get("nodeSelector")
            if selector is not None and not in_terms(selector["nodeSelectorTerms"], node):
                return False
        room = node["status"].get("allocatable") or {}
        return all(used.get(name, 0.0) + value <= amount(room.get(name, 0)) for name, value in asked(pod).items())

    def _claims(self, pod):
        """The allocated claims of a pod, None where one is not allocated or cannot be completed."""
        made = {one["name"]: one.get("resourceClaimName") for one in pod["status"].get("resourceClaimStatuses") or ()}
        found = []
        for one in pod["spec"].get("resourceClaims") or ():
            name = one.get("resourceClaimName") or made.get(one["name"])
            record = name and self.store.find(self.kind(RESOURCE_CLAIMS), pod["metadata"]["namespace"], name)
            allocation = record and (record.object.get("status") or {}).get("allocation")
            if not allocation or not allocation.get("allocationTimestamp"):
                return None  # the real one tries to add the timestamp for ever: the field is immutable
            found.append(record.object)
        return found

    def _bind(self, pod, node):
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        kind = self.kind(RESOURCE_CLAIMS)
        for claim in self._claims(pod) or ():
            found = copied(claim)
            users = found["status"].setdefault("reservedFor", [])
            user = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
            if user not in users:
                users.append(user)
                self.store.put(kind, found)
        try:
            self.api.bind(self.kind(PODS), namespace, name, {"target": {"name": node}})
            self.bound += 1
        except Fault:
            self.pending.pop((namespace, name), None)

    def _unschedulable(self, pod):
        told = {one["type"]: one for one in pod["status"].get("conditions") or ()}.get("PodScheduled", {})
        if told.get("reason") == "Unschedulable":
            return
        found = copied(pod)
        why = f"0/{len(self.nodes)} nodes are available: 1 {self.why.get(pod['metadata']['uid'], 'node')}."
        condition(found, "PodScheduled", "False", self.api.stamps.time(), "Unschedulable", why)
        self.store.put(self.kind(PODS), found)
