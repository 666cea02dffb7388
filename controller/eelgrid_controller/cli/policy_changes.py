"""What a change of the policy would do: settings, unknown names, budgets below the draw, pools that are enforced.

A change is compared with the policy in force, setting by setting. Names are compared with the nodes that the controller
knows, the draw is the controller's own figure of each budget (`eelctl promises`). Must not know how options are written.
"""

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from eelgrid_controller.cli.confirmation import confirm_change, list_names
from eelgrid_controller.cli.connection import CliSettings, NameNotFound, iterate_pages
from eelgrid_controller.cli.interference import format_slowdown
from eelgrid_controller.cli.output import echo
from eelgrid_controller.formatting import count_noun, format_age, format_power
from eelgrid_controller.state.spending import format_limit, format_subject, spending_key
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import (
    BackfillMode,
    BudgetScope,
    BudgetStatus,
    EnergyPrices,
    EnforcementMode,
    ImagineBudgetsRequest,
    ListNodesRequest,
    Node,
    Policy,
    PoolMode,
    PowerBudget,
    resolve_pool,
)

_UNSET = "not set"
_NAMES_SHOWN = 8


def describe_budget_place(budget: PowerBudget) -> str:
    """Formats what a budget bounds: cluster, rack r1, node n7."""
    return f"{budget.scope.name.lower()} {budget.name}".strip()


def describe_pool_mode(pool: PoolMode) -> str:
    """Formats what may be done to a pool's GPUs."""
    return pool.mode.name.lower() + (", MIG GPUs managed by the partition planner" if pool.partitioned else "")


def describe_prices(prices: EnergyPrices) -> str:
    """Formats energy prices in a line."""
    amounts = [period.price_per_kwh for period in prices.periods]
    carbon = f", {prices.carbon_price_per_kg:g} {prices.currency}/kg of CO2" if prices.carbon_price_per_kg else ""
    return (
        f"{min(amounts):g} to {max(amounts):g} {prices.currency}/kWh in {len(amounts)} periods a week"
        f", PUE {prices.pue:g}{carbon}"
    )


def describe_backfill(policy: Policy) -> str:
    """Formats the mode of backfill, and how long work is expected to run of which nothing is known."""
    if policy.backfill is BackfillMode.UNSPECIFIED:
        return "easy, by stated run times and time limits"
    default_s = policy.default_runtime_s
    presumed = "" if default_s is None else f", {format_age(default_s)} where nothing is known"
    return policy.backfill.name.lower() + ("" if policy.backfill is BackfillMode.NONE else presumed)


def _settings(policy: Policy) -> Iterator[tuple[object, str, str]]:
    """Yields a key, a name and a value for each setting."""
    yield "objective", "objective", policy.objective
    for entry in fields(policy.weights):
        yield ("weight", entry.name), f"weight {entry.name}", f"{getattr(policy.weights, entry.name):g}"
    yield "placement", "placement", policy.placement
    yield "lease", "lease", f"{policy.lease_s:g} s"
    yield "send", "send interval", f"{policy.send_interval_s:g} s"
    yield "sample", "sample interval", f"{policy.sample_interval_s:g} s"
    yield "backfill", "backfill", describe_backfill(policy)
    if policy.default_runtime_s is not None:
        yield "default runtime", "default run time", format_age(policy.default_runtime_s)
    if policy.shared_slowdown_most is not None:
        yield "shared slowdown", "slowdown on shared GPUs", format_slowdown(policy.shared_slowdown_most)
    for one in policy.interference:
        key = "interference", one.load, one.beside
        yield key, f"slowdown of {one.load} beside {one.beside}", format_slowdown(one.slowdown)
    for pool in policy.pools:
        yield ("pool", pool.pool), f"pool {pool.pool}", describe_pool_mode(pool)
    for budget in policy.budgets:
        place = describe_budget_place(budget)
        yield ("budget", place), f"budget {place}", f"{budget.limit_w:,.10g} W"
    if policy.prices is not None:
        yield "prices", "prices", describe_prices(policy.prices)
    for limit in policy.spending:
        yield spending_key(limit), f"spending {format_subject(limit)}", format_limit(limit)


def policy_changes(before: Policy, after: Policy) -> Iterator[str]:
    """Yields a line for each setting that differs, the old value and the new; one line where none does."""
    old = {key: (name, value) for key, name, value in _settings(before)}
    new = {key: (name, value) for key, name, value in _settings(after)}
    found = False
    for key in dict.fromkeys((*old, *new)):
        name = (new.get(key) or old[key])[0]
        values = [side[key][1] if key in side else _UNSET for side in (old, new)]
        if values[0] != values[1]:
            found = True
            yield f"{name}: {values[0]} -> {values[1]}"
        elif key == "prices" and before.prices != after.prices:
            found = True
            yield f"{name}: other times or amounts of carbon -> {values[1]}"
    if not found:
        yield "no setting changes"


def _nodes(client: Any, settings: CliSettings) -> list[Node]:
    return list(iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=settings.timeout_s))


def _new_names(before: Policy, after: Policy) -> list[tuple[str, str]]:
    """Kinds and names that the change brings into the policy."""
    pools = {pool.pool for pool in before.pools}
    places = {(budget.scope, budget.name) for budget in before.budgets}
    found = [("pool", pool.pool) for pool in after.pools if pool.pool not in pools]
    return found + [
        (budget.scope.name.lower(), budget.name)
        for budget in after.budgets
        if budget.scope is not BudgetScope.CLUSTER and (budget.scope, budget.name) not in places
    ]


def refuse_unknown_names(client: Any, settings: CliSettings, before: Policy, after: Policy) -> None:
    """Refuses pools, racks and nodes that no node has; where no node has joined yet, warns. Raises NameNotFound."""
    asked = _new_names(before, after)
    if not asked:
        return
    nodes = [node.inventory for node in _nodes(client, settings)]
    known = {
        "pool": sorted({resolve_pool(one.pool) for one in nodes}),
        "rack": sorted({part for one in nodes for part in one.topology}),
        "node": sorted(one.node_name for one in nodes),
    }
    unknown = [(kind, name) for kind, name in asked if name not in known[kind]]
    if not unknown:
        return
    if not nodes:
        names = ", ".join(f"{kind} {name}" for kind, name in unknown)
        echo(f"warning: no node has joined yet, so nobody can tell whether these names are right: {names}", err=True)
        return
    violations = tuple(
        Violation(f"{kind} {name}", "no node has it", _hint(name, known[kind])) for kind, name in unknown
    )
    raise NameNotFound(
        "the change names what no node has; nothing was changed",
        "correct the name, or add --ahead if its nodes will join later",
        violations,
    )


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=2)
    if near:
        return f"did you mean {' or '.join(near)}?"
    more = ", ..." if len(known) > _NAMES_SHOWN else ""
    return f"there are {', '.join(known[:_NAMES_SHOWN])}{more}" if known else "no node names any"


def _low_budgets(client: Any, settings: CliSettings, before: Policy, after: Policy) -> list[BudgetStatus]:
    """Returns the budgets that are new or lower than before, and below what their GPUs draw now."""
    limits_w = {(one.scope, one.name): one.limit_w for one in before.budgets}
    lower = {
        (one.scope, one.name)
        for one in after.budgets
        if one.limit_w < limits_w.get((one.scope, one.name), float("inf"))
    }
    if not lower:
        return []
    request = ImagineBudgetsRequest(budgets=after.budgets)
    found = client.imagine_budgets(request, timeout=settings.timeout_s).budgets
    return [one for one in found if (one.budget.scope, one.budget.name) in lower and one.over_w > 0.0]


def confirm_low_budgets(client: Any, settings: CliSettings, before: Policy, after: Policy, *, asks: bool) -> None:
    """Asks before a budget is set below the present draw; raises RequestRefused where the answer is not yes."""
    low = _low_budgets(client, settings, before, after)
    for one in low:
        what = f"budget {describe_budget_place(one.budget)}: {format_power(one.budget.limit_w)} is below the"
        echo(f"warning: {what} {format_power(one.measured_w)} that its GPUs draw now", err=True)
    if low:
        confirm_change(
            f"Setting {count_noun(len(low), 'budget')} below what the GPUs draw now",
            yes=not asks,
            effects=("power limits are lowered until it is kept, and work may wait",),
            remedy="give it more watts, or answer y",
        )


def confirm_enforcement(client: Any, settings: CliSettings, before: Policy, after: Policy, *, asks: bool) -> None:
    """Asks before plans are carried out on nodes where they were only shown; raises RequestRefused without a yes."""
    enforced = {pool.pool for pool in before.pools if pool.mode is EnforcementMode.ENFORCE}
    new = {pool.pool for pool in after.pools if pool.mode is EnforcementMode.ENFORCE} - enforced
    nodes = [node.inventory for node in _nodes(client, settings)] if new else []
    effects = []
    for pool in sorted(new):
        members = [one for one in nodes if resolve_pool(one.pool) == pool]
        if members:
            names = list_names([one.node_name for one in members])
            gpus = count_noun(sum(len(one.gpus) for one in members), "GPU")
            effects.append(f"pool {pool}: power limits and MIG layouts are set on the {gpus} of {names}")
    if not asks:
        for effect in effects:
            echo(effect, err=True)
    elif effects:
        confirm_change(
            f"Enforcing {count_noun(len(effects), 'pool')}",
            yes=False,
            effects=effects,
            remedy="see the plans with `eelctl plan`, or answer y",
        )
