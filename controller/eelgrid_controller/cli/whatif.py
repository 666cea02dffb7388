"""eelctl whatif and capacity: what changes would do, tried on a copy of the cluster.

Owns how the answer reads: totals before and after, room for typical work, and
the workloads that would fare differently. Must not know how it is found out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.changes import change_options, changes_of, shape_of
from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, document, text_table
from eelgrid_controller.cli.workloads import request_text
from eelgrid_controller.spelling import percent_text, watts_text
from eelgrid_protos.messages import (
    DIFFERENCES_MOST,
    IMAGINED_NODES_MOST,
    ClassRoom,
    ClusterFigures,
    GetPolicyRequest,
    ImaginedOutcome,
    NodeShape,
    PlanCapacityRequest,
    PlanCapacityResponse,
    ResourceRequest,
    SubmitCopies,
    Weights,
    WhatIfChange,
    WhatIfRequest,
    WhatIfResponse,
    WorkloadDifference,
)

__all__ = ["answered", "capacity", "differences_table", "totals_table", "whatif"]

# A what-if over a large cluster takes longer than a call that reads; --timeout beyond it still counts.
_TIMEOUT_LEAST_S = 300.0
_WORDS = {
    ImaginedOutcome.DISPLACED: "would be displaced and wait",
    ImaginedOutcome.REFUSED: "could never run there",
    ImaginedOutcome.WAITS: "submitted here would wait",
    ImaginedOutcome.MOVED: "would move",
    ImaginedOutcome.PLACED: "would get a place",
    ImaginedOutcome.CANCELLED: "would end",
}


def _timeout_s(settings: Settings) -> float:
    return max(settings.timeout_s, _TIMEOUT_LEAST_S)


def _totals(before: ClusterFigures, after: ClusterFigures) -> Iterator[tuple[str, str, str, str]]:
    def count(what: str, name: str) -> tuple[str, str, str, str]:
        was, now = getattr(before, name), getattr(after, name)
        return what, f"{was:,}", f"{now:,}", f"{now - was:+,}" if now != was else "="

    def milli(what: str, name: str, whole: Callable[[ClusterFigures], int]) -> tuple[str, str, str, str]:
        was, now = getattr(before, name), getattr(after, name)
        cells = [
            f"{part / 1000:,.6g} ({percent_text(part, whole(side))})" for part, side in ((was, before), (now, after))
        ]
        return what, cells[0], cells[1], f"{(now - was) / 1000:+,.6g}" if now != was else "="

    def per_gpu(side: ClusterFigures) -> str:
        milli = side.allocated_gpu_milli
        return watts_text(1000 * side.modelled_power_w / milli) if milli else "-"

    yield count("nodes ready", "nodes_ready")
    yield count("GPUs", "gpus")
    yield milli("GPUs allocated", "allocated_gpu_milli", lambda side: 1000 * side.gpus)
    yield milli("CPUs allocated", "allocated_cpu_milli", lambda side: side.cpu_milli)
    yield milli("GPUs fragmented", "fragmented_gpu_milli", lambda side: 1000 * side.gpus)
    yield count("workloads placed", "placed")
    yield count("workloads waiting", "pending")
    power_w = after.modelled_power_w - before.modelled_power_w
    sign = "+" if power_w > 0 else "-"
    change = f"{sign}{watts_text(abs(power_w))}" if power_w else "="
    yield "power, modelled", watts_text(before.modelled_power_w), watts_text(after.modelled_power_w), change
    yield "  per GPU allocated", per_gpu(before), per_gpu(after), ""


def _class(room: ClassRoom) -> str:
    request = ResourceRequest(
        cpu_milli=room.cpu_milli, gpu_count=room.gpu_count, gpu_milli=room.gpu_milli, gpu_models=room.gpu_models
    )
    return request_text(request)


def totals_table(before: ClusterFigures, after: ClusterFigures, was: str, now: str) -> list[str]:
    """Two clusters' totals under the titles `was` and `now`."""
    columns: list[Column[tuple[str, str, str, str]]] = [
        Column("", lambda row: row[0]),
        Column(was, lambda row: row[1], right=True),
        Column(now, lambda row: row[2], right=True),
        Column("CHANGE", lambda row: row[3] or " ", right=True),
    ]
    return text_table(columns, list(_totals(before, after)))


_ROOMS: list[Column[ClassRoom]] = [
    Column("EACH", _class),
    Column("OF THE MIX", lambda room: percent_text(room.share, 1.0), right=True),
    Column("BEFORE", lambda room: f"{room.before:,}", right=True),
    Column("AFTER", lambda room: f"{room.after:,}", right=True),
    Column("CHANGE", lambda room: f"{room.after - room.before:+,}" if room.after != room.before else "=", right=True),
]


def _why(found: WorkloadDifference) -> str:
    if found.candidate is None:
        return found.reason
    terms = ", ".join(f"{term.name} {term.cost_w:+.2f}" for term in found.candidate.terms)
    cost = f"cost {found.candidate.cost_w:.2f} W ({terms})"
    return f"{found.reason}; {cost}" if found.reason else cost


def differences_table(was: str, now: str) -> list[Column[WorkloadDifference]]:
    """The columns of differing workloads, with the places under the titles `was` and `now`."""
    return [
        Column("ID", lambda found: found.workload_id),
        Column("WHAT", lambda found: found.outcome.name.lower()),
        Column(was, lambda found: ",".join(found.nodes_before)),
        Column(now, lambda found: ",".join(found.nodes_after)),
        Column("WHY", _why),
    ]


def answered(answer: WhatIfResponse) -> Iterator[str]:
    """The answer in lines for a person."""
    yield f"On a copy of revision {answer.revision}; the cluster itself is as it was."
    yield ""
    yield from totals_table(answer.before, answer.after, "BEFORE", "AFTER")
    if answer.rooms:
        yield ""
        yield "Room for more of what is typical, each kind alone:"
        yield from text_table(_ROOMS, answer.rooms)
    yield ""
    if not answer.counts:
        yield "No workload would fare differently."
    for count in answer.counts:
        noun = "workload" if count.workloads == 1 else "workloads"
        yield f"{count.workloads:>6,} {noun} {_WORDS.get(count.outcome, 'would change')}"
    if answer.differences:
        yield ""
        yield from text_table(differences_table("FROM", "TO"), answer.differences)
        total = sum(count.workloads for count in answer.counts)
        if total > len(answer.differences):
            yield f"... and {total - len(answer.differences):,} more; show them with --differences."
    if not answer.complete:
        yield ""
        yield "The trial was cut short at its limit of decisions: more of what waits might still find a place."


def _flags_of(values: dict[str, Any], client: Any, settings: Settings) -> tuple[WhatIfChange, ...]:
    def in_force() -> Weights:
        weights: Weights = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy.weights
        return weights

    return changes_of(values, in_force)


@click.command()
@change_options
@click.option(
    "--differences",
    type=click.IntRange(1, DIFFERENCES_MOST),
    default=40,
    show_default=True,
    help="Workloads to list.",
)
@printing
@click.pass_obj
def whatif(settings: Settings, /, differences: int, **flags: Any) -> None:
    """Try changes on a copy of the cluster, and change nothing.

    \b
    eelctl whatif --drain n1 --drain n2
    eelctl whatif --add 10:H100-SXM5-80GB:8 --gpus 8 --cpu 64 --copies 20
    eelctl whatif --objective energy --anew
    """  # noqa: D301
    with operators(settings) as client:
        changes = _flags_of(flags, client, settings)
        if not changes:
            raise click.UsageError("name at least one change; see eelctl whatif --help")
        request = WhatIfRequest(changes=changes, differences_most=differences)
        answer = client.what_if(request, timeout=_timeout_s(settings))
        document(settings, answer, answered(answer))


def _planned(answer: PlanCapacityResponse, most: int, *, waited: bool) -> Iterator[str]:
    wanted = f"{answer.wanted:,} workload{'' if answer.wanted == 1 else 's'}"
    if answer.nodes is None:
        yield f"Even {most:,} such nodes leave {answer.outcome.after.pending:,} workloads waiting."
    elif answer.nodes == 0:
        yield "No more nodes are needed: " + (f"{wanted} fit." if answer.wanted else "nothing waits.")
    else:
        nodes = f"{answer.nodes:,} node{' is' if answer.nodes == 1 else 's are'}"
        yield f"{nodes} needed for {wanted}; with one less, {answer.waiting_with_one_less:,} would wait."
    before = answer.outcome.before.pending
    first = f"; {before:,} that wait already were tried first, by priority and age" if waited and before else ""
    yield f"({answer.trials} fleets tried{first})"
    yield ""
    yield from answered(answer.outcome)


@click.command()
@click.option("--node", metavar="GPU:EACH", help="The kind of node: H100-SXM5-80GB:8.")
@click.option("--node-like", metavar="NODE", help="The kind of node: like this one.")
@click.option(
    "--most", type=click.IntRange(1, IMAGINED_NODES_MOST), default=1000, show_default=True, help="Nodes to try at most."
)
@change_options
@printing
@click.pass_obj
def capacity(settings: Settings, /, node: str | None, node_like: str | None, most: int, **flags: Any) -> None:
    """Say how many more nodes are needed for what waits, or for the workloads given.

    \b
    eelctl capacity --node H100-SXM5-80GB:8
    eelctl capacity --node-like n1 --gpus 2 --cpu 16 --copies 50
    """  # noqa: D301
    if (node is None) == (node_like is None):
        raise click.UsageError("name the kind of node: either --node GPU:EACH or --node-like NODE")
    shape = (
        NodeShape(like_node=node_like)
        if node_like
        else shape_of(str(node), flags["node_cpu"], flags["node_memory"], "--node")
    )
    with operators(settings) as client:
        changes = _flags_of(flags, client, settings)
        request = PlanCapacityRequest(changes=changes, shape=shape, nodes_most=most)
        answer: PlanCapacityResponse = client.plan_capacity(request, timeout=_timeout_s(settings))
        shown = replace(answer, outcome=replace(answer.outcome, differences=answer.outcome.differences[:10]))
        submits = any(isinstance(change.change, SubmitCopies) for change in changes)
        document(settings, answer, _planned(shown, most, waited=submits))
