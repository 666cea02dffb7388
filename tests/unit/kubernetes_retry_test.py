"""Which errors are repeated, how often, and after what wait."""

import random

import pytest

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.errors import (
    Backoff,
    RetryLimits,
    call_with_retries,
    error_of,
    is_retryable,
)

BUSY = error_of(429, {"reason": "TooManyRequests"}, "patch x", "3")
FAULT = error_of(503, {}, "patch x")
STALE = error_of(409, {"reason": "Conflict"}, "patch x")
FORBIDS = error_of(
    429,
    {"details": {"causes": [{"reason": "DisruptionBudget", "message": "needs 2"}], "retryAfterSeconds": 10}},
    "evict x",
)
LOST = errors.ClusterUnreachable("patch x: no answer", is_sent=True)
AWAY = errors.ClusterUnreachable("patch x: refused", is_sent=False)


@pytest.mark.parametrize(
    ("error", "idempotent", "other"),
    [
        (BUSY, True, True),
        (FAULT, True, False),
        (LOST, True, False),
        (AWAY, True, True),
        (STALE, False, False),
        (FORBIDS, False, False),
    ],
)
def test_what_is_worth_repeating(error, idempotent, other):
    assert is_retryable(error, is_idempotent=True) is idempotent
    assert is_retryable(error, is_idempotent=False) is other


@pytest.mark.parametrize(
    ("code", "status", "kind", "said"),
    [
        (404, {"details": {"name": "a"}}, errors.ObjectNotFound, "deleted"),
        (404, {}, errors.NotServed, "install"),
        (409, {"reason": "AlreadyExists"}, errors.ObjectAlreadyExists, "read the one"),
        (410, {"reason": "Expired"}, errors.Expired, "list again"),
        (504, {"details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}}, errors.Expired, "list again"),
        (403, {"message": 'pods "a" is forbidden: exceeded quota: gpus'}, errors.AdmissionDenied, "quota"),
        (415, {"message": "unknown format"}, errors.Invalid, "mend"),
        (500, {}, errors.ServerFault, "log"),
    ],
)
def test_errors_say_whose_move_it_is(code, status, kind, said):
    error = error_of(code, status, "get /x")
    assert type(error) is kind
    assert said in str(error)


def test_a_permission_is_named_as_rbac_names_it():
    message = 'User "u" cannot create resource "pods/binding" in API group "" in the namespace "ml"'
    error = error_of(403, {"message": f'pods "a" is forbidden: {message}'}, "post /x")
    assert (error.permission, "grant `create pods/binding in namespace ml` to u" in str(error)) == (
        "create pods/binding in namespace ml",
        True,
    )


class Calls:
    """A call that fails so often, and a clock that waits alone move."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.made = 0
        self.now_s = 0.0
        self.waits = []

    async def call(self):
        self.made += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def sleep(self, wait_s):
        self.waits.append(wait_s)
        self.now_s += wait_s

    async def run(self, *, limits=None, is_idempotent=True):
        return await call_with_retries(
            self.call,
            rng=random.Random(1),
            is_idempotent=is_idempotent,
            limits=limits or RetryLimits(),
            monotonic_s=lambda: self.now_s,
            sleep=self.sleep,
        )


async def test_a_busy_server_is_asked_again_after_what_it_said():
    calls = Calls(BUSY, FAULT)
    assert await calls.run() == "done"
    assert calls.waits[0] == 3.0
    assert 0.2 <= calls.waits[1] <= 0.4


async def test_attempts_and_time_are_bounded():
    calls = Calls(*[FAULT] * 9)
    with pytest.raises(errors.ServerFault):
        await calls.run()
    assert calls.made == 5
    calls = Calls(*[BUSY] * 9)
    with pytest.raises(errors.TooManyRequests):
        await calls.run(limits=RetryLimits(whole_s=7.0))
    assert calls.made == 3
    calls = Calls(STALE)
    with pytest.raises(errors.Conflict):
        await calls.run()
    assert calls.made == 1


def test_waits_double_up_to_their_bound_and_begin_again():
    backoff = Backoff(random.Random(1), first_s=1.0, most_s=5.0)
    waits = [backoff.next_wait_s() for _ in range(5)]
    for wait_s, most_s in zip(waits, (1.0, 2.0, 4.0, 5.0, 5.0), strict=True):
        assert most_s / 2 <= wait_s <= most_s
    backoff.reset()
    assert backoff.next_wait_s() <= 1.0
