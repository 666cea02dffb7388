"""The Prometheus endpoint: names in base units, absences without series, one rendering a tick, every form."""

import gzip
import math
import os
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.agent import SECOND, ManualClock, build_agent_node, build_devices

from eelgrid_agent.devices.port import LATENCY_BUCKETS_S as CALL_BOUNDS_S
from eelgrid_agent.devices.port import CallLatencies, DeviceEvent, DeviceEventKind, DevicePort, GpuLostError
from eelgrid_agent.devices.sampler import ExtendedReadings, read_extended_readings
from eelgrid_agent.energy.accounts import (
    EnergyAccount,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.anomalies import AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.energy.metering import EnergyMeasurement, UncertainEnergy
from eelgrid_agent.metrics.access import MetricsError
from eelgrid_agent.metrics.collector import AgentCollector, summarize_latencies, time_calls
from eelgrid_agent.metrics.server import MetricsEndpoint, ScrapeHandler
from eelgrid_agent.node.inventory import missing_gpu_readings, read_each_gpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_protos.messages import AbsenceReason, ConnectResponse, NodePlan
from eelgrid_protos.openmetrics import CONTENT_OPENMETRICS, CONTENT_PROMETHEUS, prefers_openmetrics


class Agent:
    def __init__(self, nodes=1):
        self.clock = ManualClock()
        self.pairs = [self._pair(index) for index in range(nodes)]
        self.nodes = [node for node, _ in self.pairs]
        self.attribution = None
        collector = AgentCollector(
            self.nodes,
            connections=lambda: 3,
            monotonic_ns=self.clock.monotonic_ns,
            attribution=lambda: self.attribution,
        )
        self.page = ScrapeHandler(
            collector, ticks=lambda: sum(n.ticks_total for n in self.nodes), monotonic_ns=self.clock.monotonic_ns
        )

    def _pair(self, index):
        device = build_devices(self.clock, f"n{index}", (GpuSpec(product="openb-g2", model="G2"),))
        return build_agent_node(device, self.clock, f"n{index}"), device

    def tick(self):
        self.clock.now_ns += SECOND
        for node, device in self.pairs:
            node.record_tick(read_each_gpu(device, node.gpu_uuids), monotonic_ns=self.clock.now_ns)

    def samples(self):
        answer = self.page.build_response("/metrics")
        assert answer.status == 200
        return {
            sample.name: sample
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
        }

    def all_samples(self, name):
        families = text_string_to_metric_families(self.page.build_response("/metrics").body.decode())
        return [sample for family in families for sample in family.samples if sample.name == name]


def test_one_node_shows_its_gpus_in_base_units():
    agent = Agent()
    agent.tick()
    agent.tick()
    samples = agent.samples()
    gpu = {"gpu": agent.nodes[0].gpu_uuids[0]}
    assert samples["eelgrid_gpu_power_watts"].labels == gpu
    assert samples["eelgrid_gpu_power_watts"].value == pytest.approx(30.0, rel=0.1)
    assert samples["eelgrid_gpu_energy_joules_total"].value == pytest.approx(30.0, rel=0.1)
    assert samples["eelgrid_gpu_sm_clock_hertz"].value > 1e6
    assert samples["eelgrid_gpu_info"].labels["model"] == "G2"
    assert samples["eelgrid_host_memory_used_bytes"].value == 0.0
    assert samples["eelgrid_agent_samples_total"].value == 2.0
    assert samples["eelgrid_agent_connections_total"].value == 3.0


def test_an_absent_reading_has_no_series():
    agent = Agent()
    agent.tick()
    node = agent.nodes[0]
    node.record_tick(missing_gpu_readings(node.gpu_uuids, AbsenceReason.TIMED_OUT), monotonic_ns=agent.clock.now_ns)
    samples = agent.samples()
    assert "eelgrid_gpu_power_watts" not in samples
    assert "eelgrid_gpu_info" in samples


def test_why_a_reading_is_absent_is_reported():
    agent = Agent()
    agent.tick()
    node = agent.nodes[0]
    node.record_tick(missing_gpu_readings(node.gpu_uuids, AbsenceReason.TIMED_OUT), monotonic_ns=agent.clock.now_ns)
    told = agent.all_samples("eelgrid_gpu_reading_absent")
    reasons = {sample.labels["reading"]: sample.labels["reason"] for sample in told}
    assert reasons["power_w"] == "timed_out"
    assert {sample.value for sample in told} == {1.0}


def test_a_slow_look_is_shown_with_its_age():
    agent = Agent()
    agent.tick()
    node, device = agent.pairs[0]
    node.observe_slow(read_extended_readings(device, node.gpu_uuids))
    agent.clock.now_ns += 3 * SECOND
    samples = agent.samples()
    slow = {s.labels["look"]: s.value for s in agent.all_samples("eelgrid_gpu_reading_age_seconds")}
    assert slow == {"quick": 3.0, "slow": 3.0}
    assert samples["eelgrid_gpu_power_limit_requested_watts"].value > 0.0
    assert samples["eelgrid_host_cpu_energy_joules_total"].value >= 0.0


def test_a_lost_device_keeps_no_slow_reading():
    agent = Agent()
    agent.tick()
    node, device = agent.pairs[0]
    node.observe_slow(read_extended_readings(device, node.gpu_uuids))
    device.faults.lose_gpu(node.gpu_uuids[0])
    agent.tick()
    samples = agent.samples()
    assert samples["eelgrid_gpu_up"].value == 0.0
    assert "eelgrid_gpu_power_limit_requested_watts" not in samples
    assert {s.labels["reason"] for s in agent.all_samples("eelgrid_gpu_reading_absent")} == {"gpu_lost"}


def test_errors_are_counted_by_code_with_their_last_time():
    agent = Agent()
    agent.tick()
    node = agent.nodes[0]
    event = DeviceEvent(kind=DeviceEventKind.XID, gpu_uuid=node.gpu_uuids[0], code=79)
    for _ in range(2):
        agent.clock.now_ns += SECOND
        node.observe_slow(ExtendedReadings(monotonic_ns=0, wall_ns=0, events=(event,)))
    samples = agent.samples()
    assert samples["eelgrid_gpu_xid_errors_total"].labels == {"gpu": node.gpu_uuids[0], "xid": "79"}
    assert samples["eelgrid_gpu_xid_errors_total"].value == 2.0
    assert samples["eelgrid_gpu_xid_last_timestamp_seconds"].value == agent.clock.now_ns / 1e9


def test_what_was_attributed_adds_up_to_the_device_and_names_nobody():
    agent = Agent()
    agent.tick()
    uuid = agent.nodes[0].gpu_uuids[0]
    pod = UsageOwner(kind=UsageOwnerKind.POD, namespace="team", pod="train-0", container="main", pod_uid="1-2")
    user = UsageOwner(kind=UsageOwnerKind.USER, user="1000")
    process = UsageOwner(kind=UsageOwnerKind.PROCESS, pid=4711)
    charged = {"part": EnergyUse.ACTIVE, "method": ShareMethod.PROCESS_SM, "confidence": ShareConfidence.LOW}
    agent.attribution = Attribution(
        shares={},
        accounts={
            EnergyAccount(owner=owner.account(), gpu_uuid=uuid, gpu_instance_id=place, **charged): energy_mj
            for owner, place, energy_mj in ((pod, 3, 1500), (user, None, 250), (process, None, 250))
        },
        nobody={uuid: {"unallocated": 3000, "ended": 700}},
        estimates={
            uuid: UncertainEnergy(energy_j=5.0, uncertainty_j=0.2, method=EnergyMeasurement.COUNTER, seconds=9.0)
        },
        anomalies=(
            OngoingAnomaly(
                subject=AnomalySubject(kind=EnergyAnomalyKind.HELD_IDLE, gpu_uuid=uuid, owner=pod),
                since_ns=0,
                since_wall_ns=0,
                wasted_mj=1,
            ),
        ),
    )
    shares = agent.all_samples("eelgrid_workload_gpu_energy_joules_total")
    labels = {sample.labels["owner"]: sample.labels for sample in shares}
    assert labels["pod"].items() >= {"namespace": "team", "pod": "train-0", "container": "main"}.items()
    assert labels["pod"]["gpu_instance"] == "3"
    assert (labels["pod"]["method"], labels["pod"]["confidence"]) == ("process_sm", "low")
    assert not {"4711", "1-2"} & {value for found in labels.values() for value in found.values()}
    assert sum(sample.value for sample in shares) == 2.0
    samples = agent.samples()
    without = agent.all_samples("eelgrid_gpu_unattributed_energy_joules_total")
    assert [(sample.labels["reason"], sample.value) for sample in without] == [("unallocated", 3.0)]
    assert samples["eelgrid_gpu_ended_energy_joules_total"].value == 0.7, "apart, for rates have counted it"
    assert samples["eelgrid_gpu_energy_uncertainty_joules"].value == 0.2
    anomalies = {s.labels["anomaly"]: s.value for s in agent.all_samples("eelgrid_gpu_anomaly")}
    assert anomalies == {kind.value: float(kind is EnergyAnomalyKind.HELD_IDLE) for kind in EnergyAnomalyKind}


def test_the_guard_shows_its_plan_and_its_lease():
    agent = Agent()
    agent.tick()
    before = agent.samples()
    assert "eelgrid_guard_lease_left_seconds" not in before
    assert before["eelgrid_gpu_quarantined"].value == 0.0
    plan = NodePlan(node_name="n0", epoch=7, lease_s=30.0, power_budget_w=500.0)
    agent.nodes[0].on_message(ConnectResponse(message=plan))
    agent.clock.now_ns += 10 * SECOND
    samples = agent.samples()
    assert samples["eelgrid_guard_plan_epoch"].value == 7.0
    assert samples["eelgrid_guard_lease_left_seconds"].value == pytest.approx(20.0)
    assert samples["eelgrid_guard_enforcing"].value == 0.0


def test_calls_are_timed_by_kind_failed_ones_too():
    clock, times = ManualClock(), CallLatencies()

    class Slow(SimulatedNode):
        def read(self, uuid):
            clock.now_ns += 2_000_000
            if uuid == "lost":
                raise GpuLostError("gone")
            return uuid

    spec = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=())
    device = time_calls(Slow(spec, monotonic_ns=clock.monotonic_ns, seed=1), times, monotonic_ns=clock.monotonic_ns)
    assert device.read("a") == "a"
    with pytest.raises(GpuLostError):
        device.read("lost")
    (found,) = summarize_latencies(times).values()
    assert found.sum_s == pytest.approx(0.004)
    below = dict(zip((*CALL_BOUNDS_S, math.inf), found.below, strict=True))
    assert (below[1e-3], below[3e-3], below[math.inf]) == (0, 2, 2)


def test_what_the_worker_does_and_costs_is_shown():
    class OneChild:
        starts_total, hangs_total, unkillable_count, hung_gpus, children = 3, 2, 1, ("GPU-1",), (os.getpid(), 2**31 - 1)

    clock = ManualClock()
    collector = AgentCollector([], connections=lambda: 0, monotonic_ns=clock.monotonic_ns, worker=OneChild())
    found = collector.build_snapshot().agent.worker
    assert (found.starts, found.hangs, found.left_behind, found.hung_gpus) == (3, 2, 1, 1)
    assert found.cpu_s > 0.0
    assert found.resident_bytes > 1e6


def test_the_timed_port_has_every_call_of_the_port():
    calls = {name for name in vars(DevicePort) if not name.startswith("_")}
    spec, clock = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=()), ManualClock()
    node = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=1)
    assert calls == set(vars(time_calls(node, CallLatencies(), monotonic_ns=clock.monotonic_ns)))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.4", True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;version=9.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text;q=lots", False),
    ],
)
def test_the_format_is_what_the_scraper_likes(accept, wanted):
    assert prefers_openmetrics(accept) is wanted
    answer = Agent().page.build_response("/metrics", accept=accept)
    assert answer.content_type == (CONTENT_OPENMETRICS if wanted else CONTENT_PROMETHEUS)
    assert answer.body.endswith(b"# EOF\n") is wanted


@pytest.mark.parametrize(
    ("header", "taken"),
    [("", False), ("gzip", True), ("gzip;q=0", False), ("*", True), ("identity", False), ("br, gzip;q=0.1", True)],
)
def test_pages_are_compressed_where_that_is_taken(header, taken):
    page = Agent().page
    plain, answer = page.build_response("/metrics"), page.build_response("/metrics", accept_encoding=header)
    assert answer.encoding == ("gzip" if taken else "")
    assert (gzip.decompress(answer.body) if taken else answer.body) == plain.body
    assert page.renders_total == 1


def test_a_fleet_shows_the_agent_only():
    agent = Agent(nodes=3)
    agent.tick()
    samples = agent.samples()
    assert samples["eelgrid_agent_nodes"].value == 3.0
    assert samples["eelgrid_agent_samples_total"].value == 3.0
    assert not [name for name in samples if name.startswith("eelgrid_gpu")]


def test_the_page_is_rendered_once_a_tick():
    agent = Agent()
    agent.tick()
    for _ in range(5):
        agent.samples()
    assert agent.page.renders_total == 1
    agent.tick()
    agent.samples()
    assert agent.page.renders_total == 2


def test_ready_means_sampled_and_live_means_sampled_lately():
    agent = Agent()
    assert agent.page.build_response("/readyz").status == 503
    assert agent.page.build_response("/livez").status == 200
    agent.tick()
    assert agent.page.build_response("/readyz").status == 200
    agent.clock.now_ns += 61 * SECOND
    assert agent.page.build_response("/livez").status == 503
    assert agent.page.build_response("/metrics?name=x").status == 200
    assert agent.page.build_response("/").status == 404


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_over_http_and_frees_the_port():
    agent = Agent()
    agent.tick()
    server = MetricsEndpoint("127.0.0.1:0", agent.page, tls=None, insecure=False)
    server.start()
    try:
        assert "eelgrid_gpu_power_watts{" in get(server.port, "/metrics")[1]
        assert get(server.port, "/readyz") == (200, "ready\n")
        assert get(server.port, "/nothing")[0] == 404
    finally:
        server.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))


def test_a_port_in_use_is_reported_with_the_remedy():
    agent = Agent()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MetricsError, match=r"--metrics"):
            MetricsEndpoint(f"127.0.0.1:{taken.getsockname()[1]}", agent.page, tls=None, insecure=False)


def test_another_machine_needs_tls_or_the_word():
    with pytest.raises(MetricsError, match=r"--insecure"):
        MetricsEndpoint("0.0.0.0:0", Agent().page, tls=None, insecure=False)
