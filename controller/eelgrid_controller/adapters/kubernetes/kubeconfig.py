"""Where the API server is and who we are to it, as a kubeconfig or a pod's service account says.

Owns reading these two forms into one value. Must not know connections, nor run anything.

Theory. Inside a cluster the kubelet mounts a token that it replaces before it runs out (so
the value keeps the file, not the token) and the certificate authority of the server. A
kubeconfig names clusters, users and contexts that join them; of several files the first to
name a thing wins. Certificates may stand in the file (base64) or beside it. What Eelgrid
does not support (auth-provider, proxies) is refused by name rather than left out silently.

Source: kubernetes.io, "Organizing Cluster Access Using kubeconfig Files" and client-go's
`rest.InClusterConfig`.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eelgrid_controller.errors import ConfigError

__all__ = ["SERVICE_ACCOUNT", "Access", "Plugin", "find_access", "from_kubeconfig", "from_service_account"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_BYTES_MOST = 1024 * 1024
_UNSUPPORTED = ("auth-provider", "as", "as-groups", "as-user-extra")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A program that gives credentials (client.authentication.k8s.io)."""

    command: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    api_version: str
    gives_cluster_info: bool
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
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
    plugin: Plugin | None = None


def find_access(env: Mapping[str, str], *, kubeconfig: str = "", context: str = "") -> Access:
    """The access that was named, else that of the pod that we are in, else the user's own kubeconfig."""
    if kubeconfig:
        return from_kubeconfig([Path(kubeconfig)], context=context)
    if env.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").exists():
        return from_service_account(env)
    named = [Path(part) for part in env.get("KUBECONFIG", "").split(":") if part]
    return from_kubeconfig(named or [Path(env.get("HOME", "/")) / ".kube" / "config"], context=context)


def from_service_account(env: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """The access of a pod by what the kubelet mounted into it."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set", "run in a pod, or name a kubeconfig")
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is not there", "set automountServiceAccountToken of the pod")
    space = folder / "namespace"
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=space.read_text().strip() if space.is_file() else "default",
        authority_pem=(folder / "ca.crt").read_bytes(),
        token_file=folder / "token",
    )


def from_kubeconfig(paths: list[Path], *, context: str = "") -> Access:
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
        raise ConfigError(f"{where}: no context {context!r}", f"name one of its contexts: {names}")
    chosen, _ = found["context"][context]
    for kind in ("cluster", "user"):
        if chosen.get(kind) not in found[kind]:
            raise ConfigError(f"{where}: context {context!r} names {kind} {chosen.get(kind)!r}", f"add this {kind}")
    cluster, user = found["cluster"][chosen["cluster"]], found["user"][chosen["user"]]
    return _access(cluster, user, str(chosen.get("namespace") or "default"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _BYTES_MOST:
            raise ConfigError(f"{path} is larger than {_BYTES_MOST} bytes", "name a kubeconfig")
        told = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name a kubeconfig that can be read") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not YAML", "name a kubeconfig") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{path} holds no mapping", "name a kubeconfig")
    return told


def _access(cluster: tuple[Mapping[str, Any], Path], user: tuple[Mapping[str, Any], Path], namespace: str) -> Access:
    at, who = cluster[0], user[0]
    for part, where in (("proxy-url", cluster), *((part, user) for part in _UNSUPPORTED)):
        if where[0].get(part):
            raise ConfigError(f"{where[1]}: {part} is not supported", "use a token, a client certificate or exec")
    server = str(at.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise ConfigError(f"{cluster[1]}: server {server!r} is no address", "write https://host:port")
    token_file = who.get("tokenFile")
    return Access(
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
    """A certificate or key that stands in the file or beside it."""
    told, path = part
    if told.get(f"{name}-data"):
        try:
            return base64.b64decode(told[f"{name}-data"], validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{path}: {name}-data is not base64", "encode the PEM file with base64") from None
    if not told.get(name):
        return None
    beside = path.parent / str(told[name])
    try:
        return beside.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {name} {beside}: {error.strerror}", "name a file that can be read") from None


def _plugin(told: Mapping[str, Any], path: Path) -> Plugin:
    api_version = str(told.get("apiVersion") or "")
    if api_version not in {"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"}:
        raise ConfigError(f"{path}: exec apiVersion {api_version!r}", "use client.authentication.k8s.io/v1")
    command = str(told.get("command") or "")
    if not command:
        raise ConfigError(f"{path}: exec has no command", "name the program that gives credentials")
    if "/" in command:  # as kubectl does: beside the file, where it is a path
        command = str(path.parent / command)
    return Plugin(
        command,
        tuple(map(str, told.get("args") or ())),
        tuple((str(one["name"]), str(one["value"])) for one in told.get("env") or ()),
        api_version,
        bool(told.get("provideClusterInfo")),
        str(told.get("installHint") or ""),
    )
