"""MIG layouts by the jobs that wait: which idle nodes are cut anew, so that jobs that ask for slices can start there.

Owns what jobs and nodes of Slurm mean for a layout, and since when a job could have started. Must not know how commands run,
how a layout is changed (the agent takes its node out of service for it), nor clocks; which layouts are legal, how one is put
in force and which GPUs are left as they are is `partition`'s, as for services.

Theory. Slurm itself starts a job where its slices are free, so one that waits for some seconds has none. A layout changes only
while no job runs on a node, so nodes are what is chosen. In the order of their submission each waiting job gets the first of:

    an idle node that has its slices, or has them in the layout that is on its way: it stays as it is
    an idle node that is being cut for jobs before it and has room for its slices, too
    an idle node that nobody has got yet, which is cut anew, and on which what jobs before it asked for is not lost

Room that is left on a GPU that is cut is for more slices of the same profiles, since jobs come in kinds. So every change lets
at least one job start that could not, and no node that a job is about to use changes. A job that does not start although its
slices stand waits for something else (a limit, a license) and is left out for a while, or it would keep a node for ever.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.marks import MARK_LEFT, is_steered
from eelgrid_controller.partition.geometry import Layout, Tiling, build_tiling
from eelgrid_controller.partition.plan import RunningGpu, RunningInstance
from eelgrid_controller.partition.recommendation import GpuChange, PartitionStage
from eelgrid_controller.partition.survey import PartitionSurvey, SurveyedGpu
from eelgrid_protos.catalogue.products import MigGeometry

# As agents name slices in GRES: 1g.10gb, 1g.10gb.me, and 1c.3g.40gb for a part of one.
_SLICE = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:\.[A-Za-z0-9._-]+)?")
_TYPE_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
# Slurm's own rounds of scheduling are seconds apart.
PATIENCE_S = 5.0
# So long a job may wait although its slices stand: a layout is changed in seconds, and agents try again each half minute.
_GIVEN_S, _LEFT_OUT_S = 180.0, 600.0
_JOBS_MOST = 1000
# States beside IDLE in which a node is promised to somebody, or on its way.
_PROMISED = frozenset({
    "ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "MAINTENANCE", "BLOCKED", "POWERED_DOWN", "POWERING_DOWN",
    "POWERING_UP",
})  # fmt: skip

_Slices = Counter[str]


def is_slice(gres_type: str) -> bool:
    """Whether a type of GRES is a MIG slice."""
    return _SLICE.fullmatch(gres_type) is not None


def list_wanted_slices(job: SlurmJob) -> Mapping[str, int]:
    """Returns the MIG slices that a job asks for on its node by type; none if it asks for other GPUs, or several nodes."""
    if not job.gpus or job.node_count != 1 or not all(is_slice(one.type) for one in job.gpus):
        return {}
    return {one.type: one.count for one in job.gpus}


def _waits(job: SlurmJob, now_s: float) -> bool:
    """Whether nothing but room keeps a job from its start, as far as can be told."""
    is_free = not job.is_held or (is_steered(job) and not job.admin_comment.startswith(MARK_LEFT))
    is_late = max(job.submit_s, job.eligible_s) + PATIENCE_S <= now_s
    return job.is_pending and is_free and is_late and not job.dependency and bool(list_wanted_slices(job))


@dataclass(slots=True)
class _IdleNode:
    """A node without a job: what its GPUs are wanted as, what of that is left, and what they are to be cut into."""

    node: SlurmNode
    seats: Sequence[SurveyedGpu]
    tiling: Tiling
    types: Mapping[str, str]  # keys of profiles by type
    free: _Slices
    cut: list[_Slices] = field(default_factory=list)  # by GPU
    is_kept: bool = False

    def suits(self, job: SlurmJob) -> bool:
        """Whether a job may run there, whatever its slices."""
        features = {name for name in re.split(r"[&,]", job.features) if name}
        return (
            not self.node.partitions.isdisjoint(job.partition.split(","))
            and features <= self.node.features
            and (not job.required_nodes or job.required_nodes == (self.node.name,))
            and job.cpus <= self.node.cpus
            and job.memory_bytes <= self.node.memory_bytes
        )

    def give(self, wanted: Mapping[str, int]) -> bool:
        """Keeps slices that stand for a job; returns whether there were enough."""
        if self.cut or any(self.free[kind] < count for kind, count in wanted.items()):
            return False
        self.free.subtract(wanted)
        self.is_kept = True
        return True

    def make(self, wanted: Mapping[str, int]) -> bool:
        """Cuts GPUs for a job, beside what they are cut into already; returns whether there was room for all of it."""
        if self.is_kept or not wanted.keys() <= self.types.keys():
            return False
        cut = [Counter(one) for one in self.cut or [_Slices()] * len(self.seats)]
        rank = {key: number for number, key in enumerate(self.tiling.keys)}
        keys = [self.types[kind] for kind, count in wanted.items() for _ in range(count)]
        for key in sorted(keys, key=lambda key: rank[key]):  # the largest first
            if not any(self._add(one, key) for one in cut):
                return False
        self.cut = cut
        return True

    def _add(self, cut: _Slices, key: str) -> bool:
        cut[key] += 1
        if tuple(cut[one] for one in self.tiling.keys) in self.tiling.places:
            return True
        cut[key] -= 1
        return False

    def list_changes(self) -> Iterator[GpuChange]:
        """Yields the GPUs that are to be cut otherwise than they are wanted now."""
        for seat, cut in zip(self.seats, self.cut, strict=False):
            keys = [key for key in self.tiling.keys if cut[key]]
            if not keys:
                continue
            while sum(self._add(cut, key) for key in keys):  # one of each in turn, as long as any fits
                pass
            layout = self.tiling.choose_layout(tuple(cut[key] for key in self.tiling.keys))
            standing = Counter(one.profile for one in seat.running.instances)
            if not seat.running.mig_enabled or standing != +cut:
                yield GpuChange(seat, seat.running, _cut_gpu(seat, layout))


def _cut_gpu(seat: SurveyedGpu, layout: Layout) -> RunningGpu:
    instances = tuple(RunningInstance(key, start) for key, start in sorted(layout, key=lambda one: one[1]))
    return seat.running._replace(mig_enabled=True, instances=instances)


def _name_types(geometry: MigGeometry) -> dict[str, str]:
    """Returns by type of GRES, as agents name it, the key of its profile."""
    return {_TYPE_UNSAFE.sub(".", one.name).strip("."): key for key, one in geometry.profiles.items()}


@dataclass(slots=True)
class SliceDemand:
    """What is remembered between looks: since when slices stood for a job that waits, and who is left out until when."""

    _given_since_s: dict[str, float] = field(default_factory=dict)
    _left_out_until_s: dict[str, float] = field(default_factory=dict)

    def select_jobs(self, jobs: Iterable[SlurmJob], now_s: float) -> list[SlurmJob]:
        """Returns the jobs that wait for slices, in the order of their submission, and forgets others."""
        waiting = {job.job_id: job for job in jobs if _waits(job, now_s)}
        for memory in (self._given_since_s, self._left_out_until_s):
            for key in memory.keys() - waiting.keys():
                del memory[key]
        for key, since_s in list(self._given_since_s.items()):
            if now_s - since_s >= _GIVEN_S:
                del self._given_since_s[key]
                self._left_out_until_s[key] = now_s + _LEFT_OUT_S
        found = [job for key, job in waiting.items() if self._left_out_until_s.get(key, now_s) <= now_s]
        return sorted(found, key=lambda job: (job.submit_s, job.job_id))[:_JOBS_MOST]

    def plan(
        self, survey: PartitionSurvey, jobs: Sequence[SlurmJob], nodes: Iterable[SlurmNode], now_s: float
    ) -> list[PartitionStage]:
        """Returns by node the change of its layout, for the jobs that `select_jobs` has found. Level-triggered."""
        idle = list(_list_idle(survey, jobs, nodes))
        for job in jobs:
            wanted, fitting = list_wanted_slices(job), [one for one in idle if one.suits(job)]
            if any(one.give(wanted) for one in fitting):
                self._given_since_s.setdefault(job.job_id, now_s)
            else:
                self._given_since_s.pop(job.job_id, None)
                any(one.make(wanted) for one in sorted(fitting, key=lambda one: not one.cut))
        changes = (tuple(one.list_changes()) for one in idle)
        return [PartitionStage(turns=turns, drains=False, start_s=0.0) for turns in changes if turns]


def _list_idle(survey: PartitionSurvey, jobs: Sequence[SlurmJob], nodes: Iterable[SlurmNode]) -> Iterator[_IdleNode]:
    """Yields the nodes whose layouts may change: idle in Slurm, and all their GPUs the planner's, with nothing on them."""
    seats: dict[str, list[SurveyedGpu]] = {}
    for seat in survey.seats:
        seats.setdefault(seat.node_name, []).append(seat)
    asked = {kind for job in jobs for kind in list_wanted_slices(job)}
    tilings: dict[str, tuple[Tiling, dict[str, str]]] = {}
    for node in nodes:
        mine = seats.get(node.name, [])
        if not mine or "IDLE" not in node.states or node.states & _PROMISED or node.closed:
            continue
        geometry = mine[0].geometry
        if any(seat.held or any(seat.running.replicas()) or seat.geometry.key != geometry.key for seat in mine):
            continue
        if geometry.key not in tilings:
            types = {kind: key for kind, key in _name_types(geometry).items() if kind in asked}
            tilings[geometry.key] = build_tiling(geometry, types.values()), types
        tiling, types = tilings[geometry.key]
        by_key = {key: kind for kind, key in _name_types(geometry).items()}
        free = Counter(by_key[one.profile] for seat in mine for one in seat.running.instances)
        yield _IdleNode(node=node, seats=mine, tiling=tiling, types=types, free=free)
