"""What one control cycle observes: workloads, nodes, readings, profiles, job measurement windows and sums over all nodes.

`ObjectiveSettings` says how often and how long. `PendingLimits` waits for the nodes' answers to limits, by the plan epoch
that a node has applied and the limits that it reads back; `NodeLivenessTracker` for nodes that are away.

A job window lies between two progress reports at one power limit; energy is interpolated between the counters of each
GPU. Limits that were lowered count at their read-back value until they are confirmed.

Sums over all nodes (`ClusterSums`) are read from the core in batches, so that the event loop is not blocked, and are
kept for a short time.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from eelgrid_controller.core.core import Core
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import BudgetAllocation
from eelgrid_controller.objectives.power.budgets import NodePowerDraw
from eelgrid_controller.objectives.power.control_events import (
    ControlSettings,
    JobControlStatus,
    LimitConfirmed,
    LimitFailed,
    NodeLeaseExpired,
    NodeLimitReport,
    NodeReachable,
    NodeUnreachable,
    PendingLimit,
)
from eelgrid_controller.objectives.power.estimates import MeasurementWindow
from eelgrid_controller.objectives.power.power_model import is_higher_limit, is_same_limit
from eelgrid_controller.objectives.services.service_metrics import ScrapeRound
from eelgrid_controller.placement.power import GpuDraws, find_kept_budget_w, find_limit_w
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import ApplyStatus, Inventory, PlanApplied, Policy, Reading, Workload, WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Thresholds of the control loop."""

    # Agents send every 5 s by default; looking more often would see the same readings.
    cycle_s: float = 5.0
    # A p95 needs 20 requests in a window (services.service_metrics): 15 s of 1.3 a second, and Prometheus' own usual interval.
    scrape_s: float = 15.0
    # A fall looks back so far and waits so long for the next (services.autoscaler has the theory).
    hold_s: float = 300.0
    cool_s: float = 60.0
    # Rounds without a page until a service is blind: one lost page is chance, four are not.
    stale_rounds: int = 4
    # Windows of a job: a limit shows in throughput within seconds, and Zeus measured 40 s for each.
    window_s: float = 30.0
    # A job whose progress or power stays away so long has missed a window.
    missed_s: float = 180.0
    # A limit moves by 50 W a cycle of the guard (1 s) after a plan of 0.1 s: 15 s at most from one end to the other.
    confirm_s: float = 60.0
    # A node that comes back tells its limits with its first samples; after a restart jobs are taken up with them.
    readings_s: float = 30.0
    # Watts of GPUs that are not steered change with placements; summing 10,000 nodes takes 50 ms in slices.
    others_s: float = 30.0
    # A resize must pay within so long, and no job is resized more often: an hour is 60 restarts of a minute a month.
    elastic_s: float = 3600.0
    away_grace_s: float = 10.0  # the loop's: a lost node's lease began to run out so long before
    # Promised workloads that are steered; more are placed as ever, and told so.
    workloads_most: int = 20_000
    # A division of 64 jobs takes a tenth of a second of a turn, one of 1,000 would keep everything else waiting.
    steering: ControlSettings = field(default_factory=lambda: ControlSettings(divided_inside=64))

    def __post_init__(self) -> None:
        """Refuses what no control loop can run with."""
        for name in (
            "cycle_s",
            "scrape_s",
            "hold_s",
            "window_s",
            "missed_s",
            "confirm_s",
            "readings_s",
            "others_s",
            "elastic_s",
        ):
            if not 0.0 < getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds above 0, at most 86400")
        if not 0.0 <= self.cool_s <= 86_400.0 or not 0.0 <= self.away_grace_s <= 86_400.0:
            raise ControllerConfigError(f"cool_s is {self.cool_s}", "give seconds between 0 and 86400")
        if self.stale_rounds < 1 or self.workloads_most < 1:
            raise ControllerConfigError("stale_rounds or workloads_most is below 1", "give at least 1")


class GpuCounters(NamedTuple):
    """A GPU's newest counters, by its node's clock."""

    time_s: float
    energy_j: float
    limit_w: float


class ProgressReading(NamedTuple):
    """Units of work done since the job began, as reported at a moment."""

    at_s: float
    work: float


@dataclass(frozen=True, slots=True)
class _Opening:
    progress: ProgressReading
    gpus: Mapping[str, GpuCounters]
    limit_w: float


def _limit_w(gpus: Mapping[str, GpuCounters]) -> float | None:
    """The limit of all; None while they differ."""
    limits = [look.limit_w for look in gpus.values()]
    return max(limits) if limits and is_same_limit(max(limits), min(limits)) else None


class JobMeter:
    """One job's windows; looks in, windows out."""

    def __init__(self, uuids: frozenset[str], begun_s: float, *, window_s: float, missed_s: float) -> None:
        """`uuids` are all GPUs of the job."""
        self.uuids = uuids
        self._window_s = window_s
        self._missed_s = missed_s
        self._since_s = begun_s  # of the last window, or of when one was missed
        self._last: ProgressReading | None = None
        self._opening: _Opening | None = None

    def restart_window(self) -> None:
        """Drops the open window: what was seen so far belongs to another limit."""
        self._opening = None

    def observe(
        self, now_s: float, progress: ProgressReading | None, gpus: Mapping[str, GpuCounters]
    ) -> MeasurementWindow | MissedWindowReason | None:
        """A window that ends now, why one was missed, or nothing yet; `gpus` has those that are known."""
        moved = self._changed_progress(progress)
        if moved is not None:
            if self._last is not None and moved.work < self._last.work:
                self._opening = None
            self._last = moved
        limit_w = _limit_w(gpus) if gpus.keys() == self.uuids else None
        if limit_w is None or self._is_void(limit_w, gpus):
            self._opening = None
        found: MeasurementWindow | None = None
        if limit_w is not None and moved is not None:
            found = self._close_window(moved, gpus)
            if found is not None or self._opening is None:
                self._opening = _Opening(moved, dict(gpus), limit_w)
        if found is not None:
            self._since_s = now_s
            return found
        if now_s - self._since_s >= self._missed_s:
            self._since_s = now_s
            self._opening = None
            return MissedWindowReason.NO_POWER if gpus.keys() != self.uuids else MissedWindowReason.NO_PROGRESS
        return None

    def _changed_progress(self, progress: ProgressReading | None) -> ProgressReading | None:
        """The progress if it is news."""
        last = self._last
        if progress is None or last is None:
            return progress
        return progress if progress.at_s > last.at_s and progress.work != last.work else None

    def _is_void(self, limit_w: float, gpus: Mapping[str, GpuCounters]) -> bool:
        opening = self._opening
        return opening is not None and (
            not is_same_limit(limit_w, opening.limit_w)
            or any(
                look.energy_j < opening.gpus[uuid].energy_j or look.time_s < opening.gpus[uuid].time_s
                for uuid, look in gpus.items()
            )
        )

    def _close_window(self, progress: ProgressReading, gpus: Mapping[str, GpuCounters]) -> MeasurementWindow | None:
        opening = self._opening
        if opening is None or progress.at_s - opening.progress.at_s < self._window_s:
            return None
        if any(look.time_s <= opening.gpus[uuid].time_s for uuid, look in gpus.items()):
            return None
        time_s = progress.at_s - opening.progress.at_s
        power_w = sum(
            (look.energy_j - opening.gpus[uuid].energy_j) / (look.time_s - opening.gpus[uuid].time_s)
            for uuid, look in gpus.items()
        )
        return MeasurementWindow(opening.limit_w, progress.work - opening.progress.work, time_s, power_w * time_s)


class ObservedNode(NamedTuple):
    """A node as the core has it."""

    inventory: Inventory
    is_ready: bool
    lost_gpus: frozenset[str] = frozenset()


class NodeObservation(NamedTuple):
    """A node's newest fresh readings, and what became of its plan."""

    gpus: Mapping[str, GpuCounters]  # with energy and limit both
    limits_w: Mapping[str, float]
    applied: PlanApplied | None
    age_s: float | None  # of the readings


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterObservation:
    """One cycle's view; `at_s` is Unix time that does not go back."""

    at_s: float
    policy: Policy
    workloads: Mapping[str, Workload] = field(default_factory=dict)  # promised and placed
    limited: Mapping[str, Workload] = field(default_factory=dict)  # placed at limits before their starts, of all
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)  # of those
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  # by profile
    looks: Mapping[str, NodeObservation] = field(default_factory=dict)  # of the nodes of jobs, and of limited workloads
    rounds: Mapping[str, ScrapeRound] = field(default_factory=dict)  # new pages, by workload
    progress: Mapping[str, ProgressReading] = field(default_factory=dict)  # as jobs told it themselves, newest
    draws: tuple[NodePowerDraw, ...] | None = None  # of all nodes, where they were summed in this cycle
    risen: tuple[NodePowerDraw, ...] = ()  # by how much more than when they were summed before
    divided: tuple[
        tuple[int, BudgetAllocation | None], ...
    ] = ()  # divisions that were worked out since, by their numbers
    advised: frozenset[str] = frozenset()  # workloads that somebody outside says are not to be changed
    bounds: Mapping[str, ReplicaBounds] = field(default_factory=dict)  # of replicas, narrower than promised
    pages: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # of metrics, where no promise can say it
    grown: Mapping[str, frozenset[int]] = field(default_factory=dict)  # replicas that did not begin just now
    starts: Mapping[str, tuple[MeasuredStart, ...]] = field(default_factory=dict)  # of services, oldest first
    room_s: Mapping[str, float] = field(default_factory=dict)  # how long others took to make room for services
    near: Mapping[str, bool] = field(
        default_factory=dict
    )  # whether services' next replicas would have their model data
    serving: Mapping[str, int] = field(
        default_factory=dict
    )  # replicas that serve, where pages are not theirs one by one
    free: Mapping[str, int] | None = None  # GPUs that nobody holds or waits for, by model, where counted in this cycle


def gpu_models_of(workload: Workload, world: ClusterObservation) -> frozenset[str]:
    """The GPU models that a workload runs on, as far as its nodes are known."""
    return frozenset(
        gpu.model
        for placement in workload.placements
        if (node := world.nodes.get(placement.node_name)) is not None
        for gpu in node.inventory.gpus
        if gpu.uuid in placement.gpu_uuids
    )


def holds_model_data(spec: WorkloadSpec, inventory: Inventory) -> bool:
    """Whether a node has all that a workload loads; False for one that names nothing."""
    return spec.model_data is not None and set(spec.model_data.data_names).issubset(inventory.model_data)


def allows_enforcement(world: ClusterObservation, workload: Workload) -> bool:
    """Whether all nodes of a workload may be changed, and the workload itself."""
    if workload.workload_id in world.advised:
        return False
    nodes = [world.nodes.get(placement.node_name) for placement in workload.placements]
    return all(node is not None and is_pool_enforced(world.policy, node.inventory.pool) for node in nodes)


def highest_limit_w(world: ClusterObservation, node: str, uuids: Iterable[str]) -> float | None:
    """The highest limit of these GPUs as read just now; None while one is not known."""
    look, held = world.looks.get(node), list(uuids)
    if look is None or not look.limits_w.keys() >= set(held):
        return None
    return max(look.limits_w[uuid] for uuid in held)


NO_LIMITS: Mapping[str, float] = MappingProxyType({})


def read_back_limits(world: ClusterObservation, jobs: Iterable[JobControlStatus] = ()) -> dict[str, float]:
    """The highest limit that a workload's GPUs have, or may yet ask back, where it is above the journal's."""
    found: dict[str, float] = {job.name: math.inf for job in jobs if job.back_w > 0.0 and job.name in world.workloads}
    for name, workload in {**world.workloads, **world.limited}.items():
        limit_w = workload.power_limit_w
        if limit_w is None:
            continue
        highest_w = 0.0
        begun = {one.replica for one in workload.attempts}
        for placement in workload.placements:
            # Its process starts only at the limit, whatever its GPUs have now.
            if workload.limit_before_start and placement.replica not in begun:
                continue
            look = world.looks.get(placement.node_name)
            known = {} if look is None else look.limits_w
            highest_w = max([highest_w, *(known.get(uuid, math.inf) for uuid in placement.gpu_uuids)])
        if is_higher_limit(highest_w, limit_w):
            found[name] = max(highest_w, found.get(name, 0.0))
    return found


def observe_node(record: NodeRecord) -> ObservedNode:
    """A node as the core has it."""
    return ObservedNode(record.inventory, record.is_ready, frozenset(record.lost_gpus))


def node_readings(telemetry: Telemetry, inventory: Inventory, *, now_s: float, now_ns: int) -> NodeObservation:
    """Fresh counters and limits of a node's GPUs; what is missing is left out."""
    name = inventory.node_name
    applied = telemetry.plan_applied(name)
    tick = telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns)
    if tick is None:
        return NodeObservation({}, {}, applied, None)
    energies = tick.gpus.get(Reading.ENERGY_J, ())
    limits = tick.gpus.get(Reading.POWER_LIMIT_W, ())
    looks, limits_w = {}, {}
    for position, gpu in enumerate(inventory.gpus):
        limit_w = limits[position] if position < len(limits) else None
        energy_j = energies[position] if position < len(energies) else None
        if limit_w is not None:
            limits_w[gpu.uuid] = limit_w
            if energy_j is not None:
                looks[gpu.uuid] = GpuCounters(tick.time_ns / 1e9, energy_j, limit_w)
    return NodeObservation(looks, limits_w, applied, telemetry.age_s(name, now_s=now_s, now_ns=now_ns))


def unmanaged_draw(
    core: Core, name: str, unsteered: Container[str], catalogue: Catalogue, still_w: Mapping[str, float] = NO_LIMITS
) -> NodePowerDraw:
    """The most that the GPUs of a node may draw that no managed job holds, and no more than a budget that its agent keeps.

    `still_w` are limits above the journal's, by workload.
    """
    state, draws = core.state, GpuDraws(catalogue)
    record = state.nodes[name]
    total_mw, used = 0, record.externally_used_gpus()  # also of a node that is lost: what runs there runs on
    for gpu in record.inventory.gpus:
        holders = [state.workloads[key] for key in record.holders(gpu.uuid)]
        is_steered = any(one.spec.training is not None and one.workload_id not in unsteered for one in holders)
        if gpu.lost or gpu.uuid in record.lost_gpus or is_steered:
            continue
        limits_w = [find_limit_w(one, still_w) for one in holders] + [math.inf] * (gpu.uuid in used)
        total_mw += draws.allocated_mw(gpu, max(limits_w)) if limits_w else draws.idle_mw(gpu)
    total_w, kept_w = total_mw / 1000.0, find_kept_budget_w(state.policy, record)
    return NodePowerDraw(record.inventory, total_w if kept_w is None else min(total_w, kept_w))


def free_gpus(core: Core, name: str) -> dict[str, int]:
    """Free GPUs of a node by model; none of a node that is lost or may not be changed."""
    state = core.state
    record = state.nodes[name]
    found: dict[str, int] = {}
    if not record.is_ready or record.cordon_reason() or not is_pool_enforced(state.policy, record.inventory.pool):
        return found
    taken = record.externally_used_gpus() | record.lost_gpus
    for gpu in record.inventory.gpus:
        usable = not (gpu.lost or record.cordon_reason(gpu) or gpu.mig_enabled or gpu.uuid in taken)
        if usable and gpu.uuid not in record.gpu_milli:
            found[gpu.model] = found.get(gpu.model, 0) + 1
    return found


_DONE = frozenset((ApplyStatus.REFUSED, ApplyStatus.FAILED))


class PendingLimits:
    """All instructions that no node has answered yet, by number."""

    def __init__(self, *, confirm_s: float) -> None:
        self._confirm_s = confirm_s
        self._asked: dict[int, PendingLimit] = {}

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that are to answer."""
        return frozenset(asked.node for asked in self._asked.values())

    def add_request(self, asked: PendingLimit) -> None:
        """Awaits an answer; an older instruction for the same GPUs gets none any more."""
        uuids = frozenset(asked.uuids)
        self._asked = {
            number: one for number, one in self._asked.items() if one.node != asked.node or uuids.isdisjoint(one.uuids)
        }
        self._asked[asked.number] = asked

    def forget_node(self, node: str) -> None:
        """The node is lost: its numbers are void."""
        self._asked = {number: one for number, one in self._asked.items() if one.node != node}

    def collect_answers(self, words: Mapping[str, NodeLimitReport], at_s: float) -> list[LimitConfirmed | LimitFailed]:
        """The answers that node reports give by now; each instruction is answered once."""
        made: list[LimitConfirmed | LimitFailed] = []
        for number in sorted(self._asked):
            one = self._asked[number]
            word = words.get(one.node)
            answer = None if word is None else self._answer_request(one, word, at_s)
            if answer is not None:
                del self._asked[number]
                made.append(answer)
        return made

    def _answer_request(
        self, one: PendingLimit, word: NodeLimitReport, at_s: float
    ) -> LimitConfirmed | LimitFailed | None:
        told = {}
        if word.applied is not None and word.applied.epoch >= one.epoch:
            told = {result.subject: result for result in word.applied.results}
        results = [told[uuid] for uuid in one.uuids if uuid in told]
        read_w = [result.power_limit_w for result in results]
        known_w = [limit_w for limit_w in read_w if limit_w is not None]
        if any(result.status in _DONE for result in results):
            highest = max(known_w) if len(known_w) == len(one.uuids) else None
            return LimitFailed(at_s, one.number, highest)
        if len(known_w) == len(one.uuids) and all(result.status is ApplyStatus.APPLIED for result in results):
            return LimitConfirmed(at_s, one.number, max(known_w))
        seen_w = [word.limits_w[uuid] for uuid in one.uuids if uuid in word.limits_w]
        waited_s = at_s - one.at_s
        is_seen = len(seen_w) == len(one.uuids) and word.age_s is not None and word.age_s < waited_s
        if is_seen and all(is_same_limit(limit_w, one.limit_w) for limit_w in seen_w):
            return LimitConfirmed(at_s, one.number, max(seen_w))
        if waited_s >= self._confirm_s:
            return LimitFailed(at_s, one.number, max(seen_w) if is_seen else None)
        return None


@dataclass(frozen=True, slots=True)
class NodeLiveness:
    """A node at a moment: whether its agent is there, and each holding's limit as read just now, where all is known."""

    is_ready: bool
    limits_w: Mapping[str, float] | None = None


@dataclass(slots=True)
class _Absence:
    since_s: float
    is_ended: bool = False


class NodeLivenessTracker:
    """Tracks which nodes of managed jobs are unreachable, and until when their leases last."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away: dict[str, _Absence] = {}

    def observe_nodes(
        self, seen: Mapping[str, NodeLiveness], at_s: float, *, lease_s: float
    ) -> list[NodeUnreachable | NodeLeaseExpired | NodeReachable]:
        """The events that follow from who is ready; nodes that are not in `seen` are forgotten."""
        self._away = {name: away for name, away in self._away.items() if name in seen}
        made: list[NodeUnreachable | NodeLeaseExpired | NodeReachable] = []
        for name in sorted(seen):
            node, away = seen[name], self._away.get(name)
            if not node.is_ready:
                if away is None:
                    away = self._away[name] = _Absence(at_s)
                    made.append(NodeUnreachable(at_s, name))
                if not away.is_ended and at_s - away.since_s >= max(0.0, lease_s - self._grace_s):
                    away.is_ended = True
                    made.append(NodeLeaseExpired(at_s, name))
            elif away is not None and node.limits_w is not None:
                del self._away[name]
                made.append(NodeReachable(at_s, name, dict(node.limits_w)))
        return made


_Result = TypeVar("_Result")
_SLICE = 256  # workloads or nodes that are read in one go: about a millisecond


class CoreReader(Protocol):
    """What is needed of the controller's loop."""

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""


def iter_batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time as are read in a millisecond."""
    for start in range(0, len(names), _SLICE):
        yield names[start : start + _SLICE]


class ClusterSums:
    """Remembers when each sum was made last."""

    def __init__(
        self, loop: CoreReader, catalogue: Catalogue, *, every_s: float, monotonic_s: Callable[[], float]
    ) -> None:
        self._loop, self._catalogue, self._every_s, self._monotonic_s = loop, catalogue, every_s, monotonic_s
        self._policy_seen = -1
        self._summed_w: dict[str, float] | None = None  # of unmanaged GPUs, by node; None without budgets
        self._changed: set[str] = set()  # nodes, since they were summed
        self._drawn_s = self._freed_s = float("-inf")

    async def node_draws_if_due(
        self, policy: Policy, unsteered: Container[str], still_w: Mapping[str, float]
    ) -> tuple[NodePowerDraw, ...] | None:
        """The most that unmanaged GPUs of each node may draw; None while that was summed a moment ago."""
        now_s = self._monotonic_s()
        if policy.revision == self._policy_seen and (not policy.budgets or now_s - self._drawn_s < self._every_s):
            return None
        self._policy_seen, self._drawn_s = policy.revision, now_s
        self._changed.clear()
        draws = await self.node_draws(unsteered, still_w) if policy.budgets else ()
        self._summed_w = {one.inventory.node_name: one.other_w for one in draws} if policy.budgets else None
        return draws

    def note_changes(self, nodes: Iterable[str]) -> None:
        """Nodes on which something has changed."""
        if self._summed_w is not None:
            self._changed.update(nodes)

    async def risen_draws(self, unsteered: Container[str], still_w: Mapping[str, float]) -> tuple[NodePowerDraw, ...]:
        """By how much the unmanaged GPUs of nodes may draw more than when they were summed; of those that do."""
        draws = await self.node_draws(unsteered, still_w, sorted(self._changed))
        before_w = self._summed_w or {}
        risen = (one._replace(other_w=one.other_w - before_w.get(one.inventory.node_name, 0.0)) for one in draws)
        return tuple(one for one in risen if one.other_w > 0.0)

    async def node_draws(
        self, unsteered: Container[str], still_w: Mapping[str, float], nodes: Sequence[str] | None = None
    ) -> tuple[NodePowerDraw, ...]:
        """The same of these nodes, or of every node, now.

        `still_w` are limits above the journal's, by workload. One that was not read (infinite) counts on nodes that are lost,
        whose agents may have restored the default when they stopped, and not in the first seconds of a controller.
        """
        read_w = {key: limit_w for key, limit_w in still_w.items() if math.isfinite(limit_w)}

        def sum_draws(core: Core, names: Sequence[str]) -> list[NodePowerDraw]:
            ready = {name: core.state.nodes[name].is_ready for name in names if name in core.state.nodes}
            return [
                unmanaged_draw(core, name, unsteered, self._catalogue, read_w if is_ready else still_w)
                for name, is_ready in ready.items()
            ]

        made: list[NodePowerDraw] = []
        if nodes is None:
            nodes = await self._loop.read(lambda core: list(core.state.nodes))
        for names in iter_batches(nodes):
            made += await self._loop.read(lambda core, names=names: sum_draws(core, names))  # type: ignore[misc]
            await asyncio.sleep(0)
        return tuple(made)

    async def free_gpus_if_due(self, workloads: Iterable[Workload]) -> dict[str, int] | None:
        """GPUs that elastic jobs could have, by model; None while that was counted a moment ago."""
        now_s = self._monotonic_s()
        is_wanted = any(one.spec.training is not None and one.spec.training.is_elastic for one in workloads)
        if not is_wanted or now_s - self._freed_s < self._every_s:
            return None
        self._freed_s = now_s
        total = Counter[str]()
        names = await self._loop.read(lambda core: [] if len(core.state.pending) else list(core.state.nodes))
        for some in iter_batches(names):
            parts = await self._loop.read(
                lambda core, some=some: [free_gpus(core, name) for name in some if name in core.state.nodes]  # type: ignore[misc]
            )
            for found in parts:
                total.update(found)
            await asyncio.sleep(0)
        return dict(total)
