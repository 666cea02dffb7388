"""Placement of requested MIG devices on one GPU: from counts of names to profiles and starts.

Of all feasible placements the one is chosen that keeps existing instances, then the one that leaves the most places
for the largest profiles. Ties go to the lowest starts. At most seven instances exist, so the search is exhaustive.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eelgrid_agent.enforce.mig.layout import (
    InstancePart,
    InvalidLayout,
    MigLayout,
    MigName,
    build_layout,
    fits_compute_instances,
    read_layout,
    read_part,
)
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused, find_conflict, plan_steps
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuLayout, WantedInstance

# (profile id, compute profile ids as in Part)
InstanceShape = tuple[int, tuple[int, ...]]


def place_instances(
    geometry: MigGeometry,
    gpu: Gpu,
    shapes: Sequence[InstanceShape],
    *,
    fixed: tuple[InstancePart, ...] = (),
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
) -> MigLayout:
    """The layout that holds exactly these and takes the fewest steps; raises BadLayout, TransitionRefused.

    `fixed` have their places already and are held beside them. BadLayout when they cannot stand together on this part
    at all, TransitionRefused when what may not be touched stands in the way.
    """
    if len(fixed) + len(shapes) > geometry.most:
        raise InvalidLayout(
            "instances", f"are {len(fixed) + len(shapes)}", f"{geometry.key} holds {geometry.most} at most"
        )
    profiles = {profile.id: profile for profile in geometry.profiles.values()}
    for number, (profile_id, _) in enumerate(shapes):
        if profile_id not in profiles:
            known = ", ".join(f"{profile.name} ({key})" for key, profile in geometry.profiles.items())
            raise InvalidLayout(f"instances[{number}].profile", f"is {profile_id}", f"use one of {known}")
    ordered = sorted(shapes, key=lambda shape: (-profiles[shape[0]].size, shape))
    candidates: list[tuple[InstancePart, ...]] = []
    _extend(geometry, [(profiles[shape[0]], shape[1]) for shape in ordered], fixed, candidates, len(fixed))
    if not candidates:
        everything = [*(part.profile_id for part in fixed), *(profile_id for profile_id, _ in shapes)]
        names = ", ".join(profiles[profile_id].name for profile_id in everything if profile_id in profiles)
        raise InvalidLayout(
            "instances", f"{names} cannot stand together on {geometry.key}", "ask for fewer or smaller ones"
        )
    # Which places are best has nothing to do with the mode.
    gpu = replace(gpu, mig_capable=True, mig_enabled=True, mig_pending=False)
    outside = [read_part(instance) for instance in gpu.gpu_instances if instance.id in foreign]
    best: tuple[tuple[object, ...], MigLayout] | None = None
    refusal: TransitionRefused | None = None
    for parts in candidates:
        layout = build_layout(True, parts)
        try:
            steps = plan_steps(geometry, gpu, layout, busy=busy, foreign=foreign)
        except TransitionRefused as refused:
            refusal = refusal or refused
            continue
        standing = [*parts, *(part for part in outside if part not in parts)]
        left = tuple(-places for places in _left(geometry, standing))
        rank = (len(steps), left, tuple(part.start for part in parts))
        if best is None or rank < best[0]:
            best = (rank, layout)
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _extend(
    geometry: MigGeometry,
    left: list[tuple[GiProfile, tuple[int, ...]]],
    placed: tuple[InstancePart, ...],
    found: list[tuple[InstancePart, ...]],
    fixed: int,
) -> None:
    """Every way to place what is left beside what is placed, of which the first were placed by the caller."""
    if not left:
        if find_conflict(geometry, placed) is None:
            found.append(placed)
        return
    (profile, compute), *rest = left
    last = placed[-1] if len(placed) > fixed else None
    alike = last is not None and (last.profile_id, last.compute) == (profile.id, compute)
    for start in profile.starts:
        if alike and last is not None and start <= last.start:
            continue
        part = InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=compute)
        if not any(part.overlaps(other) for other in placed):
            _extend(geometry, rest, (*placed, part), found, fixed)


def _left(geometry: MigGeometry, standing: Sequence[InstancePart]) -> tuple[int, ...]:
    """From how many places each plain profile could still be made, the largest first."""
    plain = [profile for profile in geometry.profiles.values() if not profile.media and not profile.graphics]
    largest_first = sorted(plain, key=lambda profile: (-profile.compute_slices, -profile.size, profile.id))
    return tuple(
        sum(
            find_conflict(
                geometry, (*standing, InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=()))
            )
            is None
            for start in profile.starts
        )
        for profile in largest_first
    )


_GIB = 1024**3
_EIGHTHS = 8
# A device holds seven instances of at most seven compute instances.
_ASKED_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedMigDevice:
    """One MIG device that somebody wants: a name and, where they care, the start of its GPU instance."""

    name: MigName
    start: int | None = None


def list_profile_names(geometry: MigGeometry) -> str:
    """The names that this part goes by."""
    return ", ".join(profile.name for profile in geometry.profiles.values())


def count_mig_devices(gpu: Gpu, geometry: MigGeometry) -> Mapping[MigName, int]:
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


def place_mig_devices(
    asked: Sequence[RequestedMigDevice],
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
        raise InvalidLayout("mig-devices", f"{len(asked)} MIG devices", f"ask for at most {_ASKED_MOST} on one GPU")
    anywhere = all(item.start is None for item in asked)
    whole = all(instance.compute_instances for instance in gpu.gpu_instances)
    if gpu.mig_enabled and anywhere and whole and matches_devices(asked, gpu=gpu, geometry=geometry):
        # However the shares are packed: nothing should move.
        return to_gpu_layout(read_layout(gpu), gpu.uuid, geometry)
    fixed, free = _pack(asked, gpu, geometry)
    try:
        layout = place_instances(geometry, gpu, free, fixed=fixed, busy=busy, foreign=foreign)
    except TransitionRefused:
        layout = place_instances(geometry, gpu, free, fixed=fixed)
    return to_gpu_layout(layout, gpu.uuid, geometry)


def matches_devices(asked: Iterable[RequestedMigDevice], *, gpu: Gpu, geometry: MigGeometry) -> bool:
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


def to_gpu_layout(layout: MigLayout, uuid: str, geometry: MigGeometry) -> GpuLayout:
    """A layout in the words of the contract."""
    instances = tuple(_wanted_instances(layout, geometry))
    return GpuLayout(gpu_uuid=uuid, mig_enabled=layout.mig_enabled, instances=instances)


def _wanted_instances(layout: MigLayout, geometry: MigGeometry) -> Iterator[WantedInstance]:
    for part in layout.parts:
        profile = geometry.profile_by_id(part.profile_id)
        if profile is None:
            raise InvalidLayout(
                "instances", f"{geometry.key} has no profile {part.profile_id}", "ask for another layout"
            )
        sizes = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        slices = () if part.compute == (profile.whole.id,) else tuple(sizes[child] for child in part.compute)
        yield WantedInstance(profile=profile.name, start=part.start, compute_slices=slices)


def _profile_of(name: MigName, gpu: Gpu, geometry: MigGeometry) -> GiProfile:
    """By the name that the driver prints, else by the one that follows from the sizes, as mig-parted does it."""
    profiles = geometry.profiles.values()
    printed = [profile for profile in profiles if MigName.parse(profile.name) == name.instance]
    computed = [profile for profile in profiles if _name_by_size(profile, gpu) == name.instance]
    if printed or computed:
        return (printed or computed)[0]
    like = [
        profile.name
        for profile in profiles
        if (alike := MigName.parse(profile.name)) is not None
        and (alike.slices, alike.extras, alike.lacks) == (name.slices, name.extras, name.lacks)
    ]
    hint = (
        f"on this part {name.slices} slices go by {' or '.join(like)}"
        if like
        else f"it has {list_profile_names(geometry)}"
    )
    raise InvalidLayout(str(name), f"{gpu.product or geometry.key} (GPU {gpu.index}) has no such profile", hint)


def _name_by_size(profile: GiProfile, gpu: Gpu) -> MigName | None:
    """The name by size: the share of the device's memory in whole eighths, of its whole GiB."""
    printed = MigName.parse(profile.name)
    if profile.memory_bytes is None or not gpu.memory_bytes or printed is None:
        return None
    eighths = math.ceil(profile.memory_bytes / gpu.memory_bytes * _EIGHTHS)
    # Half up, never to even: names of other rounding would not be mig-parted's.
    memory_gb = math.floor(eighths / _EIGHTHS * math.ceil(gpu.memory_bytes / _GIB) + 0.5)
    return replace(printed, memory_gb=memory_gb)


def _pack(
    asked: Sequence[RequestedMigDevice], gpu: Gpu, geometry: MigGeometry
) -> tuple[tuple[InstancePart, ...], list[tuple[int, tuple[int, ...]]]]:
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
            raise InvalidLayout(
                str(item.name), "there is no such share", f"{profile.name} holds shares of {sizes} slices"
            )
        if item.start is not None:
            at_places.setdefault((profile.key, item.start), []).append(share)
            continue
        held = anywhere.setdefault(profile.key, [])
        room = next(
            (one for one in held if fits_compute_instances(profile, tuple(sorted((*one, share), reverse=True)))), None
        )
        if room is None:
            held.append([share])
        else:
            room.append(share)
    fixed = tuple(_part(profiles[key], start, shares) for (key, start), shares in at_places.items())
    reason = geometry.conflict((profiles[key], start) for key, start in at_places)
    if reason is not None:
        raise InvalidLayout("mig-devices", reason, "move it, or ask for fewer or smaller instances")
    shapes = [(profiles[key].id, tuple(sorted(one, reverse=True))) for key, held in anywhere.items() for one in held]
    return fixed, shapes


def _part(profile: GiProfile, start: int, shares: Sequence[int]) -> InstancePart:
    compute = tuple(sorted(shares, reverse=True))
    if not fits_compute_instances(profile, compute):
        problem = "cannot hold so many shares together"
        raise InvalidLayout(f"{profile.name}@{start}", problem, f"it has {profile.compute_slices} slices in all")
    return InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=compute)
