"""The worker's protocol: every value of the port comes back as it was, and nothing else comes in."""

import json
import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.devices import port
from eelgrid_agent.devices.port import LATENCY_BUCKETS_S, CallLatencies, ControlPort, DevicePort, Missing, RawReadings
from eelgrid_agent.devices.process.protocol import (
    FAST_VALUE_READINGS,
    MAX_FRAME_BYTES,
    PORT_CALLS,
    FrameError,
    FrameReader,
    ProgressBoard,
    decode_error,
    encode_error,
    pack_frame,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, AccessLevel, ComputeInstance, Gpu, GpuInstance

VALUES = st.one_of(st.floats(0.0, 1e15), st.sampled_from(AbsenceReason).map(Missing))


def crossed(name, value):
    """The value after the way through a frame."""
    reader = FrameReader()
    reader.feed_data(pack_frame(PORT_CALLS[name].encode(value)))
    return PORT_CALLS[name].decode(reader.read_frame())


def row(readings):
    return st.fixed_dictionaries(dict.fromkeys(readings, VALUES))


@given(energy=VALUES, fast=row(FAST_VALUE_READINGS), slow=row(port.SLOW_READINGS), part=row(port.INSTANCE_READINGS))
@settings(max_examples=30, deadline=None)
def test_readings_cross_unchanged(energy, fast, slow, part):
    look = RawReadings(energy_counter_j=energy, values=fast)
    assert crossed("read", look) == look
    assert crossed("read_slow", slow) == slow
    parts = (port.InstanceReadings(gpu_instance_id=7, values=part),)
    assert crossed("read_instances", parts) == parts


def test_a_reading_that_an_adapter_left_out_was_not_sampled():
    look = crossed("read", RawReadings(energy_counter_j=1.0, values={}))
    assert set(look.values.values()) == {Missing(AbsenceReason.NOT_SAMPLED)}
    assert set(look.values) == set(FAST_VALUE_READINGS)


def test_listings_processes_links_events_and_settings_cross_unchanged():
    part = GpuInstance(
        id=2, profile_id=9, profile="3g.20gb", start=4, size=4, compute_instances=(ComputeInstance(id=0),)
    )
    gpus = (
        Gpu(uuid="GPU-1", index=0, product="p", model="m", gpu_instances=(part,), power_limit_min_w=1.5),
        Gpu(uuid="GPU-2", index=1, product="p", model="m"),
    )
    processes = (port.GpuProcess(pid=1, kind=port.ProcessKind.GRAPHICS, memory_bytes=2**40, sm_ratio=0.25),)
    links = (port.DeviceLink(one="GPU-1", other="GPU-2", ancestor=40, nvlinks=12),)
    events = (port.DeviceEvent(kind=port.DeviceEventKind.XID, gpu_uuid="GPU-1", code=79, gpu_instance_id=3),)
    settings = port.PowerSettings(
        requested_w=1.0,
        enforced_w=None,
        default_w=2.0,
        min_w=0.5,
        max_w=3.0,
        sm_clock_mhz=5,
        sm_clocks_mhz=(1, 2),
        power_profiles=(4,),
    )
    for name, value in (
        ("gpus", gpus),
        ("processes", processes),
        ("topology", links),
        ("take_events", events),
        ("power_settings", settings),
        ("access", AccessLevel.MIG_CONFIG),
        ("set_mig_mode", port.ModeChange.PENDING),
        ("driver_version", "580.1"),
        ("create_gpu_instance", 7),
    ):
        assert crossed(name, value) == value


def test_every_geometry_of_the_catalogue_crosses_unchanged():
    for geometry in {
        product.mig.key: product.mig for product in load_catalogue().products.values() if product.mig
    }.values():
        assert crossed("mig_geometry", geometry) == geometry


def test_every_call_of_both_ports_is_in_the_table_and_knows_its_side():
    for protocol, control in ((DevicePort, False), (ControlPort, True)):
        for name in (name for name in dir(protocol) if not name.startswith("_")):
            assert PORT_CALLS[name].control == control


def test_every_error_of_the_port_crosses_and_what_is_none_is_the_adapters_fault():
    kinds = [kind for kind in vars(port).values() if isinstance(kind, type) and issubclass(kind, port.DeviceError)]
    assert len(kinds) == 12
    for kind in kinds:
        error = decode_error(*encode_error(kind("do this")))
        assert (type(error), str(error)) == (kind, "do this")
    fault = decode_error(*encode_error(ZeroDivisionError("x" * 9999)))
    assert type(fault) is port.DeviceError
    assert "ZeroDivisionError" in str(fault)
    assert len(str(fault)) <= 500
    with pytest.raises(FrameError):
        decode_error("SystemExit", "")


@given(
    values=st.lists(st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5)),
    cut=st.integers(1, 7),
)
@settings(max_examples=40, deadline=None)
def test_frames_survive_any_cut(values, cut):
    stream = b"".join(map(pack_frame, values))
    reader, found = FrameReader(), []
    for at in range(0, len(stream), cut):
        reader.feed_data(stream[at : at + cut])
        try:
            while True:
                found.append(reader.read_frame())
        except EOFError:
            continue
    assert found == values


@given(data=st.binary(min_size=4, max_size=200))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_frame_are_refused_or_waited_for(data):
    reader = FrameReader()
    reader.feed_data(data)
    try:
        json.dumps(reader.read_frame())
    except (FrameError, EOFError):
        return


def test_a_frame_has_a_bound_on_both_sides():
    with pytest.raises(FrameError, match="ask for less"):
        pack_frame("x" * MAX_FRAME_BYTES)
    reader = FrameReader()
    reader.feed_data((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(FrameError):
        reader.read_frame()
    deep = b"[" * 100_000
    reader = FrameReader()
    reader.feed_data(len(deep).to_bytes(4, "little") + deep)
    with pytest.raises(FrameError):
        reader.read_frame()


def test_the_board_keeps_what_was_answered_and_where_it_stopped():
    board = ProgressBoard.create()
    try:
        assert (board.progress().request, board.progress().operation) == (0, -1)
        board.begin_request(2**40)
        board.begin_operation(0)
        board.add_answer(b"[1]")
        board.begin_operation(1)
        board.begin_device(5)
        progress = board.progress()
        assert (progress.request, progress.operation, progress.device) == (2**40, 1, 5)
        assert progress.since_s > 0.0
        assert board.answers() == [[1]]
        for _ in range(3):
            board.add_answer(b'"' + b"x" * 600_000 + b'"')
        assert len(board.answers()) == 2, "what finds no room is not kept, nor what comes after"
        board.begin_request(3)
        assert board.answers() == []
    finally:
        board.close()


def test_latencies_count_into_buckets_that_add_up():
    latencies = CallLatencies()
    for elapsed_s in (5e-6, 1e-5, 2e-5, 0.5, 99.0):
        latencies.add_call("read", elapsed_s)
    ((call, count, sum_s, buckets),) = latencies
    assert (call, count) == ("read", 5)
    assert sum_s == pytest.approx(99.500035)
    assert [bound for bound, _ in buckets] == [*LATENCY_BUCKETS_S, math.inf]
    below = dict(buckets)
    assert (below[1e-5], below[3e-5], below[1.0], below[30.0], below[math.inf]) == (2, 3, 4, 4, 5)
    for number in range(200):
        latencies.add_call(str(number), 1.0)
    assert len(list(latencies)) == 64


def test_no_field_of_the_port_is_forgotten():
    """A field that is added to a value of the port must cross too: the table is built from these."""
    known = {
        port.PowerSettings: 9,
        port.GpuProcess: 6,
        port.DeviceEvent: 4,
        port.DeviceLink: 4,
        port.InstanceReadings: 2,
        port.RawReadings: 2,
    }
    assert {kind: len(fields(kind)) for kind in known} == known
