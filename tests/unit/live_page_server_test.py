"""The page's door and hub: who may come in, what headers say, and what a viewer gets that is late or many."""

import asyncio
import json
import ssl
import zlib

import aiohttp
import pytest
import trustme
from bench.page_fleet import LOG, PageFleet

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.http.live_hub import FRAMES_KEPT, PACKED_HEAD, LiveHub, ViewerBehind
from eelgrid_controller.state.events import NodeJoined
from eelgrid_protos.transport import TlsFiles


async def frames(response, number):
    """The first so many events of a stream, as (kind, body)."""
    found, kind = [], ""
    async with asyncio.timeout(10.0):
        async for line in response.content:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                found.append((kind, json.loads(line[6:])))
                if len(found) == number:
                    return found
    return found


async def test_a_stream_is_everything_once_and_then_what_changed():
    fleet = PageFleet(2)
    door = await fleet.open(every_s=0.1)
    try:
        async with (
            aiohttp.ClientSession(read_bufsize=2**20) as session,
            session.get(f"http://127.0.0.1:{door.port}/events") as response,
        ):
            assert response.content_type == "text/event-stream"
            fleet.report()
            found = await frames(response, 4)
    finally:
        await door.stop()
    assert [kind for kind, _ in found] == ["whole", "delta", "delta", "delta"]
    assert [body["frame"] for _, body in found] == list(range(found[0][1]["frame"], found[0][1]["frame"] + 4))
    assert any("power_w" in body for kind, body in found if kind == "delta")


async def test_packed_frames_that_all_viewers_share_are_one_stream_of_gzip():
    fleet = PageFleet(2)
    fleet.hub = hub = LiveHub(fleet, log=LOG, every_s=0.01)
    hub.viewers = 1
    running = asyncio.create_task(hub.run())
    frame, whole = await hub.full_frame()
    sent = [whole]
    while len(sent) < 4:
        frame, bodies = await hub.frames_after(frame)
        sent += bodies
    running.cancel()
    for begin in range(3):  # a viewer may come at any of them
        unpack = zlib.decompressobj(16 + zlib.MAX_WBITS)
        assert unpack.decompress(PACKED_HEAD) == b""
        for body in sent[begin:]:
            assert unpack.decompress(body.packed) == body.plain, "each is there as soon as its bytes are"
    assert sent[0].packed is sent[0].packed


async def test_only_who_takes_gzip_gets_it():
    fleet = PageFleet(2)
    door = await fleet.open(every_s=0.1)
    address = f"http://127.0.0.1:{door.port}"
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            for path in ("/", "/main.js", "/events", "/data/gpu?node=node-0000&index=0"):
                for takes, packed in (
                    ("gzip, br", True),
                    ("br, gzip;q=0.5", True),
                    ("gzip;q=0.0", False),
                    ("identity", False),
                ):
                    async with session.get(address + path, headers={"Accept-Encoding": takes}) as response:
                        found = await response.content.read(1) if path == "/events" else await response.read()
                        is_packed = response.headers.get("Content-Encoding") == "gzip"
                        assert is_packed == (packed and not path.startswith("/data")), (path, takes)
                        assert (found[:1] == b"\x1f") == is_packed
                        assert response.headers["Vary"] == "Accept-Encoding"
            async with session.get(f"{address}/main.js") as response:
                tag = response.headers["ETag"]
                assert response.headers["Cache-Control"] == "no-cache"
            async with session.get(f"{address}/main.js", headers={"If-None-Match": tag}) as response:
                assert response.status == 304
    finally:
        await door.stop()


async def test_every_answer_forbids_what_is_not_its_own_and_only_reading_is_answered():
    fleet = PageFleet(1)
    door = await fleet.open()
    address = f"http://127.0.0.1:{door.port}"
    try:
        async with aiohttp.ClientSession() as session:
            for path, status in (
                ("/", 200),
                ("/main.js", 200),
                ("/no", 404),
                ("/data/gpu?node=x&index=0", 404),
                ("/..%2fboard.py", 404),
                ("/data/gpu?node=node-0000&index=²", 404),
            ):
                async with session.get(address + path) as response:
                    assert response.status == status, path
                    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
            async with session.post(f"{address}/") as response:
                assert response.status == 405
            async with session.get(f"{address}/data/gpu?node=node-0000&index=3") as response:
                assert (await response.json())["uuid"] == "GPU-node-0000-3"
            for host, status in (("evil.example", 421), ("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200)):
                async with session.get(f"{address}/", headers={"Host": host}) as response:
                    assert response.status == status, host
    finally:
        await door.stop()


async def test_an_address_that_others_reach_needs_certificates_or_a_word():
    fleet = PageFleet(1)
    for address, words in (("0.0.0.0:0", "no TLS"), ("here", "no address")):
        with pytest.raises(ControllerConfigError, match=words):
            await fleet.open(address)
    door = await fleet.open("0.0.0.0:0", insecure=True)
    await door.stop()


async def test_with_certificates_only_clients_of_the_authority_come_in(tmp_path):
    authority = trustme.CA()
    leaf, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("viewer@example.org")
    tls = TlsFiles(tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "a.pem")
    tls.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    tls.key.write_bytes(leaf.private_key_pem.bytes())
    tls.authority.write_bytes(authority.cert_pem.bytes())
    fleet = PageFleet(1)
    door = await fleet.open(tls=tls)
    try:
        for known in (True, False):
            context = ssl.create_default_context()
            authority.configure_trust(context)
            if known:
                client.configure_cert(context)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                asking = session.get(f"https://127.0.0.1:{door.port}/")
                if known:
                    async with asking as response:
                        assert response.status == 200
                else:
                    with pytest.raises(aiohttp.ClientError):
                        await asking
    finally:
        await door.stop()


async def test_a_viewer_too_far_behind_is_let_go_and_a_changed_fleet_is_reported_whole():
    fleet = PageFleet(1)
    fleet.hub = hub = LiveHub(fleet, log=LOG, every_s=0.01)
    hub.viewers = 1
    running = asyncio.create_task(hub.run())
    frame, body = await hub.full_frame()
    assert b"event: whole" in body.plain
    first = frame
    while hub.board.frame < first + FRAMES_KEPT + 2:
        frame, _ = await hub.frames_after(frame)
    with pytest.raises(ViewerBehind):
        await hub.frames_after(first)
    from bench.page_fleet import inventory

    fleet.happen(NodeJoined(time_ns=1, inventory=inventory(5)))
    found = b""
    while b"event: whole" not in found:
        frame, bodies = await hub.frames_after(frame)
        found = b"".join(one.plain for one in bodies)
    hub.close()
    with pytest.raises(ViewerBehind):
        await hub.frames_after(hub.board.frame)
    running.cancel()


async def test_viewers_that_come_at_once_cost_one_look():
    fleet = PageFleet(3)
    hub = LiveHub(fleet, log=LOG)
    found = await asyncio.gather(*(hub.full_frame() for _ in range(20)))
    assert hub.board.frame == 1
    assert len({id(body) for _, body in found}) == 1


async def test_a_fault_in_one_frame_does_not_end_the_page(caplog):
    fleet = PageFleet(1)
    hub = LiveHub(fleet, log=LOG, every_s=0.01)
    hub.viewers = 1
    state, fleet.state = fleet.state, None
    running = asyncio.create_task(hub.run())
    async with asyncio.timeout(5.0):
        while "page=failed" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fleet.state = state
        frame, _ = await hub.full_frame()
        assert (await hub.frames_after(frame))[0] > frame
    running.cancel()
