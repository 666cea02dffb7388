"""Demand: the typical mix of tasks, learned from submissions, and the opportunity prices quoted for it.

Owns the counts by class, the mix that fragmentation is measured against, and when opportunity prices are invalid or
out of date. All of it is part of the state, a function of the events in order, so that a replay learns the same. Must
not know nodes, nor how prices are computed (eelgrid_kernels).

Theory: the mix is the most frequent classes that cover 95 % of tasks, as in FGD (Weng et al., USENIX ATC'23, section
4). It is recomputed when the number of tasks has grown by a twentieth. A decision depends on what the next tasks
would cost elsewhere, and that on the whole cluster at one moment. Computing prices for each decision would scale with
the size of the fleet, and a cache could make a replay decide differently. So the prices are an event of the journal:
they are computed again after a given number of tasks started or ended, and become invalid when the mix is recomputed
or a node joins. They depend on the turnover, since CPU that a GPU lacks is there again soon where tasks end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from eelgrid_protos.messages import ResourceRequest

MIX_CLASSES_MOST = 64
# Distinct classes counted; beyond it the rarer half is forgotten.
CLASSES_KEPT_MOST = 4096
# Shares in per cent and growth in parts, so that all arithmetic is in integers.
_COVERED_PERCENT = 95
_GROWTH_PARTS = 20
# At each quote a 128th of what came and left is forgotten; the turnover is told in quarters.
TURNOVER_SHIFT = 7
TURNOVER_STEP = 250


class TaskClass(NamedTuple):
    """A class of tasks with equal effect on fragmentation."""

    cpu_milli: int
    gpu_count: int
    gpu_milli: int
    gpu_models: tuple[str, ...]


def classify_request(request: ResourceRequest) -> TaskClass:
    """Returns the class of a request; the order of its models does not matter."""
    models = request.gpu_models
    return TaskClass(
        request.cpu_milli, request.gpu_count, request.gpu_milli, tuple(sorted(set(models))) if models else ()
    )


class Demand:
    """Counts of tasks by class, and the mix in force."""

    __slots__ = ("counts", "mix", "refresh_at", "tasks")

    def __init__(self) -> None:
        self.counts: dict[TaskClass, int] = {}
        self.tasks = 0
        self.refresh_at = 1
        self.mix: tuple[tuple[TaskClass, int], ...] = ()

    def observe(self, request: ResourceRequest, replicas: int) -> None:
        """Counts each replica as one task."""
        task = classify_request(request)
        self.counts[task] = self.counts.get(task, 0) + replicas
        self.tasks += replicas
        if len(self.counts) > CLASSES_KEPT_MOST:
            self.counts = dict(self._rank_classes()[: CLASSES_KEPT_MOST // 2])
        if self.tasks >= self.refresh_at:
            self.mix = self._typical()
            self.refresh_at = self.tasks + max(1, self.tasks // _GROWTH_PARTS)

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin = type(self)()
        twin.counts, twin.mix = self.counts.copy(), self.mix
        twin.tasks, twin.refresh_at = self.tasks, self.refresh_at
        return twin

    def _rank_classes(self) -> list[tuple[TaskClass, int]]:
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))

    def _typical(self) -> tuple[tuple[TaskClass, int], ...]:
        wanted = _COVERED_PERCENT * sum(self.counts.values())
        covered = 0
        typical = []
        for task, count in self._rank_classes()[:MIX_CLASSES_MOST]:
            typical.append((task, count))
            covered += count
            if 100 * covered >= wanted:
                break
        return tuple(typical)

    def dump(self) -> dict[str, Any]:
        """Dumps plain values for a checkpoint."""
        return {
            "tasks": self.tasks,
            "refresh_at": self.refresh_at,
            "counts": [[*task[:3], list(task.gpu_models), count] for task, count in self.counts.items()],
            "mix": [[*task[:3], list(task.gpu_models), count] for task, count in self.mix],
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads demand from a checkpoint."""
        demand = cls()
        demand.tasks = plain["tasks"]
        demand.refresh_at = plain["refresh_at"]
        demand.counts = dict(map(_parse_row, plain["counts"]))
        demand.mix = tuple(map(_parse_row, plain["mix"]))
        return demand


def _parse_row(row: Sequence[Any]) -> tuple[TaskClass, int]:
    cpu_milli, gpu_count, gpu_milli, models, count = row
    return TaskClass(cpu_milli, gpu_count, gpu_milli, tuple(models)), count


@dataclass(frozen=True, slots=True, kw_only=True)
class OpportunityPrices:
    """Opportunity prices in whole watts for each class of the mix, the scarce models, and the load and turnover then.

    Stockouts are the probabilities that each class with several GPUs runs out of places, () where nothing ends.
    """

    offers_w: tuple[int, ...] = ()
    scarce_models: tuple[str, ...] = ()
    load_permille: int = 0
    turnover_permille: int = 0
    stockout_permille: tuple[int, ...] = ()


NO_OPPORTUNITY_PRICES = OpportunityPrices()


class PriceMarket:
    """The prices in force, the number of tasks that started or ended since, -1 if the prices are invalid, and the turnover."""

    __slots__ = ("came_milli", "left_milli", "quotes", "shifts")

    def __init__(self) -> None:
        self.quotes = NO_OPPORTUNITY_PRICES
        self.shifts = -1
        self.came_milli = self.left_milli = 0

    @property
    def turnover_permille(self) -> int:
        """Returns how much GPU was given back lately for each that was taken, in a few steps, so that prices rest."""
        share = min(1000, self.left_milli * 1000 // max(1, self.came_milli))
        return (share + TURNOVER_STEP // 2) // TURNOVER_STEP * TURNOVER_STEP

    def invalidate(self) -> None:
        """Invalidates the prices, because the mix or the nodes changed."""
        self.quotes, self.shifts = NO_OPPORTUNITY_PRICES, -1

    def request_refresh(self) -> None:
        """Requests new prices; those in force stay valid until then."""
        self.shifts = -1

    def count_task_changes(self, request: ResourceRequest, came: int, left: int) -> None:
        """Counts tasks that started or ended, each with this request."""
        if self.shifts >= 0:
            self.shifts += came + left
        self.came_milli += came * request.gpu_count * request.gpu_milli
        self.left_milli += left * request.gpu_count * request.gpu_milli

    def set_prices(self, quotes: OpportunityPrices) -> None:
        """Puts prices in force; what came and left before counts less from now on."""
        self.quotes, self.shifts = quotes, 0
        self.came_milli -= self.came_milli >> TURNOVER_SHIFT
        self.left_milli -= self.left_milli >> TURNOVER_SHIFT

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin = type(self)()
        twin.quotes, twin.shifts = self.quotes, self.shifts
        twin.came_milli, twin.left_milli = self.came_milli, self.left_milli
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps plain values for a checkpoint."""
        quotes = self.quotes
        return {
            "offers_w": list(quotes.offers_w),
            "scarce_models": list(quotes.scarce_models),
            "load_permille": quotes.load_permille,
            "turnover_permille": quotes.turnover_permille,
            "stockout_permille": list(quotes.stockout_permille),
            "shifts": self.shifts,
            "came_milli": self.came_milli,
            "left_milli": self.left_milli,
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads prices from a checkpoint."""
        market = cls()
        offers: Sequence[int] = plain["offers_w"]
        market.quotes = OpportunityPrices(
            offers_w=tuple(offers),
            scarce_models=tuple(plain["scarce_models"]),
            load_permille=plain["load_permille"],
            turnover_permille=plain.get("turnover_permille", 0),  # these and the next are absent from older checkpoints
            stockout_permille=tuple(plain.get("stockout_permille", ())),
        )
        market.shifts = plain["shifts"]
        market.came_milli, market.left_milli = plain.get("came_milli", 0), plain.get("left_milli", 0)
        return market
