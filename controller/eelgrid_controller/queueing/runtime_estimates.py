"""Run-time estimates: how long a workload is expected to run, where that comes from, and when it is expected to end.

Pure functions of a workload and the state. Must not know what estimates are used for.

Of an elastic job with a promised deadline it follows from what is left and its scaling curve (elastic_shares.py).
Otherwise, precedence: what the user stated, at most the time limit; the time limit, with the grace after it; the work of a
training job over the rate that its profile has on as many GPUs; the history of the same user and name; the policy's
default. Where a running job is known to take otherwise by what it reports of its progress (core/progress_estimates.py), that
replaces what is expected of it, at most the time limit with its grace. History, default, and progress without anything that
it replaces count only where the policy names a mode of backfill, and never for
inference services, which do not end by themselves. Without any, work is expected to run for ever.

Overrun. Work that goes on past its expected end counts as ending now for the first minute, since ends are reported with a
delay. After that it is expected to end at the next multiple of a tenth of its estimate, at least of a minute, after its
expected end: so the moment depends only on the estimate and the clock, and moves rarely.
"""

from eelgrid_controller.queueing.elastic_shares import compute_elastic_end_ns, compute_run_ns
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.runtime_history import uses_presumed_runtimes
from eelgrid_protos.messages import RuntimeEstimate, RuntimeSource, Workload, WorkloadKind, WorkloadPhase, WorkloadSpec

OVERRUN_TOLERANCE_NS = 60_000_000_000
_OVERRUN_SHARE = 10
# Sources that are no presumption.
STATED_SOURCES = frozenset(
    {RuntimeSource.USER, RuntimeSource.TIME_LIMIT, RuntimeSource.PROFILE, RuntimeSource.PROGRESS}
)
_RUN_S = (1.0, 3e8)
_NS = 1e9
# Of work that is expected to run for ever.
NEVER_NS = 2**63 - 1

SOURCE_NAMES = {
    RuntimeSource.USER: "what its user expects",
    RuntimeSource.TIME_LIMIT: "its time limit",
    RuntimeSource.HISTORY: "earlier runs of the same name",
    RuntimeSource.DEFAULT: "the policy's default",
    RuntimeSource.PROFILE: "its work and its profile",
    RuntimeSource.PROGRESS: "its own progress",
}


def estimate_runtime(workload: Workload, state: ClusterState) -> RuntimeEstimate | None:
    """Returns how long a workload is expected to run from its start, in seconds; None for ever."""
    found = _estimate_before(workload, state)
    has_progress = workload.progress_runtime_s is not None and workload.phase is WorkloadPhase.PLACED
    if workload.share is not None or not has_progress or not (found or uses_presumed_runtimes(state.policy)):
        return found
    expected_s = min(_compute_limit_s(workload.spec) or _RUN_S[1], max(_RUN_S[0], workload.progress_runtime_s or 0.0))
    return RuntimeEstimate(expected_s=expected_s, source=RuntimeSource.PROGRESS)


def _estimate_before(workload: Workload, state: ClusterState) -> RuntimeEstimate | None:
    """Returns the same as far as it is known without progress."""
    policy, history = state.policy, state.runtimes
    spec = workload.spec
    if workload.share is not None:
        is_running = workload.phase is WorkloadPhase.PLACED
        run_ns = compute_elastic_end_ns(workload) - workload.placed_ns if is_running else 0
        run_s = (run_ns or compute_run_ns(workload, spec.replicas)) / _NS
        return _estimate_by_profile(run_s)
    whole_s = _compute_limit_s(spec)
    if spec.expected_runtime_s is not None and not 0.0 < whole_s < spec.expected_runtime_s:
        return RuntimeEstimate(expected_s=spec.expected_runtime_s, source=RuntimeSource.USER)
    if whole_s:
        return RuntimeEstimate(expected_s=max(1.0, whole_s), source=RuntimeSource.TIME_LIMIT)
    profiled_s = history.expect_profiled_s(workload, state.points)
    if profiled_s is not None:
        return _estimate_by_profile(profiled_s)
    if spec.kind is WorkloadKind.INFERENCE_SERVICE or not uses_presumed_runtimes(policy):
        return None
    expected_s = history.expect_runtime_s(workload)
    if expected_s is not None:
        return RuntimeEstimate(expected_s=expected_s, source=RuntimeSource.HISTORY)
    if policy.default_runtime_s is not None:
        return RuntimeEstimate(expected_s=policy.default_runtime_s, source=RuntimeSource.DEFAULT)
    return None


def _compute_limit_s(spec: WorkloadSpec) -> float:
    """Returns a job's time limit with the grace after it, in seconds; 0 without one."""
    process = spec.process
    return process.time_limit_s + process.grace_s if process is not None and process.time_limit_s else 0.0


def _estimate_by_profile(run_s: float) -> RuntimeEstimate:
    return RuntimeEstimate(expected_s=min(_RUN_S[1], max(_RUN_S[0], run_s)), source=RuntimeSource.PROFILE)


def compute_end_ns(start_ns: int, estimate: RuntimeEstimate | None) -> int:
    """Returns the expected end of work that starts at a time."""
    return NEVER_NS if estimate is None else min(NEVER_NS, start_ns + int(estimate.expected_s * _NS))


def defer_overrun(start_ns: int, end_ns: int, now_ns: int) -> int:
    """Returns when running work is expected to end, as of now, given its start and its expected end."""
    over_ns = now_ns - end_ns
    if over_ns <= OVERRUN_TOLERANCE_NS:
        return max(end_ns, now_ns)
    step_ns = max(OVERRUN_TOLERANCE_NS, (end_ns - start_ns) // _OVERRUN_SHARE)
    return end_ns + (over_ns // step_ns + 1) * step_ns
