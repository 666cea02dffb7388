"""Checks of `eelctl doctor` on certificates: our own files, and the one that a controller presents.

Whether a chain holds is decided by TLS itself: a handshake in memory between both sides with the same files.
"""

import ipaddress
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from eelgrid_controller.cli.doctor_finding import (
    Finding,
    join_names,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from eelgrid_protos.certificate import Certificate, CertificateUnreadable, read_certificate
from eelgrid_protos.messages import WhoAmIResponse

_DAY_S = 86_400.0
_SOON_S = 30 * _DAY_S


@dataclass(frozen=True, slots=True)
class TlsFilesState:
    """Of three files: whether all could be read, whether the key fits, whether the authority signed.

    `unreadable` has a line for each file that could not be read; `mismatch` and `unsigned` are the reason or empty.
    """

    unreadable: tuple[str, ...] = ()
    ours: Certificate | None = None
    authority: Certificate | None = None
    mismatch: str = ""
    unsigned: str = ""
    key_open_to: str = ""


def covers_host(names: tuple[str, ...], host: str) -> bool:
    """Whether one of a certificate's names is this host; a star stands for one label (RFC 9525)."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        low = host.lower().rstrip(".")
        rest = low.partition(".")[2]
        return any(name.lower() == low or (rest and name.lower() == f"*.{rest}") for name in names)
    return str(wanted) in names


def check_certificate(check: str, found: Certificate, *, now_s: float, host: str = "") -> Finding:
    """Its dates, and with a host its names."""
    renew = "make a new certificate and put it in the place of the old one; daemons read it anew by themselves"
    if now_s >= found.ends_s:
        return report_failure(check, f"expired {_days(now_s - found.ends_s)} ago", renew)
    if now_s < found.begins_s:
        what = f"holds only in {_days(found.begins_s - now_s)}"
        return report_failure(check, what, "see that this machine's clock is right, or make a new certificate")
    if host and not covers_host(found.names, host):
        what = f"is not for {host} but for {join_names(found.names) or 'no name at all'}"
        return report_failure(
            check, what, f"make one with the alternative name {host}, or name the controller as it does"
        )
    left = f"holds for {_days(found.ends_s - now_s)}"
    if found.ends_s - now_s < _SOON_S:
        return report_warning(check, f"{left} only", renew)
    return report_ok(check, left)


def _days(span_s: float) -> str:
    days = int(span_s // _DAY_S)
    return f"{days} days" if days > 1 else f"{span_s / 3600.0:.0f} hours"


def check_role(found: WhoAmIResponse) -> Finding:
    """What the controller lets our certificate do."""
    if not found.not_after_ns:
        return report_skipped(
            "role", "without TLS everybody may everything", "give the controller certificates to have roles"
        )
    if found.roles:
        return report_ok("role", f"{found.subject} has {', '.join(found.roles)}")
    remedy = "make one with the organization eelgrid:ROLE, or have the controller grant this one a role (--grant)"
    if found.roles_demanded:
        return report_failure("role", f"{found.subject} has none, and the controller demands one", remedy)
    what = f"{found.subject} has none, and may everything like any certificate of its authority"
    return report_warning("role", what, f"{remedy}; when all have one, start the controller with --roles require")


def check_tls_files(
    state: TlsFilesState | None, *, now_s: float, is_loopback: bool, insecure: bool
) -> tuple[Finding, ...]:
    """All that can be said of our own three files; None where none are given."""
    if state is None:
        if insecure and not is_loopback:
            what = "TLS is off to another machine: whoever is between can command the cluster"
            return (
                report_warning(
                    "TLS", what, "give --tls-certificate, --tls-key and --tls-authority instead of --insecure"
                ),
            )
        what = "no certificates are given"
        return (
            report_skipped("TLS", what, "give --tls-certificate, --tls-key and --tls-authority to have them checked"),
        )
    if state.unreadable:
        remedy = "name readable PEM files, or run this as their owner"
        return tuple(report_failure("TLS files", line, remedy) for line in state.unreadable)
    findings = []
    if state.ours is not None:
        findings.append(check_certificate("TLS certificate", state.ours, now_s=now_s))
    if state.authority is not None:
        findings.append(check_certificate("TLS authority", state.authority, now_s=now_s))
    if state.mismatch:
        remedy = "name the key that the certificate was made with"
        findings.append(report_failure("TLS key", f"does not fit the certificate ({state.mismatch})", remedy))
    elif state.key_open_to:
        findings.append(report_warning("TLS key", f"can be read by {state.key_open_to}", "chmod go-rwx the key"))
    else:
        findings.append(report_ok("TLS key", "fits the certificate"))
    if state.unsigned and not state.mismatch:
        remedy = "name the authority that signed it, and the whole chain in --tls-certificate"
        findings.append(
            report_failure("TLS chain", f"the authority does not vouch for the certificate ({state.unsigned})", remedy)
        )
    return tuple(findings)


_TURNS_MOST = 10
_OPEN_TO = ((stat.S_IROTH, "everybody"), (stat.S_IRGRP, "its group"))


def read_tls_state(certificate: Path, key: Path, authority: Path) -> TlsFilesState:
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
        return TlsFilesState(unreadable=tuple(unreadable))
    mismatch = _mismatch(certificate, key)
    unsigned = "" if mismatch else _find_signature_problem(certificate, key, authority)
    mode = key.stat().st_mode
    open_to = next((who for bit, who in _OPEN_TO if mode & bit), "")
    return TlsFilesState((), found[certificate], found[authority], mismatch, unsigned, open_to)


def _mismatch(certificate: Path, key: Path) -> str:
    try:
        # A key with a passphrase would be asked for at the terminal; none of ours may have one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        return _error_text(error)
    return ""


def _error_text(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error).lower().replace("_", " ")


def _find_signature_problem(certificate: Path, key: Path, authority: Path) -> str:
    """Why a side with the authority would refuse one with the certificate; empty where it would not."""
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    try:
        serving.load_cert_chain(certificate, key, password="")
        asking.load_verify_locations(authority)
    except (ssl.SSLError, OSError, ValueError) as error:
        return _error_text(error)
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
                    ""
                    if "expired" in error.verify_message or "not yet valid" in error.verify_message
                    else _error_text(error)
                )
            except ssl.SSLError as error:
                return _error_text(error)
        if not sides:
            break
    return ""


def fetch_certificate(address: str, timeout_s: float) -> Certificate | None:
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
