"""Power admission: the watts that the policy's power budgets leave for work that is about to begin.

Owns the draw that the journal allows each node's GPUs, and the sums below each budget. Must not know where
work goes, nor how limits are chosen (objectives.power).

Theory. An allocated GPU may draw its power limit, or its default where none is set; an idle one its idle
watts; a lost one nothing. Work may begin where all that its GPUs may draw in addition, at their defaults, is
left in every budget above them: its limit is lowered later, when the cost of that is known. So the sum of what
may be drawn never passes a budget by work that begins. A limit that the journal has lowered counts as before
until the GPU is read to have it: `report_limits` brings the highest limits that GPUs may still have, by workload.
These reports are no events: what is decided by them is one. After a restart the journal's limits count until
the first report. Sums are in whole milliwatts, so that they return to what they were.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.placement.gpu_power import PriorPowerModel, find_power_limit_range
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import BudgetHierarchy
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import Gpu, Placement, Policy

_MILLI = 1000


class ExceededBudget(NamedTuple):
    """A budget that some placements would pass."""

    budget: str
    limit_w: float
    left_w: float  # less than nothing where it is passed already
    more_w: float  # what they would draw there in addition
    replicas: int  # of theirs that stand below it


class _Share(NamedTuple):
    """What a node counts for, and where."""

    above: tuple[str, ...]
    milliwatts: int


class PowerAdmission:
    """Kept up to date node by node, by the owner of the state; nothing to do while there are no budgets."""

    def __init__(self, state: ClusterState, catalogue: Catalogue) -> None:
        self._state = state
        self._catalogue = catalogue
        self._model = PriorPowerModel(catalogue)
        self._policy: Policy | None = None
        self._places = BudgetHierarchy(Policy())
        self._drawn: dict[str, int] = {}  # by budget
        self._shares: dict[str, _Share] = {}  # by node
        self._still_w: dict[str, float] = {}  # by workload, where that is above the journal's limit
        # Least watts that a GPU of a model draws more once it is held.
        self._least_w: dict[str, float] = {}
        self.refresh(())

    @property
    def has_budgets(self) -> bool:
        """Whether there is any budget."""
        return bool(self._places.limits_w)

    def refresh(self, names: Iterable[str]) -> None:
        """Counts these nodes anew; all of them after other budgets."""
        policy = self._state.policy
        if policy is not self._policy:
            is_other = self._policy is None or policy.budgets != self._policy.budgets
            self._policy = policy
            if is_other:
                self._places = BudgetHierarchy(policy)
                self._drawn = dict.fromkeys(self._places.limits_w, 0)
                self._shares, self._least_w = {}, {}
                names = self._state.nodes
        if self.has_budgets:
            for name in names:
                if name in self._state.nodes:
                    self._count(self._state.nodes[name])
                else:
                    self._remove_node(name)

    def record_lowered_limit(self, workload_id: str, before_w: float | None) -> None:
        """The journal has another limit for a workload: until somebody reads it, the one before may be in force."""
        old_w = math.inf if before_w is None else before_w
        self._still_w[workload_id] = max(old_w, self._still_w.get(workload_id, 0.0))
        if len(self._still_w) > len(self._state.workloads):
            # Where there are no budgets nobody tells what was read, and work that ended would stay here for ever.
            self._still_w = {key: still_w for key, still_w in self._still_w.items() if key in self._state.workloads}

    def report_limits(self, highest_w: Mapping[str, float]) -> bool:
        """The highest limits of GPUs as read, by workload, where they are above the journal's; whether watts came free."""
        before = dict(self._drawn)
        changed = self._still_w.keys() | highest_w.keys()
        self._still_w = dict(highest_w)
        known = [found for key in changed if (found := self._state.workloads.get(key)) is not None]
        self.refresh({placement.node_name for workload in known for placement in workload.placements})
        return any(self._drawn[key] < drawn for key, drawn in before.items())

    def left_w(self, budget: str) -> float:
        """What a budget leaves; less than nothing where it is passed."""
        return self._places.limits_w[budget] - self._drawn[budget] / _MILLI

    def budgets_above(self, node_name: str) -> tuple[str, ...]:
        """The budgets that a node draws from, the nearest first."""
        share = self._shares.get(node_name)
        return () if share is None else share.above

    def list_exceeded_budgets(self, placements: Sequence[Placement]) -> list[ExceededBudget]:
        """The budgets that these placements would pass, the nearest to their nodes first."""
        more: dict[str, int] = {}
        below: dict[str, int] = {}
        taken: set[str] = set()
        draws: dict[str, Mapping[str, int]] = {}
        for placement in placements:
            record = self._state.nodes[placement.node_name]
            drawn = draws.setdefault(placement.node_name, dict(self._draws(record)))
            fresh = set(placement.gpu_uuids) - taken
            taken |= fresh
            added = sum(
                max(0, self._default(gpu) - drawn[gpu.uuid]) for gpu in record.inventory.gpus if gpu.uuid in fresh
            )
            for key in self._shares[placement.node_name].above:
                more[key] = more.get(key, 0) + added
                below[key] = below.get(key, 0) + 1
        return [
            ExceededBudget(key, self._places.limits_w[key], self.left_w(key), added / _MILLI, below[key])
            for key, added in more.items()
            if added > 0 and self._drawn[key] + added > self._places.limits_w[key] * _MILLI
        ]

    def list_exhausted_budgets(self, gpu_count: int, models: Sequence[str]) -> set[str]:
        """The budgets that leave less than so many idle GPUs of any of these models would draw more."""
        known = [watts for model, watts in self._least_w.items() if not models or model in models]
        least_w = gpu_count * min(known, default=0.0)
        return {key for key in self._places.limits_w if self.left_w(key) < least_w - 0.5 / _MILLI}

    def _remove_node(self, name: str) -> None:
        """What a node counted for counts no more."""
        old = self._shares.pop(name, _Share((), 0))
        for key in old.above:
            self._drawn[key] -= old.milliwatts

    def _count(self, record: NodeRecord) -> None:
        name = record.inventory.node_name
        self._remove_node(name)
        for gpu in record.inventory.gpus:
            more_w = (self._default(gpu) - self._idle(gpu)) / _MILLI
            self._least_w[gpu.model] = min(more_w, self._least_w.get(gpu.model, more_w))
        share = self._shares[name] = _Share(
            self._places.budgets_above(record.inventory), sum(watts for _, watts in self._draws(record))
        )
        for key in share.above:
            self._drawn[key] += share.milliwatts

    def _draws(self, record: NodeRecord) -> Iterable[tuple[str, int]]:
        """What each GPU of the inventory may draw, in milliwatts."""
        limits_w: dict[str, float] = {}
        for item in record.assignments.values():
            limit_w = self._limit_w(item.workload_id)
            for uuid in item.gpu_uuids:
                limits_w[uuid] = max(limit_w, limits_w.get(uuid, 0.0))
        for uuid in record.externally_used_gpus():
            limits_w[uuid] = math.inf
        for gpu in record.inventory.gpus:
            if gpu.lost or gpu.uuid in record.lost_gpus:
                yield gpu.uuid, 0
            elif gpu.uuid in limits_w:
                yield gpu.uuid, min(self._default(gpu), math.ceil(min(limits_w[gpu.uuid], 1e9) * _MILLI))
            else:
                yield gpu.uuid, self._idle(gpu)

    def _limit_w(self, workload_id: str) -> float:
        limit_w = self._state.workloads[workload_id].power_limit_w
        return math.inf if limit_w is None else max(limit_w, self._still_w.get(workload_id, 0.0))

    def _default(self, gpu: Gpu) -> int:
        board = find_power_limit_range(gpu, self._catalogue)
        default_w = board.default_w if board is not None else gpu.power_limit_max_w or self._model.gpu(gpu).busy_w
        return math.ceil(default_w * _MILLI)

    def _idle(self, gpu: Gpu) -> int:
        return min(self._default(gpu), math.ceil(self._model.gpu(gpu).idle_w * _MILLI))
