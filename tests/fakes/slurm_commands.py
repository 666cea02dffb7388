"""Slurm's commands without Slurm: one program under the names squeue, sinfo, scontrol, sbatch and scancel, and its cluster.

Written after what 22.05 prints and does (tests/contracts/slurm_answers, tests/slurm_rig.py); the suite in
tests/contracts/cluster_engines_contract_test.py drives this one and a real Slurm alike. A job is of one node; whatever is pending
and not held starts as soon as there is room, as slurmctld would have it. Imports nothing of the product: it is run by its path.
"""

import contextlib
import fcntl
import json
import sys
import time
from pathlib import Path

CPUS, MEMORY_MIB, GPUS = 16, 64_000, 4
COMMANDS = ("squeue", "sinfo", "scontrol", "sbatch", "scancel")
_NO_ANSWER = {
    "array_job_id": 0,
    "array_task_id": None,
    "array_task_string": "",
    "shared": None,
    "features": "",
    "tasks": 1,
}


class FakeSlurm:
    """One cluster, kept in a file; the commands and a test change it under its lock."""

    def __init__(self, folder, *, nodes=("n0", "n1"), lease=None):
        self.folder, self.path = Path(folder), Path(folder) / "cluster.json"
        if not self.path.exists():
            self.path.write_text(json.dumps({"nodes": nodes, "jobs": {}, "lease": str(lease)}))
        self.names = tuple(json.loads(self.path.read_text())["nodes"])

    def install(self):
        """Puts the commands into a folder for the PATH; returns it."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name in COMMANDS:
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {self.folder} {name} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    @contextlib.contextmanager
    def changed(self):
        """The cluster, which starts what it can when the block is over."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cluster = json.loads(self.path.read_text())
            yield cluster
            for job in cluster["jobs"].values():
                if job["state"] == "PENDING" and job["priority"]:
                    _start(cluster, job)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(cluster))
            new.replace(self.path)

    def submit(self, gpus):
        """Submits a job that opted in, as our job_submit plugin has it; returns its number."""
        with self.changed() as cluster:
            number = str(1 + len(cluster["jobs"]))
            is_held = is_leased(cluster["lease"])
            cluster["jobs"][number] = {
                "id": int(number), "gpus": gpus, "state": "PENDING", "priority": 0 if is_held else 1, "starts": 0,
                "admin_comment": "eelgrid:held" if is_held else "", "nodes": "", "indexes": [], "required": "",
                "submitted": int(time.time()), "started": 0, "ended": 0, "status": 0,
            }  # fmt: skip
        return number

    def end(self, number, code):
        """Its batch script exits."""
        with self.changed() as cluster:
            _end(cluster["jobs"][number], "FAILED" if code else "COMPLETED", code << 8)

    def cancel(self, number):
        """Does what scancel does."""
        with self.changed() as cluster:
            _end(cluster["jobs"][number], "CANCELLED", 0)

    def job(self, number):
        """A job as it is."""
        return json.loads(self.path.read_text())["jobs"][number]

    def devices(self):
        """The GPUs that running jobs hold, as pairs of a node and an index, each with its jobs."""
        held = {}
        for number, job in json.loads(self.path.read_text())["jobs"].items():
            for index in job["indexes"]:
                held.setdefault((job["nodes"], index), []).append(number)
        return held


def is_leased(path):
    """Whether the lease of a controller holds: then our plugin holds jobs that opted in."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text()) > time.time()
    return False


def _start(cluster, job):
    for name in [job["required"]] if job["required"] else cluster["nodes"]:
        taken = {index for one in cluster["jobs"].values() if one["nodes"] == name for index in one["indexes"]}
        free = [index for index in range(GPUS) if index not in taken]
        if len(free) >= job["gpus"]:
            job |= {"state": "RUNNING", "nodes": name, "indexes": free[: job["gpus"]], "started": int(time.time())}
            job["starts"] += 1
            return


def _end(job, state, status):
    if job["state"] in ("PENDING", "RUNNING"):
        job |= {"state": state, "status": status, "indexes": [], "ended": int(time.time())}


def _show_job(job):
    gres = f"gpu:a100:{job['gpus']}"
    detail = f"{gres}(IDX:{','.join(map(str, job['indexes']))})"
    return {
        **_NO_ANSWER, "job_id": job["id"], "job_state": job["state"], "priority": job["priority"], "nodes": job["nodes"],
        "state_reason": "None" if job["state"] != "PENDING" else "Priority" if job["priority"] else "JobHeldUser",
        "node_count": 1, "cpus": 1, "tres_per_node": f"gres:{gres}", "tres_per_job": "", "tres_per_task": "",
        "tres_req_str": "cpu=1,mem=100M,node=1,billing=1", "gres_detail": [detail] if job["indexes"] else [],
        "dependency": "", "eligible_time": job["submitted"], "submit_time": job["submitted"], "time_limit": 525_600,
        "start_time": job["started"], "end_time": job["ended"], "exit_code": job["status"], "restart_cnt": 0,
        "memory_per_node": None, "memory_per_cpu": 100, "required_nodes": job["required"], "name": "wrap",
        "user_name": "root", "account": "", "partition": "main", "qos": "", "comment": "eelgrid", "licenses": "",
        "admin_comment": job["admin_comment"], "resv_name": "", "het_job_id": 0,
    }  # fmt: skip


def _show_node(cluster, name):
    is_used = any(job["nodes"] == name and job["indexes"] for job in cluster["jobs"].values())
    return {
        "name": name, "cpus": CPUS, "real_memory": MEMORY_MIB, "gres": f"gpu:a100:{GPUS}", "features": "a100",
        "active_features": "a100", "partitions": ["main"], "state": "mixed" if is_used else "idle", "state_flags": [],
        "reason": "",
    }  # fmt: skip


def _control(cluster, words):
    """Carries out one request to scontrol."""
    if words[0] == "update":
        named = dict(word.split("=", 1) for word in words[1:])
        job = cluster["jobs"][named["JobId"]]
        job["required"] = named.get("ReqNodeList", job["required"])
        job["admin_comment"] = named.get("AdminComment", job["admin_comment"])
    else:
        assert words[0] in ("release", "hold"), words
        cluster["jobs"][words[1]]["priority"] = int(words[0] == "release")


def main(folder, name, *words):
    """Runs one command."""
    slurm = FakeSlurm(folder)
    with slurm.changed() as cluster:
        if name == "squeue":
            print(json.dumps({"jobs": [_show_job(job) for job in cluster["jobs"].values()]}))
        elif name == "sinfo" and "--version" in words:
            print("slurm 22.05.8")
        elif name == "sinfo":
            print(json.dumps({"nodes": [_show_node(cluster, one) for one in cluster["nodes"]]}))
        elif name == "scancel":
            _end(cluster["jobs"][words[0]], "CANCELLED", 0)
        elif name == "scontrol":
            for line in [words] if words else map(str.split, sys.stdin.read().splitlines()):
                _control(cluster, list(line))
        else:
            assert (name, words[0]) == ("sbatch", "--test-only")


if __name__ == "__main__":
    main(*sys.argv[1:])
