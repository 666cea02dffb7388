"""The catalogue obeys the conventions, covers every reading, and what is rendered parses as what was meant."""

import math
import re
import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.builders.metrics import HOST_READINGS, build_gpu_view, build_snapshot
from tests.metrics_lint import NO_LABELS

from eelgrid_agent.devices.port import FAST_READINGS, INSTANCE_READINGS, SLOW_READINGS, Missing
from eelgrid_agent.devices.port import LATENCY_BUCKETS_S as CALL_BOUNDS_S
from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_agent.metrics.snapshot import AgentSnapshot, GpuView, HostView, NodeMetricsView, TimedValues
from eelgrid_protos.agent_metrics import CATALOGUE, NOT_SHOWN, MetricScope
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Gpu, Reading
from eelgrid_protos.openmetrics import MetricType

UNITS = ("watts", "joules", "bytes", "bytes_per_second", "seconds", "hertz", "celsius", "ratio")
# What has no unit counts things, or is a state.
COUNTED = {
    "nodes",
    "samples",
    "batches",
    "connections",
    "ticks",
    "way",
    "threads",
    "cpus",
    "epoch",
    "repairs",
    "refusals",
    "processes",
    "errors",
    "rows",
    "lanes",
    "replays",
    "links",
    "out",
    "starts",
    "hangs",
    "devices",
    "calls",
}
STATES = {
    "absent",
    "active",
    "anomaly",
    "cordoned",
    "enabled",
    "enforcing",
    "failed",
    "generation",
    "pending",
    "quarantined",
    "state",
    "action",
    "suspended",
    "unmet",
    "up",
}
NOT_BASE = re.compile(r"milli|micro|kilo|mega|giga|mib|gib|percent|mhz|(_mw|_mj|_ms|_us|_ns|_w|_c|_j)(_total)?$")


def parsed(shown):
    """Samples by name of both formats, which must agree."""
    rendered = MetricsRenderer().render_snapshot(shown)
    text, opened = rendered.prometheus().decode(), rendered.openmetrics().decode()
    found = [(s.name, s.labels, s.value) for family in parse_text(text) for s in family.samples]
    assert [(s.name, s.labels, s.value) for family in parse_openmetrics(opened) for s in family.samples] == found
    samples = {}
    for name, labels, value in found:
        samples.setdefault(name, []).append((labels, value))
    return samples


def one(samples, name):
    ((labels, value),) = samples[name]
    return labels, value


# The catalogue


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_obeys_the_conventions(metric):
    name = metric.name
    assert re.fullmatch(r"(eelgrid|process)_[a-z0-9]+(_[a-z0-9]+)*", name)
    assert not NOT_BASE.search(name)
    assert name.endswith("_total") is (metric.kind is MetricType.COUNTER)
    assert name.endswith("_info") is (metric.kind is MetricType.INFO)
    bare = name.removesuffix("_total").removesuffix("_info")
    if metric.kind is not MetricType.INFO:
        unit_known = bare.endswith(tuple(f"_{unit}" for unit in UNITS))
        assert unit_known or bare.rpartition("_")[2] in COUNTED | STATES
    assert not re.search(r"gauge|counter|histogram|summary", name)
    assert re.fullmatch(r"[A-Z0-9].{5,}\.", metric.help), "help is a sentence"
    labels = metric.all_labels
    assert len(set(labels)) == len(labels)
    assert not (NO_LABELS | {"command", "le"}) & set(labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in labels)
    assert bool(metric.facts) is (metric.kind is MetricType.INFO)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_reading_is_shown_in_the_base_unit_of_its_name(metric):
    for source in metric.sources:
        if isinstance(source.of, Reading):
            name, expected = source.of.name, 1.0
            for suffix, unit, scale in (
                ("_W", "watts", 1.0),
                ("_J", "joules", 1.0),
                ("_MHZ", "hertz", 1e6),
                ("_C", "celsius", 1.0),
                ("_RATIO", "ratio", 1.0),
                ("_BYTES", "bytes", 1.0),
                ("_BYTES_PER_S", "bytes_per_second", 1.0),
            ):
                if name.endswith(suffix):
                    assert metric.name.removesuffix("_total").endswith(f"_{unit}")
                    expected = scale
            assert source.scale == expected


def test_names_are_given_once_and_labels_of_one_source_fit():
    names = [metric.name for metric in CATALOGUE]
    families = [metric.family for metric in CATALOGUE if metric.kind is not MetricType.INFO]
    assert len(set(names)) == len(names)
    assert len(set(families)) == len(families)
    for metric in CATALOGUE:
        for source in metric.sources:
            assert not source.labels or len(source.labels) == len(metric.labels)
        assert len({source.labels for source in metric.sources}) == len(metric.sources)


def test_every_reading_has_a_metric():
    shown = {scope: [r for m in CATALOGUE if m.scope is scope for r in m.readings] for scope in MetricScope}
    of_gpus = {*FAST_READINGS, *SLOW_READINGS} - NOT_SHOWN
    assert sorted(shown[MetricScope.GPU]) == sorted(of_gpus), "each in exactly one metric"
    assert sorted(shown[MetricScope.INSTANCE]) == sorted(INSTANCE_READINGS)
    assert sorted(shown[MetricScope.HOST]) == HOST_READINGS
    assert {*shown[MetricScope.GPU], *shown[MetricScope.HOST], Reading.UNSPECIFIED, *NOT_SHOWN} == set(Reading)


# The renderer


def test_every_metric_is_shown_with_its_labels_and_kind():
    shown = build_snapshot(build_gpu_view(), build_gpu_view("GPU-2", value=Missing(AbsenceReason.TIMED_OUT)), value=0.5)
    node = shown.node
    lost_host = HostView(cpu_milli=1, memory_bytes=1, values={Reading.HOST_CPU_UTILIZATION_RATIO: 0.5})
    pages = [shown, AgentSnapshot(agent=shown.agent, node=NodeMetricsView(**{**_fields(node), "host": lost_host}))]
    names = {}
    for page in pages:
        for name, samples in parsed(page).items():
            for labels, _ in samples:
                names.setdefault(name, set()).add(tuple(sorted(labels.keys() - {"le"})))
    for metric in CATALOGUE:
        suffix = "_bucket" if metric.kind is MetricType.HISTOGRAM else ""
        assert names[metric.name + suffix] == {tuple(sorted(metric.all_labels))}
    known = {metric.name for metric in CATALOGUE}
    assert {re.sub(r"(?<=duration_seconds)_(bucket|count|sum)$", "", name) for name in names} == known


def _fields(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_values_are_scaled_and_told_apart():
    values = dict.fromkeys(SLOW_READINGS, 1.0) | {Reading.ECC_UNCORRECTED_VOLATILE: 7.0}
    quick = dict.fromkeys(FAST_READINGS, 0.25) | {Reading.SM_CLOCK_MHZ: 1410.0, Reading.ENERGY_J: 1.5e9}
    samples = parsed(
        build_snapshot(
            build_gpu_view(quick=TimedValues(values=quick, age_s=0.0), slow=TimedValues(values=values, age_s=9.0))
        )
    )
    assert one(samples, "eelgrid_gpu_sm_clock_hertz") == ({"gpu": "GPU-1"}, 1410e6)
    assert one(samples, "eelgrid_gpu_energy_joules_total") == ({"gpu": "GPU-1"}, 1.5e9)
    errors = {labels["severity"]: value for labels, value in samples["eelgrid_gpu_ecc_errors_total"]}
    assert errors == {"corrected": 1.0, "uncorrected": 7.0}
    ages = {labels["look"]: value for labels, value in samples["eelgrid_gpu_reading_age_seconds"]}
    assert ages == {"quick": 0.0, "slow": 9.0, "instances": 4.0}
    assert one(samples, "eelgrid_host_cpus") == ({}, 1.5)
    assert one(samples, "eelgrid_gpu_power_limit_default_watts") == ({"gpu": "GPU-1"}, 400.0)
    assert one(samples, "eelgrid_gpu_instance_info")[0]["profile"] == "3g.20gb"
    assert one(samples, "eelgrid_compute_instance_info")[0]["uuid"] == "MIG-x"
    assert one(samples, "eelgrid_node_info")[0]["simulated"] == "true"


def test_codes_and_masks_are_one_series_for_each_state():
    quick = dict.fromkeys(FAST_READINGS, 0.0) | {Reading.EVENT_REASONS_MASK: float(0x4 | 0x40 | 0x8000)}
    slow = dict.fromkeys(SLOW_READINGS, 0.0) | {Reading.RECOVERY_ACTION: 4.0, Reading.FABRIC_STATE: 77.0}
    samples = parsed(
        build_snapshot(
            build_gpu_view(quick=TimedValues(values=quick, age_s=0.0), slow=TimedValues(values=slow, age_s=0.0))
        )
    )

    def held(name, label):
        return {labels[label] for labels, value in samples[name] if value == 1.0}

    assert held("eelgrid_gpu_clocks_event_active", "reason") == {"software_power_cap", "hardware_thermal", "other"}
    assert held("eelgrid_gpu_recovery_action", "action") == {"drain_and_reset"}
    assert held("eelgrid_gpu_fabric_state", "state") == {"other"}
    assert len(samples["eelgrid_gpu_clocks_event_active"]) == 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -100.0, 9223372036854775794.0])
def test_a_sentinel_is_an_absence_and_never_a_number(value):
    samples = parsed(build_snapshot(value=value))
    told = {labels["reading"]: labels["reason"] for labels, _ in samples["eelgrid_gpu_reading_absent"]}
    assert set(told) == {reading.name.lower() for reading in (*FAST_READINGS, *SLOW_READINGS)} - {"module_power_w"}
    assert set(told.values()) == {"implausible"}
    for metric in CATALOGUE:
        if metric.readings:
            assert metric.name not in samples


def test_each_reading_is_a_series_or_an_absence():
    half = {reading: READING_RANGES[reading].high for reading in SLOW_READINGS[::2]}
    half[SLOW_READINGS[0]] = Missing(AbsenceReason.NO_PERMISSION)
    samples = parsed(build_snapshot(build_gpu_view(slow=TimedValues(values=half, age_s=1.0), instances=())))
    told = {labels["reading"]: labels["reason"] for labels, _ in samples["eelgrid_gpu_reading_absent"]}
    assert told == {SLOW_READINGS[0].name.lower(): "no_permission"} | {
        reading.name.lower(): "not_sampled" for reading in SLOW_READINGS[1::2]
    }
    waiting = samples["eelgrid_gpu_instance_reading_absent"]
    assert [labels["gpu_instance"] for labels, _ in waiting] == ["3"] * len(INSTANCE_READINGS)


def test_a_histogram_adds_up():
    samples = parsed(build_snapshot())
    buckets = [value for _, value in samples["eelgrid_device_call_duration_seconds_bucket"]]
    assert buckets == sorted(buckets)
    assert buckets[-1] == one(samples, "eelgrid_device_call_duration_seconds_count")[1] == 3 + len(CALL_BOUNDS_S)
    assert one(samples, "eelgrid_device_call_duration_seconds_sum")[1] == 1.5


def test_what_left_the_node_leaves_the_renderer():
    renderer = MetricsRenderer()
    both, alone = build_snapshot(build_gpu_view(), build_gpu_view("GPU-2")), build_snapshot(build_gpu_view())
    fresh = MetricsRenderer().render_snapshot(alone).prometheus()
    renderer.render_snapshot(both)
    assert renderer.render_snapshot(alone).prometheus() == fresh
    changed = Gpu(uuid="GPU-1", index=0, product="A100", model="A100")
    assert b"instance_info" not in renderer.render_snapshot(build_snapshot(GpuView(gpu=changed))).prometheus()
    assert renderer.render_snapshot(alone).prometheus() == fresh


def test_a_fleet_has_no_node_to_show():
    samples = parsed(AgentSnapshot(agent=build_snapshot().agent))
    assert {name.split("_")[1] for name in samples if name.startswith("eelgrid")} == {"agent", "device", "worker"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH (Debian: prometheus)")
def test_promtool_finds_nothing_to_say():
    page = (
        MetricsRenderer()
        .render_snapshot(
            build_snapshot(build_gpu_view(), build_gpu_view("GPU-2", value=Missing(AbsenceReason.GPU_LOST)))
        )
        .prometheus()
    )
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
