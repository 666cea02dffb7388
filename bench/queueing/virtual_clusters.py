"""Jobs of several tenants on one pool of GPUs: quotas, order, backfill and reclaim that can be switched on one by one.

Owns the simulation, in which GPUs count and nodes do not. Quotas are the product's own `QuotaTree` and past use its own
`DecayedUsage`; order, backfill and reclaim are stated here after the product's rules, so that each can be replaced by
the product's when it has it. A preempted job begins anew: all that it ran is lost. Must not know the trace.

Rules: work is tried in an order of queues, within a queue by submission, and what does not fit is passed over, or, with
`blocks`, ends the pass. `backfill` promises the first that does not fit the time by which enough GPUs are free, and lets
others pass only if they end before it or leave it what it needs (EASY, Lifka 1995). Reclaim lets work within its
queue's nominal quota preempt work of queues that borrow, what started last first: without checkpoints that loses the
least for each GPU.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.queue_usage import DecayedUsage
from eelgrid_protos.messages import Queue, QueueQuota

ROOT = "all"
_DEPTH = 100  # of one queue and size, how many a backfill looks at
_NS = 1_000_000_000
_FIRST_GUESS_S = 3600.0
# Kinds of events, by which is first of one moment; the last only causes a decision.
_ENDS, _SUBMITTED, _MAY_RECLAIM = 0, 1, 2


class QueueOrder(Enum):
    """Which queue's work is tried first."""

    SUBMISSION = "submission"
    SHARE = "share"  # what is borrowed over what could be, then submission
    SHARE_AND_PAST = "share and past use"


@dataclass(frozen=True)
class TenantJob:
    """A job of a tenant; times in seconds."""

    submit_s: float
    run_s: float
    gpus: int
    queue: str


@dataclass(frozen=True)
class TenantRules:
    """What is switched on."""

    order: QueueOrder
    quotas: bool = True
    blocks: bool = False
    backfill: bool = False
    knows_run_times: bool = False  # else the mean of what has ended in the queue
    reclaim_after_s: float | None = None  # how long work waits before it preempts; None for never
    half_life_s: float = 7 * 86_400.0


@dataclass(frozen=True)
class TenantRun:
    """What came out: for each job the wait until its last start."""

    waits_s: list[float]
    ends_s: list[float]
    preemptions: int
    lost_gpu_s: float
    used_gpu_s: float  # of the pool until the last submission, lost work included


def build_queues(nominal: dict[str, int]) -> tuple[Queue, ...]:
    """Returns a queue for each tenant below one root, with a nominal quota and no limit on borrowing."""
    found = [Queue(name=ROOT)]
    for name, gpus in sorted(nominal.items()):
        quota = QueueQuota(resource="gpu", nominal=1000 * gpus)
        found.append(Queue(name=name, parent=ROOT, quotas=(quota,)))
    return tuple(found)


class TenantSimulation:
    """Jobs on a pool of GPUs by some rules."""

    def __init__(self, jobs: list[TenantJob], gpus: int, nominal: dict[str, int], rules: TenantRules) -> None:
        self._jobs, self._gpus, self._rules, self._nominal = jobs, gpus, rules, nominal
        self._free = gpus
        self._tree = QuotaTree(build_queues(nominal))
        self._past = dict.fromkeys(nominal, DecayedUsage(0))
        self._held = dict.fromkeys(nominal, 0)  # GPUs
        # By queue and GPUs, in the order of submission.
        self._pending: dict[tuple[str, int], dict[int, None]] = {}
        self._started_s: dict[int, float] = {}
        self._waiting_since_s = [0.0] * len(jobs)
        self._runs = [0] * len(jobs)
        self._waits_s, self._ends_s = [0.0] * len(jobs), [0.0] * len(jobs)
        self._ended: dict[str, tuple[int, float]] = {}
        self._last_submit_s = max(job.submit_s for job in jobs)
        self._preemptions, self._lost_gpu_s, self._used_gpu_s = 0, 0.0, 0.0
        self._events = [(job.submit_s, _SUBMITTED, number, 0) for number, job in enumerate(jobs)]
        heapq.heapify(self._events)
        self.now_s = 0.0

    def run(self) -> TenantRun:
        """Simulates until every job has ended."""
        while self._events:
            self.now_s = self._events[0][0]
            while self._events and self._events[0][0] == self.now_s:
                _, kind, number, run = heapq.heappop(self._events)
                if kind == _SUBMITTED:
                    self._wait(number)
                elif kind == _ENDS and run == self._runs[number] and number in self._started_s:
                    self._end(number)
            self._decide()
        return TenantRun(self._waits_s, self._ends_s, self._preemptions, self._lost_gpu_s, self._used_gpu_s)

    def _wait(self, number: int) -> None:
        job = self._jobs[number]
        group = self._pending.setdefault((job.queue, job.gpus), {})
        group[number] = None
        self._waiting_since_s[number] = self.now_s
        if self._rules.reclaim_after_s:
            heapq.heappush(self._events, (self.now_s + self._rules.reclaim_after_s, _MAY_RECLAIM, number, 0))
        if self._runs[number]:  # a preempted job keeps its place
            self._pending[job.queue, job.gpus] = dict(
                sorted(group.items(), key=lambda item: self._jobs[item[0]].submit_s)
            )

    def _charge(self, job: TenantJob, sign: int) -> None:
        self._free -= sign * job.gpus
        self._held[job.queue] += sign * job.gpus
        self._tree.add(job.queue, {"gpu": 1000 * job.gpus}, sign)
        rate = (sign * 1000.0 * job.gpus, 0.0, 0.0)
        past = self._past[job.queue]
        now_ns = int(self.now_s * _NS)
        self._past[job.queue] = past.change(now_ns, self._rules.half_life_s, rate, charges=sign > 0)

    def _start(self, number: int) -> None:
        job = self._jobs[number]
        del self._pending[job.queue, job.gpus][number]
        self._charge(job, 1)
        self._started_s[number] = self.now_s
        self._runs[number] += 1
        self._waits_s[number] = self.now_s - job.submit_s
        heapq.heappush(self._events, (self.now_s + job.run_s, _ENDS, number, self._runs[number]))

    def _stop(self, number: int) -> float:
        """Frees the GPUs of a job; returns how long it ran."""
        job, started_s = self._jobs[number], self._started_s.pop(number)
        self._charge(job, -1)
        self._used_gpu_s += job.gpus * max(0.0, min(self.now_s, self._last_submit_s) - started_s)
        return self.now_s - started_s

    def _end(self, number: int) -> None:
        self._stop(number)
        self._ends_s[number] = self.now_s
        job = self._jobs[number]
        count, total_s = self._ended.get(job.queue, (0, 0.0))
        self._ended[job.queue] = count + 1, total_s + job.run_s

    def _preempt(self, number: int) -> None:
        self._lost_gpu_s += self._stop(number) * self._jobs[number].gpus
        self._preemptions += 1
        self._wait(number)

    def _estimate_s(self, number: int) -> float:
        """The whole run time as it is expected; what has run past it is expected to run as long again."""
        job = self._jobs[number]
        if self._rules.knows_run_times:
            return job.run_s
        count, total_s = self._ended.get(job.queue, (0, 0.0))
        guess_s = total_s / count if count else _FIRST_GUESS_S
        passed_s = self.now_s - self._started_s.get(number, self.now_s)
        return guess_s if passed_s < guess_s else 2.0 * passed_s

    def _list_heads(self, passed: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yields queues and sizes in which work waits, in order; what has been passed over is left out."""
        heads = [(key, next(iter(group))) for key, group in self._pending.items() if group and key not in passed]
        shares: dict[str, tuple[float, float]] = {}
        for queue, _ in {key for key, _ in heads}:
            share = (
                self._tree.borrowed_ratio(self._tree.numbers[queue])
                if self._rules.order is not QueueOrder.SUBMISSION
                else 0.0
            )
            past = 0.0
            if self._rules.order is QueueOrder.SHARE_AND_PAST:
                used = self._past[queue].at(int(self.now_s * _NS), self._rules.half_life_s)[0]
                past = used / self._nominal[queue]
            shares[queue] = share, past
        yield from (
            key
            for key, head in sorted(heads, key=lambda one: (*shares[one[0][0]], self._jobs[one[1]].submit_s, one[1]))
        )

    def _decide(self) -> None:
        """Starts work until nothing waiting fits; each queue and size that does not is passed over once."""
        passed, promise, is_changed = set[tuple[str, int]](), None, True
        while is_changed and (self._free or self._rules.reclaim_after_s is not None):
            is_changed = False
            for key in list(self._list_heads(passed)):
                queue, gpus = key
                number = next(iter(self._pending[key]))
                lacks_quota = self._rules.quotas and self._tree.find_shortage(queue, {"gpu": 1000 * gpus}) is not None
                fitting: int | None = None
                if gpus <= self._free and not lacks_quota:
                    fitting = number if promise is None else self._find_fitting(key, promise)
                elif self._may_reclaim(number) and self._reclaim(queue, gpus):
                    fitting = number
                elif self._rules.backfill and promise is None:
                    # Borrowing has no limit, so what lacks quota lacks free GPUs of the pool.
                    promise = self._promise(gpus)
                if fitting is not None:
                    promise = self._shrink(promise, fitting)
                    self._start(fitting)
                    is_changed = True  # and with it the order
                    break
                if self._rules.blocks:
                    return
                passed.add(key)

    def _promise(self, gpus: int) -> tuple[float, int]:
        """Returns when so many GPUs are expected to be free, and how many are then left over."""
        free = self._free
        ends = sorted((self._started_s[number] + self._estimate_s(number), number) for number in self._started_s)
        for end_s, number in ends:
            free += self._jobs[number].gpus
            if free >= gpus:
                return end_s, free - gpus
        return float("inf"), 0

    def _find_fitting(self, key: tuple[str, int], promise: tuple[float, int]) -> int | None:
        until_s, spare = promise
        for number in islice(self._pending[key], _DEPTH):
            if key[1] <= spare or self.now_s + self._estimate_s(number) <= until_s:
                return number
        return None

    def _shrink(self, promise: tuple[float, int] | None, number: int) -> tuple[float, int] | None:
        if promise is None or self.now_s + self._estimate_s(number) <= promise[0]:
            return promise
        return promise[0], promise[1] - self._jobs[number].gpus

    def _may_reclaim(self, number: int) -> bool:
        after_s = self._rules.reclaim_after_s
        return after_s is not None and self.now_s - self._waiting_since_s[number] >= after_s

    def _reclaim(self, queue: str, gpus: int) -> bool:
        """Preempts borrowers for work within its nominal quota; False, and nothing happens, if that does not suffice."""
        borrowed = sum(max(0, self._held[name] - self._nominal[name]) for name in self._nominal if name != queue)
        if self._held[queue] + gpus > self._nominal[queue] or self._free + borrowed < gpus:
            return False
        held, victims, free = dict(self._held), list[int](), self._free
        for number in sorted(self._started_s, key=self._started_s.__getitem__, reverse=True):
            if free >= gpus:
                break
            job = self._jobs[number]
            if job.queue != queue and held[job.queue] > self._nominal[job.queue]:
                held[job.queue] -= job.gpus
                free += job.gpus
                victims.append(number)
        if free < gpus:
            return False
        spare = free - gpus
        for number in victims[::-1]:  # put back what turned out unneeded, what has run longest first
            if self._jobs[number].gpus <= spare:
                spare -= self._jobs[number].gpus
                victims.remove(number)
        for number in victims:
            self._preempt(number)
        return True
