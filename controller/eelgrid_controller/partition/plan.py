"""Partition plans and running GPUs: instances with their replicas, the search for a plan, and what a GPU could become.

`plan_partition` solves small problems exactly and large ones by column generation; a plan carries its proofs.
`enumerate_targets` lists what one running GPU could become; repartition.py chooses among the targets of a fleet.

A target keeps some of the instances that exist and creates new ones in the room that is left. Only what overlaps a new
instance goes, and no instance is created where one of its kind exists: that one is used again. So a target is a legal
layout of new instances, and it costs what lies under it. Of two targets with the same new instances, the one that
destroys more is never better. Instances that are not the planner's to change are in every target.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.partition.column_generation import WarmStart, solve_fleet
from eelgrid_controller.partition.geometry import Layout, Multiset, Tiling, memory_slice_mask
from eelgrid_controller.partition.integer_program import (
    NODES_MOST,
    IntegerProgram,
    OptimalityProof,
    ProgramSolution,
    build_program,
    solve_exact,
)
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.problem import PartitionProblem
from eelgrid_controller.profiles.points import Configuration
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import GpuLayout, WantedInstance

PROVEN_GAP = 1e-6  # a gap that is the rounding of watts


class PartitionReplica(NamedTuple):
    """One replica of a service as one of its points measured it, or a training job (no configuration)."""

    owner: str
    number: int
    throughput_hz: float
    added_w: float
    configuration: Configuration | None


class PlannedInstance(NamedTuple):
    """A MIG instance with what runs in it."""

    profile: str  # its key in the catalogue
    start: int
    replica: PartitionReplica


class PlannedGpu(NamedTuple):
    """One GPU in use: cut into instances, or whole for one replica, which may have several GPUs."""

    model: str
    instances: tuple[PlannedInstance, ...] = ()
    whole: PartitionReplica | None = None

    def replicas(self) -> Iterator[PartitionReplica]:
        """What runs on it."""
        yield from (instance.replica for instance in self.instances)
        if self.whole is not None:
            yield self.whole


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """Every GPU in use, and proofs: of the first objective, then of the second at the first's value."""

    gpus: tuple[PlannedGpu, ...]
    proofs: tuple[OptimalityProof, ...]
    memory: WarmStart | None = None  # of a fleet's plan: what the next one starts from

    @property
    def proven(self) -> bool:
        """Whether no plan has less of the first objective."""
        return self.proofs[0].gap <= PROVEN_GAP


def build_plan(programme: IntegerProgram, solution: ProgramSolution, memory: WarmStart | None = None) -> PartitionPlan:
    """The counts of a solution as GPUs with places.

    GPUs of one pattern are alike. Replicas are dealt in the order of their numbers, so that those of one service are
    spread over GPUs.
    """
    waiting = _waiting(programme, solution)
    gpus: list[PlannedGpu] = []
    drawings: dict[tuple[int, tuple[int, ...]], Layout] = {}
    for pattern, count in enumerate(solution.gpus):
        pool = int(programme.pool[pattern])
        model, plan = programme.problem.pools[pool].model, programme.tilings[pool]
        cells = [(cell, int(places)) for cell, places in enumerate(programme.patterns[pattern]) if places]
        if any(programme.cells[cell].profile == WHOLE for cell, _ in cells):
            gpus += (PlannedGpu(model, whole=replica) for replica in _pop_replicas(waiting[cells[0][0]], int(count)))
            continue
        assert plan is not None  # a pattern of slices comes from a tiling
        for _ in range(count):
            held = {programme.cells[cell].profile: _pop_replicas(waiting[cell], places) for cell, places in cells}
            counts = tuple(len(held.get(key, ())) for key in plan.keys)
            if (pool, counts) not in drawings:
                drawings[pool, counts] = plan.choose_layout(counts)
            if any(counts):
                gpus.append(_cut(model, drawings[pool, counts], held))
    assert not any(waiting)  # places suffice: a row of the programme
    return PartitionPlan(tuple(gpus), solution.proofs, memory)


def _waiting(programme: IntegerProgram, solution: ProgramSolution) -> list[list[PartitionReplica]]:
    """Replicas by cell, the last to be dealt first; a replica of several GPUs stands once for each."""
    problem = programme.problem
    owners = [service.name for service in problem.services if service.rate_hz > 0.0]
    owners += [job.name for job in problem.jobs]
    numbers = [0] * len(owners)
    found: list[list[tuple[int, int, PartitionReplica]]] = [[] for _ in programme.cells]
    for index in solution.replicas.nonzero()[0]:
        option = programme.options[index]
        how = None if option.point is None else option.point.configuration
        for _ in range(int(solution.replicas[index])):
            number = numbers[option.demand]
            numbers[option.demand] += 1
            replica = PartitionReplica(owners[option.demand], number, option.throughput_hz, option.added_w, how)
            found[option.cell] += [(number, option.demand, replica)] * option.width
    return [
        [replica for _, _, replica in sorted(members, key=lambda item: item[:2], reverse=True)] for members in found
    ]


def _pop_replicas(waiting: list[PartitionReplica], count: int) -> list[PartitionReplica]:
    """The next so many, or as many as there are."""
    return [waiting.pop() for _ in range(min(count, len(waiting)))]


def _cut(model: str, layout: Layout, held: dict[str, list[PartitionReplica]]) -> PlannedGpu:
    given = {key: iter(replicas) for key, replicas in held.items()}
    return PlannedGpu(model, tuple(PlannedInstance(profile, start, next(given[profile])) for profile, start in layout))


# Up to here the whole programme is solved at once: 40 services on one model, or twelve on any number of models.
EXACT_OPTIONS_MOST, EXACT_DEMANDS_MOST = 200, 12


def plan_partition(
    problem: PartitionProblem, memory: WarmStart | None = None, nodes_most: int = NODES_MOST
) -> PartitionPlan:
    """The least plan, with its bound; raises UnservableService, FleetTooSmall, SearchExhausted, InvalidProblem.

    The memory is that of a plan for a like problem (`Plan.memory`): a fleet's search starts from it.
    """
    programme = build_program(problem, known=None if memory is None else memory.known)
    if len(programme.options) > EXACT_OPTIONS_MOST and len(programme.rate_hz) > EXACT_DEMANDS_MOST:
        return build_plan(programme, *solve_fleet(programme, memory))
    solution = solve_exact(programme, nodes_most)
    if solution.proofs[0].gap > PROVEN_GAP:
        solution = _better(solution, solve_fleet(programme)[0])
    return build_plan(programme, solution)


def _better(one: ProgramSolution, other: ProgramSolution) -> ProgramSolution:
    """Of two solutions of a programme the one with less, under the higher bound of the two."""
    best = min(one, other, key=lambda solution: solution.proofs[0].value)
    first = best.proofs[0]._replace(bound=max(one.proofs[0].bound, other.proofs[0].bound))
    return best._replace(proofs=(first, *best.proofs[1:]))


class RunningInstance(NamedTuple):
    """An instance that stands; `pinned`: somebody else's, or in use by what this plan does not know."""

    profile: str  # its key in the catalogue
    start: int
    replica: PartitionReplica | None = None
    pinned: bool = False
    compute_slices: tuple[int, ...] = ()  # of its compute instances; none for one over all of it


class RunningGpu(NamedTuple):
    """One GPU; `held`: somebody else has it whole."""

    uuid: str
    node: str
    model: str
    mig_enabled: bool = False
    instances: tuple[RunningInstance, ...] = ()
    whole: PartitionReplica | None = None
    held: bool = False

    def replicas(self) -> Iterator[PartitionReplica]:
        """What of ours runs on it."""
        yield from (instance.replica for instance in self.instances if instance.replica is not None)
        if self.whole is not None:
            yield self.whole

    @property
    def pinned(self) -> bool:
        """Whether something on it is not ours to touch."""
        return self.held or True in [instance.pinned for instance in self.instances]


class GpuTarget(NamedTuple):
    """What one GPU could become: positions of instances that go, places that are made."""

    destroyed: tuple[int, ...]
    made: Layout  # a whole GPU is (WHOLE, 0)
    mode: bool = False  # whether MIG mode changes
    used: bool = True  # False: left as it stands, without replicas


def layout_message(gpu: RunningGpu, geometry: MigGeometry) -> GpuLayout:
    """The message that asks an agent for what stands here, in the driver's names; pinned instances are in it."""
    wanted = tuple(
        WantedInstance(profile=geometry.profiles[one.profile].name, start=one.start, compute_slices=one.compute_slices)
        for one in gpu.instances
    )
    return GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=gpu.mig_enabled, instances=wanted)


def enumerate_targets(
    gpu: RunningGpu, geometry: MigGeometry | None, plan: Tiling | None, *, whole: bool
) -> tuple[GpuTarget, ...]:
    """Everything worthwhile that a GPU could become; the first two leave it as it is, without and with replicas."""
    found = [GpuTarget((), (), used=False), GpuTarget((), ())]
    if gpu.held:
        return tuple(found[:1])
    if whole and gpu.whole is None and not gpu.pinned:
        found.append(GpuTarget(tuple(range(len(gpu.instances))), ((WHOLE, 0),), mode=gpu.mig_enabled))
    if geometry is None or plan is None:
        return tuple(found)
    spans = [memory_slice_mask(geometry, one.profile, one.start) for one in gpu.instances]
    fixed = sum(mask for mask, one in zip(spans, gpu.instances, strict=True) if one.pinned)
    standing = {(one.profile, one.start) for one in gpu.instances}
    # Two instances of a profile with like replicas are one to the plan.
    alike = [(one.profile, _alike(one)) for one in gpu.instances]
    by_counts: dict[Multiset, dict[tuple[object, ...], GpuTarget | None]] = {}
    for counts, layouts in plan.places.items():
        here = by_counts.setdefault(counts, {})
        for made in layouts:
            mask = plan.slices[made]
            if not made or mask & fixed or any(part in standing for part in made):
                continue
            destroyed = tuple(number for number, other in enumerate(spans) if mask & other)
            kind = tuple(sorted(alike[number] for number in destroyed))
            if kind not in here:
                stands = _stands(gpu, geometry, made, destroyed)
                here[kind] = GpuTarget(destroyed, made, mode=not gpu.mig_enabled) if stands else None
    for kinds in by_counts.values():
        members = [target for target in kinds.values() if target is not None]
        sets = [frozenset(target.destroyed) for target in members]
        found += (one for one, mine in zip(members, sets, strict=True) if not any(other < mine for other in sets))
    return tuple(found)


def _alike(standing: RunningInstance) -> str:
    replica = standing.replica
    return "" if replica is None else f"{replica.owner} {replica.configuration!r}"


def _stands(gpu: RunningGpu, geometry: MigGeometry, made: Layout, destroyed: tuple[int, ...]) -> bool:
    """Whether a layout can stand beside what stays, which takes compute slices, too."""
    kept = [(one.profile, one.start) for number, one in enumerate(gpu.instances) if number not in destroyed]
    return geometry.conflict([(geometry.profiles[key], start) for key, start in (*kept, *made)]) is None
