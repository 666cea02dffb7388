"""Joules of CPU packages and memory, from the kernel's powercap counters (RAPL).

Owns how the counters are found and how their wrap is undone. Must not know who
asks or when.

Theory. Linux shows one folder for each zone, `intel-rapl:0` for a package and
`intel-rapl:0:1` for a part of it, also on AMD. Packages are summed for the
CPU, zones named dram for memory; psys and the parts core and uncore lie inside
or across others and would be counted twice. A counter wraps at its own
`max_energy_range_uj`, within minutes on a busy machine: a fall is one wrap, so
it has to be read more often than that (60 s at 4 kW). Since 2020 only root may
read it (CVE-2020-8694).
"""

from pathlib import Path

from eelgrid_agent.device import Missing, Value
from eelgrid_protos.messages import AbsenceReason

__all__ = ["PackageEnergy"]

_MICRO = 1e-6
_ZONES_MOST = 64


class _Counter:
    """One zone's joules since it was first read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last_uj: int | None = None
        self._total_uj = 0

    def read_j(self) -> float:
        """Raises OSError, ValueError."""
        now_uj = int(self._path.read_text(encoding="ascii"))
        if self._last_uj is not None:
            rise_uj = now_uj - self._last_uj
            self._total_uj += rise_uj if rise_uj >= 0 else rise_uj + self._range_uj + 1
        self._last_uj = now_uj
        return self._total_uj * _MICRO


class PackageEnergy:
    """The machine's zones; `root` is where the kernel shows them."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._packages: list[_Counter] = []
        self._memories: list[_Counter] = []
        for folder in sorted(root.glob("intel-rapl:*"))[:_ZONES_MOST]:
            try:
                name = (folder / "name").read_text(encoding="ascii").strip()
                counters = {"package": self._packages, "dram": self._memories}.get(name.partition("-")[0])
                if counters is not None:
                    counters.append(_Counter(folder))
            except (OSError, ValueError):
                # A zone that cannot be described cannot be summed.
                continue

    def cpu_j(self) -> Value:
        """Joules of all packages since the first look."""
        return _sum_j(self._packages)

    def memory_j(self) -> Value:
        """Joules of all memory zones since the first look."""
        return _sum_j(self._memories)


def _sum_j(counters: list[_Counter]) -> Value:
    if not counters:
        return Missing(AbsenceReason.NOT_SUPPORTED)
    try:
        return sum([counter.read_j() for counter in counters])
    except PermissionError:
        return Missing(AbsenceReason.NO_PERMISSION)
    except (OSError, ValueError):
        return Missing(AbsenceReason.NOT_SAMPLED)
