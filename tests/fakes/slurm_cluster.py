"""A Slurm in memory with a clock of its own, as the engine uses it: it starts what fits and is not held, in order of submission.

Answers have the form of 22.05. Each job says how long it runs and how it ends. Behaviour that the real one was seen to have
(tests/e2e/slurm_test.py); nothing here knows the engine.
"""

import json
from dataclasses import dataclass, field

from eelgrid_controller.engines.slurm.commands import SlurmFailed
from eelgrid_controller.engines.slurm.job_table import COLUMNS

GPUS = 4
BEGUN_S = 1_000_000


@dataclass
class SimulatedJob:
    number: int
    gpus: int
    runs_s: float
    exit_code: int
    user: str
    submitted_s: float
    is_held: bool = True
    comment: str = "eelgrid:held"
    required: str = ""
    state: str = "PENDING"
    node: str = ""
    indexes: tuple = ()
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def reason(self):
        return "JobHeldUser" if self.is_held else "Resources" if self.state == "PENDING" else "None"


@dataclass
class SlurmInMemory:
    names: tuple = ("n0", "n1", "n2")
    now_s: float = float(BEGUN_S)
    jobs: dict = field(default_factory=dict)
    # Every GPU's busy seconds, to see what stays empty.
    busy_s: float = 0.0
    full_answers: int = 0

    def submit(self, *, gpus=1, runs_s=1.0, exit_code=0, user="alice", is_held=True):
        number = len(self.jobs) + 1
        self.jobs[number] = SimulatedJob(number, gpus, runs_s, exit_code, user, self.now_s, is_held)
        if not is_held:
            self.jobs[number].comment = ""
        return str(number)

    def free(self, name):
        held = {
            index for job in self.jobs.values() if job.state == "RUNNING" and job.node == name for index in job.indexes
        }
        return [index for index in range(GPUS) if index not in held]

    def advance(self, seconds):
        """Lets time pass: jobs end, and others start at the same moment."""
        until_s = self.now_s + seconds
        while True:
            self._schedule()
            ends = [(job.started_s + job.runs_s, job) for job in self.jobs.values() if job.state == "RUNNING"]
            at_s, ending = min(ends, key=lambda one: one[0], default=(until_s, None))
            if ending is None or at_s > until_s:
                self.now_s = until_s
                return
            self.now_s = at_s
            ending.state, ending.ended_s = "FAILED" if ending.exit_code else "COMPLETED", at_s

    def _schedule(self):
        # As Slurm does, a job that waits for a node of its own lets those behind it have the other nodes only.
        open_names = set(self.names)
        for job in self.jobs.values():
            if job.state != "PENDING" or job.is_held:
                continue
            wanted = {job.required} if job.required else set(self.names)
            for name in sorted(wanted & open_names):
                if len(self.free(name)) >= job.gpus:
                    job.state, job.node, job.started_s = "RUNNING", name, self.now_s
                    job.indexes = tuple(self.free(name)[: job.gpus])
                    self.busy_s += job.gpus * job.runs_s
                    break
            else:
                open_names -= wanted

    # The commands

    async def read_jobs(self):
        self.full_answers += 1
        return json.dumps({"jobs": [self._describe(job) for job in self.jobs.values()]}).encode()

    def _describe(self, job):
        index = ",".join(map(str, job.indexes))
        return {
            "job_id": job.number, "name": "x", "user_name": job.user, "partition": "main", "job_state": job.state,
            "state_reason": job.reason, "priority": 0 if job.is_held else 1, "nodes": job.node, "node_count": 1, "cpus": 1,
            "memory_per_node": 100, "tres_per_node": f"gres:gpu:{job.gpus}", "required_nodes": job.required,
            "gres_detail": [f"gpu:{job.gpus}(IDX:{index})"] if job.node else [], "admin_comment": job.comment,
            "submit_time": int(job.submitted_s), "eligible_time": int(job.submitted_s), "requeue": True,
            "start_time": int(job.started_s), "end_time": int(job.ended_s), "exit_code": job.exit_code << 8,
        }  # fmt: skip

    async def read_columns(self):
        lines = []
        for job in self.jobs.values():
            values = {
                "JobArrayID": job.number, "ArrayTaskID": "N/A", "State": job.state, "Reason": job.reason,
                "PriorityLong": 0 if job.is_held else 1, "RestartCnt": 0, "StartTime": int(job.started_s) or "N/A",
                "EndTime": int(job.ended_s) or "N/A", "EligibleTime": int(job.submitted_s), "NodeList": job.node,
                "ReqNodes": job.required, "exit_code": job.exit_code << 8, "admin_comment": job.comment,
            }  # fmt: skip
            widths = [one.rstrip("|").split(":") for one in COLUMNS.split(",")]
            lines.append("".join(str(values[name]).ljust(int(width)) + "|" for name, width in widths))
        return "\n".join([*lines, ""]).encode()

    async def read_nodes(self):
        nodes = [
            {
                "name": name,
                "cpus": 16,
                "real_memory": 64_000,
                "gres": f"gpu:{GPUS}",
                "state": "idle",
                "partitions": ["main"],
            }
            for name in self.names
        ]
        return json.dumps({"nodes": nodes}).encode()

    async def check_placement(self, job, nodes):
        return "" if set(nodes) <= set(self.names) else "Requested node configuration is not available"

    async def place_jobs(self, placements):
        for one in placements:
            job = self.jobs[int(one.job_id)]
            if job.state == "PENDING":
                (job.required,) = one.nodes
                job.comment = one.comment
                job.is_held &= not one.is_held
        self._schedule()

    async def hold_jobs(self, job_ids):
        for number in map(int, job_ids):
            self.jobs[number].is_held |= self.jobs[number].state == "PENDING"

    async def leave_job(self, job_id, comment):
        job = self.jobs[int(job_id)]
        job.required, job.comment, job.is_held = "", comment, False

    async def requeue_job(self, job, comment):
        raise SlurmFailed("is not simulated")

    async def announce_shrink(self, job_id, comment):
        raise SlurmFailed("is not simulated")

    async def list_step_nodes(self, job_id):
        raise SlurmFailed("is not simulated")

    async def shrink_job(self, job_id, nodes):
        raise SlurmFailed("is not simulated")

    async def cancel_job(self, job_id):
        self.jobs[int(job_id)].state = "CANCELLED"

    async def weigh_nodes(self, weight, nodes):
        raise SlurmFailed("is not simulated")

    async def read_priorities(self):
        raise SlurmFailed("is not simulated")

    async def rank_jobs(self, factors):
        raise SlurmFailed("is not simulated")

    async def set_nodes_power(self, nodes, *, on):
        raise SlurmFailed("is not simulated")
