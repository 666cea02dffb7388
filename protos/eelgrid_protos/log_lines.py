"""Log lines of both daemons: one record is one line, whatever is in it, and nobody can fill the disk with them.

    time=2026-11-23T20:33:11.123Z level=INFO logger=eelgrid.controller event=serving nodes=3

Times are in UTC, to the millisecond; what follows the logger is the message, key=value as a rule. Owns how a record
becomes text and how many a second. Must not know what is logged.

Theory. Much of what is logged comes from elsewhere: details of events, names, errors of other programs. A line break
in it would forge a line of ours, a bidirectional control would turn one around on a terminal. So every character that
is not printable is escaped, here, once, and not where each line is written. The lines of a traceback follow their
record indented, which no record of ours is. Records of one kind (one place in our code) have a bucket; what is beyond is
counted, and the next line of that kind says how many were not written.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

# A reason of ours is some 200 characters; ten times that is somebody else's.
LINE_LETTERS_MOST = 4096
# A fleet of a thousand that reconnects is a thousand records of one kind at once, of which these say enough.
BURST_MOST = 200.0
LINES_PER_S = 20.0
# Kinds are places in our code, some hundreds; this only bounds a mistake.
_KINDS_MOST = 4096


def escape_line(text: str) -> str:
    """The text with what is not printable written as Python does: one line, and in the order that it shows."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


LINE = "time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


class _Lines(logging.Formatter):
    """Formats records as single lines; tracebacks are indented below theirs."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        record.message = escape_line(record.getMessage())[:LINE_LETTERS_MOST]
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        # Not cached in the record, where another handler would find our escapes.
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        lines = [
            self.formatMessage(record),
            *(f"  {escape_line(line)[:LINE_LETTERS_MOST]}" for line in trace.splitlines()),
        ]
        return "\n".join(lines)


class LineHandler(logging.StreamHandler[Any]):
    """Writes records to a stream, so many of each kind."""

    def __init__(
        self,
        stream: TextIO | None,
        line: str = LINE,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream or sys.stderr)
        self._follows_stderr = stream is None
        self.setFormatter(_Lines(line))
        self._monotonic_s = monotonic_s
        # By kind: how full its bucket is, since when, and how many were not written.
        self._kinds: dict[tuple[str, int], tuple[float, float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Within the handler's lock, as logging calls it."""
        kind, now_s = (record.pathname, record.lineno), self._monotonic_s()
        level, since_s, withheld = self._kinds.get(kind, (0.0, now_s, 0))
        if self._follows_stderr:
            self.stream = sys.stderr  # which a program may redirect after we began
        level = max(0.0, level - (now_s - since_s) * LINES_PER_S)
        if level >= BURST_MOST:
            self._kinds[kind] = (level, now_s, withheld + 1)
            return
        if len(self._kinds) >= _KINDS_MOST:
            self._kinds.clear()
        self._kinds[kind] = (level + 1.0, now_s, 0)
        super().emit(record)
        if withheld:
            left = logging.LogRecord(
                record.name,
                logging.WARNING,
                record.pathname,
                record.lineno,
                "log=withheld lines=%d of=%s:%d",
                (withheld, record.module, record.lineno),
                None,
            )
            super().emit(left)


def log_to_stderr(logger: logging.Logger, level: int | str) -> None:
    """Sends everything of a logger to standard error, and nowhere else; both daemons log by this function."""
    logger.handlers[:] = [LineHandler(None)]
    logger.setLevel(level)


class RateLimitedLog:
    """Logs each kind of warning once in a while, with how many were left out: a client that calls in a loop must not fill it."""

    def __init__(self, log: logging.Logger, monotonic_s: Callable[[], float]) -> None:
        self._log = log
        self._monotonic_s = monotonic_s
        # Of each kind: when it may be logged again, and how many were left out since.
        self._quiet: dict[tuple[str, ...], tuple[float, int]] = {}

    def warn(self, kind: tuple[str, ...], every_s: float, line: str, *words: object) -> None:
        """Logs the line unless one of its kind was logged less than so many seconds ago."""
        now_s = self._monotonic_s()
        again_s, unsaid = self._quiet.get(kind, (now_s, 0))
        if now_s < again_s:
            self._quiet[kind] = (again_s, unsaid + 1)
            return
        self._quiet[kind] = (now_s + every_s, 0)
        self._log.warning(f"{line} more_since_last_line=%d", *words, unsaid)
