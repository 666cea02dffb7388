"""What goes wrong with a node's devices, on demand: the failures of real nodes, each by its name.

A fault changes the simulated node as the world would; it never touches a
port. Some act at once, some lie in wait for the next call.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from eelgrid_agent.device import DeviceEventKind
from eelgrid_agent.simulation.gpu import Conduct, SimGpu
from eelgrid_agent.simulation.mig import Refusal, Refused
from eelgrid_agent.simulation.operations import Act
from eelgrid_agent.simulation.spec import GpuLoad, SpecError
from eelgrid_protos.messages import AccessLevel

if TYPE_CHECKING:
    from eelgrid_agent.simulation.node import SimulatedNode

__all__ = ["Faults"]

_CLIENT = "nvidia-persistenced"
# The recovery action that asks for a reset of the device.
_RECOVER_BY_RESET = 1


class Faults:
    """One node's."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    # The device and its counters

    def lose(self, uuid: str) -> None:
        """The device falls off the bus."""
        self._node.device(uuid).lose(self._now_ns)

    def restore(self, uuid: str) -> None:
        """A lost or hung device answers again."""
        self._node.device(uuid).restore(self._now_ns)

    def hang(self, uuid: str) -> None:
        """Calls to the device come to nothing."""
        self._node.device(uuid).hang()

    def reset_counter(self, uuid: str) -> None:
        """The energy counter starts from zero."""
        self._node.device(uuid).reset_counter(self._now_ns)

    def reset(self, uuid: str) -> None:
        """Somebody resets the device: its clients had to go, what ran is dead, a pending MIG mode comes true."""
        gpu = self._node.device(uuid)
        gpu.mig.clients.clear()
        gpu.restore(self._now_ns)
        gpu.reset(self._now_ns)

    def announce_xid(self, uuid: str, code: int, instance_id: int | None = None) -> None:
        """The driver writes an XID and tells whoever listens."""
        self._node.operations.announce(DeviceEventKind.XID, self._node.device(uuid), code, instance_id)

    def announce(self, uuid: str, kind: DeviceEventKind, code: int = _RECOVER_BY_RESET) -> None:
        """The driver tells anything else."""
        self._node.operations.announce(kind, self._node.device(uuid), code)

    def fail_memory(self, uuid: str, *, failed: bool = True) -> None:
        """Remapping a row of memory fails, which only another part mends; False is that part."""
        self._node.device(uuid).wear.remap_failed = failed

    def conduct(self, uuid: str, conduct: Conduct) -> None:
        """What the work on the device does with it: computes, holds it idle, or spins for a rank that does not come."""
        self._node.device(uuid).conduct(conduct, self._now_ns)

    def skew(self, uuid: str, gain: float) -> None:
        """The power sensor reads this many times the truth."""
        if not 0.1 <= gain <= 10.0:
            raise SpecError("gain", f"{gain:g} is not in [0.1, 10]; give 1 for a true sensor")
        self._node.device(uuid).skew(gain, self._now_ns)

    def ask_mode(self, uuid: str, *, enabled: bool) -> None:
        """Somebody asks for a MIG mode by hand (nvidia-smi -mig); where a reset is needed, it stays pending."""
        self._node.operations.set_mode(self._node.device(uuid), enabled=enabled)

    def cap_power(self, uuid: str, cap_w: float | None) -> None:
        """Something out of band lowers the enforced limit; None lets it go."""
        if cap_w is not None and cap_w <= 0.0:
            raise SpecError("cap_w", f"{cap_w:g} W is no cap; give more than 0 W, or None for none")
        self._node.device(uuid).cap_power(cap_w, self._now_ns)

    def limit_power(self, uuid: str, limit_w: float | None) -> None:
        """Somebody else sets the limit (nvidia-smi -pl); None is the default."""
        self._node.limit_power(uuid, limit_w)

    # The driver and the machine

    def unload_driver(self) -> None:
        """The driver goes, and with it everything that runs."""
        self._node.driver_loaded = False
        for gpu in self._node.devices:
            gpu.mig.clients.clear()
            gpu.mig.holds.clear()
            gpu.set_load(GpuLoad(), self._now_ns)

    def load_driver(self) -> None:
        """The driver comes back: counters from zero, settings as at first, instances and some MIG modes lost."""
        if self._node.driver_loaded:
            return
        self._node.driver_loaded = True
        for gpu in self._node.devices:
            gpu.reload(self._now_ns)

    def reload_driver(self) -> None:
        """The driver goes and comes back."""
        self.unload_driver()
        self.load_driver()

    def reboot(self) -> None:
        """The machine goes and comes back, and lost devices with it."""
        self.unload_driver()
        self._node.driver_loaded = True
        for gpu in self._node.devices:
            gpu.restore(self._now_ns)
            gpu.reload(self._now_ns, reboot=True)
        self._node.operations.announcements.clear()

    def renumber(self) -> None:
        """The driver counts the devices the other way round, as it may after a reset or a reboot."""
        for index, gpu in enumerate(sorted(self._node.devices, key=lambda gpu: -gpu.identity.index)):
            gpu.count_as(index)

    # The rights and the calls

    def take_rights(self, level: AccessLevel) -> None:
        """The caller may do this much from now on; ROOT gives everything back."""
        self._node.operations.rights = level

    def slow_calls(self, pause: Callable[[str], None] | None) -> None:
        """Every call to a device runs `pause` first (a wait, or a clock moved on) with its name; None ends it."""
        self._node.operations.pause = pause

    def refuse_next(self, uuid: str, act: Act, why: Refusal, times: int = 1) -> None:
        """The next such acts are refused for no reason that can be seen."""
        self._node.operations.refuse_next(self._gpu(uuid).identity.uuid, act, why, times)

    def no_room_once(self, uuid: str) -> None:
        """The next GPU instance finds INSUFFICIENT_RESOURCES, though there is room."""
        self.refuse_next(uuid, Act.CREATE_INSTANCE, Refusal.NO_ROOM)

    def fail_compute_once(self, uuid: str) -> None:
        """The next GPU instance is made, and its compute instance is not."""
        self.refuse_next(uuid, Act.CREATE_COMPUTE, Refusal.NO_ROOM)

    # Others on the device

    def foreign_client(self, uuid: str, name: str = _CLIENT) -> None:
        """Another program holds the device, which blocks a change of MIG mode."""
        self._gpu(uuid).mig.clients.add(name)

    def client_gone(self, uuid: str, name: str = _CLIENT) -> None:
        """That program lets the device go."""
        self._gpu(uuid).mig.clients.discard(name)

    def hold(self, uuid: str, pid: int, instance_id: int | None = None, compute_id: int | None = None) -> None:
        """A process runs on the device, or on an instance of it."""
        self._gpu(uuid).mig.holds[pid] = (instance_id, compute_id)

    def release(self, uuid: str, pid: int) -> None:
        """That process ends."""
        self._gpu(uuid).mig.holds.pop(pid, None)

    def let_mode_reset(self, uuid: str, *, works: bool) -> None:
        """Whether a change of MIG mode resets the device by itself where it needs one; in a virtual machine it cannot."""
        self._gpu(uuid).mig.resets_itself = works

    def foreign_instance(self, uuid: str, profile_id: int, start: int, *, compute: bool = True) -> int:
        """Somebody else makes a GPU instance, and one compute instance over all of it; returns its id."""
        gpu = self._gpu(uuid)
        try:
            instance = gpu.mig.create(profile_id, start)
        except Refused as refused:
            problem = f"profile {profile_id} at {start} does not fit ({refused}); choose another"
            raise SpecError("start", problem) from None
        if compute:
            gpu.mig.create_compute(instance.id, instance.profile.whole.id)
        gpu.settle(self._now_ns)
        self._node.operations.announce(DeviceEventKind.MIG_CHANGED, gpu, gi=instance.id)
        return instance.id

    def destroy_behind(self, uuid: str, instance_id: int) -> None:
        """Somebody else removes a GPU instance with all that is in it, and the processes that held it die."""
        gpu = self._gpu(uuid)
        held = [pid for pid, (instance, _) in gpu.mig.holds.items() if instance == instance_id]
        for pid in held:
            del gpu.mig.holds[pid]
        try:
            for number in list(gpu.mig.instance(instance_id).compute):
                gpu.mig.destroy_compute(instance_id, number)
            gpu.mig.destroy(instance_id)
        except Refused:
            raise SpecError("instance_id", f"there is no GPU instance {instance_id}; list them") from None
        gpu.settle(self._now_ns)
        self._node.operations.announce(DeviceEventKind.MIG_CHANGED, gpu, gi=instance_id)

    @property
    def _now_ns(self) -> int:
        return self._node.monotonic_ns()

    def _gpu(self, uuid: str) -> SimGpu:
        return self._node.device(uuid)
