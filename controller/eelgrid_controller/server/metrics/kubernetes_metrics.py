"""Metrics of the Kubernetes engine: pods, writes, informers, devices and the admission webhook."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from eelgrid_controller.engines.kubernetes.api.elector import LeadershipTerm
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementPhase, PlacementUnit, UnitMember
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import GateEngine
from eelgrid_controller.engines.kubernetes.reconcilers.held_devices import HeldDeviceReconciler
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.openmetrics import MetricFamily

# Why a gated pod waits, the first that holds.
WAIT_REASONS = ("unreadable", "denied", "other_gate", "gang", "room", "refused", "patch", "core")
_BY_STAND = {PlacementPhase.WAITING: "room", PlacementPhase.REFUSED: "refused", PlacementPhase.PLACED: "patch"}


class _Leads(Protocol):
    def term(self) -> LeadershipTerm | None:
        """The term that runs at this moment."""


def cluster_families(engine: GateEngine, elector: _Leads) -> Iterator[MetricFamily]:
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
        "eelgrid_kubernetes_writes_total", {"pinned": writes.ungated, "opened": writes.stripped, **failed}
    )
    yield build_family("eelgrid_kubernetes_recreated_total", writes.recreated)
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
