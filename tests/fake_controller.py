"""A controller that does what a test's script says, and an agent whose time stands still, over loopback streams."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc.aio

from eelgrid_agent.node.inventory import read_each_gpu, survey_devices
from eelgrid_agent.node.uplink import Uplink, UplinkLimits, open_channels
from eelgrid_agent.node.workload_engine import SimulatedEngine
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec
from eelgrid_protos.controller_addresses import ControllerAddresses
from eelgrid_protos.messages import Acknowledgement, Cadence, ConnectResponse, Hello, SampleBatch, Welcome
from eelgrid_protos.rpc import AGENT_SERVICE, build_handler
from eelgrid_protos.transport import listen_on_address, server_options
from tests.builders.agent import ManualClock, build_agent_node, build_devices

SECOND = 1_000_000_000
FAST = UplinkLimits(backoff_first_s=0.02, backoff_most_s=0.05, welcome_s=1.0, good_s=5.0, tls_check_s=0.02)
EACH_SECOND = Cadence(sample_interval_s=1.0, send_interval_s=1.0, window=8)


class FakeController:
    """Serves what `script` says for each stream: a coroutine given the stream number, the requests and a reply."""

    def __init__(self, script):
        self.script = script
        self.streams = 0
        self.open = set()
        self.heard = []

    async def connect(self, requests, context):
        del context
        self.streams += 1
        number = self.streams
        self.open.add(number)
        replies = asyncio.Queue()

        async def messages():
            async for request in requests:
                self.heard.append((number, request.message))
                yield request.message

        async def act():
            try:
                await self.script(number, messages(), replies.put_nowait)
                replies.put_nowait(None)
            except Exception as error:  # noqa: BLE001  # becomes the status
                replies.put_nowait(error)

        task = asyncio.ensure_future(act())
        try:
            while (reply := await replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield ConnectResponse(message=reply)
        finally:
            self.open.discard(number)
            task.cancel()

    def of(self, kind):
        return [message for _, message in self.heard if isinstance(message, kind)]


async def acknowledge_all(number, messages, reply, cadence=EACH_SECOND):
    held = 0
    async for message in messages:
        if isinstance(message, Hello):
            reply(Welcome(acknowledged_sequence=held, cadence=cadence))
        elif isinstance(message, SampleBatch):
            reply(Acknowledgement(sequence=message.sequence))


class Agent:
    """A node whose time stands still unless it is told to tick."""

    def __init__(self, *ports, ticks_most=100, tls_version=None, limits=None, jitter=lambda: 1.0):
        self.clock = ManualClock(epoch_ns=1_700_000_000 * SECOND)
        self.simulation = build_devices(self.clock, gpus=(GpuSpec(product="openb-g2", model="G2"),) * 2)
        first = survey_devices(self.simulation)
        engine = SimulatedEngine(
            first.gpus,
            lambda uuid, ratio, memory: self.simulation.set_load(
                uuid, GpuLoad(utilization_ratio=ratio, memory_bytes=memory)
            ),
        )
        incarnations = iter(range(1, 1000))
        self.node = build_agent_node(
            self.simulation,
            self.clock,
            engine=engine,
            draw_incarnation=lambda: next(incarnations),
            ticks_most=ticks_most,
            first=first,
        )
        self.reports = []
        self.uplink = Uplink(
            self.node,
            open_channels(certificates=None, insecure=False, is_choice=len(ports) > 1),
            controllers=ControllerAddresses([f"127.0.0.1:{port}" for port in ports]),
            gate=asyncio.Semaphore(1),
            jitter=jitter,
            report=self.reports.append,
            limits=limits or FAST,
            tls_version=tls_version,
        )

    def tick(self, count=1):
        for _ in range(count):
            self.clock.now_ns += SECOND
            self.node.record_tick(read_each_gpu(self.simulation, self.node.gpu_uuids), monotonic_ns=self.clock.now_ns)
            if self.node.is_stalled(now_ns=self.clock.now_ns):
                self.uplink.drop_connection("no acknowledgement in time")


@asynccontextmanager
async def serving(script, port=0):
    controller = FakeController(script)
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(AGENT_SERVICE, controller),))
    controller.port = await listen_on_address(
        server, f"127.0.0.1:{port}", tls=None, insecure=False, log=logging.getLogger("test")
    )
    await server.start()
    try:
        yield controller
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(agent):
    task = asyncio.ensure_future(agent.uplink.run())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.wait({task})
