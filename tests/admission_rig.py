"""What admission does to a new pod: by the chart's policy, and by the chart's webhook and its server.

Owns the API server's part: selectors, match conditions, and how their patches are applied.
The pods of both suites are here, the one without a cluster and the one on a real one.
"""

import base64
import copy
import json
import uuid

from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules, review_pod
from tests.fakes.kubernetes.cel import CelError, evaluate
from tests.fakes.kubernetes.selectors import matches

TRIAL, OPTED_IN = "eelgrid-trial", "eelgrid-trial-all"
MANAGED, LEFT = {"eelgrid.io/managed": "true"}, {"eelgrid.io/managed": "false"}
# The release's own namespace, beside those that the chart excludes.
RULES = GateRules(excluded=frozenset({"kube-system", "kube-public", "kube-node-lease", "eelgrid"}))


def pod(name="p", where=TRIAL, gpus=0, labels=None, metadata=None, **spec):
    container = {"name": "c", "image": "none"}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": where, "labels": labels or {}, **(metadata or {})},
        "spec": {"containers": [container], **spec},
    }


_SET = [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u-1", "controller": True}]
OTHER_GATE = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
_TOLERATES = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
_SLICE = {"name": "i", "image": "none", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
GATED = {
    "a pod with the label": pod(labels=MANAGED),
    "a pod with the label, with GPUs": pod(labels=MANAGED, gpus=1),
    "a pod with GPUs in an opted-in namespace": pod(where=OPTED_IN, gpus=2),
    "a pod with the label in an opted-in namespace": pod(where=OPTED_IN, labels=MANAGED, gpus=1),
    "a pod that another gate holds": pod(labels=MANAGED, **OTHER_GATE),
    "a pod that has our gate": pod(labels=MANAGED, schedulingGates=[{"name": "eelgrid.io/placement"}]),
    "a pod with tolerations": pod(labels=MANAGED, **_TOLERATES),
    "a pod with a claim in an opted-in namespace": pod(
        where=OPTED_IN, resourceClaims=[{"name": "g", "resourceClaimTemplateName": "t"}]
    ),
    "a pod whose first container has a slice": pod(where=OPTED_IN, initContainers=[_SLICE]),
}
UNTOUCHED = {
    "a pod of nobody": pod(gpus=1),
    "a pod without devices in an opted-in namespace": pod(where=OPTED_IN),
    "a pod that says no": pod(where=OPTED_IN, labels=LEFT, gpus=1),
    "a pod that has a node": pod(labels=MANAGED, nodeName="n1"),
    "a DaemonSet's pod": pod(labels=MANAGED, metadata={"ownerReferences": _SET}),
    "a mirror pod": pod(labels=MANAGED, metadata={"annotations": {"kubernetes.io/config.source": "file"}}),
    "a pod of the system": pod(where="kube-system", labels=MANAGED, gpus=1),
    "a pod of our own namespace": pod(where="eelgrid", labels=MANAGED, gpus=1),
}


def labels_of(namespace):
    """Of the namespaces that the pods above are in."""
    return {"kubernetes.io/metadata.name": namespace} | (MANAGED if namespace == OPTED_IN else {})


def _means(resources, found):
    namespace = found["metadata"]["namespace"]
    labels = found["metadata"].get("labels") or {}
    return matches(resources["objectSelector"], labels) and matches(
        resources["namespaceSelector"], labels_of(namespace)
    )


def _fits(conditions, found):
    """Whether all hold; one that cannot be evaluated leaves the pod alone, as `failurePolicy: Ignore` says."""
    try:
        return all(evaluate(one["expression"], object=found) for one in conditions)
    except CelError:
        return False


def by_policy(objects, found):
    """The pod as the chart's policy makes it."""
    kinds = {kind: [one["spec"] for one in objects if one["kind"] == kind] for kind in _POLICY_KINDS}
    ((policy,), bindings) = kinds.values()
    for binding in bindings:
        if _means(binding["matchResources"], found) and _fits(policy["matchConditions"], found):
            for mutation in policy["mutations"]:
                found = _mutated(found, mutation)
    return found


_POLICY_KINDS = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")


def _mutated(found, mutation):
    if mutation["patchType"] == "JSONPatch":
        return patched(found, evaluate(mutation["jsonPatch"]["expression"], object=found))
    applied = evaluate(mutation["applyConfiguration"]["expression"], object=found)
    (gate,) = applied["spec"].pop("schedulingGates")
    assert applied == {"spec": {}}, "the rig merges gates only"
    found = copy.deepcopy(found)
    gates = found["spec"].setdefault("schedulingGates", [])
    if gate["name"] not in {one["name"] for one in gates}:
        gates.append(gate)
    return found


def by_webhook(objects, found, *, has_conditions=True, rules=RULES, asked=None, is_leader_away=False):
    """The pod as the chart's webhook and the server behind it make it; `asked` gets the paths that were asked.

    Without the conditions the server has to say by itself what they would have kept away from it.
    """
    (configuration,) = (one for one in objects if one["kind"] == "MutatingWebhookConfiguration")
    for hook in configuration["webhooks"]:
        if _means(hook, found) and (not has_conditions or _fits(hook["matchConditions"], found)):
            path = hook["clientConfig"]["service"]["path"]
            if is_leader_away and path.startswith("/place/"):
                continue
            if asked is not None:
                asked.append(path)
            is_opted_in = path.endswith("/namespaces")
            answered = review_pod(review_of(found), rules, is_opted_in=is_opted_in).review["response"]
            assert answered["allowed"] is True
            if "patch" in answered:
                found = patched(found, json.loads(base64.b64decode(answered["patch"])))
    return found


def review_of(found, **request):
    """What an API server asks about a new pod."""
    asked = {
        "uid": str(uuid.uuid4()),
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": found["metadata"]["namespace"],
        "object": found,
        "dryRun": False,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked | request}


def patched(found, patch):
    """After a JSON patch of what is written here: values added to objects, or to the end of lists."""
    found = copy.deepcopy(found)
    for one in patch:
        assert one["op"] == "add"
        *way, last = (part.replace("~1", "/") for part in one["path"].split("/")[1:])
        inner = found
        for part in way:
            inner = inner[part]
        if last == "-":
            inner.append(one["value"])
        else:
            inner[last] = one["value"]
    return found
