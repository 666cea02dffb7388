"""The calls that cordon and drain nodes of the operators' service in memory, on the nodes that a test put there."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_protos import faults, messages

__all__ = ["FakeCordons"]


@dataclass
class FakeCordons:
    """Puts cordons on nodes as they are asked for; what becomes of the work there is what a test says."""

    nodes: Callable[[], list[messages.Node]]
    drained: tuple[messages.DrainedWorkload, ...] = ()
    asked: list[Any] = field(default_factory=list)

    def _node(self, name: str) -> messages.Node:
        found = next((one for one in self.nodes() if one.inventory.node_name == name), None)
        if found is None:
            raise faults.NotFound(f"no node is called {name!r}; list nodes to see the names")
        return found

    def _set(self, request: Any, **changes: Any) -> tuple[messages.Node, bool]:
        self.asked.append(request)
        node, nodes = self._node(request.node_name), self.nodes()
        by_index = {str(gpu.index): gpu.uuid for gpu in node.inventory.gpus}
        uuids = tuple(by_index.get(gpu, gpu) for gpu in request.gpus) or ("",)
        kept = tuple(one for one in node.cordons if one.gpu_uuid not in uuids)
        new = tuple(messages.CordonStatus(gpu_uuid=uuid, **changes) for uuid in uuids) if changes else ()
        nodes[nodes.index(node)] = after = replace(node, cordons=(*new, *kept))
        return after, len(kept) < len(node.cordons)

    async def cordon_node(self, request: messages.CordonNodeRequest, context: Any) -> messages.CordonNodeResponse:
        """A cordon without a drain."""
        node, was = self._set(
            request, reason=request.reason, user="ann", workloads=self._node(request.node_name).workloads
        )
        return messages.CordonNodeResponse(node=node, was_cordoned=was)

    async def uncordon_node(self, request: messages.UncordonNodeRequest, context: Any) -> messages.UncordonNodeResponse:
        """Lifts what is named."""
        node, was = self._set(request)
        return messages.UncordonNodeResponse(node=node, was_cordoned=was)

    async def drain_node(self, request: messages.DrainNodeRequest, context: Any) -> messages.DrainNodeResponse:
        """A drain that is over at once, except of a dry run."""
        if request.dry_run:
            self.asked.append(request)
            return messages.DrainNodeResponse(node=self._node(request.node_name), workloads=self.drained)
        node, _ = self._set(request, reason=request.reason, draining=True)
        return messages.DrainNodeResponse(node=node, workloads=self.drained)
