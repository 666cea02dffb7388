"""The promises of the scaler, for any limits, rates and noise."""

import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eelgrid_controller.objectives.services.autoscaler import (
    RESERVE_MOST,
    RESERVE_PERIOD_S,
    RESERVE_STEP,
    LoadObserved,
    RateReserve,
    ReplicaScaler,
    ReplicasReady,
    ScalerPhase,
    ScalerTick,
    ScalingLimits,
    decay_reserve,
    raise_reserve,
)

quiet = settings(deadline=None, max_examples=30)
EACH_HZ = 10.0  # of a replica
EVERY_S = 15.0


def needed(rate_hz):
    return math.ceil(rate_hz / EACH_HZ)


LIMITS = st.builds(
    ScalingLimits,
    least=st.integers(1, 3),
    most=st.just(500),
    start_s=st.sampled_from([0.0, 30.0, 60.0, 120.0]),
    hold_s=st.sampled_from([60.0, 300.0]),
    cool_s=st.sampled_from([15.0, 60.0]),
    stale_after_s=st.just(60.0),
    band=st.sampled_from([0.1, 0.2]),
    rise=st.sampled_from([1.5, 2.0, 4.0]),
    fall=st.sampled_from([0.1, 0.5]),
)
RATES = st.floats(1.0, 2000.0)  # 200 windows are enough for a fall of one replica a minute from 25


def play(scaler, state, rates, *, began_s=0.0, ready=True, **facts):
    """Targets after each window; what was asked for is ready by the next one."""
    targets, at_s = [], began_s
    for rate_hz in rates:
        at_s += EVERY_S
        state, decision = scaler.scale_replicas(state, LoadObserved(at_s, rate_hz, **facts))
        assert decision.replicas == state.target
        assert decision.reason
        targets.append(state.target)
        if ready:
            state, _ = scaler.scale_replicas(state, ReplicasReady(at_s, state.target))
    return state, targets, at_s


@quiet
@given(LIMITS, RATES, st.integers(1, 25))
def test_a_constant_rate_is_reached_and_kept(limits, rate_hz, begun):
    scaler = ReplicaScaler(limits, needed)
    _, targets, _ = play(scaler, scaler.initial_state(begun), [rate_hz] * 200)
    last = targets[-1]
    assert last == targets[-60]
    assert targets[-60:] == [last] * 60
    bounded = min(limits.most, max(limits.least, needed(rate_hz)))
    assert bounded <= last <= min(limits.most, max(limits.least, needed(rate_hz * (1 + limits.band))))


@quiet
@given(LIMITS, RATES, st.integers(1, 25))
def test_it_turns_at_most_once_on_the_way(limits, rate_hz, begun):
    """From above it only falls, from below it rises and then may give back what it rose too far."""
    scaler = ReplicaScaler(limits, needed)
    _, targets, _ = play(scaler, scaler.initial_state(begun), [rate_hz] * 200)
    moves = [b - a for a, b in zip([scaler.initial_state(begun).target, *targets], targets, strict=False) if b != a]
    turns = sum(1 for a, b in itertools.pairwise(moves) if (a > 0) != (b > 0))
    assert turns <= 1
    if moves and moves[0] < 0:
        assert turns == 0


@quiet
@given(LIMITS, st.floats(20.0, 1000.0), st.lists(st.floats(-1.0, 1.0), min_size=200, max_size=200))
def test_noise_within_the_band_settles_once(limits, rate_hz, noise):
    """After the look-back has seen it, a rate that stays within half the band of its mean moves the target rarely.

    The bound: it never rises after it fell, so it is monotone from there on.
    """
    scaler = ReplicaScaler(limits, needed)
    rates = [rate_hz * (1.0 + limits.band / 2.2 * one) for one in noise]
    state, _, at_s = play(scaler, scaler.initial_state(needed(rate_hz)), [rate_hz * (1.0 + limits.band / 2.2)] * 60)
    _, targets, _ = play(scaler, state, rates, began_s=at_s)
    rises = [(a, b) for a, b in itertools.pairwise(targets) if b > a]
    # A forecast adds what the noise scatters by; that is less than a replica in ten, and it is met once.
    assert sum(b - a for a, b in rises) <= max(1, math.ceil(0.1 * needed(rate_hz * (1 + limits.band)))) + 1


@quiet
@given(LIMITS, st.lists(RATES, min_size=1, max_size=30), st.lists(st.floats(61.0, 5000.0), min_size=1, max_size=10))
def test_stale_data_never_takes_away(limits, rates, gaps):
    scaler = ReplicaScaler(limits, needed)
    state, _, at_s = play(scaler, scaler.initial_state(5), rates)
    before = state.target
    for gap_s in gaps:
        at_s += gap_s
        state, decision = scaler.scale_replicas(state, ScalerTick(at_s))
        assert state.phase is ScalerPhase.BLIND
        assert decision.replicas == state.target == before
    # Nor does the first window after it, however low: the look-back begins anew.
    state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 1.0, 0.0))
    assert decision.replicas == before


@quiet
@given(LIMITS, st.floats(1.0, 100.0), st.floats(1.0, 2000.0))
def test_a_step_up_is_reached_within_the_stated_windows(limits, low_hz, high_hz):
    """Each start multiplies by `rise` and adds two: so many starts, and no more, until the need is met."""
    assume(high_hz > low_hz)
    scaler = ReplicaScaler(limits, needed)
    state, _, at_s = play(scaler, scaler.initial_state(needed(low_hz)), [low_hz] * 60)
    starts, reached = 0, state.target
    goal = min(limits.most, max(limits.least, needed(high_hz)))
    while reached < goal:
        reached = math.ceil(limits.rise * reached) + 2
        starts += 1
    windows = 1 + max(0, starts - 1) * max(1, math.ceil(limits.start_s / EVERY_S))
    state, targets, _ = play(scaler, state, [high_hz] * windows, began_s=at_s)
    assert targets[-1] >= goal


@quiet
@given(LIMITS, st.lists(RATES, min_size=2, max_size=60))
def test_changes_are_bounded(limits, rates):
    scaler = ReplicaScaler(limits, needed)
    state = scaler.initial_state(4)
    at_s, fell_s = 0.0, -math.inf
    for rate_hz in rates:
        at_s += EVERY_S
        before = state.target
        state, _ = scaler.scale_replicas(state, LoadObserved(at_s, rate_hz))
        assert limits.least <= state.target <= limits.most
        assert state.target <= math.ceil(limits.rise * before) + 2
        if state.target < before:
            assert before - state.target <= max(1, math.floor(limits.fall * before))
            assert at_s - fell_s >= limits.cool_s
            fell_s = at_s


@quiet
@given(LIMITS, RATES, st.floats(1.0, 1e4), st.floats(0.0, 1.0))
def test_a_queue_that_grows_is_never_answered_by_less(limits, rate_hz, waiting, share):
    """Whatever the arrivals look like: an overloaded server may well report less of them."""
    scaler = ReplicaScaler(limits, needed)
    state, _, at_s = play(scaler, scaler.initial_state(needed(rate_hz)), [rate_hz] * 60)
    before = state.target
    for number in range(40):
        at_s += EVERY_S
        grown = LoadObserved(at_s, rate_hz * share, waiting=waiting * (number + 1), waiting_growth=waiting)
        state, _ = scaler.scale_replicas(state, grown)
        assert state.target >= before
    for _ in range(120):  # as many starts as it takes, and the queue stays
        at_s += EVERY_S
        state, _ = scaler.scale_replicas(
            state, LoadObserved(at_s, rate_hz * share, waiting=waiting * 40, waiting_growth=0.0)
        )
    assert state.target >= min(limits.most, needed(waiting * 40 / limits.drain_s))


@settings(deadline=None, max_examples=10)
@given(LIMITS, st.floats(1.0, 300.0))
def test_no_traffic_ends_at_the_least(limits, rate_hz):
    scaler = ReplicaScaler(limits, needed)
    state, _, at_s = play(scaler, scaler.initial_state(needed(rate_hz)), [rate_hz] * 30)
    _, targets, _ = play(scaler, state, [0.0] * 400, began_s=at_s)
    assert targets[-1] == limits.least


@quiet
@given(
    st.lists(st.floats(1.0, 2.0 * RESERVE_PERIOD_S), min_size=1, max_size=60),
    st.floats(0.0, RESERVE_MOST - RESERVE_STEP),
)
def test_promises_are_broken_at_most_once_a_period_in_the_long_run(gaps_s, kept_by):
    """A load that breaks promises, at whatever times, while the reserve is below `kept_by`, and never from there on."""
    reserve, broken = RateReserve(), 0
    for at_s in itertools.accumulate(gaps_s):
        reserve = decay_reserve(reserve, at_s)
        assert 0.0 <= reserve.share <= RESERVE_MOST
        if reserve.share < kept_by:
            reserve, broken = raise_reserve(reserve, at_s), broken + 1
        assert broken <= kept_by / RESERVE_STEP + 1 + at_s / RESERVE_PERIOD_S + 1e-6
