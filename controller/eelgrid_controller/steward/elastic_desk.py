"""Elastic jobs at the desk: who grows and who shrinks, now and then.

Owns which jobs take part. Must not know how many replicas are best
(eelgrid_controller.elastic), nor how a job is resized.

A job takes part once it has run for as long as a change must pay for, so that none is
resized twice in that time: its replicas, and not what came of them, are what it had then.
"""

from collections.abc import Mapping

from eelgrid_controller.elastic.fleet import Elastic, Resize, resized
from eelgrid_controller.steering.events import Scale
from eelgrid_controller.steward.world import World, models_of
from eelgrid_protos.messages import Workload

__all__ = ["ElasticDesk"]


class ElasticDesk:
    """Remembers when each job was last resized."""

    def __init__(self, *, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._since_s: dict[str, tuple[int, float]] = {}  # replicas, and since when

    def look(self, jobs: Mapping[str, Workload], world: World) -> tuple[Scale, ...]:
        """What should change, where free GPUs were counted in this cycle; those that shrink come first."""
        elastic = {name: job for name, job in jobs.items() if job.spec.training and job.spec.training.is_elastic}
        for name, job in elastic.items():
            if self._since_s.get(name, (0, 0.0))[0] != len(job.placements):
                began_s = job.placed_ns / 1e9 if name not in self._since_s else world.at_s
                self._since_s[name] = len(job.placements), began_s
        self._since_s = {name: since for name, since in self._since_s.items() if name in elastic}
        if world.free is None:
            return ()
        taking_part = [
            made
            for name, job in sorted(elastic.items())
            if world.at_s - self._since_s[name][1] >= self._horizon_s and (made := _elastic(job, world)) is not None
        ]
        found: tuple[Resize, ...] = resized(taking_part, world.free, horizon_s=self._horizon_s)
        return tuple(Scale(one.name, one.replicas, one.reason) for one in found)


def _elastic(job: Workload, world: World) -> Elastic | None:
    """The job as the planner sees it; None for one that stands on several models."""
    training = job.spec.training
    assert training is not None, "elastic jobs have a promise"
    models = models_of(job, world)
    if len(models) != 1:
        return None
    return Elastic(
        job.workload_id, next(iter(models)), gpus=job.spec.request.gpu_count, replicas=len(job.placements),
        least=training.replicas_least, most=training.replicas_most, points=world.points.get(training.profile, ()),
        restart_s=training.restart_s,
    )  # fmt: skip
