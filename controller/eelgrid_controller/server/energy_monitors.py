"""Monitors of what energy costs: the day so far, spending against the policy's limits, and what placement saves.

`EnergyDayMonitor` reads the day so far from the energy ledger, for metrics: what `eelctl energy --since today` shows.
`SpendingMonitor` compares the energy ledger with the spending limits every minute, reports exhausted limits to the core
and serves the state of each limit. `SavingsMonitor` compares the controller's placement with plain best fit, in a thread
beside the controller.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.energy.ledger import (
    DAY_S,
    HOUR_S,
    NAMESPACES_MOST,
    OTHER_NAMESPACES,
    LedgerAmount,
    LedgerAnswer,
    LedgerQuery,
)
from eelgrid_controller.energy.savings import BEST_FIT, EELGRID, InitialCluster, PlacementSavings, SavingsFigures
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.events import (
    CapacityHoldsChanged,
    Event,
    PolicyChanged,
    PricesQuoted,
    SpendingJudged,
    WorkloadDeferred,
)
from eelgrid_controller.state.measurement_events import PointsMeasured, StartsMeasured
from eelgrid_controller.state.spending import (
    LimitStatus,
    PeriodBounds,
    SpendingDimension,
    SpendingKey,
    day_bounds,
    judge_limits,
    limit_name,
    limit_statuses,
    period_bounds_at,
    spending_key,
    spending_reason,
    utc_offset_minutes_of,
    warn_ratio_of,
)
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.faults import Fault, Unavailable
from eelgrid_protos.messages import EnergyPrices, Policy, SpendingLimit, SpendingQuantity, SpendingStatus
from eelgrid_protos.openmetrics import MetricFamily

_NS = 10**9
# What the ledger says of the most subjects at once.
_ROWS_MOST = 10_000
# After a look at which something was not known, as in the first moment of a controller.
_AGAIN_S = 5.0
# A mean of less says nothing of the rest of a period.
_LATELY_LEAST_S = 600.0
# Sorts of subjects that are asked of together: labels may be of any number of keys.
_AT_ONCE = 8
_UNITS: Mapping[SpendingQuantity, str] = {
    SpendingQuantity.GPU_TIME: "gpu_seconds",
    SpendingQuantity.ENERGY: "joules",
    SpendingQuantity.MONEY: "money",
    SpendingQuantity.CARBON: "grams",
}

SpentAmounts = Mapping[tuple[SpendingKey, PeriodBounds], float]


class _SpendingReview(NamedTuple):
    """How limits stood, in which currency, and how much work waited for each."""

    standings: tuple[LimitStatus, ...] = ()
    currency: str = ""
    waiting: Mapping[SpendingKey, int] = {}


class EnergyDayMonitor:
    """Reads what the ledger has of the day so far, until cancelled; used from the event loop."""

    def __init__(
        self,
        *,
        ledger: LedgerWriter,
        prices: Callable[[], EnergyPrices | None],
        every_s: float,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._ledger, self._prices, self._every_s, self._clock, self._log = ledger, prices, every_s, clock, log
        self._found: LedgerAnswer | None = None

    async def run(self) -> None:
        """Reads now, then every while; without a readable ledger there is no figure."""
        while True:
            try:
                await self.read_day()
                pause_s = self._every_s
            except Unavailable:
                self._found, pause_s = None, min(_AGAIN_S, self._every_s)
            except Exception:  # noqa: BLE001  # whatever it was, the next reading may do better
                self._log.exception("energy_today=failed")
                self._found, pause_s = None, self._every_s
            await asyncio.sleep(pause_s)

    async def read_day(self) -> None:
        """Reads the day so far. Raises Unavailable."""
        prices = self._prices()
        begin_s, end_s = day_bounds(self._clock.now_ns(), 0 if prices is None else prices.utc_offset_minutes)
        asked = LedgerQuery(begin_s=begin_s, end_s=end_s, group_by=("namespace",), rows_most=NAMESPACES_MOST)
        (self._found,) = await self._ledger.query([asked])

    def families(self) -> Iterator[MetricFamily]:
        """As of the last reading."""
        found, prices = self._found, self._prices()
        if found is None:
            return
        spent = found.total
        by_name = {group.values[0] or "(none)": group.spent for group in found.groups}
        # A namespace may have the name of the rest.
        by_name[OTHER_NAMESPACES] = by_name.get(OTHER_NAMESPACES, LedgerAmount()).plus(found.left_out)
        by_name |= {"(unallocated)": found.unallocated, "(unattributed)": found.unattributed}
        joules = {
            (name, part): value / 1000.0
            for name, one in by_name.items()
            for part, value in (("active", one.active_mj), ("idle", one.energy_mj - one.active_mj))
            if one.energy_mj or name.startswith("(una")
        }
        yield build_family("eelgrid_energy_today_joules", joules)
        if prices is not None and (spent.cost or not spent.energy_mj):
            yield build_family("eelgrid_energy_today_cost", {prices.currency: spent.cost})
        if prices is not None and (spent.carbon_g or not spent.energy_mj):
            yield build_family("eelgrid_energy_today_carbon_grams", spent.carbon_g)


class SpendingMonitor:
    """Looks at spending, until cancelled; used from the event loop."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        ledger: LedgerWriter,
        every_s: float,
        clock: Clock,
        log: logging.Logger,
        rows_most: int = _ROWS_MOST,
    ) -> None:
        self.failures = 0  # looks at which the ledger could not be read, or the core took no word
        self._loop, self._ledger, self._every_s, self._clock, self._log = loop, ledger, every_s, clock, log
        self._rows_most = rows_most
        self._seen = _SpendingReview()
        self._wake = asyncio.Event()
        loop.listeners.append(self._on_commit)

    async def run(self) -> None:
        """A look now, then every while, and after each change of the policy."""
        while True:
            self._wake.clear()
            failures = self.failures
            try:
                await self._review_spending()
            except Fault as error:
                self.failures += 1
                self._log.warning("spending=not_judged reason=%s", error)
            except Exception:  # noqa: BLE001  # whatever it was, the next look may do better
                self.failures += 1
                self._log.exception("spending=failed")
            try:
                async with asyncio.timeout(
                    self._every_s if failures == self.failures else min(_AGAIN_S, self._every_s)
                ):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _on_commit(self, committed: CommitResult) -> None:
        for event in committed.events:
            if isinstance(event, PolicyChanged):
                self._wake.set()
            elif isinstance(event, SpendingJudged):
                spent = ", ".join(limit_name(one.limit) for one in event.over) or "none"
                self._log.info("spending=judged spent=%s", spent)

    async def _review_spending(self) -> None:
        state = self._loop.core.state
        if not state.policy.spending and not state.spending.over:
            self._seen = _SpendingReview()
            return
        told = await self._read_spent(state.policy, _under_way(state.policy, self._clock.now_ns()))
        await self._loop.command(
            lambda core, now_ns: core.set_exhausted_spending(
                judge_limits(core.state.policy, core.state.spending, told, now_ns), now_ns=now_ns
            )
        )
        self._seen = await self._loop.read(lambda core: self._review_limits(core, told))

    def _review_limits(self, core: Core, told: SpentAmounts) -> _SpendingReview:
        policy, spending = core.state.policy, core.state.spending
        workloads = core.state.workloads
        reasons = Counter(workloads[key].reason for key in core.state.pending) if spending.over else Counter[str]()
        return _SpendingReview(
            limit_statuses(policy, spending, told, self._clock.now_ns()),
            "" if policy.prices is None else policy.prices.currency,
            {spending_key(one.limit): reasons[spending_reason(one)] for one in spending.over},
        )

    async def _read_spent(self, policy: Policy, stretch_of: Callable[[SpendingLimit], PeriodBounds]) -> SpentAmounts:
        """What the ledger says of each limit that is not of GPU time; nothing of those that it cannot say."""
        asked: dict[PeriodBounds, dict[SpendingDimension, list[SpendingLimit]]] = {}
        for limit in policy.spending:
            if limit.quantity is not SpendingQuantity.GPU_TIME:
                asked.setdefault(stretch_of(limit), {}).setdefault(spending_key(limit).dimension, []).append(limit)
        told: dict[tuple[SpendingKey, PeriodBounds], float] = {}
        try:
            for stretch, by_dimension in asked.items():
                for limit, spent, is_whole in await self._spent(stretch, by_dimension):
                    amount = _amount(spent, limit.quantity)
                    # Of a damaged ledger it is known only that at least so much was spent.
                    if is_whole or amount >= limit.most:
                        told[spending_key(limit), stretch] = amount
        except Unavailable as error:
            self.failures += 1
            self._log.warning("spending=not_known reason=%s", error)
        return told

    async def _spent(
        self, stretch: PeriodBounds, limits: Mapping[SpendingDimension, Sequence[SpendingLimit]]
    ) -> list[tuple[SpendingLimit, LedgerAmount, bool]]:
        """What the subject of each limit has spent in a stretch of whole hours, and whether nothing of it is damaged."""
        begin_s, end_s = stretch
        asked = [
            LedgerQuery(begin_s=begin_s, end_s=end_s, group_by=(one.group,), rows_most=self._rows_most)
            for one in limits
        ]
        answers: list[LedgerAnswer] = []
        while len(answers) < len(asked):
            answers += await self._ledger.query(asked[len(answers) :][:_AT_ONCE])
        found = []
        for dimension, answer in zip(limits, answers, strict=True):
            by_name = {one.values[0]: one.spent for one in answer.groups}
            for limit in limits[dimension]:
                if limit.name not in by_name and answer.left_out_rows:
                    alone = LedgerQuery(begin_s=begin_s, end_s=end_s, filters=((dimension.group, limit.name),))
                    by_name[limit.name] = (await self._ledger.query([alone]))[0].owned
                found.append((limit, by_name.get(limit.name, LedgerAmount()), not answer.damaged))
        return found

    async def statuses(self) -> tuple[SpendingStatus, ...]:
        """Every limit as it stands now, with what it comes to by the end of its period. Raises Unavailable."""
        policy, now_ns = self._loop.core.state.policy, self._clock.now_ns()
        told = await self._read_spent(policy, _under_way(policy, now_ns))
        rates = await self._rates(policy, now_ns)
        return await self._loop.read(lambda core: self._statuses(core, told, rates))

    async def _rates(self, policy: Policy, now_ns: int) -> Mapping[SpendingKey, float]:
        """What each limit of the ledger's took a second of late.

        By the day up to now, or by the whole hours of a younger ledger; nothing where they are too
        few to say, or nobody can.
        """
        try:
            begun_s = await self._ledger.begun_s()
        except Unavailable:
            return {}
        if begun_s is None:
            return {}
        # With the hour that is under way, and without the first one, of which a part may be missing.
        until_s = now_ns // _NS // HOUR_S * HOUR_S + HOUR_S
        lately = PeriodBounds(max(until_s - DAY_S, begun_s + HOUR_S), until_s)
        seconds = now_ns / _NS - lately.begin_s
        if seconds < _LATELY_LEAST_S:
            return {}
        told = await self._read_spent(policy, lambda _: lately)
        return {key: amount / seconds for (key, _), amount in told.items()}

    def _statuses(
        self, core: Core, told: SpentAmounts, rates: Mapping[SpendingKey, float]
    ) -> tuple[SpendingStatus, ...]:
        spending, now_ns = core.state.spending, self._clock.now_ns()
        seen = self._review_limits(core, told)
        since_ns = {spending_key(one.limit): one.since_ns for one in spending.over}
        found = []
        for one in seen.standings:
            key = spending_key(one.limit)
            is_held = key.quantity is SpendingQuantity.GPU_TIME
            rate = spending.held_gpus(key) if is_held else rates.get(key)
            left_s = max(0.0, one.stretch.end_s - now_ns / _NS)
            found.append(
                SpendingStatus(
                    limit=one.limit,
                    begin_ns=one.stretch.begin_s * _NS,
                    end_ns=one.stretch.end_s * _NS,
                    spent=one.spent,
                    forecast=None if one.spent is None or rate is None else one.spent + rate * left_s,
                    over_since_ns=since_ns.get(key, 0),
                    waiting=seen.waiting.get(key, 0),
                )
            )
        return tuple(found)

    def families(self) -> Iterator[MetricFamily]:
        """As of the last look."""
        seen = self._seen
        yield build_family("eelgrid_spending_failures_total", self.failures)
        for quantity, unit in _UNITS.items():
            rows = [one for one in seen.standings if one.limit.quantity is quantity]
            spent = {limit_name(one.limit): one.spent for one in rows if one.spent is not None}
            yield _family(
                f"eelgrid_spending_limit_{unit}", {limit_name(one.limit): one.limit.most for one in rows}, seen
            )
            yield _family(f"eelgrid_spending_spent_{unit}", spent, seen)
        ratios = {limit_name(one.limit): one.ratio for one in seen.standings if one.ratio is not None}
        yield build_family("eelgrid_spending_ratio", ratios)
        warned = {limit_name(one.limit): warn_ratio_of(one.limit) for one in seen.standings}
        yield build_family("eelgrid_spending_warning_ratio", warned)
        waiting = {limit_name(one.limit): float(seen.waiting.get(spending_key(one.limit), 0)) for one in seen.standings}
        yield build_family("eelgrid_spending_waiting_workloads", waiting)


def _family(name: str, values: Mapping[str, float], seen: _SpendingReview) -> MetricFamily:
    if name.endswith("_money"):
        return build_family(name, {(limit, seen.currency): value for limit, value in values.items()})
    return build_family(name, values)


def _under_way(policy: Policy, now_ns: int) -> Callable[[SpendingLimit], PeriodBounds]:
    """Of each limit the period that is under way."""
    offset = utc_offset_minutes_of(policy)
    return lambda limit: period_bounds_at(limit.period, now_ns // _NS, offset)


def _amount(spent: LedgerAmount, quantity: SpendingQuantity) -> float:
    if quantity is SpendingQuantity.ENERGY:
        return spent.energy_mj / 1000.0
    return max(0.0, spent.cost if quantity is SpendingQuantity.MONEY else spent.carbon_g)


_TURN_S = 1.0
_RESTART_S = 60.0
# Events that wait for a turn; beyond, to begin anew costs no more.
_BEHIND_MOST = 50_000
_OF_NO_ACCOUNT = (
    CapacityHoldsChanged,
    PointsMeasured,
    PricesQuoted,
    SpendingJudged,
    StartsMeasured,
    WorkloadDeferred,
)


class SavedDay:
    """What was saved since midnight (`day_bounds`), or since the controller's start if that is later."""

    def __init__(self) -> None:
        self.saved_j = 0.0
        self._begin_s: int | None = None
        self._total_j = self._before_j = 0.0

    def advance(self, total_j: float, now_ns: int, *, utc_offset_minutes: int = 0) -> None:
        """Takes what was saved since the controller's start, as of now."""
        begin_s = day_bounds(now_ns, utc_offset_minutes).begin_s
        if self._begin_s is not None and begin_s > self._begin_s:
            self._before_j = self._total_j
        self._begin_s, self._total_j = begin_s, total_j
        self.saved_j = total_j - self._before_j


class SavingsMonitor:
    """At most one comparison at a time; used from the event loop."""

    def __init__(self, *, loop: ControllerLoop, catalogue: Catalogue, clock: Clock, log: logging.Logger) -> None:
        self.figures: SavingsFigures | None = None
        self.failures = Counter({"behind": 0, "fault": 0})
        self._loop, self._clock, self._log = loop, clock, log
        self._watts = PriorPowerModel(catalogue).gpu
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="savings")
        self._waiting: list[Event] = []
        self._is_following = False
        self._offset_ns = 0
        self._savings: PlacementSavings | None = None
        # Joules of the comparisons before this one.
        self._before_j: defaultdict[str, float] = defaultdict(float)
        self._day = SavedDay()
        loop.listeners.append(self._on_commit)

    async def run(self) -> None:
        """Follow what is committed, until cancelled."""
        try:
            while True:
                is_well = await self._follow_backlog()
                await asyncio.sleep(_TURN_S if is_well else _RESTART_S)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def families(self) -> Iterator[MetricFamily]:
        """As of the last turn; before the first there are no figures."""
        yield build_family("eelgrid_savings_failures_total", dict(self.failures))
        found = self.figures
        if found is None:
            return
        yield build_family("eelgrid_saved_power_watts", {"placement": found.saved_w, "limits": found.limits_w})
        yield build_family("eelgrid_compared_power_watts", dict(found.power_w))
        yield build_family("eelgrid_saved_energy_today_joules", self._day.saved_j)
        yield build_family("eelgrid_compared_energy_joules_total", self._compared_j(found))
        yield build_family("eelgrid_compared_replicas", dict(found.replicas))
        yield build_family("eelgrid_compared_gpus", {where: milli / 1000.0 for where, milli in found.gpu_milli.items()})
        yield build_family("eelgrid_compared_since_timestamp_seconds", found.began_ns / 1e9)

    def _compared_j(self, found: SavingsFigures) -> dict[str, float]:
        """Joules of both plans since the controller's start."""
        return {plan: self._before_j[plan] + energy_j for plan, energy_j in found.energy_j.items()}

    def _on_commit(self, committed: CommitResult) -> None:
        if not self._is_following:
            return  # it will begin from the state, which has these
        self._waiting.extend(event for event in committed.events if not isinstance(event, _OF_NO_ACCOUNT))
        if len(self._waiting) > _BEHIND_MOST:
            self._end("behind")

    def _start_following(self, core: Core) -> InitialCluster:
        self._is_following = True
        self._offset_ns = self._clock.now_ns() - int(self._clock.monotonic_s() * 1e9)
        return InitialCluster.from_state(core.state, self._now_ns())

    def _now_ns(self) -> int:
        """Unix time of a comparison that is not led astray by a clock that is set meanwhile: watts are summed over it."""
        return self._offset_ns + int(self._clock.monotonic_s() * 1e9)

    def _end(self, why: str) -> None:
        self.failures[why] += 1
        if self.figures is not None:
            for plan, energy_j in self.figures.energy_j.items():
                self._before_j[plan] += energy_j
        self._is_following = False
        self._savings = self.figures = None
        self._waiting = []

    async def _follow_backlog(self) -> bool:
        """Follow what came since the last one; false where that failed."""
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            if self._savings is None:
                beginning = await self._loop.read(self._start_following)
                made = await in_thread(self._thread, PlacementSavings, beginning, self._watts)
                if not self._is_following:
                    return True  # ended while it was made
                self._savings = made
            savings, events, self._waiting = self._savings, self._waiting, []
            now_ns = self._now_ns()
            figures = await in_thread(self._thread, _follow_events, savings, events, now_ns)
        except Exception:  # noqa: BLE001  # whatever it was, nothing else of the controller stands on it
            self._log.exception("savings=failed action=begin_anew seconds=%g", _RESTART_S)
            self._end("fault")
            return False
        if savings is self._savings:  # else it was ended meanwhile
            self.figures = figures
            compared_j = self._compared_j(figures)
            self._day.advance(
                compared_j[BEST_FIT] - compared_j[EELGRID],
                now_ns,
                utc_offset_minutes=utc_offset_minutes_of(self._loop.core.state.policy),
            )
        return True


def _follow_events(savings: PlacementSavings, events: Sequence[Event], now_ns: int) -> SavingsFigures:
    for event in events:
        savings.follow_event(event)
    savings.advance_to(now_ns)
    return savings.figures()
