"""Element lists: answers of engines are read element by element, so that one that cannot be read is left out and counted.

Owns what an unreadable element is, and how often it is named. Must not know any engine.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

_LOG_SHOWN_MOST = 5
_Read = TypeVar("_Read")


class UnreadableAnswer(ValueError):
    """An answer of an engine, or an element of one, that no supported version gives."""


def read_elements(
    found: Iterable[Any], key: str, read: Callable[[Mapping[str, Any]], _Read], unreadable: list[str]
) -> list[_Read]:
    """Reads each element; what cannot be read is added to `unreadable`, by its value of a key and with the reason."""
    read_ones = []
    for one in found:
        if not isinstance(one, dict):
            unreadable.append(f"{str(one)[:64]}: is no object")
            continue
        try:
            read_ones.append(read(one))
        except UnreadableAnswer as error:
            unreadable.append(f"{str(one.get(key))[:64]}: {error}")
    return read_ones


class UnreadableLog:
    """Names the elements that were left out, once until all can be read again."""

    def __init__(self, engine: str, log: logging.Logger) -> None:
        self._engine, self._log, self._is_told = engine, log, False

    def note(self, unreadable: Sequence[str]) -> None:
        """Takes the elements that one look has left out."""
        if unreadable and not self._is_told:
            shown = "; ".join(unreadable[:_LOG_SHOWN_MOST])
            self._log.warning("%s=partly_read left_out=%d first=%s", self._engine, len(unreadable), shown)
        self._is_told = bool(unreadable)
