"""Small clusters with running work for the search for moves: as arrays, and as its naive twin sees them.

Owns drawing and translating such cases, and the best set of moves by trying
every sequence there is. Must not know how the search goes about it.
"""

import random
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from eelgrid_kernels.arrays import (
    MOVE_UNIT,
    REQUEST,
    BudgetArrays,
    ChurnLimits,
    Mix,
    MoveNodes,
    MoveSearch,
    Nodes,
    TermPrices,
)
from eelgrid_kernels.move_costs import BLOCK_LEAST
from eelgrid_kernels.move_search import EVERY, GREEDY, OVERLAPS, RELEASES, STAYS, WEIGH, search_moves
from eelgrid_kernels.move_setup import build_move_search, build_search_ground
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PARTITIONED, GPU_PLACEABLE
from tests import naive

WATTS = ((10.0, 70.0), (30.0, 150.0), (50.0, 400.0))
Places = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass
class Unit:
    """Equal replicas on one node that move at once."""

    task: naive.Task
    home: int
    slots: list[list[int]]  # of each replica
    manner: int = OVERLAPS
    restart_w: float = 0.0


@dataclass
class Budgets:
    """Power budgets above the nodes, in milliwatts above idle."""

    left_mw: list[int]
    above: list[list[int]]  # of each node
    rise_mw: list[list[int]]  # of each GPU, once it is allocated
    fall_mw: list[list[int]]  # of each GPU, once those have left who hold it at first


@dataclass
class Case:
    """Nodes with the units on them already taken off what is free."""

    nodes: list[naive.Node]
    units: list[Unit]
    mix: list[naive.Class]
    prices: tuple[float, float, float, float]
    limits: ChurnLimits
    budgets: Budgets | None = None

    def cost_w(self, nodes: list[naive.Node]) -> float:
        """The potential, said plainly."""
        total = max(1, sum(entry.weight for entry in self.mix))
        return sum(
            self.prices[0] * naive.node_power(node)
            + self.prices[1] * naive.fragmentation(node, self.mix) / (1000.0 * total)
            + self.prices[2] * naive.stranded(node, self.mix)
            - self.prices[3] * block(node)
            for node in nodes
        )


def block(node: naive.Node) -> int:
    """GPUs that are wholly free, where they are many."""
    free = [gpu for gpu in node.gpus if gpu is not None and not gpu.partitioned and gpu.free == 1000]
    return len(free) if node.available and len(free) >= BLOCK_LEAST else 0


def lifted(node: naive.Node, slots: list[int], task: naive.Task) -> naive.Node:
    """The node without one replica."""
    return naive.placed(
        node,
        slots,
        replace(task, cpu_milli=-task.cpu_milli, memory_bytes=-task.memory_bytes, gpu_milli=-task.gpu_milli),
    )


def draw_case(
    seed: int, *, nodes: int = 3, units: int = 5, moves: int = 3, gangs: bool = True, blocks: bool = False
) -> Case:
    """A cluster that filled and emptied again: work stands scattered."""
    rng = random.Random(seed)
    fleet = []
    for rank in range(nodes):
        idle_w, busy_w = rng.choice(WATTS)
        model = rng.randrange(2)
        gpus = [naive.Gpu(model, 1000, idle_w, busy_w) for _ in range(rng.choice((8, 9) if blocks else (1, 2, 2, 3)))]
        gpus += [None] * ((9 if blocks else 3) - len(gpus))
        if rng.random() < 0.1 and gpus[0]:
            gpus[0].partitioned = True
        cpu = rng.choice((32_000, 64_000))
        fleet.append(naive.Node(cpu, cpu, 64 * 2**30, gpus, rank=rank))
    placed: list[Unit] = []
    for _ in range(units * 4):
        if len(placed) == units:
            break
        count = rng.choice((0, 1, 1, 1, 1, 2))
        share = rng.choice((200, 300, 500, 700, 1000)) if count == 1 else 1000 * (count > 0)
        models = None if count == 0 or rng.random() < 0.7 else {rng.randrange(2)}
        task = naive.Task(rng.choice((1000, 4000, 9000, 14_000)), rng.choice((1, 8, 24)) * 2**30, count, share, models)
        home = rng.randrange(nodes)
        unit = Unit(task, home, [], rng.choice((OVERLAPS, OVERLAPS, OVERLAPS, RELEASES, STAYS)), rng.choice((0.0, 2.0)))
        for _ in range(rng.choice((1, 1, 1, 1, 2)) if gangs else 1):
            if naive.verdict(fleet[home], task) is None:
                slots = rng.choice(naive.choices(fleet[home], task))
                fleet[home] = naive.placed(fleet[home], slots, task)
                unit.slots.append(slots)
        if unit.slots:
            placed.append(unit)
    if rng.random() < 0.2:
        fleet[rng.randrange(nodes)].available = False
    mix = [naive.Class(replace(unit.task, memory_bytes=0), rng.randrange(1, 5)) for unit in placed] + [
        naive.Class(naive.Task(8000, 0, 1, 1000), 3)
    ]
    prices = rng.choice(
        ((1.0, 80.0, 200.0, 0.0), (1.0, 20.0, 50.0, 0.0), (0.1, 100.0, 200.0, 0.0), (1.0, 0.0, 0.0, 0.0))
    )
    prices = (*prices[:3], 25.0) if blocks else prices
    return Case(fleet, placed, mix, prices, ChurnLimits(moves, rng.choice((1500, 100_000)), 1.0, 4096, 200_000))


def draw_budgets(case: Case, seed: int) -> Case:
    """The case under a budget of all nodes and of some, which leave little; whole GPUs may have lowered limits."""
    rng = random.Random(seed)
    shared = {(unit.home, slot) for unit in case.units for slots in unit.slots for slot in slots
              if unit.task.gpu_milli < 1000}  # fmt: skip
    rise, fall = [], []
    for home, node in enumerate(case.nodes):
        rise.append([rng.choice((60, 120, 350)) if gpu else 0 for gpu in node.gpus])
        lowered = rng.random() < 0.5
        fall.append(
            [more // 2 if lowered and (home, slot) not in shared else more for slot, more in enumerate(rise[-1])]
        )
    above, left = [[0] for _ in case.nodes], [rng.choice((-100, 0, 60, 120, 400, 10_000))]
    for levels in above:
        if rng.random() < 0.5:
            levels.insert(0, len(left))
            left.append(rng.choice((-1, 0, 60, 350, 700)))
    return replace(case, budgets=Budgets(left, above, rise, fall))


def _budget_arrays(case: Case) -> BudgetArrays | None:
    own = case.budgets
    if own is None:
        return None
    above = np.full((len(case.nodes), 2), -1, np.int64)
    for row, levels in enumerate(own.above):
        above[row, : len(levels)] = levels
    return BudgetArrays(
        np.array(own.left_mw, np.int64), above, np.array(own.rise_mw, np.int64), np.array(own.fall_mw, np.int64)
    )


class Power:
    """Who holds which GPU while moves are made, and what each budget leaves."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # Of each unit: node, GPUs and whether it has moved, for each replica.
        self.held = {
            number: [(unit.home, slots, False) for slots in unit.slots] for number, unit in enumerate(case.units)
        }
        self._first = self._drawn({}, ())

    def _drawn(self, changed, beside) -> list[int]:
        """Milliwatts above idle below each budget, one GPU after another."""
        own, holders = self.case.budgets, {}
        if own is None:
            return []
        for node, slots, is_moved in [entry for held in {**self.held, **changed}.values() for entry in held] + [
            *beside
        ]:
            for slot in slots:
                holders.setdefault((node, slot), set()).add(is_moved)
        sums = [0] * len(own.left_mw)
        for (node, slot), kinds in holders.items():
            for level in own.above[node]:
                sums[level] += own.rise_mw[node][slot] if True in kinds else own.fall_mw[node][slot]
        return sums

    def check(self, number: int, places) -> None:
        """Raises Impossible if a move draws more than a budget leaves while it is made."""
        going = [(node, slots, True) for node, slots in places]
        stay = {number: []} if self.case.units[number].manner == RELEASES else {}
        base, peak = self._drawn(stay, ()), self._drawn(stay, going)
        left_mw = self.case.budgets.left_mw if self.case.budgets else []
        for left, first, before, most in zip(left_mw, self._first, base, peak, strict=True):
            if most > before and most - first > left:
                raise Impossible("no power")

    def list_left_mw(self) -> list[int]:
        """What each budget leaves now."""
        drawn = zip(self.case.budgets.left_mw, self._first, self._drawn({}, ()), strict=True)
        return [left + first - now for left, first, now in drawn]

    def move(self, number: int, places) -> "Power":
        """The holders after a move."""
        after = copy(self)
        after.held = {**self.held, number: [(node, slots, True) for node, slots in places]}
        return after


def arrays(case: Case) -> tuple[MoveNodes, MoveSearch]:
    """The case as the kernel takes it."""

    def cells(read, absent, dtype):
        return np.array([[absent if gpu is None else read(gpu) for gpu in node.gpus] for node in case.nodes], dtype)

    nodes = Nodes(
        available=np.array([node.available for node in case.nodes], np.bool_),
        cpu_capacity=np.array([node.cpu_capacity for node in case.nodes], np.int64),
        cpu_free=np.array([node.cpu_free for node in case.nodes], np.int64),
        memory_free=np.array([node.memory_free for node in case.nodes], np.int64),
        gpu_state=cells(lambda gpu: GPU_PARTITIONED if gpu.partitioned else GPU_PLACEABLE, GPU_ABSENT, np.uint8),
        gpu_model=cells(lambda gpu: gpu.model, -1, np.int64),
        gpu_free=cells(lambda gpu: gpu.free, 0, np.int64),
        gpu_idle_w=cells(lambda gpu: gpu.idle_w, 0.0, np.float64),
        gpu_busy_w=cells(lambda gpu: gpu.busy_w, 0.0, np.float64),
        rank=np.array([node.rank for node in case.nodes], np.int64),
    )
    allowed = [[task.models is None or model in task.models for model in range(2)] for task in _tasks(case)]
    mix = Mix(
        *(np.array([getattr(entry.task, name) for entry in case.mix], np.int64)
          for name in ("cpu_milli", "gpu_count", "gpu_milli")),
        np.array([[entry.task.models is None or model in entry.task.models for entry in case.mix]
                  for model in range(2)], np.int64),
        np.array([entry.weight for entry in case.mix], np.int64), max(1, sum(entry.weight for entry in case.mix)),
    )  # fmt: skip
    requests = np.zeros(len(case.units), REQUEST)
    for name in ("cpu_milli", "memory_bytes", "gpu_count", "gpu_milli"):
        requests[name] = [getattr(task, name) for task in _tasks(case)]
    requests["models"] = [sum(1 << model for model in range(2) if yes[model]) for yes in allowed]
    first = np.cumsum([0, *(len(unit.slots) for unit in case.units)])
    ground = build_search_ground(
        nodes, mix, TermPrices(*case.prices), requests, replicas=int(first[-1]) + 20, budgets=_budget_arrays(case)
    )
    slots = np.full((int(first[-1]), ground.slots.shape[1]), -1, np.int64)
    for row, held in enumerate(held for unit in case.units for held in unit.slots):
        slots[row, : len(held)] = held
    units = np.zeros(len(case.units), MOVE_UNIT)
    units["kind"], units["first"], units["end"] = np.arange(len(case.units)), first[:-1], first[1:]
    units["home"] = [unit.home for unit in case.units]
    units["manner"] = [unit.manner for unit in case.units]
    units["restart_w"] = [unit.restart_w for unit in case.units]
    return ground, build_move_search(ground, case.limits, units, slots)


def _tasks(case: Case) -> list[naive.Task]:
    return [unit.task for unit in case.units]


def searched(case: Case, way: int = GREEDY) -> list[tuple[int, list[tuple[int, list[int]]]]]:
    """What the kernel finds: unit by unit in order, the place of each replica."""
    ground, search = arrays(case)
    search_moves(ground, search, WEIGH)
    found = []
    for unit in search.log[: search_moves(ground, search, way)].tolist():
        items = range(search.units[unit].first, search.units[unit].end)
        count = case.units[unit].task.gpu_count
        found.append((unit, [(int(search.to_node[i]), search.to_slots[i, :count].tolist()) for i in items]))
    if way == EVERY:
        assert search.progress[0].tried <= case.limits.tries, "not every sequence was tried"
    return found


class Impossible(Exception):
    """A move that breaks a rule."""


def moved(case: Case, nodes: list[naive.Node], unit: Unit, places: list[tuple[int, list[int]]]) -> list[naive.Node]:
    """The nodes after one move; raises Impossible if it breaks a rule."""
    nodes = list(nodes)

    def release():
        for slots in unit.slots:
            nodes[unit.home] = lifted(nodes[unit.home], slots, unit.task)

    if unit.manner == STAYS:
        raise Impossible("it may not move")
    if unit.manner == RELEASES:
        release()
    for node, slots in places:
        there = nodes[node]
        if len(set(slots)) != unit.task.gpu_count or naive.verdict(there, unit.task):
            raise Impossible("no room")
        for slot in slots:
            gpu = there.gpus[slot]
            if gpu is None or gpu.partitioned or not unit.task.allows(gpu) or gpu.free < unit.task.gpu_milli:
                raise Impossible("not this GPU")
        nodes[node] = naive.placed(there, slots, unit.task)
    if unit.manner == OVERLAPS:
        release()
    return nodes


def gained_w(case: Case, found: list[tuple[int, list[tuple[int, list[int]]]]]) -> float:
    """What moves gain, net of restarts; raises Impossible if one is not possible in its turn."""
    nodes, power = case.nodes, Power(case)
    for unit, places in found:
        power.check(unit, places)
        power = power.move(unit, places)
        nodes = moved(case, nodes, case.units[unit], places)
    return case.cost_w(case.nodes) - case.cost_w(nodes) - sum(case.units[unit].restart_w for unit, _ in found)


def spent(case: Case, units: list[int]) -> tuple[int, int]:
    """Replicas and milli-GPU that these units move."""
    chosen = [case.units[unit] for unit in units]
    milli = sum(len(unit.slots) * unit.task.gpu_count * unit.task.gpu_milli for unit in chosen)
    return sum(len(unit.slots) for unit in chosen), milli


def _nexts(case: Case, nodes: list[naive.Node], unit: Unit) -> Iterator[tuple[list[tuple[int, list[int]]], list]]:
    """Every way to move a unit of one replica."""
    for index, node in enumerate(nodes):
        if index == unit.home and unit.manner != RELEASES and naive.verdict(node, unit.task):
            continue
        there = lifted(node, unit.slots[0], unit.task) if index == unit.home else node
        for slots in naive.choices(there, unit.task):
            try:
                yield [(index, slots)], moved(case, nodes, unit, [(index, slots)])
            except Impossible:
                continue


def best_gain_w(case: Case) -> float:
    """The most that any sequence of moves within the budget gains, each unit moving at most once."""
    before_w, best_w = case.cost_w(case.nodes), 0.0
    seen = set()
    begun = tuple((unit.home, tuple(unit.slots[0])) for unit in case.units)
    stack = [(frozenset(), begun, case.nodes, 0.0, Power(case))]
    while stack:
        done, places, nodes, paid_w, power = stack.pop()
        best_w = max(best_w, before_w - case.cost_w(nodes) - paid_w)
        for number, unit in enumerate(case.units):
            count, milli = spent(case, [*done, number])
            if number in done or unit.manner == STAYS or count > case.limits.replicas or milli > case.limits.gpu_milli:
                continue
            for ((node, slots),), after in _nexts(case, nodes, unit):
                key = (done | {number}, (*places[:number], (node, tuple(slots)), *places[number + 1 :]))
                if key in seen:
                    continue
                try:
                    power.check(number, [(node, slots)])
                except Impossible:
                    continue
                seen.add(key)
                stack.append((*key, after, paid_w + unit.restart_w, power.move(number, [(node, slots)])))
    return best_w
