"""Windows of jobs, answers to limits, and nodes that go and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.objectives.observation import (
    GpuCounters,
    JobMeter,
    NodeLiveness,
    NodeLivenessTracker,
    PendingLimits,
    ProgressReading,
)
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.control_events import (
    LimitConfirmed,
    LimitFailed,
    NodeLeaseExpired,
    NodeLimitReport,
    NodeReachable,
    NodeUnreachable,
    PendingLimit,
)
from eelgrid_protos.messages import ApplyResult, ApplyStatus, PlanApplied

BOTH = frozenset(("a", "b"))


def meter(**changes):
    return JobMeter(BOTH, 0.0, **({"window_s": 30.0, "missed_s": 180.0} | changes))


def gpus(at_s, *, limit_w=300.0, power_w=250.0, offset_s=1000.0):
    """Two GPUs whose nodes' clocks are apart."""
    return {
        "a": GpuCounters(at_s, at_s * power_w, limit_w),
        "b": GpuCounters(at_s + offset_s, 7.0 + at_s * power_w * 0.5, limit_w),
    }


@given(
    st.floats(0.1, 1000.0),
    st.floats(10.0, 1000.0),
    st.lists(st.tuples(st.floats(4.0, 8.0), st.floats(0.0, 3.0)), min_size=12, max_size=40),
)
def test_steady_work_at_steady_power_gives_exact_windows_whenever_it_is_looked_at(rate_hz, power_w, looks):
    one, found, now_s = meter(), [], 0.0
    for gap_s, late_s in looks:
        now_s += gap_s
        seen = one.observe(now_s, ProgressReading(now_s, rate_hz * now_s), gpus(now_s - late_s, power_w=power_w))
        found += [seen] if seen is not None else []
    assert found
    for window in found:
        assert window.time_s >= 30.0
        assert window.limit_w == 300.0
        assert window.work == pytest.approx(rate_hz * window.time_s, rel=1e-6)
        assert window.energy_j == pytest.approx(1.5 * power_w * window.time_s, rel=1e-6)
    assert sum(window.time_s for window in found) <= now_s


def run(one, times, *, rate_hz=2.0, **changes):
    return [
        found
        for at_s in times
        if (found := one.observe(at_s, ProgressReading(at_s, rate_hz * at_s), gpus(at_s, **changes))) is not None
    ]


def test_a_change_of_the_limit_makes_what_was_seen_void():
    one = meter()
    assert run(one, (5.0, 20.0)) == []
    assert run(one, (25.0, 40.0), limit_w=200.0) == []
    (window,) = run(one, (60.0,), limit_w=200.4)
    assert window.time_s == 35.0
    one.restart_window()
    assert run(one, (95.0,), limit_w=200.0) == []


def test_limits_that_differ_and_gpus_that_are_missing_give_no_window():
    one = meter()
    apart = {"a": GpuCounters(0.0, 0.0, 300.0), "b": GpuCounters(0.0, 0.0, 200.0)}
    run(one, (0.0, 20.0))
    assert one.observe(40.0, ProgressReading(40.0, 80.0), apart) is None
    assert one.observe(80.0, ProgressReading(80.0, 160.0), {"a": gpus(80.0)["a"]}) is None
    assert run(one, (90.0, 110.0)) == []
    assert len(run(one, (121.0,))) == 1


def test_counters_that_fell_begin_a_window_again():
    one = meter()
    run(one, (0.0, 20.0))
    assert one.observe(40.0, ProgressReading(40.0, 3.0), gpus(40.0)) is None  # the job began anew from a checkpoint
    found = one.observe(75.0, ProgressReading(75.0, 73.0), gpus(75.0))
    assert (found.work, found.time_s) == (70.0, 35.0)
    reset = {name: look._replace(energy_j=0.0) for name, look in gpus(110.0).items()}
    assert one.observe(110.0, ProgressReading(110.0, 200.0), reset) is None


def test_a_window_ends_where_progress_was_seen_to_move():
    one = meter()
    run(one, (0.0,))
    for at_s in (10.0, 20.0, 30.0, 40.0):
        assert one.observe(at_s, ProgressReading(at_s, 0.0), gpus(at_s)) is None
    assert one.observe(50.0, ProgressReading(44.0, 9.0), gpus(50.0)).time_s == 44.0


def test_what_stays_away_is_reported_by_its_name():
    silent, dark = meter(), meter()
    told = [silent.observe(at_s, None, gpus(at_s)) for at_s in range(0, 400, 10)]
    assert [one for one in told if one] == [MissedWindowReason.NO_PROGRESS] * 2
    told = [dark.observe(at_s, ProgressReading(at_s, at_s), {}) for at_s in range(0, 200, 10)]
    assert [one for one in told if one] == [MissedWindowReason.NO_POWER]


# Answers to limits

GOOD, BAD, WAIT = ApplyStatus.APPLIED, ApplyStatus.REFUSED, ApplyStatus.UNSPECIFIED


def word(epoch, *results, limits=None, age_s=1.0):
    told = tuple(ApplyResult(subject=uuid, status=status, power_limit_w=limit_w) for uuid, status, limit_w in results)
    applied = PlanApplied(epoch=epoch, status=GOOD, results=told)
    return {"n": NodeLimitReport(applied, limits or {}, age_s)}


def asked(number=1, uuids=("a", "b"), limit_w=200.0):
    pending = PendingLimits(confirm_s=60.0)
    pending.add_request(PendingLimit(number, "n", uuids, limit_w, 5, 100.0))
    return pending


def test_all_gpus_must_be_read_back_at_the_plans_epoch():
    pending = asked()
    assert pending.collect_answers(word(4, ("a", GOOD, 200.0), ("b", GOOD, 200.0)), 101.0) == []
    assert pending.collect_answers(word(5, ("a", GOOD, 200.0), ("b", WAIT, 250.0)), 102.0) == []
    assert pending.collect_answers(word(5, ("a", GOOD, 200.0)), 102.5) == []
    assert pending.collect_answers(word(6, ("a", GOOD, 200.0), ("b", GOOD, 201.0)), 103.0) == [
        LimitConfirmed(103.0, 1, 201.0)
    ]
    assert pending.collect_answers(word(6, ("a", GOOD, 200.0), ("b", GOOD, 201.0)), 104.0) == []


def test_a_refusal_fails_at_what_was_read_or_at_nothing():
    assert asked().collect_answers(word(5, ("a", GOOD, 200.0), ("b", BAD, 300.0)), 101.0) == [
        LimitFailed(101.0, 1, 300.0)
    ]
    assert asked().collect_answers(word(5, ("a", GOOD, 200.0), ("b", BAD, None)), 101.0) == [
        LimitFailed(101.0, 1, None)
    ]


def test_sensors_confirm_what_a_lost_answer_would_have():
    there = {"a": 200.0, "b": 200.3}
    assert asked().collect_answers(word(4, limits=there, age_s=20.0), 110.0) == []  # read before it was asked
    assert asked().collect_answers(word(4, limits=there, age_s=2.0), 110.0) == [LimitConfirmed(110.0, 1, 200.3)]
    assert asked().collect_answers(word(4, limits={"a": 200.0}), 110.0) == []
    assert asked().collect_answers({}, 110.0) == []


def test_what_never_comes_has_failed_at_what_sensors_show():
    off = {"a": 200.0, "b": 300.0}
    assert asked().collect_answers(word(4, limits=off), 159.0) == []
    assert asked().collect_answers(word(4, limits=off), 160.0) == [LimitFailed(160.0, 1, 300.0)]
    assert asked().collect_answers(word(4, limits=off, age_s=None), 160.0) == [LimitFailed(160.0, 1, None)]


def test_a_later_number_of_the_same_gpus_replaces_the_earlier():
    pending = asked()
    pending.add_request(PendingLimit(2, "n", ("b",), 150.0, 6, 110.0))
    pending.add_request(PendingLimit(3, "m", ("b",), 150.0, 6, 110.0))
    assert len(pending) == 2
    assert pending.nodes == {"n", "m"}
    pending.forget_node("n")
    assert pending.nodes == {"m"}


# Nodes


def test_a_node_goes_runs_out_of_its_lease_and_comes_back_with_its_limits():
    watched = NodeLivenessTracker(grace_s=10.0)
    up, down, back = NodeLiveness(True, {"j/n": 200.0}), NodeLiveness(False), NodeLiveness(True, None)

    def look(seen, at_s):
        return watched.observe_nodes({"n": seen}, at_s, lease_s=60.0)

    assert look(up, 0.0) == []
    assert look(down, 10.0) == [NodeUnreachable(10.0, "n")]
    assert look(down, 50.0) == []
    assert look(down, 60.0) == [NodeLeaseExpired(60.0, "n")]
    assert look(down, 70.0) == []
    assert look(back, 80.0) == []
    assert look(up, 85.0) == [NodeReachable(85.0, "n", {"j/n": 200.0})]
    assert look(up, 90.0) == []
    look(down, 95.0)
    assert watched.observe_nodes({}, 100.0, lease_s=60.0) == []
