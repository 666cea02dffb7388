"""What ticks add between two slow looks, over real ticks of the sampler."""

import pytest

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import NodeSample, Sampler
from eelgrid_agent.energy.metering import COUNTER_REFRESH_S, GAIN_ERROR, EnergyMeasurement, EnergyMeter
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, Gpu, Reading

SECOND = 1_000_000_000
NO = Missing(AbsenceReason.NOT_SUPPORTED)
GPUS = (
    Gpu(uuid="GPU-0", index=0, product="NVIDIA H100 80GB HBM3", model="H100", catalogue_key="h100-sxm5-80gb"),
    Gpu(uuid="GPU-1", index=1, product="x", model="x"),
)


class Meter:
    """A sampler and the metering behind it."""

    def __init__(self):
        self.sampler = Sampler(sample_interval_s=1.0)
        self.metering = EnergyMeter(load_catalogue())

    def tick(self, at_s, *devices, limit_w=NO):
        looks = tuple(
            (
                f"GPU-{index}",
                RawReadings(
                    energy_counter_j=counter,
                    values={
                        Reading.POWER_W: power,
                        Reading.UTILIZATION_RATIO: used,
                        Reading.POWER_LIMIT_W: limit_w,
                    },
                ),
            )
            for index, (counter, power, used) in enumerate(devices)
        )
        now_ns = round(at_s * SECOND)
        look = NodeSample(wall_ns=now_ns + SECOND, monotonic_ns=now_ns, generation=1, gpus=looks, host={})
        self.metering.on_tick(GPUS, looks, self.sampler.observe(look), monotonic_ns=now_ns)

    def take(self):
        return self.metering.pop_energies(uncounted_s=self.sampler.uncounted_by_gpu)


def test_totals_are_the_samplers_and_utilization_is_the_mean_since_the_look_before():
    meter = Meter()
    meter.tick(0, (1000.0, 300.0, 0.0), (NO, 100.0, NO))
    meter.tick(1, (1300.0, 300.0, 1.0), (NO, 200.0, NO))
    found = meter.take()
    assert (found.monotonic_ns, found.wall_ns) == (SECOND, 2 * SECOND)
    assert found.total_j == {"GPU-0": 300.0, "GPU-1": 150.0}
    assert found.utilization == {"GPU-0": 0.5}
    meter.tick(2, (1600.0, 300.0, 0.25), (NO, NO, NO))
    found = meter.take()
    assert found.utilization == {"GPU-0": 0.25}
    # What cannot be had now is not what was had before.
    assert found.total_j == {"GPU-0": 600.0}
    assert meter.take().utilization == {}


def test_the_limit_is_the_highest_since_the_look_before():
    meter = Meter()
    for at_s, limit_w in enumerate((700.0, 250.0, NO)):
        meter.tick(at_s, (300.0 * at_s, 300.0, 1.0), limit_w=limit_w)
    assert meter.take().limits_w == {"GPU-0": 700.0}
    meter.tick(3, (900.0, 300.0, 1.0), limit_w=250.0)
    assert meter.take().limits_w == {"GPU-0": 250.0}
    meter.tick(4, (1200.0, 300.0, 1.0))
    assert meter.take().limits_w == {}


def test_each_device_says_how_its_joules_were_had():
    meter = Meter()
    for at_s in range(11):
        meter.tick(at_s, (300.0 * at_s, 300.0, 1.0), (NO, 100.0 + 50.0 * (at_s % 2), NO))
    found = meter.take().estimates
    assert found["GPU-0"].method is EnergyMeasurement.COUNTER
    assert found["GPU-0"].uncertainty_j == pytest.approx(GAIN_ERROR * 3000.0 + 2 * 300.0 * COUNTER_REFRESH_S)
    assert found["GPU-1"].method is EnergyMeasurement.INTEGRATED
    # Ten steps of 50 W, of which 25 ms of each second were seen.
    assert found["GPU-1"].uncertainty_j == pytest.approx(GAIN_ERROR * 1250.0 + 10**0.5 * 0.975 * 25.0)


def test_a_reset_and_a_gap_are_reported():
    meter = Meter()
    meter.tick(0, (1000.0, 300.0, 1.0), (NO, 100.0, NO))
    meter.tick(1, (1300.0, 300.0, 1.0), (NO, 100.0, NO))
    meter.tick(2, (0.0, 300.0, 1.0), (NO, 100.0, NO))
    meter.tick(100, (29_400.0, 300.0, 1.0), (NO, 100.0, NO))
    meter.tick(101, (29_700.0, 300.0, 1.0), (NO, 100.0, NO))
    found = meter.take()
    assert found.estimates["GPU-0"].method is EnergyMeasurement.MIXED
    assert found.estimates["GPU-0"].uncounted_s == 0.0
    assert found.total_j["GPU-0"] == 300.0 + 300.0 + 29_700.0
    # Nobody measured 98 s of the other.
    assert (found.total_j["GPU-1"], found.estimates["GPU-1"].uncounted_s) == (300.0, 98.0)


def test_devices_that_come_and_go_are_bounded():
    meter = Meter()
    looks = [(f"GPU-x{number}", RawReadings(energy_counter_j=1.0, values={})) for number in range(1000)]
    for number, one in enumerate(looks):
        look = NodeSample(wall_ns=number, monotonic_ns=number, generation=1, gpus=(one,), host={})
        meter.metering.on_tick(GPUS, (one,), meter.sampler.observe(look), monotonic_ns=number)
    assert len(meter.take().total_j) <= 128
