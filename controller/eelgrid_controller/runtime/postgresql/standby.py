"""A warm standby: follows the journal of whoever leads, and leads as soon as nobody else does.

Owns one thread that looks at the lease and reads new entries. Must not know what an entry means, nor what a leader does.

Theory. The state of a controller is what its journal leads to, so a standby that applies each entry as it is written has
the leader's state, and has only the tail to read when it takes over; a leader's start from a checkpoint takes as long as
the journal is large. Polling is the truth: what is told by NOTIFY only shortens the wait, since a notification is lost
with its connection. What was read may still be taken back: a leader whose commit ended in doubt removes it, and a promoted
standby of the database may lack it. So the last entries that were applied are compared with the table at each look, and
where they differ, the state is built anew from the newest checkpoint, by the same code that starts a controller.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Error as DriverError
from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from eelgrid_controller.core.recovery import RecoveredState, recover_state, replay_entry
from eelgrid_controller.errors import JournalError, JournalUnavailable
from eelgrid_controller.runtime.postgresql.connections import describe_fault, discard, make_engine, read_snapshot
from eelgrid_controller.runtime.postgresql.journal import (
    ERRORS,
    LeaderCandidate,
    PostgresJournal,
    describe_other_leader,
)
from eelgrid_controller.runtime.postgresql.leadership import CHANNEL, Term, boottime_s, read_term
from eelgrid_controller.runtime.postgresql.reading import JournalReader
from eelgrid_controller.runtime.postgresql.schema import checkpoints, journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import JournalSanitizer

# Between two looks, at most: a part of the time in which a crashed leader is followed.
_POLL_S = 0.25
# After a journal could not be read, which takes long.
_REBUILD_AGAIN_S = 10.0
# After an error, so that a database that is away is not asked all the time.
_RETRY_S = 1.0
# Entries that are compared with the table at each look; more than any commit of a leader has, so that one that was taken
# back and written anew in part is found.
_COMPARED = 1024
# Entries of one look, so that the lease is looked at in between.
_ENTRIES_ONCE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedState:
    """A copy of the state that a standby has, as of the last entry that it applied."""

    state: ClusterState
    # When the look was sent that read the journal to its end, on `boottime_s`.
    looked_s: float
    leader: Term
    # Which of the states that were built anew it is a copy of.
    builds: int = 0

    @property
    def age_s(self) -> float:
        """Seconds for which the leader may have written what is not in it."""
        return max(0.0, boottime_s() - self.looked_s)


class _Rewound(Exception):
    """The table no longer has what was read of it."""


class JournalStandby:
    """Follows until it leads; `lead` is called once, from a thread, and everything else from any other."""

    def __init__(self, candidate: LeaderCandidate, fresh_state: Callable[[], ClusterState]) -> None:
        # What to let go of with the connections.
        self.on_close: Callable[[], None] = lambda: None
        self.rebuilds = 0
        self.fault = ""
        self._candidate = candidate
        self._fresh_state = fresh_state
        self._leader: Term | None = None
        self._looked_s: float | None = None
        # Held while the state changes, and while it is copied.
        self._changing = threading.Lock()
        self._has_begun = False
        self._builds = 0
        self._state = fresh_state()
        self._healer = JournalSanitizer()
        self._applied = 0
        # Number, epoch and checksum of the last entries that were applied.
        self._known: deque[tuple[int, int, int]] = deque(maxlen=_COMPARED)
        self._rebuild_at_s = 0.0
        self._listener: Engine | None = None
        self._listening: Connection | None = None
        self._stop = threading.Event()
        self._is_over = threading.Event()
        self._is_over.set()
        self._journal: PostgresJournal | None = None
        self._is_handed_over = False

    @property
    def leader(self) -> str:
        """The address of who leads, as far as that is known."""
        return "" if self._leader is None else self._leader.address

    @property
    def applied_seq(self) -> int:
        """Number of the last entry that was applied."""
        return self._applied

    @property
    def age_s(self) -> float | None:
        """Seconds since the journal was last read to its end; None before the first time."""
        return None if self._looked_s is None else max(0.0, boottime_s() - self._looked_s)

    def copy_state(self, last: FollowedState | None = None) -> FollowedState | None:
        """Returns what was followed so far, for any thread; None before it was whole, while it is built anew, and once it leads.

        Where nothing was applied since the `last` copy, that one's state is returned again.
        """
        with self._changing:
            if self._looked_s is None or self._leader is None or self._is_handed_over:
                return None
            is_last = last is not None and (last.builds, last.state.revision) == (self._builds, self._applied)
            return FollowedState(
                state=last.state if last is not None and is_last else self._state.copy(),
                looked_s=self._looked_s,
                leader=self._leader,
                builds=self._builds,
            )

    def describe_leader(self) -> str:
        """Says who leads, for those who called this process instead."""
        if self._leader is None:
            return "this controller follows, and has not found out who leads"
        return str(describe_other_leader(self._candidate.location, self._leader)).partition("; ")[0]

    def lead(self, address: str) -> PostgresJournal | None:
        """Follows until this process leads; returns its journal, and None after `close`.

        Others are told that it leads at `address`. Raises ControllerError where the journal was moved.
        """
        self._is_over.clear()
        self._candidate = replace(self._candidate, address=address)
        try:
            while not self._stop.is_set() and self._journal is None:
                try:
                    self.fault = ""
                    self._look()
                    if self._journal is None:
                        self._wait()
                except (*ERRORS, JournalUnavailable) as error:
                    self.fault = str(error) if isinstance(error, JournalUnavailable) else describe_fault(error).problem
                    self._forget_listener()
                    self._stop.wait(_RETRY_S)
            if self._stop.is_set() or self._journal is None:
                return None
            with self._changing:
                self._is_handed_over = True
            self._journal.on_close = self.on_close
            return self._journal
        finally:
            self._forget_listener()
            self._is_over.set()

    def recover(self) -> RecoveredState:
        """Returns the state as of the last entry of the journal that `lead` returned; raises JournalError."""
        opened = self._journal
        assert opened is not None
        try:
            with self._candidate.engine.connect() as connection:
                self._compare(connection)
                newest = connection.execute(select(checkpoints.c.seq).order_by(checkpoints.c.seq.desc()).limit(1))
                checkpoint_seq = newest.scalar() or 0
            for seq, entry in opened.entries_after(self._applied):
                replay_entry(self._state, seq, entry, self._healer, path=opened.path)
                self._applied = seq
        except (_Rewound, JournalError, SQLAlchemyError):
            # Whatever it is, a start from the checkpoint either does without it or says what it is.
            self.rebuilds += 1
            return recover_state(opened, self._fresh_state)
        return RecoveredState(
            state=self._state,
            checkpoint_seq=checkpoint_seq,
            replayed=self._applied - checkpoint_seq,
            healed=tuple(self._healer.lines),
            healed_count=self._healer.count,
        )

    def close(self) -> None:
        """Ends `lead`, and gives up what it took and nobody got."""
        self._stop.set()
        self._is_over.wait()
        if self._is_handed_over:
            return
        if self._journal is not None:
            self._journal.close()
        self._candidate.close()
        self.on_close()

    # One look

    def _look(self) -> None:
        """Reads what is new, and begins a term if nobody leads. Raises SQLAlchemyError."""
        with self._candidate.engine.connect() as connection:
            is_over = self._candidate.watch.is_over(connection)
            self._leader = read_term(connection)
        if not is_over:
            self._follow()
            return
        found = self._candidate.try_to_lead()
        if isinstance(found, PostgresJournal):
            self._journal = found
        else:
            self._leader = found

    def _follow(self) -> None:
        if not self._has_begun:
            # A journal that begins with a checkpoint, as every old one does.
            self._has_begun = True
            self._rebuild()
        while not self._stop.is_set():
            sent_s = boottime_s()
            try:
                with read_snapshot(self._candidate.engine) as connection:
                    self._compare(connection)
                    count = self._apply(connection)
            except (_Rewound, JournalError):
                # Also where entries were pruned that this standby has not read; damage is told when it would lead.
                self.rebuilds += self._rebuild()
                return
            if count < _ENTRIES_ONCE:
                self._looked_s = sent_s
                return

    def _compare(self, connection: Connection) -> None:
        """Raises _Rewound unless the table has the last entries that were applied."""
        if not self._known:
            return
        first, last = self._known[0][0], self._known[-1][0]
        rows = select(journal.c.seq, journal.c.epoch, journal.c.crc32).where(journal.c.seq.between(first, last))
        found = [tuple(row) for row in connection.execute(rows.order_by(journal.c.seq))]
        # Old ones may have been pruned behind a checkpoint.
        if not found or found != list(self._known)[-len(found) :]:
            raise _Rewound

    def _apply(self, connection: Connection) -> int:
        """Applies the next entries; returns how many. Raises JournalError for one that is missing or damaged."""
        reader = JournalReader(self._candidate.engine, self._candidate.location)
        rows = select(journal.c.seq, journal.c.epoch, journal.c.crc32).where(journal.c.seq > self._applied)
        found = [tuple(row) for row in connection.execute(rows.order_by(journal.c.seq).limit(_ENTRIES_ONCE))]
        if not found:
            return 0
        # Read before they are applied, since whoever copies the state waits for that, and not for the database.
        entries = tuple(reader.read_entries(connection, self._applied, found[-1][0]))
        with self._changing:
            for mark, (seq, entry) in zip(found, entries, strict=False):
                replay_entry(self._state, seq, entry, self._healer, path=self._candidate.location)
                self._applied = seq
                self._known.append(mark)
        return len(found)

    def _rebuild(self) -> bool:
        """Builds the state anew, from the newest checkpoint; not soon again after it failed. Raises SQLAlchemyError."""
        if boottime_s() < self._rebuild_at_s:
            return False
        with self._changing:
            # What was read may have been taken back: nobody is shown it any more.
            self._state, self._healer, self._applied = self._fresh_state(), JournalSanitizer(), 0
            self._known.clear()
            self._looked_s = None
            self._builds += 1
        last, before = self._read_end()
        reader = JournalReader(self._candidate.engine, self._candidate.location, last_seq=last)
        try:
            recovered = recover_state(reader, self._fresh_state)
        except JournalError as error:
            # Whoever leads has it in memory; this one says so, and whoever would lead ends with the reason.
            self._rebuild_at_s = boottime_s() + _REBUILD_AGAIN_S
            self.fault = str(error)
            return False
        if self._read_end(last) == (last, before):
            self._state, self._applied = recovered.state, recovered.state.revision
            self._known.extend(before)
        return True

    def _read_end(self, upto: int | None = None) -> tuple[int, list[tuple[int, int, int]]]:
        """Returns the number of the last entry, or that given, and what is compared of those before it, in order."""
        with read_snapshot(self._candidate.engine) as connection:
            if upto is None:
                ends = (select(func.coalesce(func.max(table.c.seq), 0)) for table in (journal, checkpoints))
                upto = max(connection.execute(one).scalar_one() for one in ends)
            rows = select(journal.c.seq, journal.c.epoch, journal.c.crc32).where(journal.c.seq <= upto)
            found = connection.execute(rows.order_by(journal.c.seq.desc()).limit(_COMPARED)).all()
        return upto, [tuple(row) for row in reversed(found)]

    # Waiting

    def _wait(self) -> None:
        """Waits for the next look, or until somebody releases the lease. Raises SQLAlchemyError."""
        if self._listener is None or self._listening is None:
            self._listener = make_engine(self._candidate.engine.url, connections_most=1, is_autocommit=True)
            self._listening = self._listener.connect()
            self._listening.execute(text(f"LISTEN {CHANNEL}"))
            # Between the look and this, it may have been released.
            return
        driver: Any = self._listening.connection.dbapi_connection
        try:
            for _ in driver.notifies(timeout=_POLL_S, stop_after=1):
                pass
        except DriverError as error:
            raise SQLAlchemyError(str(error)) from error

    def _forget_listener(self) -> None:
        listener, listening = self._listener, self._listening
        self._listener = self._listening = None
        if listening is not None:
            discard(listening)
        if listener is not None:
            listener.dispose()
