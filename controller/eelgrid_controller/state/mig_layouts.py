"""MIG layouts: which slices of a GPU exist, which are legal, and what share of the GPU each one is.

Owns the way from a GPU and a layout to slices. Must not know who runs in a slice, nor why.

Theory: a layout is the whole of a GPU. Its instances are named by the driver's profile names (a catalogue key
is understood, too); a slice is identified by profile and start. The shares of slices are by compute slices,
rounded down, so that those of a legal layout never exceed the GPU.
"""

from collections.abc import Iterable, Iterator
from functools import cache

from eelgrid_protos import catalogue
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuLayout, Slice
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

SlicePosition = tuple[str, int]


@cache
def _geometry(key: str, product: str, memory_bytes: int) -> MigGeometry | None:
    known = catalogue.load_catalogue()
    found = known.products.get(key) if key else None
    found = found or known.find_product(product, memory_bytes or None)
    return None if found is None else found.mig


def find_mig_geometry(gpu: Gpu) -> MigGeometry | None:
    """The geometry of a GPU that can be cut, by the catalogue; None for any other."""
    return _geometry(gpu.catalogue_key, gpu.product, gpu.memory_bytes) if gpu.mig_capable else None


def compute_share_milli(geometry: MigGeometry, profile: GiProfile) -> int:
    """Thousandths of the GPU's compute slices."""
    return GPU_MILLI_WHOLE * profile.compute_slices // geometry.compute_slices


def list_slice_positions(layout: GpuLayout) -> Iterator[SlicePosition]:
    """Profile and start of every instance that is wanted."""
    return ((one.profile, one.start) for one in layout.instances)


def find_layout_problem(gpu: Gpu, layout: GpuLayout) -> str:
    """Why a layout cannot stand on this GPU; nothing if it can."""
    geometry = find_mig_geometry(gpu)
    if geometry is None:
        return f"GPU {gpu.uuid} cannot be cut"
    wanted = [(geometry.profile(name), start) for name, start in list_slice_positions(layout)]
    known = [(profile, start) for profile, start in wanted if profile is not None]
    if len(known) < len(wanted):
        return f"GPU {gpu.uuid} lacks a profile that is wanted"
    if wanted and not layout.mig_enabled:
        return f"GPU {gpu.uuid} is wanted whole and cut"
    return geometry.conflict(known) or ""


def find_slices_problem(layout: GpuLayout | None, held: Iterable[Slice]) -> str:
    """Why replicas cannot hold these slices of a layout; nothing if they can."""
    if layout is None:
        return "no layout is wanted there"
    free = [("", 0)] if not layout.mig_enabled else list(list_slice_positions(layout))
    for one in held:
        if (one.profile, one.start) not in free:
            where = f"{one.profile}@{one.start}" if one.profile else "the whole GPU"
            return f"{where} is held already, or not in the layout"
        free.remove((one.profile, one.start))
    return ""


def find_slice_device(gpu: Gpu, place: Slice) -> str | None:
    """The UUID that a process opens there; None while it does not stand."""
    if not place.profile:
        return None if gpu.mig_enabled or gpu.mig_pending else gpu.uuid
    for instance in gpu.gpu_instances:
        if (instance.profile, instance.start) == (place.profile, place.start):
            whole = [one.uuid for one in instance.compute_instances if one.uuid]
            return whole[0] if len(whole) == len(instance.compute_instances) == 1 else None
    return None


def is_layout_complete(gpu: Gpu, layout: GpuLayout) -> bool:
    """Whether every instance that is wanted can be opened; others may stand beside them."""
    mode = gpu.mig_enabled == layout.mig_enabled and not gpu.mig_pending
    return mode and all(
        find_slice_device(gpu, Slice(profile=name, start=start)) for name, start in list_slice_positions(layout)
    )
