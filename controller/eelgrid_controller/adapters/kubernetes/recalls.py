"""Reading again what the people of pods want, for pods whose gate is long gone.

Owns which pods are read so, and how many at once: after a loss of the journal that is all of
them. Must not know what is made of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.port import Key, Object
from eelgrid_controller.kubernetes.gate_events import Recall

__all__ = ["Recalls"]

_AT_ONCE = 50


class Recalls:
    """Pods that are to be told of again."""

    def __init__(self, pods: Informer, tell: Callable[[Key, Object], None]) -> None:
        self.uids: set[str] = set()  # of those that are read so
        self._pods = pods
        self._tell = tell
        self._asked: deque[Recall] = deque()

    def ask(self, one: Recall) -> bool:
        """One more; whether `run` has to be begun for it."""
        self._asked.append(one)
        return len(self._asked) == 1

    async def run(self) -> None:
        """Tell of them, a few at a time."""
        await asyncio.sleep(0)
        while self._asked:
            uid, key = self._asked[0]
            found = self._pods.objects.get(Key(*key))
            if found is not None and found["metadata"]["uid"] == uid:
                self.uids.add(uid)
                self._tell(Key(*key), found)
            self._asked.popleft()
            if len(self._asked) % _AT_ONCE == 0:
                await asyncio.sleep(0)
