"""Steps that looks at gangs (`looking.py`) and at services (`elastic.py`) share: what is asked for, and what is noted of it.

Owns the instruction and the mark on the member or the unit that keeps it from being asked for twice. Must not know
when a step is due.
"""

from collections.abc import Iterable, Sequence

from eelgrid_controller.kubernetes.eligibility import EligibleNodes
from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit
from eelgrid_controller.kubernetes.gate_events import Cancel, Instruction, Strip, Tell, Ungate
from eelgrid_controller.kubernetes.plans import Plan, plan_text

__all__ = ["judge", "leave", "let_go", "others_gates", "pin", "strip", "tell", "tell_gates"]


def let_go(unit: Unit) -> list[Instruction]:
    """The core is to let the unit go, whole."""
    unit.stand, unit.is_stale = Stand.LEAVING, False
    unit.moving.clear()
    return [Cancel(unit.workload_id)]


def pin(unit: Unit, replica: int, member: Member, epoch: int) -> Ungate:
    """A member goes to its place."""
    place = member.sent = unit.places[replica]
    # What differs from this later was changed by the core, not by another leader.
    devices = member.devices_of(place)
    member.agreed = tuple(sorted(devices))
    _patching(member)
    plan = Plan(epoch, unit.workload_id, replica, place.node_name, devices, place.profile, member.uid)
    return Ungate(member.uid, member.sight.key, member.patched_version, place.node_name, plan_text(plan), epoch)


def strip(member: Member, epoch: int) -> Strip:
    """A member goes where it can."""
    _patching(member)
    return Strip(member.uid, member.sight.key, member.patched_version, epoch, member.sight.refused)


def leave(members: Iterable[Member], why: str, epoch: int) -> list[Instruction]:
    """Members that only kube-scheduler can judge go where it puts them."""
    told: list[Instruction] = []
    for member in members:
        if not member.is_patching:
            _patching(member)
            told.append(tell(member, f"left to kube-scheduler: {why}"))
            told.append(Strip(member.uid, member.sight.key, member.patched_version, epoch, why))
    return told


def judge(unit: Unit, members: Sequence[Member], rules: EligibleNodes) -> None:
    """The core is about to be asked for these, by replica; where traits do not say enough, it asks back."""
    pods = [member.sight.pod for member in members]
    is_judged = any(not member.has_trait for member in members) or any(map(rules.needs, pods))
    rules.ask_for(unit.workload_id, pods, is_judged=is_judged)


def _patching(member: Member) -> None:
    member.is_patching, member.patched_version = True, member.sight.pod.resource_version


def others_gates(member: Member) -> list[str]:
    """Gates beside ours that have to go first."""
    return [gate for gate in member.sight.pod.gates if gate in member.sight.waits_for]


def tell_gates(member: Member) -> Tell:
    """Which those are, for people."""
    return tell(member, f"waits for the gates of others: {', '.join(others_gates(member))}")


def tell(member: Member, text: str, *, is_warning: bool = False) -> Tell:
    """A word about a member, for people."""
    return Tell(member.uid, member.sight.key, text, is_warning)
