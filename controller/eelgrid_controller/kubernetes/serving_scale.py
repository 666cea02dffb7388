"""How many replicas a service's target is to have: what the core's places say, what others say, and who is heard.

Owns that decision for one service, the order of the writes, and when nothing is written. Must
not know the API, nor why the core has so many places; time is an argument.

Theory. Two may change the number: the steering, by the places that the core has, and
somebody else (an autoscaler, a person), at the target itself. Whoever changed it last is heard:

    the target has another number than was agreed    others said it: it is agreed, within the bounds of the service,
                                                     and the steering leaves it alone for HOLD_S, twice as long each
                                                     time, up to an hour
    the places say another number                    the target is given it

The places say: those that last, and one more for each pod that waits for a place, runs without
one or is yet to come, as far as no free place waits for it. So only pods whose place the core took from them make
the number smaller. They are marked first (pod-deletion-cost), then the number is lowered: of pods that are alike the ReplicaSet
deletes those. A target at 0 is switched off by somebody and stays so. While it is rolled over, which is while it has more
pods than it asks for, nothing is written. A target that is older than our own last write says nothing.

What was agreed is `status.desiredReplicas` of the service, so it outlives this process.

Source: kubernetes `pkg/controller/controller_utils.go`, ActivePodsWithRanks; KEP 2255.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.kubernetes.gangs import Unit
from eelgrid_controller.kubernetes.gate_events import Key
from eelgrid_controller.kubernetes.names import DELETION_COST
from eelgrid_controller.kubernetes.serving import Mode, Service, Target

__all__ = ["CHEAP", "HOLD_S", "Counted", "Mark", "Scaling", "SetReplicas", "counted"]

HOLD_S = 300.0
_HOLD_MOST_S = 3600.0
_QUIET_S = 6 * 3600.0  # without a word of others, after which they are new again
CHEAP = "-2147483647"


class Mark(NamedTuple):
    """Set or take away what deleting a pod costs."""

    key: Key
    uid: str
    cost: str | None


class SetReplicas(NamedTuple):
    """Give the target a number of replicas, if it still is what was looked at."""

    target: Target
    version: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The pods of a service and their places at one moment."""

    places: int = 0  # that the core has; 0 while it has none
    lasting: int = 0  # of these, not for a rollover alone
    vacant: int = 0  # of these, without a pod
    pods: int = 0  # that are there and stay
    placed: int = 0  # of these, with a place
    serving: int = 0  # of these, ready
    waiting: int = 0  # behind our gate without a place
    beside: int = 0  # that run without a place
    let_go: tuple[tuple[Key, str, str], ...] = ()  # whose place was taken: name, uid, cost now
    cheap: tuple[tuple[Key, str], ...] = ()  # with a place, and marked as if they had none


def counted(unit: Unit | None) -> Counted:
    """What a unit's pods and places are now."""
    if unit is None or unit.elastic is None:
        return Counted()
    elastic, present = unit.elastic, unit.present
    held = set(unit.slots.values())
    let_go = sorted(
        (one.sight.key, one.uid, one.sight.pod.annotations.get(DELETION_COST, ""))
        for one in present
        if one.uid in elastic.let_go and one.uid not in held
    )
    without = [one for one in present if one.uid not in held and one.uid not in elastic.let_go]
    return Counted(
        places=len(unit.places),
        lasting=elastic.lasting(len(unit.places)),
        vacant=sum(replica not in unit.slots for replica in unit.places),
        pods=len(present),
        placed=sum(one.uid in held for one in present),
        serving=sum(one.sight.pod.is_ready for one in present),
        waiting=sum(one.is_waiting for one in without),
        beside=sum(not one.is_waiting for one in without),
        let_go=tuple(let_go),
        cheap=tuple(
            sorted(
                (one.sight.key, one.uid)
                for one in present
                if one.uid in held and one.sight.pod.annotations.get(DELETION_COST) == CHEAP
            )
        ),
    )


@dataclass(slots=True)
class Scaling:
    """One service's number of replicas."""

    agreed: int | None = None  # what the target had when last looked at, or was given
    advice: str = ""  # why the steering is not heard now
    advice_reason: str = ""
    others: int | None = None  # the number that others gave last
    others_s: float = 0.0
    hold_s: float = HOLD_S
    _until_s: float = 0.0
    _span_s: float = 0.0
    _tried: frozenset[int] = frozenset()  # asked for of the target as it last was, whatever became of it
    _version: str = ""  # of that target
    _times: int = 0
    _written: tuple[int, str] | None = field(default=None)
    _written_s: float = 0.0

    def look(self, service: Service, version: str, seen: Counted, at_s: float) -> list[Mark | SetReplicas]:
        """What is to be written now; `version` is that of the target."""
        self.advice = self.advice_reason = ""
        wanted = service.wanted
        if wanted is None:
            return self._aside("TargetMissing", f"{service.target} is not there")
        if service.mode is not Mode.ENFORCE:
            self.agreed = None
            return self._aside("ModeRecommend", "its mode is Recommend: nothing is changed")
        if not self._is_fresh(version, wanted, at_s):
            return []
        if self.agreed is None:
            self.agreed = wanted
        told: list[Mark | SetReplicas] = [Mark(key, uid, None) for key, uid in seen.cheap]
        tried = self._tried
        if version != self._version:
            # What was asked of the older target has come about by now, or never will: it was refused.
            self._tried, self._version = frozenset(), version
        if wanted != self.agreed and wanted in tried:
            self.agreed = wanted  # our own write, of which no answer came
        elif wanted != self.agreed:
            self._heard(wanted, at_s)
        if wanted == 0:
            return self._aside("ScaledToZero", f"{service.target} was scaled to 0 by somebody, and is left so")
        bounded = min(max(wanted, service.least), service.most)
        if at_s < self._until_s:
            self._aside(
                "ScaledByOthers",
                f"somebody else set {self.others} replicas; the number is left to them for {self._span_s / 60.0:.0f} min",
            )
        elif seen.pods > wanted or seen.lasting != seen.places:
            self._aside("RollingOver", f"{service.target} is rolled over: {seen.pods} pods of {wanted}")
        else:
            placeless = seen.waiting + seen.beside + max(0, wanted - seen.pods)
            bounded = seen.lasting + max(0, placeless - seen.vacant)
            bounded = min(max(bounded, service.least), service.most)
        if bounded == wanted:
            return told
        marks = [Mark(key, uid, CHEAP) for key, uid, cost in seen.let_go[: max(0, wanted - bounded)] if cost != CHEAP]
        # First who goes, then how many.
        if marks:
            return [*told, *marks]
        self._tried |= {bounded}
        return [*told, SetReplicas(service.target, version, bounded)]

    def wrote(self, replicas: int, version: str, at_s: float) -> None:
        """The target has this number since this version."""
        self.agreed, self._written, self._written_s = replicas, (replicas, version), at_s

    def _aside(self, reason: str, text: str) -> list[Mark | SetReplicas]:
        self.advice_reason, self.advice = reason, text
        return []

    def _heard(self, wanted: int, at_s: float) -> None:
        """Somebody else set the number."""
        if at_s - self.others_s > _QUIET_S:
            self._times = 0
        self.agreed, self.others, self.others_s, self._tried = wanted, wanted, at_s, frozenset()
        self._span_s = min(_HOLD_MOST_S, self.hold_s * 2.0**self._times)
        self._until_s = at_s + self._span_s
        self._times = min(self._times + 1, 10)

    def _is_fresh(self, version: str, wanted: int, at_s: float) -> bool:
        """Whether the target is not older than what we wrote."""
        if self._written is None:
            return True
        replicas, written = self._written
        if version.isdigit() and written.isdigit():
            is_fresh = int(version) >= int(written)
        else:
            is_fresh = wanted == replicas or at_s - self._written_s > 10.0
        if is_fresh:
            self._written = None
        return is_fresh
