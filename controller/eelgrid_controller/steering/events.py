"""What steering is told, and what it asks for.

Owns the words between steering and whoever drives it: the daemon's shell or a simulated
world. Must not know what is done with them.

Every event carries `at_s`, seconds of any one clock that does not go back, e.g. Unix time.
An event that is old, unknown or comes twice changes nothing and is counted. A name is
that of the workload. Instructions may be carried out late, twice or never: steering goes
on from what it is told, not from what it asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.power.changes import Holding
from eelgrid_controller.power.curves import Curve
from eelgrid_controller.power.evidence import Shown
from eelgrid_controller.power.evidence import Window as JobWindow
from eelgrid_controller.power.exploration import Unusable
from eelgrid_controller.power.priors import Prior
from eelgrid_controller.power.promise import Promise
from eelgrid_controller.power.tariff import Tariff
from eelgrid_controller.serving.live import Window as ServiceWindowRead
from eelgrid_controller.serving.watch import Promised
from eelgrid_controller.steering.dividing import Problem
from eelgrid_controller.steering.sharing import Shared

__all__ = [
    "BudgetsSet", "Divide", "Divided", "Ended", "Event", "Instruction", "JobBegan", "JobForeseen", "JobMeasured",
    "JobMissed", "LimitConfirmed", "LimitFailed", "NodeBack", "NodeLeaseEnded", "NodeLost", "Past", "PricesSet", "Scale",
    "ServiceBegan",
    "ServiceServing", "ServiceWindow", "SetLimit", "Ticked",
]  # fmt: skip


class ServiceBegan(NamedTuple):
    """A service that promised something, with the replicas that it has been given; again to change what it promised."""

    at_s: float
    name: str
    promised: Promised
    replicas: int


class ServiceWindow(NamedTuple):
    """What the service did in a window that ends at `at_s`."""

    at_s: float
    name: str
    window: ServiceWindowRead


class ServiceServing(NamedTuple):
    """So many replicas serve now."""

    at_s: float
    name: str
    replicas: int


class Past(NamedTuple):
    """What a job had done before steering knew of it; all 0 for one that has just begun."""

    work: float = 0.0  # units
    time_s: float = 0.0
    earned_s: float = 0.0  # of its promised slowdown; negative if owed


@dataclass(frozen=True, slots=True)
class JobBegan:
    """A training job whose power limit is to be found; also one that has long been running.

    `held_w` is what was read back of each GPU, in the order of the holdings; empty for the largest of `limits_w`.
    """

    at_s: float
    name: str
    promise: Promise
    limits_w: tuple[float, ...]  # that may be set on each GPU
    holdings: tuple[Holding, ...]  # named job/node
    relatives: tuple[Curve, ...] = ()
    weight: float = 1.0
    held_w: tuple[float, ...] = ()
    past: Past = field(default_factory=Past)
    shown: Shown = field(default_factory=Shown)  # what it did itself at each limit, before steering knew of it


class JobMeasured(NamedTuple):
    """A window of a job that ends at `at_s`; it began after its limit had taken effect."""

    at_s: float
    name: str
    window: JobWindow


class JobForeseen(NamedTuple):
    """What a model says of a job's limits, the largest first; None for what was said before being wrong."""

    at_s: float
    name: str
    prior: Prior | None


class JobMissed(NamedTuple):
    """A window without a measurement."""

    at_s: float
    name: str
    reason: Unusable


class Ended(NamedTuple):
    """A service or a job is no more."""

    at_s: float
    name: str


class BudgetsSet(NamedTuple):
    """The budgets from now on; an empty tree for none."""

    at_s: float
    budgets: Budgets


class PricesSet(NamedTuple):
    """The prices from now on; None for the same price at all times."""

    at_s: float
    tariff: Tariff | None


class LimitConfirmed(NamedTuple):
    """What was read back of all GPUs of a holding after instruction `number`."""

    at_s: float
    number: int
    limit_w: float


class LimitFailed(NamedTuple):
    """Instruction `number` came to nothing; what the GPUs have now, None where it could not be read."""

    at_s: float
    number: int
    limit_w: float | None


class NodeLost(NamedTuple):
    """Nothing is known of the node from now on."""

    at_s: float
    node: str


class NodeLeaseEnded(NamedTuple):
    """A lost node has put back what it found."""

    at_s: float
    node: str


class NodeBack(NamedTuple):
    """The node is there again; limits of each GPU by name of the holding, as read back."""

    at_s: float
    node: str
    limits_w: Mapping[str, float]


class Divided(NamedTuple):
    """The answer to `Divide` of this number; None where none could be found."""

    at_s: float
    number: int
    shared: Shared | None


class Ticked(NamedTuple):
    """Time passed; to be told every few seconds."""

    at_s: float


Event = (
    ServiceBegan | ServiceWindow | ServiceServing | JobBegan | JobForeseen | JobMeasured | JobMissed | Ended
    | BudgetsSet | PricesSet | LimitConfirmed | LimitFailed | NodeLost | NodeLeaseEnded | NodeBack | Divided | Ticked
)  # fmt: skip


class Scale(NamedTuple):
    """The service should have so many replicas."""

    name: str
    replicas: int
    reason: str


class SetLimit(NamedTuple):
    """Set this limit on all GPUs of a holding, read it back, and answer with the number."""

    job: str
    holding: str
    node: str
    limit_w: float
    number: int
    reason: str


class Divide(NamedTuple):
    """Work out `dividing.solved(problem)` anywhere, and answer with the number; a later one makes it void."""

    number: int
    problem: Problem


Instruction = Scale | SetLimit | Divide
