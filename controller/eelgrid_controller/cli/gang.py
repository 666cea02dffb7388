"""The options of run and submit by which a job becomes a part of a gang, and how commands show that.

Must not know when a gang starts, which the controller decides.
"""

from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.connection import add_options
from eelgrid_protos.messages import GANG_PARTS_MOST, GangPart, SubmitWorkloadRequest, Workload

# Of a command that submits work that may be a part of a gang; the parameters have the names of the message's fields.
gang_options = add_options(
    click.option(
        "--gang",
        default="",
        metavar="NAME",
        help="Start it in one step with the other parts of this gang, or not at all. Needs --gang-parts.",
    ),
    click.option(
        "--gang-parts",
        "parts",
        type=click.IntRange(2, GANG_PARTS_MOST),
        help="How many parts the gang has; none starts before all are submitted.",
    ),
    click.option(
        "--gang-least",
        "parts_least",
        type=click.IntRange(1, GANG_PARTS_MOST),
        help="How many parts, the first submitted, must start together. Default: all.",
    ),
)


def add_gang(request: SubmitWorkloadRequest, flags: dict[str, Any]) -> SubmitWorkloadRequest:
    """Returns a submission with the gang that the flags state; raises UsageError."""
    name, parts, least = flags["gang"], flags["parts"], flags["parts_least"]
    if not name:
        if parts is not None or least is not None:
            raise click.UsageError("--gang-parts and --gang-least need --gang, the name of the gang")
        return request
    if parts is None:
        raise click.UsageError("--gang needs --gang-parts, the number of its parts")
    # All of them is the default, so that parts which say so and parts which do not are of one gang.
    least = 0 if least in (None, parts) else least
    return replace(request, spec=replace(request.spec, gang=GangPart(name=name, parts=parts, parts_least=least)))


def describe_gang(workload: Workload) -> str:
    """Describes the gang of a workload; empty without one."""
    gang = workload.spec.gang
    if gang is None:
        return ""
    together = "" if gang.required_parts == gang.parts else f", the first {gang.required_parts} of which start together"
    return f"{gang.name}, of {gang.parts} parts{together}"
