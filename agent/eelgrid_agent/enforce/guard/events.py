"""Events and commands of the guard: closed unions of frozen values.

Times are monotonic nanoseconds, except `wall_ns`, which only stamps announcements.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from eelgrid_agent.devices.port import PowerSettings
from eelgrid_protos.messages import NodeEvent
from eelgrid_protos.values import dataclass

ClockRange = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOrigin:
    """Since when the devices remember: both change when the machine boots, the second when the driver is loaded."""

    boot_id: str = ""
    driver_start: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device in the journal: what it showed before the agent, and every value of the agent that it may show now.

    `limits_w` holds the limit in force and the one about to be written, so that a crash on either side of a write finds
    its value here. Empty means that the field was never touched. A lock cannot be read back: `clocks` means that there
    may be one.
    """

    gpu_uuid: str
    origin: DriverOrigin
    found_w: float | None = None
    found_profile: int | None = None
    limits_w: tuple[float, ...] = ()
    clocks: ClockRange | None = None
    profiles: tuple[int, ...] = ()


class CommandFailure(Enum):
    """How asking a device failed; the device port's errors, as a value."""

    LOST = "lost"
    HUNG = "hung"
    UNKNOWN = "unknown"
    NO_PERMISSION = "no permission"
    NOT_SUPPORTED = "not supported"
    OUT_OF_RANGE = "out of range"
    NOT_TAKEN = "not taken"
    JOURNAL = "journal"
    DRIVER = "driver"


class WriteCause(Enum):
    """Why a setting is written."""

    PLAN = "plan"
    DRIFT = "drift"
    RELOAD = "reload"
    BUDGET = "budget"
    RESTORE = "restore"


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeviceLimit:
    """Ask for a power limit and read it back."""

    gpu_uuid: str
    limit_w: float
    cause: WriteCause


@dataclass(frozen=True, slots=True, kw_only=True)
class LockClocks:
    """Ask for a range of SM clocks."""

    gpu_uuid: str
    min_mhz: int
    max_mhz: int
    cause: WriteCause


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlockClocks:
    """Let the SM clock go."""

    gpu_uuid: str
    cause: WriteCause


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPowerProfile:
    """Ask for a workload power profile, or for none."""

    gpu_uuid: str
    profile: int | None
    cause: WriteCause


SettingWrite = SetDeviceLimit | LockClocks | UnlockClocks | SetPowerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJournal:
    """Make this the whole journal, and carry out nothing that follows in the batch unless it is on the disk."""

    records: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreDevice:
    """Put back what still shows our value; leave the rest."""

    record: DeviceRecord

    @property
    def gpu_uuid(self) -> str:
        """The device."""
        return self.record.gpu_uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceEvent:
    """Sends an event to the controller at once."""

    event: NodeEvent


GuardCommand = SettingWrite | WriteJournal | RestoreDevice | AnnounceEvent


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredSettings:
    """What the plan wants of one device after the gang rule; None asks for nothing."""

    limit_w: float | None = None
    clocks: ClockRange | None = None
    profile: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHold:
    """What a job of another engine, which alone holds the whole device, asks of it.

    `limit_w` is in force until the job ends, beside the plan's: the lower one counts. `workload` is what a plan calls the job,
    without its restart: the limit that it plans for the job is this device's, whichever it had expected. With `owns_clocks` the job
    sets clocks of its own, so the device gets neither limit nor clocks nor profile from a plan.
    """

    job: str
    workload: str = ""
    limit_w: float | None = None
    owns_clocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """A plan was accepted or evaluated again; without `enforce` it has no desired settings.

    `gangs` maps every device of a gang to all of its devices on this node.
    """

    wishes: Mapping[str, DesiredSettings] = field(default_factory=dict)
    gangs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    budget_w: float | None = None
    enforce: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExpired:
    """The lease expired: desired settings end, the power budget stays (a circuit breaker knows no leases)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """One device as it was just read: settings or why not, and measured power where there is any."""

    gpu_uuid: str
    settings: PowerSettings | None = None
    failure: CommandFailure | None = None
    power_w: float | None = None
    energy_counter_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardTick:
    """One cycle: every device, read back."""

    now_ns: int
    wall_ns: int
    gpus: tuple[DeviceCheck, ...]
    origin: DriverOrigin = field(default_factory=DriverOrigin)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLossChanged:
    """A device was lost, or came back."""

    gpu_uuid: str
    lost: bool
    now_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStarted:
    """The agent started; `records` is the journal of the previous run, empty after a clean stop."""

    records: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStopped:
    """The agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """The outcome of one command: what the device shows after it, or why it failed.

    `detail` of a restore says what was restored, `foreign` what was left because another program had changed it.
    """

    command: GuardCommand
    failure: CommandFailure | None = None
    detail: str = ""
    foreign: str = ""
    settings: PowerSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsExecuted:
    """A batch of commands was carried out."""

    now_ns: int
    wall_ns: int
    outcomes: tuple[CommandOutcome, ...]


GuardEvent = PlanInForce | PlanExpired | GuardTick | DeviceLossChanged | GuardStarted | GuardStopped | CommandsExecuted
