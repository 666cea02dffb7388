"""Who may come in, and over which TLS: what the files say, read again when they change.

Owns the files behind the endpoint and what stays in force when they break: the
last that could be used. Must not know sockets nor requests.

MetricsError                 the endpoint cannot be served; says what to do
└── WebConfigUnusable        the web configuration file, or a file that it names, is at fault
"""

import logging
import secrets
import ssl
import threading
import time
from pathlib import Path

from eelgrid_agent.metrics.credentials import Credentials
from eelgrid_agent.metrics.web_config import TlsSettings, WebConfig, WebConfigError, load_web_config
from eelgrid_protos.transport import TlsFiles

__all__ = ["Door", "MetricsError", "WebConfigUnusable"]

# How often files are asked whether they changed, at most.
FRESH_S = 1.0

_AUTH = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1, "TLS11": ssl.TLSVersion.TLSv1_1, "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}  # fmt: skip


class MetricsError(Exception):
    """The endpoint cannot be served; the message says what to do."""


class WebConfigUnusable(MetricsError):
    """The web configuration file, or a file that it names, is at fault."""


class Door:
    """Who may come in now."""

    def __init__(self, path: Path | None, tls: TlsFiles | None, log: logging.Logger) -> None:
        self._path = path
        self._flags = tls
        self._log = log
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._stamp: object = None
        self.config = WebConfig()
        self.context: ssl.SSLContext | None = None
        self.credentials = Credentials(secret=secrets.token_bytes(32), monotonic_ns=time.monotonic_ns)
        try:
            self._read()
        except WebConfigError as error:
            raise WebConfigUnusable(f"--web-config {error}") from None
        except (OSError, ValueError) as error:
            raise MetricsError(f"TLS of --metrics: {error}; name readable PEM files that fit each other") from None

    @property
    def is_encrypted(self) -> bool:
        """Whether others than the client can not listen."""
        return self.context is not None

    def refresh(self) -> None:
        """Reads what changed; the last that could be used stays otherwise."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s < FRESH_S:
                return
            self._looked_s = now_s
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            try:
                self._read()
            except (WebConfigError, OSError, ValueError) as error:
                self._stamp = stamp
                self._log.warning("web_config=kept reason=%s", error)
            else:
                self._log.info("web_config=reloaded")

    def _read(self) -> None:
        # The stamp goes first: what changes while it is read is read again.
        if self._path is not None:
            stamp = _stamp(self._path)
            config = load_web_config(self._path)
            files = () if config.tls is None else config.tls.files
            seen = (stamp, tuple(_stamp(file) for file in files))
            context = None if config.tls is None else _context(config.tls, self._path)
            self.config, self.context, self._stamp = config, context, seen
        elif self._flags is not None:
            seen_flags = self._flags.stamp()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self._flags.authority))
            context.load_cert_chain(self._flags.certificate, self._flags.key)
            context.verify_mode = ssl.CERT_REQUIRED
            self.context, self._stamp = context, seen_flags

    def _stamps(self) -> object:
        if self._path is None:
            return None if self._flags is None else self._flags.stamp()
        files = () if self.config.tls is None else self.config.tls.files
        return _stamp(self._path), tuple(_stamp(file) for file in files)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ino, status.st_size


def _context(settings: TlsSettings, path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[settings.oldest], _VERSIONS[settings.newest]
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
        context.load_cert_chain(settings.certificate, settings.key)
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
    context.verify_mode = _AUTH[settings.client_auth]
    return context
