"""The journal port: what the event loop needs of durable storage.

Entry number n is the event that took the state from revision n - 1 to n, so the journal's last number and the
state's revision are one number, and a gap, a repetition or a lost tail is detected.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eelgrid_controller.errors import LostEntries
from eelgrid_protos.messages import AuditEntry


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event as the journal holds it."""

    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The whole state after entry `seq`."""

    seq: int
    state: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class JournalHistory:
    """The oldest state that can be had, None for the empty one of the beginning, and every entry since with its number."""

    checkpoint: Checkpoint | None
    entries: tuple[tuple[int, JournalEntry], ...]


@dataclass(slots=True)
class JournalCounters:
    """What the journal did since it was opened."""

    commits: int = 0
    entries: int = 0
    bytes_written: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


class Journal(Protocol):
    """Durable, ordered, written by one; each method is done when it returns, or left no trace when it raises."""

    @property
    def path(self) -> Path:
        """The file, for messages."""

    @property
    def counters(self) -> JournalCounters:
        """What was written so far."""

    @property
    def lost(self) -> LostEntries | None:
        """Acknowledged entries that are gone, where an operator accepted that; None once something was appended."""

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[AuditEntry] = ()) -> int:
        """Write all or none, with these of the audit log; the number of the last entry."""

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, checked; None before the first."""

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Every entry after `seq`, in order and checked."""

    def read_history(self) -> JournalHistory:
        """All that is kept, checked; read apart from the writing, so that any thread may ask at any time."""

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the checkpoint and drop what two checkpoints have made needless."""

    def check_files(self) -> None:
        """Raise JournalGone where what is written to is no longer what a restart would read."""

    def probe(self) -> None:
        """Return if writing works; raise JournalFull or JournalUnavailable if not."""

    def close(self) -> None:
        """Give the file up."""


def checkpoint_removal_command(path: Path, seq: int) -> str:
    """The command with which a person removes one checkpoint."""
    return f"sqlite3 {path} 'DELETE FROM checkpoints WHERE seq={seq}'"  # noqa: S608  # told, never run


def entry_removal_command(path: Path, seq: int) -> str:
    """The command with which a person gives up an entry and all after it."""
    return f"sqlite3 {path} 'DELETE FROM events WHERE seq>={seq}'"  # noqa: S608  # told, never run


def digest_of(state: Mapping[str, Any]) -> str:
    """A hash of a dumped state, the same for the same state whatever the order of its keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
