"""Transport: how a connection is opened, secured and kept alive.

Owns bind rules (loopback by default; elsewhere mutual TLS, or explicitly `insecure`, which is logged), the
certificates of gRPC servers and channels (reloaded as `file_reloader` describes), keep-alive and flow-control
options, and the standard health and reflection services. Must not know messages.
"""

import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from eelgrid_protos import codec
from eelgrid_protos.file_reloader import FileReloader, WatchFile, load_key_pair
from eelgrid_protos.local_users import build_channel_credentials, build_server_credentials, find_proofs_folder
from eelgrid_protos.rpc import RpcService, request_bytes_most
from eelgrid_protos.sockets import count_connections_most, split_address

if TYPE_CHECKING:
    # Of servers; a client does not load it.
    from eelgrid_protos.connection_limits import GuardedHandlers, PeerGuard

T = TypeVar("T")


class ListenError(Exception):
    """A server cannot listen; the message says what to do."""


class BindRefused(ListenError):
    """The address is not loopback and there is no mutual TLS."""


class AddressInUse(ListenError):
    """Another program listens there, or the address is not ours."""


class CertificateUnusable(ListenError):
    """A certificate file cannot be read or does not match the others."""


class TlsFilesIncomplete(ListenError):
    """Only some of the three TLS files are named."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """Contents of TlsFiles, in PEM."""

    key: bytes
    chain: bytes
    authority: bytes


@dataclass(frozen=True, slots=True)
class KeyPairFiles:
    """Paths in PEM: our certificate chain and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class TlsFiles(KeyPairFiles):
    """Paths in PEM: our certificate chain, its key, and the authority that must have signed the peer's certificate."""

    authority: Path

    def read_contents(self) -> TlsContents:
        """Reads the three files; raises CertificateUnusable."""
        try:
            return TlsContents(self.key.read_bytes(), self.certificate.read_bytes(), self.authority.read_bytes())
        except OSError as error:
            raise CertificateUnusable(f"{error.filename}: {error.strerror}; name a readable PEM file") from error

    def load_contents(self, watch: WatchFile) -> TlsContents:
        """Reads them for a FileReloader; raises CertificateUnusable, also if they do not match each other."""
        import ssl  # loads OpenSSL, which who has no certificate does without

        for path in (self.certificate, self.key, self.authority):
            watch(path)
        contents = self.read_contents()
        # gRPC accepts any bytes, and each handshake would fail: OpenSSL checks at once whether the key is the
        # certificate's.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The required length of a key is checked in the handshake.
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        try:
            load_key_pair(context, self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise CertificateUnusable(
                f"{self.certificate}, {self.key} and {self.authority} do not fit each other ({error}); "
                "name the PEM files of one certificate, its key and an authority"
            ) from error
        return contents


def collect_tls_files(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    """Returns the three files, None if none is named; raises TlsFilesIncomplete."""
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise TlsFilesIncomplete("certificate, key and authority belong together; name all three, or none")
    return TlsFiles(certificate, key, authority)


# How long closing blocking channels may take.
_CLOSE_S = 1.0
# Pings every 30 s find a dead peer within a minute; the server must allow them, or it answers ENHANCE_YOUR_CALM. A
# small flow-control window, without probing, makes a stalled reader visible to the sender after some 64 KiB rather than
# 4 MiB (measured: an hour of samples).
_KEEPALIVE = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))
# gRPC waits 20 s for a connection to an address that swallows everything, and a leader that is back is to be found soon.
# A stopped process takes connections and answers no ping; servers allow one every ten seconds.
_CHOICE = (
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.keepalive_time_ms", 12_000),
    ("grpc.keepalive_timeout_ms", 4_000),
)
_SIZES = (
    ("grpc.max_receive_message_length", codec.MESSAGE_BYTES_MOST),
    ("grpc.max_send_message_length", codec.MESSAGE_BYTES_MOST),
)
# gRPC has one bound for all calls; that of each call is checked in rpc.py, before a message is parsed.
_SERVER_SIZES = (
    ("grpc.max_receive_message_length", request_bytes_most()),
    ("grpc.max_send_message_length", codec.MESSAGE_BYTES_MOST),
)


# Bounds of one connection. The peers, and the number of their connections, are bounded by `connection_limits`.
_CONNECTION_BOUNDS = (
    # Calls of one connection, including those reset and not yet cleaned up: gRPC itself refuses more (REFUSED_STREAM).
    # Without it 20,000 resets filled the server's queue and all calls were cancelled; each admitted call delays
    # others in the event loop by some 0.3 ms.
    ("grpc.max_concurrent_streams", 64),
    # Bytes of a call's metadata: ours are a trace and a deadline, 300 at most. Compressed by HPACK, 4 bytes can stand
    # for 16 KiB.
    ("grpc.max_metadata_size", 4 * 1024),
    ("grpc.absolute_max_metadata_size", 8 * 1024),
    # Calls of all connections that wait for the event loop: beyond, gRPC cancels any call of any peer. A fleet of
    # 10,000 agents connects at once; the bound on streams takes effect before this one.
    ("grpc.server.max_pending_requests", 30_000),
    ("grpc.server.max_pending_requests_hard_limit", 60_000),
    # While the loop is busy, calls wait this long before gRPC cancels them; its default of 30 s is as long as a busy
    # start takes.
    ("grpc.server_max_unrequested_time_in_server", 120),
    # From accept to the end of TLS, and from there to the first frames.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    # An idle connection is closed gracefully, and opened again for the next call.
    ("grpc.max_connection_idle_ms", 10 * 60_000),
    # No connection lives longer than a day, whatever was overlooked; streams get a minute to end.
    ("grpc.max_connection_age_ms", 24 * 3600_000),
    ("grpc.max_connection_age_grace_ms", 60_000),
    ("grpc.http2.max_ping_strikes", 2),
)


def server_options() -> list[tuple[str, int]]:
    """Returns the options of all our servers."""
    return [
        *_KEEPALIVE,
        *_SERVER_SIZES,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.bdp_probe", 0),
        *_CONNECTION_BOUNDS,
        ("grpc.max_allowed_incoming_connections", count_connections_most()),
        # Two servers on one port would randomly answer each other's clients.
        ("grpc.so_reuseport", 0),
    ]


def channel_options() -> list[tuple[str, int]]:
    """Returns the options of all our channels."""
    return [
        *_KEEPALIVE,
        *_SIZES,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # We pace reconnection ourselves; gRPC's own back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
    ]


def _split(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError:
        raise BindRefused(f"{address!r} is no address; write HOST:PORT, for example 127.0.0.1:7443") from None


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach the address."""
    if address.startswith("unix:"):
        return True
    host, _ = _split(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _probe(address: str) -> None:
    """Raises the specific ListenError: gRPC reports every failure to bind alike; a socket tells which it is."""
    host, port = _split(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        remedy = "choose another with --listen, or end the program that has it"
        raise AddressInUse(f"cannot listen on {address}: {error.strerror or error}; {remedy}") from error


@dataclass(frozen=True, slots=True)
class _LoadedTls(Generic[T]):
    configuration: T
    trusted: frozenset[bytes]


class MutualTlsReloader(FileReloader[_LoadedTls[T]]):
    """The certificate and the trusted authority of a server under mutual TLS, from the newest TlsFiles; for any thread.

    `build` converts the files for a TLS library, for example to an `ssl.SSLContext`; for unusable files it raises
    OSError, ValueError or CertificateUnusable.
    """

    def __init__(
        self, files: TlsFiles, build: Callable[[TlsFiles, TlsContents], T], *, name: str, log: logging.Logger
    ) -> None:
        """Loads the files; raises CertificateUnusable, and OSError."""
        # How often a certificate was removed from the authority's file.
        self.authority_losses = 0

        def load(watch: WatchFile) -> _LoadedTls[T]:
            contents = files.load_contents(watch)
            return _LoadedTls(build(files, contents), trusted_certificates(contents.authority))

        super().__init__(load, name=name, log=log, errors=(CertificateUnusable,))

    def refresh_configuration(self) -> T:
        """Returns what `build` made of the newest files."""
        return self.refresh().configuration

    def on_reload(self, previous: _LoadedTls[T]) -> None:
        """Counts the reload if a certificate was removed from the authority's file."""
        self.authority_losses += not previous.trusted <= self.current.trusted


class ServerCertificates:
    """The certificates of one gRPC server; used from any thread.

    gRPC calls `fetch` at each handshake. A change makes a new TLS context there, so that earlier session tickets are
    no longer accepted.
    """

    def __init__(self, tls: TlsFiles, log: logging.Logger) -> None:
        """Loads the files; raises CertificateUnusable."""
        self._reloader: MutualTlsReloader[Any] = MutualTlsReloader(tls, _build_configuration, name="tls", log=log)
        self.initial = self._given = self._reloader.current.configuration
        self._losses_told = 0

    def fetch(self) -> Any:
        """Returns the certificates for a handshake, None to keep the previous ones; an exception would end handshakes."""
        newest = self._reloader.refresh_configuration()
        if newest is self._given:
            return None
        self._given = newest
        return newest

    def lost_authority(self) -> bool:
        """Returns whether a certificate left the authority's file since the last call; new handshakes know it already."""
        self._reloader.refresh()
        told, self._losses_told = self._losses_told, self._reloader.authority_losses
        return self._losses_told > told


def _build_configuration(_files: TlsFiles, contents: TlsContents) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.chain)], root_certificates=contents.authority
    )


_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)


def trusted_certificates(authority: bytes) -> frozenset[bytes]:
    """Returns the certificates of an authority's file, independent of the line lengths of its PEM."""
    return frozenset(b"".join(body.split()) for body in _PEM.findall(authority))


async def listen_on_address(
    server: grpc.aio.Server,
    address: str,
    *,
    tls: TlsFiles | None,
    insecure: bool,
    log: logging.Logger,
    guard: "PeerGuard | None" = None,
    is_shared: bool = False,
) -> int:
    """Binds the server and returns the port, which `guard` guards from then on; raises ListenError.

    A Unix socket that is shared may be reached by every user of the machine: see `local_users`.
    """
    if not address.startswith("unix:"):
        _split(address)
        _probe(address)
    if tls is None and not is_loopback(address):
        if not insecure:
            raise BindRefused(
                f"{address} can be reached from other machines; give --tls-certificate, --tls-key and "
                "--tls-authority, or say --insecure"
            )
        log.warning("listen=%s tls=off warning=anyone who reaches this address can command this process", address)
    try:
        if is_shared:
            port, held = server.add_secure_port(address, build_server_credentials()), None
            _open_socket_to_all(address)
        elif tls is None:
            port, held = server.add_insecure_port(address), None
        else:
            held = ServerCertificates(tls, log)
            credentials = grpc.dynamic_ssl_server_credentials(
                held.initial, held.fetch, require_client_authentication=True
            )
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: {error}; choose another with --listen") from error
    if guard is not None:
        guard.attach_port(port, None if held is None else held.lost_authority)
    return port


def _open_socket_to_all(address: str) -> None:
    Path(address.removeprefix("unix:")).chmod(0o666)


def _channel_credentials(tls: TlsFiles | TlsContents) -> grpc.ChannelCredentials:
    contents = tls.read_contents() if isinstance(tls, TlsFiles) else tls
    return grpc.ssl_channel_credentials(contents.authority, contents.key, contents.chain)


def _local_credentials(proofs: Path) -> grpc.ChannelCredentials:
    try:
        return build_channel_credentials(proofs)
    except OSError as error:
        raise BindRefused(
            f"{proofs}: {error.strerror}; a file there proves which user you are: free what is in its place"
        ) from error


def check_target(address: str, tls: TlsFiles | TlsContents | None, *, insecure: bool) -> None:
    """Raises BindRefused if a connection to this address would be unprotected and `insecure` does not allow it."""
    if tls is None and not insecure and not is_loopback(address):
        raise BindRefused(
            f"{address} is another machine; give --tls-certificate, --tls-key and --tls-authority, or say --insecure"
        )


def may_connect(address: str, *, tls: TlsFiles | TlsContents | None, insecure: bool) -> bool:
    """Whether a connection to this address would be protected, or need not be."""
    try:
        check_target(address, tls, insecure=insecure)
    except ListenError:
        return False
    return True


def _options(*, is_choice: bool) -> list[tuple[str, int]]:
    return list((dict(channel_options()) | (dict(_CHOICE) if is_choice else {})).items())


def open_channel(
    address: str,
    *,
    tls: TlsFiles | TlsContents | None,
    insecure: bool = False,
    is_choice: bool = False,
    options: list[tuple[str, int]] | None = None,
) -> grpc.aio.Channel:
    """Opens a channel for asyncio; raises ListenError if the connection would be unprotected.

    Where there `is_choice` of other addresses, one that does not answer is given up soon.
    """
    check_target(address, tls, insecure=insecure)
    chosen = [*_options(is_choice=is_choice), *(options or [])]
    if tls is not None:
        return grpc.aio.secure_channel(address, _channel_credentials(tls), options=chosen)
    if (proofs := find_proofs_folder(address)) is not None:
        return grpc.aio.secure_channel(address, _local_credentials(proofs), options=chosen)
    return grpc.aio.insecure_channel(address, options=chosen)


def open_blocking_channel(
    address: str, *, tls: TlsFiles | TlsContents | None, insecure: bool = False, is_choice: bool = False
) -> grpc.Channel:
    """Opens a channel for programs without an event loop, else as `open_channel`."""
    check_target(address, tls, insecure=insecure)
    chosen = _options(is_choice=is_choice)
    if tls is not None:
        return grpc.secure_channel(address, _channel_credentials(tls), options=chosen)
    if (proofs := find_proofs_folder(address)) is not None:
        return grpc.secure_channel(address, _local_credentials(proofs), options=chosen)
    return grpc.insecure_channel(address, options=chosen)


def close_channels(channels: Iterable[grpc.Channel]) -> None:
    """Ends all calls and closes blocking channels, which takes a second at most.

    gRPC waits for the end of each call, and a call that Ctrl-C cut short while it was being made never ends.
    """

    def close() -> None:
        for channel in open_channels:
            channel.close()

    open_channels = tuple(channels)
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


class HealthService:
    """The standard health service of one server."""

    def __init__(self, servicer: Any, names: tuple[str, ...]) -> None:
        self._servicer = servicer
        self._names = names

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer to SERVING or NOT_SERVING, for the server and for each service."""
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._servicer.set(name, status)


_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class _ReflectionHandler(grpc.GenericRpcHandler):
    """Reflection on services, loaded when it is first called: what describes protobuf itself is 0.8 MB."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = services
        self._loaded: tuple[grpc.GenericRpcHandler, ...] = ()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a call of reflection, None for others."""
        if not handler_call_details.method.startswith(f"/{_REFLECTION}/"):
            return None
        if not self._loaded:
            from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

            # By name: reflection's own helper uses the threads of the synchronous API for what is no grpc.aio server.
            place: Any = self
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
                reflection.aio.ReflectionServicer(self._services), place
            )
        return next(filter(None, (one.service(handler_call_details) for one in self._loaded)), None)

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Takes the handlers of the generated registration."""
        self._loaded = handlers

    def add_registered_method_handlers(self, _service: str, _handlers: object) -> None:
        """Ignores the same handlers in their second form."""


async def standard_services(
    server: "grpc.aio.Server | GuardedHandlers", services: tuple[RpcService, ...]
) -> HealthService:
    """Adds grpc.health.v1 and reflection; NOT_SERVING until `set_serving`."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    for service in services:
        codec.load_service(service.name.rpartition(".")[2])
    servicer = health.aio.HealthServicer()
    place: Any = server
    health_pb2_grpc.add_HealthServicer_to_server(servicer, place)
    names = tuple(service.name for service in services)
    reflected = (*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, _REFLECTION)
    place.add_generic_rpc_handlers((_ReflectionHandler(reflected),))
    answer = HealthService(servicer, names)
    await answer.set_serving(False)
    return answer
