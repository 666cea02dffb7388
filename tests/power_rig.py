"""An agent's power half on a machine: guard, enforcer and journal in the order of the real loop.

The machine is the fake or the simulated node, so that the same tests run over
both. What the rig remembers of the agent dies with `crash`; the machine and the
disk stay.
"""

from dataclasses import replace

from bench.fault_world import CrashPoints, MemoryJournal

from eelgrid_agent.devices.port import Missing
from eelgrid_agent.enforce.guard.events import (
    CommandOutcome,
    CommandsExecuted,
    DriverOrigin,
    GuardCommand,
    GuardTick,
    SetDeviceLimit,
)
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.enforce.power import PowerExecutor
from eelgrid_agent.enforce.rules import GuardLimits, LocalPolicy
from eelgrid_agent.node.enforcement_loop import MAX_ROUNDS
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec
from eelgrid_agent.state_files import StateUnwritable
from eelgrid_protos.messages import (
    AccessLevel,
    ApplyStatus,
    Assignment,
    GpuSetting,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    Reading,
)
from tests.fakes.power_device import FakeMachine, FakePart

__all__ = ["Rig", "SimulatedMachine", "fake", "plan_of", "setting", "settled", "simulated"]

LIMITS = GuardLimits()


class SimulatedMachine:
    """A simulated node as a machine of the rig."""

    def __init__(self, products: tuple[str, ...], crashes: CrashPoints, *, driver_version: str = "580.95.05") -> None:
        self.now_ns = 1_000_000_000
        self.crashes = crashes
        spec = NodeSpec(
            node_name="n",
            cpu_milli=1000,
            memory_bytes=1,
            driver_version=driver_version,
            gpus=tuple(GpuSpec(product=key) for key in products),
        )
        self.node = SimulatedNode(spec, monotonic_ns=lambda: self.now_ns, seed=7)
        self.uuids = tuple(gpu.uuid for gpu in self.node.gpus())
        self.boots = self.loads = 1
        self.control = _Burning(self.node, crashes)

    def origin(self) -> DriverOrigin:
        return DriverOrigin(boot_id=f"boot-{self.boots}", driver_start=f"{self.boots}.{self.loads}")

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def load(self, uuid: str, demand_w: float) -> None:
        product = self.node.get_device(uuid).product
        share = (demand_w - product.idle_w) / (product.busy_w - product.idle_w)
        self.node.set_load(uuid, GpuLoad(utilization_ratio=min(1.0, max(0.0, share))))

    def set_behind(self, uuid: str, limit_w: float) -> None:
        self.node.faults.limit_power(uuid, limit_w)

    def cap(self, uuid: str, cap_w: float | None) -> None:
        self.node.faults.cap_power(uuid, cap_w)

    def reload(self) -> None:
        self.loads += 1
        self.node.faults.reload_driver()

    def reboot(self) -> None:
        self.boots += 1
        self.node.faults.reboot_node()

    def lose(self, uuid: str) -> None:
        self.node.faults.lose_gpu(uuid)

    def hang(self, uuid: str) -> None:
        self.node.faults.hang_gpu(uuid)

    def restore(self, uuid: str) -> None:
        self.node.faults.restore_gpu(uuid)

    def forbid(self, *, is_forbidden: bool = True) -> None:
        self.node.faults.set_rights(AccessLevel.READ_ONLY if is_forbidden else AccessLevel.ROOT)

    def power_w(self, uuid: str) -> float | None:
        value = self.node.read(uuid).values[Reading.POWER_W]
        return None if isinstance(value, Missing) else value

    def true_power_w(self) -> float:
        return sum(gpu.power_mw for gpu in self.node.devices) / 1000.0

    def energy_j(self, uuid: str) -> float | None:
        value = self.node.read(uuid).energy_counter_j
        return None if isinstance(value, Missing) else value

    def answers(self, uuid: str) -> bool:
        return self.node.get_device(uuid).health.value == "ok"

    def shown(self, uuid: str) -> tuple[float, tuple[int, int] | None, int | None]:
        gpu = self.node.get_device(uuid)
        return gpu.limit_mw / 1000.0, gpu.locked_mhz, min(gpu.profiles, default=None)


class _Burning:
    """The node's control port, with a crash point on both sides of every write."""

    def __init__(self, node: SimulatedNode, crashes: CrashPoints) -> None:
        self._node = node
        self._crashes = crashes

    def __getattr__(self, name: str):
        call = getattr(self._node, name)
        if not name.startswith(("set_", "lock_", "unlock_")):
            return call

        def burning(*arguments):
            self._crashes()
            result = call(*arguments)
            self._crashes()
            return result

        return burning


def fake(count: int = 4, **changes) -> FakeMachine:
    """Equal devices GPU-0, GPU-1, ..."""
    return FakeMachine({f"GPU-{number}": FakePart(**changes) for number in range(count)}, CrashPoints())


def simulated(count: int = 4, product: str = "h100-sxm5-80gb") -> SimulatedMachine:
    """Equal simulated devices."""
    return SimulatedMachine((product,) * count, CrashPoints())


class Rig:
    """See the module."""

    def __init__(self, machine, *, local: LocalPolicy | None = None, limits: GuardLimits = LIMITS) -> None:
        self.machine = machine
        self.local = local or LocalPolicy()
        self.limits = limits
        self.journal = MemoryJournal(machine.crashes, unwritable=StateUnwritable)
        self.found = {uuid: machine.shown(uuid) for uuid in machine.uuids}
        self.events: list[NodeEvent] = []
        self.commands: list[GuardCommand] = []
        self.epoch = 0
        self.start()

    def start(self) -> None:
        """A process begins, with what is on the disk."""
        self.guard = Guard("n", has_control=True, local=self.local, limits=self.limits)
        self.enforcer = PowerExecutor(
            self.machine.control, self.journal, origin=self.machine.origin, limits=self.limits
        )
        self.pending: tuple[GuardCommand, ...] = ()
        self.lost: set[str] = set()
        self.carry_out(self.guard.start(self.enforcer.load_journal()))
        self.carry_out(())

    def crash(self) -> None:
        """The process is gone and another begins; nothing was put back."""
        self.machine.crashes.disarm()
        self.start()

    def offer(self, plan: NodePlan) -> PlanApplied:
        """The controller sends a plan, with an epoch of the rig's."""
        self.epoch += 1
        plan = replace(plan, epoch=self.epoch)
        uuids = frozenset(self.machine.uuids)
        verdict = self.guard.offer_plan(plan, gpu_uuids=uuids, now_ns=self.machine.now_ns)
        return verdict.answer or self.guard.complete_plan(verdict, ())

    def cycle(self, times: int = 1, *, seconds: float | None = None) -> None:
        """Looks and acts, as often as the guard wants or as told."""
        for _ in range(times):
            self.machine.advance(self.guard.cycle_s if seconds is None else seconds)
            self.once()

    def once(self) -> None:
        """One cycle at this moment."""
        now_ns = self.machine.now_ns
        self._turns(now_ns)
        expiry = self.guard.check_lease(now_ns=now_ns, wall_ns=now_ns)
        self.events += [expiry] if expiry else []
        checks = tuple(
            self.enforcer.check_device(
                uuid, power_w=self.machine.power_w(uuid), energy_counter_j=self.machine.energy_j(uuid)
            )
            for uuid in self.machine.uuids
        )
        tick = GuardTick(now_ns=now_ns, wall_ns=now_ns, gpus=checks, origin=self.enforcer.read_origin())
        self.carry_out(self.guard.on_tick(tick))

    def carry_out(self, commands: tuple[GuardCommand, ...]) -> tuple[CommandOutcome, ...]:
        """What is left from before, then these; the guard hears of it."""
        batch = (*self.pending, *commands)
        self.pending = ()
        self.commands += batch
        outcomes = self.enforcer.execute_commands(batch)
        now_ns = self.machine.now_ns
        self.pending = self.guard.on_executed(CommandsExecuted(now_ns=now_ns, wall_ns=now_ns, outcomes=outcomes))
        self.events += self.guard.drain_events()
        return outcomes

    def stop(self) -> None:
        """A clean end."""
        self.carry_out(self.guard.stop())
        for _ in range(MAX_ROUNDS):
            if self.pending:
                self.carry_out(())

    def _turns(self, now_ns: int) -> None:
        for uuid in self.machine.uuids:
            is_lost = self.machine.power_w(uuid) is None and not self._is_hung(uuid)
            if is_lost != (uuid in self.lost):
                self.lost ^= {uuid}
                self.guard.on_device_loss(uuid, lost=is_lost, now_ns=now_ns, wall_ns=now_ns)

    def _is_hung(self, uuid: str) -> bool:
        if isinstance(self.machine, FakeMachine):
            return self.machine.parts[uuid].is_hung
        return self.machine.node.get_device(uuid).health.value == "hung"

    # What tests ask

    def limit_w(self, uuid: str) -> float:
        return self.machine.shown(uuid)[0]

    def status(self, uuid: str) -> tuple[ApplyStatus, str]:
        """Status and rule of one setting in the answer as it is now."""
        assert self.guard.applied is not None
        result = next(result for result in self.guard.applied.results if result.subject == uuid)
        return result.status, result.rule

    def kinds(self) -> list[NodeEventKind]:
        return [event.kind for event in self.events]

    def written(self, uuid: str) -> list[float]:
        """The limits that were ordered for a device."""
        return [one.limit_w for one in self.commands if isinstance(one, SetDeviceLimit) and one.gpu_uuid == uuid]


def setting(uuid: str, limit_w: float | None = None, **more) -> GpuSetting:
    """A wish for one device."""
    return GpuSetting(gpu_uuid=uuid, power_limit_w=limit_w, **more)


def plan_of(*settings: GpuSetting, gangs: tuple[tuple[str, ...], ...] = (), **changes) -> NodePlan:
    """An enforced plan; each gang is a workload."""
    assignments = tuple(
        Assignment(workload_id=f"w{number}", replica=0, gpu_uuids=gang, gpu_milli=300)
        for number, gang in enumerate(gangs)
    )
    whole = NodePlan(node_name="n", epoch=1, lease_s=60.0, enforce=True, assignments=assignments, gpu_settings=settings)
    return replace(whole, **changes)


def settled(rig: Rig, *settings: GpuSetting, **changes) -> tuple[str, ...]:
    """Puts a plan in force, lets everything arrive, and names the devices."""
    rig.offer(plan_of(*settings, **changes))
    rig.cycle(8)
    return rig.machine.uuids
