"""Mode `dra` against kube-scheduler's own search: pods with claims of small MIG slices onto partitionable GPUs.

Both sides get the same nodes, the same slices with shared counters, the same template and pods that are
created in the same way; the clock runs from the first creation to the last binding that a watch tells, so the
making of claims by kube-controller-manager is part of it. kube-scheduler's slices lack our taint, so that it
searches by itself; it gets fewer pods, since one takes it a quarter of a second. Afterwards an
independent judge reads all claims and slices from the server: no device twice, no counter beyond what it has.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.fakes.kubernetes.resources import RESOURCE_CLAIM_TEMPLATES

from bench.kubernetes.rig import Rig, gathered
from bench.kubernetes.trials import Row
from eelgrid_agent.kubelet.resource_slices import build_resource_slices
from eelgrid_controller.engines.kubernetes.api.errors import ObjectAlreadyExists, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import (
    DEVICE_CLASSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Object,
)
from eelgrid_controller.engines.kubernetes.model.well_known import GATE, LABEL_MANAGED
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import Gpu

__all__ = ["claims_rows"]

DRIVER = "gpu.eelgrid.io"
_NAME = "bench-dra"
_PROFILE = "1g.10gb"
_ASKED_RATIO = 20
_WITHIN_S = 300.0


class _Side(NamedTuple):
    """One burst."""

    bound: int
    seconds: float
    created_s: float

    @property
    def rate(self) -> float:
        return self.bound / self.seconds


async def claims_rows(
    rig: Rig, start: Callable[[], Awaitable[Callable[[], Awaitable[None]]]], *, pods: int, nodes: int, alone: int
) -> list[Row]:
    """Both sides, one after the other; `start` starts our controller and gives what stops it."""
    names = await rig.make_nodes(nodes, gpus=0, prefix="dra-")
    every = [piece for name in names for piece in _slices(name)]
    await _clear(rig)
    await _unpublish(rig)
    await _prepare(rig)
    try:
        await _publish(rig, [_untainted(piece) for piece in every])
        base = await _burst(rig, alone, is_gated=False)
        print(f"# claims gated=False {base} rate={base.rate:.2f}", flush=True)
        await _clear(rig)
        await _unpublish(rig)
        await _publish(rig, every)
        stop = await start()
        ours = await _burst(rig, pods, is_gated=True)
        print(f"# claims gated=True {ours} rate={ours.rate:.2f}", flush=True)
        placed, doubled, overdrawn = await _judged(rig, every)
        await stop()
    finally:
        await _clear(rig)
        await _unpublish(rig)
        await gathered(rig.cluster.delete(NODES, name) for name in names)
    return [
        ("claims_nodes", nodes, "-"),
        ("claims_pods", pods, alone),
        ("claims_bound", ours.bound, pods),
        ("claims_bound_a_second", round(ours.rate, 2), round(base.rate, 2)),
        ("claims_rate_to_kube_schedulers_search", round(ours.rate / base.rate, 1), _ASKED_RATIO),
        ("claims_seconds_to_create_pods", round(ours.created_s, 2), round(base.created_s, 2)),
        ("claims_pods_exactly_where_planned", placed, pods),
        ("claims_devices_held_twice", doubled, 0),
        ("claims_counters_overdrawn", overdrawn, 0),
    ]


async def _burst(rig: Rig, count: int, *, is_gated: bool) -> _Side:
    rush = await rig.rush([_pod(f"dra{index:05d}", is_gated=is_gated) for index in range(count)])
    return _Side(len(rush.bound), rush.seconds, rush.created_s)


def _pod(name: str, *, is_gated: bool) -> Object:
    resources = {"requests": {"cpu": "100m", "memory": "64Mi"}, "claims": [{"name": "gpu"}]}
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "image": "none", "resources": resources}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": _NAME}],
        "terminationGracePeriodSeconds": 0,
    }
    metadata: dict[str, Any] = {"name": name}
    if is_gated:
        spec["schedulingGates"] = [{"name": GATE}]
        metadata["labels"] = {LABEL_MANAGED: "true"}
    return {"metadata": metadata, "spec": spec}


def _slices(name: str) -> list[Object]:
    catalogue = load_catalogue()
    product = catalogue.products["h100-sxm5-80gb"]
    gpus = [
        Gpu(
            uuid=f"GPU-{name}-{index}",
            index=index,
            product="H100",
            model="H100",
            catalogue_key=product.key,
            mig_capable=True,
            memory_bytes=product.memory_bytes,
        )
        for index in range(2)
    ]
    return list(build_resource_slices(name, gpus, catalogue, conditions={}, is_changeable=True, generation=1))


def _untainted(piece: Object) -> Object:
    spec = dict(piece["spec"])
    if "devices" in spec:
        spec["devices"] = [{key: value for key, value in one.items() if key != "taints"} for one in spec["devices"]]
    return {**piece, "spec": spec}


async def _prepare(rig: Rig) -> None:
    # A whole GPU has no profile, and to kube-scheduler to ask for what is not there is an error.
    ours = f"device.attributes['{DRIVER}']"
    selects = f"device.driver == '{DRIVER}' && {ours}.type == 'mig' && {ours}.profile == '{_PROFILE}'"
    kind = {"metadata": {"name": _NAME}, "spec": {"selectors": [{"cel": {"expression": selects}}]}}
    request = {"name": "gpu", "exactly": {"deviceClassName": _NAME}}
    template = {"metadata": {"name": _NAME}, "spec": {"spec": {"devices": {"requests": [request]}}}}
    with contextlib.suppress(ObjectAlreadyExists):
        await rig.cluster.create(DEVICE_CLASSES, kind)
    with contextlib.suppress(ObjectAlreadyExists):
        await rig.cluster.create(RESOURCE_CLAIM_TEMPLATES, template, namespace=rig.namespace)


async def _publish(rig: Rig, every: list[Object]) -> None:
    await gathered(rig.cluster.create(RESOURCE_SLICES, piece) for piece in every)
    await asyncio.sleep(2.0)


async def _unpublish(rig: Rig) -> None:
    listed = await rig.cluster.list(RESOURCE_SLICES)

    async def delete(name: str) -> None:
        with contextlib.suppress(ObjectNotFound):
            await rig.cluster.delete(RESOURCE_SLICES, name)

    await gathered(delete(one["metadata"]["name"]) for one in listed.items if one["spec"]["driver"] == DRIVER)


async def _clear(rig: Rig) -> None:
    """Pods go, and with each its claim."""
    await rig.clear()
    async with asyncio.timeout(_WITHIN_S):
        while (await rig.cluster.list(RESOURCE_CLAIMS, namespace=rig.namespace)).items:  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def _judged(rig: Rig, every: list[Object]) -> tuple[int, int, int]:
    """Pods bound where claim, plan and device agree; devices that are held twice; counters beyond what they have."""
    claims = {one["metadata"]["name"]: one for one in (await rig.cluster.list(RESOURCE_CLAIMS)).items}
    pods = (await rig.cluster.list(PODS, namespace=rig.namespace)).items
    placed = 0
    for pod in pods:
        plan = json.loads((pod["metadata"].get("annotations") or {}).get("eelgrid.io/plan", "{}"))
        made = [one["resourceClaimName"] for one in pod["status"].get("resourceClaimStatuses") or ()]
        found = [_results(claims[name]) for name in made if name in claims]
        is_it = len(found) == 1 and len(found[0]) == 1
        placed += is_it and (pod["spec"].get("nodeName"), plan.get("profile")) == found[0][0] == (
            plan["node"],
            found[0][0][1],
        )
    held = Counter(result for claim in claims.values() for result in _results(claim))
    devices = {
        (one["spec"]["nodeName"], device["name"]): device for one in every for device in one["spec"].get("devices", ())
    }
    room = {
        (one["spec"]["nodeName"], found["name"], name): int(counter["value"])
        for one in every
        for found in one["spec"].get("sharedCounters", ())
        for name, counter in found["counters"].items()
    }
    for (node, name), many in held.items():
        for use in devices[node, name].get("consumesCounters", ()):
            for counter, value in use["counters"].items():
                room[node, use["counterSet"], counter] -= many * int(value["value"])
    return placed, sum(many > 1 for many in held.values()), sum(left < 0 for left in room.values())


def _results(claim: Object) -> list[tuple[str, str]]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return [(one["pool"], one["device"]) for one in (allocation.get("devices") or {}).get("results") or ()]
