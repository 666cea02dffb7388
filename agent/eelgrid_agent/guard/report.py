"""What is to be told of every setting that the plan enforces, as the devices show it now.

Owns the words and the status of enforced settings. Must not change anything.
A setting is applied when it was read back; until then it is under way.
"""

from collections.abc import Iterable

from eelgrid_agent.guard.core import GuardState, bounds_of
from eelgrid_agent.guard.device_state import DeviceState
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_agent.guard.turn import goal_w
from eelgrid_agent.refusal import Rule
from eelgrid_protos.messages import ApplyResult, ApplyStatus

__all__ = ["UNDER_WAY", "enforced"]

# Neither done nor refused: the next cycles tell.
UNDER_WAY = ApplyStatus.UNSPECIFIED

_REFUSING = frozenset((Rule.NOT_SUPPORTED, Rule.NO_PERMISSION, Rule.CONSTRAINTS, Rule.GANG))
_ATTEMPTS_TOLD = 2


def enforced(
    state: GuardState, uuids: Iterable[str], *, now_ns: int, is_expired: bool, limits: GuardLimits
) -> tuple[ApplyResult, ...]:
    """A result for each device that the plan, or the gang rule, sets."""
    return tuple(_result(state, state.device(uuid), now_ns, limits, is_expired=is_expired) for uuid in sorted(uuids))


def _result(
    state: GuardState, device: DeviceState, now_ns: int, limits: GuardLimits, *, is_expired: bool
) -> ApplyResult:
    settings = device.settings
    shown_w = None if settings is None else settings.enforced_w or settings.requested_w

    def told(status: ApplyStatus, detail: str, rule: Rule | None = None) -> ApplyResult:
        return ApplyResult(
            subject=device.gpu_uuid,
            status=status,
            detail=detail[:2000],
            rule="" if rule is None else rule.value,
            power_limit_w=shown_w,
        )

    if is_expired:
        return told(ApplyStatus.REFUSED, "the lease ran out: what was set is put back", Rule.LEASE)
    if device.is_quarantined(now_ns):
        return told(ApplyStatus.REFUSED, "this GPU was lost too often and is left alone for a while", Rule.QUARANTINE)
    if device.suspended:
        return told(ApplyStatus.REFUSED, device.suspended, Rule.DRIFT)
    if device.is_lost or device.failure is not None:
        word = "lost" if device.failure is None else device.failure.value
        return told(ApplyStatus.FAILED, f"the device does not answer: {word}", Rule.DEVICE)
    if device.problems:
        rule = device.problems[0][1].rule
        detail = "; ".join(f"{field}: {problem.detail}" for field, problem in device.problems)
        return told(ApplyStatus.REFUSED if rule in _REFUSING else ApplyStatus.FAILED, detail, rule)
    if device.note is not None and device.attempts >= _ATTEMPTS_TOLD:
        return told(ApplyStatus.FAILED, device.note.detail, device.note.rule)
    if settings is None or device.is_busy or device.is_restoring:
        return told(UNDER_WAY, "under way: what is read back is told")
    return told(*_progress(state, device, limits))


def _progress(state: GuardState, device: DeviceState, limits: GuardLimits) -> tuple[ApplyStatus, str]:
    settings, wish = device.settings, device.wish
    assert settings is not None
    bounds = bounds_of(state.devices, device)
    goal, words, is_there = goal_w(device, bounds), list[str](), True
    if goal is not None and wish.limit_w is not None:
        level_w = state.budget.level_w
        aim_w = goal if level_w is None or bounds is None else min(goal, max(level_w, bounds.low_w))
        if goal != wish.limit_w:
            words.append(f"{Rule.CONSTRAINTS}: {wish.limit_w:g} W asked, the devices take {goal:g} W")
        if aim_w < goal:
            words.append(f"{Rule.NODE_BUDGET}: held at {aim_w:g} W of {goal:g} W")
        if device.gang:
            words.append(f"{Rule.GANG}: one limit for {len(device.gang)} devices that work in step")
        is_there = settings.requested_w is not None and abs(settings.requested_w - aim_w) <= limits.tolerance_w
        if not is_there:
            words.append(f"{Rule.SLEW}: on the way to {aim_w:g} W by {limits.slew_w:g} W a cycle")
        if device.capped_w is not None:
            words.append(f"{device.capped_w:g} W are enforced from outside the host")
    if wish.clocks is not None:
        is_there = is_there and device.clocks is not None
    if wish.profile is not None:
        is_there = is_there and settings.power_profile == wish.profile
    return ApplyStatus.APPLIED if is_there else UNDER_WAY, "; ".join(words)
