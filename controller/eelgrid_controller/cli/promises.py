"""eelctl promises: how objectives and power budgets are kept, and what is done for them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.connection import (
    CliSettings,
    connect_operators,
    fetch_whole,
    output_option,
)
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_tables,
    list_options,
    print_document,
    share_colour,
    share_of,
    table_lines,
)
from eelgrid_controller.cli.policy import apply_budget_options
from eelgrid_controller.formatting import format_load_target
from eelgrid_protos.messages import (
    BudgetStatus,
    GetPolicyRequest,
    ImagineBudgetsRequest,
    JobStatus,
    ListPromisesRequest,
    ListPromisesResponse,
    ServiceStatus,
)

_PRICE_SHOWN = 0.005  # of the mean: below it says nothing


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return ""
    return f"{1000.0 * value_s:.3g} ms" if value_s < 1.0 else f"{value_s:.3g} s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100.0 * share:+.1f} %"


def _latency_colour(one: ServiceStatus) -> str | None:
    if one.live_s is None or not one.objective_s:
        return None
    return "green" if one.live_s <= one.objective_s else "red"


def _format_promise(one: ServiceStatus) -> str:
    if one.load_target is not None:
        return f"{format_load_target(one.load_target)} each"
    return _seconds(one.objective_s) if one.objective_s else ""


def _format_slowness(one: ServiceStatus) -> str:
    return "" if one.load_target is not None else f"x{one.slowness:.2f} ±{100.0 * one.slowness_error:.0f} %"


def _format_start(one: ServiceStatus) -> str:
    if not one.start_s:
        return ""
    return f"{one.start_s:g} s {'measured' if one.is_start_measured else 'stated'}"


_SERVICES: tuple[TableColumn[ServiceStatus], ...] = (
    TableColumn("SERVICE", lambda one: one.workload_id),
    TableColumn("PHASE", lambda one: one.phase),
    TableColumn("SERVE", lambda one: f"{one.replicas_serving}/{one.replicas_wanted}", right=True),
    TableColumn("RATE", lambda one: "" if one.arrived_hz is None else f"{one.arrived_hz:.4g}/s", right=True),
    TableColumn("LIVE", lambda one: _seconds(one.live_s), right=True, colour=_latency_colour),
    TableColumn("PROMISED", _format_promise, right=True),
    TableColumn("MODEL", lambda one: _seconds(one.modelled_s), right=True, wide=True),
    TableColumn("SLOWNESS", _format_slowness, right=True, wide=True),
    TableColumn("START", _format_start, right=True, wide=True),
    TableColumn("WHY", lambda one: ("would: " if one.is_advice else "") + one.reason),
)
_JOBS: tuple[TableColumn[JobStatus], ...] = (
    TableColumn("JOB", lambda one: one.workload_id),
    TableColumn("PHASE", lambda one: one.phase),
    TableColumn("LIMIT", lambda one: "" if one.power_limit_w is None else f"{one.power_limit_w:g} W", right=True),
    TableColumn("TIME", lambda one: _percent(one.slowdown), right=True),
    TableColumn("SAVES", lambda one: _percent(one.saving), right=True),
    TableColumn("WHY", lambda one: ("would: " if one.is_advice else "") + one.reason),
)
_BUDGETS: tuple[TableColumn[BudgetStatus], ...] = (
    TableColumn("BUDGET", lambda one: f"{one.budget.scope.name.lower()} {one.budget.name}".strip()),
    TableColumn("LIMIT", lambda one: f"{one.budget.limit_w:,.0f} W", right=True),
    TableColumn(
        "MEASURED",
        lambda one: "" if one.measured_w is None else f"{one.measured_w:,.0f} W",
        right=True,
        colour=lambda one: share_colour(share_of(one.measured_w, one.budget.limit_w)),
        share=lambda one: share_of(one.measured_w, one.budget.limit_w),
    ),
    # Of GPUs something is always claimed: none is known yet where it is 0.
    TableColumn("CLAIMED", lambda one: "" if one.gpus and not one.claimed_w else f"{one.claimed_w:,.0f} W", right=True),
    TableColumn(
        "OVER",
        lambda one: f"{one.over_w:,.0f} W" if one.over_w else "",
        right=True,
        colour=lambda one: "red" if one.over_w else None,
    ),
    TableColumn(
        "SHORT",
        lambda one: f"{one.shortfall_w:,.0f} W" if one.shortfall_w else "",
        right=True,
        colour=lambda one: "red" if one.shortfall_w else None,
    ),
)


def _arrange_objectives(settings: CliSettings, found: ListPromisesResponse) -> ListPromisesResponse:
    services, jobs, budgets = arrange_tables(
        settings, (_SERVICES, found.services), (_JOBS, found.jobs), (_BUDGETS, found.budgets)
    )
    return replace(found, services=services, jobs=jobs, budgets=budgets)


def _objective_lines(settings: CliSettings, found: ListPromisesResponse) -> Iterator[str]:
    parts: tuple[tuple[Sequence[TableColumn[Any]], Sequence[Any]], ...] = (
        (_SERVICES, found.services),
        (_JOBS, found.jobs),
        (_BUDGETS, found.budgets),
    )
    is_first = True
    for columns, rows in parts:
        if not rows:
            continue
        if not is_first:
            yield ""
        is_first = False
        yield from table_lines(settings, columns, rows)
    if is_first and settings.filters:
        yield "nothing with an objective matches"
    elif is_first:
        yield "nothing has an objective; give a service objectives or a job a slowdown limit: docs/how-to/promises.md"
    if abs(found.price_ratio - 1.0) > _PRICE_SHOWN:
        yield f"energy now costs {found.price_ratio:.2f} times the mean of the coming day"


@click.command()
@click.option(
    "--budget",
    multiple=True,
    metavar="PLACE=WATTS",
    help="Try a power budget without setting it: cluster=100kW, rack:r1=20kW; repeatable.",
)
@list_options(*_SERVICES, *_JOBS, *_BUDGETS)
@output_option
@click.pass_obj
def promises(settings: CliSettings, budget: tuple[str, ...]) -> None:
    """Show whether services and jobs meet their objectives, and what the controller does for them.

    Of each power budget: MEASURED is what its GPUs draw now, CLAIMED what they may draw (held ones at their limits,
    those that no known work holds at their idle power), OVER what is measured beyond the budget, and SHORT what
    objectives and lost nodes need beyond it. More measured than claimed is drawn by work that the controller does not
    know.

    With --budget, show what jobs would lose under other power budgets; the budgets in force do not change.
    """
    with connect_operators(settings) as client:
        if budget:
            policy = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
            asked = ImagineBudgetsRequest(budgets=apply_budget_options(policy, budget))
            seen = client.imagine_budgets(asked, timeout=settings.timeout_s)
            tried = _arrange_objectives(settings, ListPromisesResponse(jobs=seen.jobs, budgets=seen.budgets))
            shown = replace(seen, jobs=tried.jobs, budgets=tried.budgets)
            print_document(settings, shown, _objective_lines(settings, tried))
            return
        whole = fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=settings.timeout_s)
        found = _arrange_objectives(settings, whole)
        print_document(settings, found, _objective_lines(settings, found))
