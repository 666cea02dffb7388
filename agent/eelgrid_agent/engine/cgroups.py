"""Cgroups (version 2) of attempts: all of an attempt is killed at once, and held to its memory and CPUs where possible.

Owns where they are made: below the cgroup that was delegated to the agent. systemd delegates with `Delegate=yes`;
controllers can be enabled only if the agent itself is in a leaf, which `DelegateSubgroup=agent` arranges. Without a
delegated cgroup the launcher goes through the tree of processes instead, and nothing is limited.
"""

import contextlib
import os
from pathlib import Path

CGROUP_MOUNT = Path("/sys/fs/cgroup")
_AGENT_LEAF = "agent"
_CONTROLLERS = ("cpu", "memory", "pids")
_CPU_PERIOD_US = 100_000
# A job that forks for ever must not take the machine's last process id.
PROCESSES_PER_ATTEMPT_MOST = 16_384


def find_delegated_cgroup(mount: Path = CGROUP_MOUNT, own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Returns the cgroup below which this process may make others; None if there is none."""
    try:
        lines = own.read_text("ascii").splitlines()
    except OSError:
        return None
    name = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    if name == "/":
        # The root cgroup belongs to the system's manager.
        return None
    folder = mount / name.lstrip("/")
    if folder.name == _AGENT_LEAF:
        folder = folder.parent
    is_kill_known = (folder / "cgroup.kill").exists()
    return folder if is_kill_known and os.access(folder / "cgroup.procs", os.W_OK) else None


class AttemptCgroups:
    """Makes and removes the cgroups of attempts below a delegated one; makes none without it."""

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent
        if parent is not None:
            for controller in _CONTROLLERS:
                _write(parent / "cgroup.subtree_control", f"+{controller}")

    @property
    def limits(self) -> tuple[str, ...]:
        """The controllers that hold attempts to what they asked for."""
        if self._parent is None:
            return ()
        try:
            enabled = (self._parent / "cgroup.subtree_control").read_text("ascii").split()
        except OSError:
            return ()
        return tuple(controller for controller in _CONTROLLERS if controller in enabled)

    def create(self, name: str, *, cpu_milli: int, memory_bytes: int) -> str:
        """Makes a cgroup with limits as far as they can be set; returns its path, empty if there is none."""
        path = self.find(name)
        if not path:
            return ""
        folder = Path(path)
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            return ""
        _write(folder / "pids.max", str(PROCESSES_PER_ATTEMPT_MOST))
        if cpu_milli:
            _write(folder / "cpu.max", f"{cpu_milli * _CPU_PERIOD_US // 1000} {_CPU_PERIOD_US}")
        if memory_bytes:
            _write(folder / "memory.max", str(memory_bytes))
            _write(folder / "memory.oom.group", "1")
        return path

    def find(self, name: str) -> str:
        """Returns the path of a cgroup, whether it exists or not; empty where none is made."""
        return "" if self._parent is None else str(self._parent / f"attempt-{name}")

    def remove(self, path: str) -> None:
        """Kills what is left in a cgroup and removes it; what is still ending keeps it."""
        if path:
            _write(Path(path) / "cgroup.kill", "1")
            with contextlib.suppress(OSError):
                Path(path).rmdir()


def _write(path: Path, text: str) -> None:
    """Writes an attribute; one that this kernel or the delegation lacks is left out."""
    with contextlib.suppress(OSError):
        path.write_text(text, "ascii")
