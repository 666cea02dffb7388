"""The bend of power and throughput under a cap, against measured curves and on simulated devices.

Two measured curves stand here, so that they run anywhere; where the published
file is at hand (EELGRID_DATA), all of them are compared.
"""

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.agent import build_simulated_gpu

from eelgrid_agent.simulation.power_curve import (
    AWAKE_POWER_SHARE,
    CLOCK_FLOOR,
    DEFAULT_MEMORY_BOUND_SHARE,
    clock_share,
    power_share,
    throughput_share,
)
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.catalogue.loader import load_catalogue

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
SECOND = 1_000_000_000
# Least power of any trace on the part, and (power, throughput relative to the highest cap) by cap; ResNet-50 on ImageNet.
V100_RESNET = (
    34.8,
    ((98.4, 0.5183), (122.0, 0.694), (144.6, 0.8473), (166.4, 0.9125), (184.9, 0.9497), (205.4, 0.9807), (220.3, 1.0)),
)
# The least cap of an A40 is 100 W: what it draws under it, and what is left of ResNet-50.
A40_AT_100_W = ((108.6, 0.3341), (116.8, 0.3578), (114.7, 0.3397), (116.6, 0.3376), (116.2, 0.3441), (119.0, 0.3439))


def residuals(awake_w: float, points: tuple[tuple[float, float], ...], memory_bound: float) -> list[float]:
    """What the model's throughput is off, point by point."""
    highest_w = points[-1][0]
    found = []
    for power_w, throughput in points:
        above = min(max((power_w - awake_w) / (highest_w - awake_w), 0.0), 1.0)
        clock = max(clock_share(AWAKE_POWER_SHARE + (1.0 - AWAKE_POWER_SHARE) * above), CLOCK_FLOOR)
        found.append(throughput_share(clock, memory_bound) - throughput)
    return found


def fitted(awake_w: float, points: tuple[tuple[float, float], ...]) -> float:
    """The memory share that suits a curve best, in hundredths."""
    shares = (share / 100.0 for share in range(101))
    return min(shares, key=lambda share: sum(off * off for off in residuals(awake_w, points, share)))


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


@given(st.floats(0.0, 1.0))
def test_clock_and_power_are_inverse_and_the_last_of_the_clock_is_the_dearest(clock: float) -> None:
    assert clock_share(power_share(clock)) == pytest.approx(clock, abs=1e-9)
    assert power_share(min(clock + 0.01, 1.0)) >= power_share(clock)
    # Convex: each further step costs at least as much as the one before it.
    if 0.01 <= clock <= 0.99:
        assert power_share(clock + 0.01) - power_share(clock) >= power_share(clock) - power_share(clock - 0.01) - 1e-12


@given(st.floats(CLOCK_FLOOR, 1.0), st.floats(0.0, 1.0))
def test_the_more_a_job_waits_for_memory_the_less_a_lower_clock_costs_it(clock: float, bound: float) -> None:
    assert throughput_share(clock, 0.0) == pytest.approx(clock)
    assert throughput_share(clock, 1.0) == pytest.approx(1.0)
    assert clock - 1e-9 <= throughput_share(clock, bound) <= throughput_share(clock, min(bound + 0.1, 1.0)) + 1e-9


def test_a_measured_curve_is_met_with_its_own_memory_share() -> None:
    awake_w, points = V100_RESNET
    assert root_mean_square(residuals(awake_w, points, fitted(awake_w, points))) < 0.05


def test_the_published_curves_are_met_as_closely_as_the_model_says() -> None:
    path = DATA / "power_curves.json"
    if not path.exists():
        pytest.skip(f"{path} is not here; set EELGRID_DATA to the folder of published data")
    curves = json.loads(path.read_text("utf-8"))["zeus_power_cap"]["curves"]
    assert len(curves) == 218
    awake_w: dict[str, float] = {}
    for curve in curves:
        least_w = min(point["avg_power_w"] for point in curve["points"])
        awake_w[curve["gpu"]] = min(least_w, awake_w.get(curve["gpu"], least_w))
    alike: list[float] = []
    each: list[float] = []
    shares: list[float] = []
    for curve in curves:
        points = tuple((point["avg_power_w"], point["throughput"]) for point in curve["points"])
        least_w = awake_w[curve["gpu"]]
        if points[-1][0] - least_w >= 40.0:
            shares.append(fitted(least_w, points))
            alike += residuals(least_w, points, DEFAULT_MEMORY_BOUND_SHARE)
            each += residuals(least_w, points, shares[-1])
    assert len(shares) == 150
    assert root_mean_square(alike) == pytest.approx(0.055, abs=0.001)
    assert root_mean_square(each) == pytest.approx(0.036, abs=0.001)
    assert median(map(abs, each)) == pytest.approx(0.012, abs=0.001)
    assert sum(share <= 0.6 for share in shares) / len(shares) >= 0.9
    assert median(shares) == pytest.approx(DEFAULT_MEMORY_BOUND_SHARE, abs=0.02)


# On a simulated device


def at_limit(product: str, limit_w: float, **job: float) -> tuple[float, float]:
    """Watts and unthrottled seconds of work in a second, at this limit."""
    gpu = build_simulated_gpu(product)
    gpu.limit_power(limit_w, 0)
    gpu.set_load(GpuLoad(utilization_ratio=1.0, **job), 0)
    return gpu.power_mw / 1000.0, gpu.work_done(SECOND).work_s


@pytest.mark.parametrize("product", ["a100-sxm4-40gb", "h100-sxm5-80gb", "a40", "b200", "l40s"])
def test_a_lower_cap_never_gives_more_and_the_first_watts_off_cost_least(product: str) -> None:
    known = load_catalogue().products[product]
    low, high = known.power_min_w or 100.0, known.power_max_w
    caps_w = [low + (high - low) * step / 20.0 for step in range(21)]
    powers, works = zip(*(at_limit(product, cap_w) for cap_w in caps_w), strict=True)
    assert list(powers) == sorted(powers)
    assert list(works) == sorted(works)
    assert works[-1] == pytest.approx(1.0)
    rises = [after - before for before, after in pairwise(works)]
    # Flat at the top and steep below: the last step gains less than a step in the middle.
    assert rises[-1] < rises[10]
    # The least energy for the work is at a cap well below the highest one, as in every trace.
    energies = [power_w / work for power_w, work in zip(powers, works, strict=True)]
    assert caps_w[energies.index(min(energies))] < 0.85 * high


def test_below_the_floor_a_cap_is_not_held() -> None:
    power_w, work = at_limit("a40", 100.0)
    measured_w, left = zip(*A40_AT_100_W, strict=True)
    assert power_w > 100.0
    assert power_w == pytest.approx(median(measured_w), rel=0.1)
    assert work == pytest.approx(median(left), abs=0.05)


def test_a_job_that_waits_for_memory_loses_less_by_a_cap_and_by_a_lock() -> None:
    _, computing = at_limit("h100-sxm5-80gb", 350.0, memory_bound_ratio=0.0)
    _, waiting = at_limit("h100-sxm5-80gb", 350.0, memory_bound_ratio=0.8)
    assert computing < 0.6 < 0.85 < waiting
    gpu = build_simulated_gpu("h100-sxm5-80gb")
    gpu.set_load(GpuLoad(utilization_ratio=1.0, memory_bound_ratio=0.8), 0)
    free_mw = gpu.power_mw
    gpu.lock_clocks((345, 1200), 0)
    assert gpu.power_mw < 0.6 * free_mw
    assert gpu.work_done(SECOND).work_s > 0.85
