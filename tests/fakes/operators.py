"""An operators' service in memory, served over real gRPC on the loopback.

Owns a small, honest controller for the clients' tests: it validates, pages,
keeps workloads by id, places everything on its first node unless told that
nothing fits, and fails when a test says so. It decides nothing worth testing.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from eelgrid_protos import faults, messages, rpc, transport
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import (
    Assignment,
    Candidate,
    CostTerm,
    Explanation,
    Gpu,
    GpuHolder,
    GpuStatus,
    Inventory,
    ModelSummary,
    Node,
    NodePlan,
    NodeState,
    Placement,
    PlanStatus,
    Policy,
    ReasonCount,
    Removal,
    ReplicaExplanation,
    Summary,
    Workload,
    WorkloadPhase,
)
from tests.fakes.audited import FakeAudit
from tests.fakes.cordons import FakeCordons
from tests.fakes.limited import FakeSpending
from tests.fakes.partitioned import FakePartitions
from tests.fakes.promised import FakePromises
from tests.fakes.queued import FakeQueues
from tests.fakes.spent import FakeEnergy

__all__ = ["FakeOperators", "a_node", "serving"]

GIB = 1024**3


def a_node(name: str = "node-0", *, model: str = "T4", gpus: int = 2, **changes: Any) -> Node:
    """A node with GPUs of one model."""
    devices = tuple(
        Gpu(uuid=f"GPU-{name}-{index}", index=index, product=f"NVIDIA {model}", model=model, memory_bytes=16 * GIB)
        for index in range(gpus)
    )
    inventory = Inventory(
        node_name=name, cpu_milli=32_000, memory_bytes=128 * GIB, pool="a", gpus=devices, driver_version="580.1"
    )
    return Node(inventory=inventory, state=NodeState.READY, **changes)


@dataclass
class FakeOperators:
    """The service; `failures` are raised by the next calls, in order, before anything happens."""

    nodes: list[Node] = field(default_factory=lambda: [a_node(allocated_gpu_milli=500, power_w=80.0)])
    workloads: dict[str, Workload] = field(default_factory=dict)
    policy: Policy = field(default_factory=lambda: Policy(revision=1))
    fits: Callable[[messages.SubmitWorkloadRequest], bool] = lambda request: True
    failures: list[Exception | None] = field(default_factory=list)
    # Calls whose answer is lost: the work is done, the caller hears Unavailable.
    lose_answers: list[bool] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    delay_s: float = 0.0
    under_way: int = 0
    most_under_way: int = 0
    watch_closes: bool = True
    now_ns: int = 1
    # As a controller of an earlier version, which lists whole workloads whatever view is asked for.
    knows_no_views: bool = False
    # The view of each listing of workloads.
    views: list[messages.WorkloadView] = field(default_factory=list)
    overview: messages.Overview | None = None
    # Who whoever calls is; or how the question fails.
    caller: messages.WhoAmIResponse | faults.Fault = field(default_factory=messages.WhoAmIResponse)
    promised: FakePromises = field(init=False)
    partitioned: FakePartitions = field(default_factory=FakePartitions)
    spent: FakeEnergy = field(default_factory=FakeEnergy)
    limited: FakeSpending = field(default_factory=FakeSpending)
    audited: FakeAudit = field(default_factory=FakeAudit)
    cordoned: FakeCordons = field(init=False)
    queued: FakeQueues = field(init=False)

    def __post_init__(self) -> None:
        self.cordoned = FakeCordons(lambda: self.nodes)
        self.queued = FakeQueues(self._find)
        self.promised = FakePromises(self._find, lambda found: self.workloads.update({found.workload_id: found}))

    @property
    def parts(self) -> tuple[object, ...]:
        """Who has the calls, between them."""
        return self, self.promised, self.partitioned, self.spent, self.limited, self.audited, self.cordoned, self.queued

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    def _find(self, workload_id: str) -> Workload:
        if workload_id not in self.workloads:
            raise faults.NotFound(f"no workload {workload_id}")
        return self.workloads[workload_id]

    def _holding(self, node: Node, gpu: Gpu) -> list[Workload]:
        return [
            one
            for one in self.workloads.values()
            for at in one.placements
            if at.node_name == node.inventory.node_name and gpu.index in at.gpu_indexes
        ]

    def summary(self) -> Summary:
        phases = [workload.phase for workload in self.workloads.values()]
        waiting = phases.count(WorkloadPhase.PENDING)
        return Summary(
            time_ns=self.now_ns,
            nodes_ready=len(self.nodes),
            gpus=sum(len(node.inventory.gpus) for node in self.nodes),
            allocated_gpu_milli=500,
            cpu_milli=32_000,
            allocated_cpu_milli=8_000,
            pending=waiting,
            placed=phases.count(WorkloadPhase.PLACED),
            pending_reasons=(ReasonCount(reason="no free GPU", workloads=waiting),) if waiting else (),
            modelled_power_w=321.0,
            measured_power_w=300.0,
            measured_gpus=2,
            samples_received=77,
            decision_p50_s=0.0004,
            decision_p99_s=0.0012,
            models=(ModelSummary(model="T4", gpus=2, allocated_gpu_milli=500, measured_power_w=300.0),),
        )

    async def get_summary(self, request: Any, context: Any) -> messages.GetSummaryResponse:
        self._begin("get_summary")
        return messages.GetSummaryResponse(summary=self.summary())

    async def get_overview(self, request: Any, context: Any) -> messages.GetOverviewResponse:
        self._begin("get_overview")
        return messages.GetOverviewResponse(overview=self.overview or messages.Overview(time_ns=self.now_ns))

    async def who_am_i(self, request: Any, context: Any) -> messages.WhoAmIResponse:
        if isinstance(self.caller, faults.Fault):
            raise self.caller
        return self.caller

    async def watch_summary(self, request: Any, context: Any) -> AsyncIterator[messages.WatchSummaryResponse]:
        self._begin("watch_summary")
        yield messages.WatchSummaryResponse(summary=self.summary())

    async def reconcile_node(self, request: Any, context: Any) -> messages.ReconcileNodeResponse:
        self._begin("reconcile_node")
        (index,) = [at for at, node in enumerate(self.nodes) if node.inventory.node_name == request.node_name]
        node = self.nodes[index] = replace(self.nodes[index], ahead_epoch=None, unknown_workload_ids=())
        return messages.ReconcileNodeResponse(node=node)

    async def list_nodes(self, request: Any, context: Any) -> messages.ListNodesResponse:
        self._begin("list_nodes")
        rows = [
            node
            for node in self.nodes
            if request.name_contains in node.inventory.node_name
            and (not request.states or node.state in request.states)
            and (not request.pool or node.inventory.pool == request.pool)
        ]
        page, token = _page(rows, request)
        return messages.ListNodesResponse(nodes=page, next_page_token=token, total=len(rows))

    async def list_gpus(self, request: Any, context: Any) -> messages.ListGpusResponse:
        self._begin("list_gpus")
        rows = [
            GpuStatus(
                node_name=node.inventory.node_name,
                gpu=gpu,
                node_state=node.state,
                allocated_milli=500 * (gpu.index == 0),
                power_w=40.0 if gpu.index == 0 else None,
                utilization_ratio=0.25 if gpu.index == 0 else None,
                workload_ids=tuple(one.workload_id for one in self._holding(node, gpu)),
                holders=tuple(
                    GpuHolder(workload_id=one.workload_id, name=one.spec.name, user=one.spec.user)
                    for one in self._holding(node, gpu)
                ),
            )
            for node in self.nodes
            for gpu in node.inventory.gpus
            if 1000 - 500 * (gpu.index == 0) >= request.min_free_milli
        ]
        page, token = _page(rows, request)
        return messages.ListGpusResponse(gpus=page, next_page_token=token, total=len(rows))

    async def submit_workload(self, request: Any, context: Any) -> messages.SubmitWorkloadResponse:
        self.under_way += 1
        self.arrived.append(request.workload_id)
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self._begin("submit_workload")
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            return messages.SubmitWorkloadResponse(workload=self._submit(request))
        finally:
            self.under_way -= 1

    def _submit(self, request: messages.SubmitWorkloadRequest) -> Workload:
        workload_id = request.workload_id or f"w-{len(self.workloads)}"
        known = self.workloads.get(workload_id)
        if known is not None and known.spec != request.spec:
            raise faults.AlreadyExists(f"{workload_id} is another workload")
        if request.spec.request.cpu_milli > 1_000_000:
            violation = Violation("spec.request.cpu_milli", "is more than any node has", "ask for less")
            raise faults.InvalidArgument("no node could ever hold this", (violation,))
        if known is None:
            fits = self.fits(request)
            gpus = tuple(range(request.spec.request.gpu_count))
            place = Placement(replica=0, node_name=self.nodes[0].inventory.node_name, gpu_indexes=gpus)
            known = Workload(
                workload_id=workload_id,
                spec=request.spec,
                phase=WorkloadPhase.PLACED if fits else WorkloadPhase.PENDING,
                reason="" if fits else "no free GPU",
                placements=(place,) if fits else (),
                submitted_ns=1_000,
                placed_ns=1_500_000 if fits else 0,
                revision=len(self.workloads) + 1,
            )
            if not request.dry_run:
                self.workloads[workload_id] = known
                self.submitted.append(workload_id)
        if self.lose_answers and self.lose_answers.pop(0):
            raise faults.Unavailable("the connection broke")
        return known

    async def get_workload(self, request: Any, context: Any) -> messages.GetWorkloadResponse:
        self._begin("get_workload")
        return messages.GetWorkloadResponse(workload=self._find(request.workload_id))

    async def list_workloads(self, request: Any, context: Any) -> messages.ListWorkloadsResponse:
        self._begin("list_workloads")
        self.views.append(request.view)
        rows = [
            workload
            for workload in self.workloads.values()
            if (not request.phases or workload.phase in request.phases) and request.name_contains in workload.spec.name
        ]
        page, token = _page(rows, request)
        answer = messages.ListWorkloadsResponse(workloads=page, next_page_token=token, total=len(rows))
        if request.view is not messages.WorkloadView.SUMMARY or self.knows_no_views:
            return answer
        return replace(answer, workloads=(), summaries=answer.rows)

    async def watch_workloads(self, request: Any, context: Any) -> AsyncIterator[messages.WatchWorkloadsResponse]:
        self._begin("watch_workloads")
        for workload in list(self.workloads.values()):
            if workload.revision > request.after_revision:
                yield messages.WatchWorkloadsResponse(workload=workload)
        if not self.watch_closes:
            await asyncio.Event().wait()

    async def cancel_workload(self, request: Any, context: Any) -> messages.CancelWorkloadResponse:
        self._begin("cancel_workload")
        ended = replace(self._find(request.workload_id), phase=WorkloadPhase.CANCELLED, placements=())
        self.workloads[request.workload_id] = ended
        return messages.CancelWorkloadResponse(workload=ended)

    async def explain_workload(self, request: Any, context: Any) -> messages.ExplainWorkloadResponse:
        self._begin("explain_workload")
        workload = self._find(request.workload_id)
        placed = workload.phase is WorkloadPhase.PLACED
        terms = (CostTerm(name="power", cost_w=60.0), CostTerm(name="fragmentation", cost_w=-2.5))
        worse = (CostTerm(name="power", cost_w=120.0), CostTerm(name="fragmentation", cost_w=1.0))
        candidates = (
            Candidate(node_name="node-0", gpu_indexes=(0,), cost_w=57.5, terms=terms),
            Candidate(node_name="node-1", gpu_indexes=(1,), cost_w=121.0, terms=worse),
        )
        replica = ReplicaExplanation(
            replica=0,
            candidates=candidates if placed else (),
            feasible_nodes=2 if placed else 0,
            removals=(Removal(constraint="gpu_model", nodes=3), Removal(constraint="cpu", nodes=1)),
        )
        remedy = "" if placed else "free 1 T4, or let gpu_models name A10 too"
        return messages.ExplainWorkloadResponse(
            explanation=Explanation(workload=workload, replicas=(replica,), remedy=remedy)
        )

    async def list_plans(self, request: Any, context: Any) -> messages.ListPlansResponse:
        self._begin("list_plans")
        if request.node_name and request.node_name not in {node.inventory.node_name for node in self.nodes}:
            raise faults.NotFound(f"no node {request.node_name}")
        held = Assignment(workload_id="w-0", replica=0, gpu_uuids=("GPU-node-0-0",), gpu_milli=500, cpu_milli=1000)
        plan = NodePlan(node_name="node-0", epoch=4, lease_s=60.0, assignments=(held,))
        return messages.ListPlansResponse(plans=(PlanStatus(plan=plan),), total=1)

    async def get_policy(self, request: Any, context: Any) -> messages.GetPolicyResponse:
        self._begin("get_policy")
        return messages.GetPolicyResponse(policy=self.policy)

    async def update_policy(self, request: Any, context: Any) -> messages.UpdatePolicyResponse:
        self._begin("update_policy")
        if request.policy.revision != self.policy.revision:
            raise faults.Aborted(f"revision {self.policy.revision} is in force")
        self.policy = replace(request.policy, revision=self.policy.revision + 1)
        return messages.UpdatePolicyResponse(policy=self.policy)

    async def what_if(self, request: Any, context: Any) -> messages.WhatIfResponse:
        self._begin("what_if")
        raise faults.FailedPrecondition("this controller imagines nothing")

    async def plan_capacity(self, request: Any, context: Any) -> messages.PlanCapacityResponse:
        self._begin("plan_capacity")
        raise faults.FailedPrecondition("this controller imagines nothing")

    async def start_shadow(self, request: Any, context: Any) -> messages.StartShadowResponse:
        self._begin("start_shadow")
        raise faults.FailedPrecondition("this controller has no shadow")

    async def get_shadow(self, request: Any, context: Any) -> messages.GetShadowResponse:
        self._begin("get_shadow")
        raise faults.FailedPrecondition("this controller has no shadow")

    async def stop_shadow(self, request: Any, context: Any) -> messages.StopShadowResponse:
        self._begin("stop_shadow")
        raise faults.FailedPrecondition("this controller has no shadow")

    async def recommend_moves(self, request: Any, context: Any) -> messages.RecommendMovesResponse:
        self._begin("recommend_moves")
        raise faults.FailedPrecondition("this controller moves nothing")

    async def apply_moves(self, request: Any, context: Any) -> messages.ApplyMovesResponse:
        self._begin("apply_moves")
        raise faults.FailedPrecondition("this controller moves nothing")

    async def read_logs(self, request: Any, context: Any) -> AsyncIterator[messages.ReadLogsResponse]:
        self._begin("read_logs")
        if request.offset < 3:
            yield messages.ReadLogsResponse(text="one"[request.offset :], next_offset=3)
        self._begin("read_logs")
        yield messages.ReadLogsResponse(text="two", next_offset=6)

    async def attach(self, requests: Any, context: Any) -> AsyncIterator[messages.AttachResponse]:
        """Echoes input, until its end."""
        self._begin("attach")
        taken = 0
        async for request in requests:
            match request.message:
                case messages.AttachOpening() as opening:
                    yield messages.AttachResponse(data=opening.workload_id.encode(), attempt=1)
                case messages.AttachInput() as part:
                    taken += 1
                    yield messages.AttachResponse(data=part.data, inputs_taken=taken)
                    if part.is_end:
                        return

    async def export_decision(self, request: Any, context: Any) -> AsyncIterator[messages.ExportDecisionResponse]:
        self._begin("export_decision")
        for part in ('{"workload":', f'"{self._find(request.workload_id).workload_id}"}}'):
            yield messages.ExportDecisionResponse(text=part)


def _page(rows: list[Any], request: Any) -> tuple[tuple[Any, ...], str]:
    start, size = int(request.page_token or 0), min(request.page_size or 100, 1000)
    end = start + size
    return tuple(rows[start:end]), str(end) if end < len(rows) else ""


async def _serve(
    operators: FakeOperators,
    address: str,
    bound: Callable[[int], None],
    stop: asyncio.Event,
    tls: transport.TlsFiles | None,
) -> None:
    server = grpc.aio.server(options=transport.server_options())
    server.add_generic_rpc_handlers((rpc.build_handler(rpc.OPERATOR_SERVICE, *operators.parts),))
    port = await transport.listen_on_address(server, address, tls=tls, insecure=False, log=logging.getLogger("fake"))
    await server.start()
    bound(port)
    await stop.wait()
    await server.stop(grace=0.0)


@contextmanager
def serving(
    operators: FakeOperators, address: str = "127.0.0.1:0", *, tls: transport.TlsFiles | None = None
) -> Iterator[str]:
    """The service on a thread with a loop of its own, for clients that block; gives its address."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    ready, ports = threading.Event(), []

    def bound(port: int) -> None:
        ports.append(port)
        ready.set()

    def work() -> None:
        try:
            loop.run_until_complete(_serve(operators, address, bound, stop, tls))
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work, name="fake-operators")
    thread.start()
    assert ready.wait(10), "the fake did not start"
    try:
        assert ports, "the fake could not listen"
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
