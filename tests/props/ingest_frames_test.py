"""Batches that pass through frames leave telemetry as they do without: nothing lost, nothing twice, in any interleaving."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_node

from eelgrid_controller.server.ingest.frames import _HEAD, BlockMalformed, FrameBuilder, unpack_block
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos import codec
from eelgrid_protos.messages import (
    TICK_BLOCKS_MOST,
    Absence,
    AbsenceReason,
    Column,
    ForwardRequest,
    Reading,
    SampleBatch,
    TickFrame,
)

NODES = tuple(build_node(f"n{index}") for index in range(3))
DEVICES = len(NODES[0].gpus)
# Readings that come in batches of their own, as an agent sends them.
FAST = (Reading.POWER_W, Reading.UTILIZATION_RATIO)
SLOW = (Reading.POWER_AVERAGE_W,)
SECOND = 10**9


@st.composite
def batches(draw):
    """Streams' batches, each in order, interleaved in any way."""
    counts, found = defaultdict(int), []
    for node, kind in draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((FAST, SLOW, ()))), max_size=24)):
        ticks = draw(st.integers(1, 4))
        counts[node] += 1
        sequence, cells = counts[node], ticks * DEVICES
        gone = draw(st.sets(st.integers(0, cells - 1), max_size=3))
        absences = (Absence(reason=AbsenceReason.UNSPECIFIED, cells=tuple(sorted(gone))),) if gone else ()
        values = draw(st.lists(st.sampled_from((0.0, 0.25, 1.0)), min_size=cells, max_size=cells))
        shown = tuple(0.0 if cell in gone else value for cell, value in enumerate(values))
        batch = SampleBatch(
            sequence=sequence,
            inventory_generation=NODES[node].generation,
            time_ns=tuple(sequence * 10 * SECOND + tick * SECOND for tick in range(ticks)),
            gpu_columns=tuple(Column(reading=reading, values=shown, absences=absences) for reading in kind),
            host_columns=(Column(reading=Reading.HOST_CPU_UTILIZATION_RATIO, values=(0.5,) * ticks),),
        )
        found.append((node, batch))
    return found


def send_through_frame(builder, found):
    for node, batch in found:
        builder.add(node, batch)
    frame = builder.build(1)
    data = codec.encode_message(ForwardRequest(frame=frame))
    received = codec.decode_message(ForwardRequest, data).frame
    assert len(received.blocks) <= TICK_BLOCKS_MOST
    return received


def open_telemetry():
    telemetry = Telemetry()
    for node in NODES:
        telemetry.open_stream(node, 1)
    return telemetry


def describe(telemetry):
    return [
        (
            telemetry.tick_counts(node.node_name),
            telemetry.idle_since_ns(node.node_name),
            telemetry.fresh_tick(node.node_name, now_s=1.0, now_ns=0),
        )
        for node in NODES
    ] + [telemetry.duplicates, telemetry.fresh_power(now_s=1.0, now_ns=0)]


@given(batches(), st.booleans())
def test_frames_leave_telemetry_as_batches_do(found, has_every_tick):
    direct, behind, whole = open_telemetry(), open_telemetry(), defaultdict(list)
    for node, batch in found:
        direct.receive_batch(NODES[node].node_name, batch, now_s=1.0)
    for block in send_through_frame(FrameBuilder(has_every_tick=has_every_tick), found).blocks:
        unpacked = unpack_block(block)
        assert not unpacked.out_of_range
        for node, tick in unpacked.ticks:
            behind.receive_tick(NODES[node].node_name, tick, now_s=1.0)
            whole[node].append(tick.to_batch())
    assert describe(behind) == describe(direct)
    assert (behind.lost, behind.duplicates) == (0, 0)
    sent = defaultdict(list)
    for node, batch in found:
        sent[node].append(batch)
    if has_every_tick:
        assert whole == sent
    else:
        assert {node: [(one.sequence, one.time_ns) for one in ticks] for node, ticks in whole.items()} == {
            node: [(one.sequence, one.time_ns[-1:]) for one in ticks] for node, ticks in sent.items()
        }


def test_a_batch_of_seldom_readings_between_two_others_is_not_overtaken():
    """Once 3 of 10,000 ticks were lost: blocks were in the order of their first batch."""

    def build(sequence, kinds):
        values = (1.0,) * DEVICES
        columns = tuple(Column(reading=kind, values=values) for kind in kinds)
        return SampleBatch(
            sequence=sequence,
            inventory_generation=NODES[0].generation,
            time_ns=(sequence * SECOND,),
            gpu_columns=columns,
        )

    builder = FrameBuilder()
    for sequence, kinds in ((1, FAST), (2, SLOW), (3, FAST)):
        builder.add(0, build(sequence, kinds))
    # Others share the newest block of each kind.
    for sequence, kinds in ((1, FAST), (2, SLOW)):
        builder.add(1, build(sequence, kinds))
    rows = [(tick[0], tick[1].sequence) for block in builder.build(1).blocks for tick in unpack_block(block).ticks]
    assert [sequence for stream, sequence in rows if stream == 0] == [1, 2, 3]
    assert [sequence for stream, sequence in rows if stream == 1] == [1, 2]
    assert len(builder.build(1).blocks) == 4


def test_ticks_before_the_last_that_break_a_rule_leave_out_their_batch_alone():
    values = tuple(float(cell) for cell in range(3 * DEVICES))
    builder = FrameBuilder(has_every_tick=True)
    for stream in range(4):
        times = (SECOND, 2 * SECOND, 3 * SECOND)
        column = Column(reading=Reading.POWER_W, values=values)
        builder.add(stream, SampleBatch(sequence=1, inventory_generation=1, time_ns=times, gpu_columns=(column,)))
    (block,) = builder.build(1).blocks
    times = np.frombuffer(block.earlier_times, "<i8").copy()
    cells = np.frombuffer(block.earlier_values, "<f8").copy()
    # Out of order, before the first tick, and no number that a board's power can be.
    times[1], times[2], cells[6 * DEVICES] = 4 * SECOND, 0, np.inf
    unpacked = unpack_block(replace(block, earlier_times=times.tobytes(), earlier_values=cells.tobytes()))
    assert unpacked.out_of_range == [0, 1, 3]
    assert [stream for stream, _ in unpacked.ticks] == [2]
    heads = np.frombuffer(block.batches, _HEAD).copy()
    heads["ticks"] = 2**32 - 1
    for wrong in (
        replace(block, earlier_times=block.earlier_times[:-8]),
        replace(block, earlier_values=b""),
        replace(block, batches=heads.tobytes()),
    ):
        with pytest.raises(BlockMalformed):
            unpack_block(wrong)


def test_frames_are_cut_before_they_are_too_long():
    column = Column(reading=Reading.POWER_W, values=(1.0,) * 64 * 600)
    builder, count = FrameBuilder(has_every_tick=True), 0
    while not builder.is_full:
        count += 1
        batch = SampleBatch(sequence=count, inventory_generation=1, time_ns=(1,) * 600, gpu_columns=(column,))
        builder.add(1, batch)
    data = codec.encode_message(ForwardRequest(frame=builder.build(1)))
    found = codec.decode_message(ForwardRequest, data).frame
    assert isinstance(found, TickFrame)
    assert sum(len(unpack_block(block).ticks) for block in found.blocks) == count
