"""Pods: what may be written while a gate holds them and after, binding, eviction under budgets.

Sources: kubernetes 1.36 `pkg/apis/core/validation` (ValidatePodUpdate and
validateNodeAffinityMutation), `pkg/registry/core/pod/storage`; KEP-3521, KEP-3838.
"""

from tests.fakes.kubernetes.faults import Bad, Fault, bad_request, conflict, invalid
from tests.fakes.kubernetes.selectors import matches
from tests.fakes.kubernetes.store import copied

_ONLY = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
_LATE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def condition(found, name, value, now, reason="", message=""):
    """Set a condition of an object; `found` is changed."""
    told = found.setdefault("status", {}).setdefault("conditions", [])
    one = {"type": name, "status": value, "lastProbeTime": None, "lastTransitionTime": now}
    one |= {key: text for key, text in (("reason", reason), ("message", message)) if text}
    for index, old in enumerate(told):
        if old["type"] == name:
            if old["status"] == value:
                one["lastTransitionTime"] = old.get("lastTransitionTime", now)
            told[index] = one
            return
    told.append(one)


def created(found, kind, now):
    """Defaults of a new pod, and what it must not be; `found` is changed."""
    spec, name = found.setdefault("spec", {}), found["metadata"]["name"]
    if not spec.get("containers"):
        raise invalid(kind, name, [Bad("spec.containers", "", "FieldValueRequired")])
    if spec.get("schedulingGates") and spec.get("nodeName"):
        why = "cannot be set until all schedulingGates have been cleared"
        raise invalid(kind, name, [Bad("spec.nodeName", why, "FieldValueForbidden")])
    defaults = {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30,
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "securityContext": {},
        "serviceAccountName": "default",
    }
    for key, value in defaults.items():
        spec.setdefault(key, value)
    _tolerated(spec)
    for container in spec["containers"]:
        container.setdefault("imagePullPolicy", "IfNotPresent")
        wanted = container.setdefault("resources", {})
        if wanted.get("limits"):
            wanted["requests"] = {**wanted["limits"], **wanted.get("requests", {})}
    found["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    if spec.get("schedulingGates"):
        why = "Scheduling is blocked due to non-empty scheduling gates"
        condition(found, "PodScheduled", "False", now, "SchedulingGated", why)
    return found


def _tolerated(spec):
    """What every pod tolerates for a while; an admission plugin adds it at each write."""
    tolerations = spec["tolerations"] = list(spec.get("tolerations") or ())
    for key in _LATE:
        if not any(one.get("key") in {key, None} and one.get("effect") in {"NoExecute", None} for one in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})


def updated(found, old, kind):
    """Whether a pod's spec may become this; the fault otherwise."""
    new, before, name = found["spec"], old["spec"], found["metadata"]["name"]
    if not new.get("schedulingGates"):
        new.pop("schedulingGates", None)
    _tolerated(new)
    bad = _gates(new, before)
    munged = copied(new)
    munged.pop("schedulingGates", None)
    wanted = {key: value for key, value in before.items() if key != "schedulingGates"}
    for which in ("containers", "initContainers"):
        if len(munged.get(which) or ()) == len(before.get(which) or ()):
            for one, its in zip(munged.get(which) or (), before.get(which) or (), strict=True):
                one["image"] = its.get("image")
    for key in ("activeDeadlineSeconds", "tolerations"):
        munged.pop(key, None)
        wanted.pop(key, None)
    had = before.get("tolerations") or []
    if any(one not in (new.get("tolerations") or []) for one in had):
        bad.append(
            Bad(
                "spec.tolerations",
                "existing toleration can not be modified except its tolerationSeconds",
                "FieldValueForbidden",
            )
        )
    if before.get("schedulingGates"):
        bad += _directives(munged, wanted)
    if not bad and munged != wanted:
        bad.append(Bad("spec", _ONLY, "FieldValueForbidden"))
    if bad:
        raise invalid(kind, name, bad)


def _gates(new, before):
    had = {one["name"] for one in before.get("schedulingGates") or ()}
    return [
        Bad(
            "spec.schedulingGates",
            f'only deletion is allowed, but found new scheduling gate "{one["name"]}"',
            "FieldValueForbidden",
        )
        for one in new.get("schedulingGates") or ()
        if one["name"] not in had
    ]


def _directives(munged, wanted):
    """The directives that a gated pod may be narrowed by; those that are well are made as they were in `munged`."""
    bad = []
    selector, its = munged.get("nodeSelector") or {}, wanted.get("nodeSelector") or {}
    if any(selector.get(key) != value for key, value in its.items()):
        bad.append(
            Bad("spec.nodeSelector", "only additions to spec.nodeSelector are allowed (no mutations or deletions)")
        )
    for spec in (munged, wanted):
        spec.pop("nodeSelector", None)
    affinity, was = munged.pop("affinity", None) or {}, wanted.pop("affinity", None) or {}
    bad += _affinity(affinity.get("nodeAffinity") or {}, was.get("nodeAffinity") or {})
    for spec, found in ((munged, affinity), (wanted, was)):
        if rest := {key: value for key, value in found.items() if key != "nodeAffinity" and value}:
            spec["affinity"] = rest
    return bad


def _affinity(new, before):
    place = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    required, was = (one.get("requiredDuringSchedulingIgnoredDuringExecution") for one in (new, before))
    if was is None:
        return []
    if required is None:
        return [Bad(place, "no additions/deletions to non-empty NodeSelectorTerms list are allowed")]
    terms, old_terms = required.get("nodeSelectorTerms") or [], was.get("nodeSelectorTerms") or []
    if len(terms) != len(old_terms):
        return [
            Bad(f"{place}.nodeSelectorTerms", "no additions/deletions to non-empty NodeSelectorTerms list are allowed")
        ]
    for index, (term, old) in enumerate(zip(terms, old_terms, strict=True)):
        for part in ("matchExpressions", "matchFields"):
            had = old.get(part) or []
            if (term.get(part) or [])[: len(had)] != had or (not old and term):
                return [
                    Bad(f"{place}.nodeSelectorTerms[{index}]", "only additions are allowed (no mutations or deletions)")
                ]
    return []


def bound(record, kind, binding, now):
    """A pod with its node, or the fault."""
    found = copied(record.object)
    metadata, name = found["metadata"], found["metadata"]["name"]
    wanted = binding.get("metadata") or {}
    if wanted.get("uid") and wanted["uid"] != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {wanted['uid']}, UID in object meta: {metadata['uid']}"
        raise conflict(kind, name, why)
    if wanted.get("resourceVersion") and wanted["resourceVersion"] != metadata["resourceVersion"]:
        why = (
            f"Precondition failed: ResourceVersion in precondition: {wanted['resourceVersion']}, "
            f"ResourceVersion in object meta: {metadata['resourceVersion']}"
        )
        raise conflict(kind, name, why)
    if metadata.get("deletionTimestamp"):
        raise conflict(kind, name, f"pod {name} is being deleted, cannot be assigned to a host")
    if found["spec"].get("nodeName"):
        raise conflict(kind, name, f'pod {name} is already assigned to node "{found["spec"]["nodeName"]}"')
    if found["spec"].get("schedulingGates"):
        raise conflict(kind, name, f"pod {name} has non-empty .spec.schedulingGates")
    node = (binding.get("target") or {}).get("name")
    if not node:
        raise bad_request("binding.target.name is required")
    found["spec"]["nodeName"] = node
    found["status"].pop("nominatedNodeName", None)
    condition(found, "PodScheduled", "True", now)
    metadata.setdefault("annotations", {}).update(wanted.get("annotations") or {})
    if not metadata["annotations"]:
        del metadata["annotations"]
    return found


def budget_of(pod, budgets):
    """The PodDisruptionBudget that speaks for a pod, of those of its namespace; more than one is a fault."""
    labels = pod["metadata"].get("labels") or {}
    found = [one for one in budgets if matches(one["spec"].get("selector") or {}, labels)]
    if len(found) > 1:
        why = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise Fault(500, "InternalError", why)
    return found[0] if found else None


def evictable(pod, budget, now):
    """The budget with one disruption less, None where it is not needed; the fault where it forbids."""
    is_over = pod["status"].get("phase") in {"Pending", "Succeeded", "Failed"} or pod["metadata"].get(
        "deletionTimestamp"
    )
    if budget is None or is_over:
        return None
    status, name = budget.get("status") or {}, budget["metadata"]["name"]
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or ())
    healthy, desired = status.get("currentHealthy", 0), status.get("desiredHealthy", 0)
    if not is_ready and (budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow" or healthy >= desired > 0):
        return None
    if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        raise _budget_forbids(f"The disruption budget {name} is still being processed by the server.", 10)
    if status.get("disruptionsAllowed", 0) <= 0:
        raise _budget_forbids(
            f"The disruption budget {name} needs {desired} healthy pods and has {healthy} currently", 0
        )
    found = copied(budget)
    found["status"]["disruptionsAllowed"] -= 1
    found["status"].setdefault("disruptedPods", {})[pod["metadata"]["name"]] = now
    return found


def _budget_forbids(why, retry_after_s):
    causes = [{"reason": "DisruptionBudget", "message": why}]
    details = {"causes": causes} | ({"retryAfterSeconds": retry_after_s} if retry_after_s else {})
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    message = "Cannot evict pod as it would violate the pod's disruption budget."
    return Fault(429, "TooManyRequests", message, details, headers)
