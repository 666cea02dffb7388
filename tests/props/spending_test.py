"""Spending limits against naive sums over time: who is over waits, nobody else does, and all goes on afterwards.

Random work, limits, local times, restarts and raised limits, on a clock of ten minutes. The twin has no accounts: it
adds up held GPUs and joules tick by tick from what the core shows.
"""

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_controller.state.spending import judge_limits, limit_statuses, spending_key
from eelgrid_protos import catalogue
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

CATALOGUE = catalogue.load_catalogue()
TICK_S = 600
# Saturday, 28 November 2026, 12:00 UTC: a week and a month end soon.
BEGIN = datetime(2026, 11, 28, 12, tzinfo=UTC)
WHOLE_J = 180_000.0  # of a GPU that is held, in a tick
TEAMS = ("a", "b")

limits_of = st.builds(
    SpendingLimit,
    scope=st.sampled_from([SpendingScope.NAMESPACE, SpendingScope.USER, SpendingScope.QUEUE]),
    name=st.sampled_from(TEAMS),
    quantity=st.sampled_from([SpendingQuantity.GPU_TIME, SpendingQuantity.ENERGY]),
    most=st.integers(1, 60).map(lambda ticks: float(TICK_S * ticks)),
    period=st.sampled_from([one for one in SpendingPeriod if one]),
    mode=st.sampled_from([EnforcementMode.ENFORCE, EnforcementMode.ENFORCE, EnforcementMode.OBSERVE]),
).map(lambda one: one if one.quantity is SpendingQuantity.GPU_TIME else replace(one, most=one.most / TICK_S * WHOLE_J))
limit_lists = st.lists(limits_of, min_size=1, max_size=3, unique_by=spending_key)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 3),
            st.sampled_from([1000, 500]),
            st.sampled_from(TEAMS),
            st.sampled_from(TEAMS),
            st.sampled_from(TEAMS),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("scale"), st.integers(0, 30), st.integers(1, 3)),
        st.tuples(st.just("ticks"), st.integers(1, 12)),
        st.tuples(st.just("ticks"), st.sampled_from([12 * 6, 36 * 6, 24 * 6 + 1])),
        st.tuples(st.just("raise"), st.integers(0, 5)),
        st.tuples(st.just("limits"), limit_lists),
        st.tuples(st.just("restart")),
    ),
    min_size=6,
    max_size=30,
)


def subject(limit, spec):
    return {SpendingScope.NAMESPACE: spec.namespace, SpendingScope.USER: spec.user, SpendingScope.QUEUE: spec.queue}[
        limit.scope
    ]


def begun(period, at, offset_minutes):
    """When the period of a moment began, by datetime's own arithmetic."""
    local = at + timedelta(minutes=offset_minutes)
    day = local.replace(hour=0, minute=0)
    if period is SpendingPeriod.WEEK:
        day -= timedelta(days=day.weekday())
    elif period is SpendingPeriod.MONTH:
        day = day.replace(day=1)
    return day - timedelta(minutes=offset_minutes)


class Twin:
    """A cluster with a clock, and beside it what was held in each tick."""

    def __init__(self, offset_hours):
        self.core = Core(ClusterState(), CATALOGUE)
        self.offset_minutes = 60 * offset_hours
        self.at = BEGIN
        self.journal = []
        # Milli-GPU by tick, of the specifications that held them.
        self.ticks = []

    @property
    def now_ns(self):
        return int(self.at.timestamp()) * 10**9

    def keep(self, step):
        self.journal += [event_to_plain(event) for event in step.events]
        return step.events

    def tick(self):
        held = Counter()
        for one in self.core.state.workloads.values():
            if one.phase is WorkloadPhase.PLACED:
                spec = one.spec
                milli = len(one.placements) * spec.request.gpu_count * spec.request.gpu_milli
                held[spec.namespace, spec.user, spec.queue] += milli
        self.ticks.append((self.at, held))
        self.at += timedelta(seconds=TICK_S)

    def spent(self, limit):
        """Seconds of GPUs, or joules at so many a held GPU, tick by tick."""
        since = begun(limit.period, self.at, self.offset_minutes)
        place = (SpendingScope.NAMESPACE, SpendingScope.USER, SpendingScope.QUEUE).index(limit.scope)
        milli = sum(held[key] for at, held in self.ticks if at >= since for key in held if key[place] == limit.name)
        return milli / 1000.0 * (TICK_S if limit.quantity is SpendingQuantity.GPU_TIME else WHOLE_J)

    def look(self):
        """What the spending monitor does, with a ledger that is the naive sum."""
        core, now_ns = self.core, self.now_ns
        policy, spending = core.state.policy, core.state.spending
        blank = limit_statuses(policy, spending, {}, now_ns)
        told = {
            (spending_key(one.limit), one.stretch): self.spent(one.limit)
            for one in blank
            if one.limit.quantity is SpendingQuantity.ENERGY
        }
        for one in limit_statuses(policy, spending, told, now_ns):
            assert one.spent == self.spent(one.limit), one
        self.keep(core.set_exhausted_spending(judge_limits(policy, spending, told, now_ns), now_ns=now_ns))
        while core.has_backlog:
            self.keep(core.retry(now_ns=now_ns))

    def spenders(self):
        """The enforced limits that are spent, by the naive sum."""
        return [
            one
            for one in self.core.state.policy.spending
            if one.mode is EnforcementMode.ENFORCE and self.spent(one) >= one.most
        ]

    def limit(self, limits):
        core = self.core
        self.keep(core.update_policy(replace(core.state.policy, spending=tuple(limits)), now_ns=self.now_ns))

    def restart(self):
        """From the journal's checkpoint, as after a kill."""
        state = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        assert state.digest() == self.core.state.digest()
        self.core = Core(state, CATALOGUE)

    def do(self, step):
        core = self.core
        live = [key for key, one in core.state.workloads.items() if one.phase is not WorkloadPhase.CANCELLED]
        match step:
            case ("submit", gpus, milli, namespace, user, queue):
                asked = build_request(
                    gpus=gpus if milli == 1000 else 1, milli=milli, namespace=namespace, user=user, queue=queue
                )
                return self.keep(core.submit(asked, now_ns=self.now_ns))
            case ("cancel", number) if live:
                return self.keep(core.cancel(live[number % len(live)], now_ns=self.now_ns))
            case ("scale", number, replicas) if live:
                if core.workload(live[number % len(live)]).phase is WorkloadPhase.PLACED:
                    self.keep(core.scale(live[number % len(live)], replicas, now_ns=self.now_ns))
            case ("ticks", count):
                for number in range(count):
                    self.tick()
                    # A monitor that looks now and then, and at the end.
                    if number % 10 == 0:
                        self.look()
            case ("raise", number) if core.state.policy.spending:
                limits = list(core.state.policy.spending)
                at = number % len(limits)
                limits[at] = replace(limits[at], most=10.0 * limits[at].most)
                self.limit(limits)
            # What had other replicas before is not known of a limit that is set later.
            case ("limits", limits) if not any(one.replicas_begun for one in core.state.workloads.values()):
                self.limit(limits)
            case ("restart",):
                self.restart()
        return ()


@settings(max_examples=60, deadline=None)
@given(limit_lists, st.integers(-12, 14), steps)
def test_who_is_over_a_limit_begins_nothing_and_all_others_do(limits, offset_hours, script):
    twin = Twin(offset_hours)
    core = twin.core
    twin.keep(core.register_node(build_node("a", gpus=4), now_ns=twin.now_ns))
    prices = EnergyPrices(
        periods=(PricePeriod(begins_minute=0, price_per_kwh=0.2),), utc_offset_minutes=twin.offset_minutes
    )
    twin.keep(core.update_policy(replace(core.state.policy, prices=prices, spending=tuple(limits)), now_ns=twin.now_ns))
    for step in script:
        twin.look()
        spenders = twin.spenders()
        began = [event.workload_id for event in twin.do(step) if isinstance(event, WorkloadPlaced)]
        for key in began:
            spec = twin.core.workload(key).spec
            # A command that has just lowered or taken away a limit is looked at next.
            if step[0] in ("submit", "cancel"):
                assert not any(subject(one, spec) == one.name for one in spenders), (key, step)
        twin.look()
        _nothing_waits_idly(twin)
    # Whatever has room ends, until only those wait that a limit holds; a month later nobody is over and they begin.
    while placed := [key for key, one in twin.core.state.workloads.items() if one.phase is WorkloadPhase.PLACED]:
        twin.keep(twin.core.cancel(placed[0], now_ns=twin.now_ns))
        twin.look()
    twin.at += timedelta(days=32)
    twin.look()
    assert twin.spenders() == []
    assert not any(one.reason.startswith("spending:") for one in twin.core.state.workloads.values())
    again = ClusterState()
    for kind, body in json.loads(json.dumps(twin.journal)):
        again.apply(event_from_plain(kind, body))
    assert again.digest() == twin.core.state.digest()
    check_invariants(twin.core.state)


def _nothing_waits_idly(twin):
    """Work waits for a limit only if one of its own is spent; what waits for room would not fit."""
    state, spenders = twin.core.state, twin.spenders()
    free = sum(
        max(0, 1000 - state.nodes["a"].gpu_milli.get(gpu.uuid, 0)) == 1000 for gpu in state.nodes["a"].inventory.gpus
    )
    for one in state.workloads.values():
        if one.phase is WorkloadPhase.PENDING:
            is_over = any(subject(limit, one.spec) == limit.name for limit in spenders)
            assert one.reason.startswith("spending:") is is_over, (one.reason, spenders)
            assert is_over or one.spec.request.gpu_count * (one.spec.request.gpu_milli == 1000) > free or not free
