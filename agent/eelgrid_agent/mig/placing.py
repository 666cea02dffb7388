"""Places for instances that are asked for by profile only.

Pure: owns where the driver is told to put what has no place yet. Must not know
why the instances are wanted.

Theory. Of all places where the instances can stand, those cost nothing that
keep what stands; then comes what is left for later: the places from which a
seven, four, three, two or one-slice instance could still be made, the largest
counted first. That puts a three-slice instance at 4 and keeps slices 0 to 3
for four, two or ones, and it strands no slice that need not be stranded. Ties
go to the lowest starts, so that the answer is always the same. A part holds
seven instances at most, so that trying all places is quick: like instances are
placed in rising order, and what overlaps ends a branch.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from eelgrid_agent.mig.layout import BadLayout, Layout, Part, layout_of, part_of
from eelgrid_agent.mig.partitioner import TransitionRefused, conflict, plan_steps
from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu

__all__ = ["place"]

# (profile id, compute profile ids as in Part)
Shape = tuple[int, tuple[int, ...]]


def place(
    geometry: MigGeometry,
    gpu: Gpu,
    shapes: Sequence[Shape],
    *,
    fixed: tuple[Part, ...] = (),
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
) -> Layout:
    """The layout that holds exactly these and takes the fewest steps; raises BadLayout, TransitionRefused.

    `fixed` have their places already and are held beside them. BadLayout when they cannot stand together on this part
    at all, TransitionRefused when what may not be touched stands in the way.
    """
    if len(fixed) + len(shapes) > geometry.most:
        raise BadLayout("instances", f"are {len(fixed) + len(shapes)}", f"{geometry.key} holds {geometry.most} at most")
    profiles = {profile.id: profile for profile in geometry.profiles.values()}
    for number, (profile_id, _) in enumerate(shapes):
        if profile_id not in profiles:
            known = ", ".join(f"{profile.name} ({key})" for key, profile in geometry.profiles.items())
            raise BadLayout(f"instances[{number}].profile", f"is {profile_id}", f"use one of {known}")
    ordered = sorted(shapes, key=lambda shape: (-profiles[shape[0]].size, shape))
    candidates: list[tuple[Part, ...]] = []
    _extend(geometry, [(profiles[shape[0]], shape[1]) for shape in ordered], fixed, candidates, len(fixed))
    if not candidates:
        everything = [*(part.profile_id for part in fixed), *(profile_id for profile_id, _ in shapes)]
        names = ", ".join(profiles[profile_id].name for profile_id in everything if profile_id in profiles)
        raise BadLayout(
            "instances", f"{names} cannot stand together on {geometry.key}", "ask for fewer or smaller ones"
        )
    # Which places are best has nothing to do with the mode.
    gpu = replace(gpu, mig_capable=True, mig_enabled=True, mig_pending=False)
    outside = [part_of(instance) for instance in gpu.gpu_instances if instance.id in foreign]
    best: tuple[tuple[object, ...], Layout] | None = None
    refusal: TransitionRefused | None = None
    for parts in candidates:
        layout = layout_of(True, parts)
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
    placed: tuple[Part, ...],
    found: list[tuple[Part, ...]],
    fixed: int,
) -> None:
    """Every way to place what is left beside what is placed, of which the first were placed by the caller."""
    if not left:
        if conflict(geometry, placed) is None:
            found.append(placed)
        return
    (profile, compute), *rest = left
    last = placed[-1] if len(placed) > fixed else None
    alike = last is not None and (last.profile_id, last.compute) == (profile.id, compute)
    for start in profile.starts:
        if alike and last is not None and start <= last.start:
            continue
        part = Part(profile_id=profile.id, start=start, size=profile.size, compute=compute)
        if not any(part.overlaps(other) for other in placed):
            _extend(geometry, rest, (*placed, part), found, fixed)


def _left(geometry: MigGeometry, standing: Sequence[Part]) -> tuple[int, ...]:
    """From how many places each plain profile could still be made, the largest first."""
    plain = [profile for profile in geometry.profiles.values() if not profile.media and not profile.graphics]
    largest_first = sorted(plain, key=lambda profile: (-profile.compute_slices, -profile.size, profile.id))
    return tuple(
        sum(
            conflict(geometry, (*standing, Part(profile_id=profile.id, start=start, size=profile.size, compute=())))
            is None
            for start in profile.starts
        )
        for profile in largest_first
    )
