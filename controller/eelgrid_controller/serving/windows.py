"""Which instances serve the next window, from a pool that services share.

Owns the choice of a window and what is kept loaded after it. Must not know where a
demand comes from, nor time: a window is what it is called with.

Theory. Of service i and shape s, m are the instances that serve, new those that must
be started for it, lambda the instances at step j of the hull. One program a window:
    min  sum (power_sj - idle_s) lambda_sj + start_j_s / (K seconds) new_s
    s.t. sum_j lambda_sj = m_s,   sum T_sj lambda_sj >= demand of i,
         new_s >= m_s - loaded_s, sum gpus_s m_s <= pool of the model,   m whole
Watts above idle, because a GPU of the pool that serves nothing draws its idle watts
whoever holds it. A start is spread over K windows: it is bought for longer than one,
and how long nobody knows. What served within the last `hold` windows stays loaded:
starting anew costs more than keeping it, which costs nothing but the room; room that
another needs is given up, the largest instances first.

Services are searched one by one, exactly (search.py). If their answers do not fit into
the pool together, the program is solved as a whole (joint.py). The lambdas are set by
the greedy walk of instances.py, so that the demand is met to the last digit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eelgrid_controller.serving.errors import Unusable
from eelgrid_controller.serving.instances import Running, dispatch
from eelgrid_controller.serving.joint import Ask, together
from eelgrid_controller.serving.search import least

__all__ = ["AMORTISED", "HOLD", "Ask", "Loaded", "chosen", "kept", "serve"]

AMORTISED = 10  # windows that pay for a start
HOLD = 15  # windows that an instance stays loaded after it served


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is loaded and when it last served: instances by shape that served in each of the last windows."""

    served: tuple[tuple[int, ...], ...]
    instances: tuple[int, ...]


def chosen(
    asks: Sequence[Ask], pool: Mapping[str, int], *, window_s: float, amortised: int = AMORTISED
) -> tuple[tuple[int, ...], ...]:
    """The instances that serve, by service and shape; NothingFits if the pool cannot give all demands."""
    each = [_alone(ask, pool, window_s, amortised) for ask in asks]
    if all(serving is not None for serving in each):
        found = tuple(serving for serving in each if serving is not None)
        if _fits(asks, found, pool):
            return found  # the best of each is the best of all
    return together(asks, pool, window_s, amortised)


def _alone(ask: Ask, pool: Mapping[str, int], window_s: float, amortised: int) -> tuple[int, ...] | None:
    """The best of one service, if no other wanted the pool."""
    most = []
    for shape, loaded in zip(ask.shapes, ask.loaded, strict=True):
        model = shape.configuration.gpu_model
        if model not in pool:
            raise Unusable("pool", f"no {model} in it", "say how many GPUs of each model there are")
        room = pool[model] // shape.gpus
        most.append(min(room, loaded) if ask.only_loaded else room)
    start_w = [shape.start_j / (amortised * window_s) for shape in ask.shapes]
    found = least(ask.shapes, ask.demand_hz, loaded=ask.loaded, start_w=start_w, most=most)
    return None if found is None else found.serving


def _fits(asks: Sequence[Ask], serving: Sequence[Sequence[int]], pool: Mapping[str, int]) -> bool:
    used = dict.fromkeys(pool, 0)
    for ask, counts in zip(asks, serving, strict=True):
        for shape, count in zip(ask.shapes, counts, strict=True):
            used[shape.configuration.gpu_model] += count * shape.gpus
    return all(used[model] <= gpus for model, gpus in pool.items())


def kept(before: Loaded, serving: Sequence[int], *, hold: int = HOLD) -> Loaded:
    """What stays loaded: of each shape the most that served in one of the last `hold` windows."""
    served = (*before.served, tuple(serving))[-hold:]
    return Loaded(served, tuple(max(counts) for counts in zip(*served, strict=True)))


def _evicted(
    asks: Sequence[Ask], after: list[Loaded], serving: Sequence[Sequence[int]], pool: Mapping[str, int]
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
                after[number] = Loaded(served, tuple(counts))
                over -= gone * size


def serve(
    asks: Sequence[Ask],
    before: Sequence[Loaded],
    pool: Mapping[str, int],
    *,
    window_s: float,
    hold: int = HOLD,
    amortised: int = AMORTISED,
) -> tuple[tuple[Running, ...], tuple[Loaded, ...]]:
    """One window of all services: how each runs, and what is loaded in it and after it."""
    serving = chosen(asks, pool, window_s=window_s, amortised=amortised)
    after = [kept(loaded, counts, hold=hold) for loaded, counts in zip(before, serving, strict=True)]
    _evicted(asks, after, serving, pool)
    running = tuple(dispatch(ask.shapes, counts, ask.demand_hz) for ask, counts in zip(asks, serving, strict=True))
    return running, tuple(after)
