"""What eelctl doctor thinks of certificates: from what was read to findings.

Owns the thresholds and the remedies. Must not open files or connections.
"""

import ipaddress
from dataclasses import dataclass

from eelgrid_controller.cli.doctor_finding import Finding, failed, good, named, skipped, warned
from eelgrid_protos.certificate import Certificate
from eelgrid_protos.messages import WhoAmIResponse

__all__ = ["TlsState", "certificate", "covers", "role", "tls"]

_DAY_S = 86_400.0
_SOON_S = 30 * _DAY_S


@dataclass(frozen=True, slots=True)
class TlsState:
    """Of three files: whether all could be read, whether the key fits, whether the authority signed.

    `unreadable` has a line for each file that could not be read; `mismatch` and `unsigned` are the reason or empty.
    """

    unreadable: tuple[str, ...] = ()
    ours: Certificate | None = None
    authority: Certificate | None = None
    mismatch: str = ""
    unsigned: str = ""
    key_open_to: str = ""


def covers(names: tuple[str, ...], host: str) -> bool:
    """Whether one of a certificate's names is this host; a star stands for one label (RFC 9525)."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        low = host.lower().rstrip(".")
        rest = low.partition(".")[2]
        return any(name.lower() == low or (rest and name.lower() == f"*.{rest}") for name in names)
    return str(wanted) in names


def certificate(check: str, found: Certificate, *, now_s: float, host: str = "") -> Finding:
    """Its dates, and with a host its names."""
    renew = "make a new certificate and put it in the place of the old one; daemons read it anew by themselves"
    if now_s >= found.ends_s:
        return failed(check, f"expired {_days(now_s - found.ends_s)} ago", renew)
    if now_s < found.begins_s:
        what = f"holds only in {_days(found.begins_s - now_s)}"
        return failed(check, what, "see that this machine's clock is right, or make a new certificate")
    if host and not covers(found.names, host):
        what = f"is not for {host} but for {named(found.names) or 'no name at all'}"
        return failed(check, what, f"make one with the alternative name {host}, or name the controller as it does")
    left = f"holds for {_days(found.ends_s - now_s)}"
    if found.ends_s - now_s < _SOON_S:
        return warned(check, f"{left} only", renew)
    return good(check, left)


def _days(span_s: float) -> str:
    days = int(span_s // _DAY_S)
    return f"{days} days" if days > 1 else f"{span_s / 3600.0:.0f} hours"


def role(found: WhoAmIResponse) -> Finding:
    """What the controller lets our certificate do."""
    if not found.not_after_ns:
        return skipped("role", "without TLS everybody may everything", "give the controller certificates to have roles")
    if found.roles:
        return good("role", f"{found.subject} has {', '.join(found.roles)}")
    remedy = "make one with the organization eelgrid:ROLE, or have the controller grant this one a role (--grant)"
    if found.roles_demanded:
        return failed("role", f"{found.subject} has none, and the controller demands one", remedy)
    what = f"{found.subject} has none, and may everything like any certificate of its authority"
    return warned("role", what, f"{remedy}; when all have one, start the controller with --roles require")


def tls(state: TlsState | None, *, now_s: float, is_loopback: bool, insecure: bool) -> tuple[Finding, ...]:
    """All that can be said of our own three files; None where none are given."""
    if state is None:
        if insecure and not is_loopback:
            what = "TLS is off to another machine: whoever is between can command the cluster"
            return (warned("TLS", what, "give --tls-certificate, --tls-key and --tls-authority instead of --insecure"),)
        what = "no certificates are given"
        return (skipped("TLS", what, "give --tls-certificate, --tls-key and --tls-authority to have them checked"),)
    if state.unreadable:
        remedy = "name readable PEM files, or run this as their owner"
        return tuple(failed("TLS files", line, remedy) for line in state.unreadable)
    findings = []
    if state.ours is not None:
        findings.append(certificate("TLS certificate", state.ours, now_s=now_s))
    if state.authority is not None:
        findings.append(certificate("TLS authority", state.authority, now_s=now_s))
    if state.mismatch:
        remedy = "name the key that the certificate was made with"
        findings.append(failed("TLS key", f"does not fit the certificate ({state.mismatch})", remedy))
    elif state.key_open_to:
        findings.append(warned("TLS key", f"can be read by {state.key_open_to}", "chmod go-rwx the key"))
    else:
        findings.append(good("TLS key", "fits the certificate"))
    if state.unsigned and not state.mismatch:
        remedy = "name the authority that signed it, and the whole chain in --tls-certificate"
        findings.append(
            failed("TLS chain", f"the authority does not vouch for the certificate ({state.unsigned})", remedy)
        )
    return tuple(findings)
