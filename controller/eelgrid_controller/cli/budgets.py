"""Power budgets and prices of energy, as operators write them.

Owns `cluster=200kW`, `rack:r1=20kW`, `node:n7=5600` and the YAML file of prices
(docs/how-to/promises.md), and how both are told. Must not know what follows from them.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.failure import Refused
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import BudgetScope, EnergyPrices, Policy, PowerBudget
from eelgrid_protos.plain import from_plain

__all__ = ["budgets_with", "money_lines", "read_prices"]

_WATTS = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(k|M)?W?")
_UNIT = {None: 1.0, "k": 1e3, "M": 1e6}
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_BYTES_MOST = 1 << 20


def _budget(text: str) -> tuple[BudgetScope, str, float | None]:
    """One `SCOPE[:NAME]=WATTS`; no watts where the budget is to go. Raises BadParameter."""
    place, equals, amount = text.partition("=")
    scope, _, name = place.partition(":")
    scopes = {one.name.lower(): one for one in BudgetScope if one}
    if not equals or scope not in scopes or (scope == "cluster") == bool(name):
        raise click.BadParameter(
            f"{text!r}; write cluster=200kW, rack:NAME=20kW or node:NAME=5600W", param_hint="--budget"
        )
    if amount == "none":
        return scopes[scope], name, None
    match = _WATTS.fullmatch(amount)
    if match is None:
        raise click.BadParameter(f"{amount!r}; write watts such as 5600W, 20kW or none", param_hint="--budget")
    return scopes[scope], name, float(match[1]) * _UNIT[match[2]]


def budgets_with(policy: Policy, texts: Iterable[str]) -> tuple[PowerBudget, ...]:
    """The budgets of a policy with those named changed, added or taken away; raises BadParameter."""
    limits_w = {(one.scope, one.name): one.limit_w for one in policy.budgets}
    for text in texts:
        scope, name, limit_w = _budget(text)
        if limit_w is None:
            limits_w.pop((scope, name), None)
        else:
            limits_w[scope, name] = limit_w
    return tuple(PowerBudget(scope=scope, name=name, limit_w=limit_w) for (scope, name), limit_w in limits_w.items())


def _minute(value: Any, place: str) -> list[int]:
    """`07:00` on every day, or `sat 07:00` once a week, as minutes of the week."""
    match = re.fullmatch(r"(?:([a-z]{3}) )?([0-2]?\d):([0-5]\d)", str(value).strip().lower())
    days = [_DAYS.index(match[1])] if match and match[1] in _DAYS else range(7) if match and not match[1] else []
    if not match or not days or int(match[2]) > 23:
        raise Refused(f"{place}: from is {value!r}", "write '07:00' for every day, or 'sat 07:00'; quote it")
    return [day * _DAY_MINUTES + 60 * int(match[2]) + int(match[3]) for day in days]


def read_prices(path: Path) -> EnergyPrices | None:
    """The prices of a file, None for one that holds `none`; raises Refused naming the field."""
    import yaml

    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8")[:_BYTES_MOST])
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{path}: cannot be read as YAML", "check the file") from error
    if plain == "none":
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("periods"), list):
        raise Refused(f"{path}: has no list `periods`", "write periods: [{from: '07:00', price_per_kwh: 0.25}, ...]")
    periods: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(plain["periods"], 1):
        place = f"{path}: period {number}"
        if not isinstance(row, dict) or "from" not in row:
            raise Refused(f"{place}: has no `from`", "write {from: '07:00', price_per_kwh: 0.25}")
        rest = {key: value for key, value in row.items() if key != "from"}
        # A time with a day is an exception to the same time on every day, wherever it stands.
        minutes = _minute(row["from"], place)
        for minute in minutes:
            if len(minutes) == 1 or minute not in periods:
                periods[minute] = {"begins_minute": minute, **rest}
    try:
        return from_plain(EnergyPrices, {**plain, "periods": [periods[minute] for minute in sorted(periods)]})
    except InvalidMessage as error:
        violations = tuple(Violation(one.field, one.problem, one.remedy) for one in error.violations)
        raise Refused(f"{path}: {error.message}", "correct the file", violations) from None


def money_lines(policy: Policy) -> Iterator[str]:
    """Budgets and prices for a person."""
    for budget in policy.budgets:
        yield f"budget {f'{budget.scope.name.lower()} {budget.name}'.strip():<12}{budget.limit_w:,.0f} W"
    prices = policy.prices
    if prices is None:
        return
    amounts = [period.price_per_kwh for period in prices.periods]
    carbon = f", {prices.carbon_price_per_kg:g} {prices.currency}/kg of CO2" if prices.carbon_price_per_kg else ""
    yield (
        f"prices             {min(amounts):g} to {max(amounts):g} {prices.currency}/kWh in {len(amounts)} periods a week"
        f", PUE {prices.pue:g}{carbon}"
    )
