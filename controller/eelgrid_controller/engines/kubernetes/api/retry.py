"""Retries of API calls with backoff, and background tasks that end with their loop."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from eelgrid_controller.engines.kubernetes.api.errors import (
    BudgetForbids,
    ClusterError,
    ClusterUnreachable,
    ServerFault,
    TooManyRequests,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How often and how long."""

    attempts: int = 5
    whole_s: float = 30.0  # from the first attempt to the beginning of the last
    first_s: float = 0.2
    most_s: float = 5.0


_DEFAULTS = RetryLimits()


class Backoff:
    """The waits between attempts that fail; one that succeeds begins anew."""

    def __init__(self, rng: random.Random, *, first_s: float, most_s: float) -> None:
        """Waits grow from `first_s` to `most_s`."""
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def reset(self) -> None:
        """The next wait is the first again."""
        self._failures = 0

    def next_wait_s(self, least_s: float | None = None) -> float:
        """How long to wait now, at least what the server asked for."""
        span_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return max(least_s or 0.0, span_s * (0.5 + 0.5 * self._rng.random()))


def is_retryable(error: ClusterError, *, is_idempotent: bool) -> bool:
    """Whether the same call may succeed later, and may be made again without harm."""
    match error:
        case BudgetForbids():
            return False
        case TooManyRequests():
            return True
        case ClusterUnreachable(is_sent=is_sent):
            return is_idempotent or not is_sent
        case ServerFault():
            return is_idempotent and error.status != 501
    return False


def retry_after_s(error: ClusterError) -> float | None:
    """The wait that the server asked for."""
    return error.retry_after_s if isinstance(error, TooManyRequests | ServerFault) else None


async def call_with_retries(
    call: Callable[[], Awaitable[T]],
    *,
    rng: random.Random,
    is_idempotent: bool,
    limits: RetryLimits = _DEFAULTS,
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
            wait_s = backoff.next_wait_s(retry_after_s(error))
            is_last = attempt == limits.attempts or monotonic_s() + wait_s > until_s
            if is_last or not is_retryable(error, is_idempotent=is_idempotent):
                raise
        await sleep(wait_s)
    raise AssertionError("unreachable")


class BackgroundTasks:
    """The tasks of one loop."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """`what` is how the log names the loop."""
        self._log = log
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on without it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    async def end(self) -> None:
        """Cancel all, and wait until they are gone."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("%s=task_failed", self._what, exc_info=task.exception())
