"""From devices to the ledger: real processes, a controller that is killed on the way, and sums that agree."""

import csv
import json
import time

import pytest
from pyarrow import parquet
from tests.builders.cluster import build_request
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos import faults
from eelgrid_protos.messages import ConfirmEnergyExportRequest, GetSamplesRequest, QueryEnergyRequest, Reading

NODES = [
    {
        "name": f"gpu-{index}",
        "cpu_milli": 64_000,
        "memory_bytes": 2**37,
        "pool": "train",
        "gpus": [{"product": "h100-sxm5-80gb"}, {"product": "h100-sxm5-80gb"}],
    }
    for index in range(2)
]
HOUR_NS = 3600 * 10**9


def asked(cluster, *group_by, **filters):
    """The hours around now."""
    now_ns = time.time_ns()
    request = QueryEnergyRequest(begin_ns=now_ns - HOUR_NS, end_ns=now_ns + HOUR_NS, group_by=group_by, filters=filters)
    return cluster.operators.query_energy(request, timeout=10.0)


def energy_mj(spent):
    return spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj


def submit(cluster, name, gpus):
    request = build_request(name, name=name, gpus=gpus, queue="research", labels={"team": name[0]})
    return cluster.operators.submit_workload(request, timeout=10.0)


def counters_j(cluster, agent):
    """What the devices of an agent have counted, by its own API."""
    total_j = 0.0
    for node in NODES:
        answer = cluster.node_api(agent).get_samples(GetSamplesRequest(node_name=node["name"]), timeout=10.0)
        total_j += sum(
            sum(column.values) for column in answer.samples.gpu_columns if column.reading is Reading.ENERGY_J
        )
    return total_j


def test_joules_of_workloads_are_kept_once_over_a_controller_that_is_killed(tmp_path):
    fleet = fleet_of(tmp_path / "fleet.json", NODES)
    with Cluster(tmp_path) as cluster:
        controller = cluster.controller()
        agent = cluster.agent(fleet, "--energy-window", "1")
        cluster.until_ready(2)
        submit(cluster, "alpha", 2)
        submit(cluster, "beta", 1)

        def is_known(least_mj):
            found = {group.values: energy_mj(group.spent) for group in asked(cluster, "workload").groups}
            return found if min(found.get(("alpha",), 0), found.get(("beta",), 0)) > least_mj else None

        cluster.until(lambda: is_known(100_000), what="windows of both workloads are in the ledger")
        controller.kill()
        time.sleep(4.0)
        cluster.controller()
        # What was spent until here comes from the agent, also that of the time without a controller; nothing comes twice.
        began_j = counters_j(cluster, agent)

        def caught_up():
            answer = asked(cluster, "title", "label:team", "queue")
            return answer if answer.measured_mj >= 1000.0 * began_j else None

        answer = cluster.until(caught_up, within_s=90.0, what="the windows of the time without a controller came")
        assert {group.values for group in answer.groups} == {("alpha", "a", "research"), ("beta", "b", "research")}
        parts = [*(group.spent for group in answer.groups), answer.left_out, answer.unallocated, answer.unattributed]
        assert sum(map(energy_mj, parts)) == answer.measured_mj
        # Devices and agent do not look at the same moment; four H100 draw 2.8 kW at most.
        assert answer.measured_mj / 1000.0 <= counters_j(cluster, agent) + 2800.0
        files = ("--csv", "day.csv", "--parquet", "day.parquet")
        rows = json.loads(cluster.eelctl("energy", "--since", "1h", "--by", "workload", "-o", "json", *files).stdout)
        assert {row["workload"] for row in rows["groups"]} == {"alpha", "beta"}
        written = parquet.read_table(tmp_path / "day.parquet").to_pylist()
        with (tmp_path / "day.csv").open(newline="") as file:
            assert [row["workload"] for row in csv.DictReader(file)] == [row["workload"] for row in written]
        assert [row["energy_j"] for row in written] == [row["energy_j"] for row in rows["groups"]]
        took_elsewhere(cluster, tmp_path)


def took_elsewhere(cluster, folder):
    """Settled hours are confirmed, and told; what is not over is refused."""
    words = (
        "energy",
        "--by",
        "hour,title,namespace",
        "--rows",
        "10000",
        "--csv",
        "two-days.csv",
        "--confirm-export",
        "archive",
    )
    assert "confirmed: archive has everything" in cluster.eelctl(*words, "--since", "48h").stderr
    assert (folder / "two-days.csv").read_text().startswith("hour,title,namespace,energy_j")
    assert "is settled that" in cluster.eelctl(*words).stderr
    now_ns = time.time_ns()
    with pytest.raises(faults.FailedPrecondition, match="not all nodes have reported"):
        cluster.operators.confirm_energy_export(
            ConfirmEnergyExportRequest(name="archive", begin_ns=now_ns - 2 * HOUR_NS, end_ns=now_ns + HOUR_NS),
            timeout=10.0,
        )
    (mark,) = json.loads(cluster.eelctl("exporters", "-o", "json").stdout)
    assert (mark["name"], mark.get("changed_hours", 0)) == ("archive", 0)
    cluster.eelctl("exporters", "remove", "archive", "--yes")
    assert "no exporter" in cluster.eelctl("exporters").stderr


@pytest.mark.parametrize("words", [("--by", "colour"), ("--since", "soon")])
def test_a_question_that_cannot_be_asked_says_what_can(tmp_path, words):
    with Cluster(tmp_path) as cluster:
        cluster.controller()
        refused = cluster.eelctl("energy", *words, code=2 if words[0] == "--since" else 5)
        assert ("give some of" in refused.stderr) or ("write for example" in refused.stderr)
