"""Connections of the live page: TLS contexts, time limits and the number of viewers.

A connection ends when the certificates under which it was opened are replaced or it has lasted too long.
"""

import asyncio
import logging
import ssl
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from eelgrid_protos.certificate import CertificateUnreadable, read_certificate
from eelgrid_protos.transport import CertificateUnusable, TlsFiles, trusted_certificates

ViewerAccount = bytes | str

VIEWERS_MOST = 64
# A person has some tabs; whoever shows the page on a wall has some screens.
VIEWERS_EACH_MOST = 16
# A stream ends after an hour and the browser comes again: a seat that was forgotten by both sides is free then.
VIEWER_S_MOST = 3600.0
# Of all, whatever they ask: browsers open six each.
CONNECTIONS_MOST = 512
# From the connection to the end of its first request's head; TLS has as long before.
FIRST_REQUEST_WITHIN_S = 10.0
_LOOK_S = 1.0
_DATES_KEPT = 256


def viewer_account(request: web.Request) -> ViewerAccount:
    """Whose a request is: the certificate's, or the address's without one."""
    secured = request.get_extra_info("ssl_object")
    certificate: bytes | None = None if secured is None else secured.getpeercert(binary_form=True)
    return certificate or str(request.remote)


# Seats


@dataclass(eq=False)
class ViewerSlot:
    """One viewer's; `end` is set when another was given it."""

    account: ViewerAccount
    taken_s: float
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class ViewerSlots:
    """Who views."""

    def __init__(self, *, most: int = VIEWERS_MOST, each_most: int = VIEWERS_EACH_MOST) -> None:
        self._most = most
        self._each_most = each_most
        self._taken: dict[ViewerSlot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def acquire_slot(self, account: ViewerAccount, now_s: float, *, is_alone: bool = False) -> ViewerSlot | str:
        """A seat, or why there is none; `is_alone` where all viewers have one account and nothing is to be shared."""
        counts = Counter(seat.account for seat in self._taken)
        if not is_alone and counts[account] >= self._each_most:
            return f"{self._each_most} viewers of yours are here already"
        if len(self._taken) >= self._most:
            (greediest, most), *_ = counts.most_common(1)
            if most <= counts[account] + 1:
                return f"{self._most} viewers are here already"
            oldest = next(seat for seat in self._taken if seat.account == greediest)
            oldest.is_over.set()
            self.release_slot(oldest)
        seat = ViewerSlot(account, now_s)
        self._taken[seat] = None
        return seat

    def release_slot(self, seat: ViewerSlot) -> None:
        """It is free; once is enough."""
        self._taken.pop(seat, None)


# Certificates


class TlsContexts:
    """TLS contexts of the newest files, and under which of them each connection came in."""

    def __init__(self, files: TlsFiles, log: logging.Logger) -> None:
        """Raises OSError (ssl.SSLError too)."""
        self._files = files
        self._log = log
        self._stamp = files.stamp()
        self._trusted = trusted_certificates(files.authority.read_bytes())
        # How often a certificate has left the authority's file.
        self._losses = 0
        self._opened: weakref.WeakKeyDictionary[ssl.SSLObject, int] = weakref.WeakKeyDictionary()
        self._dates: OrderedDict[bytes, float] = OrderedDict()
        self._current, self.listening = _context(files), _context(files)
        # Called at each handshake, whether the client names a host or not.
        self.listening.sni_callback = self._chosen

    def _chosen(self, held: ssl.SSLObject, _name: str | None, _context_of: ssl.SSLContext) -> None:
        """Gives a handshake the newest certificate."""
        self.refresh()
        self._opened[held] = self._losses
        held.context = self._current

    def refresh(self) -> None:
        """Takes up files that changed."""
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return
        try:
            fresh = _context(self._files)
            trusted = trusted_certificates(self._files.authority.read_bytes())
        except (OSError, CertificateUnusable) as error:
            # Files are replaced one after the other; the next handshake looks again.
            self._log.warning("page_tls=kept reason=%s", error)
            return
        self._losses += not self._trusted <= trusted
        self._current, self._trusted, self._stamp = fresh, trusted, stamp

    def closing_reason(self, held: ssl.SSLObject, now_s: float) -> str:
        """Why a connection may not go on, by seconds since 1970; empty where it may."""
        if self._opened.get(held, self._losses) < self._losses:
            return "authority"
        certificate = held.getpeercert(binary_form=True)
        return "expired" if certificate and self._ends_s(certificate) <= now_s else ""

    def _ends_s(self, certificate: bytes) -> float:
        known = self._dates.get(certificate)
        if known is None:
            try:
                known = read_certificate(certificate).ends_s
            except CertificateUnreadable:
                # TLS has looked at its dates; what it is for is asked at each request.
                known = float("inf")
            self._dates[certificate] = known
            if len(self._dates) > _DATES_KEPT:
                self._dates.popitem(last=False)
        return known


def _context(files: TlsFiles) -> ssl.SSLContext:
    """For a server that takes only clients of the authority; raises OSError (ssl.SSLError too)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    # Before 1.3 a session may be resumed by its number, too, which cannot be turned off here.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# Connections


@dataclass(slots=True)
class _ConnectionRecord:
    since_s: float
    has_asked: bool = False


async def supervise_connections(
    server: web.Server, contexts: TlsContexts | None, *, now_s: Callable[[], float], log: logging.Logger
) -> None:
    """Ends connections of a server that may not go on, until cancelled; `now_s` gives seconds since 1970."""
    seen: dict[Any, _ConnectionRecord] = {}
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if contexts is not None:
                await asyncio.to_thread(contexts.refresh)
            here = [one for one in server.connections if one.transport is not None]
            monotonic_s = time.monotonic()
            seen = {one: seen.get(one) or _ConnectionRecord(monotonic_s) for one in here}
            for one, known in seen.items():
                known.has_asked |= one._request_count > 0  # noqa: SLF001  # aiohttp tells nobody
                reason = _why_over(one, known, contexts, monotonic_s, now_s())
                if reason:
                    log.info("page_connection=ended reason=%s", reason)
                    one.transport.abort()
            for one in _crowding(seen):
                one.transport.abort()
        except Exception:  # connections are looked at again in a second
            log.exception("page_connections=failed")


def _why_over(
    one: Any, known: _ConnectionRecord, contexts: TlsContexts | None, monotonic_s: float, now_s: float
) -> str:
    if not known.has_asked and monotonic_s - known.since_s > FIRST_REQUEST_WITHIN_S:
        return "silent"
    held = one.transport.get_extra_info("ssl_object")
    return "" if contexts is None or held is None else contexts.closing_reason(held, now_s)


def _crowding(seen: dict[Any, _ConnectionRecord]) -> list[Any]:
    """Those that go where too many are here: of the hosts that have most, what asks nothing first, then the oldest."""
    excess = len(seen) - CONNECTIONS_MOST
    if excess <= 0:
        return []
    hosts = {one: (one.transport.get_extra_info("peername") or ("",))[0] for one in seen}
    counts = Counter(hosts.values())
    ordered = sorted(seen, key=lambda one: (-counts[hosts[one]], one._current_request is not None, seen[one].since_s))  # noqa: SLF001
    return ordered[:excess]
