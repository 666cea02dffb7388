"""The call that tells callers who they are. Owns the translation of a caller into the contract."""

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.roles import Caller, Role
from eelgrid_protos.messages import CALLER_NODES_MOST, WhoAmIRequest, WhoAmIResponse

__all__ = ["CallerCalls"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_NAME_MOST = 253
# RFC 5280 writes 9999-12-31 for a certificate that never ends, which is more nanoseconds than the contract has.
_NS_MOST = 2**63 - 1


class CallerCalls:
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
