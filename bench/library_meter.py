"""Calls of a program to the simulated NVML library, by function, and the CPU time spent inside.

    python -m bench.library_meter OUT.json [eelgrid-agent's own flags]

The simulated library is Python and more expensive than the driver, so a measurement
of a program with it includes both; this separates them. SIGUSR1 starts the
count, SIGUSR2 writes it. Counting also costs time, so a counted run is not timed.
Only this process is counted, not a library in another process.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Meter"]


class Meter:
    """Counts of one library; `out` is where they go."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._calls: dict[str, int] = {}
        self._cpu_ns: dict[str, int] = {}
        self._begun_s = time.monotonic()
        signal.signal(signal.SIGUSR1, lambda *_: self._begin())
        signal.signal(signal.SIGUSR2, lambda *_: self._write())

    def over(self, library: Any) -> SimpleNamespace:
        """The library with every function counted."""
        return SimpleNamespace(**{name: self._counted(name, function) for name, function in vars(library).items()})

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*arguments: Any) -> Any:
            begun_ns = time.thread_time_ns()
            try:
                return function(*arguments)
            finally:
                self._cpu_ns[name] = self._cpu_ns.get(name, 0) + time.thread_time_ns() - begun_ns
                self._calls[name] = self._calls.get(name, 0) + 1

        return counted

    def _begin(self) -> None:
        self._calls.clear()
        self._cpu_ns.clear()
        self._begun_s = time.monotonic()

    def _write(self) -> None:
        found = {"seconds": time.monotonic() - self._begun_s, "calls": self._calls, "cpu_ns": self._cpu_ns}
        partial = self._out.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.rename(self._out)


def main() -> int:
    """Becomes the agent over a counted library."""
    import pynvml

    from eelgrid_agent.__main__ import main as agent
    from eelgrid_agent.simulation import nvml_library

    meter, install = Meter(Path(sys.argv[1])), nvml_library.install_library

    def install_counted(node: Any, **options: Any) -> None:
        install(node, **options)
        pynvml.nvmlLib = meter.over(pynvml.nvmlLib)

    nvml_library.install_library = install_counted
    return agent(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
