"""The values of the energy ledger: owners, places, energy by hour, work done beside it, and sums by namespace.

Energy that must add up is whole millijoules; money and carbon are floats, since a price is one.

Work (requests, tokens, units of jobs) is kept as increments, each with its interval, since a total says nothing
after its counter restarted. Seconds that nobody observed (a replica first seen after it had served, a counter that
began anew) are reported as missed: amounts never exceed what was done, so joules per unit are exact only where nothing
was missed, and an upper bound otherwise.

Counters by namespace never fall: a namespace with a counter of its own keeps it, and all others are counted under
`OTHER_NAMESPACES`. A namespace replaces the one that spent least when it has spent twice as much, so places change a
few dozen times over the orders of magnitude in between, not at each flush. Rates add up to everything that is booked.
"""

from collections.abc import Mapping
from typing import NamedTuple

from eelgrid_protos.messages import EnergyOwner, OwnerKind, WorkloadSpec

HOUR_S = 3600
_LABELS_MOST = 16


class LedgerPlace(NamedTuple):
    """Devices of one model on one node."""

    node_name: str
    pool: str
    gpu_model: str


def namespace_label(kind: str, namespace: str) -> str:
    """Under which name a holder's joules are summed by namespace; no namespace is written with parentheses."""
    if kind in ("unallocated", "unattributed"):
        return f"({kind})"
    return namespace or "(none)"


class EnergyHolder(NamedTuple):
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
    def is_unowned(self) -> bool:
        """Whether no owner is charged: nobody held the place, or nobody could be named."""
        return self.kind in ("unallocated", "unattributed")


class LedgerAmount(NamedTuple):
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

    def plus(self, other: "LedgerAmount") -> "LedgerAmount":
        """Both."""
        return LedgerAmount(
            self.bare_mj + other.bare_mj,
            self.context_mj + other.context_mj,
            self.active_mj + other.active_mj,
            self.cost + other.cost,
            self.carbon_g + other.carbon_g,
        )


class LedgerEntry(NamedTuple):
    """What one holder spent at one place, to be added to what the hour has; hours begin at whole hours of Unix time."""

    hour_s: int
    place: LedgerPlace
    holder: EnergyHolder
    spent: LedgerAmount


class MeasuredEnergy(NamedTuple):
    """What the devices of one place drew in one hour, whoever it was for; to be added, as entries are."""

    hour_s: int
    place: LedgerPlace
    total_mj: int
    uncertainty_mj: int
    uncounted_s: float


def resolve_holder(owner: EnergyOwner, spec: WorkloadSpec | None) -> EnergyHolder:
    """The holder for an owner as an agent names it; `spec` is of the workload that it names, where that is known."""
    name = owner.pod or owner.container or owner.unit
    if owner.kind is OwnerKind.SLURM:
        name = f"{owner.job}.{owner.step}" if owner.step else owner.job
    elif owner.kind is OwnerKind.RAY:
        name = owner.ray_job
    kind = owner.kind.name.lower()
    if spec is None:
        return EnergyHolder(kind, owner.namespace, name, owner.workload, "", owner.user)
    return EnergyHolder(
        kind=kind,
        namespace=owner.namespace or spec.namespace,
        name=name,
        workload=owner.workload,
        title=spec.name,
        user=owner.user or spec.user or spec.labels.get("user", ""),
        queue=spec.queue,
        labels=tuple(sorted(spec.labels.items()))[:_LABELS_MOST],
    )


NAMESPACES_MOST = 100
OTHER_NAMESPACES = "other"
_KNOWN_MOST = 10_000
# 4.6 x 10^15 J, of a million boards a lifetime: a counter stays there, so that it is always an integer of SQLite.
_SUM_MJ_MOST = 2**62


class NamespaceSum(NamedTuple):
    """Millijoules that a namespace has spent, those that its own counter had, and whether it has one now."""

    spent_mj: int = 0
    own_mj: int = 0
    is_shown: bool = False


class NamespaceSums:
    """All sums of a ledger; does not change."""

    def __init__(self, sums: Mapping[str, NamespaceSum], *, most: int = NAMESPACES_MOST) -> None:
        self.sums = sums
        self._most = most

    def plus(self, spent_mj: Mapping[str, int]) -> tuple["NamespaceSums", dict[str, NamespaceSum]]:
        """These sums with more millijoules by namespace, and those that changed."""
        after, changed = dict(self.sums), dict[str, NamespaceSum]()
        for name in sorted(spent_mj):
            # A namespace beyond those that can be known is OTHER, as one of that name is.
            key = name if name in after or len(after) < _KNOWN_MOST else OTHER_NAMESPACES
            known = after.get(key, NamespaceSum())
            own_mj = known.own_mj + spent_mj[name] if known.is_shown else known.own_mj
            after[key] = changed[key] = NamespaceSum(
                min(known.spent_mj + spent_mj[name], _SUM_MJ_MOST), min(own_mj, _SUM_MJ_MOST), known.is_shown
            )
        shown = {name for name, one in after.items() if one.is_shown}
        least = ""
        for name in sorted(changed.keys() - shown - {OTHER_NAMESPACES}):
            one = after[name]
            if len(shown) >= self._most:
                least = least or min(shown, key=lambda other: (after[other].spent_mj, other))
                if one.spent_mj < 2 * max(1, after[least].spent_mj):
                    continue
                after[least] = changed[least] = after[least]._replace(is_shown=False)
                shown.remove(least)
                least = ""
            # From this time on, with what comes now.
            now_mj = one.spent_mj - self.sums.get(name, NamespaceSum()).spent_mj
            after[name] = changed[name] = one._replace(own_mj=min(one.own_mj + now_mj, _SUM_MJ_MOST), is_shown=True)
            shown.add(name)
        return NamespaceSums(after, most=self._most), changed

    def counters_mj(self) -> dict[str, int]:
        """Millijoules by the name that they are counted under; OTHER only where anything is."""
        found = {name: one.own_mj for name, one in self.sums.items() if one.is_shown}
        other_mj = sum(one.spent_mj - one.own_mj for one in self.sums.values())
        return found | ({OTHER_NAMESPACES: other_mj} if other_mj else {})
