"""Power: prior watts and settable limits of each GPU, and the watts that the policy's budgets leave for new work.

Owns the order of sources (for watts the catalogue by key, the catalogue by name, the device's own limits, a fixed
default; for limits the driver, then the catalogue), the draw that the journal allows each node's GPUs, and the sums
below each budget. Must not know where work goes, nor how limits are chosen (objectives.power).

Prior watts. GPUs draw idle watts until any share is allocated, then full watts; CPUs are priced as packages
(eelgrid_kernels has the formulas). It is a model for comparing choices, not a measurement.

Admission. An allocated GPU may draw its power limit, or its default where none is set; an idle one its idle watts; a
lost one nothing. Work may start if the additional draw of its GPUs, at their default limits, is left in every budget
above them: its limit is lowered later, when the cost of that is known. So starting work never makes the sum of
allowed draws exceed a budget. A limit that the journal has lowered counts as before until it is read back from the
GPU: `report_limits` brings the highest limits that GPUs may still have, by workload. These reports are no events:
what is decided by them is one. After a restart the journal's limits count until the first report. Sums are in whole
milliwatts, so that they return exactly to earlier values.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import BudgetHierarchy
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import Gpu, Placement, Policy

LIMITS_WANTED = 12
_STEP_W = 25.0


class PowerLimitRange(NamedTuple):
    """The range of power limits that can be set on a GPU, in watts."""

    least_w: float
    default_w: float


def find_power_limit_range(gpu: Gpu, catalogue: Catalogue) -> PowerLimitRange | None:
    """Returns the range from the driver, else from the catalogue; None if neither has one."""
    product = catalogue.products.get(gpu.catalogue_key)
    default_w = gpu.power_limit_default_w or (product.power_default_w if product else None)
    least_w = gpu.power_limit_min_w or (product.power_min_w if product else None)
    if default_w is None or least_w is None or not 0.0 < least_w <= default_w:
        return None
    return PowerLimitRange(least_w, default_w)


def list_limit_choices(boards: Iterable[PowerLimitRange]) -> tuple[float, ...]:
    """Returns the limits to choose from, descending, in watts; the default alone if the GPUs accept no other.

    Steps are of 25 W as in Zeus's traces, or the smallest multiple of it with at most LIMITS_WANTED choices: each
    further limit must be tried.
    """
    known = list(boards)
    default_w, least_w = min(board.default_w for board in known), max(board.least_w for board in known)
    step_w = _STEP_W * max(1, math.ceil((default_w - least_w) / _STEP_W / (LIMITS_WANTED - 1)))
    count = math.floor(max(0.0, default_w - least_w) / step_w + 1e-9)
    return tuple(default_w - step_w * number for number in range(count + 1))


# For an unknown GPU: V100, the middle of the catalogue's data-centre boards.
DEFAULT_BUSY_W = 300.0
# Idle over full watts of the PWR paper's boards is between 0.10 (P100, V100) and 0.20 (A10, G2).
IDLE_SHARE = 0.1


class GpuPowerPrior(NamedTuple):
    """Idle and full watts of a GPU; `source` is catalogue, limits or default."""

    idle_w: float
    busy_w: float
    source: str


class PriorPowerModel:
    """Computes the prior watts of devices, and caches them."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def gpu(self, gpu: Gpu) -> GpuPowerPrior:
        """Returns the prior watts of one device."""
        product = self._catalogue.products.get(gpu.catalogue_key) if gpu.catalogue_key else None
        product = product or self._catalogue.find_product(gpu.product, gpu.memory_bytes or None)
        if product is not None:
            return GpuPowerPrior(product.idle_w, product.busy_w, "catalogue")
        limit_w = gpu.power_limit_default_w or gpu.power_limit_max_w
        if limit_w:
            return GpuPowerPrior(IDLE_SHARE * limit_w, limit_w, "limits")
        return GpuPowerPrior(IDLE_SHARE * DEFAULT_BUSY_W, DEFAULT_BUSY_W, "default")


_MILLI = 1000


class ExceededBudget(NamedTuple):
    """A budget that some placements would exceed."""

    budget: str
    limit_w: float
    left_w: float  # negative if it is exceeded already
    more_w: float  # additional draw of the placements below it
    replicas: int  # number of the placements below it


class _Share(NamedTuple):
    """The draw of a node, and the budgets to which it is added."""

    above: tuple[str, ...]
    milliwatts: int


class PowerAdmission:
    """Tracks the allowed draw below each budget; updated node by node by the owner of the state, idle without budgets."""

    def __init__(self, state: ClusterState, catalogue: Catalogue) -> None:
        self._state = state
        self._catalogue = catalogue
        self._model = PriorPowerModel(catalogue)
        self._policy: Policy | None = None
        self._places = BudgetHierarchy(Policy())
        self._drawn: dict[str, int] = {}  # by budget
        self._shares: dict[str, _Share] = {}  # by node
        self._still_w: dict[str, float] = {}  # by workload, where it exceeds the journal's limit
        # By model: the least additional draw of a GPU once it is allocated, in watts.
        self._least_w: dict[str, float] = {}
        self.refresh(())

    @property
    def has_budgets(self) -> bool:
        """Returns whether there is any budget."""
        return bool(self._places.limits_w)

    def refresh(self, names: Iterable[str]) -> None:
        """Recounts these nodes; all of them if the budgets have changed."""
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
        """Records a changed limit of a workload; `before_w` may be in force until the new limit is read back."""
        old_w = math.inf if before_w is None else before_w
        self._still_w[workload_id] = max(old_w, self._still_w.get(workload_id, 0.0))
        if len(self._still_w) > len(self._state.workloads):
            # Without budgets no limits are reported, so entries of ended workloads would accumulate.
            self._still_w = {key: still_w for key, still_w in self._still_w.items() if key in self._state.workloads}

    def report_limits(self, highest_w: Mapping[str, float]) -> bool:
        """Sets the highest limits read back, by workload, where above the journal's; returns whether watts were freed."""
        before = dict(self._drawn)
        changed = self._still_w.keys() | highest_w.keys()
        self._still_w = dict(highest_w)
        known = [found for key in changed if (found := self._state.workloads.get(key)) is not None]
        self.refresh({placement.node_name for workload in known for placement in workload.placements})
        return any(self._drawn[key] < drawn for key, drawn in before.items())

    def left_w(self, budget: str) -> float:
        """Returns the watts that a budget leaves; negative if it is exceeded."""
        return self._places.limits_w[budget] - self._drawn[budget] / _MILLI

    def budgets_above(self, node_name: str) -> tuple[str, ...]:
        """Returns the budgets above a node, the nearest first."""
        share = self._shares.get(node_name)
        return () if share is None else share.above

    def list_exceeded_budgets(
        self, placements: Sequence[Placement], altered: Mapping[str, NodeRecord] = MappingProxyType({})
    ) -> list[ExceededBudget]:
        """Returns the budgets that these placements would exceed, the nearest to their nodes first.

        `altered` are records that nodes would have by then.
        """
        freed: dict[str, int] = {}
        for name, record in altered.items():
            share = self._shares[name]
            for key in share.above:
                freed[key] = freed.get(key, 0) + share.milliwatts - sum(watts for _, watts in self._draws(record))
        more: dict[str, int] = {}
        below: dict[str, int] = {}
        taken: set[str] = set()
        draws: dict[str, Mapping[str, int]] = {}
        for placement in placements:
            record = altered.get(placement.node_name) or self._state.nodes[placement.node_name]
            drawn = draws.setdefault(placement.node_name, dict(self._draws(record)))
            fresh = set(placement.gpu_uuids) - taken
            taken |= fresh
            added = sum(
                max(0, self._default(gpu) - drawn[gpu.uuid]) for gpu in record.inventory.gpus if gpu.uuid in fresh
            )
            for key in self._shares[placement.node_name].above:
                more[key] = more.get(key, 0) + added
                below[key] = below.get(key, 0) + 1
        found = []
        for key, added in more.items():
            limit_w, back = self._places.limits_w[key], freed.get(key, 0)
            if added > 0 and self._drawn[key] - back + added > limit_w * _MILLI:
                left_w = self.left_w(key) + back / _MILLI
                found.append(ExceededBudget(key, limit_w, left_w, added / _MILLI, below[key]))
        return found

    def list_exhausted_budgets(self, gpu_count: int, models: Sequence[str]) -> set[str]:
        """Returns budgets that leave too little for `gpu_count` more idle GPUs of any of these models to be allocated."""
        known = [watts for model, watts in self._least_w.items() if not models or model in models]
        least_w = gpu_count * min(known, default=0.0)
        return {key for key in self._places.limits_w if self.left_w(key) < least_w - 0.5 / _MILLI}

    def _remove_node(self, name: str) -> None:
        """Subtracts the draw of a node."""
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
        """Yields UUID and allowed draw, in milliwatts, of each GPU of the inventory."""
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
