"""What is marked on a frontier: the efficient ones, and the choices of three weightings.

Owns the rules. Must not know how a row came about.

Theory. A row is efficient if no other has a latency, watts and a factor on the rates
that are no worse, one of them better. `performance` is the tightest objective,
`energy` the tightest of the least watts. `balanced` is the knee between them: with the
logarithms of latency and watts each stretched to 0..1, the row farthest below the line
that joins the two. The tightest is taken of equals; if none is below the line, none
gives more than its share, and `balanced` is `performance`. Logarithms, so that neither unit
nor scale matters.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Worth", "balanced", "efficient"]

_SAME = 1e-9  # relative: rounding


class Worth(NamedTuple):
    """What a row is worth; less, less and more are better."""

    latency_s: float
    power_w: float
    factor: float


def _beats(one: Worth, other: Worth) -> bool:
    """No worse in all, better in one, by more than rounding."""
    no_worse = (
        one.latency_s <= other.latency_s
        and one.power_w <= other.power_w * (1.0 + _SAME)
        and one.factor >= other.factor * (1.0 - _SAME)
    )
    return no_worse and (
        one.latency_s < other.latency_s
        or one.power_w < other.power_w * (1.0 - _SAME)
        or one.factor > other.factor * (1.0 + _SAME)
    )


def efficient(rows: Sequence[Worth]) -> tuple[bool, ...]:
    """Which rows no other beats."""
    return tuple(not any(_beats(other, one) for other in rows) for one in rows)


def balanced(rows: Sequence[Worth]) -> int:
    """The place of the knee among rows, one or more, whose latency rises and whose watts do not; see above."""
    if any(row.latency_s <= 0.0 or row.power_w <= 0.0 for row in rows):
        return 0  # no logarithm: a fleet that draws nothing has nothing to trade
    least_w = min(row.power_w for row in rows)
    last = next(place for place, row in enumerate(rows) if row.power_w <= least_w * (1.0 + _SAME))
    wide, high = (math.log(max(a, b) / min(a, b)) for a, b in zip(rows[0][:2], rows[last][:2], strict=True))
    if not (wide > 0.0 and high > 0.0):
        return 0
    below = [
        1.0 - math.log(row.latency_s / rows[0].latency_s) / wide - math.log(row.power_w / rows[last].power_w) / high
        for row in rows[: last + 1]
    ]
    most = max(below)
    if most <= _SAME:
        return 0
    return next(place for place, depth in enumerate(below) if depth >= most - _SAME)
