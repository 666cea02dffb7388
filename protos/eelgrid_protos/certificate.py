"""Certificates: the dates, the subject and the alternative names that one states, read with `cryptography`.

Verifies nothing: whether a chain is trusted is for TLS to say. Python's `ssl` reads a certificate only from a
connection that verified it, which an expired one never does, and omits attributes that a subject has twice.

`cryptography` is imported on the first read: a program that reads no certificate, such as an agent without TLS or
eelctl, does not pay for it in start time and memory.

Source: RFC 5280, 4.1.2.4 (names), 4.1.2.5 (dates) and 4.2.1.6 (alternative names).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from eelgrid_protos.values import dataclass

if TYPE_CHECKING:
    from cryptography import x509

SUBJECT_SHOWN_MOST = 200

# By dotted object identifier.
_ATTRIBUTES = {"2.5.4.3": "CN", "2.5.4.6": "C", "2.5.4.7": "L", "2.5.4.8": "ST", "2.5.4.10": "O", "2.5.4.11": "OU"}
_BYTES_MOST = 1 << 20
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class CertificateUnreadable(ValueError):
    """The input is not a certificate; the message says why."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The dates of one certificate, in seconds since 1970, and its names as (kind, value), in its own order.

    Kinds of the subject are CN, O, OU, C, L and ST, of the alternatives DNS, IP, URI and EMAIL; there may be several
    of a kind, and others are left out.
    """

    begins_s: float
    ends_s: float
    subject: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts that the certificate is for: DNS names and IP addresses."""
        return tuple(value for kind, value in self.alternatives if kind in {"DNS", "IP"})

    @property
    def display_name(self) -> str:
        """The subject for people: one line without control characters, SUBJECT_SHOWN_MOST characters at most."""
        # One without a subject is identified by its alternative names (RFC 5280, 4.1.2.6).
        text = ",".join(f"{kind}={_escape_value(value)}" for kind, value in self.subject or self.alternatives)
        return text if len(text) <= SUBJECT_SHOWN_MOST else f"{text[: SUBJECT_SHOWN_MOST - 3]}..."


def _escape_value(value: str) -> str:
    """Escapes as RFC 4514 does: what would read as the next attribute, and what must not reach a terminal."""
    marks = "".join(f"\\{one}" if one in ',+"\\<>;=' else one for one in value[:SUBJECT_SHOWN_MOST])
    return "".join(
        one if one.isprintable() else "".join(f"\\{byte:02X}" for byte in one.encode("utf-8", "surrogatepass"))
        for one in marks
    )


def read_certificate(text: str | bytes) -> Certificate:
    """Reads the first certificate of a PEM text, or one in DER; raises CertificateUnreadable."""
    from cryptography import x509

    block = _first_block(text) if isinstance(text, str) else text
    if len(block) > _BYTES_MOST:
        raise CertificateUnreadable("it is longer than any certificate")
    try:
        if isinstance(block, str):
            found = x509.load_pem_x509_certificate(block.encode("ascii"))
        else:
            found = x509.load_der_x509_certificate(block)
        return Certificate(
            found.not_valid_before_utc.timestamp(),
            found.not_valid_after_utc.timestamp(),
            tuple(_subject_names(found)),
            tuple(_alternative_names(found)),
        )
    except (
        ValueError,
        OverflowError,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise CertificateUnreadable(f"it is damaged, or is not a certificate ({_one_line(error)})") from None


# By which gRPC tells the certificate of a connection's other end.
PEM_PROPERTY = "x509_pem_cert"
# Authorities between a certificate and the one that is trusted.
_CHAIN_MOST = 4


def is_signed_by(shown: bytes, authority: bytes) -> bool:
    """Returns whether the first certificate of a PEM text was signed by an authority, itself or by others of the text."""
    from cryptography import x509

    try:
        (current, *others), trusted = x509.load_pem_x509_certificates(shown), x509.load_pem_x509_certificates(authority)
    except ValueError:
        return False
    for _ in range(_CHAIN_MOST):
        if any(_has_signed(one, current) for one in trusted):
            return True
        following = next((one for one in others if _is_authority(one) and _has_signed(one, current)), None)
        if following is None:
            return False
        current = following
    return False


def _has_signed(signer: "x509.Certificate", one: "x509.Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        one.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_authority(one: "x509.Certificate") -> bool:
    from cryptography import x509

    try:
        return bool(one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except (x509.ExtensionNotFound, ValueError):
        return False


def _first_block(text: str) -> str:
    begin = text.find(_PEM_BEGIN)
    if begin < 0:
        raise CertificateUnreadable("it has no BEGIN CERTIFICATE")
    end = text.find(_PEM_END, begin)
    if end < 0:
        raise CertificateUnreadable("it ends in the middle")
    return text[begin : end + len(_PEM_END)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("error parsing asn1 value: ")


def _subject_names(certificate: "x509.Certificate") -> Iterator[tuple[str, str]]:
    for attribute in certificate.subject:
        kind = _ATTRIBUTES.get(attribute.oid.dotted_string)
        if kind is not None and isinstance(attribute.value, str):
            yield kind, attribute.value


def _alternative_names(certificate: "x509.Certificate") -> Iterator[tuple[str, str]]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return
    for name in names:
        match name:
            case x509.DNSName():
                yield "DNS", name.value
            case x509.IPAddress():
                yield "IP", str(name.value)
            case x509.UniformResourceIdentifier():
                yield "URI", name.value
            case x509.RFC822Name():
                yield "EMAIL", name.value
