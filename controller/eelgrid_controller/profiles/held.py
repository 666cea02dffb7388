"""The profiles that a daemon holds: told, asked, learned in the background, written down and read back.

Owns the one mutable object of this package and the rule of when a family is worth learning again. Must
not know the journal, a clock or threads: times come with the readings, and learning is the caller's to run.

    held.observe(point, at_s)            one measurement more; returns the record of it
    held.predict(workload, how)          a Prediction: of each quantity median, lower, upper and basis, or why none
    held.due()                           families that are worth learning again
    held.snapshot()                      the store as a value that nothing changes: `learn_family(snapshot, family,
                                         catalogue)` may run in another thread or process for seconds
    held.adopt(learned)                  what came of that
    held.dump(), Held.restored(...)      all of it as plain values, to the last bit

Replay: the same calls of introduce, observe and adopt in the same order give the same state, so a journal of
points, workloads and of what was learned is enough. Replayed without what was learned, cells are the same;
only the drift test then has nothing to hold a configuration's first reading against.

Limits: `WORKLOADS_MOST` workloads of `CELLS_MOST` configurations; the workload longest unread goes first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eelgrid_controller.profiles.answers import Prediction
from eelgrid_controller.profiles.errors import UnreadableRecord
from eelgrid_controller.profiles.family import Learned
from eelgrid_controller.profiles.learning import FEWEST
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.predict import Predictor
from eelgrid_controller.profiles.record import decode, encode
from eelgrid_controller.profiles.store import Profile, Profiles, Provenance, Reading, Workload, provenance
from eelgrid_protos.catalogue import Catalogue

__all__ = ["GROWTH", "Held"]

GROWTH = 1.25  # a family is learned again when it has so many times the configurations that it was learned from


class Held:
    """One store, what was learned of its families, and the answers from both."""

    def __init__(
        self, catalogue: Catalogue, profiles: Profiles | None = None, learned: Mapping[str, Learned] | None = None
    ) -> None:
        self._catalogue = catalogue
        self._profiles = profiles or Profiles()
        self._learned = dict(learned or {})
        self._predictor = Predictor(self._profiles, self._learned, catalogue)
        self._counts: dict[str, tuple[Profile, Counter[str]]] = {}

    def introduce(self, workload: Workload) -> None:
        """A workload's family and facts; without it a workload is of the family "default"."""
        self._set(self._profiles.introduced(workload))

    def observe(self, point: Point, at_s: float, noise: Mapping[str, float] | None = None) -> Reading:
        """One measurement; raises ImpossibleReading or UnknownSlice, which name the field, and is then unchanged.

        noise: stated deviation of a reading's logarithm, by quantity, where the source says so.
        """
        reading = self._predictor.reading(point, at_s, noise)
        self._set(self._profiles.told(reading))
        return reading

    def predict(self, workload: str, configuration: Configuration) -> Prediction:
        """What one configuration is believed to do; raises ImpossibleReading or UnknownSlice."""
        return self.predict_all(workload, [configuration])[0]

    def predict_all(self, workload: str, configurations: Sequence[Configuration]) -> tuple[Prediction, ...]:
        """One answer a configuration; cheaper than one after the other."""
        return self._predictor.predict(workload, configurations)

    def known(self, workload: str) -> Provenance | None:
        """What is known of a workload from what; None if nothing ever was."""
        profile = self._profiles.profiles.get(workload)
        return None if profile is None else provenance(profile)

    def due(self) -> tuple[str, ...]:
        """Families never learned that could be, or with a quantity that has grown by GROWTH since; by name."""
        held = self._profiles.profiles
        self._counts = {name: self._counted(name, profile) for name, profile in held.items()}
        families: dict[str, Counter[str]] = {}
        for name, (_, counts) in self._counts.items():
            families.setdefault(held[name].workload.family, Counter()).update(counts)
        return tuple(family for family in sorted(families) if self._grown(family, families[family]))

    def _counted(self, name: str, profile: Profile) -> tuple[Profile, Counter[str]]:
        """Configurations by quantity that levels can be learned from; counted again only where something changed."""
        before = self._counts.get(name)
        if before is not None and before[0] is profile:
            return before
        fresh = (cell for cell in profile.cells.values() if not profile.stale(cell))
        return profile, Counter(quantity for cell in fresh for quantity in cell.tallies)

    def _grown(self, family: str, counts: Mapping[str, int]) -> bool:
        learned = self._learned.get(family)
        surfaces = {} if learned is None else learned.surfaces
        return any(
            count >= (GROWTH * surfaces[name].learned_from if name in surfaces else FEWEST)
            for name, count in counts.items()
        )

    def snapshot(self) -> Profiles:
        """The store as it is now."""
        return self._profiles

    def adopt(self, learned: Learned) -> None:
        """What was learned of a family, in place of what was before."""
        self._learned = {**self._learned, learned.family: learned}
        self._predictor = Predictor(self._profiles, self._learned, self._catalogue)

    def dump(self) -> dict[str, Any]:
        """Plain values, JSON as they stand."""
        return {"profiles": encode(self._profiles), "learned": [encode(one) for one in self._learned.values()]}

    @classmethod
    def restored(cls, plain: Mapping[str, Any], catalogue: Catalogue) -> "Held":
        """The inverse of dump; raises UnreadableRecord."""
        profiles = decode(_part(plain, "profiles"))
        if not isinstance(profiles, Profiles):
            raise UnreadableRecord("profiles", "is no store", "give what dump gave")
        learned = [decode(one) for one in plain.get("learned", ())]
        if not all(isinstance(one, Learned) for one in learned):
            raise UnreadableRecord("learned", "holds what was not learned", "give what dump gave")
        return cls(catalogue, profiles, {one.family: one for one in learned})

    def _set(self, profiles: Profiles) -> None:
        self._profiles = profiles
        self._predictor = self._predictor.after(profiles)


def _part(plain: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plain.get(name)
    if not isinstance(found, Mapping):
        raise UnreadableRecord(name, "is missing", "give what dump gave")
    return found
