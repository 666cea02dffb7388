"""Probes answer whoever else keeps a daemon's doors busy, and tell a loop that hangs from one that is slow."""

import asyncio
import logging
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from eelgrid_controller.server.http.metrics_server import ControllerMetrics, ControllerMetricsServer
from eelgrid_protos.probes import SILENCE_S_MOST, Heartbeat, ProbeServer

LOG = logging.getLogger("test.probes")


@contextmanager
def half_open(port, number, said=b""):
    """So many connections that say this and then nothing."""
    held = []
    try:
        for _ in range(number):
            one = socket.create_connection(("127.0.0.1", port), timeout=20.0)
            held.append(one)
            one.sendall(said)
        yield held
    finally:
        for one in held:
            one.close()


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def probes():
    words = {"fault": "", "unready": ""}
    server = ProbeServer(fault=lambda: words["fault"], unready=lambda: words["unready"], log=LOG)
    port = server.start("127.0.0.1:0")
    yield port, words
    server.close()


def test_a_daemon_says_whether_it_lives_and_whether_it_is_ready(probes):
    port, words = probes
    assert ask(port, "/livez") == (200, "ok\n")
    assert ask(port, "/readyz?verbose") == (200, "ok\n")
    words.update(fault="the loop hangs", unready="not yet")
    assert ask(port, "/livez") == (503, "the loop hangs\n")
    assert ask(port, "/readyz") == (503, "not yet\n")
    assert ask(port, "/metrics")[0] == 404


@pytest.mark.parametrize("said", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"])
def test_connections_that_say_nothing_do_not_keep_a_probe_out(probes, said):
    port, _ = probes
    with half_open(port, 300, said):
        for _ in range(10):
            assert ask(port, "/livez") == (200, "ok\n")


def test_a_probe_is_answered_while_the_loop_of_the_daemon_is_busy(probes):
    """The daemon's own thread waits here, as in a long decision."""
    port, _ = probes
    begun_s = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/livez').status)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout == "200\n"
    assert time.monotonic() - begun_s < 60


def test_nonsense_and_endless_heads_are_cut_off(probes):
    port, _ = probes
    with half_open(port, 1, b"x" * 10_000) as (one,):
        try:
            answer = one.recv(1000)
        except ConnectionError:
            answer = b""
        assert answer == b""
    with half_open(port, 1, b"POST /livez HTTP/1.1\r\n\r\n") as (one,):
        assert one.recv(1000).startswith(b"HTTP/1.1 405")


async def test_a_loop_that_is_slow_lives_and_one_that_hangs_does_not():
    now_s = [100.0]
    beat = Heartbeat(lambda: now_s[0])
    now_s[0] += SILENCE_S_MOST - 1.0
    assert beat.fault() == ""
    now_s[0] += 2.0
    assert beat.fault() == "the event loop has not turned for 61 s"
    beating = asyncio.create_task(beat.run())
    await asyncio.sleep(0)
    assert beat.fault() == ""
    beating.cancel()


async def test_the_controllers_metrics_address_answers_probes_beside_connections_that_say_nothing():
    door = ControllerMetricsServer(ControllerMetrics(), is_ready=lambda: True, insecure=False, log=LOG)
    port = await door.start("127.0.0.1:0")
    try:
        with half_open(port, 100):
            for path in ("/livez", "/readyz", "/metrics"):
                status, _ = await asyncio.to_thread(ask, port, path)
                assert status == 200, path
    finally:
        await door.stop()


def test_a_daemon_raises_its_limit_of_open_files_by_itself():
    code = (
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from eelgrid_protos.sockets import count_connections_most, raise_descriptor_limit\n"
        "few = count_connections_most()\n"
        "now = raise_descriptor_limit()\n"
        "assert now == min(hard, 1 << 20), now\n"
        "assert few == 204 and few < count_connections_most() < now\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
