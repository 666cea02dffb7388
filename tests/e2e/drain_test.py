"""Nodes are cordoned, drained and uncordoned by real processes: what moves, waits and returns to the queue, and a restart."""

import json

import pytest
from tests.e2e.lost_gpu_test import cells
from tests.e2e.page_controller_test import picture
from tests.e2e.processes import Cluster, fleet_of

NODES = [
    {"name": name, "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}
    for name in ("n1", "n2")
]


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def begin(cluster, *arguments):
    controller = cluster.controller(*arguments)
    cluster.agent(fleet_of(cluster.folder / "fleet.json", NODES))
    cluster.until_ready(2)
    return controller


def read(cluster, *arguments):
    return json.loads(cluster.eelctl(*arguments, "-o", "json").stdout)


def node_of(cluster, key):
    return [at["node_name"] for at in read(cluster, "get", key).get("placements", [])]


def state(cluster, node):
    return dict(cells(cluster, "nodes", title="STATE"))[node]


def submit(cluster, key, *arguments):
    cluster.eelctl("submit", "--id", key, "--name", key, "--cpu", 1, *arguments)


def test_a_drain_moves_what_may_move_waits_for_what_is_fixed_and_uncordon_brings_work_back(cluster):
    page = begin(cluster, "--page", "127.0.0.1:0").said("serving listen=")["page"]
    cluster.eelctl("cordon", "n2")
    submit(cluster, "free", "--gpus", 1)
    submit(cluster, "stays", "--gpus", 1, "--mobility", "fixed")
    cluster.eelctl("uncordon", "n2")
    before = len(picture(page)["changes"])

    dry = cluster.eelctl("drain", "n1", "--dry-run").stdout
    assert "n1: would be drained, 2 workloads there" in dry
    assert "free moves to n2" in dry
    assert "stays may finish: it is declared fixed" in dry
    assert state(cluster, "n1") == "ready"

    cluster.eelctl("drain", "n1", "--reason", "fan broken", "--no-wait")
    cluster.until(lambda: node_of(cluster, "free") == ["n2"], what="the movable workload leaves")
    assert node_of(cluster, "stays") == ["n1"]
    assert state(cluster, "n1") == "ready, draining 1 left"
    assert set(dict(cells(cluster, "gpus", "--node", "n1", title="STATE")).values()) == {"draining 1 left"}
    assert "fan broken" in cluster.eelctl("describe", "node", "n1").stdout
    cluster.until(lambda: len(picture(page)["changes"]) > before, what="the page tells of it")
    assert ["node draining", "n1: fan broken"] in [one[2:5:2] for one in picture(page)["changes"]]

    late = cluster.eelctl("drain", "n1", "--timeout", "1s", code=1)
    assert "1 workload still on n1; the drain goes on" in late.stderr
    submit(cluster, "pair", "--gpus", 2)
    explained = cluster.eelctl("explain", "pair").stdout
    assert "wait for or cancel" in explained
    cluster.eelctl("cancel", "stays")
    assert "n1: drained" in cluster.eelctl("drain", "n1").stdout
    assert state(cluster, "n1") == "ready, drained"
    assert "eelctl uncordon n1" in cluster.eelctl("explain", "pair").stdout
    assert cluster.eelctl("uncordon", "n1").stdout == "n1: uncordoned\n"
    cluster.until(lambda: node_of(cluster, "pair") == ["n1"], what="what waits is placed")
    assert state(cluster, "n1") == "ready"
    assert cluster.eelctl("uncordon", "n1").stdout == "n1: not cordoned\n"


def test_after_the_grace_a_job_returns_to_the_queue_even_over_a_restart(cluster):
    controller = begin(cluster)
    cluster.eelctl("cordon", "n2", "--reason", "spare")
    submit(cluster, "job", "--gpus", 2)
    asked = cluster.eelctl("drain", "n1", "--grace", "2s", code=5)
    assert "stopped after the grace: 1 workload (job)" in asked.stderr
    assert state(cluster, "n1") == "ready"
    cluster.eelctl("drain", "n1", "--grace", "3s", "--yes", "--no-wait", "--reason", "kernel")
    assert state(cluster, "n1") == "ready, draining 1 left"
    controller.kill()
    cluster.controller()
    cluster.reconnect()
    cluster.until_ready(2)
    cluster.until(lambda: state(cluster, "n1") == "ready, drained", what="the grace ends after the restart")
    assert read(cluster, "get", "job")["phase"] == "pending"
    assert state(cluster, "n2") == "ready, cordoned"
    (cordon,) = read(cluster, "describe", "node", "n2")["node"]["cordons"]
    assert cordon["reason"] == "spare"
    cluster.eelctl("uncordon", "n2")
    cluster.until(lambda: node_of(cluster, "job") == ["n2"], what="it begins elsewhere")


def test_single_gpus_are_cordoned_and_drained(cluster):
    begin(cluster)
    cluster.eelctl("cordon", "n2")
    submit(cluster, "one", "--gpus", 1)
    (index,) = read(cluster, "get", "one")["placements"][0]["gpu_indexes"]
    assert f"n1/{index}: drained" in cluster.eelctl("drain", f"n1/{index}").stdout
    assert read(cluster, "get", "one")["placements"][0]["gpu_indexes"] == [1 - index]
    assert state(cluster, "n1") == "ready, 1 GPU drained"
    assert cluster.eelctl("uncordon", f"n1/{index}").stdout == f"n1/{index}: uncordoned\n"
    assert state(cluster, "n1") == "ready"


def test_what_is_not_there_is_refused_with_near_names(cluster):
    begin(cluster)
    assert "did you mean n1" in cluster.eelctl("cordon", "n11", code=4).stderr
    assert "its GPUs are 0, 1" in cluster.eelctl("drain", "n1/7", "--no-wait", code=4).stderr
    assert "give --grace" in cluster.eelctl("drain", "n1", "--force", code=2).stderr
