"""What follows from a write that did not succeed: whether to wait, and what people hear.

Owns that judgement and how long each kind of failure is waited for. Must not know units, nor
what is looked at afterwards; the gate asks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.kubernetes.gangs import Member
from eelgrid_controller.kubernetes.gate_events import Failure

__all__ = ["GateSettings", "Setback", "patch_setback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How long things may take, and what may be done."""

    unbound_s: float = 30.0  # that kube-scheduler may call a pinned pod unschedulable
    retry_s: float = 15.0  # after which what the core refused is asked again
    conflict_s: float = 2.0  # for the newer object to come by itself
    busy_s: float = 5.0
    forbidden_s: float = 60.0
    flight_s: float = 15.0  # for a node to say which devices a pod got, before the next goes there
    open_s: float | None = None  # without any leader, after which gates are removed without a plan
    moves: bool = False  # somebody moves pods: a place that the core moved is kept for the pod to come


class Setback(NamedTuple):
    """For how long the write is left alone, None where the pod is to be looked at now; and what is told."""

    wait_s: float | None
    text: str = ""


def patch_setback(member: Member, failure: Failure, why: str, settings: GateSettings) -> Setback:
    """A gate was not removed: what becomes of the pod."""
    if failure is Failure.INVALID:
        member.denied = why or "the API server refuses the pin"
        member.is_patching = False
        return Setback(None, f"cannot be pinned: {member.denied}")
    is_newer = member.sight.pod.resource_version != member.patched_version
    if failure in (Failure.CONFLICT, Failure.STALE) and is_newer:
        member.is_patching = False
        return Setback(None)
    if failure is Failure.FORBIDDEN:
        return Setback(settings.forbidden_s, f"cannot be pinned: {why}")
    return Setback(settings.busy_s if failure is Failure.BUSY else settings.conflict_s)
