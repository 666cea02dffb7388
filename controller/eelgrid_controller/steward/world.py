"""What the steward sees in one cycle: promised workloads, their nodes, what is known of profiles, what nodes said.

Owns the frozen view. Must not know how it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.modes import enforces
from eelgrid_controller.outside import Bounds
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.steering.sharing import Shared
from eelgrid_controller.steward.meters import GpuLook, Progress
from eelgrid_controller.steward.prices import NodeDraw
from eelgrid_controller.steward.rounds import Round
from eelgrid_protos.messages import Inventory, PlanApplied, Policy, Workload

__all__ = ["NodeLook", "NodeView", "World", "enforced", "models_of"]


class NodeView(NamedTuple):
    """A node as the core has it."""

    inventory: Inventory
    is_ready: bool
    lost_gpus: frozenset[str] = frozenset()


class NodeLook(NamedTuple):
    """What a node told last: its newest fresh readings, and what became of its plan."""

    gpus: Mapping[str, GpuLook]  # with energy and limit both
    limits_w: Mapping[str, float]
    applied: PlanApplied | None
    age_s: float | None  # of the readings


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One cycle's view; `at_s` is Unix time that does not go back."""

    at_s: float
    policy: Policy
    workloads: Mapping[str, Workload] = field(default_factory=dict)  # promised and placed
    nodes: Mapping[str, NodeView] = field(default_factory=dict)  # of those
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  # by profile
    looks: Mapping[str, NodeLook] = field(default_factory=dict)  # of the nodes of jobs
    rounds: Mapping[str, Round] = field(default_factory=dict)  # new pages, by workload
    progress: Mapping[str, Progress] = field(default_factory=dict)  # as jobs told it themselves, newest
    draws: tuple[NodeDraw, ...] | None = None  # of all nodes, where they were summed in this cycle
    divided: tuple[tuple[int, Shared | None], ...] = ()  # divisions that were worked out since, by their numbers
    advised: frozenset[str] = frozenset()  # workloads that somebody outside says are not to be changed
    bounds: Mapping[str, Bounds] = field(default_factory=dict)  # of replicas, narrower than promised
    pages: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # of metrics, where no promise can say it
    grown: Mapping[str, frozenset[int]] = field(default_factory=dict)  # replicas that did not begin just now
    free: Mapping[str, int] | None = None  # GPUs that nobody holds or waits for, by model, where counted in this cycle


def models_of(workload: Workload, world: World) -> frozenset[str]:
    """The GPU models that a workload runs on, as far as its nodes are known."""
    return frozenset(
        gpu.model
        for placement in workload.placements
        if (node := world.nodes.get(placement.node_name)) is not None
        for gpu in node.inventory.gpus
        if gpu.uuid in placement.gpu_uuids
    )


def enforced(world: World, workload: Workload) -> bool:
    """Whether all nodes of a workload may be changed, and the workload itself."""
    if workload.workload_id in world.advised:
        return False
    nodes = [world.nodes.get(placement.node_name) for placement in workload.placements]
    return all(node is not None and enforces(world.policy, node.inventory.pool) for node in nodes)
