"""The changes of a what-if, as people write them on a command line or in a file.

Owns the options that `whatif` and `capacity` share and their order: nodes go,
nodes come, weights change, work ends, work is placed anew, work is submitted.
Another order, or a longer sequence, is written into a file. Must not know what
the changes do.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from eelgrid_controller.cli.amounts import CPU, MEMORY, SHARE
from eelgrid_controller.cli.failure import Refused
from eelgrid_controller.cli.policy import wanted_weights
from eelgrid_controller.cli.submit import from_flags, submit
from eelgrid_controller.cli.workload_file import read_workloads
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import (
    COPIES_MOST,
    IMAGINED_NODES_MOST,
    OBJECTIVES,
    AddNodes,
    CancelWorkloads,
    DrainNodes,
    NodeShape,
    PlaceAnew,
    SetWeights,
    SubmitCopies,
    Weights,
    WhatIfChange,
    WhatIfRequest,
)
from eelgrid_protos.plain import from_plain

__all__ = ["change_options", "changes_of", "shape_of"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE_BYTES_MOST = 64 * 1024 * 1024
_NO_BUDGET = (
    "placing does not depend on power budgets, limits of running jobs do; "
    "try budgets with eelctl promises --budget cluster=100kW"
)


def _no_budget(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(_NO_BUDGET)


_CHANGES = (
    click.option("--drain", multiple=True, metavar="NODE", help="Take a node out of use; it stays on, idle."),
    click.option("--remove", multiple=True, metavar="NODE", help="Take a node away, and its watts with it."),
    click.option("--add", multiple=True, metavar="COUNT:GPU:EACH", help="Add nodes: 10:H100-SXM5-80GB:8."),
    click.option("--add-like", multiple=True, metavar="COUNT:NODE", help="Add nodes like one that is there."),
    click.option("--node-cpu", type=CPU, default=0, help="CPUs of each added node.  [default: 24 for each GPU]"),
    click.option(
        "--node-memory", type=MEMORY, default=0, help="Memory of each added node.  [default: 3 times its GPUs']"
    ),
    click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="Put a named weighting in force."),
    click.option("--weight", multiple=True, metavar="NAME=VALUE", help="Change one weight; repeatable."),
    click.option("--cancel", multiple=True, metavar="WORKLOAD", help="End a workload."),
    click.option("--anew", is_flag=True, help="Place all work once more, from an empty cluster, oldest first."),
    click.option(
        "-f", "--file", type=click.File("r", encoding="utf-8"), help="Submit the workloads of a YAML file; - is stdin."
    ),
    click.option("--cpu", type=CPU, default=0, help="Submit a workload: CPUs of a replica."),
    click.option("--memory", type=MEMORY, default=0, help="Memory of a replica."),
    click.option("--gpus", type=click.IntRange(0, 64), help="GPUs of a replica."),
    click.option("--gpu-share", type=SHARE, help="Share of one GPU: 0.5."),
    click.option("--gpu-model", default="", help="GPU models that will do: A,B. Without it, any."),
    click.option("--replicas", type=click.IntRange(1, 10_000), default=1, show_default=True, help="How many of it."),
    click.option("--priority", type=int, default=0, show_default=True, help="More goes first."),
    click.option(
        "--copies",
        type=click.IntRange(1, COPIES_MOST),
        default=1,
        show_default=True,
        help="Submit each workload so many times.",
    ),
    click.option(
        "--changes",
        type=click.File("r", encoding="utf-8"),
        help="A sequence of changes in YAML or JSON, tried before those of the flags.",
    ),
    click.option(
        "--budget", hidden=True, expose_value=False, callback=_no_budget, help="See eelctl promises --budget."
    ),
)


def change_options(command: _Command) -> _Command:
    """Adds the options that name changes."""
    for option in reversed(_CHANGES):
        command = option(command)
    return command


def shape_of(text: str, node_cpu: int, node_memory: int, option: str) -> NodeShape:
    """`H100-SXM5-80GB:8` as a shape; raises BadParameter."""
    gpu, colon, each = text.rpartition(":")
    if not (colon and gpu and each.isascii() and each.isdigit() and 1 <= int(each) <= 64):
        raise click.BadParameter(f"{text!r}; write GPU:EACH such as H100-SXM5-80GB:8, 1 to 64", param_hint=option)
    return NodeShape(gpu=gpu, gpu_count=int(each), cpu_milli=node_cpu, memory_bytes=node_memory)


def _count(text: str, option: str) -> tuple[int, str]:
    count, colon, rest = text.partition(":")
    if not (colon and rest and count.isascii() and count.isdigit() and 1 <= int(count) <= IMAGINED_NODES_MOST):
        raise click.BadParameter(
            f"{text!r}; begin with the number of nodes and a colon, 1 to {IMAGINED_NODES_MOST}", param_hint=option
        )
    return int(count), rest


def _nodes(flags: dict[str, Any]) -> Iterator[DrainNodes | AddNodes]:
    if flags["drain"]:
        yield DrainNodes(node_names=flags["drain"])
    if flags["remove"]:
        yield DrainNodes(node_names=flags["remove"], remove=True)
    for text in flags["add"]:
        count, rest = _count(text, "--add")
        yield AddNodes(count=count, shape=shape_of(rest, flags["node_cpu"], flags["node_memory"], "--add"))
    for text in flags["add_like"]:
        count, name = _count(text, "--add-like")
        yield AddNodes(count=count, shape=NodeShape(like_node=name))


def _weights(flags: dict[str, Any], in_force: Callable[[], Weights]) -> Iterator[SetWeights]:
    if flags["weight"] or flags["objective"]:
        yield wanted_weights(flags["objective"], flags["weight"], in_force)


def _submissions(flags: dict[str, Any]) -> Iterator[SubmitCopies]:
    copies = flags["copies"]
    if flags["file"]:
        for request in read_workloads(flags["file"].read(_FILE_BYTES_MOST), flags["file"].name):
            yield SubmitCopies(spec=request.spec, copies=copies)
    if flags["cpu"] or flags["memory"] or flags["gpus"] or flags["gpu_share"]:
        # What is no flag here is as in `eelctl submit`.
        unsaid = submit.make_context("submit", ["--name", "new"]).params
        yield SubmitCopies(spec=from_flags({**unsaid, **flags}).spec, copies=copies)


def _from_file(file: Any) -> tuple[WhatIfChange, ...]:
    import yaml

    try:
        plain = yaml.safe_load(file.read(_FILE_BYTES_MOST))
    except yaml.YAMLError as error:
        raise Refused(f"{file.name}: is no YAML", "correct the YAML there") from error
    if not isinstance(plain, list):
        raise Refused(f"{file.name}: is no list", "write a list such as `- DrainNodes: {node_names: [a]}`")
    try:
        changes = [{"change": {key: value or {} for key, value in dict(row).items()}} for row in plain]
        return from_plain(WhatIfRequest, {"changes": changes}).changes
    except InvalidMessage as error:
        raise Refused(f"{file.name}: {error.message}", "correct the file", error.violations) from None
    except (TypeError, ValueError):
        raise Refused(f"{file.name}: a change is no mapping", "write `- PlaceAnew: {}` and the like") from None


def changes_of(flags: dict[str, Any], in_force: Callable[[], Weights]) -> tuple[WhatIfChange, ...]:
    """The changes in order; `in_force` tells the weights that single ones are changed of."""
    found: list[WhatIfChange] = list(_from_file(flags["changes"])) if flags["changes"] else []
    found.extend(WhatIfChange(change=change) for change in (*_nodes(flags), *_weights(flags, in_force)))
    if flags["cancel"]:
        found.append(WhatIfChange(change=CancelWorkloads(workload_ids=flags["cancel"])))
    if flags["anew"]:
        found.append(WhatIfChange(change=PlaceAnew()))
    found.extend(WhatIfChange(change=change) for change in _submissions(flags))
    return tuple(found)
