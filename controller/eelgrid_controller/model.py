"""Watts that a choice will draw: the prior for each GPU, and the modelled power of the cluster.

Owns the order of sources: the catalogue by key, the catalogue by name, the
device's own limits, a stated default. Must not know where work goes.

Theory: GPUs draw idle watts until any share is held, then full watts; CPUs are
priced as packages (eelgrid_kernels.placement holds the formulas). It is a model
for comparing choices, not a measurement: what is measured comes by telemetry.
"""

from typing import NamedTuple

from eelgrid_kernels import Nodes, cluster_power
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Gpu

__all__ = ["DEFAULT_BUSY_W", "IDLE_SHARE", "GpuWatts", "PowerModel", "modelled_power_w"]

# A board that nothing is known about: V100, the middle of the catalogue's data-centre boards.
DEFAULT_BUSY_W = 300.0
# Idle over full watts of the PWR paper's boards lies between 0.10 (P100, V100) and 0.20 (A10, G2).
IDLE_SHARE = 0.1


class GpuWatts(NamedTuple):
    """Watts with no work and with full work; `source` is catalogue, limits or default."""

    idle_w: float
    busy_w: float
    source: str


class PowerModel:
    """The prior watts of every device."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def gpu(self, gpu: Gpu) -> GpuWatts:
        """The watts of one device."""
        product = self._catalogue.products.get(gpu.catalogue_key) if gpu.catalogue_key else None
        product = product or self._catalogue.find(gpu.product, gpu.memory_bytes or None)
        if product is not None:
            return GpuWatts(product.idle_w, product.busy_w, "catalogue")
        limit_w = gpu.power_limit_default_w or gpu.power_limit_max_w
        if limit_w:
            return GpuWatts(IDLE_SHARE * limit_w, limit_w, "limits")
        return GpuWatts(IDLE_SHARE * DEFAULT_BUSY_W, DEFAULT_BUSY_W, "default")


def modelled_power_w(nodes: Nodes) -> float:
    """Watts of all nodes, those that fell silent too: their work may well run on."""
    return float(cluster_power(nodes))
