"""Other ways to cap a fleet, and the check that counts exceeded budgets.

Owns the peers' rules and an account of watts that shares no code with the
planner's. Must not know the planner.

    uniform        one number of watts for every GPU, as high as budgets allow
    proportional   one share of every GPU model's largest limit
    two_level      some jobs at the largest limit, all others at one share of it; of shares from 40 to 95 % the
                   best, and the jobs that lose most throughput per watt saved stay high (they know the curves)

Every cap is rounded down to a measured limit, and up to the least. In a tree each
GPU gets the lowest of the caps that its budgets would give if everything below
them had the same.
"""

from collections.abc import Callable, Mapping, Sequence

from eelgrid_controller.objectives.power.budgets import BudgetTree
from eelgrid_controller.objectives.power.limit_allocation import AllocationJob

__all__ = ["PEERS", "exceeded", "throughput"]

Limits = dict[str, float]  # by job
_STEPS = 200


def _rows(jobs: Sequence[AllocationJob], budgets: BudgetTree) -> dict[str, list[tuple[AllocationJob, int]]]:
    """Jobs and their GPUs under each budget, found by walking up by name."""
    parents = {budget.name: budget.parent for budget in budgets.all}
    rows: dict[str, dict[str, tuple[AllocationJob, int]]] = {name: {} for name in parents}
    for job in jobs:
        for share in job.shares:
            names = set()
            for lowest in share.budgets:
                name: str | None = lowest
                while name is not None:
                    names.add(name)
                    name = parents[name]
            for name in names:
                before = rows[name].get(job.name, (job, 0))[1]
                rows[name][job.name] = (job, before + share.gpus)
    return {name: list(found.values()) for name, found in rows.items()}


def _charge_w(job: AllocationJob, limit_w: float) -> float:
    """Watts of one GPU: its limit, or what was measured beyond it."""
    (drawn,) = (at.power_w / job.curve.gpus for at in job.curve.points if at.limit_w == limit_w)
    return max(limit_w, drawn)


def exceeded(jobs: Sequence[AllocationJob], budgets: BudgetTree, limits_w: Mapping[str, float]) -> dict[str, float]:
    """Watts over, by budget; empty where all are kept."""
    over = {}
    room = {budget.name: budget.limit_w - budget.other_w for budget in budgets.all}
    for name, row in _rows(jobs, budgets).items():
        drawn = sum(gpus * _charge_w(job, limits_w[job.name]) for job, gpus in row)
        if drawn > room[name] + 1e-3:
            over[name] = drawn - room[name]
    return over


def throughput(jobs: Sequence[AllocationJob], limits_w: Mapping[str, float]) -> float:
    """Summed throughput, each job's as a share of its largest limit's."""
    total = 0.0
    for job in jobs:
        (time_s,) = (at.time_s for at in job.curve.points if at.limit_w == limits_w[job.name])
        total += job.weight * job.curve.points[-1].time_s / time_s
    return total


def _rounded(job: AllocationJob, cap_w: float) -> float:
    """The largest measured limit whose charge is within a cap, the least where none is."""
    within = [limit for limit in job.curve.limits_w if _charge_w(job, limit) <= cap_w + 1e-9]
    return max(within, default=job.curve.limits_w[0])


def _capped(jobs: Sequence[AllocationJob], budgets: BudgetTree, cap: Callable[[AllocationJob, float], float]) -> Limits:
    """Each job at the largest share that all of its budgets allow, if everyone below them had it."""
    shares = dict.fromkeys((job.name for job in jobs), 1.0)
    room = {budget.name: budget.limit_w - budget.other_w for budget in budgets.all}
    for name, row in _rows(jobs, budgets).items():
        for step in range(_STEPS, -1, -1):
            share = step / _STEPS
            if sum(gpus * _charge_w(job, _rounded(job, cap(job, share))) for job, gpus in row) <= room[name]:
                break
        for job, _ in row:
            shares[job.name] = min(shares[job.name], share)
    return {job.name: _rounded(job, cap(job, shares[job.name])) for job in jobs}


def _uniform(jobs: Sequence[AllocationJob], budgets: BudgetTree) -> Limits:
    most = max(job.curve.limits_w[-1] for job in jobs)
    return _capped(jobs, budgets, lambda _, share: share * most)


def _proportional(jobs: Sequence[AllocationJob], budgets: BudgetTree) -> Limits:
    return _capped(jobs, budgets, lambda job, share: share * job.curve.limits_w[-1])


def _two_level(jobs: Sequence[AllocationJob], budgets: BudgetTree) -> Limits:
    best = _proportional(jobs, budgets)
    rows = _rows(jobs, budgets)
    above = {job.name: [name for name, row in rows.items() if any(one is job for one, _ in row)] for job in jobs}
    gpus = {(name, job.name): count for name, row in rows.items() for job, count in row}
    for percent in range(40, 100, 5):
        limits = {job.name: _rounded(job, percent / 100 * job.curve.limits_w[-1]) for job in jobs}
        if exceeded(jobs, budgets, limits):
            continue
        room = {budget.name: budget.limit_w - budget.other_w for budget in budgets.all}
        for name, row in rows.items():
            room[name] -= sum(count * _charge_w(job, limits[job.name]) for job, count in row)
        for job in sorted(jobs, key=lambda one: -_loss(one, limits[one.name])):
            top = job.curve.limits_w[-1]
            more = _charge_w(job, top) - _charge_w(job, limits[job.name])
            if all(gpus[name, job.name] * more <= room[name] for name in above[job.name]):
                limits[job.name] = top
                for name in above[job.name]:
                    room[name] -= gpus[name, job.name] * more
        if throughput(jobs, limits) > throughput(jobs, best):
            best = limits
    return best


def _loss(job: AllocationJob, limit_w: float) -> float:
    """Throughput lost per watt saved at a limit."""
    top = job.curve.limits_w[-1]
    saved = job.curve.gpus * (_charge_w(job, top) - _charge_w(job, limit_w))
    return (job.weight - throughput([job], {job.name: limit_w})) / saved if saved > 0.0 else 0.0


PEERS: Mapping[str, Callable[[Sequence[AllocationJob], BudgetTree], Limits]] = {
    "uniform": _uniform,
    "proportional": _proportional,
    "two_level": _two_level,
}
