"""Child processes of the demo: started, watched, and always ended.

A child runs in a session of its own, so that Ctrl-C reaches only the demo, which then ends its children in order:
SIGTERM, some seconds, SIGKILL; by pid, never by name.

DemoError                   the demo cannot continue; the message says what to do
├── ChildDied               a process ended by itself; carries its last log lines
└── ProcessSilent           a process did not respond in time
"""

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TERM_S = 8.0
_TAIL_BYTES = 16_384
_TAIL_LINES = 15


class DemoError(Exception):
    """The demo cannot go on."""

    def __init__(self, what: str, remedy: str, log: str = "") -> None:
        self.what, self.remedy, self.log = what, remedy, log
        super().__init__(f"{what}; {remedy}")


class ChildDied(DemoError):
    """A process ended by itself."""


class ProcessSilent(DemoError):
    """A process did not do its part in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """What a process has used since its start."""

    cpu_s: float
    memory_bytes: int


class DemoProcess:
    """One process and its log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own programs
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._handle: Any = None
        self.peak_memory_bytes = 0

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises ChildDied where the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ChildDied(
                f"{self.name} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}",
                f"its last words are above; the whole log is {self.log}",
                self.tail(),
            )

    def tail(self) -> str:
        """The last lines of the log."""
        with suppress(OSError), self.log.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""

    def usage(self) -> ProcessUsage | None:
        """CPU seconds and resident memory, or None once the process is gone."""
        import psutil

        try:
            if self._handle is None:
                self._handle = psutil.Process(self.pid)
            times, memory_bytes = self._handle.cpu_times(), self._handle.memory_info().rss
        except psutil.Error:
            return None
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)
        return ProcessUsage(cpu_s=times.user + times.system, memory_bytes=memory_bytes)

    async def end(self) -> None:
        """Ends the process if it runs, and waits until it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _TERM_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """Ends the process at once: the last resort, for when no loop runs any more."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
