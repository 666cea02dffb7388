"""Which trace was named: a folder or file of either format, or one that is looked for.

Owns telling the formats apart. Must not know what the rows are for.

A folder with nodes.csv and tasks.csv is in our own format (docs/reference/trace-format.md); else
it is one of openb lists. A file is a task list, ours if it has arrival_s or
gpus among its columns; its nodes lie beside it or are named.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.replay import openb, site_csv
from eelgrid_controller.replay.csv_lines import TraceMissing, header
from eelgrid_controller.replay.locate import NODE_LIST, Surroundings, locate, task_list
from eelgrid_controller.replay.openb import NodeRow, TaskRow
from eelgrid_protos import catalogue

__all__ = ["Found", "evenly", "find", "read_nodes", "read_tasks"]


class Found(NamedTuple):
    """The rows of a trace, what to call it, where it lies and what there is to say about it."""

    name: str
    nodes: tuple[NodeRow, ...]
    tasks: tuple[TaskRow, ...]
    where: str
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether every task has a time of arrival."""
        return all(task.arrival_s is not None for task in self.tasks)


def find(choice: str, listed: str, nodes: Path | None, surroundings: Surroundings) -> Found:
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
    found = locate(choice, surroundings, tasks=listed)
    rows = found.nodes if nodes is None else read_nodes(nodes)
    return Found(listed, rows, found.tasks, f"{found.source.value} ({found.where})", found.notes)


def _of_file(path: Path, nodes: Path | None) -> Found:
    before, after = task_list("*").split("*")
    name = path.name.removeprefix(before).removesuffix(after).removesuffix(".csv")
    return Found(name, read_nodes(_beside(path, nodes)), read_tasks(path), str(path))


def _beside(path: Path, nodes: Path | None) -> Path:
    """The node list of a task list."""
    if nodes is not None:
        return nodes
    for name in (site_csv.NODES, NODE_LIST):
        if (path.parent / name).is_file():
            return path.parent / name
    raise TraceMissing(str(path), f"has no {site_csv.NODES} or {NODE_LIST} beside it", "name its nodes with --nodes")


def read_nodes(path: Path) -> tuple[NodeRow, ...]:
    """A node list of either format."""
    return openb.read_nodes(path) if "sn" in header(path) else site_csv.read_nodes(path, catalogue.load())


def read_tasks(path: Path) -> tuple[TaskRow, ...]:
    """A task list of either format."""
    titles = header(path)
    if "gpus" in titles or "arrival_s" in titles:
        return site_csv.read_tasks(path)
    return openb.read_tasks(path)


def evenly(nodes: Sequence[NodeRow], most: int | None) -> tuple[NodeRow, ...]:
    """At most so many nodes, taken evenly over the list."""
    kept = min(most or len(nodes), len(nodes))
    return tuple(nodes[index * len(nodes) // kept] for index in range(kept))
