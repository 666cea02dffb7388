"""The guard's orders carried out on devices: asked, read back, and told as they came out.

Owns the calls to the control port and to the journal, and their order. Must not
decide what is set, nor when. It may block on a driver and on a disk, so it
lives where the driver is asked, on one thread.

Theory. A batch is carried out in order. A journal that cannot be written ends
the writes that were to follow, up to the next journal that can; what puts back
needs no journal, for it is in there already. A device that does not answer once
is not asked again in the batch. Nothing counts as set because the driver took
it: what the device shows afterwards does.
"""

from collections.abc import Callable, Iterable

from eelgrid_agent.device import (
    Control,
    DeviceError,
    DeviceTimeout,
    DriverUnavailable,
    GpuLost,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownGpu,
)
from eelgrid_agent.guard.events import (
    Announce,
    Command,
    DeviceRecord,
    Failure,
    GpuCheck,
    Journal,
    LockClocks,
    Origin,
    Outcome,
    Restore,
    SetLimit,
    SetProfile,
    UnlockClocks,
    Write,
)
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_agent.guard.unwinding import EXACT_W, unwind
from eelgrid_agent.power.journal import JournalError, SettingsJournal

__all__ = ["Enforcer"]

_FAILURES: tuple[tuple[type[DeviceError], Failure], ...] = (
    (DriverUnavailable, Failure.DRIVER),
    (GpuLost, Failure.LOST),
    (DeviceTimeout, Failure.HUNG),
    (UnknownGpu, Failure.UNKNOWN),
    (NotSupported, Failure.NOT_SUPPORTED),
    (NoPermission, Failure.NO_PERMISSION),
    (OutOfRange, Failure.OUT_OF_RANGE),
)
_SILENT = frozenset((Failure.DRIVER, Failure.LOST, Failure.HUNG, Failure.UNKNOWN))


def _failure(error: DeviceError) -> Failure:
    return next((failure for kind, failure in _FAILURES if isinstance(error, kind)), Failure.DRIVER)


class Enforcer:
    """See the module."""

    def __init__(
        self, control: Control, journal: SettingsJournal, *, origin: Callable[[], Origin],
        limits: GuardLimits | None = None,
    ) -> None:  # fmt: skip
        self._control = control
        self._journal = journal
        self._origin = origin
        self._limits = limits or GuardLimits()

    def origin(self) -> Origin:
        """Since when the devices remember."""
        return self._origin()

    def check(self, gpu_uuid: str, *, power_w: float | None, energy_counter_j: float | None) -> GpuCheck:
        """One device read back; power and energy are from the look that is taken anyway."""
        settings, failure = None, None
        try:
            settings = self._control.power_settings(gpu_uuid)
        except DeviceError as error:
            failure = _failure(error)
        return GpuCheck(
            gpu_uuid=gpu_uuid, settings=settings, failure=failure, power_w=power_w, energy_counter_j=energy_counter_j
        )  # fmt: skip

    def execute(self, commands: Iterable[Command]) -> tuple[Outcome, ...]:
        """What became of each command, in order."""
        outcomes: list[Outcome] = []
        refusal = ""
        silent: dict[str, Outcome] = {}
        for command in commands:
            match command:
                case Journal(records=records):
                    refusal = self._store(records)
                    failure = Failure.JOURNAL if refusal else None
                    outcomes.append(Outcome(command=command, failure=failure, detail=refusal))
                case Announce():
                    pass
                case _ if command.gpu_uuid in silent:
                    known = silent[command.gpu_uuid]
                    outcomes.append(Outcome(command=command, failure=known.failure, detail=known.detail))
                case _:
                    outcome = self._restore(command) if isinstance(command, Restore) else self._write(command, refusal)
                    outcomes.append(outcome)
                    if outcome.failure in _SILENT:
                        silent[command.gpu_uuid] = outcome
        return tuple(outcomes)

    def load(self) -> tuple[DeviceRecord, ...]:
        """The journal, for the guard's start; raises JournalError."""
        return self._journal.load()

    def _store(self, records: tuple[DeviceRecord, ...]) -> str:
        try:
            self._journal.store(records)
        except JournalError as error:
            return str(error)
        return ""

    def _write(self, command: Write, refusal: str) -> Outcome:
        if refusal:
            return Outcome(command=command, failure=Failure.JOURNAL, detail=refusal)
        try:
            self._ask(command)
            settings = self._control.power_settings(command.gpu_uuid)
        except DeviceError as error:
            return Outcome(command=command, failure=_failure(error), detail=str(error))
        problem = _untaken(command, settings, self._limits.tolerance_w)
        failure = Failure.NOT_TAKEN if problem else None
        return Outcome(command=command, failure=failure, detail=problem, settings=settings)

    def _restore(self, command: Restore) -> Outcome:
        """Every part is tried, so that one that fails leaves only itself behind."""
        uuid, problems = command.gpu_uuid, list[str]()
        failure: Failure | None = None
        try:
            settings = self._control.power_settings(uuid)
            unwinding = unwind(command.record, settings, self._origin(), tolerance_w=self._limits.tolerance_w)
            for write in unwinding.writes:
                try:
                    self._ask(write)
                except NotSupported as error:
                    if not isinstance(write, UnlockClocks):  # where no clock can be locked, none is
                        failure = Failure.NOT_SUPPORTED
                        problems.append(str(error))
                except DeviceError as error:
                    failure = _failure(error)
                    problems.append(str(error))
                    if failure in _SILENT:
                        return Outcome(command=command, failure=failure, detail=str(error))
            settings = self._control.power_settings(uuid)
        except DeviceError as error:
            return Outcome(command=command, failure=_failure(error), detail=str(error))
        for write in unwinding.writes:
            problem = _untaken(write, settings, EXACT_W)
            if problem:
                failure = failure or Failure.NOT_TAKEN
                problems.append(problem)
        if failure is not None:
            return Outcome(command=command, failure=failure, detail="; ".join(problems), settings=settings)
        return Outcome(command=command, detail=unwinding.detail, foreign=unwinding.foreign, settings=settings)

    def _ask(self, command: Write) -> None:
        match command:
            case SetLimit(gpu_uuid=uuid, limit_w=limit_w):
                self._control.set_power_limit(uuid, limit_w)
            case LockClocks(gpu_uuid=uuid, min_mhz=low, max_mhz=high):
                self._control.lock_sm_clocks(uuid, low, high)
            case UnlockClocks(gpu_uuid=uuid):
                self._control.unlock_sm_clocks(uuid)
            case SetProfile(gpu_uuid=uuid, profile=profile):
                self._control.set_power_profile(uuid, profile)


def _untaken(command: Write, settings: PowerSettings, tolerance_w: float) -> str:
    """Why what is read back is not what was asked; a lock cannot be read back."""
    match command:
        case SetLimit(limit_w=limit_w) if settings.requested_w is None or (
            abs(settings.requested_w - limit_w) > tolerance_w
        ):
            shown = "nothing" if settings.requested_w is None else f"{settings.requested_w:g} W"
            return f"{limit_w:g} W were asked and the device shows {shown}"
        case SetProfile(profile=profile) if settings.power_profile != profile:
            return f"power profile {profile} was asked and the device shows {settings.power_profile}"
        case _:
            return ""
