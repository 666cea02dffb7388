"""What the guard knows of one device, and what flapping and failing do to it.

Owns the state of one device and the small rules on it: quarantine, retries and
the count of repairs. Must not know plans, budgets or other devices.
"""

from dataclasses import dataclass, replace

from eelgrid_agent.device import PowerSettings
from eelgrid_agent.guard.events import Clocks, DeviceRecord, Failure, Wish
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_agent.refusal import Rule

__all__ = ["DeviceState", "Problem", "failed", "lose", "repair", "rule_of", "succeeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a device does not get what the plan wants."""

    rule: Rule
    detail: str


_NO_WISH = Wish()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """One device.

    `record` is on the disk; `proposed` is what the journal under way makes of
    it. While commands are under way `is_busy` holds and nothing else is asked.
    `limit_w`, `clocks` and `profile` are ours as last read back or asked; None
    is nothing of ours. `problems` are by field (bounds, limit, clocks, profile)
    and end what is asked of it; `note` is why the last attempt failed. `repaired`
    names the fields that the last turn set to repair. `is_reborn` says that the
    device came back and may have forgotten everything, `is_reset` that its
    energy counter fell, so that it has.
    """

    gpu_uuid: str
    wish: Wish = _NO_WISH
    gang: tuple[str, ...] = ()
    settings: PowerSettings | None = None
    failure: Failure | None = None
    power_w: float | None = None
    energy_counter_j: float | None = None
    record: DeviceRecord | None = None
    proposed: DeviceRecord | None = None
    limit_w: float | None = None
    clocks: Clocks | None = None
    profile: int | None = None
    is_busy: bool = False
    is_restoring: bool = False
    is_reborn: bool = False
    is_reset: bool = False
    is_lost: bool = False
    problems: tuple[tuple[str, Problem], ...] = ()
    note: Problem | None = None
    attempts: int = 0
    retry_ns: int = 0
    repairs_ns: tuple[int, ...] = ()
    repaired: tuple[str, ...] = ()
    suspended: str = ""
    clock_looks: int = 0
    capped_w: float | None = None
    losses_ns: tuple[int, ...] = ()
    quarantines_ns: tuple[int, ...] = ()
    quarantined_until_ns: int = 0

    def is_quarantined(self, now_ns: int) -> bool:
        """Whether it takes no new work and no settings."""
        return now_ns < self.quarantined_until_ns

    def problem(self, field: str) -> Problem | None:
        """What stands in the way of one field."""
        return next((problem for name, problem in self.problems if name == field), None)

    def with_problem(self, field: str, problem: Problem | None) -> "DeviceState":
        """The device with one field's problem set or cleared."""
        others = tuple((name, known) for name, known in self.problems if name != field)
        return replace(self, problems=others if problem is None else (*others, (field, problem)))


def _since(times_ns: tuple[int, ...], now_ns: int, window_s: float) -> tuple[int, ...]:
    return tuple(then_ns for then_ns in times_ns if now_ns - then_ns < window_s * 1e9)


def repair(device: DeviceState, fields: tuple[str, ...], now_ns: int, limits: GuardLimits) -> DeviceState | None:
    """The device with one more repair on its account; None when the account is used up."""
    repairs_ns = _since(device.repairs_ns, now_ns, limits.repair_window_s)
    if len(repairs_ns) >= limits.repairs_most:
        return None
    return replace(device, repairs_ns=(*repairs_ns, now_ns), repaired=fields)


def lose(device: DeviceState, now_ns: int, limits: GuardLimits) -> tuple[DeviceState, str]:
    """The device after a loss, and the word of a quarantine that begins with it."""
    losses_ns = (*_since(device.losses_ns, now_ns, limits.loss_window_s), now_ns)
    device = replace(device, is_lost=True, losses_ns=losses_ns)
    if len(losses_ns) < limits.losses_most:
        return device, ""
    earlier_ns = _since(device.quarantines_ns, now_ns, limits.quarantine_memory_s)
    span_s = min(limits.quarantine_s_most, limits.quarantine_s * 2.0 ** min(len(earlier_ns), 30))
    word = (
        f"lost {len(losses_ns)} times within {limits.loss_window_s:g} s: no new work and no settings for {span_s:g} s "
        f"(quarantine {len(earlier_ns) + 1} of the last {limits.quarantine_memory_s / 3600.0:g} h)"
    )
    following = replace(
        device,
        losses_ns=(),
        quarantines_ns=(*earlier_ns[-63:], now_ns),
        quarantined_until_ns=max(device.quarantined_until_ns, now_ns + int(span_s * 1e9)),
    )
    return following, word


def failed(device: DeviceState, now_ns: int, limits: GuardLimits) -> DeviceState:
    """One more attempt came to nothing: the next one waits longer."""
    delay_s = min(limits.retry_s_most, limits.retry_s * 2.0 ** min(device.attempts, 16))
    return replace(device, attempts=device.attempts + 1, retry_ns=now_ns + int(delay_s * 1e9))


def succeeded(device: DeviceState) -> DeviceState:
    """An attempt came through."""
    return device if device.attempts == 0 else replace(device, attempts=0, retry_ns=0, note=None)


def rule_of(failure: Failure) -> Rule:
    """The rule that a failure of the device falls under."""
    match failure:
        case Failure.NO_PERMISSION:
            return Rule.NO_PERMISSION
        case Failure.NOT_SUPPORTED:
            return Rule.NOT_SUPPORTED
        case Failure.OUT_OF_RANGE:
            return Rule.CONSTRAINTS
        case Failure.JOURNAL:
            return Rule.JOURNAL
        case Failure.UNKNOWN:
            return Rule.UNKNOWN_DEVICE
        case _:
            return Rule.DEVICE
