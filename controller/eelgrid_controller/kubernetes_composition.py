"""Composition of the Kubernetes engine: its API client, informers, leader election, reconcilers and metrics.

Owns which parts run, in which order they start, and what is counted of them. Must not decide anything.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.election import Elector, Timing
from eelgrid_controller.engines.kubernetes.api.kubeconfig import find_access
from eelgrid_controller.engines.kubernetes.model.power_policy import PlacePower
from eelgrid_controller.engines.kubernetes.pods.placement_unit import (
    GateSettings,
    PlacementPhase,
    PlacementUnit,
    UnitMember,
)
from eelgrid_controller.engines.kubernetes.reconcilers.claims import ClaimReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import (
    ForecastLookup,
    GateEngine,
    GateEngineSettings,
    ReconcilerContext,
)
from eelgrid_controller.engines.kubernetes.reconcilers.held_devices import HeldDeviceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import InferenceServiceReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import JobReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.mig_slices import RepartitionTaintReconciler, SlicePodReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.moves import MoveReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.power_policies import PowerPolicyReconciler
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    ClusterContext,
    LeaderLabelReconciler,
    Reconciler,
)
from eelgrid_controller.runtime.config import KubernetesConfig
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos.messages import ListPromisesResponse
from eelgrid_protos.openmetrics import MetricFamily

# Why a gated pod waits, the first that holds.
WAIT_REASONS = ("unreadable", "denied", "other_gate", "gang", "room", "refused", "patch", "core")
_BY_STAND = {PlacementPhase.WAITING: "room", PlacementPhase.REFUSED: "refused", PlacementPhase.PLACED: "patch"}


def cluster_families(engine: GateEngine, elector: Elector) -> Iterator[MetricFamily]:
    """Everything that one controller counts of its cluster, as of now."""
    term = elector.term()
    yield build_family("eelgrid_kubernetes_leading", float(term is not None))
    if term is not None:
        yield build_family("eelgrid_kubernetes_epoch", term.epoch)
    waiting, pinned = _pods(engine.gate.units.values())
    yield build_family("eelgrid_kubernetes_pods_waiting", waiting)
    yield build_family("eelgrid_kubernetes_pods_pinned", pinned)
    yield build_family("eelgrid_kubernetes_pods_unschedulable", len(engine.gate.watchdog))
    yield build_family("eelgrid_kubernetes_rounds_total", engine.rounds)
    yield build_family("eelgrid_kubernetes_events_total", engine.events_taken)
    yield build_family("eelgrid_kubernetes_round_longest_seconds", engine.round_s)
    yield build_family("eelgrid_kubernetes_unreadable_total", engine.unreadable)
    yield build_family("eelgrid_kubernetes_failures_total", engine.failures)
    flights = engine.gate.flights
    yield build_family("eelgrid_kubernetes_flights", len(flights))
    yield build_family("eelgrid_kubernetes_flights_total", {"landed": flights.landed, "overdue": flights.overdue})
    yield from _writes(engine)
    yield from _informers(engine)


def _pods(units: Iterable[PlacementUnit]) -> tuple[dict[str, float], int]:
    """Pods behind our gate by the reason, and pods that are pinned and not bound yet."""
    waiting, pinned = Counter(dict.fromkeys(WAIT_REASONS, 0)), 0
    for unit in units:
        is_whole = len(unit.active_members) >= unit.size
        for member in unit.members.values():
            if member.is_waiting:
                waiting[_reason(unit, member, is_whole=is_whole)] += 1
            elif member.sight.pinned and not member.sight.pod.node_name and not member.is_over:
                pinned += 1
    return {reason: float(count) for reason, count in waiting.items()}, pinned


def _reason(unit: PlacementUnit, member: UnitMember, *, is_whole: bool) -> str:
    if member.sight.refused:
        return "unreadable"
    if member.denied:
        return "denied"
    if member.sight.waits_for:
        return "other_gate"
    if not is_whole:
        return "gang"
    return _BY_STAND.get(unit.stand, "core")


def _writes(engine: GateEngine) -> Iterator[MetricFamily]:
    writes = engine.writes
    failed = {failure.name.lower(): float(count) for failure, count in writes.failed.items()}
    yield build_family(
        "eelgrid_kubernetes_writes_total",
        {"pinned": writes.ungated, "bound": writes.bound, "opened": writes.stripped, **failed},
    )
    yield build_family("eelgrid_kubernetes_recreated_total", writes.recreated)
    admissions = engine.gate.admissions
    yield build_family("eelgrid_kubernetes_admission_pins_total", admissions.counts.as_mapping())
    yield build_family("eelgrid_kubernetes_admission_reservations", len(admissions))
    yield build_family("eelgrid_kubernetes_notes_total", {"sent": engine.events.sent, "dropped": engine.events.dropped})
    reports = {"written": writes.reports_sent, "dropped": writes.reports_dropped}
    yield build_family("eelgrid_kubernetes_conditions_total", reports)


def _informers(engine: GateEngine) -> Iterator[MetricFamily]:
    informers = {"pods": engine.pods, "nodes": engine.nodes}
    yield build_family("eelgrid_kubernetes_objects", {kind: len(one.objects) for kind, one in informers.items()})
    yield build_family("eelgrid_kubernetes_lists_total", {kind: one.lists for kind, one in informers.items()})
    yield build_family("eelgrid_kubernetes_watches_total", {kind: one.watches for kind, one in informers.items()})
    yield build_family(
        "eelgrid_kubernetes_watch_failures_total", {kind: one.failures for kind, one in informers.items()}
    )
    ages = {kind: one.age_s() for kind, one in informers.items()}
    yield build_family(
        "eelgrid_kubernetes_silence_seconds", {kind: age for kind, age in ages.items() if age is not None}
    )


def device_families(devices: HeldDeviceReconciler) -> Iterator[MetricFamily]:
    """What pods really hold against what was planned for them."""
    yield build_family("eelgrid_kubernetes_device_reports_total", devices.reports)
    became = {"corrected": devices.corrected, "refused": devices.refused, "recreated": devices.recreated}
    yield build_family("eelgrid_kubernetes_device_corrections_total", became)
    yield build_family("eelgrid_kubernetes_pods_wrong_devices", devices.wrong)


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


def _choose_settings(config: KubernetesConfig) -> GateEngineSettings:
    gate = GateSettings(
        unbound_s=config.unbound_s,
        open_s=config.open_s,
        binds=config.mode == "scheduler",
        moves="moves" in config.abilities,
    )
    return GateEngineSettings(gate=gate, leaves_claims="claims" in config.abilities)


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
            settings=_choose_settings(config),
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
