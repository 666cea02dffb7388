"""A kubelet's PodResources service: a real gRPC server on a UNIX socket, with its answers and moods set by hand.

Owns the socket and what is answered. Knows nothing of the agent; its calls are
those of the real service, found by their paths.
"""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from eelgrid_protos.wire import pod_resources_pb2 as wire

SERVICE = "v1.PodResourcesLister"


class FakeKubelet:
    """What the next calls get; `connections` holds the peers that ever called."""

    def __init__(self):
        self.list_answer = wire.ListPodResourcesResponse()
        self.refusal = None
        self.raw = None
        self.calls = 0
        self.connections = set()
        self._called = asyncio.Condition()

    async def called(self, calls):
        """Waits until so many calls have come in all; the client has done with all of them but the last."""
        async with self._called:
            await self._called.wait_for(lambda: self.calls >= calls)

    def hold(self, namespace, pod, container, resource, *device_ids):
        """Gives devices of a device plugin to a container."""
        held = self._container(namespace, pod, container)
        held.devices.add(resource_name=resource, device_ids=device_ids)

    def claim(self, namespace, pod, container, driver, device):
        """Gives a claimed device to a container."""
        held = self._container(namespace, pod, container)
        claim = held.dynamic_resources.add(claim_name="gpu", claim_namespace=namespace)
        claim.claim_resources.add(driver_name=driver, pool_name="node-1", device_name=device)

    def _container(self, namespace, pod, container):
        for found in self.list_answer.pod_resources:
            if (found.namespace, found.name) == (namespace, pod):
                return found.containers.add(name=container)
        return self.list_answer.pod_resources.add(name=pod, namespace=namespace).containers.add(name=container)

    async def _answer(self, message, context):
        async with self._called:
            self.calls += 1
            self._called.notify_all()
        self.connections.add(context.peer())
        if self.refusal is not None:
            await context.abort(self.refusal, "rejected by rate limit")
        return message.SerializeToString() if self.raw is None else self.raw

    @asynccontextmanager
    async def serving(self, socket):
        """Answers on this socket until the block ends."""

        async def listing(request, context):
            wire.ListPodResourcesRequest.FromString(request)
            return await self._answer(self.list_answer, context)

        server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        handlers = {
            "List": grpc.unary_unary_rpc_method_handler(listing),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        assert server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)
