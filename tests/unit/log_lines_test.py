"""Log lines: one record is one line whatever is in it, and a flood of one kind leaves room for the others."""

import io
import logging

import pytest

from eelgrid_protos.log_lines import BURST_MOST, LINE_LETTERS_MOST, LineHandler, escape_line


class Log:
    """A logger over a handler with a clock that stands until it is moved."""

    def __init__(self):
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.logger = logging.getLogger("test.lines")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        self.logger.handlers[:] = [
            LineHandler(self.stream, "%(levelname)s %(message)s", monotonic_s=lambda: self.now_s)
        ]

    @property
    def lines(self):
        return self.stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("plain ünïcode", "plain ünïcode"),
        ("a\nINFO eelgrid.controller serving", r"a\nINFO eelgrid.controller serving"),
        ("a\r\x1b[2Jb", r"a\r\x1b[2Jb"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\u2028\x85\x0b", r"\u2028\x85\x0b"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_others_say_stays_on_one_line_in_its_order(said, line):
    log = Log()
    log.logger.info("detail=%s", said)
    assert log.stream.getvalue() == f"INFO detail={line}\n"
    assert escape_line(said) == line


def test_a_traceback_is_indented_with_the_line_breaks_of_its_message_escaped():
    log = Log()
    try:
        int("bad\nERROR forged")
    except ValueError:
        log.logger.exception("call=%s", "x")
    first, *rest = log.lines
    assert first == "ERROR call=x"
    assert all(line.startswith("  ") for line in rest)
    assert r"\nERROR forged" in rest[-1]


def test_a_line_has_an_end():
    log = Log()
    log.logger.info("detail=%s", "x" * 1_000_000)
    assert len(log.lines[0]) <= LINE_LETTERS_MOST + 10


def test_a_flood_of_one_kind_is_counted_and_others_are_heard():
    log = Log()

    def flood(times):
        for number in range(times):
            log.logger.info("event=%d", number)

    flood(10_000)
    assert len(log.lines) == BURST_MOST
    log.logger.warning("another kind")
    assert log.lines[-1] == "WARNING another kind"
    log.now_s = 1.0
    flood(1)
    assert log.lines[-2] == "INFO event=0"
    assert "log=withheld lines=9800" in log.lines[-1]
    flood(100)
    assert len(log.lines) == BURST_MOST + 1 + 21
