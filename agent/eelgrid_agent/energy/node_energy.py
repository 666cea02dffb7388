"""Energy of one node: gathers owners and allocations, runs the attributor, and returns reports, events and windows.

Sources are processes and their cgroups, the kubelet, the plan in force, and the folder of jobs and devices that a Slurm
prolog writes: ours (`engine.slurm_jobs`), or one that keeps a file for each device, as NVIDIA's exporter reads them. A job
whose epilog failed stays in that folder; it cannot be told from a running one, but has no process.

The controller receives two anomalies, once each while they last: a device that is held and idle, since others wait for
it, and an idle context of an owner that does not hold the device, since no other source reports it. Totals start from
zero with the agent, as those of the sampler do.

The energy outbox is stored soon after a window was closed or acknowledged, in a thread, since disks may be slow. A
store that fails is logged once and retried: the windows are in memory, and only a crash would lose them.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from eelgrid_agent.devices.port import RawReadings
from eelgrid_agent.devices.sampler import ExtendedReadings, TickObservation
from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.allocations import (
    AllocationSource,
    DeviceAllocation,
    find_device,
    find_mapped_device,
    map_plan_allocations,
    map_pod_allocations,
)
from eelgrid_agent.energy.anomalies import AnomalyDetector, AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import Attribution, AttributionInput, Attributor, DeviceInput
from eelgrid_agent.energy.metering import DeviceEnergies, EnergyMeter
from eelgrid_agent.energy.process_owners import ProcessOwner, ProcessOwnerResolver
from eelgrid_agent.energy.report import NodeEnergyReport, build_report
from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.engine.slurm_jobs import HandedJob, HandoverError, HandoverFolder
from eelgrid_agent.state_files import StateFileError, StateFormat, StateStore, StateUnwritable
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.kubelet_api import ContainerDevices
from eelgrid_protos.messages import Assignment, EnergyWindow, Gpu, NodeEvent, NodeEventKind
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.safe_text import escape_text
from eelgrid_protos.values import dataclass

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


def map_handed_jobs(jobs: Iterable[HandedJob], gpus: Iterable[Gpu]) -> tuple[DeviceAllocation, ...]:
    """Returns what Slurm's jobs hold, by what our prolog handed over; devices that are not here are skipped."""
    devices = tuple(gpus)
    return tuple(
        DeviceAllocation(
            place=place, owner=UsageOwner(kind=UsageOwnerKind.SLURM, job=job.job), source=AllocationSource.SLURM
        )
        for job in jobs
        for name in job.devices
        if (place := find_mapped_device(name, devices) or find_device(name, devices)) is not None
    )


def read_slurm_jobs(folder: Path, gpus: Iterable[Gpu]) -> tuple[DeviceAllocation, ...] | None:
    """Returns what Slurm's jobs hold, by the files of our prolog and of others; None where there is no folder to ask."""
    devices = tuple(gpus)
    mapped = read_slurm_allocations(folder, devices)
    try:
        handed = map_handed_jobs(HandoverFolder(folder).read_jobs(), devices)
    except HandoverError:
        # Told by whoever watches the folder.
        return mapped
    return None if mapped is None else tuple(dict.fromkeys((*mapped, *handed)))


class ContainerSource(Protocol):
    """The newest answer of a kubelet."""

    @property
    def containers(self) -> tuple[ContainerDevices, ...] | None:
        """The containers that hold devices; None while that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReadings:
    """What the files showed at one moment; `jobs` is None where no folder could be read."""

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
            jobs=None if self._slurm_folder is None else read_slurm_jobs(self._slurm_folder, gpus),
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
    """Energy attribution of one node."""

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
        """Resolves the owners of the sampled processes.

        Opens small files, so call it off the event loop, once at a time.
        """
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
        """Attributes the energy up to the newest tick and returns new events; none before the first tick.

        `assignments` are of the plan in force, None without a plan; `uncounted_s` is what the sampler left out.
        """
        if self._ticked_ns is None:
            return ()
        energies = self._metering.pop_energies(uncounted_s=uncounted_s)
        look = self._sources.gather_input(gpus, energies, slow, found, assignments=assignments)
        self.newest = self._attributor.observe(look)
        return self._new_events(self.newest.anomalies, energies.monotonic_ns, energies.wall_ns)

    def build_report(self) -> NodeEnergyReport | None:
        """Returns the current report; None before the first observation."""
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
    return f"{where}{how} for {seconds:.0f} s, {wasted_j:.0f} J so far, by {escape_text(subject.owner.title())}"


_LOG = logging.getLogger("eelgrid.agent")
_EVERY_S = 2.0


def _encode_outbox(kept: OutboxState | None) -> dict[str, Any]:
    assert kept is not None
    return {
        "incarnation": kept.incarnation,
        "number": kept.number,
        "boot": kept.boot,
        "end_ns": kept.end_ns,
        "offset_ns": kept.offset_ns,
        "counters_j": dict(kept.counters_j),
        "windows": [to_plain(window, brief=True) for window in kept.windows],
    }


def _decode_outbox(document: Mapping[str, Any]) -> OutboxState:
    counters_j = {str(uuid): float(value) for uuid, value in document["counters_j"].items()}
    if not all(map(math.isfinite, counters_j.values())):
        raise ValueError("a counter is not finite")
    offset_ns = document.get("offset_ns")
    try:
        windows = tuple(from_plain(EnergyWindow, window) for window in document["windows"])
    except InvalidMessage as error:
        raise ValueError(str(error)) from error
    return OutboxState(
        offset_ns=None if offset_ns is None else int(offset_ns),
        incarnation=int(document["incarnation"]),
        number=int(document["number"]),
        boot=str(document["boot"]),
        end_ns=int(document["end_ns"]),
        counters_j=counters_j,
        windows=windows,
    )


OutboxStore = StateStore[OutboxState | None]

ENERGY_OUTBOX: StateFormat[OutboxState | None] = StateFormat(
    title="energy outbox",
    schema=1,
    encode=_encode_outbox,
    decode=_decode_outbox,
    empty=lambda: None,
    # A thousand windows of some 2 kB each, twenty times over.
    bytes_most=64 * 1024 * 1024,
    damage_remedy="the energy windows in it are lost to the ledger",
    write_consequence="a crash would lose windows that the controller has not acknowledged",
    indent=None,
    ends_line=False,
)


def load_outbox_state(store: OutboxStore, *, draw_incarnation: Callable[[], int]) -> OutboxState:
    """Returns what the previous run left, or the state of a new incarnation where nothing can be read."""
    fresh = OutboxState(incarnation=draw_incarnation())
    try:
        return store.load() or fresh
    except StateFileError as error:
        _LOG.warning("event=energy_unread path=%s error=%r", error.path, str(error))
        return fresh


async def _store(store: OutboxStore, state: OutboxState) -> None:
    """Stores on a thread, to the end when it is cancelled: two must not write one file. Raises StateUnwritable."""
    writing = asyncio.ensure_future(asyncio.to_thread(store.store, state))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait((writing,))
        raise


async def write_periodically(outbox: EnergyOutbox, store: OutboxStore) -> None:
    """Stores the outbox whenever it changed, until cancelled; then closes its open window and stores that as well."""
    written, is_told, refused = outbox.windows.changes, False, 0
    try:
        while True:
            await asyncio.sleep(_EVERY_S)
            if outbox.refused != refused:
                _LOG.warning(
                    "event=energy_refused windows=%d reason=%s",
                    outbox.refused - refused,
                    escape_text(outbox.refused_reason),
                )
                refused = outbox.refused
            changes = outbox.windows.changes
            if changes == written:
                continue
            try:
                await _store(store, outbox.state())
            except StateUnwritable as error:
                if not is_told:
                    _LOG.warning("event=energy_unwritten error=%s action=again", error)
                is_told = True
            else:
                written, is_told = changes, False
    finally:
        outbox.close()
        try:
            store.store(outbox.state())
        except StateUnwritable as error:
            _LOG.warning("event=energy_unwritten error=%s", error)
