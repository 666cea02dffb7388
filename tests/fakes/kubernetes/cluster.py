"""The fake as a whole: a server on loopback, its knobs, and clients of it.

async with FakeCluster() as fake:
    cluster = fake.client()
    await cluster.create(PODS, pod("a"))
"""

import contextlib

from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient, RequestLimits
from eelgrid_controller.engines.kubernetes.api.kubeconfig import ClusterAccess as ClientAccess
from tests.fakes.kubernetes import kinds, server
from tests.fakes.kubernetes.access import ALL, Access
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.knobs import Knobs
from tests.fakes.kubernetes.metadata import Stamps, wall_clock


class FakeCluster:
    """An API server in this process; a context."""

    def __init__(self, *, minor=36, seed=0, now=wall_clock, with_pod_groups=False):
        self.knobs = Knobs()
        self.access = Access()
        self.access.grant("admin", ALL, user="admin")
        self.api = Api(Stamps(seed, now), self.access, minor)
        if with_pod_groups:
            self.api.catalogue.serve(kinds.OPTIONAL["podgroups"])
        self.server = server.Server(self.api, self.knobs)
        self.port = 0
        self._up = None
        self._clients = []
        self._parts = []

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *reason):
        for part in self._parts:
            await part.stop()
        for client in self._clients:
            await client.close()
        await self.stop()

    @property
    def store(self):
        return self.api.store

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        """Listen; on the same port as before, if it did."""
        self._up = contextlib.AsyncExitStack()
        self.port = await self._up.enter_async_context(server.listening(self.server, self.port))

    async def stop(self):
        """Cut all connections and listen no more; what is stored stays."""
        if self._up is not None:
            up, self._up = self._up, None
            await up.aclose()

    async def restart(self, *, is_log_lost=True):
        """Stop and start: the log of changes is in the memory of the real server, and lost with it."""
        await self.stop()
        if is_log_lost:
            self.store.compact()
        await self.start()

    def drop_watches(self):
        """Cut the connection of every watch."""
        for transport in list(self.server.watches):
            transport.abort()
        self.server.watches.clear()

    def client(self, token="admin", *, bounds=None, agent="eelgrid-test"):
        """The real adapter, speaking with this fake; closed with it."""
        made = HttpClusterClient(self.client_access(token), bounds=bounds or RequestLimits(), agent=agent)
        self._clients.append(made)
        return made

    def client_access(self, token="admin"):
        return ClientAccess(server=self.url, token=token)

    async def add(self, part):
        """Start an opt-in part (scheduler, controllers, kubelets); it is stopped with the fake."""
        self._parts.append(part)
        await part.start()
        return part
