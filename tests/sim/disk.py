"""The controller's disk: what a journal wrote is there after a crash, and sometimes there is no room.

Owns the journals of the simulation: one in memory, which keeps entries as JSON
text as a disk would, or the controller's own file. `Unreliable` stands in front
of either and refuses while the disk is full. Both implement
`eelgrid_controller.state.journal.Journal`.
"""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from eelgrid_controller.errors import JournalFull, JournalLost, LostEntries
from eelgrid_controller.runtime.sqlite_journal import MARK_NAME, SqliteJournal, open_journal
from eelgrid_controller.state.journal import Checkpoint, JournalCounters, JournalEntry, JournalHistory
from eelgrid_protos.messages import LeaderTerm

__all__ = ["Disk", "MemoryJournal", "Unreliable"]


class MemoryJournal:
    """Keeps everything that was appended."""

    is_remote = False
    may_lead = True
    lease_age_s = 0.0

    def __init__(self) -> None:
        self.path = Path("memory")
        self.term = LeaderTerm(epoch=1, holder="memory")
        self.counters = JournalCounters()
        self.lost: LostEntries | None = None
        # How many were acknowledged, as the mark beside a real journal says.
        self._marked = 0
        self._entries: list[tuple[str, str]] = []
        # How many entries there were after each commit, of which a disk has all or none.
        self._commits = [0]
        self._checkpoints: list[tuple[int, str, str]] = []

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Rises."""
        self.term = LeaderTerm(timeline=above.timeline, epoch=above.epoch + 1, holder=self.term.holder)
        return self.term

    def append(self, entries: Sequence[JournalEntry]) -> int:
        """Writes all."""
        self._entries.extend((entry.kind, json.dumps(entry.body, allow_nan=False)) for entry in entries)
        self.counters.commits += 1
        self.counters.entries += len(entries)
        self._marked, self.lost = len(self._entries), None
        self._commits.append(len(self._entries))
        return len(self._entries)

    def reopen(self, *, accepts_loss: bool) -> None:
        """A new process looks at what is there; raises JournalLost."""
        last = len(self._entries)
        self.lost = LostEntries(last + 1, self._marked) if last < self._marked else None
        if self.lost is not None and not accepts_loss:
            raise JournalLost(self.path, "entries were acknowledged and are gone", "accept the loss", lost=self.lost)

    def roll_back(self, most: int, *, with_mark: bool) -> int:
        """The disk is as it was after the last commit that left at most so many entries; returns how many those are."""
        self._commits = [count for count in self._commits if count <= most]
        last = self._commits[-1]
        del self._entries[last:]
        self._checkpoints = [row for row in self._checkpoints if row[0] <= last]
        self._marked = last if with_mark else self._marked
        return last

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest."""
        if not self._checkpoints:
            return None
        seq, text, digest = self._checkpoints[-1]
        return Checkpoint(seq, json.loads(text), digest)

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Every entry after `seq`."""
        for number, (kind, text) in enumerate(self._entries[seq:], seq + 1):
            yield number, JournalEntry(kind, json.loads(text))

    def read_history(self) -> JournalHistory:
        """Everything."""
        return JournalHistory(None, tuple(self.entries_after(0)))

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keeps two."""
        text = json.dumps(checkpoint.state, allow_nan=False)
        self._checkpoints = [*self._checkpoints[-1:], (checkpoint.seq, text, checkpoint.digest)]
        self.counters.checkpoints += 1

    def check_files(self) -> None:
        """There are none."""

    def probe(self) -> None:
        """There is always room."""

    def close(self) -> None:
        """What was written stays."""


class Unreliable:
    """A journal on a disk that may be full; also a `Journal`."""

    is_remote = False
    may_lead = True
    lease_age_s = 0.0

    def __init__(self, inner: "MemoryJournal | SqliteJournal") -> None:
        self.inner = inner
        self.is_full = False

    @property
    def path(self) -> Path:
        """The file of the journal behind."""
        return self.inner.path

    @property
    def lost(self) -> LostEntries | None:
        """What the journal behind has lost."""
        return self.inner.lost

    @property
    def counters(self) -> JournalCounters:
        """Those of the journal behind."""
        return self.inner.counters

    @property
    def term(self) -> LeaderTerm:
        """That of the journal behind."""
        return self.inner.term

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """As that does."""
        return self.inner.raise_term(above)

    def append(self, entries: Sequence[JournalEntry]) -> int:
        """Writes all, or none where there is no room."""
        self.probe()
        return self.inner.append(entries)

    def newest_checkpoint(self) -> Checkpoint | None:
        """As it stands."""
        return self.inner.newest_checkpoint()

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """As they stand."""
        return self.inner.entries_after(seq)

    def read_history(self) -> JournalHistory:
        """As it stands."""
        return self.inner.read_history()

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keeps it where there is room."""
        self.probe()
        self.inner.write_checkpoint(checkpoint)

    def check_files(self) -> None:
        """As it stands."""
        self.inner.check_files()

    def probe(self) -> None:
        """Raises JournalFull where there is no room."""
        if self.is_full:
            raise JournalFull(self.path, "the simulated disk is full", "wait for the end of this fault")
        self.inner.probe()

    def close(self) -> None:
        """Lets go of the journal behind."""
        self.inner.close()


class Disk:
    """Opens the journal for each life of the controller; with a directory it is a real file."""

    def __init__(self, directory: Path | None = None) -> None:
        self.is_full = False
        self._directory = None if directory is None else directory / "data"
        self._memory = MemoryJournal()
        self._open: Unreliable | None = None
        # Older copies of the directory, each with the number of entries in it.
        self._copies: list[tuple[int, Path]] = []

    def open(self, *, accepts_loss: bool = False) -> Unreliable:
        """The journal as the crash left it; raises JournalLost where entries are gone and nobody accepts that."""
        inner: MemoryJournal | SqliteJournal = self._memory
        if self._directory is not None:
            inner = open_journal(self._directory, new_cluster_id="simulated", accepts_loss=accepts_loss)
        else:
            self._memory.reopen(accepts_loss=accepts_loss)
        self._open = Unreliable(inner)
        self._open.is_full = self.is_full
        return self._open

    def fill(self, *, is_full: bool) -> None:
        """There is no room, or there is again."""
        self.is_full = is_full
        if self._open is not None:
            self._open.is_full = is_full

    def crashed(self) -> None:
        """The process is gone, and with it its hold on the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def roll_back(self, rng: random.Random, last: int, *, with_mark: bool) -> int:
        """Entries before `last` are gone, none to all of them; how many are left. No process may run."""
        if self._directory is None:
            return self._memory.roll_back(max(0, last - rng.choice((1, 5, 40, last))), with_mark=with_mark)
        copy = self._directory.with_name(f"copy-{len(self._copies)}")
        shutil.copytree(self._directory, copy)
        self._copies.append((last, copy))
        left, older = rng.choice([item for item in self._copies if item[0] <= last])
        mark = (self._directory / MARK_NAME).read_bytes()
        shutil.rmtree(self._directory)
        shutil.copytree(older, self._directory)
        if not with_mark:
            (self._directory / MARK_NAME).write_bytes(mark)
        # What came after the loss is another history: no older copy may be put back into it.
        self._copies = [item for item in self._copies if item[0] <= left]
        return left
