"""Dependencies of held jobs: Slurm does not look at them before a job is released, so they are judged here.

Owns what an expression such as afterok:12 says, given the jobs that it names. Must not know what is done with a job.

Sources: man page of sbatch (--dependency).
"""

import re
from collections.abc import Callable, Sequence
from enum import Enum

from eelgrid_controller.engines.slurm.answers import SlurmJob

_DEPENDENCY = re.compile(r"(after|afterany|afterok|afternotok):([0-9]+(?:_(?:[0-9]+|\*))?)(\(\w+\))?")


class DependencyState(Enum):
    """How a held job's dependency stands: Slurm does not look at it before the job is released."""

    FULFILLED = "fulfilled"
    WAITS = "waits"
    # Of a kind that is not judged here, or of a job that Slurm has forgotten, or never to be fulfilled.
    UNKNOWN = "unknown"


class Dependencies:
    """Judges dependencies as Slurm would: after, afterany, afterok and afternotok."""

    def __init__(self, find_jobs: Callable[[str], Sequence[SlurmJob]]) -> None:
        """`find_jobs` returns the jobs of a name: 12, 12_3, or 12_* for all tasks of an array; none if Slurm knows none."""
        self._find_jobs = find_jobs

    def judge(self, text: str) -> DependencyState:
        """Judges what is written, such as afterok:12(unfulfilled),afterany:13_*(fulfilled)."""
        found = [self._judge_one(part) for part in text.split(",") if part]
        if DependencyState.UNKNOWN in found or "?" in text:
            return DependencyState.UNKNOWN
        return DependencyState.WAITS if DependencyState.WAITS in found else DependencyState.FULFILLED

    def _judge_one(self, part: str) -> DependencyState:
        matched = _DEPENDENCY.fullmatch(part)
        if matched is None:
            return DependencyState.UNKNOWN
        kind, name, stands = matched.groups()
        if stands == "(fulfilled)":
            return DependencyState.FULFILLED
        jobs = self._find_jobs(name)
        if not jobs:
            # It ended so long ago that Slurm knows it no more: then only Slurm's own record says how.
            return DependencyState.FULFILLED if kind == "afterany" else DependencyState.UNKNOWN
        if kind == "after":
            return DependencyState.WAITS if any(job.is_pending for job in jobs) else DependencyState.FULFILLED
        if any(job.is_pending or job.holds_resources for job in jobs):
            return DependencyState.WAITS
        is_good = all(job.state == "COMPLETED" and not (job.exit_code or job.exit_signal) for job in jobs)
        is_met = kind == "afterany" or is_good == (kind == "afterok")
        return DependencyState.FULFILLED if is_met else DependencyState.UNKNOWN
