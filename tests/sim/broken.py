"""Broken: an invariant does not hold; numbers are those of invariants.py."""

__all__ = ["Broken", "demand"]


class Broken(AssertionError):
    """Which invariant, and how it was seen."""

    def __init__(self, invariant: int, seen: str) -> None:
        self.invariant = invariant
        self.seen = seen
        super().__init__(f"invariant {invariant}: {seen}")


def demand(invariant: int, holds: bool, seen: str) -> None:
    """Raises Broken unless it holds."""
    if not holds:
        raise Broken(invariant, seen)
