"""What eelctl doctor reads of the machine: the driver, rights, folders, clocks, ports, sockets.

Owns the looks; must not judge what it finds (doctor_checks_machine.py does).
Nothing is changed: a folder is asked for rights and not written, a port is
bound for a moment only where nobody has it. NVML is asked in a child process
with a time limit, since a call into a driver that hangs cannot be ended.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from eelgrid_controller.cli.doctor_checks_machine import DriverAnswer, Folder, KubeletSockets, Rights

__all__ = [
    "clock_synchronised", "driver_answer", "folder", "gpus_on_bus", "installed", "kubelet_sockets", "own_requirements",
    "port_is_free", "python_version", "rights", "state_folder",
]  # fmt: skip

_SYS_ADMIN = 1 << 21
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_TIMEDATECTL_S = 5.0
_SOCKET_S = 1.0
_STARTING_S = 3.0
_ENDING_S = 1.0
# Its last line is JSON; what the driver prints before it is passed over.
_ASK_NVML = """
import json, time
start = time.monotonic()
def say(**told):
    print(json.dumps(told | {"took_s": time.monotonic() - start}))
    raise SystemExit
try:
    import pynvml
except ImportError:
    say(problem="binding", detail="no module pynvml")
def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)
try:
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        pynvml.nvmlDeviceGetHandleByIndex(index)
    say(problem="", version=text(pynvml.nvmlSystemGetDriverVersion()), devices=pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError_LibraryNotFound as error:
    say(problem="library", detail=text(error))
except pynvml.NVMLError_DriverNotLoaded as error:
    say(problem="driver", detail=text(error))
except pynvml.NVMLError as error:
    say(problem="error", detail=text(error))
"""


def python_version() -> tuple[int, int, int]:
    """Major, minor and patch of the interpreter."""
    major, minor, patch = (int(part) for part in platform.python_version_tuple()[:3] if part.isdigit())
    return major, minor, patch


def own_requirements() -> tuple[str, ...]:
    """What Eelgrid says it needs; empty where it runs from a folder."""
    try:
        return tuple(metadata.requires("eelgrid") or ())
    except metadata.PackageNotFoundError:
        return ()


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """Versions by package; None where one is not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def driver_answer(limit_s: float, program: str = _ASK_NVML) -> DriverAnswer:
    """What NVML says to a child that is ended at its limit."""
    begin_s = time.monotonic()
    # Not run(): a child that hangs in the driver may survive SIGKILL for long, and nobody waits for it then.
    child = subprocess.Popen(  # noqa: S603 - our own interpreter and text
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        said, _ = child.communicate(timeout=limit_s + _STARTING_S)
    except subprocess.TimeoutExpired:
        child.kill()
        assert child.stdout is not None
        child.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_ENDING_S)
        return DriverAnswer("hung", took_s=time.monotonic() - begin_s)
    lines = said.decode("utf-8", "replace").splitlines()
    if child.returncode or not lines:
        return DriverAnswer("error", detail=f"the program that asked ended with {child.returncode}")
    return DriverAnswer(**json.loads(lines[-1]))


def gpus_on_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NVIDIA's display devices on the bus; None where the kernel shows no bus."""
    if not devices.is_dir():
        return None
    return sum(
        _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY)
        for device in devices.iterdir()
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def rights(proc: Path = Path("/proc"), devices: Path = Path("/dev")) -> Rights:
    """What this process may do."""
    status = _text(proc / "self/status").splitlines()
    held = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    mig = proc / "driver/nvidia/capabilities/mig"
    has_mig = mig.is_dir()
    missing = []
    for access in sorted((proc / "driver/nvidia/capabilities").glob("gpu*/mig/gi*/**/access")):
        minor = next(
            (line.split()[1] for line in _text(access).splitlines() if line.startswith("DeviceFileMinor:")), ""
        )
        if minor.isdigit() and not (devices / f"nvidia-caps/nvidia-cap{minor}").exists():
            missing.append(str(access))
    return Rights(
        is_root=os.geteuid() == 0,
        has_sys_admin=bool(int(held, 16) & _SYS_ADMIN),
        may_configure=os.access(mig / "config", os.R_OK) if has_mig else None,
        may_monitor=os.access(mig / "monitor", os.R_OK) if has_mig else None,
        missing_nodes=tuple(missing),
    )


def state_folder(environ: Mapping[str, str], *, is_root: bool) -> Path:
    """Where an agent of this user keeps its state (docs/reference/agent.md, State directory)."""
    told = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if told:
        return Path(told)
    if is_root:
        return Path("/var/lib/eelgrid")
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(home) / "eelgrid"


def folder(path: Path) -> Folder:
    """Whether it, or the nearest folder above it, can be written, and what room is there."""
    above = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(above)
        free_bytes, total_bytes = usage.free, usage.total
    except OSError:
        free_bytes, total_bytes = None, None
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    return Folder(str(path), path.exists(), writable, free_bytes, total_bytes)


def clock_synchronised(program: str = "timedatectl") -> tuple[bool | None, str]:
    """What systemd says of the clock; None with the reason where it does not."""
    words = [program, "show", "--property=NTPSynchronized", "--value"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_TIMEDATECTL_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return None, f"{program} is not installed"
    except (OSError, subprocess.TimeoutExpired):
        return None, f"{program} cannot be asked"
    said = done.stdout.decode("ascii", "replace").strip()
    if said not in {"yes", "no"}:
        return None, f"{program} does not tell"
    return said == "yes", ""


def port_is_free(address: str) -> bool | None:
    """Whether somebody could listen there; None where this user may not."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except PermissionError:
        return None
    except OSError:
        return False
    return True


def kubelet_sockets(home: Path = Path("/var/lib/kubelet")) -> KubeletSockets:
    """Those that the agent uses; a connection is opened and closed."""
    paths = (home / "pod-resources/kubelet.sock", home / "device-plugins/kubelet.sock")
    return KubeletSockets(home.is_dir(), {str(path): _connects(path) for path in paths} if home.is_dir() else {})


def _connects(path: Path) -> bool | None:
    try:
        if not path.exists():
            return None
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_SOCKET_S)
            probe.connect(str(path))
    except OSError:
        return False
    return True
