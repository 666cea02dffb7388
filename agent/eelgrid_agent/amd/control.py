"""What changes an AMD device: its power cap and the range of its graphics clock.

It translates and decides nothing; the caller reads back. AMD's partition modes
are no MIG: they divide a device evenly and take a reset of all its parts, so
every MIG method says NotSupported, and no process is put at risk.
"""

from typing import Any, NoReturn

from eelgrid_agent.amd.device import AmdDevice
from eelgrid_agent.amd.readings import number
from eelgrid_agent.device import ModeChange, NotSupported, OutOfRange, PowerSettings
from eelgrid_protos.catalogue import MigGeometry

__all__ = ["AmdControl"]

_SENSOR = 0
_MICRO = 1e6


class AmdControl:
    """The control port over `amdsmi`; shares the reader's session and handles."""

    def __init__(self, device: AmdDevice) -> None:
        self._device = device

    def power_settings(self, uuid: str) -> PowerSettings:
        """Caps and the graphics clock as they are now."""
        caps = self._device.call(uuid, lambda smi, handle: smi.amdsmi_get_power_cap_info(handle))
        clock = self._device.call(uuid, _graphics_clock)
        watts = {
            name: _watts(caps, name) for name in ("power_cap", "default_power_cap", "min_power_cap", "max_power_cap")
        }
        clock_mhz = number(clock, "clk", "cur_clk")
        return PowerSettings(
            requested_w=watts["power_cap"],
            enforced_w=watts["power_cap"],
            default_w=watts["default_power_cap"],
            min_w=watts["min_power_cap"],
            max_w=watts["max_power_cap"],
            sm_clock_mhz=None if clock_mhz is None else int(clock_mhz),
        )

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a cap; raises OutOfRange, also where the driver would clamp it silently."""
        settings = self.power_settings(uuid)
        low_w, high_w = settings.min_w or 0.0, settings.max_w
        if limit_w < low_w or (high_w is not None and limit_w > high_w):
            raise OutOfRange(f"{limit_w:g} W is not in [{low_w:g}, {high_w or 0.0:g}] W; choose a limit inside")
        cap_uw = round(limit_w * _MICRO)
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_power_cap(handle, _SENSOR, cap_uw))

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the graphics clock inside."""
        clock = self._device.call(uuid, _graphics_clock)
        low_mhz, high_mhz = number(clock, "min_clk"), number(clock, "max_clk")
        if min_mhz > max_mhz or (high_mhz is not None and max_mhz > high_mhz):
            raise OutOfRange(
                f"[{min_mhz}, {max_mhz}] MHz is not in [{low_mhz or 0:g}, {high_mhz or 0:g}] MHz; choose inside"
            )
        # The upper end first: a lower end above the upper one that stands is refused.
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_clk_limit(handle, "sclk", "max", max_mhz))
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_clk_limit(handle, "sclk", "min", min_mhz))

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Lets the driver choose the clock again."""
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_perf_level(handle, smi.AmdSmiDevPerfLevel.AUTO))

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """There are none of the port's kind."""
        self._refuse(uuid, f"workload power profile {profile}")

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """There is none."""
        self._refuse(uuid, "MIG")

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """There is no such mode."""
        self._refuse(uuid, f"MIG mode {enabled}")

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """There are no instances."""
        self._refuse(uuid, f"MIG profile {profile_id} at {start}")

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}")

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}, profile {profile_id}")

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}/{compute_id}")

    def _refuse(self, uuid: str, what: str) -> NoReturn:
        self._device.read_instances(uuid)  # an unknown device is told first
        raise NotSupported(f"an AMD device has no {what}; ask for whole devices")


def _graphics_clock(smi: Any, handle: Any) -> Any:
    return smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)


def _watts(caps: Any, name: str) -> float | None:
    cap_uw = number(caps, name)
    return None if cap_uw is None else cap_uw / _MICRO
