"""The gate: pods and nodes in, places out; which pod goes where, when, and who is told.

Owns what follows from each event, and the order of what is asked for. Must not know clocks,
sockets, or how the core decides.

Theory. Everything is looked at by its state, never by its history: an event changes what is
known, marks units, and each marked unit is then looked at as a whole. So it does not matter
in which order lists, watches, answers and commits come, nor whether an instruction was
lost. For each unit there is one question: does what the core holds fit what the pods are?

    UNKNOWN --all members wait--> ASKED --> WAITING --> PLACED --all members wait or stand there--> pinned
    WAITING, PLACED --members went, a place is no more, a pod is elsewhere--> LEAVING --> UNKNOWN

A pod that is bound, or pinned, where the core has no place for it, is what others hold on
that node; so nothing is counted twice, whoever placed it. Nothing is asked of the core and
nothing is written unless this one leads; what is known is kept up to date all the while.
Same events in, same instructions out; time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from eelgrid_controller.kubernetes.constraints import trait
from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit
from eelgrid_controller.kubernetes.gate_events import (
    Cancel,
    Cancelled,
    Deferred,
    DeleteFailed,
    Event,
    Failure,
    Instruction,
    Led,
    NodeGone,
    NodeKnown,
    NodeSeen,
    NodeUntold,
    NotLed,
    PatchDone,
    PatchFailed,
    Placed,
    PodGone,
    PodSeen,
    Recreate,
    Strip,
    Submit,
    SubmitFailed,
    Synced,
    Tell,
    Ticked,
)
from eelgrid_controller.kubernetes.looking import look
from eelgrid_controller.kubernetes.others import Others
from eelgrid_controller.kubernetes.plans import attempt_of, unit_of
from eelgrid_controller.kubernetes.watchdog import Watchdog

__all__ = ["Gate", "GateSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How long things may take."""

    unbound_s: float = 30.0  # that kube-scheduler may call a pinned pod unschedulable
    retry_s: float = 15.0  # after which what the core refused is asked again
    conflict_s: float = 2.0  # for the newer object to come by itself
    busy_s: float = 5.0
    forbidden_s: float = 60.0
    open_s: float | None = None  # without any leader, after which gates are removed without a plan


class Gate:
    """One cluster's gated pods."""

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        self.epoch: int | None = None  # of the term in which this one leads
        self.units: dict[str, Unit] = {}
        self.others = Others()
        self.watchdog = Watchdog(unbound_s=settings.unbound_s)
        self._members: dict[str, Member] = {}
        self._traits: dict[str, str] = {}  # of pods that wait, by uid
        self._marked: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        self._later: dict[str, float] = {}  # uid -> when a failed write is looked at again
        self._is_synced = False
        self._leaderless_s: float | None = None
        self._writes: list[Instruction] = []
        self._cancels: list[Instruction] = []
        self._submits: list[Submit] = []
        self._tells: list[Instruction] = []

    def take(self, events: Iterable[Event], at_s: float) -> list[Instruction]:
        """What is to be done after these events; `at_s` is of a clock that does not go back."""
        for event in events:
            self._apply(event, at_s)
        if not self._is_synced:
            return []
        told: list[Instruction] = list(self.others.flush())
        marked, self._marked = self._marked, {}
        for name in marked:
            unit = self.units.get(name)
            if unit is not None:
                self._look(unit, at_s)
        told += self.others.flush()
        self._submits.sort(key=lambda one: -one.request.spec.priority)
        told += [*self._cancels, *self._submits, *self._writes, *self._tells]
        self._cancels, self._submits, self._writes, self._tells = [], [], [], []
        return told

    # Events

    def _apply(self, event: Event, at_s: float) -> None:
        match event:
            case PodSeen():
                self._seen(event, at_s)
            case PodGone(uid):
                self._gone(uid)
            case NodeSeen(node, has_agent):
                self.others.node(node, has_agent=has_agent)
                self._mark_places(node.name)
            case NodeGone(name):
                self.others.node_gone(name)
                self._mark_places(name)
            case NodeKnown(name):
                self.others.known(name)
            case NodeUntold(name):
                self.others.untold(name)
            case Synced():
                self._is_synced = True
                self._marked.update(dict.fromkeys(self.units))
            case Placed() | Deferred() | Cancelled() | SubmitFailed():
                self._core(event, at_s)
            case Led(epoch):
                self._leaderless_s = None
                if epoch != self.epoch:
                    self.epoch = epoch
                    self._marked.update(dict.fromkeys(self.units))
            case NotLed(is_led):
                self._not_led(at_s, is_led=is_led)
            case PatchDone(uid):
                self._later.pop(uid, None)
            case PatchFailed(uid, failure, why):
                self._patch_failed(uid, failure, why, at_s)
            case DeleteFailed(uid, failure, why):
                self._delete_failed(uid, failure, why, at_s)
            case Ticked():
                self._ticked(at_s)

    def _seen(self, event: PodSeen, at_s: float) -> None:
        sight = event.pod
        uid = sight.pod.uid
        if not sight.unit:
            if uid in self._members:
                self._gone(uid)
            pod = sight.pod
            self.others.put(pod, "" if pod.is_terminal or pod.gates else pod.node_name or sight.pinned)
            return
        member = self._members.get(uid)
        if member is None:
            member = self._members[uid] = Member(sight)
        elif member.sight.unit != sight.unit:
            self._gone(uid)
            member = self._members[uid] = Member(sight)
        member.sight = sight
        if not member.is_waiting or (uid in self._later and sight.pod.resource_version != member.patched_version):
            # The gate is gone, or what the patch failed on is another object now.
            member.is_patching = False
            self._later.pop(uid, None)
        unit = self.units.get(sight.unit)
        if unit is None:
            unit = self.units[sight.unit] = Unit(sight.unit)
        unit.members[uid] = member
        self._wants(member)
        self._watch(member, at_s)
        self._account(unit, member)
        self._marked[unit.name] = None

    def _gone(self, uid: str) -> None:
        self.others.remove(uid)
        self.watchdog.forget(uid)
        self._later.pop(uid, None)
        self.others.release(self._traits.pop(uid, ""))
        member = self._members.pop(uid, None)
        if member is not None:
            unit = self.units[member.sight.unit]
            unit.members.pop(uid, None)
            self._marked[unit.name] = None

    def _wants(self, member: Member) -> None:
        if member.is_waiting and member.sight.spec is not None:
            if self._traits.get(member.uid) != trait(member.sight.pod.constraint):
                self.others.release(self._traits.pop(member.uid, ""))
                self._traits[member.uid] = self.others.want(member.sight.pod.constraint)
        elif member.uid in self._traits:
            self.others.release(self._traits.pop(member.uid))

    def _watch(self, member: Member, at_s: float) -> None:
        pod = member.sight.pod
        is_stuck = bool(member.sight.pinned) and not pod.node_name and pod.unscheduled == "Unschedulable"
        if is_stuck and not pod.gates and not member.is_over:
            self.watchdog.watch(member.uid, at_s)
        else:
            self.watchdog.forget(member.uid)

    def _account(self, unit: Unit, member: Member) -> None:
        """Count a pod as what others hold, unless the core counts it where it is."""
        self.others.put(member.sight.pod, "" if unit.holds(member) else member.target)

    def _account_all(self, unit: Unit) -> None:
        for member in unit.members.values():
            self._account(unit, member)

    def _core(self, event: Placed | Deferred | Cancelled | SubmitFailed, at_s: float) -> None:
        name, attempt = unit_of(event.workload_id), attempt_of(event.workload_id)
        unit = self.units.get(name)
        if unit is None:
            if isinstance(event, Cancelled | SubmitFailed):
                return
            unit = self.units[name] = Unit(name, attempt)
        if attempt > unit.attempt and unit.stand is Stand.UNKNOWN:
            unit.attempt = attempt
        if attempt != unit.attempt:
            return
        self._marked[name] = None
        match event:
            case Placed(places=places):
                if unit.stand is not Stand.LEAVING:
                    unit.stand, unit.places, unit.refusals = Stand.PLACED, dict(places), 0
                    unit.settle()
            case Deferred(reason=reason):
                if unit.stand not in (Stand.LEAVING, Stand.PLACED):
                    unit.stand, unit.places = Stand.WAITING, {}
                    self._tell_unit(unit, f"waits: {reason}")
            case Cancelled():
                unit.stand, unit.places, unit.slots = Stand.UNKNOWN, {}, {}
                unit.attempt += 1
            case SubmitFailed(why=why, is_taken=is_taken):
                self._submit_failed(unit, why, at_s, is_taken=is_taken)
        self._account_all(unit)

    def _submit_failed(self, unit: Unit, why: str, at_s: float, *, is_taken: bool) -> None:
        if is_taken:
            unit.attempt += 1
        else:
            self._tell_unit(unit, f"not accepted: {why}", is_warning=True)
        unit.stand, unit.slots = Stand.REFUSED, {}
        unit.refusals += 1
        unit.retry_s = at_s + (0.0 if is_taken else self.settings.retry_s * min(unit.refusals, 20))

    def _not_led(self, at_s: float, *, is_led: bool) -> None:
        self.epoch = None
        self._leaderless_s = None if is_led else (at_s if self._leaderless_s is None else self._leaderless_s)
        for member in self._members.values():
            member.is_patching = False
        self._later.clear()

    def _patch_failed(self, uid: str, failure: Failure, why: str, at_s: float) -> None:
        member = self._members.get(uid)
        if member is None or not member.is_patching:
            return
        settings = self.settings
        if failure is Failure.INVALID:
            member.denied = why or "the API server refuses the pin"
            member.is_patching = False
            self._tell(member, f"cannot be pinned: {member.denied}", is_warning=True)
            self._marked[member.sight.unit] = None
            return
        if failure is Failure.FORBIDDEN:
            self._tell(member, f"cannot be pinned: {why}", is_warning=True)
        is_newer = member.sight.pod.resource_version != member.patched_version
        if failure in (Failure.CONFLICT, Failure.STALE) and is_newer:
            member.is_patching = False
            self._marked[member.sight.unit] = None
            return
        wait_s = {Failure.FORBIDDEN: settings.forbidden_s, Failure.BUSY: settings.busy_s}
        self._later[uid] = at_s + wait_s.get(failure, settings.conflict_s)

    def _delete_failed(self, uid: str, failure: Failure, why: str, at_s: float) -> None:
        self.watchdog.again(uid, at_s)
        member = self._members.get(uid)
        if member is not None and failure in (Failure.INVALID, Failure.FORBIDDEN):
            self._tell(member, f"cannot be made anew: {why}", is_warning=True)

    # Time

    def _ticked(self, at_s: float) -> None:
        for uid in [uid for uid, due_s in self._later.items() if due_s <= at_s]:
            del self._later[uid]
            late = self._members[uid]
            late.is_patching = False
            self._marked[late.sight.unit] = None
        for name in self._refused:
            if self.units[name].retry_s <= at_s:
                self._marked[name] = None
        if self._is_synced and self.epoch is not None:
            for uid, waited_s in self.watchdog.overdue(at_s):
                member = self._members.get(uid)
                if member is not None:
                    self._overdue(member, waited_s, at_s)
        self._open(at_s)

    def _open(self, at_s: float) -> None:
        """Without any leader for long, gates are removed, where that was asked for."""
        open_s = self.settings.open_s
        if open_s is None or self._leaderless_s is None or at_s - self._leaderless_s < open_s:
            return
        for member in self._members.values():
            if member.is_waiting and not member.is_patching:
                pod = member.sight.pod
                member.is_patching, member.patched_version = True, pod.resource_version
                self._later[member.uid] = at_s + self.settings.busy_s
                self._writes.append(Strip(member.uid, member.sight.key, pod.resource_version, None))

    def _overdue(self, member: Member, waited_s: float, at_s: float) -> None:
        """A pinned pod that cannot be scheduled: it and its gang are made anew, or people hear of it."""
        assert self.epoch is not None
        unit = self.units[member.sight.unit]
        gang = unit.alive if unit.size > 1 else [member]
        pod = member.sight.pod
        why = f"pinned to {member.sight.pinned}, where kube-scheduler cannot put it: {pod.unscheduled_message}"
        if any(one.sight.pod.owner is None for one in gang):
            self._tell(member, f"{why}; delete it and create it again", is_warning=True)
            self.watchdog.again(member.uid, at_s)
            return
        owner = pod.owner.uid if pod.owner is not None else ""
        if not self.watchdog.may_recreate(unit.name if unit.size > 1 else owner, waited_s):
            return
        self.watchdog.recreated(unit.name if unit.size > 1 else owner, at_s)
        unit.is_stale = unit.stand is Stand.PLACED
        self._marked[unit.name] = None
        for one in gang:
            self.watchdog.again(one.uid, at_s)
            if not one.sight.pod.is_going and not one.is_waiting:
                self._tell(one, f"made anew: {why}", is_warning=True)
                self._writes.append(Recreate(one.uid, one.sight.key, self.epoch, why))

    # Looking

    def _look(self, unit: Unit, at_s: float) -> None:
        before = unit.stand
        for told in look(unit, self.others, self.epoch, at_s):
            match told:
                case Cancel():
                    self._cancels.append(told)
                case Submit():
                    self._submits.append(told)
                case Tell(uid, _, text, is_warning):
                    self._tell(self._members[uid], text, is_warning=is_warning)
                case _:
                    self._writes.append(told)
        if unit.stand is not before:
            self._account_all(unit)
        self._refused.pop(unit.name, None)
        if unit.stand is Stand.REFUSED:
            self._refused[unit.name] = None
        if not unit.members and unit.stand in (Stand.UNKNOWN, Stand.REFUSED):
            self._refused.pop(unit.name, None)
            del self.units[unit.name]

    def _mark_places(self, node_name: str) -> None:
        """Units that are to go to a node; those that stand there are left alone."""
        for uid in self._traits if self._is_synced else ():
            member = self._members[uid]
            unit = self.units[member.sight.unit]
            place = unit.place_of(member)
            if place is not None and place.node_name == node_name:
                self._marked[unit.name] = None

    def _tell(self, member: Member, text: str, *, is_warning: bool = False) -> None:
        if member.told != text:
            member.told = text
            self._tells.append(Tell(member.uid, member.sight.key, text, is_warning))

    def _tell_unit(self, unit: Unit, text: str, *, is_warning: bool = False) -> None:
        for member in unit.waiting[:1]:
            self._tell(member, text, is_warning=is_warning)
