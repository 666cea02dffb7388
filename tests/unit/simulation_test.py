"""The simulated device against arithmetic done by hand."""

import math
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.agent import build_simulated_gpu

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.power_curve import PowerSignal
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice, NodeSpec, SpecError
from eelgrid_protos.catalogue.loader import load_catalogue

MS = 1_000_000
SECOND = 1_000_000_000


def make_node(clock: list[int], *gpus: GpuSpec, seed: int = 1, name: str = "n") -> SimulatedNode:
    spec = NodeSpec(node_name=name, cpu_milli=1000, memory_bytes=2**30, gpus=gpus)
    return SimulatedNode(spec, monotonic_ns=lambda: clock[0], seed=seed)


def test_energy_is_the_integral_of_the_load() -> None:
    gpu = build_simulated_gpu("openb-g2")  # 30 W idle, 150 W busy
    gpu.set_load(GpuLoad(utilization_ratio=1.0), 10 * SECOND)
    gpu.set_load(GpuLoad(utilization_ratio=0.25), 70 * SECOND)
    gpu.set_load(GpuLoad(), 100 * SECOND)
    joules = 30 * 10 + 150 * 60 + 60 * 30 + 30 * 3600
    assert gpu.energy_mj(3700 * SECOND) == joules * 1000
    assert gpu.energy_pj(3700 * SECOND) == joules * 10**12


CHANGES = st.lists(st.tuples(st.integers(0, 700_000), st.integers(0, 400 * MS)), max_size=30)


@given(first=st.integers(0, 700_000), changes=CHANGES, after=st.integers(0, 3 * SECOND), window=st.integers(1, SECOND))
def test_energy_is_exact_and_the_mean_is_the_integral_over_the_window(
    first: int, changes: list[tuple[int, int]], after: int, window: int
) -> None:
    signal, now, pieces = PowerSignal(first, 0), 0, [(first, 0)]
    for level, wait in changes:
        now += wait
        signal.set_level(level, now)
        # What held at the beginning is taken to have held before it.
        pieces = [*pieces, (level, now)] if now else [(level, 0)]
    now += after

    def energy(since: int, until: int) -> int:
        ends = [start for _, start in pieces[1:]] + [max(now, until)]
        starts = [-(10**18)] + [start for _, start in pieces[1:]]
        return sum(
            level * max(0, min(end, until) - max(start, since))
            for (level, _), start, end in zip(pieces, starts, ends, strict=True)
        )

    assert signal.energy_pj(now) == energy(0, now)
    assert signal.mean_mw(now - window, now) == pytest.approx(energy(now - window, now) / window)


def test_a_long_life_loses_no_millijoule() -> None:
    signal, energy = PowerSignal(1, 0), 0
    for tick in range(20_000):
        energy += signal.level_mw * MS
        signal.set_level(100_000 + tick % 7, (tick + 1) * MS)
    assert signal.energy_pj(20_000 * MS) == energy
    assert len(signal._starts_ns) <= 2049


@pytest.mark.parametrize(
    ("product", "instant_after_ms", "usage_after_ms"),
    [("h100-sxm5-80gb", 200, 1100), ("a100-sxm4-40gb", 200, 200), ("v100-sxm2-16gb", 40, 40), ("t4", 200, 200)],
)
def test_a_sensor_sees_a_step_after_its_window_and_not_before(
    product: str, instant_after_ms: int, usage_after_ms: int
) -> None:
    gpu = build_simulated_gpu(product)
    idle = gpu.power_mw
    gpu.set_load(GpuLoad(utilization_ratio=1.0), 5 * SECOND + MS)
    busy = gpu.power_mw
    assert gpu.power_instant_mw(5 * SECOND + 2 * MS) == gpu.power_usage_mw(5 * SECOND + 2 * MS) == idle
    assert gpu.power_instant_mw(5 * SECOND + instant_after_ms * MS) == busy
    assert gpu.power_usage_mw(5 * SECOND + usage_after_ms * MS) == busy


@given(
    product=st.sampled_from(["h100-sxm5-80gb", "a100-sxm4-40gb", "v100-sxm2-16gb", "t4", "l40s", "b200"]),
    gain=st.floats(0.9, 1.1),
    offset_w=st.floats(-5.0, 5.0),
    phase_ns=st.integers(0, 100 * MS - 1),
    steps=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 700 * MS)), max_size=12),
    after=st.integers(0, 1500 * MS),
)
def test_a_sensor_is_the_mean_over_its_window_at_its_last_tick_with_gain_and_offset(
    product: str, gain: float, offset_w: float, phase_ns: int, steps: list[tuple[float, int]], after: int
) -> None:
    """The reading is held between ticks; ticks come each period, at a phase of the device's own."""
    known = load_catalogue().products[product]
    spec = GpuSpec(product=product, sensor_gain=gain, sensor_offset_w=offset_w)
    gpu, now = SimGpu(spec, known, uuid=UUID(int=phase_ns), index=0, now_ns=0), 3 * SECOND
    changes = [(0, gpu.power_mw)]
    for ratio, wait in steps:
        now += wait
        gpu.set_load(GpuLoad(utilization_ratio=ratio), now)
        changes.append((now, gpu.power_mw))
    now += after
    for sensor, told_mw in (
        (known.sensor.instant, gpu.power_instant_mw(now)),
        (known.sensor.usage, gpu.power_usage_mw(now)),
    ):
        tick = now - (now - phase_ns) % (sensor.period_ms * MS)
        begin = tick - sensor.window_ms * MS
        ends = [start for start, _ in changes[1:]] + [now]
        energy = sum(
            level * max(0, min(end, tick) - max(start, begin))
            for (start, level), end in zip(changes, ends, strict=True)
        )
        mean_mw = energy / (sensor.window_ms * MS)
        assert told_mw == pytest.approx(max(0.0, mean_mw * gain + offset_w * 1000.0), abs=1.0)


def test_an_averaged_sensor_passes_through_the_middle() -> None:
    gpu = build_simulated_gpu("h100-sxm5-80gb")
    idle = gpu.power_mw
    gpu.set_load(GpuLoad(utilization_ratio=1.0), 5 * SECOND)
    assert gpu.power_usage_mw(5 * SECOND + 500 * MS) == (idle + gpu.power_mw) // 2
    assert gpu.power_instant_mw(5 * SECOND + 500 * MS) == gpu.power_mw


def test_a_sensor_reads_wrong_by_its_gain_and_offset_and_the_energy_does_not() -> None:
    gpu = build_simulated_gpu("openb-g2", sensor_gain=0.954, sensor_offset_w=-1.18)
    assert gpu.power_instant_mw(SECOND) == round(30_000 * 0.954 - 1180)
    assert gpu.energy_mj(SECOND) == 30_000


def test_a_limit_clamps_power_and_clock_and_says_so() -> None:
    gpu = build_simulated_gpu("a100-sxm4-40gb")
    gpu.set_load(GpuLoad(utilization_ratio=1.0), 0)
    assert (gpu.power_mw, gpu.sm_clock_mhz, gpu.event_reasons) == (400_000, 1410, 0)
    gpu.limit_power(200.0, SECOND)
    assert (gpu.power_mw, gpu.limit_mw, gpu.event_reasons) == (200_000, 200_000, 4)
    assert 210 < gpu.sm_clock_mhz < 1410
    assert (1410 - gpu.sm_clock_mhz) % 15 == 0
    gpu.set_load(GpuLoad(utilization_ratio=0.2), 2 * SECOND)
    assert (gpu.event_reasons, gpu.sm_clock_mhz) == (0, 1410)
    gpu.limit_power(None, 3 * SECOND)
    assert gpu.limit_mw == 400_000
    with pytest.raises(SpecError, match=r"401 W is not in \[100, 400\]"):
        gpu.limit_power(401.0, 4 * SECOND)


def test_mig_keeps_the_clock_up_and_the_idle_watts_with_it() -> None:
    off, on = build_simulated_gpu("a100-sxm4-40gb"), build_simulated_gpu("a100-sxm4-40gb", mig=())
    assert (off.power_mw, off.sm_clock_mhz, off.percents) == (49_700, 210, (0, 0))
    assert (on.power_mw, on.sm_clock_mhz, on.percents) == (66_900, 1410, None)


def test_temperature_follows_power_with_a_lag_of_20_seconds() -> None:
    gpu = build_simulated_gpu("openb-g2")
    cold, hot = 28 + 45 * 30 / 150, 28 + 45.0
    assert gpu.temperature_c(100 * SECOND) == round(cold)
    gpu.set_load(GpuLoad(utilization_ratio=1.0), 100 * SECOND)
    for seconds in (0, 5, 20, 60, 600):
        expected = hot + (cold - hot) * math.exp(-seconds / 20)
        assert gpu.temperature_c((100 + seconds) * SECOND) == round(expected)


def test_a_lost_device_drops_its_work() -> None:
    gpu = build_simulated_gpu("openb-g2")
    gpu.set_load(GpuLoad(utilization_ratio=1.0, memory_bytes=5), 0)
    gpu.lose(SECOND)
    gpu.set_load(GpuLoad(utilization_ratio=1.0, memory_bytes=5), SECOND)
    assert (gpu.power_mw, gpu.memory_used_bytes) == (30_000, 0)
    gpu.restore(2 * SECOND)
    assert gpu.energy_mj(3 * SECOND) == 30_000
    assert gpu.energy_pj(3 * SECOND) == (150 + 30 + 30) * 10**12


def test_identities_depend_on_seed_name_and_index_alone() -> None:
    clock, g2 = [0], GpuSpec(product="openb-g2")
    uuids = [
        [gpu.uuid for gpu in make_node(clock, g2, g2, seed=seed, name=name).gpus()]
        for seed, name in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    ]
    assert uuids[0] == uuids[1]
    assert len({uuid for row in uuids[1:] for uuid in row}) == 6


def test_a_span_keeps_its_mig_uuid_whatever_else_is_there() -> None:
    one = GpuSpec(product="a100-sxm4-40gb", mig=(MigSlice(profile="3g", start=4),))
    two = GpuSpec(product="a100-sxm4-40gb", mig=(MigSlice(profile="1g", start=0), MigSlice(profile="3g", start=4)))
    first, second = (make_node([0], spec).gpus()[0].gpu_instances for spec in (one, two))
    assert first[0] == second[0]


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (GpuSpec(product="h900"), r"gpus\[0\].product: is 'h900', which is no known GPU model"),
        (GpuSpec(product="t4", mig=()), r"gpus\[0\].mig: t4 has no MIG"),
        (GpuSpec(product="a30", mig=(MigSlice(profile="3g", start=0),)), "has no profile '3g'"),
        (GpuSpec(product="a30", mig=(MigSlice(profile="2g", start=1),)), "cannot start at 1"),
        (GpuSpec(product="a30", mig=(MigSlice(profile="2g", start=0, compute_slices=(2, 1)),)), "do not fit"),
        (GpuSpec(product="a30", mig=(MigSlice(profile="4g", start=0, compute_slices=(3,)),)), "do not fit"),
        (GpuSpec(product="t4", model="T 4"), r"gpus\[0\].model: 'T 4' is not a name"),
    ],
)
def test_an_impossible_machine_is_refused(gpu: GpuSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_node([0], gpu)


@pytest.mark.parametrize(("load_", "memory"), [(1.01, 0), (-0.1, 0), (math.nan, 0), (0.5, -1)])
def test_an_impossible_load_is_refused(load_: float, memory: int) -> None:
    with pytest.raises(SpecError):
        GpuLoad(utilization_ratio=load_, memory_bytes=memory)


def test_a_hung_device_makes_its_caller_wait() -> None:
    stalls = []
    spec = NodeSpec(node_name="n", cpu_milli=1, memory_bytes=1, gpus=(GpuSpec(product="t4"),))
    node = SimulatedNode(spec, monotonic_ns=lambda: 0, seed=1, stall=lambda: stalls.append(1))
    uuid = node.gpus()[0].uuid
    node.read(uuid)
    assert not stalls
    node.faults.hang_gpu(uuid)
    node.read(uuid)
    assert stalls == [1]
