"""A real Ray for tests: raylets with fake GPUs on loopback, programs that run there, and what its dashboard says.

Owns the life of the cluster and of the programs, each of which ends with the test. Must not know Eelgrid's controller. Ray
is installed in an environment of its own (`make test-ray`), which EELGRID_RAY_PYTHON names; the tests themselves import
nothing of it. No node has a real GPU: a raylet is told how many it has.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from tests.e2e.processes import free_port
from tests.waiting import poll_until

PYTHON = os.environ.get("EELGRID_RAY_PYTHON", "")
MISSING = "" if PYTHON and Path(PYTHON).exists() else "no Ray here: make test-ray installs one"
ROOT = Path(__file__).parent.parent
CPUS, GPUS = 8, 4
_START_S = 120.0
_STARTS_MOST = 3
_SHOWN_LINES = 30


class _StartTimedOut(AssertionError):
    """A node was not there in the 30 s that Ray gives it."""


class RayCluster:
    """One cluster: a head without GPUs, and nodes n0, n1, and so on."""

    def __init__(self, *, nodes=2, token="", head_type="head"):
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have paths of at most 107 bytes
        self.names = [f"n{number}" for number in range(nodes)]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token, self.head_type = token, head_type
        self.address = ""
        self.programs = []
        paths = [str(ROOT / folder) for folder in ("client", "protos")]
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "EELGRID_"))},
            "PATH": os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([*paths, str(self.folder)]),
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_TMPDIR": str(self.folder),  # where it notes its address, in ray/, which it does not make
            "NODE_STATS_UPDATE_INTERVAL_SECONDS": "2",
            "RAY_metrics_report_interval_ms": "1000",
            "RAY_AUTH_MODE": "token" if token else "disabled",
        }
        (self.folder / "ray").mkdir()
        if token:
            (self.folder / "token").write_text(token)
            self.environment["RAY_AUTH_TOKEN_PATH"] = str(self.folder / "token")

    def __enter__(self):
        head = {
            "num_cpus": 4, "num_gpus": 0, "include_dashboard": True, "dashboard_port": self.port,
            "temp_dir": str(self.folder / "ray"), "labels": {"eelgrid.io/node": "head"},
            # Its own autoscaler would only look on; ours needs to know which instance the head is.
            "no_monitor": True, "env_vars": {"RAY_CLOUD_INSTANCE_ID": "head", "RAY_NODE_TYPE_NAME": self.head_type},
        }  # fmt: skip
        nodes = [{"name": "head", "args": head}, *map(self._describe, self.names)]
        try:
            self.address = self._begin(nodes)["address"]
            poll_until(self._is_up, "its dashboard knows all nodes", within_s=_START_S)
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self, nodes):
        """Starts all nodes, and all anew if one is not there in the 30 s that Ray gives it: the machine was busy."""
        for _ in range(_STARTS_MOST - 1):
            with contextlib.suppress(_StartTimedOut):
                return self._begin_once(nodes)
            self._process.stdin.close()
            self._process.wait(60.0)
            self._process.stdout.close()
            self._log.close()
        return self._begin_once(nodes)

    def _begin_once(self, nodes):
        self._log = (self.folder / "cluster.log").open("w")
        self._process = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("ray_cluster.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env=self.environment, cwd=self.folder, start_new_session=True,
        )  # fmt: skip
        return self._ask(nodes)

    def _describe(self, name):
        args = {
            "num_cpus": CPUS, "num_gpus": GPUS, "resources": {"mig_1g_10gb": 7},
            "labels": {"eelgrid.io/node": name, "ray.io/accelerator-type": "A100", "rack": f"r{name[1:]}"},
        }  # fmt: skip
        return {"name": name, "args": args}

    def _ask(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            said = (self.folder / "cluster.log").read_text()[-3000:]
            raise (_StartTimedOut if "timed out during startup" in said else AssertionError)(
                f"the cluster has ended\n{said}"
            )
        return json.loads(line)

    def _is_up(self):
        with contextlib.suppress(OSError, AssertionError):
            return sum(node["state"] == "ALIVE" for node in self.list("nodes")) == 1 + len(self.names)
        return False

    def __exit__(self, *reason):
        self.close()

    def close(self):
        """Nothing of it runs when this returns."""
        for program in self.programs:
            program.end()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        print(*(self.folder / "cluster.log").read_text(errors="replace").splitlines()[-_SHOWN_LINES:], sep="\n  ")
        shutil.rmtree(self.folder, ignore_errors=True)

    def add_node(self, name):
        """Starts a raylet."""
        self._ask({"add": self._describe(name)})

    def remove_node(self, name):
        """Ends a raylet, as a machine that is lost does."""
        self._ask({"remove": name})

    def request(self, path, *, method="GET", body=None):
        """What the dashboard answers, as a pair of HTTP's status and JSON or text."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data=data, method=method)
        asked.add_header("Content-Type", "application/json")
        if self.token:
            asked.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode(errors="replace")
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def list(self, what):
        """All elements of a list of the state API."""
        status, answer = self.request(f"/api/v0/{what}?detail=true&limit=10000")
        assert status == 200, answer
        return answer["data"]["result"]["result"]

    def submit(self, entrypoint, **settings):
        """Submits a job by the Jobs API, once the head's own agent is up; returns its id."""

        def submit_once():
            status, answer = self.request("/api/jobs/", method="POST", body={"entrypoint": entrypoint, **settings})
            assert status == 200 or "No available agent" in str(answer), answer
            return status == 200 and answer["submission_id"]

        return poll_until(submit_once, "the head takes jobs", within_s=_START_S)

    def job(self, submission):
        """A job as the Jobs API has it."""
        return self.request(f"/api/jobs/{submission}")[1]

    def stop(self, submission):
        """Stops a job, and waits until it has ended."""
        self.request(f"/api/jobs/{submission}/stop", method="POST", body={})
        poll_until(lambda: self.job(submission)["status"] in ("STOPPED", "SUCCEEDED", "FAILED"), "the job has ended")

    def program(self, text, **environment):
        """Starts a program that is a driver on this cluster; it says lines, and ends with its standard input."""
        program = RayProgram(self, text, environment)
        self.programs.append(program)
        return program

    def autoscale(self, settings, **environment):
        """Starts Ray's autoscaler over the queue of a controller, by a file of these settings."""
        path = self.write("capacity.yaml", json.dumps({"address": self.address, **settings}))
        log = (self.folder / "autoscale.log").open("w")
        process = subprocess.Popen(
            [PYTHON, "-m", "eelgrid.ray_capacity", "autoscale", str(path)], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env={**self.environment, **environment}, cwd=self.folder, start_new_session=True,
        )  # fmt: skip
        log.close()
        return process

    def write(self, name, text):
        """Puts a module where all programs and workers find it; returns its path."""
        path = self.folder / name
        path.write_text(text)
        return path

    def devices(self):
        """By the raylets' own statistics: the GPUs that processes have, as pairs of a node and an index, with shares."""
        held = {}
        for node in self.list("nodes"):
            if node["state"] != "ALIVE":
                continue
            detail = self.request(f"/nodes/{node['node_id']}")[1]["data"]["detail"]
            for worker in detail.get("workers") or ():
                for stats in worker["coreWorkerStats"]:
                    # A placement group and its bundle both name what a process has.
                    gpus = [used for name, used in stats["usedResources"].items() if name.startswith("GPU")]
                    own = {int(slot["slot"]): slot["allocation"] for used in gpus for slot in used["resourceSlots"]}
                    for index, share in own.items():
                        key = node["labels"]["eelgrid.io/node"], index
                        held[key] = held.get(key, 0.0) + share
        return held


class RayProgram:
    """A driver in a process of its own."""

    def __init__(self, cluster, text, environment):
        self._log = (cluster.folder / f"program-{len(cluster.programs)}.log").open("w+")
        head = f"import os, sys, time, ray\nray.init(address={cluster.address!r}, log_to_driver=False)\n"
        self.process = subprocess.Popen(
            [PYTHON, "-c", head + text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**cluster.environment, **environment}, cwd=cluster.folder, start_new_session=True,
        )  # fmt: skip

    def read(self):
        """The next line that it says, as JSON; what Ray itself says of raylets there is left out."""
        line = self.process.stdout.readline()
        while "(raylet" in line:
            line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the program has ended\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def tell(self, words=""):
        """Gives it a line."""
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def kill(self):
        """Kills it."""
        self.process.kill()
        self.process.wait()

    def end(self):
        """Ends its input, and waits for it."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
        self._log.close()
