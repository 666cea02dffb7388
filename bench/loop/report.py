"""Tables and summary.csv of the closed loop.

Owns how results are shown. Must not compute any. The first columns of summary.csv are
policy, seed, energy_j, money, windows_violated, jobs_late and budget_s; see COLUMNS.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.loop.accounts import JOULES_PER_KWH, Outcome, ServiceOutcome
from bench.loop.runs import Difference, Run
from bench.tables import format_table, write_csv

__all__ = [
    "COLUMNS",
    "SERVICE_COLUMNS",
    "difference_table",
    "policy_table",
    "shortfalls",
    "write_services",
    "write_summary",
]

COLUMNS = (
    "policy",
    "seed",
    "energy_j",
    "money",
    "windows_violated",
    "jobs_late",
    "budget_s",
    "windows",
    "shadowed",
    "services_j",
    "training_j",
    "carbon_g",
    "tokens",
    "replica_hours",
    "jobs",
    "unfinished",
    "slowed",
    "slowed_of",
    "late",
    "late_of",
    "worst_slowdown",
    "mean_slowdown",
    "job_hours",
    "wait_hours",
    "budget_worst_w",
    "waiting",
)


SERVICE_COLUMNS = ("policy", "seed", *ServiceOutcome._fields)


def write_services(path: Path, runs: Iterable[Run]) -> None:
    """One line a policy, seed and service."""
    write_csv(path, SERVICE_COLUMNS, [[run.policy, run.seed, *one] for run in runs for one in run.outcome.services])


def _late(outcome: Outcome) -> int:
    return outcome.slowed + outcome.late + outcome.unfinished


def write_summary(path: Path, runs: Iterable[Run]) -> None:
    """One line a policy and seed."""
    rows = []
    for run in runs:
        of = run.outcome._asdict() | {
            "policy": run.policy,
            "seed": run.seed,
            "windows_violated": run.outcome.violated,
            "jobs_late": _late(run.outcome),
        }
        rows.append([f"{of[name]:.6g}" if isinstance(of[name], float) else of[name] for name in COLUMNS])
    write_csv(path, COLUMNS, rows)


def _by_policy(runs: Sequence[Run]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for run in runs:
        found.setdefault(run.policy, []).append(run.outcome)
    return found


def policy_table(runs: Sequence[Run]) -> str:
    """Means over seeds; counts are sums."""
    rows = [
        [
            policy,
            f"{statistics.fmean(one.energy_j for one in outcomes) / JOULES_PER_KWH:.1f}",
            f"{statistics.fmean(one.services_j for one in outcomes) / JOULES_PER_KWH:.1f}",
            f"{statistics.fmean(one.training_j for one in outcomes) / JOULES_PER_KWH:.1f}",
            f"{statistics.fmean(one.money for one in outcomes):.2f}",
            f"{sum(one.violated for one in outcomes)} ({sum(one.shadowed for one in outcomes)})",
            f"{sum(one.windows for one in outcomes)}",
            f"{sum(one.slowed for one in outcomes)}/{sum(one.slowed_of for one in outcomes)}",
            f"{sum(one.late for one in outcomes)}/{sum(one.late_of for one in outcomes)}",
            f"{statistics.fmean(one.budget_s for one in outcomes):.0f}",
            f"{statistics.fmean(one.replica_hours for one in outcomes):.0f}",
        ]
        for policy, outcomes in _by_policy(runs).items()
    ]
    heads = [
        "policy",
        "kWh",
        "services",
        "training",
        "money",
        "violated (failure)",
        "of windows",
        "slowed",
        "late",
        "s over budget",
        "replica h",
    ]
    return format_table(heads, rows, 1)


def difference_table(found: Sequence[Difference]) -> str:
    """Paired differences to ours."""
    rows = [
        [
            one.policy,
            f"{one.energy_pct:+.2f} +- {one.energy_half:.2f} %",
            f"{one.money_pct:+.2f} +- {one.money_half:.2f} %",
            f"{one.seeds}",
        ]
        for one in found
    ]
    return format_table(["against ours", "energy", "money", "seeds"], rows, 1)


def shortfalls(runs: Sequence[Run], found: Sequence[Difference]) -> list[str]:
    """What was to be shown and was not."""
    told = []
    ours = [run.outcome for run in runs if run.policy == "ours"]
    broken = sum(one.violated for one in ours)
    if broken:
        shadowed = sum(one.shadowed for one in ours)
        told.append(
            f"ours: {broken} of {sum(one.windows for one in ours)} windows violated, {shadowed} of them after a failure"
        )
    late = sum(map(_late, ours))
    if late:
        told.append(f"ours: {late} jobs late, slowed beyond their promise or unfinished")
    if any(one.budget_s > 0.0 for one in ours):
        told.append(f"ours: {sum(one.budget_s for one in ours):.0f} s above a budget")
    told += [
        f"{one.policy} spends no more energy than ours: {one.energy_pct:+.2f} +- {one.energy_half:.2f} %"
        for one in found
        if one.energy_pct - one.energy_half <= 0.0
    ]
    unfinished = {run.policy for run in runs if run.outcome.unfinished}
    told += [f"{policy}: jobs unfinished, so the work is not equal" for policy in sorted(unfinished)]
    return told
