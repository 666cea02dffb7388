"""Frames between the agent and the process that holds the driver: a length and a JSON text.

Owns how bytes become values and back. Must not know what the values mean, nor
sockets. JSON rather than marshal or pickle: what a broken child sends can be
wrong, but it can neither run code nor crash the reader, and floats come back
exactly. A batch of eight devices is some 1.5 KB and takes 30 µs to read.

FrameError                   the other side does not speak this protocol; the connection is of no more use
"""

import json
import struct
from typing import Any

__all__ = ["FRAME_BYTES_MOST", "FrameError", "Reader", "pack", "pack_bytes"]

FRAME_BYTES_MOST = 4 * 2**20
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The other side does not speak this protocol."""


def pack(value: Any) -> bytes:
    """The frame of a plain value; raises FrameError where it is too long."""
    return pack_bytes(json.dumps(value, separators=(",", ":")).encode())


def pack_bytes(text: bytes) -> bytes:
    """The frame of what is JSON already."""
    if len(text) > FRAME_BYTES_MOST:
        raise FrameError(f"a frame of {len(text)} bytes; the most is {FRAME_BYTES_MOST}: ask for less at once")
    return _LENGTH.pack(len(text)) + text


class Reader:
    """Bytes in, whole values out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come."""
        self._buffer += data

    def take(self) -> Any:
        """The next whole value; raises EOFError until it is there, FrameError when it never can be."""
        if len(self._buffer) < _LENGTH.size:
            raise EOFError
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > FRAME_BYTES_MOST:
            raise FrameError(f"a frame says {length} bytes; the most is {FRAME_BYTES_MOST}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            raise EOFError
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame holds no JSON: {error}") from None
