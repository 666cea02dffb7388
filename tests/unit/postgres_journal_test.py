"""The journal on a real PostgreSQL: who leads writes, nobody else, and no write is lost or doubled by a lost connection."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from tests import postgres_rig
from tests.builders.stores import PostgresStore, postgres_store
from tests.postgres_rig import CuttingProxy, PostgresServer
from tests.waiting import poll_until

from eelgrid_controller.errors import (
    ControllerConfigError,
    JournalCorrupt,
    JournalFenced,
    JournalFull,
    JournalHeld,
    JournalTooNew,
    JournalUnavailable,
)
from eelgrid_controller.runtime.audit_log import AuditFilter
from eelgrid_controller.state.journal import Checkpoint, JournalEntry
from eelgrid_protos.messages import AuditEntry

if not postgres_rig.find_missing():
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import event, text

    from eelgrid_controller.runtime.postgresql import connections, leadership, schema

pytestmark = postgres_rig.needs_server


def entries(*names):
    return [JournalEntry("node_lost", {"time_ns": 1, "node_name": name}) for name in names]


def names_in(journal):
    return [entry.body["node_name"] for _, entry in journal.entries_after(0)]


def audited(user):
    return [AuditEntry(time_ns=1, user=user, call="CancelWorkload", code="OK", peer="", reason="")]


def end_lease(store):
    """As if the leader had not renewed for long."""
    store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")


@pytest.fixture
def store():
    with postgres_store(None) as found:
        yield found


def test_one_controller_leads_and_the_next_begins_when_it_ends(store):
    with closing(store.open(address="10.0.0.1:7443")) as first:
        assert first.term.epoch == 1
        assert first.term.timeline == 1
        with pytest.raises(JournalHeld, match=r"10\.0\.0\.1:7443\) leads with epoch 1.*stop that one"):
            store.open()
        first.append(entries("a"))
    with closing(store.open()) as second:
        assert second.term.token == (1, 2)
        assert names_in(second) == ["a"]
    assert store.run("SELECT count(*), max(epoch) FROM eelgrid.lease") == [(1, 2)]


def test_a_crashed_leader_is_followed_when_its_lease_ends(store):
    times = leadership.LeaseTimes(ttl_s=1.5, renew_s=0.3, deadline_s=1.2, statement_s=0.5)
    with ExitStack() as stack:
        crashed = store.open(times=times)
        stack.callback(crashed.close)
        crashed._keeper._stop.set()
        second = stack.enter_context(closing(store.open(wait_s=10.0, times=times)))
        assert second.term.epoch == 2
        # By its own clock it stopped before the other began; it learns the rest when it asks again.
        with pytest.raises(JournalUnavailable, match="lease could not be renewed"):
            crashed.append(entries("x"))
        crashed._keeper.renew()
        with pytest.raises(JournalFenced):
            crashed.append(entries("x"))


def test_a_leader_that_renews_is_not_followed(store):
    times = leadership.LeaseTimes(ttl_s=1.0, renew_s=0.1, deadline_s=0.9, statement_s=0.5)
    with closing(store.open(times=times)) as journal:
        with pytest.raises(JournalHeld):
            store.open(wait_s=2.0)
        assert journal._keeper.renewals > 5
        journal.append(entries("a"))


def test_a_paused_leader_that_wakes_writes_nothing_and_must_end(store):
    with closing(store.open()) as paused:
        paused.append(entries("a"))
        end_lease(store)
        with closing(store.open()) as leader:
            # What the paused one believes: its renewal was a moment ago.
            assert paused.may_lead
            for write in (
                lambda: paused.append(entries("x"), audited("x")),
                lambda: paused.write_checkpoint(Checkpoint(1, {}, "")),
                paused.probe,
            ):
                with pytest.raises(JournalFenced, match="leads with epoch 2, this process had 1"):
                    write()
            assert leader.append(entries("b")) == 2
            assert names_in(leader) == ["a", "b"]
            assert leader.newest_checkpoint() is None
            assert leader.read_audit_page(AuditFilter(), size=5).total == 0
            paused._keeper.renew()
            with pytest.raises(JournalFenced):
                paused.check_files()
            assert not paused.may_lead


def test_whoever_takes_over_waits_for_the_write_under_way_and_sees_it(store):
    arrived, go_on = threading.Event(), threading.Event()

    def park(_connection):
        # The second commits on an engine of its own.
        arrived.set()
        assert go_on.wait(10.0)

    with closing(store.open()) as old, ThreadPoolExecutor(2) as threads:
        event.listen(old._engine, "commit", park)
        writing = threads.submit(old.append, entries("a"))
        assert arrived.wait(10.0)
        end_lease(store)
        taking = threads.submit(store.open)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        poll_until(lambda: store.run(waiting)[0][0] > 0, "the second waits for the row of the term")
        assert not taking.done()
        go_on.set()
        assert writing.result(10.0) == 1
        with closing(taking.result(10.0)) as new:
            assert names_in(new) == ["a"]
            with pytest.raises(JournalFenced):
                old.append(entries("b"))


def test_a_leader_that_stopped_within_a_write_is_ended_by_who_takes_over(store):
    """Between two statements of one message the server's limit for idle transactions does not count."""
    arrived, go_on = threading.Event(), threading.Event()

    def park(_connection):
        arrived.set()
        assert go_on.wait(60.0)

    with closing(store.open()) as old, ThreadPoolExecutor(1) as threads:
        old._connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 0")
        old._connection.commit()
        # It is stopped as a whole.
        old._keeper._stop.set()
        old._keeper._thread.join()
        event.listen(old._engine, "commit", park)
        writing = threads.submit(old.append, entries("a"))
        try:
            assert arrived.wait(10.0)
            end_lease(store)
            with closing(store.open(wait_s=40.0)) as new:
                assert new.term.epoch == 2
                assert names_in(new) == []
                go_on.set()
                with pytest.raises(JournalFenced):
                    writing.result(20.0)
        finally:
            go_on.set()


def test_an_ended_backend_costs_one_write_and_the_next_goes_on(store):
    with closing(store.open()) as journal:
        journal.append(entries("a"))
        for number in range(3):
            assert store.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'eelgrid-controller'"
            )
            with pytest.raises(JournalUnavailable, match="work resumes by itself"):
                journal.append(entries("x"))
            assert journal.append(entries(f"b{number}")) == 2 + number
        assert names_in(journal) == ["a", "b0", "b1", "b2"]


@pytest.fixture
def proxied(store):
    with CuttingProxy(postgres_rig.shared_server().port) as proxy:
        address = store.url.replace(f":{postgres_rig.shared_server().port}/", f":{proxy.port}/")
        yield proxy, type(store)(address), store


def test_a_commit_whose_answer_is_lost_is_found_by_its_rows(proxied):
    proxy, through, store = proxied
    with closing(through.open()) as journal:
        for number in range(1, 21):
            proxy.cut_next(b"COMMIT", is_forwarded=True)
            assert journal.append(entries(f"n{number}"), audited(f"u{number}")) == number
        assert len(proxy.cuts) == 20
        assert store.run("SELECT count(*), max(seq) FROM eelgrid.journal") == [(20, 20)]
        assert journal.read_audit_page(AuditFilter(), size=50).total == 20


def test_a_commit_that_never_arrived_is_refused_and_leaves_nothing(proxied):
    proxy, through, store = proxied
    with closing(through.open()) as journal:
        for number in range(1, 11):
            proxy.cut_next(b"COMMIT", is_forwarded=False)
            with pytest.raises(JournalUnavailable):
                journal.append(entries("lost"), audited("lost"))
            assert journal.append(entries(f"n{number}")) == number
        assert names_in(journal) == [f"n{number}" for number in range(1, 11)]
        assert store.run("SELECT count(*) FROM eelgrid.audit") == [(0,)]


def test_a_write_that_nobody_was_told_of_is_removed_before_the_next(proxied):
    proxy, through, store = proxied
    with closing(through.open()) as journal:
        journal.append(entries("a"))
        proxy.cut_next(b"COMMIT", is_forwarded=True, is_shut=True)
        with pytest.raises(JournalUnavailable):
            journal.append(entries("b", "c"), audited("b"))
        assert store.run("SELECT max(seq) FROM eelgrid.journal") == [(3,)]
        # Nor is it read by whoever recovers from what was acknowledged.
        proxy.open()
        assert names_in(journal) == ["a"]
        assert journal.append(entries("d"), audited("d")) == 2
        assert names_in(journal) == ["a", "d"]
        assert [one.user for one in journal.read_audit_page(AuditFilter(), size=5).entries] == ["d"]


def test_what_a_failed_write_left_is_not_taken_for_the_write_that_was_to_remove_it(proxied):
    """Both have as many rows, and the answers of both were lost; only a write of entries removes what was left."""
    proxy, through, store = proxied
    with closing(through.open()) as journal:
        journal.append(entries("a"))
        proxy.cut_next(b"COMMIT", is_forwarded=True, is_shut=True)
        with pytest.raises(JournalUnavailable):
            journal.append(entries("b"))
        proxy.open()
        journal.probe()
        assert store.run("SELECT max(seq) FROM eelgrid.journal") == [(2,)]
        proxy.cut_next(b"COMMIT", is_forwarded=False)
        with pytest.raises(JournalUnavailable):
            journal.append(entries("c"))
        assert names_in(journal) == ["a"]
        proxy.cut_next(b"COMMIT", is_forwarded=True)
        assert journal.append(entries("d")) == 2
        assert names_in(journal) == ["a", "d"]
        assert journal.append(entries("e")) == 3


def test_a_commit_without_its_synchronous_standby_is_not_acknowledged(store):
    server = postgres_rig.shared_server()
    with closing(store.open()) as journal:
        journal.append(entries("a"))
        try:
            server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            server.execute("SELECT pg_reload_conf()")
            poll_until(lambda: server.execute("SHOW synchronous_standby_names") == [("nobody",)])
            with pytest.raises(JournalUnavailable, match="synchronous standby"):
                journal.append(entries("b"))
        finally:
            server.execute("ALTER SYSTEM RESET synchronous_standby_names")
            server.execute("SELECT pg_reload_conf()")
        poll_until(lambda: server.execute("SHOW synchronous_standby_names") == [("",)])
        assert journal.append(entries("c")) == 2
        assert names_in(journal) == ["a", "c"]


def test_a_full_disk_is_told_as_such_and_passes(store):
    with closing(store.open()) as journal:
        store.run(
            "CREATE FUNCTION eelgrid.refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RAISE EXCEPTION ''no space left'' USING ERRCODE = ''53100''; END'"
        )
        store.run(
            "CREATE TRIGGER refuse BEFORE INSERT ON eelgrid.journal FOR EACH ROW EXECUTE FUNCTION eelgrid.refuse()"
        )
        with pytest.raises(JournalFull, match="free space on the server's disk"):
            journal.append(entries("a"))
        store.run("DROP TRIGGER refuse ON eelgrid.journal")
        assert journal.append(entries("a")) == 1


def test_a_server_that_takes_no_writes_is_refused_and_used_again_when_it_does(store):
    name = store.url.rpartition("/")[2]
    with closing(store.open()) as journal:
        store.run(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        store.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'eelgrid-controller' "
            "AND datname = %s",
            name,
        )
        for problem in ("terminating connection", "session is read-only.*name its primary"):
            with pytest.raises(JournalUnavailable, match=problem):
                journal.append(entries("a"))
        postgres_rig.shared_server().execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        assert journal.append(entries("a")) == 1


def test_somebody_who_writes_beside_us_is_found_by_the_number(store):
    with closing(store.open()) as journal:
        journal.append(entries("a"))
        store.run("INSERT INTO eelgrid.journal VALUES (2, 1, 'node_lost', '{}', 0)")
        with pytest.raises(JournalFenced, match="somebody else wrote to it"):
            journal.append(entries("b"))


def test_the_tables_that_alembic_makes_are_those_of_the_program(store):
    store.open().close()
    engine = connections.make_engine(connections.parse_url(store.url))
    with engine.connect() as connection:
        options = {"version_table_schema": connections.SCHEMA, "include_schemas": True}
        context = MigrationContext.configure(connection, opts={**options, "compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()
    assert store.run("SELECT count(*) FROM pg_class WHERE relpersistence <> 'p' AND relname IN ('term', 'lease')") == [
        (0,)
    ]


def test_a_newer_schema_is_refused(store):
    store.open().close()
    store.run("UPDATE eelgrid.alembic_version SET version_num = '9999'")
    with pytest.raises(JournalTooNew, match="version 9999"):
        store.open()


def test_controllers_that_start_together_make_one_schema_and_one_leader(store):
    def attempt(_):
        try:
            return store.open(wait_s=0.0)
        except JournalHeld:
            return None

    with ThreadPoolExecutor(4) as threads:
        found = [journal for journal in threads.map(attempt, range(4)) if journal is not None]
    assert len(found) == 1
    found[0].close()


def test_a_rewound_or_damaged_table_is_corrupt(store):
    store.open().close()
    store.run("DROP TABLE eelgrid.audit")
    with pytest.raises(JournalCorrupt, match="restore a backup"):
        store.open()


def test_a_database_that_cannot_hold_every_text_is_refused():
    server = postgres_rig.shared_server()
    server.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
    with pytest.raises(ControllerConfigError, match=r"encoding SQL_ASCII.*--encoding UTF8"):
        PostgresStore(server.url("ascii")).open()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("postgresql://postgres@127.0.0.1:1/none", "Connection refused|connection failed"),
        ("{server}/not_there", "create the database"),
    ],
)
def test_what_cannot_be_reached_says_why_and_never_a_password(url, problem):
    address = url.format(server=postgres_rig.shared_server().url("x").rpartition("/")[0])
    with pytest.raises(JournalUnavailable, match=problem) as caught:
        PostgresStore(address.replace("postgres@", "postgres:secret@")).open()
    assert "secret" not in str(caught.value)


def test_a_role_that_owns_its_database_is_enough(store):
    """Neither a superuser nor pg_monitor is needed; the timeline is read as well."""
    name = store.url.rpartition("/")[2]
    store.run(f"CREATE ROLE role_{name} LOGIN")
    store.run(f"ALTER DATABASE {name} OWNER TO role_{name}")
    mine = type(store)(store.url.replace("postgres@", f"role_{name}@"))
    with closing(mine.open()) as journal:
        assert journal.term.token == (1, 1)
        journal.append(entries("a"))


def test_a_crash_of_the_server_keeps_every_acknowledged_entry():
    server = PostgresServer()
    try:
        server.start()
        store = PostgresStore(server.create_database())
        with closing(store.open()) as journal:
            acknowledged = 0
            for _ in range(3):
                for _ in range(30):
                    acknowledged = journal.append(entries("a", "b"))
                server.stop(postgres_rig.signal.SIGQUIT)
                with pytest.raises(JournalUnavailable):
                    journal.append(entries("x"))
                server.start()
                # The lease may have run out meanwhile, and is renewed.
                poll_until(lambda: journal.may_lead, "the lease is renewed")
                assert [seq for seq, _ in journal.entries_after(0)] == list(range(1, acknowledged + 1))
            assert journal.append(entries("c")) == acknowledged + 1
    finally:
        server.remove()


class _Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_a_leader_that_cannot_renew_stops_deciding_at_its_deadline(store):
    clock = _Clock()
    with closing(store.open()) as journal:
        engine = connections.make_engine(connections.parse_url(store.url))
        keeper = leadership.LeaseKeeper(
            engine, journal.term, times=leadership.LeaseTimes(), location="db", began_s=clock.now_s, now_s=clock
        )
        clock.now_s += 6.9
        assert keeper.may_lead
        clock.now_s += 0.2
        assert not keeper.may_lead
        with pytest.raises(JournalUnavailable, match="lease could not be renewed"):
            keeper.check()
        # Nobody has led in between, so it goes on.
        end_lease(store)
        keeper.renew()
        keeper.check()
        assert store.run("SELECT expires_at > now() FROM eelgrid.lease") == [(True,)]
        engine.dispose()


@pytest.fixture
def watched(store):
    """A lease that was released, as one process watches it by a clock that the test sets."""
    store.open().close()
    engine = connections.make_engine(connections.parse_url(store.url))
    clock = _Clock()
    watch = leadership.LeaseWatch(leadership.LeaseTimes(), now_s=clock)

    def is_over():
        with engine.connect() as connection:
            return watch.is_over(connection)

    yield clock, is_over
    engine.dispose()


@pytest.mark.parametrize(
    ("expires", "waits_s"), [("now() - interval '1 hour'", 7.0), ("now() + interval '1 hour'", 10.0)]
)
def test_a_lease_is_over_when_it_was_seen_unchanged_for_long_enough_whatever_the_servers_clock_says(
    store, watched, expires, waits_s
):
    clock, is_over = watched
    assert is_over(), "a clean stop lets another lead at once"
    store.run(f"UPDATE eelgrid.lease SET expires_at = {expires}")
    assert not is_over()
    clock.now_s += waits_s - 0.1
    # A renewal, as little as it moves the end.
    store.run("UPDATE eelgrid.lease SET expires_at = expires_at + interval '1 second'")
    assert not is_over()
    clock.now_s += waits_s - 0.1
    assert not is_over()
    clock.now_s += 0.2
    assert is_over()
    store.run("UPDATE eelgrid.lease SET epoch = epoch + 1")
    assert not is_over()


def test_after_a_promotion_a_lease_of_before_is_waited_for_even_one_that_was_released(store, watched, monkeypatch):
    """The standby may lack the term of a leader that still decides, and all that it shows is older."""
    clock, is_over = watched
    assert is_over()
    clock.now_s += 100.0
    monkeypatch.setattr(leadership, "_TIMELINE", text("SELECT 2"))
    assert not is_over()
    clock.now_s += 9.9
    assert not is_over()
    clock.now_s += 0.2
    assert is_over()
    # Who leads since then has released it.
    store.run("UPDATE eelgrid.term SET timeline = 2")
    assert is_over()


def test_a_write_that_another_has_followed_is_told_by_its_entry_and_not_by_its_epoch(store):
    """Whoever leads on a promoted standby that lacks the last terms counts their epochs again."""
    with closing(store.open()) as journal:
        row = journal._entry_row(1, entries("mine")[0])
        store.run("UPDATE eelgrid.term SET holder = 'another'")
        store.run(f"INSERT INTO eelgrid.journal VALUES (1, {row['epoch']}, '{row['kind']}', '{{}}', 0)")
        with pytest.raises(JournalFenced, match="another"):
            journal._was_committed([row], 0, follows_failure=False)
        store.run(f"UPDATE eelgrid.journal SET body = '{row['body']}'")
        assert journal._was_committed([row], 0, follows_failure=False)


@pytest.mark.parametrize("times", [(10, 8, 7), (5, 2, 7), (10, 0, 7), (10, 6, 7)])
def test_times_by_which_a_healthy_leader_could_lose_its_lease_are_refused(times):
    ttl_s, renew_s, deadline_s = times
    with pytest.raises(ControllerConfigError, match="do not fit"):
        leadership.LeaseTimes(ttl_s=ttl_s, renew_s=renew_s, deadline_s=deadline_s)
