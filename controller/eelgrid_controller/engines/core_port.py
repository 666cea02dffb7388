"""Core port: the controller's loop, as the engines use it.

Owns the calls by which an engine submits, adopts and ends work, and tells of nodes, and how many of them go together. Must
not know any engine.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.partition.recommendation import PartitionStage
from eelgrid_controller.state.agent_liveness import AgentLiveness
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.engine_reports import Adoption, Eligibility, EngineOverrides, ExternalUsage
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import AttemptStatus, Inventory, Move, Policy, SubmitWorkloadRequest, Workload

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class CoreCommandPort(Protocol):
    """The controller's loop, as the engine uses it."""

    listeners: list[Callable[[CommitResult], None]]
    presence: AgentLiveness
    outside: EngineOverrides
    eligibility: Eligibility
    # Makes a core of a state, such as a copy on which something is tried.
    make_core: Callable[[ClusterState], Core]

    @property
    def core(self) -> Core:
        """The core at this moment."""

    @property
    def lag_s(self) -> float:
        """Seconds that the oldest command has waited; 0 where none waits."""

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """Return what `view` makes of the core."""

    async def submit(self, request: SubmitWorkloadRequest) -> Workload:
        """Submit a workload."""

    async def submit_all(self, requests: Sequence[SubmitWorkloadRequest]) -> list[Workload | Fault | ContractError]:
        """Submit workloads in their order, in one commit; in place of one, why it was refused."""

    async def adopt(self, request: SubmitWorkloadRequest, adoption: Adoption) -> Workload:
        """Take over work at the places where it stands, and let go those where it stands no more."""

    async def cancel(self, workload_id: str, *, reason: str = "") -> Workload:
        """End a workload, for a reason of the engine."""

    async def record_engine_attempts(self, statuses: Sequence[AttemptStatus], *, more_follow: bool = False) -> int:
        """Record what an engine reports of work that it runs, one attempt for all replicas; how many are outdated.

        If `more_follow`, pending work is not tried before `reconsider`.
        """

    async def scale(self, workload_id: str, replicas: int) -> Workload:
        """Bring running work to so many replicas, or as near as there is room."""

    async def register_node(self, inventory: Inventory, *, plan_epoch: int = 0) -> None:
        """Register a node."""

    async def update_external_usage(self, node_name: str, others: ExternalUsage) -> None:
        """Report external usage of a node."""

    async def cordon_node(
        self, node_name: str, gpus: tuple[str, ...] = (), *, reason: str = "", drain: DrainTerms | None = None
    ) -> NodeRecord:
        """Close a node to new work, and empty it with `drain`."""

    async def reconsider(self) -> None:
        """Retry pending workloads."""

    async def refuse_preemption(self, workload_id: str, reason: str, *, again_s: float) -> None:
        """Let a victim run on; it is none again for so many seconds."""

    async def update_policy(self, policy: Policy) -> Policy:
        """Put a policy in force, made of the one of its revision."""

    async def correct_devices(self, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]]) -> None:
        """Replicas hold these GPUs of their node."""

    async def apply_partitions(self, change: PartitionStage) -> None:
        """Change MIG layouts, all or nothing."""

    async def apply_moves(self, moves: Sequence[Move], *, is_back: bool = False) -> int:
        """Move places, or take moves back."""


async def call_in_batches(
    call: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]],
    items: Sequence[_Item],
    *,
    size: int,
    most_s: float,
    clock: Clock,
) -> list[_Result]:
    """Calls for `size` items at a time, of which the core makes as few commits as it can.

    After `most_s` seconds no more are begun, so that others have their turn: the results are those of the first items.
    """
    results, begun_s = list[_Result](), clock.monotonic_s()
    for first in range(0, len(items), size):
        if first and clock.monotonic_s() - begun_s > most_s:
            break
        results += await call(items[first : first + size])
    return results
