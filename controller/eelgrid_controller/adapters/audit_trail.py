"""The audit trail: turns operators' calls into entries of the audit log, and thins those of calls that were refused.

Owns when an entry is written, and how many calls one stands for. Must not know what matters of a request (audit.py),
nor how entries lie on disk (audit_table.py).

Theory. A call that changes what the journal holds carries its entry with it, so that both are in one commit. One that
changes something elsewhere (a shadow, an exporter's mark) is answered once its entry is on disk. A call that was
refused gets an entry at once, but those alike (same caller, call and status) are counted for a minute and then are one
entry more: whoever knocks in a loop writes two rows a minute, and costs no commit of their own, since entries gather
for a second. Where more callers knock than are told apart, they are counted together.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.adapters.described import Family, family
from eelgrid_controller.audit import AUDITED, JOURNALLED, REPORTS, Call, essentials, is_denied
from eelgrid_controller.clock import Clock
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.roles import Caller, RoleRefused
from eelgrid_protos.callers import peer_of
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import AuditEntry

__all__ = ["AuditTrail"]

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
class _Alike:
    """Calls of one sort since the last entry about them."""

    until_s: float
    call: Call
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
        self._alike: dict[tuple[str, str, str], _Alike] = {}
        self._waiting: list[AuditEntry] = []
        self._counts: Counter[str] = Counter(accepted=0, refused=0)
        self._unwritten = 0

    def call(self, method: str, request: object, context: Context) -> Call:
        """An operator's call, with what matters of it."""
        return replace(self._unread(method, context), arguments=essentials(method, request))

    def families(self) -> Iterator[Family]:
        """What the page of metrics tells."""
        yield family("eelgrid_audit_events_total", dict(self._counts))
        yield family("eelgrid_audit_events_lost_total", self._unwritten)

    async def settled(self, path: str, context: Context, request: object | None, error: Exception | None) -> None:
        """How a call ended, before it is answered; raises Fault where what it did is to be on disk and is not."""
        method = path.rpartition("/")[2]
        if error is None:
            if method in AUDITED and request is not None:
                await self._accepted(method, request, context)
            return
        if isinstance(error, RoleRefused) and request is not None:
            # Refused by whoever looked closer than the door.
            self._count_refusal(error)
        code = _code_of(error)
        if method in AUDITED or is_denied(code):
            call = self._unread(method, context) if request is None else self.call(method, request, context)
            self._counts["refused"] += 1
            self._tell(call, code, str(error))

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
                self._wait(entry)

    def _unread(self, method: str, context: Context) -> Call:
        caller = None if self._caller_of is None else self._caller_of(context)
        return Call(method, caller, peer_of(context))

    async def _accepted(self, method: str, request: Any, context: Context) -> None:
        if getattr(request, "dry_run", False):
            return
        self._counts["accepted"] += 1
        if method in JOURNALLED:
            return
        call = self.call(method, request, context)
        if method in REPORTS:
            self._tell(call, "OK", "")
        else:
            await self._loop.audit((call.entry(time_ns=self._clock.now_ns(), code="OK"),))

    def _tell(self, call: Call, code: str, reason: str) -> None:
        """An entry now, or one call more for the next."""
        who = call.peer.rpartition(":")[0] if call.caller is None else call.caller.subject
        key = who, call.method, code
        if key not in self._alike and len(self._alike) >= _SORTS_MOST:
            key, call = (_OTHERS, "", code), Call(_OTHERS, None, _OTHERS)
        now_s = self._clock.monotonic_s()
        found = self._alike.get(key)
        if found is None:
            self._alike[key] = _Alike(now_s + _ALIKE_S, call)
            self._wait(call.entry(time_ns=self._clock.now_ns(), code=code, reason=reason))
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
            self._wait(
                found.call.entry(
                    time_ns=self._clock.now_ns(), code=key[2], reason=found.reason, calls=found.calls
                )
            )  # fmt: skip
            found.until_s, found.calls = now_s + _ALIKE_S, 0

    def _wait(self, entry: AuditEntry) -> None:
        if len(self._waiting) < _WAITING_MOST:
            self._waiting.append(entry)
        else:
            self._unwritten += entry.calls


def _code_of(error: Exception) -> str:
    """The status that the caller gets."""
    if isinstance(error, ContractError):
        return "INVALID_ARGUMENT"
    return error.code.name if isinstance(error, Fault) else "INTERNAL"
