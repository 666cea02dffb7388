"""What work that waits for a spent limit is told.

Owns the sentences. Must not know whether anything waits.
"""

import math

from eelgrid_controller.spending.limits import AMOUNTS, amount_text, amount_words, limit_text, subject_words
from eelgrid_controller.spending.periods import Stretch, moment_words, stretch_words
from eelgrid_controller.spending.standing import Overspent, utc_offset_minutes_of
from eelgrid_protos.messages import Policy

__all__ = ["spending_reason", "spending_remedy"]


def spending_reason(over: Overspent) -> str:
    """Why work waits: the constraint, a colon and a sentence without numbers."""
    limit = over.limit
    what = amount_words(limit.quantity, "")
    return f"spending: {subject_words(limit)} has spent its {what} of the {limit.period.name.lower()}"


def spending_remedy(over: Overspent, policy: Policy) -> str:
    """By how much, until when, and what would help."""
    limit, offset = over.limit, utc_offset_minutes_of(policy)
    currency = "" if policy.prices is None else policy.prices.currency
    spent, most = (amount_text(limit.quantity, amount) for amount in (over.spent, limit.most))
    stretch = Stretch(over.begin_s, over.end_s)
    return (
        f"{subject_words(limit)} has spent {spent} of {most} {amount_words(limit.quantity, currency)} of "
        f"{stretch_words(limit.period, stretch, offset)}; it goes on {moment_words(over.end_s, offset)}, or when "
        f"the limit is raised: eelctl policy set --spend '{limit_text(limit, _raised(max(over.spent, limit.most), AMOUNTS[limit.quantity].size))}'."
    )


def _raised(amount: float, size: float) -> float:
    """A quarter more, on two digits of units of that size."""
    wanted = 1.25 * amount / size
    step = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / step - 1e-9) * step * size
