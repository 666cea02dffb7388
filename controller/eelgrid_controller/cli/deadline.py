"""The options of run and submit by which a job states its deadline, and how commands show one.

Times are by the controller's clock, in UTC. Whether a deadline can be promised is decided by the controller.
"""

from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.connection import CliSettings, add_options
from eelgrid_controller.cli.reservation import parse_start_ns, read_now_ns
from eelgrid_controller.formatting import format_age, format_time
from eelgrid_protos.messages import JobDeadline, SubmitWorkloadRequest, Workload

# Of a command that submits work that may have a deadline.
deadline_options = add_options(
    click.option(
        "--deadline",
        default="",
        metavar="TIME",
        help="Promise that it ends by then, or refuse it: +6h, or 2027-01-31T08:00 in UTC. Needs a run time.",
    ),
    click.option(
        "--deadline-best-effort",
        is_flag=True,
        help="Accept it even if the deadline cannot be promised; reserve nothing.",
    ),
)


def add_deadline(
    client: Any, settings: CliSettings, request: SubmitWorkloadRequest, flags: dict[str, Any]
) -> SubmitWorkloadRequest:
    """Returns a submission with the deadline that the flags state; raises UsageError and BadParameter."""
    text, is_best_effort = flags["deadline"], flags["deadline_best_effort"]
    if not text:
        if is_best_effort:
            raise click.UsageError("--deadline-best-effort needs --deadline")
        return request
    end_ns = parse_deadline_ns(text, read_now_ns(client, settings))
    deadline = JobDeadline(end_ns=end_ns, best_effort=is_best_effort)
    return replace(request, spec=replace(request.spec, deadline=deadline))


def parse_deadline_ns(text: str, now_ns: int) -> int:
    """Parses a span from now, with a sign or without, or a time in UTC; raises BadParameter."""
    is_span = text[:1].isdigit() and text[-1:].isalpha() and ":" not in text
    return parse_start_ns(f"+{text}" if is_span else text, now_ns, "--deadline")


def describe_deadline(workload: Workload) -> str:
    """Describes by when a workload is to end and whether that is on course; empty without a deadline."""
    deadline = workload.spec.deadline
    return "" if deadline is None else f"{format_time(deadline.end_ns)}, {_describe_course(workload)}"


def _describe_course(workload: Workload) -> str:
    deadline, breach = workload.spec.deadline, workload.deadline_breach
    assert deadline is not None
    if workload.phase.is_ended:
        return "met" if workload.ended_ns <= deadline.end_ns else "missed"
    if breach is not None:
        return f"not kept since {format_time(breach.time_ns)}: {breach.cause}"
    return "without a promise" if deadline.best_effort else "promised and on course"


def format_deadline(deadline: JobDeadline | None, now_ns: int, *, is_broken: bool) -> str:
    """Formats how long it is to a workload's deadline, with a mark where it is not promised or not kept."""
    if deadline is None:
        return ""
    left_s = (deadline.end_ns - now_ns) / 1e9
    text = f"in {format_age(left_s)}" if left_s > 0.0 else "passed"
    mark = " (broken)" if is_broken else " (best effort)" if deadline.best_effort else ""
    return text + mark
