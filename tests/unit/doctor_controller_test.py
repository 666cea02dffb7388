"""Every finding of eelctl doctor about a controller and its fleet, and the command against a served fake."""

import json
import time
from dataclasses import replace

import pytest
from tests.builders.objectives import build_service_status
from tests.fakes.operators import a_node
from tests.fakes.spent import NOTHING_SPENT

from eelgrid_controller.cli import doctor_cluster as checks
from eelgrid_controller.cli import doctor_cluster as node
from eelgrid_controller.cli import doctor_cluster as pages
from eelgrid_controller.cli.doctor_machine import FindingStatus
from eelgrid_protos import __version__, faults
from eelgrid_protos.messages import (
    AccessLevel,
    ApplyResult,
    ApplyStatus,
    BudgetScope,
    BudgetStatus,
    DeviceLease,
    EnforcementMode,
    GetNodePlanResponse,
    GetSamplesResponse,
    JobStatus,
    ListPromisesResponse,
    NodePlan,
    NodeState,
    PlanApplied,
    PlanStatus,
    Policy,
    PoolMode,
    PowerBudget,
    ReasonCount,
    SampleBatch,
    WhoAmIResponse,
)

OK, WARN, FAIL, SKIPPED = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL, FindingStatus.SKIPPED


def found(findings):
    return {one.check: one.status for one in findings}


def with_gpu(**changes):
    first = a_node("n")
    gpus = (replace(first.inventory.gpus[0], **changes), *first.inventory.gpus[1:])
    return replace(first, inventory=replace(first.inventory, gpus=gpus))


def of_version(name, version):
    first = a_node(name)
    return replace(first, inventory=replace(first.inventory, agent_version=version))


@pytest.mark.parametrize(("ready", "lost", "status"), [(0, 0, WARN), (3, 0, OK), (3, 1, WARN), (0, 2, FAIL)])
def test_agents(fake, ready, lost, status):
    assert checks.check_agents(replace(fake.summary(), nodes_ready=ready, nodes_lost=lost)).status is status


@pytest.mark.parametrize(("came", "lost", "status"), [(0, 0, OK), (100_000, 3, OK), (1000, 30, WARN)])
def test_samples(fake, came, lost, status):
    assert checks.check_samples(replace(fake.summary(), samples_received=came, samples_lost=lost)).status is status


def test_telemetry():
    assert checks.check_freshness([a_node(sample_age_s=4.0)], 5.0).status is OK
    assert checks.check_freshness([a_node(sample_age_s=31.0)], 5.0).status is FAIL
    assert checks.check_freshness([a_node(sample_age_s=31.0)], 30.0).status is OK
    assert checks.check_freshness([a_node()], 5.0).status is FAIL
    assert checks.check_freshness([a_node(gpus=0)], 5.0).status is OK
    assert checks.check_freshness([replace(a_node(), state=NodeState.LOST)], 5.0).status is SKIPPED


@pytest.mark.parametrize(
    ("agent", "controller", "statuses"),
    [
        ("1.2.0", "1.2.3", [OK, OK]),
        ("1.1.0", "1.2.3", [OK, WARN]),
        ("1.3.0", "1.3.3", [WARN, OK]),
        ("1.2.0", "", [SKIPPED, OK]),
        ("", "1.2.0", [OK, WARN]),
    ],
)
def test_versions(agent, controller, statuses):
    findings = checks.check_versions([of_version("n", agent)], controller, "1.2.9")
    assert [one.status for one in findings] == statuses


def test_gpus_and_modes():
    assert found(checks.check_gpus([a_node()])) == {"GPUs": OK}
    assert found(checks.check_gpus([with_gpu(lost=True), with_gpu(cordon="XID 79")])) == {
        "GPUs lost": FAIL,
        "GPUs cordoned": WARN,
    }
    assert checks.check_layouts([a_node()]).status is OK
    assert checks.check_layouts([with_gpu(mig_pending=True)]).status is WARN


def test_leases_whose_owners_are_not_known_are_named_with_the_remedy():
    held = DeviceLease(device_uuid="GPU-0", engine="slurm", owner="12")
    lost = replace(held, owner="13", unknown="slurmctld did not say how job 13 is (no answer)")
    assert (
        checks.check_leases("leases", [a_node().inventory]).what
        == "0 leases of other engines, all owners known to exist"
    )
    assert checks.check_leases("leases", [with_gpu(leases=(held,)).inventory]).status is OK
    found = checks.check_leases("leases", [with_gpu(leases=(held, lost)).inventory])
    assert found.status is WARN
    assert "n/0 (slurm 13: slurmctld did not say how job 13 is" in found.what
    assert "`eelgrid-agent lease release --engine slurm --owner OWNER` on n" in found.remedy


@pytest.mark.parametrize(
    ("mode", "access", "simulated", "status"),
    [
        (EnforcementMode.OBSERVE, AccessLevel.READ_ONLY, False, OK),
        (EnforcementMode.ENFORCE, AccessLevel.READ_ONLY, False, FAIL),
        (EnforcementMode.ENFORCE, AccessLevel.READ_ONLY, True, OK),
        (EnforcementMode.ENFORCE, AccessLevel.ROOT, False, OK),
    ],
)
def test_enforcement(mode, access, simulated, status):
    first = a_node()
    nodes = [replace(first, inventory=replace(first.inventory, access=access, simulated=simulated))]
    policy = Policy(revision=1, pools=(PoolMode(pool="a", mode=mode),))
    assert checks.check_enforcement(nodes, policy).status is status


@pytest.mark.parametrize(("least_w", "is_lost", "status"), [(200.0, False, OK), (None, False, WARN), (None, True, OK)])
def test_gpus_of_enforced_pools_that_no_limit_reaches(least_w, is_lost, status):
    first = a_node()
    gpus = tuple(replace(gpu, power_limit_min_w=least_w, lost=is_lost) for gpu in first.inventory.gpus)
    nodes = [replace(first, inventory=replace(first.inventory, gpus=gpus))]
    pools = {mode: (PoolMode(pool="a", mode=mode),) for mode in (EnforcementMode.OBSERVE, EnforcementMode.ENFORCE)}
    assert checks.check_limit_reach(nodes, Policy(revision=1, pools=pools[EnforcementMode.ENFORCE])).status is status
    assert checks.check_limit_reach(nodes, Policy(revision=1, pools=pools[EnforcementMode.OBSERVE])).status is OK


def plan(status, *, epoch=4, applied=4, **result):
    results = (ApplyResult(subject="GPU-0", status=status, **result),) if result else ()
    answer = PlanApplied(epoch=applied, status=status, results=results)
    return PlanStatus(plan=NodePlan(node_name="n", epoch=epoch, lease_s=60.0), applied=answer)


def test_plans():
    refused = plan(ApplyStatus.REFUSED, rule="no-permission", detail="no")
    findings = checks.check_plans([refused])
    assert found(findings) == {"plans refused": WARN}
    assert "n (no-permission)" in findings[0].what
    assert found(checks.check_plans([plan(ApplyStatus.FAILED)])) == {"plans failed": FAIL}
    assert found(checks.check_plans([plan(ApplyStatus.APPLIED, applied=3)])) == {"plans unanswered": WARN}
    assert found(checks.check_plans([plan(ApplyStatus.APPLIED), plan(ApplyStatus.OBSERVED)])) == {"plans": OK}


@pytest.mark.parametrize(
    ("drawn", "measured", "claimed", "short", "status"),
    [
        (900.0, 2, 500.0, 0.0, OK),
        (1100.0, 2, 500.0, 0.0, FAIL),
        (1100.0, 1, 500.0, 0.0, FAIL),  # what is not read only adds to it
        (None, 0, 500.0, 0.0, OK),
        (900.0, 2, 960.0, 0.0, WARN),
        (900.0, 2, 500.0, 10.0, WARN),
        (960.0, 2, 500.0, 0.0, WARN),
    ],
)
@pytest.mark.parametrize("scope", [BudgetScope.CLUSTER, BudgetScope.RACK])
def test_budgets(drawn, measured, claimed, short, status, scope):
    budget = PowerBudget(scope=scope, name="" if scope is BudgetScope.CLUSTER else "r1", limit_w=1000.0)
    one = BudgetStatus(
        budget=budget, claimed_w=claimed, shortfall_w=short, measured_w=drawn, measured_gpus=measured, gpus=2
    )
    assert [f.status for f in checks.check_budgets((one,))] == [status]
    assert found(checks.check_budgets(())) == {"budgets": OK}


def test_promises():
    assert found(checks.check_promises(ListPromisesResponse())) == {"promises": OK}
    assert found(checks.check_promises(ListPromisesResponse(services=(build_service_status(live_s=0.4),)))) == {
        "promises": OK
    }
    late = ListPromisesResponse(
        services=(build_service_status(live_s=0.6),),
        jobs=(JobStatus(workload_id="j", name="j", phase="unsteered", reason="no profile; x"),),
    )
    findings = checks.check_promises(late)
    assert found(findings) == {"promises": WARN, "latency": WARN}
    assert "j (no profile)" in findings[0].what


@pytest.mark.parametrize(("spent_mj", "gpus", "status"), [(5, 2, OK), (0, 2, WARN), (0, 0, SKIPPED)])
def test_ledger(spent_mj, gpus, status):
    assert checks.check_ledger(replace(NOTHING_SPENT, measured_mj=spent_mj), gpus).status is status


def test_queue(fake):
    waits = replace(fake.summary(), pending=3, pending_reasons=(ReasonCount(reason="no free GPU", workloads=3),))
    assert checks.check_waiting_work(fake.summary()).what == "nothing is pending"
    assert checks.check_waiting_work(waits).what == "3 workloads wait, most of it for: no free GPU"


WELL = """# HELP x y
eelgrid_controller_info{version="9.9.1"} 1.0
eelgrid_state_revision 5.0
eelgrid_journal_writable 1.0
eelgrid_objectives_cycles_total 7.0
eelgrid_ledger_newest_window_age_seconds 40.0
eelgrid_kubernetes_leading 1.0
eelgrid_kubernetes_silence_seconds{kind="pods"} 20.0
nonsense
"""
FAULTS = {
    "eelgrid_journal_writable 0.0": {"journal": FAIL},
    "eelgrid_journal_lag_seconds 9.0": {"journal": WARN},
    'eelgrid_agent_events_total{kind="setting_drift"} 2.0': {"caps drifted": WARN},
    'eelgrid_agent_events_total{kind="enforcement_suspended"} 1.0': {"caps suspended": FAIL},
    "eelgrid_objectives_failures_total 1.0": {"objectives": FAIL},
    "eelgrid_objectives_faults_total 1.0": {"objectives": WARN},
    "eelgrid_ledger_newest_window_age_seconds 4000.0": {"ledger, age": WARN},
    "eelgrid_ledger_failures_total 2.0": {"ledger, writing": WARN},
    "eelgrid_ledger_damaged_parts 2.0": {"ledger, damage": FAIL},
    'eelgrid_ledger_windows_total{result="refused"} 2.0': {"ledger, refused": WARN},
    "eelgrid_clock_jumps_total 1.0": {"clock, jumps": WARN},
    'eelgrid_kubernetes_silence_seconds{kind="pods"} 900.0': {"kubernetes, watches": FAIL},
    "eelgrid_kubernetes_pods_unschedulable 3.0": {"kubernetes, pods": WARN},
}


def test_a_page_that_is_well():
    page = pages.parse_metrics(WELL)
    assert (page.version, page.is_ours) == ("9.9.1", True)
    assert set(found(pages.check_metrics(page)).values()) == {OK}
    by_name = {one.check: one.what for one in pages.check_metrics(page)}
    assert by_name["kubernetes"] == "leads"
    standby = pages.check_metrics(pages.parse_metrics(WELL + "eelgrid_kubernetes_leading 0.0\n"))
    assert {one.check: one.what for one in standby}["kubernetes"].startswith("standby")


@pytest.mark.parametrize("line", FAULTS)
def test_each_fault_of_a_page_is_found_and_nothing_else(line):
    findings = found(pages.check_metrics(pages.parse_metrics(f"{WELL}{line}\n")))
    assert {check: status for check, status in findings.items() if status is not OK} == FAULTS[line]


def test_a_page_of_another_reports_nothing():
    page = pages.parse_metrics("up 1\n")
    assert not page.is_ours
    assert found(pages.check_metrics(page)) == {"journal": SKIPPED, "caps": OK, "objectives": SKIPPED}


def test_the_agent_of_this_machine():
    inventory = with_gpu().inventory
    gpus = tuple(replace(gpu, power_limit_min_w=200.0) for gpu in inventory.gpus)
    assert set(found(node.check_inventory(replace(inventory, gpus=gpus))).values()) == {OK}
    assert found(node.check_inventory(with_gpu().inventory))["agent, power limits"] is WARN
    assert found(node.check_inventory(with_gpu(lost=True).inventory))["agent, GPUs"] is FAIL
    ticks = SampleBatch(sequence=1, inventory_generation=1, time_ns=(1,))
    assert node.check_newest_sample(GetSamplesResponse(samples=ticks, age_s=1.0)).status is OK
    assert node.check_newest_sample(GetSamplesResponse(samples=ticks, age_s=60.0)).status is FAIL
    one = NodePlan(node_name="n", epoch=3, lease_s=60.0)
    assert node.check_lease(GetNodePlanResponse(plan=one, lease_left_s=40.0)).status is OK
    assert node.check_lease(GetNodePlanResponse(plan=one, lease_left_s=1.0)).status is WARN
    assert node.check_lease(GetNodePlanResponse(lease_left_s=0.0)).status is WARN


@pytest.fixture
def well(fake):
    """A controller with nothing to complain of."""
    before = fake.summary()
    fake.summary = lambda: replace(before, time_ns=time.time_ns())
    fake.nodes = [of_version("n", __version__)]
    fake.nodes = [replace(fake.nodes[0], sample_age_s=1.0)]
    fake.spent.answer = replace(NOTHING_SPENT, measured_mj=10)
    fake.caller = WhoAmIResponse(subject="CN=a", roles=("viewer",), not_after_ns=1)
    return fake


def test_the_command_on_a_controller_that_is_well(eelctl, well):
    findings = json.loads(eelctl("doctor", "--only", "controller", "-o", "json").stdout)
    by_name = {one["check"]: one["status"] for one in findings}
    assert {check for check, status in by_name.items() if status != "ok"} == {
        "version, controller",
        "plans unanswered",
        "metrics",
    }
    assert set(findings[0]) == {"check", "status", "what", "remedy"}


def test_a_controller_of_before_roles_is_no_fault(eelctl, well):
    well.caller = faults.Internal("UNIMPLEMENTED: Method not found!")
    findings = {one["check"]: one for one in json.loads(eelctl("doctor", "--only", "controller", "-o", "json").stdout)}
    assert (findings["role"]["status"], findings["controller"]["status"]) == ("skipped", "ok")


def test_the_command_says_what_to_do_and_fails(eelctl, well):
    well.nodes = [replace(with_gpu(lost=True), sample_age_s=1.0)]
    said = eelctl("doctor", "--only", "controller", code=1).stdout
    assert "fail     GPUs lost" in said
    assert "next: look for XIDs in `dmesg` there" in said
    assert said.splitlines()[-1].startswith("1 failed, ")


def test_a_call_that_fails_leaves_the_other_checks(eelctl, well):
    well.spent.failure = faults.Unavailable("the ledger is closed")
    findings = {one["check"]: one for one in json.loads(eelctl("doctor", "--only", "controller", "-o", "json").stdout)}
    assert findings["ledger"]["status"] == "skipped"
    assert "the ledger is closed" in findings["ledger"]["what"]
    assert findings["queue"]["status"] == "ok"


def test_nobody_answers(eelctl, tmp_path):
    eelctl.address = "127.0.0.1:1"
    said = eelctl("doctor", "--agent", "127.0.0.1:1", "--state", tmp_path, "-o", "json", code=1).stdout
    findings = {one["check"]: one for one in json.loads(said)}
    assert findings["controller"]["status"] == "fail"
    assert "start eelgrid-controller" in findings["controller"]["remedy"]
    assert findings["agent"]["what"] == "the call failed: Connection refused"
    assert findings["state directory"]["what"] == f"{tmp_path} can be written"
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_read_where_it_is_named(eelctl, well, tmp_path):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Served(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(WELL.replace("9.9.1", __version__).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Served) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        said = eelctl("doctor", "--only", "controller", "--metrics", address, "-o", "json").stdout
        server.shutdown()
    by_name = {one["check"]: one["status"] for one in json.loads(said)}
    assert (by_name["journal"], by_name["version, controller"], by_name["kubernetes"]) == ("ok", "ok", "ok")
    failed = json.loads(eelctl("doctor", "--only", "controller", "--metrics", address, "-o", "json", code=1).stdout)
    assert {one["check"]: one["status"] for one in failed}["metrics"] == "fail"
