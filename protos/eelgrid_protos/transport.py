"""Transport: how a connection is opened, secured and kept.

Owns bind rules (loopback unless told; elsewhere mutual TLS, or `insecure` said
aloud and logged), certificates that are read anew when their files change,
keep-alive and flow-control options, and the standard health and reflection
services. Knows nothing of messages.

ListenError                a server cannot listen
├── BindRefused            the address is not loopback and there is no mutual TLS
├── AddressInUse           another program listens there, or the address is not ours
└── CertificateUnusable    a file of TlsFiles cannot be read or does not fit
"""

import ipaddress
import logging
import re
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from eelgrid_protos import codec
from eelgrid_protos.connection_limits import GuardedHandlers, PeerGuard
from eelgrid_protos.rpc import RpcService, request_bytes_most
from eelgrid_protos.sockets import count_connections_most


class ListenError(Exception):
    """A server cannot listen; the message says what to do."""


class BindRefused(ListenError):
    """The address is not loopback and there is no mutual TLS."""


class AddressInUse(ListenError):
    """Another program listens there, or the address is not ours."""


class CertificateUnusable(ListenError):
    """A certificate file cannot be read or does not fit."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths in PEM: our certificate chain, its key, and the authority that the other side must come from."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Key, chain and authority; raises CertificateUnusable."""
        try:
            return self.key.read_bytes(), self.certificate.read_bytes(), self.authority.read_bytes()
        except OSError as error:
            raise CertificateUnusable(f"{error.filename}: {error.strerror}; name a readable PEM file") from error

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a file changes; the owner of a channel compares it and reconnects."""
        stamps = []
        for path in (self.certificate, self.key, self.authority):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                # A file under replacement: no change until it is whole again.
                stamps.append((0, 0))
        return tuple(stamps)


# Pings every 30 s find a dead peer within a minute; the server must allow them,
# or it answers ENHANCE_YOUR_CALM. A small flow-control window, without probing,
# makes a reader that stands still visible to the sender after some 64 KiB
# rather than 4 MiB (measured: an hour of samples).
_KEEPALIVE = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))
_SIZES = (
    ("grpc.max_receive_message_length", codec.MESSAGE_BYTES_MOST),
    ("grpc.max_send_message_length", codec.MESSAGE_BYTES_MOST),
)
# gRPC knows one bound for all calls; each call's own is judged in rpc.py, before a message is parsed.
_SERVER_SIZES = (
    ("grpc.max_receive_message_length", request_bytes_most()),
    ("grpc.max_send_message_length", codec.MESSAGE_BYTES_MOST),
)


# What one connection may cost. Whose connections there are, and how many, is the guard's (`peers`).
_CONNECTION_BOUNDS = (
    # Calls of one connection, those included that it reset and that we have not cleared away yet: gRPC refuses more
    # itself (REFUSED_STREAM). Without it 20,000 resets filled the server's queue and everybody's calls were cancelled;
    # each that is let in costs others its turn in the event loop, some 0.3 ms.
    ("grpc.max_concurrent_streams", 64),
    # Bytes of a call's metadata: ours send a trace and a deadline, 300 at most. HPACK makes 16 KiB of 4 bytes.
    ("grpc.max_metadata_size", 4 * 1024),
    ("grpc.absolute_max_metadata_size", 8 * 1024),
    # Calls of all connections that wait for the event loop: beyond, gRPC cancels whatever comes, whosever it is. A
    # fleet of 10,000 agents comes at once; the bound before this one is that of streams.
    ("grpc.server.max_pending_requests", 30_000),
    ("grpc.server.max_pending_requests_hard_limit", 60_000),
    # While the loop is busy, calls wait this long before gRPC cancels them; 30 s is its default, as a busy start takes.
    ("grpc.server_max_unrequested_time_in_server", 120),
    # From accept to the end of TLS, and from there to the first frames.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    # A connection that asks nothing is closed in good order, and opened again when there is something to ask.
    ("grpc.max_connection_idle_ms", 10 * 60_000),
    # Nobody's connection outlives a day, whatever was overlooked; streams get a minute to end.
    ("grpc.max_connection_age_ms", 24 * 3600_000),
    ("grpc.max_connection_age_grace_ms", 60_000),
    ("grpc.http2.max_ping_strikes", 2),
)


def server_options() -> list[tuple[str, int]]:
    """Options of every server of ours."""
    return [
        *_KEEPALIVE,
        *_SERVER_SIZES,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.bdp_probe", 0),
        *_CONNECTION_BOUNDS,
        ("grpc.max_allowed_incoming_connections", count_connections_most()),
        # Two servers on one port would answer each other's clients at random.
        ("grpc.so_reuseport", 0),
    ]


def channel_options() -> list[tuple[str, int]]:
    """Options of every channel of ours."""
    return [
        *_KEEPALIVE,
        *_SIZES,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnecting is ours to pace; gRPC's own back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
    ]


def _split(address: str) -> tuple[str, str]:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65_535:
        raise BindRefused(f"{address!r} is no address; write HOST:PORT, for example 127.0.0.1:7443")
    return host.strip("[]"), port


def is_loopback(address: str) -> bool:
    """True where only this machine can reach the address."""
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
    """Names the failure: gRPC reports every failure to bind alike; the socket says which it is."""
    host, port = _split(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        remedy = "choose another with --listen, or end the program that has it"
        raise AddressInUse(f"cannot listen on {address}: {error.strerror or error}; {remedy}") from error


class ServerCertificates:
    """What a server shows and whom it trusts, read anew when the files change; used from any thread.

    gRPC asks for it at each handshake. A change makes a new TLS context there, so no session ticket of before is
    taken any more.
    """

    def __init__(self, tls: TlsFiles, log: logging.Logger) -> None:
        """Raises CertificateUnusable."""
        self._tls = tls
        self._log = log
        self._lock = threading.Lock()
        self._stamp = tls.stamp()
        key, chain, authority = tls.read()
        self.initial = self._newest = _configuration(key, chain, authority)
        self._given = self.initial
        self._trusted = trusted_certificates(authority)
        self._has_lost = False

    def fetch(self) -> Any:
        """At each handshake; None keeps the last good certificates, and an exception would end them."""
        with self._lock:
            self._refresh()
            if self._newest is self._given:
                return None
            self._given = self._newest
            return self._newest

    def lost_authority(self) -> bool:
        """Whether a certificate left the authority's file since this was asked last; new handshakes know it already."""
        with self._lock:
            self._refresh()
            lost, self._has_lost = self._has_lost, False
            return lost

    def _refresh(self) -> None:
        stamp = self._tls.stamp()
        if stamp == self._stamp:
            return
        try:
            key, chain, authority = self._tls.read()
            fresh = _configuration(key, chain, authority)
        except CertificateUnusable as error:
            self._log.warning("tls=kept reason=%s", error)
            return
        trusted = trusted_certificates(authority)
        self._has_lost |= not self._trusted <= trusted
        self._stamp, self._newest, self._trusted = stamp, fresh, trusted
        self._log.info("tls=reloaded certificate=%s", self._tls.certificate)


def _configuration(key: bytes, chain: bytes, authority: bytes) -> Any:
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)


_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)


def trusted_certificates(authority: bytes) -> frozenset[bytes]:
    """The certificates of an authority's file, however it is wrapped."""
    return frozenset(b"".join(body.split()) for body in _PEM.findall(authority))


async def listen_on_address(
    server: grpc.aio.Server,
    address: str,
    *,
    tls: TlsFiles | None,
    insecure: bool,
    log: logging.Logger,
    guard: PeerGuard | None = None,
) -> int:
    """Binds the server and returns the port, which `guard` guards from then on; raises ListenError."""
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
        if tls is None:
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


def _channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    key, chain, authority = tls.read()
    return grpc.ssl_channel_credentials(authority, key, chain)


def _check_target(address: str, tls: TlsFiles | None, *, insecure: bool) -> None:
    if tls is None and not insecure and not is_loopback(address):
        raise BindRefused(
            f"{address} is another machine; give --tls-certificate, --tls-key and --tls-authority, or say --insecure"
        )


def open_channel(
    address: str, *, tls: TlsFiles | None, insecure: bool = False, options: list[tuple[str, int]] | None = None
) -> grpc.aio.Channel:
    """A channel for asyncio; raises ListenError where the connection would be open to others."""
    _check_target(address, tls, insecure=insecure)
    chosen = [*channel_options(), *(options or [])]
    if tls is not None:
        return grpc.aio.secure_channel(address, _channel_credentials(tls), options=chosen)
    return grpc.aio.insecure_channel(address, options=chosen)


def open_blocking_channel(address: str, *, tls: TlsFiles | None, insecure: bool = False) -> grpc.Channel:
    """A channel for programs without an event loop."""
    _check_target(address, tls, insecure=insecure)
    if tls is not None:
        return grpc.secure_channel(address, _channel_credentials(tls), options=channel_options())
    return grpc.insecure_channel(address, options=channel_options())


class HealthService:
    """The standard health service of one server."""

    def __init__(self, servicer: Any, names: tuple[str, ...]) -> None:
        self._servicer = servicer
        self._names = names

    async def set_serving(self, serving: bool) -> None:
        """Answers SERVING or NOT_SERVING from now on, for the server and for each service."""
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._servicer.set(name, status)


async def standard_services(
    server: grpc.aio.Server | GuardedHandlers, services: tuple[RpcService, ...]
) -> HealthService:
    """Adds grpc.health.v1 and reflection, not serving until told."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

    codec.file_descriptors()
    servicer = health.aio.HealthServicer()
    place: Any = server
    health_pb2_grpc.add_HealthServicer_to_server(servicer, place)
    names = tuple(service.name for service in services)
    reflected = (*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    # By name: reflection's own helper takes the threads of the other API for anything that is no server of grpc.aio.
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(reflected), place)
    answer = HealthService(servicer, names)
    await answer.set_serving(False)
    return answer
