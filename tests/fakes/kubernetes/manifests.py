"""Small objects to begin a test with."""

GATE = "eelgrid.io/placement"


def pod(name, *, namespace="default", gpus=1, gates=(GATE,), labels=None, resource="nvidia.com/gpu", **spec):
    """A pod that asks for so many GPUs, gated."""
    resources = {"limits": {resource: str(gpus)}, "requests": {resource: str(gpus)}} if gpus else {}
    container = {"name": "main", "image": "registry.k8s.io/pause:3.10", "resources": resources}
    body = {"containers": [container], **spec}
    if gates:
        body["schedulingGates"] = [{"name": gate} for gate in gates]
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, "spec": body}


def node(name, *, gpus=8, labels=None, taints=(), unschedulable=False, **extended):
    """A ready node with so many GPUs."""
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "250", **extended}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    spec = {"taints": list(taints)} if taints else {}
    if unschedulable:
        spec["unschedulable"] = True
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": spec,
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def pinned_to(name):
    """The affinity that pins a pod to one node."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def ungated_onto(name, annotations=None):
    """The one merge patch that pins a gated pod and lets it go."""
    metadata = {"annotations": annotations} if annotations else {}
    return {"metadata": metadata, "spec": {"affinity": pinned_to(name), "schedulingGates": None}}


def template(*, gpus=1, gates=(), labels=None, restart="Always", resource="nvidia.com/gpu"):
    """A pod template."""
    whole = pod("x", gpus=gpus, gates=gates, labels=labels, resource=resource, restartPolicy=restart)
    return {"metadata": {"labels": labels or {}}, "spec": whole["spec"]}


def deployment(name, *, replicas=1, namespace="default", **how):
    """A Deployment."""
    labels = {"app": name, **how.pop("labels", {})}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": template(labels=labels, **how),
    }
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def job(name, *, parallelism=1, suspend=False, namespace="default", **how):
    """A Job."""
    spec = {"parallelism": parallelism, "completions": parallelism, "suspend": suspend}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**spec, "template": template(restart="Never", **how)},
    }
