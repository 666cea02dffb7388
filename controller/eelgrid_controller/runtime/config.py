"""Configuration of the controller: every setting in one frozen, validated value."""

from dataclasses import dataclass, field
from pathlib import Path

from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_protos.roles import RoleRules
from eelgrid_protos.sockets import NAMES_MOST

# What a controller may do in a cluster beside placing gated pods; each needs rights of its own.
ABILITIES = frozenset({"claims", "devices", "jobs", "moves", "policies", "services", "slices", "taints"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """How gates are put on where no admission policy does it."""

    listen: str
    # PEM; taken up anew when they change.
    certificate: Path
    key: Path
    rules: GateRules = field(default_factory=GateRules)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """How a controller places the pods of a cluster."""

    # Empty: the service account of the pod that we are in, else the user's own kubeconfig.
    kubeconfig: str = ""
    context: str = ""
    # Where the Lease lies; empty for the namespace that we are in.
    namespace: str = ""
    lease_name: str = "eelgrid-controller"
    # Of this process alone; empty for the host's name and a random word.
    identity: str = ""
    # Kubernetes' own components use 15, 10 and 2 s.
    lease_s: float = 15.0
    # A pinned pod that cannot be scheduled for so long is made anew by its owner.
    unbound_s: float = 30.0
    # Without any leader for so long, gates are removed without a plan; None for never.
    open_s: float | None = None
    abilities: frozenset[str] = frozenset()
    # None: a policy of the cluster gates pods, or their people do.
    webhook: WebhookConfig | None = None

    def __post_init__(self) -> None:
        """Refuse what no controller can run with."""
        if unknown := sorted(self.abilities - ABILITIES):
            raise ControllerConfigError(
                f"abilities name {unknown[0]!r}", f"give some of {', '.join(sorted(ABILITIES))}"
            )
        for name in ("lease_s", "unbound_s"):
            if not 1.0 <= getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds between 1 and 86400")
        if self.open_s is not None and self.open_s < 4.0 * self.lease_s:
            raise ControllerConfigError(
                f"open_s is {self.open_s}", f"give at least four leases, which is {4.0 * self.lease_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """How one controller runs."""

    data: Path
    listen: str = "127.0.0.1:7443"
    metrics: str = "127.0.0.1:9464"
    # Probes alone, which then wait for nobody; empty for those of the metrics address only.
    probes: str = ""
    # Names under which that is scraped, beside addresses, localhost and this machine's name.
    metrics_hosts: tuple[str, ...] = ()
    # The live page; empty for none.
    page: str = ""
    # Go on from a journal that has lost acknowledged entries, and record that in it.
    accepts_journal_loss: bool = False
    # Where traces of placements go; empty for where the environment says, or nowhere.
    traces: str = ""
    # The placement policy to go over to at the start; None leaves it as it is.
    placement: str | None = None
    # Commands that may wait; one decision takes about 1 ms, so a full queue is some seconds of work.
    queue_most: int = 4096
    # A batch ends at either bound: the first caller of a batch must not wait for the decisions of all others,
    # while one commit (0.4 ms measured) for each decision would cost as much as the decision.
    batch_most: int = 256
    batch_budget_s: float = 0.004
    # An agent that reconnects sooner was never away: a restart of the agent or a lost link is no event.
    away_grace_s: float = 10.0
    # After a restart every agent is away; agents come back within their back-off, which is at most 30 s.
    # Agents come back with jitter of up to 30 s after a controller that was away for long.
    restart_grace_s: float = 60.0
    # A checkpoint copies the whole state, so it waits for a quiet moment until the hard bound.
    checkpoint_events: int = 1000
    checkpoint_events_most: int = 50_000
    checkpoint_idle_s: float = 2.0
    # Events that stay even when two checkpoints cover them: the recent past for people who look.
    retained_events: int = 10_000
    # A changed plan waits this long for more changes; a container takes longer to start.
    plan_interval_s: float = 0.1
    # Changes of workloads kept for watchers; one that falls further behind starts again from a listing.
    changes_most: int = 16_384
    # Decisions in the latency quantiles.
    decisions_most: int = 4096
    # How often promises are looked at: as often as agents send by default.
    steer_s: float = 5.0
    # How often the metrics of services and jobs are asked for: a p95 needs 20 requests in between.
    scrape_s: float = 15.0
    # Whether pages of this machine's loopback are asked for; None where the API is on loopback itself, so that who may
    # name an address is on this machine anyway.
    scrape_loopback: bool | None = None
    # Replicas go when fewer were enough for so long; the next ones a fifth of it later.
    scale_hold_s: float = 300.0
    # How often the ledger is asked what is spent of spending limits: windows come once a minute.
    spend_s: float = 60.0
    # A job is measured for so long at each limit.
    job_window_s: float = 30.0
    # Whether what plain best fit would draw is followed beside; docs/explanation/savings.md has what it costs.
    savings: bool = True
    # Who may what, where connections are under mutual TLS.
    roles: RoleRules = field(default_factory=RoleRules)
    # A lost node that holds nothing is forgotten after so long; 0 for never. A week is longer than a repair takes.
    lost_node_ttl_s: float = 7 * 86_400.0
    # New node names that one certificate, or without TLS one address, may register in an hour; all together twice that.
    # Ten thousand nodes that share a certificate join an empty controller at once.
    registrations_most: int = 12_000
    # Entries of the audit log, beyond which the oldest go: see runtime/audit_table.py.
    audit_rows_most: int = 250_000
    # Of the energy ledger's file, beyond which its oldest hours go. Ten thousand GPUs need 23 GB for all that ages keep
    # (docs/how-to/energy-ledger.md); the rest is room for what exporters are behind with.
    ledger_bytes_most: int = 40 * 10**9
    # A clean stop waits this long for calls under way.
    stop_s: float = 1.0
    # None: no Kubernetes.
    kubernetes: KubernetesConfig | None = None

    def __post_init__(self) -> None:
        """Refuse what no controller can run with."""
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
        if not (self.lost_node_ttl_s == 0.0 or 1.0 <= self.lost_node_ttl_s <= 1e9):
            raise ControllerConfigError(
                f"lost_node_ttl_s is {self.lost_node_ttl_s}", "give seconds from 1 to 1e9, or 0 for never"
            )
        if len(self.metrics_hosts) > NAMES_MOST:
            raise ControllerConfigError(
                f"metrics_hosts has {len(self.metrics_hosts)} names", f"give {NAMES_MOST} at most"
            )
        if self.ledger_bytes_most < 10**7:
            raise ControllerConfigError(
                f"ledger_bytes_most is {self.ledger_bytes_most}", "give at least 10000000, which is 0.01 GB"
            )
        if self.checkpoint_events_most < self.checkpoint_events:
            raise ControllerConfigError(
                f"checkpoint_events_most is {self.checkpoint_events_most}",
                f"give at least checkpoint_events, which is {self.checkpoint_events}",
            )
