"""Node reports: what an engine has the core do about nodes, as instructions of its pure part, and how they are carried out.

Owns the four of them. Must not know any engine.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.messages import Inventory


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
