"""eelctl workloads, get, submit, cancel, scale and progress: workloads, and what changes them.

A watch is filtered here, by the filters of the listing, because the contract's watch sends every change.

A YAML file has one or more documents. Each is the spec of a workload with an optional `id`, with amounts as people
write them (cpu: 2.5, memory: 16GiB, gpus: 1, gpu_share: 0.5, gpu_models: [A, B]) or as in the contract (cpu_milli,
memory_bytes, ...), or it is what `eelctl get -o yaml` prints. Every error names the document and the field.
"""

import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

import click

from eelgrid_controller.cli.arrays import add_array, array_options, format_array_status, print_elements
from eelgrid_controller.cli.completion import (
    complete_model_lists,
    complete_namespaces,
    complete_nodes,
    complete_queues,
    complete_users,
    complete_workloads,
)
from eelgrid_controller.cli.confirmation import confirm_change, list_names, yes_option
from eelgrid_controller.cli.connection import (
    CPU,
    DURATION,
    MEMORY,
    SHARE,
    CliSettings,
    FiniteRange,
    NameNotFound,
    RequestRefused,
    UsageMismatch,
    connect_operators,
    iterate_pages,
    output_option,
    preemption_options,
    read_input,
)
from eelgrid_controller.cli.deadline import add_deadline, deadline_options, describe_deadline
from eelgrid_controller.cli.gang import add_gang, describe_gang, gang_options
from eelgrid_controller.cli.interference import build_sharing, format_slowdown, sharing_options
from eelgrid_controller.cli.nodes import limit_option
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_rows,
    echo,
    list_options,
    power_column,
    print_document,
    print_list,
    print_stream,
)
from eelgrid_controller.cli.preferences import build_model_data, build_preference, preference_options, split_names
from eelgrid_controller.cli.workload_names import LIVE_PHASES, call_with_workload, find_workload, get_workload
from eelgrid_controller.formatting import (
    count_noun,
    describe_attempt,
    describe_checkpoint_advice,
    format_age,
    format_cpu,
    format_gpu,
    format_load_target,
    format_memory,
    format_milliseconds,
    format_phase,
    format_power,
    format_time,
    parse_cpu_milli,
    parse_gpu_milli,
    parse_memory_bytes,
)
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    GetSummaryRequest,
    ListWorkloadsRequest,
    Locality,
    Mobility,
    ReportProgressRequest,
    ResourceRequest,
    ScaleWorkloadRequest,
    SubmitWorkloadRequest,
    TrainingPromise,
    WatchWorkloadsRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

DOCUMENTS_MOST = 10_000
_FRIENDLY: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "cpu": ("cpu_milli", parse_cpu_milli),
    "memory": ("memory_bytes", parse_memory_bytes),
    "gpus": ("gpu_count", int),
    "gpu_share": ("gpu_milli", parse_gpu_milli),
}
# What `eelctl get -o yaml` prints besides the spec: set by the controller, not by the user.
_ANSWERED = frozenset(entry.name for entry in fields(Workload)) - {"workload_id", "spec"}


def read_workloads(text: str, source: str) -> tuple[SubmitWorkloadRequest, ...]:
    """Parses the submissions in a YAML text; raises RequestRefused with document and field before any is sent."""
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "is not YAML"
        raise RequestRefused(f"{source}{place}: {problem}", "correct the YAML there") from None
    if not documents:
        raise RequestRefused(f"{source}: contains no workload", "write at least `name:` and `request:`")
    if len(documents) > DOCUMENTS_MOST:
        raise RequestRefused(
            f"{source}: contains {len(documents)} documents", f"split the file: at most {DOCUMENTS_MOST} documents"
        )
    return tuple(_submission(document, f"{source}, document {n}") for n, document in enumerate(documents, start=1))


def _as_written(violation: Violation) -> Violation:
    """Returns a violation with the field names of a workload file, and all of them where fields are listed."""
    remedy = violation.remedy
    for friendly, (name, _) in _FRIENDLY.items():
        remedy = re.sub(rf"\b{name}\b", f"{friendly} (or {name})", remedy)
    return Violation(violation.field.removeprefix("spec."), violation.problem, remedy)


def read_spec_amounts(spec: Any) -> Any:
    """Returns the plain form of a spec with amounts as in the contract, as a workload file may have them.

    Raises InvalidMessage for an amount that cannot be read.
    """
    if isinstance(spec, Mapping) and isinstance(spec.get("request"), Mapping):
        return {**spec, "request": _amounts(spec["request"])}
    return spec


def _submission(document: Any, place: str) -> SubmitWorkloadRequest:
    if not isinstance(document, Mapping):
        raise RequestRefused(f"{place}: is not a mapping", "write at least `name:` and `request:`")
    given = dict(document)
    workload_id = given.pop("id", given.pop("workload_id", ""))
    if isinstance(given.get("spec"), Mapping):
        given = given["spec"] | {key: value for key, value in given.items() if key not in {"spec", *_ANSWERED}}
    array = given.pop("array", None)
    # What `eelctl get` prints of an element names its array, which the controller sets.
    has_array = array is not None and not (isinstance(array, Mapping) and "array_id" in array)
    wanted = {"array": array if isinstance(array, Mapping) else {"indexes": str(array)}} if has_array else {}
    try:
        return from_plain(
            SubmitWorkloadRequest, {"spec": read_spec_amounts(given), "workload_id": workload_id, **wanted}
        )
    except InvalidMessage as error:
        violations = tuple(_as_written(v) for v in error.violations)
        raise RequestRefused(f"{place}: {error.message}", "correct the file; nothing was sent", violations) from None


def _amounts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Converts amounts to those of the contract; a GPU without a share is a whole one."""
    found = dict(request)
    for friendly, (name, read) in _FRIENDLY.items():
        if friendly not in found:
            continue
        value = found.pop(friendly)
        path = f"spec.request.{friendly}"
        if name in found:
            raise InvalidMessage(
                "cannot read this", (Violation(path, f"is given together with {name}", "keep one of the two"),)
            )
        try:
            found[name] = read(str(value))
        except ValueError as error:
            remedy = "write for example cpu: 2.5, memory: 16GiB, gpus: 1, gpu_share: 0.5"
            what, _, how = str(error).removeprefix(f"{str(value)!r} ").partition(": write ")
            problem = f"is {value!r}, which {what}" if how else f"is {value!r}"
            violation = Violation(path, problem, f"write {how}" if how else remedy)
            raise InvalidMessage("cannot read this", (violation,)) from None
    if found.get("gpu_count"):
        found.setdefault("gpu_milli", GPU_MILLI_WHOLE)
    return found


_GPUS_SHOWN = 8
_COLOURS = {WorkloadPhase.PLACED: "green", WorkloadPhase.PENDING: "yellow", WorkloadPhase.FAILED: "red"}


def request_text(request: ResourceRequest) -> str:
    """Formats the request of one replica in one line."""
    parts = []
    if request.cpu_milli:
        parts.append(f"{format_cpu(request.cpu_milli)} CPU")
    if request.memory_bytes:
        parts.append(format_memory(request.memory_bytes))
    if request.gpu_count:
        models = f" ({'|'.join(request.gpu_models)})" if request.gpu_models else ""
        parts.append(f"{format_gpu(request.gpu_count * request.gpu_milli)} GPU{models}")
    return ", ".join(parts)


def _places(workload: Workload) -> str:
    """Returns the node that it runs on, or the first node and how many more."""
    names = list(dict.fromkeys(placement.node_name for placement in workload.placements))
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _gpus(workload: Workload) -> str:
    indexes = [f"{p.node_name}:{','.join(map(str, p.gpu_indexes))}" for p in workload.placements if p.gpu_indexes]
    return " ".join(indexes[:_GPUS_SHOWN]) + (" ..." if len(indexes) > _GPUS_SHOWN else "")


def _gpu_states(workload: Workload) -> str:
    """Formats how many replicas are on lost GPUs, as far as any is."""
    lost = len(workload.lost_replicas)
    if not lost:
        return ""
    return "on a lost GPU" if workload.spec.replicas == 1 else f"{lost} on a lost GPU"


def _format_wait(workload: Workload) -> str:
    placed = workload.phase is WorkloadPhase.PLACED and workload.placed_ns >= workload.submitted_ns
    return format_milliseconds((workload.placed_ns - workload.submitted_ns) / 1e9) if placed else "-"


def _format_gpus(workload: Workload) -> str:
    """Formats the GPUs of all replicas: those it asks for, as far as any."""
    request = workload.spec.request
    milli = workload.spec.replicas * request.gpu_count * request.gpu_milli
    return format_gpu(milli) if milli else "-"


def build_workload_columns(now_ns: Callable[[], int]) -> tuple[TableColumn[Workload], ...]:
    """Builds the columns of workloads; `now_ns` is the controller's time, for their age."""
    return (
        TableColumn("ID", lambda w: w.workload_id, width=16),
        TableColumn("NAME", lambda w: w.spec.name, width=16),
        TableColumn("USER", lambda w: w.spec.user or w.owner, width=8),
        TableColumn("PHASE", format_phase, width=9, colour=lambda w: _COLOURS.get(w.phase)),
        TableColumn("GPUS", _format_gpus, right=True, width=4),
        TableColumn("AGE", lambda w: format_age((now_ns() - w.submitted_ns) / 1e9), right=True, width=6),
        power_column("POWER", lambda w: w.power_w, width=8),
        TableColumn("NODE", _places, width=16),
        TableColumn("KIND", lambda w: w.spec.kind.name.lower(), wide=True, width=17),
        TableColumn("REPLICAS", lambda w: str(w.spec.replicas), right=True, wide=True),
        TableColumn("EACH", lambda w: request_text(w.spec.request), wide=True, width=28),
        TableColumn("NAMESPACE", lambda w: w.spec.namespace, wide=True),
        TableColumn("OWNER", lambda w: w.owner or w.spec.user, wide=True),
        TableColumn("QUEUE", lambda w: w.spec.queue, wide=True),
        TableColumn("GANG", lambda w: "" if w.spec.gang is None else w.spec.gang.name, wide=True),
        TableColumn("PRIORITY", lambda w: str(w.spec.priority), right=True, wide=True),
        TableColumn("ON GPUS", _gpus, wide=True),
        TableColumn("WAITED", _format_wait, right=True, wide=True),
        TableColumn("GPU STATE", _gpu_states, wide=True, colour=lambda w: "red" if w.lost_replicas else None),
        TableColumn("REASON", lambda w: w.reason),
    )


def read_clock(client: Any, settings: CliSettings) -> Callable[[], int]:
    """Reads the controller's time once; returns a clock that goes on from it."""
    read_ns: int = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary.time_ns
    began_ns = time.monotonic_ns()
    return lambda: read_ns + time.monotonic_ns() - began_ns


def _promise(training: TrainingPromise) -> str:
    if training.slowdown_most is not None:
        return f"at most {100 * training.slowdown_most:g} % slower"
    if training.deadline_ns:
        return f"{training.work:g} units of work by {datetime.fromtimestamp(training.deadline_ns / 1e9, UTC):%F %T} UTC"
    return f"best effort, energy weight {training.energy_weight:g}"


def workload_lines(workload: Workload) -> Iterator[str]:
    """Formats a workload in lines for people."""
    spec = workload.spec
    yield f"{workload.workload_id}: {format_phase(workload)}" + (f" ({workload.reason})" if workload.reason else "")
    if workload.array is not None:
        yield f"  array      {format_array_status(workload.array)}"
    yield f"  name       {spec.name} ({spec.kind.name.lower()}), priority {spec.priority}"
    owner = [("namespace", spec.namespace), ("user", spec.user), ("queue", spec.queue)]
    yield "  charged    " + ", ".join(f"{what} {value}" for what, value in owner if value)
    yield f"  owner      {workload.owner or spec.user or 'none: only administrators may change it'}"
    yield f"  asks for   {spec.replicas} x {request_text(spec.request)}"
    if spec.gpu_preference:
        worth_w = spec.gpu_preference.worth_w
        yield f"  prefers    {', '.join(spec.gpu_preference.models)}" + (
            f", for up to {worth_w:g} W more" if worth_w is not None else ""
        )
    if spec.model_data:
        worth_w = spec.model_data.worth_w
        yield f"  loads      {', '.join(spec.model_data.data_names)}" + (
            f", near it for up to {worth_w:g} W more" if worth_w is not None else ""
        )
    if spec.gpu_sharing:
        most = spec.gpu_sharing.slowdown_most
        bears = "the policy's limit" if most is None else f"at most {format_slowdown(most)} longer"
        yield f"  shares     its GPU as {spec.gpu_sharing.load or 'a load without a name'}, {bears}"
    if spec.service and spec.service.load_target:
        yield f"  replicas   {format_load_target(spec.service.load_target)} each"
    elif spec.service:
        yield "  promised   " + "; ".join(
            f"{one.metric.name.lower()} p{100 * one.quantile:g} within {one.latency_s:g} s"
            for one in spec.service.objectives
        )
    if spec.training:
        yield f"  promised   {_promise(spec.training)}"
    if workload.power_w is not None:
        yield f"  power      {format_power(workload.power_w)} measured"
    if workload.power_limit_w is not None:
        reason = ", since a budget never holds its GPUs' default limits" if workload.limit_before_start else ""
        yield f"  limit      {workload.power_limit_w:g} W per GPU{reason}"
    if spec.locality:
        yield f"  locality   {spec.locality.name.lower()}"
    if spec.labels:
        yield "  labels     " + ", ".join(f"{key}={value}" for key, value in sorted(spec.labels.items()))
    if spec.process:
        yield f"  runs       {shlex.join(spec.process.argv)}"
        yield f"  in         {spec.process.working_directory}"
        if spec.process.time_limit_s:
            yield f"  time limit {format_age(spec.process.time_limit_s)}"
    if (progress := workload.progress) is not None:
        of = f" of {progress.total}" if progress.total else ""
        metric = "" if progress.metric is None else f", {progress.metric:.6g}"
        yield f"  progress   step {progress.step}{of}{metric}, as it says"
    if workload.progress_runtime_s is not None and workload.phase is WorkloadPhase.PLACED:
        yield f"  ends       about {format_time(workload.placed_ns + int(workload.progress_runtime_s * 1e9))}, by its progress"
    if spec.expected_runtime_s is not None:
        yield f"  expected   to run {format_age(spec.expected_runtime_s)}"
    if spec.gang is not None:
        yield f"  gang       {describe_gang(workload)}"
    if spec.deadline is not None:
        yield f"  deadline   {describe_deadline(workload)}"
    if workload.promise is not None:
        yield f"  starts     by {format_time(workload.promise.start_ns)}"
    if workload.checkpoint_advice is not None:
        yield f"  advice     {describe_checkpoint_advice(workload.checkpoint_advice)}"
    for placement in workload.placements:
        gpus = f", GPU {','.join(map(str, placement.gpu_indexes))}" if placement.gpu_indexes else ""
        lost = ", on a lost GPU" if placement.replica in workload.lost_replicas else ""
        process = _describe_process(workload, placement.replica)
        yield f"  replica {placement.replica:<3}{placement.node_name}{gpus}{lost}{process}"


def _describe_process(workload: Workload, replica: int) -> str:
    """Says what became of a replica's process, as far as one was reported."""
    attempt = next((one for one in workload.attempts if one.replica == replica), None)
    return "" if attempt is None else f", {describe_attempt(attempt)}"


def _build_filter(request: ListWorkloadsRequest) -> Callable[[Workload], bool]:
    """Returns the filters of a listing as a predicate."""

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


class _LiveFilter:
    """Passes live workloads, and then the end of each of them; not those that had ended before."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, workload: Workload) -> bool:
        if workload.phase in LIVE_PHASES:
            self._seen.add(workload.workload_id)
            return True
        is_seen = workload.workload_id in self._seen
        self._seen.discard(workload.workload_id)
        return is_seen


@click.command()
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=click.Choice([phase.name.lower() for phase in WorkloadPhase if phase]),
    help="Only workloads in this phase; repeatable.",
)
@click.option("--all", "every", is_flag=True, help="Also workloads that ended; live ones only by default.")
@click.option("--namespace", default="", help="Only workloads in this namespace.", shell_complete=complete_namespaces)
@click.option("--user", default="", help="Only workloads of this user.", shell_complete=complete_users)
@click.option("--queue", default="", help="Only workloads in this queue.", shell_complete=complete_queues)
@click.option(
    "--node", "node_name", default="", help="Only workloads placed on this node.", shell_complete=complete_nodes
)
@click.option(
    "--name",
    "name_contains",
    default="",
    help="Only workloads whose name contains this text.",
    shell_complete=complete_workloads,
)
@click.option("-w", "--watch", is_flag=True, help="Print each change as it happens, until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), default=0, help="With --watch: only changes after this revision.")
@limit_option
@list_options(*build_workload_columns(lambda: 0))
@output_option
@click.pass_obj
def workloads(
    settings: CliSettings,
    /,
    *,
    phases: tuple[str, ...],
    every: bool,
    watch: bool,
    after: int,
    limit: int | None,
    **filters: Any,
) -> None:
    """List live workloads in order of submission, or watch workloads change.

    POWER is what their GPUs draw now, of a shared GPU in proportion to what is held. A watch begins with the live
    workloads and shows how each of them ends.

    \b
    eelctl workloads --phase pending --namespace research
    eelctl workloads --all --user ada
    eelctl workloads --watch
    """  # noqa: D301
    if every and phases:
        raise click.UsageError("--all and --phase exclude each other: --phase names the phases to show")
    chosen = tuple(WorkloadPhase[phase.upper()] for phase in phases)
    with connect_operators(settings) as client:
        columns = build_workload_columns(read_clock(client, settings))
        if not watch:
            request = ListWorkloadsRequest(phases=chosen or (() if every else LIVE_PHASES), **filters)
            found = iterate_pages(
                client.list_workloads,
                request,
                "workloads",
                timeout_s=settings.timeout_s,
                limit=settings.fetch_limit(limit),
            )
            hint = "" if chosen or every else "; --all includes those that ended"
            empty = f"no workload matches; submit one with `eelctl submit`{hint}"
            print_list(settings, columns, found, empty=empty, limit=limit)
            return
        wanted = _build_filter(ListWorkloadsRequest(phases=chosen, **filters))
        changes = client.watch_workloads(WatchWorkloadsRequest(after_revision=after))
        try:
            shown = filter(wanted, (c.workload for c in changes))
            if settings.sort:
                raise UsageMismatch("--sort and --watch exclude each other", "a watch is in the order of the changes")
            if settings.filters:
                shown = filter(lambda one: bool(arrange_rows(settings, columns, [one])), shown)
            if not (every or chosen or after):
                shown = filter(_LiveFilter(), shown)
            print_stream(settings, columns, islice(shown, limit))
        except KeyboardInterrupt:
            return


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@output_option
@click.pass_obj
def get(settings: CliSettings, workload: str) -> None:
    """Show one workload, by its id or its name."""
    with connect_operators(settings) as client:
        found = find_workload(client, settings, workload)
        print_document(settings, found, workload_lines(found))


@click.command()
@click.argument("workload", nargs=-1, shell_complete=complete_workloads)
@click.option("--namespace", default="", help="Cancel what is in this namespace.", shell_complete=complete_namespaces)
@click.option("--user", default="", help="Cancel what this user has.", shell_complete=complete_users)
@click.option("--queue", default="", help="Cancel what is in this queue.", shell_complete=complete_queues)
@click.option("--name-contains", default="", metavar="TEXT", help="Cancel what has this in its name.")
@click.option("--dry-run", is_flag=True, help="Show what would be cancelled, and change nothing.")
@yes_option
@output_option
@click.pass_obj
def cancel(settings: CliSettings, /, workload: tuple[str, ...], yes: bool, dry_run: bool, **filters: str) -> None:
    """Cancel workloads, by their ids or names or by filters, all of which must hold.

    Those that are named are cancelled in that order; of those that filters match, first what waits. Their resources are
    free at once; those of a process when it and all that it started have ended. Asks before it cancels several, or what
    filters match.

    \b
    eelctl cancel job-7 job-8
    eelctl cancel --user ann --name-contains sweep --dry-run
    """  # noqa: D301
    given = [f"--{name.replace('_', '-')}" for name, value in filters.items() if value]
    is_filtered = bool(given)
    if workload and given:
        raise click.UsageError(f"WORKLOAD and {given[0]} exclude each other: name workloads, or give filters")
    if not (workload or given):
        raise click.UsageError("name workloads, or give filters such as --user; see eelctl cancel --help")
    with connect_operators(settings) as client:
        named = _find_live(client, settings, filters) if is_filtered else tuple(dict.fromkeys(workload))
        if dry_run:
            found = [find_workload(client, settings, name) for name in named]
            echo("dry run: nothing was changed", err=True)
            print_list(settings, build_workload_columns(read_clock(client, settings)), found, empty="")
            return
        if is_filtered or len(named) > 1:
            confirm_change(f"Cancelling {count_noun(len(named), 'workload')} ({list_names(named)})", yes=yes)
        for name in named:
            ended = call_with_workload(client, settings, name, partial(_cancel, client, settings))
            print_document(settings, ended, [f"{ended.workload_id}: {format_phase(ended)}"])


def _find_live(client: Any, settings: CliSettings, filters: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the ids of live workloads that match, those that wait first; raises NameNotFound if none does.

    Cancelled in this order, none that waits starts in the place of one that was cancelled before it.
    """
    request = ListWorkloadsRequest(phases=LIVE_PHASES, **filters)
    rows = iterate_pages(client.list_workloads, request, "workloads", timeout_s=settings.timeout_s)
    # Once more here: nothing is cancelled that a controller listed without a filter that it does not know.
    matching = sorted(filter(_build_filter(request), rows), key=lambda row: row.phase is not WorkloadPhase.PENDING)
    found = tuple(row.workload_id for row in matching)
    if not found:
        raise NameNotFound("no workload that waits or runs matches", "see them with `eelctl workloads`")
    return found


def _cancel(client: Any, settings: CliSettings, workload_id: str) -> Workload:
    request = CancelWorkloadRequest(workload_id=workload_id)
    ended: Workload = client.cancel_workload(request, timeout=settings.timeout_s).workload
    return ended


_KINDS = [kind.name.lower() for kind in WorkloadKind if kind]
_LOCALITIES = [locality.name.lower() for locality in Locality if locality]
_MOBILITIES = [way.name.lower() for way in Mobility if way]
_FILE_BYTES_MOST = 64 * 1024 * 1024


def _labels(pairs: Iterable[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{pair!r} is not a label; write --label key=value", param_hint="--label")
        labels[key] = value
    return labels


def submission_from_flags(flags: dict[str, Any]) -> SubmitWorkloadRequest:
    """Builds the submission that the flags describe; raises UsageError or BadParameter."""
    if not flags["name"]:
        raise click.UsageError("give --name and the resources, or -f FILE; see eelctl submit --help")
    gpus = flags["gpus"] if flags["gpus"] is not None else int(flags["gpu_share"] is not None)
    share = flags["gpu_share"] or (GPU_MILLI_WHOLE if gpus else 0)
    return SubmitWorkloadRequest(
        workload_id=flags["id"],
        spec=WorkloadSpec(
            name=flags["name"],
            kind=WorkloadKind[flags["kind"].upper()],
            replicas=flags["replicas"],
            namespace=flags["namespace"],
            user=flags["user"],
            queue=flags["queue"],
            priority=flags["priority"],
            priority_class=flags.get("priority_class", ""),
            never_preempts=flags.get("never_preempts", False),
            locality=Locality[flags["locality"].upper()] if flags["locality"] else Locality.UNSPECIFIED,
            labels=_labels(flags["label"]),
            mobility=Mobility[flags["mobility"].upper()] if flags["mobility"] else Mobility.UNSPECIFIED,
            expected_runtime_s=None if flags["expect"] is None else float(flags["expect"]),
            gpu_preference=build_preference(flags),
            model_data=build_model_data(flags),
            gpu_sharing=build_sharing(flags),
            request=ResourceRequest(
                cpu_milli=flags["cpu"],
                memory_bytes=flags["memory"],
                gpu_count=gpus,
                gpu_milli=share,
                gpu_models=split_names(flags["gpu_model"]),
            ),
        ),
    )


def _from_file(file: Any, flags: dict[str, Any], context: click.Context) -> tuple[SubmitWorkloadRequest, ...]:
    given = [name for name in flags if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} and -f exclude each other; set it in the file")
    return read_workloads(read_input(file, _FILE_BYTES_MOST), file.name)


@click.command()
@click.option(
    "-f", "--file", type=click.File("r", encoding="utf-8"), help="YAML file with one or more documents; - is stdin."
)
@click.option("--name", default="", help="Name of the workload.")
@click.option("--kind", type=click.Choice(_KINDS), default="batch_job", show_default=True, help="Kind of the workload.")
@click.option("--cpu", type=CPU, default=0, help="CPUs per replica: 2.5 or 2500m.")
@click.option("--memory", type=MEMORY, default=0, help="Memory per replica: 16GiB.")
@click.option("--gpus", type=click.IntRange(0, 64), help="GPUs per replica.")
@click.option("--gpu-share", type=SHARE, help="Share of one GPU per replica: 0.5 or 50%.")
@click.option(
    "--gpu-model",
    default="",
    help="Acceptable GPU models, by any of their names: A,B; any by default.",
    shell_complete=complete_model_lists,
)
@preference_options
@sharing_options
@click.option("--replicas", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Number of replicas.")
@click.option("--locality", type=click.Choice(_LOCALITIES), help="Place replicas close together, or apart.")
@click.option(
    "--namespace",
    default="default",
    show_default=True,
    help="Namespace of the workload.",
    shell_complete=complete_namespaces,
)
@click.option("--user", default="", help="User who submits it.", shell_complete=complete_users)
@click.option("--queue", default="", help="Queue in which it waits.", shell_complete=complete_queues)
@click.option("--priority", type=int, default=0, show_default=True, help="Higher priority is placed first.")
@preemption_options
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="Label, key=value; repeatable.")
@click.option(
    "--mobility", type=click.Choice(_MOBILITIES), help="How it may move when an operator moves workloads. [movable]"
)
@click.option("--expect", type=DURATION, help="How long it is expected to run: 30m, 2h; nothing ends for it.")
@array_options
@gang_options
@deadline_options
@click.option("--id", default="", help="Id of the workload; with it, repeating the command submits nothing twice.")
@click.option("--dry-run", is_flag=True, help="Show where it would be placed, and change nothing.")
@output_option
@click.pass_context
def submit(context: click.Context, /, file: Any, dry_run: bool, **flags: Any) -> None:
    """Submit workloads, from flags or a YAML file.

    \b
    eelctl submit --name bert --cpu 8 --memory 32GiB --gpu-share 0.5 --gpu-model A10,T4
    eelctl submit -f jobs.yaml
    """  # noqa: D301
    settings: CliSettings = context.obj
    if file:
        wanted = _from_file(file, flags, context)
    else:
        wanted = (add_array(add_gang(submission_from_flags(flags), flags), flags["array"], flags["parameters"]),)
    with connect_operators(settings) as client:
        for request in wanted if file else (add_deadline(client, settings, wanted[0], flags),):
            sent = replace(request, dry_run=dry_run)
            workload: Workload = client.submit_workload(sent, timeout=settings.timeout_s).workload
            if dry_run and sent.array is not None and sent.spec.process is not None:
                print_elements(settings, sent)
                continue
            print_document(settings, workload, _lines(workload, dry_run=dry_run))


def _lines(workload: Workload, *, dry_run: bool) -> Iterable[str]:
    if dry_run:
        yield "dry run: nothing was changed"
    yield from workload_lines(workload)


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.argument("replicas", type=click.IntRange(1, 10_000))
@yes_option
@output_option
@click.pass_obj
def scale(settings: CliSettings, workload: str, replicas: int, *, yes: bool) -> None:
    """Scale WORKLOAD to REPLICAS, or to as many as there is capacity for; asks before it ends several replicas."""
    with connect_operators(settings) as client:

        def resize(workload_id: str) -> Workload:
            running = 0 if yes else len(get_workload(client, settings, workload_id).placements)
            if running - replicas > 1:
                what = f"Scaling {workload_id} from {count_noun(running, 'replica')} to {replicas}"
                effects = (f"{running - replicas:,} running replicas end",)
                confirm_change(what, yes=yes, effects=effects)
            request = ScaleWorkloadRequest(workload_id=workload_id, replicas=replicas)
            scaled: Workload = client.scale_workload(request, timeout=settings.timeout_s).workload
            return scaled

        found = call_with_workload(client, settings, workload, resize)
        print_document(settings, found, workload_lines(found))
        if len(found.placements) < replicas:
            echo(
                f"{len(found.placements)} of {replicas} replicas have room now; eelctl explain {found.workload_id} says "
                "whether others make room, eelctl capacity what is missing",
                err=True,
            )


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.argument("work_done", type=FiniteRange(0.0, 1e18))
@click.pass_obj
def progress(settings: CliSettings, workload: str, work_done: float) -> None:
    """Report that the job WORKLOAD has done WORK_DONE units of work since it began."""
    with connect_operators(settings) as client:

        def report(workload_id: str) -> None:
            request = ReportProgressRequest(workload_id=workload_id, work_done=work_done)
            client.report_progress(request, timeout=settings.timeout_s)

        call_with_workload(client, settings, workload, report)
