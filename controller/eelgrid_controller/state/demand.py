"""Demand: the typical mix of tasks, learned from submissions, and the opportunity prices quoted for it.

Owns the counts by class, the mix that fragmentation is measured against, and when opportunity prices are
invalid or out of date. All of it is part of the state, a function of the events in order, so that a replay
learns the same. Knows nothing of nodes, nor how prices are computed (eelgrid_kernels).

Theory: the mix is the most frequent classes that cover 95 % of tasks, as in FGD (Weng et al., USENIX ATC'23,
section 4). It is recomputed when the number of tasks has grown by a twentieth. A decision depends on what the
next tasks would cost elsewhere, and that on the whole cluster at one moment. Computing it for each decision
would cost with the size of the fleet, and a cache could make a replay decide otherwise; so the prices are an
event of the journal, computed again after so many tasks came or left, and invalid when the mix was recomputed
or a node joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from eelgrid_protos.messages import ResourceRequest

MIX_CLASSES_MOST = 64
# Distinct classes counted; beyond it the rarer half is forgotten.
CLASSES_KEPT_MOST = 4096
# Shares in per cent and growth in parts, so that all arithmetic is whole.
_COVERED_PERCENT = 95
_GROWTH_PARTS = 20


class TaskClass(NamedTuple):
    """Tasks that fragmentation cannot tell apart."""

    cpu_milli: int
    gpu_count: int
    gpu_milli: int
    gpu_models: tuple[str, ...]


def classify_request(request: ResourceRequest) -> TaskClass:
    """The class of a request; the order of its models is of no account."""
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
        """Demand that grows apart from this one."""
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
        """The plain shape, for a checkpoint."""
        return {
            "tasks": self.tasks,
            "refresh_at": self.refresh_at,
            "counts": [[*task[:3], list(task.gpu_models), count] for task, count in self.counts.items()],
            "mix": [[*task[:3], list(task.gpu_models), count] for task, count in self.mix],
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """The demand in a checkpoint."""
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
    """Whole watts that each class of the mix costs elsewhere, models that others will need, and the load then."""

    offers_w: tuple[int, ...] = ()
    scarce_models: tuple[str, ...] = ()
    load_permille: int = 0


NO_OPPORTUNITY_PRICES = OpportunityPrices()


class PriceMarket:
    """The quotes in force and how many tasks came or left since; -1 when they are void."""

    __slots__ = ("quotes", "shifts")

    def __init__(self) -> None:
        self.quotes = NO_OPPORTUNITY_PRICES
        self.shifts = -1

    def invalidate(self) -> None:
        """The mix or the nodes are others: offers mean nothing any more, new ones are due."""
        self.quotes, self.shifts = NO_OPPORTUNITY_PRICES, -1

    def request_refresh(self) -> None:
        """New quotes are due; those in force still mean something."""
        self.shifts = -1

    def count_task_changes(self, tasks: int) -> None:
        """So many tasks came or left."""
        if self.shifts >= 0:
            self.shifts += tasks

    def set_prices(self, quotes: OpportunityPrices) -> None:
        """Puts quotes in force."""
        self.quotes, self.shifts = quotes, 0

    def copy(self) -> Self:
        """A market that goes on apart from this one."""
        twin = type(self)()
        twin.quotes, twin.shifts = self.quotes, self.shifts
        return twin

    def dump(self) -> dict[str, Any]:
        """The plain shape, for a checkpoint."""
        quotes = self.quotes
        return {
            "offers_w": list(quotes.offers_w),
            "scarce_models": list(quotes.scarce_models),
            "load_permille": quotes.load_permille,
            "shifts": self.shifts,
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """The market in a checkpoint."""
        market = cls()
        offers: Sequence[int] = plain["offers_w"]
        market.quotes = OpportunityPrices(
            offers_w=tuple(offers),
            scarce_models=tuple(plain["scarce_models"]),
            load_permille=plain["load_permille"],
        )
        market.shifts = plain["shifts"]
        return market
