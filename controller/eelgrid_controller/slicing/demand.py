"""What a replica can carry within its service's objective: the planner's points, through the queueing model.

Owns the way from a promise and measured points to services and points of a partition
problem. Must not know GPUs that are there.

Theory: a measured throughput is that of a replica that always has work, and its latency
holds no waiting. A service of random arrivals on it would wait without bound. So of each
point the planner is told the largest rate at which the quantile of the response, waiting
and the model's error included, keeps the objective (eelgrid_controller.serving.sizing);
each replica has a queue of its own, and requests are dealt by these rates. The points
become the service's own. A point that keeps the objective at no rate stays in, too slow,
so that the error can name the tightest objective that could be kept.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from eelgrid_controller.partition.problem import Problem, Service
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.serving.queueing import latency
from eelgrid_controller.serving.sizing import Objective, largest_rate_hz
from eelgrid_controller.serving.stations import Arrivals, station_of
from eelgrid_controller.slicing.survey import Survey
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.messages import ServicePromise

__all__ = ["RATE_LEAST_HZ", "points_of", "problem_of"]

# A service that is asked for nothing yet has a replica all the same.
RATE_LEAST_HZ = 1e-6


def problem_of(found: Survey, without: Collection[str] = ()) -> Problem:
    """The partition problem of a moment, without some of its services; raises BadProblem, Unusable."""
    memory: dict[tuple[object, ...], tuple[Point, ...]] = {}
    held: dict[str, set[Configuration]] = {}
    for replica in (one for seat in found.seats for one in seat.running.replicas()):
        if replica.configuration is not None:
            held.setdefault(replica.owner, set()).add(replica.configuration)
    services, points = [], list[Point]()
    for asked in found.services:
        key, promise = asked.workload.workload_id, asked.promise
        if key in without:
            continue
        (objective,) = promise.objectives
        rate_hz = max(RATE_LEAST_HZ, promise.rate_hz)
        services.append(
            Service(name=key, workload=key, rate_hz=rate_hz, latency_s=objective.latency_s, quantile=objective.quantile)
        )
        # Many services share a profile and an objective, and to ask the queueing model takes a tenth of a second.
        stays = frozenset(held.get(key, ()))
        same = promise.profile, promise.objectives, promise.arrival_cv2, asked.workload.spec.request.gpu_models, stays
        if same not in memory:
            memory[same] = points_of(_spelled(asked.points, found.geometries), promise, stays)
        points += (replace(point, workload=key) for point in memory[same])
    return Problem(services=tuple(services), points=tuple(points), pools=found.pools)


def _spelled(points: Iterable[Point], geometries: Mapping[str, MigGeometry | None]) -> Iterator[Point]:
    """Points on models that are there, profiles by their keys; one that a model lacks is left for the planner to tell."""
    for point in points:
        how = point.configuration
        geometry = geometries.get(how.gpu_model)
        if geometry is None:
            continue
        profile = geometry.profile(how.mig_profile) if how.mig_profile else None
        yield point if profile is None else replace(point, configuration=replace(how, mig_profile=profile.key))


def points_of(
    points: Iterable[Point], promise: ServicePromise, held: Collection[Configuration] = ()
) -> tuple[Point, ...]:
    """Points at the largest rate that keeps the promise: of each place the best, and what replicas run as now.

    No rate exceeds the measured throughput, so of each place the points are tried by falling throughput, until the
    next could not be better.
    """
    (asked,) = promise.objectives
    objective = Objective(asked.quantile, asked.latency_s)
    best_hz: dict[tuple[str, str], float] = {}
    found = []
    for point in sorted(points, key=lambda one: -one.throughput_hz):
        how = point.configuration
        place = how.gpu_model, how.mig_profile
        if point.throughput_hz <= 0.0 or (point.throughput_hz <= best_hz.get(place, 0.0) and how not in held):
            continue
        station = station_of(point)
        idle_s = latency(station, Arrivals(0.0, promise.arrival_cv2), asked.quantile).upper_s
        rate_hz = largest_rate_hz(station, objective, cv2=promise.arrival_cv2) if idle_s < asked.latency_s else 0.0
        if rate_hz > 0.0:
            best_hz[place] = max(rate_hz, best_hz.get(place, 0.0))
            found.append(replace(point, throughput_hz=rate_hz, latency_s={asked.quantile: idle_s}))
        else:
            # Too slow even idle: by how much is told, and it is never chosen.
            found.append(replace(point, latency_s={asked.quantile: max(idle_s, asked.latency_s)}))
    return tuple(found)
