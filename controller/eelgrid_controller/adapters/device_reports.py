"""What agents say that pods hold: the newest word of each node.

Owns the newest report of each node, and who is told of a new one. Must not know pods or plans.
"""

from collections.abc import Callable
from typing import NamedTuple

from eelgrid_protos.messages import HeldDevices

__all__ = ["DeviceReport", "DeviceReports"]


class DeviceReport(NamedTuple):
    """A node's word, and when it came, by a clock that does not go back."""

    held: HeldDevices
    at_s: float


class DeviceReports:
    """By node; a node that falls silent keeps its last word."""

    def __init__(self, *, monotonic_s: Callable[[], float]) -> None:
        self.newest: dict[str, DeviceReport] = {}
        self.listeners: list[Callable[[str, DeviceReport], None]] = []
        self._monotonic_s = monotonic_s

    def told(self, node_name: str, held: HeldDevices) -> None:
        """An agent has spoken."""
        report = self.newest[node_name] = DeviceReport(held, self._monotonic_s())
        for listener in self.listeners:
            listener(node_name, report)
