"""Queues for one machine, each behind the same four verbs: ours, gflow (`runqd` from PyPI), Debian's task-spooler.

Eight jobs run at once in each: on simulated GPUs here, by a slot in task-spooler, by an eighth of the memory in gflow,
which finds no GPUs on a machine without NVIDIA's driver. With `real_gpus` each job takes one of the machine's own GPUs,
in gflow too, and task-spooler has as many slots. What became of a job is read from a file that it writes
itself, so that no scheduler is asked. A peer that cannot be installed is skipped by name.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from bench.processes import fleet_file, free_port
from eelgrid import Client, Mobility, ProcessSpec, ResourceRequest, WorkloadSpec, errors

SLOTS = 8
_START_S = 120.0


class JobQueue(Protocol):
    """A scheduler of one machine."""

    name: str

    def start(self) -> None:
        """Starts its daemons, also after `kill`, and returns when they take jobs."""

    def submit(self, command: str) -> None:
        """Queues a shell command."""

    def kill(self) -> None:
        """Kills its daemons by SIGKILL."""

    def close(self) -> None:
        """Ends it and its jobs."""


class EelgridBox:
    """A controller and an agent with simulated GPUs, or the machine's own; jobs are submitted by the Python client."""

    name = "eelgrid"

    def __init__(self, folder: Path, gpus: int = SLOTS, *, is_simulated: bool = True) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        self._devices = ("--simulate", str(fleet_file(folder / "fleet.json", 1, gpus))) if is_simulated else ()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.client = Client(self._address, timeout_s=30.0)

    @property
    def daemons(self) -> tuple[str, ...]:
        """The names of its daemons."""
        return ("controller", "agent")

    @property
    def address(self) -> str:
        """Where its controller listens."""
        return self._address

    def start(self) -> None:
        """Starts what does not run, and waits for the node."""
        commands = {
            "controller": ["--listen", self._address, "--metrics", "127.0.0.1:0", "--data", str(self._folder / "data")],
            "agent": [
                "--controller", self._address, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
                *self._devices, "--run-processes", "--state", str(self._folder / "agent"),
                *(["--allow-root"] if os.geteuid() == 0 else []),
            ],
        }  # fmt: skip
        for name in self.daemons:
            running = self._daemons.get(name)
            if running is None or running.poll() is not None:
                with (self._folder / f"{name}.log").open("ab") as log:
                    command = [sys.executable, "-m", f"eelgrid_{name}", *commands[name]]
                    self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        while True:
            with suppress(errors.EelgridError):
                if self.client.get_summary().nodes_ready:
                    return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no node is ready; see {self._folder}")
            time.sleep(0.02)

    def submit(self, command: str) -> None:
        """Queues a shell command on one GPU."""
        self.client.submit_workload(
            WorkloadSpec(
                name="job",
                request=ResourceRequest(cpu_milli=10, gpu_count=1, gpu_milli=1000),
                mobility=Mobility.FIXED,
                process=ProcessSpec(
                    argv=("/bin/sh", "-c", command), working_directory="/", environment={"PATH": "/usr/bin:/bin"}
                ),
            )
        )

    def kill(self, names: Sequence[str] = ("controller", "agent")) -> None:
        """Kills daemons by SIGKILL."""
        for name in names:
            self._daemons[name].kill()
            self._daemons[name].wait()

    def read_memory_bytes(self) -> dict[str, int]:
        """Returns the resident memory of each daemon."""
        return {name: psutil.Process(one.pid).memory_info().rss for name, one in self._daemons.items()}

    def close(self) -> None:
        """Ends the daemons."""
        self.client.close()
        for one in self._daemons.values():
            one.terminate()
        for one in self._daemons.values():
            one.wait(30)


class TaskSpooler:
    """Debian's tsp with as many slots as jobs may run at once."""

    name = "task-spooler"

    def __init__(self, folder: Path, slots: int) -> None:
        (folder / "out").mkdir()
        self._environment = {
            "PATH": "/usr/bin:/bin", "TS_SOCKET": str(folder / "tsp"), "TMPDIR": str(folder / "out"),
            "TS_SLOTS": str(slots), "TS_MAXFINISHED": "100000", "TS_SAVELIST": str(folder / "list"),
        }  # fmt: skip

    def start(self) -> None:
        """Starts the server, as any of its commands does."""
        self._call("-l")

    def submit(self, command: str) -> None:
        """Queues a shell command."""
        self._call("-n", "/bin/sh", "-c", command)

    def kill(self) -> None:
        """Kills the server, which is found by its socket."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "tsp" and process.environ().get("TS_SOCKET") == self._environment["TS_SOCKET"]:
                    process.kill()
        Path(self._environment["TS_SOCKET"]).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the server."""
        self._call("-K")

    def _call(self, *words: str) -> None:
        subprocess.run(["/usr/bin/tsp", *words], env=self._environment, check=False, stdout=subprocess.DEVNULL)


class Gflow:
    """gflowd in tmux, as its own installation runs it, in a home of its own."""

    name = "gflow"

    def __init__(self, folder: Path, programs: Path, *, has_gpus: bool) -> None:
        self._programs = programs
        self._home = folder / "home"
        self._home.mkdir()
        # tmux starts login shells, which set PATH anew; jobs call gflow's own programs when they end.
        (self._home / ".profile").write_text(f"export PATH={programs}:$PATH\n")
        memory_mb = psutil.virtual_memory().total // 2**20 // SLOTS
        self._share = ("--gpus", "1") if has_gpus else ("--memory", f"{memory_mb}M")
        self._environment = {
            "HOME": str(self._home), "PATH": f"{programs}:/usr/bin:/bin", "TMUX_TMPDIR": str(self._home), "USER": "bench",
            "LANG": "C.UTF-8", "SHELL": "/bin/sh",
        }  # fmt: skip

    def start(self) -> None:
        """Starts the daemon and waits until it answers."""
        self._call("gflowd", "start")
        deadline_s = time.monotonic() + _START_S
        while self._call("gqueue") and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def submit(self, command: str) -> None:
        """Queues a shell command on one GPU, or with an eighth of the memory."""
        script = self._home / f"job-{time.monotonic_ns()}.sh"
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
        self._call("gbatch", *self._share, str(script))

    def kill(self) -> None:
        """Kills the daemon."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # One program with many names.
                if "gflowd" in process.cmdline() and process.environ().get("HOME") == str(self._home):
                    os.kill(process.pid, signal.SIGKILL)
        # The session of tmux that had it would keep the next from starting.
        self._call("tmux", "kill-session", "-t", "gflow_server")

    def close(self) -> None:
        """Ends the daemon and the terminals of its jobs."""
        self._call("gflowd", "stop")
        self._call("tmux", "kill-server")

    def _call(self, program: str, *words: str) -> int:
        path = self._programs / program
        command = [str(path) if path.exists() else program, *words]
        done = subprocess.run(command, env=self._environment, check=False, capture_output=True, cwd=self._home)
        return done.returncode


def install_gflow(folder: Path) -> Path | None:
    """Installs runqd into an environment of the bench's own; returns its programs, None where that is impossible."""
    if shutil.which("tmux") is None:
        return None
    programs = folder / "bin"
    if not (programs / "gflowd").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([programs / "pip", "install", "-q", "runqd==0.4.18"], check=False, capture_output=True)
    return programs if (programs / "gflowd").exists() else None


def open_queues(folder: Path, installed: Path, real_gpus: int = 0) -> Iterator[JobQueue]:
    """Yields each scheduler that is here; says which are not. Jobs run on simulated GPUs unless there are real ones."""
    for name in ("eelgrid", "gflow", "task-spooler"):
        own = folder / name
        own.mkdir()
        if name == "eelgrid":
            yield EelgridBox(own, is_simulated=not real_gpus)
        elif name == "task-spooler":
            if Path("/usr/bin/tsp").exists():
                yield TaskSpooler(own, real_gpus or SLOTS)
            else:
                print("task-spooler is not here: apt-get install task-spooler")
        else:
            programs = install_gflow(installed)
            if programs is not None:
                yield Gflow(own, programs, has_gpus=real_gpus > 0)
            else:
                print("gflow cannot be installed here: it needs tmux, and runqd 0.4.18 from PyPI")


class RunLog:
    """What jobs wrote of themselves: a line at the start and one at the end, with the time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def command(self, tag: str, seconds: float) -> str:
        """Returns the command of a job."""
        start, end = (f'echo "{kind} {tag} $(date +%s.%N)" >> {self._path}' for kind in "se")
        return f"{start}; sleep {seconds:g}; {end}"

    def read(self) -> list[tuple[str, str, float]]:
        """Returns all lines: start or end, the job, and when."""
        found = (line.split() for line in self._path.read_text().splitlines())
        return [(words[0], words[1], float(words[2])) for words in found if len(words) == 3]

    def count_ended(self) -> int:
        """Returns how many jobs have ended."""
        return len({tag for kind, tag, _ in self.read() if kind == "e"})

    def count_starts(self) -> Counter[str]:
        """Returns how often each job was started."""
        return Counter(tag for kind, tag, _ in self.read() if kind == "s")

    def wait_ended(self, count: int, idle_s: float) -> bool:
        """Waits until so many have ended; False when nothing happens for so long."""
        seen, since_s = -1, time.monotonic()
        while (ended := self.count_ended()) < count:
            if ended != seen:
                seen, since_s = ended, time.monotonic()
            if time.monotonic() - since_s > idle_s:
                return False
            time.sleep(0.05)
        return True
