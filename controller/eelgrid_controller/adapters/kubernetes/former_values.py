"""The file beside the journal in which lies what PowerPolicy objects have taken over from the operator.

Owns its form and that it is replaced as a whole. Must not know what follows from it.

It lies with the journal, since it says what was done to the policy in that journal: a
journal that begins anew begins with no record, and the two are backed up together. A file
that cannot be read is moved aside and counts as none: then what objects hold is taken for
the operator's own, and stays when they go.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from eelgrid_controller.kubernetes.policy_fields import plain_of, value_from
from eelgrid_controller.kubernetes.power_policies import Memory, Record

__all__ = ["FILE_NAME", "FormerValues"]

FILE_NAME = "power-policies.json"
_FORMAT = 1
_BYTES_MOST = 256 * 1024 * 1024


class FormerValues:
    """One file; every call waits for the disk, so call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def load(self) -> tuple[Memory, str]:
        """What was saved last, and why there is nothing where a file could not be read; raises OSError."""
        try:
            with self.path.open("rb") as file:
                return _memory(json.loads(file.read(_BYTES_MOST))), ""
        except FileNotFoundError:
            return Memory(), ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            aside = self.path.with_name(f"{FILE_NAME}.corrupt")
            self.path.replace(aside)
            return Memory(), f"{error}; moved to {aside}"

    def save(self, memory: Memory) -> None:
        """Replace the file; raises OSError, and then the one before is whole."""
        fresh = self.path.with_name(f"{FILE_NAME}.new")
        with fresh.open("wb") as file:
            file.write(json.dumps(_plain(memory), separators=(",", ":")).encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot
                os.fsync(folder)
        finally:
            os.close(folder)


def _plain(memory: Memory) -> dict[str, Any]:
    records = {
        key: {"former": plain_of(one.former), "puts": [plain_of(put) for put in one.puts]}
        for key, one in memory.records.items()
    }
    return {"format": _FORMAT, "records": records, "good": dict(memory.good)}


def _memory(plain: Any) -> Memory:
    if plain["format"] != _FORMAT:
        raise ValueError(f"format {plain['format']!r}; this version reads format {_FORMAT}")
    records = {
        str(key): Record(value_from(key, one["former"]), tuple(value_from(key, put) for put in one["puts"]))
        for key, one in plain["records"].items()
    }
    good = {
        str(uid): {"metadata": dict(one["metadata"]), "spec": dict(one["spec"])} for uid, one in plain["good"].items()
    }
    return Memory(records, good)
