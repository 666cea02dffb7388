"""Power limits of boards: what a GPU's driver or the catalogue says may be set on it.

Owns the reading of both. Must not know who holds a GPU, or which limit is chosen.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Gpu

__all__ = ["LIMITS_WANTED", "Board", "board_of", "limits_between"]

LIMITS_WANTED = 12
_STEP_W = 25.0


class Board(NamedTuple):
    """What may be set on a GPU."""

    least_w: float
    default_w: float


def board_of(gpu: Gpu, catalogue: Catalogue) -> Board | None:
    """By its driver, else by the catalogue; None where neither tells."""
    product = catalogue.products.get(gpu.catalogue_key)
    default_w = gpu.power_limit_default_w or (product.power_default_w if product else None)
    least_w = gpu.power_limit_min_w or (product.power_min_w if product else None)
    if default_w is None or least_w is None or not 0.0 < least_w <= default_w:
        return None
    return Board(least_w, default_w)


def limits_between(boards: Iterable[Board]) -> tuple[float, ...]:
    """The limits to choose from, falling; the default alone where the boards take no other.

    Steps are of 25 W as in Zeus's traces, or the next multiple that makes LIMITS_WANTED of
    them at most: each limit more has to be tried.
    """
    known = list(boards)
    default_w, least_w = min(board.default_w for board in known), max(board.least_w for board in known)
    step_w = _STEP_W * max(1, math.ceil((default_w - least_w) / _STEP_W / (LIMITS_WANTED - 1)))
    count = math.floor(max(0.0, default_w - least_w) / step_w + 1e-9)
    return tuple(default_w - step_w * number for number in range(count + 1))
