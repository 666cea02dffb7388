"""Migration planner: which running work to move, where to and in which order, and what each move gains.

Owns the `MigrationProblem`, a copy of one moment of the cluster, and the search from it to a `Recommendation`. With it how
much more of the expected task mix would fit afterwards. Must not execute anything (core.workloads does), nor know how a
recommendation is kept or shown. What is lost, cordoned, partitioned or declared fixed stays where it is, and so does what
shares a GPU with work that states how far it may be slowed down; nothing joins it. Nothing moves onto reserved nodes, nor
to other GPU models where queues have quotas of these or of power.

Theory: `survey_for_moves` (migration_survey.py) copies what may change in milliseconds, while the controller's loop waits;
`build_migration_problem` and `recommend_moves` work on the copy and may take seconds, in another thread. A move is worth
the fall of the cluster's cost in watts less its restart, which costs the watts that the workload holds while it does no
work, spread over the time in which the move must have paid:

    restart_w = held_w * restart_s / horizon_s

A gang stops as a whole if one replica moves: its replicas on one node are one unit, and each such move pays for the restart
of all. The search (eelgrid_kernels.move_search) is greedy, so it runs in a few ways that fail differently, and the best
result is kept.

Bound. Where not every sequence can be tried, `gain_most_w` is not known, but the watts are bounded. After at most K moves,
power is at least that of all nodes without what moved, and what the moved work adds where it goes: nothing, but for whole
GPUs, of which it takes as many idle ones as it asks for, at the watts of the cheapest that it may use. On one node k moves
save at most G(k) + C(k):

    G(k)  watts of GPUs of which all holders moved, a holder of several GPUs counted in parts; fractional
    C(k)  watts of CPU packages that sleep if the k that hold most CPU moved

The largest sum over all nodes of the concave envelopes of G + C with K moves is the bound: the K steepest steps. It does
not ask whether there is room for what moves, so it is loose where work was placed well.

Headroom. The number of free GPUs says little, since a share may be too small or its CPU used up. So tasks in the
proportions of the mix arrive until they have requested as much GPU as is free, each is placed where it is cheapest on a
copy of the nodes, and those that fit are counted. The order is fixed (smooth weighted round robin), so that two placements
of the same work are tried with the same stream.
"""

import gc
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.migration_survey import MigrationSurvey, find_models, keep_preferred
from eelgrid_controller.placement.planner import count_fitting_tasks
from eelgrid_controller.placement.snapshot import GpuSlots
from eelgrid_controller.state.demand import TaskClass
from eelgrid_kernels.arrays import (
    MOVE_UNIT,
    REQUEST,
    BudgetArrays,
    ChurnLimits,
    Mix,
    MoveNodes,
    MoveSearch,
    Nodes,
    Records,
    TermPrices,
)
from eelgrid_kernels.cost_terms import CPU_PACKAGE_FULL_W, PACKAGE_W, active_packages
from eelgrid_kernels.engine_setup import encode_models
from eelgrid_kernels.move_costs import node_terms, place_tasks, sum_terms
from eelgrid_kernels.move_search import DEEP, EVERY, GREEDY, OVERLAPS, RELEASES, STAYS, WEIGH, search_moves
from eelgrid_kernels.move_setup import build_move_search, build_search_ground, no_budgets, order_by_rank
from eelgrid_kernels.node_cost import GPU_PLACEABLE, GPU_WHOLE_MILLI
from eelgrid_protos.messages import (
    HORIZON_S,
    MOVES_MOST,
    MOVES_RATIO,
    RESTART_S,
    Candidate,
    ClassFit,
    CostTerm,
    GoalWeights,
    Mobility,
    Move,
    MoveGoal,
    Placement,
    Recommendation,
    ReplicaMove,
    ResourceRequest,
    Standing,
    Workload,
    WorkloadKind,
    WorkloadPhase,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Tasks of a stream; at a microsecond for each node and class, a second for a thousand nodes.
STREAM_MOST = 4096
LARGEST_MOST = 4
# Prices by which the stream is placed, whatever goal the moves have, so that headroom is always the same measure.
_ARRIVALS = TermPrices(power=1.0, fragmentation_w=80.0, stranding_w=200.0, block_w=0.0)


class Headroom(NamedTuple):
    """Number of typical tasks that fit, and the GPU share that they hold in thousandths."""

    tasks: int
    gpu_milli: int


def generate_task_stream(nodes: Nodes, mix: Mix) -> Ints:
    """Returns arriving classes (T,) in order: as much GPU as is free on open nodes, at most STREAM_MOST tasks."""
    placeable = (nodes.gpu_state == GPU_PLACEABLE) & nodes.available[:, None]
    free_milli = int(nodes.gpu_free[placeable].sum())
    asked = mix.gpu_count * mix.gpu_milli
    if not len(mix.weight) or not asked.any():
        return np.zeros(0, np.int64)
    credit = np.zeros(len(mix.weight), np.int64)
    chosen: list[int] = []
    while free_milli > 0 and len(chosen) < STREAM_MOST:
        credit += mix.weight
        kind = int(np.argmax(credit))
        credit[kind] -= mix.total
        chosen.append(kind)
        free_milli -= int(asked[kind])
    return np.array(chosen, np.int64)


def build_requests(requests: Sequence[ResourceRequest], models: Mapping[str, int]) -> Records:
    """Returns what these requests ask for, as REQUEST (R,)."""
    found = np.zeros(len(requests), REQUEST)
    for field in ("cpu_milli", "memory_bytes", "gpu_count", "gpu_milli"):
        found[field] = [getattr(request, field) for request in requests]
    every = (1 << max(1, len(models))) - 1
    found["models"] = [
        sum(1 << models[model] for model in request.gpu_models if model in models) if request.gpu_models else every
        for request in requests
    ]
    return found


def measure_headroom(nodes: Nodes, mix: Mix, kinds: Ints) -> Headroom:
    """Measures how much of a stream of classes (T,) fits on these nodes."""
    requests = np.zeros(len(mix.weight), REQUEST)  # the mix does not include memory
    for field in ("cpu_milli", "gpu_count", "gpu_milli"):
        requests[field] = getattr(mix, field)
    requests["models"] = [encode_models(allowed) for allowed in mix.allows.T]
    accepted = np.zeros(len(kinds), np.int64)
    if len(kinds):
        ordered = Nodes._make(array[order_by_rank(nodes)] for array in nodes)
        place_tasks(build_search_ground(ordered, mix, _ARRIVALS, requests), kinds, accepted)
    asked = mix.gpu_count * mix.gpu_milli
    return Headroom(int(accepted.sum()), int((accepted * asked[kinds]).sum()))


def select_largest_classes(counts: Mapping[TaskClass, int]) -> tuple[TaskClass, ...]:
    """Returns, for each of the largest sizes in GPUs ever requested, the most frequent class of that size."""
    sizes: dict[int, TaskClass] = {}
    for task, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        size = task.gpu_count * task.gpu_milli
        if size:
            sizes.setdefault(size, task)
    return tuple(sizes[size] for size in sorted(sizes, reverse=True)[:LARGEST_MOST])


MIGRATION_COST_TERMS = ("power", "fragmentation", "stranding", "blocks")
# Weights by which moves are found and judged, whatever the weights of placement: measured on the openb traces, see
# docs/how-to/moves.md.
MIGRATION_GOALS = {
    MoveGoal.POWER: TermPrices(power=1.0, fragmentation_w=20.0, stranding_w=50.0, block_w=0.0),
    MoveGoal.ROOM: TermPrices(power=0.1, fragmentation_w=100.0, stranding_w=200.0, block_w=30.0),
    MoveGoal.BALANCED: TermPrices(power=1.0, fragmentation_w=80.0, stranding_w=200.0, block_w=30.0),
}
_CPU_MILLI_PER_PACKAGE = 32_000
_COLLECTED_AFTER = 4096
_MANNERS = {Mobility.FIXED: STAYS, Mobility.RESTARTABLE: RELEASES}


class MigrationUnit(NamedTuple):
    """What moves at once: replicas of one workload on one node."""

    workload: Workload
    row: int
    placements: tuple[Placement, ...]
    slots: tuple[tuple[int, ...], ...]
    manner: int
    restart_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationProblem:
    """A copy of the cluster at one moment, and the request."""

    revision: int
    goal: MoveGoal
    prices: TermPrices
    nodes: Nodes
    mix: Mix
    # The classes whose headroom is listed individually.
    largest: tuple[TaskClass, ...]
    names: tuple[str, ...]
    devices: tuple[GpuSlots, ...]
    models: Mapping[str, int]
    units: tuple[MigrationUnit, ...]
    budgets: BudgetArrays
    limits: ChurnLimits
    running: int
    restart_s: float
    horizon_s: float


def build_migration_problem(survey: MigrationSurvey) -> MigrationProblem:
    """Builds the problem of a survey; takes most of a second at 10,000 nodes, and reads nothing else."""
    asked = survey.asked
    goal = asked.goal or MoveGoal.BALANCED
    restart_s = RESTART_S if asked.restart_s is None else asked.restart_s
    horizon_s = HORIZON_S if asked.horizon_s is None else asked.horizon_s
    units = tuple(_collect_in_parts(_units(survey, restart_s / horizon_s)))
    running = sum(len(unit.placements) for unit in units)
    held_milli = sum(_held_milli(unit) for unit in units)
    most = asked.moves_most or max(1, int(running * (asked.moves_ratio or MOVES_RATIO)))
    return MigrationProblem(
        revision=survey.revision,
        goal=goal,
        prices=MIGRATION_GOALS.get(goal, MIGRATION_GOALS[MoveGoal.BALANCED]),
        nodes=survey.nodes,
        mix=survey.mix,
        largest=select_largest_classes(survey.demand),
        names=survey.names,
        devices=survey.devices,
        models=survey.models,
        units=units,
        budgets=_build_budgets(survey, units),
        limits=ChurnLimits(min(most, MOVES_MOST), int(held_milli * (asked.gpu_ratio or 1.0)), 1.0, 0, 0),
        running=running,
        restart_s=restart_s,
        horizon_s=horizon_s,
    )


def _build_budgets(survey: MigrationSurvey, units: Sequence[MigrationUnit]) -> BudgetArrays:
    """Builds what power budgets leave and what GPUs below them draw, as the kernel takes it."""
    if survey.power is None:
        return no_budgets(*survey.nodes.gpu_state.shape)
    held = ((unit.row, unit.workload, place) for unit in units if unit.manner != STAYS for place in unit.placements)
    return survey.power.build_arrays([slots.uuids for slots in survey.devices], survey.nodes.gpu_state.shape[1], held)


def _collect_in_parts(units: Iterator[MigrationUnit]) -> Iterator[MigrationUnit]:
    """Passes units on, and has the collector of garbage look at them by the thousand.

    It stops every thread, and would look at a hundred thousand young objects at once: 40 to 90 ms on a busy machine.
    """
    for number, unit in enumerate(units, start=1):
        if number % _COLLECTED_AFTER == 0:
            gc.collect(1)
        yield unit


def _units(survey: MigrationSurvey, restart_share: float) -> Iterator[MigrationUnit]:
    rows = {name: row for row, name in enumerate(survey.names)}
    # Flat lists: a cell of an array costs some hundred nanoseconds, and a list for each node the collector's time.
    width = survey.nodes.gpu_state.shape[1]
    placeable = (survey.nodes.gpu_state == GPU_PLACEABLE).ravel().tolist()
    busy_w = survey.nodes.gpu_busy_w.ravel().tolist()
    common: dict[tuple[bool, tuple[str, ...]], bool] = {}
    # Equal tuples are one: each new one is work for the collector of garbage, which stops the controller's loop as well.
    shared: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {}
    for found in survey.workloads:
        if found.phase is not WorkloadPhase.PLACED:
            continue
        workload = keep_preferred(survey, found, rows)
        models = find_models(survey, found, rows) if survey.keeps_models else ()
        if models:
            request = replace(workload.spec.request, gpu_models=models)
            workload = replace(workload, spec=replace(workload.spec, request=request))
        spec = workload.spec
        asked = spec.request.gpu_count > 0, spec.required_traits
        if asked not in common:
            common[asked] = _are_common(survey, *asked)
        is_gang = spec.kind is WorkloadKind.TRAINING_JOB and spec.replicas > 1
        groups: dict[tuple[int, int], list[Placement]] = {}
        for placement in workload.placements:
            row = rows[placement.node_name]
            groups.setdefault((row, -1 if is_gang else placement.replica), []).append(placement)
        for (row, _), placements in groups.items():
            here, start = survey.devices[row].uuids, row * width
            try:
                slots = tuple([tuple([here.index(uuid) for uuid in placement.gpu_uuids]) for placement in placements])
                # Lost, cordoned and partitioned nodes are not to be emptied.
                usable = (
                    all(placeable[start + slot] for held in slots for slot in held)
                    and survey.is_ready[row]
                    and survey.limited_gpus.isdisjoint(uuid for place in placements for uuid in place.gpu_uuids)
                    and common[asked]
                    and len(models) <= 1
                )
            except ValueError:  # a GPU that the inventory has no more
                slots, usable = ((),) * len(placements), False
            held_w = _held_w([busy_w[start + slot] for slot in slots[0]], spec.request) if usable else 0.0
            stopped = spec.replicas if is_gang else 1
            yield MigrationUnit(
                workload=workload,
                row=row,
                placements=workload.placements if len(groups) == 1 else tuple(placements),
                slots=shared.setdefault(slots, slots),
                manner=_MANNERS.get(spec.mobility, OVERLAPS) if usable else STAYS,
                restart_w=held_w * stopped * restart_share,
            )


def _are_common(survey: MigrationSurvey, on_gpus: bool, wanted: tuple[str, ...]) -> bool:
    """Returns whether every schedulable node with suitable devices has these traits: the search does not know traits."""
    nodes = zip(survey.traits, survey.devices, strict=True)
    return not wanted or all(
        set(wanted) <= set(traits) for traits, devices in nodes if traits is not None and (devices.uuids or not on_gpus)
    )


def _held_milli(unit: MigrationUnit) -> int:
    """Returns the GPU share that a unit holds, in thousandths; a slice of a GPU has its own."""
    milli = unit.workload.spec.request.gpu_milli
    return sum(
        len(held.gpu_uuids) * (milli if held.gpu_instance is None else held.gpu_instance.gpu_milli)
        for held in unit.placements
    )


def _held_w(busy_w: Sequence[float], request: ResourceRequest) -> float:
    """Returns the watts of what one replica holds, at full work; `busy_w` are those of its GPUs."""
    gpu_w = sum(busy_w) * request.gpu_milli / GPU_WHOLE_MILLI
    return gpu_w + CPU_PACKAGE_FULL_W * request.cpu_milli / _CPU_MILLI_PER_PACKAGE


# Of a larger fleet, the nodes with the most to gain: so many that the board of kinds and nodes has at most so many cells.
BOARD_CELLS_MOST = 1 << 22
# Kinds of request that may move; rarer kinds stay.
REQUEST_KINDS_MOST = 2048
# (thrift, way). On small cases each alone finds the best set of moves in 83 to 92 of 100; the best of all, by three
# guides, in 94 (tests/props/moves_test.py): every sequence is tried there instead, if they are few enough.
_WAYS = ((1.0, GREEDY), (0.0, GREEDY), (1.0, DEEP), (0.0, DEEP))


# Units times nodes up to which every ejection is evaluated at least once; and the number of ejections evaluated in a
# larger cluster, where each takes most of a millisecond and some other node has space anyway.
_SMALL, _EJECTIONS = 4096, 256
# Moves that the search of every sequence tries before it gives up, at a microsecond each; and GPUs of a node up to which
# every choice of them is listed.
_TRIES_MOST, _CHOICE_GPUS_MOST = 200_000, 16


class _Step(NamedTuple):
    """One unit and the target of each of its replicas: a row of the fleet and slots there."""

    unit: int
    places: tuple[tuple[int, tuple[int, ...]], ...]


def _choose_rows(problem: MigrationProblem, kinds: int) -> Ints:
    """Returns the nodes to search, by row in the order of rank: all, or those with the most to gain."""
    nodes, most = problem.nodes, BOARD_CELLS_MOST // max(1, kinds)
    order = order_by_rank(nodes)
    if len(order) <= most:
        return order
    held = (nodes.gpu_state == GPU_PLACEABLE) & (nodes.gpu_free < GPU_WHOLE_MILLI)
    # Watts of GPUs that are only partly allocated, and all other terms that the weights price.
    spare_w = (held * (nodes.gpu_busy_w - nodes.gpu_idle_w) * nodes.gpu_free / GPU_WHOLE_MILLI).sum(axis=1)
    ground = build_search_ground(nodes, problem.mix, problem.prices, build_requests((), problem.models))
    terms = np.array([node_terms(ground, row) for row in range(len(order))])
    prices = problem.prices
    waste_w = spare_w * prices.power + terms[:, 1] * prices.fragmentation_w + terms[:, 2] * prices.stranding_w
    kept = np.argsort(-waste_w, kind="stable")[:most]
    return kept[np.argsort(nodes.rank[kept], kind="stable")]


def _number_requests(problem: MigrationProblem) -> tuple[Records, list[int]]:
    """Returns the kinds of request that may move, and the kind of each unit; -1 for one that stays."""
    numbers: dict[ResourceRequest, int] = {}
    for unit in problem.units:
        if unit.manner != STAYS:
            request = unit.workload.spec.request
            numbers[request] = numbers.get(request, 0) + 1
    kept = sorted(numbers, key=lambda request: -numbers[request])[:REQUEST_KINDS_MOST]
    number = {request: kind for kind, request in enumerate(kept)}
    kinds = [-1 if unit.manner == STAYS else number.get(unit.workload.spec.request, -1) for unit in problem.units]
    return build_requests(kept, problem.models), kinds


def _build_search(
    problem: MigrationProblem, ground: MoveNodes, rows: Ints, chosen: list[int], kinds: list[int]
) -> MoveSearch:
    units = [problem.units[unit] for unit in chosen]
    first = np.cumsum([0, *(len(unit.slots) for unit in units)])
    slots = np.full((int(first[-1]), ground.slots.shape[1]), -1, np.int64)
    for item, held in enumerate(held for unit in units for held in unit.slots):
        slots[item, : len(held)] = held
    place = np.zeros(len(problem.names), np.int64)
    place[rows] = np.arange(len(rows))
    moving = np.zeros(len(units), MOVE_UNIT)
    moving["kind"], moving["first"], moving["end"] = [kinds[unit] for unit in chosen], first[:-1], first[1:]
    moving["home"] = place[[unit.row for unit in units]]
    moving["manner"] = [unit.manner for unit in units]
    moving["restart_w"] = [unit.restart_w for unit in units]
    return build_move_search(ground, problem.limits, moving, slots)


class _SearchResult(NamedTuple):
    """What a search found, and the most that any could: None where that is not known."""

    steps: list[_Step]
    nodes: int
    gain_most_w: float | None


def _search_steps(problem: MigrationProblem) -> _SearchResult:
    """Returns the best moves that any search variant finds."""
    requests, kinds = _number_requests(problem)
    rows = _choose_rows(problem, len(requests))
    inside = set(rows.tolist())
    # Units that stay need no number: they are subtracted from what is free.
    chosen = [number for number, unit in enumerate(problem.units) if kinds[number] >= 0 and unit.row in inside]
    if not chosen:
        return _SearchResult([], len(rows), 0.0)
    replicas = sum(len(problem.units[unit].slots) for unit in chosen)
    nodes = Nodes._make(array[rows] for array in problem.nodes)
    budgets = problem.budgets._replace(
        above=problem.budgets.above[rows],
        rise_mw=problem.budgets.rise_mw[rows],
        fall_mw=problem.budgets.fall_mw[rows],
    )
    is_small = len(chosen) * len(rows) <= _SMALL
    # A large cluster is searched by its own weights and without ejections, which would cover too little of it.
    # Every result is judged by the problem's own weights, whatever guided the search.
    guides = tuple(dict.fromkeys((problem.prices, *MIGRATION_GOALS.values()))) if is_small else (problem.prices,)
    ways = _WAYS if is_small else _WAYS[:2]
    best: list[_Step] = []
    best_w = 0.0
    for guide in guides:
        begun = build_search_ground(nodes, problem.mix, guide, requests, replicas=replicas, budgets=budgets)
        fresh = _build_search(problem, begun, rows, chosen, kinds)
        search_moves(begun, fresh, WEIGH)
        is_listed = is_small and guide == problem.prices and begun.gpus.shape[1] <= _CHOICE_GPUS_MOST
        for thrift, way in ((0.0, EVERY), *ways) if is_listed else ways:
            search = _copy_search(fresh)
            search = search._replace(
                limits=search.limits._replace(
                    thrift=thrift, ejections=_SMALL if is_small else _EJECTIONS, tries=_TRIES_MOST
                )
            )
            order = search.log[: search_moves(_copy_ground(begun), search, way)].tolist()
            found = [_make_step(problem, search, rows, chosen, unit) for unit in order]
            gain_w = sum(move.gain_w for move in _make_moves(problem, _Standings(problem), found))
            if gain_w > best_w:
                best, best_w = found, gain_w
            if way == EVERY and search.progress[0].tried <= _TRIES_MOST:
                return _SearchResult(best, len(rows), best_w)
    return _SearchResult(best, len(rows), None)


def _copy_ground(begun: MoveNodes) -> MoveNodes:
    """Returns a copy of the arrays that a search changes; read-only arrays are shared."""
    changed = ("nodes", "gpus", "board_w", "least_w", "awake_w", "left_mw", "clock", "trail", "marked", "slots")
    return begun._replace(**{name: getattr(begun, name).copy() for name in changed})


def _copy_search(fresh: MoveSearch) -> MoveSearch:
    """Returns a copy of a search that has not begun."""
    return MoveSearch._make(value.copy() if isinstance(value, np.ndarray) else value for value in fresh)


def _make_step(problem: MigrationProblem, search: MoveSearch, rows: Ints, chosen: list[int], unit: int) -> _Step:
    count = problem.units[chosen[unit]].workload.spec.request.gpu_count
    items = range(search.units[unit].first, search.units[unit].end)
    return _Step(
        chosen[unit],
        tuple((int(rows[search.to_node[item]]), tuple(search.to_slots[item, :count].tolist())) for item in items),
    )


# The bound on watts


def bound_saved_w(problem: MigrationProblem) -> float:
    """Bounds the modelled watts that moves within the limit of replicas may save, wherever they go; see the module."""
    by_row: dict[int, list[MigrationUnit]] = {}
    for unit in problem.units:
        by_row.setdefault(unit.row, []).append(unit)
    arrival_w: dict[ResourceRequest, float] = {}
    steps = [_bound_node_steps(problem, row, units, arrival_w) for row, units in by_row.items()]
    every = np.sort(np.concatenate(steps))[::-1] if steps else np.zeros(0)
    most = problem.limits.replicas
    return float(every[:most][every[:most] > 0.0].sum())


def _least_arrival_w(problem: MigrationProblem, request: ResourceRequest) -> float:
    """Least watts that a replica of whole GPUs adds where it goes; 0 for a share, which may go beside others."""
    if request.gpu_count == 0 or request.gpu_milli < GPU_WHOLE_MILLI:
        return 0.0
    nodes = problem.nodes
    allowed = [code for model, code in problem.models.items() if not request.gpu_models or model in request.gpu_models]
    usable = (nodes.gpu_state == GPU_PLACEABLE) & np.isin(nodes.gpu_model, allowed)
    return request.gpu_count * float((nodes.gpu_busy_w - nodes.gpu_idle_w)[usable].min(initial=np.inf))


def _bound_node_steps(
    problem: MigrationProblem, row: int, units: Sequence[MigrationUnit], arrival_w: dict[ResourceRequest, float]
) -> Floats:
    """What each further move off a node saves at most, falling."""
    replicas = [(unit.workload.spec.request, held) for unit in units if unit.manner != STAYS for held in unit.slots]
    for request, _ in replicas:
        if request not in arrival_w:
            arrival_w[request] = _least_arrival_w(problem, request)
    saved = _bound_gpu_savings(problem, row, units, replicas, arrival_w)
    saved += _bound_package_savings(problem, row, [request.cpu_milli for request, _ in replicas])
    return np.diff(_concave_envelope(saved))


def _bound_gpu_savings(
    problem: MigrationProblem,
    row: int,
    units: Sequence[MigrationUnit],
    replicas: Sequence[tuple[ResourceRequest, tuple[int, ...]]],
    arrival_w: Mapping[ResourceRequest, float],
) -> Floats:
    """G(0), G(1), ... G(replicas) of a node."""
    nodes = problem.nodes
    fixed = {slot for unit in units if unit.manner == STAYS for held in unit.slots for slot in held}
    moves: dict[int, float] = {}
    worth: dict[int, float] = {}
    for request, held in replicas:
        for slot in held:
            moves[slot] = moves.get(slot, 0.0) + 1.0 / len(held)
            gpu_w = float(nodes.gpu_busy_w[row, slot] - nodes.gpu_idle_w[row, slot])
            worth[slot] = worth.get(slot, gpu_w) - arrival_w[request] / len(held)
    items = sorted(
        ((worth[slot] / moves[slot], moves[slot]) for slot in moves if slot not in fixed and worth[slot] > 0.0),
        reverse=True,
    )
    at, total = [0.0], [0.0]
    for rate_w, count in items:
        at.append(at[-1] + count)
        total.append(total[-1] + rate_w * count)
    found: Floats = np.interp(np.arange(len(replicas) + 1, dtype=np.float64), at, total)
    return found


def _bound_package_savings(problem: MigrationProblem, row: int, cpu_milli: Sequence[int]) -> Floats:
    """C(0), C(1), ... C(replicas) of a node."""
    capacity, free = int(problem.nodes.cpu_capacity[row]), int(problem.nodes.cpu_free[row])
    freed = np.concatenate(([0], np.cumsum(sorted(cpu_milli, reverse=True))))
    before = active_packages(capacity, free)
    return np.array([PACKAGE_W * (before - active_packages(capacity, free + int(more))) for more in freed])


def _concave_envelope(values: Floats) -> Floats:
    """The least concave function of 0, 1, ... that is nowhere below."""
    corners: list[int] = []
    for at, value in enumerate(values.tolist()):
        while len(corners) > 1:
            first, last = corners[-2], corners[-1]
            if (values[last] - values[first]) * (at - first) > (value - values[first]) * (last - first):
                break
            corners.pop()
        corners.append(at)
    found: Floats = np.interp(np.arange(len(values), dtype=np.float64), corners, values[corners])
    return found


# Result of the search


class _Standings:
    """The nodes while moves are made on them one by one, and what they cost."""

    def __init__(self, problem: MigrationProblem) -> None:
        requests = list(dict.fromkeys(unit.workload.spec.request for unit in problem.units))
        self._kinds = {request: kind for kind, request in enumerate(requests)}
        self._weights = np.array(problem.prices)
        self._ground = build_search_ground(
            problem.nodes, problem.mix, problem.prices, build_requests(requests, problem.models)
        )

    def book(self, request: ResourceRequest, row: int, slots: Sequence[int], sign: int) -> None:
        """Puts a replica on a node (sign 1) or takes it off (-1)."""
        here, gpus = self._ground.nodes[row], self._ground.gpus
        here.cpu_free -= sign * request.cpu_milli
        here.memory_free -= sign * request.memory_bytes
        gpus["free"][row, list(slots)] -= sign * request.gpu_milli

    def terms_w(self, row: int) -> Floats:
        """Returns the terms of a node's cost, in watts-equivalent."""
        weighed: Floats = np.array(node_terms(self._ground, row)) * self._weights
        return weighed

    def power_w(self, rows: set[int]) -> float:
        """Returns the modelled watts of some of the nodes."""
        return sum(node_terms(self._ground, row)[0] for row in sorted(rows))

    def sum_terms(self) -> Floats:
        """Returns the terms of all nodes, without weights."""
        terms = np.zeros(len(MIGRATION_COST_TERMS))
        sum_terms(self._ground, terms)
        return terms

    def copy_nodes(self, nodes: Nodes) -> Nodes:
        """Returns these nodes with what is free now."""
        own = self._ground
        free = {
            "cpu_free": own.nodes["cpu_free"],
            "memory_free": own.nodes["memory_free"],
            "gpu_free": own.gpus["free"],
        }
        return nodes._replace(**{name: np.array(column, order="C") for name, column in free.items()})


def _candidate(problem: MigrationProblem, row: int, slots: Sequence[int], terms_w: Floats) -> Candidate:
    indexes = problem.devices[row].indexes
    return Candidate(
        node_name=problem.names[row],
        gpu_indexes=tuple(indexes[slot] for slot in slots),
        cost_w=float(terms_w.sum()),
        terms=tuple(
            CostTerm(name=name, cost_w=float(w)) for name, w in zip(MIGRATION_COST_TERMS, terms_w, strict=True)
        ),
    )


def _make_moves(problem: MigrationProblem, standings: _Standings, steps: Iterable[_Step]) -> Iterator[Move]:
    """Yields each step with its gain at its position in the sequence, and changes the nodes accordingly."""
    return (_move(problem, standings, step) for step in steps)


def _move(problem: MigrationProblem, standings: _Standings, step: _Step) -> Move:
    unit = problem.units[step.unit]
    request = unit.workload.spec.request
    touched = {unit.row, *(row for row, _ in step.places)}
    before_w = standings.power_w(touched)
    gain_w, replicas = -unit.restart_w, []
    for placement, held, (row, slots) in zip(unit.placements, unit.slots, step.places, strict=True):
        # Costs of the replica at source and target, each on the cluster without it.
        here_w = standings.terms_w(unit.row)
        standings.book(request, unit.row, held, -1)
        without_w = standings.terms_w(unit.row)
        there_w = standings.terms_w(row)
        standings.book(request, row, slots, 1)
        added_w = standings.terms_w(row) - there_w
        saved_w = here_w - without_w
        gain_w += float(saved_w.sum() - added_w.sum())
        devices = problem.devices[row]
        target = Placement(
            replica=placement.replica,
            node_name=problem.names[row],
            gpu_uuids=tuple(devices.uuids[slot] for slot in slots),
            gpu_indexes=tuple(devices.indexes[slot] for slot in slots),
        )
        candidates = (
            _candidate(problem, row, slots, added_w),
            _candidate(problem, unit.row, held, saved_w),
        )
        replicas.append(ReplicaMove(source=placement, target=target, candidates=candidates))
    return Move(
        workload_id=unit.workload.workload_id,
        name=unit.workload.spec.name,
        replicas=tuple(replicas),
        release_first=unit.manner == RELEASES,
        power_w=before_w - standings.power_w(touched),
        restart_w=unit.restart_w,
        gain_w=gain_w,
    )


def _standing(problem: MigrationProblem, nodes: Nodes, terms: Floats, found: Headroom) -> Standing:
    return Standing(
        power_w=float(terms[0]),
        fragmented_gpus=float(terms[1]),
        stranded_gpus=float(terms[2]),
        block_gpus=-float(terms[3]) + 0.0,
        cost_w=float((terms * np.array(problem.prices)).sum()),
        typical_tasks=found.tasks,
        typical_gpu_milli=found.gpu_milli,
        largest=tuple(
            ClassFit(**task._asdict(), tasks=count_fitting_tasks(nodes, problem.models, task))
            for task in problem.largest
        ),
    )


def recommend_moves(problem: MigrationProblem) -> Recommendation:
    """Searches for moves; equal problems give equal recommendations."""
    steps, considered, gain_most_w = _search_steps(problem)
    standings = _Standings(problem)
    before_terms = standings.sum_terms()
    moves = tuple(_make_moves(problem, standings, steps))
    after = standings.copy_nodes(problem.nodes)
    kinds = generate_task_stream(problem.nodes, problem.mix)
    asked = problem.mix.gpu_count * problem.mix.gpu_milli
    rooms = [measure_headroom(nodes, problem.mix, kinds) for nodes in (problem.nodes, after)]
    moved = [problem.units[step.unit] for step in steps]
    found = Recommendation(
        recommendation_id="-",
        revision=problem.revision,
        goal=problem.goal,
        weights=GoalWeights(**problem.prices._asdict()),
        moves=moves,
        before=_standing(problem, problem.nodes, before_terms, rooms[0]),
        after=_standing(problem, after, standings.sum_terms(), rooms[1]),
        gain_w=sum(move.gain_w for move in moves),
        restart_w=sum(move.restart_w for move in moves),
        running=problem.running,
        movable=sum(len(unit.placements) for unit in problem.units if unit.manner != STAYS),
        moving=sum(len(unit.placements) for unit in moved),
        moving_gpu_milli=sum(
            len(unit.placements) * unit.workload.spec.request.gpu_count * unit.workload.spec.request.gpu_milli
            for unit in moved
        ),
        moves_most=problem.limits.replicas,
        gpu_milli_most=problem.limits.gpu_milli,
        restart_s=problem.restart_s,
        horizon_s=problem.horizon_s,
        typical_asked_tasks=len(kinds),
        typical_asked_gpu_milli=int(asked[kinds].sum()),
        nodes_considered=considered,
        gain_most_w=gain_most_w,
        saved_most_w=bound_saved_w(problem),
    )
    text = f"{problem.revision} {problem.prices} {moves}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return replace(found, recommendation_id=f"moves-{problem.revision}-{digest}")
