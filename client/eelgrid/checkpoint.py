"""Checkpoints of a job: when it must stop, where it saves, and how it says that a checkpoint is whole.

    from eelgrid import checkpoint

    state = load(path) if (path := checkpoint.latest()) else State()
    with checkpoint.on_preempt() as stop:
        for state.step in range(state.step, steps):
            train(state)
            if stop or checkpoint.is_due():
                checkpoint.save(lambda path: torch.save(state, path))
            if stop:
                break

Needs the standard library only, and no daemon: outside of a job of Eelgrid checkpoints go to the folder `checkpoints` of
the working directory, and the signal is SIGTERM. How often to save is computed from what saving took so far and from how
often work is interrupted here (`is_due`). A job is asked to stop by a signal (`eelctl run --stop-signal`), and killed
when the grace (`--grace`) is over; until then it may save. A checkpoint is written under a temporary name and renamed, so that
a kill never leaves a torn one; then its time is noted in `.eelgrid-checkpoint`, which the agent reads: what has just saved
loses least, and is preempted first.
"""

import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_NOTE = ".eelgrid-checkpoint"
_NAME = "checkpoint"
# Between checkpoints of which nothing is known.
_INTERVAL_S = 600.0


class _Saves:
    """The last saves of this process: what they took, and when the last one ended; before that, the start."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=8)
        self.last_s = time.monotonic()

    @property
    def cost_s(self) -> float:
        """The mean of the last saves; 0 without any."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else 0.0

    def add(self, seconds: float | None) -> None:
        if seconds is not None:
            self._seconds.append(max(1e-3, seconds))
        self.last_s = time.monotonic()


_saves = _Saves()


class StopRequest:
    """True once the job was asked to stop; at most `grace_s` seconds are left then."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._at_s: float | None = None

    def __bool__(self) -> bool:
        return self._at_s is not None

    @property
    def seconds_left(self) -> float:
        """Returns how long it has before it is killed; the whole grace before it is asked to stop."""
        return self.grace_s if self._at_s is None else max(0.0, self._at_s + self.grace_s - time.monotonic())

    def set(self) -> None:
        """Asks the job to stop, as the signal does."""
        self._at_s = time.monotonic() if self._at_s is None else self._at_s


def folder() -> Path:
    """Returns the folder of this job's checkpoints, which all its attempts on a machine share; it is there."""
    found = Path(os.environ.get("EELGRID_CHECKPOINT_DIR") or "checkpoints")
    found.mkdir(parents=True, exist_ok=True)
    return found


def attempt() -> int:
    """Returns how often the job was started, from 1; 0 outside of Eelgrid."""
    return int(os.environ.get("EELGRID_ATTEMPT", "0"))


@contextlib.contextmanager
def on_preempt() -> Iterator[StopRequest]:
    """Yields what becomes true when the job is asked to stop; the signal no longer ends it meanwhile.

    Call it in the main thread. A loader that is forked meanwhile inherits the handler, and is not ended by the signal
    either. What handled the signal before is in force again afterwards.
    """
    stop = StopRequest(float(os.environ.get("EELGRID_GRACE_S", "10")))
    number = signal.Signals[f"SIG{os.environ.get('EELGRID_PREEMPT_SIGNAL', 'TERM')}"]

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = None if number == signal.SIGKILL else signal.signal(number, handle)
    try:
        yield stop
    finally:
        if before is not None:
            signal.signal(number, before)


def save(write: Callable[[Path], object], name: str = _NAME) -> Path:
    """Lets `write` write a checkpoint to a path, a file or a folder, and makes it the newest; returns where it is.

    The one before is replaced once the new one is whole and on disk.
    """
    begun_s = time.monotonic()
    target = folder() / name
    fresh, old = target.with_name(f".{name}.new"), target.with_name(f".{name}.old")
    _remove(fresh)
    write(fresh)
    _sync(fresh)
    if target.is_dir():
        # A folder is not replaced by a rename: for a moment there is only the old one, which `latest` knows.
        _remove(old)
        target.rename(old)
    fresh.rename(target)
    _sync_folder(target.parent)
    _remove(old)
    note(time.monotonic() - begun_s)
    return target


def latest(name: str = _NAME) -> Path | None:
    """Returns the newest whole checkpoint; None if there is none."""
    target = folder() / name
    return next((path for path in (target, target.with_name(f".{name}.old")) if path.exists()), None)


def note(seconds: float | None = None) -> None:
    """Says that a whole checkpoint was just made, for one that something else than `save` has written.

    `seconds` is for how long it stopped the job; of one that is written in the background that is less than writing it took.
    """
    _saves.add(seconds)
    noted: dict[str, float] = {"time_ns": time.time_ns()}
    if _saves.cost_s > 0.0:
        noted["seconds"] = _saves.cost_s
    path = folder() / _NOTE
    fresh = path.with_name(f"{_NOTE}.{os.getpid()}")
    fresh.write_text(json.dumps(noted), encoding="utf-8")
    fresh.rename(path)


def interval() -> float:
    """Returns the seconds between checkpoints that lose the least time (Daly 2006), as far as that is known.

    From what the last saves of this process took and how often work like this is interrupted
    (EELGRID_INTERRUPTED_EVERY_S); before the first save what Eelgrid computed from earlier runs
    (EELGRID_CHECKPOINT_INTERVAL); without either ten minutes.
    """
    between_s = float(os.environ.get("EELGRID_INTERRUPTED_EVERY_S", "0"))
    cost_s = _saves.cost_s
    if cost_s > 0.0 and between_s > 0.0:
        if cost_s >= 2.0 * between_s:
            return between_s
        ratio = cost_s / (2.0 * between_s)
        return float((2.0 * cost_s * between_s) ** 0.5 * (1.0 + ratio**0.5 / 3.0 + ratio / 9.0) - cost_s)
    return float(os.environ.get("EELGRID_CHECKPOINT_INTERVAL", _INTERVAL_S))


def is_due() -> bool:
    """Returns whether the last checkpoint, or the start, is an interval ago. Ask on one rank only, and tell the others."""
    return time.monotonic() - _saves.last_s >= interval()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inside in path.iterdir():
            _remove(inside)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file, or everything in a folder, is on disk."""
    if path.is_dir():
        for inside in path.iterdir():
            _sync(inside)
        _sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
