"""Which errors are worth another attempt, after what wait, and how often.

Owns the rules and one bounded loop around a call. Must not know verbs.

Theory. Another attempt helps where the server was busy, away or in trouble; it never helps
where the answer was about the call itself (409, 422, 403, 404, 410): whoever asked must
read again and decide anew. A call that may have been carried out although no answer came
may be repeated only if doing it twice is doing it once, which the caller says: a patch
with the resource version that was read, a delete by uid, any read. A call that was
certainly not carried out (429, no connection) may always be repeated. Waits double from
`first_s` to `most_s`, each drawn from the upper half of its span, so that controllers
that failed together do not return together; what the server asked for (Retry-After) is
the least. All attempts together are bounded in number and in time.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from eelgrid_controller.adapters.kubernetes.errors import (
    BudgetForbids,
    ClusterError,
    ServerFault,
    TooManyRequests,
    Unreachable,
)

__all__ = ["Backoff", "Limits", "asked_wait_s", "is_worth_repeating", "with_retries"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How often and how long."""

    attempts: int = 5
    whole_s: float = 30.0  # from the first attempt to the beginning of the last
    first_s: float = 0.2
    most_s: float = 5.0


_DEFAULTS = Limits()


class Backoff:
    """The waits between attempts that fail; one that succeeds begins anew."""

    def __init__(self, rng: random.Random, *, first_s: float, most_s: float) -> None:
        """Waits grow from `first_s` to `most_s`."""
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def succeeded(self) -> None:
        """The next wait is the first again."""
        self._failures = 0

    def wait_s(self, least_s: float | None = None) -> float:
        """How long to wait now, at least what the server asked for."""
        span_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return max(least_s or 0.0, span_s * (0.5 + 0.5 * self._rng.random()))


def is_worth_repeating(error: ClusterError, *, is_idempotent: bool) -> bool:
    """Whether the same call may succeed later, and may be made again without harm."""
    match error:
        case BudgetForbids():
            return False
        case TooManyRequests():
            return True
        case Unreachable(is_sent=is_sent):
            return is_idempotent or not is_sent
        case ServerFault():
            return is_idempotent and error.status != 501
    return False


def asked_wait_s(error: ClusterError) -> float | None:
    """The wait that the server asked for."""
    return error.retry_after_s if isinstance(error, TooManyRequests | ServerFault) else None


async def with_retries(
    call: Callable[[], Awaitable[T]],
    *,
    rng: random.Random,
    is_idempotent: bool,
    limits: Limits = _DEFAULTS,
    monotonic_s: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """What the call gives, after several attempts if need be; the last error otherwise."""
    backoff = Backoff(rng, first_s=limits.first_s, most_s=limits.most_s)
    until_s = monotonic_s() + limits.whole_s
    for attempt in range(1, limits.attempts + 1):
        try:
            return await call()
        except ClusterError as error:
            wait_s = backoff.wait_s(asked_wait_s(error))
            is_last = attempt == limits.attempts or monotonic_s() + wait_s > until_s
            if is_last or not is_worth_repeating(error, is_idempotent=is_idempotent):
                raise
        await sleep(wait_s)
    raise AssertionError("unreachable")
