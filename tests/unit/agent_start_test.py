"""What an agent and its driver process load: both stay on every node, so what they do not need costs memory there."""

import json
import subprocess
import sys

import pytest

from eelgrid_agent.settled_memory import find_clean_segments

_AGENT = "eelgrid_agent.__main__, eelgrid_agent.composition"
_CHILD = "eelgrid_agent.devices.process.child, eelgrid_agent.devices.nvml.device, eelgrid_agent.devices.nvml.control"
_NOT_OF_AN_AGENT = (
    "cryptography", "difflib", "eelgrid_agent.engine.local", "eelgrid_agent.engine.slurm_node_host", "eelgrid_agent.simulation",
    "eelgrid_protos.messages.operator", "eelgrid_protos.messages.proposals", "eelgrid_protos.wire.operator_service_pb2",
    "google.protobuf.descriptor_pb2", "hashlib", "numpy", "prometheus_client", "pynvml", "ssl", "tomllib",
)  # fmt: skip
_NOT_OF_A_CHILD = (
    "asyncio", "difflib", "eelgrid_agent.simulation", "eelgrid_protos.codec", "eelgrid_protos.messages.energy",
    "eelgrid_protos.messages.plan", "eelgrid_protos.wire", "google.protobuf", "grpc", "hashlib", "importlib.resources",
    "logging", "psutil", "ssl",
)  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [(_AGENT, _NOT_OF_AN_AGENT), (_CHILD, _NOT_OF_A_CHILD)],
    ids=["agent", "driver process"],
)
def test_a_process_of_a_node_loads_what_it_needs(modules, unneeded):
    code = f"import json, sys, {modules}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) & set(unneeded) == set()


def run_program(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_an_agent_loads_no_openssl_until_something_uses_it():
    """asyncio does without; TLS of the metrics, which wraps plain sockets, loads it when it is configured."""
    code = """
import eelgrid_agent.__main__ as agent, asyncio, sys
agent.parse_flags(["--controller", "127.0.0.1:7443"])
def is_loaded():
    return any(name in open("/proc/self/maps").read() for name in ("libcrypto", "libssl"))
print("ssl" in sys.modules, is_loaded())
import ssl
context = ssl.create_default_context()
print(is_loaded(), sys.modules["ssl"] is ssl)
async def connect():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address)
    print(await reader.read())
    writer.close()
    try:
        await asyncio.open_connection(*address, ssl=context)
    except RuntimeError as error:
        print(error)
asyncio.run(connect())
"""
    *said, refusal = run_program(code).splitlines()
    assert said == ["False False", "True True", "b''"]
    assert "ssl module" in refusal
    assert "not available" in refusal


@pytest.mark.parametrize("loaded", ["asyncio", "http.client", "http.server", "ssl"])
def test_what_is_loaded_already_keeps_its_tls(loaded):
    code = f"""
import {loaded}, eelgrid_agent.lean_imports, asyncio.sslproto, http.client, ssl
print(asyncio.sslproto.ssl is ssl, hasattr(http.client, "HTTPSConnection"))
"""
    assert run_program(code) == "True True\n"


def test_the_client_of_kubernetes_has_https_beside_a_metrics_endpoint_that_was_loaded_without():
    code = """
import eelgrid_agent.__main__, eelgrid_agent.metrics.server as server, http.client
from http.server import BaseHTTPRequestHandler
print(hasattr(http.client, "HTTPSConnection"))
from eelgrid_agent.kubelet import kube_client
import io, ssl
connection = http.client.HTTPSConnection("localhost", context=ssl.create_default_context())
print(kube_client.http.client.HTTPSConnection is type(connection), server.http.client is http.client)
class Handler(server._Handler):
    def __init__(self, head):
        self.rfile, self.wfile, self.close_connection = server._Head(io.BytesIO(head)), io.BytesIO(), True
        self.handle_one_request()
    def _send(self, answer, headers):
        print(answer.status)
Handler(b"GET / HTTP/1.1\\r\\n" + b"A: " + b"a" * 20_000)
Handler(b"GET /" + b"a" * 20_000)
"""
    assert run_program(code).split() == ["False", "True", "True", "431", "414"]


_SMAPS = """\
1000-3000 r--p 00000000 fe:00 12 /usr/lib/libx y.so
Rss: 8 kB
Anonymous:             0 kB
3000-5000 r-xp 00002000 fe:00 12 /usr/lib/libx y.so
Anonymous:             0 kB
5000-6000 r--p 00004000 fe:00 12 /usr/lib/libx y.so
Anonymous:             4 kB
6000-7000 rw-p 00005000 fe:00 12 /usr/lib/libx y.so
Anonymous:             0 kB
7000-9000 r--p 00000000 fe:00 14 /usr/share/table
Anonymous:             0 kB
a000-b000 r-xp 00000000 fe:00 16 /usr/lib/patched.so
Anonymous:             4 kB
b000-c000 r--p 00001000 fe:00 16 /usr/lib/patched.so
Anonymous:             0 kB
c000-d000 r-xp 00000000 00:00 0
Anonymous:             0 kB
d000-e000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
"""


def test_only_code_and_constants_that_nobody_changed_are_unmapped():
    spans = list(find_clean_segments(_SMAPS.splitlines(keepends=True)))
    assert spans == [(0x1000, 0x3000), (0x3000, 0x5000), (0xB000, 0xC000)]


def test_a_process_whose_memory_is_settled_has_fewer_pages_and_goes_on():
    code = """
import json, re, socket, threading, zlib
from eelgrid_agent.settled_memory import settle_memory, use_one_arena
def count_pages():
    return int(re.search(r"RssFile:\\s+(\\d+)", open("/proc/self/status").read())[1])
use_one_arena()
before = count_pages()
settle_memory()
after = count_pages()
threads = [threading.Thread(target=zlib.compress, args=(bytes(1_000_000),)) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
import decimal, sqlite3, ctypes.util
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
print(json.dumps([before, after, str(decimal.Decimal("0.1") + 1), sqlite3.connect(":memory:").execute("select 2").fetchone()]))
"""
    before, after, total, row = json.loads(run_program(code))
    assert after < 0.8 * before
    assert (total, row) == ("1.1", [2])
