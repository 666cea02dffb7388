"""Rows of a journal in any database: how entries and checkpoints are encoded and checked, and what is said of damaged ones.

Must not know a database. An entry's checksum covers its number and kind as well, so that a row that was moved is damaged, too.
"""

import json
import zlib
from typing import Any, NamedTuple

from eelgrid_controller.errors import JournalCorrupt, StoreLocation
from eelgrid_controller.state.journal import Checkpoint, checkpoint_removal_command, entry_removal_command

_COMPRESSION = 3


class CheckpointRow(NamedTuple):
    """A checkpoint as it is stored."""

    seq: int
    body: bytes
    digest: str
    crc32: int


def encode_body(body: Any) -> bytes:
    """Returns the body of an entry, or a state, as compact JSON in UTF-8; raises ValueError for numbers that JSON lacks."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def compute_entry_crc(seq: int, kind: bytes, body: bytes) -> int:
    """Computes the CRC-32 of an entry."""
    return zlib.crc32(b"%d\n%b\n%b" % (seq, kind, body))


def encode_checkpoint(checkpoint: Checkpoint) -> CheckpointRow:
    """Returns the row of a checkpoint, its state compressed."""
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
