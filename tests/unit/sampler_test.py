"""The sampler: what a look becomes, case by case."""

import math

import pytest

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import GPU_READINGS, NodeSample, Sampler, build_batch
from eelgrid_protos.messages import AbsenceReason, NodeEventKind, Reading

SECOND = 1_000_000_000
BOOT = 1_700_000_000 * SECOND
LOST = Missing(AbsenceReason.GPU_LOST)
NO = Missing(AbsenceReason.NOT_SUPPORTED)


def raw(power=100.0, counter=NO, **others):
    values = {reading: 1.0 for reading in GPU_READINGS if reading is not Reading.ENERGY_J}
    values[Reading.POWER_W] = power
    values.update({Reading[name.upper()]: value for name, value in others.items()})
    return RawReadings(energy_counter_j=counter, values=values)


def lost():
    values = {reading: LOST for reading in GPU_READINGS if reading is not Reading.ENERGY_J}
    return RawReadings(energy_counter_j=LOST, values=values)


def look(at_s, *readings, wall_s=None, generation=1, host=None):
    wall_ns = BOOT + int((at_s if wall_s is None else wall_s) * SECOND)
    gpus = tuple((f"GPU-{index}", reading) for index, reading in enumerate(readings))
    return NodeSample(
        wall_ns=wall_ns, monotonic_ns=int(at_s * SECOND), generation=generation, gpus=gpus, host=host or {}
    )


def run(*looks):
    sampler = Sampler(sample_interval_s=1.0)
    return sampler, [sampler.observe(one) for one in looks]


def energies(observations):
    return [one.tick.reading(Reading.ENERGY_J, 0) for one in observations]


def kinds(observations):
    return [event.kind for one in observations for event in one.events]


def test_a_counter_counts_from_the_first_look():
    _, seen = run(look(0, raw(counter=5000.0)), look(1, raw(counter=5100.0)), look(2, raw(counter=5250.0)))
    assert energies(seen) == [0.0, 100.0, 250.0]
    assert kinds(seen) == []


def test_a_counter_covers_a_gap_of_any_length():
    sampler, seen = run(look(0, raw(counter=0.0)), look(500, raw(counter=50_000.0)))
    assert energies(seen) == [0.0, 50_000.0]
    assert sampler.uncounted_s == 0.0


def test_without_a_counter_power_is_integrated_by_trapezoids():
    _, seen = run(look(0, raw(100.0)), look(1, raw(200.0)), look(3, raw(200.0)))
    assert energies(seen) == [0.0, 150.0, 550.0]


def test_a_gap_too_long_to_integrate_is_left_out_and_flagged():
    sampler, seen = run(look(0, raw(100.0)), look(1, raw(100.0)), look(60, raw(100.0)), look(61, raw(100.0)))
    assert energies(seen) == [0.0, 100.0, None, 200.0]
    column = next(c for c in build_batch([seen[2].tick], sequence=1, dropped_ticks=0).gpu_columns if c.reading == 2)
    assert column.absences[0].reason is AbsenceReason.NOT_SAMPLED
    assert sampler.uncounted_s == 59.0


def test_a_longer_sample_interval_widens_the_bound():
    sampler = Sampler(sample_interval_s=1.0)
    sampler.set_interval(60.0)
    sampler.observe(look(0, raw(100.0)))
    assert sampler.observe(look(60, raw(100.0))).tick.reading(Reading.ENERGY_J, 0) == 6000.0


def test_a_reset_counter_keeps_the_total_and_says_so():
    _, seen = run(
        look(0, raw(counter=900.0)),
        look(1, raw(counter=1000.0)),
        look(2, raw(counter=40.0)),
        look(3, raw(counter=140.0)),
    )
    assert energies(seen) == [0.0, 100.0, 200.0, 300.0]
    assert kinds(seen) == [NodeEventKind.COUNTER_RESET]


def test_after_a_reset_at_least_the_new_counter_is_counted():
    _, seen = run(look(0, raw(NO, counter=900.0)), look(1, raw(NO, counter=70.0)))
    assert energies(seen) == [0.0, 70.0]


def test_a_counter_that_leaps_is_not_believed():
    _, seen = run(look(0, raw(counter=0.0)), look(1, raw(counter=1e9)), look(2, raw(counter=1e9 + 100.0)))
    assert energies(seen) == [0.0, 100.0, 200.0]
    assert kinds(seen) == [NodeEventKind.COUNTER_RESET]


def test_a_counter_that_comes_back_corrects_the_estimate():
    _, seen = run(
        look(0, raw(100.0, counter=0.0)),
        look(1, raw(150.0, counter=NO)),
        look(2, raw(150.0, counter=260.0)),
    )
    assert energies(seen) == [0.0, 125.0, 260.0]


def test_an_estimate_that_was_too_high_waits_for_the_counter():
    _, seen = run(
        look(0, raw(200.0, counter=0.0)), look(1, raw(200.0)), look(2, raw(counter=150.0)), look(3, raw(counter=250.0))
    )
    assert energies(seen) == [0.0, 200.0, 200.0, 250.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 30_000.0])
def test_what_no_sensor_can_mean_is_absent(value):
    _, seen = run(look(0, raw(value, counter=value)))
    tick = seen[0].tick
    assert tick.reading(Reading.POWER_W, 0) is None
    assert (0, AbsenceReason.IMPLAUSIBLE) in tick.gpu_absences
    assert math.isfinite(sum(tick.gpu_values))


def test_a_reading_that_the_device_left_out_is_absent():
    values = {Reading.POWER_W: 50.0}
    _, seen = run(look(0, RawReadings(energy_counter_j=NO, values=values)))
    assert seen[0].tick.reading(Reading.TEMPERATURE_C, 0) is None
    assert seen[0].tick.reading(Reading.POWER_W, 0) == 50.0


def test_a_gpu_is_lost_once_and_returns_once():
    _, seen = run(look(0, raw()), look(1, lost()), look(2, lost()), look(3, raw()), look(4, raw()))
    assert kinds(seen) == [NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED]
    assert seen[1].events[0].gpu_uuid == "GPU-0"
    assert seen[1].tick.reading(Reading.ENERGY_J, 0) is None


def test_a_lost_gpu_that_times_out_has_not_returned():
    late = RawReadings(
        energy_counter_j=Missing(AbsenceReason.TIMED_OUT),
        values=dict.fromkeys((r for r in GPU_READINGS if r is not Reading.ENERGY_J), Missing(AbsenceReason.TIMED_OUT)),
    )
    _, seen = run(look(0, late), look(1, lost()), look(2, late), look(3, raw()))
    assert kinds(seen) == [NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED]


def test_a_gpu_that_left_the_inventory_is_lost_and_its_total_goes_on():
    _, seen = run(
        look(0, raw(counter=0.0)), look(1, raw(counter=100.0)), look(2, generation=2), look(3, raw(counter=300.0))
    )
    assert kinds(seen) == [NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED]
    assert energies([seen[0], seen[1], seen[3]]) == [0.0, 100.0, 300.0]


@pytest.mark.parametrize(("wall_s", "direction"), [(1000.0, "ahead"), (-1000.0, "back")])
def test_a_clock_step_is_reported_and_energy_does_not_mind(wall_s, direction):
    _, seen = run(look(0, raw(100.0)), look(1, raw(100.0), wall_s=1 + wall_s), look(2, raw(100.0), wall_s=2 + wall_s))
    assert kinds(seen) == [NodeEventKind.CLOCK_STEP]
    assert direction in seen[1].events[0].detail
    assert seen[1].tick.opens_batch == (direction == "back")
    assert energies(seen) == [0.0, 100.0, 200.0]


def test_a_small_slip_of_the_clock_holds_the_time():
    _, seen = run(look(0, raw()), look(0.1, raw(), wall_s=-0.05))
    assert seen[1].tick.time_ns == seen[0].tick.time_ns
    assert kinds(seen) == []
    assert not seen[1].tick.opens_batch


def test_a_batch_is_columns_of_whole_ticks():
    host = {Reading.HOST_CPU_UTILIZATION_RATIO: 0.25}
    _, seen = run(look(0, raw(10.0), raw(20.0), host=host), look(1, raw(30.0), lost(), host=host))
    batch = build_batch([one.tick for one in seen], sequence=7, dropped_ticks=3)
    assert not list(batch.violations())
    columns = {column.reading: column for column in batch.gpu_columns}
    assert columns[Reading.POWER_W].values == (10.0, 20.0, 30.0, 0.0)
    assert columns[Reading.POWER_W].absences[0].cells == (3,)
    assert columns[Reading.ENERGY_J].cell(2) == 20.0
    hosts = {column.reading: column for column in batch.host_columns}
    assert hosts[Reading.HOST_CPU_UTILIZATION_RATIO].values == (0.25, 0.25)
    assert hosts[Reading.HOST_MEMORY_USED_BYTES].absences[0].cells == (0, 1)
    assert (batch.sequence, batch.dropped_ticks, batch.inventory_generation) == (7, 3, 1)


def test_a_node_without_gpus_still_ticks():
    _, seen = run(look(0), look(1))
    batch = build_batch([one.tick for one in seen], sequence=1, dropped_ticks=0)
    assert batch.gpu_columns == ()
    assert len(batch.time_ns) == 2
    assert not list(batch.violations())
