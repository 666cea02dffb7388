"""Quotas of a tree of queues: what may start now, and which queue and resource lack how much if it may not.

`QuotaTree` keeps the usage of every queue as work starts and ends, and answers in the depth of the tree. Must not know
workloads: it adds and removes amounts of resources at queues.

Theory (Kueue's hierarchical cohorts, pkg/cache/scheduler/resource_node.go). Of one resource, with N the nominal quota and
L the lending limit of a queue:

    quota(q) = N(q) + sum over children c of quota(c) - kept(c)      kept(q) = max(0, quota(q) - L(q)), 0 without L
    held(q)  = its usage, or the sum over children c of max(0, held(c) - kept(c))

A request of d fits into a queue with a parent if held + d <= quota + borrowing limit, and if what then exceeds kept(q)
fits into the parent; at the top, if held + d <= quota. So what a queue keeps is always there for it, and what it lends
comes back as soon as borrowers end. A usage limit bounds the plain sum of what runs in and below a queue. A resource is
counted but not bounded in a tree where no queue gives it a quota; where some do, the others have a nominal quota of 0.

What is lent follows from what is borrowed: of what the children of a queue borrow, the queue's own nominal quota covers
the first part, then the unused quota of its other children, in proportion, and the rest it borrows itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from eelgrid_protos.messages import MODEL_PREFIX, QUEUE_RESOURCES, Queue, QueueQuota, QueueUsage

Amounts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaShortage:
    """Why a request does not fit: at which queue, of which resource, and by how much.

    `bound` names what is exceeded: quota, at the top of a tree, borrowing or usage. `used` of `most` are in use there,
    and of the request `more` would be.
    """

    queue: str
    resource: str
    bound: str
    used: int
    most: int
    more: int

    @property
    def lack(self) -> int:
        """How much must become free, or be added to the bound."""
        return self.used + self.more - self.most


class _Cell:
    """One resource of one queue."""

    __slots__ = (
        "borrowing_limit",
        "held",
        "is_bounded",
        "kept",
        "lending_limit",
        "nominal",
        "potential",
        "quota",
        "total",
        "usage_limit",
        "used",
    )

    def __init__(self) -> None:
        self.nominal = self.quota = self.kept = self.held = self.used = 0
        self.borrowing_limit: int | None = None
        self.lending_limit: int | None = None
        self.usage_limit: int | None = None
        # The most that could be held if nothing else ran.
        self.potential = 0
        # The nominal quotas of the queue and those below it.
        self.total = 0
        self.is_bounded = False

    @property
    def borrowed(self) -> int:
        """What is held beyond the quota."""
        return max(0, self.held - self.quota)


class QuotaTree:
    """The quotas and the usage of a policy's queues; the queues must be a forest (`find_queue_violations`)."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        order = _order_by_depth(queues)
        self.queues: tuple[Queue, ...] = tuple(order)
        self.numbers = {queue.name: number for number, queue in enumerate(order)}
        self.parents = [self.numbers[queue.parent] if queue.parent else -1 for queue in order]
        self.children: list[list[int]] = [[] for _ in order]
        for number, parent in enumerate(self.parents):
            if parent >= 0:
                self.children[parent].append(number)
        self.tops = [number for number, parent in enumerate(self.parents) if parent < 0]
        # Of each queue: the top of its tree.
        self.roots = roots = list(range(len(order)))
        for number, parent in enumerate(self.parents):
            roots[number] = number if parent < 0 else roots[parent]
        self._cells: dict[str, list[_Cell | None]] = {}
        self._declare(order, roots)
        for cells in self._cells.values():
            self._compute_quotas(cells)

    def _declare(self, order: Sequence[Queue], roots: Sequence[int]) -> None:
        """Makes a cell for each queue of a tree that counts a resource."""
        quotas: dict[str, dict[int, QueueQuota]] = {resource: {} for resource in QUEUE_RESOURCES}
        for number, queue in enumerate(order):
            for quota in queue.quotas:
                quotas.setdefault(quota.resource, {})[number] = quota
        for resource, declared in quotas.items():
            bounded = {roots[number] for number in declared}
            cells: list[_Cell | None] = [
                _Cell() if resource in QUEUE_RESOURCES or root in bounded else None for root in roots
            ]
            for number, cell in enumerate(cells):
                if cell is None:
                    continue
                cell.is_bounded = roots[number] in bounded
                if number in declared:
                    own = declared[number]
                    cell.nominal, cell.usage_limit = own.nominal, own.usage_limit
                    cell.borrowing_limit, cell.lending_limit = own.borrowing_limit, own.lending_limit
            self._cells[resource] = cells

    def _compute_quotas(self, cells: Sequence[_Cell | None]) -> None:
        for number in range(len(cells) - 1, -1, -1):
            cell = cells[number]
            if cell is None:
                continue
            below = [one for child in self.children[number] if (one := cells[child]) is not None]
            cell.quota = cell.nominal + sum(one.quota - one.kept for one in below)
            cell.total = cell.nominal + sum(one.total for one in below)
            cell.kept = 0 if cell.lending_limit is None else max(0, cell.quota - cell.lending_limit)
        for number, cell in enumerate(cells):
            if cell is None:
                continue
            above = cells[self.parents[number]] if self.parents[number] >= 0 else None
            cell.potential = cell.quota
            if above is not None:
                cell.potential = cell.kept + above.potential
                if cell.borrowing_limit is not None:
                    cell.potential = min(cell.potential, cell.quota + cell.borrowing_limit)

    def _path(self, number: int) -> Iterable[int]:
        """Yields a queue and those above it."""
        while number >= 0:
            yield number
            number = self.parents[number]

    def list_siblings(self, number: int) -> Sequence[int]:
        """Returns the numbers of the queues with the same parent, itself among them."""
        return self.tops if self.parents[number] < 0 else self.children[self.parents[number]]

    def list_path(self, queue: str) -> list[Queue]:
        """Returns a queue and those above it."""
        return [self.queues[number] for number in self._path(self.numbers[queue])]

    def add(self, queue: str, amounts: Amounts, sign: int = 1) -> None:
        """Adds usage to a queue and those above it, or with a sign of -1 removes it."""
        for resource, amount in amounts.items():
            cells = self._cells.get(resource)
            change, held = sign * amount, sign * amount
            for number in self._path(self.numbers[queue]) if cells is not None else ():
                cell = cells[number] if cells is not None else None
                if cell is None:
                    break
                cell.used += change
                before = max(0, cell.held - cell.kept)
                cell.held += held
                held = max(0, cell.held - cell.kept) - before

    def find_shortage(self, queue: str, amounts: Amounts, *, when_empty: bool = False) -> QuotaShortage | None:
        """Returns what a request of a queue lacks now, or if nothing ran; None if it fits."""
        for resource, amount in amounts.items():
            cells = self._cells.get(resource)
            if cells is None or not amount:
                continue
            found = self._find_shortage_of(resource, cells, self.numbers[queue], amount, when_empty=when_empty)
            if found is not None:
                return found
        return None

    def _find_shortage_of(
        self, resource: str, cells: Sequence[_Cell | None], leaf: int, amount: int, *, when_empty: bool
    ) -> QuotaShortage | None:
        more = amount
        for number in self._path(leaf):
            cell = cells[number]
            if cell is None or not cell.is_bounded:
                return None
            used, held = (0, 0) if when_empty else (cell.used, cell.held)
            name, limit = self.queues[number].name, cell.usage_limit
            if limit is not None and used + amount > limit:
                return QuotaShortage(queue=name, resource=resource, bound="usage", used=used, most=limit, more=amount)
            is_top = self.parents[number] < 0
            most = cell.quota if is_top else inf
            if not is_top and cell.borrowing_limit is not None:
                most = cell.quota + cell.borrowing_limit
            if more and held + more > most:
                bound = "quota" if is_top else "borrowing"
                return QuotaShortage(queue=name, resource=resource, bound=bound, used=held, most=int(most), more=more)
            # What goes beyond what the queue keeps must be there above; usage limits are checked to the top.
            more = max(0, held + more - cell.kept) - max(0, held - cell.kept)
        return None

    def is_bounded(self, queue: str, resource: str) -> bool:
        """Returns whether a resource has a quota in the queue's tree."""
        cells = self._cells.get(resource)
        cell = None if cells is None else cells[self.numbers[queue]]
        return cell is not None and cell.is_bounded

    def governed_models(self, queue: str) -> frozenset[str]:
        """Returns the GPU models that have a quota in the queue's tree."""
        number = self.numbers[queue]
        return frozenset(
            resource.removeprefix(MODEL_PREFIX)
            for resource, cells in self._cells.items()
            if resource.startswith(MODEL_PREFIX) and cells[number] is not None
        )

    def borrowed_ratio(self, number: int) -> float:
        """Returns the dominant share of a queue beyond its quota, of what its parent could have at the most."""
        parent, found = self.parents[number], 0.0
        for cells in self._cells.values() if parent >= 0 else ():
            cell, above = cells[number], cells[parent]
            if cell is not None and above is not None and cell.is_bounded and cell.borrowed:
                found = max(found, cell.borrowed / above.potential if above.potential else inf)
        return found

    def is_borrowing(self, number: int, resources: Iterable[str]) -> bool:
        """Returns whether a queue holds more of any of these resources than its quota."""
        found = (self._cells[name][number] for name in resources if name in self._cells)
        return any(cell is not None and cell.is_bounded and cell.borrowed > 0 for cell in found)

    def is_beyond_quota(self, number: int, resources: Iterable[str]) -> bool:
        """Like `is_borrowing`, but where none of these resources has a quota, whatever a queue holds of them is beyond it."""
        found = [cell for name in resources if name in self._cells and (cell := self._cells[name][number]) is not None]
        bounded = [cell for cell in found if cell.is_bounded]
        return any(cell.borrowed > 0 for cell in bounded) if bounded else any(cell.used > 0 for cell in found)

    def list_used(self, number: int) -> tuple[int, ...]:
        """Returns what a queue and those below it use, by the order of QUEUE_RESOURCES."""
        cells = (self._cells[resource][number] for resource in QUEUE_RESOURCES)
        return tuple(0 if cell is None else cell.used for cell in cells)

    def usage(self, queue: str) -> tuple[QueueUsage, ...]:
        """Returns what a queue uses of each resource, of all that its tree counts."""
        number = self.numbers[queue]
        found = []
        for resource, cells in self._cells.items():
            cell = cells[number]
            if cell is None:
                continue
            most = None
            if cell.is_bounded:
                limits = [limit for at in self._path(number) if (limit := self._limit(cells, at)) is not None]
                # What queues below it keep is never held above them.
                most = min([cell.potential + cell.total - cell.quota, *limits])
            found.append(
                QueueUsage(
                    resource=resource,
                    quota=cell.total,
                    used=cell.used,
                    borrowed=cell.borrowed if cell.is_bounded else 0,
                    lent=self._lent(cells, number) if cell.is_bounded else 0,
                    usage_most=most,
                )
            )
        return tuple(found)

    @staticmethod
    def _limit(cells: Sequence[_Cell | None], number: int) -> int | None:
        cell = cells[number]
        return None if cell is None else cell.usage_limit

    def _lent(self, cells: Sequence[_Cell | None], number: int) -> int:
        """Returns what siblings use of a queue's quota, in whole numbers that sum up."""
        parent = self.parents[number]
        above = cells[parent] if parent >= 0 else None
        if above is None:
            return 0
        siblings = [(child, cell) for child in self.children[parent] if (cell := cells[child]) is not None]
        borrowed = sum(cell.borrowed for _, cell in siblings)
        unused = [(child, max(0, cell.quota - max(cell.kept, cell.held))) for child, cell in siblings]
        total = sum(amount for _, amount in unused)
        lent = min(total, max(0, borrowed - above.nominal))
        before = 0
        for child, amount in unused:
            if child == number and total:
                return (before + amount) * lent // total - before * lent // total
            before += amount
        return 0


def _order_by_depth(queues: Sequence[Queue]) -> list[Queue]:
    """Returns the queues in depth-first order, each after its parent, siblings as they were declared."""
    below: dict[str, list[Queue]] = {}
    for queue in queues:
        below.setdefault(queue.parent, []).append(queue)
    found, stack = list[Queue](), list(reversed(below.get("", [])))
    while stack:
        queue = stack.pop()
        found.append(queue)
        stack.extend(reversed(below.get(queue.name, [])))
    return found
