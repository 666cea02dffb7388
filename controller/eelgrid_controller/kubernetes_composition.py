"""Composition of the Kubernetes engine: its API client, informers, leader election and reconcilers.

Owns which parts run and in which order they start. Must not contain behaviour of its own.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.election import Timing
from eelgrid_controller.engines.kubernetes.api.elector import Elector
from eelgrid_controller.engines.kubernetes.api.kubeconfig import find_access
from eelgrid_controller.engines.kubernetes.model.power_policy import PlacePower
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.reconcilers.claims import ClaimReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import CoreCommandPort
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import (
    ForecastLookup,
    GateEngine,
    GateEngineSettings,
    ReconcilerContext,
)
from eelgrid_controller.engines.kubernetes.reconcilers.held_devices import HeldDeviceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import InferenceServiceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import JobReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.leader_label import LeaderLabelReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.mig_slices import RepartitionTaintReconciler, SlicePodReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.moves import MoveReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.power_policies import PowerPolicyReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ClusterContext, Reconciler
from eelgrid_controller.runtime.config import KubernetesConfig
from eelgrid_controller.server.metrics.kubernetes_metrics import cluster_families, device_families
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos.messages import ListPromisesResponse
from eelgrid_protos.openmetrics import MetricFamily

_STOP_S = 3.0
# By the names that `--kubernetes-abilities` accepts.
_ABILITIES: dict[str, Callable[[ReconcilerContext], Reconciler[str]]] = {
    "claims": ClaimReconciler,
    "devices": HeldDeviceReconciler,
    "jobs": JobReconciler,
    "moves": MoveReconciler,
    "policies": PowerPolicyReconciler,
    "services": InferenceServiceReconciler,
    "slices": SlicePodReconciler,
    "taints": RepartitionTaintReconciler,
}


class KubernetesRuntime:
    """Runs the Kubernetes engine, which places the pods of one cluster."""

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
        """Builds the engine; raises ControllerConfigError if the cluster's credentials cannot be read."""
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
        # Jitter needs no cryptographic randomness.
        rng = random.Random()  # noqa: S311
        context = ClusterContext(
            cluster=self._clients[1], elector=self.elector, identity=identity, clock=clock, rng=rng, log=log
        )
        self.engine = GateEngine(
            context,
            loop=loop,
            has_agent=has_agent,
            awaits_agent=awaits_agent,
            settings=GateEngineSettings(
                gate=GateSettings(unbound_s=config.unbound_s, open_s=config.open_s, moves="moves" in config.abilities),
                leaves_claims="claims" in config.abilities,
            ),
        )
        surroundings = ReconcilerContext(
            cluster=context.cluster,
            elector=context.elector,
            identity=context.identity,
            clock=context.clock,
            rng=context.rng,
            log=context.log,
            loop=loop,
            engine=self.engine,
            devices=devices,
            data=data,
            draws=draws,
            foresees=foresees,
            promises=promises,
        )
        self._parts = {name: make(surroundings) for name, make in _ABILITIES.items() if name in config.abilities}
        self._label: LeaderLabelReconciler | None = None
        pod, namespace = os.environ.get("POD_NAME", ""), os.environ.get("POD_NAMESPACE", "")
        if pod and namespace:
            # Uses the client of the Lease, so that the label does not wait for the writes of pods.
            self._label = LeaderLabelReconciler(
                replace(context, cluster=self._clients[0]), name=pod, namespace=namespace
            )
        self._stack = contextlib.AsyncExitStack()
        log.info("server=%s lease=%s identity=%s", access.server, config.lease_name, identity)

    def families(self) -> Iterator[MetricFamily]:
        """Current metric families of the engine."""
        yield from cluster_families(self.engine, self.elector)
        devices = self._parts.get("devices")
        if isinstance(devices, HeldDeviceReconciler):
            yield from device_families(devices)

    async def start(self) -> None:
        """Starts watching the cluster, and leads once the Lease is acquired."""
        for client in self._clients:
            self._stack.push_async_callback(client.close)
        electing = asyncio.create_task(self.elector.run())

        async def step_down() -> None:
            self.elector.stop()
            await asyncio.wait((electing,), timeout=_STOP_S)
            electing.cancel()
            await asyncio.gather(electing, return_exceptions=True)

        self._stack.push_async_callback(step_down)
        running = [asyncio.create_task(one.run()) for one in (self.engine, *self._parts.values())]
        if self._label is not None:
            running.append(asyncio.create_task(self._label.run()))

        async def stop() -> None:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        self._stack.push_async_callback(stop)

    async def stop(self) -> None:
        """Stops writing, and releases the Lease."""
        await self._stack.aclose()
