"""One real agent under the simulated NVML: what it says, what the controller shows, and what becomes of silence."""

import contextlib
import re
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.builders.cluster import build_request
from tests.e2e.processes import Cluster, fleet_of, metric, scrape

from eelgrid_controller.server.metrics.catalogue import METRICS
from eelgrid_protos import transport
from eelgrid_protos.agent_metrics import CATALOGUE
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import (
    ApplyStatus,
    GetInventoryRequest,
    GetNodePlanRequest,
    GetSamplesRequest,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    NodeState,
    Reading,
)

# One part without an energy counter and one whose utilization is not told, since absence must travel too.
GPUS = (
    {"product": "a100-sxm4-80gb", "model": "big", "count": 5},
    {"product": "a100-sxm4-80gb", "mig": ["3g.40gb@4"]},
    {"product": "t4"},
    {"product": "p100-pcie-16gb"},
)
NODE = {"name": "solo", "cpu_milli": 64_000, "memory_bytes": 2**39, "pool": "lab", "gpus": list(GPUS)}
SHOWN = {
    "power_w": Reading.POWER_W,
    "energy_j": Reading.ENERGY_J,
    "utilization_ratio": Reading.UTILIZATION_RATIO,
    "memory_used_bytes": Reading.MEMORY_USED_BYTES,
    "temperature_c": Reading.TEMPERATURE_C,
}


def begin(cluster):
    """A controller and its one agent, which sends every tick at once; the agent."""
    cluster.controller()
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.2)
    agent = cluster.agent(fleet_of(cluster.folder / "fleet.json", [NODE]))
    cluster.until_ready(1)
    return agent


def occupy(cluster, name, count, milli):
    """A workload on GPUs of the big model, placed."""
    models = {gpu.gpu.model for gpu in gpus_of(cluster)}
    big = tuple(model for model in models if "A100" in model.upper())
    wanted = build_request(name, name=name, cpu=4, memory_gib=16, gpus=count, milli=milli, models=big)
    (placement,) = cluster.operators.submit_workload(wanted, timeout=10.0).workload.placements
    return placement


def gpus_of(cluster):
    return cluster.operators.list_gpus(ListGpusRequest(), timeout=5.0).gpus


def node_of(cluster):
    (node,) = cluster.operators.list_nodes(ListNodesRequest(), timeout=5.0).nodes
    return node


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A cluster of one node with work on three of its GPUs; no test of this module changes it."""
    with Cluster(tmp_path_factory.mktemp("live")) as cluster:
        agent = begin(cluster)
        occupy(cluster, "whole", 2, 1000)
        occupy(cluster, "half", 1, 500)
        cluster.until(lambda: applied_epoch(cluster) == 2, what="the plan is applied")
        cluster.until(lambda: cluster.summary().measured_gpus == 8, what="readings have come")
        yield cluster, agent


def applied_epoch(cluster):
    (status,) = cluster.operators.list_plans(ListPlansRequest(), timeout=5.0).plans
    return status.applied.epoch if status.applied else 0


def readings(batch, gpus):
    """The batch's last tick by device and name, None where it is absent."""
    columns = {column.reading: column for column in batch.gpu_columns}
    start = (len(batch.time_ns) - 1) * gpus
    return [{name: columns[reading].cell(start + index) for name, reading in SHOWN.items()} for index in range(gpus)]


def test_the_controller_shows_what_the_node_says(live):
    cluster, agent = live
    node = cluster.node_api(agent)
    inventory = node.get_inventory(GetInventoryRequest(), timeout=5.0).inventory
    assert node.get_inventory(GetInventoryRequest(node_name="solo"), timeout=5.0).inventory == inventory
    with pytest.raises(NotFound, match="solo"):
        node.get_inventory(GetInventoryRequest(node_name="other"), timeout=5.0)
    assert (inventory.node_name, inventory.pool, inventory.cpu_milli, inventory.simulated) == (
        "solo",
        "lab",
        64_000,
        True,
    )
    assert node_of(cluster).inventory == inventory
    statuses = gpus_of(cluster)
    assert tuple(status.gpu for status in statuses) == inventory.gpus
    assert len(inventory.gpus) == 8

    def same():
        """The newest tick on both sides, unless one more came in between; energy grows from the second tick on."""
        said = node.get_samples(GetSamplesRequest(), timeout=5.0)
        assert said.age_s < 5.0
        told = readings(said.samples, 8)
        shown = [{name: getattr(status, name) for name in SHOWN} for status in gpus_of(cluster)]
        return shown if told == shown and all(gpu["energy_j"] for gpu in shown) else None

    shown = cluster.until(same, what="both sides tell one tick")
    assert [gpu["utilization_ratio"] is None for gpu in shown] == [False] * 5 + [True, False, False]
    assert all(gpu[name] is not None for gpu in shown for name in SHOWN if name != "utilization_ratio")
    held = [status.allocated_milli for status in statuses]
    assert sorted(held) == [0] * 5 + [500, 1000, 1000]
    busy = [gpu for gpu, milli in zip(shown, held, strict=True) if milli == 1000]
    assert [gpu["utilization_ratio"] for gpu in busy] == [1.0, 1.0]


def test_the_plan_is_the_same_on_both_sides(live):
    cluster, agent = live
    held = cluster.node_api(agent).get_node_plan(GetNodePlanRequest(), timeout=5.0)
    (status,) = cluster.operators.list_plans(ListPlansRequest(), timeout=5.0).plans
    assert (held.plan, held.applied) == (status.plan, status.applied)
    assert status.applied.status is ApplyStatus.APPLIED
    assert sorted(a.workload_id for a in held.plan.assignments) == ["half", "whole"]
    assert 0.0 < held.lease_left_s <= held.plan.lease_s


BASE_UNITS = ("seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz")
FOREIGN_UNIT = re.compile(
    r"_(ms|millis|milliseconds|us|microseconds|ns|minutes|hours|milli|percent|pct|[kmg]i?b|kilobytes|megabytes|"
    r"w|kw|mw|milliwatts|kilowatts|j|kj|kwh|mj|mhz|megahertz|ghz|c|degrees)(_total)?$"
)


@pytest.mark.parametrize("side", ["controller", "agent"])
def test_metrics_are_named_as_prometheus_wants(live, side):
    cluster, agent = live
    address = cluster.metrics if side == "controller" else cluster.agents[agent]["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len(types) == len({name for name, _ in types}) > 10
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    for name, kind in types:
        assert re.fullmatch(r"(eelgrid|process)_[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
        assert helps.get(name), f"{name} says nothing of itself"
        assert name.endswith("_total") == (kind == "counter"), f"{name} is a {kind}"
        assert not FOREIGN_UNIT.search(name), f"{name} is not in a base unit"
        if kind == "histogram":
            assert name.endswith(BASE_UNITS)
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    labels = {label for line in series for label in re.findall(r"[{,]([A-Za-z_0-9]+)=", line)}
    shown = {label for metric in CATALOGUE for label in metric.all_labels}
    told = {label for metric in METRICS.values() for label in metric.labels}
    assert labels <= (told | {"le"} if side == "controller" else shown | {"le"})
    for probe in ("livez", "readyz"):
        with urllib.request.urlopen(f"http://{address}/{probe}", timeout=5) as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://{address}/nothing", timeout=5)
    refused.value.close()


def test_metrics_tell_what_the_api_reports(live):
    cluster, agent = live
    families = scrape(cluster.agents[agent]["metrics"])
    uuids = {gpu.gpu.uuid for gpu in gpus_of(cluster)}
    for name in ("eelgrid_gpu_power_watts", "eelgrid_gpu_energy_joules", "eelgrid_gpu_memory_used_bytes"):
        assert {sample.labels["gpu"] for sample in families[name].samples} == uuids
    assert len(families["eelgrid_gpu_utilization_ratio"].samples) == 7, "an absent reading is no series"
    states = {s.labels["state"]: s.value for s in scrape(cluster.metrics)["eelgrid_nodes"].samples}
    assert states == {"ready": 1.0, "lost": 0.0}
    assert metric(cluster.metrics, "eelgrid_measured_gpus") == 8
    assert metric(cluster.metrics, "eelgrid_gpus_allocated_ratio") == pytest.approx(2.5 / 8)


@pytest.mark.parametrize(
    ("side", "services"),
    [
        ("controller", ("eelgrid.v1.AgentService", "eelgrid.v1.IngestService", "eelgrid.v1.OperatorService")),
        ("agent", ("eelgrid.v1.NodeService",)),
    ],
)
def test_health_and_reflection(live, side, services):
    cluster, agent = live
    address = cluster.address if side == "controller" else cluster.agents[agent]["listen"]
    with transport.open_blocking_channel(address, tls=None) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *services):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="eelgrid.v1.Nobody"), timeout=5)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in services),
        ]
        listed, *files = reflect(iter(asked), timeout=5)
        found = {service.name for service in listed.list_services_response.service}
        assert found == {*services, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert len(files) == len(services)
        assert all(file.file_descriptor_response.file_descriptor_proto for file in files)


def statuses_until_the_end(address, act):
    """What a health watch says from SERVING on, while `act` ends the process."""
    said = []
    with transport.open_blocking_channel(address, tls=None) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
        with contextlib.suppress(grpc.RpcError):
            for answer in watch:
                said.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
                if len(said) == 1:
                    act()
    return said


def test_an_agent_that_is_killed_and_comes_back(cluster):
    agent = begin(cluster)
    occupy(cluster, "whole", 3, 1000)
    energies = []

    def grown(least):
        """Looks at the energy until it has grown so many times; it may never fall."""
        start = len(energies)

        def look():
            gpus = gpus_of(cluster)
            now = [status.energy_j for status in gpus]
            if None not in now and (len(energies) == start or now != energies[-1]):
                if len(energies) > start:
                    assert all(b >= a for a, b in zip(energies[-1], now, strict=True)), "energy fell"
                energies.append(now)
            return len(energies) - start >= least

        cluster.until(look, what="energy grows")

    grown(4)
    fresh = node_of(cluster)
    assert fresh.power_w > 0
    agent.kill()
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == 0, what="the stream has ended")
    ages = []

    def is_stale():
        node = node_of(cluster)
        ages.append(node.sample_age_s)
        return node.power_w is None and node

    stale = cluster.until(is_stale, what="old readings no longer count")
    # Three send intervals and five seconds.
    assert stale.sample_age_s > 5.6
    assert ages == sorted(ages)
    assert len(ages) > 10
    assert all(status.power_w is status.energy_j is None for status in gpus_of(cluster))
    assert all(status.sample_age_s > 5.6 for status in gpus_of(cluster))
    summary = cluster.summary()
    assert (summary.measured_gpus, summary.measured_power_w) == (0, 0.0)
    assert summary.modelled_power_w > 0
    assert metric(cluster.metrics, "eelgrid_measured_gpus") == 0
    assert node_of(cluster).state is NodeState.READY, "an agent that is away for moments is no lost node"

    agent = cluster.agent(cluster.folder / "fleet.json")
    cluster.until(lambda: cluster.summary().measured_gpus == 8, what="readings are fresh again")
    assert node_of(cluster).sample_age_s < 5.6
    grown(3)
    cluster.until(lambda: applied_epoch(cluster) == 1, what="the plan is applied again")
    assert node_of(cluster).samples_lost == 0

    assert statuses_until_the_end(cluster.agents[agent]["listen"], agent.stop) == ["SERVING", "NOT_SERVING"]
    controller = cluster.children[0]
    assert statuses_until_the_end(cluster.address, controller.stop) == ["SERVING", "NOT_SERVING"]
    assert (agent.ended(), controller.ended()) == (0, 0)
