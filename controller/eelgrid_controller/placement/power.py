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
GPU, and so does the limit of work that came to other GPUs with it, by a move or by growth: `report_limits` brings the
highest limits that GPUs may still have, by workload. These reports are no events:
what is decided by them is one. After a restart the journal's limits count until the first report. Sums are in whole
milliwatts, so that they return exactly to earlier values.

A node's own budget is kept by its agent, from its own measurements within a second, where the agent sets limits in an
enforced pool (`find_kept_budget_w`). So such a node counts with no more than its budget in those above it; and work that
its budget could never hold at default limits, whatever else ran there, starts where it can have at least the lowest
ones: it would wait forever, and the agent divides the watts.

Where a rack's or the cluster's budget could never hold work's default limits, nobody would lower them in time. Work whose
processes an agent starts may still start there (`find_start_limit`): at the highest limit that every budget has left,
which the agent sets and reads back before it starts them (`Workload.limit_before_start`). So it counts with its limit
from the first moment, on whatever GPUs it comes to.

Changes of running work (moves, partitions) are tried on copies of nodes (`PowerTrial`), and may not exceed a budget
that they draw more of than before. A search for moves takes a copy of what budgets leave (`PowerSurvey`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eelgrid_controller.state.attempts import awaits_limit
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import (
    BudgetHierarchy,
    describe_budget,
    get_node_budgets_w,
    is_pool_enforced,
    make_budget_key,
)
from eelgrid_kernels.arrays import BudgetArrays
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import (
    BudgetScope,
    Gpu,
    Inventory,
    NodeState,
    Placement,
    Policy,
    ResourceRequest,
    Workload,
    resolve_pool,
)

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
_NODE_KEY = make_budget_key(BudgetScope.NODE, "")
# More than any GPU draws.
_UNLIMITED_W = 1e9
_NO_REPLICAS: Collection[tuple[str, int]] = frozenset()


def _may_change(policy: Policy, record: NodeRecord, enforced: Collection[str]) -> bool:
    """Returns whether a node's agent is there and may change it; `enforced` are pools to be thought of as enforced.

    Of a lost node it is not known whether its agent runs.
    """
    pool = record.inventory.pool
    is_enforced = is_pool_enforced(policy, pool) or resolve_pool(pool) in enforced
    return is_enforced and record.state is NodeState.READY


def _tells_limits(gpu: Gpu) -> bool:
    """Returns whether a GPU's driver says which power limits it takes."""
    return gpu.power_limit_min_w is not None and gpu.power_limit_max_w is not None


def find_kept_budget_w(policy: Policy, record: NodeRecord, enforced: Collection[str] = ()) -> float | None:
    """Returns the budget that the node's agent keeps by itself, in watts; None if it has none, or cannot lower each GPU.

    `enforced` are pools to be thought of as enforced.
    """
    inventory = record.inventory
    limit_w = get_node_budgets_w(policy).get(inventory.node_name)
    if limit_w is None or not inventory.sets_limits or not _may_change(policy, record, enforced):
        return None
    return limit_w if all(gpu.lost or _tells_limits(gpu) for gpu in inventory.gpus) else None


class ExceededBudget(NamedTuple):
    """A budget that some placements would exceed."""

    budget: str
    limit_w: float
    left_w: float  # negative if it is exceeded already
    more_w: float  # additional draw of the placements, or of the changed nodes, below it
    replicas: int  # number of the placements below it; 0 for changed nodes


class StartLimit(NamedTuple):
    """The limit of each GPU at which work may start below its default limits, and the budgets in the way of any."""

    limit_w: float | None
    blocking: list[ExceededBudget]


class PowerShare(NamedTuple):
    """What the GPUs of a node may draw, the budgets above it, and the budget that its agent keeps."""

    above: tuple[str, ...]
    milliwatts: int
    kept_mw: int | None = None
    idle_mw: int = 0  # what they draw while nothing holds them

    def counted_mw(self, budget: str, milliwatts: int | None = None) -> int:
        """Returns what counts of the node, or of it with another draw, in a budget above it."""
        draw_mw = self.milliwatts if milliwatts is None else milliwatts
        return draw_mw if self.kept_mw is None or budget.startswith(_NODE_KEY) else min(draw_mw, self.kept_mw)


class _Coming(NamedTuple):
    """The GPUs of a node that work would take, and what each GPU there may draw before that, in milliwatts."""

    record: NodeRecord
    share: PowerShare
    gpus: Sequence[Gpu]
    drawn: Mapping[str, int]
    replicas: int

    def count_rise_mw(self, budget: str, draw_mw: Callable[[Gpu], int], then: PowerShare | None = None) -> int:
        """Returns how much more counts in a budget if each GPU may draw so much; `then` is the node's share by then."""
        before_mw = sum(self.drawn.values())
        after_mw = before_mw + sum(max(0, draw_mw(gpu) - self.drawn[gpu.uuid]) for gpu in self.gpus)
        return (then or self.share).counted_mw(budget, after_mw) - self.share.counted_mw(budget, before_mw)


_NO_SHARE = PowerShare((), 0)


class PowerSurvey(NamedTuple):
    """What budgets leave at one moment, for a search in another thread."""

    left_mw: Mapping[str, int]  # by budget, negative where it is exceeded
    shares: Sequence[PowerShare]  # of each node
    inventories: Sequence[Inventory]
    still_w: Mapping[str, float]  # limits that may still be in force, by workload
    unset: Collection[tuple[str, int]]  # workloads and replicas whose limits are not set yet
    catalogue: Catalogue

    def build_arrays(
        self, slots: Sequence[Sequence[str]], width: int, held: Iterable[tuple[int, Workload, Placement]]
    ) -> BudgetArrays:
        """Returns arrays for the search; `slots` are the GPUs of each node, `held` what may move from which row."""
        numbers = {key: number for number, key in enumerate(self.left_mw)}
        levels = max((len(share.above) for share in self.shares), default=0)
        boards = GpuDraws(self.catalogue)
        found = BudgetArrays(
            left_mw=np.array([*self.left_mw.values()], np.int64),
            above=np.full((len(slots), levels), -1, np.int64),
            rise_mw=np.zeros((len(slots), width), np.int64),
            fall_mw=np.zeros((len(slots), width), np.int64),
        )
        for row, share in enumerate(self.shares):
            found.above[row, : len(share.above)] = [numbers[key] for key in share.above]
            gpus = {gpu.uuid: gpu for gpu in self.inventories[row].gpus} if share.above else {}
            for slot, uuid in enumerate(slots[row]):
                if uuid in gpus:
                    found.rise_mw[row, slot] = boards.rise_mw(gpus[uuid])
        for row, workload, place in held:
            share = self.shares[row]
            if share.kept_mw is not None and share.milliwatts > share.kept_mw:
                continue  # others on the node may draw what it leaves
            is_set = (workload.workload_id, place.replica) not in self.unset
            limit_w = find_limit_w(workload, self.still_w) if is_set else math.inf
            for gpu in self.inventories[row].gpus if share.above else ():
                if gpu.uuid in place.gpu_uuids:
                    fall_mw = boards.allocated_mw(gpu, limit_w) - boards.idle_mw(gpu)
                    found.fall_mw[row, slots[row].index(gpu.uuid)] = fall_mw
        return found


def find_limit_w(workload: Workload, still_w: Mapping[str, float]) -> float:
    """Returns the highest limit that may be in force on a workload's GPUs; infinite for their default."""
    limit_w = workload.power_limit_w
    return math.inf if limit_w is None else max(limit_w, still_w.get(workload.workload_id, 0.0))


class GpuDraws:
    """What single GPUs may draw, in whole milliwatts."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._model = PriorPowerModel(catalogue)

    def default_mw(self, gpu: Gpu) -> int:
        """Returns its draw at its default limit."""
        board = find_power_limit_range(gpu, self._catalogue)
        default_w = board.default_w if board is not None else gpu.power_limit_max_w or self._model.gpu(gpu).busy_w
        return math.ceil(default_w * _MILLI)

    def idle_mw(self, gpu: Gpu) -> int:
        """Returns its draw while nothing holds it."""
        return min(self.default_mw(gpu), math.ceil(self._model.gpu(gpu).idle_w * _MILLI))

    def rise_mw(self, gpu: Gpu) -> int:
        """Returns how much more it draws once it is allocated."""
        return self.default_mw(gpu) - self.idle_mw(gpu)

    def lowest_mw(self, gpu: Gpu) -> int:
        """Returns its draw at the lowest limit that can be set."""
        board = find_power_limit_range(gpu, self._catalogue)
        return self.default_mw(gpu) if board is None else math.ceil(board.least_w * _MILLI)

    def allocated_mw(self, gpu: Gpu, limit_w: float) -> int:
        """Returns its draw under a power limit."""
        return min(self.default_mw(gpu), math.ceil(min(limit_w, _UNLIMITED_W) * _MILLI))


class _ModelRises(NamedTuple):
    """How much more GPUs of a model draw once allocated, in watts: the least, the most, the least at the lowest limit."""

    least_w: float
    most_w: float
    lowest_w: float


class PowerAdmission:
    """Tracks the allowed draw below each budget; updated node by node by the owner of the state, idle without budgets."""

    def __init__(self, state: ClusterState, catalogue: Catalogue) -> None:
        self._state = state
        self._catalogue = catalogue
        self._boards = GpuDraws(catalogue)
        self._policy: Policy | None = None
        self._places = BudgetHierarchy(Policy())
        self._drawn: dict[str, int] = {}  # by budget
        self._idle: dict[str, int] = {}  # by budget: what counts in it while nothing holds a GPU
        self._shares: dict[str, PowerShare] = {}  # by node
        # By node: the inventory and the lost GPUs for which its idle draw was summed.
        self._idle_of: dict[str, tuple[Inventory, frozenset[str], int]] = {}
        self._still_w: dict[str, float] = {}  # by workload, where it exceeds the journal's limit
        # By node: workloads with a limit, with their replicas and GPUs.
        self._limited: dict[str, frozenset[tuple[str, int, tuple[str, ...]]]] = {}
        # Workloads and replicas that came to other GPUs since limits were read back, which is every few seconds.
        self._unset: set[tuple[str, int]] = set()
        # By model: the additional draws of a GPU once it is allocated.
        self._rises: dict[str, _ModelRises] = {}
        # Nodes whose agents set limits before they start processes.
        self._limiting: set[str] = set()
        self.refresh(())

    @property
    def has_budgets(self) -> bool:
        """Returns whether there is any budget."""
        return bool(self._places.limits_w)

    def refresh(self, names: Iterable[str]) -> None:
        """Recounts these nodes; all of them if the budgets have changed."""
        policy = self._state.policy
        if policy is not self._policy:
            before = Policy() if self._policy is None else self._policy
            # Whether nodes keep their budgets depends on their pools.
            is_other = (policy.budgets, policy.pools) != (before.budgets, before.pools)
            self._policy = policy
            if is_other:
                self._places = BudgetHierarchy(policy)
                self._drawn, self._idle = (dict.fromkeys(self._places.limits_w, 0) for _ in range(2))
                self._shares, self._limited, self._limiting = {}, {}, set()
                self._rises, self._idle_of = {}, {}
                names = self._state.nodes
        if self.has_budgets:
            for name in names:
                if name in self._state.nodes:
                    self._count(self._state.nodes[name])
                else:
                    self._limited.pop(name, None)
                    self._idle_of.pop(name, None)
                    self._limiting.discard(name)
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
        changed = self._still_w.keys() | highest_w.keys() | {workload_id for workload_id, _ in self._unset}
        self._still_w = dict(highest_w)
        self._unset.clear()
        known = [found for key in changed if (found := self._state.workloads.get(key)) is not None]
        self.refresh({placement.node_name for workload in known for placement in workload.placements})
        return any(self._drawn[key] < drawn for key, drawn in before.items())

    def left_w(self, budget: str) -> float:
        """Returns the watts that a budget leaves; negative if it is exceeded."""
        return self._places.limits_w[budget] - self._drawn[budget] / _MILLI

    def budgets_above(self, node_name: str) -> tuple[str, ...]:
        """Returns the budgets above a node, the nearest first."""
        return self.find_share(node_name).above

    def list_exceeded_budgets(
        self,
        placements: Sequence[Placement],
        altered: Mapping[str, NodeRecord] = MappingProxyType({}),
        enforced: Collection[str] = (),
    ) -> list[ExceededBudget]:
        """Returns the budgets that these placements would exceed, the nearest to their nodes first.

        `altered` are records that nodes would have by then, and `enforced` pools that would be enforced.
        """
        trial = PowerTrial(self)
        trial.alter(altered.values())
        more: dict[str, int] = {}
        below: dict[str, int] = {}
        kept: set[str] = set()
        for coming in self._list_coming(placements, altered):
            record, share = coming.record, coming.share
            then = share._replace(kept_mw=self._find_kept_mw(record, enforced)) if enforced else share
            for key in share.above:
                more[key] = more.get(key, 0) + coming.count_rise_mw(key, self._boards.default_mw, then)
                below[key] = below.get(key, 0) + coming.replicas
            if then.kept_mw is not None and self._fits_below_default(record, then.kept_mw, coming.gpus, coming.drawn):
                kept.add(share.above[0])
        found = []
        for key, added in more.items():
            lack = self.find_excess(key, added, altered_mw=trial.more_mw.get(key, 0))
            if lack is not None and key not in kept:
                found.append(lack._replace(replicas=below[key]))
        return found

    def find_start_limit(
        self,
        placements: Sequence[Placement],
        lacks: Sequence[ExceededBudget],
        altered: Mapping[str, NodeRecord] = MappingProxyType({}),
        enforced: Collection[str] = (),
    ) -> StartLimit:
        """Finds the highest power limit at which the placements exceed none of the budgets that they lack.

        It is the highest at which those hold them that never hold their default limits. The others must hold it, too; and so
        must each agent there set limits before it starts processes, and the GPUs have limits in common. What does not is in
        the way.
        """
        comings = list(self._list_coming(placements, altered))
        boards = [find_power_limit_range(gpu, self._catalogue) for coming in comings for gpu in coming.gpus]
        known = [board for board in boards if board is not None]
        sets_all = all(
            self._sets_limits_first(coming.record, enforced) and all(map(_tells_limits, coming.gpus))
            for coming in comings
        )
        never = [lack for lack in lacks if not self._may_hold_default(comings, lack)]
        has_range = bool(known) and max(one.least_w for one in known) <= min(one.default_w for one in known)
        if not has_range or len(known) < len(boards) or not sets_all or not never:
            return StartLimit(None, list(lacks))
        trial = PowerTrial(self)
        trial.alter(altered.values())

        def list_exceeded(some: Iterable[ExceededBudget], limit_w: float) -> list[ExceededBudget]:
            draw_mw = partial(self._boards.allocated_mw, limit_w=limit_w)
            return [
                lack
                for lack in some
                if self.find_excess(
                    lack.budget,
                    sum(one.count_rise_mw(lack.budget, draw_mw) for one in comings if lack.budget in one.share.above),
                    altered_mw=trial.more_mw.get(lack.budget, 0),
                )
            ]

        *higher, lowest_w = list_limit_choices(known)
        blocking = list_exceeded(never, lowest_w)
        if blocking:
            return StartLimit(None, blocking)
        limit_w = next((limit_w for limit_w in higher if not list_exceeded(never, limit_w)), lowest_w)
        blocking = list_exceeded(lacks, limit_w)
        return StartLimit(None if blocking else limit_w, blocking)

    def holds(self, placements: Sequence[Placement], limit_w: float | None, altered: Mapping[str, NodeRecord]) -> bool:
        """Returns whether placements exceed no budget, once nodes are so altered, at the power limit at which they start."""
        lacks = self.list_exceeded_budgets(placements, altered) if self.has_budgets else []
        if not lacks or limit_w is None:
            return not lacks
        highest_w = self.find_start_limit(placements, lacks, altered).limit_w
        return highest_w is not None and highest_w >= limit_w

    def _list_coming(self, placements: Sequence[Placement], altered: Mapping[str, NodeRecord]) -> Iterator[_Coming]:
        """Yields the nodes of placements with the GPUs that they take there."""
        by_node: dict[str, list[Placement]] = {}
        for placement in placements:
            by_node.setdefault(placement.node_name, []).append(placement)
        for name, here in by_node.items():
            record = altered.get(name) or self._state.nodes[name]
            taken = {uuid for placement in here for uuid in placement.gpu_uuids}
            gpus = [gpu for gpu in record.inventory.gpus if gpu.uuid in taken]
            yield _Coming(record, self._shares[name], gpus, dict(self._draws(record)), len(here))

    def _sets_limits_first(self, record: NodeRecord, enforced: Collection[str] = ()) -> bool:
        """Returns whether a node's agent sets limits before it starts processes."""
        return record.inventory.limits_before_starts and _may_change(self._state.policy, record, enforced)

    def _may_hold_default(self, comings: Iterable[_Coming], lack: ExceededBudget) -> bool:
        """Returns whether a budget would hold the default limits of these GPUs if nothing else ran below it."""
        alone_mw = self._idle[lack.budget]
        for coming in comings:
            share = coming.share
            if lack.budget in share.above:
                rise_mw = sum(map(self._boards.rise_mw, coming.gpus))
                alone_mw += share.counted_mw(lack.budget, share.idle_mw + rise_mw)
                alone_mw -= share.counted_mw(lack.budget, share.idle_mw)
        return alone_mw <= lack.limit_w * _MILLI

    def _find_kept_mw(self, record: NodeRecord, enforced: Collection[str] = ()) -> int | None:
        """Returns the budget that a node's agent keeps, if these pools were enforced as well."""
        kept_w = find_kept_budget_w(self._state.policy, record, enforced)
        return None if kept_w is None else math.floor(kept_w * _MILLI)

    def _fits_below_default(
        self, record: NodeRecord, kept_mw: int, gpus: Sequence[Gpu], drawn: Mapping[str, int]
    ) -> bool:
        """Returns whether a node's budget never holds these GPUs at their default limits, but now at their lowest."""
        boards, taken = self._boards, {gpu.uuid for gpu in gpus}
        alone_mw = self._sum_idle_mw(record) + sum(map(boards.rise_mw, gpus))
        others_mw = sum(drawn_mw for uuid, drawn_mw in drawn.items() if uuid not in taken)
        return alone_mw > kept_mw >= others_mw + sum(map(boards.lowest_mw, gpus))

    def _sum_idle_mw(self, record: NodeRecord) -> int:
        """Returns what a node's GPUs draw while nothing holds them; of those that are not lost."""
        inventory, lost = record.inventory, frozenset(record.lost_gpus)
        known = self._idle_of.get(inventory.node_name)
        if known is None or known[0] is not inventory or known[1] != lost:
            there = (gpu for gpu in inventory.gpus if not gpu.lost and gpu.uuid not in lost)
            known = self._idle_of[inventory.node_name] = inventory, lost, sum(map(self._boards.idle_mw, there))
        return known[2]

    def find_share(self, name: str) -> PowerShare:
        """Returns what a node's GPUs may draw, and the budgets above it."""
        return self._shares.get(name, _NO_SHARE)

    def sum_draw_mw(self, record: NodeRecord, at_default: Collection[tuple[str, int]]) -> int:
        """Returns what a node's GPUs may draw; `at_default` are workloads and replicas whose limits are not set yet."""
        return sum(watts for _, watts in self._draws(record, at_default))

    def find_excess(self, budget: str, more_mw: int, *, altered_mw: int = 0) -> ExceededBudget | None:
        """Returns by how much a budget would be exceeded if so much more were drawn; None if it would not.

        `altered_mw` is what is drawn more before that.
        """
        limit_w = self._places.limits_w[budget]
        if more_mw <= 0 or self._drawn[budget] + altered_mw + more_mw <= limit_w * _MILLI:
            return None
        return ExceededBudget(budget, limit_w, self.left_w(budget) - altered_mw / _MILLI, more_mw / _MILLI, 0)

    def survey(self, names: Iterable[str]) -> PowerSurvey | None:
        """Copies what the budgets of these nodes leave; None without budgets."""
        if not self.has_budgets:
            return None
        known = list(names)
        return PowerSurvey(
            left_mw={
                key: math.floor(limit_w * _MILLI) - self._drawn[key] for key, limit_w in self._places.limits_w.items()
            },
            shares=list(map(self._shares.__getitem__, known)),
            inventories=list(map(attrgetter("inventory"), map(self._state.nodes.__getitem__, known))),
            still_w=dict(self._still_w),
            unset=frozenset(self._unset),
            catalogue=self._catalogue,
        )

    def list_exhausted_budgets(self, gpu_count: int, models: Sequence[str]) -> set[str]:
        """Returns budgets that leave too little for `gpu_count` more idle GPUs of any of these models to be allocated."""
        least_w = gpu_count * min((rises.least_w for rises in self._list_rises(models)), default=0.0)
        return {key for key in self._list_short(least_w) if not self._may_fit_below_default(key, gpu_count, models)}

    def list_limiting_nodes(
        self, request: ResourceRequest, replicas: int, altered: Mapping[str, NodeRecord] = MappingProxyType({})
    ) -> set[str]:
        """Returns the nodes on which work on whole GPUs may start at a lower limit, as far as budgets tell by themselves.

        Agents there set limits before starts, each budget above leaves enough for the lowest limits of one replica, and not
        all of them would hold its default limits if nothing else ran. `altered` are records that nodes would have by then.
        """
        trial = PowerTrial(self)
        trial.alter(altered.values())
        rises, above_all = list(self._list_rises(request.gpu_models)), self._places.limits_w
        lowest_w = request.gpu_count * min((one.lowest_w for one in rises), default=0.0)
        most_w = request.gpu_count * replicas * max((one.most_w for one in rises), default=0.0)
        spent = self._list_short(lowest_w, trial.more_mw)
        holding = {key for key, limit_w in above_all.items() if self._idle[key] / _MILLI + most_w <= limit_w}
        if len(holding) == len(above_all):
            return set()

        def may_limit(above: tuple[str, ...]) -> bool:
            # Of several replicas one may be below a budget that never holds them, and another is not.
            return spent.isdisjoint(above) and (replicas > 1 or not holding.issuperset(above))

        found = {above: may_limit(above) for above in {share.above for share in self._shares.values()}}
        return {name for name in self._limiting if found[self._shares[name].above]}

    def _list_rises(self, models: Sequence[str]) -> Iterator[_ModelRises]:
        """Yields the draws of these models, of all if none is named."""
        return (rises for model, rises in self._rises.items() if not models or model in models)

    def _list_short(self, least_w: float, more_mw: Mapping[str, int] = MappingProxyType({})) -> set[str]:
        """Returns the budgets that leave less, if so much more is drawn below them."""
        left_w = {key: self.left_w(key) - more_mw.get(key, 0) / _MILLI for key in self._places.limits_w}
        return {key for key, watts in left_w.items() if watts < least_w - 0.5 / _MILLI}

    def _may_fit_below_default(self, budget: str, gpu_count: int, models: Sequence[str]) -> bool:
        """Returns whether a budget is that of a node on which so many idle GPUs could be allocated below their default."""
        name = budget.removeprefix(_NODE_KEY)
        share, record = self.find_share(name), self._state.nodes.get(name)
        if share.kept_mw is None or record is None:
            return False
        boards = self._boards
        most_mw = max(map(boards.rise_mw, record.inventory.gpus), default=0)
        if share.idle_mw + gpu_count * most_mw <= share.kept_mw:
            return False
        drawn = dict(self._draws(record))
        idle = [
            gpu
            for gpu in record.inventory.gpus
            if (not models or gpu.model in models) and drawn[gpu.uuid] <= boards.idle_mw(gpu)
        ]
        return len(idle) >= gpu_count and self._fits_below_default(record, share.kept_mw, idle[:gpu_count], drawn)

    def _remove_node(self, name: str) -> None:
        """Subtracts the draw of a node."""
        old = self._shares.pop(name, _NO_SHARE)
        for key in old.above:
            self._drawn[key] -= old.counted_mw(key)
            self._idle[key] -= old.counted_mw(key, old.idle_mw)

    def _count(self, record: NodeRecord) -> None:
        name = record.inventory.node_name
        self._find_new_places(record)
        (self._limiting.add if self._sets_limits_first(record) else self._limiting.discard)(name)
        self._remove_node(name)
        if name not in self._idle_of or self._idle_of[name][0] is not record.inventory:
            self._note_rises(record.inventory)
        share = self._shares[name] = PowerShare(
            self._places.budgets_above(record.inventory),
            self.sum_draw_mw(record, _NO_REPLICAS),
            self._find_kept_mw(record),
            self._sum_idle_mw(record),
        )
        for key in share.above:
            self._drawn[key] += share.counted_mw(key)
            self._idle[key] += share.counted_mw(key, share.idle_mw)

    def _note_rises(self, inventory: Inventory) -> None:
        """Notes by how much the GPUs of a node that is new or changed would rise, by model."""
        for gpu in inventory.gpus:
            rise_w, idle_mw = self._boards.rise_mw(gpu) / _MILLI, self._boards.idle_mw(gpu)
            lowest_w = max(0, self._boards.lowest_mw(gpu) - idle_mw) / _MILLI
            known = self._rises.get(gpu.model, _ModelRises(rise_w, rise_w, lowest_w))
            self._rises[gpu.model] = _ModelRises(
                min(rise_w, known.least_w), max(rise_w, known.most_w), min(lowest_w, known.lowest_w)
            )

    def _find_new_places(self, record: NodeRecord) -> None:
        """Notes the replicas with a limit that have other GPUs than before: its default holds until it is read back.

        Not of those whose processes start only then, whatever limits were in force in their run before.
        """
        name, workloads = record.inventory.node_name, self._state.workloads
        limited = frozenset(
            (item.workload_id, item.replica, item.gpu_uuids)
            for item in record.assignments.values()
            if workloads[item.workload_id].power_limit_w is not None
        )
        # What a node holds when it is first looked at has had its limits before.
        for key, replica, _ in limited - self._limited.get(name, limited):
            if awaits_limit(workloads[key]):
                self._still_w.pop(key, None)
                self._unset.discard((key, replica))
            elif not workloads[key].limit_before_start:
                self._unset.add((key, replica))
        self._limited[name] = limited

    def _draws(
        self, record: NodeRecord, at_default: Collection[tuple[str, int]] = _NO_REPLICAS
    ) -> Iterable[tuple[str, int]]:
        """Yields UUID and allowed draw, in milliwatts, of each GPU of the inventory."""
        limits_w: dict[str, float] = {}
        for item in record.assignments.values():
            replica = item.workload_id, item.replica
            workload = self._state.workloads.get(item.workload_id)
            # What is being submitted, or is only held for nominated work, has no limit yet.
            if workload is None or replica in at_default or replica in self._unset:
                limit_w = math.inf
            else:
                limit_w = find_limit_w(workload, self._still_w)
            for uuid in item.gpu_uuids:
                limits_w[uuid] = max(limit_w, limits_w.get(uuid, 0.0))
        for uuid in record.externally_used_gpus():
            limits_w[uuid] = math.inf
        for gpu in record.inventory.gpus:
            if gpu.lost or gpu.uuid in record.lost_gpus:
                yield gpu.uuid, 0
            elif gpu.uuid in limits_w:
                yield gpu.uuid, self._boards.allocated_mw(gpu, limits_w[gpu.uuid])
            else:
                yield gpu.uuid, self._boards.idle_mw(gpu)


class PowerTrial:
    """The draw below each budget while copies of nodes change, one after another; the cluster stays as it is."""

    def __init__(self, admission: PowerAdmission) -> None:
        self._admission = admission
        self._tried_mw: dict[str, int] = {}  # by node
        self._came = set[tuple[str, int]]()
        self.more_mw: dict[str, int] = {}  # by budget, more than now

    def alter(self, records: Iterable[NodeRecord], came: Iterable[tuple[str, int]] = ()) -> None:
        """Counts nodes as these copies are; `came` are workloads and replicas that have come, at their default limits."""
        self._came.update(came)
        for record in records:
            name = record.inventory.node_name
            share = self._admission.find_share(name)
            if share.above:
                draw_mw = self._admission.sum_draw_mw(record, self._came)
                before_mw = self._tried_mw.get(name, share.milliwatts)
                self._tried_mw[name] = draw_mw
                for key in share.above:
                    more_mw = share.counted_mw(key, draw_mw) - share.counted_mw(key, before_mw)
                    self.more_mw[key] = self.more_mw.get(key, 0) + more_mw

    def describe_problem(self) -> str:
        """Returns the first budget that is exceeded, and of which more is drawn than now; empty if there is none."""
        for key, more_mw in self.more_mw.items():
            lack = self._admission.find_excess(key, more_mw)
            if lack is not None:
                return (
                    f"{describe_budget(key)} has {max(0.0, lack.left_w):,.0f} of its {lack.limit_w:,.0f} W left, and "
                    f"{lack.more_w:,.0f} W more would be drawn"
                )
        return ""
