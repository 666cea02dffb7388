"""Whether a user and a password are right, by bcrypt, and what that may cost.

Owns the check, its cache and its bounds. Must not know HTTP nor files.

Theory. A hash is slow on purpose, and a scraper sends the same password each
second, so an answer is kept, right or wrong, under a keyed digest of user, hash
and password: a changed hash is another key, and no password is kept. A user
that does not exist costs the same as one that does, so time tells nobody who
does. Hashes run one at a time, and only so many a second, for a stranger who
guesses must not take the node's cores; known answers are never held up by that.
"""

import hashlib
import hmac
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum

__all__ = ["Credentials", "Verdict"]

_ANSWERS_MOST = 100
# New passwords tried in a second, all users together.
_CHECKS_PER_S_MOST = 4
# Requests that wait for a hash; each holds a connection.
_WAITING_MOST = 3
# What bcrypt looks at; the rest would be ignored, so a longer password is wrong.
_PASSWORD_BYTES_MOST = 72
# A hash of nobody's password, without its cost.
_NOBODY = "abcdefghijklmnopqrstuuqaAl9ktEIPj2NAqA75U6nyFa4K.2Hda"


class Verdict(Enum):
    """What became of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    TOO_MANY = "too many"


class Credentials:
    """Checks passwords; `secret` keys the digests of those that were seen."""

    def __init__(self, *, secret: bytes, monotonic_ns: Callable[[], int]) -> None:
        self._secret = secret
        self._monotonic_ns = monotonic_ns
        # Held for a moment, so that a known answer waits for no hash; and while one is made.
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._waiting = 0
        self._answers: OrderedDict[bytes, bool] = OrderedDict()
        self._checked_ns: deque[int] = deque(maxlen=_CHECKS_PER_S_MOST)

    def check(self, users: Mapping[str, str], name: str, password: bytes) -> Verdict:
        """Whether this user has this password."""
        hashed = users.get(name) or _nobody(users)
        key = self._digest(name.encode("utf-8", "replace"), hashed.encode(), password)
        with self._lock:
            known = self._answers.get(key)
            if known is not None:
                self._answers.move_to_end(key)
                return Verdict.RIGHT if known else Verdict.WRONG
            if not self._may_check():
                return Verdict.TOO_MANY
            self._waiting += 1
        try:
            with self._hashing:
                right = _matches(hashed, password) and name in users
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            self._answers[key] = right
            while len(self._answers) > _ANSWERS_MOST:
                self._answers.popitem(last=False)
        return Verdict.RIGHT if right else Verdict.WRONG

    def _may_check(self) -> bool:
        """Whether one more hash now is within the bounds; counts it if so."""
        now_ns, checked = self._monotonic_ns(), self._checked_ns
        if self._waiting >= _WAITING_MOST or (
            len(checked) == _CHECKS_PER_S_MOST and now_ns - checked[0] < 1_000_000_000
        ):
            return False
        checked.append(now_ns)
        return True

    def _digest(self, *parts: bytes) -> bytes:
        """Lengths go in, so that no two triples read alike."""
        digest = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()


def _nobody(users: Mapping[str, str]) -> str:
    """A hash that costs what those of the users do."""
    cost = next(iter(users.values()))[4:6] if users else "10"
    return f"$2b${cost}${_NOBODY}"


def _matches(hashed: str, password: bytes) -> bool:
    import bcrypt

    fits = len(password) <= _PASSWORD_BYTES_MOST and b"\0" not in password
    # Compared whatever it is, in constant time, so that a bad password takes as long.
    matches = bcrypt.checkpw(password if fits else b"", hashed.encode())
    return bool(matches) and fits
