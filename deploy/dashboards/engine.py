"""The dashboard of the placement engine and the controller around it.

Owns the questions of whoever runs Eelgrid itself: does it decide fast, well and durably, and
does it see what it decides on. Must not know single workloads.
"""

from deploy.dashboards.panels import Page, Query, Row, figure, lines, states
from deploy.dashboards.queries import of, quantile, rate, some

__all__ = ["PAGE"]

_PLACEMENT, _LIMITS = 'part="placement"', 'part="limits"'
_OURS, _THEIRS, _BOTH = 'plan="eelgrid"', 'plan="best_fit"', 'plan="both"'
_MISSED, _JUDGED = 'verdict="missed"', 'verdict=~"kept|missed"'


def _now(metric: str, *, by: str = "", matchers: str = "") -> str:
    """A gauge of the controller; of several controllers the one that leads knows most."""
    return f"max by ({by}) ({of(metric, matchers)})" if by else f"max({of(metric, matchers)})"


_NOW = Row(
    "Now",
    (
        figure(
            "Decision, 99 %",
            "Time to decide on one submission.",
            "s",
            Query(quantile(0.99, "eelgrid_decision_duration_seconds")),
            bad_above=0.05,
        ),
        figure(
            "Fragmentation",
            "Share of the free GPU capacity that the expected mix of tasks cannot use.",
            "percentunit",
            Query(_now("eelgrid_fragmentation_ratio")),
            bad_above=0.2,
        ),
        figure(
            "Journal writable",
            "0 while a full or failing disk prevents the controller from accepting commands.",
            "short",
            Query(f"min({of('eelgrid_journal_writable')})"),
            bad_below=1,
        ),
        figure(
            "Agents connected", "Agents with an open stream.", "short", Query(f"sum({of('eelgrid_agents_connected')})")
        ),
        figure(
            "Stale nodes",
            "Ready nodes whose newest sample is too old.",
            "short",
            Query(_now("eelgrid_stale_nodes")),
            bad_above=1,
        ),
        figure(
            "Failures of the objectives loop",
            "Control cycles that failed as a whole, per second.",
            "ops",
            Query(f"sum({rate('eelgrid_objectives_failures_total')})"),
            bad_above=0.001,
        ),
    ),
    height=4,
)
_COST = Row(
    "What the plan costs: the terms of the objective, as they stand now",
    (
        lines(
            "Power: measured and modelled",
            "The energy term is modelled power times the price; measured power shows how accurate the model is.",
            "watt",
            Query(f"sum({of('eelgrid_measured_power_watts')})", "measured"),
            Query(f"sum({of('eelgrid_modelled_power_watts')})", "modelled"),
            width=8,
        ),
        lines(
            "Promises missed",
            "The latency term: share of missed windows among the judged windows of all services.",
            "percentunit",
            Query(
                f"sum({rate('eelgrid_promise_windows_total', _MISSED)}) / (sum({rate('eelgrid_promise_windows_total', _JUDGED)}) > 0)",
                "missed",
            ),
            width=8,
            top=0.1,
        ),
        lines(
            "Slowdown of jobs",
            "The throughput term: mean and worst slowdown of training jobs relative to their largest measured limit.",
            "percentunit",
            Query(f"avg({of('eelgrid_job_slowdown_ratio')})", "mean"),
            Query(f"max({of('eelgrid_job_slowdown_ratio')})", "worst"),
            width=8,
        ),
        lines(
            "Energy saved by limits of jobs",
            "Compared with each job's energy for the same work at its largest measured limit, by its own measured curve; mean over jobs.",
            "percentunit",
            Query(f"avg({of('eelgrid_job_energy_saved_ratio')})", "mean of jobs"),
            width=8,
        ),
        lines(
            "Saved against plain best fit",
            "Compared with the same work placed on the same nodes by plain best fit at default limits. Both sides are modelled, for the replicas placed in both plans, so work that does not run saves nothing. By limits: the most that lowered limits save; limited work runs longer.",
            "watt",
            Query(f"sum({of('eelgrid_saved_power_watts', _PLACEMENT)})", "by placement"),
            Query(f"sum({of('eelgrid_saved_power_watts', _LIMITS)})", "by limits"),
            width=8,
        ),
        lines(
            "Power of the compared plans",
            "Modelled power at default limits of all nodes with the replicas placed in both plans, and the measured power of the GPUs with all work and their real limits.",
            "watt",
            Query(f"sum({of('eelgrid_compared_power_watts', _THEIRS)})", "best fit, modelled"),
            Query(f"sum({of('eelgrid_compared_power_watts', _OURS)})", "Eelgrid, modelled"),
            Query(f"sum({of('eelgrid_measured_power_watts')})", "measured"),
            width=8,
        ),
        lines(
            "Compared with best fit",
            "GPUs allocated to work placed in both plans, and to work placed in only one; if much is placed in only one, the savings cover only a part of the work.",
            "short",
            Query(f"sum({of('eelgrid_compared_gpus', _BOTH)})", "in both plans"),
            Query(f"sum({of('eelgrid_compared_gpus', _OURS)})", "in Eelgrid's alone"),
            Query(f"sum({of('eelgrid_compared_gpus', _THEIRS)})", "in best fit alone"),
            width=8,
        ),
        lines(
            "Model error",
            "Measured over modelled power, minus one, by GPU model; below 0 the GPUs draw less than modelled.",
            "percentunit",
            Query(_now("eelgrid_model_power_error_ratio", by="model"), "{{model}}"),
            width=8,
            top=0.0,
        ),
        lines(
            "Fragmentation and allocation",
            "Share of the free GPU capacity that the expected mix of tasks cannot use, and the share of GPUs that is allocated.",
            "percentunit",
            Query(_now("eelgrid_fragmentation_ratio"), "fragmentation"),
            Query(_now("eelgrid_gpus_allocated_ratio"), "allocated"),
            width=8,
            top=1.0,
        ),
    ),
)
_DECISIONS = Row(
    "Decisions and churn",
    (
        lines(
            "Decision latency",
            "Time to decide on one submission.",
            "s",
            Query(quantile(0.5, "eelgrid_decision_duration_seconds"), "50 %"),
            Query(quantile(0.99, "eelgrid_decision_duration_seconds"), "99 %"),
            width=8,
        ),
        lines(
            "Decisions and refusals",
            "Submissions decided, and refused, per second.",
            "ops",
            Query(f"sum({rate('eelgrid_decision_duration_seconds_count')})", "decided"),
            Query(f"sum({rate('eelgrid_workloads_refused_total')})", "refused"),
            width=8,
        ),
        lines(
            "Churn of the plan",
            "Durable changes of the plan, per second. Moves are the cost of churn; placements are work.",
            "ops",
            Query(f"sum by (change) ({rate('eelgrid_plan_changes_total')})", "{{change}}"),
            width=8,
            stacked=True,
        ),
        lines(
            "Plans sent to nodes",
            "Node plans per second.",
            "ops",
            Query(f"sum({rate('eelgrid_plans_sent_total')})", "plans"),
            width=8,
        ),
        lines(
            "Commands that wait",
            "Commands in the writer's queue.",
            "short",
            Query(_now("eelgrid_commands_queued"), "commands"),
            width=8,
            top=1.0,
        ),
        lines(
            "Pending by reason",
            "Pending workloads by the constraint that they wait for.",
            "short",
            Query(some(_now("eelgrid_pending_workloads", by="reason"), "reason"), "{{reason}}"),
            width=8,
            stacked=True,
        ),
    ),
)
_OBJECTIVES = Row(
    "Objectives and power budgets",
    (
        lines(
            "Cycle, 99 %",
            "Duration of a control cycle in its thread, and of a power budget allocation.",
            "s",
            Query(quantile(0.99, "eelgrid_objectives_cycle_duration_seconds"), "cycle"),
            Query(quantile(0.99, "eelgrid_objectives_allocation_duration_seconds"), "allocation"),
            width=8,
        ),
        lines(
            "Commands",
            "Commands carried out, per second.",
            "ops",
            Query(f"sum by (command) ({rate('eelgrid_objectives_commands_total')})", "{{command}}"),
            width=8,
        ),
        lines(
            "Refusals by rule",
            "Commands that a rule refused, per second.",
            "ops",
            Query(f"sum by (command, rule) ({rate('eelgrid_objectives_refusals_total')})", "{{command}}: {{rule}}"),
            width=8,
            top=1.0,
        ),
        lines(
            "Faults",
            "Workloads skipped because of an error, and control cycles that failed, per second.",
            "ops",
            Query(f"sum({rate('eelgrid_objectives_faults_total')})", "workloads"),
            Query(f"sum({rate('eelgrid_objectives_failures_total')})", "cycles"),
            width=8,
            top=1.0,
        ),
        lines(
            "Pages of workloads",
            "Successful scrapes, and failed scrapes by kind of failure, per second.",
            "ops",
            Query(f"sum({rate('eelgrid_scrape_pages_read_total')})", "read"),
            Query(f"sum by (kind) ({rate('eelgrid_scrape_failures_total')})", "{{kind}}"),
            width=8,
        ),
        lines(
            "Limits answered",
            "Power limits that nodes confirmed or failed to set, per second.",
            "ops",
            Query(f"sum by (result) ({rate('eelgrid_objectives_limits_answered_total')})", "{{result}}"),
            width=8,
        ),
    ),
)
_JOURNAL = Row(
    "Journal and ledger",
    (
        lines(
            "Commit, 99 %",
            "Time to write one batch to disk.",
            "s",
            Query(quantile(0.99, "eelgrid_journal_commit_duration_seconds"), "99 %"),
            Query(quantile(0.5, "eelgrid_journal_commit_duration_seconds"), "50 %"),
            width=8,
        ),
        lines(
            "Events put on disk",
            "Events and batches per second.",
            "ops",
            Query(f"sum({rate('eelgrid_journal_entries_total')})", "events"),
            Query(f"sum({rate('eelgrid_journal_commits_total')})", "batches"),
            width=8,
        ),
        lines(
            "Journal lag",
            "How long the oldest command has waited to be written to disk; 0 while none waits.",
            "s",
            Query(_now("eelgrid_journal_lag_seconds"), "lag"),
            width=8,
        ),
        lines(
            "Checkpoint",
            "Size of the last checkpoint.",
            "bytes",
            Query(_now("eelgrid_journal_checkpoint_bytes"), "size"),
            width=8,
        ),
        lines(
            "Energy windows",
            "Windows received from agents: stored, already stored, without space, refused, or with an implausible time; and failed writes. Per second.",
            "ops",
            Query(f"sum by (result) ({rate('eelgrid_ledger_windows_total')})", "{{result}}"),
            Query(f"sum({rate('eelgrid_ledger_failures_total')})", "failed writes"),
            width=8,
        ),
        lines(
            "Damaged parts of the ledger",
            "Hours and days of nodes, and names, that do not match their checksums.",
            "short",
            Query(_now("eelgrid_ledger_damaged_parts"), "parts"),
            width=8,
        ),
        lines(
            "Age of the newest energy window",
            "Age of the newest window on disk; it grows while the ledger cannot be written.",
            "s",
            Query(_now("eelgrid_ledger_newest_window_age_seconds"), "age"),
            width=8,
        ),
    ),
)
_SIGHT = Row(
    "What it sees, and what it needs",
    (
        lines(
            "Samples",
            "Samples of nodes received and lost, per second.",
            "ops",
            Query(f"sum({rate('eelgrid_samples_received_total')})", "came"),
            Query(f"sum({rate('eelgrid_samples_lost_total')})", "lost"),
            width=8,
        ),
        lines(
            "Age of the oldest sample",
            "Age of the newest sample of the ready node where it is oldest.",
            "s",
            Query(_now("eelgrid_oldest_sample_age_seconds"), "age"),
            width=8,
        ),
        lines(
            "Event loop lag, 99 %",
            "How late the event loop runs a timer.",
            "s",
            Query(quantile(0.99, "eelgrid_event_loop_lag_seconds"), "99 %"),
            width=8,
        ),
        lines(
            "Processor",
            "CPU cores used by each Eelgrid process.",
            "short",
            Query(rate("process_cpu_seconds_total"), "{{job}} {{instance}}"),
            width=8,
        ),
        lines(
            "Memory",
            "Resident memory of each Eelgrid process.",
            "bytes",
            Query(of("process_resident_memory_bytes"), "{{job}} {{instance}}"),
            width=8,
        ),
        states(
            "Who leads",
            "Green while a controller holds the Kubernetes Lease; empty without Kubernetes.",
            "short",
            Query(
                f"{of('eelgrid_kubernetes_leading')} or on (job, instance) 0 * {of('eelgrid_controller_info')}",
                "{{instance}}",
            ),
            width=8,
            on="green",
            off="gray",
        ),
    ),
)

_FRONT = Row(
    "Several clusters",
    (
        lines(
            "Clusters of a front",
            "1 while a cluster answers the front; empty without a front.",
            "short",
            Query(f"min by (cluster) ({of('eelgrid_front_cluster_up')})", "{{cluster}}"),
            width=6,
        ),
        lines(
            "Workloads by cluster",
            "Unfinished workloads that the front has placed into each cluster.",
            "short",
            Query(f"sum by (cluster) ({of('eelgrid_front_workloads')})", "{{cluster}}"),
            width=6,
        ),
        lines(
            "Waiting and stuck at the front",
            "Workloads without a cluster, and those whose cluster answers no call about them.",
            "short",
            Query(f"sum({of('eelgrid_front_workloads_waiting')})", "waiting"),
            Query(f"sum by (cluster) ({of('eelgrid_front_stuck_workloads')})", "stuck in {{cluster}}"),
            width=6,
        ),
        lines(
            "Left out of decisions",
            "Decisions that a cluster was left out of because it answered too late, per second.",
            "ops",
            Query(f"sum by (cluster) ({rate('eelgrid_front_left_out_total')})", "{{cluster}}"),
            width=6,
        ),
    ),
)

PAGE = Page(
    "engine",
    "Eelgrid / Placement engine",
    "Whether the engine decides fast, well and durably: terms of the objective function, fragmentation, churn, the objectives loop, the journal, and telemetry. The cost terms of a single placement are in eelctl explain.",
    (_NOW, _COST, _DECISIONS, _OBJECTIVES, _JOURNAL, _SIGHT, _FRONT),
)
