"""The node power budget as a water-filling level on device limits (a circuit breaker).

A device may draw up to the level and no more; the level is as high as the budget allows (water filling). That lowers
the highest draw first and treats equal devices equally. Lowering in proportion to each excess would not: a gang goes at
the pace of its slowest member, so watts left with the others would be spent waiting. A level needs no memory: the same
readings give the same level, so a sensor that shows the mean of the last second does not wind it down while it catches
up.

The level falls when the mean of the last second is over the budget, or two samples in a row are; at four samples a
second that is noticed within half a second and leaves the other half to the device. A part that draws more than its
limit (some do near their minimum) is seen once its limit had time to take effect, and the level falls by the excess.
The level rises only after a quiet time, in steps that keep the expected draw under 97 %, each after the effect of the
one before can be seen. What cannot be lowered (silent, suspended, no permission) counts as it is, and where even the
minima exceed the budget, that is announced.
"""

from dataclasses import dataclass, replace

from eelgrid_agent.enforce.rules import GuardLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDraw:
    """The power draw of one device and the range of its limit; `limit_w` is in force.

    A device with unknown draw is counted at its limit.
    """

    power_w: float
    limit_w: float
    low_w: float
    high_w: float
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of the budget; without a level (`level_w` None) no device is restrained.

    `is_told` holds from an announcement until power falls again. `fixed` devices cannot be lowered now; for `rangeless`
    ones it was announced that they do not report their limit range.
    """

    samples: tuple[tuple[int, float], ...] = ()
    level_w: float | None = None
    lowered_ns: int = 0
    raise_ns: int = 0
    is_told: bool = False
    mean_w: float = 0.0
    fixed: int = 0
    rangeless: frozenset[str] = frozenset()


def step_budget(
    budget: BudgetState,
    draws: tuple[DeviceDraw, ...],
    budget_w: float,
    now_ns: int,
    limits: GuardLimits,
    *,
    is_enforced: bool,
) -> tuple[BudgetState, str]:
    """The next state, and what to announce, if anything."""
    total_w = sum(draw.power_w for draw in draws)
    horizon_ns = now_ns - int(limits.budget_window_s * 1e9)
    before = tuple(sample for sample in budget.samples if sample[0] > horizon_ns)[-64:]
    samples = (*before, (now_ns, total_w))
    mean_w = sum(power_w for _, power_w in samples) / len(samples)
    is_twice = total_w > budget_w and bool(before) and before[-1][1] > budget_w
    fixed = sum(not draw.is_writable for draw in draws)
    budget = replace(budget, samples=samples, mean_w=mean_w, fixed=fixed)
    if mean_w > budget_w or is_twice:
        if not is_enforced:
            word = (
                f"{max(mean_w, total_w):.0f} W are over the node's budget of {budget_w:g} W; observe-only: not lowered"
            )
            return replace(budget, is_told=True, level_w=None), "" if budget.is_told else word
        return _lower(budget, draws, budget_w, now_ns, limits)
    if max(mean_w, total_w) <= limits.budget_calm * budget_w:
        budget = replace(budget, is_told=False)
        if budget.level_w is not None and now_ns >= budget.raise_ns:
            return _raise(budget, draws, limits.budget_raise * budget_w - max(mean_w, total_w), now_ns, limits), ""
    return budget, ""


def _lower(
    budget: BudgetState, draws: tuple[DeviceDraw, ...], budget_w: float, now_ns: int, limits: GuardLimits
) -> tuple[BudgetState, str]:
    has_settled = budget.level_w is not None and now_ns - budget.lowered_ns >= limits.budget_settle_s * 1e9
    movable = [draw for draw in draws if draw.is_writable]
    fixed_w = sum(draw.power_w for draw in draws if not draw.is_writable)
    over_w = [max(0.0, draw.power_w - draw.limit_w) if has_settled else 0.0 for draw in movable]

    def drawn_w(level_w: float) -> float:
        held = (min(draw.power_w, max(level_w, draw.low_w) + over) for draw, over in zip(movable, over_w, strict=True))
        return fixed_w + sum(held)

    aim_w = limits.budget_aim * budget_w
    low_w = min((draw.low_w for draw in movable), default=0.0)
    high_w = max((draw.high_w for draw in movable), default=0.0)
    ceiling_w = high_w if budget.level_w is None else min(high_w, budget.level_w)
    bottom_w, top_w = low_w, max(low_w, ceiling_w)
    # Forty halvings of at most a few kilowatts are far below a milliwatt.
    for _ in range(40):
        middle_w = (bottom_w + top_w) / 2.0
        bottom_w, top_w = (middle_w, top_w) if drawn_w(middle_w) <= aim_w else (bottom_w, middle_w)
    # Whole watts; the milliwatt is for halvings that end just under a whole one, which would be lost at every look.
    level_w = max(low_w, float(int(bottom_w + 0.001)))
    is_lower = budget.level_w is None or level_w < budget.level_w
    following = replace(
        budget,
        level_w=level_w if movable else None,
        lowered_ns=now_ns if is_lower else budget.lowered_ns,
        raise_ns=now_ns + int(limits.budget_hold_s * 1e9),
    )
    least_w = drawn_w(low_w)
    if least_w > budget_w and not budget.is_told:
        word = (
            f"the node's budget of {budget_w:g} W cannot be kept: {fixed_w:.0f} W cannot be lowered and "
            f"{least_w - fixed_w:.0f} W are drawn at the lowest limits; raise the budget or remove work"
        )
        return replace(following, is_told=True), word
    return following, ""


def _raise(
    budget: BudgetState, draws: tuple[DeviceDraw, ...], headroom_w: float, now_ns: int, limits: GuardLimits
) -> BudgetState:
    assert budget.level_w is not None
    movable = [draw for draw in draws if draw.is_writable]
    held = sum(1 for draw in movable if draw.power_w >= 0.9 * min(budget.level_w, draw.high_w))
    step_w = float(int(min(limits.slew_w, headroom_w / max(1, held))))
    if step_w < 1.0:
        return budget
    level_w: float | None = budget.level_w + step_w
    if level_w is not None and level_w >= max((draw.high_w for draw in movable), default=0.0):
        level_w = None
    return replace(budget, level_w=level_w, raise_ns=now_ns + int(limits.budget_settle_s * 1e9))
