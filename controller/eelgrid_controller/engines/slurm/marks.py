"""Marks: what the administrator's comment of a job says of it, and under which id the core knows it.

Owns the words of the comment, in both directions. Must not know what is done with a job.

Theory. The mark is the only memory beside the core's, and it is Slurm's: whoever begins anew finds by it who was held, placed,
requeued or let go. A job's restarts have workloads of their own, so that what was said of one run is not of the next; but a run
that we requeued is the same, which the mark keeps.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from eelgrid_controller.engines.slurm.answers import SlurmJob

WORKLOAD_PREFIX = "slurm-"
# In the administrator's comment of a job, and what follows: nodes, or a reason.
MARK_HELD, MARK_PLACED, MARK_LEFT = "eelgrid:held", "eelgrid:placed", "eelgrid:left"
# It has to make room for other work: it was requeued and is held, or is about to be.
MARK_REQUEUED = "eelgrid:requeued"
# At the end of a mark, /0@1: up to Slurm's restart 1 it is still the core's run 0.
_RUN = re.compile(r"eelgrid:[^ ]*/([0-9]{1,9})@([0-9]{1,9})(?: |$)")
_WORDS_MOST = 160
CANCELLED_STATES = ("CANCELLED", "REVOKED")


def name_workload(job: SlurmJob) -> str:
    """Returns the core's id of a job.

    Each restart has its own, so that what was said of one run is not of the next; but one that made room here stays the same.
    """
    run = find_run(job)
    return f"{WORKLOAD_PREFIX}{job.job_id}" + (f".{run}" if run else "")


def find_run(job: SlurmJob) -> int:
    """Returns which run of a job it is for the core: the number of Slurm's restarts, without those that we asked for."""
    if "/" not in job.admin_comment:
        return job.restarts
    matched = _RUN.match(job.admin_comment)
    # Before the requeue that was asked for, and after it; a later restart is one of Slurm's own.
    if matched is not None and int(matched[2]) - 1 <= job.restarts <= int(matched[2]):
        return int(matched[1])
    return job.restarts


def find_run_suffix(job: SlurmJob) -> str:
    """Returns the end of a job's mark that keeps its run; empty if that is the number of its restarts."""
    run = find_run(job)
    return f"/{run}@{job.restarts}" if run != job.restarts else ""


def mark_requeue(job: SlurmJob) -> str:
    """Returns the mark of a job that is about to be requeued, or to be held if it has not begun: it stays the same run."""
    restarts = job.restarts if job.is_pending else job.restarts + 1
    return f"{MARK_REQUEUED}/{find_run(job)}@{restarts}"


def mark_placement(job: SlurmJob, nodes: Sequence[str]) -> str:
    """Returns the mark of a placed job: one word, with its nodes."""
    return f"{MARK_PLACED}:{','.join(nodes)[:_WORDS_MOST]}{find_run_suffix(job)}"


def is_steered(job: SlurmJob) -> bool:
    """Whether a job opted in and was not let go."""
    return job.admin_comment.startswith((MARK_HELD, MARK_PLACED, MARK_REQUEUED))


def is_released(job: SlurmJob) -> bool:
    """Whether a job was released by us, with nodes of our choice."""
    return job.admin_comment.startswith(MARK_PLACED)


def has_run(job: SlurmJob) -> bool:
    """Whether a job that has ended had begun, and nobody cancelled it."""
    return job.state not in CANCELLED_STATES and job.start_s > 0


def list_job_ids(workload_ids: Iterable[str]) -> Iterator[str]:
    """Yields the numbers of the jobs that workloads are, as Slurm calls them, of those that are jobs."""
    for key in workload_ids:
        if key.startswith(WORKLOAD_PREFIX):
            yield key.removeprefix(WORKLOAD_PREFIX).partition(".")[0]


def shorten_reason(reason: str) -> str:
    """Returns a reason as it is written into Slurm: one line, without what its parsers take apart."""
    return " ".join(re.sub(r"[^A-Za-z0-9 .,:;()'/_&-]+", " ", reason).split())[:_WORDS_MOST].strip()
