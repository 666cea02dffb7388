"""Node reports: what an engine has the core do about nodes, as instructions of its pure part.

Owns the four of them. Must not know any engine, nor how they are carried out.
"""

from collections.abc import Mapping
from typing import NamedTuple

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
