"""What a device got done: the exact integrals that every activity sensor is a difference of.

Three rates hold between changes: the share of time that a kernel is there
(active), the work done relative to an unthrottled device (work), and the share
of time that the memory is busy (memory). Their integrals are seconds. A
counter takes them at two moments and divides.
"""

from dataclasses import dataclass

from eelgrid_agent.simulation.curve import throughput_share

__all__ = ["WorkDone", "WorkMeter"]


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Seconds since the beginning: with work there, of unthrottled work, and of busy memory."""

    active_s: float = 0.0
    work_s: float = 0.0
    memory_s: float = 0.0

    def since(self, before: "WorkDone") -> "WorkDone":
        """What came after `before`."""
        return WorkDone(self.active_s - before.active_s, self.work_s - before.work_s, self.memory_s - before.memory_s)


class WorkMeter:
    """The integrals. Time never falls."""

    __slots__ = ("_active", "_done", "_memory", "_since_ns", "_work")

    def __init__(self, now_ns: int) -> None:
        self._active = self._work = self._memory = 0.0
        self._done = WorkDone()
        self._since_ns = now_ns

    def set(self, active: float, clock: float, memory_bound: float, now_ns: int) -> None:
        """The rates from now on, of a load that is there `active` of the time, at this share of the highest clock."""
        work = active * throughput_share(clock, memory_bound)
        memory = memory_bound * work
        if (active, work, memory) == (self._active, self._work, self._memory):
            return
        self._done, self._since_ns = self.read(now_ns), now_ns
        self._active, self._work, self._memory = active, work, memory

    @property
    def work_share(self) -> float:
        """The rate of work now."""
        return self._work

    @property
    def memory_share(self) -> float:
        """The share of time that the memory is busy now."""
        return self._memory

    def read(self, now_ns: int) -> WorkDone:
        """The integrals up to now."""
        seconds, done = (now_ns - self._since_ns) * 1e-9, self._done
        return WorkDone(
            done.active_s + self._active * seconds,
            done.work_s + self._work * seconds,
            done.memory_s + self._memory * seconds,
        )
