"""eelctl partition: shows the MIG layouts of partitioned pools, recommends better ones, and applies them.

Owns the options and the tables. Must not know how plans are found. Only `apply` changes
anything: it carries out a recommendation by its id, or a new one.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.confirmation import confirm_change, list_names, yes_option
from eelgrid_controller.cli.connection import (
    CliError,
    CliSettings,
    FiniteRange,
    connect_operators,
    fetch_whole,
    output_option,
    remedy_if_not_found,
)
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_rows,
    arrange_tables,
    list_options,
    print_document,
    table_lines,
)
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.messages import (
    ApplyPartitionsRequest,
    ApplyPartitionsResponse,
    GpuLayout,
    ListPartitionsRequest,
    ListPartitionsResponse,
    PartitionedGpu,
    PartitionedService,
    PartitionRecommendation,
    PartitionStatus,
    RecommendPartitionsRequest,
    Resident,
)

# A search of thousands of services takes seconds, and the queueing model some more for new points.
_SEARCH_S = 300.0
_POLL_S = 0.5


def _layout(layout: GpuLayout | None) -> str:
    if layout is None:
        return "-"
    if not layout.mig_enabled:
        return "MIG off"
    return " ".join(f"{one.profile}@{one.start}" for one in layout.instances) or "empty"


def _who(residents: Sequence[Resident]) -> str:
    return ", ".join(
        f"{one.workload_id} in {one.slice.profile}@{one.slice.start}"
        if one.slice.profile
        else f"{one.workload_id} on all of it"
        for one in residents
    )


def _after(gpu: PartitionedGpu) -> str:
    return f"stays: {gpu.held}" if gpu.held else "as it is" if gpu.before == gpu.after else _layout(gpu.after)


_GPUS: tuple[TableColumn[PartitionedGpu], ...] = (
    TableColumn("GPU", lambda gpu: f"{gpu.node_name}:{gpu.gpu_index}"),
    TableColumn("MODEL", lambda gpu: gpu.model, wide=True),
    TableColumn("NOW", lambda gpu: _layout(gpu.before)),
    TableColumn("WANTED", _after),
    TableColumn("WHO", lambda gpu: _who(gpu.residents)),
)


_SERVICES: tuple[TableColumn[PartitionedService], ...] = (
    TableColumn("SERVICE", lambda one: one.workload_id),
    TableColumn("NAME", lambda one: one.name, wide=True),
    TableColumn("RATE", lambda one: f"{one.rate_hz:.4g}/s", right=True),
    TableColumn("CARRIES NOW", lambda one: f"{one.before_hz:.4g}/s" if one.replicas_before else "nothing", right=True),
    TableColumn("CARRIES THEN", lambda one: f"{one.after_hz:.4g}/s" if one.replicas else "nothing", right=True),
    TableColumn("REPLICAS", lambda one: f"{one.replicas_before} -> {one.replicas}", right=True),
    TableColumn("ON THE WAY", lambda one: f"{100.0 * one.lowest_share:.0f} %" if one.replicas else "-", right=True),
    TableColumn("PROBLEM", lambda one: one.problem),
)
_STATUS: tuple[TableColumn[PartitionStatus], ...] = (
    TableColumn("GPU", lambda gpu: f"{gpu.node_name}:{gpu.gpu_index}"),
    TableColumn("MODEL", lambda gpu: gpu.model, wide=True),
    TableColumn("WANTED", lambda gpu: _layout(gpu.wanted)),
    TableColumn("STANDS", lambda gpu: "-" if gpu.wanted is None else "yes" if gpu.stands else "not yet"),
    TableColumn("WHO", lambda gpu: _who(gpu.residents)),
    TableColumn("PROBLEM", lambda gpu: gpu.problem),
)


def _plan(found: PartitionRecommendation, settings: CliSettings) -> Iterator[str]:
    if found.gpus:
        yield from table_lines(settings, _GPUS, found.gpus)
        yield ""
    if found.services:
        yield from table_lines(settings, _SERVICES, found.services)
        yield ""
    if not found.gpus_ready:
        yield "The partition planner manages no GPU. To give it a pool: eelctl policy set --partition POOL=on"
    elif not found.stages:
        yield f"Nothing to change: no change of the {count_noun(found.gpus_ready, 'GPU')} is worth its cost."
    else:
        yield (
            f"{found.gpus_before:g} {'GPU' if found.gpus_before == 1 else 'GPUs'} in use become {found.gpus_after:g}, in "
            f"{count_noun(found.stages, 'stage')}; over {found.horizon_s:g} s this gains {found.gain:+,.0f} GPU-seconds "
            f"and costs {found.cost:,.0f} once."
        )
        yield f"Nothing was changed. To apply the plan: eelctl partition apply {found.recommendation_id}"


def _standing(found: ListPartitionsResponse, settings: CliSettings) -> Iterator[str]:
    if not found.gpus:
        yield "The partition planner manages no GPU. To give it a pool: eelctl policy set --partition POOL=on"
        return
    shown = arrange_rows(settings, _STATUS, found.gpus)
    yield from table_lines(settings, _STATUS, shown) if shown else ["no GPU matches"]
    if found.stages_left or found.waits_for:
        yield ""
        yield f"{count_noun(found.stages_left, 'stage')} to come; {found.waits_for or 'the next one is due'}"


@click.group()
def partition() -> None:
    """Show, plan or change the MIG layouts of partitioned pools and the services in them."""


@partition.command("show")
@list_options(*_STATUS)
@output_option
@click.pass_obj
def show(settings: CliSettings) -> None:
    """Show partitioned GPUs: the planned layout, whether it is in place, who uses it, and what agents refuse."""
    with connect_operators(settings) as client:
        found = fetch_whole(client.list_partitions, ListPartitionsRequest(), timeout_s=settings.timeout_s)
        shown = tuple(arrange_rows(settings, _STATUS, found.gpus))
        print_document(settings, replace(found, gpus=shown), _standing(found, settings))


_HORIZON = click.option(
    "--horizon",
    "horizon_s",
    type=FiniteRange(1.0),
    help="Seconds within which a change must pay off; an hour by default.",
)


def _search(client: Any, settings: CliSettings, horizon_s: float | None) -> PartitionRecommendation:
    asked = RecommendPartitionsRequest(horizon_s=horizon_s)
    found: PartitionRecommendation = client.recommend_partitions(
        asked, timeout=max(settings.timeout_s, _SEARCH_S)
    ).recommendation
    return found


@partition.command("plan")
@_HORIZON
@list_options(*_GPUS, *_SERVICES)
@output_option
@click.pass_obj
def plan(settings: CliSettings, horizon_s: float | None) -> None:
    """Recommend layouts and placements for all services with slices; `apply` carries them out."""
    with connect_operators(settings) as client:
        found = _search(client, settings, horizon_s)
        gpus, services = arrange_tables(settings, (_GPUS, found.gpus), (_SERVICES, found.services))
        shown = replace(found, gpus=gpus, services=services)
        print_document(settings, shown, _plan(shown, settings))


@partition.command("apply")
@click.argument("recommendation", default="")
@yes_option
@click.option("--wait", "wait_s", type=FiniteRange(0.0), help="Wait up to this many seconds for the last stage.")
@_HORIZON
@output_option
@click.pass_obj
def apply(
    settings: CliSettings, /, recommendation: str, yes: bool, wait_s: float | None, horizon_s: float | None
) -> None:
    """Carry out RECOMMENDATION, or without it a plan computed now, after a question.

    Its first stage is carried out at once, or nothing is; later stages follow when the GPUs are ready.
    """
    with connect_operators(settings) as client:
        what = f"Applying {recommendation}"
        if not recommendation:
            found = _search(client, settings, horizon_s)
            if not found.stages:
                print_document(settings, found, _plan(found, settings))
                return
            recommendation = found.recommendation_id
            changed = [f"{gpu.node_name}:{gpu.gpu_index}" for gpu in found.gpus if gpu.before != gpu.after]
            what = f"Applying a plan that changes {count_noun(len(changed), 'GPU')} ({list_names(changed)})"
        effects = ("services move to other slices, and GPUs change their layouts",)
        confirm_change(what, yes=yes, effects=effects, remedy="see a plan with `eelctl partition plan`")
        with remedy_if_not_found("compute a new plan with `eelctl partition plan`, and apply its recommendation"):
            answer: ApplyPartitionsResponse = client.apply_partitions(
                ApplyPartitionsRequest(recommendation_id=recommendation), timeout=settings.timeout_s
            )
        left = answer.stages_left
        later = f"; {left} {'follows' if left == 1 else 'follow'} when the GPUs are ready" if left else ""
        words = [f"the first stage is under way{later}"]
        if wait_s is None:
            print_document(settings, answer, [*words, "To follow it: eelctl partition show"])
            return
        standing = _wait_for_layouts(client, settings, wait_s)
        print_document(settings, standing, _standing(standing, settings))
        if standing.stages_left or not all(gpu.stands for gpu in standing.gpus if gpu.wanted is not None):
            raise CliError(
                f"not all layouts are in place after {wait_s:g} s: {standing.waits_for or 'see the table'}",
                "follow the rest with eelctl partition show",
            )


def _wait_for_layouts(client: Any, settings: CliSettings, wait_s: float) -> ListPartitionsResponse:
    until_s = time.monotonic() + wait_s
    while True:
        found: ListPartitionsResponse = fetch_whole(
            client.list_partitions, ListPartitionsRequest(), timeout_s=settings.timeout_s
        )
        if not (found.stages_left or found.waits_for) or time.monotonic() >= until_s:
            return found
        time.sleep(_POLL_S)
