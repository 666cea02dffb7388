"""Node reports: what an engine has the core do about nodes, as instructions of its pure part.

Owns the three of them. Must not know any engine, nor how they are carried out.
"""

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
