"""A kubelet's device manager: takes registrations on a real socket, watches devices, and admits pods as the real one does.

Owns what is registered, seen and given. Knows nothing of the agent; its calls are those of
the real service, found by their paths.
"""

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from eelgrid_protos.wire import device_plugin_pb2 as wire

PLUGIN = "/v1beta1.DevicePlugin/"


class Refused(Exception):
    """A pod was not admitted: UnexpectedAdmissionError of the real kubelet."""


class DeviceManager:
    """One life after another on one folder; `begin` clears the sockets of plugins as the real one does."""

    def __init__(self, folder):
        self.folder = folder
        self.registered = []
        self.devices = {}  # by resource: {id: health}
        self.held = {}  # by pod: (resource, ids)
        self.refuse = False
        self.refusals = 0
        self._plugins = {}
        self._server = None
        self._watches = []
        self._changed = asyncio.Condition()

    async def begin(self):
        for path in self.folder.glob("*.sock"):
            path.unlink()
        self._server = grpc.aio.server()
        handlers = {"Register": grpc.unary_unary_rpc_method_handler(self._register)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.Registration", handlers),))
        self._server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        await self._server.start()

    async def end(self):
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches = []
        await self._server.stop(None)
        with suppress(FileNotFoundError):
            (self.folder / "kubelet.sock").unlink()
        self.devices = {}

    async def until(self, is_so):
        async with self._changed, asyncio.timeout(10):
            await self._changed.wait_for(is_so)

    async def admit(self, pod, resource, count):
        """Gives devices to a pod; the answer that its container is started with."""
        taken = {one for _, ids in self.held.values() for one in ids}
        free = [
            one for one, health in self.devices.get(resource, {}).items() if health == "Healthy" and one not in taken
        ]
        if len(free) < count:
            raise Refused(f"{resource}: {len(free)} free of {count}")
        asked = wire.PreferredAllocationRequest()
        asked.container_requests.add(available_device_ids=free, allocation_size=count)
        answer = wire.PreferredAllocationResponse.FromString(
            await self._call(resource, "GetPreferredAllocation", asked.SerializeToString())
        )
        preferred = [one for one in answer.container_responses[0].device_ids if one in free]
        ids = (preferred + [one for one in free if one not in preferred])[:count]
        request = wire.AllocateRequest()
        request.container_requests.add(device_ids=ids)
        try:
            given = await self._call(resource, "Allocate", request.SerializeToString())
        except grpc.aio.AioRpcError as error:
            raise Refused(error.details()) from None
        self.held[pod] = (resource, tuple(ids))
        return wire.AllocateResponse.FromString(given).container_responses[0]

    async def _call(self, resource, method, data):
        async with grpc.aio.insecure_channel(f"unix:{self._plugins[resource]}") as channel:
            return await channel.unary_unary(PLUGIN + method)(data, timeout=5)

    async def _register(self, request, context):
        if self.refuse:
            async with self._changed:
                self.refusals += 1
                self._changed.notify_all()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not ready")
        told = wire.RegisterRequest.FromString(request)
        assert told.version == "v1beta1"
        assert told.options.get_preferred_allocation_available
        self._plugins[told.resource_name] = self.folder / told.endpoint
        self._watches.append(asyncio.create_task(self._watch(told.resource_name)))
        async with self._changed:
            self.registered.append(told.resource_name)
            self._changed.notify_all()
        return b""

    async def _watch(self, resource):
        with suppress(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(f"unix:{self._plugins[resource]}") as channel:
                async for data in channel.unary_stream(PLUGIN + "ListAndWatch")(b""):
                    found = wire.ListAndWatchResponse.FromString(data)
                    async with self._changed:
                        self.devices[resource] = {one.id: one.health for one in found.devices}
                        self._changed.notify_all()
        async with self._changed:
            # The real one keeps the capacity and takes all devices for unhealthy.
            self.devices[resource] = dict.fromkeys(self.devices.get(resource, {}), "Unhealthy")
            self._changed.notify_all()
