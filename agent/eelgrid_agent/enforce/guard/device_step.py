"""State of one device under the guard, and one control step: drift, slew, clamp, what to write, how to restore.

A step compares the device with the last value read back. Equal: go on towards the target. Different after a driver
load, boot or loss: start from the new values. Different otherwise: another program wrote; the setting is repaired a few
times, then given up. A restore puts back only what still shows a value of the agent; after a boot or driver load
nothing of the agent remains on the device.

The state covers quarantine, retries, repairs and the outcomes of commands. After a write, whatever the device shows
counts as the agent's value, since drivers round. A write that failed may have taken effect, so its value stays in the
record until a restore. A permanent failure ends the field until the next plan; any other is retried with backoff.
"""

from collections.abc import Mapping
from dataclasses import replace

from eelgrid_agent.devices.port import PowerSettings
from eelgrid_agent.enforce.guard.events import (
    AnnounceEvent,
    ClockRange,
    CommandFailure,
    CommandOutcome,
    CommandsExecuted,
    DesiredSettings,
    DeviceRecord,
    DriverOrigin,
    LockClocks,
    RestoreDevice,
    SetDeviceLimit,
    SetPowerProfile,
    SettingWrite,
    UnlockClocks,
    WriteCause,
    WriteJournal,
)
from eelgrid_agent.enforce.rules import GuardLimits, RefusalRule
from eelgrid_protos.messages import NodeEventKind
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """Why a device does not get what the plan wants."""

    rule: RefusalRule
    detail: str


_NO_WISH = DesiredSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """The guard's state of one device.

    `record` is on the disk; `proposed` is what the journal entry in progress makes of it. While commands are in
    progress `is_busy` holds and the device gets no others. `limit_w`, `clocks` and `profile` are the agent's values as
    last read back or requested; None where it set nothing. `problems` are by field (bounds, limit, clocks, profile) and
    end the attempts on that field; `note` is why the last attempt failed. `repaired` names the fields that the last
    step set out to repair. `is_reborn` marks a device that returned and may have lost its settings, `is_reset` one
    whose energy counter fell, so that it has.
    """

    gpu_uuid: str
    wish: DesiredSettings = _NO_WISH
    gang: tuple[str, ...] = ()
    settings: PowerSettings | None = None
    failure: CommandFailure | None = None
    power_w: float | None = None
    energy_counter_j: float | None = None
    record: DeviceRecord | None = None
    proposed: DeviceRecord | None = None
    limit_w: float | None = None
    clocks: ClockRange | None = None
    profile: int | None = None
    is_busy: bool = False
    is_restoring: bool = False
    is_reborn: bool = False
    is_reset: bool = False
    is_lost: bool = False
    problems: tuple[tuple[str, SettingProblem], ...] = ()
    note: SettingProblem | None = None
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

    def problem(self, field: str) -> SettingProblem | None:
        """The problem of one field."""
        return next((problem for name, problem in self.problems if name == field), None)

    def with_problem(self, field: str, problem: SettingProblem | None) -> "DeviceState":
        """The device with one field's problem set or cleared."""
        others = tuple((name, known) for name, known in self.problems if name != field)
        return replace(self, problems=others if problem is None else (*others, (field, problem)))


def _since(times_ns: tuple[int, ...], now_ns: int, window_s: float) -> tuple[int, ...]:
    return tuple(then_ns for then_ns in times_ns if now_ns - then_ns < window_s * 1e9)


def record_repair(device: DeviceState, fields: tuple[str, ...], now_ns: int, limits: GuardLimits) -> DeviceState | None:
    """The device with one more repair on its account; None when the account is used up."""
    repairs_ns = _since(device.repairs_ns, now_ns, limits.repair_window_s)
    if len(repairs_ns) >= limits.repairs_most:
        return None
    return replace(device, repairs_ns=(*repairs_ns, now_ns), repaired=fields)


def record_loss(device: DeviceState, now_ns: int, limits: GuardLimits) -> tuple[DeviceState, str]:
    """Returns the device after a loss, and the announcement of a quarantine that starts with it."""
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


def record_failure(device: DeviceState, now_ns: int, limits: GuardLimits) -> DeviceState:
    """One more attempt came to nothing: the next one waits longer."""
    delay_s = min(limits.retry_s_most, limits.retry_s * 2.0 ** min(device.attempts, 16))
    return replace(device, attempts=device.attempts + 1, retry_ns=now_ns + int(delay_s * 1e9))


def record_success(device: DeviceState) -> DeviceState:
    """An attempt came through."""
    return device if device.attempts == 0 else replace(device, attempts=0, retry_ns=0, note=None)


def get_failure_rule(failure: CommandFailure) -> RefusalRule:
    """The rule that a failure of the device falls under."""
    match failure:
        case CommandFailure.NO_PERMISSION:
            return RefusalRule.NO_PERMISSION
        case CommandFailure.NOT_SUPPORTED:
            return RefusalRule.NOT_SUPPORTED
        case CommandFailure.OUT_OF_RANGE:
            return RefusalRule.CONSTRAINTS
        case CommandFailure.JOURNAL:
            return RefusalRule.JOURNAL
        case CommandFailure.UNKNOWN:
            return RefusalRule.UNKNOWN_DEVICE
        case _:
            return RefusalRule.DEVICE


Announcements = list[tuple[NodeEventKind, str, str]]

_FINAL = frozenset((CommandFailure.NO_PERMISSION, CommandFailure.NOT_SUPPORTED, CommandFailure.OUT_OF_RANGE))
_SILENT = frozenset((CommandFailure.LOST, CommandFailure.HUNG, CommandFailure.UNKNOWN, CommandFailure.DRIVER))
# These are tried for as long as they are wanted, ever more seldom.
_PASSING = _SILENT | {CommandFailure.JOURNAL}


def apply_outcomes(
    devices: Mapping[str, DeviceState], event: CommandsExecuted, limits: GuardLimits
) -> tuple[Mapping[str, DeviceState], Announcements]:
    """Returns the devices after the batch, and the announcements."""
    changed, words = dict(devices), Announcements()
    journals = [outcome for outcome in event.outcomes if isinstance(outcome.command, WriteJournal)]
    is_durable = not journals or journals[-1].failure is None
    for outcome in event.outcomes:
        command = outcome.command
        if isinstance(command, WriteJournal | AnnounceEvent):
            continue
        device = changed.get(command.gpu_uuid)
        if device is None:
            continue
        if isinstance(command, RestoreDevice):
            device = _restored(device, outcome, event.now_ns, limits, words)
        else:
            if device.proposed is not None and not device.is_restoring:
                device = replace(device, record=device.proposed if is_durable else device.record, proposed=None)
            device = _written(device, command, outcome, event.now_ns, limits)
        changed[command.gpu_uuid] = device
    return changed, words


def _restored(
    device: DeviceState, outcome: CommandOutcome, now_ns: int, limits: GuardLimits, words: Announcements
) -> DeviceState:
    device = replace(device, is_busy=False, proposed=None, settings=outcome.settings or device.settings)
    if outcome.failure is not None:
        is_silent = outcome.failure in _SILENT
        device = record_failure(device, now_ns, limits)
        if is_silent:
            # It is asked again when it answers, however often it was silent.
            device = replace(device, attempts=min(device.attempts, limits.attempts_most - 1))
        elif device.attempts == limits.attempts_most:
            word = f"settings could not be put back: {outcome.detail}; tried again every {limits.retry_s_most:g} s"
            words.append((NodeEventKind.ENFORCEMENT_SUSPENDED, device.gpu_uuid, word))
        return device
    if outcome.detail:
        words.append((NodeEventKind.SETTING_RESTORED, device.gpu_uuid, outcome.detail))
    if outcome.foreign:
        words.append((NodeEventKind.SETTING_DRIFT, device.gpu_uuid, outcome.foreign))
    return replace(
        record_success(device),
        record=None,
        is_restoring=False,
        limit_w=None,
        clocks=None,
        profile=None,
        clock_looks=0,
        attempts=0,
        retry_ns=0,
    )


def _written(
    device: DeviceState, command: SettingWrite, outcome: CommandOutcome, now_ns: int, limits: GuardLimits
) -> DeviceState:
    if device.is_restoring:  # the agent is ending: only the restore counts
        return device
    device = replace(device, is_busy=False, settings=outcome.settings or device.settings)
    if outcome.failure is not None:
        return _refused(device, command, outcome, now_ns, limits)
    device = record_success(device)
    match command:
        case SetDeviceLimit(limit_w=limit_w, cause=cause):
            device = device.with_problem("limit", None)
            shown_w = None if outcome.settings is None else outcome.settings.requested_w
            ours_w = None if cause is WriteCause.RESTORE else limit_w if shown_w is None else shown_w
            # In memory at once; the journal still names the value before, which harms nothing, and learns with the next.
            limits_w = () if ours_w is None else (ours_w,)
            record = None if device.record is None else replace(device.record, limits_w=limits_w)
            return replace(device, limit_w=ours_w, record=record)
        case LockClocks(min_mhz=low, max_mhz=high):
            return replace(device.with_problem("clocks", None), clocks=(low, high), clock_looks=0)
        case UnlockClocks():
            record = None if device.record is None else replace(device.record, clocks=None)
            return replace(device, clocks=None, record=record, clock_looks=0)
        case SetPowerProfile(profile=profile, cause=cause):
            if cause is WriteCause.RESTORE:
                record = None if device.record is None else replace(device.record, profiles=())
                return replace(device, profile=None, record=record)
            return replace(device.with_problem("profile", None), profile=profile)


def _refused(
    device: DeviceState, command: SettingWrite, outcome: CommandOutcome, now_ns: int, limits: GuardLimits
) -> DeviceState:
    assert outcome.failure is not None
    if device.retry_ns <= now_ns:  # one batch counts once
        device = record_failure(device, now_ns, limits)
    problem = SettingProblem(rule=get_failure_rule(outcome.failure), detail=outcome.detail)
    device = replace(device, note=problem)
    is_over = outcome.failure in _FINAL or device.attempts >= limits.attempts_most
    if outcome.failure in _PASSING or not is_over:
        return device
    # The driver refused, so the write was not made, and the record need not cover it any longer.
    record, is_unmade = device.record, outcome.failure in _FINAL
    match command:
        case SetDeviceLimit():
            field = "limit"
            if record is not None and is_unmade:
                record = replace(record, limits_w=() if device.limit_w is None else (device.limit_w,))
        case LockClocks() | UnlockClocks():
            field = "clocks"
            if record is not None and is_unmade:
                record = replace(record, clocks=device.clocks)
        case SetPowerProfile():
            field = "profile"
            if record is not None and is_unmade:
                record = replace(record, profiles=() if device.profile is None else (device.profile,))
    device = replace(device, record=record)
    return replace(device.with_problem(field, problem), attempts=0, retry_ns=0)


# Nearer than this no write can bring a limit: NVML counts milliwatts.
EXACT_TOLERANCE_W = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The writes in order, and in words what is restored and what another program has set since."""

    writes: tuple[SettingWrite, ...]
    detail: str
    foreign: str


def matches_own_limit(value_w: float | None, ours_w: tuple[float, ...], tolerance_w: float) -> bool:
    """Whether the limit is one of the agent's, within the rounding of drivers."""
    return value_w is not None and any(abs(value_w - ours) <= tolerance_w for ours in ours_w)


def plan_restore(
    record: DeviceRecord, settings: PowerSettings, origin: DriverOrigin, *, tolerance_w: float
) -> RestorePlan:
    """Plans the restore of a device from its record and the settings that were read back."""
    if record.origin != origin:
        since = "the machine booted" if record.origin.boot_id != origin.boot_id else "the driver was reloaded"
        return RestorePlan(writes=(), detail=f"{since}, which cleared every setting of the agent", foreign="")
    uuid, writes, done, left = record.gpu_uuid, list[SettingWrite](), list[str](), list[str]()
    if record.limits_w and record.found_w is not None:
        now_w = settings.requested_w
        if now_w is not None and abs(now_w - record.found_w) <= EXACT_TOLERANCE_W:
            done.append(f"the power limit is {record.found_w:g} W as before")
        elif matches_own_limit(now_w, record.limits_w, tolerance_w):
            writes.append(SetDeviceLimit(gpu_uuid=uuid, limit_w=record.found_w, cause=WriteCause.RESTORE))
            done.append(f"power limit back from {now_w:g} W to {record.found_w:g} W")
        else:
            ours = " or ".join(f"{ours:g}" for ours in record.limits_w)
            shown = "no limit" if now_w is None else f"{now_w:g} W"
            left.append(f"the power limit is {shown} where the agent set {ours} W: set by another program, left alone")
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
            left.append(f"power profile {settings.power_profile} was set by another program, left alone")
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
    """Plans the next writes of a device that answers and has no commands in progress.

    `is_allowed` is False where the device is to be released: then, as without a requested setting, it is restored.
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
    word = "the driver or the device restarted and lost its settings; they are applied again"
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
            "the program that sets this device, then remove its setting from the plan and add it again"
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
    word = (
        f"{enforced_w:g} W are enforced where {asked_w:g} W are requested: capped from outside the host, left as it is"
    )
    told = () if device.limit_w is None else ((NodeEventKind.SETTING_DRIFT, word),)
    return (replace(device, capped_w=enforced_w) if told else device), told


def _find_unsupported(device: DeviceState, settings: PowerSettings, bounds: LimitBounds | None) -> DeviceState:
    """What this part cannot be asked for; other problems come from trying, and stay until the plan is new."""
    wish, limit = device.wish, None
    if wish.limit_w is not None and (settings.requested_w is None or bounds is None):
        detail = "the part does not report its power limit, or not its range"
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
