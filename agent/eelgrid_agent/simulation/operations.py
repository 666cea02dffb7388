"""Changes to simulated devices: rights, injected refusals, effects; and the control port over them.

The direct way and the simulated library both end here. It has no clock and never waits.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceEventKind,
    DeviceInUse,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    InsufficientResources,
    ModeChange,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownInstance,
)
from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.simulation.mig import DriverRefusal, DriverRefused, ModeActivation, SimCompute, SimInstance
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import AccessLevel

# What nobody fetches is lost from the front, as an event set that nobody waits on loses it.
_ANNOUNCEMENTS_MOST = 1024
# Volta was the first part whose clocks can be locked, Blackwell the first with workload power profiles.
_UNLOCKABLE = frozenset({"pascal"})
_PROFILED = frozenset({"blackwell"})
_PROFILES = tuple(range(15))
_PROFILES_SINCE = 570


class OperationKind(Enum):
    """What can be refused on demand."""

    SET_MODE = "set mode"
    CREATE_INSTANCE = "create instance"
    DESTROY_INSTANCE = "destroy instance"
    CREATE_COMPUTE = "create compute instance"
    DESTROY_COMPUTE = "destroy compute instance"
    SET_POWER = "set power limit"
    SET_CLOCKS = "set clocks"
    SET_PROFILE = "set power profile"


class DriverAnnouncement(NamedTuple):
    """What the driver tells whoever listens; `code` is the XID or the recovery action."""

    kind: DeviceEventKind
    uuid: str
    code: int = 0
    gi: int | None = None


class DeviceOperations:
    """One node's. `rights` are those of the caller; `pause` is what every call takes first, by its name."""

    def __init__(self, monotonic_ns: Callable[[], int], *, branch: int) -> None:
        self.rights = AccessLevel.ROOT
        self.pause: Callable[[str], None] | None = None
        self.announcements: deque[DriverAnnouncement] = deque(maxlen=_ANNOUNCEMENTS_MOST)
        self._monotonic_ns = monotonic_ns
        self._branch = branch
        self._refusals: dict[tuple[str, OperationKind], deque[DriverRefusal]] = {}

    def refuse_next(self, uuid: str, act: OperationKind, why: DriverRefusal, times: int = 1) -> None:
        """The next such acts on this device are refused."""
        self._refusals.setdefault((uuid, act), deque()).extend([why] * times)

    def has_right(self, level: AccessLevel) -> bool:
        """Whether the caller has this right."""
        return self.rights >= level

    def announce_event(self, kind: DeviceEventKind, gpu: SimGpu, code: int = 0, gi: int | None = None) -> None:
        """Tells whoever listens."""
        self.announcements.append(DriverAnnouncement(kind, gpu.identity.uuid, code, gi))

    # Power and clocks

    def set_power_limit(self, gpu: SimGpu, limit_mw: int) -> None:
        """Asks for a power limit."""
        self._check(AccessLevel.ROOT)
        self._raise_planned_refusal(gpu, OperationKind.SET_POWER)
        low, high = gpu.limits_w
        if not low * 1000.0 <= limit_mw <= high * 1000.0 or limit_mw <= 0:
            raise DriverRefused(DriverRefusal.INVALID)
        gpu.limit_power(limit_mw / 1000.0, self._monotonic_ns())

    def lock_clocks(self, gpu: SimGpu, clocks_mhz: tuple[int, int] | None) -> None:
        """Locks the SM clock, or lets it go with None."""
        if gpu.product.architecture in _UNLOCKABLE:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
        self._check(AccessLevel.ROOT)
        self._raise_planned_refusal(gpu, OperationKind.SET_CLOCKS)
        if clocks_mhz is not None:
            low, high = clocks_mhz
            if not gpu.product.sm_clock_min_mhz <= low <= high <= gpu.product.sm_clock_max_mhz:
                raise DriverRefused(DriverRefusal.INVALID)
            steps = gpu.sm_clocks_mhz
            clocks_mhz = (_nearest(steps, low), _nearest(steps, high))
        gpu.lock_clocks(clocks_mhz, self._monotonic_ns())

    def supported_profiles(self, gpu: SimGpu) -> tuple[int, ...]:
        """The workload power profiles of a part; who may not set them is not told either."""
        if gpu.product.architecture not in _PROFILED or self._branch < _PROFILES_SINCE:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
        if not self.has_right(AccessLevel.ROOT):
            raise DriverRefused(DriverRefusal.NO_PERMISSION)
        return _PROFILES

    def set_profiles(self, gpu: SimGpu, profiles: frozenset[int]) -> None:
        """Asks for exactly these workload power profiles."""
        offered = self.supported_profiles(gpu)
        self._raise_planned_refusal(gpu, OperationKind.SET_PROFILE)
        if not profiles <= set(offered):
            raise DriverRefused(DriverRefusal.INVALID)
        gpu.profiles = profiles

    # MIG

    def set_mode(self, gpu: SimGpu, *, enabled: bool, other_sessions: bool = False) -> ModeActivation:
        """Asks for a MIG mode; what came of it stands beside the success."""
        if gpu.mig.geometry is None:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
        self._check(AccessLevel.ROOT)
        self._raise_planned_refusal(gpu, OperationKind.SET_MODE)
        before, current = gpu.mig.changes, gpu.mig.enabled
        activation = gpu.mig.set_mode(enabled=enabled, other_sessions=other_sessions)
        if gpu.mig.enabled != current and gpu.mig.geometry.reset_to_change_mode:
            gpu.reset(self._monotonic_ns())
        if gpu.mig.changes != before:
            self._on_mig_changed(gpu)
        return activation

    def create_instance(self, gpu: SimGpu, profile_id: int, start: int | None = None) -> SimInstance:
        """Makes a GPU instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.get_profile(profile_id)
        self._raise_planned_refusal(gpu, OperationKind.CREATE_INSTANCE)
        instance = gpu.mig.create_instance(profile_id, start)
        self._on_mig_changed(gpu, instance.id)
        return instance

    def destroy_instance(self, gpu: SimGpu, instance_id: int) -> None:
        """Removes a GPU instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.get_instance(instance_id)
        self._raise_planned_refusal(gpu, OperationKind.DESTROY_INSTANCE)
        gpu.mig.destroy_instance(instance_id)
        self._on_mig_changed(gpu, instance_id)

    def create_compute(self, gpu: SimGpu, instance_id: int, profile_id: int, start: int | None = None) -> SimCompute:
        """Makes a compute instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.get_instance(instance_id)
        self._raise_planned_refusal(gpu, OperationKind.CREATE_COMPUTE)
        compute = gpu.mig.create_compute(instance_id, profile_id, start)
        self._on_mig_changed(gpu, instance_id)
        return compute

    def destroy_compute(self, gpu: SimGpu, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.get_compute(instance_id, compute_id)
        self._raise_planned_refusal(gpu, OperationKind.DESTROY_COMPUTE)
        gpu.mig.destroy_compute(instance_id, compute_id)
        self._on_mig_changed(gpu, instance_id)

    def _on_mig_changed(self, gpu: SimGpu, instance_id: int | None = None) -> None:
        gpu.apply_mig_change(self._monotonic_ns())
        self.announce_event(DeviceEventKind.MIG_CHANGED, gpu, gi=instance_id)

    def _check(self, level: AccessLevel) -> None:
        if not self.has_right(level):
            raise DriverRefused(DriverRefusal.NO_PERMISSION)

    def _raise_planned_refusal(self, gpu: SimGpu, act: OperationKind) -> None:
        refusals = self._refusals.get((gpu.identity.uuid, act))
        if refusals:
            raise DriverRefused(refusals.popleft())


def _nearest(steps: tuple[int, ...], clock_mhz: int) -> int:
    return min(steps, key=lambda step: abs(step - clock_mhz))


_ERRORS: dict[DriverRefusal, tuple[type[DeviceError], str]] = {
    DriverRefusal.NOT_SUPPORTED: (NotSupported, "this part or its mode has no such thing; see its settings"),
    DriverRefusal.NO_PERMISSION: (NoPermission, "the simulated driver refuses this user; give it the rights"),
    DriverRefusal.IN_USE: (DeviceInUse, "a client or a process holds it; stop that first"),
    DriverRefusal.NO_ROOM: (InsufficientResources, "there is no room, or the place is taken; read the layout back"),
    DriverRefusal.NOT_FOUND: (UnknownInstance, "there is no such instance; read the layout back"),
    DriverRefusal.INVALID: (OutOfRange, "the device does not take this value; ask for its limits"),
}
# The driver counts milliwatts in 32 bits.
_WATTS_MOST = 2**32 / 1000.0


class SimulatedControl:
    """The control port; whoever derives from it has the devices."""

    operations: DeviceOperations
    driver_loaded: bool
    stall: Callable[[], None]

    def get_device(self, uuid: str) -> SimGpu:
        """The core of one device; raises UnknownGpu."""
        raise NotImplementedError

    def power_settings(self, uuid: str) -> PowerSettings:
        """Limits and clocks as they are now."""
        with self._changing(uuid, "power_settings") as gpu:
            identity = gpu.identity
            profiles: tuple[int, ...] = ()
            try:
                profiles = self.operations.supported_profiles(gpu)
            except DriverRefused:
                # The part has none, or this user is not told: the settings say none.
                profiles = ()
            return PowerSettings(
                requested_w=gpu.limit_mw / 1000.0,
                enforced_w=gpu.enforced_mw / 1000.0,
                default_w=identity.power_limit_default_w,
                min_w=identity.power_limit_min_w,
                max_w=identity.power_limit_max_w,
                sm_clock_mhz=gpu.sm_clock_mhz,
                sm_clocks_mhz=gpu.sm_clocks_mhz,
                power_profiles=profiles,
                power_profile=min(gpu.profiles, default=None) if profiles else None,
            )

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a limit, in whole milliwatts as the driver counts."""
        if not 0.0 < limit_w < _WATTS_MOST:
            raise OutOfRange(f"{uuid}: a limit of {limit_w:g} W is none; ask for the device's limits")
        with self._changing(uuid, "set_power_limit") as gpu:
            self.operations.set_power_limit(gpu, round(limit_w * 1000.0))

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the SM clock inside."""
        if not 0 < min_mhz <= max_mhz:
            raise OutOfRange(f"{uuid}: there are no clocks from {min_mhz} to {max_mhz} MHz; ask for its steps")
        with self._changing(uuid, "lock_sm_clocks") as gpu:
            self.operations.lock_clocks(gpu, (min_mhz, max_mhz))

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Lets the SM clock go."""
        with self._changing(uuid, "unlock_sm_clocks") as gpu:
            self.operations.lock_clocks(gpu, None)

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """Asks for one workload power profile, or for none."""
        with self._changing(uuid, "set_power_profile") as gpu:
            self.operations.set_profiles(gpu, frozenset() if profile is None else frozenset({profile}))

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """What the part can hold."""
        with self._changing(uuid, "mig_geometry") as gpu:
            if gpu.mig.geometry is None:
                raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
            return gpu.mig.geometry

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode; where clients hold the device, the request is taken back."""
        with self._changing(uuid, "set_mig_mode") as gpu:
            before = gpu.mig.pending
            if gpu.mig.geometry is None:
                raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
            if enabled == before == gpu.mig.enabled:
                return ModeChange.DONE
            activation = self.operations.set_mode(gpu, enabled=enabled)
            if activation is ModeActivation.IN_USE:
                try:
                    self.operations.set_mode(gpu, enabled=before)
                except DriverRefused as refused:
                    raise DeviceInUse(
                        f"{uuid}: MIG mode: a client holds it; the request stays pending ({refused})"
                    ) from None
                raise DriverRefused(DriverRefusal.IN_USE)
            return ModeChange.DONE if activation is ModeActivation.DONE else ModeChange.PENDING

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance at exactly this place."""
        with self._changing(uuid, "create_gpu_instance") as gpu:
            return self.operations.create_instance(gpu, profile_id, start).id

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""
        with self._changing(uuid, "destroy_gpu_instance") as gpu:
            self.operations.destroy_instance(gpu, instance_id)

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance."""
        with self._changing(uuid, "create_compute_instance") as gpu:
            return self.operations.create_compute(gpu, instance_id, profile_id).id

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        with self._changing(uuid, "destroy_compute_instance") as gpu:
            self.operations.destroy_compute(gpu, instance_id, compute_id)

    @contextmanager
    def _changing(self, uuid: str, call: str) -> Iterator[SimGpu]:
        """The device, if it answers; refusals become the port's errors."""
        gpu = self.get_device(uuid)
        if not self.driver_loaded:
            raise DriverUnavailable("the simulated driver is not loaded; load it")
        if self.operations.pause is not None:
            self.operations.pause(call)
        if gpu.health is SimHealth.LOST:
            raise GpuLostError(f"{uuid} answers nothing any more; reset it or reboot the node")
        if gpu.health is SimHealth.HUNG:
            self.stall()
            raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it")
        try:
            yield gpu
        except DriverRefused as refused:
            error, remedy = _ERRORS[refused.why]
            raise error(f"{uuid}: {remedy}") from None
