"""Predictions as a planner may use them: which configurations to ask for, and points on the safe side.

Owns what counts as too little and as too wide to plan with. Must not know services, jobs or plans.

Theory. A profile's other points say at which batches and processes it is run; what was
never measured of them is asked for on the GPU model in question. A prediction counts as a
point whose throughput is the lower end of its 90 % interval and whose latencies are the
upper ends, its watts too: a plan made with it keeps its promise if the interval holds. A GPU model that nobody
of the family was measured on is not asked for: no interval was ever checked for it. Nor is an interval
used that reaches further than WIDEST either way, since what is served corrects a profile no further.

Profiles with latencies are one family and those without another: the throughput of the
former is requests or tokens, of the latter steps. Of more than POINTS_MOST points, the
profiles that come first count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles.answers import Basis, Estimate, Prediction
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.store import CELLS_MOST, Profiles, Reading, Workload

__all__ = ["ASKED_MOST", "POINTS_MOST", "SERVED", "TRAINED", "WIDEST", "SafePoint", "asked", "family_of", "safe_point", "stored", "usual"]  # fmt: skip

POINTS_MOST = 2048  # that are learned from
ASKED_MOST = 64  # configurations in one question
WIDEST = 4.0  # end of an interval over its middle, or the inverse; a correction (serving.correction) goes as far
SERVED, TRAINED = "served", "trained"


class SafePoint(NamedTuple):
    """A predicted point on the safe side, and the whole intervals."""

    point: Point
    throughput_hz: Estimate
    latency_s: Mapping[float, Estimate]


def family_of(points: Iterable[Point]) -> str:
    """Whom a profile learns with."""
    return SERVED if any(point.latency_s for point in points) else TRAINED


def stored(points: Mapping[str, Sequence[Point]], most: int = POINTS_MOST) -> Profiles:
    """The store that was told these points; what cannot be is left out. All of one profile or none, in their order."""
    found, left = Profiles(), most
    for name, of in points.items():
        if not of or len(of) > left:
            continue
        left -= len(of)
        found = found.introduced(Workload(name, family_of(of)))
        for second, point in enumerate(of[:CELLS_MOST]):
            try:
                found = found.told(Reading(point, float(second)))
            except ControllerError:
                continue
    return found


def asked(points: Iterable[Point], gpu_model: str, gpus: int, limit_w: float | None) -> tuple[Configuration, ...]:
    """How a profile that ran on as many GPUs elsewhere would run on whole ones of this model; rising in batch."""
    ways = {
        replace(point.configuration, gpu_model=gpu_model, gpus=gpus, mig_profile="", power_limit_w=limit_w)
        for point in points
        if not point.configuration.mig_profile and point.configuration.gpus == gpus and point.throughput_hz > 0.0
    }
    return tuple(sorted(ways, key=lambda one: (one.batch, one.processes, one.clock_mhz or 0, one.label))[:ASKED_MOST])


def usual(points: Sequence[Point], gpu_model: str, gpus: int) -> Configuration | None:
    """How a job of this profile most often ran, put on a whole GPU model at the default limit; None without points.

    Runs on as many GPUs count, or all if there are none.
    """
    ran = [point for point in points if not point.configuration.mig_profile and point.power_w is not None]
    alike = [point for point in ran if point.configuration.gpus == gpus] or ran
    ways = Counter(replace(point.configuration, gpu_model=gpu_model, gpus=gpus, power_limit_w=None) for point in alike)
    return min(ways, key=lambda one: (-ways[one], repr(one)), default=None)


def safe_point(workload: str, prediction: Prediction) -> SafePoint | str:
    """The safe side of a prediction; or why it is none to plan with."""
    throughput, latencies = prediction.throughput_hz, prediction.latency_s
    if throughput is None:
        return prediction.missing.get("throughput_hz", "its throughput is not known")
    if not latencies:
        return "no latency is known of profiles of its kind"
    if min(one.basis for one in (throughput, *latencies.values())) is Basis.PRIOR:
        return "its power limit was never varied by profiles of its kind"
    reach = max(_reach(one) for one in (throughput, *latencies.values()))
    if reach > WIDEST:
        return f"its 90 % interval reaches to {reach:.0f} times the middle, which is too wide to plan with"
    point = Point(
        workload,
        prediction.configuration,
        throughput.lower,
        {quantile: one.upper for quantile, one in latencies.items()},
        None if prediction.power_w is None else prediction.power_w.upper,
        source="predicted",
    )
    return SafePoint(point, throughput, latencies)


def _reach(one: Estimate) -> float:
    return max(one.upper / one.median, one.median / one.lower)
