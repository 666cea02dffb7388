"""Mode `gate` as one part of a controller: clients, elector and engine, started and stopped together.

Owns what is made and in which order it starts and stops. Decides nothing else.

The elector has a client of its own: a renewal must not wait behind a burst of patches. It
stops after the engine, and then sets the Lease free, so another may lead at once.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from eelgrid_controller.adapters.described import Family
from eelgrid_controller.adapters.device_reports import DeviceReports
from eelgrid_controller.adapters.kubernetes import claims_part
from eelgrid_controller.adapters.kubernetes.abilities import Foresees, Part, Surroundings, keep_running
from eelgrid_controller.adapters.kubernetes.asked import Commands
from eelgrid_controller.adapters.kubernetes.client import HttpCluster
from eelgrid_controller.adapters.kubernetes.counts import cluster_families, device_families
from eelgrid_controller.adapters.kubernetes.devices_part import DevicesPart
from eelgrid_controller.adapters.kubernetes.election import Timing
from eelgrid_controller.adapters.kubernetes.elector import Elector
from eelgrid_controller.adapters.kubernetes.engine import Engine, EngineSettings
from eelgrid_controller.adapters.kubernetes.jobs_part import JobsPart
from eelgrid_controller.adapters.kubernetes.kubeconfig import find_access
from eelgrid_controller.adapters.kubernetes.leading import LeaderLabel
from eelgrid_controller.adapters.kubernetes.moves_part import MovesPart
from eelgrid_controller.adapters.kubernetes.policies_part import PoliciesPart
from eelgrid_controller.adapters.kubernetes.services_part import ServicesPart
from eelgrid_controller.adapters.kubernetes.slices_part import SlicesPart
from eelgrid_controller.adapters.kubernetes.taints_part import TaintsPart
from eelgrid_controller.clock import Clock
from eelgrid_controller.config import KubernetesConfig
from eelgrid_controller.kubernetes.gate import GateSettings
from eelgrid_controller.kubernetes.power_status import Draw
from eelgrid_protos.messages import ListPromisesResponse

__all__ = ["Placing"]

_STOP_S = 3.0
# By the names that `--kubernetes-abilities` knows, each from its surroundings.
_ABILITIES: dict[str, Callable[[Surroundings], Part]] = {
    "claims": claims_part.make,
    "devices": DevicesPart,
    "jobs": JobsPart,
    "moves": MovesPart,
    "policies": PoliciesPart,
    "services": ServicesPart,
    "slices": SlicesPart,
    "taints": TaintsPart,
}


class Placing:
    """Places the pods of one cluster."""

    def __init__(
        self,
        config: KubernetesConfig,
        *,
        loop: Commands,
        has_agent: Callable[[str], bool],
        data: Path,
        draws: Callable[[], Mapping[str, Draw]],
        devices: DeviceReports,
        clock: Clock,
        log: logging.Logger,
        foresees: Foresees | None = None,
        awaits_agent: Callable[[str], bool] = lambda _: False,
        promises: Callable[[], ListPromisesResponse] = ListPromisesResponse,
    ) -> None:
        """Raises ConfigError where the cluster's access cannot be read."""
        access = find_access(os.environ, kubeconfig=config.kubeconfig, context=config.context)
        identity = config.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        share = config.lease_s / 15.0
        self._clients = HttpCluster(access), HttpCluster(access)
        self.elector = Elector(
            self._clients[0],
            namespace=config.namespace or access.namespace,
            name=config.lease_name,
            identity=identity,
            clock=clock,
            log=log.getChild("lease"),
            timing=Timing(lease_s=config.lease_s, renew_s=10.0 * share, retry_s=2.0 * share),
        )
        # Jitter needs no secret.
        rng = random.Random()  # noqa: S311
        self.engine = Engine(
            cluster=self._clients[1],
            loop=loop,
            elector=self.elector,
            has_agent=has_agent,
            awaits_agent=awaits_agent,
            settings=EngineSettings(
                identity=identity,
                gate=GateSettings(unbound_s=config.unbound_s, open_s=config.open_s, moves="moves" in config.abilities),
                leaves_claims="claims" in config.abilities,
            ),
            clock=clock,
            rng=rng,
            log=log,
        )
        surroundings = Surroundings(
            cluster=self._clients[1], loop=loop, elector=self.elector, engine=self.engine, has_agent=has_agent,
            devices=devices, identity=identity, namespace=config.namespace or access.namespace, data=data, draws=draws,
            clock=clock, rng=rng, log=log, foresees=foresees, promises=promises,
        )  # fmt: skip
        self._parts = {name: make(surroundings) for name, make in _ABILITIES.items() if name in config.abilities}
        self._log = log
        self._label: LeaderLabel | None = None
        pod, namespace = os.environ.get("POD_NAME", ""), os.environ.get("POD_NAMESPACE", "")
        if pod and namespace:
            self._label = LeaderLabel(self._clients[0], name=pod, namespace=namespace, log=log.getChild("lease"))
            self.elector.hear(self._label.turned)
        self._stack = contextlib.AsyncExitStack()
        log.info("server=%s lease=%s identity=%s", access.server, config.lease_name, identity)

    def families(self) -> Iterator[Family]:
        """What the metrics page tells of all this."""
        yield from cluster_families(self.engine, self.elector)
        devices = self._parts.get("devices")
        if isinstance(devices, DevicesPart):
            yield from device_families(devices)

    async def start(self) -> None:
        """Follow and, when the Lease is ours, lead."""
        for client in self._clients:
            self._stack.push_async_callback(client.close)
        electing = asyncio.create_task(self.elector.run())

        async def step_down() -> None:
            self.elector.stop()
            await asyncio.wait((electing,), timeout=_STOP_S)
            electing.cancel()
            await asyncio.gather(electing, return_exceptions=True)

        self._stack.push_async_callback(step_down)
        running = [asyncio.create_task(self.engine.run())]
        running += [
            asyncio.create_task(keep_running(part, self._log.getChild(name))) for name, part in self._parts.items()
        ]
        if self._label is not None:
            running.append(asyncio.create_task(self._label.run()))

        async def stop() -> None:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        self._stack.push_async_callback(stop)

    async def stop(self) -> None:
        """Write no more, and set the Lease free."""
        await self._stack.aclose()
