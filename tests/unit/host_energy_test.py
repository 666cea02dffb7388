"""RAPL counters: which zones count, and how wraps and refusals are met."""

import os
from pathlib import Path

import pytest

from eelgrid_agent.devices.host import MachineHost, RaplEnergy, SimulatedHost
from eelgrid_agent.devices.port import Missing
from eelgrid_agent.devices.sampler import SLOW_HOST_READINGS
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Reading

RANGE_UJ = 262_143_328_850
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:1": "package-1",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "dram",
    "intel-rapl:2": "psys",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for zone, name in ZONES.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(name + "\n")
        (tmp_path / zone / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        show(tmp_path, zone, 1_000_000)
    return tmp_path


def show(root: Path, zone: str, energy_uj: int) -> None:
    (root / zone / "energy_uj").write_text(f"{energy_uj}\n")


def test_packages_are_summed_and_nothing_inside_them_counts_twice(root: Path) -> None:
    energy = RaplEnergy(root)
    assert (energy.cpu_j(), energy.memory_j()) == (0.0, 0.0)
    for zone in ZONES:
        show(root, zone, 3_500_000)
    assert (energy.cpu_j(), energy.memory_j()) == (5.0, 2.5)


def test_a_counter_that_wraps_goes_on(root: Path) -> None:
    energy = RaplEnergy(root)
    show(root, "intel-rapl:0", RANGE_UJ - 999_999)
    energy.cpu_j()
    show(root, "intel-rapl:0", RANGE_UJ)
    before_j = energy.cpu_j()
    show(root, "intel-rapl:0", 1_999_999)
    assert not isinstance(before_j, Missing)
    assert energy.cpu_j() == pytest.approx(before_j + 2.0)


def test_no_zone_and_an_unreadable_zone_are_absent_with_the_reason(root: Path, tmp_path: Path) -> None:
    assert RaplEnergy(tmp_path / "none").cpu_j() == Missing(AbsenceReason.NOT_SUPPORTED)
    energy = RaplEnergy(root)
    show(root, "intel-rapl:1", 0)
    (root / "intel-rapl:1" / "energy_uj").write_text("rubbish")
    assert energy.cpu_j() == Missing(AbsenceReason.NOT_SAMPLED)
    (root / "intel-rapl:1" / "energy_uj").chmod(0)
    if os.geteuid() != 0:
        assert energy.cpu_j() == Missing(AbsenceReason.NO_PERMISSION)


def test_this_machine_says_something_of_every_slow_reading(root: Path) -> None:
    found = MachineHost(RaplEnergy(root)).read_slow()
    assert tuple(found) == SLOW_HOST_READINGS
    for reading, value in found.items():
        if not isinstance(value, Missing):
            assert READING_RANGES[reading].low <= value <= READING_RANGES[reading].high


def test_simulated_packages_draw_by_their_load() -> None:
    now_ns = [0]
    load = [0]
    host = SimulatedHost(cpu_milli=96_000, memory_bytes=1, load=lambda: (load[0], 0), monotonic_ns=lambda: now_ns[0])
    now_ns[0] += 10 * 10**9
    assert host.read_slow()[Reading.HOST_CPU_ENERGY_J] == 3 * 15.0 * 10
    load[0] = 33_000
    now_ns[0] += 10**9
    assert host.read_slow()[Reading.HOST_CPU_ENERGY_J] == 450.0 + 2 * 120.0 + 15.0
