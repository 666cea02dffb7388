"""eelctl run, logs, attach, wait and jobs: processes on the machines of a cluster, or on this one.

`run` stays attached: it prints what the process prints and exits with its code, 128 + n for a signal n, or 125 where
the controller refused the job or cannot be reached, as container tools do. Only the output of the job is on standard
output.
"""

import getpass
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.arrays import add_array, array_options, describe_reason, find_array, print_elements
from eelgrid_controller.cli.attach import (
    ATTACH_TAIL_LINES,
    AWAY_MOST_S,
    announce_detached,
    exchange,
    has_terminal,
    read_terminal_size,
    reads_input,
)
from eelgrid_controller.cli.completion import complete_workloads
from eelgrid_controller.cli.connection import (
    CPU,
    DURATION,
    MEMORY,
    AmountType,
    CliError,
    CliSettings,
    cli_error_for,
    connect_operators,
    output_option,
    preemption_options,
)
from eelgrid_controller.cli.deadline import add_deadline, deadline_options
from eelgrid_controller.cli.gang import add_gang, gang_options
from eelgrid_controller.cli.interference import build_sharing, sharing_options
from eelgrid_controller.cli.job_control import add_schedule, schedule_options
from eelgrid_controller.cli.nodes import limit_option
from eelgrid_controller.cli.output import TableColumn, echo, list_options, print_list
from eelgrid_controller.cli.preferences import build_model_data, build_preference, preference_options, split_names
from eelgrid_controller.cli.workload_listing import WorkloadListing
from eelgrid_controller.cli.workload_names import LIVE_PHASES, find_workload
from eelgrid_controller.cli.workloads import read_clock
from eelgrid_controller.formatting import (
    format_age,
    format_energy,
    format_gpu,
    format_progress,
    format_summary_phase,
    parse_duration_s,
    parse_gpu_milli,
    parse_memory_bytes,
)
from eelgrid_protos.messages import (
    STOP_SIGNALS,
    AttachOpening,
    CancelWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    Mobility,
    ProcessSpec,
    QueryEnergyRequest,
    ReadLogsRequest,
    ResourceRequest,
    StandardInput,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
    WorkloadSummary,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# What a shell of the user has and most programs need; everything is passed on with --env ALL.
_PASSED_ON = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TMPDIR", "TZ", "USER")
_PASSED_ON_BEGINNINGS = ("CONDA_", "LC_", "VIRTUAL_ENV")
_ALL = "ALL"
_CANCELLED = 143
# More groups than the ledger answers are left out.
_ENERGY_ROWS_MOST = 10_000
# As Slurm's --signal has it.
_WARN_BEFORE_S = 60.0
_POLL_FIRST_S, _POLL_LONGEST_S = 0.02, 0.5


class JobNotRun(CliError):
    """The controller refused the job or cannot be reached."""

    exit_code, reason = 125, "not_run"


def _parse_gpus(text: str) -> int:
    """Parses a number of GPUs, or a share of one, in thousandths."""
    if text.isascii() and text.isdigit():
        return int(text) * GPU_MILLI_WHOLE
    return parse_gpu_milli(text)


class WarningType(click.ParamType[Any]):
    """A click parameter type for a signal and how long before the end it is sent: USR1@120, USR1@2m."""

    name = "SIGNAL@SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the signal's name and seconds, a minute where they are not said."""
        if isinstance(value, tuple):
            return value
        name, at, before = value.partition("@")
        name = name.strip().upper().removeprefix("SIG")
        if name not in STOP_SIGNALS:
            self.fail(f"{value!r} names no signal; write one of {', '.join(STOP_SIGNALS)}, @ and seconds", param, ctx)
        try:
            return name, float(parse_duration_s(before)) if at else _WARN_BEFORE_S
        except ValueError as error:
            self.fail(str(error), param, ctx)


_GPUS = AmountType("GPUS", _parse_gpus)


def collect_environment(wanted: Iterable[str], own: dict[str, str]) -> dict[str, str]:
    """Returns the variables of a job: the usual ones of this shell, and those that are named; raises BadParameter."""
    passed = {name: text for name, text in own.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_BEGINNINGS)}
    for word in wanted:
        name, equals, text = word.partition("=")
        if word == _ALL:
            passed |= own
        elif equals:
            passed[name] = text
        elif name in own:
            passed[name] = own[name]
        else:
            raise click.BadParameter(f"{name} is not set here; write --env {name}=VALUE", param_hint="--env")
    # The agent sets these, and a name that no shell can set is not passed on.
    return {
        name: text
        for name, text in passed.items()
        if name.isidentifier() and name.isascii() and not name.startswith(("EELGRID_", "CUDA_VISIBLE", "CUDA_DEVICE_"))
    }


def build_job(command: tuple[str, ...], flags: dict[str, Any]) -> SubmitWorkloadRequest:
    """Builds the submission of a command; raises BadParameter."""
    gpus = flags["gpus"] or 0
    request = ResourceRequest(
        # One CPU where nothing is asked for: a job that counts for nothing would be one of thousands at once.
        cpu_milli=flags["cpus"] if flags["cpus"] is not None else 1000 if not gpus else 0,
        memory_bytes=flags["memory"] or 0,
        gpu_count=-(-gpus // GPU_MILLI_WHOLE),
        gpu_milli=min(gpus, GPU_MILLI_WHOLE),
        gpu_models=split_names(flags["gpu_model"]),
    )
    warn_signal, warn_before_s = flags.get("warning") or ("", 0.0)
    process = ProcessSpec(
        argv=command,
        environment=collect_environment((*flags["env"], *_terminal_variables(flags)), dict(os.environ)),
        working_directory=str(Path(flags["workdir"] or Path.cwd()).absolute()),
        # An interactive shell ignores TERM, and passes HUP on to what it runs.
        stop_signal=flags["stop_signal"] or ("HUP" if flags.get("pty") else "TERM"),
        grace_s=float(flags["grace_s"]),
        time_limit_s=float(flags["time_limit_s"] or 0),
        log_bytes_most=flags["log_size"],
        warn_signal=warn_signal,
        warn_before_s=warn_before_s,
        standard_input=_choose_input(flags),
        terminal_size=read_terminal_size() if flags.get("pty") else None,
    )
    return SubmitWorkloadRequest(
        spec=WorkloadSpec(
            name=flags["name"] or _name_of(command[0]),
            request=request,
            replicas=flags["replicas"],
            namespace=flags["namespace"],
            user=flags["user"] or getpass.getuser(),
            queue=flags["queue"],
            priority=flags["priority"],
            mobility=Mobility.FIXED,
            process=process,
            expected_runtime_s=None if flags["expect"] is None else float(flags["expect"]),
            priority_class=flags.get("priority_class", ""),
            never_preempts=flags.get("never_preempts", False),
            gpu_preference=build_preference(flags),
            model_data=build_model_data(flags),
            gpu_sharing=build_sharing(flags),
        )
    )


def _terminal_variables(flags: dict[str, Any]) -> tuple[str, ...]:
    return ("TERM",) if flags.get("pty") and "TERM" in os.environ else ()


def _choose_input(flags: dict[str, Any]) -> StandardInput:
    if flags.get("pty"):
        return StandardInput.TERMINAL
    return StandardInput.PIPE if flags.get("interactive") else StandardInput.UNSPECIFIED


def _name_of(program: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(program).name)
    return kept.strip("-")[:64] or "job"


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--gpus", type=_GPUS, help="GPUs: 2, or a share of one: 0.5.")
@click.option("--gpu-model", default="", help="Acceptable GPU models, by any of their names: A,B; any by default.")
@preference_options
@sharing_options
@click.option("--cpus", type=CPU, help="CPUs: 4 or 500m. Default: 1 without GPUs.")
@click.option("--memory", type=MEMORY, help="Memory: 16GiB.")
@click.option("--time", "time_limit_s", type=DURATION, help="Time limit: 90s, 30m, 2h. Default: none.")
@click.option("--expect", type=DURATION, help="How long it is expected to run: 30m, 2h. Default: its time limit.")
@click.option("--name", default="", help="Name of the job. Default: the program's.")
@click.option(
    "--replicas", type=click.IntRange(1, 512), default=1, show_default=True, help="Processes, placed together."
)
@click.option(
    "--env", multiple=True, metavar="NAME[=VALUE]", help="Variable to set or pass on; ALL passes all; repeatable."
)
@click.option("--workdir", default="", metavar="DIR", help="Working directory. Default: this one.")
@click.option(
    "--stop-signal",
    type=click.Choice(STOP_SIGNALS),
    default=None,
    help="Asks it to end. Default: TERM, or HUP with a terminal.",
)
@click.option(
    "--grace", "grace_s", type=DURATION, default="10s", show_default=True, help="From the stop signal to KILL."
)
@click.option(
    "--signal",
    "warning",
    type=WarningType(),
    help="Announces the end: send this signal so long before the time limit, or before the stop signal.",
)
@click.option(
    "--log-size",
    type=AmountType("SIZE", parse_memory_bytes),
    default="64MiB",
    show_default=True,
    help="Output beyond this is discarded.",
)
@click.option("--namespace", default="default", show_default=True, help="Namespace of the job.")
@click.option("--user", default="", help="User who submits it. Default: you.")
@click.option("--queue", default="", help="Queue in which it waits.")
@click.option("--priority", type=int, default=0, show_default=True, help="Higher priority is placed first.")
@preemption_options
@schedule_options
@array_options
@gang_options
@click.option("--dry-run", is_flag=True, help="Print what would be run, and submit nothing.")
@deadline_options
@click.option("-d", "--detach", is_flag=True, help="Print the id and return.")
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on to it, and its end.")
@click.option("-t", "--pty", is_flag=True, help="Give it a terminal, and pass on what is typed; `~.` detaches.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(settings: CliSettings, /, *, command: tuple[str, ...], detach: bool, dry_run: bool, **flags: Any) -> None:
    """Run COMMAND as a job: print what it prints, and exit with its code.

    It waits for its GPUs in the queue, runs as the agent's user in this directory, and goes on if you leave. Ctrl-C asks
    whether to leave it or to cancel it. Only the usual variables of this shell are passed on; the controller keeps them.

    \b
    eelctl run --gpus 1 -- python train.py
    eelctl run -d --gpus 0.5 --time 2h --env WANDB_API_KEY -- ./sweep.sh
    eelctl run -d --array %4 --param lr=0.1,0.01 --param seed=0-3 -- python train.py --lr {lr} --seed {seed}
    eelctl run --pty --gpus 1 -- bash
    """  # noqa: D301
    with connect_operators(settings) as client:
        try:
            request = add_array(add_gang(build_job(command, flags), flags), flags["array"], flags["parameters"])
            request = add_deadline(client, settings, add_schedule(client, settings, request, flags), flags)
            request = replace(request, dry_run=dry_run)
            workload = client.submit_workload(request, timeout=settings.timeout_s).workload
        except click.ClickException:
            raise
        except Exception as error:
            stop = cli_error_for(error, settings)
            if stop is None:
                raise
            raise JobNotRun(stop.message, stop.remedy, stop.violations) from None
        if dry_run:
            print_elements(settings, request)
            return
        if detach:
            click.echo(workload.workload_id)
            return
        if workload.array is not None:
            elements = f"eelctl jobs --array {workload.workload_id}"
            echo(f"{workload.workload_id}: waits for its elements to end; see {elements}", err=True)
        sys.exit(_follow(client, settings, workload))


def _follow(client: Any, settings: CliSettings, workload: Workload) -> int:
    """Follows a job to its end, with input if it reads any, or waits for that of an array, which has no output of its own.

    Returns its exit code, or 0 if somebody detached.
    """
    asked, is_cancelled = workload.array is not None, False
    workload_id = workload.workload_id
    is_interactive = reads_input(workload)
    while True:
        try:
            if not asked and not is_interactive:
                copy_output(client, settings, ReadLogsRequest(workload_id=workload_id, follow=True))
            elif not asked:
                opening = AttachOpening(workload_id=workload_id, sends_input=True)
                if not exchange_input(client, settings, opening, workload):
                    return 0
            return finish_job(wait_end(client, settings, workload_id))
        except KeyboardInterrupt:
            if not is_cancelled and _asks_to_detach(workload_id):
                return 0
            asked = is_cancelled = True
            echo(f"cancelling {workload_id}", err=True)
            client.cancel_workload(CancelWorkloadRequest(workload_id=workload_id), timeout=settings.timeout_s)


def _asks_to_detach(workload_id: str) -> bool:
    """Asks what to do with a job; without a terminal nobody can answer, and it is cancelled."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = click.prompt(
            f"\n{workload_id} is running: detach or cancel",
            type=click.Choice(["detach", "cancel"]),
            default="detach",
            err=True,
        )
    except (click.Abort, KeyboardInterrupt):
        return False
    if answer == "detach":
        echo(f"it goes on: eelctl logs -f {workload_id}, eelctl cancel {workload_id}", err=True)
    return bool(answer == "detach")


def finish_job(workload: Workload) -> int:
    """Says how a job ended if it did not succeed; returns its exit code."""
    if workload.phase is not WorkloadPhase.SUCCEEDED:
        why = f": {workload.reason}" if workload.reason else ""
        echo(f"{workload.workload_id} {workload.phase.name.lower()}{why}", err=True)
    code = workload.exit_code
    return _CANCELLED if code is None else code


def exchange_input(client: Any, settings: CliSettings, opening: AttachOpening, workload: Workload) -> bool:
    """Attaches to a job; returns False if somebody detached. A job that was never started has no output."""
    from eelgrid_protos import faults

    try:
        is_over = exchange(client, opening, is_terminal=has_terminal(workload))
    except faults.NotFound:
        request = GetWorkloadRequest(workload_id=opening.workload_id)
        found = client.get_workload(request, timeout=settings.timeout_s).workload
        if not found.phase.is_ended or any(one.started_ns for one in found.attempts):
            raise
        is_over = True
    if not is_over:
        announce_detached(opening.workload_id)
    return is_over


def copy_output(client: Any, settings: CliSettings, request: ReadLogsRequest) -> None:
    """Copies output of a job to standard output; goes on where it was after a lost connection.

    A job that never wrote any, since it was not started, has none.
    """
    from eelgrid_protos import faults

    away_since_s: float | None = None
    while True:
        try:
            for part in client.read_logs(request):
                away_since_s = None
                request = replace(request, offset=part.next_offset, tail_lines=None)
                sys.stdout.write(part.text)
                sys.stdout.flush()
        except faults.Unavailable:
            now_s = time.monotonic()
            away_since_s = away_since_s or now_s
            if not request.follow or now_s - away_since_s > AWAY_MOST_S:
                raise
            time.sleep(_POLL_LONGEST_S)
        except faults.NotFound:
            found = client.get_workload(
                GetWorkloadRequest(workload_id=request.workload_id), timeout=settings.timeout_s
            ).workload
            if found.phase.is_ended and not any(one.started_ns for one in found.attempts):
                return
            raise
        else:
            return


def wait_end(client: Any, settings: CliSettings, workload_id: str) -> Workload:
    """Waits until a workload has ended, also while the controller restarts."""
    from eelgrid_protos import faults

    request, pause_s, away_since_s = GetWorkloadRequest(workload_id=workload_id), _POLL_FIRST_S, None
    while True:
        try:
            found: Workload = client.get_workload(request, timeout=settings.timeout_s).workload
        except (faults.Unavailable, faults.DeadlineExceeded):
            now_s = time.monotonic()
            away_since_s = away_since_s or now_s
            if now_s - away_since_s > AWAY_MOST_S:
                raise
        else:
            away_since_s = None
            if found.phase.is_ended:
                return found
        time.sleep(pause_s)
        pause_s = min(2.0 * pause_s, _POLL_LONGEST_S)


@click.command()
@click.argument("workload")
@click.option("-f", "--follow", is_flag=True, help="Wait for its start and for more output, until it ends.")
@click.option("--tail", "tail_lines", type=click.IntRange(0, 1_000_000), help="Only so many lines before the end.")
@click.option(
    "--replica", type=click.IntRange(0, 511), default=0, show_default=True, help="The process of this replica."
)
@click.option(
    "--attempt", type=click.IntRange(1), default=None, help="Its output in this attempt, from 1. Default: the newest."
)
@click.pass_obj
def logs(
    settings: CliSettings, workload: str, *, follow: bool, tail_lines: int | None, replica: int, attempt: int | None
) -> None:
    """Print the output of the job WORKLOAD, by its id, its name, or `last`."""
    with connect_operators(settings) as client:
        workload_id = find_workload(client, settings, workload).workload_id
        try:
            copy_output(
                client,
                settings,
                ReadLogsRequest(
                    workload_id=workload_id,
                    replica=replica,
                    tail_lines=tail_lines,
                    follow=follow,
                    attempt=attempt or 0,
                ),
            )
        except KeyboardInterrupt:
            return


@click.command()
@click.argument("workload", shell_complete=complete_workloads)
@click.option(
    "--tail",
    "tail_lines",
    type=click.IntRange(0, 1_000_000),
    default=ATTACH_TAIL_LINES,
    show_default=True,
    help="Begin so many lines before the end of the output.",
)
@click.option("--no-input", is_flag=True, help="Print its output only, and pass nothing on.")
@click.option(
    "--replica", type=click.IntRange(0, 511), default=0, show_default=True, help="The process of this replica."
)
@click.pass_obj
def attach(settings: CliSettings, /, *, workload: str, tail_lines: int, no_input: bool, replica: int) -> None:
    """Attach to the job WORKLOAD: print what it prints, and pass on what is typed if it has a standard input.

    Of a job with a terminal (`eelctl run --pty`) every key goes to the job, Ctrl-C too; `~.` at the beginning of a line
    detaches. Of a job with a pipe (`eelctl run --interactive`) the end of the input is passed on, and Ctrl-C detaches.
    It exits with the code of the job, or with 0 if you detach.
    """
    with connect_operators(settings) as client:
        found = find_workload(client, settings, workload)
        opening = AttachOpening(
            workload_id=found.workload_id,
            replica=replica,
            tail_lines=tail_lines,
            sends_input=reads_input(found) and not no_input and not found.phase.is_ended,
        )
        try:
            is_over = exchange(client, opening, is_terminal=has_terminal(found))
        except KeyboardInterrupt:
            is_over = False
        if not is_over:
            announce_detached(found.workload_id)
            return
        sys.exit(finish_job(wait_end(client, settings, found.workload_id)))


@click.command()
@click.argument("workload", nargs=-1, required=True)
@click.pass_obj
def wait(settings: CliSettings, workload: tuple[str, ...]) -> None:
    """Wait until jobs have ended; exit with the code of the first that did not succeed.

    Of an array that is the highest code of its elements.
    """
    with connect_operators(settings) as client:
        ids = [find_workload(client, settings, name).workload_id for name in workload]
        codes = [finish_job(wait_end(client, settings, workload_id)) for workload_id in ids]
    sys.exit(next((code for code in codes if code), 0))


def _read_energy(client: Any, settings: CliSettings, jobs: Sequence[WorkloadSummary], now_ns: int) -> dict[str, float]:
    """Reads the joules of jobs from the ledger, which has them a minute later; empty if it cannot answer."""
    from eelgrid_protos import faults

    begun = [job.submitted_ns for job in jobs if job.processes_reported]
    if not begun:
        return {}
    request = QueryEnergyRequest(
        begin_ns=min(begun), end_ns=now_ns, group_by=("workload",), rows_most=_ENERGY_ROWS_MOST
    )
    try:
        groups = client.query_energy(request, timeout=settings.timeout_s).groups
    except faults.Fault:
        return {}
    found = {
        group.values[0]: (group.spent.bare_idle_mj + group.spent.context_idle_mj + group.spent.active_mj) / 1e3
        for group in groups
    }
    arrays = {job.workload_id for job in jobs if job.array is not None}
    sums = dict.fromkeys(arrays & {key.rpartition("_")[0] for key in found}, 0.0)
    for key, energy_j in found.items():
        if key.rpartition("_")[0] in sums:
            sums[key.rpartition("_")[0]] += energy_j
    return {**found, **sums}


def _build_job_columns(
    now_ns: Callable[[], int], energy_j: Mapping[str, float]
) -> tuple[TableColumn[WorkloadSummary], ...]:
    def energy(row: WorkloadSummary) -> str:
        found = energy_j.get(row.workload_id)
        return "-" if found is None else format_energy(found)

    def age(row: WorkloadSummary) -> str:
        return format_age((now_ns() - row.submitted_ns) / 1e9)

    def took(row: WorkloadSummary) -> str:
        end_ns = row.ended_ns or now_ns()
        return format_age(max(0, end_ns - row.started_ns) / 1e9) if row.started_ns else "-"

    return (
        TableColumn("ID", lambda w: w.workload_id, width=8),
        TableColumn("NAME", lambda w: w.name, width=16),
        TableColumn("USER", lambda w: w.user or w.owner, width=8),
        TableColumn("STATE", format_summary_phase, width=9),
        TableColumn("GPUS", lambda w: format_gpu(w.gpu_milli) if w.gpu_milli else "-", right=True, width=4),
        TableColumn("AGE", age, right=True, width=6),
        TableColumn("RAN", took, right=True, width=6),
        TableColumn("PROGRESS", format_progress, right=True, width=8),
        TableColumn("ENERGY", energy, right=True, width=8),
        TableColumn("EXIT", lambda w: "-" if w.exit_code is None else str(w.exit_code), right=True, width=4),
        TableColumn("REASON", describe_reason),
    )


@click.command()
@click.option("-a", "--all", "every", is_flag=True, help="Also jobs that ended.")
@click.option("--user", default="", help="Only jobs of this user.")
@click.option("--elements", is_flag=True, help="Each element of an array, in place of the array.")
@click.option("--array", metavar="ARRAY", help="Only the elements of this array, also those that ended.")
@limit_option
@list_options(*_build_job_columns(lambda: 0, {}))
@output_option
@click.pass_obj
def jobs(
    settings: CliSettings, *, every: bool, user: str, elements: bool, array: str | None, limit: int | None
) -> None:
    """List jobs that wait or run, in order of submission, and arrays in one line each; jobs of Slurm once they have begun.

    ENERGY is what the ledger has of a job, a minute later.
    """
    with connect_operators(settings) as client:
        array_id = find_array(client, settings, array).workload_id if array else ""
        request = ListWorkloadsRequest(
            phases=() if every or array_id else LIVE_PHASES,
            user=user,
            array_id=array_id,
            whole_arrays=not (elements or array_id),
        )
        listing, fetched = WorkloadListing(client, settings), settings.fetch_limit(limit)
        found = listing.iterate_rows(request, is_brief=fetched is not None)
        processes = (row for row in found if row.runs_processes or row.processes_reported)
        mine = list(islice(processes, None if fetched is None else min(fetched, sys.maxsize)))
        clock = read_clock(client, settings)
        columns = _build_job_columns(clock, _read_energy(client, settings, mine, clock()))
        hint = "" if every else "; --all includes those that ended"
        print_list(
            settings,
            columns,
            mine,
            empty=f"no job waits or runs; start one with `eelctl run -- COMMAND`{hint}",
            limit=limit,
            plain=listing.to_plain,
        )
