"""What the Kubernetes part tells of itself on the metrics page.

Owns which attribute is which metric, and the bounded set of reasons for which a pod waits.
Must not change anything: it reads what the engine, its writes, its informers, the elector
and the webhook count for themselves, when somebody scrapes.

Theory. Reasons, results and kinds are sets that are known beforehand and no names of the
cluster, so that a page does not grow with it. A reason is where a pod stands at the moment
of the scrape. Whatever the engine counts begins at 0 again when it begins anew after a
fault, which Prometheus takes as a restart. Waiting pods are counted one by one: some
hundred thousand are beyond what an engine holds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from eelgrid_controller.adapters.described import Family, family
from eelgrid_controller.adapters.kubernetes.devices_part import DevicesPart
from eelgrid_controller.adapters.kubernetes.elector import Term
from eelgrid_controller.adapters.kubernetes.engine import Engine
from eelgrid_controller.adapters.kubernetes.webhook import Webhook
from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit

__all__ = ["WAITS", "cluster_families", "device_families", "webhook_families"]

# Why a gated pod waits, the first that holds.
WAITS = ("unreadable", "denied", "other_gate", "gang", "room", "refused", "patch", "core")
_BY_STAND = {Stand.WAITING: "room", Stand.REFUSED: "refused", Stand.PLACED: "patch"}


class _Leads(Protocol):
    def term(self) -> Term | None:
        """The term that runs at this moment."""


def cluster_families(engine: Engine, elector: _Leads) -> Iterator[Family]:
    """Everything that one controller counts of its cluster, as of now."""
    term = elector.term()
    yield family("eelgrid_kubernetes_leading", float(term is not None))
    if term is not None:
        yield family("eelgrid_kubernetes_epoch", term.epoch)
    waiting, pinned = _pods(engine.gate.units.values())
    yield family("eelgrid_kubernetes_pods_waiting", waiting)
    yield family("eelgrid_kubernetes_pods_pinned", pinned)
    yield family("eelgrid_kubernetes_pods_unschedulable", len(engine.gate.watchdog))
    yield family("eelgrid_kubernetes_rounds_total", engine.rounds)
    yield family("eelgrid_kubernetes_events_total", engine.events)
    yield family("eelgrid_kubernetes_round_longest_seconds", engine.round_s)
    yield family("eelgrid_kubernetes_unreadable_total", engine.unreadable)
    yield family("eelgrid_kubernetes_failures_total", engine.failures)
    flights = engine.gate.flights
    yield family("eelgrid_kubernetes_flights", len(flights))
    yield family("eelgrid_kubernetes_flights_total", {"landed": flights.landed, "overdue": flights.overdue})
    yield from _writes(engine)
    yield from _informers(engine)


def _pods(units: Iterable[Unit]) -> tuple[dict[str, float], int]:
    """Pods behind our gate by the reason, and pods that are pinned and not bound yet."""
    waiting, pinned = Counter(dict.fromkeys(WAITS, 0)), 0
    for unit in units:
        is_whole = len(unit.alive) >= unit.size
        for member in unit.members.values():
            if member.is_waiting:
                waiting[_reason(unit, member, is_whole=is_whole)] += 1
            elif member.sight.pinned and not member.sight.pod.node_name and not member.is_over:
                pinned += 1
    return {reason: float(count) for reason, count in waiting.items()}, pinned


def _reason(unit: Unit, member: Member, *, is_whole: bool) -> str:
    if member.sight.refused:
        return "unreadable"
    if member.denied:
        return "denied"
    if member.sight.waits_for:
        return "other_gate"
    if not is_whole:
        return "gang"
    return _BY_STAND.get(unit.stand, "core")


def _writes(engine: Engine) -> Iterator[Family]:
    writes = engine.writes
    failed = {failure.name.lower(): float(count) for failure, count in writes.failed.items()}
    yield family("eelgrid_kubernetes_writes_total", {"pinned": writes.ungated, "opened": writes.stripped, **failed})
    yield family("eelgrid_kubernetes_recreated_total", writes.recreated)
    yield family("eelgrid_kubernetes_notes_total", {"sent": writes.tells_sent, "dropped": writes.tells_dropped})
    reports = {"written": writes.reports_sent, "dropped": writes.reports_dropped}
    yield family("eelgrid_kubernetes_conditions_total", reports)


def _informers(engine: Engine) -> Iterator[Family]:
    informers = {"pods": engine.pods, "nodes": engine.nodes}
    yield family("eelgrid_kubernetes_objects", {kind: len(one.objects) for kind, one in informers.items()})
    yield family("eelgrid_kubernetes_lists_total", {kind: one.lists for kind, one in informers.items()})
    yield family("eelgrid_kubernetes_watches_total", {kind: one.watches for kind, one in informers.items()})
    yield family("eelgrid_kubernetes_watch_failures_total", {kind: one.failures for kind, one in informers.items()})
    ages = {kind: one.age_s() for kind, one in informers.items()}
    yield family("eelgrid_kubernetes_silence_seconds", {kind: age for kind, age in ages.items() if age is not None})


def device_families(devices: DevicesPart) -> Iterator[Family]:
    """What pods really hold against what was planned for them."""
    yield family("eelgrid_kubernetes_device_reports_total", devices.reports)
    became = {"corrected": devices.corrected, "refused": devices.refused, "recreated": devices.recreated}
    yield family("eelgrid_kubernetes_device_corrections_total", became)
    yield family("eelgrid_kubernetes_pods_wrong_devices", devices.wrong)


def webhook_families(webhook: Webhook) -> Iterator[Family]:
    """What the webhook answered."""
    answers = {answer.value: float(count) for answer, count in webhook.answers.items()}
    yield family("eelgrid_kubernetes_reviews_total", answers | {"refused": webhook.refused})
