"""Progress of a driver process in shared memory: current request, operation, device and finished answers.

One side writes. The agent reads it only after a deadline or the death of the child.
"""

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

_BYTES = 2**20
_STATE = struct.Struct("<QdiiII")  # request, since, operation, device, answers, bytes of answers
_PLACE = struct.Struct("<dii")
_TALLY = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_PLACE_AT = 8
_TALLY_AT = _PLACE_AT + _PLACE.size
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a child is, and since when on the machine's monotonic clock; -1 is no operation or no device."""

    request: int
    operation: int
    device: int
    since_s: float


class ProgressBoard:
    """One child's board."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._count = self._used = 0
        self._operation = _NOWHERE

    @classmethod
    def create(cls) -> "ProgressBoard":
        """A new board; its descriptor is handed to the child."""
        fd = os.memfd_create("eelgrid-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        board = cls(fd)
        board.begin_request(0)
        return board

    def close(self) -> None:
        """Forgets the memory; the other side keeps its own."""
        self._memory.close()
        os.close(self.fd)

    # The child

    def begin_request(self, request: int) -> None:
        """A request begins."""
        self._count = self._used = 0
        self._operation = _NOWHERE
        _STATE.pack_into(self._memory, 0, request, 0.0, _NOWHERE, _NOWHERE, 0, 0)

    def begin_operation(self, operation: int) -> None:
        """An operation of the request begins."""
        self._operation = operation
        _PLACE.pack_into(self._memory, _PLACE_AT, time.monotonic(), operation, _NOWHERE)

    def begin_device(self, device: int) -> None:
        """A listing is about to ask this device."""
        _PLACE.pack_into(self._memory, _PLACE_AT, time.monotonic(), self._operation, device)

    def add_answer(self, answer: bytes) -> None:
        """An operation is done; an answer that finds no room is not kept, nor are those after it."""
        at = _STATE.size + self._used
        end = at + _LENGTH.size + len(answer)
        if end > _BYTES:
            self._used = _BYTES
            return
        _LENGTH.pack_into(self._memory, at, len(answer))
        self._memory[at + _LENGTH.size : end] = answer
        self._used, self._count = end - _STATE.size, self._count + 1
        _TALLY.pack_into(self._memory, _TALLY_AT, self._count, self._used)

    # The agent

    def progress(self) -> CallProgress:
        """How far the child is."""
        request, since_s, operation, device, _, _ = _STATE.unpack_from(self._memory, 0)
        return CallProgress(request, operation, device, since_s)

    def answers(self) -> list[Any]:
        """The answers that were ready; none after the first that cannot be read."""
        *_, count, used = _STATE.unpack_from(self._memory, 0)
        found: list[Any] = []
        at, end = _STATE.size, min(_STATE.size + used, _BYTES)
        while len(found) < count and at + _LENGTH.size <= end:
            (length,) = _LENGTH.unpack_from(self._memory, at)
            text = self._memory[at + _LENGTH.size : min(at + _LENGTH.size + length, end)]
            try:
                found.append(json.loads(text))
            except ValueError:
                break
            at += _LENGTH.size + length
        return found
