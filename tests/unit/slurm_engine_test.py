"""The engine against a Slurm in memory: what short jobs lose by waiting for looks, and that each ends here as it did there."""

import asyncio
import logging

import pytest
from tests.fakes.core_port import CorePort, SlurmClock
from tests.fakes.slurm_cluster import BEGUN_S, GPUS, SlurmInMemory
from tests.state_invariants import check_invariants

from eelgrid_controller.engines.slurm.engine import SlurmEngine, SlurmSettings
from eelgrid_protos.messages import WorkloadPhase


class World:
    def __init__(self):
        self.slurm = SlurmInMemory()
        clock = SlurmClock(self.slurm)
        self.port = CorePort(clock)
        self.engine = SlurmEngine(
            self.slurm, loop=self.port, has_agent=lambda _: False, settings=SlurmSettings(), clock=clock,
            log=logging.getLogger("test"),
        )  # fmt: skip

    async def look(self, seconds=1.0):
        """One look, and then so much time passes."""
        await self.engine.look()
        check_invariants(self.port.core.state)
        self.slurm.advance(seconds)

    def run(self, *, every_s=1.0, looks_most=400):
        return asyncio.run(self._run(every_s, looks_most))

    async def _run(self, every_s, looks_most):
        """Looks until all jobs have ended here and there; returns the seconds until the last one ended in Slurm."""
        for _ in range(looks_most):
            await self.look(every_s)
            if all(job.state not in ("PENDING", "RUNNING") for job in self.slurm.jobs.values()):
                break
        for _ in range(3):
            await self.look(0.0)
        return max(job.ended_s for job in self.slurm.jobs.values()) - BEGUN_S

    def workload(self, job):
        return self.port.core.state.workloads[f"slurm-{job}"]


def count_share(world, taken_s):
    """The share of the GPUs' time in which jobs ran."""
    return world.slurm.busy_s / (taken_s * GPUS * len(world.slurm.names))


def test_ids_of_jobs_are_the_engines_own():
    assert World().port.outside.own_ids == {"slurm-"}


@pytest.mark.parametrize("runs_s", [0.2, 1.0, 3.0, 20.0])
def test_short_jobs_keep_the_gpus_busy_between_looks_and_each_ends_here_as_it_did_there(runs_s):
    world = World()
    for number in range(240 if runs_s < 1.0 else 100):
        world.slurm.submit(runs_s=runs_s, exit_code=number % 3)
    share = count_share(world, world.run())
    # Without jobs that are released ahead a GPU would be empty from each end to the next look: 0.2, 0.5, 0.75 and 0.95.
    assert share > {0.2: 0.6, 1.0: 0.75, 3.0: 0.85, 20.0: 0.89}[runs_s], share
    for job in world.slurm.jobs.values():
        found = world.workload(job.number)
        (attempt,) = found.attempts
        assert (found.phase is WorkloadPhase.SUCCEEDED, found.exit_code) == (job.exit_code == 0, job.exit_code)
        assert attempt.started_ns == int(job.started_s) * 10**9
    assert world.engine.counts.refused == 0


def test_jobs_of_minutes_are_not_released_ahead():
    world = World()
    for _ in range(30):
        world.slurm.submit(runs_s=300.0)
    world.run(every_s=5.0)
    assert (world.engine.counts.ahead, world.engine.counts.placed) == (0, 30)
