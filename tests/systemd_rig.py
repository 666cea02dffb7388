"""A machine with a real systemd: a container of systemd-nspawn over this machine's /usr, which forgets everything.

Owns the container and the calls into it. Its root is a file system in memory, so that nothing of this machine changes.
Must not know which units are started. Needs root and Debian's systemd-container.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from eelgrid_kernels.compilation import cache_folder
from tests.entry_points import PACKAGES, ROOT, build_entry_point
from tests.waiting import poll_until

# Where the units have the programs, and what they are made of there: the interpreter, libraries and the project.
_PROGRAMS, _PYTHON, _LIBRARIES, _SOURCE = "/opt/eelgrid", "/opt/python", "/opt/libraries", "/opt/source"
# Compiled kernels of the tests.
_KERNELS = "/opt/kernels"
# Nothing of this machine's own services, and no wait for a network that nobody sets up.
_KERNEL_LINE = ("systemd.unit=basic.target", "systemd.mask=systemd-networkd-wait-online.service")
BOOTS_S = 120.0


def find_obstacle():
    """Why no systemd can be started here; None if one can."""
    if os.geteuid() != 0:
        return "only root can start a container"
    if not shutil.which("systemd-nspawn") or not Path("/usr/lib/systemd/systemd").exists():
        return "no systemd-nspawn; Debian's systemd-container has it"
    tried = subprocess.run(_build_command("trial", [], "/usr/bin/true"), capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no container here: {tried.stderr.decode(errors='replace')[-200:]}"


def _build_command(name, mounts, *words):
    """Starts a container, which halts with its parent; what nspawn keeps below /run is in memory, too, and nobody else's."""
    bound = [f"--bind-ro={source}:{target}" for source, target in mounts]
    container = [
        "systemd-nspawn", "--directory=/", "--volatile=yes", "--register=no", "--keep-unit", "--private-network",
        f"--machine=eelgrid-{name}", "--console=pipe", "--quiet", *bound, *words,
    ]  # fmt: skip
    return [
        "setpriv",
        "--pdeathsig=KILL",
        "unshare",
        "--mount",
        "bash",
        "-c",
        f"mount -t tmpfs none /run && exec {shlex.join(container)}",
    ]


def _read_program(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


class Machine:
    """The machine; a context."""

    def __init__(self, folder):
        self._log = folder / "systemd.log"
        self._process = None
        self._leader = ""

    def __enter__(self):
        site_packages = next(path for path in sys.path if path.endswith("site-packages"))
        mounts = ((sys.base_prefix, _PYTHON), (site_packages, _LIBRARIES), (ROOT, _SOURCE), (cache_folder(), _KERNELS))
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                _build_command(str(os.getpid()), mounts, "--boot", *_KERNEL_LINE),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        try:
            poll_until(self._is_up, "systemd has booted", within_s=BOOTS_S)
            self._install_programs()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason):
        # The container goes with its first process.
        for pid in filter(None, (self._leader, str(self._process.pid))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._process.wait()

    def _is_up(self):
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        # Before it, nspawn has helpers that end.
        self._leader = next((pid for pid in children if _read_program(pid) == "systemd"), "")
        if not self._leader:
            return False
        return self.run("systemctl", "is-system-running", check=False).strip() in {"running", "degraded"}

    def run(self, *words, check=True, given=None):
        """What a command in the machine prints; fails with all that it said if it fails."""
        command = [
            "nsenter",
            f"--target={self._leader}",
            "--all",
            "env",
            "-i",
            "PATH=/usr/sbin:/usr/bin",
            *map(str, words),
        ]
        done = subprocess.run(command, capture_output=True, text=True, input=given, check=False)
        assert not check or done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, path, text, *, mode="0644", group="root"):
        """Writes a file there, as `install -D` would."""
        self.run("install", "-D", "-m", mode, "-g", group, "/dev/stdin", path, given=text)

    def _install_programs(self):
        """What `pip install` makes of the project, without a download: interpreter, path and programs."""
        major, minor = sys.version_info[:2]
        python = f"{_PYTHON}/bin/python{major}.{minor}"
        self.run("mkdir", "-p", f"{_PROGRAMS}/bin", f"{_PROGRAMS}/lib/python{major}.{minor}/site-packages")
        self.write(f"{_PROGRAMS}/pyvenv.cfg", f"home = {_PYTHON}/bin\ninclude-system-site-packages = false\n")
        self.run("ln", "-s", python, f"{_PROGRAMS}/bin/python")
        paths = [*(f"{_SOURCE}/{path.relative_to(ROOT)}" for path in PACKAGES), _LIBRARIES]
        self.write(f"{_PROGRAMS}/lib/python{major}.{minor}/site-packages/eelgrid.pth", "\n".join(paths) + "\n")

    def install_kernels(self, path):
        """Puts the kernels that the tests have compiled into a cache, as another start would have left them."""
        self.run("mkdir", "-p", path)
        self.run("cp", "-r", "--preserve=timestamps", _KERNELS, f"{path}/{cache_folder().name}")

    def install_program(self, name):
        """One of the project's programs."""
        # An interpreter that was built into a home folder looks for its library there, and units hide homes.
        command = shlex.join([f"{_PROGRAMS}/bin/python", "-c", build_entry_point(name)])
        text = f'#!/bin/sh\nLD_LIBRARY_PATH={_PYTHON}/lib exec {command} "$@"\n'
        self.write(f"{_PROGRAMS}/bin/{name}", text, mode="0755")
