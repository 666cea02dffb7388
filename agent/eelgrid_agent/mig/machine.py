"""Whether this machine can reset a GPU, which some parts need to change MIG mode.

Owns the two known reasons why not: a virtual machine, to which the reset of a
passed-through GPU is often closed, so that a mode asked for waits for ever; and
a display driver that holds the GPU. Such a change is refused before it is asked
for, since the driver would say success and leave it pending. Knows no device
port.
"""

from dataclasses import dataclass
from pathlib import Path

from eelgrid_protos.catalogue import MigGeometry

__all__ = ["Machine", "obstacle", "read_machine"]

_DISPLAY_MODULE = "nvidia_drm"
_BYTES_MOST = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What of the machine matters to a reset."""

    virtual: bool = False
    display_users: int = 0


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine as the kernel tells; what it does not tell counts as no obstacle."""
    flags = next((line for line in _lines(root / "proc/cpuinfo") if line.startswith("flags")), "")
    users = [line.split()[2] for line in _lines(root / "proc/modules") if line.split()[:1] == [_DISPLAY_MODULE]]
    return Machine(virtual="hypervisor" in flags.split(), display_users=int(users[0]) if users else 0)


def obstacle(geometry: MigGeometry, machine: Machine) -> str:
    """Why this machine cannot change the MIG mode of a part, or nothing."""
    if not geometry.reset_to_change_mode:
        return ""
    if machine.virtual:
        remedy = "change it with nvidia-smi -mig and boot the virtual machine anew, or change it on the host"
        return f"this part needs a reset for it, which a virtual machine can seldom give; {remedy}"
    if machine.display_users:
        return (
            f"this part needs a reset for it, which {_DISPLAY_MODULE} in use prevents; stop the display and unload it"
        )
    return ""


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MOST).decode(errors="replace").splitlines()
    except OSError:
        return []
