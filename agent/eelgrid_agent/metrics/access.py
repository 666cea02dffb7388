"""Access to the metrics endpoint: TLS and basic authentication, reloaded when their files change.

Theory (basic authentication). A hash is slow on purpose, and a scraper sends the same password each
second, so an answer is kept, right or wrong, under a keyed digest of user, hash
and password: a changed hash is another key, and no password is kept. A user
that does not exist costs the same as one that does, so time tells nobody who
does. Hashes run one at a time, and only so many a second, for a stranger who
guesses must not take the node's cores; known answers are never held up by that.
"""

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from eelgrid_agent.metrics.web_config import TlsSettings, WebConfig, WebConfigError, load_web_config
from eelgrid_protos.file_reloader import FileReloader, WatchFile, load_key_pair
from eelgrid_protos.transport import CertificateUnusable, TlsFiles
from eelgrid_protos.values import dataclass

# `ssl` and `hashlib` load OpenSSL, which is 4 MB of a small daemon: where they are used.
if TYPE_CHECKING:
    from ssl import SSLContext

_ANSWERS_MOST = 100
# New passwords tried in a second, all users together.
_CHECKS_PER_S_MOST = 4
# Requests that wait for a hash; each holds a connection.
_WAITING_MOST = 3
# What bcrypt looks at; the rest would be ignored, so a longer password is wrong.
_PASSWORD_BYTES_MOST = 72
# A hash of nobody's password, without its cost.
_NOBODY = "abcdefghijklmnopqrstuuqaAl9ktEIPj2NAqA75U6nyFa4K.2Hda"


class PasswordVerdict(Enum):
    """What became of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    TOO_MANY = "too many"


class BasicAuthenticator:
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

    def check_password(self, users: Mapping[str, str], name: str, password: bytes) -> PasswordVerdict:
        """Whether this user has this password."""
        hashed = users.get(name) or _nobody(users)
        key = self._digest(name.encode("utf-8", "replace"), hashed.encode(), password)
        with self._lock:
            known = self._answers.get(key)
            if known is not None:
                self._answers.move_to_end(key)
                return PasswordVerdict.RIGHT if known else PasswordVerdict.WRONG
            if not self._may_check():
                return PasswordVerdict.TOO_MANY
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
        return PasswordVerdict.RIGHT if right else PasswordVerdict.WRONG

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
        import hashlib
        import hmac

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


# The names that `ssl` has for those of the file.
_AUTH = {"none": "CERT_NONE", "optional": "CERT_OPTIONAL", "required": "CERT_REQUIRED"}
_VERSIONS = {"TLS10": "TLSv1", "TLS11": "TLSv1_1", "TLS12": "TLSv1_2", "TLS13": "TLSv1_3"}


class MetricsError(Exception):
    """The endpoint cannot be served; the message says what to do."""


class WebConfigUnusable(MetricsError):
    """The web configuration file, or a file that it names, is at fault."""


@dataclass(frozen=True, slots=True)
class AccessRules:
    """What the files say: users, headers and client names, and the TLS context; None without TLS."""

    config: WebConfig
    context: "SSLContext | None"


class ScrapeAccess:
    """Who may come in now: by the web configuration file, or else by the files of the agent's TLS flags."""

    def __init__(self, path: Path | None, tls: TlsFiles | None, log: logging.Logger) -> None:
        self.credentials = BasicAuthenticator(secret=os.urandom(32), monotonic_ns=time.monotonic_ns)
        self._path = path
        self._flags = tls
        name = "metrics_tls" if path is None else "web_config"
        try:
            self._reloader = FileReloader(self._load, name=name, log=log, errors=(WebConfigError, CertificateUnusable))
        except WebConfigError as error:
            raise WebConfigUnusable(f"--web-config {error}") from None
        except (OSError, ValueError, CertificateUnusable) as error:
            raise MetricsError(f"TLS of --metrics: {error}; name readable PEM files that fit each other") from None

    @property
    def config(self) -> WebConfig:
        """What the web configuration file says."""
        return self._reloader.current.config

    @property
    def is_encrypted(self) -> bool:
        """Whether nobody but the client can read along."""
        return self._reloader.current.context is not None

    def refresh(self) -> AccessRules:
        """Loads files that changed, and returns the rules in use."""
        return self._reloader.refresh()

    def _load(self, watch: WatchFile) -> AccessRules:
        if self._path is not None:
            watch(self._path)
            config = load_web_config(self._path)
            if config.tls is None:
                return AccessRules(config, None)
            for file in config.tls.files:
                watch(file)
            return AccessRules(config, _build_context(config.tls, self._path))
        if self._flags is None:
            return AccessRules(WebConfig(), None)
        import ssl

        self._flags.load_contents(watch)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self._flags.authority))
        load_key_pair(context, self._flags.certificate, self._flags.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return AccessRules(WebConfig(), context)


def _build_context(settings: TlsSettings, path: Path) -> "SSLContext":
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion[_VERSIONS[settings.oldest]]
    context.maximum_version = ssl.TLSVersion[_VERSIONS[settings.newest]]
    context.options |= ssl.OP_NO_COMPRESSION
    if settings.own_preference:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        if settings.suites:
            context.set_ciphers(":".join(settings.suites))
        if settings.curve:
            context.set_ecdh_curve(settings.curve)
    except (ssl.SSLError, ValueError) as error:
        name = "tls_server_config: cipher_suites or curve_preferences"
        raise WebConfigError(f"{path}: {name}: OpenSSL here does not take it ({error}); choose others") from None
    try:
        load_key_pair(context, settings.certificate, settings.key)
    except OSError as error:
        files = f"{settings.certificate} and {settings.key}"
        raise WebConfigError(
            f"{path}: tls_server_config.cert_file: {files} cannot be used ({error}); name PEM files that fit each other"
        ) from None
    if settings.client_authority is not None:
        try:
            context.load_verify_locations(settings.client_authority)
        except OSError as error:
            raise WebConfigError(
                f"{path}: tls_server_config.client_ca_file: {settings.client_authority} cannot be used ({error}); "
                "name a PEM file"
            ) from None
    context.verify_mode = ssl.VerifyMode[_AUTH[settings.client_auth]]
    return context
