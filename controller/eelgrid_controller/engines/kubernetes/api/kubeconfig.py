"""Address and credentials of the API server, from a kubeconfig or a pod's service account.

Tokens, certificates and exec plugins are renewed as they expire.
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from eelgrid_controller.errors import ControllerConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_BYTES_MOST = 1024 * 1024
_UNSUPPORTED = ("auth-provider", "as", "as-groups", "as-user-extra")


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A program that gives credentials (client.authentication.k8s.io)."""

    command: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    api_version: str
    gives_cluster_info: bool
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """An API server, and who we are to it."""

    server: str  # https://host:port, without a slash at its end
    namespace: str = "default"
    authority_pem: bytes | None = None  # None: the machine's own authorities
    is_insecure: bool = False
    server_name: str | None = None  # what the certificate must name, where that is not the host
    token: str | None = None
    token_file: Path | None = None
    certificate_pem: bytes | None = None
    key_pem: bytes | None = None
    username: str | None = None
    password: str | None = None
    plugin: ExecPlugin | None = None


def find_access(env: Mapping[str, str], *, kubeconfig: str = "", context: str = "") -> ClusterAccess:
    """The access that was named, else that of the pod that we are in, else the user's own kubeconfig."""
    if kubeconfig:
        return load_kubeconfig([Path(kubeconfig)], context=context)
    if env.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").exists():
        return load_service_account(env)
    named = [Path(part) for part in env.get("KUBECONFIG", "").split(":") if part]
    return load_kubeconfig(named or [Path(env.get("HOME", "/")) / ".kube" / "config"], context=context)


def load_service_account(env: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """The access of a pod by what the kubelet mounted into it."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ControllerConfigError("KUBERNETES_SERVICE_HOST is not set", "run in a pod, or name a kubeconfig")
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise ControllerConfigError(f"{folder / name} is not there", "set automountServiceAccountToken of the pod")
    space = folder / "namespace"
    return ClusterAccess(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=space.read_text().strip() if space.is_file() else "default",
        authority_pem=(folder / "ca.crt").read_bytes(),
        token_file=folder / "token",
    )


def load_kubeconfig(paths: list[Path], *, context: str = "") -> ClusterAccess:
    """The access that a context of these files gives; the current one if none is named."""
    found: dict[str, dict[str, tuple[Mapping[str, Any], Path]]] = {"cluster": {}, "user": {}, "context": {}}
    current = ""
    for path in [path for path in paths if path.exists()] or paths:
        told = _read(path)
        current = current or str(told.get("current-context") or "")
        for kind, known in found.items():
            for one in told.get(f"{kind}s") or ():
                known.setdefault(str(one.get("name")), (one.get(kind) or {}, path))
    context = context or current
    where = ", ".join(map(str, paths))
    if context not in found["context"]:
        names = ", ".join(sorted(found["context"])) or "none"
        raise ControllerConfigError(f"{where}: no context {context!r}", f"name one of its contexts: {names}")
    chosen, _ = found["context"][context]
    for kind in ("cluster", "user"):
        if chosen.get(kind) not in found[kind]:
            raise ControllerConfigError(
                f"{where}: context {context!r} names {kind} {chosen.get(kind)!r}", f"add this {kind}"
            )
    cluster, user = found["cluster"][chosen["cluster"]], found["user"][chosen["user"]]
    return _access(cluster, user, str(chosen.get("namespace") or "default"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _BYTES_MOST:
            raise ControllerConfigError(f"{path} is larger than {_BYTES_MOST} bytes", "name a kubeconfig")
        told = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ControllerConfigError(f"{path}: {error.strerror}", "name a kubeconfig that can be read") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ControllerConfigError(f"{path} is not YAML", "name a kubeconfig") from None
    if not isinstance(told, dict):
        raise ControllerConfigError(f"{path} holds no mapping", "name a kubeconfig")
    return told


def _access(
    cluster: tuple[Mapping[str, Any], Path], user: tuple[Mapping[str, Any], Path], namespace: str
) -> ClusterAccess:
    at, who = cluster[0], user[0]
    for part, where in (("proxy-url", cluster), *((part, user) for part in _UNSUPPORTED)):
        if where[0].get(part):
            raise ControllerConfigError(
                f"{where[1]}: {part} is not supported", "use a token, a client certificate or exec"
            )
    server = str(at.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise ControllerConfigError(f"{cluster[1]}: server {server!r} is no address", "write https://host:port")
    token_file = who.get("tokenFile")
    return ClusterAccess(
        server=server,
        namespace=namespace,
        authority_pem=_pem(cluster, "certificate-authority"),
        is_insecure=bool(at.get("insecure-skip-tls-verify")),
        server_name=at.get("tls-server-name"),
        token=who.get("token"),
        token_file=user[1].parent / token_file if token_file else None,
        certificate_pem=_pem(user, "client-certificate"),
        key_pem=_pem(user, "client-key"),
        username=who.get("username"),
        password=who.get("password"),
        plugin=_plugin(who["exec"], user[1]) if who.get("exec") else None,
    )


def _pem(part: tuple[Mapping[str, Any], Path], name: str) -> bytes | None:
    """A certificate or key that is in the file or beside it."""
    told, path = part
    if told.get(f"{name}-data"):
        try:
            return base64.b64decode(told[f"{name}-data"], validate=True)
        except (binascii.Error, ValueError):
            raise ControllerConfigError(
                f"{path}: {name}-data is not base64", "encode the PEM file with base64"
            ) from None
    if not told.get(name):
        return None
    beside = path.parent / str(told[name])
    try:
        return beside.read_bytes()
    except OSError as error:
        raise ControllerConfigError(
            f"{path}: {name} {beside}: {error.strerror}", "name a file that can be read"
        ) from None


def _plugin(told: Mapping[str, Any], path: Path) -> ExecPlugin:
    api_version = str(told.get("apiVersion") or "")
    if api_version not in {"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"}:
        raise ControllerConfigError(f"{path}: exec apiVersion {api_version!r}", "use client.authentication.k8s.io/v1")
    command = str(told.get("command") or "")
    if not command:
        raise ControllerConfigError(f"{path}: exec has no command", "name the program that gives credentials")
    if "/" in command:  # as kubectl does: beside the file, where it is a path
        command = str(path.parent / command)
    return ExecPlugin(
        command,
        tuple(map(str, told.get("args") or ())),
        tuple((str(one["name"]), str(one["value"])) for one in told.get("env") or ()),
        api_version,
        bool(told.get("provideClusterInfo")),
        str(told.get("installHint") or ""),
    )


_TOKEN_AGE_MOST_S = 60.0
_EARLY_S = 60.0
_PLUGIN_S = 60.0
_PLUGIN_BYTES_MOST = 256 * 1024


@dataclass(frozen=True, slots=True)
class _IssuedCredential:
    """What a credential program gave; `until_s` is on the wall clock, None for ever."""

    token: str | None
    certificate_pem: bytes | None
    key_pem: bytes | None
    until_s: float | None


def build_tls_context(
    access: ClusterAccess, certificate_pem: bytes | None = None, key_pem: bytes | None = None
) -> ssl.SSLContext | None:
    """The TLS context of an access, None for plain HTTP; ControllerConfigError where a certificate cannot be used."""
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
        raise ControllerConfigError(
            f"a certificate for {access.server} cannot be used: {error}", "renew it in the kubeconfig"
        ) from None
    return context


class ClusterCredentials:
    """Headers and TLS of one access; ask before each request."""

    def __init__(self, access: ClusterAccess, *, monotonic_s: Callable[[], float], now_s: Callable[[], float]) -> None:
        """`now_s` is the wall clock, by which credential programs tell when theirs run out."""
        self._access = access
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._tls = build_tls_context(access)
        self._token: tuple[str, float] | None = None  # and when it was read
        self._given: _IssuedCredential | None = None
        self._running = asyncio.Lock()

    async def current(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Headers, and TLS, for a request that is sent now; ControllerConfigError says why there are none."""
        access = self._access
        if access.plugin is not None:
            given = await self._plugin_credential(access.plugin)
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
                    raise ControllerConfigError(f"token {path}: {error}", "see whether the token is mounted") from None
        return self._token[0]

    async def _plugin_credential(self, plugin: ExecPlugin) -> _IssuedCredential:
        async with self._running:
            given = self._given
            if given is None or (given.until_s is not None and self._now_s() > given.until_s - _EARLY_S):
                given = await _run(plugin, self._access)
                if given.certificate_pem:
                    self._tls = build_tls_context(self._access, given.certificate_pem, given.key_pem)
                self._given = given
            return given


async def _run(plugin: ExecPlugin, access: ClusterAccess) -> _IssuedCredential:
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
        raise ControllerConfigError(f"credential program {plugin.command}: {error.strerror}", remedy) from None
    try:
        async with asyncio.timeout(_PLUGIN_S):
            assert process.stdout is not None
            said = await process.stdout.read(_PLUGIN_BYTES_MOST)
            code = await process.wait()
    except TimeoutError:
        raise ControllerConfigError(f"credential program {plugin.command} took over {_PLUGIN_S:g} s", remedy) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise ControllerConfigError(f"credential program {plugin.command} ended with {code}", remedy)
    return _parse_plugin_output(said, plugin, remedy)


def _parse_plugin_output(said: bytes, plugin: ExecPlugin, remedy: str) -> _IssuedCredential:
    """What a credential program said; nothing of it is repeated in an error, for it is a secret."""
    try:
        status = json.loads(said)["status"]
        until = status.get("expirationTimestamp")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        return _IssuedCredential(
            status.get("token"),
            certificate.encode() if certificate else None,
            key.encode() if key else None,
            datetime.fromisoformat(until).timestamp() if until else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ControllerConfigError(f"credential program {plugin.command} gave no ExecCredential", remedy) from None
