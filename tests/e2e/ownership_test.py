"""Ownership, the audit log and gone nodes between real processes: whose work is whose, over kills and restarts."""

import json

import pytest
from tests.e2e.processes import fleet_of, metric

from eelgrid_protos import rpc, transport
from eelgrid_protos.faults import PermissionDenied
from eelgrid_protos.messages import GetInventoryRequest, ReportProgressRequest

NODE = {"cpu_milli": 64_000, "memory_bytes": 2**38, "gpus": [{"product": "a10", "count": 4}]}
SUBMIT = ("submit", "--name", "job", "--gpus", "1", "--cpu", "1", "--memory", "1GiB")


def submitter(parties, name, *rights, **options):
    return parties(
        name, ("O", "eelgrid:submitter"), ("CN", name), *(("O", f"eelgrid:{right}") for right in rights), **options
    )


def table(cluster, *words, **options):
    return json.loads(cluster.eelctl(*words, "-o", "json", **options).stdout)


def test_work_belongs_to_its_certificate_and_every_change_is_reported_after_a_kill(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    flags = ("--roles", "require", "--bind", "namespace:vision=CN:carol")
    controller = cluster.controller(*flags, tls=server)
    agent = cluster.agent(
        fleet_of(cluster.folder / "fleet.json", [{"name": "gpu-1", **NODE}]), "--roles", "require",
        tls=parties("agent", ("CN", "eelgrid:node:gpu-1"), names=("127.0.0.1",)),
    )  # fmt: skip
    cluster.until_ready(1)
    alice = submitter(parties, "alice", "namespace:research")
    bob = submitter(parties, "bob")
    carol = submitter(parties, "carol")

    # Who she is follows from the certificate; whom she may pose as, and where, too.
    cluster.eelctl(*SUBMIT, "--id", "a", "--namespace", "research", tls=alice)
    assert "owner      alice" in cluster.eelctl("get", "a", tls=bob).stdout
    said = cluster.eelctl(*SUBMIT, tls=alice, code=5).stderr
    assert "SubmitWorkload with the namespace default needs a right to it" in said
    said = cluster.eelctl(*SUBMIT, "--user", "alice", tls=bob, code=5).stderr
    assert "SubmitWorkload as alice needs that user's certificate or the role admin" in said
    cluster.eelctl(*SUBMIT, "--id", "b", tls=bob)
    cluster.eelctl(*SUBMIT, "--id", "c", "--namespace", "vision", tls=carol)
    told = table(cluster, "whoami", tls=alice)
    assert (told["user"], told["rights"]) == ("alice", ["namespace:research"])

    # Others need an administrator to end, scale or report on it.
    for words in (("cancel", "a"), ("scale", "a", "2")):
        said = cluster.eelctl(*words, tls=bob, code=5).stderr
        assert "of a needs its owner alice or the role admin" in said
    with transport.open_blocking_channel(cluster.address, tls=bob) as channel:
        report = rpc.build_client(rpc.OPERATOR_SERVICE, channel).report_progress
        with pytest.raises(PermissionDenied, match="ReportProgress of a needs its owner alice"):
            report(ReportProgressRequest(workload_id="a", work_done=1.0), timeout=10.0)
    cluster.eelctl("cancel", "b", tls=bob)
    assert table(cluster, "get", "a")["phase"] == "placed"

    # A kill at once after the answer: the entry is in the commit of what it tells.
    controller.kill()
    controller = cluster.controller(*flags, tls=server)
    cluster.reconnect()
    assert table(cluster, "get", "a")["owner"] == "alice"
    rows = table(cluster, "audit", "--limit", "500")
    accepted = [(row["user"], row["call"]) for row in reversed(rows) if row["code"] == "OK"]
    assert accepted == [
        ("alice", "SubmitWorkload"), ("bob", "SubmitWorkload"), ("carol", "SubmitWorkload"), ("bob", "CancelWorkload"),
    ]  # fmt: skip
    assert all(row["subject"] and row["peer"].startswith("ipv4:127.0.0.1:") for row in rows)
    assert "AuditEntries needs the role admin" in cluster.eelctl("audit", tls=bob, code=5).stderr
    # The refusal just now, and whatever of the former ones was written within the second before the kill.
    denied = {(row["user"], row["call"]) for row in table(cluster, "audit", "--denied")}
    assert ("bob", "ListAuditEntries") in denied
    cluster.eelctl("cancel", "a", tls=bob, code=5)
    assert ("bob", "CancelWorkload") in {(row["user"], row["call"]) for row in table(cluster, "audit", "--denied")}
    assert metric(cluster.metrics, "eelgrid_audit_events_total") >= 2
    cluster.eelctl("cancel", "a")
    (row, *_) = table(cluster, "audit", "--user", "root", "--call", "CancelWorkload")
    assert (row["role"], json.loads(row["arguments"]), row["code"]) == ("admin", {"workload_id": "a"}, "OK")

    # The agent's own API obeys the same roles.
    for files, is_let_in in ((bob, True), (parties("old", ("CN", "old")), False)):
        with transport.open_blocking_channel(cluster.agents[agent]["listen"], tls=files) as channel:
            ask = rpc.build_client(rpc.NODE_SERVICE, channel).get_inventory
            if is_let_in:
                assert ask(GetInventoryRequest(), timeout=10.0).inventory.node_name == "gpu-1"
            else:
                with pytest.raises(PermissionDenied, match="GetInventory needs the role viewer"):
                    ask(GetInventoryRequest(), timeout=10.0)
    assert metric(cluster.agents[agent]["metrics"], "eelgrid_agent_refused_calls_total") == 1


def test_a_spending_limit_is_not_evaded_by_stating_another_namespace_user_queue_or_label(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    cluster.controller("--roles", "require", "--spend-interval", "0.5", tls=server)
    cluster.agent(
        fleet_of(cluster.folder / "fleet.json", [{"name": "gpu-1", **NODE}]), "--energy-window", "1",
        tls=parties("agent", ("CN", "eelgrid:node:gpu-1"), names=("127.0.0.1",)),
    )  # fmt: skip
    cluster.until_ready(1)
    mallory = submitter(parties, "mallory", "namespace:research", "queue:batch", "label:team=vision")
    limits = [
        f"{who} gpu-hours=0.000001 per day"
        for who in ("namespace=research", "user=mallory", "queue=batch", "label:team=vision")
    ]
    cluster.eelctl("policy", "set", *(word for limit in limits for word in ("--spend", limit)))
    begun = (*SUBMIT, "--namespace", "research")
    cluster.eelctl(*begun, "--id", "first", tls=mallory)
    first = table(cluster, "get", "first")["spec"]
    assert (first["user"], first["queue"], first["labels"]) == ("mallory", "batch", {"team": "vision"})
    for more in (
        ("--namespace", "default"),
        ("--namespace", "research", "--user", "alice"),
        ("--namespace", "research", "--queue", "fast"),
        ("--namespace", "research", "--label", "team=nlp"),
    ):
        said = cluster.eelctl(*SUBMIT, *more, tls=mallory, code=5).stderr
        assert "or the role admin" in said

    def waits():
        """Whether a further submission of hers is held by what is spent."""
        cluster.eelctl(*begun, "--id", f"w{len(tried)}", tls=mallory)
        tried.append(table(cluster, "get", f"w{len(tried)}"))
        return tried[-1]["phase"] == "pending" and "spending" in tried[-1]["reason"]

    tried = []
    cluster.until(waits, within_s=90.0, what="her work waits for the limit")


def test_a_node_that_is_gone_is_removed_by_an_administrator_alone_and_stays_so(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    controller = cluster.controller("--roles", "require", "--away-grace", "0", tls=server)
    agents = [
        cluster.agent(
            fleet_of(cluster.folder / f"{name}.json", [{"name": name, **NODE}]),
            tls=parties(name, ("CN", f"eelgrid:node:{name}"), names=("127.0.0.1",)),
        )
        for name in ("gpu-1", "gpu-2")
    ]
    cluster.until_ready(2)
    alice = submitter(parties, "alice")
    for number in range(8):
        cluster.eelctl(*SUBMIT, "--id", f"w{number}", tls=alice)
    assert "agent of node gpu-2 is connected" in cluster.eelctl("node", "remove", "gpu-2", code=5).stderr
    agents[1].kill()
    cluster.until_ready(1)
    assert "RemoveNode needs the role admin" in cluster.eelctl("node", "remove", "gpu-2", tls=alice, code=5).stderr
    assert "holds 4 workloads" in cluster.eelctl("node", "remove", "gpu-2", code=5).stderr
    would = table(cluster, "node", "remove", "gpu-2", "--force", "--dry-run")
    assert len(would["ended"]) == 4
    assert {row["inventory"]["node_name"] for row in table(cluster, "nodes")} == {"gpu-1", "gpu-2"}
    assert table(cluster, "node", "remove", "gpu-2", "--force", "--yes") == would
    controller.kill()
    cluster.controller("--roles", "require", tls=server)
    cluster.reconnect()
    assert {row["inventory"]["node_name"] for row in table(cluster, "nodes")} == {"gpu-1"}
    ended = {row["workload_id"] for row in table(cluster, "workloads", "--all") if row["phase"] == "cancelled"}
    assert ended == set(would["ended"])
    assert table(cluster, "audit", "--call", "RemoveNode")[-1]["user"] == "root"
