"""The integer programme of a change: which GPU becomes which target, and what runs afterwards.

Owns the classes of GPUs that stand alike, the programme and its solution as GPUs.
Its rows are in the head of repartition.py. Must not know which GPUs are in it, nor steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from eelgrid_controller.partition.integer_program import (
    RATE_TOLERANCE,
    IntegerProgram,
    ObjectiveWeights,
    constraint_rows,
    demand_throughput,
    minimize_objective,
    objective_weights,
)
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.plan import PartitionReplica
from eelgrid_controller.partition.problem import SearchExhausted
from eelgrid_controller.partition.running import GpuTarget, RunningGpu, RunningInstance, enumerate_targets
from eelgrid_kernels.arrays import Floats, Ints

LEAST_NODES_MOST, NODES_MOST = 500, 20
CLOSE = 5e-4  # of the value
_TIGHTER = 1e-5
_ROUNDS_MOST = 4


class TransitionCosts(NamedTuple):
    """What a change costs once, in GPU-seconds, or joules where watts are least; `room` is in GPUs or watts.

    An instance comes or goes in about a second, a model loads in half a minute, a mode takes a reset.
    """

    horizon_s: float = 3600.0
    destroy: float = 1.0
    create: float = 1.0
    start: float = 30.0
    mode: float = 60.0
    room: float = 1e-3  # what a compute slice that is not in use is worth


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


class _Columns(NamedTuple):
    """A column for each kind and target, T of them."""

    size: Floats  # GPUs of each kind
    kind: Ints  # (T,)
    target: tuple[GpuTarget, ...]
    places: Floats  # (T, C) kept or made
    kept: Floats  # (T, C) kept
    runs: Floats  # (T, O) replicas that could stay
    gpu: Floats  # (T,) what the GPU in use costs; nothing where somebody else is on it
    change: Floats  # (T,) what destroying and modes cost


def _columns(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], costs: TransitionCosts
) -> _Columns:
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
    return _Columns(sizes, np.array(numbers, np.int64), tuple(chosen), places + kept, kept, runs, used, change)


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
    columns = _columns(programme, gpus, found, costs)
    bound = _bound(programme, gpus, found, columns)
    asked = np.ones(len(programme.rate_hz))
    for _ in range(_ROUNDS_MOST):
        values = _solve_transition(programme, columns, costs, asked, bound)
        taken, replicas = values[: len(columns.kind)], values[len(columns.kind) :][: len(programme.options)]
        short = demand_throughput(programme, replicas) < programme.rate_hz * (1.0 - RATE_TOLERANCE)
        if not short.any():
            break
        asked[short] = 1.0 + _TIGHTER
    else:
        raise SearchExhausted("rates are missed by the solver's rounding", "state them with fewer digits")
    chosen: dict[int, GpuTarget] = {}
    left = {number: iter(kind.members) for number, kind in enumerate(found)}
    for row in taken.nonzero()[0]:
        for _ in range(int(taken[row])):
            chosen[next(left[int(columns.kind[row])])] = columns.target[row]
    return Transition(chosen, replicas, values[len(columns.kind) + len(programme.options) :][: len(programme.options)])


def _bound(
    programme: IntegerProgram, gpus: Sequence[RunningGpu], found: Sequence[GpuClass], columns: _Columns
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


def _solve_transition(
    programme: IntegerProgram, columns: _Columns, costs: TransitionCosts, asked: Floats, bound: float
) -> Ints:
    first, _ = objective_weights(programme)
    options, cells, demands = len(programme.options), len(programme.cells), len(programme.rate_hz)
    targets_count, every = len(columns.kind), np.arange(options)
    rates = constraint_rows(programme, asked)[0][:demands, :options]
    use = sparse.csc_array((programme.width.astype(np.float64), (programme.cell, every)), shape=(cells, options))
    one = sparse.eye_array(options)
    sizes = columns.size
    each = sparse.csc_array(
        (np.ones(targets_count), (columns.kind, np.arange(targets_count))), shape=(len(sizes), targets_count)
    )
    table = sparse.block_array(
        [
            [None, rates, None, None],
            [sparse.csc_array(columns.places.T), -use, None, None],
            [sparse.csc_array(columns.runs.T), None, -one, None],
            [None, one, -one, None],
            [sparse.csc_array(columns.kept.T), -use, None, sparse.eye_array(cells)],
            [sparse.csc_array(columns.gpu[None, :]), sparse.csc_array(first.option[None, :]), None, None],
            [each, None, None, None],
        ],
        format="csc",
    )
    low = np.concatenate((asked, np.zeros(2 * cells + 2 * options), [bound * (1.0 - RATE_TOLERANCE)], sizes))
    high = np.concatenate((np.full(demands + 2 * cells + 2 * options + 1, np.inf), sizes))
    slices = np.array([programme.cells[cell].slices for cell in programme.cell], np.float64) * programme.width
    weights = (
        costs.horizon_s * columns.gpu + columns.change,
        costs.horizon_s * (first.option + costs.room * slices) + costs.start,
        np.full(options, -costs.start),
        np.array([0.0 if cell.profile == WHOLE else costs.create for cell in programme.cells]),
    )
    result = milp(
        np.concatenate(weights),
        integrality=np.ones(table.shape[1]),
        bounds=Bounds(0.0, np.inf),
        constraints=LinearConstraint(table, low, high),
        options={"mip_rel_gap": CLOSE, "node_limit": NODES_MOST},
    )
    if result.x is None:
        raise SearchExhausted(f"no change within {NODES_MOST} nodes", "let fewer GPUs change at once")
    values: Ints = np.rint(result.x).astype(np.int64)
    return values


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
