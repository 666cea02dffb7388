"""A small device of the MIG half of the port, for crashing: one GPU, its geometry, and a hook around every change.

Replaces the driver where SimulatedNode cannot be stopped in the middle of
a call. Every instance and compute instance has a serial number that is never
reused and that no driver reports, so a test sees which instances were destroyed
and recreated with equal ids. Forbidden requests of the agent (to destroy instances
in use or of others) are recorded in `violations` even if the driver refuses them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceInUse,
    GpuLostError,
    GpuProcess,
    InsufficientResources,
    ModeChange,
    NoPermission,
    NotSupported,
    OutOfRange,
    ProcessKind,
    UnknownGpu,
    UnknownInstance,
)
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance

__all__ = ["MigDevice"]


@dataclass
class Held:
    """One GPU instance; `compute` is id to (profile id, first slice, serial)."""

    serial: int
    profile: GiProfile
    start: int
    compute: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    # Destroyed, and listed until then.
    lingers_until_s: float | None = None


@dataclass
class Fault:
    """What the next call of this name raises: instead of its effect, or after it."""

    call: str
    error: DeviceError
    after: bool = False


class MigDevice:
    """One GPU."""

    uuid = "GPU-0"

    def __init__(self, geometry: MigGeometry, hook: Callable[[str], None], *, mig_enabled: bool = True) -> None:
        self.geometry = geometry
        self.hook = hook
        self.mig_enabled = self.mig_pending = mig_enabled
        self.held: dict[int, Held] = {}
        # Process to GPU and compute instance; None is the whole device.
        self.users: dict[int, tuple[int | None, int | None]] = {}
        self.foreign: set[int] = set()
        self.faults: list[Fault] = []
        self.violations: list[str] = []
        self.now_s = 0.0
        self.lag_s = 0.0
        self.lost = False
        self.lists_processes = True
        self._serial = 0

    # What befalls it

    def stand(self, profile_id: int, start: int, compute: tuple[int, ...], *, foreign: bool = False) -> int:
        """An instance that somebody made; returns its id."""
        number = self._make(profile_id, start)
        for ci in compute:
            self._make_compute(number, ci)
        if foreign:
            self.foreign.add(self.held[number].serial)
        return number

    def remove(self, instance_id: int) -> None:
        """Somebody destroys an instance with all that is in it."""
        del self.held[instance_id]

    def reset(self) -> None:
        """The device starts anew: a pending mode is in force, instances and processes are gone."""
        self.mig_enabled = self.mig_pending
        self.held.clear()
        self.users.clear()

    def reboot(self) -> None:
        """The machine starts anew; some parts forget their mode."""
        if not self.geometry.mode_survives_reboot:
            self.mig_pending = False
        self.reset()

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.held = {n: h for n, h in self.held.items() if h.lingers_until_s is None or h.lingers_until_s > self.now_s}

    def serials(self) -> dict[int, tuple[int, ...]]:
        """Every instance and compute instance that stands, by GPU instance id, by what no driver tells."""
        return {
            number: (held.serial, *sorted(serial for _, _, serial in held.compute.values()))
            for number, held in self.held.items()
        }

    # The device port

    def gpus(self) -> tuple[Gpu, ...]:
        """The device."""
        instances = tuple(
            GpuInstance(
                id=number,
                profile_id=held.profile.id,
                profile=held.profile.name,
                start=held.start,
                size=held.profile.size,
                compute_instances=tuple(
                    ComputeInstance(id=ci, profile_id=profile_id, uuid=f"MIG-{number}-{start}")
                    for ci, (profile_id, start, _) in sorted(held.compute.items())
                ),
            )
            for number, held in sorted(self.held.items())
        )
        gpu = Gpu(
            uuid=self.uuid,
            index=0,
            product=self.geometry.key,
            model=self.geometry.key,
            mig_capable=True,
            mig_enabled=self.mig_enabled,
            mig_pending=self.mig_enabled != self.mig_pending,
            gpu_instances=instances,
            lost=self.lost,
        )
        return (gpu,)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who holds it."""
        self._mine(uuid)
        if not self.lists_processes:
            raise NoPermission("processes of a MIG device are for root; run as root")
        return tuple(
            GpuProcess(pid=pid, kind=ProcessKind.COMPUTE, gpu_instance_id=gi, compute_instance_id=ci)
            for pid, (gi, ci) in self.users.items()
        )

    # The control port

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """What it can hold."""
        self._mine(uuid)
        return self.geometry

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode."""
        self._begin(uuid, "set_mig_mode")
        if self.held and enabled != self.mig_enabled:
            self.violations.append("mode change with instances")
            raise DeviceInUse("instances stand; destroy them")
        if self.users and enabled != self.mig_enabled:
            raise DeviceInUse("processes use the device; stop them")
        self.mig_pending = enabled
        if not self.geometry.reset_to_change_mode:
            self.mig_enabled = enabled
        self._end("set_mig_mode")
        return ModeChange.DONE if self.mig_enabled == enabled else ModeChange.PENDING

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance."""
        self._begin(uuid, "create_gpu_instance")
        number = self._make(profile_id, start)
        self._end("create_gpu_instance")
        return number

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""
        self._begin(uuid, "destroy_gpu_instance")
        held = self._standing(instance_id)
        if held.serial in self.foreign:
            self.violations.append(f"foreign GPU instance {instance_id} was to be destroyed")
        if any(gi == instance_id for gi, _ in self.users.values()):
            self.violations.append(f"GPU instance {instance_id} was to be destroyed in use")
            raise DeviceInUse("a process runs on it; stop it")
        if held.compute:
            raise DeviceInUse("it has compute instances; destroy them")
        self._let_go(instance_id)
        self._end("destroy_gpu_instance")

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance."""
        self._begin(uuid, "create_compute_instance")
        if self._standing(instance_id).serial in self.foreign:
            self.violations.append(f"a compute instance was to be made in foreign GPU instance {instance_id}")
        number = self._make_compute(instance_id, profile_id)
        self._end("create_compute_instance")
        return number

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._begin(uuid, "destroy_compute_instance")
        held = self._standing(instance_id)
        if compute_id not in held.compute:
            raise UnknownInstance("no such compute instance; list them")
        if held.serial in self.foreign:
            self.violations.append(f"compute instance {compute_id} of foreign {instance_id} was to be destroyed")
        if (instance_id, compute_id) in self.users.values():
            self.violations.append(f"compute instance {compute_id} of {instance_id} was to be destroyed in use")
            raise DeviceInUse("a process runs on it; stop it")
        del held.compute[compute_id]
        self._end("destroy_compute_instance")

    # How

    def _mine(self, uuid: str) -> None:
        if uuid != self.uuid:
            raise UnknownGpu(f"no GPU {uuid}; list them")

    def _begin(self, uuid: str, call: str) -> None:
        self._mine(uuid)
        self.hook(f"before {call}")
        if self.lost:
            raise GpuLostError("the device answers nothing; reset it")
        self._fail(call, after=False)

    def _end(self, call: str) -> None:
        self._fail(call, after=True)
        self.hook(f"after {call}")

    def _fail(self, call: str, *, after: bool) -> None:
        fault = next((fault for fault in self.faults if (fault.call, fault.after) == (call, after)), None)
        if fault is not None:
            self.faults.remove(fault)
            raise fault.error

    def _standing(self, instance_id: int) -> Held:
        held = self.held.get(instance_id)
        if held is None or held.lingers_until_s is not None:
            raise UnknownInstance("no such GPU instance; list them")
        return held

    def _make(self, profile_id: int, start: int) -> int:
        if not self.mig_enabled:
            raise NotSupported("MIG is off; turn it on")
        profile = self.geometry.profile_by_id(profile_id)
        if profile is None:
            raise NotSupported("no such profile; list them")
        if start not in profile.starts:
            raise OutOfRange("no such place; list them")
        standing = [(held.profile, held.start) for held in self.held.values()]
        if self.geometry.conflict([*standing, (profile, start)]):
            raise InsufficientResources("insufficient resources; read the layout back")
        number = self.geometry.gi_id(start, profile.size)
        self._serial += 1
        self.held[number] = Held(self._serial, profile, start)
        return number

    def _make_compute(self, instance_id: int, profile_id: int) -> int:
        held = self._standing(instance_id)
        slices = {ci.id: ci for ci in held.profile.compute_instances}
        if profile_id not in slices:
            raise NotSupported("no such compute profile; list them")
        taken = {s for ci, start, _ in held.compute.values() for s in range(start, start + slices[ci].compute_slices)}
        wanted = slices[profile_id]
        free = [s for s in wanted.starts if not taken & set(range(s, s + wanted.compute_slices))]
        if not free:
            raise InsufficientResources("insufficient resources; read the layout back")
        number = next(n for n in range(len(held.compute) + 1) if n not in held.compute)
        self._serial += 1
        held.compute[number] = (profile_id, free[0], self._serial)
        return number

    def _let_go(self, instance_id: int) -> None:
        if self.lag_s:
            self.held[instance_id].lingers_until_s = self.now_s + self.lag_s
        else:
            del self.held[instance_id]
