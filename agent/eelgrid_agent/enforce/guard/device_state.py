"""Guard state of one device: quarantine, retries, repairs, and the effect of command outcomes.

After a write, whatever the device shows counts as ours, since drivers round. A write with an error may have taken
effect, so its value stays in the record until a restore. A permanent failure ends the field until the next plan; any
other is retried with backoff.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eelgrid_agent.devices.port import PowerSettings
from eelgrid_agent.enforce.guard.events import (
    AnnounceEvent,
    ClockRange,
    CommandFailure,
    CommandOutcome,
    CommandsExecuted,
    DesiredSettings,
    DeviceRecord,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """Why a device does not get what the plan wants."""

    rule: RefusalRule
    detail: str


_NO_WISH = DesiredSettings()


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
        """What stands in the way of one field."""
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
    """The devices after the batch, and what is to be announced."""
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
            device = _on_restored(device, outcome, event.now_ns, limits, words)
        else:
            if device.proposed is not None and not device.is_restoring:
                device = replace(device, record=device.proposed if is_durable else device.record, proposed=None)
            device = _written(device, command, outcome, event.now_ns, limits)
        changed[command.gpu_uuid] = device
    return changed, words


def _on_restored(
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
        return _on_refused(device, command, outcome, now_ns, limits)
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


def _on_refused(
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
