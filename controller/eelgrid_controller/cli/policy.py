"""eelctl policy get and set: what the controller aims for.

Owns the options. A change is made on the policy in force and carries its
revision, so that two operators cannot overwrite each other unseen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.budgets import budgets_with, money_lines, read_prices
from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.spending import limits_with, spending_lines
from eelgrid_controller.cli.tables import document
from eelgrid_protos.messages import (
    OBJECTIVES,
    EnforcementMode,
    GetPolicyRequest,
    Policy,
    PoolMode,
    SetWeights,
    UpdatePolicyRequest,
    Weights,
)

__all__ = ["policy", "wanted_weights"]

_WEIGHTS = tuple(entry.name for entry in fields(Weights))
_INTERVALS = click.FloatRange(0.1, 3600.0)
# An objective of this name says that the weights were set one by one.
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


def weights_of(pairs: Iterable[str]) -> dict[str, float]:
    """The weights that --weight NAME=VALUE names; raises BadParameter."""
    changed = {}
    for name, text in _pairs(pairs, "--weight", _WEIGHTS):
        try:
            changed[name] = float(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is no number", param_hint="--weight") from None
    return changed


def wanted_weights(objective: str | None, pairs: Iterable[str], in_force: Callable[[], Weights]) -> SetWeights:
    """The named objective, or single weights changed of it or of those in force; raises BadParameter."""
    changed = weights_of(pairs)
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


def _pools(
    policy: Policy, modes: Mapping[str, EnforcementMode], partitioned: Mapping[str, bool]
) -> dict[str, PoolMode]:
    """Every pool with what was named of it."""
    pools = {pool.pool: pool for pool in policy.pools}
    for name, mode in modes.items():
        pools[name] = replace(pools.get(name, PoolMode(pool=name, mode=mode)), mode=mode)
    for name, kept in partitioned.items():
        known = pools.get(name, PoolMode(pool=name, mode=EnforcementMode.OBSERVE))
        pools[name] = replace(known, partitioned=kept)
    return pools


def _partitioned(pairs: Iterable[str]) -> dict[str, bool]:
    found = {}
    for pool, text in _pairs(pairs, "--partition", ()):
        if text not in ("on", "off"):
            raise click.BadParameter(f"{text!r}; use on or off", param_hint="--partition")
        found[pool] = text == "on"
    return found


def _changed(
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


def _lines(policy: Policy) -> Iterator[str]:
    yield f"objective          {policy.objective} (revision {policy.revision})"
    for name in _WEIGHTS:
        yield f"  {name:<17}{getattr(policy.weights, name):g}"
    yield f"placement          {policy.placement}"
    yield f"lease              {policy.lease_s:g} s"
    yield f"send interval      {policy.send_interval_s:g} s"
    yield f"sample interval    {policy.sample_interval_s:g} s"
    for pool in policy.pools:
        kept = ", its GPUs with MIG are the partition planner's" if pool.partitioned else ""
        yield f"pool {pool.pool:<14}{pool.mode.name.lower()}{kept}"
    yield from money_lines(policy)
    yield from spending_lines(policy)
    yield "every other pool   observe: plans are shown, nothing is changed on the nodes"


@click.group()
def policy() -> None:
    """Show or change what to aim for."""


@policy.command("get")
@printing
@click.pass_obj
def get_policy(settings: Settings) -> None:
    """Show the policy in force."""
    with operators(settings) as client:
        found = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
        document(settings, found, _lines(found))


@policy.command("set")
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="A named weighting.")
@click.option("--policy", "placement", metavar="NAME", help="How places are chosen: eelgrid, fgd, pwr, pwr200, ...")
@click.option("--weight", multiple=True, metavar="NAME=VALUE", help=f"One weight; repeatable: {', '.join(_WEIGHTS)}.")
@click.option("--pool-mode", multiple=True, metavar="POOL=MODE", help="observe or enforce in a pool; repeatable.")
@click.option(
    "--partition", multiple=True, metavar="POOL=on", help="on: a pool's GPUs with MIG are for slices alone; repeatable."
)
@click.option(
    "--budget", multiple=True, metavar="PLACE=WATTS", help="cluster=200kW, rack:r1=20kW, node:n7=none; repeatable."
)
@click.option(
    "--prices",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML of what energy costs when; a file with `none` takes prices away.",
)
@click.option(
    "--spend", multiple=True, metavar="LIMIT",
    help="'namespace=research gpu-hours=2000 per month'; user, queue, label:KEY; kwh, money, co2-kg, none to take it "
         "away; per day, week; then ', observe' or ', warn at 90%'; repeatable.",
)  # fmt: skip
@click.option("--lease", "lease_s", type=click.FloatRange(5.0, 86_400.0), help="Seconds a node keeps a plan alone.")
@click.option("--send-interval", "send_interval_s", type=_INTERVALS, help="Seconds between an agent's batches.")
@click.option("--sample-interval", "sample_interval_s", type=_INTERVALS, help="Seconds between samples.")
@printing
@click.pass_obj
def set_policy(
    settings: Settings,
    /,
    *,
    objective: str | None,
    weight: tuple[str, ...],
    pool_mode: tuple[str, ...],
    partition: tuple[str, ...],
    budget: tuple[str, ...],
    prices: Path | None,
    spend: tuple[str, ...],
    **intervals: Any,
) -> None:
    """Change the policy in force; what is not named stays."""
    named = (objective, weight, pool_mode, partition, budget, prices, spend)
    if not any(named) and all(value is None for value in intervals.values()):
        raise click.UsageError("name what to change; see eelctl policy set --help")
    weights, modes, partitioned = weights_of(weight), _modes(pool_mode), _partitioned(partition)
    with operators(settings) as client:
        found = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
        wanted = replace(
            _changed(found, objective, weights, _pools(found, modes, partitioned), intervals),
            budgets=budgets_with(found, budget),
            spending=limits_with(found, spend),
        )
        if prices is not None:
            wanted = replace(wanted, prices=read_prices(prices))
        answer = client.update_policy(UpdatePolicyRequest(policy=wanted), timeout=settings.timeout_s).policy
        document(settings, answer, _lines(answer))
