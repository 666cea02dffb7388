"""Findings of `eelctl doctor`, and its checks of the local machine: packages, driver, rights, clocks, ports, kubelet.

A finding has one line for what was found and one for the remedy; one that is not ok has a remedy. A check that could
not be made is skipped, with the reason and how to enable it: a missing answer never counts as healthy.

Functions named read_* gather plain values (None where something is missing) and change nothing; functions named check_*
turn them into findings. NVML is queried in a child process with a time limit, since a call into a hanging driver cannot
be cancelled.

Drivers: MIG came with 450; instant power and the hardware activity counters that the agent reads came with 525
(docs/explanation/energy-attribution.md). An older driver is not a failure: the agent uses what there is.
"""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from importlib import metadata
from pathlib import Path

from eelgrid_controller.cli.connection import join_lines
from eelgrid_controller.formatting import count_noun, format_memory
from eelgrid_protos.sockets import split_address

_NAMES_SHOWN = 3


class FindingStatus(StrEnum):
    """Outcome of a check, the worst first."""

    FAIL = "fail"
    WARN = "warn"
    SKIPPED = "skipped"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, outcome, what was found and the remedy."""

    check: str
    status: FindingStatus
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.status is FindingStatus.OK) == (not self.remedy), (
            f"{self.check}: a remedy if and only if something is up"
        )
        assert "\n" not in self.what + self.remedy, f"{self.check}: one line each"


def report_ok(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, FindingStatus.OK, join_lines(what))


def report_warning(check: str, what: str, remedy: str) -> Finding:
    """Something works less well than it could, or will not work for long."""
    return Finding(check, FindingStatus.WARN, join_lines(what), join_lines(remedy))


def report_failure(check: str, what: str, remedy: str) -> Finding:
    """Returns a finding that something does not work."""
    return Finding(check, FindingStatus.FAIL, join_lines(what), join_lines(remedy))


def report_skipped(check: str, what: str, remedy: str) -> Finding:
    """Returns a finding that the check could not be made; the remedy says how to enable it."""
    return Finding(check, FindingStatus.SKIPPED, join_lines(what), join_lines(remedy))


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 1 if any check failed, else 0, even with warnings and skipped checks."""
    return int(any(finding.status is FindingStatus.FAIL for finding in findings))


def join_names(names: Iterable[str]) -> str:
    """Joins the first names, and says how many more there are."""
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN:,} more" if len(every) > _NAMES_SHOWN else ""
    return ", ".join(every[:_NAMES_SHOWN]) + more


PYTHON_LEAST, PYTHON_BELOW = (3, 11), (3, 14)
_DRIVER_MIG, _DRIVER_INSTANT = 450, 525
_SLOW_S = 2.0
# Of prices and windows a second is nothing; a minute moves joules into another hour.
_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 60.0
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 256 * 1024**2, 2 * 1024**3
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_LEAST = re.compile(r">=\s*([0-9.]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def check_python(version: tuple[int, int, int]) -> Finding:
    """Checks that this Python is supported."""
    said = f"Python {'.'.join(map(str, version))}"
    if PYTHON_LEAST <= version[:2] < PYTHON_BELOW:
        return report_ok("python", said)
    least, last = ".".join(map(str, PYTHON_LEAST)), f"{PYTHON_BELOW[0]}.{PYTHON_BELOW[1] - 1}"
    return report_failure("python", f"{said} is not supported", f"install Eelgrid under Python {least} to {last}")


def parse_requirements(lines: Iterable[str], extra: str) -> dict[str, tuple[int, ...]]:
    """Parses the minimum versions that an extra needs from a package's requirements; () where any version will do."""
    found = {}
    for line in lines:
        match = _REQUIREMENT.fullmatch(line.strip())
        asked = _EXTRA.search(match[3] or "") if match else None
        if match is None or (asked is not None and asked[1] != extra):
            continue
        least = _LEAST.search(match[2])
        found[match[1]] = _numbers(least[1]) if least else ()
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])


def check_packages(extra: str, wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, str | None]) -> Finding:
    """Checks that the packages of an extra are installed and recent enough."""
    check = f"packages, {extra}"
    missing = sorted(name for name in wanted if present.get(name) is None)
    old = sorted(
        f"{name} {present[name]}"
        for name, least in wanted.items()
        if present.get(name) is not None and _numbers(str(present[name])) < least
    )
    remedy = f'pip install "eelgrid[{extra}]"'
    if not wanted:
        return report_skipped(
            check, "Eelgrid is not installed as a package", f"{remedy}, so that its requirements are known"
        )
    if missing and extra == "agent":
        return report_warning(check, f"lacks {join_names(missing)}", f"{remedy}, if an agent should run here")
    if missing or old:
        lacks = "; ".join(
            filter(
                None, (f"lacks {join_names(missing)}" if missing else "", f"too old: {join_names(old)}" if old else "")
            )
        )
        return report_failure(check, lacks, remedy)
    return report_ok(check, count_noun(len(wanted), "package"))


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """Answer of NVML to a child process; `problem` is empty, binding, library, driver, hung or error."""

    problem: str
    detail: str = ""
    version: str = ""
    devices: int = 0
    took_s: float = 0.0


def check_nvml(answer: DriverAnswer, gpus_on_bus: int | None) -> Finding:
    """Checks that NVML is installed and answers; `gpus_on_bus` is None if the bus cannot be read."""
    check, has_gpus = "nvml", bool(gpus_on_bus)
    there = f"{count_noun(gpus_on_bus, 'NVIDIA GPU')} on the bus" if gpus_on_bus else "no NVIDIA GPU on the bus"
    match answer.problem:
        case "hung":
            what = f"the driver did not answer in {answer.took_s:.0f} s"
            return report_failure(
                check, what, "look for XIDs in `dmesg`; end the hanging process, reset the GPU or reboot the machine"
            )
        case "binding":
            remedy = 'pip install "eelgrid[agent]", if an agent should run here'
            return (report_failure if has_gpus else report_skipped)(
                check, f"the binding nvidia-ml-py is missing; {there}", remedy
            )
        case "library" | "driver" if not has_gpus:
            return report_skipped(
                check, f"{answer.detail}; {there}", "run this on a node with GPUs to check its driver"
            )
        case "library":
            remedy = "install the NVIDIA driver; in a container, have its runtime mount libnvidia-ml.so.1"
            return report_failure(check, f"{answer.detail}; {there}", remedy)
        case "driver":
            return report_failure(
                check, f"{answer.detail}; {there}", "load the driver (modprobe nvidia); check that nvidia-smi works"
            )
        case "error":
            return report_failure(check, f"NVML says: {answer.detail}", "check nvidia-smi and `dmesg`")
    said = f"{count_noun(answer.devices, 'GPU')}, driver {answer.version}, answered in {answer.took_s:.1f} s"
    if gpus_on_bus and answer.devices < gpus_on_bus:
        what = f"{said}, but {gpus_on_bus} on the bus"
        return report_failure(
            check, what, "a GPU is lost or passed to a virtual machine: see `nvidia-smi -L` and XIDs in `dmesg`"
        )
    if answer.took_s > _SLOW_S:
        return report_warning(
            check, said, "turn on persistence mode (nvidia-persistenced), or look for a GPU that hangs"
        )
    return report_ok(check, said)


def check_driver(version: str) -> Finding:
    """Checks which readings the driver is too old for."""
    check, numbers = "driver", _numbers(version)
    if not numbers:
        return report_skipped(check, "the driver version is not known", "see the check of nvml")
    if numbers[0] < _DRIVER_MIG:
        what = f"{version}: no MIG, no instant power"
        return report_failure(check, what, f"install driver {_DRIVER_INSTANT} or newer")
    if numbers[0] < _DRIVER_INSTANT:
        what = f"{version}: power is a mean over a second, and there are no hardware activity counters"
        return report_warning(check, what, f"install driver {_DRIVER_INSTANT} or newer")
    return report_ok(check, f"{version}: supports all readings")


@dataclass(frozen=True, slots=True)
class ProcessRights:
    """What this process may do: CAP_SYS_ADMIN, the driver's MIG files (None without such files), missing nodes."""

    is_root: bool
    has_sys_admin: bool
    may_configure: bool | None
    may_monitor: bool | None
    missing_nodes: Sequence[str] = ()


def check_rights(found: ProcessRights) -> tuple[Finding, ...]:
    """Checks what this user may change on the GPUs, and whether containers can open every MIG instance."""
    who = "root" if found.is_root else "this user"
    findings = []
    if found.has_sys_admin:
        findings.append(report_ok("rights, limits", f"{who} has CAP_SYS_ADMIN and may set limits, clocks and MIG mode"))
    else:
        remedy = "run the agent as root or with CAP_SYS_ADMIN to enforce a pool; observing needs no rights"
        findings.append(
            report_warning("rights, limits", f"{who} lacks CAP_SYS_ADMIN: may read, but not set limits", remedy)
        )
    if found.may_configure is None:
        where = "the driver shows no MIG capabilities (/proc/driver/nvidia/capabilities/mig)"
        findings.append(
            report_skipped("rights, MIG", where, "nothing, unless this node uses MIG; then load the driver")
        )
    elif found.has_sys_admin or found.may_configure:
        findings.append(report_ok("rights, MIG", f"{who} may create and remove instances"))
    elif found.may_monitor:
        remedy = "to change layouts, run the agent as root or let it read mig/config"
        findings.append(report_warning("rights, MIG", f"{who} may read instances but not change them", remedy))
    else:
        remedy = "run the agent as root, or let it read mig/monitor below /proc/driver/nvidia/capabilities"
        findings.append(report_warning("rights, MIG", f"{who} sees only instances that a process can open", remedy))
    if found.missing_nodes:
        remedy = f"as root: nvidia-modprobe {' '.join(f'-f {node}' for node in found.missing_nodes[:2])}"
        what = f"{count_noun(len(found.missing_nodes), 'MIG instance')} without a device node in /dev/nvidia-caps"
        findings.append(
            report_failure("MIG device nodes", what, remedy + (" ..." if len(found.missing_nodes) > 2 else ""))
        )
    return tuple(findings)


def check_processes(
    cgroup: Path | None, controllers: Collection[str] = ("cpu", "memory", "pids"), *, is_root: bool
) -> Finding:
    """Checks how jobs of `eelctl run` would be held to what they ask for by an agent started as this process was."""
    if is_root:
        remedy = "start it as a user, or with --run-as owner (eelctl box start --shared) for the users of the machine"
        return report_skipped("jobs", "root runs no jobs of its own: --run-processes alone is refused", remedy)
    if cgroup is None:
        remedy = "start it in a unit with Delegate=yes and DelegateSubgroup=agent"
        return report_skipped(
            "jobs",
            "no delegated cgroup: memory and CPUs of jobs are counted, not limited; a tree, with children that left its "
            "session, is killed by going through it",
            remedy,
        )
    limited = [name for name in ("memory", "cpu", "pids") if name in controllers]
    if len(limited) < 3:
        missing = join_names(name for name in ("memory", "cpu", "pids") if name not in controllers)
        remedy = (
            "give the unit Delegate=yes; for a user's services: systemctl edit user@.service, Delegate=cpu memory pids"
        )
        what = f"below {cgroup} jobs are killed as a whole, but have no limits of {missing}"
        return report_warning("jobs", what, remedy)
    return report_ok(
        "jobs", f"cgroups below {cgroup}: memory, CPUs and processes are limited; a tree is killed at once"
    )


@dataclass(frozen=True, slots=True)
class FolderState:
    """A directory that a daemon writes, and the space of its file system."""

    path: str
    exists: bool
    writable: bool
    free_bytes: int | None = None
    total_bytes: int | None = None


def check_folder(check: str, found: FolderState, flag: str, *, here: bool) -> Finding:
    """Checks that a daemon could write to a directory; `here` says that it should run on this machine."""
    if not found.exists and not here:
        return report_skipped(
            check,
            f"{found.path} does not exist",
            f"nothing, unless it should run here; else give its directory with {flag}",
        )
    if not found.writable:
        what = f"{found.path} cannot be written by this user"
        return (report_failure if here else report_warning)(
            check, what, f"run it as the owner, or give a writable directory with {flag}"
        )
    return report_ok(check, f"{found.path} can be {'written' if found.exists else 'made'}")


def check_disk_room(check: str, found: FolderState) -> Finding:
    """Checks the disk space for the journal and the ledger."""
    if found.free_bytes is None or not found.total_bytes:
        return report_skipped(check, f"{found.path}: the file system reports no size", "check `df`")
    said = f"{format_memory(found.free_bytes)} of {format_memory(found.total_bytes)} free below {found.path}"
    remedy = "free some space, or move the directory: the controller accepts nothing that it cannot write to disk"
    if found.free_bytes < _DISK_FAIL_BYTES:
        return report_failure(check, said, remedy)
    if found.free_bytes < _DISK_WARN_BYTES:
        return report_warning(check, said, remedy)
    return report_ok(check, said)


def check_clock_synchronised(synchronised: bool | None, detail: str = "") -> Finding:
    """Checks whether the clock is synchronised; None if that is not known."""
    if synchronised is None:
        return report_skipped(
            "clock",
            detail or "it is not known whether the clock is synchronised",
            "check that chrony or systemd-timesyncd runs: with systemd, `timedatectl` shows it",
        )
    if not synchronised:
        what = "the clock is not synchronised: energy may be counted in the wrong hour"
        return report_warning("clock", what, "start chrony or systemd-timesyncd (timedatectl set-ntp true)")
    return report_ok("clock", "synchronised")


def check_clocks_agree(whose: str, ahead_s: float, within_s: float) -> Finding:
    """Checks that another machine's clock agrees; `within_s` is the uncertainty of the comparison."""
    check, off_s = f"clock, {whose}", abs(ahead_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    if off_s <= _SKEW_WARN_S + within_s:
        return report_ok(check, f"within {max(off_s, within_s):.1f} s of this machine's")
    remedy = "synchronise both machines by NTP (timedatectl set-ntp true)"
    what = f"{off_s:,.0f} s {side} this machine's"
    return (report_failure if off_s > _SKEW_FAIL_S + within_s else report_warning)(check, what, remedy)


class PortState(Enum):
    """State of a port."""

    FREE = "free"
    OURS = "ours"
    OTHER = "other"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DaemonPort:
    """A port that an Eelgrid daemon uses or would use."""

    address: str
    purpose: str
    flag: str
    state: PortState


def check_ports(found: Iterable[DaemonPort]) -> tuple[Finding, ...]:
    """Checks ports: one finding for each that another program uses, one for all others."""
    every = tuple(found)
    bad, well = [], []
    for port in every:
        check = f"port, {port.purpose}"
        if port.state is PortState.OTHER:
            what = f"{port.address} is in use by another program"
            bad.append(report_failure(check, what, f"stop it, or choose another port with {port.flag}"))
        elif port.state is PortState.REFUSED:
            what = f"this user may not listen on {port.address}"
            bad.append(report_warning(check, what, f"choose another port with {port.flag}"))
        else:
            well.append(f"{port.address} {'answers' if port.state is PortState.OURS else 'free'} ({port.purpose})")
    return (*bad, *((report_ok("ports", ", ".join(well)),) if well else ()))


@dataclass(frozen=True, slots=True)
class KubeletSockets:
    """The kubelet's directory, and for each socket whether it accepts a connection; None if it does not exist."""

    folder_exists: bool
    answers: Mapping[str, bool | None]


def check_kubelet(found: KubeletSockets) -> Finding:
    """Checks that the kubelet reports which pods hold which devices."""
    if not found.folder_exists:
        return report_skipped("kubelet", "no kubelet on this machine", "nothing, unless this is a Kubernetes node")
    missing = [path for path, answers in found.answers.items() if answers is None]
    silent = [path for path, answers in found.answers.items() if answers is False]
    if silent:
        what = f"no connection is possible to {join_names(silent)}"
        return report_failure("kubelet", what, "check that the kubelet runs, and run this as root")
    if missing:
        remedy = "check that the kubelet runs; in a container, mount the socket and give its path with --kubelet"
        return report_warning("kubelet", f"lacks {join_names(missing)}: energy is not attributed to pods", remedy)
    return report_ok("kubelet", f"listens on {count_noun(len(found.answers), 'socket')}")


_SYS_ADMIN = 1 << 21
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_TIMEDATECTL_S = 5.0
_SOCKET_S = 1.0
_STARTING_S = 3.0
_ENDING_S = 1.0
# Its last line is JSON; output of the driver before it is ignored.
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


def read_python_version() -> tuple[int, int, int]:
    """Major, minor and patch of the interpreter."""
    major, minor, patch = (int(part) for part in platform.python_version_tuple()[:3] if part.isdigit())
    return major, minor, patch


def read_own_requirements() -> tuple[str, ...]:
    """Reads the requirements of the eelgrid package; empty if it is not installed."""
    try:
        return tuple(metadata.requires("eelgrid") or ())
    except metadata.PackageNotFoundError:
        return ()


def read_installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Reads installed versions by package; None if one is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def query_driver(limit_s: float, program: str = _ASK_NVML) -> DriverAnswer:
    """Queries NVML in a child process, which is ended at the limit."""
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
        return DriverAnswer("error", detail=f"the query ended with exit code {child.returncode}")
    return DriverAnswer(**json.loads(lines[-1]))


def count_bus_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Counts NVIDIA's display devices on the PCI bus; None if the kernel shows no bus."""
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


def read_rights(proc: Path = Path("/proc"), devices: Path = Path("/dev")) -> ProcessRights:
    """Reads the rights of this process."""
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
    return ProcessRights(
        is_root=os.geteuid() == 0,
        has_sys_admin=bool(int(held, 16) & _SYS_ADMIN),
        may_configure=os.access(mig / "config", os.R_OK) if has_mig else None,
        may_monitor=os.access(mig / "monitor", os.R_OK) if has_mig else None,
        missing_nodes=tuple(missing),
    )


def find_own_cgroup(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Returns this process's own cgroup of version 2 if it may make others below it, as the agent would."""
    lines = _text(own).splitlines()
    name = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = mount / name.lstrip("/")
    is_delegated = name != "/" and (folder / "cgroup.kill").exists()
    return folder if is_delegated and os.access(folder / "cgroup.procs", os.W_OK) else None


def read_cgroup_controllers(cgroup: Path | None) -> tuple[str, ...]:
    """Returns the controllers that are delegated to a cgroup."""
    return () if cgroup is None else tuple(_text(cgroup / "cgroup.controllers").split())


def find_state_folder(environ: Mapping[str, str], *, is_root: bool) -> Path:
    """Returns the state directory of an agent of this user (docs/reference/agent.md, State directory)."""
    told = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if told:
        return Path(told)
    if is_root:
        return Path("/var/lib/eelgrid")
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(home) / "eelgrid"


def read_folder(path: Path) -> FolderState:
    """Reads whether a directory, or the nearest existing parent, is writable, and its free space."""
    above = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(above)
        free_bytes, total_bytes = usage.free, usage.total
    except OSError:
        free_bytes, total_bytes = None, None
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    return FolderState(str(path), path.exists(), writable, free_bytes, total_bytes)


def read_clock_synchronised(program: str = "timedatectl") -> tuple[bool | None, str]:
    """Asks systemd whether the clock is synchronised; None and the reason if that is not known."""
    words = [program, "show", "--property=NTPSynchronized", "--value"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_TIMEDATECTL_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return None, f"{program} is not installed"
    except (OSError, subprocess.TimeoutExpired):
        return None, f"{program} failed"
    said = done.stdout.decode("ascii", "replace").strip()
    if said not in {"yes", "no"}:
        return None, f"{program} does not report it"
    return said == "yes", ""


def port_is_free(address: str) -> bool | None:
    """Returns whether the address is free to listen on; None if this user may not."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except PermissionError:
        return None
    except OSError:
        return False
    return True


def read_kubelet_sockets(home: Path = Path("/var/lib/kubelet")) -> KubeletSockets:
    """Probes the sockets that the agent uses, by opening and closing a connection."""
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
