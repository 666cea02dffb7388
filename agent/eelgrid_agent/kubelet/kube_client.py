"""Minimal Kubernetes API client: get, create, replace and delete JSON objects over HTTPS.

Owns the connection, its credentials and what is tried again. Must not know what the objects
mean. Every method blocks, so it belongs on a thread of its own; nothing but the standard
library is used, since a node daemon stays small.

Theory. A pod's token is renewed by the kubelet in its file, and the authority may be, too, so both
are read when they change and never kept longer. A call is bounded in time and in bytes. What
says "later" (429, 503, a connection that was cut while it was idle) is tried again a few times,
with the wait that the server asks for, bounded; everything else is the caller's to judge.
"""

import http.client
import importlib
import json
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from eelgrid_protos.file_reloader import FileReloader, WatchFile
from eelgrid_protos.values import dataclass

if not hasattr(http.client, "HTTPSConnection"):
    # A small process has loaded it without `ssl` (lean_imports).
    importlib.reload(http.client)

_LOG = logging.getLogger("eelgrid.agent")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_BYTES_MOST = 16 * 2**20
_TOKEN_BYTES_MOST = 64 * 1024
_TRIES = 4
_WAIT_S, _WAIT_MOST_S = 0.5, 5.0
_DETAIL_LENGTH_MOST = 300
_HTTPS = 443


class ApiError(Exception):
    """The API server could not be asked, or did not do it; the message says what to do."""


class ApiUnreachable(ApiError):
    """No connection, no answer in time, or credentials that cannot be read."""


class ApiThrottled(ApiError):
    """It asks to come back later, and did so each time."""


class ApiForbidden(ApiError):
    """It does not know us, or our role lacks the right."""


class ApiNotFound(ApiError):
    """There is no such object."""


class ApiConflict(ApiError):
    """Another writer was first, or the object exists."""


class ApiRejected(ApiError):
    """It takes the object for wrong, or answers what cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAddress:
    """Where the API server is, and the folder with `token` and `ca.crt`."""

    url: str
    credentials: Path = SERVICE_ACCOUNT


def find_api_address(url: str, credentials: Path | None, environment: Mapping[str, str]) -> ApiAddress:
    """Returns the given address, else that of the pod's environment; raises ApiUnreachable where there is none."""
    if not url:
        host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ApiUnreachable("no pod's environment names the API server; run as a pod, or give --api-server URL")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ApiAddress(url=url, credentials=credentials or SERVICE_ACCOUNT)


class KubeApiClient:
    """One connection, used by one thread at a time. `sleep` waits between tries."""

    def __init__(self, address: ApiAddress, *, sleep: Callable[[float], None], timeout_s: float = 10.0) -> None:
        parts = urlsplit(address.url)
        if parts.scheme != "https" or not parts.hostname:
            raise ApiUnreachable(f"{address.url} is not the address of an API server; write https://HOST:PORT")
        self._host, self._port, self._base = parts.hostname, parts.port or _HTTPS, parts.path.rstrip("/")
        self._folder = address.credentials
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPSConnection | None = None
        self._authority: FileReloader[ssl.SSLContext] | None = None
        self._context: ssl.SSLContext | None = None

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """An object or a list."""
        return self._request("GET", path, query=query)

    def create(self, path: str, thing: Mapping[str, Any]) -> dict[str, Any]:
        """A new object in a collection."""
        return self._request("POST", path, thing)

    def replace(self, path: str, thing: Mapping[str, Any]) -> dict[str, Any]:
        """An object in the place of the one of its resourceVersion."""
        return self._request("PUT", path, thing)

    def delete(self, path: str) -> None:
        """No such object from now on."""
        self._request("DELETE", path)

    def close(self) -> None:
        """The next call opens a new connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request(
        self, verb: str, path: str, thing: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        target = self._base + quote(path) + (f"?{urlencode(query)}" if query else "")
        body = None if thing is None else json.dumps(thing, separators=(",", ":")).encode()
        with self._lock:
            for attempt in range(_TRIES):
                is_last = attempt + 1 == _TRIES
                try:
                    status, headers, content = self._send(verb, target, body)
                except (OSError, http.client.HTTPException) as error:
                    self.close()
                    # An idle connection may have been cut; what came after our bytes left is not known.
                    if is_last or isinstance(error, ssl.SSLCertVerificationError):
                        raise ApiUnreachable(f"{self._base_url()}: {_why(error)}; retried later") from error
                    self._sleep(_WAIT_S * 2**attempt)
                    continue
                if status in (http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE) and not is_last:
                    self._sleep(_wait_s(headers.get("retry-after"), attempt))
                    continue
                return _parse_response(status, content, f"{verb} {path}")
        raise AssertionError("the last try returns or raises")

    def _send(self, verb: str, target: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        headers = {
            "Accept": "application/json",
            "User-Agent": "eelgrid-agent",
            "Authorization": f"Bearer {self._token()}",
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._open_connection()
        connection.request(verb, target, body, headers)
        answer = connection.getresponse()
        content = answer.read(_ANSWER_BYTES_MOST + 1)
        if len(content) > _ANSWER_BYTES_MOST:
            self.close()
            raise ApiRejected(f"{verb} {target}: answers with more than {_ANSWER_BYTES_MOST} bytes; narrow the request")
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def _open_connection(self) -> http.client.HTTPSConnection:
        if self._authority is None:
            self._authority = FileReloader(self._load_authority, name="kubernetes_tls", log=_LOG)
        context = self._authority.refresh()
        if self._connection is not None and context is self._context:
            return self._connection
        self.close()
        self._connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        self._context = context
        return self._connection

    def _load_authority(self, watch: WatchFile) -> ssl.SSLContext:
        authority = self._folder / "ca.crt"
        watch(authority)
        return ssl.create_default_context(cafile=str(authority))

    def _token(self) -> str:
        with (self._folder / "token").open("rb") as file:
            return file.read(_TOKEN_BYTES_MOST).decode("ascii", errors="replace").strip()

    def _base_url(self) -> str:
        return f"https://{self._host}:{self._port}"


def _wait_s(asked: str | None, attempt: int) -> float:
    wait_s = float(asked) if asked is not None and asked.isascii() and asked.isdigit() else _WAIT_S * 2**attempt
    return min(wait_s, _WAIT_MOST_S)


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _parse_response(status: int, content: bytes, asked: str) -> dict[str, Any]:
    try:
        answer = json.loads(content) if content else {}
    except ValueError:
        answer = None
    said = str(
        answer.get("message", "")
        if isinstance(answer, dict)
        else content[:_DETAIL_LENGTH_MOST].decode(errors="replace")
    )
    detail = f"{asked}: {status} {said[:_DETAIL_LENGTH_MOST]}"
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        raise ApiForbidden(f"{detail}; give the agent's service account this right")
    if status == http.client.NOT_FOUND:
        raise ApiNotFound(detail)
    if status in (http.client.CONFLICT, http.client.GONE):
        raise ApiConflict(detail)
    if status == http.client.TOO_MANY_REQUESTS or status >= http.client.INTERNAL_SERVER_ERROR:
        raise ApiThrottled(f"{detail}; retried later")
    if status >= http.client.MULTIPLE_CHOICES or not isinstance(answer, dict):
        raise ApiRejected(detail)
    return answer
