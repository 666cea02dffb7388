"""A device's MIG geometry as its driver offers it, filled up from the catalogue where the driver does not tell.

Profiles are matched by id and size, since the names change between drivers;
the names are the driver's. NVML tells the compute instances of a GPU instance
only when one exists, and places only from branch 470 on and to who may
configure MIG, so both come from the catalogue: the part's own entry, or
another part's with as many memory slices. Whoever calls sees NVML's errors; a
part without MIG is not supported.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pynvml

from eelgrid_protos.catalogue import CiProfile, GiProfile, MigGeometry, load
from eelgrid_protos.quantities import MIB

__all__ = ["is_resetless", "place_size", "read_geometry"]

# No part has more places for one profile than memory slices.
_PLACES_MOST = 64
_NO_SUCH_PROFILE = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})


def read_geometry(handle: Any) -> MigGeometry:
    """The profiles and places that this device's driver offers; raises NVMLError."""
    name, known = _known(handle)
    found = [(info, text, _places(handle, int(info.id), known)) for info, text in _profiles(handle)]
    if not found:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    slices = known.memory_slices if known else max(start + size for _, _, spans in found for start, size in spans)
    profiles = [_profile(info, text, spans, slices, known) for info, text, spans in found]
    by_key = {profile.key: profile for profile in profiles}
    # What the driver says of the mode outweighs the catalogue's word.
    resetless = is_resetless(handle)
    if known is None:
        return MigGeometry(
            key=name, nvml_names=(name,), architecture="", memory_slices=slices,
            compute_slices=max(profile.compute_slices for profile in profiles),
            most=max(profile.most for profile in profiles), reset_to_change_mode=not resetless,
            mode_survives_reboot=not resetless, sm_total=max(profile.sm_count or 0 for profile in profiles) or None,
            driver_least=None, profiles=by_key, note="not in the catalogue; read from the driver",
        )  # fmt: skip
    reset = known.reset_to_change_mode if resetless is None else not resetless
    return replace(known, profiles=by_key, reset_to_change_mode=reset)


def place_size(handle: Any, profile_id: int) -> int:
    """Memory slices of an instance of this profile, 0 where nobody knows the profile; raises NVMLError."""
    try:
        places = _possible_placements(handle, profile_id)
    except pynvml.NVMLError_FunctionNotFound:
        known = _known(handle)[1]
        profile = known.profile_by_id(profile_id) if known else None
        return profile.size if profile else 0
    return places[0][1] if places else 0


def _known(handle: Any) -> tuple[str, MigGeometry | None]:
    """The product's name, and what the catalogue knows of its geometry."""
    name = str(pynvml.nvmlDeviceGetName(handle))
    product = load().find(name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) or None)
    return name, product.mig if product else None


def _possible_placements(handle: Any, profile_id: int) -> tuple[tuple[int, int], ...]:
    """Start and size of every place of a profile, free or not; raises NVMLError."""
    found, count = (pynvml.c_nvmlGpuInstancePlacement_t * _PLACES_MOST)(), ctypes.c_uint(_PLACES_MOST)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, found, ctypes.byref(count))
    return tuple((int(place.start), int(place.size)) for place in found[: count.value])


def _profiles(handle: Any) -> Iterator[tuple[Any, str]]:
    """NVML's description of each profile and its printed name, which drivers before branch 510 do not print."""
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
        except pynvml.NVMLError_FunctionNotFound:
            info = _first_version(handle, enum)
        except pynvml.NVMLError as error:
            if error.value not in _NO_SUCH_PROFILE:
                raise
            # A hole in this part's profiles, or past the end of an older driver's.
            continue
        if info is not None:
            yield info, str(getattr(info, "name", "")).removeprefix("MIG ")


def _first_version(handle: Any, enum: int) -> Any:
    try:
        return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=1)
    except pynvml.NVMLError as error:
        if error.value not in _NO_SUCH_PROFILE:
            raise
        return None


def _places(handle: Any, profile_id: int, known: MigGeometry | None) -> tuple[tuple[int, int], ...]:
    try:
        return _possible_placements(handle, profile_id)
    except (pynvml.NVMLError_NoPermission, pynvml.NVMLError_FunctionNotFound):
        profile = known.profile_by_id(profile_id) if known else None
        if profile is None:
            raise
        return tuple((start, profile.size) for start in profile.starts)


def _profile(
    info: Any, name: str, spans: tuple[tuple[int, int], ...], slices: int, known: MigGeometry | None
) -> GiProfile:
    profile_id, size = int(info.id), spans[0][1]
    like = _like(profile_id, size, slices, known)
    own = like is not None and known is not None
    text = name or (like.name if like and own else f"profile-{profile_id}")
    engines = (
        int(info.copyEngineCount), int(info.decoderCount), int(info.encoderCount), int(info.jpegCount),
        int(info.ofaCount),
    )  # fmt: skip
    return GiProfile(
        key=like.key if like else text,
        id=profile_id,
        enum=like.enum if like else -1,
        name=text,
        compute_slices=int(info.sliceCount),
        size=size,
        starts=tuple(sorted(start for start, _ in spans)),
        most=int(info.instanceCount),
        media=like.media if like else "+me" in text,
        graphics=like.graphics if like else "+gfx" in text,
        memory_bytes=int(info.memorySizeMB) * MIB or None,
        sm_count=int(info.multiprocessorCount) or None,
        engines=engines if any(engines) else None,
        compute_instances=_compute(like, own=own, whole=int(info.sliceCount), sm_count=int(info.multiprocessorCount)),
        kinds=like.kinds if like and own else {},
    )


def _like(profile_id: int, size: int, slices: int, known: MigGeometry | None) -> GiProfile | None:
    """The catalogue's profile with this id and size: the part's own, or that of a part of the same shape."""
    parts = [known] if known else [part for part in load().geometries.values() if part.memory_slices == slices]
    found = (part.profile_by_id(profile_id) for part in parts)
    return next((profile for profile in found if profile is not None and profile.size == size), None)


def _compute(like: GiProfile | None, *, own: bool, whole: int, sm_count: int) -> tuple[CiProfile, ...]:
    """Compute instances by the catalogue; none of a profile that it does not know, for NVML tells none without one."""
    if like is None:
        return ()
    if own:
        return like.compute_instances
    # The shape is the same; how many SMs a part has is not.
    return tuple(
        replace(ci, sm_count=(sm_count or None) if ci.compute_slices == whole else None)
        for ci in like.compute_instances
    )


def is_resetless(handle: Any) -> bool | None:
    """Whether the MIG mode changes without a reset; None where the driver does not say."""
    try:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED])[0]
    except pynvml.NVMLError_FunctionNotFound:
        return None
    return bool(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else None
