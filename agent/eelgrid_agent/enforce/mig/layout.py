"""MIG layouts as values, and names of boards and MIG devices.

An instance is identified by profile id and start, since names differ between drivers. Compute instances are counted,
not ordered: their profile ids stand largest first. Names such as 1c.3g.20gb+me are only parsed and formatted here.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance, GpuLayout, WantedInstance
from eelgrid_protos.values import dataclass


class InvalidLayout(Exception):
    """The requested layout cannot exist on this part; names the field and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePart:
    """One GPU instance on memory slices [start, start + size); `compute` holds profile ids, largest first."""

    profile_id: int
    start: int
    size: int
    compute: tuple[int, ...]

    @property
    def place(self) -> tuple[int, int]:
        """Profile id and start, which identify an instance among all that could exist."""
        return self.profile_id, self.start

    def overlaps(self, other: "InstancePart") -> bool:
        """Whether the two take a memory slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MigLayout:
    """All instances of one device, by start."""

    mig_enabled: bool
    parts: tuple[InstancePart, ...] = ()

    def part_at(self, start: int) -> InstancePart | None:
        """The instance that starts there."""
        return next((part for part in self.parts if part.start == start), None)


def read_part(instance: GpuInstance) -> InstancePart:
    """An instance that was read back."""
    return InstancePart(
        profile_id=instance.profile_id,
        start=instance.start,
        size=instance.size,
        compute=_canonical(child.profile_id for child in instance.compute_instances),
    )


def read_layout(gpu: Gpu) -> MigLayout:
    """The layout that the device port listed."""
    return build_layout(gpu.mig_enabled, (read_part(instance) for instance in gpu.gpu_instances))


def build_layout(mig_enabled: bool, parts: Iterable[InstancePart]) -> MigLayout:
    """A layout of these parts, in order."""
    return MigLayout(
        mig_enabled=mig_enabled, parts=tuple(sorted(parts, key=lambda part: (part.start, part.profile_id)))
    )


def resolve_layout(layout: GpuLayout, geometry: MigGeometry) -> MigLayout:
    """Returns the requested layout on a device of this geometry; raises InvalidLayout."""
    if layout.instances and not layout.mig_enabled:
        raise InvalidLayout(
            "mig_enabled", "instances are requested with MIG off", "set mig_enabled, or ask for no instances"
        )
    chosen: list[tuple[GiProfile, int]] = []
    parts = []
    for number, instance in enumerate(layout.instances):
        field = f"instances[{number}]"
        profile = _profile(instance, geometry, field)
        chosen.append((profile, instance.start))
        problem = geometry.conflict(chosen)
        if problem:
            raise InvalidLayout(field, problem, "move it, or ask for fewer or smaller instances")
        compute = _compute(profile, instance.compute_slices, field)
        parts.append(InstancePart(profile_id=profile.id, start=instance.start, size=profile.size, compute=compute))
    return build_layout(layout.mig_enabled, parts)


def _profile(instance: WantedInstance, geometry: MigGeometry, field: str) -> GiProfile:
    profile = geometry.profile(instance.profile.removeprefix("MIG "))
    if profile is None:
        known = ", ".join(f"{profile.name} ({key})" for key, profile in geometry.profiles.items())
        raise InvalidLayout(f"{field}.profile", f"{geometry.key} has no {instance.profile}", f"use one of {known}")
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
            raise InvalidLayout(f"{field}.compute_slices[{number}]", f"is {count}", remedy)
    compute = _canonical(by_slices[count] for count in slices)
    if not fits_compute_instances(profile, compute):
        problem = f"{profile.name} cannot hold compute instances of {', '.join(map(str, slices))} slices together"
        raise InvalidLayout(f"{field}.compute_slices", problem, f"it has {profile.compute_slices} slices in all")
    return compute


def order_compute_instances(geometry: MigGeometry, part: InstancePart) -> tuple[int, ...]:
    """The compute instances of a part, in an order in which a driver that fills the lowest place first fits them all.

    Largest first fits nearly always; three and two and two slices of seven do not.
    """
    profile = geometry.profile_by_id(part.profile_id)
    if profile is None:
        return part.compute
    return _order_compute(profile, part.compute, frozenset()) or part.compute


def _canonical(profile_ids: Iterable[int]) -> tuple[int, ...]:
    """Within one GPU instance, ids of compute profiles rise with their slices."""
    return tuple(sorted(profile_ids, reverse=True))


def _order_compute(profile: GiProfile, left: tuple[int, ...], taken: frozenset[int]) -> tuple[int, ...] | None:
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
        order = _order_compute(profile, tuple(rest), taken | span)
        if order is not None:
            return candidate, *order
    return None


def fits_compute_instances(profile: GiProfile, compute: tuple[int, ...]) -> bool:
    """Whether compute instances of these profile ids can exist together in one GPU instance."""
    counts_fit = all(compute.count(ci.id) <= ci.most for ci in profile.compute_instances)
    return (
        len(compute) <= profile.compute_slices
        and counts_fit
        and _order_compute(profile, compute, frozenset()) is not None
    )


_NAME = re.compile(r"(?:([0-9]{1,2})c\.)?([0-9]{1,2})g\.([0-9]{1,4})gb(?:([+-])([A-Za-z][A-Za-z0-9.,]*))?")
_PCI_ID = re.compile(r"(0[xX][0-9A-Fa-f]{1,8}|[0-9]{1,10})")
_PACKED_MOST = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class PciId:
    """The kind of board of a device; without a subsystem it means every board of one chip."""

    device: int
    vendor: int
    subsystem: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "PciId | None":
        """Parses 0x20B210DE or 0x20B210DE:0x14A910DE; None for other text."""
        parts = text.split(":")
        if len(parts) > 2 or not all(_PCI_ID.fullmatch(part) for part in parts):
            return None
        packed = [int(part, 0) if part[:2].lower() == "0x" else int(part) for part in parts]
        if max(packed) > _PACKED_MOST:
            return None
        (chip, *board) = [(number >> 16, number & 0xFFFF) for number in packed]
        return cls(*chip, subsystem=board[0] if board else None)

    def matches(self, board: "PciId") -> bool:
        """Whether this filter accepts the board of a device."""
        return (self.device, self.vendor) == (board.device, board.vendor) and self.subsystem in (None, board.subsystem)

    def __str__(self) -> str:
        text = f"0x{self.device:04X}{self.vendor:04X}"
        return text if self.subsystem is None else f"{text}:0x{self.subsystem[0]:04X}{self.subsystem[1]:04X}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigName:
    """A parsed MIG device name: `compute` slices of an instance of `slices` slices and a memory size.

    `extras` are the suffixes after + and `lacks` those after -, each in order.
    """

    compute: int
    slices: int
    memory_gb: int
    extras: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "MigName | None":
        """Parses 1g.5gb, 1c.3g.20gb, 1g.5gb+me or 1g.24gb-me; None for other text."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        compute, slices, memory, sign, listed = match.groups()
        names = tuple(sorted((listed or "").split(","))) if listed else ()
        if len(set(names)) < len(names) or any(
            not name or name[0] in ".0123456789" or name[-1] == "." for name in names
        ):
            return None
        name = cls(
            compute=int(compute or slices),
            slices=int(slices),
            memory_gb=int(memory),
            extras=names if sign == "+" else (),
            lacks=names if sign == "-" else (),
        )
        return name if 1 <= name.compute <= name.slices else None

    @property
    def instance(self) -> "MigName":
        """The name of the whole GPU instance that this lies in."""
        return self.part(self.slices)

    def part(self, compute: int) -> "MigName":
        """The name of a share of so many slices of the same GPU instance."""
        return replace(self, compute=compute)

    def __str__(self) -> str:
        part = "" if self.compute == self.slices else f"{self.compute}c."
        sign = "+" if self.extras else "-" if self.lacks else ""
        return f"{part}{self.slices}g.{self.memory_gb}gb{sign}{','.join(self.extras or self.lacks)}"
