"""The endpoint over real connections: methods, the bounds on a request, curl, and a Prometheus that scrapes it."""

import contextlib
import email.utils
import http.client
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest
import trustme
from tests.builders.metrics import build_gpu_view, build_snapshot

from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_agent.metrics.server import HEAD_BYTES_MOST, SCRAPES_MOST, MetricsEndpoint, ScrapeResponse

# "right", by the cheapest bcrypt: this proves nothing about strength.
HASH = "$2y$04$sNFiW24NgPIRphlmARhtC.bZdRxzGK5IVj05wXQbf1vwmxIQhL5q6"


class OnePage:
    """Says the same to everybody."""

    def __init__(self, body=b"eelgrid_gpu_up 1.0\n"):
        self.body = body

    def build_response(self, path, *, accept="", accept_encoding=""):
        return ScrapeResponse(200, "text/plain; version=0.0.4; charset=utf-8", self.body)


@pytest.fixture
def serve():
    servers = []

    def start(page=None, **options):
        server = MetricsEndpoint(
            "127.0.0.1:0", page or OnePage(), tls=None, insecure=False, log=logging.getLogger("test"), **options
        )
        server.start()
        servers.append(server)
        return server.port

    yield start
    for server in servers:
        server.close()


def exchange(port, sent):
    """All that is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(sent)
        answer = b""
        try:
            while received := connection.recv(65536):
                answer += received
        except ConnectionResetError:
            # What was not read of us when it closed.
            pass
        return answer


def test_a_head_is_a_get_without_its_body(serve):
    port = serve()
    got = exchange(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = exchange(port, b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert got.endswith(b"\r\n\r\neelgrid_gpu_up 1.0\n")

    def lines(answer):
        return [line for line in answer.partition(b"\r\n\r\n")[0].splitlines() if not line.startswith(b"Date")]

    assert lines(head) == lines(got)
    assert b"Content-Length: 19" in lines(head)
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "<script>"])
def test_another_method_is_refused_with_those_that_are_taken(serve, method):
    answer = exchange(serve(), f"{method} /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 405 ")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer
    assert b"script" not in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * HEAD_BYTES_MOST + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * HEAD_BYTES_MOST + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 101 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + (b"A: " + b"a" * 200 + b"\r\n") * 90, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\r\n", b"400"),
        (b"GET /metrics HTTP/1\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
    ],
)
def test_what_is_too_large_or_no_http_is_refused(serve, sent, status):
    answer = exchange(serve(), sent)
    assert answer.startswith(b"HTTP/1.0 " + status)
    assert b"eelgrid_gpu_up" not in answer
    assert len(answer) < 500, "nothing of it is echoed"


def test_a_client_that_sends_nothing_gets_no_answer(serve):
    with socket.create_connection(("127.0.0.1", serve()), timeout=5) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_headers_are_read_in_any_case_and_the_date_is_that_of_http(serve):
    port = serve(host_names=("gpu7.cluster.example",))
    answer = exchange(port, b"GET /metrics HTTP/1.0\nhOST:   gpu7.cluster.example\t\nX-Other:\n\n")
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    (date,) = re.findall(rb"\r\nDate: (.*)\r\n", answer)
    assert abs(email.utils.parsedate_to_datetime(date.decode()).timestamp() - time.time()) < 10.0
    assert date.endswith(b" GMT")


def test_a_client_that_trickles_ends_in_time_and_its_place_is_free_again(serve):
    """A byte every 50 ms meets every timeout of a socket, and still not the bound of the whole."""
    port = serve(request_s_most=0.4)
    slow = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(SCRAPES_MOST)]
    try:
        begun = time.monotonic()
        over = False
        while not over and time.monotonic() - begun < 5.0:
            for connection in slow:
                try:
                    connection.sendall(b"a")
                except OSError:
                    over = True
            time.sleep(0.05)
        assert 0.3 <= time.monotonic() - begun <= 2.0
    finally:
        for connection in slow:
            connection.close()
    until = time.monotonic() + 2.0
    while not (answer := exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")) and time.monotonic() < until:
        time.sleep(0.05)
    assert answer.startswith(b"HTTP/1.0 200")


def test_a_client_that_does_not_read_ends_in_time(serve):
    port = serve(OnePage(b"a" * 30_000_000), request_s_most=0.4)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(1.2)
        received = 0
        try:
            while part := connection.recv(1 << 20):
                received += len(part)
        except ConnectionResetError:
            pass
    assert received < 30_000_000


def test_a_handshake_that_never_ends_does(serve, tmp_path):
    port = serve(web_config=tls_file(tmp_path, trustme.CA()), request_s_most=0.4)
    begun = time.monotonic()
    assert exchange(port, b"\x16\x03\x01\x02") == b""
    assert time.monotonic() - begun < 3.0


class SlowPage(OnePage):
    """Answers once it is let."""

    def __init__(self):
        super().__init__()
        self.let = threading.Event()
        self.asked = threading.Semaphore(0)

    def build_response(self, path, **headers):
        self.asked.release()
        assert self.let.wait(20.0)
        return super().build_response(path, **headers)


def test_more_at_once_than_the_bound_are_turned_away(serve):
    """Who has asked keeps its place; one that came later does not get it."""
    page = SlowPage()
    port = serve(page)
    held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(SCRAPES_MOST)]
    try:
        for connection in held:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert page.asked.acquire(timeout=20.0)
        assert exchange(port, b"") == b""
        page.let.set()
        for connection in held:
            assert connection.recv(100).startswith(b"HTTP/1.0 200")
    finally:
        page.let.set()
        for connection in held:
            connection.close()


def tls_file(folder, authority, users=""):
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    path = folder / "web.yml"
    path.write_text("tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n" + users)
    return path


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on the PATH")
def test_curl_with_tls_and_a_password(serve, tmp_path):
    port = serve(web_config=tls_file(tmp_path, trustme.CA(), f"basic_auth_users: {{alice: '{HASH}'}}\n"))

    def curl(*options):
        command = ["curl", "-sS", "--max-time", "5", "-w", "%{http_code} %{ssl_verify_result}", *options]
        done = subprocess.run(
            [*command, f"https://localhost:{port}/metrics"], capture_output=True, check=False, timeout=20
        )
        return done.returncode, done.stdout.decode()

    trusting = ("--cacert", str(tmp_path / "ca.crt"))
    assert curl(*trusting, "-u", "alice:right") == (0, "eelgrid_gpu_up 1.0\n200 0")
    assert curl(*trusting, "-u", "alice:wrong")[1].endswith("401 0")
    assert curl(*trusting)[1].endswith("401 0")
    assert curl("-u", "alice:right")[0] == 60, "an authority that curl does not know"
    assert curl(*trusting, "-u", "alice:right", "--tls-max", "1.1")[0] == 35


PROMETHEUS = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: agents
    honor_labels: true
    scheme: https
    tls_config: {ca_file: ca.crt, server_name: localhost}
    basic_auth: {username: alice, password: right}
    static_configs: [{targets: ["127.0.0.1:%d"]}]
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the PATH (Debian: prometheus)")
def test_prometheus_scrapes_it_and_sums_count_nothing_twice(serve, tmp_path):
    """Over TLS with a password, each series of the page, and the joules of both devices once."""
    page = MetricsRenderer().render_snapshot(build_snapshot(build_gpu_view(), build_gpu_view("GPU-2"))).openmetrics()
    samples = sum(not line.startswith(b"#") for line in page.splitlines())

    class Scraped(OnePage):
        def build_response(self, path, *, accept="", accept_encoding=""):
            assert "application/openmetrics-text" in accept
            return ScrapeResponse(200, "application/openmetrics-text; version=1.0.0; charset=utf-8", page)

    port = serve(Scraped(), web_config=tls_file(tmp_path, trustme.CA(), f"basic_auth_users: {{alice: '{HASH}'}}\n"))
    (tmp_path / "prometheus.yml").write_text(PROMETHEUS % port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={own}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags, "--log.level=warn"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30.0
        while not (found := asked(own, "scrape_samples_scraped")) and time.monotonic() < until:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        assert found == [samples], (tmp_path / "log").read_text()
        assert asked(own, "scrape_samples_post_metric_relabeling") == [samples]
        assert asked(own, "up") == [1.0]
        assert asked(own, "sum(eelgrid_gpu_energy_joules_total)") == [1.0]
        joined = "eelgrid_gpu_power_watts * on (gpu) group_left (model, index) eelgrid_gpu_info"
        assert asked(own, joined) == [0.5, 0.5]
        assert asked(own, 'eelgrid_workload_gpu_energy_joules_total{pod="b",namespace="a"}') == [5.0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def asked(address, query):
    """The values that the server answers a query with; none while it is not there."""
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return [float(found["value"][1]) for found in json.load(answer)["data"]["result"]]
    except (OSError, http.client.HTTPException):
        return []


def test_connections_that_say_nothing_do_not_keep_a_probe_out(serve):
    port = serve()
    held = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(3 * SCRAPES_MOST)]
    try:
        for said in (b"", b"GET / HTTP/1.1\r\n"):
            for one in held[-SCRAPES_MOST:]:
                with contextlib.suppress(OSError):
                    one.sendall(said)
            assert exchange(port, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 200")
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9465", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_page_of_somebody_elses_name_reads_nothing(serve, host):
    """DNS rebinding: the browser is at our address and still says the page's name."""
    port = serve(host_names=("gpu7.cluster.example",))
    for path in ("/metrics", "/livez"):
        answer = exchange(port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 421 ")
        assert b"eelgrid_gpu_up" not in answer
        assert b"--metrics-host" in answer


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "LOCALHOST:9465", "127.0.0.1:9465", "[::1]:9465", "10.1.2.3", "gpu7.cluster.example.:9465"],
)
def test_scrapers_by_address_by_this_machines_name_or_by_a_listed_one_are_served(serve, host):
    port = serve(host_names=("gpu7.cluster.example",))
    field = f"Host: {host}\r\n" if host else ""
    assert exchange(port, f"GET /metrics HTTP/1.0\r\n{field}\r\n".encode()).startswith(b"HTTP/1.0 200 ")
    assert exchange(port, f"GET /metrics HTTP/1.0\r\nHost: {socket.gethostname()}\r\n\r\n".encode()).startswith(
        b"HTTP/1.0 200 "
    )
