"""A MIG layout as a value: which instances stand where on one device.

Owns the two ways to a layout: read back from the device, and asked for by the
controller or a site's file. Must not know steps, time or the device port.

Theory. A part of a device is told by profile id and start: names differ
between drivers, and the driver's instance id follows from the span alone.
Compute instances are counted, not ordered: their profile ids stand largest
first, so that two layouts are equal exactly when nobody could tell them apart.

BadLayout        what was asked for cannot stand on this part; names the field and the remedy
"""

from collections.abc import Iterable
from dataclasses import dataclass

from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance, GpuLayout, WantedInstance

__all__ = ["BadLayout", "Layout", "Part", "creation_order", "fits", "found", "layout_of", "part_of", "wanted"]


class BadLayout(Exception):
    """What was asked for cannot stand on this part."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One GPU instance on memory slices [start, start + size); `compute` holds profile ids, largest first."""

    profile_id: int
    start: int
    size: int
    compute: tuple[int, ...]

    @property
    def place(self) -> tuple[int, int]:
        """What tells this instance from any other that could stand: profile id and start."""
        return self.profile_id, self.start

    def overlaps(self, other: "Part") -> bool:
        """Whether the two take a memory slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All instances of one device, by start."""

    mig_enabled: bool
    parts: tuple[Part, ...] = ()

    def part_at(self, start: int) -> Part | None:
        """The instance that begins there."""
        return next((part for part in self.parts if part.start == start), None)


def part_of(instance: GpuInstance) -> Part:
    """An instance that was read back."""
    return Part(
        profile_id=instance.profile_id,
        start=instance.start,
        size=instance.size,
        compute=_canonical(child.profile_id for child in instance.compute_instances),
    )


def found(gpu: Gpu) -> Layout:
    """The layout that the device port listed."""
    return layout_of(gpu.mig_enabled, (part_of(instance) for instance in gpu.gpu_instances))


def layout_of(mig_enabled: bool, parts: Iterable[Part]) -> Layout:
    """A layout of these parts, in order."""
    return Layout(mig_enabled=mig_enabled, parts=tuple(sorted(parts, key=lambda part: (part.start, part.profile_id))))


def wanted(layout: GpuLayout, geometry: MigGeometry) -> Layout:
    """The layout that is asked for on a device of this geometry; raises BadLayout."""
    if layout.instances and not layout.mig_enabled:
        raise BadLayout("mig_enabled", "instances are wanted with MIG off", "set mig_enabled, or ask for no instances")
    chosen: list[tuple[GiProfile, int]] = []
    parts = []
    for number, instance in enumerate(layout.instances):
        field = f"instances[{number}]"
        profile = _profile(instance, geometry, field)
        chosen.append((profile, instance.start))
        problem = geometry.conflict(chosen)
        if problem:
            raise BadLayout(field, problem, "move it, or ask for fewer or smaller instances")
        compute = _compute(profile, instance.compute_slices, field)
        parts.append(Part(profile_id=profile.id, start=instance.start, size=profile.size, compute=compute))
    return layout_of(layout.mig_enabled, parts)


def _profile(instance: WantedInstance, geometry: MigGeometry, field: str) -> GiProfile:
    profile = geometry.profile(instance.profile.removeprefix("MIG "))
    if profile is None:
        known = ", ".join(f"{profile.name} ({key})" for key, profile in geometry.profiles.items())
        raise BadLayout(f"{field}.profile", f"{geometry.key} has no {instance.profile}", f"use one of {known}")
    return profile


def _compute(profile: GiProfile, slices: tuple[int, ...], field: str) -> tuple[int, ...]:
    """Profile ids of the compute instances of these sizes; one over all of it when none are named."""
    if not slices:
        return (profile.whole.id,)
    by_slices = {ci.compute_slices: ci.id for ci in profile.compute_instances}
    for number, count in enumerate(slices):
        if count not in by_slices:
            sizes = ", ".join(map(str, sorted(by_slices)))
            remedy = f"{profile.name} holds compute instances of {sizes} slices"
            raise BadLayout(f"{field}.compute_slices[{number}]", f"is {count}", remedy)
    compute = _canonical(by_slices[count] for count in slices)
    if not fits(profile, compute):
        problem = f"{profile.name} cannot hold compute instances of {', '.join(map(str, slices))} slices together"
        raise BadLayout(f"{field}.compute_slices", problem, f"it has {profile.compute_slices} slices in all")
    return compute


def creation_order(geometry: MigGeometry, part: Part) -> tuple[int, ...]:
    """The compute instances of a part, in an order in which a driver that fills the lowest place first fits them all.

    Largest first fits nearly always; three and two and two slices of seven do not.
    """
    profile = geometry.profile_by_id(part.profile_id)
    if profile is None:
        return part.compute
    return _order(profile, part.compute, frozenset()) or part.compute


def _canonical(profile_ids: Iterable[int]) -> tuple[int, ...]:
    """Within one GPU instance, ids of compute profiles rise with their slices."""
    return tuple(sorted(profile_ids, reverse=True))


def _order(profile: GiProfile, left: tuple[int, ...], taken: frozenset[int]) -> tuple[int, ...] | None:
    if not left:
        return ()
    for candidate in dict.fromkeys(left):
        ci = next((ci for ci in profile.compute_instances if ci.id == candidate), None)
        if ci is None:
            return None
        spans = (frozenset(range(start, start + ci.compute_slices)) for start in ci.starts)
        span = next((span for span in spans if not span & taken), None)
        if span is None:
            continue
        rest = list(left)
        rest.remove(candidate)
        order = _order(profile, tuple(rest), taken | span)
        if order is not None:
            return candidate, *order
    return None


def fits(profile: GiProfile, compute: tuple[int, ...]) -> bool:
    """Whether compute instances of these profile ids can stand together in one GPU instance."""
    counts_fit = all(compute.count(ci.id) <= ci.most for ci in profile.compute_instances)
    return len(compute) <= profile.compute_slices and counts_fit and _order(profile, compute, frozenset()) is not None
