"""The machine that this agent runs on, put together: driver, state directory, guard, enforcement and attribution.

Owns how the parts of a real node are made from the flags. Decides one thing:
whether this agent may change devices at all, which it does only where it can
write down what it changed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eelgrid_agent.attribution.node_energy import NodeEnergy
from eelgrid_agent.attribution.outbox import EnergyOutbox, Kept
from eelgrid_agent.attribution.owners import OwnerBook
from eelgrid_agent.attribution.pod_names import PodNames
from eelgrid_agent.attribution.pod_resources import PodResources
from eelgrid_agent.attribution.sources import Sources
from eelgrid_agent.attribution.window_file import WindowFile, keep_writing
from eelgrid_agent.budget_reach import NotEnforceable, check_reach
from eelgrid_agent.config import AgentConfig
from eelgrid_agent.enforcement import Enforcement, MachineKeeper
from eelgrid_agent.engine import NoEngine
from eelgrid_agent.guard import Guard, LocalPolicy
from eelgrid_agent.guard.events import DeviceRecord
from eelgrid_agent.host import MachineHost
from eelgrid_agent.hosted import Drop, Hosted
from eelgrid_agent.kubelet.telling import Telling
from eelgrid_agent.loop import DriverThread, MachineLoop
from eelgrid_agent.mig.capability_nodes import CapabilityNodes
from eelgrid_agent.mig.journal import FileJournal as LayoutFileJournal
from eelgrid_agent.mig.journal import Journal as LayoutJournal
from eelgrid_agent.mig.journal import MemoryJournal as LayoutMemoryJournal
from eelgrid_agent.mig.keeper import LayoutKeeper
from eelgrid_agent.mig.machine import obstacle, read_machine
from eelgrid_agent.mig.site import LAYOUTS_FILE, boot_of
from eelgrid_agent.node import Clock, Node
from eelgrid_agent.power import Enforcer, FileJournal, JournalError, MemoryJournal, SettingsJournal, machine_origin
from eelgrid_agent.state_directory import StateError, default_directory, hold
from eelgrid_agent.survey import Identity, Survey, survey
from eelgrid_agent.worker.remote import RemoteDevice
from eelgrid_protos import __version__
from eelgrid_protos.catalogue import load as load_catalogue

if TYPE_CHECKING:
    from eelgrid_agent.kubelet.dra import DraPlugin

__all__ = ["NotEnforceable", "open_machine"]

_LOG = logging.getLogger("eelgrid.agent")
# A driver that does not answer at the start must not keep the node from reporting itself.
FIRST_SURVEY_S = 10.0
_FACTORIES = {"nvidia": "nvml", "amd": "amd"}
_SETTINGS_FILE = "settings.json"
_ENERGY_FILE = "energy.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """What outlives the agent: its journals, and what the run before left changed; `problem` says why not."""

    settings: SettingsJournal
    layouts: LayoutJournal
    records: tuple[DeviceRecord, ...] = ()
    directory: Path | None = None
    problem: str = ""


async def open_machine(config: AgentConfig, clock: Clock, incarnation: Callable[[], int]) -> Hosted:
    """Without a driver the node has no GPUs, says so and asks again. Raises NotEnforceable."""
    stack = ExitStack()
    driver, slow_driver = DriverThread(), DriverThread()
    device, first = await _opened(config.vendor, driver)
    if first.problem:
        _LOG.warning("event=no_gpus reason=%r", first.problem)
    memory = _remembered(config, stack)
    observe_only = "--observe-only" if config.observe_only else memory.problem
    if observe_only:
        _LOG.warning("event=observe_only reason=%r", observe_only)
        if config.power_budget_w is not None:
            raise NotEnforceable(f"--power-budget cannot be kept: {observe_only}")
    kubelet = PodResources(config.kubelet, clock_s=time.monotonic)
    sources = Sources(OwnerBook(names=PodNames().find), kubelet=kubelet, slurm_folder=config.slurm_folder)
    energy = NodeEnergy(load_catalogue(), sources)
    host = MachineHost()
    identity = Identity(
        node_name=config.node_name or host.name(), agent_version=__version__, pool=config.pool,
        labels=dict(config.labels), topology=config.topology,
    )  # fmt: skip
    check_reach(config.power_budget_w, identity.node_name, first.gpus)
    local = LocalPolicy(power_budget_w=config.power_budget_w, enforce=config.power_budget_w is not None)
    file = None if memory.directory is None else WindowFile(memory.directory / _ENERGY_FILE)
    outbox = EnergyOutbox(
        Kept(incarnation=incarnation()) if file is None else file.load(draw_incarnation=incarnation),
        boot=_boot(),
        length_s=config.energy_window_s,
    )
    guard = Guard(identity.node_name, has_control=not observe_only, local=local)
    node = Node(
        identity, host=host, engine=NoEngine(), clock=clock, draw_incarnation=incarnation,
        ticks_most=config.ticks_most(1), first=first, guard=guard, energy=energy, outbox=outbox,
    )  # fmt: skip
    layouts = _layouts(device, memory, clock)
    keeper = _keeper(
        node, device, memory, layouts, driver=driver, slow_driver=slow_driver, is_enforcing=not observe_only, clock=clock
    )  # fmt: skip

    telling = Telling(gpus=lambda: node.inventory.gpus, tell=node.tell_held, steers=config.device_plugin != "off")
    kubelet.heard = telling.heard
    plugins = None
    if config.device_plugin != "off":
        # A machine without Kubernetes has no use for these.
        from eelgrid_agent.kubelet.machine import device_plugins

        plugins = device_plugins(config, node, kubelet, given=telling.given)
    claims = None
    if config.dra:
        claims = _claims(config, node, device, layouts, memory, slow_driver=slow_driver, cannot_change=observe_only)
    collection_s: dict[str, float] = {}

    def work(drop: Drop) -> tuple[Awaitable[None], ...]:
        loop = MachineLoop(
            node, device, clock=clock, driver=driver, stalled=drop, looking=device, collection_s=collection_s
        )
        offered = () if plugins is None else (plugins.run(),)
        readied = () if claims is None else (claims.run(),)
        written = () if file is None else (keep_writing(outbox, file),)
        return loop.run(), keeper.run(), kubelet.run(), *offered, *readied, *written

    def close() -> None:
        driver.call(device.close)
        driver.close()
        slow_driver.close()
        stack.close()

    return Hosted(
        nodes=(node,), work=work, close=close, worker=device, calls=device.latencies, collection_s=collection_s
    )


async def _opened(vendor: str, driver: DriverThread) -> tuple[RemoteDevice, Survey]:
    """The vendor's driver; with auto the first that has devices, else the first of all."""
    names = ("nvidia", "amd") if vendor == "auto" else (vendor,)
    first: tuple[RemoteDevice, Survey] | None = None
    for name in names:
        device = RemoteDevice(_FACTORIES[name])
        found = await _surveyed(device, driver)
        if found.gpus:
            if first is not None:
                driver.call(first[0].close)
            return device, found
        if first is None:
            first = device, found
        else:
            driver.call(device.close)
    assert first is not None
    return first


async def _surveyed(device: RemoteDevice, driver: DriverThread) -> Survey:
    asked = asyncio.wrap_future(driver.call(lambda: survey(device)))
    try:
        async with asyncio.timeout(FIRST_SURVEY_S):
            found = await asyncio.shield(asked)
    except TimeoutError:
        return Survey(problem=f"the driver did not answer within {FIRST_SURVEY_S:g} s; see the kernel's log")
    assert isinstance(found, Survey)
    return found


def _remembered(config: AgentConfig, stack: ExitStack) -> _Memory:
    """The journals in the state directory; in memory where there is none and none was asked for."""
    directory = config.state or default_directory(os.environ, root=os.geteuid() == 0)
    try:
        stack.enter_context(hold(directory, "eelgrid-agent"))
        settings = FileJournal(directory / _SETTINGS_FILE)
        return _Memory(
            settings=settings, layouts=LayoutFileJournal(directory / LAYOUTS_FILE), records=settings.load(),
            directory=directory,
        )  # fmt: skip
    except (StateError, JournalError) as error:
        if config.state is not None:
            stack.close()
            raise NotEnforceable(str(error)) from error
        return _Memory(settings=MemoryJournal(), layouts=LayoutMemoryJournal(), problem=str(error))


def _claims(
    config: AgentConfig, node: Node, device: RemoteDevice, layouts: LayoutKeeper, memory: _Memory, *,
    slow_driver: DriverThread, cannot_change: str,
) -> "DraPlugin":  # fmt: skip
    from eelgrid_agent.kubelet.api_server import Unreachable
    from eelgrid_agent.kubelet.dra import SocketPathTooLong
    from eelgrid_agent.kubelet.dra_machine import dra_plugin

    try:
        return dra_plugin(
            config, node, device, device, layouts, slow_driver=slow_driver, directory=memory.directory,
            cannot_change=cannot_change,
        )  # fmt: skip
    except (Unreachable, SocketPathTooLong) as error:
        raise NotEnforceable(f"--dra cannot be served: {error}") from error


def _boot() -> str:
    """What instances and counters live as long as."""
    origin = machine_origin()
    return boot_of(origin.boot_id, origin.driver_start)


def _layouts(device: RemoteDevice, memory: _Memory, clock: Clock) -> LayoutKeeper:
    machine = read_machine()
    return LayoutKeeper(
        device, device, memory.layouts, boot_id=_boot, sleep=time.sleep, monotonic_s=time.monotonic,
        wall_ns=clock.wall_ns, obstacle=lambda geometry: obstacle(geometry, machine),
        open_nodes=CapabilityNodes().make,
    )  # fmt: skip


def _keeper(
    node: Node, device: RemoteDevice, memory: _Memory, layouts: LayoutKeeper, *, driver: DriverThread,
    slow_driver: DriverThread, is_enforcing: bool, clock: Clock,
) -> MachineKeeper:  # fmt: skip
    enforcer = Enforcer(device, memory.settings, origin=machine_origin)
    return MachineKeeper(
        node, Enforcement(node, enforcer, looking=device, clock=clock), layouts, driver=driver,
        slow_driver=slow_driver, records=memory.records, is_enforcing=is_enforcing, clock=clock,
    )  # fmt: skip
