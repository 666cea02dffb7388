"""Reads what processes wrote: parts of a file as text, from a byte on or from some lines before the end."""

import os
from pathlib import Path
from typing import NamedTuple

_READ_BYTES_MOST = 16_384
_SEARCH_BYTES = 65_536
# Lines before the end are searched for in so much of the file.
_SEARCHED_BYTES_MOST = 64 * 1024 * 1024


class OutputPart(NamedTuple):
    """Text or bytes, where they end, and whether the file ends there."""

    text: str
    data: bytes
    next_offset: int
    is_whole: bool


def read_output(path: Path, offset: int, tail_lines: int | None = None, *, raw: bool = False) -> OutputPart:
    """Returns the part of a file at an offset; bytes that are not UTF-8 are replaced unless `raw`. Raises OSError.

    A character that is cut by the end of the part is left for the next one, unless the file ends with it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = offset if tail_lines is None else _find_tail(file.fileno(), size, tail_lines)
        begin = min(begin, size)
        data = os.pread(file.fileno(), _READ_BYTES_MOST, begin)
    if raw:
        return OutputPart("", data, begin + len(data), begin + len(data) >= size)
    cut = _incomplete_bytes(data) if begin + len(data) < size else 0
    data = data[: len(data) - cut]
    return OutputPart(data.decode("utf-8", "replace"), b"", begin + len(data), begin + len(data) >= size)


def _find_tail(descriptor: int, size: int, lines: int) -> int:
    """Returns where the last lines begin."""
    if not lines:
        return size
    left, end, is_first = lines, size, True
    while end > max(0, size - _SEARCHED_BYTES_MOST):
        begin = max(0, end - _SEARCH_BYTES)
        data = os.pread(descriptor, end - begin, begin)
        at = len(data) - 1 if is_first and data.endswith(b"\n") else len(data)
        is_first = False
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if not left:
                return begin + at + 1
        end = begin
    return end


def _incomplete_bytes(data: bytes) -> int:
    """Returns how many bytes at the end begin a character of UTF-8 that continues beyond."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if needed > back else 0
        if byte < 0x80:
            return 0
    return 0
