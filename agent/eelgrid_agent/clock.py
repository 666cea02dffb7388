"""The clocks of a machine, as the agent asks for them: an argument everywhere, so that tests can move them."""

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """Both clocks of the machine."""

    def monotonic_ns(self) -> int:
        """Never falls."""

    def wall_ns(self) -> int:
        """Since 1970; may step."""
