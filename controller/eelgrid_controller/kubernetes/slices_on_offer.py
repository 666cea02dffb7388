"""MIG slices that nodes offer, and which of them a pod gets.

Owns the choice of a node and, where its slices are known one by one, of the slices. Must not
know pods' objects, patches, or who makes slices: they stand already.

Theory. A pod names the profile, so no slice is too large for it; what a choice can waste is a
GPU that sleeps and is woken, and room on several GPUs in the stead of one. So of all nodes
with room that one is taken on which the fewest GPUs are woken, then the one whose GPUs are
left with the least free; on it slices are taken one by one from the fullest GPU in use, then
from the one that has most of what is still wanted. For one profile no choice wakes fewer. The
agent's device plugin chooses by the same rule (`kubelet/choice.py` there), since nobody can
tell a kubelet whose slice is whose. Where slices are only counted, a node on which some are in
use is taken to wake nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Choice", "Offer", "Slice", "choose", "fullest"]


class Slice(NamedTuple):
    """One that stands; `size` in memory slices."""

    uuid: str
    gpu_index: int
    start: int
    size: int


class Offer(NamedTuple):
    """What a node has left, by resource; `slices` only where they are known, `used` are memory slices held by GPU."""

    node_name: str
    cpu_milli: int
    memory_bytes: int
    left: Mapping[str, int]
    slices: Mapping[str, Sequence[Slice]] | None = None
    used: Mapping[int, int] = {}
    is_awake: bool = False


class Choice(NamedTuple):
    """Where a pod goes; the slices are empty where the node's plugin chooses."""

    node_name: str
    slices: tuple[Slice, ...] = ()


def choose(
    wanted: Sequence[tuple[str, int]], cpu_milli: int, memory_bytes: int, offers: Iterable[Offer]
) -> Choice | None:
    """The place for one pod, None without any; `wanted` are counts by resource."""
    best: tuple[tuple[int, int, str], Choice] | None = None
    for offer in offers:
        if cpu_milli > max(0, offer.cpu_milli) or memory_bytes > max(0, offer.memory_bytes):
            continue
        if any(offer.left.get(resource, 0) < count for resource, count in wanted):
            continue
        found = _on(wanted, offer)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def fullest(free: Sequence[Slice], used: Mapping[int, int], count: int) -> tuple[Slice, ...]:
    """So many of the free slices: on GPUs in use first, the fullest of them; fewer where there are fewer."""
    left = sorted(free, key=lambda one: (one.gpu_index, one.start))
    held = dict(used)
    chosen: list[Slice] = []
    while left and len(chosen) < count:
        room = Counter(one.gpu_index for one in left)
        most = count - len(chosen)

        def order(one: Slice, room: Counter[int] = room, most: int = most) -> tuple[bool, int, int, int, int]:
            is_asleep = one.gpu_index not in held
            gain = min(room[one.gpu_index], most) if is_asleep else 0
            return is_asleep, -gain, -held.get(one.gpu_index, 0), one.gpu_index, one.start

        best = min(left, key=order)
        chosen.append(best)
        left.remove(best)
        held[best.gpu_index] = held.get(best.gpu_index, 0) + best.size
    return tuple(chosen)


def _on(wanted: Sequence[tuple[str, int]], offer: Offer) -> tuple[tuple[int, int, str], Choice] | None:
    """The choice on one node and its rank: GPUs woken, memory slices left free on its GPUs, name."""
    if offer.slices is None:
        spare = sum(offer.left.values()) - sum(count for _, count in wanted)
        return (0 if offer.is_awake else 1, spare, offer.node_name), Choice(offer.node_name)
    used = dict(offer.used)
    chosen: list[Slice] = []
    for resource, count in wanted:
        found = fullest(offer.slices.get(resource, ()), used, count)
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
    return (len(on - offer.used.keys()), spare, offer.node_name), Choice(offer.node_name, tuple(chosen))
