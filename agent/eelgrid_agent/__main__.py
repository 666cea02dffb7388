"""`eelgrid-agent`: the composition root.

Builds clocks, devices, nodes, streams and servers from the flags, runs them
until a signal, and turns every error that a user can cause into one line and an
exit code: 2 for a wrong flag, 1 for a failure. Knows everything and decides
nothing.
"""

import asyncio
import gc
import logging
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from eelgrid_agent.config import AgentConfig, ConfigError, parse
from eelgrid_agent.device import DeviceError
from eelgrid_agent.engine import NoEngine
from eelgrid_agent.host import MachineHost
from eelgrid_agent.loop import DriverThread, MachineLoop, Wheel
from eelgrid_agent.metrics import AgentCollector, MetricsError, MetricsServer, Page
from eelgrid_agent.node import Identity, Node, Survey, survey
from eelgrid_agent.node_api import NodeApi
from eelgrid_protos import __version__
from eelgrid_protos.rpc import NODE_SERVICE, handler
from eelgrid_protos.transport import ListenError, listen, server_options, standard_services

if TYPE_CHECKING:
    from eelgrid_agent.fleet import Links

__all__ = ["main"]

_LOG = logging.getLogger("eelgrid.agent")
# A driver that does not answer at the start must not keep the node from reporting itself.
FIRST_SURVEY_S = 10.0
STOP_S = 1.0

Drop = Callable[[Node], None]


class SystemClock:
    """Both clocks of this machine."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


@dataclass(frozen=True, slots=True)
class Hosted:
    """The nodes of this process, how they are ticked and what frees their devices."""

    nodes: tuple[Node, ...]
    schedule: Callable[[Drop], Callable[[], Awaitable[None]]]
    close: Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent until SIGTERM or SIGINT; returns the exit code."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        return _fail(error, 2)
    _log_to_stderr(verbose=config.verbose)
    from eelgrid_agent.simulation import FleetFileError, SpecError

    try:
        asyncio.run(_run(config))
    except (FleetFileError, SpecError) as error:
        return _fail(error, 2)
    except (ListenError, MetricsError, DeviceError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent: {error}\n")
    return code


def _log_to_stderr(*, verbose: bool) -> None:
    """key=value lines on stderr, once."""
    root = logging.getLogger("eelgrid")
    handler_ = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("time=%(asctime)s level=%(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler_.setFormatter(formatter)
    root.handlers[:] = [handler_]
    root.propagate = False
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


async def _run(config: AgentConfig) -> None:
    from eelgrid_agent.fleet import Links, open_channels

    clock = SystemClock()
    hosted = _simulated(config, clock) if config.simulate is not None else await _machine(config, clock)
    open_channel = open_channels(config.controller, tls=config.tls, insecure=config.insecure)
    # A forbidden or unusable address is the operator's to mend, so it fails here and not in the back-off.
    await open_channel().close()
    links = Links(hosted.nodes, open_channel, jitter=random.SystemRandom().random, tls=config.tls)
    tick = hosted.schedule(links.drop_stalled)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.callback(hosted.close)
        port = await _serve_api(config, hosted.nodes, clock, stack)
        metrics = _serve_metrics(config, hosted.nodes, links, clock, stack)
        # What was built so far lives until the end: the collector need not walk it again and again.
        gc.freeze()
        _LOG.info(
            "event=serving version=%s nodes=%d listen=%s metrics=%s controller=%s",
            __version__, len(hosted.nodes), _with_port(config.listen, port), _with_port(config.metrics, metrics),
            config.controller,
        )  # fmt: skip
        await _until(stop, tick(), links.run())
        _LOG.info("event=stopped")


async def _until(stop: asyncio.Event, *work: Awaitable[None]) -> None:
    """Runs the work until the stop; work that ends by itself is a fault and is raised."""
    tasks = [asyncio.ensure_future(item) for item in (*work, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_S)


async def _serve_api(config: AgentConfig, nodes: tuple[Node, ...], clock: SystemClock, stack: AsyncExitStack) -> int:
    """NodeService with health and reflection; returns the port."""
    server = grpc.aio.server(options=server_options())
    api = NodeApi({node.name: node for node in nodes}, clock)
    server.add_generic_rpc_handlers((handler(NODE_SERVICE, api),))
    health = await standard_services(server, (NODE_SERVICE,))
    port = await listen(server, config.listen, tls=config.tls, insecure=config.insecure, log=_LOG)
    await server.start()
    stack.push_async_callback(server.stop, 0.2)
    await health.set_serving(True)
    stack.push_async_callback(health.set_serving, False)
    return port


def _serve_metrics(
    config: AgentConfig, nodes: tuple[Node, ...], links: "Links", clock: SystemClock, stack: AsyncExitStack
) -> int:
    collector = AgentCollector(nodes, connections=lambda: links.connections_total, monotonic_ns=clock.monotonic_ns)
    page = Page(collector, ticks=lambda: sum(node.ticks_total for node in nodes), monotonic_ns=clock.monotonic_ns)
    server = MetricsServer(config.metrics, page, tls=config.tls, insecure=config.insecure)
    server.start()
    stack.callback(server.close)
    return server.port


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _simulated(config: AgentConfig, clock: SystemClock) -> Hosted:
    """The nodes of the fleet file: one goes through the NVML binding, several through the device port."""
    from eelgrid_agent.device import Device
    from eelgrid_agent.fleet import simulated_node
    from eelgrid_agent.simulation import FleetFileError, SimulatedNode, load_fleet

    assert config.simulate is not None
    specs = load_fleet(config.simulate)
    if not specs:
        raise FleetFileError(f"{config.simulate}: nodes: is empty; describe one node at least")
    devices: list[Device] = []
    nodes = []
    closers: list[Callable[[], None]] = []
    for index, spec in enumerate(specs):
        simulation = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=config.seed)
        device: Device = simulation
        if len(specs) == 1:
            from eelgrid_agent.nvml import NvmlDevice
            from eelgrid_agent.simulation import library

            library.install(simulation)
            device = NvmlDevice()
        devices.append(device)
        closers.append(device.close)
        nodes.append(
            simulated_node(
                simulation,
                device,
                spec=spec,
                clock=clock,
                draw_incarnation=_draw_incarnation,
                ticks_most=config.ticks_most(len(specs)),
                send_phase=index / len(specs),
            )
        )
    pairs = tuple(zip(nodes, devices, strict=True))

    def close() -> None:
        for closer in reversed(closers):
            closer()

    return Hosted(tuple(nodes), lambda drop: Wheel(pairs, clock=clock, stalled=drop).run, close)


async def _machine(config: AgentConfig, clock: SystemClock) -> Hosted:
    """The machine that we run on; without a driver it has no GPUs, says so and asks again."""
    from eelgrid_agent.nvml import NvmlDevice

    driver = DriverThread()
    device = NvmlDevice()
    asked = asyncio.wrap_future(driver.call(lambda: survey(device)))
    try:
        async with asyncio.timeout(FIRST_SURVEY_S):
            first = await asyncio.shield(asked)
    except TimeoutError:
        first = Survey(problem=f"the driver did not answer within {FIRST_SURVEY_S:g} s; see the kernel's log")
    assert isinstance(first, Survey)
    if first.problem:
        _LOG.warning("event=no_gpus reason=%r", first.problem)
    host = MachineHost()
    identity = Identity(
        node_name=config.node_name or host.name(), agent_version=__version__, pool=config.pool,
        labels=dict(config.labels),
    )  # fmt: skip
    node = Node(
        identity, host=host, engine=NoEngine(), clock=clock, draw_incarnation=_draw_incarnation,
        ticks_most=config.ticks_most(1), first=first,
    )  # fmt: skip

    def schedule(drop: Drop) -> Callable[[], Awaitable[None]]:
        return MachineLoop(node, device, clock=clock, driver=driver, stalled=drop).run

    def close() -> None:
        driver.call(device.close)
        driver.close()

    return Hosted((node,), schedule, close)


def _draw_incarnation() -> int:
    """Never 0, which readers could take for unset."""
    return random.SystemRandom().randrange(1, 2**63)


if __name__ == "__main__":
    sys.exit(main())
