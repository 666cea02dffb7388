"""Rows of a journal in any database: how entries and checkpoints are encoded and checked, and what is said of damaged ones.

Must not know a database. An entry's checksum covers its number and kind as well, so that a row that was moved is damaged, too.
"""

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

from eelgrid_controller.errors import JournalCorrupt, StoreLocation
from eelgrid_controller.state.journal import (
    Checkpoint,
    CheckpointRow,
    checkpoint_removal_command,
    encode_canonically,
    entry_removal_command,
)
from eelgrid_controller.state.state_dump import DumpPart

_COMPRESSION = 3


_encode_compactly = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def encode_body(body: Any) -> bytes:
    """Returns the body of an entry, or a state, as compact JSON in UTF-8; raises ValueError for numbers that JSON lacks."""
    return _encode_compactly(body).encode()


def compute_entry_crc(seq: int, kind: bytes, body: bytes) -> int:
    """Computes the CRC-32 of an entry."""
    return zlib.crc32(b"%d\n%b\n%b" % (seq, kind, body))


class _PartWriter:
    """Writes a dump as one JSON object, part by part."""

    def __init__(self, encode: Callable[[Any], str]) -> None:
        self._encode, self._before, self._ending = encode, "{", ""

    def write(self, part: DumpPart) -> bytes:
        """Returns the text of one part, after what ends the section before."""
        text = self._encode(part.value)
        is_open = isinstance(part.value, (list, dict))
        ending, self._ending = self._ending, text[-1] if is_open else ""
        if is_open:
            text = text[:-1]
        if part.is_continued:
            return f",{text[1:]}".encode()
        before, self._before = self._before, ","
        return f"{ending}{before}{self._encode(part.key)}:{text}".encode()

    def end(self) -> bytes:
        """Returns what ends the object."""
        return f"{self._ending}}}".encode()


class CheckpointEncoder:
    """Encodes a checkpoint part by part, each in little time: the row that `encode_checkpoint` returns of the whole."""

    def __init__(self, seq: int) -> None:
        self._seq = seq
        self._texts, self._canonical = _PartWriter(_encode_compactly), _PartWriter(encode_canonically)
        self._compressor, self._digest = zlib.compressobj(_COMPRESSION), hashlib.sha256()
        self._body = list[bytes]()

    def add_part(self, part: DumpPart) -> None:
        """Encodes one part; they come in the order of `StateDump.parts`."""
        self._body.append(self._compressor.compress(self._texts.write(part)))
        self._digest.update(self._canonical.write(part))

    def finish(self) -> CheckpointRow:
        """Returns the row."""
        self._body += [self._compressor.compress(self._texts.end()), self._compressor.flush()]
        self._digest.update(self._canonical.end())
        body, digest = b"".join(self._body), self._digest.hexdigest()
        return CheckpointRow(self._seq, body, digest, _compute_checkpoint_crc(self._seq, digest.encode(), body))


def encode_checkpoint(checkpoint: Checkpoint | CheckpointRow) -> CheckpointRow:
    """Returns the row of a checkpoint, its state compressed, unless it is one."""
    if isinstance(checkpoint, CheckpointRow):
        return checkpoint
    body = zlib.compress(encode_body(checkpoint.state), _COMPRESSION)
    crc = _compute_checkpoint_crc(checkpoint.seq, checkpoint.digest.encode(), body)
    return CheckpointRow(checkpoint.seq, body, checkpoint.digest, crc)


def decode_checkpoint(seq: int, body: object, digest: object, crc: int) -> Checkpoint | None:
    """Decodes a checkpoint from the bytes of its row; None if it is damaged."""
    if isinstance(body, bytes) and isinstance(digest, bytes) and _compute_checkpoint_crc(seq, digest, body) == crc:
        return Checkpoint(seq, json.loads(zlib.decompress(body)), digest.decode())
    return None


def describe_damaged_checkpoint(path: StoreLocation, seq: int, before: int | None) -> JournalCorrupt:
    """Returns the error of the newest checkpoint, which is damaged; `before` is the number of the one before it."""
    start = "the beginning" if before is None else f"the checkpoint at entry {before}"
    return JournalCorrupt(
        path,
        f"the checkpoint at entry {seq} is damaged",
        f"{start} and the entries since then lead to the same state, so nothing is lost by removing it: "
        f"{checkpoint_removal_command(path, seq)}",
        seq=seq,
    )


def describe_damaged_entry(path: StoreLocation, seq: int, good: int, problem: str, *, then: str = "") -> JournalCorrupt:
    """Returns the error of the first entry that cannot be read; up to `good` there is a checkpoint, `then` ends the remedy."""
    start = f"the checkpoint at entry {good}" if good else "the beginning"
    return JournalCorrupt(
        path,
        problem,
        f"{start} and the entries up to {seq - 1} are good: restore a backup, or give up the rest with: "
        f"{entry_removal_command(path, seq)}{then}",
        seq=seq,
    )


def _compute_checkpoint_crc(seq: int, digest: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(b"%d\n%b\n" % (seq, digest)))
