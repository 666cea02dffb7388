"""How limits stand at a moment, and which of them are spent.

Owns the judgement. Must not know who asked the energy ledger, nor what waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eelgrid_controller.spending.limits import Key, key_of, warn_ratio_of
from eelgrid_controller.spending.periods import Stretch, stretch_at
from eelgrid_controller.spending.standing import Overspent, Spending, utc_offset_minutes_of
from eelgrid_protos.messages import Policy, SpendingLimit, SpendingQuantity

__all__ = ["Standing", "judgement", "standings"]

# Of the limit: what is spent beyond is told anew in such steps.
_STEP = 0.01
_NS = 10**9


@dataclass(frozen=True, slots=True)
class Standing:
    """A limit at a moment; `spent` is None where nobody can say."""

    limit: SpendingLimit
    stretch: Stretch
    spent: float | None

    @property
    def ratio(self) -> float | None:
        """The share that is spent."""
        return None if self.spent is None else self.spent / self.limit.most

    @property
    def is_over(self) -> bool:
        """Whether it is spent."""
        return self.spent is not None and self.spent >= self.limit.most

    @property
    def is_near(self) -> bool:
        """Whether it is nearly spent."""
        return self.ratio is not None and not self.is_over and self.ratio >= warn_ratio_of(self.limit)


def standings(
    policy: Policy, spending: Spending, told: Mapping[tuple[Key, Stretch], float], now_ns: int
) -> tuple[Standing, ...]:
    """Every limit of the policy in force; `told` is what the energy ledger says by limit and period."""
    offset = utc_offset_minutes_of(policy)
    found = []
    for limit in policy.spending:
        key, stretch = key_of(limit), stretch_at(limit.period, now_ns // _NS, offset)
        is_held = limit.quantity is SpendingQuantity.GPU_TIME
        found.append(
            Standing(limit, stretch, spending.spent_gpu_s(key, now_ns) if is_held else told.get((key, stretch)))
        )
    return tuple(found)


def judgement(
    policy: Policy, spending: Spending, told: Mapping[tuple[Key, Stretch], float], now_ns: int
) -> tuple[Overspent, ...]:
    """The limits that are spent now; where nobody can say, those that were and whose period goes on.

    Equal to what is known already unless there is something to tell.
    """
    known = {key_of(one.limit): one for one in spending.over}
    over = []
    for one in standings(policy, spending, told, now_ns):
        before = known.get(key_of(one.limit))
        if before is not None and before.begin_s != one.stretch.begin_s:
            before = None
        if one.spent is None and before is not None:
            over.append(before)
        elif one.spent is not None and one.is_over:
            if before is not None and one.spent < before.spent + _STEP * one.limit.most:
                over.append(before)
            else:
                since_ns = now_ns if before is None else before.since_ns
                over.append(
                    Overspent(
                        limit=one.limit, spent=one.spent, begin_s=one.stretch.begin_s, end_s=one.stretch.end_s,
                        since_ns=since_ns,
                    )
                )  # fmt: skip
    return tuple(over)
