"""eelctl explain and decision: why a workload was placed where it is, and export and replay of that decision.

The controller names the terms of a cost. `decision replay` needs no controller: it runs the planner of this
installation.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from eelgrid_controller.cli.completion import complete_workloads
from eelgrid_controller.cli.connection import CliSettings, RequestRefused, connect_operators, output_option, read_input
from eelgrid_controller.cli.deadline import describe_deadline
from eelgrid_controller.cli.gang import describe_gang
from eelgrid_controller.cli.output import TableColumn, print_document, print_plain, text_table
from eelgrid_controller.cli.workload_names import call_with_workload
from eelgrid_controller.cli.workloads import request_text
from eelgrid_controller.formatting import count_noun, describe_checkpoint_advice
from eelgrid_protos import __version__
from eelgrid_protos.messages import (
    Candidate,
    ExplainWorkloadRequest,
    Explanation,
    ExportDecisionRequest,
    Placement,
    ReplicaExplanation,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.safe_text import escape_json

_FILE_BYTES_MOST = 1024 * 1024 * 1024
_TIMEOUT_LEAST_S = 300.0
_SHOWN = 40


@click.group()
def decision() -> None:
    """Export a placement decision with all its inputs, or replay one."""


@decision.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="File to write; - is stdout.  [default: WORKLOAD.decision.json]",
)
@click.pass_obj
def export(settings: CliSettings, workload: str, file: Path | None) -> None:
    """Write the latest decision on WORKLOAD, with all its inputs, to a file."""
    with connect_operators(settings) as client:

        def read(workload_id: str) -> str:
            request = ExportDecisionRequest(workload_id=workload_id)
            parts = client.export_decision(request, timeout=max(settings.timeout_s, _TIMEOUT_LEAST_S))
            return "".join(part.text for part in parts)

        text = call_with_workload(client, settings, workload, read)
    target = file or Path(f"{workload.replace('/', '_')}.decision.json")
    if str(target) == "-":
        click.echo(escape_json(text))
        return
    try:
        target.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestRefused(f"{target}: {error.strerror}", "name a writable file with --file") from None
    click.echo(f"{target}: {len(text):,} bytes; replay it with `eelctl decision replay {target}`")


def _read(file: Any) -> Any:
    try:
        return json.loads(read_input(file, _FILE_BYTES_MOST))
    except ValueError:
        raise RequestRefused(f"{file.name}: is not JSON", "give a file that `eelctl decision export` wrote") from None


def _outcome_document(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an outcome with its explanation decoded field by field."""
    from eelgrid_controller.state.journal import decode_explanation

    return {**outcome, "explanation": [to_plain(found) for found in decode_explanation(outcome["explanation"])]}


@decision.command()
@click.argument("file", type=click.File("r", encoding="utf-8"))
@output_option
@click.pass_context
def replay(context: click.Context, file: Any) -> None:
    """Repeat the decision in FILE with this installation's planner; exit code 1 if the result differs."""
    from eelgrid_controller.whatif.decision_record import DecisionUnreadable, replay_decision

    try:
        found = replay_decision(_read(file))
    except DecisionUnreadable as error:
        raise RequestRefused(f"{file.name}: {error}", "give a file that `eelctl decision export` wrote") from None
    lines = [f"{found.workload_id}, decided at revision {found.revision} by version {found.made_by}"]
    if found.made_by != __version__:
        lines.append(f"this is version {__version__}: a difference may come from the planner")
    if found.differences:
        lines.append(f"{count_noun(len(found.differences), 'difference')}:")
        lines.extend(f"  {line}" for line in found.differences[:_SHOWN])
    else:
        lines.append("identical to the last bit")
    plain = {
        "workload_id": found.workload_id,
        "revision": found.revision,
        "equal": not found.differences,
        "differences": list(found.differences),
        "recorded": _outcome_document(found.recorded),
        "now": _outcome_document(found.now),
    }
    print_plain(context.obj, plain, lines)
    if found.differences:
        context.exit(1)


# Half of the last digit that is printed.
_SEEN_W = 0.005


def _candidate_columns(replica: ReplicaExplanation, chosen: Placement | None) -> list[TableColumn[Candidate]]:
    """Builds a column for each term that any candidate has, in order of first appearance."""
    terms = list(dict.fromkeys(term.name for candidate in replica.candidates for term in candidate.terms))
    best = replica.candidates[0].cost_w

    def mark(candidate: Candidate) -> str:
        here = chosen and (candidate.node_name, candidate.gpu_indexes) == (chosen.node_name, chosen.gpu_indexes)
        return "*" if here else " "

    def term(name: str) -> TableColumn[Candidate]:
        return TableColumn(
            name.upper(), lambda c: next((f"{t.cost_w:+.2f} W" for t in c.terms if t.name == name), "-"), right=True
        )

    def because(candidate: Candidate) -> str:
        """Returns the terms in which this candidate differs from the best, the largest first."""
        least = {entry.name: entry.cost_w for entry in replica.candidates[0].terms}
        gaps = [(entry.cost_w - least.get(entry.name, 0.0), entry.name) for entry in candidate.terms]
        told = [f"{name} {gap_w:+.2f} W" for gap_w, name in sorted(gaps, reverse=True) if abs(gap_w) >= _SEEN_W]
        if candidate is replica.candidates[0]:
            return ""
        return ", ".join(told) or "equal: ordered by name"

    return [
        TableColumn(" ", mark),
        TableColumn("NODE", lambda c: c.node_name),
        TableColumn("GPU", lambda c: ",".join(map(str, c.gpu_indexes)), right=True),
        TableColumn("COST", lambda c: f"{c.cost_w:.2f} W", right=True),
        *map(term, terms),
        TableColumn("WORSE BY", lambda c: f"{c.cost_w - best:.2f} W", right=True),
        TableColumn("BECAUSE OF", because),
    ]


def _nodes(count: int) -> str:
    return count_noun(count, "node")


def _replica(replica: ReplicaExplanation, chosen: Placement | None, *, is_lost: bool) -> Iterator[str]:
    yield ""
    place = "is not placed"
    if chosen:
        gpus = f", GPU {','.join(map(str, chosen.gpu_indexes))}" if chosen.gpu_indexes else ""
        place = f"is on {chosen.node_name}{gpus}" + (", on a lost GPU" if is_lost else "")
    yield f"Replica {replica.replica} {place}. Feasible: {_nodes(replica.feasible_nodes)}."
    for removal in replica.removals:
        yield f"  {_nodes(removal.nodes):>12} ruled out by {removal.constraint.replace('_', ' ')}"
    if replica.candidates:
        yield "  Cost in watts-equivalent, lowest first (* chosen):"
        for line in text_table(_candidate_columns(replica, chosen), replica.candidates):
            yield f"  {line}"


def explanation_lines(explanation: Explanation, replicas: int, page: str = "") -> Iterator[str]:
    """Formats an explanation, with the first `replicas` replicas in full; `page` is the URL of the live page."""
    workload = explanation.workload
    spec, phase = workload.spec, workload.phase
    yield f"{workload.workload_id} ({spec.kind.name.lower()} {spec.name}) is {phase.name.lower()}" + (
        f": {workload.reason}" if workload.reason else "."
    )
    if workload.owner or spec.user:
        yield f"It belongs to {workload.owner or spec.user}, in the namespace {spec.namespace}."
    yield f"It asks for {spec.replicas} x {request_text(spec.request)}."
    if spec.gang is not None:
        yield f"It is a part of gang {describe_gang(workload)}."
    if spec.deadline is not None:
        yield f"Its deadline is {describe_deadline(workload)}."
    if workload.lost_replicas:
        numbers = ", ".join(map(str, workload.lost_replicas[:_SHOWN]))
        noun = "replica" if len(workload.lost_replicas) == 1 else "replicas"
        yield (
            f"On a lost GPU: {noun} {numbers}. Its work leaves it after --lost-gpu-grace of the controller, unless it is "
            "fixed and runs no process, or an engine runs it. Reset the GPU or restart its node."
        )
    if workload.checkpoint_advice is not None:
        advice = describe_checkpoint_advice(workload.checkpoint_advice)
        yield f"{advice[:1].upper()}{advice[1:]}."
    chosen = {placement.replica: placement for placement in workload.placements}
    for replica in explanation.replicas[:replicas]:
        yield from _replica(replica, chosen.get(replica.replica), is_lost=replica.replica in workload.lost_replicas)
    if len(explanation.replicas) > replicas:
        yield f"... and {count_noun(len(explanation.replicas) - replicas, 'more replica')}; show them with --replicas."
    if explanation.remedy:
        yield ""
        yield f"What would help: {explanation.remedy}"
    elif phase is WorkloadPhase.PLACED and not explanation.replicas:
        yield "The candidates of this decision are no longer stored."
    if page:
        yield ""
        yield f"On the live page: {page.rstrip('/')}/#/workload/{quote(workload.workload_id, safe='')}"


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.option(
    "--replicas", type=click.IntRange(1), default=4, show_default=True, help="Number of replicas to show in full."
)
@output_option
@click.pass_obj
def explain(settings: CliSettings, workload: str, replicas: int) -> None:
    """Explain why a workload was placed where it is, or why it waits and what would help.

    Costs are in watts-equivalent: the added power, and the capacity that the choice takes from later arrivals.
    """
    with connect_operators(settings) as client:

        def ask(workload_id: str) -> Explanation:
            request = ExplainWorkloadRequest(workload_id=workload_id)
            found: Explanation = client.explain_workload(request, timeout=settings.timeout_s).explanation
            return found

        answer = call_with_workload(client, settings, workload, ask)
        print_document(settings, answer, explanation_lines(answer, replicas, settings.page))
