"""The inventory of a node without an agent, from allocatable amounts and NVIDIA's node labels.

Where an agent runs, its inventory takes precedence. Time slices, MPS clients and MIG slices of the `single` strategy
are not GPUs. A device that is no longer allocatable counts as used externally.

Sources: gpu-feature-discovery's labels; NVIDIA/mig-parted; well-known labels of Kubernetes, GKE, EKS and AKS.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.state.engine_reports import CORDONED_BY_ENGINE, ExternalUsage
from eelgrid_protos import catalogue
from eelgrid_protos.catalogue.products import Product, model_name
from eelgrid_protos.messages import TOPOLOGY_PARTS_MOST, Gpu, Inventory
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import MIB

_MIG_BUSY = ("pending", "rebooting")
_IDENTIFIER_LONGEST = 128


def inventory_of(node: KubeNode, *, generation: int = 1) -> Inventory | None:
    """Derive the inventory of a node without an agent; None if its GPUs are not whole devices. GPUs get names, not UUIDs.

    A node without GPUs has an inventory with none. CPU and memory are the allocatable ones.
    """
    if _not_whole(node):
        return None
    product, label = product_of(node), node.labels.get(well_known.NODE_GPU_PRODUCT, "")
    memory_bytes = _memory_bytes(node)
    gpus = tuple(
        Gpu(
            uuid=_device_name(node.name, index),
            index=index,
            product=product.nvml_names[0] if product else label,
            model=product.model if product else model_name(well_known.plain_product(label)),
            catalogue_key=product.key if product else "",
            memory_bytes=memory_bytes or (product.memory_bytes if product else 0),
            power_limit_default_w=product.power_default_w if product else None,
            power_limit_min_w=product.power_min_w if product else None,
            power_limit_max_w=product.power_max_w if product else None,
            # It may be able to, but nobody is there who could cut it.
            mig_capable=False,
        )
        for index in range(min(_devices(node), GPUS_PER_NODE_MOST))
    )
    return Inventory(
        node_name=node.name,
        cpu_milli=node.allocatable.cpu_milli,
        memory_bytes=node.allocatable.memory_bytes,
        generation=generation,
        boot_id=node.boot_id,
        driver_version=_driver(node),
        pool=pool_of(node),
        labels={key: node.labels[key] for key in well_known.NODE_SHOWN if key in node.labels},
        gpus=gpus,
        topology=tuple(node.labels[key] for key in well_known.NODE_TOPOLOGY if node.labels.get(key))[
            :TOPOLOGY_PARTS_MOST
        ],
    )


def matches_inventory(node: KubeNode, inventory: Inventory) -> bool:
    """Whether an agent's inventory of some time ago is still that of a node, as far as its kubelet can say.

    The same boot, where both know it, and as many whole GPUs as the kubelet has to give.
    """
    is_same_boot = not node.boot_id or not inventory.boot_id or node.boot_id == inventory.boot_id
    whole = sum(not (gpu.mig_enabled or gpu.lost) for gpu in inventory.gpus)
    return is_same_boot and whole == node.allocatable.count(well_known.RESOURCE_GPU)


def external_usage_on(node: KubeNode, pods: Iterable[Pod]) -> ExternalUsage:
    """Sum what these pods on a node hold, which Eelgrid did not place.

    A pod that has ended holds nothing; one that is being deleted holds all until it is gone.
    """
    held = [pod for pod in pods if pod.node_name == node.name and not pod.is_terminal]
    gpus = sum(pod.requested.count(well_known.RESOURCE_GPU) for pod in held)
    absent = max(0, _devices(node) - node.allocatable.count(well_known.RESOURCE_GPU))
    reason = closed_reason(node)
    if not reason and node.pods_most is not None and len(held) >= node.pods_most:
        reason = f"{len(held)} pods are there and {node.pods_most} may be"
    return ExternalUsage(
        cpu_milli=sum(pod.requested.cpu_milli for pod in held),
        memory_bytes=sum(pod.requested.memory_bytes for pod in held),
        gpu_count=gpus + absent,
        closed=reason,
    )


def closed_reason(node: KubeNode) -> str:
    """Why nothing new may come, in words for people; empty where it may."""
    if node.is_going:
        return "the node is being deleted"
    if node.is_unschedulable:
        return CORDONED_BY_ENGINE
    if not node.is_ready:
        return f"the node is not ready: {node.unready}"
    state = node.labels.get(well_known.NODE_MIG_STATE, "")
    if state in _MIG_BUSY:
        return f"mig-manager is at work ({well_known.NODE_MIG_STATE}={state})"
    return _not_whole(node)


def pool_of(node: KubeNode) -> str:
    """The pool of a node: our label, or else that of the cloud; empty without any."""
    return next((node.labels[key] for key in well_known.NODE_POOLS if node.labels.get(key)), "")


def product_of(node: KubeNode) -> Product | None:
    """The catalogue's product by GFD's label and memory, or None if it knows none."""
    label, memory_bytes = node.labels.get(well_known.NODE_GPU_PRODUCT, ""), _memory_bytes(node)
    for name in _names_by_label().get(well_known.plain_product(label), ()):
        found = catalogue.load_catalogue().find_product(name, memory_bytes or None)
        if found is not None:
            return found
    return None


def _devices(node: KubeNode) -> int:
    return max(node.capacity.count(well_known.RESOURCE_GPU), node.allocatable.count(well_known.RESOURCE_GPU))


def _not_whole(node: KubeNode) -> str:
    """Why what is advertised as a GPU is none; empty where it is one, or where there is none."""
    if not _devices(node):
        return ""
    sharing = node.labels.get(well_known.NODE_GPU_SHARING, "none")
    if sharing not in ("none", ""):
        return f"its GPUs are shared ({well_known.NODE_GPU_SHARING}={sharing}): a ticket to a GPU is not a GPU"
    product = node.labels.get(well_known.NODE_GPU_PRODUCT, "")
    if "-MIG-" in product:
        return f"its GPUs are cut by MIG's single strategy ({well_known.NODE_GPU_PRODUCT}={product})"
    return ""


def _memory_bytes(node: KubeNode) -> int:
    text = node.labels.get(well_known.NODE_GPU_MEMORY, "")
    return int(text) * MIB if text.isascii() and text.isdigit() else 0


def _driver(node: KubeNode) -> str:
    full = node.labels.get(well_known.NODE_DRIVER_FULL)
    return full or ".".join(node.labels[key] for key in well_known.NODE_DRIVER_PARTS if node.labels.get(key))


def _device_name(node_name: str, index: int) -> str:
    name = f"{node_name}/gpu-{index}"
    if len(name) <= _IDENTIFIER_LONGEST:
        return name
    return f"{sha256(node_name.encode()).hexdigest()[:32]}/gpu-{index}"


@cache
def _names_by_label() -> Mapping[str, tuple[str, ...]]:
    """The names that NVML prints, by what a label makes of them."""
    found: dict[str, tuple[str, ...]] = {}
    for product in catalogue.load_catalogue().products.values():
        for name in product.nvml_names:
            label = well_known.plain_product(name.replace(" ", "-"))
            found[label] = (*found.get(label, ()), name)
    return found
