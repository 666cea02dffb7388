"""Fair share: in which order the waiting work of a tree of queues is tried.

`PendingTree` holds the waiting work by queue, priority and user; `FairRound` yields each of it once. Must not know quotas
beyond a queue's share, nor how work is placed.

Order: falling priority; work that has waited for the age limit, by first submission; then, at the children of the lowest
common ancestor of two queues, the smaller weighted share, then the smaller weighted past use, and between users of one
queue the smaller past use; then first submission, which work that returned to the queue keeps.

Theory. The share of a queue is its dominant share beyond its quota, the largest over the resources of what it borrows
over what its parent could have at the most, over the queue's weight (Kueue's fair sharing, KEP-1714; dominant resource
fairness, Ghodsi et al., NSDI 2011). Past use is dominant, too: of each resource over the capacity of all nodes. A round
is a tournament: every queue keeps its children in a heap by the best work below them. Within a round keys only rise, as
work is placed, so an old key is a lower bound and is brought up to date when it is first in its heap. A round yields
every waiting workload that was there when it began and still is, and none twice; but of work of one queue, priority,
user and shape, what follows one that did not fit does not fit either, and is skipped at once. Quotas of a tree depend on
its own use alone: while all work of a tree was refused by quota and its use is the same, the tree is left out.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterable, Iterator

from eelgrid_controller.queueing.past_use import PastUse
from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.gangs import GangKey
from eelgrid_controller.state.pending_queue import PendingTicket
from eelgrid_protos.messages import GpuSharing, ResourceRequest

_NS = 1e9
# Priority, whether it is not yet aged, then by that: its number, or share, past use and number.
OrderKey = tuple[int, int, float, float, int]
# Of one request: what a replica needs, its traits, its load on a shared GPU, the number of replicas, whether it goes into
# MIG slices, and the run time and the time limit that were stated.
# Of equal work, also what it expects of time: its run time, time limit and deadline; and the gang of a part.
RequestShape = tuple[ResourceRequest, tuple[str, ...], GpuSharing | None, int, bool, float, float, int, GangKey | None]
# Priority, user and the number of a shape: what does not fit of one of them does not fit of the others.
_Group = tuple[int, str, int]
# In place of the version of a tree's use, where work waits for something else than quota.
NOT_BY_QUOTA = -1


class PendingTree:
    """The waiting work by queue number, priority, user and shape, each in the order of submission."""

    def __init__(self, queues: int) -> None:
        self.groups: list[dict[_Group, list[PendingTicket]]] = [{} for _ in range(queues)]
        self.counts = [0] * queues
        self._places: dict[str, tuple[int, _Group, PendingTicket, RequestShape]] = {}
        # By shape: its number, and how much waiting work has it.
        self._shapes: dict[RequestShape, list[int]] = {}
        self._next_shape = 0
        # The reason that all work of a group has, and at which use of its tree a quota refused it (else NOT_BY_QUOTA).
        self._reasons: dict[tuple[int, _Group], tuple[str, int]] = {}

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._places

    def add(self, queue: int, user: str, shape: RequestShape, ticket: PendingTicket) -> None:
        """Adds waiting work to a queue."""
        known = self._shapes.get(shape)
        if known is None:
            self._next_shape += 1
            known = self._shapes[shape] = [self._next_shape, 0]
        known[1] += 1
        group = (ticket[0], user, known[0])
        self._reasons.pop((queue, group), None)
        insort(self.groups[queue].setdefault(group, []), ticket)
        self.counts[queue] += 1
        self._places[ticket[2]] = queue, group, ticket, shape

    def discard(self, workload_id: str) -> None:
        """Removes work, if it waits here."""
        place = self._places.pop(workload_id, None)
        if place is None:
            return
        queue, group, ticket, shape = place
        known = self._shapes[shape]
        known[1] -= 1
        if not known[1]:
            del self._shapes[shape]
        tickets = self.groups[queue][group]
        del tickets[bisect_left(tickets, ticket)]
        if not tickets:
            del self.groups[queue][group]
            self._reasons.pop((queue, group), None)
        self.counts[queue] -= 1

    def has_reason(self, queue: int, group: _Group, reason: str) -> bool:
        """Returns whether all work of a group is known to have this reason."""
        known = self._reasons.get((queue, group))
        return known is not None and known[0] == reason

    def set_reason(self, queue: int, group: _Group, reason: str, use_version: int) -> None:
        """Notes that all work of a group has this reason, and at which use of its tree if a quota is the reason."""
        self._reasons[queue, group] = reason, use_version

    def is_refused(self, queue: int, use_version: int) -> bool:
        """Returns whether all work of a queue is refused by quota, at this use of its tree."""
        none = "", NOT_BY_QUOTA
        return all(self._reasons.get((queue, group), none)[1] == use_version for group in self.groups[queue])

    def forget_reason(self, workload_id: str) -> None:
        """Notes that work has a reason of its own."""
        place = self._places.get(workload_id)
        if place is not None:
            self._reasons.pop(place[:2], None)


class FairRound:
    """One round over the waiting work, which may take several steps while work comes and goes."""

    def __init__(
        self,
        tree: QuotaTree,
        pending: PendingTree,
        past: PastUse,
        *,
        is_aged: Callable[[str], bool],
        without: Container[int] = (),
    ) -> None:
        """Begins a round over all trees but those with these numbers of their tops."""
        self.past = past
        self._tree, self._pending, self._is_aged = tree, pending, is_aged
        self._examined: dict[tuple[int, _Group], PendingTicket] = {}
        # Of each queue: its children by the keys of their best work, or its groups by those of their next work.
        self._heaps: list[list[tuple[OrderKey, int]]] = [[] for _ in pending.groups]
        self._users: list[list[tuple[OrderKey, _Group]]] = [[] for _ in pending.groups]
        self._returned: PendingTicket | None = None
        self._is_over = False
        self._current: tuple[int, _Group]
        # While the heaps are filled, their keys are those of now.
        self._is_filling = True
        # The last place of the waiting work is that of work without a queue.
        unqueued = len(tree.queues)
        for number in range(unqueued, -1, -1):
            if number == unqueued or tree.roots[number] not in without:
                self._fill(number)
        self._top = self._list_children([*(top for top in tree.tops if top not in without), unqueued])
        self._is_filling = False

    def _fill(self, number: int) -> None:
        groups = self._pending.groups[number]
        if groups:
            found = ((self._group_key(number, group), group) for group in groups)
            self._users[number] = [(key, group) for key, group in found if key is not None]
            heapq.heapify(self._users[number])
        if number < len(self._tree.queues) and self._tree.children[number]:
            self._heaps[number] = self._list_children(self._tree.children[number])

    def _list_children(self, numbers: Iterable[int]) -> list[tuple[OrderKey, int]]:
        found = ((self._queue_key(number), number) for number in numbers)
        heap = [(key, number) for key, number in found if key is not None]
        heapq.heapify(heap)
        return heap

    def _next_of(self, number: int, group: _Group) -> PendingTicket | None:
        tickets = self._pending.groups[number].get(group)
        if not tickets:
            return None
        last = self._examined.get((number, group))
        place = 0 if last is None else bisect_right(tickets, last)
        return tickets[place] if place < len(tickets) else None

    def _group_key(self, number: int, group: _Group) -> OrderKey | None:
        """Returns the key of the next work of a user of one priority; None if there is no more."""
        ticket = self._next_of(number, group)
        if ticket is None:
            return None
        if self._is_aged(ticket[2]):
            return (ticket[0], 0, 0.0, 0.0, ticket[1])
        return (ticket[0], 1, 0.0, self.past.of_user(number, group[1]), ticket[1])

    def _refresh_users(self, number: int) -> OrderKey | None:
        """Brings the first of a queue's groups up to date; returns its key."""
        heap = self._users[number]
        if self._is_filling:
            return heap[0][0] if heap else None
        while heap:
            key, group = heap[0]
            fresh = self._group_key(number, group)
            if fresh is None:
                heapq.heappop(heap)
            elif fresh > key:
                heapq.heapreplace(heap, (fresh, group))
            else:
                return key
        return None

    def _refresh_children(self, heap: list[tuple[OrderKey, int]]) -> OrderKey | None:
        """Brings the first of a queue's children up to date; returns the key of its best work."""
        if self._is_filling:
            return heap[0][0] if heap else None
        while heap:
            key, number = heap[0]
            fresh = self._queue_key(number)
            if fresh is None:
                heapq.heappop(heap)
            elif fresh > key:
                heapq.heapreplace(heap, (fresh, number))
            else:
                return key
        return None

    def _queue_key(self, number: int) -> OrderKey | None:
        """Returns the key of a queue among its siblings; None if nothing is left in it or below it."""
        heap = self._heaps[number]
        best = self._refresh_children(heap) if heap else self._refresh_users(number)
        if best is None:
            return None
        if not best[1] or number == len(self._tree.queues):
            return best
        weight = self._tree.queues[number].weight
        share, past = self._tree.borrowed_ratio(number), self.past.of_queue(number)
        return (best[0], 1, share / weight, past / weight, best[4])

    def pop(self) -> PendingTicket | None:
        """Returns the next work to try; None at the end of the round."""
        if self._returned is not None:
            returned, self._returned = self._returned, None
            if returned[2] in self._pending:
                return returned
        if self._refresh_children(self._top) is None:
            self._is_over = True
            return None
        number = self._top[0][1]
        while self._heaps[number]:
            number = self._heaps[number][0][1]
        group = self._users[number][0][1]
        ticket = self._next_of(number, group)
        assert ticket is not None
        self._examined[number, group] = ticket
        self._current = number, group
        return ticket

    def skip_equals(self, reason: str) -> list[PendingTicket]:
        """Skips the rest of the last work's group; returns those of it that may have another reason than this."""
        number, group = self._current
        tickets = self._pending.groups[number].get(group)
        if not tickets:
            return []
        place = bisect_right(tickets, self._examined[number, group])
        self._examined[number, group] = tickets[-1]
        return [] if self._pending.has_reason(number, group, reason) else tickets[place:]

    def note_reason(self, reason: str, use_version: int) -> None:
        """Notes that all work of the last work's group has this reason now, like `PendingTree.set_reason`."""
        self._pending.set_reason(*self._current, reason, use_version)

    def __iter__(self) -> Iterator[PendingTicket]:
        """Yields the work that is left; whoever ends early continues later."""
        while (ticket := self.pop()) is not None:
            yield ticket

    @property
    def is_over(self) -> bool:
        """Whether all work was yielded."""
        return self._is_over

    def push_back(self, ticket: PendingTicket) -> None:
        """Returns work that was not tried after all; it is the next."""
        self._returned = ticket


def compute_age_check(submitted_ns: Callable[[str], int], now_ns: int, age_limit_s: float) -> Callable[[str], bool]:
    """Returns a function that says whether waiting work goes before fair share."""
    oldest_ns = now_ns - int(age_limit_s * _NS)
    return lambda workload_id: submitted_ns(workload_id) <= oldest_ns
