"""What the guard is told and what it orders: closed unions of frozen values.

Owns the words between the pure guard and the shell that carries its orders
out. Must not decide anything. Times are monotonic nanoseconds, except
`wall_ns`, which only stamps what is announced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from eelgrid_agent.device import PowerSettings
from eelgrid_protos.messages import NodeEvent

__all__ = [
    "Announce", "Cause", "Command", "DeviceRecord", "Event", "Executed", "Failure", "GpuCheck",
    "Journal", "LockClocks", "Origin", "Outcome", "PlanGone", "PlanInForce", "Restore", "SetLimit", "SetProfile",
    "Started", "Stopped", "Tick", "Turned", "UnlockClocks", "Wish", "Write",
]  # fmt: skip

Clocks = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Since when the devices remember: both change when the machine boots, the second when the driver is loaded."""

    boot_id: str = ""
    driver_start: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device in the journal: what it showed before us, and every value of ours that it may show now.

    `limits_w` holds the limit that stands and the one about to be asked, so
    that a crash on either side of a write finds its value here. Empty means
    that the field was never touched. A lock cannot be read back: `clocks` says
    that there may be one.
    """

    gpu_uuid: str
    origin: Origin
    found_w: float | None = None
    found_profile: int | None = None
    limits_w: tuple[float, ...] = ()
    clocks: Clocks | None = None
    profiles: tuple[int, ...] = ()


class Failure(Enum):
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


class Cause(Enum):
    """Why a setting is written."""

    PLAN = "plan"
    DRIFT = "drift"
    RELOAD = "reload"
    BUDGET = "budget"
    RESTORE = "restore"


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """Ask for a power limit and read it back."""

    gpu_uuid: str
    limit_w: float
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class LockClocks:
    """Ask for a range of SM clocks."""

    gpu_uuid: str
    min_mhz: int
    max_mhz: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlockClocks:
    """Let the SM clock go."""

    gpu_uuid: str
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SetProfile:
    """Ask for a workload power profile, or for none."""

    gpu_uuid: str
    profile: int | None
    cause: Cause


Write = SetLimit | LockClocks | UnlockClocks | SetProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Make this the whole journal, and carry out nothing that follows in the batch unless it is on the disk."""

    records: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Put back what still shows our value; leave the rest."""

    record: DeviceRecord

    @property
    def gpu_uuid(self) -> str:
        """The device."""
        return self.record.gpu_uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell the controller at once."""

    event: NodeEvent


Command = Write | Journal | Restore | Announce


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the plan wants of one device after the gang rule; None asks for nothing."""

    limit_w: float | None = None
    clocks: Clocks | None = None
    profile: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """A plan was taken or judged anew; without `enforce` there are no wishes.

    `gangs` names for every device of a gang all of its devices here.
    """

    wishes: Mapping[str, Wish] = field(default_factory=dict)
    gangs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    budget_w: float | None = None
    enforce: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGone:
    """The lease ran out: wishes end, the power budget stands (a circuit breaker knows no leases)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """One device as it was just read: settings or why not, and measured power where there is any."""

    gpu_uuid: str
    settings: PowerSettings | None = None
    failure: Failure | None = None
    power_w: float | None = None
    energy_counter_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One cycle: every device, read back."""

    now_ns: int
    wall_ns: int
    gpus: tuple[GpuCheck, ...]
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A device was lost, or came back."""

    gpu_uuid: str
    lost: bool
    now_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The agent begins; `records` is the journal of the run before, empty after a clean stop."""

    records: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one command: what the device shows after it, or why it failed.

    `detail` of a restore says what was put back, `foreign` what was left because somebody else had changed it.
    """

    command: Command
    failure: Failure | None = None
    detail: str = ""
    foreign: str = ""
    settings: PowerSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A batch of commands was carried out."""

    now_ns: int
    wall_ns: int
    outcomes: tuple[Outcome, ...]


Event = PlanInForce | PlanGone | Tick | Turned | Started | Stopped | Executed
