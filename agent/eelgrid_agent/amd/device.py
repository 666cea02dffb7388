"""AMD devices of this machine, read through the binding that it is given.

Owns the session's handles, the listing and the looks. It translates and never
decides. One thread uses it. A part of a partitioned device (DPX, QPX, CPX) has
a handle but no board of its own: one device is listed for each board, by its
first handle, so that its watts are counted once; `partition` tells the mode.

What was seen once stays listed. A lost device ends the look at once, as does
one that times out. What AMD does not tell (activity of parts, XIDs, aggregate
error counts) is Missing(NOT_SUPPORTED) or nothing.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from eelgrid_agent.amd.readings import FAST, SLOW, Source, energy_j, number, reasons_mask, residencies
from eelgrid_agent.amd.session import Session, error_of, is_gone, reason_of
from eelgrid_agent.device import (
    FAST_READINGS,
    SLOW_READINGS,
    DeviceEvent,
    DeviceTimeout,
    DriverUnavailable,
    GpuLink,
    GpuLost,
    GpuProcess,
    InstanceReadings,
    Missing,
    ProcessKind,
    RawReadings,
    UnknownGpu,
    Value,
)
from eelgrid_protos.catalogue import model_name
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.quantities import MIB

__all__ = ["AmdDevice"]

_SILENT = frozenset({AbsenceReason.GPU_LOST, AbsenceReason.TIMED_OUT})
_FAST = tuple(reading for reading in FAST_READINGS if reading is not Reading.ENERGY_J)
# NVML's words for how near two devices are.
_SAME_NODE, _SYSTEM = 40, 50


class AmdDevice:
    """The device port over `amdsmi`; `visit` is called before a listing asks a device and may pass it over."""

    def __init__(
        self, smi: Any, *, visit: Callable[[int], bool] = lambda _index: True,
        user_id: Callable[[], int] = os.geteuid,
    ) -> None:  # fmt: skip
        self._smi = smi
        self._visit = visit
        self._user_id = user_id
        self._session = Session(smi)
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, Gpu] = {}
        self._residencies: dict[str, Mapping[str, float]] = {}
        # Places that timed out in the last listing: these devices hang and are not lost.
        self._late: set[int] = set()
        self._lost = False

    def driver_version(self) -> str:
        """The version of the amdgpu driver, or of the library where no device tells; raises DriverUnavailable."""
        if not self._handles:
            self.gpus()
        for handle in self._handles.values():
            try:
                version = str(self._smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
            except self._smi.AmdSmiException as error:
                self._drop(error)
                continue
            if version != "N/A":
                return version
        self._session.begin()
        try:
            library = self._smi.amdsmi_get_lib_version()
        except self._smi.AmdSmiException as error:
            raise DriverUnavailable(str(error_of(error))) from None
        return f"amdsmi {library['major']}.{library['minor']}"

    def access(self) -> AccessLevel:
        """The driver lets root change devices, and everybody read."""
        return AccessLevel.ROOT if self._user_id() == 0 else AccessLevel.READ_ONLY

    def gpus(self) -> tuple[Gpu, ...]:
        """Every board that answers or answered before, by index; raises DriverUnavailable."""
        if self._lost:
            self._end()
        self._session.begin()
        try:
            handles = list(self._smi.amdsmi_get_processor_handles())
        except self._smi.AmdSmiException as error:
            self._end()
            raise DriverUnavailable(str(error_of(error))) from None
        found: dict[str, Gpu] = {}
        self._handles.clear()
        self._late.clear()
        for place, handle in enumerate(handles[:GPUS_PER_NODE_MOST]):
            if not self._visit(place):
                continue
            try:
                gpu = self._identify(handle, place)
            except self._smi.AmdSmiException as error:
                self._lost = self._lost or is_gone(error)
                if reason_of(error) is AbsenceReason.TIMED_OUT:
                    self._late.add(place)
                continue
            if gpu.uuid not in found:
                found[gpu.uuid] = gpu
                self._handles[gpu.uuid] = handle
        self._seen = _numbered(found, self._seen)
        return tuple(sorted(self._seen.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One quick look; raises UnknownGpu."""
        values: dict[Reading, Value] = dict.fromkeys(_FAST, Missing(AbsenceReason.NOT_SUPPORTED))
        try:
            handle = self.handle(uuid)
            counter = self._ask(lambda smi, handle: smi.amdsmi_get_energy_count(handle), handle)
            energy: Value = counter if isinstance(counter, Missing) else energy_j(counter)
            self._fill(values, FAST, handle)
            values[Reading.EVENT_REASONS_MASK] = self._reasons(uuid, handle)
        except _Silence as silence:
            missing = Missing(silence.reason)
            return RawReadings(energy_counter_j=missing, values=dict.fromkeys(_FAST, missing))
        return RawReadings(energy_counter_j=energy, values=values)

    def read_slow(self, uuid: str) -> Mapping[Reading, Value]:
        """What is dear or changes seldom; raises UnknownGpu."""
        values: dict[Reading, Value] = dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.NOT_SUPPORTED))
        try:
            self._fill(values, SLOW, self.handle(uuid))
        except _Silence as silence:
            return dict.fromkeys(SLOW_READINGS, Missing(silence.reason))
        return values

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """None: parts of an AMD device are no instances with readings; raises UnknownGpu."""
        self._known(uuid)
        return ()

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who computes on the device, by pid; raises UnknownGpu, NoPermission, NotSupported."""
        found = self.call(uuid, lambda smi, handle: smi.amdsmi_get_gpu_process_list(handle))
        processes: dict[int, GpuProcess] = {}
        for one in found:
            memory_bytes = number(one.get("memory_usage"), "vram_mem")
            memory_bytes = number(one, "mem") if memory_bytes is None else memory_bytes
            processes[int(one["pid"])] = GpuProcess(
                pid=int(one["pid"]), kind=ProcessKind.COMPUTE,
                memory_bytes=None if memory_bytes is None else int(memory_bytes),
            )  # fmt: skip
        return tuple(sorted(processes.values(), key=lambda process: process.pid))

    def topology(self) -> tuple[GpuLink, ...]:
        """Every pair of devices; XGMI counts as NVLink does."""
        if not self._handles:
            self.gpus()
        links = []
        for one, other in combinations(sorted(self._handles), 2):
            try:
                links.append(self._link(one, other))
            except self._smi.AmdSmiException:
                # The driver tells nothing of a pair with a lost device.
                continue
        return tuple(links)

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """None: what the driver announces (faults of pages, migrations) is no event of the port."""
        return ()

    def close(self) -> None:
        """Ends the session and forgets the devices."""
        self._end()
        self._seen = {}

    # For AmdControl, and beside the port

    def handle(self, uuid: str) -> Any:
        """The device's handle; raises UnknownGpu, and _Silence for one that was seen and is gone."""
        self._known(uuid)
        handle = self._handles.get(uuid)
        if handle is None:
            try:
                self.gpus()
            except DriverUnavailable:
                raise _Silence(AbsenceReason.GPU_LOST) from None
            handle = self._handles.get(uuid)
        if handle is None:
            late = self._seen[uuid].index in self._late
            raise _Silence(AbsenceReason.TIMED_OUT if late else AbsenceReason.GPU_LOST)
        return handle

    def call(self, uuid: str, ask: Callable[[Any, Any], Any]) -> Any:
        """One call of the binding about one device; raises the port's errors."""
        try:
            return ask(self._smi, self.handle(uuid))
        except self._smi.AmdSmiException as error:
            self._drop(error)
            raise error_of(error) from None
        except _Silence as silence:
            if silence.reason is AbsenceReason.TIMED_OUT:
                raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it") from None
            raise

    def partition(self, uuid: str) -> tuple[str, str]:
        """How the device is divided, in compute (SPX, DPX, TPX, QPX, CPX) and memory (NPS1 ...); "" where it says nothing."""
        answers = []
        for ask in (
            lambda smi, handle: smi.amdsmi_get_gpu_compute_partition(handle),
            lambda smi, handle: smi.amdsmi_get_gpu_memory_partition(handle),
        ):
            answer = self._ask(ask, self.handle(uuid))
            answers.append("" if isinstance(answer, Missing) or answer == "N/A" else str(answer))
        return answers[0], answers[1]

    def _known(self, uuid: str) -> None:
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")

    def _ask(self, ask: Callable[[Any, Any], Any], handle: Any) -> Any:
        """An answer or why it is missing; raises _Silence when the whole device says nothing."""
        try:
            return ask(self._smi, handle)
        except self._smi.AmdSmiException as error:
            reason = reason_of(error)
            if reason in _SILENT:
                self._drop(error)
                raise _Silence(reason) from None
            return Missing(reason)
        except AttributeError:
            # An older binding lacks the function.
            return Missing(AbsenceReason.NOT_SUPPORTED)

    def _fill(self, values: dict[Reading, Value], sources: tuple[Source, ...], handle: Any) -> None:
        for source in sources:
            answer = self._ask(source.ask, handle)
            if isinstance(answer, Missing):
                values.update(dict.fromkeys(source.readings, answer))
            else:
                values.update(source.values(answer))

    def _reasons(self, uuid: str, handle: Any) -> Value:
        answer = self._ask(lambda smi, handle: smi.amdsmi_get_gpu_metrics_info(handle), handle)
        if isinstance(answer, Missing):
            return answer
        now, before = residencies(answer), self._residencies.get(uuid)
        if not now:
            return Missing(AbsenceReason.NOT_SUPPORTED)
        self._residencies[uuid] = now
        return Missing(AbsenceReason.NOT_SAMPLED) if before is None else reasons_mask(before, now)

    def _identify(self, handle: Any, place: int) -> Gpu:
        uuid = str(self._smi.amdsmi_get_gpu_device_uuid(handle))
        asic = self._or_nothing("amdsmi_get_gpu_asic_info", handle)
        board = self._or_nothing("amdsmi_get_gpu_board_info", handle)
        memory = self._or_nothing("amdsmi_get_gpu_vram_usage", handle)
        caps = self._or_nothing("amdsmi_get_power_cap_info", handle)
        names = (asic.get("market_name"), board.get("product_name"))
        product = next((str(name) for name in names if name not in (None, "", "N/A")), "AMD GPU")
        memory_mib = number(memory, "vram_total")
        return Gpu(
            uuid=uuid,
            index=place,
            product=product,
            # "AMD Instinct MI300X OAM" is what workloads call MI300X.
            model=model_name(product.removeprefix("AMD ").removeprefix("Instinct ").removesuffix(" OAM")),
            pci_bus_id=str(self._smi.amdsmi_get_gpu_device_bdf(handle)),
            memory_bytes=0 if memory_mib is None else int(memory_mib) * MIB,
            power_limit_default_w=_watts(caps, "default_power_cap"),
            power_limit_min_w=_watts(caps, "min_power_cap"),
            power_limit_max_w=_watts(caps, "max_power_cap"),
            numa_node=self._numa_node(handle),
        )

    def _numa_node(self, handle: Any) -> int | None:
        """The nearest NUMA node; the library says -1 where the kernel names none."""
        try:
            node = int(self._smi.amdsmi_topo_get_numa_node_number(handle))
        except self._smi.AmdSmiException as error:
            if reason_of(error) in _SILENT:
                raise
            return None
        return node if node >= 0 else None

    def _or_nothing(self, name: str, handle: Any) -> Mapping[str, Any]:
        """What a call says, or nothing where this device does not say it."""
        try:
            answer: Mapping[str, Any] = getattr(self._smi, name)(handle)
        except self._smi.AmdSmiException as error:
            if reason_of(error) in _SILENT:
                raise
            return {}
        return answer

    def _link(self, one: str, other: str) -> GpuLink:
        smi, ends = self._smi, (self._handles[one], self._handles[other])
        nodes = {smi.amdsmi_topo_get_numa_node_number(handle) for handle in ends}
        link = smi.amdsmi_topo_get_link_type(*ends)["type"]
        # The enumeration was renamed and renumbered in 7.0.
        xgmi = smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI if hasattr(smi, "AmdSmiLinkType") else smi.AmdSmiIoLinkType.XGMI
        return GpuLink(
            one=one, other=other, ancestor=_SAME_NODE if len(nodes) == 1 else _SYSTEM, nvlinks=int(link == int(xgmi))
        )

    def _drop(self, error: Any) -> None:
        """After this error, the handles are found anew."""
        if is_gone(error):
            self._lost = True
            self._handles.clear()

    def _end(self) -> None:
        self._handles.clear()
        self._residencies.clear()
        self._lost = False
        self._session.end()


class _Silence(GpuLost):
    """The whole device says nothing."""

    def __init__(self, reason: AbsenceReason) -> None:
        self.reason = reason
        super().__init__("the device answers nothing any more; reset it or reboot the node")


def _numbered(found: Mapping[str, Gpu], seen: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """All devices; one that was seen keeps its index, since the library counts past a lost device."""
    merged = dict(seen)
    for uuid, gpu in found.items():
        if uuid in seen:
            merged[uuid] = replace(gpu, index=seen[uuid].index)
            continue
        taken = {other.index for other in merged.values()}
        free = (index for index in (gpu.index, *range(GPUS_PER_NODE_MOST)) if index not in taken)
        index = next(free, None)
        if index is not None:
            merged[uuid] = replace(gpu, index=index)
    return merged


def _watts(caps: Mapping[str, Any], name: str) -> float | None:
    cap_uw = number(caps, name)
    return None if cap_uw is None else cap_uw / 1e6
