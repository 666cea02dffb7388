"""What was made of a value, remembered while that very value is asked for again.

Owns the memory. Must not know what is made, nor of what.

Some values are frozen and large, a policy with the budgets of thousands of nodes, and
something is made of them for each node. To compare or to hash them would cost as much as
to make it; that it is the same object is told at once. What is remembered is kept alive,
so no other object can have its identity.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

__all__ = ["by_identity"]

_Of = TypeVar("_Of")
_Made = TypeVar("_Made")
_MOST = 8  # of each: the policy, the one before, a few that are only imagined


class _Itself(Generic[_Of]):
    """Equal to what holds the same object."""

    __slots__ = ("held",)

    def __init__(self, held: _Of) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held


def by_identity(make: Callable[[_Of], _Made]) -> Callable[[_Of], _Made]:
    """The same function, made once for each object; what it gives is shared and must not be changed."""

    @lru_cache(maxsize=_MOST)
    def remembered(itself: _Itself[_Of]) -> _Made:
        return make(itself.held)

    return lambda of: remembered(_Itself(of))
