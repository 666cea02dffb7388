"""The clocks of one simulated machine: monotonic with drift, and a wall clock that may be set.

Owns the relation of a machine's clocks to true time. True time is the
simulation's own, in nanoseconds since its beginning; no machine can read it.
"""

from collections.abc import Callable

__all__ = ["EPOCH_NS", "SECOND_NS", "Clock", "seconds"]

SECOND_NS = 1_000_000_000
# When the simulation begins, on a wall clock that is right.
EPOCH_NS = 1_700_000_000 * SECOND_NS
_MILLION = 1_000_000


def seconds(value_s: float) -> int:
    """Nanoseconds."""
    return int(value_s * SECOND_NS)


class Clock:
    """Implements the agent's Clock port; `drift_ppm` is how much too fast the machine's oscillator runs."""

    def __init__(self, true_ns: Callable[[], int], *, drift_ppm: int = 0) -> None:
        self._true_ns = true_ns
        self._booted_ns = true_ns()
        self._stepped_ns = 0
        self._drift_ppm = drift_ppm
        self._suspended_ns = 0
        self._suspended_at_ns: int | None = None

    def monotonic_ns(self) -> int:
        """Since the machine booted."""
        true_ns = self._true_ns() if self._suspended_at_ns is None else self._suspended_at_ns
        return (true_ns - self._booted_ns - self._suspended_ns) * (_MILLION + self._drift_ppm) // _MILLION

    def monotonic_s(self) -> float:
        """The same in seconds."""
        return self.monotonic_ns() / SECOND_NS

    def wall_ns(self) -> int:
        """Since 1970, as far as the machine knows."""
        return EPOCH_NS + self._true_ns() * (_MILLION + self._drift_ppm) // _MILLION + self._stepped_ns

    def step(self, delta_ns: int) -> None:
        """Somebody sets the wall clock."""
        self._stepped_ns += delta_ns

    def reboot(self) -> None:
        """The monotonic clock begins anew."""
        self._booted_ns, self._suspended_ns = self._true_ns(), 0

    def suspend(self) -> None:
        """The machine is suspended: its monotonic clock stands still, as Linux has it."""
        self._suspended_at_ns = self._true_ns()

    def resume(self) -> None:
        """The machine goes on, if it was suspended."""
        if self._suspended_at_ns is not None:
            self._suspended_ns += self._true_ns() - self._suspended_at_ns
            self._suspended_at_ns = None

    def true_delay_ns(self, delay_ns: int) -> int:
        """True time until this machine believes that `delay_ns` have passed; never too short."""
        return -(-delay_ns * _MILLION // (_MILLION + self._drift_ppm))
