"""Power saving: how many of a pool's idle nodes sleep, by the break-even of sleeping, by past idle times and a warm pool.

Owns the decision for one pool of nodes that may stand in for one another, its account against the offline optimum, and
which nodes carry the decision out. Must not know an engine, a BMC or a clock; times are arguments, in seconds of any clock
that never falls.

Theory. An idle node draws `idle_w`, a sleeping one `sleep_w`; sleeping and waking once costs `transition_j` beside that. How
long a node will idle is unknown: this is the ski rental problem (Karlin et al. 1988). A node that goes to sleep once staying
awake has cost as much as the transition, after T = transition_j / (idle_w - sleep_w), costs at most twice what somebody who
knew the future would have spent, and no deterministic rule does better.

For a pool, work takes the node that became idle last, and the one that became idle first sleeps first. Then each level of
demand has idle gaps of its own, whatever names its nodes have, the optimum of the pool is the sum over its levels' gaps, and
the ratio of 2 holds for the pool (Lu, Chen, Andrew 2013, "Simple and Effective Dynamic Provisioning for Power-Proportional
Data Centers", section 4). So only the number of nodes in use is looked at here: a stack of times.

Gaps that are like those of the past can be cut short: of the last gaps of nearby levels the timer that would have cost least
is taken (empirical risk minimization over the break-even's domain [0, T]). A wrong timer costs at most one transition more
than allowed, so it may be used only while the account can pay it: what was spent stays at most twice what the optimum, which
is known for the past, has spent by now, plus `allowance_j`, once. That holds for any forecast, a malicious one included.

A warm pool is the operator's price for less waiting, and outside the account: so many idle nodes are awake at any time, and
others are woken as soon as work takes one. Waking takes `wake_s`, so this is the base-stock policy of inventories with a lead
time: with S warm nodes a start waits only if more than S nodes net were taken within the last `wake_s`. `waiting_share` sets S
to that quantile of what past starts have met; `warm_nodes` is the least.
"""

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

# Gaps that are remembered, and of those how many, the nearest by level, a timer is learned from; fewer than the least say
# nothing yet.
_GAPS_MOST = 2048
_NEAREST = 48
_GAPS_LEAST = 8
# Starts on another node that are remembered for the warm pool.
_STARTS_MOST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepCosts:
    """What one node costs; raises ValueError for numbers that no node has.

    `transition_j` is what going to sleep and waking up draw, beyond `sleep_w` for as long as they take; `wake_s` is from
    the order until the node takes work.
    """

    idle_w: float
    sleep_w: float
    transition_j: float
    wake_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.sleep_w < self.idle_w < 1e6:
            raise ValueError(
                f"idle_w: {self.idle_w:g} must be above sleep_w {self.sleep_w:g}; measure both at the node"
            )
        if not (0.0 < self.transition_j < 1e12 and 0.0 <= self.wake_s < 1e6):
            raise ValueError(
                "transition_j, wake_s: must be positive; measure a wake-up, for example idle_w times its time"
            )

    @property
    def saved_w(self) -> float:
        """Watts that a sleeping node saves."""
        return self.idle_w - self.sleep_w

    @property
    def break_even_s(self) -> float:
        """How long a node has to sleep to be worth it."""
        return self.transition_j / self.saved_w


@dataclass(slots=True)
class _Gap:
    """An idle level since a time, and since when its node sleeps, if it does; `warm_s` is when it was woken to be warm."""

    since_s: float
    slept_s: float | None = None
    warm_s: float | None = None
    warm_j: float = 0.0
    sleeps: int = 0

    @property
    def is_awake(self) -> bool:
        return self.slept_s is None or self.warm_s is not None


@dataclass(frozen=True, slots=True)
class SleepAccount:
    """Joules above sleeping for good, until now: what was spent, the least possible, and what kept warm nodes awake."""

    spent_j: float
    optimum_j: float
    warm_j: float
    sleeps: int


@dataclass(slots=True)
class NodePool:
    """Decides for one pool. Call `update` whenever the number of nodes in use changed, and at `next_due_s`."""

    costs: SleepCosts
    warm_nodes: int = 0
    waiting_share: float | None = None
    learns: bool = True
    allowance_j: float = 0.0
    # Oldest first; the last to become idle is the first in use again.
    _gaps: list[_Gap] = field(default_factory=list)
    _busy: int = 0
    # Of gaps that are over: by level and length in seconds, the newest last.
    _past: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_GAPS_MOST))
    _timers_s: dict[int, float] = field(default_factory=dict)
    # Nodes in use by time, as long as a wake-up takes, and what the last starts have met.
    _uses: deque[tuple[float, int]] = field(default_factory=deque)
    _rises: deque[int] = field(default_factory=lambda: deque(maxlen=_STARTS_MOST))
    _warm: int = 0
    _closed: SleepAccount = SleepAccount(0.0, 0.0, 0.0, 0)

    def __post_init__(self) -> None:
        self._warm = self.warm_nodes

    @property
    def awake_nodes(self) -> int:
        """How many nodes are to be awake, those in use included."""
        return self._busy + sum(gap.is_awake for gap in self._gaps)

    def adopt(self, now_s: float, *, asleep: int) -> None:
        """Takes over nodes that sleep already, before the first update; they count as put to sleep at their break-even."""
        since_s = now_s - self.costs.break_even_s
        self._gaps = [_Gap(since_s, slept_s=since_s) for _ in range(asleep)]

    def update(self, now_s: float, *, nodes: int, busy: int) -> int:
        """Takes how many nodes there are and how many are in use or wanted; returns how many are to be awake.

        What is wanted beyond the nodes that there are waits for others.
        """
        busy = max(0, min(busy, nodes))
        idle = nodes - busy
        while len(self._gaps) > idle:
            # A pool that became smaller loses idle nodes in the same way as to work.
            self._close(self._gaps.pop(), now_s)
        while len(self._gaps) < idle:
            self._gaps.append(_Gap(now_s))
        self._note_use(now_s, busy)
        self._put_to_sleep(now_s)
        for gap in self._gaps[len(self._gaps) - min(self._warm, len(self._gaps)) :]:
            if not gap.is_awake:
                gap.warm_s = now_s
                gap.warm_j += self.costs.transition_j
        return self.awake_nodes

    def _note_use(self, now_s: float, busy: int) -> None:
        before = self._busy
        self._busy = busy
        if busy == before:
            return
        self._uses.append((now_s, before))
        while self._uses and self._uses[0][0] <= now_s - self.costs.wake_s:
            self._uses.popleft()
        if busy > before:
            lowest = min((used for _, used in self._uses), default=before)
            self._rises.append(busy - lowest)
            self._warm = max(self.warm_nodes, find_base_stock(self._rises, self.waiting_share))

    def next_due_s(self, now_s: float) -> float:
        """When the next node is to sleep if nothing changes; infinity if none is."""
        for place, gap in enumerate(self._restful()):
            if gap.warm_s is not None:
                return max(now_s, gap.warm_s + self.costs.break_even_s)
            if gap.slept_s is None:
                due_s = gap.since_s + self._timer_s(place)
                # What is due already is what the account cannot pay before the break-even.
                return due_s if due_s > now_s else max(now_s, gap.since_s + self.costs.break_even_s)
        return float("inf")

    def account(self, now_s: float) -> SleepAccount:
        """Returns what was spent until now, gaps that are not over included."""
        total = self._closed
        for gap in self._gaps:
            total = _add(total, self._settle(gap, now_s))
        return total

    def _restful(self) -> list[_Gap]:
        """The gaps whose nodes may sleep, the oldest first."""
        return self._gaps[: max(0, len(self._gaps) - self._warm)]

    def _put_to_sleep(self, now_s: float) -> None:
        for place, gap in enumerate(self._restful()):
            if gap.warm_s is not None and now_s >= gap.warm_s + self.costs.break_even_s:
                gap.warm_j += self.costs.saved_w * (now_s - gap.warm_s)
                gap.warm_s = None
                gap.sleeps += 1
            if gap.warm_s is not None:
                return
            if gap.slept_s is not None:
                continue
            if now_s < gap.since_s + self._timer_s(place):
                # Nor do younger ones, whose break-even is later: those that sleep are the oldest.
                return
            risk_j = self.costs.saved_w * (gap.since_s + self.costs.break_even_s - now_s)
            if risk_j > 0.0 and self._balance_j(now_s) < risk_j - 1e-9 * self.costs.transition_j:
                # Not before the break-even, then; nor the younger ones.
                return
            gap.slept_s = now_s
            gap.sleeps += 1

    def _timer_s(self, place: int) -> float:
        """After how long the node of a level sleeps; the level is its place from the bottom."""
        if not self.learns:
            return self.costs.break_even_s
        known = self._timers_s.get(place)
        if known is None:
            known = self._timers_s[place] = self._learn(place)
        return known

    def _learn(self, place: int) -> float:
        newest_first = [*self._past][::-1]
        near = sorted(newest_first, key=lambda one: abs(one[0] - place))[:_NEAREST]
        if len(near) < _GAPS_LEAST:
            return self.costs.break_even_s
        return find_best_timer_s([length_s for _, length_s in near], self.costs.break_even_s)

    def _balance_j(self, now_s: float) -> float:
        """What may be risked: the allowance and twice the optimum, less what was spent, without gaps that are awake.

        A gap that is awake will need all that it has earned to go to sleep at its break-even.
        """
        total = self._closed
        for gap in self._gaps:
            if gap.slept_s is not None:
                total = _add(total, self._settle(gap, now_s))
        return self.allowance_j + 2.0 * total.optimum_j - total.spent_j

    def _close(self, gap: _Gap, now_s: float) -> None:
        self._closed = _add(self._closed, self._settle(gap, now_s))
        self._past.append((len(self._gaps), now_s - gap.since_s))
        self._timers_s.clear()

    def _settle(self, gap: _Gap, now_s: float) -> SleepAccount:
        saved_w, transition_j, timer_s = self.costs.saved_w, self.costs.transition_j, self.costs.break_even_s
        length_s = now_s - gap.since_s
        awake_s = length_s if gap.slept_s is None else gap.slept_s - gap.since_s
        # Beyond the break-even a node is awake because it is warm, or because nobody looked in time.
        return SleepAccount(
            spent_j=saved_w * min(awake_s, timer_s) + (0.0 if gap.slept_s is None else transition_j),
            optimum_j=min(saved_w * length_s, transition_j),
            warm_j=gap.warm_j
            + saved_w * (max(0.0, awake_s - timer_s) + (0.0 if gap.warm_s is None else now_s - gap.warm_s)),
            sleeps=gap.sleeps,
        )


def _add(one: SleepAccount, other: SleepAccount) -> SleepAccount:
    return SleepAccount(
        one.spent_j + other.spent_j,
        one.optimum_j + other.optimum_j,
        one.warm_j + other.warm_j,
        one.sleeps + other.sleeps,
    )


def find_best_timer_s(lengths_s: Iterable[float], break_even_s: float) -> float:
    """Returns the timer in [0, break_even_s] that would have cost least over gaps of these lengths, the longest of equals.

    A gap costs its length if it ends before the timer, else the timer and one break-even. Between two lengths that grows
    with the timer, so only 0 and the lengths themselves, after which nothing ends, can be the least.
    """
    ordered = sorted(lengths_s)
    best_s, least = break_even_s, float("inf")
    ended_s = 0.0
    candidates = [0.0, *(length for length in ordered if length < break_even_s), break_even_s]
    done = 0
    for timer_s in candidates:
        upto = bisect.bisect_right(ordered, timer_s)
        ended_s += sum(ordered[done:upto])
        done = upto
        cost = ended_s + (len(ordered) - upto) * (timer_s + break_even_s)
        if cost <= least:
            best_s, least = timer_s, cost
    return best_s


def find_base_stock(rises: Iterable[int], waiting_share: float | None) -> int:
    """Returns how many warm nodes leave at most this share of starts waiting, by what past starts have met; 0 for None."""
    ordered = sorted(rises)
    if waiting_share is None or not ordered:
        return 0
    return ordered[min(len(ordered) - 1, int((1.0 - waiting_share) * len(ordered)))]


class NodePower(Enum):
    """Whether a node is there for work."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    # On the way to sleep, or to wakefulness: nothing can be changed until it is there.
    FALLING_ASLEEP = "falling asleep"
    WAKING = "waking"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeActivity:
    """One node of a pool; `idle_since_s` is None while it is in use."""

    name: str
    power: NodePower
    idle_since_s: float | None


@dataclass(frozen=True, slots=True)
class PowerChanges:
    """Nodes to put to sleep, and to wake, by name."""

    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()


def choose_nodes(nodes: Iterable[NodeActivity], awake_nodes: int) -> PowerChanges:
    """Returns which nodes make the number of those that are awake, or wake up, the one that is wanted.

    The longest idle sleep first, and a node in use never does. Of those that sleep the first by name wake.
    """
    listed = sorted(nodes, key=lambda one: one.name)
    there = [one for one in listed if one.power in (NodePower.AWAKE, NodePower.WAKING)]
    surplus = len(there) - awake_nodes
    if surplus < 0:
        asleep = [one.name for one in listed if one.power is NodePower.ASLEEP]
        return PowerChanges(wake=tuple(asleep[:-surplus]))
    idle = [one for one in there if one.power is NodePower.AWAKE and one.idle_since_s is not None]
    idle.sort(key=lambda one: (one.idle_since_s or 0.0, one.name))
    return PowerChanges(sleep=tuple(one.name for one in idle[:surplus]))
