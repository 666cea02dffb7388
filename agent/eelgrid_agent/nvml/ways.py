"""How readings are had where drivers and parts differ: in ways, best first.

A source gives some readings at once, in one of several ways. A way whose
symbol the driver lacks is forgotten for the session; one that the device does
not support gives way to the next; any other refusal is the answer. A silent
device ends the look at once: a caller's deadline then waits for one call and
not for thirty.

It knows no call and no unit: ways come with readings in SI.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from eelgrid_agent.device import Value
from eelgrid_agent.nvml.session import MISSING, SILENT, reason_of
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Reading

__all__ = ["Source", "Way", "Ways", "plausible"]

# What a way says for each reading of its source; None is what the device does not have.
Way = Callable[[Any], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Source:
    """Readings that come together, and the ways to have them."""

    readings: tuple[Reading, ...]
    ways: tuple[Way, ...]


class Ways:
    """The sources of one session."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = list(sources)

    def left(self, reading: Reading) -> int:
        """How many ways to a reading the driver still has."""
        return sum(len(source.ways) for source in self._sources if reading in source.readings)

    def read(self, handle: Any) -> dict[Reading, Value]:
        """All readings of a device; raises NVMLError when it is silent."""
        values: dict[Reading, Value] = {}
        for place, source in enumerate(self._sources):
            reason = AbsenceReason.NOT_SUPPORTED
            for way in source.ways:
                try:
                    said = way(handle)
                except pynvml.NVMLError as error:
                    reason = reason_of(error)
                    if reason in SILENT:
                        raise
                    if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                        kept = tuple(other for other in self._sources[place].ways if other is not way)
                        self._sources[place] = Source(source.readings, kept)
                    if reason is not AbsenceReason.NOT_SUPPORTED:
                        break
                else:
                    values.update(zip(source.readings, map(plausible, source.readings, said), strict=True))
                    break
            for reading in source.readings:
                values.setdefault(reading, MISSING[reason])
        return values


def plausible(reading: Reading, value: float | None) -> Value:
    """A reading, unless it is a sentinel or a spike, which sensors are known to return."""
    if value is None:
        return MISSING[AbsenceReason.NOT_SUPPORTED]
    bounds = READING_RANGES[reading]
    return value if bounds.low <= value <= bounds.high else MISSING[AbsenceReason.IMPLAUSIBLE]
