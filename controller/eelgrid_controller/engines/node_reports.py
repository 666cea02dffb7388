"""Node reports: what an engine has the core do about nodes, as instructions of its pure part, and how they are carried out.

Owns the four of them, and that each is given once until something changes. Must not know any engine.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.messages import Inventory, Workload


class RegisterNode(NamedTuple):
    """A node without an agent is there."""

    inventory: Inventory


class RemoveNode(NamedTuple):
    """A node was deleted, or its agent reports it from now on."""

    node_name: str


class ReportUsage(NamedTuple):
    """What others hold on a node, which demands it meets, and why nothing more may come."""

    node_name: str
    others: ExternalUsage


class CorrectDevices(NamedTuple):
    """The engine has given work other GPUs of its node than was planned: by workload and replica, which."""

    node_name: str
    held: Mapping[tuple[str, int], tuple[str, ...]]


NodeReport: TypeAlias = RegisterNode | RemoveNode | ReportUsage | CorrectDevices


class NodeReporter:
    """What an engine has said of its nodes: the inventories of those without an agent, and what others hold on each."""

    def __init__(self) -> None:
        self._registered: dict[str, Inventory] = {}
        self._reported: dict[str, ExternalUsage] = {}

    def remove_missing(
        self, names: Collection[str], *, has_agent: Collection[str] = (), closed: str = ""
    ) -> Iterator[RemoveNode | ReportUsage]:
        """Yields the removal of the nodes that are there no more; `closed` closes those for which an agent speaks on."""
        for name in sorted(self._registered.keys() - names):
            del self._registered[name]
            yield RemoveNode(name)
        for gone in sorted(self._reported.keys() - names):
            del self._reported[gone]
            if closed and gone in has_agent:
                yield ReportUsage(gone, ExternalUsage(closed=closed))

    def report(
        self, name: str, others: ExternalUsage, inventory: Inventory | None
    ) -> Iterator[RegisterNode | ReportUsage]:
        """Yields what has changed of a node; without an inventory an agent speaks for it."""
        if inventory is not None and self._registered.get(name) != inventory:
            self._registered[name] = inventory
            self._reported.pop(name, None)
            yield RegisterNode(inventory)
        if self._reported.get(name) != others:
            self._reported[name] = others
            yield ReportUsage(name, others)

    def forget(self, name: str) -> None:
        """Has a node reported again at the next look, since the core did not take it."""
        self._reported.pop(name, None)
        self._registered.pop(name, None)

    def forget_refused(self, report: object) -> None:
        """Has the node of a report that the core refused reported again; other instructions change nothing."""
        if isinstance(report, RegisterNode):
            self.forget(report.inventory.node_name)
        elif isinstance(report, ReportUsage):
            self.forget(report.node_name)


def map_gpus_by_index(state: ClusterState, workloads: Iterable[Workload]) -> dict[str, dict[int, str]]:
    """Returns the ids of GPUs by index, of the nodes on which workloads hold some."""
    names = {place.node_name for one in workloads for place in one.placements if place.gpu_uuids}
    records = ((name, state.nodes.get(name)) for name in names)
    return {name: {gpu.index: gpu.uuid for gpu in one.inventory.gpus} for name, one in records if one is not None}


async def carry_out_report(report: NodeReport, loop: CoreCommandPort, *, now_s: float) -> None:
    """Has the core take a report; `now_s` is monotonic. Raises what the core refuses it with."""
    match report:
        case RegisterNode(inventory):
            loop.presence.mark_connected(inventory.node_name)
            await loop.register_node(inventory)
        case RemoveNode(name):
            loop.presence.mark_disconnected(name, deadline_s=now_s)
        case ReportUsage(name, others):
            await loop.update_external_usage(name, others)
        case CorrectDevices(name, held):
            await loop.correct_devices(name, held)
