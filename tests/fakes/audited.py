"""The calls about the audit log and about nodes of the operators' service in memory: they say what a test put there."""

from dataclasses import dataclass, field
from typing import Any

from eelgrid_protos import faults, messages

__all__ = ["FakeAudit"]


@dataclass
class FakeAudit:
    """Has entries, and answers of removals by node; what was asked is kept."""

    entries: list[messages.AuditEntry] = field(default_factory=list)
    removals: dict[str, messages.RemoveNodeResponse | faults.Fault] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    async def list_audit_entries(
        self, request: messages.ListAuditEntriesRequest, context: Any
    ) -> messages.ListAuditEntriesResponse:
        """A page by the number of entries that were shown before."""
        self.asked.append(request)
        start, size = int(request.page_token or 0), request.page_size or 100
        more = str(start + size) if start + size < len(self.entries) else ""
        return messages.ListAuditEntriesResponse(
            entries=tuple(self.entries[start : start + size]), next_page_token=more, total=len(self.entries)
        )

    async def remove_node(self, request: messages.RemoveNodeRequest, context: Any) -> messages.RemoveNodeResponse:
        """What the test said of the node."""
        self.asked.append(request)
        found = self.removals.get(request.node_name, faults.NotFound(f"no node is called {request.node_name!r}"))
        if isinstance(found, faults.Fault):
            raise found
        return found
