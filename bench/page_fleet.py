"""A fleet for the live page without a controller: a state made by events, telemetry, and a source over both.

Owns synthetic readings. Nothing is decided here: placements are given.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from eelgrid_controller.core.recovery import encode_entries
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.status import budget_statuses
from eelgrid_controller.server.http.live_hub import LiveHub
from eelgrid_controller.server.http.live_server import LiveServer
from eelgrid_controller.state.budget_power import BudgetMeter
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, NodeJoined, WorkloadDeferred, WorkloadPlaced, WorkloadSubmitted
from eelgrid_controller.state.journal import JournalHistory
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.messages import (
    BudgetStatus,
    Candidate,
    Column,
    CostTerm,
    Explanation,
    Gpu,
    GpuInstance,
    Inventory,
    ListPromisesResponse,
    NodeState,
    Overview,
    Placement,
    Reading,
    Removal,
    ReplicaExplanation,
    ResourceRequest,
    SampleBatch,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.transport import TlsFiles

LOG = logging.getLogger("bench.page")
MODELS = (("H100", 700.0), ("A100", 400.0), ("L4", 72.0))
WAITS = "gpu_count: no node has enough whole GPUs free"


def inventory(number: int, *, gpus: int = 8, racks: bool = True) -> Inventory:
    """A node of eight GPUs; each fifth GPU of an A100 node is cut."""
    name = f"node-{number:04d}"
    model, limit_w = MODELS[number % 3 if number % 7 else 0]
    return Inventory(
        node_name=name,
        cpu_milli=128_000,
        memory_bytes=2**40,
        pool="main",
        topology=(f"zone-{number // 256}", f"rack-{number // 16:03d}") if racks else (),
        gpus=tuple(
            Gpu(
                uuid=f"GPU-{name}-{index}",
                index=index,
                product=f"NVIDIA {model}",
                model=model,
                memory_bytes=80 * 2**30,
                power_limit_default_w=limit_w,
                power_limit_min_w=limit_w / 2,
                power_limit_max_w=limit_w,
                mig_capable=model != "L4",
                mig_enabled=(cut := model == "A100" and index % 5 == 0),
                gpu_instances=(
                    GpuInstance(id=1, profile_id=9, profile="3g.40gb", start=0, size=4),
                    GpuInstance(id=2, profile_id=14, profile="2g.20gb", start=4, size=2),
                    GpuInstance(id=3, profile_id=19, profile="1g.10gb", start=6, size=1),
                )
                if cut
                else (),
            )
            for index in range(gpus)
        ),
    )


def explained(node_name: str, gpus: tuple[int, ...]) -> tuple[ReplicaExplanation, ...]:
    """Why one replica went there; one other place was weighed."""
    terms = (CostTerm(name="power", cost_w=212.5), CostTerm(name="fragmentation", cost_w=31.0))
    worse = (CostTerm(name="power", cost_w=290.0), CostTerm(name="fragmentation", cost_w=12.5))
    return (
        ReplicaExplanation(
            replica=0,
            candidates=(
                Candidate(node_name=node_name, gpu_indexes=gpus, cost_w=243.5, terms=terms),
                Candidate(node_name="node-0001", gpu_indexes=(0,), cost_w=302.5, terms=worse),
            ),
            feasible_nodes=17,
            removals=(Removal(constraint="gpu_count", nodes=1203),),
        ),
    )


class PageFleet:
    """Implements `Source` over a state of its own."""

    def __init__(self, nodes: int, *, gpus: int = 8, racks: bool = True, seed: int = 1) -> None:
        self.state = ClusterState()
        self.telemetry = Telemetry()
        self.hub: LiveHub | None = None
        self.promised = ListPromisesResponse()
        self.seen: Overview | None = None
        self.idle: frozenset[tuple[str, int]] = frozenset()
        self._meter = BudgetMeter()
        self._rng = random.Random(seed)
        self._sequence = 0
        self._events: list[Event] = []
        self._busy: dict[str, float] = {}
        for number in range(nodes):
            self.happen(NodeJoined(time_ns=self.now_ns(), inventory=inventory(number, gpus=gpus, racks=racks)))
            self.telemetry.open_stream(self.state.nodes[f"node-{number:04d}"].inventory, 1)

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()

    def promises(self) -> ListPromisesResponse:
        """What was given as `promised`."""
        return self.promised

    def budgets(self) -> tuple[BudgetStatus, ...]:
        """How the budgets of the policy stand; nothing is claimed."""
        policy, steering = self.state.policy, ObjectiveController().controller_status()
        readings = self.telemetry.readings(now_s=self.now_s(), now_ns=self.now_ns())
        return budget_statuses(steering, policy, self._meter.measure(policy, self.state.nodes, readings))

    async def overview(self) -> Overview:
        """What was given as `seen`, or nothing to attend to."""
        return self.seen or Overview(time_ns=self.now_ns())

    async def idle_gpus(self) -> frozenset[tuple[str, int]]:
        """What was given as `idle`."""
        return self.idle

    def read_history(self) -> JournalHistory:
        """All that happened."""
        return JournalHistory(None, tuple(enumerate(encode_entries(self._events), 1)))

    def current_state(self) -> ClusterState:
        """The state."""
        return self.state

    async def read(self, view: Callable[[ClusterState], Any]) -> Any:
        """What a view makes of the state."""
        return view(self.state)

    async def explain_workload(self, workload_id: str) -> Explanation | None:
        """What was given as the reason."""
        workload = self.state.workloads.get(workload_id)
        if workload is None:
            return None
        if workload.phase is WorkloadPhase.PENDING:
            return Explanation(workload=workload, remedy="Cancel work that holds whole GPUs.", constraint="gpu_count")
        return Explanation(workload=workload, replicas=self.state.explanations.get(workload_id))

    def happen(self, *events: Event) -> None:
        """What a commit does: the state changes, then listeners hear of it."""
        nodes = frozenset().union(*(self.state.apply(event) for event in events))
        self._events += events
        if self.hub is not None:
            self.hub.on_commit(CommitResult(events, nodes, self.state.revision))

    def submit(
        self,
        workload_id: str,
        *,
        gpus: int = 1,
        milli: int = 1000,
        name: str = "train",
        namespace: str = "default",
        user: str = "",
    ) -> None:
        """A workload comes."""
        request = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=gpus, gpu_milli=milli)
        spec = WorkloadSpec(name=name, namespace=namespace, user=user, request=request)
        self.happen(WorkloadSubmitted(time_ns=self.now_ns(), workload_id=workload_id, spec=spec))

    def place(self, workload_id: str, node_name: str, indexes: Sequence[int], **wanted: Any) -> None:
        """A workload on these GPUs."""
        self.submit(workload_id, gpus=len(indexes), **wanted)
        placement = Placement(
            replica=0,
            node_name=node_name,
            gpu_indexes=tuple(indexes),
            gpu_uuids=tuple(f"GPU-{node_name}-{index}" for index in indexes),
        )
        self.happen(
            WorkloadPlaced(
                time_ns=self.now_ns(),
                workload_id=workload_id,
                placements=(placement,),
                explanation=explained(node_name, tuple(indexes)),
            )
        )

    def wait(self, workload_id: str, **wanted: Any) -> None:
        """A workload that waits."""
        self.submit(workload_id, **wanted)
        self.happen(WorkloadDeferred(time_ns=self.now_ns(), workload_id=workload_id, reason=WAITS))

    def fill(self, share: float = 0.7, *, waiting: int = 30) -> None:
        """Work on so many of the nodes, and some that waits."""
        for number, record in enumerate(list(self.state.nodes.values())):
            gpus = [gpu.index for gpu in record.inventory.gpus if not gpu.mig_enabled]
            if self._rng.random() < share and gpus:
                self.place(f"w-{number + 1}", record.inventory.node_name, gpus[: self._rng.choice((1, 2, 4, 8))])
        for number in range(waiting):
            self.wait(f"w-{len(self.state.nodes) + number + 1}", gpus=8, name=f"big-{number}")

    def report(self, *, part: float = 1.0) -> None:
        """A batch of one tick from this part of the nodes that are not lost: what holds work draws, with some noise."""
        self._sequence += 1
        rng, now_s, now_ns = self._rng, self.now_s(), self.now_ns()
        for name, record in self.state.nodes.items():
            if record.state is NodeState.LOST or (part < 1.0 and rng.random() > part):
                continue
            powers = tuple(self._power_w(record, gpu) for gpu in record.inventory.gpus)
            batch = SampleBatch(
                sequence=self._sequence,
                inventory_generation=record.inventory.generation,
                time_ns=(now_ns,),
                gpu_columns=(
                    Column(reading=Reading.POWER_W, values=powers),
                    Column(reading=Reading.UTILIZATION_RATIO, values=tuple(0.5 for _ in powers)),
                    Column(reading=Reading.TEMPERATURE_C, values=tuple(61.0 for _ in powers)),
                ),
            )
            self.telemetry.receive_batch(name, batch, now_s=now_s)

    def _power_w(self, record: NodeRecord, gpu: Gpu) -> float:
        limit_w = gpu.power_limit_default_w or 100.0
        if gpu.uuid not in record.gpu_milli:
            return limit_w * 0.12 + self._rng.random() * 2
        load = self._busy.setdefault(gpu.uuid, self._rng.uniform(0.45, 0.97))
        return limit_w * min(1.0, load + self._rng.uniform(-0.02, 0.02))

    async def open(
        self,
        address: str = "127.0.0.1:0",
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        every_s: float = 1.0,
        admit: Callable[[bytes | None], None] | None = None,
    ) -> LiveServer:
        """A door on a port; close it with `stop`."""
        self.hub = LiveHub(self, log=LOG, every_s=every_s)
        door = LiveServer(self.hub, self, tls=tls, insecure=insecure, log=LOG, admit=admit)
        await door.start(address)
        return door
