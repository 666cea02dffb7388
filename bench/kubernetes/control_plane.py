"""The control plane at hand.

EELGRID_KUBECONFIG names one that runs (with rights to make nodes and pods; nothing is
restarted then). Else K8S_HOME names a folder whose `up.sh DIR` and `down.sh DIR` start and
stop one, and leave `DIR/env` (export KUBECONFIG=...), `DIR/pids` (lines of name and pid) and
`DIR/start-scheduler.sh` behind.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlPlane", "NoControlPlane", "at_hand"]


class NoControlPlane(Exception):
    """There is none."""


@dataclass(frozen=True)
class ControlPlane:
    """Where it is; `folder` where it is ours to restart."""

    kubeconfig: str
    folder: Path | None = None

    def kill_api_server(self) -> list[str]:
        """Kill the API server; the command line to start it again."""
        assert self.folder is not None
        pid = self.pid("kube-apiserver")
        command = [part.decode() for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part]
        os.kill(pid, signal.SIGKILL)
        return command

    def start_api_server(self, command: list[str]) -> None:
        """Start it as it was."""
        assert self.folder is not None
        with (self.folder / "log" / "kube-apiserver.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        pids = self.folder / "pids"
        lines = [line for line in pids.read_text().splitlines() if not line.startswith("kube-apiserver ")]
        pids.write_text("\n".join([*lines, f"kube-apiserver {process.pid}"]) + "\n")

    def stop_scheduler(self) -> None:
        """Nothing is bound from now on."""
        os.kill(self.pid("kube-scheduler"), signal.SIGKILL)

    def start_scheduler(self) -> None:
        """It starts from what is there, as after any restart."""
        assert self.folder is not None
        subprocess.run(["bash", str(self.folder / "start-scheduler.sh")], check=True, timeout=60)

    def pids(self) -> dict[str, int]:
        """Its parts that run, where it is known which processes they are."""
        if self.folder is None:
            return {}
        lines = (line.partition(" ") for line in (self.folder / "pids").read_text().splitlines())
        return {name: int(pid) for name, _, pid in lines}

    def pid(self, name: str) -> int:
        """A part of it that runs."""
        assert self.folder is not None
        if name in (found := self.pids()):
            return found[name]
        raise NoControlPlane(f"{self.folder / 'pids'} names no {name}")


@contextmanager
def at_hand(*, features: bool = True) -> Iterator[ControlPlane]:
    """The control plane, started if need be and then stopped; raises NoControlPlane."""
    named = os.environ.get("EELGRID_KUBECONFIG", "")
    home = os.environ.get("K8S_HOME", "")
    if named:
        yield ControlPlane(named)
        return
    if not home or not (Path(home) / "up.sh").is_file():
        raise NoControlPlane("set EELGRID_KUBECONFIG to a kubeconfig, or K8S_HOME to a folder with up.sh and down.sh")
    folder = Path(tempfile.mkdtemp(prefix="kb-"))
    env = dict(os.environ)
    if features:
        env |= {
            "K8S_FEATURES": "GenericWorkload=true,GangScheduling=true",
            "K8S_RUNTIME": "scheduling.k8s.io/v1alpha2=true",
        }
    try:
        subprocess.run(["bash", f"{home}/up.sh", str(folder / "run")], env=env, check=True, timeout=300)
        yield ControlPlane(str(folder / "run" / "admin.kubeconfig"), folder / "run")
    finally:
        subprocess.run(["bash", f"{home}/down.sh", str(folder / "run")], env=env, check=False, timeout=60)
        time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
