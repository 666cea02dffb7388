"""AgentService over real streams: welcome, acknowledge, tell plans, and survive whatever an agent does."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.server import AgentStream, RunningController, run_controller
from tests.waiting import wait_until

from eelgrid_controller.errors import JournalError
from eelgrid_controller.server.grpc.agent_service import _REPORTS_AHEAD_MOST, batches_per_acknowledgement
from eelgrid_protos import codec, rpc, transport
from eelgrid_protos.faults import Aborted, InvalidArgument, Unavailable
from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyStatus,
    AttemptReport,
    AttemptState,
    AttemptStatus,
    Cadence,
    CancelWorkloadRequest,
    HeldAssignments,
    Hello,
    HelloReceived,
    Inventory,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    Mobility,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    NodeState,
    PlanApplied,
    Policy,
    ProcessSpec,
    Resume,
    UpdatePolicyRequest,
    Welcome,
)


async def test_hello_is_welcomed_with_the_policy_cadence_and_the_node_is_there(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = AgentStream(rig.address)
        rig.agents.append(agent)
        await agent.say(Hello(incarnation=5, inventory=build_node()))
        welcome = await agent.hear()
        cadence = Cadence(send_interval_s=5.0)
        assert welcome == Welcome(
            acknowledged_sequence=0,
            cadence=cadence,
            resumes=True,
            reconnect_spread_s=0.002,
            term=rig.controller.loop.term,
        )
        (node,) = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert (node.inventory, node.state) == (replace(build_node(), pool="default"), NodeState.READY)


async def test_batches_are_acknowledged_and_show_up(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        now_ns = time.time_ns()
        for sequence in (1, 2):
            await agent.say(build_batch(sequence, ticks=5, time_ns=now_ns))
            assert await agent.hear() == Acknowledgement(sequence=sequence)
        await agent.say(build_batch(2, ticks=5, time_ns=now_ns))
        assert await agent.hear() == Acknowledgement(sequence=2)
        (node,) = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert (node.samples_received, node.samples_lost, node.power_w) == (10, 0, 100.0)
        gpus = (await rig.operators.list_gpus(ListGpusRequest())).gpus
        assert [gpu.power_w for gpu in gpus] == [50.0, 50.0]


@pytest.mark.parametrize(
    ("send_interval_s", "window", "lease_s", "every"),
    [
        (5.0, 8, 60.0, 1),
        (2.0, 8, 60.0, 1),
        (1.0, 8, 60.0, 4),
        (1.0, 4, 60.0, 2),
        (1.0, 1, 60.0, 1),
        (1.9, 8, 5.0, 1),
        (0.1, 64, 5.0, 4),
    ],
)
def test_acknowledgements_are_rarer_only_where_nobody_waits_for_them(
    send_interval_s: float, window: int, lease_s: float, every: int
) -> None:
    cadence = Cadence(send_interval_s=send_interval_s, window=window)
    assert batches_per_acknowledgement(cadence, lease_s) == every
    assert every * send_interval_s <= lease_s / 3 or every == 1


async def test_a_fast_cadence_is_acknowledged_cumulatively(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.operators.update_policy(UpdatePolicyRequest(policy=Policy(send_interval_s=1.0)))
        agent = await rig.join(build_node())
        await agent.say(*(build_batch(sequence) for sequence in (1, 2, 3, 4)))
        assert await agent.hear() == Acknowledgement(sequence=4)


async def test_a_reconnect_goes_on_where_the_incarnation_stood(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(), incarnation=9)
        await agent.say(build_batch(1), build_batch(2))
        await agent.hear(Acknowledgement)
        await agent.hear(Acknowledgement)
        await agent.leave()
        again = AgentStream(rig.address)
        rig.agents.append(again)
        await again.say(Hello(incarnation=9, inventory=build_node()))
        assert (await again.hear()).acknowledged_sequence == 2
        newborn = AgentStream(rig.address)
        rig.agents.append(newborn)
        await newborn.say(Hello(incarnation=10, inventory=build_node()))
        assert (await newborn.hear()).acknowledged_sequence == 0


async def test_a_placement_reaches_the_agent_and_its_answer_reaches_the_operator(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await rig.operators.submit_workload(build_request("w1"))
        plan = await agent.hear(NodePlan)
        assert [item.workload_id for item in plan.assignments] == ["w1"]
        assert not plan.enforce
        await agent.say(PlanApplied(epoch=plan.epoch, status=ApplyStatus.OBSERVED))
        await wait_until(lambda: rig.controller.agents._telemetry.plan_applied("n1") is not None)
        (status,) = (await rig.operators.list_plans(ListPlansRequest())).plans
        assert (status.plan.epoch, status.applied.status) == (plan.epoch, ApplyStatus.OBSERVED)
        (node,) = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert (node.plan_epoch, node.applied_epoch) == (plan.epoch, plan.epoch)


async def test_plans_are_coalesced_and_the_last_one_arrives(tmp_path: Path) -> None:
    async with run_controller(tmp_path, plan_interval_s=0.3) as rig:
        agent = await rig.join(build_node(gpus=8))
        began_s = time.monotonic()
        for number in range(30):
            await rig.operators.submit_workload(build_request(f"w{number}", milli=100))
        plans = [await agent.hear(NodePlan)]
        while len(plans[-1].assignments) < 30:
            plans.append(await agent.hear(NodePlan))
        assert len(plans) <= 2 + (time.monotonic() - began_s) / 0.3
        assert [plan.epoch for plan in plans] == sorted({plan.epoch for plan in plans})


async def test_a_plan_is_sent_again_to_an_agent_that_has_an_older_one_and_not_otherwise(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await rig.operators.submit_workload(build_request("w1"))
        plan = await agent.hear(NodePlan)
        await agent.leave()
        behind = await rig.join(build_node(), plan_epoch=0)
        assert await behind.hear(NodePlan) == plan
        await behind.leave()
        current = await rig.join(build_node(), plan_epoch=plan.epoch)
        with pytest.raises(TimeoutError):
            await current.hear(NodePlan, within_s=0.3)


async def test_a_new_policy_reaches_every_agent(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agents = [await rig.join(build_node(name)) for name in ("a", "b", "c")]
        policy = Policy(send_interval_s=2.0, sample_interval_s=0.5, lease_s=20.0)
        await rig.operators.update_policy(UpdatePolicyRequest(policy=policy))
        for agent in agents:
            cadence = await agent.hear(Cadence)
            assert (cadence.send_interval_s, cadence.sample_interval_s) == (2.0, 0.5)
            assert (await agent.hear(NodePlan)).lease_s == 20.0


async def test_the_second_stream_of_a_node_wins(tmp_path: Path) -> None:
    async with run_controller(tmp_path, away_grace_s=0.1) as rig:
        first = await rig.join(build_node())
        second = await rig.join(build_node())
        with pytest.raises(Aborted, match="another stream said Hello as n1"):
            await first.hear()
        await asyncio.sleep(0.5)
        assert rig.controller.agents.connected == 1
        assert rig.controller.loop.core.state.nodes["n1"].state is NodeState.READY
        await second.say(build_batch(1))
        assert await second.hear() == Acknowledgement(sequence=1)


async def test_a_short_absence_is_no_event_and_a_long_one_loses_the_node_until_it_is_back(tmp_path: Path) -> None:
    async with run_controller(tmp_path, away_grace_s=0.6) as rig:
        loop = rig.controller.loop
        agent = await rig.join(build_node())
        revision = loop.core.state.revision
        await agent.leave()
        await rig.join(build_node())
        await asyncio.sleep(0.8)
        assert loop.core.state.revision == revision
        await rig.agents[-1].leave()
        await wait_until(lambda: loop.core.state.nodes["n1"].state is NodeState.LOST)
        pending = (await rig.operators.submit_workload(build_request("w1"))).workload
        assert pending.placements == ()
        back = await rig.join(build_node())
        assert [item.workload_id for item in (await back.hear(NodePlan)).assignments] == ["w1"]


async def test_a_lost_gpu_is_taken_out_and_comes_back(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(gpus=1))
        event = NodeEvent(kind=NodeEventKind.GPU_LOST, time_ns=1, gpu_uuid="GPU-n1-0")
        await agent.say(event)
        await wait_until(lambda: rig.controller.loop.core.state.nodes["n1"].lost_gpus)
        assert (await rig.operators.submit_workload(build_request("w1"))).workload.placements == ()
        await agent.say(NodeEvent(kind=NodeEventKind.GPU_RETURNED, time_ns=2, gpu_uuid="GPU-n1-0"))
        assert [item.workload_id for item in (await agent.hear(NodePlan)).assignments] == ["w1"]


async def test_a_changed_inventory_is_taken_up_within_the_stream(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(gpus=1))
        await agent.say(build_batch(1, gpus=1), build_node(gpus=2, generation=2), build_batch(2, gpus=2, generation=2))
        assert await agent.hear() == Acknowledgement(sequence=1)
        assert await agent.hear() == Acknowledgement(sequence=2)
        assert len((await rig.operators.list_gpus(ListGpusRequest())).gpus) == 2


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([build_batch(1)], "hello"),
        ([Hello(incarnation=1, inventory=build_node()), Hello(incarnation=1, inventory=build_node())], "hello"),
        ([Hello(incarnation=1, inventory=build_node()), build_node("n2")], "inventory.node_name"),
        ([Hello(incarnation=1, inventory=build_node()), build_batch(1, generation=2)], "samples.inventory_generation"),
        ([Hello(incarnation=1, inventory=build_node()), build_batch(1, gpus=3)], "samples.gpu_columns"),
        ([Hello(incarnation=1, inventory=build_node()), build_batch(1), build_batch(2**63)], "samples.sequence"),
        (
            [Hello(incarnation=1, inventory=build_node()), PlanApplied(epoch=99, status=ApplyStatus.APPLIED)],
            "applied.epoch",
        ),
    ],
)
async def test_a_contradiction_ends_the_stream_and_names_the_field(tmp_path: Path, messages: list, field: str) -> None:
    async with run_controller(tmp_path) as rig:
        agent = AgentStream(rig.address)
        rig.agents.append(agent)
        await agent.say(*messages)
        with pytest.raises(InvalidArgument) as caught:
            await agent.hear_to_the_end()
        assert [violation.field for violation in caught.value.violations] == [field]
        assert caught.value.violations[0].remedy
        # Nobody else is harmed.
        await rig.join(build_node("healthy"))


async def test_the_loss_of_a_device_that_left_the_inventory_is_passed_over(tmp_path: Path) -> None:
    """The agent keeps an event until it is covered: ending its stream for it would end it for ever."""
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await agent.say(NodeEvent(kind=NodeEventKind.GPU_LOST, time_ns=1, gpu_uuid="GPU-none"), build_batch(1))
        assert await agent.hear() == Acknowledgement(sequence=1)


async def test_a_plan_whose_lease_ran_out_is_sent_again(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await rig.operators.submit_workload(build_request("w1"))
        first = await agent.hear()
        await agent.say(NodeEvent(kind=NodeEventKind.LEASE_EXPIRED, time_ns=1))
        assert await agent.hear() == first


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x02\x08\x01", b"hello"])
async def test_garbage_on_the_wire_is_invalid_and_harms_nobody(tmp_path: Path, garbage: bytes) -> None:
    async with run_controller(tmp_path) as rig, transport.open_channel(rig.address, tls=None) as channel:
        method = rpc.AGENT_SERVICE.methods[0]
        raw = channel.stream_stream(rpc.AGENT_SERVICE.path(method))

        async def one():
            yield garbage

        with pytest.raises(grpc.RpcError) as caught:
            async for _ in raw(one()):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await rig.join(build_node())


async def test_a_poisoned_batch_does_not_come_back_for_ever(tmp_path: Path) -> None:
    """After the refusal its sequence counts as seen, so the reconnected agent moves on."""
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(), incarnation=4)
        await agent.say(build_batch(1), build_batch(2, gpus=5))
        with pytest.raises(InvalidArgument):
            await agent.hear_to_the_end()
        again = AgentStream(rig.address)
        rig.agents.append(again)
        await again.say(Hello(incarnation=4, inventory=build_node()))
        assert (await again.hear()).acknowledged_sequence == 2


async def test_a_stop_tells_agents_to_connect_again(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await asyncio.sleep(0.05)
        rig.controller.agents.close()
        with pytest.raises(Unavailable, match="connect again"):
            await agent.hear()


class HeldCommits:
    """Lets the commits of a controller wait, or fail, and counts those that were begun."""

    def __init__(self, rig: RunningController) -> None:
        writer = rig.controller.loop._writer
        self.begun, self.go_on, self.fault = 0, asyncio.Event(), None
        self._append, writer.append = writer.append, self

    async def __call__(self, *written: Any) -> tuple[int, float]:
        self.begun += 1
        await self.go_on.wait()
        if self.fault is not None:
            raise self.fault
        return await self._append(*written)


async def run_attempts(rig: RunningController, count: int) -> tuple[AgentStream, list[AttemptStatus]]:
    agent = await rig.join(build_node(gpus=8, runs_processes=True, agent_version="1"))
    process = ProcessSpec(argv=("true",), working_directory="/")
    for number in range(count):
        await rig.operators.submit_workload(build_request(f"w{number}", process=process, mobility=Mobility.FIXED))
    state = AttemptState.RUNNING
    return agent, [
        AttemptStatus(workload_id=f"w{n}", replica=0, attempt=1, state=state, started_ns=5) for n in range(count)
    ]


async def test_reports_that_come_while_one_is_written_are_one_commit(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent, statuses = await run_attempts(rig, 5)
        commits, loop = HeldCommits(rig), rig.controller.loop
        await agent.say(*(AttemptReport(attempts=(one,)) for one in statuses))
        await wait_until(lambda: commits.begun == 1 and loop.queued == 4)
        commits.go_on.set()
        await wait_until(lambda: all(one.attempts for one in loop.core.state.workloads.values()))
        assert commits.begun == 2


async def test_a_node_that_reports_faster_than_the_journal_writes_waits(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent, (status,) = await run_attempts(rig, 1)
        commits, loop = HeldCommits(rig), rig.controller.loop
        await agent.say(*(AttemptReport(attempts=(status,)) for _ in range(100)))
        await wait_until(lambda: loop.queued >= _REPORTS_AHEAD_MOST - 1)
        await asyncio.sleep(0.1)
        assert loop.queued < _REPORTS_AHEAD_MOST
        commits.go_on.set()
        await wait_until(lambda: loop.queued == 0)


async def test_a_report_that_cannot_be_written_ends_the_stream_so_that_it_is_told_again(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent, statuses = await run_attempts(rig, 1)
        commits = HeldCommits(rig)
        commits.fault = JournalError(Path("journal"), "the disk is gone", "mend it")
        commits.go_on.set()
        await agent.say(AttemptReport(attempts=tuple(statuses)))
        with pytest.raises(Unavailable, match="the disk is gone"):
            await agent.hear_to_the_end()
        assert not rig.controller.loop.core.state.workloads["w0"].attempts


async def test_cancelled_work_leaves_the_plan(tmp_path: Path) -> None:
    async with run_controller(tmp_path, plan_interval_s=0.0) as rig:
        agent = await rig.join(build_node())
        await rig.operators.submit_workload(build_request("w1"))
        held = await agent.hear(NodePlan)
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="w1"))
        empty = await agent.hear(NodePlan)
        assert (len(held.assignments), len(empty.assignments)) == (1, 0)
        assert empty.epoch > held.epoch


async def test_a_node_that_floods_with_events_waits_and_others_do_not(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        loud = await rig.join(build_node("loud"))
        event = NodeEvent(kind=NodeEventKind.SAMPLES_DROPPED, time_ns=1, detail="a\nINFO eelgrid.controller forged")
        await loud.say(*([event] * 300))
        await wait_until(lambda: rig.controller.agents.delayed_events > 0)
        quiet = await rig.join(build_node("quiet"))
        await quiet.say(build_batch(1))
        assert await quiet.hear(Acknowledgement) == Acknowledgement(sequence=1)
        assert rig.controller.agents.events[NodeEventKind.SAMPLES_DROPPED] < 100


async def resumed(rig: Any, node: Inventory, **changes: Any) -> AgentStream:
    """An agent whose stream was opened by Resume."""
    agent = AgentStream(rig.address)
    rig.agents.append(agent)
    fields = {"incarnation": 1, "node_name": node.node_name, "inventory_digest": codec.digest_message(node)} | changes
    await agent.say(Resume(**fields))
    return agent


async def test_a_node_that_is_as_it_was_comes_back_without_its_inventory(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node())
        await agent.say(build_batch(1))
        await agent.hear(Acknowledgement)
        await agent.leave()
    async with run_controller(tmp_path) as rig:
        revision = rig.controller.loop.core.state.revision
        agent = await resumed(rig, build_node())
        assert (await agent.hear(Welcome)).resumes
        assert rig.controller.loop.core.state.revision == revision, "nothing is journalled"
        await agent.say(build_batch(1, time_ns=time.time_ns()))
        assert await agent.hear(Acknowledgement) == Acknowledgement(sequence=1)
        (gpu, _) = (await rig.operators.list_gpus(ListGpusRequest())).gpus
        assert gpu.power_w == 50.0


async def test_a_node_that_is_new_or_changed_is_asked_for_its_inventory(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        for node in (build_node(), build_node(gpus=4, generation=2)):
            agent = await resumed(rig, node)
            assert await agent.hear() == HelloReceived(inventory_wanted=True)
            await agent.say(Hello(incarnation=1, inventory=node))
            await agent.hear(Welcome)
            (found,) = (await rig.operators.list_nodes(ListNodesRequest())).nodes
            assert found.inventory == replace(node, pool="default")


async def test_an_inventory_that_was_asked_for_is_of_the_same_node(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await resumed(rig, build_node())
        await agent.hear(HelloReceived)
        await agent.say(Hello(incarnation=1, inventory=build_node("n2")))
        with pytest.raises(InvalidArgument, match="none of n1"):
            await agent.hear()
        assert not rig.controller.loop.core.state.nodes


async def test_a_resume_beyond_the_known_plan_is_asked_for_all_that_the_agent_holds(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await (await rig.join(build_node())).leave()
        agent = await resumed(rig, build_node(), plan_epoch=41)
        assert await agent.hear() == HelloReceived(inventory_wanted=True)
        await agent.say(Hello(incarnation=1, inventory=build_node(), plan_epoch=41, held=HeldAssignments()))
        await agent.hear(Welcome)
        await rig.operators.submit_workload(build_request("w1"))
        assert (await agent.hear(NodePlan)).epoch > 41


async def test_agents_wait_in_a_line_and_none_is_refused_for_waiting(tmp_path: Path) -> None:
    """The journal stands still while more come than are welcomed at one time; each is told, and none is sent away."""
    async with run_controller(tmp_path) as rig:
        hold = asyncio.Event()
        joined = rig.controller.loop.register_node

        async def slowly(*arguments: Any, **options: Any) -> None:
            await hold.wait()
            await joined(*arguments, **options)

        rig.controller.loop.register_node = slowly
        welcomes = []
        for number in range(80):
            agent = AgentStream(rig.address)
            rig.agents.append(agent)
            await agent.say(Hello(incarnation=1, inventory=build_node(f"n{number}")))
            welcomes.append(asyncio.create_task(agent.hear(Welcome, within_s=60.0)))
        await wait_until(lambda: rig.controller.agents._waiting == 80, within_s=30.0)
        hold.set()
        await asyncio.gather(*welcomes)
        assert rig.controller.agents.connected == 80


async def test_who_leaves_the_line_leaves_nothing_behind(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        hold = asyncio.Event()
        rig.controller.loop.register_node = lambda *_arguments, **_options: hold.wait()
        agent = AgentStream(rig.address)
        await agent.say(Hello(incarnation=1, inventory=build_node()))
        hearing = asyncio.create_task(agent.hear(Welcome))
        await wait_until(lambda: rig.controller.agents._waiting == 1)
        hearing.cancel()
        await wait_until(lambda: rig.controller.agents._waiting == 0)
        assert rig.controller.agents.connected == 0
