"""The audit trail of operator calls, and the call that lists it.

`AuditTrail` turns calls into entries and merges repeated refusals; `AuditService` serves ListAuditEntries.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import JournalError
from eelgrid_controller.runtime.audit_log import (
    AUDITED,
    JOURNALLED,
    REPORTS,
    AuditedCall,
    AuditFilter,
    AuditPage,
    is_denied,
    summarize_request,
)
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.pagination import next_page_token, parse_page_request
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Unavailable
from eelgrid_protos.messages import AuditEntry, ListAuditEntriesRequest, ListAuditEntriesResponse
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import Caller, RoleRefused, peer_address

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_WRITE_EVERY_S = 1.0
# Calls alike within so long are one entry more.
_ALIKE_S = 60.0
# Sorts of refused calls that are told apart: each is some 300 bytes for a minute.
_SORTS_MOST = 1024
# Entries that wait while the disk takes nothing; what is beyond is counted alone.
_WAITING_MOST = 4096
# What callers are called that are told apart no more.
_OTHERS = "(others)"


@dataclass(slots=True)
class _RepeatedRefusal:
    """Calls of one sort since the last entry about them."""

    until_s: float
    call: AuditedCall
    reason: str = ""
    calls: int = 0


class AuditTrail:
    """Of one controller; `caller_of` is None where there is no TLS."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        clock: Clock,
        log: logging.Logger,
        caller_of: Callable[[Context], Caller] | None,
        count_refusal: Callable[[RoleRefused], None] = lambda _: None,
    ) -> None:
        self._loop, self._clock, self._log = loop, clock, log
        self._caller_of = caller_of
        self._count_refusal = count_refusal
        self._alike: dict[tuple[str, str, str], _RepeatedRefusal] = {}
        self._waiting: list[AuditEntry] = []
        self._counts: Counter[str] = Counter(accepted=0, refused=0)
        self._unwritten = 0

    def describe_call(self, method: str, request: object, context: Context) -> AuditedCall:
        """An operator's call, with what matters of it."""
        return replace(self._unread(method, context), arguments=summarize_request(method, request))

    def families(self) -> Iterator[MetricFamily]:
        """What the page of metrics tells."""
        yield build_family("eelgrid_audit_events_total", dict(self._counts))
        yield build_family("eelgrid_audit_events_lost_total", self._unwritten)

    async def on_call_end(self, path: str, context: Context, request: object | None, error: Exception | None) -> None:
        """How a call ended, before it is answered; raises Fault where what it did is to be on disk and is not."""
        method = path.rpartition("/")[2]
        if error is None:
            if method in AUDITED and request is not None:
                await self._on_accepted(method, request, context)
            return
        if isinstance(error, RoleRefused) and request is not None:
            # Refused by whoever looked closer than the door.
            self._count_refusal(error)
        code = _code_of(error)
        if method in AUDITED or is_denied(code):
            call = self._unread(method, context) if request is None else self.describe_call(method, request, context)
            self._counts["refused"] += 1
            self._record_call(call, code, str(error))

    async def run(self) -> None:
        """Writes what gathered, until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Writes what has gathered; what cannot be written now is tried again."""
        self._ripen()
        entries, self._waiting = self._waiting, []
        if not entries:
            return
        try:
            await self._loop.audit(entries)
        except Fault as error:
            self._log.debug("audit=later entries=%d reason=%s", len(entries), error)
            for entry in entries:
                self._enqueue(entry)

    def _unread(self, method: str, context: Context) -> AuditedCall:
        caller = None if self._caller_of is None else self._caller_of(context)
        return AuditedCall(method, caller, peer_address(context))

    async def _on_accepted(self, method: str, request: Any, context: Context) -> None:
        if getattr(request, "dry_run", False):
            return
        self._counts["accepted"] += 1
        if method in JOURNALLED:
            return
        call = self.describe_call(method, request, context)
        if method in REPORTS:
            self._record_call(call, "OK", "")
        else:
            await self._loop.audit((call.entry(time_ns=self._clock.now_ns(), code="OK"),))

    def _record_call(self, call: AuditedCall, code: str, reason: str) -> None:
        """An entry now, or one call more for the next."""
        who = call.peer.rpartition(":")[0] if call.caller is None else call.caller.subject
        key = who, call.method, code
        if key not in self._alike and len(self._alike) >= _SORTS_MOST:
            key, call = (_OTHERS, "", code), AuditedCall(_OTHERS, None, _OTHERS)
        now_s = self._clock.monotonic_s()
        found = self._alike.get(key)
        if found is None:
            self._alike[key] = _RepeatedRefusal(now_s + _ALIKE_S, call)
            self._enqueue(call.entry(time_ns=self._clock.now_ns(), code=code, reason=reason))
            return
        found.call, found.reason, found.calls = call, reason, found.calls + 1

    def _ripen(self) -> None:
        """Entries of calls that were counted for long enough."""
        now_s = self._clock.monotonic_s()
        for key, found in list(self._alike.items()):
            if now_s < found.until_s:
                continue
            if not found.calls:
                del self._alike[key]
                continue
            self._enqueue(
                found.call.entry(time_ns=self._clock.now_ns(), code=key[2], reason=found.reason, calls=found.calls)
            )
            found.until_s, found.calls = now_s + _ALIKE_S, 0

    def _enqueue(self, entry: AuditEntry) -> None:
        if len(self._waiting) < _WAITING_MOST:
            self._waiting.append(entry)
        else:
            self._unwritten += entry.calls


def _code_of(error: Exception) -> str:
    """The status that the caller gets."""
    if isinstance(error, ContractError):
        return "INVALID_ARGUMENT"
    return error.code.name if isinstance(error, Fault) else "INTERNAL"


class AuditReader(Protocol):
    """Who has the entries."""

    def read_audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """A page, the newest first; any thread may ask. Raises JournalError."""


class AuditFlusher(Protocol):
    """Who has entries that are not on disk yet."""

    async def write(self) -> None:
        """Writes them."""


class AuditService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, journal: AuditReader, trail: AuditFlusher) -> None:
        self._journal = journal
        self._trail = trail

    async def list_audit_entries(self, request: ListAuditEntriesRequest, _context: Context) -> ListAuditEntriesResponse:
        """Who asked to change what, the newest first; raises InvalidArgument and Unavailable."""
        size, after = parse_page_request(request)
        before = after[0] if after and isinstance(after[0], int) else None
        wanted = AuditFilter(request.since_ns, request.user, request.call, request.denied)
        await self._trail.write()
        try:
            page = await asyncio.to_thread(self._journal.read_audit_page, wanted, size=size, before=before)
        except JournalError as error:
            raise Unavailable(str(error)) from error
        return ListAuditEntriesResponse(
            entries=page.entries,
            next_page_token=next_page_token(request, (page.next_before,)) if page.next_before else "",
            total=page.total,
            damaged=page.damaged,
        )
