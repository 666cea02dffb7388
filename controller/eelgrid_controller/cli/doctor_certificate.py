"""What a certificate says: its dates and the names that it is for.

Owns a reader of the little of DER that this takes; trusts nothing and verifies
nothing: whether a chain holds is TLS' own to say. Python's library reads a
certificate only from a connection that verified it, which an expired one never
does.

Source: RFC 5280, 4.1 (the fields, in order) and 4.2.1.6 (alternative names).
"""

import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Certificate", "CertificateUnreadable", "read_certificate"]

_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _OID, _OCTETS = 0x30, 0x17, 0x18, 0x06, 0x04
_VERSION, _EXTENSIONS = 0xA0, 0xA3
_DNS, _IP = 0x82, 0x87
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_BYTES_MOST = 1 << 20


class CertificateUnreadable(ValueError):
    """What was given is no certificate; the message says why."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """From when to when it holds, in seconds since 1970, and its alternative names."""

    begins_s: float
    ends_s: float
    names: tuple[str, ...]


def read_certificate(text: str | bytes) -> Certificate:
    """The first certificate of a PEM text, or one in DER; raises CertificateUnreadable."""
    try:
        der = ssl.PEM_cert_to_DER_cert(_first(text)) if isinstance(text, str) else text
        if len(der) > _BYTES_MOST:
            raise CertificateUnreadable("it is longer than any certificate")
        return _read(der)
    except (ValueError, IndexError, StopIteration, OverflowError) as error:
        raise CertificateUnreadable(str(error) or "it ends in the middle") from None


def _first(text: str) -> str:
    begin = text.find("-----BEGIN CERTIFICATE-----")
    if begin < 0:
        raise CertificateUnreadable("it has no BEGIN CERTIFICATE")
    end = text.index("-----END CERTIFICATE-----", begin)
    return text[begin : end + len("-----END CERTIFICATE-----")]


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The values that stand one after another, with their tags."""
    place = 0
    while place < len(der):
        tag, length = der[place], der[place + 1]
        place += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(der[place : place + count], "big")
            place += count
        if place + length > len(der):
            raise CertificateUnreadable("it ends in the middle")
        yield tag, der[place : place + length]
        place += length


def _inside(der: bytes, tag: int) -> bytes:
    found, value = next(_parts(der))
    if found != tag:
        raise CertificateUnreadable("it is no certificate")
    return value


def _read(der: bytes) -> Certificate:
    fields = [part for part in _parts(_inside(_inside(der, _SEQUENCE), _SEQUENCE)) if part[0] != _VERSION]
    # Serial number, algorithm, issuer, validity, subject, key; then what is optional.
    tag, validity = fields[3]
    if tag != _SEQUENCE:
        raise CertificateUnreadable("it has no dates")
    begins, ends = (_seconds(*part) for part in list(_parts(validity))[:2])
    extensions = next((value for tag, value in fields[6:] if tag == _EXTENSIONS), b"")
    return Certificate(begins, ends, tuple(_names(extensions)))


def _seconds(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # Two digits: 50 to 99 are of the last century.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise CertificateUnreadable("it has no dates")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _names(extensions: bytes) -> Iterator[str]:
    if not extensions:
        return
    for _, extension in _parts(_inside(extensions, _SEQUENCE)):
        parts = list(_parts(extension))
        if parts[0] != (_OID, _ALTERNATIVE_NAMES):
            continue
        octets = next(value for tag, value in parts if tag == _OCTETS)
        for tag, value in _parts(_inside(octets, _SEQUENCE)):
            if tag == _DNS:
                yield value.decode("ascii", "replace")
            elif tag == _IP:
                yield str(ipaddress.ip_address(value))
