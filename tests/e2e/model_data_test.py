"""Model data from an agent's disk to a placement: what is fetched is told, and work goes there, also after a restart."""

import json

import pytest
from tests.e2e.processes import Cluster, fleet_of

NODE = {"cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 2}]}
MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def test_work_goes_to_the_node_that_has_its_model_and_the_journal_knows_which(cluster):
    nodes = [{**NODE, "name": name, "model_data": [MODEL] if name == "near" else []} for name in ("far", "near")]
    controller = cluster.controller()
    cluster.agent(fleet_of(cluster.folder / "fleet.json", nodes))
    cluster.until_ready(2)
    ask = ("submit", "--gpus", 1, "--cpu", 2, "--model-data", MODEL)
    assert "replica 0  near" in cluster.eelctl(*ask, "--name", "one").stdout
    assert "1 node ruled out by model data" in cluster.eelctl("explain", "one").stdout
    controller.stop()
    cluster.controller()
    assert f"model data on disk: {MODEL}" in cluster.eelctl("topology", "near").stdout
    # Nothing waits for a preference, so that the agent which is heard first would get the work.
    cluster.eelctl("cordon", "far")
    for name, node in (("two", "near"), ("three", "far")):
        cluster.eelctl(*ask, "--name", name)
        cluster.eelctl("uncordon", "far") if node == "far" else None
        cluster.until(lambda name=name: "is placed." in cluster.eelctl("explain", name).stdout, what="it is placed")
        assert f"is on {node}" in cluster.eelctl("explain", name).stdout
    listed = json.loads(cluster.eelctl("workloads", "-o", "json").stdout)
    assert [row["spec"]["model_data"]["data_names"] for row in listed] == [[MODEL]] * 3


def test_an_agent_tells_a_model_once_it_is_fetched(cluster):
    hub = cluster.folder / "hub"
    folder = hub / f"models--{MODEL.replace('/', '--')}"
    (folder / "snapshots" / "5f0b02c").mkdir(parents=True)
    (folder / "snapshots" / "5f0b02c" / "model.safetensors").touch()
    cluster.controller()
    cluster.run(
        "agent", "-m", "eelgrid_agent", "--controller", cluster.address, "--listen", "127.0.0.1:0",
        "--metrics", "127.0.0.1:0", "--node-name", "box", "--state", str(cluster.folder / "state"),
        "--model-data", str(hub),
    )  # fmt: skip
    cluster.until_ready(1)
    told = f"model data on disk: {MODEL}"
    cluster.until(lambda: told in cluster.eelctl("topology", "box").stdout, what="the model is told")
