"""Metrics of the agent: every one of them in exposition order, and the vocabulary in which it is written.

The agent renders its page from them, the controller names by them what it writes to long-term storage (remote write),
and the reference page lists them. How metrics are written down is `openmetrics`.

Theory. A metric has one subject (its scope), and the scope's labels name the
subject in every series; a metric's own labels come after them. Numbers come
from readings, scaled to the base unit in the name, or from an attribute of the
subject's view in the frame: a number is one series, a mapping is one series
for each of its keys (several labels are a tuple), None is no series. A reading that is a code becomes one
series for each state, and a reading that is a mask one for each bit, 0 or 1:
numbers that mean something else when summed are not shown.

A sum over any metric means something, so a joule, a byte and an error
are in exactly one series of a name: device energy is apart from what was
attributed of it, from what has no owner and from what owners had that are gone;
memory of an instance is under a name of its own, once for each GPU instance;
errors since the driver was loaded and over the part's life are two metrics.
Power of a module is not shown: each device on it tells the same. What has no
number has no series, and one series says why. Labels hold what is bounded by
the machine, or by the work on it: never a process id, command or user.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from eelgrid_protos.messages import Reading
from eelgrid_protos.openmetrics import MetricDescription, MetricType

# Who energy may be attributed to. No process id, command or user: they name people and never end.
OWNER_LABELS = (
    "owner",
    "gpu_instance",
    "namespace",
    "pod",
    "container",
    "slurm_job",
    "step",
    "workload",
    "unit",
    "ray_job",
)
HOLDER_LABELS = ("gpu", *OWNER_LABELS)
# What of the device's energy it is, such as active, how the share was found, and how far to trust it.
SHARE_LABELS = (*HOLDER_LABELS, "part", "method", "confidence")


class MetricScope(Enum):
    """The subject of a metric; the value is the view of the frame that holds its numbers."""

    AGENT = "AgentView"
    PROCESS = "ProcessView"
    WORKER = "WorkerView"
    NODE = "NodeView"
    HOST = "HostView"
    GUARD = "GuardView"
    GPU = "GpuView"
    INSTANCE = "GpuInstance"
    COMPUTE = "ComputeInstance"
    OWNERS = "OwnersView"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that name the subject."""
        return _SCOPE_LABELS.get(self, ())


# One process serves one machine, which the scraper already names: its own numbers need no label.
_SCOPE_LABELS = {
    MetricScope.GPU: ("gpu",),
    MetricScope.INSTANCE: ("gpu", "gpu_instance"),
    MetricScope.COMPUTE: ("gpu", "gpu_instance", "compute_instance"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """One origin of a metric's numbers: a reading, or an attribute of the view, dotted.

    `labels` are the values of the metric's own labels where one reading is one series.
    """

    of: Reading | str
    labels: tuple[str, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(MetricDescription):
    """One metric of the agent.

    `states` turns a code into one series for each state and `bits` a mask into
    one for each bit; what neither names is `other`. `facts` are the label and
    the attribute of each part of an info metric.
    """

    scope: MetricScope
    sources: tuple[MetricSource, ...] = ()
    states: tuple[tuple[int, str], ...] = ()
    bits: tuple[tuple[int, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label of every series, in order."""
        return self.scope.labels + self.labels + tuple(label for label, _ in self.facts)

    @property
    def code_names(self) -> tuple[str, ...]:
        """The values of the last label of a code or a mask, `other` at the end; empty for a plain number."""
        codes = self.states or self.bits
        return (*(name for _, name in codes), "other") if codes else ()

    def split_code(self, code: int) -> list[int]:
        """The numbers of the series of a code, in the order of `code_names`; 0 is what does not hold."""
        if self.bits:
            bits = [bit for bit, _ in self.bits]
            return [code & bit for bit in bits] + [code & ~sum(bits)]
        states = [state for state, _ in self.states]
        return [int(code == state) for state in states] + [int(code not in states)]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The readings that it shows."""
        return tuple(source.of for source in self.sources if isinstance(source.of, Reading))


def gpu_metric(
    name: str,
    reading: Reading,
    text: str,
    *,
    kind: MetricType = MetricType.GAUGE,
    scale: float = 1.0,
    states: tuple[tuple[int, str], ...] = (),
    bits: tuple[tuple[int, str], ...] = (),
    labels: tuple[str, ...] = (),
) -> Metric:
    """One reading of a device."""
    return Metric(
        name=f"eelgrid_gpu_{name}",
        kind=kind,
        help=text,
        scope=MetricScope.GPU,
        labels=labels,
        states=states,
        bits=bits,
        sources=(MetricSource(of=reading, scale=scale),),
    )


def labelled_metric(
    name: str,
    label: str,
    sources: dict[str, Reading],
    text: str,
    *,
    kind: MetricType = MetricType.COUNTER,
    scope: MetricScope = MetricScope.GPU,
) -> Metric:
    """A metric of several readings of one quantity, distinguished by one label."""
    return Metric(
        name=name,
        kind=kind,
        help=text,
        scope=scope,
        labels=(label,),
        sources=tuple(MetricSource(of=reading, labels=(value,)) for value, reading in sources.items()),
    )


def attribute_metric(
    name: str, scope: MetricScope, path: str, text: str, *labels: str, kind: MetricType = MetricType.GAUGE
) -> Metric:
    """An attribute of a view."""
    return Metric(name=name, kind=kind, help=text, scope=scope, labels=labels, sources=(MetricSource(of=path),))


def info_metric(name: str, scope: MetricScope, text: str, **facts: str) -> Metric:
    """What a subject is; each fact is a label and the attribute that it shows."""
    return Metric(name=name, kind=MetricType.INFO, help=text, scope=scope, facts=tuple(facts.items()))


def absence_metric(name: str, scope: MetricScope, text: str) -> Metric:
    """Why readings of a subject have no series; the renderer knows."""
    return Metric(name=name, kind=MetricType.GAUGE, help=text, scope=scope, labels=("reading", "reason"))


def _reading_metric(
    name: str, scope: MetricScope, reading: Reading, text: str, kind: MetricType = MetricType.GAUGE
) -> Metric:
    return Metric(name=name, kind=kind, help=text, scope=scope, sources=(MetricSource(of=reading),))


def instance_metric(name: str, reading: Reading, text: str) -> Metric:
    """One reading of a GPU instance."""
    return _reading_metric(f"eelgrid_gpu_instance_{name}", MetricScope.INSTANCE, reading, text)


def _host_metric(name: str, reading: Reading, text: str, kind: MetricType = MetricType.GAUGE) -> Metric:
    return _reading_metric(f"eelgrid_host_{name}", MetricScope.HOST, reading, text, kind)


def _attributes(scope: MetricScope, prefix: str) -> Callable[..., Metric]:
    """A builder of metrics of one scope, whose names begin alike, from attributes of its view."""

    def build_metric(name: str, path: str, text: str, *labels: str, kind: MetricType = MetricType.GAUGE) -> Metric:
        return attribute_metric(f"{prefix}_{name}", scope, path, text, *labels, kind=kind)

    return build_metric


_agent_attribute = _attributes(MetricScope.AGENT, "eelgrid_agent")
_process_attribute = _attributes(MetricScope.PROCESS, "process")
_worker_attribute = _attributes(MetricScope.WORKER, "eelgrid_worker")
_host_attribute = _attributes(MetricScope.HOST, "eelgrid_host")
_guard_attribute = _attributes(MetricScope.GUARD, "eelgrid_guard")
_gpu_attribute = _attributes(MetricScope.GPU, "eelgrid_gpu")

_COUNTER = MetricType.COUNTER
_HERTZ_PER_MHZ = 1e6
# The devices of one module each tell the power of all of it, and nothing tells which devices those are.
NOT_SHOWN = frozenset({Reading.MODULE_POWER_W})
# The renderer fills these from the readings that it did not find.
GPU_ABSENT = "eelgrid_gpu_reading_absent"
INSTANCE_ABSENT = "eelgrid_gpu_instance_reading_absent"

# NVML's clocks event reasons (nvml.h, nvmlClocksEventReason*).
_EVENT_REASONS = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks"),
    (0x4, "software_power_cap"),
    (0x8, "hardware_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "software_thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "hardware_power_brake"),
    (0x100, "display_clocks"),
)
# NVML_GPU_RECOVERY_ACTION_* and NVML_GPU_FABRIC_STATE_*, and FABRIC_FAILED.
_RECOVERY_ACTIONS = (
    (0, "none"),
    (1, "gpu_reset"),
    (2, "node_reboot"),
    (3, "drain_p2p"),
    (4, "drain_and_reset"),
    (5, "recover_imex_domain"),
    (6, "bus_reset"),
    (7, "system_reboot"),
)
_FABRIC_STATES = ((0, "not_supported"), (1, "not_started"), (2, "in_progress"), (3, "completed"), (4, "failed"))

DEVICE_METRICS = (
    info_metric(
        "eelgrid_gpu_info",
        MetricScope.GPU,
        "Identity of a device; join on gpu.",
        index="gpu.index",
        product="gpu.product",
        model="gpu.model",
        pci_bus_id="gpu.pci_bus_id",
    ),
    _gpu_attribute("up", "up", "1 while the device answers, 0 while it is lost."),
    _gpu_attribute("cordoned", "cordoned", "1 while the device takes no new work."),
    _gpu_attribute("reading_age_seconds", "ages_s", "Age of the device's newest readings, by kind of reading.", "look"),
    absence_metric(GPU_ABSENT, MetricScope.GPU, "1 for each device reading that is not available, by reason."),
    gpu_metric("power_watts", Reading.POWER_W, "Board power, instantaneous where the GPU supports it."),
    gpu_metric("power_average_watts", Reading.POWER_AVERAGE_W, "Board power, averaged by the GPU over about a second."),
    gpu_metric("memory_power_watts", Reading.MEMORY_POWER_W, "Power of the device's memory, a part of board power."),
    gpu_metric("energy_joules_total", Reading.ENERGY_J, "Energy since the agent began to count.", kind=_COUNTER),
    _gpu_attribute(
        "energy_uncertainty_joules",
        "energy_uncertainty_j",
        "Uncertainty of the energy counted: the sensor's gain, the ends, and what was integrated.",
    ),
    gpu_metric("power_limit_watts", Reading.POWER_LIMIT_W, "Power limit that the device enforces."),
    gpu_metric("power_limit_requested_watts", Reading.POWER_LIMIT_REQUESTED_W, "Requested power limit."),
    _gpu_attribute("power_limit_default_watts", "gpu.power_limit_default_w", "Default power limit of the device."),
    _gpu_attribute("power_limit_min_watts", "gpu.power_limit_min_w", "Lowest power limit that the device accepts."),
    _gpu_attribute("power_limit_max_watts", "gpu.power_limit_max_w", "Highest power limit that the device accepts."),
    gpu_metric("utilization_ratio", Reading.UTILIZATION_RATIO, "Share of the last period in which a kernel ran."),
    gpu_metric(
        "memory_utilization_ratio",
        Reading.MEMORY_UTILIZATION_RATIO,
        "Share of the last period in which memory was read or written.",
    ),
    gpu_metric("memory_used_bytes", Reading.MEMORY_USED_BYTES, "Memory in use, without the driver's reserve."),
    gpu_metric("memory_reserved_bytes", Reading.MEMORY_RESERVED_BYTES, "Memory reserved by the driver."),
    _gpu_attribute("memory_size_bytes", "gpu.memory_bytes", "Memory of the device."),
    gpu_metric("sm_clock_hertz", Reading.SM_CLOCK_MHZ, "Clock of the streaming multiprocessors.", scale=_HERTZ_PER_MHZ),
    gpu_metric("memory_clock_hertz", Reading.MEMORY_CLOCK_MHZ, "Clock of the memory.", scale=_HERTZ_PER_MHZ),
    gpu_metric("temperature_celsius", Reading.TEMPERATURE_C, "Temperature of the device."),
    gpu_metric("memory_temperature_celsius", Reading.MEMORY_TEMPERATURE_C, "Temperature of the memory."),
    gpu_metric("performance_state", Reading.PERFORMANCE_STATE, "Performance state, from 0, the fastest, to 15."),
    gpu_metric(
        "clocks_event_active",
        Reading.EVENT_REASONS_MASK,
        "1 for each reason that currently holds the clocks below their maximum.",
        labels=("reason",),
        bits=_EVENT_REASONS,
    ),
    gpu_metric("graphics_activity_ratio", Reading.GRAPHICS_ACTIVITY_RATIO, "Share of time in which any engine worked."),
    gpu_metric("sm_activity_ratio", Reading.SM_ACTIVITY_RATIO, "Share of multiprocessors with work, over time."),
    gpu_metric("sm_occupancy_ratio", Reading.SM_OCCUPANCY_RATIO, "Resident warps as a share of the maximum."),
    gpu_metric("tensor_activity_ratio", Reading.TENSOR_ACTIVITY_RATIO, "Share of time in which tensor pipes worked."),
    gpu_metric("memory_activity_ratio", Reading.MEMORY_ACTIVITY_RATIO, "Share of memory bandwidth in use."),
    gpu_metric(
        "fp16_activity_ratio", Reading.FP16_ACTIVITY_RATIO, "Share of time in which half-precision pipes worked."
    ),
    gpu_metric(
        "fp32_activity_ratio", Reading.FP32_ACTIVITY_RATIO, "Share of time in which single-precision pipes worked."
    ),
    gpu_metric(
        "fp64_activity_ratio", Reading.FP64_ACTIVITY_RATIO, "Share of time in which double-precision pipes worked."
    ),
    gpu_metric("processes", Reading.PROCESSES, "Processes with a context on the device."),
    _gpu_attribute(
        "anomaly",
        "anomalies",
        "1 for each current anomaly of the device: allocated and not used, or used and not allocated.",
        "anomaly",
    ),
)

HEALTH_METRICS = (
    _gpu_attribute(
        "xid_errors_total",
        "xids",
        "Errors reported by the driver since the agent started, by XID.",
        "xid",
        kind=_COUNTER,
    ),
    _gpu_attribute(
        "xid_last_timestamp_seconds",
        "xid_last_s",
        "When the driver last reported the XID, in seconds since 1970; alert on this, because increase() misses the first report.",
        "xid",
    ),
    labelled_metric(
        "eelgrid_gpu_ecc_errors_total",
        "severity",
        {"corrected": Reading.ECC_CORRECTED_VOLATILE, "uncorrected": Reading.ECC_UNCORRECTED_VOLATILE},
        "Memory errors since the driver was loaded.",
    ),
    labelled_metric(
        "eelgrid_gpu_ecc_lifetime_errors_total",
        "severity",
        {"corrected": Reading.ECC_CORRECTED_AGGREGATE, "uncorrected": Reading.ECC_UNCORRECTED_AGGREGATE},
        "Memory errors over the life of the GPU.",
    ),
    labelled_metric(
        "eelgrid_gpu_remapped_rows_total",
        "severity",
        {"corrected": Reading.REMAPPED_ROWS_CORRECTABLE, "uncorrected": Reading.REMAPPED_ROWS_UNCORRECTABLE},
        "Memory rows remapped over the life of the GPU, by the errors that caused it.",
    ),
    gpu_metric("row_remap_pending", Reading.ROW_REMAP_PENDING, "1 while rows wait for a reset to be remapped."),
    gpu_metric("row_remap_failed", Reading.ROW_REMAP_FAILED, "1 if rows could not be remapped: replace the GPU."),
    gpu_metric(
        "recovery_action",
        Reading.RECOVERY_ACTION,
        "1 for the recovery action that the driver requests.",
        labels=("action",),
        states=_RECOVERY_ACTIONS,
    ),
    gpu_metric("pcie_link_generation", Reading.PCIE_LINK_GENERATION, "Current generation of the PCIe link."),
    gpu_metric("pcie_link_lanes", Reading.PCIE_LINK_WIDTH, "Current number of lanes of the PCIe link."),
    gpu_metric("pcie_replays_total", Reading.PCIE_REPLAYS, "PCIe packets sent again.", kind=_COUNTER),
    labelled_metric(
        "eelgrid_gpu_pcie_throughput_bytes_per_second",
        "direction",
        {"sent": Reading.PCIE_SENT_BYTES_PER_S, "received": Reading.PCIE_RECEIVED_BYTES_PER_S},
        "PCIe traffic over the GPU's own measuring interval; the GPU has no counter.",
        kind=MetricType.GAUGE,
    ),
    labelled_metric(
        "eelgrid_gpu_nvlink_bytes_total",
        "direction",
        {"sent": Reading.NVLINK_SENT_BYTES, "received": Reading.NVLINK_RECEIVED_BYTES},
        "Bytes over all NVLinks since the driver was loaded.",
    ),
    gpu_metric("nvlink_active_links", Reading.NVLINK_ACTIVE_LINKS, "NVLinks that are up."),
    gpu_metric(
        "nvlink_errors_total", Reading.NVLINK_ERRORS, "NVLink errors since the driver was loaded.", kind=_COUNTER
    ),
    gpu_metric(
        "fabric_state",
        Reading.FABRIC_STATE,
        "1 for the state of the device's registration with the NVLink fabric.",
        labels=("state",),
        states=_FABRIC_STATES,
    ),
)


MIG_METRICS = (
    _gpu_attribute("mig_enabled", "mig_enabled", "1 while MIG is enabled; no series on models without MIG."),
    _gpu_attribute("mig_pending", "mig_pending", "1 while a change of MIG mode waits for a reset."),
    info_metric(
        "eelgrid_gpu_instance_info",
        MetricScope.INSTANCE,
        "A MIG GPU instance; start is its first memory slice.",
        profile="profile",
        profile_id="profile_id",
        start="start",
        size="size",
    ),
    info_metric(
        "eelgrid_compute_instance_info",
        MetricScope.COMPUTE,
        "A MIG compute instance; uuid is the one that a process opens.",
        uuid="uuid",
        profile_id="profile_id",
        generation="generation",
    ),
    absence_metric(
        INSTANCE_ABSENT, MetricScope.INSTANCE, "1 for each reading of a GPU instance that is not available, by reason."
    ),
    instance_metric(
        "memory_used_bytes", Reading.MEMORY_USED_BYTES, "Memory of the instance in use; also included in the device's."
    ),
    instance_metric(
        "graphics_activity_ratio", Reading.GRAPHICS_ACTIVITY_RATIO, "Share of time in which any engine worked."
    ),
    instance_metric(
        "sm_activity_ratio", Reading.SM_ACTIVITY_RATIO, "Share of its multiprocessors with work, over time."
    ),
    instance_metric("sm_occupancy_ratio", Reading.SM_OCCUPANCY_RATIO, "Resident warps as a share of the maximum."),
    instance_metric(
        "tensor_activity_ratio", Reading.TENSOR_ACTIVITY_RATIO, "Share of time in which tensor pipes worked."
    ),
    instance_metric("memory_activity_ratio", Reading.MEMORY_ACTIVITY_RATIO, "Share of its memory bandwidth in use."),
)


# The renderer fills it from the readings that it did not find.
HOST_ABSENT = "eelgrid_host_reading_absent"

_AGENT = (
    info_metric("eelgrid_agent_info", MetricScope.AGENT, "The running agent.", version="version"),
    _agent_attribute("nodes", "nodes", "Nodes served by this process."),
    _agent_attribute("connected_nodes", "connected_nodes", "Nodes with a stream to the controller."),
    _agent_attribute("samples_total", "samples", "Ticks sampled.", kind=_COUNTER),
    _agent_attribute("batches_total", "batches", "Batches sent, including resends.", kind=_COUNTER),
    _agent_attribute(
        "dropped_samples_total", "dropped_samples", "Ticks dropped because the spool was full.", kind=_COUNTER
    ),
    _agent_attribute("connections_total", "connections", "Connections that the controller accepted.", kind=_COUNTER),
    _agent_attribute(
        "term_refusals_total",
        "term_refusals",
        "Messages of controllers that were not obeyed because another one has led since.",
        kind=_COUNTER,
    ),
    _agent_attribute(
        "refused_calls_total",
        "refused_calls",
        "Calls of the agent's own API refused because of the role of the caller's certificate.",
        kind=_COUNTER,
    ),
    _agent_attribute(
        "leased_devices",
        "leases",
        "GPUs and MIG slices leased to engines of this node; unknown where it cannot be found out whether the owner exists.",
        "engine",
        "state",
    ),
    _agent_attribute(
        "lease_refusals_total",
        "lease_refusals",
        "Devices not given to an engine because another one held them.",
        "engine",
        kind=_COUNTER,
    ),
    _agent_attribute(
        "reclaimed_devices_total", "lease_reclaims", "Leases ended because their owners were gone.", kind=_COUNTER
    ),
    _agent_attribute(
        "disputed_devices", "lease_disputes", "Devices that an engine uses although another one has their lease."
    ),
    _agent_attribute(
        "uncounted_seconds_total",
        "uncounted_s",
        "Device-seconds whose energy is missing from every total.",
        kind=_COUNTER,
    ),
    _agent_attribute("spool_ticks", "spool_ticks", "Ticks in the spool, not sent yet."),
    _agent_attribute("batches_under_way", "batches_under_way", "Batches sent and not acknowledged yet."),
    _agent_attribute("sample_age_seconds", "sample_age_s", "Age of the newest tick, for the node where it is oldest."),
    _agent_attribute(
        "collection_duration_seconds", "collection_s", "Duration of the newest reading, by kind of reading.", "look"
    ),
    attribute_metric(
        "eelgrid_device_call_duration_seconds",
        MetricScope.AGENT,
        "calls",
        "Duration of calls to the device library, by call of the device port.",
        "call",
        kind=MetricType.HISTOGRAM,
    ),
    _process_attribute("cpu_seconds_total", "cpu_s", "CPU time of this process.", kind=_COUNTER),
    _process_attribute("resident_memory_bytes", "resident_bytes", "Resident memory of this process."),
    _process_attribute("start_time_seconds", "started_s", "Start time of this process, in seconds since 1970."),
    _process_attribute("threads", "threads", "Threads of this process."),
    _worker_attribute("starts_total", "starts", "Driver processes started.", kind=_COUNTER),
    _worker_attribute(
        "hangs_total", "hangs", "Driver calls that never returned, and driver processes that died.", kind=_COUNTER
    ),
    _worker_attribute(
        "stuck_processes",
        "left_behind",
        "Processes that hang in the driver and cannot be ended before the node is rebooted.",
    ),
    _worker_attribute("hung_devices", "hung_gpus", "Devices isolated because they hang."),
    _worker_attribute(
        "cpu_seconds_total",
        "cpu_s",
        "CPU time of the current driver processes; resets when they restart.",
        kind=_COUNTER,
    ),
    _worker_attribute("resident_memory_bytes", "resident_bytes", "Resident memory of the driver processes."),
)

_NODE = (
    info_metric(
        "eelgrid_node_info",
        MetricScope.NODE,
        "This node.",
        node="name",
        pool="pool",
        driver_version="driver_version",
        boot_id="boot_id",
        access="access",
        simulated="simulated",
    ),
    _host_attribute("cpus", "cpus", "CPUs of the host."),
    _host_attribute("memory_size_bytes", "memory_bytes", "Memory of the host."),
    _host_metric("cpu_utilization_ratio", Reading.HOST_CPU_UTILIZATION_RATIO, "Share of the host's CPUs in use."),
    _host_metric("memory_used_bytes", Reading.HOST_MEMORY_USED_BYTES, "Memory of the host in use."),
    _host_metric(
        "cpu_energy_joules_total",
        Reading.HOST_CPU_ENERGY_J,
        "Energy of all CPU packages since the agent began to count.",
        kind=_COUNTER,
    ),
    _host_metric(
        "memory_energy_joules_total",
        Reading.HOST_MEMORY_ENERGY_J,
        "Energy of the host's memory since the agent began to count.",
        kind=_COUNTER,
    ),
    labelled_metric(
        "eelgrid_host_disk_bytes_total",
        "direction",
        {"read": Reading.HOST_DISK_READ_BYTES, "written": Reading.HOST_DISK_WRITTEN_BYTES},
        "Bytes moved by the host's disks since it booted.",
        scope=MetricScope.HOST,
    ),
    labelled_metric(
        "eelgrid_host_network_bytes_total",
        "direction",
        {"received": Reading.HOST_NETWORK_RECEIVED_BYTES, "sent": Reading.HOST_NETWORK_SENT_BYTES},
        "Bytes moved by the host's network interfaces since it booted.",
        scope=MetricScope.HOST,
    ),
    absence_metric(HOST_ABSENT, MetricScope.HOST, "1 for each host reading that is not available, by reason."),
)

_GUARD = (
    _guard_attribute("plan_epoch", "plan_epoch", "Epoch of the plan in force; 0 before the first."),
    _guard_attribute("enforcing", "enforcing", "1 if the plan may change devices, 0 if the agent only observes."),
    _guard_attribute(
        "lease_left_seconds", "lease_left_s", "Time until the plan expires unless the controller renews it."
    ),
    _guard_attribute("power_budget_watts", "budget_w", "Power that all devices may draw together."),
    _guard_attribute(
        "power_budget_fixed_devices",
        "budget_fixed",
        "Devices that an enforced power budget cannot lower now: they report no range of limits, refuse, are lost or suspended; no series without such a budget.",
    ),
    _guard_attribute(
        "drift_repairs_total",
        "drift_repairs",
        "Settings restored after something else changed them.",
        "setting",
        kind=_COUNTER,
    ),
    _guard_attribute(
        "refusals_total",
        "refusals",
        "Refused items of plans, by the rule that refused them.",
        "rule",
        kind=_COUNTER,
    ),
    _gpu_attribute("quarantined", "quarantined", "1 while the device is quarantined and takes no work."),
    _gpu_attribute(
        "enforcement_suspended",
        "enforcement_suspended",
        "1 while the agent has given up restoring the device's settings.",
    ),
    _gpu_attribute(
        "layout_unmet",
        "layout_unmet",
        "1 while the MIG layout of the current plan is not reached; no series on models without MIG.",
    ),
)

_ATTRIBUTION = (
    attribute_metric(
        "eelgrid_workload_gpu_energy_joules_total",
        MetricScope.OWNERS,
        "energy_j",
        "Energy by owner; energy without an owner, and of owners that are gone, has metrics of its own.",
        *SHARE_LABELS,
        kind=_COUNTER,
    ),
    attribute_metric(
        "eelgrid_gpu_idle_since_timestamp_seconds",
        MetricScope.OWNERS,
        "idle_since_s",
        "When a device or slice that the owner holds became idle, in seconds since 1970, once that is five minutes ago; no series while it works or is not allocated.",
        *HOLDER_LABELS,
    ),
    _gpu_attribute(
        "unattributed_energy_joules_total",
        "unattributed_j",
        "Energy without an owner: of unallocated capacity (unallocated), of unknown owners (unattributed), or of owners beyond the limit on series (other).",
        "reason",
        kind=_COUNTER,
    ),
    _gpu_attribute(
        "ended_energy_joules_total",
        "ended_j",
        "Energy of owners that no longer have a series; their rates have counted it, so add it to totals only.",
        kind=_COUNTER,
    ),
    attribute_metric(
        "eelgrid_workload_series_left_out",
        MetricScope.OWNERS,
        "left_out",
        "Owners without a series of their own because there are too many; their energy is in no series.",
    ),
)

CATALOGUE: tuple[Metric, ...] = _AGENT + _NODE + _GUARD + DEVICE_METRICS + HEALTH_METRICS + MIG_METRICS + _ATTRIBUTION
