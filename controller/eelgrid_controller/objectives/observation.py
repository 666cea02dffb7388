"""What one control cycle observes: workloads, nodes, readings, profiles and job measurement windows.

A job window lies between two progress reports at one power limit; energy is interpolated between the
counters of each GPU. Limits that were lowered count at their read-back value until they are confirmed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.objectives.policy_budgets import NodePowerDraw
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import BudgetAllocation
from eelgrid_controller.objectives.power.control_events import JobControlStatus
from eelgrid_controller.objectives.power.estimates import MeasurementWindow
from eelgrid_controller.objectives.scrape_windows import ScrapeRound
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_protos.messages import Inventory, PlanApplied, Policy, Workload

_EQUAL_LIMIT_W = 1.0  # drivers round limits


class GpuCounters(NamedTuple):
    """A GPU's newest counters, by its node's clock."""

    time_s: float
    energy_j: float
    limit_w: float


class JobProgress(NamedTuple):
    """Units of work done since the job began, as told at a moment."""

    at_s: float
    work: float


@dataclass(frozen=True, slots=True)
class _Opening:
    progress: JobProgress
    gpus: Mapping[str, GpuCounters]
    limit_w: float


def _limit_w(gpus: Mapping[str, GpuCounters]) -> float | None:
    """The limit of all; None while they differ."""
    limits = [look.limit_w for look in gpus.values()]
    return max(limits) if limits and max(limits) - min(limits) <= _EQUAL_LIMIT_W else None


class JobMeter:
    """One job's windows; looks in, windows out."""

    def __init__(self, uuids: frozenset[str], begun_s: float, *, window_s: float, missed_s: float) -> None:
        """`uuids` are all GPUs of the job."""
        self.uuids = uuids
        self._window_s = window_s
        self._missed_s = missed_s
        self._since_s = begun_s  # of the last window, or of when one was missed
        self._last: JobProgress | None = None
        self._opening: _Opening | None = None

    @property
    def latest_progress(self) -> float | None:
        """The progress that was told last."""
        return None if self._last is None else self._last.work

    def restart_window(self) -> None:
        """What was seen so far belongs to another limit."""
        self._opening = None

    def observe(
        self, now_s: float, progress: JobProgress | None, gpus: Mapping[str, GpuCounters]
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

    def _changed_progress(self, progress: JobProgress | None) -> JobProgress | None:
        """The progress if it is news."""
        last = self._last
        if progress is None or last is None:
            return progress
        return progress if progress.at_s > last.at_s and progress.work != last.work else None

    def _is_void(self, limit_w: float, gpus: Mapping[str, GpuCounters]) -> bool:
        opening = self._opening
        return opening is not None and (
            abs(limit_w - opening.limit_w) > _EQUAL_LIMIT_W
            or any(
                look.energy_j < opening.gpus[uuid].energy_j or look.time_s < opening.gpus[uuid].time_s
                for uuid, look in gpus.items()
            )
        )

    def _close_window(self, progress: JobProgress, gpus: Mapping[str, GpuCounters]) -> MeasurementWindow | None:
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
    """What a node told last: its newest fresh readings, and what became of its plan."""

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
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)  # of those
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  # by profile
    looks: Mapping[str, NodeObservation] = field(default_factory=dict)  # of the nodes of jobs
    rounds: Mapping[str, ScrapeRound] = field(default_factory=dict)  # new pages, by workload
    progress: Mapping[str, JobProgress] = field(default_factory=dict)  # as jobs told it themselves, newest
    draws: tuple[NodePowerDraw, ...] | None = None  # of all nodes, where they were summed in this cycle
    divided: tuple[
        tuple[int, BudgetAllocation | None], ...
    ] = ()  # divisions that were worked out since, by their numbers
    advised: frozenset[str] = frozenset()  # workloads that somebody outside says are not to be changed
    bounds: Mapping[str, ReplicaBounds] = field(default_factory=dict)  # of replicas, narrower than promised
    pages: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # of metrics, where no promise can say it
    grown: Mapping[str, frozenset[int]] = field(default_factory=dict)  # replicas that did not begin just now
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


def allows_enforcement(world: ClusterObservation, workload: Workload) -> bool:
    """Whether all nodes of a workload may be changed, and the workload itself."""
    if workload.workload_id in world.advised:
        return False
    nodes = [world.nodes.get(placement.node_name) for placement in workload.placements]
    return all(node is not None and is_pool_enforced(world.policy, node.inventory.pool) for node in nodes)


_SAME_W = 0.5


def read_back_limits(world: ClusterObservation, jobs: Iterable[JobControlStatus] = ()) -> dict[str, float]:
    """The highest limit that a workload's GPUs have, or may yet ask back, where it is above the journal's."""
    found: dict[str, float] = {job.name: math.inf for job in jobs if job.back_w > 0.0 and job.name in world.workloads}
    for name, workload in world.workloads.items():
        limit_w = workload.power_limit_w
        if limit_w is None:
            continue
        highest_w = 0.0
        for placement in workload.placements:
            look = world.looks.get(placement.node_name)
            known = {} if look is None else look.limits_w
            highest_w = max([highest_w, *(known.get(uuid, math.inf) for uuid in placement.gpu_uuids)])
        if highest_w > limit_w + _SAME_W:
            found[name] = max(highest_w, found.get(name, 0.0))
    return found
