"""Who calls, as the controller sees it: mirrored by operator_service.proto."""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.quantities import Label, Many, Nanoseconds, Text

__all__ = ["CALLER_NODES_MOST", "WhoAmIRequest", "WhoAmIResponse"]

CALLER_NODES_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIRequest:
    """Needs no role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIResponse:
    """Whose the caller's certificate is, and what it may; without TLS there is none, and everybody may everything."""

    subject: Annotated[str, Text(512)] = ""
    # agent, viewer, submitter, admin.
    roles: Annotated[tuple[Label, ...], Many(16)] = ()
    # Nodes that it speaks for; empty for any, if it has the role agent.
    node_names: Annotated[tuple[Label, ...], Many(CALLER_NODES_MOST)] = ()
    # Certificates without a role are refused; else they may everything.
    roles_demanded: bool = False
    # When the certificate ends, since 1970; 0 without TLS.
    not_after_ns: Nanoseconds = 0
    # Whom its work belongs to; empty where the certificate names nobody.
    user: Label = ""
    # What it names that it may submit to, as in namespace:research.
    rights: Annotated[tuple[Annotated[str, Text(270)], ...], Many(CALLER_NODES_MOST)] = ()
