"""Every metric of the controller's page: its name, kind, labels and meaning, in one list.

Owns the names (a contract: they only grow), their units (base units, in the name) and
`docs/controller-metrics.md`, which `python -m eelgrid_controller.adapters.described` writes
from the list. Must not know where values come from.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["BUCKETS_S", "METRICS", "SERIES_MOST", "Described", "Kind", "family", "main", "page"]

# Services, jobs and budgets that have series of their own; those that stand worst, where there are more.
SERIES_MOST = 100

BUCKETS_S: Mapping[str, tuple[float, ...]] = dict.fromkeys(("eelgrid_decision_duration_seconds", "eelgrid_journal_commit_duration_seconds", "eelgrid_event_loop_lag_seconds"), (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)) | dict.fromkeys(("eelgrid_steward_turn_duration_seconds", "eelgrid_steward_division_duration_seconds"), (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0))  # fmt: skip


class Kind(Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Described(NamedTuple):
    """One metric; `_total` and `_info` are in the name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_SECTIONS: Mapping[str, tuple[Described, ...]] = {
    "The controller": (
        Described("eelgrid_controller_info", Kind.INFO, "The program", ("version",)),
        Described("eelgrid_state_revision", _G, "Events applied since the beginning"),
        Described("eelgrid_agents_connected", _G, "Agents with an open stream"),
        Described("eelgrid_commands_queued", _G, "Commands that wait"),
        Described("eelgrid_event_loop_lag_seconds", _H, "How late the event loop wakes a sleeper"),
        Described("eelgrid_plans_sent_total", _C, "Node plans sent to agents"),
        Described("eelgrid_samples_received_total", _C, "Ticks of nodes that came"),
        Described("eelgrid_samples_lost_total", _C, "Ticks of nodes that never came"),
        Described("eelgrid_batches_refused_total", _C, "Batches that contradict"),
        Described("eelgrid_batches_duplicate_total", _C, "Batches that came again"),
        Described("eelgrid_agent_events_total", _C, "Events that agents reported", ("kind",)),
    ),
    "The fleet": (
        Described("eelgrid_nodes", _G, "Nodes by state", ("state",)),
        Described("eelgrid_workloads", _G, "Workloads by phase", ("phase",)),
        Described("eelgrid_workloads_refused_total", _C, "Submissions refused"),
        Described("eelgrid_decision_duration_seconds", _H, "Time to decide on one submission"),
        Described("eelgrid_gpus", _G, "GPUs by model", ("model",)),
        Described("eelgrid_gpus_allocated_ratio", _G, "Allocated share of all GPUs"),
        Described("eelgrid_cpus_allocated_ratio", _G, "Allocated share of all CPUs"),
        Described("eelgrid_measured_power_watts", _G, "Sum of fresh power readings by GPU model", ("model",)),
        Described("eelgrid_measured_gpus", _G, "GPUs with a fresh power reading"),
        Described("eelgrid_modelled_power_watts", _G, "Power that the model gives for the present placement"),
    ),
    "The journal": (
        Described("eelgrid_journal_writable", _G, "0 while a full or failing disk stops acceptance"),
        Described("eelgrid_journal_commit_duration_seconds", _H, "Time to put one batch on disk"),
        Described("eelgrid_journal_commits_total", _C, "Batches put on disk"),
        Described("eelgrid_journal_entries_total", _C, "Events put on disk"),
        Described("eelgrid_journal_written_bytes_total", _C, "Bytes of events"),
        Described("eelgrid_journal_checkpoints_total", _C, "Checkpoints written"),
        Described("eelgrid_journal_checkpoint_bytes", _G, "Size of the last checkpoint"),
    ),
    "Promises": (
        Described("eelgrid_services", _G, "Services with a promise by phase; unsteered ones cannot be watched", ("phase",)),
        Described("eelgrid_jobs", _G, "Training jobs with a promise by phase", ("phase",)),
        Described("eelgrid_promise_windows_total", _C, "Windows of all services: the promise kept, missed, or too few answers to tell", ("verdict",)),
        Described("eelgrid_promise_series_left_out", _G, "Services, jobs and budgets without series of their own, for there are too many", ("kind",)),
        Described("eelgrid_service_windows_total", _C, "Windows of a service by verdict: attainment is kept over kept and missed", ("workload", "verdict")),
        Described("eelgrid_service_latency_seconds", _G, "The promised quantile as served in the last window", ("workload",)),
        Described("eelgrid_service_latency_objective_seconds", _G, "What it may be", ("workload",)),
        Described("eelgrid_service_window_age_seconds", _G, "Time since the last window of a service ended", ("workload",)),
        Described("eelgrid_service_replicas", _G, "Replicas of a service that are wanted, and that serve", ("workload", "state")),
        Described("eelgrid_service_slowness_ratio", _G, "How much slower than its profile a service is taken to be", ("workload",)),
        Described("eelgrid_job_slowdown_ratio", _G, "Time of a job so far over that at its largest measured limit, less one", ("workload",)),
        Described("eelgrid_job_slowdown_promised_ratio", _G, "What that may be at the end; no series for other promises", ("workload",)),
        Described("eelgrid_job_energy_saved_ratio", _G, "Energy of the same work that its limit saves, of that at the largest measured", ("workload",)),
        Described("eelgrid_job_power_limit_watts", _G, "Limit of each GPU of a job, as read back", ("workload",)),
        Described("eelgrid_job_power_limit_wanted_watts", _G, "Limit of each GPU that a job should have", ("workload",)),
    ),
    "Power": (
        Described("eelgrid_power_budget_limit_watts", _G, "What all GPUs below a budget may draw", ("budget",)),
        Described("eelgrid_power_budget_claimed_watts", _G, "What jobs may draw of it by the limits that they have or are on their way to", ("budget",)),
        Described("eelgrid_power_budget_others_watts", _G, "What GPUs that nobody steers may draw of it", ("budget",)),
        Described("eelgrid_power_budget_drawn_watts", _G, "What they were read to draw, at most half a minute ago", ("budget",)),
        Described("eelgrid_power_budget_unread_gpus", _G, "GPUs below a budget without a fresh reading; they are not in what is drawn", ("budget",)),
        Described("eelgrid_power_budget_room_watts", _G, "What is left beside jobs and others; below 0 while limits come down", ("budget",)),
        Described("eelgrid_power_budget_shortfall_watts", _G, "What promises and lost nodes need beyond it", ("budget",)),
        Described("eelgrid_energy_price_per_joule", _G, "Price now, carbon and PUE included; no series without prices", ("currency",)),
        Described("eelgrid_energy_price_ratio", _G, "Price now over its mean of the coming day"),
    ),
    "The steward": (
        Described("eelgrid_steward_cycles_total", _C, "Looks at all promises"),
        Described("eelgrid_steward_failures_total", _C, "Cycles that failed as a whole"),
        Described("eelgrid_steward_faults_total", _C, "Workloads that were passed over in a cycle, for an error"),
        Described("eelgrid_steward_turn_duration_seconds", _H, "Time of a turn in its thread"),
        Described("eelgrid_steward_division_duration_seconds", _H, "Time of a division of watts that was made beside the turns"),
        Described("eelgrid_steward_commands_total", _C, "Commands that were carried out", ("command",)),
        Described("eelgrid_steward_refusals_total", _C, "Commands that were refused, by the rule that refused them", ("command", "rule")),
        Described("eelgrid_steward_limits_answered_total", _C, "Limits that a node confirmed, or failed to set", ("result",)),
        Described("eelgrid_steward_ignored_events_total", _C, "Events that changed nothing, by the reason", ("reason",)),
        Described("eelgrid_scrape_pages", _G, "Pages of services and jobs that are asked for in each interval"),
        Described("eelgrid_scrape_pages_read_total", _C, "Pages that were read"),
        Described("eelgrid_scrape_failures_total", _C, "Pages that could not be had, by what stood between", ("kind",)),
    ),
    "Its process": (
        Described("process_cpu_seconds_total", _C, "Total user and system CPU time spent in seconds."),
        Described("process_virtual_memory_bytes", _G, "Virtual memory size in bytes."),
        Described("process_resident_memory_bytes", _G, "Resident memory size in bytes."),
        Described("process_start_time_seconds", _G, "Start time of the process since unix epoch in seconds."),
        Described("process_open_fds", _G, "Number of open file descriptors."),
        Described("process_max_fds", _G, "Maximum number of open file descriptors."),
    ),
}  # fmt: skip
METRICS: Mapping[str, Described] = {one.name: one for found in _SECTIONS.values() for one in found}


def family(name: str, values: float | Mapping[str, float] | Mapping[tuple[str, str], float]) -> Metric:
    """The samples of one metric, by the values of its labels; KeyError for a name that is not in the list."""
    about = METRICS[name]
    make = CounterMetricFamily if about.kind is Kind.COUNTER else GaugeMetricFamily
    found = make(name, about.help, labels=about.labels)
    by_labels: Mapping[Any, float] = values if isinstance(values, Mapping) else {(): values}
    for key, value in by_labels.items():
        found.add_metric((key,) if isinstance(key, str) else key, value)
    return found


_INTRODUCTION = """\
# The controller's metrics

<!-- Generated by `python -m eelgrid_controller.adapters.described`; change that module, not this page. -->

The controller serves these on `/metrics` (`--metrics HOST:PORT`) as Prometheus' text format, beside the probes `/livez`
and `/readyz`. The agent's are in [metrics.md](metrics.md). Units are base units, in the name; what is not known has no
series. Values are those of the moment of the scrape; those of promises and budgets are of the steward's last turn.

At most {most} services, {most} jobs and {most} budgets have series of their own, those that stand worst where there
are more: services by the share of windows kept, jobs by the time that they owe, budgets the cluster first, then racks,
then nodes, each by what is claimed of the limit. So a series may end and come back. `eelgrid_promise_series_left_out`
says how many have none; sums over all services are in `eelgrid_promise_windows_total`.

- Attainment of the last hour: `sum by (workload) (increase(eelgrid_service_windows_total{{verdict="kept"}}[1h])) /
  sum by (workload) (increase(eelgrid_service_windows_total{{verdict=~"kept|missed"}}[1h]))`.
- A budget that is drawn from too much: `eelgrid_power_budget_drawn_watts > eelgrid_power_budget_limit_watts`.
- A service that nobody sees: `eelgrid_service_window_age_seconds > 60`.
"""


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION.format(most=SERIES_MOST)]
    for title, metrics in _SECTIONS.items():
        parts.append(f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n")
        for one in metrics:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{one.name}` | {one.kind.value} | {labels} | {one.help} |\n")
    parts.append("\n")
    for name, bounds in BUCKETS_S.items():
        parts.append(f"Buckets of `{name}` end at {', '.join(f'{bound:g}' for bound in bounds)} and infinity.\n")
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; with --check, 1 where it is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m eelgrid_controller.adapters.described", description="Writes the page."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/controller-metrics.md"), help="the page (default %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is stale")
    options = parser.parse_args(arguments)
    wanted = page()
    if not options.check:
        options.out.write_text(wanted, encoding="utf-8")
        return 0
    if not options.out.is_file() or options.out.read_text(encoding="utf-8") != wanted:
        sys.stderr.write(f"{options.out} is stale; run python -m eelgrid_controller.adapters.described\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
