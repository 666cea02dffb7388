"""Demand: the typical mix of tasks, learned from submissions, and the opportunity prices quoted for it.

Owns the counts by class, the mix that fragmentation is measured against, and when opportunity prices are invalid or
out of date. All of it is part of the state, a function of the events in order, so that a replay learns the same. Must
not know nodes, nor how prices are computed (eelgrid_kernels).

Theory: the mix is the most frequent classes that cover 95 % of tasks, as in FGD (Weng et al., USENIX ATC'23, section
4). It is recomputed when the number of tasks has grown by a twentieth. A decision depends on what the next tasks
would cost elsewhere, and that on the whole cluster at one moment. Computing prices for each decision would scale with
the size of the fleet, and a cache could make a replay decide differently. So the prices are an event of the journal:
they are computed again after a given number of tasks started or ended, and become invalid when the mix is recomputed
or a node joins.
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
    """Opportunity prices in whole watts for each class of the mix, the scarce models, and the load that they were computed at."""

    offers_w: tuple[int, ...] = ()
    scarce_models: tuple[str, ...] = ()
    load_permille: int = 0


NO_OPPORTUNITY_PRICES = OpportunityPrices()


class PriceMarket:
    """The prices in force, and the number of tasks that started or ended since; -1 if the prices are invalid."""

    __slots__ = ("quotes", "shifts")

    def __init__(self) -> None:
        self.quotes = NO_OPPORTUNITY_PRICES
        self.shifts = -1

    def invalidate(self) -> None:
        """Invalidates the prices, because the mix or the nodes changed."""
        self.quotes, self.shifts = NO_OPPORTUNITY_PRICES, -1

    def request_refresh(self) -> None:
        """Requests new prices; those in force stay valid until then."""
        self.shifts = -1

    def count_task_changes(self, tasks: int) -> None:
        """Counts tasks that started or ended."""
        if self.shifts >= 0:
            self.shifts += tasks

    def set_prices(self, quotes: OpportunityPrices) -> None:
        """Puts prices in force."""
        self.quotes, self.shifts = quotes, 0

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin = type(self)()
        twin.quotes, twin.shifts = self.quotes, self.shifts
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps plain values for a checkpoint."""
        quotes = self.quotes
        return {
            "offers_w": list(quotes.offers_w),
            "scarce_models": list(quotes.scarce_models),
            "load_permille": quotes.load_permille,
            "shifts": self.shifts,
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
        )
        market.shifts = plain["shifts"]
        return market
