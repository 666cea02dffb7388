"""Roles: the roles and rights of a client certificate, and the refusal of calls that they do not allow.

Owns the roles, how a certificate gets its roles, its user and its rights to namespaces, queues and labels, the check
of a role against the one that a call needs, and the callers that were read. Both daemons build on it; each has a table
of its own calls. Of a connection it knows only the certificate that TLS has verified; the time is an argument.

Theory. As Kubernetes derives a user from the common name of the client certificate and the user's groups from its
organizations, a certificate has the roles that its organizations name: `O=eelgrid:viewer`. Its user is its common
name, and it may submit to the namespaces, queues and labels that it names, `eelgrid:namespace:NAME`, as organization
or as URI. A certificate whose authority cannot write such names is granted a role (`grants`) or bound to a right
(`binds`) by another of its names. `eelgrid:node:NAME`, as common name or as URI where that is longer than the 64
characters that a common name may have, binds an agent to its node, as `system:node:NAME` does a kubelet.

Callers are asked for before a call's message is read, on every call, so a certificate is read once and remembered by
its own bytes; never by the address it came from, for a port is used again by somebody else.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from eelgrid_protos.certificate import PEM_PROPERTY, Certificate, CertificateUnreadable, read_certificate
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import PermissionDenied
from eelgrid_protos.local_users import PROOF_KEY, verify_proof
from eelgrid_protos.values import dataclass

if TYPE_CHECKING:
    import grpc.aio


class Role(Enum):
    """What the holder of a certificate may do."""

    # Reports for nodes; makes no operators' calls.
    AGENT = "agent"
    # Hands on what agents say whose connections end at it; makes no other call.
    INGEST = "ingest"
    # Reads everything, changes nothing.
    VIEWER = "viewer"
    # A viewer who also submits, scales and ends its own work, and reports its progress.
    SUBMITTER = "submitter"
    # A submitter who also sets the policy and what is enforced on the cluster.
    ADMIN = "admin"


_HELD: Mapping[Role, frozenset[Role]] = {
    Role.AGENT: frozenset({Role.AGENT}),
    Role.INGEST: frozenset({Role.INGEST}),
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.SUBMITTER: frozenset({Role.VIEWER, Role.SUBMITTER}),
    Role.ADMIN: frozenset({Role.VIEWER, Role.SUBMITTER, Role.ADMIN}),
}
_MARK, _NODE_MARK = "eelgrid:", "eelgrid:node:"
_BY_NAME = {role.value: role for role in Role}
_GRANT_KINDS = ("CN", "O", "OU", "DNS", "URI", "EMAIL")
_RIGHT_KINDS = ("namespace", "queue", "label", "user", "impersonate")
# More than this many command-line flags are impractical; certificates that name their rights need none.
_GRANTS_MOST = 256
_BINDS_MOST = 1024
# Per certificate; rights beyond are ignored, which is the safe direction.
_RIGHTS_MOST = 256
# Maximum length of a user, a namespace or a queue in the contract.
_NAME_MOST = 253
_SHOWN_MOST = 3
_BIND = re.compile(rf"({'|'.join(_RIGHT_KINDS)}):(.+?)=({'|'.join(_GRANT_KINDS)}):(.+)", re.DOTALL)

# A right to every namespace, to every queue, or to submit for every user.
ANY = "*"

Name = tuple[str, str]
# Its kind (namespace, queue, label, user or impersonate) and its name; a label's name is KEY=VALUE.
Right = tuple[str, str]


class BadGrant(ValueError):
    """A grant or a bind cannot be parsed."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}")


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The operator's rules: whether certificates without a role are refused, and additional grants and binds."""

    demanded: bool = False
    grants: Mapping[Name, Role] = field(default_factory=dict)
    binds: Mapping[Name, tuple[Right, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a certificate: `unknown` are `eelgrid:` names that are no role, `ends_s` is seconds since 1970."""

    subject: str
    roles: frozenset[Role] = frozenset()
    # An agent's certificate that names nodes speaks for no others; one that names none for any.
    nodes: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    ends_s: float = float("inf")
    # Owner of the work that it submits; empty if the certificate names no user.
    user: str = ""
    rights: frozenset[Right] = frozenset()
    # Known as a user of this machine, without a certificate.
    is_local_user: bool = False

    @property
    def predates_roles(self) -> bool:
        """Returns whether the certificate names no role, valid or not."""
        return not self.roles and not self.unknown

    @property
    def greatest_role(self) -> str:
        """Returns the greatest of its roles as one word, for metrics."""
        order = (Role.ADMIN, Role.SUBMITTER, Role.VIEWER, Role.INGEST, Role.AGENT)
        return next((role.value for role in order if role in self.roles), "unknown" if self.unknown else "none")

    @property
    def description(self) -> str:
        """Returns its roles as text for people."""
        if self.roles:
            named = sorted(role.value for role in self.roles)
            return f"has the role {named[0]}" if len(named) == 1 else f"has the roles {', '.join(named)}"
        if self.unknown:
            return f"names {', '.join(self.unknown[:_SHOWN_MOST])}, which is no role"
        return "has no role"

    def has_role(self, role: Role) -> bool:
        """Returns whether one of its roles includes this one."""
        return any(role in _HELD[one] for one in self.roles)

    def rights_of_kind(self, kind: str) -> tuple[str, ...]:
        """Returns the names of one kind of right, sorted."""
        return tuple(sorted(name for one, name in self.rights if one == kind))


class RoleRefused(PermissionDenied):
    """The caller may not do this; `needs` is, for metrics, a role's name, `node`, `date` or `owner`."""

    def __init__(self, caller: Caller, method: str, needs: str, *, words: str, problem: str, remedy: str) -> None:
        self.caller = caller
        self.method = method
        self.needs = needs
        if caller.is_local_user:
            # There is no other certificate to use, and root is an administrator.
            remedy = "ask root, or the owner of the work if it has one"
            violation = Violation("user", f"is {caller.user or 'nobody'}", remedy)
        else:
            violation = Violation("certificate", f"{caller.subject or '(no name)'} {problem}", remedy)
        super().__init__(f"{method} {words}", (violation,))


def parse_grants(texts: Iterable[str]) -> Mapping[Name, Role]:
    """Parses grants of the form ROLE=KIND:NAME, for example viewer=DNS:grafana.example; raises BadGrant."""
    found: dict[Name, Role] = {}
    for text in texts:
        role, equals, name = text.partition("=")
        kind, colon, value = name.partition(":")
        if not equals or role not in _BY_NAME:
            raise BadGrant(f"--grant {text!r} begins with no role", f"write one of {', '.join(_BY_NAME)}, and =")
        if not colon or kind not in _GRANT_KINDS or not value:
            remedy = f"write after the = one of {', '.join(_GRANT_KINDS)}, a colon, and the name"
            raise BadGrant(f"--grant {text!r} names no certificate", remedy)
        name_of = _name(kind, value)
        if found.setdefault(name_of, _BY_NAME[role]) is not _BY_NAME[role]:
            raise BadGrant(f"--grant gives {name_of} two roles", "keep the greater one, which includes the other")
    if len(found) > _GRANTS_MOST:
        raise BadGrant(f"--grant is given {len(found)} times", f"give {_GRANTS_MOST} at most, or O=eelgrid:ROLE")
    return found


def parse_binds(texts: Iterable[str]) -> Mapping[Name, tuple[Right, ...]]:
    """Parses binds of the form KIND:NAME=KIND:NAME, as in namespace:research=CN:alice; raises BadGrant."""
    found: dict[Name, tuple[Right, ...]] = {}
    texts = tuple(texts)
    for text in texts:
        match = _BIND.fullmatch(text)
        right = None if match is None else _right(f"{match[1]}:{match[2]}")
        if match is None or right is None:
            remedy = (
                f"write one of {', '.join(_RIGHT_KINDS)}, a colon, its name (of a label KEY=VALUE), =, and the "
                "certificate's name as in --grant, for example namespace:research=CN:alice"
            )
            raise BadGrant(f"--bind {text!r} is no right of a certificate", remedy)
        name_of = _name(match[3], match[4])
        found[name_of] = (*found.get(name_of, ()), right)
    if len(texts) > _BINDS_MOST:
        raise BadGrant(
            f"--bind is given {len(texts)} times", f"give {_BINDS_MOST} at most, or name rights in certificates"
        )
    return found


def _name(kind: str, value: str) -> Name:
    return kind, value.lower() if kind == "DNS" else value


def _right(text: str) -> Right | None:
    """Parses the right that `text`, which follows `eelgrid:`, names; None if it names none."""
    kind, colon, name = text.partition(":")
    if not colon or kind not in _RIGHT_KINDS or not _is_name(name) or (kind == "user" and name == ANY):
        return None
    if kind == "label" and not all(name.partition("=")):
        return None
    return kind, name


def _is_name(text: str) -> bool:
    return bool(text) and len(text) <= _NAME_MOST and text.isprintable()


def build_caller(
    certificate: Certificate, grants: Mapping[Name, Role], binds: Mapping[Name, tuple[Right, ...]] | None = None
) -> Caller:
    """Builds the caller of a certificate: its user, its roles and its rights."""
    roles, nodes, unknown, rights = set(), set(), [], dict[Right, None]()
    for kind, value in (*certificate.subject, *certificate.alternatives):
        name = _name(kind, value)
        if (role := grants.get(name)) is not None:
            roles.add(role)
        rights.update(dict.fromkeys((binds or {}).get(name, ())))
        if kind in {"CN", "URI"} and value.startswith(_NODE_MARK):
            nodes.add(_printable(value.removeprefix(_NODE_MARK)))
            roles.add(Role.AGENT)
        elif kind in {"O", "URI"} and value.startswith(_MARK):
            word = value.removeprefix(_MARK)
            if (right := _right(word)) is not None:
                rights[right] = None
            elif kind == "O" and (named := _BY_NAME.get(word)) is not None:
                roles.add(named)
            elif kind == "O":
                unknown.append(_printable(value[: len(_MARK) + 40]))
    kept = tuple(rights)[:_RIGHTS_MOST]
    return Caller(
        certificate.display_name,
        frozenset(roles),
        frozenset(nodes),
        tuple(unknown),
        certificate.ends_s,
        user=next(_users(certificate, kept), ""),
        rights=frozenset(kept),
    )


def _users(certificate: Certificate, rights: Iterable[Right]) -> Iterator[str]:
    """Yields the possible names of its user; the first is used."""
    yield from (name for kind, name in rights if kind == "user")
    for wanted, names in (
        ("CN", certificate.subject),
        ("URI", certificate.alternatives),
        ("EMAIL", certificate.alternatives),
    ):
        for kind, value in names:
            if kind == wanted and not value.startswith(_MARK) and _is_name(value):
                yield value


def _printable(text: str) -> str:
    """Returns the text; if it is not printable, an escaped form that is never a valid name."""
    return text if text.isprintable() else ascii(text)


def check_role(caller: Caller, method: str, needs: Role | None, rules: RoleRules, *, now_s: float) -> bool:
    """Checks that the caller's role allows a call; raises RoleRefused.

    Returns False if the call is allowed only because roles are not demanded. `needs` is the least role, None if any
    certificate of the authority will do.
    """
    if now_s >= caller.ends_s:
        # TLS refuses it at the next connection; a connection that stays open must not outlive its certificate.
        remedy = "renew it and connect again"
        words = "needs a certificate in date"
        raise RoleRefused(caller, method, "date", words=words, problem="has expired", remedy=remedy)
    if needs is None or caller.has_role(needs):
        return True
    if caller.predates_roles and not rules.demanded:
        return False
    remedy = f"use one with the organization {_MARK}{needs.value}, or have this one granted it (--grant)"
    words = f"needs the role {needs.value}"
    raise RoleRefused(caller, method, needs.value, words=words, problem=caller.description, remedy=remedy)


def check_node(caller: Caller, node_name: str) -> None:
    """Checks that the caller may speak for the node; raises RoleRefused."""
    if caller.nodes and node_name not in caller.nodes:
        names = sorted(caller.nodes)
        problem = f"is of {', '.join(names[:_SHOWN_MOST])}{', ...' if len(names) > _SHOWN_MOST else ''}"
        remedy = f"use one with the common name {_NODE_MARK}{node_name}, or give the agent its own --node-name"
        words = f"as {node_name} needs that node's certificate"
        raise RoleRefused(caller, "Connect", "node", words=words, problem=problem, remedy=remedy)


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
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
        (pem, *_) = context.auth_context().get(PEM_PROPERTY) or (b"",)
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


class LocalUserReader:
    """Reads the callers of one server on a Unix socket that the users of the machine share.

    Its own user and root are administrators and agents, another user submits; grants and binds know a user as the common
    name of a certificate. A call without a proof has no role.
    """

    def __init__(self, proofs: Path, rules: RoleRules) -> None:
        self._proofs, self._rules = proofs, rules

    def identify_caller(self, context: Context) -> Caller:
        """Whoever calls."""
        # The HTTP API has no metadata, and so no users.
        metadata: Iterable[tuple[str, Any]] = getattr(context, "invocation_metadata", tuple)() or ()
        proof = next((text for key, text in metadata if key == PROOF_KEY), "")
        user = verify_proof(self._proofs, proof) if isinstance(proof, str) else None
        if user is None:
            return Caller("", unknown=("no user of this machine",), is_local_user=True)
        certificate = Certificate(0.0, float("inf"), subject=(("CN", user.name),))
        caller = build_caller(certificate, self._rules.grants, self._rules.binds)
        is_own = user.uid in (0, os.geteuid())
        return replace(
            caller,
            roles=caller.roles | ({Role.ADMIN, Role.AGENT} if is_own else {Role.SUBMITTER}),
            unknown=(),
            is_local_user=True,
        )


def peer_address(context: Context) -> str:
    """The address and port of the other side, on one line."""
    return context.peer()[:_PEER_MOST]
