"""The database that two controllers share, and the journal of one term in it.

Owns what the server does: transactions that hold the term's row, a lease by the server's own clock, and what an asynchronous
standby has when it is promoted. `TermJournal` transcribes what `runtime.postgresql.journal` and `.leadership` decide (which
speak SQL): the fence, the lease's deadline, and what is known of a write whose answer was lost. It implements
`eelgrid_controller.state.journal.Journal`; a write takes two events, so that anything can come between its statements.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eelgrid_controller.errors import JournalFenced, JournalUnavailable, LostEntries
from eelgrid_controller.state.journal import Checkpoint, JournalCounters, JournalEntry
from eelgrid_protos.messages import LeaderTerm
from tests.sim.clock import Clock, seconds

__all__ = ["DEADLINE_S", "RENEW_S", "STALL_S", "TTL_S", "LeaseWatch", "Row", "Store", "TermJournal", "Transaction"]

TTL_S, RENEW_S, DEADLINE_S, STALL_S = 10.0, 2.0, 7.0, 0.5
_PATH = Path("postgresql")
# Transactions that a standby may lack.
_HISTORY_MOST = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of the journal's table."""

    epoch: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Content:
    """All rows of the database after one transaction; a tuple is never changed, so that old ones are cheap to keep."""

    rows: tuple[Row, ...] = ()
    checkpoints: tuple[tuple[int, str, str], ...] = ()
    epoch: int = 0
    holder: str = ""
    timeline: int = 1
    # That on which the term began; 0 before the first.
    led_on: int = 0
    expires_ns: int = 0


@dataclass(slots=True, eq=False)
class Transaction:
    """One that holds the term's row; over when it was committed, or its connection ended."""

    epoch: int
    began_ns: int
    # Rows after this one are removed first: a write that failed for its caller may have been committed.
    removes_after: int | None = None
    rows: tuple[Row, ...] = ()
    is_open: bool = True


@dataclass(slots=True)
class Store:
    """See the module; `on_commit` is told what was removed and what was added, as an observer of the server would be."""

    now_ns: Callable[[], int]
    clock: Clock
    on_commit: Callable[[int | None, tuple[Row, ...]], None]
    content: _Content = field(default_factory=_Content)
    is_up: bool = True
    # How often a write's answer is lost; half of those times the server cannot be asked for a while, either.
    answer_lost_p: float = 0.02
    # Names of controllers that cannot reach it.
    cut_off: set[str] = field(default_factory=set)
    # Rises when all connections end.
    generation: int = 0
    open: list[Transaction] = field(default_factory=list)
    ended_blockers: int = 0
    _history: deque[_Content] = field(default_factory=lambda: deque(maxlen=_HISTORY_MOST))

    def put(self, content: _Content) -> None:
        """A transaction is on disk."""
        self._history.append(self.content)
        self.content = content

    def check_reachable(self, name: str) -> None:
        """Raises JournalUnavailable."""
        if not self.is_up or name in self.cut_off:
            raise JournalUnavailable(_PATH, "the server does not answer", "wait for the end of this fault")

    def break_connections(self) -> None:
        """Every transaction that is open is undone."""
        self.generation += 1
        for transaction in self.open:
            transaction.is_open = False
        self.open.clear()

    def promote(self, lost: int) -> None:
        """A standby that lacks the last transactions takes the server's place."""
        self.break_connections()
        behind = self.content
        for _ in range(min(lost, len(self._history))):
            behind = self._history.pop()
        self._history.clear()
        self.content = replace(behind, timeline=self.content.timeline + 1)

    # The lease and the term

    def take_term(self, name: str, holder: str, watch: "LeaseWatch") -> LeaderTerm | None:
        """Begins a new term, unless a lease runs, or a write is under way that may still end by itself."""
        self.check_reachable(name)
        if not watch.is_over:
            return None
        for transaction in list(self.open):
            if self.now_ns() - transaction.began_ns < seconds(STALL_S):
                return None
            # Its leader was stopped within it: ending its connection undoes it.
            transaction.is_open = False
            self.open.remove(transaction)
            self.ended_blockers += 1
        found = self.content
        epoch, expires_ns = found.epoch + 1, self._from_now_ns()
        self.put(replace(found, epoch=epoch, holder=holder, led_on=found.timeline, expires_ns=expires_ns))
        return self.read_term()

    def read_term(self) -> LeaderTerm:
        """Who leads, or led last."""
        found = self.content
        return LeaderTerm(timeline=found.timeline, epoch=found.epoch, holder=found.holder, cluster="simulated")

    def renew(self, term: LeaderTerm) -> bool:
        """Extends the lease of a term; False where it is over."""
        if term.epoch != self.content.epoch:
            return False
        self.put(replace(self.content, expires_ns=self._from_now_ns()))
        return True

    def release(self, term: LeaderTerm) -> None:
        """Ends the lease of a term, if it still is the present one."""
        if term.epoch == self.content.epoch:
            self.put(replace(self.content, expires_ns=0))

    def _from_now_ns(self) -> int:
        return self.clock.wall_ns() + seconds(TTL_S)

    # Transactions

    def is_fenced(self, term: LeaderTerm) -> bool:
        """Whether the term's row is another's."""
        return (self.content.epoch, self.content.holder) != (term.epoch, term.holder)

    def begin(self, term: LeaderTerm, *, removes_after: int | None) -> Transaction:
        """Holds the term's row, which is known to be ours."""
        transaction = Transaction(term.epoch, self.now_ns(), removes_after)
        self.open.append(transaction)
        return transaction

    def commit(self, transaction: Transaction) -> bool:
        """Puts a transaction on disk; False where its connection has ended."""
        if not transaction.is_open:
            return False
        transaction.is_open = False
        self.open.remove(transaction)
        rows, removed = self.content.rows, transaction.removes_after
        if removed is not None and removed >= len(rows):
            removed = None
        kept = rows if removed is None else rows[:removed]
        self.put(replace(self.content, rows=kept + transaction.rows))
        self.on_commit(removed, transaction.rows)
        return True


class LeaseWatch:
    """When a lease was last seen to change, by one process's clock; see `runtime.postgresql.leadership`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._seen = (-1, -1, -1)
        self._since_ns = 0

    @property
    def is_over(self) -> bool:
        """Whether the lease was released, or its leader must have stopped deciding."""
        found, now_ns = self._store.content, self._clock.monotonic_ns()
        seen = found.epoch, found.expires_ns, found.timeline
        if seen != self._seen:
            self._seen, self._since_ns = seen, now_ns
        has_expired = self._store.clock.wall_ns() > found.expires_ns
        unchanged_ns = now_ns - self._since_ns
        if found.timeline > max(1, found.led_on):
            return unchanged_ns >= seconds(TTL_S)
        return found.expires_ns == 0 or unchanged_ns >= seconds(DEADLINE_S if has_expired else TTL_S)


class TermJournal:
    """The journal as the leader of one term has it."""

    is_remote = True

    def __init__(self, store: Store, name: str, term: LeaderTerm, clock: Clock) -> None:
        self.path = _PATH
        self.counters = JournalCounters()
        self.lost: LostEntries | None = None
        self.term = term
        self.last = len(store.content.rows)
        self.store = store
        self._name = name
        self._clock = clock
        self._generation = store.generation
        # Of the server, which may be lower than the term's.
        self._timeline = store.content.timeline
        self._is_unsettled = False
        self._until_ns = clock.monotonic_ns() + seconds(DEADLINE_S)
        self._fenced: JournalFenced | None = None

    # The lease

    @property
    def may_lead(self) -> bool:
        """Whether decisions may be taken now, as far as this process knows."""
        return self._fenced is None and self._clock.monotonic_ns() < self._until_ns

    @property
    def lease_age_s(self) -> float:
        """Since the last renewal that succeeded."""
        return max(0.0, (self._clock.monotonic_ns() - self._until_ns) / 1e9 + DEADLINE_S)

    @property
    def is_replaced(self) -> bool:
        """Whether a standby has taken the place of the server that this process knows."""
        return self.store.content.timeline != self._timeline

    def renew(self) -> None:
        """Renews the lease once; a failure is kept for `check_files`."""
        sent_ns = self._clock.monotonic_ns()
        try:
            self.store.check_reachable(self._name)
        except JournalUnavailable:
            return
        if not self.store.renew(self.term) or self.is_replaced:
            self._fenced = self._fence("another leads, or the server was replaced")
        else:
            self._until_ns = sent_ns + seconds(DEADLINE_S)

    def check_files(self) -> None:
        """Raises JournalFenced once another leads, and JournalUnavailable while the lease cannot be renewed."""
        if self._fenced is not None:
            raise self._fenced
        if not self.may_lead:
            raise JournalUnavailable(self.path, "the lease could not be renewed", "wait")

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Makes the epoch higher than one that an agent has met; raises JournalFenced if another leads."""
        self._connect()
        found = self.store.content
        timeline = max(found.timeline, above.timeline)
        self.store.put(replace(found, epoch=max(found.epoch, above.epoch) + 1, timeline=timeline, led_on=timeline))
        self.term = replace(self.store.read_term(), timeline=max(self.term.timeline, above.timeline))
        return self.term

    # Writing

    def begin(self, *, settles: bool = True) -> Transaction:
        """The first statement of a write: holds the term. Raises JournalFenced and JournalUnavailable."""
        self._connect()
        return self.store.begin(self.term, removes_after=self.last if settles and self._is_unsettled else None)

    def finish(
        self,
        transaction: Transaction,
        entries: Sequence[JournalEntry],
        *,
        is_answer_lost: bool = False,
        on_done: Callable[[], None] = lambda: None,
    ) -> int:
        """The rest of it; returns the number of the last entry. Raises as `begin`, where nothing of it stays.

        `on_done` is called between the commit and its answer.
        """
        transaction.rows = tuple(
            Row(transaction.epoch, entry.kind, json.dumps(entry.body, allow_nan=False)) for entry in entries
        )
        is_reachable = self.store.is_up and self._name not in self.store.cut_off
        is_done = self.store.commit(transaction) if is_reachable else False
        on_done()
        if not is_reachable:
            # The server ends the connection as soon as it notices.
            transaction.is_open = False
            if transaction in self.store.open:
                self.store.open.remove(transaction)
        if is_answer_lost or not is_done:
            self._is_unsettled = True
            is_done = self._was_committed(transaction.rows)
        if not is_done:
            raise JournalUnavailable(self.path, "the connection broke within the write", "wait")
        self._is_unsettled = False
        self.last += len(entries)
        return self.last

    def append(self, entries: Sequence[JournalEntry]) -> int:
        """Both at once."""
        return self.finish(self.begin(), entries)

    def _was_committed(self, rows: tuple[Row, ...]) -> bool:
        """On a new connection: whether a write is on disk whose end was not learnt; raises JournalFenced where it is not."""
        try:
            self.store.check_reachable(self._name)
        except JournalUnavailable:
            return False
        self._generation = self.store.generation
        found = self.store.content.rows
        if self.store.is_fenced(self.term):
            if not rows or found[self.last : self.last + len(rows)][-1:] != rows[-1:]:
                raise self._fence("another leads")
            return True
        if len(found) < self.last or self.is_replaced:
            raise self._fence("a standby has replaced the server")
        is_done = found[self.last :] == rows
        self._is_unsettled = not is_done and len(found) != self.last
        return is_done

    def _connect(self) -> None:
        """What each transaction begins with: a connection to a server that lacks nothing, and the term."""
        self.check_files()
        self.store.check_reachable(self._name)
        if self._generation != self.store.generation:
            lacks_entries = len(self.store.content.rows) < self.last
            if lacks_entries or self.is_replaced:
                raise self._fence("a standby has replaced the server")
            self._generation = self.store.generation
        if self.store.is_fenced(self.term):
            raise self._fence("another leads")

    def _fence(self, problem: str) -> JournalFenced:
        self._fenced = JournalFenced(self.path, problem, "start again")
        return self._fenced

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keeps two."""
        self._connect()
        found, text = self.store.content, json.dumps(checkpoint.state, allow_nan=False)
        kept = (*found.checkpoints[-1:], (checkpoint.seq, text, checkpoint.digest))
        self.store.put(replace(found, checkpoints=kept))
        self.counters.checkpoints += 1

    def probe(self) -> None:
        """A write of nothing that lasts, which removes nothing. Raises as one does."""
        was_unsettled = self._is_unsettled
        self.finish(self.begin(settles=False), ())
        self._is_unsettled |= was_unsettled

    # Reading

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest."""
        return read_checkpoint(self.store)

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Every entry after `seq`, up to the last that this process knows to be there."""
        return read_rows(self.store, seq, self.last)

    def close(self) -> None:
        """Another may lead at once."""
        if self._fenced is None and self.store.is_up and self._name not in self.store.cut_off:
            self.store.release(self.term)


def read_checkpoint(store: Store) -> Checkpoint | None:
    """The newest checkpoint of the table."""
    if not store.content.checkpoints:
        return None
    seq, text, digest = store.content.checkpoints[-1]
    return Checkpoint(seq, json.loads(text), digest)


def read_rows(store: Store, seq: int, upto: int) -> Iterator[tuple[int, JournalEntry]]:
    """The entries of the table after one and up to another."""
    for number, row in enumerate(store.content.rows[seq:upto], seq + 1):
        yield number, JournalEntry(row.kind, json.loads(row.text))
