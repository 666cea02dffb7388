"""The note of a move, on the objects that it moves: so that whoever takes over goes on, or undoes it.

Owns its text. Must not know what is done at which step. It stands on the pod that is to go
and, where its owner is a Deployment, on that, too, written in one patch with the number of
replicas: whether the pod that is made before another goes has been asked for is read there,
never guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from eelgrid_controller.kubernetes.names import ANNOTATION_MOVE

__all__ = ["Note", "note_of", "note_text"]

_TEXT_MOST = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One pod's move; times are seconds since 1970, texts are empty where nothing is to be said."""

    uid: str  # of the pod that goes
    pod: str = ""
    unit: str = ""
    workload: str = ""  # whose replica has its new place; empty where the core looks for one when the new pod comes
    replica: int = 0
    to: str = ""
    owner: str = ""  # the controller's uid, of which the new pod will be
    deployment: str = ""  # the name
    replicas: int = 0  # before
    since_s: float = 0.0
    evict_s: float = 0.0
    step: str = ""  # surge, shrink, undo; of the pod: told, cost
    step_s: float = 0.0
    cost: str = ""  # the pod's own deletion cost before
    cause: str = ""


_TYPES = {one.name: one.type for one in fields(Note)}


def note_text(note: Note) -> str:
    """The annotation; what is as by default is left out."""
    whole = asdict(note)
    kept = {name: whole[name] for name in whole if name == "uid" or whole[name] not in ("", 0)}
    return json.dumps(kept, separators=(",", ":"))


def note_of(annotations: Mapping[str, str]) -> Note | None:
    """The note in an object's annotations; None where there is none that can be read, as anybody may write there."""
    text = annotations.get(ANNOTATION_MOVE, "")
    try:
        found = json.loads(text) if 0 < len(text) <= _TEXT_MOST else None
        if not isinstance(found, dict) or not found.get("uid"):
            return None
        return Note(**{name: _CASTS[str(_TYPES[name])](found[name]) for name in _TYPES if name in found})
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


_CASTS = {"<class 'str'>": str, "<class 'int'>": int, "<class 'float'>": float}
