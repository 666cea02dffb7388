"""Loads the trace that an option names: a folder or file of either format, or one that is searched for.

A folder with nodes.csv and tasks.csv is in our own format (docs/traces.md); otherwise it is one of openb lists. A file
is a task list, ours if it has arrival_s or gpus among its columns; its nodes are beside it or named.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.replay import openb, site_csv
from eelgrid_controller.replay.csv_reader import TraceMissing, read_header
from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_controller.replay.openb_source import NODE_LIST, TraceSearch, locate_openb, task_list_name
from eelgrid_protos import catalogue


class LoadedTrace(NamedTuple):
    """The rows of a trace, what to call it, where it lies and what there is to say about it."""

    name: str
    nodes: tuple[TraceNode, ...]
    tasks: tuple[TraceTask, ...]
    where: str
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether every task has a time of arrival."""
        return all(task.arrival_s is not None for task in self.tasks)


def find_trace(choice: str, listed: str, nodes: Path | None, surroundings: TraceSearch) -> LoadedTrace:
    """The trace for `auto`, `generated`, a folder or a task list; raises TraceError."""
    place = Path(choice)
    if choice not in {"auto", "generated"}:
        if place.is_file():
            return _of_file(place, nodes)
        if not place.is_dir():
            raise TraceMissing(
                choice, "is neither a folder nor a file", "name a task list, or the folder that holds both files"
            )
        if (place / site_csv.NODES).is_file() and (place / site_csv.TASKS).is_file():
            return _of_file(place / site_csv.TASKS, nodes)._replace(name=place.resolve().name)
    found = locate_openb(choice, surroundings, tasks=listed)
    rows = found.nodes if nodes is None else read_nodes(nodes)
    return LoadedTrace(listed, rows, found.tasks, f"{found.source.value} ({found.where})", found.notes)


def _of_file(path: Path, nodes: Path | None) -> LoadedTrace:
    before, after = task_list_name("*").split("*")
    name = path.name.removeprefix(before).removesuffix(after).removesuffix(".csv")
    return LoadedTrace(name, read_nodes(_beside(path, nodes)), read_tasks(path), str(path))


def _beside(path: Path, nodes: Path | None) -> Path:
    """The node list of a task list."""
    if nodes is not None:
        return nodes
    for name in (site_csv.NODES, NODE_LIST):
        if (path.parent / name).is_file():
            return path.parent / name
    raise TraceMissing(str(path), f"has no {site_csv.NODES} or {NODE_LIST} beside it", "name its nodes with --nodes")


def read_nodes(path: Path) -> tuple[TraceNode, ...]:
    """A node list of either format."""
    return (
        openb.read_nodes(path) if "sn" in read_header(path) else site_csv.read_nodes(path, catalogue.load_catalogue())
    )


def read_tasks(path: Path) -> tuple[TraceTask, ...]:
    """A task list of either format."""
    titles = read_header(path)
    if "gpus" in titles or "arrival_s" in titles:
        return site_csv.read_tasks(path)
    return openb.read_tasks(path)


def sample_nodes_evenly(nodes: Sequence[TraceNode], most: int | None) -> tuple[TraceNode, ...]:
    """At most so many nodes, taken evenly over the list."""
    kept = min(most or len(nodes), len(nodes))
    return tuple(nodes[index * len(nodes) // kept] for index in range(kept))
