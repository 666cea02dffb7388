"""An agent behind an ingest process reaches the same state as one that connects directly, and a bad message harms one."""

import asyncio
import contextlib
import logging
from dataclasses import replace

import pytest
from tests.builders.cluster import build_node
from tests.builders.server import AgentStream, run_controller
from tests.waiting import wait_until

from eelgrid_controller.clock import Clock
from eelgrid_controller.ingest_composition import IngestProcess
from eelgrid_controller.runtime.config import IngestConfig
from eelgrid_controller.server.ingest import relay
from eelgrid_controller.server.ingest.frames import FrameBuilder
from eelgrid_controller.server.ingest.relay import LeaderLink
from eelgrid_protos import codec, rpc
from eelgrid_protos.faults import Aborted, InvalidArgument, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    Absence,
    AbsenceReason,
    Acknowledgement,
    ApplyStatus,
    Column,
    ConnectRequest,
    ConnectResponse,
    ForwardedMessage,
    ForwardedStream,
    ForwardRequest,
    GetSummaryRequest,
    HeldAssignments,
    Hello,
    PlanApplied,
    Reading,
    Resume,
    ResumeRequest,
    SampleBatch,
    TickBlock,
    TickFrame,
    Welcome,
)

LOG = logging.getLogger("test.ingest")


@contextlib.asynccontextmanager
async def run_ingest(*controllers):
    config = IngestConfig(controllers=controllers, listen="127.0.0.1:0", metrics="127.0.0.1:0")
    process = IngestProcess(config, tls=None, insecure=False, clock=Clock(), log=LOG)
    line = await process.start()
    try:
        yield process, dict(part.split("=", 1) for part in line.split()[1:])["listen"]
    finally:
        await process.stop()


def batch(sequence, *, power_w=300.0, generation=1, gpus=8, first_ns=1_000_000_000):
    times = tuple(first_ns * sequence + tick for tick in range(2))
    return SampleBatch(
        sequence=sequence,
        inventory_generation=generation,
        time_ns=times,
        gpu_columns=(
            Column(reading=Reading.POWER_W, values=(1.0,) * gpus + (power_w,) * gpus),
            Column(
                reading=Reading.UTILIZATION_RATIO,
                values=(0.0,) * (2 * gpus),
                absences=(Absence(reason=AbsenceReason.TIMED_OUT, cells=(2 * gpus - 1,)),),
            ),
        ),
        host_columns=(Column(reading=Reading.HOST_CPU_UTILIZATION_RATIO, values=(0.1, 0.2)),),
    )


async def connect(address, name, *, keeps=False):
    """An agent; one that `keeps` its stream opens it again when it is asked to."""
    agent = AgentStream(address)
    inventory = build_node(name)
    await agent.say(
        Hello(incarnation=1, inventory=inventory, plan_epoch=0, held=HeldAssignments(), accepts_resume_request=keeps)
    )
    return agent, await agent.hear(Welcome)


async def resume(agent, name):
    """The agent opens its stream again; returns the Welcome."""
    digest = codec.digest_message(build_node(name))
    await agent.say(Resume(incarnation=1, node_name=name, inventory_digest=digest, accepts_resume_request=True))
    return await agent.hear(Welcome, within_s=30.0)


@pytest.mark.parametrize("is_direct", [True, False])
async def test_an_agent_reaches_the_same_state_directly_and_behind_an_ingest_process(tmp_path, is_direct):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (_, behind):
        agent, welcome = await connect(rig.address if is_direct else behind, "n1")
        assert welcome.acknowledged_sequence == 0
        assert welcome.term == rig.controller.loop.term
        inventory = build_node("n1")
        width = len(inventory.gpus)
        for sequence in (1, 2, 4):
            await agent.say(batch(sequence, generation=inventory.generation, gpus=width))
        while (await agent.hear(Acknowledgement)).sequence < 4:
            pass
        telemetry = rig.controller.telemetry
        tick = telemetry.latest_tick("n1")
        assert tick.gpus == {
            Reading.POWER_W: (300.0,) * width,
            Reading.UTILIZATION_RATIO: (*(0.0,) * (width - 1), None),
        }
        assert telemetry.tick_counts("n1") == (6, 2)
        assert telemetry.idle_since_ns("n1") == (*(1_000_000_000,) * (width - 1), None)
        # Batches that come again are acknowledged and not counted again.
        await agent.say(batch(2, generation=inventory.generation, gpus=width))
        await wait_until(lambda: telemetry.duplicates == 1)
        assert telemetry.tick_counts("n1") == (6, 2)
        await agent.leave()


async def test_control_messages_pass_in_both_directions(tmp_path):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (_, behind):
        agent, _ = await connect(behind, "n1")
        assert (await rig.operators.get_summary(GetSummaryRequest())).summary.nodes_ready == 1
        await agent.say(PlanApplied(epoch=99, status=ApplyStatus.APPLIED))
        with pytest.raises(InvalidArgument, match="a plan never sent"):
            await agent.hear_to_the_end()


async def test_a_changed_inventory_is_dealt_with_before_the_batches_after_it(tmp_path):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (_, behind):
        agent, _ = await connect(behind, "n1")
        first = build_node("n1")
        second = replace(first, generation=first.generation + 1, gpus=first.gpus[:1])
        await agent.say(
            batch(1, generation=first.generation, gpus=len(first.gpus)),
            second,
            batch(2, generation=second.generation, gpus=1),
        )
        while (await agent.hear(Acknowledgement)).sequence < 2:
            pass
        assert rig.controller.telemetry.tick_counts("n1") == (4, 0)
        await agent.leave()


async def test_a_second_stream_of_a_node_ends_the_first_however_they_come(tmp_path):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (_, behind):
        first, _ = await connect(behind, "n1")
        second, _ = await connect(rig.address, "n1")
        with pytest.raises(Aborted, match="another stream"):
            await first.hear_to_the_end()
        await second.leave()


async def test_agents_are_refused_while_no_controller_leads_and_taken_when_one_does(tmp_path):
    async with run_ingest("127.0.0.1:9") as (_, behind):
        agent = AgentStream(behind)
        await agent.say(Hello(incarnation=1, inventory=build_node("n1"), plan_epoch=0))
        with pytest.raises(Unavailable, match="no controller takes"):
            await agent.hear(within_s=30.0)


async def test_an_ingest_process_that_stops_sends_its_agents_away(tmp_path):
    async with run_controller(tmp_path) as rig:
        async with run_ingest(rig.address) as (process, behind):
            agent, _ = await connect(behind, "n1")
            assert process.relay.is_linked
            assert rig.controller.agents.connected == 1
        with pytest.raises(Unavailable):
            await agent.hear_to_the_end()
        await wait_until(lambda: rig.controller.agents.connected == 0)
        again, _ = await connect(rig.address, "n1")
        await again.leave()


async def test_a_leader_that_stops_is_not_followed_by_acknowledgements(tmp_path):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (_, behind):
        agent, _ = await connect(behind, "n1")
        rig.controller.agents.close()
        with pytest.raises(Unavailable):
            await agent.hear_to_the_end()


class StallingProxy:
    """Carries bytes between an ingest process and the controller, while `flows` is set."""

    def __init__(self, address):
        self._target = address.rsplit(":", 1)
        self.flows = asyncio.Event()
        self.flows.set()
        self._tasks, self._writers = set(), []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *reason):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        """The controller is lost: its connections break, and others are refused until there is a next one."""
        self._target = None
        for writer in self._writers:
            writer.transport.abort()

    def lead_to(self, address):
        """Another controller is there."""
        self._target = address.rsplit(":", 1)

    async def _accept(self, reader, writer):
        self._writers.append(writer)
        if self._target is None:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._target)
        for pair in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._carry(*pair)))

    async def _carry(self, source, target):
        try:
            while content := await source.read(65536):
                await self.flows.wait()
                target.write(content)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


async def test_a_stream_is_kept_when_the_leader_is_lost_and_opened_for_the_next_one(tmp_path):
    """The agent's connection stays; what it said to the former leader and was not acknowledged, it says again."""
    inventory = build_node("n1")

    def one(sequence):
        return batch(sequence, generation=inventory.generation, gpus=len(inventory.gpus))

    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as life:
        first = await life.enter_async_context(run_controller(tmp_path))
        proxy = await stack.enter_async_context(StallingProxy(first.address))
        process, behind = await stack.enter_async_context(run_ingest(proxy.address))
        agent, welcome = await connect(behind, "n1", keeps=True)
        older, _ = await connect(behind, "n2")
        await agent.say(one(1))
        await agent.hear(Acknowledgement)
        proxy.cut()
        request = await agent.hear(ResumeRequest)
        assert request.leader_within_s == 30.0
        with pytest.raises(Unavailable, match="lost"):
            await older.hear_to_the_end()
        # Late for the first controller, and of no use to the second.
        await agent.say(one(2), PlanApplied(epoch=99, status=ApplyStatus.APPLIED))
        await wait_until(lambda: process.relay._dropped == 2)
        await life.aclose()
        second = await life.enter_async_context(run_controller(tmp_path))
        proxy.lead_to(second.address)
        again = await resume(agent, "n1")
        assert again.acknowledged_sequence == 0
        assert again.term.epoch >= welcome.term.epoch
        await agent.say(one(2))
        while (await agent.hear(Acknowledgement)).sequence < 2:
            pass
        assert second.controller.telemetry.tick_counts("n1") == (2, 0)
        figures = {
            (sample.name, *sample.labels.values()): sample.value
            for family in process.relay.families()
            for sample in family.samples
        }
        assert figures["eelgrid_agents_connected",] == 1
        assert figures["eelgrid_ingest_agents_waiting",] == 0
        assert figures["eelgrid_ingest_kept_streams_total", "handed_over"] == 1
        assert figures["eelgrid_ingest_dropped_messages_total",] == 2
        await agent.leave()


async def test_kept_streams_end_when_none_leads_for_a_while_and_what_they_hold_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "_KEPT_S", 0.5)
    monkeypatch.setattr(relay, "_HELD_BYTES_MOST", 100)
    async with (
        run_controller(tmp_path) as rig,
        StallingProxy(rig.address) as proxy,
        run_ingest(proxy.address) as (process, behind),
    ):
        patient, _ = await connect(behind, "n1", keeps=True)
        large, _ = await connect(behind, "n2", keeps=True)
        proxy.cut()
        await large.hear(ResumeRequest)
        await large.say(Resume(incarnation=1, node_name="n2", inventory_digest="d" * 100))
        with pytest.raises(ResourceExhausted, match="too much waits"):
            await large.hear_to_the_end()
        with pytest.raises(Unavailable, match="no controller was found"):
            await patient.hear_to_the_end()
        await wait_until(lambda: not len(process.relay._waiting))
        assert process.relay._waiting._held_bytes == 0
        assert process.relay._waiting.counts == {"handed_over": 0, "ended": 2}


async def test_a_stream_that_its_controller_ends_since_it_does_not_lead_waits_for_another(tmp_path):
    async with run_controller(tmp_path) as rig, run_ingest(rig.address) as (process, behind):
        agent, _ = await connect(behind, "n1", keeps=True)
        rig.controller.agents.close()
        await agent.hear(ResumeRequest)
        digest = codec.digest_message(build_node("n1"))
        await agent.say(Resume(incarnation=1, node_name="n1", inventory_digest=digest))
        await wait_until(process.relay._waiting.list_held)
        # The same link is no other controller.
        assert rig.controller.agents.connected == 0
        former = process.relay._link
        former.deadline.reschedule(asyncio.get_running_loop().time())
        assert await agent.hear(Welcome, within_s=30.0)
        assert process.relay._link is not former
        await agent.leave()


async def test_storage_gets_every_tick_of_an_agent_behind_an_ingest_process(tmp_path):
    async with run_controller(tmp_path) as rig:
        stored = []
        rig.controller.agents.batch_listeners.append(lambda inventory, batch: stored.append(batch))
        async with run_ingest(rig.address) as (_, behind):
            agent, _ = await connect(behind, "n1")
            inventory = build_node("n1")
            sent = batch(1, generation=inventory.generation, gpus=len(inventory.gpus))
            await agent.say(sent)
            await agent.hear(Acknowledgement)
            (found,) = stored
            assert found.time_ns == sent.time_ns
            # A missing reading has lost its reason, and nothing else differs.
            unknown = replace(sent.gpu_columns[1].absences[0], reason=AbsenceReason.UNSPECIFIED)
            assert found == replace(
                sent, gpu_columns=(sent.gpu_columns[0], replace(sent.gpu_columns[1], absences=(unknown,)))
            )
            await agent.leave()


async def test_a_stalled_link_holds_agents_back_and_all_they_sent_is_counted_when_it_flows_again(tmp_path):
    """Frames under way and what is gathered are bounded; the rest waits with the agents, and none is lost."""
    inventory, most = build_node("n1"), 400
    wide = 8 * 60 * len(inventory.gpus)

    def long_batch(sequence):
        times = tuple(sequence * 10**10 + tick for tick in range(480))
        column = Column(reading=Reading.POWER_W, values=(300.0,) * wide)
        return SampleBatch(
            sequence=sequence, inventory_generation=inventory.generation, time_ns=times, gpu_columns=(column,)
        )

    async with run_controller(tmp_path) as rig, StallingProxy(rig.address) as proxy:
        rig.controller.agents.batch_listeners.append(lambda *_: None)
        async with run_ingest(proxy.address) as (process, behind):
            agents = [(await connect(behind, f"n{index}"))[0] for index in range(3)]
            proxy.flows.clear()
            gathered = process.relay._link.batches
            for agent in agents:
                await agent.say(*map(long_batch, range(1, most + 1)))
            link = process.relay._link
            await wait_until(lambda: link._builder.is_full, within_s=120.0)
            held = link.batches - gathered
            # Frames of 2 MiB each, and a batch of each agent: of what agents said, that and no more was read.
            assert len(link._unacknowledged) <= 4
            assert held * 8 * wide <= 5 * (2 * 2**20 + 8 * wide) + 3 * 8 * wide
            assert held < 3 * most
            assert all(rig.controller.telemetry.tick_counts(f"n{index}")[0] == 0 for index in range(3))
            proxy.flows.set()
            for index in range(3):
                await wait_until(
                    lambda name=f"n{index}": rig.controller.telemetry.tick_counts(name) == (480 * most, 0),
                    within_s=120.0,
                )
            for agent in agents:
                while (await agent.hear(Acknowledgement, within_s=60.0)).sequence < most:
                    pass
            assert rig.controller.telemetry.duplicates == 0
            for agent in agents:
                await agent.leave()


async def test_a_controller_that_takes_connections_and_does_not_answer_is_left_for_another(tmp_path):
    """As one that is stopped (SIGSTOP) and another leads: agents are sent away, and find the other by the same process."""
    async with (
        run_controller(tmp_path) as rig,
        StallingProxy(rig.address) as first,
        StallingProxy(rig.address) as second,
        run_ingest(first.address, second.address) as (process, behind),
    ):
        agent, _ = await connect(behind, "n1")
        first.flows.clear()
        inventory = build_node("n1")
        await agent.say(batch(1, generation=inventory.generation, gpus=len(inventory.gpus)))
        with pytest.raises(Unavailable, match="lost"):
            await agent.hear(Acknowledgement, within_s=30.0)
        await wait_until(lambda: process.relay.is_linked)
        assert process.relay._search.address == second.address
        again, _ = await connect(behind, "n1")
        await again.say(batch(1, generation=inventory.generation, gpus=len(inventory.gpus)))
        await again.hear(Acknowledgement)
        # One that is idle is not taken for one that does not answer.
        link = process.relay._link
        await asyncio.sleep(0.3)
        assert link.deadline.when() is None
        await again.leave()


async def test_agents_that_come_and_go_while_the_controller_does_not_read_take_no_memory():
    link = LeaderLink()
    for _ in range(3000):
        stream = link.open("ipv4:10.0.0.1:1", b"c" * 2048)
        reading = asyncio.create_task(link.forward(stream, b"\x0a" + b"h" * 8192))
        await asyncio.sleep(0)
        stream.close(None)
        link.end_stream(stream)
        reading.cancel()
    assert not link.streams
    assert not link._opened
    assert not link._closed
    assert link._waiting_bytes <= 16 * 2**20 + 8193
    # The next agent is told of, and nothing of those.
    stream = link.open("ipv4:10.0.0.1:1", b"c")
    told = []
    async for request in link.requests():
        told.append(request)
        if not link._messages and not link._opened:
            break
    assert [one.stream for request in told for one in request.opened] == [stream.number]
    assert not any(request.messages or request.closed for request in told)


async def test_many_streams_with_certificates_go_in_several_requests_before_their_messages():
    link = LeaderLink()
    streams = [link.open("ipv4:10.0.0.1:1", b"c" * 4096) for _ in range(1000)]
    for stream in streams:
        await link.forward(stream, b"\x0ah")
    told = []
    async for request in link.requests():
        told.append(request)
        if not link._messages:
            break
    known = set()
    for request in told:
        assert len(codec.encode_message(request)) < 2 * 2**20
        known.update(one.stream for one in request.opened)
        assert {one.stream for one in request.messages} <= known
    assert sum(len(request.messages) for request in told) == 1000


async def forward(rig, *requests):
    """What the controller answers to an ingest process that says this."""
    out = asyncio.Queue()
    for request in requests:
        out.put_nowait(request)

    async def say():
        while True:
            yield await out.get()

    answers = rpc.build_client(rpc.INGEST_SERVICE, rig.channel).forward(say())
    return out, answers


async def test_hostile_messages_are_left_out_and_counted_and_end_one_stream_alone(tmp_path):
    async with run_controller(tmp_path) as rig:
        inventory = build_node("n1")
        hello = codec.encode_message(ConnectRequest(message=Hello(incarnation=1, inventory=inventory)))
        builder = FrameBuilder()
        for stream, sequence in ((1, 1), (77, 5)):
            builder.add(stream, batch(sequence, generation=inventory.generation, gpus=len(inventory.gpus)))
        builder.add(1, batch(2, power_w=300.0, generation=inventory.generation, gpus=len(inventory.gpus)))
        out, answers = await forward(
            rig,
            ForwardRequest(
                opened=(ForwardedStream(stream=1), ForwardedStream(stream=2), ForwardedStream(stream=1)),
                messages=(
                    ForwardedMessage(stream=1, message=hello),
                    ForwardedMessage(stream=2, message=b"\xff\xff"),
                    ForwardedMessage(stream=3, message=b""),
                ),
            ),
        )
        messages, ended, frames = [], [], []

        async def hear():
            async for answer in answers:
                messages.extend(answer.messages)
                ended.extend(answer.ended)
                frames.extend(answer.frames)

        hearing = asyncio.create_task(hear())
        await wait_until(lambda: messages and ended)
        assert isinstance(codec.decode_message(ConnectResponse, messages[0].message).message, Welcome)
        assert [one.stream for one in ended] == [2]
        frame = builder.build(1)
        bad = TickBlock(readings=(Reading.POWER_W,), devices=8, batches=frame.blocks[0].batches, values=b"short")
        infinite = TickBlock(
            readings=frame.blocks[0].readings,
            host_readings=frame.blocks[0].host_readings,
            devices=frame.blocks[0].devices,
            batches=frame.blocks[0].batches[:48],
            values=b"\x00\x00\x00\x00\x00\x00\xf0\x7f" * (2 * len(inventory.gpus) + 1),
            idle=frame.blocks[0].idle[: len(inventory.gpus)],
        )
        out.put_nowait(ForwardRequest(frame=TickFrame(number=1, blocks=(bad, infinite))))
        out.put_nowait(ForwardRequest(frame=TickFrame(number=2, blocks=frame.blocks)))
        await wait_until(lambda: len(frames) == 2)
        assert set(frames[0].left_out) == {1, 77}
        assert frames[1].left_out == (77,)
        assert rig.controller.telemetry.tick_counts("n1") == (4, 0)
        assert rig.controller.agents.connected == 1
        families = {
            sample.labels.get("kind"): sample.value
            for family in rig.controller.metrics.collect()
            if family.name.startswith("eelgrid_ingest_refused")
            for sample in family.samples
        }
        assert families == {"stream": 1.0, "message": 1.0, "batch": 5.0}
        hearing.cancel()
