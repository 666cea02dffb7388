"""One control step of a device: drift, slew, clamp, and what to write; and how to restore a device.

The device is compared with the last value read back. Equal: go on towards the target. Different after a driver load,
boot or loss: start from the new values. Different otherwise: somebody else wrote; repaired a few times, then given
up. A restore puts back only what still shows one of our values; after a boot or driver load nothing of ours remains.
"""

from dataclasses import dataclass, replace

from eelgrid_agent.devices.port import PowerSettings
from eelgrid_agent.enforce.guard.device_state import DeviceState, SettingProblem, record_repair
from eelgrid_agent.enforce.guard.events import (
    ClockRange,
    DeviceRecord,
    DriverOrigin,
    LockClocks,
    SetDeviceLimit,
    SetPowerProfile,
    SettingWrite,
    UnlockClocks,
    WriteCause,
)
from eelgrid_agent.enforce.rules import GuardLimits, RefusalRule
from eelgrid_protos.messages import NodeEventKind

# Nearer than this no write can bring a limit: NVML counts milliwatts.
EXACT_TOLERANCE_W = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The writes in order, and in words what is put back and what is somebody else's now."""

    writes: tuple[SettingWrite, ...]
    detail: str
    foreign: str


def matches_own_limit(value_w: float | None, ours_w: tuple[float, ...], tolerance_w: float) -> bool:
    """Whether the limit is one of ours, as far as a driver that rounds lets us know."""
    return value_w is not None and any(abs(value_w - ours) <= tolerance_w for ours in ours_w)


def plan_restore(
    record: DeviceRecord, settings: PowerSettings, origin: DriverOrigin, *, tolerance_w: float
) -> RestorePlan:
    """See the module."""
    if record.origin != origin:
        since = "the machine booted" if record.origin.boot_id != origin.boot_id else "the driver was loaded anew"
        return RestorePlan(writes=(), detail=f"{since} and with it every setting of ours is gone", foreign="")
    uuid, writes, done, left = record.gpu_uuid, list[SettingWrite](), list[str](), list[str]()
    if record.limits_w and record.found_w is not None:
        now_w = settings.requested_w
        if now_w is not None and abs(now_w - record.found_w) <= EXACT_TOLERANCE_W:
            done.append(f"the power limit stands at {record.found_w:g} W as before")
        elif matches_own_limit(now_w, record.limits_w, tolerance_w):
            writes.append(SetDeviceLimit(gpu_uuid=uuid, limit_w=record.found_w, cause=WriteCause.RESTORE))
            done.append(f"power limit back from {now_w:g} W to {record.found_w:g} W")
        else:
            ours = " or ".join(f"{ours:g}" for ours in record.limits_w)
            shown = "no limit" if now_w is None else f"{now_w:g} W"
            left.append(f"the power limit shows {shown} where ours was {ours} W: somebody else's, left alone")
    if record.clocks is not None:
        writes.append(UnlockClocks(gpu_uuid=uuid, cause=WriteCause.RESTORE))
        done.append("SM clocks unlocked")
    # Who may not set profiles is not told which one stands.
    is_untold = not settings.power_profiles
    if record.profiles and (is_untold or settings.power_profile != record.found_profile):
        if is_untold or settings.power_profile in record.profiles:
            writes.append(SetPowerProfile(gpu_uuid=uuid, profile=record.found_profile, cause=WriteCause.RESTORE))
            done.append(f"power profile back from {settings.power_profile} to {record.found_profile}")
        else:
            left.append(f"power profile {settings.power_profile} is somebody else's, left alone")
    return RestorePlan(writes=tuple(writes), detail="; ".join(done), foreign="; ".join(left))


Announcement = tuple[NodeEventKind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitBounds:
    """Between what a limit may be asked, for this device and for its whole gang; a gang may have no such range."""

    low_w: float
    high_w: float

    @property
    def is_empty(self) -> bool:
        """Whether no limit suits every member."""
        return self.low_w > self.high_w


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """The device after its turn, what to write, whether to restore instead, and what to announce."""

    device: DeviceState
    writes: tuple[SettingWrite, ...] = ()
    is_restore: bool = False
    told: tuple[Announcement, ...] = ()


def get_target_limit_w(device: DeviceState, bounds: LimitBounds | None) -> float | None:
    """The limit that the plan wants, clamped; None when it wants none or the device takes none."""
    if device.wish.limit_w is None or bounds is None or device.problem("bounds") or device.problem("limit"):
        return None
    return min(max(device.wish.limit_w, bounds.low_w), bounds.high_w)


def step_device(
    device: DeviceState,
    bounds: LimitBounds | None,
    cap_w: float | None,
    *,
    origin: DriverOrigin,
    is_allowed: bool,
    now_ns: int,
    limits: GuardLimits,
) -> DeviceStep:
    """See the module; the device answers and nothing is under way with it.

    `is_allowed` is False where the device is to be let go: then, as when nothing is wanted, it is restored.
    """
    settings = device.settings
    assert settings is not None
    device, told = _forget_settings(device, settings, origin)
    device = _recognise(device, settings, limits)
    if device.suspended:
        return DeviceStep(device=device, is_restore=device.record is not None, told=told)
    device, drifted, words = _drift(device, settings, cap_w, now_ns, limits)
    told += words
    if device.suspended:
        return DeviceStep(device=device, is_restore=device.record is not None, told=told)
    device, words = _outside_cap(device, settings, limits)
    told += words
    device = _find_unsupported(device, settings, bounds)
    goal = get_target_limit_w(device, bounds) if is_allowed else None
    found_w = settings.requested_w if device.limit_w is None or device.record is None else device.record.found_w
    uncapped_w = found_w if goal is None else goal
    capped = cap_w is not None and uncapped_w is not None and cap_w < uncapped_w - EXACT_TOLERANCE_W and is_allowed
    want_w = cap_w if capped else goal
    clocks = _clocks(device, settings, limits) if is_allowed else None
    profile = device.wish.profile if is_allowed and device.problem("profile") is None else None
    if want_w is None and clocks is None and profile is None:
        return DeviceStep(device=device, is_restore=device.record is not None, told=told)
    waits_for_disk = device.note is not None and device.note.rule is RefusalRule.JOURNAL
    if now_ns < device.retry_ns and not (capped and waits_for_disk):  # a budget is kept as soon as the disk has room
        return DeviceStep(device=device, told=told)
    cause = drifted or WriteCause.PLAN
    writes: list[SettingWrite] = []
    step_w = _step_w(device, settings, want_w, found_w, limits, cap_w=cap_w if is_allowed else None)
    if step_w is not None:
        # A plan that wants still less than the budget leaves is reached by steps, from under the budget's limit on.
        by_budget = capped or step_w == cap_w
        limit_cause = WriteCause.RESTORE if want_w is None else WriteCause.BUDGET if by_budget else cause
        writes.append(SetDeviceLimit(gpu_uuid=device.gpu_uuid, limit_w=step_w, cause=limit_cause))
    if clocks is None and device.record is not None and device.record.clocks is not None:
        writes.append(UnlockClocks(gpu_uuid=device.gpu_uuid, cause=WriteCause.RESTORE))
    elif clocks is not None and clocks != device.clocks:
        writes.append(LockClocks(gpu_uuid=device.gpu_uuid, min_mhz=clocks[0], max_mhz=clocks[1], cause=cause))
    if profile is None and device.profile is not None and device.record is not None:
        before = device.record.found_profile
        writes.append(SetPowerProfile(gpu_uuid=device.gpu_uuid, profile=before, cause=WriteCause.RESTORE))
    elif profile is not None and settings.power_profile != profile:
        writes.append(SetPowerProfile(gpu_uuid=device.gpu_uuid, profile=profile, cause=cause))
    if writes:
        device = replace(device, proposed=_covering(device, settings, origin, tuple(writes)))
    return DeviceStep(device=device, writes=tuple(writes), told=told)


def _forget_settings(
    device: DeviceState, settings: PowerSettings, origin: DriverOrigin
) -> tuple[DeviceState, tuple[Announcement, ...]]:
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
        device,
        record=fresh,
        limit_w=device.limit_w if shows_ours else None,
        clocks=None,
        profile=device.profile if shows_profile else None,
        clock_looks=0,
        suspended="",
        energy_counter_j=None,
    )
    return forgot, () if device.suspended else ((NodeEventKind.SETTING_DRIFT, word),)


def _recognise(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> DeviceState:
    """A write that seemed to fail may have come through: what the record names and the device shows is ours."""
    record = device.record
    if record is None:
        return device
    now_w, held = settings.requested_w, () if device.limit_w is None else (device.limit_w,)
    if not matches_own_limit(now_w, held, limits.tolerance_w) and matches_own_limit(
        now_w, record.limits_w, limits.tolerance_w
    ):
        device = replace(device, limit_w=now_w)
    if settings.power_profile != device.profile and settings.power_profile in record.profiles:
        device = replace(device, profile=settings.power_profile)
    return device


def _drift(
    device: DeviceState, settings: PowerSettings, cap_w: float | None, now_ns: int, limits: GuardLimits
) -> tuple[DeviceState, WriteCause | None, tuple[Announcement, ...]]:
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
    repaired = record_repair(device, tuple(changes), now_ns, limits)
    if repaired is None:
        reason = (
            f"{what}: repaired {limits.repairs_most} times within {limits.repair_window_s:g} s, now left alone; find "
            f"who else sets this device, then plan without a setting for it and with it again"
        )
        return replace(device, suspended=reason), None, ((NodeEventKind.ENFORCEMENT_SUSPENDED, reason),)
    lock = None if "clocks" in changes else device.clocks
    word = f"{what}: repair {len(repaired.repairs_ns)} of {limits.repairs_most} in {limits.repair_window_s:g} s"
    repaired = replace(repaired, clocks=lock, clock_looks=0)
    return repaired, WriteCause.DRIFT, ((NodeEventKind.SETTING_DRIFT, word),)


def _watch_clock(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> DeviceState:
    """A lock shows only in the clock: well above it for some looks in a row, it is gone."""
    if device.clocks is None or settings.sm_clock_mhz is None:
        return device if device.clock_looks == 0 else replace(device, clock_looks=0)
    is_above = settings.sm_clock_mhz > device.clocks[1] + 2 * limits.clock_step_mhz
    looks = device.clock_looks + 1 if is_above else 0
    return device if looks == device.clock_looks else replace(device, clock_looks=looks)


def _outside_cap(
    device: DeviceState, settings: PowerSettings, limits: GuardLimits
) -> tuple[DeviceState, tuple[Announcement, ...]]:
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


def _find_unsupported(device: DeviceState, settings: PowerSettings, bounds: LimitBounds | None) -> DeviceState:
    """What this part cannot be asked for; other problems come from trying, and stay until the plan is new."""
    wish, limit = device.wish, None
    if wish.limit_w is not None and (settings.requested_w is None or bounds is None):
        detail = "the part does not tell its power limit, or not between what it may be set"
        limit = SettingProblem(rule=RefusalRule.NOT_SUPPORTED, detail=detail)
    elif wish.limit_w is not None and bounds is not None and bounds.is_empty:
        detail = f"no limit suits all of the gang: at least {bounds.low_w:g} W and at most {bounds.high_w:g} W"
        limit = SettingProblem(rule=RefusalRule.GANG, detail=detail)
    if limit != device.problem("bounds"):
        device = device.with_problem("bounds", limit)
    if wish.profile is not None and wish.profile not in settings.power_profiles and device.problem("profile") is None:
        offered = ", ".join(str(known) for known in settings.power_profiles) or "none"
        detail = f"power profile {wish.profile} is not offered; the part has {offered}"
        device = device.with_problem("profile", SettingProblem(rule=RefusalRule.NOT_SUPPORTED, detail=detail))
    return device


def _clocks(device: DeviceState, settings: PowerSettings, limits: GuardLimits) -> ClockRange | None:
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
    device: DeviceState,
    settings: PowerSettings,
    want_w: float | None,
    found_w: float | None,
    limits: GuardLimits,
    *,
    cap_w: float | None,
) -> float | None:
    """The next limit to ask, or None: straight back when it is let go, at once down to a cap, else a slewed step."""
    now_w = settings.requested_w
    if now_w is None:
        return None
    if want_w is None:
        is_due = device.limit_w is not None and found_w is not None and abs(now_w - found_w) > EXACT_TOLERANCE_W
        return found_w if is_due else None
    if abs(now_w - want_w) <= limits.tolerance_w:
        return None
    step_w = min(max(want_w, now_w - limits.slew_w), now_w + limits.slew_w)
    return step_w if cap_w is None else min(step_w, cap_w)


def _covering(
    device: DeviceState, settings: PowerSettings, origin: DriverOrigin, writes: tuple[SettingWrite, ...]
) -> DeviceRecord:
    """The record under which these writes may be made."""
    record = device.record or DeviceRecord(gpu_uuid=device.gpu_uuid, origin=origin)
    for write in writes:
        match write:
            case SetDeviceLimit(limit_w=limit_w):
                if not record.limits_w:
                    record = replace(record, found_w=settings.requested_w)
                held = () if device.limit_w is None else (device.limit_w,)
                record = replace(record, limits_w=(*held, limit_w))
            case LockClocks(min_mhz=low, max_mhz=high):
                record = replace(record, clocks=(low, high))
            case SetPowerProfile(profile=int(profile), cause=cause) if cause is not WriteCause.RESTORE:
                if not record.profiles:
                    record = replace(record, found_profile=settings.power_profile)
                held_profile = () if device.profile is None else (device.profile,)
                record = replace(record, profiles=(*held_profile, profile))
            case _:
                pass
    return record
