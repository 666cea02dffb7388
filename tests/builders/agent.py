"""An agent's parts: its clocks, simulated devices, the node over them, and what its sampler and accounts hold."""

import time
from array import array
from uuid import UUID

from eelgrid_agent.devices.host import SimulatedHost
from eelgrid_agent.devices.sampler import GPU_READINGS, HOST_READINGS, SampleTick
from eelgrid_agent.energy.accounts import (
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.node.inventory import NodeIdentity, survey_devices
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.node.workload_engine import NoEngine
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_protos.catalogue.loader import load_catalogue

SECOND = 1_000_000_000
A10 = GpuSpec(product="openb-g2")


class ManualClock:
    """The agent's clock port; both clocks stand still until a test sets `now_ns`."""

    def __init__(self, now_ns=SECOND, *, epoch_ns=0):
        self.now_ns = now_ns
        self._epoch_ns = epoch_ns

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self._epoch_ns + self.now_ns


class SystemClock:
    """The agent's clock port over this machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


def build_devices(clock, name="n", gpus=(A10,), *, seed=1):
    """The simulated devices of a node."""
    spec = NodeSpec(node_name=name, cpu_milli=1000, memory_bytes=10**9, gpus=tuple(gpus))
    return SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=seed)


def build_simulated_gpu(product, **spec):
    """One simulated GPU of a product, at time 0."""
    known = load_catalogue().products[product]
    return SimGpu(GpuSpec(product=product, **spec), known, uuid=UUID(int=0), index=0, now_ns=0)


def build_agent_node(device, clock, name="n", *, engine=None, first=None, **options):
    """The agent's node over simulated devices; without an engine nothing runs on it."""
    engine = engine or NoEngine()
    host = SimulatedHost(cpu_milli=1000, memory_bytes=10**9, load=engine.host_load, monotonic_ns=clock.monotonic_ns)
    return AgentNode(
        NodeIdentity(node_name=name, agent_version="t", simulated=True),
        host=host,
        engine=engine,
        clock=clock,
        first=first or survey_devices(device),
        **{"draw_incarnation": lambda: 1, "ticks_most": 10} | options,
    )


def build_tick(time_ns, *, generation=1, gpus=1, values=None, absences=(), opens_batch=False):
    """A sampler's tick; every reading of a GPU is the time unless `values` has them."""
    return SampleTick(
        time_ns=time_ns,
        generation=generation,
        gpus=gpus,
        gpu_values=array("d", [float(time_ns)] * (len(GPU_READINGS) * gpus)) if values is None else values,
        gpu_absences=tuple(absences),
        host_values=array("d", [0.0] * len(HOST_READINGS)),
        host_absences=(),
        opens_batch=opens_batch,
    )


def build_pod_owner(pod, **fields):
    """A container of a pod as an owner of energy."""
    return UsageOwner(kind=UsageOwnerKind.POD, **{"namespace": "n", "pod": pod, "container": "c"} | fields)


def build_slurm_owner(job, **fields):
    """A Slurm job as an owner of energy."""
    return UsageOwner(kind=UsageOwnerKind.SLURM, job=str(job), **fields)


def build_energy_share(owner, energy_mj, part=EnergyUse.ACTIVE):
    """What an owner spent alone on a device."""
    return EnergyShare(
        owner=owner, part=part, energy_mj=energy_mj, method=ShareMethod.EXCLUSIVE, confidence=ShareConfidence.HIGH
    )
