"""MIG slices of a pool: which ones fit on a GPU together, and how many GPUs a number of slices takes.

Any part of a valid layout is a valid layout, so a program needs only the multisets that no other contains (patterns,
partition.geometry). With y_q GPUs partitioned by pattern q, which has a_qk slices of kind k, and m_k slices in use:

    sum_q a_qk y_q >= m_k     every kind
    whole GPUs in use + sum_q y_q <= N     every model

Watts are counted as in the partition planner: a point of a slice gives what the slice adds, and a GPU that is partitioned
draws its idle power with MIG on, however many of its slices are in use. Must not know services or objectives.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eelgrid_controller.partition.geometry import Multiset, build_tiling, maximal_multisets
from eelgrid_controller.partition.mixed_integer import solve_mixed_integer
from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration
from eelgrid_protos.catalogue.products import MigGeometry


class SliceKind(NamedTuple):
    """The slices of one profile, as its name is printed, on one GPU model."""

    gpu_model: str
    profile: str


@dataclass(frozen=True, slots=True)
class SliceLayouts:
    """The layouts of some profiles on one GPU model."""

    profiles: tuple[str, ...]  # by name, largest first
    patterns: tuple[Multiset, ...]  # instances of each profile
    mig_w: float = 0.0  # how much more an idle GPU draws with MIG on

    def keep_profiles(self, kept: Iterable[str]) -> "SliceLayouts":
        """The layouts of fewer profiles."""
        some = set(kept)
        places = [at for at, profile in enumerate(self.profiles) if profile in some]
        patterns = {tuple(pattern[at] for at in places) for pattern in self.patterns}
        return SliceLayouts(tuple(self.profiles[at] for at in places), maximal_multisets(patterns), self.mig_w)


PoolLayouts = Mapping[str, SliceLayouts]  # by GPU model
NO_LAYOUTS: PoolLayouts = MappingProxyType({})


class SliceProblem(NamedTuple):
    """Why a measured slice cannot be used: the field at fault, and what to write instead."""

    field: str
    problem: str
    remedy: str


def find_slice_problem(configuration: Configuration, geometry: MigGeometry | None) -> SliceProblem | None:
    """Finds what is wrong with the slice of a configuration on a GPU model; None if it can exist."""
    model, name = configuration.gpu_model, configuration.mig_profile
    if geometry is None:
        return SliceProblem("mig_profile", f"no MIG layout of {model} is known", "leave it empty for whole GPUs")
    if geometry.profile(name) is None:
        known = ", ".join(profile.name for profile in geometry.profiles.values())
        return SliceProblem("mig_profile", f"{model} has no profile {name}", f"write one of {known}")
    if configuration.gpus != 1:
        return SliceProblem(
            "gpus", f"{configuration.gpus} of {name}, but a process sees one slice", "write 1, or leave it empty"
        )
    return None


def build_slice_layouts(geometry: MigGeometry, names: Iterable[str], mig_w: float) -> SliceLayouts:
    """The layouts of some profiles, given by name; raises InvalidProblem for one that the geometry lacks."""
    known = {profile.name: profile.key for profile in geometry.profiles.values()}
    tiling = build_tiling(geometry, {known.get(name, name) for name in names})
    return SliceLayouts(tuple(geometry.profiles[key].name for key in tiling.keys), tiling.patterns, mig_w)


class LayoutColumn(NamedTuple):
    """A pattern as a variable of a program: the number of GPUs that are partitioned by it."""

    gpu_model: str
    slices: Mapping[SliceKind, int]  # of one GPU
    mig_w: float


def most_slices(layouts: PoolLayouts, kind: SliceKind) -> int:
    """How many slices of a kind fit on one GPU; raises InvalidServingValue for a kind without a layout."""
    some = layouts.get(kind.gpu_model)
    if some is None or kind.profile not in some.profiles:
        raise InvalidServingValue(
            "layouts", f"none of {kind.gpu_model} has {kind.profile}", "give the layouts of every model with slices"
        )
    at = some.profiles.index(kind.profile)
    return max(pattern[at] for pattern in some.patterns)


def list_layout_columns(layouts: PoolLayouts, used: Iterable[SliceKind]) -> list[LayoutColumn]:
    """The patterns that matter for the kinds in use, which all have layouts."""
    by_model: dict[str, set[str]] = {}
    for kind in used:
        by_model.setdefault(kind.gpu_model, set()).add(kind.profile)
    found: list[LayoutColumn] = []
    for model, profiles in by_model.items():
        some = layouts[model].keep_profiles(profiles)
        kinds = [SliceKind(model, profile) for profile in some.profiles]
        found += [LayoutColumn(model, dict(zip(kinds, pattern, strict=True)), some.mig_w) for pattern in some.patterns]
    return found


@dataclass(frozen=True, slots=True)
class PartitionedGpus:
    """GPUs that are partitioned alike."""

    gpu_model: str
    slices: Mapping[str, int]  # of one GPU, by profile
    gpus: int


_NODES_MOST = 1_000  # a cover has a few dozen variables; nearly all are found at the root


def cover_slices(layouts: PoolLayouts, wanted: Mapping[SliceKind, int]) -> tuple[PartitionedGpus, ...]:
    """The fewest GPUs of each model that have the slices, each with the whole pattern that it is partitioned by."""
    from scipy import sparse

    found: list[PartitionedGpus] = []
    for model in dict.fromkeys(kind.gpu_model for kind, count in wanted.items() if count):
        mine = {kind: count for kind, count in wanted.items() if kind.gpu_model == model and count}
        columns = list_layout_columns(layouts, mine)
        table = np.array([[float(column.slices[kind]) for column in columns] for kind in mine])
        gpus = solve_mixed_integer(
            np.ones(len(columns)),
            sparse.csc_array(table),
            np.array([float(count) for count in mine.values()]),
            np.full(len(mine), np.inf),
            nodes_most=_NODES_MOST,
        ).values
        if gpus is None:
            raise NoFeasibleConfiguration(
                "fleet", f"the solver found no layouts of {model}", "report this: it is a fault"
            )
        for column, count in zip(columns, gpus, strict=True):
            if round(float(count)):
                slices = {kind.profile: number for kind, number in column.slices.items() if number}
                found.append(PartitionedGpus(model, slices, round(float(count))))
    return tuple(found)


def count_partitioned(gpus: Iterable[PartitionedGpus]) -> dict[str, int]:
    """The number of partitioned GPUs by model."""
    found = Counter[str]()
    for one in gpus:
        found[one.gpu_model] += one.gpus
    return dict(found)
