"""eelctl cordon, uncordon and drain: close nodes or GPUs to new work, open them again, and empty them.

A target is a node, or one GPU of it as NODE/INDEX or NODE/UUID; targets of one node are one call. The controller
empties what is drained, so `drain` only asks for it and then watches until nothing is left there; ending the command
does not end the drain.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_nodes_and_gpus
from eelgrid_controller.cli.confirmation import confirm_change, list_names, yes_option
from eelgrid_controller.cli.connection import (
    DURATION,
    CliError,
    CliSettings,
    NameNotFound,
    UsageMismatch,
    connect_operators,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.output import echo, print_plain
from eelgrid_controller.formatting import count_noun, format_age
from eelgrid_protos.messages import (
    CordonNodeRequest,
    CordonStatus,
    DrainedWorkload,
    DrainNodeRequest,
    DrainNodeResponse,
    DrainOutcome,
    ListNodesRequest,
    Node,
    UncordonNodeRequest,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.values import dataclass

_POLL_S = 1.0
_NAMED_MOST = 5


@dataclass(frozen=True, slots=True)
class CordonTarget:
    """A node and the GPUs of it that are meant, by index or UUID; all of it where none are named."""

    node_name: str
    gpus: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How lines begin: `n7`, or `n7/0`, or `n7/0,1`."""
        return f"{self.node_name}/{','.join(self.gpus)}" if self.gpus else self.node_name


def group_targets(texts: Iterable[str]) -> list[CordonTarget]:
    """Returns the targets, with all GPUs of a node in one; raises UsageError if a node is named with GPUs of it."""
    gpus: dict[str, dict[str, None]] = {}
    whole = set[str]()
    for text in texts:
        name, slash, gpu = text.partition("/")
        if not name or (slash and not gpu):
            raise click.UsageError(f"{text!r} names no node; write NODE, NODE/INDEX or NODE/UUID")
        gpus.setdefault(name, {}).update({gpu: None} if slash else {})
        whole |= {name} if not slash else set()
    both = sorted(name for name in whole if gpus[name])
    if both:
        raise click.UsageError(f"{both[0]} is named as a whole and by GPUs; name one or the other")
    return [CordonTarget(name, tuple(found)) for name, found in gpus.items()]


def describe_cordon_status(cordon: CordonStatus, indexes: dict[str, int], now_ns: int) -> str:
    """Formats a cordon in a line: what is cordoned, by whom, why, since when, and how far its drain is."""
    index = indexes.get(cordon.gpu_uuid)
    what = "cordoned" if not cordon.gpu_uuid else f"GPU {cordon.gpu_uuid if index is None else index} cordoned"
    by = f" by {cordon.user}" if cordon.user else ""
    since = f" for {format_age((now_ns - cordon.since_ns) / 1e9)}"
    reason = f": {cordon.reason}" if cordon.reason else ""
    return f"{what}{by}{since}{reason}{_drain_suffix(cordon, now_ns)}"


def _drain_suffix(cordon: CordonStatus, now_ns: int) -> str:
    if not cordon.draining:
        return ""
    if not cordon.workloads:
        return "; drained"
    left_s = (cordon.deadline_ns - now_ns) / 1e9
    until = f", grace ends in {format_age(left_s)}" if left_s > 0.0 else ", grace is over" if cordon.deadline_ns else ""
    return f"; draining, {count_noun(cordon.workloads, 'workload')} left{until}"


def cordon_word(cordons: Sequence[CordonStatus]) -> str:
    """Formats the state of a node or GPU by its cordons: cordoned, draining 3 left, drained; empty without any."""
    if not cordons:
        return ""
    draining = [cordon.workloads for cordon in cordons if cordon.draining]
    return "cordoned" if not draining else f"draining {max(draining)} left" if max(draining) else "drained"


_targets_argument = click.argument(
    "targets", nargs=-1, required=True, metavar="NODE|NODE/GPU...", shell_complete=complete_nodes_and_gpus
)
_reason_option = click.option("--reason", default="", help="Why, for everybody who sees it: 'fan broken'.")


@click.command()
@_targets_argument
@_reason_option
@output_option
@click.pass_obj
def cordon(settings: CliSettings, targets: tuple[str, ...], reason: str) -> None:
    """Close nodes, or GPUs of them, to new work; what runs there goes on. Requires the role admin.

    A cordon holds until `eelctl uncordon`, also over restarts. Cordoning again changes the reason and ends a drain.

    \b
    eelctl cordon gpu-7 --reason 'fan broken'
    eelctl cordon gpu-7/3
    """  # noqa: D301
    results = []
    with connect_operators(settings) as client:
        for target in group_targets(targets):
            request = CordonNodeRequest(node_name=target.node_name, gpus=target.gpus, reason=reason)
            found = client.cordon_node(request, timeout=settings.timeout_s)
            left = max((one.workloads for one in _own(found.node, target)), default=0)
            runs = f"; {count_noun(left, 'workload')} {'runs' if left == 1 else 'run'} on there" if left else ""
            what = "cordoned before, now with this reason" if found.was_cordoned else "cordoned"
            results.append((to_plain(found), f"{target.title}: {what}{runs}"))
    print_plain(settings, [plain for plain, _ in results], [line for _, line in results])


@click.command()
@_targets_argument
@output_option
@click.pass_obj
def uncordon(settings: CliSettings, targets: tuple[str, ...]) -> None:
    """Open nodes, or GPUs of them, to new work again; ends their drain. Requires the role admin.

    Only operators' cordons are lifted: a GPU that its agent cordoned for its errors stays so until the agent lifts that,
    and GPUs that were cordoned one by one are uncordoned one by one.

    \b
    eelctl uncordon gpu-7
    eelctl uncordon gpu-7/3
    """  # noqa: D301
    results = []
    with connect_operators(settings) as client:
        for target in group_targets(targets):
            request = UncordonNodeRequest(node_name=target.node_name, gpus=target.gpus)
            found = client.uncordon_node(request, timeout=settings.timeout_s)
            lines = [f"{target.title}: {'uncordoned' if found.was_cordoned else 'not cordoned'}"]
            lines += _remaining_cordons(found.node, target)
            results.append((to_plain(found), lines))
    print_plain(settings, [plain for plain, _ in results], [line for _, lines in results for line in lines])


def _remaining_cordons(node: Node, target: CordonTarget) -> Iterator[str]:
    """Yields what of the target still takes no new work, and what would lift that."""
    name = node.inventory.node_name
    meant = {gpu.uuid: gpu for gpu in node.inventory.gpus if _is_meant(gpu.index, gpu.uuid, target)}
    for gpu in meant.values():
        if gpu.cordon:
            yield f"  GPU {gpu.index} stays cordoned by its agent, which lifts that itself: {gpu.cordon}"
    for one in node.cordons:
        if not one.gpu_uuid and target.gpus:
            yield f"  the whole node is cordoned: eelctl uncordon {name}"
        elif one.gpu_uuid in meant:
            index = meant[one.gpu_uuid].index
            yield f"  GPU {index} was cordoned by itself: eelctl uncordon {name}/{index}"


def _is_meant(index: int, uuid: str, target: CordonTarget) -> bool:
    return not target.gpus or str(index) in target.gpus or uuid in target.gpus


def _own(node: Node, target: CordonTarget) -> list[CordonStatus]:
    """Returns the cordons that the target names."""
    indexes = {gpu.uuid: gpu.index for gpu in node.inventory.gpus}
    if not target.gpus:
        return [one for one in node.cordons if not one.gpu_uuid]
    return [
        one for one in node.cordons if one.gpu_uuid and _is_meant(indexes.get(one.gpu_uuid, -1), one.gpu_uuid, target)
    ]


@click.command()
@_targets_argument
@_reason_option
@click.option(
    "--grace", "grace_s", type=DURATION, help="After so long, return what is left to the queue: 30m. Default: wait."
)
@click.option(
    "--force", is_flag=True, help="After the grace, return also work that is declared fixed or runs in MIG slices."
)
@click.option("--dry-run", is_flag=True, help="Show what would become of the work there, and change nothing.")
@click.option("--no-wait", is_flag=True, help="Do not wait until nothing is left there.")
@click.option("--timeout", "wait_s", type=DURATION, help="Wait at most so long: 2h. The drain goes on.")
@yes_option
@output_option
@click.pass_obj
def drain(settings: CliSettings, /, targets: tuple[str, ...], wait_s: int | None, **flags: Any) -> None:
    """Cordon nodes, or GPUs of them, and move the work there elsewhere. Requires the role admin.

    Work that may move does so as soon as it fits elsewhere. Other work may finish; with --grace, what is left then
    returns to the queue, except work that is declared fixed, which needs --force. The controller carries this out, also
    after a restart; `eelctl uncordon` ends it.

    \b
    eelctl drain gpu-7 --dry-run
    eelctl drain gpu-7 --reason 'new kernel' --grace 30m
    eelctl drain gpu-7/3 --no-wait
    """  # noqa: D301
    found = group_targets(targets)
    grace_s, force, dry_run = flags["grace_s"], flags["force"], flags["dry_run"]
    if force and grace_s is None:
        raise UsageMismatch("--force has no effect without --grace", "give --grace 30m, after which work is stopped")
    with connect_operators(settings) as client:

        def call(target: CordonTarget, *, dry: bool) -> DrainNodeResponse:
            request = DrainNodeRequest(
                node_name=target.node_name,
                gpus=target.gpus,
                reason=flags["reason"],
                grace_s=None if grace_s is None else float(grace_s),
                force=force,
                dry_run=dry,
            )
            answer: DrainNodeResponse = client.drain_node(request, timeout=settings.timeout_s)
            return answer

        previews = [(target, call(target, dry=True)) for target in found]
        if not dry_run:
            _confirm_stops(previews, yes=flags["yes"])
        answers = previews if dry_run else [(target, call(target, dry=False)) for target in found]
        is_for_people = settings.output not in {"json", "yaml"}
        for target, answer in answers if is_for_people else ():
            for line in _drain_lines(target, answer, dry_run=dry_run):
                echo(line)
        is_waited_for = not (dry_run or flags["no_wait"])
        until_s = None if wait_s is None else time.monotonic() + wait_s
        nodes = {}
        for target, answer in answers:
            node = _wait_until_empty(client, settings, target, answer, until_s) if is_waited_for else answer.node
            nodes[target] = node
            if is_waited_for and is_for_people:
                echo(f"{target.title}: drained")
        plain = [{**to_plain(answer), "node": to_plain(nodes[target])} for target, answer in answers]
    print_plain(settings, plain, ())


def _confirm_stops(previews: Sequence[tuple[CordonTarget, DrainNodeResponse]], *, yes: bool) -> None:
    """Asks before running work is stopped; raises RequestRefused where the answer is not yes."""
    stopped = dict.fromkeys(
        one.workload_id for _, answer in previews for one in answer.workloads if one.outcome is DrainOutcome.REQUEUED
    )
    if stopped:
        confirm_change(
            f"Draining {list_names([target.title for target, _ in previews])}",
            yes=yes,
            effects=(f"stopped after the grace: {count_noun(len(stopped), 'workload')} ({list_names(list(stopped))})",),
            remedy="see what becomes of each with --dry-run",
        )


# In the order in which they are listed.
_OUTCOMES = {
    DrainOutcome.MOVES: "moves",
    DrainOutcome.FINISHES: "may finish",
    DrainOutcome.REQUEUED: "returns to the queue after the grace",
    DrainOutcome.STAYS: "stays",
}


def _drain_lines(target: CordonTarget, answer: DrainNodeResponse, *, dry_run: bool) -> Iterator[str]:
    would = "would be drained" if dry_run else "draining"
    units = Counter(one.workload_id for one in answer.workloads)
    there = f"{count_noun(len(units), 'workload')} there" if units else "nothing runs there"
    yield f"{target.title}: {would}, {there}"
    for outcome in _OUTCOMES:
        for one in answer.workloads:
            if one.outcome is outcome:
                yield f"  {_describe_drained(one, is_part=units[one.workload_id] > 1)}"


def _describe_drained(one: DrainedWorkload, *, is_part: bool) -> str:
    verb = _OUTCOMES.get(one.outcome, one.outcome.name.lower())
    name = f" ({one.name})" if one.name and one.name != one.workload_id else ""
    replicas = f" replica {', '.join(map(str, one.replicas[:_NAMED_MOST]))}" if is_part else ""
    where = f" to {', '.join(one.node_names[:_NAMED_MOST])}" if one.node_names else ""
    return f"{one.workload_id}{name}{replicas} {verb}{where}{': ' if one.reason else ''}{one.reason}"


def _wait_until_empty(
    client: Any, settings: CliSettings, target: CordonTarget, answer: DrainNodeResponse, until_s: float | None
) -> Node:
    """Waits until nothing is left on the target, with progress on stderr; returns the node. Raises CliError."""
    node, told = answer.node, -1
    while True:
        own = _own(node, target)
        if not own or not any(one.draining for one in own):
            raise CliError(
                f"{target.title} is not drained any more: its cordon was lifted or changed", "drain it again"
            )
        left = max(one.workloads for one in own)
        if not left:
            return node
        if left != told:
            echo(f"{target.title}: {count_noun(left, 'workload')} left", err=True)
            told = left
        if until_s is not None and time.monotonic() >= until_s:
            raise CliError(
                f"{count_noun(left, 'workload')} still on {target.title}; the drain goes on",
                f"see what it waits for with eelctl drain {target.title} --dry-run, or end it with eelctl uncordon",
            )
        time.sleep(_POLL_S)
        node = _find_node(client, settings, target.node_name)


def _find_node(client: Any, settings: CliSettings, name: str) -> Node:
    request = ListNodesRequest(name_contains=name)
    rows = iterate_pages(client.list_nodes, request, "nodes", timeout_s=settings.timeout_s)
    found: Node | None = next((one for one in rows if one.inventory.node_name == name), None)
    if found is None:
        raise NameNotFound(f"no node is called {name!r} any more", "list nodes with eelctl nodes")
    return found
