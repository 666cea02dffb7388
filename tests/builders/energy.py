"""Energy: windows and a running ledger, and an agent's node whose joules have owners, with its service."""

import asyncio
import logging
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import grpc.aio

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.devices.sampler import read_extended_readings
from eelgrid_agent.energy.node_energy import AttributionSources, NodeEnergy
from eelgrid_agent.energy.process_owners import ProcessOwnerResolver
from eelgrid_agent.node.inventory import read_each_gpu
from eelgrid_agent.node.node_service import NodeServicer
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice
from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import parse_query
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import (
    Assignment,
    AttributionConfidence,
    AttributionMethod,
    ConnectResponse,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    Inventory,
    NodePlan,
    OwnerKind,
    ResourceRequest,
    WindowDevice,
    WindowShare,
    WorkloadSpec,
)
from eelgrid_protos.rpc import NODE_SERVICE, admit_everybody, build_handler
from eelgrid_protos.transport import listen_on_address, server_options
from tests.builders.agent import SECOND, ManualClock, build_agent_node, build_devices
from tests.waiting import wait_until

SECOND_NS = 10**9
BEGIN_NS = 1_799_971_200 * SECOND_NS  # a midnight
CLOCK = Clock(now_ns=lambda: BEGIN_NS + 1800 * SECOND_NS)
SPEC = WorkloadSpec(
    name="chat",
    request=ResourceRequest(gpu_count=1, gpu_milli=1000),
    queue="q1",
    namespace="ml",
    user="ann",
    labels={"team": "a"},
)
OWNERS = (
    EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-1"),
    EnergyOwner(kind=OwnerKind.UNALLOCATED),
    EnergyOwner(kind=OwnerKind.SLURM, job="7"),
)
HALVES = (MigSlice(profile="3g", start=4), MigSlice(profile="1g", start=0))
GPUS = (
    GpuSpec(product="h100-sxm5-80gb"),
    GpuSpec(product="h100-sxm5-80gb", mig=HALVES),
    GpuSpec(product="p100-pcie-16gb"),
)


def build_ledger_node(name):
    """The node of a window, as its agent lists it."""
    return Inventory(node_name=name, cpu_milli=1, memory_bytes=1, pool="train")


def build_window(number, energy_mj=1_000, *, incarnation=1, owner=0):
    """The window of a minute: one device, which one owner kept busy."""
    share = WindowShare(
        device=0,
        owner=owner,
        part=EnergyPart.ACTIVE,
        method=AttributionMethod.EXCLUSIVE,
        confidence=AttributionConfidence.HIGH,
        energy_mj=energy_mj,
    )
    return EnergyWindow(
        incarnation=incarnation,
        number=number,
        begin_ns=BEGIN_NS + (number - 1) * 60 * SECOND_NS,
        end_ns=BEGIN_NS + number * 60 * SECOND_NS,
        devices=(WindowDevice(gpu_uuid="g", total_mj=energy_mj),),
        owners=OWNERS,
        shares=(share,),
    )


class LedgerSite:
    """A ledger writer that runs, of a core that knows some workloads."""

    def __init__(self, folder, workloads=None, clock=None, open_store=None):
        known = {"w-1": SimpleNamespace(spec=SPEC)} if workloads is None else workloads
        core = SimpleNamespace(state=SimpleNamespace(workloads=known, policy=SimpleNamespace(prices=None)))
        self.writer = LedgerWriter(
            open_store or partial(open_ledger, folder),
            core=lambda: core,
            clock=clock or CLOCK,
            log=logging.getLogger("test"),
            bytes_most=10**9,
        )
        self.acknowledged = []
        self.refused = []  # node, windows and why, of acknowledgements that say so

    async def __aenter__(self):
        self.task = asyncio.create_task(self.writer.run())
        await self.until(lambda: self.writer._store is not None or self.writer.failures)
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def until(self, is_so):
        await wait_until(is_so)

    def take(self, one, node="n1"):
        self.writer.add_window(build_ledger_node(node), one, lambda told: self.hear(node, told))

    def hear(self, node, told):
        self.acknowledged.append((node, told.number))
        if told.refused:
            self.refused.append((node, told.refused, told.refused_reason))

    async def total(self, *group_by):
        asked = parse_query(
            begin_ns=BEGIN_NS, end_ns=BEGIN_NS + 86_400 * SECOND_NS, group_by=group_by, filters={}, rows_most=100
        )
        (answer,) = await self.writer.query((asked,))
        return answer


class EnergyNode:
    """Ticks every second and looks every five, as the agent does; `proc` is where its processes are looked up."""

    def __init__(self, proc, name="n0"):
        self.clock = ManualClock()
        self._proc = proc
        self._ticks = 0
        self.device = build_devices(self.clock, name, GPUS)
        energy = NodeEnergy(load_catalogue(), AttributionSources(ProcessOwnerResolver(proc)))
        self.node = build_agent_node(self.device, self.clock, name, energy=energy)

    def uuid(self, index):
        return self.node.gpu_uuids[index]

    def job(self, index, pid, job, instance=None):
        """A process of a Slurm job on a device."""
        folder = self._proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n")
        (folder / "stat").write_text(f"{pid} (python) " + " ".join(["S", *["0"] * 18, "77"]))
        process = GpuProcess(pid=pid, kind=ProcessKind.COMPUTE, gpu_instance_id=instance)
        self.device.start_process(self.uuid(index), process)

    def load(self, index, ratio):
        self.device.set_load(self.uuid(index), GpuLoad(utilization_ratio=ratio))

    def hold(self, index, workload):
        """The plan gives a device to a workload."""
        held = Assignment(workload_id=workload, replica=0, gpu_uuids=(self.uuid(index),), gpu_milli=1000)
        plan = NodePlan(node_name=self.node.name, epoch=1, lease_s=1e6, assignments=(held,))
        self.node.on_message(ConnectResponse(message=plan))

    def run(self, seconds):
        """Ends with a look where the seconds are a multiple of five."""
        for _ in range(seconds):
            self._ticks += 1
            self.clock.now_ns += SECOND
            self.node.record_tick(read_each_gpu(self.device, self.node.gpu_uuids), monotonic_ns=self.clock.now_ns)
            if self._ticks % 5 == 0:
                slow = read_extended_readings(self.device, self.node.gpu_uuids)
                found = self.node.energy.read_sources(self.node.inventory.gpus, slow, now_ns=self.clock.now_ns)
                self.node.observe_slow(slow, found)


def run_jobs(proc, name="n0"):
    """A node after ten minutes: two jobs on one device, one in a slice, and one device held and idle."""
    site = EnergyNode(proc, name)
    site.run(60)
    site.job(0, 11, job=1)
    site.job(0, 12, job=2)
    site.load(0, 0.8)
    busy = site.node.inventory.gpus[1].gpu_instances[0].id
    site.job(1, 21, job=3, instance=busy)
    site.device.set_instance_load(site.uuid(1), busy, GpuLoad(utilization_ratio=0.9))
    site.hold(2, "train")
    site.run(540)
    return site


@asynccontextmanager
async def serve_nodes(nodes, clock, *, tls=None, admit=admit_everybody):
    """NodeService of these nodes; yields the port."""
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers(
        (build_handler(NODE_SERVICE, NodeServicer({n.name: n for n in nodes}, clock), admit=admit),)
    )
    port = await listen_on_address(server, "127.0.0.1:0", tls=tls, insecure=False, log=logging.getLogger("test"))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
