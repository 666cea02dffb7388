"""The standard streams of eelctl: closed, full, read by nobody, or in an encoding that lacks a letter.

A stream that cannot be used is an error of two lines with exit code 1 and never a traceback; a reader that has gone,
such as `head`, ends the command silently with the exit code that a shell gives for SIGPIPE. Must not know any command.
"""

import codecs
import errno
import os
import sys
from pathlib import Path
from typing import IO, Any

# 128 and the number of SIGPIPE or SIGINT, as shells count.
BROKEN_PIPE_CODE, INTERRUPTED_CODE = 141, 130
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE})
# What is written where the encoding of the terminal lacks the letter; others as JSON writes them.
_PLAIN = {"…": "~", "°": "", "±": "+-", "×": "x", "≥": ">=", "≤": "<=", "–": "-", "’": "'"}


def _write_plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter) if letter in _PLAIN else _escape(letter) for letter in text), error.end  # type: ignore[misc]


def _escape(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def prepare_streams() -> None:
    """Makes the streams usable: letters that an encoding lacks are replaced, and a closed stdin or stderr is empty.

    Raises OSError if standard output is closed: whatever the command answered would be lost.
    """
    codecs.register_error("eelgrid_plain", _write_plain)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise OSError("it is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="eelgrid_plain")


def is_output_error(error: BaseException) -> bool:
    """Returns whether standard output could not be written: errors of files that commands open have the file's name."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _WRITE_ERRORS


def discard_output() -> None:
    """Drops what standard output still holds, so that the interpreter does not try to write it at its end."""
    stream: IO[Any] | None = sys.stdout
    if stream is None:
        return
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        return
