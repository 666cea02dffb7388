"""Endpoints of the controller's HTTP application: who is answered, and what connections may cost."""

import asyncio
import logging
import socket

import aiohttp
import pytest
from aiohttp import web

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.http.application import EndpointSettings, HttpEndpoint, check_exposure
from eelgrid_protos.sockets import HttpHosts, names_loopback

LOG = logging.getLogger("test.http")


def settings(**changes):
    usual = {
        "flag": "--things",
        "name": "things",
        "example": "127.0.0.1:1",
        "methods": frozenset({"GET", "HEAD"}),
        "body_bytes_most": 1024,
        "first_request_s": 5.0,
        "silent_connections_most": 8,
        "keepalive_s": 30.0,
        "exposed_remedy": "listen on loopback",
    }
    return EndpointSettings(**usual | changes)


class Served:
    """An endpoint with one route, which answers `body` once `gate` is set."""

    def __init__(self, body=b"here\n", **changes):
        options = {key: changes.pop(key) for key in ("allows_host", "host_refusal", "headers") if key in changes}
        self.body = body
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = 0
        self.endpoint = HttpEndpoint(settings(**changes), [web.get("/thing", self.answer)], **options)

    async def answer(self, _request):
        self.began += 1
        await self.gate.wait()
        return web.Response(body=self.body)

    async def __aenter__(self):
        self.port = await self.endpoint.start("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{self.port}/thing"
        return self

    async def __aexit__(self, *_):
        self.gate.set()
        await self.endpoint.stop()


async def ended(reader, *, within_s=60.0):
    """What was read until the other side ended the connection."""
    found = b""
    async with asyncio.timeout(within_s):
        try:
            while piece := await reader.read(65_536):
                found += piece
        except ConnectionError:
            pass
    return found


async def test_methods_hosts_and_headers_are_checked_before_routes():
    options = {"allows_host": lambda host: host == "ours", "host_refusal": "not ours", "headers": {"X-Ours": "yes"}}
    async with Served(**options) as served, aiohttp.ClientSession() as session:
        for method, host, status in (
            ("GET", "ours", 200),
            ("HEAD", "ours", 200),
            ("POST", "ours", 405),
            ("GET", "theirs", 421),
            ("POST", "theirs", 421),
        ):
            async with session.request(method, served.url, headers={"Host": host}) as answer:
                assert answer.status == status, (method, host)
                assert answer.headers["X-Ours"] == "yes"
                assert answer.headers["Server"] == "eelgrid-controller"
                assert (answer.headers.get("Allow") == "GET, HEAD") == (status == 405)
        async with session.get(f"http://127.0.0.1:{served.port}/other", headers={"Host": "ours"}) as answer:
            assert answer.status == 404
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /thing HTTP/1.0\r\n\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.0 421"), "no Host header at all"
        writer.close()


@pytest.mark.parametrize("said", [b"", b"GET /thing HTTP/1.1\r\nHost: a\r\n"])
async def test_a_connection_that_asks_nothing_ends_and_one_that_asked_stays(said):
    async with Served(first_request_s=0.3) as served, aiohttp.ClientSession() as session:
        async with session.get(served.url) as answer:
            assert answer.status == 200
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        connections = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        for reader, writer in connections:
            writer.write(said)
            assert await ended(reader) == b""
            writer.close()
        assert loop.time() - begun_s >= 0.25
        (kept,) = served.endpoint.server.connections
        assert kept.transport is not None


async def test_of_too_many_silent_connections_the_oldest_ends():
    async with Served() as served, aiohttp.ClientSession() as session:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(12)]
        async with session.get(served.url) as answer:
            assert answer.status == 200
        assert [await ended(reader) for reader, _ in silent[:4]] == [b""] * 4
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()


async def test_requests_beyond_the_bound_are_told_to_come_again():
    async with Served(requests_at_once_most=2) as served, aiohttp.ClientSession() as session:
        served.gate.clear()
        waiting = [asyncio.create_task(session.get(served.url)) for _ in range(2)]
        async with asyncio.timeout(10.0):
            while served.began < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with session.get(served.url) as answer:
            assert answer.status == 503
        served.gate.set()
        assert [(await one).status for one in waiting] == [200, 200]
        async with session.get(served.url) as answer:
            assert answer.status == 200


async def test_a_client_that_does_not_read_its_answer_is_cut_off():
    async with Served(b"x" * 30_000_000, send_s=0.3, keepalive_s=0.0, requests_at_once_most=1) as served:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(one, ("127.0.0.1", served.port))
            await loop.sock_sendall(one, b"GET /thing HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(10.0):
                while served.endpoint.server.connections or not served.began:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        served.body = b"short"
        async with aiohttp.ClientSession() as session, session.get(served.url) as answer:
            assert await answer.read() == b"short", "its place is free again"
            assert answer.headers["Connection"] == "close"


async def test_heads_that_are_too_long_are_refused():
    async with Served(line_bytes_most=1000) as served, aiohttp.ClientSession() as session:
        async with session.get(served.url, headers={"X-Long": "a" * 500}) as answer:
            assert answer.status == 200
        async with session.get(served.url, headers={"X-Long": "a" * 5000}) as answer:
            assert answer.status == 400


async def test_an_address_that_is_taken_or_none_is_reported():
    async with Served() as served:
        for address, problem in (
            (f"127.0.0.1:{served.port}", "cannot serve things on"),
            ("here", "--things 'here' is no address"),
        ):
            with pytest.raises(ControllerConfigError, match=problem):
                await Served().endpoint.start(address)


def test_an_address_that_others_reach_needs_a_word(caplog):
    caplog.set_level(logging.WARNING, logger=LOG.name)
    assert check_exposure(settings(), "127.0.0.1:1", insecure=False, log=LOG)
    assert not caplog.records
    with pytest.raises(ControllerConfigError, match="can be reached from other machines and has no TLS"):
        check_exposure(settings(), "0.0.0.0:1", insecure=False, log=LOG)
    assert not check_exposure(settings(), "0.0.0.0:1", insecure=True, log=LOG)
    assert "things=0.0.0.0:1 tls=off" in caplog.text


@pytest.mark.parametrize(
    ("host", "is_loopback", "is_ours"),
    [
        ("localhost", True, True),
        ("LOCALHOST:9464", True, True),
        ("127.0.0.1:1", True, True),
        ("[::1]:80", True, True),
        ("10.0.0.1:9464", False, True),
        ("listed.example:80", False, True),
        ("", False, True),
        ("localhost.evil.example", False, False),
        ("evil.example:9464", False, False),
    ],
)
def test_hosts_that_another_page_could_name_are_none_of_ours(host, is_loopback, is_ours):
    assert names_loopback(host) is is_loopback
    assert HttpHosts("127.0.0.1:9464", ("listed.example",)).allows(host) is is_ours
