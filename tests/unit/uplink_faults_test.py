"""The uplink with a controller that is slow, gone, forgetful or wrong."""

import asyncio
import gc

import grpc.aio
import pytest
from tests.fake_controller import EACH_SECOND, Agent, acknowledge_all, running, serving
from tests.waiting import wait_until

from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import Hello, SampleBatch, Welcome


async def test_a_controller_that_never_acknowledges_is_left():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: len(controller.of(SampleBatch)) == 1)
        agent.tick(32)
        await wait_until(lambda: controller.streams == 2)
        assert "no acknowledgement in time" in agent.reports[0]
        await wait_until(lambda: controller.open == {2})


async def test_a_controller_that_claims_too_much_meets_another_incarnation():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                claimed = 99 if number == 1 else 0
                reply(Welcome(acknowledged_sequence=claimed, cadence=EACH_SECOND))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        first, second = controller.of(Hello)
        assert first.incarnation != second.incarnation


@pytest.mark.parametrize("silence", ["says nothing", "hangs up"])
async def test_no_welcome_means_another_try(silence):
    async def script(number, messages, reply):
        if number > 1:
            await acknowledge_all(number, messages, reply)
        elif silence == "says nothing":
            await asyncio.sleep(30)

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        assert controller.streams == 2
        assert agent.reports


async def test_a_controller_that_comes_later_is_found():
    async with serving(acknowledge_all) as gone:
        port = gone.port
    agent = Agent(port)
    async with running(agent):
        await wait_until(lambda: len(agent.reports) >= 2)
        agent.tick(3)
        async with serving(acknowledge_all, port=port) as controller:
            await wait_until(lambda: agent.node.connected and agent.node.spool.unacknowledged_ticks == 0)
            assert sum(len(batch.time_ns) for batch in controller.of(SampleBatch)) == 3


async def test_changed_certificates_make_a_new_stream_before_the_old_one_ends():
    version = 1
    overlap = []

    async def script(number, messages, reply):
        if number == 2:
            overlap.append(set(controller.open))
        await acknowledge_all(number, messages, reply)

    async with serving(script) as controller, running(Agent(controller.port, tls_version=lambda: version)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.tick()
        await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        await asyncio.sleep(0.06)
        assert controller.streams == 1
        version = 2
        await wait_until(lambda: controller.open == {2})
        assert overlap == [{1, 2}]
        agent.tick()
        await wait_until(lambda: agent.node.spool.unacknowledged_ticks == 0)
        assert [n for n, m in controller.heard if isinstance(m, SampleBatch)] == [1, 2]


async def test_broken_streams_leave_nothing_behind():
    """Channels are let go rather than closed, so that nothing may refer to one whose stream is over."""

    async def script(number, messages, reply):
        if number <= 30:
            async for message in messages:
                if isinstance(message, Hello):
                    reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
                    raise Unavailable("going away")
        await acknowledge_all(number, messages, reply)

    # Of tests before this one; they are not ours to count.
    earlier = {id(one) for one in gc.get_objects() if issubclass(type(one), grpc.aio.Channel)}
    async with serving(script) as controller:
        agent = Agent(controller.port)
        async with running(agent):
            await wait_until(lambda: controller.streams == 31 and agent.node.connected)

            def left():
                gc.collect()
                ours = [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task)]
                channels = [one for one in gc.get_objects() if issubclass(type(one), grpc.aio.Channel)]
                return len(ours), len([one for one in channels if id(one) not in earlier])

            await wait_until(lambda: max(left()) <= 1)
