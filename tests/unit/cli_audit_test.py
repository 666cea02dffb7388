"""`eelctl audit` and `eelctl node remove`: what is asked of the controller and what a person is told."""

import json
import time

from eelgrid_protos.faults import FailedPrecondition, PermissionDenied
from eelgrid_protos.messages import AuditEntry, RemoveNodeResponse, Workload, WorkloadPhase

HOUR_NS = 3600 * 10**9


def entry(number, **changes):
    fields = {
        "number": number,
        "time_ns": 1_700_000_000 * 10**9 + number,
        "subject": "O=eelgrid:submitter,CN=alice",
        "user": "alice",
        "role": "submitter",
        "peer": "ipv4:10.0.0.7:4711",
        "call": "CancelWorkload",
        "code": "OK",
        "arguments": '{"workload_id":"w-1"}',
        "revision": number,
    }
    return AuditEntry(**(fields | changes))


def test_entries_are_listed_newest_first_with_who_what_and_the_answer(eelctl, fake):
    refused = entry(
        2, code="PERMISSION_DENIED", calls=12, revision=0, reason="CancelWorkload of w-1 needs its owner bob"
    )
    fake.audited.entries = [refused, entry(1)]
    head, first, second = eelctl("audit").stdout.splitlines()
    assert head.split() == ["TIME", "WHO", "ROLE", "CALL", "ANSWER", "CALLS", "WHAT"]
    assert first.split() == [
        "2023-11-14T22:13:20Z",
        "alice",
        "submitter",
        "CancelWorkload",
        "PERMISSION_DENIED",
        "12",
        '{"workload_id":"w-1"}',
    ]
    assert second.split()[4:6] == ["OK", "1"]
    wide = eelctl("audit", "-o", "wide").stdout
    assert "ipv4:10.0.0.7:4711" in wide
    assert "needs its owner bob" in wide
    assert [one["number"] for one in json.loads(eelctl("audit", "-o", "json").stdout)] == [2, 1]
    assert "user: alice" in eelctl("audit", "-o", "yaml").stdout


def test_filters_and_pages_go_to_the_controller(eelctl, fake):
    fake.audited.entries = [entry(number) for number in range(2500, 0, -1)]
    lines = eelctl(
        "audit", "--since", "7d", "--user", "alice", "--call", "CancelWorkload", "--denied", "--limit", "2400"
    )
    assert len(lines.stdout.splitlines()) == 2401
    first, *more = fake.audited.asked
    assert (first.user, first.call, first.denied) == ("alice", "CancelWorkload", True)
    assert abs(time.time_ns() - 7 * 24 * HOUR_NS - first.since_ns) < HOUR_NS
    assert [one.page_token for one in more] == ["1000", "2000"]
    # What each page goes on from is of the same stretch.
    assert {one.since_ns for one in more} == {first.since_ns}


def test_an_empty_log_says_where_to_look(eelctl):
    assert "look further back with --since" in eelctl("audit").stderr


def test_a_removal_says_what_becomes_of_the_work(eelctl, fake):
    fake.audited.removals["n1"] = RemoveNodeResponse(ended=("w-1", "w-2"), shrunk=("chat",), connected=True)
    done = eelctl("node", "remove", "n1", "--force", "--dry-run").stdout
    assert done.splitlines() == [
        "n1 would be removed",
        "  2 workloads would be ended: w-1, w-2",
        "  1 workload would be reduced to its replicas on other nodes: chat",
        "  its agent is connected: stop it, or the node registers again",
    ]
    (asked,) = fake.audited.asked
    assert (asked.node_name, asked.force, asked.dry_run) == ("n1", True, True)
    refused = eelctl("node", "remove", "n1", "--force", code=5).stderr
    assert "Removing n1 needs a confirmation" in refused
    assert "w-1, w-2" in refused
    assert "n1 is removed" in eelctl("node", "remove", "n1", "--force", "--yes").stdout
    assert json.loads(eelctl("node", "remove", "n1", "-o", "json").stdout)["ended"] == ["w-1", "w-2"]


def test_a_removal_that_is_refused_says_what_to_do(eelctl, fake):
    fake.audited.removals["n1"] = FailedPrecondition("node n1 holds 1 workload (w-1); cancel or move them, or force it")
    assert "holds 1 workload" in eelctl("node", "remove", "n1", code=5).stderr
    fake.audited.removals["n1"] = PermissionDenied("RemoveNode needs the role admin")
    assert "eelctl whoami" in eelctl("node", "remove", "n1", code=5).stderr
    assert eelctl("node", "remove", "other", code=4).stderr


def test_get_and_explain_say_whose_the_work_is(eelctl, fake):
    eelctl("submit", "--id", "w-1", "--name", "job", "--cpu", "1", "--memory", "1GiB", "--gpus", "1", "--user", "alice")
    (found,) = fake.workloads.values()
    fake.workloads["w-1"] = Workload(
        workload_id="w-1", spec=found.spec, phase=WorkloadPhase.PLACED, placements=found.placements, owner="pipeline"
    )
    assert "  owner      pipeline" in eelctl("get", "w-1").stdout
    assert "It belongs to pipeline, in the namespace default." in eelctl("explain", "w-1").stdout
