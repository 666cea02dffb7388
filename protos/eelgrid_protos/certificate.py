"""What a certificate says: its dates, whose it is, and the names that it is for.

Owns a reader of the little of DER that this takes; trusts nothing and verifies
nothing: whether a chain holds is TLS' own to say. Python's library reads a
certificate only from a connection that verified it, which an expired one never
does, and leaves out what a subject holds twice.

Source: RFC 5280, 4.1 (the fields, in order), 4.1.2.4 (names) and 4.2.1.6
(alternative names).
"""

import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

SUBJECT_SHOWN_MOST = 200

_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _OID, _OCTETS = 0x30, 0x17, 0x18, 0x06, 0x04
_VERSION, _EXTENSIONS = 0xA0, 0xA3
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_IP = 0x87
_ALTERNATIVES = {0x81: "EMAIL", 0x82: "DNS", 0x86: "URI"}
_ATTRIBUTES = {
    bytes.fromhex("550403"): "CN",
    bytes.fromhex("550406"): "C",
    bytes.fromhex("550407"): "L",
    bytes.fromhex("550408"): "ST",
    bytes.fromhex("55040a"): "O",
    bytes.fromhex("55040b"): "OU",
}
# Of a DirectoryString (RFC 5280, 4.1.2.4), and IA5String, which others put there.
_TEXTS = {0x0C: "utf-8", 0x13: "ascii", 0x14: "latin-1", 0x16: "ascii", 0x1C: "utf-32-be", 0x1E: "utf-16-be"}
_BYTES_MOST = 1 << 20


class CertificateUnreadable(ValueError):
    """What was given is no certificate; the message says why."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """From when to when it holds, in seconds since 1970, and its names as (kind, value), in its own order.

    Kinds of the subject are CN, O, OU, C, L and ST, of the alternatives DNS, IP, URI and EMAIL; there may be several
    of a kind, and others are left out.
    """

    begins_s: float
    ends_s: float
    subject: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts that it is for."""
        return tuple(value for kind, value in self.alternatives if kind in {"DNS", "IP"})

    @property
    def display_name(self) -> str:
        """Whose it is, for people: one line without control characters, SUBJECT_SHOWN_MOST characters at most."""
        # One without a subject is of its alternative names (RFC 5280, 4.1.2.6).
        text = ",".join(f"{kind}={_escape_value(value)}" for kind, value in self.subject or self.alternatives)
        return text if len(text) <= SUBJECT_SHOWN_MOST else f"{text[: SUBJECT_SHOWN_MOST - 3]}..."


def _escape_value(value: str) -> str:
    """As RFC 4514 writes a value: what would read as the next attribute, and what no terminal should get."""
    marks = "".join(f"\\{one}" if one in ',+"\\<>;=' else one for one in value[:SUBJECT_SHOWN_MOST])
    return "".join(
        one if one.isprintable() else "".join(f"\\{byte:02X}" for byte in one.encode("utf-8", "surrogatepass"))
        for one in marks
    )


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
    return Certificate(begins, ends, tuple(_subject(fields[4][1])), tuple(_alternatives(extensions)))


def _seconds(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # Two digits: 50 to 99 are of the last century.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise CertificateUnreadable("it has no dates")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _subject(names: bytes) -> Iterator[tuple[str, str]]:
    for _, relative in _parts(names):
        for _, attribute in _parts(relative):
            (_, key), (tag, value) = list(_parts(attribute))[:2]
            # Whoever compares names gets them as they are or not at all: a replacement mark equals nothing of ours.
            if key in _ATTRIBUTES and tag in _TEXTS:
                yield _ATTRIBUTES[key], value.decode(_TEXTS[tag], "replace")


def _alternatives(extensions: bytes) -> Iterator[tuple[str, str]]:
    if not extensions:
        return
    for _, extension in _parts(_inside(extensions, _SEQUENCE)):
        parts = list(_parts(extension))
        if parts[0] != (_OID, _ALTERNATIVE_NAMES):
            continue
        octets = next(value for tag, value in parts if tag == _OCTETS)
        for tag, value in _parts(_inside(octets, _SEQUENCE)):
            if tag in _ALTERNATIVES:
                yield _ALTERNATIVES[tag], value.decode("ascii", "replace")
            elif tag == _IP:
                yield "IP", str(ipaddress.ip_address(value))
