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
from eelgrid_protos.file_reloader import build_listening_context, load_key_pair
from eelgrid_protos.transport import MutualTlsReloader, TlsContents, TlsFiles

ViewerAccount = bytes | str

VIEWERS_MOST = 64
# A person has some tabs; whoever shows the page on a wall has some screens.
VIEWERS_EACH_MOST = 16
# A stream ends after an hour and the browser comes again: a seat that was forgotten by both sides is free then.
VIEWER_S_MOST = 3600.0
# Of all, whatever they ask: browsers open six each.
CONNECTIONS_MOST = 512
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

    def take(self, account: ViewerAccount, now_s: float, *, is_alone: bool = False) -> ViewerSlot | str:
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
            self.leave(oldest)
        seat = ViewerSlot(account, now_s)
        self._taken[seat] = None
        return seat

    def leave(self, seat: ViewerSlot) -> None:
        """It is free; once is enough."""
        self._taken.pop(seat, None)


# Certificates


class TlsContexts:
    """TLS contexts of the newest files, and under which of them each connection came in."""

    def __init__(self, files: TlsFiles, log: logging.Logger) -> None:
        """Raises CertificateUnusable, and OSError (ssl.SSLError too)."""
        self._reloader = MutualTlsReloader(files, _build_context, name="page_tls", log=log)
        # How often a certificate had left the authority's file when the connection came.
        self._opened: weakref.WeakKeyDictionary[ssl.SSLObject, int] = weakref.WeakKeyDictionary()
        self._dates: OrderedDict[bytes, float] = OrderedDict()
        self.listening = build_listening_context(lambda: _build_context(files), self._choose_context)

    def _choose_context(self, held: ssl.SSLObject) -> ssl.SSLContext:
        context = self._reloader.refresh_configuration()
        self._opened[held] = self._reloader.authority_losses
        return context

    def refresh(self) -> None:
        """Loads files that changed."""
        self._reloader.refresh()

    def why_over(self, held: ssl.SSLObject, now_s: float) -> str:
        """Why a connection may not go on, by seconds since 1970; empty where it may."""
        losses = self._reloader.authority_losses
        if self._opened.get(held, losses) < losses:
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


def _build_context(files: TlsFiles, _contents: TlsContents | None = None) -> ssl.SSLContext:
    """For a server that takes only clients of the authority; raises OSError (ssl.SSLError too)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    # Before 1.3 a session may be resumed by its number, too, which cannot be turned off here.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    load_key_pair(context, files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# Connections


async def supervise_connections(
    server: web.Server, contexts: TlsContexts | None, *, now_s: Callable[[], float], log: logging.Logger
) -> None:
    """Ends connections of a server that may not go on, until cancelled; `now_s` gives seconds since 1970."""
    since_s: dict[Any, float] = {}
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if contexts is not None:
                await asyncio.to_thread(contexts.refresh)
            here: list[Any] = [one for one in server.connections if one.transport is not None]
            monotonic_s = time.monotonic()
            since_s = {one: since_s.get(one, monotonic_s) for one in here}
            for one in here:
                held = one.transport.get_extra_info("ssl_object")
                reason = "" if contexts is None or held is None else contexts.why_over(held, now_s())
                if reason:
                    log.info("page_connection=ended reason=%s", reason)
                    one.transport.abort()
            for one in _crowding(since_s):
                one.transport.abort()
        except Exception:  # connections are looked at again in a second
            log.exception("page_connections=failed")


def _crowding(since_s: dict[Any, float]) -> list[Any]:
    """Those that go where too many are here: of the hosts that have most, what asks nothing first, then the oldest."""
    excess = len(since_s) - CONNECTIONS_MOST
    if excess <= 0:
        return []
    hosts = {one: (one.transport.get_extra_info("peername") or ("",))[0] for one in since_s}
    counts = Counter(hosts.values())
    ordered = sorted(since_s, key=lambda one: (-counts[hosts[one]], one._current_request is not None, since_s[one]))  # noqa: SLF001  # aiohttp tells nobody
    return ordered[:excess]
