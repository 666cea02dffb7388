"""Controllers as processes: started, killed, and their logs kept; what processes have used of the processors."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

__all__ = ["ControllerProcess", "cpu_s"]


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process has used so far, in the kernel's ticks (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ControllerProcess:
    """`eelgrid-controller --kubernetes` with a journal of its own."""

    def __init__(
        self, kubeconfig: str, folder: Path, name: str, *, lease_s: float = 3.0, options: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.data = folder / f"{name}-data"
        self._arguments = (
            "--kubernetes",
            "--kubeconfig",
            kubeconfig,
            "--kubernetes-namespace",
            "default",
            "--kubernetes-lease",
            str(lease_s),
            "--kubernetes-identity",
            name,
            "--data",
            str(self.data),
            "--listen",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            *options,
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Its process while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start, and come back when it serves."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "eelgrid_controller",
                *self._arguments,
                stdout=log,
                stderr=log,
                env=dict(os.environ),
            )
        began = self.text().count("kubernetes=synced")
        while self.text().count("kubernetes=synced") == began:
            if self._process.returncode is not None:
                raise RuntimeError(f"{self.name} ended: {self.text()[-2000:]}")
            await asyncio.sleep(0.1)

    def text(self) -> str:
        """Its log."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def address(self) -> str:
        """Where agents reach it; empty before it serves."""
        found = re.findall(r"serving listen=(\S+)", self.text())
        return found[-1] if found else ""

    @property
    def webhook(self) -> str:
        """Where its webhook is asked."""
        return re.findall(r"webhook=serving listen=(\S+)", self.text())[-1]

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Kill it as a power cut would."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop it in order."""
        await self._end(signal.SIGTERM)

    def _signal(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)

    async def _end(self, how: signal.Signals) -> None:
        self._signal(how)
        if self._process is not None:
            await self._process.wait()
