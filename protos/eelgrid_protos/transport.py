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
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from eelgrid_protos import codec
from eelgrid_protos.rpc import Service, request_bytes_most

__all__ = [
    "AddressInUse", "BindRefused", "CertificateUnusable", "ListenError", "TlsFiles", "blocking_channel", "channel",
    "channel_options", "is_loopback", "listen", "server_options", "standard_services",
]  # fmt: skip


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


def server_options() -> list[tuple[str, int]]:
    """Options of every server of ours."""
    return [
        *_KEEPALIVE,
        *_SERVER_SIZES,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.bdp_probe", 0),
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


def _server_credentials(tls: TlsFiles, log: logging.Logger) -> grpc.ServerCredentials:
    def configuration() -> Any:
        key, chain, authority = tls.read()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)

    initial = configuration()
    seen = tls.stamp()

    def fetch() -> Any:
        """Called at each handshake; None keeps the last good certificates, and an exception would end them."""
        nonlocal seen
        stamp = tls.stamp()
        if stamp == seen:
            return None
        try:
            fresh = configuration()
        except CertificateUnusable as error:
            log.warning("tls=kept reason=%s", error)
            return None
        seen = stamp
        log.info("tls=reloaded certificate=%s", tls.certificate)
        return fresh

    return grpc.dynamic_ssl_server_credentials(initial, fetch, require_client_authentication=True)


async def listen(
    server: grpc.aio.Server, address: str, *, tls: TlsFiles | None, insecure: bool, log: logging.Logger
) -> int:
    """Binds the server and returns the port; raises ListenError."""
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
        if tls is not None:
            return server.add_secure_port(address, _server_credentials(tls, log))
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: {error}; choose another with --listen") from error


def _channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    key, chain, authority = tls.read()
    return grpc.ssl_channel_credentials(authority, key, chain)


def _check_target(address: str, tls: TlsFiles | None, *, insecure: bool) -> None:
    if tls is None and not insecure and not is_loopback(address):
        raise BindRefused(
            f"{address} is another machine; give --tls-certificate, --tls-key and --tls-authority, or say --insecure"
        )


def channel(
    address: str, *, tls: TlsFiles | None, insecure: bool = False, options: list[tuple[str, int]] | None = None
) -> grpc.aio.Channel:
    """A channel for asyncio; raises ListenError where the connection would be open to others."""
    _check_target(address, tls, insecure=insecure)
    chosen = [*channel_options(), *(options or [])]
    if tls is not None:
        return grpc.aio.secure_channel(address, _channel_credentials(tls), options=chosen)
    return grpc.aio.insecure_channel(address, options=chosen)


def blocking_channel(address: str, *, tls: TlsFiles | None, insecure: bool = False) -> grpc.Channel:
    """A channel for programs without an event loop."""
    _check_target(address, tls, insecure=insecure)
    if tls is not None:
        return grpc.secure_channel(address, _channel_credentials(tls), options=channel_options())
    return grpc.insecure_channel(address, options=channel_options())


class Health:
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


async def standard_services(server: grpc.aio.Server, services: tuple[Service, ...]) -> Health:
    """Adds grpc.health.v1 and reflection, not serving until told."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    codec.file_descriptors()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = tuple(service.name for service in services)
    reflection.enable_server_reflection(
        (*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server
    )
    answer = Health(servicer, names)
    await answer.set_serving(False)
    return answer
