"""Who may do what: the roles of callers, and the role that each call needs.

Owns the roles, the table of calls, how a certificate gets its roles, and the
refusal. Must not know connections: a caller comes as the certificate that TLS
has verified, the time as an argument.

Theory. As Kubernetes takes a user's groups from the organizations of the
client certificate, a certificate has the roles that its organizations name:
`O=eelgrid:viewer`. One that cannot have such (a mesh's, a company's) is granted
a role by another of its names. `eelgrid:node:NAME`, as common name or as URI
where that is longer than the 64 characters that a common name may have, binds
an agent to its node, as `system:node:NAME` does a kubelet.

A call without a row needs the greatest role: what was forgotten is closed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from eelgrid_controller.errors import ConfigError
from eelgrid_protos.certificate import Certificate
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import PermissionDenied
from eelgrid_protos.rpc import AGENT_SERVICE, OPERATOR_SERVICE

__all__ = [
    "NEEDS", "PAGE", "Caller", "Role", "RoleRefused", "RoleRules", "caller_of", "check", "check_node", "granted",
]  # fmt: skip


class Role(Enum):
    """What a certificate is for."""

    # Speaks for nodes; asks nothing.
    AGENT = "agent"
    # Sees everything, changes nothing.
    VIEWER = "viewer"
    # A viewer who submits, scales and ends work, and tells what it did.
    SUBMITTER = "submitter"
    # A submitter who says what the cluster aims for and what is enforced on it.
    ADMIN = "admin"


_HELD: Mapping[Role, frozenset[Role]] = {
    Role.AGENT: frozenset({Role.AGENT}),
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.SUBMITTER: frozenset({Role.VIEWER, Role.SUBMITTER}),
    Role.ADMIN: frozenset({Role.VIEWER, Role.SUBMITTER, Role.ADMIN}),
}
_OPERATORS_CALLS: Mapping[Role | None, str] = {
    # Says only what the caller's own certificate says.
    None: "WhoAmI",
    # What is tried on copies changes nothing, and so does a recommendation.
    Role.VIEWER: (
        "GetSummary WatchSummary ListNodes ListGpus GetWorkload ListWorkloads WatchWorkloads ExplainWorkload ListPlans "
        "GetPolicy WhatIf PlanCapacity GetShadow RecommendMoves ListPoints ListPromises ImagineBudgets "
        "RecommendPartitions ListPartitions QueryEnergy QueryEnergyReport ListEnergyExporters "
        "ListSpending ExportDecision"
    ),
    Role.SUBMITTER: "SubmitWorkload CancelWorkload ScaleWorkload ReportProgress ConfirmEnergyExport",
    # Points of a profile move the work of everybody who uses it; there is one shadow for all.
    Role.ADMIN: (
        "UpdatePolicy ApplyMoves ApplyPartitions RecordPoints StartShadow StopShadow RemoveEnergyExporter ReconcileNode"
    ),
}
# The live page's door, as if it were a call.
PAGE = "/page"
# The least role for each call by its path; None for whoever comes with a certificate of the authority.
NEEDS: Mapping[str, Role | None] = {
    f"/{AGENT_SERVICE.name}/Connect": Role.AGENT,
    PAGE: Role.VIEWER,
    **{f"/{OPERATOR_SERVICE.name}/{call}": role for role, calls in _OPERATORS_CALLS.items() for call in calls.split()},
}

_MARK, _NODE_MARK = "eelgrid:", "eelgrid:node:"
_BY_NAME = {role.value: role for role in Role}
_GRANT_KINDS = ("CN", "O", "OU", "DNS", "URI", "EMAIL")
_GRANTS_MOST = 256
_SHOWN_MOST = 3

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What the operator chose: whether a certificate without a role is refused, and who has a role without naming it."""

    demanded: bool = False
    grants: Mapping[Name, Role] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever holds a certificate: `unknown` are words after `eelgrid:` that are no role, `ends_s` is since 1970."""

    subject: str
    roles: frozenset[Role] = frozenset()
    # An agent's certificate that names nodes speaks for no others; without, for any.
    nodes: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    ends_s: float = float("inf")

    @property
    def is_of_before_roles(self) -> bool:
        """Whether it says nothing of roles, well or badly."""
        return not self.roles and not self.unknown

    @property
    def greatest(self) -> str:
        """One word for its roles, of few: for metrics."""
        order = (Role.ADMIN, Role.SUBMITTER, Role.VIEWER, Role.AGENT)
        return next((role.value for role in order if role in self.roles), "unknown" if self.unknown else "none")

    @property
    def words(self) -> str:
        """Its roles for people."""
        if self.roles:
            named = sorted(role.value for role in self.roles)
            return f"has the role {named[0]}" if len(named) == 1 else f"has the roles {', '.join(named)}"
        if self.unknown:
            return f"names {', '.join(self.unknown[:_SHOWN_MOST])}, which is no role"
        return "has no role"


class RoleRefused(PermissionDenied):
    """The caller's role does not allow the call; `needs` is a role's name, `node` or `date`."""

    def __init__(self, caller: Caller, method: str, needs: str, *, words: str, problem: str, remedy: str) -> None:
        self.caller = caller
        self.method = method
        self.needs = needs
        violation = Violation("certificate", f"{caller.subject or '(no name)'} {problem}", remedy)
        super().__init__(f"{method} {words}", (violation,))


def granted(texts: Iterable[str]) -> Mapping[Name, Role]:
    """Grants as people write them, ROLE=KIND:VALUE, for example viewer=DNS:grafana.example; raises ConfigError."""
    found: dict[Name, Role] = {}
    for text in texts:
        role, equals, name = text.partition("=")
        kind, colon, value = name.partition(":")
        if not equals or role not in _BY_NAME:
            raise ConfigError(f"--grant {text!r} begins with no role", f"write one of {', '.join(_BY_NAME)}, and =")
        if not colon or kind not in _GRANT_KINDS or not value:
            remedy = f"write after the = one of {', '.join(_GRANT_KINDS)}, a colon, and the name"
            raise ConfigError(f"--grant {text!r} names no certificate", remedy)
        name_of = _name(kind, value)
        if found.setdefault(name_of, _BY_NAME[role]) is not _BY_NAME[role]:
            raise ConfigError(f"--grant gives {name} two roles", "keep the greater one, which includes the other")
    if len(found) > _GRANTS_MOST:
        raise ConfigError(f"--grant is given {len(found)} times", f"give {_GRANTS_MOST} at most, or O=eelgrid:ROLE")
    return found


def _name(kind: str, value: str) -> Name:
    return kind, value.lower() if kind == "DNS" else value


def caller_of(certificate: Certificate, grants: Mapping[Name, Role]) -> Caller:
    """Whose it is and what roles it has."""
    roles, nodes, unknown = set(), set(), []
    for kind, value in (*certificate.subject, *certificate.alternatives):
        if (role := grants.get(_name(kind, value))) is not None:
            roles.add(role)
        if kind in {"CN", "URI"} and value.startswith(_NODE_MARK):
            nodes.add(_printable(value.removeprefix(_NODE_MARK)))
            roles.add(Role.AGENT)
        elif kind == "O" and value.startswith(_MARK):
            if (named := _BY_NAME.get(value.removeprefix(_MARK))) is not None:
                roles.add(named)
            else:
                unknown.append(_printable(value[: len(_MARK) + 40]))
    return Caller(certificate.shown, frozenset(roles), frozenset(nodes), tuple(unknown), certificate.ends_s)


def _printable(text: str) -> str:
    """The text, or where it holds what no terminal should get, one that is no name of anything."""
    return text if text.isprintable() else ascii(text)


def check(caller: Caller, path: str, rules: RoleRules, *, now_s: float) -> bool:
    """Whether it may for its role; False where it may only since roles are not demanded. Raises RoleRefused."""
    method = path.rpartition("/")[2]
    if now_s >= caller.ends_s:
        # TLS refuses it at the next connection; a connection that stays open must not outlive its certificate.
        remedy = "renew it and connect again"
        words = "needs a certificate in date"
        raise RoleRefused(caller, method, "date", words=words, problem="has expired", remedy=remedy)
    needs = NEEDS.get(path, Role.ADMIN)
    if needs is None or any(needs in _HELD[role] for role in caller.roles):
        return True
    if caller.is_of_before_roles and not rules.demanded:
        return False
    remedy = f"use one with the organization {_MARK}{needs.value}, or have this one granted it (--grant)"
    words = f"needs the role {needs.value}"
    raise RoleRefused(caller, method, needs.value, words=words, problem=caller.words, remedy=remedy)


def check_node(caller: Caller, node_name: str) -> None:
    """Whether it may speak for the node; raises RoleRefused."""
    if caller.nodes and node_name not in caller.nodes:
        names = sorted(caller.nodes)
        problem = f"is of {', '.join(names[:_SHOWN_MOST])}{', ...' if len(names) > _SHOWN_MOST else ''}"
        remedy = f"use one with the common name {_NODE_MARK}{node_name}, or give the agent its own --node-name"
        words = f"as {node_name} needs that node's certificate"
        raise RoleRefused(caller, "Connect", "node", words=words, problem=problem, remedy=remedy)
