"""The cheapest whole instances for one demand: an exact search, without a solver.

Owns the search for one service whose pool is not short. Must not know windows, pools
or what stays loaded.

Theory. With m whole instances of each shape the least cost is a walk along convex
segments (instances.py), so it is convex in m, and a start costs for what is above the
loaded. Shapes are fixed one after the other, the most efficient first; what is left
may be served by any share of an instance of the shapes that follow, at their least
cost per token: a lower bound that is convex in the count that is being fixed. Counts
are tried outward from its minimum and left as soon as the bound passes the best found.
The last shape needs no trying: the bound is the cost. The answer is the optimum within
GAP, or the best after NODES_MOST, with the bound that was then open.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from eelgrid_controller.serving.instances import Shape

__all__ = ["GAP", "NODES_MOST", "Found", "least"]

GAP = 1e-6  # relative
NODES_MOST = 20_000


class Found(NamedTuple):
    """Instances by shape and their cost; `is_optimal` is false if the search was cut short."""

    serving: tuple[int, ...]
    cost_w: float
    is_optimal: bool


class _Kind(NamedTuple):
    """A shape as the search sees it: watts above idle."""

    place: int
    base_w: float  # of one instance at the first step
    base_hz: float
    segments: tuple[tuple[float, float], ...]  # watts per Hz and Hz of each, rising
    most_hz: float
    start_w: float  # a start, spread over the windows that pay for it
    loaded: int
    most: int  # instances
    ratio: float  # least watts per Hz of a fractional instance that is loaded


class _Fixed(NamedTuple):
    """What is decided so far."""

    cost_w: float
    given_hz: float
    segments: tuple[tuple[float, float], ...]  # rising in watts per Hz


def _kinds(
    shapes: Sequence[Shape], demand_hz: float, loaded: Sequence[int], start_w: Sequence[float], most: Sequence[int]
) -> list[_Kind]:
    found = []
    for place, shape in enumerate(shapes):
        steps, running = shape.steps, [step for step in shape.steps if step.throughput_hz > 0.0]
        segments = tuple(
            (
                (high.power_w - low.power_w) / (high.throughput_hz - low.throughput_hz),
                high.throughput_hz - low.throughput_hz,
            )
            for low, high in pairwise(steps)
        )
        found.append(
            _Kind(
                place,
                steps[0].power_w - shape.idle_w,
                steps[0].throughput_hz,
                segments,
                shape.throughput_hz,
                start_w[place],
                loaded[place],
                min(most[place], math.ceil(demand_hz / running[0].throughput_hz)),
                min((step.power_w - shape.idle_w) / step.throughput_hz for step in running),
            )
        )
    return sorted(found, key=lambda kind: kind.ratio)


def _with(fixed: _Fixed, kind: _Kind, count: int) -> _Fixed:
    if count == 0:
        return fixed
    added = tuple((slope, count * width_hz) for slope, width_hz in kind.segments)
    return _Fixed(
        fixed.cost_w + count * kind.base_w + max(0, count - kind.loaded) * kind.start_w,
        fixed.given_hz + count * kind.base_hz,
        tuple(sorted((*fixed.segments, *added))) if fixed.segments else added,
    )


def _bound(fixed: _Fixed, demand_hz: float, ratio: float) -> float:
    """The least cost if the rest may come at `ratio` watts per Hz; infinite if it may not and does not suffice."""
    cost_w, lacking_hz = fixed.cost_w, demand_hz - fixed.given_hz
    for slope, width_hz in fixed.segments:
        if lacking_hz <= 0.0 or slope >= ratio:
            break
        taken_hz = min(lacking_hz, width_hz)
        cost_w += slope * taken_hz
        lacking_hz -= taken_hz
    if lacking_hz > demand_hz * 1e-12:
        cost_w += ratio * lacking_hz  # infinite without a shape that follows
    return cost_w


class _Search:
    def __init__(self, kinds: list[_Kind], demand_hz: float) -> None:
        self.kinds = kinds
        self.demand_hz = demand_hz
        # The least watts per Hz of all shapes from each on; the last has none after it.
        self.ratios = [min((kind.ratio for kind in kinds[at:]), default=math.inf) for at in range(len(kinds) + 1)]
        self.best_w = math.inf
        self.best: tuple[int, ...] = ()
        self.nodes = 0

    def _outward(self, fixed: _Fixed, at: int) -> Iterator[tuple[float, _Fixed, int]]:
        """Counts of a shape from the least bound outward, as long as they may be better."""
        kind, ratio = self.kinds[at], self.ratios[at + 1]

        def bounded(count: int) -> tuple[float, _Fixed]:
            self.nodes += 1
            node = _with(fixed, kind, count)
            return _bound(node, self.demand_hz, ratio), node

        lacking_hz = self.demand_hz - fixed.given_hz - math.fsum(width_hz for _, width_hz in fixed.segments)
        least = 0
        if math.isinf(ratio):
            least = max(0, math.ceil(lacking_hz / kind.most_hz * (1.0 - 1e-12)))
        low, high = least, kind.most
        if low > high:
            return
        while low < high:  # the bound is convex in the count
            middle = (low + high) // 2
            if bounded(middle)[0] <= bounded(middle + 1)[0]:
                high = middle
            else:
                low = middle + 1
        yield (*bounded(low), low)
        up, down = low + 1, low - 1
        rising, falling = up <= kind.most, down >= least
        while rising or falling:
            if rising:
                value, node = bounded(up)
                rising = value < self.best_w * (1.0 - GAP) and up < kind.most
                if value < self.best_w * (1.0 - GAP):
                    yield value, node, up
                up += 1
            if falling:
                value, node = bounded(down)
                falling = value < self.best_w * (1.0 - GAP) and down > least
                if value < self.best_w * (1.0 - GAP):
                    yield value, node, down
                down -= 1

    def descend(self, fixed: _Fixed, at: int, counts: tuple[int, ...]) -> None:
        if at == len(self.kinds) - 1:
            value, _, count = next(self._outward(fixed, at), (math.inf, fixed, 0))
            if value < self.best_w:
                self.best_w, self.best = value, (*counts, count)
            return
        for value, node, count in self._outward(fixed, at):
            if self.nodes > NODES_MOST:
                return
            if value < self.best_w * (1.0 - GAP):
                self.descend(node, at + 1, (*counts, count))


def least(
    shapes: Sequence[Shape],
    demand_hz: float,
    *,
    loaded: Sequence[int],
    start_w: Sequence[float],
    most: Sequence[int],
) -> Found | None:
    """The cheapest instances that give the demand, watts above idle; None if `most` of each do not suffice.

    `start_w` is what one start of each shape costs the window, in W.
    """
    if demand_hz <= 0.0:
        return Found((0,) * len(shapes), 0.0, is_optimal=True)
    kinds = _kinds(shapes, demand_hz, loaded, start_w, most)
    search = _Search(kinds, demand_hz)
    search.descend(_Fixed(0.0, 0.0, ()), 0, ())
    if not search.best:
        return None
    serving = [0] * len(shapes)
    for kind, count in zip(kinds, search.best, strict=True):
        serving[kind.place] = count
    return Found(tuple(serving), search.best_w, search.nodes <= NODES_MOST)
