"""One device's turn in a cycle: from what it shows and what is wanted to the writes that are due.

Owns drift, reload, slew, clamp and the tolerance of clocks. Must not know
plans, the budget's arithmetic or other devices: the cap and the gang's
constraints are arguments.

Theory. What the device shows is held against what was last read back of ours.
The same: go on towards the goal. Different after a driver load, a boot or a
loss: the device forgot, what it came up with is what will be put back, and we
begin anew. Different without: somebody else wrote, which is repaired a few
times and then given up for good, for two programs that fight over a limit harm
the work more than either limit. Only the record that the journal holds may be
written against, so every turn that writes proposes the record that covers it.
"""

from dataclasses import dataclass, replace

from eelgrid_agent.device import PowerSettings
from eelgrid_agent.guard.device_state import DeviceState, Problem, repair
from eelgrid_agent.guard.events import (
    Cause,
    Clocks,
    DeviceRecord,
    LockClocks,
    Origin,
    SetLimit,
    SetProfile,
    UnlockClocks,
    Write,
)  # fmt: skip
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_agent.guard.unwinding import EXACT_W, shows
from eelgrid_agent.refusal import Rule
from eelgrid_protos.messages import NodeEventKind

__all__ = ["Bounds", "Turn", "goal_w", "take_turn"]

Told = tuple[NodeEventKind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between what a limit may be asked, for this device and for its whole gang; a gang may have no such range."""

    low_w: float
    high_w: float

    @property
    def is_empty(self) -> bool:
        """Whether no limit suits every member."""
        return self.low_w > self.high_w


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The device after its turn, what to write, whether to restore instead, and what to announce."""

    device: DeviceState
    writes: tuple[Write, ...] = ()
    is_restore: bool = False
    told: tuple[Told, ...] = ()


def goal_w(device: DeviceState, bounds: Bounds | None) -> float | None:
    """The limit that the plan wants, clamped; None when it wants none or the device takes none."""
    if device.wish.limit_w is None or bounds is None or device.problem("bounds") or device.problem("limit"):
        return None
    return min(max(device.wish.limit_w, bounds.low_w), bounds.high_w)


def take_turn(
    device: DeviceState, bounds: Bounds | None, cap_w: float | None, *, origin: Origin, is_allowed: bool, now_ns: int,
    limits: GuardLimits,
) -> Turn:  # fmt: skip
    """See the module; the device answers and nothing is under way with it.

    `is_allowed` is False where the device is to be let go: then, as when nothing is wanted, it is restored.
    """
    settings = device.settings
    assert settings is not None
    device, told = _forget(device, settings, origin)
    device = _recognise(device, settings, limits)
    if device.suspended:
        return Turn(device=device, is_restore=device.record is not None, told=told)
    device, drifted, words = _drift(device, settings, cap_w, now_ns, limits)
    told += words
    if device.suspended:
        return Turn(device=device, is_restore=device.record is not None, told=told)
    device, words = _outside_cap(device, settings, limits)
    told += words
    device = _judge(device, settings, bounds)
    goal = goal_w(device, bounds) if is_allowed else None
    found_w = settings.requested_w if device.limit_w is None or device.record is None else device.record.found_w
    uncapped_w = found_w if goal is None else goal
    capped = cap_w is not None and uncapped_w is not None and cap_w < uncapped_w - EXACT_W and is_allowed
    want_w = cap_w if capped else goal
    clocks = _clocks(device, settings, limits) if is_allowed else None
    profile = device.wish.profile if is_allowed and device.problem("profile") is None else None
    if want_w is None and clocks is None and profile is None:
        return Turn(device=device, is_restore=device.record is not None, told=told)
    waits_for_disk = device.note is not None and device.note.rule is Rule.JOURNAL
    if now_ns < device.retry_ns and not (capped and waits_for_disk):  # a budget is kept as soon as the disk has room
        return Turn(device=device, told=told)
    cause = drifted or Cause.PLAN
    writes: list[Write] = []
    step_w = _step_w(device, settings, want_w, found_w, limits, cap_w=cap_w if is_allowed else None)
    if step_w is not None:
        # A plan that wants still less than the budget leaves is reached by steps, from under the budget's limit on.
        by_budget = capped or step_w == cap_w
        limit_cause = Cause.RESTORE if want_w is None else Cause.BUDGET if by_budget else cause
        writes.append(SetLimit(gpu_uuid=device.gpu_uuid, limit_w=step_w, cause=limit_cause))
    if clocks is None and device.record is not None and device.record.clocks is not None:
        writes.append(UnlockClocks(gpu_uuid=device.gpu_uuid, cause=Cause.RESTORE))
    elif clocks is not None and clocks != device.clocks:
        writes.append(LockClocks(gpu_uuid=device.gpu_uuid, min_mhz=clocks[0], max_mhz=clocks[1], cause=cause))
    if profile is None and device.profile is not None and device.record is not None:
        before = device.record.found_profile
        writes.append(SetProfile(gpu_uuid=device.gpu_uuid, profile=before, cause=Cause.RESTORE))
    elif profile is not None and settings.power_profile != profile:
        writes.append(SetProfile(gpu_uuid=device.gpu_uuid, profile=profile, cause=cause))
    if writes:
        device = replace(device, proposed=_covering(device, settings, origin, tuple(writes)))
    return Turn(device=device, writes=tuple(writes), told=told)


def _forget(device: DeviceState, settings: PowerSettings, origin: Origin) -> tuple[DeviceState, tuple[Told, ...]]:
    """A device whose driver began anew holds nothing of ours; what it came up with is the new ground."""
    record, reborn, reset = device.record, device.is_reborn, device.is_reset
    device = replace(device, is_reborn=False, is_reset=False)
    if record is None or (record.origin == origin and not reborn):
        return device, ()
    shows_ours = device.limit_w is not None and settings.requested_w == device.limit_w
    if record.origin == origin and not reset and shows_ours and device.energy_counter_j is not None:
        # It came back and kept the limit; whether it kept its lock cannot be read, so it is locked again.
        return replace(device, clocks=None, profile=None), ()
    word = "the driver or the device began anew and forgot what was set; it is set again"
    # A counter may be older than the settings beside it, so what shows ours may have been written since; before it
    # there were defaults. A lock does not show: unless the driver is another, there may be one.
    shows_profile = device.profile is not None and settings.power_profile == device.profile
    fresh = DeviceRecord(
        gpu_uuid=device.gpu_uuid,
        origin=origin,
        found_w=settings.default_w if shows_ours else None,
        limits_w=(device.limit_w,) if device.limit_w is not None and shows_ours else (),
        clocks=record.clocks if record.origin == origin else None,
        profiles=(device.profile,) if device.profile is not None and shows_profile else (),
    )
    # And it must not tell of the same beginning once more.
    forgot = replace(
        device, record=fresh, limit_w=device.limit_w if shows_ours else None, clocks=None,
        profile=device.profile if shows_profile else None, clock_looks=0, suspended="", energy_counter_j=None,
    )  # fmt: skip
    return forgot, () if device.suspended else ((NodeEventKind.SETTING_DRIFT, word),)


def _recognise(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> DeviceState:
    """A write that seemed to fail may have come through: what the record names and the device shows is ours."""
    record = device.record
    if record is None:
        return device
    now_w, held = settings.requested_w, () if device.limit_w is None else (device.limit_w,)
    if not shows(now_w, held, limits.tolerance_w) and shows(now_w, record.limits_w, limits.tolerance_w):
        device = replace(device, limit_w=now_w)
    if settings.power_profile != device.profile and settings.power_profile in record.profiles:
        device = replace(device, profile=settings.power_profile)
    return device


def _drift(
    device: DeviceState, settings: PowerSettings, cap_w: float | None, now_ns: int, limits: GuardLimits
) -> tuple[DeviceState, Cause | None, tuple[Told, ...]]:
    """What somebody else changed: repaired on account, or given up."""
    changes: dict[str, str] = {}
    now_w, ours_w = settings.requested_w, device.limit_w
    if ours_w is not None and (now_w is None or abs(now_w - ours_w) > limits.tolerance_w):
        shown = "none" if now_w is None else f"{now_w:g} W"
        if device.wish.limit_w is None and now_w is not None and (cap_w is None or now_w <= cap_w):
            # Only the budget held this device, and somebody holds it lower: the limit is theirs.
            record = None if device.record is None else replace(device.record, limits_w=())
            device = replace(device, limit_w=None, record=record)
        else:
            changes["limit"] = f"power limit {ours_w:g} W was changed to {shown}"
    if device.profile is not None and settings.power_profiles and settings.power_profile != device.profile:
        changes["profile"] = f"power profile {device.profile} was changed to {settings.power_profile}"
    device = _watch_clock(device, settings, limits)
    if device.clock_looks >= limits.clock_looks and device.clocks is not None:
        runs = f"the SM clock runs at {settings.sm_clock_mhz} MHz above its lock at {device.clocks[1]} MHz"
        changes["clocks"] = runs
    if not changes:
        return device, None, ()
    what = "; ".join(changes.values())
    repaired = repair(device, tuple(changes), now_ns, limits)
    if repaired is None:
        reason = (
            f"{what}: repaired {limits.repairs_most} times within {limits.repair_window_s:g} s, now left alone; find "
            f"who else sets this device, then plan without a setting for it and with it again"
        )
        return replace(device, suspended=reason), None, ((NodeEventKind.ENFORCEMENT_SUSPENDED, reason),)
    lock = None if "clocks" in changes else device.clocks
    word = f"{what}: repair {len(repaired.repairs_ns)} of {limits.repairs_most} in {limits.repair_window_s:g} s"
    repaired = replace(repaired, clocks=lock, clock_looks=0)
    return repaired, Cause.DRIFT, ((NodeEventKind.SETTING_DRIFT, word),)


def _watch_clock(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> DeviceState:
    """A lock shows only in the clock: well above it for some looks in a row, it is gone."""
    if device.clocks is None or settings.sm_clock_mhz is None:
        return device if device.clock_looks == 0 else replace(device, clock_looks=0)
    is_above = settings.sm_clock_mhz > device.clocks[1] + 2 * limits.clock_step_mhz
    looks = device.clock_looks + 1 if is_above else 0
    return device if looks == device.clock_looks else replace(device, clock_looks=looks)


def _outside_cap(
    device: DeviceState, settings: PowerSettings, limits: GuardLimits
) -> tuple[DeviceState, tuple[Told, ...]]:
    """A limit enforced below the one that is asked comes from outside the host: told once, never fought."""
    asked_w, enforced_w = settings.requested_w, settings.enforced_w
    if asked_w is None or enforced_w is None or enforced_w >= asked_w - limits.tolerance_w:
        return device if device.capped_w is None else replace(device, capped_w=None), ()
    known_w = device.capped_w
    if known_w is not None and abs(known_w - enforced_w) <= limits.tolerance_w:
        return device, ()
    word = f"{enforced_w:g} W are enforced where {asked_w:g} W are asked: capped from outside the host, left so"
    told = () if device.limit_w is None else ((NodeEventKind.SETTING_DRIFT, word),)
    return (replace(device, capped_w=enforced_w) if told else device), told


def _judge(device: DeviceState, settings: PowerSettings, bounds: Bounds | None) -> DeviceState:
    """What this part cannot be asked for; other problems come from trying, and stay until the plan is new."""
    wish, limit = device.wish, None
    if wish.limit_w is not None and (settings.requested_w is None or bounds is None):
        detail = "the part does not tell its power limit, or not between what it may be set"
        limit = Problem(rule=Rule.NOT_SUPPORTED, detail=detail)
    elif wish.limit_w is not None and bounds is not None and bounds.is_empty:
        detail = f"no limit suits all of the gang: at least {bounds.low_w:g} W and at most {bounds.high_w:g} W"
        limit = Problem(rule=Rule.GANG, detail=detail)
    if limit != device.problem("bounds"):
        device = device.with_problem("bounds", limit)
    if wish.profile is not None and wish.profile not in settings.power_profiles and device.problem("profile") is None:
        offered = ", ".join(str(known) for known in settings.power_profiles) or "none"
        detail = f"power profile {wish.profile} is not offered; the part has {offered}"
        device = device.with_problem("profile", Problem(rule=Rule.NOT_SUPPORTED, detail=detail))
    return device


def _clocks(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> Clocks | None:
    """The lock that the plan wants, on the device's own steps; a step off what is locked is no difference."""
    wish = device.wish.clocks
    if wish is None or device.problem("clocks") is not None:
        return None
    steps = settings.sm_clocks_mhz
    if steps:
        low, high = (min(steps, key=lambda step: (abs(step - end), step)) for end in wish)
    else:
        low, high = wish
    held = device.clocks
    if held is not None and all(
        abs(one - other) <= limits.clock_step_mhz for one, other in zip((low, high), held, strict=True)
    ):
        return held
    return low, high


def _step_w(
    device: DeviceState, settings: PowerSettings, want_w: float | None, found_w: float | None, limits: GuardLimits,
    *, cap_w: float | None,
) -> float | None:  # fmt: skip
    """The next limit to ask, or None: straight back when it is let go, at once down to a cap, else a slewed step."""
    now_w = settings.requested_w
    if now_w is None:
        return None
    if want_w is None:
        is_due = device.limit_w is not None and found_w is not None and abs(now_w - found_w) > EXACT_W
        return found_w if is_due else None
    if abs(now_w - want_w) <= limits.tolerance_w:
        return None
    step_w = min(max(want_w, now_w - limits.slew_w), now_w + limits.slew_w)
    return step_w if cap_w is None else min(step_w, cap_w)


def _covering(device: DeviceState, settings: PowerSettings, origin: Origin, writes: tuple[Write, ...]) -> DeviceRecord:
    """The record under which these writes may be made."""
    record = device.record or DeviceRecord(gpu_uuid=device.gpu_uuid, origin=origin)
    for write in writes:
        match write:
            case SetLimit(limit_w=limit_w):
                if not record.limits_w:
                    record = replace(record, found_w=settings.requested_w)
                held = () if device.limit_w is None else (device.limit_w,)
                record = replace(record, limits_w=(*held, limit_w))
            case LockClocks(min_mhz=low, max_mhz=high):
                record = replace(record, clocks=(low, high))
            case SetProfile(profile=int(profile), cause=cause) if cause is not Cause.RESTORE:
                if not record.profiles:
                    record = replace(record, found_profile=settings.power_profile)
                held_profile = () if device.profile is None else (device.profile,)
                record = replace(record, profiles=(*held_profile, profile))
            case _:
                pass
    return record
