"""Run times of ended jobs by user and name, and what running jobs were expected to take when they started.

Kept in the state, from events only; run times of ended jobs only while the policy names a mode of backfill, bounded in
groups and in run times of each. Must not know what a user states, nor what estimates are used for.

A group is expected to take a high quantile of its last run times, since a start that is promised too early is worse
than one that is promised too late. Of jobs whose processes agents run, only those that succeeded count; other engines
say that a job has ended by cancelling it. What a running job was expected to take when it started stays with it, so
that the end of other work moves no promise. The same holds for what follows from a profile: the work of a training job
over the rate that was measured on as many GPUs, the lowest of the models that it may get.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from math import ceil
from typing import Any, Self

from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.queue_usage import resolve_user
from eelgrid_protos.messages import BackfillMode, Policy, Workload, WorkloadKind, WorkloadPhase

GROUPS_MOST = 10_000
RUN_TIMES_MOST = 16
# Fewer run times say too little.
RUN_TIMES_LEAST = 3
QUANTILE = 0.9
_NS = 1e9
_Group = tuple[str, str]


def uses_presumed_runtimes(policy: Policy) -> bool:
    """Returns whether run times count that nobody stated: from history, and the policy's default."""
    return policy.backfill in (BackfillMode.EASY, BackfillMode.CONSERVATIVE)


def compute_profiled_runtime_s(workload: Workload, points: Mapping[str, Sequence[Point]]) -> float | None:
    """Returns how long a training job takes by its profile, in seconds.

    That is its work over the rate that was measured on as many whole GPUs at their default limits, the lowest where it may
    get several models; None if it states no work, or none was measured.
    """
    training, request = workload.spec.training, workload.spec.request
    if training is None or not training.work or training.is_elastic:
        return None
    rates_hz: dict[str, float] = {}
    for point in points.get(training.profile, ()):
        ran = point.configuration
        is_like = ran.gpus == request.gpu_count * workload.spec.replicas and ran.power_limit_w is None
        if is_like and not ran.mig_profile and (not request.gpu_models or ran.gpu_model in request.gpu_models):
            rates_hz[ran.gpu_model] = max(point.throughput_hz, rates_hz.get(ran.gpu_model, 0.0))
    rate_hz = min(rates_hz.values(), default=0.0)
    return training.work / rate_hz if rate_hz > 0.0 else None


def _group_of(workload: Workload) -> _Group:
    return resolve_user(workload), workload.spec.name


def _is_stated(workload: Workload) -> bool:
    spec = workload.spec
    return spec.expected_runtime_s is not None or (spec.process is not None and spec.process.time_limit_s > 0.0)


class RuntimeHistory:
    """The last run times of each group, in seconds, and what running jobs were expected to take by them."""

    def __init__(self) -> None:
        # The group that was extended last is last.
        self._groups: dict[_Group, tuple[float, ...]] = {}
        self._running: dict[str, float] = {}
        # Of running jobs by their profiles.
        self._profiled: dict[str, float] = {}

    def expect_runtime_s(self, workload: Workload) -> float | None:
        """Returns how long a job is expected to run from its start; None if too few of its like have ended."""
        if workload.phase is WorkloadPhase.PLACED:
            return self._running.get(workload.workload_id)
        run_times = self._groups.get(_group_of(workload), ())
        if len(run_times) < RUN_TIMES_LEAST:
            return None
        return sorted(run_times)[ceil(QUANTILE * len(run_times)) - 1]

    def expect_profiled_s(self, workload: Workload, points: Mapping[str, Sequence[Point]]) -> float | None:
        """Returns how long a job is expected to run by its profile; of a running one, as it was when it started."""
        if workload.phase is WorkloadPhase.PLACED:
            return self._profiled.get(workload.workload_id)
        return compute_profiled_runtime_s(workload, points)

    def record_start(self, policy: Policy, workload: Workload, points: Mapping[str, Sequence[Point]]) -> None:
        """Keeps what a pending job that starts now is expected to take."""
        if _is_stated(workload):
            return
        profiled_s = compute_profiled_runtime_s(workload, points)
        if profiled_s is not None:
            self._profiled[workload.workload_id] = profiled_s
        if not uses_presumed_runtimes(policy):
            return
        expected_s = self.expect_runtime_s(workload)
        if expected_s is not None:
            self._running[workload.workload_id] = expected_s

    def record_end(self, policy: Policy, workload: Workload, phase: WorkloadPhase, now_ns: int) -> None:
        """Adds the run time of a workload that ends now; it is as it was before."""
        self.forget_start(workload.workload_id)
        if not uses_presumed_runtimes(policy) or workload.phase is not WorkloadPhase.PLACED:
            return
        # Of what an engine runs, and of which it does not report how it ended.
        is_by_engine = phase is WorkloadPhase.CANCELLED and workload.spec.process is None and not workload.attempts
        is_job = workload.spec.kind is not WorkloadKind.INFERENCE_SERVICE
        if not is_job or not (is_by_engine or phase is WorkloadPhase.SUCCEEDED):
            return
        group = _group_of(workload)
        before = self._groups.pop(group, ())
        ran_s = max(1.0, (now_ns - workload.placed_ns) / _NS)
        self._groups[group] = (*before, ran_s)[-RUN_TIMES_MOST:]
        if len(self._groups) > GROUPS_MOST:
            del self._groups[next(iter(self._groups))]

    def forget_start(self, workload_id: str) -> None:
        """Forgets what a job that waits again was expected to take."""
        self._running.pop(workload_id, None)
        self._profiled.pop(workload_id, None)

    def set_policy(self, policy: Policy) -> None:
        """Forgets everything if the policy uses none of it."""
        if not uses_presumed_runtimes(policy):
            self._groups, self._running = {}, {}

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin: Self = copy(self)
        twin._groups, twin._running = self._groups.copy(), self._running.copy()
        twin._profiled = self._profiled.copy()
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps everything as plain JSON values; empty without any."""
        found: dict[str, Any] = {}
        if self._groups:
            found["groups"] = [[*group, *run_times] for group, run_times in self._groups.items()]
        if self._running:
            found["running"] = dict(sorted(self._running.items()))
        if self._profiled:
            found["profiled"] = dict(sorted(self._profiled.items()))
        return found

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads this part from a checkpoint."""
        found = cls()
        found._groups = {(user, name): tuple(run_times) for user, name, *run_times in plain.get("groups", ())}
        found._running = dict(plain.get("running", {}))
        found._profiled = dict(plain.get("profiled", {}))
        return found
