"""A simulated node, its disk and its time, with the agent's power half on it: what the power schedules happen to.

Every write to a device and to the disk passes through here: it is a moment at
which the agent may die, and it is held against what must hold of every write.
Must not decide what happens (the schedule does).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.fault_world import CrashPoints
from eelgrid_agent.devices.host import SimulatedHost
from eelgrid_agent.devices.port import PowerSettings
from eelgrid_agent.enforce.guard.events import DeviceRecord, DriverOrigin
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.enforce.power import PowerExecutor
from eelgrid_agent.enforce.rules import LocalPolicy
from eelgrid_agent.node.enforcement_loop import Enforcement, run_cycle_inline
from eelgrid_agent.node.inventory import NodeIdentity, SequentialReader, read_each_gpu, survey_devices
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.node.workload_engine import NoEngine
from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_agent.state_files import StateUnwritable
from eelgrid_protos.messages import AccessLevel, ConnectResponse, NodeEvent, NodePlan, PlanApplied

__all__ = ["NAME", "Agent", "Ground", "World"]

NAME = "node"
_TICKS_KEPT = 30
_PULLS_MOST = 500


@dataclass
class Ground:
    """What a device may show once nothing of the agent's is left on it."""

    limits_w: set[float]
    profiles: set[int | None]

    def shows(self, gpu: SimGpu) -> bool:
        """Whether it shows one of them, and no lock."""
        return (
            gpu.limit_mw / 1000.0 in self.limits_w
            and min(gpu.profiles, default=None) in self.profiles
            and gpu.locked_mhz is None
        )


class World:
    """The machine: devices, disk and clocks; it outlives agents."""

    def __init__(self, product: str, count: int, seed: int) -> None:
        self.now_ns = 1_000_000_000
        spec = NodeSpec(
            node_name=NAME,
            cpu_milli=64_000,
            memory_bytes=2**37,
            driver_version="580.95.05",
            gpus=(GpuSpec(product=product),) * count,
        )
        self.node = SimulatedNode(spec, monotonic_ns=self.monotonic_ns, seed=seed)
        self.uuids = tuple(gpu.uuid for gpu in self.node.gpus())
        self.ground = {gpu.uuid: self._fresh(gpu) for gpu in self.node.devices}
        self.boots = self.loads = 1
        self.content: tuple[DeviceRecord, ...] = ()
        self.is_full = False
        self.is_observing = True
        self.writes = 0
        self.crashes = CrashPoints()

    # Clocks, the boot and the journal

    def monotonic_ns(self) -> int:
        """The clock."""
        return self.now_ns

    def wall_ns(self) -> int:
        """The same, of another year."""
        return self.now_ns + 1_700_000_000_000_000_000

    def origin(self) -> DriverOrigin:
        """Since when the devices remember."""
        return DriverOrigin(boot_id=f"boot-{self.boots}", driver_start=f"{self.boots}.{self.loads}")

    def load(self) -> tuple[DeviceRecord, ...]:
        """What is on the disk."""
        return self.content

    def store(self, records: tuple[DeviceRecord, ...]) -> None:
        """Puts it on the disk."""
        self.crashes()
        if self.is_full:
            raise StateUnwritable("the disk is full; make room")
        assert not (self.is_observing and records), f"a journal of changes in a life that observes: {records}"
        self.content = records
        self.crashes()

    # The control port

    def power_settings(self, uuid: str) -> PowerSettings:
        """As they are."""
        return self.node.power_settings(uuid)

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Inside the constraints and in the journal, or it is a fault."""
        gpu = self.node.get_device(uuid)
        low_w, high_w = gpu.limits_w
        assert low_w <= limit_w <= high_w, f"{limit_w:g} W asked outside [{low_w:g}, {high_w:g}] W"
        record = self._record(uuid)
        assert limit_w in (*record.limits_w, record.found_w), f"{limit_w:g} W is not in the journal: {record}"
        self._write()
        self.node.set_power_limit(uuid, limit_w)
        self.crashes()

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Journalled and on the part's steps, or it is a fault."""
        assert self._record(uuid).clocks == (min_mhz, max_mhz), "the lock is not in the journal"
        assert {min_mhz, max_mhz} <= set(self.node.get_device(uuid).sm_clocks_mhz), "no clocks of this part"
        self._write()
        self.node.lock_sm_clocks(uuid, min_mhz, max_mhz)
        self.crashes()

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Only what the journal says that we locked."""
        assert self._record(uuid).clocks is not None, "somebody else's lock is let go"
        self._write()
        self.node.unlock_sm_clocks(uuid)
        self.crashes()

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """Journalled, or it is a fault."""
        record = self._record(uuid)
        assert profile in (*record.profiles, record.found_profile), f"profile {profile} is not in the journal: {record}"
        self._write()
        self.node.set_power_profile(uuid, profile)
        self.crashes()

    def __getattr__(self, name: str) -> object:
        """The MIG half of the port, which power never asks for."""
        return getattr(self.node, name)

    # What happens to it

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now_ns += round(seconds * 1e9)

    def restart_driver(self, *, reboot: bool) -> None:
        """The driver is loaded anew, or the machine boots: every device shows its defaults."""
        self.boots += reboot
        self.loads += not reboot
        faults = self.node.faults
        was_lost = {gpu.uuid for gpu in self.node.devices if gpu.health is not SimHealth.OK}
        if reboot:
            faults.reboot_node()
        else:
            faults.reload_driver()
        for gpu in self.node.devices:
            self.ground[gpu.uuid] = self._fresh(gpu)
        if reboot:
            assert all(self.node.get_device(uuid).health is SimHealth.OK for uuid in was_lost)

    def heal(self) -> None:
        """Everything answers, and the agent may do everything again."""
        self.is_full = False
        self.node.faults.set_rights(AccessLevel.ROOT)
        for gpu in self.node.devices:
            if gpu.health is SimHealth.LOST:
                self.node.faults.restore_gpu(gpu.uuid)
                self.ground[gpu.uuid] = self._fresh(gpu)
                self._allow_found(gpu)
            self.node.faults.restore_gpu(gpu.uuid)

    @property
    def answers(self) -> bool:
        """Whether every device answers, and the agent may change each and write to the disk."""
        whole = all(gpu.health is SimHealth.OK for gpu in self.node.devices)
        return whole and not self.is_full and self.node.access() is AccessLevel.ROOT

    @property
    def power_w(self) -> float:
        """What all devices truly draw."""
        return sum(gpu.power_mw for gpu in self.node.devices) / 1000.0

    def _fresh(self, gpu: SimGpu) -> Ground:
        return Ground(limits_w={gpu.product.power_default_w}, profiles={None})

    def _allow_found(self, gpu: SimGpu) -> None:
        """Where ours was the default as well, a new agent cannot know that a reset, and not we, left it there."""
        for record in self.content:
            if record.gpu_uuid == gpu.uuid and gpu.product.power_default_w in record.limits_w and record.found_w:
                self.ground[gpu.uuid].limits_w.add(record.found_w)

    def _record(self, uuid: str) -> DeviceRecord:
        record = next((record for record in self.content if record.gpu_uuid == uuid), None)
        assert record is not None, f"a write to {uuid} that no journal covers"
        return record

    def _write(self) -> None:
        self.crashes()
        self.writes += 1


class Agent:
    """One life of the agent on the machine, turned in place."""

    def __init__(self, world: World, local: LocalPolicy) -> None:
        self.world = world
        self._device = world.node
        self.guard = Guard(NAME, has_control=True, local=local)
        host = SimulatedHost(cpu_milli=64_000, memory_bytes=2**37, load=lambda: (0, 0), monotonic_ns=world.monotonic_ns)
        self.node = AgentNode(
            NodeIdentity(node_name=NAME, agent_version="0"),
            host=host,
            engine=NoEngine(),
            clock=world,
            draw_incarnation=lambda: 1,
            ticks_most=_TICKS_KEPT,
            first=survey_devices(self._device),
            guard=self.guard,
        )
        enforcer = PowerExecutor(world, world, origin=world.origin)  # type: ignore[arg-type]
        self._enforcement = Enforcement(self.node, enforcer, looking=SequentialReader(self._device), clock=world)
        self._sampled_ns = 0
        self.events: list[NodeEvent] = []
        run_cycle_inline(self._enforcement.start_cycle(world.load()))

    def offer(self, plan: NodePlan) -> None:
        """The controller sends a plan."""
        self.node.on_message(ConnectResponse(message=plan))

    def turn(self, *, sample_s: float = 1.0) -> None:
        """What the agent does at this moment: a sample each interval, a cycle when it is due."""
        now_ns = self.world.now_ns
        if now_ns - self._sampled_ns >= sample_s * 1e9:
            self._sampled_ns = now_ns
            if self.node.record_tick(read_each_gpu(self._device, self.node.gpu_uuids), monotonic_ns=now_ns):
                self.node.update_inventory(survey_devices(self._device))
        if self._enforcement.is_due(now_ns):
            run_cycle_inline(self._enforcement.cycle())
        self.events += _events(self.node)

    def stop(self) -> None:
        """A clean end."""
        run_cycle_inline(self._enforcement.stop_cycle())


def _events(node: AgentNode) -> Iterable[NodeEvent]:
    """What goes to the controller now; answers and inventories go too."""
    for _ in range(_PULLS_MOST):
        request = node.next_message()
        if request is None:
            return
        assert not isinstance(request.message, PlanApplied) or request.message.epoch > 0
        if isinstance(request.message, NodeEvent):
            yield request.message
