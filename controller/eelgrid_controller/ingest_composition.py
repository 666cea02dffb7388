"""Composition of an ingest process: its server for agents, its link to the controller that leads, metrics and probes.

Must not contain behaviour of its own, nor import the core: it decides nothing.
"""

import asyncio
import contextlib
import logging
from typing import Any

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.config import IngestConfig
from eelgrid_controller.server.grpc.authorization import Authorizer
from eelgrid_controller.server.http.metrics_server import ControllerMetrics, ControllerMetricsServer
from eelgrid_controller.server.ingest.relay import IngestRelay
from eelgrid_protos.connection_limits import PeerGuard
from eelgrid_protos.probes import Heartbeat, ProbeServer
from eelgrid_protos.rpc import AGENT_SERVICE, admit_everybody, build_encoded_handler
from eelgrid_protos.transport import (
    TlsFiles,
    listen_on_address,
    may_connect,
    open_channel,
    server_options,
    standard_services,
)


class IngestProcess:
    """Runs one ingest process: start it, wait for it, stop it."""

    def __init__(
        self, config: IngestConfig, *, tls: TlsFiles | None, insecure: bool, clock: Clock, log: logging.Logger
    ) -> None:
        self.config = config
        self._tls = tls
        self._insecure = insecure
        self._clock = clock
        self._log = log
        self.metrics = ControllerMetrics()
        self._authorizer = Authorizer(config.roles, clock=clock, log=log.getChild("roles"))
        self._stack = contextlib.AsyncExitStack()
        self.relay = IngestRelay(
            config.controllers,
            self._open_channel,
            may_follow=lambda address: may_connect(address, tls=tls, insecure=insecure),
            log=log.getChild("link"),
        )

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        # The files are read anew for each connection.
        return open_channel(address, tls=self._tls, insecure=self._insecure, is_choice=len(self.config.controllers) > 1)

    async def start(self) -> str:
        """Starts serving; returns the line that says where. Raises ControllerError or ListenError."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> str:
        server = grpc.aio.server(options=server_options())
        guard = PeerGuard(log=self._log.getChild("guard"), now_s=lambda: self._clock.now_ns() / 1e9)
        port = await listen_on_address(
            server, self.config.listen, tls=self._tls, insecure=self._insecure, log=self._log, guard=guard
        )
        self._stack.callback(asyncio.create_task(guard.run()).cancel)
        self._answer_probes()
        metrics_port = await self._open_metrics()
        admit = admit_everybody if self._tls is None else self._authorizer.authorize_call
        front = guard.wrap_handlers(build_encoded_handler(AGENT_SERVICE, self.relay, admit=admit))
        health = await standard_services(front, (AGENT_SERVICE,))
        server.add_generic_rpc_handlers((front,))
        self._stack.callback(asyncio.create_task(self.relay.run()).cancel)
        self._stack.callback(asyncio.create_task(self._tell_health(health)).cancel)
        await server.start()

        async def close() -> None:
            self.relay.close()
            await server.stop(self.config.stop_s)

        self._stack.push_async_callback(close)
        listen, metrics = (
            f"{address.rpartition(':')[0]}:{found}"
            for address, found in ((self.config.listen, port), (self.config.metrics, metrics_port))
        )
        line = f"serving listen={listen} metrics={metrics} controllers={','.join(self.config.controllers)}"
        self._log.info("event=%s", line)
        return line

    async def _tell_health(self, health: Any) -> None:
        """Says by grpc.health whether agents can be taken, for whoever balances them over ingest processes."""
        told: bool | None = None
        while True:
            if told is not self.relay.is_linked:
                told = self.relay.is_linked
                await health.set_serving(told)
            await asyncio.sleep(0.5)

    def _answer_probes(self) -> None:
        if not self.config.probes:
            return
        beat = Heartbeat(self._clock.monotonic_s)
        self._stack.callback(asyncio.create_task(beat.run()).cancel)
        server = ProbeServer(
            fault=beat.fault,
            unready=lambda: "" if self.relay.is_linked else "no controller that leads",
            log=self._log.getChild("probes"),
        )
        try:
            server.start(self.config.probes)
        except (OSError, ValueError) as error:
            raise ControllerConfigError(f"--probes {self.config.probes}: {error}", "write another HOST:PORT") from error
        self._stack.callback(server.close)

    async def _open_metrics(self) -> int:
        self.metrics.add(self.relay.families)
        self.metrics.add(self._authorizer.families)
        door = ControllerMetricsServer(
            self.metrics,
            is_ready=lambda: self.relay.is_linked,
            insecure=self._insecure,
            log=self._log.getChild("metrics"),
            host_names=self.config.metrics_hosts,
        )
        port = await door.start(self.config.metrics)
        self._stack.push_async_callback(door.stop)
        self._stack.callback(asyncio.create_task(self.metrics.measure_loop_lag()).cancel)
        return port

    async def stop(self) -> None:
        """Ends agents' streams, so that they connect elsewhere."""
        await self._stack.aclose()
