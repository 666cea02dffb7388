"""What a workload does in a configuration that nobody measured: an interval for each quantity, with its reason.

Owns the answer to planners. Must not know plans, nodes or who asks.

An answer comes from the first of these that can give it:
    measured      readings of this configuration since the last drift
    interpolated  the workload's other configurations, and other workloads of the family
    borrowed      other workloads alone: nothing of this one was measured
    prior         the catalogue and published sweeps, beside any of the former for a coordinate
                  (power limit, slice) along which nobody of the family was ever measured
What none can give is None, and `missing` says why. Intervals hold with 90 % confidence for
one more reading. They agree with physics along slices and power limits (`order`), latencies rise
with their quantile, and whole GPUs neither draw more than they may nor less than they idle at.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from eelgrid_controller.profiles import prior
from eelgrid_controller.profiles.answers import Basis, Estimate, Prediction, Ratio
from eelgrid_controller.profiles.axes import Place, place
from eelgrid_controller.profiles.belief import Belief, Believed
from eelgrid_controller.profiles.bounds import bounded, fits, rising
from eelgrid_controller.profiles.calibration import NORMAL_90
from eelgrid_controller.profiles.family import Learned, quantities, reading_variance, sample
from eelgrid_controller.profiles.lattice import direction, lattice_of, read_off, shared_by
from eelgrid_controller.profiles.order import ordered
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.quantities import MEMORY, POWER, THROUGHPUT, quantile_of
from eelgrid_controller.profiles.store import Expected, Profile, Profiles, Reading, Tally, Workload
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue import Catalogue

__all__ = ["Predictor"]

_ASKED_MOST = 100_000  # configurations in one question
_NUMBERS_MOST = 1 << 24  # doubles in beliefs that are kept, 128 MiB: some 50 of the largest; the longest unasked go


class Predictor:
    """Answers from one store and what was learned of its families; pure but for a cache that changes no answer."""

    def __init__(self, profiles: Profiles, learned: Mapping[str, Learned], catalogue: Catalogue) -> None:
        self._profiles, self._learned, self._catalogue = profiles, learned, catalogue
        self._beliefs: dict[tuple[str, str], tuple[Profile, Belief]] = {}

    def after(self, profiles: Profiles) -> "Predictor":
        """The same on a later store; beliefs are shared, each is used only while its profile is the same object."""
        found = Predictor(profiles, self._learned, self._catalogue)
        found._beliefs = self._beliefs
        return found

    def predict(self, workload: str, configurations: Sequence[Configuration]) -> tuple[Prediction, ...]:
        """One answer a configuration; raises UnknownSlice and ImpossibleReading, which name the field."""
        profile = self._profiles.profiles.get(workload) or Profile(Workload(workload))
        configurations = configurations[:_ASKED_MOST]
        places = [place(one, self._catalogue) for one in configurations]
        learned = self._learned.get(profile.workload.family)
        names = {THROUGHPUT, POWER, *quantities([profile]), *(learned.surfaces if learned else ())}
        found = {name: self._quantity(profile, name, configurations, places) for name in sorted(names)}
        return tuple(
            self._prediction(profile, configuration, {name: answers[row] for name, answers in found.items()})
            for row, configuration in enumerate(configurations)
        )

    def reading(self, point: Point, at_s: float, noise: Mapping[str, float] | None = None) -> Reading:
        """The record of a measurement, with what was expected of it if its configuration is new.

        Raises UnknownSlice and ImpossibleReading, which name the field: what has no place can teach nothing.
        """
        where = [place(point.configuration, self._catalogue)]
        profile = self._profiles.profiles.get(point.workload)
        cell = None if profile is None else profile.cells.get(point.configuration)
        if profile is None or (cell is not None and not profile.stale(cell)):
            return Reading(point, at_s, noise=noise or {})
        learned = self._learned.get(profile.workload.family)
        expected = {}
        for name in learned.surfaces if learned else ():
            answer = self._quantity(profile, name, [point.configuration], where)[0]
            if isinstance(answer, Estimate) and answer.basis is not Basis.PRIOR:
                deviation = math.log(answer.upper / answer.lower) / (2.0 * NORMAL_90)
                expected[name] = Expected(math.log(answer.median), max(deviation, 1e-6))
        return Reading(point, at_s, expected, noise or {})

    def ratios(
        self, workload: str, name: str, configurations: Sequence[Configuration], base: Configuration
    ) -> tuple[Ratio, ...] | str:
        """A quantity in each configuration over that in `base`; or why nothing is known of it.

        Narrower than two predictions: a level that both share is not in it. Of what was learned alone: where the
        family varied no such coordinate there is no answer. Raises UnknownSlice and ImpossibleReading.
        """
        profile = self._profiles.profiles.get(workload) or Profile(Workload(workload))
        learned = self._learned.get(profile.workload.family)
        if learned is None or name not in learned.surfaces:
            return f"nothing was learned of {name} in family {profile.workload.family!r}"
        belief = self._belief(profile, name)
        origin = place(base, self._catalogue)
        others = [one for one in configurations if one != base]
        places = [place(one, self._catalogue) for one in others]
        unknown = sorted({one for where in (*places, origin) for one in belief.surface.frame.unknown(where)})
        if unknown:
            return f"no workload of family {profile.workload.family!r} was measured with other {', '.join(unknown)}"
        found = {base: Ratio(0.0, 0.0)}
        if others:
            means, variances = belief.apart(places, origin)
            reach = belief.surface.calibration.factor(belief.known)
            here = prior.offset(name, origin, self._catalogue)
            for how, where, mean, variance in zip(others, places, means, variances, strict=True):
                moved = prior.offset(name, where, self._catalogue) - here
                found[how] = Ratio(float(mean) + moved, reach * math.sqrt(float(variance)))
        return tuple(found[one] for one in configurations)

    def _prediction(
        self, profile: Profile, configuration: Configuration, answers: Mapping[str, Estimate | str]
    ) -> Prediction:
        given = {name: answer for name, answer in answers.items() if isinstance(answer, Estimate)}
        latencies = {float(quantile_of(name) or 0.0): one for name, one in given.items() if quantile_of(name)}
        return Prediction(
            configuration,
            given.get(THROUGHPUT),
            given.get(POWER),
            given.get(MEMORY),
            rising(latencies),
            fits(profile, configuration, self._catalogue),
            {name: answer for name, answer in answers.items() if isinstance(answer, str)},
        )

    def _quantity(
        self, profile: Profile, name: str, configurations: Sequence[Configuration], places: Sequence[Place]
    ) -> list[Estimate | str]:
        """One quantity of every configuration: an estimate, or why there is none."""
        learned = self._learned.get(profile.workload.family)
        if learned is None or name not in learned.surfaces:
            return [self._unlearned(profile, name, one) for one in configurations]
        answers = self._learned_answers(profile, name, places)
        if name == POWER:
            return [
                bounded(answer, one, self._catalogue) if isinstance(answer, Estimate) else answer
                for answer, one in zip(answers, configurations, strict=True)
            ]
        return answers

    def _unlearned(self, profile: Profile, name: str, configuration: Configuration) -> Estimate | str:
        """From readings of this very configuration, or from the catalogue."""
        cell = profile.cells.get(configuration)
        tally: Tally | None = None if cell is None or profile.stale(cell) else cell.tallies.get(name)
        if tally is not None:
            variance = reading_variance(profile, name, tally.stated) * (1.0 + 1.0 / tally.readings)
            half = NORMAL_90 * math.sqrt(variance)
            return _estimate(tally.mean, tally.mean - half, tally.mean + half, None, Basis.MEASURED)
        band = prior.power_w(configuration, self._catalogue) if name == POWER else None
        if band is not None:
            return Estimate(band.median, band.lower, band.upper, Basis.PRIOR)
        return f"nothing was learned of {name} in family {profile.workload.family!r}; measure some configurations"

    def _belief(self, profile: Profile, name: str) -> Belief:
        key = profile.workload.workload, name
        held = self._beliefs.pop(key, None)
        if held is None or held[0] is not profile:
            surface = self._learned[profile.workload.family].surfaces[name]
            mine, _ = sample(profile, name, self._catalogue)
            held = profile, Belief(surface, mine, reading_variance(profile, name))
        self._beliefs[key] = held  # the last, since it was asked last
        while len(self._beliefs) > 1 and sum(one.numbers for _, one in self._beliefs.values()) > _NUMBERS_MOST:
            del self._beliefs[next(iter(self._beliefs))]
        return held[1]

    def _limits(self, profile: Profile, model: str) -> tuple[float, ...]:
        """Limits on a GPU model that the family was measured at when it was learned, or the workload since."""
        mine = (one for one in profile.cells if one.gpu_model == model and one.power_limit_w is not None)
        known = self._learned[profile.workload.family].limits.get(model, ())
        return (*known, *(place(one, self._catalogue).numbers["limit"] for one in mine))

    def _learned_answers(self, profile: Profile, name: str, places: Sequence[Place]) -> list[Estimate | str]:
        belief = self._belief(profile, name)
        frame = belief.surface.frame
        answers: list[Estimate | str] = [""] * len(places)
        groups: dict[tuple[object, ...], list[tuple[int, Place]]] = {}
        ratios: dict[int, prior.Band] = {}
        for row, where in enumerate(places):
            unknown = frame.unknown(where)
            inside, ratio = _inside(name, where, unknown, dict(frame.fixed))
            if inside is None:
                answers[row] = f"no workload of family {profile.workload.family!r} was measured with other {unknown}"
                continue
            if ratio is not None:
                ratios[row] = ratio
            groups.setdefault(shared_by(inside), []).append((row, inside))
        varied = frozenset(column.name for column in frame.numbers)
        examples = [asked[0][1] for asked in groups.values()]
        lattices = [
            lattice_of(one, self._limits(profile, one.names["gpu_model"]), varied, self._catalogue) for one in examples
        ]
        if not lattices:
            return answers
        believed = belief.at([one for lattice in lattices for one in lattice.places])
        begin = 0
        for lattice, asked in zip(lattices, groups.values(), strict=True):
            end = begin + len(lattice.places)
            part = slice(begin, end)
            begin = end
            shape = len(lattice.slices), len(lattice.limits)
            offsets = np.array([prior.offset(name, one, self._catalogue) for one in lattice.places])
            here = Believed(believed.mean[part], believed.variance[part], believed.measured[part])
            layers = _layers(here.mean + offsets, here, belief, name, shape)
            measured = here.measured.reshape(shape).astype(np.float64)
            for row, where in asked:
                middle, lower, upper = (read_off(lattice, layer, where) for layer in layers)
                basis = Basis.BORROWED if not belief.own else Basis.INTERPOLATED
                if read_off(lattice, measured, where) == 1.0 and row not in ratios:
                    basis = Basis.MEASURED
                answers[row] = _estimate(middle, lower, upper, ratios.get(row), basis)
        return answers


def _layers(
    mean: Floats, believed: Believed, belief: Belief, name: str, shape: tuple[int, int]
) -> tuple[Floats, Floats, Floats]:
    """Middles in the order that physics asks for, lower and upper ends, on a lattice.

    What readings scatter, and a configuration from its neighbours, may break the order of measurements: it
    counts into what a measured place may be moved by. The ends keep their distance: they are of a reading.
    """
    factor = np.where(believed.measured, NORMAL_90, belief.surface.calibration.factor(belief.known))
    half = (factor * np.sqrt(believed.variance + belief.reading_variance)).reshape(shape)
    middle = mean.reshape(shape)
    way = direction(name)
    if way and shape != (1, 1):
        middle = ordered(middle, 1.0 / (believed.variance + belief.scatter).reshape(shape), way)
    return middle, middle - half, middle + half


def _inside(
    name: str, where: Place, unknown: tuple[str, ...], fixed: Mapping[str, float]
) -> tuple[Place | None, prior.Band | None]:
    """The nearest place that measurements can speak of, and the prior's ratio from there; None where there is none."""
    if not unknown:
        return where, None
    bands = []
    left = set(unknown)
    if "limit" in left:
        bands.append(prior.limit_ratio(name, 2.0 ** where.numbers["limit"]))
        left.discard("limit")
    if left & {"compute", "memory"}:
        bands.append(prior.slice_ratio(name, 2.0 ** where.numbers["compute"]))
        left -= {"compute", "memory"}
    if left or any(one is None for one in bands):
        return None, None
    numbers = dict(where.numbers)
    numbers.update({one: fixed.get(one, 0.0) for one in unknown})
    numbers["load"] = numbers["batch"] + numbers["processes"] - numbers["gpus"] - numbers["compute"]
    middle, low, high = 0.0, 0.0, 0.0
    for band in bands:
        if band is not None:
            middle += math.log(band.median)
            low += math.log(band.median / band.lower) ** 2
            high += math.log(band.upper / band.median) ** 2
    return Place(numbers, where.names), prior.Band(
        math.exp(middle), math.exp(middle - math.sqrt(low)), math.exp(middle + math.sqrt(high))
    )


def _estimate(middle: float, lower: float, upper: float, ratio: prior.Band | None, basis: Basis) -> Estimate:
    """From logarithms to units, with the prior's ratio and its own uncertainty."""
    if ratio is not None:
        down = math.hypot(middle - lower, math.log(ratio.median / ratio.lower))
        up = math.hypot(upper - middle, math.log(ratio.upper / ratio.median))
        middle += math.log(ratio.median)
        lower, upper, basis = middle - down, middle + up, Basis.PRIOR
    return Estimate(math.exp(middle), math.exp(lower), math.exp(upper), basis)
