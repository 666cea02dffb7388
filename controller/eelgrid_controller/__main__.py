"""eelgrid-controller: flags, signals, and how errors look.

Owns the command line and the life of the process. Knows of the controller only
how it is started and stopped (composition.py).
"""

import asyncio
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules
from eelgrid_controller.errors import ControllerConfigError, ControllerError
from eelgrid_controller.runtime.access_control import parse_bindings, parse_user_grants
from eelgrid_controller.runtime.config import ABILITIES, ControllerConfig, KubernetesConfig, WebhookConfig
from eelgrid_protos import __version__
from eelgrid_protos.log_lines import log_to_stderr
from eelgrid_protos.roles import RoleRules
from eelgrid_protos.sockets import raise_descriptor_limit
from eelgrid_protos.transport import ListenError, TlsFiles


async def _serve(config: ControllerConfig, *, tls: TlsFiles | None, insecure: bool) -> None:
    # numba takes a second to import, which --help and a wrong flag need not wait for.
    from eelgrid_controller.composition import Controller

    log = logging.getLogger("eelgrid.controller")
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop.set)
    controller = Controller(config, tls=tls, insecure=insecure, clock=Clock(), log=log)
    starting = asyncio.create_task(controller.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return
    line = await starting
    # The one line on standard output; programs that start a controller wait for it.
    click.echo(line)
    failed = controller.loop.failed
    await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    start_s = time.perf_counter()
    await controller.stop()
    log.info("stopped seconds=%.2f", time.perf_counter() - start_s)
    if failed.done():
        error = failed.result()
        raise (
            error
            if isinstance(error, ControllerError)
            else ControllerError(
                f"a fault in the controller ({error})",
                "its log has the details; start it again, nothing accepted is lost",
            )
        )


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise click.UsageError("give --tls-certificate, --tls-key and --tls-authority together, or none of them")
    return TlsFiles(certificate, key, authority)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(" ", "").split(",")))


_DEFAULTS = ControllerConfig(data=Path("eelgrid-data"))
_KUBERNETES = KubernetesConfig()
_UMASK = 0o027
_LOG_LINE = "%(asctime)s %(levelname)s %(name)s %(message)s"
_RULES = GateRules()


def _with_webhook(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of the webhook, and their value as `webhook`."""

    @click.option(
        "--webhook-listen",
        default="",
        metavar="ADDRESS",
        help="Gate new pods as a mutating webhook, for clusters without MutatingAdmissionPolicy.",
    )
    @click.option("--webhook-certificate", type=click.Path(path_type=Path), help="Its certificate chain, PEM.")
    @click.option("--webhook-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
    @click.option(
        "--webhook-resources",
        default=",".join(_RULES.prefixes),
        show_default=True,
        help="How names of resources begin that count as devices in namespaces that opted in.",
    )
    @click.option(
        "--webhook-excluded",
        default=",".join(sorted(_RULES.excluded)),
        show_default=True,
        help="Namespaces where it gates nothing.",
    )
    @click.option(
        "--webhook-toleration/--no-webhook-toleration",
        default=_RULES.tolerates,
        show_default=True,
        help="Whether gated pods tolerate the taint eelgrid.io/managed.",
    )
    @functools.wraps(function)
    def wrapped(
        *,
        webhook_listen: str,
        webhook_certificate: Path | None,
        webhook_key: Path | None,
        webhook_resources: str,
        webhook_excluded: str,
        webhook_toleration: bool,
        **others: Any,
    ) -> None:
        rules = GateRules(_names(webhook_resources), frozenset(_names(webhook_excluded)), webhook_toleration)
        webhook = None
        if webhook_listen:
            if webhook_certificate is None or webhook_key is None:
                missing = "--webhook-listen needs --webhook-certificate and --webhook-key: API servers ask by TLS"
                raise click.UsageError(missing)
            webhook = WebhookConfig(
                listen=webhook_listen, certificate=webhook_certificate, key=webhook_key, rules=rules
            )
        function(webhook=webhook, **others)

    return wrapped


def _with_kubernetes(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that knows its `webhook` the flags of a cluster, and their value as `kubernetes`."""

    @click.option("--kubernetes", is_flag=True, help="Place the gated pods of a Kubernetes cluster.")
    @click.option(
        "--kubeconfig", default="", metavar="FILE", help="Its kubeconfig; else the pod's own service account."
    )
    @click.option("--kubernetes-context", default="", metavar="NAME", help="Context of the kubeconfig.")
    @click.option(
        "--kubernetes-namespace", default="", metavar="NAME", help="Where the Lease lies, by which one leads."
    )
    @click.option(
        "--kubernetes-lease-name", default=_KUBERNETES.lease_name, show_default=True, help="Name of the Lease."
    )
    @click.option("--kubernetes-identity", default="", metavar="NAME", help="How the Lease names this process alone.")
    @click.option("--kubernetes-lease", type=float, default=_KUBERNETES.lease_s, show_default=True,
                  help="Seconds after which another may lead in the stead of one that is silent.")  # fmt: skip
    @click.option("--unbound-after", type=float, default=_KUBERNETES.unbound_s, show_default=True,
                  help="Seconds after which a pinned pod that cannot be scheduled is made anew by its owner.")  # fmt: skip
    @click.option("--fail-open-after", type=float,
                  help="Seconds without any leader after which gates are removed without a plan; never, if not given.")  # fmt: skip
    @click.option("--kubernetes-abilities", default="", metavar="NAMES",
                  help=f"What else it may do there, with commas: {', '.join(sorted(ABILITIES))}.")  # fmt: skip
    @functools.wraps(function)
    def wrapped(
        *,
        kubernetes: bool,
        kubeconfig: str,
        kubernetes_context: str,
        kubernetes_namespace: str,
        kubernetes_lease_name: str,
        kubernetes_identity: str,
        kubernetes_lease: float,
        unbound_after: float,
        fail_open_after: float | None,
        kubernetes_abilities: str,
        webhook: WebhookConfig | None,
        **others: Any,
    ) -> None:
        if webhook is not None and not kubernetes:
            raise click.UsageError("--webhook-listen needs --kubernetes: nobody would take the gates off again")
        try:
            cluster = KubernetesConfig(
                kubeconfig=kubeconfig,
                context=kubernetes_context,
                namespace=kubernetes_namespace,
                lease_name=kubernetes_lease_name,
                identity=kubernetes_identity,
                lease_s=kubernetes_lease,
                unbound_s=unbound_after,
                open_s=fail_open_after,
                abilities=frozenset(_names(kubernetes_abilities)),
                webhook=webhook,
            )
        except ControllerConfigError as error:
            _fail(error, 2)
        function(kubernetes=cluster if kubernetes else None, **others)

    return wrapped


def _with_roles(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of roles, and their value as `roles`."""

    @click.option(
        "--roles",
        "demand",
        type=click.Choice(["permit", "require"]),
        default="permit",
        show_default=True,
        help="Whether a certificate without a role may everything, or nothing.",
    )
    @click.option(
        "--grant",
        "grants",
        multiple=True,
        metavar="ROLE=KIND:NAME",
        help="Give certificates of this name a role, for example viewer=DNS:grafana.example; those with the "
        "organization eelgrid:ROLE have it by themselves. May be repeated.",
    )
    @click.option(
        "--bind",
        "binds",
        multiple=True,
        metavar="RIGHT=KIND:NAME",
        help="Let submitters' certificates of this name use a namespace, queue or label, or be of a user, for "
        "example namespace:research=CN:alice; those that name eelgrid:namespace:NAME may by themselves. "
        "May be repeated.",
    )
    @functools.wraps(function)
    def wrapped(*, demand: str, grants: tuple[str, ...], binds: tuple[str, ...], **others: Any) -> None:
        if others["tls_authority"] is None and (demand == "require" or grants or binds):
            raise click.UsageError(
                "--roles require, --grant and --bind need --tls-authority: roles are read of certificates"
            )
        try:
            rules = RoleRules(
                demanded=demand == "require", grants=parse_user_grants(grants), binds=parse_bindings(binds)
            )
        except ControllerConfigError as error:
            _fail(error, 2)
        function(roles=rules, **others)

    return wrapped


@click.command(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EELGRID_CONTROLLER"})
@click.option("--listen", default=_DEFAULTS.listen, show_default=True, help="Address of the gRPC server.")
@click.option("--metrics", default=_DEFAULTS.metrics, show_default=True, help="Address of /metrics and probes.")
@click.option(
    "--probes",
    default=_DEFAULTS.probes,
    metavar="ADDRESS",
    help="Address of /livez and /readyz alone, in a thread of their own; none, if not given.",
)
@click.option(
    "--metrics-host",
    "metrics_hosts",
    multiple=True,
    metavar="NAME",
    help="A name under which /metrics is scraped, beside addresses, localhost and this machine's name. May be "
    "repeated.",
)
@click.option("--page", default=_DEFAULTS.page, metavar="ADDRESS", help="Address of the live page; none, if not given.")
@click.option(
    "--traces",
    default=_DEFAULTS.traces,
    metavar="[http[s]://]HOST:PORT",
    help="Send traces of placements to this OTLP collector (gRPC); none, if neither this nor "
    "OTEL_EXPORTER_OTLP_ENDPOINT is given.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), default=_DEFAULTS.data, show_default=True, help="Journal's directory."
)
@click.option(
    "--accept-journal-loss",
    is_flag=True,
    help="Go on, this once, from a journal that has lost acknowledged entries, and record the loss in it.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="Our certificate chain, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option("--tls-authority", type=click.Path(path_type=Path), help="Whom to trust, PEM.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@click.option(
    "--away-grace",
    type=float,
    default=_DEFAULTS.away_grace_s,
    show_default=True,
    help="Seconds that an agent may be away before its node counts as lost.",
)
@click.option(
    "--restart-grace",
    type=float,
    default=_DEFAULTS.restart_grace_s,
    show_default=True,
    help="The same after a start of the controller.",
)
@click.option("--policy", metavar="NAME", help="Placement policy to go over to: eelgrid, fgd, pwr, pwr200, ...")
@click.option(
    "--steer-interval",
    type=float,
    default=_DEFAULTS.steer_s,
    show_default=True,
    help="Seconds between two looks at what was promised.",
)
@click.option(
    "--scrape-interval",
    type=float,
    default=_DEFAULTS.scrape_s,
    show_default=True,
    help="Seconds between two scrapes of a service's own metrics.",
)
@click.option(
    "--scrape-loopback/--no-scrape-loopback",
    default=None,
    help="Whether a service may name a page on this machine's loopback; by default where --listen is on it.",
)
@click.option(
    "--scale-hold",
    type=float,
    default=_DEFAULTS.scale_hold_s,
    show_default=True,
    help="Seconds for which fewer replicas must have been enough.",
)
@click.option(
    "--job-window",
    type=float,
    default=_DEFAULTS.job_window_s,
    show_default=True,
    help="Seconds for which a job is measured at a power limit.",
)
@click.option(
    "--spend-interval",
    type=float,
    default=_DEFAULTS.spend_s,
    show_default=True,
    help="Seconds between two looks at what is spent of spending limits.",
)
@click.option(
    "--ledger-limit",
    type=float,
    default=_DEFAULTS.ledger_bytes_most / 1e9,
    show_default=True,
    metavar="GB",
    help="Size of the energy ledger beyond which its oldest hours go, whoever has them elsewhere.",
)
@click.option(
    "--lost-node-ttl",
    "lost_node_ttl_s",
    type=float,
    default=_DEFAULTS.lost_node_ttl_s,
    show_default=True,
    help="Seconds after which a lost node that holds nothing is forgotten; 0 for never.",
)
@click.option(
    "--registrations",
    "registrations_most",
    type=click.IntRange(1, 10_000_000),
    show_default=True,
    default=_DEFAULTS.registrations_most,
    metavar="NODES",
    help="New nodes that one certificate, or address, may register in an hour; all together twice that.",
)
@click.option(
    "--audit-limit",
    "audit_rows_most",
    type=click.IntRange(1, 10_000_000),
    show_default=True,
    default=_DEFAULTS.audit_rows_most,
    metavar="ENTRIES",
    help="Entries of the audit log, beyond which the oldest go.",
)
@click.option(
    "--savings/--no-savings",
    default=_DEFAULTS.savings,
    show_default=True,
    help="Tell what placement saves against plain best fit.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Log to standard error from this level on.",
)
@click.version_option(__version__, prog_name="eelgrid-controller")
@_with_webhook
@_with_kubernetes
@_with_roles
def main(
    *,
    data: Path,
    accept_journal_loss: bool,
    metrics_hosts: tuple[str, ...],
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_authority: Path | None,
    insecure: bool,
    away_grace: float,
    restart_grace: float,
    policy: str | None,
    steer_interval: float,
    scrape_interval: float,
    scrape_loopback: bool | None,
    scale_hold: float,
    job_window: float,
    spend_interval: float,
    ledger_limit: float,
    savings: bool,
    kubernetes: KubernetesConfig | None,
    roles: RoleRules,
    log_level: str,
    **plain: Any,
) -> None:
    """Place and power GPU work; serve agents and operators over gRPC."""
    if not logging.getLogger().handlers:
        log_to_stderr(logging.getLogger(), log_level.upper(), _LOG_LINE)
    raise_descriptor_limit()
    # Journal, ledger and all else that we write are for our user and group alone.
    os.umask(_UMASK)
    tls = _tls(tls_certificate, tls_key, tls_authority)
    try:
        config = ControllerConfig(
            kubernetes=kubernetes,
            # Addresses and limits, as they were given.
            **plain,
            roles=roles,
            data=data,
            metrics_hosts=metrics_hosts,
            accepts_journal_loss=accept_journal_loss,
            away_grace_s=away_grace,
            restart_grace_s=restart_grace,
            placement=policy,
            steer_s=steer_interval,
            scrape_s=scrape_interval,
            scrape_loopback=scrape_loopback,
            scale_hold_s=scale_hold,
            job_window_s=job_window,
            spend_s=spend_interval,
            ledger_bytes_most=int(ledger_limit * 1e9),
            savings=savings,
        )
        asyncio.run(_serve(config, tls=tls, insecure=insecure))
    except (ControllerConfigError, ListenError) as error:
        _fail(error, 2)
    except ControllerError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> NoReturn:
    click.echo(f"eelgrid-controller: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
