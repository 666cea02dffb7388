"""Objects of Kubernetes: manifests, what the controller reads of them, claims and their slices, suspended jobs."""

import itertools

import yaml

from eelgrid_agent.kubelet.resource_slices import build_resource_slices
from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.objects import parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import ObjectRef, parse_owner_template
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_controller.engines.kubernetes.pods.suspended_job import CandidateNode, SizeMeasurement
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import RightSizingInputs
from eelgrid_protos.catalogue.loader import load_catalogue
from tests.builders.cluster import build_catalogue_gpu

DRIVER = "gpu.eelgrid.io"
CATALOGUE = load_catalogue()
H100, A100 = "H100-80GB-HBM3", "A100-SXM4-80GB"
# Two GPUs are a little faster than half of four, at a little less than half of the watts.
HALVES = {1: (2.6, 560.0), 2: (5.2, 1_080.0), 4: (10.0, 2_400.0), 8: (17.0, 5_000.0)}
_UIDS = itertools.count(1)


def build_pod(name, *, namespace="default", gpus=1, gates=(GATE,), labels=None, resource="nvidia.com/gpu", **spec):
    """A pod that asks for so many GPUs, gated."""
    resources = {"limits": {resource: str(gpus)}, "requests": {resource: str(gpus)}} if gpus else {}
    container = {"name": "main", "image": "registry.k8s.io/pause:3.10", "resources": resources}
    body = {"containers": [container], **spec}
    if gates:
        body["schedulingGates"] = [{"name": gate} for gate in gates]
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, "spec": body}


def build_node(name="n0", *, gpus=8, labels=None, taints=(), unschedulable=False, **extended):
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


def build_pin(name):
    """The affinity that pins a pod to one node."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def build_ungating_patch(name, annotations=None):
    """The one merge patch that pins a gated pod and lets it go."""
    metadata = {"annotations": annotations} if annotations else {}
    return {"metadata": metadata, "spec": {"affinity": build_pin(name), "schedulingGates": None}}


def build_template(*, gpus=1, gates=(), labels=None, restart="Always", resource="nvidia.com/gpu"):
    """A pod template."""
    whole = build_pod("x", gpus=gpus, gates=gates, labels=labels, resource=resource, restartPolicy=restart)
    return {"metadata": {"labels": labels or {}}, "spec": whole["spec"]}


def build_deployment(name, *, replicas=1, namespace="default", **how):
    """A Deployment."""
    labels = {"app": name, **how.pop("labels", {})}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": build_template(labels=labels, **how),
    }
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def build_job(name, *, parallelism=1, suspend=False, namespace="default", **how):
    """A Job."""
    spec = {"parallelism": parallelism, "completions": parallelism, "suspend": suspend}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**spec, "template": build_template(restart="Never", **how)},
    }


def build_config_map(name, labels=None, *, namespace=None, **data):
    """A ConfigMap; without a namespace its client says in which."""
    where = {"namespace": namespace} if namespace else {}
    return {"metadata": {"name": name, "labels": labels or {}, **where}, "data": data}


def count_gpus(pod):
    """The GPUs that a pod's first container asks for."""
    return int(pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"])


def parse_manifest(text):
    """One object in YAML."""
    return yaml.safe_load(text)


def build_pod_model(*, gpus=1, labels=None, annotations=None, owner=None, requests=None, name="p-0", **spec):
    """A pod of one container; `owner` is (apiVersion, kind, name, uid)."""
    asked = {"cpu": "4", "memory": "16Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {}), **(requests or {})}
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-{next(_UIDS)}",
        "creationTimestamp": "2026-11-22T04:00:00Z",
        "labels": labels,
        "annotations": annotations,
    }
    if owner is not None:
        keys = ("apiVersion", "kind", "name", "uid")
        metadata["ownerReferences"] = [{**dict(zip(keys, owner, strict=True)), "controller": True}]
    gates = [{"name": GATE}]
    containers = [{"name": "main", "resources": {"requests": asked}}]
    return parse_pod({"metadata": metadata, "spec": {"containers": containers, "schedulingGates": gates, **spec}})


def build_node_model(name="n1", *, gpus=8, allocatable=None, ready="True", labels=None, **spec):
    """A node with H100s, as a kubelet and GPU feature discovery describe it."""
    known = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    found = build_node(name, gpus=gpus, labels={**known, **(labels or {})}, cpu="96", memory="1Ti", pods="110")
    found["metadata"]["uid"] = f"uid-{name}"
    found["spec"] = spec
    condition = {"type": "Ready", "status": ready, "message": "kubelet stopped posting"}
    amounts = {**found["status"]["allocatable"], "nvidia.com/gpu": str(gpus), **(allocatable or {})}
    found["status"] |= {"allocatable": amounts, "conditions": [condition], "nodeInfo": {"bootID": "boot-1"}}
    return parse_node(found)


def build_owner_lookup(group, text):
    """An object above pods, as lookups find it: its ref and what it says."""
    found = parse_manifest(text)
    ref = ObjectRef(group, found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])
    return {ref: parse_owner_template(ref, found)}


def build_slices(node, gpus=2, *, generation=1, **changes):
    """What an agent publishes of a node with so many H100s."""
    names = {"product": "H100", "model": "H100", **changes}
    found = [build_catalogue_gpu("h100-sxm5-80gb", i, uuid=f"GPU-{node}-{i}", **names) for i in range(gpus)]
    return list(build_resource_slices(node, found, CATALOGUE, conditions={}, is_changeable=True, generation=generation))


def build_device_class(name="eelgrid", driver=DRIVER, **more):
    """All devices of a driver."""
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    return {"metadata": {"name": name}, "spec": {"selectors": [selector], **more}}


def build_claim_spec(profile="1g.10gb", *, count=1, class_name="eelgrid", name="r", **more):
    """The spec of a claim for MIG slices of a profile; for whole GPUs without one."""
    says = f"profile == '{profile}'" if profile else "type == 'gpu'"
    exactly = {
        "deviceClassName": class_name,
        "count": count,
        "allocationMode": "ExactCount",
        "selectors": [{"cel": {"expression": f"device.attributes['{DRIVER}'].{says}"}}],
        **more,
    }
    return {"devices": {"requests": [{"name": name, "exactly": exactly}]}}


def build_claim_template(name="one", profile="1g.10gb", *, namespace="default", **how):
    """A ResourceClaimTemplate."""
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"spec": build_claim_spec(profile, **how)}}


def build_claiming_pod(
    name, *templates, claims=(), namespace="default", gates=(GATE,), annotations=None, cpu="100m", **spec
):
    """A gated pod with claims of these templates, and with these that are there already."""
    asked = [{"name": f"t{i}", "resourceClaimTemplateName": one} for i, one in enumerate(templates)]
    asked += [{"name": f"c{i}", "resourceClaimName": one} for i, one in enumerate(claims)]
    uses = [{"name": one["name"]} for one in asked]
    resources = {"requests": {"cpu": cpu, "memory": "64Mi"}, "claims": uses}
    body = {
        "containers": [{"name": "main", "image": "none", "resources": resources}],
        "resourceClaims": asked,
        "terminationGracePeriodSeconds": 0,
        **spec,
    }
    if gates:
        body["schedulingGates"] = [{"name": gate} for gate in gates]
    return {"metadata": {"name": name, "namespace": namespace, "annotations": annotations or {}}, "spec": body}


def find_overdrawn(every, claims):
    """The slow and obvious judge: what is held by more than one claim, or beyond its counter."""
    offers, room, taken, given = {}, {}, {}, {}
    for piece in every:
        spec = piece["spec"]
        for one in spec.get("devices") or ():
            offers[spec["pool"]["name"], one["name"]] = one
        for found in spec.get("sharedCounters") or ():
            for name, counter in found["counters"].items():
                room[spec["pool"]["name"], found["name"], name] = int(counter["value"])
    for one in claims:
        allocation = (one.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            key = result["pool"], result["device"]
            given[key] = given.get(key, 0) + 1
            for use in offers[key].get("consumesCounters") or () if key in offers else ():
                for name, value in use["counters"].items():
                    counter = result["pool"], use["counterSet"], name
                    taken[counter] = taken.get(counter, 0) + int(value["value"])
    return [key for key, many in given.items() if many > 1] + [key for key, many in taken.items() if many > room[key]]


def build_measurements(speeds=None, *, model=H100, mig=""):
    """Measured throughput and watts by GPUs."""
    return tuple(
        SizeMeasurement(model, mig, gpus, hz, hz, watts, watts) for gpus, (hz, watts) in (speeds or HALVES).items()
    )


def build_labelled_node(name="n0", *, product="NVIDIA-H100-80GB-HBM3", labels=None, **how):
    """A node with the label of its product."""
    found = build_node(name, labels={well_known.NODE_GPU_PRODUCT: product, **(labels or {})}, **how)
    found["metadata"]["uid"] = f"uid-{name}"
    return found


def build_candidate(name="n0", *, model=H100, gpus=8, labels=None, **resources):
    """A node that a job could be sized for."""
    return CandidateNode(parse_node(build_labelled_node(name, gpus=gpus, labels=labels, **resources)), model, gpus)


def build_sizing_inputs(*, sites=None, points=None, now_s=1_000_000.0, **more):
    """What right-sizing looks at: one node and the points of `bert` unless others are given."""
    return RightSizingInputs(
        now_s,
        (build_candidate(),) if sites is None else tuple(sites),
        {"bert": build_measurements()} if points is None else points,
        **more,
    )


def build_training_template(*, gpus=4, labels=None, **notes):
    """A pod template with a sidecar; notes are its annotations."""
    amounts = {"nvidia.com/gpu": str(gpus)}
    container = {"name": "main", "image": "x", "env": [{"name": "A", "value": "b"}], "resources": {"limits": amounts}}
    container["resources"]["requests"] = dict(amounts)
    return {
        "metadata": {"labels": labels or {}, "annotations": notes},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "side", "image": "y"}, container]},
    }


def build_suspended_job(
    name="j", *, asks=4, pods=1, version="7", generation=1, queue="", labels=None, spec=None, status=None, **notes
):
    """A suspended Job that asks to be right-sized; notes are annotations of ours, with underscores for dashes."""
    own = {
        well_known.ANNOTATION_RIGHT_SIZE: "true",
        well_known.ANNOTATION_PROFILE: "bert",
        well_known.ANNOTATION_GPUS: "1, 2, 4, 8",
        **{f"eelgrid.io/{key.replace('_', '-')}": value for key, value in notes.items()},
    }
    own = {key: value for key, value in own.items() if value is not None}
    its = {well_known.LABEL_MANAGED: "true", **({well_known.KUEUE_QUEUE: queue} if queue else {}), **(labels or {})}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "generation": generation,
            "labels": its,
            "annotations": own,
        },
        "spec": {
            "suspend": True,
            "parallelism": pods,
            "completions": pods,
            "template": build_training_template(gpus=asks),
            **(spec or {}),
        },
        "status": status or {},
    }


def gate_job(found, *others):
    """The same, held back from Kueue by us, too."""
    found["metadata"]["annotations"][well_known.KUEUE_GATED_BY] = ",".join([*others, well_known.KUEUE_OUR_GATE])
    return found
