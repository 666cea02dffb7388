"""Instances over many windows: what stays loaded after it served, and a load shared by one who knows no watts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.whatif.instances import (
    START_WINDOWS,
    HullStep,
    InstanceLoad,
    InstanceShape,
    ServiceDemand,
    choose_instances,
    dispatch_load,
)

HOLD_WINDOWS = 15  # windows that an instance stays loaded after it served


@dataclass(frozen=True, slots=True)
class LoadedInstances:
    """What is loaded and when it last served: instances by shape that served in each of the last windows."""

    served: tuple[tuple[int, ...], ...]
    instances: tuple[int, ...]


def retain_instances(before: LoadedInstances, serving: Sequence[int], *, hold: int = HOLD_WINDOWS) -> LoadedInstances:
    """What stays loaded: of each shape the most that served in one of the last `hold` windows."""
    served = (*before.served, tuple(serving))[-hold:]
    return LoadedInstances(served, tuple(max(counts) for counts in zip(*served, strict=True)))


def _evict_idle(
    asks: Sequence[ServiceDemand],
    after: list[LoadedInstances],
    serving: Sequence[Sequence[int]],
    pool: Mapping[str, int],
) -> None:
    """Gives up idle instances, the largest first, until what is loaded fits into the pool; in place."""
    for model, gpus in pool.items():
        places = [
            (ask.shapes[place].gpus, number, place)
            for number, ask in enumerate(asks)
            for place in range(len(ask.shapes))
            if ask.shapes[place].configuration.gpu_model == model
        ]
        over = sum(size * after[number].instances[place] for size, number, place in places) - gpus
        for size, number, place in sorted(places, reverse=True):
            idle = after[number].instances[place] - serving[number][place]
            gone = min(idle, -(-over // size)) if over > 0 else 0
            if gone > 0:
                counts = list(after[number].instances)
                counts[place] -= gone
                # Forgotten too, or the next window would load it again.
                served = tuple(
                    tuple(min(count, most) for count, most in zip(row, counts, strict=True))
                    for row in after[number].served
                )
                after[number] = LoadedInstances(served, tuple(counts))
                over -= gone * size


def serve_window(
    asks: Sequence[ServiceDemand],
    before: Sequence[LoadedInstances],
    pool: Mapping[str, int],
    *,
    window_s: float,
    hold: int = HOLD_WINDOWS,
    amortised: int = START_WINDOWS,
) -> tuple[tuple[InstanceLoad, ...], tuple[LoadedInstances, ...]]:
    """One window of all services: how each runs, and what is loaded in it and after it."""
    serving = choose_instances(asks, pool, window_s=window_s, amortised=amortised)
    after = [retain_instances(loaded, counts, hold=hold) for loaded, counts in zip(before, serving, strict=True)]
    _evict_idle(asks, after, serving, pool)
    running = tuple(dispatch_load(ask.shapes, counts, ask.demand_hz) for ask, counts in zip(asks, serving, strict=True))
    return running, tuple(after)


def without_power(shape: InstanceShape, start_s: float) -> InstanceShape:
    """The shape as one sees it who counts GPUs for watts: one for each."""
    best = shape.steps[-1]
    return replace(
        shape,
        steps=(HullStep(best.throughput_hz, float(shape.gpus), best.point),),
        idle_w=0.0,
        start_j=start_s * shape.gpus,
    )


def spread_load(shapes: Sequence[InstanceShape], serving: Sequence[int], demand_hz: float) -> InstanceLoad:
    """The same load in proportion to what each instance can give, as one shares it who knows no watts."""
    capacity_hz = math.fsum(count * shape.throughput_hz for shape, count in zip(shapes, serving, strict=True))
    share = min(1.0, demand_hz / capacity_hz) if capacity_hz > 0.0 else 0.0
    instances, throughput_hz, power_w = [], 0.0, 0.0
    for shape, count in zip(shapes, serving, strict=True):
        running = dispatch_load((shape,), (count,), count * share * shape.throughput_hz)
        instances.append(running.instances[0])
        throughput_hz += running.throughput_hz
        power_w += running.power_w
    return InstanceLoad(tuple(instances), throughput_hz, power_w)
