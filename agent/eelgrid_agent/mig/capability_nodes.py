"""Device nodes of MIG instances: /dev/nvidia-caps/nvidia-capN, which a container opens to be let into an instance.

Owns which nodes an instance needs, which are missing and how they are made. The
driver hands out minors and makes no files: NVIDIA's own programs call
nvidia-modprobe for that, and whoever starts containers right after a change of
layout may come before any of them. Knows no layouts and no device port; files
are below `root` and the program is run by `call`, so that neither needs a GPU.
"""

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eelgrid_protos.messages import Gpu

__all__ = ["CapabilityNodes", "Node", "run_program"]

_PROGRAM = "nvidia-modprobe"
_TIMEOUT_S = 10.0
_BYTES_MOST = 64 * 1024
_MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)
_GPU_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,4})\s*$", re.MULTILINE)

# Runs a program; returns what went wrong, or nothing.
Call = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Node:
    """One capability: the driver's file that describes it, and the device node that opens it."""

    capability: str
    device: str


def run_program(words: Sequence[str]) -> str:
    """Runs it without a shell; what went wrong, or nothing."""
    try:
        # No shell, and words of ours and of the driver only.
        done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return f"{words[0]} is not installed; it comes with the NVIDIA driver"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]} cannot be run ({error})"
    said = " ".join(done.stderr.decode(errors="replace").split())[:200]
    return "" if done.returncode == 0 else f"{words[0]} failed with {done.returncode} ({said or 'it says nothing'})"


class CapabilityNodes:
    """The nodes of one machine."""

    def __init__(self, root: Path = Path("/"), call: Call = run_program) -> None:
        self._root = root
        self._call = call

    def missing(self, gpu: Gpu) -> tuple[Node, ...]:
        """What the instances of a device need and lack; nothing where the driver does not tell."""
        return tuple(node for node in self._needed(gpu) if not (self._root / node.device.lstrip("/")).exists())

    def make(self, gpu: Gpu) -> str:
        """Makes what is missing and looks again; what is still missing and why, or nothing."""
        missing = self.missing(gpu)
        if not missing:
            return ""
        words = [_PROGRAM, *(word for node in missing for word in ("-f", node.capability))]
        problem = self._call(words)
        left = self.missing(gpu)
        if not left:
            return ""
        names = ", ".join(node.device for node in left)
        why = problem or f"{_PROGRAM} says that it made them"
        return f"containers cannot open {names}: {why}; run `{' '.join(words)}` as root"

    def _needed(self, gpu: Gpu) -> Iterator[Node]:
        number = self._gpu_minor(gpu)
        if number is None:
            return
        for instance in gpu.gpu_instances:
            below = f"/proc/driver/nvidia/capabilities/gpu{number}/mig/gi{instance.id}"
            yield from self._node(f"{below}/access")
            for child in instance.compute_instances:
                yield from self._node(f"{below}/ci{child.id}/access")

    def _node(self, capability: str) -> Iterator[Node]:
        match = _MINOR.search(self._text(capability))
        if match is not None:
            yield Node(capability, f"/dev/nvidia-caps/nvidia-cap{match[1]}")

    def _gpu_minor(self, gpu: Gpu) -> str | None:
        """By PCI address: index and minor are two orders, and both may change with a reset."""
        domain, _, rest = gpu.pci_bus_id.lower().partition(":")
        if not rest:
            return None
        # NVML writes eight digits of the domain, the driver's folder has four or more.
        folder = f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
        match = _GPU_MINOR.search(self._text(f"/proc/driver/nvidia/gpus/{folder}/information"))
        return None if match is None else match[1]

    def _text(self, name: str) -> str:
        try:
            with (self._root / name.lstrip("/")).open("rb") as file:
                return file.read(_BYTES_MOST).decode(errors="replace")
        except OSError:
            return ""
