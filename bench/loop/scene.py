"""The simulated cluster: nodes in racks, services, training jobs, budgets, a tariff and the nodes that fail.

Owns the making of one seed's world from the published data. Must not know policies.

A fleet of 46 nodes with 344 GPUs in nine racks: H100 for services, V100, A40 and P100 for
training, because ML.ENERGY measured services on the one and Zeus jobs on the others. A
service runs on the shape of one or two H100 that needs the fewest joules a token within
its objective, one of 25, 50 and 100 ms: the least of which its fewest sequences need less
than FASTEST and its most more than SLOWEST. So that an overload breaks the promise and
does not only make a queue. A job is one of Zeus's measured (network, batch size) on one
GPU model, with a gang of 1 to 8, whose GPUs are alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.llm.data import own_trace, services
from bench.loop.demand import Course, course, requests
from bench.loop.engines import Engine, Engines
from bench.powercap.zeus import load as load_jobs
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    MaxSlowdown,
    PowerCurve,
    TrainingPromise,
)
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.loader import Catalogue, load_catalogue

__all__ = ["GPUS", "Failure", "Job", "Node", "Scene", "Service", "Size", "make"]

SLOWDOWN = 0.05
RACK_SHARE, CLUSTER_SHARE = 0.85, 0.75
OBJECTIVES_S = (0.025, 0.05, 0.1)  # borders of vLLM's histogram: between two of them nobody sees a promise broken
FASTEST, SLOWEST = 0.6, 1.25  # of the objective
QUANTILE = 0.95
STEP_S = 5.0
START_S = (30.0, 60.0)
_SLOW_SCATTER, _THIRST_SCATTER = 0.06, 0.03  # of the world about the profile, in logarithms
_DRIFTED = 1.12  # one service becomes so much slower in the middle of the day
_PEAK_REPLICAS = (2.5, 7.0)
_GANGS = ((1, 0.3), (2, 0.3), (4, 0.25), (8, 0.15))
GPUS = {"v100": "v100-pcie-16gb", "a40": "a40", "p100": "p100-pcie-16gb", "h100": "h100-sxm5-80gb"}
Floats = NDArray[np.float64]


class Size(NamedTuple):
    """How large a world is."""

    hours: float = 24.0
    services: int = 22
    jobs: int = 140
    racks: tuple[tuple[str, int, int, int], ...] = (
        ("h100", 4, 6, 8),
        ("v100", 2, 5, 8),
        ("a40", 2, 4, 8),
        ("p100", 1, 6, 4),
    )
    job_hours: tuple[float, float] = (1.5, 6.0)
    day_hours: float = 24.0  # in which services rise and fall
    rack_share: float = RACK_SHARE  # budget of a rack for training, of what its GPUs may have at their largest limits
    cluster_share: float = CLUSTER_SHARE  # of all training together
    profile_error: float = 0.0  # in logarithms: of each measured point that the planner is given


class Node(NamedTuple):
    """One machine."""

    name: str
    rack: str
    key: str  # of the catalogue
    gpus: int


class Service(NamedTuple):
    """One inference service: what is known of it, and what it is."""

    name: str
    points: tuple[Point, ...]  # of its shape, as measured
    objective_s: float
    gpus: int  # of a replica
    engine: Engine
    asked_hz: Floats  # (T,) output tokens a second
    least: int  # replicas, and most
    most: int
    starts: int  # at the beginning


class Job(NamedTuple):
    """One training job."""

    name: str
    curve: PowerCurve  # of one GPU; a unit of work is an epoch
    gpus: int
    parts: int  # nodes that it may be spread over: workers of gpus / parts
    arrives_s: float
    work: float
    promise: TrainingPromise

    @property
    def limits_w(self) -> tuple[float, ...]:
        """What may be set."""
        return self.curve.limits_w


class Failure(NamedTuple):
    """A node that is away from a moment on."""

    node: str
    at_s: float
    back_s: float


class Scene(NamedTuple):
    """All of one seed."""

    seed: int
    steps: int
    step_s: float
    nodes: tuple[Node, ...]
    services: tuple[Service, ...]
    jobs: tuple[Job, ...]
    failures: tuple[Failure, ...]
    drift: tuple[int, float, float]  # service, moment in s, slowness from then on
    catalogue: Catalogue
    rack_share: float = RACK_SHARE
    cluster_share: float = CLUSTER_SHARE

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.steps * self.step_s


def _shapes(points: Sequence[Point]) -> list[list[Point]]:
    found: dict[object, list[Point]] = {}
    for point in points:
        if point.configuration.gpu_model == GPUS["h100"] and point.configuration.gpus <= 2:
            found.setdefault(replace(point.configuration, batch=0), []).append(point)
    return [sorted(shape, key=lambda point: point.configuration.batch) for shape in found.values()]


def _suited(shape: Sequence[Point]) -> float | None:
    """The objective of a shape; None where none binds within what was measured."""
    for objective_s in OBJECTIVES_S:
        low, high = shape[0].latency_s[QUANTILE], shape[-1].latency_s[QUANTILE]
        within = [point for point in shape if point.latency_s[QUANTILE] <= objective_s]
        if len(shape) >= 4 and len(within) >= 2 and low <= FASTEST * objective_s and high >= SLOWEST * objective_s:
            return objective_s
    return None


def _offers(data: Path) -> list[tuple[str, str, float, list[Point]]]:
    """Services that can be offered: name, trace, objective, points of the shape of fewest joules a token."""
    found = []
    for service in services(data)[0]:
        best: tuple[float, float, list[Point]] | None = None
        for shape in _shapes(service.points):
            objective_s = _suited(shape)
            if objective_s is None:
                continue
            within = [point for point in shape if point.latency_s[QUANTILE] <= objective_s]
            joules = min((point.power_w or math.inf) / point.throughput_hz for point in within)
            if best is None or joules < best[0]:
                best = (joules, objective_s, shape)
        if best is not None:
            name = f"{service.task}-{service.model.rpartition('/')[2]}".lower().replace(".", "-")
            found.append((name, own_trace(service), best[1], best[2]))
    return found


def _misread(points: Sequence[Point], error: float, rng: np.random.Generator) -> tuple[Point, ...]:
    """The profile with every point off by its own, its tokens and its latencies apart."""
    off = np.exp(error * rng.standard_normal((len(points), 2)))
    return tuple(
        replace(
            point,
            throughput_hz=point.throughput_hz * float(tokens),
            latency_s={level: value_s * float(latency) for level, value_s in point.latency_s.items()},
        )
        for point, (tokens, latency) in zip(points, off, strict=True)
    )


def _enough(service: Service, steps: int) -> int:
    """The least constant replicas of a service without a violated window."""
    for replicas in range(1, service.most):
        engines = Engines([service.engine], STEP_S)
        tokens, within = 0.0, 0.0
        for step in range(steps):
            served = engines.step(service.asked_hz[step : step + 1], np.array([float(replicas)]))
            tokens, within = tokens + float(served.tokens[0]), within + float(served.within[0])
            if (step + 1) % 12 == 0:
                if within < QUANTILE * tokens:
                    break
                tokens = within = 0.0
        else:
            return replicas
    return service.most


def _services(data: Path, size: Size, steps: int, rng: np.random.Generator, idle_w: float) -> tuple[Service, ...]:
    offers = _offers(data)
    traces = {trace: requests(data, trace) for trace in {offer[1] for offer in offers}}
    # Those of code are few; the others in an order that is the same for all seeds.
    chosen = sorted(offers, key=lambda offer: (offer[1] != "code", offer[0]))[: size.services]
    made = []
    for name, trace, objective_s, shape in chosen:
        gpus = shape[0].configuration.gpus
        slowness, thirst = np.exp(rng.normal(0.0, (_SLOW_SCATTER, _THIRST_SCATTER)))
        tokens = traces[trace].mean_tokens
        engine = Engine(tuple(shape), objective_s, tokens, gpus * idle_w, float(slowness), float(thirst))
        capacity_hz = Engines([engine._replace(slowness=1.0)], STEP_S).largest_within(0)[1]
        replicas = rng.uniform(*_PEAK_REPLICAS) / gpus**0.5
        mean_hz = float(traces[trace].output_tokens.sum()) / traces[trace].seconds
        times = replicas * capacity_hz / mean_hz / 1.3  # the trace's own minutes rise that far above its mean
        begins, night_s = rng.uniform(0.0, 1.0), 150.0 * size.day_hours * rng.normal(4.0, 1.0)
        asked_hz = course(
            traces[trace],
            Course(times, begins, float(rng.uniform(0.25, 0.5)), night_s, 3600.0 * size.day_hours),
            steps,
            STEP_S,
            rng,
        )
        most = max(4, math.ceil(3.0 * replicas))
        service = Service(name, tuple(shape), objective_s, gpus, engine, asked_hz, 1, most, math.ceil(replicas))
        # Code comes in bursts, from nothing to the peak faster than a replica starts: its owner keeps enough for them.
        least = _enough(service, steps) if trace == "code" else 1
        made.append(service._replace(least=least, starts=max(least, service.starts)))
    return tuple(made)


def _with_profile_error(services: Sequence[Service], seed: int, error: float) -> tuple[Service, ...]:
    if error == 0.0:
        return tuple(services)
    rng = np.random.default_rng([seed, 20231117])
    return tuple(service._replace(points=_misread(service.points, error, rng)) for service in services)


def _promise(work: float, largest_s: float, rng: np.random.Generator) -> TrainingPromise:
    draw = rng.uniform()
    if draw < 0.5:
        return MaxSlowdown(SLOWDOWN)
    if draw < 0.75:
        return Deadline(work, work * largest_s * float(rng.uniform(1.1, 1.5)))
    return BestEffort(float(rng.choice((0.5, 0.75, 1.0))))


def _jobs(data: Path, size: Size, seconds: float, rng: np.random.Generator) -> tuple[Job, ...]:
    curves = load_jobs(data).curves
    pools = {kind: racks * nodes * gpus for kind, racks, nodes, gpus in size.racks if kind != "h100"}
    known = {
        kind: sorted(
            (key, curve) for key, curve in curves[kind].items() if len(curve.points) >= 6 and "movielens" not in key[0]
        )
        for kind in pools
    }
    shares = np.array(list(pools.values()), float)
    gangs, weights = zip(*_GANGS, strict=True)
    longest_s = 3600.0 * size.job_hours[1]
    made = []
    for number in range(size.jobs):
        kind = list(pools)[int(rng.choice(len(pools), p=shares / shares.sum()))]
        curve = known[kind][int(rng.integers(len(known[kind])))][1]
        gpus = int(rng.choice(gangs, p=weights))
        lasts_s = 3600.0 * math.exp(rng.uniform(*np.log(size.job_hours)))
        work = lasts_s / curve.largest.time_s
        arrives_s = float(rng.uniform(0.0, max(60.0, seconds - 2.0 * longest_s)))
        promise = _promise(work, curve.largest.time_s, rng)
        made.append(Job(f"job-{number}", curve, gpus, 2 if gpus == 8 else 1, arrives_s, work, promise))
    return tuple(sorted(made, key=lambda job: job.arrives_s))


def _nodes(size: Size) -> tuple[Node, ...]:
    return tuple(
        Node(f"{kind}-{rack}-{node}", f"rack-{kind}-{rack}", GPUS[kind], gpus)
        for kind, racks, nodes, gpus in size.racks
        for rack in range(racks)
        for node in range(nodes)
    )


def make(data: Path, seed: int, size: Size | None = None) -> Scene:
    """The world of a seed."""
    size = size or Size()
    catalogue = load_catalogue()
    rng = np.random.default_rng([seed, 20231116])
    steps = round(3600.0 * size.hours / STEP_S)
    seconds = steps * STEP_S
    nodes = _nodes(size)
    made = _services(data, size, steps, rng, catalogue.products[GPUS["h100"]].idle_w)
    jobs = _jobs(data, size, seconds, rng)
    failures = []
    for kinds, share in ((("h100",), 0.43), (("v100", "a40", "p100"), 0.3)):
        able = [node for node in nodes if node.name.startswith(kinds)]
        at_s = seconds * float(rng.uniform(share - 0.05, share + 0.05))
        failures.append(Failure(able[int(rng.integers(len(able)))].name, at_s, at_s + min(2700.0, seconds / 8.0)))
    drifting = int(rng.integers(len(made)))
    drift = (drifting, seconds * float(rng.uniform(0.3, 0.7)), made[drifting].engine.slowness * _DRIFTED)
    known = _with_profile_error(made, seed, size.profile_error)
    return Scene(
        seed, steps, STEP_S, nodes, known, jobs, tuple(failures), drift, catalogue, size.rack_share, size.cluster_share
    )
