"""Quotes: the prices of the look-ahead as they were last made, as facts of the state.

Owns their shape and when they are void or old. Must not know how they are made
(eelgrid_kernels.quotes) nor who makes them (core.py).

Theory: a decision depends on what the next tasks cost elsewhere, and that on the
whole cluster at one moment. If every decision made its own, deciding would cost
with the fleet; if a cache kept them, a replay could decide otherwise. So they are
an event of the journal, made anew after so many tasks came or left, and void
when the mix that they are for was drawn anew or a node joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["NONE", "Market", "Quotes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotes:
    """Whole watts that each class of the mix costs elsewhere, models that others will need, and the load then."""

    offers_w: tuple[int, ...] = ()
    scarce_models: tuple[str, ...] = ()
    load_permille: int = 0


NONE = Quotes()


class Market:
    """The quotes in force and how many tasks came or left since; -1 when they are void."""

    __slots__ = ("quotes", "shifts")

    def __init__(self) -> None:
        self.quotes = NONE
        self.shifts = -1

    def void(self) -> None:
        """The mix or the nodes are others: offers mean nothing any more, new ones are due."""
        self.quotes, self.shifts = NONE, -1

    def age(self) -> None:
        """New quotes are due; those in force still mean something."""
        self.shifts = -1

    def moved(self, tasks: int) -> None:
        """So many tasks came or left."""
        if self.shifts >= 0:
            self.shifts += tasks

    def quoted(self, quotes: Quotes) -> None:
        """Puts quotes in force."""
        self.quotes, self.shifts = quotes, 0

    def copy(self) -> Self:
        """A market that goes on apart from this one."""
        twin = type(self)()
        twin.quotes, twin.shifts = self.quotes, self.shifts
        return twin

    def dump(self) -> dict[str, Any]:
        """The plain shape, for a checkpoint."""
        quotes = self.quotes
        return {
            "offers_w": list(quotes.offers_w),
            "scarce_models": list(quotes.scarce_models),
            "load_permille": quotes.load_permille,
            "shifts": self.shifts,
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """The market in a checkpoint."""
        market = cls()
        offers: Sequence[int] = plain["offers_w"]
        market.quotes = Quotes(
            offers_w=tuple(offers),
            scarce_models=tuple(plain["scarce_models"]),
            load_permille=plain["load_permille"],
        )
        market.shifts = plain["shifts"]
        return market
