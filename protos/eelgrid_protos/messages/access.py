"""Messages of access control: the caller's identity (WhoAmI) and audit entries."""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.operator import PAGE_SIZE_MOST
from eelgrid_protos.quantities import Label, Many, Nanoseconds, PageToken, Text, Uint32, Uint64

# Characters of the stored arguments of one call: a page of a thousand entries stays under 4 MB.
AUDIT_ARGUMENTS_MOST = 1000
AUDIT_REASON_MOST = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One call that changed something, or several similar ones that changed nothing."""

    number: Uint64 = 0
    time_ns: Nanoseconds = 0
    subject: Annotated[str, Text(512)] = ""
    user: Label = ""
    role: Label = ""
    peer: Label = ""
    call: Label = ""
    arguments: Annotated[str, Text(AUDIT_ARGUMENTS_MOST)] = ""
    code: Label = ""
    reason: Annotated[str, Text(AUDIT_REASON_MOST)] = ""
    calls: Uint32 = 1
    revision: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAuditEntriesRequest:
    """Asks for a page of entries, the newest first; a page size of 0 means 100, more than 1000 means 1000."""

    page_size: Uint32 = 0
    page_token: PageToken = ""
    since_ns: Nanoseconds = 0
    user: Label = ""
    call: Label = ""
    denied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAuditEntriesResponse:
    """A page of entries; `damaged` is the number of stored entries that could not be read."""

    entries: Annotated[tuple[AuditEntry, ...], Many(PAGE_SIZE_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    damaged: Uint32 = 0
    omitted: Uint32 = 0


CALLER_NODES_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIRequest:
    """Asks for the caller's identity; needs no role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmIResponse:
    """Identity and permissions of the caller's certificate; without TLS there is none, and every call is allowed."""

    subject: Annotated[str, Text(512)] = ""
    # agent, viewer, submitter, admin.
    roles: Annotated[tuple[Label, ...], Many(16)] = ()
    # Nodes for which it may report; empty for any, if it has the role agent.
    node_names: Annotated[tuple[Label, ...], Many(CALLER_NODES_MOST)] = ()
    # Whether certificates without a role are refused; otherwise every call is allowed to them.
    roles_demanded: bool = False
    # When the certificate expires, in nanoseconds since 1970; 0 without TLS.
    not_after_ns: Nanoseconds = 0
    # Owner of the work that it submits; empty if the certificate names no user.
    user: Label = ""
    # Where it may submit to, as in namespace:research.
    rights: Annotated[tuple[Annotated[str, Text(270)], ...], Many(CALLER_NODES_MOST)] = ()
