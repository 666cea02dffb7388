"""Preemption: which running work must end so that waiting work can start, found by a bounded search.

Owns who may be a victim of whom, in what order victims are tried, and the search for a set without one too many. Must not
know how victims are stopped, nor how a place is found: it asks a function whether the waiting work could start if some
work were gone, and that function decides by quota and placement together. So a yes is proven by a placement, and a no says
that it would not start if all that it may preempt were gone.

Rules. In its own queue, waiting work may preempt work of lower priority, if the queue says so. Work of other queues is a
victim only if its queue borrows, and all queues between it and the common ancestor of both do: so work inside the quota of
its queue is never a victim of another queue. To reclaim a quota (`nominal`), the waiting work must stay within that of
its queue, or of the one above it that is a child of that ancestor. By fair share (Kueue's two rules, KEP-1714), with the shares of the
two children of that ancestor: the victim's without the victim is at least that of the waiting work with it; and only if this
finds nothing, the victim's with the victim is more. Neither can be turned round: who was preempted has no right to the
place of the one that preempted it. By past use (`queueing.past_use`), beyond its quota: of those two children, the victim's
has used more for its weight, and still will have after the horizon. That can be turned round when the horizon has
passed; the minimum run time of the victim's queue makes what each queue preempts of others finite in every time. Where nothing that the work asks for has a quota,
every queue is beyond its own.

Order of victims: lowest priority, then the least GPU-seconds since the last checkpoint, then the youngest. A job that never
reports a checkpoint must not be safer for that: it counts as if it had made one at the median of those that report, though
not before its start.

Search. A few candidates are thought gone, then all: if that does not help, nothing does. Then bisection finds the shortest
prefix of the order with which the work could start; then what is not on the nodes of the found place, and after that one victim
after the other from the end of the order, is put back if the work could start all the same. The number of checks is bounded:
a larger search ends with victims that suffice, some of which may be more than are needed. A search can pause after each check
and go on later, with the same result as long as nothing changes.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from eelgrid_controller.queueing.past_use import UseExchange
from eelgrid_controller.queueing.quota import Amounts, QuotaTree
from eelgrid_controller.state.policy import cache_by_identity
from eelgrid_protos.messages import (
    MODEL_PREFIX,
    PreemptionReclaim,
    PreemptionVictims,
    PreemptionWithin,
    Queue,
    QueuePreemption,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

_NS = 1e9
NO_PREEMPTION = QueuePreemption()
# Each is a placement on altered nodes: 1 to 10 ms.
CHECKS_MOST = 40
# Tried before all: as many as mostly do, at a hundredth of the cost.
_FEW = (1, 4, 16)
FEW_MOST = _FEW[-1]
_WAIT_LEAST_S = 1.0
_WAITS_IN_HORIZON = 64.0


@cache_by_identity
def resolve_preemption(queues: tuple[Queue, ...]) -> Mapping[str, QueuePreemption]:
    """Returns the preemption rules of each queue: its own, or those of the nearest queue above it that has some."""
    by_name = {queue.name: queue for queue in queues}
    found: dict[str, QueuePreemption] = {}

    def resolve(queue: Queue) -> QueuePreemption:
        if queue.name not in found:
            above = by_name.get(queue.parent)
            found[queue.name] = queue.preemption or (NO_PREEMPTION if above is None else resolve(above))
        return found[queue.name]

    for queue in queues:
        resolve(queue)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionGainer:
    """The waiting work that is to start: its queue, its priority, and what it would be charged with."""

    queue: str
    priority: int
    amounts: Amounts

    @property
    def resources(self) -> frozenset[str]:
        """What it asks for, GPUs as a whole."""
        return frozenset(self.amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCandidate:
    """Running work that may be a victim: its charge, its nodes, and what its end would cost."""

    workload_id: str
    queue: str
    priority: int
    amounts: Amounts
    node_names: frozenset[str]
    started_ns: int
    # When it last reported a whole checkpoint; 0 if it never did.
    checkpointed_ns: int = 0


def compute_lost_gpu_s(one: PreemptionCandidate, now_ns: int, presumed_ns: float = 0.0) -> float:
    """Returns the GPU-seconds since the last checkpoint, or since the start; without a checkpoint `presumed_ns` counts as it."""
    last_ns = max(one.started_ns, one.checkpointed_ns or presumed_ns)
    return one.amounts.get("gpu", 0) / GPU_MILLI_WHOLE * max(0.0, now_ns - last_ns) / _NS


def order_candidates(candidates: Iterable[PreemptionCandidate], now_ns: int) -> list[PreemptionCandidate]:
    """Returns the candidates in the order in which they are victims."""
    found = list(candidates)
    # A checkpoint of an earlier attempt counts from the start of this one.
    reported = [max(one.checkpointed_ns, one.started_ns) for one in found if one.checkpointed_ns]
    middle_ns = median(reported) if reported else 0

    def key(one: PreemptionCandidate) -> tuple[int, float, int, str]:
        return one.priority, compute_lost_gpu_s(one, now_ns, middle_ns), -one.started_ns, one.workload_id

    return sorted(found, key=key)


class PreemptionRules:
    """Who may be a victim of one waiting workload, by priority, quota and fair share of one tree of queues."""

    def __init__(
        self, tree: QuotaTree, gainer: PreemptionGainer, rules: QueuePreemption, exchange: UseExchange | None = None
    ) -> None:
        """`exchange` is needed for reclaim by past use."""
        self._tree, self._gainer, self._rules, self._exchange = tree, gainer, rules, exchange
        self._paths: dict[str, list[int]] = {}
        # By queue: after how many seconds the first of its work that is no victim now by past use will be one.
        self._waits_s: dict[str, float | None] = {}

    @property
    def is_active(self) -> bool:
        """Whether it may preempt at all."""
        return bool(self._rules.within or self._rules.reclaim)

    def _path(self, queue: str) -> list[int]:
        if queue not in self._paths:
            self._paths[queue] = [self._tree.numbers[one.name] for one in self._tree.list_path(queue)]
        return self._paths[queue]

    def _split(self, queue: str) -> tuple[list[int], list[int]] | None:
        """Returns the queues of the gainer and of another below their common ancestor; None without one."""
        mine, theirs = self._path(self._gainer.queue), self._path(queue)
        if mine[-1] != theirs[-1]:
            return None
        common = set(mine) & set(theirs)
        return [one for one in mine if one not in common], [one for one in theirs if one not in common]

    def select(
        self, ordered: Sequence[PreemptionCandidate], *, most: int | None = None, is_lenient: bool = False
    ) -> list[PreemptionCandidate]:
        """Returns those that may be victims, each after those before it are gone, the first `most` of them if given.

        `is_lenient` is the second rule of fair share.
        """
        tree, gainer = self._tree, self._gainer
        removed = list[PreemptionCandidate]()
        tree.add(gainer.queue, gainer.amounts)
        try:
            for one in ordered:
                if most is not None and len(removed) >= most:
                    break
                if self._may_preempt(one, is_lenient=is_lenient):
                    tree.add(one.queue, one.amounts, -1)
                    removed.append(one)
        finally:
            for one in removed:
                tree.add(one.queue, one.amounts)
            tree.add(gainer.queue, gainer.amounts, -1)
        return removed

    def _may_preempt(self, one: PreemptionCandidate, *, is_lenient: bool) -> bool:
        gainer, tree = self._gainer, self._tree
        if one.queue == gainer.queue:
            return bool(self._rules.within) and one.priority < gainer.priority
        if not self._rules.reclaim:
            return False
        split = self._split(one.queue)
        if split is None or not split[0] or not split[1]:
            return False
        mine, theirs = split
        resources = list_related_resources(gainer.resources, one.amounts)
        if self._rules.reclaim is PreemptionReclaim.PAST_USE:
            if not all(tree.is_beyond_quota(number, resources) for number in theirs):
                return False
            return not tree.is_beyond_quota(mine[-1], gainer.resources) or self._is_owed(mine[-1], theirs[-1], one)
        if not all(tree.is_borrowing(number, resources) for number in theirs):
            return False
        if not tree.is_borrowing(mine[-1], gainer.resources):
            return True
        return self._rules.reclaim is PreemptionReclaim.FAIR_SHARE and self._is_fairer(
            mine[-1], theirs[-1], one, is_lenient=is_lenient
        )

    def _is_fairer(self, mine: int, theirs: int, one: PreemptionCandidate, *, is_lenient: bool) -> bool:
        tree = self._tree
        share_with_gainer = self._share(mine)
        if is_lenient:
            return self._share(theirs) > share_with_gainer
        tree.add(one.queue, one.amounts, -1)
        share_without = self._share(theirs)
        tree.add(one.queue, one.amounts)
        return share_without >= share_with_gainer

    def _is_owed(self, mine: int, theirs: int, one: PreemptionCandidate) -> bool:
        assert self._exchange is not None
        self._tree.add(one.queue, one.amounts, -1)
        is_due = self._exchange.is_due(mine, theirs)
        if not is_due and one.queue not in self._waits_s:
            self._waits_s[one.queue] = self._exchange.find_wait_s(mine, theirs)
        self._tree.add(one.queue, one.amounts)
        return is_due

    @property
    def wait_s(self) -> float | None:
        """After how many seconds work will be a victim by past use that is none now; None if nothing is known to be."""
        found = [wait_s for wait_s in self._waits_s.values() if wait_s is not None]
        if not found or self._exchange is None:
            return None
        # Searches come in such distances, though the first of several victims may be due before.
        return max(min(found), _WAIT_LEAST_S, self._exchange.horizon_s / _WAITS_IN_HORIZON)

    def _share(self, number: int) -> float:
        return self._tree.borrowed_ratio(number) / self._tree.queues[number].weight


def list_related_resources(wanted: Collection[str], held: Amounts) -> frozenset[str]:
    """Returns the resources that work holds and that other work asks for; GPUs of a model are GPUs."""
    return frozenset(name for name in held if name in wanted or (name.startswith(MODEL_PREFIX) and "gpu" in wanted))


_Place = TypeVar("_Place")


class FoundPlace(NamedTuple, Generic[_Place]):
    """Where the waiting work would go, and on which nodes that is."""

    place: _Place
    node_names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan(Generic[_Place]):
    """The victims and the place that their end makes free; none with the reason why not."""

    victims: tuple[PreemptionCandidate, ...] = ()
    place: _Place | None = None
    problem: str = ""
    checks: int = 0


FindPlace = Callable[[Sequence[PreemptionCandidate]], FoundPlace[_Place] | None]
_Result = TypeVar("_Result")
# Yields where it may pause, and returns its result.
SearchSteps = Generator[None, None, _Result]
_Found = tuple[list[PreemptionCandidate], FoundPlace[_Place]]


def finish_search(steps: SearchSteps[_Result]) -> _Result:
    """Runs a search to its end; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _Result = ended.value
            return result


class VictimSearch(Generic[_Place]):
    """One search; `find_place` says where the work would start if some were gone, None if nowhere."""

    def __init__(self, find_place: FindPlace[_Place], checks_most: int = CHECKS_MOST) -> None:
        self._find, self._most = find_place, checks_most
        self.checks = 0

    def check(self, victims: Sequence[PreemptionCandidate]) -> FoundPlace[_Place] | None:
        """Returns where the work would start without these victims."""
        self.checks += 1
        return self._find(victims)

    def run(self, candidates: Sequence[PreemptionCandidate], *, failed: int = 0) -> SearchSteps[PreemptionPlan[_Place]]:
        """Searches among candidates, in the order in which they are victims; the first `failed` are known not to do.

        Yields after each check.
        """
        if not candidates:
            return PreemptionPlan(problem="no work may be preempted for it")
        # With `low` of them gone it does not fit, with `victims` it does, as far as was checked.
        low, victims, best = failed, list(candidates), None
        for count in (*(count for count in _FEW if failed < count < len(candidates)), len(candidates)):
            best = self.check(candidates[:count])
            yield
            if best is not None:
                victims = list(candidates[:count])
                break
            low = count
        if best is None:
            return PreemptionPlan(problem="it would not fit if all that it may preempt were gone", checks=self.checks)
        while len(victims) - low > 1 and self.checks < self._most:
            # While little is known of the upper end, the next is four times the lower one.
            middle = min((low + len(victims)) // 2, max(1, 4 * low))
            found = self.check(victims[:middle])
            yield
            if found is None:
                low = middle
            else:
                best, victims = found, victims[:middle]
        victims, best = yield from self._put_back_elsewhere(victims, best)
        victims, best = yield from self._put_back_each(victims, best)
        return PreemptionPlan(victims=tuple(victims), place=best.place, checks=self.checks)

    def _put_back_elsewhere(
        self, victims: list[PreemptionCandidate], best: FoundPlace[_Place]
    ) -> SearchSteps[_Found[_Place]]:
        """Puts back all that run on other nodes than those of the place, unless the quota needs some of them."""
        near = [one for one in victims if not one.node_names.isdisjoint(best.node_names)]
        if len(near) < len(victims) and self.checks < self._most:
            found = self.check(near)
            yield
            if found is not None:
                return near, found
        return victims, best

    def _put_back_each(
        self, victims: list[PreemptionCandidate], best: FoundPlace[_Place]
    ) -> SearchSteps[_Found[_Place]]:
        for one in reversed(victims):
            if self.checks >= self._most or len(victims) == 1:
                break
            left = [other for other in victims if other is not one]
            found = self.check(left)
            yield
            if found is not None:
                victims, best = left, found
        return victims, best


def list_victim_queues(tree: QuotaTree, gainer: PreemptionGainer, rules: QueuePreemption) -> Iterator[str]:
    """Yields the queues whose work may be victims: its own, and others of its tree that borrow."""
    root = tree.list_path(gainer.queue)[-1].name
    for number, queue in enumerate(tree.queues):
        if queue.name == gainer.queue:
            if rules.within is PreemptionWithin.LOWER_PRIORITY:
                yield queue.name
        elif rules.reclaim and not tree.children[number] and tree.list_path(queue.name)[-1].name == root:
            yield queue.name


def is_protected(rules: QueuePreemption, *, is_job: bool) -> bool:
    """Returns whether running work of a queue is never a victim; `is_job` for what may be requeued without being asked."""
    return rules.victims is PreemptionVictims.NONE or (rules.victims is PreemptionVictims.UNSPECIFIED and not is_job)
