"""MIG through NVML: the layout read back, and the geometry that the driver offers.

Instances are listed by profile, because a GPU instance without a compute instance has no MIG handle; without the
right to list them the MIG handles show what a process could open. Profiles are matched by id and size, since their
names change between drivers; what NVML does not report comes from the catalogue.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pynvml

from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import CiProfile, GiProfile, MigGeometry, Product, gi_span
from eelgrid_protos.messages import ComputeInstance, GpuInstance
from eelgrid_protos.quantities import MIB
from eelgrid_protos.values import dataclass

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
            key=name,
            nvml_names=(name,),
            architecture="",
            memory_slices=slices,
            compute_slices=max(profile.compute_slices for profile in profiles),
            most=max(profile.most for profile in profiles),
            reset_to_change_mode=not resetless,
            mode_survives_reboot=not resetless,
            sm_total=max(profile.sm_count or 0 for profile in profiles) or None,
            driver_least=None,
            profiles=by_key,
            note="not in the catalogue; read from the driver",
        )
    reset = known.reset_to_change_mode if resetless is None else not resetless
    return replace(known, profiles=by_key, reset_to_change_mode=reset)


def get_profile_size(handle: Any, profile_id: int) -> int:
    """Memory slices of an instance of this profile, 0 where the profile is unknown; raises NVMLError."""
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
    product = load_catalogue().find_product(name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) or None)
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
        int(info.copyEngineCount),
        int(info.decoderCount),
        int(info.encoderCount),
        int(info.jpegCount),
        int(info.ofaCount),
    )
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
    parts = (
        [known] if known else [part for part in load_catalogue().geometries.values() if part.memory_slices == slices]
    )
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
    """Whether the MIG mode changes without a reset; None where the driver does not report it."""
    try:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED])[0]
    except pynvml.NVMLError_FunctionNotFound:
        return None
    return bool(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else None


_FULL_ENUM = pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE


@dataclass(frozen=True, slots=True)
class _Profile:
    """A GPU instance profile of one device; `enum` is NVML's own number for asking, `id` for everything else."""

    enum: int
    id: int
    name: str
    most: int


class InstanceReader:
    """Reads layouts; what cannot change while the driver stays is kept."""

    def __init__(self) -> None:
        self._profiles: dict[str, tuple[_Profile, ...]] = {}
        self._compute: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}

    def reset(self) -> None:
        """Another driver may print other names."""
        self._profiles.clear()
        self._compute.clear()

    def read_instances(self, handle: Any, uuid: str, product: Product | None) -> tuple[GpuInstance, ...]:
        """The GPU instances of a device in MIG mode, by id; raises NVMLError when the device does not answer."""
        if uuid not in self._profiles:
            self._profiles[uuid] = _gi_profiles(handle, product)
        devices = list_mig_devices(handle)
        try:
            found = [
                self._instance(instance, uuid, profile, devices)
                for profile in self._profiles[uuid]
                for instance in _gpu_instances(handle, profile)
            ]
        except pynvml.NVMLError_NoPermission:
            found = _layout_from_handles(devices, self._profiles[uuid])
        return tuple(sorted(found, key=lambda instance: instance.id))

    def _instance(
        self, instance: Any, uuid: str, profile: _Profile, devices: dict[tuple[int, int], Any]
    ) -> GpuInstance:
        info = pynvml.nvmlGpuInstanceGetInfo(instance)
        key = (uuid, profile.id)
        if key not in self._compute:
            self._compute[key] = _ci_profiles(instance)
        compute = []
        for profile_id, most in self._compute[key]:
            for child in _compute_instances(instance, profile_id, most):
                found = pynvml.nvmlComputeInstanceGetInfo_v2(child)
                device = devices.get((info.id, found.id))
                compute.append(
                    ComputeInstance(
                        id=found.id,
                        profile_id=profile_id,
                        uuid="" if device is None else str(pynvml.nvmlDeviceGetUUID(device)),
                        start=found.placement.start,
                        size=found.placement.size,
                    )
                )
        return GpuInstance(
            id=info.id,
            profile_id=profile.id,
            profile=profile.name,
            start=info.placement.start,
            size=info.placement.size,
            compute_instances=tuple(sorted(compute, key=lambda child: child.id)),
        )


def _gi_profiles(handle: Any, product: Product | None) -> tuple[_Profile, ...]:
    profiles = []
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info, name = _gi_profile(handle, enum, product)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            # A hole in this part's profiles, or past the end of an older driver's.
            continue
        profiles.append(_Profile(enum=enum, id=info.id, name=name, most=info.instanceCount))
    return tuple(profiles)


def _gi_profile(handle: Any, enum: int, product: Product | None) -> tuple[Any, str]:
    """NVML's description of a profile and its printed name; drivers before 510 print none."""
    try:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
    except pynvml.NVMLError_FunctionNotFound:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=1)
        known = product.mig.profile_by_id(info.id) if product and product.mig else None
        return info, known.name if known else f"profile-{info.id}"
    return info, str(info.name).removeprefix("MIG ")


def _gpu_instances(handle: Any, profile: _Profile) -> list[Any]:
    found, count = (pynvml.c_nvmlGpuInstance_t * profile.most)(), ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
    return list(found[: count.value])


def _compute_instances(instance: Any, profile_id: int, most: int) -> list[Any]:
    found, count = (pynvml.c_nvmlComputeInstance_t * most)(), ctypes.c_uint()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, found, ctypes.byref(count))
    return list(found[: count.value])


def _ci_profiles(instance: Any) -> tuple[tuple[int, int], ...]:
    """Profile id and most instances of each compute instance profile."""
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    found = []
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, shared, version=1)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        found.append((int(info.id), int(info.instanceCount)))
    return tuple(found)


def list_mig_devices(handle: Any) -> dict[tuple[int, int], Any]:
    """MIG handles by the ids of their GPU instance and compute instance."""
    devices = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        key = (pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device))
        devices[key] = device
    return devices


def _layout_from_handles(devices: dict[tuple[int, int], Any], profiles: tuple[_Profile, ...]) -> list[GpuInstance]:
    """The layout by MIG handles: "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb" tells the profile, the id tells the span."""
    slices = 8 if any(profile.enum == _FULL_ENUM for profile in profiles) else 4
    by_name = {profile.name: profile for profile in profiles}
    names: dict[int, str] = {}
    compute: dict[int, list[ComputeInstance]] = {}
    for (number, part), device in sorted(devices.items()):
        name = str(pynvml.nvmlDeviceGetName(device)).rpartition("MIG ")[2]
        # The compute part ("1c.") is there only when it is not the whole instance.
        names[number] = name.partition("c.")[2] or name
        mig_uuid = str(pynvml.nvmlDeviceGetUUID(device))
        compute.setdefault(number, []).append(ComputeInstance(id=part, uuid=mig_uuid))
    found = []
    for number, name in names.items():
        start, size = gi_span(number, slices)
        profile = by_name.get(name)
        found.append(
            GpuInstance(
                id=number,
                profile_id=profile.id if profile else 0,
                profile=name,
                start=start,
                size=size,
                compute_instances=tuple(compute[number]),
            )
        )
    return found
