"""Spending limits in the core: GPU time that is counted, work that waits and says for what, and what is not touched."""

import json
from dataclasses import replace

import pytest
from tests.builders import partition
from tests.builders.cluster import build_core, build_node, build_request, build_spending_limit, drop_quotes

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import SpendingJudged, WorkloadDeferred, event_to_plain
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory
from eelgrid_controller.state.spending import (
    PeriodBounds,
    describe_moment,
    describe_period,
    format_limit,
    judge_limits,
    limit_statuses,
    period_bounds_at,
    spending_key,
)
from eelgrid_controller.whatif.decision_record import record_decision, replay_decision
from eelgrid_controller.whatif.scenarios import ScenarioContext, ShadowPolicy, run_what_if
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    EnergyPrices,
    EnforcementMode,
    PlaceAnew,
    PricePeriod,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    WhatIfChange,
    WhatIfRequest,
    WorkloadPhase,
)

NS = 10**9
HOUR = 3600 * NS
# 22 November 2026, a Sunday, 12:00 UTC.
NOON_S = 1_795_348_800
NOON = NOON_S * NS
DAY = PeriodBounds(NOON_S - 43_200, NOON_S + 43_200)


def kwh(amount=1.0, **changes):
    """The same on energy."""
    return build_spending_limit(quantity=SpendingQuantity.ENERGY, most=3.6e6 * amount, **changes)


def limited(*limits, gpus=8, **policy) -> Core:
    core = build_core(build_node("a", gpus=gpus))
    core.update_policy(replace(core.state.policy, spending=limits, **policy), now_ns=NOON)
    return core


def look(core, now_ns, told=()):
    """What the spending monitor does."""
    over = judge_limits(core.state.policy, core.state.spending, dict(told), now_ns)
    return core.set_exhausted_spending(over, now_ns=now_ns)


def submit(core, key, now_ns, *, gpus=1, namespace="research", **spec):
    return core.submit(build_request(gpus=gpus, key=key, namespace=namespace, **spec), now_ns=now_ns)


def phase(core, key):
    return core.workload(key).phase


def hours(core, now_ns, number=0):
    """GPU-hours that are spent of a limit."""
    return limit_statuses(core.state.policy, core.state.spending, {}, now_ns)[number].spent / 3600.0


def test_held_gpus_times_hours_are_what_is_spent():
    core = limited(build_spending_limit())
    submit(core, "two", NOON, gpus=2)
    submit(core, "share", NOON + HOUR, milli=250)
    submit(core, "other", NOON, gpus=4, namespace="else")
    core.cancel("two", now_ns=NOON + 2 * HOUR)
    assert hours(core, NOON + 3 * HOUR) == 2 * 2 + 0.25 * 2
    core.cancel("share", now_ns=NOON + 3 * HOUR)
    assert hours(core, NOON + 11 * HOUR) == 4.5
    assert hours(core, NOON + 12 * HOUR) == 0.0


def test_what_is_held_over_midnight_is_cut_there():
    core = limited(build_spending_limit())
    submit(core, "w", NOON, gpus=2)
    assert hours(core, NOON + 13 * HOUR) == 2 * 1
    core.cancel("w", now_ns=NOON + 14 * HOUR)
    assert hours(core, NOON + 15 * HOUR) == 2 * 2


def test_a_limit_of_the_middle_of_a_period_counts_from_its_begin():
    core = build_core(build_node("a", gpus=8))
    submit(core, "ended", NOON - 20 * HOUR, gpus=2)
    core.cancel("ended", now_ns=NOON - 10 * HOUR)
    submit(core, "runs", NOON - HOUR, gpus=1)
    core.update_policy(replace(core.state.policy, spending=(build_spending_limit(),)), now_ns=NOON)
    # Of the day, which began at midnight: two GPUs for two hours, and one for one.
    assert hours(core, NOON) == 2 * 2 + 1
    assert hours(core, NOON + HOUR) == 6


def test_work_waits_for_the_next_period_and_says_so():
    core = limited(build_spending_limit())
    submit(core, "first", NOON, gpus=2)
    assert look(core, NOON + 4 * HOUR).events == ()
    (judged,) = look(core, NOON + 5 * HOUR).events
    assert isinstance(judged, SpendingJudged)
    (*_, deferred) = drop_quotes(submit(core, "second", NOON + 5 * HOUR + 1).events)
    assert isinstance(deferred, WorkloadDeferred)
    assert deferred.reason == "spending: namespace research has spent its GPU-hours of the day"
    told = core.explain_workload("second")
    assert told.constraint == "spending"
    assert told.remedy == (
        "namespace research has spent 10 of 10 GPU-hours of 22 November; it goes on 23 November 00:00, or when "
        "the limit is raised: eelctl policy set --spend 'namespace=research gpu-hours=13 per day'."
    )
    assert look(core, NOON + 12 * HOUR - 1).events != ()
    assert phase(core, "second") is WorkloadPhase.PENDING
    look(core, NOON + 12 * HOUR)
    assert phase(core, "second") is WorkloadPhase.PLACED
    assert phase(core, "first") is WorkloadPhase.PLACED


def test_a_raised_limit_lets_it_begin_at_once_and_one_that_is_taken_away_too():
    for spending in ((build_spending_limit(11.0),), ()):
        core = limited(build_spending_limit())
        submit(core, "first", NOON, gpus=2)
        look(core, NOON + 5 * HOUR)
        submit(core, "second", NOON + 5 * HOUR)
        core.update_policy(replace(core.state.policy, spending=spending), now_ns=NOON + 5 * HOUR + 1)
        assert phase(core, "second") is WorkloadPhase.PLACED


def test_a_limit_that_is_raised_too_little_holds_on():
    core = limited(build_spending_limit())
    submit(core, "first", NOON, gpus=2)
    look(core, NOON + 6 * HOUR)
    submit(core, "second", NOON + 6 * HOUR)
    core.update_policy(replace(core.state.policy, spending=(build_spending_limit(12.0),)), now_ns=NOON + 6 * HOUR + 1)
    assert phase(core, "second") is WorkloadPhase.PENDING


def test_an_observed_limit_holds_nothing_until_it_is_enforced():
    core = limited(build_spending_limit(mode=EnforcementMode.OBSERVE))
    submit(core, "first", NOON, gpus=2)
    assert isinstance(look(core, NOON + 5 * HOUR).events[0], SpendingJudged)
    submit(core, "second", NOON + 5 * HOUR)
    assert phase(core, "second") is WorkloadPhase.PLACED
    core.update_policy(replace(core.state.policy, spending=(build_spending_limit(),)), now_ns=NOON + 5 * HOUR + 1)
    submit(core, "third", NOON + 5 * HOUR + 2)
    assert phase(core, "third") is WorkloadPhase.PENDING


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"namespace": "else"}, False),
        ({"namespace": "else", "user": "ada"}, True),
        ({"namespace": "else", "labels": {"user": "ada"}}, True),
        ({"namespace": "else", "queue": "batch"}, True),
        ({"namespace": "else", "labels": {"team": "vision"}}, True),
        ({"namespace": "else", "labels": {"team": "speech"}}, False),
        ({"gpus": 0}, False),
        ({}, True),
    ],
)
def test_whose_work_waits(changes, waits):
    subjects = (
        {},
        {"scope": SpendingScope.USER, "name": "ada"},
        {"scope": SpendingScope.QUEUE, "name": "batch"},
        {"scope": SpendingScope.LABEL, "label": "team", "name": "vision"},
    )
    limits = tuple(kwh(1.0, **changes) for changes in subjects)
    core = limited(*limits)
    look(core, NOON, {(spending_key(one), DAY): 3.6e6 for one in limits})
    submit(core, "w", NOON + 1, **changes)
    assert (phase(core, "w") is WorkloadPhase.PENDING) is waits


def test_others_of_the_same_request_find_their_room_behind_those_that_wait():
    core = limited(build_spending_limit(), gpus=4)
    submit(core, "all", NOON, gpus=4, namespace="else")
    for number in range(3):
        submit(core, f"held-{number}", NOON + number)
        submit(core, f"free-{number}", NOON + number, namespace="third")
    core.set_exhausted_spending(
        judge_limits(replace(core.state.policy, spending=(build_spending_limit(),)), core.state.spending, {}, NOON),
        now_ns=NOON,
    )
    spent = kwh(1.0)
    core.update_policy(replace(core.state.policy, spending=(spent,)), now_ns=NOON + 5)
    look(core, NOON + 6, {(spending_key(spent), DAY): 4e6})
    assert core.workload("held-0").reason.startswith("spending:")
    assert core.workload("free-0").reason.startswith("gpu_count:")
    core.cancel("all", now_ns=NOON + 7)
    assert {phase(core, f"held-{number}") for number in range(3)} == {WorkloadPhase.PENDING}
    assert {phase(core, f"free-{number}") for number in range(3)} == {WorkloadPhase.PLACED}


def test_running_work_may_grow_over_its_limit():
    core = limited(kwh())
    submit(core, "w", NOON)
    look(core, NOON + 1, {(spending_key(kwh()), DAY): 4e6})
    core.scale("w", 3, now_ns=NOON + 2)
    assert len(core.workload("w").placements) == 3


def test_what_nobody_can_say_stays_as_it_was_until_its_period_ends():
    core = limited(kwh())
    key = spending_key(kwh())
    look(core, NOON, {(key, DAY): 4e6})
    submit(core, "w", NOON + 1)
    assert look(core, NOON + HOUR).events == ()
    assert phase(core, "w") is WorkloadPhase.PENDING
    look(core, NOON + 12 * HOUR)
    assert phase(core, "w") is WorkloadPhase.PLACED


def test_a_spent_limit_is_an_event_at_each_hundredth_and_not_at_each_look():
    core = limited(kwh(100.0))
    key = spending_key(kwh())
    told = [look(core, NOON + at, {(key, DAY): (99.0 + 0.1 * at) * 3.6e6}).events for at in range(61)]
    assert [at for at, events in enumerate(told) if events] == [10, 20, 30, 40, 50, 60]
    (over,) = core.state.spending.over
    assert (over.since_ns, over.spent) == (NOON + 10, pytest.approx(105.0 * 3.6e6))


def test_a_core_that_begins_again_knows_the_same():
    core = limited(build_spending_limit(), kwh())
    submit(core, "first", NOON, gpus=2)
    look(core, NOON + 5 * HOUR, {(spending_key(kwh()), DAY): 1e6})
    state = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert state.digest() == core.state.digest()
    again = Core(state, catalogue.load_catalogue())
    submit(again, "second", NOON + 6 * HOUR)
    assert again.workload("second").reason.startswith("spending:")
    assert hours(again, NOON + 6 * HOUR) == 12


def test_a_held_decision_comes_out_the_same_again():
    core = limited(kwh())
    look(core, NOON, {(spending_key(kwh()), DAY): 4e6})
    before = Checkpoint(core.state.revision, json.loads(json.dumps(core.state.dump())), "")
    step = submit(core, "w", NOON + 1)
    entries = [
        (before.seq + number, JournalEntry(*event_to_plain(event))) for number, event in enumerate(step.events, start=1)
    ]
    document = record_decision(
        JournalHistory(before, tuple(entries)), step.result.spec, "w", catalogue.load_catalogue()
    )
    found = replay_decision(json.loads(json.dumps(document)))
    assert found.differences == ()
    assert found.now["reason"] == "spending: namespace research has spent its kWh of the day"


def test_a_shadow_hears_what_is_spent():
    core = limited(kwh())
    shadow = ShadowPolicy(
        core.state.copy(), core.state.policy, lambda state: Core(state, catalogue.load_catalogue()), now_ns=NOON
    )
    step = look(core, NOON, {(spending_key(kwh()), DAY): 4e6})
    for event in (*step.events, *submit(core, "w", NOON + 1).events):
        shadow.follow_event(event)
    assert phase(shadow.core, "w") is WorkloadPhase.PENDING


def test_a_limit_twice_and_one_on_money_without_prices_are_refused():
    with pytest.raises(InvalidArgument) as twice:
        limited(build_spending_limit(), build_spending_limit(20.0))
    assert [one.field for one in twice.value.violations] == ["policy.spending"]
    with pytest.raises(InvalidArgument) as unpriced:
        limited(build_spending_limit(), build_spending_limit(quantity=SpendingQuantity.MONEY, most=5.0))
    (found,) = unpriced.value.violations
    assert found.field == "policy.spending[1].quantity"
    assert "--prices" in found.remedy


@pytest.mark.parametrize(
    ("period", "offset", "stretch", "words"),
    [
        (SpendingPeriod.DAY, 0, DAY, "22 November"),
        (SpendingPeriod.DAY, 60, PeriodBounds(DAY.begin_s - 3600, DAY.end_s - 3600), "22 November"),
        (SpendingPeriod.DAY, -11 * 60, PeriodBounds(DAY.begin_s + 11 * 3600, DAY.end_s + 11 * 3600), "22 November"),
        # Half an hour early, since hours are whole.
        (SpendingPeriod.DAY, 330, PeriodBounds(DAY.begin_s - 6 * 3600, DAY.end_s - 6 * 3600), "22 November"),
        (SpendingPeriod.WEEK, 0, PeriodBounds(DAY.begin_s - 6 * 86_400, DAY.end_s), "the week of 16 November"),
        (SpendingPeriod.MONTH, 0, PeriodBounds(DAY.begin_s - 21 * 86_400, DAY.end_s + 8 * 86_400), "November"),
    ],
)
def test_periods_are_of_the_calendar_there(period, offset, stretch, words):
    assert period_bounds_at(period, NOON_S, offset) == stretch
    assert (
        period_bounds_at(period, stretch.begin_s, offset)
        == period_bounds_at(period, stretch.end_s - 1, offset)
        == stretch
    )
    assert period_bounds_at(period, stretch.end_s, offset).begin_s == stretch.end_s
    assert describe_period(period, stretch, offset) == words
    assert describe_moment(NOON_S, offset) == f"22 November {12 + offset // 60:02}:{offset % 60:02}"


def test_another_local_time_counts_again_from_the_begin_of_its_period():
    core = limited(build_spending_limit())
    submit(core, "w", NOON - 11 * HOUR, gpus=1)
    prices = EnergyPrices(periods=(PricePeriod(begins_minute=0, price_per_kwh=0.2),), utc_offset_minutes=-180)
    core.update_policy(replace(core.state.policy, prices=prices), now_ns=NOON)
    # The day began at three.
    assert hours(core, NOON) == 9


def test_a_limit_is_written_as_it_is_read():
    assert (
        format_limit(build_spending_limit(2000.0, period=SpendingPeriod.MONTH))
        == "namespace=research gpu-hours=2000 per month"
    )
    team = kwh(
        0.5, scope=SpendingScope.LABEL, label="team", name="vision", warn_ratio=0.9, mode=EnforcementMode.OBSERVE
    )
    assert format_limit(team) == "label:team=vision kwh=0.5 per day, observe, warn at 90%"


def test_work_that_runs_keeps_its_place_where_all_is_imagined_again():
    core = limited(kwh())
    submit(core, "runs", NOON)
    look(core, NOON, {(spending_key(kwh()), DAY): 4e6})
    bench = ScenarioContext(lambda state: Core(state, catalogue.load_catalogue()), catalogue.load_catalogue(), NOON + 1)
    found = run_what_if(core.state.copy(), WhatIfRequest(changes=(WhatIfChange(change=PlaceAnew()),)), bench)
    assert (found.before.pending, found.after.pending) == (0, 0)


def test_a_slice_counts_as_its_share_and_no_plan_has_a_service_that_waits():
    core = partition.build_partitioned_core(partition.build_mig_node("a"))
    spending = (build_spending_limit(name="default"), kwh(name="default"))
    core.update_policy(replace(core.state.policy, spending=spending), now_ns=NOON)
    core.submit(partition.build_sliced_service("s", rate_hz=15.0), now_ns=NOON)
    partition.carry_out_partitions(core, now_ns=NOON)
    milli = sum(one.gpu_instance.gpu_milli for one in core.workload("s").placements)
    assert 0 < milli < 2000
    assert hours(core, NOON + 2 * HOUR) == pytest.approx(2 * milli / 1000)
    look(core, NOON + 2 * HOUR, {(spending_key(spending[1]), DAY): 4e6})
    core.submit(partition.build_sliced_service("late", rate_hz=15.0), now_ns=NOON + 2 * HOUR)
    assert [one.workload.workload_id for one in core.survey_partitions().services] == ["s"]
    assert core.explain_workload("late").constraint == "spending"
    again = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert again.digest() == core.state.digest()
    assert again.spending.spent_gpu_s(spending_key(spending[0]), NOON + 3 * HOUR) == pytest.approx(3 * 3.6 * milli)
