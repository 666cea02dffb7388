"""Simulations: a fleet under one policy, with departures and node failures, and a queue with batch service.

fleet = SimulatedFleet(columns, specs, typical, rank, find_policy("fgd"))
node, slots = fleet.place(spec, moment)     # node -1: it fits nowhere
fleet.release(node, spec, slots)            # exactly as if it had never come

The queue is the one loop that no closed form replaces: servers that are alike, first
come first served. A free server takes what waits, at most a batch, and never waits
for more. A batch of k of B lasts works[i] x (alone + (1 - alone) (k - 1) / (B - 1)),
i its first customer. Twin: bench/llm/queue_simulation.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.argmin_index import place_arrivals, place_task, work_ahead
from eelgrid_kernels.arrays import ArrivalOutcomes, EngineArrays, Floats, Ints, Mix, Records
from eelgrid_kernels.baselines import PlacementPolicy
from eelgrid_kernels.compilation import kernel
from eelgrid_kernels.cost_terms import CPU_PACKAGE_IDLE_W, PACKAGE_W, active_packages
from eelgrid_kernels.engine_setup import (
    NodeColumns,
    NodeShapes,
    build_engine,
    build_expected_mix,
    build_kinds,
    build_shapes,
    encode_models,
)
from eelgrid_kernels.node_states import set_node_available, settle_nodes, shift_task
from eelgrid_kernels.opportunity_prices import update_prices


class SpecColumns(Protocol):
    """What tasks ask for, by spec; CPU milli, MiB, GPUs, milli of each, 1 where the model may be used."""

    @property
    def cpu_milli(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def memory_mib(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def gpu_count(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def gpu_milli(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def allows(self) -> Ints: ...  # noqa: D102 (S, M)


class FleetColumns(Protocol):
    """What nodes have when empty; the model is -1 without GPU, the watts are of one GPU."""

    @property
    def cpu_milli(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def memory_mib(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def gpu_count(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def model(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def idle_w(self) -> Floats: ...  # noqa: D102 (N,)
    @property
    def busy_w(self) -> Floats: ...  # noqa: D102 (N,)


def _ints(values: NDArray[Any]) -> Ints:
    return np.array(values, np.int64, order="C")


def _kinds(specs: SpecColumns) -> Records:
    models = np.array([encode_models(row) for row in specs.allows], np.int64)
    return build_kinds(specs.cpu_milli, specs.memory_mib, specs.gpu_count, specs.gpu_milli, models)


def _shapes(fleet: FleetColumns) -> tuple[NodeShapes, Ints]:
    """The shapes, and the shape of each node."""
    columns = (fleet.cpu_milli, fleet.gpu_count, fleet.model, fleet.idle_w, fleet.busy_w)
    rows, of_node = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    there = np.arange(max(1, int(np.max(fleet.gpu_count)))) < rows[:, 1, None]
    added_w = np.where(there, (rows[:, 4] - rows[:, 3])[:, None], 0.0)
    shapes = build_shapes(_ints(rows[:, 0]), _ints(np.where(there, rows[:, 2, None], -1)), added_w)
    return shapes, _ints(of_node.reshape(-1))


def _mix(specs: SpecColumns, typical: tuple[Ints, Ints]) -> Mix:
    chosen, weight = typical
    return Mix(
        cpu_milli=_ints(specs.cpu_milli[chosen]),
        gpu_count=_ints(specs.gpu_count[chosen]),
        gpu_milli=_ints(specs.gpu_milli[chosen]),
        allows=_ints(specs.allows[chosen].T),
        weight=_ints(weight),
        total=max(1, int(np.sum(weight))),
    )


def _idle_w(fleet: FleetColumns) -> float:
    idle_w = float(np.sum(fleet.gpu_count * fleet.idle_w))
    for cpu_milli in fleet.cpu_milli.tolist():  # the half core of an odd vCPU counts as working, even on an empty node
        idle_w += CPU_PACKAGE_IDLE_W * active_packages(cpu_milli, 0) + PACKAGE_W * active_packages(cpu_milli, cpu_milli)
    return idle_w


def build_empty_engine(
    fleet: FleetColumns, specs: SpecColumns, typical: tuple[Ints, Ints], rank: Ints, policy: PlacementPolicy
) -> EngineArrays:
    """The empty fleet under a policy."""
    shapes, of_node = _shapes(fleet)
    expected = build_expected_mix(_mix(specs, typical), shapes.families)
    nodes = NodeColumns(of_node, _ints(rank), _ints(fleet.memory_mib))
    run = build_engine(shapes, _kinds(specs), expected, nodes, policy)
    run.scalars["power_w"] = _idle_w(fleet)
    settle_nodes(run, np.arange(len(of_node)))
    return run


def build_empty_outcomes(arrivals: int) -> ArrivalOutcomes:
    """Room for what becomes of that many arrivals."""
    sums = [np.zeros(arrivals, np.int64) for _ in range(3)]
    return ArrivalOutcomes(np.zeros(arrivals, np.bool_), np.zeros(arrivals), *sums)


def simulate_arrivals(run: EngineArrays, arrivals: Ints) -> ArrivalOutcomes:
    """Every arrival in a fleet, one after the other; none of them ever leaves."""
    outcomes = build_empty_outcomes(len(arrivals))
    place_arrivals(run, _ints(arrivals), outcomes, 0, len(arrivals))
    return outcomes


def _copy_arrays(value: Any) -> Any:
    """Arrays of a tree of tuples, copied."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return type(value)(*map(_copy_arrays, value)) if isinstance(value, tuple) else value


class SimulatedFleet:
    """Nodes by number, as the columns list them; tasks by the number of their spec."""

    def __init__(
        self, columns: FleetColumns, specs: SpecColumns, typical: tuple[Ints, Ints], rank: Ints, policy: PlacementPolicy
    ) -> None:
        self._run = build_empty_engine(columns, specs, typical, rank, policy)
        self._turn = 0

    def place_task(self, spec: int, moment: int = 0) -> tuple[int, tuple[int, ...]]:
        """The node and its GPUs for a task, which it then holds; node -1 if it fits nowhere.

        moment numbers the decisions of RANDOM; no other policy heeds it.
        """
        update_prices(self._run)
        node = int(place_task(self._run, spec, moment))
        if node < 0:
            return node, ()
        return node, tuple(slot for slot in self._run.taken.tolist() if slot >= 0)

    def book_task(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Books a task on a node and GPUs chosen elsewhere; the caller knows that it fits."""
        shift_task(self._run, node, spec, np.array(slots, np.int64), -1)

    def release_task(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Takes a task off the node and GPUs that it was placed on; unavailable nodes let go, too."""
        shift_task(self._run, node, spec, np.array(slots, np.int64), 1)

    def set_available(self, node: int, available: bool) -> None:
        """Whether the node takes new tasks; what it holds stays and draws its watts until it is released."""
        set_node_available(self._run, node, available)

    def work_ahead(self, most: int) -> bool:
        """Idle work, bounded: one kind of task reads at most so many changes ahead of its next task; false if none had any.

        It changes no decision, only how long the next one takes.
        """
        following = int(work_ahead(self._run, self._turn, 1, most))
        self._turn = max(0, following)
        return following >= 0

    @property
    def power_w(self) -> float:
        """Modelled watts of all nodes."""
        return float(self._run.scalars["power_w"][0])

    def free_resources(self, node: int) -> tuple[int, int, tuple[int, ...]]:
        """CPU milli, memory MiB and milli of each GPU slot that nobody holds."""
        run, at = self._run, self._run.nodes[node]
        width = int(run.shapes[at.shape_row].width)
        free = tuple(run.gpu_free[at.state, :width].tolist())
        return int(run.states[at.state].cpu_free), int(at.memory), free

    @property
    def engine(self) -> EngineArrays:
        """The arrays, for the kernels of eelgrid_kernels.argmin_index."""
        return self._run

    def copy(self) -> "SimulatedFleet":
        """A fleet in the same state that goes its own way."""
        other = object.__new__(SimulatedFleet)
        other._run, other._turn = _copy_arrays(self._run), self._turn
        return other


class BatchServers(NamedTuple):
    """Servers that are alike."""

    servers: int
    batch: int  # customers that one serves at once, at most
    alone: float  # the time of a batch of one over that of a full one


@kernel
def simulate_queue(arrived_s: Floats, works_s: Floats, station: BatchServers, took_s: Floats) -> None:
    """Response times of customers who come at arrived_s (A,), rising, into took_s (A,), in place.

    works_s (A,) is how long each takes in a full batch. A log(servers) steps.
    """
    servers, batch, alone = station
    free_s = np.empty(servers)  # a heap: the earliest first
    free_s[:] = 0.0
    first, count = 0, arrived_s.shape[0]
    while first < count:
        start_s = max(free_s[0], arrived_s[first])
        last = first + 1
        while last < count and last - first < batch and arrived_s[last] <= start_s:
            last += 1
        share = 1.0 if batch == 1 else alone + (1.0 - alone) * (last - first - 1) / (batch - 1)
        end_s = start_s + works_s[first] * share
        at = 0  # the new end sinks to its place
        while True:
            child = 2 * at + 1
            if child >= servers:
                break
            if child + 1 < servers and free_s[child + 1] < free_s[child]:
                child += 1
            if free_s[child] >= end_s:
                break
            free_s[at] = free_s[child]
            at = child
        free_s[at] = end_s
        for one in range(first, last):
            took_s[one] = end_s - arrived_s[one]
        first = last
