"""Energy of one node: gathers owners and allocations, runs the attributor, returns reports and events.

Contains the attribution sources, among them the Slurm prolog's folder of jobs and devices.

Theory. Of anomalies the controller hears two, once each while they last: a
device that is held and idle, since others wait for it, and an idle context of
somebody who does not hold the place, since nobody else will tell. What was
counted begins anew with the agent, as the sampler's totals do.

Theory. A prolog writes a job's id and an epilog takes it away, so an epilog
that failed leaves a job that ended long ago. Nothing here can tell; what such
a job would be charged is told apart by its having no process.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from eelgrid_agent.devices.extended_readings import ExtendedReadings
from eelgrid_agent.devices.port import RawReadings
from eelgrid_agent.devices.sampler import TickObservation
from eelgrid_agent.energy.allocations import (
    AllocationSource,
    DeviceAllocation,
    find_mapped_device,
    map_plan_allocations,
    map_pod_allocations,
)
from eelgrid_agent.energy.anomalies import AnomalyDetector, AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import Attribution, AttributionInput, Attributor, DeviceInput
from eelgrid_agent.energy.metering import DeviceEnergies, EnergyMeter
from eelgrid_agent.energy.process_owners import ProcessOwner, ProcessOwnerResolver
from eelgrid_agent.energy.report import NodeEnergyReport, build_report
from eelgrid_agent.energy.shares import UsageOwner, UsageOwnerKind
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import Assignment, Gpu, NodeEvent, NodeEventKind
from eelgrid_protos.pod_resources_api import ContainerDevices

FILES_MOST = 1024
JOBS_PER_FILE_MOST = 256
_FILE_BYTES_MOST = 16 * 1024
_JOB_LENGTH_MOST = 64


def list_jobs(text: str) -> tuple[str, ...]:
    """The job ids of one file, once each, in its order; a line that is no id is passed over."""
    lines = (line.strip() for line in text.splitlines()[:JOBS_PER_FILE_MOST])
    jobs = (line for line in lines if line and len(line) <= _JOB_LENGTH_MOST and line.isascii())
    return tuple(dict.fromkeys(job for job in jobs if job.replace("_", "").replace("+", "").isalnum()))


def read_slurm_allocations(folder: Path, gpus: Iterable[Gpu]) -> tuple[DeviceAllocation, ...] | None:
    """Who holds what, by the folder; None where there is no folder to ask."""
    devices = tuple(gpus)
    found: list[DeviceAllocation] = []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for count, entry in enumerate(entries) if count < FILES_MOST)
        for name in names:
            place = find_mapped_device(name, devices)
            if place is None:
                continue
            with (folder / name).open("rb") as file:
                jobs = list_jobs(file.read(_FILE_BYTES_MOST).decode("ascii", "replace"))
            found.extend(
                DeviceAllocation(
                    place=place, owner=UsageOwner(kind=UsageOwnerKind.SLURM, job=job), source=AllocationSource.SLURM
                )
                for job in jobs
            )
    except OSError:
        # A file that goes away while we read is an epilog at work; the next look is whole.
        return None
    return tuple(found)


class ContainerSource(Protocol):
    """What a kubelet said last."""

    @property
    def containers(self) -> tuple[ContainerDevices, ...] | None:
        """The containers that hold devices; None while nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReadings:
    """What the files of one moment said; `jobs` is None where no folder could be asked."""

    owners: Mapping[int, ProcessOwner] = field(default_factory=lambda: MappingProxyType({}))
    jobs: tuple[DeviceAllocation, ...] | None = None


NO_SOURCE_READINGS = SourceReadings()


class AttributionSources:
    """Everything that one node can be asked; without a book no process is looked up."""

    def __init__(
        self,
        book: ProcessOwnerResolver | None = None,
        *,
        kubelet: ContainerSource | None = None,
        slurm_folder: Path | None = None,
    ) -> None:
        self._book = book
        self._kubelet = kubelet
        self._slurm_folder = slurm_folder

    def read_files(self, gpus: tuple[Gpu, ...], slow: ExtendedReadings, *, now_ns: int) -> SourceReadings:
        """The owners of all processes of a slow look, and a prolog's folder; may block, for one caller at a time."""
        pids = sorted({one.pid for found in slow.processes.values() for one in found or ()})
        return SourceReadings(
            owners={} if self._book is None else self._book.resolve(pids, now_ns=now_ns),
            jobs=None if self._slurm_folder is None else read_slurm_allocations(self._slurm_folder, gpus),
        )

    def gather_input(
        self,
        gpus: tuple[Gpu, ...],
        energies: DeviceEnergies,
        slow: ExtendedReadings,
        found: SourceReadings,
        *,
        assignments: Iterable[Assignment] | None = None,
    ) -> AttributionInput:
        """One look; `assignments` are of the plan in force, None without one."""
        return AttributionInput(
            monotonic_ns=energies.monotonic_ns,
            wall_ns=energies.wall_ns,
            devices=tuple(_device(gpu, energies, slow) for gpu in gpus),
            owners=found.owners,
            allocations=self._allocations(gpus, found, assignments),
        )

    def _allocations(
        self, gpus: tuple[Gpu, ...], found: SourceReadings, assignments: Iterable[Assignment] | None
    ) -> tuple[DeviceAllocation, ...] | None:
        """What all sources say; None where none of them says anything, which is not the same as nothing."""
        said: list[tuple[DeviceAllocation, ...]] = []
        containers = None if self._kubelet is None else self._kubelet.containers
        if containers is not None:
            said.append(map_pod_allocations(containers, gpus))
        if found.jobs is not None:
            said.append(found.jobs)
        if assignments is not None:
            said.append(map_plan_allocations(assignments, gpus))
        return tuple(one for allocations in said for one in allocations) if said else None


def _device(gpu: Gpu, energies: DeviceEnergies, slow: ExtendedReadings) -> DeviceInput:
    return DeviceInput(
        gpu=gpu,
        energy_j=energies.total_j.get(gpu.uuid),
        utilization=energies.utilization.get(gpu.uuid),
        estimate=energies.estimates.get(gpu.uuid),
        limit_w=energies.limits_w.get(gpu.uuid),
        instances=slow.instances.get(gpu.uuid, ()),
        processes=slow.processes.get(gpu.uuid),
    )


_NOTHING: Mapping[str, float] = MappingProxyType({})


class NodeEnergy:
    """See the module."""

    def __init__(
        self, catalogue: Catalogue, sources: AttributionSources, *, watch: AnomalyDetector | None = None
    ) -> None:
        self._sources = sources
        self._metering = EnergyMeter(catalogue)
        self._attributor = Attributor(catalogue, watch=watch)
        self._ticked_ns: int | None = None
        self._told: frozenset[AnomalySubject] = frozenset()
        self.newest: Attribution | None = None

    def on_tick(
        self,
        gpus: tuple[Gpu, ...],
        looks: Iterable[tuple[str, RawReadings]],
        seen: TickObservation,
        *,
        monotonic_ns: int,
    ) -> None:
        """What the sampler made of one look; `gpus` of the inventory in force."""
        self._metering.on_tick(gpus, looks, seen, monotonic_ns=monotonic_ns)
        self._ticked_ns = monotonic_ns

    def read_sources(self, gpus: tuple[Gpu, ...], slow: ExtendedReadings, *, now_ns: int) -> SourceReadings:
        """Whose the processes of a slow look are; opens small files, so to be called off the event loop, one at a time."""
        return self._sources.read_files(gpus, slow, now_ns=now_ns)

    def observe(
        self,
        gpus: tuple[Gpu, ...],
        slow: ExtendedReadings,
        found: SourceReadings,
        *,
        assignments: Iterable[Assignment] | None = None,
        uncounted_s: Mapping[str, float] = _NOTHING,
    ) -> tuple[NodeEvent, ...]:
        """Attributes what was spent up to the newest tick, and tells what is new to tell; nothing before the first tick.

        `assignments` are of the plan in force, None without a plan; `uncounted_s` is what the sampler left out.
        """
        if self._ticked_ns is None:
            return ()
        energies = self._metering.pop_energies(uncounted_s=uncounted_s)
        look = self._sources.gather_input(gpus, energies, slow, found, assignments=assignments)
        self.newest = self._attributor.observe(look)
        return self._new_events(self.newest.anomalies, energies.monotonic_ns, energies.wall_ns)

    def build_report(self) -> NodeEnergyReport | None:
        """Everything that is known now, for whoever asks; None before the first look."""
        return None if self.newest is None else build_report(self.newest)

    def _new_events(self, lasting: Iterable[OngoingAnomaly], now_ns: int, wall_ns: int) -> tuple[NodeEvent, ...]:
        standing = {anomaly.subject: anomaly for anomaly in lasting}
        news = {subject: anomaly for subject, anomaly in standing.items() if _is_reported(subject, standing)}
        told = tuple(
            NodeEvent(
                kind=NodeEventKind.GPU_IDLE_HELD,
                time_ns=max(0, wall_ns),
                gpu_uuid=subject.gpu_uuid,
                detail=_detail(anomaly, now_ns),
            )
            for subject, anomaly in news.items()
            if subject not in self._told
        )
        self._told = frozenset(news)
        return told


def _is_reported(subject: AnomalySubject, standing: Mapping[AnomalySubject, OngoingAnomaly]) -> bool:
    if subject.kind is EnergyAnomalyKind.HELD_IDLE:
        return True
    held = {
        one.gpu_instance_id
        for one in standing
        if one.kind is EnergyAnomalyKind.HELD_IDLE and one.gpu_uuid == subject.gpu_uuid
    }
    return subject.kind is EnergyAnomalyKind.IDLE_CONTEXT and not held & {None, subject.gpu_instance_id}


def _detail(anomaly: OngoingAnomaly, now_ns: int) -> str:
    subject = anomaly.subject
    where = "" if subject.gpu_instance_id is None else f"GPU instance {subject.gpu_instance_id}: "
    how = "held and idle" if subject.kind is EnergyAnomalyKind.HELD_IDLE else "an idle context is open"
    seconds = max(0, now_ns - anomaly.since_ns) / 1e9
    wasted_j = anomaly.wasted_mj / 1000.0
    return f"{where}{how} for {seconds:.0f} s, {wasted_j:.0f} J so far, by {subject.owner.title()}"
