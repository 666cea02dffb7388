"""`eelgrid-agent energy` as operators run it, beside an agent that really runs."""

import json

import pytest
from tests.e2e.processes import Cluster
from tests.fork_server import run_program

GPUS = [{"product": "h100-sxm5-80gb"}, {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]}]
FLEET = {"nodes": [{"name": "gpu-7", "cpu_milli": 1000, "memory_bytes": 2**30, "gpus": GPUS}]}


def energy(address, *arguments):
    """One program; its output."""
    done = run_program("eelgrid_agent", ("energy", "--address", address, *arguments))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("count", [1, 2])
def test_a_running_agent_reports_whose_its_joules_are(tmp_path, count):
    nodes = [{**FLEET["nodes"][0], "name": f"gpu-{index}"} for index in range(count)]
    (tmp_path / "fleet.json").write_text(json.dumps({"nodes": nodes}))
    with Cluster(tmp_path) as cluster:
        address = cluster.agents[cluster.agent(tmp_path / "fleet.json")]["listen"]
        if count > 1:
            assert json.loads(energy(address, "--node", "gpu-1", "-o", "json"))["status"] == "not_kept"
            return

        def known():
            document = json.loads(energy(address, "-o", "json"))
            return document if document["status"] == "known" and document["devices"][0]["total_mj"] else None

        document = cluster.until(known, within_s=30.0, what="something was spent and looked at")
        assert document["node"] == "gpu-0"
        for device in document["devices"]:
            owned = [row["energy_mj"] for row in document["owners"] if row["gpu_uuid"] == device["gpu_uuid"]]
            assert sum(owned) + sum(one["energy_mj"] for one in device["unowned"]) == device["total_mj"]
            assert device["estimate"]["method"] == "counter"
        table = energy(address)
        assert all(device["gpu_uuid"] in table for device in document["devices"])
