"""Model data on the disks of a node: what lies whole in the folders that an operator names.

Owns which entries count, and when they are looked for. Must not read what is in them, nor know who loads them.

Theory. A folder may be on a network disk that hangs, as a driver may, so looks have a thread like a driver's, which holds
up neither the event loop nor the end of the process; there is one at a time, and what the last one found stays until the
next has ended. In Hugging Face's cache the folder `models--ORG--NAME` is told as `ORG/NAME`, and `datasets--NAME` as
`datasets/NAME`, once it has a snapshot and no blob that is still being fetched. In other folders each entry is told by its
name, except what is hidden or being written.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from eelgrid_agent.node.loop import DriverThread
from eelgrid_protos.messages import MODEL_DATA_MOST
from eelgrid_protos.quantities import RequiredLabel

_LOG = logging.getLogger("eelgrid.agent")
LOOK_EVERY_S = 30.0
_SLOW_S = 60.0
_NAME_MOST = get_args(RequiredLabel)[1].longest
_BEING_WRITTEN = (".incomplete", ".lock", ".part", ".partial", ".tmp")
_MODELS, _DATASETS = "models--", "datasets--"
# Entries of one folder that are looked at: one with more is no folder of models.
_ENTRIES_MOST = 10_000


class ModelDataFound(NamedTuple):
    """What a look found: names in order, and what is wrong with which folder."""

    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def list_model_data(folders: Sequence[Path]) -> ModelDataFound:
    """Lists the model data in folders; may block for as long as a disk does."""
    names, problems = set[str](), list[str]()
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if number == _ENTRIES_MOST:
                        problems.append(f"{folder}: has more than {_ENTRIES_MOST} entries")
                        break
                    names.add(_find_name(entry))
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    names.discard("")
    if len(names) > MODEL_DATA_MOST:
        problems.append(f"{len(names)} model data, of which the first {MODEL_DATA_MOST} by name are told")
    return ModelDataFound(tuple(sorted(names))[:MODEL_DATA_MOST], tuple(problems))


def _find_name(entry: os.DirEntry[str]) -> str:
    """Returns how an entry is told; empty for one that is not whole, or has no name that can be told."""
    name = entry.name
    if name.startswith(".") or name.endswith(_BEING_WRITTEN):
        return ""
    if name.startswith((_MODELS, _DATASETS)):
        if not _is_fetched(Path(entry.path)):
            return ""
        # Two dashes are in no name of a repository.
        name = name.removeprefix(_MODELS).replace("--", "/")
    return name if name.isprintable() and len(name) <= _NAME_MOST else ""


def _is_fetched(folder: Path) -> bool:
    """Returns whether a folder of Hugging Face's cache has a snapshot, and nothing is still being fetched.

    One that may not be looked at is of no use to work either.
    """
    blobs = folder / "blobs"
    try:
        if not any(any(one.iterdir()) for one in (folder / "snapshots").iterdir()):
            return False
        # A snapshot of files alone has no blobs.
        return not blobs.exists() or not any(one.name.endswith(_BEING_WRITTEN) for one in blobs.iterdir())
    except OSError:
        return False


async def watch_model_data(
    folders: Sequence[Path], report: Callable[[tuple[str, ...]], object], *, every_s: float = LOOK_EVERY_S
) -> None:
    """Reports what is in the folders, at first and whenever a look has ended, until cancelled."""
    said: tuple[str, ...] = ()
    thread, found = DriverThread(), ModelDataFound()

    def look() -> None:
        nonlocal found
        found = list_model_data(folders)

    while True:
        looking = asyncio.wrap_future(thread.call(look))
        done, _ = await asyncio.wait((looking,), timeout=_SLOW_S)
        if not done:
            _LOG.warning("event=model_data_slow folders=%s", ",".join(map(str, folders)))
        await looking
        if found.problems != said:
            said = found.problems
            for problem in said:
                _LOG.warning("event=model_data_problem reason=%r", problem)
        report(found.names)
        await asyncio.sleep(every_s)
