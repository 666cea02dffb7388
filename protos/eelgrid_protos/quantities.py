"""Quantities: annotated field types with units, ranges and patterns, conversions, and open wire enumerations.

Everything inside Eelgrid is in SI base units, or in the unit that the name
carries. A type here is an ordinary number to the type checker and a range to
the codec, which refuses what lies outside on the way in and on the way out.
A bound is generous: it stops a unit mistaken for another (milliwatts for
watts) and garbage, not an unusual machine.
"""

import re
from enum import IntEnum
from typing import Annotated, Self

from eelgrid_protos.values import dataclass


class OpenEnum(IntEnum):
    """An enumeration whose unknown numbers read as UNSPECIFIED (0), as protobuf asks of readers."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(0)
        return None


MIB = 1024 * 1024
_WATTS = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kM]?)W", re.ASCII)
_WATT_SIZES = {"": 1.0, "k": 1e3, "M": 1e6}
_BARE_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?[kM]?", re.ASCII)


def parse_watts(text: str) -> float:
    """Parses `5600W`, `20kW` or `1.3MW` into watts; a number without its unit is refused. Raises ValueError."""
    match = _WATTS.fullmatch(text.strip())
    if match is not None:
        return float(match[1]) * _WATT_SIZES[match[2]]
    number = text.strip()
    if _BARE_NUMBER.fullmatch(number):
        ways = f"{number}W" if number[-1] in _WATT_SIZES else f"{number}W or {number}kW"
        raise ValueError(f"{text!r} has no unit: write {ways}")
    raise ValueError(f"{text!r} is not an amount of power: write for example 5600W, 20kW or 1.3MW")


GPU_MILLI_WHOLE = 1000


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number, and its unit for messages."""

    low: float
    high: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Longest length of a string and the characters that it may hold."""

    longest: int
    required: bool = False
    pattern: re.Pattern[str] | None = None
    shape: str = ""


@dataclass(frozen=True, slots=True)
class Many:
    """Most items of a repeated field."""

    most: int


Rule = Range | Text | Many

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")
_NAME_SHAPE = "letters, digits, '.', '_', '/', '-', beginning and ending with a letter or digit"

Uint32 = Annotated[int, Range(0, 2**32 - 1)]
Uint64 = Annotated[int, Range(0, 2**64 - 1)]
Count = Annotated[int, Range(0, 1_000_000)]
# 2**63 nanoseconds after 1970 is the year 2262.
Nanoseconds = Annotated[int, Range(0, 2**63 - 1, "ns")]
Seconds = Annotated[float, Range(0.0, 1e9, "s")]
# The largest module limit known is 2,900 W (GB300); a rack is under 1 MW.
Watts = Annotated[float, Range(0.0, 1e6, "W")]
# Five times the largest board known. The 64 boards that a node may have stay below Watts' bound together, so no
# node can say of each board what nobody could then say of the node.
BOARD_POWER_MOST_W = 15_000.0
BoardWatts = Annotated[float, Range(0.0, BOARD_POWER_MOST_W, "W")]
# Sums over a cluster: 100,000 nodes at Watts' bound are 1e11.
ClusterWatts = Annotated[float, Range(0.0, 1e12, "W")]
# A weight of 1e6 times the watts of a cluster: what a policy may weigh must not break an explanation.
CostWatts = Annotated[float, Range(-1e18, 1e18, "W")]
# 20 kW for a hundred years.
Joules = Annotated[float, Range(0.0, 1e14, "J")]
Celsius = Annotated[float, Range(-60.0, 250.0, "°C")]
Megahertz = Annotated[int, Range(0, 20_000, "MHz")]
Ratio = Annotated[float, Range(0.0, 1.0)]
Bytes = Annotated[int, Range(0, 2**50, "bytes")]
CpuMilli = Annotated[int, Range(0, 10_000_000, "thousandths of a CPU")]
GpuMilli = Annotated[int, Range(0, GPU_MILLI_WHOLE, "thousandths of a GPU")]
Milli = Annotated[int, Range(0, 2**53, "thousandths")]
# A thousand plans a second for 285,000 years; what an agent says it holds is below, so that ours go on above it.
PLAN_EPOCH_MOST = 2**53 - 1
PlanEpoch = Annotated[int, Range(0, PLAN_EPOCH_MOST)]

Identifier = Annotated[str, Text(128, True, _NAME, _NAME_SHAPE)]
# Where a request may leave an identifier out: the rule is that of the answer in which it will stand.
OptionalIdentifier = Annotated[str, Text(128, False, _NAME, _NAME_SHAPE)]
Name = Annotated[str, Text(253, True, _NAME, _NAME_SHAPE)]
# A label ends up in tables, logs and YAML: one line, nothing that moves a cursor.
_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*")
_LINE_SHAPE = "printable characters on one line"
Label = Annotated[str, Text(253, False, _LINE, _LINE_SHAPE)]
RequiredLabel = Annotated[str, Text(253, True, _LINE, _LINE_SHAPE)]
# Such as 1g.5gb+me: no name of ours.
MigProfile = Annotated[str, Text(64, False, _LINE, _LINE_SHAPE)]
RequiredMigProfile = Annotated[str, Text(64, True, _LINE, _LINE_SHAPE)]
# A reason and what would help, with a few names inside.
SENTENCE_LETTERS_MOST = 2000
Sentence = Annotated[str, Text(SENTENCE_LETTERS_MOST)]
# Names the place of an item: of a measured point that is four labels, each of 253 characters in up to four bytes.
PageToken = Annotated[str, Text(8192)]


def watts_from_milliwatts(power_mw: int) -> float:
    """NVML counts power in milliwatts."""
    return power_mw / 1000.0
