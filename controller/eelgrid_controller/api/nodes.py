"""The operators' call about nodes that are gone for good. Owns the call; whoever speaks with agents knows who is here."""

from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.api.calls import CallOf, no_call
from eelgrid_controller.core import Core
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.removal import Removal
from eelgrid_protos.messages import RemoveNodeRequest, RemoveNodeResponse

__all__ = ["NodeCalls", "SpeaksWithAgents"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# A node holds no more, see ledger.ASSIGNMENTS_MOST.
_NAMED_MOST = 4096


class SpeaksWithAgents(Protocol):
    """Who has the agents' streams."""

    def is_connected(self, node_name: str) -> bool:
        """Whether the node's agent is here."""


class NodeCalls:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, agents: SpeaksWithAgents, call_of: CallOf = no_call) -> None:
        self._loop = loop
        self._agents = agents
        self._call_of = call_of

    async def remove_node(self, request: RemoveNodeRequest, context: Context) -> RemoveNodeResponse:
        """Forget a node; raises NotFound, and FailedPrecondition where it is in use and that is not forced."""
        name, force = request.node_name, request.force
        connected = self._agents.is_connected(name)
        if request.dry_run:

            def would(core: Core) -> Removal:
                return core.would_remove(
                    name, force=force, is_connected=connected, now_ns=self._loop.clock.now_ns()
                )  # fmt: skip

            removal = await self._loop.read(would)
        else:
            removal = await self._loop.remove_node(
                name, force=force, is_connected=self._agents.is_connected,
                call=self._call_of("RemoveNode", request, context),
            )  # fmt: skip
        return RemoveNodeResponse(
            ended=removal.ended[:_NAMED_MOST], shrunk=removal.shrunk[:_NAMED_MOST], connected=connected
        )
