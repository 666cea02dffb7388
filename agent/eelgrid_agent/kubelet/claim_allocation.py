"""Allocation of a resource claim on this node, and the MIG layout that satisfies it.

Pure: owns how an allocation is read and which instances a layout keeps. Must not know the
driver, the journal or the API server.

Theory. The layout for a device is what stands and the device: instances that lie in its way
and that no claim holds go, all others stay, also such as have no use now, since whoever made
them may want them. Whether one in the way is in use is not judged here: the executor
refuses to touch what a process or a lease holds. A foreign instance is spoken of neither
way, so that it is never taken for ours.

ClaimUnpreparable         the claim cannot be made ready here; says what to do
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER, GpuPlacement, is_instance_held
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance, GpuLayout, WantedInstance

_RESULTS_MOST = 32


class ClaimUnpreparable(Exception):
    """The claim cannot be made ready here."""


class ClaimResult(NamedTuple):
    """One device of a claim, by its name in our pool, and the request that it serves."""

    request: str
    device: str


def parse_allocation(claim: Mapping[str, Any], *, uid: str, node_name: str) -> tuple[ClaimResult, ...]:
    """The devices of this node that a ResourceClaim was given; raises ClaimRefused."""
    found = claim.get("metadata", {}).get("uid", "")
    if found != uid:
        raise ClaimUnpreparable(f"the claim of this name has uid {found}, not {uid}; it was made anew: delete the pod")
    allocation = claim.get("status", {}).get("allocation")
    if not allocation:
        raise ClaimUnpreparable("the claim is not allocated; it is allocated by the controller, which is asked again")
    results = [one for one in allocation.get("devices", {}).get("results", ()) if one.get("driver") == DRA_DRIVER]
    if not results:
        raise ClaimUnpreparable(
            f"no device of {DRA_DRIVER} is allocated to the claim; its allocation names other drivers"
        )
    if len(results) > _RESULTS_MOST:
        raise ClaimUnpreparable(f"{len(results)} devices are allocated to the claim; {_RESULTS_MOST} are the most")
    for one in results:
        if one.get("pool") != node_name:
            raise ClaimUnpreparable(
                f"device {one.get('device')} is of pool {one.get('pool')}, and this node is {node_name}"
            )
        if one.get("adminAccess"):
            raise ClaimUnpreparable(
                f"device {one.get('device')} is asked for with adminAccess, which is not given here"
            )
    return tuple(ClaimResult(str(one["request"]), str(one["device"])) for one in results)


def build_layout_with(
    gpu: Gpu,
    geometry: MigGeometry,
    place: GpuPlacement,
    *,
    held: Collection[GpuPlacement],
    foreign: Collection[int] = frozenset(),
) -> GpuLayout:
    """The layout in which this place is to be had beside all that claims hold; raises ClaimRefused."""
    if place.profile is None:
        return GpuLayout(gpu_uuid=gpu.uuid)
    profile = geometry.profile_by_id(place.profile.id)
    if profile is None or place.start not in profile.starts:
        raise ClaimUnpreparable(f"the driver of GPU {gpu.index} has no {place.profile.name} at {place.start}")
    kept = [one for one in gpu.gpu_instances if one.id not in foreign and not _is_at(one, place)]
    new = (profile, place.start)
    # What nobody claims gives way, the smallest number of them: first what overlaps, then what is too much together.
    kept = [one for one in kept if is_instance_held(one, held) or not _is_in_the_way(one, place)]
    for spare in [one for one in kept if not is_instance_held(one, held)]:
        if geometry.conflict([new, *_known(kept, geometry)]) is None:
            break
        kept.remove(spare)
    instances = [*_wanted_instances(kept, geometry), WantedInstance(profile=profile.name, start=place.start)]
    return _layout(gpu, instances)


def build_layout_without(
    gpu: Gpu, geometry: MigGeometry, place: GpuPlacement, *, foreign: Collection[int] = frozenset()
) -> GpuLayout:
    """What stands but the instance of this place; MIG mode stays."""
    kept = [one for one in gpu.gpu_instances if one.id not in foreign and not _is_at(one, place)]
    return _layout(gpu, _wanted_instances(kept, geometry))


def _layout(gpu: Gpu, instances: Iterable[WantedInstance]) -> GpuLayout:
    by_start = sorted(instances, key=lambda one: one.start)
    return GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=True, instances=tuple(by_start))


def _is_at(instance: GpuInstance, place: GpuPlacement) -> bool:
    return is_instance_held(instance, (place,))


def _is_in_the_way(instance: GpuInstance, place: GpuPlacement) -> bool:
    assert place.profile is not None
    return instance.start < place.start + place.profile.size and place.start < instance.start + instance.size


def _known(instances: Iterable[GpuInstance], geometry: MigGeometry) -> list[tuple[Any, int]]:
    profiles = ((geometry.profile_by_id(one.profile_id), one.start) for one in instances)
    return [(profile, start) for profile, start in profiles if profile is not None]


def _wanted_instances(instances: Iterable[GpuInstance], geometry: MigGeometry) -> list[WantedInstance]:
    wanted = []
    for one in instances:
        profile = geometry.profile_by_id(one.profile_id)
        if profile is None:
            raise ClaimUnpreparable(
                f"instance {one.profile} at {one.start} is of no profile that the driver lists; remove it"
            )
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        compute = tuple(sorted((slices.get(child.profile_id, 0) for child in one.compute_instances), reverse=True))
        wanted.append(WantedInstance(profile=profile.name, start=one.start, compute_slices=compute))
    return wanted
