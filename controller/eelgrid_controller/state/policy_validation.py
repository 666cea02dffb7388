"""Policy validation: whether a policy can be put in force, beyond what the contract's ranges can say.

Checks the rules between the fields of a policy, and raises its revision. Apart from `policy`, because it needs the
placement policies of the kernels, which load slowly.
"""

from dataclasses import replace

from eelgrid_controller.state.spending import spending_key
from eelgrid_kernels.baselines import find_policy
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import Aborted, InvalidArgument
from eelgrid_protos.messages import OBJECTIVES, Policy, SpendingQuantity

_OBJECTIVE_CUSTOM = "custom"


def revise_policy(current: Policy, asked: Policy) -> Policy:
    """Returns the policy with its new revision; raises Aborted unless it names the revision in force, and InvalidArgument."""
    if asked.revision != current.revision:
        raise Aborted(
            f"the policy in force is revision {current.revision}, not {asked.revision}; read it again, repeat "
            "the change on it and send it with its revision"
        )
    broken = find_policy_violations(asked)
    if broken:
        raise InvalidArgument("the policy contradicts itself", broken)
    return replace(asked, revision=current.revision + 1)


def find_policy_violations(policy: Policy) -> tuple[Violation, ...]:
    """Lists the contradictions in a policy, each with its remedy."""
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
        find_policy(policy.placement)
    except ValueError as error:
        problem, remedy = str(error).split("; ", 1)
        found.append(Violation("policy.placement", problem, remedy))
    if len({entry.pool for entry in policy.pools}) < len(policy.pools):
        found.append(Violation("policy.pools", "name one pool twice", "give each pool one mode"))
    if len({(budget.scope, budget.name) for budget in policy.budgets}) < len(policy.budgets):
        found.append(Violation("policy.budgets", "bound one place twice", "give each cluster, rack and node one limit"))
    if len(set(map(spending_key, policy.spending))) < len(policy.spending):
        found.append(
            Violation(
                "policy.spending",
                "limit the same spending twice",
                "give each namespace, user, queue and label one limit of a quantity in a period",
            )
        )
    if policy.prices is None:
        found += (
            Violation(
                f"policy.spending[{index}].quantity",
                f"is {limit.quantity.name.lower()}, and there are no prices",
                "give prices with eelctl policy set --prices, or limit gpu_time or energy",
            )
            for index, limit in enumerate(policy.spending)
            if limit.quantity in (SpendingQuantity.MONEY, SpendingQuantity.CARBON)
        )
    return tuple(found)
