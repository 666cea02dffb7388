"""Commands of the gate to the core, executed in order, and the core's commits as events of the gate."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.kubernetes.api.errors import call_until_done
from eelgrid_controller.engines.kubernetes.model.inference_service import SERVICE_UNIT_PREFIX
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AdoptUnit,
    CancelUnit,
    GateEvent,
    NodeAcknowledged,
    NodeReportFailed,
    ReplicaPlace,
    ScaleUnit,
    SubmitUnit,
    UnitCancelled,
    UnitDeferred,
    UnitPlaced,
    UnitPreempted,
    UnitRefused,
)
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.state.events import (
    DevicesCorrected,
    NodeJoined,
    NodesRemoved,
    PartitionsPlanned,
    PreemptionRefused,
    PreemptionStarted,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
)
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import AlreadyExists, Fault, NotFound
from eelgrid_protos.messages import (
    Placement,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)

_AGAIN_S = 1.0
_AT_ONCE = 1024
# How the ids of its units begin.
GATE_ID_PREFIXES = ("pod-", "gang-", SERVICE_UNIT_PREFIX)


def is_gate_workload(workload_id: str) -> bool:
    """Whether a workload is a unit of the gate."""
    return workload_id.startswith(GATE_ID_PREFIXES)


def placement_event(workload_id: str, placements: Iterable[Placement], spec: WorkloadSpec | None = None) -> UnitPlaced:
    """The gate's event of a workload's places."""
    places = {one.replica: ReplicaPlace(one.node_name, one.gpu_indexes) for one in placements}
    return UnitPlaced(workload_id, places, spec)


def status_event(workload: Workload) -> UnitPlaced | UnitDeferred | UnitCancelled:
    """A workload's phase and places as an event of the gate."""
    match workload.phase:
        case WorkloadPhase.PLACED:
            found = placement_event(workload.workload_id, workload.placements, workload.spec)
            return found._replace(is_preempted=bool(workload.preempted_for))
        case WorkloadPhase.CANCELLED:
            return UnitCancelled(workload.workload_id)
    return UnitDeferred(workload.workload_id, workload.reason)


class CoreCommandRunner:
    """Commands to one loop, and what is heard of its commits."""

    def __init__(
        self,
        loop: CoreCommandPort,
        *,
        feed: Callable[[GateEvent], None],
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        self._loop = loop
        self._feed = feed
        self._monotonic_s = monotonic_s
        self._log = log
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def on_commit(self, committed: CommitResult) -> None:
        """A commit, as the gate's events."""
        for event in committed.events:
            match event:
                case WorkloadPlaced() if is_gate_workload(event.workload_id):
                    workload = self._loop.core.state.workloads.get(event.workload_id)
                    spec = None if workload is None else workload.spec
                    self._feed(placement_event(event.workload_id, event.placements, spec))
                case WorkloadDeferred() if is_gate_workload(event.workload_id):
                    self._feed(UnitDeferred(event.workload_id, event.reason))
                case WorkloadCancelled() if is_gate_workload(event.workload_id):
                    self._feed(UnitCancelled(event.workload_id))
                case PreemptionStarted():
                    self._on_preemption(event)
                case PreemptionRefused() if is_gate_workload(event.workload_id):
                    self._now(event.workload_id)
                case WorkloadMoved() | WorkloadScaled() if is_gate_workload(event.workload_id):
                    self._now(event.workload_id)
                case PartitionsPlanned() | DevicesCorrected():
                    for name in filter(is_gate_workload, event.workload_ids):
                        self._now(name)
                case NodeJoined():
                    self._feed(NodeAcknowledged(event.inventory.node_name))
                case NodesRemoved():
                    # One that the cluster still has is told of again.
                    for name in event.node_names:
                        self._feed(NodeReportFailed(name))

    def _on_preemption(self, event: PreemptionStarted) -> None:
        gainer = self._loop.core.state.workloads.get(event.workload_id)
        if is_gate_workload(event.workload_id) and gainer is not None and not gainer.placements:
            self._feed(UnitDeferred(event.workload_id, event.waits))
        for name in filter(is_gate_workload, event.victims):
            self._feed(UnitPreempted(name))

    def _now(self, workload_id: str) -> None:
        workload = self._loop.core.state.workloads.get(workload_id)
        if workload is not None:
            self._feed(status_event(workload))

    async def reconsider(self) -> None:
        """Retry pending workloads; where that fails, the next change retries them."""
        try:
            await self._loop.reconsider()
        except (Fault, ContractError) as error:
            self._log.info("retry_pending=failed error=%s", error)

    async def execute_command(
        self, asked: RegisterNode | RemoveNode | ReportUsage | SubmitUnit | AdoptUnit | CancelUnit | ScaleUnit
    ) -> None:
        """Execute one command, and feed back its result."""
        async with self._turns:
            match asked:
                case SubmitUnit(request):
                    await self._run_change(request.workload_id, self._loop.submit(request))
                case AdoptUnit(request, adoption):
                    await self._run_change(request.workload_id, self._loop.adopt(request, adoption))
                case CancelUnit(workload_id, reason):
                    await self._cancel(workload_id, reason)
                case ScaleUnit(workload_id, replicas):
                    await self._run_change(workload_id, self._loop.scale(workload_id, replicas))
                case RegisterNode(inventory):
                    self._loop.presence.mark_connected(inventory.node_name)
                    await self._on_result(inventory.node_name, self._loop.register_node(inventory))
                case ReportUsage(name, others):
                    await self._on_result(name, self._loop.update_external_usage(name, others))
                case RemoveNode(name):
                    self._loop.presence.mark_disconnected(name, deadline_s=self._monotonic_s())

    async def refuse_preemption(self, workload_id: str, why: str, *, again_s: float) -> None:
        """Let a victim run on that is not evicted; where that fails, the next look at it says so again."""
        try:
            await self._loop.refuse_preemption(workload_id, why, again_s=again_s)
        except (Fault, ContractError) as error:
            self._log.warning("workload=%s preemption=refused told=no error=%s", workload_id, error)

    async def _on_result(self, node_name: str, command: "asyncio.Future[None] | object") -> None:
        try:
            await command  # type: ignore[misc]
        except NotFound:
            self._log.debug("node=%s reported=no reason=unknown", node_name)
        except (Fault, ContractError) as error:
            self._log.warning("node=%s reported=no error=%s action=retry", node_name, error)
            await asyncio.sleep(_AGAIN_S)
            self._feed(NodeReportFailed(node_name))

    async def _run_change(self, workload_id: str, command: Awaitable[Workload]) -> None:
        """Feeds what the core holds afterwards, also where nothing changed."""
        try:
            workload = await command
        except (Fault, ContractError) as error:
            self._log.info("workload=%s refused=%s", workload_id, error)
            self._feed(UnitRefused(workload_id, str(error), is_taken=isinstance(error, AlreadyExists)))
        else:
            # Of the same batch another command may have changed it since.
            self._feed(status_event(self._loop.core.state.workloads.get(workload_id, workload)))

    async def _cancel(self, workload_id: str, reason: str) -> None:
        """End a workload, however long that takes: what is not ended holds room."""

        async def ended() -> str:
            try:
                return (await self._loop.cancel(workload_id, reason=reason)).workload_id
            except NotFound:
                return workload_id

        def on_failure(error: Exception) -> None:
            self._log.warning("workload=%s cancelled=no error=%s action=retry", workload_id, error)

        name = await call_until_done(ended, errors=(Fault, ContractError), wait_s=_AGAIN_S, on_failure=on_failure)
        # Told by its commit, too, unless it was ended before.
        self._feed(UnitCancelled(name))
