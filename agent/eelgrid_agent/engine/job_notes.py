"""The notes by which jobs say that a checkpoint is whole, and how far they are.

They are files that a job writes, who may have put anything in their place. Must not know when they are read.
"""

import errno
import json
import os
import stat
import time
from pathlib import Path

from eelgrid_protos.messages import JobProgress
from eelgrid_protos.schema import is_valid_message

_CHECKPOINT_NOTE_BYTES_MOST = 4096
# More is a mistake of the program.
_CHECKPOINT_S_MOST = 86_400.0


def read_checkpoint_note(path: Path) -> tuple[int, float] | None:
    """Returns the time of a noted checkpoint, in nanoseconds since 1970, and the seconds that one takes; 0: not told.

    None if a job wrote no such thing.
    """
    try:
        noted = json.loads(_read_note(path))
        time_ns, cost_s = noted["time_ns"], noted.get("seconds", 0.0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(time_ns, int) or not 0 < time_ns <= time.time_ns():
        return None
    is_cost = not isinstance(cost_s, bool) and isinstance(cost_s, int | float) and 0.0 <= cost_s <= _CHECKPOINT_S_MOST
    return time_ns, float(cost_s) if is_cost else 0.0


def read_progress_note(path: Path, since_ns: int) -> JobProgress | None:
    """Returns what a job says of its progress since its start; None if it wrote no such thing."""
    try:
        noted = json.loads(_read_note(path))
        metric = noted.get("metric")
        progress = JobProgress(
            step=noted["step"],
            total=noted.get("total", 0),
            metric=None if metric is None else float(metric),
            time_ns=noted["time_ns"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    is_of_this_attempt = isinstance(progress.time_ns, int) and since_ns <= progress.time_ns <= time.time_ns()
    return progress if is_of_this_attempt and is_valid_message(progress) else None


def _read_note(path: Path) -> bytes:
    """Reads a small file that a job wrote, who may have put anything in its place; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _CHECKPOINT_NOTE_BYTES_MOST:
            raise OSError(errno.EINVAL, "is no note")
        return os.read(descriptor, _CHECKPOINT_NOTE_BYTES_MOST)
    finally:
        os.close(descriptor)
