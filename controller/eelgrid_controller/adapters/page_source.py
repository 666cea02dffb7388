"""The live page's source: a running controller's loop, telemetry and promises.

Owns the joining of them. Must not know frames or viewers.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.journal import Past
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.state import ClusterState
from eelgrid_controller.telemetry import Telemetry
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import Explanation, ListPromisesResponse

__all__ = ["LoopSource"]

_Result = TypeVar("_Result")


class LoopSource:
    """Implements `Source` of page_hub.py."""

    def __init__(
        self, loop: ControllerLoop, telemetry: Telemetry, promises: Callable[[], ListPromisesResponse], clock: Clock
    ) -> None:
        self.telemetry = telemetry
        self.promises = promises
        self._loop = loop
        self._clock = clock

    def read(self, view: Callable[[ClusterState], _Result]) -> Awaitable[_Result]:
        """What a view makes of the state when all of it is on disk."""
        return self._loop.read(lambda core: view(core.state))

    async def explain(self, workload_id: str) -> Explanation | None:
        """Why a workload stands where it stands; None for one that is not known."""
        try:
            return await self._loop.read(lambda core: core.explain(workload_id))
        except NotFound:
            return None

    def past(self) -> Past:
        """What the journal tells of before now; for any thread. Raises JournalError."""
        return self._loop.journal.past()

    def state_now(self) -> ClusterState:
        """The state at this moment."""
        return self._loop.core.state

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic_s()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._clock.now_ns()
