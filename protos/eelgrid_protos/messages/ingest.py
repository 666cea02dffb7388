"""Messages between an ingest process and the controller that leads; mirrored by ingest_service.proto.

What agents and the controller say to each other passes as bytes: a bad message is one agent's, and ends its stream alone.
"""

from typing import Annotated

from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, Reading
from eelgrid_protos.quantities import Label, Many, Range, Sentence, Uint32, Uint64
from eelgrid_protos.values import dataclass

# Streams of one ingest process.
FORWARDED_STREAMS_MOST = 20_000
# Of one ForwardRequest or ForwardResponse.
FORWARDED_MESSAGES_MOST = 4096
FORWARDED_MESSAGE_BYTES_MOST = 4 * 1024 * 1024
TICK_BLOCKS_MOST = 256
# Batches of one frame, and the bytes of their values.
FRAME_BATCHES_MOST = 4096
FRAME_BYTES_MOST = 4 * 1024 * 1024
BATCH_HEAD_BYTES = 48
_CERTIFICATE_BYTES_MOST = 64 * 1024
_READINGS_MOST = 128
StreamNumbers = Annotated[tuple[Uint32, ...], Many(FORWARDED_STREAMS_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedStream:
    """A stream that an agent opened at an ingest process."""

    stream: Uint32
    peer: Label = ""
    certificate: Annotated[bytes, Many(_CERTIFICATE_BYTES_MOST)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedMessage:
    """One message of such a stream, encoded."""

    stream: Uint32
    message: Annotated[bytes, Many(FORWARDED_MESSAGE_BYTES_MOST)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TickBlock:
    """The last ticks of batches with the same readings and as many devices, as columns."""

    readings: Annotated[tuple[Reading, ...], Many(_READINGS_MOST)] = ()
    host_readings: Annotated[tuple[Reading, ...], Many(_READINGS_MOST)] = ()
    devices: Annotated[int, Range(0, GPUS_PER_NODE_MOST)] = 0
    batches: Annotated[bytes, Many(FRAME_BATCHES_MOST * BATCH_HEAD_BYTES)] = b""
    values: Annotated[bytes, Many(FRAME_BYTES_MOST)] = b""
    idle: Annotated[bytes, Many(FRAME_BATCHES_MOST * GPUS_PER_NODE_MOST)] = b""
    earlier_times: Annotated[bytes, Many(FRAME_BYTES_MOST)] = b""
    # A frame is cut at half of those bytes; its last batch may be as long as an agent's message.
    earlier_values: Annotated[bytes, Many(FRAME_BYTES_MOST // 2 + FORWARDED_MESSAGE_BYTES_MOST)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TickFrame:
    """The batches that came since the frame before."""

    number: Uint64
    blocks: Annotated[tuple[TickBlock, ...], Many(TICK_BLOCKS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Streams opened, then messages, then telemetry, then streams that their agents ended."""

    opened: Annotated[tuple[ForwardedStream, ...], Many(FORWARDED_STREAMS_MOST)] = ()
    messages: Annotated[tuple[ForwardedMessage, ...], Many(FORWARDED_MESSAGES_MOST)] = ()
    frame: TickFrame | None = None
    closed: StreamNumbers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStream:
    """A stream that the controller ended, with the status of gRPC."""

    stream: Uint32
    code: Annotated[int, Range(0, 16)] = 0
    text: Sentence = ""
    details: Annotated[bytes, Many(_CERTIFICATE_BYTES_MOST)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameAcknowledgement:
    """The controller has this frame and those before it, without the batches of streams that were left out."""

    number: Uint64
    left_out: StreamNumbers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedMessages:
    """So many more messages of a stream were dealt with."""

    stream: Uint32
    count: Uint32


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResponse:
    """What the controller says to agents and of their streams."""

    batches_per_acknowledgement: Annotated[int, Range(0, 1024)] = 0
    messages: Annotated[tuple[ForwardedMessage, ...], Many(FORWARDED_MESSAGES_MOST)] = ()
    ended: Annotated[tuple[EndedStream, ...], Many(FORWARDED_STREAMS_MOST)] = ()
    frames: Annotated[tuple[FrameAcknowledgement, ...], Many(FORWARDED_MESSAGES_MOST)] = ()
    consumed: Annotated[tuple[ConsumedMessages, ...], Many(FORWARDED_STREAMS_MOST)] = ()
    wants_every_tick: bool = False
