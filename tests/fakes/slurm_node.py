"""A node of Slurm in memory, as slurmctld and its slurmd behave: jobs start whenever it takes them, and what must not happen is noted.

Owns what Slurm keeps over a crash of the agent or a boot of the node. Every call of the port is two moments, before and after,
at which the agent may die and a job may start.
"""

import random

from eelgrid_agent.engine.slurm_node import SlurmNodeError, SlurmNodeView

_DYNAMIC = {"IDLE", "DYNAMIC_NORM"}


class FakeSlurmNode:
    """The port; `moment` is called before and after each change, `now_s` is the clock."""

    def __init__(self, moment, *, now_s, seed=0):
        self.moment, self.now_s, self.random = moment, now_s, random.Random(seed)
        # Of a job at any moment.
        self.chance = 0.0
        # None: slurmctld has no node of this name; else its GRES.
        self.registered = None
        self.states, self.reason = set(), ""
        # The GRES of the slurmd that runs, and of the options with which it would start.
        self.slurmd, self.options = None, None
        self.jobs = {}
        self.started = 0
        self.reservations = ()
        self.violations = []
        # Calls that fail, by name: how often.
        self.failures = {}

    @property
    def takes_jobs(self):
        return self.registered is not None and self.slurmd is not None and not self.states & {"DRAIN", "DOWN"}

    def pass_time(self):
        """What may happen at any moment: jobs end, and another one starts where it may."""
        self.jobs = {job: end_s for job, end_s in self.jobs.items() if end_s > self.now_s()}
        if self.takes_jobs and self.random.random() < self.chance:
            self.started += 1
            self.jobs[str(self.started)] = self.now_s() + self.random.choice((0.05, 1.0, 5.0))

    def reboot(self):
        """The machine goes and comes back: slurmd and what was in memory are gone, and so are its jobs."""
        self.slurmd, self.options, self.jobs = None, None, {}
        if self.registered is not None:
            self.states |= {"DOWN"}

    # The port

    @property
    def has_options(self):
        return self.options is not None

    def read_node(self):
        self._fail("read_node")
        if self.registered is None:
            return None
        return SlurmNodeView(states=frozenset(self.states), gres=self.registered, reason=self.reason)

    def list_jobs(self):
        self.pass_time()
        return tuple(self.jobs)

    def list_reservations(self):
        return self.reservations

    def drain(self, reason):
        with _Change(self, "drain"):
            self.states.add("DRAIN")
            self.reason = reason

    def resume(self):
        with _Change(self, "resume"):
            if "INVALID_REG" in self.states:
                raise SlurmNodeError("scontrol: Invalid node state specified")
            self.states -= {"DRAIN", "DOWN"}
            self.reason = ""

    def delete(self):
        with _Change(self, "delete"):
            if self.jobs:
                raise SlurmNodeError("scontrol: Node in use")
            self.registered, self.states, self.reason = None, set(), ""

    def stop_slurmd(self):
        with _Change(self, "stop_slurmd"):
            self.options = None
            if self.jobs:
                self.violations.append(f"slurmd was ended under jobs {sorted(self.jobs)}")
            self.slurmd = None

    def start_slurmd(self, gres):
        with _Change(self, "start_slurmd"):
            self.options = self.slurmd = gres.text
            if self.registered is None:
                self.registered, self.states, self.reason = gres.text, set(_DYNAMIC), ""
            elif self.registered == gres.text:
                self.states -= {"DOWN"}

    def _fail(self, name):
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise SlurmNodeError(f"{name}: slurmctld does not answer")


class _Change:
    """One call that changes something: a moment before it, and one after it."""

    def __init__(self, node, name):
        self.node, self.name = node, name

    def __enter__(self):
        self.node.moment(f"before {self.name}")
        self.node._fail(self.name)

    def __exit__(self, kind, *rest):
        if kind is None:
            self.node.moment(f"after {self.name}")
