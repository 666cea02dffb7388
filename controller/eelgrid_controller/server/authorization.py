"""Authorization of calls: identifies the caller by its certificate and checks its role.

`Authorizer` admits calls, agents and viewers; `CallerService` serves WhoAmI; `DescribeCall` is the port by which
services describe a call for the audit log.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime.access_control import LIVE_PAGE_PATH, REQUIRED_ROLES, check_call_role
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.log_lines import RateLimitedLog
from eelgrid_protos.messages import CALLER_NODES_MOST, WhoAmIRequest, WhoAmIResponse
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import Caller, CallerReader, Role, RoleRefused, RoleRules, check_node

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_REFUSALS_EVERY_S = 60.0
_ROLELESS_EVERY_S = 3600.0


class Authorizer:
    """Lets callers in whose connections are under mutual TLS."""

    def __init__(self, rules: RoleRules, *, clock: Clock, log: logging.Logger) -> None:
        self.rules = rules
        self._clock = clock
        self._log = RateLimitedLog(log, clock.monotonic_s)
        # Here rather than in the first call, which would wait for 0.1 s of importing.
        import cryptography.x509  # noqa: F401

        self._callers = CallerReader(rules)
        self._refused: Counter[tuple[str, str]] = Counter()
        self._roleless: Counter[str] = Counter()

    def authorize_call(self, path: str, context: Context) -> None:
        """Before each call; raises RoleRefused."""
        self._admit(path, self.identify_caller(context))

    def authorize_node(self, node_name: str, context: Context) -> None:
        """When an agent has said for which node it speaks; raises RoleRefused."""
        try:
            check_node(self.identify_caller(context), node_name)
        except RoleRefused as refusal:
            self.count_refusal(refusal)
            raise

    def authorize_viewer(self, der: bytes | None) -> None:
        """Before each answer of the live page, by the connection's certificate; raises RoleRefused."""
        self._admit(LIVE_PAGE_PATH, self._callers.read_caller(der or b""))

    def identify_caller(self, context: Context) -> Caller:
        """Whoever calls."""
        return self._callers.identify_caller(context)

    def families(self) -> Iterator[MetricFamily]:
        """What the page of metrics tells."""
        yield build_family("eelgrid_calls_refused_total", dict(self._refused))
        yield build_family("eelgrid_calls_without_role_total", dict(self._roleless))

    def _admit(self, path: str, caller: Caller) -> None:
        try:
            is_by_role = check_call_role(caller, path, self.rules, now_s=self._clock.now_ns() / 1e9)
        except RoleRefused as refusal:
            self.count_refusal(refusal)
            raise
        if not is_by_role:
            needs = REQUIRED_ROLES.get(path)
            word = "admin" if needs is None else needs.value
            self._roleless[word] += 1
            self._log.warn(
                ("let in", word),
                _ROLELESS_EVERY_S,
                "call=%s certificate=%r role=none action=let_in remedy='give it O=eelgrid:%s, then --roles require'",
                path.rpartition("/")[2],
                caller.subject,
                word,
            )

    def count_refusal(self, refusal: RoleRefused) -> None:
        """A caller was refused, here or by whoever looked closer."""
        key = refusal.caller.greatest_role, refusal.needs
        self._refused[key] += 1
        self._log.warn(
            key,
            _REFUSALS_EVERY_S,
            "call=%s certificate=%r roles=%s needs=%s action=refused",
            refusal.method,
            refusal.caller.subject,
            key[0],
            refusal.needs,
        )


_NAME_MOST = 253
# RFC 5280 writes 9999-12-31 for a certificate that never ends, which is more nanoseconds than the contract has.
_NS_MOST = 2**63 - 1


class CallerService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`; `caller_of` is None where there is no TLS."""

    def __init__(self, caller_of: Callable[[Context], Caller] | None, *, demanded: bool) -> None:
        self._caller_of = caller_of
        self._demanded = demanded

    async def who_am_i(self, _request: WhoAmIRequest, context: Context) -> WhoAmIResponse:
        """Whose the caller's certificate is, and what it may."""
        if self._caller_of is None:
            return WhoAmIResponse(roles=tuple(role.value for role in Role))
        caller = self._caller_of(context)
        return WhoAmIResponse(
            subject=caller.subject,
            roles=tuple(role.value for role in Role if role in caller.roles),
            node_names=tuple(name[:_NAME_MOST] for name in sorted(caller.nodes)[:CALLER_NODES_MOST]),
            roles_demanded=self._demanded,
            not_after_ns=int(min(max(0.0, caller.ends_s) * 1e9, _NS_MOST)),
            user=caller.user,
            rights=tuple(f"{kind}:{name}" for kind, name in sorted(caller.rights) if kind != "user"),
        )


# The call behind a request, by its name; None where nobody keeps account of calls.
DescribeCall: TypeAlias = Callable[[str, object, Context], AuditedCall | None]


def describe_no_call(_method: str, _request: object, _context: Context) -> None:
    """Keeps no account of calls."""
