"""Slices, classes, templates and pods that get their devices by claims, written small."""

from eelgrid_agent.kubelet.resource_slices import build_resource_slices
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import Gpu

DRIVER = "gpu.eelgrid.io"
CATALOGUE = load_catalogue()


def slices(node, gpus=2, *, generation=1, **changes):
    """What an agent publishes of a node with so many H100s."""
    product = CATALOGUE.products["h100-sxm5-80gb"]
    found = [
        Gpu(
            uuid=f"GPU-{node}-{i}",
            index=i,
            product="H100",
            model="H100",
            catalogue_key=product.key,
            mig_capable=True,
            memory_bytes=product.memory_bytes,
            **changes,
        )
        for i in range(gpus)
    ]
    return list(build_resource_slices(node, found, CATALOGUE, conditions={}, is_changeable=True, generation=generation))


def device_class(name="eelgrid", driver=DRIVER, **more):
    """All devices of a driver."""
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    return {"metadata": {"name": name}, "spec": {"selectors": [selector], **more}}


def devices(profile="1g.10gb", *, count=1, class_name="eelgrid", name="r", **more):
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


def template(name="one", profile="1g.10gb", *, namespace="default", **how):
    """A ResourceClaimTemplate."""
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"spec": devices(profile, **how)}}


def pod(name, *templates, claims=(), namespace="default", gates=(GATE,), annotations=None, cpu="100m", **spec):
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


def overdrawn(every, claims):
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
