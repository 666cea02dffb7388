"""The words of the ledger: who, where, and what was spent in an hour.

Owns these values and their bounds. Must not know where they are kept.

Joules that must add up are whole millijoules; money and carbon are floats, since a price is one.
"""

from typing import NamedTuple

from eelgrid_protos.messages import EnergyOwner, OwnerKind, WorkloadSpec

__all__ = ["HOUR_S", "Entry", "Holder", "Measured", "Place", "Spent", "holder_of", "namespace_of"]

HOUR_S = 3600
_LABELS_MOST = 16


class Place(NamedTuple):
    """Devices of one model on one node."""

    node_name: str
    pool: str
    gpu_model: str


def namespace_of(kind: str, namespace: str) -> str:
    """Under which name a holder's joules are summed by namespace; no namespace is written with parentheses."""
    if kind in ("unallocated", "unattributed"):
        return f"({kind})"
    return namespace or "(none)"


class Holder(NamedTuple):
    """Who is charged; what is unknown is empty. `kind` is OwnerKind's, by lower-case name."""

    kind: str
    namespace: str = ""
    name: str = ""  # the pod, the job with its step, the container, the unit
    workload: str = ""  # id of ours
    title: str = ""  # how its people call that workload
    user: str = ""
    queue: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_nobody(self) -> bool:
        """Whether no owner is charged: nobody held the place, or nobody could be named."""
        return self.kind in ("unallocated", "unattributed")


class Spent(NamedTuple):
    """Millijoules by part, money and grams of carbon."""

    bare_mj: int = 0
    context_mj: int = 0
    active_mj: int = 0
    cost: float = 0.0
    carbon_g: float = 0.0

    @property
    def energy_mj(self) -> int:
        """All parts."""
        return self.bare_mj + self.context_mj + self.active_mj

    def plus(self, other: "Spent") -> "Spent":
        """Both."""
        return Spent(
            self.bare_mj + other.bare_mj, self.context_mj + other.context_mj, self.active_mj + other.active_mj,
            self.cost + other.cost, self.carbon_g + other.carbon_g,
        )  # fmt: skip


class Entry(NamedTuple):
    """What one holder spent at one place, to be added to what the hour has; hours begin at whole hours of Unix time."""

    hour_s: int
    place: Place
    holder: Holder
    spent: Spent


class Measured(NamedTuple):
    """What the devices of one place drew in one hour, whoever it was for; to be added, as entries are."""

    hour_s: int
    place: Place
    total_mj: int
    uncertainty_mj: int
    uncounted_s: float


def holder_of(owner: EnergyOwner, spec: WorkloadSpec | None) -> Holder:
    """The holder for an owner as an agent names it; `spec` is of the workload that it names, where that is known."""
    name = owner.pod or owner.container or owner.unit
    if owner.kind is OwnerKind.SLURM:
        name = f"{owner.job}.{owner.step}" if owner.step else owner.job
    elif owner.kind is OwnerKind.RAY:
        name = owner.ray_job
    kind = owner.kind.name.lower()
    if spec is None:
        return Holder(kind, owner.namespace, name, owner.workload, "", owner.user)
    return Holder(
        kind=kind,
        namespace=owner.namespace or spec.namespace,
        name=name,
        workload=owner.workload,
        title=spec.name,
        user=owner.user or spec.user or spec.labels.get("user", ""),
        queue=spec.queue,
        labels=tuple(sorted(spec.labels.items()))[:_LABELS_MOST],
    )
