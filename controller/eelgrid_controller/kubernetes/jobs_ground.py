"""What is known besides the jobs: from nodes, inventories and measured points to the machine's ground.

Owns which points stand for a job that is to be right-sized. Must not know jobs.

A point counts if it was measured at the default limit, with free clocks, alone on its GPUs. Its ends are alike:
points are taken at their word, as everywhere (docs/how-to/frontier.md). A node's model is that of its inventory, where
it has one, else that of its labels; a node of several models has none.
"""

from collections.abc import Iterable

from eelgrid_controller.kubernetes import names
from eelgrid_controller.kubernetes.jobs import Site
from eelgrid_controller.kubernetes.nodes import product_of
from eelgrid_controller.kubernetes.right_sizing import Known
from eelgrid_controller.kubernetes.views import KubeNode
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue import model_name
from eelgrid_protos.messages import Inventory

__all__ = ["between", "known_of", "site_of"]

_BETWEEN_MOST = 16


def known_of(points: Iterable[Point]) -> tuple[Known, ...]:
    """What these points say of a job; without watts one says only that it ran."""
    found = []
    for point in points:
        how = point.configuration
        if how.power_limit_w is not None or how.clock_mhz is not None or how.processes != 1:
            continue
        power_w, speed_hz = point.power_w or 0.0, point.throughput_hz
        found.append(Known(how.gpu_model, how.mig_profile, how.gpus, speed_hz, speed_hz, power_w, power_w))
    return tuple(found)


def between(known: Iterable[Known], gpu_model: str) -> tuple[int, ...]:
    """Numbers of GPUs that were not measured on a model, after the largest that was; empty where there are none.

    Only such as lie between two that were: below the least nobody knows whether it fits into the memory.
    """
    measured = {
        one.gpus for one in known if one.gpu_model == gpu_model and not one.mig_profile and one.power_low_w > 0.0
    }
    if len(measured) < 2:
        return ()
    least, most = min(measured), max(measured)
    missing = [gpus for gpus in range(least + 1, most) if gpus not in measured]
    return (most, *missing[:_BETWEEN_MOST]) if missing else ()


def site_of(node: KubeNode, inventory: Inventory | None) -> Site:
    """A node as a place for jobs; `inventory` is what the core knows of it."""
    models = {gpu.model for gpu in inventory.gpus} if inventory is not None else set()
    count = len(inventory.gpus) if inventory is not None else node.allocatable.count(names.RESOURCE_GPU)
    if not models:
        product, label = product_of(node), node.labels.get(names.NODE_GPU_PRODUCT, "")
        models = {product.model if product else model_name(names.plain_product(label))} if label else set()
        count = min(count, node.allocatable.count(names.RESOURCE_GPU))
    return Site(node, models.pop() if len(models) == 1 else "", count)
