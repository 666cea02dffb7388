"""Job arrays on the command line: the options that make a submission an array, what it would submit, and its elements.

Ranges and parameters are parsed here as the controller parses them, so that a mistake is one of usage and a dry run shows each
command.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from eelgrid_controller.cli.connection import CliSettings, RequestRefused, add_options, iterate_pages
from eelgrid_controller.cli.output import echo, print_plain
from eelgrid_controller.cli.workload_names import find_workload
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    PARAMETERS_MOST,
    ArrayStatus,
    JobArrayRequest,
    JobSchedule,
    ListWorkloadsRequest,
    ProcessSpec,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
    WorkloadSummary,
)

if TYPE_CHECKING:
    from eelgrid_controller.queueing.job_arrays import ElementParameters

_FLAGS = {"array.indexes": "--array", "array.parameters": "--param"}
_NOT_SUCCEEDED = (WorkloadPhase.FAILED, WorkloadPhase.CANCELLED)
_COUNTED = ("placed", "pending", "succeeded", "failed", "cancelled")


# Of a command that submits work that may be an array.
array_options = add_options(
    click.option(
        "--array", metavar="INDEXES", default="", help="Submit an array: 0-9, 1,3,5-7; %N for at most N at once."
    ),
    click.option(
        "--param",
        "parameters",
        multiple=True,
        metavar="NAME=VALUES",
        help="Submit each combination: lr=0.1,0.01, seed=0-3; {lr} in the command is replaced; repeatable.",
    ),
)


def add_array(request: SubmitWorkloadRequest, array: str, parameters: tuple[str, ...]) -> SubmitWorkloadRequest:
    """Returns a submission as an array, if one is wanted; raises BadParameter."""
    if not (array or parameters):
        return request
    # Faults know gRPC, which lists need not load.
    from eelgrid_controller.queueing.job_arrays import parse_job_array
    from eelgrid_protos.faults import InvalidArgument

    if len(parameters) > PARAMETERS_MOST:
        problem = f"is given {len(parameters)} times; give {PARAMETERS_MOST} at the most"
        raise click.BadParameter(problem, param_hint="--param")
    wanted = JobArrayRequest(indexes=array, parameters=parameters)
    try:
        parse_job_array(wanted)
    except InvalidArgument as error:
        found = error.violations[0]
        raise click.BadParameter(f"{found.problem}; {found.remedy}", param_hint=_FLAGS.get(found.field)) from None
    return replace(request, array=wanted)


def print_elements(settings: CliSettings, request: SubmitWorkloadRequest) -> None:
    """Prints what a submission would run: each element of an array with its parameters, or the one command."""
    from eelgrid_controller.queueing.job_arrays import ElementParameters, parse_job_array

    process = request.spec.process
    elements = () if request.array is None else parse_job_array(request.array).elements
    plain = [_describe_element(one, process) for one in elements or (ElementParameters(0, {}),)]
    if request.array is None:
        plain = [{"command": row["command"]} for row in plain]
    print_plain(settings, plain, (_format_element(row) for row in plain))
    echo("dry run: nothing was submitted", err=True)


def _describe_element(element: "ElementParameters", process: ProcessSpec | None) -> dict[str, Any]:
    argv = () if process is None else element.substitute_arguments(process.argv)
    return {"index": element.index, "parameters": dict(element.parameters), "command": list(argv)}


def _format_element(row: dict[str, Any]) -> str:
    parameters = " ".join(f"{name}={value}" for name, value in row.get("parameters", {}).items())
    parts = (f"_{row['index']}" if "index" in row else "", parameters, shlex.join(row["command"]))
    return "  ".join(filter(None, parts))


def format_array_status(status: ArrayStatus) -> str:
    """Formats the elements of an array by phase: 10 elements: 2 placed, 8 pending."""
    counts = ", ".join(f"{count} {name}" for name in _COUNTED if (count := getattr(status, name)))
    limit = f", {status.running_most} at once" if status.running_most else ""
    return f"{count_noun(status.size, 'element')}: {counts}{limit}"


def describe_reason(workload: Workload | WorkloadSummary) -> str:
    """Returns why a workload waits or how it ended; of an array with its elements by phase before."""
    if workload.array is None:
        return workload.reason
    return "; ".join(filter(None, (format_array_status(workload.array), workload.reason)))


def find_array(client: Any, settings: CliSettings, typed: str) -> Workload:
    """Returns the array of an id or of a name; raises BadParameter for what is none, and as `find_workload` does."""
    try:
        found = find_workload(client, settings, typed)
    except ContractError as error:
        raise click.BadParameter(f"is no id of an array: {error}", param_hint="--array") from None
    if found.array is None:
        raise click.BadParameter(f"{found.workload_id} is no array", param_hint="--array")
    return found


def build_array_rerun(
    client: Any, settings: CliSettings, ended: Workload, *, only_failed: bool
) -> SubmitWorkloadRequest:
    """Builds the submission that runs the elements of an ended array again, or those that failed; raises RequestRefused."""
    assert ended.array is not None
    key, indexes = ended.workload_id, ""
    if only_failed:
        request = ListWorkloadsRequest(array_id=key, phases=_NOT_SUCCEEDED)
        found = iterate_pages(client.list_workloads, request, "workloads", timeout_s=settings.timeout_s)
        indexes = ",".join(_list_ranges(one.spec.array.index for one in found if one.spec.array is not None))
        if not indexes:
            raise RequestRefused(f"no element of {key} failed", "leave --failed out to run all again")
    limit = f"%{ended.array.running_most}" if ended.array.running_most else ""
    return SubmitWorkloadRequest(
        spec=prepare_rerun(ended.spec), array=JobArrayRequest(rerun_of=key, indexes=indexes + limit)
    )


def prepare_rerun(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns what an ended workload ran, as a new one that waits for nothing and has neither deadline nor gang."""
    before = spec.schedule or JobSchedule()
    kept = JobSchedule(retries_most=before.retries_most, no_requeue=before.no_requeue)
    return replace(spec, schedule=None if kept == JobSchedule() else kept, array=None, deadline=None, gang=None)


def _list_ranges(indexes: Iterable[int]) -> Iterator[str]:
    """Yields rising indexes as ranges: 0-3, 7."""
    first = last = -1
    for index in (*sorted(indexes), -1):
        if first >= 0 and index == last + 1:
            last = index
            continue
        if first >= 0:
            yield f"{first}-{last}" if last > first else str(first)
        first = last = index
