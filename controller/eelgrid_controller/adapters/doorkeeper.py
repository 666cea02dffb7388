"""The doorkeeper: finds the certificate behind a call and lets it in by its role.

Owns where certificates are found (gRPC's call, HTTPS' connection), the callers
that it has read, and what is counted and logged of refusals. Must not know
which role may what: `roles` does.

Theory. It is asked before a call's message is read, on every call, so a
certificate is read once and remembered by its own bytes; never by the address
it came from, for a port is used again by somebody else. Refusals are counted
by role and need, which are few, and each such pair has one line in the log in a
while: whoever knocks in a loop must not fill it.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.adapters.described import Family, family
from eelgrid_controller.clock import Clock
from eelgrid_controller.roles import NEEDS, PAGE, Caller, RoleRefused, RoleRules, caller_of, check, check_node
from eelgrid_protos.certificate import CertificateUnreadable, read_certificate

__all__ = ["Doorkeeper"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_PEM = "x509_pem_cert"
_CALLERS_MOST = 1024
_REFUSALS_EVERY_S = 60.0
_ROLELESS_EVERY_S = 3600.0


class Doorkeeper:
    """Lets callers in whose connections are under mutual TLS."""

    def __init__(self, rules: RoleRules, *, clock: Clock, log: logging.Logger) -> None:
        self.rules = rules
        self._clock = clock
        self._log = log
        self._callers: dict[bytes, Caller] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._roleless: Counter[str] = Counter()
        # Of each kind of line: when it may be said again, and how many were not said since.
        self._quiet: dict[tuple[str, str], tuple[float, int]] = {}

    def admit(self, path: str, context: Context) -> None:
        """Before each call; raises RoleRefused."""
        self._admit(path, self.caller(context))

    def admit_node(self, node_name: str, context: Context) -> None:
        """When an agent has said for which node it speaks; raises RoleRefused."""
        try:
            check_node(self.caller(context), node_name)
        except RoleRefused as refusal:
            self._count(refusal)
            raise

    def admit_viewer(self, der: bytes | None) -> None:
        """Before each answer of the live page, by the connection's certificate; raises RoleRefused."""
        self._admit(PAGE, self._read(der or b""))

    def caller(self, context: Context) -> Caller:
        """Whoever calls."""
        (pem, *_) = context.auth_context().get(_PEM) or (b"",)
        return self._read(pem)

    def families(self) -> Iterator[Family]:
        """What the page of metrics tells."""
        yield family("eelgrid_calls_refused_total", dict(self._refused))
        yield family("eelgrid_calls_without_role_total", dict(self._roleless))

    def _read(self, certificate: bytes) -> Caller:
        known = self._callers.get(certificate)
        if known is not None:
            return known
        try:
            text = certificate.decode("ascii") if certificate.startswith(b"-----") else certificate
            caller = caller_of(read_certificate(text), self.rules.grants)
        except (CertificateUnreadable, UnicodeDecodeError) as error:
            # TLS let it in, so it is sound; that it cannot be read here must not make it one of before roles.
            caller = Caller("", unknown=(f"nothing that can be read ({error})",))
        if len(self._callers) >= _CALLERS_MOST:
            self._callers.clear()
        self._callers[certificate] = caller
        return caller

    def _admit(self, path: str, caller: Caller) -> None:
        try:
            is_by_role = check(caller, path, self.rules, now_s=self._clock.now_ns() / 1e9)
        except RoleRefused as refusal:
            self._count(refusal)
            raise
        if not is_by_role:
            needs = NEEDS.get(path)
            word = "admin" if needs is None else needs.value
            self._roleless[word] += 1
            self._say(
                ("let in", word), _ROLELESS_EVERY_S, logging.WARNING,
                "call=%s certificate=%r role=none action=let_in remedy='give it O=eelgrid:%s, then --roles require'",
                path.rpartition("/")[2], caller.subject, word,
            )  # fmt: skip

    def _count(self, refusal: RoleRefused) -> None:
        key = refusal.caller.greatest, refusal.needs
        self._refused[key] += 1
        self._say(
            key, _REFUSALS_EVERY_S, logging.WARNING, "call=%s certificate=%r roles=%s needs=%s action=refused",
            refusal.method, refusal.caller.subject, key[0], refusal.needs,
        )  # fmt: skip

    def _say(self, kind: tuple[str, str], every_s: float, level: int, line: str, *words: object) -> None:
        now_s = self._clock.monotonic_s()
        again_s, unsaid = self._quiet.get(kind, (now_s, 0))
        if now_s < again_s:
            self._quiet[kind] = (again_s, unsaid + 1)
            return
        self._quiet[kind] = (now_s + every_s, 0)
        self._log.log(level, f"{line} more_since_last_line=%d", *words, unsaid)
