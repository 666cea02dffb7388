"""`eelgrid-agent`: the composition root.

Builds clocks, devices, nodes, streams and servers from the flags, runs them
until a signal, and turns every error that a user can cause into one line and an
exit code: 2 for a flag, file or address that cannot be used, 1 for a failure.
Knows everything and decides nothing.
"""

import eelgrid_agent.lean_imports  # noqa: F401  # for its effect, before whatever imports asyncio or http.server

# isort: split
import asyncio
import logging
import random
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from eelgrid_agent.devices.port import DeviceError
from eelgrid_agent.metrics.access import MetricsError, WebConfigUnusable
from eelgrid_agent.metrics.collector import AgentCollector
from eelgrid_agent.metrics.server import MetricsEndpoint, ScrapeHandler
from eelgrid_agent.node.config import AgentConfig, AgentConfigError, parse_flags
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.node.node_service import NodeAuthorizer, NodeServicer
from eelgrid_agent.node.uplink import UplinkCertificates, UplinkPool, know_controllers, open_channels
from eelgrid_agent.settled_memory import settle_memory, use_one_arena
from eelgrid_protos import __version__
from eelgrid_protos.connection_limits import PeerGuard
from eelgrid_protos.log_lines import log_to_stderr
from eelgrid_protos.probes import ProbeServer
from eelgrid_protos.rpc import NODE_SERVICE, admit_everybody, build_handler
from eelgrid_protos.sockets import raise_descriptor_limit
from eelgrid_protos.transport import ListenError, listen_on_address, server_options, standard_services

if TYPE_CHECKING:
    from eelgrid_agent.composition import HostedNodes


_LOG = logging.getLogger("eelgrid.agent")
# What was changed on the devices is put back first, which takes up to `enforcement.END_S`.
STOP_S = 21.0


class SystemClock:
    """Both clocks of this machine."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent until SIGTERM or SIGINT, or one command (`mig`, `energy`, `lease`); returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:1]) == ["mig"]:
        from eelgrid_agent.cli.mig import run_mig_command

        return run_mig_command(arguments[1:])
    if list(arguments[:1]) == ["energy"]:
        from eelgrid_agent.cli.energy import run_energy_command

        return run_energy_command(arguments[1:])
    if list(arguments[:1]) == ["lease"]:
        from eelgrid_agent.cli.lease import run_lease_command

        return run_lease_command(arguments[1:])
    try:
        config = parse_flags(arguments)
    except AgentConfigError as error:
        return _fail(error, 2)
    _log_to_stderr(config.log_level)
    raise_descriptor_limit()
    use_one_arena()
    try:
        asyncio.run(_run(config))
    except _unusable_settings() as error:
        return _fail(error, 2)
    except _failures() as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


# Both are asked only once something was raised: an agent that runs should not hold what it has no use for.


def _unusable_settings() -> tuple[type[Exception], ...]:
    """What is wrong with a file or an address that the user gave; an address in use is one, as in the controller."""
    from eelgrid_agent.simulation.fault_file import FaultFileError
    from eelgrid_agent.simulation.spec import FleetFileError, SpecError

    return FaultFileError, FleetFileError, ListenError, MetricsError, SpecError, WebConfigUnusable


def _failures() -> tuple[type[Exception], ...]:
    """What cannot be had on this machine."""
    from eelgrid_agent.kubelet.pod_resources import PodResourcesError
    from eelgrid_agent.node.enforcement_loop import BudgetNotEnforceable
    from eelgrid_agent.node.lease_socket import LeaseSocketError

    return DeviceError, BudgetNotEnforceable, LeaseSocketError, PodResourcesError


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent: {error}\n")
    return code


def _log_to_stderr(level: str) -> None:
    """Logs to stderr, once: what is ours, since other libraries log to loggers of their own."""
    root = logging.getLogger("eelgrid")
    log_to_stderr(root, level.upper())
    root.propagate = False


async def _run(config: AgentConfig) -> None:
    clock = SystemClock()
    if config.simulate is not None:
        # A real node has no use for the simulation, nor a fleet for a driver in a child.
        from eelgrid_agent.simulated_composition import open_simulated_fleet

        hosted = open_simulated_fleet(config, clock, _draw_incarnation)
    else:
        from eelgrid_agent.composition import open_machine

        hosted = await open_machine(config, clock, _draw_incarnation)
    certificates = None if config.tls is None else UplinkCertificates(config.tls)
    addresses = config.controller.split(",")
    open_channel = open_channels(certificates=certificates, insecure=config.insecure, is_choice=len(addresses) > 1)
    # A forbidden or unusable address is the operator's to mend, so it fails here and not in the back-off.
    for address in addresses:
        await open_channel(address).close()
    links = UplinkPool(
        hosted.nodes,
        open_channel,
        controllers=know_controllers(addresses, certificates=certificates, insecure=config.insecure),
        jitter=random.SystemRandom().random,
        certificates=certificates,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.callback(hosted.close)
        door = NodeAuthorizer(
            config.roles, [node.name for node in hosted.nodes], now_s=time.time, monotonic_s=time.monotonic, log=_LOG
        )
        port = await _serve_api(config, hosted.nodes, door, clock, stack)
        metrics = _serve_metrics(config, hosted, links, clock, stack, door=door)
        settle_memory()
        _LOG.info(
            "event=serving version=%s nodes=%d listen=%s metrics=%s controller=%s",
            __version__,
            len(hosted.nodes),
            _with_port(config.listen, port),
            _with_port(config.metrics, metrics),
            config.controller,
        )
        await _until(stop, *hosted.work(links.drop_stalled), links.run())
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


async def _serve_api(
    config: AgentConfig, nodes: tuple[AgentNode, ...], door: NodeAuthorizer, clock: SystemClock, stack: AsyncExitStack
) -> int:
    """NodeService with health and reflection; returns the port."""
    server = grpc.aio.server(options=server_options())
    api = NodeServicer({node.name: node for node in nodes}, clock)
    guard = PeerGuard(log=_LOG)
    admit = admit_everybody if config.tls is None else door.admit
    front = guard.wrap_handlers(build_handler(NODE_SERVICE, api, admit=admit))
    health = await standard_services(front, (NODE_SERVICE,))
    server.add_generic_rpc_handlers((front,))
    port = await listen_on_address(
        server, config.listen, tls=config.tls, insecure=config.insecure, log=_LOG, guard=guard
    )
    stack.callback(asyncio.create_task(guard.run()).cancel)
    await server.start()
    stack.push_async_callback(server.stop, 0.2)
    await health.set_serving(True)
    stack.push_async_callback(health.set_serving, False)
    return port


def _serve_metrics(
    config: AgentConfig,
    hosted: "HostedNodes",
    links: UplinkPool,
    clock: SystemClock,
    stack: AsyncExitStack,
    *,
    door: NodeAuthorizer,
) -> int:
    nodes, worker = hosted.nodes, hosted.worker
    energy = nodes[0].energy
    collector = AgentCollector(
        nodes,
        connections=lambda: links.connections_total,
        monotonic_ns=clock.monotonic_ns,
        worker=worker,
        calls=hosted.calls,
        collection_s=lambda: hosted.collection_s,
        attribution=lambda: None if energy is None else energy.newest,
        refused_calls=lambda: door.refused_total,
        leases=hosted.leases,
    )
    page = ScrapeHandler(
        collector, ticks=lambda: sum(node.ticks_total for node in nodes), monotonic_ns=clock.monotonic_ns
    )
    server = MetricsEndpoint(
        config.metrics,
        page,
        tls=config.tls,
        insecure=config.insecure,
        web_config=config.web_config,
        host_names=config.metrics_hosts,
    )
    server.start()
    stack.callback(server.close)
    if config.probes:
        probes = ProbeServer(
            fault=lambda: _why_not(page, "/livez"), unready=lambda: _why_not(page, "/readyz"), log=_LOG
        )
        try:
            probes.start(config.probes)
        except OSError as error:
            reason = error.strerror or str(error)
            raise MetricsError(f"cannot answer probes on {config.probes}: {reason}; choose another --probes") from error
        stack.callback(probes.close)
    return server.port


def _why_not(page: ScrapeHandler, path: str) -> str:
    answer = page.build_response(path)
    return "" if answer.status == 200 else answer.body.decode().strip()


def _with_port(address: str, port: int) -> str:
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _draw_incarnation() -> int:
    """Never 0, which readers could take for unset."""
    return random.SystemRandom().randrange(1, 2**63)


if __name__ == "__main__":
    sys.exit(main())
