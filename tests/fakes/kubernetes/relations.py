"""What kube-scheduler looks at beside nodes: spread, pod affinity, volumes; over plain objects, each rule on its own.

Written from the documents of the API, not from Eelgrid's evaluation: the two are held against each other.
"""

from tests.fakes.kubernetes.selectors import matches

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_ZONES = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")


def _labels(found):
    return found["metadata"].get("labels") or {}


def _terms(pod, kind):
    return (((pod["spec"].get("affinity") or {}).get(kind)) or {}).get(_REQUIRED) or []


def _selector(rule, pod):
    """The selector of a rule, with what it takes over from the pod's own labels; None where it selects nothing."""
    selector = rule.get("labelSelector")
    if selector is None:
        return None
    lines = list(selector.get("matchExpressions") or ())
    for field, operator in (("matchLabelKeys", "In"), ("mismatchLabelKeys", "NotIn")):
        lines += [
            {"key": key, "operator": operator, "values": [_labels(pod)[key]]}
            for key in rule.get(field) or ()
            if key in _labels(pod)
        ]
    return {"matchLabels": selector.get("matchLabels") or {}, "matchExpressions": lines}


class Relations:
    """Pods that are bound, on nodes; asked about one pod and one node."""

    def __init__(self, nodes, pods, namespaces=None, claims=None, volumes=None, classes=None):
        """All by name; claims by namespace and name. `pods` are those that are bound and have not ended."""
        self.nodes, self.pods = nodes, [one for one in pods if one["spec"]["nodeName"] in nodes]
        self.namespaces, self.claims = namespaces or {}, claims or {}
        self.volumes, self.classes = volumes or {}, classes or {}

    def why_not(self, pod, node, in_affinity, tolerates):
        """Why a pod cannot go to a node; empty where it can. Two predicates on nodes are those of its own demands."""
        return (
            self._volumes(pod, node)
            or self._near(pod, node)
            or self._far(pod, node)
            or self._spread(pod, node, in_affinity, tolerates)
        )

    def _means(self, term, owner, other):
        selector = _selector(term, owner)
        if selector is None or not matches(selector, _labels(other)):
            return False
        named, space = term.get("namespaces") or [], other["metadata"]["namespace"]
        chosen = term.get("namespaceSelector")
        if not named and chosen is None:
            return space == owner["metadata"]["namespace"]
        return space in named or (
            chosen is not None and matches(chosen, _labels(self.namespaces.get(space, {"metadata": {}})))
        )

    def _shares(self, key, node, other):
        value = _labels(node).get(key)
        return value is not None and _labels(self.nodes[other["spec"]["nodeName"]]).get(key) == value

    def _near(self, pod, node):
        terms = _terms(pod, "podAffinity")
        if not terms:
            return ""
        if any(term["topologyKey"] not in _labels(node) for term in terms):
            return "didn't match pod affinity rules"
        friends = [one for one in self.pods if all(self._means(term, pod, one) for term in terms)]
        if all(any(self._shares(term["topologyKey"], node, one) for one in friends) for term in terms):
            return ""
        placed = any(
            term["topologyKey"] in _labels(self.nodes[one["spec"]["nodeName"]]) for term in terms for one in friends
        )
        if not placed and all(self._means(term, pod, pod) for term in terms):
            return ""
        return "didn't match pod affinity rules"

    def _far(self, pod, node):
        for one in self.pods:
            if any(
                self._means(term, pod, one) and self._shares(term["topologyKey"], node, one)
                for term in _terms(pod, "podAntiAffinity")
            ):
                return "didn't match pod anti-affinity rules"
            if any(
                self._means(term, one, pod) and self._shares(term["topologyKey"], node, one)
                for term in _terms(one, "podAntiAffinity")
            ):
                return "didn't satisfy existing pods anti-affinity rules"
        return ""

    def _spread(self, pod, node, in_affinity, tolerates):
        hard = [
            one
            for one in pod["spec"].get("topologySpreadConstraints") or ()
            if one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule"
        ]
        for one in hard:
            key = one["topologyKey"]
            if key not in _labels(node):
                return "didn't match pod topology spread constraints (missing required label)"
            domains = {}
            for name, other in self.nodes.items():
                if any(each["topologyKey"] not in _labels(other) for each in hard):
                    continue
                if one.get("nodeAffinityPolicy", "Honor") == "Honor" and not in_affinity(other):
                    continue
                if one.get("nodeTaintsPolicy", "Ignore") == "Honor" and not tolerates(other):
                    continue
                domains.setdefault(_labels(other)[key], []).append(name)
            held = {
                value: sum(self._counts(one, pod, each) for each in self.pods if each["spec"]["nodeName"] in names)
                for value, names in domains.items()
            }
            least = 0 if len(held) < (one.get("minDomains") or 1) else min(held.values(), default=0)
            selector = _selector(one, pod)
            itself = selector is not None and matches(selector, _labels(pod))
            if held.get(_labels(node)[key], 0) + itself - least > one["maxSkew"]:
                return "didn't match pod topology spread constraints"
        return ""

    @staticmethod
    def _counts(one, pod, other):
        selector, its = _selector(one, pod), other["metadata"]
        if its["namespace"] != pod["metadata"]["namespace"] or its.get("deletionTimestamp") or selector is None:
            return False
        return bool(selector["matchLabels"] or selector["matchExpressions"]) and matches(selector, _labels(other))

    def _volumes(self, pod, node):
        for volume in pod["spec"].get("volumes") or ():
            claimed = volume.get("persistentVolumeClaim")
            if claimed is None and volume.get("ephemeral") is None:
                continue
            name = claimed["claimName"] if claimed else f"{pod['metadata']['name']}-{volume['name']}"
            claim = self.claims.get((pod["metadata"]["namespace"], name))
            if claim is None or claim["metadata"].get("deletionTimestamp"):
                return f'persistentvolumeclaim "{name}" not found'
            bound = claim["spec"].get("volumeName")
            if not bound:
                kind = self.classes.get(claim["spec"].get("storageClassName"), {})
                if kind.get("volumeBindingMode") != "WaitForFirstConsumer":
                    return "pod has unbound immediate PersistentVolumeClaims"
                if not self._provisions(kind, node):
                    return "didn't find available persistent volumes to bind"
                continue
            affinity = ((self.volumes[bound]["spec"].get("nodeAffinity") or {}).get("required") or {}).get(
                "nodeSelectorTerms"
            )
            if affinity is not None and not any(self._holds(term, node) for term in affinity):
                return "had volume node affinity conflict"
            its = _labels(self.volumes[bound])
            if any(key in _labels(node) for key in _ZONES) and any(
                key in its and _labels(node).get(key) not in its[key].split("__") for key in _ZONES
            ):
                return "had no available volume zone"
        return ""

    @staticmethod
    def _holds(term, node):
        lines = term.get("matchExpressions") or ()
        return bool(lines) and not term.get("matchFields") and matches({"matchExpressions": lines}, _labels(node))

    @staticmethod
    def _provisions(kind, node):
        allowed = kind.get("allowedTopologies") or ()
        if kind.get("provisioner", "kubernetes.io/no-provisioner") == "kubernetes.io/no-provisioner":
            return False
        return not allowed or any(
            all(_labels(node).get(line["key"]) in line["values"] for line in one["matchLabelExpressions"])
            for one in allowed
        )
