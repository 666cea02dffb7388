"""The state directory: where the agent keeps what must outlive it, and who holds it now.

One process at a time changes this machine's devices and its journals: it holds
the lock in the directory from before its first look until after its last
write. The kernel lets the lock go when the process ends, however it ends, so
that nothing stale is left; what the file says is for people only. The lock is
on the directory itself, too: a file that is removed and made again could be
locked twice. It knows nothing of what is kept there.

StateError                   the directory cannot be had
├── Unusable                 it cannot be made, read or written
└── Held                     another process holds it
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["Held", "StateError", "Unusable", "default_directory", "hold"]

_SYSTEM = Path("/var/lib/eelgrid")
_LOCK = "agent.lock"
_NOTE_BYTES_MOST = 1024


class StateError(Exception):
    """The directory cannot be had; the message says what to do."""


class Unusable(StateError):
    """It cannot be made, read or written."""


class Held(StateError):
    """Another process holds it."""


def default_directory(environ: Mapping[str, str], *, root: bool) -> Path:
    """Where systemd says, else /var/lib/eelgrid for root, else the user's own state directory."""
    told = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if told:
        return Path(told)
    if root:
        return _SYSTEM
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")  # noqa: PTH118
    return Path(home) / "eelgrid"


@contextmanager
def hold(directory: Path, who: str) -> Iterator[Path]:
    """The directory for this process alone, made where it is missing; raises StateError. `who` is told to others."""
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        _refuse_links(directory)
        itself = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            number = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError:
            os.close(itself)
            raise
    except OSError as error:
        remedy = "run as root, or give a directory of your own with --state"
        raise Unusable(f"{directory}: cannot be used ({error.strerror}); {remedy}") from None
    try:
        _lock(itself, number, directory)
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        note = json.dumps({"pid": os.getpid(), "who": who, "since": since}).encode()
        os.ftruncate(number, 0)
        os.pwrite(number, note, 0)
        yield directory
    finally:
        os.close(number)
        os.close(itself)


def _refuse_links(directory: Path) -> None:
    """Through a link we would write, as root, to a file that somebody else chose."""
    for path in directory.iterdir():
        if path.is_symlink():
            raise Unusable(f"{directory}: holds a symbolic link, {path.name}; replace it by the file itself")


def _lock(itself: int, number: int, directory: Path) -> None:
    """Takes the directory and the file in it, which is what earlier versions take; raises Held."""
    for descriptor in (itself, number):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(f"{directory}: is held by {_holder(number)}; stop it or wait for it, then try again") from None
        except OSError:
            # Some network file systems lock files and no directories.
            if descriptor == number:
                raise


def _holder(number: int) -> str:
    """Who wrote the note; it may be half written."""
    try:
        note = json.loads(os.pread(number, _NOTE_BYTES_MOST, 0))
        return f"{note['who']} (process {int(note['pid'])}, since {note['since']})"
    except (ValueError, TypeError, KeyError):
        return "another process"
