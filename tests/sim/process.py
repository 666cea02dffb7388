"""A process on a simulated machine: it starts, dies, and may be stopped at any moment.

Owns what a kernel does for a stopped process: what reaches it waits, and it goes on where it was.
"""

from collections import deque
from collections.abc import Callable

from tests.sim.clock import Clock, seconds
from tests.sim.timeline import Timeline

__all__ = ["PausableProcess"]

# Of a process that goes on: between two messages that waited, and until its timers run.
_WAKE_NS, _LATE_NS = seconds(0.01), seconds(1)


class PausableProcess:
    """See the module; a subclass starts and ends it, and calls `_begin` and `_die`."""

    # Of its machine, and by what traces name it.
    timeline: Timeline
    clock: Clock
    title = ""
    is_running = is_stopped = False
    _starts = 0
    # What came while it was stopped, and messages of these that it has not read since it went on.
    _waiting: list[tuple[bool, Callable[[], None]]]
    _inbox: deque[Callable[[], None]]
    _read_ns = 0

    def enter(self, action: Callable[[], None], *, is_timer: bool = False) -> None:
        """Something reaches the process: at once, or when it goes on, and no message before one that came earlier."""
        if self.is_stopped:
            self._waiting.append((is_timer, action))
        elif self.is_running and self._inbox and not is_timer:
            self._read_in(self._read_ns - self.timeline.now_ns, action)
        elif self.is_running:
            self._run(action)

    def _read_in(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._take_in(delay_ns)

    def _take_in(self, delay_ns: int) -> None:
        self._read_ns = self.timeline.now_ns + max(0, delay_ns)
        starts = self._starts
        self.timeline.after(delay_ns, lambda: self._take() if starts == self._starts else None)

    def _take(self) -> None:
        """Takes the next message that waits; where the process has been stopped again, it goes on waiting."""
        if self._inbox and not self.is_stopped:
            self._run(self._inbox.popleft())

    def _run(self, action: Callable[[], None]) -> None:
        action()

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Runs the action after a while, unless the process has died by then."""
        starts = self._starts
        delay_ns = self.clock.true_delay_ns(delay_ns)
        self.timeline.after(delay_ns, lambda: self.enter(action, is_timer=True) if starts == self._starts else None)

    def stop_process(self, *, suspends_machine: bool = False) -> None:
        """SIGSTOP; or the whole machine is suspended, and its monotonic clock stands still meanwhile."""
        if self.is_running and not self.is_stopped:
            self.is_stopped = True
            if suspends_machine:
                self.clock.suspend()
            self.timeline.note(f"{self.title} {'suspended' if suspends_machine else 'stopped'}")

    def continue_process(self) -> None:
        """SIGCONT: messages that waited are taken in their order, and timers that are due come in between."""
        if not self.is_stopped:
            return
        self.timeline.note(f"{self.title} continues")
        self.clock.resume()
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        starts = self._starts
        message_ns = 0
        for _ in range(len(self._inbox)):
            message_ns += self.timeline.draw_ns(_WAKE_NS)
            self._take_in(message_ns)
        for is_timer, action in waiting:
            if is_timer:
                self.timeline.after(
                    self.timeline.draw_ns(_LATE_NS),
                    lambda action=action: self.enter(action, is_timer=True) if starts == self._starts else None,
                )
            else:
                message_ns += self.timeline.draw_ns(_WAKE_NS)
                self._read_in(message_ns, action)

    def _begin(self) -> None:
        self.is_running = True
        self._waiting, self._inbox = [], deque()

    def _die(self) -> None:
        self._starts += 1
        self.is_running = self.is_stopped = False
        self._waiting, self._inbox = [], deque()
        self.clock.resume()
