"""eelctl workloads, get and cancel: what was submitted and what became of it.

Owns these commands' options and columns. A watch is filtered here, with the
filters that the listing has, because the contract's watch sends every change.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.listings import limit_option
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, document, listing, stream
from eelgrid_controller.spelling import cpu_text, gpu_text, memory_text, milliseconds_text
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    ResourceRequest,
    TrainingPromise,
    WatchWorkloadsRequest,
    Workload,
    WorkloadPhase,
)

__all__ = ["WORKLOAD_COLUMNS", "cancel", "describe", "get", "phase_colour", "request_text", "workloads"]

_GPUS_SHOWN = 8


def phase_colour(workload: Workload) -> str | None:
    """Green for placed, yellow for waiting."""
    return {WorkloadPhase.PLACED: "green", WorkloadPhase.PENDING: "yellow"}.get(workload.phase)


def request_text(request: ResourceRequest) -> str:
    """What one replica asks for, in one line."""
    parts = []
    if request.cpu_milli:
        parts.append(f"{cpu_text(request.cpu_milli)} CPU")
    if request.memory_bytes:
        parts.append(memory_text(request.memory_bytes))
    if request.gpu_count:
        models = f" ({'|'.join(request.gpu_models)})" if request.gpu_models else ""
        parts.append(f"{gpu_text(request.gpu_count * request.gpu_milli)} GPU{models}")
    return ", ".join(parts)


def _places(workload: Workload) -> str:
    """Where it runs: the node, or the first node and how many more."""
    names = list(dict.fromkeys(placement.node_name for placement in workload.placements))
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _gpus(workload: Workload) -> str:
    indexes = [f"{p.node_name}:{','.join(map(str, p.gpu_indexes))}" for p in workload.placements if p.gpu_indexes]
    return " ".join(indexes[:_GPUS_SHOWN]) + (" ..." if len(indexes) > _GPUS_SHOWN else "")


def _waited(workload: Workload) -> str:
    placed = workload.phase is WorkloadPhase.PLACED and workload.placed_ns >= workload.submitted_ns
    return milliseconds_text((workload.placed_ns - workload.submitted_ns) / 1e9) if placed else "-"


WORKLOAD_COLUMNS: tuple[Column[Workload], ...] = (
    Column("ID", lambda w: w.workload_id, width=16),
    Column("NAME", lambda w: w.spec.name, wide=True, width=16),
    Column("PHASE", lambda w: w.phase.name.lower(), width=9, colour=phase_colour),
    Column("KIND", lambda w: w.spec.kind.name.lower(), width=17),
    Column("REPLICAS", lambda w: str(w.spec.replicas), right=True),
    Column("EACH", lambda w: request_text(w.spec.request), width=28),
    Column("NODE", _places, width=16),
    Column("NAMESPACE", lambda w: w.spec.namespace, wide=True),
    Column("USER", lambda w: w.spec.user, wide=True),
    Column("OWNER", lambda w: w.owner or w.spec.user, wide=True),
    Column("QUEUE", lambda w: w.spec.queue, wide=True),
    Column("PRIORITY", lambda w: str(w.spec.priority), right=True, wide=True),
    Column("GPUS", _gpus, wide=True),
    Column("WAITED", _waited, right=True, wide=True),
    Column("REASON", lambda w: w.reason),
)


def _promise(training: TrainingPromise) -> str:
    if training.slowdown_most is not None:
        return f"at most {100 * training.slowdown_most:g} % more time"
    if training.deadline_ns:
        return f"{training.work:g} units of work by {datetime.fromtimestamp(training.deadline_ns / 1e9, UTC):%F %T} UTC"
    return f"best effort, energy weighs {training.energy_weight:g}"


def describe(workload: Workload) -> Iterator[str]:
    """A workload in lines for a person."""
    spec = workload.spec
    yield f"{workload.workload_id}: {workload.phase.name.lower()}" + (
        f" ({workload.reason})" if workload.reason else ""
    )
    yield f"  name       {spec.name} ({spec.kind.name.lower()}), priority {spec.priority}"
    owner = [("namespace", spec.namespace), ("user", spec.user), ("queue", spec.queue)]
    yield "  charged    " + ", ".join(f"{what} {value}" for what, value in owner if value)
    yield f"  owner      {workload.owner or spec.user or 'nobody: administrators alone may change it'}"
    yield f"  asks for   {spec.replicas} x {request_text(spec.request)}"
    if spec.service:
        yield "  promised   " + "; ".join(
            f"{one.metric.name.lower()} p{100 * one.quantile:g} within {one.latency_s:g} s"
            for one in spec.service.objectives
        )
    if spec.training:
        yield f"  promised   {_promise(spec.training)}"
    if workload.power_limit_w is not None:
        yield f"  limit      {workload.power_limit_w:g} W each GPU"
    if spec.locality:
        yield f"  locality   {spec.locality.name.lower()}"
    if spec.labels:
        yield "  labels     " + ", ".join(f"{key}={value}" for key, value in sorted(spec.labels.items()))
    for placement in workload.placements:
        gpus = f", GPU {','.join(map(str, placement.gpu_indexes))}" if placement.gpu_indexes else ""
        yield f"  replica {placement.replica:<3}{placement.node_name}{gpus}"


def _wanted(request: ListWorkloadsRequest) -> Callable[[Workload], bool]:
    """The filters of a listing as a predicate."""

    def wanted(workload: Workload) -> bool:
        spec = workload.spec
        return (
            (not request.phases or workload.phase in request.phases)
            and all(
                not want or want == have
                for want, have in (
                    (request.namespace, spec.namespace),
                    (request.user, spec.user),
                    (request.queue, spec.queue),
                )
            )
            and request.name_contains in spec.name
            and (not request.node_name or any(p.node_name == request.node_name for p in workload.placements))
        )

    return wanted


@click.command()
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=click.Choice(["pending", "placed", "cancelled"]),
    help="Only these; repeatable.",
)
@click.option("--namespace", default="", help="Only this namespace.")
@click.option("--user", default="", help="Only this user's.")
@click.option("--queue", default="", help="Only this queue.")
@click.option("--node", "node_name", default="", help="Only what is placed on this node.")
@click.option("--name", "name_contains", default="", help="Only names that contain this.")
@click.option("-w", "--watch", is_flag=True, help="Print each change as it comes, until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), default=0, help="With --watch: only changes after this revision.")
@limit_option
@printing
@click.pass_obj
def workloads(
    settings: Settings, /, phases: tuple[str, ...], watch: bool, after: int, limit: int | None, **filters: Any
) -> None:
    """List workloads in the order of their submission, or watch them change."""
    request = ListWorkloadsRequest(phases=tuple(WorkloadPhase[phase.upper()] for phase in phases), **filters)
    with operators(settings) as client:
        if not watch:
            found = pages(client.list_workloads, request, "workloads", timeout_s=settings.timeout_s, limit=limit)
            listing(settings, WORKLOAD_COLUMNS, found, empty="no workload matches; submit one with `eelctl submit`")
            return
        changes = client.watch_workloads(WatchWorkloadsRequest(after_revision=after))
        try:
            stream(settings, WORKLOAD_COLUMNS, _first(limit, filter(_wanted(request), (c.workload for c in changes))))
        except KeyboardInterrupt:
            return


def _first(limit: int | None, rows: Iterator[Workload]) -> Iterator[Workload]:
    """The first rows, without waiting for one more."""
    for count, row in enumerate(rows, start=1):
        yield row
        if count == limit:
            return


@click.command()
@click.argument("workload")
@printing
@click.pass_obj
def get(settings: Settings, workload: str) -> None:
    """Show one workload."""
    with operators(settings) as client:
        found = client.get_workload(GetWorkloadRequest(workload_id=workload), timeout=settings.timeout_s).workload
        document(settings, found, describe(found))


@click.command()
@click.argument("workload", nargs=-1, required=True)
@printing
@click.pass_obj
def cancel(settings: Settings, workload: tuple[str, ...]) -> None:
    """End workloads; what they held is free at once."""
    with operators(settings) as client:
        for name in workload:
            ended = client.cancel_workload(CancelWorkloadRequest(workload_id=name), timeout=settings.timeout_s).workload
            document(settings, ended, [f"{ended.workload_id}: {ended.phase.name.lower()}"])
