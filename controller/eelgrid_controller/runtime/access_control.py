"""Role-based access control: the role that each call requires, and the ownership of workloads.

Decides who may call what, what a submitter may name in a submission, and who may change running work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_protos.messages import Policy, SpendingScope, Workload, WorkloadSpec
from eelgrid_protos.roles import (
    ANY,
    BadGrant,
    Caller,
    Right,
    Role,
    RoleRefused,
    RoleRules,
    check_role,
    parse_binds,
    parse_grants,
)
from eelgrid_protos.rpc import AGENT_SERVICE, FEDERATION_SERVICE, FLUX_SERVICE, INGEST_SERVICE, OPERATOR_SERVICE

_OPERATORS_CALLS: Mapping[Role | None, str] = {
    # Says only what the caller's own certificate says.
    None: "WhoAmI",
    # What is tried on copies changes nothing, and so does a recommendation.
    Role.VIEWER: (
        "GetSummary WatchSummary GetOverview ListNodes ListGpus GetWorkload ListWorkloads WatchWorkloads "
        "ExplainWorkload ListPlans GetPolicy ListInterference WhatIf PlanCapacity GetShadow RecommendMoves ListPoints ListPromises ImagineBudgets "
        "RecommendPartitions ListPartitions QueryEnergy QueryEnergyReport ListEnergyExporters "
        "ListSpending ListQueues ExportDecision"
    ),
    # Of its own work alone: see check_owner and bind_spec.
    Role.SUBMITTER: (
        "SubmitWorkload MoveToQueue HoldWorkload ReleaseWorkload RequeueWorkload CancelWorkload ScaleWorkload ReadLogs Attach ReportProgress "
        "ConfirmEnergyExport"
    ),
    # Points of a profile move the work of everybody who uses it; there is one shadow for all.
    # The audit log says what others asked and from where.
    Role.ADMIN: (
        "UpdatePolicy ApplyMoves ApplyPartitions RecordPoints StartShadow StopShadow RemoveEnergyExporter ReconcileNode "
        "RemoveNode CordonNode UncordonNode DrainNode ListAuditEntries"
    ),
}
# The live page's door, as if it were a call.
LIVE_PAGE_PATH = "/page"
# The least role for each call by its path; None for whoever comes with a certificate of the authority.
REQUIRED_ROLES: Mapping[str, Role | None] = {
    f"/{AGENT_SERVICE.name}/Connect": Role.AGENT,
    f"/{INGEST_SERVICE.name}/Forward": Role.INGEST,
    LIVE_PAGE_PATH: Role.VIEWER,
    # The module says what all nodes of its instance hold, and places everybody's jobs.
    f"/{FLUX_SERVICE.name}/ScheduleFlux": Role.ADMIN,
    f"/{FLUX_SERVICE.name}/AdviseFlux": Role.VIEWER,
    f"/{FLUX_SERVICE.name}/ListFluxSpans": Role.VIEWER,
    f"/{FEDERATION_SERVICE.name}/ListClusters": Role.VIEWER,
    f"/{FEDERATION_SERVICE.name}/GetDispatch": Role.VIEWER,
    **{f"/{OPERATOR_SERVICE.name}/{call}": role for role, calls in _OPERATORS_CALLS.items() for call in calls.split()},
}


def parse_user_grants(texts: Iterable[str]) -> Mapping[tuple[str, str], Role]:
    """Parses --grant into roles by certificate names; raises ControllerConfigError."""
    try:
        return parse_grants(texts)
    except BadGrant as error:
        raise ControllerConfigError(error.problem, error.remedy) from None


def parse_bindings(texts: Iterable[str]) -> Mapping[tuple[str, str], tuple[Right, ...]]:
    """Parses --bind into rights by certificate names; raises ControllerConfigError."""
    try:
        return parse_binds(texts)
    except BadGrant as error:
        raise ControllerConfigError(error.problem, error.remedy) from None


def check_call_role(caller: Caller, path: str, rules: RoleRules, *, now_s: float) -> bool:
    """Checks the caller's role for a call; returns False if it is allowed only because roles are not required. Raises RoleRefused."""
    return check_role(caller, path.rpartition("/")[2], REQUIRED_ROLES.get(path, Role.ADMIN), rules, now_s=now_s)


# Where a submitter may submit whose certificate names no namespace, as kubectl does without a context's own.
DEFAULT_NAMESPACE = "default"
_SHOWN_MOST = 5
# Of a name in a refusal, which travels in a header of 8 kB at most.
_SHOWN_CHARACTERS = 64
_SUBMIT = "SubmitWorkload"


def may_impersonate(caller: Caller, user: str) -> bool:
    """Returns whether the certificate may submit and change work for this user, as that of a front of several clusters does."""
    named = caller.rights_of_kind("impersonate")
    return bool(user) and (user in named or ANY in named)


def owner_of(caller: Caller | None, stated: str = "") -> str:
    """Returns the owner of what this caller submits for the user that it states; empty if only the stated user is known."""
    if caller is None or not caller.has_role(Role.SUBMITTER):
        return ""
    return stated if may_impersonate(caller, stated) else caller.user


def format_owner(workload: Workload) -> str:
    """Returns the owner of a workload; empty if it has none, and then only administrators may change it."""
    return workload.owner or workload.spec.user


def _is_bound(caller: Caller, rules: RoleRules) -> bool:
    """Returns whether the caller may act on its own work only."""
    is_submitter = caller.has_role(Role.SUBMITTER) and not caller.has_role(Role.ADMIN)
    return is_submitter and (rules.demanded or bool(caller.user or caller.rights))


def check_owner(caller: Caller | None, workload: Workload, method: str, rules: RoleRules) -> None:
    """Checks that the caller may change this workload; raises RoleRefused, which names the owner."""
    if caller is None or not _is_bound(caller, rules):
        return
    if caller.user and caller.user in {workload.owner, workload.spec.user}:
        return
    if may_impersonate(caller, format_owner(workload)):
        return
    owner, key = _cut(format_owner(workload)), workload.workload_id
    raise RoleRefused(
        caller,
        method,
        "owner",
        words=f"of {key} needs its owner {owner} or the role admin"
        if owner
        else f"of {key}, which nobody owns, needs the role admin",
        problem=f"is of the user {caller.user}" if caller.user else "names no user",
        remedy=f"ask {owner or 'an administrator'}, or use one with the organization eelgrid:admin",
    )


def may_read_environment(caller: Caller | None, workload: Workload, *, demanded: bool) -> bool:
    """Returns whether the caller may see the values of a workload's environment: its owner and administrators.

    `demanded` says whether certificates need roles; without, one that names none may do everything.
    """
    if caller is None or caller.has_role(Role.ADMIN) or (caller.predates_roles and not demanded):
        return True
    is_own = bool(caller.user) and caller.user in {workload.owner, workload.spec.user}
    return is_own or may_impersonate(caller, format_owner(workload))


def show_workload(caller: Caller | None, workload: Workload, *, demanded: bool) -> Workload:
    """Returns a workload as the caller may see it: tokens and passwords are handed over in environments."""
    process = workload.spec.process
    if process is None or not process.environment or may_read_environment(caller, workload, demanded=demanded):
        return workload
    return replace(workload, spec=replace(workload.spec, process=process.mask_environment()))


def bind_spec(caller: Caller | None, spec: WorkloadSpec, policy: Policy, rules: RoleRules) -> WorkloadSpec:
    """Completes a specification from the caller's certificate; raises RoleRefused for names that it may not use."""
    if caller is None or not _is_bound(caller, rules):
        return spec
    if not caller.user:
        raise _refused(
            caller,
            "user",
            "needs a certificate that names a user",
            "names no user",
            "use one with a common name, or bind it: --bind user:NAME=KIND:NAME",
        )
    is_for_another = may_impersonate(caller, spec.user)
    if spec.user not in {"", caller.user} and not is_for_another:
        raise _refused(
            caller,
            "user",
            f"as {_cut(spec.user)} needs that user's certificate or the role admin",
            f"is of the user {caller.user}",
            "leave the user out, and the work is yours",
        )
    if spec.evicted_by_engine:
        raise _refused(
            caller,
            "admin",
            "with evicted_by_engine needs the role admin",
            f"is of the user {caller.user}",
            "leave it out: engines set it for work that they stop themselves",
        )
    is_strict = rules.demanded or bool(caller.rights)
    return replace(
        spec,
        user=spec.user if is_for_another else caller.user,
        namespace=_namespace(caller, spec, is_strict=is_strict),
        queue=_queue(caller, spec, is_strict=is_strict),
        labels=_labels(caller, spec, policy, is_strict=is_strict),
    )


def _namespace(caller: Caller, spec: WorkloadSpec, *, is_strict: bool) -> str:
    named = caller.rights_of_kind("namespace")
    allowed = named or (DEFAULT_NAMESPACE,)
    if ANY in allowed or spec.namespace in allowed or (not named and not is_strict):
        return spec.namespace
    raise _without(caller, "namespace", spec.namespace, allowed)


def _queue(caller: Caller, spec: WorkloadSpec, *, is_strict: bool) -> str:
    named = caller.rights_of_kind("queue")
    if ANY in named or spec.queue in named or not (named or (is_strict and spec.queue)):
        return spec.queue
    if not spec.queue and len(named) == 1:
        return named[0]
    raise _without(caller, "queue", spec.queue, named)


def _labels(caller: Caller, spec: WorkloadSpec, policy: Policy, *, is_strict: bool) -> Mapping[str, str]:
    named: dict[str, list[str]] = {}
    for text in caller.rights_of_kind("label"):
        key, _, value = text.partition("=")
        named.setdefault(key, []).append(value)
    labels = dict(spec.labels)
    for key, values in named.items():
        if key not in labels and len(values) == 1:
            labels[key] = values[0]
        elif labels.get(key) not in values:
            stated = f"{key}={labels.get(key, '')}"
            raise _without(caller, "label", stated, [f"{key}={value}" for value in values])
    counted = {one.label for one in policy.spending if one.scope is SpendingScope.LABEL} if is_strict else set()
    for key in sorted(counted & labels.keys() - named.keys()):
        raise _without(caller, "label", f"{key}={labels[key]}", ())
    return labels


def _without(caller: Caller, kind: str, name: str, allowed: Sequence[str]) -> RoleRefused:
    """Builds the refusal of a namespace, queue or label that the certificate does not name."""
    shown = ", ".join(map(_cut, allowed[:_SHOWN_MOST])) + (", ..." if len(allowed) > _SHOWN_MOST else "")
    name = _cut(name)
    problem = f"may submit with the {kind} {shown}" if allowed else f"may submit without a {kind} only"
    if kind == "label" and not allowed:
        problem = "names no value of this label, by which a spending limit is counted"
    right = f"eelgrid:{kind}:{name}" if name else f"one of these {kind}s"
    return _refused(
        caller,
        kind,
        f"with the {kind} {name or '(none)'} needs a right to it or the role admin",
        problem,
        f"state what it may, or have the certificate name {right} (--bind without a new certificate)",
    )


def _cut(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."


def _refused(caller: Caller, needs: str, words: str, problem: str, remedy: str) -> RoleRefused:
    return RoleRefused(caller, _SUBMIT, needs, words=words, problem=problem, remedy=remedy)
