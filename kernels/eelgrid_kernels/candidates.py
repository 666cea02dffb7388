"""The engine over a cluster that somebody else keeps: where a task may go, best first, and what stands in its way.

Owns the translation of `Nodes` into shapes and states, and which kinds of task
are remembered. Must not know names, events or why a row changed. Its memory is a
cache: one built anew from the same arrays answers the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.argmin_index import choose_nodes, compute_all_costs, work_ahead
from eelgrid_kernels.arrays import EngineArrays, Floats, Ints, Mix, Nodes, Task
from eelgrid_kernels.baselines import PlacementPolicy, choose_gpus
from eelgrid_kernels.compilation import lean_kernel
from eelgrid_kernels.cost_terms import TERMS, compute_added_terms, compute_shared_terms
from eelgrid_kernels.engine_setup import (
    NodeColumns,
    build_engine,
    build_expected_mix,
    build_kinds,
    build_shapes,
    encode_models,
    fill_fleet_scalars,
    replace_mix,
)
from eelgrid_kernels.gang import compute_replica_costs
from eelgrid_kernels.node_cost import FITS, GPU_PLACEABLE, MEMORY, node_verdict
from eelgrid_kernels.node_states import adopt_nodes, count_roomy
from eelgrid_kernels.opportunity_prices import apply_prices, are_prices_due, compute_prices

# Costs and ranks of a kind in a state; kinds are remembered up to a sum, the latest ones.
_KIND_BYTES = 14
_KINDS_BYTES_MOST = 128 * 1024 * 1024
_KINDS_MOST = 256
# Changes that one bout of idle work reads, some hundred nanoseconds each. Fewer than the least are left to the decision,
# which reads them in some microseconds: for every kind after every change, idle work would cost as much as submissions.
BEHIND_LEAST, AHEAD_MOST = 64, 1024


class QuotedPrices(NamedTuple):
    """Prices of the classes of the mix; load, turnover and stockouts in thousandths."""

    offers_w: Sequence[int] = ()
    scarce: int = 0  # bits of the scarce models
    load: int = 0
    turnover: int = 0
    stockouts: Sequence[int] = ()  # how likely each class with several GPUs runs out of places


class NodeCandidate(NamedTuple):
    """One candidate."""

    node: int
    slots: tuple[int, ...]
    terms: tuple[float, ...]  # what the task adds to each term, in watts, GPUs and GPUs


@lean_kernel
def write_terms(run: EngineArrays, kind: int, node: int, into: Floats) -> None:
    """What a task adds to each term on a node, on the GPUs in run.taken, scaled, into (J,), in place."""
    shared = compute_shared_terms(run, kind, run.nodes[node].state)
    terms = compute_added_terms(run, shared, run.taken[0], True)
    for term in range(len(terms)):
        into[term] = terms[term] / run.scalars[0].scale[term]


@lean_kernel
def count_candidates(run: EngineArrays, nodes: Nodes, task: Task, allows: Ints, counts: Ints) -> None:
    """Nodes by verdict into counts (8,), in place; one node of each state stands for all but memory."""
    counts[:] = 0
    for row in range(run.scalars[0].rows):
        root = run.states[row].root
        if root < 0:
            continue
        size = run.nodes[root].tree_size
        found = node_verdict(nodes, task, allows, root)
        if found == FITS or found == MEMORY:  # noqa: PLR1714, SIM109 (a set would be made anew for each row)
            roomy = count_roomy(run.nodes, root, task.memory_bytes)
            counts[FITS] += roomy
            counts[MEMORY] += size - roomy
        else:
            counts[found] += size


class CandidateIndex:
    """The nodes of one era of a cluster under one policy."""

    def __init__(self, nodes: Nodes, mix: Mix, sorts: Ints, policy: PlacementPolicy) -> None:
        """Sorts (N,) are bits of the sorts of GPU task that a node holds, as eelgrid_kernels.engine_setup.encode_task_sorts numbers."""
        count = len(nodes.rank)
        keys = self._keys(nodes, slice(None))
        raw, width = keys.tobytes(), keys.shape[1] * keys.itemsize
        self._codes: dict[bytes, int] = {}
        first: list[int] = []
        shape = np.empty(count, np.int64)
        for row in range(count):
            code = self._codes.setdefault(raw[row * width : (row + 1) * width], len(first))
            if code == len(first):
                first.append(row)
            shape[row] = code
        there = nodes.gpu_state[first] == GPU_PLACEABLE
        model = np.where(there, nodes.gpu_model[first], -1)
        added_w = np.where(there, nodes.gpu_busy_w[first] - nodes.gpu_idle_w[first], 0.0)
        shapes = build_shapes(nodes.cpu_capacity[first], model, added_w)
        most = max(1, min(_KINDS_MOST, _KINDS_BYTES_MOST // (_KIND_BYTES * max(1, count))))
        none = np.zeros(most, np.int64)
        kinds = build_kinds(none, none, none, none, none)
        self._shape = shape
        # Ranks are made distinct, equals in order of rows.
        rank = np.argsort(np.argsort(nodes.rank, kind="stable")).astype(np.int64)
        placed = NodeColumns(self._shape, rank, nodes.memory_free.copy())
        self._families = shapes.families
        self._expected = build_expected_mix(mix, shapes.families)
        self._run = build_engine(shapes, kinds, self._expected, placed, policy)
        # Kind by what it asks for, the latest last.
        self._kinds: dict[tuple[Task, int], int] = {}
        self._turn = 0  # the kind that idle work is at
        self._counts = np.zeros(8, np.int64)
        self._adopt(nodes, np.arange(count), sorts)

    @staticmethod
    def _keys(nodes: Nodes, rows: slice) -> Ints:
        """What makes a shape, row by row."""
        watts = (nodes.gpu_idle_w[rows].view(np.int64), nodes.gpu_busy_w[rows].view(np.int64))
        columns = (nodes.cpu_capacity[rows], nodes.gpu_state[rows].astype(np.int64), nodes.gpu_model[rows], *watts)
        return np.column_stack(columns)

    def _adopt(self, nodes: Nodes, rows: Ints, sorts: Ints) -> None:
        adopt_nodes(self._run, nodes, rows, self._shape, sorts)

    def update_nodes(self, nodes: Nodes, rows: Sequence[int], sorts: Ints) -> bool:
        """Takes over rows that changed; false if one has a shape never met, so that all must be built anew."""
        reshaped = False
        for row in rows:
            code = self._codes.get(self._keys(nodes, slice(row, row + 1)).tobytes())
            if code is None:
                return False
            reshaped |= code != self._shape[row]
            self._shape[row] = code
        if reshaped:  # a GPU was lost, or came back
            before = self._scarcities()
            fill_fleet_scalars(self._run.scalars, self._run.shapes, self._shape, self._expected)
            if self._scarcities() != before:  # which the quotes in force weigh
                return False
        self._adopt(nodes, np.array(rows, np.int64), sorts)
        return True

    def _scarcities(self) -> tuple[int, int]:
        scalars = self._run.scalars[0]
        return int(scalars["block_scarcity"]), int(scalars["cpu_scarce"])

    def adopt_mix(self, nodes: Nodes, mix: Mix, sorts: Ints) -> None:
        """Takes over another mix of the same models, at a cost by states and not by nodes; quotes must follow."""
        self._expected = build_expected_mix(mix, self._families)
        self._run = replace_mix(self._run, self._expected, self._shape)
        self._adopt(nodes, np.empty(0, np.int64), sorts)

    @property
    def weights(self) -> tuple[float, ...]:
        """What each term weighs at the load of the last quotes."""
        return tuple(self._run.scalars["weights"][0, : len(TERMS)].tolist())

    def is_due(self, shifts: int) -> bool:
        """Whether offers weigh anything, and so many tasks came or left since they were quoted; -1 if never."""
        self._run.scalars["shifts"] = shifts
        return bool(are_prices_due(self._run))

    def compute_prices(self, turnover: int = 0) -> QuotedPrices:
        """Prices for the fleet as it is; turnover in thousandths."""
        quoted = np.zeros((2, self._run.classes.offers.shape[0]), np.int64)
        scarce, load = compute_prices(self._run, quoted, turnover)
        offers_w, stockouts = quoted.tolist()
        return QuotedPrices(offers_w, int(scarce), int(load), turnover, stockouts)

    def apply_prices(self, quotes: QuotedPrices) -> None:
        """Puts quotes in force; offers or stockouts that are for another mix, or none, count as 0."""
        quoted = np.zeros((2, self._run.classes.offers.shape[0]), np.int64)
        for row, values in zip(quoted, (quotes.offers_w, quotes.stockouts), strict=True):
            row[:] = values if len(values) == len(row) else 0
        apply_prices(self._run, quoted, quotes.scarce, quotes.load, quotes.turnover)

    def register_kind(self, task: Task, allows: Ints) -> int:
        """The number of a kind of task; allows (M,) is 1 for each model that it may use."""
        key = (task, encode_models(allows))
        kind = self._kinds.pop(key, None)
        if kind is None:
            kind = len(self._kinds)
            if kind == len(self._run.kinds):
                kind = self._kinds.pop(next(iter(self._kinds)))
            asked = [np.array([value], np.int64) for value in (*task, key[1])]
            self._run.kinds[kind] = build_kinds(*asked)[0]
        self._kinds[key] = kind
        return kind

    def best_candidates(self, kind: int, moment: int, most: int) -> list[NodeCandidate]:
        """The best choices on different nodes, best first; moment numbers the decisions of RANDOM, which has but one."""
        nodes = np.empty(most, np.int64)
        found = choose_nodes(self._run, kind, moment, nodes)
        return self.candidates_on(kind, nodes[:found], moment)

    def candidates_on(self, kind: int, nodes: Ints, moment: int = 0) -> list[NodeCandidate]:
        """The choice on each of these nodes, where the task fits."""
        return [self._found(kind, node, moment) for node in nodes.tolist()]

    def work_ahead(self) -> bool:
        """Idle work, less than a millisecond on 1,213 nodes: one kind catches up; false if none had anything left."""
        following = int(work_ahead(self._run, self._turn, BEHIND_LEAST, AHEAD_MOST))
        self._turn = max(0, following)
        return following >= 0

    def node_costs(self, kind: int) -> Floats:
        """What the task costs on each node (N,), infinite where it does not fit; not for RANDOM nor what is scaled."""
        run = self._run
        compute_all_costs(run, kind)
        roomy = run.nodes["memory"] >= run.kinds[kind]["memory"]
        return np.where(roomy, run.cost_index.cost[kind, run.nodes["state"]], np.inf)

    def state_numbers(self, nodes: Ints) -> Ints:
        """A number for the state of each of these nodes: those with the same one are weighed alike but for memory."""
        states: Ints = self._run.nodes["state"][nodes]
        return states

    def replica_costs(self, kind: int, nodes: Ints, most: int) -> Floats:
        """What 0, 1, 2 ... S such tasks cost on each of these nodes (len(nodes), S+1), infinite beyond its room.

        S is how many any of them holds, at most `most`; of the nodes in one state one is weighed.
        """
        run = self._run
        rows, place = np.unique(self.state_numbers(nodes), return_inverse=True)
        costs = np.empty((len(rows), most + 1))
        copies = {name: getattr(run, name)[rows] for name in ("states", "gpu_free", "distinct_slots", "usable")}
        held = compute_replica_costs(run._replace(**copies), kind, 0, costs)
        table = costs[place.reshape(-1), : held + 1]
        needed = run.kinds[kind]["memory"] * np.arange(held + 1)
        table[run.nodes["memory"][nodes, None] < needed] = np.inf
        return table

    def _found(self, kind: int, node: int, moment: int) -> NodeCandidate:
        run = self._run
        choose_gpus(run, kind, run.nodes[node]["state"], moment)
        slots = tuple(slot for slot in run.taken.tolist() if slot >= 0)
        terms = np.empty(len(TERMS))
        write_terms(run, kind, node, terms)
        return NodeCandidate(node, slots, tuple(terms.tolist()))

    def count_verdicts(self, nodes: Nodes, task: Task, allows: Ints) -> list[int]:
        """Nodes that fit, then nodes by first failing constraint in the order of CONSTRAINTS."""
        count_candidates(self._run, nodes, task, allows, self._counts)
        counts: list[int] = self._counts.tolist()
        return counts
