"""Files that change under a running process: when they are loaded again, and what a bad new file does.

`FileReloader` is used wherever certificates or a web configuration may be replaced: gRPC servers, the agent's uplink
and metrics endpoint, the controller's HTTP endpoints. One rule for all of them:

- A file has changed when its modification time, inode or size differ from those that it had just before it was read.
  Whoever uses what was loaded calls `refresh` first: at each handshake, request or periodic check.
- What cannot be loaded changes nothing: the last good content stays in use. The log says so once for each change, and
  `failures` counts it. Files are replaced one after another, so a certificate without its key is usual for a moment.
- It is tried again when a file changes once more, and every RETRY_S, since a permission or a full descriptor table
  changes no file.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    # Who loads no certificate does without OpenSSL.
    from ssl import SSLContext, SSLObject

T = TypeVar("T")

RETRY_S = 1.0

_FileStamp = tuple[int, int, int]
# Called with each path just before it is read.
WatchFile = Callable[[Path], None]


class FileReloader(Generic[T]):
    """Holds what `load` made of some files, and calls it again when one of them changed; used from any thread."""

    def __init__(
        self,
        load: Callable[[WatchFile], T],
        *,
        name: str,
        log: logging.Logger,
        errors: tuple[type[Exception], ...] = (),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads at once and raises what `load` raises.

        `load` names each file to the function that it is given before reading it. `errors` are what it raises for
        unusable files beside OSError (ssl.SSLError too) and ValueError. `name` begins the lines in the log.
        """
        self.reloads = 0
        self.failures = 0
        self._load = load
        self._name = name
        self._log = log
        self._errors: tuple[type[Exception], ...] = (OSError, ValueError, *errors)
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._failed_s: float | None = None
        self._stamps: dict[Path, _FileStamp] = {}
        self.current = self._load(lambda path: _stamp_first(self._stamps, path))

    def refresh(self) -> T:
        """Loads again if that is due, and returns what is in use."""
        with self._lock:
            if self._is_due():
                self._reload()
            return self.current

    def on_reload(self, previous: T) -> None:
        """Called once `current` has replaced `previous`, while other threads wait; does nothing here."""

    def _is_due(self) -> bool:
        if any(_read_stamp(path) != stamp for path, stamp in self._stamps.items()):
            return True
        return self._failed_s is not None and self._monotonic_s() - self._failed_s >= RETRY_S

    def _reload(self) -> None:
        # The stamp goes first: what changes while it is read is read again.
        found = {path: _read_stamp(path) for path in self._stamps}
        watched: dict[Path, _FileStamp] = {}
        try:
            fresh = self._load(lambda path: _stamp_first(watched, path))
        except self._errors as error:
            found |= watched
            if self._failed_s is None or found != self._stamps:
                self.failures += 1
                self._log.warning("%s=kept reason=%s", self._name, error)
            self._stamps, self._failed_s = found, self._monotonic_s()
            return
        previous, self.current = self.current, fresh
        self._stamps, self._failed_s = watched, None
        self.reloads += 1
        self.on_reload(previous)
        self._log.info("%s=reloaded", self._name)


def _stamp_first(stamps: dict[Path, _FileStamp], path: Path) -> None:
    stamps.setdefault(path, _read_stamp(path))


def _read_stamp(path: Path) -> _FileStamp:
    """Modification time, inode and size; zeros where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ino, status.st_size


def load_key_pair(context: "SSLContext", certificate: Path, key: Path) -> None:
    """Gives a context its certificate chain and key; raises OSError (ssl.SSLError too), also for a key with a password.

    OpenSSL would ask for that password on the terminal, and the daemon would stand still.
    """
    context.load_cert_chain(certificate, key, password="")


def build_listening_context(
    build: "Callable[[], SSLContext]", choose: "Callable[[SSLObject], SSLContext]"
) -> "SSLContext":
    """A context for a listening socket that gives each handshake the context that `choose` returns.

    `build` makes the context that OpenSSL begins with. `choose` gets the connection, and must not raise.
    """

    def on_handshake(connection: "SSLObject", _name: str | None, _context: "SSLContext") -> None:
        connection.context = choose(connection)

    context = build()
    # Called at each handshake, whether the client names a host or not.
    context.sni_callback = on_handshake
    return context
