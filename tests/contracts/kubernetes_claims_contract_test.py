"""What Eelgrid relies on for ResourceClaims: who may allocate, what may be undone. Through the port, one rule a test.

Sources: KEP-4381, KEP-4817 and the hardening guide for dynamic resource allocation.
"""

import pytest
from tests.builders.kubernetes import build_pod
from tests.kubernetes_api_rig import WAYS, open_rig

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.port import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES

DRIVER = "gpu.eelgrid.io"
GROUP = ["resource.k8s.io"]
STATUS_ALONE = [{"verbs": ["get", "patch", "update"], "apiGroups": GROUP, "resources": ["resourceclaims/status"]}]
BINDING = [
    {
        "verbs": ["get", "patch", "update"],
        "apiGroups": GROUP,
        "resources": ["resourceclaims/status", "resourceclaims/binding"],
    }
]


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        served = await made.cluster.discover()
        if not served.has(RESOURCE_CLAIMS) or served.minor < 36:
            pytest.skip("resource.k8s.io/v1 with the permission to bind is served from 1.36 on")
        yield made


def claim(name):
    exactly = {"deviceClassName": "gpu.eelgrid.io", "allocationMode": "ExactCount", "count": 1}
    return {"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}


def allocation(device="gpu-0", node="n1", timestamp="2026-11-01T00:00:00Z", request="gpu"):
    result = {"request": request, "driver": DRIVER, "pool": node, "device": device}
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    found = {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }
    return {**found, "allocationTimestamp": timestamp} if timestamp else found


async def write(rig, status, name="a", who=None):
    return await (who or rig.cluster).patch(
        RESOURCE_CLAIMS, name, {"status": status}, namespace=rig.space, subresource="status"
    )


async def consumer(rig):
    """A reservation for a pod that is there: others are taken back by a controller."""
    made = await rig.add(PODS, build_pod("p", gpus=0, resourceClaims=[{"name": "gpu", "resourceClaimName": "a"}]))
    return {"resource": "pods", "name": "p", "uid": made["metadata"]["uid"]}


async def test_a_claim_is_fixed_when_it_is_made(rig):
    made = await rig.add(RESOURCE_CLAIMS, {**claim("a"), "status": {"allocation": allocation()}})
    assert not made.get("status", {}).get("allocation")
    requests = [{"name": "other", "exactly": {"deviceClassName": "x"}}]
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(
            RESOURCE_CLAIMS, "a", {"spec": {"devices": {"requests": requests}}}, namespace=rig.space
        )


async def test_who_allocates_needs_the_permission_to_bind(rig):
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    with pytest.raises((errors.Invalid, errors.Forbidden)):
        await write(rig, {"allocation": allocation()}, who=await rig.limited(STATUS_ALONE))
    found = await write(rig, {"allocation": allocation()}, who=await rig.limited(BINDING))
    assert found["status"]["allocation"]["devices"]["results"][0]["device"] == "gpu-0"


async def test_an_allocation_is_never_changed_not_even_by_a_timestamp(rig):
    """The trap: what lacks its timestamp now can never be given one, and kube-scheduler fails on it for ever."""
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    await write(rig, {"allocation": allocation(timestamp=None)})
    with pytest.raises(errors.Invalid) as denied:
        await write(rig, {"allocation": {"allocationTimestamp": "2026-11-01T00:00:00Z"}})
    assert any(cause.field.startswith("status.allocation") for cause in denied.value.causes)
    with pytest.raises(errors.Invalid):
        await write(rig, {"allocation": {"devices": {"results": allocation("gpu-1")["devices"]["results"]}}})


async def test_an_allocation_that_nobody_uses_is_taken_back(rig):
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    await write(rig, {"allocation": allocation("gpu-0")})
    free = await write(rig, {"allocation": None})
    assert not free["status"].get("allocation")
    found = await write(rig, {"allocation": allocation("gpu-1", "n2"), "reservedFor": [await consumer(rig)]})
    assert found["status"]["allocation"]["devices"]["results"][0]["pool"] == "n2"
    with pytest.raises(errors.Invalid):
        await write(rig, {"allocation": None})
    await write(rig, {"allocation": None, "reservedFor": None})


async def test_only_what_is_allocated_is_reserved(rig):
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    user = await consumer(rig)
    with pytest.raises(errors.Invalid):
        await write(rig, {"reservedFor": [user]})


async def test_an_allocation_names_a_request_of_the_claim(rig):
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    with pytest.raises(errors.Invalid):
        await write(rig, {"allocation": allocation(request="other")})


async def test_nobody_compares_two_claims(rig):
    """The same device twice is accepted: whoever allocates must be alone."""
    for name in "ab":
        await rig.add(RESOURCE_CLAIMS, claim(name))
        await write(rig, {"allocation": allocation("gpu-0")}, name=name)


async def test_the_state_of_a_device_is_told_of_allocated_devices_alone(rig):
    await rig.add(RESOURCE_CLAIMS, claim("a"))
    await write(rig, {"allocation": allocation("gpu-0")})
    told = {"driver": DRIVER, "pool": "n1", "device": "gpu-0", "data": {"mig": "1g.10gb"}}
    found = await write(rig, {"devices": [told]})
    assert found["status"]["devices"][0]["device"] == "gpu-0"
    with pytest.raises(errors.Invalid):
        await write(rig, {"devices": [{**told, "device": "gpu-7"}]})


def device_slice(name, node):
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": {"product": {"string": "H100"}}}],
    }
    return {"metadata": {"name": name}, "spec": spec}


async def test_slices_keep_their_node_and_are_found_by_it(rig):
    for node in ("n1", "n2"):
        await rig.add(RESOURCE_SLICES, device_slice(f"{rig.space}-{node}", f"{rig.space}-{node}"))
    found = await rig.cluster.list(RESOURCE_SLICES, fields=f"spec.nodeName={rig.space}-n1")
    assert [one["metadata"]["name"] for one in found.items] == [f"{rig.space}-n1"]
    found = await rig.cluster.list(RESOURCE_SLICES, fields="spec.driver=gpu.other.io")
    assert found.items == []
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(RESOURCE_SLICES, f"{rig.space}-n1", {"spec": {"nodeName": "n3"}})
    more = {"spec": {"pool": {"generation": 2}, "devices": [{"name": "gpu-0"}, {"name": "gpu-1"}]}}
    changed = await rig.cluster.patch(RESOURCE_SLICES, f"{rig.space}-n1", more)
    assert changed["metadata"]["generation"] == 2
