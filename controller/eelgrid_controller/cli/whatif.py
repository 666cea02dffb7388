"""eelctl whatif, capacity and shadow: hypothetical changes and policies, tried on a copy of the cluster.

whatif and capacity share the options that name changes, and their order: nodes are drained or removed, nodes are added,
weights change, workloads end, workloads are placed again, workloads are submitted. A file gives any other order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_model_lists, complete_nodes, complete_workloads
from eelgrid_controller.cli.connection import (
    CPU,
    MEMORY,
    SHARE,
    CliSettings,
    RequestRefused,
    add_options,
    connect_operators,
    fetch_policy,
    output_option,
    read_input,
)
from eelgrid_controller.cli.output import TableColumn, print_document, text_table
from eelgrid_controller.cli.policy import apply_budget_options, resolve_weights
from eelgrid_controller.cli.workload_names import find_workload
from eelgrid_controller.cli.workloads import (
    read_spec_amounts,
    read_workloads,
    request_text,
    submission_from_flags,
    submit,
)
from eelgrid_controller.formatting import count_noun, format_percent, format_powers
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import (
    COPIES_MOST,
    DIFFERENCES_MOST,
    IMAGINED_NODES_MOST,
    OBJECTIVES,
    AddNodes,
    CancelWorkloads,
    ClassRoom,
    ClusterFigures,
    DrainNodes,
    GetShadowRequest,
    ImaginedOutcome,
    NodeShape,
    PlaceAnew,
    PlanCapacityRequest,
    PlanCapacityResponse,
    Policy,
    ResourceRequest,
    SetPowerBudgets,
    SetWeights,
    ShadowReport,
    StartShadowRequest,
    StopShadowRequest,
    SubmitCopies,
    WhatIfChange,
    WhatIfRequest,
    WhatIfResponse,
    WorkloadDifference,
)
from eelgrid_protos.plain_messages import from_plain

_FILE_BYTES_MOST = 64 * 1024 * 1024


# Those that name changes.
change_options = add_options(
    click.option(
        "--drain",
        multiple=True,
        metavar="NODE",
        help="Drain a node; it stays on, idle. Repeatable.",
        shell_complete=complete_nodes,
    ),
    click.option(
        "--remove",
        multiple=True,
        metavar="NODE",
        help="Remove a node, and its power draw. Repeatable.",
        shell_complete=complete_nodes,
    ),
    click.option(
        "--add", multiple=True, metavar="COUNT:GPU:EACH", help="Add nodes, for example 10:H100-SXM5-80GB:8. Repeatable."
    ),
    click.option(
        "--add-like",
        multiple=True,
        metavar="COUNT:NODE",
        help="Add nodes like an existing one, for example 10:n1. Repeatable.",
    ),
    click.option("--node-cpu", type=CPU, default=0, help="CPUs of each added node.  [default: 24 per GPU]"),
    click.option(
        "--node-memory", type=MEMORY, default=0, help="Memory of each added node.  [default: 3 times its GPU memory]"
    ),
    click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="Use a named objective."),
    click.option("--weight", multiple=True, metavar="NAME=VALUE", help="Change one weight; repeatable."),
    click.option(
        "--cancel",
        multiple=True,
        metavar="WORKLOAD",
        help="Cancel a workload; repeatable.",
        shell_complete=complete_workloads,
    ),
    click.option("--anew", is_flag=True, help="Place all workloads again from an empty cluster, oldest first."),
    click.option(
        "-f", "--file", type=click.File("r", encoding="utf-8"), help="Submit the workloads of a YAML file; - is stdin."
    ),
    click.option("--cpu", type=CPU, default=0, help="Submit a workload: CPUs per replica."),
    click.option("--memory", type=MEMORY, default=0, help="Memory per replica."),
    click.option("--gpus", type=click.IntRange(0, 64), help="GPUs per replica."),
    click.option("--gpu-share", type=SHARE, help="Share of one GPU per replica: 0.5 or 50%."),
    click.option(
        "--gpu-model",
        default="",
        help="Acceptable GPU models, by any of their names: A,B; any by default.",
        shell_complete=complete_model_lists,
    ),
    click.option(
        "--replicas", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Number of replicas."
    ),
    click.option("--priority", type=int, default=0, show_default=True, help="Higher priority is placed first."),
    click.option(
        "--copies",
        type=click.IntRange(1, COPIES_MOST),
        default=1,
        show_default=True,
        help="Submit each workload this many times.",
    ),
    click.option(
        "--changes",
        type=click.File("r", encoding="utf-8"),
        help="YAML or JSON file with a list of changes, made before those of the flags.",
    ),
    click.option(
        "--budget",
        multiple=True,
        metavar="SCOPE=WATTS",
        help="Change one power budget: cluster=100kW, rack:r1=20kW, node:n7=none; repeatable.",
    ),
)


def parse_node_shape(text: str, node_cpu: int, node_memory: int, option: str) -> NodeShape:
    """Parses `H100-SXM5-80GB:8` into a node shape; raises BadParameter."""
    gpu, colon, each = text.rpartition(":")
    if not (colon and gpu and each.isascii() and each.isdigit() and 1 <= int(each) <= 64):
        raise click.BadParameter(
            f"{text!r}; write MODEL:COUNT, for example H100-SXM5-80GB:8, with 1 to 64 GPUs", param_hint=option
        )
    return NodeShape(gpu=gpu, gpu_count=int(each), cpu_milli=node_cpu, memory_bytes=node_memory)


def _count(text: str, option: str) -> tuple[int, str]:
    count, colon, rest = text.partition(":")
    if not (colon and rest and count.isascii() and count.isdigit() and 1 <= int(count) <= IMAGINED_NODES_MOST):
        raise click.BadParameter(
            f"{text!r}; begin with the number of nodes, 1 to {IMAGINED_NODES_MOST}, and a colon", param_hint=option
        )
    return int(count), rest


def _nodes(flags: dict[str, Any]) -> Iterator[DrainNodes | AddNodes]:
    if flags["drain"]:
        yield DrainNodes(node_names=flags["drain"])
    if flags["remove"]:
        yield DrainNodes(node_names=flags["remove"], remove=True)
    for text in flags["add"]:
        count, rest = _count(text, "--add")
        yield AddNodes(count=count, shape=parse_node_shape(rest, flags["node_cpu"], flags["node_memory"], "--add"))
    for text in flags["add_like"]:
        count, name = _count(text, "--add-like")
        yield AddNodes(count=count, shape=NodeShape(like_node=name))


def _policy(flags: dict[str, Any], in_force: Callable[[], Policy]) -> Iterator[SetWeights | SetPowerBudgets]:
    if flags["weight"] or flags["objective"]:
        yield resolve_weights(flags["objective"], flags["weight"], lambda: in_force().weights)
    if flags["budget"]:
        yield SetPowerBudgets(budgets=apply_budget_options(in_force(), flags["budget"]))


# Flags of a workload that submit none by themselves, with their defaults.
_NOTHING_SUBMITTED: Mapping[str, Any] = {"gpu_model": "", "replicas": 1, "priority": 0}


def _submissions(flags: dict[str, Any]) -> Iterator[SubmitCopies]:
    copies = flags["copies"]
    if flags["file"]:
        for request in read_workloads(read_input(flags["file"], _FILE_BYTES_MOST), flags["file"].name):
            yield SubmitCopies(spec=request.spec, copies=copies)
    if flags["cpu"] or flags["memory"] or flags["gpus"] or flags["gpu_share"]:
        # What is no flag here is as in `eelctl submit`.
        unsaid = submit.make_context("submit", ["--name", "new"]).params
        yield SubmitCopies(spec=submission_from_flags({**unsaid, **flags}).spec, copies=copies)
    elif given := [
        name
        for name in ("gpu_model", "replicas", "priority")
        if flags.get(name, _NOTHING_SUBMITTED[name]) != _NOTHING_SUBMITTED[name]
    ]:
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} describes a workload to submit; give its --cpu, --memory, --gpus or "
            "--gpu-share as well"
        )


def _change_fields(kind: str, fields: Any) -> Any:
    """Returns the fields of a change; a workload to submit has its amounts as in a workload file."""
    if kind == "SubmitCopies" and isinstance(fields, Mapping) and "spec" in fields:
        return {**fields, "spec": read_spec_amounts(fields["spec"])}
    return fields


def _from_file(file: Any) -> tuple[WhatIfChange, ...]:
    import yaml

    try:
        plain = yaml.safe_load(read_input(file, _FILE_BYTES_MOST))
    except yaml.YAMLError as error:
        raise RequestRefused(f"{file.name}: is not YAML", "correct the YAML there") from error
    if not isinstance(plain, list):
        raise RequestRefused(
            f"{file.name}: is not a list", "write a list, for example `- DrainNodes: {node_names: [a]}`"
        )
    try:
        changes = [
            {"change": {key: _change_fields(key, value or {}) for key, value in dict(row).items()}} for row in plain
        ]
        return from_plain(WhatIfRequest, {"changes": changes}).changes
    except InvalidMessage as error:
        raise RequestRefused(f"{file.name}: {error.message}", "correct the file", error.violations) from None
    except (TypeError, ValueError):
        raise RequestRefused(f"{file.name}: a change is not a mapping", "write for example `- PlaceAnew: {}`") from None


def parse_changes(flags: dict[str, Any], in_force: Callable[[], Policy]) -> tuple[WhatIfChange, ...]:
    """Returns the changes in order; `in_force` returns the policy of which single weights and budgets are changed."""
    found: list[WhatIfChange] = list(_from_file(flags["changes"])) if flags["changes"] else []
    found.extend(WhatIfChange(change=change) for change in (*_nodes(flags), *_policy(flags, in_force)))
    if flags["cancel"]:
        found.append(WhatIfChange(change=CancelWorkloads(workload_ids=flags["cancel"])))
    if flags["anew"]:
        found.append(WhatIfChange(change=PlaceAnew()))
    found.extend(WhatIfChange(change=change) for change in _submissions(flags))
    return tuple(found)


# A what-if over a large cluster takes longer than a call that reads; --timeout beyond it still counts.
_TIMEOUT_LEAST_S = 300.0
_WORDS = {
    ImaginedOutcome.DISPLACED: "would lose its place and wait",
    ImaginedOutcome.REFUSED: "could never run",
    ImaginedOutcome.WAITS: "would be submitted and wait",
    ImaginedOutcome.MOVED: "would move",
    ImaginedOutcome.PLACED: "would be placed",
    ImaginedOutcome.CANCELLED: "would end",
}


def _timeout_s(settings: CliSettings) -> float:
    return max(settings.timeout_s, _TIMEOUT_LEAST_S)


def _totals(before: ClusterFigures, after: ClusterFigures) -> Iterator[tuple[str, str, str, str]]:
    def count(what: str, name: str) -> tuple[str, str, str, str]:
        was, now = getattr(before, name), getattr(after, name)
        return what, f"{was:,}", f"{now:,}", f"{now - was:+,}" if now != was else "="

    def milli(what: str, name: str, whole: Callable[[ClusterFigures], int]) -> tuple[str, str, str, str]:
        was, now = getattr(before, name), getattr(after, name)
        cells = [
            f"{part / 1000:,.6g} ({format_percent(part, whole(side))})" for part, side in ((was, before), (now, after))
        ]
        return what, cells[0], cells[1], f"{(now - was) / 1000:+,.6g}" if now != was else "="

    def per_gpu(side: ClusterFigures) -> float | None:
        milli = side.allocated_gpu_milli
        return 1000 * side.modelled_power_w / milli if milli else None

    yield count("nodes ready", "nodes_ready")
    yield count("GPUs", "gpus")
    yield milli("GPUs allocated", "allocated_gpu_milli", lambda side: 1000 * side.gpus)
    yield milli("CPUs allocated", "allocated_cpu_milli", lambda side: side.cpu_milli)
    yield milli("GPUs fragmented", "fragmented_gpu_milli", lambda side: 1000 * side.gpus)
    yield count("workloads placed", "placed")
    yield count("workloads waiting", "pending")
    power_w = after.modelled_power_w - before.modelled_power_w
    was, now, change = format_powers([before.modelled_power_w, after.modelled_power_w, abs(power_w)])
    yield "power, modelled", was, now, f"{'+' if power_w > 0 else '-'}{change}" if power_w else "="
    was, now = format_powers([per_gpu(before), per_gpu(after)])
    yield "  per GPU allocated", was, now, ""


def _class(room: ClassRoom) -> str:
    request = ResourceRequest(
        cpu_milli=room.cpu_milli, gpu_count=room.gpu_count, gpu_milli=room.gpu_milli, gpu_models=room.gpu_models
    )
    return request_text(request)


def totals_table(before: ClusterFigures, after: ClusterFigures, was: str, now: str) -> list[str]:
    """Formats the totals of two clusters under the titles `was` and `now`."""
    columns: list[TableColumn[tuple[str, str, str, str]]] = [
        TableColumn("", lambda row: row[0]),
        TableColumn(was, lambda row: row[1], right=True),
        TableColumn(now, lambda row: row[2], right=True),
        TableColumn("CHANGE", lambda row: row[3] or " ", right=True),
    ]
    return text_table(columns, list(_totals(before, after)))


_ROOMS: list[TableColumn[ClassRoom]] = [
    TableColumn("EACH", _class),
    TableColumn("OF THE MIX", lambda room: format_percent(room.share, 1.0), right=True),
    TableColumn("BEFORE", lambda room: f"{room.before:,}", right=True),
    TableColumn("AFTER", lambda room: f"{room.after:,}", right=True),
    TableColumn(
        "CHANGE", lambda room: f"{room.after - room.before:+,}" if room.after != room.before else "=", right=True
    ),
]


def _why(found: WorkloadDifference) -> str:
    if found.candidate is None:
        return found.reason
    terms = ", ".join(f"{term.name} {term.cost_w:+.2f}" for term in found.candidate.terms)
    cost = f"cost {found.candidate.cost_w:.2f} W ({terms})"
    return f"{found.reason}; {cost}" if found.reason else cost


def differences_table(was: str, now: str) -> list[TableColumn[WorkloadDifference]]:
    """Returns the columns for workloads that differ, with their nodes under the titles `was` and `now`."""
    return [
        TableColumn("ID", lambda found: found.workload_id),
        TableColumn("WHAT", lambda found: found.outcome.name.lower()),
        TableColumn(was, lambda found: ",".join(found.nodes_before)),
        TableColumn(now, lambda found: ",".join(found.nodes_after)),
        TableColumn("WHY", _why),
    ]


def whatif_lines(answer: WhatIfResponse) -> Iterator[str]:
    """Formats the answer in lines for people."""
    yield f"Tried on a copy of revision {answer.revision}; the cluster is unchanged."
    yield ""
    yield from totals_table(answer.before, answer.after, "BEFORE", "AFTER")
    if answer.rooms:
        yield ""
        yield "Capacity for more of the typical tasks, each kind alone:"
        yield from text_table(_ROOMS, answer.rooms)
    yield ""
    if not answer.counts:
        yield "No workload would be affected."
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
        yield "The trial ended at its limit of decisions: more pending workloads might still be placed."


def _flags_of(values: dict[str, Any], client: Any, settings: CliSettings) -> tuple[WhatIfChange, ...]:
    named = tuple(find_workload(client, settings, typed).workload_id for typed in values["cancel"])
    return parse_changes({**values, "cancel": named}, partial(fetch_policy, client, settings))


@click.command()
@change_options
@click.option(
    "--differences",
    type=click.IntRange(1, DIFFERENCES_MOST),
    default=40,
    show_default=True,
    help="Maximum number of workloads to list.",
)
@output_option
@click.pass_obj
def whatif(settings: CliSettings, /, differences: int, **flags: Any) -> None:
    """Try changes on a copy of the cluster, without changing the cluster.

    \b
    eelctl whatif --drain n1 --drain n2
    eelctl whatif --add 10:H100-SXM5-80GB:8 --gpus 8 --cpu 64 --copies 20
    eelctl whatif --objective energy --anew
    eelctl whatif --budget rack:r1=20kW --gpus 8 --copies 4
    """  # noqa: D301
    with connect_operators(settings) as client:
        changes = _flags_of(flags, client, settings)
        if not changes:
            raise click.UsageError("name at least one change; see eelctl whatif --help")
        request = WhatIfRequest(changes=changes, differences_most=differences)
        answer = client.what_if(request, timeout=_timeout_s(settings))
        print_document(settings, answer, whatif_lines(answer))


def _describe_capacity_plan(answer: PlanCapacityResponse, most: int, *, waited: bool) -> Iterator[str]:
    wanted = count_noun(answer.wanted, "workload")
    if answer.nodes is None:
        yield f"Even with {most:,} such nodes, {answer.outcome.after.pending:,} workloads would wait."
    elif answer.nodes == 0:
        yield "No more nodes are needed: " + (f"{wanted} fit." if answer.wanted else "nothing waits.")
    else:
        nodes = count_noun(answer.nodes, "node is", "nodes are")
        yield f"{nodes} needed for {wanted}; with one less, {answer.waiting_with_one_less:,} would wait."
    before = answer.outcome.before.pending
    first = f"; {before:,} pending workloads were tried first, by priority and age" if waited and before else ""
    yield f"({count_noun(answer.trials, 'fleet')} tried{first})"
    yield ""
    yield from whatif_lines(answer.outcome)


@click.command()
@click.option("--node", metavar="MODEL:COUNT", help="Shape of the nodes to add, for example H100-SXM5-80GB:8.")
@click.option("--node-like", metavar="NODE", help="Add nodes like this existing one.", shell_complete=complete_nodes)
@click.option(
    "--most",
    type=click.IntRange(1, IMAGINED_NODES_MOST),
    default=1000,
    show_default=True,
    help="Maximum number of nodes to try.",
)
@change_options
@output_option
@click.pass_obj
def capacity(settings: CliSettings, /, node: str | None, node_like: str | None, most: int, **flags: Any) -> None:
    """Compute how many more nodes are needed for the pending workloads, or for those given.

    \b
    eelctl capacity --node H100-SXM5-80GB:8
    eelctl capacity --node-like n1 --gpus 2 --cpu 16 --copies 50
    """  # noqa: D301
    if (node is None) == (node_like is None):
        raise click.UsageError("name the shape of the nodes: either --node MODEL:COUNT or --node-like NODE")
    shape = (
        NodeShape(like_node=node_like)
        if node_like
        else parse_node_shape(str(node), flags["node_cpu"], flags["node_memory"], "--node")
    )
    with connect_operators(settings) as client:
        changes = _flags_of(flags, client, settings)
        request = PlanCapacityRequest(changes=changes, shape=shape, nodes_most=most)
        answer: PlanCapacityResponse = client.plan_capacity(request, timeout=_timeout_s(settings))
        shown = replace(answer, outcome=replace(answer.outcome, differences=answer.outcome.differences[:10]))
        submits = any(isinstance(change.change, SubmitCopies) for change in changes)
        print_document(settings, answer, _describe_capacity_plan(shown, most, waited=submits))


_SHOWN = 20


def _lines(report: ShadowReport) -> Iterator[str]:
    weights = report.weights
    yield (
        f"shadow {report.objective}: power {weights.power:g}, fragmentation {weights.fragmentation_w:g} W, stranding "
        f"{weights.stranding_w:g} W"
    )
    began = datetime.fromtimestamp(report.started_ns / 1e9, UTC).isoformat(timespec="seconds")
    yield f"since {began} (revision {report.started_revision}), {report.events:,} events, now revision {report.revision}"
    yield ""
    yield from totals_table(report.live, report.shadow, "CLUSTER", "SHADOW")
    yield ""
    yield (
        f"Of the workloads submitted since that still run or wait: {report.alike:,} placed alike, {report.elsewhere:,} elsewhere, "
        f"{report.live_alone:,} by the cluster only, {report.shadow_alone:,} by the shadow only, "
        f"{report.neither:,} by neither."
    )
    if report.differences:
        yield ""
        yield from text_table(differences_table("CLUSTER", "SHADOW"), report.differences[:_SHOWN])


@click.group()
def shadow() -> None:
    """Run a second policy on a copy that follows the cluster, and compare."""


@shadow.command()
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="Named objective.")
@click.option(
    "--weight", multiple=True, metavar="NAME=VALUE", help="One weight; the others stay as in force. Repeatable."
)
@output_option
@click.pass_obj
def start(settings: CliSettings, objective: str | None, weight: tuple[str, ...]) -> None:
    """Start a shadow from the cluster as it is now; a running shadow ends."""
    if not (objective or weight):
        raise click.UsageError("name the second policy with --objective or --weight")
    with connect_operators(settings) as client:
        wanted = resolve_weights(objective, weight, lambda: fetch_policy(client, settings).weights)
        report = client.start_shadow(StartShadowRequest(weights=wanted), timeout=settings.timeout_s).report
        print_document(settings, report, _lines(report))


@shadow.command()
@output_option
@click.pass_obj
def show(settings: CliSettings) -> None:
    """Compare the cluster with its shadow."""
    with connect_operators(settings) as client:
        report = client.get_shadow(GetShadowRequest(), timeout=settings.timeout_s).report
        print_document(settings, report, _lines(report))


@shadow.command()
@output_option
@click.pass_obj
def stop(settings: CliSettings) -> None:
    """Compare a last time, then end the shadow."""
    with connect_operators(settings) as client:
        report = client.stop_shadow(StopShadowRequest(), timeout=settings.timeout_s).report
        print_document(settings, report, _lines(report))
