"""A disk that is slow and does not fail, as one process sees it: strace holds up each of its flushes.

Owns the strace that is attached and whether this machine lets one attach. Must not know which process it is, nor what
it writes. Nothing of the process is another than in life: its own calls of the kernel come back late.
"""

import contextlib
import functools
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

ATTACHES_S = 60.0
_FLUSHES = "fsync,fdatasync"


class NotPermitted(Exception):
    """This machine lets nobody hold up another process; in strace's words."""


class SlowDisk:
    """Each flush of a process takes this much longer between `begin` and `end`."""

    def __init__(self, pid, delay_s):
        self._status = Path(f"/proc/{pid}/status")
        self._command = [
            "strace",
            "--quiet=all",
            "--follow-forks",
            f"--attach={pid}",
            "--output=/dev/null",
            f"--trace={_FLUSHES}",
            f"--inject={_FLUSHES}:delay_enter={round(delay_s * 1e6)}",
        ]
        self._strace = None

    def begin(self):
        """Attached when this returns; raises NotPermitted."""
        with tempfile.TemporaryFile() as said:
            self._strace = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=said)
            deadline_s = time.monotonic() + ATTACHES_S
            while not self._is_attached():
                if self._strace.poll() is not None or time.monotonic() > deadline_s:
                    self.end()
                    said.seek(0)
                    raise NotPermitted(said.read().decode(errors="replace").strip() or "strace did not attach")
                time.sleep(0.05)

    def end(self):
        """Lets it go; nothing where nothing began."""
        if self._strace is not None:
            self._strace.send_signal(signal.SIGINT)  # it detaches, and what it followed goes on
            self._strace.wait()
            self._strace = None

    def _is_attached(self):
        """The kernel names who traces the process."""
        with contextlib.suppress(OSError):
            return f"TracerPid:\t{self._strace.pid}\n" in self._status.read_text()
        return False


@functools.cache
def obstacle():
    """Why no disk can be made slow on this machine; empty where one can."""
    if shutil.which("strace") is None:
        return "no strace; Debian's package has it"
    sleeper = subprocess.Popen(["sleep", "600"])
    disk = SlowDisk(sleeper.pid, 0.0)
    try:
        disk.begin()
        disk.end()
    except NotPermitted as error:
        return f"strace may not attach to another process: {error}"
    finally:
        sleeper.kill()
        sleeper.wait()
    return ""
