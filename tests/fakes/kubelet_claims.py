"""A kubelet's plugin manager and DRA manager: finds registration sockets in its folder, and has claims made ready.

Owns what registered and what was answered. Knows nothing of the agent; its calls are those of
the real service, found by their paths.
"""

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from eelgrid_protos.wire import dra_pb2 as wire
from eelgrid_protos.wire import plugin_registration_pb2 as registration

REGISTRATION = "/pluginregistration.Registration/"
DRA = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"


class ClaimManager:
    """One kubelet over a folder with plugins_registry."""

    def __init__(self, folder):
        self.folder = folder
        self.drivers = {}  # by name: the endpoint

    async def registered(self, driver):
        """Waits for the socket, asks who it is, and takes it."""
        async with asyncio.timeout(10):
            while driver not in self.drivers:
                for path in (self.folder / "plugins_registry").glob("*.sock"):
                    with suppress(grpc.aio.AioRpcError):
                        await self._take(path)
                await asyncio.sleep(0.01)

    async def refuse(self, path, error):
        told = registration.RegistrationStatus(plugin_registered=False, error=error)
        await self._call(path, REGISTRATION + "NotifyRegistrationStatus", told)

    async def prepare(self, driver, *claims):
        """By uid the (requests, pool, device, CDI ids) of each device, or the error."""
        data = await self._call(self.drivers[driver], DRA + "NodePrepareResources", _asked(claims))
        answer = wire.PrepareResponse.FromString(data)
        return {
            uid: one.error
            or [(list(d.request_names), d.pool_name, d.device_name, list(d.cdi_device_ids)) for d in one.devices]
            for uid, one in answer.claims.items()
        }

    async def unprepare(self, driver, *claims):
        data = await self._call(self.drivers[driver], DRA + "NodeUnprepareResources", _asked(claims))
        return {uid: one.error for uid, one in wire.UnprepareResponse.FromString(data).claims.items()}

    async def _take(self, path):
        info = registration.PluginInfo.FromString(await self._call(path, REGISTRATION + "GetInfo", None))
        assert (info.type, list(info.supported_versions)) == ("DRAPlugin", ["v1.DRAPlugin"])
        told = registration.RegistrationStatus(plugin_registered=True)
        await self._call(path, REGISTRATION + "NotifyRegistrationStatus", told)
        self.drivers[info.name] = info.endpoint

    async def _call(self, path, method, message):
        options = [("grpc.default_authority", "localhost")]
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
            data = b"" if message is None else message.SerializeToString()
            return await channel.unary_unary(method)(data, timeout=10)


def _asked(claims):
    request = wire.ClaimsRequest()
    for namespace, name, uid in claims:
        request.claims.add(namespace=namespace, name=name, uid=uid)
    return request
