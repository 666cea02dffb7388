"""What a command loads when it starts: eelctl waits for each module, and most of them are for other commands."""

import json
import subprocess
import sys

import pytest
from tests.fakes.operators import FakeOperators, serving

# Of servers, of documents, of progress bars, of the planner. asyncio comes with grpc.
_NOT_OF_A_CALL = (
    "aiohttp", "cryptography", "eelgrid_protos.connection_limits", "eelgrid_protos.messages.flux",
    "eelgrid_protos.messages.ingest", "eelgrid_protos.wire.flux_service_pb2", "google.protobuf.json_format", "grpc_health.v1",
    "grpc_reflection.v1alpha", "hashlib", "msgspec", "numba", "numpy", "prometheus_client", "rich", "scipy", "secrets", "shutil",
    "sklearn", "textual", "yaml",
)  # fmt: skip
_PROGRAM = """
import json, sys
from eelgrid_controller.cli.__main__ import cli
try:
    cli(sys.argv[1:], prog_name="eelctl")
except SystemExit as stop:
    assert not stop.code, stop
loaded = [module for name, module in sorted(sys.modules.items()) if name.startswith("eelgrid_protos.messages.")]
classes = {one for module in loaded for one in vars(module).values() if isinstance(one, type)}
starts = {one.__name__: getattr(one.__init__, "__code__", None) for one in classes}
compiled = [name for name, code in starts.items() if code is not None and code.co_filename == "<string>"]
print()
print(json.dumps([sorted(sys.modules), compiled]))
"""


def run_command(*arguments):
    """Runs a command against a fake; returns the modules that it loaded, and the messages it made."""
    with serving(FakeOperators()) as address:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, "--controller", address, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [("run", "-d", "--", "true"), ("jobs",), ("queue",), ("workloads",), ("nodes",), ("version",)],
    ids=" ".join,
)
def test_a_call_loads_what_the_call_needs(arguments):
    modules, compiled = run_command(*arguments)
    assert set(modules) & set(_NOT_OF_A_CALL) == set()
    # To compile all of them took half of the time in which eelctl starts.
    assert 0 < len(compiled) < 20, compiled
