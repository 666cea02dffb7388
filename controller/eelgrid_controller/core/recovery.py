"""Recovery: rebuilds the state from the newest checkpoint and the journal entries after it.

Owns the order: newest checkpoint, then every entry after it, with none missing, through `ClusterState.apply` alone;
no decision is repeated. Must not know how entries are stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from eelgrid_controller.errors import JournalCorrupt, JournalTooNew, StoreLocation
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, UnknownKind, event_from_plain, event_to_plain
from eelgrid_controller.state.journal import (
    Checkpoint,
    JournalEntry,
    JournalSanitizer,
    checkpoint_removal_command,
    digest_of,
    entry_removal_command,
)
from eelgrid_protos.errors import ContractError

# Errors of reading invalid plain values; a CRC has already ruled out a damaged disk.
_UNREADABLE = (ContractError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredState:
    """A recovered state, and how it was recovered."""

    state: ClusterState
    checkpoint_seq: int
    replayed: int
    # Log lines about values of older versions that were changed, and the total number of such values.
    healed: tuple[str, ...] = ()
    healed_count: int = 0


def encode_entries(events: Iterable[Event]) -> list[JournalEntry]:
    """Encodes events as journal entries."""
    return [JournalEntry(*event_to_plain(event)) for event in events]


class ReadableJournal(Protocol):
    """What recovery reads of a journal."""

    @property
    def path(self) -> StoreLocation:
        """The file or the database, for messages."""

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest checkpoint, verified; None before the first."""

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Yields every entry after `seq`, in order and verified."""


def recover_state(journal: ReadableJournal, fresh: Callable[[], ClusterState]) -> RecoveredState:
    """Rebuilds the state as of the journal's last entry; raises JournalError."""
    checkpoint = journal.newest_checkpoint()
    start = checkpoint.seq if checkpoint else 0
    healer = JournalSanitizer()
    state = _state_of(journal, checkpoint, healer) if checkpoint else fresh()
    replayed = 0
    for seq, entry in journal.entries_after(start):
        replay_entry(state, seq, entry, healer, path=journal.path, good_seq=start)
        replayed += 1
    return RecoveredState(
        state=state, checkpoint_seq=start, replayed=replayed, healed=tuple(healer.lines), healed_count=healer.count
    )


def replay_entry(
    state: ClusterState,
    seq: int,
    entry: JournalEntry,
    healer: JournalSanitizer,
    *,
    path: StoreLocation,
    good_seq: int = 0,
) -> None:
    """Applies one entry to the state before it; `good_seq` is that of the checkpoint below. Raises JournalError."""
    try:
        state.apply(event_from_plain(entry.kind, entry.body, healer))
    except UnknownKind as error:
        raise JournalTooNew(
            path, f"entry {seq} is a {entry.kind!r}, which this version does not know", "run the version that wrote it"
        ) from error
    except _UNREADABLE as error:
        raise JournalCorrupt(
            path,
            f"entry {seq} ({entry.kind}) cannot follow what stands before it ({error})",
            f"the checkpoint at entry {good_seq} and the entries up to {seq - 1} are good: restore a backup, or give "
            f"up the rest with: {entry_removal_command(path, seq)}",
            seq=seq,
        ) from error


def _holds(now: Any, then: Any) -> bool:
    """Returns whether a dump contains all of an earlier one; a newer version may add more."""
    if isinstance(then, Mapping):
        return isinstance(now, Mapping) and all(key in now and _holds(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(_holds, now, then))
    return bool(now == then)


def _state_of(journal: ReadableJournal, checkpoint: Checkpoint, healer: JournalSanitizer) -> ClusterState:
    """Loads the state of a checkpoint, and checks that it is the one that was written."""
    problem = "does not give back the state that it was made from"
    try:
        state = ClusterState.load(checkpoint.state, healer)
        is_as_written = digest_of(checkpoint.state) == checkpoint.digest
        # Values that were healed differ from those written; for them the digest proves that the checkpoint is intact.
        is_whole = healer.count > 0 or _holds(state.dump(), checkpoint.state)
        if is_as_written and state.revision == checkpoint.seq and is_whole:
            return state
    except _UNREADABLE as error:
        problem = f"cannot be read ({error})"
    raise JournalCorrupt(
        journal.path,
        f"the checkpoint at entry {checkpoint.seq} {problem}",
        f"if a newer version wrote it, run that; else remove it: {checkpoint_removal_command(journal.path, checkpoint.seq)}; "
        "the checkpoint before it and the entries since then lead to the same state",
        seq=checkpoint.seq,
    )
