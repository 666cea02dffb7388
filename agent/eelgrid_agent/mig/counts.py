"""From counts of names to places on one device, and from what stands on a device to counts of names.

People and mig-parted's files say how many instances of which name they want;
a device wants profile ids and starts. Names are found by what the driver
prints, since they differ between parts and drivers; shares of one GPU instance
are packed together; places come from `placing`. Knows no device port, no file
and no steps.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eelgrid_agent.mig.layout import BadLayout, Layout, Part, fits, found
from eelgrid_agent.mig.names import MigName
from eelgrid_agent.mig.partitioner import TransitionRefused
from eelgrid_agent.mig.placing import place
from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuLayout, WantedInstance

__all__ = ["Asked", "as_asked", "counted", "known_names", "placed", "stands"]

_GIB = 1024**3
_EIGHTHS = 8
# A device holds seven instances of at most seven compute instances.
_ASKED_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One MIG device that somebody wants: a name and, where they care, the start of its GPU instance."""

    name: MigName
    start: int | None = None


def known_names(geometry: MigGeometry) -> str:
    """The names that this part goes by."""
    return ", ".join(profile.name for profile in geometry.profiles.values())


def counted(gpu: Gpu, geometry: MigGeometry) -> Mapping[MigName, int]:
    """What stands on a device, as mig-parted counts it: by compute instance, so one without any does not count."""
    counts: Counter[MigName] = Counter()
    for instance in gpu.gpu_instances:
        profile, whole = geometry.profile_by_id(instance.profile_id), MigName.parse(instance.profile)
        if profile is None or whole is None:
            continue
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        for child in instance.compute_instances:
            counts[whole.part(slices.get(child.profile_id, whole.slices))] += 1
    return counts


def placed(
    asked: Sequence[Asked],
    *,
    gpu: Gpu,
    geometry: MigGeometry,
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
) -> GpuLayout:
    """The layout that holds all that is asked for, with a place for each; raises BadLayout.

    `busy` and `foreign` are ids of GPU instances that may not be touched. Where
    nothing fits around them the layout is the one without them: whoever plans
    the way there will be told the rule that forbids it.
    """
    if len(asked) > _ASKED_MOST:
        raise BadLayout("mig-devices", f"{len(asked)} MIG devices", f"ask for at most {_ASKED_MOST} on one GPU")
    anywhere = all(item.start is None for item in asked)
    whole = all(instance.compute_instances for instance in gpu.gpu_instances)
    if gpu.mig_enabled and anywhere and whole and stands(asked, gpu=gpu, geometry=geometry):
        # However the shares are packed: nothing should move.
        return as_asked(found(gpu), gpu.uuid, geometry)
    fixed, free = _pack(asked, gpu, geometry)
    try:
        layout = place(geometry, gpu, free, fixed=fixed, busy=busy, foreign=foreign)
    except TransitionRefused:
        layout = place(geometry, gpu, free, fixed=fixed)
    return as_asked(layout, gpu.uuid, geometry)


def stands(asked: Iterable[Asked], *, gpu: Gpu, geometry: MigGeometry) -> bool:
    """Whether exactly these are on a device, wherever they are and however shares are packed; raises BadLayout.

    As mig-parted judges: by compute instances, so that a GPU instance without any does not count.
    """
    wanted = Counter((_profile_of(item.name, gpu, geometry).id, item.name.compute) for item in asked)
    there: Counter[tuple[int, int]] = Counter()
    for instance in gpu.gpu_instances:
        profile = geometry.profile_by_id(instance.profile_id)
        sizes = {ci.id: ci.compute_slices for ci in profile.compute_instances} if profile else {}
        there.update((instance.profile_id, sizes.get(child.profile_id, 0)) for child in instance.compute_instances)
    return wanted == there


def as_asked(layout: Layout, uuid: str, geometry: MigGeometry) -> GpuLayout:
    """A layout in the words of the contract."""
    instances = tuple(_spelled(layout, geometry))
    return GpuLayout(gpu_uuid=uuid, mig_enabled=layout.mig_enabled, instances=instances)


def _spelled(layout: Layout, geometry: MigGeometry) -> Iterator[WantedInstance]:
    for part in layout.parts:
        profile = geometry.profile_by_id(part.profile_id)
        if profile is None:
            raise BadLayout("instances", f"{geometry.key} has no profile {part.profile_id}", "ask for another layout")
        sizes = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        slices = () if part.compute == (profile.whole.id,) else tuple(sizes[child] for child in part.compute)
        yield WantedInstance(profile=profile.name, start=part.start, compute_slices=slices)


def _profile_of(name: MigName, gpu: Gpu, geometry: MigGeometry) -> GiProfile:
    """By the name that the driver prints, else by the one that follows from the sizes, as mig-parted does it."""
    profiles = geometry.profiles.values()
    printed = [profile for profile in profiles if MigName.parse(profile.name) == name.instance]
    computed = [profile for profile in profiles if _computed(profile, gpu) == name.instance]
    if printed or computed:
        return (printed or computed)[0]
    like = [
        profile.name
        for profile in profiles
        if (alike := MigName.parse(profile.name)) is not None
        and (alike.slices, alike.extras, alike.lacks) == (name.slices, name.extras, name.lacks)
    ]
    hint = f"on this part {name.slices} slices go by {' or '.join(like)}" if like else f"it has {known_names(geometry)}"
    raise BadLayout(str(name), f"{gpu.product or geometry.key} (GPU {gpu.index}) has no such profile", hint)


def _computed(profile: GiProfile, gpu: Gpu) -> MigName | None:
    """The name by size: the share of the device's memory in whole eighths, of its whole GiB."""
    printed = MigName.parse(profile.name)
    if profile.memory_bytes is None or not gpu.memory_bytes or printed is None:
        return None
    eighths = math.ceil(profile.memory_bytes / gpu.memory_bytes * _EIGHTHS)
    # Half up, never to even: names of other rounding would not be mig-parted's.
    memory_gb = math.floor(eighths / _EIGHTHS * math.ceil(gpu.memory_bytes / _GIB) + 0.5)
    return replace(printed, memory_gb=memory_gb)


def _pack(
    asked: Sequence[Asked], gpu: Gpu, geometry: MigGeometry
) -> tuple[tuple[Part, ...], list[tuple[int, tuple[int, ...]]]]:
    """Compute instances into GPU instances: parts that have a place, and shapes that have none.

    Shares of one instance go together as long as they fit, largest first; with
    a place, whatever names it shares it.
    """
    at_places: dict[tuple[str, int], list[int]] = {}
    anywhere: dict[str, list[list[int]]] = {}
    profiles: dict[str, GiProfile] = {}
    for item in sorted(asked, key=lambda item: -item.name.compute):
        profile = _profile_of(item.name, gpu, geometry)
        profiles[profile.key] = profile
        share = next((ci.id for ci in profile.compute_instances if ci.compute_slices == item.name.compute), None)
        if share is None:
            sizes = ", ".join(str(ci.compute_slices) for ci in profile.compute_instances)
            raise BadLayout(str(item.name), "there is no such share", f"{profile.name} holds shares of {sizes} slices")
        if item.start is not None:
            at_places.setdefault((profile.key, item.start), []).append(share)
            continue
        held = anywhere.setdefault(profile.key, [])
        room = next((one for one in held if fits(profile, tuple(sorted((*one, share), reverse=True)))), None)
        if room is None:
            held.append([share])
        else:
            room.append(share)
    fixed = tuple(_part(profiles[key], start, shares) for (key, start), shares in at_places.items())
    reason = geometry.conflict((profiles[key], start) for key, start in at_places)
    if reason is not None:
        raise BadLayout("mig-devices", reason, "move it, or ask for fewer or smaller instances")
    shapes = [(profiles[key].id, tuple(sorted(one, reverse=True))) for key, held in anywhere.items() for one in held]
    return fixed, shapes


def _part(profile: GiProfile, start: int, shares: Sequence[int]) -> Part:
    compute = tuple(sorted(shares, reverse=True))
    if not fits(profile, compute):
        problem = "cannot hold so many shares together"
        raise BadLayout(f"{profile.name}@{start}", problem, f"it has {profile.compute_slices} slices in all")
    return Part(profile_id=profile.id, start=start, size=profile.size, compute=compute)
