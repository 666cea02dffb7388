"""The spending monitor: what it asks of a real ledger, what it tells the core and what it shows, over faults and restarts."""

import asyncio
import contextlib
import logging
import re
import sqlite3
from dataclasses import replace

from tests.builders.cluster import build_request
from tests.builders.objectives import ObjectivesWorld, build_powered_node
from tests.builders.server import MemoryJournal
from tests.waiting import wait_until

from eelgrid_controller.energy.ledger import EnergyHolder, LedgerAmount, LedgerEntry, LedgerPlace
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.server.energy_monitors import EnergyDayMonitor, SavedDay, SpendingMonitor
from eelgrid_controller.state.events import SpendingJudged, event_from_plain
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import (
    EnergyPrices,
    EnforcementMode,
    PricePeriod,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    WorkloadPhase,
)
from eelgrid_protos.openmetrics import render_prometheus

# 22 November 2026, 12:00 UTC.
NOON_S = 1_795_348_800
DAY_S = 86_400
PRICES = EnergyPrices(periods=(PricePeriod(begins_minute=0, price_per_kwh=0.2),))
RESEARCH = EnergyHolder("workload", "research", "", "w", "t", "ada", "batch", (("team", "vision"),))
OTHER = EnergyHolder("workload", "other", "", "v", "s", "bob", "night", (("team", "speech"),))


def limit(scope, name, quantity, most, *, label="", period=SpendingPeriod.DAY, **changes):
    fields = {"warn_ratio": None, "mode": EnforcementMode.ENFORCE} | changes
    return SpendingLimit(scope=scope, name=name, label=label, quantity=quantity, most=most, period=period, **fields)


KWH = limit(SpendingScope.NAMESPACE, "research", SpendingQuantity.ENERGY, 3.6e6)


class Ledger:
    """A real store behind the port; it cannot be read while `is_away`."""

    def __init__(self, folder):
        self.store = open_ledger(folder)
        self.is_away = False
        self.first_s = 0
        self.asked = []

    def spend(self, holder, hour_s, energy_j, *, cost=0.0, carbon_g=0.0):
        booked = LedgerAmount(active_mj=round(1000 * energy_j), cost=cost, carbon_g=carbon_g)
        self.store.add(
            [LedgerEntry(hour_s // 3600 * 3600, LedgerPlace("n", "p", "m"), holder, booked)], (), (), now_s=hour_s
        )

    async def query(self, asked):
        if self.is_away:
            raise Unavailable("the disk is gone")
        self.asked.append(asked)
        return self.store.query_all(asked)

    async def begun_s(self):
        if self.is_away:
            raise Unavailable("the disk is gone")
        return self.first_s


class Site:
    """A loop, a ledger and a monitor that looks each hundredth of a second."""

    def __init__(self, folder, journal=None, **monitor):
        folder.mkdir(exist_ok=True)
        self.world = ObjectivesWorld(journal, start_s=float(NOON_S))
        self.ledger = Ledger(folder)
        self.monitor = None
        self._more = monitor

    async def __aenter__(self):
        await self.world.loop.start()
        if not self.world.loop.core.state.nodes:
            await self.world.loop.register_node(build_powered_node("n1"))
        self.monitor = SpendingMonitor(
            loop=self.world.loop,
            ledger=self.ledger,
            every_s=0.01,
            clock=self.world.clock,
            log=logging.getLogger("test.spending"),
            **self._more,
        )
        self._task = asyncio.create_task(self.monitor.run())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.world.loop.stop()
        self.ledger.store.close()

    @property
    def over(self):
        return self.world.loop.core.state.spending.over

    async def limit(self, *limits, **policy):
        loop = self.world.loop
        await loop.update_policy(replace(loop.core.state.policy, spending=limits, **policy))

    async def submit(self, key, **spec):
        return await self.world.loop.submit(build_request(key, **({"namespace": "research"} | spec)))

    def phase(self, key):
        return self.world.workload(key).phase

    def page(self):
        return render_prometheus(self.monitor.families()).decode()

    async def looked(self):
        """One look that began after now is done."""
        count = len(self.ledger.asked)
        await wait_until(lambda: len(self.ledger.asked) >= count + 3, within_s=60.0)


async def test_joules_of_the_ledger_hold_work_and_the_next_day_lets_it_go(tmp_path):
    async with Site(tmp_path / "l") as site:
        await site.limit(KWH)
        # Of the day before, and of others: neither counts.
        site.ledger.spend(RESEARCH, NOON_S - DAY_S, 9e6)
        site.ledger.spend(OTHER, NOON_S, 9e6)
        site.ledger.spend(RESEARCH, NOON_S - 3600, 3.5e6)
        await site.looked()
        assert site.over == ()
        assert (await site.submit("first")).phase is WorkloadPhase.PLACED
        site.ledger.spend(RESEARCH, NOON_S, 0.2e6)
        await wait_until(lambda: site.over, within_s=60.0)
        assert (await site.submit("second")).phase is WorkloadPhase.PENDING
        assert (await site.submit("free", namespace="other")).phase is WorkloadPhase.PLACED
        assert site.over[0].spent == 3.7e6
        site.world.now_s = NOON_S + DAY_S / 2 + 1
        await wait_until(lambda: site.phase("second") is WorkloadPhase.PLACED, within_s=60.0)
        assert site.phase("first") is WorkloadPhase.PLACED


async def test_every_quantity_and_sort_of_subject_is_found_in_the_ledger(tmp_path):
    async with Site(tmp_path / "l") as site:
        limits = (
            limit(SpendingScope.USER, "ada", SpendingQuantity.ENERGY, 8e6, period=SpendingPeriod.WEEK),
            limit(SpendingScope.QUEUE, "batch", SpendingQuantity.MONEY, 10.0, period=SpendingPeriod.MONTH),
            limit(SpendingScope.LABEL, "vision", SpendingQuantity.CARBON, 400.0, label="team"),
            limit(SpendingScope.NAMESPACE, "nobody", SpendingQuantity.ENERGY, 1.0),
        )
        await site.limit(*limits, prices=PRICES)
        site.ledger.spend(RESEARCH, NOON_S - 5 * DAY_S, 1e6, cost=2.0, carbon_g=300.0)
        site.ledger.spend(RESEARCH, NOON_S - 20 * DAY_S, 1e6, cost=3.0, carbon_g=300.0)
        site.ledger.spend(RESEARCH, NOON_S - 3600, 1e6, cost=1.0, carbon_g=100.0)
        site.ledger.spend(OTHER, NOON_S - 3600, 1e6, cost=1.0, carbon_g=100.0)
        user, queue, team, nobody = await site.monitor.statuses()
        assert [one.spent for one in (user, queue, team, nobody)] == [2e6, 6.0, 100.0, 0.0]
        # In the last 23 hours it was a megajoule; twelve hours of the week are left.
        assert abs(user.forecast - (2e6 + 1e6 * 12 / 23)) < 100.0
        assert nobody.forecast == 0.0
        # A ledger that began two hours ago has one whole hour; one that began in the last has none to go by.
        site.ledger.first_s = NOON_S - 2 * 3600
        assert abs((await site.monitor.statuses())[0].forecast - (2e6 + 1e6 * 12)) < 100.0
        site.ledger.first_s = NOON_S - 3600
        assert [one.forecast for one in await site.monitor.statuses()] == [None] * 4
        site.ledger.first_s = 0
        assert queue.end_ns == (NOON_S + 8 * DAY_S + DAY_S // 2) * 10**9
        await wait_until(
            lambda: "money" in site.page() and 'team=vision co2-kg per day"} 100' in site.page(), within_s=60.0
        )
        page = site.page()
        assert 'eelgrid_spending_ratio{limit="user=ada kwh per week"} 0.25' in page
        assert re.search(r'eelgrid_spending_spent_money\{.*limit="queue=batch money per month".*\} 6', page)
        assert 'currency="EUR"' in page
        assert 'eelgrid_spending_limit_grams{limit="label:team=vision co2-kg per day"} 400' in page
        assert 'eelgrid_spending_warning_ratio{limit="namespace=nobody kwh per day"} 0.8' in page


async def test_gpu_time_needs_no_ledger(tmp_path):
    async with Site(tmp_path / "l") as site:
        site.ledger.is_away = True
        gpu = limit(SpendingScope.NAMESPACE, "research", SpendingQuantity.GPU_TIME, 7200.0)
        await site.limit(gpu, KWH)
        await site.submit("first", gpus=2)
        site.world.now_s += 3600.0
        await wait_until(lambda: site.over, within_s=60.0)
        await site.submit("second")
        held, unknown = await site.monitor.statuses()
        assert (unknown.spent, unknown.forecast) == (None, None)
        assert held.waiting == 1
        assert held.over_since_ns > 0
        # Two GPUs until midnight.
        assert abs(held.forecast - held.spent - 2 * 11 * 3600) < 1.0
        assert site.monitor.failures > 0
        await wait_until(
            lambda: 'eelgrid_spending_waiting_workloads{limit="namespace=research gpu-hours per day"} 1' in site.page(),
            within_s=60.0,
        )
        assert 'spent_joules{limit="namespace=research' not in site.page()


async def test_rows_that_are_damaged_let_no_spent_limit_go(tmp_path):
    async with Site(tmp_path / "l") as site:
        await site.limit(KWH)
        site.ledger.spend(RESEARCH, NOON_S, 4e6)
        await wait_until(lambda: site.over, within_s=60.0)
        with contextlib.closing(sqlite3.connect(tmp_path / "l" / "energy.sqlite3")) as raw:
            for table in ("hourly", "daily"):
                raw.execute(f"UPDATE {table} SET active = 5")
            raw.commit()
        await site.looked()
        assert site.over
        (status,) = await site.monitor.statuses()
        assert status.spent is None


async def test_while_the_ledger_is_away_what_was_spent_stays_so(tmp_path):
    async with Site(tmp_path / "l") as site:
        await site.limit(KWH)
        site.ledger.spend(RESEARCH, NOON_S, 4e6)
        await wait_until(lambda: site.over, within_s=60.0)
        site.ledger.is_away = True
        failures = site.monitor.failures
        await wait_until(lambda: site.monitor.failures >= failures + 3, within_s=60.0)
        assert len(site.over) == 1
        site.world.now_s += DAY_S
        await wait_until(lambda: not site.over, within_s=60.0)


async def test_a_subject_that_an_answer_has_no_room_for_is_asked_for_alone(tmp_path):
    async with Site(tmp_path / "l", rows_most=2) as site:
        for number in range(3):
            site.ledger.spend(OTHER._replace(namespace=f"ns-{number}"), NOON_S, 2.0)
        site.ledger.spend(RESEARCH, NOON_S, 1.0)
        await site.limit(KWH)
        (status,) = await site.monitor.statuses()
        assert status.spent == 1.0


async def test_a_restart_holds_on_without_a_look_and_the_journal_gives_the_same_state(tmp_path):
    journal = MemoryJournal()
    async with Site(tmp_path / "l", journal) as site:
        await site.limit(KWH)
        site.ledger.spend(RESEARCH, NOON_S, 4e6)
        await wait_until(lambda: site.over, within_s=60.0)
        await site.submit("w")
        live = site.world.loop.core.state
        again = type(live)()
        for entry in journal.entries:
            again.apply(event_from_plain(entry.kind, entry.body))
        assert again.digest() == live.digest()
        assert any(entry.kind == "spending_judged" for entry in journal.entries)
    async with Site(tmp_path / "m", journal) as site:
        site.ledger.is_away = True
        assert site.phase("w") is WorkloadPhase.PENDING
        assert (await site.submit("v")).phase is WorkloadPhase.PENDING
        await site.limit(replace(KWH, most=5e6))
        assert site.phase("w") is site.phase("v") is WorkloadPhase.PLACED


async def test_a_limit_that_is_spent_for_long_is_told_of_a_few_times(tmp_path):
    async with Site(tmp_path / "l") as site:
        await site.limit(KWH)
        for _ in range(20):
            site.ledger.spend(RESEARCH, NOON_S, 0.3e6)
            await site.looked()
        told = [entry for entry in site.world.journal.entries if entry.kind == "spending_judged"]
        assert 1 <= len(told) <= 9
        assert isinstance(event_from_plain(told[0].kind, told[0].body), SpendingJudged)


async def test_energy_today_is_what_the_ledger_has_of_the_day_and_a_cost_that_is_not_known_has_no_series(tmp_path):
    clock, ledger, prices = ObjectivesWorld(start_s=float(NOON_S)).clock, Ledger(tmp_path), [None]
    day = EnergyDayMonitor(
        ledger=ledger, prices=lambda: prices[0], every_s=60.0, clock=clock, log=logging.getLogger("test.day")
    )

    def page():
        lines = render_prometheus(day.families()).decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    assert page() == {}
    ledger.spend(RESEARCH, NOON_S - DAY_S, 9e6)
    ledger.spend(RESEARCH, NOON_S, 3e6)
    ledger.spend(OTHER, NOON_S - 3600, 1e6)
    await day.read_day()
    joules = {name: float(value) for name, value in page().items() if "joules" in name}
    assert joules['eelgrid_energy_today_joules{namespace="research",part="active"}'] == 3e6
    assert joules['eelgrid_energy_today_joules{namespace="(unallocated)",part="idle"}'] == 0.0
    assert sum(joules.values()) == 4e6
    # Spent before there were prices.
    assert set(page()) == set(joules)
    prices[0] = PRICES
    assert set(page()) == set(joules)
    ledger.spend(OTHER, NOON_S, 1e6, cost=0.25)
    await day.read_day()
    assert page()['eelgrid_energy_today_cost{currency="EUR"}'] == "0.25"
    assert "eelgrid_energy_today_carbon_grams" not in page()
    # By an offset of 13 hours the day began at 11:00 in UTC, and the hour of 10:00 is of the day before.
    prices[0] = replace(PRICES, utc_offset_minutes=13 * 60)
    ledger.spend(OTHER, NOON_S - 2 * 3600, 7e6)
    await day.read_day()
    assert sum(float(value) for name, value in page().items() if "joules" in name) == 5e6
    ledger.store.close()


def test_saved_energy_of_a_day_begins_anew_at_midnight():
    day, midnight_ns = SavedDay(), (NOON_S + DAY_S // 2) * 10**9
    day.advance(5.0, midnight_ns - 2)
    day.advance(7.0, midnight_ns - 1)
    assert day.saved_j == 7.0
    day.advance(8.0, midnight_ns)
    assert day.saved_j == 1.0
    day.advance(10.5, midnight_ns + DAY_S * 10**9 - 1)
    assert day.saved_j == 3.5
    east = SavedDay()
    east.advance(5.0, midnight_ns - 3600 * 10**9 - 1, utc_offset_minutes=60)
    east.advance(8.0, midnight_ns - 3600 * 10**9, utc_offset_minutes=60)
    assert east.saved_j == 3.0
