"""Pods that request MIG slices by resource: which node and which existing slices each gets.

The node is taken on which the fewest GPUs are woken, then the one whose GPUs keep the least free; slices come from
the fullest GPU in use first. The agent's device plugin uses the same rule.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.node_affinity import find_unmet_rule
from eelgrid_controller.engines.kubernetes.model.node_inventory import closed_reason
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import GroupMember, IntentRefusal, PodKey
from eelgrid_controller.engines.kubernetes.model.well_known import RESOURCE_MIG_PREFIX
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    GateInstruction,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    UngatePod,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import DeviceLane, InflightPods, UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.intent import SLICE_UNIT_PREFIX, WorkloadIntent, requested_slices
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan


class OfferedMigSlice(NamedTuple):
    """A MIG slice that exists; `size` in memory slices."""

    uuid: str
    gpu_index: int
    start: int
    size: int


class SliceOffer(NamedTuple):
    """What a node has left, by resource; `slices` only where they are known, `used` are memory slices held by GPU."""

    node_name: str
    cpu_milli: int
    memory_bytes: int
    left: Mapping[str, int]
    slices: Mapping[str, Sequence[OfferedMigSlice]] | None = None
    used: Mapping[int, int] = {}
    is_awake: bool = False


class SlicePlacement(NamedTuple):
    """Where a pod goes; the slices are empty where the node's plugin chooses."""

    node_name: str
    slices: tuple[OfferedMigSlice, ...] = ()


def choose_slices(
    wanted: Sequence[tuple[str, int]], cpu_milli: int, memory_bytes: int, offers: Iterable[SliceOffer]
) -> SlicePlacement | None:
    """The place for one pod, None without any; `wanted` are counts by resource."""
    best: tuple[tuple[int, int, str], SlicePlacement] | None = None
    for offer in offers:
        if cpu_milli > max(0, offer.cpu_milli) or memory_bytes > max(0, offer.memory_bytes):
            continue
        if any(offer.left.get(resource, 0) < count for resource, count in wanted):
            continue
        found = _on(wanted, offer)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def select_fullest(free: Sequence[OfferedMigSlice], used: Mapping[int, int], count: int) -> tuple[OfferedMigSlice, ...]:
    """So many of the free slices: on GPUs in use first, the fullest of them; fewer where there are fewer."""
    left = sorted(free, key=lambda one: (one.gpu_index, one.start))
    held = dict(used)
    chosen: list[OfferedMigSlice] = []
    while left and len(chosen) < count:
        room = Counter(one.gpu_index for one in left)
        most = count - len(chosen)

        def order(one: OfferedMigSlice, room: Counter[int] = room, most: int = most) -> tuple[bool, int, int, int, int]:
            is_asleep = one.gpu_index not in held
            gain = min(room[one.gpu_index], most) if is_asleep else 0
            return is_asleep, -gain, -held.get(one.gpu_index, 0), one.gpu_index, one.start

        best = min(left, key=order)
        chosen.append(best)
        left.remove(best)
        held[best.gpu_index] = held.get(best.gpu_index, 0) + best.size
    return tuple(chosen)


def _on(wanted: Sequence[tuple[str, int]], offer: SliceOffer) -> tuple[tuple[int, int, str], SlicePlacement] | None:
    """The choice on one node and its rank: GPUs woken, memory slices left free on its GPUs, name."""
    if offer.slices is None:
        spare = sum(offer.left.values()) - sum(count for _, count in wanted)
        return (0 if offer.is_awake else 1, spare, offer.node_name), SlicePlacement(offer.node_name)
    used = dict(offer.used)
    chosen: list[OfferedMigSlice] = []
    for resource, count in wanted:
        found = select_fullest(offer.slices.get(resource, ()), used, count)
        if len(found) < count:
            return None
        chosen += found
        for one in found:
            used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
    on = {one.gpu_index for one in chosen}
    taken = {one.uuid for one in chosen}
    spare = sum(
        one.size for some in offer.slices.values() for one in some if one.gpu_index in on and one.uuid not in taken
    )
    return (len(on - offer.used.keys()), spare, offer.node_name), SlicePlacement(offer.node_name, tuple(chosen))


_RESERVED_S = 3.0  # after which what stands on a node is counted there by everybody
_RETRY_S = {WriteFailure.FORBIDDEN: 60.0, WriteFailure.INVALID: 300.0, WriteFailure.BUSY: 5.0}


@dataclass(frozen=True, slots=True)
class SlicePod(GroupMember):
    """A pod that asks for slices, always a group of its own, and what its people want where it still waits for us."""

    found: Pod
    pin: str = ""
    intent: WorkloadIntent | IntentRefusal | None = None

    @property
    def pod(self) -> Pod:
        """The pod as it was seen last."""
        return self.found

    @property
    def pinned(self) -> str:
        """The one node that its affinity allows; empty for any."""
        return self.pin


@dataclass(slots=True)
class _Given:
    """A place that was given; since when the pod was seen to stand there."""

    key: PodKey
    choice: SlicePlacement
    version: str
    stands_s: float | None = None


class SlicePodScheduler:
    """All of them; see the module."""

    def __init__(self, *, unbound_s: float, flight_s: float) -> None:
        self.flights = InflightPods(most_s=flight_s)
        self.let_go = 0
        self._watchdog = UnboundPodWatchdog(unbound_s=unbound_s)
        self._given: dict[str, _Given] = {}
        self._later: dict[str, float] = {}  # uid -> not before
        self._told: dict[str, str] = {}

    def on_failure(self, uid: str, failure: WriteFailure, at_s: float) -> None:
        """A pod was not let go."""
        self._given.pop(uid, None)
        list(self.flights.record_end(uid))
        self._later[uid] = at_s + _RETRY_S.get(failure, 1.0)

    def on_devices_reported(self, node_name: str, held: Mapping[PodKey, tuple[str, ...]], *, steers: bool) -> None:
        """A node says what its pods hold: what they were given is not held back for them any more."""
        list(self.flights.set_steered(node_name, is_so=steers))
        list(self.flights.on_devices_reported(node_name, held))
        for uid, given in list(self._given.items()):
            if given.choice.node_name == node_name and given.stands_s is not None and given.key in held:
                del self._given[uid]

    def schedule_pods(
        self,
        pods: Mapping[str, SlicePod],
        nodes: Mapping[str, KubeNode],
        offers: Iterable[SliceOffer],
        epoch: int,
        at_s: float,
    ) -> list[GateInstruction]:
        """What is to be done now; `offers` take no account of what was given and is not seen yet."""
        self._forget_missing(pods, at_s)
        list(self.flights.expire_overdue(at_s))
        open_ = {one.node_name: one for one in offers if one.node_name in nodes}
        for uid, given in self._given.items():
            name = given.choice.node_name
            if uid in pods and name in open_:
                open_[name] = _less(open_[name], pods[uid].pod, given, pods[uid].target_node)
        right: dict[object, list[str]] = {}
        told = list(self._overdue(pods, epoch, at_s))
        waiting = [one for one in pods.values() if one.is_waiting and one.pod.uid not in self._given]
        for one in sorted(waiting, key=lambda it: (-it.pod.priority, it.pod.created_s or 0.0, it.pod.name)):
            if self._later.get(one.pod.uid, 0.0) > at_s:
                continue
            if one.pod.constraint not in right:
                right[one.pod.constraint] = [
                    name
                    for name in open_
                    if not closed_reason(nodes[name]) and not find_unmet_rule(one.pod.constraint, nodes[name])
                ]
            told += self._schedule_pod(one, open_, right[one.pod.constraint], epoch, at_s)
        return told

    def _schedule_pod(
        self, one: SlicePod, offers: dict[str, SliceOffer], right: list[str], epoch: int, at_s: float
    ) -> Iterator[GateInstruction]:
        pod, intent = one.pod, one.intent
        key = PodKey(pod.namespace, pod.name)
        if not isinstance(intent, WorkloadIntent):
            if intent is None or intent.needs is not None:
                return
            if intent.is_released:
                self._later[pod.uid] = at_s + _RETRY_S[WriteFailure.BUSY]
                yield RemoveGate(pod.uid, key, pod.resource_version, epoch, str(intent))
                return
            yield from self._event_if_new(one, f"not placed: {intent}", is_warning=True)
            return
        if intent.waits_for:
            yield from self._event_if_new(one, f"waits for other scheduling gates: {', '.join(intent.waits_for)}")
            return
        wanted = requested_slices(pod)
        unit = f"{SLICE_UNIT_PREFIX}{pod.uid}"
        free = [
            offers[name]
            for name in right
            if self.flights.can_start(unit, (DeviceLane(name, resource) for resource, _ in wanted))
        ]
        choice = choose_slices(wanted, pod.requested.cpu_milli, pod.requested.memory_bytes, free)
        if choice is None:
            if len(free) == len(right):
                text = ", ".join(f"{count} of {name}" for name, count in wanted)
                yield from self._event_if_new(
                    one, f"waits: no node that it may use has the CPU, the memory and {text} free"
                )
            return
        for resource, _ in wanted:
            self.flights.record_start(unit, pod.uid, key, DeviceLane(choice.node_name, resource), at_s)
        self.let_go += 1
        given = self._given[pod.uid] = _Given(key, choice, pod.resource_version)
        offers[choice.node_name] = _less(offers[choice.node_name], pod, given, "")
        plan = PodPlan(
            epoch,
            unit,
            0,
            choice.node_name,
            tuple(it.gpu_index for it in choice.slices),
            wanted[0][0].removeprefix(RESOURCE_MIG_PREFIX),
            pod.uid,
        )
        yield UngatePod(pod.uid, key, pod.resource_version, choice.node_name, format_plan(plan), epoch)

    def _forget_missing(self, pods: Mapping[str, SlicePod], at_s: float) -> None:
        for uid in [uid for uid in self._told if uid not in pods]:
            del self._told[uid]
        for uid in [uid for uid in self._later if uid not in pods]:
            del self._later[uid]
        for uid, given in list(self._given.items()):
            one = pods.get(uid)
            if one is None or one.pod.is_terminal:
                list(self.flights.record_end(uid))
                del self._given[uid]
            elif one.target_node == given.choice.node_name:
                given.stands_s = at_s if given.stands_s is None else given.stands_s
                # Its slices are its own until its node has said which it has.
                if at_s - given.stands_s >= max(_RESERVED_S, self.flights.most_s):
                    del self._given[uid]
            elif one.is_waiting and one.pod.resource_version != given.version:
                del self._given[uid]  # somebody changed it, so our patch was refused

    def _overdue(self, pods: Mapping[str, SlicePod], epoch: int, at_s: float) -> Iterator[GateInstruction]:
        for uid, one in pods.items():
            is_stuck = bool(one.pinned) and not one.pod.node_name and one.pod.unscheduled == "Unschedulable"
            if is_stuck and not one.pod.gates and not one.pod.is_deleting:
                self._watchdog.watch_pod(uid, at_s)
            else:
                self._watchdog.forget_pod(uid)
        for uid, waited_s in self._watchdog.overdue_pods(at_s):
            if uid not in pods:
                self._watchdog.forget_pod(uid)
                continue
            one = pods[uid]
            why = f"{one.pinned} does not take it: {one.pod.unscheduled_message or 'it cannot be scheduled there'}"
            if one.pod.owner is None:
                yield from self._event_if_new(
                    one, f"{why}; it has no controller, so delete it and create it again", is_warning=True
                )
            elif self._watchdog.may_recreate(one.pod.owner.uid, waited_s, at_s):
                self._watchdog.record_recreation(one.pod.owner.uid, waited_s, at_s)
                self._watchdog.restart_wait(uid, at_s)
                yield from self._event_if_new(one, f"recreated: {why}", is_warning=True)
                yield RecreatePod(uid, one.key, epoch, why)

    def _event_if_new(self, one: SlicePod, text: str, *, is_warning: bool = False) -> Iterator[RecordEvent]:
        if self._told.get(one.pod.uid) != text:
            self._told[one.pod.uid] = text
            yield RecordEvent(one.pod.uid, one.key, text, is_warning)


def _less(offer: SliceOffer, pod: Pod, given: _Given, target: str) -> SliceOffer:
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
        for resource, count in requested_slices(pod):
            left[resource] = left.get(resource, 0) - count
    is_counted = target != "" and given.stands_s is not None
    cpu_milli = 0 if is_counted else pod.requested.cpu_milli
    memory_bytes = 0 if is_counted else pod.requested.memory_bytes
    return offer._replace(
        cpu_milli=offer.cpu_milli - cpu_milli,
        memory_bytes=offer.memory_bytes - memory_bytes,
        left=left,
        slices=slices,
        used=used,
        is_awake=True,
    )
