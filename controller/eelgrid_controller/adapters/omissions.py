"""Elements that were left out of answers since they break the contract: counted, and said now and then.

Owns the counts and the bound on lines of the log. Must not know why an element is broken: that is
a fault of ours, or of an input that should have been refused, and the line says where to look.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from eelgrid_controller.adapters.described import Family, family
from eelgrid_protos.errors import Violation

__all__ = ["Omissions"]

# For each call: an element that is broken stays so, and is asked for again and again.
_LINE_EVERY_S = 60.0


class Omissions:
    """Of one server; give `note` to its handlers."""

    def __init__(self, *, monotonic_s: Callable[[], float], log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._monotonic_s = monotonic_s
        self._log = log
        self._quiet_until_s: dict[str, float] = {}

    def note(self, call: str, count: int, reasons: tuple[Violation, ...]) -> None:
        """So many elements were left out of an answer to a call."""
        self.counts[call] += count
        now_s = self._monotonic_s()
        if now_s >= self._quiet_until_s.get(call, now_s):
            self._quiet_until_s[call] = now_s + _LINE_EVERY_S
            self._log.error(
                "call=%s omitted=%d omitted_total=%d reason=%r", call, count, self.counts[call],
                str(reasons[0]) if reasons else "",
            )  # fmt: skip

    def families(self) -> Iterator[Family]:
        """What the page of metrics tells."""
        yield family("eelgrid_answer_omitted_elements_total", dict(self.counts))
