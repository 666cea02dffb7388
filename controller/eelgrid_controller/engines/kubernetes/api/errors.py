"""Errors of a Kubernetes API server in one tree, each message ending with what to do; and retries of calls that meet them."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from eelgrid_controller.errors import ControllerError

_MESSAGE_MOST = 1_000
_RETRY_AFTER_MOST_S = 300.0
_CANNOT = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


class StatusCause(NamedTuple):
    """A field that the server rejected."""

    field: str
    message: str
    reason: str = ""


class ClusterError(ControllerError):
    """A call that did not succeed; `status` is None where no answer came."""

    def __init__(self, problem: str, remedy: str, *, status: int | None = None, reason: str = "") -> None:
        self.status = status
        self.reason = reason
        super().__init__(problem, remedy)


class ClusterUnreachable(ClusterError):
    """No answer came; where `is_sent`, the server may have carried out the call."""

    def __init__(self, problem: str, *, is_sent: bool) -> None:
        self.is_sent = is_sent
        super().__init__(problem, "check the API server's address, its certificate and the network between")


class AnswerUnreadable(ClusterError):
    """An answer that is no JSON object, or larger than its bound."""


class Unauthenticated(ClusterError):
    """The server does not accept the credentials."""


class Forbidden(ClusterError):
    """A permission lacks; `permission` is `patch pods/status in namespace x`, or None if the answer does not say."""

    def __init__(self, problem: str, remedy: str, *, permission: str | None = None, reason: str = "") -> None:
        self.permission = permission
        super().__init__(problem, remedy, status=403, reason=reason)


class AdmissionDenied(Forbidden):
    """Permitted, but a quota, a policy or a webhook says no."""


class ObjectNotFound(ClusterError):
    """There is no such object."""


class NotServed(ObjectNotFound):
    """The server does not know the kind, or this version of it."""


class Conflict(ClusterError):
    """The object is not what the writer thought it was."""


class StaleTerm(ClusterError):
    """A write was not sent: the leadership term that decided it is over, or a newer object is known."""

    def __init__(self) -> None:
        super().__init__(
            "not sent: the leadership term is over, or a newer version of the object is known",
            "nothing: whoever leads decides again",
        )


class ObjectAlreadyExists(Conflict):
    """An object of this name exists already."""


class Expired(ClusterError):
    """The resource version or the page is too old to go on from."""


class Invalid(ClusterError):
    """The request violates a rule; `causes` names the fields, where the server does."""

    def __init__(
        self,
        problem: str,
        remedy: str,
        *,
        causes: tuple[StatusCause, ...] = (),
        status: int = 422,
        reason: str = "Invalid",
    ) -> None:
        self.causes = causes
        super().__init__(problem, remedy, status=status, reason=reason)


class TooManyRequests(ClusterError):
    """The server asks for patience; nothing was carried out."""

    def __init__(self, problem: str, remedy: str, *, retry_after_s: float | None, reason: str = "") -> None:
        self.retry_after_s = retry_after_s
        super().__init__(problem, remedy, status=429, reason=reason)


class BudgetForbids(TooManyRequests):
    """A PodDisruptionBudget keeps the pod for now."""


class ServerFault(ClusterError):
    """The server's own trouble; whether it carried out the call is not known."""

    def __init__(self, problem: str, *, status: int, retry_after_s: float | None = None, reason: str = "") -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            problem, "try again; if it lasts, look at the API server's own log", status=status, reason=reason
        )


def error_of(code: int, status: Mapping[str, Any], what: str, retry_after: str | None = None) -> ClusterError:
    """The error of an answer: its HTTP code, its `Status` (empty if the body was none), what was asked."""
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or f"HTTP {code}")[:_MESSAGE_MOST]
    details = status.get("details")
    details = details if isinstance(details, Mapping) else {}
    causes = _causes(details)
    problem = f"{what}: {message}"
    retry_after_s = _seconds(retry_after, details.get("retryAfterSeconds"))
    if code == 401:
        return Unauthenticated(problem, "renew the token or certificate", status=code, reason=reason)
    if code == 403:
        return _forbidden(message, problem, reason)
    if code == 404:
        # Of a kind that is not served the server says only that there is nothing at the path.
        if not details.get("name"):
            return NotServed(
                problem, "install its definition, or use a version that is served", status=code, reason=reason
            )
        return ObjectNotFound(problem, "it was deleted, or never made", status=code, reason=reason)
    if code == 409:
        if reason == "AlreadyExists":
            return ObjectAlreadyExists(problem, "read the one that is there", status=code, reason=reason)
        return Conflict(problem, "read it again and decide anew", status=code, reason=reason)
    if code == 410:
        return Expired(problem, "list again", status=code, reason=reason)
    if code == 429:
        if any(cause.reason == "DisruptionBudget" for cause in causes):
            return BudgetForbids(
                problem, "wait until more replicas are ready", retry_after_s=retry_after_s, reason=reason
            )
        return TooManyRequests(problem, "ask less, or later", retry_after_s=retry_after_s, reason=reason)
    if any(cause.reason == "ResourceVersionTooLarge" for cause in causes):
        # The server came back from a backup: what we know is from a future that it never had.
        return Expired(problem, "list again", status=code, reason=reason)
    if code >= 500:
        return ServerFault(problem, status=code, retry_after_s=retry_after_s, reason=reason)
    return Invalid(problem, "mend what is named and send it again", causes=causes, status=code, reason=reason)


def _forbidden(message: str, problem: str, reason: str) -> Forbidden:
    found = _CANNOT.search(message)
    if found is None:
        return AdmissionDenied(problem, "ask whoever owns the quota, policy or webhook that is named", reason=reason)
    group, namespace = found["group"], found["namespace"]
    permission = f"{found['verb']} {found['resource']}" + (f".{group}" if group else "")
    if namespace:
        permission += f" in namespace {namespace}"
    return Forbidden(problem, f"grant `{permission}` to {found['user']}", permission=permission, reason=reason)


def _causes(details: Mapping[str, Any]) -> tuple[StatusCause, ...]:
    found = details.get("causes")
    if not isinstance(found, list):
        return ()
    return tuple(
        StatusCause(
            str(one.get("field") or ""), str(one.get("message") or "")[:_MESSAGE_MOST], str(one.get("reason") or "")
        )
        for one in found
        if isinstance(one, Mapping)
    )


def _seconds(header: str | None, detail: object) -> float | None:
    """How long to wait; the header before the body, never for ever."""
    for value in (header, detail):
        try:
            seconds = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if seconds > 0:
            return min(seconds, _RETRY_AFTER_MOST_S)
    return None


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """Bounds of the attempts of one call."""

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
    """Make a call, repeated with backoff; raises the error of the last attempt."""
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


async def call_until_done(
    call: Callable[[], Awaitable[T]],
    *,
    errors: type[Exception] | tuple[type[Exception], ...] = ClusterError,
    wait_s: float,
    on_failure: Callable[[Exception], None],
) -> T:
    """Make a call until it succeeds, however long that takes; each of these `errors` is told before the wait."""
    while True:
        try:
            return await call()
        except errors as error:
            on_failure(error)
        await asyncio.sleep(wait_s)
