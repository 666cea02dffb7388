"""A dynamic node of a real Slurm for tests and benches: its slurmd and its jobs are real, its GPUs are simulated.

Owns the node's configuration, the device files of its slices, and how the agent's commands run there. A command can be
killed at a step: by what it runs, or by what it says.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from eelgrid_agent.enforce.mig.host import open_mig_host
from tests.e2e.processes import free_port
from tests.fork_server import find_server, run_program
from tests.waiting import poll_until

_TASK_PROLOG = Path(__file__).parent.parent / "deploy" / "slurm" / "mig-task-prolog"
WITHIN_S = 60.0
GPUS = 2
NODE = {
    "name": "d0",
    "cpu_milli": 16_000,
    "memory_bytes": 2**36,
    "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS, "mig": ["3g@0", "3g@4"]}],
}
HALVES, MIXED = "all=2x3g.40gb", "all=3g.40gb@4,2x1g.10gb"


def format_cluster_settings():
    """What a cluster with such nodes has in its slurm.conf.

    slurmctld asks dynamic nodes at the port that is the same for all; only those in slurm.conf have their own.
    """
    return f"""
        MaxNodeCount=8
        SlurmdPort={free_port()}
        DebugFlags=NO_CONF_HASH
        NodeSet=cut Feature=mig
        PartitionName=mig Nodes=cut State=UP
    """


GRES = {HALVES: "gpu:3g.40gb:4", MIXED: "gpu:1g.10gb:4,gpu:3g.40gb:2"}


class DynamicNode:
    """A node beside those of the cluster: its configuration, the files of its slices, and `eelgrid-agent mig` on it."""

    def __init__(self, slurm, folder, spec=NODE):
        self.slurm, self.folder, self.name = slurm, folder, spec["name"]
        self.home = slurm.folder / self.name
        for name in ("bin", "root/dev/nvidia-caps"):
            (self.home / name).mkdir(parents=True)
        self.fleet = folder / "fleet.json"
        self.fleet.write_text(json.dumps({"nodes": [spec]}))
        shutil.copy(slurm.folder / "etc" / "cgroup.conf", self.home)
        conf = slurm.conf.read_text() + f"TaskProlog={self.home}/bin/task-prolog\n"
        (self.home / "slurm.conf").write_text(conf)
        self._make_device_files()
        self._write_programs()
        self.file = self.home / "slurm-node.toml"
        self.file.write_text(
            f'node = "{self.name}"\nconf = "CPUs=16 RealMemory=64000 Feature=mig"\nroot = "{self.home}/root"\n'
            f'slurm_conf = "{self.home}/slurm.conf"\ngres_file = "{self.home}/gres.conf"\nuuids_file = "{self.home}/uuids"\n'
            f'options_file = "{self.home}/options"\nstart = ["{self.home}/bin/start"]\nstop = ["{self.home}/bin/stop"]\n'
        )

    def _make_device_files(self):
        """What the driver shows of the capabilities of all slices that there may be, and their device files."""
        root, minor = self.home / "root", 0
        with open_mig_host(simulate=self.fleet, node="", seed=1, state=self.folder / "look") as site:
            addresses = [gpu.pci_bus_id for gpu in site.device.gpus()]
        for index, address in enumerate(addresses):
            information = root / "proc/driver/nvidia/gpus" / address[4:] / "information"
            information.parent.mkdir(parents=True)
            information.write_text(f"Device Minor: \t {index}\n")
            (root / f"dev/nvidia{index}").symlink_to("/dev/null")
            for instance in range(16):
                below = root / f"proc/driver/nvidia/capabilities/gpu{index}/mig/gi{instance}"
                for path in (below / "access", below / "ci0" / "access"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    minor += 1
                    path.write_text(f"DeviceFileMinor: {minor}\n")
                    (root / f"dev/nvidia-caps/nvidia-cap{minor}").symlink_to("/dev/null")

    def _write_programs(self):
        """What starts and ends slurmd, and a scontrol; each kills the agent that runs it, where a test asks for it."""
        crash = 'if [ "${CRASH_WHEN:-}" = %s ]; then case "$0 $*" in *"$CRASH_AT"*) kill -9 $PPID; exit 1 ;; esac; fi\n'
        folder, pid = self.slurm.folder, self.slurm.folder / "run" / f"slurmd.{self.name}.pid"
        programs = {
            "start": f". {self.home}/options; eval {folder}/bin/slurmd -d {folder}/bin/slurmstepd $SLURMD_OPTIONS",
            "stop": f'pid=$(cat {pid} 2>/dev/null) && kill "$pid" 2>/dev/null && while kill -0 "$pid" 2>/dev/null; do sleep 0.01; done; true',
            "task-prolog": f"EELGRID_SLURM_UUIDS={self.home}/uuids {_TASK_PROLOG}",
            "scontrol": f'{shutil.which("scontrol")} "$@"',
        }
        for name, command in programs.items():
            path = self.home / "bin" / name
            path.write_text(f"#!/bin/sh\n{crash % 'before'}{command}\ncode=$?\n{crash % 'after'}exit $code\n")
            path.chmod(0o755)

    def _command(self, command, arguments, environment):
        """The words and the environment of a command of the agent."""
        words = ("mig", command, "--simulate", self.fleet, *arguments)
        return words, {**os.environ, **environment, "PATH": f"{self.home}/bin:{os.environ['PATH']}"}

    def mig(self, command, *arguments, code=0, **environment):
        """Runs one command to its end, whoever ends it; returns what it printed."""
        words, environment = self._command(command, arguments, environment)
        done = run_program("eelgrid_agent", words, cwd=self.folder, env=environment)
        assert done.returncode == code, f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def apply(self, layout, *options, code=0, **environment):
        return self.mig("apply", "--yes", "--slurm", self.file, "-l", layout, *options, code=code, **environment)

    def resume(self):
        return self.mig("resume", "--slurm", self.file)

    def show(self):
        """What slurmctld shows of the node, by field; nothing if it has none."""
        done = subprocess.run(
            ["scontrol", "-o", "show", "node", self.name],
            check=False,
            capture_output=True,
            text=True,
            env=self.slurm.environment,
        )
        return dict(part.split("=", 1) for part in done.stdout.split() if "=" in part) if not done.returncode else {}

    def gres(self):
        """The GRES that slurmctld has of the node, sorted, and its states."""
        shown = self.show()
        gres = re.sub(r"\([^)]*\)", "", shown.get("Gres", ""))
        return ",".join(sorted(gres.split(","))), set(shown.get("State", "").split("+")) - {"DYNAMIC_NORM"}

    def layout(self):
        """How many slices of each profile the GPUs have, as `mig show` says."""
        found = [profile for gpu in self.layouts() for profile in gpu]
        return ",".join(f"gpu:{name}:{found.count(name)}" for name in sorted(set(found)))

    def layouts(self):
        """The profiles of each GPU, sorted, as `mig show` says."""
        gpus = json.loads(self.mig("show", "-o", "json"))["gpus"]
        return [sorted(one["profile"] for one in gpu["instances"]) for gpu in gpus]

    def uuids(self, profile):
        """The UUIDs of the slices of a profile, as `mig show` says."""
        gpus = json.loads(self.mig("show", "-o", "json"))["gpus"]
        found = (one for gpu in gpus for one in gpu["instances"] if one["profile"] == profile)
        return [child["uuid"] for one in found for child in one["compute_instances"]]

    def other(self):
        """A layout that is not there."""
        return MIXED if self.layout() == GRES[HALVES] else HALVES

    def kill_at(self, layout, line):
        """Kills an agent that changes the layout as soon as it has said a line."""
        words, environment = self._command("apply", ("--yes", "--slurm", self.file, "-l", layout), {})
        with (self.folder / "said").open("w+") as said, Path(os.devnull).open("r+") as nothing:
            agent = find_server("eelgrid_agent").start(
                words, env=environment, cwd=self.folder, streams=(nothing, nothing, said)
            )
            poll_until(lambda: line in Path(said.name).read_text(), f"it says {line}", within_s=WITHIN_S)
            agent.send_signal(signal.SIGKILL)
            assert agent.wait(WITHIN_S) == -signal.SIGKILL

    def assert_in_service(self, *expected):
        """The GRES of the slices that exist, idle, once slurmctld has heard of the node again; by default of any layout."""
        layout = self.layout()
        assert layout in expected or not expected, layout
        for one in self.layouts():
            assert one in (["3g.40gb"] * 2, ["1g.10gb", "1g.10gb", "3g.40gb"]), one
        poll_until(lambda: self.gres() == (layout, {"IDLE"}), f"{layout}; there is {self.gres()}", within_s=WITHIN_S)
