"""Simple ways to partition, on the same tables and judged alike.

Owns the peers. Must not know our planner. Each takes, for every service, the best
admissible throughput of each slice size, and gives slices to place; all are placed
by the same first fit, largest slice first, on A100 geometry.

    whole     every service on GPUs of its own, uncut (7g)
    density   the size with the best throughput per slice, as often as the rate asks
    triplets  as density while whole slices are filled, then the smallest size that serves the rest: ParvaGPU's
              segments, re-implemented from the paper's description; its last step, which splits segments to fill gaps,
              is not

Source: Lee et al., SC'24 (ParvaGPU), for triplets.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.mig.judge import Placed

__all__ = ["PEERS", "Choice", "Demand", "Peer", "planned"]

# Where a slice is tried first: what leaves room for larger ones.
_PLACES = {7: (0,), 4: (0,), 3: (4, 0), 2: (0, 2, 4), 1: (6, 5, 4, 3, 2, 1, 0)}
_SIZE = {7: 8, 4: 4, 3: 4, 2: 2, 1: 1}
_COMPUTE = 7


class Choice(NamedTuple):
    """The best admissible configuration of a service on one slice size."""

    slices: int
    throughput_hz: float
    batch: int
    processes: int


class Demand(NamedTuple):
    """One service: its rate and its choices by slice size."""

    model: str
    rate_hz: float
    choices: Mapping[int, Choice]


Peer = Callable[[Demand], list[Choice]]


def _whole(demand: Demand) -> list[Choice]:
    largest = demand.choices[max(demand.choices)]
    return [largest] * math.ceil(demand.rate_hz / largest.throughput_hz)


def _densest(demand: Demand) -> Choice:
    return max(demand.choices.values(), key=lambda choice: (choice.throughput_hz / choice.slices, -choice.slices))


def _density(demand: Demand) -> list[Choice]:
    best = _densest(demand)
    return [best] * math.ceil(demand.rate_hz / best.throughput_hz)


def _triplets(demand: Demand) -> list[Choice]:
    best = _densest(demand)
    full = int(demand.rate_hz // best.throughput_hz)
    rest_hz = demand.rate_hz - full * best.throughput_hz
    enough = [choice for choice in demand.choices.values() if choice.throughput_hz >= rest_hz]
    last = min(enough, key=lambda choice: choice.slices, default=best)
    return [best] * full + ([last] if rest_hz > 0.0 else [])


PEERS: Mapping[str, Peer] = {"whole": _whole, "density": _density, "triplets": _triplets}


def planned(peer: Peer, demands: Sequence[Demand]) -> tuple[Placed, ...]:
    """A peer's slices, placed."""
    wanted = [(choice, demand.model) for demand in demands for choice in peer(demand)]
    wanted.sort(key=lambda item: -item[0].slices)
    gpus: list[list[tuple[int, int]]] = []  # (start, slices)
    placed = []
    for choice, model in wanted:
        number, start = next(
            ((number, start) for number, gpu in enumerate(gpus) if (start := _fit(gpu, choice.slices)) is not None),
            (len(gpus), _PLACES[choice.slices][0]),
        )
        if number == len(gpus):
            gpus.append([])
        gpus[number].append((start, choice.slices))
        placed.append(Placed(number, start, choice.slices, model, choice.batch, choice.processes))
    return tuple(placed)


def _fit(gpu: Sequence[tuple[int, int]], slices: int) -> int | None:
    if sum(taken for _, taken in gpu) + slices > _COMPUTE:
        return None
    for start in _PLACES[slices]:
        end = start + _SIZE[slices]
        if all(end <= other or other + _SIZE[taken] <= start for other, taken in gpu):
            return start
    return None
