"""Peers of a gRPC server: floods end their own connection, everybody else is served, and who may not stay goes."""

import asyncio
import contextlib
import datetime as dt
import logging
import time
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from tests.certificates_rig import Authority
from tests.http2_rig import GOAWAY, RST_STREAM, RawClient, indexed, kept_field

from eelgrid_protos import messages, rpc, sockets, transport
from eelgrid_protos.connection_limits import PeerGuard, PeerLimits
from eelgrid_protos.faults import Fault, PermissionDenied, ResourceExhausted, Unavailable

LOG = logging.getLogger("test.peers")
GET = "/eelgrid.v1.NodeService/GetInventory"


@pytest.fixture(scope="module")
def authority():
    return Authority()


class Node:
    """Answers one call at once, one when it is let."""

    def __init__(self):
        self.release = asyncio.Event()

    async def get_inventory(self, request, context):
        inventory = messages.Inventory(node_name="only", cpu_milli=1, memory_bytes=1)
        return messages.GetInventoryResponse(inventory=inventory)

    async def get_samples(self, request, context):
        await self.release.wait()
        return messages.GetSamplesResponse()

    async def get_node_plan(self, request, context):
        raise PermissionDenied("not for you")

    async def get_node_energy(self, request, context):
        return messages.GetNodeEnergyResponse(status=messages.EnergyStatus.NOT_KEPT)


@asynccontextmanager
async def serving(tls=None, *, limits=None, now_s=time.time):
    """A guarded server: its port, its guard and its node."""
    server, node = grpc.aio.server(options=transport.server_options()), Node()
    guard = PeerGuard(limits, log=LOG, now_s=now_s)
    front = guard.wrap_handlers(rpc.build_handler(rpc.NODE_SERVICE, node))
    await transport.standard_services(front, (rpc.NODE_SERVICE,))
    server.add_generic_rpc_handlers((front,))
    port = await transport.listen_on_address(server, "127.0.0.1:0", tls=tls, insecure=False, log=LOG, guard=guard)
    await server.start()
    running = asyncio.create_task(guard.run())
    try:
        yield port, guard, node
    finally:
        running.cancel()
        node.release.set()
        await server.stop(None)


@asynccontextmanager
async def calling(port, tls=None):
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with transport.open_channel(f"127.0.0.1:{port}", tls=tls, options=options) as channel:
        yield rpc.build_client(rpc.NODE_SERVICE, channel)


async def until(met, *, within_s=30.0):
    async with asyncio.timeout(within_s):
        while not met():  # noqa: ASYNC110  # any state of any object
            await asyncio.sleep(0.02)


async def ask(client):
    answer = await client.get_inventory(messages.GetInventoryRequest(), timeout=20.0)
    return answer.inventory.node_name


@pytest.fixture
def parties(authority, tmp_path):
    """Files of a server, of a stranger to all roles, and of somebody innocent."""
    names = (("server", {"names": ("127.0.0.1",)}), ("stranger", {}), ("innocent", {}))
    return [authority.write(tmp_path / name, ("CN", name), **options) for name, options in names]


async def test_a_flood_of_resets_loses_its_connection_and_nobody_elses_call_fails(parties):
    ours, theirs, innocent = parties
    # A machine that is busy with other things sees few of the resets in a second.
    limits = PeerLimits(strikes_per_s=0.1)
    async with serving(ours, limits=limits) as (port, guard, _), calling(port, innocent) as client:
        assert await ask(client) == "only"
        flood = await asyncio.to_thread(RawClient, port, theirs)

        def rage():
            for _ in range(4000):
                if flood.closed.is_set():
                    return
                try:
                    flood.open(GET, 500, reset=True)
                except OSError:
                    return

        raging = asyncio.create_task(asyncio.to_thread(rage))
        asked = 0
        while not raging.done() or asked < 20:
            assert await ask(client) == "only"
            asked += 1
        await raging
        await until(flood.closed.is_set)
        await until(lambda: guard.ended["flood"] == 1)
        assert await ask(client) == "only"
        flood.close()


async def test_a_client_that_is_refused_now_and_then_keeps_its_connection(parties):
    ours, _, innocent = parties
    async with serving(ours) as (port, guard, _), calling(port, innocent) as client:
        for _ in range(50):
            with pytest.raises(PermissionDenied):
                await client.get_node_plan(messages.GetNodePlanRequest(), timeout=20.0)
        assert await ask(client) == "only"
        assert not guard.ended


async def test_knocking_in_a_loop_ends_the_connection_and_unknown_calls_are_knocking_too(parties):
    ours, theirs, _ = parties
    async with serving(ours, limits=PeerLimits(strikes_most=20.0)) as (port, guard, _):
        for path in ("/eelgrid.v1.NodeService/GetNodePlan", "/nobody/Knows"):
            knocking = await asyncio.to_thread(RawClient, port, theirs)
            for _ in range(40):
                try:
                    knocking.call(path)
                except OSError:
                    break
            await until(knocking.closed.is_set)
            knocking.close()
        await until(lambda: guard.ended["flood"] == 2)


async def test_a_connection_has_so_many_calls_at_once_and_no_more():
    async with serving() as (port, _, _):
        greedy = await asyncio.to_thread(RawClient, port)
        greedy.open("/eelgrid.v1.NodeService/GetSamples", 300)
        await until(lambda: len(greedy.heard.get(RST_STREAM, ())) >= 200)
        async with calling(port) as client:
            assert await ask(client) == "only"
        greedy.close()


async def test_headers_that_unpack_to_megabytes_take_no_memory():
    """20,000 calls of a few bytes each that say 12 kB: each is refused, for its metadata or for being one too many."""
    async with serving() as (port, _, _), calling(port) as client:
        bomb = await asyncio.to_thread(RawClient, port)
        bomb.open(GET, 1, block=kept_field("x-bomb", "a" * 3000))
        before = _resident_bytes()
        for _ in range(40):
            # Who has not had enough of it yet may have lost the connection.
            with contextlib.suppress(OSError):
                bomb.open(GET, 500, block=indexed(62) * 4)
            assert await ask(client) == "only"
        assert _resident_bytes() - before < 50e6
        bomb.close()


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_calls_at_once_are_counted_by_certificate_whatever_the_connection(parties):
    ours, theirs, innocent = parties
    async with serving(ours, limits=PeerLimits(calls_most=2)) as (port, guard, node):  # noqa: SIM117  # two kinds of things
        async with calling(port, theirs) as one, calling(port, theirs) as two, calling(port, innocent) as other:
            held = [asyncio.create_task(one.get_samples(messages.GetSamplesRequest())) for _ in range(2)]
            await until(lambda: len(guard._entries) == 2)
            with pytest.raises(ResourceExhausted, match="2 calls of yours are under way"):
                await ask(two)
            assert await ask(other) == "only"
            node.release.set()
            await asyncio.gather(*held)
            assert await ask(two) == "only"


async def test_watches_are_counted_by_account(parties):
    ours, theirs, innocent = parties
    watch = "/grpc.health.v1.Health/Watch"
    async with serving(ours, limits=PeerLimits(watches_most=3)) as (port, guard, _):
        raw = await asyncio.to_thread(RawClient, port, theirs)
        for _ in range(5):
            raw.call(watch)
        await until(lambda: guard.refused["watch"] == 2)
        other = await asyncio.to_thread(RawClient, port, innocent)
        for _ in range(3):
            other.call(watch)
        await until(lambda: len(guard._entries) == 6)
        assert guard.refused["watch"] == 2
        raw.close()
        await until(lambda: len(guard._entries) == 3)
        other.close()


async def test_a_connection_that_never_speaks_is_closed_and_another_is_served_meanwhile(parties, monkeypatch):
    ours, _, innocent = parties
    monkeypatch.setattr(transport, "_CONNECTION_BOUNDS", (("grpc.server_handshake_timeout_ms", 500),))
    async with serving(ours) as (port, _, _), calling(port, innocent) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await ask(client) == "only"
        async with asyncio.timeout(20.0):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
        writer.close()


async def test_a_stream_ends_with_the_certificate_that_opened_it(authority, parties, tmp_path):
    ours, _, innocent = parties
    short = authority.write(tmp_path / "short", ("CN", "short"), lasts=dt.timedelta(hours=1))
    late_s = [0.0]
    async with serving(ours, now_s=lambda: time.time() + late_s[0]) as (port, guard, _):  # noqa: SIM117  # two kinds of things
        async with calling(port, short) as leaving, calling(port, innocent) as staying:
            held = asyncio.create_task(leaving.get_samples(messages.GetSamplesRequest()))
            stays = asyncio.create_task(staying.get_samples(messages.GetSamplesRequest()))
            await until(lambda: len(guard._entries) == 2)
            late_s[0] = 2 * 3600.0
            with pytest.raises(Unavailable):
                await asyncio.wait_for(held, 20.0)
            await until(lambda: guard.ended == {"expired": 1})
            assert not stays.done()
            stays.cancel()


async def test_streams_end_when_their_authority_is_no_longer_trusted(authority, parties, tmp_path):
    """Adding one ends nobody, as the first half of a change does; taking the old one away ends all that it let in."""
    ours, theirs, _ = parties
    new = Authority("another authority")
    async with serving(ours) as (port, guard, _), calling(port, theirs) as client:
        held = asyncio.create_task(client.get_samples(messages.GetSamplesRequest()))
        await until(lambda: len(guard._entries) == 1)
        old_pem = ours.authority.read_bytes()
        fresh = new.write(tmp_path / "fresh", ("CN", "fresh"))
        ours.authority.write_bytes(old_pem + fresh.authority.read_bytes())
        async with calling(port, transport.TlsFiles(fresh.certificate, fresh.key, theirs.authority)) as friend:
            assert await ask(friend) == "only"
        looks = guard._looks
        await until(lambda: guard._looks > looks + 1)
        assert not held.done()
        assert not guard.ended
        ours.authority.write_bytes(fresh.authority.read_bytes())
        with pytest.raises(Fault):
            await asyncio.wait_for(held, 20.0)
        await until(lambda: guard.ended["authority"] >= 1)
        with pytest.raises(Unavailable):
            await ask(client)


async def test_only_the_chosen_connection_is_ended():
    async with serving() as (port, _, _):
        one, other = [await asyncio.to_thread(RawClient, port) for _ in range(2)]
        await until(lambda: set(sockets.list_accepted(port)) >= {one.address, other.address})
        assert sockets.end_accepted(port, {one.address}.__contains__) == 1
        await until(one.closed.is_set)
        assert not other.closed.is_set()
        assert GOAWAY not in other.heard
        one.close()
        other.close()


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:50000", ("127.0.0.1", 50000)),
        ("ipv6:%5B::1%5D:50000", ("::1", 50000)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1", 7)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", ("10.0.0.1", 7)),
        ("unix:/run/x", ("", 0)),
        ("", ("", 0)),
    ],
)
def test_the_other_side_is_read_as_grpc_writes_it(text, peer):
    assert sockets.parse_peer(text) == peer
