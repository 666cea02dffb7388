"""eelctl explain: why a workload stands where it stands, in words and watts.

Owns the sentences and the table of candidates; must not know how costs come
about: the terms and their names are the controller's.
"""

from collections.abc import Iterator
from urllib.parse import quote

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, document, text_table
from eelgrid_controller.cli.workloads import request_text
from eelgrid_protos.messages import (
    Candidate,
    ExplainWorkloadRequest,
    Explanation,
    Placement,
    ReplicaExplanation,
    WorkloadPhase,
)

__all__ = ["explain", "explained"]

# Half of the last digit that is printed.
_SEEN_W = 0.005


def _candidate_columns(replica: ReplicaExplanation, chosen: Placement | None) -> list[Column[Candidate]]:
    """Columns for the terms that any candidate has, in the order of the first that has them."""
    terms = list(dict.fromkeys(term.name for candidate in replica.candidates for term in candidate.terms))
    best = replica.candidates[0].cost_w

    def mark(candidate: Candidate) -> str:
        here = chosen and (candidate.node_name, candidate.gpu_indexes) == (chosen.node_name, chosen.gpu_indexes)
        return "*" if here else " "

    def term(name: str) -> Column[Candidate]:
        return Column(
            name.upper(), lambda c: next((f"{t.cost_w:+.2f} W" for t in c.terms if t.name == name), "-"), right=True
        )

    def because(candidate: Candidate) -> str:
        """The terms that tell this candidate from the best, the greatest first."""
        least = {entry.name: entry.cost_w for entry in replica.candidates[0].terms}
        gaps = [(entry.cost_w - least.get(entry.name, 0.0), entry.name) for entry in candidate.terms]
        told = [f"{name} {gap_w:+.2f} W" for gap_w, name in sorted(gaps, reverse=True) if abs(gap_w) >= _SEEN_W]
        if candidate is replica.candidates[0]:
            return ""
        return ", ".join(told) or "equal: the name decides"

    return [
        Column(" ", mark),
        Column("NODE", lambda c: c.node_name),
        Column("GPU", lambda c: ",".join(map(str, c.gpu_indexes)), right=True),
        Column("COST", lambda c: f"{c.cost_w:.2f} W", right=True),
        *map(term, terms),
        Column("WORSE BY", lambda c: f"{c.cost_w - best:.2f} W", right=True),
        Column("BECAUSE OF", because),
    ]


def _nodes(count: int) -> str:
    return f"{count:,} node{'' if count == 1 else 's'}"


def _replica(replica: ReplicaExplanation, chosen: Placement | None) -> Iterator[str]:
    yield ""
    place = "has no place"
    if chosen:
        gpus = f", GPU {','.join(map(str, chosen.gpu_indexes))}" if chosen.gpu_indexes else ""
        place = f"is on {chosen.node_name}{gpus}"
    yield f"Replica {replica.replica} {place}. It fitted on {_nodes(replica.feasible_nodes)}."
    for removal in replica.removals:
        yield f"  {_nodes(removal.nodes):>12} ruled out by {removal.constraint.replace('_', ' ')}"
    if replica.candidates:
        yield "  Cost in watts-equivalent, least first (* chosen):"
        for line in text_table(_candidate_columns(replica, chosen), replica.candidates):
            yield f"  {line}"


def explained(explanation: Explanation, replicas: int, page: str = "") -> Iterator[str]:
    """The explanation in lines, with the first `replicas` replicas in full; `page` is where the live page is seen."""
    workload = explanation.workload
    spec, phase = workload.spec, workload.phase
    yield f"{workload.workload_id} ({spec.kind.name.lower()} {spec.name}) is {phase.name.lower()}" + (
        f": {workload.reason}" if workload.reason else "."
    )
    if workload.owner or spec.user:
        yield f"It belongs to {workload.owner or spec.user}, in the namespace {spec.namespace}."
    yield f"It asks for {spec.replicas} x {request_text(spec.request)}."
    chosen = {placement.replica: placement for placement in workload.placements}
    for replica in explanation.replicas[:replicas]:
        yield from _replica(replica, chosen.get(replica.replica))
    if len(explanation.replicas) > replicas:
        yield f"... and {len(explanation.replicas) - replicas} replicas more; show them with --replicas."
    if explanation.remedy:
        yield ""
        yield f"What would help: {explanation.remedy}"
    elif phase is WorkloadPhase.PLACED and not explanation.replicas:
        yield "The candidates of this decision are no longer kept."
    if page:
        yield ""
        yield f"On the live page: {page.rstrip('/')}/#/workload/{quote(workload.workload_id, safe='')}"


@click.command()
@click.argument("workload")
@click.option("--replicas", type=click.IntRange(1), default=4, show_default=True, help="Replicas to show in full.")
@printing
@click.pass_obj
def explain(settings: Settings, workload: str, replicas: int) -> None:
    """Say where a workload went and why, or what it waits for.

    Costs are watts-equivalent: added power, and what the choice takes from later arrivals.
    """
    with operators(settings) as client:
        request = ExplainWorkloadRequest(workload_id=workload)
        answer = client.explain_workload(request, timeout=settings.timeout_s).explanation
        document(settings, answer, explained(answer, replicas, settings.page))
