"""The control half of a simulated node: what its devices let be changed, without NVML in between.

It answers exactly as the NVML control adapter does over the same devices,
which one contract suite holds both to. It translates refusals and decides
nothing; what a change does is the operations' business.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eelgrid_agent.device import (
    DeviceError,
    DeviceTimeout,
    DriverUnavailable,
    GpuLost,
    InsufficientResources,
    InUse,
    ModeChange,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownInstance,
)
from eelgrid_agent.simulation.gpu import Health, SimGpu
from eelgrid_agent.simulation.mig import Activation, Refusal, Refused
from eelgrid_agent.simulation.operations import Operations
from eelgrid_protos.catalogue import MigGeometry

__all__ = ["NodeControl"]

_ERRORS: dict[Refusal, tuple[type[DeviceError], str]] = {
    Refusal.NOT_SUPPORTED: (NotSupported, "this part or its mode has no such thing; see its settings"),
    Refusal.NO_PERMISSION: (NoPermission, "the simulated driver refuses this user; give it the rights"),
    Refusal.IN_USE: (InUse, "a client or a process holds it; stop that first"),
    Refusal.NO_ROOM: (InsufficientResources, "there is no room, or the place is taken; read the layout back"),
    Refusal.NOT_FOUND: (UnknownInstance, "there is no such instance; read the layout back"),
    Refusal.INVALID: (OutOfRange, "the device does not take this value; ask for its limits"),
}
# The driver counts milliwatts in 32 bits.
_WATTS_MOST = 2**32 / 1000.0


class NodeControl:
    """The control port; whoever derives from it has the devices."""

    operations: Operations
    driver_loaded: bool
    stall: Callable[[], None]

    def device(self, uuid: str) -> SimGpu:
        """The core of one device; raises UnknownGpu."""
        raise NotImplementedError

    def power_settings(self, uuid: str) -> PowerSettings:
        """Limits and clocks as they are now."""
        with self._changing(uuid, "power_settings") as gpu:
            identity = gpu.identity
            profiles: tuple[int, ...] = ()
            try:
                profiles = self.operations.offered_profiles(gpu)
            except Refused:
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
                raise Refused(Refusal.NOT_SUPPORTED)
            return gpu.mig.geometry

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode; where clients hold the device, the request is taken back."""
        with self._changing(uuid, "set_mig_mode") as gpu:
            before = gpu.mig.pending
            if gpu.mig.geometry is None:
                raise Refused(Refusal.NOT_SUPPORTED)
            if enabled == before == gpu.mig.enabled:
                return ModeChange.DONE
            activation = self.operations.set_mode(gpu, enabled=enabled)
            if activation is Activation.IN_USE:
                try:
                    self.operations.set_mode(gpu, enabled=before)
                except Refused as refused:
                    raise InUse(f"{uuid}: MIG mode: a client holds it; the request stays pending ({refused})") from None
                raise Refused(Refusal.IN_USE)
            return ModeChange.DONE if activation is Activation.DONE else ModeChange.PENDING

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
        gpu = self.device(uuid)
        if not self.driver_loaded:
            raise DriverUnavailable("the simulated driver is not loaded; load it")
        if self.operations.pause is not None:
            self.operations.pause(call)
        if gpu.health is Health.LOST:
            raise GpuLost(f"{uuid} answers nothing any more; reset it or reboot the node")
        if gpu.health is Health.HUNG:
            self.stall()
            raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it")
        try:
            yield gpu
        except Refused as refused:
            error, remedy = _ERRORS[refused.why]
            raise error(f"{uuid}: {remedy}") from None
