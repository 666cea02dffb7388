"""Two machines with a controller each, over one store: one leads, the other follows and takes over.

Owns what a controller's process does besides what any does (life.py): it follows the journal, begins a term when nobody leads,
renews its lease, writes in statements that anything can come between, and ends when another leads. A process may be
stopped (SIGSTOP) at any moment: what reaches it waits in its machine's kernel, and it goes on where it was.

Transcribed from `runtime.postgresql.standby`, `server.grpc.leader_terms` and the loop; see tests/sim/__init__.py.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from eelgrid_controller.core.recovery import RecoveredState, encode_entries, recover_state, replay_entry
from eelgrid_controller.errors import JournalError, JournalFenced, JournalUnavailable
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_controller.state.journal import JournalSanitizer
from eelgrid_protos.faults import Fault, Unavailable
from eelgrid_protos.messages import Hello, LeaderTerm
from tests.sim.broken import demand
from tests.sim.clock import Clock, seconds
from tests.sim.controller import Controller
from tests.sim.ledger import Ledger
from tests.sim.life import Life, _Command
from tests.sim.network import CONTROLLER, Connection, End, Network
from tests.sim.process import PausableProcess
from tests.sim.sessions import Session, Sessions
from tests.sim.store import RENEW_S, LeaseWatch, Row, Store, TermJournal, Transaction, read_checkpoint, read_rows
from tests.sim.timeline import Timeline
from tests.sim.users import Reply

__all__ = ["LeaderLife", "Pair", "Seat"]

_POLL_NS = seconds(0.5)
_STATEMENT_NS = seconds(0.02)
_CHECK_NS = seconds(1)
_RESTART_NS = seconds(3)
# Entries that are compared at each look.
_COMPARED = 1024


class LeaderLife(Life):
    """The life of a process from when it began to lead."""

    journal: TermJournal

    def __init__(self, seat: "Seat", journal: TermJournal) -> None:
        self.seat = seat
        super().__init__(seat.timeline, seat.clock, journal, seat.ledger)

    @property
    def is_current(self) -> bool:
        """Whether it leads by the store, which has all that it knows; not where a standby has replaced the server."""
        store = self.journal.store
        has_all = self.journal.last <= len(store.content.rows) and not self.journal.is_replaced
        return has_all and not self.is_dead and not store.is_fenced(self.journal.term)

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """As any life, but not while the process is stopped; ends it where another leads."""
        self.seat.later(delay_ns, lambda: None if self.is_dead else self._run(action))

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except JournalFenced as error:
            self.seat.end(str(error))

    def _answer_unwritten(self, batch: list[_Command]) -> None:
        """The audit log is written in the same fenced transaction; what was refused is answered while the lease lasts."""
        if any(command.is_audited and command.fault is None for command in batch):
            self._commit(batch, [])
            return
        try:
            self.journal.check_files()
        except JournalUnavailable as error:
            for command in batch:
                command.fault = Unavailable(str(error))
        self._finish(batch, None)

    def _commit(self, batch: list[_Command], events: list[Event]) -> None:
        """The first statement; the rest follows, if the process is not stopped or killed in between."""
        try:
            self.seat.transaction = transaction = self.journal.begin()
        except JournalError as error:
            self._undo(batch, error)
            return
        self.later(self.timeline.draw_ns(_STATEMENT_NS), lambda: self._write(batch, events, transaction))

    def _write(self, batch: list[_Command], events: list[Event], transaction: Transaction) -> None:
        is_lost = self.timeline.chance(self.journal.store.answer_lost_p)
        cut = self.seat.lose_store if is_lost and self.timeline.chance(0.5) else lambda: None
        entries = encode_entries(events)
        try:
            last = self.journal.finish(transaction, entries, is_answer_lost=is_lost, on_done=cut)
        except JournalError as error:
            self._undo(batch, error)
            return
        self._go_on(batch, len(events), last)

    def lead(self) -> None:
        """Renews the lease, and asks whether it still leads, until the end."""
        self.later(seconds(RENEW_S), self._renew)
        self.later(_CHECK_NS, self._check)

    def _renew(self) -> None:
        self.journal.renew()
        self.later(seconds(RENEW_S), self._renew)

    def _check(self) -> None:
        with contextlib.suppress(JournalUnavailable):
            self.journal.check_files()
        self.later(_CHECK_NS, self._check)


class PairSession(Session):
    """A stream whose agent may have met a later leader."""

    _life: LeaderLife

    def _greet(self, message: Any) -> None:
        """See `server.grpc.leader_terms.LeaderClaims.check`."""
        journal = self._life.journal
        known = message.term if isinstance(message, Hello) else None
        if known is None or not journal.term.yields_to(known):
            super()._greet(message)
        elif known.timeline > journal.term.timeline or not journal.may_lead:
            self.end(f"the agent has met {known}, this one is {journal.term}")
        else:
            try:
                journal.raise_term(known)
            except JournalUnavailable as error:
                self.end(str(error))
            else:
                super()._greet(message)

    def _tell_plan(self) -> None:
        if not self._life.journal.may_lead:
            self.is_plan_wanted = True
            self._life.later(seconds(0.5), self.pump)
            return
        self._life.seat.observe_teller()
        super()._tell_plan()

    def _welcome(self) -> None:
        self._life.seat.observe_teller()
        super()._welcome()

    def _on_claim_compared(self, fault: Exception | None) -> None:
        self._life.seat.observe_teller()
        super()._on_claim_compared(fault)


class PairSessions(Sessions):
    """The streams of a leader."""

    session_type = PairSession
    life: LeaderLife

    @property
    def term(self) -> LeaderTerm | None:
        """That of the journal."""
        return self.life.journal.term


class _Socket:
    """One end of a stream in the kernel of a machine whose process may be stopped."""

    def __init__(self, seat: "Seat", connection: Connection) -> None:
        self._seat = seat
        self._session: End | None = None
        seat.enter(lambda: self._accept(connection))

    def _accept(self, connection: Connection) -> None:
        if self._seat.life is None:
            connection.close(CONTROLLER, "this controller follows")
        else:
            self._session = self._seat.accept(connection)

    def received(self, data: bytes) -> None:
        """The next message."""
        self._seat.enter(lambda: self._session.received(data) if self._session else None)

    def closed(self, reason: str) -> None:
        """The agent is gone."""
        self._seat.enter(lambda: self._session.closed(reason) if self._session else None)


class _Follower:
    """A warm standby's state; see `runtime.postgresql.standby`."""

    def __init__(self, store: Store) -> None:
        self.path = "postgresql"
        self.rebuilds = 0
        self._store = store
        self._known: tuple[Row, ...] = ()
        self._rebuild()

    def newest_checkpoint(self) -> Any:
        """That of the table."""
        return read_checkpoint(self._store)

    def entries_after(self, seq: int) -> Any:
        """All of the table."""
        return read_rows(self._store, seq, len(self._store.content.rows))

    def _rebuild(self) -> None:
        self.state = recover_state(self, ClusterState).state
        self._healer = JournalSanitizer()
        self._known = self._store.content.rows

    def follow(self) -> None:
        """Applies what is new; begins anew where what was read is not there any more."""
        rows, applied = self._store.content.rows, len(self._known)
        if rows[max(0, applied - _COMPARED) : applied] != self._known[-_COMPARED:]:
            self.rebuilds += 1
            self._rebuild()
            return
        for seq, entry in read_rows(self._store, applied, len(rows)):
            replay_entry(self.state, seq, entry, self._healer, path=self.path)
        self._known = rows


class Seat(PausableProcess, Controller):
    """One machine, and the process that runs on it, if one does."""

    life: LeaderLife | None

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        network: Network,
        ledger: Ledger,
        store: Store,
        *,
        life_type: type[LeaderLife],
        drift_ppm: int,
    ) -> None:
        self.address = name
        self.timeline = timeline
        self.ledger = ledger
        self.clock = Clock(lambda: timeline.now_ns, drift_ppm=drift_ppm)
        self.life = None
        self.transaction: Transaction | None = None
        self.crashes = self.terms = self.rebuilds = 0
        self._kept = {}
        self._life_type = life_type
        self._network = network
        self._store = store

    @property
    def title(self) -> str:  # type: ignore[override]
        """See `PausableProcess`."""
        return f"controller {self.address} leading={self.life is not None}"

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except JournalFenced as error:
            self.end(str(error))

    def start(self) -> None:
        """A process starts to follow, unless one runs."""
        if self.is_running:
            return
        self._begin()
        self._network.listeners[self.address] = lambda connection: _Socket(self, connection)
        self.timeline.note(f"controller {self.address} started")
        self._follower: _Follower | None = None
        self._watch = LeaseWatch(self._store, self.clock)
        self._look()

    def crash(self) -> None:
        """The process dies at once; the kernel ends its streams, and its connection to the store."""
        if not self.is_running:
            return
        if self.life is not None:
            self.life.is_dead = True
        self.life = None
        self._die()
        self._kept.clear()
        self.crashes += 1
        if self.transaction is not None and self.transaction in self._store.open:
            self.transaction.is_open = False
            self._store.open.remove(self.transaction)
        self.transaction = None
        self._network.listeners.pop(self.address, None)
        for connection in self._network.connections:
            if connection.address == self.address:
                connection.close(CONTROLLER, "connection reset")
        self.timeline.note(f"controller {self.address} crashed")

    def end(self, reason: str) -> None:
        """Another leads: the process ends, and is started again to follow."""
        self.timeline.note(f"controller {self.address} ends: {reason}")
        self.crash()
        self.timeline.after(self.timeline.draw_ns(_RESTART_NS), self.start)

    def lose_store(self) -> None:
        """The server cannot be reached from here for some seconds."""
        self._store.cut_off.add(self.address)
        self.timeline.after(self.timeline.draw_ns(seconds(12)), lambda: self._store.cut_off.discard(self.address))

    def observe_teller(self) -> None:
        """An observer is told by whom the next plan or Welcome is: one may have been followed, and not know it yet."""
        assert self.life is not None
        self.ledger.is_teller_current = self.life.is_current
        self.ledger.teller = self.life.journal.term

    def _look(self) -> None:
        """See `JournalStandby._look`."""
        try:
            self._store.check_reachable(self.address)
            if self._follower is None:
                self._follower = _Follower(self._store)
            self._follower.follow()
            term = self._store.take_term(self.address, f"{self.address}{self._starts}", self._watch)
        except JournalUnavailable:
            term = None
        if term is None:
            self.later(_POLL_NS, self._look)
        else:
            self._lead(term)

    def _lead(self, term: LeaderTerm) -> None:
        assert self._follower is not None
        journal = TermJournal(self._store, self.address, term, self.clock)
        warm, self.rebuilds = self._follower.state, self.rebuilds + self._follower.rebuilds
        life = self._life_type(self, journal)
        demand(3, warm.digest() == life.core.state.digest(), f"{self.address} has followed another journal")
        life._adopt(RecoveredState(state=warm, checkpoint_seq=0, replayed=0))
        self.terms += 1
        self.ledger.recovered(life.core.state)
        self.life, self.sessions = life, PairSessions(life)
        life.lead()
        self.timeline.note(f"controller {self.address} leads term={term} revision={warm.revision}")

    def serve(self, request: Any, reply: Reply) -> None:
        """Answers a call; a follower names the leader, and a stopped process answers when it goes on."""
        self.enter(lambda: self._serve(request, reply))

    def _serve(self, request: Any, reply: Reply) -> None:
        if self.life is None:
            reply(Unavailable("this controller follows"))
        else:
            super().serve(request, reply)


class Pair:
    """Both, as users and invariants see them."""

    def __init__(self, timeline: Timeline, store: Store, seats: list[Seat]) -> None:
        self.seats = seats
        self._served = seats[0]
        self._timeline = timeline
        self._store = store

    @property
    def leader(self) -> Seat | None:
        """Whose term the store has, if that process runs and is not stopped."""
        for seat in self.seats:
            if seat.life is not None and seat.life.is_current and not seat.is_stopped:
                return seat
        return None

    @property
    def life(self) -> LeaderLife | None:
        """That of the leader, if it knows all that the store has."""
        life = None if self.leader is None else self.leader.life
        return life if life is not None and life.journal.last == len(self._store.content.rows) else None

    @property
    def clock(self) -> Clock:
        """One of their clocks, for faults."""
        return self._timeline.rng.choice(self.seats).clock

    @property
    def ahead(self) -> list[str]:
        """See `Controller`."""
        return [] if self.leader is None else self.leader.ahead

    def serve(self, request: Any, reply: Reply) -> None:
        """A user calls whoever served last, or another one."""
        seat = self._served if self._timeline.chance(0.6) else self._timeline.rng.choice(self.seats)

        def answered(answer: bytes | Fault) -> None:
            if not isinstance(answer, Unavailable):
                self._served = seat
            reply(answer)

        seat.serve(request, answered)
