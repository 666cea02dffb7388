"""Moves by real processes: asked for, shown, executed and in the plans of both nodes; refused when they are stale."""

import json

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_protos.messages import ListPlansRequest, RecommendMovesRequest

NODE = {
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "g2",
    "gpus": [{"product": "openb-g2", "model": "G2", "count": 1}],
}


@pytest.fixture(scope="module")
def compiled():
    """The kernels in the cache: eelctl does not wait minutes for a machine that never compiled them."""
    core = build_core(build_node("a"), build_node("b"))
    core.submit(build_request(gpus=1, milli=500), now_ns=1)
    recommend_moves(build_migration_problem(core.survey_moves(RecommendMovesRequest())))


@pytest.fixture
def scattered(tmp_path, compiled):
    """Node a-0 and node b-0 hold a half of a GPU each."""
    with Cluster(tmp_path) as cluster:
        cluster.controller()
        cluster.agent(fleet_of(tmp_path / "a.json", ({"name": "a-{index}", "count": 1, **NODE},)))
        cluster.until_ready(1)
        for key in ("one", "gap"):
            cluster.eelctl("submit", "--id", key, "--name", key, "--gpu-share", "0.5", "--cpu", 4)
        cluster.agent(fleet_of(tmp_path / "b.json", ({"name": "b-{index}", "count": 1, **NODE},)))
        cluster.until_ready(2)
        cluster.eelctl("submit", "--id", "two", "--name", "two", "--gpu-share", "0.5", "--cpu", 4)
        cluster.eelctl("cancel", "gap")
        yield cluster


def places(cluster):
    """The node of each of the two halves."""
    listed = json.loads(cluster.eelctl("workloads", "-o", "json").stdout)
    return {item["workload_id"]: item["placements"][0]["node_name"] for item in listed if item["workload_id"] != "gap"}


def test_moves_are_shown_then_made_and_the_plans_of_both_nodes_say_so(scattered):
    before = places(scattered)
    assert set(before.values()) == {"a-0", "b-0"}
    table = scattered.eelctl("moves", "--budget", 5).stdout
    assert "-225.0 W" in table
    assert "Saves 225.0 W by the model." in table
    assert "No moves within the budget save more than 450.0 W: an upper bound" in table
    assert "1 of 2 replicas to move (at most 5)" in table
    assert places(scattered) == before, "asking moves nothing"
    (words,) = [line for line in table.splitlines() if line.startswith("Nothing was moved.")]
    found = words.split()[-1]
    assert json.loads(scattered.eelctl("moves", "--budget", 5, "-o", "json").stdout)["recommendation_id"] == found
    assert "moved 1 replica;" in scattered.eelctl("moves", "apply", found, "--yes").stdout
    after = places(scattered)
    assert len(set(after.values())) == 1
    plans = [item.plan for item in scattered.operators.list_plans(ListPlansRequest(), timeout=10.0).plans]
    held = {plan.node_name: {entry.workload_id for entry in plan.assignments} for plan in plans}
    assert sorted(held.values(), key=len) == [set(), {"one", "two"}]
    # It is executed once.
    scattered.eelctl("moves", "apply", found, "--yes", code=4)
    assert "No move within the budget" in scattered.eelctl("moves", "apply", "--yes").stdout


def test_a_move_that_no_longer_holds_is_refused_by_name(scattered):
    plain = json.loads(scattered.eelctl("moves", "--budget", 5, "-o", "json").stdout)
    key = plain["moves"][0]["workload_id"]
    scattered.eelctl("cancel", key)
    refused = scattered.eelctl("moves", "apply", plain["recommendation_id"], "--yes", code=5)
    assert f"move 1 of 1 ({key} from" in refused.stderr
    assert "the workload does not run" in refused.stderr
