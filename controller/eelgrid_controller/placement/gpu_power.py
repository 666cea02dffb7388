"""GPU power: prior idle and busy watts of each GPU, modelled power of the cluster, and settable limit ranges.

Owns the order of sources: for watts the catalogue by key, the catalogue by name, the device's own limits, a fixed
default; for limits the driver, then the catalogue. Must not know where work goes or which limit is set.

Theory: GPUs draw idle watts until any share is allocated, then full watts; CPUs are priced as packages
(eelgrid_kernels has the formulas). It is a model for comparing choices, not a measurement.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from eelgrid_kernels.arrays import Nodes
from eelgrid_kernels.node_cost import cluster_power
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import Gpu

LIMITS_WANTED = 12
_STEP_W = 25.0


class PowerLimitRange(NamedTuple):
    """The range of power limits that can be set on a GPU, in watts."""

    least_w: float
    default_w: float


def find_power_limit_range(gpu: Gpu, catalogue: Catalogue) -> PowerLimitRange | None:
    """Returns the range from the driver, else from the catalogue; None if neither has one."""
    product = catalogue.products.get(gpu.catalogue_key)
    default_w = gpu.power_limit_default_w or (product.power_default_w if product else None)
    least_w = gpu.power_limit_min_w or (product.power_min_w if product else None)
    if default_w is None or least_w is None or not 0.0 < least_w <= default_w:
        return None
    return PowerLimitRange(least_w, default_w)


def list_limit_choices(boards: Iterable[PowerLimitRange]) -> tuple[float, ...]:
    """Returns the limits to choose from, descending, in watts; the default alone if the GPUs accept no other.

    Steps are of 25 W as in Zeus's traces, or the smallest multiple of it with at most LIMITS_WANTED choices: each
    further limit must be tried.
    """
    known = list(boards)
    default_w, least_w = min(board.default_w for board in known), max(board.least_w for board in known)
    step_w = _STEP_W * max(1, math.ceil((default_w - least_w) / _STEP_W / (LIMITS_WANTED - 1)))
    count = math.floor(max(0.0, default_w - least_w) / step_w + 1e-9)
    return tuple(default_w - step_w * number for number in range(count + 1))


# For an unknown GPU: V100, the middle of the catalogue's data-centre boards.
DEFAULT_BUSY_W = 300.0
# Idle over full watts of the PWR paper's boards is between 0.10 (P100, V100) and 0.20 (A10, G2).
IDLE_SHARE = 0.1


class GpuPowerPrior(NamedTuple):
    """Idle and full watts of a GPU; `source` is catalogue, limits or default."""

    idle_w: float
    busy_w: float
    source: str


class PriorPowerModel:
    """Computes the prior watts of devices, and caches them."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def gpu(self, gpu: Gpu) -> GpuPowerPrior:
        """Returns the prior watts of one device."""
        product = self._catalogue.products.get(gpu.catalogue_key) if gpu.catalogue_key else None
        product = product or self._catalogue.find_product(gpu.product, gpu.memory_bytes or None)
        if product is not None:
            return GpuPowerPrior(product.idle_w, product.busy_w, "catalogue")
        limit_w = gpu.power_limit_default_w or gpu.power_limit_max_w
        if limit_w:
            return GpuPowerPrior(IDLE_SHARE * limit_w, limit_w, "limits")
        return GpuPowerPrior(IDLE_SHARE * DEFAULT_BUSY_W, DEFAULT_BUSY_W, "default")


def compute_modelled_power_w(nodes: Nodes) -> float:
    """Computes the modelled watts of all nodes, including lost ones: their work may still run."""
    return float(cluster_power(nodes))
