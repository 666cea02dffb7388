"""Executes guard commands on devices: journal, write, read back, report. Also reads boot and driver load ids.

May block on driver and disk, so it runs on the driver thread. Commands run in order. The journal holds every device
that the agent changed and what it showed before; while it cannot be written, later writes are skipped, but restores
need no journal. A device that does not answer is not called again in the same batch. The kernel renumbers the module
directory of a driver on each load, which identifies the load.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from eelgrid_agent.devices.host import BOOT_ID_FILE, read_boot_id
from eelgrid_agent.devices.port import (
    ControlPort,
    DeviceError,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownGpu,
)
from eelgrid_agent.enforce.guard.device_step import EXACT_TOLERANCE_W, plan_restore
from eelgrid_agent.enforce.guard.events import (
    AnnounceEvent,
    CommandFailure,
    CommandOutcome,
    DeviceCheck,
    DeviceRecord,
    DriverOrigin,
    GuardCommand,
    LockClocks,
    RestoreDevice,
    SetDeviceLimit,
    SetPowerProfile,
    SettingWrite,
    UnlockClocks,
    WriteJournal,
)
from eelgrid_agent.enforce.rules import GuardLimits
from eelgrid_agent.state_files import StateFileError, StateFormat, StateStore, require_text

# A record is under 1 kB and a node has 64 devices at most.
_BYTES_MOST = 262_144
_RECORDS_MOST = 256


def _plain(record: DeviceRecord) -> dict[str, Any]:
    return {
        "gpu_uuid": record.gpu_uuid,
        "boot_id": record.origin.boot_id,
        "driver_start": record.origin.driver_start,
        "found_w": record.found_w,
        "found_profile": record.found_profile,
        "limits_w": list(record.limits_w),
        "clocks": None if record.clocks is None else list(record.clocks),
        "profiles": list(record.profiles),
    }


def _decode(document: Mapping[str, Any]) -> tuple[DeviceRecord, ...]:
    devices = document["devices"]
    if not isinstance(devices, list) or len(devices) > _RECORDS_MOST:
        raise ValueError(f"devices is not a list of at most {_RECORDS_MOST}")
    records = tuple(_record(device) for device in devices)
    if len({record.gpu_uuid for record in records}) < len(records):
        raise ValueError("a device is listed twice")
    return records


def _record(plain: Any) -> DeviceRecord:
    if not isinstance(plain, Mapping):
        raise TypeError("a device is not an object")
    lock = plain["clocks"]
    clocks = None if lock is None else tuple(_whole(clock) for clock in lock)
    if clocks is not None and len(clocks) != 2:
        raise ValueError("clocks is not a pair")
    return DeviceRecord(
        gpu_uuid=require_text(plain["gpu_uuid"]),
        origin=DriverOrigin(boot_id=require_text(plain["boot_id"]), driver_start=require_text(plain["driver_start"])),
        found_w=None if plain["found_w"] is None else _watts(plain["found_w"]),
        found_profile=None if plain["found_profile"] is None else _whole(plain["found_profile"]),
        limits_w=tuple(_watts(limit) for limit in plain["limits_w"]),
        clocks=None if clocks is None else (clocks[0], clocks[1]),
        profiles=tuple(_whole(profile) for profile in plain["profiles"]),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a non-negative integer")
    return value


def _watts(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0.0:
        raise TypeError(f"{value!r} is not a power in watts")
    return float(value)


PowerJournal = StateStore[tuple[DeviceRecord, ...]]

POWER_JOURNAL: StateFormat[tuple[DeviceRecord, ...]] = StateFormat(
    title="journal of power settings",
    schema=1,
    encode=lambda records: {"devices": [_plain(record) for record in records]},
    decode=_decode,
    empty=tuple,
    bytes_most=_BYTES_MOST,
    damage_remedy=(
        "look up in it which devices were changed, put their limits back by hand (nvidia-smi -pl, -rgc), "
        "then start the agent again"
    ),
    write_consequence="nothing is set without it",
)


_FAILURES: tuple[tuple[type[DeviceError], CommandFailure], ...] = (
    (DriverUnavailable, CommandFailure.DRIVER),
    (GpuLostError, CommandFailure.LOST),
    (DeviceTimeout, CommandFailure.HUNG),
    (UnknownGpu, CommandFailure.UNKNOWN),
    (NotSupported, CommandFailure.NOT_SUPPORTED),
    (NoPermission, CommandFailure.NO_PERMISSION),
    (OutOfRange, CommandFailure.OUT_OF_RANGE),
)
_SILENT = frozenset((CommandFailure.DRIVER, CommandFailure.LOST, CommandFailure.HUNG, CommandFailure.UNKNOWN))


def _failure(error: DeviceError) -> CommandFailure:
    return next((failure for kind, failure in _FAILURES if isinstance(error, kind)), CommandFailure.DRIVER)


class PowerExecutor:
    """Executes the commands of the guard on one node's devices."""

    def __init__(
        self,
        control: ControlPort,
        journal: PowerJournal,
        *,
        origin: Callable[[], DriverOrigin],
        limits: GuardLimits | None = None,
    ) -> None:
        self._control = control
        self._journal = journal
        self._origin = origin
        self._limits = limits or GuardLimits()

    def read_origin(self) -> DriverOrigin:
        """Since when the devices remember."""
        return self._origin()

    def check_device(self, gpu_uuid: str, *, power_w: float | None, energy_counter_j: float | None) -> DeviceCheck:
        """One device read back; power and energy are from the look that is taken anyway."""
        settings, failure = None, None
        try:
            settings = self._control.power_settings(gpu_uuid)
        except DeviceError as error:
            failure = _failure(error)
        return DeviceCheck(
            gpu_uuid=gpu_uuid, settings=settings, failure=failure, power_w=power_w, energy_counter_j=energy_counter_j
        )

    def execute_commands(self, commands: Iterable[GuardCommand]) -> tuple[CommandOutcome, ...]:
        """What became of each command, in order."""
        outcomes: list[CommandOutcome] = []
        refusal = ""
        silent: dict[str, CommandOutcome] = {}
        for command in commands:
            match command:
                case WriteJournal(records=records):
                    refusal = self._store(records)
                    failure = CommandFailure.JOURNAL if refusal else None
                    outcomes.append(CommandOutcome(command=command, failure=failure, detail=refusal))
                case AnnounceEvent():
                    pass
                case _ if command.gpu_uuid in silent:
                    known = silent[command.gpu_uuid]
                    outcomes.append(CommandOutcome(command=command, failure=known.failure, detail=known.detail))
                case _:
                    outcome = (
                        self._restore(command) if isinstance(command, RestoreDevice) else self._write(command, refusal)
                    )
                    outcomes.append(outcome)
                    if outcome.failure in _SILENT:
                        silent[command.gpu_uuid] = outcome
        return tuple(outcomes)

    def load_journal(self) -> tuple[DeviceRecord, ...]:
        """The journal, for the guard's start; raises StateFileError."""
        return self._journal.load()

    def _store(self, records: tuple[DeviceRecord, ...]) -> str:
        try:
            self._journal.store(records)
        except StateFileError as error:
            return str(error)
        return ""

    def _write(self, command: SettingWrite, refusal: str) -> CommandOutcome:
        if refusal:
            return CommandOutcome(command=command, failure=CommandFailure.JOURNAL, detail=refusal)
        try:
            self._write_setting(command)
            settings = self._control.power_settings(command.gpu_uuid)
        except DeviceError as error:
            return CommandOutcome(command=command, failure=_failure(error), detail=str(error))
        problem = _untaken(command, settings, self._limits.tolerance_w)
        failure = CommandFailure.NOT_TAKEN if problem else None
        return CommandOutcome(command=command, failure=failure, detail=problem, settings=settings)

    def _restore(self, command: RestoreDevice) -> CommandOutcome:
        """Every part is tried, so that one that fails leaves only itself behind."""
        uuid, problems = command.gpu_uuid, list[str]()
        failure: CommandFailure | None = None
        try:
            settings = self._control.power_settings(uuid)
            unwinding = plan_restore(command.record, settings, self._origin(), tolerance_w=self._limits.tolerance_w)
            for write in unwinding.writes:
                try:
                    self._write_setting(write)
                except NotSupported as error:
                    if not isinstance(write, UnlockClocks):  # where no clock can be locked, none is
                        failure = CommandFailure.NOT_SUPPORTED
                        problems.append(str(error))
                except DeviceError as error:
                    failure = _failure(error)
                    problems.append(str(error))
                    if failure in _SILENT:
                        return CommandOutcome(command=command, failure=failure, detail=str(error))
            settings = self._control.power_settings(uuid)
        except DeviceError as error:
            return CommandOutcome(command=command, failure=_failure(error), detail=str(error))
        for write in unwinding.writes:
            problem = _untaken(write, settings, EXACT_TOLERANCE_W)
            if problem:
                failure = failure or CommandFailure.NOT_TAKEN
                problems.append(problem)
        if failure is not None:
            return CommandOutcome(command=command, failure=failure, detail="; ".join(problems), settings=settings)
        return CommandOutcome(command=command, detail=unwinding.detail, foreign=unwinding.foreign, settings=settings)

    def _write_setting(self, command: SettingWrite) -> None:
        match command:
            case SetDeviceLimit(gpu_uuid=uuid, limit_w=limit_w):
                self._control.set_power_limit(uuid, limit_w)
            case LockClocks(gpu_uuid=uuid, min_mhz=low, max_mhz=high):
                self._control.lock_sm_clocks(uuid, low, high)
            case UnlockClocks(gpu_uuid=uuid):
                self._control.unlock_sm_clocks(uuid)
            case SetPowerProfile(gpu_uuid=uuid, profile=profile):
                self._control.set_power_profile(uuid, profile)


def _untaken(command: SettingWrite, settings: PowerSettings, tolerance_w: float) -> str:
    """Why what is read back is not what was asked; a lock cannot be read back."""
    match command:
        case SetDeviceLimit(limit_w=limit_w) if settings.requested_w is None or (
            abs(settings.requested_w - limit_w) > tolerance_w
        ):
            shown = "nothing" if settings.requested_w is None else f"{settings.requested_w:g} W"
            return f"{limit_w:g} W were requested and the device shows {shown}"
        case SetPowerProfile(profile=profile) if settings.power_profile != profile:
            return f"power profile {profile} was requested and the device shows {settings.power_profile}"
        case _:
            return ""


_DRIVER = Path("/sys/module/nvidia")


def read_driver_origin(*, boot_id: Path = BOOT_ID_FILE, driver: Path = _DRIVER) -> DriverOrigin:
    """Reads the ids of the boot and of the driver load; call it in every cycle, since drivers can be reloaded."""
    try:
        start = str(driver.stat().st_ino)
    except OSError:
        start = ""
    return DriverOrigin(boot_id=read_boot_id(boot_id), driver_start=start)
