"""eelctl doctor: what is wrong with this installation, and what to do.

Owns the order of the checks, the calls, how findings are printed, and the checks of certificates. The checks of answers
are in doctor_cluster.py, those of the machine in doctor_machine.py. It changes nothing anywhere. Whether a certificate
chain holds is decided by TLS itself: a handshake in memory between both sides with the same files.
"""

import http.client
import ipaddress
import os
import socket
import ssl
import stat
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli import doctor_cluster, doctor_machine
from eelgrid_controller.cli.connection import (
    CliSettings,
    FiniteRange,
    connect_operators,
    fetch_whole,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.doctor_machine import (
    Finding,
    FindingStatus,
    exit_code,
    join_names,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from eelgrid_controller.cli.output import print_plain, use_colour
from eelgrid_protos import __version__
from eelgrid_protos.certificate import Certificate, CertificateUnreadable, read_certificate
from eelgrid_protos.messages import (
    GetInventoryRequest,
    GetNodePlanRequest,
    GetPolicyRequest,
    GetSamplesRequest,
    GetSummaryRequest,
    ListNodesRequest,
    ListPlansRequest,
    ListPromisesRequest,
    QueryEnergyRequest,
    WhoAmIRequest,
    WhoAmIResponse,
)
from eelgrid_protos.operator_calls import DEFAULT_CONTROLLER
from eelgrid_protos.sockets import split_address

_AGENT, _CONTROLLER_METRICS, _AGENT_METRICS = "127.0.0.1:7444", "127.0.0.1:9464", "127.0.0.1:9465"
_PAGE_BYTES_MOST = 32 * 1024**2
_HOUR_NS = 3600 * 10**9
_DAY_S = 86_400.0
_SOON_S = 30 * _DAY_S
_COLOURS = {
    FindingStatus.OK: "green",
    FindingStatus.WARN: "yellow",
    FindingStatus.FAIL: "red",
    FindingStatus.SKIPPED: None,
}
_CHECKED = ("all", "machine", "controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What to check besides the controller of the settings."""

    metrics: str
    agent: str
    state: Path
    data: Path
    nvml_limit_s: float


@click.command()
@click.option(
    "--metrics",
    default="",
    metavar="HOST:PORT",
    envvar="EELGRID_METRICS",
    help=f"Address of the controller's metrics, for more checks [default: {_CONTROLLER_METRICS} for a local controller]",
)
@click.option(
    "--agent", default=_AGENT, show_default=True, metavar="HOST:PORT", help="Address of the agent on this machine."
)
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="State directory of the agent.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("eelgrid-data"),
    show_default=True,
    help="Data directory of the controller, if it runs on this machine.",
)
@click.option(
    "--nvml-limit",
    "nvml_limit_s",
    type=FiniteRange(0.5, 120.0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the GPU driver.",
)
@click.option("--only", type=click.Choice(_CHECKED), default=_CHECKED[0], show_default=True, help="What to check.")
@output_option
@click.pass_context
def doctor(context: click.Context, /, only: str, state: Path | None, **looks: Any) -> None:
    """Check this machine and the controller, and say how to repair what is wrong; changes nothing.

    Exits with 1 if a check failed, with 0 otherwise, even with warnings.

    \b
    eelctl doctor --only machine
    eelctl doctor --metrics http://controller:9464/metrics
    """  # noqa: D301
    settings: CliSettings = context.obj
    where = state or doctor_machine.find_state_folder(os.environ, is_root=os.geteuid() == 0)
    chosen = DoctorOptions(state=where, **looks)
    findings: list[Finding] = []
    if only != "controller":
        findings += _machine(settings, chosen)
    if only != "machine":
        findings += _controller(settings, chosen)
    print_plain(
        settings, [asdict(finding) | {"status": finding.status.value} for finding in findings], _lines(findings)
    )
    context.exit(exit_code(findings))


def _lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        word = finding.status.value.ljust(7)
        tint = _COLOURS[finding.status] if use_colour() else None
        yield f"{click.style(word, fg=tint) if tint else word}  {finding.check.ljust(width)}  {finding.what}"
        if finding.remedy and finding.status is not FindingStatus.SKIPPED:
            yield f"{'':7}  {'':{width}}  next: {finding.remedy}"
    counts = Counter(finding.status for finding in findings)
    yield ""
    yield (
        f"{counts[FindingStatus.FAIL]} failed, {counts[FindingStatus.WARN]} to look at, {counts[FindingStatus.OK]} ok, "
        f"{counts[FindingStatus.SKIPPED]} not checked (-o json says how to enable them)"
    )


def _machine(settings: CliSettings, looks: DoctorOptions) -> Iterator[Finding]:
    yield doctor_machine.check_python(doctor_machine.read_python_version())
    lines = doctor_machine.read_own_requirements()
    for extra in ("controller", "agent"):
        wanted = doctor_machine.parse_requirements(lines, extra)
        yield doctor_machine.check_packages(extra, wanted, doctor_machine.read_installed_versions(wanted))
    answer, on_bus = doctor_machine.query_driver(looks.nvml_limit_s), doctor_machine.count_bus_gpus()
    has_gpus = answer.problem == "" or bool(on_bus)
    yield doctor_machine.check_nvml(answer, on_bus)
    if has_gpus:
        yield doctor_machine.check_driver(answer.version)
        yield from doctor_machine.check_rights(doctor_machine.read_rights())
    cgroup = doctor_machine.find_own_cgroup()
    controllers = doctor_machine.read_cgroup_controllers(cgroup)
    yield doctor_machine.check_processes(cgroup, controllers, is_root=os.geteuid() == 0)
    state, data = doctor_machine.read_folder(looks.state), doctor_machine.read_folder(looks.data)
    yield doctor_machine.check_folder("state directory", state, "--state", here=has_gpus)
    yield doctor_machine.check_disk_room("disk, agent", state)
    if data.exists:
        yield doctor_machine.check_folder("data directory", data, "--data", here=True)
        yield doctor_machine.check_disk_room("disk, controller", data)
    yield doctor_machine.check_clock_synchronised(*doctor_machine.read_clock_synchronised())
    yield doctor_machine.check_kubelet(doctor_machine.read_kubelet_sockets())
    yield from doctor_machine.check_ports(_ports(settings, looks))
    yield from _certificates(settings)
    yield from _agent(settings, looks, has_gpus=has_gpus)


def _ports(settings: CliSettings, looks: DoctorOptions) -> Iterator[doctor_machine.DaemonPort]:
    """Returns the ports that daemons have on this machine, by default or by option."""
    from eelgrid_protos import transport

    for purpose, flag, address, is_rpc in (
        ("controller", "--listen", settings.controllers[0], True),
        ("controller's metrics", "--metrics", looks.metrics or _CONTROLLER_METRICS, False),
        ("agent", "--listen", looks.agent, True),
        ("agent's metrics", "--metrics", _AGENT_METRICS, False),
    ):
        try:
            here = "://" not in address and not address.startswith("unix:") and transport.is_loopback(address)
        except transport.ListenError:
            continue
        if not here:
            continue
        free = doctor_machine.port_is_free(address)
        if free is None:
            state = doctor_machine.PortState.REFUSED
        elif free:
            state = doctor_machine.PortState.FREE
        else:
            ours = _answers(settings, address) if is_rpc else _is_our_page(address, settings.timeout_s)
            state = doctor_machine.PortState.OURS if ours else doctor_machine.PortState.OTHER
        yield doctor_machine.DaemonPort(address, purpose, flag, state)


def _answers(settings: CliSettings, address: str) -> bool:
    """Returns whether a gRPC server answers; one with TLS is recognized by its certificate."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=min(2.0, settings.timeout_s))
        except grpc.FutureTimeoutError:
            return fetch_certificate(address, settings.timeout_s) is not None
    return True


def _is_our_page(address: str, timeout_s: float) -> bool:
    text = _page_text(address, timeout_s)
    return isinstance(text, str) and "eelgrid_" in text


def _page_text(address: str, timeout_s: float) -> str | Exception:
    """Fetches a metrics page; returns the error if that fails."""
    url = address if "://" in address else f"http://{address}/metrics"
    if not url.startswith(("http://", "https://")):
        return ValueError(f"{url} is not an http or https URL")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - the scheme is checked above
            text: str = answer.read(_PAGE_BYTES_MOST).decode("utf-8", "replace")
            return text
    except (OSError, ValueError, http.client.HTTPException) as error:
        return error


def _certificates(settings: CliSettings) -> Iterator[Finding]:
    from eelgrid_protos import transport

    files = (settings.tls_certificate, settings.tls_key, settings.tls_authority)
    try:
        is_loopback = all(map(transport.is_loopback, settings.controllers))
    except transport.ListenError:
        is_loopback = False
    certificate, key, authority = files
    if any(files) and not (certificate and key and authority):
        what = "not all three files are given"
        yield report_failure("TLS", what, "give --tls-certificate, --tls-key and --tls-authority together")
        return
    state = read_tls_state(certificate, key, authority) if certificate and key and authority else None
    yield from check_tls_files(state, now_s=time.time(), is_loopback=is_loopback, insecure=settings.insecure)
    if state is not None:
        for address in settings.controllers:
            shown = fetch_certificate(address, settings.timeout_s)
            if shown is None:
                continue
            host, _ = split_address(address)
            yield check_certificate("TLS, controller's", shown, now_s=time.time(), host=host)


def _call_or_finding(check: str, call: Callable[[], Any], *, optional: bool = False) -> Any:
    """Returns the answer of a call, or the finding that it failed."""
    from eelgrid_protos import faults
    from eelgrid_protos.transport import ListenError

    try:
        return call()
    except (faults.Fault, ListenError, click.UsageError) as error:
        message = getattr(error, "message", str(error))
        if isinstance(error, faults.Unavailable):  # gRPC names each address that it tried; the last part is the reason
            message = message.rpartition(": ")[2]
        remedy = "see the check of the controller" if not optional else "nothing, unless an agent should run here"
        return report_skipped(check, f"the call failed: {message}", remedy)


def _agent(settings: CliSettings, looks: DoctorOptions, *, has_gpus: bool) -> Iterator[Finding]:
    from eelgrid_controller.cli.connection import tls_files
    from eelgrid_protos import rpc, transport
    from eelgrid_protos.errors import ContractError

    try:
        channel = transport.open_blocking_channel(looks.agent, tls=tls_files(settings), insecure=settings.insecure)
    except (transport.ListenError, click.UsageError) as error:
        yield report_skipped(
            "agent", f"cannot be reached: {error}", "give its address with --agent, and matching certificates"
        )
        return
    client, timeout_s = rpc.build_client(rpc.NODE_SERVICE, channel), settings.timeout_s
    try:
        found = _call_or_finding(
            "agent", lambda: client.get_inventory(GetInventoryRequest(), timeout=timeout_s), optional=True
        )
        if isinstance(found, Finding):
            if has_gpus:
                remedy = (
                    "start eelgrid-agent (systemctl status eelgrid-agent), or give its --listen address with --agent"
                )
                found = report_warning("agent", f"no agent answers at {looks.agent}", remedy)
            yield found
            return
        yield from doctor_cluster.check_inventory(found.inventory)
        yield doctor_cluster.check_leases("agent, leases", [found.inventory])
        begin_s = time.time()
        samples = _call_or_finding(
            "agent, sampling", lambda: client.get_samples(GetSamplesRequest(), timeout=timeout_s)
        )
        if isinstance(samples, Finding):
            yield samples
        else:
            yield doctor_cluster.check_newest_sample(samples)
            if samples.samples is not None and samples.samples.time_ns:
                theirs_s = samples.samples.time_ns[-1] / 1e9 + samples.age_s
                yield doctor_machine.check_clocks_agree(
                    "agent's samples", theirs_s - time.time(), time.time() - begin_s
                )
        plan = _call_or_finding("agent, plan", lambda: client.get_node_plan(GetNodePlanRequest(), timeout=timeout_s))
        yield plan if isinstance(plan, Finding) else doctor_cluster.check_lease(plan)
    except ContractError as error:
        yield report_warning(
            "agent", f"uses another release of the API ({error})", "install eelctl and the agent of the same release"
        )
    finally:
        channel.close()


def _controller(settings: CliSettings, looks: DoctorOptions) -> Iterator[Finding]:
    from eelgrid_protos import faults
    from eelgrid_protos.errors import ContractError
    from eelgrid_protos.transport import ListenError

    try:
        with connect_operators(settings) as client:
            yield from _asks(client, settings, looks)
    except (ListenError, click.UsageError) as error:
        yield report_failure("controller", f"cannot be reached: {error}", "correct --controller and the --tls options")
    except (faults.NoLeader, faults.NotLeader) as error:
        yield report_failure("controller", error.message, "start one of them, or wait until one leads")
    except faults.Unavailable as error:
        what = f"no controller answers at {settings.controller} ({error.message.rpartition(': ')[2]})"
        yield report_failure(
            "controller", what, "start eelgrid-controller, or give its address with --controller; see the TLS checks"
        )
    except faults.Fault as error:
        yield report_failure(
            "controller", f"{settings.controller} refused the call: {error.message}", "see the controller's log"
        )
    except ContractError as error:
        remedy = "install eelctl and the controller of the same release"
        yield report_failure("controller", f"uses another release of the API ({error})", remedy)


def _asks(client: Any, settings: CliSettings, looks: DoctorOptions) -> Iterator[Finding]:
    timeout_s = settings.timeout_s
    yield _role(client, timeout_s)
    begin_s = time.time()
    summary = client.get_summary(GetSummaryRequest(), timeout=timeout_s).summary
    end_s = time.time()
    yield report_ok("controller", f"{settings.controller} answered in {1000.0 * (end_s - begin_s):.0f} ms")
    yield doctor_machine.check_clocks_agree(
        "controller's", summary.time_ns / 1e9 - (begin_s + end_s) / 2, (end_s - begin_s) / 2
    )
    page = _page(settings, looks)
    policy = client.get_policy(GetPolicyRequest(), timeout=timeout_s).policy
    nodes = tuple(iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=timeout_s))
    yield from doctor_cluster.check_versions(
        nodes, page.version if isinstance(page, doctor_cluster.MetricsAnswer) else "", __version__
    )
    yield doctor_cluster.check_agents(summary)
    yield doctor_cluster.check_samples(summary)
    yield doctor_cluster.check_freshness(nodes, policy.send_interval_s)
    yield doctor_cluster.check_journal_loss(nodes)
    yield from doctor_cluster.check_gpus(nodes)
    yield doctor_cluster.check_leases("leases", [node.inventory for node in nodes])
    yield doctor_cluster.check_layouts(nodes)
    yield doctor_cluster.check_enforcement(nodes, policy)
    yield doctor_cluster.check_limit_reach(nodes, policy)
    yield from doctor_cluster.check_plans(
        tuple(iterate_pages(client.list_plans, ListPlansRequest(), "plans", timeout_s=timeout_s))
    )
    promised = _call_or_finding(
        "promises", lambda: fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=timeout_s)
    )
    if isinstance(promised, Finding):
        yield promised
    else:
        yield from doctor_cluster.check_promises(promised)
        yield from doctor_cluster.check_budgets(promised.budgets)
    yield doctor_cluster.check_waiting_work(summary)
    now_ns = time.time_ns()
    spent = _call_or_finding(
        "ledger",
        lambda: client.query_energy(
            QueryEnergyRequest(begin_ns=now_ns - _HOUR_NS, end_ns=now_ns, group_by=("kind",), rows_most=1),
            timeout=timeout_s,
        ),
    )
    yield spent if isinstance(spent, Finding) else doctor_cluster.check_ledger(spent, summary.measured_gpus)
    if isinstance(page, Finding):
        yield page
    else:
        yield from doctor_cluster.check_metrics(page)


def _role(client: Any, timeout_s: float) -> Finding:
    from eelgrid_protos import faults

    try:
        return check_role(client.who_am_i(WhoAmIRequest(), timeout=timeout_s))
    except faults.Internal as error:
        return report_skipped("role", f"the call failed: {error.message}", "upgrade the controller to this release")


def _page(settings: CliSettings, looks: DoctorOptions) -> "doctor_cluster.MetricsAnswer | Finding":
    """Fetches the controller's metrics page; returns a finding if there is none."""
    is_guess = not looks.metrics
    if is_guess and settings.controller != DEFAULT_CONTROLLER:
        what = "journal, drift, objectives and Kubernetes are checked from the controller's metrics only"
        return report_skipped("metrics", what, "give their address with --metrics HOST:PORT or a URL")
    address = looks.metrics or _CONTROLLER_METRICS
    text = _page_text(address, settings.timeout_s)
    if isinstance(text, Exception):
        if is_guess:
            return report_skipped(
                "metrics", f"nothing at {address} ({text})", "give their address with --metrics HOST:PORT or a URL"
            )
        return report_failure(
            "metrics", f"{address} cannot be read ({text})", "check the address against the controller's --metrics"
        )
    page = doctor_cluster.parse_metrics(text)
    if not page.is_ours:
        return report_failure(
            "metrics",
            f"{address} is not the metrics page of a controller",
            "give the address of the controller, not of an agent",
        )
    return page


@dataclass(frozen=True, slots=True)
class TlsFilesState:
    """State of the three TLS files: whether all are readable, the key matches, and the authority signed.

    `unreadable` has a line for each unreadable file; `mismatch` and `unsigned` are the reason or empty.
    """

    unreadable: tuple[str, ...] = ()
    ours: Certificate | None = None
    authority: Certificate | None = None
    mismatch: str = ""
    unsigned: str = ""
    key_open_to: str = ""


def covers_host(names: tuple[str, ...], host: str) -> bool:
    """Returns whether a certificate's names cover a host; a wildcard stands for one label (RFC 9525)."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        low = host.lower().rstrip(".")
        rest = low.partition(".")[2]
        return any(name.lower() == low or (rest and name.lower() == f"*.{rest}") for name in names)
    return str(wanted) in names


def check_certificate(check: str, found: Certificate, *, now_s: float, host: str = "") -> Finding:
    """Checks the validity of a certificate, and with `host` its names."""
    renew = "replace it with a new certificate; the daemons reload it on change"
    if now_s >= found.ends_s:
        return report_failure(check, f"expired {_days(now_s - found.ends_s)} ago", renew)
    if now_s < found.begins_s:
        what = f"is not valid for another {_days(found.begins_s - now_s)}"
        return report_failure(check, what, "check this machine's clock, or replace the certificate")
    if host and not covers_host(found.names, host):
        what = f"is not valid for {host}, only for {join_names(found.names) or 'no name at all'}"
        return report_failure(
            check, what, f"replace it with one for the alternative name {host}, or use a name that it has"
        )
    left = f"expires in {_days(found.ends_s - now_s)}"
    if found.ends_s - now_s < _SOON_S:
        return report_warning(check, left, renew)
    return report_ok(check, left)


def _days(span_s: float) -> str:
    days = int(span_s // _DAY_S)
    return f"{days} days" if days > 1 else f"{span_s / 3600.0:.0f} hours"


def check_role(found: WhoAmIResponse) -> Finding:
    """Checks which roles the controller grants the client certificate."""
    if not found.not_after_ns:
        return report_skipped(
            "role", "without TLS every caller may do everything", "set up TLS on the controller to use roles"
        )
    if found.roles:
        return report_ok("role", f"{found.subject} has {', '.join(found.roles)}")
    remedy = "use one with the organization eelgrid:ROLE, or have the controller grant this one a role (--grant)"
    if found.roles_demanded:
        return report_failure("role", f"{found.subject} has none, and the controller requires one", remedy)
    what = f"{found.subject} has none, so it may do everything, like every certificate of its authority"
    return report_warning("role", what, f"{remedy}; once all have one, start the controller with --roles require")


def check_tls_files(
    state: TlsFilesState | None, *, now_s: float, is_loopback: bool, insecure: bool
) -> tuple[Finding, ...]:
    """Checks the client's three TLS files; `state` is None if none are given."""
    if state is None:
        if insecure and not is_loopback:
            what = "TLS is off to another machine: anyone on the network path can control the cluster"
            return (
                report_warning(
                    "TLS", what, "give --tls-certificate, --tls-key and --tls-authority instead of --insecure"
                ),
            )
        what = "no certificates are given"
        return (report_skipped("TLS", what, "give --tls-certificate, --tls-key and --tls-authority to check them"),)
    if state.unreadable:
        remedy = "give readable PEM files, or run this as their owner"
        return tuple(report_failure("TLS files", line, remedy) for line in state.unreadable)
    findings = []
    if state.ours is not None:
        findings.append(check_certificate("TLS certificate", state.ours, now_s=now_s))
    if state.authority is not None:
        findings.append(check_certificate("TLS authority", state.authority, now_s=now_s))
    if state.mismatch:
        remedy = "give the key that belongs to the certificate"
        findings.append(report_failure("TLS key", f"does not match the certificate ({state.mismatch})", remedy))
    elif state.key_open_to:
        findings.append(report_warning("TLS key", f"can be read by {state.key_open_to}", "chmod go-rwx the key"))
    else:
        findings.append(report_ok("TLS key", "matches the certificate"))
    if state.unsigned and not state.mismatch:
        remedy = "give the authority that signed it, and the whole chain in --tls-certificate"
        findings.append(
            report_failure("TLS chain", f"the authority did not sign the certificate ({state.unsigned})", remedy)
        )
    return tuple(findings)


_TURNS_MOST = 10
_OPEN_TO = ((stat.S_IROTH, "everyone"), (stat.S_IRGRP, "its group"))


def read_tls_state(certificate: Path, key: Path, authority: Path) -> TlsFilesState:
    """Reads the three TLS files and checks that they belong together."""
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
                unreadable.append(f"{path}: not a certificate ({error})")
    if unreadable:
        return TlsFilesState(unreadable=tuple(unreadable))
    mismatch = _mismatch(certificate, key)
    unsigned = "" if mismatch else _unsigned(certificate, key, authority)
    mode = key.stat().st_mode
    open_to = next((who for bit, who in _OPEN_TO if mode & bit), "")
    return TlsFilesState((), found[certificate], found[authority], mismatch, unsigned, open_to)


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
    """Returns why a peer with the authority would refuse the certificate; empty if it would not."""
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


def fetch_certificate(address: str, timeout_s: float) -> Certificate | None:
    """Fetches the certificate that a server presents; None if it presents none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate is read, not trusted: nothing is sent, and calls verify it themselves.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        host, port = split_address(address)
        with (
            socket.create_connection((host, port), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
        return read_certificate(der) if der else None
    except (OSError, ValueError):
        return None
