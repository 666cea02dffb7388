"""What can serve what: each service's measured points that keep its objective, the efficient ones of each slice.

Owns the way from points to options and the error for a service that nothing can
serve. Must not know how many of an option are taken.

Theory: a point is admissible if its latency at the service's quantile was measured
and stays below the limit. Of one slice, what counts is throughput: the best
admissible batch and number of processes, all else is dominated. More than the
whole rate is no better, so that of all that suffice alone the one of least
latency stands. With watts as the objective a slice keeps every point that no
other beats in both.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eelgrid_controller.partition.problem import (
    InferenceDemand,
    InvalidProblem,
    PartitionObjective,
    PartitionPool,
    PartitionProblem,
    TrainingDemand,
    UnservableService,
)
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_kernels.arrays import Floats, Ints

WHOLE = ""  # the profile of a GPU without MIG
# What replicas run as now, by service.
HeldConfigurations = Mapping[str, frozenset[Configuration]]
NO_HELD_CONFIGURATIONS: HeldConfigurations = MappingProxyType({})


class PlacementCell(NamedTuple):
    """A kind of place: a profile on a model, or a whole GPU of it."""

    pool: int
    profile: str  # its key in the catalogue
    slices: int  # compute slices


class ReplicaOption(NamedTuple):
    """One way to run a replica of a service, or a training job."""

    demand: int  # services that have a rate, in order, then jobs
    cell: int
    width: int  # places of that kind
    throughput_hz: float  # 1 for a job, of which 1 is asked
    added_w: float  # beyond the watts of a GPU in use; 0 where watts do not count
    point: Point | None  # None for a job


class _Measured(NamedTuple):
    """The points of one workload at one quantile that lie in the pools; shapes (N,)."""

    points: tuple[Point, ...]
    cell: Ints
    width: Ints
    place: Ints  # one number for each cell and width
    throughput_hz: Floats
    latency_s: Floats
    added_w: Floats  # infinite where nobody measured them and they count


class _Cells:
    """The kinds of places that points name, numbered as they come."""

    def __init__(self, pools: Sequence[PartitionPool]) -> None:
        self._pools = pools
        self._index = {pool.model: number for number, pool in enumerate(pools)}
        self._known: dict[tuple[str, str], int | None] = {}
        self.cells: list[PlacementCell] = []

    def number(self, model: str, profile: str) -> int | None:
        """The cell's; None for a model that no pool has. Raises BadProblem for a profile that the model lacks."""
        if (model, profile) not in self._known:
            self._known[model, profile] = self._enter(model, profile)
        return self._known[model, profile]

    def pool(self, cell: int) -> PartitionPool:
        """The pool of a cell."""
        return self._pools[self.cells[cell].pool]

    def _enter(self, model: str, profile: str) -> int | None:
        number = self._index.get(model)
        if number is None:
            return None
        geometry = self._pools[number].geometry
        if profile == WHOLE:
            cell = PlacementCell(number, WHOLE, 1 if geometry is None else geometry.compute_slices)
        else:
            found = None if geometry is None else geometry.profile(profile)
            if found is None:
                known = "none" if geometry is None else ", ".join(one.name for one in geometry.profiles.values())
                raise InvalidProblem("points.mig_profile", f"{model} has no profile {profile}", f"it has {known}")
            cell = PlacementCell(number, found.key, found.compute_slices)
        if cell in self.cells:  # a profile may be named by its key, too
            return self.cells.index(cell)
        self.cells.append(cell)
        return len(self.cells) - 1


class KnownOptions(NamedTuple):
    """What was found of a problem, for one that differs in few services."""

    problem: PartitionProblem
    cells: tuple[PlacementCell, ...]
    options: Mapping[str, tuple[InferenceDemand, tuple[ReplicaOption, ...]]]  # by name


def remember_options(
    problem: PartitionProblem, cells: tuple[PlacementCell, ...], options: Sequence[ReplicaOption]
) -> KnownOptions:
    """The options by service."""
    served = [service for service in problem.services if service.rate_hz > 0.0]
    members: list[list[ReplicaOption]] = [[] for _ in served]
    for option in options:
        if option.demand < len(served):
            members[option.demand].append(option)
    found = {service.name: (service, tuple(mine)) for service, mine in zip(served, members, strict=True)}
    return KnownOptions(problem, cells, found)


def _holds(known: KnownOptions | None, problem: PartitionProblem) -> bool:
    """Whether options were found from the same points, for the same places."""
    if known is None or (known.problem.objective, known.problem.pools) != (problem.objective, problem.pools):
        return False
    before, now = known.problem.points, problem.points
    # To compare points takes longer than to look at them again, so these have to be the same objects.
    return before is now or (
        len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
    )


def enumerate_options(
    problem: PartitionProblem, held: HeldConfigurations = NO_HELD_CONFIGURATIONS, known: KnownOptions | None = None
) -> tuple[tuple[PlacementCell, ...], tuple[ReplicaOption, ...]]:
    """The cells that anything can use, and every demand's options; raises Unservable, BadProblem.

    A configuration that a service is held in stays an option while it is admissible, efficient or not. With what is
    known of a like problem only the services that changed are looked at.
    """
    cells = _Cells(problem.pools)
    before: Mapping[str, tuple[InferenceDemand, tuple[ReplicaOption, ...]]] = {}
    if known is not None and held is NO_HELD_CONFIGURATIONS and _holds(known, problem):
        cells.cells.extend(known.cells)
        before = known.options
    by_workload: dict[str, list[Point]] = {}
    for point in problem.points:
        by_workload.setdefault(point.workload, []).append(point)
    measured: dict[tuple[str, float], _Measured] = {}
    options: list[ReplicaOption] = []
    watts = problem.objective == PartitionObjective.WATTS
    served = [service for service in problem.services if service.rate_hz > 0.0]
    for demand, service in enumerate(served):
        same, mine = before.get(service.name, (None, ()))
        if same == service:
            options += mine if mine[0].demand == demand else (one._replace(demand=demand) for one in mine)
            continue
        key = service.workload, service.quantile
        if key not in measured:
            measured[key] = _measured_rows(by_workload.get(service.workload, ()), service.quantile, cells, watts=watts)
        kept = held.get(service.name, frozenset())
        found = list(_efficient(service, measured[key], demand, kept, watts=watts))
        if not found:
            raise _unservable(service, measured[key], by_workload, watts=watts)
        options += found
    for demand, job in enumerate(problem.jobs, len(served)):
        options += _job_options(job, demand, problem.pools, cells, watts=watts)
    return tuple(cells.cells), tuple(options)


def _measured_rows(points: Sequence[Point], quantile: float, cells: _Cells, *, watts: bool) -> _Measured:
    kept, rows = [], []
    for point in points:
        latency_s, how = point.latency_s.get(quantile), point.configuration
        cell = cells.number(how.gpu_model, how.mig_profile)
        if cell is None or latency_s is None or point.throughput_hz <= 0.0:
            continue
        if how.mig_profile != WHOLE and how.gpus != 1:
            field = f"points[{point.workload}].gpus"
            raise InvalidProblem(field, f"is {how.gpus} on {how.mig_profile}", "a process sees one slice: give 1")
        idle_w = (cells.pool(cell).held_w or 0.0) * how.gpus if how.mig_profile == WHOLE else 0.0
        added_w = 0.0 if not watts else np.inf if point.power_w is None else max(0.0, point.power_w - idle_w)
        kept.append(point)
        rows.append((cell, how.gpus, point.throughput_hz, latency_s, added_w))
    table = np.array(rows, np.float64).reshape(-1, 5).T
    cell, width = table[0].astype(np.int64), table[1].astype(np.int64)
    place = cell * (1 + int(width.max(initial=0))) + width
    return _Measured(tuple(kept), cell, width, place, *table[2:])


def _efficient(
    service: InferenceDemand, measured: _Measured, demand: int, held: frozenset[Configuration], *, watts: bool
) -> Iterator[ReplicaOption]:
    rows = np.flatnonzero((measured.latency_s < service.limit_s) & np.isfinite(measured.added_w))
    useful_hz = np.minimum(measured.throughput_hz[rows], service.rate_hz)
    order = np.lexsort((measured.latency_s[rows], measured.added_w[rows], -useful_hz, measured.place[rows]))
    rows = rows[order]
    new = np.ones(len(rows), np.bool_)  # the first of its place
    new[1:] = np.diff(measured.place[rows]) > 0
    least_w = np.inf
    if not watts and not held:
        rows, new = rows[new], new[new]
    for row, is_new in zip(rows.tolist(), new.tolist(), strict=True):
        # Of one place, by falling throughput: each that draws less than all before it.
        added_w = float(measured.added_w[row])
        if is_new or added_w < least_w or measured.points[row].configuration in held:
            least_w = min(added_w, np.inf if is_new else least_w)
            cell, width = int(measured.cell[row]), int(measured.width[row])
            yield ReplicaOption(demand, cell, width, float(measured.throughput_hz[row]), added_w, measured.points[row])


def _unservable(
    service: InferenceDemand, measured: _Measured, by_workload: Mapping[str, Sequence[Point]], *, watts: bool
) -> UnservableService:
    if not measured.points:
        known = by_workload.get(service.workload, ())
        if not known:
            return UnservableService(service.name, None, f"workload {service.workload} has no points", "measure it")
        models = ", ".join(sorted({point.configuration.gpu_model for point in known}))
        quantiles = ", ".join(f"{quantile:g}" for quantile in sorted({q for point in known for q in point.latency_s}))
        remedy = f"measured are quantiles {quantiles or 'none'} on {models}: ask for one of them, add such a pool"
        return UnservableService(
            service.name, None, f"no point has a latency at {service.quantile:g} in these pools", remedy
        )
    best = int(np.argmin(measured.latency_s))
    tightest_s, how = float(measured.latency_s[best]), measured.points[best].configuration
    if watts and tightest_s < service.limit_s:
        return UnservableService(
            service.name, tightest_s, "no admissible point has watts", "measure them, or plan for GPUs"
        )
    where = f"{how.gpu_model} {how.mig_profile or 'whole'}, batch {how.batch}, {how.processes} processes"
    return UnservableService(
        service.name,
        tightest_s,
        f"needs a latency below {1e3 * service.limit_s:.4g} ms ({service.safety:g} of the objective)",
        f"the least measured is {1e3 * tightest_s:.4g} ms on {where}: an objective above "
        f"{1e3 * tightest_s / service.safety:.4g} ms can be kept",
    )


def _job_options(
    job: TrainingDemand, demand: int, pools: Sequence[PartitionPool], cells: _Cells, *, watts: bool
) -> list[ReplicaOption]:
    found = []
    for pool in pools:
        if job.models and pool.model not in job.models:
            continue
        power_w = job.power_w.get(pool.model)
        if watts and power_w is None:
            raise InvalidProblem(f"jobs[{job.name}].power_w", f"lacks {pool.model}", "give it, or leave that model out")
        cell = cells.number(pool.model, WHOLE)
        assert cell is not None  # the pool is one of them
        added_w = 0.0 if not watts or power_w is None else max(0.0, power_w - (pool.held_w or 0.0) * job.gpus)
        found.append(ReplicaOption(demand, cell, job.gpus, 1.0, added_w, None))
    if not found:
        known = ", ".join(pool.model for pool in pools)
        raise InvalidProblem(f"jobs[{job.name}].models", f"are {', '.join(job.models)}", f"the pools have {known}")
    return found
