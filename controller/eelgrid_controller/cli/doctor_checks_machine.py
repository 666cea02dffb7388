"""What eelctl doctor thinks of the machine it runs on: from what was read to findings.

Owns the thresholds and the remedies for packages, the driver, rights, folders,
clocks, disks, ports and the kubelet. Must not read anything: doctor_reading.py
does, and gives plain values. What is not there is None.

Drivers: MIG came with 450, `nvidia-smi` fields of instant power and the units
of hardware activity that we read with 525 (docs/explanation/energy-attribution.md). An older one is no
failure, for the agent runs with what there is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from eelgrid_controller.cli.doctor_finding import Finding, failed, good, named, skipped, spread, warned
from eelgrid_controller.spelling import memory_text

__all__ = [
    "DriverAnswer", "Folder", "KubeletSockets", "Port", "PortState", "Rights", "clock_synchronised", "clocks_agree",
    "disk_room", "driver", "folder", "kubelet", "nvml", "packages", "ports", "python", "requirements", "rights",
]  # fmt: skip

PYTHON_LEAST, PYTHON_BELOW = (3, 11), (3, 14)
_DRIVER_MIG, _DRIVER_INSTANT = 450, 525
_SLOW_S = 2.0
# Of prices and windows a second is nothing; a minute moves joules into another hour.
_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 60.0
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 256 * 1024**2, 2 * 1024**3
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_LEAST = re.compile(r">=\s*([0-9.]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def python(version: tuple[int, int, int]) -> Finding:
    """Whether this interpreter is one that is supported."""
    said = f"Python {'.'.join(map(str, version))}"
    if PYTHON_LEAST <= version[:2] < PYTHON_BELOW:
        return good("python", said)
    least, last = ".".join(map(str, PYTHON_LEAST)), f"{PYTHON_BELOW[0]}.{PYTHON_BELOW[1] - 1}"
    return failed("python", f"{said} is not supported", f"install Eelgrid under Python {least} to {last}")


def requirements(lines: Iterable[str], extra: str) -> dict[str, tuple[int, ...]]:
    """Least versions of what an extra needs, from a package's own requirements; () where any will do."""
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


def packages(extra: str, wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, str | None]) -> Finding:
    """Whether all that a part needs is installed, and new enough."""
    check = f"packages, {extra}"
    missing = sorted(name for name in wanted if present.get(name) is None)
    old = sorted(
        f"{name} {present[name]}" for name, least in wanted.items()
        if present.get(name) is not None and _numbers(str(present[name])) < least
    )  # fmt: skip
    remedy = f'pip install "eelgrid[{extra}]"'
    if not wanted:
        return skipped(check, "Eelgrid is not installed as a package", f"{remedy}, so that its needs are known")
    if missing and extra == "agent":
        return warned(check, f"lacks {named(missing)}", f"{remedy}, if an agent is to run here")
    if missing or old:
        lacks = "; ".join(filter(None, (f"lacks {named(missing)}" if missing else "", f"too old: {named(old)}" if old else "")))  # fmt: skip
        return failed(check, lacks, remedy)
    return good(check, spread(len(wanted), "package"))


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """What a child process heard of NVML; `problem` is none, binding, library, driver, hung or error."""

    problem: str
    detail: str = ""
    version: str = ""
    devices: int = 0
    took_s: float = 0.0


def nvml(answer: DriverAnswer, gpus_on_bus: int | None) -> Finding:
    """Whether NVML is there and answers; `gpus_on_bus` is None where the bus cannot be looked at."""
    check, has_gpus = "nvml", bool(gpus_on_bus)
    there = f"{spread(gpus_on_bus, 'NVIDIA GPU')} on the bus" if gpus_on_bus else "no NVIDIA GPU is seen on the bus"
    match answer.problem:
        case "hung":
            what = f"the driver did not answer in {answer.took_s:.0f} s"
            return failed(check, what, "look for XIDs in `dmesg`; end what hangs, reset the GPU or boot the machine")
        case "binding":
            remedy = 'pip install "eelgrid[agent]", if an agent is to run here'
            return (failed if has_gpus else skipped)(check, f"the binding nvidia-ml-py is missing; {there}", remedy)
        case "library" | "driver" if not has_gpus:
            return skipped(check, f"{answer.detail}; {there}", "run it on a node with GPUs to have its driver checked")
        case "library":
            remedy = "install NVIDIA's driver; in a container, let its runtime mount libnvidia-ml.so.1"
            return failed(check, f"{answer.detail}; {there}", remedy)
        case "driver":
            return failed(
                check, f"{answer.detail}; {there}", "load the driver (modprobe nvidia); see that nvidia-smi works"
            )
        case "error":
            return failed(check, f"NVML says: {answer.detail}", "see what nvidia-smi says, and `dmesg`")
    said = f"{spread(answer.devices, 'GPU')}, driver {answer.version}, answered in {answer.took_s:.1f} s"
    if gpus_on_bus and answer.devices < gpus_on_bus:
        what = f"{said}, but {gpus_on_bus} on the bus"
        return failed(check, what, "a GPU is lost or given to another: see `nvidia-smi -L` and XIDs in `dmesg`")
    if answer.took_s > _SLOW_S:
        return warned(check, said, "turn persistence mode on (nvidia-persistenced), or look for a GPU that hangs")
    return good(check, said)


def driver(version: str) -> Finding:
    """What the driver is too old for."""
    check, numbers = "driver", _numbers(version)
    if not numbers:
        return skipped(check, "no driver told its version", "see the check of nvml")
    if numbers[0] < _DRIVER_MIG:
        what = f"{version}: no MIG, no instant power"
        return failed(check, what, f"install driver {_DRIVER_INSTANT} or newer")
    if numbers[0] < _DRIVER_INSTANT:
        what = f"{version}: power is a mean over a second, and there are no hardware counters of activity"
        return warned(check, what, f"install driver {_DRIVER_INSTANT} or newer")
    return good(check, f"{version}: has all that is read")


@dataclass(frozen=True, slots=True)
class Rights:
    """What this process may do: CAP_SYS_ADMIN, the driver's MIG files (None without such files), missing nodes."""

    is_root: bool
    has_sys_admin: bool
    may_configure: bool | None
    may_monitor: bool | None
    missing_nodes: Sequence[str] = ()


def rights(found: Rights) -> tuple[Finding, ...]:
    """What this user could change on the GPUs, and whether containers could open every MIG instance."""
    who = "root" if found.is_root else "this user"
    findings = []
    if found.has_sys_admin:
        findings.append(good("rights, limits", f"{who} has CAP_SYS_ADMIN: may set limits, clocks and MIG mode"))
    else:
        remedy = "run the agent as root or with CAP_SYS_ADMIN where a pool is to be enforced; observing needs nothing"
        findings.append(warned("rights, limits", f"{who} lacks CAP_SYS_ADMIN: may read, but set no limits", remedy))
    if found.may_configure is None:
        where = "the driver shows no MIG capabilities (/proc/driver/nvidia/capabilities/mig)"
        findings.append(skipped("rights, MIG", where, "nothing, unless this node has MIG; then load the driver"))
    elif found.has_sys_admin or found.may_configure:
        findings.append(good("rights, MIG", f"{who} may make and remove instances"))
    elif found.may_monitor:
        remedy = "run the agent as root, or let it read mig/config, where layouts are to be changed"
        findings.append(warned("rights, MIG", f"{who} may see instances and change none", remedy))
    else:
        remedy = "run the agent as root, or let it read mig/monitor below /proc/driver/nvidia/capabilities"
        findings.append(warned("rights, MIG", f"{who} sees only instances that a process can open", remedy))
    if found.missing_nodes:
        remedy = f"as root: nvidia-modprobe {' '.join(f'-f {node}' for node in found.missing_nodes[:2])}"
        what = f"{spread(len(found.missing_nodes), 'MIG instance')} without a device node in /dev/nvidia-caps"
        findings.append(failed("MIG device nodes", what, remedy + (" ..." if len(found.missing_nodes) > 2 else "")))
    return tuple(findings)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a daemon writes; `holder` is whoever has its lock."""

    path: str
    exists: bool
    writable: bool
    free_bytes: int | None = None
    total_bytes: int | None = None


def folder(check: str, found: Folder, flag: str, *, here: bool) -> Finding:
    """Whether a daemon could write there; `here` says that it is to run on this machine."""
    if not found.exists and not here:
        return skipped(
            check, f"{found.path} is not there", f"nothing, unless it is to run here; else name it with {flag}"
        )
    if not found.writable:
        what = f"{found.path} cannot be written by this user"
        return (failed if here else warned)(check, what, f"run it as its owner, or name a folder of yours with {flag}")
    return good(check, f"{found.path} can be {'written' if found.exists else 'made'}")


def disk_room(check: str, found: Folder) -> Finding:
    """Room for the journal and the ledger."""
    if found.free_bytes is None or not found.total_bytes:
        return skipped(check, f"{found.path}: the file system tells no size", "see `df`")
    said = f"{memory_text(found.free_bytes)} of {memory_text(found.total_bytes)} free below {found.path}"
    remedy = "make room, or move the folder: the controller accepts nothing that it cannot put on disk"
    if found.free_bytes < _DISK_FAIL_BYTES:
        return failed(check, said, remedy)
    if found.free_bytes < _DISK_WARN_BYTES:
        return warned(check, said, remedy)
    return good(check, said)


def clock_synchronised(synchronised: bool | None, detail: str = "") -> Finding:
    """What the machine itself says of its clock; None where nobody tells."""
    if synchronised is None:
        return skipped("clock", detail or "nobody tells whether the clock is synchronised",
                       "see that chrony or systemd-timesyncd runs: `timedatectl` tells where systemd is")  # fmt: skip
    if not synchronised:
        what = "the clock is not synchronised: joules may be counted in the wrong hour"
        return warned("clock", what, "start chrony or systemd-timesyncd (timedatectl set-ntp true)")
    return good("clock", "synchronised")


def clocks_agree(whose: str, ahead_s: float, within_s: float) -> Finding:
    """Whether another's clock agrees with ours; `within_s` is how far our look may be off."""
    check, off_s = f"clock, {whose}", abs(ahead_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    if off_s <= _SKEW_WARN_S + within_s:
        return good(check, f"within {max(off_s, within_s):.1f} s of this machine's")
    remedy = "synchronise both machines by NTP (timedatectl set-ntp true)"
    what = f"{off_s:,.0f} s {side} this machine's"
    return (failed if off_s > _SKEW_FAIL_S + within_s else warned)(check, what, remedy)


class PortState(Enum):
    """Who has a port."""

    FREE = "free"
    OURS = "ours"
    OTHER = "other"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a daemon of ours has, or would listen on."""

    address: str
    purpose: str
    flag: str
    state: PortState


def ports(found: Iterable[Port]) -> tuple[Finding, ...]:
    """One finding for each port that others have; one for all that are well."""
    every = tuple(found)
    bad, well = [], []
    for port in every:
        check = f"port, {port.purpose}"
        if port.state is PortState.OTHER:
            what = f"{port.address} is held by a program that is not Eelgrid's"
            bad.append(failed(check, what, f"end it, or choose another with {port.flag}"))
        elif port.state is PortState.REFUSED:
            what = f"this user may not listen on {port.address}"
            bad.append(warned(check, what, f"choose another with {port.flag}"))
        else:
            well.append(f"{port.address} {'answers' if port.state is PortState.OURS else 'free'} ({port.purpose})")
    return (*bad, *((good("ports", ", ".join(well)),) if well else ()))


@dataclass(frozen=True, slots=True)
class KubeletSockets:
    """The kubelet's folder, and for each socket below it whether it is there and takes a connection."""

    folder_exists: bool
    answers: Mapping[str, bool | None]


def kubelet(found: KubeletSockets) -> Finding:
    """Whether the kubelet tells which pods hold which devices; None is a socket that is not there."""
    if not found.folder_exists:
        return skipped("kubelet", "no kubelet on this machine", "nothing, unless this is a node of Kubernetes")
    missing = [path for path, answers in found.answers.items() if answers is None]
    silent = [path for path, answers in found.answers.items() if answers is False]
    if silent:
        what = f"nobody who lets this user in listens on {named(silent)}"
        return failed("kubelet", what, "see that the kubelet runs, and run this as root")
    if missing:
        remedy = "see that the kubelet runs; in a container, mount the socket and name it with --kubelet"
        return warned("kubelet", f"lacks {named(missing)}: pods stay without names", remedy)
    return good("kubelet", f"listens on {spread(len(found.answers), 'socket')}")
