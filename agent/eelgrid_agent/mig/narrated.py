"""The control port, told aloud: every change of MIG is told when it was made, or when it was not.

It adds nothing; whoever watches sees what the executor does. A step that fails
again in the same way is told once.
"""

from collections.abc import Callable
from typing import TypeVar

from eelgrid_agent.device import Control, DeviceError, ModeChange, PowerSettings
from eelgrid_protos.catalogue import MigGeometry

__all__ = ["Narrated"]

_Answer = TypeVar("_Answer")


class Narrated:
    """A control port around another. `tell` takes a line, `changed` is called after every change, done or not."""

    def __init__(self, control: Control, *, tell: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._control = control
        self._tell = tell
        self._changed = changed
        self._said = ""
        self._geometries: dict[str, MigGeometry] = {}

    def power_settings(self, uuid: str) -> PowerSettings:
        """As the port."""
        return self._control.power_settings(uuid)

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """As the port."""
        self._control.set_power_limit(uuid, limit_w)

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """As the port."""
        self._control.lock_sm_clocks(uuid, min_mhz, max_mhz)

    def unlock_sm_clocks(self, uuid: str) -> None:
        """As the port."""
        self._control.unlock_sm_clocks(uuid)

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """As the port."""
        self._control.set_power_profile(uuid, profile)

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """As the port."""
        self._geometries[uuid] = self._control.mig_geometry(uuid)
        return self._geometries[uuid]

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """As the port."""
        mode = "on" if enabled else "off"
        return self._told(uuid, f"turn MIG mode {mode}", lambda: self._control.set_mig_mode(uuid, enabled=enabled))

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """As the port."""
        geometry = self._geometries.get(uuid)
        profile = geometry.profile_by_id(profile_id) if geometry else None
        name = profile.name if profile else f"profile {profile_id}"
        return self._told(
            uuid, f"create {name} at {start}", lambda: self._control.create_gpu_instance(uuid, profile_id, start)
        )

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """As the port."""
        text = f"destroy GPU instance {instance_id}"
        self._told(uuid, text, lambda: self._control.destroy_gpu_instance(uuid, instance_id))

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """As the port."""
        text = f"create compute instance in GPU instance {instance_id}"
        return self._told(uuid, text, lambda: self._control.create_compute_instance(uuid, instance_id, profile_id))

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """As the port."""
        text = f"destroy compute instance {compute_id} of GPU instance {instance_id}"
        self._told(uuid, text, lambda: self._control.destroy_compute_instance(uuid, instance_id, compute_id))

    def _told(self, uuid: str, text: str, change: Callable[[], _Answer]) -> _Answer:
        try:
            answer = change()
        except DeviceError as error:
            # Whoever listens knows which device this is about.
            self._say(f"{text}: {str(error).removeprefix(f'{uuid}: ')}")
            raise
        finally:
            self._changed()
        self._said = ""
        if answer is ModeChange.PENDING:
            self._say(f"{text}: taken, and waits for a reset")
        else:
            self._say(f"{text}: done{'' if answer is None or answer is ModeChange.DONE else f', id {answer}'}")
        return answer

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell(text)
