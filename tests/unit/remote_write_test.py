"""Remote write: series are those of the pages, times are in order, and a receiver that fails loses nothing uncounted."""

import contextlib
import dataclasses
import itertools
import logging
import socket
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.cluster import build_node
from tests.builders.energy import build_ledger_node
from tests.builders.metrics import HOST_READINGS, build_gpu_view, build_snapshot
from tests.fakes.remote_write_receiver import RemoteWriteReceiver, decode_request, receiving
from tests.waiting import poll_until

from eelgrid_agent.devices.port import FAST_READINGS, SLOW_READINGS
from eelgrid_agent.energy.accounts import EnergyAccount, EnergyUse, ShareConfidence, ShareMethod, UsageOwner
from eelgrid_agent.energy.accounts import UsageOwnerKind as Kind
from eelgrid_agent.energy.report import build_owner_message
from eelgrid_agent.metrics.collector import _labels
from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.config import RemoteWriteConfig
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.server.remote_write.series import NodeSeries, OwnerCounters, PageSeries, list_owner_labels
from eelgrid_controller.server.remote_write.wire import build_request as build_body
from eelgrid_controller.server.remote_write.wire import encode_labels, encode_samples
from eelgrid_controller.server.remote_write.writer import RemoteWriter
from eelgrid_protos.agent_metrics import CATALOGUE, MetricScope
from eelgrid_protos.messages import (
    Absence,
    AbsenceReason,
    AttributionConfidence,
    AttributionMethod,
    Column,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    Inventory,
    OwnerKind,
    Reading,
    SampleBatch,
    WindowDevice,
    WindowShare,
)

NOW_MS = 1_800_000_000_000
TARGET = {"instance", "job"}
LOG = logging.getLogger("test")


def decoded(parts):
    return decode_request(build_body(parts)) if parts else []


def bare(sample):
    """A sample as a page has it: without what a scraper adds."""
    return sample.name, frozenset(pair for pair in sample.labels if pair[0] not in {*TARGET, "__name__"}), sample.value


def batch_of(times_ms, readings=(Reading.POWER_W,), gpus=2, sequence=1, **changes):
    ticks = len(times_ms)
    return SampleBatch(
        sequence=sequence,
        inventory_generation=1,
        time_ns=tuple(int(one * 1_000_000) for one in times_ms),
        gpu_columns=tuple(Column(reading=one, values=tuple(float(n) for n in range(gpus * ticks))) for one in readings),
        **changes,
    )


# The encoding


def test_samples_read_back_as_they_were_whatever_is_repeated():
    given = [
        (
            {
                "__name__": f"metric_{number % 7}",
                "gpu": f"GPU-{number // 7:036d}",
                "text": "äx" * (number % 90),
                "none": "",
            },
            number * 1.5 - 7.0,
        )
        for number in range(3000)
    ]
    parts = [
        encode_samples([(encode_labels(labels), value) for labels, value in given[begin:end]], NOW_MS + begin)
        for begin, end in ((0, 1), (1, 700), (700, 3000))
    ]
    found = decode_request(build_body(parts))
    assert [sample.value for sample in found] == [value for _, value in given]
    assert [dict(sample.labels) for sample in found] == [
        {name: value for name, value in labels.items() if value} for labels, _ in given
    ]
    assert [sample.time_ms - NOW_MS for sample in found] == [0] + 699 * [1] + 2300 * [700]
    assert sum(part.samples for part in parts) == 3000


def test_labels_that_repeat_cost_a_few_bytes():
    series = [
        encode_labels({"__name__": f"eelgrid_metric_{one}_watts", "gpu": f"GPU-{gpu:036d}", "job": "eelgrid-agent"})
        for one in range(30)
        for gpu in range(8)
    ]
    part = encode_samples([(one, 1.0) for one in series], NOW_MS)
    assert part.unpacked_bytes > 100 * 240
    assert len(part.elements) < 40 * 240


@pytest.mark.parametrize("time_ms", [0, -1, 2**42])
def test_a_time_of_another_century_is_refused(time_ms):
    with pytest.raises(ValueError, match="between 1971 and 2109"):
        encode_samples([(encode_labels({"__name__": "up"}), 1.0)], time_ms)


# Series of devices


def test_series_of_a_node_are_those_of_its_agents_page():
    view = build_gpu_view(value=1.0)
    inventory = Inventory(
        node_name="n", cpu_milli=1500, memory_bytes=10, pool="p", driver_version="580", boot_id="b", simulated=True,
        gpus=(view.gpu,),
    )  # fmt: skip
    readings = [one for one in (*FAST_READINGS, *SLOW_READINGS) if one in {r for m in CATALOGUE for r in m.readings}]
    batch = SampleBatch(
        sequence=1,
        inventory_generation=1,
        time_ns=(NOW_MS * 1_000_000,),
        gpu_columns=tuple(Column(reading=one, values=(1.0,)) for one in dict.fromkeys(readings)),
        host_columns=tuple(Column(reading=one, values=(1.0,)) for one in HOST_READINGS),
    )
    parts, skipped = NodeSeries(inventory, {"cluster": "x"}).encode_batch(batch, interval_ms=15_000, now_ms=NOW_MS)
    found = decoded(parts)
    assert skipped == 0
    assert {dict(sample.labels)["instance"] for sample in found} == {"n"}
    assert {dict(sample.labels)["cluster"] for sample in found} == {"x"}
    mine = {bare(sample) for sample in found}
    mine = {(name, labels - {("cluster", "x")}, value) for name, labels, value in mine}
    page = MetricsRenderer().render_snapshot(build_snapshot(view, value=1.0)).prometheus().decode()
    theirs = {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if value), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    # The message does not say who the agent runs as.
    expected = {
        (name, frozenset(("access", "unspecified") if pair[0] == "access" else pair for pair in labels), value)
        for name, labels, value in theirs
    }
    assert mine <= expected
    of_readings = {one.name for one in CATALOGUE if one.readings and one.scope in (MetricScope.GPU, MetricScope.HOST)}
    assert {name for name, *_ in mine} >= of_readings
    assert {one for one in expected if one[0] in of_readings} == {one for one in mine if one[0] in of_readings}
    assert {"eelgrid_gpu_info", "eelgrid_node_info", "eelgrid_gpu_up", "eelgrid_gpu_memory_size_bytes"} <= {
        name for name, *_ in mine
    }


def test_of_each_reading_the_ticks_an_interval_apart_are_written_with_their_times():
    node = NodeSeries(build_node(), {})
    times = [NOW_MS + 1000 * one for one in range(-40, 0)]
    found = []
    for begin in range(0, 40, 5):
        parts, skipped = node.encode_batch(batch_of(times[begin : begin + 5]), interval_ms=15_000, now_ms=NOW_MS)
        assert skipped == 0
        found += decoded(parts)
    power = [(sample.time_ms - NOW_MS, sample.value) for sample in found if sample.name == "eelgrid_gpu_power_watts"]
    assert [at_ms for at_ms, _ in power] == [-40_000, -40_000, -25_000, -25_000, -10_000, -10_000]
    assert [value for _, value in power] == [0.0, 1.0] * 3
    slow, _ = node.encode_batch(batch_of([NOW_MS - 20_000], (Reading.PROCESSES,)), interval_ms=15_000, now_ms=NOW_MS)
    assert {sample.name for sample in decoded(slow)} == {"eelgrid_gpu_processes"}, "readings have times of their own"


@pytest.mark.parametrize("late_ms", [-5_000, 3_600_000])
def test_a_tick_that_a_receiver_would_refuse_is_left_out_and_counted(late_ms):
    node = NodeSeries(build_node(), {})
    assert decoded(node.encode_batch(batch_of([NOW_MS]), interval_ms=1000, now_ms=NOW_MS).parts)
    assert node.encode_batch(batch_of([NOW_MS + late_ms]), interval_ms=1000, now_ms=NOW_MS) == ([], 2)
    later = NodeSeries(build_node(pool="other"), {}, node)
    assert later.encode_batch(batch_of([NOW_MS - 1]), interval_ms=1000, now_ms=NOW_MS).skipped == 2
    assert decoded(later.encode_batch(batch_of([NOW_MS + 1000]), interval_ms=1000, now_ms=NOW_MS).parts)


def test_an_absent_reading_is_no_series():
    column = Column(
        reading=Reading.POWER_W, values=(7.0, 0.0), absences=(Absence(reason=AbsenceReason.GPU_LOST, cells=(1,)),)
    )
    batch = dataclasses.replace(batch_of([NOW_MS]), gpu_columns=(column,))
    parts, _ = NodeSeries(build_node(), {}).encode_batch(batch, interval_ms=1000, now_ms=NOW_MS)
    power = [one for one in decoded(parts) if one.name == "eelgrid_gpu_power_watts"]
    assert [(dict(one.labels)["gpu"], one.value) for one in power] == [("GPU-n1-0", 7.0)]


# Series of owners


@pytest.mark.parametrize(
    "owner",
    [
        UsageOwner(kind=Kind.POD, namespace="a", pod="b", container="c", pod_uid="u", container_id="0123456789abcdef"),
        UsageOwner(kind=Kind.POD, pod_uid="u", container_id="0123456789abcdef"),
        UsageOwner(kind=Kind.SLURM, job="7", step="0"),
        UsageOwner(kind=Kind.WORKLOAD, workload="w-1"),
        UsageOwner(kind=Kind.RAY, ray_job="01", unit="x.service"),
    ],
)
def test_owners_have_the_labels_of_the_agents_page(owner):
    account = EnergyAccount(
        gpu_uuid="GPU-1", gpu_instance_id=3, owner=owner.account(), part=EnergyUse.ACTIVE,
        method=ShareMethod.MIG_SLICE, confidence=ShareConfidence.LOW,
    )  # fmt: skip
    share = WindowShare(
        device=0, owner=0, gpu_instance_id=3, part=EnergyPart.ACTIVE, method=AttributionMethod.MIG_SLICE,
        confidence=AttributionConfidence.LOW,
    )  # fmt: skip
    assert list_owner_labels(build_owner_message(owner.account()), "GPU-1", share) == _labels(account)


def window_of(minute, *energy_mj):
    """A minute of one device, by owner: a workload, a job of Slurm, nobody."""
    owners = (
        EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-1"),
        EnergyOwner(kind=OwnerKind.SLURM, job="7"),
        EnergyOwner(kind=OwnerKind.UNALLOCATED),
    )
    shares = tuple(
        WindowShare(
            device=0, owner=at, part=EnergyPart.ACTIVE, method=AttributionMethod.EXCLUSIVE,
            confidence=AttributionConfidence.HIGH, energy_mj=one,
        )
        for at, one in enumerate(energy_mj)
    )  # fmt: skip
    begin_ns = (NOW_MS + 60_000 * minute) * 1_000_000
    return EnergyWindow(
        incarnation=1, number=minute + 1, begin_ns=begin_ns, end_ns=begin_ns + 60 * 10**9,
        devices=(WindowDevice(gpu_uuid="GPU-1", total_mj=sum(energy_mj)),), owners=owners, shares=shares,
    )  # fmt: skip


def owner_samples(counters, *windows):
    found = {}
    for window in windows:
        for sample in decoded(counters.encode_window("n1", window).parts):
            labels = dict(sample.labels)
            key = labels.get("workload") or labels.get("slurm_job") or labels["reason"]
            found.setdefault(key, []).append((sample.time_ms - NOW_MS, sample.value))
    return found


def test_counters_of_owners_begin_at_zero_and_add_up_windows():
    counters = OwnerCounters({})
    found = owner_samples(counters, window_of(0, 1500, 0, 500), window_of(1, 2500), window_of(2, 0, 4000, 1000))
    assert found == {
        "w-1": [(1, 0.0), (60_000, 1.5), (120_000, 4.0), (180_000, 4.0)],
        "7": [(1, 0.0), (60_000, 0.0), (180_000, 4.0)],
        "unallocated": [(1, 0.0), (60_000, 0.5), (180_000, 1.5)],
    }
    # Another controller goes on after it, in order of time.
    after = owner_samples(OwnerCounters({}), window_of(3, 1000))
    assert after == {"w-1": [(180_001, 0.0), (240_000, 1.0)]}


def test_a_window_that_does_not_come_after_the_last_is_counted_and_its_joules_come_with_the_next():
    counters = OwnerCounters({})
    owner_samples(counters, window_of(1, 1000))
    assert counters.encode_window("n1", window_of(0, 2000)) == ([], 1)
    assert owner_samples(counters, window_of(2, 1000))["w-1"] == [(180_000, 4.0)]


def test_counters_of_owners_are_bounded(build_rig):
    counters = OwnerCounters({}, owners_most=2)
    owner_samples(counters, window_of(0, 1000, 1000, 1000))
    assert len(counters._counters) == 2
    assert owner_samples(counters, window_of(70, 1000))["w-1"][0] == (4_200_001, 0.0), "it began anew"
    assert len(counters._counters) == 1, "others have had no window for an hour"


# Sending


@pytest.fixture
def build_rig():
    """Makes writers, which are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def build(url, **config):
            rig = Rig(url, **config)
            stack.callback(rig.writer.stop)
            return rig

        yield build


class Rig:
    """A writer with a clock of its own, whose thread is driven by the test."""

    def __init__(self, url, **config):
        self.now_s = 0.0
        self.writer = RemoteWriter(
            RemoteWriteConfig(url=url, interval_s=1.0, **config),
            instance="controller:9464",
            is_leading=lambda: self.is_leading,
            clock=Clock(now_ns=lambda: NOW_MS * 1_000_000, monotonic_s=lambda: self.now_s),
            log=LOG,
            starts=False,
        )
        self.is_leading = True
        self.nodes = {}

    def tick(self, at_s, *names, gpus=1):
        """A tick of each node."""
        for name in names:
            node = self.nodes.setdefault(name, build_node(name, gpus=gpus))
            self.writer.on_batch(node, batch_of([NOW_MS - 600_000 + int(1000 * at_s)], gpus=gpus))

    def look(self, after_s=1.0):
        """The thread's next look."""
        self.now_s += after_s
        self.writer.look()

    def count(self, name, result=None):
        values = {one.about.name: one.values for one in self.writer.families()}[f"eelgrid_remote_write_{name}"]
        return values[() if result is None else (result,)]


POWER = "eelgrid_gpu_power_watts"
PER_TICK = len(
    decoded(
        NodeSeries(build_node("a", gpus=1), {})
        .encode_batch(batch_of([NOW_MS], gpus=1), interval_ms=1000, now_ms=NOW_MS)
        .parts
    )
)


def test_requests_have_the_headers_of_the_protocol_and_of_the_file(tmp_path, build_rig):
    file = tmp_path / "headers"
    file.write_text("# of Mimir\nX-Scope-OrgID: team\n\nAuthorization: Bearer abc\nContent-Type: text/plain\n")
    with receiving() as receiver:
        rig = build_rig(receiver.url, headers_file=file)
        rig.tick(0, "a")
        rig.look()
        file.write_text("Authorization: Bearer new\n")
        rig.tick(1, "a")
        rig.look()
    (path, first), (_, second) = receiver.requests
    assert path == "/api/v1/write"
    assert first["Content-Encoding"] == "snappy"
    assert first["Content-Type"] == "application/x-protobuf"
    assert first["X-Prometheus-Remote-Write-Version"] == "0.1.0"
    assert (first["X-Scope-OrgID"], first["Authorization"]) == ("team", "Bearer abc")
    assert second["Authorization"] == "Bearer new"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_what_a_receiver_cannot_take_now_is_sent_again_in_order(status, build_rig):
    with receiving() as receiver:
        rig = build_rig(receiver.url)
        receiver.answers += [(status, {})] * 3
        for at_s in range(20):
            rig.tick(at_s, "a", "b")
            rig.look()
    assert rig.count("requests_total", "retried") == 3
    assert rig.count("buffered_samples") == 0
    assert rig.count("samples_total", "written") == 40 * PER_TICK
    for times in receiver.series(POWER).values():
        assert [at_ms for at_ms, _ in times] == [NOW_MS - 600_000 + 1000 * at_s for at_s in range(20)]


def test_retries_back_off_and_a_receiver_may_say_how_long(build_rig):
    with receiving() as receiver:
        rig = build_rig(receiver.url)
        receiver.answers += [(500, {})] * 5 + [(429, {"Retry-After": "25"})]
        rig.tick(0, "a")
        asked = []
        for _ in range(600):
            before = len(receiver.requests)
            rig.look(after_s=0.1)
            asked += [round(rig.now_s, 1)] * (len(receiver.requests) - before)
    waits = [round(later - sooner, 1) for sooner, later in itertools.pairwise(asked)]
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 25.0], abs=0.11)
    assert rig.count("samples_total", "written") == PER_TICK


def test_without_a_receiver_the_oldest_go_beyond_the_bound_and_are_counted(build_rig):
    with receiving() as receiver:
        url = receiver.url
    rig = build_rig(url, buffer_bytes=10**6)
    names = [f"node-{number}" for number in range(50)]
    for at_s in range(60):
        rig.tick(at_s, *names, gpus=8)
        rig.look(after_s=40.0)
    made = 60 * 50 * (rig.count("buffered_samples") + rig.count("samples_total", "dropped")) // (60 * 50)
    assert rig.count("buffered_bytes") <= 10**6
    assert rig.count("samples_total", "dropped") > 0
    assert rig.count("samples_total", "written") == 0
    port = int(url.split(":")[2].split("/")[0])
    with RemoteWriteReceiver(("127.0.0.1", port)) as receiver:
        rig.look(after_s=40.0)
    assert len(receiver.samples) == made - rig.count("samples_total", "dropped")
    times = [at_ms for at_ms, _ in receiver.series(POWER)[next(iter(receiver.series(POWER)))]]
    assert times == sorted(times)
    assert times[-1] == NOW_MS - 600_000 + 59_000, "the newest are there"
    assert times[0] > NOW_MS - 600_000


def test_a_node_whose_samples_are_refused_costs_no_other_node_its_own(build_rig):
    with receiving() as receiver:
        receiver.judge = lambda samples: 400 if any(("instance", "node-13") in one.labels for one in samples) else 204
        rig = build_rig(receiver.url)
        rig.tick(0, *[f"node-{number}" for number in range(30)])
        rig.look()
    assert rig.count("samples_total", "refused") == PER_TICK
    assert rig.count("samples_total", "written") == 29 * PER_TICK
    assert rig.count("buffered_samples") == 0
    assert {dict(key)["instance"] for key in receiver.series(POWER)} == {
        f"node-{number}" for number in range(30) if number != 13
    }
    assert len(receiver.requests) <= 12


def test_divided_requests_are_bounded_when_all_is_refused(build_rig):
    with receiving(judge=lambda _: 400) as receiver:
        rig = build_rig(receiver.url)
        rig.tick(0, *[f"node-{number}" for number in range(1500)])
        rig.look()
    assert rig.count("samples_total", "refused") == 1500 * PER_TICK
    assert rig.count("buffered_samples") == 0
    assert len(receiver.requests) <= 5 * (2 * 64 + 1)


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_no_receiver_takes_is_dropped_at_once_and_counted(status, build_rig):
    with receiving(judge=lambda _: status) as receiver:
        rig = build_rig(receiver.url)
        rig.tick(0, "a", "b")
        rig.look()
    assert len(receiver.requests) == 1
    assert rig.count("samples_total", "refused") == 2 * PER_TICK
    assert rig.count("requests_total", "refused") == 1


def test_requests_are_bounded(build_rig):
    sizes = []
    with receiving(judge=lambda samples: sizes.append(len(samples)) or 204) as receiver:
        rig = build_rig(receiver.url)
        rig.tick(0, *[f"node-{number}" for number in range(1000)])
        rig.look()
    assert receiver.series(POWER).keys()
    assert sum(sizes) == 1000 * PER_TICK
    assert max(sizes) <= 2000


def test_who_does_not_lead_sends_nothing(build_rig):
    with receiving() as receiver:
        rig = build_rig(receiver.url)
        rig.is_leading = False
        rig.tick(0, "a")
        rig.look()
        rig.is_leading = True
        rig.tick(1, "a")
        rig.look()
    assert list(receiver.series(POWER).values()) == [[(NOW_MS - 599_000, 0.0)]]


def test_what_cannot_be_encoded_is_left_out_and_counted(build_rig):
    with receiving() as receiver:
        rig = build_rig(receiver.url)
        rig.writer.on_batch(build_node("a"), dataclasses.replace(batch_of([NOW_MS]), gpu_columns=("none",)))
        rig.tick(1, "b")
        rig.look()
    assert rig.count("failures_total") == 1
    assert rig.count("samples_total", "written") == PER_TICK


def test_a_page_and_windows_are_sent_from_the_thread_and_a_stop_sends_the_rest():
    with receiving() as receiver:
        writer = RemoteWriter(
            RemoteWriteConfig(url=receiver.url), instance="c:1", is_leading=lambda: True, clock=Clock(), log=LOG
        )
        writer.on_page([build_family("eelgrid_ledger_energy_joules_total", {"ml": 7.0})])
        poll_until(lambda: receiver.samples, "the page came")
        now_minute = (time.time_ns() // 1_000_000 - NOW_MS) // 60_000
        writer.on_window(build_ledger_node("n1"), window_of(now_minute, 1000))
        writer.stop()
        assert not writer._thread.is_alive()
    assert receiver.series("eelgrid_ledger_energy_joules_total").keys() == {
        (("instance", "c:1"), ("job", "eelgrid-controller"), ("namespace", "ml"))
    }
    (values,) = receiver.series("eelgrid_workload_gpu_energy_joules_total").values()
    assert [value for _, value in values] == [0.0, 1.0]


def test_a_receiver_that_hangs_delays_neither_who_hands_over_nor_the_stop(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        writer = RemoteWriter(
            RemoteWriteConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}/"),
            instance="c:1",
            is_leading=lambda: True,
            clock=Clock(),
            log=LOG,
        )
        writer.on_page([build_family("eelgrid_agents_connected", 1.0)])
        connection, _ = silent.accept()
        with connection:
            start_s = time.monotonic()
            writer.on_page([build_family("eelgrid_agents_connected", 2.0)])
            assert time.monotonic() - start_s < 0.5
            writer.stop()
            assert time.monotonic() - start_s < 5.0
        writer._thread.join(15.0)
        assert not writer._thread.is_alive()
    assert "remote_write=stopped samples_not_written=1" in caplog.text


def test_a_page_is_divided_into_parts_of_bounded_size():
    families = [build_family("eelgrid_ledger_energy_joules_total", {f"ns-{one}": float(one) for one in range(5000)})]
    parts = PageSeries({}, "c:1").encode_page(families, NOW_MS)
    assert [part.samples for part in parts] == [2000, 2000, 1000]
    assert len(decoded(parts)) == 5000


# The configuration


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "prometheus:9090"}, "--remote-write is"),
        ({"url": "http://a b/"}, "--remote-write is"),
        ({"url": "http://host:99999/"}, "--remote-write is"),
        ({"url": "http://me:secret@host/"}, "--remote-write-headers"),
        ({"interval_s": 0.5}, "--remote-write-interval is 0.5"),
        ({"buffer_bytes": 10}, "--remote-write-buffer"),
        ({"labels": {"job": "x"}}, "--remote-write-label"),
        ({"labels": {"Cluster": "x"}}, "--remote-write-label"),
        ({"labels": {"cluster": ""}}, "--remote-write-label"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes, said):
    with pytest.raises(ControllerConfigError, match=said):
        RemoteWriteConfig(**({"url": "http://host/api/v1/write"} | changes))


@pytest.mark.parametrize("text", [None, "Authorization\n", "A\x01b: c\n"])
def test_headers_that_cannot_be_read_are_refused_at_the_start(tmp_path, text, build_rig):
    file = Path(tmp_path / "headers")
    if text is not None:
        file.write_text(text)
    with pytest.raises(ControllerConfigError, match="--remote-write-headers"):
        build_rig("http://127.0.0.1:1/", headers_file=file)
