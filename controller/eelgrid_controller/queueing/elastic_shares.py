"""Shares of elastic jobs: on how many workers a job meets its deadline, and when it ends on some number of them.

Pure functions of a scaling curve, the work and times in seconds or nanoseconds. Must not know where workers are placed, nor
who else wants the GPUs.

Theory (minimum satisfactory share of ElasticFlow, Gu et al., ASPLOS 2023). A curve says how fast a job is on each number of
workers. Only numbers count that are faster than all below: of these, the smallest on which what is left is done by the
deadline is the share that a job must keep; what it has beyond may be given to others. What is left follows from what workers
report; between two reports, and over a change of workers, it follows from the curve times the pace: the rate that was last
measured over that of the curve.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace

from eelgrid_controller.profiles.points import Point
from eelgrid_protos.messages import SCALING_RATES_MOST, ElasticShare, ScalingRate, Workload, WorkloadPhase
from eelgrid_protos.values import dataclass

_NS = 1e9
# A pace is believed of a window of this length, and within these bounds.
_WINDOW_S = 60.0
_PACES = (0.05, 20.0)


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Units of work a second by number of workers, both in ascending order: each number is faster than all below."""

    workers: tuple[int, ...]
    rates_hz: tuple[float, ...]

    @property
    def fastest(self) -> int:
        """The number of workers on which the job is fastest."""
        return self.workers[-1]

    def get_rate_hz(self, workers: int) -> float:
        """Returns the rate on a number of workers: that of the next smaller number, or below all its part of the smallest."""
        place = bisect_right(self.workers, workers)
        return self.rates_hz[place - 1] if place else self.rates_hz[0] * workers / self.workers[0]

    def list_sufficient(self, work: float, seconds: float) -> tuple[int, ...]:
        """Returns the numbers of workers on which so much work is done in a time, the smallest first."""
        return tuple(
            count
            for count, rate_hz in zip(self.workers, self.rates_hz, strict=True)
            if work <= rate_hz * seconds + _SLACK
        )


# Units of work by which rounding may miss.
_SLACK = 1e-6


def measure_scaling(
    points: Iterable[Point], gpu_model: str, gpus: int, *, least: int, most: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns throughput in Hz and watts by replicas of so many GPUs each, where measured on a model at its default limits."""
    rates: dict[int, float] = {}
    watts: dict[int, float] = {}
    for point in points:
        running = point.configuration
        replicas, rest = divmod(running.gpus, gpus)
        usable = running.gpu_model == gpu_model and running.power_limit_w is None and not running.mig_profile
        if not usable or rest or not least <= replicas <= most:
            continue
        if point.throughput_hz > rates.get(replicas, 0.0):
            rates[replicas] = point.throughput_hz
            if point.power_w is not None:
                watts[replicas] = point.power_w
    return rates, watts


def make_curve(rates_hz: Mapping[int, float]) -> ScalingCurve | None:
    """Makes the curve of some rates by number of workers, without those that gain nothing; None without any."""
    found: list[tuple[int, float]] = []
    for count, rate_hz in sorted(rates_hz.items()):
        if rate_hz > (found[-1][1] if found else 0.0):
            found.append((count, rate_hz))
    if not found:
        return None
    return ScalingCurve(tuple(count for count, _ in found), tuple(rate_hz for _, rate_hz in found))


def thin_curve(curve: ScalingCurve, most: int = SCALING_RATES_MOST) -> ScalingCurve:
    """Returns a curve with at most so many numbers of workers, evenly, with the smallest and the largest."""
    count = len(curve.workers)
    if count <= most:
        return curve
    places = sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
    return ScalingCurve(
        tuple(curve.workers[place] for place in places), tuple(curve.rates_hz[place] for place in places)
    )


def make_share(curve: ScalingCurve, replicas: int, replicas_asked: int) -> ElasticShare:
    """Makes the share of a job that has done nothing yet."""
    rates = zip(curve.workers, curve.rates_hz, strict=True)
    return ElasticShare(
        replicas=replicas,
        replicas_asked=replicas_asked,
        rates=tuple(ScalingRate(replicas=count, rate_hz=rate_hz) for count, rate_hz in rates),
    )


def read_curve(rates: Iterable[ScalingRate]) -> ScalingCurve:
    """Returns the curve of a share."""
    known = tuple(rates)
    return ScalingCurve(tuple(one.replicas for one in known), tuple(one.rate_hz for one in known))


def get_work(workload: Workload) -> float:
    """Returns how much a job has to do in all."""
    return 0.0 if workload.spec.training is None else workload.spec.training.work


def compute_run_ns(workload: Workload, workers: int) -> int:
    """Returns how long what is left of a job takes on a number of workers."""
    share = workload.share
    assert share is not None
    rate_hz = read_curve(share.rates).get_rate_hz(workers) * share.pace
    return int(max(0.0, get_work(workload) - share.work_done) / rate_hz * _NS)


def compute_elastic_end_ns(workload: Workload) -> int:
    """Returns when a running job ends on the workers that it has."""
    share = workload.share
    assert share is not None
    return max(share.at_ns, workload.placed_ns) + compute_run_ns(workload, workload.spec.replicas)


def advance_share(workload: Workload, now_ns: int) -> ElasticShare | None:
    """Returns the share of a running job that is resized at a time, by the curve: it goes on after its restart. None without any."""
    share, training = workload.share, workload.spec.training
    restart_s = 0.0 if training is None else training.restart_s
    if share is None:
        return None
    begun_ns = max(share.at_ns, workload.placed_ns)
    rate_hz = read_curve(share.rates).get_rate_hz(workload.spec.replicas) * share.pace
    done = share.work_done + rate_hz * max(0, now_ns - begun_ns) / _NS
    at_ns = max(begun_ns, now_ns) + int(restart_s * _NS)
    return replace(share, work_done=min(done, get_work(workload)), at_ns=at_ns)


def measure_share(workload: Workload, work_done: float, at_ns: int) -> ElasticShare | None:
    """Returns the share of a running job whose workers report how much was done at a time; None if that is no news yet.

    It is news after a minute. Less than was reported before is the work since a checkpoint, which was lost.
    """
    share = workload.share
    if share is None:
        return None
    begun_ns = max(share.at_ns, workload.placed_ns)
    seconds = (at_ns - begun_ns) / _NS
    if seconds < _WINDOW_S:
        return None
    pace = share.pace
    if work_done >= share.work_done:
        rate_hz = read_curve(share.rates).get_rate_hz(workload.spec.replicas)
        low, high = _PACES
        pace = min(high, max(low, (work_done - share.work_done) / seconds / rate_hz))
    return replace(share, work_done=min(work_done, get_work(workload)), at_ns=at_ns, pace=pace)


def find_least_share(workload: Workload, now_ns: int) -> int:
    """Returns the fewest replicas, of at most those that it has, on which a running job still meets its promised deadline.

    A change stops it for its restart time. Without one that is enough it keeps what it has.
    """
    replicas, deadline, share = workload.spec.replicas, workload.spec.deadline, workload.share
    if share is None or deadline is None or workload.phase is not WorkloadPhase.PLACED:
        return replicas
    now = replace(workload, share=advance_share(workload, now_ns))
    for count in list_enough(now):
        if count < replicas:
            return count
    return replicas


def list_enough(workload: Workload, begin_ns: int = 0) -> tuple[int, ...]:
    """Returns the numbers of replicas on which a job meets its promised deadline, the smallest first.

    It goes on at a time, or when it has restarted, if that is later.
    """
    share, deadline = workload.share, workload.spec.deadline
    if share is None or deadline is None:
        return ()
    begun_ns = max(share.at_ns, workload.placed_ns, begin_ns)
    curve = read_curve(share.rates)
    left = max(0.0, get_work(workload) - share.work_done) / share.pace
    return curve.list_sufficient(left, (deadline.end_ns - begun_ns) / _NS)
