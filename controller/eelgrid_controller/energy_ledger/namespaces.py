"""Joules by namespace as counters, with a bound on how many have one of their own.

Owns who has a counter and what is counted under it. Must not know files nor pages.

Theory. Counters never fall, so who has a counter keeps what was counted under its name, and whoever has none is counted
under `OTHER`, from then on and never again. A namespace takes the place of the one that spent least when it has spent
twice as much: places change some dozen times over the orders of magnitude in between, not at each flush. So rates add
up to everything that is booked; totals do not hold what places that were given up had counted. `OTHER` is what all have
spent less what each has counted itself: a namespace adds to both or to the first alone, so neither falls.
"""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["NAMESPACES_MOST", "OTHER", "NamespaceSum", "NamespaceSums"]

NAMESPACES_MOST = 100
OTHER = "other"
_KNOWN_MOST = 10_000
# 4.6 x 10^15 J, of a million boards a lifetime: a counter stays there, so that it is always an integer of SQLite.
_SUM_MJ_MOST = 2**62


class NamespaceSum(NamedTuple):
    """Millijoules that a namespace has spent, those that its own counter had, and whether it has one now."""

    spent_mj: int = 0
    own_mj: int = 0
    is_shown: bool = False


class NamespaceSums:
    """All sums of a ledger; does not change."""

    def __init__(self, sums: Mapping[str, NamespaceSum], *, most: int = NAMESPACES_MOST) -> None:
        self.sums = sums
        self._most = most

    def plus(self, spent_mj: Mapping[str, int]) -> tuple["NamespaceSums", dict[str, NamespaceSum]]:
        """These sums with more millijoules by namespace, and those that changed."""
        after, changed = dict(self.sums), dict[str, NamespaceSum]()
        for name in sorted(spent_mj):
            # A namespace beyond those that can be known is OTHER, as one of that name is.
            key = name if name in after or len(after) < _KNOWN_MOST else OTHER
            known = after.get(key, NamespaceSum())
            own_mj = known.own_mj + spent_mj[name] if known.is_shown else known.own_mj
            after[key] = changed[key] = NamespaceSum(
                min(known.spent_mj + spent_mj[name], _SUM_MJ_MOST), min(own_mj, _SUM_MJ_MOST), known.is_shown
            )
        shown = {name for name, one in after.items() if one.is_shown}
        least = ""
        for name in sorted(changed.keys() - shown - {OTHER}):
            one = after[name]
            if len(shown) >= self._most:
                least = least or min(shown, key=lambda other: (after[other].spent_mj, other))
                if one.spent_mj < 2 * max(1, after[least].spent_mj):
                    continue
                after[least] = changed[least] = after[least]._replace(is_shown=False)
                shown.remove(least)
                least = ""
            # From this time on, with what comes now.
            now_mj = one.spent_mj - self.sums.get(name, NamespaceSum()).spent_mj
            after[name] = changed[name] = one._replace(own_mj=min(one.own_mj + now_mj, _SUM_MJ_MOST), is_shown=True)
            shown.add(name)
        return NamespaceSums(after, most=self._most), changed

    def counters_mj(self) -> dict[str, int]:
        """Millijoules by the name that they are counted under; OTHER only where anything is."""
        found = {name: one.own_mj for name, one in self.sums.items() if one.is_shown}
        other_mj = sum(one.spent_mj - one.own_mj for one in self.sums.values())
        return found | ({OTHER: other_mj} if other_mj else {})
