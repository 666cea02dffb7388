"""Every device that a GPU can be, by name: the whole of it, and each MIG profile at each place.

Pure: owns the names and which devices this node can bring about. Must not know the API that
they are published through.

Theory. A name says index, profile and start, `gpu-2-1g-plus-me-4`, and no UUID: it must mean the
same after a reboot, over which a MIG device's UUID does not live, and claims are written
before an instance stands. Which devices there are depends on what may be changed. Where MIG
mode turns without a reset (H100 and newer), a GPU is a whole one and all its slices at once,
and the counters keep these apart; where it takes a reset (A100), it is what its mode allows. An
agent that may change nothing has what stands.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance

__all__ = [
    "Place",
    "device_name",
    "gpu_index_of",
    "is_held_by",
    "overlaps",
    "place_of",
    "places_of",
    "standing_at",
    "uuid_at",
]

_NAME = re.compile(r"gpu-([0-9]{1,4})(?:-([0-9a-z-]+)-([0-9]{1,3}))?")
_UNSPELLABLE = re.compile(r"[^0-9a-z]+")


class Place(NamedTuple):
    """A whole GPU, without a profile, or a profile of its geometry at a start."""

    gpu_index: int
    profile: GiProfile | None = None
    start: int = 0


def device_name(place: Place) -> str:
    """A label of DNS."""
    if place.profile is None:
        return f"gpu-{place.gpu_index}"
    return f"gpu-{place.gpu_index}-{_spelled(place.profile)}-{place.start}"


def gpu_index_of(name: str) -> int | None:
    """The GPU of a device; None where this is no name of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def place_of(name: str, geometry: MigGeometry | None) -> Place | None:
    """The place that a name stands for on a GPU of this geometry; None where it stands for none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    index, spelled, start = found.groups()
    if spelled is None:
        return Place(int(index))
    for profile in () if geometry is None else geometry.profiles.values():
        if _spelled(profile) == spelled and int(start) in profile.starts:
            return Place(int(index), profile, int(start))
    return None


def places_of(gpu: Gpu, geometry: MigGeometry | None, *, is_changeable: bool) -> Iterator[Place]:
    """What this GPU can be, the whole of it first, then by profile and start."""
    is_free = is_changeable and geometry is not None and gpu.mig_capable and not geometry.reset_to_change_mode
    if is_free or not gpu.mig_enabled:
        yield Place(gpu.index)
    if geometry is None or not (is_free or gpu.mig_enabled):
        return
    for profile in geometry.profiles.values():
        for start in profile.starts:
            place = Place(gpu.index, profile, start)
            if is_changeable or standing_at(gpu, place) is not None:
                yield place


def standing_at(gpu: Gpu, place: Place) -> GpuInstance | None:
    """The instance that is this place, if it stands."""
    if place.profile is None:
        return None
    return next(
        (one for one in gpu.gpu_instances if (one.profile_id, one.start) == (place.profile.id, place.start)), None
    )


def uuid_at(gpu: Gpu, place: Place) -> str:
    """What a container opens: the GPU, or the compute instance that is all of the GPU instance; empty where none is."""
    if place.profile is None:
        return "" if gpu.mig_enabled else gpu.uuid
    instance = standing_at(gpu, place)
    parts = () if instance is None else instance.compute_instances
    is_whole = len(parts) == 1 and parts[0].profile_id == place.profile.whole.id
    return parts[0].uuid if is_whole else ""


def overlaps(one: Place, other: Place) -> bool:
    """Whether the two cannot be had at once for their room alone."""
    if one.gpu_index != other.gpu_index:
        return False
    if one.profile is None or other.profile is None:
        return True
    return one.start < other.start + other.profile.size and other.start < one.start + one.profile.size


def is_held_by(instance: GpuInstance, places: Iterable[Place]) -> bool:
    """Whether one of these places is this very instance."""
    return any(
        place.profile is not None and (place.profile.id, place.start) == (instance.profile_id, instance.start)
        for place in places
    )


def _spelled(profile: GiProfile) -> str:
    # With and without media engines are two profiles: 1g+me and 1g-me.
    return _UNSPELLABLE.sub("-", profile.key.lower().replace("+", "-plus-")).strip("-")
