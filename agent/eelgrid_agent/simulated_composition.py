"""Composition of simulated nodes: those of a fleet file, with their devices in the agent's own process.

Apart from `composition`, since a real node loads neither the simulation nor the driver's binding. No decisions.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from eelgrid_agent.composition import (
    DropStream,
    HostedNodes,
    open_leases,
    open_processes,
    open_slurm_node,
    serve_leases,
    watch_jobs,
)
from eelgrid_agent.devices.host import SimulatedHost
from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import CallLatencies, ControlPort, DevicePort
from eelgrid_agent.energy.anomalies import AnomalyDetector
from eelgrid_agent.energy.node_energy import (
    AttributionSources,
    NodeEnergy,
)
from eelgrid_agent.energy.process_owners import ProcessOwnerResolver
from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.guard.events import DriverOrigin
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.enforce.mig.mig_service import MigService, NodeService
from eelgrid_agent.enforce.power import PowerExecutor
from eelgrid_agent.enforce.rules import GuardLimits, LocalPolicy
from eelgrid_agent.engine.port import ProcessEngine
from eelgrid_agent.engine.readiness import GpuReadiness
from eelgrid_agent.metrics.collector import time_calls
from eelgrid_agent.node.config import ENERGY_WINDOW_S, AgentConfig
from eelgrid_agent.node.enforcement_loop import (
    BudgetNotEnforceable,
    Enforcement,
    InlineEnforcementLoop,
    check_budget_reach,
)
from eelgrid_agent.node.inventory import NodeIdentity, SequentialReader, survey_devices
from eelgrid_agent.node.leader_terms import LEADER_FILE, LEADER_RECORD, LeaderTerms
from eelgrid_agent.node.loop import (
    QuestionsInPlace,
    SimulatedNodesLoop,
    run_process_engine,
)
from eelgrid_agent.node.node import AgentClock, AgentNode
from eelgrid_agent.node.workload_engine import SimulatedEngine
from eelgrid_agent.simulation import nvml_library
from eelgrid_agent.simulation.fault_file import FaultFile
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import FleetFileError, GpuLoad, NodeSpec, load_fleet
from eelgrid_agent.state_files import (
    MemoryState,
    StateDirectoryError,
    StateFile,
    lock_state_directory,
)
from eelgrid_protos import __version__, catalogue
from eelgrid_protos.values import dataclass

if TYPE_CHECKING:
    from eelgrid_agent.engine.local import LocalEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAgent:
    """One simulated node and what carries out its guard's orders."""

    node: AgentNode
    enforcement: Enforcement
    layouts: MigService


def _identify(spec: NodeSpec, *, runs_processes: bool, sets_limits: bool) -> NodeIdentity:
    return NodeIdentity(
        node_name=spec.node_name,
        agent_version=__version__,
        pool=spec.pool,
        labels=spec.labels,
        simulated=True,
        topology=spec.topology,
        runs_processes=runs_processes,
        model_data=spec.model_data,
        sets_limits=sets_limits,
    )


def build_simulated_node(
    simulation: SimulatedNode,
    device: DevicePort,
    *,
    spec: NodeSpec,
    clock: AgentClock,
    draw_incarnation: Callable[[], int],
    control: ControlPort,
    ticks_most: int,
    send_phase: float,
    local: LocalPolicy | None = None,
    has_control: bool = True,
    energy: NodeEnergy | None = None,
    energy_window_s: float = ENERGY_WINDOW_S,
    processes: ProcessEngine | None = None,
    leases: DeviceLeases | None = None,
    service: NodeService | None = None,
    terms: LeaderTerms | None = None,
) -> "SimulatedAgent":
    """Builds a node whose work is load on simulated GPUs; `device` and `control` are the ports to read and change them.

    Its journals are in memory, since its devices end with the process.
    """
    first = survey_devices(device)
    engine = SimulatedEngine(
        (gpu.identity for gpu in simulation.devices),
        lambda uuid, ratio, memory_bytes: simulation.set_load(
            uuid, GpuLoad(utilization_ratio=ratio, memory_bytes=memory_bytes)
        ),
    )
    host = SimulatedHost(
        cpu_milli=spec.cpu_milli, memory_bytes=spec.memory_bytes, load=engine.host_load, monotonic_ns=clock.monotonic_ns
    )
    guard = Guard(spec.node_name, has_control=has_control, local=local, limits=GuardLimits().speed_up(spec.hurry))
    node = AgentNode(
        _identify(spec, runs_processes=processes is not None, sets_limits=has_control),
        host=host,
        engine=engine,
        clock=clock,
        draw_incarnation=draw_incarnation,
        ticks_most=ticks_most,
        first=first,
        send_phase=send_phase,
        guard=guard,
        energy=energy,
        outbox=EnergyOutbox(
            OutboxState(incarnation=draw_incarnation()),
            by_plan=energy is None,
            length_s=energy_window_s,
            phase=send_phase,
        ),
        processes=processes,
        readiness=None if processes is None else GpuReadiness(),
        terms=terms,
    )
    if leases is not None:
        leases.list_gpus, node.list_leases = lambda: node.inventory.gpus, leases.list_external
    enforcer = PowerExecutor(control, MemoryState(()), origin=lambda: DriverOrigin(boot_id=host.boot_id))
    layouts = _simulated_layouts(device, control, host, clock, leases=leases, service=service)
    enforcement = Enforcement(node, enforcer, looking=SequentialReader(device), clock=clock)
    return SimulatedAgent(node=node, enforcement=enforcement, layouts=layouts)


def _simulated_layouts(
    device: DevicePort,
    control: ControlPort,
    host: SimulatedHost,
    clock: AgentClock,
    *,
    leases: DeviceLeases | None,
    service: NodeService | None,
) -> MigService:
    return MigService(
        device,
        control,
        MemoryState(()),
        boot_id=lambda: host.boot_id or "simulated",
        sleep=lambda _: None,
        monotonic_s=lambda: clock.monotonic_ns() / 1e9,
        wall_ns=clock.wall_ns,
        leases=leases,
        service=service,
    )


def open_simulated_fleet(config: AgentConfig, clock: AgentClock, incarnation: Callable[[], int]) -> HostedNodes:
    """Opens the nodes of the fleet file: a single one through the NVML binding, several through the device port.

    Raises FleetFileError, SpecError and BudgetNotEnforceable.
    """
    assert config.simulate is not None
    specs = load_fleet(config.simulate)
    if not specs:
        raise FleetFileError(f"{config.simulate}: nodes: is empty; describe one node at least")
    budget_w = config.power_budget_w
    local = LocalPolicy(power_budget_w=budget_w, enforce=budget_w is not None)
    agents: list[SimulatedAgent] = []
    simulations, devices = list[SimulatedNode](), list[DevicePort]()
    calls = CallLatencies()
    stack = ExitStack()
    served, kept_leases = list[Callable[[], tuple[Awaitable[None], ...]]](), list[DeviceLeases]()
    terms = LeaderTerms(None if config.state is None else StateFile(config.state / LEADER_FILE, LEADER_RECORD))
    for index, spec in enumerate(specs):
        processes, leases = _open_simulated_processes(config, spec.node_name, clock, stack)
        simulation = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=config.seed)
        simulations.append(simulation)
        device, control = _ports(simulation, alone=len(specs) == 1)
        if len(specs) == 1:
            device = time_calls(device, calls, monotonic_ns=clock.monotonic_ns)
        devices.append(device)
        agents.append(
            build_simulated_node(
                simulation,
                device,
                spec=spec,
                clock=clock,
                draw_incarnation=incarnation,
                control=control,
                ticks_most=config.ticks_most(len(specs)),
                send_phase=index / len(specs),
                local=local,
                has_control=not config.observe_only,
                energy=_energy(config, spec, processes) if len(specs) == 1 else None,
                energy_window_s=config.energy_window_s,
                processes=processes,
                leases=leases,
                service=open_slurm_node(config, device, None) if len(specs) == 1 else None,
                terms=terms,
            )
        )
        if leases is not None:
            kept_leases.append(leases)
            served.append(partial(serve_leases, config, leases, agents[-1].node, alone=len(specs) == 1))
        check_budget_reach(budget_w, spec.node_name, agents[-1].node.inventory.gpus)
    pairs = tuple((agent.node, device) for agent, device in zip(agents, devices, strict=True))
    kept = tuple((agent.enforcement, agent.node, agent.layouts) for agent in agents)

    def close() -> None:
        for device in reversed(devices):
            device.close()
        stack.close()

    followed = () if config.faults is None else (FaultFile(config.faults, simulations),)

    def work(drop: DropStream) -> tuple[Awaitable[None], ...]:
        wheel, keeper = SimulatedNodesLoop(pairs, clock=clock, stalled=drop), InlineEnforcementLoop(kept, clock=clock)
        # A thousand simulated nodes that looked twenty times a second would have no time for anything else.
        runners = ((node, device) for node, device in pairs if node.runs_processes)
        processes = (run_process_engine(node, QuestionsInPlace(device)) for node, device in runners)
        jobs = watch_jobs(config, *(node for node, _ in pairs))
        leased = (work for serve in served for work in serve())
        return wheel.run(), keeper.run(), *processes, *jobs, *leased, *(faults.follow_file() for faults in followed)

    nodes = tuple(agent.node for agent in agents)
    return HostedNodes(nodes=nodes, work=work, close=close, calls=calls, leases=tuple(kept_leases))


def _open_simulated_processes(
    config: AgentConfig, node_name: str, clock: AgentClock, stack: ExitStack
) -> tuple["LocalEngine | None", DeviceLeases | None]:
    """The processes of a simulated node, and the leases of its devices where anybody may ask for them."""
    if not config.run_processes or config.state is None:
        return None, None if config.lease_socket is None else open_leases(None, clock)
    folder = config.state / quote(node_name, safe="")
    try:
        stack.enter_context(lock_state_directory(folder, "eelgrid-agent"))
    except StateDirectoryError as error:
        raise BudgetNotEnforceable(str(error)) from error
    leases = open_leases(folder, clock)
    return open_processes(config, folder, leases=leases), leases


def _energy(config: AgentConfig, spec: NodeSpec, processes: ProcessEngine | None) -> NodeEnergy:
    """Of a simulated node; only where it runs processes are their ids this machine's, and else nobody is looked up."""
    sources = AttributionSources(ProcessOwnerResolver() if processes else None, slurm_folder=config.slurm_folder)
    return NodeEnergy(catalogue.load_catalogue(), sources, watch=AnomalyDetector(hurry=spec.hurry))


def _ports(simulation: SimulatedNode, *, alone: bool) -> tuple[DevicePort, ControlPort]:
    """How a simulated node is asked; the binding has room for one."""
    if not alone:
        return simulation, simulation
    nvml_library.install_library(simulation)
    device = NvmlDevice()
    return device, NvmlControl(device)
