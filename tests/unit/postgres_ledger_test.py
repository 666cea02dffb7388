"""The energy ledger on PostgreSQL: terms that fence it, connections that break, servers that are full, slow or restarted.

What it shares with SQLite's is in tests/contracts/ledger_contract_test.py.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from tests import postgres_rig
from tests.builders.energy import LedgerSite, build_window
from tests.builders.ledger import BEGIN_S, asked, book
from tests.builders.stores import PostgresLedger, PostgresStore, postgres_ledger, postgres_store
from tests.postgres_rig import CuttingProxy, PostgresServer
from tests.waiting import poll_until

from eelgrid_controller.energy.store import ledger_writer
from eelgrid_controller.energy.store.database import LedgerInDoubt
from eelgrid_controller.energy.store.ledger_store import open_ledger, open_ledger_with
from eelgrid_controller.errors import JournalFull, LedgerError
from eelgrid_controller.state.journal import JournalEntry

pytestmark = postgres_rig.needs_server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ledger_writer, "_BATCH_S", 0.005)
    monkeypatch.setattr(ledger_writer, "_AGAIN_S", 0.02)


@pytest.fixture
def ledger(tmp_path):
    with postgres_ledger(tmp_path) as found:
        yield found


@pytest.fixture
def proxied(tmp_path):
    """A ledger behind a proxy, whose journal has connections of its own."""
    port = postgres_rig.shared_server().port
    with CuttingProxy(port) as proxy, postgres_store(tmp_path) as store:
        ledger = PostgresLedger(store, tmp_path)
        ledger.journal.url = ledger.journal.url.set(port=proxy.port)
        yield proxy, ledger
        ledger.journal.close()


def total(store):
    answer = store.query(asked())
    assert (answer.damaged, answer.total.energy_mj) == ((), answer.measured_mj)
    return answer.measured_mj


def test_a_leader_that_was_followed_writes_nothing(ledger, tmp_path):
    with closing(ledger.open()) as old:
        book(old, 0)
        ledger.store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
        with (
            closing(ledger.store.open()) as journal,
            closing(open_ledger_with(journal, ledger.store.url, tmp_path)) as new,
        ):
            book(new, 1)
            known = total(new)
            for write in (
                lambda: book(old, 2),
                lambda: old.prune_rows(now_s=BEGIN_S + 3000 * 86_400),
                lambda: old.shrink(now_s=BEGIN_S, bytes_most=0),
                lambda: old.remove_exporter("a"),
            ):
                with pytest.raises(LedgerError, match="leads with epoch 2, this process had 1"):
                    write()
            book(new, 2)
            assert total(new) > known
            assert new.revision == 3


def test_a_transaction_whose_answer_is_lost_is_found_by_its_number(proxied):
    proxy, ledger = proxied
    with closing(ledger.open()) as store:
        sums = []
        for hour in range(20):
            is_forwarded = hour % 2 == 0
            proxy.cut_next(b"COMMIT", is_forwarded=is_forwarded)
            with pytest.raises(LedgerInDoubt):
                book(store, hour)
            assert (store.settle() is not None) is is_forwarded
            if not is_forwarded:
                book(store, hour)
            sums.append(total(store))
        assert len(proxy.cuts) == 20
        counters = store.namespaces.counters_mj()
        assert sum(counters.values()) == sums[-1]
    with closing(ledger.open()) as again:
        assert (again.revision, total(again), again.namespaces.counters_mj()) == (20, sums[-1], counters)


def test_what_is_in_doubt_stays_so_until_the_server_can_be_asked(proxied):
    proxy, ledger = proxied
    with closing(ledger.open()) as store:
        book(store, 0)
        proxy.cut_next(b"COMMIT", is_forwarded=True, is_shut=True)
        with pytest.raises(LedgerInDoubt):
            book(store, 1)
        for _ in range(2):
            with pytest.raises(LedgerError, match="check that the server runs"):
                store.settle()
        proxy.open()
        assert store.settle() is not None
        assert store.revision == 2
        book(store, 2)
        assert store.revision == 3
        assert total(store)


def test_a_transaction_without_its_synchronous_standby_is_in_doubt_until_it_is_there(ledger):
    server = postgres_rig.shared_server()
    with closing(ledger.open()) as store:
        book(store, 0)
        try:
            server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            server.execute("SELECT pg_reload_conf()")
            poll_until(lambda: server.execute("SHOW synchronous_standby_names") == [("nobody",)])
            with pytest.raises(LedgerInDoubt, match="synchronous standby"):
                book(store, 1)
            with pytest.raises(LedgerInDoubt, match="synchronous standby"):
                store.settle()
        finally:
            server.execute("ALTER SYSTEM RESET synchronous_standby_names")
            server.execute("SELECT pg_reload_conf()")
        poll_until(lambda: server.execute("SHOW synchronous_standby_names") == [("",)])
        assert store.settle() is not None
        assert store.revision == 2


async def test_windows_are_stored_once_however_often_connections_break(proxied):
    """Commits are cut before the server has them, or after; agents send again whatever is not acknowledged."""
    proxy, ledger = proxied
    rng, known = random.Random(7), {}
    async with LedgerSite(ledger.folder, open_store=ledger.open) as site:

        def hear(node, told):
            known[node] = max(known.get(node, 0), told.number)

        site.hear = hear
        for number in range(1, 16):
            if number % 2:
                proxy.cut_next(b"COMMIT", is_forwarded=rng.random() < 0.5)
            while any(known.get(node, 0) < number for node in ("n1", "n2")):
                for node in ("n1", "n2"):
                    for one in range(known.get(node, 0) + 1, number + 1):
                        site.take(build_window(one), node=node)
                await asyncio.sleep(0.02)
        assert len(proxy.cuts) > 5
        answer = await site.total("namespace")
        assert (answer.measured_mj, answer.total.energy_mj, answer.damaged) == (30_000, 30_000, ())
        assert site.writer.joules_by_namespace() == {"ml": 30.0}


async def test_windows_are_stored_once_when_a_second_controller_takes_over(ledger, tmp_path):
    """Each window is sent to both, and the first believes in itself until the database refuses it."""
    with ExitStack() as stack:
        async with LedgerSite(tmp_path, open_store=ledger.open) as first:
            for number in range(1, 6):
                first.take(build_window(number))
            await first.until(lambda: ("n1", 5) in first.acknowledged)
            ledger.store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
            first.take(build_window(6))
            journal = await asyncio.to_thread(ledger.store.open)
            stack.callback(journal.close)
            other = tmp_path / "other"
            other.mkdir()

            def open_second():
                return open_ledger_with(journal, ledger.store.url, other)

            async with LedgerSite(other, open_store=open_second) as second:
                for number in range(1, 9):
                    for site in (first, second):
                        site.take(build_window(number))
                await second.until(lambda: ("n1", 8) in second.acknowledged)
                await first.until(lambda: "leads with epoch 2" in first.writer.fault)
                assert max(number for _, number in first.acknowledged) <= 6
                answer = await second.total("namespace")
                assert (answer.measured_mj, answer.total.energy_mj, answer.damaged) == (8_000, 8_000, ())
                assert second.writer.joules_by_namespace() == {"ml": 8.0}


def test_a_ledger_in_the_folder_is_not_left_behind(ledger, tmp_path):
    with closing(open_ledger(tmp_path)) as file:
        book(file, 0)
    with pytest.raises(
        LedgerError, match=r"it is empty, and .*energy\.sqlite3 is not; .*eelctl admin migrate --ledger-only"
    ):
        ledger.open()
    (tmp_path / "energy.sqlite3").rename(tmp_path / "away")
    ledger.open().close()


# Faults of the server


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
        postgres_rig.shared_server().execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        book(store, 1)
        assert total(store)


def test_a_slow_server_is_given_up_within_the_limit_and_used_again(proxied):
    proxy, ledger = proxied
    with closing(ledger.open()) as store:
        book(store, 0)
        proxy.delay_s = 0.02
        book(store, 1)
        # Longer than the server lets a transaction hold its locks.
        proxy.delay_s = 6.0
        with pytest.raises(LedgerError):
            book(store, 2)
        proxy.delay_s = 0.0
        go_on(store, 2)
        assert store.revision == 3
        assert total(store)


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
            server.start()
            poll_until(lambda: place.journal.may_lead, "the lease is renewed", within_s=20.0)
            assert go_on(store, 1) == "again"
            assert total(store) > known
            known = total(store)
        assert store.revision == 3


def test_a_disk_that_is_full_is_named_and_used_again_when_it_has_room(server, tmp_path):
    """The tables are in a tablespace on a small file system of its own."""
    with small_disk(server) as disk:
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
            fill(ballast)
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


def fill(path):
    """Leaves no room for another page."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(8192))


def book_until_it_fails(store):
    """Rows fit into pages that are there for a while."""
    for hour in range(1, 400):
        book(store, hour)


@contextmanager
def small_disk(server):
    """A file system of 4 MB; skips where this process may mount none."""
    folder = server.folder / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.decode().strip()}")
    try:
        shutil.chown(folder, "postgres", "postgres")
        inner = folder / "tables"
        inner.mkdir()
        shutil.chown(inner, "postgres", "postgres")
        yield inner
        server.stop(signal.SIGQUIT)
    finally:
        subprocess.run(["umount", folder], check=True)
