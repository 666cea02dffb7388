"""Composition of the agent: the node of this machine, and what the simulated ones have in common with it.

Wires drivers, the state directory, the guard, enforcement and energy attribution to nodes. Contains no decisions.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from eelgrid_agent.devices.host import MachineHost, read_boot_id
from eelgrid_agent.devices.port import CallLatencies, DevicePort
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.energy.node_energy import (
    ENERGY_OUTBOX,
    AttributionSources,
    NodeEnergy,
    OutboxStore,
    load_outbox_state,
    write_periodically,
)
from eelgrid_agent.energy.process_owners import ContainerNameIndex, ProcessOwnerResolver
from eelgrid_agent.energy.windows import EnergyOutbox
from eelgrid_agent.enforce.device_leases import LEASES_FILE, DeviceLeases
from eelgrid_agent.enforce.guard.events import DeviceRecord
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.enforce.lease_table import LEASE_JOURNAL, LeaseTable
from eelgrid_agent.enforce.mig.host import (
    LAYOUTS_FILE,
    CapabilityNodes,
    find_reset_obstacle,
    make_boot_key,
    read_machine,
)
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL, MigJournal
from eelgrid_agent.enforce.mig.mig_service import MigService, NodeService
from eelgrid_agent.enforce.power import POWER_JOURNAL, PowerExecutor, PowerJournal, read_driver_origin
from eelgrid_agent.enforce.rules import LocalPolicy
from eelgrid_agent.engine.port import SharingStrategy
from eelgrid_agent.engine.readiness import GpuReadiness
from eelgrid_agent.engine.slurm_jobs import HandoverFolder
from eelgrid_agent.engine.users import JobUsers
from eelgrid_agent.kubelet.pod_resources import AllocationReporter, PodLeases, PodResourcesClient
from eelgrid_agent.node.config import LEASE_SOCKET, AgentConfig
from eelgrid_agent.node.enforcement_loop import (
    BudgetNotEnforceable,
    Enforcement,
    NodeEnforcementLoop,
    check_budget_reach,
)
from eelgrid_agent.node.inventory import DeviceSurvey, NodeIdentity, survey_devices
from eelgrid_agent.node.leader_terms import LEADER_FILE, LEADER_RECORD, LeaderTerms
from eelgrid_agent.node.lease_owners import SLURM_ENGINE, SlurmOwners, adopt_slurm_jobs, run_owner_checks
from eelgrid_agent.node.lease_socket import LeaseSocket
from eelgrid_agent.node.loop import (
    DriverThread,
    MachineLoop,
    QuestionsToDriver,
    run_process_engine,
    watch_slurm_jobs,
)
from eelgrid_agent.node.model_data import watch_model_data
from eelgrid_agent.node.node import AgentClock, AgentNode
from eelgrid_agent.node.workload_engine import NoEngine
from eelgrid_agent.state_files import (
    MemoryState,
    StateDirectoryError,
    StateFile,
    StateFileError,
    default_state_directory,
    lock_state_directory,
)
from eelgrid_protos import __version__
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.kubelet_api import ContainerDevices
from eelgrid_protos.messages import Gpu
from eelgrid_protos.values import dataclass

if TYPE_CHECKING:
    from eelgrid_agent.engine.contact import LeaderContact
    from eelgrid_agent.engine.local import LocalEngine
    from eelgrid_agent.kubelet.device_plugins import DevicePlugins
    from eelgrid_agent.kubelet.dra_driver import DraDriver


_LOG = logging.getLogger("eelgrid.agent")
# A driver that does not answer at the start must not keep the node from reporting itself.
FIRST_SURVEY_S = 10.0
_FACTORIES = {"nvidia": "nvml", "amd": "amd"}
_SETTINGS_FILE = "settings.json"
_ENERGY_FILE = "energy.json"
# Ends the stream of a node whose batches nobody acknowledges.
DropStream = Callable[[AgentNode], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedNodes:
    """`work` runs until it is cancelled, and puts back then what it changed; `worker` is the driver's child process."""

    nodes: tuple[AgentNode, ...]
    work: Callable[[DropStream], tuple[Awaitable[None], ...]]
    close: Callable[[], None]
    worker: RemoteDevice | None = None
    leases: tuple[DeviceLeases, ...] = ()
    # Seconds in the driver by call, where calls are timed; and of the newest look of each kind.
    calls: CallLatencies | None = None
    collection_s: Mapping[str, float] = field(default_factory=dict)


def open_slurm_node(
    config: AgentConfig, device: DevicePort, directory: Path | None, open_nodes: Callable[[Gpu], str] = lambda _: ""
) -> NodeService | None:
    """The node in Slurm, where it is to be taken out of service for a layout; raises BudgetNotEnforceable."""
    if config.slurm_node is None:
        return None
    # A node outside Slurm has no use for it.
    from eelgrid_agent.engine.slurm_node_host import SlurmNodeFileError, build_slurm_node, load_slurm_node

    try:
        settings = load_slurm_node(config.slurm_node)
    except SlurmNodeFileError as error:
        raise BudgetNotEnforceable(f"--slurm-node {error}") from error
    return build_slurm_node(settings, directory, list_gpus=device.gpus, open_nodes=open_nodes)


def open_leases(folder: Path | None, clock: AgentClock) -> DeviceLeases:
    """The leases of a node, in memory where nothing outlives the agent; raises BudgetNotEnforceable."""
    store = MemoryState(LeaseTable()) if folder is None else StateFile(folder / LEASES_FILE, LEASE_JOURNAL)
    try:
        return DeviceLeases(store, boot_id=read_boot_id(), wall_ns=clock.wall_ns)
    except StateFileError as error:
        raise BudgetNotEnforceable(str(error)) from error


def serve_leases(
    config: AgentConfig,
    leases: DeviceLeases,
    node: AgentNode,
    kubelet: PodResourcesClient | None = None,
    claims: "DraDriver | None" = None,
    *,
    alone: bool = True,
) -> tuple[Awaitable[None], ...]:
    """What leases need of the event loop; a socket serves the only node of a process."""

    def adopt() -> bool:
        """Whether all that stands was leased; the engine of processes has done so before anything else runs."""
        if config.slurm_folder is not None:
            adopt_slurm_jobs(leases, config.slurm_folder, node.inventory.gpus)
        is_asked = kubelet is None or kubelet.answers_total + kubelet.failures_total > 0
        return is_asked and (claims is None or claims.is_restored)

    def find_kubelet_problem() -> str:
        return "" if kubelet is None or kubelet.containers is not None else kubelet.problem

    slurm = SlurmOwners()

    async def adopt_running() -> None:
        """A machine runs one slurmd; of several simulated nodes none is its."""
        if alone:
            await slurm.adopt_jobs(leases, node.name, node.inventory.gpus)

    checks = run_owner_checks(
        leases,
        {SLURM_ENGINE: slurm.ask},
        find_kubelet_problem,
        on_change=node.on_leases_changed,
        adopt=adopt,
        adopt_running=adopt_running,
    )
    if config.lease_socket is None or not alone:
        return (checks,)
    # The default is an offer, and some containers and units have no place for it.
    return checks, LeaseSocket(config.lease_socket, leases).run(is_required=config.lease_socket != LEASE_SOCKET)


def open_processes(
    config: AgentConfig, folder: Path | None, problem: str = "", leases: DeviceLeases | None = None
) -> "LocalEngine":
    """The engine of processes in a state directory of this agent alone; raises BudgetNotEnforceable."""
    if folder is None:
        raise BudgetNotEnforceable(f"--run-processes needs a state directory: {problem}")
    # An agent that starts no processes has no use for these.
    from eelgrid_agent.engine.cgroups import AttemptCgroups, find_delegated_cgroup
    from eelgrid_agent.engine.local import PROCESSES, LocalEngine
    from eelgrid_agent.engine.mps import MPS, MpsDaemonFailed, MpsDaemons

    def list_gpus() -> Iterable[Gpu]:
        """As the leases know them, which learn them from the node later."""
        return () if leases is None else leases.list_gpus()

    try:
        users = JobUsers(
            own_uid=os.geteuid(), run_as=config.run_as, users=dict(config.job_users), allows_root=config.allow_root
        )
        cgroups = AttemptCgroups(find_delegated_cgroup())
        is_offered = config.gpu_sharing is SharingStrategy.MPS
        mps = None
        # Jobs of a previous run may have daemons that this one would not start.
        if is_offered or (folder / MPS).exists():
            mps = MpsDaemons(folder / MPS, list_gpus=list_gpus, is_offered=is_offered)
        contact = _open_contact(folder / PROCESSES, config.fence_after_s)
        return LocalEngine(folder / PROCESSES, cgroups=cgroups, users=users, leases=leases, mps=mps, contact=contact)
    except MpsDaemonFailed as error:
        raise BudgetNotEnforceable(f"--gpu-sharing mps: {error}") from error
    except OSError as error:
        raise BudgetNotEnforceable(
            f"--run-processes cannot use {folder}: {error.strerror}; give --state DIR"
        ) from error


def _open_contact(folder: Path, fence_after_s: float) -> "LeaderContact":
    """The contact by which jobs are fenced, which not all do that an earlier version started; raises OSError."""
    from eelgrid_agent.engine.contact import LeaderContact
    from eelgrid_agent.engine.local import has_unfenced_attempts

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fence_after_s and has_unfenced_attempts(folder):
        _LOG.warning(
            "event=not_fenced reason='jobs run that an agent without --fence-after started' remedy='restart it later'"
        )
        fence_after_s = 0.0
    return LeaderContact(folder / "contact.json", fence_after_s)


def watch_jobs(config: AgentConfig, *nodes: AgentNode) -> tuple[Awaitable[None], ...]:
    """Slurm's jobs on the only node; a prolog's folder is one machine's."""
    folder = config.slurm_folder
    return () if folder is None or len(nodes) != 1 else (watch_slurm_jobs(nodes[0], HandoverFolder(folder)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """What outlives the agent: its journals, and what the run before left changed; `problem` says why not."""

    settings: PowerJournal
    layouts: MigJournal
    records: tuple[DeviceRecord, ...] = ()
    directory: Path | None = None
    problem: str = ""


def _device_plugins(
    config: AgentConfig,
    node: AgentNode,
    kubelet: PodResourcesClient,
    leases: DeviceLeases,
    reporter: AllocationReporter,
) -> "DevicePlugins | None":
    if config.device_plugin == "off":
        return None
    # A machine without Kubernetes has no use for these.
    from eelgrid_agent.kubelet.device_plugins import build_device_plugins

    return build_device_plugins(config, node, kubelet, leases, given=reporter.on_allocated)


def _follow_kubelet(
    config: AgentConfig, node: AgentNode, kubelet: PodResourcesClient, leases: DeviceLeases
) -> AllocationReporter:
    """What the kubelet lists is leased to it, and told to the controller."""
    pods = PodLeases(leases, gpus=lambda: node.inventory.gpus, clock_s=time.monotonic)
    telling = AllocationReporter(
        gpus=lambda: node.inventory.gpus, tell=node.report_held_devices, steers=config.device_plugin != "off"
    )

    def on_containers(containers: tuple[ContainerDevices, ...]) -> None:
        pods.on_containers(containers)
        telling.on_containers(containers)

    kubelet.heard = on_containers
    return telling


def _node_energy(config: AgentConfig, kubelet: PodResourcesClient) -> NodeEnergy:
    """The attribution of this machine's energy to pods, Slurm jobs and processes."""
    names = ContainerNameIndex().find_container
    sources = AttributionSources(ProcessOwnerResolver(names=names), kubelet=kubelet, slurm_folder=config.slurm_folder)
    return NodeEnergy(load_catalogue(), sources)


def _local_policy(config: AgentConfig, node_name: str, gpus: Sequence[Gpu]) -> LocalPolicy:
    """What the operator of the node has set; raises BudgetNotEnforceable."""
    check_budget_reach(config.power_budget_w, node_name, gpus)
    return LocalPolicy(power_budget_w=config.power_budget_w, enforce=config.power_budget_w is not None)


def _find_observe_only(config: AgentConfig, memory: _Memory) -> str:
    """Why this agent changes no device, or nothing; raises BudgetNotEnforceable for a budget that needs it to."""
    reason = "--observe-only" if config.observe_only else memory.problem
    if reason:
        _LOG.warning("event=observe_only reason=%r", reason)
        if config.power_budget_w is not None:
            raise BudgetNotEnforceable(f"--power-budget cannot be kept: {reason}")
    return reason


async def open_machine(config: AgentConfig, clock: AgentClock, incarnation: Callable[[], int]) -> HostedNodes:
    """Opens the node of this machine. Raises BudgetNotEnforceable.

    Without a driver the node reports no GPUs, and the driver is tried again later.
    """
    stack = ExitStack()
    driver, slow_driver = DriverThread(), DriverThread()
    device, first = await _open_driver(config.vendor, driver)
    if first.problem:
        _LOG.warning("event=no_gpus reason=%r", first.problem)
    memory = _open_memory(config, stack)
    observe_only = _find_observe_only(config, memory)
    kubelet = PodResourcesClient(config.kubelet, clock_s=time.monotonic)
    energy = _node_energy(config, kubelet)
    host = MachineHost()
    identity = NodeIdentity(
        node_name=config.node_name or host.name(), agent_version=__version__, pool=config.pool, labels=dict(config.labels),
        topology=config.topology, runs_processes=config.run_processes, sets_limits=not observe_only,
    )  # fmt: skip
    local = _local_policy(config, identity.node_name, first.gpus)
    folder = memory.directory
    windows: OutboxStore = MemoryState(None) if folder is None else StateFile(folder / _ENERGY_FILE, ENERGY_OUTBOX)
    outbox = EnergyOutbox(
        load_outbox_state(windows, draw_incarnation=incarnation), boot=_boot(), length_s=config.energy_window_s
    )
    leases = open_leases(folder, clock)
    processes = open_processes(config, folder, memory.problem, leases) if config.run_processes else None
    guard = Guard(identity.node_name, has_control=not observe_only, local=local)
    node = AgentNode(
        identity, host=host, engine=NoEngine(), clock=clock, draw_incarnation=incarnation,
        ticks_most=config.ticks_most(1), first=first, guard=guard, energy=energy, outbox=outbox,
        processes=processes, readiness=None if processes is None else GpuReadiness(),
        terms=LeaderTerms(None if folder is None else StateFile(folder / LEADER_FILE, LEADER_RECORD)),
    )  # fmt: skip
    node.health.needs_fabric = not config.ignore_fabric_state
    leases.list_gpus, node.list_leases = lambda: node.inventory.gpus, leases.list_external
    layouts = _layouts(config, device, memory, clock, leases)
    keeper = _keeper(
        node, device, memory, layouts, driver=driver, slow_driver=slow_driver, is_enforcing=not observe_only, clock=clock
    )  # fmt: skip
    telling = _follow_kubelet(config, node, kubelet, leases)
    plugins = _device_plugins(config, node, kubelet, leases, telling)
    claims = _claims(
        config, node, device, layouts, memory, leases=leases, slow_driver=slow_driver, cannot_change=observe_only
    )
    collection_s: dict[str, float] = {}

    def work(drop: DropStream) -> tuple[Awaitable[None], ...]:
        loop = MachineLoop(
            node, device, clock=clock, driver=driver, stalled=drop, looking=device, collection_s=collection_s
        )
        started = (run_process_engine(node, QuestionsToDriver(device, driver)),) if node.runs_processes else ()
        offered = () if plugins is None else (plugins.run(),)
        readied = () if claims is None else (claims.run(),)
        folders = config.model_data_folders
        looked = (watch_model_data(folders, node.update_model_data),) if folders else ()
        written = (*watch_jobs(config, node), *(() if folder is None else (write_periodically(outbox, windows),)))
        leased = serve_leases(config, leases, node, kubelet, claims)
        return loop.run(), keeper.run(), kubelet.run(), *started, *offered, *readied, *looked, *written, *leased

    def close() -> None:
        driver.call(device.close)
        driver.close()
        slow_driver.close()
        stack.close()

    return HostedNodes(
        nodes=(node,), work=work, close=close, worker=device, leases=(leases,),
        calls=device.latencies, collection_s=collection_s,
    )  # fmt: skip


async def _open_driver(vendor: str, driver: DriverThread) -> tuple[RemoteDevice, DeviceSurvey]:
    """The vendor's driver; with auto the first that has devices, else the first of all."""
    names = ("nvidia", "amd") if vendor == "auto" else (vendor,)
    first: tuple[RemoteDevice, DeviceSurvey] | None = None
    for name in names:
        device = RemoteDevice(_FACTORIES[name])
        found = await _survey_driver(device, driver)
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


async def _survey_driver(device: RemoteDevice, driver: DriverThread) -> DeviceSurvey:
    asked = asyncio.wrap_future(driver.call(lambda: survey_devices(device)))
    try:
        async with asyncio.timeout(FIRST_SURVEY_S):
            found = await asyncio.shield(asked)
    except TimeoutError:
        return DeviceSurvey(problem=f"the driver did not answer within {FIRST_SURVEY_S:g} s; see the kernel's log")
    assert isinstance(found, DeviceSurvey)
    return found


def _open_memory(config: AgentConfig, stack: ExitStack) -> _Memory:
    """The journals in the state directory; in memory where there is none and none was asked for."""
    directory = config.state or default_state_directory(os.environ, root=os.geteuid() == 0)
    try:
        stack.enter_context(lock_state_directory(directory, "eelgrid-agent"))
        settings = StateFile(directory / _SETTINGS_FILE, POWER_JOURNAL)
        return _Memory(
            settings=settings,
            layouts=StateFile(directory / LAYOUTS_FILE, MIG_JOURNAL),
            records=settings.load(),
            directory=directory,
        )
    except (StateDirectoryError, StateFileError) as error:
        if config.state is not None:
            stack.close()
            raise BudgetNotEnforceable(str(error)) from error
        return _Memory(settings=MemoryState(()), layouts=MemoryState(()), problem=str(error))


def _claims(
    config: AgentConfig,
    node: AgentNode,
    device: RemoteDevice,
    layouts: MigService,
    memory: _Memory,
    *,
    leases: DeviceLeases,
    slow_driver: DriverThread,
    cannot_change: str,
) -> "DraDriver | None":
    if not config.dra:
        return None
    from eelgrid_agent.kubelet.dra_driver import SocketPathTooLong, build_dra_driver
    from eelgrid_agent.kubelet.kube_client import ApiUnreachable

    try:
        return build_dra_driver(
            config,
            node,
            device,
            device,
            layouts,
            slow_driver=slow_driver,
            directory=memory.directory,
            cannot_change=cannot_change,
            leases=leases,
        )
    except (ApiUnreachable, SocketPathTooLong) as error:
        raise BudgetNotEnforceable(f"--dra cannot be served: {error}") from error


def _boot() -> str:
    """What instances and counters live as long as."""
    origin = read_driver_origin()
    return make_boot_key(origin.boot_id, origin.driver_start)


def _layouts(
    config: AgentConfig, device: RemoteDevice, memory: _Memory, clock: AgentClock, leases: DeviceLeases
) -> MigService:
    machine, open_nodes = read_machine(), CapabilityNodes().create_missing
    return MigService(
        device,
        device,
        memory.layouts,
        boot_id=_boot,
        sleep=time.sleep,
        monotonic_s=time.monotonic,
        wall_ns=clock.wall_ns,
        obstacle=lambda geometry: find_reset_obstacle(geometry, machine),
        open_nodes=open_nodes,
        leases=leases,
        service=open_slurm_node(config, device, memory.directory, open_nodes),
    )


def _keeper(
    node: AgentNode,
    device: RemoteDevice,
    memory: _Memory,
    layouts: MigService,
    *,
    driver: DriverThread,
    slow_driver: DriverThread,
    is_enforcing: bool,
    clock: AgentClock,
) -> NodeEnforcementLoop:
    enforcer = PowerExecutor(device, memory.settings, origin=read_driver_origin)
    return NodeEnforcementLoop(
        node,
        Enforcement(node, enforcer, looking=device, clock=clock),
        layouts,
        driver=driver,
        slow_driver=slow_driver,
        records=memory.records,
        is_enforcing=is_enforcing,
        clock=clock,
    )
