"""Shrinking: running jobs of several nodes that give some of them back, because the core wants fewer replicas of them.

Owns the words by which a job opts in, what it is told before, how long it may take, and why it cannot be, as a type. Must not
know how commands run, nor clocks; times are arguments.

Theory. The core decides how many nodes a job keeps (an operator's `eelctl scale`, or the plan of elastic jobs by its profile).
Slurm is told which: `scontrol update JobId=J NodeList=n0,n2` on a running job, whose steps on the other nodes it kills. So the
application comes first: the nodes that it keeps are written into the administrator's comment, where it can read them, and its
batch script gets SIGUSR2. Once no step of it runs on the other nodes any more, or its grace is over, they are taken. Until then
they count as external usage. What Slurm does not do is given up for a while, and the core takes the job as it stands.

What 22.05 does (tried): the node of the batch script stays, whoever is asked to go; nothing grows. A job that was shrunk gets
another index in slurmdbd, for which slurmctld asks at once; until it has that, every later update of the job, its comment
included, is refused after five seconds ("the DB index is being set"). So with slurmdbd a job is shrunk as often as the core
wants, and without one, once: it is marked before.

Source: slurm.schedmd.com/faq.html#job_size; scontrol(1), NodeList of a running job; tried on 22.05.8.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from eelgrid_controller.engines.slurm.answers import SlurmJob

# In a job's comment: it may be shrunk to so many nodes; and the profile by which the core may decide so itself.
_NODES = re.compile(r"(?:^|[\s,;])eelgrid-nodes=([0-9]{1,5})(?=$|[\s,;])")
_PROFILE = re.compile(r"(?:^|[\s,;])eelgrid-profile=([A-Za-z0-9][A-Za-z0-9._/-]{0,62})(?=$|[\s,;])")
# For so long a job that could not be shrunk keeps its nodes.
_REFUSED_S = 600.0


class ShrinkRefusal(StrEnum):
    """Why a job keeps its nodes."""

    NOT_ELASTIC = "not-elastic"
    TOO_SMALL = "too-small"
    NODES = "nodes"
    NO_DATABASE = "no-database"
    SLURM = "slurm"


_WORDS = {
    ShrinkRefusal.NOT_ELASTIC: "its user has not said to how many nodes; submit it with eelgrid-nodes=LEAST in its comment",
    ShrinkRefusal.TOO_SMALL: "its user has said that it needs more nodes",
    ShrinkRefusal.NODES: "Slurm does not take these nodes from it; the node of its batch script has to stay",
    ShrinkRefusal.NO_DATABASE: "Slurm changes a job that was shrunk once only if slurmdbd answers; without one it keeps its nodes to its end",
    ShrinkRefusal.SLURM: "Slurm refused",
}
_SAID = (
    ("DB index", ShrinkRefusal.NO_DATABASE),
    ("Invalid node name", ShrinkRefusal.NODES),
)


@dataclass(frozen=True, slots=True)
class ShrinkJob:
    """Have a running job keep these nodes only: tell it, or take the others once no step of it is there, or the grace is over."""

    job: SlurmJob
    workload_id: str
    nodes: tuple[str, ...]
    is_told: bool = False
    is_due: bool = False

    @property
    def leaving(self) -> frozenset[str]:
        """The nodes that it gives back."""
        return frozenset(self.job.nodes) - frozenset(self.nodes)


@dataclass(frozen=True, slots=True)
class KeepNodes:
    """A job that was to be shrunk keeps its nodes, and why."""

    job_id: str
    rule: ShrinkRefusal

    @property
    def reason(self) -> str:
        """The reason in words, with a remedy where there is one."""
        return _WORDS[self.rule]


def find_least_nodes(job: SlurmJob) -> int | None:
    """Returns to how many nodes a job may be shrunk by its comment; None if it says nothing, or nonsense."""
    found = _NODES.search(job.comment)
    return int(found[1]) if found is not None and int(found[1]) > 0 else None


def find_profile(job: SlurmJob) -> str:
    """Returns the profile that a job names in its comment; empty if it names none."""
    found = _PROFILE.search(job.comment)
    return "" if found is None else found[1]


def classify_refusal(said: str) -> ShrinkRefusal:
    """Returns what Slurm's words mean."""
    return next((rule for words, rule in _SAID if words in said), ShrinkRefusal.SLURM)


@dataclass(slots=True)
class Shrinking:
    """What is remembered between looks: who was told what and when, and who keeps its nodes until when."""

    grace_s: float
    _told: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    _kept_until_s: dict[str, float] = field(default_factory=dict)

    def decide(self, key: str, job: SlurmJob, places: Collection[str], now_s: float) -> ShrinkJob | KeepNodes | None:
        """Returns what is to be done about a running job of which the core wants these places.

        None: nothing of it has to do with shrinking, or it keeps its nodes for now.
        """
        if not frozenset(places) < frozenset(job.nodes) or job.state != "RUNNING" or "COMPLETING" in job.flags:
            self._told.pop(key, None)
            return None
        if self._kept_until_s.get(key, now_s) > now_s:
            return None
        # The batch script's node stays; which others do is the core's choice, as far as there is one.
        first = job.nodes[0]
        nodes = (first, *sorted(set(places) - {first}))[: len(set(places))]
        least = find_least_nodes(job)
        if least is None or len(nodes) < least:
            rule = ShrinkRefusal.NOT_ELASTIC if least is None else ShrinkRefusal.TOO_SMALL
            self.keep(key, now_s)
            return KeepNodes(job.job_id, rule)
        told, since_s = self._told.get(key, ((), 0.0))
        if told != nodes:
            self._told[key] = nodes, now_s
            return ShrinkJob(job, key, nodes)
        return ShrinkJob(job, key, nodes, is_told=True, is_due=now_s - since_s >= self.grace_s)

    def keep(self, key: str, now_s: float) -> None:
        """Has a job keep its nodes for a while."""
        self._told.pop(key, None)
        self._kept_until_s[key] = now_s + _REFUSED_S

    def forget_missing(self, keys: Collection[str], now_s: float) -> None:
        """Forgets jobs that are there no more, and refusals that are over."""
        for key in self._told.keys() - set(keys):
            del self._told[key]
        for key in [key for key, until_s in self._kept_until_s.items() if until_s <= now_s]:
            del self._kept_until_s[key]
