"""The Prometheus endpoint: names in base units, absences without series, one rendering a tick."""

import re
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eelgrid_agent.engine import NoEngine
from eelgrid_agent.host import SimulatedHost
from eelgrid_agent.metrics import AgentCollector, MetricsError, MetricsServer, Page
from eelgrid_agent.node import Identity, Node, missing_looks, survey, take_looks
from eelgrid_agent.simulation import GpuSpec, NodeSpec, SimulatedNode
from eelgrid_protos.messages import AbsenceReason

SECOND = 1_000_000_000
UNITS = ("watts", "joules", "joules_total", "ratio", "bytes", "hertz", "celsius", "seconds", "seconds_total", "info")
COUNTS = ("samples_total", "batches_total", "connections_total", "nodes", "ticks", "under_way")


class HandClock:
    def __init__(self):
        self.now_ns = SECOND

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self.now_ns


class Agent:
    def __init__(self, nodes=1):
        self.clock = HandClock()
        self.pairs = [self._pair(index) for index in range(nodes)]
        self.nodes = [node for node, _ in self.pairs]
        collector = AgentCollector(self.nodes, connections=lambda: 3, monotonic_ns=self.clock.monotonic_ns)
        self.page = Page(
            collector, ticks=lambda: sum(n.ticks_total for n in self.nodes), monotonic_ns=self.clock.monotonic_ns
        )

    def _pair(self, index):
        spec = NodeSpec(
            node_name=f"n{index}", cpu_milli=1000, memory_bytes=10**9, gpus=(GpuSpec(product="openb-g2", model="G2"),)
        )
        device = SimulatedNode(spec, monotonic_ns=self.clock.monotonic_ns, seed=1)
        engine = NoEngine()
        node = Node(
            Identity(node_name=spec.node_name, agent_version="t", simulated=True),
            host=SimulatedHost(cpu_milli=1000, memory_bytes=10**9, load=engine.host_load), engine=engine,
            clock=self.clock, draw_incarnation=lambda: 1, ticks_most=10, first=survey(device),
        )  # fmt: skip
        return node, device

    def tick(self):
        self.clock.now_ns += SECOND
        for node, device in self.pairs:
            node.tick(take_looks(device, node.gpu_uuids), monotonic_ns=self.clock.now_ns)

    def samples(self):
        status, _, body = self.page.answer("/metrics")
        assert status == 200
        return {
            sample.name: sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples
        }


def test_one_node_shows_its_gpus_in_base_units():
    agent = Agent()
    agent.tick()
    agent.tick()
    samples = agent.samples()
    gpu = {"node": "n0", "gpu": agent.nodes[0].gpu_uuids[0]}
    assert samples["eelgrid_gpu_power_watts"].labels == gpu
    assert samples["eelgrid_gpu_power_watts"].value == pytest.approx(30.0, rel=0.1)
    assert samples["eelgrid_gpu_energy_joules_total"].value == pytest.approx(30.0, rel=0.1)
    assert samples["eelgrid_gpu_sm_clock_hertz"].value > 1e6
    assert samples["eelgrid_gpu_info"].labels["model"] == "G2"
    assert samples["eelgrid_host_memory_used_bytes"].value == 0.0
    assert samples["eelgrid_agent_samples_total"].value == 2.0
    assert samples["eelgrid_agent_connections_total"].value == 3.0


def test_every_name_ends_in_a_base_unit_or_a_count():
    agent = Agent()
    agent.tick()
    for name in agent.samples():
        assert name.startswith("eelgrid_")
        assert name.endswith(UNITS) or name.endswith(COUNTS), name
        assert not re.search(r"milli|percent|mhz|_mb", name)


def test_an_absent_reading_has_no_series():
    agent = Agent()
    agent.tick()
    node = agent.nodes[0]
    node.tick(missing_looks(node.gpu_uuids, AbsenceReason.TIMED_OUT), monotonic_ns=agent.clock.now_ns)
    samples = agent.samples()
    assert "eelgrid_gpu_power_watts" not in samples
    assert "eelgrid_gpu_info" in samples


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
    assert agent.page.answer("/readyz")[0] == 503
    assert agent.page.answer("/livez")[0] == 200
    agent.tick()
    assert agent.page.answer("/readyz")[0] == 200
    agent.clock.now_ns += 61 * SECOND
    assert agent.page.answer("/livez")[0] == 503
    assert agent.page.answer("/metrics?name=x")[0] == 200
    assert agent.page.answer("/")[0] == 404


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
    server = MetricsServer("127.0.0.1:0", agent.page, tls=None, insecure=False)
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


def test_a_port_in_use_is_said_with_the_remedy():
    agent = Agent()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MetricsError, match=r"--metrics"):
            MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", agent.page, tls=None, insecure=False)


def test_another_machine_needs_tls_or_the_word():
    with pytest.raises(MetricsError, match=r"--insecure"):
        MetricsServer("0.0.0.0:0", Agent().page, tls=None, insecure=False)
