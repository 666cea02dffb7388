"""The device and control ports over a driver process, with batched reads in one round trip."""
# What crosses the processes is decoded by the table of calls, which mypy cannot see.
# mypy: no-warn-return-any

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from eelgrid_agent.devices.port import (
    SLOW_READINGS,
    CallLatencies,
    DeviceError,
    DeviceEvent,
    DeviceEventKind,
    DeviceInUse,
    DeviceLink,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    GpuProcess,
    InstanceReadings,
    Missing,
    ModeChange,
    PowerSettings,
    RawReadings,
    ReadingValue,
    UnknownGpu,
    make_silent_readings,
)
from eelgrid_agent.devices.process.protocol import MAX_OPERATIONS, PORT_CALLS
from eelgrid_agent.devices.process.supervisor import (
    CallDeadlines,
    DriverSupervisor,
    KillProcess,
    PortOperation,
    PortResult,
)
from eelgrid_agent.devices.process.watchdog import WatchdogLimits
from eelgrid_agent.devices.sampler import ExtendedReadings
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading

# Long enough for a device to hang, its child to be replaced and the others to be asked of the next one; a little less
# than what the schedule gives a look.
FAST_READ_BUDGET_S = 1.9
_LISTINGS_MOST = 2


_TIMED_OUT = make_silent_readings(AbsenceReason.TIMED_OUT)
_LOST = make_silent_readings(AbsenceReason.GPU_LOST)
_NOT_SAMPLED = make_silent_readings(AbsenceReason.NOT_SAMPLED)
_SLOW_TIMED_OUT: Mapping[Reading, ReadingValue] = dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.TIMED_OUT))


class RemoteDevice:
    """Device and Control in a child process; `factory` names what the child opens, `argument` is handed to it."""

    def __init__(
        self,
        factory: str,
        argument: str = "",
        *,
        deadlines: CallDeadlines | None = None,
        limits: WatchdogLimits | None = None,
        kill: KillProcess = os.kill,
    ) -> None:
        self._deadlines = deadlines or CallDeadlines()
        self._supervisor = DriverSupervisor(
            factory, argument, deadlines=self._deadlines, limits=limits or WatchdogLimits(), kill=kill
        )
        self._turn = threading.Lock()
        self._told_hung: frozenset[str] = frozenset()
        self._version = ""
        self._access = AccessLevel.UNSPECIFIED

    # Many at once

    def call_batch(self, operations: Sequence[PortOperation], budget_s: float | None = None) -> list[PortResult]:
        """What each (call, argument, ...) answered: its value or the DeviceError that it raised; one round trip."""
        assert len(operations) <= MAX_OPERATIONS, "no node has so many devices"
        if budget_s is None:
            paces = {PORT_CALLS[operation[0]].pace for operation in operations}
            # An earlier call may be under way, and a child may have to be started.
            budget_s = max(map(self._deadlines.get_deadline_s, paces), default=0.0) * 1.5 + FAST_READ_BUDGET_S
        if not self._turn.acquire(timeout=budget_s):
            return [DeviceTimeout("the driver's worker is busy with another call; retry")] * len(operations)
        try:
            return self._supervisor.call_batch(operations, budget_s)
        finally:
            self._turn.release()

    def read_gpus(
        self, uuids: Sequence[str], budget_s: float = FAST_READ_BUDGET_S
    ) -> tuple[tuple[str, RawReadings], ...]:
        """A quick look at each device, in one round trip."""
        results = self.call_batch([("read", uuid) for uuid in uuids], budget_s)
        return tuple((uuid, _readings_of(result)) for uuid, result in zip(uuids, results, strict=True))

    def read_extended(self, uuids: Sequence[str]) -> ExtendedReadings:
        """Reads the expensive values of each device in one round trip; times and host are for the caller to add."""
        calls = [(name, uuid) for uuid in uuids for name in ("read_slow", "read_instances", "processes")]
        *answers, events = self.call_batch([*calls, ("take_events",)])
        gpus, instances, processes = {}, {}, {}
        for index, uuid in enumerate(uuids):
            slow, parts, found = answers[3 * index : 3 * index + 3]
            if any(isinstance(one, DeviceError) for one in (slow, parts)):
                continue
            gpus[uuid], instances[uuid] = slow, parts
            processes[uuid] = None if isinstance(found, DeviceError) else found
        told = (*self._turns(), *(() if isinstance(events, DeviceError) else events))
        return ExtendedReadings(
            monotonic_ns=0, wall_ns=0, gpus=gpus, instances=instances, processes=processes, events=told
        )

    # Device

    def driver_version(self) -> str:
        """The driver's version; while it hangs, the one from before."""
        self._version = self._or_known(("driver_version",), self._version)
        return self._version

    def access(self) -> AccessLevel:
        """How much this user may do; while the driver hangs, as before."""
        self._access = self._or_known(("access",), self._access)
        return self._access

    def gpus(self) -> tuple[Gpu, ...]:
        """Every device that answers or answered before, by index; one that hangs is as it was last seen."""
        for _ in range(_LISTINGS_MOST):
            try:
                return self._supervisor.merge_listing(self._call("gpus"))
            except DeviceTimeout:
                # Whatever hung is set apart by now: the next listing passes it over, so that of the others none is old.
                if not self._supervisor.known:
                    raise
        return tuple(sorted(self._supervisor.known.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One quick look; a device that hangs reads Missing(TIMED_OUT) throughout."""
        try:
            return self._call("read", uuid)
        except DeviceTimeout:
            return _TIMED_OUT

    def read_slow(self, uuid: str) -> Mapping[Reading, ReadingValue]:
        """All of SLOW_READINGS; a device that hangs reads Missing(TIMED_OUT) throughout."""
        try:
            return self._call("read_slow", uuid)
        except DeviceTimeout:
            return _SLOW_TIMED_OUT

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance."""
        return self._call("read_instances", uuid)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device."""
        return self._call("processes", uuid)

    def topology(self) -> tuple[DeviceLink, ...]:
        """Every pair of devices."""
        return self._call("topology")

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """What was announced, and which devices hang or answer again; what an ended child held is lost with it."""
        try:
            found: tuple[DeviceEvent, ...] = self._call("take_events")
        except DeviceTimeout:
            found = ()
        return (*self._turns(), *found)

    def close(self) -> None:
        """Ends the children; the next call starts one again."""
        with self._turn:
            self._supervisor.close()

    # Control

    def power_settings(self, uuid: str) -> PowerSettings:
        """Limits and clocks as they are now."""
        return self._call("power_settings", uuid)

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a limit."""
        self._call("set_power_limit", uuid, limit_w)

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the SM clock inside."""
        self._call("lock_sm_clocks", uuid, min_mhz, max_mhz)

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Unlocks the SM clock."""
        self._call("unlock_sm_clocks", uuid)

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """Asks for a workload power profile, or for none."""
        self._call("set_power_profile", uuid, profile)

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """The profiles and placements that the driver offers."""
        return self._call("mig_geometry", uuid)

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode, with no session of this agent but the one that asks."""
        return self._call("set_mig_mode", uuid, enabled)

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance at exactly this place; returns its id."""
        return int(self._call("create_gpu_instance", uuid, profile_id, start))

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""
        self._call("destroy_gpu_instance", uuid, instance_id)

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance; returns its id."""
        return int(self._call("create_compute_instance", uuid, instance_id, profile_id))

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._call("destroy_compute_instance", uuid, instance_id, compute_id)

    # Of this adapter alone

    def release_sessions(self) -> None:
        """Closes every session, as a reset of a device needs; raises DeviceInUse where a hung child keeps one."""
        self._call("close")
        stuck = self._supervisor.watchdog.unkillable_processes
        if stuck:
            raise DeviceInUse(f"processes {sorted(stuck)} hang in the driver and cannot be ended; reboot the node")

    def order_simulation(self, *words: str) -> None:
        """Passes an order to simulated devices in the child."""
        self._call("order", *words)

    @property
    def latencies(self) -> CallLatencies:
        """Seconds in the driver, by call."""
        return self._supervisor.latencies

    @property
    def hung_gpus(self) -> tuple[str, ...]:
        """Devices that are asked by probes only."""
        apart = self._supervisor.watchdog.isolated_devices
        return tuple(uuid for uuid, gpu in self._supervisor.known.items() if gpu.index in apart)

    @property
    def hangs_total(self) -> int:
        """Calls that never came back and children that died, so far."""
        return self._supervisor.watchdog.hangs_total

    @property
    def starts_total(self) -> int:
        """Children started so far."""
        return self._supervisor.starts_total

    @property
    def unkillable_count(self) -> int:
        """Children that the kernel cannot end."""
        return len(self._supervisor.watchdog.unkillable_processes)

    @property
    def children(self) -> tuple[int, ...]:
        """Process ids of the running children."""
        return self._supervisor.children

    def _turns(self) -> tuple[DeviceEvent, ...]:
        """Devices that were found to hang since this was last asked, and those that answer again."""
        struck = set()
        while self._supervisor.struck:
            struck.add(self._supervisor.struck.popleft())
        hung = frozenset(self.hung_gpus)
        began = {uuid for uuid, gpu in self._supervisor.known.items() if gpu.index in struck} | (hung - self._told_hung)
        ended = (self._told_hung | began) - hung
        self._told_hung = hung
        told = [(uuid, DeviceEventKind.HUNG) for uuid in sorted(began)]
        told += [(uuid, DeviceEventKind.ANSWERS) for uuid in sorted(ended)]
        return tuple(DeviceEvent(kind=kind, gpu_uuid=uuid) for uuid, kind in told)

    def _call(self, name: str, *arguments: Any) -> PortResult:
        (result,) = self.call_batch([(name, *arguments)])
        if isinstance(result, DeviceError):
            raise result
        return result

    def _or_known(self, operation: PortOperation, known: Any) -> Any:
        """The answer, or where it is late what is known from before, if anything is."""
        try:
            return self._call(*operation)
        except DeviceTimeout:
            if not known:
                raise
            return known


def _readings_of(result: PortResult) -> RawReadings:
    if isinstance(result, DeviceTimeout):
        return _TIMED_OUT
    if isinstance(result, DriverUnavailable | GpuLostError | UnknownGpu):
        return _LOST
    if isinstance(result, DeviceError):
        return _NOT_SAMPLED
    look: RawReadings = result
    return look
