"""Who may call what of the controller: the least role that each call needs.

Owns the table of calls, and flags of roles as errors of the command line. Must not know connections, nor how a
certificate gets its roles (eelgrid_protos.roles).

A call without a row needs the greatest role: what was forgotten is closed.
"""

from collections.abc import Iterable, Mapping

from eelgrid_controller.errors import ConfigError
from eelgrid_protos.roles import (
    BadGrant,
    Caller,
    Right,
    Role,
    RoleRefused,
    RoleRules,
    caller_of,
    check_node,
    check_role,
    parse_binds,
    parse_grants,
)
from eelgrid_protos.rpc import AGENT_SERVICE, OPERATOR_SERVICE

__all__ = [
    "NEEDS", "PAGE", "Caller", "Role", "RoleRefused", "RoleRules", "bound", "caller_of", "check", "check_node",
    "granted",
]  # fmt: skip

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
    # Of its own work alone: ownership.py.
    Role.SUBMITTER: "SubmitWorkload CancelWorkload ScaleWorkload ReportProgress ConfirmEnergyExport",
    # Points of a profile move the work of everybody who uses it; there is one shadow for all.
    # The audit log says what others asked and from where.
    Role.ADMIN: (
        "UpdatePolicy ApplyMoves ApplyPartitions RecordPoints StartShadow StopShadow RemoveEnergyExporter ReconcileNode "
        "RemoveNode ListAuditEntries"
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


def granted(texts: Iterable[str]) -> Mapping[tuple[str, str], Role]:
    """Roles by certificates' names, from --grant; raises ConfigError."""
    try:
        return parse_grants(texts)
    except BadGrant as error:
        raise ConfigError(error.problem, error.remedy) from None


def bound(texts: Iterable[str]) -> Mapping[tuple[str, str], tuple[Right, ...]]:
    """Rights by certificates' names, from --bind; raises ConfigError."""
    try:
        return parse_binds(texts)
    except BadGrant as error:
        raise ConfigError(error.problem, error.remedy) from None


def check(caller: Caller, path: str, rules: RoleRules, *, now_s: float) -> bool:
    """Whether it may for its role; False where it may only since roles are not demanded. Raises RoleRefused."""
    return check_role(caller, path.rpartition("/")[2], NEEDS.get(path, Role.ADMIN), rules, now_s=now_s)
