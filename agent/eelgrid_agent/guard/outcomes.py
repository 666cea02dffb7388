"""What the outcomes of a batch make of the devices that it was for.

Owns how a write that came through, one that failed and one that was never made
change a device. Must not decide what is asked next.

Theory. What a device shows after a write is ours, whatever was asked: drivers
round. A write whose outcome is an error may have been made all the same, so its
value stays in the record until a restore. A failure that will not pass, such as
a permission, ends that field until the plan is new; any other is tried again,
later each time, and then ends too.
"""

from collections.abc import Mapping
from dataclasses import replace

from eelgrid_agent.guard.device_state import DeviceState, Problem, failed, rule_of, succeeded
from eelgrid_agent.guard.events import (
    Announce,
    Cause,
    Executed,
    Failure,
    Journal,
    LockClocks,
    Outcome,
    Restore,
    SetLimit,
    SetProfile,
    UnlockClocks,
    Write,
)  # fmt: skip
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_protos.messages import NodeEventKind

__all__ = ["settle"]

Words = list[tuple[NodeEventKind, str, str]]

_FINAL = frozenset((Failure.NO_PERMISSION, Failure.NOT_SUPPORTED, Failure.OUT_OF_RANGE))
_SILENT = frozenset((Failure.LOST, Failure.HUNG, Failure.UNKNOWN, Failure.DRIVER))
# These are tried for as long as they are wanted, ever more seldom.
_PASSING = _SILENT | {Failure.JOURNAL}


def settle(
    devices: Mapping[str, DeviceState], event: Executed, limits: GuardLimits
) -> tuple[Mapping[str, DeviceState], Words]:
    """The devices after the batch, and what is to be announced."""
    changed, words = dict(devices), Words()
    journals = [outcome for outcome in event.outcomes if isinstance(outcome.command, Journal)]
    is_durable = not journals or journals[-1].failure is None
    for outcome in event.outcomes:
        command = outcome.command
        if isinstance(command, Journal | Announce):
            continue
        device = changed.get(command.gpu_uuid)
        if device is None:
            continue
        if isinstance(command, Restore):
            device = _restored(device, outcome, event.now_ns, limits, words)
        else:
            if device.proposed is not None and not device.is_restoring:
                device = replace(device, record=device.proposed if is_durable else device.record, proposed=None)
            device = _written(device, command, outcome, event.now_ns, limits)
        changed[command.gpu_uuid] = device
    return changed, words


def _restored(device: DeviceState, outcome: Outcome, now_ns: int, limits: GuardLimits, words: Words) -> DeviceState:
    device = replace(device, is_busy=False, proposed=None, settings=outcome.settings or device.settings)
    if outcome.failure is not None:
        is_silent = outcome.failure in _SILENT
        device = failed(device, now_ns, limits)
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
        succeeded(device), record=None, is_restoring=False, limit_w=None, clocks=None, profile=None, clock_looks=0,
        attempts=0, retry_ns=0,
    )  # fmt: skip


def _written(device: DeviceState, command: Write, outcome: Outcome, now_ns: int, limits: GuardLimits) -> DeviceState:
    if device.is_restoring:  # the agent is ending: only the restore counts
        return device
    device = replace(device, is_busy=False, settings=outcome.settings or device.settings)
    if outcome.failure is not None:
        return _refused(device, command, outcome, now_ns, limits)
    device = succeeded(device)
    match command:
        case SetLimit(limit_w=limit_w, cause=cause):
            device = device.with_problem("limit", None)
            shown_w = None if outcome.settings is None else outcome.settings.requested_w
            ours_w = None if cause is Cause.RESTORE else limit_w if shown_w is None else shown_w
            # In memory at once; the journal still names the value before, which harms nothing, and learns with the next.
            limits_w = () if ours_w is None else (ours_w,)
            record = None if device.record is None else replace(device.record, limits_w=limits_w)
            return replace(device, limit_w=ours_w, record=record)
        case LockClocks(min_mhz=low, max_mhz=high):
            return replace(device.with_problem("clocks", None), clocks=(low, high), clock_looks=0)
        case UnlockClocks():
            record = None if device.record is None else replace(device.record, clocks=None)
            return replace(device, clocks=None, record=record, clock_looks=0)
        case SetProfile(profile=profile, cause=cause):
            if cause is Cause.RESTORE:
                record = None if device.record is None else replace(device.record, profiles=())
                return replace(device, profile=None, record=record)
            return replace(device.with_problem("profile", None), profile=profile)


def _refused(device: DeviceState, command: Write, outcome: Outcome, now_ns: int, limits: GuardLimits) -> DeviceState:
    assert outcome.failure is not None
    if device.retry_ns <= now_ns:  # one batch counts once
        device = failed(device, now_ns, limits)
    problem = Problem(rule=rule_of(outcome.failure), detail=outcome.detail)
    device = replace(device, note=problem)
    is_over = outcome.failure in _FINAL or device.attempts >= limits.attempts_most
    if outcome.failure in _PASSING or not is_over:
        return device
    # The driver refused, so the write was not made, and the record need not cover it any longer.
    record, is_unmade = device.record, outcome.failure in _FINAL
    match command:
        case SetLimit():
            field = "limit"
            if record is not None and is_unmade:
                record = replace(record, limits_w=() if device.limit_w is None else (device.limit_w,))
        case LockClocks() | UnlockClocks():
            field = "clocks"
            if record is not None and is_unmade:
                record = replace(record, clocks=device.clocks)
        case SetProfile():
            field = "profile"
            if record is not None and is_unmade:
                record = replace(record, profiles=() if device.profile is None else (device.profile,))
    device = replace(device, record=record)
    return replace(device.with_problem(field, problem), attempts=0, retry_ns=0)
