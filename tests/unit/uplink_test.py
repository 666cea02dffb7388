"""The uplink with a controller that plays along: what is said, in which order, and when."""

import asyncio
import time
from dataclasses import replace

from tests.fake_controller import EACH_SECOND, FAST, Agent, acknowledge_all, running, serving
from tests.waiting import wait_until

from eelgrid_agent.node.inventory import survey_devices
from eelgrid_agent.node.uplink import UplinkLimits, bound_backoff
from eelgrid_protos.codec import digest_message
from eelgrid_protos.faults import InvalidArgument, Unavailable
from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyStatus,
    Assignment,
    Cadence,
    GpuSetting,
    Hello,
    HelloReceived,
    Inventory,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    Resume,
    ResumeRequest,
    SampleBatch,
    Welcome,
)


async def test_hello_welcome_batch_and_acknowledgement():
    async with serving(acknowledge_all) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        hello = controller.of(Hello)[0]
        assert (hello.inventory.node_name, len(hello.inventory.gpus), hello.plan_epoch) == ("n", 2, 0)
        for expected in range(1, 4):
            agent.tick()
            await wait_until(lambda expected=expected: len(controller.of(SampleBatch)) == expected)
        await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        assert [batch.sequence for batch in controller.of(SampleBatch)] == [1, 2, 3]


async def test_what_was_not_acknowledged_goes_again_after_a_broken_stream():
    async def script(number, messages, reply):
        if number > 1:
            await acknowledge_all(number, messages, reply)
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
            if isinstance(message, SampleBatch) and message.sequence == 2:
                raise Unavailable("going away")

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: len(controller.of(SampleBatch)) == 1)
        agent.tick()
        await wait_until(lambda: controller.streams == 2 and agent.node.spool.unacknowledged_ticks == 0)
        assert [(number, b.sequence) for number, b in controller.heard if isinstance(b, SampleBatch)] == [
            (1, 1),
            (1, 2),
            (2, 1),
            (2, 2),
        ]
        hellos = controller.of(Hello)
        assert hellos[0].incarnation == hellos[1].incarnation
        assert agent.uplink.connections_total == 2
        assert "going away" in agent.reports[0]


async def test_an_acknowledgement_that_comes_twice_or_too_early_does_no_harm():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
            if isinstance(message, SampleBatch):
                for sequence in (message.sequence + 7, message.sequence, message.sequence, 0):
                    reply(Acknowledgement(sequence=sequence))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        for expected in range(1, 4):
            agent.tick()
            await wait_until(lambda expected=expected: len(controller.of(SampleBatch)) == expected)
            await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        assert controller.streams == 1


async def test_the_window_bounds_what_is_under_way_and_the_rest_waits():
    release = asyncio.Event()

    async def script(number, messages, reply):
        sequences = []
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=Cadence(send_interval_s=1.0, window=2)))
            if isinstance(message, SampleBatch):
                sequences.append(message.sequence)
                if sequences == [1, 2]:
                    await release.wait()
                if message.sequence >= 2:
                    reply(Acknowledgement(sequence=message.sequence))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        for expected in (1, 2, 2, 2, 2):
            agent.tick()
            await wait_until(lambda expected=expected: len(controller.of(SampleBatch)) == expected)
        assert (agent.node.spool.in_flight, agent.node.spool.waiting_ticks) == (2, 3)
        release.set()
        await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        assert [len(batch.time_ns) for batch in controller.of(SampleBatch)] == [1, 1, 3]


async def test_a_full_spool_says_what_it_dropped():
    async with serving(acknowledge_all) as controller:
        agent = Agent(controller.port, ticks_most=3)
        agent.tick(10)
        async with running(agent):
            await wait_until(lambda: len(controller.of(NodeEvent)) == 1 and agent.node.spool.unacknowledged_ticks == 0)
        assert controller.of(SampleBatch)[0].dropped_ticks == 7
        assert controller.of(NodeEvent)[0].kind is NodeEventKind.SAMPLES_DROPPED
        assert "7 ticks" in controller.of(NodeEvent)[0].detail


async def test_the_cadence_changes_at_run_time():
    change = asyncio.Event()

    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
            if isinstance(message, SampleBatch):
                reply(Acknowledgement(sequence=message.sequence))
                reply(Cadence(sample_interval_s=1.0, send_interval_s=5.0, window=3))
                change.set()

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: agent.node.cadence.send_interval_s == 5.0)
        agent.tick(1)
        await wait_until(lambda: len(controller.of(SampleBatch)) == 2)
        agent.tick(3)
        await asyncio.sleep(0.05)
        assert len(controller.of(SampleBatch)) == 2
        agent.tick(1)
        await wait_until(lambda: len(controller.of(SampleBatch)) == 3)
        assert len(controller.of(SampleBatch)[-1].time_ns) == 4


async def test_a_plan_is_answered_at_once_and_again_on_a_new_stream():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                uuid = message.inventory.gpus[0].uuid
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
                if number == 1:
                    work = Assignment(workload_id="w", replica=0, gpu_uuids=(uuid,), gpu_milli=500)
                    setting = GpuSetting(gpu_uuid=uuid, power_limit_w=100.0)
                    reply(NodePlan(node_name="n", epoch=4, lease_s=60.0, assignments=(work,), gpu_settings=(setting,)))
            if isinstance(message, PlanApplied) and number == 1:
                raise Unavailable("lost the answer")

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: len(controller.of(PlanApplied)) == 2)
        first, again = controller.of(PlanApplied)
        assert first == again
        assert (first.epoch, first.status) == (4, ApplyStatus.OBSERVED)
        assert controller.of(Hello)[1].plan_epoch == 4
        agent.tick(3)
        power_w = agent.node.newest_batch().gpu_columns[0].values
        assert power_w[0] > power_w[1], "the assignment is load on the simulated GPU"


async def test_a_lost_gpu_is_reported_at_once_and_its_return_too():
    async with serving(acknowledge_all) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        uuid = agent.node.gpu_uuids[0]
        agent.simulation.faults.lose_gpu(uuid)
        agent.tick()
        await wait_until(lambda: [e.kind for e in controller.of(NodeEvent)] == [NodeEventKind.GPU_LOST])
        agent.simulation.faults.restore_gpu(uuid)
        agent.tick()
        await wait_until(lambda: NodeEventKind.GPU_RETURNED in [e.kind for e in controller.of(NodeEvent)])
        assert {e.gpu_uuid for e in controller.of(NodeEvent)} == {uuid}


async def test_a_changed_inventory_goes_before_the_batches_that_follow_it():
    async with serving(acknowledge_all) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        found = survey_devices(agent.simulation)
        assert not agent.node.update_inventory(found)
        assert agent.node.update_inventory(type(found)(gpus=found.gpus[:1], driver_version=found.driver_version))
        agent.tick()
        await wait_until(lambda: len(controller.of(SampleBatch)) == 1)
        kinds = [type(message) for _, message in controller.heard]
        assert kinds.index(Inventory) < kinds.index(SampleBatch)
        assert controller.of(Inventory)[0].generation == controller.of(SampleBatch)[0].inventory_generation == 2


def welcoming(*, spread_s=0.0, until_number=10**9):
    """A script of a controller that takes Resume and ends streams after their first batch."""

    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello | Resume):
                held = 0 if number == 1 else 1
                reply(
                    Welcome(acknowledged_sequence=held, cadence=EACH_SECOND, resumes=True, reconnect_spread_s=spread_s)
                )
            if isinstance(message, SampleBatch):
                reply(Acknowledgement(sequence=message.sequence))
                if number < until_number:
                    raise Unavailable("going away")

    return script


async def test_a_node_that_did_not_change_comes_back_by_its_fingerprint():
    async with serving(welcoming(until_number=2)) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: controller.streams == 2 and agent.node.connected)
        (resume,) = controller.of(Resume)
        assert (resume.node_name, resume.incarnation) == ("n", controller.of(Hello)[0].incarnation)
        assert resume.inventory_digest == digest_message(agent.node.inventory)
        assert len(controller.of(Hello)) == 1


async def test_an_inventory_that_is_wanted_follows_on_the_same_stream():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Resume):
                reply(HelloReceived(inventory_wanted=True))
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, resumes=True))
                if number == 1:
                    raise Unavailable("going away")

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: controller.streams == 2 and agent.node.connected)
        assert [(number, type(one)) for number, one in controller.heard if isinstance(one, Hello | Resume)] == [
            (1, Hello),
            (2, Resume),
            (2, Hello),
        ]


async def test_a_controller_that_knows_no_resume_gets_hello_the_next_time():
    """An older one took over: to it a Resume is a message that says nothing."""

    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Resume):
                raise InvalidArgument("hello is not the first message")
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, resumes=number == 1))
                if number == 1:
                    raise Unavailable("going away")

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: controller.streams == 3 and agent.node.connected)
        assert [type(one) for _, one in controller.heard if isinstance(one, Hello | Resume)] == [Hello, Resume, Hello]


async def test_a_stream_is_opened_again_where_the_leader_behind_it_was_lost():
    """As an ingest process asks; the connection stays, and what was not acknowledged goes again after the next Welcome."""
    late = asyncio.Event()

    async def script(number, messages, reply):
        openings = 0
        async for message in messages:
            if isinstance(message, Hello | Resume):
                assert message.accepts_resume_request
                openings += 1
                if openings == 2:
                    # Of the former leader: the agent is not welcomed yet.
                    reply(Acknowledgement(sequence=2))
                    await late.wait()
                reply(Welcome(acknowledged_sequence=openings - 1, cadence=EACH_SECOND, resumes=True))
            if isinstance(message, SampleBatch):
                if openings == 2:
                    reply(Acknowledgement(sequence=message.sequence))
                elif message.sequence == 2:
                    reply(ResumeRequest(leader_within_s=20.0))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        for expected in (1, 2):
            agent.tick()
            await wait_until(lambda expected=expected: len(controller.of(SampleBatch)) == expected)
        await wait_until(lambda: controller.of(Resume))
        assert not agent.node.connected
        assert not agent.node.is_stalled(now_ns=10**30)
        assert agent.node.spool.unacknowledged_ticks == 2
        agent.tick()
        assert len(controller.of(SampleBatch)) == 2
        late.set()
        await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        assert [batch.sequence for batch in controller.of(SampleBatch)] == [1, 2, 2, 3]
        assert (controller.streams, agent.uplink.connections_total) == (1, 1)


async def test_a_stream_that_no_leader_takes_in_time_is_left_and_hello_follows_on_the_next():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello) and number == 1:
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, resumes=True))
                reply(ResumeRequest(leader_within_s=0.1))
            elif isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, resumes=True))

    limits = replace(FAST, welcome_s=0.2)
    async with serving(script) as controller, running(Agent(controller.port, limits=limits)) as agent:
        await wait_until(lambda: controller.streams == 2 and agent.node.connected)
        assert [type(one) for _, one in controller.heard] == [Hello, Resume, Hello]
        assert any("did not answer" in reason for reason in agent.reports)


async def test_who_was_told_that_hello_is_there_waits_for_its_turn():
    release = asyncio.Event()

    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(HelloReceived(ahead=1000))
                await release.wait()
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))

    limits = replace(FAST, welcome_s=0.5)
    async with serving(script) as controller, running(Agent(controller.port, limits=limits)) as agent:
        await wait_until(lambda: controller.streams == 1)
        await asyncio.sleep(3 * limits.welcome_s)
        assert (controller.streams, agent.reports) == (1, [])
        release.set()
        await wait_until(lambda: agent.node.connected)


async def test_a_fleet_comes_back_over_the_time_that_it_was_told():
    """Its share of 40 s is half a second here, of the back-off alone it would be a thousandth of that."""
    async with (
        serving(welcoming(spread_s=40.0)) as controller,
        running(Agent(controller.port, jitter=lambda: 0.0125)) as agent,
    ):
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: agent.reports)
        ended_s = time.monotonic()
        await wait_until(lambda: controller.streams == 2)
        assert time.monotonic() - ended_s >= 0.4


def test_the_longer_a_controller_is_away_the_longer_its_agents_wait_but_not_past_the_spread():
    limits = UplinkLimits()
    unknown = [bound_backoff(limits, failures, None) for failures in range(20)]
    assert unknown[:4] == [0.5, 1.0, 2.0, 4.0]
    assert unknown[-1] == 30.0
    assert max(bound_backoff(limits, failures, 0.3) for failures in range(100_000)) == 5.0, "a small fleet"
    assert [bound_backoff(limits, failures, 12.0) for failures in (0, 4, 5, 99)] == [0.5, 8.0, 12.0, 12.0]
    assert bound_backoff(limits, 99, 300.0) == 30.0, "no controller asks for more"
