"""Who we are to the API server, at this moment: headers and TLS that renew themselves.

Owns when a token is read again, when a credential program is run again, and the TLS
contexts. Must not know requests.

Theory. A mounted token is replaced long before it runs out, so it is read again each
minute, and at once when the server refuses it. A credential program is run when what it
gave runs out or was refused; one run serves all who wait for it. What it says is bounded
in time and size. Certificates are loaded from memory by way of a private file, because
OpenSSL's binding in Python takes files alone.

Source: client-go's `transport.cachingTokenSource` and `plugin/pkg/client/auth/exec`.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from eelgrid_controller.adapters.kubernetes.kubeconfig import Access, Plugin
from eelgrid_controller.errors import ConfigError

__all__ = ["Credentials", "tls_of"]

_TOKEN_AGE_MOST_S = 60.0
_EARLY_S = 60.0
_PLUGIN_S = 60.0
_PLUGIN_BYTES_MOST = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Given:
    """What a credential program gave; `until_s` is on the wall clock, None for ever."""

    token: str | None
    certificate_pem: bytes | None
    key_pem: bytes | None
    until_s: float | None


def tls_of(access: Access, certificate_pem: bytes | None = None, key_pem: bytes | None = None) -> ssl.SSLContext | None:
    """The TLS context of an access, None for plain HTTP; ConfigError where a certificate cannot be used."""
    if access.server.startswith("http://"):
        return None
    certificate_pem, key_pem = certificate_pem or access.certificate_pem, key_pem or access.key_pem
    try:
        authority = access.authority_pem.decode("ascii") if access.authority_pem else None
        context = ssl.create_default_context(cadata=authority)
        if access.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate_pem:
            with tempfile.TemporaryDirectory(prefix="eelgrid-") as folder:
                pair = Path(folder) / "pair.pem"
                pair.touch(mode=0o600)
                pair.write_bytes(certificate_pem + b"\n" + (key_pem or b""))
                context.load_cert_chain(pair)
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"a certificate for {access.server} cannot be used: {error}", "renew it in the kubeconfig"
        ) from None
    return context


class Credentials:
    """Headers and TLS of one access; ask before each request."""

    def __init__(self, access: Access, *, monotonic_s: Callable[[], float], now_s: Callable[[], float]) -> None:
        """`now_s` is the wall clock, by which credential programs tell when theirs run out."""
        self._access = access
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._tls = tls_of(access)
        self._token: tuple[str, float] | None = None  # and when it was read
        self._given: _Given | None = None
        self._running = asyncio.Lock()

    async def current(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Headers, and TLS, for a request that is sent now; ConfigError says why there are none."""
        access = self._access
        if access.plugin is not None:
            given = await self._plugged(access.plugin)
            return ({"Authorization": f"Bearer {given.token}"} if given.token else {}), self._tls
        if access.token_file is not None:
            return {"Authorization": f"Bearer {self._read(access.token_file)}"}, self._tls
        if access.token is not None:
            return {"Authorization": f"Bearer {access.token}"}, self._tls
        if access.username is not None:
            pair = base64.b64encode(f"{access.username}:{access.password or ''}".encode()).decode()
            return {"Authorization": f"Basic {pair}"}, self._tls
        return {}, self._tls

    def renew(self) -> bool:
        """The server refused them: forget what may have run out; whether another try may go better."""
        if self._access.plugin is not None:
            self._given = None
            return True
        if self._access.token_file is not None:
            old, self._token = self._token, None
            return old is None or self._read(self._access.token_file) != old[0]
        return False

    def _read(self, path: Path) -> str:
        now_s = self._monotonic_s()
        if self._token is None or now_s - self._token[1] > _TOKEN_AGE_MOST_S:
            try:
                self._token = (path.read_text().strip(), now_s)
            except (OSError, UnicodeDecodeError) as error:
                # The old one may still do: the kubelet replaces the file while we look.
                if self._token is None:
                    raise ConfigError(f"token {path}: {error}", "see whether the token is mounted") from None
        return self._token[0]

    async def _plugged(self, plugin: Plugin) -> _Given:
        async with self._running:
            given = self._given
            if given is None or (given.until_s is not None and self._now_s() > given.until_s - _EARLY_S):
                given = await _run(plugin, self._access)
                if given.certificate_pem:
                    self._tls = tls_of(self._access, given.certificate_pem, given.key_pem)
                self._given = given
            return given


async def _run(plugin: Plugin, access: Access) -> _Given:
    """Run a credential program once."""
    spec: dict[str, Any] = {"interactive": False}
    if plugin.gives_cluster_info:
        authority = base64.b64encode(access.authority_pem or b"").decode()
        spec["cluster"] = {"server": access.server, "certificate-authority-data": authority}
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    env = {**os.environ, **dict(plugin.env), "KUBERNETES_EXEC_INFO": json.dumps(info)}
    remedy = plugin.hint or "run it by hand to see what it says"
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *plugin.args,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError(f"credential program {plugin.command}: {error.strerror}", remedy) from None
    try:
        async with asyncio.timeout(_PLUGIN_S):
            assert process.stdout is not None
            said = await process.stdout.read(_PLUGIN_BYTES_MOST)
            code = await process.wait()
    except TimeoutError:
        raise ConfigError(f"credential program {plugin.command} took over {_PLUGIN_S:g} s", remedy) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise ConfigError(f"credential program {plugin.command} ended with {code}", remedy)
    return _given(said, plugin, remedy)


def _given(said: bytes, plugin: Plugin, remedy: str) -> _Given:
    """What a credential program said; nothing of it is repeated in an error, for it is a secret."""
    try:
        status = json.loads(said)["status"]
        until = status.get("expirationTimestamp")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        return _Given(
            status.get("token"),
            certificate.encode() if certificate else None,
            key.encode() if key else None,
            datetime.fromisoformat(until).timestamp() if until else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"credential program {plugin.command} gave no ExecCredential", remedy) from None
