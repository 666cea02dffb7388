"""Queues by real processes: declared, enforced and shown; promised starts and reservations; all of it over restarts."""

import json

import pytest
from tests.e2e.processes import Cluster, fleet_of

NODES = [
    {"name": "n1", "cpu_milli": 64_000, "memory_bytes": 2**37, "gpus": [{"product": "a10", "count": 8}]},
]
QUEUES = """
queues:
  - {name: research, quota: {gpu: 4}}
  - {name: vision, parent: research, quota: {gpu: {nominal: 2, borrow: 2}}}
  - {name: speech, parent: research}
  - {name: default, quota: {gpu: 1}}
"""


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def read(cluster, *arguments):
    return json.loads(cluster.eelctl(*arguments, "-o", "json").stdout)


def submit(cluster, key, gpus, *arguments, code=0):
    return cluster.eelctl("submit", "--id", key, "--name", key, "--cpu", 1, "--gpus", gpus, *arguments, code=code)


def used(cluster):
    found = read(cluster, "queue", "show")["queues"]
    return {
        row["queue"]["name"]: next((int(one["used"]) for one in row["usage"] if one["resource"] == "gpu"), 0)
        for row in found
    }


def phase(cluster, key):
    return read(cluster, "get", key)["phase"]


def test_queues_from_their_declaration_to_their_end(cluster, tmp_path):
    controller = cluster.controller()
    cluster.agent(fleet_of(cluster.folder / "fleet.json", NODES))
    cluster.until_ready(1)
    path = tmp_path / "queues.yaml"
    path.write_text(QUEUES)
    assert "no queues are declared" in cluster.eelctl("queue", "show").stdout
    cluster.eelctl("queue", "apply", "-f", path)

    submit(cluster, "v1", 3, "--queue", "vision")
    submit(cluster, "v2", 2, "--queue", "vision")
    assert phase(cluster, "v2") == "pending"
    assert "quota: queue vision may not borrow so much gpu" in cluster.eelctl("queue").stdout
    explained = cluster.eelctl("explain", "v2").stdout
    assert "Queue vision uses 3 GPUs of 4 GPUs of its quota and what it may borrow" in explained
    assert "raise borrow of gpu in queue vision to 3 GPUs" in explained
    submit(cluster, "s1", 3, "--queue", "speech")
    assert used(cluster) == {"research": 6000, "vision": 3000, "speech": 3000, "default": 0}

    assert "did you mean vision" in submit(cluster, "x", 1, "--queue", "vison", code=5).stderr
    assert "can have 4 GPUs" in submit(cluster, "x", 5, "--queue", "vision", code=5).stderr
    submit(cluster, "d1", 1)
    assert read(cluster, "get", "d1")["spec"]["queue"] == "default"

    controller.kill()
    cluster.controller()
    cluster.reconnect()
    cluster.until_ready(1)
    assert used(cluster) == {"research": 6000, "vision": 3000, "speech": 3000, "default": 1000}
    assert phase(cluster, "v2") == "pending"

    cluster.eelctl("cancel", "s1")
    assert phase(cluster, "v2") == "pending", "it is its own queue that holds it"
    # Whether the agent has reported since the restart or not, the queue before no longer holds it.
    moved = cluster.eelctl("queue", "move", "v2", "speech").stdout
    assert "moved to queue speech; " in moved
    assert "queue vision" not in moved
    cluster.until(lambda: phase(cluster, "v2") == "placed", what="it is placed in the queue that it moved to")

    path.write_text("queues: [{name: vision, quota: {gpu: 1}}, {name: speech}]")
    refused = cluster.eelctl("queue", "apply", "-f", path, code=5)
    assert "a quota of 1 gpu is below the 3 that run there" in refused.stderr
    cluster.eelctl("queue", "apply", "-f", path, "--yes")
    assert phase(cluster, "v1") == "placed"
    submit(cluster, "v3", 1, "--queue", "vision")
    assert phase(cluster, "v3") == "pending"
    cluster.eelctl("cancel", "v1")
    cluster.until(lambda: phase(cluster, "v3") == "placed", what="it starts once the queue is below its quota")
    path.write_text("queues: []")
    cluster.eelctl("queue", "apply", "-f", path)
    submit(cluster, "free", 2, "--queue", "anything")
    assert phase(cluster, "free") == "placed"
    assert "UpdatePolicy" in cluster.eelctl("audit").stdout
    assert "MoveToQueue" in cluster.eelctl("audit").stdout


def test_promised_starts_and_reservations(cluster):
    controller = cluster.controller()
    cluster.agent(fleet_of(cluster.folder / "fleet.json", NODES))
    cluster.until_ready(1)
    submit(cluster, "run", 6, "--expect", "2h")
    submit(cluster, "big", 8, "--expect", "30m")
    assert "  in 2 h" in cluster.eelctl("queue").stdout or "  in 120 min" in cluster.eelctl("queue").stdout
    submit(cluster, "long", 2, "--expect", "3h")
    assert "backfill: there is room, but it would delay work" in cluster.eelctl("queue").stdout
    submit(cluster, "short", 2, "--expect", "1h")
    assert phase(cluster, "short") == "placed"
    explained = cluster.eelctl("explain", "big").stdout
    assert "when run ends; the last of these ends by what its user expects" in explained
    promised = read(cluster, "get", "big")["promise"]["start_ns"]

    controller.kill()
    cluster.controller()
    cluster.reconnect()
    cluster.until_ready(1)
    assert read(cluster, "get", "big")["promise"]["start_ns"] == promised

    cluster.eelctl("cancel", "--yes", "run", "short", "long")
    cluster.until(lambda: phase(cluster, "big") == "placed", what="the first starts once there is room")
    cluster.eelctl("cancel", "big")
    cluster.eelctl("reservation", "create", "fans", "--nodes", "n1", "--duration", "3s", "--maintenance")
    submit(cluster, "after", 1)
    assert "reservation fans holds" in cluster.eelctl("queue").stdout
    assert "maintenance" in cluster.eelctl("reservation", "list").stdout
    cluster.until(lambda: phase(cluster, "after") == "placed", what="it starts when the reservation ends")
    cluster.eelctl("reservation", "delete", "fans")
    assert "no node is reserved" in cluster.eelctl("reservation", "list").stdout
    cluster.eelctl("policy", "set", "--backfill", "conservative", "--default-runtime", "4h")
    assert "conservative, 4 h where nothing is known" in cluster.eelctl("policy", "get").stdout
