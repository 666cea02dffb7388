"""The doorkeeper: finds the certificate behind a call and lets it in by its role.

Owns what is counted and logged of refusals. Must not know which role may what
(`roles` does), nor how certificates are found and read (eelgrid_protos.callers).

Theory. Refusals are counted by role and need, which are few, and each such pair
has one line in the log in a while: whoever knocks in a loop must not fill it.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.adapters.described import Family, family
from eelgrid_controller.clock import Clock
from eelgrid_controller.roles import NEEDS, PAGE, Caller, RoleRefused, RoleRules, check, check_node
from eelgrid_protos.callers import Callers, QuietLog

__all__ = ["Doorkeeper"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_REFUSALS_EVERY_S = 60.0
_ROLELESS_EVERY_S = 3600.0


class Doorkeeper:
    """Lets callers in whose connections are under mutual TLS."""

    def __init__(self, rules: RoleRules, *, clock: Clock, log: logging.Logger) -> None:
        self.rules = rules
        self._clock = clock
        self._log = QuietLog(log, clock.monotonic_s)
        self._callers = Callers(rules)
        self._refused: Counter[tuple[str, str]] = Counter()
        self._roleless: Counter[str] = Counter()

    def admit(self, path: str, context: Context) -> None:
        """Before each call; raises RoleRefused."""
        self._admit(path, self.caller(context))

    def admit_node(self, node_name: str, context: Context) -> None:
        """When an agent has said for which node it speaks; raises RoleRefused."""
        try:
            check_node(self.caller(context), node_name)
        except RoleRefused as refusal:
            self.count(refusal)
            raise

    def admit_viewer(self, der: bytes | None) -> None:
        """Before each answer of the live page, by the connection's certificate; raises RoleRefused."""
        self._admit(PAGE, self._callers.read(der or b""))

    def caller(self, context: Context) -> Caller:
        """Whoever calls."""
        return self._callers.of(context)

    def families(self) -> Iterator[Family]:
        """What the page of metrics tells."""
        yield family("eelgrid_calls_refused_total", dict(self._refused))
        yield family("eelgrid_calls_without_role_total", dict(self._roleless))

    def _admit(self, path: str, caller: Caller) -> None:
        try:
            is_by_role = check(caller, path, self.rules, now_s=self._clock.now_ns() / 1e9)
        except RoleRefused as refusal:
            self.count(refusal)
            raise
        if not is_by_role:
            needs = NEEDS.get(path)
            word = "admin" if needs is None else needs.value
            self._roleless[word] += 1
            self._log.warn(
                ("let in", word), _ROLELESS_EVERY_S,
                "call=%s certificate=%r role=none action=let_in remedy='give it O=eelgrid:%s, then --roles require'",
                path.rpartition("/")[2], caller.subject, word,
            )  # fmt: skip

    def count(self, refusal: RoleRefused) -> None:
        """A caller was refused, here or by whoever looked closer."""
        key = refusal.caller.greatest, refusal.needs
        self._refused[key] += 1
        self._log.warn(
            key, _REFUSALS_EVERY_S, "call=%s certificate=%r roles=%s needs=%s action=refused",
            refusal.method, refusal.caller.subject, key[0], refusal.needs,
        )  # fmt: skip
