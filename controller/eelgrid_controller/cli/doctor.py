"""eelctl doctor: what is wrong with this installation, and what to do.

Owns the order of the checks, the calls, and how findings are printed. What is
thought of an answer is in doctor_checks*.py, what is read of the machine in
doctor_machine.py and doctor_tls.py. It changes nothing anywhere.
"""

import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli import doctor_cluster, doctor_machine, doctor_tls
from eelgrid_controller.cli.connection import connect_operators, fetch_whole, iterate_pages
from eelgrid_controller.cli.doctor_finding import (
    Finding,
    FindingStatus,
    exit_code,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from eelgrid_controller.cli.output import print_plain, use_colour
from eelgrid_controller.cli.settings import DEFAULT_CONTROLLER, CliSettings, output_option
from eelgrid_protos import __version__
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
)

_AGENT, _CONTROLLER_METRICS, _AGENT_METRICS = "127.0.0.1:7444", "127.0.0.1:9464", "127.0.0.1:9465"
_PAGE_BYTES_MOST = 32 * 1024**2
_HOUR_NS = 3600 * 10**9
_COLOURS = {
    FindingStatus.OK: "green",
    FindingStatus.WARN: "yellow",
    FindingStatus.FAIL: "red",
    FindingStatus.SKIPPED: None,
}
_CHECKED = ("all", "machine", "controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What to look at besides the controller of the settings."""

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
    help=f"The controller's metrics, which tell more [default: {_CONTROLLER_METRICS} beside a local controller]",
)
@click.option("--agent", default=_AGENT, show_default=True, metavar="HOST:PORT", help="This machine's agent.")
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="The agent's state directory.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("eelgrid-data"),
    show_default=True,
    help="The controller's data directory, where it runs here.",
)
@click.option(
    "--nvml-limit",
    "nvml_limit_s",
    type=click.FloatRange(0.5, 120.0),
    default=10.0,
    show_default=True,
    help="Seconds that the driver has to answer.",
)
@click.option("--only", type=click.Choice(_CHECKED), default=_CHECKED[0], show_default=True, help="What to check.")
@output_option
@click.pass_context
def doctor(context: click.Context, /, only: str, state: Path | None, **looks: Any) -> None:
    """Say what is wrong with this installation and what to do; change nothing.

    Checks this machine and the controller. Exit code 0: nothing failed (warnings may be there); 1: something did.
    """
    settings: CliSettings = context.obj
    where = state or doctor_machine.find_state_folder(os.environ, is_root=os.geteuid() == 0)
    chosen = DoctorOptions(state=where, **looks)
    findings: list[Finding] = []
    if only != "controller":
        findings += _machine(settings, chosen)
    if only != "machine":
        findings += _controller(settings, chosen)
    print_plain(settings, [asdict(finding) for finding in findings], _lines(findings))
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
        f"{counts[FindingStatus.SKIPPED]} not checked (-o json says how to have them checked)"
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
    """Those that daemons of ours have by default on this machine, or were told to have."""
    from eelgrid_protos import transport

    for purpose, flag, address, is_rpc in (
        ("controller", "--listen", settings.controller, True),
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
    """Whether gRPC is spoken there; a server with TLS shows its certificate instead."""
    import grpc

    from eelgrid_controller.cli.doctor_tls import fetch_certificate

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
    """The text of a page of metrics, or why it could not be had."""
    url = address if "://" in address else f"http://{address}/metrics"
    if not url.startswith(("http://", "https://")):
        return ValueError(f"{url} is no address of http or https")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - the scheme is checked above
            text: str = answer.read(_PAGE_BYTES_MOST).decode("utf-8", "replace")
            return text
    except (OSError, ValueError, urllib.error.URLError) as error:
        return error


def _certificates(settings: CliSettings) -> Iterator[Finding]:
    from eelgrid_controller.cli.doctor_tls import fetch_certificate, read_tls_state
    from eelgrid_protos import transport

    files = (settings.tls_certificate, settings.tls_key, settings.tls_authority)
    try:
        is_loopback = transport.is_loopback(settings.controller)
    except transport.ListenError:
        is_loopback = False
    certificate, key, authority = files
    if any(files) and not (certificate and key and authority):
        what = "only some of the three files are given"
        yield report_failure("TLS", what, "give --tls-certificate, --tls-key and --tls-authority together")
        return
    state = read_tls_state(certificate, key, authority) if certificate and key and authority else None
    yield from doctor_tls.check_tls_files(state, now_s=time.time(), is_loopback=is_loopback, insecure=settings.insecure)
    if state is not None:
        shown = fetch_certificate(settings.controller, settings.timeout_s)
        if shown is not None:
            host = settings.controller.rpartition(":")[0].strip("[]")
            yield doctor_tls.check_certificate("TLS, controller's", shown, now_s=time.time(), host=host)


def _call_or_finding(check: str, call: Callable[[], Any], *, optional: bool = False) -> Any:
    """What a call answered, or the finding that it did not."""
    from eelgrid_protos import faults
    from eelgrid_protos.transport import ListenError

    try:
        return call()
    except (faults.Fault, ListenError, click.UsageError) as error:
        message = getattr(error, "message", str(error))
        if isinstance(error, faults.Unavailable):  # gRPC tells of each address that it tried; the end is why
            message = message.rpartition(": ")[2]
        remedy = "see the check of the controller" if not optional else "nothing, unless an agent is to run here"
        return report_skipped(check, f"was not answered: {message}", remedy)


def _agent(settings: CliSettings, looks: DoctorOptions, *, has_gpus: bool) -> Iterator[Finding]:
    from eelgrid_controller.cli.connection import tls_files
    from eelgrid_protos import rpc, transport
    from eelgrid_protos.errors import ContractError

    try:
        channel = transport.open_blocking_channel(looks.agent, tls=tls_files(settings), insecure=settings.insecure)
    except (transport.ListenError, click.UsageError) as error:
        yield report_skipped(
            "agent", f"cannot be asked: {error}", "name it with --agent, and give the certificates that fit"
        )
        return
    client, timeout_s = rpc.build_client(rpc.NODE_SERVICE, channel), settings.timeout_s
    try:
        found = _call_or_finding(
            "agent", lambda: client.get_inventory(GetInventoryRequest(), timeout=timeout_s), optional=True
        )
        if isinstance(found, Finding):
            if has_gpus:
                remedy = "start eelgrid-agent (systemctl status eelgrid-agent), or name its --listen with --agent"
                found = report_warning("agent", f"none answers at {looks.agent}", remedy)
            yield found
            return
        yield from doctor_cluster.check_inventory(found.inventory)
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
            "agent", f"speaks another release of the contract ({error})", "bring eelctl and the agent to one release"
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
        yield report_failure("controller", f"cannot be asked: {error}", "correct --controller and the --tls options")
    except faults.Unavailable as error:
        what = f"none answers at {settings.controller} ({error.message.rpartition(': ')[2]})"
        yield report_failure(
            "controller", what, "start eelgrid-controller, or name another with --controller; see the checks of TLS"
        )
    except faults.Fault as error:
        yield report_failure(
            "controller", f"{settings.controller} refuses: {error.message}", "see the controller's log"
        )
    except ContractError as error:
        remedy = "install eelctl and the controller of one release"
        yield report_failure("controller", f"speaks another release of the contract ({error})", remedy)


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
        yield from doctor_cluster.check_budgets(
            promised.budgets, summary.measured_power_w, summary.measured_gpus, summary.gpus
        )
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
        return doctor_tls.check_role(client.who_am_i(WhoAmIRequest(), timeout=timeout_s))
    except faults.Internal as error:
        return report_skipped("role", f"was not answered: {error.message}", "a controller of this release tells it")


def _page(settings: CliSettings, looks: DoctorOptions) -> "doctor_cluster.MetricsAnswer | Finding":
    """The controller's page of metrics, or why there is none."""
    is_guess = not looks.metrics
    if is_guess and settings.controller != DEFAULT_CONTROLLER:
        what = "journal, drift, steward and Kubernetes are told by the controller's metrics alone"
        return report_skipped("metrics", what, "name them with --metrics HOST:PORT or a URL")
    address = looks.metrics or _CONTROLLER_METRICS
    text = _page_text(address, settings.timeout_s)
    if isinstance(text, Exception):
        if is_guess:
            return report_skipped(
                "metrics", f"nothing at {address} ({text})", "name them with --metrics HOST:PORT or a URL"
            )
        return report_failure("metrics", f"{address} cannot be read ({text})", "see the controller's --metrics")
    page = doctor_cluster.parse_metrics(text)
    if not page.is_ours:
        return report_failure(
            "metrics", f"{address} is not a controller's page", "name the controller's, not an agent's"
        )
    return page
