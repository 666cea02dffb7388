"""Text that came from elsewhere, made safe for where it is shown: terminals and spreadsheets.

Owns what is escaped and how. Must not know who shows it.

Theory. A name may hold anything that Unicode has. On a terminal a control character moves the cursor or runs a command of
the terminal, and a bidirectional override shows other text than what is there (Trojan Source, CVE-2021-42574). In a
spreadsheet a cell that begins like a formula is one (CWE-1236). Both are escaped so that a reader still sees what it was.
"""

import re
import unicodedata
from typing import TypeVar

_T = TypeVar("_T")
# Joiners of letters, which scripts need and which move nothing.
_KEPT = "\u200c\u200d"
# Control and format characters, separators of lines and paragraphs, lone surrogates.
_CATEGORIES = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})
# What makes a colour here, and nothing else: no sequence that hides text.
_COLOUR = re.compile("(\x1b\\[(?:[0-2]|22|3[0-9]|9[0-7])m)")
_FORMULA = re.compile("[=@+\\-\t\r]")
_NUMBER = re.compile("[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")


def _escape_letter(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_unsafe(letter: str) -> bool:
    return unicodedata.category(letter) in _CATEGORIES and letter not in _KEPT


def escape_text(text: str) -> str:
    """Escapes a text for one line of a terminal, in the syntax of Python's literals."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape_letter(letter) if _is_unsafe(letter) else letter for letter in text)


def escape_text_line(line: str) -> str:
    """Escapes a text for a terminal, but keeps our own colours and line breaks."""
    if line.isascii() and line.isprintable():
        return line
    pieces = _COLOUR.split(line)
    return "".join(
        piece if at % 2 else "\n".join(map(escape_text, piece.split("\n"))) for at, piece in enumerate(pieces)
    )


def escape_json(text: str) -> str:
    """Escapes a JSON document for a terminal; its strings keep their meaning."""
    if text.isascii() and "\x7f" not in text:
        return text  # what JSON writes of the other control characters is escaped already

    def escaped(letter: str) -> str:
        if letter == "\n" or not _is_unsafe(letter):
            return letter
        code = ord(letter)
        if code < 0x10000:
            return f"\\u{code:04x}"
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"

    return "".join(map(escaped, text))


def escape_csv_cell(value: _T) -> _T | str:
    """Escapes a cell for a spreadsheet: text that would be a formula gets an apostrophe before it.

    A carriage return would begin another row where the writer does not quote it, so it is escaped.
    """
    if not isinstance(value, str):
        return value
    if _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return "'" + value.replace("\r", "\\r")
    return value.replace("\r", "\\r")
