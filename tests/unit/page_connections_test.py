"""The page's connections: seats are shared, what says nothing goes, and a handshake's word ends with what it was given for."""

import asyncio
import datetime as dt
import ssl
from dataclasses import replace

import aiohttp
import pytest
from bench.page_fleet import PageFleet
from tests.certificates_rig import Authority
from tests.waiting import wait_until

from eelgrid_controller.server.http import live_server
from eelgrid_controller.server.http.live_server import ViewerSlot, ViewerSlots


@pytest.fixture(scope="module")
def authority():
    return Authority()


def client_context(files):
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    return context


async def watching(door, files):
    """A session with an open stream of events, and what is left of it."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context(files)))
    response = await session.get(f"https://127.0.0.1:{door.port}/events")
    await response.content.readline()
    return session, response


async def drained(response):
    """Reads on until the stream ends."""
    try:
        async with asyncio.timeout(30.0):
            async for _ in response.content:
                pass
    except aiohttp.ClientError:
        pass
    finally:
        response.close()


def test_one_account_has_some_seats_and_the_others_are_for_others():
    seats = ViewerSlots(most=64, each_most=16)
    assert all(isinstance(seats.acquire_slot("greedy", 0.0), ViewerSlot) for _ in range(16))
    assert seats.acquire_slot("greedy", 0.0) == "16 viewers of yours are here already"
    assert isinstance(seats.acquire_slot("other", 0.0), ViewerSlot)


def test_a_newcomer_gets_the_oldest_seat_of_whoever_has_most():
    seats = ViewerSlots(most=6, each_most=4)
    greedy = [seats.acquire_slot("greedy", 0.0) for _ in range(4)]
    other = [seats.acquire_slot("other", 0.0) for _ in range(2)]
    assert isinstance(seats.acquire_slot("newcomer", 0.0), ViewerSlot)
    assert [seat.is_over.is_set() for seat in (*greedy, *other)] == [True, False, False, False, False, False]
    assert isinstance(seats.acquire_slot("other", 0.0), str), "two against three is fair enough"
    assert len(seats) == 6
    seats.release_slot(greedy[0])
    assert len(seats) == 6


async def test_a_client_with_many_viewers_leaves_room_for_another(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    greedy = authority.write(tmp_path / "greedy", ("O", "eelgrid:viewer"), ("CN", "greedy"))
    other = authority.write(tmp_path / "other", ("O", "eelgrid:viewer"), ("CN", "other"))
    door = await PageFleet(1).open(tls=server)
    sessions = []
    try:
        connector = aiohttp.TCPConnector(ssl=client_context(greedy), limit=0)
        sessions.append(aiohttp.ClientSession(connector=connector))
        found = [await sessions[0].get(f"https://127.0.0.1:{door.port}/events") for _ in range(20)]
        assert [response.status for response in found] == [200] * 16 + [503] * 4
        session, response = await watching(door, other)
        sessions.append(session)
        assert response.status == 200
        for one in (*found, response):
            one.close()
    finally:
        for session in sessions:
            await session.close()
        await door.stop()


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_connection_that_says_nothing_is_ended(authority, tmp_path, monkeypatch, is_secure):
    monkeypatch.setattr(live_server, "FIRST_REQUEST_WITHIN_S", 0.3)
    server = authority.write(tmp_path / "server", names=("127.0.0.1",)) if is_secure else None
    door = await PageFleet(1).open(tls=server)
    try:
        for said in (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(said)
            async with asyncio.timeout(30.0):
                try:
                    while await reader.read(1000):
                        pass
                except ConnectionError:
                    pass
            writer.close()
    finally:
        await door.stop()


async def test_a_session_is_not_resumed_without_its_certificate(authority, tmp_path):
    """With a ticket of before, whose authority was taken away since came in as if nothing were."""
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"))
    door = await PageFleet(1).open(tls=server)

    def ask(session):
        import socket

        context = client_context(client)
        if session is not None:
            context = session[0]
        with socket.create_connection(("127.0.0.1", door.port), timeout=20.0) as raw:
            options = {} if session is None else {"session": session[1]}
            with context.wrap_socket(raw, server_hostname="127.0.0.1", **options) as one:
                one.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                head = one.recv(100)
                return context, one.session, one.session_reused, head

    try:
        context, session, _, head = await asyncio.to_thread(ask, None)
        assert head.startswith(b"HTTP/1.0 200")
        assert not session.has_ticket
        _, _, is_resumed, _ = await asyncio.to_thread(ask, (context, session))
        assert not is_resumed
        fresh = Authority("another").write(tmp_path / "fresh", names=("127.0.0.1",))
        for one in ("key", "certificate", "authority"):
            getattr(server, one).write_bytes(getattr(fresh, one).read_bytes())
        try:
            (*_, head) = await asyncio.to_thread(ask, (context, session))
        except OSError:
            head = b""
        assert head == b""
    finally:
        await door.stop()


async def test_streams_end_when_their_authority_is_taken_away_and_not_when_one_is_added(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"))
    fleet = PageFleet(1)
    door = await fleet.open(tls=server, every_s=0.1)
    session, response = await watching(door, client)
    try:
        ending = asyncio.create_task(drained(response))
        old_pem = server.authority.read_bytes()
        fresh = Authority("another").write(tmp_path / "fresh", ("O", "eelgrid:viewer"))
        server.authority.write_bytes(old_pem + fresh.authority.read_bytes())
        newcomer, other = await watching(door, replace(fresh, authority=client.authority))
        assert fleet.hub.viewers == 2
        server.authority.write_bytes(fresh.authority.read_bytes())
        await ending
        other.close()
        await newcomer.close()
        await wait_until(lambda: fleet.hub.viewers == 0)
    finally:
        await session.close()
        await door.stop()


async def test_a_stream_ends_with_its_certificate(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    short = authority.write(tmp_path / "short", ("O", "eelgrid:viewer"), lasts=dt.timedelta(hours=1))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"))
    fleet = PageFleet(1)
    late_ns = [0]
    real = fleet.now_ns
    fleet.now_ns = lambda: real() + late_ns[0]
    door = await fleet.open(tls=server, every_s=0.1)
    leaving, response = await watching(door, short)
    staying, other = await watching(door, client)
    try:
        late_ns[0] = 2 * 3600 * 10**9
        await drained(response)
        await wait_until(lambda: fleet.hub.viewers == 1)
        other.close()
    finally:
        await leaving.close()
        await staying.close()
        await door.stop()


async def test_a_viewer_that_reads_nothing_loses_its_seat(monkeypatch):
    monkeypatch.setattr(live_server, "_UNREAD_BYTES_MOST", 4096)
    fleet = PageFleet(200)
    door = await fleet.open(every_s=0.02)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await wait_until(lambda: fleet.hub.viewers == 1)
        monkeypatch.setattr(live_server, "_SEND_WITHIN_S", 0.2)

        def left():
            fleet.report()
            return fleet.hub.viewers == 0

        await wait_until(left, within_s=60.0)
        writer.close()
    finally:
        await door.stop()
