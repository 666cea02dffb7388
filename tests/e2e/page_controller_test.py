"""The page of a controller that runs: what agents report and what was decided stand on it."""

import json
import urllib.error
import urllib.request

import pytest
from tests.e2e.processes import fleet_of

from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

NODE = {"name": "solo", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}


def picture(address):
    """Everything, as a page hears it first."""
    with urllib.request.urlopen(f"http://{address}/events", timeout=10) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                return json.loads(line[6:])
    raise AssertionError("the stream ended before its first frame")


def answer(address, path):
    """What the page asks for."""
    with urllib.request.urlopen(f"http://{address}/data/{path}", timeout=10) as found:
        return json.load(found)


def test_a_running_controller_shows_its_fleet_and_says_why(cluster):
    controller = cluster.controller("--page", "127.0.0.1:0")
    address = controller.said("serving listen=")["page"]
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    cluster.agent(fleet_of(cluster.folder / "fleet.json", [NODE]))
    cluster.until(lambda: cluster.summary().nodes_ready == 1, what="the node joins")
    request = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000)
    spec = WorkloadSpec(name="job", request=request)
    (placement,) = cluster.operators.submit_workload(
        SubmitWorkloadRequest(workload_id="w-page", spec=spec), timeout=10.0
    ).workload.placements

    def shown():
        seen = picture(address)
        powers, held = seen["gpus"]["power_w"], seen["gpus"]["held_milli"]
        return seen if len(powers) == 2 and min(powers) > 0 and sum(held) == 1000 else None

    seen = cluster.until(shown, what="the page has readings and the placement")
    assert seen["nodes"]["name"] == ["solo"]
    placed = [change for change in seen["changes"] if change[2:4] == ["placed", "w-page"]]
    assert [change[5] for change in placed] == [[placement.gpu_indexes[0], 1000]]
    why = answer(address, "workload?id=w-page")
    best = why["explained"][0]["candidates"][0]
    assert (best["node"], tuple(best["gpus"])) == (placement.node_name, placement.gpu_indexes)
    assert sum(cost_w for _, cost_w in best["terms"]) == pytest.approx(best["cost_w"], abs=1e-3)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        answer(address, "workload?id=nobody")
    assert controller.stop() == 0
