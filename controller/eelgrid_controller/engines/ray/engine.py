"""Ray engine: looks at a cluster, has Following decide, and carries out in the core what it says.

Owns the interval of looks and what is counted. Must not decide anything about a job.

Theory. Level-triggered: a look reads all nodes, jobs and holders, so nothing depends on what an earlier one did or failed to
do. While Ray cannot be read, nothing is told to the core: what is placed stays placed. The statistics of nodes are read of
those that the look before has found.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.element_lists import UnreadableLog
from eelgrid_controller.engines.node_reports import (
    CorrectDevices,
    RegisterNode,
    RemoveNode,
    ReportUsage,
    carry_out_report,
    map_gpus_by_index,
)
from eelgrid_controller.engines.ray.answers import RayLook, RayUnreadable, parse_look
from eelgrid_controller.engines.ray.dashboard import RayFailed, RayPort
from eelgrid_controller.engines.ray.following import (
    JOB_PREFIX,
    AdoptRayJob,
    EndRayWork,
    Following,
    FollowingSettings,
    RayInstruction,
    ReportRayEnd,
    StopRayJob,
    is_of_ray,
)
from eelgrid_controller.engines.ray.serve import (
    LeaveServeDeployment,
    MetricPages,
    ScaleServeDeployment,
    claim_replicas,
    count_running,
    decide_scaling,
    list_replica_moves,
    name_deployment,
    parse_applications,
)
from eelgrid_controller.state.events import WorkloadCancelled, WorkloadPlaced, WorkloadScaled
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.messages import SubmitWorkloadRequest, Workload

_BACKOFF_MOST_S = 30.0
_REFUSALS_KEPT = 1_000


class _CoreView(NamedTuple):
    """Ray's workloads that the core holds, by node its GPUs by index, and the names of all nodes."""

    workloads: dict[str, Workload]
    gpus: dict[str, dict[int, str]]
    nodes: tuple[str, ...]


def _view(core: Core) -> _CoreView:
    state = core.state
    mine = {key: one for key, one in state.workloads.items() if is_of_ray(one)}
    return _CoreView(mine, map_gpus_by_index(state, mine.values()), tuple(state.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Settings of the engine."""

    poll_s: float = 1.0
    following: FollowingSettings = field(default_factory=FollowingSettings)


@dataclass(slots=True)
class RayCounts:
    """What the engine has done since its start."""

    looks: int = 0
    failures: int = 0
    unreadable: int = 0
    adopted: int = 0
    ended: int = 0
    stopped: int = 0
    scaled: int = 0
    refused: int = 0


class RayEngine:
    """Follows one Ray cluster by one core."""

    def __init__(
        self,
        ray: RayPort,
        *,
        loop: CoreCommandPort,
        has_agent: Callable[[str], bool],
        settings: RaySettings,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        """`has_agent` says of a node whether an agent speaks for it."""
        self.counts = RayCounts()
        self._ray, self._loop, self._has_agent = ray, loop, has_agent
        self._settings, self._clock, self._log = settings, clock, log
        self._following, self._pages = Following(settings.following), MetricPages()
        # Nodes of the last look, whose statistics are read, too.
        self._detailed: tuple[str, ...] = ()
        self._unreadable_log = UnreadableLog("ray", log)
        # A workload was placed or scaled, or one of a job was cancelled: the next look is due at once.
        self._is_due = asyncio.Event()
        # Workloads that stand for deployments of Serve, as far as the engine's overrides name them.
        self._served: set[str] = set()
        # Workloads whose jobs the look before has stopped: Ray takes a moment, and is told again by each look.
        self._stopped: set[str] = set()
        # What the core or Ray has refused and was told of once.
        self._refusals: set[str] = set()
        loop.listeners.append(self._on_commit)

    def _on_commit(self, committed: CommitResult) -> None:
        for event in committed.events:
            is_of_job = isinstance(event, WorkloadCancelled) and event.workload_id.startswith(JOB_PREFIX)
            if isinstance(event, WorkloadPlaced | WorkloadScaled) or is_of_job:
                self._is_due.set()
                return

    async def run(self) -> None:
        """Looks until it is cancelled; what fails is logged, counted and tried again."""
        pause_s = self._settings.poll_s
        try:
            while True:
                try:
                    await self.look()
                    pause_s = self._settings.poll_s
                except (RayFailed, RayUnreadable) as error:
                    self.counts.failures += 1
                    pause_s = min(2.0 * pause_s, _BACKOFF_MOST_S)
                    self._log.warning("ray=unread error=%s again_s=%.1f", error, pause_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._is_due.wait()
        finally:
            await self._ray.close()

    async def look(self) -> RayLook:
        """Reads the cluster and does what is to be done; raises RayFailed and RayUnreadable if it cannot be read."""
        self._is_due.clear()
        answers = await self._ray.read_look(self._detailed)
        look = await asyncio.to_thread(parse_look, answers)
        self._detailed = tuple(node.node_id for node in look.nodes)
        self.counts.unreadable += len(look.unreadable)
        self._unreadable_log.note(look.unreadable)
        workloads, gpus, nodes = await self._loop.read(_view)
        has_agent = frozenset(filter(self._has_agent, {*nodes, *(node.name for node in look.nodes)}))
        claimed = claim_replicas(look.holdings, workloads)
        holdings = tuple(
            replace(one, workload_id=claimed[one.holder]) if one.holder in claimed else one for one in look.holdings
        )
        look = replace(look, holdings=holdings)
        now_s = self._clock.now_ns() / 1e9
        found = self._following.decide(look, workloads, has_agent=has_agent, gpus=gpus, now_s=now_s)
        for one in found:
            await self._command(one)
        self._stopped = {one.workload_id for one in found if isinstance(one, StopRayJob)}
        await self._serve(look, workloads)
        self.counts.looks += 1
        return look

    async def _serve(self, look: RayLook, workloads: dict[str, Workload]) -> None:
        """Scales deployments of Serve for which workloads stand, and has their places follow the replicas."""
        served = {
            key: one for key, one in workloads.items() if name_deployment(one) is not None and not one.phase.is_ended
        }
        for gone in self._served - served.keys():
            self._loop.outside.forget_workload(gone)
        self._served = set(served)
        if not served:
            return
        names = {node.node_id: node.name for node in look.nodes}
        for workload, adoption in list_replica_moves(look.holdings, names, served):
            request = SubmitWorkloadRequest(spec=workload.spec, workload_id=workload.workload_id)
            await self._command(AdoptRayJob(request, adoption))
        serve = parse_applications(await self._ray.read_applications())
        outside = self._loop.outside
        outside.pages |= (found := self._pages.list_pages(look.nodes, serve.routers, served))
        # What was counted before a page is read for the first time is of no window.
        outside.grown |= {name: frozenset(pages) for name, pages in found.items()}
        # Pages are those of nodes: one may be of several replicas, or of none.
        outside.serving |= {key: count_running(one, serve.deployments) for key, one in served.items()}
        left: dict[str, str] = {}
        for one in decide_scaling(serve.deployments, served):
            match one:
                case ScaleServeDeployment(workload_id, key, replicas):
                    try:
                        await self._ray.scale_deployment(key.application, key.deployment, replicas)
                    except RayFailed as error:
                        left[workload_id] = f"Ray: {error}"
                        continue
                    self.counts.scaled += 1
                    self._log.info("workload=%s deployment=%s replicas=%d", workload_id, key, replicas)
                case LeaveServeDeployment(workload_id, reason):
                    left[workload_id] = reason
        self._advise(left)

    def _advise(self, left: dict[str, str]) -> None:
        """Has the objectives leave workloads alone whose deployments are not scaled, and says why."""
        advised = self._loop.outside.advised
        for key in self._served:
            reason = left.get(key)
            if reason is None:
                advised.pop(key, None)
            elif advised.get(key) != reason:
                advised[key] = reason
                self._log.warning("workload=%s scaled=no reason=%s", key, reason)

    async def _command(self, one: RayInstruction) -> None:
        """Carries out an instruction in the core; one that is refused is decided anew by the next look."""
        try:
            match one:
                case RegisterNode() | RemoveNode() | ReportUsage() | CorrectDevices():
                    await carry_out_report(one, self._loop, now_s=self._clock.monotonic_s())
                case AdoptRayJob(request, adoption):
                    await self._loop.adopt(request, adoption)
                    self.counts.adopted += len(adoption.standing)
                case ReportRayEnd(status):
                    self._log.info("workload=%s ended exit_code=%s", status.workload_id, status.exit_code)
                    await self._loop.record_engine_attempts((status,))
                    self.counts.ended += 1
                case EndRayWork(workload_id, reason):
                    self._log.info("workload=%s ended reason=%s", workload_id, reason)
                    await self._loop.cancel(workload_id, reason=reason)
                    self.counts.ended += 1
                case StopRayJob(submission_id, workload_id):
                    await self._ray.stop_job(submission_id)
                    if workload_id not in self._stopped:
                        self._log.info("workload=%s stopped job=%s", workload_id, submission_id)
                        self.counts.stopped += 1
        except (Fault, ContractError) as error:
            self._on_refusal(one, error)
        except RayFailed as error:
            # The next look tries again; one job that does not stop keeps no other waiting.
            self.counts.failures += 1
            self._log_once(f"{type(one).__name__} error={error}")

    def _on_refusal(self, one: RayInstruction, error: Exception) -> None:
        self._following.reports.forget_refused(one)
        if isinstance(error, NotFound):
            # It has ended or left meanwhile, which the next look tells.
            return
        self.counts.refused += 1
        self._log_once(f"{type(one).__name__} refused={error}")

    def _log_once(self, said: str) -> None:
        if said not in self._refusals:
            if len(self._refusals) >= _REFUSALS_KEPT:
                self._refusals.clear()
            self._refusals.add(said)
            self._log.warning("ray=%s", said)
