"""eelctl promises, scale and progress: objectives of services and jobs, and how the controller keeps them.

Owns the tables and the options. Must not know how objectives are kept.
"""

from collections.abc import Iterator

import click

from eelgrid_controller.cli.connection import CliSettings, connect_operators, fetch_whole, output_option
from eelgrid_controller.cli.output import TableColumn, echo, print_document, text_table, use_colour
from eelgrid_controller.cli.policy import apply_budget_options
from eelgrid_controller.cli.workloads import workload_lines
from eelgrid_protos.messages import (
    BudgetStatus,
    GetPolicyRequest,
    ImagineBudgetsRequest,
    JobStatus,
    ListPromisesRequest,
    ListPromisesResponse,
    ReportProgressRequest,
    ScaleWorkloadRequest,
    ServiceStatus,
)

_PRICE_SHOWN = 0.005  # of the mean: below it says nothing


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return ""
    return f"{1000.0 * value_s:.3g} ms" if value_s < 1.0 else f"{value_s:.3g} s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100.0 * share:+.1f} %"


def _kept(one: ServiceStatus) -> str | None:
    if one.live_s is None:
        return None
    return "green" if one.live_s <= one.objective_s else "red"


def _slowness(one: ServiceStatus) -> str:
    return f"x{one.slowness:.2f} ±{100.0 * one.slowness_error:.0f} %"


_SERVICES: tuple[TableColumn[ServiceStatus], ...] = (
    TableColumn("SERVICE", lambda one: one.workload_id),
    TableColumn("PHASE", lambda one: one.phase),
    TableColumn("SERVE", lambda one: f"{one.replicas_serving}/{one.replicas_wanted}", right=True),
    TableColumn("RATE", lambda one: "" if one.arrived_hz is None else f"{one.arrived_hz:.4g}/s", right=True),
    TableColumn("LIVE", lambda one: _seconds(one.live_s), right=True, colour=_kept),
    TableColumn("PROMISED", lambda one: _seconds(one.objective_s), right=True),
    TableColumn("MODEL", lambda one: _seconds(one.modelled_s), right=True, wide=True),
    TableColumn("SLOWNESS", _slowness, right=True, wide=True),
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
    TableColumn("CLAIMED", lambda one: f"{one.claimed_w:,.0f} W", right=True),
    TableColumn(
        "SHORT",
        lambda one: f"{one.shortfall_w:,.0f} W" if one.shortfall_w else "",
        right=True,
        colour=lambda one: "red" if one.shortfall_w else None,
    ),
)


def _lines(settings: CliSettings, found: ListPromisesResponse) -> Iterator[str]:
    parts = ((_SERVICES, found.services), (_JOBS, found.jobs), (_BUDGETS, found.budgets))
    is_first = True
    for columns, rows in parts:
        if not rows:
            continue
        if not is_first:
            yield ""
        is_first = False
        shown = [column for column in columns if settings.output == "wide" or not column.wide]
        yield from text_table(shown, rows, headers=settings.headers, colour=use_colour())
    if is_first:
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
@output_option
@click.pass_obj
def promises(settings: CliSettings, budget: tuple[str, ...]) -> None:
    """Show whether services and jobs meet their objectives, and what the controller does for them.

    With --budget, show what jobs would lose under other power budgets; the budgets in force do not change.
    """
    with connect_operators(settings) as client:
        if budget:
            policy = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
            asked = ImagineBudgetsRequest(budgets=apply_budget_options(policy, budget))
            seen = client.imagine_budgets(asked, timeout=settings.timeout_s)
            print_document(settings, seen, _lines(settings, ListPromisesResponse(jobs=seen.jobs, budgets=seen.budgets)))
            return
        found = fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=settings.timeout_s)
        print_document(settings, found, _lines(settings, found))


@click.command()
@click.argument("workload")
@click.argument("replicas", type=click.IntRange(1, 10_000))
@output_option
@click.pass_obj
def scale(settings: CliSettings, workload: str, replicas: int) -> None:
    """Scale WORKLOAD to REPLICAS, or to as many as there is capacity for."""
    with connect_operators(settings) as client:
        request = ScaleWorkloadRequest(workload_id=workload, replicas=replicas)
        found = client.scale_workload(request, timeout=settings.timeout_s).workload
        print_document(settings, found, workload_lines(found))
        if len(found.placements) < replicas:
            echo(
                f"there is capacity for {len(found.placements)} of {replicas}; eelctl capacity shows what is missing",
                err=True,
            )


@click.command()
@click.argument("workload")
@click.argument("work_done", type=click.FloatRange(0.0, 1e18))
@click.pass_obj
def progress(settings: CliSettings, workload: str, work_done: float) -> None:
    """Report that the job WORKLOAD has done WORK_DONE units of work since it began."""
    with connect_operators(settings) as client:
        client.report_progress(
            ReportProgressRequest(workload_id=workload, work_done=work_done), timeout=settings.timeout_s
        )
