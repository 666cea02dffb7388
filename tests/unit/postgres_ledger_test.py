"""The energy ledger on PostgreSQL: terms that fence it, and connections that break within a commit.

What it shares with SQLite's is in tests/contracts/ledger_contract_test.py, faults of the server in postgres_faults_test.py.
"""

import asyncio
import random
from contextlib import ExitStack, closing

import pytest
from tests import postgres_rig
from tests.builders.energy import LedgerSite, build_window
from tests.builders.ledger import BEGIN_S, asked, book
from tests.builders.stores import PostgresLedger, postgres_ledger, postgres_store
from tests.postgres_rig import CuttingProxy
from tests.waiting import poll_until

from eelgrid_controller.energy.store import ledger_writer
from eelgrid_controller.energy.store.database import LedgerInDoubt
from eelgrid_controller.energy.store.ledger_store import open_ledger, open_ledger_with
from eelgrid_controller.errors import LedgerError

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
