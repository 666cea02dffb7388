"""What is spent of the policy's spending limits: frozen values, mirrored by spending.proto."""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.policy import SPENDING_LIMITS_MOST, SpendingLimit
from eelgrid_protos.quantities import Count, Many, Nanoseconds, Range, Text

__all__ = ["ListSpendingRequest", "ListSpendingResponse", "SpendingStatus"]

_Spent = Annotated[float, Range(0.0, 1e24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingStatus:
    """A limit and what is spent of it in the period under way; None is not known."""

    limit: SpendingLimit
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    spent: _Spent | None = None
    forecast: _Spent | None = None
    over_since_ns: Nanoseconds = 0
    waiting: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSpendingRequest:
    """All limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSpendingResponse:
    """In the policy's order."""

    limits: Annotated[tuple[SpendingStatus, ...], Many(SPENDING_LIMITS_MOST)] = ()
    currency: Annotated[str, Text(8)] = ""
    utc_offset_minutes: Annotated[int, Range(-24 * 60, 24 * 60, "minutes")] = 0
