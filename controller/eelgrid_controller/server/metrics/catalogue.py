"""The metric catalogue: name, type, labels and meaning of every metric of the controller.

`docs/generate.py` writes the reference page from it.
"""

from collections.abc import Mapping

from eelgrid_controller.energy.ledger import OTHER_NAMESPACES
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.openmetrics import MetricDescription, MetricFamily, MetricType

# Services, jobs and budgets that have series of their own; those that stand worst, where there are more.
SERIES_MOST = 100
# Pools with series of their own; the rest is summed up under OTHER, as it is of namespaces.
POOLS_MOST = 100
MODELS_MOST = 1000
# Constraints that pending work is counted by; a reason that is none of them is counted under OTHER.
PENDING_REASONS = tuple(sorted((*PendingConstraint, OTHER_NAMESPACES)))
PLAN_CHANGES = (
    "cancelled",
    "corrected",
    "deferred",
    "ended",
    "evicted",
    "limited",
    "moved",
    "node_fault",
    "partitioned",
    "placed",
    "preempted",
    "quarantined",
    "retried",
    "scaled",
)
BUCKETS_S: Mapping[str, tuple[float, ...]] = (
    dict.fromkeys(
        (
            "eelgrid_decision_duration_seconds",
            "eelgrid_journal_commit_duration_seconds",
            "eelgrid_event_loop_lag_seconds",
        ),
        (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    )
    | dict.fromkeys(
        ("eelgrid_objectives_cycle_duration_seconds", "eelgrid_objectives_allocation_duration_seconds"),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    )
    | {"eelgrid_gpu_idle_gap_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)}
)


_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
# By the title of their section in the reference.
SECTIONS: Mapping[str, tuple[MetricDescription, ...]] = {
    "The controller": (
        MetricDescription("eelgrid_controller_info", MetricType.INFO, "The running program", ("version",)),
        MetricDescription("eelgrid_state_revision", _G, "Events applied since the journal began"),
        MetricDescription("eelgrid_agents_connected", _G, "Agents with an open stream"),
        MetricDescription("eelgrid_commands_queued", _G, "Commands waiting in the queue"),
        MetricDescription(
            "eelgrid_kernels_interpreted", _G, "1 until kernels are compiled, while decisions are interpreted or wait"
        ),
        MetricDescription("eelgrid_event_loop_lag_seconds", _H, "How late the event loop runs a timer"),
        MetricDescription("eelgrid_plans_sent_total", _C, "Node plans sent to agents"),
        MetricDescription("eelgrid_following", _G, "1 while this controller follows another on the same PostgreSQL"),
        MetricDescription("eelgrid_following_revision", _G, "Events that a controller which follows has applied"),
        MetricDescription(
            "eelgrid_following_age_seconds",
            _G,
            "Seconds since a controller that follows last read the journal to its end",
        ),
        MetricDescription(
            "eelgrid_following_rebuilds_total",
            _C,
            "Times that a controller which follows built its state anew, since what it had read was taken back or removed",
        ),
        MetricDescription(
            "eelgrid_following_refusals_total",
            _C,
            "Calls refused with the address of who leads while this one followed",
        ),
        MetricDescription(
            "eelgrid_following_reads_total", _C, "Reads that this controller answered while it followed, as stale ones"
        ),
        MetricDescription(
            "eelgrid_leader_epoch", _G, "Epoch of this controller's term; each later leader has a higher one"
        ),
        MetricDescription(
            "eelgrid_leader_timeline",
            _G,
            "Timeline of the database's log in this controller's term; 0 without PostgreSQL",
        ),
        MetricDescription(
            "eelgrid_leader_refusals_total",
            _C,
            "Times that an agent refused this controller because it has met a later leader",
        ),
        MetricDescription(
            "eelgrid_leader_epoch_raises_total",
            _C,
            "Times that the epoch was raised because an agent had met a higher one",
        ),
        MetricDescription("eelgrid_samples_received_total", _C, "Samples of nodes received"),
        MetricDescription("eelgrid_samples_lost_total", _C, "Samples of nodes that were lost before they arrived"),
        MetricDescription(
            "eelgrid_attempt_reports_refused_total", _C, "Reports of processes that their workloads no longer have"
        ),
        MetricDescription(
            "eelgrid_batches_refused_total", _C, "Batches refused because their content is contradictory"
        ),
        MetricDescription("eelgrid_batches_duplicate_total", _C, "Batches received again"),
        MetricDescription("eelgrid_ingest_processes", _G, "Ingest processes that are connected to this controller"),
        MetricDescription("eelgrid_ingest_agents_connected", _G, "Agents connected by ingest processes"),
        MetricDescription(
            "eelgrid_ingest_received_batches_total", _C, "Batches of samples received by ingest processes"
        ),
        MetricDescription(
            "eelgrid_ingest_refused_total",
            _C,
            "What ingest processes handed on and was left out: batches and messages of streams that have ended or that break a rule, and streams",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_ingest_connected", _G, "1 while this ingest process is connected to the controller that leads"
        ),
        MetricDescription(
            "eelgrid_ingest_links_total", _C, "Times that this ingest process connected to a controller that leads"
        ),
        MetricDescription(
            "eelgrid_ingest_batches_total", _C, "Batches of samples that this ingest process took from agents"
        ),
        MetricDescription(
            "eelgrid_ingest_agents_waiting", _G, "Agents of this ingest process that wait for a controller that leads"
        ),
        MetricDescription(
            "eelgrid_ingest_kept_streams_total",
            _C,
            "Streams of agents that this ingest process kept when it lost the controller, by what became of them: handed over to one that leads, or ended",
            ("outcome",),
        ),
        MetricDescription(
            "eelgrid_ingest_dropped_messages_total", _C, "Messages for a lost controller, which agents send again"
        ),
        MetricDescription(
            "eelgrid_front_cluster_up",
            _G,
            "1 while a cluster behind this front answers, by the last read of its totals",
            ("cluster",),
        ),
        MetricDescription(
            "eelgrid_front_left_out_total",
            _C,
            "Decisions of this front that a cluster was left out of, because it did not answer in time",
            ("cluster",),
        ),
        MetricDescription(
            "eelgrid_front_workloads",
            _G,
            "Workloads that have not ended and that this front has placed into a cluster",
            ("cluster",),
        ),
        MetricDescription(
            "eelgrid_front_stuck_workloads",
            _G,
            "Workloads of this front of which the last call to a cluster failed: reserved, waiting or running there",
            ("cluster",),
        ),
        MetricDescription(
            "eelgrid_front_workloads_waiting", _G, "Workloads of this front that no cluster was chosen for yet"
        ),
        MetricDescription("eelgrid_agent_events_total", _C, "Events that agents reported", ("kind",)),
        MetricDescription(
            "eelgrid_answer_omitted_elements_total",
            _C,
            "Elements left out of responses, including agents' plans, because they violate the API contract, by call; the log names them",
            ("call",),
        ),
        MetricDescription(
            "eelgrid_delayed_agent_events_total",
            _C,
            "Events delayed, with the rest of their stream, because the node sends more than its rate limit",
        ),
        MetricDescription(
            "eelgrid_excess_calls_total",
            _C,
            "Calls refused because the client has too many in progress: calls, or watches",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_ended_connections_total",
            _C,
            "Connections closed by the controller, by reason: a flood of refused and reset calls, an expired certificate, a certificate authority that is no longer trusted, a response that the client does not read, or an idle connection when file descriptors run short",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_calls_refused_total",
            _C,
            "Calls, and requests for the live page, refused by authorization, by the role of the client's certificate and by what was needed: a role, `node` the certificate of that node, `date` a certificate that has not expired, `owner` the certificate of the workload's owner, or `user`, `namespace`, `queue` or `label` a right to the named one; no series without TLS",
            ("role", "needs"),
        ),
        MetricDescription(
            "eelgrid_registrations_refused_total",
            _C,
            "New nodes refused, by the registration limit that was reached: `peer` is the limit of one certificate or address, `all` the limit for all together",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_audit_events_total",
            _C,
            "Audited calls: those that change something, accepted or refused, and all calls refused by authorization",
            ("outcome",),
        ),
        MetricDescription(
            "eelgrid_audit_events_lost_total",
            _C,
            "Refused calls missing from the audit log because the disk could not be written",
        ),
        MetricDescription(
            "eelgrid_calls_without_role_total",
            _C,
            "Calls with a certificate without a role that were permitted because `--roles require` is not set, by the role that they would need; no series without TLS",
            ("needs",),
        ),
    ),
    "The fleet": (
        MetricDescription("eelgrid_nodes", _G, "Nodes by state", ("state",)),
        MetricDescription("eelgrid_workloads", _G, "Workloads by phase", ("phase",)),
        MetricDescription("eelgrid_workloads_refused_total", _C, "Submissions refused"),
        MetricDescription("eelgrid_decision_duration_seconds", _H, "Time to decide on one submission"),
        MetricDescription(
            "eelgrid_gpu_idle_gap_seconds",
            _H,
            "Time that a whole GPU was idle between processes of two jobs while the second waited, by the node's clock",
        ),
        MetricDescription("eelgrid_gpus", _G, "GPUs by model", ("model",)),
        MetricDescription("eelgrid_gpus_allocated_ratio", _G, "Allocated share of all GPUs"),
        MetricDescription("eelgrid_cpus_allocated_ratio", _G, "Allocated share of all CPUs"),
        MetricDescription(
            "eelgrid_gpu_turnover_ratio", _G, "GPU that work gave back lately for each GPU it took, in quarters"
        ),
        MetricDescription("eelgrid_measured_power_watts", _G, "Sum of fresh power readings by GPU model", ("model",)),
        MetricDescription("eelgrid_measured_gpus", _G, "GPUs with a fresh power reading"),
        MetricDescription("eelgrid_modelled_power_watts", _G, "Modelled power of the current placements"),
        MetricDescription(
            "eelgrid_model_power_error_ratio",
            _G,
            "Measured over modelled power, minus one, by model; of GPUs with a fresh reading on nodes without work under a power limit; below 0 the GPUs draw less than modelled",
            ("model",),
        ),
        MetricDescription("eelgrid_pool_power_watts", _G, "Sum of fresh power readings by node pool", ("pool",)),
        MetricDescription(
            "eelgrid_stale_nodes",
            _G,
            "Ready nodes with an agent whose newest sample is too old, or that have sent none",
        ),
        MetricDescription(
            "eelgrid_oldest_sample_age_seconds",
            _G,
            "Age of the newest sample of the ready node where it is oldest; no series before the first sample",
        ),
        MetricDescription(
            "eelgrid_fragmentation_ratio",
            _G,
            "Share of the free GPU capacity that the expected mix of tasks cannot use; no series while no GPU is free",
        ),
    ),
    "The plan": (
        MetricDescription(
            "eelgrid_pending_workloads",
            _G,
            "Pending workloads by the constraint that they wait for",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_plan_changes_total",
            _C,
            "Durable changes of the plan, by kind: workloads placed, moved, scaled, limited, cancelled or deferred, replicas found on other devices than planned, partitions, and nodes or GPUs quarantined",
            ("change",),
        ),
    ),
    "Savings": (
        MetricDescription(
            "eelgrid_saved_power_watts",
            _G,
            "Modelled watts saved compared with a plain best-fit placement of the same work on the same nodes at default power limits, for the replicas placed in both plans: `placement` is saved by other placements; `limits` is the most that lowered power limits save on these replicas while they run, and they run longer",
            ("part",),
        ),
        MetricDescription(
            "eelgrid_compared_power_watts",
            _G,
            "Modelled watts at default limits of all nodes with the replicas placed in both plans: as Eelgrid placed them (eelgrid), and by plain best fit (best_fit)",
            ("plan",),
        ),
        MetricDescription(
            "eelgrid_saved_energy_today_joules",
            _G,
            "Energy saved by placement since midnight (by the prices' offset from UTC), or since the controller's start if that is later: `eelgrid_saved_power_watts` of placement over time",
        ),
        MetricDescription(
            "eelgrid_compared_energy_joules_total",
            _C,
            "The same integrated over time; joules saved by placement are the increase under best_fit minus the increase under eelgrid",
            ("plan",),
        ),
        MetricDescription(
            "eelgrid_compared_replicas",
            _G,
            "Replicas placed in both plans, which are compared, and replicas placed in one plan only because the other has no capacity, which are in no power figure",
            ("plan",),
        ),
        MetricDescription("eelgrid_compared_gpus", _G, "The same, in allocated GPUs", ("plan",)),
        MetricDescription(
            "eelgrid_compared_since_timestamp_seconds",
            _G,
            "When the comparison started; work that ran at that time was placed by best fit in the order of submission",
        ),
        MetricDescription(
            "eelgrid_savings_failures_total",
            _C,
            "Comparisons that failed, or fell too many events behind, and were restarted",
            ("reason",),
        ),
    ),
    "Time": (
        MetricDescription(
            "eelgrid_clock_jumps_total", _C, "Jumps of the machine's wall clock, forward or back, by more than a second"
        ),
        MetricDescription(
            "eelgrid_clock_jump_seconds",
            _G,
            "Size of the last jump, negative when the clock went back; a jump that is undone within a minute is not followed",
        ),
    ),
    "The journal": (
        MetricDescription(
            "eelgrid_journal_writable",
            _G,
            "0 while a full or failing disk prevents the controller from accepting commands",
        ),
        MetricDescription(
            "eelgrid_journal_lag_seconds",
            _G,
            "How long the oldest command has waited to be written to disk; 0 while none waits",
        ),
        MetricDescription("eelgrid_journal_commit_duration_seconds", _H, "Time to write one batch to disk"),
        MetricDescription("eelgrid_journal_commits_total", _C, "Batches written to disk"),
        MetricDescription("eelgrid_journal_entries_total", _C, "Events written to disk"),
        MetricDescription("eelgrid_journal_written_bytes_total", _C, "Bytes of events written to disk"),
        MetricDescription("eelgrid_journal_checkpoints_total", _C, "Checkpoints written"),
        MetricDescription("eelgrid_journal_checkpoint_bytes", _G, "Size of the last checkpoint"),
        MetricDescription(
            "eelgrid_journal_rollbacks_total",
            _C,
            "How often an operator accepted the loss of acknowledged entries, as recorded in the journal",
        ),
        MetricDescription(
            "eelgrid_ahead_nodes",
            _G,
            "Nodes whose agents hold a plan that the journal does not contain: nothing is placed on them until they are reconciled (eelctl reconcile)",
        ),
        MetricDescription("eelgrid_unreported_nodes", _G, "Nodes whose agents have not reported since the start"),
        MetricDescription("eelgrid_starts_withheld", _G, "1 while work waits for agents, as entries may be lost"),
    ),
    "The energy ledger": (
        MetricDescription(
            "eelgrid_ledger_windows_total",
            _C,
            "Energy windows received from agents: stored (taken), already stored (again), not stored for lack of space and sent again later (dropped), refused, or with an implausible time and counted in the hour of arrival (unplaced)",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_ledger_damaged_parts",
            _G,
            "Hours and days of nodes, and names, that do not match their checksums and are left out of answers; checked with each answer, and day by day",
        ),
        MetricDescription(
            "eelgrid_ledger_failures_total",
            _C,
            "Failed attempts to open or write the ledger; windows are written again later",
        ),
        MetricDescription(
            "eelgrid_ledger_newest_window_age_seconds",
            _G,
            "Time since the end of the newest window on disk; no series before the first window since the start",
        ),
        MetricDescription(
            "eelgrid_ledger_size_bytes",
            _G,
            "Size of the ledger's file without free pages; measured every ten minutes",
        ),
        MetricDescription(
            "eelgrid_ledger_size_limit_bytes",
            _G,
            "Size beyond which the oldest hours and days are deleted, even if they were not exported",
        ),
        MetricDescription(
            "eelgrid_ledger_forgotten_rows_total",
            _C,
            "Rows deleted since the start, by reason: their age, or the file's size",
            ("reason",),
        ),
        MetricDescription(
            "eelgrid_ledger_export_lag_seconds",
            _G,
            "Time for which there have been rows that an exporter has not confirmed; no series without exporters",
            ("exporter",),
        ),
        MetricDescription(
            "eelgrid_ledger_export_changes", _G, "Hours that changed after an exporter confirmed them", ("exporter",)
        ),
        MetricDescription(
            "eelgrid_energy_today_joules",
            _G,
            "Energy of all GPUs since midnight (by the prices' offset from UTC), from the energy ledger, as `eelctl energy --since today --by namespace` shows it, active and idle; the largest hundred namespaces, the rest as `other`; no series while the ledger cannot be read",
            ("namespace", "part"),
        ),
        MetricDescription(
            "eelgrid_energy_today_cost",
            _G,
            "Cost of the same energy at the prices of its hours, PUE and carbon price included; no series without prices",
            ("currency",),
        ),
        MetricDescription(
            "eelgrid_energy_today_carbon_grams",
            _G,
            "Carbon dioxide of the same energy, PUE included; no series without a carbon intensity",
        ),
        MetricDescription(
            "eelgrid_ledger_energy_joules_total",
            _C,
            "Energy since the ledger began, by the namespace that is charged; it continues across restarts. `(unallocated)` and `(unattributed)` have no owner, `(none)` are owners without a namespace",
            ("namespace",),
        ),
    ),
    "Traces": (
        MetricDescription("eelgrid_traces_open", _G, "Placements being traced; no series without `--traces`"),
        MetricDescription(
            "eelgrid_traces_total",
            _C,
            "Finished traces of placements: in force on all nodes, cancelled before, or abandoned because of a limit",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_spans_total",
            _C,
            "Spans by result: accepted by the collector, refused by it, or dropped because the export queue was full",
            ("result",),
        ),
    ),
    "Remote write": (
        MetricDescription(
            "eelgrid_remote_write_samples_total",
            _C,
            "Samples by result: written; refused by the receiver; dropped because the buffer was full; skipped because their time is not after the last one written, or too far ahead; no series without `--remote-write`",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_remote_write_requests_total",
            _C,
            "Requests by result: written; retried after 5xx, 429 or no answer; refused; divided to find what is refused",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_remote_write_failures_total", _C, "Batches, windows and pages that could not be encoded"
        ),
        MetricDescription(
            "eelgrid_remote_write_overruns_total",
            _C,
            "Batches, windows and pages dropped before they were encoded because 50,000 waited",
        ),
        MetricDescription("eelgrid_remote_write_buffered_samples", _G, "Samples that wait for the receiver"),
        MetricDescription("eelgrid_remote_write_buffered_bytes", _G, "Bytes of these samples, compressed"),
        MetricDescription(
            "eelgrid_remote_write_newest_timestamp_seconds", _G, "Time of the newest sample that the receiver has taken"
        ),
    ),
    "Promises": (
        MetricDescription(
            "eelgrid_services",
            _G,
            "Services with objectives, by phase; unsteered ones have no metrics to observe",
            ("phase",),
        ),
        MetricDescription("eelgrid_jobs", _G, "Training jobs with an objective, by phase", ("phase",)),
        MetricDescription(
            "eelgrid_promise_windows_total",
            _C,
            "Windows of all services, by verdict: the objective kept, missed, or too few responses to judge",
            ("verdict",),
        ),
        MetricDescription(
            "eelgrid_promise_series_left_out",
            _G,
            "Services, jobs and budgets without series of their own because there are too many",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_service_windows_total",
            _C,
            "Windows of a service, by verdict; attainment is kept over kept and missed",
            ("workload", "verdict"),
        ),
        MetricDescription(
            "eelgrid_service_latency_seconds",
            _G,
            "The objective's latency quantile, measured in the last window",
            ("workload",),
        ),
        MetricDescription("eelgrid_service_latency_objective_seconds", _G, "The latency objective", ("workload",)),
        MetricDescription(
            "eelgrid_service_window_age_seconds", _G, "Time since the end of a service's last window", ("workload",)
        ),
        MetricDescription("eelgrid_service_replicas", _G, "Replicas, wanted and serving", ("workload", "state")),
        MetricDescription(
            "eelgrid_service_slowness_ratio",
            _G,
            "Estimated latency of a service relative to its profile; 1 is as the profile",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_service_reserve_ratio",
            _G,
            "Request rate that a service is planned for above its forecast because its objective was missed, as a share "
            "of the forecast",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_slowdown_ratio",
            _G,
            "Time of a job so far relative to its time at the largest measured limit, minus one",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_slowdown_promised_ratio",
            _G,
            "The largest slowdown that the objective allows at the end; no series for other objectives",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_energy_saved_ratio",
            _G,
            "Share of the energy at the largest measured limit that a job's current limit saves for the same work",
            ("workload",),
        ),
        MetricDescription(
            "eelgrid_job_power_limit_watts", _G, "Power limit of each GPU of a job, as read back", ("workload",)
        ),
        MetricDescription(
            "eelgrid_job_power_limit_wanted_watts", _G, "Power limit that each GPU of a job should have", ("workload",)
        ),
    ),
    "Power": (
        MetricDescription(
            "eelgrid_power_budget_limit_watts", _G, "Power that all GPUs under a budget may draw together", ("budget",)
        ),
        MetricDescription(
            "eelgrid_power_budget_drawn_watts",
            _G,
            "Measured power of the GPUs under a budget, as in `eelctl promises`; no series while none of them has a fresh reading",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_over_watts",
            _G,
            "Measured power beyond the budget, as in `eelctl promises`; 0 within it",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_claimed_watts",
            _G,
            "Claimed power of a budget, as in `eelctl promises`: the limits that the GPUs of managed jobs have or are about to get, and what other GPUs may draw",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_others_watts",
            _G,
            "The part of the claimed power that GPUs without power control may draw",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_room_watts",
            _G,
            "Power of a budget that is not claimed; below 0 while limits are being lowered",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_shortfall_watts",
            _G,
            "Power that objectives and lost nodes need beyond the budget",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_power_budget_unread_gpus",
            _G,
            "GPUs under a budget without a fresh power reading; the measured power does not include them",
            ("budget",),
        ),
        MetricDescription(
            "eelgrid_energy_price_per_joule",
            _G,
            "Current price, carbon and PUE included; no series without prices",
            ("currency",),
        ),
        MetricDescription("eelgrid_energy_price_ratio", _G, "Current price relative to its mean over the coming day"),
    ),
    "Spending limits": (
        MetricDescription(
            "eelgrid_spending_limit_gpu_seconds",
            _G,
            "Limit on GPU time in a period; the label is the limit without its amount",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_spending_spent_gpu_seconds",
            _G,
            "GPU time spent in the current period, as of the last check; shares and slices count as fractions",
            ("limit",),
        ),
        MetricDescription(
            "eelgrid_spending_limit_joules", _G, "Limit on device energy in a period, without PUE", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_spent_joules",
            _G,
            "Device energy spent, from the energy ledger; no series while it cannot be read",
            ("limit",),
        ),
        MetricDescription("eelgrid_spending_limit_money", _G, "Limit on money in a period", ("limit", "currency")),
        MetricDescription(
            "eelgrid_spending_spent_money", _G, "Money spent, from the energy ledger", ("limit", "currency")
        ),
        MetricDescription("eelgrid_spending_limit_grams", _G, "Limit on carbon dioxide in a period", ("limit",)),
        MetricDescription(
            "eelgrid_spending_spent_grams", _G, "Carbon dioxide emitted, from the energy ledger", ("limit",)
        ),
        MetricDescription("eelgrid_spending_ratio", _G, "Spent share of a limit, whatever its unit", ("limit",)),
        MetricDescription(
            "eelgrid_spending_warning_ratio", _G, "Share from which a limit counts as nearly spent", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_waiting_workloads", _G, "Workloads that wait because a limit is spent", ("limit",)
        ),
        MetricDescription(
            "eelgrid_spending_failures_total",
            _C,
            "Checks in which the ledger could not be read or the limits could not be evaluated",
        ),
    ),
    "Objectives": (
        MetricDescription("eelgrid_objectives_cycles_total", _C, "Control cycles over all objectives"),
        MetricDescription("eelgrid_objectives_failures_total", _C, "Control cycles that failed as a whole"),
        MetricDescription(
            "eelgrid_objectives_faults_total", _C, "Workloads skipped in a control cycle because of an error"
        ),
        MetricDescription("eelgrid_objectives_cycle_duration_seconds", _H, "Duration of a control cycle in its thread"),
        MetricDescription(
            "eelgrid_objectives_allocation_duration_seconds",
            _H,
            "Duration of a power budget allocation, which runs between control cycles",
        ),
        MetricDescription("eelgrid_objectives_commands_total", _C, "Commands carried out", ("command",)),
        MetricDescription(
            "eelgrid_objectives_refusals_total",
            _C,
            "Commands refused, by the rule that refused them",
            ("command", "rule"),
        ),
        MetricDescription(
            "eelgrid_objectives_limits_answered_total", _C, "Limits that nodes confirmed or failed to set", ("result",)
        ),
        MetricDescription(
            "eelgrid_objectives_ignored_events_total", _C, "Events without effect, by reason", ("reason",)
        ),
        MetricDescription(
            "eelgrid_scrape_pages", _G, "Metrics endpoints of services and jobs that are scraped in each interval"
        ),
        MetricDescription("eelgrid_scrape_pages_read_total", _C, "Successful scrapes"),
        MetricDescription("eelgrid_scrape_failures_total", _C, "Failed scrapes, by kind of failure", ("kind",)),
    ),
    "Kubernetes": (
        MetricDescription("eelgrid_kubernetes_leading", _G, "1 while this controller holds the Lease"),
        MetricDescription(
            "eelgrid_kubernetes_epoch",
            _G,
            "Number of the leadership term; no series while this controller does not lead",
        ),
        MetricDescription(
            "eelgrid_kubernetes_pods_waiting",
            _G,
            "Pods behind Eelgrid's gate, by reason: their annotations are invalid, the API server denies the pin, other controllers' gates, missing members of the gang, no capacity, refused by the core, the patch is in progress, the core has not answered",
            ("reason",),
        ),
        MetricDescription("eelgrid_kubernetes_pods_pinned", _G, "Pods pinned to a node and not bound yet"),
        MetricDescription(
            "eelgrid_kubernetes_pods_unschedulable", _G, "Pinned pods that kube-scheduler reports as unschedulable"
        ),
        MetricDescription(
            "eelgrid_kubernetes_writes_total",
            _C,
            "Patches and bindings of pods by result; failed deletions are included",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_recreated_total", _C, "Pinned pods deleted so that their owner recreates them"
        ),
        MetricDescription(
            "eelgrid_kubernetes_admission_pins_total",
            _C,
            "Pods placed at their admission: pinned, declined since no place was certain, late since the review's time ran out, confirmed when the pod was seen, expired since it was not, and changed since they were planned",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_admission_reservations",
            _G,
            "Places kept for pods that are being admitted and that no watch has shown yet",
        ),
        MetricDescription(
            "eelgrid_kubernetes_flights",
            _G,
            "Pods on their way to a node whose device plugin allocates the planned devices",
        ),
        MetricDescription(
            "eelgrid_kubernetes_flights_total",
            _C,
            "Such pods that arrived, and those whose arrival was not reported in time",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_device_reports_total", _C, "Reports of agents about the devices that pods hold"
        ),
        MetricDescription(
            "eelgrid_kubernetes_device_corrections_total",
            _C,
            "Replicas corrected to the devices that they hold, corrections that the core refused, and pods recreated",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_pods_wrong_devices",
            _G,
            "Pods that hold other devices than planned and that no mechanism corrects",
        ),
        MetricDescription(
            "eelgrid_kubernetes_notes_total",
            _C,
            "Kubernetes Events that were sent, or dropped because there were too many",
            ("result",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_conditions_total",
            _C,
            "Pod conditions that explain why a pod waits, by whether they were written",
            ("result",),
        ),
        MetricDescription("eelgrid_kubernetes_rounds_total", _C, "Reconcile rounds of the gate"),
        MetricDescription("eelgrid_kubernetes_events_total", _C, "Watch events processed by these rounds"),
        MetricDescription("eelgrid_kubernetes_round_longest_seconds", _G, "Duration of the longest round"),
        MetricDescription(
            "eelgrid_kubernetes_unreadable_total", _C, "Invalid pods and nodes, counted each time that one is received"
        ),
        MetricDescription(
            "eelgrid_kubernetes_failures_total", _C, "Runs that ended with an error and restarted from lists"
        ),
        MetricDescription("eelgrid_kubernetes_objects", _G, "Objects in the cache", ("kind",)),
        MetricDescription("eelgrid_kubernetes_lists_total", _C, "Complete lists read", ("kind",)),
        MetricDescription("eelgrid_kubernetes_watches_total", _C, "Watches started", ("kind",)),
        MetricDescription("eelgrid_kubernetes_watch_failures_total", _C, "Lists and watches that failed", ("kind",)),
        MetricDescription(
            "eelgrid_kubernetes_silence_seconds",
            _G,
            "Time since the API server last sent a watch event for a kind; bookmarks arrive about once a minute",
            ("kind",),
        ),
        MetricDescription(
            "eelgrid_kubernetes_reviews_total",
            _C,
            "New pods that the webhook gated, gave the scheduler eelgrid, gave a node, left unchanged or could not read, and requests that it refused; no series without a webhook",
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
