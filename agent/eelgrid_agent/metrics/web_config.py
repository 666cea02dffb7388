"""The web configuration file: TLS, users and headers of the endpoint, as Prometheus' exporters take them.

Owns the format of exporter-toolkit's `--web.config.file`, and what of it this
server can keep: a setting that it cannot keep is an error that names the field,
never passed over. Must not open sockets nor check passwords. Paths are relative
to the file's own folder.

    tls_server_config:
      cert_file: tls.crt
      key_file: tls.key
      client_auth_type: RequireAndVerifyClientCert
      client_ca_file: ca.crt
    basic_auth_users:
      prometheus: $2y$10$...
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from eelgrid_protos.values import dataclass

_BYTES_MOST = 1024 * 1024
_USERS_MOST = 100
_SANS_MOST = 100
_SUITES_MOST = 64
# Each step doubles the time: 10 is some 60 ms, 16 some 4 s.
_COST_LEAST, _COST_MOST = 4, 16

_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
# Go's names of the suites that exporter-toolkit takes, and OpenSSL's. Those of TLS 1.3 are not chosen, here or there.
_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
_SUITES_OF_TLS13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_CLIENT_AUTH = {"NoClientCert": "none", "VerifyClientCertIfGiven": "optional", "RequireAndVerifyClientCert": "required"}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")


class WebConfigError(Exception):
    """The file cannot be used; the message names the file, the field and the remedy."""


# How a client shows itself: one of "none", "optional", "required".
ClientAuth = str


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """What `tls_server_config` asks for; `suites` and `curve` are OpenSSL's names, empty for its own choice."""

    certificate: Path
    key: Path
    client_auth: ClientAuth = "none"
    client_authority: Path | None = None
    client_sans: frozenset[str] = frozenset()
    oldest: str = "TLS12"
    newest: str = "TLS13"
    suites: tuple[str, ...] = ()
    own_preference: bool = True
    curve: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """What has to be read again when it changes."""
        files = (self.certificate, self.key)
        return files if self.client_authority is None else (*files, self.client_authority)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The whole file."""

    tls: TlsSettings | None = None
    # Hashes by bcrypt; none asks for no password.
    users: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()


def load_web_config(path: Path) -> WebConfig:
    """Reads the file; raises WebConfigError."""
    try:
        import yaml
    except ImportError:
        raise WebConfigError(f"{path}: needs PyYAML to be read; install eelgrid[agent]") from None
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MOST + 1)
    except OSError as error:
        raise WebConfigError(f"{path}: cannot be read ({error.strerror}); give a web configuration file") from None
    if len(content) > _BYTES_MOST:
        raise WebConfigError(f"{path}: is larger than {_BYTES_MOST} bytes; give a web configuration file")
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise WebConfigError(f"{path}: is not YAML ({where}); correct it there") from None
    return _config(_Section(path, "", {} if document is None else document))


class _Section:
    """A mapping of the file, taken apart field by field; what is left over is an error."""

    def __init__(self, path: Path, name: str, value: Any) -> None:
        self.path = path
        self._name = name
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong("", "is no mapping of names; write `name: value` lines")
        self._left: dict[str, Any] = dict(value)

    def wrong(self, key: str, problem: str) -> WebConfigError:
        """An error at this field."""
        name = ".".join(part for part in (self._name, key) if part)
        return WebConfigError(f"{self.path}: {name or 'the file'} {problem}")

    def section(self, key: str) -> "_Section | None":
        """A mapping within; None where it is not there or empty."""
        value = self._left.pop(key, None)
        name = f"{self._name}.{key}" if self._name else key
        return None if value is None else _Section(self.path, name, value)

    def text(self, key: str, default: str = "") -> str:
        value = self._left.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, f"is {type(value).__name__}; write text, in quotes where need be")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.wrong(key, f"is {value!r}; write one of {', '.join(choices)}")
        return value

    def truth(self, key: str, *, default: bool) -> bool:
        value = self._left.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "is neither true nor false; write one of them")
        return value

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        value = self._left.pop(key, None)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "is no list of texts; write one on each line, after a dash")
        if len(value) > most:
            raise self.wrong(key, f"lists {len(value)}; list at most {most}")
        return tuple(value)

    def file(self, key: str) -> Path | None:
        value = self.text(key)
        return self.path.parent / value if value else None

    def rest(self) -> dict[str, Any]:
        """Everything not taken yet, which then is."""
        rest, self._left = self._left, {}
        return rest

    def has(self, key: str) -> bool:
        return self._left.get(key) is not None

    def finish(self) -> None:
        """What is left is no field of ours."""
        if self._left:
            raise self.wrong(min(self._left), "is no field of a web configuration; correct the spelling or remove it")


def _config(top: _Section) -> WebConfig:
    tls, http, users = (top.section(key) for key in ("tls_server_config", "http_server_config", "basic_auth_users"))
    if top.has("rate_limit"):
        raise top.wrong("rate_limit", "is not kept here, where scrapes are bounded anyway; remove it")
    top.finish()
    return WebConfig(
        tls=None if tls is None else _tls(tls),
        users={} if users is None else _users(users),
        headers=() if http is None else _headers(http),
    )


def _users(section: _Section) -> Mapping[str, str]:
    users = section.rest()
    if len(users) > _USERS_MOST:
        raise section.wrong("", f"names {len(users)} users; name at most {_USERS_MOST}, or ask for client certificates")
    for name, hashed in users.items():
        # A user name ends at the first colon of the header.
        if not name or ":" in name:
            raise section.wrong(name, "is no user name; use one without a colon")
        found = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if found is None:
            raise section.wrong(name, "is no bcrypt hash; make one with `htpasswd -nBC 10 NAME`")
        if not _COST_LEAST <= int(found[1]) <= _COST_MOST:
            problem = f"has cost {int(found[1])}, outside [{_COST_LEAST}, {_COST_MOST}]; make the hash with another"
            raise section.wrong(name, problem)
    return users


def _headers(http: _Section) -> tuple[tuple[str, str], ...]:
    # HTTP/2 is negotiated: a client that is not offered it speaks HTTP/1.
    http.truth("http2", default=True)
    section = http.section("headers")
    http.finish()
    if section is None:
        return ()
    headers = []
    for name, accepted in _HEADERS.items():
        value = section.text(name)
        if not value:
            continue
        if accepted and value.lower() not in accepted:
            raise section.wrong(name, f"is {value!r}; write {' or '.join(accepted)}")
        if not value.isprintable() or not value.isascii():
            raise section.wrong(name, "holds what no header may; use printable ASCII on one line")
        headers.append((name, value))
    section.finish()
    return tuple(headers)


def _tls(section: _Section) -> TlsSettings:
    for inline in ("cert", "key", "client_ca"):
        if section.has(inline):
            raise section.wrong(
                inline, f"is given in the file itself; write it to a file and name that as {inline}_file"
            )
    certificate, key = section.file("cert_file"), section.file("key_file")
    if certificate is None or key is None:
        missing = "cert_file" if certificate is None else "key_file"
        raise section.wrong(missing, "is missing; name a PEM file")
    client_auth, authority, sans = _client(section)
    oldest = section.choice("min_version", _VERSIONS, "TLS12")
    newest = section.choice("max_version", _VERSIONS, "TLS13")
    if oldest > newest:
        raise section.wrong("min_version", f"{oldest} is newer than max_version {newest}; swap them")
    curves = section.texts("curve_preferences", len(_CURVES))
    if len(curves) > 1:
        raise section.wrong("curve_preferences", "lists several; this server takes one, or all where none is listed")
    if curves and curves[0] not in _CURVES:
        raise section.wrong("curve_preferences", f"{curves[0]!r} is none of {', '.join(_CURVES)}; choose one")
    settings = TlsSettings(
        certificate=certificate,
        key=key,
        client_auth=client_auth,
        client_authority=authority,
        client_sans=sans,
        oldest=oldest,
        newest=newest,
        suites=_suites(section),
        own_preference=section.truth("prefer_server_cipher_suites", default=True),
        curve=_CURVES[curves[0]] if curves else "",
    )
    section.finish()
    return settings


def _client(section: _Section) -> tuple[ClientAuth, Path | None, frozenset[str]]:
    """How clients show themselves."""
    kind, authority = section.text("client_auth_type") or "NoClientCert", section.file("client_ca_file")
    if kind in _UNVERIFIED:
        remedy = "write RequireAndVerifyClientCert"
        raise section.wrong("client_auth_type", f"{kind} takes certificates unverified, which proves nothing; {remedy}")
    if kind not in _CLIENT_AUTH:
        raise section.wrong("client_auth_type", f"is {kind!r}; write one of {', '.join(_CLIENT_AUTH)}")
    if kind == "NoClientCert" and authority is not None:
        raise section.wrong("client_ca_file", "is given while client_auth_type asks for no certificate; set both")
    if kind != "NoClientCert" and authority is None:
        raise section.wrong("client_ca_file", f"is missing, and {kind} needs it; name a PEM file")
    sans = frozenset(section.texts("client_allowed_sans", _SANS_MOST))
    if sans and kind != "RequireAndVerifyClientCert":
        raise section.wrong("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert; set it")
    return _CLIENT_AUTH[kind], authority, sans


def _suites(section: _Section) -> tuple[str, ...]:
    names = section.texts("cipher_suites", _SUITES_MOST)
    for name in names:
        if name not in _SUITES and name not in _SUITES_OF_TLS13:
            raise section.wrong("cipher_suites", f"{name!r} is no secure suite of Go's; choose among its CipherSuites")
    return tuple(_SUITES[name] for name in names if name in _SUITES)
