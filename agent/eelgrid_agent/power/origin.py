"""Since when the devices of this machine remember their settings.

Owns where boot and driver load are read. Must not know what depends on them.

A settings change that came with a boot or a driver load is nobody's doing, so
the two must be told from drift. The kernel makes the directory of a module anew
with every load and numbers it anew, which any user may read; times and
addresses of modules repeat or are hidden from others than root. Where there is
neither, both are empty, and only the energy counter tells of a load.
"""

from pathlib import Path

from eelgrid_agent.guard.events import Origin

__all__ = ["machine_origin"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/sys/module/nvidia")


def machine_origin(*, boot_id: Path = _BOOT_ID, driver: Path = _DRIVER) -> Origin:
    """As it is now; read it at every cycle, for a driver may be loaded anew while we run."""
    try:
        boot = boot_id.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    try:
        start = str(driver.stat().st_ino)
    except OSError:
        start = ""
    return Origin(boot_id=boot, driver_start=start)
