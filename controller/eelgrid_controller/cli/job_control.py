"""eelctl hold, release, requeue and rerun, and the options of run that say what a job waits for before its turn.

Times are by the controller's clock, in UTC. What a job depends on is named by id, by name or as `last`; the controller gets ids.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import click

from eelgrid_controller.cli.arrays import build_array_rerun, prepare_rerun
from eelgrid_controller.cli.completion import complete_workloads
from eelgrid_controller.cli.connection import (
    CliSettings,
    RequestRefused,
    add_options,
    connect_operators,
    output_option,
)
from eelgrid_controller.cli.output import print_document
from eelgrid_controller.cli.reservation import parse_start_ns, read_now_ns
from eelgrid_controller.cli.workload_names import call_with_workload, find_workload
from eelgrid_controller.formatting import format_phase
from eelgrid_protos.messages import (
    RETRIES_MOST,
    DependencyCondition,
    HoldWorkloadRequest,
    JobDependency,
    JobSchedule,
    ReleaseWorkloadRequest,
    RequeueWorkloadRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
)

_CONDITIONS = {
    "after": DependencyCondition.SUCCEEDED,
    "after_any": DependencyCondition.ENDED,
    "after_not_ok": DependencyCondition.NOT_SUCCEEDED,
    "after_each": DependencyCondition.SUCCEEDED,
}
# What a job waits for.
schedule_options = add_options(
    click.option("--hold", is_flag=True, help="Submit it held: it starts no earlier than `eelctl release`."),
    click.option("--begin", default="", metavar="TIME", help="Start it no earlier: +2h, or 2027-01-31T08:00 in UTC."),
    click.option(
        "--after",
        multiple=True,
        metavar="JOB[,JOB]",
        help="Start it once these have succeeded.",
        shell_complete=complete_workloads,
    ),
    click.option("--after-any", multiple=True, metavar="JOB[,JOB]", help="Start it once these have ended in any way."),
    click.option(
        "--after-not-ok", multiple=True, metavar="JOB[,JOB]", help="Start it once these have failed or were cancelled."
    ),
    click.option(
        "--after-each",
        multiple=True,
        metavar="ARRAY[,ARRAY]",
        help="Start each element once that of the same index has succeeded.",
    ),
    click.option(
        "--retries",
        type=click.IntRange(0, RETRIES_MOST),
        default=0,
        show_default=True,
        help="Start it again so often after it failed.",
    ),
    click.option(
        "--no-requeue",
        is_flag=True,
        help="Never run it a second time: it is not preempted, and ends if its node fails or is drained by force.",
    ),
)


def add_schedule(
    client: Any, settings: CliSettings, request: SubmitWorkloadRequest, flags: dict[str, Any]
) -> SubmitWorkloadRequest:
    """Returns a submission with what the job waits for; raises BadParameter, and NotFound for what it depends on."""
    begin = flags["begin"]
    after = tuple(
        JobDependency(
            workload_id=find_workload(client, settings, name).workload_id,
            condition=condition,
            each=option == "after_each",
        )
        for option, condition in _CONDITIONS.items()
        for name in _split(flags[option])
    )
    schedule = JobSchedule(
        begin_ns=parse_start_ns(begin, read_now_ns(client, settings), "--begin") if begin else 0,
        after=after,
        retries_most=flags["retries"],
        no_requeue=flags["no_requeue"],
    )
    spec = request.spec if schedule == JobSchedule() else replace(request.spec, schedule=schedule)
    return replace(request, spec=spec, hold=flags["hold"])


def _split(texts: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip())


@click.command()
@click.argument("workload", nargs=-1, required=True, shell_complete=complete_workloads)
@output_option
@click.pass_obj
def hold(settings: CliSettings, /, workload: tuple[str, ...]) -> None:
    """Keep pending workloads from starting until they are released.

    They keep their place in the queue; work that runs is not held.
    """
    with connect_operators(settings) as client:
        for held in _change_each(client, settings, workload, client.hold_workload, HoldWorkloadRequest):
            print_document(settings, held, [f"{held.workload_id}: {held.reason or format_phase(held)}"])


@click.command()
@click.argument("workload", nargs=-1, required=True, shell_complete=complete_workloads)
@output_option
@click.pass_obj
def release(settings: CliSettings, /, workload: tuple[str, ...]) -> None:
    """Let held workloads start, which they do at once if there is room."""
    with connect_operators(settings) as client:
        for found in _change_each(client, settings, workload, client.release_workload, ReleaseWorkloadRequest):
            state = f"waits: {found.reason}" if found.reason else format_phase(found)
            print_document(settings, found, [f"{found.workload_id}: released; {state}"])


@click.command()
@click.argument("workload", nargs=-1, required=True, shell_complete=complete_workloads)
@click.option("--reason", default="", help="Why, shown to whoever asks what it waits for.")
@click.option("--hold", is_flag=True, help="Hold them once they wait, until `eelctl release`.")
@output_option
@click.pass_obj
def requeue(settings: CliSettings, /, workload: tuple[str, ...], reason: str, *, hold: bool) -> None:
    """Stop running jobs and let them wait again, as scontrol requeue does.

    Each is told by its stop signal and has its grace to write a checkpoint. It then waits at the place in the queue that
    it had, is not counted as failed, and goes on from its checkpoint, on any node.
    """
    with connect_operators(settings) as client:
        make_request = partial(RequeueWorkloadRequest, reason=reason, hold=hold)
        for found in _change_each(client, settings, workload, client.requeue_workload, make_request):
            is_waiting = found.phase is WorkloadPhase.PENDING
            state = f"waits: {found.reason}" if is_waiting else "stopping, then it waits again"
            print_document(settings, found, [f"{found.workload_id}: {state}"])


def _change_each(
    client: Any,
    settings: CliSettings,
    names: Iterable[str],
    call: Callable[..., Any],
    make_request: Callable[..., HoldWorkloadRequest | ReleaseWorkloadRequest | RequeueWorkloadRequest],
) -> Iterator[Workload]:
    """Calls for each workload that is named, by id, name or as `last`; yields each as it is answered."""

    def change(workload_id: str) -> Workload:
        found: Workload = call(make_request(workload_id=workload_id), timeout=settings.timeout_s).workload
        return found

    for name in dict.fromkeys(names):
        yield call_with_workload(client, settings, name, change)


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.option("--failed", is_flag=True, help="Of an array only the elements that failed or were cancelled.")
@click.pass_obj
def rerun(settings: CliSettings, /, workload: str, *, failed: bool) -> None:
    """Run a job, or an array, that has ended again as a new one, and print its id.

    It has the same command, variables, folder and resources, and its retries; it waits for no other job, and has no
    deadline.
    """
    with connect_operators(settings) as client:
        ended = find_workload(client, settings, workload)
        if failed and ended.array is None:
            raise click.UsageError("--failed is of arrays; name one, or leave it out")
        request = build_rerun(ended)
        if ended.array is not None:
            request = build_array_rerun(client, settings, ended, only_failed=failed)
        click.echo(client.submit_workload(request, timeout=settings.timeout_s).workload.workload_id)


def build_rerun(ended: Workload) -> SubmitWorkloadRequest:
    """Builds the submission that runs an ended job again; raises RequestRefused."""
    key, spec = ended.workload_id, ended.spec
    if spec.process is None:
        raise RequestRefused(f"{key} runs no command of its own", "submit it again with `eelctl submit`")
    if not ended.phase.is_ended:
        raise RequestRefused(
            f"{key} has not ended; it is {format_phase(ended)}", f"wait for it (`eelctl wait {key}`), or cancel it"
        )
    return SubmitWorkloadRequest(spec=prepare_rerun(spec))
