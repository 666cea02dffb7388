"""Every way in which MIG instances can stand together on one GPU, from the catalogue's placements.

Owns layouts, their multisets and the choice of places for a multiset. Must not
know services, drivers or what stands on a GPU now.

Theory: an instance of a profile takes memory slices [start, start + size) from one
of the profile's starts, and compute slices out of all there are. Sets of instances
that overlap nowhere, take no more compute slices than there are and keep each
profile's limit are enumerated by rising start: 298 on a seven-slice part with its
five plain profiles, 26 on a four-slice part. A multiset is what can be used; one
that is contained in no other is a pattern, and any part of a pattern can stand,
too: on the A100 twelve patterns say all that its geometry allows.

Source: the placements of protos/eelgrid_protos/catalogue/mig.json.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_controller.partition.problem import InvalidProblem
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry

# (profile key, start) by rising start.
Layout = tuple[tuple[str, int], ...]
# Instances of each profile, in the order of the tiling's keys.
Multiset = tuple[int, ...]
# The richest part of the catalogue has 2,319 layouts with all its profiles.
LAYOUTS_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Tiling:
    """The layouts of some profiles on one part."""

    geometry: MigGeometry
    keys: tuple[str, ...]  # largest profile first
    places: Mapping[Multiset, tuple[Layout, ...]]  # every layout, by what stands in it
    slices: Mapping[Layout, int]  # memory slices of a layout, bit by bit

    @property
    def patterns(self) -> tuple[Multiset, ...]:
        """The multisets that are contained in no other, the one with most of the largest profile first."""
        return maximal_multisets(self.places)

    def counts(self, layout: Layout) -> Multiset:
        """What stands in a layout."""
        names = [key for key, _ in layout]
        return tuple(names.count(key) for key in self.keys)

    def choose_layout(self, wanted: Multiset) -> Layout:
        """Places for a multiset; what leaves most room for large profiles comes first. Raises BadProblem."""
        found = self.places.get(wanted)
        if found is None:
            listed = ", ".join(f"{count} {key}" for count, key in zip(wanted, self.keys, strict=True) if count)
            raise InvalidProblem(
                "instances", f"{listed} cannot stand on {self.geometry.key}", "ask for less on one GPU"
            )
        return min(found, key=self._rank)

    def _rank(self, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """From how many places each profile could still be made, the largest first, most first; then low starts."""
        standing = [(self.geometry.profiles[key], start) for key, start in layout]
        room = (
            sum(self.geometry.conflict([*standing, (profile, start)]) is None for start in profile.starts)
            for profile in map(self.geometry.profiles.__getitem__, self.keys)
        )
        return tuple(-places for places in room), tuple(start for _, start in layout)


def maximal_multisets(multisets: Iterable[Multiset]) -> tuple[Multiset, ...]:
    """Those that are contained in no other, in falling order."""
    every = sorted(multisets, reverse=True)
    return tuple(
        one
        for one in every
        if not any(one != other and all(a <= b for a, b in zip(one, other, strict=True)) for other in every)
    )


def build_tiling(geometry: MigGeometry, keys: Iterable[str]) -> Tiling:
    """Every layout of these profiles; raises BadProblem for a profile that the part lacks."""
    profiles = []
    for key in set(keys):
        profile = geometry.profiles.get(key)
        if profile is None:
            known = ", ".join(geometry.profiles)
            raise InvalidProblem("mig_profile", f"{geometry.key} has no profile {key}", f"use one of {known}")
        profiles.append(profile)
    profiles.sort(key=lambda profile: (-profile.compute_slices, -profile.size, profile.id))
    ordered = tuple(profile.key for profile in profiles)
    found: dict[Multiset, list[Layout]] = {}
    for number, layout in enumerate(_layouts(geometry, profiles, 0, ())):
        if number >= LAYOUTS_MOST:
            raise InvalidProblem("mig_profile", f"over {LAYOUTS_MOST} layouts on {geometry.key}", "name fewer profiles")
        placed = tuple((profile.key, start) for profile, start in layout)
        names = [key for key, _ in placed]
        found.setdefault(tuple(names.count(key) for key in ordered), []).append(placed)
    masks = {
        layout: sum(memory_slice_mask(geometry, *part) for part in layout)
        for layouts in found.values()
        for layout in layouts
    }
    return Tiling(geometry, ordered, {counts: tuple(layouts) for counts, layouts in found.items()}, masks)


def memory_slice_mask(geometry: MigGeometry, key: str, start: int) -> int:
    """The memory slices of an instance, bit by bit."""
    return ((1 << geometry.profiles[key].size) - 1) << start


def _layouts(
    geometry: MigGeometry, profiles: Sequence[GiProfile], begin: int, standing: tuple[tuple[GiProfile, int], ...]
) -> Iterator[tuple[tuple[GiProfile, int], ...]]:
    """All layouts that go on from what stands below slice `begin`, itself among them."""
    yield standing
    if len(standing) == geometry.most:
        return
    compute = geometry.compute_slices - sum(profile.compute_slices for profile, _ in standing)
    for profile in profiles:
        alike = sum(other is profile for other, _ in standing)
        if alike == profile.most or profile.compute_slices > compute:
            continue
        for start in profile.starts:
            if start >= begin:
                yield from _layouts(geometry, profiles, start + profile.size, (*standing, (profile, start)))
