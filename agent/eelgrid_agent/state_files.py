"""Crash-safe files and the locked state directory.

A file is written beside itself, flushed, renamed, and its directory flushed, so a reader sees the old or the new
content. One process holds the directory lock while it changes devices and journals; the kernel releases it.

StateDirectoryError                   the directory is not available
├── StateDirectoryUnusable            it cannot be created, read or written
└── StateDirectoryLocked              another process holds it
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

# Broken files that are kept of one name; whoever has so many has not read the first.
MAX_SET_ASIDE = 9
# A journal names other people's devices: nobody else need read it.
_MODE = 0o600


def replace_file(path: Path, content: bytes) -> None:
    """On return the content survives a power cut. Raises OSError."""
    fresh = path.with_name(path.name + ".new")
    # What a crash left, or somebody's link, goes: what we write to is a file that we made.
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _flush_directory(path.parent)


def set_file_aside(path: Path) -> Path:
    """Renames a file that is of no use to the first free name beside it. Raises OSError, also when all are taken."""
    for number in range(1, MAX_SET_ASIDE + 1):
        aside = path.with_name(f"{path.name}.corrupt-{number}")
        if not aside.exists():
            path.replace(aside)
            _flush_directory(path.parent)
            return aside
    raise FileExistsError(0, f"{MAX_SET_ASIDE} broken ones are kept beside it already")


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SYSTEM = Path("/var/lib/eelgrid")
_LOCK = "agent.lock"
_NOTE_BYTES_MOST = 1024


class StateDirectoryError(Exception):
    """The directory cannot be had; the message says what to do."""


class StateDirectoryUnusable(StateDirectoryError):
    """It cannot be made, read or written."""


class StateDirectoryLocked(StateDirectoryError):
    """Another process holds it."""


def default_state_directory(environ: Mapping[str, str], *, root: bool) -> Path:
    """Where systemd says, else /var/lib/eelgrid for root, else the user's own state directory."""
    told = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if told:
        return Path(told)
    if root:
        return _SYSTEM
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")  # noqa: PTH118
    return Path(home) / "eelgrid"


@contextmanager
def lock_state_directory(directory: Path, who: str) -> Iterator[Path]:
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
        raise StateDirectoryUnusable(f"{directory}: cannot be used ({error.strerror}); {remedy}") from None
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
            raise StateDirectoryUnusable(
                f"{directory}: holds a symbolic link, {path.name}; replace it by the file itself"
            )


def _lock(itself: int, number: int, directory: Path) -> None:
    """Takes the directory and the file in it, which is what earlier versions take; raises Held."""
    for descriptor in (itself, number):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateDirectoryLocked(
                f"{directory}: is held by {_holder(number)}; stop it or wait for it, then try again"
            ) from None
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
