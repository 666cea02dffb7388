"""Answers profile forecasts in a background thread, and learns profile families in a child process.

Conservative use of predictions: candidate configurations, and points at the safe end of their intervals. A family is
learned again when it has grown, in a child (`python -m` this module) with bounded CPU time, memory and wall time, which
reads one line of JSON from standard input and writes one to standard output. It alone imports scikit-learn.
"""

import contextlib
import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles.points import (
    POWER,
    THROUGHPUT,
    Configuration,
    EstimateBasis,
    LogRatio,
    Point,
    ProfileEstimate,
    ProfilePrediction,
)
from eelgrid_controller.profiles.store import CELLS_MOST, ProfiledWorkload, ProfileReading, ProfileStore
from eelgrid_protos.catalogue.loader import Catalogue

if TYPE_CHECKING:
    from eelgrid_controller.profiles.prediction import ProfilePredictor
    from eelgrid_controller.profiles.surfaces import LearnedFamily


STORED_POINTS_MOST = 2048  # that are learned from
QUESTIONS_PER_PROFILE_MOST = 64  # configurations in one question
# End of an interval over its middle, or the inverse; a correction (services.service_model) goes as far.
INTERVAL_RATIO_MOST = 4.0
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


QUESTIONS_MOST = 1024
LIMIT_CHANGE_LEAST = 0.05
POINT_GROWTH_LEAST = 0.25  # of a family's points, at which it is learned again
RETRAIN_RETRY_S = 600.0
NOT_LEARNED_REASON = "no model of its kind of profile is learned yet"
_KEPT_CYCLES = 120  # that a question is answered for after it was last asked


class ServiceQuestion(NamedTuple):
    """How a profile serves on a GPU model: replicas of so many GPUs at a power limit, None for the default."""

    profile: str
    gpu_model: str
    gpus: int
    limit_w: float | None


class JobQuestion(NamedTuple):
    """How a profile trains at limits of a GPU model against the largest, which comes first."""

    profile: str
    gpu_model: str
    gpus: int
    limits_w: tuple[float, ...]


class ScaleQuestion(NamedTuple):
    """How a profile runs on so many GPUs of a model, at the default limit, where it was measured on the first number."""

    profile: str
    gpu_model: str
    gpus: tuple[int, ...]


ForecastQuestion: TypeAlias = ServiceQuestion | JobQuestion | ScaleQuestion


class LimitCurve(NamedTuple):
    """Time and energy of the same work at each limit, over those at the largest."""

    time: tuple[LogRatio, ...]
    energy: tuple[LogRatio, ...]


class ScaledRun(NamedTuple):
    """A run on so many GPUs, by the ends of 90 % intervals."""

    gpus: int
    throughput_hz: tuple[float, float]
    power_w: tuple[float, float]


class ProfileForecast(NamedTuple):
    """An answer; without points and bend `why_none` says why."""

    points: tuple[ConservativePoint, ...] = ()  # of a service
    bend: LimitCurve | None = None  # of a job
    counts: tuple[ScaledRun, ...] = ()  # of numbers of GPUs
    why_none: str = ""
    learned_from: int = 0  # configurations of the family


class FamilyLearner(Protocol):
    """Where learning is done."""

    def __call__(self, profiles: ProfileStore, family: str) -> "LearnedFamily":
        """What a family teaches; raises ControllerError."""

    def close(self) -> None:
        """Ends what runs."""


@dataclass(slots=True)
class _LearningAttempt:
    """When a family was last learned, and from what."""

    points: frozenset[Hashable] = frozenset()
    failures: int = 0
    again_s: float = 0.0


@dataclass(slots=True)
class _WorkItem:
    """What waits for the thread."""

    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    is_new: bool = False
    is_running: bool = False


class ForecastService:
    """Asked from the thread of the control cycle, given points from the event loop, answered by a thread of its own."""

    def __init__(
        self, catalogue: Catalogue, *, learner: FamilyLearner, monotonic_s: Callable[[], float], log: logging.Logger
    ) -> None:
        self.learnings = 0
        self._catalogue = catalogue
        self._learner = learner
        self._monotonic_s = monotonic_s
        self._log = log
        self._lock = threading.Lock()
        self._mail = _WorkItem()
        self._asked: dict[ForecastQuestion, int] = {}  # the turn in which it was last asked
        self._turn = 0
        self._answers: Mapping[ForecastQuestion, ProfileForecast] = {}
        self._learned: dict[str, LearnedFamily] = {}  # of the thread, as all that follows
        self._tried: dict[str, _LearningAttempt] = {}
        self._again_s = math.inf  # when a family that could not be learned is tried again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecasts")
        self._is_closed = False

    def update_points(self, points: Mapping[str, tuple[Point, ...]]) -> None:
        """From now on these points, by profile."""
        with self._lock:
            self._mail.points, self._mail.is_new = points, True

    def request_forecast(self, question: ForecastQuestion) -> ProfileForecast | None:
        """The newest answer; None until there is one."""
        with self._lock:
            if question not in self._asked and len(self._asked) >= QUESTIONS_MOST:
                return ProfileForecast(why_none=f"more than {QUESTIONS_MOST} predictions are requested")
            if question not in self._asked:
                self._mail.is_new = True
            self._asked[question] = self._turn
        return self._answers.get(question)

    def end_cycle(self) -> None:
        """Ends a control cycle: what it asked is answered, what nobody asks any more is forgotten."""
        with self._lock:
            self._turn += 1
            for question in [one for one, at in self._asked.items() if at + _KEPT_CYCLES < self._turn]:
                del self._asked[question]
            due = bool(self._asked) and (self._mail.is_new or self._monotonic_s() >= self._again_s)
            if self._is_closed or self._mail.is_running or not due:
                return
            self._mail.is_running = True
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._work)

    def close(self) -> None:
        """Ends the thread and a learner that runs."""
        with self._lock:
            self._is_closed = True
        self._learner.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # In the thread

    def _work(self) -> None:
        try:
            with self._lock:
                points, questions = self._mail.points, tuple(self._asked)
                self._mail.is_new = False
            wanted = {question.profile for question in questions}
            first = {name: points[name] for name in sorted(wanted & points.keys())}
            told = first | {name: points[name] for name in sorted(points.keys() - wanted)}
            profiles = build_store(told)
            kept = {name: of for name, of in told.items() if name in profiles.profiles}
            self._answer_questions(profiles, kept, questions)
            families = {profiles.profiles[name].workload.family for name in first.keys() & kept.keys()}
            if self._learn_families(profiles, kept, families):
                self._answer_questions(profiles, kept, questions)
            self._again_s = min((one.again_s for one in self._tried.values() if one.again_s > 0.0), default=math.inf)
        except Exception:  # noqa: BLE001  # the next turn tries again
            self._log.exception("forecasts=failed")
        finally:
            with self._lock:
                self._mail.is_running = False

    def _learn_families(
        self, profiles: ProfileStore, points: Mapping[str, tuple[Point, ...]], families: Iterable[str]
    ) -> bool:
        """Learns the families that are due; whether anything was."""
        from eelgrid_controller.profiles.profile_service import ProfileService

        grown = set(ProfileService(self._catalogue, profiles, self._learned).families_due())
        learned = False
        for family in sorted(families):
            members = {one.workload.workload for one in profiles.family_profiles(family)}
            now = frozenset(_stored_points(point) for name in members for point in points[name])
            tried = self._tried.setdefault(family, _LearningAttempt())
            changed = bool(tried.points) and len(now - tried.points) > POINT_GROWTH_LEAST * len(now)
            if self._is_closed or self._monotonic_s() < tried.again_s:
                continue
            tried.again_s = 0.0
            if not (family in grown or changed):
                continue
            start_s = self._monotonic_s()
            try:
                found = self._learner(profiles, family)
            except (ControllerError, OSError, ValueError) as error:
                tried.failures += 1
                tried.again_s = self._monotonic_s() + RETRAIN_RETRY_S * 2.0 ** min(tried.failures - 1, 6)
                if not self._is_closed:
                    self._log.warning("family=%s learned=no reason=%s", family, error)
                continue
            self._tried[family] = _LearningAttempt(now)
            self._learned[family] = found
            self.learnings += 1
            learned = True
            self._log.info(
                "family=%s learned=%d points=%d seconds=%.1f",
                family,
                len(found.surfaces),
                len(now),
                self._monotonic_s() - start_s,
            )
        return learned

    def _answer_questions(
        self, profiles: ProfileStore, points: Mapping[str, tuple[Point, ...]], questions: Iterable[ForecastQuestion]
    ) -> None:
        from eelgrid_controller.profiles.prediction import ProfilePredictor

        predictor = ProfilePredictor(profiles, self._learned, self._catalogue)
        made: dict[ForecastQuestion, ProfileForecast] = {}
        for question in questions:
            before = self._answers.get(question)
            try:
                found = self._forecast(predictor, profiles, points, question)
            except ControllerError as error:
                found = ProfileForecast(why_none=str(error))
            made[question] = before if before is not None and _alike(before, found) else found
        self._answers = made

    def _forecast(
        self,
        predictor: "ProfilePredictor",
        profiles: ProfileStore,
        points: Mapping[str, tuple[Point, ...]],
        question: ForecastQuestion,
    ) -> ProfileForecast:
        of = points.get(question.profile, ())
        if not of:
            return ProfileForecast(why_none=f"profile {question.profile} has no points")
        family = profiles.profiles[question.profile].workload.family
        learned = self._learned.get(family)
        if learned is None:
            return ProfileForecast(why_none=NOT_LEARNED_REASON)
        there = (
            how.gpu_model == question.gpu_model and not how.mig_profile
            for one in profiles.family_profiles(family)
            for how in one.cells
        )
        if not any(there):
            return ProfileForecast(why_none=f"no profile of its kind was measured on {question.gpu_model}")
        count = max(surface.learned_from for surface in learned.surfaces.values())
        match question:
            case ServiceQuestion():
                found = _forecast_service(predictor, of, question)
            case JobQuestion():
                found = _forecast_job(predictor, of, question)
            case ScaleQuestion():
                found = _forecast_scale(predictor, of, question)
        return found._replace(learned_from=count)


def _forecast_service(predictor: "ProfilePredictor", of: Sequence[Point], question: ServiceQuestion) -> ProfileForecast:
    """What was measured there is not asked for."""
    known = {point.configuration for point in of}
    ways = [
        one
        for one in candidate_configurations(of, question.gpu_model, question.gpus, question.limit_w)
        if one not in known
    ]
    if not ways:
        return ProfileForecast(why_none=f"it was measured with {question.gpus} GPUs a replica nowhere else")
    found = [conservative_point(question.profile, one) for one in predictor.predict(question.profile, ways)]
    points = tuple(one for one in found if isinstance(one, ConservativePoint))
    reasons = [one for one in found if isinstance(one, str)]
    return ProfileForecast(points) if points else ProfileForecast(why_none=reasons[0])


def _forecast_job(predictor: "ProfilePredictor", of: Sequence[Point], question: JobQuestion) -> ProfileForecast:
    how = usual_configuration(of, question.gpu_model, question.gpus)
    if how is None:
        return ProfileForecast(why_none="its power was never measured")
    ways = [replace(how, power_limit_w=limit_w) for limit_w in question.limits_w]
    speeds = predictor.predict_ratios(question.profile, THROUGHPUT, ways, ways[0])
    watts = predictor.predict_ratios(question.profile, POWER, ways, ways[0])
    for found in (speeds, watts):
        if isinstance(found, str):
            return ProfileForecast(why_none=found)
    assert not isinstance(speeds, str), "reasons were returned"
    assert not isinstance(watts, str), "reasons were returned"
    times = tuple(LogRatio(max(0.0, -one.mean), one.half) for one in speeds)  # a lower limit is no faster
    energies = tuple(
        LogRatio(time.mean + power.mean, math.hypot(time.half, power.half))
        for time, power in zip(times, watts, strict=True)
    )
    return ProfileForecast(bend=LimitCurve(times, energies))


def _forecast_scale(predictor: "ProfilePredictor", of: Sequence[Point], question: ScaleQuestion) -> ProfileForecast:
    """From the first number, which was measured, by ratios: they hold no level that nobody measured."""
    how = usual_configuration(of, question.gpu_model, question.gpus[0])
    base = next((point for point in of if point.configuration == how), None)
    if how is None or base is None or base.power_w is None:
        return ProfileForecast(why_none=f"it was measured with {question.gpus[0]} GPUs only in unusual configurations")
    ways = [replace(how, gpus=gpus) for gpus in question.gpus]
    found = [predictor.predict_ratios(question.profile, name, ways, ways[0]) for name in (THROUGHPUT, POWER)]
    for one in found:
        if isinstance(one, str):
            return ProfileForecast(why_none=one)
    made = []
    for way, speed, watts in zip(ways[1:], found[0][1:], found[1][1:], strict=True):
        assert isinstance(speed, LogRatio)
        assert isinstance(watts, LogRatio)
        if max(speed.half, watts.half) > math.log(INTERVAL_RATIO_MOST):
            continue
        made.append(ScaledRun(way.gpus, _ends(base.throughput_hz, speed), _ends(base.power_w, watts)))
    return (
        ProfileForecast(counts=tuple(made))
        if made
        else ProfileForecast(why_none="its intervals are too wide to plan with")
    )


def _ends(measured: float, ratio: LogRatio) -> tuple[float, float]:
    return measured * math.exp(ratio.mean - ratio.half), measured * math.exp(ratio.mean + ratio.half)


def _stored_points(point: Point) -> Hashable:
    """What tells two points apart."""
    return (
        point.configuration,
        point.workload,
        point.throughput_hz,
        point.power_w,
        tuple(sorted(point.latency_s.items())),
    )


def _alike(one: ProfileForecast, other: ProfileForecast) -> bool:
    """Whether no number of a service's points moved by more than MOVED; a job asks once."""
    if not one.points or len(one.points) != len(other.points):
        return one == other
    return all(
        a.point.configuration == b.point.configuration
        and a.point.latency_s.keys() == b.point.latency_s.keys()
        and all(abs(y / x - 1.0) <= LIMIT_CHANGE_LEAST for x, y in zip(_numbers(a), _numbers(b), strict=True))
        for a, b in zip(one.points, other.points, strict=True)
    )


def _numbers(one: ConservativePoint) -> list[float]:
    spans = [one.throughput_hz, *(one.latency_s[quantile] for quantile in sorted(one.latency_s))]
    return [value for span in spans for value in span[:3]]


CHILD_CPU_S = 600
WALL_S = 1800.0
MEMORY_BYTES = 4 << 30  # of addresses; 0.3 GB of them are used
_NICE = 10
_MESSAGE_LENGTH_MOST = 500  # characters of what a child says when it fails
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class LearningFailed(ControllerError):
    """The child ended without an answer."""


class LearningProcess:
    """Learns in a child, one at a time; `close` may come from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def __call__(self, profiles: ProfileStore, family: str) -> "LearnedFamily":
        """What a family teaches; raises LearningFailed. Waits for the child, WALL_S at most."""
        from eelgrid_controller.profiles.profile_service import decode_record, encode_record
        from eelgrid_controller.profiles.surfaces import LearnedFamily

        question = json.dumps({"family": family, "profiles": encode_record(profiles)}).encode()
        with self._lock:
            if self._is_closed:
                raise LearningFailed("the daemon stops", "start it again")
            self._child = child = subprocess.Popen(  # our own module
                [sys.executable, "-m", "eelgrid_controller.objectives.forecasts"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
            )
        try:
            answer, said = child.communicate(question, timeout=WALL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise LearningFailed(f"learning took over {WALL_S:g} s", "give the controller more CPU time") from None
        finally:
            with self._lock:
                self._child = None
        if child.returncode != 0:
            last = said.decode(errors="replace").strip()[-_MESSAGE_LENGTH_MOST:]
            raise LearningFailed(f"learning ended with {child.returncode}: {last}", "see its last output")
        found = decode_record(json.loads(answer))
        if not isinstance(found, LearnedFamily):
            raise LearningFailed("the learning process gave an unexpected answer", "install one release of eelgrid")
        return found

    def close(self) -> None:
        """Ends a child that runs; none is begun after this."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()


def run_child() -> int:
    """The child: one question from standard input, one answer to standard output."""
    from eelgrid_controller.profiles.learning import learn_family
    from eelgrid_controller.profiles.profile_service import decode_record, encode_record
    from eelgrid_protos.catalogue.loader import load_catalogue

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question = json.loads(sys.stdin.buffer.read())
    profiles = decode_record(question["profiles"])
    assert isinstance(profiles, ProfileStore), "the parent sends a store"
    try:
        learned = learn_family(profiles, question["family"], load_catalogue())
    except ControllerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(encode_record(learned)))
    return 0


if __name__ == "__main__":
    sys.exit(run_child())
