"""What-if, capacity, explanations, decisions and a shadow, by real processes as an operator would ask."""

import json

import pytest
import yaml
from tests.e2e.processes import Cluster, fleet_of

BIG = {
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "g2",
    "gpus": [{"product": "openb-g2", "model": "G2", "count": 4}],
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Two nodes of four GPUs; a job of four runs, another of four runs, a third waits."""
    with Cluster(tmp_path_factory.mktemp("whatif")) as cluster:
        cluster.controller()
        cluster.agent(fleet_of(cluster.folder / "fleet.json", ({"name": "big-{index}", "count": 2, **BIG},)))
        cluster.until_ready(2)
        for key in ("one", "two", "three"):
            cluster.eelctl("submit", "--id", key, "--name", key, "--gpus", 4, "--cpu", 8)
        yield cluster


def standing(cluster):
    """All workloads as they stand, without what their GPUs draw."""
    listed = json.loads(cluster.eelctl("workloads", "--all", "-o", "json").stdout)
    return [{key: value for key, value in one.items() if key != "power_w"} for one in listed]


def test_a_what_if_leaves_the_cluster_as_it_was(live):
    before = standing(live)
    table = live.eelctl("whatif", "--drain", "big-0", "--add", "2:H100-SXM5-80GB:8").stdout
    assert "2 workloads would be placed" in table or "1 workload would be placed" in table
    plain = json.loads(live.eelctl("whatif", "--add-like", "1:big-0", "-o", "json").stdout)
    assert (plain["before"]["pending"], plain["after"]["pending"]) == (1, 0)
    assert (
        yaml.safe_load(live.eelctl("whatif", "--add-like", "1:big-0", "-o", "yaml").stdout)["after"] == plain["after"]
    )
    assert standing(live) == before


def test_how_many_nodes_are_needed(live):
    out = live.eelctl("capacity", "--node-like", "big-1", "--gpus", 2, "--cpu", 4, "--copies", 3).stdout
    assert out.startswith("3 nodes are needed for 3 workloads; with one less, 1 would wait.")


def test_what_waits_is_told_whom_it_waits_for(live):
    out = live.eelctl("explain", "three").stdout
    assert "free GPUs 0, 1, 2 and 3 on node big-0: wait for or cancel one" in out


def test_a_decision_replays_without_the_controller(live):
    for key in ("one", "three"):
        file = live.folder / f"{key}.json"
        live.eelctl("decision", "export", key, "--file", file)
        assert live.eelctl("decision", "replay", file).stdout.endswith("identical to the last bit\n")
    document = json.loads((live.folder / "one.json").read_text())
    document["weights"]["power"] = 2.0
    (live.folder / "other.json").write_text(json.dumps(document))
    assert "differences:" in live.eelctl("decision", "replay", live.folder / "other.json", code=1).stdout


def test_a_shadow_follows(live):
    live.eelctl("shadow", "start", "--objective", "energy")
    live.eelctl("submit", "--id", "small", "--name", "small", "--cpu", 1)
    plain = json.loads(live.eelctl("shadow", "show", "-o", "json").stdout)
    assert plain["alike"] + plain["elsewhere"] == 1
    assert "shadow energy: power 1, fragmentation 0 W" in live.eelctl("shadow", "stop").stdout
    live.eelctl("shadow", "show", code=5)
