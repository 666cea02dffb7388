"""Pages over HTTP from servers that behave and servers that do not."""

import contextlib
import gzip
import socket
import ssl

import pytest
import trustme
from tests.fakes.metrics_servers import Listener, Replica, answer

from eelgrid_controller.adapters.http_get import Bounds, Getter, PageRefused, _check_peer, address_of

BOUNDS = Bounds(connect_s=0.5, whole_s=0.5, bytes_most=10_000)
PAGE = b"up 1\n"


async def got(*pieces, bounds=BOUNDS):
    """What the getter makes of an answer in these pieces."""
    with Listener(lambda _path: pieces) as server:
        return await Getter(bounds).get(server.url)


async def refused(*pieces, bounds=BOUNDS):
    with pytest.raises(PageRefused) as caught:
        await got(*pieces, bounds=bounds)
    return str(caught.value)


async def test_a_page_comes_whole_whatever_way_it_is_sent():
    assert await got(answer(PAGE)) == PAGE
    assert await got(answer(PAGE, length=False)) == PAGE
    chunks = b"2;x=y\r\nup\r\n3\r\n 1\n\r\n0\r\n\r\n"
    assert await got(answer(chunks, fields=(b"Transfer-Encoding: chunked",), length=False)) == PAGE
    packed = gzip.compress(PAGE)
    assert await got(answer(packed, fields=(b"content-encoding: GZIP",))) == PAGE
    assert await got(answer(packed, fields=(b"Content-Encoding: gzip",), length=False)) == PAGE
    slow = answer(PAGE)
    assert await got(slow[:20], 0.05, slow[20:-2], 0.05, slow[-2:]) == PAGE


async def test_the_request_is_a_plain_get_of_the_path_and_query():
    with Listener(lambda _path: (answer(PAGE),)) as server:
        await Getter(BOUNDS).get(f"{server.url}?format=text")
    (head,) = server.asked
    assert head.startswith(b"GET /metrics?format=text HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Connection: close" in head


async def test_what_breaks_off_is_no_page():
    whole = answer(PAGE * 10)
    assert await refused(whole[:-3]) == "the answer broke off"
    assert await refused(whole[:15]) == "the answer broke off"
    assert await refused() == "the answer broke off"
    chunked = (b"Transfer-Encoding: chunked",)
    assert await refused(answer(b"5\r\nup 1\n\r\n", fields=chunked, length=False)) == "the answer broke off"
    half = gzip.compress(PAGE * 100)[:-6]
    assert "gzip" in await refused(answer(half, fields=(b"Content-Encoding: gzip",)))


async def test_what_hangs_ends_in_time():
    assert await refused(answer(PAGE)[:20], 2.0) == "no whole answer in 0.5 s"
    assert await refused(2.0) == "no whole answer in 0.5 s"
    drip = [piece for _ in range(40) for piece in (b"x", 0.05)]
    assert await refused(answer(b"", length=False), *drip) == "no whole answer in 0.5 s"


async def test_too_much_is_refused_packed_or_not():
    assert await refused(answer(b"x" * 10_001)) == "more than 10000 bytes"
    assert await refused(answer(b"x" * 50_000, length=False)) == "more than 10000 bytes"
    assert await refused(answer(b"ffffff\r\n", fields=(b"Transfer-Encoding: chunked",), length=False)) == (
        "more than 10000 bytes"
    )
    bomb = gzip.compress(b"\0" * 9_000_000)
    assert len(bomb) < 10_000
    assert await refused(answer(bomb, fields=(b"Content-Encoding: gzip",))) == "more than 10000 bytes"
    assert "the answer is no HTTP" in await refused(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000)


async def test_other_answers_are_told_by_status_and_never_followed():
    moved = answer(b"", status=b"302 Found", fields=(b"Location: http://127.0.0.1:1/secret",))
    said = await refused(moved)
    assert said.startswith("status 302")
    assert "secret" not in said
    assert await refused(answer(b"secret", status=b"500 Oops")) == "status 500"
    assert "no HTTP" in await refused(b"SSH-2.0-OpenSSH\r\n\r\n")
    assert "no HTTP" in await refused(answer(PAGE, fields=(b"Content-Length: -1",), length=False))
    assert "no HTTP" in await refused(answer(b"zz\r\n", fields=(b"Transfer-Encoding: chunked",), length=False))
    assert "coding" in await refused(answer(PAGE, fields=(b"Content-Encoding: br",)))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://h/x", "gopher://h", "http://", "http://user:pass@h/m", "http://h:99999/", "http://[::1/m",
        "http://h/a b", "http://h/a\r\nX: y", "http://h/" + "a" * 3000, "//h/metrics", "h:9/metrics", "",
    ],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(PageRefused):
        address_of(url)


def test_an_address_is_read_into_its_parts():
    assert address_of("https://h/m?a=b")[:] == (True, "h", 443, "/m?a=b")
    assert address_of("http://[::1]:8000").authority == "[::1]:8000"
    assert address_of("http://h:80/m").authority == "h"


async def test_nobody_listens_and_names_that_are_none():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(PageRefused, match="no connection"):
        await Getter(BOUNDS).get(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(PageRefused, match="no connection"):
        await Getter(BOUNDS).get("http://no-such-host.invalid/metrics")


async def test_https_is_checked_against_the_authority():
    authority = trustme.CA()
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with Listener(Replica().reply) as server:
        server.socket = served.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=True)
        url = server.url.replace("http://", "https://")
        page = await Getter(Bounds(), tls=trusting).get(url)
        assert b"vllm:num_requests_waiting" in page
        with pytest.raises(PageRefused, match="no TLS"):
            await Getter(Bounds()).get(url)


@pytest.mark.parametrize("host", ["169.254.169.254", "fe80::1%eth0", "224.0.0.1", "ff02::1"])
def test_nothing_is_sent_to_link_scope(host):
    with pytest.raises(PageRefused, match="link scope"):
        _check_peer(host)
    _check_peer("10.1.2.3")
    _check_peer("::1")
