"""Durable state of the agent: JSON files that survive a crash, and the locked directory that holds them.

`StateFile` keeps one typed value in one file. A store writes a new file beside the old one, flushes it, renames it
over the old one and flushes the directory, so that a reader finds the old value or the new one after a power cut, and
never a part of either. A file that cannot be decoded is renamed to NAME.corrupt-1 (up to -9) and reported; nothing is
guessed from it. One process at a time holds the lock of the directory, which the kernel releases when it ends.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

# Damaged files that are kept of one name; whoever has so many has not looked at the first.
MAX_SET_ASIDE = 9
# State names other people's devices and processes, so only the agent's user may read it.
_MODE = 0o600

_T = TypeVar("_T")


class StateFileError(Exception):
    """A state file cannot be relied on; the message names the file and says what to do.

    `path` is where the file is now: after `load` a damaged one was moved beside its place.
    """

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class StateUnreadable(StateFileError):
    """The file cannot be opened or read."""


class StateUnwritable(StateFileError):
    """The file cannot be written, or a damaged one cannot be moved aside."""


class StateDamaged(StateFileError):
    """The content cannot be decoded: this version of the agent did not write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat(Generic[_T]):
    """How a value is written as one JSON object, and what operators read about its file.

    `encode` returns the members of the object after "schema"; `decode` receives the whole object and may raise
    ValueError, LookupError, TypeError or AttributeError for content that it does not understand. `empty` makes the
    value of a file that does not exist. `title` names the file in messages. `damage_remedy` says what to do with a
    damaged file, and `write_consequence` what does not happen while the file cannot be written.
    """

    title: str
    schema: int
    encode: Callable[[_T], Mapping[str, Any]]
    decode: Callable[[Mapping[str, Any]], _T]
    empty: Callable[[], _T]
    bytes_most: int
    damage_remedy: str
    write_consequence: str
    # None writes the object without any white space.
    indent: int | None = 1
    ends_line: bool = True

    def to_bytes(self, value: _T) -> bytes:
        """Returns the content of the file."""
        document = {"schema": self.schema, **self.encode(value)}
        separators = (",", ":") if self.indent is None else None
        return (json.dumps(document, indent=self.indent, separators=separators) + "\n" * self.ends_line).encode()

    def from_bytes(self, content: bytes) -> _T:
        """Decodes the content of a file; raises ValueError, which says what is wrong with it."""
        if len(content) > self.bytes_most:
            raise ValueError(f"more than {self.bytes_most} bytes")
        try:
            document = json.loads(content)
            schema = document.get("schema") if isinstance(document, dict) else None
            if schema != self.schema:
                raise ValueError(f"schema {schema!r}; this version reads schema {self.schema}")
            return self.decode(document)
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"unexpected content: {error!r}") from error


def require_text(value: object) -> str:
    """Returns a member of a document that has to be text; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


class StateStore(Protocol[_T]):
    """Keeps one value: a `StateFile`, or a `MemoryState` where nothing has to outlive the process."""

    def load(self) -> _T:
        """Returns the value that was stored last, or an empty one. Raises StateFileError."""

    def store(self, value: _T) -> None:
        """Replaces the value; on return the new one survives a power cut. Raises StateUnwritable."""


class MemoryState(Generic[_T]):
    """Keeps a value for the life of the process.

    For simulated devices, which end with it too, and for read-only use.
    """

    def __init__(self, value: _T) -> None:
        self._value = value

    def load(self) -> _T:
        """Returns the value that was stored last, or the first one."""
        return self._value

    def store(self, value: _T) -> None:
        """Replaces the value."""
        self._value = value


class StateFile(Generic[_T]):
    """One value in one file of the state directory."""

    def __init__(self, path: Path, form: StateFormat[_T]) -> None:
        self._path = path
        self._form = form

    def load(self) -> _T:
        """Returns the stored value, or the empty one where there is no file. Raises StateFileError.

        A damaged file is moved aside before StateDamaged is raised, so that the next load finds no file.
        """
        try:
            return self.peek()
        except StateDamaged as damaged:
            try:
                aside = set_file_aside(self._path)
            except OSError as error:
                raise StateUnwritable(f"{damaged}, and {error.strerror}; move it away by hand", self._path) from error
            raise StateDamaged(f"{damaged}; it was kept as {aside}: {self._form.damage_remedy}", aside) from damaged

    def peek(self) -> _T:
        """Returns the same as `load` and leaves a damaged file in its place. Raises StateUnreadable, StateDamaged."""
        try:
            with self._path.open("rb") as file:
                content = file.read(self._form.bytes_most + 1)
        except FileNotFoundError:
            return self._form.empty()
        except OSError as error:
            raise StateUnreadable(
                f"{self._path}: {error.strerror}; make it readable for the agent", self._path
            ) from error
        try:
            return self._form.from_bytes(content)
        except ValueError as error:
            raise StateDamaged(f"{self._path}: not a valid {self._form.title} ({error})", self._path) from error

    def store(self, value: _T) -> None:
        """Replaces the file, and creates its directory where that is missing. Raises StateUnwritable."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, self._form.to_bytes(value))
        except OSError as error:
            remedy = f"make room and let the agent write the file: {self._form.write_consequence}"
            raise StateUnwritable(f"{self._path}: {error.strerror}; {remedy}", self._path) from error


def replace_file(path: Path, content: bytes, *, mode: int = _MODE) -> None:
    """Replaces a file as a whole; on return its content survives a power cut. Raises OSError."""
    fresh = path.with_name(path.name + ".new")
    # Remove what a crash left, or a link that somebody placed: the agent writes only to a file that it created.
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    fresh.replace(path)
    _flush_directory(path.parent)


def set_file_aside(path: Path) -> Path:
    """Renames a file to the first free name beside it and returns that. Raises OSError, also when no name is free."""
    for number in range(1, MAX_SET_ASIDE + 1):
        aside = path.with_name(f"{path.name}.corrupt-{number}")
        if not aside.exists():
            path.replace(aside)
            _flush_directory(path.parent)
            return aside
    raise FileExistsError(0, f"{MAX_SET_ASIDE} damaged ones are kept beside it already")


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
    """The state directory is not available; the message says what to do."""


class StateDirectoryUnusable(StateDirectoryError):
    """The directory cannot be created, read or written."""


class StateDirectoryLocked(StateDirectoryError):
    """Another process holds the lock of the directory."""


def default_state_directory(environ: Mapping[str, str], *, root: bool) -> Path:
    """Returns systemd's STATE_DIRECTORY, else /var/lib/eelgrid for root, else the user's own state directory."""
    of_unit = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if of_unit:
        return Path(of_unit)
    if root:
        return _SYSTEM
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")  # noqa: PTH118
    return Path(home) / "eelgrid"


@contextmanager
def lock_state_directory(directory: Path, who: str) -> Iterator[Path]:
    """Holds the directory for this process alone and creates it where it is missing; raises StateDirectoryError.

    `who` names this process in the message of another one that is refused.
    """
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
    """Raises StateDirectoryUnusable for a symbolic link.

    Through it root would write to a file that somebody else chose.
    """
    for path in directory.iterdir():
        if path.is_symlink():
            raise StateDirectoryUnusable(
                f"{directory}: holds a symbolic link, {path.name}; replace it by the file itself"
            )


def _lock(itself: int, number: int, directory: Path) -> None:
    """Locks the directory and the lock file in it, which earlier versions lock; raises StateDirectoryLocked."""
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
    """Describes the process that wrote the note, which may be half written."""
    try:
        note = json.loads(os.pread(number, _NOTE_BYTES_MOST, 0))
        return f"{note['who']} (process {int(note['pid'])}, since {note['since']})"
    except (ValueError, TypeError, KeyError):
        return "another process"
