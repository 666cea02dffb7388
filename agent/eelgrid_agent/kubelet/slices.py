"""The node's devices as ResourceSlices (resource.k8s.io/v1): what may be allocated, and what excludes what.

Pure: owns the objects, their order, their names and the counters. Must not know how they
are published nor which of them is allocated.

Theory. One counter set for each GPU that can be cut: a counter for each memory slice, one for
all compute slices, one for the number of instances, and one for each profile of which fewer
may stand than its room allows. A device takes what an instance in its place takes, the whole
GPU takes everything; so sets of devices fit the counters exactly when `MigGeometry.conflict`
lets them stand together. Every device carries a taint that nobody tolerates: kube-scheduler
allocates none of them by itself, and binds pods whose claims were allocated already. The API
holds eight counter sets and 64 devices that use them in one slice, so there are several, with one
generation; a scheduler walks them by name, therefore names and devices come in a fixed order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eelgrid_agent.kubelet.places import Place, device_name, places_of
from eelgrid_protos.catalogue import Catalogue, MigGeometry, Product
from eelgrid_protos.messages import Gpu

__all__ = ["API_VERSION", "DRIVER", "MANAGED_TAINT", "UNHEALTHY_TAINT", "Condition", "geometry_of", "slices_of"]

API_VERSION = "resource.k8s.io/v1"
DRIVER = "gpu.eelgrid.io"
MANAGED_TAINT = "eelgrid.io/managed"
UNHEALTHY_TAINT = "eelgrid.io/unhealthy"
# Limits of the API.
_DEVICES_MOST = 64
_COUNTER_SETS_MOST = 8
_STRING_MOST = 64
_NAME_MOST = 253
_KIB = 1024
_SUFFIXES = ("Ki", "Mi", "Gi", "Ti")
_Item = TypeVar("_Item")


class Condition(NamedTuple):
    """What of a GPU changes while it runs; None where nobody knows it."""

    power_limit_w: float | None = None
    is_throttled: bool | None = None


class _Known(NamedTuple):
    gpu: Gpu
    product: Product | None
    geometry: MigGeometry | None
    condition: Condition


def geometry_of(gpu: Gpu, catalogue: Catalogue) -> MigGeometry | None:
    """How this GPU can be cut; None where it cannot, or where nobody has read how."""
    product = catalogue.products.get(gpu.catalogue_key)
    return product.mig if product is not None and gpu.mig_capable else None


def slices_of(
    node_name: str, gpus: Iterable[Gpu], catalogue: Catalogue, *, conditions: Mapping[str, Condition],
    is_changeable: bool, generation: int, owner_uid: str = "",
) -> tuple[dict[str, Any], ...]:  # fmt: skip
    """The objects of one generation, in the order of their names; none where the node has no device to give.

    `is_changeable` says whether instances may be made; `owner_uid` is the node's, which takes its slices along when it
    is deleted.
    """
    known = [
        _Known(gpu, catalogue.products.get(gpu.catalogue_key), geometry_of(gpu, catalogue), conditions.get(gpu.uuid, Condition()))
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
    ]  # fmt: skip
    devices = [list(_devices(one, is_changeable=is_changeable)) for one in known]
    counters = [_counter_set(one.gpu, one.geometry) for one, some in zip(known, devices, strict=True)
                if some and one.geometry is not None]  # fmt: skip
    contents: list[dict[str, Any]] = [{"sharedCounters": sets} for sets in _chunks(counters, _COUNTER_SETS_MOST)]
    contents += [{"devices": some} for some in _filled(devices)]
    pool = {"name": node_name, "generation": generation, "resourceSliceCount": len(contents)}
    return tuple(
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": _metadata(node_name, number, owner_uid),
            "spec": {"driver": DRIVER, "nodeName": node_name, "pool": pool, **content},
        }
        for number, content in enumerate(contents)
    )


def _metadata(node_name: str, number: int, owner_uid: str) -> dict[str, Any]:
    ending = f"-{DRIVER}-{number:02d}"
    stem = node_name
    if len(stem) + len(ending) > _NAME_MOST:
        # Two long names may begin alike.
        digest = hashlib.sha256(node_name.encode()).hexdigest()[:12]
        stem = f"{node_name[: _NAME_MOST - len(ending) - 13].rstrip('.-')}-{digest}"
    metadata: dict[str, Any] = {"name": stem + ending}
    if owner_uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": owner_uid, "controller": True}
        metadata["ownerReferences"] = [owner]
    return metadata


# Counters


def _counter_name(gpu: Gpu) -> str:
    return f"gpu-{gpu.index}"


def _counter_set(gpu: Gpu, geometry: MigGeometry) -> dict[str, Any]:
    return {"name": _counter_name(gpu), "counters": _values(_everything(geometry))}


def _everything(geometry: MigGeometry) -> dict[str, int]:
    return {
        **{f"memory-slice-{number}": 1 for number in range(geometry.memory_slices)},
        "compute-slices": geometry.compute_slices,
        "instances": geometry.most,
        **{name: profile.most for profile in geometry.profiles.values() if (name := _rare(profile.key, geometry))},
    }


def _rare(key: str, geometry: MigGeometry) -> str:
    """The counter of a profile of which fewer may stand than have room; empty for all others."""
    profile = geometry.profiles[key]
    by_room = min(len(profile.starts), geometry.compute_slices // max(1, profile.compute_slices), geometry.most)
    return "" if profile.most >= by_room else f"profile-{profile.id}"


def _taken(place: Place, geometry: MigGeometry) -> dict[str, int]:
    profile = place.profile
    if profile is None:
        return _everything(geometry)
    taken = {f"memory-slice-{number}": 1 for number in range(place.start, place.start + profile.size)}
    taken |= {"compute-slices": profile.compute_slices, "instances": 1}
    rare = _rare(profile.key, geometry)
    return taken | ({rare: 1} if rare else {})


def _values(counts: Mapping[str, int]) -> dict[str, dict[str, str]]:
    return {name: {"value": str(count)} for name, count in counts.items()}


# Devices


def _devices(known: _Known, *, is_changeable: bool) -> Iterator[dict[str, Any]]:
    for place in places_of(known.gpu, known.geometry, is_changeable=is_changeable):
        device: dict[str, Any] = {"name": device_name(place), "attributes": _attributes(known, place)}
        memory_bytes = known.gpu.memory_bytes if place.profile is None else place.profile.memory_bytes
        if memory_bytes:
            device["capacity"] = {"memory": {"value": _quantity(memory_bytes)}}
        if known.geometry is not None:
            taken = {"counterSet": _counter_name(known.gpu), "counters": _values(_taken(place, known.geometry))}
            device["consumesCounters"] = [taken]
        device["taints"] = _taints(known.gpu)
        yield device


def _attributes(known: _Known, place: Place) -> dict[str, dict[str, Any]]:
    gpu, product, condition = known.gpu, known.product, known.condition
    limit_w = condition.power_limit_w if condition.power_limit_w is not None else gpu.power_limit_default_w
    found: dict[str, str | int | bool | None] = {
        "type": "gpu" if place.profile is None else "mig",
        "parentUUID": gpu.uuid,
        "index": gpu.index,
        "product": gpu.product,
        "architecture": product.architecture if product is not None else None,
        "powerLimitWatts": None if limit_w is None else round(limit_w),
        "throttled": condition.is_throttled,
    }
    if place.profile is not None:
        found |= {"profile": place.profile.name, "placementStart": place.start, "placementSize": place.profile.size}
    return {name: _attribute(value) for name, value in found.items() if value is not None and value != ""}


def _attribute(value: str | int | bool) -> dict[str, Any]:
    # A bool is an int to Python.
    if isinstance(value, bool):
        return {"bool": value}
    return {"int": value} if isinstance(value, int) else {"string": value[:_STRING_MOST]}


def _taints(gpu: Gpu) -> list[dict[str, str]]:
    taints = [{"key": MANAGED_TAINT, "effect": "NoSchedule"}]
    why = "lost" if gpu.lost else "cordoned" if gpu.cordon else "mode-pending" if gpu.mig_pending else ""
    if why:
        taints.append({"key": UNHEALTHY_TAINT, "value": why, "effect": "NoSchedule"})
    return taints


def _quantity(count: int) -> str:
    """Bytes, rounded down to KiB, spelled as the API server spells them again."""
    value = count // _KIB
    for suffix in _SUFFIXES[:-1]:
        if value % _KIB or not value:
            return f"{value}{suffix}"
        value //= _KIB
    return f"{value}{_SUFFIXES[-1]}"


# Division


def _filled(groups: Iterable[list[_Item]]) -> Iterator[list[_Item]]:
    """Groups together as long as they fit; one that is too large by itself is cut."""
    filled: list[_Item] = []
    for group in groups:
        for part in _chunks(group, _DEVICES_MOST):
            if len(filled) + len(part) > _DEVICES_MOST:
                yield filled
                filled = []
            filled = [*filled, *part]
    if filled:
        yield filled


def _chunks(items: Sequence[_Item], most: int) -> Iterator[list[_Item]]:
    for first in range(0, len(items), most):
        yield list(items[first : first + most])
