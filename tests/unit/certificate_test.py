"""Certificates as they are read: every kind of key, several in one file, and damage of every kind."""

import datetime as dt
import random
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from tests.certificates_rig import Authority

from eelgrid_protos.certificate import SUBJECT_SHOWN_MOST, CertificateUnreadable, read_certificate

BEGINS, ENDS = dt.datetime(2049, 12, 31, 23, 59, 58, tzinfo=dt.UTC), dt.datetime(2051, 5, 6, 7, 8, 9, tzinfo=dt.UTC)
AUTHORITY = Authority()
PLAIN = (x509.NameAttribute(NameOID.COMMON_NAME, "n"),)
KEYS = {
    "RSA": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "EC": lambda: ec.generate_private_key(ec.SECP384R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}


def build(kind="EC", *extensions, attributes=PLAIN):
    """A certificate that signs itself, from 2049 (dates in one form) to 2051 (dates in the other)."""
    key = KEYS[kind]()
    name = x509.Name(attributes)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGINS)
        .not_valid_after(ENDS)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, None if kind == "Ed25519" else hashes.SHA256())


def pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def der(certificate):
    return certificate.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize("kind", KEYS)
def test_every_kind_of_key_is_read_from_pem_and_der(kind):
    certificate = build(kind, x509.SubjectAlternativeName([x509.DNSName("a.example")]))
    found = read_certificate(pem(certificate))
    assert found == read_certificate(der(certificate))
    assert (found.begins_s, found.ends_s) == (BEGINS.timestamp(), ENDS.timestamp())
    assert (found.subject, found.alternatives) == ((("CN", "n"),), (("DNS", "a.example"),))


def test_the_first_of_several_certificates_is_read():
    first, second = (build(attributes=(x509.NameAttribute(NameOID.COMMON_NAME, name),)) for name in ("one", "two"))
    text = f"Bag Attributes\n  friendlyName: ours\n{pem(first)}\n{pem(second)}{'#' * (1 << 20)}"
    assert read_certificate(text).subject == (("CN", "one"),)


def test_names_of_other_kinds_are_left_out():
    oid = x509.ObjectIdentifier("1.3.6.1.4.1.311.20.2.3")
    names = [
        x509.OtherName(oid, b"\x0c\x01a"),
        x509.RegisteredID(oid),
        x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "d")])),
        x509.UniformResourceIdentifier("eelgrid:viewer"),
        x509.RFC822Name("a@b.example"),
    ]
    attributes = (
        x509.NameAttribute(NameOID.EMAIL_ADDRESS, "a@b.example"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "one"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "two"),
    )
    found = read_certificate(der(build("EC", x509.SubjectAlternativeName(names), attributes=attributes)))
    assert found.subject == (("O", "one"), ("O", "two"))
    assert found.alternatives == (("URI", "eelgrid:viewer"), ("EMAIL", "a@b.example"))
    assert found.names == ()


def test_subject_is_shown_on_one_bounded_line():
    found = read_certificate(AUTHORITY.der(("CN", "a,b\n" + "x" * 60), ("O", "y" * 60), ("OU", "z" * 200)))
    assert found.display_name.startswith("CN=a\\,b\\0Ax")
    assert len(found.display_name) == SUBJECT_SHOWN_MOST
    assert found.display_name.isprintable()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no BEGIN CERTIFICATE"),
        ("hello", "no BEGIN CERTIFICATE"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", "no BEGIN CERTIFICATE"),
        ("-----BEGIN CERTIFICATE-----", "ends in the middle"),
        ("-----BEGIN CERTIFICATE-----\nAAAA", "ends in the middle"),
        ("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----", "damaged"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "damaged"),
        ("-----BEGIN CERTIFICATE-----\nä§\n-----END CERTIFICATE-----", "damaged"),
        (f"-----BEGIN CERTIFICATE-----\n{'A' * (1 << 20)}\n-----END CERTIFICATE-----", "longer than any"),
        (b"", "damaged"),
        (b"\x30\x82", "damaged"),
        (bytes((1 << 20) + 1), "longer than any"),
    ],
)
def test_what_is_no_certificate_is_a_clear_error(text, problem):
    with pytest.raises(CertificateUnreadable, match=problem) as caught:
        read_certificate(text)
    assert "\n" not in str(caught.value)


def test_a_repeated_extension_and_an_unknown_version_are_errors():
    names = x509.SubjectAlternativeName([x509.DNSName("a.example")])
    sound = der(build("EC", names, x509.IssuerAlternativeName([x509.DNSName("a.example")])))
    # subjectAltName is 2.5.29.17, issuerAltName 2.5.29.18.
    with pytest.raises(CertificateUnreadable, match="extension"):
        read_certificate(sound.replace(bytes.fromhex("551d12"), bytes.fromhex("551d11")))
    with pytest.raises(CertificateUnreadable, match="version"):
        read_certificate(sound.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020107"), 1))


# A damaged serial number is at times a negative one, which is warned about and read.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KEYS)
def test_damage_is_reported_and_never_crashes(kind):
    names = x509.SubjectAlternativeName([x509.DNSName("a.example"), x509.UniformResourceIdentifier("eelgrid:viewer")])
    sound = der(build(kind, names, x509.BasicConstraints(ca=False, path_length=None)))
    for length in range(0, len(sound), 3):
        with pytest.raises(CertificateUnreadable):
            read_certificate(sound[:length])
    chance = random.Random(7)
    damaged = [bytes((*sound[:at], sound[at] ^ bit, *sound[at + 1 :])) for at in range(len(sound)) for bit in (1, 128)]
    for _ in range(500):
        several = bytearray(sound)
        for at in chance.sample(range(len(sound)), 4):
            several[at] = chance.randrange(256)
        damaged.append(bytes(several))
    for one in damaged:
        try:
            found = read_certificate(one)
        except CertificateUnreadable:
            continue
        assert isinstance(found.begins_s, float)
        assert all(isinstance(value, str) for _, value in (*found.subject, *found.alternatives))


def test_an_agent_that_reads_no_certificate_does_not_import_cryptography():
    code = (
        "import logging, sys, time, eelgrid_agent.__main__, eelgrid_agent.composition\n"
        "from eelgrid_agent.node.node_service import NodeAuthorizer\n"
        "from eelgrid_protos.roles import RoleRules\n"
        "NodeAuthorizer(RoleRules(), ['n'], now_s=time.time, monotonic_s=time.monotonic, log=logging.getLogger())\n"
        "sys.exit('cryptography' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
