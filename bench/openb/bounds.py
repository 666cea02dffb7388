"""Bounds for every policy: the least power of a set of tasks, and the most GPU that can be allocated from it.

Owns the relaxation and its means over seeds. Must not know policies, files or how
a run is made: a fleet is shapes of nodes with their multiplicity, work is counts of
tasks per spec.

Theory. Nodes of a shape m are pooled, and tasks of a spec i are split over shapes
as they like: z_im >= 0. Whatever a policy does is such a split, so the least cost
of the LP is never above its cost and the most allocated GPU never below it.

    least   idle + (busy_w - idle_w)_m y_m + 105 a_m          [W]
    where   sum_m z_im = N_i, over the shapes that one such task fits
            y_m >= sum_i w_i count_i z_im,  y_m <= GPUs_m      busy GPUs
            a_m >= sum_i cpu_i z_im / 32 vCPU                  active CPU packages
            a_m >= y_m / GPUs of a node, if GPU tasks need CPU  no node works without one
            sum_i cpu_i z_im <= CPU_m, and memory likewise

w is any price list of shares in which no full GPU costs more than 1: the volume,
and dual prices of the cutting-stock LP. The prices are found where they bite:
after each solution, those of each shape's own shares are added if they would
have asked for more GPUs (Benders' cuts: y_m nears the cutting-stock LP of z_m).
Every cut holds for every load and is kept: the bounds of rising loads never fall.
A node's own bounds enter by rounding (Chvatal and Gomory): a node of capacity C
holds sum_i floor(need_i / c) <= floor(C / c), for every c that a task asks for,
of GPUs, CPU and memory.

The allocation bound takes sum_m z_im <= N_i and the most sum_i gpu_i z_im, with
whole z where asked. The power model is that of eelgrid_kernels.node_cost.
Source: the LP is of this project; power model Lettich et al., CCGrid 2025.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.sparse import block_diag, coo_array, csr_array, eye_array, kron, vstack

from bench.openb.cutting_stock import HIGHS_OPTIMAL, SharePrices
from bench.openb.measure import Bounds
from eelgrid_controller.replay.openb_protocol import TaskSpecs, TraceArrays, TraceFleet, arrival_order
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.cost_terms import CORES_PER_PACKAGE, CPU_PACKAGE_FULL_W, CPU_PACKAGE_IDLE_W, MILLI_PER_CORE
from eelgrid_kernels.cost_terms import PACKAGE_MILLI as CPU_PACKAGE_MILLI
from eelgrid_kernels.node_cost import GPU_WHOLE_MILLI

# A shape's shares must ask for this many GPUs more than the solution holds for a cut to be worth its row.
CUT_GPUS_LEAST = 0.5
# Cutting ends after PATIENCE rounds that each moved the bound by less than this part of it.
GAIN_LEAST, PATIENCE = 5e-5, 2
WHOLE_SECONDS_MOST = 10.0
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
HIGHS_STOPPED, HIGHS_INFEASIBLE = 1, 2


class Held(NamedTuple):
    """The least that must be held of the work that has arrived; who refuses work is compared at what it holds."""

    gpu_milli: float
    cpu_milli: float  # of tasks without GPU


ALL_HELD, NOTHING_HELD = Held(math.inf, math.inf), Held(0.0, 0.0)


class Shapes(NamedTuple):
    """Kinds of nodes (H,); the GPUs of one are alike. Watts are of one GPU; model is -1 where there is none."""

    cpu_milli: Ints
    memory_mib: Ints
    gpu_count: Ints
    model: Ints
    idle_w: Floats
    busy_w: Floats
    nodes: Ints


def shapes_of(fleet: TraceFleet) -> Shapes:
    """Equal nodes counted together."""
    kinds, nodes = np.unique(np.column_stack(fleet).astype(np.float64), axis=0, return_counts=True)
    whole = [np.ascontiguousarray(kinds[:, column], np.int64) for column in range(4)]
    return Shapes(*whole, kinds[:, 4].copy(), kinds[:, 5].copy(), nodes.astype(np.int64))


def bounds_of(trace: TraceArrays, seeds: Sequence[int], loads: Sequence[float] = LOADS) -> Bounds:
    """Means over the seeds; of power at the loads, in rising order, where every seed's tasks can all be placed."""
    relaxation = Relaxation(shapes_of(trace.fleet), trace.specs)
    capacity = trace.fleet.gpu_milli
    power_w = np.empty((len(seeds), len(loads)))
    allocated = np.empty(len(seeds))
    for row, seed in enumerate(seeds):
        order = arrival_order(trace, seed)
        arrived = np.cumsum(trace.task_milli[order])

        def counts(tasks: int, order: Ints = order) -> Ints:
            return np.bincount(order[:tasks], minlength=trace.task_milli.shape[0])

        for column, load in enumerate(loads):
            power_w[row, column] = relaxation.power_w(counts(int(np.searchsorted(arrived, load * capacity, "right"))))
        # One task further than x = 1: a curve between two steps is below the later one.
        allocated[row] = relaxation.allocated_milli(counts(int(np.searchsorted(arrived, capacity)) + 1)) / capacity
    placed = np.isfinite(power_w).all(axis=0)
    return Bounds(np.asarray(loads)[placed], power_w.mean(axis=0)[placed], float(allocated.mean()))


class Relaxation:
    """The LP of one fleet and one list of specs, with the cuts found so far."""

    def __init__(self, shapes: Shapes, specs: TaskSpecs, *, cutting: bool = True) -> None:
        """Without cutting, a GPU is only a volume and a node only a part of its pool."""
        self._shapes, self._specs, self._cutting = shapes, specs, cutting
        fits = _fits(shapes, specs)
        self._task, self._shape = (np.ascontiguousarray(part, np.int64) for part in np.nonzero(fits))
        self._pairs, self._kinds = self._task.shape[0], shapes.nodes.shape[0]
        self._sizes = np.unique(specs.gpu_milli[specs.gpu_count > 0])
        self._slot = np.searchsorted(self._sizes, specs.gpu_milli)
        volume = (specs.gpu_count * specs.gpu_milli)[self._task] / GPU_WHOLE_MILLI
        self._volume = csr_array(np.concatenate([volume, np.zeros(2 * self._kinds)])[None, :])
        cores = np.where(specs.gpu_count == 0, specs.cpu_milli, 0)[self._task] / MILLI_PER_CORE
        self._cores = csr_array(np.concatenate([cores, np.zeros(2 * self._kinds)])[None, :])
        self._share_prices = SharePrices(self._sizes)
        self._fixed, self._fixed_most = self._capacity_rows()
        # Rows that are looked at once a solution breaks them; priced is the shape of a price, -1 for a rounding.
        self._lazy, self._lazy_most = self._rounded_rows()
        self._priced = np.full(self._lazy_most.shape[0], -1, np.int64)
        self._binding = np.zeros(self._lazy_most.shape[0], np.bool_)

    @property
    def idle_w(self) -> float:
        """Watts of the fleet with nothing on it and no CPU package active."""
        shapes = self._shapes
        cores = -(-shapes.cpu_milli // MILLI_PER_CORE)
        packages = -(-cores // CORES_PER_PACKAGE)
        return float(shapes.nodes @ (shapes.gpu_count * shapes.idle_w + CPU_PACKAGE_IDLE_W * packages))

    def power_w(self, counts: Ints, allocated_milli: float | None = None) -> float:
        """Least watts with all counts (S,) of tasks placed, or with some of them that hold that much GPU; or inf.

        Who refuses work is compared at what it holds.
        """
        held = ALL_HELD if allocated_milli is None else Held(allocated_milli, 0.0)
        found = self._tightened(self._watts(), counts, held)
        return math.inf if found is None else self.idle_w + found

    def course_power_w(self, counts: Ints, held: Sequence[Held], weights: Floats) -> float:
        """Least weighted watts of a course without migration that at load l holds at least held[l] of counts (L, S).

        Nothing leaves and nothing moves: z_im of a load is at most that of the next, so that what saves watts now
        is paid for by what it leaves to the loads to come. The counts of a load are at most those of the next; which
        work is refused is for the course to say. One LP decides all loads; inf where there is no solution.
        """
        for load, least in zip(counts, held, strict=True):  # finds the cuts, which hold for every load
            if self._tightened(self._watts(), load, least) is None:
                return math.inf
        loads, tasks, width = len(held), counts.shape[1], self._pairs + 2 * self._kinds
        blocks, most = zip(*(self._rows(load, least) for load, least in zip(counts, held, strict=True)), strict=True)
        stays = csr_array(eye_array(self._pairs, width))
        steps = eye_array(loads - 1, loads) - eye_array(loads - 1, loads, k=1)
        solved = optimize.linprog(
            np.concatenate([weight * self._watts() for weight in weights]),
            A_ub=vstack([block_diag(blocks), kron(steps, stays)], format="csr"),
            b_ub=np.concatenate([*most, np.zeros((loads - 1) * self._pairs)]),
            bounds=np.column_stack([np.zeros(loads * width), np.tile(self._upper(), loads)]),
            method="highs-ipm",
        )
        if solved.status == HIGHS_INFEASIBLE:
            return math.inf
        if solved.status != HIGHS_OPTIMAL:
            raise RuntimeError(f"the bound of a course over {loads} loads, {tasks} classes: {solved.message}")
        return float(weights.sum() * self.idle_w + solved.fun)

    def _watts(self) -> Floats:
        """What each column costs over idle."""
        busy_w = self._shapes.busy_w - self._shapes.idle_w
        return np.concatenate(
            [np.zeros(self._pairs), busy_w, np.full(self._kinds, CPU_PACKAGE_FULL_W - CPU_PACKAGE_IDLE_W)]
        )

    def allocated_milli(self, counts: Ints, *, whole: bool = False) -> float:
        """Most milli-GPU that can be allocated to some of the counts (S,) of tasks."""
        cost = -self._volume.toarray()[0]
        found = self._tightened(cost, counts, NOTHING_HELD)
        if found is None:  # nothing placed is a solution
            raise RuntimeError("the allocation bound has no solution")
        if whole:
            found = max(found, self._solve_whole(cost, counts))
        return -found * GPU_WHOLE_MILLI

    def can_hold(self, counts: Ints) -> bool:
        """Whether there may be room for all counts (S,) of tasks; False says that there is none."""
        # GPUs cost nothing and are all taken, so that a price is broken only where there are too few of them.
        cost = np.concatenate([np.zeros(self._pairs), np.full(self._kinds, -1.0), np.zeros(self._kinds)])
        while True:
            solved = self._solve(cost, counts, ALL_HELD)
            if solved is None or not self._cut(solved.x):
                return solved is not None

    def _tightened(self, cost: Floats, counts: Ints, held: Held) -> float | None:
        """The least cost after the cuts that its solutions break; None where there is no solution."""
        before, patience = -math.inf, PATIENCE
        while True:
            solved = self._solve(cost, counts, held)
            if solved is None:
                return None
            gain = solved.fun - before
            patience = PATIENCE if gain > GAIN_LEAST * abs(solved.fun) else patience - 1
            before = float(solved.fun)
            if not (self._cutting and patience > 0 and self._cut(solved.x)):
                return before

    def _solve(self, cost: Floats, counts: Ints, held: Held) -> optimize.OptimizeResult | None:
        """The LP with the cuts so far; None without solution."""
        rows, most = self._rows(counts, held)
        tasks, upper = counts.shape[0], self._upper()
        whole = held is ALL_HELD
        for method in ("highs-ds", "highs-ipm"):  # where one stumbles over rounding, the other may not
            solved = optimize.linprog(
                cost,
                A_ub=rows[tasks:] if whole else rows,
                b_ub=most[tasks:] if whole else most,
                A_eq=rows[:tasks] if whole else None,
                b_eq=most[:tasks] if whole else None,
                bounds=np.column_stack([np.zeros(upper.shape[0]), upper]),
                method=method,
            )
            if solved.status == HIGHS_INFEASIBLE:
                return None
            if solved.status == HIGHS_OPTIMAL:
                return solved
        raise RuntimeError(f"the bound of {counts.sum()} tasks on {self._shapes.nodes.sum()} nodes: {solved.message}")

    def _solve_whole(self, cost: Floats, counts: Ints) -> float:
        """A bound on the cost with whole z; -inf where HiGHS finds none in time."""
        rows, most = self._rows(counts, NOTHING_HELD)
        integrality = np.zeros(cost.shape[0])
        integrality[: self._pairs] = 1
        solved = optimize.milp(
            cost,
            integrality=integrality,
            bounds=optimize.Bounds(0.0, self._upper()),
            constraints=optimize.LinearConstraint(rows, -np.inf, most),
            options={"time_limit": WHOLE_SECONDS_MOST},
        )
        # Stopped early it has no best split, but still a bound on it.
        stated = solved.status in {HIGHS_OPTIMAL, HIGHS_STOPPED} and solved.mip_dual_bound is not None
        return float(solved.mip_dual_bound) if stated else -math.inf

    def _rows(self, counts: Ints, held: Held) -> tuple[csr_array, Floats]:
        """Every row and the most it may be; the tasks' are first."""
        width = self._pairs + 2 * self._kinds
        of_task = coo_array((np.ones(self._pairs), (self._task, np.arange(self._pairs))), (counts.shape[0], width))
        gpus, cores = (
            (0.0, 0.0) if held is ALL_HELD else (held.gpu_milli / GPU_WHOLE_MILLI, held.cpu_milli / MILLI_PER_CORE)
        )
        rows = vstack([of_task, -self._volume, -self._cores, self._fixed, self._lazy[self._binding]], format="csr")
        return rows, np.concatenate([counts, [-gpus, -cores], self._fixed_most, self._lazy_most[self._binding]])

    def _upper(self) -> Floats:
        """The most of each column: GPUs and packages are as many as there are."""
        shapes = self._shapes
        packages = -(-shapes.cpu_milli // CPU_PACKAGE_MILLI)
        return np.concatenate([np.full(self._pairs, np.inf), shapes.nodes * shapes.gpu_count, shapes.nodes * packages])

    def _cut(self, solution: Floats) -> bool:
        """Takes up the rows that the solution breaks, known ones and prices of its own shares; whether any were."""
        excess = self._lazy @ solution - self._lazy_most
        broken = ~self._binding & (excess > CUT_GPUS_LEAST)
        self._binding |= broken
        settled = np.zeros(self._kinds, np.bool_)  # a price that is known brings what the shape needs
        settled[self._priced[broken & (self._priced >= 0)]] = True
        split = np.maximum(0.0, solution[: self._pairs])
        found = bool(broken.any())
        for shape in np.flatnonzero(~settled & (self._shapes.gpu_count > 0)):
            here = (self._shape == shape) & (self._specs.gpu_count[self._task] > 0)
            task = self._task[here]
            held = np.zeros(self._sizes.shape[0])
            np.add.at(held, self._slot[task], self._specs.gpu_count[task] * split[here])
            if held.any():
                prices = self._share_prices.best(held)
                if prices @ held > solution[self._pairs + shape] + CUT_GPUS_LEAST:
                    self._take_up(prices, int(shape))
                    found = True
        return found

    def _take_up(self, prices: Floats, shape: int) -> None:
        """Adds the prices for every shape; the one that asked for them is bound at once."""
        kinds = np.arange(self._kinds)
        self._lazy = vstack([self._lazy, self._cut_rows(prices)], format="csr")
        self._lazy_most = np.concatenate([self._lazy_most, np.zeros(self._kinds)])
        self._priced = np.concatenate([self._priced, kinds])
        self._binding = np.concatenate([self._binding, kinds == shape])

    def _cut_rows(self, prices: Floats) -> csr_array:
        """One row a shape: the price of what it holds, less its busy GPUs, is at most 0."""
        worth = self._specs.gpu_count * np.append(prices, 0.0)[self._slot]
        columns = np.concatenate([np.arange(self._pairs), self._pairs + np.arange(self._kinds)])
        rows = np.concatenate([self._shape, np.arange(self._kinds)])
        values = np.concatenate([worth[self._task], np.full(self._kinds, -1.0)])
        return csr_array((values, (rows, columns)), (self._kinds, self._pairs + 2 * self._kinds))

    def _capacity_rows(self) -> tuple[csr_array, Floats]:
        """Volume, CPU and memory of each shape, and its active packages."""
        shapes, specs = self._shapes, self._specs
        width = self._pairs + 2 * self._kinds
        entries = [self._cut_rows(self._sizes / GPU_WHOLE_MILLI)]
        most = [np.zeros(self._kinds)]
        kinds = np.arange(self._kinds)
        packages = np.concatenate([specs.cpu_milli[self._task] / CPU_PACKAGE_MILLI, np.full(self._kinds, -1.0)])
        where = np.concatenate([np.arange(self._pairs), self._pairs + self._kinds + kinds])
        entries.append(csr_array((packages, (np.concatenate([self._shape, kinds]), where)), (self._kinds, width)))
        most.append(np.zeros(self._kinds))
        if self._cutting and (specs.cpu_milli[specs.gpu_count > 0] > 0).all():
            # A node with a busy GPU has an active package.
            share = np.concatenate([1.0 / np.maximum(1, shapes.gpu_count), np.full(self._kinds, -1.0)])
            where = np.concatenate([self._pairs + kinds, self._pairs + self._kinds + kinds])
            entries.append(csr_array((share, (np.concatenate([kinds, kinds]), where)), (self._kinds, width)))
            most.append(np.zeros(self._kinds))
        needs = [(specs.cpu_milli, shapes.cpu_milli), (specs.memory_mib, shapes.memory_mib)]
        for need, capacity in needs:
            per_node = need[self._task] / np.maximum(1, capacity)[self._shape]
            entries.append(csr_array((per_node, (self._shape, np.arange(self._pairs))), (self._kinds, width)))
            most.append(shapes.nodes.astype(np.float64))
        return vstack(entries, format="csr"), np.concatenate(most)

    def _rounded_rows(self) -> tuple[csr_array, Floats]:
        """What rounding by a need says of the nodes of a shape; only where a node is no whole multiple of it."""
        shapes, specs = self._shapes, self._specs
        # Shares of a GPU are left to the prices: only whole GPUs are counted.
        whole = specs.gpu_count * (specs.gpu_milli == GPU_WHOLE_MILLI)
        entries: list[Floats] = []
        most: list[float] = []
        for need, capacity in (
            (specs.cpu_milli, shapes.cpu_milli),
            (specs.memory_mib, shapes.memory_mib),
            (whole, shapes.gpu_count),
        ):
            for unit in np.unique(need[need > 0]):
                for shape in np.flatnonzero((capacity >= unit) & (capacity % unit > 0)):
                    entries.append(need[self._task] // unit * (self._shape == shape))
                    most.append(float(shapes.nodes[shape] * (capacity[shape] // unit)))
        width = self._pairs + 2 * self._kinds
        rows = csr_array(np.array(entries, np.float64).reshape(len(entries), self._pairs))
        rows.resize((len(entries), width))
        return rows, np.array(most)


def _fits(shapes: Shapes, specs: TaskSpecs) -> npt.NDArray[np.bool_]:
    """(S, H) whether an empty node of the shape takes one task of the spec."""
    allowed = (specs.gpu_count == 0)[:, None] | (specs.allows[:, np.maximum(shapes.model, 0)] != 0)
    return (
        allowed
        & (specs.gpu_count[:, None] <= shapes.gpu_count)
        & (specs.cpu_milli[:, None] <= shapes.cpu_milli)
        & (specs.memory_mib[:, None] <= shapes.memory_mib)
    )
