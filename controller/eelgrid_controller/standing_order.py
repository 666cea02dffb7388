"""Whether a policy can be put in force: what the contract's ranges cannot say.

Owns the rules between the fields of a policy. Must not know who sends it, or what
follows from it.
"""

from eelgrid_kernels import policy as placement_policy
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import OBJECTIVES, Policy

__all__ = ["policy_violations"]

_OBJECTIVE_CUSTOM = "custom"


def policy_violations(policy: Policy) -> tuple[Violation, ...]:
    """What contradicts itself, with the remedy."""
    found = []
    known = (*OBJECTIVES, _OBJECTIVE_CUSTOM)
    if policy.objective not in known:
        found.append(Violation("policy.objective", f"is {policy.objective!r}", f"use one of {', '.join(known)}"))
    elif policy.objective in OBJECTIVES and policy.weights != OBJECTIVES[policy.objective]:
        found.append(
            Violation(
                "policy.weights",
                f"are not those of the objective {policy.objective}",
                f"set objective to {_OBJECTIVE_CUSTOM} for weights of your own",
            )
        )
    try:
        placement_policy(policy.placement)
    except ValueError as error:
        problem, remedy = str(error).split("; ", 1)
        found.append(Violation("policy.placement", problem, remedy))
    if len({entry.pool for entry in policy.pools}) < len(policy.pools):
        found.append(Violation("policy.pools", "name one pool twice", "give each pool one mode"))
    if len({(budget.scope, budget.name) for budget in policy.budgets}) < len(policy.budgets):
        found.append(Violation("policy.budgets", "bound one place twice", "give each cluster, rack and node one limit"))
    return tuple(found)
