"""Node changes: what an event means for the nodes, in terms that people use: joined, returned, changed, a GPU lost.

An agent reports every change of its inventory, a lost GPU among them, and the journal keeps each report as NodeJoined.
`NodeChanges` follows the events and says of each only what is new; so a loss that comes as an event and again with the
inventory is one change. Owns also which replicas are on lost GPUs. Must not know who shows or logs it.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from eelgrid_controller.state.cordons import describe_cause
from eelgrid_controller.state.events import (
    Event,
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodesRemoved,
    NodeUncordoned,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import Gpu, Inventory, NodeState, Workload


class NodeChangeKind(StrEnum):
    """What happened to a node or to a GPU of it, as lists show it."""

    NODE_JOINED = "node joined"
    NODE_RETURNED = "node returned"
    NODE_CHANGED = "node changed"
    NODE_LOST = "node lost"
    NODE_REMOVED = "node removed"
    GPU_LOST = "GPU lost"
    GPU_RETURNED = "GPU returned"
    NODE_CORDONED = "node cordoned"
    NODE_DRAINING = "node draining"
    NODE_UNCORDONED = "node uncordoned"
    GPU_CORDONED = "GPU cordoned"
    GPU_DRAINING = "GPU draining"
    GPU_UNCORDONED = "GPU uncordoned"


class NodeChange(NamedTuple):
    """A change of a node, or of one GPU of it."""

    kind: NodeChangeKind
    node_name: str
    gpu_uuid: str = ""
    gpu_index: int | None = None
    # Who changed it and why, where an operator did: ` by ann: fan broken`.
    cause: str = ""

    @property
    def subject(self) -> str:
        """What changed, by name, and who changed it: `n2`, `GPU 1 of n2`, or `n2 by ann: fan broken`."""
        if not self.gpu_uuid:
            return f"{self.node_name}{self.cause}"
        device = self.gpu_uuid if self.gpu_index is None else f"GPU {self.gpu_index}"
        return f"{device} of {self.node_name}{self.cause}"


# By whether the cordon begins a drain: of nodes, and of GPUs.
_CORDON_KINDS = {
    False: (NodeChangeKind.NODE_CORDONED, NodeChangeKind.GPU_CORDONED),
    True: (NodeChangeKind.NODE_DRAINING, NodeChangeKind.GPU_DRAINING),
}


@dataclass(slots=True)
class _KnownNode:
    inventory: Inventory
    is_lost: bool
    lost_gpus: frozenset[str]


class NodeChanges:
    """The nodes as far as changes of them are told."""

    def __init__(self) -> None:
        self._nodes: dict[str, _KnownNode] = {}

    def reset(self, nodes: Mapping[str, NodeRecord]) -> None:
        """Begins with the nodes as they are."""
        self._nodes = {
            name: _KnownNode(record.inventory, record.state is NodeState.LOST, frozenset(record.lost_gpus))
            for name, record in nodes.items()
        }

    def observe(self, event: Event) -> list[NodeChange]:
        """Returns what the event changed; nothing for one that is known already, or is of no node."""
        match event:
            case NodeJoined(inventory=inventory):
                return list(self._observe_joined(inventory))
            case GpuLost(node_name=name, gpu_uuid=uuid) if (known := self._nodes.get(name)) is not None:
                return list(self._observe_gpus(name, known, known.lost_gpus | {uuid}))
            case GpuReturned(node_name=name, gpu_uuid=uuid) if (known := self._nodes.get(name)) is not None:
                return list(self._observe_gpus(name, known, known.lost_gpus - {uuid}))
            case NodeLost(node_name=name):
                if (known := self._nodes.get(name)) is not None:
                    known.is_lost = True
                return [NodeChange(NodeChangeKind.NODE_LOST, name)]
            case NodesRemoved(node_names=names):
                for name in names:
                    self._nodes.pop(name, None)
                return [NodeChange(NodeChangeKind.NODE_REMOVED, name) for name in names]
            case NodeCordoned() | NodeUncordoned():
                return list(self._observe_cordon(event))
        return []

    def _observe_cordon(self, event: NodeCordoned | NodeUncordoned) -> Iterator[NodeChange]:
        if isinstance(event, NodeUncordoned):
            kinds, reason = (NodeChangeKind.NODE_UNCORDONED, NodeChangeKind.GPU_UNCORDONED), ""
        else:
            kinds, reason = _CORDON_KINDS[event.drain is not None], event.reason
        cause = describe_cause(event.user, reason)
        known = self._nodes.get(event.node_name)
        indexes = {} if known is None else {gpu.uuid: gpu.index for gpu in known.inventory.gpus}
        if not event.gpu_uuids:
            yield NodeChange(kinds[0], event.node_name, cause=cause)
        for uuid in sorted(event.gpu_uuids, key=lambda uuid: (indexes.get(uuid, -1), uuid)):
            yield NodeChange(kinds[1], event.node_name, uuid, indexes.get(uuid), cause)

    def _observe_joined(self, inventory: Inventory) -> Iterator[NodeChange]:
        name, lost = inventory.node_name, frozenset(gpu.uuid for gpu in inventory.gpus if gpu.lost)
        known = self._nodes.get(name)
        if known is None:
            known = self._nodes[name] = _KnownNode(inventory, is_lost=False, lost_gpus=frozenset())
            yield NodeChange(NodeChangeKind.NODE_JOINED, name)
        elif known.is_lost:
            yield NodeChange(NodeChangeKind.NODE_RETURNED, name)
        elif not _is_same_hardware(known.inventory, inventory):
            yield NodeChange(NodeChangeKind.NODE_CHANGED, name)
        known.inventory, known.is_lost = inventory, False
        yield from self._observe_gpus(name, known, lost)

    def _observe_gpus(self, name: str, known: _KnownNode, lost: frozenset[str]) -> Iterator[NodeChange]:
        indexes = {gpu.uuid: gpu.index for gpu in known.inventory.gpus}
        before, known.lost_gpus = known.lost_gpus, lost
        for kind, uuids in (
            (NodeChangeKind.GPU_LOST, lost - before),
            # One that the inventory has no more did not return.
            (NodeChangeKind.GPU_RETURNED, (before - lost) & indexes.keys()),
        ):
            for uuid in sorted(uuids, key=lambda uuid: (indexes.get(uuid, -1), uuid)):
                yield NodeChange(kind, name, uuid, indexes.get(uuid))


def _is_same_hardware(one: Inventory, other: Inventory) -> bool:
    """Whether two inventories differ in nothing but what is told of by itself: lost and cordoned GPUs, the generation.

    A lost GPU does not say what it is linked to.
    """
    lost = {gpu.index for inventory in (one, other) for gpu in inventory.gpus if gpu.lost}
    return _without_health(one, lost) == _without_health(other, lost)


def _without_health(inventory: Inventory, lost: AbstractSet[int]) -> Inventory:
    gpus = tuple(replace(gpu, lost=False, cordon="") for gpu in inventory.gpus)
    links = tuple(link for link in inventory.links if lost.isdisjoint((link.one, link.other)))
    return replace(inventory, generation=0, gpus=gpus, links=links)


def count_lost_gpus(record: NodeRecord) -> int:
    """Returns how many GPUs of a node respond no more; 0 where the whole node is lost."""
    return 0 if record.state is NodeState.LOST else len(record.lost_gpus)


def mark_lost_gpu(record: NodeRecord, gpu: Gpu) -> Gpu:
    """Returns the device, lost or not as is known now: the inventory that says so comes after the event."""
    is_lost = gpu.uuid in record.lost_gpus
    return gpu if gpu.lost == is_lost else replace(gpu, lost=is_lost)


def mark_lost_gpus(record: NodeRecord) -> Inventory:
    """Returns the inventory of a node with its GPUs, lost or not as is known now."""
    inventory = record.inventory
    if all(gpu.lost == (gpu.uuid in record.lost_gpus) for gpu in inventory.gpus):
        return inventory
    return replace(inventory, gpus=tuple(mark_lost_gpu(record, gpu) for gpu in inventory.gpus))


def mark_lost_replicas(workload: Workload, nodes: Mapping[str, NodeRecord]) -> Workload:
    """Returns the workload with its replicas of which a GPU is lost now."""
    lost = tuple(
        at.replica
        for at in workload.placements
        if (record := nodes.get(at.node_name)) is not None and not record.lost_gpus.isdisjoint(at.gpu_uuids)
    )
    return replace(workload, lost_replicas=lost) if lost else workload
