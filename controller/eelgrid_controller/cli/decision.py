"""eelctl decision export and replay: a decision as a file, and whether it comes out the same again.

Owns the files. `replay` needs no controller: it decides here, with the planner
of this installation.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.failure import Refused
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import printed
from eelgrid_protos import __version__
from eelgrid_protos.messages import ExportDecisionRequest
from eelgrid_protos.plain import to_plain
from eelgrid_protos.safe_text import printable_json

__all__ = ["decision"]

_FILE_BYTES_MOST = 1024 * 1024 * 1024
_TIMEOUT_LEAST_S = 300.0
_SHOWN = 40


@click.group()
def decision() -> None:
    """Export a decision with all that it depended on, or replay one."""


@decision.command()
@click.argument("workload")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Where to write it; - is stdout.  [default: WORKLOAD.decision.json]",
)
@click.pass_obj
def export(settings: Settings, workload: str, file: Path | None) -> None:
    """Write the last decision on a workload into a file."""
    with operators(settings) as client:
        request = ExportDecisionRequest(workload_id=workload)
        parts = client.export_decision(request, timeout=max(settings.timeout_s, _TIMEOUT_LEAST_S))
        text = "".join(part.text for part in parts)
    target = file or Path(f"{workload.replace('/', '_')}.decision.json")
    if str(target) == "-":
        click.echo(printable_json(text))
        return
    try:
        target.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"{target}: {error.strerror}", "name a file that can be written with --file") from None
    click.echo(f"{target}: {len(text):,} bytes; replay it with `eelctl decision replay {target}`")


def _read(file: Any) -> Any:
    try:
        return json.loads(file.read(_FILE_BYTES_MOST))
    except ValueError:
        raise Refused(f"{file.name}: is no JSON", "give a file that `eelctl decision export` wrote") from None


def _told(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """An outcome with its explanation field by field."""
    from eelgrid_controller.compact import explanation_from_rows

    return {**outcome, "explanation": [to_plain(found) for found in explanation_from_rows(outcome["explanation"])]}


@decision.command()
@click.argument("file", type=click.File("r", encoding="utf-8"))
@printing
@click.pass_context
def replay(context: click.Context, file: Any) -> None:
    """Decide anew on what a file holds; exit code 1 if it comes out otherwise."""
    from eelgrid_controller.decision import DecisionUnreadable
    from eelgrid_controller.decision import replay as decide

    try:
        found = decide(_read(file))
    except DecisionUnreadable as error:
        raise Refused(f"{file.name}: {error}", "give a file that `eelctl decision export` wrote") from None
    lines = [f"{found.workload_id}, decided at revision {found.revision} by version {found.made_by}"]
    if found.made_by != __version__:
        lines.append(f"this is version {__version__}: a difference may be the planner's")
    if found.differences:
        lines.append(f"different in {len(found.differences)}:")
        lines.extend(f"  {line}" for line in found.differences[:_SHOWN])
    else:
        lines.append("equal to the last bit")
    plain = {
        "workload_id": found.workload_id,
        "revision": found.revision,
        "equal": not found.differences,
        "differences": list(found.differences),
        "recorded": _told(found.recorded),
        "now": _told(found.now),
    }
    printed(context.obj, plain, lines)
    if found.differences:
        context.exit(1)
