"""Whose work is whose: what a submitter may name in a submission, and who may change work that runs.

Owns both rules and their refusals. Must not know connections or calls: the caller comes as its certificate was read,
None where there was none (no TLS, or a part of this process).

Theory. A role says which calls a certificate may make, and ownership on whose work. A workload belongs to the user of
the certificate that submitted it (`owner`), or, where none was known, to the user that it states; only they and an
administrator may end, scale or report on it. What a spending limit is counted by (user, namespace, queue, label) is
bound to the certificate, or a limit would be evaded by stating another: the user is the certificate's own; namespace,
queue and labels are among those that it names. A certificate that names none may use the namespace `default`, no
queue, and no label that a limit is counted by, as nobody has rights in Kubernetes without a RoleBinding; before roles
are demanded, one that names none at all is free in these three, as it was before there were such names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.roles import Caller, Role, RoleRefused, RoleRules
from eelgrid_protos.messages import Policy, SpendingScope, Workload, WorkloadSpec
from eelgrid_protos.roles import ANY

__all__ = ["DEFAULT_NAMESPACE", "bind_spec", "check_owner", "owner_of", "owner_text"]

# Where a submitter may submit whose certificate names no namespace, as kubectl does without a context's own.
DEFAULT_NAMESPACE = "default"
_SHOWN_MOST = 5
# Of a name in a refusal, which travels in a header of 8 kB at most.
_SHOWN_CHARACTERS = 64
_SUBMIT = "SubmitWorkload"


def owner_of(caller: Caller | None) -> str:
    """Who owns what this caller submits; empty where only the stated user is known."""
    return caller.user if caller is not None and caller.holds(Role.SUBMITTER) else ""


def owner_text(workload: Workload) -> str:
    """Whom a workload belongs to; empty for nobody, and then only administrators may change it."""
    return workload.owner or workload.spec.user


def _is_bound(caller: Caller, rules: RoleRules) -> bool:
    """Whether it may act on its own work alone."""
    is_submitter = caller.holds(Role.SUBMITTER) and not caller.holds(Role.ADMIN)
    return is_submitter and (rules.demanded or bool(caller.user or caller.rights))


def check_owner(caller: Caller | None, workload: Workload, method: str, rules: RoleRules) -> None:
    """Whether the caller may change this workload; raises RoleRefused, which names the owner."""
    if caller is None or not _is_bound(caller, rules):
        return
    if caller.user and caller.user in {workload.owner, workload.spec.user}:
        return
    owner, key = _cut(owner_text(workload)), workload.workload_id
    raise RoleRefused(
        caller, method, "owner",
        words=f"of {key} needs its owner {owner} or the role admin" if owner
        else f"of {key}, which nobody owns, needs the role admin",
        problem=f"is of the user {caller.user}" if caller.user else "names no user",
        remedy=f"ask {owner or 'an administrator'}, or use one with the organization eelgrid:admin",
    )  # fmt: skip


def bind_spec(caller: Caller | None, spec: WorkloadSpec, policy: Policy, rules: RoleRules) -> WorkloadSpec:
    """The specification with what follows from the certificate; raises RoleRefused where it names what it may not."""
    if caller is None or not _is_bound(caller, rules):
        return spec
    if not caller.user:
        raise _refused(
            caller, "user", "needs a certificate that names a user",
            "names no user", "use one with a common name, or bind it: --bind user:NAME=KIND:NAME",
        )  # fmt: skip
    if spec.user not in {"", caller.user}:
        raise _refused(
            caller, "user", f"as {_cut(spec.user)} needs that user's certificate or the role admin",
            f"is of the user {caller.user}", "leave the user out, and the work is yours",
        )  # fmt: skip
    is_strict = rules.demanded or bool(caller.rights)
    return replace(
        spec,
        user=caller.user,
        namespace=_namespace(caller, spec, is_strict=is_strict),
        queue=_queue(caller, spec, is_strict=is_strict),
        labels=_labels(caller, spec, policy, is_strict=is_strict),
    )


def _namespace(caller: Caller, spec: WorkloadSpec, *, is_strict: bool) -> str:
    named = caller.rights_to("namespace")
    allowed = named or (DEFAULT_NAMESPACE,)
    if ANY in allowed or spec.namespace in allowed or (not named and not is_strict):
        return spec.namespace
    raise _without(caller, "namespace", spec.namespace, allowed)


def _queue(caller: Caller, spec: WorkloadSpec, *, is_strict: bool) -> str:
    named = caller.rights_to("queue")
    if ANY in named or spec.queue in named or not (named or (is_strict and spec.queue)):
        return spec.queue
    if not spec.queue and len(named) == 1:
        return named[0]
    raise _without(caller, "queue", spec.queue, named)


def _labels(caller: Caller, spec: WorkloadSpec, policy: Policy, *, is_strict: bool) -> Mapping[str, str]:
    named: dict[str, list[str]] = {}
    for text in caller.rights_to("label"):
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
    """The refusal of a namespace, queue or label that the certificate does not name."""
    shown = ", ".join(map(_cut, allowed[:_SHOWN_MOST])) + (", ..." if len(allowed) > _SHOWN_MOST else "")
    name = _cut(name)
    problem = f"may submit with the {kind} {shown}" if allowed else f"may submit without a {kind} only"
    if kind == "label" and not allowed:
        problem = "names no value of this label, by which a spending limit is counted"
    right = f"eelgrid:{kind}:{name}" if name else f"one of these {kind}s"
    return _refused(
        caller, kind, f"with the {kind} {name or '(none)'} needs a right to it or the role admin", problem,
        f"state what it may, or have the certificate name {right} (--bind without a new certificate)",
    )  # fmt: skip


def _cut(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."


def _refused(caller: Caller, needs: str, words: str, problem: str, remedy: str) -> RoleRefused:
    return RoleRefused(caller, _SUBMIT, needs, words=words, problem=problem, remedy=remedy)
