"""Energy of a known power curve, over resets, gaps, absences and clock steps, is within 1 % of its integral."""

import math

from hypothesis import given
from hypothesis import strategies as st

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import GPU_READINGS, NodeSample, Sampler, build_batch
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import AbsenceReason, NodeEventKind, Reading, SampleBatch

SECOND = 1_000_000_000
BOOT_NS = 1_700_000_000 * SECOND
NO = Missing(AbsenceReason.NOT_SUPPORTED)

step = st.fixed_dictionaries(
    {
        "wait_s": st.one_of(st.floats(0.2, 2.0), st.sampled_from([0.1, 5.0, 9.9, 120.0])),
        "counter": st.sampled_from(["there", "there", "there", "missing", "reset"]),
        "clock_s": st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0]),
    }
)


def power_w(base_w, at_s):
    return base_w * (1.0 + 0.3 * math.sin(at_s / 20.0))


def energy_j(base_w, at_s):
    return base_w * (at_s - 6.0 * (math.cos(at_s / 20.0) - 1.0))


def observe(sampler, at_s, wall_offset_s, power, counter):
    values = {reading: 0.0 for reading in GPU_READINGS if reading is not Reading.ENERGY_J}
    values[Reading.POWER_W] = power
    raw = RawReadings(energy_counter_j=counter, values=values)
    now_ns = round(at_s * SECOND)
    wall_ns = BOOT_NS + now_ns + round(wall_offset_s * SECOND)
    return sampler.observe(
        NodeSample(wall_ns=wall_ns, monotonic_ns=now_ns, generation=1, gpus=(("GPU-0", raw),), host={})
    )


@given(st.floats(10.0, 1000.0), st.floats(0.0, 1e9), st.lists(step, min_size=1, max_size=60))
def test_energy_is_within_one_per_cent_and_never_falls(base_w, counter_start_j, steps):
    """Intervals that nothing could measure are left out of the truth; they must be flagged instead."""
    sampler = Sampler(sample_interval_s=1.0)
    observe(sampler, 0.0, 0.0, power_w(base_w, 0.0), counter_start_j)
    at_s = wall_offset_s = 0.0
    counter_zero_j = -counter_start_j
    truth_j = slack_j = total_j = 0.0
    last_counter_j = counter_start_j
    steps_seen = resets = resets_seen = 0
    for one in steps:
        before_s, at_s = at_s, at_s + one["wait_s"]
        # Power is always read here, so a gap is a wait beyond the bound without a counter across it.
        reset_zero_j = energy_j(base_w, at_s - 0.05)
        # A counter that was reset and has risen past its last value is not to be told from one that was not.
        reset = one["counter"] == "reset" and energy_j(base_w, at_s) - reset_zero_j < last_counter_j
        counter_zero_j = reset_zero_j if reset else counter_zero_j
        counter = NO if one["counter"] == "missing" else energy_j(base_w, at_s) - counter_zero_j
        resets += reset
        last_counter_j = last_counter_j if counter is NO else counter
        wall_offset_s += one["clock_s"]
        seen = observe(sampler, at_s, wall_offset_s, power_w(base_w, at_s), counter)
        interval_j = energy_j(base_w, at_s) - energy_j(base_w, before_s)
        truth_j += interval_j
        steps_seen += sum(event.kind is NodeEventKind.CLOCK_STEP for event in seen.events)
        resets_seen += sum(event.kind is NodeEventKind.COUNTER_RESET for event in seen.events)
        value_j = seen.tick.reading(Reading.ENERGY_J, 0)
        if one["wait_s"] > 10.0 and (reset or counter is NO):
            # Unknown, unless a counter that was not reset covers it later.
            slack_j += interval_j
            assert reset or value_j is None
        if value_j is not None:
            assert value_j >= total_j
            total_j = value_j
            assert truth_j * 0.99 - slack_j - 1e-3 <= total_j <= truth_j * 1.01 + 1e-3
    assert resets_seen == resets
    assert steps_seen == sum(one["clock_s"] != 0.0 for one in steps)
    assert (sampler.uncounted_s > 0.0) == (slack_j > 0.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 100.0),
            st.floats(-1e6, 1e6),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_a_device_says_the_batches_keep_the_contract(steps):
    """Any floats and any clock: time never falls within a batch, energy never falls, and the codec takes it."""
    sampler = Sampler(sample_interval_s=1.0)
    at_s = total_j = 0.0
    batches = []
    for wait_s, wall_offset_s, power, counter in steps:
        at_s += wait_s
        tick = observe(sampler, at_s, wall_offset_s, power, counter).tick
        value_j = tick.reading(Reading.ENERGY_J, 0)
        if value_j is not None:
            assert value_j >= total_j
            total_j = value_j
        if tick.opens_batch or not batches:
            batches.append([])
        batches[-1].append(tick)
    for ticks in batches:
        batch = build_batch(ticks, sequence=1, dropped_ticks=0)
        assert decode_message(SampleBatch, encode_message(batch)) == batch
