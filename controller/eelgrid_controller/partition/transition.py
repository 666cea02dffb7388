"""Decides what each running GPU becomes, and in which order of steps the fleet gets there.

`decide_transition` solves the integer program of a change, whose rows are in the docstring of repartition.py, over
classes of GPUs that are in the same state. `order_steps` turns the state before and after into steps, GPU by GPU, and
reports how low each service falls on the way. A step is a value; the agents make the driver's calls, from the layout
that a GPU has after its steps.

On one GPU a replica is drained before its instance is destroyed, everything that goes is destroyed before anything is
created (MIG mode is set in between, on an empty GPU), and a replica starts once its instance exists. Across GPUs, steps
that drain nothing come first, since they only add; then one GPU at a time: the first whose draining leaves every service
at its rate, or if there is none, the one that leaves the worst service highest. What cannot be kept is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eelgrid_controller.partition.change_program import TargetColumns, TransitionCosts, solve_change
from eelgrid_controller.partition.integer_program import (
    IntegerProgram,
    ObjectiveWeights,
    minimize_objective,
    objective_weights,
)
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.plan import (
    GpuTarget,
    PartitionReplica,
    RunningGpu,
    RunningInstance,
    enumerate_targets,
)
from eelgrid_kernels.arrays import Ints
from eelgrid_protos.catalogue.products import MigGeometry

LEAST_NODES_MOST = 500


class GpuClass(NamedTuple):
    """GPUs that stand alike and could become the same."""

    members: tuple[int, ...]  # positions among the GPUs
    runs: tuple[int, ...]  # option of what runs in each instance; -1 for nothing that may stay
    whole: int  # likewise on the whole GPU
    targets: tuple[GpuTarget, ...]


class Transition(NamedTuple):
    """Targets of GPUs by position; replicas of each option that run afterwards, and of these, those that stay."""

    targets: Mapping[int, GpuTarget]
    replicas: Ints  # (O,)
    held: Ints  # (O,)
    value: float = 0.0  # what the change and its GPUs cost over the horizon
    bound: float = 0.0  # what no change costs less than


def classify_gpus(programme: IntegerProgram, gpus: Sequence[RunningGpu], chosen: Sequence[int]) -> tuple[GpuClass, ...]:
    """The chosen GPUs by class, with their targets."""
    pools = {pool.model: number for number, pool in enumerate(programme.problem.pools)}
    wholes = {cell.pool for cell in programme.cells if cell.profile == WHOLE}
    option_of = _Running(programme)
    members: dict[tuple[object, ...], list[int]] = {}
    seen: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}
    for position in chosen:
        gpu = gpus[position]
        pool = pools[gpu.model]
        runs = tuple(option_of(pool, one.profile, one.replica) for one in gpu.instances)
        whole = option_of(pool, WHOLE, gpu.whole)
        places = tuple((one.profile, one.start, one.pinned) for one in gpu.instances)
        key: tuple[object, ...] = gpu.model, gpu.mig_enabled, places, runs, whole, gpu.whole is None
        members.setdefault(key, []).append(position)
        seen[key] = runs, whole
    found = []
    for which, positions in members.items():
        gpu = gpus[positions[0]]
        pool = pools[gpu.model]
        geometry = programme.problem.pools[pool].geometry
        options = enumerate_targets(gpu, geometry, programme.tilings[pool], whole=pool in wholes)
        found.append(GpuClass(tuple(positions), *seen[which], options))
    return tuple(found)


class _Running:
    """From a running replica to its option."""

    def __init__(self, programme: IntegerProgram) -> None:
        names = [service.name for service in programme.problem.services if service.rate_hz > 0.0]
        self._cells = {(cell.pool, cell.profile): number for number, cell in enumerate(programme.cells)}
        self._options = {
            (names[option.demand], option.cell, option.point.configuration): number
            for number, option in enumerate(programme.options)
            if option.point is not None
        }

    def __call__(self, pool: int, profile: str, replica: PartitionReplica | None) -> int:
        """The option, or -1 where the replica may not stay."""
        cell = self._cells.get((pool, profile))
        if cell is None or replica is None or replica.configuration is None:
            return -1
        return self._options.get((replica.owner, cell, replica.configuration), -1)


def _columns(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], costs: TransitionCosts
) -> tuple[TargetColumns, tuple[GpuTarget, ...]]:
    first, _ = objective_weights(programme)
    gpu_cost = {int(pool): float(first.pattern[at]) for at, pool in enumerate(programme.pool)}
    pools = {pool.model: number for number, pool in enumerate(programme.problem.pools)}
    cells = {(cell.pool, cell.profile): number for number, cell in enumerate(programme.cells)}
    numbers, chosen = [], []
    for number, kind in enumerate(found):
        for target in kind.targets:
            numbers.append(number)
            chosen.append(target)
    places, kept = np.zeros((len(chosen), len(programme.cells))), np.zeros((len(chosen), len(programme.cells)))
    runs, used, change = np.zeros((len(chosen), len(programme.options))), np.zeros(len(chosen)), np.zeros(len(chosen))
    for row, (number, target) in enumerate(zip(numbers, chosen, strict=True)):
        gpu = gpus[found[number].members[0]]
        pool = pools[gpu.model]
        if not target.used:
            continue
        change[row] = len(target.destroyed) * costs.destroy + target.mode * costs.mode
        used[row] = 0.0 if gpu.pinned else gpu_cost.get(pool, 0.0)
        for profile, option in _stays(gpu, found[number], target):
            cell = cells.get((pool, profile))
            if cell is not None:
                kept[row, cell] += 1
                runs[row, option] += option >= 0
        for profile, _ in target.made:
            places[row, cells[pool, profile]] += 1
    sizes = np.array([len(kind.members) for kind in found], np.float64)
    columns = TargetColumns(sizes, np.array(numbers, np.int64), places + kept, kept, runs, used, change)
    return columns, tuple(chosen)


def _stays(gpu: RunningGpu, kind: GpuClass, target: GpuTarget) -> Iterator[tuple[str, int]]:
    """Profile and option of every place of a GPU that a target keeps for us."""
    for number, one in enumerate(gpu.instances):
        if number not in target.destroyed and not one.pinned:
            yield one.profile, kind.runs[number]
    if gpu.whole is not None and not target.made:
        yield WHOLE, kind.whole


def decide_transition(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], costs: TransitionCosts
) -> Transition:
    """The change of least cost; raises FleetTooSmall, SearchExhausted."""
    if not programme.options:  # nobody asks for anything
        idle = {position: kind.targets[0] for kind in found for position in kind.members}
        return Transition(idle, np.zeros(0, np.int64), np.zeros(0, np.int64))
    columns, targets = _columns(programme, gpus, found, costs)
    decided = solve_change(programme, columns, costs, lambda: _bound(programme, gpus, found, columns))
    chosen: dict[int, GpuTarget] = {}
    left = {number: iter(kind.members) for number, kind in enumerate(found)}
    for row in decided.taken.nonzero()[0]:
        for _ in range(int(decided.taken[row])):
            chosen[next(left[int(columns.kind[row])])] = targets[row]
    return Transition(chosen, decided.replicas, decided.held, decided.value, decided.bound)


def _bound(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], columns: TargetColumns
) -> float:
    """The least of the first objective on these GPUs whatever the change costs; raises FleetTooSmall.

    Without it the search cannot tell that no fewer GPUs would do, and never ends. GPUs that nobody else is on can
    become anything; those that others are on are pools of their own with the patterns that are left, at no cost.
    """
    first, _ = objective_weights(programme)
    pools = list(programme.problem.pools)
    free = dict.fromkeys((pool.model for pool in pools), 0)
    patterns, numbers = [*programme.patterns], [*programme.pool]
    weights = [*first.pattern]
    for number, kind in enumerate(found):
        gpu = gpus[kind.members[0]]
        if not gpu.pinned:
            free[gpu.model] += len(kind.members)
            continue
        pool = next(pool for pool in pools if pool.model == gpu.model)
        pools.append(replace(pool, model=f"{gpu.model} beside others ({number})", count=len(kind.members)))
        left = np.unique(columns.places[columns.kind == number], axis=0)
        patterns += [row.astype(np.int64) for row in left]
        numbers += [len(pools) - 1] * len(left)
        weights += [0.0] * len(left)
    limited = tuple(replace(pool, count=free.get(pool.model, pool.count)) for pool in pools)
    wider = programme._replace(
        problem=replace(programme.problem, pools=limited),
        patterns=np.array(patterns, np.int64).reshape(len(patterns), len(programme.cells)),
        pool=np.array(numbers, np.int64),
    )
    return minimize_objective(
        wider, ObjectiveWeights(first.name, first.option, np.array(weights)), (), LEAST_NODES_MOST
    )[1]


def apply_transition(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], decision: Transition
) -> dict[int, RunningGpu]:
    """The GPUs as they stand afterwards, by position."""
    return _Making(programme, gpus, found, decision).gpus


class _Making:
    """Hands the decided replicas out to places: those that stay, then free ones that stand, then new ones."""

    def __init__(
        self, programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], decision: Transition
    ) -> None:
        self._programme = programme
        self._pools = {pool.model: number for number, pool in enumerate(programme.problem.pools)}
        self._names = [service.name for service in programme.problem.services if service.rate_hz > 0.0]
        self._names += [job.name for job in programme.problem.jobs]
        self._numbers: dict[str, int] = {}
        for gpu in gpus:
            for replica in gpu.replicas():
                self._numbers[replica.owner] = max(self._numbers.get(replica.owner, -1), replica.number)
        new = [self._new(decision, option) for option in range(len(programme.options))]
        self._waiting: list[list[PartitionReplica]] = [[] for _ in programme.cells]
        for option, replicas in enumerate(new):
            self._waiting[programme.cell[option]] += [
                replica for replica in replicas for _ in range(programme.width[option])
            ]
        for waiting in self._waiting:
            waiting.reverse()
        kind_of = {position: kind for kind in found for position in kind.members}
        held = decision.held.copy()
        self.gpus: dict[int, RunningGpu] = {}
        for position, target in sorted(decision.targets.items()):
            self.gpus[position] = self._kept(gpus[position], kind_of[position], target, held)
        used = [(position, target) for position, target in sorted(decision.targets.items()) if target.used]
        # Places that stand are all filled before any is made.
        for position, target in used:
            whole = gpus[position].whole is not None and not target.made
            self.gpus[position] = self._fill_gpu(self.gpus[position], whole=whole)
        for position, target in used:
            self.gpus[position] = self._cut(self.gpus[position], target)
        assert not any(self._waiting)  # places suffice: a row of the programme

    def _new(self, decision: Transition, option: int) -> list[PartitionReplica]:
        found = []
        what = self._programme.options[option]
        for _ in range(int(decision.replicas[option] - decision.held[option])):
            owner = self._names[what.demand]
            self._numbers[owner] = self._numbers.get(owner, -1) + 1
            how = None if what.point is None else what.point.configuration
            found.append(PartitionReplica(owner, self._numbers[owner], what.throughput_hz, what.added_w, how))
        return found

    def _kept(self, gpu: RunningGpu, kind: GpuClass, target: GpuTarget, held: Ints) -> RunningGpu:
        """What stays of a GPU, with the replicas that stay."""

        def stays(option: int) -> bool:
            if not target.used or option < 0 or held[option] == 0:
                return False
            held[option] -= 1
            return True

        standing = []
        for number, one in enumerate(gpu.instances):
            if number in target.destroyed:
                continue
            kept = one.pinned or stays(kind.runs[number])
            standing.append(one if kept else one._replace(replica=None))
        whole = gpu.whole if gpu.whole is not None and not target.made and stays(kind.whole) else None
        return gpu._replace(instances=tuple(standing), whole=whole)

    def _fill_gpu(self, gpu: RunningGpu, *, whole: bool) -> RunningGpu:
        pool = self._pools[gpu.model]
        standing = tuple(
            one if one.pinned or one.replica is not None else one._replace(replica=self._next(pool, one.profile))
            for one in gpu.instances
        )
        return gpu._replace(
            instances=standing, whole=self._next(pool, WHOLE) if whole and gpu.whole is None else gpu.whole
        )

    def _cut(self, gpu: RunningGpu, target: GpuTarget) -> RunningGpu:
        pool = self._pools[gpu.model]
        if target.made == ((WHOLE, 0),):
            whole = self._next(pool, WHOLE)
            return gpu if whole is None else gpu._replace(mig_enabled=False, whole=whole)
        parts = ((profile, start, self._next(pool, profile)) for profile, start in target.made)
        fresh = [RunningInstance(profile, start, replica) for profile, start, replica in parts if replica is not None]
        if not fresh:
            return gpu
        standing = tuple(sorted((*gpu.instances, *fresh), key=lambda one: one.start))
        return gpu._replace(mig_enabled=True, instances=standing)

    def _next(self, pool: int, profile: str) -> PartitionReplica | None:
        for number, cell in enumerate(self._programme.cells):
            if (cell.pool, cell.profile) == (pool, profile) and self._waiting[number]:
                return self._waiting[number].pop()
        return None


class DrainStep(NamedTuple):
    """No new requests to a replica; it ends when it has answered the last."""

    uuid: str
    start: int  # of its instance; 0 on a whole GPU
    replica: PartitionReplica


class DestroyStep(NamedTuple):
    """An empty instance goes."""

    uuid: str
    profile: str
    start: int


class SetModeStep(NamedTuple):
    """MIG on or off, on an empty GPU."""

    uuid: str
    enabled: bool


class CreateStep(NamedTuple):
    """An instance is made at exactly this place."""

    uuid: str
    profile: str
    start: int


class StartStep(NamedTuple):
    """A replica starts in the instance that begins there; on the whole GPU where MIG is off."""

    uuid: str
    start: int
    replica: PartitionReplica


PartitionStep = DrainStep | DestroyStep | SetModeStep | CreateStep | StartStep
_ROUNDING = 1e-9


class StepSequence(NamedTuple):
    """Steps in order; `lowest`: of services that fall below their rate on the way, the least share of it served."""

    steps: tuple[PartitionStep, ...]
    lowest: Mapping[str, float]


def order_steps(
    before: Sequence[RunningGpu],
    after: Sequence[RunningGpu],
    geometries: Mapping[str, MigGeometry | None],
    rate_hz: Mapping[str, float],
) -> StepSequence:
    """The steps from one state of GPUs to another, the same GPUs in the same order; geometries by model."""
    adding: list[tuple[PartitionStep, ...]] = []
    turning: list[tuple[PartitionStep, ...]] = []
    for old, new in zip(before, after, strict=True):
        if old != new:
            first, second = _halves(old, new, geometries[old.model])
            adding += [first] if first else []
            turning += [second] if second else []
    served: dict[str, float] = {}
    for gpu in before:
        for replica in gpu.replicas():
            served[replica.owner] = served.get(replica.owner, 0.0) + replica.throughput_hz
    steps: list[PartitionStep] = []
    lowest: dict[str, float] = {}
    while adding or turning:
        if adding:
            chosen = adding.pop(0)
        else:
            worst = [min((share for _, share in _drained(part, served, rate_hz)), default=1.0) for part in turning]
            # The first of those that hurt least.
            chosen = turning.pop(max(range(len(turning)), key=lambda number: (min(1.0, worst[number]), -number)))
        for owner, share in _drained(chosen, served, rate_hz):
            if share < 1.0 - _ROUNDING:
                lowest[owner] = min(lowest.get(owner, 1.0), share)
        for step in chosen:
            if isinstance(step, DrainStep | StartStep):
                gained_hz = step.replica.throughput_hz if isinstance(step, StartStep) else -step.replica.throughput_hz
                served[step.replica.owner] = served.get(step.replica.owner, 0.0) + gained_hz
        steps += chosen
    return StepSequence(tuple(steps), lowest)


def apply_steps(
    gpus: Sequence[RunningGpu], steps: Sequence[PartitionStep]
) -> Iterator[tuple[PartitionStep, RunningGpu]]:
    """Each step with its GPU as it stands afterwards; what agents are asked for is made of these."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for step in steps:
        by_uuid[step.uuid] = _after(by_uuid[step.uuid], step)
        yield step, by_uuid[step.uuid]


def _drained(
    part: Sequence[PartitionStep], served: Mapping[str, float], rate_hz: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Share of its rate that each service keeps once all these drains are done."""
    left: dict[str, float] = {}
    for step in part:
        if isinstance(step, DrainStep):
            owner = step.replica.owner
            left[owner] = left.get(owner, served.get(owner, 0.0)) - step.replica.throughput_hz
    for owner, left_hz in left.items():
        asked_hz = rate_hz.get(owner, 0.0)
        yield owner, max(0.0, left_hz / asked_hz) if asked_hz > 0.0 else 1.0


def _after(gpu: RunningGpu, step: PartitionStep) -> RunningGpu:
    match step:
        case SetModeStep(enabled=enabled):
            return gpu._replace(mig_enabled=enabled)
        case CreateStep(profile=profile, start=start):
            made = (*gpu.instances, RunningInstance(profile, start))
            return gpu._replace(instances=tuple(sorted(made, key=lambda one: one.start)))
        case DestroyStep(start=start):
            return gpu._replace(instances=tuple(one for one in gpu.instances if one.start != start))
    replica = step.replica if isinstance(step, StartStep) else None
    if not gpu.mig_enabled:
        return gpu._replace(whole=replica)
    return gpu._replace(
        instances=tuple(one._replace(replica=replica) if one.start == step.start else one for one in gpu.instances)
    )


def _halves(
    old: RunningGpu, new: RunningGpu, geometry: MigGeometry | None
) -> tuple[tuple[PartitionStep, ...], tuple[PartitionStep, ...]]:
    """The steps of one GPU that need no draining, and the rest; all are of the first kind if none drains."""
    was = {(one.profile, one.start): one for one in old.instances}
    shall = {(one.profile, one.start): one for one in new.instances}
    uuid = old.uuid
    drains = [
        DrainStep(uuid, start, one.replica)
        for (profile, start), one in was.items()
        if one.replica is not None and ((profile, start) not in shall or shall[profile, start].replica != one.replica)
    ]
    drains += [DrainStep(uuid, 0, old.whole)] if old.whole is not None and old.whole != new.whole else []
    destroys = [DestroyStep(uuid, *place) for place in was if place not in shall]
    modes = [SetModeStep(uuid, new.mig_enabled)] if old.mig_enabled != new.mig_enabled else []
    creates = [CreateStep(uuid, *place) for place in shall if place not in was]
    starts = [
        StartStep(uuid, start, one.replica)
        for (profile, start), one in shall.items()
        if one.replica is not None and ((profile, start) not in was or was[profile, start].replica != one.replica)
    ]
    starts += [StartStep(uuid, 0, new.whole)] if new.whole is not None and old.whole != new.whole else []
    if not drains:
        return (*destroys, *modes, *creates, *starts), ()
    early: list[CreateStep] = []
    if geometry is not None and not modes:
        standing = [(geometry.profiles[one.profile], one.start) for one in old.instances]
        for one in creates:
            beside = [(geometry.profiles[made.profile], made.start) for made in (*early, one)]
            if geometry.conflict([*standing, *beside]) is None:
                early.append(one)
    idle = {one.start for one in old.instances if one.replica is None and (one.profile, one.start) in shall}
    ready = {one.start for one in early} | idle
    first = [one for one in starts if one.start in ready and not modes and new.mig_enabled]
    rest = [one for one in starts if one not in first]
    return (*early, *first), (*drains, *destroys, *modes, *(one for one in creates if one not in early), *rest)
