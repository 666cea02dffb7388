"""Conservative use of predictions: candidate configurations, and points at the safe end of their intervals."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles.points import Configuration, EstimateBasis, Point, ProfileEstimate, ProfilePrediction
from eelgrid_controller.profiles.store import CELLS_MOST, ProfiledWorkload, ProfileReading, ProfileStore

STORED_POINTS_MOST = 2048  # that are learned from
QUESTIONS_PER_PROFILE_MOST = 64  # configurations in one question
INTERVAL_RATIO_MOST = (
    4.0  # end of an interval over its middle, or the inverse; a correction (serving.correction) goes as far
)
SERVED, TRAINED = "served", "trained"


class ConservativePoint(NamedTuple):
    """A predicted point on the safe side, and the whole intervals."""

    point: Point
    throughput_hz: ProfileEstimate
    latency_s: Mapping[float, ProfileEstimate]


def profile_family(points: Iterable[Point]) -> str:
    """Whom a profile learns with."""
    return SERVED if any(point.latency_s for point in points) else TRAINED


def build_store(points: Mapping[str, Sequence[Point]], most: int = STORED_POINTS_MOST) -> ProfileStore:
    """The store that was told these points; what cannot be is left out. All of one profile or none, in their order."""
    found, left = ProfileStore(), most
    for name, of in points.items():
        if not of or len(of) > left:
            continue
        left -= len(of)
        found = found.with_workload(ProfiledWorkload(name, profile_family(of)))
        for second, point in enumerate(of[:CELLS_MOST]):
            try:
                found = found.with_reading(ProfileReading(point, float(second)))
            except ControllerError:
                continue
    return found


def candidate_configurations(
    points: Iterable[Point], gpu_model: str, gpus: int, limit_w: float | None
) -> tuple[Configuration, ...]:
    """How a profile that ran on as many GPUs elsewhere would run on whole ones of this model; rising in batch."""
    ways = {
        replace(point.configuration, gpu_model=gpu_model, gpus=gpus, mig_profile="", power_limit_w=limit_w)
        for point in points
        if not point.configuration.mig_profile and point.configuration.gpus == gpus and point.throughput_hz > 0.0
    }
    return tuple(
        sorted(ways, key=lambda one: (one.batch, one.processes, one.clock_mhz or 0, one.label))[
            :QUESTIONS_PER_PROFILE_MOST
        ]
    )


def usual_configuration(points: Sequence[Point], gpu_model: str, gpus: int) -> Configuration | None:
    """How a job of this profile most often ran, put on a whole GPU model at the default limit; None without points.

    Runs on as many GPUs count, or all if there are none.
    """
    ran = [point for point in points if not point.configuration.mig_profile and point.power_w is not None]
    alike = [point for point in ran if point.configuration.gpus == gpus] or ran
    ways = Counter(replace(point.configuration, gpu_model=gpu_model, gpus=gpus, power_limit_w=None) for point in alike)
    return min(ways, key=lambda one: (-ways[one], repr(one)), default=None)


def conservative_point(workload: str, prediction: ProfilePrediction) -> ConservativePoint | str:
    """The safe side of a prediction; or why it is none to plan with."""
    throughput, latencies = prediction.throughput_hz, prediction.latency_s
    if throughput is None:
        return prediction.missing.get("throughput_hz", "its throughput is not known")
    if not latencies:
        return "no latency is known of profiles of its kind"
    if min(one.basis for one in (throughput, *latencies.values())) is EstimateBasis.PRIOR:
        return "its power limit was never varied by profiles of its kind"
    reach = max(_interval_ratio(one) for one in (throughput, *latencies.values()))
    if reach > INTERVAL_RATIO_MOST:
        return f"its 90 % interval reaches to {reach:.0f} times the middle, which is too wide to plan with"
    point = Point(
        workload,
        prediction.configuration,
        throughput.lower,
        {quantile: one.upper for quantile, one in latencies.items()},
        None if prediction.power_w is None else prediction.power_w.upper,
        source="predicted",
    )
    return ConservativePoint(point, throughput, latencies)


def _interval_ratio(one: ProfileEstimate) -> float:
    return max(one.upper / one.median, one.median / one.lower)
