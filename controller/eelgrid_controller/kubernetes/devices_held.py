"""Planned devices against held ones: what is to be put right on a node, and what cannot be.

Owns that judgement. Must not know the core, pods' objects, or how anything is told.

Theory. What a pod holds, by the word of its kubelet, is so; the plan follows. Of the pods on
a node some were seen with their devices, some were not yet. Those that were seen and hold
others than planned are pointed at what they hold, all in one step, so that two which got each
other's devices swap. Who was not seen yet and was planned on something that another really
holds is planned anew on what came free, which the kubelet can still be asked for. What is not
the kubelet's to give (work that runs there without it) stays where it is, and what collides with
it cannot be put right; nor can a pod that holds more or fewer devices than it was planned on.
Two that are said to hold one device are a word out of date: nothing is done until the next.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Planned", "Repair", "Replica", "repair"]

Replica = tuple[str, int]


class Planned(NamedTuple):
    """A replica on the node: its planned devices, what its pod holds (None: not seen), and whether a kubelet gives them."""

    planned: frozenset[str]
    held: frozenset[str] | None = None
    is_given: bool = True


class Repair(NamedTuple):
    """The devices that replicas are to be pointed at, all at once, and why others cannot be."""

    pointed: Mapping[Replica, tuple[str, ...]]
    hopeless: Mapping[Replica, str]


def repair(standing: Mapping[Replica, Planned], strangers: Iterable[str], devices: Sequence[str]) -> Repair:
    """What to do on a node; `strangers` are devices that pods of others hold, `devices` all whole ones, in order."""
    seen = {key: one.held for key, one in standing.items() if one.held and one.is_given}
    hopeless: dict[Replica, str] = {}
    wrong: dict[Replica, frozenset[str]] = {}
    foreign = frozenset(strangers)
    for key, held in sorted(seen.items()):
        planned = standing[key].planned
        others = [one for other, one in seen.items() if other != key]
        if held == planned or any(held & one for one in others) or held & foreign or not held <= set(devices):
            continue
        if len(held) != len(planned):
            hopeless[key] = f"it holds {len(held)} devices and was planned on {len(planned)}"
        else:
            wrong[key] = held
    _drop_collisions(standing, wrong, hopeless)
    pointed = {key: tuple(sorted(held)) for key, held in wrong.items()}
    taken = foreign.union(*seen.values(), *wrong.values()) if seen else foreign
    for key, found in _planned_anew(standing, wrong, taken, devices).items():
        if found is None:
            hopeless[key] = "others hold them, and no others are free"
        else:
            pointed[key] = found
    # Whoever was to make room and cannot keeps its plan: what needs that room cannot be told so either.
    while True:
        kept = {uuid for key in hopeless for uuid in standing[key].planned}
        refused = [key for key, uuids in pointed.items() if kept.intersection(uuids)]
        if not refused:
            return Repair(pointed, hopeless)
        for key in refused:
            del pointed[key]
            hopeless[key] = "it holds some that are planned for another, which can have no others"


def _drop_collisions(
    standing: Mapping[Replica, Planned], wrong: dict[Replica, frozenset[str]], hopeless: dict[Replica, str]
) -> None:
    """What is held by work that no kubelet gives devices to, or stays with a pod that cannot be put right."""
    while True:
        fixed = {
            uuid: key
            for key, one in standing.items()
            if not one.is_given or key in hopeless or (one.held and key not in wrong)
            for uuid in one.planned
        }
        colliding = {key: next(uuid for uuid in sorted(held) if uuid in fixed) for key, held in wrong.items() if held & fixed.keys()}  # fmt: skip
        if not colliding:
            return
        for key, uuid in colliding.items():
            del wrong[key]
            hopeless[key] = f"it holds {uuid}, which {fixed[uuid][0]} is planned on and keeps"


def _planned_anew(
    standing: Mapping[Replica, Planned], wrong: Mapping[Replica, frozenset[str]], taken: frozenset[str],
    devices: Sequence[str],
) -> dict[Replica, tuple[str, ...] | None]:  # fmt: skip
    """Replicas that were not seen yet and whose planned devices are somebody's; None where there are no others."""
    unseen = {key: one.planned for key, one in standing.items() if one.is_given and not one.held and one.planned}
    displaced = {key: planned for key, planned in sorted(unseen.items()) if planned & taken}
    kept = [planned for key, planned in unseen.items() if key not in displaced]
    fixed = [one.planned for one in standing.values() if not one.is_given]
    used = set(taken).union(*kept, *fixed)
    for key, one in standing.items():
        if one.held and key not in wrong:
            used |= one.planned
    found: dict[Replica, tuple[str, ...] | None] = {}
    for key, planned in displaced.items():
        own = [uuid for uuid in devices if uuid in planned and uuid not in used]
        rest = [uuid for uuid in devices if uuid not in planned and uuid not in used]
        chosen = [*own, *rest][: len(planned)]
        if len(chosen) < len(planned):
            found[key] = None
            used |= planned
        else:
            found[key] = tuple(sorted(chosen))
            used.update(chosen)
    return found
