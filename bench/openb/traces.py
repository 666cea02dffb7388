"""The openb lists of a folder: where they lie, their names, and a list with its fleet as arrays."""

from pathlib import Path

from eelgrid_controller.replay.csv_reader import TraceMissing
from eelgrid_controller.replay.openb import NODE_LIST, read_nodes, read_tasks, task_list_name
from eelgrid_controller.replay.openb_protocol import TraceArrays, build_trace


def csv_folder(folder: Path) -> Path:
    """Where the lists are: the folder itself, or where the published layout has them below it."""
    for place in (folder, folder / "csv", folder / "openb" / "csv"):
        if (place / NODE_LIST).is_file():
            return place
    raise TraceMissing(str(folder), f"has no {NODE_LIST}", "name the folder that holds the openb CSV files")


def trace_names(folder: Path) -> tuple[str, ...]:
    """Every task list of the folder by the suffix of its file."""
    before, after = task_list_name("*").split("*")
    found = csv_folder(folder).glob(task_list_name("*"))
    return tuple(sorted(path.name.removeprefix(before).removesuffix(after) for path in found))


def load_trace(folder: Path, trace: str) -> TraceArrays:
    """The trace of that name, on the fleet beside it."""
    place = csv_folder(folder)
    path = place / task_list_name(trace)
    if not path.is_file():
        known = ", ".join(trace_names(folder)) or "none"
        raise TraceMissing(str(path), f"there is no trace {trace!r}", f"take one that is here: {known}")
    return build_trace(trace, read_nodes(place / NODE_LIST), read_tasks(path))
