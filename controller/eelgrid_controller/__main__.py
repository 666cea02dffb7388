"""eelgrid-controller: the command line of the controller daemon, its signals and its exit codes.

Owns the options and the life of the process. Must not know more of a controller than how it is started and stopped
(composition.py).
"""

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules
from eelgrid_controller.errors import ControllerConfigError, ControllerError
from eelgrid_controller.runtime.access_control import parse_bindings, parse_user_grants
from eelgrid_controller.runtime.config import (
    ABILITIES,
    KUBERNETES_MODES,
    ControllerConfig,
    IngestConfig,
    KubernetesConfig,
    RayConfig,
    RemoteWriteConfig,
    SlurmConfig,
    WebhookConfig,
)
from eelgrid_controller.runtime.interpreter import bound_stop, settle_interpreter
from eelgrid_protos import __version__
from eelgrid_protos.log_lines import log_to_stderr
from eelgrid_protos.roles import RoleRules
from eelgrid_protos.sockets import raise_descriptor_limit
from eelgrid_protos.transport import ListenError, TlsFiles, TlsFilesIncomplete, collect_tls_files


async def _serve(config: ControllerConfig, *, tls: TlsFiles | None, insecure: bool) -> None:
    # Importing numba takes a second; --help and an invalid flag should not wait for it.
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
    settle_interpreter(collects=controller.following is None)
    # The only line on standard output; programs that start a controller wait for it.
    click.echo(line)
    failed = controller.loop.failed
    await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    start_s = time.perf_counter()
    bound_stop(log)
    await controller.stop()
    log.info("event=stopped seconds=%.2f", time.perf_counter() - start_s)
    if failed.done():
        error = failed.result()
        raise (
            error
            if isinstance(error, ControllerError)
            else ControllerError(
                f"an internal error ({error})",
                "see the log for details, and start the controller again; nothing that it accepted is lost",
            )
        )


async def _serve_ingest(config: IngestConfig, *, tls: TlsFiles | None, insecure: bool) -> None:
    from eelgrid_controller.ingest_composition import IngestProcess

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log = logging.getLogger("eelgrid.ingest")
    process = IngestProcess(config, tls=tls, insecure=insecure, clock=Clock(), log=log)
    line = await process.start()
    settle_interpreter()
    click.echo(line)
    await stop.wait()
    bound_stop(log)
    await process.stop()


# What an ingest process takes; everything else is the controller's.
_OF_INGEST = frozenset(
    (
        "ingest", "listen", "metrics", "probes", "metrics_hosts", "tls_certificate", "tls_key", "tls_authority", "insecure",
        "demand", "grants", "binds", "log_level",
    )
)  # fmt: skip


def _read_ingest(given: dict[str, Any]) -> tuple[str, ...]:
    """Takes the controllers of an ingest process out of the options given; none where this is a controller."""
    controllers = _names(given.pop("ingest"))
    context = click.get_current_context()
    if controllers:
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            if (
                parameter.name not in _OF_INGEST
                and source is not click.core.ParameterSource.DEFAULT
                and source is not None
            ):
                raise click.UsageError(f"{parameter.opts[0]} is an option of the controller, and --ingest starts none")
    return controllers


def _read_tls(given: dict[str, Any]) -> TlsFiles | None:
    """Takes the TLS files out of the options given; None without them."""
    try:
        return collect_tls_files(*(given.pop(f"tls_{name}") for name in ("certificate", "key", "authority")))
    except TlsFilesIncomplete:
        raise click.UsageError(
            "--tls-certificate, --tls-key and --tls-authority belong together: give all three, or none"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(" ", "").split(",")))


_DEFAULTS = ControllerConfig(data=Path("eelgrid-data"))
_KUBERNETES = KubernetesConfig()
_SLURM = SlurmConfig()
_RAY = RayConfig(address="http://localhost:8265")
_REMOTE_WRITE = RemoteWriteConfig(url="http://localhost:9090/api/v1/write")
_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_UMASK = 0o027
_RULES = GateRules()
# Setting of each option that has another name.
_SETTINGS = {
    "accept_journal_loss": "accepts_journal_loss",
    "away_grace": "away_grace_s",
    "job_window": "job_window_s",
    "lease": "lease_s",
    "ledger_limit": "ledger_bytes_most",
    "policy": "placement",
    "restart_grace": "restart_grace_s",
    "scale_hold": "scale_hold_s",
    "scrape_interval": "scrape_s",
    "spend_interval": "spend_s",
    "steer_interval": "steer_s",
}
_KUBERNETES_SETTINGS = {
    "fail_open_after": "open_s",
    "kubeconfig": "kubeconfig",
    "kubernetes_context": "context",
    "kubernetes_identity": "identity",
    "kubernetes_lease": "lease_s",
    "kubernetes_lease_name": "lease_name",
    "kubernetes_mode": "mode",
    "kubernetes_namespace": "namespace",
    "kubernetes_pin_at_admission": "pins_at_admission",
    "unbound_after": "unbound_s",
}
_SLURM_SETTINGS = {
    "slurm_mig_layouts": "mig_layouts",
    "slurm_power_save": "power_save",
    "slurm_idle_watts": "idle_w",
    "slurm_sleep_watts": "sleep_w",
    "slurm_transition_joules": "transition_j",
    "slurm_waiting_share": "waiting_share",
    "slurm_wake_seconds": "wake_s",
    "slurm_warm_nodes": "warm_nodes",
    "slurm_commands": "commands",
    "slurm_conf": "conf",
    "slurm_lease": "lease",
    "slurm_lease_seconds": "lease_s",
    "slurm_mode": "mode",
    "slurm_patience": "patience_s",
    "slurm_poll": "poll_s",
    "slurm_rest": "rest",
    "slurm_rest_token_file": "rest_token_file",
    "slurm_rest_user": "rest_user",
}
_RAY_SETTINGS = {
    "ray": "address",
    "ray_patience": "patience_s",
    "ray_poll": "poll_s",
    "ray_token_file": "token_file",
}
_OPTIONS = {
    "abilities": "--kubernetes-abilities",
    "lost_node_ttl_s": "--lost-node-ttl",
    "lost_gpu_grace_s": "--lost-gpu-grace",
    "metrics_hosts": "--metrics-host",
    **{
        setting: "--" + option.replace("_", "-")
        for option, setting in (_SETTINGS | _SLURM_SETTINGS | _KUBERNETES_SETTINGS).items()
    },
}


def _read_webhook(given: dict[str, Any], *, binds: bool) -> WebhookConfig | None:
    """Takes the options of the webhook out of those given; None without it."""
    listen, certificate, key, resources, excluded, tolerates = (
        given.pop(f"webhook_{name}") for name in ("listen", "certificate", "key", "resources", "excluded", "toleration")
    )
    if not listen:
        return None
    if certificate is None or key is None:
        missing = "--webhook-listen needs --webhook-certificate and --webhook-key: API servers connect by TLS"
        raise click.UsageError(missing)
    rules = GateRules(_names(resources), frozenset(_names(excluded)), tolerates, binds)
    return WebhookConfig(listen=listen, certificate=certificate, key=key, rules=rules)


def _read_kubernetes(given: dict[str, Any]) -> KubernetesConfig | None:
    """Takes the options of a Kubernetes cluster out of those given; None without one."""
    webhook, is_wanted = _read_webhook(given, binds=given["kubernetes_mode"] == "scheduler"), given.pop("kubernetes")
    if webhook is not None and not is_wanted:
        raise click.UsageError("--webhook-listen needs --kubernetes: without it, nothing would remove the gates")
    abilities = frozenset(_names(given.pop("kubernetes_abilities")))
    settings = {setting: given.pop(option) for option, setting in _KUBERNETES_SETTINGS.items()}
    cluster = KubernetesConfig(abilities=abilities, webhook=webhook, **settings)
    return cluster if is_wanted else None


def _check_engines(given: dict[str, Any]) -> None:
    """Refuses several engines."""
    engines = [f"--{name}" for name in ("kubernetes", "slurm", "flux", "ray") if given[name]]
    if len(engines) > 1:
        raise click.UsageError(f"{' and '.join(engines)} exclude each other: one engine says what runs on the nodes")


def _read_slurm(given: dict[str, Any]) -> SlurmConfig | None:
    """Takes the options of a Slurm cluster out of those given; None without one."""
    is_wanted = given.pop("slurm")
    always_on = frozenset(_names(given.pop("slurm_always_on")))
    settings = {setting: given.pop(option) for option, setting in _SLURM_SETTINGS.items()}
    cluster = SlurmConfig(always_on=always_on, **settings)
    return cluster if is_wanted else None


def _read_ray(given: dict[str, Any]) -> RayConfig | None:
    """Takes the options of a Ray cluster out of those given; None without one."""
    settings = {setting: given.pop(option) for option, setting in _RAY_SETTINGS.items()}
    return RayConfig(**settings) if settings["address"] else None


def _read_remote_write(given: dict[str, Any]) -> RemoteWriteConfig | None:
    """Takes the options of remote write out of those given; None without it."""
    url, interval_s, headers, labels, buffer_mb = (
        given.pop(f"remote_write{name}") for name in ("", "_interval", "_headers", "_labels", "_buffer")
    )
    if not url:
        return None
    return RemoteWriteConfig(
        url=url,
        interval_s=interval_s,
        headers_file=headers,
        labels=dict(label.partition("=")[::2] for label in labels),
        buffer_bytes=int(buffer_mb * 1e6),
    )


def _read_roles(given: dict[str, Any]) -> RoleRules:
    """Takes the options of roles out of those given."""
    demand, grants, binds = (given.pop(name) for name in ("demand", "grants", "binds"))
    if given["local_users"]:
        if not given["listen"].startswith("unix:") or given["tls_authority"] is not None:
            raise click.UsageError("--local-users needs --listen unix:PATH, and no --tls options")
        demand = "require"
    elif given["tls_authority"] is None and (demand == "require" or grants or binds):
        raise click.UsageError(
            "--roles require, --grant and --bind need --tls-authority: roles are read from client certificates"
        )
    return RoleRules(demanded=demand == "require", grants=parse_user_grants(grants), binds=parse_bindings(binds))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EELGRID_CONTROLLER"})
@click.option("--listen", default=_DEFAULTS.listen, show_default=True, help="Address of the gRPC server.")
@click.option(
    "--ingest",
    default="",
    metavar="HOST:PORT[,...]",
    help="Start an ingest process instead of a controller: it takes agents' connections and hands on what they say to the "
    "controller that leads of those at these addresses.",
)
@click.option("--metrics", default=_DEFAULTS.metrics, show_default=True, help="Address of /metrics and of the probes.")
@click.option(
    "--probes",
    default=_DEFAULTS.probes,
    metavar="ADDRESS",
    help="Separate address of /livez and /readyz, served by a thread of its own; none by default.",
)
@click.option(
    "--metrics-host",
    "metrics_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name under which /metrics is scraped, in addition to addresses, localhost and this machine's name. "
    "Repeatable.",
)
@click.option("--page", default=_DEFAULTS.page, metavar="ADDRESS", help="Address of the live page; none by default.")
@click.option(
    "--http-api",
    default=_DEFAULTS.http_api,
    metavar="ADDRESS",
    help="Address of the HTTP API, which answers the calls that change nothing as JSON; none by default.",
)
@click.option(
    "--traces",
    default=_DEFAULTS.traces,
    metavar="[http[s]://]HOST:PORT",
    help="Send traces of placements to this OTLP collector (gRPC); by default to OTEL_EXPORTER_OTLP_ENDPOINT, "
    "if that is set.",
)
@click.option(
    "--remote-write",
    default="",
    metavar="URL",
    help="Write series of devices, owners and this controller to this receiver of Prometheus remote write, such as "
    "http://prometheus:9090/api/v1/write; none by default.",
)
@click.option(
    "--remote-write-interval",
    type=float,
    default=_REMOTE_WRITE.interval_s,
    show_default=True,
    help="Seconds between two samples of a series that is written there.",
)
@click.option(
    "--remote-write-headers",
    type=_FILE,
    metavar="FILE",
    help="Lines of NAME: VALUE that are sent there with each request, such as Authorization or X-Scope-OrgID.",
)
@click.option(
    "--remote-write-label",
    "remote_write_labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="Label of all series that are written there, such as cluster=berlin. Repeatable.",
)
@click.option(
    "--remote-write-buffer",
    type=float,
    default=_REMOTE_WRITE.buffer_bytes / 1e6,
    show_default=True,
    metavar="MB",
    help="Most that waits for the receiver, compressed; beyond it the oldest samples are dropped.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=_DEFAULTS.data,
    show_default=True,
    help="Data directory: journal, audit log and energy ledger.",
)
@click.option(
    "--database",
    default=_DEFAULTS.database,
    metavar="URL",
    help="Database of journal, audit log and energy ledger: postgresql://USER@HOST/DATABASE, or sqlite:///FOLDER; "
    "SQLite in --data by default. Passwords belong into PGPASSFILE.",
)
@click.option(
    "--lease",
    type=float,
    default=_DEFAULTS.lease_s,
    show_default=True,
    help="Seconds after which another controller on the same PostgreSQL takes over from a silent one.",
)
@click.option(
    "--advertise",
    default=_DEFAULTS.advertise,
    metavar="HOST:PORT",
    help="Address of this controller for agents and eelctl, which one that follows it names; that of --listen by default.",
)
@click.option(
    "--accept-journal-loss",
    is_flag=True,
    help="Start once from a journal that has lost acknowledged entries, and record the loss in it.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="Certificate chain of the controller, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Private key of that certificate, PEM.")
@click.option("--tls-authority", type=click.Path(path_type=Path), help="CA that signs client certificates, PEM.")
@click.option("--insecure", is_flag=True, help="Listen on other addresses than loopback without TLS.")
@click.option(
    "--away-grace",
    type=float,
    default=_DEFAULTS.away_grace_s,
    show_default=True,
    help="Seconds that an agent may be disconnected before its node counts as lost.",
)
@click.option(
    "--restart-grace",
    type=float,
    default=_DEFAULTS.restart_grace_s,
    show_default=True,
    help="The same, after a start of the controller.",
)
@click.option("--policy", metavar="NAME", help="Switch to this placement policy: eelgrid, fgd, pwr, pwr200, ...")
@click.option(
    "--steer-interval",
    type=float,
    default=_DEFAULTS.steer_s,
    show_default=True,
    help="Seconds between two cycles of the objectives loop.",
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
    help="Whether a service may name a metrics address on loopback; by default only if --listen is on loopback.",
)
@click.option(
    "--scale-hold",
    type=float,
    default=_DEFAULTS.scale_hold_s,
    show_default=True,
    help="Seconds for which fewer replicas must suffice before a service is scaled down.",
)
@click.option(
    "--job-window",
    type=float,
    default=_DEFAULTS.job_window_s,
    show_default=True,
    help="Seconds for which a job is measured at each power limit.",
)
@click.option(
    "--spend-interval",
    type=float,
    default=_DEFAULTS.spend_s,
    show_default=True,
    help="Seconds between two evaluations of spending limits.",
)
@click.option(
    "--ledger-limit",
    type=float,
    default=_DEFAULTS.ledger_bytes_most / 1e9,
    show_default=True,
    metavar="GB",
    help="Maximum size of the energy ledger; beyond it the oldest hours are deleted, even if not exported.",
)
@click.option(
    "--lost-node-ttl",
    "lost_node_ttl_s",
    type=float,
    default=_DEFAULTS.lost_node_ttl_s,
    show_default=True,
    help="Seconds after which a lost node that holds no work is removed; 0 for never.",
)
@click.option(
    "--lost-gpu-grace",
    "lost_gpu_grace_s",
    type=float,
    default=_DEFAULTS.lost_gpu_grace_s,
    show_default=True,
    metavar="SECONDS",
    help="Seconds after which work leaves a GPU that is lost, and returns to the queue; 0 for never.",
)
@click.option(
    "--quarantine/--no-quarantine",
    "quarantines",
    default=_DEFAULTS.quarantines,
    show_default=True,
    help="Cordon nodes and GPUs on which one job after the other fails as soon as it starts.",
)
@click.option(
    "--registrations",
    "registrations_most",
    type=click.IntRange(1, 10_000_000),
    show_default=True,
    default=_DEFAULTS.registrations_most,
    metavar="NODES",
    help="New nodes that one certificate or address may register per hour; twice as many in total.",
)
@click.option(
    "--audit-limit",
    "audit_rows_most",
    type=click.IntRange(1, 10_000_000),
    show_default=True,
    default=_DEFAULTS.audit_rows_most,
    metavar="ENTRIES",
    help="Maximum number of entries in the audit log; beyond it the oldest are deleted.",
)
@click.option(
    "--savings/--no-savings",
    default=_DEFAULTS.savings,
    show_default=True,
    help="Estimate what placement saves compared with plain best fit.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Minimum level of log records on standard error.",
)
@click.version_option(__version__, prog_name="eelgrid-controller")
@click.option(
    "--webhook-listen",
    default="",
    metavar="ADDRESS",
    help="Serve a mutating webhook that gates new pods, for clusters without MutatingAdmissionPolicy.",
)
@click.option("--webhook-certificate", type=click.Path(path_type=Path), help="Certificate chain of the webhook, PEM.")
@click.option("--webhook-key", type=click.Path(path_type=Path), help="Private key of the webhook, PEM.")
@click.option(
    "--webhook-resources",
    default=",".join(_RULES.prefixes),
    show_default=True,
    help="Prefixes of the resource names that count as devices, in namespaces that opted in; comma-separated.",
)
@click.option(
    "--webhook-excluded",
    default=",".join(sorted(_RULES.excluded)),
    show_default=True,
    help="Namespaces in which no pod is gated; comma-separated.",
)
@click.option(
    "--webhook-toleration/--no-webhook-toleration",
    default=_RULES.tolerates,
    show_default=True,
    help="Whether gated pods tolerate the taint eelgrid.io/managed.",
)
@click.option("--kubernetes", is_flag=True, help="Place the gated pods of a Kubernetes cluster.")
@click.option("--kubeconfig", default="", metavar="FILE", help="Its kubeconfig; the pod's service account by default.")
@click.option("--kubernetes-context", default="", metavar="NAME", help="Context of the kubeconfig.")
@click.option(
    "--kubernetes-namespace",
    default="",
    metavar="NAME",
    help="Namespace of the Lease for leader election; the pod's own by default.",
)
@click.option("--kubernetes-lease-name", default=_KUBERNETES.lease_name, show_default=True, help="Name of that Lease.")
@click.option(
    "--kubernetes-identity",
    default="",
    metavar="NAME",
    help="Unique name of this process in the Lease; the host's name and a random suffix by default.",
)
@click.option("--kubernetes-lease", type=float, default=_KUBERNETES.lease_s, show_default=True,
              help="Seconds after which another controller may take over from a silent leader.")  # fmt: skip
@click.option("--kubernetes-mode", type=click.Choice(KUBERNETES_MODES), default=_KUBERNETES.mode, show_default=True,
              help="gate: kube-scheduler binds pods; scheduler: this controller binds those that name the scheduler eelgrid.")  # fmt: skip
@click.option("--kubernetes-pin-at-admission", is_flag=True,
              help="With mode scheduler: the webhook answers with the node where the plan is certain, so that no binding follows.")  # fmt: skip
@click.option("--unbound-after", type=float, default=_KUBERNETES.unbound_s, show_default=True,
              help="Seconds after which a pinned pod that cannot be scheduled is deleted, for its owner to recreate.")  # fmt: skip
@click.option("--fail-open-after", type=float,
              help="Seconds without a leader after which gates are removed without a placement; never by default.")  # fmt: skip
@click.option("--kubernetes-abilities", default="", metavar="NAMES",
              help=f"Further Kubernetes features to enable, comma-separated: {', '.join(sorted(ABILITIES))}.")  # fmt: skip
@click.option("--slurm", is_flag=True, help="Steer the jobs of a Slurm cluster that opted in; needs Slurm's commands.")
@click.option("--slurm-conf", type=_FILE, metavar="FILE",
              help="Its slurm.conf; SLURM_CONF or Slurm's default otherwise.")  # fmt: skip
@click.option("--slurm-commands", type=_FOLDER, metavar="DIR", help="Folder of Slurm's commands; the PATH by default.")
@click.option("--slurm-lease", type=_FILE, metavar="FILE", default=_SLURM.lease, show_default=True,
              help="File by which job_submit.lua knows that this controller decides.")  # fmt: skip
@click.option("--slurm-lease-seconds", type=float, default=_SLURM.lease_s, show_default=True,
              help="Seconds after which jobs are no more held if this controller is silent.")  # fmt: skip
@click.option(
    "--slurm-poll", type=float, default=_SLURM.poll_s, show_default=True, help="Seconds between looks at Slurm."
)
@click.option("--slurm-mode", type=click.Choice(["steer", "advise"]), default=_SLURM.mode, show_default=True,
              help="Hold, place and release jobs that opted in, or only have Slurm prefer nodes by their weights.")  # fmt: skip
@click.option("--slurm-patience", type=float, default=_SLURM.patience_s, show_default=True,
              help="Seconds after which a placed job that Slurm refuses there is left to Slurm.")  # fmt: skip
@click.option("--slurm-rest", default="", metavar="ADDRESS",
              help="Its slurmrestd, such as unix:/run/slurmrestd.sock, which answers instead of squeue and sinfo as long as it does.")  # fmt: skip
@click.option(
    "--slurm-rest-token-file", type=_FILE, metavar="FILE", help="Holds the JWT for a slurmrestd that asks for one."
)
@click.option("--slurm-rest-user", default="", metavar="NAME", help="Whose the JWT is, if not its subject's.")
@click.option("--slurm-mig-layouts", is_flag=True,
              help="Cut idle dynamic nodes of partitioned pools into the MIG slices that Slurm's jobs wait for.")  # fmt: skip
@click.option("--slurm-power-save", is_flag=True,
              help="Have idle nodes sleep, by Slurm's SuspendProgram and ResumeProgram.")  # fmt: skip
@click.option("--slurm-idle-watts", type=float, default=_SLURM.idle_w, show_default=True, help="Watts of an idle node.")
@click.option(
    "--slurm-sleep-watts", type=float, default=_SLURM.sleep_w, show_default=True, help="Watts of one that sleeps."
)
@click.option("--slurm-wake-seconds", type=float, default=_SLURM.wake_s, show_default=True,
              help="Seconds from the order to wake up until a node takes work.")  # fmt: skip
@click.option("--slurm-transition-joules", type=float, default=None,
              help="Joules of going to sleep and waking up; 1.2 times an idle node's for the time of a wake-up by default.")  # fmt: skip
@click.option("--slurm-warm-nodes", type=int, default=_SLURM.warm_nodes, show_default=True,
              help="Idle nodes of each kind that are always awake, at least.")  # fmt: skip
@click.option("--slurm-waiting-share", type=float, default=None,
              help="Share of starts that may wait for a node to wake up; by default only --slurm-warm-nodes counts.")  # fmt: skip
@click.option("--slurm-always-on", default="", metavar="NODES", help="Nodes that never sleep, comma-separated.")
@click.option("--flux", is_flag=True, help="Schedule the jobs of a Flux instance, whose broker loads our module.")
@click.option("--ray", default="", metavar="URL",
              help="Follow the Ray cluster with this dashboard, such as http://head:8265.")  # fmt: skip
@click.option(
    "--ray-token-file", type=_FILE, metavar="FILE", help="Holds the token of a Ray cluster that asks for one."
)
@click.option("--ray-poll", type=float, default=_RAY.poll_s, show_default=True, help="Seconds between looks at Ray.")
@click.option("--ray-patience", type=float, default=_RAY.patience_s, show_default=True,
              help="Seconds after which work placed for Ray that nothing there holds is ended.")  # fmt: skip
@click.option(
    "--local-users",
    is_flag=True,
    help="With --listen unix:PATH: let every user of this machine in, who proves by a file beside the socket who it is. "
    "Users submit and see all work, and change their own; root and the controller's own user may do everything.",
)
@click.option(
    "--roles",
    "demand",
    type=click.Choice(["permit", "require"]),
    default="permit",
    show_default=True,
    help="permit: a certificate without a role may do everything; require: it may do nothing.",
)
@click.option(
    "--grant",
    "grants",
    multiple=True,
    metavar="ROLE=KIND:NAME",
    help="Grant a role to certificates with this name, for example viewer=DNS:grafana.example; certificates with "
    "the organization eelgrid:ROLE have it without a grant. Repeatable.",
)
@click.option(
    "--bind",
    "binds",
    multiple=True,
    metavar="RIGHT=KIND:NAME",
    help="Allow submitters' certificates with this name to use a namespace, queue or label, or to act as a user, "
    "for example namespace:research=CN:alice; certificates that name eelgrid:namespace:NAME may without it. "
    "Repeatable.",
)
def main(**given: Any) -> None:
    """Place and power GPU work; serve agents and operators over gRPC.

    The exit code is 0 after SIGTERM or SIGINT, 2 if an option, a file or an address cannot be used (an address that is
    in use among them), and 1 after any other failure, such as a stop that takes longer than 50 s.
    """
    try:
        controllers = _read_ingest(given)
        _check_engines(given)
        ray, remote_write = _read_ray(given), _read_remote_write(given)
        slurm = _read_slurm(given)
        kubernetes, roles = _read_kubernetes(given), _read_roles(given)
        if not logging.getLogger().handlers:
            log_to_stderr(logging.getLogger(), given["log_level"].upper())
        raise_descriptor_limit()
        # Journal, ledger and all other files that we write are for our user and group alone.
        os.umask(_UMASK)
        tls, insecure = _read_tls(given), given.pop("insecure")
        del given["log_level"]
        if controllers:
            config_of_ingest = IngestConfig(
                controllers=controllers,
                roles=roles,
                **{name: given[name] for name in ("listen", "metrics", "probes", "metrics_hosts")},
            )
            asyncio.run(_serve_ingest(config_of_ingest, tls=tls, insecure=insecure))
            return
        settings = {_SETTINGS.get(option, option): value for option, value in given.items()}
        settings["ledger_bytes_most"] = int(settings["ledger_bytes_most"] * 1e9)
        config = ControllerConfig(
            kubernetes=kubernetes, slurm=slurm, ray=ray, roles=roles, remote_write=remote_write, **settings
        )
        asyncio.run(_serve(config, tls=tls, insecure=insecure))
    except (ControllerConfigError, ListenError) as error:
        _fail(error, 2)
    except ControllerError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> NoReturn:
    # A configuration error begins with the setting, which people know by its option.
    setting, space, rest = str(error).partition(" ")
    click.echo(f"eelgrid-controller: {_OPTIONS.get(setting, setting)}{space}{rest}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
