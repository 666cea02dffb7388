"""Composition of the Kubernetes engine: its API client, informers, leader election and reconcilers."""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.election import Timing
from eelgrid_controller.engines.kubernetes.api.elector import Elector, LeaderLabel
from eelgrid_controller.engines.kubernetes.api.kubeconfig import find_access
from eelgrid_controller.engines.kubernetes.pods.unit_steps import GateSettings
from eelgrid_controller.engines.kubernetes.power.policy_merge import PlacePower
from eelgrid_controller.engines.kubernetes.reconcilers import claims
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import CoreCommandPort
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import GateEngine, GateEngineSettings
from eelgrid_controller.engines.kubernetes.reconcilers.held_devices import HeldDeviceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import InferenceServiceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import JobReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.mig_slices import RepartitionTaintReconciler, SlicePodReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.moves import MoveReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.power_policies import PowerPolicyReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    ForecastLookup,
    Reconciler,
    ReconcilerContext,
    run_with_restarts,
)
from eelgrid_controller.runtime.config import KubernetesConfig
from eelgrid_controller.server.metrics.catalogue import MetricFamily
from eelgrid_controller.server.metrics.kubernetes_metrics import cluster_families, device_families
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos.messages import ListPromisesResponse

_STOP_S = 3.0
# By the names that `--kubernetes-abilities` knows, each from its surroundings.
_ABILITIES: dict[str, Callable[[ReconcilerContext], Reconciler]] = {
    "claims": claims.make_claim_reconciler,
    "devices": HeldDeviceReconciler,
    "jobs": JobReconciler,
    "moves": MoveReconciler,
    "policies": PowerPolicyReconciler,
    "services": InferenceServiceReconciler,
    "slices": SlicePodReconciler,
    "taints": RepartitionTaintReconciler,
}


class KubernetesRuntime:
    """Places the pods of one cluster."""

    def __init__(
        self,
        config: KubernetesConfig,
        *,
        loop: CoreCommandPort,
        has_agent: Callable[[str], bool],
        data: Path,
        draws: Callable[[], Mapping[str, PlacePower]],
        devices: DeviceReports,
        clock: Clock,
        log: logging.Logger,
        foresees: ForecastLookup | None = None,
        awaits_agent: Callable[[str], bool] = lambda _: False,
        promises: Callable[[], ListPromisesResponse] = ListPromisesResponse,
    ) -> None:
        """Raises ConfigError where the cluster's access cannot be read."""
        access = find_access(os.environ, kubeconfig=config.kubeconfig, context=config.context)
        identity = config.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        share = config.lease_s / 15.0
        self._clients = HttpClusterClient(access), HttpClusterClient(access)
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
        self.engine = GateEngine(
            cluster=self._clients[1],
            loop=loop,
            elector=self.elector,
            has_agent=has_agent,
            awaits_agent=awaits_agent,
            settings=GateEngineSettings(
                identity=identity,
                gate=GateSettings(unbound_s=config.unbound_s, open_s=config.open_s, moves="moves" in config.abilities),
                leaves_claims="claims" in config.abilities,
            ),
            clock=clock,
            rng=rng,
            log=log,
        )
        surroundings = ReconcilerContext(
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
            self.elector.add_listener(self._label.on_term)
        self._stack = contextlib.AsyncExitStack()
        log.info("server=%s lease=%s identity=%s", access.server, config.lease_name, identity)

    def families(self) -> Iterator[MetricFamily]:
        """What the metrics page tells of all this."""
        yield from cluster_families(self.engine, self.elector)
        devices = self._parts.get("devices")
        if isinstance(devices, HeldDeviceReconciler):
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
            asyncio.create_task(run_with_restarts(part, self._log.getChild(name))) for name, part in self._parts.items()
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
