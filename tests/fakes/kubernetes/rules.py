"""What may be written, by kind: defaults of new objects, the status apart, what is fixed."""

from tests.fakes.kubernetes import claims, pods
from tests.fakes.kubernetes.faults import Bad, invalid
from tests.fakes.kubernetes.selectors import matches

_IMMUTABLE = "field is immutable"
_KEEPS_STATUS = {"nodes"}  # a new object of theirs may bring its status
# What a suspended Job's template may change (KEP-2926, KEP-5440).
_JOB_METADATA = ("labels", "annotations")
_JOB_SPEC = ("nodeSelector", "tolerations", "schedulingGates", "affinity")


def created(found, kind, now):
    """A new object as it is stored; `found` is changed."""
    if kind.has_status and kind.plural not in _KEEPS_STATUS:
        found.pop("status", None)
    match kind.plural:
        case "pods":
            pods.created(found, kind, now)
        case "namespaces":
            found["status"] = {"phase": "Active"}
            found.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
            found["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = found["metadata"]["name"]
        case "deployments" | "replicasets" | "statefulsets" | "daemonsets":
            _workload(found, kind)
        case "jobs":
            _job(found, kind)
        case "leases":
            _lease(found, kind)
        case "poddisruptionbudgets" | "resourceclaims" | "customresourcedefinitions":
            found.setdefault("status", {})
    return found


def updated(found, old, kind):
    """Whether an object may become this, its status apart."""
    name = found["metadata"]["name"]
    match kind.plural:
        case "pods":
            pods.updated(found, old, kind)
        case "resourceclaims":
            claims.updated(found, old, kind)
        case "resourceclaimtemplates":
            if found["spec"] != old["spec"]:
                raise invalid(kind, name, [Bad("spec", _IMMUTABLE)])
        case "resourceslices":
            bad = [
                Bad(f"spec.{part}", _IMMUTABLE)
                for part in ("driver", "nodeName")
                if found["spec"].get(part) != old["spec"].get(part)
            ]
            if found["spec"]["pool"].get("name") != old["spec"]["pool"].get("name"):
                bad.append(Bad("spec.pool.name", _IMMUTABLE))
            if bad:
                raise invalid(kind, name, bad)
        case "deployments" | "replicasets" | "statefulsets" | "daemonsets":
            if found["spec"].get("selector") != old["spec"].get("selector"):
                raise invalid(kind, name, [Bad("spec.selector", _IMMUTABLE)])
            _workload(found, kind)
        case "jobs":
            _job_updated(found, old, kind)
        case "leases":
            _lease(found, kind)


def _workload(found, kind):
    spec, name = found.setdefault("spec", {}), found["metadata"]["name"]
    selector, template = spec.get("selector"), spec.get("template") or {}
    if not selector:
        raise invalid(kind, name, [Bad("spec.selector", "", "FieldValueRequired")])
    if not matches(selector, (template.get("metadata") or {}).get("labels") or {}):
        raise invalid(kind, name, [Bad("spec.template.metadata.labels", "`selector` does not match template `labels`")])
    if kind.plural != "daemonsets":
        spec.setdefault("replicas", 1)


def _job(found, kind):
    spec, metadata = found.setdefault("spec", {}), found["metadata"]
    pod = spec.get("template", {}).get("spec", {})
    if pod.get("restartPolicy") not in {"Never", "OnFailure"}:
        raise invalid(kind, metadata["name"], [Bad("spec.template.spec.restartPolicy", "must be OnFailure or Never")])
    for key, value in (("parallelism", 1), ("completions", 1), ("backoffLimit", 6), ("suspend", False)):
        spec.setdefault(key, value)
    if not spec.get("manualSelector"):
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": metadata["uid"]}}
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        labels |= {
            "batch.kubernetes.io/controller-uid": metadata["uid"],
            "batch.kubernetes.io/job-name": metadata["name"],
            "controller-uid": metadata["uid"],
            "job-name": metadata["name"],
        }


def _job_updated(found, old, kind):
    name = found["metadata"]["name"]
    fixed = [part for part in ("selector", "completionMode") if found["spec"].get(part) != old["spec"].get(part)]
    bad = [Bad(f"spec.{part}", _IMMUTABLE) for part in fixed]
    template, was = found["spec"]["template"], old["spec"]["template"]
    if old["spec"].get("suspend") and not (old.get("status") or {}).get("startTime"):
        template, was = _stripped(template), _stripped(was)
    if template != was:
        bad.append(Bad("spec.template", _IMMUTABLE))
    if bad:
        raise invalid(kind, name, bad)


def _stripped(template):
    """A template without what a suspended Job may change in it."""
    metadata = {key: value for key, value in (template.get("metadata") or {}).items() if key not in _JOB_METADATA}
    spec = {key: value for key, value in template["spec"].items() if key not in _JOB_SPEC}
    for which in ("containers", "initContainers"):
        if which in spec:
            spec[which] = [{key: value for key, value in one.items() if key != "resources"} for one in spec[which]]
    return {"metadata": metadata, "spec": spec}


def _lease(found, kind):
    spec = found.setdefault("spec", {})
    bad = []
    if spec.get("leaseDurationSeconds") is not None and spec["leaseDurationSeconds"] <= 0:
        bad.append(Bad("spec.leaseDurationSeconds", "must be greater than 0"))
    if (spec.get("leaseTransitions") or 0) < 0:
        bad.append(Bad("spec.leaseTransitions", "must be greater than or equal to 0"))
    if bad:
        raise invalid(kind, found["metadata"]["name"], bad)
