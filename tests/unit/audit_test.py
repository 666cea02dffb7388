"""The audit log: what is kept of a call, in the commit of its events, within bounds, and found again in pages."""

import asyncio
import json
import logging
import sqlite3
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.access_rig import READS
from tests.builders.cluster import build_node, build_request
from tests.builders.server import MemoryJournal, run_controller
from tests.unit.loop_test import looping

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import JournalFull
from eelgrid_controller.runtime.access_control import REQUIRED_ROLES
from eelgrid_controller.runtime.audit_log import (
    AUDITED,
    JOURNALLED,
    REPORTS,
    AuditedCall,
    AuditFilter,
    summarize_request,
)
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.server.grpc.authorization import AuditTrail
from eelgrid_controller.server.grpc.pagination import next_page_token
from eelgrid_controller.state.journal import JournalEntry
from eelgrid_protos.codec import encode_message
from eelgrid_protos.faults import InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    AUDIT_ARGUMENTS_MOST,
    AuditEntry,
    CancelWorkloadRequest,
    ConfirmEnergyExportRequest,
    GetPolicyRequest,
    ListAuditEntriesRequest,
    MeasuredPoint,
    RecordPointsRequest,
    ReportProgressRequest,
    SetWeights,
    StartShadowRequest,
    StopShadowRequest,
    UpdatePolicyRequest,
)
from eelgrid_protos.roles import Caller, Role, RoleRefused
from eelgrid_protos.rpc import OPERATOR_SERVICE, build_handler

LOG = logging.getLogger("test.audit")
ALICE = Caller("O=eelgrid:submitter,CN=alice", frozenset({Role.SUBMITTER}), user="alice")
PATH = "/eelgrid.v1.OperatorService/"


def entry(number=0, **changes):
    return AuditEntry(**({"time_ns": number, "user": "alice", "call": "CancelWorkload", "code": "OK"} | changes))


def journal_of(path, **bounds):
    found = open_journal(path, new_cluster_id="c")
    for name, value in bounds.items():
        setattr(found.audit_table, name, value)
    return found


class Context:
    """A call's context, as far as the trail looks."""

    def __init__(self, caller=ALICE, peer="ipv4:10.0.0.7:4711"):
        self.caller = caller
        self._peer = peer

    def peer(self):
        return self._peer


class Time:
    """A clock that is put forward by hand."""

    def __init__(self):
        self.s = 100.0
        self.clock = replace(Clock(), monotonic_s=lambda: self.s, now_ns=lambda: int(self.s * 1e9))


def trail_of(loop, clock=None, counted=None):
    return AuditTrail(
        loop=loop,
        clock=clock or Clock(),
        log=LOG,
        caller_of=lambda context: context.caller,
        count_refusal=[].append if counted is None else counted.append,
    )


# Which calls


def test_every_call_that_changes_something_is_audited():
    """A new RPC that is no reading fails here until somebody has said in `audit.AUDITED` how it is kept."""
    changing = {method.name for method in OPERATOR_SERVICE.methods if not method.name.startswith(READS)}
    assert changing == AUDITED
    assert JOURNALLED.isdisjoint(REPORTS)
    # Output of one's own jobs is read.
    assert {path for path, role in REQUIRED_ROLES.items() if role is Role.SUBMITTER} <= {
        PATH + call for call in (*AUDITED, "ReadLogs")
    }


# What is kept of a request


def test_what_matters_of_a_submission_is_kept():
    asked = build_request("w-7", name="train", namespace="ml", user="alice", queue="q", labels={"team": "vision"})
    kept = json.loads(summarize_request("SubmitWorkload", asked))
    assert (kept["workload_id"], kept["namespace"], kept["user"], kept["queue"]) == ("w-7", "ml", "alice", "q")
    assert (kept["gpu_count"], kept["labels"]) == (1, {"team": "vision"})


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (
            "SubmitWorkload",
            build_request(
                "w",
                name="n" * 253,
                user="u" * 253,
                queue="q" * 253,
                labels={f"k{i}" * 20: "v" * 253 for i in range(64)},
            ),
        ),
        (
            "RecordPoints",
            RecordPointsRequest(
                points=tuple(
                    MeasuredPoint(profile="p" * 100, gpu_model="G2", power_w=1.0, throughput_hz=float(i + 1))
                    for i in range(2000)
                )
            ),
        ),
        ("CancelWorkload", CancelWorkloadRequest(workload_id="x" * 128)),
    ],
)
def test_what_is_kept_of_a_request_is_bounded_and_on_one_line(call, request_):
    kept = summarize_request(call, request_)
    assert len(kept) <= AUDIT_ARGUMENTS_MOST
    assert kept.isprintable()


def test_an_entry_cannot_forge_a_line_of_a_log():
    made = AuditedCall("CancelWorkload", ALICE, "ipv4:\n1", "").entry(
        time_ns=1, code="NOT_FOUND", reason="a\nb\x1b[2J" + "c" * 900
    )
    assert made.peer.isprintable()
    assert made.reason.isprintable()
    assert len(made.reason) <= 500


# The table


def test_entries_are_in_the_transaction_of_the_events_and_survive_the_process(tmp_path):
    with closing(journal_of(tmp_path)) as journal:
        journal.append([JournalEntry("k", {})], (entry(1),))
        journal.append([], (entry(2), entry(3, user="bob", code="PERMISSION_DENIED")))
        assert journal.last_seq == 1
    with closing(journal_of(tmp_path)) as journal:
        journal.append([], (entry(4),))
        page = journal.read_audit_page(AuditFilter(), size=10)
        assert [(one.number, one.time_ns) for one in page.entries] == [(4, 4), (3, 3), (2, 2), (1, 1)]
        assert (page.total, page.next_before, page.damaged) == (4, 0, 0)


def test_a_commit_that_fails_leaves_neither_events_nor_entries(tmp_path):
    with closing(journal_of(tmp_path)) as journal:
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.append([JournalEntry("k", {"x": float("nan")})], (entry(1),))
        journal.append([JournalEntry("k", {})], (entry(2),))
        assert [one.time_ns for one in journal.read_audit_page(AuditFilter(), size=10).entries] == [2]
        assert journal.last_seq == 1


@pytest.mark.parametrize(
    ("wanted_", "found"),
    [
        (AuditFilter(), [5, 4, 3, 2, 1]),
        (AuditFilter(since_ns=3), [5, 4, 3]),
        (AuditFilter(user="bob"), [4, 2]),
        (AuditFilter(call="ScaleWorkload"), [5]),
        (AuditFilter(denied=True), [4]),
        (AuditFilter(user="nobody' OR 1=1 --"), []),
    ],
)
def test_filters(tmp_path, wanted_, found):
    with closing(journal_of(tmp_path)) as journal:
        rows = [
            entry(1),
            entry(2, user="bob"),
            entry(3, code="NOT_FOUND"),
            entry(4, user="bob", code="PERMISSION_DENIED"),
            entry(5, call="ScaleWorkload"),
        ]
        journal.append([], rows)
        page = journal.read_audit_page(wanted_, size=10)
        assert ([one.time_ns for one in page.entries], page.total) == (found, len(found))


def test_the_oldest_go_beyond_so_many_rows_and_numbers_go_on(tmp_path):
    with closing(journal_of(tmp_path, rows_most=64)) as journal:
        for number in range(1, 501):
            journal.append([], (entry(number),))
            assert journal.audit_table._rows <= 64
        page = journal.read_audit_page(AuditFilter(), size=1000)
        assert [one.number for one in page.entries] == list(range(500, 500 - len(page.entries), -1))
        assert len(page.entries) >= 60
    with closing(journal_of(tmp_path, rows_most=64)) as journal:
        assert journal.audit_table._rows == len(page.entries)


def test_the_oldest_go_beyond_so_many_bytes(tmp_path):
    with closing(journal_of(tmp_path, bytes_most=50_000)) as journal:
        for number in range(1, 401):
            journal.append([], (entry(number, arguments="x" * 900),))
        page = journal.read_audit_page(AuditFilter(), size=1000)
        assert 40 <= len(page.entries) <= 51
        assert page.entries[0].number == 400


def test_one_commit_beyond_the_bounds_keeps_them(tmp_path):
    with closing(journal_of(tmp_path, rows_most=10)) as journal:
        journal.append([], [entry(number) for number in range(1, 101)])
        assert journal.audit_table._rows <= 10
        assert journal.read_audit_page(AuditFilter(), size=5).entries[0].number == 100


def test_a_damaged_entry_is_left_out_and_counted(tmp_path):
    with closing(journal_of(tmp_path)) as journal:
        journal.append([], (entry(1), entry(2), entry(3)))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as file, file:
        file.execute("UPDATE audit SET body = replace(body, 'alice', 'malice') WHERE number = 2")
    with closing(journal_of(tmp_path)) as journal:
        page = journal.read_audit_page(AuditFilter(), size=10)
        assert ([one.number for one in page.entries], page.damaged) == ([3, 1], 1)


def test_a_journal_of_before_the_audit_log_is_opened_and_gets_one(tmp_path):
    with closing(journal_of(tmp_path)) as journal:
        journal.append([JournalEntry("k", {})])
        assert journal.read_audit_page(AuditFilter(), size=10).entries == ()
    with closing(journal_of(tmp_path)) as journal:
        journal.append([], (entry(1),))
        assert journal.read_audit_page(AuditFilter(), size=10).total == 1


# The loop


async def test_an_accepted_call_is_in_the_commit_of_its_events():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        commits = len(journal.commits)
        call = AuditedCall("SubmitWorkload", ALICE, "ipv4:10.0.0.7:1", "{}")
        await loop.submit(build_request("w"), call=call)
        assert len(journal.commits) == commits + 1
        (kept,) = journal.audited
        assert (kept.user, kept.role, kept.call, kept.code) == ("alice", "submitter", "SubmitWorkload", "OK")
        assert (kept.revision, kept.time_ns) == (len(journal.entries), loop.core.state.workloads["w"].submitted_ns)


async def test_what_this_process_asks_of_itself_is_no_call():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        await loop.submit(build_request("w"))
        await loop.cancel("w")
        assert journal.audited == []


async def test_a_call_that_could_not_be_committed_is_not_said_to_be_accepted():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.fault = JournalFull(journal.path, "full", "make room")
        with pytest.raises(ResourceExhausted):
            await loop.submit(build_request("w"), call=AuditedCall("SubmitWorkload", ALICE, "p"))
        assert journal.audited == []


# The trail


async def test_refused_calls_that_are_alike_are_an_entry_at_once_and_one_a_minute():
    journal, time, counted = MemoryJournal(), Time(), []
    async with looping(journal) as loop:
        trail = trail_of(loop, time.clock, counted)
        refusal = RoleRefused(ALICE, "CancelWorkload", "owner", words="needs bob", problem="is alice", remedy="ask bob")
        asked = CancelWorkloadRequest(workload_id="w-1")
        for _ in range(1000):
            await trail.on_call_end(f"{PATH}CancelWorkload", Context(), asked, refusal)
        await trail.write()
        assert [(one.code, one.calls) for one in journal.audited] == [("PERMISSION_DENIED", 1)]
        assert "needs bob" in journal.audited[0].reason
        assert json.loads(journal.audited[0].arguments) == {"workload_id": "w-1"}
        time.s += 61.0
        await trail.write()
        time.s += 61.0
        await trail.write()
        assert [one.calls for one in journal.audited] == [1, 999]
        assert len(counted) == 1000
        assert next(iter(trail.families())).values == {("accepted",): 0, ("refused",): 1000}


async def test_more_sorts_of_refused_calls_than_are_told_apart_are_counted_together():
    journal, time = MemoryJournal(), Time()
    async with looping(journal) as loop:
        trail = trail_of(loop, time.clock)
        for number in range(5000):
            stranger = replace(ALICE, subject=f"CN={number}", user=f"u{number}")
            await trail.on_call_end(f"{PATH}CancelWorkload", Context(stranger), None, InvalidArgument("bad"))
        time.s += 61.0
        await trail.write()
        assert len(journal.audited) <= 1026
        assert sum(one.calls for one in journal.audited) == 5000


async def test_without_certificates_callers_are_told_apart_by_address_and_not_by_port():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = AuditTrail(loop=loop, clock=Clock(), log=LOG, caller_of=None)
        for port in range(10):
            await trail.on_call_end(
                f"{PATH}CancelWorkload", Context(None, f"ipv4:10.0.0.7:{port}"), None, NotFound("no")
            )
        await trail.on_call_end(f"{PATH}CancelWorkload", Context(None, "ipv4:10.0.0.8:1"), None, NotFound("no"))
        await trail.write()
        assert [one.peer for one in journal.audited] == ["ipv4:10.0.0.7:0", "ipv4:10.0.0.8:1"]


async def test_a_refused_reading_is_kept_where_it_was_denied_and_else_not():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = trail_of(loop)
        denied = RoleRefused(
            ALICE, "GetPolicy", "viewer", words="needs the role viewer", problem="has none", remedy="-"
        )
        await trail.on_call_end(f"{PATH}GetPolicy", Context(), None, denied)
        await trail.on_call_end(f"{PATH}GetWorkload", Context(), GetPolicyRequest(), NotFound("no"))
        await trail.on_call_end(f"{PATH}GetPolicy", Context(), GetPolicyRequest(), None)
        await trail.write()
        assert [one.call for one in journal.audited] == ["GetPolicy"]


async def test_reports_are_an_entry_a_minute():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = trail_of(loop)
        for done in range(100):
            asked = ReportProgressRequest(workload_id="w", work_done=float(done))
            await trail.on_call_end(f"{PATH}ReportProgress", Context(), asked, None)
        await trail.write()
        assert [(one.call, one.code) for one in journal.audited] == [("ReportProgress", "OK")]


async def test_what_changes_something_beside_the_journal_is_answered_once_it_is_written():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = trail_of(loop)
        await trail.on_call_end(f"{PATH}StopShadow", Context(), StopShadowRequest(), None)
        assert [one.call for one in journal.audited] == ["StopShadow"]
        journal.fault = JournalFull(journal.path, "full", "make room")
        with pytest.raises(ResourceExhausted):
            await trail.on_call_end(f"{PATH}StopShadow", Context(), StopShadowRequest(), None)


async def test_a_change_beside_the_journal_whose_caller_goes_away_is_kept():
    journal, begun = MemoryJournal(), asyncio.Event()

    async def begin(_request, _context):
        begun.set()
        await asyncio.Event().wait()

    calls = SimpleNamespace(**{method.attribute: begin for method in OPERATOR_SERVICE.methods})
    async with looping(journal) as loop:
        trail = trail_of(loop)
        handler = build_handler(OPERATOR_SERVICE, calls, settled=trail.on_call_end)
        for call, asked in (
            ("ConfirmEnergyExport", ConfirmEnergyExportRequest(name="bob", begin_ns=0, end_ns=9, revision=1)),
            ("CancelWorkload", CancelWorkloadRequest(workload_id="w-1")),
            ("GetPolicy", GetPolicyRequest()),
        ):
            served = handler.service(SimpleNamespace(method=f"{PATH}{call}")).unary_unary
            calling = asyncio.create_task(served(encode_message(asked), Context()))
            await begun.wait()
            begun.clear()
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        await trail.write()
        (kept,) = journal.audited
        assert (kept.call, kept.code, kept.user) == ("ConfirmEnergyExport", "CANCELLED", "alice")
        assert '"name":"bob"' in kept.arguments


async def test_refused_calls_are_kept_where_whoever_lists_them_goes_away():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = trail_of(loop)
        await trail.on_call_end(f"{PATH}CancelWorkload", Context(), None, NotFound("no"))
        writing = asyncio.create_task(trail.write())
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        async with asyncio.timeout(10.0):
            while not journal.audited:
                await trail.write()
                await asyncio.sleep(0.05)
        assert [one.code for one in journal.audited] == ["NOT_FOUND"]


async def test_refused_calls_wait_for_a_disk_that_takes_nothing():
    journal = MemoryJournal()
    async with looping(journal) as loop:
        trail = trail_of(loop)
        journal.fault = JournalFull(journal.path, "full", "make room")
        await trail.on_call_end(f"{PATH}CancelWorkload", Context(), None, NotFound("no"))
        await trail.write()
        assert journal.audited == []
        journal.fault = None
        async with asyncio.timeout(10.0):
            while not journal.audited:
                await trail.write()
                await asyncio.sleep(0.05)
        assert [one.code for one in journal.audited] == ["NOT_FOUND"]


# The call


async def test_the_log_is_read_in_pages_over_the_wire(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        for number in range(5):
            await rig.operators.submit_workload(build_request(f"w{number}"))
        await rig.operators.submit_workload(replace(build_request("dry"), dry_run=True))
        with pytest.raises(NotFound):
            await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="none"))
        await rig.operators.start_shadow(StartShadowRequest(weights=SetWeights(objective="energy")))
        policy = rig.controller.loop.core.state.policy
        await rig.operators.update_policy(UpdatePolicyRequest(policy=replace(policy, lease_s=policy.lease_s + 1.0)))
        found, token = [], ""
        while True:
            answer = await rig.operators.list_audit_entries(ListAuditEntriesRequest(page_size=3, page_token=token))
            found += answer.entries
            token = answer.next_page_token
            if not token:
                break
        assert answer.total == len(found) == 8
        assert [one.number for one in found] == sorted((one.number for one in found), reverse=True)
        assert [(one.call, one.code) for one in reversed(found)][:5] == [("SubmitWorkload", "OK")] * 5
        assert {(one.call, one.code) for one in found[:3]} == {
            ("CancelWorkload", "NOT_FOUND"),
            ("StartShadow", "OK"),
            ("UpdatePolicy", "OK"),
        }
        assert all(one.peer.startswith("ipv4:127.0.0.1:") and not one.subject for one in found)
        beyond = next_page_token(ListAuditEntriesRequest(), (2**63,))
        for token in ("x", beyond):
            with pytest.raises(InvalidArgument, match="page cannot be found"):
                await rig.operators.list_audit_entries(ListAuditEntriesRequest(page_token=token))
    async with run_controller(tmp_path) as rig:
        assert (await rig.operators.list_audit_entries(ListAuditEntriesRequest())).total == 8
