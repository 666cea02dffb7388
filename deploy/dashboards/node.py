"""The dashboard of nodes and GPUs, down to each MIG slice.

Owns the questions of somebody who looks for what is wrong with a machine: is it hot, held
back, failing, idle though held. Must not know services. Needs the agents' own pages; an
agent that simulates several nodes tells nothing of them.
"""

from deploy.dashboards.panels import Page, Query, Row, Variable, bars, figure, lines, listing, states
from deploy.dashboards.queries import by_device, by_node, each_device, increase, of, or_none, owned, quantile, rate

__all__ = ["PAGE"]

_DEVICE = "{{device}}"
_GPU = 'gpu=~"$gpu"'
_IDLE_SINCE = of("eelgrid_gpu_idle_since_timestamp_seconds", _GPU)
_HELD_IDLE, _OF_SLICES = 'anomaly="held_idle"', 'gpu=~"$gpu", gpu_instance!=""'
_HELD_BACK = 'gpu=~"$gpu", reason!="gpu_idle"'
_SCRAPED = ("gpu",)
_NARROW = (*_SCRAPED, "model")


def _watts_by_counter() -> str:
    return rate("eelgrid_gpu_energy_joules_total", _GPU)


_NOW = Row(
    "Now",
    (
        figure(
            "GPUs that answer",
            "On the selected nodes.",
            "short",
            Query(f"sum({by_device(of('eelgrid_gpu_up', _GPU))})"),
        ),
        figure(
            "Lost or quarantined",
            "Devices that do not answer, and devices that were lost too often and take no work.",
            "short",
            Query(f"sum((1 - {of('eelgrid_gpu_up', _GPU)}) or {of('eelgrid_gpu_quarantined', _GPU)})"),
            bad_above=1,
        ),
        figure(
            "Power of these GPUs",
            "Sum of the sampled board power of the selected GPUs. The fleet dashboard has the power of all GPUs, as the controller knows it.",
            "watt",
            Query(f"sum({by_device(of('eelgrid_gpu_power_watts', _GPU))})"),
        ),
        figure(
            "GPUs with series",
            "GPUs of this dashboard over all GPUs that the controller knows. An agent that simulates a whole fleet has no series of its GPUs.",
            "percentunit",
            Query(f"count({of('eelgrid_gpu_up')}) / sum({of('eelgrid_gpus')})"),
        ),
        figure(
            "Hottest GPU",
            "Highest temperature of a device.",
            "celsius",
            Query(f"max({by_device(of('eelgrid_gpu_temperature_celsius', _GPU))})"),
            bad_above=85,
        ),
        figure(
            "Held and idle",
            "Power of devices that have been allocated but idle for at least five minutes.",
            "watt",
            Query(
                f"sum({of('eelgrid_gpu_power_watts', _GPU)} * on (job, instance, gpu) max by (job, instance, gpu) ({of('eelgrid_gpu_anomaly', _HELD_IDLE)})) or vector(0)"
            ),
            bad_above=1,
        ),
    ),
    height=4,
)
_POWER = Row(
    "Power",
    (
        lines(
            "Power of each GPU",
            "Sampled board power, instantaneous where the GPU supports it.",
            "watt",
            Query(each_device(of("eelgrid_gpu_power_watts", _GPU)), _DEVICE),
            width=24,
        ),
        lines(
            "Counter less sampled power",
            "Difference between the energy counter and the mean of the samples, for each device. A lasting gap means that sampling misses bursts or that a sensor is wrong.",
            "watt",
            Query(
                each_device(
                    f"({_watts_by_counter()} - avg_over_time({of('eelgrid_gpu_power_watts', _GPU)}[$__rate_interval]))"
                ),
                _DEVICE,
            ),
            width=8,
        ),
        lines(
            "Power over its limit",
            "Sampled power as a share of the limit that the device enforces.",
            "percentunit",
            Query(
                each_device(f"({of('eelgrid_gpu_power_watts', _GPU)} / {of('eelgrid_gpu_power_limit_watts', _GPU)})"),
                _DEVICE,
            ),
            width=8,
            top=1.0,
        ),
        lines(
            "Power limit",
            "The limit that each device enforces.",
            "watt",
            Query(each_device(of("eelgrid_gpu_power_limit_watts", _GPU)), _DEVICE),
            width=8,
        ),
    ),
)
_WORK = Row(
    "Work",
    (
        lines(
            "Utilization",
            "Share of the last period in which a kernel ran, regardless of how much of the device it used.",
            "percentunit",
            Query(each_device(of("eelgrid_gpu_utilization_ratio", _GPU)), _DEVICE),
            width=8,
            top=1.0,
        ),
        lines(
            "Multiprocessors at work",
            "Share of multiprocessors with work, over time; reported by Hopper and newer.",
            "percentunit",
            Query(each_device(of("eelgrid_gpu_sm_activity_ratio", _GPU)), _DEVICE),
            width=8,
            top=1.0,
        ),
        lines(
            "Memory bandwidth at work",
            "Share of memory bandwidth in use.",
            "percentunit",
            Query(each_device(of("eelgrid_gpu_memory_activity_ratio", _GPU)), _DEVICE),
            width=8,
            top=1.0,
        ),
        lines(
            "Memory used",
            "Share of the device's memory in use.",
            "percentunit",
            Query(
                each_device(
                    f"({of('eelgrid_gpu_memory_used_bytes', _GPU)} / {of('eelgrid_gpu_memory_size_bytes', _GPU)})"
                ),
                _DEVICE,
            ),
            width=8,
            top=1.0,
        ),
        lines(
            "Clock",
            "Clock of the multiprocessors.",
            "rothz",
            Query(each_device(of("eelgrid_gpu_sm_clock_hertz", _GPU)), _DEVICE),
            width=8,
        ),
        lines(
            "Temperature",
            "Temperature of each device.",
            "celsius",
            Query(each_device(of("eelgrid_gpu_temperature_celsius", _GPU)), _DEVICE),
            width=8,
        ),
    ),
)
_HELD = Row(
    "Held and not used",
    (
        listing(
            "Held and idle since",
            "Owners of GPUs and slices that have been idle for at least five minutes, and since when.",
            "dateTimeFromNow",
            Query(f"sort({by_device(f'({_IDLE_SINCE} * 1000)')})", "idle since"),
            hidden=_SCRAPED,
        ),
        states(
            "Ways to be held and not used",
            "held_idle, idle_context, allocation_without_process, stalled and process_without_allocation, each after the time given in docs/explanation/energy-attribution.md.",
            "short",
            Query(
                or_none(f"{each_device(of('eelgrid_gpu_anomaly', _GPU), 'anomaly')} == 1", "device"),
                _DEVICE + " {{anomaly}}",
            ),
        ),
    ),
)
_SLICES = Row(
    "MIG slices",
    (
        lines(
            "Work of each slice",
            "Share of time in which any engine of the GPU instance worked; reported by Hopper and newer.",
            "percentunit",
            Query(
                each_device(of("eelgrid_gpu_instance_graphics_activity_ratio", _GPU), "gpu_instance"),
                _DEVICE + " gi {{gpu_instance}}",
            ),
            width=8,
            top=1.0,
        ),
        lines(
            "Memory of each slice",
            "Memory of the GPU instance in use.",
            "bytes",
            Query(
                each_device(of("eelgrid_gpu_instance_memory_used_bytes", _GPU), "gpu_instance"),
                _DEVICE + " gi {{gpu_instance}}",
            ),
            width=8,
        ),
        lines(
            "Power charged to each slice",
            "Power that the agent charges to owners on the slice; the workloads dashboard shows the method.",
            "watt",
            Query(
                each_device(f"sum by (job, instance, gpu, gpu_instance) (rate({owned(_OF_SLICES)}))", "gpu_instance"),
                _DEVICE + " gi {{gpu_instance}}",
            ),
            width=8,
        ),
        listing(
            "Slices",
            "Every GPU instance: its profile, and the memory slices that it covers.",
            "short",
            Query(by_device(of("eelgrid_gpu_instance_info", _GPU))),
            width=16,
            hidden=(*_SCRAPED, "profile_id"),
        ),
        listing(
            "MIG mode",
            "Of GPU models that support MIG.",
            "short",
            Query(f"sort_desc({by_device(of('eelgrid_gpu_mig_enabled', _GPU))})", "MIG"),
            width=8,
            hidden=_NARROW,
            words={"0": ("off", "text"), "1": ("on", "blue")},
        ),
    ),
)
_WRONG = Row(
    "What holds it back, and what fails",
    (
        states(
            "Reasons that hold clocks down",
            "Each reason that the driver reports, except that a GPU is idle. software_power_cap is the effect of the power limit; thermal and power brake reasons are faults of cooling or supply.",
            "short",
            Query(
                or_none(f"{each_device(of('eelgrid_gpu_clocks_event_active', _HELD_BACK), 'reason')} == 1", "device"),
                _DEVICE + " {{reason}}",
            ),
        ),
        listing(
            "XIDs",
            "When the driver last reported each XID. Which of them matter: docs/how-to/runbooks/README.md.",
            "dateTimeFromNow",
            Query(by_device(f"({of('eelgrid_gpu_xid_last_timestamp_seconds', _GPU)} * 1000)"), "last"),
            width=6,
            hidden=_NARROW,
        ),
        bars(
            "XIDs of 24 h",
            "Errors reported by the driver, by XID. The first report of an XID creates a new series, which increase() misses; the table next to this panel shows it.",
            "short",
            Query(f"round(sum by (xid) ({increase('eelgrid_gpu_xid_errors_total', _GPU, over='24h')}))", "XID {{xid}}"),
            width=6,
        ),
        lines(
            "Memory errors",
            "ECC errors per second by severity, of each device.",
            "ops",
            Query(
                each_device(f"({rate('eelgrid_gpu_ecc_errors_total', _GPU)})", "severity"), _DEVICE + " {{severity}}"
            ),
            width=8,
            top=1.0,
        ),
        listing(
            "Rows remapped in 30 days",
            "Memory rows that failed and were replaced; uncorrectable errors indicate that the GPU will fail.",
            "short",
            Query(
                f"sort_desc(round({by_device(increase('eelgrid_gpu_remapped_rows_total', _GPU, over='30d'))}))", "rows"
            ),
            width=8,
            hidden=_NARROW,
        ),
        listing(
            "Rows that cannot be remapped",
            "If a row cannot be remapped, the GPU has to be replaced.",
            "short",
            Query(f"sort_desc({by_device(of('eelgrid_gpu_row_remap_failed', _GPU))})", "part"),
            width=8,
            hidden=_NARROW,
            words={"0": ("good", "green"), "1": ("replace", "red")},
        ),
        lines(
            "PCIe link",
            "Current lanes of the link; a link that trained down stays so until somebody repairs it.",
            "short",
            Query(each_device(of("eelgrid_gpu_pcie_link_lanes", _GPU)), _DEVICE),
            width=8,
        ),
        lines(
            "NVLink traffic",
            "Bytes per second over all NVLinks of a device, by direction.",
            "Bps",
            Query(
                each_device(f"({rate('eelgrid_gpu_nvlink_bytes_total', _GPU)})", "direction"),
                _DEVICE + " {{direction}}",
            ),
            width=8,
        ),
        lines(
            "NVLinks that are up",
            "Active links of each device; fewer than on its neighbours indicates a fault.",
            "short",
            Query(each_device(of("eelgrid_gpu_nvlink_active_links", _GPU)), _DEVICE),
            width=8,
        ),
    ),
)
_AGENT = Row(
    "The agent and its host",
    (
        lines(
            "Age of the newest sample",
            "If it exceeds a few sample intervals, the agent is stuck.",
            "s",
            Query(by_node(of("eelgrid_agent_sample_age_seconds")), "{{node}}"),
            width=8,
        ),
        lines(
            "Calls to the driver, 99 %",
            "Duration of calls to the device library, by call.",
            "s",
            Query(quantile(0.99, "eelgrid_device_call_duration_seconds", by="call"), "{{call}}"),
            width=8,
        ),
        bars(
            "Readings that cannot be had",
            "By reason. Reasons other than not_supported are worth checking.",
            "short",
            Query(f"count by (reason) ({of('eelgrid_gpu_reading_absent', _GPU)})", "{{reason}}"),
            width=8,
        ),
        lines(
            "Stream to the controller",
            "1 while the node is connected; and ticks that wait to be sent.",
            "short",
            Query(by_node(of("eelgrid_agent_connected_nodes")), "{{node}} connected"),
            Query(by_node(of("eelgrid_agent_spool_ticks")), "{{node}} ticks waiting"),
            width=8,
        ),
        lines(
            "Host's CPUs in use",
            "Share of the host's CPUs.",
            "percentunit",
            Query(by_node(of("eelgrid_host_cpu_utilization_ratio")), "{{node}}"),
            width=8,
            top=1.0,
        ),
        lines(
            "Settings put back, plans refused",
            "Settings that something else changed and the agent restored, and items of plans that it refused, per second.",
            "ops",
            Query(f"sum by (setting) ({rate('eelgrid_guard_drift_repairs_total')})", "put back {{setting}}"),
            Query(f"sum by (rule) ({rate('eelgrid_guard_refusals_total')})", "refused {{rule}}"),
            width=8,
            top=1.0,
        ),
    ),
)
_INFO = '{job=~"$job", instance=~"$instance"'
_NAMED = f'label_join({by_node(of("eelgrid_gpu_info"))}, "device", " gpu ", "node", "index")'

PAGE = Page(
    "node",
    "Eelgrid / Nodes and GPUs",
    "One node, one GPU, one MIG slice: power, work, throttling, faults, and what is allocated but not used.",
    (_NOW, _POWER, _WORK, _HELD, _SLICES, _WRONG, _AGENT),
    (
        Variable("node", "Node", f"label_values(eelgrid_node_info{_INFO}}}, node)"),
        # People know a GPU by its node and index, series by its UUID.
        Variable("gpu", "GPU", f"query_result({_NAMED})", '/device="(?<text>[^"]+)".*gpu="(?<value>[^"]+)"/'),
    ),
)
