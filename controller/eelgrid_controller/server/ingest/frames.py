"""Telemetry of many agents as columns: packed by an ingest process, unpacked by the controller that leads.

Of each batch its last tick is kept, which is all that the controller decides by, with how many ticks it had and since
when no device was in use; the ticks before it go along only where the controller writes to long-term storage. Batches
with the same readings and as many devices share a block, so that numbers are read, checked and summed by numpy for all
of them at once. Blocks are read in their order, and a batch that comes before an earlier one of its agent counts that as
lost: so a batch goes into no block before that of its agent's last one. Everything else goes as it is, some of it at a
time. Must not know streams.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.state.telemetry import PackedTick, find_idle_devices, last_tick
from eelgrid_protos.messages import (
    BATCH_HEAD_BYTES,
    FRAME_BATCHES_MOST,
    FRAME_BYTES_MOST,
    READING_RANGES,
    TICK_BLOCKS_MOST,
    TICKS_PER_BATCH_MOST,
    Column,
    ForwardedMessage,
    Reading,
    SampleBatch,
    TickBlock,
    TickFrame,
)

_HEAD = np.dtype(
    [
        ("stream", "<u4"),
        ("generation", "<u4"),
        ("sequence", "<u8"),
        ("dropped", "<u8"),
        ("first_ns", "<i8"),
        ("last_ns", "<i8"),
        ("ticks", "<u4"),
        ("zero", "<u4"),
    ]
)
assert _HEAD.itemsize == BATCH_HEAD_BYTES
_NAN = float("nan")
# Of one request or response, the bytes beside its last message.
MESSAGES_ONCE_MOST = 1024
_ONCE_BYTES_MOST = 1024 * 1024
_Kinds = tuple[Reading, ...]
_BlockKey = tuple[_Kinds, _Kinds, int]


def take_messages(waiting: deque[ForwardedMessage]) -> tuple[tuple[ForwardedMessage, ...], int]:
    """Takes what goes in the next request or response; returns its bytes with it."""
    taken: list[ForwardedMessage] = []
    size = 0
    while waiting and size < _ONCE_BYTES_MOST and len(taken) < MESSAGES_ONCE_MOST:
        taken.append(waiting.popleft())
        size += len(taken[-1].message)
    return tuple(taken), size


class _BlockBuilder:
    """Rows of one block."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, ...]] = []
        self.values = array("d")
        self.idle = bytearray()
        self.earlier_times = array("q")
        self.earlier_values = array("d")


class FrameBuilder:
    """Gathers batches for the next frame."""

    def __init__(self, *, has_every_tick: bool = False) -> None:
        self._has_every_tick = has_every_tick
        self._blocks: list[tuple[_BlockKey, _BlockBuilder]] = []
        # The last block of each kind, by its index.
        self._newest: dict[_BlockKey, int] = {}
        # The block with the last batch of each stream.
        self._last: dict[int, int] = {}
        self.batches = 0
        self._cells = 0
        # The highest sequence of each stream.
        self.sequences: dict[int, list[int]] = {}

    @property
    def is_full(self) -> bool:
        """Whether a frame has to be cut before more is added."""
        return (
            self.batches >= FRAME_BATCHES_MOST // 2
            or 8 * self._cells >= FRAME_BYTES_MOST // 2
            or len(self._blocks) >= TICK_BLOCKS_MOST // 2
        )

    def add(self, stream: int, batch: SampleBatch) -> None:
        """Adds the last tick of a batch that has one."""
        ticks = len(batch.time_ns)
        gpus = [column for column in batch.gpu_columns if column.reading is not Reading.UNSPECIFIED]
        hosts = [column for column in batch.host_columns if column.reading is not Reading.UNSPECIFIED]
        devices = len(gpus[0].values) // ticks if gpus else 0
        key = tuple(column.reading for column in gpus), tuple(column.reading for column in hosts), devices
        block = self._choose_block(stream, key)
        block.heads.append(
            (
                stream,
                batch.inventory_generation,
                batch.sequence,
                batch.dropped_ticks,
                batch.time_ns[0],
                batch.time_ns[-1],
                ticks,
                0,
            )
        )
        before = len(block.values)
        for column in (*gpus, *hosts):
            values = last_tick(column, ticks)
            block.values.extend(_NAN if value is None else value for value in values)
        if (idle := find_idle_devices(batch, devices)) is not None:
            block.idle.extend(idle)
        self.batches += 1
        self._cells += len(block.values) - before
        if self._has_every_tick and ticks > 1:
            block.earlier_times.extend(batch.time_ns[:-1])
            before = len(block.earlier_values)
            _add_earlier_ticks(block.earlier_values, (*gpus, *hosts), ticks)
            self._cells += len(block.earlier_values) - before + ticks - 1
        self.sequences.setdefault(stream, []).append(batch.sequence)

    def _choose_block(self, stream: int, key: _BlockKey) -> _BlockBuilder:
        """Returns the block that a batch goes to: one of its kind that is not before that of the stream's last batch."""
        at = self._newest.get(key, -1)
        if at < self._last.get(stream, 0):
            at = self._newest[key] = len(self._blocks)
            self._blocks.append((key, _BlockBuilder()))
        self._last[stream] = at
        return self._blocks[at][1]

    def build(self, number: int) -> TickFrame:
        """Returns the frame of what was added."""
        return TickFrame(
            number=number,
            blocks=tuple(
                TickBlock(
                    readings=gpus,
                    host_readings=hosts,
                    devices=devices,
                    batches=np.array(block.heads, _HEAD).tobytes(),
                    values=np.frombuffer(block.values, np.float64).astype("<f8", copy=False).tobytes(),
                    idle=bytes(block.idle),
                    earlier_times=np.frombuffer(block.earlier_times, np.int64).astype("<i8", copy=False).tobytes(),
                    earlier_values=np.frombuffer(block.earlier_values, np.float64).astype("<f8", copy=False).tobytes(),
                )
                for (gpus, hosts, devices), block in self._blocks
            ),
        )


def _add_earlier_ticks(values: "array[float]", columns: tuple[Column, ...], ticks: int) -> None:
    """Adds each tick but the last: each reading of each device."""
    shown = []
    for column in columns:
        cells = list(column.values)
        for absence in column.absences:
            for cell in absence.cells:
                cells[cell] = _NAN
        shown.append((cells, len(cells) // ticks))
    for tick in range(ticks - 1):
        for cells, width in shown:
            values.extend(cells[tick * width : (tick + 1) * width])


class UnpackedBlock(NamedTuple):
    """What may be used of a block, by stream, and the streams whose batches were left out."""

    ticks: list[tuple[int, PackedTick]]
    out_of_range: list[int]


class BlockMalformed(ValueError):
    """A block does not have the lengths that it says."""


def unpack_block(block: TickBlock) -> UnpackedBlock:
    """Unpacks and checks a block; raises BlockMalformed."""
    kinds, devices = len(block.readings), block.devices
    width = kinds * devices + len(block.host_readings)
    rows, rest = divmod(len(block.batches), BATCH_HEAD_BYTES)
    has_idle = Reading.UTILIZATION_RATIO in block.readings and devices > 0
    if (
        rest
        or rows > FRAME_BATCHES_MOST
        or len(block.values) != 8 * rows * width
        or len(block.idle) != (rows * devices if has_idle else 0)
        or len(set(block.readings)) < kinds
        or len(set(block.host_readings)) < len(block.host_readings)
        or Reading.UNSPECIFIED in (*block.readings, *block.host_readings)
    ):
        raise BlockMalformed("batches, values and readings do not fit each other")
    heads = np.frombuffer(block.batches, _HEAD)
    values = np.frombuffer(block.values, "<f8").reshape(rows, width)
    earlier = _unpack_earlier(block, heads, width)
    is_sound = _find_sound(block, heads, values)
    if earlier is not None:
        is_sound = np.logical_and(is_sound, earlier.is_sound)
    gpus = values[:, : kinds * devices].reshape(rows, kinds, devices)
    power = _sum_power(block, gpus)
    idle = np.frombuffer(block.idle, np.uint8).reshape(rows, devices) if has_idle else None
    ticks, out_of_range = [], []
    for row, (head, sound) in enumerate(zip(heads.tolist(), is_sound.tolist(), strict=True)):
        if not sound:
            out_of_range.append(head[0])
            continue
        ticks.append(
            (
                head[0],
                PackedTick(
                    inventory_generation=head[1],
                    sequence=head[2],
                    dropped_ticks=head[3],
                    first_ns=head[4],
                    last_ns=head[5],
                    ticks=head[6],
                    kinds=block.readings,
                    host_kinds=block.host_readings,
                    devices=devices,
                    # Not a view, which would keep the frame.
                    values=values[row].tobytes(),
                    power=None if power is None else (power[0][row], power[1][row]),
                    idle=None if idle is None else idle[row].tobytes(),
                    earlier=None if earlier is None else earlier.slice(row),
                ),
            )
        )
    return UnpackedBlock(ticks, out_of_range)


class _EarlierTicks(NamedTuple):
    """Ticks before the last one of each batch: those of a row begin at `starts[row]`."""

    starts: NDArray[np.int64]
    times: NDArray[np.int64]
    values: NDArray[np.float64]
    is_sound: NDArray[np.bool_]

    def slice(self, row: int) -> tuple[tuple[int, ...], bytes]:
        """Returns the times and values of one batch."""
        begin, end = self.starts[row : row + 2].tolist()
        return tuple(self.times[begin:end].tolist()), self.values[begin:end].tobytes()


def _unpack_earlier(block: TickBlock, heads: NDArray[np.void], width: int) -> _EarlierTicks | None:
    """Returns the ticks before the last ones, None if there are none; raises BlockMalformed."""
    if not block.earlier_times and not block.earlier_values:
        return None
    counts = np.maximum(heads["ticks"].astype(np.int64) - 1, 0)
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    if len(block.earlier_times) != 8 * total or len(block.earlier_values) != 8 * total * width:
        raise BlockMalformed("the ticks before the last ones are not as many as batches say")
    times = np.frombuffer(block.earlier_times, "<i8")
    values = np.frombuffer(block.earlier_values, "<f8").reshape(total, width)
    rows = np.repeat(np.arange(len(heads)), counts)
    following = np.concatenate([times[1:], [0]])
    has_following = np.concatenate([rows[1:] == rows[:-1], [False]])
    following = np.where(has_following, following, heads["last_ns"][rows])
    is_tick_sound = _find_valued(block, values) & (times >= heads["first_ns"][rows]) & (times <= following)
    is_sound = np.ones(len(heads), np.bool_)
    is_sound[rows[~is_tick_sound]] = False
    return _EarlierTicks(starts, times, values, is_sound)


def list_streams(block: TickBlock) -> Iterator[int]:
    """Yields the streams that a block names, however malformed the rest of it is."""
    rows = len(block.batches) // BATCH_HEAD_BYTES
    yield from np.frombuffer(block.batches[: rows * BATCH_HEAD_BYTES], _HEAD)["stream"].tolist()


def _find_sound(block: TickBlock, heads: NDArray[np.void], values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns by batch whether all of it is what an agent may send."""
    sound: NDArray[np.bool_] = (
        _find_valued(block, values)
        & (heads["sequence"] > 0)
        & (heads["ticks"] > 0)
        & (heads["ticks"] <= TICKS_PER_BATCH_MOST)
        & (heads["first_ns"] >= 0)
        & (heads["first_ns"] <= heads["last_ns"])
    )
    return sound


def _find_valued(block: TickBlock, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns by tick whether each value is one that its reading may have, or is missing."""
    bounds = [READING_RANGES.get(kind) for kind in block.readings for _ in range(block.devices)]
    bounds += [READING_RANGES.get(kind) for kind in block.host_readings]
    low = np.array([-1e300 if one is None else one.low for one in bounds])
    high = np.array([1e300 if one is None else one.high for one in bounds])
    return np.asarray((((values >= low) & (values <= high)) | np.isnan(values)).all(axis=1), np.bool_)


def _sum_power(block: TickBlock, gpus: NDArray[np.float64]) -> tuple[list[float], list[int]] | None:
    """Returns by batch the watts of its devices and how many tell theirs; None if the block has no power."""
    if Reading.POWER_W not in block.readings:
        return None
    power_w = gpus[:, block.readings.index(Reading.POWER_W), :]
    is_there = ~np.isnan(power_w)
    return np.where(is_there, power_w, 0.0).sum(axis=1).tolist(), is_there.sum(axis=1).tolist()
