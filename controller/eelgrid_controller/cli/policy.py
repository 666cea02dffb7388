"""eelctl policy and spending: the policy in force, its power budgets, energy prices and spending limits.

A change is based on the policy in force and carries its revision, so that two operators cannot overwrite each other
unnoticed. Formats: `cluster=200kW`, `rack:r1=20kW`, `node:n7=5600W` for budgets, a YAML file for prices (docs/how-to/promises.md),
and `namespace=research gpu-hours=2000 per month` for spending limits (docs/how-to/spending.md).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_pairs, complete_placements, complete_pools
from eelgrid_controller.cli.confirmation import yes_option
from eelgrid_controller.cli.connection import CliSettings, FiniteRange, RequestRefused, connect_operators, output_option
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_rows,
    list_options,
    print_document,
    share_of,
    table_lines,
)
from eelgrid_controller.cli.policy_changes import (
    confirm_enforcement,
    confirm_low_budgets,
    describe_backfill,
    describe_budget_place,
    describe_pool_mode,
    describe_prices,
    policy_changes,
    refuse_unknown_names,
)
from eelgrid_controller.formatting import parse_duration_s
from eelgrid_controller.state.spending import (
    QUANTITY_UNITS,
    PeriodBounds,
    describe_moment,
    describe_period,
    describe_unit,
    format_amount,
    format_limit,
    format_subject,
    spending_key,
    warn_ratio_of,
)
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import (
    OBJECTIVES,
    SPENDING_LIMITS_MOST,
    BackfillMode,
    BudgetScope,
    EnergyPrices,
    EnforcementMode,
    GetPolicyRequest,
    ListSpendingRequest,
    ListSpendingResponse,
    Policy,
    PoolMode,
    PowerBudget,
    SetWeights,
    SpendingLimit,
    SpendingPeriod,
    SpendingScope,
    SpendingStatus,
    UpdatePolicyRequest,
    Weights,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import parse_watts

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_BYTES_MOST = 1 << 20


def _budget(text: str) -> tuple[BudgetScope, str, float | None]:
    """Parses `SCOPE[:NAME]=WATTS`; None instead of watts removes the budget. Raises BadParameter."""
    place, equals, amount = text.partition("=")
    scope, _, name = place.partition(":")
    scopes = {one.name.lower(): one for one in BudgetScope if one}
    if not equals or scope not in scopes or (scope == "cluster") == bool(name):
        raise click.BadParameter(
            f"{text!r}; write cluster=200kW, rack:NAME=20kW or node:NAME=5600W", param_hint="--budget"
        )
    if amount == "none":
        return scopes[scope], name, None
    try:
        return scopes[scope], name, parse_watts(amount)
    except ValueError as error:
        raise click.BadParameter(f"{error}; or none, to remove the budget", param_hint="--budget") from None


def apply_budget_options(policy: Policy, texts: Iterable[str]) -> tuple[PowerBudget, ...]:
    """Returns the budgets of a policy with those named changed, added or removed; raises BadParameter."""
    limits_w = {(one.scope, one.name): one.limit_w for one in policy.budgets}
    for text in texts:
        scope, name, limit_w = _budget(text)
        if limit_w is None:
            limits_w.pop((scope, name), None)
        else:
            limits_w[scope, name] = limit_w
    return tuple(PowerBudget(scope=scope, name=name, limit_w=limit_w) for (scope, name), limit_w in limits_w.items())


def _minute(value: Any, place: str) -> list[int]:
    """Parses `07:00` for every day, or `sat 07:00` for one day, into minutes of the week."""
    match = re.fullmatch(r"(?:([a-z]{3}) )?([0-2]?\d):([0-5]\d)", str(value).strip().lower())
    days = [_DAYS.index(match[1])] if match and match[1] in _DAYS else range(7) if match and not match[1] else []
    if not match or not days or int(match[2]) > 23:
        raise RequestRefused(
            f"{place}: from is {value!r}", "write '07:00' for every day or 'sat 07:00' for one, in quotes"
        )
    return [day * _DAY_MINUTES + 60 * int(match[2]) + int(match[3]) for day in days]


def read_prices(path: Path) -> EnergyPrices | None:
    """Reads energy prices from a file, None if it contains `none`; raises RequestRefused with the field."""
    import yaml

    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8")[:_BYTES_MOST])
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestRefused(f"{path}: cannot be read as YAML", "check the path, and correct the YAML") from error
    if plain == "none":
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("periods"), list):
        raise RequestRefused(
            f"{path}: has no list `periods`", "write periods: [{from: '07:00', price_per_kwh: 0.25}, ...]"
        )
    periods: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(plain["periods"], 1):
        place = f"{path}: period {number}"
        if not isinstance(row, dict) or "from" not in row:
            raise RequestRefused(f"{place}: has no `from`", "write {from: '07:00', price_per_kwh: 0.25}")
        rest = {key: value for key, value in row.items() if key != "from"}
        # A time with a day overrides the same time of every day, whatever the order.
        minutes = _minute(row["from"], place)
        for minute in minutes:
            if len(minutes) == 1 or minute not in periods:
                periods[minute] = {"begins_minute": minute, **rest}
    try:
        return from_plain(EnergyPrices, {**plain, "periods": [periods[minute] for minute in sorted(periods)]})
    except InvalidMessage as error:
        violations = tuple(Violation(one.field, one.problem, one.remedy) for one in error.violations)
        raise RequestRefused(f"{path}: {error.message}", "correct the file", violations) from None


def budget_lines(policy: Policy) -> Iterator[str]:
    """Formats budgets and prices for people."""
    for budget in policy.budgets:
        yield f"budget {describe_budget_place(budget):<12}{budget.limit_w:,.0f} W"
    if policy.prices is not None:
        yield f"prices             {describe_prices(policy.prices)}"


_QUANTITIES = {amount.name: quantity for quantity, amount in QUANTITY_UNITS.items()}
_PERIODS = {period.name.lower(): period for period in SpendingPeriod if period}
_LIMIT = re.compile(
    r"(?P<scope>namespace|user|queue|label:(?P<label>[^=]+))=(?P<name>.+?)\s+"
    rf"(?P<what>{'|'.join(_QUANTITIES)})=(?P<amount>\S+)\s+per\s+(?P<period>{'|'.join(_PERIODS)})(?P<options>\s*,.*)?"
)
_AMOUNT = re.compile(r"\d{1,15}(?:\.\d{1,9})?")
_WARN = re.compile(r"warn at (\d{1,3}(?:\.\d{1,6})?) ?%")
_HINT = "--spend"
_NS = 10**9


def _options(text: str) -> tuple[EnforcementMode, bool, float | None]:
    mode, stops, warn_ratio = EnforcementMode.ENFORCE, False, None
    for option in filter(None, (part.strip() for part in text.split(","))):
        match = _WARN.fullmatch(option)
        if option in ("observe", "enforce"):
            mode = EnforcementMode[option.upper()]
        elif option == "stop":
            stops = True
        elif match is not None and float(match[1]) <= 100.0:
            warn_ratio = float(match[1]) / 100.0
        else:
            raise click.BadParameter(f"{option!r}; write observe, enforce, stop or warn at 90%", param_hint=_HINT)
    if stops and mode is EnforcementMode.OBSERVE:
        raise click.BadParameter(f"{text!r} is observed and stops jobs; leave one of the two out", param_hint=_HINT)
    return mode, stops, warn_ratio


def parse_spending_limit(text: str) -> tuple[SpendingLimit, bool]:
    """Parses one spending limit, and whether to keep it; raises BadParameter."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(
            f"{text!r}; write 'namespace=NAME gpu-hours=2000 per month': namespace, user, queue or label:KEY; "
            f"{', '.join(_QUANTITIES)}; per {', '.join(_PERIODS)}",
            param_hint=_HINT,
        )
    amount, is_kept = match["amount"], match["amount"] != "none"
    if is_kept and (not _AMOUNT.fullmatch(amount) or not float(amount)):
        raise click.BadParameter(f"{amount!r}; write a number above 0 such as 2000, or none", param_hint=_HINT)
    mode, stops, warn_ratio = _options(match["options"] or "")
    scope = "label" if match["label"] else match["scope"]
    quantity = _QUANTITIES[match["what"]]
    limit = SpendingLimit(
        scope=SpendingScope[scope.upper()],
        name=match["name"],
        label=match["label"] or "",
        quantity=quantity,
        most=float(amount) * QUANTITY_UNITS[quantity].size if is_kept else 1.0,
        period=_PERIODS[match["period"]],
        warn_ratio=warn_ratio,
        mode=mode,
        stops=stops,
    )
    return limit, is_kept


def apply_limit_options(policy: Policy, texts: Iterable[str]) -> tuple[SpendingLimit, ...]:
    """Returns the limits of a policy with those named changed, added or removed; raises BadParameter."""
    limits = {spending_key(one): one for one in policy.spending}
    for text in texts:
        limit, is_kept = parse_spending_limit(text)
        if is_kept:
            limits[spending_key(limit)] = limit
        elif limits.pop(spending_key(limit), None) is None:
            raise click.BadParameter(
                f"{text!r} removes a limit that does not exist; list limits with eelctl spending", param_hint=_HINT
            )
    if len(limits) > SPENDING_LIMITS_MOST:
        raise click.BadParameter(
            f"makes {len(limits)} limits; at most {SPENDING_LIMITS_MOST} are allowed, so remove some with =none",
            param_hint=_HINT,
        )
    return tuple(limits.values())


def _state(one: SpendingStatus) -> str:
    if one.spent is None:
        return "not known"
    if one.spent >= one.limit.most:
        is_observed = one.limit.mode is EnforcementMode.OBSERVE
        return "spent, observed" if is_observed else "spent, stops jobs" if one.limit.stops else "spent"
    return "nearly spent" if one.spent >= warn_ratio_of(one.limit) * one.limit.most else "under"


def _colour(one: SpendingStatus) -> str | None:
    return {"under": "green", "nearly spent": "yellow"}.get(_state(one), "red")


def _columns(found: ListSpendingResponse) -> tuple[TableColumn[SpendingStatus], ...]:
    offset = found.utc_offset_minutes

    def amount(one: SpendingStatus, value: float | None) -> str:
        if value is None:
            return ""
        return f"{format_amount(one.limit.quantity, value)} {describe_unit(one.limit.quantity, found.currency)}"

    def period(one: SpendingStatus) -> str:
        return describe_period(one.limit.period, PeriodBounds(one.begin_ns // _NS, one.end_ns // _NS), offset)

    def since(one: SpendingStatus) -> str:
        return describe_moment(one.over_since_ns / _NS, offset) if one.over_since_ns else ""

    return (
        TableColumn("WHOSE", lambda one: format_subject(one.limit)),
        TableColumn("PERIOD", period),
        TableColumn("LIMIT", lambda one: amount(one, one.limit.most), right=True),
        TableColumn("SPENT", lambda one: amount(one, one.spent), right=True),
        TableColumn(
            "SHARE",
            lambda one: "" if one.spent is None else f"{100.0 * one.spent / one.limit.most:.1f} %",
            right=True,
            colour=_colour,
            share=lambda one: share_of(one.spent, one.limit.most),
        ),
        TableColumn("FORECAST", lambda one: amount(one, one.forecast), right=True),
        TableColumn("STATE", _state, colour=_colour),
        TableColumn("SINCE", since),
        TableColumn("WAITING", lambda one: str(one.waiting), right=True),
        TableColumn("ENDS", lambda one: describe_moment(one.end_ns / _NS, offset)),
    )


def _spending_lines(
    settings: CliSettings, found: ListSpendingResponse, shown: Sequence[SpendingStatus]
) -> Iterator[str]:
    if not found.limits:
        yield "no spending limit is set; set one with eelctl policy set --spend 'namespace=NAME gpu-hours=2000 per month'"
        return
    if not shown:
        yield "no spending limit matches"
        return
    yield from table_lines(settings, _columns(found), shown)


@click.command()
@list_options(*_columns(ListSpendingResponse()))
@output_option
@click.pass_obj
def spending(settings: CliSettings) -> None:
    """Show what is spent of each spending limit, and how much work waits for it.

    FORECAST is for the end of the period: GPU-hours from the GPUs held now, everything else from the mean of the last
    24 hours.
    """
    with connect_operators(settings) as client:
        found = client.list_spending(ListSpendingRequest(), timeout=settings.timeout_s)
    shown = arrange_rows(settings, _columns(found), found.limits)
    print_document(settings, replace(found, limits=tuple(shown)), _spending_lines(settings, found, shown))


_WEIGHTS = tuple(entry.name for entry in fields(Weights))
_INTERVALS = FiniteRange(0.1, 3600.0)
# The objective of a policy whose weights were set one by one.
_CUSTOM = "custom"


def _pairs(pairs: Iterable[str], option: str, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    choices = tuple(known)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise click.BadParameter(f"{pair!r}; write {option} NAME=VALUE", param_hint=option)
        if choices and key not in choices:
            raise click.BadParameter(f"{key!r}; use one of {', '.join(choices)}", param_hint=option)
        yield key, value


def parse_weights(pairs: Iterable[str]) -> dict[str, float]:
    """Parses the weights in --weight NAME=VALUE; raises BadParameter."""
    changed = {}
    for name, text in _pairs(pairs, "--weight", _WEIGHTS):
        try:
            changed[name] = float(text)
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is not a number; write for example power=1.5", param_hint="--weight"
            ) from None
    return changed


def resolve_weights(objective: str | None, pairs: Iterable[str], in_force: Callable[[], Weights]) -> SetWeights:
    """Returns the named objective, or single weights changed in it or in those in force; raises BadParameter."""
    changed = parse_weights(pairs)
    if not changed:
        return SetWeights(objective=objective or "")
    return SetWeights(weights=replace(OBJECTIVES[objective] if objective else in_force(), **changed))


def _modes(pairs: Iterable[str]) -> dict[str, EnforcementMode]:
    modes = {}
    known = {mode.name.lower(): mode for mode in EnforcementMode if mode}
    for pool, text in _pairs(pairs, "--pool-mode", ()):
        if text not in known:
            raise click.BadParameter(f"{text!r}; use one of {', '.join(known)}", param_hint="--pool-mode")
        modes[pool] = known[text]
    return modes


def _refuse_contradictions(wanted: Policy) -> None:
    """Refuses what the controller would refuse, for a dry run, which does not send the policy."""
    from eelgrid_controller.state.policy import find_policy_violations

    if violations := find_policy_violations(wanted):
        raise InvalidMessage("the policy would be refused", violations)


def _pools(
    policy: Policy, modes: Mapping[str, EnforcementMode], partitioned: Mapping[str, bool]
) -> dict[str, PoolMode]:
    """Returns every pool, with the named changes made."""
    pools = {pool.pool: pool for pool in policy.pools}
    for name, mode in modes.items():
        pools[name] = replace(pools.get(name, PoolMode(pool=name, mode=mode)), mode=mode)
    for name, kept in partitioned.items():
        known = pools.get(name, PoolMode(pool=name, mode=EnforcementMode.OBSERVE))
        pools[name] = replace(known, partitioned=kept)
    return pools


def _parse_partition_pools(pairs: Iterable[str]) -> dict[str, bool]:
    found = {}
    for pool, text in _pairs(pairs, "--partition", ()):
        if text not in ("on", "off"):
            raise click.BadParameter(f"{text!r}; use on or off", param_hint="--partition")
        found[pool] = text == "on"
    return found


def _change_policy(
    policy: Policy,
    objective: str | None,
    weights: dict[str, float],
    pools: Mapping[str, PoolMode],
    intervals: dict[str, Any],
) -> Policy:
    """The policy with what was named; weights set one by one give the objective a name of its own."""
    return replace(
        policy,
        objective=_CUSTOM if weights else objective or policy.objective,
        weights=replace(OBJECTIVES[objective] if objective else policy.weights, **weights),
        pools=tuple(pools.values()),
        **{name: value for name, value in intervals.items() if value is not None},
    )


def _change_backfill(policy: Policy, backfill: str | None, default_runtime: str | None) -> Policy:
    """Returns the policy with another mode of backfill and default run time, as far as named; raises BadParameter."""
    if backfill is not None:
        policy = replace(policy, backfill=BackfillMode[backfill.upper()])
    if default_runtime is None:
        return policy
    try:
        expected_s = None if default_runtime == "none" else float(parse_duration_s(default_runtime))
    except ValueError as error:
        raise click.BadParameter(f"{error}; or none", param_hint="--default-runtime") from None
    return replace(policy, default_runtime_s=expected_s)


def _lines(policy: Policy) -> Iterator[str]:
    yield f"objective          {policy.objective} (revision {policy.revision})"
    for name in _WEIGHTS:
        yield f"  {name:<17}{getattr(policy.weights, name):g}"
    yield f"placement          {policy.placement}"
    yield f"lease              {policy.lease_s:g} s"
    yield f"send interval      {policy.send_interval_s:g} s"
    yield f"sample interval    {policy.sample_interval_s:g} s"
    for pool in policy.pools:
        yield f"pool {pool.pool:<14}{describe_pool_mode(pool)}"
    yield from budget_lines(policy)
    for limit in policy.spending:
        yield f"spending           {format_limit(limit)}"
    if policy.queues:
        yield f"queues             {len(policy.queues)} declared: eelctl queue show"
    yield f"backfill           {describe_backfill(policy)}"
    if policy.reservations:
        yield f"reservations       {len(policy.reservations)}: eelctl reservation list"
    yield "every other pool   observe: plans are shown, nothing is changed on the nodes"


@click.group()
def policy() -> None:
    """Show or change the policy: objective, pools, budgets, prices and spending limits."""


@policy.command("get")
@output_option
@click.pass_obj
def get_policy(settings: CliSettings) -> None:
    """Show the policy in force."""
    with connect_operators(settings) as client:
        found = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
        print_document(settings, found, _lines(found))


@policy.command("set")
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="Named objective.")
@click.option(
    "--policy",
    "placement",
    metavar="NAME",
    help="Placement policy: eelgrid, fgd, pwr, pwr200, ...",
    shell_complete=complete_placements,
)
@click.option("--weight", multiple=True, metavar="NAME=VALUE", help=f"One weight of {', '.join(_WEIGHTS)}; repeatable.")
@click.option(
    "--pool-mode",
    multiple=True,
    shell_complete=complete_pairs(complete_pools, "observe", "enforce"),
    metavar="POOL=MODE",
    help="Mode of a pool, observe or enforce; `default` is the pool of agents that name none; repeatable.",
)
@click.option(
    "--partition",
    multiple=True,
    shell_complete=complete_pairs(complete_pools, "on", "off"),
    metavar="POOL=on",
    help="on: use the MIG GPUs of a pool for slices only; repeatable.",
)
@click.option(
    "--budget",
    multiple=True,
    metavar="PLACE=WATTS",
    help="Power budget with its unit, for example cluster=200kW, rack:r1=5600W, node:n7=none; repeatable.",
)
@click.option(
    "--prices",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of energy prices by time; a file with `none` removes them.",
)
@click.option(
    "--spend",
    multiple=True,
    metavar="LIMIT",
    help="'namespace=research gpu-hours=2000 per month'; user, queue, label:KEY; kwh, money, co2-kg, none to take it "
    "away; per day, week; then ', observe', ', stop' or ', warn at 90%'; repeatable.",
)
@click.option(
    "--lease",
    "lease_s",
    type=FiniteRange(5.0, 86_400.0),
    help="Seconds for which a node keeps its plan without the controller.",
)
@click.option(
    "--send-interval", "send_interval_s", type=_INTERVALS, help="Seconds between batches of samples from an agent."
)
@click.option("--sample-interval", "sample_interval_s", type=_INTERVALS, help="Seconds between samples of an agent.")
@click.option(
    "--backfill",
    type=click.Choice([mode.name.lower() for mode in BackfillMode if mode]),
    help="Which work that waits for capacity is promised a start: none, the first (easy), or all (conservative).",
)
@click.option(
    "--default-runtime",
    metavar="DURATION",
    help="How long jobs are expected to run of which nothing is known, for example 4h; none: for ever.",
)
@click.option(
    "--ahead",
    is_flag=True,
    help="Accept pools, racks and nodes that no node of the controller has yet, or not any more.",
)
@yes_option
@click.option("--dry-run", is_flag=True, help="Print what would differ from the policy in force, and change nothing.")
@output_option
@click.pass_obj
def set_policy(
    settings: CliSettings,
    /,
    *,
    objective: str | None,
    weight: tuple[str, ...],
    pool_mode: tuple[str, ...],
    partition: tuple[str, ...],
    budget: tuple[str, ...],
    prices: Path | None,
    spend: tuple[str, ...],
    backfill: str | None,
    default_runtime: str | None,
    ahead: bool,
    yes: bool,
    dry_run: bool,
    **intervals: Any,
) -> None:
    """Change the policy in force; settings that are not named stay as they are.

    Prints a line for each setting that changes. Agents that name no pool are in the pool `default`. A pool, rack or
    node that no node has is refused, since a misspelled name would bound and enforce nothing; --ahead declares it
    before its nodes join. A budget below what its GPUs draw now, and a pool of nodes that is enforced from now on, ask
    first, and need --yes without a terminal.

    \b
    eelctl policy set --objective energy
    eelctl policy set --budget rack:r1=20kW --pool-mode default=enforce
    eelctl policy set --budget cluster=200kW --dry-run
    """  # noqa: D301
    named = (objective, weight, pool_mode, partition, budget, prices, spend, backfill, default_runtime)
    if not any(named) and all(value is None for value in intervals.values()):
        raise click.UsageError("name a setting to change; see eelctl policy set --help")
    weights, modes, partitioned = parse_weights(weight), _modes(pool_mode), _parse_partition_pools(partition)
    with connect_operators(settings) as client:
        found = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
        wanted = replace(
            _change_policy(found, objective, weights, _pools(found, modes, partitioned), intervals),
            budgets=apply_budget_options(found, budget),
            spending=apply_limit_options(found, spend),
        )
        if prices is not None:
            wanted = replace(wanted, prices=read_prices(prices))
        wanted = _change_backfill(wanted, backfill, default_runtime)
        if not ahead:
            refuse_unknown_names(client, settings, found, wanted)
        changes = tuple(policy_changes(found, wanted))
        confirm_low_budgets(client, settings, found, wanted, asks=not (yes or dry_run))
        confirm_enforcement(client, settings, found, wanted, asks=not (yes or dry_run))
        if dry_run:
            _refuse_contradictions(wanted)
            print_document(settings, wanted, ("dry run: nothing was changed", *changes))
            return
        answer = client.update_policy(UpdatePolicyRequest(policy=wanted), timeout=settings.timeout_s).policy
        print_document(settings, answer, (*changes, "", *_lines(answer)))
