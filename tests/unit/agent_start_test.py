"""What an agent and its driver process load: both stay on every node, so what they do not need costs memory there."""

import json
import subprocess
import sys

import pytest

_AGENT = "eelgrid_agent.__main__, eelgrid_agent.composition"
_CHILD = "eelgrid_agent.devices.process.child, eelgrid_agent.devices.nvml.device, eelgrid_agent.devices.nvml.control"
_NOT_OF_AN_AGENT = (
    "cryptography", "difflib", "eelgrid_agent.engine.local", "eelgrid_agent.engine.slurm_node_host", "eelgrid_agent.simulation",
    "eelgrid_protos.messages.operator", "eelgrid_protos.messages.proposals", "eelgrid_protos.wire.operator_service_pb2",
    "numpy", "prometheus_client", "pynvml", "tomllib",
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
