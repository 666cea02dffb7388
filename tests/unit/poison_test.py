"""Legal messages that were poison: each is refused at the door, or costs nobody but its sender anything."""

import asyncio
import json
import logging
import time
from dataclasses import fields, replace
from pathlib import Path

import grpc
import pytest
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.server import AgentStream, MemoryJournal, run_controller
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import UnreadableEvent, WorkloadSubmitted, check_readable
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, digest_of
from eelgrid_controller.state.node_allocations import ASSIGNMENTS_MOST, ContradictoryEvent, NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos import catalogue, codec, rpc
from eelgrid_protos.errors import InvalidMessage, MalformedMessage
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    Assignment,
    BudgetScope,
    CancelWorkloadRequest,
    Column,
    ConnectRequest,
    DrainNodes,
    EnforcementMode,
    GetPolicyRequest,
    GetSummaryRequest,
    Hello,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    ListWorkloadsRequest,
    NodePlan,
    Policy,
    PoolMode,
    PowerBudget,
    Reading,
    SubmitWorkloadRequest,
    UpdatePolicyRequest,
    WatchWorkloadsRequest,
    WhatIfChange,
    WhatIfRequest,
    WorkloadPhase,
)

# Written by the version before the rule: `my job` and `line\nbreak` were let in, and a Hello with epoch 2^64-1.
OLD = json.loads((Path(__file__).parents[1] / "journals" / "before_one_rule_of_names.json").read_text())


async def everything_is_served(rig) -> None:
    """Every listing answers and leaves nothing out."""
    api = rig.operators
    for call, request in (
        (api.list_nodes, ListNodesRequest()),
        (api.list_gpus, ListGpusRequest()),
        (api.list_plans, ListPlansRequest()),
        (api.list_workloads, ListWorkloadsRequest()),
    ):
        assert (await call(request)).omitted == 0
    await api.get_summary(GetSummaryRequest())


# 1. One rule for each name


@pytest.mark.parametrize("name", ["my job", "line\nbreak", "-", "a" * 129, "jöb"])
async def test_an_id_that_no_answer_could_carry_is_refused_before_it_is_kept(tmp_path: Path, name: str) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        raw = rig.channel.unary_unary("/eelgrid.v1.OperatorService/SubmitWorkload")
        sound = codec.encode_message(build_request("x" * min(128, len(name.encode()))))
        poison = sound.replace(b"x" * min(128, len(name.encode())), name.encode()[:128])
        if len(name) > 128:
            with pytest.raises(InvalidMessage):
                codec.encode_message(build_request(name))
            return
        with pytest.raises(grpc.RpcError) as caught:
            await raw(poison)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await rig.operators.list_workloads(ListWorkloadsRequest())).total == 0
        await everything_is_served(rig)


def old_journal(data: Path, *, with_checkpoint: bool) -> None:
    """A journal as the version before the rule left it."""
    journal = open_journal(data, new_cluster_id="old")
    journal.append([JournalEntry(kind, body) for kind, body in OLD["entries"]])
    if with_checkpoint:
        state = OLD["checkpoint"]
        journal.write_checkpoint(Checkpoint(state["revision"], state, digest_of(state)))
    journal.close()


@pytest.mark.parametrize("with_checkpoint", [False, True])
async def test_a_journal_of_before_the_rule_heals_and_serves_everybody(
    tmp_path: Path, caplog, *, with_checkpoint: bool
) -> None:
    old_journal(tmp_path, with_checkpoint=with_checkpoint)
    with caplog.at_level(logging.WARNING):
        async with run_controller(tmp_path, plan_interval_s=0.0) as rig:
            await everything_is_served(rig)
            found = {item.workload_id: item for item in (await list_all(rig)).workloads}
            (healed,) = (key for key in found if key.startswith("my-job-"))
            assert set(found) >= {"good", "my-job", healed}
            assert found[healed].phase is WorkloadPhase.PLACED
            agent = await rig.join(build_node("n1", gpus=4))
            plan = await agent.hear(NodePlan)
            assert {item.workload_id for item in plan.assignments} == {
                key for key, item in found.items() if item.phase is WorkloadPhase.PLACED
            }
            watch = rig.operators.watch_workloads(WatchWorkloadsRequest())
            assert {(await anext(watch)).workload.workload_id for _ in found} == set(found)
            await watch.aclose()
            ended = await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id=healed))
            assert ended.workload.phase is WorkloadPhase.CANCELLED
            assert healed not in {item.workload_id for item in (await agent.hear(NodePlan)).assignments}
            digest = rig.controller.loop.core.state.digest()
    assert "my job" in caplog.text
    assert healed in caplog.text
    async with run_controller(tmp_path) as rig:
        assert rig.controller.loop.core.state.digest() == digest


async def list_all(rig):
    return await rig.operators.list_workloads(ListWorkloadsRequest(page_size=1000))


def test_entries_and_the_checkpoint_of_an_old_journal_heal_alike() -> None:
    by_entries, by_checkpoint = MemoryJournal(), MemoryJournal()
    by_entries.append([JournalEntry(kind, body) for kind, body in OLD["entries"]])
    state = OLD["checkpoint"]
    by_checkpoint.entries = list(by_entries.entries)
    by_checkpoint.write_checkpoint(Checkpoint(state["revision"], state, digest_of(state)))
    one, other = recover_state(by_entries, ClusterState), recover_state(by_checkpoint, ClusterState)
    assert one.healed_count
    assert other.healed_count
    assert one.state.workloads == other.state.workloads
    assert {name: record.inventory for name, record in one.state.nodes.items()} == {
        name: record.inventory for name, record in other.state.nodes.items()
    }
    check_invariants(one.state)
    check_invariants(other.state)


def test_an_event_that_could_not_be_read_back_changes_nothing() -> None:
    core = Core(ClusterState(), catalogue.load_catalogue())
    core.register_node(build_node(), now_ns=1)
    before = core.state.digest()
    with pytest.raises(UnreadableEvent, match="workload_id"):
        core.submit(replace(build_request("sound"), workload_id="my job"), now_ns=2)
    assert core.state.digest() == before
    event = WorkloadSubmitted(time_ns=1, workload_id="w", spec=replace(build_request().spec, user="\ud800"))
    with pytest.raises(UnreadableEvent):
        check_readable(event)


async def test_a_command_whose_event_is_refused_harms_no_other_in_its_batch(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        loop = rig.controller.loop
        poison = replace(build_request("sound"), workload_id="my job")
        answers = await asyncio.gather(
            loop.submit(build_request("a")),
            loop.submit(poison),
            loop.submit(build_request("b")),
            return_exceptions=True,
        )
        assert [type(answer).__name__ for answer in answers] == ["Workload", "Internal", "Workload"]
        await everything_is_served(rig)


async def test_an_assignment_that_no_plan_can_carry_costs_the_node_that_alone(tmp_path: Path) -> None:
    async with run_controller(tmp_path, plan_interval_s=0.0) as rig:
        agent = await rig.join(build_node())
        record = rig.controller.loop.core.state.nodes["n1"]
        await rig.operators.submit_workload(build_request("good"))
        # As a fault of ours would leave it.
        key = ("good", 0)
        record.assignments["my job", 0] = replace(record.assignments[key], workload_id="my job")
        rig.controller.loop.core.state.workloads["my job"] = replace(
            rig.controller.loop.core.state.workloads["good"], workload_id="my job"
        )
        await rig.operators.submit_workload(build_request("later"))
        plan = await agent.hear(NodePlan)
        while len(plan.assignments) < 2:
            plan = await agent.hear(NodePlan)
        assert {item.workload_id for item in plan.assignments} == {"good", "later"}
        plans = await rig.operators.list_plans(ListPlansRequest())
        assert (plans.omitted, len(plans.plans[0].plan.assignments)) == (1, 2)
        listed = await list_all(rig)
        assert ([item.workload_id for item in listed.workloads], listed.omitted) == (["good", "later"], 1)
        watch = rig.operators.watch_workloads(WatchWorkloadsRequest())
        assert {(await anext(watch)).workload.workload_id for _ in range(2)} == {"good", "later"}
        await watch.aclose()
        del record.assignments["my job", 0]
        del rig.controller.loop.core.state.workloads["my job"]


# 4. A lying Hello


async def test_a_plan_epoch_that_nobody_gave_is_refused_and_the_honest_stream_stays(tmp_path: Path) -> None:
    for epoch in (2**48 + 1, 2**53 - 1):
        async with run_controller(tmp_path) as rig:
            honest = await rig.join(build_node())
            liar = AgentStream(rig.address)
            rig.agents.append(liar)
            await liar.say(Hello(incarnation=7, inventory=build_node(), plan_epoch=epoch))
            with pytest.raises(InvalidArgument) as caught:
                await liar.hear_to_the_end()
            assert [violation.field for violation in caught.value.violations] == ["hello.plan_epoch"]
            await honest.say(build_batch(1))
            await honest.hear()
            await everything_is_served(rig)
            assert rig.controller.loop.core.state.nodes["n1"].plan_epoch < 2**48


def test_a_plan_epoch_beyond_53_bits_is_no_message() -> None:
    with pytest.raises(InvalidMessage, match="plan_epoch"):
        codec.encode_message(ConnectRequest(message=Hello(incarnation=1, inventory=build_node(), plan_epoch=2**64 - 1)))


async def test_the_highest_epoch_that_is_believed_leaves_room_for_ours(tmp_path: Path) -> None:
    async with run_controller(tmp_path, plan_interval_s=0.0) as rig:
        agent = await rig.join(build_node(), plan_epoch=2**48)
        await rig.operators.submit_workload(build_request("w1"))
        plan = await agent.hear(NodePlan)
        assert plan.epoch > 2**48
        await agent.leave()
        # What we gave is believed, though it is above what a stranger may say.
        again = await rig.join(build_node(), plan_epoch=plan.epoch)
        await again.say(build_batch(1))
        await again.hear()


async def test_boards_at_the_highest_reading_leave_the_node_visible(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(gpus=64))
        most_w = 15_000.0
        column = Column(reading=Reading.POWER_W, values=(most_w,) * 64)
        await agent.say(replace(build_batch(1, gpus=64, time_ns=time.time_ns()), gpu_columns=(column,)))
        await agent.hear()
        (node,) = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert node.power_w == 64 * most_w
        await everything_is_served(rig)
    with pytest.raises(InvalidMessage):
        codec.encode_message(
            ConnectRequest(message=replace(build_batch(1), gpu_columns=(replace(column, values=(20_000.0,) * 2),)))
        )


async def test_a_node_budget_beyond_what_a_node_draws_keeps_its_stream(tmp_path: Path) -> None:
    async with run_controller(tmp_path, plan_interval_s=0.0) as rig:
        agent = await rig.join(build_node())
        policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
        budget = PowerBudget(scope=BudgetScope.NODE, name="n1", limit_w=1e10)
        await rig.operators.update_policy(UpdatePolicyRequest(policy=replace(policy, budgets=(budget,))))
        assert (await agent.hear(NodePlan)).power_budget_w == 1e6
        await everything_is_served(rig)


# 5. A gang of more replicas than a plan carries


def tiny(workload_id: str, replicas: int, **changes) -> SubmitWorkloadRequest:
    request = build_request(workload_id, gpus=0, cpu=0.001, replicas=replicas, **changes)
    return replace(request, spec=replace(request.spec, request=replace(request.spec.request, memory_bytes=0)))


async def test_a_gang_that_no_plans_could_carry_is_refused_when_it_is_submitted(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        with pytest.raises(InvalidArgument) as caught:
            await rig.operators.submit_workload(tiny("gang", ASSIGNMENTS_MOST + 1))
        assert [violation.field for violation in caught.value.violations] == ["spec.replicas"]
        assert str(ASSIGNMENTS_MOST) in str(caught.value)
        await everything_is_served(rig)


async def test_a_waiting_gang_of_more_replicas_than_a_plan_carries_harms_nobody(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        # Accepted while nobody could know how many nodes there will be.
        waiting = (await rig.operators.submit_workload(tiny("gang", ASSIGNMENTS_MOST + 4))).workload
        assert waiting.phase is WorkloadPhase.PENDING
        await rig.join(build_node("n1", gpus=1))
        await rig.operators.submit_workload(build_request("a"))
        await rig.operators.submit_workload(build_request("b"))
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="a"))
        placed = {item.workload_id: item.phase for item in (await list_all(rig)).workloads}
        assert placed["b"] is WorkloadPhase.PLACED
        assert placed["gang"] is WorkloadPhase.PENDING
        # With a second node there is room, since each plan carries a part.
        second = AgentStream(rig.address)
        rig.agents.append(second)
        await second.say(Hello(incarnation=1, inventory=build_node("n2", gpus=1)))
        # A second of work where nobody else uses the machine.
        await second.hear(within_s=120.0)
        await asyncio.wait_for(_placed(rig, "gang"), 120.0)
        state = rig.controller.loop.core.state
        assert max(len(record.assignments) for record in state.nodes.values()) <= ASSIGNMENTS_MOST
        await everything_is_served(rig)


async def _placed(rig, workload_id: str) -> None:
    while rig.controller.loop.core.state.workloads[workload_id].phase is not WorkloadPhase.PLACED:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_a_gang_goes_where_the_plans_of_half_full_nodes_have_room() -> None:
    core = Core(ClusterState(), catalogue.load_catalogue())
    core.register_node(build_node("n1", gpus=1), now_ns=1)
    for number in range(4):
        core.submit(tiny(f"g{number}", 1000), now_ns=10 + number)
    waits = core.submit(tiny("last", 100), now_ns=20).result
    assert waits.phase is WorkloadPhase.PENDING
    fits = core.submit(tiny("fits", 96), now_ns=21).result
    assert fits.phase is WorkloadPhase.PLACED
    assert len(core.state.nodes["n1"].assignments) == ASSIGNMENTS_MOST
    core.cancel("g0", now_ns=22)
    assert core.state.workloads["last"].phase is WorkloadPhase.PLACED
    check_invariants(core.state)


class RefusingRecord(NodeRecord):
    """A node that holds nothing more, of which the planner does not know: as a fault of ours would have it."""

    def allocate(self, assignment: Assignment) -> None:
        raise ContradictoryEvent(f"{assignment.workload_id} is refused")


def test_a_place_that_the_ledger_refuses_costs_nobody_else_anything() -> None:
    core = Core(ClusterState(), catalogue.load_catalogue())
    core.register_node(build_node("n1", gpus=2), now_ns=1)
    core.submit(build_request("runs"), now_ns=2)
    waits = core.submit(build_request("waits", gpus=2), now_ns=3).result
    assert waits.phase is WorkloadPhase.PENDING
    record = core.state.nodes["n1"]
    core.state.nodes["n1"] = RefusingRecord(**{entry.name: getattr(record, entry.name) for entry in fields(record)})
    core.cancel("runs", now_ns=4)
    submitted = core.submit(build_request("later"), now_ns=5).result
    for workload in (core.state.workloads["waits"], submitted):
        assert (workload.phase, workload.reason) == (
            WorkloadPhase.PENDING,
            PendingConstraint.UNAVAILABLE.describe("refused"),
        )
    check_invariants(core.state)


# 6. Sizes


def varint(number: int) -> bytes:
    out = b""
    while True:
        byte, number = number & 127, number >> 7
        out += bytes([byte | (128 if number else 0)])
        if not number:
            return out


def nested(*numbers: int, body: bytes) -> bytes:
    """The body inside fields of these numbers, outermost first."""
    for number in reversed(numbers):
        body = varint(number << 3 | 2) + varint(len(body)) + body
    return body


def bomb(bytes_most: int) -> bytes:
    """A Hello whose inventory has as many empty GPUs as fit."""
    numbers = [rpc.AGENT_SERVICE.methods[0].request.__name__]
    assert numbers == ["ConnectRequest"]
    sound = codec.encode_message(ConnectRequest(message=Hello(incarnation=1, inventory=build_node("bomb", gpus=1))))
    wire = codec.file_descriptors()
    fields = {
        message.name: {entry.name: entry.number for entry in message.fields}
        for file in wire
        for message in file.message_types_by_name.values()
    }
    element = varint(fields["Inventory"]["gpus"] << 3 | 2) + b"\0"
    count = (bytes_most - len(sound) - 64) // len(element)
    return sound + nested(fields["ConnectRequest"]["hello"], fields["Hello"]["inventory"], body=element * count)


@pytest.mark.parametrize("megabytes", [1, 4])
def test_elements_are_counted_before_anything_is_made_of_them(megabytes: int) -> None:
    data = bomb(megabytes * 2**20)
    began_s = time.process_time()
    with pytest.raises(InvalidMessage, match="gpus: holds more than 64 items"):
        codec.decode_message(ConnectRequest, data, is_counted=True)
    assert time.process_time() - began_s < 1.0, "5 s and 22 s were needed before"


@pytest.mark.parametrize("method", rpc.OPERATOR_SERVICE.methods + rpc.AGENT_SERVICE.methods, ids=lambda one: one.name)
def test_a_request_longer_than_its_call_needs_is_refused_unparsed(method) -> None:
    data = b"\0" * (method.request_bytes_most + 1)
    with pytest.raises(MalformedMessage, match="too large"):
        codec.decode_message(method.request, data, bytes_most=method.request_bytes_most, is_counted=True)
    assert method.request_bytes_most <= 8 * 2**20


async def test_a_request_too_long_is_refused_on_both_sides_and_others_are_served(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        names = tuple(f"node-{number:0120d}" for number in range(10_000))
        request = WhatIfRequest(changes=(WhatIfChange(change=DrainNodes(node_names=names)),))
        with pytest.raises(MalformedMessage, match="too large"):
            await rig.operators.what_if(request)
        with pytest.raises(grpc.RpcError) as caught:
            await rig.channel.unary_unary("/eelgrid.v1.OperatorService/WhatIf")(codec.encode_message(request))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await everything_is_served(rig)


async def test_the_longest_policy_that_the_rules_allow_goes_through(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
        budgets = tuple(
            PowerBudget(scope=BudgetScope.NODE, name=f"node-{number:06}", limit_w=1e4) for number in range(100_000)
        )
        wish = replace(policy, budgets=budgets, pools=(PoolMode(pool="a", mode=EnforcementMode.OBSERVE),))
        assert len((await rig.operators.update_policy(UpdatePolicyRequest(policy=wish), timeout=60.0)).policy.budgets)
        assert isinstance(rig.controller.loop.core.state.policy, Policy)
