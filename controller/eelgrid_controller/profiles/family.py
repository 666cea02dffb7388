"""From the store to what models take: samples of a family, and learning all its quantities.

Owns which measurements count and what their readings are worth. Must not know how a model works.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.axes import place
from eelgrid_controller.profiles.drift import Noise
from eelgrid_controller.profiles.errors import NothingToLearnFrom
from eelgrid_controller.profiles.learning import FEWEST, Sample, Surface, learn
from eelgrid_controller.profiles.prior import offset
from eelgrid_controller.profiles.store import Cell, Profile, Profiles
from eelgrid_protos.catalogue import Catalogue

__all__ = ["Learned", "learn_family", "quantities", "reading_variance", "sample"]


class Learned(NamedTuple):
    """What was learned of a family, to be journalled; reproducible from the store at `revision`."""

    family: str
    revision: int
    seed: int
    surfaces: Mapping[str, Surface]  # by quantity
    limits: Mapping[str, tuple[float, ...]]  # measured, log2 over the default, by GPU model


def reading_variance(profile: Profile, quantity: str, stated: float = 0.0) -> float:
    """Of one reading's logarithm."""
    return max(profile.noise.get(quantity, Noise()).variance, stated * stated)


def sample(profile: Profile, quantity: str, catalogue: Catalogue) -> tuple[Sample, tuple[Cell, ...]]:
    """What was measured of one quantity of a workload, and the cells that it is from."""
    cells = tuple(cell for cell in profile.cells.values() if quantity in cell.tallies)
    values, noise = [], []
    places = tuple(place(cell.configuration, catalogue) for cell in cells)
    for cell, where in zip(cells, places, strict=True):
        tally = cell.tallies[quantity]
        values.append(tally.mean - offset(quantity, where, catalogue))
        noise.append(reading_variance(profile, quantity, tally.stated) / tally.readings)
    found = Sample(
        profile.workload.workload,
        profile.workload.traits,
        places,
        np.array(values, dtype=np.float64),
        np.array(noise, dtype=np.float64),
        tuple(profile.stale(cell) for cell in cells),
    )
    return found, cells


def quantities(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Every quantity that was read of any of them."""
    return tuple(sorted({name for profile in profiles for cell in profile.cells.values() for name in cell.tallies}))


def learn_family(profiles: Profiles, family: str, catalogue: Catalogue, seed: int = 0) -> Learned:
    """Learns every quantity with enough measurements; raises NothingToLearnFrom if there is none.

    Takes seconds for a thousand configurations: work for the background, not for an event.
    """
    members = profiles.family(family)
    surfaces: dict[str, Surface] = {}
    for quantity in quantities(members):
        samples = [without_stale(sample(profile, quantity, catalogue)[0]) for profile in members]
        if sum(len(one.places) for one in samples) >= FEWEST:
            surfaces[quantity] = learn(samples, seed)
    if not surfaces:
        raise NothingToLearnFrom("family", f"{family!r} has too few measurements", f"measure {FEWEST} configurations")
    limits: dict[str, set[float]] = {}
    for profile in members:
        for configuration in profile.cells:
            limits.setdefault(configuration.gpu_model, set()).add(place(configuration, catalogue).numbers["limit"])
    found = {model: tuple(sorted(values)) for model, values in sorted(limits.items())}
    return Learned(family, profiles.revision, seed, surfaces, found)


def without_stale(one: Sample) -> Sample:
    """Without what was measured before a drift."""
    kept = [index for index, old in enumerate(one.stale) if not old]
    return Sample(
        one.workload, one.traits, tuple(one.places[index] for index in kept), one.values[kept], one.noise[kept],
    )  # fmt: skip
