"""Configuration of the controller: every setting in one frozen, validated value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eelgrid_controller.core.drains import LOST_GPU_GRACE_S
from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.audit_log import AUDIT_ROWS_MOST
from eelgrid_protos.controller_addresses import is_reachable_name
from eelgrid_protos.roles import RoleRules
from eelgrid_protos.sockets import NAMES_MOST

_LABEL = re.compile(r"[a-z][a-z0-9_]{0,99}")
# Of targets; all other labels of a series are its own, and win.
_OWN_LABELS = frozenset({"instance", "job"})
# What a controller may do in a cluster beside placing gated pods; each needs rights of its own.
ABILITIES = frozenset({"claims", "devices", "jobs", "moves", "policies", "services", "slices", "taints"})

KUBERNETES_MODES = ("gate", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """How the webhook gates pods, in clusters without an admission policy."""

    listen: str
    # PEM files; reloaded on change.
    certificate: Path
    key: Path
    rules: GateRules = field(default_factory=GateRules)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """How a controller places the pods of a cluster."""

    # Empty for the service account of this pod, or else the user's kubeconfig.
    kubeconfig: str = ""
    context: str = ""
    # Namespace of the Lease; empty for this pod's own.
    namespace: str = ""
    lease_name: str = "eelgrid-controller"
    # Unique to this process; empty for the host's name and a random suffix.
    identity: str = ""
    # Kubernetes' own components use 15, 10 and 2 s.
    lease_s: float = 15.0
    # A pinned pod that cannot be scheduled for this long is deleted, and its owner recreates it.
    unbound_s: float = 30.0
    # Without a leader for this long, gates are removed without a placement; None for never.
    open_s: float | None = None
    abilities: frozenset[str] = frozenset()
    # "gate": kube-scheduler binds. "scheduler": pods that name the scheduler eelgrid are bound by this controller.
    mode: str = "gate"
    # The webhook answers with the node where the plan is certain; no binding follows then.
    pins_at_admission: bool = False
    # None if an admission policy of the cluster gates pods, or users do.
    webhook: WebhookConfig | None = None

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no controller can run with."""
        if unknown := sorted(self.abilities - ABILITIES):
            raise ControllerConfigError(f"abilities contain {unknown[0]!r}", f"use only {', '.join(sorted(ABILITIES))}")
        if self.mode not in KUBERNETES_MODES:
            raise ControllerConfigError(f"mode is {self.mode!r}", f"use {' or '.join(KUBERNETES_MODES)}")
        if self.pins_at_admission and (self.mode != "scheduler" or self.webhook is None):
            raise ControllerConfigError(
                "pins_at_admission needs mode scheduler and the webhook",
                "add --kubernetes-mode scheduler and --webhook-listen, or leave it out",
            )
        for name in ("lease_s", "unbound_s"):
            if not 1.0 <= getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds between 1 and 86400")
        if self.open_s is not None and self.open_s < 4.0 * self.lease_s:
            raise ControllerConfigError(
                f"open_s is {self.open_s}", f"give at least four leases, which is {4.0 * self.lease_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """The Slurm cluster whose jobs are steered, or advised about; its commands run on this machine."""

    # "steer": jobs that opted in are held, placed and released. "advise": nothing is held, nodes get weights.
    mode: str = "steer"
    # None: SLURM_CONF of this process, or Slurm's own default.
    conf: Path | None = None
    # The folder of squeue, sinfo, scontrol, sbatch and scancel; None: the PATH.
    commands: Path | None = None
    # Its slurmrestd, by which jobs and nodes are read: unix:/run/slurmrestd.sock or http://ctld:6820; empty for none. The token of
    # a JWT is read for each request, and is its own subject's unless it is of another user.
    rest: str = ""
    rest_token_file: Path | None = None
    rest_user: str = ""
    # Tells our job_submit plugin that somebody decides; the plugin must be able to read it.
    lease: Path = Path("/run/eelgrid/slurm-lease")
    lease_s: float = 30.0
    poll_s: float = 1.0
    # A placed job that Slurm refuses to start there is let go after so long; one that merely waits after ten times as long.
    patience_s: float = 30.0
    # Whether idle dynamic nodes are cut into the MIG slices that jobs wait for.
    mig_layouts: bool = False
    # Whether idle nodes sleep, and what that costs: measured at one node.
    power_save: bool = False
    idle_w: float = 800.0
    sleep_w: float = 15.0
    wake_s: float = 300.0
    # None: as much as being awake for the time of a wake-up, and a fifth.
    transition_j: float | None = None
    warm_nodes: int = 0
    waiting_share: float | None = None
    always_on: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no controller can run with."""
        if self.rest and not self.rest.startswith(("unix:/", "http://", "https://")):
            raise ControllerConfigError(
                f"--slurm-rest is {self.rest[:100]!r}", "give unix:/run/slurmrestd.sock, or such as http://ctld:6820"
            )
        if not 0.0 <= self.sleep_w < self.idle_w < 1e6:
            raise ControllerConfigError(f"sleep_w is {self.sleep_w:g}", f"give less than idle_w, {self.idle_w:g}")
        if not 1.0 <= self.wake_s <= 86_400.0:
            raise ControllerConfigError(f"wake_s is {self.wake_s:g}", "give seconds between 1 and 86400")
        if self.transition_j is not None and not 1.0 <= self.transition_j < 1e12:
            raise ControllerConfigError(f"transition_j is {self.transition_j:g}", "give joules, at least 1")
        if self.warm_nodes < 0 or not 0.0 <= (self.waiting_share or 0.0) <= 1.0:
            raise ControllerConfigError(
                "warm_nodes or waiting_share is out of range", "give nodes, and a share in [0, 1]"
            )
        for name, least in (("poll_s", 0.05), ("patience_s", 1.0), ("lease_s", 1.0)):
            if not least <= getattr(self, name) <= 3600.0:
                raise ControllerConfigError(
                    f"{name} is {getattr(self, name)}", f"give seconds between {least:g} and 3600"
                )
        if self.lease_s < 3.0 * self.poll_s:
            raise ControllerConfigError(
                f"lease_s is {self.lease_s}", f"give at least three looks, {3.0 * self.poll_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The Ray cluster that is followed, by its dashboard."""

    # Such as http://head:8265.
    address: str
    # Holds the token of a cluster that asks for one; read for each look.
    token_file: Path | None = None
    poll_s: float = 1.0
    # What the client library had placed is ended after nothing in Ray has held it for so long.
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no controller can run with."""
        if not self.address.startswith(("http://", "https://")):
            raise ControllerConfigError(
                f"--ray is {self.address[:100]!r}", "give the address of Ray's dashboard, such as http://head:8265"
            )
        for option, given_s, least_s in (("poll", self.poll_s, 0.05), ("patience", self.patience_s, 1.0)):
            if not least_s <= given_s <= 3600.0:
                raise ControllerConfigError(
                    f"--ray-{option} is {given_s}", f"give seconds between {least_s:g} and 3600"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWriteConfig:
    """The receiver of Prometheus remote write that keeps series for years."""

    # Such as http://prometheus:9090/api/v1/write.
    url: str
    # Seconds between samples of one series; as often as Prometheus scrapes by our documentation.
    interval_s: float = 15.0
    # Lines of NAME: VALUE, such as Authorization; read for each request.
    headers_file: Path | None = None
    # Of every series, such as cluster.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Most bytes that wait for the receiver, compressed: some six minutes of 1,213 nodes.
    buffer_bytes: int = 256 * 10**6

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no controller can run with."""
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or not self.url.isprintable() or " " in self.url:
            raise ControllerConfigError(
                f"--remote-write is {self.url[:200]!r}", "give a URL such as http://prometheus:9090/api/v1/write"
            )
        if parts.username is not None:
            raise ControllerConfigError(
                "--remote-write has a user's name in it", "write an Authorization line into --remote-write-headers"
            )
        if not 1.0 <= self.interval_s <= 3600.0:
            raise ControllerConfigError(
                f"--remote-write-interval is {self.interval_s:g}", "give seconds between 1 and 3600"
            )
        if not 10**6 <= self.buffer_bytes <= 10**11:
            raise ControllerConfigError(
                f"--remote-write-buffer is {self.buffer_bytes / 1e6:g} MB", "give between 1 and 100000"
            )
        if len(self.labels) > NAMES_MOST or any(
            not _LABEL.fullmatch(name) or name in _OWN_LABELS or not 0 < len(value) <= 200
            for name, value in self.labels.items()
        ):
            raise ControllerConfigError(
                "--remote-write-label has a name or a value that no series can have",
                f"give at most {NAMES_MOST}, such as cluster=berlin; {', '.join(sorted(_OWN_LABELS))} are taken",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """All settings of one ingest process."""

    # The controllers that may lead.
    controllers: tuple[str, ...]
    listen: str = "127.0.0.1:7443"
    metrics: str = "127.0.0.1:9464"
    probes: str = ""
    metrics_hosts: tuple[str, ...] = ()
    # Of agents; the controller judges them, too, by its own.
    roles: RoleRules = field(default_factory=RoleRules)
    # A clean stop waits this long for calls in progress.
    stop_s: float = 1.0

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no process can run with."""
        for address in self.controllers:
            if not is_reachable_name(address):
                raise ControllerConfigError(f"--ingest names {address[:100]!r}", "write HOST:PORT of each controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """All settings of one controller."""

    data: Path
    # The journal's, as a URL (runtime/stores.py); empty for SQLite in `data`.
    database: str = ""
    listen: str = "127.0.0.1:7443"
    metrics: str = "127.0.0.1:9464"
    # Separate address of the probes, which then wait for no other request; empty for none.
    probes: str = ""
    # Host names of the metrics address, in addition to addresses, localhost and this machine's name.
    metrics_hosts: tuple[str, ...] = ()
    # The live page; empty for none.
    page: str = ""
    # JSON over HTTP for the calls that change nothing; empty for none.
    http_api: str = ""
    # By which others call this controller; empty for the address that it listens on.
    advertise: str = ""
    # Seconds after which another controller on the same PostgreSQL takes over from one that is silent.
    lease_s: float = 10.0
    # Start from a journal that has lost acknowledged entries, and record the loss in it.
    accepts_journal_loss: bool = False
    # Collector of traces; empty for the one in the environment, or none.
    traces: str = ""
    # Placement policy to switch to at the start; None leaves it as it is.
    placement: str | None = None
    # Most commands in the queue; a decision takes about 1 ms, so a full queue is some seconds of work.
    queue_most: int = 4096
    # A batch ends at either bound: the first caller of a batch must not wait for the decisions of all others,
    # while one commit (0.4 ms measured) for each decision would cost as much as the decision.
    batch_most: int = 256
    batch_budget_s: float = 0.004
    # An agent that reconnects sooner was never away: a restart of the agent or a lost link is no event.
    away_grace_s: float = 10.0
    # After a restart every agent is disconnected; agents reconnect within their back-off, at most 30 s with jitter.
    restart_grace_s: float = 60.0
    # A checkpoint copies the whole state, so it waits for a quiet moment until the hard bound.
    checkpoint_events: int = 1000
    checkpoint_events_most: int = 50_000
    checkpoint_idle_s: float = 2.0
    # Events that are kept even if two checkpoints cover them: recent history for operators.
    retained_events: int = 10_000
    # A changed plan waits this long for more changes; a container takes longer to start.
    plan_interval_s: float = 0.1
    # Changes of workloads kept for watchers; one that falls further behind starts again from a listing.
    changes_most: int = 16_384
    # Decisions in the latency quantiles.
    decisions_most: int = 4096
    # Seconds between cycles of the objectives loop: as often as agents send by default.
    steer_s: float = 5.0
    # Seconds between scrapes of services and jobs: a p95 needs 20 requests in between.
    scrape_s: float = 15.0
    # Whether metrics on this machine's loopback are scraped; None: only if the API is on loopback itself, so that
    # whoever may name an address is on this machine anyway.
    scrape_loopback: bool | None = None
    # Replicas are removed when fewer sufficed for this long; the next ones a fifth of it later.
    scale_hold_s: float = 300.0
    # Seconds between evaluations of spending limits: energy windows arrive once a minute.
    spend_s: float = 60.0
    # Seconds for which a job is measured at each power limit.
    job_window_s: float = 30.0
    # Whether to simulate plain best fit for comparison; docs/explanation/savings.md has the cost.
    savings: bool = True
    # Roles and grants; they apply to connections with mutual TLS.
    roles: RoleRules = field(default_factory=RoleRules)
    # The users of this machine share the Unix socket, and prove who they are.
    local_users: bool = False
    # A lost node that holds no work is removed after this long; 0 for never. A week is longer than a repair takes.
    lost_node_ttl_s: float = 7 * 86_400.0
    # Work leaves a GPU that is lost after this long; 0 for never.
    lost_gpu_grace_s: float = LOST_GPU_GRACE_S
    # Whether nodes and GPUs are closed on which one job after the other fails as soon as it starts.
    quarantines: bool = True
    # New nodes that one certificate, or without TLS one address, may register per hour; twice as many in total.
    # Ten thousand nodes that share a certificate join an empty controller at once.
    registrations_most: int = 12_000
    # Most entries of the audit log; beyond it the oldest are deleted.
    audit_rows_most: int = AUDIT_ROWS_MOST
    # Maximum size of the energy ledger; beyond it the oldest hours are deleted. Ten thousand GPUs need 23 GB for all
    # retention ages (docs/how-to/energy-ledger.md); the rest is for rows that exporters have not confirmed.
    ledger_bytes_most: int = 40 * 10**9
    # A clean stop waits this long for calls in progress.
    stop_s: float = 1.0
    # None: no Kubernetes.
    kubernetes: KubernetesConfig | None = None
    # None: no Slurm.
    slurm: SlurmConfig | None = None
    # The jobs of a Flux instance, whose broker loads our module.
    flux: bool = False
    # None: no Ray.
    ray: RayConfig | None = None
    # None: nobody is sent series.
    remote_write: RemoteWriteConfig | None = None

    @property
    def is_engine_run(self) -> bool:
        """Whether an engine runs the work of nodes."""
        return self.flux or (self.kubernetes, self.slurm, self.ray) != (None, None, None)

    @property
    def core_options(self) -> Mapping[str, Any]:
        """What `core.Core` is made with: nodes of an engine wait for its report, and work leaves lost GPUs after a grace."""
        return {
            "joins_closed": self.is_engine_run,
            "lost_gpu_grace_s": self.lost_gpu_grace_s or None,
            "quarantines": self.quarantines,
        }

    def __post_init__(self) -> None:
        """Raises ControllerConfigError for values that no controller can run with."""
        for name in (
            "queue_most",
            "batch_most",
            "checkpoint_events",
            "changes_most",
            "decisions_most",
            "audit_rows_most",
            "registrations_most",
        ):
            if getattr(self, name) < 1:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give at least 1")
        for name in ("away_grace_s", "restart_grace_s", "checkpoint_idle_s", "plan_interval_s", "stop_s"):
            if not 0.0 <= getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds between 0 and 86400")
        for name in ("steer_s", "scrape_s", "scale_hold_s", "job_window_s", "spend_s"):
            if not 0.1 <= getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds between 0.1 and 86400")
        if not 0.5 <= self.lease_s <= 600.0:
            raise ControllerConfigError(f"lease_s is {self.lease_s}", "give seconds between 0.5 and 600")
        if self.advertise and not is_reachable_name(self.advertise):
            raise ControllerConfigError(f"advertise is {self.advertise!r}", "write HOST:PORT, as agents call it")
        for name in ("lost_node_ttl_s", "lost_gpu_grace_s"):
            if not (getattr(self, name) == 0.0 or 1.0 <= getattr(self, name) <= 1e9):
                problem = f"{name} is {getattr(self, name)}"
                raise ControllerConfigError(problem, "give seconds from 1 to 1e9, or 0 for never")
        if len(self.metrics_hosts) > NAMES_MOST:
            raise ControllerConfigError(
                f"metrics_hosts has {len(self.metrics_hosts)} names", f"give {NAMES_MOST} at most"
            )
        if self.ledger_bytes_most < 10**7:
            raise ControllerConfigError(f"ledger_bytes_most is {self.ledger_bytes_most} bytes", "give at least 0.01 GB")
        if self.checkpoint_events_most < self.checkpoint_events:
            raise ControllerConfigError(
                f"checkpoint_events_most is {self.checkpoint_events_most}",
                f"give at least checkpoint_events, which is {self.checkpoint_events}",
            )
