"""A device's joules in parts, and the rounding that makes parts add up.

Owns what a share is and the apportionment of whole millijoules. Must not know
how weights come about.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from eelgrid_agent.attribution.owner import Owner

__all__ = ["Confidence", "Method", "Part", "Share", "apportion"]

# Weights are counted in this fraction of the largest, so that all that follows is exact integer arithmetic.
_WEIGHT_UNITS = 1 << 40


class Part(Enum):
    """What the joules were spent on."""

    # The board as it draws with no context open.
    BARE_IDLE = "bare_idle"
    # What open contexts draw above that, doing nothing.
    CONTEXT_IDLE = "context_idle"
    ACTIVE = "active"


class Method(Enum):
    """How a share was found."""

    EXCLUSIVE = "exclusive"
    MIG_ACTIVITY = "mig_activity"
    MIG_SLICE = "mig_slice"
    PROCESS_SM = "process_sm"
    EQUAL_SHARE = "equal_share"
    UNATTRIBUTED = "unattributed"


class Confidence(IntEnum):
    """How far a share may be trusted; see docs of the method."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3

    @property
    def label(self) -> str:
        """As it is shown."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one owner is charged for one interval of one device."""

    owner: Owner
    part: Part
    energy_mj: int
    method: Method
    confidence: Confidence
    gpu_instance_id: int | None = None


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in parts by weight that add up to it exactly: each is rounded down, the largest remainders get the rest.

    Weights are finite and not negative, and one of them is above zero.
    """
    most = max(weights)
    assert most > 0.0, "some weight must be above zero"
    assert min(weights) >= 0.0, "no weight may be below zero"
    units = [int(weight / most * _WEIGHT_UNITS) for weight in weights]
    whole = sum(units)
    parts, remainders = [], []
    for index, unit in enumerate(units):
        part, remainder = divmod(total * unit, whole)
        parts.append(part)
        remainders.append((-remainder, index))
    for _, index in sorted(remainders)[: total - sum(parts)]:
        parts[index] += 1
    return parts
