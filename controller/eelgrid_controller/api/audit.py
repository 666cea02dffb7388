"""The operators' call about the audit log. Owns its pages; whoever keeps the entries finds them."""

import asyncio
from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.api.pages import page_of, token_after
from eelgrid_controller.audit import AuditFilter, AuditPage
from eelgrid_controller.errors import JournalError
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import ListAuditEntriesRequest, ListAuditEntriesResponse

__all__ = ["AuditCalls", "KeepsAudit"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class KeepsAudit(Protocol):
    """Who has the entries."""

    def audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """A page, the newest first; any thread may ask. Raises JournalError."""


class WritesAudit(Protocol):
    """Who has entries that are not on disk yet."""

    async def write(self) -> None:
        """Writes them."""


class AuditCalls:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, journal: KeepsAudit, trail: WritesAudit) -> None:
        self._journal = journal
        self._trail = trail

    async def list_audit_entries(self, request: ListAuditEntriesRequest, _context: Context) -> ListAuditEntriesResponse:
        """Who asked to change what, the newest first; raises InvalidArgument and Unavailable."""
        size, after = page_of(request)
        before = after[0] if after and isinstance(after[0], int) else None
        wanted = AuditFilter(request.since_ns, request.user, request.call, request.denied)
        await self._trail.write()
        try:
            page = await asyncio.to_thread(self._journal.audit_page, wanted, size=size, before=before)
        except JournalError as error:
            raise Unavailable(str(error)) from error
        return ListAuditEntriesResponse(
            entries=page.entries,
            next_page_token=token_after(request, (page.next_before,)) if page.next_before else "",
            total=page.total,
            damaged=page.damaged,
        )
