"""Tables and files of the MIG comparison.

Owns the columns of summary.csv, peers.csv, plans.csv, random.csv, changes.csv and
fleet.csv and what is printed. Must not know how anything was planned.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.mig.changes import Change
from bench.mig.fleet import Row as FleetRow
from bench.mig.peers import PEERS
from bench.mig.runs import Result
from bench.mig.tables import Scenario
from bench.tables import format_table, write_csv

__all__ = [
    "SUMMARY_COLUMNS",
    "Published",
    "changes_table",
    "fleet_table",
    "published",
    "random_table",
    "table",
    "write_changes",
    "write_fleet",
    "write_peers",
    "write_plans",
    "write_random",
    "write_summary",
]

SUMMARY_COLUMNS = ("scenario", "gpus", "slices", "violations", "seconds", "cpu_seconds", "bound_gpus")


class Published(NamedTuple):
    """What the paper reports of a scenario, and the optimum as it was proven apart from us."""

    gpus: int
    slices: int
    least_gpus: int
    least_slices: int


# By a digest of the scenario, so that other rows under the same name are not compared with it.
_PUBLISHED = {
    "abfdbc6507d0": Published(2, 10, 2, 10),
    "b9d06146cc50": Published(3, 20, 3, 20),
    "c65190caf856": Published(5, 33, 5, 30),
    "46d4aa0e987b": Published(7, 48, 7, 44),
    "58d510592b8e": Published(13, 90, 12, 82),
}


def digest(scenario: Scenario) -> str:
    """Tells one scenario from another."""
    cells = ";".join(f"{one.model},{one.latency_s:.6g},{one.rate_hz:.6g}" for one in scenario.services)
    return hashlib.sha256(cells.encode()).hexdigest()[:12]


def published(scenario: Scenario) -> Published | None:
    """What is known of a scenario, if it is one of the published."""
    return _PUBLISHED.get(digest(scenario))


def write_summary(path: Path, results: Iterable[Result]) -> None:
    """Ours, a line a scenario."""
    write_csv(
        path,
        SUMMARY_COLUMNS,
        ((one.scenario, *one.ours, f"{one.seconds:.4f}", f"{one.cpu_seconds:.4f}", one.bound_gpus) for one in results),
    )


def write_peers(path: Path, results: Iterable[Result]) -> None:
    """Everybody, a line a scenario and planner."""
    rows = (
        (one.scenario, name, *theirs) for one in results for name, theirs in {"ours": one.ours, **one.peers}.items()
    )
    write_csv(path, ("scenario", "planner", "gpus", "slices", "violations"), rows)


def write_plans(path: Path, results: Iterable[Result]) -> None:
    """Our plans, a line a replica."""
    columns = ("scenario", "gpu", "start", "slices", "model", "batch", "processes")
    write_csv(path, columns, ((one.scenario, *placed) for one in results for placed in one.placed))


def _bound(result: Result, place: int) -> str:
    return f"{result.proofs[place].bound:g}" if len(result.proofs) > place else ""


def table(pairs: Sequence[tuple[Scenario, Result]]) -> str:
    """Ours beside the published, the proven optimum and the peers: GPUs / slices."""
    header = (
        "scenario",
        "services",
        "ours",
        "bound",
        "violations",
        "seconds",
        "CPU s",
        "published",
        "optimum",
        *PEERS,
    )
    lines = []
    for scenario, one in pairs:
        known = published(scenario)
        lines.append(
            (
                one.scenario,
                str(one.services),
                f"{one.ours.gpus} / {one.ours.slices}",
                f"{_bound(one, 0)} / {_bound(one, 1)}",
                str(one.ours.violations),
                f"{one.seconds:.3f}",
                f"{one.cpu_seconds:.3f}",
                f"{known.gpus} / {known.slices}" if known else "-",
                f"{known.least_gpus} / {known.least_slices}" if known else "-",
                *(f"{one.peers[name].gpus} / {one.peers[name].slices}" for name in PEERS),
            )
        )
    return format_table(header, lines, 1)


def write_random(path: Path, results: Iterable[Result]) -> None:
    """Drawn scenarios, a line each."""
    columns = (*SUMMARY_COLUMNS, "services", "bound_slices", *(f"gpus_{name}" for name in PEERS))
    rows = (
        (
            one.scenario,
            *one.ours,
            f"{one.seconds:.4f}",
            f"{one.cpu_seconds:.4f}",
            one.bound_gpus,
            one.services,
            _bound(one, 1),
            *(one.peers[name].gpus for name in PEERS),
        )
        for one in results
    )
    write_csv(path, columns, rows)


def random_table(results: Sequence[Result]) -> str:
    """How often the bound is reached, by the size of the bound, and what the peers take in all."""
    header = (
        "GPUs",
        "scenarios",
        "at the bound",
        "one above",
        "more",
        "violations",
        "p50 s",
        "most s",
        "most CPU s",
        "slices proven",
        *(f"{name} / bound" for name in PEERS),
    )
    lines = []
    for low, high in ((1, 10), (11, 30), (31, 10**9), (1, 10**9)):
        here = [one for one in results if low <= one.bound_gpus <= high]
        if not here:
            continue
        above = [one.ours.gpus - one.bound_gpus for one in here]
        seconds = sorted(one.seconds for one in here)
        bound = sum(one.bound_gpus for one in here)
        proven = sum(len(one.proofs) > 1 and one.proofs[1].gap == 0.0 for one in here)
        lines.append(
            (
                f"{low} to {high}" if high < 10**9 else f"{low} and more" if low > 1 else "all",
                str(len(here)),
                str(above.count(0)),
                str(above.count(1)),
                str(sum(one > 1 for one in above)),
                str(sum(one.ours.violations for one in here)),
                f"{seconds[len(seconds) // 2]:.3f}",
                f"{seconds[-1]:.3f}",
                f"{max(one.cpu_seconds for one in here):.3f}",
                str(proven),
                *(f"{sum(one.peers[name].gpus for one in here) / bound:.3f}" for name in PEERS),
            )
        )
    return format_table(header, lines, 1)


def write_fleet(path: Path, rows: Sequence[FleetRow]) -> None:
    """Plans of a fleet and their changes, a line each."""
    write_csv(path, FleetRow._fields, rows)


def fleet_table(rows: Sequence[FleetRow]) -> str:
    """The same, to read."""
    lines = [
        {
            "fleet": row.fleet,
            "what": row.what,
            "services": str(row.services),
            "GPUs": str(row.gpus),
            "cost": f"{row.value:g}",
            "bound": f"{row.bound:.1f}",
            "gap": f"{100.0 * row.gap:.3f} %",
            "faults": str(row.faults),
            "seconds": f"{row.seconds:.2f}",
            "CPU s": f"{row.cpu_seconds:.2f}",
            "": row.note,
        }
        for row in rows
    ]
    return format_table(None, lines, 1)


def write_changes(path: Path, changes: Sequence[Change]) -> None:
    """Changes of one service's rate, a line each."""
    write_csv(path, Change._fields, changes)


def changes_table(changes: Sequence[Change]) -> str:
    """Processor time of a change, and GPUs above what no plan can go below."""
    cpu_s = sorted(change.cpu_seconds for change in changes)
    above = [round(change.gpus - change.bound) for change in changes]
    line = {
        "changes": str(len(changes)),
        "p50 CPU s": f"{cpu_s[len(cpu_s) // 2]:.3f}",
        "p90": f"{cpu_s[len(cpu_s) * 9 // 10]:.3f}",
        "p99": f"{cpu_s[len(cpu_s) * 99 // 100]:.3f}",
        "most": f"{cpu_s[-1]:.3f}",
        "above 0.5 s": str(sum(one > 0.5 for one in cpu_s)),
        "most wall s": f"{max(change.seconds for change in changes):.3f}",
        "at the bound": str(above.count(0)),
        "one GPU above": str(above.count(1)),
        "more": str(sum(one > 1 for one in above)),
        "GPU-s a change": f"{sum(change.cost_gpu_s for change in changes) / len(changes):.1f}",
        "violations": str(sum(change.violations for change in changes)),
    }
    return format_table(None, [line], 0)
