"""Small partition problems, and slow, obvious twins of the planner: everything that there is, tried.

The twins ask the catalogue for geometry placement by placement and use nothing of the planner.
"""

import itertools
import math
from functools import cache
from typing import NamedTuple

from bench.mig.plans import pool_of_product

from eelgrid_controller.partition.plan import layout_message
from eelgrid_controller.partition.problem import InferenceDemand, PartitionProblem
from eelgrid_controller.partition.transition import (
    CreateStep,
    DestroyStep,
    PartitionStep,
    SetModeStep,
    StartStep,
    apply_steps,
)
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import GpuLayout

PRODUCTS = load_catalogue().products
A30, A100 = PRODUCTS["a30"], PRODUCTS["a100-sxm4-80gb"]
KEYS = {"a30": ("1g", "2g", "4g"), "a100-sxm4-80gb": ("1g", "2g", "3g", "4g", "7g")}


def point(workload, profile, throughput_hz, latency_s=0.01, product=A30, **how):
    power_w = how.pop("power_w", None)
    configuration = Configuration(product.model, profile, **how)
    return Point(workload, configuration, float(throughput_hz), {0.5: latency_s}, power_w=power_w)


def service(name, rate_hz, latency_s=0.02, **fields):
    return InferenceDemand(
        name=name, workload=fields.pop("workload", name), rate_hz=float(rate_hz), latency_s=latency_s, **fields
    )


def problem(rates, throughputs, product=A30, **fields):
    """Services s0, s1 ... with a rate each and a throughput for each profile, in the order of KEYS; 0 for none."""
    points = [
        point(f"s{number}", profile, hz, product=product)
        for number, row in enumerate(throughputs)
        for profile, hz in zip(KEYS[product.key], row, strict=True)
        if hz
    ]
    services = [service(f"s{number}", rate) for number, rate in enumerate(rates)]
    pools = fields.pop("pools", (pool_of_product(product),))
    return PartitionProblem(services=tuple(services), points=tuple(points), pools=pools, **fields)


@cache
def layouts(part, keys):
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
def multisets(part, keys):
    return frozenset(tuple([key for key, _ in layout].count(key) for key in keys) for layout in layouts(part, keys))


@cache
def gpus_for(part, keys, wanted):
    """The fewest GPUs that hold this many of each profile."""
    if not any(wanted):
        return 0
    first = next(number for number, count in enumerate(wanted) if count)
    best = math.inf
    for held in multisets(part, keys):
        if held[first] and all(a <= b for a, b in zip(held, wanted, strict=True)):
            left = tuple(b - a for a, b in zip(held, wanted, strict=True))
            best = min(best, 1 + gpus_for(part, keys, left))
    return best


def covers(rate, sizes):
    """Every cover of a rate from which nothing can be left out."""
    most = [math.ceil(rate / size) if size else 0 for size in sizes]
    for counts in itertools.product(*(range(one + 1) for one in most)):
        served = sum(count * size for count, size in zip(counts, sizes, strict=True))
        spare = [size for count, size in zip(counts, sizes, strict=True) if count and served - size >= rate]
        if served >= rate and not spare:
            yield counts


def least(rates, throughputs, product=A30):
    """Fewest GPUs, then fewest compute slices, of every choice of covers."""
    keys = KEYS[product.key]
    slices = [product.mig.profiles[key].compute_slices for key in keys]
    best = (math.inf, math.inf)
    for chosen in itertools.product(*(list(covers(*pair)) for pair in zip(rates, throughputs, strict=True))):
        wanted = tuple(map(sum, zip(*chosen, strict=True)))
        used = sum(count * size for count, size in zip(wanted, slices, strict=True))
        best = min(best, (gpus_for(product.mig.key, keys, wanted), used))
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
