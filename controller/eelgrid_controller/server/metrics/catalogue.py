"""The metric catalogue: name, type, labels and meaning of every metric of the controller.

`docs/generate.py` writes the reference page from it.
"""

from collections.abc import Mapping

from eelgrid_controller.energy.ledger import OTHER_NAMESPACES
from eelgrid_protos.openmetrics import MetricDescription, MetricFamily, MetricType

# Services, jobs and budgets that have series of their own; those that stand worst, where there are more.
SERIES_MOST = 100
# Pools with series of their own; the rest is summed up under OTHER, as it is of namespaces.
POOLS_MOST = 100
MODELS_MOST = 1000
# Constraints that pending work is counted by; a reason that is none of them is counted under OTHER.
PENDING_REASONS = (
    "budget",
    "cpu",
    "cpu+memory",
    "gpu_count",
    "gpu_mig",
    "gpu_model",
    "gpu_share",
    "memory",
    "no_nodes",
    OTHER_NAMESPACES,
    "partitions",
    "replicas",
    "spending",
    "traits",
    "unavailable",
)
PLAN_CHANGES = ("cancelled", "corrected", "deferred", "limited", "moved", "partitioned", "placed", "scaled")
BUCKETS_S: Mapping[str, tuple[float, ...]] = dict.fromkeys(
    ("eelgrid_decision_duration_seconds", "eelgrid_journal_commit_duration_seconds", "eelgrid_event_loop_lag_seconds"),
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
) | dict.fromkeys(
    ("eelgrid_steward_turn_duration_seconds", "eelgrid_steward_division_duration_seconds"),
    (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)


_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
# By the title of their section in the reference.
SECTIONS: Mapping[str, tuple[MetricDescription, ...]] = {
    "The controller": (
        MetricDescription("eelgrid_controller_info", MetricType.INFO, "The program", ("version",)),
        MetricDescription("eelgrid_state_revision", _G, "Events applied since the beginning"),
        MetricDescription("eelgrid_agents_connected", _G, "Agents with an open stream"),
        MetricDescription("eelgrid_commands_queued", _G, "Commands that wait"),
        MetricDescription("eelgrid_event_loop_lag_seconds", _H, "How late the event loop wakes a sleeper"),
        MetricDescription("eelgrid_plans_sent_total", _C, "Node plans sent to agents"),
        MetricDescription("eelgrid_samples_received_total", _C, "Ticks of nodes that came"),
        MetricDescription("eelgrid_samples_lost_total", _C, "Ticks of nodes that never came"),
        MetricDescription("eelgrid_batches_refused_total", _C, "Batches that contradict"),
        MetricDescription("eelgrid_batches_duplicate_total", _C, "Batches that came again"),
        MetricDescription("eelgrid_agent_events_total", _C, "Events that agents reported", ("kind",)),
        MetricDescription(
            "eelgrid_answer_omitted_elements_total",
            _C,
            "Elements that were left out of answers, agents' plans among them, since they break the contract, by call; the log says which",
            ("call",),
        ),
        MetricDescription(
            "eelgrid_delayed_agent_events_total",
            _C,
            "Events that waited, with all else of their stream, since their node sent more than it may",
        ),
        MetricDescription(
            "eelgrid_excess_calls_total",
            _C,
            "Calls that were refused since their caller had too many under way: calls, or watches",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_ended_connections_total",
            _C,
            "Connections that were ended: for a flood of refused and reset calls, a certificate that ran out, an authority that is trusted no more, a message that nobody read, or as idle ones when descriptors ran short",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_calls_refused_total",
            _C,
            "Calls, and looks at the page, that were refused for the role of the caller's certificate, by that role, and by what was needed: a role, `node` the certificate of that node, `date` one that has not expired, `owner` that of the work's owner, or `user`, `namespace`, `queue` or `label` a right to the one that was named; no series without TLS",
            ("role", "needs"),
        ),
        MetricDescription(
            "eelgrid_registrations_refused_total",
            _C,
            "Nodes that were never seen and were not registered, by the limit on new names that was reached: `peer` that of one certificate or address, `all` that of all together",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_audit_events_total",
            _C,
            "Calls that change something, by whether they were accepted; refused are those of any call that the caller may not make, too",
            ("outcome",),
        ),
        MetricDescription(
            "eelgrid_audit_events_lost_total",
            _C,
            "Refused calls that the audit log has no entry of, since the disk took none",
        ),
        MetricDescription(
            "eelgrid_calls_without_role_total",
            _C,
            "Calls of certificates without a role that were let in for want of `--roles require`, by the role that they would have needed; no series without TLS",
            ("needs",),
        ),
    ),
    "The fleet": (
        MetricDescription("eelgrid_nodes", _G, "Nodes by state", ("state",)),
        MetricDescription("eelgrid_workloads", _G, "Workloads by phase", ("phase",)),
        MetricDescription("eelgrid_workloads_refused_total", _C, "Submissions refused"),
        MetricDescription("eelgrid_decision_duration_seconds", _H, "Time to decide on one submission"),
        MetricDescription("eelgrid_gpus", _G, "GPUs by model", ("model",)),
        MetricDescription("eelgrid_gpus_allocated_ratio", _G, "Allocated share of all GPUs"),
        MetricDescription("eelgrid_cpus_allocated_ratio", _G, "Allocated share of all CPUs"),
        MetricDescription("eelgrid_measured_power_watts", _G, "Sum of fresh power readings by GPU model", ("model",)),
        MetricDescription("eelgrid_measured_gpus", _G, "GPUs with a fresh power reading"),
        MetricDescription("eelgrid_modelled_power_watts", _G, "Power that the model gives for the present placement"),
        MetricDescription(
            "eelgrid_model_power_error_ratio",
            _G,
            "Measured over modelled power of GPUs with a fresh reading, of nodes without work under a limit, less one, by model; below 0 they draw less than the planner takes",
            ("model",),
        ),
        MetricDescription("eelgrid_pool_power_watts", _G, "Sum of fresh power readings by node pool", ("pool",)),
        MetricDescription(
            "eelgrid_stale_nodes",
            _G,
            "Ready nodes with an agent whose newest sample is too old to stand for now, or never came",
        ),
        MetricDescription(
            "eelgrid_oldest_sample_age_seconds",
            _G,
            "Age of the newest sample, of the ready node where it is oldest; no series before the first",
        ),
        MetricDescription(
            "eelgrid_fragmentation_ratio",
            _G,
            "Share of the free GPU that the expected mix of tasks could not use; no series where none is free",
        ),
    ),
    "The plan": (
        MetricDescription(
            "eelgrid_pending_workloads",
            _G,
            "Workloads that wait, by the constraint that stands in their way",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_plan_changes_total",
            _C,
            "Changes of the plan that were made durable, by kind: workloads placed, moved, scaled, limited, cancelled or deferred, replicas that sit on other devices than planned, and partitions",
            ("change",),
        ),
    ),
    "Savings": (
        MetricDescription(
            "eelgrid_saved_power_watts",
            _G,
            "Watts saved against the same work on the same nodes placed by plain best fit at default power limits, model against model, of the replicas that stand in both plans: `placement` is what other places save; `limits` is what lowered limits take off these replicas at the most while they run, and they run longer",
            ("part",),
        ),
        MetricDescription(
            "eelgrid_compared_power_watts",
            _G,
            "Watts by the planner's model, at default limits, of all nodes with the replicas that stand in both plans: placed as they are (eelgrid), and by plain best fit",
            ("plan",),
        ),
        MetricDescription(
            "eelgrid_compared_energy_joules_total",
            _C,
            "The same summed over time; joules saved by placement are the increase under best_fit less that under eelgrid",
            ("plan",),
        ),
        MetricDescription(
            "eelgrid_compared_replicas",
            _G,
            "Replicas that stand in both plans and are compared, and those that stand in one alone, where the other has no room, and are in no watts",
            ("plan",),
        ),
        MetricDescription("eelgrid_compared_gpus", _G, "The same in GPUs held", ("plan",)),
        MetricDescription(
            "eelgrid_compared_since_timestamp_seconds",
            _G,
            "When the comparison began; what lived then was placed by best fit in the order of submission",
        ),
        MetricDescription(
            "eelgrid_savings_failures_total",
            _C,
            "Comparisons that ended for a fault, or since too many events waited, and began anew",
            ("reason",),
        ),
    ),
    "Time": (
        MetricDescription(
            "eelgrid_clock_jumps_total", _C, "Jumps of the machine's wall clock, ahead or back, by more than a second"
        ),
        MetricDescription(
            "eelgrid_clock_jump_seconds",
            _G,
            "How far the last of them went ahead, or back; one that is undone within a minute is not followed",
        ),
    ),
    "The journal": (
        MetricDescription("eelgrid_journal_writable", _G, "0 while a full or failing disk stops acceptance"),
        MetricDescription(
            "eelgrid_journal_lag_seconds",
            _G,
            "How long the oldest command has waited to be on disk; 0 while none waits",
        ),
        MetricDescription("eelgrid_journal_commit_duration_seconds", _H, "Time to put one batch on disk"),
        MetricDescription("eelgrid_journal_commits_total", _C, "Batches put on disk"),
        MetricDescription("eelgrid_journal_entries_total", _C, "Events put on disk"),
        MetricDescription("eelgrid_journal_written_bytes_total", _C, "Bytes of events"),
        MetricDescription("eelgrid_journal_checkpoints_total", _C, "Checkpoints written"),
        MetricDescription("eelgrid_journal_checkpoint_bytes", _G, "Size of the last checkpoint"),
        MetricDescription(
            "eelgrid_journal_rollbacks_total",
            _C,
            "How often an operator accepted that acknowledged entries were lost, as the journal has it",
        ),
        MetricDescription(
            "eelgrid_ahead_nodes",
            _G,
            "Nodes whose agents hold a plan that the journal does not know: nothing is placed there until they are reconciled (eelctl reconcile)",
        ),
    ),
    "The energy ledger": (
        MetricDescription(
            "eelgrid_ledger_windows_total",
            _C,
            "Energy windows of agents: taken, here before (again), without room, which come again (dropped), refused, or far from now and counted in the hour in which they came (unplaced)",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_ledger_damaged_parts",
            _G,
            "Hours and days of nodes, and names, that do not agree with their checksums and are left out of answers; looked at with each answer, and day by day",
        ),
        MetricDescription(
            "eelgrid_ledger_failures_total",
            _C,
            "Attempts to open or write the ledger that failed; what came is tried again",
        ),
        MetricDescription(
            "eelgrid_ledger_newest_window_age_seconds",
            _G,
            "Time since the end of the newest window that is on disk; no series before the first since the start",
        ),
        MetricDescription(
            "eelgrid_ledger_size_bytes",
            _G,
            "Size of the ledger's file without pages that are free; looked at every ten minutes",
        ),
        MetricDescription(
            "eelgrid_ledger_size_limit_bytes",
            _G,
            "Size beyond which the oldest hours and days are let go, whoever has them",
        ),
        MetricDescription(
            "eelgrid_ledger_forgotten_rows_total",
            _C,
            "Rows that were let go since the start: for their age, or for the file's size",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_ledger_export_lag_seconds",
            _G,
            "For how long there have been rows that an exporter does not have; no series without exporters",
            ("exporter",),
        ),
        MetricDescription(
            "eelgrid_ledger_export_changes", _G, "Hours that changed after an exporter confirmed them", ("exporter",)
        ),
        MetricDescription(
            "eelgrid_ledger_energy_joules_total",
            _C,
            "Energy since the ledger began, by namespace of who is charged; it goes on after a restart. `(unallocated)` and `(unattributed)` are nobody's, `(none)` is of owners without a namespace",
            ("namespace",),
        ),
    ),
    "Traces": (
        MetricDescription("eelgrid_traces_open", _G, "Placements that are followed; no series without `--traces`"),
        MetricDescription(
            "eelgrid_traces_total",
            _C,
            "Traces of placements that ended: in force everywhere, cancelled before, or given up for a bound",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_spans_total",
            _C,
            "Spans by what became of them: taken by the collector, refused by it, or dropped since the queue to it was full",
            ("result",),
        ),
    ),
    "Promises": (
        MetricDescription(
            "eelgrid_services", _G, "Services with a promise by phase; unsteered ones cannot be watched", ("phase",)
        ),
        MetricDescription("eelgrid_jobs", _G, "Training jobs with a promise by phase", ("phase",)),
        MetricDescription(
            "eelgrid_promise_windows_total",
            _C,
            "Windows of all services: the promise kept, missed, or too few answers to tell",
            ("verdict",),
        ),
        MetricDescription(
            "eelgrid_promise_series_left_out",
            _G,
            "Services, jobs and budgets without series of their own, for there are too many",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_service_windows_total",
            _C,
            "Windows of a service by verdict: attainment is kept over kept and missed",
            ("workload", "verdict"),
        ),
        MetricDescription(
            "eelgrid_service_latency_seconds", _G, "The promised quantile as served in the last window", ("workload",)
        ),
        MetricDescription("eelgrid_service_latency_objective_seconds", _G, "What it may be", ("workload",)),
        MetricDescription(
            "eelgrid_service_window_age_seconds", _G, "Time since the last window of a service ended", ("workload",)
        ),
        MetricDescription(
            "eelgrid_service_replicas",
            _G,
            "Replicas of a service that are wanted, and that serve",
            ("workload", "state"),
        ),
        MetricDescription(
            "eelgrid_service_slowness_ratio",
            _G,
            "How much slower than its profile a service is taken to be",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_slowdown_ratio",
            _G,
            "Time of a job so far over that at its largest measured limit, less one",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_slowdown_promised_ratio",
            _G,
            "What that may be at the end; no series for other promises",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_energy_saved_ratio",
            _G,
            "Energy of the same work that its limit saves, of that at the largest measured",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_power_limit_watts", _G, "Limit of each GPU of a job, as read back", ("workload",)
        ),
        MetricDescription(
            "eelgrid_job_power_limit_wanted_watts", _G, "Limit of each GPU that a job should have", ("workload",)
        ),
    ),
    "Power": (
        MetricDescription("eelgrid_power_budget_limit_watts", _G, "What all GPUs below a budget may draw", ("budget",)),
        MetricDescription(
            "eelgrid_power_budget_claimed_watts",
            _G,
            "What jobs may draw of it by the limits that they have or are on their way to",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_others_watts", _G, "What GPUs that nobody steers may draw of it", ("budget",)
        ),
        MetricDescription(
            "eelgrid_power_budget_drawn_watts",
            _G,
            "What they were read to draw, at most half a minute ago",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_unread_gpus",
            _G,
            "GPUs below a budget without a fresh reading; they are not in what is drawn",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_room_watts",
            _G,
            "What is left beside jobs and others; below 0 while limits come down",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_shortfall_watts", _G, "What promises and lost nodes need beyond it", ("budget",)
        ),
        MetricDescription(
            "eelgrid_energy_price_per_joule",
            _G,
            "Price now, carbon and PUE included; no series without prices",
            ("currency",),
        ),
        MetricDescription("eelgrid_energy_price_ratio", _G, "Price now over its mean of the coming day"),
    ),
    "Spending limits": (
        MetricDescription(
            "eelgrid_spending_limit_gpu_seconds",
            _G,
            "The most GPU time that work of somebody may take in a period; the label is the limit without its amount",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_spending_spent_gpu_seconds",
            _G,
            "What it has taken in the period under way, by the last look; shares and slices count as such",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_spending_limit_joules", _G, "The same of energy of devices, without PUE", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_spent_joules",
            _G,
            "What is spent of it, by the energy ledger; no series while it cannot be read",
            ("limit",),
        ),
        MetricDescription("eelgrid_spending_limit_money", _G, "The same of money", ("limit", "currency")),
        MetricDescription("eelgrid_spending_spent_money", _G, "What is spent of it", ("limit", "currency")),
        MetricDescription("eelgrid_spending_limit_grams", _G, "The same of carbon dioxide", ("limit",)),
        MetricDescription("eelgrid_spending_spent_grams", _G, "What is spent of it", ("limit",)),
        MetricDescription(
            "eelgrid_spending_ratio", _G, "What is spent of a limit, whatever its unit, over the limit", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_warning_ratio", _G, "From which share on it counts as nearly spent", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_waiting_workloads", _G, "Workloads that wait because of a limit", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_failures_total",
            _C,
            "Looks at which the ledger could not be read, or nothing could be judged",
        ),
    ),
    "The steward": (
        MetricDescription("eelgrid_steward_cycles_total", _C, "Looks at all promises"),
        MetricDescription("eelgrid_steward_failures_total", _C, "Cycles that failed as a whole"),
        MetricDescription(
            "eelgrid_steward_faults_total", _C, "Workloads that were passed over in a cycle, for an error"
        ),
        MetricDescription("eelgrid_steward_turn_duration_seconds", _H, "Time of a turn in its thread"),
        MetricDescription(
            "eelgrid_steward_division_duration_seconds",
            _H,
            "Time of a division of watts that was made beside the turns",
        ),
        MetricDescription("eelgrid_steward_commands_total", _C, "Commands that were carried out", ("command",)),
        MetricDescription(
            "eelgrid_steward_refusals_total",
            _C,
            "Commands that were refused, by the rule that refused them",
            ("command", "rule"),
        ),
        MetricDescription(
            "eelgrid_steward_limits_answered_total", _C, "Limits that a node confirmed, or failed to set", ("result",)
        ),
        MetricDescription(
            "eelgrid_steward_ignored_events_total", _C, "Events that changed nothing, by the reason", ("reason",)
        ),
        MetricDescription("eelgrid_scrape_pages", _G, "Pages of services and jobs that are asked for in each interval"),
        MetricDescription("eelgrid_scrape_pages_read_total", _C, "Pages that were read"),
        MetricDescription(
            "eelgrid_scrape_failures_total", _C, "Pages that could not be had, by what stood between", ("kind",)
        ),
    ),
    "Kubernetes": (
        MetricDescription("eelgrid_kubernetes_leading", _G, "1 while this controller holds the Lease"),
        MetricDescription(
            "eelgrid_kubernetes_epoch", _G, "Number of the term in which it leads; no series while it does not"
        ),
        MetricDescription(
            "eelgrid_kubernetes_pods_waiting",
            _G,
            "Pods behind our gate by why: their wishes cannot be read, the API server denies the pin, others' gates, members of their gang are missing, no room, the core refuses, the patch is under way, the core has not answered",
            ("reason",),
        ),
        MetricDescription("eelgrid_kubernetes_pods_pinned", _G, "Pods that are sent to a node and not bound yet"),
        MetricDescription(
            "eelgrid_kubernetes_pods_unschedulable", _G, "Those of them that kube-scheduler cannot put there"
        ),
        MetricDescription(
            "eelgrid_kubernetes_writes_total",
            _C,
            "Patches of pods by what became of them; failed deletions are in there, too",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_recreated_total", _C, "Pinned pods that were deleted for their owner to make anew"
        ),
        MetricDescription(
            "eelgrid_kubernetes_flights",
            _G,
            "Pods on their way to a node whose plugin gives each unit its planned devices",
        ),
        MetricDescription(
            "eelgrid_kubernetes_flights_total",
            _C,
            "Pods that came there, and those nobody heard of in time",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_device_reports_total", _C, "Words of agents on the devices that pods hold"
        ),
        MetricDescription(
            "eelgrid_kubernetes_device_corrections_total",
            _C,
            "Replicas pointed at the devices that they hold, corrections that the state refused, pods made anew",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_pods_wrong_devices",
            _G,
            "Pods that hold other devices than planned, where nothing puts it right",
        ),
        MetricDescription(
            "eelgrid_kubernetes_notes_total",
            _C,
            "Events for people that were sent, or dropped for there were too many",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_conditions_total",
            _C,
            "Conditions of pods, that say why each waits, that were written, or not",
            ("result",),
        ),
        MetricDescription("eelgrid_kubernetes_rounds_total", _C, "Rounds of the gate"),
        MetricDescription("eelgrid_kubernetes_events_total", _C, "Events that they took"),
        MetricDescription("eelgrid_kubernetes_round_longest_seconds", _G, "The longest of them"),
        MetricDescription(
            "eelgrid_kubernetes_unreadable_total", _C, "Pods and nodes that could not be read, each time that they came"
        ),
        MetricDescription(
            "eelgrid_kubernetes_failures_total", _C, "Runs that ended by a fault and began anew from lists"
        ),
        MetricDescription("eelgrid_kubernetes_objects", _G, "Objects that are held", ("kind",)),
        MetricDescription("eelgrid_kubernetes_lists_total", _C, "Lists that were read whole", ("kind",)),
        MetricDescription("eelgrid_kubernetes_watches_total", _C, "Watches that were begun", ("kind",)),
        MetricDescription("eelgrid_kubernetes_watch_failures_total", _C, "Lists and watches that failed", ("kind",)),
        MetricDescription(
            "eelgrid_kubernetes_silence_seconds",
            _G,
            "Time since the API server last said anything of a kind; bookmarks come about each minute",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_reviews_total",
            _C,
            "New pods that the webhook gated, left alone or could not read, and requests that it refused; no series without a webhook",
            ("answer",),
        ),
    ),
    "Its process": (
        MetricDescription("process_cpu_seconds_total", _C, "Total user and system CPU time spent in seconds."),
        MetricDescription("process_virtual_memory_bytes", _G, "Virtual memory size in bytes."),
        MetricDescription("process_resident_memory_bytes", _G, "Resident memory size in bytes."),
        MetricDescription("process_start_time_seconds", _G, "Start time of the process since unix epoch in seconds."),
        MetricDescription("process_open_fds", _G, "Number of open file descriptors."),
        MetricDescription("process_max_fds", _G, "Maximum number of open file descriptors."),
    ),
}
METRICS: Mapping[str, MetricDescription] = {one.name: one for found in SECTIONS.values() for one in found}


def build_family(name: str, values: float | Mapping[str, float] | Mapping[tuple[str, str], float]) -> MetricFamily:
    """The numbers of one metric, by the values of its labels; KeyError for a name that is not in the list."""
    if not isinstance(values, Mapping):
        return MetricFamily(METRICS[name], {(): values})
    return MetricFamily(
        METRICS[name], {(key,) if isinstance(key, str) else key: value for key, value in values.items()}
    )
