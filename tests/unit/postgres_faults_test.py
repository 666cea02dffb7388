"""Faults of a PostgreSQL server under journal and ledger: full, read-only, slow, stopped, killed.

Each is refused with its reason, and both are served again by themselves.
"""

import os
import signal
from contextlib import closing

import pytest
from tests import postgres_rig
from tests.builders.ledger import asked, book
from tests.builders.stores import PostgresLedger, PostgresStore, postgres_ledger, postgres_store
from tests.postgres_rig import CuttingProxy, PostgresServer, fill_disk
from tests.waiting import poll_until

from eelgrid_controller.errors import JournalFull, JournalUnavailable, LedgerError
from eelgrid_controller.state.journal import JournalEntry

pytestmark = postgres_rig.needs_server
ENTRY = JournalEntry("node_lost", {"time_ns": 1, "node_name": "a"})


@pytest.fixture
def ledger(tmp_path):
    with postgres_ledger(tmp_path) as found:
        yield found


def total(store):
    answer = store.query(asked())
    assert (answer.damaged, answer.total.energy_mj) == ((), answer.measured_mj)
    return answer.measured_mj


def test_a_server_that_takes_no_writes_is_refused_and_used_again_when_it_does(ledger):
    name = ledger.store.url.rpartition("/")[2]
    with closing(ledger.open()) as store:
        book(store, 0)
        ledger.store.run(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        ledger.store.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'eelgrid-controller' "
            "AND datname = %s",
            name,
        )
        for problem in ("work resumes by itself", "session is read-only.*name its primary"):
            with pytest.raises(LedgerError, match=problem):
                book(store, 1)
        with pytest.raises(JournalUnavailable):
            ledger.journal.append([ENTRY])
        postgres_rig.shared_server().execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        book(store, 1)
        poll_until(lambda: ledger.journal.may_lead, "the lease is renewed", within_s=60.0)
        assert ledger.journal.append([ENTRY]) == 1
        assert total(store)


def test_a_slow_server_is_given_up_within_the_limit_and_used_again(tmp_path):
    port = postgres_rig.shared_server().port
    with CuttingProxy(port) as proxy, postgres_store(tmp_path) as store:
        through = PostgresStore(store.url.replace(f":{port}/", f":{proxy.port}/"))
        place = PostgresLedger(through, tmp_path)
        with closing(place.journal) as journal, closing(place.open()) as ledger:
            book(ledger, 0)
            proxy.delay_s = 0.02
            book(ledger, 1)
            assert journal.append([ENTRY]) == 1
            # Longer than the server lets a transaction hold its locks, and than the lease may go without renewal.
            proxy.delay_s = 8.0
            with pytest.raises(LedgerError):
                book(ledger, 2)
            with pytest.raises(JournalUnavailable):
                journal.append([ENTRY])
            proxy.delay_s = 0.0
            poll_until(lambda: journal.may_lead, "the lease is renewed", within_s=60.0)
            go_on(ledger, 2)
            assert (ledger.revision, journal.append([ENTRY])) == (3, 2)
            assert total(ledger)


def go_on(store, hour):
    """Books an hour whose last attempt failed, and returns how."""
    if store.is_in_doubt and store.settle() is not None:
        return "it was there"
    book(store, hour)
    return "again"


@pytest.fixture
def server():
    """A server that may be broken."""
    found = PostgresServer("fsync = off")
    found.start()
    yield found
    found.remove()


def test_a_restarted_server_is_used_again(server, tmp_path):
    place = PostgresLedger(PostgresStore(server.create_database()), tmp_path)
    with closing(place.journal), closing(place.open()) as store:
        book(store, 0)
        known = total(store)
        for end in (signal.SIGINT, signal.SIGQUIT):
            server.stop(end)
            with pytest.raises(LedgerError, match="work resumes by itself"):
                book(store, 1)
            with pytest.raises(LedgerError):
                store.query(asked())
            with pytest.raises(JournalUnavailable, match="work resumes by itself"):
                place.journal.append([ENTRY])
            server.start()
            poll_until(lambda: place.journal.may_lead, "the lease is renewed", within_s=20.0)
            assert go_on(store, 1) == "again"
            assert place.journal.append([ENTRY]) == place.journal.last_seq
            assert total(store) > known
            known = total(store)
        assert (store.revision, place.journal.last_seq) == (3, 2)


def test_a_disk_that_is_full_is_named_and_used_again_when_it_has_room(server, tmp_path):
    """The tables are in a tablespace on a small file system of its own."""
    with server.small_disk() as disk:
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
        url = server.create_database()
        store = PostgresStore(url)
        store.open().close()
        store.run("ALTER TABLE eelgrid.hourly SET TABLESPACE small")
        store.run("ALTER TABLE eelgrid.journal SET TABLESPACE small")
        place = PostgresLedger(store, tmp_path)
        with closing(place.journal), closing(place.open()) as ledger:
            book(ledger, 0)
            known = total(ledger)
            ballast = disk / "ballast"
            fill_disk(ballast)
            with pytest.raises(LedgerError, match="free space on the server's disk"):
                book_until_it_fails(ledger)
            with pytest.raises(JournalFull, match="free space on the server's disk"):
                place.journal.append([JournalEntry("node_lost", {"text": os.urandom(500_000).hex()})])
            assert total(ledger) >= known
            known, hour = total(ledger), ledger.revision
            ballast.unlink()
            book(ledger, hour)
            assert total(ledger) > known
            assert place.journal.append([JournalEntry("node_lost", {"text": os.urandom(500_000).hex()})]) == 1


def book_until_it_fails(store):
    """Rows fit into pages that are there for a while."""
    for hour in range(1, 400):
        book(store, hour)
