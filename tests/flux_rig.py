"""A real Flux broker for tests: four brokers on this machine with cores and GPUs of our making, whose jobs are not executed.

Owns its start and end, and how tests ask and submit, by the names that the broker in memory has, too. `flux` is taken from
EELGRID_FLUX or the PATH; Debian and PyPI have no broker, so most machines have none.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.waiting import poll_until

ROOT = Path(__file__).parent.parent
MODULE = ROOT / "controller" / "eelgrid_controller" / "engines" / "flux" / "sched_eelgrid.py"
HOSTS, CORES, GPUS = ("n0", "n1", "n2", "n3"), 8, 4
CONFIG = """
[resource]
noverify = true
[[resource.config]]
hosts = "n[0-3]"
cores = "0-7"
gpus = "0-3"
[[resource.config]]
hosts = "n[0-1]"
properties = ["a100@gpu", "ssd"]
[[resource.config]]
hosts = "n[2-3]"
properties = ["h100@gpu"]
"""
RESOURCES = {
    "version": 1,
    "execution": {
        "R_lite": [{"rank": "0-3", "children": {"core": "0-7", "gpu": "0-3"}}],
        "nodelist": ["n[0-3]"],
        "properties": {"a100@gpu": "0-1", "ssd": "0-1", "h100@gpu": "2-3"},
        "starttime": 0.0,
        "expiration": 0.0,
    },
}


def find_flux():
    """Returns the path of `flux` with its scheduler base class; None where there is none."""
    found = os.environ.get("EELGRID_FLUX") or shutil.which("flux")
    if found is None or not Path(found).exists():
        return None
    probe = subprocess.run(
        [found, "python", "-c", "import flux.scheduler, grpc, google.protobuf"], capture_output=True, check=False
    )
    return None if probe.returncode else found


def build_jobspec(*, nodes=0, slots=1, cores=1, gpus=0, exclusive=False, duration=600, constraints=None, queue=None):
    """A jobspec of version 1 (RFC 25)."""
    inner = [{"type": "core", "count": cores}] + ([{"type": "gpu", "count": gpus}] if gpus else [])
    resources = {"type": "slot", "count": slots, "with": inner, "label": "task"}
    if nodes:
        resources = {"type": "node", "count": nodes, "with": [resources]} | ({"exclusive": True} if exclusive else {})
    system = {"duration": duration, "cwd": "/tmp", "exec": {"test": {"run_duration": "600s"}}}
    system |= {"constraints": constraints} if constraints is not None else {}
    system |= {"queue": queue} if queue else {}
    tasks = [{"command": ["train"], "slot": "task", "count": {"per_slot": 1}}]
    return {"version": 1, "resources": [resources], "tasks": tasks, "attributes": {"system": system}}


class FluxRefused(Exception):
    """A command of Flux has failed."""


class RealBroker:
    """One instance; jobs run until they are cancelled."""

    observer, plugin = MODULE.with_name("observe_eelgrid.py"), MODULE.with_name("frobnicator.py")

    def __init__(self, flux, environment=None):
        """`environment` is added to that of the brokers and of all commands."""
        self._flux = flux
        self.folder = Path(tempfile.mkdtemp(prefix="flux-", dir="/tmp"))
        (self.folder / "conf.toml").write_text(CONFIG)
        paths = [str(ROOT / name) for name in ("agent", "client", "controller", "protos")]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} | (environment or {})
        for name in ("FLUX_URI", "VIRTUAL_ENV"):
            self._env.pop(name, None)
        uri = f"local://{self.folder}/run/local-0"
        (self.folder / "run").mkdir()
        self._log = (self.folder / "log").open("w")
        command = [
            flux,
            "start",
            f"--test-size={len(HOSTS)}",
            f"--config-path={self.folder / 'conf.toml'}",
            f"--test-rundir={self.folder / 'run'}",
        ]
        # The initial program runs once all of Flux's own modules are there; when it ends, all brokers of the instance do.
        os.mkfifo(self.folder / "stop")
        initial = ("sh", "-c", f"touch {self.folder / 'ready'}; exec cat {self.folder / 'stop'}")
        self._child = subprocess.Popen(
            [*command, *initial], env=self._env, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )
        self._env["FLUX_URI"] = uri
        poll_until((self.folder / "ready").exists, "the broker is there", within_s=60.0)

    def run(self, *arguments, stdin=None, within_s=60.0):
        """What a command of Flux prints."""
        done = subprocess.run(
            [self._flux, *arguments],
            env=self._env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        if done.returncode:
            raise FluxRefused(f"flux {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def load(self, *args):
        """Loads our module in place of Flux's own scheduler."""
        with contextlib.suppress(FluxRefused):
            self.run("module", "remove", "sched-simple")
        try:
            self.run("module", "load", str(MODULE), *args)
        except FluxRefused as error:
            # Why is in the broker's log alone.
            raise FluxRefused(f"{error}{(self.folder / 'log').read_text()}") from None

    def configure(self, text):
        """Adds to the configuration, and has the job ingest read it."""
        with (self.folder / "conf.toml").open("a") as file:
            file.write(text)
        self.run("config", "reload")
        self.run("module", "reload", "job-ingest")

    def get_jobspec(self, number):
        return json.loads(self.run("job", "info", str(number), "jobspec"))

    def unload(self):
        self.run("module", "remove", "sched_eelgrid")

    def _list_brokers(self):
        """The processes of the instance, each of which names its folder."""
        found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
        rows = (line.split(None, 1) for line in found.splitlines())
        return [int(pid) for pid, args in rows if "flux-broker" in args and f"{self.folder}/" in args]

    def close(self):
        """No broker of the instance runs when this returns."""
        with contextlib.suppress(OSError):
            # Without a reader the initial program has ended already.
            os.close(os.open(self.folder / "stop", os.O_WRONLY | os.O_NONBLOCK))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(30.0)
        for pid in self._list_brokers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, jobspec, priority=16):
        given = self.run("job", "submit", f"--urgency={priority}", "-", stdin=json.dumps(jobspec)).strip()
        return int(self.run("job", "id", "--to=dec", given))

    def cancel(self, number):
        self.run("cancel", str(number))

    def set_priority(self, number, priority):
        self.run("job", "urgency", str(number), str(priority))

    def drain(self, ranks, *, is_down=True):
        self.run("resource", *(("drain", ranks, "test") if is_down else ("undrain", ranks)))

    def find_infeasibility(self, jobspec):
        script = (
            "import flux, json, sys\n"
            "try:\n flux.Flux().rpc('feasibility.check', {'jobspec': json.load(sys.stdin)}).get()\n"
            "except OSError as error:\n print(error.strerror)\n"
        )
        return self.run("python", "-c", script, stdin=json.dumps(jobspec)).strip()

    def _events(self, number):
        lines = self.run("job", "eventlog", "--format=json", str(number)).splitlines()
        return [json.loads(line) for line in lines]

    def list_events(self, number):
        return [one["name"] for one in self._events(number)]

    def get_resources(self, number):
        return json.loads(self.run("job", "info", str(number), "R"))

    def get_annotations(self, number):
        found = json.loads(self.run("jobs", "--json", str(number)))
        return found.get("annotations", {}).get("sched", {})

    def get_exception(self, number):
        found = [one for one in self._events(number) if one["name"] == "exception"]
        return found[0]["context"]["note"] if found else ""
