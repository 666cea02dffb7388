"""Kubelet DRA plugin API v1 and plugin registration: encoding and parsing of their messages.

Owns the only contact with their generated code, the names of the services and the bounds of
what is read. Must not know sockets, nor what makes a claim ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from eelgrid_protos.errors import MalformedMessage, Violation
from eelgrid_protos.wire import dra_pb2 as wire
from eelgrid_protos.wire import plugin_registration_pb2 as registration

DRA_SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION_SERVICE = "pluginregistration.Registration"
_TYPE = "DRAPlugin"
_VERSIONS = ("v1.DRAPlugin",)
# A pod has at most a few dozen claims, and the kubelet asks for one pod at a time.
_CLAIMS_MOST = 1024
_ERROR_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReference:
    """A claim by its three names; the uid tells it from another of the same name."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One device that stands ready for these requests of a claim."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationStatus:
    """What the kubelet made of the plugin; `error` where it did not take it."""

    is_registered: bool
    error: str = ""


def encode_plugin_info(driver: str, endpoint: str) -> bytes:
    """What a plugin says of itself; `endpoint` is the path of its service's socket."""
    return registration.PluginInfo(
        type=_TYPE, name=driver, endpoint=endpoint, supported_versions=_VERSIONS
    ).SerializeToString()


def parse_registration_status(data: bytes) -> RegistrationStatus:
    """The kubelet's word on a registration; raises MalformedMessage."""
    told = registration.RegistrationStatus()
    _parse(told, data)
    return RegistrationStatus(is_registered=told.plugin_registered, error=told.error)


def encode_registration_response() -> bytes:
    """An answer without any field."""
    return b""


def parse_claims(data: bytes) -> tuple[ClaimReference, ...]:
    """The claims of a prepare or unprepare call; raises MalformedMessage."""
    request = wire.ClaimsRequest()
    _parse(request, data)
    if len(request.claims) > _CLAIMS_MOST:
        raise _malformed("claims", f"are {len(request.claims)}, more than {_CLAIMS_MOST}")
    return tuple(ClaimReference(namespace=one.namespace, name=one.name, uid=one.uid) for one in request.claims)


def encode_prepared_claims(claims: Mapping[str, tuple[PreparedDevice, ...] | str]) -> bytes:
    """By uid the devices of a claim, or why it is not ready."""
    answer = wire.PrepareResponse()
    for uid, outcome in claims.items():
        claim = answer.claims[uid]
        if isinstance(outcome, str):
            claim.error = outcome[:_ERROR_MOST]
            continue
        for one in outcome:
            claim.devices.add(
                request_names=one.requests, pool_name=one.pool, device_name=one.device, cdi_device_ids=one.cdi_ids
            )
    return answer.SerializeToString()


def encode_unprepared_claims(claims: Mapping[str, str]) -> bytes:
    """By uid why a claim is not undone; empty where it is."""
    answer = wire.UnprepareResponse()
    for uid, error in claims.items():
        answer.claims[uid].error = error[:_ERROR_MOST]
    return answer.SerializeToString()


def _parse(message: wire.ClaimsRequest | registration.RegistrationStatus, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _malformed("", f"the bytes are no message ({error})") from error


def _malformed(field: str, problem: str) -> MalformedMessage:
    return MalformedMessage("DRAPlugin", (Violation(field, problem, "check that the caller is the kubelet"),))
