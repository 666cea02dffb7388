"""Recent changes of workloads, for those who watch.

Owns a bounded memory of what changed and the waiting for more. Must not know
who watches or why a workload changed. A watcher that falls further behind than
the memory reaches is told so, since silence about a gap would be a lie.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from eelgrid_protos.faults import Aborted, Unavailable
from eelgrid_protos.messages import Workload

__all__ = ["WorkloadChanges"]


class WorkloadChanges:
    """The last `most` changes, in order of revision."""

    def __init__(self, most: int, *, revision: int) -> None:
        self._most = most
        self._changes: deque[Workload] = deque()
        # Every change after this revision is in the memory.
        self._complete_after = revision
        self._more = asyncio.Event()
        self._closed = False

    def publish(self, workloads: Iterable[Workload]) -> None:
        """Take committed changes and wake whoever waits."""
        self._changes.extend(sorted(workloads, key=lambda workload: workload.revision))
        while len(self._changes) > self._most:
            self._complete_after = self._changes.popleft().revision
        self._wake()

    def after(self, revision: int) -> list[Workload]:
        """Changes after the revision; raises Aborted when some are forgotten, Unavailable when closed."""
        if self._closed:
            raise Unavailable("the controller is stopping; watch again from the last revision seen")
        if revision < self._complete_after:
            raise Aborted(
                f"changes after revision {revision} are no longer at hand, those after {self._complete_after} are; "
                "list the workloads and watch from the highest revision in that listing"
            )
        found: list[Workload] = []
        for workload in reversed(self._changes):
            if workload.revision <= revision:
                break
            found.append(workload)
        found.reverse()
        return found

    async def wait(self) -> None:
        """Return after the next publication."""
        if not self._closed:
            await self._more.wait()

    def close(self) -> None:
        """End all watching."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # A fresh event for the next wait; whoever holds the old one goes on.
        self._more.set()
        self._more = asyncio.Event()
