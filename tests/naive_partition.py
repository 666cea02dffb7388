"""Slow, obvious twins of the partition planner: everything that there is, tried.

They ask the catalogue for geometry placement by placement and use nothing of the planner.
"""

import itertools
import math
from functools import cache
from typing import NamedTuple

from eelgrid_controller.partition.plan import layout_message
from eelgrid_controller.partition.transition import (
    CreateStep,
    DestroyStep,
    PartitionStep,
    SetModeStep,
    StartStep,
    apply_steps,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import GpuLayout
from tests.builders.partition import A30, KEYS


@cache
def list_layouts(part, keys):
    """Every set of placements without conflict, as the catalogue judges."""
    geometry = load_catalogue().geometries[part]
    places = [(geometry.profiles[key], start) for key in keys for start in geometry.profiles[key].starts]
    return tuple(
        frozenset((profile.key, start) for profile, start in chosen)
        for size in range(geometry.most + 1)
        for chosen in itertools.combinations(places, size)
        if geometry.conflict(chosen) is None
    )


@cache
def count_profiles(part, keys):
    """Every number of instances by profile that some layout has."""
    return frozenset(
        tuple([key for key, _ in layout].count(key) for key in keys) for layout in list_layouts(part, keys)
    )


@cache
def count_gpus(part, keys, wanted):
    """The fewest GPUs that hold this many of each profile."""
    if not any(wanted):
        return 0
    first = next(number for number, count in enumerate(wanted) if count)
    best = math.inf
    for held in count_profiles(part, keys):
        if held[first] and all(a <= b for a, b in zip(held, wanted, strict=True)):
            left = tuple(b - a for a, b in zip(held, wanted, strict=True))
            best = min(best, 1 + count_gpus(part, keys, left))
    return best


def list_covers(rate, sizes):
    """Every cover of a rate from which nothing can be left out."""
    most = [math.ceil(rate / size) if size else 0 for size in sizes]
    for counts in itertools.product(*(range(one + 1) for one in most)):
        served = sum(count * size for count, size in zip(counts, sizes, strict=True))
        spare = [size for count, size in zip(counts, sizes, strict=True) if count and served - size >= rate]
        if served >= rate and not spare:
            yield counts


def find_least(rates, throughputs, product=A30):
    """Fewest GPUs, then fewest compute slices, of every choice of covers."""
    keys = KEYS[product.key]
    slices = [product.mig.profiles[key].compute_slices for key in keys]
    best = (math.inf, math.inf)
    for chosen in itertools.product(*(list(list_covers(*pair)) for pair in zip(rates, throughputs, strict=True))):
        wanted = tuple(map(sum, zip(*chosen, strict=True)))
        used = sum(count * size for count, size in zip(wanted, slices, strict=True))
        best = min(best, (count_gpus(product.mig.key, keys, wanted), used))
    return best


class GpuSteps(NamedTuple):
    """What one GPU does at a time: drains, then the layout (None: it stays as it is), then starts."""

    uuid: str
    steps: tuple[PartitionStep, ...]
    layout: GpuLayout | None


def group_steps_by_gpu(gpus, steps, geometries):
    """The steps as an agent takes them: drains first, then one layout, then starts; by GPU in the order of the steps."""
    group, last = [], None
    for step, gpu in apply_steps(gpus, steps):
        if last is not None and (
            last.uuid != step.uuid or (isinstance(group[-1], StartStep) and not isinstance(step, StartStep))
        ):
            yield _order(last, group, geometries[last.model])
            group = []
        group.append(step)
        last = gpu
    if last is not None:
        yield _order(last, group, geometries[last.model])


def _order(gpu, group, geometry):
    changes = any(isinstance(step, DestroyStep | SetModeStep | CreateStep) for step in group)
    layout = layout_message(gpu, geometry) if changes and geometry is not None else None
    return GpuSteps(gpu.uuid, tuple(group), layout)
