"""eelctl submit: one workload from flags, or any number from YAML.

Owns the flags. Everything is read and checked before the first call, so that a
mistake in the last document submits nothing.
"""

from collections.abc import Iterable
from typing import Any

import click

from eelgrid_controller.cli.amounts import CPU, MEMORY, SHARE
from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import document
from eelgrid_controller.cli.workload_file import read_workloads
from eelgrid_controller.cli.workloads import describe
from eelgrid_protos.messages import (
    Locality,
    Mobility,
    ResourceRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["from_flags", "submit"]

_KINDS = [kind.name.lower() for kind in WorkloadKind if kind]
_LOCALITIES = [locality.name.lower() for locality in Locality if locality]
_MOBILITIES = [way.name.lower() for way in Mobility if way]
_FILE_BYTES_MOST = 64 * 1024 * 1024


def _labels(pairs: Iterable[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{pair!r} is no label; write --label key=value", param_hint="--label")
        labels[key] = value
    return labels


def from_flags(flags: dict[str, Any]) -> SubmitWorkloadRequest:
    """The submission that the flags describe; raises UsageError or BadParameter."""
    if not flags["name"]:
        raise click.UsageError("give --name and what it needs, or -f FILE; see eelctl submit --help")
    gpus = flags["gpus"] if flags["gpus"] is not None else int(flags["gpu_share"] is not None)
    share = flags["gpu_share"] or (GPU_MILLI_WHOLE if gpus else 0)
    models = tuple(model.strip() for model in flags["gpu_model"].split(",") if model.strip())
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
            locality=Locality[flags["locality"].upper()] if flags["locality"] else Locality.UNSPECIFIED,
            labels=_labels(flags["label"]),
            mobility=Mobility[flags["mobility"].upper()] if flags["mobility"] else Mobility.UNSPECIFIED,
            request=ResourceRequest(
                cpu_milli=flags["cpu"],
                memory_bytes=flags["memory"],
                gpu_count=gpus,
                gpu_milli=share,
                gpu_models=models,
            ),
        ),
    )


def _from_file(file: Any, flags: dict[str, Any], context: click.Context) -> tuple[SubmitWorkloadRequest, ...]:
    given = [name for name in flags if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} and -f exclude each other; write it into the file")
    try:
        text = file.read(_FILE_BYTES_MOST)
    except UnicodeDecodeError:
        raise click.UsageError(f"{file.name} is not UTF-8 text") from None
    return read_workloads(text, file.name)


@click.command()
@click.option(
    "-f", "--file", type=click.File("r", encoding="utf-8"), help="YAML with one or several documents; - is stdin."
)
@click.option("--name", default="", help="The workload's name.")
@click.option(
    "--kind", type=click.Choice(_KINDS), default="batch_job", show_default=True, help="What it is measured by."
)
@click.option("--cpu", type=CPU, default=0, help="CPUs of a replica: 2.5 or 2500m.")
@click.option("--memory", type=MEMORY, default=0, help="Memory of a replica: 16GiB.")
@click.option("--gpus", type=click.IntRange(0, 64), help="GPUs of a replica.")
@click.option("--gpu-share", type=SHARE, help="Share of one GPU: 0.5.")
@click.option("--gpu-model", default="", help="GPU models that will do: A,B. Without it, any.")
@click.option("--replicas", type=click.IntRange(1, 10_000), default=1, show_default=True, help="How many of it.")
@click.option("--locality", type=click.Choice(_LOCALITIES), help="Replicas near each other, or apart.")
@click.option("--namespace", default="default", show_default=True, help="Whose it is.")
@click.option("--user", default="", help="Who submits it.")
@click.option("--queue", default="", help="Where it waits.")
@click.option("--priority", type=int, default=0, show_default=True, help="More goes first.")
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="A label; repeatable.")
@click.option(
    "--mobility", type=click.Choice(_MOBILITIES), help="How it may move when an operator moves work. [movable]"
)
@click.option("--id", default="", help="Its id: repeating the command with it is harmless.")
@click.option("--dry-run", is_flag=True, help="Say where it would go, and change nothing.")
@printing
@click.pass_context
def submit(context: click.Context, /, file: Any, dry_run: bool, **flags: Any) -> None:
    """Submit a workload, from flags or YAML.

    \b
    eelctl submit --name bert --cpu 8 --memory 32GiB --gpu-share 0.5 --gpu-model A10,T4
    eelctl submit -f jobs.yaml
    """  # noqa: D301
    settings: Settings = context.obj
    wanted = _from_file(file, flags, context) if file else (from_flags(flags),)
    with operators(settings) as client:
        for request in wanted:
            sent = SubmitWorkloadRequest(spec=request.spec, workload_id=request.workload_id, dry_run=dry_run)
            workload: Workload = client.submit_workload(sent, timeout=settings.timeout_s).workload
            document(settings, workload, _lines(workload, dry_run=dry_run))


def _lines(workload: Workload, *, dry_run: bool) -> Iterable[str]:
    if dry_run:
        yield "dry run: nothing was changed"
    yield from describe(workload)
