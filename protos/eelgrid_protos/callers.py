"""Callers: who is behind a call's connection, read from its certificate once.

Owns where certificates are found and those that were read. Must not know which role may what.

Theory. It is asked before a call's message is read, on every call, so a certificate is read once and remembered by
its own bytes; never by the address it came from, for a port is used again by somebody else.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_protos.certificate import CertificateUnreadable, read_certificate
from eelgrid_protos.roles import Caller, RoleRules, build_caller

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_PEM = "x509_pem_cert"
# Certificates that are remembered; all are forgotten when there are more, since reading one takes 0.1 ms.
_CALLERS_MOST = 1024
# Of an address as it is kept and shown; IPv6 with a zone and a port has 72 characters.
_PEER_MOST = 100


class CallerReader:
    """Reads the callers of one server under mutual TLS."""

    def __init__(self, rules: RoleRules) -> None:
        self._rules = rules
        self._known: dict[bytes, Caller] = {}

    def __len__(self) -> int:
        return len(self._known)

    def identify_caller(self, context: Context) -> Caller:
        """Whoever calls."""
        (pem, *_) = context.auth_context().get(_PEM) or (b"",)
        return self.read_caller(pem)

    def read_caller(self, certificate: bytes) -> Caller:
        """Whose a certificate in PEM or DER is, which TLS has verified."""
        known = self._known.get(certificate)
        if known is not None:
            return known
        try:
            text = certificate.decode("ascii") if certificate.startswith(b"-----") else certificate
            caller = build_caller(read_certificate(text), self._rules.grants, self._rules.binds)
        except (CertificateUnreadable, UnicodeDecodeError) as error:
            # TLS let it in, so it is sound; that it cannot be read here must not make it one of before roles.
            caller = Caller("", unknown=(f"nothing that can be read ({error})",))
        if len(self._known) >= _CALLERS_MOST:
            self._known.clear()
        self._known[certificate] = caller
        return caller


def peer_address(context: Context) -> str:
    """The address and port of the other side, on one line."""
    return context.peer()[:_PEER_MOST]


class RateLimitedLog:
    """Says each kind of line once in a while, with how many were left out: whoever knocks in a loop must not fill it."""

    def __init__(self, log: logging.Logger, monotonic_s: Callable[[], float]) -> None:
        self._log = log
        self._monotonic_s = monotonic_s
        # Of each kind of line: when it may be said again, and how many were not said since.
        self._quiet: dict[tuple[str, str], tuple[float, int]] = {}

    def warn(self, kind: tuple[str, str], every_s: float, line: str, *words: object) -> None:
        """Says the line unless one of its kind was said less than so long ago."""
        now_s = self._monotonic_s()
        again_s, unsaid = self._quiet.get(kind, (now_s, 0))
        if now_s < again_s:
            self._quiet[kind] = (again_s, unsaid + 1)
            return
        self._quiet[kind] = (now_s + every_s, 0)
        self._log.warning(f"{line} more_since_last_line=%d", *words, unsaid)
