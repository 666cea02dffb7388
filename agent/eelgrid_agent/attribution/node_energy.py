"""One node's energy by owner, whole: ticks and slow looks in, totals, reports and events out.

Owns what is kept between ticks and looks and which anomalies were told. Must
not know who shows or sends them, nor any clock. Everything but `read` belongs
on the thread of the node; `newest` is replaced whole, so that any thread may
take it.

Theory. Of anomalies the controller hears two, once each while they last: a
device that is held and idle, since others wait for it, and an idle context of
somebody who does not hold the place, since nobody else will tell. What was
counted begins anew with the agent, as the sampler's totals do.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from eelgrid_agent.attribution.anomalies import Anomaly, AnomalyKind, AnomalyWatch, Subject
from eelgrid_agent.attribution.attributor import Attribution, Attributor
from eelgrid_agent.attribution.metering import Metering
from eelgrid_agent.attribution.report import EnergyReport, report_of
from eelgrid_agent.attribution.sources import Found, Sources
from eelgrid_agent.device import RawReadings
from eelgrid_agent.sampler import Observation
from eelgrid_agent.slow import SlowLook
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Assignment, Gpu, NodeEvent, NodeEventKind

__all__ = ["NodeEnergy"]

_NOTHING: Mapping[str, float] = MappingProxyType({})


class NodeEnergy:
    """See the module."""

    def __init__(self, catalogue: Catalogue, sources: Sources, *, watch: AnomalyWatch | None = None) -> None:
        self._sources = sources
        self._metering = Metering(catalogue)
        self._attributor = Attributor(catalogue, watch=watch)
        self._ticked_ns: int | None = None
        self._told: frozenset[Subject] = frozenset()
        self.newest: Attribution | None = None

    def tick(
        self, gpus: tuple[Gpu, ...], looks: Iterable[tuple[str, RawReadings]], seen: Observation, *, monotonic_ns: int
    ) -> None:
        """What the sampler made of one look; `gpus` of the inventory in force."""
        self._metering.tick(gpus, looks, seen, monotonic_ns=monotonic_ns)
        self._ticked_ns = monotonic_ns

    def read(self, gpus: tuple[Gpu, ...], slow: SlowLook, *, now_ns: int) -> Found:
        """Whose the processes of a slow look are; opens small files, so to be called off the event loop, one at a time."""
        return self._sources.read(gpus, slow, now_ns=now_ns)

    def observe(
        self, gpus: tuple[Gpu, ...], slow: SlowLook, found: Found, *,
        assignments: Iterable[Assignment] | None = None, uncounted_s: Mapping[str, float] = _NOTHING,
    ) -> tuple[NodeEvent, ...]:  # fmt: skip
        """Attributes what was spent up to the newest tick, and tells what is new to tell; nothing before the first tick.

        `assignments` are of the plan in force, None without a plan; `uncounted_s` is what the sampler left out.
        """
        if self._ticked_ns is None:
            return ()
        energies = self._metering.take(uncounted_s=uncounted_s)
        look = self._sources.gather(gpus, energies, slow, found, assignments=assignments)
        self.newest = self._attributor.observe(look)
        return self._news(self.newest.anomalies, energies.monotonic_ns, energies.wall_ns)

    def report(self) -> EnergyReport | None:
        """Everything that is known now, for whoever asks; None before the first look."""
        return None if self.newest is None else report_of(self.newest)

    def _news(self, lasting: Iterable[Anomaly], now_ns: int, wall_ns: int) -> tuple[NodeEvent, ...]:
        standing = {anomaly.subject: anomaly for anomaly in lasting}
        news = {subject: anomaly for subject, anomaly in standing.items() if _is_told(subject, standing)}
        told = tuple(
            NodeEvent(
                kind=NodeEventKind.GPU_IDLE_HELD, time_ns=max(0, wall_ns), gpu_uuid=subject.gpu_uuid,
                detail=_detail(anomaly, now_ns),
            )
            for subject, anomaly in news.items()
            if subject not in self._told
        )  # fmt: skip
        self._told = frozenset(news)
        return told


def _is_told(subject: Subject, standing: Mapping[Subject, Anomaly]) -> bool:
    if subject.kind is AnomalyKind.HELD_IDLE:
        return True
    held = {
        one.gpu_instance_id
        for one in standing
        if one.kind is AnomalyKind.HELD_IDLE and one.gpu_uuid == subject.gpu_uuid
    }
    return subject.kind is AnomalyKind.IDLE_CONTEXT and not held & {None, subject.gpu_instance_id}


def _detail(anomaly: Anomaly, now_ns: int) -> str:
    subject = anomaly.subject
    where = "" if subject.gpu_instance_id is None else f"GPU instance {subject.gpu_instance_id}: "
    how = "held and idle" if subject.kind is AnomalyKind.HELD_IDLE else "an idle context is open"
    seconds = max(0, now_ns - anomaly.since_ns) / 1e9
    wasted_j = anomaly.wasted_mj / 1000.0
    return f"{where}{how} for {seconds:.0f} s, {wasted_j:.0f} J so far, by {subject.owner.title()}"
