"""Predicts what a workload does in a configuration: an interval for each quantity, and its basis.

The first that applies is used: measured readings, interpolation with the family, then the prior. Predictions of a
family are made on a grid of slices and power limits, where isotonic regression makes them monotone, and are clipped to
physical bounds. Posteriors are cached per workload and quantity.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles import prior
from eelgrid_controller.profiles.features import (
    FeaturePoint,
    SliceShare,
    effective_limit_w,
    find_product,
    list_slices,
    locate_configuration,
    name_code,
)
from eelgrid_controller.profiles.gaussian_process import CONFIGURATION, STALE, WORKLOAD, GpPosterior, join_evidence
from eelgrid_controller.profiles.points import (
    MEMORY,
    POWER,
    THROUGHPUT,
    Configuration,
    EstimateBasis,
    LogRatio,
    Point,
    ProfileEstimate,
    ProfilePrediction,
    latency_quantile_of,
)
from eelgrid_controller.profiles.store import (
    ExpectedReading,
    ProfiledWorkload,
    ProfileReading,
    ProfileStore,
    ReadingTally,
    WorkloadProfile,
    reading_variance,
)
from eelgrid_controller.profiles.surfaces import (
    NORMAL_90,
    LearnedFamily,
    LearnedSurface,
    WorkloadSample,
    build_evidence,
    read_quantities,
    workload_sample,
)
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import Catalogue

_EVEN = 9
_LIMITS_MOST = 64
_DIGITS = 9


class PredictionGrid(NamedTuple):
    """S slices by L limits; places in rows of slices."""

    slices: tuple[SliceShare, ...]
    limits: tuple[float, ...]  # log2 of limit over default, ascending
    places: tuple[FeaturePoint, ...]  # S * L

    def locate(self, place: FeaturePoint) -> tuple[int, int, float]:
        """Row of its slice, the limit below it, and how far it lies towards the next one (0..1)."""
        compute, memory = place.numbers["compute"], place.numbers["memory"]
        row = min(
            range(len(self.slices)),
            key=lambda one: (
                abs(np.log2(self.slices[one].compute) - compute) + abs(np.log2(self.slices[one].memory) - memory)
            ),
        )
        limit = min(max(place.numbers["limit"], self.limits[0]), self.limits[-1])
        below = min(max(int(np.searchsorted(self.limits, limit + 1e-9)) - 1, 0), max(len(self.limits) - 2, 0))
        if len(self.limits) == 1:
            return row, 0, 0.0
        return row, below, (limit - self.limits[below]) / (self.limits[below + 1] - self.limits[below])


def grid_key(place: FeaturePoint) -> tuple[object, ...]:
    """What places of one lattice have in common."""
    kept = (item for item in place.numbers.items() if item[0] not in ("compute", "memory", "load", "limit"))
    return tuple(sorted(kept)), tuple(sorted(place.names.items()))


def _limits(place: FeaturePoint, measured: Sequence[float], catalogue: Catalogue) -> tuple[float, ...]:
    product = find_product(place.names["gpu_model"], catalogue)
    found = {0.0, *measured}
    if product is not None:
        least = product.power_min_w or product.power_default_w
        most = product.power_max_w or product.power_default_w
        found.update(np.log2(np.linspace(least, most, _EVEN) / product.power_default_w).tolist())
    elif measured:
        found.update(np.linspace(min(found), max(found), _EVEN).tolist())
    rounded = sorted({round(one, _DIGITS) for one in found})
    return tuple(rounded[:: -(-len(rounded) // _LIMITS_MOST)])


def build_grid(
    example: FeaturePoint, measured: Sequence[float], varied: frozenset[str], catalogue: Catalogue
) -> PredictionGrid:
    """The lattice around a place.

    measured: limits that the family was measured at on this GPU model.
    varied: coordinates that measurements vary; an axis that is not among them has one place.
    """
    own = SliceShare("", 2.0 ** example.numbers["compute"], 2.0 ** example.numbers["memory"])
    sliced = varied & {"compute", "memory"}
    slices = list_slices(example.names["gpu_model"], catalogue) if sliced else (own,)
    if not any(_same(one, own) for one in slices):
        slices = (own,)
    limits = _limits(example, measured, catalogue) if "limit" in varied else (example.numbers["limit"],)
    places = tuple(_move_point(example, one, limit) for one in slices for limit in limits)
    return PredictionGrid(slices, limits, places)


def _same(one: SliceShare, other: SliceShare) -> bool:
    return abs(one.compute - other.compute) < 1e-6 and abs(one.memory - other.memory) < 1e-6


def _move_point(example: FeaturePoint, to: SliceShare, limit: float) -> FeaturePoint:
    numbers = dict(example.numbers)
    numbers.update(compute=float(np.log2(to.compute)), memory=float(np.log2(to.memory)), limit=limit)
    numbers["load"] = numbers["batch"] + numbers["processes"] - numbers["gpus"] - numbers["compute"]
    return FeaturePoint(numbers, example.names)


def monotone_direction(quantity: str) -> int:
    """1 if it never falls with a larger slice or limit, -1 if it never rises, 0 if nothing is known."""
    if quantity in (POWER, THROUGHPUT):
        return 1
    return 0 if latency_quantile_of(quantity) is None else -1


def interpolate_grid(lattice: PredictionGrid, values: Floats, place: FeaturePoint) -> float:
    """The value at a place; values: (S, L)."""
    row, below, part = lattice.locate(place)
    if part <= 1e-9:
        return float(values[row, below])
    return float((1.0 - part) * values[row, below] + part * values[row, below + 1])


def monotone_surface(values: Floats, weights: Floats, direction: int) -> Floats:
    """(S, L) values that never go against `direction` along either axis: 1 rises, -1 falls.

    weights: (S, L), positive. Along each axis it is the fit of scikit-learn's IsotonicRegression, by the function of
    scipy that this class calls.
    """
    from scipy.optimize import isotonic_regression

    rising = direction > 0
    along = [
        isotonic_regression(row, weights=weight, increasing=rising).x
        for row, weight in zip(values, weights, strict=True)
    ]
    slice_weights = weights.mean(axis=1)
    across = [
        isotonic_regression(column, weights=slice_weights, increasing=rising).x for column in np.stack(along, axis=1)
    ]
    return np.stack(across, axis=1)


_CHUNK = 1024  # places at a time


class QuantityEstimate(NamedTuple):
    """M places, in log units less the prior's offset."""

    mean: Floats
    variance: Floats  # of the value itself, without a reading's noise
    measured: NDArray[np.bool_]  # read since the last drift


class QuantityPosterior:
    """One quantity of one workload."""

    def __init__(self, surface: LearnedSurface, mine: WorkloadSample, reading_variance: float) -> None:
        self.surface = surface
        self.reading_variance = reading_variance
        own = build_evidence(surface.frame, surface.centre, surface.scale, [mine])
        others = surface.panel.select(surface.panel.sites[:, WORKLOAD] != name_code(mine.workload))
        self._traits, self._workload = mine.traits, mine.workload
        fresh = own.sites[:, STALE] == 0.0
        self.known = int(fresh.sum())
        self.own = len(own.values)
        self._measured = own.sites[fresh, CONFIGURATION]
        whole = join_evidence(own, others)
        self.size = len(whole.values)
        self._posterior = GpPosterior(surface.covariance, whole)

    @property
    def number_count(self) -> int:
        """How many numbers it holds, nearly all of them in the factor of its matrix."""
        return self.size**2

    @property
    def residual_variance(self) -> float:
        """Variance of one reading of one configuration around what is smooth, log units squared."""
        return self.surface.scale**2 * self.surface.covariance.idiosyncrasy + self.reading_variance

    def predict_at(self, places: Sequence[FeaturePoint]) -> QuantityEstimate:
        """What is believed there."""
        parts = [self._at(places[begin : begin + _CHUNK]) for begin in range(0, len(places), _CHUNK)]
        return QuantityEstimate(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def predict_difference(self, places: Sequence[FeaturePoint], base: FeaturePoint) -> tuple[Floats, Floats]:
        """(M,) mean and variance of the logarithm's difference to `base`, which is none of the places; less offsets."""
        scale = self.surface.scale
        mean, variance = self._posterior.predict_difference(self._sites(places), self._sites([base]))
        return scale * mean, scale**2 * variance

    def _at(self, places: Sequence[FeaturePoint]) -> QuantityEstimate:
        surface, asked = self.surface, self._sites(places)
        mean, variance = self._posterior.predict_at(asked)
        measured = np.isin(asked[:, CONFIGURATION], self._measured)
        return QuantityEstimate(surface.centre + surface.scale * mean, surface.scale**2 * variance, measured)

    def _sites(self, places: Sequence[FeaturePoint]) -> Floats:
        count = len(places)
        return self.surface.frame.build_sites(places, [self._traits] * count, [self._workload] * count)


_OVER, _OVER_AT_LEAST = 1.05, 1.25  # of the limit
_NEAR_LEAST = 1.2  # times the lowest limit
_IDLE = 0.9  # of the catalogue's idle watts, which differ between boards


def clip_power(estimate: ProfileEstimate, configuration: Configuration, catalogue: Catalogue) -> ProfileEstimate:
    """Watts of whole GPUs within what the part can draw; what was measured stays as it is."""
    product = find_product(configuration.gpu_model, catalogue)
    limit = effective_limit_w(configuration, catalogue)
    if product is None or limit is None or configuration.mig_profile or estimate.basis is EstimateBasis.MEASURED:
        return estimate
    near_w = limit if product.power_min_w is None else min(limit, _NEAR_LEAST * product.power_min_w)
    least = _IDLE * product.idle_w * configuration.gpus
    most = max(max(_OVER_AT_LEAST * near_w, _OVER * limit) * configuration.gpus, least)
    middle, lower, upper = (min(max(one, least), most) for one in estimate[:3])
    return ProfileEstimate(middle, lower, upper, estimate.basis)


def monotone_latencies(latencies: Mapping[float, ProfileEstimate]) -> Mapping[float, ProfileEstimate]:
    """Latencies that never fall with their quantile."""
    found: dict[float, ProfileEstimate] = {}
    below = ProfileEstimate(0.0, 0.0, 0.0, EstimateBasis.PRIOR)
    for quantile in sorted(latencies):
        one = latencies[quantile]
        below = ProfileEstimate(
            max(one.median, below.median), max(one.lower, below.lower), max(one.upper, below.upper), one.basis
        )
        found[quantile] = below
    return found


def fits_memory(profile: WorkloadProfile, configuration: Configuration, catalogue: Catalogue) -> bool | None:
    """False if it did not run with as much room or more, True if it did with as little or less, else None.

    Room is memory: a larger slice and more GPUs give more, a larger batch and more processes leave less.
    """
    asked = locate_configuration(configuration, catalogue).numbers
    found: bool | None = None
    for cell in profile.cells.values():
        other = cell.configuration
        if other.gpu_model != configuration.gpu_model or other.label != configuration.label:
            continue
        theirs = locate_configuration(other, catalogue).numbers
        room = [asked["memory"] - theirs["memory"], asked["gpus"] - theirs["gpus"]]
        room += [theirs["batch"] - asked["batch"], theirs["processes"] - asked["processes"]]
        if cell.runs and min(room) >= -1e-9:
            found = True
        if not cell.runs and max(room) <= 1e-9:
            return False
    return found


_CONFIGURATIONS_MOST = 100_000  # configurations in one question
_NUMBERS_MOST = 1 << 24  # doubles in beliefs that are kept, 128 MiB: some 50 of the largest; the longest unasked go


class ProfilePredictor:
    """Answers from one store and what was learned of its families; pure but for a cache that changes no answer."""

    def __init__(self, profiles: ProfileStore, learned: Mapping[str, LearnedFamily], catalogue: Catalogue) -> None:
        self._profiles, self._learned, self._catalogue = profiles, learned, catalogue
        self._beliefs: dict[tuple[str, str], tuple[WorkloadProfile, QuantityPosterior]] = {}

    def with_profiles(self, profiles: ProfileStore) -> "ProfilePredictor":
        """The same on a later store; beliefs are shared, each is used only while its profile is the same object."""
        found = ProfilePredictor(profiles, self._learned, self._catalogue)
        found._beliefs = self._beliefs
        return found

    def predict(self, workload: str, configurations: Sequence[Configuration]) -> tuple[ProfilePrediction, ...]:
        """One answer a configuration; raises UnknownSlice and ImpossibleReading, which name the field."""
        profile = self._profiles.profiles.get(workload) or WorkloadProfile(ProfiledWorkload(workload))
        configurations = configurations[:_CONFIGURATIONS_MOST]
        places = [locate_configuration(one, self._catalogue) for one in configurations]
        learned = self._learned.get(profile.workload.family)
        names = {THROUGHPUT, POWER, *read_quantities([profile]), *(learned.surfaces if learned else ())}
        found = {name: self._quantity(profile, name, configurations, places) for name in sorted(names)}
        return tuple(
            self._prediction(profile, configuration, {name: answers[row] for name, answers in found.items()})
            for row, configuration in enumerate(configurations)
        )

    def build_reading(self, point: Point, at_s: float, noise: Mapping[str, float] | None = None) -> ProfileReading:
        """The record of a measurement, with what was expected of it if its configuration is new.

        Raises UnknownSlice and ImpossibleReading, which name the field: what has no place can teach nothing.
        """
        where = [locate_configuration(point.configuration, self._catalogue)]
        profile = self._profiles.profiles.get(point.workload)
        cell = None if profile is None else profile.cells.get(point.configuration)
        if profile is None or (cell is not None and not profile.is_stale(cell)):
            return ProfileReading(point, at_s, noise=noise or {})
        learned = self._learned.get(profile.workload.family)
        expected = {}
        for name in learned.surfaces if learned else ():
            answer = self._quantity(profile, name, [point.configuration], where)[0]
            if isinstance(answer, ProfileEstimate) and answer.basis is not EstimateBasis.PRIOR:
                deviation = math.log(answer.upper / answer.lower) / (2.0 * NORMAL_90)
                expected[name] = ExpectedReading(math.log(answer.median), max(deviation, 1e-6))
        return ProfileReading(point, at_s, expected, noise or {})

    def predict_ratios(
        self, workload: str, name: str, configurations: Sequence[Configuration], base: Configuration
    ) -> tuple[LogRatio, ...] | str:
        """A quantity in each configuration over that in `base`; or why nothing is known of it.

        Narrower than two predictions: a level that both share is not in it. Of what was learned alone: where the
        family varied no such coordinate there is no answer. Raises UnknownSlice and ImpossibleReading.
        """
        profile = self._profiles.profiles.get(workload) or WorkloadProfile(ProfiledWorkload(workload))
        learned = self._learned.get(profile.workload.family)
        if learned is None or name not in learned.surfaces:
            return f"nothing was learned of {name} in family {profile.workload.family!r}"
        belief = self._belief(profile, name)
        origin = locate_configuration(base, self._catalogue)
        others = [one for one in configurations if one != base]
        places = [locate_configuration(one, self._catalogue) for one in others]
        unknown = sorted({one for where in (*places, origin) for one in belief.surface.frame.unknown_features(where)})
        if unknown:
            return f"no workload of family {profile.workload.family!r} was measured with other {', '.join(unknown)}"
        found = {base: LogRatio(0.0, 0.0)}
        if others:
            means, variances = belief.predict_difference(places, origin)
            reach = belief.surface.calibration.interval_factor(belief.known)
            here = prior.log_offset(name, origin, self._catalogue)
            for how, where, mean, variance in zip(others, places, means, variances, strict=True):
                moved = prior.log_offset(name, where, self._catalogue) - here
                found[how] = LogRatio(float(mean) + moved, reach * math.sqrt(float(variance)))
        return tuple(found[one] for one in configurations)

    def _prediction(
        self, profile: WorkloadProfile, configuration: Configuration, answers: Mapping[str, ProfileEstimate | str]
    ) -> ProfilePrediction:
        given = {name: answer for name, answer in answers.items() if isinstance(answer, ProfileEstimate)}
        latencies = {
            float(latency_quantile_of(name) or 0.0): one for name, one in given.items() if latency_quantile_of(name)
        }
        return ProfilePrediction(
            configuration,
            given.get(THROUGHPUT),
            given.get(POWER),
            given.get(MEMORY),
            monotone_latencies(latencies),
            fits_memory(profile, configuration, self._catalogue),
            {name: answer for name, answer in answers.items() if isinstance(answer, str)},
        )

    def _quantity(
        self,
        profile: WorkloadProfile,
        name: str,
        configurations: Sequence[Configuration],
        places: Sequence[FeaturePoint],
    ) -> list[ProfileEstimate | str]:
        """One quantity of every configuration: an estimate, or why there is none."""
        learned = self._learned.get(profile.workload.family)
        if learned is None or name not in learned.surfaces:
            return [self._estimate_without_model(profile, name, one) for one in configurations]
        answers = self._learned_answers(profile, name, places)
        if name == POWER:
            return [
                clip_power(answer, one, self._catalogue) if isinstance(answer, ProfileEstimate) else answer
                for answer, one in zip(answers, configurations, strict=True)
            ]
        return answers

    def _estimate_without_model(
        self, profile: WorkloadProfile, name: str, configuration: Configuration
    ) -> ProfileEstimate | str:
        """From readings of this very configuration, or from the catalogue."""
        cell = profile.cells.get(configuration)
        tally: ReadingTally | None = None if cell is None or profile.is_stale(cell) else cell.tallies.get(name)
        if tally is not None:
            variance = reading_variance(profile, name, tally.stated) * (1.0 + 1.0 / tally.readings)
            half = NORMAL_90 * math.sqrt(variance)
            return _estimate(tally.mean, tally.mean - half, tally.mean + half, None, EstimateBasis.MEASURED)
        band = prior.prior_power_w(configuration, self._catalogue) if name == POWER else None
        if band is not None:
            return ProfileEstimate(band.median, band.lower, band.upper, EstimateBasis.PRIOR)
        return f"nothing was learned of {name} in family {profile.workload.family!r}; measure some configurations"

    def _belief(self, profile: WorkloadProfile, name: str) -> QuantityPosterior:
        key = profile.workload.workload, name
        held = self._beliefs.pop(key, None)
        if held is None or held[0] is not profile:
            surface = self._learned[profile.workload.family].surfaces[name]
            mine, _ = workload_sample(profile, name, self._catalogue)
            held = profile, QuantityPosterior(surface, mine, reading_variance(profile, name))
        self._beliefs[key] = held  # the last, since it was asked last
        while len(self._beliefs) > 1 and sum(one.number_count for _, one in self._beliefs.values()) > _NUMBERS_MOST:
            del self._beliefs[next(iter(self._beliefs))]
        return held[1]

    def _limits(self, profile: WorkloadProfile, model: str) -> tuple[float, ...]:
        """Limits on a GPU model that the family was measured at when it was learned, or the workload since."""
        mine = (one for one in profile.cells if one.gpu_model == model and one.power_limit_w is not None)
        known = self._learned[profile.workload.family].limits.get(model, ())
        return (*known, *(locate_configuration(one, self._catalogue).numbers["limit"] for one in mine))

    def _learned_answers(
        self, profile: WorkloadProfile, name: str, places: Sequence[FeaturePoint]
    ) -> list[ProfileEstimate | str]:
        belief = self._belief(profile, name)
        frame = belief.surface.frame
        answers: list[ProfileEstimate | str] = [""] * len(places)
        groups: dict[tuple[object, ...], list[tuple[int, FeaturePoint]]] = {}
        ratios: dict[int, prior.PriorBand] = {}
        for row, where in enumerate(places):
            unknown = frame.unknown_features(where)
            inside, ratio = _inside(name, where, unknown, dict(frame.fixed))
            if inside is None:
                answers[row] = f"no workload of family {profile.workload.family!r} was measured with other {unknown}"
                continue
            if ratio is not None:
                ratios[row] = ratio
            groups.setdefault(grid_key(inside), []).append((row, inside))
        varied = frozenset(column.name for column in frame.numbers)
        examples = [asked[0][1] for asked in groups.values()]
        lattices = [
            build_grid(one, self._limits(profile, one.names["gpu_model"]), varied, self._catalogue) for one in examples
        ]
        if not lattices:
            return answers
        believed = belief.predict_at([one for lattice in lattices for one in lattice.places])
        begin = 0
        for lattice, asked in zip(lattices, groups.values(), strict=True):
            end = begin + len(lattice.places)
            part = slice(begin, end)
            begin = end
            shape = len(lattice.slices), len(lattice.limits)
            offsets = np.array([prior.log_offset(name, one, self._catalogue) for one in lattice.places])
            here = QuantityEstimate(believed.mean[part], believed.variance[part], believed.measured[part])
            layers = _layers(here.mean + offsets, here, belief, name, shape)
            measured = here.measured.reshape(shape).astype(np.float64)
            for row, where in asked:
                middle, lower, upper = (interpolate_grid(lattice, layer, where) for layer in layers)
                basis = EstimateBasis.BORROWED if not belief.own else EstimateBasis.INTERPOLATED
                if interpolate_grid(lattice, measured, where) == 1.0 and row not in ratios:
                    basis = EstimateBasis.MEASURED
                answers[row] = _estimate(middle, lower, upper, ratios.get(row), basis)
        return answers


def _layers(
    mean: Floats, believed: QuantityEstimate, belief: QuantityPosterior, name: str, shape: tuple[int, int]
) -> tuple[Floats, Floats, Floats]:
    """Middles in the order that physics asks for, lower and upper ends, on a lattice.

    What readings scatter, and a configuration from its neighbours, may break the order of measurements: it
    counts into what a measured place may be moved by. The ends keep their distance: they are of a reading.
    """
    factor = np.where(believed.measured, NORMAL_90, belief.surface.calibration.interval_factor(belief.known))
    half = (factor * np.sqrt(believed.variance + belief.reading_variance)).reshape(shape)
    middle = mean.reshape(shape)
    way = monotone_direction(name)
    if way and shape != (1, 1):
        middle = monotone_surface(middle, 1.0 / (believed.variance + belief.residual_variance).reshape(shape), way)
    return middle, middle - half, middle + half


def _inside(
    name: str, where: FeaturePoint, unknown: tuple[str, ...], fixed: Mapping[str, float]
) -> tuple[FeaturePoint | None, prior.PriorBand | None]:
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
    return FeaturePoint(numbers, where.names), prior.PriorBand(
        math.exp(middle), math.exp(middle - math.sqrt(low)), math.exp(middle + math.sqrt(high))
    )


def _estimate(
    middle: float, lower: float, upper: float, ratio: prior.PriorBand | None, basis: EstimateBasis
) -> ProfileEstimate:
    """From logarithms to units, with the prior's ratio and its own uncertainty."""
    if ratio is not None:
        down = math.hypot(middle - lower, math.log(ratio.median / ratio.lower))
        up = math.hypot(upper - middle, math.log(ratio.upper / ratio.median))
        middle += math.log(ratio.median)
        lower, upper, basis = middle - down, middle + up, EstimateBasis.PRIOR
    return ProfileEstimate(math.exp(middle), math.exp(lower), math.exp(upper), basis)
