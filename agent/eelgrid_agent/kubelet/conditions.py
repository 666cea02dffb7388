"""How each GPU fares, calm enough to be published: its power limit, and whether heat or a fault slows it.

Pure: owns what counts as throttled and for how long. Time is an argument. Must not know who
reads it.

Theory. Each change of what is published rewrites all slices of the node, so a GPU that is slowed
for a moment again and again is slowed: it is so at once, and no more so after a minute without.
A limit that is kept on purpose is no throttling: the watts say it.
"""

from collections.abc import Mapping

from eelgrid_agent.device import RawReadings
from eelgrid_agent.kubelet.slices import Condition
from eelgrid_protos.messages import Reading

__all__ = ["Conditions"]

# Slowed by hardware, by heat as the driver or the board judges it, by the board's power brake (nvml.h).
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
_CALM_S = 60.0


class Conditions:
    """Of one node's GPUs."""

    def __init__(self) -> None:
        self._throttled_s: dict[str, float] = {}

    def observe(self, looks: Mapping[str, RawReadings], now_s: float) -> dict[str, Condition]:
        """What is to be published now, from the newest look at each GPU."""
        found = {}
        for uuid, raw in looks.items():
            mask, limit_w = (raw.values.get(reading) for reading in (Reading.EVENT_REASONS_MASK, Reading.POWER_LIMIT_W))
            is_known = isinstance(mask, (int, float))
            if isinstance(mask, (int, float)) and int(mask) & _THROTTLED:
                self._throttled_s[uuid] = now_s
            is_throttled = now_s - self._throttled_s[uuid] < _CALM_S if uuid in self._throttled_s else False
            found[uuid] = Condition(
                power_limit_w=float(limit_w) if isinstance(limit_w, (int, float)) else None,
                is_throttled=is_throttled if is_known or is_throttled else None,
            )
        return found
