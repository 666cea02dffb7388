"""What eelctl doctor reads of certificates: our files, and the one that a controller shows.

Owns the looks, and whether a chain holds, which it lets TLS itself decide: a
handshake in memory between both sides with the same files, as the daemons
would make it. Must not judge dates and names.
"""

import socket
import ssl
import stat
from pathlib import Path

from eelgrid_controller.cli.doctor_checks_tls import TlsState
from eelgrid_protos.certificate import Certificate, CertificateUnreadable, read_certificate

__all__ = ["shown_by", "tls_state"]

_TURNS_MOST = 10
_OPEN_TO = ((stat.S_IROTH, "everybody"), (stat.S_IRGRP, "its group"))


def tls_state(certificate: Path, key: Path, authority: Path) -> TlsState:
    """All that can be read of three files."""
    unreadable, texts = [], {}
    for path in (certificate, key, authority):
        try:
            texts[path] = path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            unreadable.append(f"{path}: {error.strerror or error}")
    found: dict[Path, Certificate] = {}
    for path in (certificate, authority):
        if path in texts:
            try:
                found[path] = read_certificate(texts[path])
            except CertificateUnreadable as error:
                unreadable.append(f"{path}: no certificate ({error})")
    if unreadable:
        return TlsState(unreadable=tuple(unreadable))
    mismatch = _mismatch(certificate, key)
    unsigned = "" if mismatch else _unsigned(certificate, key, authority)
    mode = key.stat().st_mode
    open_to = next((who for bit, who in _OPEN_TO if mode & bit), "")
    return TlsState((), found[certificate], found[authority], mismatch, unsigned, open_to)


def _mismatch(certificate: Path, key: Path) -> str:
    try:
        # A key with a passphrase would be asked for at the terminal; none of ours may have one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        return _said(error)
    return ""


def _said(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error).lower().replace("_", " ")


def _unsigned(certificate: Path, key: Path, authority: Path) -> str:
    """Why a side with the authority would refuse one with the certificate; empty where it would not."""
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    try:
        serving.load_cert_chain(certificate, key, password="")
        asking.load_verify_locations(authority)
    except (ssl.SSLError, OSError, ValueError) as error:
        return _said(error)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [asking.wrap_bio(back, there), serving.wrap_bio(there, back, server_side=True)]
    for _ in range(_TURNS_MOST):
        for side in tuple(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                # Dates have findings of their own.
                return (
                    "" if "expired" in error.verify_message or "not yet valid" in error.verify_message else _said(error)
                )
            except ssl.SSLError as error:
                return _said(error)
        if not sides:
            break
    return ""


def shown_by(address: str, timeout_s: float) -> Certificate | None:
    """The certificate that a server shows to anybody; None where it shows none."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It is looked at and not trusted: nothing is sent, and the call itself verifies.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
        return read_certificate(der) if der else None
    except (OSError, ValueError):
        return None
