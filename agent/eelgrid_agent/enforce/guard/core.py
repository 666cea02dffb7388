"""The guard's core: a pure step from state and event to state and commands.

A journal entry always precedes the writes that it covers, in one batch; a batch whose journal fails is not executed.
A device with a batch in progress is not asked again until its outcome is known, except at stop, when everything is
restored. Records end only by an executed restore.

The node power budget is a water-filling level on device limits (a circuit breaker). A device may draw up to the level
and no more; the level is as high as the budget allows (water filling). That lowers the highest draw first and treats
equal devices equally. Lowering in proportion to each excess would not: a gang goes at the pace of its slowest member,
so watts left with the others would be spent waiting. A level needs no memory: the same readings give the same level,
so a sensor that shows the mean of the last second does not wind it down while it catches up.

The level falls when the mean of the last second is over the budget, or two samples in a row are; at four samples a
second that is noticed within half a second and leaves the other half to the device. A part that draws more than its
limit (some do near their minimum) is seen once its limit had time to take effect, and the level falls by the excess.
The level rises only after a quiet time, in steps that keep the expected draw under 97 %, each after the effect of the
one before can be seen. What cannot be lowered (silent, suspended, no permission) counts as it is, and where even the
minima exceed the budget, that is announced.
"""

from collections.abc import Mapping
from dataclasses import field, replace

from eelgrid_agent.enforce.guard.device_step import DeviceState, LimitBounds, apply_outcomes, record_loss, step_device
from eelgrid_agent.enforce.guard.events import (
    AnnounceEvent,
    CommandFailure,
    CommandsExecuted,
    DesiredSettings,
    DeviceCheck,
    DeviceLossChanged,
    DeviceRecord,
    GuardCommand,
    GuardEvent,
    GuardStarted,
    GuardStopped,
    GuardTick,
    PlanExpired,
    PlanInForce,
    RestoreDevice,
    WriteJournal,
)
from eelgrid_agent.enforce.rules import GuardLimits, LocalPolicy, RefusalRule
from eelgrid_protos.messages import NodeEvent, NodeEventKind
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDraw:
    """The power draw of one device and the range of its limit; `limit_w` is in force.

    A device with unknown draw is counted at its limit.
    """

    power_w: float
    limit_w: float
    low_w: float
    high_w: float
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of the budget; without a level (`level_w` None) no device is restrained.

    `is_told` holds from an announcement until power falls again. `fixed` devices cannot be lowered now; for `rangeless`
    ones it was announced that they do not report their limit range.
    """

    samples: tuple[tuple[int, float], ...] = ()
    level_w: float | None = None
    lowered_ns: int = 0
    raise_ns: int = 0
    is_told: bool = False
    fixed: int = 0
    rangeless: frozenset[str] = frozenset()


def step_budget(
    budget: BudgetState,
    draws: tuple[DeviceDraw, ...],
    budget_w: float,
    now_ns: int,
    limits: GuardLimits,
    *,
    is_enforced: bool,
) -> tuple[BudgetState, str]:
    """The next state, and what to announce, if anything."""
    total_w = sum(draw.power_w for draw in draws)
    horizon_ns = now_ns - int(limits.budget_window_s * 1e9)
    before = tuple(sample for sample in budget.samples if sample[0] > horizon_ns)[-64:]
    samples = (*before, (now_ns, total_w))
    mean_w = sum(power_w for _, power_w in samples) / len(samples)
    is_twice = total_w > budget_w and bool(before) and before[-1][1] > budget_w
    fixed = sum(not draw.is_writable for draw in draws)
    budget = replace(budget, samples=samples, fixed=fixed)
    if mean_w > budget_w or is_twice:
        if not is_enforced:
            word = (
                f"{max(mean_w, total_w):.0f} W are over the node's budget of {budget_w:g} W; observe-only: not lowered"
            )
            return replace(budget, is_told=True, level_w=None), "" if budget.is_told else word
        return _lower(budget, draws, budget_w, now_ns, limits)
    if max(mean_w, total_w) <= limits.budget_calm * budget_w:
        budget = replace(budget, is_told=False)
        if budget.level_w is not None and now_ns >= budget.raise_ns:
            return _raise(budget, draws, limits.budget_raise * budget_w - max(mean_w, total_w), now_ns, limits), ""
    return budget, ""


def _lower(
    budget: BudgetState, draws: tuple[DeviceDraw, ...], budget_w: float, now_ns: int, limits: GuardLimits
) -> tuple[BudgetState, str]:
    has_settled = budget.level_w is not None and now_ns - budget.lowered_ns >= limits.budget_settle_s * 1e9
    movable = [draw for draw in draws if draw.is_writable]
    fixed_w = sum(draw.power_w for draw in draws if not draw.is_writable)
    over_w = [max(0.0, draw.power_w - draw.limit_w) if has_settled else 0.0 for draw in movable]

    def drawn_w(level_w: float) -> float:
        held = (min(draw.power_w, max(level_w, draw.low_w) + over) for draw, over in zip(movable, over_w, strict=True))
        return fixed_w + sum(held)

    aim_w = limits.budget_aim * budget_w
    low_w = min((draw.low_w for draw in movable), default=0.0)
    high_w = max((draw.high_w for draw in movable), default=0.0)
    ceiling_w = high_w if budget.level_w is None else min(high_w, budget.level_w)
    bottom_w, top_w = low_w, max(low_w, ceiling_w)
    # Forty halvings of at most a few kilowatts are far below a milliwatt.
    for _ in range(40):
        middle_w = (bottom_w + top_w) / 2.0
        bottom_w, top_w = (middle_w, top_w) if drawn_w(middle_w) <= aim_w else (bottom_w, middle_w)
    # Whole watts; the milliwatt is for halvings that end just under a whole one, which would be lost at every look.
    level_w = max(low_w, float(int(bottom_w + 0.001)))
    is_lower = budget.level_w is None or level_w < budget.level_w
    following = replace(
        budget,
        level_w=level_w if movable else None,
        lowered_ns=now_ns if is_lower else budget.lowered_ns,
        raise_ns=now_ns + int(limits.budget_hold_s * 1e9),
    )
    least_w = drawn_w(low_w)
    if least_w > budget_w and not budget.is_told:
        word = (
            f"the node's budget of {budget_w:g} W cannot be kept: {fixed_w:.0f} W cannot be lowered and "
            f"{least_w - fixed_w:.0f} W are drawn at the lowest limits; raise the budget or remove work"
        )
        return replace(following, is_told=True), word
    return following, ""


def _raise(
    budget: BudgetState, draws: tuple[DeviceDraw, ...], headroom_w: float, now_ns: int, limits: GuardLimits
) -> BudgetState:
    assert budget.level_w is not None
    movable = [draw for draw in draws if draw.is_writable]
    held = sum(1 for draw in movable if draw.power_w >= 0.9 * min(budget.level_w, draw.high_w))
    step_w = float(int(min(limits.slew_w, headroom_w / max(1, held))))
    if step_w < 1.0:
        return budget
    level_w: float | None = budget.level_w + step_w
    if level_w is not None and level_w >= max((draw.high_w for draw in movable), default=0.0):
        level_w = None
    return replace(budget, level_w=level_w, raise_ns=now_ns + int(limits.budget_settle_s * 1e9))


_NO_WISH = DesiredSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """Everything the core remembers."""

    local: LocalPolicy = field(default_factory=LocalPolicy)
    devices: Mapping[str, DeviceState] = field(default_factory=dict)
    plan_budget_w: float | None = None
    is_enforced: bool = False
    budget: BudgetState = field(default_factory=BudgetState)
    is_stopping: bool = False
    # The disk may then hold more than stands, never less; it is written again until it holds exactly that.
    is_journal_stale: bool = False

    def device(self, uuid: str) -> DeviceState:
        """The state of a device, a new one if it is unknown."""
        return self.devices.get(uuid) or DeviceState(gpu_uuid=uuid)

    @property
    def records(self) -> tuple[DeviceRecord, ...]:
        """The records that the journal should hold, including those in the batch in progress."""
        devices = (self.devices[uuid] for uuid in sorted(self.devices))
        found = (device.proposed or device.record for device in devices)
        return tuple(record for record in found if record is not None)

    @property
    def is_involved(self) -> bool:
        """Whether a device has a requested setting, a change that is not restored, or a record in the journal."""
        wanted = any(device.wish != _NO_WISH or device.proposed or device.record for device in self.devices.values())
        return wanted or self.is_journal_stale

    def current_budget(self) -> tuple[float | None, bool]:
        """The lowest budget that is to be enforced, else the lowest to be watched; and whether it is enforced."""
        kept = [
            (budget_w, is_enforced)
            for budget_w, is_enforced in (
                (self.plan_budget_w, self.is_enforced),
                (self.local.power_budget_w, self.local.enforce),
            )
            if budget_w is not None
        ]
        is_enforced = any(enforced for _, enforced in kept)
        lowest = min((budget_w for budget_w, enforced in kept if enforced == is_enforced), default=None)
        return lowest, is_enforced


GuardStep = tuple[GuardState, tuple[GuardCommand, ...]]


def step_guard(state: GuardState, event: GuardEvent, limits: GuardLimits) -> GuardStep:
    """Returns the state after the event, and the commands in order."""
    match event:
        case GuardTick():
            return _tick(state, event, limits)
        case CommandsExecuted():
            return _on_executed(state, event, limits)
        case PlanInForce():
            return _plan(state, event), ()
        case PlanExpired():
            gone = {uuid: _wishing(device, _NO_WISH, ()) for uuid, device in state.devices.items()}
            return replace(state, devices=gone), ()
        case DeviceLossChanged():
            return _on_device_loss(state, event, limits)
        case GuardStarted():
            return _put_back(state, {record.gpu_uuid: record for record in event.records})
        case GuardStopped():
            return _put_back(replace(state, is_stopping=True), {})


def _wishing(
    device: DeviceState, wish: DesiredSettings, gang: tuple[str, ...], *, is_held: bool = False
) -> DeviceState:
    """Only a device that was given up and that nothing is wanted of any more may be wanted anew.

    `is_held` says that the same budget holds it as before: that a plan has no wish for it is then no news.
    """
    suspended = "" if wish == _NO_WISH and not (is_held and device.wish == _NO_WISH) else device.suspended
    changed = replace(device, wish=wish, gang=gang, suspended=suspended)
    return changed if wish == device.wish else replace(changed, problems=(), note=None, attempts=0, retry_ns=0)


def _plan(state: GuardState, event: PlanInForce) -> GuardState:
    after = replace(state, plan_budget_w=event.budget_w, is_enforced=event.enforce)
    budget_w, is_enforced = after.current_budget()
    is_held = is_enforced and budget_w is not None and after.current_budget() == state.current_budget()
    devices = {
        uuid: _wishing(state.device(uuid), event.wishes.get(uuid, _NO_WISH), event.gangs.get(uuid, ()), is_held=is_held)
        for uuid in state.devices.keys() | event.wishes.keys()
    }
    return replace(after, devices=devices)


def _put_back(state: GuardState, found: Mapping[str, DeviceRecord]) -> GuardStep:
    """Restores everything that the journal names, whatever is under way."""
    devices = dict(state.devices)
    for uuid, record in found.items():
        devices[uuid] = replace(state.device(uuid), record=record)
    commands = []
    for uuid in sorted(devices):
        device = devices[uuid]
        record_now = device.proposed or device.record
        if record_now is not None:
            devices[uuid] = replace(device, record=record_now, proposed=None, is_restoring=True, is_busy=True)
            commands.append(RestoreDevice(record=record_now))
    if not commands and state.is_journal_stale:
        return state, (WriteJournal(records=()),)
    return replace(state, devices=devices), tuple(commands)


def _on_device_loss(state: GuardState, event: DeviceLossChanged, limits: GuardLimits) -> GuardStep:
    device = state.device(event.gpu_uuid)
    announced: tuple[GuardCommand, ...] = ()
    if event.lost == device.is_lost:  # told twice
        return state, ()
    if event.lost:
        device, word = record_loss(device, event.now_ns, limits)
        if word:
            announced = (_announce(NodeEventKind.GPU_QUARANTINED, event.wall_ns, event.gpu_uuid, word),)
    else:
        device = replace(device, is_lost=False, is_reborn=True, problems=(), note=None, attempts=0, retry_ns=0)
    return replace(state, devices={**state.devices, event.gpu_uuid: device}), announced


def _on_executed(state: GuardState, event: CommandsExecuted, limits: GuardLimits) -> GuardStep:
    devices, words = apply_outcomes(state.devices, event, limits)
    state = replace(state, devices=devices)
    announced = tuple(_announce(kind, event.wall_ns, uuid, word) for kind, uuid, word in words)
    journals = [outcome for outcome in event.outcomes if isinstance(outcome.command, WriteJournal)]
    if journals:
        state = replace(state, is_journal_stale=journals[-1].failure is not None)
    was_journalled = any(
        isinstance(outcome.command, RestoreDevice) and not outcome.failure for outcome in event.outcomes
    )
    if was_journalled:
        # Shorter now; if this write fails, the next cycle's carries it, and a crash finds nothing of ours to undo.
        return state, (WriteJournal(records=state.records), *announced)
    return state, announced


def _observe(device: DeviceState, check: DeviceCheck) -> DeviceState:
    """What a look says of the device; settings that were not read stay as they were."""
    before_j, now_j = device.energy_counter_j, check.energy_counter_j
    fell = before_j is not None and now_j is not None and now_j < before_j
    if device.failure is not None and check.settings is not None:  # it answers again: what waited need wait no longer
        device = replace(device, attempts=0, retry_ns=0)
    return replace(
        device,
        settings=check.settings or device.settings,
        failure=check.failure,
        power_w=check.power_w,
        energy_counter_j=before_j if now_j is None else now_j,
        is_reborn=device.is_reborn or fell,
        is_reset=device.is_reset or fell,
        repaired=(),
    )


def _tick(state: GuardState, event: GuardTick, limits: GuardLimits) -> GuardStep:
    devices = dict(state.devices)
    for check in event.gpus:
        devices[check.gpu_uuid] = _observe(state.device(check.gpu_uuid), check)
    state = replace(state, devices=devices)
    if state.is_stopping:
        return state, ()
    present = tuple(check.gpu_uuid for check in event.gpus)
    state, announced = _keep_budget(state, present, event, limits)
    devices = dict(state.devices)
    writes: list[GuardCommand] = []
    for check in event.gpus:
        device = devices[check.gpu_uuid]
        if device.is_busy or check.settings is None or device.is_lost:
            continue
        if device.is_restoring and device.record is not None:
            if event.now_ns >= device.retry_ns:
                devices[device.gpu_uuid] = replace(device, is_busy=True)
                writes.append(RestoreDevice(record=device.record))
            continue
        turn = step_device(
            device,
            get_limit_bounds(state.devices, device),
            _cap_w(state, device),
            origin=event.origin,
            now_ns=event.now_ns,
            is_allowed=not device.is_quarantined(event.now_ns) and not device.suspended,
            limits=limits,
        )
        device = turn.device
        announced += [_announce(kind, event.wall_ns, device.gpu_uuid, word) for kind, word in turn.told]
        if turn.is_restore and device.record is not None:
            writes.append(RestoreDevice(record=device.record))
            device = replace(device, is_restoring=True, is_busy=True)
        elif turn.writes:
            device = replace(device, is_busy=True)
            writes += turn.writes
        devices[device.gpu_uuid] = device
    state = replace(state, devices=devices)
    needs_journal = state.is_journal_stale or any(not isinstance(write, RestoreDevice) for write in writes)
    journal = (WriteJournal(records=state.records),) if needs_journal else ()
    return state, (*journal, *writes, *announced)


def get_limit_bounds(devices: Mapping[str, DeviceState], device: DeviceState) -> LimitBounds | None:
    """Returns the limits that every member of the device's gang accepts (of the device alone without a gang).

    None if unknown.
    """
    own = device.settings
    if own is None or own.min_w is None or own.max_w is None:
        return None
    low_w, high_w = own.min_w, own.max_w
    for uuid in device.gang:
        other = devices[uuid].settings if uuid in devices else None
        if other is not None and other.min_w is not None and other.max_w is not None:
            low_w, high_w = max(low_w, other.min_w), min(high_w, other.max_w)
    return LimitBounds(low_w=low_w, high_w=high_w)


def _cap_w(state: GuardState, device: DeviceState) -> float | None:
    level_w, bounds = state.budget.level_w, get_limit_bounds(state.devices, device)
    if level_w is None or bounds is None or bounds.is_empty or device.problem("limit") is not None:
        return None
    return min(max(level_w, bounds.low_w), bounds.high_w)


def _keep_budget(
    state: GuardState, present: tuple[str, ...], event: GuardTick, limits: GuardLimits
) -> tuple[GuardState, list[GuardCommand]]:
    budget_w, is_enforced = state.current_budget()
    if budget_w is None:
        return replace(state, budget=BudgetState()), []
    draws = tuple(_draw(state, state.devices[uuid], event.now_ns) for uuid in present)
    before = state.budget if is_enforced else replace(state.budget, level_w=None)
    budget, word = step_budget(before, draws, budget_w, event.now_ns, limits, is_enforced=is_enforced)
    told: list[GuardCommand] = []
    if word:
        told.append(_announce(NodeEventKind.HEALTH, event.wall_ns, "", f"{RefusalRule.NODE_BUDGET}: {word}"))
    if is_enforced:
        rangeless = {uuid for uuid in present if _is_rangeless(state.devices[uuid])}
        word = (
            f"{RefusalRule.NODE_BUDGET}: this GPU does not report its limit range, so the node's budget of {budget_w:g} W "
            "cannot lower it; its draw counts"
        )
        fresh = sorted(rangeless - budget.rangeless)
        told += [_announce(NodeEventKind.HEALTH, event.wall_ns, uuid, word) for uuid in fresh]
        budget = replace(budget, rangeless=budget.rangeless | rangeless)
    return replace(state, budget=budget), told


def _is_rangeless(device: DeviceState) -> bool:
    """Whether it was read, and says nothing of the limits that it takes."""
    return device.settings is not None and (device.settings.min_w is None or device.settings.max_w is None)


def _draw(state: GuardState, device: DeviceState, now_ns: int) -> DeviceDraw:
    """What the device counts for: silent ones at the limit that they were last seen under, lost ones at the lowest."""
    settings, bounds = device.settings, get_limit_bounds(state.devices, device)
    shown_w = None if settings is None else settings.enforced_w or settings.requested_w
    limit_w = shown_w or 0.0
    if device.is_lost or device.failure in {CommandFailure.LOST, CommandFailure.UNKNOWN}:
        power_w = 0.0 if bounds is None else bounds.low_w
    else:
        power_w = limit_w if device.power_w is None else device.power_w
    is_writable = (
        bounds is not None
        and not bounds.is_empty
        and device.failure is None
        and not (device.is_lost or device.suspended or device.is_restoring or device.is_quarantined(now_ns))
        and device.problem("limit") is None
    )
    if bounds is None or not is_writable:
        return DeviceDraw(power_w=power_w, limit_w=limit_w, low_w=0.0, high_w=0.0, is_writable=False)
    found_w = device.record.found_w if device.record is not None and device.limit_w is not None else None
    return DeviceDraw(
        power_w=power_w, limit_w=limit_w, low_w=bounds.low_w, high_w=found_w or bounds.high_w, is_writable=True
    )


def _announce(kind: NodeEventKind, wall_ns: int, uuid: str, detail: str) -> AnnounceEvent:
    return AnnounceEvent(event=NodeEvent(kind=kind, time_ns=max(wall_ns, 0), gpu_uuid=uuid, detail=detail[:2000]))
