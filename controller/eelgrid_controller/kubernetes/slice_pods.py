"""Pods that ask for MIG slices by resource: who goes where, when, and who is told.

Owns what follows for each such pod from what nodes offer now. Must not know the API, the core
or clocks; time is an argument.

Theory. Slices that stand already are no business of the core, which places whole GPUs and
plans layouts: to it these pods are others, counted where they are. So each round looks at
pods and offers as they are, most urgent first, and lets go whoever has a place; nothing is
remembered but what was done a moment ago and is not to be seen yet: a place that was given
is taken off what its node offers until the pod stands there. To a node and a resource whose
slices follow our choice one pod goes at a time (flights.py). A pinned pod that kube-scheduler
cannot place is made anew by its owner, as the gate's are.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.kubernetes.constraints import unmet
from eelgrid_controller.kubernetes.flights import Flights, Lane
from eelgrid_controller.kubernetes.gate_events import Failure, Instruction, Key, Recreate, Strip, Tell, Ungate
from eelgrid_controller.kubernetes.holders import Holders
from eelgrid_controller.kubernetes.intent import Intent, Refused, intent_of
from eelgrid_controller.kubernetes.names import GATE, RESOURCE_GPU, RESOURCE_MIG_PREFIX
from eelgrid_controller.kubernetes.nodes import closed_reason
from eelgrid_controller.kubernetes.plans import Plan, plan_text
from eelgrid_controller.kubernetes.slices_on_offer import Choice, Offer, choose
from eelgrid_controller.kubernetes.views import KubeNode, Pod
from eelgrid_controller.kubernetes.watchdog import Watchdog

__all__ = ["SLICE_UNIT", "SlicePod", "SlicePods", "asks_for_slices", "slice_intent", "slices_wanted"]

SLICE_UNIT = "slice-"
_RESERVED_S = 3.0  # after which what stands on a node is counted there by everybody
_RETRY_S = {Failure.FORBIDDEN: 60.0, Failure.INVALID: 300.0, Failure.BUSY: 5.0}


def slices_wanted(pod: Pod) -> tuple[tuple[str, int], ...]:
    """How many slices by resource."""
    return tuple(pair for pair in pod.requested.extended if pair[0].startswith(RESOURCE_MIG_PREFIX))


def asks_for_slices(pod: Pod) -> bool:
    """Whether it asks for slices and for no whole GPU."""
    return bool(slices_wanted(pod)) and len(slices_wanted(pod)) == len(pod.requested.extended)


def slice_intent(pod: Pod, holders: Holders) -> Intent | Refused:
    """What its people want beside the slices, or why that cannot be had."""
    # To everything but the amounts, a pod with a slice is as one with a GPU.
    found = intent_of(replace(pod, requested=pod.requested._replace(extended=((RESOURCE_GPU, 1),))), holders)
    if isinstance(found, Intent) and found.size > 1:
        return Refused(
            "resources", f"names slices in a gang of {found.size}, and slices are placed pod by pod",
            "leave the gang out, or ask for whole GPUs",
        )  # fmt: skip
    return found


class SlicePod(NamedTuple):
    """A pod that asks for slices, and what its people want where it still waits for us."""

    pod: Pod
    pinned: str = ""
    intent: Intent | Refused | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits behind our gate."""
        return GATE in self.pod.gates and not self.pod.is_terminal and not self.pod.is_going

    @property
    def target(self) -> str:
        """The node that it is on or can only go to."""
        return "" if self.pod.is_terminal or self.pod.gates else self.pod.node_name or self.pinned


@dataclass(slots=True)
class _Given:
    """A place that was given; since when the pod was seen to stand there."""

    key: Key
    choice: Choice
    version: str
    stands_s: float | None = None


class SlicePods:
    """All of them; see the module."""

    def __init__(self, *, unbound_s: float, flight_s: float) -> None:
        self.flights = Flights(most_s=flight_s)
        self.let_go = 0
        self._watchdog = Watchdog(unbound_s=unbound_s)
        self._given: dict[str, _Given] = {}
        self._later: dict[str, float] = {}  # uid -> not before
        self._told: dict[str, str] = {}

    def failed(self, uid: str, failure: Failure, at_s: float) -> None:
        """A pod was not let go."""
        self._given.pop(uid, None)
        list(self.flights.ended(uid))
        self._later[uid] = at_s + _RETRY_S.get(failure, 1.0)

    def seen(self, node_name: str, held: Mapping[Key, tuple[str, ...]], *, steers: bool) -> None:
        """A node says what its pods hold: what they were given is not held back for them any more."""
        list(self.flights.steered(node_name, is_so=steers))
        list(self.flights.seen(node_name, held))
        for uid, given in list(self._given.items()):
            if given.choice.node_name == node_name and given.stands_s is not None and given.key in held:
                del self._given[uid]

    def take(
        self, pods: Mapping[str, SlicePod], nodes: Mapping[str, KubeNode], offers: Iterable[Offer], epoch: int, at_s: float
    ) -> list[Instruction]:  # fmt: skip
        """What is to be done now; `offers` take no account of what was given and is not seen yet."""
        self._forget(pods, at_s)
        list(self.flights.expired(at_s))
        open_ = {one.node_name: one for one in offers if one.node_name in nodes}
        for uid, given in self._given.items():
            name = given.choice.node_name
            if uid in pods and name in open_:
                open_[name] = _less(open_[name], pods[uid].pod, given, pods[uid].target)
        right: dict[object, list[str]] = {}
        told = list(self._overdue(pods, epoch, at_s))
        waiting = [one for one in pods.values() if one.is_waiting and one.pod.uid not in self._given]
        for one in sorted(waiting, key=lambda it: (-it.pod.priority, it.pod.created_s or 0.0, it.pod.name)):
            if self._later.get(one.pod.uid, 0.0) > at_s:
                continue
            if one.pod.constraint not in right:
                right[one.pod.constraint] = [
                    name for name in open_ if not closed_reason(nodes[name]) and not unmet(one.pod.constraint, nodes[name])
                ]  # fmt: skip
            told += self._look(one, open_, right[one.pod.constraint], epoch, at_s)
        return told

    def _look(
        self, one: SlicePod, offers: dict[str, Offer], right: list[str], epoch: int, at_s: float
    ) -> Iterator[Instruction]:
        pod, intent = one.pod, one.intent
        key = Key(pod.namespace, pod.name)
        if not isinstance(intent, Intent):
            if intent is None or intent.needs is not None:
                return
            if intent.is_released:
                self._later[pod.uid] = at_s + _RETRY_S[Failure.BUSY]
                yield Strip(pod.uid, key, pod.resource_version, epoch, str(intent))
                return
            yield from self._tell(one, f"not placed: {intent}", is_warning=True)
            return
        if intent.waits_for:
            yield from self._tell(one, f"waits for the gates of others: {', '.join(intent.waits_for)}")
            return
        wanted = slices_wanted(pod)
        unit = f"{SLICE_UNIT}{pod.uid}"
        free = [
            offers[name]
            for name in right
            if self.flights.may_go(unit, (Lane(name, resource) for resource, _ in wanted))
        ]
        choice = choose(wanted, pod.requested.cpu_milli, pod.requested.memory_bytes, free)
        if choice is None:
            if len(free) == len(right):
                text = ", ".join(f"{count} of {name}" for name, count in wanted)
                yield from self._tell(one, f"waits: no node that it may go to has room and {text} free")
            return
        for resource, _ in wanted:
            self.flights.begun(unit, pod.uid, key, Lane(choice.node_name, resource), at_s)
        self.let_go += 1
        given = self._given[pod.uid] = _Given(key, choice, pod.resource_version)
        offers[choice.node_name] = _less(offers[choice.node_name], pod, given, "")
        plan = Plan(
            epoch, unit, 0, choice.node_name, tuple(it.gpu_index for it in choice.slices),
            wanted[0][0].removeprefix(RESOURCE_MIG_PREFIX), pod.uid,
        )  # fmt: skip
        yield Ungate(pod.uid, key, pod.resource_version, choice.node_name, plan_text(plan), epoch)

    def _forget(self, pods: Mapping[str, SlicePod], at_s: float) -> None:
        for uid in [uid for uid in self._told if uid not in pods]:
            del self._told[uid]
        for uid in [uid for uid in self._later if uid not in pods]:
            del self._later[uid]
        for uid, given in list(self._given.items()):
            one = pods.get(uid)
            if one is None or one.pod.is_terminal:
                list(self.flights.ended(uid))
                del self._given[uid]
            elif one.target == given.choice.node_name:
                given.stands_s = at_s if given.stands_s is None else given.stands_s
                # Its slices are its own until its node has said which it has.
                if at_s - given.stands_s >= max(_RESERVED_S, self.flights.most_s):
                    del self._given[uid]
            elif one.is_waiting and one.pod.resource_version != given.version:
                del self._given[uid]  # somebody changed it, so our patch was refused

    def _overdue(self, pods: Mapping[str, SlicePod], epoch: int, at_s: float) -> Iterator[Instruction]:
        for uid, one in pods.items():
            is_stuck = bool(one.pinned) and not one.pod.node_name and one.pod.unscheduled == "Unschedulable"
            if is_stuck and not one.pod.gates and not one.pod.is_going:
                self._watchdog.watch(uid, at_s)
            else:
                self._watchdog.forget(uid)
        for uid, waited_s in self._watchdog.overdue(at_s):
            if uid not in pods:
                self._watchdog.forget(uid)
                continue
            one = pods[uid]
            why = f"{one.pinned} does not take it: {one.pod.unscheduled_message or 'it cannot be scheduled there'}"
            if one.pod.owner is None:
                yield from self._tell(one, f"{why}; nobody makes it anew, so delete it", is_warning=True)
            elif self._watchdog.may_recreate(one.pod.owner.uid, waited_s, at_s):
                self._watchdog.recreated(one.pod.owner.uid, waited_s, at_s)
                self._watchdog.again(uid, at_s)
                yield from self._tell(one, f"made anew: {why}", is_warning=True)
                yield Recreate(uid, Key(one.pod.namespace, one.pod.name), epoch, why)

    def _tell(self, one: SlicePod, text: str, *, is_warning: bool = False) -> Iterator[Tell]:
        if self._told.get(one.pod.uid) != text:
            self._told[one.pod.uid] = text
            yield Tell(one.pod.uid, Key(one.pod.namespace, one.pod.name), text, is_warning)


def _less(offer: Offer, pod: Pod, given: _Given, target: str) -> Offer:
    """An offer without what was given of it; what a pod that stands there is counted for already is left alone."""
    taken = {one.uuid for one in given.choice.slices}
    slices = offer.slices and {
        name: tuple(one for one in some if one.uuid not in taken) for name, some in offer.slices.items()
    }
    used = dict(offer.used)
    for some in (offer.slices or {}).values():
        for one in some:
            if one.uuid in taken:
                used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
    left = dict(offer.left)
    if not target:
        for resource, count in slices_wanted(pod):
            left[resource] = left.get(resource, 0) - count
    is_counted = target != "" and given.stands_s is not None
    cpu_milli = 0 if is_counted else pod.requested.cpu_milli
    memory_bytes = 0 if is_counted else pod.requested.memory_bytes
    return offer._replace(
        cpu_milli=offer.cpu_milli - cpu_milli, memory_bytes=offer.memory_bytes - memory_bytes, left=left,
        slices=slices, used=used, is_awake=True,
    )  # fmt: skip
