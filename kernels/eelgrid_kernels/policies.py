"""The placement policies by name.

Owns which code and weights a name stands for. Must not know how a policy scores
(eelgrid_kernels.peers says), nor on what it runs.

`pwrA` is PWR with weight A and FGD with 1000 - A, for any whole A from 1 to 999;
the mixes that Lettich et al. (CCGrid 2025) publish are listed. `eelgrid` weighs,
unless it is given other weights: a watt as 1; fragmentation not at all, since the
look-ahead sees what it sees; a GPU that its node's CPU can no longer feed as 50 W,
and as up to 1,000 W when the fleet is fuller than 70 %; a watt that the next task
would have saved as 0.7; a GPU of a scarce model as 500 W. docs/explanation/placement.md has the why.
"""

import re
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.peers import BEST_FIT, DOT_PROD, EELGRID, GPU_CLUSTERING, GPU_PACKING, MIX, RANDOM

__all__ = ["Policy", "names", "policy"]

_MIX_TOTAL = 1000
_PUBLISHED_MIXES = (500, 300, 200, 100, 50, 25)


class Policy(NamedTuple):
    """What a run is given."""

    name: str
    code: int
    weights: Floats


def _mix(power: int) -> tuple[int, tuple[float, ...]]:
    return MIX, (float(power), float(_MIX_TOTAL - power))


_KNOWN: dict[str, tuple[int, tuple[float, ...]]] = {
    "random": (RANDOM, ()),
    "dotprod": (DOT_PROD, ()),
    "gpupacking": (GPU_PACKING, ()),
    "gpuclustering": (GPU_CLUSTERING, ()),
    "bestfit": (BEST_FIT, ()),
    "fgd": _mix(0),
    "pwr": _mix(_MIX_TOTAL),
    **{f"pwr{power}": _mix(power) for power in _PUBLISHED_MIXES},
    "eelgrid": (EELGRID, (1.0, 0.0, 50.0, 0.7, 500.0, 1000.0)),
}


def names() -> tuple[str, ...]:
    """The policies that have been published, and ours."""
    return tuple(_KNOWN)


def policy(name: str) -> Policy:
    """The policy of that name, any mix of PWR and FGD among them."""
    found = _KNOWN.get(name)
    if found is None:
        mixed = re.fullmatch(r"pwr([1-9][0-9]{0,2})", name, re.ASCII)
        if not mixed:
            known = ", ".join(names())
            raise ValueError(f"there is no policy {name!r}; take one of {known}, or pwrA with A from 1 to 999")
        found = _mix(int(mixed[1]))
    return Policy(name, found[0], np.array(found[1], np.float64))
