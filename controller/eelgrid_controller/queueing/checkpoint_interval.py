"""Checkpoint intervals: how often a job should save, from what a checkpoint costs and how often work is interrupted.

Young (CACM 1974) and Daly (Future Generation Computer Systems 2006): of exponential interruptions with the mean M, a job
that saves after each t seconds of work, for d seconds, takes M (exp((t + d)/M) - 1) for each t, repetitions included.
Daly's t is within 1 % of the least waste of that curve. Must not know how either is measured (state.interruptions), except
the cost that running processes report, which is kept here: agents report it again after a restart.
"""

from dataclasses import replace

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.messages import (
    AttemptStatus,
    CheckpointAdvice,
    CheckpointCostSource,
    Workload,
    WorkloadPhase,
)

_SECONDS_MOST = 1e9
# Of running jobs; the first to be reported is the first to be forgotten, and counts as before it was reported.
_REPORTED_MOST = 100_000


def compute_checkpoint_interval(cost_s: float, mean_time_between_s: float) -> float:
    """Returns the seconds between checkpoints that lose the least time, by Daly (2006), a correction of Young (1974).

    `cost_s` is the time that one checkpoint stops the work, and `mean_time_between_s` the mean time between
    interruptions, failures and preemptions together. Raises ValueError unless both are positive.
    """
    if cost_s <= 0.0 or mean_time_between_s <= 0.0:
        raise ValueError("the cost of a checkpoint and the time between interruptions must be positive")
    if cost_s >= 2.0 * mean_time_between_s:
        return mean_time_between_s
    ratio = cost_s / (2.0 * mean_time_between_s)
    first = (2.0 * cost_s * mean_time_between_s) ** 0.5
    return float(first * (1.0 + ratio**0.5 / 3.0 + ratio / 9.0) - cost_s)


class CheckpointAdvisor:
    """Advises running jobs on their checkpoints, from one state and the reports of their agents."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        # By workload: its attempt, and the seconds of one checkpoint.
        self._reported: dict[str, tuple[int, float]] = {}

    def record(self, status: AttemptStatus) -> None:
        """Notes what a checkpoint of a running attempt takes; of several replicas, the longest."""
        if status.checkpoint_s <= 0.0:
            return
        attempt, before_s = self._reported.pop(status.workload_id, (0, 0.0))
        longest_s = max(before_s, status.checkpoint_s) if attempt == status.attempt else status.checkpoint_s
        self._reported[status.workload_id] = status.attempt, longest_s
        if len(self._reported) > _REPORTED_MOST:
            del self._reported[next(iter(self._reported))]

    def advise(self, workload: Workload, now_ns: int) -> CheckpointAdvice | None:
        """Returns how often a job should save as of now; None unless its processes run."""
        if workload.phase is not WorkloadPhase.PLACED or workload.spec.process is None:
            return None
        inputs = self._state.interruptions.find_inputs(workload, now_ns)
        attempt, reported_s = self._reported.get(workload.workload_id, (0, 0.0))
        is_reported = attempt == workload.attempt and reported_s > 0.0
        cost_s = reported_s if is_reported else inputs.cost_s
        source = CheckpointCostSource.THIS_RUN if is_reported else CheckpointCostSource.EARLIER_RUNS
        return CheckpointAdvice(
            interval_s=_find_interval_s(cost_s, inputs.mean_between_s),
            cost_s=cost_s,
            cost_source=source if cost_s else CheckpointCostSource.UNSPECIFIED,
            mean_between_s=min(_SECONDS_MOST, inputs.mean_between_s),
            queue=inputs.queue,
            queue_interruptions=inputs.queue_count.events,
            queue_job_s=inputs.queue_count.exposure_s,
            pool=inputs.pool,
            pool_losses=inputs.pool_count.events,
            pool_gpu_s=inputs.pool_count.exposure_s,
        )

    def add_advice(self, workload: Workload, now_ns: int) -> Workload:
        """Returns a workload with the advice for it, if there is any."""
        advice = self.advise(workload, now_ns)
        return workload if advice is None else replace(workload, checkpoint_advice=advice)


def find_told_interval(state: ClusterState, workload_id: str) -> tuple[float, float]:
    """Returns the interval that a job is told at its start and the time between interruptions, in seconds; 0: unknown."""
    cost_s, mean_s = state.interruptions.get_told(workload_id)
    return _find_interval_s(cost_s, mean_s), min(_SECONDS_MOST, mean_s)


def _find_interval_s(cost_s: float, mean_between_s: float) -> float:
    if cost_s <= 0.0 or mean_between_s <= 0.0:
        return 0.0
    return min(_SECONDS_MOST, compute_checkpoint_interval(cost_s, mean_between_s))
