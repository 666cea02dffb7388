"""Pages over HTTP from servers that behave and servers that do not."""

import contextlib
import gzip
import socket
import ssl

import pytest
import trustme
from tests.fakes.metrics_servers import Listener, Replica, answer

from eelgrid_controller.runtime.scraper import FetchError, FetchLimits, HttpFetcher, find_address_refusal, parse_address

BOUNDS = FetchLimits(connect_s=0.5, whole_s=0.5, bytes_most=10_000)
PAGE = b"up 1\n"


async def got(*pieces, bounds=BOUNDS):
    """What the getter makes of an answer in these pieces."""
    with Listener(lambda _path: pieces) as server:
        return await HttpFetcher(bounds, allows_loopback=True).get(server.url)


async def refused(*pieces, bounds=BOUNDS):
    with pytest.raises(FetchError) as caught:
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
        await HttpFetcher(BOUNDS, allows_loopback=True).get(f"{server.url}?format=text")
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


async def test_other_answers_are_reported_by_status_and_never_followed():
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
        "file:///etc/passwd",
        "ftp://h/x",
        "gopher://h",
        "http://",
        "http://user:pass@h/m",
        "http://h:99999/",
        "http://[::1/m",
        "http://h/a b",
        "http://h/a\r\nX: y",
        "http://h/" + "a" * 3000,
        "//h/metrics",
        "h:9/metrics",
        "",
    ],
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(FetchError):
        parse_address(url)


def test_an_address_is_read_into_its_parts():
    assert parse_address("https://h/m?a=b")[:] == (True, "h", 443, "/m?a=b")
    assert parse_address("http://[::1]:8000").authority == "[::1]:8000"
    assert parse_address("http://h:80/m").authority == "h"


async def test_nobody_listens_and_names_that_are_none():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(FetchError, match="no connection"):
        await HttpFetcher(BOUNDS, allows_loopback=True).get(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(FetchError, match="no connection"):
        await HttpFetcher(BOUNDS, allows_loopback=True).get("http://no-such-host.invalid/metrics")


async def test_https_is_checked_against_the_authority():
    authority = trustme.CA()
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with Listener(Replica().reply) as server:
        server.socket = served.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=True)
        url = server.url.replace("http://", "https://")
        page = await HttpFetcher(FetchLimits(), tls=trusting, allows_loopback=True).get(url)
        assert b"vllm:num_requests_waiting" in page
        with pytest.raises(FetchError, match="no TLS"):
            await HttpFetcher(FetchLimits(), allows_loopback=True).get(url)


CREDENTIALS, LINK, NONE, OWN = "credentials", "link scope", "no host", "this machine"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("169.254.169.254", LINK),
        ("169.254.170.2", LINK),
        ("fe80::1%eth0", LINK),
        ("224.0.0.1", LINK),
        ("ff02::1", LINK),
        ("::ffff:169.254.169.254", LINK),
        ("64:ff9b::a9fe:a9fe", LINK),
        ("64:ff9b:1::a9fe:a9fe", LINK),
        ("2002:a9fe:a9fe::1", LINK),
        ("::169.254.169.254", LINK),
        # Teredo: the client's address is kept inverted.
        ("2001:0:102:304:0:0:5601:5601", LINK),
        ("::ffff:127.0.0.1", OWN),
        ("127.8.8.8", OWN),
        ("::1", OWN),
        ("64:ff9b::7f00:1", OWN),
        ("fd00:ec2::254", CREDENTIALS),
        ("fd20:ce::254", CREDENTIALS),
        ("100.100.100.200", CREDENTIALS),
        ("::ffff:100.100.100.200", CREDENTIALS),
        ("168.63.129.16", CREDENTIALS),
        ("192.0.0.192", CREDENTIALS),
        ("0.0.0.0", NONE),
        ("::", NONE),
        ("0.1.2.3", NONE),
        ("255.255.255.255", NONE),
        ("240.0.0.1", NONE),
        ("::ffff:0.0.0.0", NONE),
    ],
)
def test_no_page_is_asked_of_an_address_that_is_no_services(host, words):
    assert words in find_address_refusal(host, allows_loopback=False)


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "192.168.1.9", "100.64.0.7", "fd12::7", "2001:db8::1", "64:ff9b::a01:203"]
)
def test_pods_and_hosts_are_asked(host):
    assert find_address_refusal(host, allows_loopback=False) is None


@pytest.mark.parametrize("url", ["http://metadata.google.internal/x", "http://Metadata/x", "http://instance-data./x"])
def test_a_clouds_own_names_are_refused_unresolved(url):
    with pytest.raises(FetchError, match="credentials"):
        parse_address(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433", "localhost"])
async def test_the_loopback_is_asked_only_where_it_was_allowed(host):
    with Listener(lambda _path: (answer(PAGE),)) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        with pytest.raises(FetchError, match="this machine's own"):
            await HttpFetcher(BOUNDS).get(f"http://{host}:{port}/metrics")
    assert server.asked == []


async def test_a_name_that_changes_its_address_is_asked_where_it_was_judged():
    """DNS rebinding: the first answer is harmless, the next would be the metadata service."""
    answers = [["127.0.0.1"], ["169.254.169.254"]]

    async def resolve(_host, _port):
        return answers.pop(0)

    with Listener(lambda _path: (answer(PAGE),)) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        getter = HttpFetcher(BOUNDS, allows_loopback=True, resolve=resolve)
        assert await getter.get(f"http://rebinding.example:{port}/metrics") == PAGE
        with pytest.raises(FetchError, match="link scope"):
            await getter.get(f"http://rebinding.example:{port}/metrics")
    assert len(answers) == 0
    assert len(server.asked) == 1


async def test_a_harmless_address_beside_a_forbidden_one_is_the_one_that_is_asked():
    async def resolve(_host, _port):
        return ["169.254.169.254", "::ffff:169.254.169.254", "127.0.0.1"]

    with Listener(lambda _path: (answer(PAGE),)) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        getter = HttpFetcher(BOUNDS, allows_loopback=True, resolve=resolve)
        assert await getter.get(f"http://two.example:{port}/metrics") == PAGE


async def test_a_redirect_is_not_followed():
    there = (b"Location: http://169.254.169.254/latest/meta-data/",)
    assert "status 302" in await refused(answer(b"", fields=there).replace(b"200", b"302", 1))
