"""NodeService: gRPC queries to this agent's nodes without the controller, and their authorization.

Answers GetInventory, GetSamples, GetNodePlan and GetNodeEnergy, and changes nothing. Under mutual TLS the callers
allowed are those that may view the controller, by the same roles, and an agent's certificate that names a node of this
process, which is what `eelgrid-agent energy` has at hand.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_agent.energy.report import build_energy_response
from eelgrid_agent.node.node import AgentClock, AgentNode
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.log_lines import RateLimitedLog
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
)
from eelgrid_protos.roles import Caller, CallerReader, Role, RoleRefused, RoleRules, check_role
from eelgrid_protos.rpc import NODE_SERVICE

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# The least role for each call by its path, as the controller has them; a call without a row needs the greatest.
METHOD_ROLES: Mapping[str, Role] = {
    f"/{NODE_SERVICE.name}/{call}": Role.VIEWER
    for call in ("GetInventory", "GetSamples", "GetNodePlan", "GetNodeEnergy")
}
_NAMES_SHOWN = 3
_REFUSALS_EVERY_S = 60.0


class NodeAuthorizer:
    """Authorizes callers whose connections use mutual TLS, by the roles of their certificates."""

    def __init__(
        self,
        rules: RoleRules,
        node_names: Collection[str],
        *,
        now_s: Callable[[], float],
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        self.refused_total = 0
        self._rules = rules
        self._node_names = frozenset(node_names)
        self._now_s = now_s
        self._callers = CallerReader(rules)
        self._log = RateLimitedLog(log, monotonic_s)

    def admit(self, path: str, context: Context) -> None:
        """Before each call; raises RoleRefused."""
        caller, method = self._callers.identify_caller(context), path.rpartition("/")[2]
        needs = METHOD_ROLES.get(path, Role.ADMIN)
        if needs is Role.VIEWER and self._speaks_here(caller):
            needs = Role.AGENT
        try:
            check_role(caller, method, needs, self._rules, now_s=self._now_s())
        except RoleRefused as refusal:
            self.refused_total += 1
            self._log.warn(
                (caller.greatest_role, refusal.needs),
                _REFUSALS_EVERY_S,
                "call=%s certificate=%r roles=%s needs=%s action=refused",
                method,
                caller.subject,
                caller.greatest_role,
                refusal.needs,
            )
            raise

    def _speaks_here(self, caller: Caller) -> bool:
        """Whether it is an agent's certificate for one of our nodes, or for any."""
        return caller.has_role(Role.AGENT) and (not caller.nodes or not caller.nodes.isdisjoint(self._node_names))


class NodeServicer:
    """Answers about the nodes of this process."""

    def __init__(self, nodes: Mapping[str, AgentNode], clock: AgentClock) -> None:
        self._nodes = nodes
        self._clock = clock

    async def get_inventory(self, request: GetInventoryRequest, context: object) -> GetInventoryResponse:
        """Returns the current inventory."""
        del context
        return GetInventoryResponse(inventory=self._node(request.node_name).inventory)

    async def get_samples(self, request: GetSamplesRequest, context: object) -> GetSamplesResponse:
        """The newest tick."""
        del context
        node = self._node(request.node_name)
        samples = node.newest_batch()
        if samples is None:
            return GetSamplesResponse()
        age_s = max(0.0, (self._clock.monotonic_ns() - node.last_tick_ns) / 1e9)
        return GetSamplesResponse(samples=samples, age_s=age_s)

    async def get_node_plan(self, request: GetNodePlanRequest, context: object) -> GetNodePlanResponse:
        """The plan in force and what became of it."""
        del context
        guard = self._node(request.node_name).guard
        left_s = guard.lease_left_s(self._clock.monotonic_ns())
        plan = None if guard.plan is None else guard.plan.mask_environments()
        return GetNodePlanResponse(plan=plan, applied=guard.applied, lease_left_s=left_s)

    async def get_node_energy(self, request: GetNodeEnergyRequest, context: object) -> GetNodeEnergyResponse:
        """Returns energy by owner, up to the last sample."""
        del context
        energy = self._node(request.node_name).energy
        if energy is None:
            return GetNodeEnergyResponse(status=EnergyStatus.NOT_KEPT)
        report = energy.build_report()
        if report is None:
            return GetNodeEnergyResponse(status=EnergyStatus.NOT_YET)
        return build_energy_response(report, now_ns=self._clock.monotonic_ns())

    def _node(self, name: str) -> AgentNode:
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
