"""MIG layouts: which slices of a GPU exist, which are legal, and what share of the GPU each one is.

Derives slices from a GPU and a layout. Must not know which workload holds a slice, or why.

Theory: a layout covers the whole GPU. Its instances are named by the driver's profile names (a catalogue key is
accepted, too); a slice is identified by profile and start. The shares of slices are proportional to compute slices,
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
    """Returns the MIG geometry of a GPU from the catalogue; None if it cannot be partitioned."""
    return _geometry(gpu.catalogue_key, gpu.product, gpu.memory_bytes) if gpu.mig_capable else None


def compute_share_milli(geometry: MigGeometry, profile: GiProfile) -> int:
    """Computes a profile's share of the GPU's compute slices, in thousandths."""
    return GPU_MILLI_WHOLE * profile.compute_slices // geometry.compute_slices


def list_slice_positions(layout: GpuLayout) -> Iterator[SlicePosition]:
    """Yields profile and start of every instance of a layout."""
    return ((one.profile, one.start) for one in layout.instances)


def find_layout_problem(gpu: Gpu, layout: GpuLayout) -> str:
    """Returns why a layout is not possible on this GPU; empty if it is."""
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
    """Returns why replicas cannot hold these slices of a layout; empty if they can."""
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
    """Returns the UUID that a process opens for a slice; None while the slice does not exist."""
    if not place.profile:
        return None if gpu.mig_enabled or gpu.mig_pending else gpu.uuid
    for instance in gpu.gpu_instances:
        if (instance.profile, instance.start) == (place.profile, place.start):
            whole = [one.uuid for one in instance.compute_instances if one.uuid]
            return whole[0] if len(whole) == len(instance.compute_instances) == 1 else None
    return None


def is_layout_complete(gpu: Gpu, layout: GpuLayout) -> bool:
    """Returns whether every instance of the layout can be opened; others may exist beside them."""
    mode = gpu.mig_enabled == layout.mig_enabled and not gpu.mig_pending
    return mode and all(
        find_slice_device(gpu, Slice(profile=name, start=start)) for name, start in list_slice_positions(layout)
    )
