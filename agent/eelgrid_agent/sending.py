"""When a node's batches are due, and when their silence is a dead stream.

Owns the moments. Must not know what is in a batch nor any clock. Sends are
timed by ticks, each node at its own phase of the interval, so that a fleet does
not burst.
"""

from eelgrid_protos.messages import Cadence

__all__ = ["STALL_INTERVALS", "STALL_S_LEAST", "SendTimes"]

# No acknowledgement for this long is a dead stream. A controller that is merely slow must not be left sooner:
# coming back costs it more than the batches that it owes, and the window holds back the rest.
STALL_INTERVALS = 6.0
STALL_S_LEAST = 30.0


class SendTimes:
    """One node's; `due` and `waits_since_ns` are also set by what is sent and answered."""

    def __init__(self, *, phase: float) -> None:
        self._phase = phase
        self._next_ns = 0
        self.due = False
        self.waits_since_ns = 0

    def retime(self, before: Cadence, cadence: Cadence, now_ns: int) -> None:
        """Another interval begins at this node's phase of it."""
        if cadence.send_interval_s != before.send_interval_s or self._next_ns == 0:
            self._next_ns = now_ns + int(self._phase * cadence.send_interval_s * 1e9)

    def tick(self, cadence: Cadence, now_ns: int) -> None:
        """A tick was taken; one that is a little early still counts as on time."""
        slack_ns = int(cadence.sample_interval_s * 0.25e9)
        if now_ns + slack_ns < self._next_ns:
            return
        self.due = True
        interval_ns = int(cadence.send_interval_s * 1e9)
        behind = (now_ns + slack_ns - self._next_ns) // interval_ns
        self._next_ns += (behind + 1) * interval_ns

    def stalled(self, cadence: Cadence, now_ns: int) -> bool:
        """Whether what is under way was answered by nobody for too long."""
        bound_s = max(STALL_S_LEAST, STALL_INTERVALS * cadence.send_interval_s)
        return now_ns - self.waits_since_ns > bound_s * 1e9
