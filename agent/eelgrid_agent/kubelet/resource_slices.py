"""ResourceSlices of the node: possible GPU placements, counters, attributes and GPU conditions. Pure.

Theory (slices). One counter set for each GPU that can be cut: a counter for each memory slice, one for
all compute slices, one for the number of instances, and one for each profile of which fewer
may stand than its room allows. A device takes what an instance in its place takes, the whole
GPU takes everything; so sets of devices fit the counters exactly when `MigGeometry.conflict`
lets them stand together. Every device carries a taint that nobody tolerates: kube-scheduler
allocates none of them by itself, and binds pods whose claims were allocated already. The API
holds eight counter sets and 64 devices that use them in one slice, so there are several, with one
generation; a scheduler walks them by name, therefore names and devices come in a fixed order.

Theory (placements). A name says index, profile and start, `gpu-2-1g-plus-me-4`, and no UUID: it must mean the
same after a reboot, over which a MIG device's UUID does not live, and claims are written
before an instance stands. Which devices there are depends on what may be changed. Where MIG
mode turns without a reset (H100 and newer), a GPU is a whole one and all its slices at once,
and the counters keep these apart; where it takes a reset (A100), it is what its mode allows. An
agent that may change nothing has what stands.

Theory (conditions). Each change of what is published rewrites all slices of the node, so a GPU that is slowed
for a moment again and again is slowed: it is so at once, and no more so after a minute without.
A limit that is kept on purpose is no throttling: the watts say it.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eelgrid_agent.devices.port import RawReadings
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry, Product
from eelgrid_protos.messages import Gpu, GpuInstance, Reading

_NAME = re.compile(r"gpu-([0-9]{1,4})(?:-([0-9a-z-]+)-([0-9]{1,3}))?")
_UNSPELLABLE = re.compile(r"[^0-9a-z]+")


class GpuPlacement(NamedTuple):
    """A whole GPU, without a profile, or a profile of its geometry at a start."""

    gpu_index: int
    profile: GiProfile | None = None
    start: int = 0


def device_name(place: GpuPlacement) -> str:
    """A label of DNS."""
    if place.profile is None:
        return f"gpu-{place.gpu_index}"
    return f"gpu-{place.gpu_index}-{_profile_suffix(place.profile)}-{place.start}"


def parse_gpu_index(name: str) -> int | None:
    """The GPU of a device; None where this is no name of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def parse_placement(name: str, geometry: MigGeometry | None) -> GpuPlacement | None:
    """The place that a name stands for on a GPU of this geometry; None where it stands for none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    index, spelled, start = found.groups()
    if spelled is None:
        return GpuPlacement(int(index))
    for profile in () if geometry is None else geometry.profiles.values():
        if _profile_suffix(profile) == spelled and int(start) in profile.starts:
            return GpuPlacement(int(index), profile, int(start))
    return None


def list_placements(gpu: Gpu, geometry: MigGeometry | None, *, is_changeable: bool) -> Iterator[GpuPlacement]:
    """What this GPU can be, the whole of it first, then by profile and start."""
    is_free = is_changeable and geometry is not None and gpu.mig_capable and not geometry.reset_to_change_mode
    if is_free or not gpu.mig_enabled:
        yield GpuPlacement(gpu.index)
    if geometry is None or not (is_free or gpu.mig_enabled):
        return
    for profile in geometry.profiles.values():
        for start in profile.starts:
            place = GpuPlacement(gpu.index, profile, start)
            if is_changeable or find_instance(gpu, place) is not None:
                yield place


def find_instance(gpu: Gpu, place: GpuPlacement) -> GpuInstance | None:
    """The instance that is this place, if it stands."""
    if place.profile is None:
        return None
    return next(
        (one for one in gpu.gpu_instances if (one.profile_id, one.start) == (place.profile.id, place.start)), None
    )


def find_uuid(gpu: Gpu, place: GpuPlacement) -> str:
    """What a container opens: the GPU, or the compute instance that is all of the GPU instance; empty where none is."""
    if place.profile is None:
        return "" if gpu.mig_enabled else gpu.uuid
    instance = find_instance(gpu, place)
    parts = () if instance is None else instance.compute_instances
    is_whole = len(parts) == 1 and parts[0].profile_id == place.profile.whole.id
    return parts[0].uuid if is_whole else ""


def placements_overlap(one: GpuPlacement, other: GpuPlacement) -> bool:
    """Whether the two cannot be had at once for their room alone."""
    if one.gpu_index != other.gpu_index:
        return False
    if one.profile is None or other.profile is None:
        return True
    return one.start < other.start + other.profile.size and other.start < one.start + one.profile.size


def is_instance_held(instance: GpuInstance, places: Iterable[GpuPlacement]) -> bool:
    """Whether one of these places is this very instance."""
    return any(
        place.profile is not None and (place.profile.id, place.start) == (instance.profile_id, instance.start)
        for place in places
    )


def _profile_suffix(profile: GiProfile) -> str:
    # With and without media engines are two profiles: 1g+me and 1g-me.
    return _UNSPELLABLE.sub("-", profile.key.lower().replace("+", "-plus-")).strip("-")


API_VERSION = "resource.k8s.io/v1"
DRA_DRIVER = "gpu.eelgrid.io"
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


class GpuCondition(NamedTuple):
    """What of a GPU changes while it runs; None where nobody knows it."""

    power_limit_w: float | None = None
    is_throttled: bool | None = None


class _Known(NamedTuple):
    gpu: Gpu
    product: Product | None
    geometry: MigGeometry | None
    condition: GpuCondition


def find_geometry(gpu: Gpu, catalogue: Catalogue) -> MigGeometry | None:
    """How this GPU can be cut; None where it cannot, or where nobody has read how."""
    product = catalogue.products.get(gpu.catalogue_key)
    return product.mig if product is not None and gpu.mig_capable else None


def build_resource_slices(
    node_name: str,
    gpus: Iterable[Gpu],
    catalogue: Catalogue,
    *,
    conditions: Mapping[str, GpuCondition],
    is_changeable: bool,
    generation: int,
    owner_uid: str = "",
) -> tuple[dict[str, Any], ...]:
    """The objects of one generation, in the order of their names; none where the node has no device to give.

    `is_changeable` says whether instances may be made; `owner_uid` is the node's, which takes its slices along when it
    is deleted.
    """
    known = [
        _Known(
            gpu,
            catalogue.products.get(gpu.catalogue_key),
            find_geometry(gpu, catalogue),
            conditions.get(gpu.uuid, GpuCondition()),
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
    ]
    devices = [list(_devices(one, is_changeable=is_changeable)) for one in known]
    counters = [
        _counter_set(one.gpu, one.geometry)
        for one, some in zip(known, devices, strict=True)
        if some and one.geometry is not None
    ]
    contents: list[dict[str, Any]] = [{"sharedCounters": sets} for sets in _chunks(counters, _COUNTER_SETS_MOST)]
    contents += [{"devices": some} for some in _fill_groups(devices)]
    pool = {"name": node_name, "generation": generation, "resourceSliceCount": len(contents)}
    return tuple(
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": _metadata(node_name, number, owner_uid),
            "spec": {"driver": DRA_DRIVER, "nodeName": node_name, "pool": pool, **content},
        }
        for number, content in enumerate(contents)
    )


def _metadata(node_name: str, number: int, owner_uid: str) -> dict[str, Any]:
    ending = f"-{DRA_DRIVER}-{number:02d}"
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


def _consumed_counters(place: GpuPlacement, geometry: MigGeometry) -> dict[str, int]:
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
    for place in list_placements(known.gpu, known.geometry, is_changeable=is_changeable):
        device: dict[str, Any] = {"name": device_name(place), "attributes": _attributes(known, place)}
        memory_bytes = known.gpu.memory_bytes if place.profile is None else place.profile.memory_bytes
        if memory_bytes:
            device["capacity"] = {"memory": {"value": _quantity(memory_bytes)}}
        if known.geometry is not None:
            taken = {
                "counterSet": _counter_name(known.gpu),
                "counters": _values(_consumed_counters(place, known.geometry)),
            }
            device["consumesCounters"] = [taken]
        device["taints"] = _taints(known.gpu)
        yield device


def _attributes(known: _Known, place: GpuPlacement) -> dict[str, dict[str, Any]]:
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


def _fill_groups(groups: Iterable[list[_Item]]) -> Iterator[list[_Item]]:
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


# Slowed by hardware, by heat as the driver or the board judges it, by the board's power brake (nvml.h).
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
_CALM_S = 60.0


class GpuConditionTracker:
    """Of one node's GPUs."""

    def __init__(self) -> None:
        self._throttled_s: dict[str, float] = {}

    def observe(self, looks: Mapping[str, RawReadings], now_s: float) -> dict[str, GpuCondition]:
        """What is to be published now, from the newest look at each GPU."""
        found = {}
        for uuid, raw in looks.items():
            mask, limit_w = (raw.values.get(reading) for reading in (Reading.EVENT_REASONS_MASK, Reading.POWER_LIMIT_W))
            is_known = isinstance(mask, (int, float))
            if isinstance(mask, (int, float)) and int(mask) & _THROTTLED:
                self._throttled_s[uuid] = now_s
            is_throttled = now_s - self._throttled_s[uuid] < _CALM_S if uuid in self._throttled_s else False
            found[uuid] = GpuCondition(
                power_limit_w=float(limit_w) if isinstance(limit_w, (int, float)) else None,
                is_throttled=is_throttled if is_known or is_throttled else None,
            )
        return found
