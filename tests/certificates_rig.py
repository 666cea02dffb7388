"""Certificates for tests: any subject, any alternative names, any dates.

Owns an authority and what it signs. trustme knows no URIs and one organization;
these tests are about odd subjects, so this asks cryptography itself.
"""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from eelgrid_protos.transport import TlsFiles

__all__ = ["Authority", "subject_of"]

_DAY = dt.timedelta(days=1)
_OIDS = {"CN": NameOID.COMMON_NAME, "O": NameOID.ORGANIZATION_NAME, "OU": NameOID.ORGANIZATIONAL_UNIT_NAME}


def subject_of(*attributes):
    """A subject of (kind, value) pairs, or of ready attributes; lengths are not looked at, as of an odd authority."""
    return x509.Name(
        one if isinstance(one, x509.NameAttribute) else x509.NameAttribute(_OIDS[one[0]], one[1], _validate=False)
        for one in attributes
    )


def _alternative(name):
    if "://" in name or name.startswith("eelgrid:"):
        return x509.UniformResourceIdentifier(name)
    if "@" in name:
        return x509.RFC822Name(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Authority:
    """Signs whatever it is asked to."""

    def __init__(self, name="authority of tests"):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = subject_of(("CN", name))
        self.certificate = self._sign(self._name, self._key.public_key(), dt.datetime.now(dt.UTC) + _DAY, is_ca=True)

    def _sign(self, subject, key, ends, *, is_ca=False, names=()):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, ends) - _DAY)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, *attributes, names=(), lasts=_DAY):
        """A key and a certificate, which ends after `lasts`, or did before now."""
        key = ec.generate_private_key(ec.SECP256R1())
        return key, self._sign(subject_of(*attributes), key.public_key(), dt.datetime.now(dt.UTC) + lasts, names=names)

    def der(self, *attributes, **options):
        """A certificate as TLS hands it on."""
        return self.issue(*attributes, **options)[1].public_bytes(serialization.Encoding.DER)

    def write(self, folder: Path, *attributes, **options):
        """A new certificate in the files of one party, each replaced whole."""
        folder.mkdir(exist_ok=True)
        key, certificate = self.issue(*attributes, **options)
        files = TlsFiles(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        texts = (
            (files.key, secret),
            (files.certificate, certificate.public_bytes(serialization.Encoding.PEM)),
            (files.authority, self.certificate.public_bytes(serialization.Encoding.PEM)),
        )
        for path, text in texts:
            aside = path.with_suffix(".new")
            aside.write_bytes(text)
            aside.replace(path)
        return files
