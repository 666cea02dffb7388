"""Every service under every promise and policy, judged; and the sums over a fleet.

Owns which runs there are and how they are added up. Must not know files or tables.

Each service has its own part of the pool, the same for all policies and objectives of
a rate: of each GPU model as many as its configuration of least latency needs for the
peak. Parts are not shared between services, so energies and bounds of a fleet are sums.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from joblib import Parallel, delayed

from bench.llm.audit import Promise, audit
from bench.llm.bounds import lp_bound, whole_bound
from bench.llm.data import GPU_MODELS, WINDOW_S, Service, own_trace
from bench.llm.policies import POLICIES, case_of
from eelgrid_controller.profiles.points import NoFeasibleConfiguration, Point

__all__ = ["FLEETS", "Course", "Job", "Outcome", "Penalty", "everything", "fleets", "penalties", "pool_of"]

QUANTILE = 0.95
FLEETS = ("own", "conv", "code")  # each service on the trace of its kind, all on one, all on the other


class Job(NamedTuple):
    """One service, one trace, one rate, one objective, all policies."""

    service: Service
    trace: str
    rate: float
    objective_s: float
    demand_hz: np.ndarray  # (T,) scaled
    start_s: float
    idle_w: Mapping[str, float]
    may_idle: bool


class Course(NamedTuple):
    """What a run shows over time; kept for pictures."""

    power_w: np.ndarray
    throughput_hz: np.ndarray


class Outcome(NamedTuple):
    """One policy in one job, or in a fleet."""

    task: str
    model: str
    trace: str
    rate: float
    objective_ms: float
    policy: str
    services: int
    windows: int
    violated: int  # windows
    bound_violated: int
    pool_idle_j: float  # what the pool draws with nothing on it
    above_idle_j: float
    bound_j: float  # above idle, LP
    whole_j: float  # above idle, whole instances
    serving_j: float
    undivided_j: float
    start_j: float
    starts: int
    tokens: float
    decision_s: float  # mean of a window
    course: Course | None

    @property
    def energy_j(self) -> float:
        """Of the whole pool."""
        return self.pool_idle_j + self.above_idle_j

    @property
    def gap_pct(self) -> float:
        """Energy of the pool above that of the LP."""
        return 100.0 * (self.energy_j / (self.pool_idle_j + self.bound_j) - 1.0)

    @property
    def gap_above_idle_pct(self) -> float:
        """The same without what the pool draws idle: nothing dilutes it."""
        return 100.0 * (self.above_idle_j / self.bound_j - 1.0)

    @property
    def gap_whole_pct(self) -> float:
        """Above idle, against whole instances."""
        return 100.0 * (self.above_idle_j / self.whole_j - 1.0)


def pool_of(points: Sequence[Point], peak_hz: float) -> dict[str, int]:
    """GPUs of each model that the configurations of least latency need for the peak."""
    pool = {}
    for model in GPU_MODELS.values():
        mine = [point for point in points if point.configuration.gpu_model == model]
        fastest = min(mine, key=lambda point: point.latency_s[QUANTILE], default=None)
        pool[model] = 0 if fastest is None else math.ceil(peak_hz / fastest.throughput_hz) * fastest.configuration.gpus
    return pool


def _run(job: Job, policies: Sequence[str]) -> list[Outcome]:
    """All policies of a job; empty where no configuration keeps the objective."""
    promise = Promise(QUANTILE, job.objective_s, WINDOW_S, job.start_s, job.may_idle)
    pool = pool_of(job.service.points, float(job.demand_hz.max()))
    try:
        case = case_of(job.service.points, promise, pool, job.idle_w)
    except NoFeasibleConfiguration:
        return []
    bound = lp_bound(case.points, promise, job.demand_hz, pool=pool, idle_w=job.idle_w)
    whole_j = whole_bound(case.shapes, job.demand_hz, pool, WINDOW_S)
    windows = len(job.demand_hz)
    pool_idle_j = sum(gpus * job.idle_w[model] for model, gpus in pool.items()) * WINDOW_S * windows
    found = []
    for policy in policies:
        began_s = time.perf_counter()
        plan = POLICIES[policy](case, job.demand_hz)
        took_s = time.perf_counter() - began_s
        judged = audit(case.points, promise, list(job.demand_hz), plan, pool=pool, idle_w=job.idle_w)
        found.append(
            Outcome(
                job.service.task,
                job.service.model,
                job.trace,
                job.rate,
                1e3 * job.objective_s,
                policy,
                1,
                windows,
                int(judged.violated.sum()),
                bound.violated,
                pool_idle_j,
                judged.above_idle_j,
                bound.above_idle_j,
                whole_j,
                judged.serving_j,
                judged.undivided_j,
                judged.start_j,
                judged.starts,
                judged.tokens,
                took_s / windows,
                Course(judged.power_w, judged.throughput_hz),
            )
        )
    return found


def everything(
    jobs: Sequence[Job], policies: Sequence[str], processes: int, tell: Callable[[int, int], None]
) -> list[Outcome]:
    """All runs, in the order of the jobs."""
    found: list[Outcome] = []
    work = (delayed(_run)(job, policies) for job in jobs)
    for done, outcomes in enumerate(Parallel(processes, return_as="generator")(work), 1):
        found += outcomes
        tell(done, len(jobs))
    return found


def _summed(runs: Sequence[Outcome], task: str, trace: str) -> Outcome:
    first = runs[0]
    return Outcome(
        task,
        "all",
        trace,
        first.rate,
        first.objective_ms,
        first.policy,
        len(runs),
        sum(run.windows for run in runs),
        sum(run.violated for run in runs),
        sum(run.bound_violated for run in runs),
        math.fsum(run.pool_idle_j for run in runs),
        math.fsum(run.above_idle_j for run in runs),
        math.fsum(run.bound_j for run in runs),
        math.fsum(run.whole_j for run in runs),
        math.fsum(run.serving_j for run in runs),
        math.fsum(run.undivided_j for run in runs),
        math.fsum(run.start_j for run in runs),
        sum(run.starts for run in runs),
        math.fsum(run.tokens for run in runs),
        statistics.fmean(run.decision_s for run in runs),
        None,
    )


def fleets(runs: Iterable[Outcome]) -> list[Outcome]:
    """Sums over services by trace, rate, objective and policy; `own` has each service on the trace of its kind."""
    groups: dict[tuple[str, float, float, str], list[Outcome]] = {}
    for run in runs:
        service = Service(run.task, run.model, ())
        for fleet in FLEETS:
            if run.trace == (own_trace(service) if fleet == "own" else fleet):
                groups.setdefault((fleet, run.rate, run.objective_ms, run.policy), []).append(run)
    return [_summed(group, "all", key[0]) for key, group in groups.items()]


class Penalty(NamedTuple):
    """What the configuration of least latency costs, in energy per token of the best admissible one."""

    objective_ms: float
    services: int
    median: float
    published: float


def penalties(services: Iterable[Service], objectives_s: Iterable[float]) -> list[Penalty]:
    """The known numbers of the facts, computed anew."""
    published = {0.02: 1.74, 0.05: 3.43, 0.1: 5.63}
    found = []
    listed = list(services)
    for objective_s in objectives_s:
        ratios = []
        for service in listed:
            per_token = [(p.power_w or 0.0) / p.throughput_hz for p in service.points]
            latency = [p.latency_s[QUANTILE] for p in service.points]
            allowed = [j for j, s in zip(per_token, latency, strict=True) if s <= objective_s]
            if allowed:
                ratios.append(per_token[latency.index(min(latency))] / min(allowed))
        if ratios:
            known = published.get(objective_s, math.nan)
            found.append(Penalty(1e3 * objective_s, len(ratios), statistics.median(ratios), known))
    return found
