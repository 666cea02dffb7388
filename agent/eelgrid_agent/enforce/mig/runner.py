"""Runs a transition of one device step by step; a step is done when it was read back.

A step already done is not repeated, so a step may be interrupted anywhere. Before a destruction the device is asked
again who uses it. If the driver has no room where our map shows some, the device is read and planned anew, once.
Where processes cannot be listed, everything that a process could open counts as in use. What any engine has leased
(device_leases.py) counts as in use, too; nothing of the GPU is leased anew while a transition runs.

UnexpectedLayout  the device differs from the plan; internal
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext

from eelgrid_agent.devices.port import (
    DeviceInUse,
    DevicePort,
    DeviceTimeout,
    GpuLostError,
    InsufficientResources,
    MigControlPort,
    NoPermission,
    NotSupported,
    OutOfRange,
    UnknownGpu,
    UnknownInstance,
)
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.mig.journal import MigRecordStore
from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout, read_part
from eelgrid_agent.enforce.mig.partitioner import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstance,
    DestroyGpuInstance,
    MigStep,
    SetMigMode,
    TransitionRefused,
    find_conflict,
    plan_steps,
)
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionLimits:
    """How long the agent tries.

    `pauses_s` are the waits before each further try of one step; together 6 s,
    which outlasts a driver that lags behind a process's end.
    """

    pauses_s: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
    replans_most: int = 1
    tries_most: int = 5
    repairs_most: int = 3
    # A layout that stood so long is repaired as often again.
    steady_s: float = 3600.0
    serial_wait_s: float = 30.0


class UnexpectedLayout(Exception):
    """The device is not as the plan took it to be."""


class ModePending(Exception):
    """The driver took the mode and waits for a reset of the device or a reboot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigObservation:
    """The current state of a device, and what of it must not be touched."""

    gpu: Gpu
    busy: frozenset[int]
    foreign: frozenset[int]
    # Processes that hold the device and no instance of it.
    clients: tuple[int, ...]
    # Whether somebody has a right to the whole device.
    leased: bool = False

    def get_instance(self, instance_id: int) -> GpuInstance | None:
        """The GPU instance with this id."""
        return next((instance for instance in self.gpu.gpu_instances if instance.id == instance_id), None)

    def get_instance_at(self, start: int) -> GpuInstance | None:
        """The GPU instance that starts there."""
        return next((instance for instance in self.gpu.gpu_instances if instance.start == start), None)


class TransitionRunner:
    """Executes plans on one device at a time. `obstacle` says why a device's mode cannot change, or nothing."""

    def __init__(
        self,
        device: DevicePort,
        control: MigControlPort,
        ledger: MigRecordStore,
        *,
        sleep: Callable[[float], None],
        obstacle: Callable[[MigGeometry], str],
        limits: TransitionLimits,
        leases: DeviceLeases | None = None,
    ) -> None:
        """`leases` are those of all engines; None where nobody leases devices."""
        self._leases = leases
        self._device = device
        self._control = control
        self._ledger = ledger
        self._sleep = sleep
        self._obstacle = obstacle
        self._limits = limits

    def observe_device(self, uuid: str) -> MigObservation:
        """The device now; raises TransitionRefused(LOST), UnknownGpu and what else the port raises."""
        gpu = next((gpu for gpu in self._device.gpus() if gpu.uuid == uuid), None)
        if gpu is None:
            raise UnknownGpu(f"this node has no GPU {uuid}; list its GPUs")
        if gpu.lost:
            raise TransitionRefused(RefusalRule.LOST, "the GPU answers nothing; bring it back first")
        record = self._ledger.get(uuid)
        try:
            busy, clients = self._users(gpu)
        except GpuLostError as error:
            raise TransitionRefused(RefusalRule.LOST, str(error)) from error
        held = frozenset[str]() if self._leases is None else self._leases.list_protected(uuid)
        leased = {
            instance.id
            for instance in gpu.gpu_instances
            if uuid in held or any(child.uuid in held for child in instance.compute_instances)
        }
        return MigObservation(
            gpu=gpu,
            busy=busy | record.leased_instances(gpu) | leased,
            foreign=record.foreign_instances(gpu),
            clients=clients,
            leased=record.is_leased_whole or uuid in held,
        )

    def get_geometry(self, uuid: str) -> MigGeometry:
        """What the driver offers; raises TransitionRefused(MODE) on a part without MIG."""
        try:
            return self._control.mig_geometry(uuid)
        except NotSupported as error:
            raise TransitionRefused(RefusalRule.MODE, f"the GPU has no MIG: {error}") from error

    def plan_transition(
        self, uuid: str, look: MigObservation, wanted: MigLayout, remake: Collection[int] = frozenset()
    ) -> tuple[MigStep, ...]:
        """The steps from a look to a layout; raises TransitionRefused."""
        geometry = self.get_geometry(uuid)
        obstacle = self._obstacle(geometry)
        try:
            return plan_steps(
                geometry,
                look.gpu,
                wanted,
                busy=look.busy,
                foreign=look.foreign,
                remake=remake,
                clients=bool(look.clients) or look.leased,
                mode_changes=not obstacle,
            )
        except TransitionRefused as refused:
            if obstacle and refused.rule is RefusalRule.MODE:
                raise TransitionRefused(RefusalRule.MODE, f"the MIG mode found is kept: {obstacle}") from refused
            if refused.rule is RefusalRule.BUSY and look.clients:
                pids = ", ".join(map(str, look.clients))
                raise TransitionRefused(RefusalRule.BUSY, f"{refused.detail} (processes {pids})") from refused
            holders = "" if self._leases is None else self._leases.describe_holders(uuid)
            if refused.rule is RefusalRule.BUSY and holders:
                raise TransitionRefused(RefusalRule.BUSY, f"{refused.detail} (leased to {holders})") from refused
            raise

    def run_transition(self, uuid: str, wanted: MigLayout) -> Gpu:
        """Brings a device to the layout and returns it.

        Raises TransitionRefused, ModePending and what the port raises.
        """
        with nullcontext() if self._leases is None else self._leases.change_layout(uuid):
            return self._run(uuid, wanted)

    def _run(self, uuid: str, wanted: MigLayout) -> Gpu:
        remake: frozenset[int] = frozenset()
        for left in range(self._limits.replans_most, -1, -1):
            look = self.observe_device(uuid)
            try:
                fresh: set[int] = set()
                for step in self.plan_transition(uuid, look, wanted, remake):
                    self._do(uuid, step, fresh)
                gpu = self.observe_device(uuid).gpu
                self._check(uuid, gpu, wanted)
            except UnexpectedLayout as surprise:
                if not left:
                    raise TransitionRefused(
                        RefusalRule.CAPACITY, f"{surprise}; the layout was planned again once"
                    ) from None
                # Nobody says where in a GPU instance its compute instances lie, so all are made anew then.
                remake = frozenset(instance.id for instance in self.observe_device(uuid).gpu.gpu_instances)
            except NoPermission as error:
                raise TransitionRefused(RefusalRule.NO_PERMISSION, str(error)) from error
            except DeviceInUse as error:
                raise TransitionRefused(RefusalRule.IN_USE, str(error)) from error
            except (NotSupported, OutOfRange) as error:
                raise TransitionRefused(RefusalRule.DEVICE, str(error)) from error
            else:
                return gpu
        raise AssertionError("the last round returns or raises")

    def remove_orphans(self, uuid: str) -> int:
        """Removes instances that this agent made and that hold nothing; how many. Raises as `reach` does."""
        with nullcontext() if self._leases is None else self._leases.change_layout(uuid):
            return self._remove_orphans(uuid)

    def _remove_orphans(self, uuid: str) -> int:
        gone = 0
        for instance_id in self._ledger.get(uuid).find_orphans(self.observe_device(uuid).gpu):
            if instance_id in self.observe_device(uuid).busy:
                continue
            try:
                self._destroy(uuid, instance_id, None)
            except UnexpectedLayout as surprise:
                raise TransitionRefused(RefusalRule.BUSY, str(surprise)) from surprise
            gone += 1
        return gone

    def _check(self, uuid: str, gpu: Gpu, wanted: MigLayout) -> None:
        if not self._ledger.get(uuid).has_layout(gpu, wanted):
            raise UnexpectedLayout("the layout read back differs from the request, though every step was confirmed")

    def _users(self, gpu: Gpu) -> tuple[frozenset[int], tuple[int, ...]]:
        """Instances with a process on them, and processes on the whole device."""
        # A process opens a compute instance, so one without any is in nobody's use.
        everything = frozenset(instance.id for instance in gpu.gpu_instances if instance.compute_instances)
        try:
            processes = self._device.processes(gpu.uuid)
        except (NoPermission, NotSupported):
            return everything, ()
        on = [process.gpu_instance_id for process in processes]
        whole = tuple(sorted({process.pid for process in processes if process.gpu_instance_id is None}))
        # With MIG on, a process that is not said to be anywhere may be anywhere.
        busy = everything if whole and gpu.mig_enabled else frozenset(number for number in on if number is not None)
        return busy, whole

    def _do(self, uuid: str, step: MigStep, fresh: set[int]) -> None:
        """One step; `fresh` are starts of instances that this plan made, whose generation has risen already."""
        match step:
            case SetMigMode(enabled=enabled):
                self._set_mode(uuid, enabled=enabled)
            case DestroyComputeInstance(instance_id=instance_id, compute_id=compute_id):
                self._destroy(uuid, instance_id, compute_id)
            case DestroyGpuInstance(instance_id=instance_id):
                self._destroy(uuid, instance_id, None)
            case CreateGpuInstance(profile_id=profile_id, start=start):
                self._create(uuid, profile_id, start)
                fresh.add(start)
            case CreateComputeInstance(start=start, profile_id=profile_id):
                self._create_compute(uuid, start, profile_id, risen=start in fresh)

    def _set_mode(self, uuid: str, *, enabled: bool) -> None:
        said = ""
        for pause in (0.0, *self._limits.pauses_s):
            self._sleep(pause)
            look = self.observe_device(uuid)
            if look.gpu.mig_enabled == enabled and not look.gpu.mig_pending:
                return
            if look.gpu.gpu_instances and look.gpu.mig_enabled != enabled:
                raise UnexpectedLayout("another program created an instance before MIG mode changed")
            if look.clients or look.busy or look.leased:
                raise TransitionRefused(
                    RefusalRule.BUSY, "the GPU is now in use; stop what uses it before MIG mode changes"
                )
            try:
                self._control.set_mig_mode(uuid, enabled=enabled)
            except DeviceInUse as error:
                said = str(error)
            gpu = self.observe_device(uuid).gpu
            if gpu.mig_enabled == enabled and not gpu.mig_pending:
                return
            if gpu.mig_pending and not said:
                raise ModePending
        gpu = self.observe_device(uuid).gpu
        if gpu.mig_pending:
            # A mode that nobody waits for would come true at some later reset.
            self._control.set_mig_mode(uuid, enabled=gpu.mig_enabled)
        detail = said or "the driver reports that the mode changed, and it did not"
        raise TransitionRefused(RefusalRule.IN_USE, f"{detail}; stop other clients of the GPU, then retry")

    def _destroy(self, uuid: str, instance_id: int, compute_id: int | None) -> None:
        said = "the driver reports that it was destroyed, and it is still listed"
        for pause in (0.0, *self._limits.pauses_s):
            self._sleep(pause)
            look = self.observe_device(uuid)
            instance = look.get_instance(instance_id)
            if instance is None or not _has(instance, compute_id):
                return
            if instance_id in look.foreign:
                raise TransitionRefused(
                    RefusalRule.FOREIGN, f"GPU instance {instance_id} was created by another program meanwhile"
                )
            if instance_id in look.busy:
                raise TransitionRefused(RefusalRule.BUSY, f"GPU instance {instance_id} came into use; drain it first")
            if compute_id is None and instance.compute_instances:
                raise UnexpectedLayout(f"another program created a compute instance in GPU instance {instance_id}")
            try:
                if compute_id is None:
                    self._control.destroy_gpu_instance(uuid, instance_id)
                else:
                    self._control.destroy_compute_instance(uuid, instance_id, compute_id)
            except DeviceInUse as error:
                said = str(error)
            except UnknownInstance:
                # Somebody was faster; the next look decides.
                said = "the driver does not know it, and still lists it"
            after = self.observe_device(uuid).get_instance(instance_id)
            if after is None or not _has(after, compute_id):
                return
        raise TransitionRefused(RefusalRule.IN_USE, f"GPU instance {instance_id} cannot be destroyed: {said}")

    def _create(self, uuid: str, profile_id: int, start: int) -> None:
        geometry = self.get_geometry(uuid)
        profile = geometry.profile_by_id(profile_id)
        assert profile is not None, "the plan has profiles of this geometry only"
        part = InstancePart(profile_id=profile_id, start=start, size=profile.size, compute=())
        standing = [read_part(instance) for instance in self.observe_device(uuid).gpu.gpu_instances]
        taken = find_conflict(geometry, [*standing, part])
        if taken:
            raise UnexpectedLayout(f"another program was faster: {taken}")
        self._ledger.put(self._ledger.get(uuid).with_new_instance(part))
        number = self._call_driver(uuid, lambda: self._control.create_gpu_instance(uuid, profile_id, start), part)
        for pause in (0.0, *self._limits.pauses_s):
            self._sleep(pause)
            look = self.observe_device(uuid)
            made = look.get_instance_at(start)
            if made is not None and made.profile_id == profile_id:
                return
            stray = None if number is None else look.get_instance(number)
            if stray is not None:
                self._ledger.put(self._ledger.get(uuid).with_new_instance(read_part(stray)))
                raise UnexpectedLayout(
                    f"the driver made {stray.profile} at {stray.start} instead of {profile.name} at {start}"
                )
        raise UnexpectedLayout(f"the driver reports that it created {profile.name} at {start}, and it is not listed")

    def _call_driver(self, uuid: str, call: Callable[[], int], part: InstancePart) -> int | None:
        """What the driver says; None where it did not answer in time and the instance stands nevertheless."""
        try:
            return call()
        except (InsufficientResources, UnknownInstance, DeviceInUse, NoPermission, NotSupported, OutOfRange) as error:
            # A plain no: what stands there, now or later, is not ours.
            self._ledger.put(self._ledger.get(uuid).without_instance(part))
            if isinstance(error, InsufficientResources | UnknownInstance):
                raise UnexpectedLayout(str(error)) from error
            raise
        except DeviceTimeout:
            made = self.observe_device(uuid).get_instance_at(part.start)
            if made is None or made.profile_id != part.profile_id:
                raise
            return None

    def _create_compute(self, uuid: str, start: int, profile_id: int, *, risen: bool) -> None:
        look = self.observe_device(uuid)
        instance = look.get_instance_at(start)
        if instance is None:
            raise UnexpectedLayout(f"another program removed the GPU instance at {start}")
        if instance.id in look.foreign:
            raise TransitionRefused(
                RefusalRule.FOREIGN, f"GPU instance {instance.id} was created by another program meanwhile"
            )
        # What this plan made itself is nobody's to lose, though somebody may use its first share already.
        if instance.id in look.busy and not risen:
            raise TransitionRefused(RefusalRule.BUSY, f"GPU instance {instance.id} came into use; drain it first")
        before = _count(instance, profile_id)
        if not risen:
            self._ledger.put(self._ledger.get(uuid).with_new_compute(read_part(instance)))
        try:
            self._control.create_compute_instance(uuid, instance.id, profile_id)
        except (InsufficientResources, UnknownInstance) as error:
            raise UnexpectedLayout(str(error)) from error
        for pause in (0.0, *self._limits.pauses_s):
            self._sleep(pause)
            made = self.observe_device(uuid).get_instance_at(start)
            if made is not None and _count(made, profile_id) > before:
                return
        raise UnexpectedLayout(
            f"the driver reports that it created a compute instance at {start}, and it is not listed"
        )


def _has(instance: GpuInstance, compute_id: int | None) -> bool:
    return compute_id is None or any(child.id == compute_id for child in instance.compute_instances)


def _count(instance: GpuInstance, profile_id: int) -> int:
    return sum(child.profile_id == profile_id for child in instance.compute_instances)
