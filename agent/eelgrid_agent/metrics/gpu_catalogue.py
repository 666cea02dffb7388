"""The metrics of devices, their health and their MIG instances: the part of the catalogue that is NVML's.

Owns their names, help and sources, and the names of the driver's codes. Must
not know how they are rendered; the rules of naming are the catalogue's.
"""

from eelgrid_agent.metrics.metric import (
    Kind,
    Scope,
    info,
    of_absences,
    of_attribute,
    of_gpu,
    of_instance,
    told_apart,
)  # fmt: skip
from eelgrid_protos.messages import Reading

__all__ = ["DEVICE", "GPU_ABSENT", "HEALTH", "INSTANCE_ABSENT", "MIG", "NOT_SHOWN"]

_COUNTER = Kind.COUNTER
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
# NVML_GPU_RECOVERY_ACTION_* and NVML_GPU_FABRIC_STATE_*.
_RECOVERY_ACTIONS = (
    (0, "none"), (1, "gpu_reset"), (2, "node_reboot"), (3, "drain_p2p"), (4, "drain_and_reset"),
    (5, "recover_imex_domain"), (6, "bus_reset"), (7, "system_reboot"),
)  # fmt: skip
_FABRIC_STATES = ((0, "not_supported"), (1, "not_started"), (2, "in_progress"), (3, "completed"))

DEVICE = (
    info(
        "eelgrid_gpu_info",
        Scope.GPU,
        "Identity of a device; join on gpu.",
        index="gpu.index",
        product="gpu.product",
        model="gpu.model",
        pci_bus_id="gpu.pci_bus_id",
    ),
    of_attribute("eelgrid_gpu_up", Scope.GPU, "up", "1 while the device answers, 0 while it is lost."),
    of_attribute("eelgrid_gpu_cordoned", Scope.GPU, "cordoned", "1 while the device should take no new work."),
    of_attribute(
        "eelgrid_gpu_reading_age_seconds",
        Scope.GPU,
        "ages_s",
        "Age of the device's newest readings, by kind of look.",
        "look",
    ),
    of_absences(GPU_ABSENT, Scope.GPU, "1 for each reading of a device that cannot be had, and why."),
    of_gpu("power_watts", Reading.POWER_W, "Board power, at this instant where the part can tell."),
    of_gpu("power_average_watts", Reading.POWER_AVERAGE_W, "Board power, averaged by the part over about a second."),
    of_gpu("memory_power_watts", Reading.MEMORY_POWER_W, "Power of the device's memory, a part of board power."),
    of_gpu("energy_joules_total", Reading.ENERGY_J, "Energy since the agent began to count.", kind=_COUNTER),
    of_attribute(
        "eelgrid_gpu_energy_uncertainty_joules",
        Scope.GPU,
        "energy_uncertainty_j",
        "How far the energy counted may be off: the sensor's gain, the ends, and what was integrated.",
    ),
    of_gpu("power_limit_watts", Reading.POWER_LIMIT_W, "Power limit that the device enforces."),
    of_gpu("power_limit_requested_watts", Reading.POWER_LIMIT_REQUESTED_W, "Power limit that was asked for."),
    of_attribute(
        "eelgrid_gpu_power_limit_default_watts",
        Scope.GPU,
        "gpu.power_limit_default_w",
        "Power limit that the device starts with.",
    ),
    of_attribute(
        "eelgrid_gpu_power_limit_min_watts",
        Scope.GPU,
        "gpu.power_limit_min_w",
        "Least power limit that the device takes.",
    ),
    of_attribute(
        "eelgrid_gpu_power_limit_max_watts",
        Scope.GPU,
        "gpu.power_limit_max_w",
        "Greatest power limit that the device takes.",
    ),
    of_gpu("utilization_ratio", Reading.UTILIZATION_RATIO, "Share of the last period in which a kernel ran."),
    of_gpu(
        "memory_utilization_ratio",
        Reading.MEMORY_UTILIZATION_RATIO,
        "Share of the last period in which memory was read or written.",
    ),
    of_gpu("memory_used_bytes", Reading.MEMORY_USED_BYTES, "Memory in use, without what the driver reserves."),
    of_gpu("memory_reserved_bytes", Reading.MEMORY_RESERVED_BYTES, "Memory that the driver keeps for itself."),
    of_attribute("eelgrid_gpu_memory_size_bytes", Scope.GPU, "gpu.memory_bytes", "Memory of the device."),
    of_gpu("sm_clock_hertz", Reading.SM_CLOCK_MHZ, "Clock of the multiprocessors.", scale=_HERTZ_PER_MHZ),
    of_gpu("memory_clock_hertz", Reading.MEMORY_CLOCK_MHZ, "Clock of the memory.", scale=_HERTZ_PER_MHZ),
    of_gpu("temperature_celsius", Reading.TEMPERATURE_C, "Temperature of the device."),
    of_gpu("memory_temperature_celsius", Reading.MEMORY_TEMPERATURE_C, "Temperature of the memory."),
    of_gpu("performance_state", Reading.PERFORMANCE_STATE, "Performance state, 0 the fastest to 15."),
    of_gpu(
        "clocks_event_active",
        Reading.EVENT_REASONS_MASK,
        "1 for each reason that holds the clocks below their highest now.",
        labels=("reason",),
        bits=_EVENT_REASONS,
    ),
    of_gpu("graphics_activity_ratio", Reading.GRAPHICS_ACTIVITY_RATIO, "Share of time that any engine worked."),
    of_gpu("sm_activity_ratio", Reading.SM_ACTIVITY_RATIO, "Share of multiprocessors with work, over time."),
    of_gpu("sm_occupancy_ratio", Reading.SM_OCCUPANCY_RATIO, "Resident warps as a share of what would fit."),
    of_gpu("tensor_activity_ratio", Reading.TENSOR_ACTIVITY_RATIO, "Share of time that tensor pipes worked."),
    of_gpu("memory_activity_ratio", Reading.MEMORY_ACTIVITY_RATIO, "Share of memory bandwidth in use."),
    of_gpu("fp16_activity_ratio", Reading.FP16_ACTIVITY_RATIO, "Share of time that half-precision pipes worked."),
    of_gpu("fp32_activity_ratio", Reading.FP32_ACTIVITY_RATIO, "Share of time that single-precision pipes worked."),
    of_gpu("fp64_activity_ratio", Reading.FP64_ACTIVITY_RATIO, "Share of time that double-precision pipes worked."),
    of_gpu("processes", Reading.PROCESSES, "Processes with a context on the device."),
    of_attribute(
        "eelgrid_gpu_anomaly",
        Scope.GPU,
        "anomalies",
        "1 for each way in which the device is held and not used, or used and not held, now.",
        "anomaly",
    ),
)

HEALTH = (
    of_attribute(
        "eelgrid_gpu_xid_errors_total",
        Scope.GPU,
        "xids",
        "Errors that the driver reported since the agent began, by XID.",
        "xid",
        kind=_COUNTER,
    ),
    of_attribute(
        "eelgrid_gpu_xid_last_timestamp_seconds",
        Scope.GPU,
        "xid_last_s",
        "When the driver last reported the XID, since 1970; alert on this, for increase() misses the first.",
        "xid",
    ),
    told_apart(
        "eelgrid_gpu_ecc_errors_total", "severity",
        {"corrected": Reading.ECC_CORRECTED_VOLATILE, "uncorrected": Reading.ECC_UNCORRECTED_VOLATILE},
        "Memory errors since the driver was loaded.", kind=_COUNTER, scope=Scope.GPU,
    ),
    told_apart(
        "eelgrid_gpu_ecc_lifetime_errors_total", "severity",
        {"corrected": Reading.ECC_CORRECTED_AGGREGATE, "uncorrected": Reading.ECC_UNCORRECTED_AGGREGATE},
        "Memory errors over the life of the part.", kind=_COUNTER, scope=Scope.GPU,
    ),
    told_apart(
        "eelgrid_gpu_remapped_rows_total", "severity",
        {"corrected": Reading.REMAPPED_ROWS_CORRECTABLE, "uncorrected": Reading.REMAPPED_ROWS_UNCORRECTABLE},
        "Memory rows remapped over the life of the part, by the errors that caused it.",
        kind=_COUNTER, scope=Scope.GPU,
    ),
    of_gpu("row_remap_pending", Reading.ROW_REMAP_PENDING, "1 while rows wait for a reset to be remapped."),
    of_gpu("row_remap_failed", Reading.ROW_REMAP_FAILED, "1 when rows could not be remapped: replace the part."),
    of_gpu(
        "recovery_action",
        Reading.RECOVERY_ACTION,
        "1 for what the driver asks for to bring the device back.",
        labels=("action",),
        states=_RECOVERY_ACTIONS,
    ),
    of_gpu("pcie_link_generation", Reading.PCIE_LINK_GENERATION, "Generation of the PCIe link as it runs now."),
    of_gpu("pcie_link_lanes", Reading.PCIE_LINK_WIDTH, "Lanes of the PCIe link as it runs now."),
    of_gpu("pcie_replays_total", Reading.PCIE_REPLAYS, "PCIe packets sent again.", kind=_COUNTER),
    told_apart(
        "eelgrid_gpu_pcie_throughput_bytes_per_second", "direction",
        {"sent": Reading.PCIE_SENT_BYTES_PER_S, "received": Reading.PCIE_RECEIVED_BYTES_PER_S},
        "PCIe traffic over the part's own window; it keeps no counter.", kind=Kind.GAUGE, scope=Scope.GPU,
    ),
    told_apart(
        "eelgrid_gpu_nvlink_bytes_total", "direction",
        {"sent": Reading.NVLINK_SENT_BYTES, "received": Reading.NVLINK_RECEIVED_BYTES},
        "Bytes over all NVLinks since the driver was loaded.", kind=_COUNTER, scope=Scope.GPU,
    ),
    of_gpu("nvlink_active_links", Reading.NVLINK_ACTIVE_LINKS, "NVLinks that are up."),
    of_gpu("nvlink_errors_total", Reading.NVLINK_ERRORS, "NVLink errors since the driver was loaded.", kind=_COUNTER),
    of_gpu(
        "fabric_state",
        Reading.FABRIC_STATE,
        "1 for the state of the device's registration with the NVLink fabric.",
        labels=("state",),
        states=_FABRIC_STATES,
    ),
)  # fmt: skip


MIG = (
    of_attribute(
        "eelgrid_gpu_mig_enabled", Scope.GPU, "mig_enabled", "1 while MIG is on; no series on parts without MIG."
    ),
    of_attribute(
        "eelgrid_gpu_mig_pending", Scope.GPU, "mig_pending", "1 while a change of MIG mode waits for a reset."
    ),
    info(
        "eelgrid_gpu_instance_info",
        Scope.INSTANCE,
        "A MIG GPU instance, on memory slices from start on.",
        profile="profile",
        profile_id="profile_id",
        start="start",
        size="size",
    ),
    info(
        "eelgrid_compute_instance_info",
        Scope.COMPUTE,
        "A MIG compute instance; uuid is what a process opens.",
        uuid="uuid",
        profile_id="profile_id",
        generation="generation",
    ),
    of_absences(INSTANCE_ABSENT, Scope.INSTANCE, "1 for each reading of a GPU instance that cannot be had, and why."),
    of_instance("memory_used_bytes", Reading.MEMORY_USED_BYTES, "Memory of the instance in use; also in the device's."),
    of_instance("graphics_activity_ratio", Reading.GRAPHICS_ACTIVITY_RATIO, "Share of time that any engine worked."),
    of_instance("sm_activity_ratio", Reading.SM_ACTIVITY_RATIO, "Share of its multiprocessors with work, over time."),
    of_instance("sm_occupancy_ratio", Reading.SM_OCCUPANCY_RATIO, "Resident warps as a share of what would fit."),
    of_instance("tensor_activity_ratio", Reading.TENSOR_ACTIVITY_RATIO, "Share of time that tensor pipes worked."),
    of_instance("memory_activity_ratio", Reading.MEMORY_ACTIVITY_RATIO, "Share of its memory bandwidth in use."),
)
