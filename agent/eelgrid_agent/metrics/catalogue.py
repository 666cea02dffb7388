"""Every metric of the agent, in the order of the page; docs/reference/agent-metrics.md and the renderer read this table.

Owns names, units, labels, help and sources. Must not know how they are
rendered.

Theory. A sum over any metric means something, so a joule, a byte and an error
are in exactly one series of a name: device energy is apart from what was
attributed of it, from what has no owner and from what owners had that are gone;
memory of an instance is under a name of its own, once for each GPU instance;
errors since the driver was loaded and over the part's life are two metrics.
Power of a module is not shown: each device on it tells the same. What has no
number has no series, and one series says why. Labels hold what is bounded by
the machine, or by the work on it: never a process id, command or user.
"""

from eelgrid_agent.metrics.frame import HOLDER_LABELS, SHARE_LABELS
from eelgrid_agent.metrics.gpu_catalogue import DEVICE, HEALTH, MIG
from eelgrid_agent.metrics.metric import Kind, Metric, Scope, Source, info, of_absences, of_attribute, told_apart
from eelgrid_protos.messages import Reading

__all__ = ["CATALOGUE", "HOST_ABSENT"]

_COUNTER = Kind.COUNTER
# The renderer fills it from the readings that it did not find.
HOST_ABSENT = "eelgrid_host_reading_absent"

_AGENT = (
    info("eelgrid_agent_info", Scope.AGENT, "This agent.", version="version"),
    of_attribute("eelgrid_agent_nodes", Scope.AGENT, "nodes", "Nodes of this process."),
    of_attribute(
        "eelgrid_agent_connected_nodes", Scope.AGENT, "connected_nodes", "Nodes with a stream to the controller."
    ),
    of_attribute("eelgrid_agent_samples_total", Scope.AGENT, "samples", "Ticks sampled.", kind=_COUNTER),
    of_attribute("eelgrid_agent_batches_total", Scope.AGENT, "batches", "Batches sent, resends too.", kind=_COUNTER),
    of_attribute(
        "eelgrid_agent_dropped_samples_total",
        Scope.AGENT,
        "dropped_samples",
        "Ticks dropped from a full spool.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_agent_connections_total",
        Scope.AGENT,
        "connections",
        "Connections that the controller welcomed.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_agent_refused_calls_total",
        Scope.AGENT,
        "refused_calls",
        "Calls of the node's own API refused for the role of the caller's certificate.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_agent_uncounted_seconds_total",
        Scope.AGENT,
        "uncounted_s",
        "Device-seconds whose energy is in no total.",
        kind=_COUNTER,
    ),
    of_attribute("eelgrid_agent_spool_ticks", Scope.AGENT, "spool_ticks", "Ticks not sent yet."),
    of_attribute(
        "eelgrid_agent_batches_under_way",
        Scope.AGENT,
        "batches_under_way",
        "Batches sent and not acknowledged.",
    ),
    of_attribute(
        "eelgrid_agent_sample_age_seconds",
        Scope.AGENT,
        "sample_age_s",
        "Age of the newest tick, of the node where it is oldest.",
    ),
    of_attribute(
        "eelgrid_agent_collection_duration_seconds",
        Scope.AGENT,
        "collection_s",
        "Time that the newest look took, by kind of look.",
        "look",
    ),
    of_attribute(
        "eelgrid_device_call_duration_seconds",
        Scope.AGENT,
        "calls",
        "Time that calls to the device library took, by call of the device port.",
        "call",
        kind=Kind.HISTOGRAM,
    ),
    of_attribute("process_cpu_seconds_total", Scope.PROCESS, "cpu_s", "CPU time of this process.", kind=_COUNTER),
    of_attribute("process_resident_memory_bytes", Scope.PROCESS, "resident_bytes", "Resident memory of this process."),
    of_attribute("process_start_time_seconds", Scope.PROCESS, "started_s", "When this process began, since 1970."),
    of_attribute("process_threads", Scope.PROCESS, "threads", "Threads of this process."),
    of_attribute(
        "eelgrid_worker_starts_total",
        Scope.WORKER,
        "starts",
        "Processes started to hold the driver.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_worker_hangs_total",
        Scope.WORKER,
        "hangs",
        "Calls to the driver that never came back, and processes that it ended.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_worker_stuck_processes",
        Scope.WORKER,
        "left_behind",
        "Processes that hang in the driver and cannot be ended until the node is booted anew.",
    ),
    of_attribute("eelgrid_worker_hung_devices", Scope.WORKER, "hung_gpus", "Devices set apart because they hang."),
    of_attribute(
        "eelgrid_worker_cpu_seconds_total",
        Scope.WORKER,
        "cpu_s",
        "CPU time of the processes that hold the driver now; starts over with them.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_worker_resident_memory_bytes",
        Scope.WORKER,
        "resident_bytes",
        "Resident memory of the processes that hold the driver.",
    ),
)

_NODE = (
    info(
        "eelgrid_node_info",
        Scope.NODE,
        "This node.",
        node="name",
        pool="pool",
        driver_version="driver_version",
        boot_id="boot_id",
        access="access",
        simulated="simulated",
    ),
    of_attribute("eelgrid_host_cpus", Scope.HOST, "cpus", "CPUs of the host."),
    of_attribute("eelgrid_host_memory_size_bytes", Scope.HOST, "memory_bytes", "Memory of the host."),
    Metric(
        name="eelgrid_host_cpu_utilization_ratio", kind=Kind.GAUGE, scope=Scope.HOST,
        help="Share of the host's CPUs in use.", sources=(Source(of=Reading.HOST_CPU_UTILIZATION_RATIO),),
    ),
    Metric(
        name="eelgrid_host_memory_used_bytes", kind=Kind.GAUGE, scope=Scope.HOST,
        help="Memory of the host in use.", sources=(Source(of=Reading.HOST_MEMORY_USED_BYTES),),
    ),
    Metric(
        name="eelgrid_host_cpu_energy_joules_total", kind=_COUNTER, scope=Scope.HOST,
        help="Energy of all CPU packages since the agent began to count.",
        sources=(Source(of=Reading.HOST_CPU_ENERGY_J),),
    ),
    Metric(
        name="eelgrid_host_memory_energy_joules_total", kind=_COUNTER, scope=Scope.HOST,
        help="Energy of the host's memory since the agent began to count.",
        sources=(Source(of=Reading.HOST_MEMORY_ENERGY_J),),
    ),
    told_apart(
        "eelgrid_host_disk_bytes_total", "direction",
        {"read": Reading.HOST_DISK_READ_BYTES, "written": Reading.HOST_DISK_WRITTEN_BYTES},
        "Bytes moved by the host's disks since it booted.", kind=_COUNTER, scope=Scope.HOST,
    ),
    told_apart(
        "eelgrid_host_network_bytes_total", "direction",
        {"received": Reading.HOST_NETWORK_RECEIVED_BYTES, "sent": Reading.HOST_NETWORK_SENT_BYTES},
        "Bytes moved by the host's network interfaces since it booted.", kind=_COUNTER, scope=Scope.HOST,
    ),
    of_absences(HOST_ABSENT, Scope.HOST, "1 for each reading of the host that cannot be had, and why."),
)  # fmt: skip

_GUARD = (
    of_attribute(
        "eelgrid_guard_plan_epoch", Scope.GUARD, "plan_epoch", "Epoch of the plan in force; 0 before the first."
    ),
    of_attribute(
        "eelgrid_guard_enforcing", Scope.GUARD, "enforcing", "1 where the plan may change devices, 0 to observe."
    ),
    of_attribute(
        "eelgrid_guard_lease_left_seconds",
        Scope.GUARD,
        "lease_left_s",
        "Time until the plan lapses unless the controller renews it.",
    ),
    of_attribute(
        "eelgrid_guard_power_budget_watts", Scope.GUARD, "budget_w", "Power that all devices may draw together."
    ),
    of_attribute(
        "eelgrid_guard_power_budget_fixed_devices",
        Scope.GUARD,
        "budget_fixed",
        "Devices that an enforced power budget cannot lower now: they tell no range of limits, refuse, are lost or left "
        "alone; no series without such a budget.",
    ),
    of_attribute(
        "eelgrid_guard_drift_repairs_total",
        Scope.GUARD,
        "drift_repairs",
        "Settings put back after something else changed them.",
        "setting",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_guard_refusals_total",
        Scope.GUARD,
        "refusals",
        "Items of plans that were refused, by the rule that refused them.",
        "rule",
        kind=_COUNTER,
    ),
    of_attribute("eelgrid_gpu_quarantined", Scope.GPU, "quarantined", "1 while a failing device takes no work."),
    of_attribute(
        "eelgrid_gpu_enforcement_suspended",
        Scope.GPU,
        "enforcement_suspended",
        "1 while repairs of the device's settings are given up.",
    ),
    of_attribute(
        "eelgrid_gpu_layout_unmet",
        Scope.GPU,
        "layout_unmet",
        "1 while the MIG layout of the plan in force is not reached; no series on parts without MIG.",
    ),
)

_ATTRIBUTION = (
    of_attribute(
        "eelgrid_workload_gpu_energy_joules_total",
        Scope.OWNERS,
        "energy_j",
        "Energy by owner; what has none, and what owners had that are gone, is in metrics of its own.",
        *SHARE_LABELS,
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_gpu_idle_since_timestamp_seconds",
        Scope.OWNERS,
        "idle_since_s",
        "When a device or slice that the owner holds began to idle, since 1970, once that is five minutes ago; no series "
        "while it works or nobody holds it.",
        *HOLDER_LABELS,
    ),
    of_attribute(
        "eelgrid_gpu_unattributed_energy_joules_total",
        Scope.GPU,
        "unattributed_j",
        "Energy without an owner: of nobody's share (unallocated), of whom cannot be named (unattributed), or of owners for "
        "whom there was no room (other).",
        "reason",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_gpu_ended_energy_joules_total",
        Scope.GPU,
        "ended_j",
        "Energy of owners that have no series any more; rates of theirs have counted it, so add it to totals only.",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_workload_series_left_out",
        Scope.OWNERS,
        "left_out",
        "Owners without a series of their own, for there are too many; their energy is in no series.",
    ),
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = _AGENT + _NODE + _GUARD + DEVICE + HEALTH + MIG + _ATTRIBUTION
