"""NodeService: asking this agent's nodes directly, without the controller.

Owns the answers to GetInventory, GetSamples, GetNodePlan and GetNodeEnergy, and
which node a request means. Must not change a node.
"""

from collections.abc import Mapping

from eelgrid_agent.attribution.answer import energy_answer
from eelgrid_agent.node import Clock, Node
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.messages import (
    EnergyStatus,
    GetInventoryRequest,
    GetInventoryResponse,
    GetNodeEnergyRequest,
    GetNodeEnergyResponse,
    GetNodePlanRequest,
    GetNodePlanResponse,
    GetSamplesRequest,
    GetSamplesResponse,
)  # fmt: skip

__all__ = ["NodeApi"]

_NAMES_SHOWN = 3


class NodeApi:
    """Answers about the nodes of this process."""

    def __init__(self, nodes: Mapping[str, Node], clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock

    async def get_inventory(self, request: GetInventoryRequest, context: object) -> GetInventoryResponse:
        """The node as it is."""
        del context
        return GetInventoryResponse(inventory=self._node(request.node_name).inventory)

    async def get_samples(self, request: GetSamplesRequest, context: object) -> GetSamplesResponse:
        """The newest tick."""
        del context
        node = self._node(request.node_name)
        samples = node.newest()
        if samples is None:
            return GetSamplesResponse()
        age_s = max(0.0, (self._clock.monotonic_ns() - node.last_tick_ns) / 1e9)
        return GetSamplesResponse(samples=samples, age_s=age_s)

    async def get_node_plan(self, request: GetNodePlanRequest, context: object) -> GetNodePlanResponse:
        """The plan in force and what became of it."""
        del context
        guard = self._node(request.node_name).guard
        left_s = guard.lease_left_s(self._clock.monotonic_ns())
        return GetNodePlanResponse(plan=guard.plan, applied=guard.applied, lease_left_s=left_s)

    async def get_node_energy(self, request: GetNodeEnergyRequest, context: object) -> GetNodeEnergyResponse:
        """Whose the joules are, up to the last look."""
        del context
        energy = self._node(request.node_name).energy
        if energy is None:
            return GetNodeEnergyResponse(status=EnergyStatus.NOT_KEPT)
        report = energy.report()
        if report is None:
            return GetNodeEnergyResponse(status=EnergyStatus.NOT_YET)
        return energy_answer(report, now_ns=self._clock.monotonic_ns())

    def _node(self, name: str) -> Node:
        if name:
            node = self._nodes.get(name)
            if node is None:
                raise NotFound(f"this agent has no node {name}; it has {self._some()}")
            return node
        if len(self._nodes) != 1:
            problem = f"is empty and this agent has {len(self._nodes)} nodes"
            violation = Violation("node_name", problem, f"name one of them: {self._some()}")
            raise InvalidArgument("which node is meant is not clear", (violation,))
        return next(iter(self._nodes.values()))

    def _some(self) -> str:
        names = list(self._nodes)[:_NAMES_SHOWN]
        return ", ".join(names) + (", ..." if len(self._nodes) > len(names) else "")
