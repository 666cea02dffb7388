"""The last contact with the controller that leads, by which launchers fence the jobs of a node that it has lost.

Contact is proved by an answer, and is as old as what was answered: an acknowledgement that waited in a stopped process says
only that the batch was sent when it was. The file in the state directory has it, and after how long without contact jobs
end; launchers read it, since they outlive the agent. While the controller may still count on a shorter time, that holds.
Times are of CLOCK_BOOTTIME, which all processes of one boot share.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# It is written again after this part of the time without contact, and at the latest after so long.
_WRITES_PER_FENCE = 10.0
_WRITTEN_S_MOST = 5.0
_SENT_MOST = 1024
# More than the file has.
_BYTES = 128
_LOG = logging.getLogger("eelgrid.agent")


def _read_boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderContact:
    """The contact of one node, in a file if its jobs end without one."""

    def __init__(
        self, path: Path | None = None, fence_after_s: float = 0.0, now_s: Callable[[], float] = _read_boottime_s
    ) -> None:
        """Takes over what an earlier run of the agent left; raises OSError for a file that cannot be written."""
        self.path = path
        self.fence_after_s, self._now_s = fence_after_s, now_s
        self._opened_s = 0.0
        # When batches were sent that were not acknowledged.
        self._sent_s = deque[tuple[int, float]](maxlen=_SENT_MOST)
        self._written_s, self._is_failing = 0.0, False
        if path is not None and (fence_after_s or path.exists()):
            contact_s, before_s = read_contact(path) or (0.0, 0.0)
            # One in the future is of another boot, whose launchers are gone.
            self._write(min(contact_s or now_s(), now_s()), min(before_s or fence_after_s, fence_after_s) or before_s)
        elif path is not None:
            self.path = None

    def note_opening(self) -> None:
        """A stream is opened now."""
        self._opened_s = self._now_s()
        self._sent_s.clear()

    def note_welcome(self) -> None:
        """The controller has answered the opening; it knows by now after how long jobs end here."""
        self._renew(self._opened_s, is_first=True)

    def note_sent(self, sequence: int) -> None:
        """A batch is sent now."""
        if self.path is not None:
            self._sent_s.append((sequence, self._now_s()))

    def note_acknowledged(self, sequence: int) -> None:
        """The controller has all batches up to this one."""
        contact_s = 0.0
        while self._sent_s and self._sent_s[0][0] <= sequence:
            contact_s = self._sent_s.popleft()[1]
        if contact_s:
            self._renew(contact_s)

    def _renew(self, contact_s: float, *, is_first: bool = False) -> None:
        often_s = min(_WRITTEN_S_MOST, self.fence_after_s / _WRITES_PER_FENCE)
        # An answer to an opening may come after one to a batch that was sent later.
        contact_s = max(contact_s, self._written_s)
        if self.path is None or not (is_first or contact_s - self._written_s >= often_s):
            return
        try:
            self._write(contact_s, self.fence_after_s)
            self._is_failing = False
        except OSError as error:
            # Launchers take that for silence in the end, which is what the controller counts on.
            if not self._is_failing:
                _LOG.warning("event=contact_not_written path=%s reason=%r", self.path, error.strerror)
            self._is_failing = True

    def _write(self, contact_s: float, fence_after_s: float) -> None:
        assert self.path is not None
        new = self.path.with_suffix(".new")
        text = json.dumps({"contact_s": contact_s, "fence_after_s": fence_after_s})
        try:
            new.write_text(text, encoding="ascii")
            new.replace(self.path)
        except OSError:
            # On a full disk what is there can be written over.
            with self.path.open("r+b") as file:
                file.write(text.encode("ascii").ljust(_BYTES))
        self._written_s = contact_s


def read_contact(path: Path) -> tuple[float, float] | None:
    """Returns when the controller was in contact last, and after how long without jobs end; None if nothing says."""
    try:
        noted = json.loads(path.read_bytes())
        return float(noted["contact_s"]), float(noted["fence_after_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
