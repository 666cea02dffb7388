"""The operator's standing order: mirrored by policy.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.open_enum import OpenEnum
from eelgrid_protos.quantities import Label, Many, Name, Range, Uint64

__all__ = ["OBJECTIVES", "EnforcementMode", "Policy", "PoolMode", "Weights"]

Weight = Annotated[float, Range(0.0, 1e6)]
LeaseSeconds = Annotated[float, Range(5.0, 86_400.0, "s")]
IntervalSeconds = Annotated[float, Range(0.1, 3_600.0, "s")]


class EnforcementMode(OpenEnum):
    """How far the agents of a pool may go."""

    UNSPECIFIED = 0
    OBSERVE = 1
    ENFORCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Turn the terms of the cost into watts; see docs/model.md."""

    power: Weight
    fragmentation_w: Weight
    stranding_w: Weight


# Measured on the openb traces (docs/model.md): fragmentation 80 W and stranding
# 200 W give FGD's allocation and PWR's saving at once.
OBJECTIVES = {
    "energy": Weights(power=1.0, fragmentation_w=20.0, stranding_w=50.0),
    "balanced": Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0),
    "performance": Weights(power=0.1, fragmentation_w=100.0, stranding_w=200.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMode:
    """The mode of one pool."""

    pool: Name
    mode: EnforcementMode

    def violations(self) -> Iterator[Violation]:
        """Enforcement is switched on by name or not at all."""
        if self.mode is EnforcementMode.UNSPECIFIED:
            yield Violation("mode", "is not set or not known here", "choose observe or enforce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to aim for and what to leave alone; the defaults touch no node."""

    revision: Uint64 = 0
    objective: Label = "balanced"
    weights: Weights = OBJECTIVES["balanced"]
    pools: Annotated[tuple[PoolMode, ...], Many(1000)] = ()
    lease_s: LeaseSeconds = 60.0
    send_interval_s: IntervalSeconds = 5.0
    sample_interval_s: IntervalSeconds = 1.0
    # How places are chosen: ours or a published policy; only ours heeds the weights.
    placement: Label = "eelgrid"
