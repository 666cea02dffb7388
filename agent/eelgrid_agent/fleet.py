"""Simulated nodes of one process: how they are made from a fleet file, and what carries out their guards' orders.

Owns that composition. Must not know streams, signals or the process.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from eelgrid_agent.attribution.anomalies import AnomalyWatch
from eelgrid_agent.attribution.node_energy import NodeEnergy
from eelgrid_agent.attribution.outbox import EnergyOutbox, Kept
from eelgrid_agent.attribution.sources import Sources
from eelgrid_agent.budget_reach import check_reach
from eelgrid_agent.config import ENERGY_WINDOW_S, AgentConfig
from eelgrid_agent.device import Control, Device
from eelgrid_agent.enforcement import Enforcement, InPlaceKeeper
from eelgrid_agent.engine import SimulatedEngine
from eelgrid_agent.guard import Guard, GuardLimits, LocalPolicy
from eelgrid_agent.guard.events import Origin
from eelgrid_agent.host import SimulatedHost
from eelgrid_agent.hosted import Drop, Hosted
from eelgrid_agent.loop import Wheel
from eelgrid_agent.metrics import TimedDevice
from eelgrid_agent.mig.journal import MemoryJournal as LayoutMemoryJournal
from eelgrid_agent.mig.keeper import LayoutKeeper
from eelgrid_agent.node import Clock, Node
from eelgrid_agent.nvml import NvmlDevice
from eelgrid_agent.nvml.control import NvmlControl
from eelgrid_agent.power import Enforcer, MemoryJournal
from eelgrid_agent.simulation import FaultFile, FleetFileError, GpuLoad, NodeSpec, SimulatedNode, library, load_fleet
from eelgrid_agent.survey import Identity, InPlace, survey
from eelgrid_agent.worker.latency import Latencies
from eelgrid_protos import __version__, catalogue

__all__ = ["SimulatedAgent", "open_fleet", "simulated_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAgent:
    """One simulated node and what carries out its guard's orders."""

    node: Node
    enforcement: Enforcement
    layouts: LayoutKeeper


def simulated_node(
    simulation: SimulatedNode, device: Device, *, spec: NodeSpec, clock: Clock, draw_incarnation: Callable[[], int],
    control: Control, ticks_most: int, send_phase: float, local: LocalPolicy | None = None, has_control: bool = True,
    energy: NodeEnergy | None = None, energy_window_s: float = ENERGY_WINDOW_S,
) -> "SimulatedAgent":  # fmt: skip
    """A node whose work is load on simulated GPUs; `device` and `control` are how these are read and changed.

    Its journals are in memory, since its devices end with the process.
    """
    first = survey(device)
    engine = SimulatedEngine(
        (gpu.identity for gpu in simulation.devices),
        lambda uuid, ratio, memory_bytes: simulation.set_load(
            uuid, GpuLoad(utilization_ratio=ratio, memory_bytes=memory_bytes)
        ),
    )
    identity = Identity(
        node_name=spec.node_name,
        agent_version=__version__,
        pool=spec.pool,
        labels=spec.labels,
        simulated=True,
        topology=spec.topology,
    )
    host = SimulatedHost(
        cpu_milli=spec.cpu_milli, memory_bytes=spec.memory_bytes, load=engine.host_load, monotonic_ns=clock.monotonic_ns
    )
    guard = Guard(spec.node_name, has_control=has_control, local=local, limits=GuardLimits().hurried(spec.hurry))
    node = Node(
        identity, host=host, engine=engine, clock=clock, draw_incarnation=draw_incarnation, ticks_most=ticks_most,
        first=first, send_phase=send_phase, guard=guard, energy=energy,
        outbox=EnergyOutbox(
            Kept(incarnation=draw_incarnation()), by_plan=energy is None, length_s=energy_window_s, phase=send_phase
        ),
    )  # fmt: skip
    enforcer = Enforcer(control, MemoryJournal(), origin=lambda: Origin(boot_id=host.boot_id))
    layouts = LayoutKeeper(
        device, control, LayoutMemoryJournal(), boot_id=lambda: host.boot_id or "simulated", sleep=lambda _: None,
        monotonic_s=lambda: clock.monotonic_ns() / 1e9, wall_ns=clock.wall_ns,
    )  # fmt: skip
    enforcement = Enforcement(node, enforcer, looking=InPlace(device), clock=clock)
    return SimulatedAgent(node=node, enforcement=enforcement, layouts=layouts)


def open_fleet(config: AgentConfig, clock: Clock, incarnation: Callable[[], int]) -> Hosted:
    """The nodes of the fleet file: one goes through the NVML binding, several through the device port.

    Raises FleetFileError, SpecError and NotEnforceable.
    """
    assert config.simulate is not None
    specs = load_fleet(config.simulate)
    if not specs:
        raise FleetFileError(f"{config.simulate}: nodes: is empty; describe one node at least")
    budget_w = config.power_budget_w
    local = LocalPolicy(power_budget_w=budget_w, enforce=budget_w is not None)
    agents: list[SimulatedAgent] = []
    simulations: list[SimulatedNode] = []
    devices: list[Device] = []
    calls = Latencies()
    for index, spec in enumerate(specs):
        simulation = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=config.seed)
        simulations.append(simulation)
        device, control = _ports(simulation, alone=len(specs) == 1)
        if len(specs) == 1:
            device = TimedDevice(device, calls, monotonic_ns=clock.monotonic_ns)
        devices.append(device)
        agents.append(
            simulated_node(
                simulation, device, spec=spec, clock=clock, draw_incarnation=incarnation, control=control,
                ticks_most=config.ticks_most(len(specs)), send_phase=index / len(specs), local=local,
                has_control=not config.observe_only,
                energy=_energy(spec.hurry) if len(specs) == 1 else None,
                energy_window_s=config.energy_window_s,
            )
        )  # fmt: skip
        check_reach(budget_w, spec.node_name, agents[-1].node.inventory.gpus)
    pairs = tuple((agent.node, device) for agent, device in zip(agents, devices, strict=True))
    kept = tuple((agent.enforcement, agent.node, agent.layouts) for agent in agents)

    def close() -> None:
        for device in reversed(devices):
            device.close()

    followed = () if config.faults is None else (FaultFile(config.faults, simulations),)

    def work(drop: Drop) -> tuple[Awaitable[None], ...]:
        wheel, keeper = Wheel(pairs, clock=clock, stalled=drop), InPlaceKeeper(kept, clock=clock)
        return wheel.run(), keeper.run(), *(faults.follow() for faults in followed)

    return Hosted(nodes=tuple(agent.node for agent in agents), work=work, close=close, calls=calls)


def _energy(hurry: float) -> NodeEnergy:
    """Of a node whose process ids are not this machine's: nobody is looked up."""
    return NodeEnergy(catalogue.load(), Sources(), watch=AnomalyWatch(hurry=hurry))


def _ports(simulation: SimulatedNode, *, alone: bool) -> tuple[Device, Control]:
    """How a simulated node is asked; the binding has room for one."""
    if not alone:
        return simulation, simulation
    library.install(simulation)
    device = NvmlDevice()
    return device, NvmlControl(device)
