"""Metrics snapshot: an immutable view of the agent and its nodes for one scrape.

Plain values, which the collector fills and the renderer reads. None stands for what is unknown or absent, and has no
series.
"""

from collections.abc import Mapping
from dataclasses import field

from eelgrid_agent.devices.port import InstanceReadings, ReadingValue
from eelgrid_protos.messages import Gpu, Reading
from eelgrid_protos.values import dataclass

# Series of owners on one node: a few hundred pods, each on a few devices and by more than one method.
SHARES_MOST = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedValues:
    """Readings of one moment, and how long ago it was."""

    values: Mapping[Reading, ReadingValue]
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyDistribution:
    """How long calls took: how many took at most each of CALL_BOUNDS_S and, last, how many there were.

    And their sum.
    """

    below: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """What this process costs its machine."""

    cpu_s: float
    resident_bytes: float
    started_s: float
    threads: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The driver processes: their history, and the cost of the running ones."""

    starts: int
    hangs: int
    left_behind: int
    hung_gpus: int
    cpu_s: float
    resident_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The agent itself, all its nodes together."""

    version: str
    nodes: int
    connected_nodes: int
    samples: int
    batches: int
    dropped_samples: int
    connections: int
    uncounted_s: float
    spool_ticks: int
    batches_under_way: int
    refused_calls: int = 0
    term_refusals: int = 0
    # By engine, and whether its owner's state is known; by engine.
    leases: Mapping[tuple[str, str], int] = field(default_factory=dict)
    lease_refusals: Mapping[str, int] = field(default_factory=dict)
    lease_reclaims: int = 0
    lease_disputes: int = 0
    sample_age_s: float | None = None
    # Seconds that the newest look of each kind took.
    collection_s: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, LatencyDistribution] = field(default_factory=dict)
    process: ProcessView | None = None
    worker: WorkerView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The machine around the devices."""

    cpu_milli: int
    memory_bytes: int
    values: Mapping[Reading, ReadingValue]

    @property
    def cpus(self) -> float:
        """CPUs, also in parts."""
        return self.cpu_milli / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardView:
    """The plan in force and what the guard does about it."""

    plan_epoch: int
    enforcing: bool
    lease_left_s: float | None = None
    budget_w: float | None = None
    # Devices that an enforced budget cannot lower now.
    budget_fixed: int | None = None
    # By kind of setting.
    drift_repairs: Mapping[str, int] = field(default_factory=dict)
    # By the rule that refused.
    refusals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One device."""

    gpu: Gpu
    # FAST_READINGS, with ENERGY_J as the sampler counts it; and SLOW_READINGS.
    quick: TimedValues | None = None
    slow: TimedValues | None = None
    instances: tuple[InstanceReadings, ...] = ()
    instances_age_s: float | None = None
    energy_uncertainty_j: float | None = None
    # Joules without an owner, by the reason.
    unattributed_j: Mapping[str, float] = field(default_factory=dict)
    # Joules of owners that have no series any more.
    ended_j: float | None = None
    # By XID: how many, and when the last came, in seconds since 1970.
    xids: Mapping[str, int] = field(default_factory=dict)
    xid_last_s: Mapping[str, float] = field(default_factory=dict)
    quarantined: bool | None = None
    enforcement_suspended: bool | None = None
    # Whether a MIG layout is asked for and not reached.
    layout_unmet: bool | None = None
    # By anomaly, such as held_idle: whether it holds now.
    anomalies: Mapping[str, bool] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """Whether the device answers."""
        return not self.gpu.lost

    @property
    def cordoned(self) -> bool:
        """Whether the device should take no new work."""
        return bool(self.gpu.cordon)

    @property
    def mig_enabled(self) -> bool | None:
        """None on a part without MIG."""
        return self.gpu.mig_enabled if self.gpu.mig_capable else None

    @property
    def mig_pending(self) -> bool | None:
        """None on a part without MIG."""
        return self.gpu.mig_pending if self.gpu.mig_capable else None

    @property
    def ages_s(self) -> Mapping[str, float]:
        """By kind of look."""
        ages = {
            "quick": None if self.quick is None else self.quick.age_s,
            "slow": None if self.slow is None else self.slow.age_s,
            "instances": self.instances_age_s,
        }
        return {look: age_s for look, age_s in ages.items() if age_s is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersView:
    """Owners by the values of labels in their order; owners with equal labels are merged.

    `energy_j` is the energy of a device attributed to one owner since the agent started to count, by SHARE_LABELS.
    `idle_since_s` is when a device that an owner holds became idle, in seconds since 1970, by HOLDER_LABELS.
    """

    energy_j: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    idle_since_s: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    # Shares beyond SHARES_MOST, which are not shown.
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetricsView:
    """The one node of this process."""

    name: str
    pool: str
    driver_version: str
    boot_id: str
    simulated: bool
    access: str
    host: HostView
    gpus: tuple[GpuView, ...] = ()
    guard: GuardView | None = None
    owners: OwnersView = field(default_factory=OwnersView)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshot:
    """Everything that one page shows; a fleet of simulated nodes has no node of its own to show."""

    agent: AgentView
    node: NodeMetricsView | None = None
