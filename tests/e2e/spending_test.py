"""A namespace spends its kilowatt-hours: real processes, joules of simulated devices, a controller that is killed between."""

import json

from tests.e2e.processes import fleet_of, metric

from eelgrid_protos.messages import (
    GetWorkloadRequest,
    ListSpendingRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

NODES = [
    {
        "name": "gpu-0",
        "cpu_milli": 64_000,
        "memory_bytes": 2**37,
        "pool": "train",
        "gpus": [{"product": "h100-sxm5-80gb", "count": 4}],
    }
]


def test_a_namespace_that_has_spent_its_energy_waits_until_the_limit_is_raised(cluster, tmp_path):
    controller = cluster.controller("--spend-interval", "0.5")
    cluster.agent(fleet_of(tmp_path / "fleet.json", NODES), "--energy-window", "1")
    cluster.until_ready(1)
    # An H100 at work draws that in some seconds.
    cluster.eelctl("policy", "set", "--spend", "namespace=research kwh=0.001 per month")

    def submit(key, namespace):
        spec = WorkloadSpec(
            name=key,
            namespace=namespace,
            request=ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000),
        )
        request = SubmitWorkloadRequest(workload_id=key, spec=spec)
        return cluster.operators.submit_workload(request, timeout=10.0).workload.phase

    def phase(key):
        return cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=10.0).workload.phase

    def is_spent():
        (found,) = cluster.operators.list_spending(ListSpendingRequest(), timeout=10.0).limits
        return found.over_since_ns > 0

    assert submit("alpha", "research") is WorkloadPhase.PLACED
    cluster.until(is_spent, within_s=90.0, what="the limit is spent")
    assert submit("beta", "research") is WorkloadPhase.PENDING
    assert submit("other", "else") is WorkloadPhase.PLACED
    told = cluster.eelctl("explain", "beta").stdout
    assert "spending: namespace research has spent its kWh of the month" in told
    assert "of 0.001 kWh of " in told
    assert "eelctl policy set --spend 'namespace=research kwh=" in told
    (row,) = json.loads(cluster.eelctl("spending", "-o", "json").stdout)["limits"]
    assert row["spent"] >= row["limit"]["most"] == 3600.0
    # No hour of this ledger is whole, so nobody can say what becomes of it.
    assert (row["waiting"], "forecast" in row) == (1, False)
    controller.kill()
    cluster.controller("--spend-interval", "0.5")
    # Nothing new goes to the node before its agent is back.
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == 1, what="the agent is back")
    assert [phase(key) for key in ("alpha", "beta")] == [WorkloadPhase.PLACED, WorkloadPhase.PENDING]
    assert submit("gamma", "research") is WorkloadPhase.PENDING
    cluster.eelctl("policy", "set", "--spend", "namespace=research kwh=1000 per month")
    assert phase("beta") is phase("gamma") is WorkloadPhase.PLACED
    state, _, ends = cluster.eelctl("spending", "--no-headers").stdout.rstrip().rpartition("under")
    assert state.startswith("namespace=research")
    assert ends
