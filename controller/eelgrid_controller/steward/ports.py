"""What the steward needs of what is around it.

Owns the ports. Must not know who stands behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from eelgrid_controller.core import Core
from eelgrid_controller.loop import Committed
from eelgrid_controller.outside import Outside
from eelgrid_controller.steward.rounds import Asked, Round
from eelgrid_protos.messages import MeasuredPoint, Workload

__all__ = ["Commands", "Durations", "Pages"]

_Result = TypeVar("_Result")


class Commands(Protocol):
    """What the steward needs of the controller's loop."""

    listeners: list[Callable[[Committed], None]]
    outside: Outside

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""

    @property
    def core(self) -> Core:
        """The core at this moment."""

    async def scale(self, workload_id: str, replicas: int) -> Workload:
        """So many replicas, or as near as there is room for."""

    async def set_limit(self, workload_id: str, power_limit_w: float | None) -> Workload:
        """A limit on each GPU of a workload."""

    async def told_limits(self, highest_w: Mapping[str, float]) -> None:
        """The highest limits that GPUs were read to have, by workload, where above the journal's."""

    async def record_points(self, points: Sequence[MeasuredPoint]) -> int:
        """Points that were measured; how many are new."""


class Pages(Protocol):
    """What the steward needs of the scraper."""

    def ask(self, asked: dict[str, Asked]) -> frozenset[str]:
        """From now on these; those that are too many."""

    def take(self) -> dict[str, Round]:
        """Rounds since the last time."""

    async def run(self) -> None:
        """Ask until cancelled."""


class Durations(NamedTuple):
    """Who hears how many seconds things took."""

    turn: Callable[[float], None] = lambda _: None
    division: Callable[[float], None] = lambda _: None
