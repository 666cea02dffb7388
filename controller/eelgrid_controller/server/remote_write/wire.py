"""Write requests of Prometheus remote write 1.0, as bytes: protobuf messages in snappy's block format.

Owns the two encodings. Must not know what a series means, or how a request is sent.

Theory. A request is mostly labels that were in it before, so what is worth compressing is known without a search: each
label is a token, and a token that was written before is a copy of that place (3 bytes each 64). Values and times, which
rarely repeat, stay as they are. Nor do labels change from one tick of a node to the next: all but values and times is
made once, and these are filled in. So some 110 bytes a sample become 43, without a compressor and its megabytes of
dependencies. A snappy block is the length of what it unpacks to, and elements that refer backwards only: blocks that
were made apart follow each other as one, so samples are encoded once, wait as they will be sent, and are sent together
with any others.

Sources: Prometheus, "Remote-Write 1.0 specification"; google/snappy, format_description.txt; protobuf.dev, "Encoding".
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

# The label fields of one series, the first of them behind the head of its message; made by `encode_labels`.
Series = tuple[bytes, ...]

# Times in milliseconds that are six bytes: from 1971 to 2109.
TIME_MS_LEAST, TIME_MS_MOST = 2**35, 2**42 - 1
_COPY_MOST = 64
_OFFSET_MOST = 2**16 - 1
_SHORT_LITERAL = 60
# Far from the 64 KiB that a literal may have: the labels of one series need some hundred bytes.
_LITERAL_FULL = 2**14
# Field 2 of a series, of 16 bytes: a sample, whose field 1 is a double and whose field 2 is the time.
_SAMPLE_HEAD = b"\x12\x10\x09"
# A double, and a time with its tag.
_HOLE_BYTES = 8 + 1 + 6
_HOLE = np.arange(_HOLE_BYTES)
_SAMPLE_BYTES = len(_SAMPLE_HEAD) + _HOLE_BYTES


class EncodedSamples(NamedTuple):
    """Samples of one request's part: snappy elements, and how many bytes they unpack to."""

    elements: bytes
    unpacked_bytes: int
    samples: int
    newest_ms: int


def encode_varint(number: int) -> bytes:
    """A whole number of at least 0 in groups of seven bits, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def encode_labels(labels: Mapping[str, str]) -> Series:
    """The labels of a series with `__name__`, in their order; an empty label is none."""
    fields = [_encode_label(name, labels[name]) for name in sorted(labels) if labels[name]]
    length = sum(map(len, fields)) + _SAMPLE_BYTES
    # The length is the same for most series of one metric, so that head and name are a token.
    return (b"\x0a" + encode_varint(length) + fields[0], *fields[1:])


@lru_cache(maxsize=4096)
def _encode_label(name: str, value: str) -> bytes:
    parts = [part.encode("utf-8", "replace") for part in (name, value)]
    pair = b"".join(
        [tag + encode_varint(len(part)) + part for tag, part in zip((b"\x0a", b"\x12"), parts, strict=True)]
    )
    return b"\x0a" + encode_varint(len(pair)) + pair


class SampleLayout:
    """One sample of each of these series, at one time: what is the same of it at all times, and where the rest goes."""

    def __init__(self, series: Sequence[Series]) -> None:
        self._unpacked_bytes = 0
        elements, literal = bytearray(), bytearray()
        holes: list[int] = []  # of values and times, in elements
        open_holes: list[int] = []  # in what comes next and is no copy
        places: dict[bytes, int] = {}  # of tokens, in what is unpacked

        def flush() -> None:
            if literal:
                begin = _add_literal(elements, literal)
                holes.extend(begin + hole for hole in open_holes)
                literal.clear()
                open_holes.clear()

        for tokens in series:
            for token in tokens:
                place, at = places.get(token), self._unpacked_bytes
                if place is None or at - place > _OFFSET_MOST:
                    places[token] = at
                    literal += token
                else:
                    flush()
                    _add_copy(elements, at - place, len(token))
                self._unpacked_bytes += len(token)
            literal += _SAMPLE_HEAD
            open_holes.append(len(literal))
            literal += bytes(_HOLE_BYTES)
            self._unpacked_bytes += _SAMPLE_BYTES
            if len(literal) > _LITERAL_FULL:
                flush()
        flush()
        self._template = np.frombuffer(bytes(elements), np.uint8)
        self._holes = np.array(holes, np.int32)

    def fill(self, values: Sequence[float], time_ms: int) -> EncodedSamples:
        """These values at this time; raises ValueError for a time that is none of this century's."""
        if not TIME_MS_LEAST <= time_ms <= TIME_MS_MOST:
            raise ValueError(f"{time_ms} ms is no time between 1971 and 2109")
        many = len(self._holes)
        filling = np.empty((many, _HOLE_BYTES), np.uint8)
        filling[:, :8] = np.array(values, "<f8").view(np.uint8).reshape(many, 8)
        filling[:, 8:] = np.frombuffer(b"\x10" + encode_varint(time_ms), np.uint8)
        elements = self._template.copy()
        elements[self._holes[:, None] + _HOLE] = filling
        return EncodedSamples(elements.tobytes(), self._unpacked_bytes, many, time_ms)


def encode_samples(samples: Sequence[tuple[Series, float]], time_ms: int) -> EncodedSamples:
    """One sample of each series at one time; raises ValueError for a time that is none of this century's."""
    return SampleLayout([series for series, _ in samples]).fill([value for _, value in samples], time_ms)


def _add_copy(elements: bytearray, offset: int, length: int) -> None:
    for done in range(0, length, _COPY_MOST):
        elements.append((min(_COPY_MOST, length - done) - 1) << 2 | 2)
        elements += offset.to_bytes(2, "little")


def _add_literal(elements: bytearray, literal: bytearray) -> int:
    """Adds bytes that are no copy; returns where they begin."""
    last = len(literal) - 1
    if last < _SHORT_LITERAL:
        elements.append(last << 2)
    else:
        elements += bytes((61 << 2, last & 0xFF, last >> 8))
    begin = len(elements)
    elements += literal
    return begin


def build_request(parts: Sequence[EncodedSamples]) -> bytes:
    """The body of one request with these samples."""
    return encode_varint(sum(part.unpacked_bytes for part in parts)) + b"".join([part.elements for part in parts])
