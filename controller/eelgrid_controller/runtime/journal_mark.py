"""The high-water mark: the last acknowledged entry of a journal, and a checksum chain over all entries up to it.

Owns a file beside the database, with two slots so that a torn write leaves one record intact: SQLite takes a damaged log for
a shorter one. Must not know what an entry is.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

MARK_NAME = "journal.mark"
# Chain value before the first entry.
CHAIN_START = bytes(16)
_SLOT_BYTES = 4096  # one page, so that no write touches both slots
_SLOTS = 2
# Its owner writes it, its group may read it.
_MODE = 0o640
_MAGIC = b"EELGMRK1"
_RECORD = struct.Struct(">8sQQ16s")
_CRC = struct.Struct(">I")
_LINK = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class JournalMark:
    """The last entry that was acknowledged, and the checksum over all entries up to it."""

    seq: int
    chain: bytes


def extend_chain(chain: bytes, entries: Iterable[tuple[int, int]]) -> bytes:
    """Extends the checksum chain by entries, each given by its number and CRC."""
    for seq, crc in entries:
        chain = blake2b(chain + _LINK.pack(seq, crc & 0xFFFFFFFF), digest_size=len(CHAIN_START)).digest()
    return chain


class HighWaterMark:
    """The mark's file, held open; every method raises OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._writes, self.newest = self._read()

    @classmethod
    def open(cls, directory: Path) -> Self | None:
        """Opens the mark of a directory; None if there is none. Refuses a symbolic link."""
        path = directory / MARK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, directory: Path, mark: JournalMark) -> Self:
        """Creates a file with this mark, on disk on return; replaces an existing one."""
        path = directory / MARK_NAME
        draft = path.with_suffix(".mark.new")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            os.pwrite(descriptor, bytes(_SLOTS * _SLOT_BYTES), 0)
            os.fsync(descriptor)
            made = cls(path, descriptor)
            made.write(mark)
            draft.rename(path)
        except BaseException:
            os.close(descriptor)
            raise
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        return made

    def write(self, mark: JournalMark) -> None:
        """Writes the mark to disk."""
        record = _RECORD.pack(_MAGIC, self._writes + 1, mark.seq, mark.chain)
        content = record + _CRC.pack(zlib.crc32(record))
        if os.pwrite(self._descriptor, content, (self._writes + 1) % _SLOTS * _SLOT_BYTES) != len(content):
            raise OSError(0, f"a short write to {self.path}")
        os.fdatasync(self._descriptor)
        self._writes += 1
        self.newest = mark

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _read(self) -> tuple[int, JournalMark | None]:
        """Returns the number of writes and the newest complete record; None if neither slot has one."""
        newest: tuple[int, JournalMark | None] = (0, None)
        for slot in range(_SLOTS):
            content = os.pread(self._descriptor, _RECORD.size + _CRC.size, slot * _SLOT_BYTES)
            if len(content) != _RECORD.size + _CRC.size:
                continue
            record, (crc,) = content[: _RECORD.size], _CRC.unpack(content[_RECORD.size :])
            magic, writes, seq, chain = _RECORD.unpack(record)
            if magic == _MAGIC and crc == zlib.crc32(record) and writes > newest[0]:
                newest = writes, JournalMark(seq, chain)
        return newest
