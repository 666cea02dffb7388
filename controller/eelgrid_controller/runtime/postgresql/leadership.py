"""Who leads: a term that fences every write, and a lease that says who may try to lead.

Owns the rows `term` and `lease`, and the thread that renews the lease. Must not know what a leader writes.

The term is an epoch that rises with each leader. Every transaction of a leader begins by locking its row FOR SHARE, with
its own epoch as a condition; whoever takes over locks it FOR UPDATE, so it waits for the transaction under way, and each
later one of the old leader finds another epoch and writes nothing. That holds whatever clocks, pauses and networks do.

The lease is only a matter of manners: while it runs, nobody tries to take over. It is written by the server's clock, and
read with `clock_timestamp()` after its row is locked, since `now()` is the time at which the transaction began. A leader
stops deciding at a deadline before its end, counted on its own clock from before the renewal was sent. That clock may be
set, and the deadline does not know of it, so whoever would lead also waits until it has seen the row unchanged for as long
by its own clock (`LeaseWatch`). A promoted standby may show an earlier lease, even one that was released, while its leader
still decides by what it knew; so a lease that is older than the server's timeline is waited for, whatever it says. A lease that
ran out without a successor may be renewed: nobody else has led, since whoever
does has another epoch.

Locks are those of rows, at READ COMMITTED; nothing needs serializable transactions, or locks that belong to a session.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Engine, Text, cast, func, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from eelgrid_controller.errors import ControllerConfigError, JournalFenced, JournalUnavailable
from eelgrid_controller.runtime.postgresql.connections import APPLICATION, describe_fault
from eelgrid_controller.runtime.postgresql.schema import lease, term
from eelgrid_protos.messages import LeaderTerm

# Of the server's log; not every server lets everybody read it, and then the epoch alone orders the leaders.
_TIMELINE = text(
    "SELECT CASE WHEN has_function_privilege('pg_walfile_name(pg_lsn)', 'execute') AND NOT pg_is_in_recovery() "
    "THEN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int ELSE 0 END"
)
# Of our own connections, those that keep another one waiting for a lock since so long.
_END_BLOCKERS = text(
    "SELECT count(pg_terminate_backend(a.pid)) FROM unnest(pg_blocking_pids(:pid)) AS b (pid) "
    "JOIN pg_stat_activity a ON a.pid = b.pid WHERE a.datname = current_database() AND a.usename = current_user "
    "AND a.application_name = :name AND a.xact_start < clock_timestamp() - make_interval(secs => :seconds)"
)
# Of a lease that was released, or that nobody has had.
_RELEASED = text("'-infinity'::timestamptz")
# That a lease was released is told at once to whoever listens; whoever does not sees it by looking.
CHANNEL = "eelgrid_leadership"
_RETRY_S = 1.0


def boottime_s() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """How long a lease runs, how often it is renewed, and when a leader that cannot renew stops deciding, in seconds."""

    ttl_s: float = 10.0
    renew_s: float = 2.0
    deadline_s: float = 7.0
    # Each renewal's own limit.
    statement_s: float = 2.0
    # How long a write of a leader whose lease has run out may keep the next one waiting.
    stall_s: float = 0.5

    @classmethod
    def of_ttl(cls, ttl_s: float) -> Self:
        """The times of a lease of this length, in the default's proportions."""
        return cls(
            ttl_s=ttl_s,
            renew_s=0.2 * ttl_s,
            deadline_s=0.7 * ttl_s,
            statement_s=min(2.0, 0.4 * ttl_s),
            stall_s=min(0.5, 0.1 * ttl_s),
        )

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for times by which a leader in good health could lose its lease."""
        if not 0.0 < self.renew_s < self.deadline_s < self.ttl_s or self.renew_s + self.statement_s > self.deadline_s:
            raise ControllerConfigError(
                f"the lease's times {self.renew_s:g}, {self.deadline_s:g} and {self.ttl_s:g} s do not fit",
                "renew within the deadline, statement included, and let the deadline be before the end",
            )


@dataclass(frozen=True, slots=True)
class Term:
    """One leader's time: two are ordered by timeline first, since a promoted standby may have lost the last epochs."""

    epoch: int
    holder: str
    address: str = ""
    timeline: int = 0


class BlockerWatch:
    """Ends connections of a leader that was stopped within a write, which hold the row of the term that we wait for.

    Its lease has run out, so it may not write any more, and its transaction would be refused if it began now. Ending its
    connection undoes the transaction; PostgreSQL's own limit for idle transactions takes ten times as long, and does not
    count while several statements are sent at once (psycopg's executemany).
    """

    def __init__(self, engine: Engine, *, stall_s: float) -> None:
        """`engine` commits each statement; a transaction may take `stall_s` before it counts as stalled."""
        self.ended = 0
        self._engine = engine
        self._stall_s = stall_s

    @contextmanager
    def waiting(self, connection: Connection) -> Iterator[None]:
        """Watches while the body waits for a lock. Raises SQLAlchemyError."""
        pid = connection.execute(select(func.pg_backend_pid())).scalar_one()
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(pid, done), name="blockers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, pid: int, done: threading.Event) -> None:
        limits = {"name": APPLICATION, "seconds": self._stall_s, "pid": pid}
        while not done.wait(self._stall_s):
            # Where the server does not answer, whoever waits gives up by its own limit.
            with suppress(SQLAlchemyError), self._engine.connect() as connection:
                self.ended += int(connection.execute(_END_BLOCKERS, limits).scalar_one())


class LeaseWatch:
    """When a lease, or the server that has it, was last seen to change, by this process's own clock; the server's may be set.

    Set forwards, a lease would seem over whose leader still decides; set back, one would seem to run whose leader is gone.
    """

    def __init__(self, times: LeaseTimes, *, now_s: Callable[[], float] = boottime_s) -> None:
        self._times = times
        self._now_s = now_s
        self._seen: tuple[int, str, int] | None = None
        self._since_s = 0.0

    def is_over(self, connection: Connection) -> bool:
        """Whether somebody else may lead: the lease was released, or its leader must have stopped deciding.

        Waits for nobody. Raises SQLAlchemyError.
        """
        expires_at = lease.c.expires_at
        epoch, seen, is_released, has_expired, led_on = connection.execute(
            select(
                lease.c.epoch, cast(expires_at, Text), expires_at == _RELEASED, func.clock_timestamp() > expires_at,
                select(term.c.timeline).scalar_subquery(),
            )
        ).one()  # fmt: skip
        timeline = int(connection.execute(_TIMELINE).scalar_one())
        if (epoch, seen, timeline) != self._seen:
            self._seen, self._since_s = (epoch, seen, timeline), self._now_s()
        unchanged_s = self._now_s() - self._since_s
        # The first timeline has no standby before it, and a term that nobody has had yet is of none.
        if timeline > max(1, led_on):
            return unchanged_s >= self._times.ttl_s
        return bool(is_released) or unchanged_s >= (self._times.deadline_s if has_expired else self._times.ttl_s)


def take_term(
    connection: Connection,
    *,
    holder: str,
    address: str,
    ttl_s: float,
    watch: LeaseWatch,
    blockers: BlockerWatch,
    above: int = 0,
) -> Term | None:
    """Begins a new term within the caller's transaction; None while another's lease runs. Raises SQLAlchemyError.

    Its epoch is also higher than `above`.
    """
    # First the lock, then the clock, in two statements: the time of one that waited would be that before its wait. Whoever
    # holds the lock renews the lease or takes the term, so there is nothing to wait for.
    if connection.execute(select(lease.c.id).with_for_update(skip_locked=True)).first() is None:
        return None
    if not watch.is_over(connection):
        return None
    # Waits for a write that is under way.
    with blockers.waiting(connection):
        connection.execute(select(term.c.epoch).with_for_update()).one()
    timeline = connection.execute(_TIMELINE).scalar_one()
    epoch, timeline = connection.execute(
        update(term)
        .values(
            epoch=func.greatest(term.c.epoch, above) + 1,
            holder=holder,
            address=address,
            # Never lower than one that agents have seen, on whatever server the row was restored.
            timeline=func.greatest(term.c.timeline, timeline),
        )
        .returning(term.c.epoch, term.c.timeline)
    ).one()
    connection.execute(update(lease).values(epoch=epoch, expires_at=_from_now(ttl_s)))
    return Term(epoch, holder, address, timeline)


def raise_term(connection: Connection, mine: Term, above: LeaderTerm) -> Term:
    """Raises the term, which the caller's transaction holds exclusively, above another; its lease stays."""
    raised = replace(mine, epoch=max(mine.epoch, above.epoch) + 1, timeline=max(mine.timeline, above.timeline))
    connection.execute(update(term).values(epoch=raised.epoch, timeline=raised.timeline))
    connection.execute(update(lease).where(lease.c.epoch == mine.epoch).values(epoch=raised.epoch))
    return raised


def _from_now(seconds: float) -> ColumnElement[Any]:
    """So many seconds from now, by the server's clock at the moment when the statement comes to it."""
    return func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)


def hold_term(connection: Connection, mine: Term, *, location: str, is_exclusive: bool = False) -> None:
    """Keeps the term within the caller's transaction; raises JournalFenced if it is over.

    Exclusively, it also waits for a transaction of this term whose end its own leader did not learn.
    """
    is_mine = (term.c.epoch == mine.epoch) & (term.c.holder == mine.holder)
    locked = select(term.c.id).where(is_mine).with_for_update(read=not is_exclusive)
    if connection.execute(locked).first() is None:
        raise fenced_by(read_term(connection), mine, location=location)


def read_term(connection: Connection) -> Term:
    """Returns who leads, or led last."""
    return Term(*connection.execute(select(term.c.epoch, term.c.holder, term.c.address, term.c.timeline)).one())


def fenced_by(other: Term, mine: Term, *, location: str) -> JournalFenced:
    """Returns the error of a leader that another has followed."""
    where = f" at {other.address}" if other.address else ""
    return JournalFenced(
        location,
        f"{other.holder}{where} leads with epoch {other.epoch}, this process had {mine.epoch}",
        "start this one again, and it waits until that one ends",
        leader=other.address,
    )


def describe_replaced(location: str) -> JournalFenced:
    """Returns the error of a leader whose database a standby has replaced."""
    return JournalFenced(
        location,
        "a standby has replaced the server, and may lack the last entries",
        "start this controller again: it begins from what the database has now",
    )


def renew_lease(connection: Connection, mine: Term, *, ttl_s: float) -> bool:
    """Extends the lease within the caller's transaction; False if another term has begun."""
    done = connection.execute(update(lease).where(lease.c.epoch == mine.epoch).values(expires_at=_from_now(ttl_s)))
    return bool(done.rowcount == 1)


def release_lease(connection: Connection, mine: Term) -> None:
    """Ends the lease at once, so that another may take over; its row stays, since the next epoch follows from it."""
    connection.execute(update(lease).where(lease.c.epoch == mine.epoch).values(expires_at=_RELEASED))
    connection.execute(select(func.pg_notify(CHANNEL, str(mine.epoch))))


class LeaseKeeper:
    """Renews the lease of one term, in a thread and on a connection of its own, until it is closed or fenced.

    `may_lead` is a comparison of two numbers, for any thread.
    """

    def __init__(
        self,
        engine: Engine,
        mine: Term,
        *,
        times: LeaseTimes,
        location: str,
        began_s: float,
        now_s: Callable[[], float] = boottime_s,
    ) -> None:
        """`began_s` is when the taking of the term was sent."""
        self.renewals = 0
        self._engine = engine
        self._term = mine
        self._times = times
        self._location = location
        self._now_s = now_s
        self._until_s = began_s + times.deadline_s
        self._fenced: JournalFenced | None = None
        self._fault = ""
        # The server's own timeline at the first renewal; None before.
        self._timeline: int | None = None
        # Held by whoever changes the term, since a renewal of the former epoch would find none.
        self._renewing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Begins to renew."""
        self._thread.start()

    @property
    def may_lead(self) -> bool:
        """Whether decisions may be taken now."""
        return self._fenced is None and self._now_s() < self._until_s

    @property
    def age_s(self) -> float:
        """Seconds since the last renewal that succeeded was sent."""
        return max(0.0, self._now_s() - (self._until_s - self._times.deadline_s))

    def check(self) -> None:
        """Raises JournalFenced once another leads, and JournalUnavailable while the lease cannot be renewed."""
        if self._fenced is not None:
            raise self._fenced
        if not self.may_lead:
            raise JournalUnavailable(
                self._location,
                f"the lease could not be renewed ({self._fault or 'the server does not answer'})",
                "check that the server runs and can be reached; work resumes by itself, unless another leads by then",
            )

    def check_server(self, connection: Connection) -> None:
        """Raises JournalFenced on a server that a standby has replaced since the first renewal, and SQLAlchemyError."""
        timeline = int(connection.execute(_TIMELINE).scalar_one())
        if self._timeline is not None and timeline != self._timeline:
            raise describe_replaced(self._location)

    @contextmanager
    def change_term(self) -> Iterator[Callable[[Term], None]]:
        """Holds renewals up while the epoch is raised; yields a function that takes note of the new term."""

        def change(raised: Term) -> None:
            self._term = raised

        with self._renewing:
            yield change

    def renew(self) -> None:
        """Renews once; keeps what went wrong for `check`."""
        with self._renewing:
            self._renew()

    def _renew(self) -> None:
        sent_s = self._now_s()
        try:
            with self._engine.begin() as connection:
                is_mine = renew_lease(connection, self._term, ttl_s=self._times.ttl_s)
                other = None if is_mine else read_term(connection)
                timeline = int(connection.execute(_TIMELINE).scalar_one())
        except SQLAlchemyError as error:
            self._fault = describe_fault(error).problem
            return
        if other is not None:
            self._fenced = fenced_by(other, self._term, location=self._location)
            return
        if self._timeline is None:
            self._timeline = timeline
        if timeline != self._timeline:
            # Its row of the term may be ours all the same, and the last entries are missing.
            self._fenced = describe_replaced(self._location)
            return
        self.renewals += 1
        self._until_s, self._fault = sent_s + self._times.deadline_s, ""

    def close(self) -> None:
        """Stops renewing, releases the lease where the server can be reached, and closes the connection."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._fenced is None:
            try:
                with self._engine.begin() as connection:
                    release_lease(connection, self._term)
            except SQLAlchemyError as error:
                # It runs out by itself.
                self._fault = describe_fault(error).problem
        self._engine.dispose()

    def _run(self) -> None:
        wait_s = self._times.renew_s
        while not self._stop.wait(wait_s) and self._fenced is None:
            self.renew()
            wait_s = min(_RETRY_S, self._times.renew_s) if self._fault else self._times.renew_s
